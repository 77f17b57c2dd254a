"""What a gateway is told of a model that is not ready, and in which order models get room."""

from __future__ import annotations

from typing import Any

import pytest

from broker.core.plan.coordinator import CoordinatorSettings
from broker.core.plan.tunables import FAILING_IDLE_S, IDLE_S
from broker.core.pool.events import DigestRestored, LeadershipGained, ModelRemoved, SchedulerSettings
from subjects.messages import DrainReplica, EngineType, LoadModel, PoolDigest, PoolModel, ReplicaState, TimelineEntry
from tests.core.scheduler_world import UNIX_S, record
from tests.core.test_placement import A, B, Bench, C, V, W, commands, listed, sent, settled
from tests.core.words import pin, said

GUESS_S = 5.0 + 768 / 200
"""A first guess for a model whose weights are 768 MiB."""


def told(bench: Bench, name: str, *, after_s: float = 0.0) -> PoolModel:
    """The digest's word on a model: a removal is news, so that there is a new one at once."""
    bench.tick(after_s)
    bench.step(ModelRemoved("nobody"))
    return next(model for model in bench.digest.models if model.name == name)


def words(model: PoolModel) -> tuple[float, str, int, bool]:
    """Wait, refusal, Retry-After, for ever."""
    return model.estimated_wait_s, model.refusal, model.retry_after_s, model.permanent


def test_no_worker_for_an_engine_is_told_after_ten_seconds() -> None:
    """Workers may be on their way; one that comes ends the refusal, and the count starts anew when it dies."""
    bench = settled(A)
    first = told(bench, "a")
    assert first.refusal == ""
    assert first.estimated_wait_s == pytest.approx(GUESS_S + 8, abs=0.05)
    assert told(bench, "a", after_s=9.0).refusal == ""
    none = "no connected worker runs the engine simulated"
    assert words(told(bench, "a", after_s=1.5)) == (0.0, none, 5, False)
    bench.report(engines=(EngineType.VLLM,))
    assert told(bench, "a").refusal == none
    bench.report(worker=V)
    assert told(bench, "a").refusal == ""
    assert told(bench, "a", after_s=11.0).refusal == ""
    assert bench.core.pool.workers[V].presence.value == "dead"
    assert told(bench, "a", after_s=2.0).refusal == none


def test_a_scheduler_that_was_paused_does_not_count_the_pause() -> None:
    """It has not heard anybody while it did not run; that is no evidence that nobody is there (F10)."""
    bench = settled(A)
    assert told(bench, "a", after_s=1.0).refusal == ""
    bench.now_s += 30.0
    assert told(bench, "a").refusal == ""
    assert told(bench, "a", after_s=5.0).refusal == ""
    assert told(bench, "a", after_s=5.0).refusal != ""


def test_a_wait_is_the_load_and_what_others_may_take_before() -> None:
    """Nothing but the load with free room or an idle resident, eight seconds more with a busy one."""
    bench = settled(A, B)
    bench.report()
    assert told(bench, "b").estimated_wait_s == pytest.approx(GUESS_S, abs=0.05)
    bench.report(listed("a"))
    assert told(bench, "b").estimated_wait_s == pytest.approx(GUESS_S, abs=0.05)
    bench.demand(a=(1, 0.0))
    bench.report(listed("a", running=1, idle_s=0.0))
    assert told(bench, "b").estimated_wait_s == pytest.approx(GUESS_S + 8.0, abs=0.05)
    assert told(bench, "a").estimated_wait_s == 0.0


def test_a_load_under_way_is_shortened_by_its_age() -> None:
    """Down to half a second, however long it overruns; one that nobody here began takes a whole load."""
    bench = settled(A)
    bench.report()
    (load,) = sent(bench.demand(a=0.2))
    bench.answer(load)
    bench.core.catalogue.model(A.deployment).load_s = 4.0
    assert told(bench, "a", after_s=1.0).estimated_wait_s == 3.0
    assert told(bench, "a", after_s=9.0).estimated_wait_s == 0.5
    bench = settled(A)
    bench.core.catalogue.model(A.deployment).load_s = 4.0
    bench.report(listed("a", ReplicaState.LOADING))
    assert told(bench, "a").estimated_wait_s == 4.0


