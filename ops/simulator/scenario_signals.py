"""Scenarios about what the scheduler knows rather than what it does: its forecast beside naive ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from broker.core.forecast import ALL_CLASSES, Forecaster
from ops.simulator.scenario import Figures, Say
from ops.simulator.types import SimModel, Trace, Window
from ops.simulator.workloads import DAY_S, workload
from subjects.ids import ModelHash

Floats = npt.NDArray[np.float64]

HORIZONS_S = (0.2, 10.0, 120.0, 1800.0)
LOOK_EVERY_S = 60


@dataclass(frozen=True, slots=True)
class Predicted:
    """What was said and what came, by moment, of one model and horizon; GPU-seconds per second."""

    said: Floats
    naive: Floats
    """The last span of the horizon's length goes on."""
    seasonal: Floats
    """The same span of the day before."""
    came: Floats


def forecast(seed: int, processes: int, say: Say) -> Figures:
    """Accuracy (1 - sum of absolute errors / sum of what came) on five-lines' second day, beside naive and seasonal-naive.

    The public trace has one day. The first day is drawn from it with one seed and the second with another: the same
    rates, other requests. So the season is as good as a season can be, and what is left is noise and bursts.
    """
    made = workload("five-lines", full=True)
    rates = []
    for number in range(len(made.models)):
        days = []
        for day in range(2):
            trace = made.trace(seed + 1000 * day, Window(0.0, 0.0, DAY_S))
            mine = trace.model == number
            one = trace.__class__(
                trace.arrival_s[mine], trace.model[mine], trace.input_tokens[mine], trace.output_tokens[mine]
            )
            per_second, _ = np.histogram(one.arrival_s, np.arange(int(DAY_S) + 1), weights=work_s(made.models[number], one))
            days.append(per_second)
        rates.append(np.concatenate(days))
    say(f"{len(rates)} models, two days of seconds, a forecast every {LOOK_EVERY_S} s of the second")
    figures: Figures = {}
    ours_all, naive_all, seasonal_all = [], [], []
    for horizon_s, by_model in follow(rates, HORIZONS_S, int(DAY_S)).items():
        ours, naive, seasonal = (
            accuracy([getattr(one, name) for one in by_model], [one.came for one in by_model])
            for name in ("said", "naive", "seasonal")
        )
        figures |= {
            f"accuracy_{horizon_s:g}s": round(ours, 4),
            f"naive_{horizon_s:g}s": round(naive, 4),
            f"seasonal_naive_{horizon_s:g}s": round(seasonal, 4),
        }
        ours_all.append(ours)
        naive_all.append(naive)
        seasonal_all.append(seasonal)
    better = all(o > max(n, s) for o, n, s in zip(ours_all, naive_all, seasonal_all, strict=True))
    return figures | {"better_than_both_everywhere": better}


def follow(rates: Sequence[Floats], horizons_s: Sequence[float], from_s: int) -> dict[float, list[Predicted]]:
    """Feeds a forecaster second by second and asks it from ``from_s`` on, up to where what came is still known.

    ``rates`` has the work per second of each model. Horizons below a second are judged by the next second: nothing
    shorter is counted.
    """
    forecaster = Forecaster()
    keys = [(_hash(number), ALL_CLASSES) for number in range(len(rates))]
    sums = [np.concatenate(([0.0], np.cumsum(rate))) for rate in rates]
    spans = {horizon_s: max(1, round(horizon_s)) for horizon_s in horizons_s}
    until_s = len(rates[0]) - max(spans.values())
    asked = range(from_s, until_s, LOOK_EVERY_S)
    said: dict[float, list[list[float]]] = {horizon_s: [[] for _ in rates] for horizon_s in horizons_s}
    wanted = set(asked)
    lists = [rate.tolist() for rate in rates]
    for second in range(until_s):
        if second in wanted:
            for horizon_s in horizons_s:
                for number, key in enumerate(keys):
                    said[horizon_s][number].append(forecaster.predict(float(second), key, horizon_s).mean)
        for number in range(len(lists)):
            value = lists[number][second]
            if value:
                forecaster.observe(second + 0.999, (_hash(number), 0), value)
        forecaster.heard(second + 0.999)
    at = np.array(list(asked))
    found: dict[float, list[Predicted]] = {}
    for horizon_s, span in spans.items():
        found[horizon_s] = [
            Predicted(
                said=np.array(said[horizon_s][number]),
                naive=(total[at] - total[at - span]) / span,
                seasonal=(total[at - int(DAY_S) + span] - total[at - int(DAY_S)]) / span
                if from_s >= DAY_S
                else np.zeros(len(at)),
                came=(total[at + span] - total[at]) / span,
            )
            for number, total in enumerate(sums)
        ]
    return found


def work_s(model: SimModel, trace: Trace) -> Floats:
    """Seconds of a replica that each request takes beside the constant of its steps, which all running ones share."""
    costs = model.costs
    inputs, outputs = trace.input_tokens.astype(np.float64), trace.output_tokens.astype(np.float64)
    prefill = costs.prefill_token_s * inputs + costs.prefill_token2_s * inputs * inputs
    decode = outputs * (costs.step_request_s + costs.step_context_token_s * (inputs + outputs / 2))
    total: Floats = prefill + decode
    return total


def accuracy(said: Sequence[Floats], came: Sequence[Floats]) -> float:
    """1 - (sum of absolute errors / sum of what came), over all models; below 0 for worse than saying nothing."""
    wrong = sum(float(np.abs(one - other).sum()) for one, other in zip(said, came, strict=True))
    total = sum(float(other.sum()) for other in came)
    return 1.0 - wrong / total if total else 0.0


def _hash(number: int) -> ModelHash:
    return ModelHash(f"{number:064x}")
