"""Signals over windows of readings: three in a row (SCH-7)."""

from __future__ import annotations

import math
from collections.abc import Hashable

from broker.core.plan.tunables import FAIRNESS_LEVEL, KEPT_MAX, READING_S, READINGS_IN_ROW


class InRow:
    """Says of each key when a condition held in so many readings in a row; a reading that comes too soon does not count."""

    def __init__(self, readings: int = READINGS_IN_ROW, reading_s: float = READING_S, keys_max: int = KEPT_MAX) -> None:
        self._readings = readings
        self._reading_s = reading_s
        self._keys_max = keys_max
        self._rows: dict[Hashable, tuple[float, int]] = {}

    def read(self, now_s: float, key: Hashable, held: bool) -> bool:
        """Whether it is to be acted on now. Goes on saying so while the condition holds."""
        if not held:
            self._rows.pop(key, None)
            return False
        last_s, count = self._rows.get(key, (-math.inf, 0))
        if count and now_s - last_s < self._reading_s * 0.95:  # A tick may come a little early.
            return count >= self._readings
        if key not in self._rows and len(self._rows) >= self._keys_max:
            del self._rows[next(iter(self._rows))]
        self._rows[key] = (now_s, min(count + 1, self._readings))
        return count + 1 >= self._readings


class FairnessWatch:
    """Fairness readings per key (a model, or a class of one): acts after three in a row below the level."""

    def __init__(self, level: float = FAIRNESS_LEVEL) -> None:
        self.level = level
        """Configuration: chosen by simulation, since the source's 0.8 is out of reach for most."""
        self._below = InRow()

    def read(self, now_s: float, key: Hashable, index: float) -> bool:
        """Whether somebody has to yield for ``key`` now."""
        return self._below.read(now_s, key, index < self.level)
