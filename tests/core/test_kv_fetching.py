"""Fetch or compute again, and what a target of a migration asks for."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvcache.core.fetching import BYTES_PER_S_UNKNOWN, COMPUTE, Bandwidths, Choice, choose
from kvcache.core.migration import Transfer, batches, lacking

MIB = 1 << 20


def _choose(blocks: int, **changes: Any) -> Choice:
    facts: dict[str, Any] = {
        "block_bytes": MIB,
        "block_tokens": 32,
        "bytes_per_s": 100 * MIB,
        "latency_s": 0.01,
        "prefill_tokens_per_s": 1000.0,
        "deadline_s": 10.0,
    }
    return choose(blocks, **{**facts, **changes})


def test_the_faster_way_is_taken() -> None:
    """100 blocks: 1.01 s to fetch, 3.2 s to compute; with a prefill of 3,300 tokens a second 0.97 s (KVC-6)."""
    assert _choose(100).blocks == 100
    assert round(_choose(100).saves_s, 6) == round(3.2 - 1.01, 6)
    assert _choose(100, prefill_tokens_per_s=3300.0) == COMPUTE


def test_latency_decides_for_short_prefixes() -> None:
    """One block that computes in 5 ms is not asked for at a node that is 10 ms away."""
    assert _choose(1, prefill_tokens_per_s=6400.0) == COMPUTE
    assert _choose(1, prefill_tokens_per_s=6400.0, latency_s=0.001, bytes_per_s=1000 * MIB).blocks == 1


def test_what_does_not_arrive_by_the_deadline_is_not_fetched() -> None:
    """0.51 s at 100 blocks a second are 50 blocks; no time, no blocks (KVC-4)."""
    assert _choose(100, deadline_s=0.51).blocks == 50
    assert _choose(100, deadline_s=0.015) == COMPUTE
    assert _choose(100, deadline_s=0.0) == COMPUTE
    assert _choose(0) == COMPUTE


def test_without_a_prefill_speed_all_that_comes_in_time_is_fetched() -> None:
    """An engine that has computed nothing yet does not know its speed."""
    assert _choose(100, prefill_tokens_per_s=0.0, deadline_s=0.51).blocks == 50


def test_bandwidth_follows_the_last_transfers() -> None:
    """Measured bytes over measured seconds; old ones fade, tiny ones do not count, failures halve."""
    speeds = Bandwidths()
    assert speeds.bytes_per_s("w") == BYTES_PER_S_UNKNOWN
    speeds.measured("w", 100 * MIB, 1.0)
    assert speeds.bytes_per_s("w") == 100 * MIB
    speeds.measured("w", 100, 1.0)
    assert speeds.bytes_per_s("w") == 100 * MIB
    for _ in range(50):
        speeds.measured("w", 10 * MIB, 1.0)
    assert 10 * MIB <= speeds.bytes_per_s("w") < 13 * MIB
    before = speeds.bytes_per_s("w")
    speeds.failed("w")
    assert speeds.bytes_per_s("w") == before / 2
    speeds.failed("new")
    assert speeds.bytes_per_s("new") == BYTES_PER_S_UNKNOWN / 2
    assert speeds.bytes_per_s("other") == BYTES_PER_S_UNKNOWN


def test_a_slow_path_is_tried_again_some_day() -> None:
    """A path that was slow once is passed over for a while, not for ever: only a transfer can tell that it is fast again."""
    speeds = Bandwidths()
    speeds.measured("w", MIB, 1.0)
    times = 0
    while not _choose(100, bytes_per_s=speeds.bytes_per_s("w"), deadline_s=100.0).blocks:
        speeds.passed_over("w")
        times += 1
    assert 20 < times < 200
    for _ in range(1000):
        speeds.passed_over("w")
    assert speeds.bytes_per_s("w") < 1.1 * BYTES_PER_S_UNKNOWN


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 10), st.integers(1, 5), st.integers(1, 8))
def test_a_target_asks_for_what_it_lacks_once_and_in_order(
    here: list[bool], block: int, blocks_at_once: int, blocks_max: int
) -> None:
    """Every place that is not here is in one batch, in order; no batch is beyond its bounds (KVC-4)."""
    places = lacking(here, len(here))
    asked = batches(places, block, block * blocks_at_once, blocks_max)
    assert [place for batch in asked for place in batch] == [at for at, held in enumerate(here) if not held]
    assert all(0 < len(batch) <= min(blocks_at_once, blocks_max) for batch in asked)


def test_a_block_larger_than_a_batch_goes_alone() -> None:
    """There is progress whatever the settings."""
    assert batches([3, 4], 10, 1, 5) == [(3,), (4,)]
    assert lacking([False, True, False, False], 2) == [0, 2]


def _transfer(count: int, end_s: float = 10.0) -> Transfer:
    return Transfer(waiting=[(at,) for at in range(count)], in_flight_max=2, end_s=end_s)


def test_a_bounded_number_of_batches_is_under_way() -> None:
    """Two at once: the third is asked for when the first has come."""
    transfer = _transfer(3)
    assert [transfer.next(0.0), transfer.next(0.0), transfer.next(0.0)] == [(0,), (1,), None]
    transfer.came(1)
    assert [transfer.next(0.0), transfer.next(0.0)] == [(2,), None]
    transfer.came(1)
    transfer.came(1)
    assert (transfer.done, transfer.arrived, transfer.failure) == (True, 3, "")


def test_after_a_short_answer_or_the_deadline_nothing_more_is_asked() -> None:
    """What came stays; the rest is computed."""
    short = _transfer(3)
    short.next(0.0)
    short.came(0)
    assert short.failure and short.next(0.0) is None and short.done
    late = _transfer(3, end_s=1.0)
    late.next(0.5)
    assert (late.next(1.0), late.failure, late.done) == (None, "deadline", False)
    late.came(1)
    assert (late.done, late.arrived) == (True, 1)


def test_a_batch_for_which_there_is_no_room_waits_for_those_under_way() -> None:
    """With room for half a batch the other half is asked for later; with none and nothing under way it ends."""
    transfer = Transfer(waiting=[(0, 1), (2, 3)], in_flight_max=4, end_s=10.0)
    transfer.next(0.0)
    transfer.next(0.0)
    transfer.shrink(1)
    assert transfer.in_flight == [(0, 1), (2,)] and transfer.next(0.0) is None
    transfer.came(2)
    assert transfer.next(0.0) == (3,)
    none = Transfer(waiting=[(0, 1)], in_flight_max=4, end_s=10.0)
    none.next(0.0)
    none.shrink(0)
    assert none.failure and none.done
