"""The gateway's core alone: events in, commands out. Commands are compared as short lines, see :func:`brief`."""

from __future__ import annotations

from typing import Any, assert_never

import msgspec
import pytest

from broker.core.requests import events as e
from broker.core.requests.core import RequestCore
from broker.core.requests.events import NotStoredReason
from broker.core.requests.live import TRANSITIONS, State
from subjects.bus import Stored
from subjects.ids import DeploymentKey, DeviceId, IngressId, ModelHash, ModelKey, ReplicaId, RequestId, Tenant, WorkerId
from subjects.messages import (
    Adapter,
    Cancel,
    Claim,
    Delta,
    Endpoint,
    Failure,
    FailureKind,
    Frames,
    Gone,
    Grant,
    Hand,
    Held,
    Lane,
    PoolDigest,
    PoolModel,
    PoolReplica,
    Refusal,
    ReplicaState,
    RequestKind,
    RequestProfile,
    Resend,
    Room,
    Sla,
    SlaClass,
    Usage,
)

MODEL = ModelHash("ab" * 32)
DEPLOYMENT = DeploymentKey("de" * 32)
KEY = ModelKey(DEPLOYMENT[:16])
R = RequestId("gw-1")
HOLDER = ReplicaId("rep-a")
OTHER = ReplicaId("rep-b")
STORED = Stored(shard=0, sequence=7, created=1)
USAGE = Usage(prompt_tokens=3, completion_tokens=2)


def brief(command: e.RequestCommand) -> str:
    """One line per command: what a reader wants to compare."""
    match command:
        case e.PublishTicket(ticket, message_id, ttl_s):
            return f"publish {message_id} to {ticket.profile.lane.value} for {ttl_s}"
        case e.EnsureQueue():
            return "ensure queue"
        case e.DeleteTicket(stored):
            return f"delete {stored.sequence}@{stored.created}"
        case e.HandOver(replica, hand):
            return f"hand {hand.number} {hand.grant.request}.{hand.grant.attempt} to {replica}"
        case e.AnswerClaim(token, Grant() as grant):
            return f"{token}: grant {grant.request}.{grant.attempt} part {grant.part}/{grant.parts}"
        case e.AnswerClaim(token, Refusal() as refusal):
            return f"{token}: refuse {refusal.reason.value}"
        case e.SendBack(replica, Held() as held):
            entries = ", ".join(f"{x.request}.{x.attempt}{list(x.next_indexes)}" for x in held.entries)
            return f"held {held.sequence} to {replica}: {entries}"
        case e.SendBack(replica, Resend() as resend):
            return f"resend {resend.request}.{resend.attempt} choice {resend.choice} from {resend.from_index}"
        case e.SendBack(replica, Cancel() as cancel):
            return f"cancel {cancel.request}.{cancel.attempt} at {replica}"
        case e.RecordGrant(request, attempt, replica, waited_s):
            return f"granted {request}.{attempt} to {replica} after {waited_s:g}"
        case e.Deliver(request, delta):
            return f"deliver {request} {delta.choice}:{delta.first_token_index}+{delta.units}"
        case e.RecordRestart(request, attempt, _):
            return f"restart {request}.{attempt}"
        case e.EndRequest(request, e.Finished(usage)):
            return f"end {request} finished {usage.completion_tokens if usage else '?'}"
        case e.EndRequest(request, e.Failed() as failed):
            return f"end {request} {failed.status} {failed.code}"
        case e.EndRequest(request, e.Cancelled()):
            return f"end {request} cancelled"
        case e.SendBack() | e.AnswerClaim() | e.EndRequest():
            raise AssertionError(command)
        case _:
            assert_never(command)


class Gateway:
    """A core and a clock."""

    def __init__(self, **options: Any) -> None:
        self.core = RequestCore(IngressId("gw"), **options)
        self.now_s = 0.0

    def __call__(self, event: e.RequestEvent, *, after_s: float = 0.0) -> list[str]:
        self.now_s += after_s
        return [brief(command) for command in self.core.step(self.now_s, event)]

    def submit(self, request: RequestId = R, *, sla: Sla | None = None, **fields: Any) -> list[str]:
        """A request that may wait 20 s and last 100 s."""
        body = fields.pop("body", b"{}")
        return self(
            e.RequestSubmitted(
                request=request,
                profile=profile(**fields),
                body=body,
                wait_until_s=self.now_s + 20,
                deadline_s=self.now_s + 100,
                sla=sla,
            )
        )

    def claim(
        self, request: RequestId = R, attempt: int = 1, replica: ReplicaId = HOLDER, part: int = 0, token: int = 5
    ) -> list[str]:
        """A claim."""
        return self(e.ClaimReceived(Claim(request=request, attempt=attempt, replica=replica, part=part), token))

    def frames(
        self, *deltas: Delta, replica: ReplicaId = HOLDER, gone: tuple[Gone, ...] = (), room: Room | None = None
    ) -> list[str]:
        """Frames."""
        return self(e.FramesReceived(Frames(replica=replica, sequence=1, deltas=deltas, gone=gone, room=room)))

    def knows(
        self, replica: ReplicaId = HOLDER, *, slots: int = 4, pages: int = 100, tokens: int = 1000, hands: int = 0
    ) -> None:
        """Another request of the model runs at ``replica``, which says what it would take."""
        other = RequestId(f"at-{replica}")
        if self.core.state_of(other) is None:
            self.submit(other)
            self.claim(other, replica=replica)
        self.frames(replica=replica, room=Room(hands=hands, slots=slots, pages=pages, tokens=tokens))


