"""Triggers: what a reading of the engines' own counters asks for (SCH-13).

Engines tell more than how many wait: also why they are slow. Each rule turns one pattern into facts, and a fact names the
cheap operation that answers it, in order of priority:

1. Queue over 50 while the prefix hit ratio is under 70 %: the model is both late and computing again what it knew. A
   neighbour's KV is cut by 30 % (:class:`EvictNeighbourKv`) *and* another replica is loaded (:class:`LoadReplica`), in
   parallel: neither waits for the other.
2. Prefix hit ratio under 85 %: KV is too small. Grow it first (:class:`GrowKv`), since that is the fastest lever.
3. Engine steps that stall for more than 5 ms: engines contend for compute. Bound the neighbour that disturbs most
   (:class:`EaseContention`); more KV would not help.

For the coordinator: call :meth:`Triggers.look` on each look with one :class:`EngineReading` per ready replica, and turn
what comes back into policy actions: ``GrowKv`` and ``EvictNeighbourKv`` into ``ResizeReplicaKv``, ``EaseContention`` into
``SetReplicaConcurrency``, ``LoadReplica`` into ``StartReplica`` where its placement finds room. All facts of one look are
independent, so all may be carried out at once; :func:`actions` makes the policy actions that need no placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from broker.core.plan import tunables as t
from broker.core.plan.policy import Action, ReplicaView, ResizeReplicaKv, SetReplicaConcurrency
from broker.core.plan.windows import InRow
from broker.core.pool.catalogue import DeviceKey
from subjects.ids import DeploymentKey, ReplicaId


@dataclass(frozen=True, slots=True)
class EngineReading:
    """What is known of one ready replica. Ratios and times are over the last seconds; None where the engine does not say."""

    replica: ReplicaId
    deployment: DeploymentKey
    devices: tuple[DeviceKey, ...]
    waiting: int
    """Requests that wait for its model, in all queues."""
    hit_ratio: float | None = None
    """Prefix tokens found over prefix tokens asked for. None also where hardly any prompt had a prefix to find."""
    step_s: float | None = None
    """Mean step of the engine."""
    step_alone_s: float | None = None
    """What its profile says a step with this batch takes with the devices to itself."""
    interference: float = 0.0
    """How much it slows its neighbours, from 0 to 100 (``signals.interference``)."""
    stays: bool = False
    """A person's lock: nothing is taken from it."""


@dataclass(frozen=True, slots=True)
class EvictNeighbourKv:
    """Cut ``victim``'s KV by ``ratio`` in favour of ``replica``."""

    replica: ReplicaId
    victim: ReplicaId
    ratio: float
    reason: str


@dataclass(frozen=True, slots=True)
class LoadReplica:
    """One more replica of the model, wherever there is room."""

    deployment: DeploymentKey
    reason: str


@dataclass(frozen=True, slots=True)
class GrowKv:
    """Give ``replica`` more KV, where its devices have some."""

    replica: ReplicaId
    factor: float
    reason: str


@dataclass(frozen=True, slots=True)
class EaseContention:
    """Bound what ``neighbour`` runs at once: it holds up ``replica``'s steps."""

    replica: ReplicaId
    neighbour: ReplicaId
    reason: str


Fact = EvictNeighbourKv | LoadReplica | GrowKv | EaseContention


