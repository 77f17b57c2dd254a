"""The table of running transactions: what each step is, who must answer, until when, and what follows.

A *placement* is: reserve the room on all devices that the newcomer spans, drain the victims, unload them, load the newcomer
(its agent warms and verifies it), open. A *retirement* is the first half alone. A *change* gives a replica that stays
another KV budget or concurrency. *Asking a KV node* is one command that takes no device. Each step is a command with its
own operation id under the leader's epoch. Transactions about different replicas and devices run side by side; what needs
the same device waits in the order of its beginning.

========== ========================================= =================================================================
stage      waits for                                 ends in
========== ========================================= =================================================================
LEAVING    every victim drained, then unloaded       WAITING (placement) or DONE (retirement)
WAITING    the devices: loads are serial, room free  LOADING or CHANGING, or ABORTED: nobody waits any more, time is up
LOADING    the agent's word, or the replica in ready DONE or ABORTED
CHANGING   the agent's word, or that of a KV node    DONE or ABORTED
========== ========================================= =================================================================

A drain cannot be taken back, since an agent knows no such command. So a step that fails is compensated forwards: a victim
that was already sent away is wanted again like any model whose requests wait. A drain that fails or overruns its bound is
followed by a forced unload: its requests continue elsewhere. A lost answer or event is no failure: a command is sent again
under the same operation id, and a report that shows the result counts as the answer.

What begins, is sent and ends is told to the journal, from which a successor takes up what it finds unfinished
(:meth:`Transactions.resume`): the agents' reports say how far it came, the journal what it was meant to be.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from broker.core.pool.commands import Orders
from broker.core.pool.events import SchedulerCommand, SchedulerSettings
from broker.core.pool.state import COMING, Pool, Replica, Reservation, Worker
from broker.core.pool.transaction import TRANSITIONS as TRANSITIONS
from broker.core.pool.transaction import Change, Fault, Kind, Operation, Transaction, Victim
from broker.core.pool.transaction import Stage as Stage
from subjects import messages as m
from subjects.ids import DeploymentKey, DeviceId, OperationId, ReplicaId, WorkerId, base_name


class Transactions:
    """All running ones. Commands to send are appended to ``out``; what has ended is handed over by :meth:`ended`."""

    def __init__(self, settings: SchedulerSettings, pool: Pool, out: list[SchedulerCommand]) -> None:
        self._settings = settings
        self._pool = pool
        self._begun = 0
        self._ended: list[Transaction] = []
        self._newcomers: dict[str, int] = {}
        self._leavers: dict[ReplicaId, int] = {}
        self._changed: dict[ReplicaId, dict[int, None]] = {}
        self.running: dict[int, Transaction] = {}
        self.orders = Orders(settings, out)

    def lead(self, epoch: int) -> None:
        """Starts over under an epoch of our own; what agents still do for others shows in their reports."""
        self.orders.lead(epoch)
        self._ended.clear()
        self._newcomers.clear()
        self._leavers.clear()
        self._changed.clear()
        self.running.clear()
        self._pool.forget_all_plans()

    def ended(self) -> list[Transaction]:
        """Those that have ended since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended

    def changes(self, replica: ReplicaId) -> bool:
        """Whether a change of this replica is under way."""
        return replica in self._changed

    def loading(self, replica_name: str) -> Transaction | None:
        """The placement whose newcomer has this name (without incarnation)."""
        number = self._newcomers.get(replica_name)
        return self.running[number] if number is not None else None

    # ----------------------------------------------------------------------------------------------------- beginning

    def place(
        self,
        now_s: float,
        devices: Sequence[tuple[WorkerId, DeviceId]],
        victims: tuple[ReplicaId, ...],
        reason: str,
        record: m.ModelRecord,
    ) -> Transaction:
        """Reserves the room on all ``devices`` of a worker, the leading one first, and begins to drain the ``victims``."""
        worker, keys = devices[0][0], tuple([device for _, device in devices])
        transaction = self._begin(now_s, Kind.PLACE, worker, keys, reason)
        transaction.record = record
        slug = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in record.name)[:24]
        transaction.replica_name = f"{slug}-{self.orders.epoch}-{transaction.number}"
        self._newcomers[transaction.replica_name] = transaction.number
        self._reserve(transaction, record)
        self._began(now_s, transaction, victims)
        self._send_away(now_s, transaction, victims, forced=False)
        self._advance(now_s, transaction)
        return transaction

    def retire(
        self, now_s: float, replica: Replica, reason: str, *, forced: bool, drain_s: float | None = None
    ) -> Transaction:
        """Drains (unless ``forced``) and unloads one replica; with ``drain_s`` 0 its requests are interrupted."""
        transaction = self._begin(now_s, Kind.RETIRE, replica.worker, replica.devices, reason)
        if drain_s is not None:
            transaction.drain_s = drain_s
        self._began(now_s, transaction, (replica.replica,), forced=forced)
        self._send_away(now_s, transaction, (replica.replica,), forced=forced)
        return transaction

    def resize(self, now_s: float, replica: Replica, kv_bytes: int, budget_bytes: int, reason: str) -> Transaction:
        """Gives a replica another KV budget, once there is room for it; :meth:`start` sends the command."""
        growth_bytes = max(0, budget_bytes - replica.report.budget_bytes)
        change = Change(replica.replica, kv_bytes=kv_bytes, budget_bytes=budget_bytes, growth_bytes=growth_bytes)
        transaction = self._begin_change(now_s, Kind.RESIZE_KV, replica, change, reason)
        self._pool.resize(replica.replica, replica.report.budget_bytes, budget_bytes)
        return transaction

    def set_concurrency(self, now_s: float, replica: Replica, slots: int, reason: str) -> Transaction:
        """Bounds what a replica runs at once; :meth:`start` sends the command."""
        change = Change(replica.replica, slots=slots)
        return self._begin_change(now_s, Kind.SET_CONCURRENCY, replica, change, reason)

    def ask_kv(
        self, now_s: float, worker: WorkerId, deployment: DeploymentKey, order: m.KvOrder, reason: str
    ) -> Transaction:
        """Asks the KV node of a worker, at once: it needs no room."""
        kind = Kind.EVICT_KV if order.source is None else Kind.MIGRATE_KV
        transaction = self._begin(now_s, kind, worker, (), reason)
        transaction.kv = order
        self.orders.begin(now_s, transaction, (), (deployment,), forced=False)
        self._send_kv(now_s, transaction, order, None)
        return transaction

    def take_up_kv(self, now_s: float, began: m.TransactionBegan, order: m.KvOrder, sent: OperationId | None) -> Transaction:
        """Goes on with what an earlier leader asked, under its own name. ``sent`` is the command that may have been heard:
        its worker knows it again and does it once."""
        transaction = self._begin(now_s, Kind(began.kind), began.worker, (), began.reason)
        transaction.name = began.transaction
        transaction.kv = order
        self._send_kv(now_s, transaction, order, sent)
        return transaction

    def _send_kv(self, now_s: float, transaction: Transaction, order: m.KvOrder, sent: OperationId | None) -> None:
        transaction.move(now_s, Stage.WAITING)
        transaction.move(now_s, Stage.CHANGING)
        self.orders.ask_kv(now_s, transaction, order, sent)

    def _begin_change(self, now_s: float, kind: Kind, replica: Replica, change: Change, reason: str) -> Transaction:
        transaction = self._begin(now_s, kind, replica.worker, replica.devices, reason)
        transaction.change = change
        self._changed.setdefault(replica.replica, {})[transaction.number] = None
        self._began(now_s, transaction, (replica.replica,))
        transaction.move(now_s, Stage.WAITING)
        return transaction

    def _begin(self, now_s: float, kind: Kind, worker: WorkerId, devices: tuple[DeviceId, ...], reason: str) -> Transaction:
        self._begun += 1
        name = f"{self.orders.epoch}-{self._begun}"
        drain_s = self._settings.drain_s
        transaction = Transaction(self._begun, name, kind, worker, devices, reason, now_s, now_s, drain_s=drain_s)
        self.running[transaction.number] = transaction
        return transaction

    def _reserve(self, transaction: Transaction, record: m.ModelRecord) -> None:
        """Promises the room of a newcomer."""
        where = (transaction.worker, transaction.devices, transaction.replica_name)
        self._pool.reserve(Reservation(*where, record.deployment, record.budget_bytes))

    def _began(
        self, now_s: float, transaction: Transaction, replicas: tuple[ReplicaId, ...], *, forced: bool = False
    ) -> None:
        deployments = [self._pool.replicas[replica].report.deployment for replica in replicas]
        self.orders.begin(now_s, transaction, replicas, deployments, forced=forced)

    def take_up(
        self,
        now_s: float,
        began: m.TransactionBegan,
        newcomer: Replica | None,
        there: Sequence[Replica],
        gone: Sequence[tuple[ReplicaId, DeploymentKey]],
    ) -> Transaction:
        """Goes on with a placement or retirement of an earlier leader, under its own name.

        ``there`` still have to leave, ``gone`` have left for it, ``newcomer`` is listed and on its way.
        """
        transaction = self._begin(now_s, Kind(began.kind), began.worker, began.devices, began.reason)
        transaction.name = began.transaction
        transaction.drain_s = began.drain_s
        for replica, deployment in gone:
            transaction.victims[replica] = Victim(replica, deployment, gone=True, begun_s=now_s, gone_s=now_s)
            self._leavers[replica] = transaction.number
        if began.record is not None:
            transaction.record = began.record
            transaction.replica_name = began.replica_name
            self._newcomers[began.replica_name] = transaction.number
            if newcomer is None:
                self._reserve(transaction, began.record)
        forced = began.forced and began.record is None
        self._send_away(now_s, transaction, tuple(replica.replica for replica in there), forced=forced)
        self._advance(now_s, transaction)
        if newcomer is not None and transaction.stage is Stage.WAITING:
            # Its agent has its own bound for the load, so no command of ours need watch over it.
            transaction.move(now_s, Stage.LOADING)
            transaction.load_begun_s = now_s - newcomer.report.state_s
            transaction.replica = newcomer.replica
        return transaction

    def _send_away(self, now_s: float, transaction: Transaction, victims: tuple[ReplicaId, ...], *, forced: bool) -> None:
        for replica in victims:
            for number in list(self._changed.get(replica, ())):
                if self.running[number].stage is Stage.WAITING:
                    self._abort(now_s, self.running[number], Fault.UNWANTED, "its replica leaves")
            self._pool.leave(replica)
            deployment = self._pool.replicas[replica].report.deployment
            victim = Victim(replica, deployment, drained=forced, forced=forced, begun_s=now_s)
            transaction.victims[replica] = victim
            self._leavers[replica] = transaction.number
            if forced:
                self.orders.unload(now_s, transaction, victim)
            else:
                self.orders.drain(now_s, transaction, replica)

    # --------------------------------------------------------------------------------------------------------- answers

    def answered(self, now_s: float, reply: m.CommandReply) -> None:
        """A worker took or refused a command. (A stale epoch is the caller's business.)"""
        operation = self.orders.find(reply.operation)
        if operation is None:
            return
        match reply.outcome:
            case m.CommandOutcome.ACCEPTED | m.CommandOutcome.REPEATED:
                operation.answered = True
            case m.CommandOutcome.REFUSED:
                self._failed(now_s, operation, f"refused: {reply.detail}", Fault.PLACE)
            case m.CommandOutcome.STALE_EPOCH:
                pass

    def operation_ended(self, now_s: float, event: m.OperationEnded) -> None:
        """The end of a step, good or bad."""
        operation = self.orders.find(event.operation)
        if operation is None:
            return
        transaction = self.running[operation.transaction]
        if event.failure:
            if isinstance(operation.command, m.LoadModel) and event.replica is not None:
                # An agent ends a load only when its process is gone, so its room is free already.
                self._pool.load_failed(event.replica, event.failure)
                transaction.replica = event.replica
            self._failed(now_s, operation, event.failure, Fault.PLACE if event.withdrawn else Fault.MODEL)
        elif operation.victim is not None:
            self._left_a_step(now_s, operation, transaction)
        elif transaction.change is not None:
            self._changed_as_told(now_s, operation, transaction, transaction.change)
        elif transaction.kv is not None:
            self.orders.ended(now_s, transaction, operation, "", event.detail)
            transaction.detail = event.detail
            self._end(now_s, transaction, Stage.DONE)
        else:
            self.orders.ended(now_s, transaction, operation, "")
            self._loaded(now_s, transaction, event.replica, event.took_s)

    def _changed_as_told(self, now_s: float, operation: Operation, transaction: Transaction, change: Change) -> None:
        self.orders.ended(now_s, transaction, operation, "")
        if change.kv_bytes is not None:
            self._pool.was_resized(change.replica, change.budget_bytes, change.kv_bytes)
        transaction.took_s = now_s - transaction.stage_s
        self._end(now_s, transaction, Stage.DONE)

    def _left_a_step(self, now_s: float, operation: Operation, transaction: Transaction) -> None:
        self.orders.ended(now_s, transaction, operation, "")
        assert operation.victim is not None
        victim = transaction.victims[operation.victim]
        if isinstance(operation.command, m.DrainReplica):
            victim.drained = True
            self.orders.unload(now_s, transaction, victim)
        else:
            self._pool.ended(victim.replica)
            self.replica_gone(now_s, victim.replica, "")

    def _failed(self, now_s: float, operation: Operation, failure: str, fault: Fault, *, unsure: bool = False) -> None:
        transaction = self.running[operation.transaction]
        self.orders.ended(now_s, transaction, operation, failure)
        if operation.victim is None:
            self._abort(now_s, transaction, fault, failure, unsure=unsure)
            return
        victim = transaction.victims[operation.victim]
        if isinstance(operation.command, m.DrainReplica):
            transaction.overran = True
            victim.forced = True
            self.orders.unload(now_s, transaction, victim)
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
        transaction = self.loading(base_name(replica.replica))
        if transaction is None or transaction.stage is not Stage.LOADING:
            return False
        transaction.replica = replica.replica
        if replica.report.state is m.ReplicaState.READY:
            self._loaded(now_s, transaction, replica.replica, 0.0)
        elif replica.report.state is m.ReplicaState.FAILED and replica.report.budget_bytes == 0:
            # While it is still charged its process is ending; its agent's last word on it will say more.
            self._abort(now_s, transaction, Fault.MODEL, replica.report.failure or "the load failed")
        return True

    def replica_gone(self, now_s: float, replica: ReplicaId, detail: str) -> bool:
        """A replica's process is gone; True when a transaction was about it. A victim that had not drained was cut off."""
        for number in list(self._changed.get(replica, ())):
            self._abort(now_s, self.running[number], Fault.PLACE, f"{replica} is gone")
        number = self._leavers.get(replica, 0)
        newcomer = self.loading(base_name(replica))
        if newcomer is not None and newcomer.stage is Stage.LOADING:
            newcomer.replica = replica
            self._abort(now_s, newcomer, Fault.MODEL, detail or "its process ended while it was loading")
            if not number:
                return True
        if not number:
            return False
        transaction = self.running[number]
        victim = transaction.victims[replica]
        if victim.gone:
            return False
        victim.gone = True
        victim.gone_s = now_s
        if not victim.drained:
            victim.forced = transaction.overran = True
        self.orders.victim_gone(now_s, transaction, replica)
        self._advance(now_s, transaction)
        return True

    def worker_died(self, now_s: float, worker: Worker) -> None:
        """Everything under way there is off."""
        for transaction in list(self.running.values()):
            if transaction.worker == worker.worker:
                self._abort(now_s, transaction, Fault.PLACE, f"worker {worker.worker} died")

    # ------------------------------------------------------------------------------------------------------------ time

    def tick(self, now_s: float) -> None:
        """Sends again what got no answer, asks for ends that are missing, and ends what is out of time."""
        settings = self._settings
        for operation in self.orders.running():
            if self.orders.find(operation.operation) is None:
                continue  # Its transaction ended meanwhile.
            if now_s >= operation.deadline_s:
                # A load that took longer than it may is the model's failure; a worker that never answered is not.
                fault = Fault.MODEL if operation.answered else Fault.PLACE
                self._failed(now_s, operation, f"no end after {now_s - operation.begun_s:.0f} s", fault, unsure=True)
                continue
            pause_s = settings.ask_again_s if operation.answered else settings.answer_s_max
            if now_s - operation.sent_s < pause_s:
                continue
            if not operation.answered and operation.sends >= settings.sends_max:
                self._failed(now_s, operation, "the worker does not answer", Fault.PLACE, unsure=True)
                continue
            self.orders.again(now_s, operation)
        for transaction in list(self.running.values()):
            if transaction.number not in self.running:
                continue
            for victim in transaction.victims.values():
                if not victim.gone and 0.0 < victim.not_before_s <= now_s:
                    victim.not_before_s = 0.0
                    self.orders.unload(now_s, transaction, victim)
            waited_s = now_s - transaction.stage_s
            snapshot = self._pool.workers[transaction.worker].snapshot
            if transaction.stage is Stage.WAITING and snapshot is not None and snapshot.draining:
                self._abort(now_s, transaction, Fault.PLACE, f"worker {transaction.worker} shuts down")
                continue
            wait_s_max = settings.change_s_max if transaction.change is not None else settings.load_s_max + settings.drain_s
            if transaction.stage is Stage.WAITING and waited_s >= wait_s_max:
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

    def start(self, now_s: float) -> None:
        """Loads and changes what waits for its devices where no load runs and the room is free, oldest first."""
        kept: set[tuple[WorkerId, DeviceId]] = set()
        for transaction in list(self.running.values()):
            if transaction.stage is not Stage.WAITING:
                continue
            devices = [self._pool.device(transaction.worker, device) for device in transaction.devices]
            if transaction.change is not None:
                growth_bytes = transaction.change.growth_bytes
                if not growth_bytes or all(
                    d is not None and self._pool.room(d).free_now_bytes >= growth_bytes for d in devices
                ):
                    self._change(now_s, transaction, transaction.change)
                continue
            record = transaction.record
            assert record is not None, "what waits is loaded or changed"
            if any((transaction.worker, device) in kept for device in transaction.devices):
                continue
            if all(
                device is not None
                and self._pool.usable(device)
                and self._pool.room(device).block_now_bytes >= record.budget_bytes
                for device in devices
            ):
                if not any(device is not None and self._pool.room(device).loads_running for device in devices):
                    self._load(now_s, transaction, record)
                elif len(devices) > 1:
                    # Else single loads could take its devices in turns for ever.
                    kept.update((transaction.worker, device) for device in transaction.devices)

    def _load(self, now_s: float, transaction: Transaction, record: m.ModelRecord) -> None:
        transaction.move(now_s, Stage.LOADING)
        transaction.load_begun_s = now_s
        self._pool.reserve(replace(self._pool.reservations[transaction.replica_name], sent=True))
        self.orders.load(now_s, transaction, record)

    def _change(self, now_s: float, transaction: Transaction, change: Change) -> None:
        transaction.move(now_s, Stage.CHANGING)
        if change.kv_bytes is not None:
            sure_bytes = self._pool.replicas[change.replica].report.budget_bytes + change.growth_bytes
            self._pool.resize(change.replica, sure_bytes, change.budget_bytes)
        self.orders.change(now_s, transaction, change)

    def cancel(self, now_s: float, transaction: Transaction, reason: str) -> Transaction | None:
        """Takes a placement back: one that waits ends at once and is returned, of one that loads the retirement is. None
        while victims leave for it, since a drain cannot be undone, and while nobody has listed what loads."""
        if transaction.stage is Stage.WAITING:
            self._abort(now_s, transaction, Fault.UNWANTED, reason)
            return transaction
        listed = self._pool.replica_named(transaction.worker, transaction.replica_name)
        if transaction.stage is not Stage.LOADING or listed is None or listed.report.state not in COMING:
            return None
        transaction.cancelled = True
        return self.retire(now_s, listed, reason, forced=True)

    # ------------------------------------------------------------------------------------------------------------- ends

    def _abort(self, now_s: float, transaction: Transaction, fault: Fault, failure: str, *, unsure: bool = False) -> None:
        """``unsure``: whether the agent may hold the newcomer's room all the same."""
        transaction.fault = Fault.UNWANTED if transaction.cancelled else fault
        transaction.failure = failure
        self._end(now_s, transaction, Stage.ABORTED, unsure=unsure)

    def _end(self, now_s: float, transaction: Transaction, stage: Stage, *, unsure: bool = False) -> None:
        transaction.move(now_s, stage)
        self.orders.over(now_s, transaction, transaction.failure if stage is Stage.ABORTED else "")
        held = self._pool.release(transaction.replica_name)
        listed = self._pool.replica_named(transaction.worker, transaction.replica_name) is not None
        if held is not None and held.sent and not listed and (stage is Stage.DONE or unsure):
            # Until the agent's next report shows it, or does not.
            until_s = now_s + self._settings.ask_again_s + self._settings.answer_s_max
            self._pool.reserve(replace(held, until_s=until_s))
        self._pool.forget_plans(transaction.victims)
        self._newcomers.pop(transaction.replica_name, None)
        for replica in transaction.victims:
            del self._leavers[replica]
        change = transaction.change
        if change is not None:
            del self._changed[change.replica][transaction.number]
            if not self._changed[change.replica]:
                del self._changed[change.replica]
            if change.kv_bytes is not None:
                self._pool.resized(change.replica)
        del self.running[transaction.number]
        self._ended.append(transaction)