def profile(**fields: Any) -> RequestProfile:
    """A profile with the fields that matter here."""
    given: dict[str, Any] = {
        "model_hash": MODEL,
        "deployment": DEPLOYMENT,
        "endpoint": Endpoint.CHAT,
        "tenant": Tenant("t"),
        "max_tokens": 9,
        "input_tokens": 3,
        "expected_output_tokens": 4,
        "kv_pages_needed": 1,
        "deadline_unix_s": 0.0,
    }
    return RequestProfile(**{**given, **fields})


def delta(index: int, units: int = 1, **fields: Any) -> Delta:
    """A delta of the first attempt."""
    given: dict[str, Any] = {"request": R, "attempt": 1, "token_ids": tuple(range(index, index + units))}
    return Delta(first_token_index=index, units=units, **{**given, **fields})


def failure(kind: FailureKind, status: int = 500) -> Delta:
    """The delta that ends a request badly."""
    return delta(0, 0, end=True, failure=Failure(kind=kind, message="m", status=status))


def in_state(state: State) -> Gateway:
    """A gateway whose only request is in ``state``, one second after it came."""
    gateway = Gateway()
    if state is State.PARKED:
        gateway.knows(OTHER, slots=0)
    gateway.submit()
    match state:
        case State.PARKED | State.PUBLISHING:
            pass
        case State.UNSTORED:
            gateway(e.TicketNotStored(R, 1, 1, NotStoredReason.BUS_UNAVAILABLE))
        case State.STORED:
            gateway(e.TicketStored(R, 1, 1, STORED))
        case State.RUNNING:
            gateway(e.TicketStored(R, 1, 1, STORED))
            gateway.claim()
        case _:
            assert_never(state)
    assert gateway.core.state_of(R) is state
    return gateway


K, P, U, S, G = State.PARKED, State.PUBLISHING, State.UNSTORED, State.STORED, State.RUNNING
LEFT = e.ClientLeft(R)
BY_HOLDER = e.ClaimReceived(Claim(request=R, attempt=1, replica=HOLDER), 5)
BY_OTHER = e.ClaimReceived(Claim(request=R, attempt=1, replica=OTHER), 6)
STALE = e.ClaimReceived(Claim(request=R, attempt=0, replica=OTHER), 6)
NEVER_WAS = e.ClaimReceived(Claim(request=R, attempt=2, replica=OTHER), 6)
PART_1 = e.ClaimReceived(Claim(request=R, attempt=1, replica=HOLDER, part=1), 6)
IS_STORED = e.TicketStored(R, 1, 1, STORED)
OLD_STORED = e.TicketStored(R, 1, 0, STORED)
FULL = e.TicketNotStored(R, 1, 1, NotStoredReason.QUEUE_FULL)
MISSING = e.TicketNotStored(R, 1, 1, NotStoredReason.QUEUE_MISSING)
TIMEOUT = e.TicketNotStored(R, 1, 1, NotStoredReason.TIMEOUT)
HAND_LOST = e.HandLost(R, 1)
OLD_HAND_LOST = e.HandLost(R, 0)
BACK_AGAIN = e.BusReconnected()
SAME_QUEUE = e.QueueChecked(KEY, 1)
NEW_QUEUE = e.QueueChecked(KEY, 2)
NO_QUEUE = e.QueueChecked(KEY, None)
HOLDER_DEAD = e.PoolChanged(PoolDigest(epoch=1, sequence=1, dead=(HOLDER,)))
NO_FIT = e.PoolChanged(
    PoolDigest(
        epoch=1,
        sequence=1,
        models=(PoolModel(model_hash=MODEL, deployment=DEPLOYMENT, name="m", refusal="too big", permanent=True),),
    )
)
NO_ROOM = e.FramesReceived(Frames(replica=HOLDER, sequence=1, gone=(Gone(request=R, attempt=1, full=True),)))
ROOM = e.FramesReceived(Frames(replica=OTHER, sequence=2, room=Room(hands=0, slots=1, pages=9, tokens=9)))
NO_SLOT = e.FramesReceived(Frames(replica=OTHER, sequence=2, room=Room(hands=0, slots=0, pages=9, tokens=9)))
GONE = e.FramesReceived(Frames(replica=HOLDER, sequence=1, gone=(Gone(request=R, attempt=1),)))
OLD_GONE = e.FramesReceived(Frames(replica=HOLDER, sequence=1, gone=(Gone(request=R, attempt=0),)))
OTHERS_GONE = e.FramesReceived(Frames(replica=OTHER, sequence=1, gone=(Gone(request=R, attempt=1),)))
BAD = e.FramesReceived(Frames(replica=HOLDER, sequence=1, deltas=(failure(FailureKind.BAD_REQUEST, 422),)))
SICK = e.FramesReceived(Frames(replica=HOLDER, sequence=1, deltas=(failure(FailureKind.SICK),)))
BUSY = e.FramesReceived(Frames(replica=HOLDER, sequence=1, deltas=(failure(FailureKind.BUSY),)))
FIRST = e.FramesReceived(Frames(replica=HOLDER, sequence=1, deltas=(delta(0),)))
LAST = e.FramesReceived(
    Frames(replica=HOLDER, sequence=1, deltas=(delta(0, 2, finish_reason="stop", end=True, usage=USAGE),))
)
GRANT = ["5: grant gw-1.1 part 0/1", "granted gw-1.1 to rep-a after 0"]
AGAIN = ["restart gw-1.2", "publish gw-1.2.1 to s for 20"]
UNWANTED = ["cancel gw-1.1 at rep-a"]

