"""Signals over windows of readings: TWU per device, three readings in a row (SCH-6, SCH-7)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from broker.core.plan.signals import FAIRNESS_LEVEL, TokenWork, allowed_s, twu, twu_raw_s

READING_S = 0.2
"""Cadence of fairness readings."""
READINGS_IN_ROW = 3


class InRow:
    """Says of each key when a condition held in so many readings in a row; a reading that comes too soon does not count."""

    def __init__(self, readings: int = READINGS_IN_ROW, reading_s: float = READING_S, keys_max: int = 4096) -> None:
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


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a request stands at the end of a window: all tokens that its device has computed for it so far."""

    weight: float
    prompt_tokens: int
    output_tokens: int
    age_s: float
    """Since its arrival; at its end for one that finished in the window."""
    ttft_s: float
    tpot_s: float
    """Its targets."""


@dataclass(frozen=True, slots=True)
class TwuReading:
    """TWU of a device over a window, and the source's form in seconds."""

    twu: float
    raw_s: float
    tokens: float


class TwuMeter:
    """TWU of one device, window by window, from where its requests stand.

    What a request did in a window is its progress since the last one, so running requests count with their elapsed part and
    nothing counts twice. Remembers only requests that ran in the last window.
    """

    def __init__(self, baseline_tokens_per_s: float) -> None:
        self.baseline_tokens_per_s = baseline_tokens_per_s
        self._done: dict[Hashable, int] = {}

    def read(
        self, window_s: float, running: Mapping[Hashable, Progress], finished: Mapping[Hashable, Progress]
    ) -> TwuReading:
        """The window that ends now: those that run, and those that finished in it, by request."""
        parts = []
        tokens = 0.0
        done: dict[Hashable, int] = {}
        for group, kept in ((running, True), (finished, False)):
            for request, progress in group.items():
                total = progress.prompt_tokens + progress.output_tokens
                new = max(0, total - self._done.get(request, 0))
                if kept:
                    done[request] = total
                slo_s = allowed_s(progress.ttft_s, progress.tpot_s, progress.output_tokens)
                parts.append(TokenWork(progress.weight, float(new), progress.age_s, slo_s))
                tokens += new
        self._done = done
        return TwuReading(
            twu(parts, window_s, self.baseline_tokens_per_s), twu_raw_s(parts, window_s, self.baseline_tokens_per_s), tokens
        )
