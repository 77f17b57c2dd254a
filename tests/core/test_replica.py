"""The replica's core alone: events in, commands out. Commands are compared as short lines, see :func:`brief`."""

from __future__ import annotations

from collections import Counter
from typing import Any, assert_never

import msgspec
import pytest

from subjects.ids import IngressId, ModelHash, ReplicaId, RequestId, Tenant
from subjects.messages import (
    Cancel,
    Delta,
    Endpoint,
    FailureKind,
    Grant,
    Hand,
    Held,
    HeldEntry,
    Lane,
    Refusal,
    RefusalReason,
    RequestProfile,
    Resend,
    SlaClass,
    Ticket,
    Usage,
)
from workers.core import replica_events as e
from workers.core.held_request import Phase
from workers.core.pulling import PULL_SLACK, PullPlanner
from workers.core.replica import ReplicaCore

R = RequestId("gw-1")
GW = IngressId("gw")
USAGE = Usage(prompt_tokens=3, completion_tokens=2)


def brief(command: e.ReplicaCommand) -> str:
    """One line per command: what a reader wants to compare."""
    match command:
        case e.Pull(sla_class, lane, credits, _):
            return f"pull {sla_class.value}-{lane.value} {credits}"
        case e.SendClaim(ingress, claim):
            return f"claim {claim.request}.{claim.attempt} part {claim.part} from {ingress}"
        case e.AckTicket(token):
            return f"ack {token}"
        case e.StartRequest(grant, _):
            return f"start {grant.request}.{grant.attempt}"
        case e.AbortRequest(request, attempt):
            return f"abort {request}.{attempt}"
        case e.SendFrames(_, frames):
            deltas = " ".join(
                f"{d.request}.{d.attempt}:{d.first_token_index}+{d.units}{'!' if d.end else ''}"
                + (f" {d.failure.kind.value}" if d.failure else "")
                for d in frames.deltas
            )
            gone = " ".join(f"{'full for' if g.full else 'gone'} {g.request}.{g.attempt}" for g in frames.gone)
            return f"frames {deltas}{gone}"
        case e.ReportLoad(running, slots, kv_pages_free):
            return f"load {running}/{slots}, {kv_pages_free} pages"
        case e.ReportDrained(given_back):
            return f"drained, {given_back} given back"
        case e.ExitReplica():
            return "exit"
        case _:
            assert_never(command)


class Replica:
    """A core, a clock, and its lines without pulls and loads, which have tests of their own."""

    def __init__(self, *, slots: int = 4, kv_pages: int = 1000) -> None:
        self.core = ReplicaCore(ReplicaId("rep"))
        self.now_s = 0.0
        self.held_sequence = 0
        self(e.Opened(slots=slots, kv_pages=kv_pages, block_size=16, max_context_len=16 * 800))

    def all(self, event: e.ReplicaEvent, *, after_s: float = 0.0) -> list[str]:
        """Every line."""
        self.now_s += after_s
        return [brief(command) for command in self.core.step(self.now_s, event)]

    def __call__(self, event: e.ReplicaEvent, *, after_s: float = 0.0) -> list[str]:
        return [line for line in self.all(event, after_s=after_s) if not line.startswith(("pull", "load"))]

    def pull(self, ticket: Ticket, token: str = "t1", deliveries: int = 1) -> list[str]:
        """A ticket arrives."""
        profile = ticket.profile
        return self(e.TicketPulled(profile.sla_class, profile.lane, ticket, token, deliveries))

    def grant(self, attempt: int = 1, **fields: Any) -> list[str]:
        """The claim is granted."""
        return self(e.ClaimAnswered(R, attempt, Grant(request=R, attempt=attempt, **fields)))

    def held(self, *entries: tuple[int, tuple[int, ...]]) -> list[str]:
        """The gateway names attempts of the request with their next indexes."""
        self.held_sequence += 1
        named = tuple(HeldEntry(request=R, attempt=attempt, next_indexes=indexes) for attempt, indexes in entries)
        return self(e.BackReceived(Held(ingress=GW, sequence=self.held_sequence, entries=named)))

    def wait(self, duration_s: float, *, round_trips: bool = True) -> list[str]:
        """Time passes with ticks, and with round trips where the bus works."""
        lines: list[str] = []
        for _ in range(round(duration_s / 0.1)):
            if round_trips:
                lines += self(e.BusRoundTripMade(), after_s=0.05)
                lines += self(e.Ticked(), after_s=0.05)
            else:
                lines += self(e.Ticked(), after_s=0.1)
        return lines


