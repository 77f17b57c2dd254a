"""The replica's core at its bounds."""

from __future__ import annotations

import pytest

from subjects.ids import IngressId, RequestId
from subjects.messages import Resend
from tests.core.test_replica import GW, R, Replica, delta, end, in_phase, ticket
from workers.core import replica_events as e
from workers.core.held_request import Phase


@pytest.mark.parametrize(("deliveries", "given_up"), [(4, False), (5, True), (6, True)])
def test_a_ticket_nobody_claims_is_given_up_at_its_fifth_delivery_or_later(deliveries: int, given_up: bool) -> None:
    """A count that skipped the fifth is no reason to go on for ever."""
    replica = Replica()
    replica.pull(ticket(), "t", deliveries)
    lines: list[str] = []
    for _ in range(10):
        lines += replica(e.ClaimUnanswered(R, 1, e.Unanswered.TIMEOUT), after_s=0.5)
    assert ("ack t" in lines) is given_up


def resend(number: int) -> e.BackReceived:
    """A gateway asks for the output of a request that is not here."""
    return e.BackReceived(Resend(ingress=GW, request=RequestId(f"r{number}"), attempt=1, choice=0, from_index=0))


def test_attempts_that_ended_here_are_remembered_in_bounded_number() -> None:
    """The oldest of 4097 is forgotten; the others never run here again."""
    replica = Replica()
    for number in range(4097):
        assert replica(resend(number)) == [f"frames gone r{number}.1"]
    assert replica.pull(ticket(request=RequestId("r0"))) == ["claim r0.1 part 0 from gw"]
    assert replica.pull(ticket(request=RequestId("r1"))) == ["ack t1"]
    assert replica.pull(ticket(request=RequestId("r4096"))) == ["ack t1"]


@pytest.mark.parametrize(("after_s", "known"), [(59.5, True), (60.0, False), (61.0, False)])
def test_attempts_that_ended_here_are_remembered_for_a_minute(after_s: float, known: bool) -> None:
    """Longer than any ticket is under way."""
    replica = Replica()
    replica(resend(1))
    replica(e.Ticked(), after_s=after_s)
    assert (replica.pull(ticket(request=RequestId("r1"))) == ["ack t1"]) is known


def test_the_end_of_a_drain_is_told_once() -> None:
    """Whether it ended by itself or by its bound, noticed late."""
    replica = Replica()
    for (sla_class, lane), queue in list(replica.core._planner._queues.items()):
        if queue.outstanding:
            replica(e.PullExpired(sla_class, lane, queue.outstanding), after_s=0.2)
    lines = replica(e.DrainStarted(deadline_s=60.0), after_s=1.0)
    for _ in range(9):
        for (sla_class, lane), queue in list(replica.core._planner._queues.items()):
            if queue.outstanding:
                lines += replica(e.PullExpired(sla_class, lane, queue.outstanding))
        lines += replica(e.Ticked(), after_s=1.0)
    assert lines == ["drained, 0 given back"]
    replica = in_phase(Phase.RUNNING)
    replica(e.DrainStarted(deadline_s=replica.now_s + 1))
    lines = replica(e.Ticked(), after_s=1.5) + replica(e.Ticked(), after_s=1.0)
    assert [line for line in lines if line.startswith("drained")] == ["drained, 1 given back"]


def test_a_resend_is_of_one_choice_from_one_index() -> None:
    """Other choices and what comes before stay where they are."""
    replica = in_phase(Phase.RUNNING)
    replica(e.EngineStepped((delta(0), delta(1), delta(0, choice=1), delta(2))))
    wanted = Resend(ingress=GW, request=R, attempt=1, choice=0, from_index=1)
    assert replica(e.BackReceived(wanted)) == ["frames gw-1.1:1+1 gw-1.1:2+1"]
    beyond = Resend(ingress=GW, request=R, attempt=1, choice=0, from_index=9)
    assert replica(e.BackReceived(beyond)) == []


def test_an_offer_is_taken_only_with_room_for_all_of_it() -> None:
    """A slot and the pages; what was taken or ended here is not taken again."""
    replica = Replica(slots=2, kv_pages=100)
    offers = [
        e.OfferReceived(ticket(pages=60, request=RequestId("a")), 1),
        e.OfferReceived(ticket(pages=41, request=RequestId("b")), 2),
        e.OfferReceived(ticket(pages=40, request=RequestId("c")), 3),
        e.OfferReceived(ticket(pages=0, request=RequestId("d")), 4),
        e.OfferReceived(ticket(pages=60, request=RequestId("a")), 5),
    ]
    answers = [line for offer in offers for line in replica(offer) if not line.startswith("claim")]
    assert answers == ["1: taken", "2: busy", "3: taken", "4: busy", "5: busy"]


def test_requests_of_two_gateways_do_not_mix() -> None:
    """Each hears of its own; the silence of one ends only what is its own."""
    replica = in_phase(Phase.RUNNING)
    other = ticket(request=RequestId("other-1"))
    other = type(other)(request=other.request, attempt=1, publication=1, ingress=IngressId("other"), profile=other.profile)
    assert replica.pull(other, "t2") == ["claim other-1.1 part 0 from other"]
    lines: list[str] = []
    for _ in range(40):
        lines += replica.wait(0.1)
        lines += replica.held((1, (0,)))
    assert not [line for line in lines if line.startswith("abort")]
    assert replica(e.EngineStepped((end(),))) == ["frames gw-1.1:0+1!"]


def test_a_request_that_two_held_do_not_name_is_over() -> None:
    """The first two count as any two, a beat that names it starts the count again, and a doubled beat is none."""
    replica = in_phase(Phase.RUNNING)
    assert replica.held() == ["frames "]
    replica.held_sequence -= 1
    assert replica.held() == []
    assert "abort gw-1.1" in replica.held()
    replica = in_phase(Phase.RUNNING)
    for _ in range(3):
        assert replica.held() == ["frames "]
        assert replica.held((1, (0,))) == ["frames "]


def test_a_replica_is_idle_when_no_gateway_has_to_be_heard() -> None:
    """Neither while it holds a request nor while it still knows its gateway."""
    assert Replica().core.idle
    replica = in_phase(Phase.RUNNING)
    assert (replica.core.idle, replica.core.held) == (False, 1)
    replica.held()
    replica.held()
    assert (replica.core.idle, replica.core.held) == (False, 0)
    replica.wait(60)
    assert replica.core.idle
    claiming = in_phase(Phase.CLAIMING)
    assert not claiming.core.idle


def test_a_replica_with_more_requests_than_slots_takes_no_offer() -> None:
    """Its slots were lowered while they ran; what runs goes on."""
    replica = Replica(slots=4)
    for name in ("a", "b", "c"):
        assert replica(e.OfferReceived(ticket(request=RequestId(name)), 1))[-1].startswith(("1: taken", "claim"))
    replica(e.ConcurrencySet(2))
    assert replica(e.OfferReceived(ticket(request=RequestId("d")), 2)) == ["2: busy"]
    assert replica.core.held == 3


def test_a_pause_wakes_only_a_replica_that_pulls() -> None:
    """Refused pulls are tried again after a pause, but not by one that drains."""
    replica = Replica()
    for (sla_class, lane), queue in list(replica.core._planner._queues.items()):
        if queue.outstanding:
            replica(e.PullExpired(sla_class, lane, queue.outstanding))
    assert replica.core.next_wake_s == 0.25
    replica(e.DrainStarted(deadline_s=60.0))
    assert replica.core.next_wake_s is None
