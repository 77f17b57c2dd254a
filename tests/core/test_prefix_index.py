"""Who holds which prefix, and what is no longer believed (KVC-6, PAINS F8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.core import prefix_index
from kvcache.core.prefix_index import NOBODY, SILENT_S_MAX, PrefixHolders, PrefixIndex, WorkerPrefix
from subjects.ids import DeviceId, ModelHash, ReplicaId, WorkerId
from subjects.messages import (
    KvIndexed,
    KvModelSpans,
    KvSnapshot,
    KvSpan,
    KvTier,
    PoolDigest,
    PoolReplica,
    ReplicaState,
)

MODEL = ModelHash("a" * 64)
OTHER_MODEL = ModelHash("b" * 64)
ONE, TWO = WorkerId("w-1"), WorkerId("w-2")
R1, R2, R3 = ReplicaId("rep-1"), ReplicaId("rep-2"), ReplicaId("rep-3")
HOST, DISK, ENGINE = KvTier.HOST, KvTier.DISK, KvTier.ENGINE
CHAIN = [f"span-{number}".encode() for number in range(8)]


def held(
    count: int, tier: KvTier = HOST, replica: ReplicaId | None = None, *, chain: Sequence[bytes] = CHAIN, start: int = 0
) -> list[KvSpan]:
    """The spans of a chain from ``start`` to ``count``."""
    return [KvSpan(span=chain[number], depth=8 * (number + 1), tier=tier, replica=replica) for number in range(start, count)]


def spans(gained: Iterable[KvSpan] = (), dropped: Sequence[bytes] = (), model: ModelHash = MODEL) -> KvModelSpans:
    """What changed for a model."""
    return KvModelSpans(model_hash=model, block_size=32, held=tuple(gained), dropped=tuple(dropped))


def news(sequence: int, *models: KvModelSpans, worker: WorkerId = ONE, node: str = "n-1", **fields: object) -> KvIndexed:
    """A batch of a node."""
    return KvIndexed(worker=worker, node=node, sequence=sequence, models=models, **fields)  # type: ignore[arg-type]


def page(sequence: int, *models: KvModelSpans, cursor: bytes = b"", node: str = "n-1") -> KvSnapshot:
    """A page of the snapshot of worker ONE."""
    return KvSnapshot(worker=ONE, node=node, sequence=sequence, models=models, cursor=cursor)


def settled(*models: KvModelSpans, **options: int) -> PrefixIndex:
    """An index that knows all of worker ONE, as of sequence 1."""
    index = PrefixIndex(**options)
    assert index.indexed(0.0, news(1, *models))
    assert index.page(0.0, page(1), b"") == b""
    return index


def found(index: PrefixIndex, chain: Sequence[bytes] = CHAIN, model: ModelHash = MODEL) -> dict[str, int]:
    """Leading spans by holder."""
    holders = index.holders(model, chain)
    workers: dict[str, int] = {one.worker: one.spans for one in holders.workers}
    return workers | {str(replica): count for replica, count in holders.replicas.items()}


def digest(*replicas: ReplicaId, state: ReplicaState = ReplicaState.READY, dead: Sequence[ReplicaId] = ()) -> PoolDigest:
    """A pool with these replicas at worker ONE."""
    return PoolDigest(
        epoch=1,
        sequence=1,
        replicas=tuple(
            PoolReplica(replica=one, model_hash=MODEL, worker=ONE, device=DeviceId("cpu0"), state=state) for one in replicas
        ),
        dead=tuple(dead),
    )


# ------------------------------------------------------------------------------------------------------------ look-ups


def test_each_holder_counts_its_leading_spans_only() -> None:
    """The longest prefix is what is there from the first span on: a span after a gap is of no use."""
    index = settled(spans([*held(3, DISK), *held(6, HOST, R1, start=4)]))
    index.indexed(0.0, news(1, spans(held(5, HOST, R2)), worker=TWO, node="n-2"))
    assert index.holders(MODEL, CHAIN) == PrefixHolders({R2: 5}, (WorkerPrefix(TWO, 5, HOST), WorkerPrefix(ONE, 3, DISK)))
    assert found(index, CHAIN[:2]) == {ONE: 2, TWO: 2, R2: 2}


def test_a_prompt_that_nobody_has() -> None:
    """Another first span, another model, or no span at all."""
    index = settled(spans(held(3)))
    assert index.holders(MODEL, [b"other", *CHAIN]) is NOBODY
    assert index.holders(OTHER_MODEL, CHAIN) is NOBODY
    assert index.holders(MODEL, ()) is NOBODY


def test_models_are_apart() -> None:
    """Two models with one tokenizer have equal hashes for equal prompts; their KV is not the same."""
    index = settled(spans(held(3, HOST, R1)), spans(held(2, DISK, R2), model=OTHER_MODEL))
    assert found(index) == {ONE: 3, R1: 3}
    assert found(index, model=OTHER_MODEL) == {ONE: 2, R2: 2}


def test_two_engines_of_a_worker_are_both_believed() -> None:
    """Who loaded a span last does not take it from the other engine."""
    index = settled(spans(held(3, HOST, R1)))
    index.indexed(0.0, news(2, spans(held(2, HOST, R2))))
    assert found(index) == {ONE: 3, R1: 3, R2: 2}


def test_a_span_only_in_an_engine_is_not_at_the_worker() -> None:
    """It cannot be fetched; once the node drops it, the engine has it no more either."""
    index = settled(spans(held(2, ENGINE, R1)))
    assert found(index) == {R1: 2}
    index.indexed(0.0, news(2, spans(dropped=CHAIN[1:2])))
    assert found(index) == {R1: 1}


def test_a_span_that_moved_to_disk() -> None:
    """The worker has it still, in the slower tier."""
    index = settled(spans(held(2)))
    index.indexed(0.0, news(2, spans(held(2, DISK, start=1))))
    assert index.holders(MODEL, CHAIN).workers == (WorkerPrefix(ONE, 2, DISK),)


# ------------------------------------------------------------------------------------------------ what is not believed


@pytest.mark.parametrize(
    "lost",
    [news(3, spans(held(1, HOST, R2))), news(2, spans(held(1, HOST, R2)), node="n-1b")],
    ids=["a gap", "another node process"],
)
def test_what_was_missed_is_asked_for(lost: KvIndexed) -> None:
    """A missed batch may have told of a reset engine: all of the worker is forgotten but what this one says (F8)."""
    index = settled(spans(held(3, HOST, R1)))
    assert index.indexed(0.0, lost)
    assert found(index) == {ONE: 1, R2: 1}
    assert index.wanting() == [ONE]


def test_a_repeated_batch_changes_nothing() -> None:
    """An old word does not bring back what was dropped since."""
    index = settled(spans(held(3)))
    index.indexed(0.0, news(2, spans(dropped=CHAIN[1:3])))
    assert not index.indexed(0.0, news(1, spans(held(3))))
    assert found(index) == {ONE: 1}


def test_a_reset_engine_has_nothing() -> None:
    """Reset, slept or ended: its beliefs go, but for what it gained since; the node's own tiers stay (F8)."""
    index = settled(spans(held(3, HOST, R1)))
    index.indexed(0.0, news(2, emptied=(R1,)))
    assert found(index) == {ONE: 3}
    index.indexed(0.0, news(3, spans(held(3, HOST, R1))))
    index.indexed(0.0, news(4, spans(held(1, HOST, R1)), emptied=(R1,)))
    assert found(index) == {ONE: 3, R1: 1}