def ticket(
    attempt: int = 1, *, pages: int = 10, lane: Lane = Lane.SMALL, request: RequestId = R, input_tokens: int = 3
) -> Ticket:
    """A ticket of the request."""
    profile = RequestProfile(
        model_hash=ModelHash("ab" * 32),
        endpoint=Endpoint.CHAT,
        tenant=Tenant("t"),
        lane=lane,
        stream=True,
        max_tokens=9,
        input_tokens=input_tokens,
        expected_output_tokens=4,
        kv_pages_needed=pages,
        deadline_unix_s=0.0,
    )
    return Ticket(request=request, attempt=attempt, publication=1, ingress=GW, profile=profile)


def hand(request: str = R, number: int = 1, *, stream: bool = True, **fields: Any) -> e.HandReceived:
    """The request is handed over."""
    wanted = ticket(request=RequestId(request), **fields)
    profile = msgspec.structs.replace(wanted.profile, stream=stream)
    grant = Grant(request=wanted.request, attempt=wanted.attempt)
    return e.HandReceived(Hand(number=number, ingress=wanted.ingress, profile=profile, grant=grant))


def delta(index: int, units: int = 1, *, attempt: int = 1, **fields: Any) -> Delta:
    """New output."""
    return Delta(request=R, attempt=attempt, first_token_index=index, units=units, **fields)


def end(index: int = 0, units: int = 1) -> Delta:
    """The last output."""
    return delta(index, units, finish_reason="stop", end=True, usage=USAGE)


def in_phase(phase: Phase | None) -> Replica:
    """A replica whose only request is in ``phase``, just now; None: it holds nothing."""
    replica = Replica()
    if phase is not None:
        replica.pull(ticket())
    if phase in (Phase.RUNNING, Phase.FINISHED):
        replica.grant()
    if phase is Phase.FINISHED:
        replica(e.EngineStepped((end(),)))
    return replica


def phase_of(replica: Replica, attempt: int = 1) -> Phase | None:
    """Where the request is."""
    held = replica.core._requests.get((R, attempt))
    return None if held is None else held.phase


N, C, G, D = None, Phase.CLAIMING, Phase.RUNNING, Phase.FINISHED
CLAIM = "claim gw-1.1 part 0 from gw"
PULLED = e.TicketPulled(SlaClass.SILVER, Lane.SMALL, ticket(), "t2", 1)
HANDED = hand()
GRANTED = e.ClaimAnswered(R, 1, Grant(request=R, attempt=1))
TAKEN = e.ClaimAnswered(R, 1, Refusal(request=R, attempt=1, reason=RefusalReason.TAKEN))
DEAD = e.ClaimAnswered(R, 1, Refusal(request=R, attempt=1, reason=RefusalReason.DEAD))
TIMED_OUT = e.ClaimUnanswered(R, 1, e.Unanswered.TIMEOUT)
NOBODY = e.ClaimUnanswered(R, 1, e.Unanswered.NO_RESPONDERS)
STEP = e.EngineStepped((delta(0),))
FINISH = e.EngineStepped((end(),))
SKIP = e.EngineStepped((delta(2),))
BROKEN = e.EngineFailed("it broke")
CANCEL = e.BackReceived(Cancel(ingress=GW, request=R, attempt=1))
RESEND = e.BackReceived(Resend(ingress=GW, request=R, attempt=1, choice=0, from_index=0))
NAMED = e.BackReceived(Held(ingress=GW, sequence=1, entries=(HeldEntry(request=R, attempt=1, next_indexes=(0,)),)))
UNNAMED = e.BackReceived(Held(ingress=GW, sequence=1, entries=()))

