"""What waits for the shared index: coalescing, bounds, packing, and the breaker (KVC-2, PAINS M3 M5)."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.core.index_buffer import (
    AGE_S_MAX,
    NAME_CHARS_MAX,
    Breaker,
    BreakerState,
    IndexBatch,
    IndexBuffer,
    SpanAccess,
    SpanEntry,
    pack_dropped,
    pack_noted,
    plausible_time,
    unpack_entry,
)
from subjects.ids import ModelHash
from subjects.messages import KvTier, SlaClass

ONE = ModelHash("1" * 64)
TWO = ModelHash("2" * 64)


def span(number: int) -> bytes:
    """A span's hash."""
    return number.to_bytes(16, "big")


def access(at_unix_s: float = 100.0, **fields: object) -> SpanAccess:
    """An access at a time."""
    return SpanAccess(at_unix_s=at_unix_s, size_bytes=7, **fields)  # type: ignore[arg-type]


def unpacked(packed: bytes) -> list[tuple[bytes, float, SpanEntry | None]]:
    """What the server's script reads."""
    found, at = [], 0
    while at < len(packed):
        name, age_s, size = struct.unpack_from("<32sdH", packed, at)
        at += 42
        found.append((name, age_s, unpack_entry(packed[at : at + size])))
        at += size
    return found


def test_of_many_accesses_the_last_one_is_told_once() -> None:
    """A hot span costs one entry however often it is used (KVC-2)."""
    buffer = IndexBuffer(10)
    for second in range(100):
        buffer.note(ONE, span(1), access(second))
    assert buffer.take(10) == [IndexBatch(ONE, [(span(1), access(99))])]
    assert buffer.counts.coalesced == 99 and not buffer.incomplete and len(buffer) == 0


def test_a_full_buffer_loses_the_oldest_and_says_so() -> None:
    """Memory is bounded; what was used again last stays (PAINS M5)."""
    buffer = IndexBuffer(3)
    for number in (1, 2, 3):
        buffer.note(ONE, span(number), access())
    buffer.note(ONE, span(1), access(101))
    buffer.note(TWO, span(4), access())
    assert buffer.take(9) == [
        IndexBatch(ONE, [(span(3), access()), (span(1), access(101))]),
        IndexBatch(TWO, [(span(4), access())]),
    ]
    assert buffer.counts.overflowed == 1 and buffer.incomplete


def test_the_last_word_about_a_span_stands() -> None:
    """Dropped and used again is held; used and dropped is gone."""
    buffer = IndexBuffer(9)
    buffer.dropped(ONE, span(1))
    buffer.note(ONE, span(1), access())
    buffer.note(ONE, span(2), access())
    buffer.dropped(ONE, span(2))
    assert buffer.take(9) == [IndexBatch(ONE, [(span(1), access())], [span(2)])]


def test_a_batch_that_was_refused_comes_first_again_but_never_over_newer_news() -> None:
    """A retry keeps the order and loses nothing that fits."""
    buffer = IndexBuffer(3)
    buffer.note(ONE, span(1), access(1))
    buffer.note(ONE, span(2), access(1))
    taken = buffer.take(9)
    buffer.note(ONE, span(2), access(2))
    buffer.note(ONE, span(3), access(2))
    buffer.put_back(taken)
    assert buffer.take(9) == [IndexBatch(ONE, [(span(1), access(1)), (span(2), access(2)), (span(3), access(2))])]
    assert not buffer.incomplete


def test_a_batch_that_finds_no_room_any_more_is_counted_as_lost() -> None:
    """Putting back does not grow the buffer over its bound."""
    buffer = IndexBuffer(2)
    buffer.note(ONE, span(1), access())
    buffer.dropped(ONE, span(2))
    taken = buffer.take(9)
    buffer.note(ONE, span(3), access())
    buffer.put_back(taken)
    assert buffer.take(9) == [IndexBatch(ONE, [(span(3), access())], [span(2)])]
    assert buffer.counts.overflowed == 1 and buffer.incomplete


def test_nonsense_is_not_noted() -> None:
    """A span, model or time that is none reaches no server (PAINS M5)."""
    buffer = IndexBuffer(9)
    buffer.note(ONE, b"short", access())
    buffer.note(ModelHash("x"), span(1), access())
    buffer.note(ONE, span(1), access(math.nan))
    buffer.note(ONE, span(1), access(math.inf))
    buffer.dropped(ONE, b"")
    assert buffer.take(9) == [] and buffer.counts.ignored == 5


@given(
    st.lists(st.tuples(st.sampled_from([ONE, TWO]), st.integers(0, 8), st.booleans(), st.integers(1, 4))),
    st.integers(1, 6),
)
def test_whatever_happens_the_server_ends_with_the_last_word_unless_the_buffer_says_otherwise(
    steps: list[tuple[ModelHash, int, bool, int]], entries_max: int
) -> None:
    """A server that takes some batches and refuses others believes what is true, or the buffer is incomplete."""
    buffer = IndexBuffer(entries_max)
    truth: dict[tuple[ModelHash, int], bool] = {}
    believed: dict[tuple[ModelHash, int], bool] = {}

    def flush(size: int, taken: bool) -> None:
        batches = buffer.take(size)
        if not taken:
            buffer.put_back(batches)
            return
        for batch in batches:
            believed.update(
                dict.fromkeys(((batch.model_hash, int.from_bytes(name, "big")) for name, _ in batch.noted), True)
            )
            believed.update(
                dict.fromkeys(((batch.model_hash, int.from_bytes(name, "big")) for name in batch.dropped), False)
            )

    for number, (model, name, held, size) in enumerate(steps):
        if held:
            buffer.note(model, span(name), access(number))
        else:
            buffer.dropped(model, span(name))
        truth[model, name] = held
        assert len(buffer) <= entries_max
        flush(size, taken=number % 3 == 0)
    flush(entries_max, taken=True)
    assert buffer.incomplete or believed == truth


