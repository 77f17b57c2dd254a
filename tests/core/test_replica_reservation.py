"""A request reserves its KV before it starts, a long context too, and keeps it to its end (KVC-6)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subjects.ids import RequestId
from subjects.messages import Cancel, Delta, Grant, Held, Lane, Usage
from tests.core.test_replica import GW, hand, ticket
from tests.core.test_replica import Replica as AnyReplica
from workers.core import replica_events as e
from workers.core.pulling import AGEING_S

USAGE = Usage(prompt_tokens=3, completion_tokens=1)


class Replica(AnyReplica):
    """All attempts here are the first, so lines do without their numbers."""

    def all(self, event: e.ReplicaEvent, *, after_s: float = 0.0) -> list[str]:
        return [line.replace(".1", "") for line in super().all(event, after_s=after_s)]


def granted(replica: Replica, request: str, pages: int, **fields: Any) -> list[str]:
    """A ticket is pulled and its claim granted."""
    wanted = ticket(request=RequestId(request), pages=pages, lane=Lane.LARGE, **fields)
    replica.pull(wanted, f"t-{request}")
    return replica(e.ClaimAnswered(wanted.request, 1, Grant(request=wanted.request, attempt=1)))


def out(request: str, index: int, units: int = 1, **fields: Any) -> e.EngineStepped:
    return e.EngineStepped((Delta(request=RequestId(request), attempt=1, first_token_index=index, units=units, **fields),))


def over(request: str, index: int = 0) -> e.EngineStepped:
    return out(request, index, finish_reason="stop", end=True, usage=USAGE)


def cancel(request: str) -> e.BackReceived:
    return e.BackReceived(Cancel(ingress=GW, request=RequestId(request), attempt=1))


def free_pages(replica: Replica, event: e.ReplicaEvent) -> int:
    """What the load says after an event."""
    replica.all(event)
    assert replica.core._reported is not None
    return replica.core._reported.kv_pages_free


def test_a_long_context_starts_when_its_pages_are_free_and_not_before() -> None:
    """Two pulls brought tickets for the same pages: the second waits here, and no engine preempts the first for it."""
    replica = Replica(kv_pages=100)
    assert granted(replica, "a", 60) == ["ack t-a", "start a"]
    assert granted(replica, "b", 60) == ["ack t-b"]
    assert replica(out("a", 0)) == ["frames a:0+1"]
    assert replica(over("a", 1)) == ["frames a:1+1!", "start b"]


def test_smaller_ones_do_not_starve_a_long_context_that_waits() -> None:
    """What is granted later waits behind it although it would fit, by pull or by hand, and it starts first."""
    replica = Replica(slots=8, kv_pages=100)
    granted(replica, "a", 60)
    granted(replica, "long", 90)
    assert granted(replica, "small", 10) == ["ack t-small"]
    assert replica(hand("handed", pages=10)) == ["frames full for handed"]
    assert replica(over("a")) == ["frames a:0+1!", "start long", "start small"]


def test_a_larger_lane_that_never_fits_stops_the_smaller_ones() -> None:
    """A steady stream of small requests leaves no room for a long one by chance: after its bound nothing small is taken."""
    replica = Replica(slots=8, kv_pages=1000)
    granted(replica, "a", 300)
    replica(e.PoolChanged(weights={}, waiting=((ticket().profile.sla_class, Lane.LARGE),)))
    replica(e.Ticked(), after_s=AGEING_S + 0.1)
    replica(e.Ticked(), after_s=0.1)
    lines = replica.all(e.PoolChanged(weights={}, waiting=((ticket().profile.sla_class, Lane.LARGE),)))
    assert not [line for line in lines if line.startswith("pull")]
    assert replica(hand("small", pages=10)) == ["frames full for small"]
    assert replica(over("a")) == ["frames a:0+1!"]
    assert [line for line in replica.all(hand("long", pages=900)) if line.startswith("start")] == ["start long"]


def test_what_is_larger_than_the_replica_runs_alone() -> None:
    """Its estimate was too high for this replica, or it is as long as a context can be: it waits for all others to end."""
    replica = Replica(kv_pages=100)
    granted(replica, "a", 10)
    assert granted(replica, "huge", 500) == ["ack t-huge"]
    assert replica(over("a")) == ["frames a:0+1!", "start huge"]
    assert granted(replica, "b", 1) == ["ack t-b"]
    assert replica(over("huge")) == ["frames huge:0+1!", "start b"]


def test_pages_are_reserved_from_the_claim_to_the_end() -> None:
    """What waits holds its pages as well, so that nobody is told of room that is promised."""
    replica = Replica(kv_pages=100)
    assert free_pages(replica, e.TicketPulled(*_queue(), ticket(request=RequestId("a"), pages=60), "t", 1)) == 40
    assert free_pages(replica, e.TicketPulled(*_queue(), ticket(request=RequestId("b"), pages=30), "t", 1)) == 10
    for request in ("a", "b"):
        replica(e.ClaimAnswered(RequestId(request), 1, Grant(request=RequestId(request), attempt=1)))
    assert free_pages(replica, over("a")) == 70
    assert free_pages(replica, over("b")) == 100


def _queue() -> tuple[Any, Lane]:
    return ticket().profile.sla_class, Lane.SMALL


def test_an_answer_longer_than_expected_takes_its_pages_before_others_start() -> None:
    """They cannot be had back from it, so what waits goes on waiting until they are free."""
    replica = Replica(kv_pages=100)
    granted(replica, "a", 50, input_tokens=16 * 49)
    granted(replica, "b", 30)
    assert granted(replica, "c", 25) == ["ack t-c"]
    assert free_pages(replica, out("a", 0, 16 * 15)) == 0  # 64 pages of a, 30 of b, 25 for c
    assert replica(over("b")) == ["frames b:0+1!", "start c"]
    replica = Replica(kv_pages=100)
    granted(replica, "a", 50, input_tokens=16 * 49)
    granted(replica, "b", 30)
    granted(replica, "c", 25)
    replica(out("a", 0, 16 * 40))
    assert replica(over("b")) == ["frames b:0+1!"]  # 89 of a leave 11
    assert replica(over("a", 16 * 40)) == [f"frames a:{16 * 40}+1!", "start c"]


@pytest.mark.parametrize(
    ("lengths", "pages"),
    [((0, 0), 10), ((4, 4), 10), ((4, 5), 11), ((20, 20), 12), ((21, 4), 12), ((36, 36), 14)],
)
def test_each_choice_beyond_what_was_expected_holds_pages_of_its_own(lengths: tuple[int, int], pages: int) -> None:
    """Choices share their prompt's pages and nothing else; four tokens of each were expected, a page has 16."""
    replica = Replica(kv_pages=100)
    wanted = ticket(request=RequestId("a"), pages=10)
    profile = msgspec.structs.replace(wanted.profile, n=2)
    replica.pull(msgspec.structs.replace(wanted, profile=profile))
    replica(e.ClaimAnswered(RequestId("a"), 1, Grant(request=RequestId("a"), attempt=1)))
    for choice, length in enumerate(lengths):
        if length:
            replica(out("a", 0, length, choice=choice))
    assert 100 - free_pages(replica, e.TicketPulled(*_queue(), ticket(request=RequestId("b"), pages=1), "t", 1)) == pages + 1