TABLE: list[tuple[Phase | None, e.ReplicaEvent, Phase | None, list[str]]] = [
    (N, PULLED, C, [CLAIM]),
    (C, PULLED, C, []),
    (G, PULLED, G, ["ack t2"]),
    (D, PULLED, D, ["ack t2"]),
    (N, HANDED, G, ["start gw-1.1"]),
    *[(phase, HANDED, phase, []) for phase in (C, G, D)],
    (N, GRANTED, N, []),
    (C, GRANTED, G, ["ack t1", "start gw-1.1"]),
    (G, GRANTED, G, []),
    (D, GRANTED, D, []),
    (C, TAKEN, N, ["ack t1"]),
    (G, TAKEN, G, []),
    (C, DEAD, C, ["exit"]),
    (C, TIMED_OUT, C, [CLAIM]),
    (C, NOBODY, N, []),
    (G, TIMED_OUT, G, []),
    (N, STEP, N, []),
    (C, STEP, C, []),
    (G, STEP, G, ["frames gw-1.1:0+1"]),
    (G, FINISH, D, ["frames gw-1.1:0+1!"]),
    (D, FINISH, D, []),
    (G, SKIP, D, ["abort gw-1.1", "frames gw-1.1:0+0! sick"]),
    (N, BROKEN, N, []),
    (C, BROKEN, N, []),
    (G, BROKEN, D, ["frames gw-1.1:0+0! sick"]),
    (D, BROKEN, D, []),
    (N, CANCEL, N, []),
    (C, CANCEL, C, []),
    (G, CANCEL, N, ["abort gw-1.1"]),
    (D, CANCEL, N, []),
    (N, RESEND, N, ["frames gone gw-1.1"]),
    (C, RESEND, C, []),
    (G, RESEND, G, []),
    (D, RESEND, D, ["frames gw-1.1:0+1!"]),
    (N, NAMED, N, ["frames gone gw-1.1"]),
    *[(phase, NAMED, phase, ["frames "]) for phase in Phase],
    *[(phase, UNNAMED, phase, ["frames "]) for phase in (N, C, G, D)],
]


@pytest.mark.parametrize(("phase", "event", "after", "commands"), TABLE)
def test_each_event_in_each_phase(
    phase: Phase | None, event: e.ReplicaEvent, after: Phase | None, commands: list[str]
) -> None:
    """The table of the protocol: from a phase, by an event, to a phase, with these commands."""
    replica = in_phase(phase)
    assert replica(event) == commands
    assert phase_of(replica) is after


def test_the_ticket_is_acknowledged_only_after_the_grant() -> None:
    """Before it the work-queue is what gives the request to another when this replica dies (PAINS F7, L5)."""
    replica = Replica()
    assert replica.pull(ticket()) == [CLAIM]
    assert replica.pull(ticket(), "t2", 2) == []
    assert replica.grant() == ["ack t1", "ack t2", "start gw-1.1"]


def test_a_grant_in_parts_is_put_together() -> None:
    """One claim per part; a repeated part is ignored; the ticket is acknowledged when all are there."""
    replica = Replica()
    replica.pull(ticket())
    assert replica.grant(part=0, parts=3, body=b"ab", sent_token_ids=(9,)) == ["claim gw-1.1 part 1 from gw"]
    assert replica.grant(part=0, parts=3, body=b"ab") == []
    assert replica(TIMED_OUT) == ["claim gw-1.1 part 1 from gw"]
    assert replica.grant(part=1, parts=3, body=b"cd") == ["claim gw-1.1 part 2 from gw"]
    commands = replica.core.step(0.0, e.ClaimAnswered(R, 1, Grant(request=R, attempt=1, part=2, parts=3, body=b"e")))
    starts = [command for command in commands if isinstance(command, e.StartRequest)]
    assert [(s.grant.body, s.grant.parts, s.grant.sent_token_ids) for s in starts] == [(b"abcde", 1, (9,))]


def test_a_claim_that_is_never_answered_leaves_the_ticket_until_its_fifth_delivery() -> None:
    """Two tries, then the work-queue redelivers; at the fifth delivery nobody can be waiting any more."""
    replica = Replica()
    for deliveries in (1, 2, 3, 4):
        assert replica.pull(ticket(), f"t{deliveries}", deliveries) == [CLAIM]
        assert replica(TIMED_OUT) == [CLAIM]
        assert replica(TIMED_OUT) == []
    assert replica.pull(ticket(), "t5", 5) == [CLAIM]
    assert replica(NOBODY) == ["ack t5"]
    assert replica.core.held == 0


def test_a_cancel_that_overtakes_the_grant_is_obeyed() -> None:
    """The engine never sees the request; the ticket is put away."""
    replica = in_phase(C)
    replica(CANCEL)
    assert replica.grant() == ["ack t1"]
    assert phase_of(replica) is None