TABLE: list[tuple[State, e.RequestEvent, State | None, list[str]]] = [
    # A claim of the current attempt is granted wherever the request waits.
    *[(state, BY_HOLDER, G, GRANT) for state in (K, P, U, S)],
    (G, BY_HOLDER, G, ["5: grant gw-1.1 part 0/1"]),
    (G, BY_OTHER, G, ["6: refuse taken"]),
    (G, PART_1, G, ["6: refuse unknown"]),
    *[(state, PART_1, state, ["6: refuse unknown"]) for state in (K, P, U, S)],
    *[(state, STALE, state, ["6: refuse stale-attempt"]) for state in State],
    *[(state, NEVER_WAS, state, ["6: refuse unknown"]) for state in State],
    # Leaving ends it everywhere.
    *[(state, LEFT, None, ["end gw-1 cancelled"]) for state in (K, P, U)],
    (S, LEFT, None, ["delete 7@1", "end gw-1 cancelled"]),
    (G, LEFT, None, ["cancel gw-1.1 at rep-a", "end gw-1 cancelled"]),
    # The work-queue's answers.
    *[(K, event, K, []) for event in (FULL, TIMEOUT)],
    (P, IS_STORED, S, []),
    (P, OLD_STORED, P, ["delete 7@1"]),
    (P, FULL, None, ["end gw-1 503 no_capacity"]),
    (P, MISSING, U, ["ensure queue"]),
    (P, TIMEOUT, U, []),
    (G, TIMEOUT, G, []),
    (G, IS_STORED, G, []),
    # What was handed over and not begun goes to the queue.
    (G, HAND_LOST, P, AGAIN),
    (G, OLD_HAND_LOST, G, []),
    (G, NO_ROOM, P, AGAIN),
    *[(state, event, state, []) for event in (HAND_LOST, NO_ROOM) for state in (K, P, U, S)],
    # What has no grant is published again after a reconnect, under the same attempt and a new publication.
    (K, BACK_AGAIN, P, ["publish gw-1.1.1 to s for 20"]),
    (P, BACK_AGAIN, P, ["publish gw-1.1.2 to s for 20"]),
    (U, BACK_AGAIN, P, ["publish gw-1.1.2 to s for 20"]),
    (S, BACK_AGAIN, P, ["publish gw-1.1.2 to s for 20"]),
    (G, BACK_AGAIN, G, []),
    (S, SAME_QUEUE, S, []),
    (S, NEW_QUEUE, P, ["publish gw-1.1.2 to s for 20"]),
    (S, NO_QUEUE, P, ["publish gw-1.1.2 to s for 20"]),
    *[(state, NO_QUEUE, state, []) for state in (K, P, U, G)],
    # The holder is lost, or its engine fails, before the first token.
    *[(state, HOLDER_DEAD, state, []) for state in (K, P, U, S)],
    (G, HOLDER_DEAD, P, AGAIN),
    (G, GONE, P, AGAIN),
    (G, OLD_GONE, G, []),
    (G, OTHERS_GONE, G, []),
    *[(state, GONE, state, []) for state in (K, P, U, S)],
    (G, SICK, P, AGAIN),
    (G, BUSY, U, ["restart gw-1.2"]),
    (G, BAD, None, ["cancel gw-1.1 at rep-a", "end gw-1 422 None"]),
    # A replica's word: there is room now.
    (K, ROOM, G, ["hand 1 gw-1.1 to rep-b", "granted gw-1.1 to rep-b after 0"]),
    (K, NO_SLOT, K, []),
    *[(state, ROOM, state, []) for state in (P, U, S, G)],
    # Tokens.
    (G, FIRST, G, ["deliver gw-1 0:0+1"]),
    (G, LAST, None, ["deliver gw-1 0:0+2", "end gw-1 finished 2"]),
    *[(state, FIRST, state, UNWANTED) for state in (K, P, U, S)],
    # The pool says that waiting cannot help.
    *[(state, NO_FIT, None, ["end gw-1 503 model_cannot_fit"]) for state in (K, P, U)],
    (S, NO_FIT, None, ["delete 7@1", "end gw-1 503 model_cannot_fit"]),
    (G, NO_FIT, G, []),
]


@pytest.mark.parametrize(("state", "event", "after", "commands"), TABLE)
def test_each_event_in_each_state(state: State, event: e.RequestEvent, after: State | None, commands: list[str]) -> None:
    """The table of the protocol: from a state, by an event, to a state, with these commands."""
    gateway = in_state(state)
    assert gateway(event) == commands
    assert gateway.core.state_of(R) is after
    assert after in TRANSITIONS[state] or after is state


def test_the_state_table_is_reached_in_full() -> None:
    """Every transition between two states that the table names is made by an event here, or by a test below."""
    made = {(state, after) for state, _, after, _ in TABLE if state is not after}
    elsewhere: set[tuple[State, State | None]] = {(U, P), (S, U)}  # by time, and by an older replica
    named = {(a, b) for a, targets in TRANSITIONS.items() if a is not None for b in targets if a is not b}
    assert named - made - elsewhere == set()


@pytest.mark.parametrize(
    ("state", "after_s", "after", "commands"),
    [
        (K, 0.499, K, ["held 1 to rep-b: at-rep-b.1[0]"]),
        (K, 0.5, P, ["publish gw-1.1.1 to s for 20", "held 1 to rep-b: at-rep-b.1[0]"]),
        (U, 0.19, U, []),
        (U, 0.2, P, ["publish gw-1.1.1 to s for 20"]),
        (S, 19.9, S, []),
        (S, 20.0, None, ["delete 7@1", "end gw-1 503 no_capacity"]),
        (P, 20.0, None, ["end gw-1 503 no_capacity"]),
        (G, 20.0, G, ["held 1 to rep-a: gw-1.1[0]"]),
        (G, 100.0, None, ["cancel gw-1.1 at rep-a", "end gw-1 504 deadline_exceeded", "held 1 to rep-a: "]),
    ],
)
def test_time_passes_in_each_state(state: State, after_s: float, after: State | None, commands: list[str]) -> None:
    """Bounds: 500 ms for a replica to have room, 200 ms before a ticket is tried again, the waiting bound, the deadline."""
    gateway = in_state(state)
    assert gateway(e.Ticked(), after_s=after_s) == commands
    assert gateway.core.state_of(R) is after


