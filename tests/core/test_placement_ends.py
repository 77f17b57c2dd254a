"""How scale actions end when replicas fail or die on the way."""

from __future__ import annotations

import pytest

from broker.core.pool.events import OperationSeen, SchedulerCommand, SendCommand
from broker.core.pool.transactions import Stage
from subjects.ids import ReplicaId
from subjects.messages import CommandOutcome, LoadModel, ReplicaDied, ReplicaState, UnloadReplica
from tests.core.scheduler_world import GIB, record
from tests.core.test_placement import A, B, Bench, V, W, listed, sent, settled

RESIDENT = ReplicaId("a-9-1-00000000aa")


def died(bench: Bench, replica: str, detail: str = "SIGSEGV") -> list[SchedulerCommand]:
    """An agent tells of the end of a process."""
    return bench.step(OperationSeen(ReplicaDied(worker=W, replica=ReplicaId(replica), detail=detail)))


def loading(bench: Bench) -> SendCommand:
    """A's load, accepted and listed."""
    bench.report()
    (load,) = sent(bench.demand(a=0.2))
    bench.answer(load)
    bench.report(listed("a", ReplicaState.LOADING, replica="a-7-1-00000000aa"))
    return load


def draining(bench: Bench, *, running: int = 0) -> SendCommand:
    """A's drain for B, accepted."""
    bench.report(listed("a"))
    (drain,) = sent(bench.demand(b=0.2))
    bench.answer(drain)
    bench.report(listed("a", ReplicaState.DRAINING, running=running))
    return drain


def test_a_newcomer_that_dies_is_the_models_failure() -> None:
    """Its last words are the reason; an unknown reason has words of its own."""
    for detail, failure in (("SIGSEGV", "SIGSEGV"), ("", "its process ended while it was loading")):
        bench = settled(A)
        loading(bench)
        died(bench, "a-7-1-00000000aa", detail)
        assert not bench.core.transactions.running
        assert bench.core.catalogue.model(A.deployment).failure == failure
        assert bench.alerts() == ["load-failed"]


def test_the_death_of_another_replica_leaves_a_load_alone() -> None:
    """Only the newcomer's own name counts, and only while it loads."""
    bench = settled(A, B)
    bench.report(listed("b"), gib=2.0)
    (load,) = sent(bench.demand(a=0.2))
    assert isinstance(load.command, LoadModel)
    died(bench, "b-9-1-00000000aa")
    assert [t.record for t in bench.core.transactions.running.values()] == [A]
    assert bench.core.catalogue.model(A.deployment).failures == 0


def test_the_room_of_a_failed_load_is_free_at_once() -> None:
    """An agent ends a load only when its process is gone: the next waiter need not wait for another report."""
    bench = settled(A, B)
    load = loading(bench)
    assert sent(bench.demand(a=0.3, b=0.2)) == []
    (next_load,) = sent(bench.ended(load, failure="broken", replica="a-7-1-00000000aa"))
    assert isinstance(next_load.command, LoadModel) and next_load.command.record == B
    assert [r.state for r in bench.digest.replicas if r.deployment == A.deployment] == [ReplicaState.FAILED]


def test_a_failed_newcomer_that_is_listed_ends_its_load() -> None:
    """Where the agent's word on the end was lost its report says it, once the process is gone; a ready one is done."""
    bench = settled(A)
    loading(bench)
    bench.report(listed("a", ReplicaState.FAILED, replica="a-7-1-00000000aa", failure="broken"))
    assert bench.core.transactions.running, "its process is still ending"
    bench = settled(A)
    loading(bench)
    bench.report(listed("a", ReplicaState.FAILED, replica="a-7-1-00000000aa", gib=0.0, failure="broken"))
    assert not bench.core.transactions.running
    assert bench.core.catalogue.model(A.deployment).failure == "broken"
    bench = settled(A)
    loading(bench)
    bench.report(listed("a", replica="a-7-1-00000000aa"))
    assert not bench.core.transactions.running
    assert bench.core.catalogue.model(A.deployment).failures == 0


def test_a_victim_that_dies_before_it_has_drained_was_cut_off() -> None:
    """Its requests run elsewhere, a person hears of it, and the swap goes on."""
    bench = settled(A, B)
    draining(bench, running=1)
    (load,) = sent(died(bench, RESIDENT))
    assert isinstance(load.command, LoadModel) and load.command.record == B
    bench.ended(load, replica="b-7-1-00000000bb")
    assert bench.alerts() == ["drain-overrun"]
    assert list(bench.digest.dead) == [RESIDENT]
    assert [(entry.action, entry.outcome) for entry in bench.digest.timeline] == [("evict", "forced"), ("load", "done")]


def test_a_victim_that_has_drained_may_die() -> None:
    """It ran nothing: nobody need hear that it is dead, and the swap goes on."""
    bench = settled(A, B)
    (unload,) = sent(bench.ended(draining(bench)))
    assert isinstance(unload.command, UnloadReplica)
    (load,) = sent(died(bench, RESIDENT))
    bench.ended(load, replica="b-7-1-00000000bb")
    assert bench.alerts() == []
    assert list(bench.digest.dead) == []
    assert [(entry.action, entry.outcome) for entry in bench.digest.timeline] == [("evict", "done"), ("load", "done")]
    assert bench.core.catalogue.model(A.deployment).early_deaths == 0


