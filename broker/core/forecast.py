"""What each model will ask of the pool soon, in capacity units: GPU-seconds of work that arrive per second (SCH-5).

The caller prices each arrival (``observe(now_s, key, work_s)``) and tells at each look that it has heard everybody
(``heard(now_s)``): a key that was not named in between had no load. Silence of more than ``gap_s`` between two looks is a gap:
nothing is learned from it, neither zero load nor the lump that was counted meanwhile.

A forecast mixes simple ones (means over the last seconds to half an hour, a trend, the same time of earlier days and weeks),
each weighted by how well it has lately done at that horizon for that key; ``series`` has the arithmetic. Bursts are told
apart from the mean by quantiles of the work per short window over the last minutes. Pure, deterministic, bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from subjects.ids import ModelHash

Key = tuple[ModelHash, int]
"""A model and a length class (0 short, 1 medium, 2 long), or ``ALL_CLASSES``."""
ALL_CLASSES = 3
"""All length classes of a model together. Kept beside the classes, since the quantile of a sum is not a sum of quantiles;
to be read only."""


@dataclass(frozen=True, slots=True)
class ForecastSettings:
    """How much is remembered, in seconds."""

    gap_s: float = 5.0
    """Longer silence between two looks is a gap."""
    keys_max: int = 4096
    """Series kept, ``ALL_CLASSES`` included: some 6 KB each, and 9 KB more once it has seen a day. The one without load for
    longest goes first."""
    events_max: int = 256
    """Declared events kept; the one that ends first goes first."""
    settle_per_look: int = 16
    """Quiet series that are brought up to date at each look, in turn."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Work that will arrive, in GPU-seconds per second. All zero for a key never seen."""

    mean: float
    """Expected average from now to the horizon."""
    p95: float
    """Of the work per window of one second within the horizon, as rates; so too ``p99`` and ``peak`` (the largest of the last
    minutes, moved to the level expected)."""
    p99: float
    peak: float
    sustained_p95: float
    """Of the work per ten seconds: what a queue that may wait for seconds must carry."""
    sustained_p99: float
    error: float
    """Root mean square error that the mean has lately had at this horizon."""
    surging: bool
    """The last seconds lie far above what noise explains; the mean then follows them at once."""
    observed_s: float
    """How long this key has been observed; a new one's forecast rests on little."""


NOTHING = Forecast(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, False, 0.0)


@dataclass(frozen=True, slots=True)
class DeclaredEvent:
    """Load that people know of beforehand: a launch, a sale, a nightly batch.

    While it lasts the load is ``factor`` times what it would be without it, and at least ``at_least`` over all classes. What
    is observed meanwhile is divided by ``factor`` before it is learned, so that the event leaves no trace in the seasons.
    """

    name: str
    begin_s: float
    end_s: float
    model_hash: ModelHash | None = None
    """None: every model."""
    factor: float = 1.0
    at_least: float = 0.0


class Forecaster:
    """Forecasts of all models. One thread; times are the scheduler's clock in seconds."""

    def __init__(self, settings: ForecastSettings = ForecastSettings(), unix_offset_s: float = 0.0) -> None:  # noqa: B008
        self.settings = settings
        self.unix_offset_s = unix_offset_s
        """Added to the scheduler's clock it gives wall-clock time: where in the day a moment lies."""
        self._events: dict[str, DeclaredEvent] = {}
        self._heard_s: float | None = None
        self._turn: list[Key] = []

    def observe(self, now_s: float, key: Key, work_s: float, requests: int = 1) -> None:
        """``requests`` requests arrived since the last look that will cost ``work_s`` GPU-seconds in all."""
        raise NotImplementedError

    def heard(self, now_s: float) -> None:
        """All that arrived until now has been observed; keys not named had no load. Call it once at the end of each look."""
        raise NotImplementedError

    def predict(self, now_s: float, key: Key, horizon_s: float) -> Forecast:
        """What will arrive for this key from now to ``horizon_s`` ahead."""
        raise NotImplementedError

    def rate_at(self, now_s: float, key: Key, ahead_s: float) -> float:
        """The expected rate at one moment, ``ahead_s`` from now: what a replica that is ready then will meet."""
        raise NotImplementedError

    def declare(self, event: DeclaredEvent) -> None:
        """Adds an event, or replaces the one of its name."""
        raise NotImplementedError

    def withdraw(self, name: str) -> None:
        """Takes a declared event back; an unknown name is ignored."""
        raise NotImplementedError

    def forget(self, model_hash: ModelHash) -> None:
        """Drops what is known of a model that is gone."""
        raise NotImplementedError