def test_the_core_says_when_to_wake_it() -> None:
    """The next wake is the next bound, the next ``Held``, or none at all."""
    assert Gateway().core.next_wake_s is None
    assert in_state(S).core.next_wake_s == 20
    assert in_state(G).core.next_wake_s == pytest.approx(0.2)


def test_a_submitted_request_is_published() -> None:
    """The ticket carries no prompt; its time to live is the waiting bound."""
    assert Gateway().submit(lane=Lane.LARGE) == ["publish gw-1.1.1 to l for 20"]


def test_a_replica_with_room_is_handed_the_request() -> None:
    """With its body, in one message; its tokens reach the client as after a claim."""
    gateway = Gateway()
    gateway.knows()
    commands = gateway.core.step(
        0.0,
        e.RequestSubmitted(request=R, profile=profile(), body=b"{1}", wait_until_s=9, deadline_s=9, cache_salt="s"),
    )
    grant = Grant(request=R, attempt=1, body=b"{1}", cache_salt="s", max_tokens=9)
    assert commands == [
        e.HandOver(HOLDER, Hand(number=1, ingress=IngressId("gw"), profile=profile(), grant=grant)),
        e.RecordGrant(R, 1, HOLDER, 0.0),
    ]
    assert gateway.frames(delta(0)) == ["deliver gw-1 0:0+1"]
    assert gateway(HAND_LOST) == []


FOR_ADAPTER = e.RequestSubmitted(
    request=R,
    profile=profile(),
    body=b"{}",
    wait_until_s=20,
    deadline_s=100,
    adapter=Adapter(name="a", adapter_hash="1"),
)


def for_adapter(state: State) -> Gateway:
    """A gateway whose only request is for an adapter and in ``state``."""
    gateway = Gateway()
    assert gateway(FOR_ADAPTER) == ["publish gw-1.1.1 to s for 20"]
    if state is not P:
        gateway(IS_STORED if state is S else TIMEOUT)
    assert gateway.core.state_of(R) is state
    return gateway


@pytest.mark.parametrize("state", [P, U, S])
def test_an_older_replica_is_never_granted_an_adapter(state: State) -> None:
    """It would answer with the base's weights: it is refused so that it forgets the ticket, and 200 ms later there is a new
    one, which a replica that knows adapters is granted; nobody asks in a circle meanwhile."""
    gateway = for_adapter(state)
    deleted = ["delete 7@1"] if state is S else []
    assert gateway.claim() == ["5: refuse unknown", *deleted]
    assert gateway.core.state_of(R) is U
    assert gateway.claim() == ["5: refuse unknown"]
    assert gateway(IS_STORED) == ["delete 7@1"]
    assert gateway(e.Ticked(), after_s=0.19) == []
    (published,) = gateway(e.Ticked(), after_s=0.01)
    assert published == "publish gw-1.1.3 to s for 20"
    able = Claim(request=R, attempt=1, replica=OTHER, adapters=True)
    assert gateway(e.ClaimReceived(able, 6)) == ["6: grant gw-1.1 part 0/1", "granted gw-1.1 to rep-b after 0.2"]
    assert gateway(e.ClaimReceived(able, 7)) == ["7: grant gw-1.1 part 0/1"]


def test_older_replicas_alone_cannot_hold_a_request_for_an_adapter_for_ever() -> None:
    """Its waiting bound ends it; a request for the base is theirs as before."""
    gateway = for_adapter(S)
    lines = []
    while gateway.core.state_of(R) is not None:
        lines += gateway.claim()
        lines += gateway(e.Ticked(), after_s=0.2)
    assert lines[-1] == "end gw-1 503 no_capacity"
    assert not any("grant" in line for line in lines)
    assert sum("publish" in line for line in lines) <= 20 / 0.2
    gateway.submit(RequestId("base"))
    assert "5: grant base.1 part 0/1" in gateway.claim(RequestId("base"))


def test_a_replica_that_could_not_load_an_adapter_lets_others_go_first() -> None:
    """Its files may be missing on one worker only, which fails faster than another one answers: for a second it is refused,
    without a loss; then it may try again, and the third loss ends the request with the engine's word."""
    gateway = for_adapter(S)
    holder = e.ClaimReceived(Claim(request=R, attempt=1, replica=HOLDER, adapters=True), 5)
    assert gateway(holder)[0] == "5: grant gw-1.1 part 0/1"
    assert gateway(SICK) == AGAIN
    second = e.ClaimReceived(Claim(request=R, attempt=2, replica=HOLDER, adapters=True), 5)
    assert gateway(second) == ["5: refuse unknown"]
    other = e.ClaimReceived(Claim(request=R, attempt=2, replica=OTHER, adapters=True), 6)
    assert gateway(other) == ["6: grant gw-1.2 part 0/1", "granted gw-1.2 to rep-b after 0"]

    gateway, ended = for_adapter(S), []
    for attempt in (1, 2, 3):
        claim = Claim(request=R, attempt=attempt, replica=HOLDER, adapters=True)
        gateway(e.Ticked(), after_s=1.0 if attempt > 1 else 0.0)
        assert f"granted gw-1.{attempt} to rep-a" in gateway(e.ClaimReceived(claim, 5))[-1]
        failed = msgspec.structs.replace(failure(FailureKind.SICK), attempt=attempt)
        ended = gateway.frames(failed)
    assert "end gw-1 502 engine_failed" in ended