class Triggers:
    """Applies the rules to readings, three in a row for what is noisy, and tells each fact once per ``quiet_s``."""

    def __init__(self) -> None:
        self._rows = InRow()
        self._told_s: dict[tuple[str, str], float] = {}

    def look(self, now_s: float, readings: Iterable[EngineReading]) -> tuple[Fact, ...]:
        """Facts in order of priority, then of replica. All are independent of each other."""
        ordered = sorted(readings, key=lambda reading: reading.replica)
        beside = _neighbours(ordered)
        urgent: list[Fact] = []
        growing: list[Fact] = []
        contended: list[Fact] = []
        for reading in ordered:
            if self._starved(now_s, reading):
                urgent += self._evict_and_load(now_s, reading, beside[reading.replica])
            if self._misses(now_s, reading) and self._tell(now_s, "grow", reading.replica):
                assert reading.hit_ratio is not None
                why = f"prefix hits {reading.hit_ratio:.0%} are under {t.HIT_RATIO_GROWS_KV:.0%}"
                growing.append(GrowKv(reading.replica, t.KV_GROWTH, why))
            contended += self._contends(now_s, reading, beside[reading.replica])
        return tuple(urgent + growing + contended)

    def _starved(self, now_s: float, reading: EngineReading) -> bool:
        low = reading.hit_ratio is not None and reading.hit_ratio < t.HIT_RATIO_EVICTS
        return self._rows.read(now_s, ("queue", reading.replica), low and reading.waiting > t.QUEUE_EVICTS)

    def _misses(self, now_s: float, reading: EngineReading) -> bool:
        low = reading.hit_ratio is not None and reading.hit_ratio < t.HIT_RATIO_GROWS_KV
        return self._rows.read(now_s, ("hits", reading.replica), low)

    def _evict_and_load(self, now_s: float, reading: EngineReading, beside: list[EngineReading]) -> list[Fact]:
        assert reading.hit_ratio is not None
        why = f"{reading.waiting} requests wait with prefix hits at {reading.hit_ratio:.0%}"
        facts: list[Fact] = []
        givers = [other for other in beside if not other.stays and other.waiting <= t.QUEUE_EVICTS]
        victim = min(givers, key=lambda other: (other.waiting, other.replica), default=None)
        if victim is not None and self._tell(now_s, "evict", reading.replica):
            facts.append(EvictNeighbourKv(reading.replica, victim.replica, t.EVICT_RATIO, why))
        if self._tell(now_s, "load", reading.deployment):
            facts.append(LoadReplica(reading.deployment, why))
        return facts

    def _contends(self, now_s: float, reading: EngineReading, beside: list[EngineReading]) -> list[Fact]:
        stall_s = reading.step_s - reading.step_alone_s if reading.step_s is not None and reading.step_alone_s else 0.0
        held = self._rows.read(now_s, ("stall", reading.replica), stall_s > t.STALL_S)
        others = [other for other in beside if not other.stays]
        if not held or not others:
            return []
        worst = min(others, key=lambda other: (-other.interference, other.replica))
        if not self._tell(now_s, "ease", reading.replica):
            return []
        return [EaseContention(reading.replica, worst.replica, f"its steps stall for {1000 * stall_s:.1f} ms")]

    def _tell(self, now_s: float, what: str, whom: str) -> bool:
        told_s = self._told_s.get((what, whom))
        if told_s is not None and now_s - told_s < t.QUIET_S:
            return False
        self._told_s.pop((what, whom), None)
        self._told_s[(what, whom)] = now_s
        while len(self._told_s) > t.KEPT_MAX:
            del self._told_s[next(iter(self._told_s))]
        return True


def _neighbours(readings: list[EngineReading]) -> dict[ReplicaId, list[EngineReading]]:
    """By replica the others that share a device with it, in order of replica."""
    by_device: dict[DeviceKey, list[EngineReading]] = {}
    for reading in readings:
        for device in reading.devices:
            by_device.setdefault(device, []).append(reading)
    beside: dict[ReplicaId, list[EngineReading]] = {}
    for reading in readings:
        found = {
            other.replica: other
            for device in reading.devices
            for other in by_device[device]
            if other.replica != reading.replica
        }
        beside[reading.replica] = [found[replica] for replica in sorted(found)]
    return beside


def actions(
    facts: Iterable[Fact], replicas: Mapping[ReplicaId, ReplicaView], free_bytes: Mapping[DeviceKey, int]
) -> list[Action]:
    """The policy actions for facts that need no placement, in order; a replica gets at most one.

    A replica grows by ``KV_GROWTH`` at most: what its fullest device has free, spread over all of them. What a neighbour is
    told to give is not promised to anybody here, for only its own answer says that it is free: the next look finds it.
    """
    taken: dict[ReplicaId, None] = {}
    left = dict(free_bytes)
    found: list[Action] = []
    for fact in facts:
        if isinstance(fact, LoadReplica):
            continue
        subject = fact.replica if isinstance(fact, GrowKv) else _other(fact)
        view = replicas.get(subject)
        if view is None or view.stays or subject in taken:
            continue
        action: Action | None = None
        if isinstance(fact, GrowKv):
            each = min(left.get(device, 0) for device in view.devices)
            more = min(each * len(view.devices), int(view.kv_bytes * (fact.factor - 1.0)))
            if more > 0:
                for device in view.devices:
                    left[device] = left.get(device, 0) - -(-more // len(view.devices))
                action = ResizeReplicaKv(subject, view.kv_bytes + more, fact.reason)
        elif isinstance(fact, EvictNeighbourKv):
            action = ResizeReplicaKv(subject, int(view.kv_bytes * (1.0 - fact.ratio)), fact.reason)
        elif view.slots > t.SLOTS_MIN:
            action = SetReplicaConcurrency(subject, max(t.SLOTS_MIN, int(view.slots * t.SLOTS_EASED)), fact.reason)
        if action is not None:
            taken[subject] = None
            found.append(action)
    return found


def _other(fact: EvictNeighbourKv | EaseContention) -> ReplicaId:
    return fact.victim if isinstance(fact, EvictNeighbourKv) else fact.neighbour
