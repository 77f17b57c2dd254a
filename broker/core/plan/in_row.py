"""Conditions that must hold in several readings in a row before anybody acts on them: three (SCH-7)."""

from __future__ import annotations

import math
from collections.abc import Hashable

from broker.core.plan import tunables as t


class InRow:
    """Says of each key when a condition held in so many readings in a row; a reading that comes too soon does not count."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, tuple[float, int]] = {}

    def read(self, now_s: float, key: Hashable, held: bool) -> bool:
        """Whether it is to be acted on now. Goes on saying so while the condition holds."""
        if not held:
            self._rows.pop(key, None)
            return False
        last_s, count = self._rows.get(key, (-math.inf, 0))
        if now_s - last_s >= t.READING_S * 0.95:  # A tick may come a little early.
            if not count and len(self._rows) >= t.KEPT_MAX:
                del self._rows[next(iter(self._rows))]
            count = min(count + 1, t.READINGS_IN_ROW)
            self._rows[key] = (now_s, count)
        return count >= t.READINGS_IN_ROW