def test_an_adapter_is_handed_only_to_a_replica_whose_claims_know_adapters() -> None:
    """The one with more room does not: it is never picked, and alone it sends the request to the queue."""
    gateway = Gateway()
    gateway.knows(HOLDER, slots=9)
    assert gateway(FOR_ADAPTER) == ["publish gw-1.1.1 to s for 20"]
    assert gateway(e.ClaimReceived(Claim(request=R, attempt=1, replica=OTHER, adapters=True), 6))[1:] == [
        "granted gw-1.1 to rep-b after 0"
    ]
    gateway.frames(replica=OTHER, room=Room(hands=0, slots=2, pages=100, tokens=1000))
    again = msgspec.structs.replace(FOR_ADAPTER, request=RequestId("gw-2"))
    assert gateway(again) == ["hand 1 gw-2.1 to rep-b", "granted gw-2.1 to rep-b after 0"]
    assert gateway.submit(RequestId("base")) == ["hand 2 base.1 to rep-a", "granted base.1 to rep-a after 0"]


def test_nothing_is_handed_past_those_who_wait() -> None:
    """Who came first goes first, though a replica may have room by now."""
    gateway = Gateway()
    gateway.submit(RequestId("first"))
    gateway.knows()
    assert gateway.submit() == []
    assert gateway.submit(RequestId("gw-2"), lane=Lane.MEDIUM) == []
    gateway.claim(RequestId("first"))
    lines = gateway.frames(room=Room(hands=0, slots=4, pages=100, tokens=1000))
    assert [line for line in lines if line.startswith("hand")] == ["hand 1 gw-1.1 to rep-a", "hand 2 gw-2.1 to rep-a"]


def test_a_lane_that_waits_holds_up_its_own() -> None:
    """Where a replica has room, only those wait in the queue that do not fit there."""
    gateway = Gateway()
    gateway.submit(RequestId("first"), lane=Lane.LARGE)
    gateway.knows()
    assert gateway.submit()[0] == "hand 1 gw-1.1 to rep-a"
    assert gateway.submit(RequestId("gw-2"), lane=Lane.LARGE) == []


def test_the_replica_with_the_most_room_is_asked() -> None:
    """What was handed to it since its last word counts against it; of equals the one that was known first."""
    gateway = Gateway()
    for slots in (0, 2):
        gateway.knows(HOLDER, slots=slots)
        gateway.knows(OTHER, slots=slots)
    handed = [gateway.submit(RequestId(f"r{number}"))[0] for number in range(4)]
    assert handed == [
        "hand 1 r0.1 to rep-a",
        "hand 2 r1.1 to rep-b",
        "hand 3 r2.1 to rep-a",
        "hand 4 r3.1 to rep-b",
    ]
    assert gateway.submit(RequestId("r4")) == []
    gateway(e.ClientLeft(RequestId("r4")))
    # Its next word knows of the first one only: two slots are left, of which the other hand takes one.
    gateway.knows(HOLDER, slots=2, hands=1)
    assert gateway.submit(RequestId("r5"))[0] == "hand 5 r5.1 to rep-a"
    assert gateway.submit(RequestId("r6")) == []


def test_who_is_parked_goes_when_there_is_room() -> None:
    """The higher class first, of a class the one that came first; nobody overtakes them; later they go to the queue."""
    gateway = Gateway()
    gateway.knows(slots=0)
    for name, sla_class in (
        ("b1", SlaClass.BRONZE),
        ("s1", SlaClass.SILVER),
        ("b2", SlaClass.BRONZE),
        ("s2", SlaClass.SILVER),
    ):
        assert gateway.submit(RequestId(name), sla_class=sla_class) == []
    lines = gateway.frames(room=Room(hands=0, slots=3, pages=100, tokens=1000))
    assert [line for line in lines if line.startswith("hand")] == [
        "hand 1 s1.1 to rep-a",
        "hand 2 s2.1 to rep-a",
        "hand 3 b1.1 to rep-a",
    ]
    assert gateway.submit(RequestId("b3")) == []
    gateway.now_s += 0.05
    gateway.frames(room=Room(hands=3, slots=0, pages=100, tokens=1000))
    published = [line for line in gateway(e.Ticked(), after_s=0.2) if line.startswith("publish")]
    assert published == ["publish b2.1.1 to s for 20", "publish b3.1.1 to s for 20"]
    assert gateway.submit(RequestId("b4")) == []
    assert gateway.frames(room=Room(hands=3, slots=3, pages=100, tokens=1000)) == []


def test_nobody_is_parked_behind_a_queue_that_lasts() -> None:
    """In a pool that is full for longer everybody takes a place in the queue at once, in order of arrival."""
    gateway = Gateway()
    gateway.submit(RequestId("first"))
    gateway.knows(slots=0)
    gateway(e.Ticked(), after_s=0.5)
    assert gateway.submit() == []
    assert "publish gw-1.1.1 to s for 20" in gateway(e.Ticked(), after_s=0.5)
    assert gateway.submit(RequestId("gw-2")) == ["publish gw-2.1.1 to s for 20"]
    assert gateway.submit(RequestId("gw-3"), lane=Lane.MEDIUM) == []


def test_nobody_is_parked_while_a_replica_is_not_known_yet() -> None:
    """It may have room, and only the queue reaches it."""
    gateway = Gateway()
    gateway.knows(slots=0)
    other = PoolReplica(
        replica=OTHER,
        model_hash=MODEL,
        deployment=DEPLOYMENT,
        worker=WorkerId("w"),
        device=DeviceId("d"),
        state=ReplicaState.READY,
    )
    gateway(e.PoolChanged(PoolDigest(epoch=1, sequence=1, replicas=(other,))))
    assert gateway.submit() == ["publish gw-1.1.1 to s for 20"]
    gateway.claim(replica=OTHER)
    assert gateway.submit(RequestId("gw-2")) == []


