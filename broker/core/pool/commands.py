"""The commands of transactions: sent until they are answered, asked for again until they have ended, and journalled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from broker.core.pool.events import SchedulerCommand, SchedulerSettings, SendCommand
from broker.core.pool.transaction import Change, Operation, Transaction, Victim
from subjects import messages as m
from subjects.ids import DeploymentKey, DeviceId, OperationId, ReplicaId, WorkerId


class Orders:
    """All commands under way, each with its own operation id under the leader's epoch."""

    def __init__(self, settings: SchedulerSettings, out: list[SchedulerCommand]) -> None:
        """What is sent is appended to ``out``."""
        self._settings = settings
        self._out = out
        self._begun = 0
        self._operations: dict[OperationId, Operation] = {}
        self._journal: list[m.JournalEntry] = []
        self.epoch = 0
        self.unix_offset_s = 0.0
        """Added to the scheduler's clock it gives wall-clock time, for the journal."""
        self.measures: Callable[[m.ModelRecord, WorkerId, DeviceId], bool] = lambda _record, _worker, _device: False
        """Whether costs are to be measured where a model is loaded."""

    def lead(self, epoch: int) -> None:
        """Starts over under an epoch of our own."""
        self.epoch = epoch
        self._operations.clear()
        self._journal.clear()

    def find(self, operation: OperationId) -> Operation | None:
        """A command that has not ended."""
        return self._operations.get(operation)

    def running(self) -> list[Operation]:
        """All that have not ended, oldest first."""
        return list(self._operations.values())

    # ----------------------------------------------------------------------------------------------------------- sending

    def drain(self, now_s: float, transaction: Transaction, replica: ReplicaId) -> None:
        """No new requests for a replica; the running ones have the transaction's time."""
        command = m.DrainReplica(
            operation=self._next(),
            epoch=self.epoch,
            reason=transaction.reason,
            replica=replica,
            timeout_s=transaction.drain_s,
        )
        self._send(now_s, transaction, command, replica, transaction.drain_s + self._settings.step_grace_s)

    def unload(self, now_s: float, transaction: Transaction, victim: Victim) -> None:
        """Ends a replica's process; by force when it did not drain, or was asked before."""
        victim.unloads += 1
        command = m.UnloadReplica(
            operation=self._next(),
            epoch=self.epoch,
            reason=transaction.reason,
            replica=victim.replica,
            force=victim.forced or victim.unloads > 1,
        )
        self._send(now_s, transaction, command, victim.replica, self._settings.unload_s_max)

    def load(self, now_s: float, transaction: Transaction, record: m.ModelRecord) -> None:
        """Starts the newcomer on all its devices."""
        command = m.LoadModel(
            operation=self._next(),
            epoch=self.epoch,
            reason=transaction.reason,
            device=transaction.device,
            record=record,
            replica_name=transaction.replica_name,
            timeout_s=self._settings.load_s_max,
            peers=transaction.devices[1:],
            measure=self.measures(record, transaction.worker, transaction.device),
        )
        self._send(now_s, transaction, command, None, self._settings.load_s_max + self._settings.step_grace_s)

    def change(self, now_s: float, transaction: Transaction, change: Change) -> None:
        """Gives a replica another KV budget or concurrency."""
        operation, epoch, reason = self._next(), self.epoch, transaction.reason
        command: m.WorkerCommand
        if change.kv_bytes is not None:
            command = m.ResizeKv(
                operation=operation, epoch=epoch, reason=reason, replica=change.replica, kv_bytes=change.kv_bytes
            )
        else:
            assert change.slots is not None, "a change is one of the two"
            command = m.SetConcurrency(
                operation=operation, epoch=epoch, reason=reason, replica=change.replica, slots=change.slots
            )
        self._send(now_s, transaction, command, None, self._settings.change_s_max)

    def ask_kv(self, now_s: float, transaction: Transaction, order: m.KvOrder, operation: OperationId | None) -> None:
        """Asks a worker's KV node; under the id of an earlier leader's command where that may have been heard."""
        operation, epoch, reason = operation or self._next(), self.epoch, transaction.reason
        command: m.WorkerCommand
        if order.source is None:
            command = m.EvictKv(
                operation=operation,
                epoch=epoch,
                reason=reason,
                ratio=order.ratio,
                kv_signature=order.kv_signature,
                timeout_s=order.timeout_s,
            )
        else:
            command = m.MigrateKv(
                operation=operation,
                epoch=epoch,
                reason=reason,
                source_worker=order.source,
                kv_signature=order.kv_signature,
                timeout_s=order.timeout_s,
            )
        self._send(now_s, transaction, command, None, order.timeout_s + self._settings.step_grace_s)

    def again(self, now_s: float, operation: Operation) -> None:
        """Sends a command once more, under its own id."""
        operation.sends += not operation.answered
        operation.sent_s = now_s
        self._out.append(SendCommand(operation.worker, operation.command, self._settings.answer_s_max))

    def _next(self) -> OperationId:
        self._begun += 1
        return OperationId(f"op-{self.epoch}-{self._begun}")

    def _send(
        self,
        now_s: float,
        transaction: Transaction,
        command: m.WorkerCommand,
        victim: ReplicaId | None,
        limit_s: float,
    ) -> None:
        self._operations[command.operation] = Operation(
            operation=command.operation,
            transaction=transaction.number,
            worker=transaction.worker,
            command=command,
            victim=victim,
            begun_s=now_s,
            deadline_s=now_s + limit_s,
            sent_s=now_s,
        )
        self._journal.append(
            m.StepSent(
                transaction=transaction.name,
                operation=command.operation,
                worker=transaction.worker,
                at_unix_s=now_s + self.unix_offset_s,
                command=command,
            )
        )
        self._out.append(SendCommand(transaction.worker, command, self._settings.answer_s_max))

    # -------------------------------------------------------------------------------------------------------------- ends

    def ended(self, now_s: float, transaction: Transaction, operation: Operation, failure: str, detail: str = "") -> None:
        """The end of one command; ``failure`` is empty when it did what it should, ``detail`` says what that was."""
        del self._operations[operation.operation]
        self._journal.append(
            m.StepEnded(
                transaction=transaction.name,
                operation=operation.operation,
                at_unix_s=now_s + self.unix_offset_s,
                failure=failure,
                detail=detail,
            )
        )

    def victim_gone(self, now_s: float, transaction: Transaction, victim: ReplicaId) -> None:
        """What was asked of a replica that has left has ended with it."""
        for operation in self.running():
            if operation.victim == victim and operation.transaction == transaction.number:
                self.ended(now_s, transaction, operation, "")

    # ----------------------------------------------------------------------------------------------------------- journal

    def begin(
        self,
        now_s: float,
        transaction: Transaction,
        replicas: Sequence[ReplicaId],
        deployments: Sequence[DeploymentKey],
        *,
        forced: bool,
    ) -> None:
        """Writes that a transaction began, with all that a successor needs to finish it."""
        change = transaction.change
        self._journal.append(
            m.TransactionBegan(
                transaction=transaction.name,
                kind=transaction.kind.value,
                at_unix_s=now_s + self.unix_offset_s,
                reason=transaction.reason,
                worker=transaction.worker,
                devices=transaction.devices,
                record=transaction.record,
                replica_name=transaction.replica_name,
                replicas=tuple(replicas),
                deployments=tuple(deployments),
                forced=forced,
                drain_s=transaction.drain_s,
                kv_bytes=change.kv_bytes if change is not None else None,
                slots=change.slots if change is not None else None,
                kv=transaction.kv,
            )
        )

    def over(self, now_s: float, transaction: Transaction, failure: str) -> None:
        """Forgets the commands of a transaction, and writes its end."""
        for operation in self.running():
            if operation.transaction == transaction.number:
                del self._operations[operation.operation]
        self.close(now_s, transaction.name, failure)

    def close(self, now_s: float, name: str, failure: str) -> None:
        """Writes the end of a transaction."""
        self._journal.append(m.TransactionEnded(transaction=name, at_unix_s=now_s + self.unix_offset_s, failure=failure))

    def take_journal(self) -> tuple[m.JournalEntry, ...]:
        """What there is to append since the last call, in order."""
        journal, self._journal = self._journal, []
        return tuple(journal)
