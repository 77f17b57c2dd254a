"""Requests go to where their prefix is when that saves more than it costs (KVC-6); else as if there were no index."""

from __future__ import annotations

from typing import Any

import pytest

from broker.core.requests import events as e
from broker.core.requests.affinity import (
    COSTS_DEFAULT,
    HELD_OUT_MAX,
    NOWHERE,
    Choice,
    Place,
    PromptPrefix,
    ReuseCosts,
    Why,
    choose,
    engine_spans,
    prompt_prefix,
    reuse_costs,
)
from broker.core.requests.live import State
from kvcache.core.prefix_index import PrefixHolders, PrefixIndex, WorkerPrefix
from subjects.ids import DeviceId, ReplicaId, RequestId, WorkerId
from subjects.messages import (
    Delta,
    EngineType,
    Frames,
    KvIndexed,
    KvModelSpans,
    KvSpan,
    KvTier,
    Lane,
    ModelRecord,
    PoolDigest,
    PoolReplica,
    ReplicaState,
    Room,
    StepCosts,
    Usage,
)
from tests.core.test_requests import DEPLOYMENT, MODEL, Gateway, brief, pool_of, profile

A, B = ReplicaId("rep-a"), ReplicaId("rep-b")
AT_A, AT_B = WorkerId("w-a"), WorkerId("w-b")
STEP = StepCosts(prefill_token_s=1e-3, step_const_s=0.01, step_request_s=1e-3)
COSTS = ReuseCosts(STEP, host_token_s=1e-4, disk_token_s=2e-3, link_token_s=5e-4)
CHAIN = tuple(f"span-{number}".encode() for number in range(4))
PREFIX = PromptPrefix(CHAIN, 256, COSTS)
"""1,024 tokens that take a second to compute, and a tenth of it to fetch from memory."""
IN_A = PrefixHolders({A: 4})


def at(replica: ReplicaId, worker: WorkerId | None = None, **fields: int) -> Place:
    """A place with room for four that runs nothing."""
    return Place(replica, worker, **({"slots": 4, "running": 0, "unseen_tokens": 0} | fields))


def chosen(*places: Place, holders: PrefixHolders = IN_A, output_tokens: int = 10, wait_s_max: float = 0.25) -> Choice:
    """Where the request goes."""
    return choose(places, holders, PREFIX, output_tokens=output_tokens, wait_s_max=wait_s_max)


@pytest.mark.parametrize(
    ("places", "holders", "expected"),
    [
        ((at(B, slots=9), at(A)), IN_A, Choice(Why.PREFIX, A, 1024)),
        ((at(B), at(A)), PrefixHolders({A: 1, B: 3}), Choice(Why.PREFIX, B, 768)),
        ((at(B, AT_B, slots=9), at(A, AT_A)), PrefixHolders({}, (WorkerPrefix(AT_A, 4, KvTier.HOST),)), (A, 1024)),
        ((at(B, AT_B), at(A, AT_A)), PrefixHolders({B: 4}, (WorkerPrefix(AT_A, 4, KvTier.HOST),)), (B, 1024)),
        ((at(B, AT_B), at(A, AT_A)), PrefixHolders({B: 2}, (WorkerPrefix(AT_A, 4, KvTier.HOST),)), (A, 1024)),
        (
            (at(B, AT_B, slots=9), at(A, AT_A)),
            PrefixHolders({}, (WorkerPrefix(WorkerId("w-c"), 4, KvTier.HOST),)),
            (B, 1024),
        ),
        ((at(B, running=40), at(A)), PrefixHolders({B: 4}), Choice(Why.PREFIX, B, 1024)),
        ((at(B, running=60), at(A)), PrefixHolders({B: 4}), Choice(Why.SPREAD, A, 0)),
        ((at(B, unseen_tokens=1100), at(A)), PrefixHolders({B: 4}), Choice(Why.SPREAD, A, 0)),
        ((at(A, slots=0, running=1), at(B)), PrefixHolders({B: 4}), Choice(Why.PREFIX, B, 1024)),
        ((at(A, slots=0, running=9), at(B, slots=0, running=9)), IN_A, NOWHERE),
        ((at(A, slots=3), at(B, slots=4)), PrefixHolders({A: 4, B: 4}), Choice(Why.PREFIX, B, 1024)),
        ((at(A), at(B)), PrefixHolders({A: 4, B: 4}), Choice(Why.PREFIX, A, 1024)),
        ((), IN_A, NOWHERE),
    ],
    ids=[
        "its engine",
        "the longer one",
        "its worker's memory",
        "an engine rather than memory",
        "half in an engine, all in memory elsewhere",
        "another worker's memory, for all alike",
        "in spite of some load",
        "not in spite of much load",
        "not behind many prompts",
        "the one with room",
        "no room anywhere",
        "of equals the one with more room",
        "of equals the one known first",
        "no replica",
    ],
)
def test_where_it_goes(places: tuple[Place, ...], holders: PrefixHolders, expected: Choice | tuple[ReplicaId, int]) -> None:
    """Seconds saved at each replica less what the load there costs."""
    choice = chosen(*places, holders=holders)
    assert (choice.replica, choice.tokens) == expected if isinstance(expected, tuple) else choice == expected


