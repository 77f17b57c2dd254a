"""One series of arriving work, and simple forecasts of it that are weighted by how well they do (SCH-5).

Work is counted in windows of one second. A window that closes moves five running means and the seasons. At fixed strides
each simple forecast is written down for each horizon, and compared with what came when the horizon has passed; its
discounted mean square error decides its weight: an inverse power, so that the best rules and ties are shared (the idea of
aggregating experts, Cesa-Bianchi and Lugosi 2006; discounted because traffic changes).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

from broker.core.plan import tunables as t
from broker.core.plan.seasons import WEEK_BINS, Seasons

WINDOW_S = int(t.LOOK_S)
_SHARES = tuple(1.0 - math.exp(-WINDOW_S / tau_s) for tau_s in t.SERIES_MEANS_S)
_TREND_S = t.SERIES_MEANS_S[3] - t.SERIES_MEANS_S[2]
"""A running mean lags by its time constant, so two of them give a slope over the difference."""
_PAST_BINS = 3600 // t.BIN_S
"""The longest running mean speaks of about the last hour."""


class Ring:
    """The last values in order, and the same ones sorted: an exact quantile is one look."""

    __slots__ = ("_kept", "_latest", "_ordered", "total")

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._latest: deque[float] = deque()
        self._ordered: list[float] = []
        self.total = 0.0

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, value: float) -> None:
        """One more; the oldest goes when it is full."""
        if len(self._latest) == self._kept:
            oldest = self._latest.popleft()
            del self._ordered[bisect_left(self._ordered, oldest)]
            self.total -= oldest
        self._latest.append(value)
        insort(self._ordered, value)
        self.total += value
        if self._ordered[-1] == 0.0:
            self.total = 0.0  # What rounding left over.

    def quantile(self, share: float) -> float:
        """The smallest value that at least ``share`` of the values do not exceed; 0 when empty."""
        if not self._ordered:
            return 0.0
        return self._ordered[max(0, math.ceil(share * len(self._ordered)) - 1)]

    def mean(self) -> float:
        """Their mean; 0 when empty."""
        return max(0.0, self.total) / len(self._ordered) if self._ordered else 0.0


@dataclass(slots=True)
class _Judged:
    """How the simple forecasts do at one horizon."""

    errors: list[float]
    """Discounted mean square error of each."""
    mixed: float = 0.0
    """That of the mixture."""
    level: float = 0.0
    """What came, over the same judgements."""
    count: int = 0
    pending: deque[tuple[int, float, list[float], float]] | None = None
    """Due window, work until then, each simple forecast, the mixture."""


class Series:
    """See the module. Windows are numbered from the clock's zero; ``bin_offset_s`` moves them to wall-clock time."""

    __slots__ = (
        "_bin",
        "_bin_windows",
        "_bin_work",
        "_judged",
        "_last",
        "_means",
        "_open_requests",
        "_open_work",
        "_requests",
        "_total",
        "_variance",
        "last_load",
        "seasons",
        "window",
        "windows",
    )

    def __init__(self, window: int) -> None:
        self.window = window
        """The open one."""
        self.windows = 0
        """Closed ones."""
        self.last_load = window
        self._open_work = 0.0
        self._open_requests = 0
        self._means = [0.0] * len(t.SERIES_MEANS_S)
        self._last = 0.0
        self._variance = 0.0
        self._requests = 0.0
        self._total = 0.0
        self.seasons = Seasons()
        self._bin: int | None = None
        self._bin_work = 0.0
        self._bin_windows = 0
        self._judged = [_Judged([0.0] * _EXPERTS, pending=deque()) for _ in t.HORIZONS_S]

    # -------------------------------------------------------------------------------------------------------- observing

    def add(self, work_s: float, requests: int) -> None:
        """Work that arrived in the open window."""
        self._open_work += work_s
        self._open_requests += requests
        if work_s > 0.0:
            self.last_load = self.window

    def settle(self, window: int, bin_offset_s: float) -> None:
        """Closes all windows before ``window``; those after the open one had no load."""
        behind = window - self.window
        if behind <= 0:
            return
        self._close(self._open_work, self._open_requests, bin_offset_s)
        self._open_work, self._open_requests = 0.0, 0
        behind -= 1
        if behind > t.ZERO_RUN_MAX:
            self._skip(behind, bin_offset_s)
        else:
            for _ in range(behind):
                self._close(0.0, 0, bin_offset_s)

    def restart(self, window: int) -> None:
        """A gap: what was counted in the open window is not the whole, and nothing is known until ``window``."""
        self.window = window
        self._open_work, self._open_requests = 0.0, 0
        self._bin = None
        for judged in self._judged:
            assert judged.pending is not None
            judged.pending.clear()

    def _close(self, work: float, requests: int, bin_offset_s: float) -> None:
        self.window += WINDOW_S
        self.windows += 1
        self._last = work
        first = 1.0 / self.windows
        means = self._means
        deviation = work - means[2]
        for place, share in enumerate(_SHARES):
            # Until a running mean is as old as its time constant it is the plain mean of what there is.
            means[place] += (share if share > first else first) * (work - means[place])
        self._variance += max(_SHARES[3], first) * (deviation * deviation - self._variance)
        self._requests += _SHARES[1] * (requests - self._requests)
        self._total += work
        self._count_season(work, bin_offset_s)
        for place, stride in enumerate(t.JUDGED_EVERY_S):
            if self.windows % stride == 0:
                self._judge(place, bin_offset_s)

    def _skip(self, count: int, bin_offset_s: float) -> None:
        """``count`` windows without load at once."""
        self.window += count
        self.windows += count
        for place, share in enumerate(_SHARES):
            self._means[place] *= (1.0 - share) ** count
        self._last = 0.0
        self._variance *= (1.0 - _SHARES[3]) ** count
        self._requests *= (1.0 - _SHARES[1]) ** count
        for judged in self._judged:
            assert judged.pending is not None
            judged.pending.clear()
        first = int(self.window - count + bin_offset_s) // t.BIN_S
        last = int(self.window + bin_offset_s) // t.BIN_S
        if self._bin is not None and self._bin_windows > 0:
            self._end_bin()
        for number in range(max(first + 1, last - _BINS_MAX), last):
            self.seasons.learn(number, 0.0)
        self._bin = None

    def _count_season(self, work: float, bin_offset_s: float) -> None:
        number = int(self.window - WINDOW_S + bin_offset_s) // t.BIN_S
        if number != self._bin:
            if self._bin is not None:
                self._end_bin()
            self._bin, self._bin_work, self._bin_windows = number, 0.0, 0
        self._bin_work += work
        self._bin_windows += 1

    def _end_bin(self) -> None:
        if self._bin is not None and 2 * self._bin_windows >= t.BIN_S:
            self.seasons.learn(self._bin, self._bin_work / self._bin_windows)

    # ------------------------------------------------------------------------------------------------------- forecasting

    def mix(self, horizon_s: float, begin_s: float, end_s: float, bin_offset_s: float) -> tuple[float, float]:
        """The expected mean rate between two moments ahead, and the error that it lately had at ``horizon_s``.

        A rate lower than that at which the error was seen has a smaller one in proportion.
        """
        judged = self._judged[_nearest(horizon_s)]
        mean = self._mixed(judged, self._experts(begin_s, end_s, bin_offset_s))
        error = math.sqrt(judged.mixed)
        return mean, error * mean / judged.level if mean < judged.level else error

    def usual_change(self, ahead_s: float, bin_offset_s: float) -> tuple[float, float] | None:
        """By how much the rate usually changes from now to ``ahead_s`` ahead at this time of day, and how sure that is: by
        how much days differ. None where fewer than two days were seen."""
        now_s = self.window + bin_offset_s
        return self.seasons.change(int(now_s) // t.BIN_S, int(now_s + ahead_s) // t.BIN_S)

    def surge(self) -> float | None:
        """The rate of the last seconds where it lies far above what noise explains, else None."""
        fast = self._means[0] if self._means[0] < self._means[1] else self._means[1]
        if self._requests * t.SERIES_MEANS_S[1] < t.SURGE_REQUESTS_MIN:
            return None
        # A running mean over tau seconds has the noise of 2 tau of them.
        noise = math.sqrt(self._variance / (2.0 * t.SERIES_MEANS_S[1]))
        return fast if fast - self._means[3] > t.SURGE_DEVIATIONS * noise else None

    def _experts(self, begin_s: float, end_s: float, bin_offset_s: float) -> list[float]:
        means = self._means
        middle_s = 0.5 * (begin_s + end_s)
        slope = (means[2] - means[3]) / _TREND_S
        # The shorter mean speaks of a time constant ago; from there the slope fades.
        ahead_s = t.SLOPE_S * (1.0 - math.exp(-(middle_s + t.SERIES_MEANS_S[2]) / t.SLOPE_S))
        trend = max(0.0, means[2] + slope * ahead_s)
        if end_s < t.SEASON_HORIZON_S_MIN or not self.seasons.bins:
            return [*means, trend, self._last, (means[0] + self._last) / 2, means[3]]
        base = means[4]
        now_s = self.window + bin_offset_s
        begin, end, now = int(now_s + begin_s) // t.BIN_S, int(now_s + end_s) // t.BIN_S, int(now_s) // t.BIN_S
        seasons, past = self.seasons, now - _PAST_BINS
        day, day_past = seasons.day_rate(begin, end), seasons.day_rate(past, now - 1)
        week, week_past = seasons.week_rate(begin, end), seasons.week_rate(past, now - 1)
        by_day = _scaled(base, day_past, day)
        return [
            *means,
            trend,
            by_day,
            base if day is None else t.DAY_LEANING * day + (1.0 - t.DAY_LEANING) * base,
            by_day if week is None else _scaled(base, week_past, week),
        ]

    @staticmethod
    def _mixed(judged: _Judged, experts: list[float]) -> float:
        if judged.count == 0:
            return experts[_UNJUDGED]
        best = min(judged.errors)
        floor = 1e-12 + 1e-6 * max(judged.errors)
        weight_sum = value = 0.0
        for error, expert in zip(judged.errors, experts, strict=True):
            weight = ((best + floor) / (error + floor)) ** t.JUDGE_POWER
            weight_sum += weight
            value += weight * expert
        return value / weight_sum

    def _judge(self, place: int, bin_offset_s: float) -> None:
        judged = self._judged[place]
        pending = judged.pending
        assert pending is not None
        horizon_s = t.HORIZONS_S[place]
        while pending and pending[0][0] <= self.window:
            due, total, experts, mixed = pending.popleft()
            if due != self.window:
                continue  # Not looked at in time: what came after it would count too.
            came = (self._total - total) / horizon_s
            judged.count += 1
            share = max(1.0 / t.JUDGEMENTS[place], 1.0 / judged.count)
            errors = judged.errors
            for number, expert in enumerate(experts):
                miss = expert - came
                errors[number] += share * (miss * miss - errors[number])
            judged.mixed += share * ((mixed - came) ** 2 - judged.mixed)
            judged.level += share * (came - judged.level)
        experts = self._experts(0.0, float(horizon_s), bin_offset_s)
        pending.append((self.window + horizon_s, self._total, experts, self._mixed(judged, experts)))


_EXPERTS = len(t.SERIES_MEANS_S) + 4
_UNJUDGED = t.SERIES_MEANS_S.index(60.0)
"""The mean of the last minute, while nothing is known of how the simple forecasts do."""
_BINS_MAX = WEEK_BINS


def _nearest(horizon_s: float) -> int:
    """The judged horizon nearest in ratio."""
    for place in range(len(t.HORIZONS_S) - 1):
        if horizon_s * horizon_s <= t.HORIZONS_S[place] * t.HORIZONS_S[place + 1]:
            return place
    return len(t.HORIZONS_S) - 1


def surge_share(horizon_s: float) -> float:
    """How far the mean to a horizon follows a surge: wholly for two minutes, then less, since most surges end soon."""
    return min(1.0, 120.0 / horizon_s) if horizon_s > 0.0 else 1.0


def _scaled(base: float, now: float | None, then: float | None) -> float:
    """``base`` moved as the season moves, at most fourfold either way: a quotient of two small rates says little."""
    if now is None or then is None or now <= 0.0:
        return base
    return base * min(4.0, max(0.25, then / now))