def test_a_replica_that_came_up_beside_a_busy_one_gets_requests() -> None:
    """Only the queue reaches who has nothing of ours yet: the one that we know is not filled to its last slot first."""
    gateway = Gateway()
    gateway(pool_of(rep_a=1.0, rep_b=1.0))
    gateway.knows(HOLDER, slots=20)  # One request runs there, and goes on.
    assert gateway.submit() == ["publish gw-1.1.1 to s for 20"]
    gateway.claim(replica=OTHER)
    gateway.knows(OTHER, slots=20)
    assert gateway.submit(RequestId("gw-2"))[0].startswith("hand")


def pool_of(**weights: float) -> e.PoolChanged:
    """The pool's word: these replicas serve, each with its weight."""
    rows = tuple(
        PoolReplica(
            replica=ReplicaId(name.replace("_", "-")),
            model_hash=MODEL,
            deployment=DEPLOYMENT,
            worker=WorkerId("w"),
            device=DeviceId("d"),
            state=ReplicaState.READY,
            weight=weight,
        )
        for name, weight in weights.items()
    )
    return e.PoolChanged(PoolDigest(epoch=1, sequence=1, replicas=rows))


@pytest.mark.parametrize(("weight", "most"), [(1.0, (4, 4)), (0.5, (5, 3)), (0.25, (6, 2))])
def test_requests_go_to_replicas_by_their_weights(weight: float, most: tuple[int, int]) -> None:
    """Each holds of ours in proportion to its weight: what its share of its devices' time is (SCH-3, SCH-9)."""
    gateway = Gateway()
    gateway(pool_of(rep_a=1.0, rep_b=weight))
    for slots in (0, 20):  # One request runs at each, and goes on.
        for replica in (HOLDER, OTHER):
            gateway.knows(replica, slots=slots)
    handed = [line for number in range(6) for line in gateway.submit(RequestId(f"r{number}")) if line.startswith("hand ")]
    there = tuple(1 + sum(line.endswith(f"to {replica}") for line in handed) for replica in (HOLDER, OTHER))
    assert there == most


@pytest.mark.parametrize(
    ("room", "fields", "handed"),
    [
        ({"slots": 0}, {}, False),
        ({"pages": 7}, {"kv_pages_needed": 7}, True),
        ({"pages": 7}, {"kv_pages_needed": 8}, False),
        ({"tokens": 1}, {"input_tokens": 5000}, True),
        ({"tokens": 0}, {}, False),
    ],
)
def test_a_request_is_handed_only_where_it_fits(room: dict[str, Any], fields: dict[str, Any], handed: bool) -> None:
    """The replica's own rule: a slot, the pages, and not too much that is not computed yet."""
    gateway = Gateway()
    gateway.knows(**room)
    assert bool(gateway.submit(**fields)) is handed  # else it is parked
    if handed and fields:
        assert gateway.submit(RequestId("gw-2"), **fields) == []


def test_a_large_body_goes_by_the_queue() -> None:
    """What does not fit into one grant is asked for in parts."""
    gateway = Gateway()
    gateway.knows()
    assert gateway.submit(body=bytes(256 * 1024 + 1)) == ["publish gw-1.1.1 to s for 20"]


@pytest.mark.parametrize("event", [HAND_LOST, NO_ROOM])
def test_a_hand_in_vain_is_no_loss(event: e.RequestEvent) -> None:
    """However often it happens (three losses end a request), and the replica is not tried again until it has spoken."""
    gateway = Gateway()
    for number in range(1, 6):
        gateway.knows(hands=number)
        request = RequestId(f"again-{number}")
        assert gateway.submit(request)[0].startswith("hand")
        lost = e.HandLost(request, 1)
        gone = Frames(replica=HOLDER, sequence=1, gone=(Gone(request=request, attempt=1, full=True),))
        gateway(lost if event is HAND_LOST else e.FramesReceived(gone))
        assert gateway.core._live[request].losses == 0
        gateway(e.ClientLeft(request))
        assert gateway.submit(RequestId(f"next-{number}"))[0].startswith("publish")
        gateway(e.ClientLeft(RequestId(f"next-{number}")))


def test_a_replica_that_died_or_fell_silent_is_handed_nothing() -> None:
    """It was given up, or its last two ``Held`` have no answer yet; an older one never tells its room."""
    gateway = Gateway()
    gateway.knows()
    gateway(HOLDER_DEAD)
    gateway(e.ClientLeft(RequestId("at-rep-a")))
    assert gateway.submit()[0].startswith("publish")
    gateway = Gateway()
    gateway.knows()
    for _ in range(3):
        gateway(e.BusRoundTripMade())
        gateway(e.Ticked(), after_s=0.2)
    assert gateway.submit() == ["publish gw-1.1.1 to s for 20"]
    gateway = Gateway()
    gateway.knows()
    gateway.frames()
    assert gateway.submit()[0].startswith("publish")


def test_a_retry_keeps_the_message_id_because_the_ticket_may_have_been_stored() -> None:
    """Only a reconnect or another stream asks for a new publication number."""
    gateway = in_state(P)
    gateway(TIMEOUT)
    assert gateway(e.Ticked(), after_s=0.2) == ["publish gw-1.1.1 to s for 20"]


def test_the_body_is_granted_in_parts_and_the_same_each_time() -> None:
    """256 KiB at a time, and only to the holder."""
    gateway = Gateway()
    body = bytes(600 * 1024)
    gateway.submit(body=body)
    assert gateway.claim()[0] == "5: grant gw-1.1 part 0/3"
    assert gateway.claim(part=2) == ["5: grant gw-1.1 part 2/3"]
    assert gateway.claim(part=2) == ["5: grant gw-1.1 part 2/3"]
    assert gateway.claim(part=3) == ["5: refuse unknown"]
    assert gateway.claim(part=1, replica=OTHER) == ["5: refuse taken"]
    sizes = []
    for part in range(3):
        claim = Claim(request=R, attempt=1, replica=HOLDER, part=part)
        (answer,) = gateway.core.step(0.0, e.ClaimReceived(claim, 1))
        assert isinstance(answer, e.AnswerClaim) and isinstance(answer.reply, Grant)
        sizes.append(len(answer.reply.body))
    assert sizes == [256 * 1024, 256 * 1024, 88 * 1024]


