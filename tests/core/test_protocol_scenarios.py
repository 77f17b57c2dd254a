"""Both cores together in the named races of the protocol: one history each, told in a few lines."""

from __future__ import annotations

import pytest

from broker.core.requests import events as g
from subjects.messages import FailureKind, Lane, SlaClass
from tests.core.protocol_world import Faults, World


def _advance(world: World, duration_s: float) -> None:
    for _ in range(round(duration_s / 0.05)):
        world.advance(0.05)


def test_a_request_for_a_cold_model_waits_in_the_queue_and_runs_when_a_replica_comes() -> None:
    """A cold model is a queue that nobody pulls yet; holding is free of special cases."""
    world = World(1)
    requests = [world.submit(world.start_gateway(), totals=[5], sla_class=sla_class) for sla_class in SlaClass]
    _advance(world, 10)
    assert [world.clients[request].outcome for request in requests] == [None] * 4
    world.start_replica()
    _advance(world, 3)
    assert [type(world.clients[request].outcome) for request in requests] == [g.Finished] * 4
    world.heal_and_check()


def test_one_leaves_the_queue_of_a_cold_model_and_the_others_are_served() -> None:
    """Leaving takes away one's own ticket only (PAINS A2, B1)."""
    world = World(2)
    gateway = world.start_gateway()
    requests = [world.submit(gateway, totals=[5]) for _ in range(5)]
    _advance(world, 1)
    world.leave(requests[0])
    _advance(world, 0.1)
    assert [queued.ticket.request for queued in world._queue.values()] == requests[1:]
    world.start_replica()
    _advance(world, 3)
    outcomes = [type(world.clients[request].outcome) for request in requests]
    assert outcomes == [g.Cancelled, g.Finished, g.Finished, g.Finished, g.Finished]
    world.heal_and_check()


@pytest.mark.parametrize("age_s", [0.0, 0.002, 0.01, 0.5, 3.5])
def test_the_engine_stops_within_a_second_after_the_client_left(age_s: float) -> None:
    """Whenever the client leaves, before the first token or amid the answer (PAINS A1, A2, A3)."""
    world = World(3)
    gateway = world.start_gateway()
    replica = world.start_replica()
    _advance(world, 0.5)
    request = world.submit(gateway, totals=[100], prefills_s=[3.0])
    world.advance(age_s)
    world.leave(request)
    _advance(world, 1)
    assert replica.runs == {} and isinstance(world.clients[request].outcome, g.Cancelled)
    world.heal_and_check()


@pytest.mark.parametrize("noticed", [True, False])
def test_a_replica_killed_before_the_first_token_loses_no_request(noticed: bool) -> None:
    """By the pool's digest, or by ten ``Held`` without a frame when nobody noticed (PAINS F7)."""
    world = World(4)
    gateway = world.start_gateway()
    doomed = world.start_replica()
    requests = [world.submit(gateway, totals=[5], prefills_s=[1.0]) for _ in range(3)]
    _advance(world, 0.3)
    assert doomed.runs
    world.kill(doomed, noticed=noticed)
    world.start_replica()
    _advance(world, 10)
    assert [type(world.clients[request].outcome) for request in requests] == [g.Finished] * 3
    world.heal_and_check()


def test_a_replica_killed_between_pull_and_grant_leaves_its_ticket_to_be_redelivered() -> None:
    """The ticket is acknowledged only after the grant, so the work-queue gives it to another (PAINS F7)."""
    world = World(5)
    gateway = world.start_gateway()
    doomed = world.start_replica()
    world.faults = Faults(delay_s=1.0)
    request = world.submit(gateway, totals=[5])
    world.advance(0.01)
    assert doomed.claims
    world.kill(doomed, noticed=False)
    world.faults = Faults()
    world.start_replica()
    _advance(world, 6)
    assert isinstance(world.clients[request].outcome, g.Finished)
    world.heal_and_check()


