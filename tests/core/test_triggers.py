"""Triggers from the engines' counters (SCH-13)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from broker.core.plan.policy import ReplicaView, ResizeReplicaKv, SetReplicaConcurrency
from broker.core.plan.triggers import Asked, EngineReading, Triggers
from broker.core.pool.catalogue import DeviceKey
from subjects.ids import DeploymentKey, DeviceId, ReplicaId, WorkerId
from subjects.messages import ReplicaState

A, B, C = DeploymentKey("a" * 64), DeploymentKey("b" * 64), DeploymentKey("c" * 64)
GPU = (WorkerId("w"), DeviceId("gpu0"))
OTHER_GPU = (WorkerId("w"), DeviceId("gpu1"))
PLENTY = {GPU: 10_000, OTHER_GPU: 10_000}
NOTHING = Asked()


def reading(name: str, deployment: DeploymentKey, waiting: int) -> EngineReading:
    """A ready replica at ease, with 1000 bytes of KV."""
    view = ReplicaView(
        ReplicaId(name), deployment, (GPU,), ReplicaState.READY, 0.0, 1000, 1000, 1, 16, 10, 5, 0.0, stays=False
    )
    return EngineReading(view, waiting, 0.95, 0.020, 0.019)


def seen(one: EngineReading, **changes: Any) -> EngineReading:
    """The same with another view."""
    return replace(one, view=replace(one.view, **changes))


CALM_A, CALM_B, CALM_C = reading("a-1", A, 0), reading("b-1", B, 0), reading("c-1", C, 3)


def looks(
    triggers: Triggers,
    *readings: EngineReading,
    begin_s: float = 0.0,
    count: int = 3,
    free_bytes: dict[DeviceKey, int] = PLENTY,
) -> list[Asked]:
    """So many looks, 200 ms apart."""
    return [triggers.look(begin_s + 0.2 * step, readings, dict(free_bytes)) for step in range(count)]


def test_a_calm_pool_asks_for_nothing() -> None:
    """At the levels, and where an engine does not say, nothing is to be done."""
    at_levels = replace(CALM_A, waiting=50, hit_ratio=0.85, step_s=0.0239, step_alone_s=0.019)
    silent = replace(CALM_B, waiting=500, hit_ratio=None, step_s=None, step_alone_s=None)
    assert looks(Triggers(), at_levels, silent, CALM_C) == [NOTHING] * 3


def test_low_hits_grow_kv_first() -> None:
    """A hit ratio under 85 % in three readings grows KV, once per ten seconds."""
    triggers = Triggers()
    low = replace(CALM_A, hit_ratio=0.8)
    why = "prefix hits 80% are under 85%"
    grown = Asked({low.view.replica: ResizeReplicaKv(low.view.replica, 1250, why)}, {}, {A: why})
    assert looks(triggers, low, CALM_B) == [NOTHING, NOTHING, grown]
    assert looks(triggers, low, CALM_B, begin_s=0.6, count=40) == [NOTHING] * 40
    assert looks(triggers, low, CALM_B, begin_s=10.4, count=1) == [grown]


def test_a_stall_is_contention_for_compute() -> None:
    """Steps 6 ms longer than the profile says bound a neighbour by a quarter; alone on a device nobody is bound."""
    stalled = replace(CALM_A, step_s=0.025)
    expected = SetReplicaConcurrency(CALM_B.view.replica, 12, "its steps stall for 6.0 ms")
    assert looks(Triggers(), stalled, CALM_B, CALM_C)[2] == Asked({CALM_B.view.replica: expected})
    assert looks(Triggers(), stalled, seen(CALM_C, devices=(OTHER_GPU,)))[2] == NOTHING
    assert looks(Triggers(), stalled, seen(CALM_C, stays=True))[2] == NOTHING
    assert looks(Triggers(), stalled, seen(CALM_C, slots=4))[2] == NOTHING


def test_a_long_queue_with_low_hits_does_both_at_once() -> None:
    """Over 50 waiting with hits under 70 %: a neighbour gives 30 % of its KV and another replica loads, in one look."""
    starved = replace(CALM_A, waiting=51, hit_ratio=0.69)
    why, grows = "51 requests wait with prefix hits at 69%", "prefix hits 69% are under 85%"
    asked = looks(Triggers(), starved, CALM_B, CALM_C)[2]
    assert list(asked.actions.values()) == [
        ResizeReplicaKv(CALM_B.view.replica, 700, why),
        ResizeReplicaKv(starved.view.replica, 1250, grows),
    ]
    assert (asked.more_replicas, asked.more_kv) == ({A: why}, {A: grows})


def test_priority_is_over_all_replicas() -> None:
    """What is urgent for the last replica comes before what is useful for the first; each gets one action."""
    low = replace(CALM_A, hit_ratio=0.8, step_s=0.030)
    starved = replace(CALM_B, waiting=60, hit_ratio=0.5)
    asked = looks(Triggers(), low, starved, CALM_C)[2]
    assert [(name, type(action), action.reason[:8]) for name, action in asked.actions.items()] == [
        ("a-1", ResizeReplicaKv, "60 reque"),
        ("b-1", ResizeReplicaKv, "prefix h"),
    ]
    assert list(asked.more_kv) == [B, A]


def test_nobody_gives_who_is_starved_or_locked() -> None:
    """A neighbour with a long queue of its own, or under a lock, gives no KV; the load goes ahead without it."""
    starved = replace(CALM_A, waiting=51, hit_ratio=0.69)
    asked = looks(Triggers(), starved, replace(CALM_B, waiting=51), seen(CALM_C, stays=True))[2]
    assert list(asked.actions) == ["a-1"] and list(asked.more_replicas) == [A]


def test_one_reading_is_no_trigger() -> None:
    """A pattern that does not last three readings in a row is noise."""
    triggers = Triggers()
    low = replace(CALM_A, hit_ratio=0.8)
    said = [triggers.look(0.2 * step, [low if step % 3 else CALM_A, CALM_B], {}) for step in range(12)]
    assert said == [NOTHING] * 12


def test_growth_takes_what_is_free_and_is_shared_out_once() -> None:
    """Two replicas of one device do not both get what is free there; one over two devices takes from both; a lock keeps its
    replica as it is, though more KV is wished for."""
    low, other = replace(CALM_A, hit_ratio=0.8), replace(CALM_B, hit_ratio=0.8)

    def grown(*readings: EngineReading, free_bytes: dict[DeviceKey, int]) -> list[int]:
        asked = looks(Triggers(), *readings, free_bytes=free_bytes)[2]
        assert asked.more_kv
        return [action.kv_bytes for action in asked.actions.values() if isinstance(action, ResizeReplicaKv)]

    assert grown(low, free_bytes={GPU: 0}) == grown(low, free_bytes={}) == []
    assert grown(low, other, free_bytes={GPU: 300}) == [1250, 1050]
    assert grown(seen(low, devices=(GPU, OTHER_GPU)), free_bytes={GPU: 300, OTHER_GPU: 50}) == [1100]
    assert grown(seen(low, stays=True), free_bytes=PLENTY) == []


@pytest.mark.parametrize("count", [10])
def test_the_order_of_readings_changes_nothing(count: int) -> None:
    """The same readings in any order ask for the same."""
    named = [seen(CALM_A, replica=ReplicaId(f"r-{number}")) for number in range(count)]
    readings = [replace(one, waiting=60, hit_ratio=0.1) for one in named]
    assert looks(Triggers(), *readings) == looks(Triggers(), *reversed(readings))
