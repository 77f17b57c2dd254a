"""Hotness of spans and the request graph (SPEC KVC-2, KVC-3)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.core.chains import ChainSettings, RequestGraph
from kvcache.core.hotness import Hotness, HotnessSettings, HotnessTracker

A, B, C = b"a", b"b", b"c"


def tracker(latency_s: float = 0.1, **rules: float) -> HotnessTracker:
    """One with a tier of 1,000 bytes, whose model takes that long."""
    made = HotnessTracker(1000, HotnessSettings(**rules))  # type: ignore[arg-type]
    for _ in range(20):
        made.took("m", latency_s)
    return made


def test_three_accesses_in_ten_seconds_of_a_fast_model_are_hot_and_pinned() -> None:
    """KVC-2: the third access makes it hot, not the second."""
    hotness = tracker()
    assert [hotness.accessed(A, "m", 10, at) for at in (0.0, 4.0, 10.0)] == [Hotness.WARM, Hotness.WARM, Hotness.HOT]
    assert hotness.pinned(A, 10.0)


def test_three_accesses_in_more_than_ten_seconds_are_warm() -> None:
    """KVC-2: the window is of the last three accesses."""
    hotness = tracker()
    assert [hotness.accessed(A, "m", 10, at) for at in (0.0, 5.0, 10.1, 14.9)] == [
        Hotness.WARM,
        Hotness.WARM,
        Hotness.WARM,
        Hotness.HOT,
    ]


@pytest.mark.parametrize(("latency_s", "expected"), [(0.499, Hotness.HOT), (0.5, Hotness.WARM)])
def test_a_slow_model_has_no_hot_spans(latency_s: float, expected: Hotness) -> None:
    """KVC-2: p95 of its requests must be under 500 ms."""
    hotness = tracker(latency_s)
    assert [hotness.accessed(A, "m", 10, 1.0) for _ in range(3)][-1] is expected
    assert hotness.pinned(A, 1.0) is (expected is Hotness.HOT)


def test_a_model_of_which_no_request_ended_has_no_hot_spans() -> None:
    """KVC-2: an unknown p95 pins nothing."""
    hotness = HotnessTracker(1000)
    assert [hotness.accessed(A, "m", 10, 1.0) for _ in range(3)][-1] is Hotness.WARM


def test_one_slow_request_in_twenty_is_within_the_p95_and_two_are_not() -> None:
    """KVC-2: p95 is a quantile, by the nearest rank."""
    hotness = HotnessTracker(1000)
    for latency_s in [0.1] * 19 + [9.0]:
        hotness.took("m", latency_s)
    assert hotness.p95_s("m") == 0.1
    hotness.took("m", 9.0)
    assert hotness.p95_s("m") == 9.0


def test_latencies_of_long_ago_are_forgotten() -> None:
    """KVC-2: the p95 is of the last requests only."""
    hotness = tracker(latency_s=9.0, latencies=8)
    for _ in range(8):
        hotness.took("m", 0.2)
    assert hotness.p95_s("m") == 0.2


def test_hot_decays_to_warm_and_then_to_cold() -> None:
    """KVC-2: at 60 and 120 s of idleness."""
    hotness = tracker()
    for _ in range(3):
        hotness.accessed(A, "m", 10, 0.0)
    assert [hotness.of(A, at) for at in (59.9, 60.0, 119.9, 120.0)] == [
        Hotness.HOT,
        Hotness.WARM,
        Hotness.WARM,
        Hotness.COLD,
    ]
    assert not hotness.pinned(A, 60.0)


def test_a_span_that_was_hot_a_minute_ago_must_become_hot_anew() -> None:
    """KVC-2: one access after the decay makes it warm."""
    hotness = tracker()
    for _ in range(3):
        hotness.accessed(A, "m", 10, 0.0)
    assert hotness.accessed(A, "m", 10, 61.0) is Hotness.WARM


def test_a_hot_span_of_a_model_that_became_slow_is_warm_at_its_next_access() -> None:
    """KVC-2: pinning is for spans that answer fast."""
    hotness = tracker()
    for _ in range(3):
        hotness.accessed(A, "m", 10, 0.0)
    for _ in range(20):
        hotness.took("m", 3.0)
    assert hotness.accessed(A, "m", 10, 1.0) is Hotness.WARM
    assert not hotness.pinned(A, 1.0)


def test_test_traffic_is_cold_whatever_it_does() -> None:
    """KVC-2: many test accesses warm nothing, and such spans are named for demotion at once."""
    hotness = tracker()
    hotness.accessed(B, "m", 10, 0.0)
    assert {hotness.accessed(A, "m", 10, 1.0, test=True) for _ in range(5)} == {Hotness.COLD}
    assert hotness.cooled(1.0) == [A]


def test_test_traffic_neither_warms_nor_cools_what_others_use() -> None:
    """KVC-2: a span that a tenant uses keeps its own times."""
    hotness = tracker()
    hotness.accessed(A, "m", 10, 0.0)
    assert hotness.accessed(A, "m", 10, 100.0, test=True) is Hotness.WARM
    assert hotness.of(A, 120.0) is Hotness.COLD


def test_a_high_class_is_warm_even_in_test_traffic() -> None:
    """KVC-2: warm by class."""
    assert tracker().accessed(A, "m", 10, 0.0, high=True, test=True) is Hotness.WARM


def test_pinned_spans_take_no_more_than_their_share() -> None:
    """KVC-2: pinning is bounded; a span that is idle gives its place up."""
    hotness = tracker(pinned_share_max=0.25)
    for span in (A, B, C):
        for _ in range(3):
            hotness.accessed(span, "m", 100, 0.0)
    assert [hotness.pinned(span, 0.0) for span in (A, B, C)] == [True, True, False]
    assert hotness.of(C, 0.0) is Hotness.HOT
    for _ in range(3):
        hotness.accessed(C, "m", 100, 70.0)
    assert [hotness.pinned(span, 70.0) for span in (A, B, C)] == [False, False, True]
    assert hotness.pinned_bytes == 100


def test_spans_that_cool_are_named_once_and_in_the_order_of_their_last_access() -> None:
    """KVC-2: cold spans are demoted; the next access makes them warm, and they may cool again."""
    hotness = tracker()
    hotness.accessed(A, "m", 10, 0.0)
    hotness.accessed(B, "m", 10, 1.0)
    hotness.accessed(A, "m", 10, 2.0)
    hotness.accessed(C, "m", 10, 50.0)
    assert hotness.cooled(120.0) == []
    assert hotness.cooled(123.0) == [B, A]
    assert hotness.cooled(123.0) == []
    assert hotness.accessed(A, "m", 10, 124.0) is Hotness.WARM
    assert hotness.cooled(300.0) == [C, A]


def test_accesses_on_other_nodes_keep_a_span_warm_but_not_hot() -> None:
    """KVC-2: the score in Redis counts when it is later."""
    hotness = tracker()
    for _ in range(3):
        hotness.accessed(A, "m", 10, 0.0)
    hotness.accessed_elsewhere(A, 100.0)
    hotness.accessed_elsewhere(A, 50.0)
    hotness.accessed_elsewhere(B, 100.0)
    assert [hotness.of(A, at) for at in (101.0, 219.0, 220.0)] == [Hotness.WARM, Hotness.WARM, Hotness.COLD]
    assert hotness.of(B, 101.0) is Hotness.COLD


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 100), st.booleans(), st.integers(1, 400)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_hotness_is_bounded_whatever_comes(accesses: list[tuple[int, float, bool, int]]) -> None:
    """KVC-2, M5: spans, models and pinned bytes stay within their bounds, and forgetting all leaves nothing."""
    hotness = tracker(spans_max=4, models_max=2)
    now_s = 0.0
    for number, after_s, test, size_bytes in accesses:
        now_s += after_s / 10
        hotness.took(f"model {number}", 0.1)
        hotness.accessed(bytes([number]), "m", size_bytes, now_s, test=test)
        hotness.cooled(now_s, 1)
        assert len(hotness) <= 4
        assert 0 <= hotness.pinned_bytes <= 250
    for number in range(10):
        hotness.forget(bytes([number]))
    assert (len(hotness), hotness.pinned_bytes) == (0, 0)


def test_a_running_chain_needs_what_its_requests_used() -> None:
    """KVC-3: while a request of it runs, and for a while after the last one ended."""
    graph = RequestGraph(ChainSettings(linger_s=60.0))
    graph.began("c", "r1", 0.0)
    graph.used("c", [A, B], 1.0)
    assert [graph.needs(span, 1000.0) for span in (A, B, C)] == [True, True, False]
    graph.ended("c", "r1", 1000.0)
    assert [graph.needs(A, at) for at in (1059.9, 1060.0)] == [True, False]


def test_the_next_request_of_a_chain_keeps_what_the_first_one_used() -> None:
    """KVC-3: the chain counts, not the request."""
    graph = RequestGraph()
    graph.began("c", "r1", 0.0)
    graph.used("c", [A], 0.0)
    graph.ended("c", "r1", 10.0)
    graph.began("c", "r2", 60.0)
    assert graph.needs(A, 500.0)


def test_a_request_whose_end_is_never_told_does_not_hold_its_spans_for_ever() -> None:
    """KVC-3, K6: a lost end costs an hour at most, and the chain is forgotten then."""
    graph = RequestGraph(ChainSettings(linger_s=60.0, request_s_max=3600.0))
    graph.began("c", "r1", 0.0)
    graph.used("c", [A], 0.0)
    assert [graph.needs(A, at) for at in (3599.0, 3600.0)] == [True, False]
    graph.began("d", "r2", 4000.0)
    assert len(graph) == 1


def test_two_chains_may_need_one_span() -> None:
    """KVC-3: it is needed until the last of them is over."""
    graph = RequestGraph(ChainSettings(linger_s=10.0))
    for chain_id, at in (("c", 0.0), ("d", 5.0)):
        graph.used(chain_id, [A], at)
    assert [graph.needs(A, at) for at in (9.0, 14.0, 15.0)] == [True, True, False]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.sampled_from("bue"), st.floats(0, 40)), max_size=80))
@settings(max_examples=60, deadline=None)
def test_the_request_graph_is_bounded_whatever_comes(events: list[tuple[int, int, str, float]]) -> None:
    """KVC-3, M5: chains and the spans that they protect stay within their bounds."""
    rules = ChainSettings(chains_max=3, spans_per_chain_max=2, spans_max=5, requests_per_chain_max=2)
    graph = RequestGraph(rules)
    now_s = 0.0
    for chain, span, event, after_s in events:
        now_s += after_s
        if event == "b":
            graph.began(f"c{chain}", f"r{span}", now_s)
        elif event == "u":
            graph.used(f"c{chain}", [bytes([span]), bytes([span + 1])], now_s)
        else:
            graph.ended(f"c{chain}", f"r{span}", now_s)
        assert len(graph) <= 3
        assert sum(graph.needs(bytes([one]), now_s) for one in range(11)) <= 5
