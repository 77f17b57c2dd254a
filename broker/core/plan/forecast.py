"""What each model will ask of the pool soon, in capacity units: GPU-seconds of work that arrive per second (SCH-5).

The caller prices each arrival (``observe(now_s, key, work_s)``) and tells at each look that it has heard everybody
(``heard(now_s)``): a key that was not named in between had no load. A silence of more than ``gap_s`` between two looks is a
gap: nothing is learned from it, neither zero load nor the lump that was counted meanwhile.

A forecast mixes simple ones (means over the last seconds to half an hour, a trend, the same time of earlier days and weeks),
each weighted by how well it has lately done at that horizon for that key; ``series`` has the arithmetic. All is bounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from broker.core.plan.series import WINDOW_S, Series, surge_share
from broker.core.plan.tunables import EVENTS_MAX, GAP_S, KEPT_MAX, PER_LOOK
from profiles.costs import LENGTH_CLASSES
from subjects.ids import DeploymentKey

Key = tuple[DeploymentKey, int]
"""A model and a length class (0 short, 1 medium, 2 long), or ``ALL_CLASSES``."""
ALL_CLASSES = len(LENGTH_CLASSES)
"""All length classes of a model together; to be read only."""


@dataclass(frozen=True, slots=True)
class ForecastSettings:
    """How much is remembered, in seconds."""

    gap_s: float = GAP_S
    keys_max: int = KEPT_MAX
    events_max: int = EVENTS_MAX
    settle_per_look: int = PER_LOOK


@dataclass(frozen=True, slots=True)
class Forecast:
    """Work that will arrive, in GPU-seconds per second. All zero for a key never seen."""

    mean: float
    """Expected average from now to the horizon."""
    error: float
    """Root mean square error that the mean has lately had at this horizon."""


NOTHING = Forecast(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class DeclaredEvent:
    """Load that people know of beforehand: a launch, a sale, a nightly batch.

    While it lasts the load is ``factor`` times what it would be without it, and at least ``at_least`` over all classes. What
    is observed meanwhile is divided by ``factor`` before it is learned, so that the event leaves no trace in the seasons.
    """

    name: str
    begin_s: float
    end_s: float
    deployment: DeploymentKey | None = None
    """None: every model."""
    factor: float = 1.0
    at_least: float = 0.0


class Forecaster:
    """Forecasts of all models. One thread; times are the scheduler's clock in seconds."""

    def __init__(self, settings: ForecastSettings = ForecastSettings(), unix_offset_s: float = 0.0) -> None:
        self.settings = settings
        self.unix_offset_s = unix_offset_s
        """Added to the scheduler's clock it gives wall-clock time: where in the day a moment lies."""
        self._series: dict[Key, Series] = {}
        self._events: dict[str, DeclaredEvent] = {}
        self._heard_s: float | None = None
        self._turn: list[Key] = []

    def __len__(self) -> int:
        return len(self._series)

    def observe(self, now_s: float, key: Key, work_s: float, requests: int = 1) -> None:
        """``requests`` requests arrived since the last look that will cost ``work_s`` GPU-seconds in all."""
        if self._heard_s is None or now_s - self._heard_s > self.settings.gap_s:
            if self._heard_s is not None:
                self._gap(now_s)
                return
            self._heard_s = now_s
        if not work_s >= 0.0 or math.isinf(work_s):
            raise ValueError(f"work_s must be at least 0, not {work_s}")
        if self._events:
            work_s /= self._factor(now_s, now_s, key[0])
        window = int(now_s) // WINDOW_S
        for name in (key, (key[0], ALL_CLASSES)):
            series = self._series.get(name)
            if series is None:
                series = self._new(name, window)
            elif window > series.window:
                series.settle(window, self.unix_offset_s)
            series.add(work_s, requests)

    def heard(self, now_s: float) -> None:
        """All that arrived until now has been observed; keys not named had no load. Call it once at the end of each look."""
        if self._heard_s is not None and now_s - self._heard_s > self.settings.gap_s:
            self._gap(now_s)
        self._heard_s = now_s
        window = int(now_s) // WINDOW_S
        if not self._turn:
            self._turn = list(self._series)
        for key in self._turn[-self.settings.settle_per_look :]:
            series = self._series.get(key)
            if series is not None:
                series.settle(window, self.unix_offset_s)
        del self._turn[-self.settings.settle_per_look :]

    def predict(self, now_s: float, key: Key, horizon_s: float) -> Forecast:
        """What will arrive for this key from now to ``horizon_s`` ahead."""
        series = self._settled(now_s, key)
        if series is None:
            at_least = self._at_least(now_s, now_s + horizon_s, key) if self._events else 0.0
            return Forecast(at_least, 0.0)
        mean, error = series.mix(horizon_s, 0.0, horizon_s, self.unix_offset_s)
        surge = series.surge()
        if surge is not None:
            mean = max(mean, mean + surge_share(horizon_s) * (surge - mean))
        if self._events:
            factor = self._factor(now_s, now_s + horizon_s, key[0])
            error *= factor
            mean = max(mean * factor, self._at_least(now_s, now_s + horizon_s, key))
        return Forecast(mean, error)

    def rate_at(self, now_s: float, key: Key, ahead_s: float) -> float:
        """The expected rate at one moment, ``ahead_s`` from now: what a replica that is ready then will meet."""
        series = self._settled(now_s, key)
        if series is None:
            return self._at_least(now_s + ahead_s, now_s + ahead_s, key) if self._events else 0.0
        mean, _ = series.mix(ahead_s, ahead_s, ahead_s, self.unix_offset_s)
        surge = series.surge()
        if surge is not None:
            mean = max(mean, mean + surge_share(ahead_s) * (surge - mean))
        if self._events:
            at_s = now_s + ahead_s
            mean = max(mean * self._factor(at_s, at_s, key[0]), self._at_least(at_s, at_s, key))
        return mean

    def usual_change(self, now_s: float, key: Key, ahead_s: float) -> tuple[float, float] | None:
        """By how much the rate usually changes within ``ahead_s`` at this time of day, and by how much days differ.

        The mixture behind :meth:`rate_at` goes by what did well within the last hours, so it is blind to a steep rise after
        a calm night. None where fewer than two days were seen.
        """
        series = self._settled(now_s, key)
        return series.usual_change(ahead_s, self.unix_offset_s) if series is not None else None

    def observed_s(self, key: Key) -> float:
        """How long a key has been observed, gaps left out; 0 for one never seen."""
        series = self._series.get(key)
        return float(series.windows * WINDOW_S) if series is not None else 0.0

    def declare(self, event: DeclaredEvent) -> None:
        """Adds an event, or replaces the one of its name.

        Raises:
            ValueError: it ends before it begins, or its factor is not above 0.
        """
        if not event.begin_s < event.end_s or not 0.0 < event.factor < math.inf or not 0.0 <= event.at_least < math.inf:
            raise ValueError(f"event {event.name!r}: must end after it begins, with a factor above 0 and at_least from 0 on")
        self._events[event.name] = event
        while len(self._events) > self.settings.events_max:
            del self._events[max(self._events.values(), key=self._dispensable).name]

    def withdraw(self, name: str) -> None:
        """Takes a declared event back; an unknown name is ignored."""
        self._events.pop(name, None)

    def forget(self, deployment: DeploymentKey) -> None:
        """Drops what is known of a model that is gone."""
        for key in [key for key in self._series if key[0] == deployment]:
            del self._series[key]

    # ---------------------------------------------------------------------------------------------------------- private

    def _dispensable(self, event: DeclaredEvent) -> tuple[bool, float, str]:
        return self._heard_s is not None and event.end_s <= self._heard_s, event.end_s, event.name

    def _new(self, key: Key, window: int) -> Series:
        if len(self._series) >= self.settings.keys_max:
            longest = min(self._series, key=lambda item: (self._series[item].last_load, item))
            del self._series[longest]
        series = self._series[key] = Series(window)
        return series

    def _settled(self, now_s: float, key: Key) -> Series | None:
        """The series up to what was heard: a moment that nobody has told of yet is no zero load."""
        series = self._series.get(key)
        if series is not None and self._heard_s is not None:
            series.settle(int(min(now_s, self._heard_s)) // WINDOW_S, self.unix_offset_s)
        return series

    def _gap(self, now_s: float) -> None:
        heard_s = self._heard_s
        assert heard_s is not None
        window = int(now_s) // WINDOW_S
        for series in self._series.values():
            series.settle(int(heard_s) // WINDOW_S, self.unix_offset_s)
            series.restart(window + WINDOW_S)  # Of the window that runs only the end was heard.
        self._heard_s = now_s

    def _factor(self, begin_s: float, end_s: float, deployment: DeploymentKey) -> float:
        """The product of the events' factors, each by the share of the time in which it lasts."""
        factor = 1.0
        for event in self._events.values():
            if event.deployment is None or event.deployment == deployment:
                factor *= 1.0 + (event.factor - 1.0) * _share(event, begin_s, end_s)
        return factor

    def _at_least(self, begin_s: float, end_s: float, key: Key) -> float:
        """What people have promised; it is told of all classes together."""
        if key[1] != ALL_CLASSES:
            return 0.0
        return max(
            (
                event.at_least * _share(event, begin_s, end_s)
                for event in self._events.values()
                if event.deployment is None or event.deployment == key[0]
            ),
            default=0.0,
        )


def _share(event: DeclaredEvent, begin_s: float, end_s: float) -> float:
    """The share of the time from ``begin_s`` to ``end_s`` in which the event lasts."""
    if end_s <= begin_s:
        return 1.0 if event.begin_s <= begin_s < event.end_s else 0.0
    return max(0.0, min(end_s, event.end_s) - max(begin_s, event.begin_s)) / (end_s - begin_s)
