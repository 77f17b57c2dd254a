"""What a run against peers says: figures of each system, and how ours stands to the best of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """At one number of connections, each the median of the rounds; counts are sums."""

    rps: float
    p50_ms: float
    p99_ms: float
    stream_chunks_per_s: float
    stream_p50_ms: float = 0.0
    stream_p99_ms: float = 0.0
    errors: int = 0
    cut: int = 0
    """Answers that were not waited for any longer; the percentiles take their time so far."""
    cpu_ms_per_request: dict[str, float] = {}
    cpu_us_per_chunk: dict[str, float] = {}
    """CPU time of the system's own processes, by part; of direct, the fake engine's."""
    bus_messages_per_request: float = 0.0
    bus_messages_per_stream: float = 0.0
    """In and out, by the bus's own counters; what the pool says to itself meanwhile is in it."""


class SystemReport(msgspec.Struct, frozen=True, kw_only=True):
    """One system. The first figures are those at the first number of connections; ``reason``: why there are none."""

    reason: str = ""
    rps: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    stream_chunks_per_s: float | None = None
    rss_mb: float | None = None
    """The most that all its processes together held after a turn."""
    rss_mb_by_part: dict[str, float] = {}
    added_p50_ms: float | None = None
    idle_mb_per_1000_streams: float | None = None
    """Growth of all parts; of ours, the scripted engine's in the replica too, of the peers not the fake engine's."""
    idle_mb_by_part: dict[str, float] = {}
    idle_reason: str = ""
    by_connections: dict[str, Figures] = {}


def ratios(reports: Mapping[str, SystemReport]) -> dict[str, float | None]:
    """Ours to the best peer and to LiteLLM, at the number of connections where the ratio is the lowest.

    None where there is nobody to be compared with.
    """
    peers = tuple(name for name in reports if name not in ("direct", "ours"))
    return {
        "rps_vs_best_peer": _lowest(reports, peers, lambda figures: figures.rps),
        "stream_chunks_vs_best_peer": _lowest(reports, peers, lambda figures: figures.stream_chunks_per_s),
        "rps_vs_litellm": _lowest(reports, ("litellm",), lambda figures: figures.rps),
    }


def _lowest(reports: Mapping[str, SystemReport], peers: tuple[str, ...], figure: Callable[[Figures], float]) -> float | None:
    found: list[float] = []
    for connections, ours in reports["ours"].by_connections.items():
        of_peers = [reports[name].by_connections for name in peers if name in reports]
        best = max((figure(others[connections]) for others in of_peers if connections in others), default=0.0)
        if best > 0:
            found.append(figure(ours) / best)
    return round(min(found), 4) if found else None
