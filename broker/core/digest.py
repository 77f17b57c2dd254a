"""What the scheduler tells everybody: the digest of the pool, and the timeline of its actions with their reasons."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from broker.core.plan.availability import Outlook
from broker.core.plan.fairness import Fairness
from broker.core.pool.events import PublishDigest, SchedulerSettings
from broker.core.pool.state import Demand, Pool, Presence, Replica
from profiles.twu import HEAVIEST_FACTOR
from subjects import messages as m
from subjects.ids import ReplicaId

Told = tuple[m.ModelRecord, Outlook, m.StepCosts | None]
"""What a digest says of one model: which it is, what may be hoped for, what its steps cost."""
DEAD_TOLD_MAX = 256
"""So many of the dead, the latest ones, are told to everybody; a successor gets all."""


@dataclass(eq=False, slots=True)
class DigestBuilder:
    """Builds digests, and keeps the timeline.

    The timeline's times are monotonic inside and become wall-clock times on the way out.
    """

    _settings: SchedulerSettings
    _pool: Pool
    _fairness: Fairness
    _sequence: int = 0
    _numbers: int = 0
    notes: int = 0
    """Grows with every change of the timeline."""
    _timeline: dict[int, m.TimelineEntry] = field(default_factory=dict)
    _restored: tuple[m.TimelineEntry, ...] = ()
    _lifted: tuple[tuple[int, float], tuple[m.TimelineEntry, ...]] | None = None
    _published_s: float | None = None
    _weights: dict[ReplicaId, float] = field(default_factory=dict)
    _gives_way: frozenset[ReplicaId] = frozenset()
    _told: dict[ReplicaId, m.PoolReplica] = field(default_factory=dict)
    measures: dict[ReplicaId, int] = field(default_factory=dict)
    """Who should measure costs in idle moments, and up to which batch."""
    latest: m.PoolDigest | None = None

    def restore(self, digest: m.PoolDigest) -> None:
        """Goes on from the last digest of an earlier leader: its dead stay dead."""
        if digest.sequence > self._sequence:
            # Somebody else led since our last one. What they tell begins with what we had told them.
            self._sequence = digest.sequence
            self._timeline.clear()
            self._lifted = None
            self._restored = tuple(
                entry if entry.outcome else msgspec.structs.replace(entry, outcome="leader changed")
                for entry in digest.timeline[-self._settings.timeline_entries_max :]
            )
        for replica in digest.dead:
            self._pool.declare_dead(replica)

    def weigh(self, weights: dict[ReplicaId, float]) -> None:
        """Takes routing weights that changed."""
        there = self._pool.replicas
        news = {r: w for r, w in weights.items() if w >= 0.0 and r in there and self._weights.get(r, 1.0) != w}
        self._weights.update(news)
        self.notes += bool(news)

    def give_way(self, replicas: frozenset[ReplicaId]) -> None:
        """Tells from now on a lower weight of these replicas and of no others; what the policy weighs stays."""
        self.notes += replicas != self._gives_way
        self._gives_way = replicas

    def weight(self, replica: ReplicaId) -> float:
        """The routing weight of a replica; 1.0 is neutral."""
        return self._weights.get(replica, 1.0)

    def told(self, record: m.ModelRecord) -> m.PoolModel:
        """What the last digest said of a model. Asking the core again could change what it decides next."""
        models = self.latest.models if self.latest is not None else ()
        nothing = m.PoolModel(deployment=record.deployment, model_hash=record.model_hash, name=record.name)
        return next((model for model in models if model.name == record.name), nothing)

    def note(
        self,
        now_s: float,
        action: str,
        model: str,
        reason: str,
        *,
        replica: ReplicaId | None = None,
        device: str = "",
        outcome: str = "",
    ) -> int:
        """Adds an action to the timeline and returns its number for :meth:`close`."""
        self.notes += 1
        self._numbers += 1
        self._timeline[self._numbers] = m.TimelineEntry(
            at_unix_s=now_s, action=action, model=model, replica=replica, device=device, reason=reason, outcome=outcome
        )
        while len(self._timeline) > self._settings.timeline_entries_max:
            del self._timeline[next(iter(self._timeline))]
        return self._numbers

    def close(self, number: int | None, outcome: str, took_s: float, *, replica: ReplicaId | None = None) -> None:
        """Tells how an action ended; one that is no longer in the timeline is ignored."""
        self.notes += 1
        entry = self._timeline.get(number) if number is not None else None
        if entry is not None and number is not None:
            self._timeline[number] = msgspec.structs.replace(
                entry, outcome=outcome, took_s=round(took_s, 3), replica=replica or entry.replica
            )

    def timeline(self, unix_offset_s: float) -> tuple[m.TimelineEntry, ...]:
        """Oldest first, in wall-clock time."""
        key = (self.notes, unix_offset_s)
        if self._lifted is None or self._lifted[0] != key:
            ours = tuple(
                msgspec.structs.replace(entry, at_unix_s=entry.at_unix_s + unix_offset_s)
                for entry in self._timeline.values()
            )
            self._lifted = (key, (self._restored + ours)[-self._settings.timeline_entries_max :])
        return self._lifted[1]

    def is_due(self, now_s: float) -> bool:
        """Whether the last digest has grown old."""
        return self._published_s is None or now_s - self._published_s >= self._settings.digest_s

    def build(self, now_s: float, epoch: int, unix_offset_s: float, outlooks: dict[str, Told]) -> PublishDigest:
        """The digest of this moment."""
        self._weights = {replica: w for replica, w in self._weights.items() if replica in self._pool.replicas}
        known, self._told = self._told, {}
        replicas = tuple([self._tell(replica, known) for replica in self._pool.replicas_in_order() if not replica.dead])
        demand, nobody = self._pool.inflow.demand(now_s), Demand()
        models = tuple(
            m.PoolModel(
                deployment=record.deployment,
                model_hash=record.model_hash,
                name=name,
                estimated_wait_s=round(outlook.estimated_wait_s, 1),
                refusal=outlook.refusal,
                retry_after_s=outlook.retry_after_s,
                permanent=outlook.permanent,
                class_weights=self._fairness.weights(record.deployment),
                waiting_queues=tuple(sorted(demand.get(record.deployment, nobody).queues, key=_by_name)),
                kv=self._pool.kv.of(record.kv_signature),
                costs=costs,
            )
            for name, (record, outlook, costs) in outlooks.items()
        )
        self._published_s = now_s
        self._sequence += 1
        self.latest = m.PoolDigest(
            epoch=epoch,
            sequence=self._sequence,
            replicas=replicas,
            models=models,
            dead=tuple(self._pool.dead)[-DEAD_TOLD_MAX:],
        )
        stored = msgspec.structs.replace(self.latest, dead=tuple(self._pool.dead), timeline=self.timeline(unix_offset_s))
        return PublishDigest(self.latest, stored)

    def _tell(self, replica: Replica, known: dict[ReplicaId, m.PoolReplica]) -> m.PoolReplica:
        """A replica's row: the same object as long as it says the same."""
        report = replica.report
        leaves = report.replica in self._pool.leaving and report.state is m.ReplicaState.READY
        state = m.ReplicaState.DRAINING if leaves else report.state
        suspect = self._pool.workers[replica.worker].presence is Presence.SUSPECT
        weight = self._weights.get(report.replica, 1.0) * (HEAVIEST_FACTOR if report.replica in self._gives_way else 1.0)
        measure = self.measures.get(report.replica, 0)
        row = known.get(report.replica)
        if row is None or (row.state, row.suspect, row.weight, row.measure) != (state, suspect, weight, measure):
            row = m.PoolReplica(
                replica=report.replica,
                deployment=report.deployment,
                model_hash=report.model_hash,
                worker=replica.worker,
                device=report.device,
                state=state,
                suspect=suspect,
                weight=weight,
                measure=measure,
            )
        self._told[report.replica] = row
        return row


def _by_name(queue: tuple[m.SlaClass, m.Lane]) -> tuple[str, str]:
    return queue[0].value, queue[1].value
