"""How right the forecast is, beside naive and seasonal-naive (SCH-5): ``carpool simulate --scenario forecast``.

A forecast at a horizon is of the mean work from now to then, in GPU-seconds per second, per model. *Accuracy* is one less
the weighted absolute percentage error: ``1 - sum |forecast - came| / sum came`` over all models and moments, so a second
without load neither counts for nothing nor for everything. Compared with:

- ``naive``: what came over the last stretch as long as the horizon. (The last second alone is far worse.)
- ``seasonal_naive``: what came in the same stretch a day ago; needs earlier days, so only in ``week``.
- ``clairvoyant``: the mean of the ten minutes around, the future included: how far single requests are noise.

The forecaster is the scheduler's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from broker.core.plan.forecast import ALL_CLASSES, Forecaster, Key
from ops.simulator import week
from ops.simulator.models import work_s
from ops.simulator.scenario import Figures, Say
from ops.simulator.types import SimModel, Trace
from profiles.costs import LENGTH_CLASS_TOKENS_MAX
from subjects.ids import DeploymentKey

HORIZONS_S = (1, 3, 10, 120, 1800)
DAY_S = 86_400
WEEK_DAYS = 3
_AROUND_S = 600
METHODS = ("forecast", "naive", "seasonal_naive", "clairvoyant")
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
) -> None:
    """Feeds one model's demand to a forecaster second by second, and adds its errors and those of the simple methods.

    Forecasts are judged every so often per horizon, from ``score_from_s`` on, and not across gaps.
    """
    seconds = demand.work.shape[1]
    total = demand.work.sum(axis=0)
    sums = np.concatenate([[0.0], np.cumsum(total)])
    gaps = np.zeros(seconds, dtype=np.bool_) if demand.gaps is None else demand.gaps
    unknown = np.concatenate([[0], np.cumsum(gaps)])
    forecaster = Forecaster()
    key: Key = (demand.deployment, ALL_CLASSES)
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
                errors.add("forecast", horizon_s, forecaster.predict(float(now), key, 0.0, float(horizon_s))[0], came)
                errors.add("naive", horizon_s, mean(max(0, begin), now), came)
                if now >= DAY_S and unknown[end - DAY_S] == unknown[now - DAY_S]:
                    errors.add("seasonal_naive", horizon_s, mean(now - DAY_S, end - DAY_S), came)
                if horizon_s < _AROUND_S:
                    middle = (now + end) // 2
                    around = (max(0, middle - _AROUND_S // 2), min(seconds, middle + _AROUND_S // 2))
                    errors.add("clairvoyant", horizon_s, mean(*around), came)
        if deaf[now]:
            continue
        for place in range(3):
            if requests[now][place]:
                forecaster.observe(now + 0.5, (demand.deployment, place), work[now][place], requests[now][place])
        forecaster.heard(float(now + 1))


def report(seed: int, processes: int, say: Say) -> Figures:
    """Accuracy by method and horizon over three days of ``week``, and over the whole day of ``five-lines``."""
    from ops.simulator.workloads import workload

    weekly, daily = Errors(), Errors()
    say("week, second by second")
    for number, (_, line) in enumerate(sorted(week.packaged().items())):
        work, requests = line.work_per_s(seed, WEEK_DAYS)
        empty = np.zeros_like(work)
        gaps = np.repeat(line.rate_rps[: WEEK_DAYS * DAY_S // week.CELL_S] == 0.0, week.CELL_S)
        deployment = DeploymentKey(f"{number:064x}")
        demand = Demand(deployment, np.array([work, empty, empty]), np.array([requests, empty, empty]), gaps)
        evaluate(demand, weekly, score_from_s=DAY_S)
    say("five-lines, second by second")
    made = workload("five-lines", full=True)
    window = made.windows[0]
    trace = made.trace(seed, window)
    for number, model in enumerate(made.models):
        evaluate(demand_of(model, number, trace, window.warmup_s, window.end_s), daily)
    return {
        f"{name}_{method}_{horizon_s}s": round(value, 4)
        for name, errors in (("week", weekly), ("five-lines", daily))
        for horizon_s in HORIZONS_S
        for method in METHODS
        if (value := errors.accuracy(method, horizon_s)) is not None
    }