def test_ages_travel_not_times() -> None:
    """Two nodes whose clocks differ by an hour say the same of the same moment; the future is now."""
    assert pack_noted([(span(1), access(90.0))], 100.0) == pack_noted([(span(1), access(3690.0))], 3700.0)
    ages = [age for _, age, _ in unpacked(pack_noted([(span(n), access(at)) for n, at in enumerate((200, -1e300))], 100.0))]
    assert ages == [0.0, AGE_S_MAX]


def test_an_entry_says_tier_node_request_class_size_and_tenant_in_few_bytes() -> None:
    """Metadata is ids only, bounded in length, and survives the way there and back (KVC-2, SEC-1)."""
    one = access(99.5, tier=KvTier.DISK, request="gw-1-7", tenant="t" * 500, sla_class=SlaClass.GOLD)
    packed = pack_noted([(span(0xAB), one)], 100.0)
    name, age_s, entry = unpacked(packed)[0]
    assert (name, age_s) == (b"%032x" % 0xAB, 0.5)
    assert entry == SpanEntry(KvTier.DISK, "gw-1-7", SlaClass.GOLD, 7, "t" * NAME_CHARS_MAX)
    assert len(pack_noted([(span(1), access(request="gateway-0123456789-1234", tenant="business-7"))], 100.0)) < 128


def test_one_bad_entry_does_not_hold_up_the_rest() -> None:
    """Half a character pair in a tenant's name or an absurd size leaves out that entry alone."""
    bad = [access(tenant="\ud800"), SpanAccess(at_unix_s=1.0, size_bytes=1 << 70)]
    packed = pack_noted([(span(1), bad[0]), (span(2), access()), (span(3), bad[1])], 100.0)
    assert [name for name, _, _ in unpacked(packed)] == [b"%032x" % 2]


def test_dropped_spans_are_packed_as_hex() -> None:
    """As the members of the sorted set are."""
    assert pack_dropped([span(1), span(255)]) == b"%032x%032x" % (1, 255)


@pytest.mark.parametrize("value", [b"", b"\xc1", b"\x95", b"\xa3abc", b"\x95\xa4none\xa0\xa4gold\x01\xa0", b"\x00" * 99])
def test_bytes_that_are_no_entry_are_none(value: bytes) -> None:
    """Garbage in the server raises nothing."""
    assert unpack_entry(value) is None


@pytest.mark.parametrize(
    ("score", "is_time"),
    [
        (99.0, True),
        (130.0, True),
        (0.0, False),
        (-1.0, False),
        (math.inf, False),
        (math.nan, False),
        (1e18, False),
        (None, False),
    ],
)
def test_a_score_is_a_time_or_nothing(score: float | None, is_time: bool) -> None:
    """NaN, infinity, the future and the time before 1970 are skipped (PAINS M5)."""
    assert plausible_time(score, 100.0) is is_time


def test_the_breaker_opens_after_failures_in_a_row_and_closes_by_a_probe() -> None:
    """One success starts the count again; open, one caller at a time may try (PAINS M3)."""
    breaker = Breaker(failures_max=2, pause_s=1.0, pause_s_max=3.0)
    breaker.failed(0.0)
    breaker.succeeded()
    assert (breaker.failed(1.0), breaker.state) == (False, BreakerState.CLOSED)
    assert (breaker.failed(2.0), breaker.state) == (True, BreakerState.OPEN)
    assert not breaker.probe(2.9)
    assert breaker.probe(3.0) and breaker.state is BreakerState.HALF_OPEN
    assert not breaker.probe(3.0), "one at a time"
    breaker.probed(True, 3.1)
    assert breaker.closed and breaker.opened == 1


def test_failed_probes_make_the_pause_longer_up_to_its_bound() -> None:
    """The bound is how long it takes to notice that the server is back (PAINS M2)."""
    breaker = Breaker(failures_max=1, pause_s=1.0, pause_s_max=3.0)
    breaker.failed(0.0)
    now_s, pauses = 0.0, []
    for _ in range(4):
        began_s = now_s
        while not breaker.probe(now_s):
            now_s += 0.25
        pauses.append(now_s - began_s)
        breaker.probed(False, now_s)
    assert pauses == [1.0, 2.0, 3.0, 3.0]


def test_late_answers_of_old_calls_neither_open_nor_close_it() -> None:
    """What began before the failure says nothing of the server now."""
    breaker = Breaker(failures_max=1, pause_s=1.0)
    breaker.failed(0.0)
    breaker.succeeded()
    seen = [breaker.state]
    assert breaker.probe(1.0)
    breaker.failed(1.0)
    breaker.succeeded()
    assert [*seen, breaker.state] == [BreakerState.OPEN, BreakerState.HALF_OPEN]
    breaker.probed(True, 1.0)
    breaker.probed(False, 1.0)
    assert breaker.closed
