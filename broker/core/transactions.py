"""The table of running transactions: what each step is, who must answer, until when, and what follows.

A *placement* is: reserve the room, drain the victims, unload them, load the newcomer (its agent warms and verifies it),
open. A *retirement* is the first half alone. Each step is a command with its own operation id under the leader's epoch.

========== ========================================= =================================================================
stage      waits for                                 ends in
========== ========================================= =================================================================
LEAVING    every victim drained, then unloaded       WAITING (placement) or DONE (retirement)
WAITING    the device: loads are serial, room free   LOADING, or ABORTED when nobody waits any more or time is up
LOADING    the agent's word, or the replica in ready DONE or ABORTED
========== ========================================= =================================================================

A drain cannot be taken back, since an agent knows no such command. So a step that fails is compensated forwards: a victim
that was already sent away is loaded again when somebody wants it (the policy does that, see ``placement``). A drain that
fails or overruns its bound is followed by a forced unload: its requests continue elsewhere. A lost answer or event is no
failure: a command is sent again under the same operation id, and a report that shows the result counts as the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from broker.core.pool import Pool, Replica, Reservation, Worker
from broker.core.scheduler_events import Placement, SchedulerCommand, SchedulerSettings, SendCommand
from subjects.ids import DeviceId, ModelHash, OperationId, ReplicaId, WorkerId, base_name
from subjects.messages import (
    CommandOutcome,
    CommandReply,
    DrainReplica,
    LoadModel,
    ModelRecord,
    OperationEnded,
    ReplicaState,
    UnloadReplica,
    WorkerCommand,
)


class Stage(Enum):
    """Where a transaction is."""

    LEAVING = "leaving"
    WAITING = "waiting"
    LOADING = "loading"
    DONE = "done"
    ABORTED = "aborted"


TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    Stage.LEAVING: frozenset({Stage.WAITING, Stage.DONE, Stage.ABORTED}),
    Stage.WAITING: frozenset({Stage.LOADING, Stage.ABORTED}),
    Stage.LOADING: frozenset({Stage.DONE, Stage.ABORTED}),
    Stage.DONE: frozenset(),
    Stage.ABORTED: frozenset(),
}


class Fault(Enum):
    """Why a transaction aborted."""

    NONE = "none"
    MODEL = "model"
    """The load failed: the model backs off."""
    PLACE = "place"
    """The worker died, refused or did not answer: no fault of the model."""
    UNWANTED = "unwanted"
    """Nobody waits any more."""


@dataclass(slots=True)
class Operation:
    """One command on its way: sent until it is answered, asked for again until it has ended."""

    operation: OperationId
    transaction: int
    worker: WorkerId
    command: WorkerCommand
    victim: ReplicaId | None
    begun_s: float
    deadline_s: float
    sent_s: float
    sends: int = 1
    answered: bool = False


@dataclass(slots=True)
class Victim:
    """A replica that leaves. ``unloads`` counts unload commands; the second and later ones are forced."""

    replica: ReplicaId
    model_hash: ModelHash
    drained: bool = False
    forced: bool = False
    unloads: int = 0
    not_before_s: float = 0.0
    gone: bool = False
    begun_s: float = 0.0
    gone_s: float = 0.0


@dataclass(slots=True)
class Transaction:
    """One scale action. ``record`` is None for a retirement."""

    number: int
    worker: WorkerId
    device: DeviceId
    reason: str
    begun_s: float
    stage_s: float
    record: ModelRecord | None = None
    replica_name: str = ""
    restores: bool = False
    victims: dict[ReplicaId, Victim] = field(default_factory=dict)
    stage: Stage = Stage.LEAVING
    fault: Fault = Fault.NONE
    failure: str = ""
    load_begun_s: float = 0.0
    took_s: float = 0.0
    replica: ReplicaId | None = None
    """The newcomer, once it is listed or named by its agent."""
    overran: bool = False
    """A victim did not finish its requests within the bound."""

    def move(self, now_s: float, stage: Stage) -> None:
        assert stage in TRANSITIONS[self.stage], f"transaction {self.number}: {self.stage} to {stage}"
        self.stage = stage
        self.stage_s = now_s


class Transactions:
    """All running ones. Methods append the commands to send to ``out``; what has ended is handed over by :meth:`ended`."""

    def __init__(self, settings: SchedulerSettings, pool: Pool) -> None:
        self._settings = settings
        self._pool = pool
        self._epoch = 0
        self._operations_begun = 0
        self._begun = 0
        self._operations: dict[OperationId, Operation] = {}
        self._ended: list[Transaction] = []
        self.running: dict[int, Transaction] = {}

    def lead(self, epoch: int) -> None:
        """Starts over under an epoch of our own; what agents still do for others shows in their reports."""
        self._epoch = epoch
        self._operations.clear()
        self._ended.clear()
        self.running.clear()
        self._pool.forget_all_plans()

    def ended(self) -> list[Transaction]:
        """Those that have ended since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended

    def has_operation(self, operation: OperationId) -> bool:
        """Whether an operation is one of ours and still runs."""
        return operation in self._operations

    # ----------------------------------------------------------------------------------------------------- beginning

    def place(
        self, now_s: float, placement: Placement, record: ModelRecord, *, restores: bool, out: list[SchedulerCommand]
    ) -> Transaction:
        """Reserves the room and begins to drain the victims."""
        transaction = self._begin(now_s, placement.worker, placement.device, placement.reason)
        transaction.record = record
        transaction.restores = restores
        slug = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in record.name)[:24]
        transaction.replica_name = f"{slug}-{self._epoch}-{transaction.number}"
        self._pool.reserve(
            Reservation(placement.worker, placement.device, transaction.replica_name, record.model_hash, record.budget_bytes)
        )
        self._send_away(now_s, transaction, placement.victims, forced=False, out=out)
        self._advance(now_s, transaction)
        return transaction

    def retire(
        self, now_s: float, replica: Replica, reason: str, *, forced: bool, out: list[SchedulerCommand]
    ) -> Transaction:
        """Drains (unless ``forced``) and unloads one replica."""
        transaction = self._begin(now_s, replica.worker, replica.report.device, reason)
        self._send_away(now_s, transaction, (replica.replica,), forced=forced, out=out)
        return transaction

    def _begin(self, now_s: float, worker: WorkerId, device: DeviceId, reason: str) -> Transaction:
        self._begun += 1
        transaction = Transaction(self._begun, worker, device, reason, now_s, now_s)
        self.running[transaction.number] = transaction
        return transaction

    def _send_away(
        self,
        now_s: float,
        transaction: Transaction,
        victims: tuple[ReplicaId, ...],
        *,
        forced: bool,
        out: list[SchedulerCommand],
    ) -> None:
        for replica in victims:
            self._pool.leave(replica)
            model_hash = self._pool.replicas[replica].report.model_hash
            victim = Victim(replica, model_hash, drained=forced, forced=forced, begun_s=now_s)
            transaction.victims[replica] = victim
            if forced:
                self._unload(now_s, transaction, victim, out)
                continue
            command = DrainReplica(
                operation=self._next_operation(),
                epoch=self._epoch,
                reason=transaction.reason,
                replica=replica,
                timeout_s=self._settings.drain_s,
            )
            limit_s = self._settings.drain_s + self._settings.step_grace_s
            self._order(now_s, transaction, command, replica, limit_s, out)

    def _unload(self, now_s: float, transaction: Transaction, victim: Victim, out: list[SchedulerCommand]) -> None:
        victim.unloads += 1
        command = UnloadReplica(
            operation=self._next_operation(),
            epoch=self._epoch,
            reason=transaction.reason,
            replica=victim.replica,
            force=victim.forced or victim.unloads > 1,
        )
        self._order(now_s, transaction, command, victim.replica, self._settings.unload_s_max, out)

    def _load(self, now_s: float, transaction: Transaction, record: ModelRecord, out: list[SchedulerCommand]) -> None:
        transaction.move(now_s, Stage.LOADING)
        transaction.load_begun_s = now_s
        name = transaction.replica_name
        self._pool.reserve(replace(self._pool.reservations[name], sent=True))
        command = LoadModel(
            operation=self._next_operation(),
            epoch=self._epoch,
            reason=transaction.reason,
            device=transaction.device,
            record=record,
            replica_name=name,
            timeout_s=self._settings.load_s_max,
        )
        limit_s = self._settings.load_s_max + self._settings.step_grace_s
        self._order(now_s, transaction, command, None, limit_s, out)

    def _next_operation(self) -> OperationId:
        self._operations_begun += 1
        return OperationId(f"op-{self._epoch}-{self._operations_begun}")

    def _order(
        self,
        now_s: float,
        transaction: Transaction,
        command: WorkerCommand,
        victim: ReplicaId | None,
        limit_s: float,
        out: list[SchedulerCommand],
    ) -> None:
        self._operations[command.operation] = Operation(
            command.operation, transaction.number, transaction.worker, command, victim, now_s, now_s + limit_s, now_s
        )
        out.append(SendCommand(transaction.worker, command, self._settings.answer_s_max))

    # --------------------------------------------------------------------------------------------------------- answers

    def answered(self, now_s: float, reply: CommandReply, out: list[SchedulerCommand]) -> None:
        """A worker took or refused a command. (A stale epoch is the caller's business.)"""
        operation = self._operations.get(reply.operation)
        if operation is None:
            return
        match reply.outcome:
            case CommandOutcome.ACCEPTED | CommandOutcome.REPEATED:
                operation.answered = True
            case CommandOutcome.REFUSED:
                self._failed(now_s, operation, f"refused: {reply.detail}", Fault.PLACE, out)
            case CommandOutcome.STALE_EPOCH:
                pass

    def operation_ended(self, now_s: float, event: OperationEnded, out: list[SchedulerCommand]) -> None:
        """The end of a step, good or bad."""
        operation = self._operations.get(event.operation)
        if operation is None:
            return
        transaction = self.running[operation.transaction]
        if event.failure:
            if operation.victim is None and event.replica is not None:
                # An agent ends a load only when its process is gone, so its room is free already.
                self._pool.load_failed(event.replica, event.failure)
                transaction.replica = event.replica
            self._failed(now_s, operation, event.failure, Fault.PLACE if event.withdrawn else Fault.MODEL, out)
        elif operation.victim is None:
            self._loaded(now_s, transaction, event.replica, event.took_s)
        else:
            self._left_a_step(now_s, operation, transaction, out)

    def _left_a_step(
        self, now_s: float, operation: Operation, transaction: Transaction, out: list[SchedulerCommand]
    ) -> None:
        del self._operations[operation.operation]
        assert operation.victim is not None
        victim = transaction.victims[operation.victim]
        if isinstance(operation.command, DrainReplica):
            victim.drained = True
            self._unload(now_s, transaction, victim, out)
        else:
            self._pool.ended(victim.replica)
            self.replica_gone(now_s, victim.replica, "")

    def _failed(
        self,
        now_s: float,
        operation: Operation,
        failure: str,
        fault: Fault,
        out: list[SchedulerCommand],
        *,
        unsure: bool = False,
    ) -> None:
        transaction = self.running[operation.transaction]
        del self._operations[operation.operation]
        if operation.victim is None:
            self._abort(now_s, transaction, fault, failure, unsure=unsure)
            return
        victim = transaction.victims[operation.victim]
        if isinstance(operation.command, DrainReplica):
            transaction.overran = True
            victim.forced = True
            self._unload(now_s, transaction, victim, out)
        elif victim.unloads < self._settings.sends_max:
            # The next one is forced. A pause, so that an agent that refuses at once is not asked in a busy loop.
            victim.not_before_s = now_s + self._settings.answer_s_max
        else:
            self._abort(now_s, transaction, Fault.PLACE, f"{victim.replica} could not be unloaded: {failure}")

    def _loaded(self, now_s: float, transaction: Transaction, replica: ReplicaId | None, took_s: float) -> None:
        transaction.replica = replica or transaction.replica
        transaction.took_s = took_s or now_s - transaction.load_begun_s
        self._end(now_s, transaction, Stage.DONE)

    # ---------------------------------------------------------------------------------------------------- what reports tell

    def replica_seen(self, now_s: float, replica: Replica) -> bool:
        """A listed replica appeared or changed its state; True when it is the newcomer of a transaction."""
        name = base_name(replica.replica)
        for transaction in list(self.running.values()):
            if transaction.stage is Stage.LOADING and transaction.replica_name == name:
                transaction.replica = replica.replica
                if replica.report.state is ReplicaState.READY:
                    self._loaded(now_s, transaction, replica.replica, 0.0)
                elif replica.report.state is ReplicaState.FAILED and replica.report.budget_bytes == 0:
                    # While it is still charged its process is ending; its agent's last word on it will say more.
                    self._abort(now_s, transaction, Fault.MODEL, replica.report.failure or "the load failed")
                return True
        return False

    def replica_gone(self, now_s: float, replica: ReplicaId, detail: str) -> bool:
        """A replica's process is gone; True when a transaction was about it. A victim that had not drained was cut off."""
        name = base_name(replica)
        for transaction in list(self.running.values()):
            victim = transaction.victims.get(replica)
            if victim is not None and not victim.gone:
                victim.gone = True
                victim.gone_s = now_s
                if not victim.drained:
                    victim.forced = transaction.overran = True
                self._forget_operations(transaction, replica)
                self._advance(now_s, transaction)
                return True
            if transaction.stage is Stage.LOADING and transaction.replica_name == name:
                transaction.replica = replica
                self._abort(now_s, transaction, Fault.MODEL, detail or "its process ended while it was loading")
                return True
        return False

    def worker_died(self, now_s: float, worker: Worker) -> None:
        """Everything under way there is off."""
        for transaction in list(self.running.values()):
            if transaction.worker == worker.worker:
                self._abort(now_s, transaction, Fault.PLACE, f"worker {worker.worker} died")

    # ------------------------------------------------------------------------------------------------------------ time

    def tick(self, now_s: float, out: list[SchedulerCommand]) -> None:
        """Sends again what got no answer, asks for ends that are missing, and ends what is out of time."""
        settings = self._settings
        for operation in list(self._operations.values()):
            if operation.operation not in self._operations:
                continue  # Its transaction ended meanwhile.
            if now_s >= operation.deadline_s:
                # A load that took longer than it may is the model's failure; a worker that never answered is not.
                fault = Fault.MODEL if operation.answered else Fault.PLACE
                self._failed(now_s, operation, f"no end after {now_s - operation.begun_s:.0f} s", fault, out, unsure=True)
                continue
            pause_s = settings.ask_again_s if operation.answered else settings.answer_s_max
            if now_s - operation.sent_s < pause_s:
                continue
            if not operation.answered and operation.sends >= settings.sends_max:
                self._failed(now_s, operation, "the worker does not answer", Fault.PLACE, out, unsure=True)
                continue
            operation.sends += not operation.answered
            operation.sent_s = now_s
            out.append(SendCommand(operation.worker, operation.command, settings.answer_s_max))
        for transaction in list(self.running.values()):
            if transaction.number not in self.running:
                continue
            for victim in transaction.victims.values():
                if not victim.gone and 0.0 < victim.not_before_s <= now_s:
                    victim.not_before_s = 0.0
                    self._unload(now_s, transaction, victim, out)
            waited_s = now_s - transaction.stage_s
            snapshot = self._pool.workers[transaction.worker].snapshot
            if transaction.stage is Stage.WAITING and snapshot is not None and snapshot.draining:
                self._abort(now_s, transaction, Fault.PLACE, f"worker {transaction.worker} shuts down")
                continue
            if transaction.stage is Stage.WAITING and waited_s >= settings.load_s_max + settings.drain_s:
                self._abort(now_s, transaction, Fault.PLACE, f"the room did not become free in {waited_s:.0f} s")
            else:
                self._advance(now_s, transaction)

    def _advance(self, now_s: float, transaction: Transaction) -> None:
        """Moves on when nobody is left to leave."""
        if transaction.stage is Stage.LEAVING and all(victim.gone for victim in transaction.victims.values()):
            if transaction.record is None:
                self._end(now_s, transaction, Stage.DONE)
            else:
                transaction.move(now_s, Stage.WAITING)

    def start_loads(self, now_s: float, out: list[SchedulerCommand]) -> None:
        """Loads what waits for its device where no load runs and the room is free, oldest first."""
        for transaction in list(self.running.values()):
            record = transaction.record
            if transaction.stage is not Stage.WAITING or record is None:
                continue
            device = self._pool.device(transaction.worker, transaction.device)
            if (
                device is not None
                and device.worker.usable
                and self._pool.room(device).loads_running == 0
                and self._pool.room(device).free_now_bytes >= record.budget_bytes
            ):
                self._load(now_s, transaction, record, out)

    def abandon(self, now_s: float, transaction: Transaction) -> None:
        """Ends a placement that waits for its device although nobody waits for the model any more."""
        assert transaction.stage is Stage.WAITING
        self._abort(now_s, transaction, Fault.UNWANTED, "nobody waits for it any more")

    # ------------------------------------------------------------------------------------------------------------- ends

    def _abort(self, now_s: float, transaction: Transaction, fault: Fault, failure: str, *, unsure: bool = False) -> None:
        """``unsure``: whether the agent may hold the newcomer's room all the same."""
        transaction.fault = fault
        transaction.failure = failure
        self._end(now_s, transaction, Stage.ABORTED, unsure=unsure)

    def _end(self, now_s: float, transaction: Transaction, stage: Stage, *, unsure: bool = False) -> None:
        transaction.move(now_s, stage)
        self._forget_operations(transaction, None)
        held = self._pool.release(transaction.replica_name)
        listed = self._pool.replica_named(transaction.worker, transaction.replica_name) is not None
        if held is not None and held.sent and not listed and (stage is Stage.DONE or unsure):
            # Until the agent's next report shows it, or does not.
            until_s = now_s + self._settings.ask_again_s + self._settings.answer_s_max
            self._pool.reserve(replace(held, until_s=until_s))
        self._pool.forget_plans(transaction.victims)
        del self.running[transaction.number]
        self._ended.append(transaction)

    def _forget_operations(self, transaction: Transaction, victim: ReplicaId | None) -> None:
        """Of one victim, or of the whole transaction."""
        for operation in list(self._operations.values()):
            if operation.transaction == transaction.number and victim in (None, operation.victim):
                del self._operations[operation.operation]