@pytest.mark.parametrize(
    ("event", "after_s", "reason"),
    [(LEFT, 0.0, "cancelled"), (e.Ticked(), 20.0, "expired"), (LAST, 0.0, "unknown")],
)
def test_a_late_claim_hears_why(event: e.RequestEvent, after_s: float, reason: str) -> None:
    """Ended requests are remembered for a while, so that a ticket still about is put away with the right reason."""
    gateway = in_state(G if event is LAST else S)
    gateway(event, after_s=after_s)
    assert gateway.claim(replica=OTHER) == [f"5: refuse {reason}"]
    gateway(e.Ticked(), after_s=61)
    assert gateway.claim(replica=OTHER) == ["5: refuse unknown"]


def test_a_dead_replica_is_refused_for_good() -> None:
    """A dead incarnation stays dead, also when later digests do not name it."""
    gateway = in_state(S)
    gateway(HOLDER_DEAD)
    gateway(e.PoolChanged(PoolDigest(epoch=1, sequence=2)))
    assert gateway.claim() == ["5: refuse dead"]
    assert gateway.claim(replica=OTHER)[0] == "5: grant gw-1.1 part 0/1"


def test_a_ticket_stored_after_its_request_ended_is_deleted() -> None:
    """In the stream that it was stored in, since sequences start again with a lost stream."""
    gateway = in_state(P)
    gateway(LEFT)
    assert gateway(e.TicketStored(R, 1, 1, Stored(shard=0, sequence=9, created=4))) == ["delete 9@4"]


def test_deltas_pass_in_order_only() -> None:
    """A repeat is dropped, a gap asks for a resend at most every 100 ms, foreign ones are cancelled."""
    gateway = in_state(G)
    assert gateway.frames(delta(0, 2)) == ["deliver gw-1 0:0+2"]
    assert gateway.frames(delta(0, 2)) == []
    assert gateway.frames(delta(3)) == ["resend gw-1.1 choice 0 from 2"]
    assert gateway.frames(delta(4)) == []
    gateway.now_s += 0.1
    assert gateway.frames(delta(4)) == ["resend gw-1.1 choice 0 from 2"]
    assert gateway.frames(delta(2), delta(3)) == ["deliver gw-1 0:2+1", "deliver gw-1 0:3+1"]
    assert gateway.frames(delta(4), replica=OTHER) == ["cancel gw-1.1 at rep-b"]
    assert gateway.frames(delta(4, attempt=2)) == ["cancel gw-1.2 at rep-a"]
    assert gateway.frames(delta(4, choice=1), delta(4, 0)) == []
    last = delta(4, 0, finish_reason="length", end=True, usage=USAGE)
    assert gateway.frames(last, last) == ["deliver gw-1 0:4+0", "end gw-1 finished 2", "cancel gw-1.1 at rep-a"]


def test_a_failure_counts_only_from_the_holder_of_the_current_attempt() -> None:
    """An engine that fails on an older attempt takes nothing from the one that runs."""
    gateway = in_state(G)
    sick = failure(FailureKind.SICK)
    assert gateway.frames(sick, replica=OTHER) == ["cancel gw-1.1 at rep-b"]
    old = delta(0, 0, attempt=0, end=True, failure=sick.failure)
    assert gateway.frames(old) == ["cancel gw-1.0 at rep-a"]
    assert gateway.core.state_of(R) is G


def test_the_end_waits_for_every_choice() -> None:
    """The last delta is taken only when no other choice has a gap, else the answer would be short (PAINS J2)."""
    gateway = Gateway()
    gateway.submit(n=2)
    gateway.claim()
    end = delta(1, 0, choice=1, finish_reason="stop", end=True, usage=USAGE)
    assert gateway.frames(delta(0, choice=1), end) == ["deliver gw-1 1:0+1", "resend gw-1.1 choice 0 from 0"]
    assert gateway.frames(delta(0, finish_reason="stop")) == ["deliver gw-1 0:0+1"]
    assert gateway.frames(delta(1), end) == ["deliver gw-1 1:1+0", "end gw-1 finished 2"]


def test_held_names_what_runs_with_its_next_indexes_and_goes_on_for_a_while_after_the_end() -> None:
    """Every 200 ms; the finish is confirmed by not being named any more."""
    gateway = in_state(G)
    gateway.frames(delta(0, 2))
    assert gateway(e.Ticked(), after_s=0.2) == ["held 1 to rep-a: gw-1.1[2]"]
    gateway.frames(delta(2, 0, finish_reason="stop", end=True, usage=USAGE))
    lines = []
    while gateway.core.next_wake_s is not None:
        lines += gateway(e.Ticked(), after_s=0.2)
        if gateway.core.next_wake_s is not None:
            gateway.frames()
    assert lines == [f"held {n} to rep-a: " for n in range(2, 12)]
    assert gateway.core.idle


def _beats(gateway: Gateway, count: int, *, round_trips: bool = True) -> list[str]:
    lines: list[str] = []
    for _ in range(count):
        if round_trips:
            gateway(e.BusRoundTripMade())
        lines += [line for line in gateway(e.Ticked(), after_s=0.2) if not line.startswith("held")]
    return lines


def test_ten_held_in_a_row_without_a_frame_take_the_requests_away() -> None:
    """Works without a scheduler; any frame starts the count again (PAINS F7)."""
    gateway = in_state(G)
    assert _beats(gateway, 10) == []
    gateway.frames()
    assert _beats(gateway, 10) == []
    assert _beats(gateway, 1) == AGAIN
    assert gateway.claim(attempt=2)[0] == "5: grant gw-1.2 part 0/1"
    assert _beats(gateway, 10) == []


