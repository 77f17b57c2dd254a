"""How much room each model needs above what it asks for on average, learned from how its own load has come lately.

Many simple rules run in the shadow. Each follows the prefill work that arrives with a mean of its own speed, multiplies it,
and gives capacity back with a reluctance of its own. A small fluid model of the queue tells what would have become of the
requests if the pool had followed that rule, with capacity that comes only after a load: how many would have missed their
targets, and how much capacity it would have taken. The rule that was cheapest among those that missed little decides. So a
steady load gets little room, a bursty one much, and nobody has to say which is which.

All models at once, as arrays of models x rules. Times in seconds, work in seconds of a replica alone on its devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HeadroomSettings:
    """Which rules there are, and when one is good enough."""

    means_s: tuple[float, ...] = (1.5, 4.0, 12.0, 45.0)
    holds_s: tuple[float, ...] = (4.0, 15.0, 60.0)
    factors: tuple[float, ...] = (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
    missed_max: float = 0.005
    """Share of requests that the chosen rule may have missed."""
    memory_s: float = 600.0
    """How fast old evidence fades."""
    delay_s: float = 3.4
    """From asking for capacity to having it."""
    drain_s: float = 10.0
    """What waits asks for capacity to be gone within this time."""
    change_s: float = 8.0
    """What it costs to ask for more, as seconds of the capacity asked for."""
    step_s: float = 0.4
    """Of the shadow queues."""
    choose_s: float = 4.0
    settle_s: float = 20.0
    """What happens so soon after a model's first request says nothing about a rule."""
    evidence_requests: float = 40.0
    """Below so many requests the first rule stands."""
    first: tuple[float, float, float] = (4.0, 15.0, 1.5)
    """Mean, hold and factor of a model that nobody knows yet."""