def test_a_replica_killed_amid_an_answer_ends_it_with_one_clear_error() -> None:
    """Tokens were sent, so another run could not go on from them; never a silent truncation."""
    world = World(6)
    gateway = world.start_gateway()
    doomed = world.start_replica()
    world.start_replica()
    request = world.submit(gateway, totals=[100])
    _advance(world, 0.5)
    world.kill(doomed if doomed.runs else world.replicas[1])
    _advance(world, 3)
    outcome = world.clients[request].outcome
    assert isinstance(outcome, g.Failed) and (outcome.status, outcome.code) == (502, "replica_lost")
    world.heal_and_check()


def test_a_frozen_replica_resumes_after_its_requests_went_on_elsewhere() -> None:
    """Its tokens are fenced off by the attempt, and it stops when it hears that nobody wants them (PAINS L5)."""
    world = World(7)
    gateway = world.start_gateway()
    frozen = world.start_replica()
    request = world.submit(gateway, totals=[5], prefills_s=[0.2, 3.0])
    _advance(world, 0.1)
    world.freeze(frozen, 4)
    world.start_replica()
    _advance(world, 10)
    assert isinstance(world.clients[request].outcome, g.Finished)
    assert world.clients[request].run == 2
    world.heal_and_check()


def test_a_replica_that_lost_the_bus_comes_back_with_tokens_of_an_attempt_that_is_over() -> None:
    """Both runs are at the same index then; only the current attempt's tokens count."""
    world = World(8)
    gateway = world.start_gateway()
    away = world.start_replica()
    request = world.submit(gateway, totals=[5], prefills_s=[1.0, 3.0])
    _advance(world, 0.1)
    world.cut_off(away, 4)
    world.start_replica()
    _advance(world, 10)
    assert world.clients[request].run == 2
    world.heal_and_check()


def test_the_same_replica_is_granted_a_later_attempt_while_it_still_runs_the_older_one() -> None:
    """It ends the older one first, and none of its tokens reach the client."""
    world = World(9)
    gateway = world.start_gateway()
    replica = world.start_replica()
    request = world.submit(gateway, totals=[50], prefills_s=[2.6, 3.0])
    _advance(world, 0.1)
    world.cut_off(replica, 2.5)
    _advance(world, 12)
    assert isinstance(world.clients[request].outcome, g.Finished) and world.clients[request].run == 2
    world.heal_and_check()


def test_running_answers_survive_a_restart_of_the_bus_and_waiting_ones_are_published_again() -> None:
    """Memory streams are gone after kill -9 of the server; the gateways publish what has no grant (PAINS L1, L6)."""
    world = World(10)
    gateway = world.start_gateway()
    world.start_replica(slots=2)
    _advance(world, 0.5)
    requests = [world.submit(gateway, totals=[150]) for _ in range(5)]
    _advance(world, 0.5)
    world.restart_bus(1.0)
    _advance(world, 20)
    assert [type(world.clients[request].outcome) for request in requests] == [g.Finished] * 5
    assert [world.clients[request].gateway.core.state_of(request) for request in requests] == [None] * 5
    world.heal_and_check()


def test_tickets_given_up_at_their_fifth_delivery_come_back_when_their_gateway_does() -> None:
    """The work-queue swallows a repeated message id even after an acknowledgement, so the publication number counts up."""
    world = World(11)
    gateway = world.start_gateway()
    request = world.submit(gateway, totals=[5])
    _advance(world, 0.2)
    world.cut_off(gateway, 30)
    world.start_replica()
    _advance(world, 25)
    assert world.unserved_acks == {request}
    _advance(world, 10)
    assert isinstance(world.clients[request].outcome, g.Finished)
    world.heal_and_check()


