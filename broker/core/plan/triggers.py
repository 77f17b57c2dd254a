"""Triggers: what a reading of the engines' own counters asks for (SCH-13).

Engines tell more than how many wait: also why they are slow. Each rule answers one pattern with the cheap operation for it;
in order of priority:

1. Queue over 50 while the prefix hit ratio is under 70 %: the model is both late and computing again what it knew. A
   neighbour's KV is cut by 30 % *and* another replica is wished for, in parallel: neither waits for the other.
2. Prefix hit ratio under 85 %: KV is too small. Grow it first, since that is the fastest lever.
3. Engine steps that stall for more than 5 ms: engines contend for compute. Bound a neighbour; more KV would not help.

Operations that need no placement are policy actions at once, all of one look independent of each other; the rest are wishes
for the next plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from broker.core.plan import tunables as t
from broker.core.plan.in_row import InRow
from broker.core.plan.policy import ReplicaView, ResizeReplicaKv, SetReplicaConcurrency
from broker.core.pool.catalogue import DeviceKey
from subjects.ids import DeploymentKey, ReplicaId


class EngineReading(msgspec.Struct, frozen=True):
    """What is known of one ready replica. Ratios and times are over the last seconds; None where the engine does not say."""

    view: ReplicaView
    waiting: int
    """Requests that wait for its model, in all queues."""
    hit_ratio: float | None = None
    """Prefix tokens found over prefix tokens asked for. None also where hardly any prompt had a prefix to find."""
    step_s: float | None = None
    """Mean step of the engine."""
    step_alone_s: float | None = None
    """What its profile says a step with this batch takes with the devices to itself."""


class Asked(msgspec.Struct, frozen=True):
    """What the readings of one look ask for, each in order of priority, then of replica."""

    actions: dict[ReplicaId, ResizeReplicaKv | SetReplicaConcurrency] = msgspec.field(default_factory=dict)
    """One for a replica at most."""
    more_replicas: dict[DeploymentKey, str] = msgspec.field(default_factory=dict)
    """One more replica of the model, wherever there is room, and why."""
    more_kv: dict[DeploymentKey, str] = msgspec.field(default_factory=dict)


class Triggers:
    """Applies the rules to readings, three in a row for what is noisy, and tells each thing once per ``QUIET_S``."""

    def __init__(self) -> None:
        self._rows = InRow()
        self._told_s: dict[tuple[str, str], float] = {}

    def look(self, now_s: float, readings: Iterable[EngineReading], free_bytes: dict[DeviceKey, int]) -> Asked:
        """What they ask for; takes from ``free_bytes`` what it gives.

        A replica grows by ``KV_GROWTH`` at most: what its fullest device has free, spread over all of them. What a
        neighbour is told to give is promised to nobody here, for only its own answer says that it is free: the next look
        finds it.
        """
        ordered = sorted(readings, key=lambda reading: reading.view.replica)
        on: dict[DeviceKey, list[EngineReading]] = {}
        for reading in ordered:
            for device in reading.view.devices:
                on.setdefault(device, []).append(reading)

        def beside(reading: EngineReading) -> list[EngineReading]:
            near = [other for device in reading.view.devices for other in on[device]]
            return [other for other in near if other is not reading and not other.view.stays]

        asked = Asked()
        for reading in ordered:
            view, hits = reading.view, 1.0 if reading.hit_ratio is None else reading.hit_ratio
            low = hits < t.HIT_RATIO_EVICTS and reading.waiting > t.QUEUE_EVICTS
            if not self._rows.read(now_s, ("queue", view.replica), low):
                continue
            why = f"{reading.waiting} requests wait with prefix hits at {hits:.0%}"
            givers = [other for other in beside(reading) if other.waiting <= t.QUEUE_EVICTS]
            if givers and self._tell(now_s, "evict", view.replica):
                giver = min(givers, key=lambda other: (other.waiting, other.view.replica)).view
                kv_bytes = int(giver.kv_bytes * (1.0 - t.EVICT_RATIO))
                asked.actions.setdefault(giver.replica, ResizeReplicaKv(giver.replica, kv_bytes, why))
                asked.more_kv[view.deployment] = why
            if self._tell(now_s, "load", view.deployment):
                asked.more_replicas[view.deployment] = why
        for reading in ordered:
            view, hits = reading.view, 1.0 if reading.hit_ratio is None else reading.hit_ratio
            low = hits < t.HIT_RATIO_GROWS_KV
            if self._rows.read(now_s, ("hits", view.replica), low) and self._tell(now_s, "grow", view.replica):
                why = f"prefix hits {hits:.0%} are under {t.HIT_RATIO_GROWS_KV:.0%}"
                asked.more_kv[view.deployment] = why
                each = min(free_bytes.get(device, 0) for device in view.devices)
                more = min(each * len(view.devices), int(view.kv_bytes * (t.KV_GROWTH - 1.0)))
                if more > 0 and not view.stays and view.replica not in asked.actions:
                    for device in view.devices:
                        free_bytes[device] -= -(-more // len(view.devices))
                    asked.actions[view.replica] = ResizeReplicaKv(view.replica, view.kv_bytes + more, why)
        for reading in ordered:
            stall_s = reading.step_s - reading.step_alone_s if reading.step_s is not None and reading.step_alone_s else 0.0
            replica = reading.view.replica
            if not self._rows.read(now_s, ("stall", replica), stall_s > t.STALL_S):
                continue
            worst = min((other.view for other in beside(reading)), key=lambda view: view.replica, default=None)
            if worst is not None and self._tell(now_s, "ease", replica) and worst.slots > t.SLOTS_MIN:
                slots, why = int(worst.slots * t.SLOTS_EASED), f"its steps stall for {1000 * stall_s:.1f} ms"
                eased = SetReplicaConcurrency(worst.replica, max(t.SLOTS_MIN, slots), why)
                asked.actions.setdefault(worst.replica, eased)
        return asked

    def _tell(self, now_s: float, what: str, whom: str) -> bool:
        if now_s - self._told_s.get((what, whom), -math.inf) < t.QUIET_S:
            return False
        self._told_s.pop((what, whom), None)
        self._told_s[(what, whom)] = now_s
        if len(self._told_s) > t.KEPT_MAX:
            del self._told_s[next(iter(self._told_s))]
        return True
