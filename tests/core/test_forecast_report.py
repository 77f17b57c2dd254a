"""How the forecast is judged (SCH-5)."""

from __future__ import annotations

import numpy as np
import pytest

from ops.simulator import week
from ops.simulator.forecast_report import DAY_S, Demand, Errors, demand_of, evaluate
from ops.simulator.models import sim_model, work_s
from ops.simulator.rates import SCALES
from ops.simulator.types import Trace
from subjects.ids import DeploymentKey

A = DeploymentKey("a" * 64)


def of(work: list[float], gaps: list[bool] | None = None) -> Demand:
    """One model with all its work in the first class, a request per second with work."""
    one = np.array(work)
    nothing = np.zeros_like(one)
    unknown = None if gaps is None else np.array(gaps)
    return Demand(A, np.array([one, nothing, nothing]), np.array([(one > 0) * 1.0, nothing, nothing]), unknown)


def test_accuracy_is_one_less_the_weighted_error() -> None:
    """Half of the work missed is 0.5, wherever it was; a method that said nothing has no figure."""
    errors = Errors()
    errors.add("forecast", 10, 3.0, 1.0)
    errors.add("forecast", 10, 7.0, 7.0)
    errors.add("forecast", 10, 0.0, 0.0)
    assert errors.accuracy("forecast", 10) == pytest.approx(0.75)
    assert errors.accuracy("naive", 10) is None
    assert errors.accuracy("forecast", 120) is None


def test_steady_load_is_forecast_exactly() -> None:
    """Without noise everybody is right."""
    errors = Errors()
    evaluate(of([2.0] * 900), errors, horizons_s=(1, 10, 120))
    for method in ("forecast", "naive", "clairvoyant"):
        assert [errors.accuracy(method, horizon_s) for horizon_s in (1, 10, 120)] == pytest.approx([1.0] * 3)


def test_noise_is_smoothed_better_than_by_the_last_value() -> None:
    """Poisson arrivals of steady load: at short horizons the forecast errs less than the naive one does (SCH-5)."""
    random = np.random.Generator(np.random.PCG64(5))
    errors = Errors()
    evaluate(of(random.poisson(4.0, 1800).astype(float).tolist()), errors, horizons_s=(1, 10))
    for horizon_s, margin in ((1, 0.1), (10, 0.01)):
        ours, naive = errors.accuracy("forecast", horizon_s), errors.accuracy("naive", horizon_s)
        assert ours is not None
        assert naive is not None
        assert ours > naive + margin


def test_gaps_are_neither_learned_nor_judged() -> None:
    """Five minutes of which nothing is known leave every figure as it was, and the same length of silence does not."""
    gap = [False] * 900 + [True] * 300 + [False] * 300
    known, unknown = Errors(), Errors()
    work = [2.0] * 900 + [0.0] * 300 + [2.0] * 300
    evaluate(of(work, gap), unknown, horizons_s=(10, 120))
    evaluate(of(work), known, horizons_s=(10, 120))
    for horizon_s in (10, 120):
        assert unknown.accuracy("forecast", horizon_s) == pytest.approx(1.0)
        silent = known.accuracy("forecast", horizon_s)
        assert silent is not None
        assert silent < 0.99


def test_demand_of_a_trace_by_length_class() -> None:
    """Work lands in its second and its length class (up to 512, up to 2,048, longer), over all GPUs of a replica."""
    model = sim_model("70B")
    trace = Trace(
        np.array([0.2, 0.9, 1.5, 2.9]),
        np.zeros(4, np.int16),
        np.array([512, 513, 2049, 10], np.int32),
        np.array([10, 20, 30, 40], np.int32),
    )
    demand = demand_of(model, 0, trace, 0.0, 3.0)
    assert demand.requests.tolist() == [[1, 0, 1], [1, 0, 0], [0, 1, 0]]
    assert demand.work.sum() == pytest.approx(4 * work_s(model, trace).sum())
    assert demand.work[2, 1] == pytest.approx(4 * work_s(model, trace)[2])


def test_the_week_is_there() -> None:
    """Three models, seven days, gaps only where the source has none; a drawn day has the rate that the cells say."""
    models = week.packaged()
    assert list(models) == list(week.SIZES)
    assert [int((line.rate_rps == 0.0).sum()) for line in models.values()] == [0, 21, 0]
    line = models["m-large"]
    assert len(line.rate_rps) == week.CELLS
    work, requests = line.work_per_s(seed=1, days=1)
    assert len(work) == len(requests) == DAY_S
    assert requests.sum() == pytest.approx(line.rate_rps[:144].sum() * 600 * SCALES["five-lines"]["m-large"], rel=0.05)
    assert ((work > 0) == (requests > 0)).all()
