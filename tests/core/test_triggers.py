"""Triggers from the engines' counters (SCH-13)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.core.plan.policy import ReplicaView, ResizeReplicaKv, SetReplicaConcurrency
from broker.core.plan.triggers import (
    EaseContention,
    EngineReading,
    EvictNeighbourKv,
    Fact,
    GrowKv,
    LoadReplica,
    Triggers,
    actions,
)
from subjects.ids import DeploymentKey, DeviceId, ReplicaId, WorkerId
from subjects.messages import ReplicaState

A, B, C = DeploymentKey("a" * 64), DeploymentKey("b" * 64), DeploymentKey("c" * 64)
GPU = (WorkerId("w"), DeviceId("gpu0"))
OTHER_GPU = (WorkerId("w"), DeviceId("gpu1"))
CALM_A = EngineReading(ReplicaId("a-1"), A, (GPU,), 0, 0.95, 0.020, 0.019)
CALM_B = EngineReading(ReplicaId("b-1"), B, (GPU,), 0, 0.95, 0.020, 0.019, interference=10.0)
CALM_C = EngineReading(ReplicaId("c-1"), C, (GPU,), 3, 0.95, 0.020, 0.019, interference=50.0)


def looks(triggers: Triggers, *readings: EngineReading, begin_s: float = 0.0, count: int = 3) -> list[tuple[Fact, ...]]:
    """So many looks, 200 ms apart."""
    return [triggers.look(begin_s + 0.2 * step, readings) for step in range(count)]


def test_a_calm_pool_asks_for_nothing() -> None:
    """At the levels, and where an engine does not say, nothing is to be done."""
    at_levels = replace(CALM_A, waiting=50, hit_ratio=0.85, step_s=0.0239, step_alone_s=0.019)
    silent = replace(CALM_B, waiting=500, hit_ratio=None, step_s=None, step_alone_s=None)
    assert looks(Triggers(), at_levels, silent, CALM_C) == [(), (), ()]


def test_low_hits_grow_kv_first() -> None:
    """A hit ratio under 85 % in three readings grows KV, once per ten seconds."""
    triggers = Triggers()
    low = replace(CALM_A, hit_ratio=0.8)
    assert looks(triggers, low, CALM_B) == [(), (), (GrowKv(low.replica, 1.25, "prefix hits 80% are under 85%"),)]
    assert looks(triggers, low, CALM_B, begin_s=0.6, count=40) == [()] * 40
    assert len(looks(triggers, low, CALM_B, begin_s=10.4, count=1)[0]) == 1


def test_a_stall_is_contention_for_compute() -> None:
    """Steps 6 ms longer than the profile says bound the neighbour that disturbs most; alone on a device nobody is bound."""
    stalled = replace(CALM_A, step_s=0.025)
    expected = EaseContention(stalled.replica, CALM_C.replica, "its steps stall for 6.0 ms")
    assert looks(Triggers(), stalled, CALM_B, CALM_C)[2] == (expected,)
    assert looks(Triggers(), stalled, replace(CALM_C, devices=(OTHER_GPU,)))[2] == ()
    assert looks(Triggers(), stalled, replace(CALM_C, stays=True))[2] == ()


def test_a_long_queue_with_low_hits_does_both_at_once() -> None:
    """Over 50 waiting with hits under 70 %: a neighbour gives 30 % of its KV and another replica loads, in one look."""
    starved = replace(CALM_A, waiting=51, hit_ratio=0.69)
    why = "51 requests wait with prefix hits at 69%"
    facts = looks(Triggers(), starved, CALM_B, CALM_C)[2]
    assert facts == (
        EvictNeighbourKv(starved.replica, CALM_B.replica, 0.3, why),
        LoadReplica(A, why),
        GrowKv(starved.replica, 1.25, "prefix hits 69% are under 85%"),
    )


def test_priority_is_over_all_replicas() -> None:
    """What is urgent for the last replica comes before what is useful for the first."""
    low = replace(CALM_A, hit_ratio=0.8, step_s=0.030)
    starved = replace(CALM_B, waiting=60, hit_ratio=0.5)
    kinds = [type(fact) for fact in looks(Triggers(), low, starved, CALM_C)[2]]
    assert kinds == [EvictNeighbourKv, LoadReplica, GrowKv, GrowKv, EaseContention]


def test_nobody_gives_who_is_starved_or_locked() -> None:
    """A neighbour with a long queue of its own, or under a lock, gives no KV; the load goes ahead without it."""
    starved = replace(CALM_A, waiting=51, hit_ratio=0.69)
    facts = looks(Triggers(), starved, replace(CALM_B, waiting=51), replace(CALM_C, stays=True))[2]
    assert [type(fact) for fact in facts] == [LoadReplica, GrowKv]


def test_one_reading_is_no_trigger() -> None:
    """A pattern that does not last three readings in a row is noise."""
    triggers = Triggers()
    low = replace(CALM_A, hit_ratio=0.8)
    said = [triggers.look(0.2 * step, [low if step % 3 else CALM_A, CALM_B]) for step in range(12)]
    assert said == [()] * 12


def view(reading: EngineReading, kv_bytes: int, slots: int = 16, stays: bool = False) -> ReplicaView:
    """A ready replica with so much KV."""
    return ReplicaView(
        reading.replica,
        reading.deployment,
        reading.devices,
        ReplicaState.READY,
        0.0,
        kv_bytes,
        kv_bytes,
        1,
        slots,
        10,
        5,
        0.0,
        stays,
    )


def test_facts_become_actions() -> None:
    """Growth takes what is free and no more, giving is by ratio, easing by a quarter; a lock keeps its replica as it is."""
    views = {reading.replica: view(reading, 1000) for reading in (CALM_A, CALM_B, CALM_C)}
    facts: list[Fact] = [
        EvictNeighbourKv(CALM_A.replica, CALM_B.replica, 0.3, "why"),
        LoadReplica(A, "why"),
        GrowKv(CALM_A.replica, 1.25, "why"),
        EaseContention(CALM_A.replica, CALM_C.replica, "why"),
        EaseContention(CALM_C.replica, CALM_B.replica, "why"),
    ]
    assert actions(facts, views, {GPU: 100}) == [
        ResizeReplicaKv(CALM_B.replica, 700, "why"),
        ResizeReplicaKv(CALM_A.replica, 1100, "why"),
        SetReplicaConcurrency(CALM_C.replica, 12, "why"),
    ]
    assert actions(facts[2:3], views, {GPU: 0}) == []
    assert actions(facts[2:3], views, {GPU: 10_000}) == [ResizeReplicaKv(CALM_A.replica, 1250, "why")]
    locked = {CALM_C.replica: view(CALM_C, 1000, stays=True)}
    assert actions(facts, locked, {GPU: 100}) == []
    assert actions(facts[3:4], {CALM_C.replica: view(CALM_C, 1000, slots=4)}, {}) == []


def test_growth_is_shared_out_once() -> None:
    """Two replicas of one device do not both get what is free there; one over two devices takes from both."""
    grow: list[Fact] = [GrowKv(CALM_A.replica, 1.25, ""), GrowKv(CALM_B.replica, 1.25, "")]
    views = {CALM_A.replica: view(CALM_A, 1000), CALM_B.replica: view(CALM_B, 1000)}
    assert actions(grow, views, {GPU: 300}) == [
        ResizeReplicaKv(CALM_A.replica, 1250, ""),
        ResizeReplicaKv(CALM_B.replica, 1050, ""),
    ]
    wide = replace(CALM_A, devices=(GPU, OTHER_GPU))
    assert actions(grow[:1], {wide.replica: view(wide, 1000)}, {GPU: 300, OTHER_GPU: 50}) == [
        ResizeReplicaKv(wide.replica, 1100, "")
    ]


@pytest.mark.parametrize("count", [10])
def test_the_order_of_readings_changes_nothing(count: int) -> None:
    """The same readings in any order give the same facts."""
    readings = [replace(CALM_A, replica=ReplicaId(f"r-{number}"), waiting=60, hit_ratio=0.1) for number in range(count)]
    assert looks(Triggers(), *readings) == looks(Triggers(), *reversed(readings))