def test_an_attempt_that_ended_here_never_runs_here_again() -> None:
    """Two runs of one attempt would mix their tokens at the gateway (PAINS L5)."""
    replica = in_phase(G)
    replica(CANCEL)
    assert replica.pull(ticket(), "t2", 2) == ["ack t2"]
    assert replica.pull(ticket(2), "t3") == ["claim gw-1.2 part 0 from gw"]
    replica = in_phase(N)
    replica.held((1, (0,)))
    assert replica.pull(ticket()) == ["ack t1"]


def test_a_later_attempt_ends_the_older_one() -> None:
    """The gateway gave the older one up; it is aborted before the new one starts."""
    replica = in_phase(G)
    replica.pull(ticket(2), "t2")
    assert replica.grant(2) == ["ack t2", "abort gw-1.1", "start gw-1.2"]
    assert replica(STEP) == []


def test_unconfirmed_deltas_are_sent_again_with_their_first_boundaries() -> None:
    """After 500 ms, the finish too, until the gateway's next index passes them or it stops naming the request."""
    replica = in_phase(G)
    replica(e.EngineStepped((delta(0, 2),)))
    replica(e.EngineStepped((delta(2, 3),)))
    assert replica.wait(0.4) == []
    assert replica.wait(0.2) == ["frames gw-1.1:0+2 gw-1.1:2+3"]
    assert replica.held((1, (2,))) == ["frames "]
    assert replica.wait(0.6) == ["frames gw-1.1:2+3"]
    replica(e.EngineStepped((end(5, 1),)))
    assert replica.held((1, (6,))) == ["frames "]
    assert replica.wait(0.6) == ["frames gw-1.1:5+1!"]
    assert replica.held() == ["frames "]
    assert replica.held() == ["frames "]
    assert replica.wait(0.4) == [] and replica.core.held == 0


def test_a_resend_starts_at_the_index_that_was_asked_for() -> None:
    """Only that choice, whole deltas."""
    replica = in_phase(G)
    replica(e.EngineStepped((delta(0, 2), delta(0, 1, choice=1))))
    replica(e.EngineStepped((delta(2, 1), delta(1, 1, choice=1))))
    resend = Resend(ingress=GW, request=R, attempt=1, choice=1, from_index=1)
    assert replica(e.BackReceived(resend)) == ["frames gw-1.1:1+1"]


def test_two_held_in_a_row_that_do_not_name_it_end_a_request() -> None:
    """One may have been sent before the grant; a late or doubled one counts for nothing."""
    replica = in_phase(G)
    assert replica.held() == ["frames "]
    assert replica.held((1, (0,))) == ["frames "]
    assert replica.held() == ["frames "]
    replica.held_sequence -= 1
    assert replica.held() == []
    assert replica.held() == ["abort gw-1.1", "frames "]


def test_a_gateway_that_falls_silent_loses_its_requests_here() -> None:
    """After 2 s without ``Held``; it is asked before, so that it can say what it still wants."""
    replica = in_phase(G)
    replica.wait(1)
    replica.held((1, (0,)))
    lines = replica.wait(2.2)
    assert lines[-1] == "abort gw-1.1" and set(lines[:-1]) == {"frames "}


def test_while_the_own_bus_is_silent_everything_goes_on_and_keeps_its_tokens() -> None:
    """And after a reconnect the gateways get time to come back too."""
    replica = in_phase(G)
    replica(e.EngineStepped((delta(0),)))
    assert "abort gw-1.1" not in replica.wait(30, round_trips=False)
    replica(e.BusReconnected())
    assert "abort gw-1.1" not in replica.wait(6)
    assert "abort gw-1.1" in replica.wait(2)


def test_a_long_backlog_goes_out_in_bounded_messages() -> None:
    """A gateway that was away is not buried, and no message grows beyond what the bus takes."""
    replica = in_phase(G)
    step = e.EngineStepped(tuple(delta(i, text="x" * 10_000) for i in range(60)))
    sizes = [line.count("gw-1.1:") for line in replica(step)]
    assert sum(sizes) == 60 and max(sizes) <= 27
    for i in range(60, 2000):
        replica(e.EngineStepped((delta(i),)))
    again = [line.count("gw-1.1:") for line in replica.wait(0.6)]
    assert max(again) <= 512


def test_output_that_could_never_be_accepted_ends_the_request_as_sick() -> None:
    """A gap or a unitless delta of the engine would else be sent again for ever."""
    replica = in_phase(G)
    assert replica(e.EngineStepped((delta(0, 0, text="x"),))) == ["abort gw-1.1", "frames gw-1.1:0+0! sick"]


