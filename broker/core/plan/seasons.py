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
        if self._day is None:
            self._day = _Table(DAY_BINS, DAY_SHARE)
        before = self._day.own(bin_number)
        if before is not None:
            if self._day_miss is None:
                self._day_miss = _Table(DAY_BINS, DAY_SHARE)
            self._day_miss.learn(bin_number, abs(rate - before))
        self._day.learn(bin_number, rate)
        if self._week is None and self.bins > DAY_BINS:
            self._week = _Table(WEEK_BINS, WEEK_SHARE)
        if self._week is not None:
            self._week.learn(bin_number, rate)

    def day_rate(self, first: int, last: int) -> float | None:
        """The usual mean rate at this time of day, over bins ``first`` to ``last``; None where no earlier day was seen."""
        return self._over(False, first, last)

    def change(self, now: int, then: int) -> tuple[float, float] | None:
        """By how much the rate usually changes between two bins, and by how much days differ there; None where fewer than
        two days were seen. Bins stand for themselves here: their neighbours' load would blur the moment."""
        if self._day is None or self._day_miss is None:
            return None
        rates = (self._day.own(now), self._day.own(then))
        misses = (self._day_miss.own(now), self._day_miss.own(then))
        if rates[0] is None or rates[1] is None or misses[1] is None:
            return None
        return rates[1] - rates[0], max(misses[0] or 0.0, misses[1])

    def week_rate(self, first: int, last: int) -> float | None:
        """The same at this time of the week; None where no earlier week was seen."""
        return self._over(True, first, last)

    def _over(self, week: bool, first: int, last: int) -> float | None:
        table = self._week if week else self._day
        if table is None:
            return None
        asked = (week, first, last)
        if asked in self._known:
            return self._known[asked]
        if len(self._known) >= ZERO_RUN_MAX:
            self._known.clear()
        total: float | None = 0.0
        for number in range(first, last + 1):
            rate = table.rate(number)
            if rate is None or total is None:
                total = None
                break
            total += rate
        answer = self._known[asked] = None if total is None else total / (last + 1 - first)
        return answer