@pytest.mark.parametrize(
    "word",
    [digest(dead=[R1]), digest(R1, state=ReplicaState.ASLEEP), digest(R1, state=ReplicaState.FAILED), digest()],
    ids=["dead", "asleep", "failed", "gone"],
)
def test_an_engine_that_the_pool_has_no_more(word: PoolDigest) -> None:
    """A removed or sleeping replica is no holder, whatever its node said last (F8)."""
    index = settled(spans(held(3, HOST, R1)))
    index.pool_is(digest(R1))
    assert found(index) == {ONE: 3, R1: 3}
    index.pool_is(word)
    assert found(index) == {ONE: 3}


def test_the_dead_stay_dead() -> None:
    """What is said late of a dead incarnation counts no more, nor does a page of a snapshot."""
    index = PrefixIndex()
    index.pool_is(digest(R1, dead=[R1]))
    index.indexed(0.0, news(1, spans(held(3, HOST, R1))))
    index.page(0.0, page(1, spans(held(3, HOST, R1))), b"")
    assert found(index) == {ONE: 3}


def test_a_silent_worker_is_forgotten() -> None:
    """Its node beats every few seconds; without a word its host may be gone, and its engines' resets unheard."""
    index = settled(spans(held(3, HOST, R1)))
    index.indexed(5.0, news(2))
    assert index.expire(5.0 + SILENT_S_MAX) == []
    assert index.expire(5.1 + SILENT_S_MAX) == [ONE]
    assert found(index) == {} and index.empty and index.wanting() == []
    assert index.indexed(30.0, news(9))


