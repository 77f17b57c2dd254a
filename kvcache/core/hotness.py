"""How hot a span is (KVC-2).

==============  ===========================================  ==========================================
idle            3 accesses in 10 s while p95 was < 500 ms    all others
==============  ===========================================  ==========================================
under 60 s      hot: pinned while the share allows it        warm: kept, first to be demoted
60 to 120 s     warm                                         warm
from 120 s on   cold: compressed and demoted                 cold
==============  ===========================================  ==========================================

Test traffic makes nothing warmer: a span that only tests used is cold at once. A high class (gold) is warm whatever else
used the span, tests included. A hot span whose model becomes slow is warm at its next access: pinning it did not help.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import IntEnum


class Hotness(IntEnum):
    """In the order in which spans leave memory."""

    COLD = 0
    WARM = 1
    HOT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HotnessSettings:
    """The numbers of KVC-2, and bounds."""

    hot_accesses: int = 3
    hot_window_s: float = 10.0
    hot_p95_s: float = 0.5
    warm_window_s: float = 60.0
    """A hot span that is idle for that long is warm."""
    cold_idle_s: float = 120.0
    pinned_share_max: float = 0.25
    """Of the tier: hot spans beyond it are not pinned."""
    spans_max: int = 500_000
    """About 400 bytes each; the longest untouched ones are forgotten first, and are cold then."""
    models_max: int = 1000
    latencies: int = 256
    """Requests per model whose p95 counts."""


@dataclass(slots=True, eq=False)
class _Span:
    accesses: deque[float]
    """The last few, oldest first."""
    last_s: float
    real: bool = False
    """Used by other than test traffic."""
    heated: bool = False


@dataclass(slots=True)
class _Latencies:
    latest: deque[float] = field(default_factory=deque)
    ordered: list[float] = field(default_factory=list)

    def put(self, latency_s: float, kept: int) -> None:
        self.latest.append(latency_s)
        insort(self.ordered, latency_s)
        if len(self.latest) > kept:
            del self.ordered[bisect_left(self.ordered, self.latest.popleft())]

    @property
    def p95_s(self) -> float:
        return self.ordered[(len(self.ordered) * 95 - 1) // 100]


class HotnessTracker:
    """Accesses to the spans of one node. Latencies are of requests, in seconds, per model."""

    def __init__(self, bytes_max: int, settings: HotnessSettings | None = None) -> None:
        """``bytes_max``: of the tier in which hot spans are pinned."""
        self._settings = settings or HotnessSettings()
        self._pinned_bytes_max = bytes_max * self._settings.pinned_share_max
        self._spans: OrderedDict[bytes, _Span] = OrderedDict()
        """Not yet named by ``cooled``, the longest untouched first."""
        self._cooled: OrderedDict[bytes, _Span] = OrderedDict()
        self._pinned: OrderedDict[bytes, int] = OrderedDict()
        """Their sizes, the longest untouched first."""
        self._latencies: OrderedDict[str, _Latencies] = OrderedDict()
        self.pinned_bytes = 0
        """Of spans that are pinned, or were until a moment ago."""

    def __len__(self) -> int:
        return len(self._spans) + len(self._cooled)

    def accessed(
        self, span: bytes, model: str, size_bytes: int, now_s: float, *, high: bool = False, test: bool = False
    ) -> Hotness:
        """A request used the span. ``high``: of a high class (gold). ``test``: marked as test traffic."""
        settings = self._settings
        known = self._spans.pop(span, None) or self._cooled.pop(span, None)
        if known is None:
            known = _Span(deque(maxlen=settings.hot_accesses), now_s)
        self._spans[span] = known
        if not test or high:
            if now_s - known.last_s >= settings.warm_window_s:
                known.heated = False
            known.real = True
            known.last_s = max(known.last_s, now_s)
            known.accesses.append(now_s)
            often = len(known.accesses) == settings.hot_accesses and now_s - known.accesses[0] <= settings.hot_window_s
            fast = self.p95_s(model) < settings.hot_p95_s
            known.heated = fast and (often or known.heated)
            self._pin(span, size_bytes, now_s, heated=known.heated)
        elif not known.real:
            known.last_s = now_s
            self._spans.move_to_end(span, last=False)
        while len(self) > settings.spans_max:
            self._forget_oldest()
        return self._judge(known, now_s)

    def took(self, model: str, latency_s: float) -> None:
        """A request of the model ended after that long."""
        latencies = self._latencies.get(model)
        if latencies is None:
            latencies = self._latencies[model] = _Latencies()
            if len(self._latencies) > self._settings.models_max:
                self._latencies.popitem(last=False)
        latencies.put(latency_s, self._settings.latencies)
        self._latencies.move_to_end(model)

    def p95_s(self, model: str) -> float:
        """Of the model's last requests; infinite before the first."""
        latencies = self._latencies.get(model)
        return latencies.p95_s if latencies is not None else float("inf")

    def accessed_elsewhere(self, span: bytes, last_access_s: float) -> None:
        """Another node's access, from Redis: keeps a span warm, never makes it hot. Unknown spans are ignored."""
        known = self._spans.get(span) or self._cooled.get(span)
        if known is None or last_access_s <= known.last_s:
            return
        known.last_s = last_access_s
        known.real = True
        known.heated = False
        self._cooled.pop(span, None)
        self._spans[span] = known
        self._spans.move_to_end(span)

    def of(self, span: bytes, now_s: float) -> Hotness:
        """Unknown spans are cold."""
        known = self._spans.get(span) or self._cooled.get(span)
        return self._judge(known, now_s) if known is not None else Hotness.COLD

    def pinned(self, span: bytes, now_s: float) -> bool:
        """Hot, and within the share of the tier that may be pinned."""
        return span in self._pinned and self.of(span, now_s) is Hotness.HOT

    def cooled(self, now_s: float, spans_max: int = 1000) -> list[bytes]:
        """Spans that became cold since they were last named here, longest untouched first: to be compressed and demoted."""
        names: list[bytes] = []
        while self._spans and len(names) < spans_max:
            span, known = next(iter(self._spans.items()))
            if self._judge(known, now_s) is not Hotness.COLD:
                break
            del self._spans[span]
            self._cooled[span] = known
            self._unpin(span)
            names.append(span)
        return names

    def forget(self, span: bytes) -> None:
        """It has left all tiers of the node; unknown ones are ignored."""
        self._unpin(span)
        self._spans.pop(span, None)
        self._cooled.pop(span, None)

    def _judge(self, known: _Span, now_s: float) -> Hotness:
        idle_s = now_s - known.last_s
        if not known.real or idle_s >= self._settings.cold_idle_s:
            return Hotness.COLD
        return Hotness.HOT if known.heated and idle_s < self._settings.warm_window_s else Hotness.WARM

    def _pin(self, span: bytes, size_bytes: int, now_s: float, *, heated: bool) -> None:
        self._unpin(span)
        while self._pinned:
            first = next(iter(self._pinned))
            if self.of(first, now_s) is Hotness.HOT:
                break
            self._unpin(first)
        if heated and self.pinned_bytes + size_bytes <= self._pinned_bytes_max:
            self._pinned[span] = size_bytes
            self.pinned_bytes += size_bytes

    def _unpin(self, span: bytes) -> None:
        self.pinned_bytes -= self._pinned.pop(span, 0)

    def _forget_oldest(self) -> None:
        oldest = self._cooled if self._cooled else self._spans
        span, _ = oldest.popitem(last=False)
        self._unpin(span)