def test_a_failure_is_told_with_its_count_and_the_next_try() -> None:
    """Pause and load are the wait; whole seconds, rounded up, are the Retry-After; what the load said is not for clients."""
    bench = settled(A)
    bench.report()
    model = bench.core.catalogue.model(A.deployment)
    model.load_s, model.failure = 3.0, "broken"
    model.failures, model.retry_s = 1, bench.now_s + 5.0
    assert words(told(bench, "a")) == (8.0, "loading failed once, next try in 5 s", 5, False)
    model.failures, model.retry_s = 3, bench.now_s + 5.25
    assert words(told(bench, "a")) == (8.2, "loading failed 3 times, next try in 5 s", 6, False)
    model.retry_s = bench.now_s + 0.25  # never "0 s"
    assert words(told(bench, "a"))[1:] == ("loading failed 3 times, next try in 1 s", 1, False)


def test_a_failed_model_without_room_is_told_so() -> None:
    """It may take only what nobody has used for a minute: come back after a turn."""
    bench = settled(A, B)
    model = bench.core.catalogue.model(B.deployment)
    model.load_s, model.failure, model.failures = 3.0, "broken", 2
    bench.report(listed("a", idle_s=20.0))
    text = "loading failed 2 times, and no free room to try again"
    assert words(told(bench, "b")) == (3.0, text, 8, False)
    assert told(bench, "b", after_s=40.5).refusal == ""


def test_what_can_never_be_is_told_for_ever_or_for_half_a_minute() -> None:
    """Too big for every device; or all room is held by what must stay, and by whom."""
    bench = settled(record("big", 4.0), A)
    bench.report(gib=3.0)
    need = "4.0 GiB (weights 3.0 GiB + KV 512.0 MiB + overhead 512.0 MiB)"
    assert words(told(bench, "big")) == (0.0, f"needs {need}, largest device has 3.0 GiB", 0, True)
    assert "cannot-fit" in bench.alerts()
    bench = settled(A, B, record("kept", min_replicas=1))
    bench.step(said(pin("a")))
    bench.report(listed("a"), listed("kept"), gib=2.0)
    need = "1.0 GiB (weights 768.0 MiB + KV 128.0 MiB + overhead 128.0 MiB)"
    text = f"no capacity, pinned: needs {need}; pinned models or minimum replicas hold the room (a, kept)"
    assert words(told(bench, "b")) == (0.0, text, 30, False)
    bench.report(listed("a"), listed("kept"), gib=3.0)
    assert told(bench, "b").refusal == ""


@pytest.mark.parametrize("changes", [{"tenant": "blue"}, {"allow_co_location": False}, {}])
def test_who_may_not_live_beside_what_stays_is_told_so(changes: dict[str, Any]) -> None:
    """Memory is not all: tenants, who wants a device for itself, and how many may share one."""
    alone = record("b", **changes)
    bench = settled(
        alone, record("kept", min_replicas=1), settings=SchedulerSettings(models_per_device_max=2 if changes else 1)
    )
    bench.report(listed("kept"), gib=8.0)
    need = "1.0 GiB (weights 768.0 MiB + KV 128.0 MiB + overhead 128.0 MiB)"
    text = f"no capacity, pinned: needs {need}; pinned models or minimum replicas hold the room (kept)"
    assert words(told(bench, "b")) == (0.0, text, 30, False)


def test_memory_that_a_kept_replica_was_lent_is_no_reason_to_refuse() -> None:
    """KV beyond its own need goes back when others need room (SCH-9)."""
    bench = settled(B, record("kept", min_replicas=1))
    bench.report(listed("kept", gib=3.0), gib=3.0)
    assert told(bench, "b").refusal == ""


def test_who_waited_longest_is_first_and_a_minimum_is_last() -> None:
    """One place, three that want it."""
    kept = record("a-kept", min_replicas=1)
    for waits, first in (({"b": 0.2, "c": 0.5}, "c"), ({"b": 0.5, "c": 0.2}, "b"), ({}, "a-kept")):
        bench = settled(kept, B, C)
        bench.demand(**waits)
        bench.report()
        (load,) = commands(bench.tick(0.1))
        assert isinstance(load, LoadModel) and load.record.name == first
    bench = settled(kept)
    bench.report()
    (load,) = commands(bench.tick(0.1))
    assert isinstance(load, LoadModel)
    assert load.reason == "below its minimum of 1"


@pytest.mark.parametrize(
    ("wait_s", "replicas_max", "coming", "grows"),
    [(0.3, 2, False, False), (2.0, 2, False, True), (5.0, 1, False, False), (5.0, 2, True, False)],
)
def test_a_model_grows_when_requests_wait_beside_busy_replicas(
    wait_s: float, replicas_max: int, coming: bool, grows: bool
) -> None:
    """When they wait for long since no seat is free, up to its maximum."""
    model = record("a", max_replicas=replicas_max)
    bench = settled(model)
    bench.report(worker=V)
    replicas = [listed("a", running=8, idle_s=0.0)]
    if coming:
        replicas.append(listed("a", ReplicaState.LOADING, replica="a-9-2-00000000ab"))
    bench.report(*replicas, gib=4.0)
    out = commands(bench.demand(a=(8, wait_s))) + commands(bench.tick(0.2, beats=(W, V)))
    assert [type(command) for command in out] == ([LoadModel] if grows else [])
    if grows:
        assert isinstance(out[0], LoadModel)
        assert out[0].reason.startswith("1 waiting for 2")


