"""The replica's core at its bounds."""

from __future__ import annotations

from math import inf

import pytest

from subjects.ids import IngressId, RequestId
from subjects.messages import Cancel, Delta, Held, Lane, Refusal, RefusalReason, Resend, Room, SlaClass
from tests.core.test_replica import GW, USAGE, R, Replica, delta, end, hand, in_phase, ticket
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


def test_a_hand_is_taken_only_with_room_for_all_of_it() -> None:
    """A slot and the pages; what was refused once is refused for good, since its gateway has gone on with it."""
    replica = Replica(slots=2, kv_pages=100)
    hands = [hand("a", pages=60), hand("b", pages=41), hand("c", pages=40), hand("d", pages=0), hand("a", pages=60)]
    answers = [line for one in hands for line in replica(one)]
    assert answers == ["start a.1", "frames full for b.1", "start c.1", "frames full for d.1"]
    replica(e.BackReceived(Cancel(ingress=GW, request=RequestId("a"), attempt=1)))
    assert replica(hand("b", pages=1)) == ["frames full for b.1"]
    assert replica(hand("a", pages=1)) == ["frames full for a.1"]


def room_told(replica: Replica, ingress: IngressId = GW, hands: int = 0) -> Room | None:
    """What the replica answers to ``Held``."""
    replica.held_sequence += 1
    held = Held(ingress=ingress, sequence=replica.held_sequence, entries=(), hands=hands)
    commands = replica.core.step(replica.now_s, e.BackReceived(held))
    (frames,) = [command.frames for command in commands if isinstance(command, e.SendFrames)]
    return frames.room


def test_a_gateway_is_told_what_it_may_hand_over() -> None:
    """What is free, with the number of the last hand that was seen or must be lost; two gateways share it."""
    replica = Replica(slots=5, kv_pages=100)
    replica(hand(number=3, pages=10, input_tokens=50))
    assert room_told(replica) == Room(hands=3, slots=4, pages=90, tokens=4046)
    replica(e.EngineStepped((delta(0),)))
    assert room_told(replica, IngressId("other")) == Room(hands=0, slots=2, pages=45, tokens=4096)
    replica = Replica(slots=5, kv_pages=100)
    replica(hand(number=3))
    told = room_told(replica, hands=7)
    assert told is not None and told.hands == 7


@pytest.mark.parametrize("closing", [e.DrainStarted(99.0), e.PoolChanged(weights={}, share=0.0), e.EngineFailed("it broke")])
def test_a_replica_that_takes_nothing_new_has_no_room_to_tell_of(closing: e.ReplicaEvent) -> None:
    """Nothing is handed to one that drains, is closed, or has lost its engine."""
    replica = Replica()
    replica(closing)
    assert room_told(replica) is None


def test_slots_are_kept_for_tickets_that_may_come() -> None:
    """One for each busy queue at least; but an idle replica with few slots gives them away to who asks first, since credits
    may lie in empty pulls of other classes while all that would run is parked at gateways."""
    replica = Replica(slots=8)
    for number, sla_class in enumerate(SlaClass):
        replica(e.TicketPulled(sla_class, Lane.SMALL, ticket(request=RequestId(f"t{number}")), f"t{number}", 1))
        replica(
            e.ClaimAnswered(
                RequestId(f"t{number}"), 1, Refusal(request=RequestId(f"t{number}"), attempt=1, reason=RefusalReason.TAKEN)
            )
        )
    planner = replica.core._planner
    busy = [queue for queue in planner._queues.values() if queue.window]
    assert len(busy) == 4
    for queue in busy:
        queue.outstanding = 0
    assert [planner.slots_nobody_waits_for(free) for free in (0, 1, 2, 3, 6, 8)] == [0, 1, 2, 2, 2, 4]
    busy[0].outstanding = 3
    assert planner.slots_nobody_waits_for(8) == 2


def test_a_slot_that_comes_free_is_told_to_one_who_waits_for_it() -> None:
    """Not to the gateway whose request ended only: the others may have requests parked, and get their turns."""
    replica = Replica(slots=1)
    replica(hand("a"))
    for name in ("one", "two"):
        told = room_told(replica, IngressId(name))
        assert told is not None and told.slots == 0
    heard = []
    for number, request in enumerate(("a", "b")):
        if number:
            replica(hand("b"))
        last = Delta(request=RequestId(request), attempt=1, first_token_index=0, units=1, end=True, usage=USAGE)
        commands = replica.core.step(replica.now_s, e.EngineStepped((last,)))
        heard += [
            (command.ingress, command.frames.room.slots if command.frames.room else None)
            for command in commands
            if isinstance(command, e.SendFrames) and command.ingress != GW
        ]
    assert heard == [(IngressId("one"), 1), (IngressId("two"), 1)]


