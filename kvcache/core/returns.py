"""When units of KV are asked for again: what a place in a tier is worth, by age and kind, learned from what happened.

A life table. Each visit (one request's use of a chain) is followed through bins of age until its *anchor*, one unit deep in
the chain, is used again. Per bin the table counts unit-seconds and returns; their ratio is the hazard: returns per second of
keeping a unit that has waited so long. Kinds of visits share the shape of the hazard and differ by a factor, returns over
those expected by the shape (proportional hazards, Cox 1972), so that a kind needs few observations.

The worth of keeping a unit is the most returns per second that any time of keeping it gives from now on (the index of
Gittins 1979 for one arm that may be left at any time; hit density in Beckmann, Chen and Cidon, NSDI 2018, is the same
quantity without the choice of when to leave). Where hazard falls with age this orders like LRU.
"""

from __future__ import annotations

import math
from bisect import bisect_right

_EDGE_S = 30.0
_RATIO = 1.5
EDGES_S = tuple(_EDGE_S * _RATIO**power for power in range(-6, 13))
"""Upper edges of the bins of age, from 2.6 s to 65 minutes, 30 s among them; the last bin has no end."""
BINS = len(EDGES_S) + 1
LOWER_S = (0.0, *EDGES_S)
_WIDTH_S = (*(edge - lower for edge, lower in zip(EDGES_S, LOWER_S, strict=False)), LOWER_S[-1])
_PRIOR_HAZARDS = tuple(0.1 / (lower + 1.0) for lower in LOWER_S)
"""Before anything was seen: falls with age, which is LRU. The level does not matter, only ratios do."""
_PRIOR_UNIT_S = tuple(300.0 * (lower + 1.0) for lower in LOWER_S)
"""How much that weighs against what was seen: 30 returns per bin, so that single ones turn nothing round."""

Kind = tuple[int, int]
"""What distinguishes visits; see ``eviction``."""


def bin_of(age_s: float) -> int:
    """Of ages; the lower edge belongs to the bin."""
    return bisect_right(EDGES_S, age_s)


class _Table:
    """Per bin: returns and unit-seconds of what left the bin; units in it now, and the sum of the times they were used."""

    __slots__ = ("present", "present_times", "returns", "unit_s")

    def __init__(self) -> None:
        self.returns = [0.0] * BINS
        self.unit_s = [0.0] * BINS
        self.present = [0.0] * BINS
        self.present_times = [0.0] * BINS

    def exposure(self, number: int, now_s: float) -> float:
        """Unit-seconds in the bin so far, those of units that are still in it too: else only who returned would count."""
        return max(0.0, self.unit_s[number] + self.present[number] * (now_s - LOWER_S[number]) - self.present_times[number])


class Returns:
    """The life table of all visits together, and of each kind."""

    def __init__(self, *, prior_returns: float, half_life_s: float) -> None:
        """Of a kind, ``prior_returns`` expected returns weigh as much as its own. Counts halve in ``half_life_s``."""
        self._prior_returns = prior_returns
        self._half_life_s = half_life_s
        self._all = _Table()
        self._kinds: dict[Kind, _Table] = {}
        self._judged_s = -math.inf
        self._hazards: list[float] = list(_PRIOR_HAZARDS)
        self._worth: list[float] = _best_rates(self._hazards)
        self._factors: dict[Kind, float] = {}

    def came(self, kind: Kind, number: int, units: int, used_s: float) -> None:
        """Units last used at ``used_s`` are in the bin from now on."""
        for table in self._tables(kind):
            table.present[number] += units
            table.present_times[number] += units * used_s

    def went(self, kind: Kind, number: int, units: int, used_s: float, age_s: float, *, returned: bool) -> None:
        """They left the bin at that age: were used again, grew older, or are followed no longer."""
        for table in self._tables(kind):
            table.present[number] -= units
            table.present_times[number] -= units * used_s
            table.unit_s[number] += units * (age_s - LOWER_S[number])
            if returned:
                table.returns[number] += units

    def judge(self, now_s: float) -> None:
        """Reads the tables: what ``worth`` says from now on."""
        if self._judged_s > -math.inf:
            share = math.exp2(-(now_s - self._judged_s) / self._half_life_s)
            for table in (self._all, *self._kinds.values()):
                table.returns = [count * share for count in table.returns]
                table.unit_s = [count * share for count in table.unit_s]
        self._judged_s = now_s
        everyone = self._all
        self._hazards = [
            (everyone.returns[number] + _PRIOR_HAZARDS[number] * _PRIOR_UNIT_S[number])
            / (everyone.exposure(number, now_s) + _PRIOR_UNIT_S[number])
            for number in range(BINS)
        ]
        self._worth = _best_rates(self._hazards)
        for kind, table in self._kinds.items():
            expected = sum(self._hazards[number] * table.exposure(number, now_s) for number in range(BINS))
            self._factors[kind] = (sum(table.returns) + self._prior_returns) / (expected + self._prior_returns)

    def worth(self, kind: Kind, number: int) -> float:
        """Returns per second of keeping a unit of that kind and bin."""
        return self._factors.get(kind, 1.0) * self._worth[number]

    def _tables(self, kind: Kind) -> tuple[_Table, _Table]:
        table = self._kinds.get(kind)
        if table is None:
            table = self._kinds[kind] = _Table()
        return self._all, table


def _best_rates(hazards: list[float]) -> list[float]:
    """Per bin the largest ratio, over all bins at whose end one may stop, of returns to time in the tier."""
    rates = []
    for first in range(BINS):
        left, returns, kept_s, best = 1.0, 0.0, 0.0, 0.0
        for number in range(first, BINS):
            returning = left * -math.expm1(-hazards[number] * _WIDTH_S[number])
            returns += returning
            kept_s += returning / hazards[number]
            left -= returning
            best = max(best, returns / kept_s)
        rates.append(best)
    return rates