def test_a_drain_waits_for_pulls_claims_runs_and_confirmations() -> None:
    """Drained means that nothing at all is left (DESIGN 4)."""
    replica = Replica()
    open_pulls = sum(q.outstanding for q in replica.core._planner._queues.values())
    replica.pull(ticket())
    replica.grant()
    assert replica.all(e.DrainStarted(deadline_s=60.0)) == []
    for (sla_class, lane), queue in list(replica.core._planner._queues.items()):
        if queue.outstanding:
            assert replica.all(e.PullExpired(sla_class, lane, queue.outstanding)) == []
    assert open_pulls > 1 and replica.core._planner.outstanding == 0
    assert replica(hand("gw-9")) == ["frames full for gw-9.1"]
    replica(FINISH)
    replica.held((1, (1,)))
    replica.held()
    assert replica.held() == ["frames ", "drained, 0 given back"]


def test_what_an_open_pull_still_brings_during_a_drain_is_run() -> None:
    """A pull cannot be withdrawn."""
    replica = Replica()
    replica(e.DrainStarted(deadline_s=60.0))
    assert replica.pull(ticket()) == [CLAIM]
    assert replica.grant() == ["ack t1", "start gw-1.1"]


def test_the_bound_of_a_drain_gives_the_rest_back() -> None:
    """Aborted, with ``Gone`` at once and again for each ``Held``; later tickets are left to others."""
    replica = in_phase(G)
    replica(e.DrainStarted(deadline_s=replica.now_s + 1))
    lines = replica(e.Ticked(), after_s=1)
    assert lines == ["abort gw-1.1", "frames gone gw-1.1", "drained, 1 given back"]
    assert replica.held((1, (0,))) == ["frames gone gw-1.1"]
    assert replica.pull(ticket(request=RequestId("gw-2"))) == []


@pytest.mark.parametrize(("share", "pulls"), [(1.0, True), (0.6, True), (0.5, False), (0.0, False)])
def test_a_replica_pulls_for_its_share_of_its_slots(share: float, pulls: bool) -> None:
    """By its weight over the largest of its model's replicas: what others serve sooner is left to them (SCH-3, SCH-9)."""
    replica = Replica(slots=4)
    replica(hand("gw-1", 1))
    replica(hand("gw-2", 2))
    replica(e.PoolChanged(weights={}, share=share))
    for (sla_class, lane), queue in list(replica.core._planner._queues.items()):
        if queue.outstanding:
            replica.all(e.PullExpired(sla_class, lane, queue.outstanding))
    replica.wait(2.0)
    assert bool(replica.core._planner.outstanding) is pulls


def test_a_replica_of_no_weight_takes_nothing_new_and_keeps_what_it_has() -> None:
    """Until it has a weight again: so the coordinator can take back a step that is cheaper than a drain (SCH-4)."""
    replica = in_phase(G)
    replica(e.PoolChanged(weights={}, share=0.0))
    for (sla_class, lane), queue in list(replica.core._planner._queues.items()):
        if queue.outstanding:
            assert replica.all(e.PullExpired(sla_class, lane, queue.outstanding)) == []
    assert replica(hand("gw-9")) == ["frames full for gw-9.1"] and replica.core._planner.outstanding == 0
    assert replica.held((1, (0,))) == ["frames "]
    assert any(line.startswith("pull") for line in replica.all(e.PoolChanged(weights={}), after_s=1.0))


def test_a_replica_that_woke_serves_again() -> None:
    """After a drain and a sleep."""
    replica = Replica()
    replica(e.DrainStarted(deadline_s=1.0))
    replica(e.Ticked(), after_s=1)
    opened = e.Opened(slots=4, kv_pages=1000, block_size=16, max_context_len=16 * 800)
    replica(opened, after_s=10)
    assert replica.pull(ticket()) == [CLAIM]


def test_load_is_reported_on_change() -> None:
    """Slots and pages that are promised to somebody count as used."""
    replica = Replica()
    ticket_event = e.TicketPulled(SlaClass.SILVER, Lane.SMALL, ticket(pages=30), "t", 1)
    assert "load 1/4, 970 pages" in replica.all(ticket_event)
    assert "load 1/2, 970 pages" in replica.all(e.ConcurrencySet(2))
    assert "load 0/2, 1000 pages" in replica.all(TAKEN)