def test_what_is_dearer_to_fetch_than_to_compute_counts_for_nothing() -> None:
    """A slow disk draws no request: the most room decides (the fetch would be given up)."""
    disk = PrefixHolders({}, (WorkerPrefix(AT_A, 4, KvTier.DISK),))
    fast = PromptPrefix(CHAIN, 256, ReuseCosts(STEP, 1e-4, disk_token_s=2e-3, link_token_s=2e-3))
    places = (at(A, AT_A), at(B, AT_B, slots=5))
    assert choose(places, disk, fast, output_tokens=10, wait_s_max=0.25) == Choice(Why.ROOM, B, 0)


def test_it_waits_for_its_prefix_only_as_long_as_that_pays() -> None:
    """The holder ends one of ten requests each 20 ms: worth a wait of up to what it saves, in the park's bound."""
    full = at(A, slots=0, running=10)
    assert chosen(full, at(B)) == Choice(Why.WAIT, waits_for=A, wait_s_max=0.25)
    assert chosen(full, at(B), wait_s_max=0.1) == Choice(Why.WAIT, waits_for=A, wait_s_max=0.1)
    assert chosen(full, at(B), wait_s_max=0.0) == Choice(Why.SPREAD, B)
    short = PrefixHolders({A: 1})
    choice = chosen(full, at(B), holders=short)
    assert choice.waits_for == A and choice.wait_s_max == pytest.approx(0.256 - 0.18)
    assert chosen(full._replace(held_out=4), at(B), holders=short) == Choice(Why.SPREAD, B)
    assert chosen(full, at(B), output_tokens=200) == Choice(Why.SPREAD, B)


def test_few_wait_for_one_replica() -> None:
    """However much it saves, a holder has only so many who wait for it; nor does one wait for who runs nothing of ours."""
    assert chosen(at(A, slots=0, running=400, held_out=HELD_OUT_MAX), at(B), output_tokens=1).replica == B
    assert chosen(at(A, slots=0, running=0), at(B)).replica == B


def test_costs_of_a_record() -> None:
    """The fastest kind of device, where reuse saves least; round figures while nobody measured."""
    record = ModelRecord(
        name="m",
        model_hash=MODEL,
        deployment=DEPLOYMENT,
        weights_hash="w",
        engine_type=EngineType.SIMULATED,
        source="s",
        weights_bytes=1,
        kv_bytes_per_token=1_500_000,
        kv_bytes=3 * 256 * 1_500_000 + 5,
        budget_bytes=1,
        max_context_len=1,
    )
    assert reuse_costs(record) == ReuseCosts(COSTS_DEFAULT, 1e-3, 1.5e-3, 3e-3)
    assert engine_spans(record) == 3
    fast, slow = (StepCosts(prefill_token_s=each, step_const_s=0.1) for each in (1e-5, 1e-3))
    costs = reuse_costs(record, fast)
    assert costs.step == fast and reuse_costs(record, slow).step == slow
    assert prompt_prefix([b"x"] * 7, record, costs) is None
    assert prompt_prefix([bytes([n]) for n in range(17)], record, costs) == PromptPrefix((b"\x07", b"\x0f"), 256, costs)
    long = ReuseCosts(StepCosts(prefill_token_s=1.0, prefill_token2_s=0.5, step_const_s=0.0), 0.0, 0.0, 0.0)
    assert long.prefill_s(2, 4) == 2.0 + 0.5 * (16 - 4)