def test_an_engine_is_believed_to_hold_no_more_than_it_can() -> None:
    """Its cache is as large as its pages: what was used longest ago went, of one prompt its end first (a mirror of LRU)."""
    index = PrefixIndex()
    index.engine_is(MODEL, 4)
    index.indexed(0.0, news(1, spans(held(3, HOST, R1))))
    other = [f"other-{number}".encode() for number in range(3)]
    index.indexed(0.0, news(2, spans(held(2, HOST, R1, chain=other))))
    assert found(index)[R1] == 2 and found(index, other)[R1] == 2
    index.used(MODEL, R1, CHAIN)
    index.indexed(0.0, news(3, spans(held(3, HOST, R1, chain=other, start=2))))
    assert found(index)[R1] == 2 and found(index, other)[R1] == 1
    assert found(index)[ONE] == 3 and found(index, other)[ONE] == 3


# ----------------------------------------------------------------------------------------------------------- snapshots


def test_a_snapshot_is_read_page_by_page() -> None:
    """Each page is asked for with the cursor of the one before."""
    index = PrefixIndex()
    assert index.indexed(0.0, news(4)) and index.wanted_page(ONE) == b""
    assert index.page(0.0, page(4, spans(held(1)), cursor=b"c"), b"") == b"c"
    assert index.wanted_page(ONE) == b"c"
    assert index.page(0.0, page(4, spans(held(2, start=1))), b"c") == b""
    assert index.wanted_page(ONE) is None and found(index) == {ONE: 2}


def test_an_old_page_does_not_undo_newer_news() -> None:
    """The page was written before the batches that came meanwhile: what those dropped, emptied or moved stays so."""
    index = PrefixIndex()
    index.indexed(0.0, news(4))
    index.indexed(0.0, news(5, spans(held(2, DISK, start=1), dropped=CHAIN[2:3]), emptied=(R1,)))
    index.page(0.0, page(4, spans(held(4, HOST, R1))), b"")
    assert index.holders(MODEL, CHAIN) == PrefixHolders({}, (WorkerPrefix(ONE, 2, DISK),))
    index.indexed(0.0, news(6, spans(held(3, HOST, start=2))))
    assert found(index) == {ONE: 4}


@pytest.mark.parametrize(
    ("late", "asked"),
    [
        (page(5, spans(held(3)), node="n-0"), b""),
        (page(3, spans(held(3))), b""),
        (page(5, spans(held(3))), b"c"),
        (KvSnapshot(worker=TWO, node="n-2", sequence=9, models=(spans(held(3)),)), b""),
    ],
    ids=["another process", "older than the gap", "another cursor", "an unknown worker"],
)
def test_pages_of_no_use(late: KvSnapshot, asked: bytes) -> None:
    """They change nothing, and the snapshot is still wanted."""
    index = PrefixIndex()
    index.indexed(0.0, news(4))
    assert index.page(0.0, late, asked) is None
    assert found(index) == {} and index.wanted_page(ONE) == b""


def test_a_gap_starts_the_snapshot_anew() -> None:
    """Pages before it may be out of date: the last page of the old round does not end the new one."""
    index = PrefixIndex()
    index.indexed(0.0, news(4))
    index.page(0.0, page(4, spans(held(1)), cursor=b"c"), b"")
    assert index.indexed(0.0, news(7))
    assert index.page(0.0, page(7, spans(held(2, start=1))), b"c") is None
    assert index.wanted_page(ONE) == b"" and found(index) == {}