# ------------------------------------------------------------------------------------------------------------- pulling


class Queues:
    """A planner before queues that always have tickets where ``full`` says so."""

    def __init__(self, *full: tuple[SlaClass, Lane], kv_pages: int = 10_000) -> None:
        self.planner = PullPlanner()
        self.planner.open(kv_pages=kv_pages, block_size=16, max_context_len=16 * 800)
        self.full = set(full)
        self.now_s = 0.0
        self.found: Counter[tuple[SlaClass, Lane]] = Counter()
        self.open: list[tuple[float, SlaClass, Lane, int]] = []

    def run(self, free_slots: int, free_pages: int) -> list[tuple[SlaClass, Lane]]:
        """Plans, lets pulls of full queues succeed at once, and expires the others in time."""
        self.now_s += 0.01
        for due in [opened for opened in self.open if opened[0] <= self.now_s]:
            self.open.remove(due)
            self.planner.expired(self.now_s, *due[1:])
        brought: list[tuple[SlaClass, Lane]] = []
        for pull in self.planner.plan(self.now_s, free_slots=free_slots, free_pages=free_pages):
            key = (pull.sla_class, pull.lane)
            if key in self.full:
                for _ in range(pull.credits):
                    self.planner.found(self.now_s, *key)
                    brought.append(key)
            else:
                self.open.append((self.now_s + pull.expires_s, pull.sla_class, pull.lane, pull.credits))
        self.found.update(brought)
        return brought


@pytest.mark.parametrize("slots", [1, 2, 8, 100])
def test_open_pulls_never_exceed_the_free_slots_and_a_small_constant(slots: int) -> None:
    """Pulls cannot be withdrawn, so what is open may all arrive."""
    queues = Queues((SlaClass.GOLD, Lane.SMALL), (SlaClass.BATCH, Lane.MEDIUM))
    for _ in range(50):
        queues.planner.plan(queues.now_s, free_slots=slots, free_pages=10_000)
        assert queues.planner.outstanding <= slots + PULL_SLACK
        queues.run(slots, 10_000)
    assert queues.planner.plan(queues.now_s, free_slots=0, free_pages=10_000) == []


def test_busy_classes_share_the_slots_by_their_weights() -> None:
    """8 : 4 : 2 : 1 while all have tickets, one slot at a time."""
    queues = Queues(*((sla_class, Lane.SMALL) for sla_class in SlaClass))
    for _ in range(100):
        queues.run(1, 10_000)
    before = Counter(queues.found)
    while (queues.found - before).total() < 150:
        queues.run(1, 10_000)
    shares = {key[0]: count for key, count in (queues.found - before).items()}
    assert shares == pytest.approx({SlaClass.GOLD: 80, SlaClass.SILVER: 40, SlaClass.BRONZE: 20, SlaClass.BATCH: 10}, abs=2)


def test_the_pools_weights_replace_the_defaults() -> None:
    """A missing class keeps its default; none is ever starved."""
    queues = Queues((SlaClass.GOLD, Lane.SMALL), (SlaClass.BATCH, Lane.SMALL))
    queues.planner.set_pool({SlaClass.GOLD: 0, SlaClass.BATCH: 3}, None)
    for _ in range(100):
        queues.run(1, 10_000)
    queues.found.clear()
    for _ in range(100):
        queues.run(1, 10_000)
    assert queues.found == {(SlaClass.BATCH, Lane.SMALL): 75, (SlaClass.GOLD, Lane.SMALL): 25}


def test_a_lane_is_pulled_only_while_the_free_pages_cover_its_ceiling() -> None:
    """64 and 512 pages, and the longest context; capped at what the replica has."""
    planner = Queues().planner
    pulls = [pull for _ in range(3) for pull in planner.plan(0.0, free_slots=30, free_pages=600)]
    assert {pull.lane for pull in pulls} == {Lane.SMALL, Lane.MEDIUM}
    small = Queues(kv_pages=100).planner
    assert {pull.lane for pull in small.plan(0.0, free_slots=30, free_pages=100)} == set(Lane)
    small = Queues(kv_pages=100).planner
    assert {pull.lane for pull in small.plan(0.0, free_slots=30, free_pages=64)} == {Lane.SMALL}


