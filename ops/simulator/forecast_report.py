"""How right the forecast is: ``python -m ops.simulator.forecast_report [WORKLOAD]``, beside naive and seasonal-naive.

A forecast at a horizon is of the mean work from now to then, in GPU-seconds per second, per model. *Accuracy* is one less
the weighted absolute percentage error: ``1 - sum |forecast - came| / sum came`` over all models and moments, so a second
without load neither counts for nothing nor for everything. Compared with:

- ``naive``: what came over the last stretch as long as the horizon. (The last second alone is far worse.)
- ``seasonal_naive``: what came in the same stretch a day ago; needs earlier days, so only in ``week``.
- ``holt``: Holt-Winters of the library ``river``, on one-minute means; with a season of a day in ``week``.
- ``clairvoyant``: the mean of the ten minutes around, the future included: how far single requests are noise.

Also how often the work of a second stayed below what was called its p95 and p99. The forecaster is the scheduler's own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.core.plan.forecast import ALL_CLASSES, Forecaster, Key
from ops.simulator import week
from ops.simulator.models import work_s
from ops.simulator.types import SimModel, Trace, Workload
from profiles.costs import LENGTH_CLASS_TOKENS_MAX
from subjects.ids import DeploymentKey

HORIZONS_S = (1, 3, 10, 120, 1800)
SHORT_TERM_S = 120
"""The horizon of the figure for the short term: what a plan made now lives with."""
DAY_S = 86_400
_AROUND_S = 600
_HOLT_HORIZONS_S = (120, 1800)
METHODS = ("forecast", "naive", "seasonal_naive", "holt", "clairvoyant")
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What arrives for one model, per second: [length class, second]. ``gaps`` marks seconds of which nothing is known."""

    deployment: DeploymentKey
    work: Floats
    requests: Floats
    gaps: npt.NDArray[np.bool_] | None = None


@dataclass(slots=True)
class Errors:
    """Sums over all models and moments, by method and horizon."""

    missed: dict[tuple[str, int], float] = field(default_factory=dict)
    came: dict[tuple[str, int], float] = field(default_factory=dict)
    below: dict[str, list[int]] = field(default_factory=lambda: {"p95": [0, 0], "p99": [0, 0]})

    def add(self, method: str, horizon_s: int, said: float, came: float) -> None:
        """One forecast and what came."""
        key = (method, horizon_s)
        self.missed[key] = self.missed.get(key, 0.0) + abs(said - came)
        self.came[key] = self.came.get(key, 0.0) + came

    def accuracy(self, method: str, horizon_s: int) -> float | None:
        """One less the weighted error; None where the method had nothing to say."""
        came = self.came.get((method, horizon_s), 0.0)
        return 1.0 - self.missed[(method, horizon_s)] / came if came > 0.0 else None


def demand_of(model: SimModel, number: int, trace: Trace, begin_s: float, end_s: float) -> Demand:
    """One model's part of a trace."""
    mine = trace.model == number
    inputs = trace.input_tokens[mine]
    part = Trace(trace.arrival_s[mine], trace.model[mine], inputs, trace.output_tokens[mine])
    seconds = int(end_s - begin_s)
    place = np.minimum((part.arrival_s - begin_s).astype(np.int64), seconds - 1)
    classes = np.searchsorted(np.array(LENGTH_CLASS_TOKENS_MAX), inputs, side="left")
    each = work_s(model, part) * model.gpus
    work, requests = np.zeros((3, seconds)), np.zeros((3, seconds))
    for number_of_class in range(3):
        chosen = classes == number_of_class
        work[number_of_class] = np.bincount(place[chosen], weights=each[chosen], minlength=seconds)
        requests[number_of_class] = np.bincount(place[chosen], minlength=seconds)
    return Demand(model.deployment, work, requests)