def test_the_device_where_the_least_is_lost_is_cleared() -> None:
    """Idle before busy, one before two, the longest unused."""
    bench = settled(A, B, C, record("new", 1.0))
    bench.report(listed("a", idle_s=50.0))
    bench.report(listed("b", idle_s=60.0), worker=V)
    (drain,) = sent(bench.demand(new=0.2))
    assert drain.worker == V
    half_a, half_b = record("a", 0.5), record("b", 0.5)
    bench = settled(half_a, half_b, C, record("new", 1.0))
    bench.report(listed("a", gib=0.5, idle_s=90.0), listed("b", gib=0.5, idle_s=90.0))
    bench.report(listed("c", idle_s=30.0), worker=V)
    (drain,) = sent(bench.demand(new=0.2))
    assert (drain.worker, drain.command.reason) == (V, "1 waiting for 0.2 s; c leaves")
    bench = settled(A, B, record("new", 1.0))
    bench.report(listed("a", running=1, idle_s=0.0))
    bench.report(listed("b", idle_s=3.0), worker=V)
    (drain,) = sent(bench.demand(a=(1, 0.0), new=60.0))
    assert drain.worker == V


def test_two_leave_where_one_is_not_enough() -> None:
    """Both are named, both are drained, the newcomer waits for both."""
    half_a, half_b = record("a", 0.5), record("b", 0.5)
    bench = settled(half_a, half_b, record("new", 1.0))
    bench.report(listed("a", gib=0.5), listed("b", gib=0.5, idle_s=200.0))
    first, second = sent(bench.demand(new=0.2))
    assert [d.command.replica for d in (first, second) if isinstance(d.command, DrainReplica)] == [
        "b-9-1-00000000aa",
        "a-9-1-00000000aa",
    ]
    assert first.command.reason == "1 waiting for 0.2 s; b, a leave"
    (unload,) = sent(bench.ended(first))
    assert sent(bench.ended(unload)) == []
    (unload,) = sent(bench.ended(second))
    (load,) = sent(bench.ended(unload))
    assert isinstance(load.command, LoadModel) and load.command.record.name == "new"


def test_settings_have_the_numbers_that_operators_read_about() -> None:
    """The first policy in one place; who changes one changes what people were told."""
    settings = SchedulerSettings()
    assert (settings.suspect_s, settings.dead_s, settings.ingress_silent_s) == (0.3, 2.0, 2.0)
    policy = CoordinatorSettings()
    assert (policy.residency_s, IDLE_S, policy.turn_s, policy.keep_s) == (6.0, 1.0, 8.0, 1800.0)
    assert (settings.drain_s, settings.load_s_max, settings.unload_s_max, settings.step_grace_s) == (30.0, 300.0, 15.0, 10.0)
    assert (settings.backoff_s_min, settings.backoff_s_max, FAILING_IDLE_S) == (2.0, 60.0, 60.0)


def test_the_timeline_goes_on_from_an_earlier_leaders() -> None:
    """Its newest entries come first and make place for ours; times are those of the wall clock."""
    earlier = tuple(TimelineEntry(at_unix_s=float(number), action="load", model=f"m{number}") for number in range(5))
    bench = Bench(A, leads=False, settings=SchedulerSettings(timeline_entries_max=3))
    bench.step(DigestRestored(PoolDigest(epoch=3, sequence=41, timeline=earlier)))
    bench.step(LeadershipGained(7))
    bench.tick(0.6)
    bench.report()
    bench.step(ModelRemoved("nobody"))
    assert [entry.model for entry in bench.digest.timeline] == ["m2", "m3", "m4"]
    (load,) = sent(bench.demand(a=0.2))
    begun_s = bench.now_s
    bench.tick(0.1)
    assert [entry.model for entry in bench.digest.timeline] == ["m3", "m4", "a"]
    bench.ended(load, replica="a-7-1-00000000aa")
    entry = bench.digest.timeline[-1]
    assert (entry.action, entry.outcome, entry.took_s, entry.replica) == ("load", "done", 2.0, "a-7-1-00000000aa")
    assert entry.at_unix_s == pytest.approx(UNIX_S + begun_s, abs=0.2)