class Headroom:
    """The shadow of all models. ``rows`` are added as models come; a row is told at every look what arrived."""

    def __init__(self, settings: HeadroomSettings | None = None) -> None:
        s = self.settings = settings or HeadroomSettings()
        grid = [(m, h, f) for m in s.means_s for h in s.holds_s for f in s.factors]
        self._mean = np.array([s.means_s.index(m) for m, _, _ in grid])
        self._hold_s = np.array([h for _, h, _ in grid])
        self._factor = np.array([f for _, _, f in grid])
        distance = [abs(m - s.first[0]) * 1e3 + abs(h - s.first[1]) + abs(f - s.first[2]) for m, h, f in grid]
        self._first = int(np.argmin(distance))
        self._taus = np.array(s.means_s)
        self._delay = max(1, round(s.delay_s / s.step_s))
        self.rows = 0
        self._step_at_s = -np.inf
        self._chosen_at_s = -np.inf
        rules = len(grid)
        self._ewma = np.zeros((0, len(s.means_s)))
        self._held = np.zeros((0, rules))
        self._queue = np.zeros((0, rules))
        self._ring = np.zeros((self._delay, 0, rules))
        self._ring_at = 0
        self._cost = np.zeros((0, rules))
        self._missed = np.zeros((0, rules))
        self._total = np.zeros((0, rules))
        self._weight = np.zeros(0)
        self._first_s = np.zeros(0)
        self._requests = np.zeros(0)
        self._work_new = np.zeros(0)
        self._requests_new = np.zeros(0)
        self.chosen = np.zeros(0, dtype=np.int64)

    def add_row(self) -> int:
        """A model that was not known before; returns its row."""

        def grown(array: Floats, axis: int = 0) -> Floats:
            shape = list(array.shape)
            shape[axis] = 1
            return np.concatenate([array, np.zeros(shape)], axis=axis)

        self._ewma = grown(self._ewma)
        self._held = grown(self._held)
        self._queue = grown(self._queue)
        self._ring = grown(self._ring, 1)
        self._cost = grown(self._cost)
        self._missed = grown(self._missed)
        self._total = grown(self._total)
        self._weight = grown(self._weight)
        self._first_s = np.append(self._first_s, np.inf)
        self._requests = grown(self._requests)
        self._work_new = grown(self._work_new)
        self._requests_new = grown(self._requests_new)
        self.chosen = np.append(self.chosen, self._first)
        self.rows += 1
        return self.rows - 1

    def forget_row(self, row: int) -> None:
        """The row may be used for another model."""
        for array in (self._ewma, self._held, self._queue, self._cost, self._missed, self._total):
            array[row] = 0.0
        self._ring[:, row] = 0.0
        for line in (self._weight, self._requests, self._work_new, self._requests_new):
            line[row] = 0.0
        self._first_s[row] = np.inf
        self.chosen[row] = self._first

    def arrived(self, row: int, prefill_s: float, requests: int) -> None:
        """What came since the last look."""
        self._work_new[row] += prefill_s
        self._requests_new[row] += requests

    def look(self, now_s: float, base: Floats, wait_s: Floats) -> Floats:
        """How fast each row should be able to prefill now. ``base`` is what it can anyway, with what it needs on average;
        ``wait_s`` is how long a prompt may wait (target less its own prefill)."""
        s = self.settings
        if now_s - self._step_at_s >= s.step_s - 1e-6:
            gone_s = min(now_s - self._step_at_s, 5.0)
            self._step_at_s = now_s
            if np.isfinite(gone_s) and gone_s > 0:
                self._step(now_s, gone_s, base, wait_s)
            self._work_new[:] = 0.0
            self._requests_new[:] = 0.0
        if now_s - self._chosen_at_s >= s.choose_s:
            self._chosen_at_s = now_s
            self._choose()
        rows = np.arange(self.rows)
        return np.asarray(self._held[rows, self.chosen], dtype=np.float64)

    def _step(self, now_s: float, gone_s: float, base: Floats, wait_s: Floats) -> None:
        s = self.settings
        work, requests = self._work_new, self._requests_new
        rate = work / gone_s
        self._ewma += (1 - np.exp(-gone_s / self._taus)) * (rate[:, None] - self._ewma)
        # A faster mean never lies below the slower ones: a lull of seconds is no reason to give up anything.
        means = np.maximum.accumulate(self._ewma[:, ::-1], axis=1)[:, ::-1]
        wanted = means[:, self._mean] * self._factor
        self._held = np.maximum(wanted, self._held * np.exp(-gone_s / self._hold_s))
        total = np.maximum(self._held, base[:, None])
        have = np.minimum(self._ring.min(axis=0), total)
        self._ring[self._ring_at] = total + self._queue / s.drain_s
        self._ring_at = (self._ring_at + 1) % self._delay
        speed = np.maximum(have, 1e-6)
        self._queue += work[:, None] - speed * gone_s
        np.maximum(self._queue, 0.0, out=self._queue)
        over = np.maximum(0.0, self._queue - speed * wait_s[:, None])
        self._queue -= over
        missed = np.minimum(1.0, over / np.maximum(work, 1e-9)[:, None]) * requests[:, None]
        # Nothing is held against a rule while even the means do not know the load yet.
        self._first_s = np.where(requests > 0, np.minimum(self._first_s, now_s), self._first_s)
        judged = now_s - self._first_s > s.settle_s
        missed *= judged[:, None]
        fade = np.exp(-gone_s / s.memory_s)
        self._missed = self._missed * fade + missed
        self._requests = self._requests * fade + requests * judged
        more = np.maximum(0.0, total - self._total)
        self._total = total
        self._cost = self._cost * fade + np.maximum(have, total) * gone_s + more * s.change_s
        self._weight = self._weight * fade + gone_s

    def _choose(self) -> None:
        s = self.settings
        share = self._missed / np.maximum(self._requests, 1.0)[:, None]
        cost = self._cost / np.maximum(self._weight, 1e-9)[:, None]
        # Rules that miss too much are worse than all that do not, by how much they miss.
        worth = np.where(share <= s.missed_max, cost, 1e6 * (1 + share))
        best = np.argmin(worth, axis=1)
        known = self._requests >= s.evidence_requests
        self.chosen = np.where(known, best, self._first)

    def mean(self, row: int) -> float:
        """The prefill work that has arrived per second, over the last quarter of a minute or, if that is more, minute."""
        return float(self._ewma[row, -2:].max())

    def rule(self, row: int) -> tuple[float, float, float, float]:
        """Mean, hold, factor and missed share of the rule that decides for a row."""
        e = int(self.chosen[row])
        share = float(self._missed[row, e] / max(1.0, self._requests[row]))
        return float(self._taus[self._mean[e]]), float(self._hold_s[e]), float(self._factor[e]), share
