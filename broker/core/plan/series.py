"""One series of arriving work, and simple forecasts of it that are weighted by how well they do (SCH-5).

Work is counted in windows of one second. A window that closes moves five running means and the seasons. At fixed strides
each simple forecast is written down for each horizon, and compared with what came when the horizon has passed; its
discounted mean square error decides its weight: an inverse power, so that the best rules and ties are shared (the idea of
aggregating experts, Cesa-Bianchi and Lugosi 2006; discounted because traffic changes).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from broker.core.plan import tunables as t
from broker.core.plan.seasons import WEEK_BINS, Seasons

WINDOW_S = int(t.LOOK_S)
_SHARES = tuple(1.0 - math.exp(-WINDOW_S / tau_s) for tau_s in t.SERIES_MEANS_S)
_TREND_S = t.SERIES_MEANS_S[3] - t.SERIES_MEANS_S[2]
"""A running mean lags by its time constant, so two of them give a slope over the difference."""
_PAST_BINS = 3600 // t.BIN_S
"""The longest running mean speaks of about the last hour."""


@dataclass(slots=True)
class _Judged:
    """How the simple forecasts do at one horizon."""

    errors: list[float] = field(default_factory=lambda: [0.0] * (len(t.SERIES_MEANS_S) + 4))
    """Discounted mean square error of each."""
    mixed: float = 0.0
    """That of the mixture."""
    level: float = 0.0
    """What came, over the same judgements."""
    count: int = 0
    pending: deque[tuple[int, float, list[float], float]] = field(default_factory=deque)
    """Due window, work until then, each simple forecast, the mixture."""


@dataclass(slots=True, eq=False)
class Series:
    """See the module. Windows are numbered from the clock's zero; ``bin_offset_s`` moves them to wall-clock time."""

    window: int
    """The open one."""
    windows: int = 0
    """Closed ones."""
    last_load: int = 0
    """The window that had any last."""
    seasons: Seasons = field(default_factory=Seasons)
    _open_work: float = 0.0
    _open_requests: int = 0
    _means: list[float] = field(default_factory=lambda: [0.0] * len(t.SERIES_MEANS_S))
    _last: float = 0.0
    _variance: float = 0.0
    _requests: float = 0.0
    _total: float = 0.0
    _bin: int | None = None
    _bin_work: float = 0.0
    _bin_windows: int = 0
    _judged: list[_Judged] = field(default_factory=lambda: [_Judged() for _ in t.HORIZONS_S])

    # -------------------------------------------------------------------------------------------------------- observing

    def add(self, work_s: float, requests: int) -> None:
        """Work that arrived in the open window."""
        self._open_work += work_s
        self._open_requests += requests
        if work_s > 0.0:
            self.last_load = self.window

    def settle(self, window: int, bin_offset_s: float) -> None:
        """Closes all windows before ``window``; those after the open one had no load."""
        while self.window < window:
            self._close(self._open_work, self._open_requests, bin_offset_s)
            self._open_work, self._open_requests = 0.0, 0
            if window - self.window > t.ZERO_RUN_MAX:
                self._skip(window - self.window, bin_offset_s)

    def restart(self, window: int) -> None:
        """A gap: what was counted in the open window is not the whole, and nothing is known until ``window``."""
        self.window = window
        self._open_work, self._open_requests = 0.0, 0
        self._bin = None
        for judged in self._judged:
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
            judged.pending.clear()
        first, last = (int(window + bin_offset_s) // t.BIN_S for window in (self.window - count, self.window))
        self._end_bin()
        for number in range(max(first + 1, last - WEEK_BINS), last):
            self.seasons.learn(number, 0.0)
        self._bin = None

    def _count_season(self, work: float, bin_offset_s: float) -> None:
        number = int(self.window - WINDOW_S + bin_offset_s) // t.BIN_S
        if number != self._bin:
            self._end_bin()
            self._bin, self._bin_work, self._bin_windows = number, 0.0, 0
        self._bin_work += work
        self._bin_windows += 1

    def _end_bin(self) -> None:
        if self._bin is not None and 2 * self._bin_windows >= t.BIN_S:
            self.seasons.learn(self._bin, self._bin_work / self._bin_windows)

    # ------------------------------------------------------------------------------------------------------- forecasting

    def mix(self, begin_s: float, end_s: float, bin_offset_s: float) -> tuple[float, float]:
        """The expected mean rate between two moments ahead, and the error that it lately had at about the second.

        A rate lower than that at which the error was seen has a smaller one in proportion.
        """
        judged = self._judged[_nearest(end_s)]
        mean = self._mixed(judged, self._experts(begin_s, end_s, bin_offset_s))
        error = math.sqrt(judged.mixed)
        return mean, error * mean / judged.level if mean < judged.level else error

    def usual_change(self, ahead_s: float, bin_offset_s: float) -> tuple[float, float] | None:
        """As :meth:`Seasons.change`, from now to ``ahead_s`` ahead."""
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
        rate, past = self.seasons.mean_rate, now - _PAST_BINS
        day, week = rate(begin, end), rate(begin, end, week=True)
        by_day = _scaled(base, rate(past, now - 1), day)
        return [
            *means,
            trend,
            by_day,
            base if day is None else t.DAY_LEANING * day + (1.0 - t.DAY_LEANING) * base,
            by_day if week is None else _scaled(base, rate(past, now - 1, week=True), week),
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
        horizon_s = t.HORIZONS_S[place]
        while pending and pending[0][0] <= self.window:
            due, total, experts, mixed = pending.popleft()
            if due != self.window:
                continue  # Not looked at in time: what came after it would count too.
            came = (self._total - total) / horizon_s
            judged.count += 1
            share = max(1.0 / t.JUDGEMENTS[place], 1.0 / judged.count)
            for number, expert in enumerate(experts):
                miss = expert - came
                judged.errors[number] += share * (miss * miss - judged.errors[number])
            judged.mixed += share * ((mixed - came) ** 2 - judged.mixed)
            judged.level += share * (came - judged.level)
        experts = self._experts(0.0, float(horizon_s), bin_offset_s)
        pending.append((self.window + horizon_s, self._total, experts, self._mixed(judged, experts)))


_UNJUDGED = t.SERIES_MEANS_S.index(60.0)
"""The mean of the last minute, while nothing is known of how the simple forecasts do."""


def _nearest(horizon_s: float) -> int:
    """The judged horizon nearest in ratio."""
    bounds = (one * next for one, next in pairwise(t.HORIZONS_S))
    return sum(horizon_s * horizon_s > bound for bound in bounds)


def surge_share(horizon_s: float) -> float:
    """How far the mean to a horizon follows a surge: wholly for two minutes, then less, since most surges end soon."""
    return min(1.0, 120.0 / horizon_s) if horizon_s > 0.0 else 1.0


def _scaled(base: float, now: float | None, then: float | None) -> float:
    """``base`` moved as the season moves, at most fourfold either way: a quotient of two small rates says little."""
    if now is None or then is None or now <= 0.0:
        return base
    return base * min(4.0, max(0.25, then / now))