def test_hands_do_not_overtake_a_lane_that_has_aged() -> None:
    """While a large request has waited for too long, its pages are kept for it: no room is told of, and a gateway that does
    not know yet is refused (DESIGN 52)."""
    replica = Replica(slots=64, kv_pages=1000)
    replica(hand("small-0", number=1, pages=500))
    replica(e.PoolChanged(weights={}, waiting=((SlaClass.SILVER, Lane.LARGE),)))
    for number in range(2, 8):
        lines = replica(hand(f"small-{number}", number=number, pages=10), after_s=1.0)
        expected = f"start small-{number}.1" if number < 7 else f"frames full for small-{number}.1"
        assert expected in lines, (number, lines)
    told = room_told(replica)
    assert told is not None and told.slots == 0


def test_what_closes_before_the_end_is_not_gathered() -> None:
    """A finish reason is never lost among what follows it."""
    replica = Replica()
    replica(hand(stream=False))
    replica(e.EngineStepped((delta(0),)))
    assert replica(e.EngineStepped((delta(1, finish_reason="stop"),))) == ["frames gw-1.1:0+1 gw-1.1:1+1"]


def test_what_nobody_streams_is_sent_in_few_pieces() -> None:
    """Its first tokens after 20 ms, the others at its end or every 100 ms, with the boundaries of those from then on."""
    replica = Replica()
    replica(hand(stream=False))
    assert replica(e.EngineStepped((delta(0, text="a", token_ids=(5,)),))) == []
    assert replica.core.next_wake_s == pytest.approx(0.02)
    assert replica(e.Ticked(), after_s=0.02) == ["frames gw-1.1:0+1"]
    assert replica(e.EngineStepped((delta(1, text="b", token_ids=(6,)),))) == []
    assert replica(e.EngineStepped((delta(2, text="c", token_ids=(7,)),)), after_s=0.05) == []
    assert replica.core.next_wake_s == pytest.approx(0.1)  # the beat, before the gathered ones are due
    assert replica(e.Ticked(), after_s=0.06) == ["frames gw-1.1:1+2"]
    assert replica(e.EngineStepped((delta(3, text="d", token_ids=(8,)),))) == []
    last = delta(4, text="e", token_ids=(9,), finish_reason="length", end=True, usage=USAGE)
    commands = replica.core.step(replica.now_s, e.EngineStepped((last,)))
    (frames,) = [command.frames for command in commands if isinstance(command, e.SendFrames)]
    assert frames.deltas == (delta(3, 2, text="de", token_ids=(8, 9), finish_reason="length", end=True, usage=USAGE),)
    wanted = Resend(ingress=GW, request=R, attempt=1, choice=0, from_index=1)
    assert replica(e.BackReceived(wanted)) == ["frames gw-1.1:1+2 gw-1.1:3+2!"]


def test_what_cannot_wait_takes_along_what_was_gathered() -> None:
    """Log probabilities, a failure, a second choice: in order, behind what came before."""
    replica = Replica()
    replica(hand(stream=False))
    replica(e.EngineStepped((delta(0),)))
    replica(e.EngineStepped((delta(1),)))
    assert replica(e.EngineStepped((delta(2, detail=b"{}"),))) == ["frames gw-1.1:0+2 gw-1.1:2+1"]
    replica(e.EngineStepped((delta(3),)))
    assert replica(e.EngineFailed("it broke")) == ["frames gw-1.1:3+1 gw-1.1:4+0! sick"]
    replica = Replica()
    replica(hand(stream=False))
    replica(e.EngineStepped((delta(0), delta(1))))
    assert replica(e.EngineStepped((delta(0, choice=1),))) == ["frames gw-1.1:0+2 gw-1.1:0+1"]


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


def test_a_replica_with_more_requests_than_slots_takes_no_hand() -> None:
    """Its slots were lowered while they ran; what runs goes on."""
    replica = Replica(slots=4)
    for name in ("a", "b", "c"):
        assert replica(hand(name)) == [f"start {name}.1"]
    replica(e.ConcurrencySet(2))
    assert replica(hand("d")) == ["frames full for d.1"]
    assert replica.core.held == 3


@pytest.mark.parametrize("closing", [e.DrainStarted(deadline_s=inf), e.PoolChanged(weights={}, share=0.0)])
def test_a_pause_wakes_only_a_replica_that_pulls(closing: e.ReplicaEvent) -> None:
    """Refused pulls are tried again after a pause, but not by one that drains or is closed."""
    replica = Replica()
    for (sla_class, lane), queue in list(replica.core._planner._queues.items()):
        if queue.outstanding:
            replica(e.PullExpired(sla_class, lane, queue.outstanding))
    assert replica.core.next_wake_s == 0.25
    replica(closing)
    assert replica.core.next_wake_s is None