# ------------------------------------------------------------------------------------------------------------ the core


def link(gateway: Gateway, *replicas: ReplicaId) -> None:
    """A request of the model runs at each of them."""
    others = [RequestId(f"at-{replica}") for replica in replicas]
    for other in others:
        gateway.submit(other)
    for other, replica in zip(others, replicas, strict=True):
        gateway.claim(other, replica=replica)


class Affine(Gateway):
    """A gateway with an index, in which ``A`` has the whole prefix, and links to ``A`` and ``B``."""

    def __init__(self, slots_at_a: int = 4, *more: ReplicaId) -> None:
        self.index = PrefixIndex()
        super().__init__(prefixes=self.index)
        self.sequence = 0
        link(self, A, B, *more)
        self.has_room(A, slots_at_a, hands=0)
        self.has_room(B, 6, hands=0)
        self.holds(A)

    def holds(self, replica: ReplicaId) -> None:
        """Its node says that its engine has the whole prefix."""
        spans = tuple(
            KvSpan(span=span, depth=8 * depth, tier=KvTier.ENGINE, replica=replica) for depth, span in enumerate(CHAIN, 1)
        )
        self.sequence += 1
        models = (KvModelSpans(model_hash=MODEL, block_size=32, held=spans),)
        self.index.indexed(self.now_s, KvIndexed(worker=AT_A, node="n", sequence=self.sequence, models=models))

    def ask(self, request: str, prefix: PromptPrefix | None = PREFIX, **fields: Any) -> list[e.RequestCommand]:
        """A request with this prefix."""
        submitted = e.RequestSubmitted(
            request=RequestId(request),
            profile=profile(input_tokens=1024, expected_output_tokens=10, **fields),
            body=b"{}",
            wait_until_s=self.now_s + 20,
            deadline_s=self.now_s + 100,
            prefix=prefix,
        )
        return self.core.step(self.now_s, submitted)

    def has_room(self, replica: ReplicaId, slots: int, hands: int = 99, after_s: float = 0.0) -> list[str]:
        """It says what it would take."""
        self.now_s += after_s
        room = Room(hands=hands, slots=slots, pages=1000, tokens=1_000_000)
        return self(e.FramesReceived(Frames(replica=replica, sequence=1, room=room)))


def went(commands: list[e.RequestCommand]) -> ReplicaId | None:
    """Who was handed the request."""
    return next((command.replica for command in commands if isinstance(command, e.HandOver)), None)


def test_a_request_goes_to_where_its_prefix_is() -> None:
    """Though another one has more room; the record of the grant says what it was chosen for."""
    commands = Affine().ask("one")
    assert [brief(command) for command in commands] == ["hand 1 one.1 to rep-a", "granted one.1 to rep-a after 0"]
    assert commands[1] == e.RecordGrant(RequestId("one"), 1, A, 0.0, 1024, Why.PREFIX)


@pytest.mark.parametrize("case", ["no prefix", "nobody has it", "its engine was reset", "its replica died"])
def test_without_a_holder_the_most_room_decides(case: str) -> None:
    """As if there were no index (F8)."""
    gateway = Affine()
    prefix: PromptPrefix | None = PREFIX
    if case == "no prefix":
        prefix = None
    elif case == "nobody has it":
        prefix = PromptPrefix((b"other", *CHAIN), 256, COSTS)
    elif case == "its engine was reset":
        gateway.index.indexed(0.0, KvIndexed(worker=AT_A, node="n", sequence=2, emptied=(A,)))
    else:
        gateway.index.forget_replica(A)
    assert gateway.ask("one", prefix)[1:] == [e.RecordGrant(RequestId("one"), 1, B, 0.0)]


def test_a_queue_is_a_queue() -> None:
    """While others of its lane wait in the work-queue nobody overtakes them, whatever his prefix (0026)."""
    gateway = Affine()
    queued = e.RequestSubmitted(
        request=RequestId("long"), profile=profile(), body=b"x" * 300_000, wait_until_s=20, deadline_s=100
    )
    assert [brief(command) for command in gateway.core.step(0.0, queued)] == ["publish long.1.1 to s for 20"]
    assert went(gateway.ask("two", lane=Lane.MEDIUM)) == A
    assert went(gateway.ask("one")) is None


