"""The thresholds of TWU for a site (OPS-7), in the simulator: two stages, each up to the load at which the SLO breaks.

First the smallest model alone with short prompts: its tokens per second at the break are the baseline of TWU.
Then all models on one device with the mix of 60 % short, 30 % medium and 10 % long prompts, and of requests to the models.
TWU at the break of the second stage, times 0.8, is the level above which a device is full; the level below which it is free
keeps the ratio of the source's 0.4 to its 0.85. Several rounds with other seeds; the median counts.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from profiles.twu import TWU_FREE, TWU_FULL
from subjects.errors import ConfigError

LATE_MAX = 0.05
"""Share of late requests at which the SLO is broken: its p95 is the target."""
SAFETY = 0.8
LOAD_FIRST = 0.25
LOAD_MIN, LOAD_MAX = 0.01, 4.0
HALVINGS = 5
SETTLE_S = 30
MEASURED_S = 120
QUICK_HALVINGS = 2
QUICK_MEASURED_S = 30
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """One load. TWU is with a baseline of one token per second, to be divided by the real one."""

    rps: float
    late: float
    twu_unscaled: float
    raw_s_unscaled: float
    tokens_per_s: float
    utilisation: float | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """The largest load that kept the SLO, and the smallest tried that broke it."""

    name: str
    models: tuple[str, ...]
    rps: float
    breaks_at_rps: float
    tokens_per_s: float
    late: float
    twu: float
    twu_raw_s: float
    utilisation: float | None


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What the file holds."""

    twu_full: float
    """Above it models or requests must leave the device."""
    twu_free: float
    """Below it the device can take more."""
    baseline_tokens_per_s: float
    weights: dict[str, float]
    """By model, relative to the smallest."""
    stages: tuple[Stage, ...]
    measured_on: str
    """``simulated``, or the endpoint."""


def thresholds(stages: Sequence[Stage], baseline: float, weights: dict[str, float], measured_on: str) -> Thresholds:
    """From the last stage."""
    full = SAFETY * stages[-1].twu
    return Thresholds(
        twu_full=round(full, 4),
        twu_free=round(full * TWU_FREE / TWU_FULL, 4),
        baseline_tokens_per_s=round(baseline, 1),
        weights=weights,
        stages=tuple(stages),
        measured_on=measured_on,
    )


def stage_of(name: str, models: tuple[str, ...], kept: Measured, broke: Measured, baseline: float) -> Stage:
    """A stage with its TWU in terms of the baseline."""
    return Stage(
        name=name,
        models=models,
        rps=round(kept.rps, 3),
        breaks_at_rps=round(broke.rps, 3),
        tokens_per_s=round(kept.tokens_per_s, 1),
        late=round(kept.late, 4),
        twu=round(kept.twu_unscaled / baseline, 4),
        twu_raw_s=round(kept.raw_s_unscaled / baseline, 4),
        utilisation=None if kept.utilisation is None else round(kept.utilisation, 4),
    )


def largest_kept(measure: Callable[[float], Measured], halvings: int = HALVINGS) -> tuple[Measured, Measured]:
    """The largest load factor that keeps the SLO and the smallest tried that does not, by halvings of their ratio.

    Raises:
        ConfigError: even the smallest load breaks it, or the largest does not.
    """
    factor = LOAD_FIRST
    kept: Measured | None = None
    broke: Measured | None = None
    low = high = factor
    while kept is None or broke is None:
        seen = measure(factor)
        if seen.late <= LATE_MAX:
            kept, low = seen, factor
            factor *= 2.0
        else:
            broke, high = seen, factor
            factor /= 2.0
        if not LOAD_MIN <= factor <= LOAD_MAX and (kept is None or broke is None):
            what = "even a hundredth of the expected load" if kept is None else "four times the expected load"
            raise ConfigError(f"{what} {'breaks' if kept is None else 'keeps'} the SLO; check the models and their targets")
    for _ in range(halvings):
        factor = (low * high) ** 0.5
        seen = measure(factor)
        if seen.late <= LATE_MAX:
            kept, low = seen, factor
        else:
            broke, high = seen, factor
    return kept, broke


def calibrate_simulated(sizes: Sequence[str], seed: int, rounds: int, say: Say, *, quick: bool = False) -> Thresholds:
    """Both stages in the simulator, on one GPU of the kind that the fixed workloads use. ``quick``: a coarse look.

    Raises:
        ConfigError: an unknown size, or models that do not fit on one device together.
    """
    from ops.simulator.models import SIZES, sim_model
    from ops.simulator.probe import MIX, lines_of

    unknown = [size for size in sizes if size not in SIZES]
    if unknown or not 1 <= len(sizes) <= len(MIX):
        raise ConfigError(f"--model: name one to {len(MIX)} of {', '.join(SIZES)}")
    models = [sim_model(size) for size in sizes]
    together = lines_of(models)
    alone = lines_of([together[0].model])
    asked = (("smallest model alone", alone, (1.0, 0.0, 0.0)), ("all models, 60/30/10", together, MIX))
    stages: list[Stage] = []
    baseline = 0.0
    for name, lines, lengths in asked:
        found = []
        for number in range(rounds):
            measure = _measurement(lines, lengths, seed + number, QUICK_MEASURED_S if quick else MEASURED_S)
            kept, broke = largest_kept(measure, QUICK_HALVINGS if quick else HALVINGS)
            say(f"{name}, round {number + 1} of {rounds}: {kept.rps:.1f} requests/s kept, {broke.rps:.1f} broke the SLO")
            found.append((kept, broke))
        kept, broke = sorted(found, key=lambda pair: pair[0].twu_unscaled)[(rounds - 1) // 2]
        if not stages:
            baseline = statistics.median(pair[0].tokens_per_s for pair in found)
        stages.append(stage_of(name, tuple(line.model.name for line in lines), kept, broke, baseline))
    return thresholds(stages, baseline, {line.model.name: line.weight for line in together}, "simulated")


def _measurement(lines: Any, lengths: Sequence[float], seed: int, measured_s: int) -> Callable[[float], Measured]:
    from ops.simulator.probe import capacity_rps, ramp, watch

    whole = capacity_rps(lines, lengths)
    seconds = float(SETTLE_S + measured_s)

    def measure(factor: float) -> Measured:
        rps = factor * whole
        readings = watch(lines, ramp(lines, seed, [(0.0, rps)], seconds, lengths), seed, seconds, 1.0)[SETTLE_S:]
        count = len(readings)
        return Measured(
            rps=rps,
            late=sum(reading.late for reading in readings) / count,
            twu_unscaled=sum(reading.twu for reading in readings) / count,
            raw_s_unscaled=sum(reading.raw_s for reading in readings) / count,
            tokens_per_s=sum(reading.tokens_per_s for reading in readings) / count,
            utilisation=sum(reading.utilisation for reading in readings) / count,
        )

    return measure


def write(found: Thresholds, path: Path) -> None:
    """One JSON object, for people too.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); give another --output") from None
