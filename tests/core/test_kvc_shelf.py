"""What the store knows in memory, without files: order of use, room, shares, the write budget."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.core.identity import PAGE_BYTES, KvIdentity
from kvcache.core.shelf import DAY_S, Block, Rules, Shelf, WriteBudget, pages_of
from tests.core.kv_store_world import NOW_S, identity, name

WHO = identity()


def add(shelf: Shelf[str], index: int, now_s: float, pages: int = 1, whose: KvIdentity = WHO) -> Block[str]:
    return shelf.add(whose, name(index), name(index - 1) if index else b"", "place", 0, pages * PAGE_BYTES, b"", now_s)


def order(shelf: Shelf[str]) -> list[bytes]:
    return [block.hash for block in shelf]


def test_pages_of_a_payload() -> None:
    """A last page counts whole."""
    assert [pages_of(size) for size in (1, PAGE_BYTES, PAGE_BYTES + 1, 737_280)] == [1, 1, 2, 12]


def test_of_blocks_used_together_the_end_of_the_chain_goes_first() -> None:
    """What is left of a chain is always a prefix."""
    shelf: Shelf[str] = Shelf(Rules())
    blocks = [add(shelf, index, 0.0) for index in range(4)]
    shelf.use(blocks, 100.0)
    assert order(shelf) == [name(index) for index in (3, 2, 1, 0)]
    assert shelf.victims(2 * PAGE_BYTES, 131.0) == [blocks[3], blocks[2]]
    assert shelf.victims(PAGE_BYTES, 129.9) == []


def test_a_use_never_makes_a_block_older() -> None:
    """A clock that goes back, or a report that comes late, makes nobody idle."""
    shelf: Shelf[str] = Shelf(Rules(idle_s_max=10.0))
    block = add(shelf, 0, 100.0)
    shelf.use([block], 50.0)
    assert shelf.idle(110.0, 5) == [] and shelf.idle(110.1, 5) == [block]


def test_what_left_is_not_used_again() -> None:
    """A use of a block that another call removed changes nothing."""
    shelf: Shelf[str] = Shelf(Rules())
    block = add(shelf, 0, 0.0)
    assert shelf.remove(block) and not shelf.remove(block)
    shelf.use([block], 5.0)
    assert (len(shelf), shelf.stored_bytes, list(shelf.owners())) == (0, 0, [])


def test_a_hash_is_in_memory_once() -> None:
    """A block's parent is the very object that the parent has as its hash."""
    shelf: Shelf[str] = Shelf(Rules())
    first, second = add(shelf, 0, 0.0), add(shelf, 1, 0.0)
    assert second.parent is first.hash


def test_memory_per_block_is_what_the_docs_say() -> None:
    """A block of 12 pages costs at most 0.5 KiB of memory, below 0.1 % of its own size."""
    count = 4000
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        shelf: Shelf[int] = Shelf(Rules())
        parent = b""
        for index in range(count):
            parent = shelf.add(
                WHO, name(index), parent, 1, index * 12, 737_280, bytes([index % 251]) * 96, NOW_S + index
            ).hash
        used = (tracemalloc.get_traced_memory()[0] - before) / count
    finally:
        tracemalloc.stop()
    assert used <= 0.5 * 1024


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 15), st.integers(1, 5)),
            st.tuples(st.just("use"), st.integers(0, 15), st.integers(0, 3)),
            st.tuples(st.just("remove"), st.integers(0, 15), st.just(0)),
            st.tuples(st.just("wait"), st.integers(1, 40), st.just(0)),
        ),
        max_size=40,
    ),
    wanted=st.integers(0, 30),
    ratio=st.floats(0.0, 1.0),
)
@settings(max_examples=150, deadline=None)
def test_the_shelf_does_what_a_plain_list_does(steps: list[tuple[str, int, int]], wanted: int, ratio: float) -> None:
    """Order, bytes, victims, idle ones and shares are those of a list that is sorted by use."""
    shelf: Shelf[str] = Shelf(Rules(hot_s=30.0, idle_s_max=60.0))
    plain: list[tuple[int, int, float]] = []  # index, pages, last use
    owners = (identity(), identity(tenant="other"), identity("model-b"))
    now_s = 0.0
    for what, index, number in steps:
        block = shelf.find(owners[index % 3], name(index))
        assert (block is not None) == any(one[0] == index for one in plain)
        if what == "wait":
            now_s += index
        elif what == "add" and block is None:
            add(shelf, index, now_s, number, owners[index % 3])
            plain.append((index, number, now_s))
        elif what == "use" and block is not None:
            shelf.use([block], now_s)
            moved = next(one for one in plain if one[0] == index)
            plain.remove(moved)
            plain.append((index, moved[1], now_s))
        elif what == "remove" and block is not None:
            shelf.remove(block)
            plain = [one for one in plain if one[0] != index]
    assert order(shelf) == [name(index) for index, _, _ in plain]
    assert shelf.stored_bytes == PAGE_BYTES * sum(pages for _, pages, _ in plain)

    def first(found: list[tuple[int, int, float]], pages_min: float) -> list[bytes]:
        names, pages = [], 0
        for index, more, _ in found:
            if pages >= pages_min:
                break
            names.append(name(index))
            pages += more
        return names

    cold = [one for one in plain if now_s - one[2] >= 30.0]
    assert [block.hash for block in shelf.victims(wanted * PAGE_BYTES, now_s)] == first(cold, wanted)
    assert [block.hash for block in shelf.idle(now_s, 4)] == [name(one[0]) for one in plain if now_s - one[2] > 60.0][:4]
    mine = [one for one in plain if one[0] % 3 != 2]
    share = ratio * PAGE_BYTES * sum(pages for _, pages, _ in mine) / PAGE_BYTES
    assert [block.hash for block in shelf.share("model-a", ratio)] == first(mine, share)


def test_a_budget_fills_in_a_day() -> None:
    """Half a day gives half of it; it never holds more than a day's share; no limit is no limit."""
    budget = WriteBudget.full(1000, 0.0)
    assert budget.take(1000, 0.0) and not budget.take(1, 0.0)
    assert not budget.take(501, DAY_S / 2) and budget.take(500, DAY_S / 2)
    assert not budget.take(1001, 9 * DAY_S) and budget.take(1000, 9 * DAY_S)
    budget.give_back(300)
    assert budget.left == 300
    endless = WriteBudget.full(None, 0.0)
    assert endless.take(10**18, 0.0) and endless.bytes_per_day_max is None


@given(spends=st.lists(st.tuples(st.floats(0.0, 20_000.0), st.integers(1, 900)), max_size=30), start_s=st.floats(0.0, 2e9))
@settings(max_examples=100, deadline=None)
def test_no_more_than_a_share_and_what_came_in_is_ever_written(spends: list[tuple[float, int]], start_s: float) -> None:
    """Over any time: at most a day's share at its beginning, and a day's share per day."""
    budget = WriteBudget.full(1000, start_s)
    now_s = start_s
    written = 0
    for wait_s, size in spends:
        now_s += wait_s
        if budget.take(size, now_s):
            written += size
        assert written <= 1000 + (now_s - start_s) * 1000 / DAY_S + 1e-3


def test_time_that_goes_back_fills_nothing() -> None:
    """Setting the clock back fills nothing and stops nothing: the budget fills from that time on."""
    budget = WriteBudget.full(1000, 1000.0)
    assert budget.take(1000, 1000.0)
    budget.refill(0.0)
    assert budget.left == 0.0
    budget.refill(DAY_S / 10)
    assert budget.left == pytest.approx(100.0)
