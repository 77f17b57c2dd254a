"""What a day and a week look like for one series: the usual rate in each piece of five minutes (SCH-5)."""

from __future__ import annotations

import math
from array import array

from broker.core.plan.tunables import BIN_S, DAY_SHARE, WEEK_SHARE, ZERO_RUN_MAX

DAY_BINS = 86_400 // BIN_S
WEEK_BINS = 7 * DAY_BINS
_UNKNOWN = -math.inf


class _Table:
    """Running means of one cycle; bins that were never seen are unknown."""

    def __init__(self, bins: int, share: float) -> None:
        self._share = share
        self._rates = array("f", [_UNKNOWN]) * bins

    def learn(self, bin_number: int, rate: float) -> None:
        place = bin_number % len(self._rates)
        old = self._rates[place]
        self._rates[place] = rate if old < 0 else old + self._share * (rate - old)

    def own(self, bin_number: int) -> float | None:
        """The bin alone."""
        own = self._rates[bin_number % len(self._rates)]
        return own if own >= 0 else None

    def rate(self, bin_number: int) -> float | None:
        """The bin with half the weight and its neighbours with a quarter each, since one bin of one day is noisy."""
        bins = len(self._rates)
        own = self._rates[bin_number % bins]
        if own < 0:
            return None
        before, after = self._rates[(bin_number - 1) % bins], self._rates[(bin_number + 1) % bins]
        return 0.5 * own + 0.25 * (own if before < 0 else before) + 0.25 * (own if after < 0 else after)

    def mean(self, first: int, last: int) -> float | None:
        """Of the rates of some bins; None where one is unknown."""
        total = 0.0
        for number in range(first, last + 1):
            rate = self.rate(number)
            if rate is None:
                return None
            total += rate
        return total / (last + 1 - first)


class Seasons:
    """Rates by time of day, and from the second week on by time of week. Numbers of bins count from the Unix epoch."""

    __slots__ = ("_day", "_day_miss", "_known", "_week", "bins")

    def __init__(self) -> None:
        self._day: _Table | None = None
        self._day_miss: _Table | None = None
        """By how much a day differs from the ones before, from the second day on."""
        self._week: _Table | None = None
        self._known: dict[tuple[bool, int, int], float | None] = {}
        """Answers since the last bin."""
        self.bins = 0
        """Learned so far."""

    def learn(self, bin_number: int, rate: float) -> None:
        """A bin is over that was heard for most of its time."""
        self.bins += 1
        self._known.clear()
        self._day = self._day or _Table(DAY_BINS, DAY_SHARE)
        before = self._day.own(bin_number)
        if before is not None:
            self._day_miss = self._day_miss or _Table(DAY_BINS, DAY_SHARE)
            self._day_miss.learn(bin_number, abs(rate - before))
        self._day.learn(bin_number, rate)
        if self.bins > DAY_BINS:
            self._week = self._week or _Table(WEEK_BINS, WEEK_SHARE)
            self._week.learn(bin_number, rate)

    def change(self, now: int, then: int) -> tuple[float, float] | None:
        """By how much the rate usually changes between two bins, and by how much days differ there; None where fewer than
        two days were seen. Bins stand for themselves here: their neighbours' load would blur the moment."""
        if self._day is None or self._day_miss is None:
            return None
        before, after, miss = self._day.own(now), self._day.own(then), self._day_miss.own(then)
        if before is None or after is None or miss is None:
            return None
        return after - before, max(self._day_miss.own(now) or 0.0, miss)

    def mean_rate(self, first: int, last: int, *, week: bool = False) -> float | None:
        """The usual mean rate at this time of day, or of the week, over bins ``first`` to ``last``; None where no earlier
        one was seen."""
        table = self._week if week else self._day
        if table is None:
            return None
        asked = (week, first, last)
        if asked not in self._known:
            if len(self._known) >= ZERO_RUN_MAX:
                self._known.clear()
            self._known[asked] = table.mean(first, last)
        return self._known[asked]