@pytest.mark.parametrize("how", ["cancel", "drain", "silence"])
def test_what_waits_can_be_taken_back(how: str) -> None:
    """The engine never saw it, so nothing is aborted there; whoever waits behind it goes on."""
    replica = Replica(kv_pages=100)
    granted(replica, "a", 60)
    granted(replica, "b", 60)
    granted(replica, "c", 40)
    if how == "cancel":
        assert replica(cancel("b")) == ["start c"]
        assert replica(over("c")) == ["frames c:0+1!"]
    elif how == "drain":
        lines = replica(e.DrainStarted(deadline_s=replica.now_s)) + replica(e.Ticked(), after_s=0.1)
        assert [line for line in lines if line.startswith(("abort", "start", "drained"))] == [
            "abort a",
            "drained, 3 given back",
        ]
    else:
        for sequence in (1, 2):
            replica(e.BackReceived(Held(ingress=GW, sequence=sequence, entries=())))
        assert replica.core.held == 0
        assert granted(replica, "d", 100) == ["ack t-d", "start d"]


def test_a_dead_engine_ends_what_waits_as_well() -> None:
    """Its gateway hears of it, and takes it elsewhere."""
    replica = Replica(kv_pages=100)
    granted(replica, "a", 60)
    granted(replica, "b", 60)
    assert replica(e.EngineFailed("it broke")) == ["frames a:0+0! sick b:0+0! sick"]


def test_more_kv_starts_what_waits() -> None:
    """A replica that is given more pages uses them at once."""
    replica = Replica(kv_pages=100)
    granted(replica, "a", 60)
    granted(replica, "b", 60)
    assert replica(e.KvResized(kv_pages=120)) == ["start b"]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_never_more_is_started_than_there_are_pages(data: st.DataObject) -> None:
    """Whatever is pulled, handed over, cancelled and ended in whatever order: the engine has room for all that it was given,
    everything granted starts in its order once it can, and in the end all pages are free."""
    replica = Replica(slots=6, kv_pages=50)
    pages: dict[str, int] = {}
    granted_in_order: list[str] = []
    started: list[str] = []
    running: set[str] = set()

    def note(lines: list[str]) -> None:
        for line in lines:
            if line.startswith("start "):
                started.append(line.removeprefix("start "))
                running.add(started[-1])

    for number in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["pull", "pull", "hand", "end", "cancel"]))
        name = f"r{number}"
        if what in ("pull", "hand"):
            pages[name] = min(50, data.draw(st.integers(1, 60)))
            lines = granted(replica, name, pages[name]) if what == "pull" else replica(hand(name, pages=pages[name]))
            if not any("full" in line for line in lines):
                granted_in_order.append(name)
            note(lines)
        else:
            known = sorted(running) if what == "end" else [one for one in granted_in_order if one not in started]
            if known:
                one = data.draw(st.sampled_from(known))
                running.discard(one)
                if what == "cancel":
                    granted_in_order.remove(one)
                note(replica(over(one) if what == "end" else cancel(one)))
        assert sum(pages[one] for one in running) <= 50
        assert started == granted_in_order[: len(started)]
    while running:
        one = min(running)
        running.discard(one)
        note(replica(over(one)))
    assert started == granted_in_order
    assert free_pages(replica, e.TicketPulled(*_queue(), ticket(request=RequestId("last"), pages=1), "t", 1)) == 49
