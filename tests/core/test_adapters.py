"""The slots for LoRA adapters of one engine: who is loaded, who waits, who is evicted (ING-3, SCH-8)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.core.requests.events import GRANT_PART_BYTES_MAX
from subjects.ids import IngressId, ReplicaId, RequestId
from subjects.messages import Adapter, FailureKind, Lane, SlaClass, Ticket
from tests.core.test_live_request import live
from tests.core.test_requests import profile
from workers.core.adapters import (
    AdapterCommand,
    AdapterSlots,
    AdmitRequest,
    EvictAdapter,
    LoadAdapter,
    RefuseRequest,
)
from workers.core.held_request import HeldRequest, Key
from workers.core.replica import ReplicaCore
from workers.core.replica_events import Opened, SendClaim, TicketPulled


def adapter(name: str, content: str = "1", source: str = "") -> Adapter:
    """An adapter of that name and content."""
    return Adapter(name=name, source=source or f"/adapters/{name}", adapter_hash=content)


A, B, C = adapter("a"), adapter("b"), adapter("c")


def key(number: int) -> Key:
    """The key of a request."""
    return RequestId(f"r{number}"), 1


def test_an_adapter_is_loaded_at_its_first_use_and_stays() -> None:
    """Requests that come while it loads wait for the one load; later ones start at once."""
    slots = AdapterSlots(2)
    assert slots.ask(key(1), A) == [LoadAdapter(A, 1)]
    assert slots.ask(key(2), A) == []
    assert slots.waiting == 2
    assert slots.loaded(A) == [AdmitRequest(key(1), 1), AdmitRequest(key(2), 1)]
    assert slots.over(key(1)) + slots.over(key(2)) == []
    assert slots.ask(key(3), A) == [AdmitRequest(key(3), 1)]
    assert (slots.waiting, slots.resident) == (0, ("a",))


def test_the_least_recently_used_idle_adapter_makes_room() -> None:
    """Order of use decides, not order of loading; the one that comes back is loaded anew, under an id of its own."""
    slots = AdapterSlots(2)
    for number, each in enumerate((A, B)):
        slots.ask(key(number), each)
        slots.loaded(each)
        slots.over(key(number))
    assert slots.ask(key(2), A) == [AdmitRequest(key(2), 1)]
    assert slots.over(key(2)) == []
    assert slots.ask(key(3), C) == [EvictAdapter(B, 2), LoadAdapter(C, 3)]
    assert slots.loaded(C) == [AdmitRequest(key(3), 3)]
    assert slots.ask(key(4), B) == [EvictAdapter(A, 1), LoadAdapter(B, 4)]


def test_an_adapter_in_use_is_never_taken_away_and_does_not_stay_for_ever() -> None:
    """With one slot, B waits for the requests of A that run; those of A that come after B wait behind it."""
    slots = AdapterSlots(1)
    slots.ask(key(1), A)
    slots.loaded(A)
    assert slots.ask(key(2), B) == []
    assert slots.ask(key(3), A) == []
    assert slots.over(key(1)) == [EvictAdapter(A, 1), LoadAdapter(B, 2)]
    assert slots.loaded(B) == [AdmitRequest(key(2), 2)]
    assert slots.over(key(2)) == [EvictAdapter(B, 2), LoadAdapter(A, 3)]
    assert slots.loaded(A) == [AdmitRequest(key(3), 3)]


def test_only_one_adapter_is_closed_for_one_that_waits() -> None:
    """The least recently used one takes nothing new, the other goes on; whichever is idle first gives its slot."""
    slots = AdapterSlots(2)
    for number, each in enumerate((A, B)):
        slots.ask(key(number), each)
        slots.loaded(each)
    assert slots.ask(key(2), C) == []
    assert slots.ask(key(3), A) == []
    assert slots.ask(key(4), B) == [AdmitRequest(key(4), 2)]
    assert slots.over(key(1)) == []
    assert slots.over(key(4)) == [EvictAdapter(B, 2), LoadAdapter(C, 3), AdmitRequest(key(3), 1)]


def test_one_that_gave_up_waiting_closes_nothing() -> None:
    """Its place and what was closed for it are given back."""
    slots = AdapterSlots(1)
    slots.ask(key(1), A)
    slots.loaded(A)
    assert slots.ask(key(2), B) + slots.ask(key(3), A) == []
    assert slots.over(key(2)) == [AdmitRequest(key(3), 1)]
    assert slots.over(key(2)) == []


def test_a_failed_load_ends_only_the_requests_for_it() -> None:
    """They hear the reason, the slot is free at once, and the next request for it tries again."""
    slots = AdapterSlots(1)
    slots.ask(key(1), A)
    slots.ask(key(2), A)
    slots.ask(key(3), B)
    assert slots.failed(A, "broken") == [
        RefuseRequest(key(1), "broken", FailureKind.SICK),
        RefuseRequest(key(2), "broken", FailureKind.SICK),
        LoadAdapter(B, 2),
    ]
    assert slots.loaded(B) == [AdmitRequest(key(3), 2)]
    assert slots.over(key(3)) == []
    assert slots.ask(key(4), A) == [EvictAdapter(B, 2), LoadAdapter(A, 3)]


def test_other_content_or_another_source_is_another_adapter() -> None:
    """One name replaced by other weights never answers with the old ones: it is loaded under an id never given before."""
    slots = AdapterSlots(4)
    same_name = (A, adapter("a", "2"), adapter("a", "1", "/elsewhere"))
    for number, each in enumerate(same_name, start=1):
        assert slots.ask(key(number), each) == [LoadAdapter(each, number)]
        assert slots.loaded(each) == [AdmitRequest(key(number), number)]


def test_without_slots_every_adapter_is_refused() -> None:
    """A replica that was started without adapters says so."""
    refusal = RefuseRequest(key(1), "this replica was started without adapters", FailureKind.BAD_REQUEST)
    assert AdapterSlots(0).ask(key(1), A) == [refusal]


def test_a_replicas_claims_say_that_it_heeds_adapters() -> None:
    """By this a gateway tells it from one of an older version, which would answer with the base's weights."""
    core = ReplicaCore(ReplicaId("rep-a"))
    core.step(0.0, Opened(slots=4, kv_pages=100, block_size=16, max_context_len=2048))
    ticket = Ticket(request=RequestId("r1"), attempt=1, publication=1, ingress=IngressId("gw"), profile=profile())
    pulled = TicketPulled(sla_class=SlaClass.SILVER, lane=Lane.SMALL, ticket=ticket, token="t", deliveries=1)
    (claim,) = (command.claim for command in core.step(0.0, pulled) if isinstance(command, SendClaim))
    assert claim.adapters


