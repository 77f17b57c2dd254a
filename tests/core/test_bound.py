"""The lower bound on GPU-hours: its arithmetic, and that no schedule of a small case is below it (OPS-6)."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from ops.simulator.bound import Sharing, bound, bound_windows, charges_of, least_factors, least_gpu_hours, least_work_s
from ops.simulator.engine import Engine, Sequence
from ops.simulator.models import sim_model
from ops.simulator.types import PoolSpec, SimModel, Trace, Window, Workload
from tests.core.small_schedules import SmallCase, SmallModel, SmallRequest, bound_ticks, cases, optimum

M = sim_model("8B", "m")
HOUR = Window(0.0, 0.0, 3600.0)


def workload(models: tuple[SimModel, ...], requests: list[tuple[float, int, int, int]], window: Window = HOUR) -> Workload:
    """(arrival, model, input, output tokens)."""
    rows = sorted(requests)
    trace = Trace(
        np.asarray([row[0] for row in rows], np.float64),
        np.asarray([row[1] for row in rows], np.int16),
        np.asarray([row[2] for row in rows], np.int32),
        np.asarray([row[3] for row in rows], np.int32),
    )
    return Workload(
        name="made",
        models=models,
        windows=(window,),
        trace=lambda seed, window: trace,
        pool=PoolSpec(devices=8),
        static_replicas={},
    )


def seconds(made: Workload, share: float = 1.0) -> float:
    return bound(made, made.trace(0, made.windows[0]), made.windows[0], share) * 3600


def test_no_schedule_of_a_small_case_is_below_the_bound() -> None:
    """OPS-6: bound <= optimum on a slice of the small cases; ``python -m tests.core.small_schedules`` takes all."""
    every = list(cases())
    few = [case for case in every if len(case.models) < 3]
    many = [case for case in every if len(case.models) == 3]
    chosen = random.Random(1).sample(few, 26) + random.Random(2).sample(many, 2)
    found = [(best, bound_ticks(case), case) for case in chosen if (best := optimum(case)) is not None]
    assert len(found) > 14
    assert [(best, least, case) for best, least, case in found if least > best + 1e-6] == []
    assert sum(best > 0 and least >= 0.5 * best for best, least, _ in found) > len(found) / 2, "the bound says something"


def test_the_exhaustive_search_finds_known_optima() -> None:
    """OPS-6: one request needs its load and its steps; two of one model share both; two models that fit share a device."""
    one = SmallRequest(0, 0, 1, 3)
    alone = SmallCase((SmallModel(),), (one,), begin=-4)
    together = replace(alone, requests=(one, one))
    two_models = replace(alone, models=(SmallModel(), SmallModel()), requests=(one, replace(one, model=1)), tpot=3)
    apart = replace(two_models, per_device=1)
    one_may_fail = replace(together, requests=(one, replace(one, arrival=9)), share=0.5)
    assert [optimum(case) for case in (alone, together, two_models, apart, one_may_fail)] == [5, 5, 8, 10, 5]
    assert optimum(replace(alone, ttft=0)) is None


def test_least_work_is_the_prefill_and_the_cheapest_share_of_each_step() -> None:
    """OPS-6: prefill, own part of each decode step, and the constant part over the largest batch that some rule allows."""
    costs = M.costs
    own_s = 1000 * costs.prefill_token_s + 1000**2 * costs.prefill_token2_s
    own_s += sum(costs.step_request_s + costs.step_context_token_s * (1000 + i) for i in range(1, 200))
    slots_s = 200 * costs.step_const_s / 256
    tokens = (72e9 - 16e9) / 131_072
    pages_s = costs.step_const_s * sum(1000 + i for i in range(200)) / tokens
    pace_s = (
        199 * (costs.step_request_s + costs.step_context_token_s * 1000) * costs.step_const_s / (0.1 - costs.step_const_s)
    )
    assert least_work_s(M, 1000, 200, Sharing.SLOTS) == pytest.approx(own_s + slots_s)
    assert least_work_s(M, 1000, 200, Sharing.PAGES) == pytest.approx(own_s + pages_s)
    assert least_work_s(M, 1000, 200, Sharing.PACE) == pytest.approx(own_s + pace_s)
    assert least_work_s(M, 1000, 200, Sharing.APART) == pytest.approx(own_s + 200 * costs.step_const_s)
    assert least_work_s(M, 1000, 200) == pytest.approx(own_s + max(slots_s, pages_s, pace_s))
    assert least_work_s(replace(M, gpus=4), 1000, 1, Sharing.SLOTS) > 4 * 1000 * costs.prefill_token_s
    both = least_work_s(M, np.asarray([10, 1000]), np.asarray([1, 200]))
    assert both[1] == pytest.approx(least_work_s(M, 1000, 200)) and both[0] < both[1]


def test_an_engine_never_works_less_than_the_bound_says() -> None:
    """OPS-6: the engine's own time for batches within the TPOT target is at least the least work of their requests."""
    for batch, inputs, outputs in ((1, 64, 300), (40, 900, 200), (180, 2000, 60), (200, 30, 150)):
        engine = Engine(M.costs, kv_pages=M.kv_bytes_alone() // M.kv_bytes_per_token // 16, chunk_tokens=batch * inputs)
        sequences = [Sequence(index, inputs, outputs) for index in range(batch)]
        for sequence in sequences:
            engine.add(0.0, sequence)
        now_s = 0.0
        while engine.active:
            now_s = engine.end_s
            engine.step(now_s)
        least_s = least_work_s(M, np.full(batch, inputs), np.full(batch, outputs)).sum()
        assert 0.2 * now_s * (batch >= 40) < least_s <= now_s


def test_a_step_that_only_prefills_costs_the_constant_too() -> None:
    """OPS-6: the bound counts on it (each token comes out of a step, whichever way)."""
    engine = Engine(M.costs, kv_pages=1000)
    engine.add(0.0, Sequence(0, 100, 5))
    assert engine.end_s >= M.costs.step_const_s + 100 * M.costs.prefill_token_s


def test_requests_that_live_apart_share_no_step() -> None:
    """OPS-6: two distant requests bear whole steps, two at the same time only one's."""
    distant = seconds(workload((M,), [(100.0, 0, 500, 300), (2000.0, 0, 500, 300)]))
    together = seconds(workload((M,), [(100.0, 0, 500, 300), (100.0, 0, 500, 300)]))
    assert distant > 2 * 300 * M.costs.step_const_s
    assert 300 * M.costs.step_const_s < together < 0.7 * distant


def test_residency_of_many_idle_models_is_packing() -> None:
    """OPS-6: models that must be loaded at the same time and hardly work need the devices that hold their weights."""
    large = tuple(sim_model("14B", f"m{number}") for number in range(6))
    short = Window(0.0, 95.0, 215.0)
    requests = [(100.0 + at, number, 20_000, 1) for number in range(6) for at in range(0, 100)]
    made = workload(large, requests, short)
    found = charges_of(made, made.trace(0, short), short, factors=[0.01] * len(large))
    assert found.work_part < 0.1
    assert least_gpu_hours([found], 1.0) * 3600 == pytest.approx(3 * 100, rel=0.05), "two of 29 GB on each of three devices"


def test_only_what_must_be_done_within_the_window_counts() -> None:
    """OPS-6: of a request near the end what can wait is left out; arrivals outside do not count; failing ones neither."""
    early, late = (100.0, 0, 500, 300), (3590.0, 0, 500, 300)
    assert seconds(workload((M,), [early])) == pytest.approx(seconds(workload((M,), [early, (-5.0, 0, 500, 300)])))
    assert 0 < seconds(workload((M,), [late])) < 0.5 * seconds(workload((M,), [early]))
    many = [(10.0 * number, 0, 500, 100) for number in range(100)]
    assert seconds(workload((M,), [*many, (5.0, 0, 16_000, 3000)]), share=0.99) <= seconds(workload((M,), many), share=1.0)
    assert seconds(workload((M,), many), share=0.99) < seconds(workload((M,), many), share=1.0)


def test_faster_devices_lower_the_bound() -> None:
    """OPS-6: the least factor of the profile's error multiplies all work."""
    made = workload((M,), [(100.0, 0, 500, 300)])
    trace = made.trace(0, HOUR)
    assert bound(made, trace, HOUR, 1.0, [0.9]) < bound(made, trace, HOUR, 1.0)
    assert bound(made, trace, HOUR, 1.0, [0.5]) == pytest.approx(0.5 * bound(made, trace, HOUR, 1.0), rel=0.2)


def test_requests_that_may_fail_are_those_of_all_windows_together() -> None:
    """OPS-6: over two windows the costliest hundredth is left out of both as a whole, wherever it is."""
    first, second = Window(0.0, 0.0, 600.0), Window(600.0, 600.0, 1200.0)
    made = workload((M,), [(10.0 * number, 0, 500, 30 if number < 60 else 60) for number in range(110)], first)
    parts = [charges_of(made, made.trace(0, window), window) for window in (first, second)]
    assert least_gpu_hours(parts, 1.0) == pytest.approx(sum(least_gpu_hours([part], 1.0) for part in parts))
    assert least_gpu_hours(parts) < least_gpu_hours(parts, 1.0)
    assert [least_gpu_hours([part]) for part in parts] == [least_gpu_hours([part], 1.0) for part in parts]
    both = replace(made, windows=(first, second))
    factor = least_factors(both, 7, 0.05)[0]
    assert factor < 1.0
    assert bound_windows(both, 7, 0.99, 0.0) == least_gpu_hours(parts)
    assert factor * 0.9 < bound_windows(both, 7) / least_gpu_hours(parts) < 1.0
