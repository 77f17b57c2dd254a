"""What a run of the gateway beside peers says of them."""

from __future__ import annotations

from ops.bench.ratios import Figures, SystemReport, ratios


def _report(*by_connections: tuple[float, float]) -> SystemReport:
    figures = [Figures(rps=rps, p50_ms=1.0, p99_ms=2.0, stream_chunks_per_s=chunks) for rps, chunks in by_connections]
    return SystemReport(by_connections=dict(zip(("16", "256"), figures, strict=False)))


def test_ours_is_held_against_the_best_peer_where_that_is_hardest() -> None:
    """The best peer may be another one at each load, the lowest ratio counts, and direct is nobody's peer."""
    reports = {
        "direct": _report((90_000.0, 900_000.0), (90_000.0, 900_000.0)),
        "ours": _report((1_000.0, 40_000.0), (2_000.0, 30_000.0)),
        "vllm-router": _report((2_000.0, 10_000.0), (1_000.0, 60_000.0)),
        "smg": _report((4_000.0, 20_000.0), (500.0, 10_000.0)),
        "litellm": _report((50.0, 300.0), (40.0, 300.0)),
    }
    assert ratios(reports) == {"rps_vs_best_peer": 0.25, "stream_chunks_vs_best_peer": 0.5, "rps_vs_litellm": 20.0}


def test_without_peers_there_are_no_ratios() -> None:
    """A peer that is listed with a reason is not taken for one that answers nothing."""
    reports = {"ours": _report((1_000.0, 40_000.0)), "smg": SystemReport(reason="not on PATH")}
    assert set(ratios(reports).values()) == {None}
