"""How hot a span is (KVC-2)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Hotness(IntEnum):
    """In the order in which spans leave memory."""

    COLD = 0
    WARM = 1
    HOT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HotnessSettings:
    """The numbers of KVC-2."""

    hot_accesses: int = 3
    hot_window_s: float = 10.0
    hot_p95_s: float = 0.5
    warm_window_s: float = 60.0
    cold_idle_s: float = 120.0
    pinned_share_max: float = 0.25
    """Of the tier: pinned spans beyond it are treated as warm."""
    spans_max: int = 500_000
    """The longest untouched ones are forgotten first."""


class HotnessTracker:
    """Accesses to the spans of one node. Latencies are of requests, in seconds, per model."""

    def __init__(self, bytes_max: int, settings: HotnessSettings | None = None) -> None:
        """``bytes_max``: of the tier in which hot spans are pinned."""
        raise NotImplementedError

    def accessed(
        self, span: bytes, model: str, size_bytes: int, now_s: float, *, high: bool = False, test: bool = False
    ) -> Hotness:
        """A request used the span. ``high``: of a high class (gold). ``test``: marked as test traffic."""
        raise NotImplementedError

    def took(self, model: str, latency_s: float, now_s: float) -> None:
        """A request of the model ended after that long."""
        raise NotImplementedError

    def accessed_elsewhere(self, span: bytes, last_access_s: float) -> None:
        """Another node's access, from Redis: keeps a span warm, never makes it hot."""
        raise NotImplementedError

    def of(self, span: bytes, now_s: float) -> Hotness:
        """Unknown spans are cold."""
        raise NotImplementedError

    def pinned(self, span: bytes, now_s: float) -> bool:
        """Hot, and within the share of the tier that may be pinned."""
        raise NotImplementedError

    def cooled(self, now_s: float, spans_max: int = 1000) -> list[bytes]:
        """Spans that became cold since they were last named here, longest untouched first: to be compressed and demoted."""
        raise NotImplementedError

    def forget(self, span: bytes) -> None:
        """It has left all tiers of the node; unknown ones are ignored."""
        raise NotImplementedError