def test_it_waits_for_its_holder_and_is_handed_to_it() -> None:
    """The holder is full but about to have room; the other's word does not move it, and it holds up nobody."""
    gateway = Affine(slots_at_a=0)
    assert gateway.ask("one") == [] and gateway.core.state_of(RequestId("one")) is State.PARKED
    assert went(gateway.ask("two", None)) == B
    assert gateway.has_room(B, 5, after_s=0.05) == []
    assert gateway.has_room(A, 1, after_s=0.05) == ["hand 2 one.1 to rep-a", "granted one.1 to rep-a after 0.1"]


def test_it_waits_in_bounds() -> None:
    """Its holder has had no room in time: another one gets it, without another wait."""
    gateway = Affine(slots_at_a=0)
    gateway.ask("one")
    gateway(e.Ticked(), after_s=0.24)
    assert gateway.core.state_of(RequestId("one")) is State.PARKED
    lines = gateway(e.Ticked(), after_s=0.02)
    assert lines[:2] == ["hand 1 one.1 to rep-b", "granted one.1 to rep-b after 0.26"]


def test_who_waited_in_vain_takes_its_place_in_the_queue() -> None:
    """Its holder had no room in time, and by then nobody has any."""
    gateway = Affine(slots_at_a=0)
    gateway.ask("one")
    assert gateway.has_room(B, 0, after_s=0.1) == []
    assert gateway(e.Ticked(), after_s=0.16)[0] == "publish one.1.1 to s for 20"


def test_who_leaves_while_it_waits_leaves_nothing_behind() -> None:
    """The next one is not held up by it, nor counted behind it."""
    gateway = Affine(slots_at_a=0)
    gateway.ask("one")
    assert gateway(e.ClientLeft(RequestId("one"))) == ["end one cancelled"]
    assert not gateway.core._links._held_out and not gateway.core._links.any_parked
    assert went(gateway.ask("two", None)) == B


def test_those_parked_for_any_room_are_not_overtaken() -> None:
    """One that waits for any room goes before a newcomer with a prefix, and before who waits for one replica only."""
    gateway = Affine(slots_at_a=0)
    gateway.has_room(B, 0)
    assert gateway.ask("any", None) == [] and gateway.ask("one") == []
    assert gateway.has_room(B, 1, after_s=0.05) == ["hand 1 any.1 to rep-b", "granted any.1 to rep-b after 0.05"]


def test_a_worker_that_keeps_it_draws_it_to_its_replicas() -> None:
    """Its engine was reset, its node has all of it in memory: of the replicas there the one with the least to do, and while
    that one is full a request waits for it as for an engine."""
    near = ReplicaId("rep-near")
    gateway = Affine(4, near)
    gateway.has_room(near, 1, hands=0)
    places = ((A, AT_A), (near, AT_A), (B, AT_B))
    replicas = tuple(
        PoolReplica(
            replica=one, model_hash=MODEL, deployment=DEPLOYMENT, worker=at, device=DeviceId("d"), state=ReplicaState.READY
        )
        for one, at in places
    )
    gateway.index.pool_is(PoolDigest(epoch=1, sequence=1, replicas=replicas))
    spans = tuple(KvSpan(span=span, depth=8, tier=KvTier.HOST) for span in CHAIN)
    models = (KvModelSpans(model_hash=MODEL, block_size=32, held=spans),)
    gateway.index.indexed(0.0, KvIndexed(worker=AT_A, node="n", sequence=2, models=models, emptied=(A,)))
    assert gateway.index.holders(MODEL, CHAIN) == PrefixHolders({}, (WorkerPrefix(AT_A, 4, KvTier.HOST),))
    slow_link = PromptPrefix(CHAIN, 256, ReuseCosts(STEP, host_token_s=1e-4, disk_token_s=1.0, link_token_s=1.0))
    assert [went(gateway.ask(f"{number}", slow_link)) for number in range(2)] == [A, near]
    gateway.has_room(A, 0)
    gateway.has_room(near, 0)
    assert gateway.ask("waits", slow_link) == [] and gateway.core.state_of(RequestId("waits")) is State.PARKED
    gateway.has_room(B, 6)
    assert gateway.core.state_of(RequestId("waits")) is State.PARKED
    assert gateway.has_room(near, 1, after_s=0.05)[0] == "hand 3 waits.1 to rep-near"