def evaluate(
    demand: Demand,
    errors: Errors,
    *,
    horizons_s: Sequence[int] = HORIZONS_S,
    score_from_s: int = 600,
    by_class: Errors | None = None,
    holt: bool = False,
) -> None:
    """Feeds one model's demand to a forecaster second by second, and adds its errors and those of the simple methods.

    Forecasts are judged every so often per horizon, from ``score_from_s`` on, and not across gaps.
    """
    seconds = demand.work.shape[1]
    total = demand.work.sum(axis=0)
    sums = np.concatenate([[0.0], np.cumsum(total)])
    class_sums = np.concatenate([np.zeros((3, 1)), np.cumsum(demand.work, axis=1)], axis=1)
    gaps = np.zeros(seconds, dtype=np.bool_) if demand.gaps is None else demand.gaps
    unknown = np.concatenate([[0], np.cumsum(gaps)])
    forecaster = Forecaster()
    key: Key = (demand.deployment, ALL_CLASSES)
    library = _Holt(DAY_S // 60 if seconds > 2 * DAY_S else 0) if holt else None
    every = {horizon_s: 7 if horizon_s < 10 else max(29, horizon_s // 4 + 1) for horizon_s in horizons_s}
    work, requests = demand.work.T.tolist(), demand.requests.T.astype(int).tolist()
    deaf = gaps.tolist()

    def mean(begin: int, end: int) -> float:
        return float(sums[end] - sums[begin]) / (end - begin)

    for now in range(seconds):
        if now >= score_from_s and not deaf[now]:
            for horizon_s in horizons_s:
                end, begin = now + horizon_s, now - horizon_s
                if now % every[horizon_s] or end > seconds or unknown[end] > unknown[max(0, begin)]:
                    continue
                came = mean(now, end)
                said = forecaster.predict(float(now), key, float(horizon_s))
                errors.add("forecast", horizon_s, said.mean, came)
                errors.add("naive", horizon_s, mean(max(0, begin), now), came)
                if now >= DAY_S and unknown[end - DAY_S] == unknown[now - DAY_S]:
                    errors.add("seasonal_naive", horizon_s, mean(now - DAY_S, end - DAY_S), came)
                if horizon_s < _AROUND_S:
                    middle = (now + end) // 2
                    around = (max(0, middle - _AROUND_S // 2), min(seconds, middle + _AROUND_S // 2))
                    errors.add("clairvoyant", horizon_s, mean(*around), came)
                if library is not None and horizon_s in _HOLT_HORIZONS_S and (guess := library.guess(horizon_s)) is not None:
                    errors.add("holt", horizon_s, guess, came)
                if horizon_s == 10:
                    for name, level in (("p95", said.p95), ("p99", said.p99)):
                        errors.below[name][0] += int(np.count_nonzero(total[now:end] <= level))
                        errors.below[name][1] += horizon_s
                if by_class is not None:
                    for place in range(3):
                        class_came = float(class_sums[place, end] - class_sums[place, now]) / horizon_s
                        class_said = forecaster.predict(float(now), (demand.deployment, place), float(horizon_s)).mean
                        by_class.add("forecast", horizon_s, class_said, class_came)
                        past = float(class_sums[place, now] - class_sums[place, max(0, begin)]) / (now - max(0, begin))
                        by_class.add("naive", horizon_s, past, class_came)
        if deaf[now]:
            continue
        for place in range(3):
            if requests[now][place]:
                forecaster.observe(now + 0.5, (demand.deployment, place), work[now][place], requests[now][place])
        forecaster.heard(float(now + 1))
        if library is not None and now % 60 == 59:
            library.learn(mean(now - 59, now + 1))


class _Holt:
    """``river``'s Holt-Winters on one-minute means. Followed for half an hour, a trend must be all but off."""

    def __init__(self, season: int) -> None:
        from river import time_series

        self._model: Any = time_series.HoltWinters(
            alpha=0.2, beta=0.001, gamma=0.2 if season else None, seasonality=season, multiplicative=False
        )
        self._needed = max(3, 2 * season)
        self._learned = 0

    def learn(self, value: float) -> None:
        self._model.learn_one(value)
        self._learned += 1

    def guess(self, horizon_s: int) -> float | None:
        if self._learned <= self._needed:
            return None
        ahead = self._model.forecast(horizon=max(1, horizon_s // 60))
        return max(0.0, float(np.mean(ahead)))


def workload_demand(made: Workload, seed: int) -> Iterable[tuple[SimModel, Demand]]:
    """Every model of a workload's first window."""
    window = made.windows[0]
    trace = made.trace(seed, window)
    for number, model in enumerate(made.models):
        yield model, demand_of(model, number, trace, window.warmup_s, window.end_s)


def report(name: str, seed: int, days: int = 3, *, classes: bool = True, holt: bool = True) -> dict[str, Any]:
    """Accuracy by horizon and method over a workload's whole days, or over ``week`` (seven days of three models)."""
    errors, by_class = Errors(), Errors()
    if name == "week":
        for number, (_, line) in enumerate(sorted(week.packaged().items())):
            work, requests = line.work_per_s(seed, days)
            empty = np.zeros_like(work)
            gaps = np.repeat(line.rate_rps[: days * DAY_S // week.CELL_S] == 0.0, week.CELL_S)
            deployment = DeploymentKey(f"{number:064x}")
            demand = Demand(deployment, np.array([work, empty, empty]), np.array([requests, empty, empty]), gaps)
            evaluate(demand, errors, score_from_s=DAY_S, holt=holt)
    else:
        from ops.simulator.workloads import workload

        for _, demand in workload_demand(workload(name, full=True), seed):
            evaluate(demand, errors, by_class=by_class if classes else None, holt=holt)
    return {
        "workload": name,
        "seed": seed,
        "right": _rounded(errors.accuracy("forecast", SHORT_TERM_S)),
        "horizons": {str(horizon_s): _methods(errors, horizon_s) for horizon_s in HORIZONS_S},
        "by_length_class": {
            str(horizon_s): _methods(by_class, horizon_s) for horizon_s in HORIZONS_S if by_class.came
        },
        "below": {name: _rounded(good / asked) for name, (good, asked) in errors.below.items() if asked},
    }  # fmt: skip


def _methods(errors: Errors, horizon_s: int) -> Mapping[str, float | None]:
    found = {method: errors.accuracy(method, horizon_s) for method in METHODS}
    return {method: _rounded(value) for method, value in found.items() if value is not None}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def main() -> None:
    """Prints one JSON object per workload named."""
    for name in sys.argv[1:] or ["five-lines"]:
        print(json.dumps(report(name, seed=1)))


if __name__ == "__main__":
    main()