def test_a_victim_that_dies_with_requests_is_declared_dead() -> None:
    """Even if it said that it had drained: its last report shows requests, and their gateways must hear."""
    bench = settled(A, B)
    drain = draining(bench, running=1)
    bench.ended(drain)
    died(bench, RESIDENT)
    assert list(bench.digest.dead) == [RESIDENT]
    assert bench.alerts() == []


def test_a_replica_that_nobody_knows_may_die() -> None:
    """A late word on what is gone and was never listed here changes nothing."""
    bench = settled(A)
    bench.report()
    assert died(bench, "z-1-1-00000000zz") == []
    assert bench.alerts() == []
    assert list(bench.digest.dead) == []


def waiting_for_room(bench: Bench) -> None:
    """B's victim is gone, but its device reports that something still holds the room."""
    bench.report(listed("a"))
    (drain,) = sent(bench.demand(b=0.2))
    (unload,) = sent(bench.ended(drain))
    bench.report(reserved_bytes=GIB)
    assert sent(bench.ended(unload)) == []
    assert [t.stage for t in bench.core.transactions.running.values()] == [Stage.WAITING]


def test_room_that_never_becomes_free_is_given_up() -> None:
    """After the bound of a load and of a drain together; the model is excused, not blamed."""
    bench = settled(A, B)
    waiting_for_room(bench)
    for _ in range(329):
        assert sent(bench.tick(1.0)) == []
        bench.report(reserved_bytes=GIB)
    assert bench.alerts() == []
    bench.tick(1.5)
    assert bench.alerts() == ["load-failed"]
    assert bench.core.catalogue.model(B.deployment).failures == 0
    assert bench.digest.timeline[-1].outcome == "failed: the room did not become free in 330 s"


def test_a_worker_that_shuts_down_gets_no_load() -> None:
    """What waits for its room there is off; what loads there already is its agent's to end."""
    bench = settled(A, B)
    waiting_for_room(bench)
    bench.report(reserved_bytes=GIB, draining=True)
    bench.tick(0.1)
    assert not bench.core.transactions.running
    assert bench.digest.timeline[-1].outcome == f"failed: worker {W} shuts down"
    bench = settled(A)
    loading(bench)
    bench.report(listed("a", ReplicaState.LOADING, replica="a-7-1-00000000aa"), draining=True)
    bench.tick(0.5)
    assert [t.stage for t in bench.core.transactions.running.values()] == [Stage.LOADING]


def test_a_load_that_ends_without_a_name_is_known_by_its_listing() -> None:
    """A failure without a replica touches none; a failed drain is no failed load."""
    bench = settled(A)
    load = loading(bench)
    bench.ended(load, failure="broken")
    assert [r.state for r in bench.digest.replicas] == [ReplicaState.LOADING]
    bench = settled(A, B)
    drain = draining(bench)
    (unload,) = sent(bench.ended(drain, failure="no end", replica=RESIDENT))
    assert isinstance(unload.command, UnloadReplica) and unload.command.force
    assert [r.report.state for r in bench.core.pool.replicas.values()] == [ReplicaState.DRAINING]


def test_an_older_waiter_claims_a_device_that_is_bigger_than_it() -> None:
    """Of two that could hold it, the one with the most that can become free; the small one may have the other."""
    big = record("big", 2.0)
    other = record("other", 1.0)
    bench = settled(A, B, other, big)
    bench.report(listed("a", gib=1.0, running=1, idle_s=0.0, state_s=1.0), gib=2.5)
    assert bench.demand(a=(1, 0.0), other=(1, 0.0), big=12.0, b=1.0) == []
    busy = listed("other", gib=1.0, running=1, idle_s=0.0, state_s=1.0)
    (load,) = sent(bench.report(busy, worker=V, gib=2.25))
    assert isinstance(load.command, LoadModel) and (load.worker, load.command.record) == (V, B)


def test_the_timeline_tells_how_long_each_step_took() -> None:
    """An eviction until its process was gone, however long the load took afterwards."""
    bench = settled(A, B)
    drain = draining(bench)
    bench.tick(1.0)
    (unload,) = sent(bench.ended(drain))
    bench.tick(0.5)
    (load,) = [command for command in sent(bench.ended(unload)) if isinstance(command.command, LoadModel)]
    bench.answer(load)
    bench.tick(3.0)
    bench.ended(load, replica="b-7-1-00000000bb")
    assert [(entry.action, entry.took_s) for entry in bench.digest.timeline] == [("evict", 1.5), ("load", 2.0)]


def test_a_victim_that_is_given_up_is_told_with_its_reason() -> None:
    """Its process never ended; how long it was tried is told all the same."""
    bench = settled(A, B)
    bench.report(listed("a"))
    (drain,) = sent(bench.demand(b=0.2))
    (unload,) = sent(bench.ended(drain))
    for _ in range(4):
        bench.answer(unload, CommandOutcome.REFUSED, "no")
        again = sent(bench.tick(1.1))
        unload = again[0] if again else unload
    evicted = bench.digest.timeline[0]
    assert (evicted.action, evicted.outcome) == ("evict", f"{RESIDENT} could not be unloaded: refused: no")
    assert evicted.took_s == pytest.approx(3.3, abs=0.05)