def test_every_queue_gets_its_turn() -> None:
    """Believed-empty queues share the slack credits; the first ticket of any is found within a second."""
    queues = Queues()
    seen: set[tuple[SlaClass, Lane]] = set()
    while queues.now_s < 1.0:
        queues.run(2, 10_000)
        seen |= {(pull[1], pull[2]) for pull in queues.open}
    assert len(seen) == len(SlaClass) * len(Lane)


def test_a_lane_that_never_fits_stops_the_smaller_ones_after_the_ageing_bound() -> None:
    """Until it fits and was pulled once; only where the pool says that something waits there, if it says anything."""
    small, large = (SlaClass.SILVER, Lane.SMALL), (SlaClass.SILVER, Lane.LARGE)
    queues = Queues(small, kv_pages=1000)
    queues.planner.set_pool({}, (small, large))
    while queues.now_s < 4.5:
        queues.run(1, 500)
    assert queues.run(1, 500) == [small]
    while queues.now_s < 6.5:
        queues.run(1, 500)
    assert queues.run(1, 500) == []
    queues.full.add(large)
    assert large in queues.run(1, 1000)
    assert small in queues.run(1, 500) + queues.run(1, 500)
    idle = Queues(small, kv_pages=1000)
    idle.planner.set_pool({}, (small,))
    while idle.now_s < 20:
        idle.run(1, 500)
    assert idle.run(1, 500) == [small]


def test_refused_pulls_make_no_busy_loop() -> None:
    """A pull that comes back at once was refused: pause; a reconnect ends the pause."""
    planner = Queues().planner
    first = planner.plan(1.0, free_slots=2, free_pages=10_000)
    for pull in first:
        planner.expired(1.0, pull.sla_class, pull.lane, pull.credits)
    assert planner.plan(1.0, free_slots=2, free_pages=10_000) == []
    assert planner.next_wake_s(pulling=True) == 1.25
    planner.rearm()
    assert len(planner.plan(1.01, free_slots=2, free_pages=10_000)) == len(first)


def test_credits_that_never_come_back_are_written_off() -> None:
    """No lost message stops a replica for ever (PAINS L1)."""
    replica = Replica()
    assert replica.core._planner.outstanding == PULL_SLACK
    assert [line for line in replica.all(e.Ticked(), after_s=4) if line.startswith("pull")] == []
    assert replica.core.next_wake_s == pytest.approx(5.25)
    assert len([line for line in replica.all(e.Ticked(), after_s=1.3) if line.startswith("pull")]) == PULL_SLACK


def test_failures_of_the_engine_name_their_kind() -> None:
    """All that ran ends as sick, so that its gateways go on elsewhere."""
    replica = in_phase(G)
    commands = replica.core.step(0.0, BROKEN)
    (frames,) = [command.frames for command in commands if isinstance(command, e.SendFrames)]
    assert [(d.failure.kind, d.failure.message, d.failure.code) for d in frames.deltas if d.failure] == [
        (FailureKind.SICK, "it broke", "engine_failed")
    ]
    assert replica(PULLED) == []


def test_a_replica_takes_no_more_while_a_long_prompt_is_not_computed() -> None:
    """From its claim to its first token; others may take what waits meanwhile."""
    replica = Replica(slots=8)
    replica.pull(ticket(input_tokens=5000))
    assert replica(hand("gw-2")) == ["frames full for gw-2.1"]
    replica.grant()
    lines = replica.all(e.PullExpired(SlaClass.SILVER, Lane.SMALL, 1), after_s=1.0)
    assert not any(line.startswith("pull") for line in lines)
    lines = replica.all(e.EngineStepped((delta(0),)))
    assert any(line.startswith("pull") for line in lines)
    assert replica(hand("gw-3")) == ["start gw-3.1"]


def test_a_replica_pulls_by_the_pages_that_its_engine_has_now() -> None:
    """After a change of its KV budget, and again after a sleep (SCH-8)."""
    replica = Replica(slots=8, kv_pages=10)
    assert replica(hand()) == ["start gw-1.1"]
    assert replica(hand("gw-2")) == ["frames full for gw-2.1"]
    replica(e.KvResized(1000))
    assert replica(hand("gw-3")) == ["start gw-3.1"]
    replica(e.DrainStarted(0.0))
    assert replica(hand("gw-4"))[-1] == "frames full for gw-4.1"
    replica(e.Opened(8, 1000, 16, 4096))
    assert replica(hand("gw-5")) == ["start gw-5.1"]
