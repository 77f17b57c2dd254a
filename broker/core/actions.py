"""From a decision to transactions: the checks on what a policy wants, and the notes of what is begun.

Nothing is raised for an action that cannot be carried out: a view is old by the time its decision is, and an earlier action
of the same decision may have taken the room. Why an action was dropped is kept in :attr:`Actions.dropped`, for ``explain``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from broker.core.digest import DigestBuilder
from broker.core.plan.feasibility import Feasibility
from broker.core.plan.policy import Action, ResizeReplicaKv, SetReplicaConcurrency, StartReplica, StopReplica
from broker.core.pool.catalogue import Catalogue
from broker.core.pool.describe import bytes_text, seconds_text
from broker.core.pool.events import SchedulerCommand, SchedulerSettings
from broker.core.pool.journal import Resumption
from broker.core.pool.state import COMING, Device, Pool, Replica
from broker.core.pool.transaction import Kind, Transaction
from broker.core.pool.transactions import Transactions
from profiles.budget import with_kv
from profiles.costs import sequences
from subjects.ids import DeploymentKey, ReplicaId, WorkerId, base_name
from subjects.messages import KvOrder, Mode, ModelRecord, ReplicaState

ADVICE_AGAIN_S = 60.0
"""The same advice is published again after this long."""
ADVICES_MAX = 1024

RESIZE_AGAIN_S = 60.0
"""How long a replica that refused to change its KV is left alone."""


@dataclass(eq=False, slots=True)
class Actions:
    """Begins transactions, with their entries in the timeline."""

    _settings: SchedulerSettings
    _pool: Pool
    _catalogue: Catalogue
    _feasibility: Feasibility
    _transactions: Transactions
    _digests: DigestBuilder
    _out: list[SchedulerCommand]
    _entries: dict[tuple[int, str], int] = field(default_factory=dict)
    _advised: dict[tuple[str, ...], float] = field(default_factory=dict)
    _refused_s: dict[ReplicaId, float] = field(default_factory=dict)
    """Replicas that would not change their KV, and when: some engines never can."""
    dropped: tuple[tuple[Action, str], ...] = ()
    """What was not carried out of the last decision, and why."""

    # ---------------------------------------------------------------------------------------------------------- beginning

    def place(self, now_s: float, action: StartReplica, record: ModelRecord, where: str) -> None:
        """Begins a placement."""
        leaving = [self._pool.replicas[victim] for victim in action.victims]
        transaction = self._transactions.place(now_s, action.devices, action.victims, action.reason, record)
        for replica in leaving:
            name = self._catalogue.name(replica.report.deployment)
            busy = self._feasibility.demand(replica.report.deployment).any
            idle_s = now_s - max(replica.last_used_s, self._catalogue.model(replica.report.deployment).last_used_s)
            why = "busy, and others have waited for long" if busy else f"idle for {seconds_text(max(0.0, idle_s))}"
            reason = f"{why}; makes room for {record.name}"
            self._note(now_s, transaction, replica.replica, "evict", name, reason, where, replica.replica)
        self._note(now_s, transaction, "load", "load", record.name, action.reason, where, None)

    def retire(
        self, now_s: float, replica: Replica, reason: str, *, forced: bool = False, drain_s: float | None = None
    ) -> None:
        """Begins to drain (unless ``forced``) and unload a replica, if nobody did."""
        if replica.replica in self._pool.leaving:
            return
        transaction = self._transactions.retire(now_s, replica, reason, forced=forced, drain_s=drain_s)
        self.note_retirement(now_s, transaction, replica)

    def ask_kv(self, now_s: float, worker: WorkerId, deployment: DeploymentKey, order: KvOrder) -> None:
        """Asks a worker's KV node for what a person wants."""
        what = f"pull its KV from {order.source}" if order.source is not None else f"drop {order.ratio:.0%} of its KV"
        reason = f"asked for by a person: {what}"
        transaction = self._transactions.ask_kv(now_s, worker, deployment, order, reason)
        name = self._catalogue.name(deployment)
        self._note(now_s, transaction, "kv", transaction.kind.value, name, reason, worker, None)

    def note_retirement(self, now_s: float, transaction: Transaction, replica: Replica) -> None:
        """Tells of a retirement that began."""
        name = self._catalogue.name(replica.report.deployment)
        where = _where(replica.worker, replica.devices)
        self._note(now_s, transaction, replica.replica, "unload", name, transaction.reason, where, replica.replica)

    def _note(
        self,
        now_s: float,
        transaction: Transaction,
        key: str,
        action: str,
        model: str,
        reason: str,
        where: str,
        replica: ReplicaId | None,
    ) -> None:
        number = self._digests.note(now_s, action, model, reason, replica=replica, device=where)
        self._entries[(transaction.number, key)] = number

    def take_up(self, now_s: float, resumption: Resumption) -> str:
        """Goes on with a transaction of an earlier leader; returns why it cannot, or nothing."""
        pool, began = self._pool, resumption.recorded.began
        reason = f"an earlier leader began it: {began.reason}"
        if began.kv is not None:
            sent = next(reversed(resumption.recorded.steps), None)
            transaction = self._transactions.take_up_kv(now_s, began, began.kv, sent)
            name = ", ".join(self._catalogue.name(deployment) for deployment in began.deployments)
            self._note(now_s, transaction, "kv", began.kind, name, reason, began.worker, None)
            return ""
        there = [pool.replicas[replica] for replica in resumption.there]
        if began.kind == Kind.RESIZE_KV.value:
            refusal = self._resize(now_s, ResizeReplicaKv(there[0].replica, began.kv_bytes or 0, began.reason))
            return refusal or "begun again as a change of its own"
        if began.kind == Kind.SET_CONCURRENCY.value:
            change = SetReplicaConcurrency(there[0].replica, began.slots or 0, began.reason)
            return self._set_concurrency(now_s, change) or "begun again as a change of its own"
        newcomer = pool.replicas.get(resumption.newcomer) if resumption.newcomer is not None else None
        if began.record is not None and newcomer is None:
            known = [device for device in (pool.device(began.worker, key) for key in began.devices) if device is not None]
            if refusal := self._feasibility.cannot_span(began.record, known):
                return refusal
            for device in known:
                if self._feasibility.block_bytes(device, there) < began.record.budget_bytes:
                    return f"the room on {device.report.device} is gone"
        transaction = self._transactions.take_up(now_s, began, newcomer, there, resumption.gone)
        where = _where(began.worker, began.devices)
        for replica in there:
            name = self._catalogue.name(replica.report.deployment)
            action = "unload" if began.record is None else "evict"
            self._note(now_s, transaction, replica.replica, action, name, reason, where, replica.replica)
        if began.record is not None:
            self._note(now_s, transaction, "load", "load", began.record.name, reason, where, None)
        return ""

    def ended(
        self, transaction: Transaction, key: str, outcome: str, took_s: float, *, replica: ReplicaId | None = None
    ) -> None:
        """Tells how a part of a transaction ended: a victim by its id, ``load``, ``change`` or ``kv``."""
        self._digests.close(self._entries.pop((transaction.number, key), None), outcome, took_s, replica=replica)

    # --------------------------------------------------------------------------------------------------- a policy's actions

    def carry_out(self, now_s: float, actions: Sequence[Action]) -> None:
        """Begins what is possible of a decision, in its order."""
        carried = [(action, self._carry_out(now_s, action)) for action in actions]
        self.dropped = tuple((action, refusal) for action, refusal in carried if refusal)

    def _carry_out(self, now_s: float, action: Action) -> str:
        match action:
            case StartReplica():
                return self._start(now_s, action)
            case StopReplica():
                return self._stop(now_s, action)
            case ResizeReplicaKv():
                return self._resize(now_s, action)
            case SetReplicaConcurrency():
                return self._set_concurrency(now_s, action)
            case _:
                assert_never(action)

    def _start(self, now_s: float, action: StartReplica) -> str:
        pool, catalogue = self._pool, self._catalogue
        if (record := catalogue.of_deployment(action.deployment)) is None:
            return "nobody applied that model"
        model = catalogue.model(record.deployment)
        if catalogue.locked(record.deployment):
            return f"{record.name} is locked by a person"
        if model.held_down:
            return f"{record.name} was unloaded by a person and nobody asks for it"
        if model.retry_s > now_s:
            return f"{record.name} backs off after a failed load"
        count = self._feasibility.replicas_count(record.deployment)
        if count >= record.max_replicas:
            return f"{record.name} has {count} of at most {record.max_replicas} replicas"
        if action.kv_bytes is not None:
            record = with_kv(record, action.kv_bytes)
        devices = [pool.device(*key) for key in action.devices]
        known = [device for device in devices if device is not None]
        if len(known) < len(devices):
            return "one of the devices is not known"
        if refusal := self._feasibility.cannot_span(record, known) or self._victims_refusal(action, known):
            return refusal
        if not record.max_num_seqs:
            record = msgspec.structs.replace(record, max_num_seqs=sequences(record, known[0].report.kind))
        victims = [pool.replicas[victim] for victim in action.victims]
        if refusal := self._feasibility.room_refusal(record, known, victims):
            return refusal
        held_back = [
            catalogue.name(deployment)
            for deployment in [record.deployment, *(victim.report.deployment for victim in victims)]
            if catalogue.mode(deployment) is not Mode.ACT
        ]
        where = _where(action.devices[0][0], [device for _, device in action.devices])
        if held_back:
            leave = "; ".join(f"{victim.replica} would leave" for victim in victims)
            return self._advise(now_s, "load", record.name, action.reason, where, leave, held_back)
        self.place(now_s, action, record, where)
        return ""

    def _victims_refusal(self, action: StartReplica, devices: list[Device]) -> str:
        keys = {device.key for device in devices}
        for victim in action.victims:
            replica = self._pool.replicas.get(victim)
            if replica is None or not any((replica.worker, device) in keys for device in replica.devices):
                return f"{victim} is not on those devices"
            if refusal := self._feasibility.leave_refusal(replica):
                return refusal
        if len(set(action.victims)) < len(action.victims):
            return "a victim is named twice"
        return self._feasibility.minimum_refusal([self._pool.replicas[victim] for victim in action.victims])

    def _stop(self, now_s: float, action: StopReplica) -> str:
        if (replica := self._pool.replicas.get(action.replica)) is None:
            return self._take_back(now_s, str(action.replica), action.reason)
        name = self._catalogue.name(replica.report.deployment)
        coming = replica.report.state in COMING and not replica.dead and replica.replica not in self._pool.leaving
        refusal = "" if coming else self._feasibility.leave_refusal(replica)
        if coming and self._feasibility.stays(replica):
            refusal = f"{replica.replica} is pinned, locked or needed for a minimum"
        if refusal:
            return refusal
        if self._catalogue.mode(replica.report.deployment) is not Mode.ACT:
            where = _where(replica.worker, replica.devices)
            return self._advise(now_s, "unload", name, action.reason, where, "", [name])
        if coming:
            return self._take_back(now_s, base_name(replica.replica), action.reason)
        interrupts = action.interrupt and self._settings.interrupts and replica.report.continues
        self.retire(now_s, replica, action.reason, drain_s=0.0 if interrupts else None)
        return ""

    def _take_back(self, now_s: float, replica_name: str, reason: str) -> str:
        if (transaction := self._transactions.loading(replica_name)) is None:
            return f"{replica_name} is not there"
        if transaction.record is not None and self._catalogue.mode(transaction.record.deployment) is not Mode.ACT:
            return f"the mode of {transaction.record.name} keeps it"
        if (retirement := self._transactions.cancel(now_s, transaction, reason)) is None:
            return f"{replica_name} cannot be taken back now: others are leaving for it, or its load is being begun"
        if retirement is not transaction:
            (victim,) = retirement.victims
            self.note_retirement(now_s, retirement, self._pool.replicas[victim])
        return ""

    def _resize(self, now_s: float, action: ResizeReplicaKv) -> str:
        replica = self._pool.replicas.get(action.replica)
        refusal = self._may_not_change(replica)
        if replica is None or refusal:
            return refusal
        if (record := self._catalogue.of_deployment(replica.report.deployment)) is None:
            return "nobody applied that model"
        if not replica.report.resizes_kv:
            return f"the engine of {replica.replica} cannot change its KV while it runs"
        if action.kv_bytes <= 0:
            return f"kv_bytes {action.kv_bytes}: must be positive"
        if action.kv_bytes == replica.report.kv_bytes:
            return f"{replica.replica} has that KV budget"
        if now_s - self._refused_s.get(action.replica, -math.inf) < RESIZE_AGAIN_S:
            return f"{replica.replica} refused to change its KV a moment ago"
        budget_bytes = with_kv(record, action.kv_bytes).budget_bytes
        growth_bytes = budget_bytes - replica.report.budget_bytes
        for key in replica.devices:
            device = self._pool.device(replica.worker, key)
            if device is None or self._pool.room(device).free_planned_bytes < growth_bytes:
                return f"{bytes_text(max(0, growth_bytes))} more are not to be had on {key}"
        where = _where(replica.worker, replica.devices)
        if self._catalogue.mode(record.deployment) is not Mode.ACT:
            what = f"KV of {replica.replica} would be {bytes_text(action.kv_bytes)}"
            return self._advise(now_s, "resize", record.name, action.reason, where, what, [record.name])
        transaction = self._transactions.resize(now_s, replica, action.kv_bytes, budget_bytes, action.reason)
        reason = f"KV {bytes_text(action.kv_bytes)}: {action.reason}"
        self._note(now_s, transaction, "change", "resize", record.name, reason, where, replica.replica)
        return ""

    def resize_refused(self, now_s: float, replica: ReplicaId) -> None:
        """Its engine did not change its KV: it is not asked again for a while."""
        self._refused_s = {known: at_s for known, at_s in self._refused_s.items() if known in self._pool.replicas}
        self._refused_s[replica] = now_s

    def _set_concurrency(self, now_s: float, action: SetReplicaConcurrency) -> str:
        replica = self._pool.replicas.get(action.replica)
        refusal = self._may_not_change(replica)
        if replica is None or refusal:
            return refusal
        if action.slots < 1:
            return f"slots {action.slots}: must be at least 1"
        if action.slots == replica.report.slots:
            return f"{replica.replica} has that many slots"
        deployment = replica.report.deployment
        name, where = self._catalogue.name(deployment), _where(replica.worker, replica.devices)
        if self._catalogue.mode(deployment) is not Mode.ACT:
            what = f"{replica.replica} would run {action.slots} at once"
            return self._advise(now_s, "concurrency", name, action.reason, where, what, [name])
        transaction = self._transactions.set_concurrency(now_s, replica, action.slots, action.reason)
        reason = f"{action.slots} at once: {action.reason}"
        self._note(now_s, transaction, "change", "concurrency", name, reason, where, replica.replica)
        return ""

    def _may_not_change(self, replica: Replica | None) -> str:
        if replica is None:
            return "that replica is not there"
        if replica.dead or replica.report.state is not ReplicaState.READY or replica.replica in self._pool.leaving:
            return f"{replica.replica} is not ready, or leaves"
        if self._catalogue.locked(replica.report.deployment) or self._pool.replica_locked(replica):
            return f"{replica.replica} is locked by a person"
        if self._transactions.changes(replica.replica):
            return f"{replica.replica} is being changed already"
        return ""

    def _advise(
        self, now_s: float, what: str, model: str, reason: str, where: str, besides: str, held_back: list[str]
    ) -> str:
        """Publishes what would be done, unless a model may only be observed; the same advice again only after a while, since
        it is decided at every look."""
        key = (what, model, where, besides)
        told_s = self._advised.get(key)
        records = [self._catalogue.records[name] for name in held_back if name in self._catalogue.records]
        if any(self._catalogue.mode(record.deployment) is Mode.OBSERVE for record in records):
            return f"{', '.join(sorted(set(held_back)))} may only be observed"
        if told_s is None or now_s - told_s >= ADVICE_AGAIN_S:
            text = f"would {what}: {reason}" + (f"; {besides}" if besides else "")
            self._digests.note(now_s, "advice", model, text, device=where, outcome="advice")
            self._advised.pop(key, None)
            self._advised[key] = now_s
            while len(self._advised) > ADVICES_MAX:
                del self._advised[next(iter(self._advised))]
        return f"advice only: {', '.join(sorted(set(held_back)))} may not be acted on"


def _where(worker: str, devices: Sequence[str]) -> str:
    return f"{worker}/{'+'.join(devices)}"