def test_a_popular_prefix_does_not_flood_its_holder() -> None:
    """One hot system prompt, eight replicas with eight slots each: the holder is filled first, within its room, then the
    others share the rest; each that computed it is a holder too, and no request waits while there is room."""
    index = PrefixIndex()
    gateway = Gateway(prefixes=index)
    replicas = [ReplicaId(f"rep-{number}") for number in range(8)]
    link(gateway, *replicas)
    for replica in replicas:
        gateway.frames(replica=replica, room=Room(hands=0, slots=8, pages=9999, tokens=99_999))
    running = dict.fromkeys(replicas, 0)
    step = StepCosts(prefill_token_s=1e-4, step_const_s=0.01, step_request_s=1e-4)
    prefix = PromptPrefix(CHAIN, 256, ReuseCosts(step, 1e-5, 1e-5, 1e-5))
    order: list[ReplicaId] = []
    for number in range(64):
        commands = gateway.core.step(
            gateway.now_s,
            e.RequestSubmitted(
                request=RequestId(f"hot-{number}"),
                profile=profile(input_tokens=1024, expected_output_tokens=100),
                body=b"{}",
                wait_until_s=gateway.now_s + 20,
                deadline_s=gateway.now_s + 100,
                prefix=prefix,
            ),
        )
        holder = went(commands)
        assert holder is not None, number
        running[holder] += 1
        order.append(holder)
        spans = tuple(KvSpan(span=span, depth=1, tier=KvTier.ENGINE, replica=holder) for span in CHAIN)
        models = (KvModelSpans(model_hash=MODEL, block_size=32, held=spans),)
        index.indexed(0.0, KvIndexed(worker=AT_A, node="n", sequence=number, models=models))
        gateway.frames(replica=holder, room=Room(hands=number + 1, slots=8 - running[holder], pages=9999, tokens=99_999))
    assert set(running.values()) == {8}
    assert len(dict.fromkeys(order[:6])) == 1, "a prefix worth 0.1 s draws several requests to its holder"
    assert len(dict.fromkeys(order[:12])) > 1, "but not all that it has room for"


def test_one_that_came_up_beside_busy_holders_is_reached_by_the_queue() -> None:
    """A prefix draws requests to its holder for as long as that pays beside an idle replica that nobody has a link to."""
    gateway = Affine(20)
    new = ReplicaId("rep-new")
    gateway(pool_of(**{str(replica).replace("-", "_"): 1.0 for replica in (A, B, new)}))
    went_to = [went(gateway.ask(f"r{number}")) for number in range(20)]
    assert went_to[0] == A and went_to[-1] is None
    assert went_to == sorted(went_to, key=lambda replica: replica is None)
    assert set(went_to) <= {A, None}


def test_the_engine_keeps_what_is_asked_for() -> None:
    """A request that goes to a replica keeps its prefix from being the next that its engine throws out (a mirror of LRU)."""
    gateway = Affine()
    gateway.index.engine_is(MODEL, 4)
    other = tuple(f"other-{number}".encode() for number in range(2))
    gateway.ask("one")
    spans = tuple(KvSpan(span=span, depth=8, tier=KvTier.ENGINE, replica=A) for span in other)
    models = (KvModelSpans(model_hash=MODEL, block_size=32, held=spans),)
    gateway.index.indexed(0.0, KvIndexed(worker=AT_A, node="n", sequence=2, models=models))
    assert gateway.index.holders(MODEL, CHAIN).replicas == {A: 2}


def test_an_end_makes_the_wait_shorter() -> None:
    """The answer of a request at the holder ends: its room comes with the same message, and the waiting one is handed over
    before anybody else."""
    gateway = Affine(slots_at_a=0)
    gateway.ask("one")
    last = Delta(
        request=RequestId("at-rep-a"),
        attempt=1,
        first_token_index=0,
        units=0,
        finish_reason="stop",
        end=True,
        usage=Usage(prompt_tokens=1, completion_tokens=1),
    )
    room = Room(hands=99, slots=1, pages=100, tokens=10_000)
    lines = gateway(e.FramesReceived(Frames(replica=A, sequence=2, deltas=(last,), room=room)), after_s=0.01)
    assert lines[-2:] == ["hand 1 one.1 to rep-a", "granted one.1 to rep-a after 0.01"]