def test_too_many_changes_start_the_snapshot_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changed meanwhile is remembered within a bound; beyond it older pages are not taken."""
    monkeypatch.setattr(prefix_index, "CHANGED_MAX", 2)
    index = PrefixIndex()
    index.indexed(0.0, news(4))
    index.page(0.0, page(4, spans(held(1)), cursor=b"c"), b"")
    assert not index.indexed(0.0, news(5, spans(dropped=CHAIN[:3])))
    assert index.wanted_page(ONE) == b""
    assert index.page(0.0, page(4, spans(held(3))), b"") is None
    assert index.page(0.0, page(5, spans(held(8, start=4))), b"") == b""


# -------------------------------------------------------------------------------------------------------------- bounds


def test_spans_of_a_worker_are_bounded() -> None:
    """The spans that were said or used longest ago go first."""
    index = settled(spans(held(4)), worker_spans_max=4)
    other = [f"other-{number}".encode() for number in range(2)]
    index.pool_is(digest(R1))
    index.used(MODEL, R1, CHAIN)
    index.indexed(0.0, news(2, spans(held(2, chain=other))))
    assert found(index) == {ONE: 2} and found(index, other) == {ONE: 2}
    assert index.holdings == 4


def test_all_holdings_are_bounded() -> None:
    """Whatever the number of workers, the largest holder gives way."""
    index = PrefixIndex(holdings_max=10)
    for number in range(5):
        worker = WorkerId(f"w-{number}")
        chain = [f"{number}-{depth}".encode() for depth in range(4 if number else 8)]
        index.indexed(0.0, news(1, spans(held(len(chain), chain=chain)), worker=worker))
        assert index.holdings <= 10
    assert found(index, [f"4-{depth}".encode() for depth in range(4)])


SPANS = st.lists(st.integers(0, 5), max_size=4, unique=True)
BATCH = st.tuples(
    st.integers(0, 1),
    SPANS,
    SPANS,
    st.sampled_from([HOST, DISK, ENGINE]),
    st.sampled_from([None, 0, 1]),
    st.lists(st.integers(0, 1), max_size=1),
)


@settings(max_examples=200, deadline=None)
@given(batches=st.lists(BATCH, max_size=12))
def test_it_agrees_with_the_plain_sets(
    batches: list[tuple[int, list[int], list[int], KvTier, int | None, list[int]]],
) -> None:
    """Against a set of spans per holder, walked span by span; nothing is left over once all are forgotten."""
    index = PrefixIndex()
    plain: dict[str, set[bytes]] = {}
    sequences = [0, 0]
    for at, gained, dropped, tier, engine, emptied in batches:
        worker = (ONE, TWO)[at]
        engines = [ReplicaId(f"{worker}-rep-{number}") for number in (0, 1)]
        replica = None if engine is None else engines[engine]
        sequences[at] += 1
        gained_spans = [KvSpan(span=CHAIN[one], depth=one, tier=tier, replica=replica) for one in gained]
        batch = news(
            sequences[at],
            spans(gained_spans, [CHAIN[one] for one in dropped]),
            worker=worker,
            node=worker,
            emptied=tuple(engines[one] for one in emptied),
        )
        index.indexed(0.0, batch)
        for one in emptied:
            plain[engines[one]] = set()
        for one in dropped:
            for holder in (worker, *engines):
                plain.setdefault(holder, set()).discard(CHAIN[one])
        for one in gained:
            if tier is ENGINE:
                plain.setdefault(worker, set()).discard(CHAIN[one])
            else:
                plain.setdefault(worker, set()).add(CHAIN[one])
            if replica is not None:
                plain.setdefault(replica, set()).add(CHAIN[one])
        expected = {
            holder: next((depth for depth, span in enumerate(CHAIN) if span not in has), len(CHAIN))
            for holder, has in plain.items()
        }
        assert found(index) == {holder: depth for holder, depth in expected.items() if depth}
        assert index.holdings == sum(len(has) for has in plain.values())
    index.forget_worker(ONE)
    index.forget_worker(TWO)
    assert index.empty and not index._table and not index._holders
