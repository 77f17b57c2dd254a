"""What each model will ask of the pool soon, in capacity units: GPU-seconds of work that arrive per second (SCH-5).

The caller prices each arrival (``observe(now_s, key, work_s)``) and tells at each look that it has heard everybody
(``heard(now_s)``): a key that was not named in between had no load. A silence of more than ``gap_s`` between two looks is a
gap: nothing is learned from it, neither zero load nor the lump that was counted meanwhile.

A forecast mixes simple ones (means over the last seconds to half an hour, a trend, the same time of earlier days and weeks),
each weighted by how well it has lately done at that horizon for that key; ``series`` has the arithmetic. All is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from broker.core.plan import tunables as t
from broker.core.plan.policy import ExpectedLoad
from broker.core.plan.series import WINDOW_S, Series, surge_share
from profiles.costs import LENGTH_CLASSES
from subjects.ids import DeploymentKey

Key = tuple[DeploymentKey, int]
"""A model and a length class (0 short, 1 medium, 2 long), or ``ALL_CLASSES``."""
ALL_CLASSES = len(LENGTH_CLASSES)
"""All length classes of a model together; to be read only."""


class Forecaster:
    """Forecasts of all models. One thread; times are the scheduler's clock in seconds."""

    def __init__(self, unix_offset_s: float = 0.0) -> None:
        self.unix_offset_s = unix_offset_s
        """Added to the scheduler's clock it gives wall-clock time: where in the day a moment lies."""
        self._series: dict[Key, Series] = {}
        self._events: list[ExpectedLoad] = []
        self._heard_s: float | None = None
        self._turn: list[Key] = []

    def observe(self, now_s: float, key: Key, work_s: float, requests: int = 1) -> None:
        """``requests`` requests arrived since the last look that will cost ``work_s`` GPU-seconds in all."""
        if self._heard_s is None:
            self._heard_s = now_s
        elif now_s - self._heard_s > t.GAP_S:
            self._gap(now_s, self._heard_s)
            return
        if not work_s >= 0.0 or math.isinf(work_s):
            raise ValueError(f"work_s must be at least 0, not {work_s}")
        work_s /= self._factor(now_s, now_s, key[0])
        window = int(now_s) // WINDOW_S
        for name in (key, (key[0], ALL_CLASSES)):
            series = self._series.get(name)
            if series is None:
                if len(self._series) >= t.KEPT_MAX:
                    del self._series[min(self._series, key=lambda item: (self._series[item].last_load, item))]
                series = self._series[name] = Series(window, last_load=window)
            series.settle(window, self.unix_offset_s)
            series.add(work_s, requests)

    def heard(self, now_s: float) -> None:
        """All that arrived until now has been observed; keys not named had no load. Call it once at the end of each look."""
        if self._heard_s is not None and now_s - self._heard_s > t.GAP_S:
            self._gap(now_s, self._heard_s)
        self._heard_s = now_s
        self._turn = self._turn or list(self._series)
        for key in self._turn[-t.PER_LOOK :]:
            self._settled(now_s, key)
        del self._turn[-t.PER_LOOK :]

    def predict(self, now_s: float, key: Key, begin_s: float, end_s: float) -> tuple[float, float]:
        """What will arrive for this key from ``begin_s`` to ``end_s`` ahead, in GPU-seconds per second: the expected mean,
        and the root mean square error that it has lately had at that horizon. Both are zero for a key never seen. Where both
        ends are the same, the rate at that moment: what a replica that is ready then will meet."""
        series, between_s = self._settled(now_s, key), (now_s + begin_s, now_s + end_s)
        if series is None:
            return self._at_least(*between_s, key), 0.0
        mean, error = series.mix(begin_s, end_s, self.unix_offset_s)
        surge = series.surge()
        if surge is not None:
            mean = max(mean, mean + surge_share(end_s) * (surge - mean))
        factor = self._factor(*between_s, key[0])
        return max(mean * factor, self._at_least(*between_s, key)), error * factor

    def usual_change(self, now_s: float, key: Key, ahead_s: float) -> tuple[float, float] | None:
        """By how much the rate usually changes within ``ahead_s`` at this time of day, and by how much days differ.

        The mixture behind :meth:`predict` goes by what did well within the last hours, so it is blind to a steep rise after
        a calm night. None where fewer than two days were seen.
        """
        series = self._settled(now_s, key)
        return series.usual_change(ahead_s, self.unix_offset_s) if series is not None else None

    def observed_s(self, key: Key) -> float:
        """How long a key has been observed, gaps left out; 0 for one never seen."""
        series = self._series.get(key)
        return float(series.windows * WINDOW_S) if series is not None else 0.0

    def declare(self, events: Sequence[ExpectedLoad]) -> None:
        """Load that people know of beforehand, all of it: a launch, a sale, a nightly batch.

        While an event lasts the load is ``factor`` times what it would be without it, and at least ``at_least`` over all
        classes. What is observed meanwhile is divided by ``factor`` before it is learned, so that it leaves no trace in the
        seasons.

        Raises:
            ValueError: one ends before it begins, or its factor is not above 0.
        """
        for event in events:
            bad = not 0.0 < event.factor < math.inf or not 0.0 <= event.at_least < math.inf
            if bad or not event.begin_unix_s < event.end_unix_s:
                text = "must end after it begins, with a factor above 0 and at_least from 0 on"
                raise ValueError(f"event {event.name!r}: {text}")
        over_s = -math.inf if self._heard_s is None else self._heard_s + self.unix_offset_s
        last = sorted(events, key=lambda event: (event.end_unix_s <= over_s, event.end_unix_s, event.name))[t.EVENTS_MAX :]
        self._events = [event for event in events if event not in last]

    def event_of(self, deployment: DeploymentKey, begin_s: float, end_s: float) -> str:
        """The name of the first declared event that is on for a model between two moments, or nothing."""
        return next((event.name for event in self._of(deployment) if self._share(event, begin_s, end_s) > 0.0), "")

    # ---------------------------------------------------------------------------------------------------------- private

    def _settled(self, now_s: float, key: Key) -> Series | None:
        """The series up to what was heard: a moment that nobody has told of yet is no zero load."""
        series = self._series.get(key)
        if series is not None and self._heard_s is not None:
            series.settle(int(min(now_s, self._heard_s)) // WINDOW_S, self.unix_offset_s)
        return series

    def _gap(self, now_s: float, heard_s: float) -> None:
        window = int(now_s) // WINDOW_S
        for series in self._series.values():
            series.settle(int(heard_s) // WINDOW_S, self.unix_offset_s)
            series.restart(window + WINDOW_S)  # Of the window that runs only the end was heard.
        self._heard_s = now_s

    def _of(self, deployment: DeploymentKey) -> list[ExpectedLoad]:
        return [event for event in self._events if event.deployment in (None, deployment)]

    def _factor(self, begin_s: float, end_s: float, deployment: DeploymentKey) -> float:
        """The product of the events' factors, each by the share of the time in which it lasts."""
        return math.prod(1.0 + (event.factor - 1.0) * self._share(event, begin_s, end_s) for event in self._of(deployment))

    def _at_least(self, begin_s: float, end_s: float, key: Key) -> float:
        """What people have promised; it is told of all classes together."""
        events = self._of(key[0]) if key[1] == ALL_CLASSES else []
        return max((event.at_least * self._share(event, begin_s, end_s) for event in events), default=0.0)

    def _share(self, event: ExpectedLoad, begin_s: float, end_s: float) -> float:
        """The share of the time from ``begin_s`` to ``end_s`` in which the event lasts."""
        first_s, last_s = event.begin_unix_s - self.unix_offset_s, event.end_unix_s - self.unix_offset_s
        if end_s <= begin_s:
            return 1.0 if first_s <= begin_s < last_s else 0.0
        return max(0.0, min(end_s, last_s) - max(begin_s, first_s)) / (end_s - begin_s)