def test_silence_counts_only_while_the_own_bus_works_and_others_had_time_to_come_back() -> None:
    """A gateway that is cut off condemns nobody (PAINS F10)."""
    gateway = in_state(G)
    assert _beats(gateway, 50, round_trips=False) == []
    gateway(e.BusReconnected())
    assert _beats(gateway, 24) == []
    assert _beats(gateway, 12) == AGAIN


@pytest.mark.parametrize("event", [GONE, HOLDER_DEAD, SICK])
def test_after_tokens_were_sent_a_loss_is_one_clear_error(event: e.RequestEvent) -> None:
    """No restart could go on from there; the client hears it once."""
    gateway = in_state(G)
    gateway.frames(delta(0))
    assert gateway(event)[-1] == f"end gw-1 502 {'engine_failed' if event is SICK else 'replica_lost'}"
    assert gateway.core.unfinished == 0


def test_three_losses_end_the_request() -> None:
    """At most three attempts are fed to replicas that die of it, or of something else."""
    gateway = Gateway()
    gateway.submit()
    lines = []
    for attempt in (1, 2, 3):
        gateway.claim(attempt=attempt)
        lines += gateway.frames(gone=(Gone(request=R, attempt=attempt),))
    expected = [
        *AGAIN,
        "restart gw-1.3",
        "publish gw-1.3.1 to s for 20",
        "cancel gw-1.3 at rep-a",
        "end gw-1 502 replica_lost",
    ]
    assert lines == expected


def test_a_busy_engine_is_no_loss_but_the_waiting_bound_holds() -> None:
    """The request is published again after a pause, as often as its waiting bound allows."""
    gateway = in_state(G)
    for attempt in range(1, 200):
        gateway.frames(delta(0, 0, attempt=attempt, end=True, failure=Failure(kind=FailureKind.BUSY, message="m")))
        gateway(e.Ticked(), after_s=0.2)
        if gateway.core.state_of(R) is None:
            break
        gateway.claim(attempt=attempt + 1)
    assert 19 <= gateway.now_s <= 20.5 and gateway.core.unfinished == 0


def test_a_whole_answer_whose_usage_is_lost_is_finished() -> None:
    """Every choice had its finish reason, so nothing of the answer is missing."""
    gateway = in_state(G)
    gateway.frames(delta(0, finish_reason="stop"))
    assert gateway(HOLDER_DEAD) == ["end gw-1 finished ?"]


def test_continuation_grants_the_tokens_that_were_sent() -> None:
    """Behind its flag, and only where the profile allows it and every token id is known."""
    gateway = Gateway(continuation_enabled=True)
    gateway.submit(continuable=True)
    gateway.claim()
    gateway.frames(delta(0, 3))
    assert gateway(HOLDER_DEAD) == AGAIN
    (answer, _) = gateway.core.step(0.0, e.ClaimReceived(Claim(request=R, attempt=2, replica=OTHER), 1))
    assert isinstance(answer, e.AnswerClaim) and isinstance(answer.reply, Grant)
    assert answer.reply.sent_token_ids == (0, 1, 2)
    assert gateway.frames(delta(3, attempt=2), replica=OTHER) == ["deliver gw-1 0:3+1"]
    without_ids = Gateway(continuation_enabled=True)
    without_ids.submit(continuable=True)
    without_ids.claim()
    without_ids.frames(delta(0, 3, token_ids=()))
    assert without_ids(HOLDER_DEAD) == ["cancel gw-1.1 at rep-a", "end gw-1 502 replica_lost"]


def test_shutdown_ends_what_is_left_at_its_bound() -> None:
    """Nothing is left without an end."""
    gateway = in_state(G)
    gateway.submit(RequestId("gw-2"))
    assert gateway(e.ShutdownStarted(deadline_s=5.0)) == []
    ends = [line for line in gateway(e.Ticked(), after_s=5) if line.startswith("end")]
    assert ends == ["end gw-1 503 shutting_down", "end gw-2 503 shutting_down"]


def test_refused_clients_are_told_when_to_come_back() -> None:
    """The pool's estimate where there is one (PAINS L8)."""
    gateway = in_state(P)
    estimate = PoolModel(model_hash=MODEL, deployment=DEPLOYMENT, name="m", estimated_wait_s=11.5)
    gateway(e.PoolChanged(PoolDigest(epoch=1, sequence=1, models=(estimate,))))
    (end,) = gateway.core.step(0.0, FULL)
    assert isinstance(end, e.EndRequest) and isinstance(end.outcome, e.Failed)
    assert (end.outcome.status, end.outcome.retry_after_s) == (503, 12)


def test_demand_is_counted_per_model_class_lane_and_business() -> None:
    """Never per request; health checks are no demand (ING-4)."""
    gateway = in_state(G)
    gateway.submit(RequestId("gw-2"), sla_class=SlaClass.GOLD, business_id="b")
    gateway.submit(RequestId("gw-3"), kind=RequestKind.HEALTH_CHECK)
    gateway.now_s = 4.0
    rows = gateway.core.take_demand(4.0)
    assert [(r.sla_class, r.business_id, r.arrived, r.waiting, r.running, r.oldest_wait_s) for r in rows] == [
        (SlaClass.GOLD, "b", 1, 1, 0, 4.0),
        (SlaClass.SILVER, "", 1, 0, 1, 0.0),
    ]
    gateway(LAST)
    gateway(e.ClientLeft(RequestId("gw-2")))
    rows = gateway.core.take_demand(5.0)
    assert [(r.finished, r.failed, r.arrived, r.running, r.output_tokens, r.latency_s_sum) for r in rows] == [
        (1, 0, 0, 0, 2, 4.0)
    ]
    assert gateway.core.take_demand(6.0) == ()
