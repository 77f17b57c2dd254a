"""What a node holds, block by block, and which spans it tells the index of; and the arena that blocks lie in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcache.core.eviction import EvictionOrder
from kvcache.core.holdings import Holdings, coldest
from kvcache.core.identity import PAGE_BYTES, KvIdentity, KvSignature
from kvcache.node.host_tier import HostBlock, HostTier, checksums_of
from profiles.blocks import chain_hashes
from subjects.ids import ReplicaId
from subjects.messages import KvTier

SIGNATURE = KvSignature(
    model="m", layers=1, kv_heads=1, head_size=1, dtype="float16", form="x", block_size=128, block_bytes=PAGE_BYTES + 100
)
IDENTITY = KvIdentity(weights_hash="w", signature=SIGNATURE)
STEP = 2
"""Blocks of a span."""


def _chain(seed: int, blocks: int, parent: bytes = b"") -> list[bytes]:
    return chain_hashes(range(seed * 10_000, seed * 10_000 + blocks * 128), 128, b"", parent)


def _came(holdings: Holdings, hashes: list[bytes], at: int, tier: KvTier = KvTier.HOST, **changes: object) -> None:
    parent = changes.pop("parent", hashes[at - 1] if at else b"")
    holdings.came(IDENTITY, hashes[at], parent, tier=tier, size=1, now_s=float(at), **changes)  # type: ignore[arg-type]


def _told(holdings: Holdings) -> tuple[dict[bytes, tuple[int, KvTier]], set[bytes]]:
    held: dict[bytes, tuple[int, KvTier]] = {}
    dropped: set[bytes] = set()
    for news in holdings.news(1000):
        held |= {span.span: (span.depth, span.tier) for span in news.held}
        dropped |= set(news.dropped)
    return held, dropped


def test_a_span_is_told_when_all_its_blocks_are_here() -> None:
    """In whatever order they come, and on disk as soon as one of them is only there (KVC-2)."""
    holdings, hashes = Holdings(), _chain(1, 5)
    _came(holdings, hashes, 0)
    assert _told(holdings) == ({}, set())
    _came(holdings, hashes, 3)
    _came(holdings, hashes, 1, KvTier.DISK)
    assert _told(holdings) == ({hashes[1]: (2, KvTier.DISK)}, set())
    _came(holdings, hashes, 2)
    _came(holdings, hashes, 4)
    assert _told(holdings) == ({hashes[3]: (4, KvTier.HOST)}, set())
    _came(holdings, hashes, 1)
    assert _told(holdings) == ({hashes[1]: (2, KvTier.HOST)}, set())
    holdings.left(IDENTITY.key + hashes[0], KvTier.HOST)
    assert _told(holdings) == ({}, {hashes[1]})
    assert [block.hash for block in holdings.chain(IDENTITY.key, hashes[4])] == []


def test_depth_comes_from_the_engine_or_from_the_parent() -> None:
    """A chain of which the beginning is not here is told of only where the engine said how deep it is."""
    holdings, hashes = Holdings(), _chain(2, 6)
    _came(holdings, hashes, 2)
    _came(holdings, hashes, 3)
    assert _told(holdings) == ({}, set())
    _came(holdings, hashes, 1, depth=2)
    assert _told(holdings) == ({hashes[3]: (4, KvTier.HOST)}, set())
    _came(holdings, hashes, 0)
    assert _told(holdings) == ({hashes[1]: (2, KvTier.HOST)}, set())


def test_blocks_in_a_circle_are_held_and_let_go() -> None:
    """A writer that says a block follows itself, or two each other, does not keep the node busy for ever."""
    for circle in (_chain(1, 1), _chain(1, 2)):
        holdings = Holdings()
        for at in range(len(circle)):
            _came(holdings, circle, at, parent=circle[at - 1], depth=3 + 2 * at)
        assert len(holdings) == len(circle)
        for hash in circle:
            holdings.left(IDENTITY.key + hash, KvTier.HOST)
        assert len(holdings) == 0


def test_branches_share_their_beginning() -> None:
    """Two prompts with one beginning: a lost first block takes the spans of both away."""
    holdings, trunk = Holdings(), _chain(3, 1)
    left, right = _chain(4, 1, trunk[0]), _chain(5, 1, trunk[0])
    _came(holdings, [*trunk, *left], 0)
    _came(holdings, [*trunk, *left], 1)
    _came(holdings, [*trunk, *right], 1)
    assert set(_told(holdings)[0]) == {left[0], right[0]}
    assert holdings.heads("m") == sorted(IDENTITY.key + hash for hash in (left[0], right[0]))
    holdings.left(IDENTITY.key + trunk[0], KvTier.HOST)
    assert _told(holdings) == ({}, {left[0], right[0]})


def test_who_has_it_in_its_engine_and_whose_is_empty() -> None:
    """The replica that wrote or used a span last is named, until its engine is empty (F8)."""
    holdings, hashes = Holdings(), _chain(6, 2)
    _came(holdings, hashes, 0, replica=ReplicaId("r1"))
    _came(holdings, hashes, 1, replica=ReplicaId("r1"))
    assert holdings.news(10)[0].held[0].replica == "r1"
    holdings.used(IDENTITY.key + hashes[1], 5.0, ReplicaId("r2"))
    assert holdings.news(10)[0].held[0].replica == "r2"
    holdings.emptied(ReplicaId("r2"))
    assert holdings.news(10) == []
    pages, cursor = holdings.told(b"", 10)
    assert pages[0].held[0].replica is None and cursor == b""


def test_the_coldest_share_is_exact() -> None:
    """Half of five is two (banker's rounding of 2.5), all is all; of one moment the ends of chains go first."""
    holdings, hashes = Holdings(), _chain(7, 5)
    for at in range(5):
        holdings.came(IDENTITY, hashes[at], hashes[at - 1] if at else b"", tier=KvTier.HOST, size=1, now_s=1.0)
    holdings.used(IDENTITY.key + hashes[4], 2.0)
    assert [block.hash for block in coldest(holdings.of_model("m"), 0.5)] == [hashes[3], hashes[2]]
    assert len(coldest(holdings.of_model("m"), 1.0)) == 5
    assert coldest(holdings.of_model("m"), 0.0) == [] == coldest(holdings.of_model("other"), 1.0)


_PARENTS = {"a": "", "b": "a", "c": "b", "d": "c", "e": "b", "f": "e", "g": "d", "h": "g"}
"""Two branches of a common trunk."""


def _depth(name: str) -> int:
    return 1 + _depth(_PARENTS[name]) if _PARENTS[name] else 1


_TREE = {name: (parent, _depth(name)) for name, parent in _PARENTS.items()}


def _hash(name: str) -> bytes:
    return name.encode() * 16 if name else b""


@given(st.lists(st.tuples(st.sampled_from(sorted(_TREE)), st.sampled_from(["host", "disk", "-host", "-disk", "news"]))))
def test_what_was_told_is_what_is_held(steps: list[tuple[str, str]]) -> None:
    """Whatever comes and goes in whatever order: what the index believes after the news is what is there."""
    holdings = Holdings()
    host: set[str] = set()
    disk: set[str] = set()
    believed: dict[bytes, KvTier] = {}
    for name, step in [*steps, ("a", "news")]:
        parent, depth = _TREE[name]
        if step in ("host", "disk"):
            (host if step == "host" else disk).add(name)
            tier = KvTier.HOST if step == "host" else KvTier.DISK
            holdings.came(IDENTITY, _hash(name), _hash(parent), tier=tier, size=1, now_s=0.0, depth=depth)
        elif step == "news":
            for news in holdings.news(1000):
                believed |= {span.span: span.tier for span in news.held}
                for span in news.dropped:
                    del believed[span]
            expected = {}
            for last, (before, deep) in _TREE.items():
                blocks = {last, before}
                if deep % STEP == 0 and blocks <= host | disk:
                    expected[_hash(last)] = KvTier.HOST if blocks <= host else KvTier.DISK
            assert believed == expected
            snapshot = {span.span: span.tier for one in holdings.told(b"", 100)[0] for span in one.held}
            assert snapshot == expected
        else:
            (host if step == "-host" else disk).discard(name)
            holdings.left(IDENTITY.key + _hash(name), KvTier.HOST if step == "-host" else KvTier.DISK)
    assert len(holdings) == len(host | disk)


def test_a_snapshot_comes_in_pages() -> None:
    """Each span is on one page, whatever the size of pages."""
    holdings, hashes = Holdings(), _chain(8, 10)
    for at in range(10):
        _came(holdings, hashes, at)
    holdings.news(100)
    found: list[bytes] = []
    cursor = b""
    for _ in range(10):
        page, cursor = holdings.told(cursor, 2)
        found += [span.span for news in page for span in news.held]
        if not cursor:
            break
    assert sorted(found) == sorted(hashes[1::2])


# ------------------------------------------------------------------------------------------------------------- the arena


def _tier(blocks: int) -> HostTier:
    return HostTier(blocks * 2 * PAGE_BYTES, EvictionOrder())


def _put(tier: HostTier, number: int) -> HostBlock | None:
    block = tier.reserve(IDENTITY, number.to_bytes(16, "big"), b"", SIGNATURE.block_bytes)
    if block is not None:
        for view in block.views:
            view[:] = bytes([number % 256]) * len(view)
        tier.keep(block, checksums_of(block), 0.0)
    return block


def test_pages_are_bounded_and_come_back() -> None:
    """A tier of three blocks takes three; a block that leaves makes room for one (KVC-1)."""
    tier = _tier(3)
    kept = [_put(tier, number) for number in range(4)]
    assert kept[3] is None and tier.bytes_free == 0 and len(tier) == 3
    assert kept[1] is not None
    tier.remove(kept[1].key)
    assert tier.bytes_free == 2 * PAGE_BYTES
    assert _put(tier, 5) is not None


def test_a_pinned_block_keeps_its_pages_until_the_last_reader_is_done() -> None:
    """Removed while it is read: found no more, not a byte changes, and its pages are free afterwards."""
    tier = _tier(1)
    block = _put(tier, 7)
    assert block is not None
    tier.pin(block)
    assert tier.victims(1, 100.0, lambda _: False) == []
    tier.remove(block.key)
    assert tier.find(block.key) is None and tier.bytes_free == 0
    assert bytes(block.views[0][:3]) == b"\x07\x07\x07"
    tier.unpin(block)
    assert tier.bytes_free == tier.bytes_max


def test_the_second_of_two_writers_gives_its_pages_back() -> None:
    """Two engines compute the same block at once: one is kept."""
    tier = _tier(2)
    first, second = (tier.reserve(IDENTITY, b"x" * 16, b"", SIGNATURE.block_bytes) for _ in range(2))
    assert first is not None and second is not None
    assert tier.keep(first, b"", 0.0) and not tier.keep(second, b"", 0.0)
    assert len(tier) == 1 and tier.bytes_free == 2 * PAGE_BYTES


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60))
def test_no_page_belongs_to_two_blocks(steps: list[tuple[int, bool]]) -> None:
    """Whatever is kept and removed, each block has the bytes that were written into it, on pages that may lie apart."""
    tier = _tier(5)
    held: dict[int, HostBlock] = {}
    for number, put in steps:
        if put and number not in held:
            block = _put(tier, number)
            assert (block is None) == (len(held) == 5)
            if block is not None:
                held[number] = block
        elif not put and number in held:
            tier.remove(held.pop(number).key)
    for number, block in held.items():
        assert b"".join(block.views) == bytes([number]) * SIGNATURE.block_bytes
        assert checksums_of(block) == block.checksums
    slots = [slot for block in held.values() for slot in block.slots]
    assert len(slots) == len(set(slots)) == 2 * len(held)
