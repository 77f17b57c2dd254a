"""What the scheduler knows of workers: silence, news, and what a person asks for."""

from __future__ import annotations

import msgspec
import pytest

from broker.core.pool.events import (
    BeatSeen,
    BusRoundTripMade,
    ModelApplied,
    ModelRemoved,
    OperationSeen,
    PublishDigest,
    SchedulerEvent,
    Ticked,
    UnloadRequested,
    WorkerReported,
)
from subjects.ids import ReplicaId, WorkerId
from subjects.messages import DrainReplica, LoadModel, ReplicaDied, ReplicaState, WorkerSnapshot
from tests.core.scheduler_world import UNIX_S, record
from tests.core.test_placement import A, B, Bench, V, W, commands, listed, sent, settled
from tests.core.words import pin, said

SMALL_A = record("a", 0.5)


def is_news(bench: Bench, event: SchedulerEvent) -> bool:
    """Whether a digest goes out with the event."""
    return any(isinstance(command, PublishDigest) for command in bench.core.step(bench.now_s, event))


def test_others_hear_at_once_of_what_changes() -> None:
    """A new or changed model, a pin, a removed name, a replica that appears, changes, dies: each is a digest at once."""
    bench = settled(A)
    bench.report()
    for event in (
        ModelApplied(B),
        ModelApplied(record("b", revision=2)),
        said(pin("b")),
        ModelRemoved("b"),
    ):
        assert is_news(bench, event)
        assert not is_news(bench, BeatSeen(W, 0))
    for replicas in ((listed("a", ReplicaState.LOADING),), (listed("a"),), ()):
        bench.sequence += 1
        snapshot = WorkerSnapshot(worker=W, sequence=bench.sequence, epoch_seen=0, devices=(), replicas=replicas)
        assert is_news(bench, WorkerReported(snapshot))
        assert not is_news(bench, WorkerReported(snapshot)), "an old report is a sign of life only"
    bench.report(listed("a", replica="a-9-2-00000000aa"))
    died = ReplicaDied(worker=W, replica=ReplicaId("a-9-2-00000000aa"), detail="SIGSEGV")
    assert is_news(bench, OperationSeen(died))


def test_a_quiet_pool_is_told_once_a_second() -> None:
    """Ten ticks, one digest."""
    bench = settled(A)
    bench.report()
    bench.tick(1.0)
    before = len([command for command in bench.out if isinstance(command, PublishDigest)])
    bench.tick(3.0)
    assert len([command for command in bench.out if isinstance(command, PublishDigest)]) == before + 3


def test_a_round_trip_after_a_long_gap_proves_nothing_about_the_gap() -> None:
    """A second is a gap that counts; more is time in which we were deaf ourselves."""
    for gap_s, suspect in ((1.0, True), (1.1, False)):
        bench = settled(A)
        bench.report()
        bench.now_s += gap_s
        bench.step(BusRoundTripMade())
        bench.step(Ticked(UNIX_S))
        assert (bench.core.pool.workers[W].presence.value == "suspect") is suspect


def test_a_dead_worker_is_forgotten_after_a_minute() -> None:
    """With all that was listed there; until then it is shown as what it is."""
    bench = settled(A)
    bench.report(listed("a"))
    bench.tick(2.5, beats=())
    assert bench.core.pool.workers[W].presence.value == "dead"
    assert list(bench.digest.dead) == ["a-9-1-00000000aa"]
    bench.tick(59.0, beats=())
    assert W in bench.core.pool.workers and bench.core.pool.replicas
    bench.tick(1.0, beats=())
    assert W not in bench.core.pool.workers and not bench.core.pool.replicas
    assert bench.core.pool.devices(usable=False) == []


def test_a_suspect_worker_gets_no_new_work_and_a_sign_of_life_brings_it_back() -> None:
    """Three tenths of a second without a beat are enough."""
    bench = settled(A)
    bench.report()
    bench.tick(0.4, beats=())
    assert commands(bench.demand(a=0.2)) == []
    (load,) = commands(bench.step(BeatSeen(W, 0)))
    assert isinstance(load, LoadModel)


def test_a_person_unloads_a_model_and_only_demand_brings_it_back() -> None:
    """Its minimum does not; other models and dead replicas are left alone; a standby does nothing."""
    minimum = record("a", 0.5, min_replicas=1)
    bench = settled(minimum, record("b", 0.5))
    bench.report(listed("a", gib=0.5), listed("b", gib=0.5))
    (drain,) = sent(bench.step(UnloadRequested("a")))
    assert isinstance(drain.command, DrainReplica) and drain.command.replica == "a-9-1-00000000aa"
    assert sent(bench.step(UnloadRequested("a"))) == [], "it leaves already"
    assert sent(bench.step(UnloadRequested("nobody"))) == []
    (unload,) = sent(bench.ended(drain))
    bench.ended(unload)
    bench.report(listed("b", gib=0.5))
    assert sent(bench.tick(5.0)) == []
    (load,) = commands(bench.demand(a=0.2))
    assert isinstance(load, LoadModel) and load.record.name == "a"
    standby = Bench(minimum, leads=False)
    standby.report(listed("a", gib=0.5))
    assert sent(standby.step(UnloadRequested("a"))) == []


def test_a_long_idle_model_is_unloaded_where_that_is_wished() -> None:
    """After the keep time of its file; not by default so soon; pinned ones and those with demand stay."""
    for keep_s, waits, pinned, leaves in (
        (60.0, False, False, True),
        (None, False, False, False),
        (60.0, True, False, False),
        (60.0, False, True, False),
        (600.0, False, False, False),
    ):
        bench = settled(msgspec.structs.replace(A, keep_s=keep_s))
        if pinned:
            bench.step(said(pin("a")))
        bench.report(listed("a", idle_s=100.0))
        for _ in range(20):
            if waits:
                bench.demand(a=0.1)
            bench.tick(5.0)
        assert bool(bench.core.transactions.running) is leaves


@pytest.mark.parametrize(("silent", "mass"), [(3, False), (4, True)])
def test_four_of_ten_that_fall_silent_together_are_a_network(silent: int, mass: bool) -> None:
    """Less than four, or no more than three in ten, are not."""
    bench = settled(A)
    everybody = [WorkerId(f"w-{number}") for number in range(10)]
    for worker in everybody:
        bench.report(worker=worker)
    bench.tick(1.2, beats=everybody[silent:])
    assert bench.core.pool.mass_silence is mass
    bench.tick(1.2, beats=everybody[silent:])
    dead = [worker for worker in everybody if bench.core.pool.workers[worker].presence.value == "dead"]
    assert dead == ([] if mass else everybody[:silent])
    bench.tick(5.0, beats=everybody[silent:])
    dead = [worker for worker in everybody if bench.core.pool.workers[worker].presence.value == "dead"]
    assert dead == everybody[:silent]


def test_a_worker_that_drains_serves_nobody_new() -> None:
    """Its replicas count for nothing, so that the model is loaded elsewhere."""
    bench = settled(SMALL_A)
    bench.report(listed("a", gib=0.5), draining=True)
    bench.report(worker=V)
    (load,) = sent(bench.demand(a=0.2))
    assert load.worker == V
