"""The agent's core when it is woken late, and its bounds in seconds and counts as operators know them."""

from __future__ import annotations

import pytest

from subjects.ids import ReplicaId
from subjects.messages import ReplicaState
from tests.core.test_agent import A_BIT, CPU, REFUSED, Harness, died, ended, kill, replies, send
from workers.control_messages import (
    Drain,
    Drained,
    Load,
    Ping,
    Pong,
    Progress,
    Stop,
)
from workers.core.agent_events import (
    AgentCommand,
    ControlLost,
    KillReplica,
    SendControl,
    ShutdownStarted,
    Ticked,
)

LATE_S = 5 / 16


def late(h: Harness, seconds: float) -> list[AgentCommand]:
    """One tick, later than the core asked for it; without pings."""
    h.now_s += seconds + LATE_S
    return [c for c in h.feed(Ticked()) if not (isinstance(c, SendControl) and isinstance(c.message, Ping))]


def test_a_late_tick_finds_a_load_that_is_out_of_time() -> None:
    """It is killed; ten seconds later killed again and reported; forgotten ten seconds after its exit."""
    h = Harness()
    h.load(timeout_s=30)
    h.spawned("r-0")
    assert late(h, 30) == [kill("r-0")]
    failure = "the load did not end within 30 s, it was loading"
    assert late(h, 0) == []
    (told, again) = late(h, 10)
    assert (told, again) == (ended("op1", "r-0", failure, took_s=40 + 3 * LATE_S), kill("r-0"))
    assert h.exited("r-0", -9) == []
    assert h.state("r-0") is ReplicaState.FAILED
    late(h, 9)
    assert h.state("r-0") is ReplicaState.FAILED
    late(h, 1)
    assert h.state("r-0") is None


def test_a_late_tick_finds_a_drain_that_is_out_of_time() -> None:
    """Two seconds of grace beyond the bound, five more to stop, then it is killed."""
    h = Harness()
    h.ready()
    h.drain(timeout_s=5)
    assert h.after(6.5) == []
    assert late(h, 0.5) == [send("r-0", Stop())]
    assert late(h, 4.5) == []
    assert late(h, 0.5) == [kill("r-0")]


def test_a_late_tick_finds_an_unanswered_ping() -> None:
    """Every half second one; two seconds without an answer are too many."""
    h = Harness()
    h.ready()
    out: list[AgentCommand] = []
    for _ in range(5):
        h.now_s += 0.7
        out += h.feed(Ticked())
    assert out[0] == send("r-0", Ping(number=1))
    assert [command for command in out if isinstance(command, KillReplica)] == [kill("r-0")]
    assert len(out) == 4


def test_a_closed_connection_is_waited_for_a_second() -> None:
    """Its exit says more than the end of its connection."""
    h = Harness()
    h.ready()
    assert h.feed(ControlLost(replica=ReplicaId("r-0"))) == []
    assert late(h, 0.5) == []
    assert late(h, 0.5) == [kill("r-0")]
    assert h.exited("r-0", -9) == [died("r-0", "the replica closed its control connection and did not exit")]


def test_a_replica_that_is_ended_on_purpose_has_nothing_to_say() -> None:
    """Progress, readiness and failure of a load that was unloaded change nothing; nor does a pong that nobody awaits."""
    h = Harness()
    h.load()
    h.spawned("r-0")
    assert kill("r-0") in h.unload(force=True)
    assert h.says("r-0", Progress(state=ReplicaState.WARMING, detail="late")) == []
    assert h.says("r-0", Pong(number=9)) == []
    assert h.state("r-0") is ReplicaState.LOADING


def test_a_drain_shows_at_once_and_its_end_is_no_news() -> None:
    """A state is published when it changes; that a drain is over is told by the end of its operation."""
    h = Harness()
    h.ready()
    before = len(h.snapshots)
    h.drain()
    assert [report.state for report in h.snapshots[-1].replicas] == [ReplicaState.DRAINING]
    assert len(h.snapshots) == before + 1
    h.says("r-0", Drained())
    assert len(h.snapshots) == before + 1


def test_counters_wait_a_fifth_of_a_second_and_snapshots_come_every_five() -> None:
    """Busy counters are gathered; without news an agent still tells everything from time to time."""
    h = Harness()
    h.ready()
    before = len(h.snapshots)
    h.says("r-0", Load(running=1, waiting=0, kv_pages_free=9))
    assert len(h.snapshots) == before
    late(h, 0.0)
    assert len(h.snapshots) == before + 1
    for _ in range(5):
        h.says("r-0", Pong(number=99))
        late(h, 0.6)
    assert len(h.snapshots) == before + 1
    late(h, 0.3)
    assert len(h.snapshots) == before + 2


def test_no_more_than_128_replicas() -> None:
    """The bound holds over all devices, and one that is gone makes place."""
    h = Harness((CPU, 1000))
    for number in range(128):
        assert replies(h.load(f"r{number}", budget_bytes=1))[0][0] is not REFUSED
    assert replies(h.load("late", budget_bytes=1)) == [(REFUSED, "128 replicas are here already")]
    h.unload("r127-0")
    assert replies(h.load("late", budget_bytes=1))[0][0] is not REFUSED


@pytest.mark.parametrize(("timeout_s", "good"), [(3600.0, True), (3600.5, False), (A_BIT, True), (0.0, False)])
def test_a_load_may_take_an_hour(timeout_s: float, good: bool) -> None:
    """Not more, and not nothing."""
    assert (replies(Harness().load(timeout_s=timeout_s))[0][0] is not REFUSED) is good


@pytest.mark.parametrize(("timeout_s", "good"), [(3600.0, True), (3600.5, False), (0.0, True), (-A_BIT, False)])
def test_a_drain_may_take_an_hour(timeout_s: float, good: bool) -> None:
    """Not more; at once is a bound too."""
    h = Harness()
    h.ready()
    assert (replies(h.drain(timeout_s=timeout_s))[0][0] is not REFUSED) is good


def test_a_budget_may_fill_the_device_and_may_be_nothing() -> None:
    """To the last byte; a model behind another server takes no memory here."""
    h = Harness((CPU, 100))
    assert replies(h.load("a", budget_bytes=100))[0][0] is not REFUSED
    assert replies(h.load("b", budget_bytes=1))[0][0] is REFUSED
    assert replies(h.load("c", budget_bytes=0))[0][0] is not REFUSED
    assert replies(h.load("d", budget_bytes=-1))[0][0] is REFUSED


def test_a_shutdown_stops_what_has_drained_and_asks_what_drains_again_only_in_haste() -> None:
    """A drain that ends sooner than the shutdown's bound is left alone."""
    h = Harness()
    h.ready()
    h.drain(timeout_s=1)
    assert h.feed(ShutdownStarted(drain_s=5)) == []
    assert h.says("r-0", Drained()) == [ended("op2", "r-0"), send("r-0", Stop())]
    h = Harness()
    h.ready()
    h.drain(timeout_s=9)
    assert h.feed(ShutdownStarted(drain_s=5)) == [send("r-0", Drain(timeout_s=5))]
