"""How much room each model needs above what it asks for on average, learned from how its own load has come lately.

Many simple rules run in the shadow. Each follows the prefill work that arrives with a mean of its own speed and multiplies
it; once a model is active at all it asks at least for a part of the level that its bursts usually have; and it gives
capacity back only after a while of its own. A small fluid model of the queue tells what would have become of the requests if
the pool had followed that rule, with capacity that comes only after a load: how many would have missed their targets, and
how much capacity it would have taken. The rule that was cheapest among those that missed little decides. So a steady load
gets little room, a bursty one much, and nobody has to say which is which.

All models at once, as arrays of models x rules. Times in seconds, work in seconds of a replica alone on its devices.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt

from broker.core.plan import tunables as t

Floats = npt.NDArray[np.float64]


class Headroom:
    """The shadow of all models. ``rows`` are added as models come; a row is told at every look what arrived."""

    def __init__(self, *, learns: bool = True) -> None:
        """``learns``: False leaves only rules that give no room at all."""
        first = (t.FAST_S, t.RULE_FACTORS[1], t.RULE_LEVELS[1], t.RULE_HOLDS_S[1])
        grid = list(product(t.RULE_MEANS_S, t.RULE_FACTORS, t.RULE_LEVELS, t.RULE_HOLDS_S))
        if not learns:
            first = (t.FAST_S, 1.0, 0.0, t.RULE_HOLDS_S[1])
            grid = [(mean, *first[1:]) for mean in t.RULE_MEANS_S]
        self._mean = np.array([t.RULE_MEANS_S.index(mean) for mean, *_ in grid])
        _, self._factor, self._level, self._hold_s = np.array(grid).T
        self._first = grid.index(first)
        self._taus = np.array(t.RULE_MEANS_S)
        self._delay = max(1, round(t.RULE_DELAY_S / t.RULE_STEP_S))
        self.rows = 0
        self._step_at_s = self._chosen_at_s = -np.inf
        rules = len(grid)
        self._ewma, self._level_sums = np.zeros((0, len(t.RULE_MEANS_S))), np.zeros((0, 2))
        self._held, self._held_for_s, self._queue, self._total, self._cost, self._missed = np.zeros((6, 0, rules))
        self._fast, self._slow, self._weight, self._requests, self._work_new, self._requests_new = np.zeros((6, 0))
        self._ring = np.zeros((self._delay, 0, rules))
        self._ring_at = 0
        self._first_s = np.zeros(0)
        self.chosen = np.zeros(0, dtype=np.int64)

    _TABLES = ("_ewma", "_level_sums", "_held", "_held_for_s", "_queue", "_total", "_cost", "_missed")
    _COLUMNS = ("_fast", "_slow", "_weight", "_requests", "_work_new", "_requests_new")

    def add_row(self) -> int:
        """A model that was not known before; returns its row."""
        for name in (*self._TABLES, *self._COLUMNS):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros((1, *array.shape[1:]))]))
        self._ring = np.concatenate([self._ring, np.zeros((self._delay, 1, self._ring.shape[2]))], axis=1)
        self._first_s = np.append(self._first_s, np.inf)
        self.chosen = np.append(self.chosen, self._first)
        self.rows += 1
        return self.rows - 1

    def forget_row(self, row: int) -> None:
        """The row may be used for another model."""
        for name in (*self._TABLES, *self._COLUMNS):
            getattr(self, name)[row] = 0.0
        self._ring[:, row] = 0.0
        self._first_s[row] = np.inf
        self.chosen[row] = self._first

    def arrived(self, row: int, prefill_s: float, requests: int) -> None:
        """What came since the last look."""
        self._work_new[row] += prefill_s
        self._requests_new[row] += requests

    def look(self, now_s: float, base: Floats, wait_s: Floats) -> Floats:
        """How fast each row should be able to prefill now. ``base`` is what it can anyway, with what it needs on average and
        what it may borrow; ``wait_s`` is how long a prompt may wait (target less its own prefill)."""
        if now_s - self._step_at_s >= t.RULE_STEP_S - 1e-6:
            gone_s = min(now_s - self._step_at_s, 5.0)
            if np.isfinite(self._step_at_s):
                self._step(now_s, gone_s, base, wait_s)
            self._step_at_s = now_s
            self._work_new[:] = 0.0
            self._requests_new[:] = 0.0
        if now_s - self._chosen_at_s >= t.RULE_CHOOSE_S:
            self._chosen_at_s = now_s
            self._choose()
        return np.asarray(self._held[np.arange(self.rows), self.chosen], dtype=np.float64)

    def _step(self, now_s: float, gone_s: float, base: Floats, wait_s: Floats) -> None:
        work, requests = self._work_new, self._requests_new
        rate = work / gone_s
        self._ewma += (1 - np.exp(-gone_s / self._taus)) * (rate[:, None] - self._ewma)
        self._fast += (1 - np.exp(-gone_s / t.FAST_S)) * (rate - self._fast)
        self._slow += (1 - np.exp(-gone_s / 45.0)) * (rate - self._slow)
        # The mean rate as the work meets it: most work comes while much comes.
        self._level_sums *= np.exp(-gone_s / t.LEVEL_S)
        self._level_sums[:, 0] += work * self._fast
        self._level_sums[:, 1] += work
        level = self._levels()
        active = self._fast > t.RULE_ACTIVE_SHARE * level
        wanted = np.maximum(self._ewma[:, self._mean] * self._factor, (level * active)[:, None] * self._level)
        self._held_for_s += gone_s
        anew = (wanted >= self._held) | (self._held_for_s > self._hold_s)
        self._held = np.where(anew, wanted, self._held)
        self._held_for_s[anew] = 0.0
        total = np.maximum(self._held, base[:, None])
        have = np.minimum(self._ring.min(axis=0), total)
        self._ring[self._ring_at] = total + self._queue / t.RULE_DRAIN_S
        self._ring_at = (self._ring_at + 1) % self._delay
        speed = np.maximum(have, np.maximum(base, 1e-6)[:, None])
        self._queue += work[:, None] - speed * gone_s
        np.maximum(self._queue, 0.0, out=self._queue)
        over = np.maximum(0.0, self._queue - speed * wait_s[:, None])
        self._queue -= over
        missed = np.minimum(1.0, over / np.maximum(work, 1e-9)[:, None]) * requests[:, None]
        # Nothing is held against a rule while even the means do not know the load yet.
        self._first_s = np.where(requests > 0, np.minimum(self._first_s, now_s), self._first_s)
        judged = now_s - self._first_s > t.RULE_SETTLE_S
        missed *= judged[:, None]
        fade = np.exp(-gone_s / t.RULE_MEMORY_S)
        self._missed = self._missed * fade + missed
        self._requests = self._requests * fade + requests * judged
        more = np.maximum(0.0, total - self._total)
        self._total = total
        self._cost = self._cost * fade + np.maximum(have, total) * gone_s + more * t.RULE_CHANGE_S
        self._weight = self._weight * fade + gone_s

    def _choose(self) -> None:
        share = self._missed / np.maximum(self._requests, 1.0)[:, None]
        cost = self._cost / np.maximum(self._weight, 1e-9)[:, None]
        scale = np.maximum(self._levels(), 0.3)[:, None]
        worth = cost + scale * (
            t.RULE_MISSED_PRICE * share + t.RULE_EXCESS_PRICE * np.maximum(0.0, share - t.RULE_MISSED_MAX)
        )
        best = np.argmin(worth, axis=1)
        known = self._requests >= t.RULE_REQUESTS
        self.chosen = np.where(known, best, self._first)

    def _levels(self) -> Floats:
        return np.asarray(self._level_sums[:, 0] / np.maximum(self._level_sums[:, 1], 1e-9))

    def means(self) -> list[float]:
        """The prefill work that has arrived per second, by row: over some ten seconds, or over a minute if that is more."""
        found: list[float] = np.maximum(self._ewma[:, -1], self._slow).tolist()
        return found

    def fasts(self) -> list[float]:
        """The prefill work that arrives per second just now, by row."""
        found: list[float] = self._fast.tolist()
        return found

    def level(self, row: int) -> float:
        """The rate at which prefill work usually comes while it comes."""
        return float(self._level_sums[row, 0] / max(self._level_sums[row, 1], 1e-9))