def test_a_lost_finish_is_sent_again() -> None:
    """The end of an answer has no gap to see: it is sent until the gateway stops naming the request."""
    world = World(12)
    gateway = world.start_gateway()
    replica = world.start_replica()
    _advance(world, 0.5)
    request = world.submit(gateway, totals=[10])
    while not world.clients[request].seen[0]:
        world.advance(0.005)
    assert world.clients[request].seen[0] < 10
    world.faults = Faults(loss=1.0)
    _advance(world, 0.4)
    assert replica.runs == {}
    world.faults = Faults()
    _advance(world, 1)
    assert isinstance(world.clients[request].outcome, g.Finished)
    world.heal_and_check()


def test_a_drained_replica_finishes_what_it_has_and_takes_nothing_new() -> None:
    """Drained means: pulls expired, every request confirmed, its finish included."""
    world = World(13)
    gateway = world.start_gateway()
    replica = world.start_replica()
    first = world.submit(gateway, totals=[100], prefills_s=[2.0])
    _advance(world, 0.5)
    world.drain(replica, 30)
    _advance(world, 1.2)
    second = world.submit(gateway, totals=[5])
    drained = [replica.drained]
    _advance(world, 5)
    drained.append(replica.drained)
    outcomes = [type(world.clients[request].outcome) for request in (first, second)]
    assert (drained, outcomes) == ([False, True], [g.Finished, type(None)])
    world.heal_and_check()
    assert isinstance(world.clients[second].outcome, g.Finished)


def test_a_drain_past_its_bound_gives_back_what_has_no_token_yet() -> None:
    """The gateway hears ``Gone`` at once and goes on elsewhere."""
    world = World(14)
    gateway = world.start_gateway()
    replica = world.start_replica()
    request = world.submit(gateway, totals=[5], prefills_s=[20.0])
    _advance(world, 0.5)
    world.drain(replica, 0.5)
    world.start_replica()
    _advance(world, 6)  # Its open pull may swallow the new ticket, which is redelivered after two seconds.
    assert replica.drained and isinstance(world.clients[request].outcome, g.Finished)
    world.heal_and_check()


def test_a_bad_request_is_not_fed_to_a_second_replica() -> None:
    """What is wrong with it is wrong everywhere (PAINS J8)."""
    world = World(15)
    gateway = world.start_gateway()
    world.start_replica()
    world.start_replica()
    request = world.submit(gateway, totals=[5], failures=[FailureKind.BAD_REQUEST])
    _advance(world, 3)
    outcome = world.clients[request].outcome
    assert isinstance(outcome, g.Failed) and outcome.status == 400
    assert world._runs == 1
    world.heal_and_check()


def test_a_sick_and_a_busy_engine_cost_the_client_nothing_before_the_first_token() -> None:
    """Sick goes to the next attempt; busy is tried again and is no loss."""
    world = World(16)
    gateway = world.start_gateway()
    world.start_replica()
    world.start_replica()
    failures = [FailureKind.BUSY] * 3 + [FailureKind.SICK] * 2 + [FailureKind.BUSY]
    request = world.submit(gateway, totals=[5], failures=failures)
    _advance(world, 6)
    assert isinstance(world.clients[request].outcome, g.Finished)
    world.heal_and_check()


def test_a_large_request_is_not_starved_by_a_stream_of_small_ones() -> None:
    """After the ageing bound smaller lanes are not pulled until the large one fits."""
    world = World(17)
    gateway = world.start_gateway()
    world.start_replica(slots=4, kv_pages=128)
    for _ in range(4):
        world.submit(gateway, totals=[150])
    _advance(world, 0.5)
    large = world.submit(gateway, totals=[5], lane=Lane.LARGE)
    waited_s = 0.0
    while world.clients[large].outcome is None and waited_s < 60:
        if sum(queued.ticket.profile.lane is Lane.SMALL for queued in world._queue.values()) < 3:
            world.submit(gateway, totals=[150])
        _advance(world, 0.5)
        waited_s += 0.5
    assert isinstance(world.clients[large].outcome, g.Finished), f"waited {waited_s} s"
    world.heal_and_check()