def test_one_that_leaves_while_its_adapter_loads_leaves_it_loaded() -> None:
    """The load goes on for the next who asks, and nobody is admitted twice."""
    slots = AdapterSlots(1)
    slots.ask(key(1), A)
    assert slots.over(key(1)) == []
    assert slots.ask(key(2), B) == []
    assert slots.loaded(A) == [EvictAdapter(A, 1), LoadAdapter(B, 2)]


class _World:
    """Plays the engine and checks every command against what it knows."""

    def __init__(self, slots_max: int) -> None:
        self.slots = AdapterSlots(slots_max)
        self.slots_max = slots_max
        self.resident: dict[int, Adapter] = {}
        self.loading: dict[int, Adapter] = {}
        self.wanted: dict[Key, Adapter] = {}
        self.admitted: dict[Key, int] = {}
        self.ids: list[int] = []

    def do(self, commands: list[AdapterCommand]) -> None:
        for command in commands:
            match command:
                case LoadAdapter(adapter=each, slot_id=slot):
                    assert slot not in self.ids, "an id is given once"
                    self.ids.append(slot)
                    self.loading[slot] = each
                    assert len(self.resident) + len(self.loading) <= self.slots_max
                case EvictAdapter(adapter=each, slot_id=slot):
                    assert self.resident.pop(slot) == each
                    assert slot not in self.admitted.values(), "nothing in use is evicted"
                case AdmitRequest(key=name, slot_id=slot):
                    assert name not in self.admitted
                    assert self.resident[slot] == self.wanted[name]
                    self.admitted[name] = slot
                case RefuseRequest(key=name):
                    del self.wanted[name]

    def finish_load(self, fails: bool) -> None:
        slot, each = next(iter(self.loading.items()))
        del self.loading[slot]
        if fails:
            self.do(self.slots.failed(each, "broken"))
        else:
            self.resident[slot] = each
            self.do(self.slots.loaded(each))

    def end(self, name: Key) -> None:
        del self.wanted[name]
        self.admitted.pop(name, None)
        self.do(self.slots.over(name))


@given(
    st.integers(1, 3),
    st.lists(st.one_of(st.sampled_from("abcde"), st.sampled_from(["load", "fail", "end", "leave"])), max_size=60),
)
def test_slots_hold_and_nobody_is_forgotten(slots_max: int, moves: list[str]) -> None:
    """Whatever comes in whatever order: never more than the bound, nothing in use evicted, and everybody ends served."""
    world = _World(slots_max)
    for number, move in enumerate(moves):
        if len(move) == 1:
            world.wanted[key(number)] = adapter(move)
            world.do(world.slots.ask(key(number), adapter(move)))
        elif move in ("load", "fail") and world.loading:
            world.finish_load(move == "fail")
        elif move == "end" and world.admitted:
            world.end(next(iter(world.admitted)))
        elif move == "leave" and world.wanted:
            world.end(next(reversed(world.wanted)))
    while world.wanted:
        assert world.loading or world.admitted, "somebody waits for nothing"
        while world.loading:
            world.finish_load(False)
        if world.admitted:
            world.end(next(iter(world.admitted)))
    assert world.slots.waiting == 0


def test_what_sleeps_keeps_no_idle_adapter() -> None:
    """Those that nothing uses are taken out; whoever asks next has it loaded anew."""
    slots = AdapterSlots(2)
    for number, each in enumerate((A, B)):
        slots.ask(key(number), each)
        slots.loaded(each)
    slots.over(key(0))
    assert slots.clear() == [EvictAdapter(A, 1)]
    assert slots.resident == ("b",)
    assert slots.ask(key(3), A) == [LoadAdapter(A, 3)]


def test_a_grant_in_parts_brings_the_adapter_once() -> None:
    """With the first part; put together again the replica has it, and so has the next attempt elsewhere."""
    request = live(bytes(GRANT_PART_BYTES_MAX + 1))
    request.adapter = A
    parts = [part for number in range(2) if (part := request.grant(number)) is not None]
    assert [part.adapter for part in parts] == [A, None]
    held = HeldRequest(request.request, 1, IngressId("gateway"), profile(), pages=1, parts=parts)
    assert held.whole_grant().adapter == A
    request.begin_attempt(3.0)
    again = request.grant(0)
    assert again is not None and (again.attempt, again.adapter) == (2, A)
