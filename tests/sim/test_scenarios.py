"""The fixed experiments on small versions of themselves (OPS-6, OPS-9): what each is to show, it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import pytest

from ops.simulator import scenario_limits
from ops.simulator.cases import Case
from ops.simulator.options import RunOptions
from ops.simulator.policies import POLICIES
from ops.simulator.scenario import Figures, Outcome, Part, capacity_rps, run_part
from ops.simulator.scenario_limits import clocked_run, largest_load
from ops.simulator.scenario_loads import (
    PATIENCE,
    PULSE_47_S,
    contention_workload,
    fairness,
    impatient,
    impatient_workload,
    interference,
    opposite,
    opposite_workload,
    pulse_47s,
)
from ops.simulator.scenarios import SCENARIOS
from ops.simulator.suite import Progress, Row, Table
from ops.simulator.types import PolicyContext, Result, Window
from subjects.messages import StepCosts


def say(_line: str) -> None:
    """Nobody listens."""


def number(figures: Figures, name: str) -> float:
    """A figure that must be there."""
    value = figures[name]
    assert isinstance(value, int | float)
    return float(value)


def test_one_model_doubles_while_another_halves() -> None:
    """On a full pool capacity changes hands, which a per-model autoscaler cannot do (SCH-3, SCH-4)."""
    found = opposite(1, 1, say, seconds=60.0, policies=("carpool", "hpa"))
    assert number(found, "carpool_within_slo_halves") >= 0.99
    assert number(found, "carpool_within_slo_doubles") > number(found, "hpa_within_slo_doubles") + 0.2
    assert number(found, "carpool_gpu_hours") <= number(found, "hpa_gpu_hours")
    assert found["hpa_new_capacity_s"] is None


def test_pulse_of_47_seconds_is_over_before_an_autoscaler_acts() -> None:
    """SPEC section 4: a pulse of 3x for 47 s is over before a per-model autoscaler reacts, and an idle tail follows."""
    found = pulse_47s(1, 1, say, tail_s=30.0, at_s=180.0, policies=("carpool", "hpa"))
    assert number(found, "carpool_new_capacity_s") < PULSE_47_S / 2
    assert found["hpa_new_capacity_s"] is None or number(found, "hpa_new_capacity_s") > PULSE_47_S
    assert number(found, "carpool_within_slo_in_pulse") > number(found, "hpa_within_slo_in_pulse") + 0.1
    assert number(found, "carpool_gpus_before") < number(found, "hpa_gpus_in_tail")


def test_impatient_clients_multiply_an_overload_and_the_pool_recovers_from_it() -> None:
    """Retries come, nobody tries for ever, and once the overload is over all is well again (OPS-6)."""
    found = impatient(1, 1, say, seconds=70.0, policies=("carpool",))
    assert number(found, "carpool_impatient_retries") > 0
    assert number(found, "carpool_patient_retries") == 0
    assert number(found, "carpool_impatient_refused") > 0
    assert number(found, "carpool_impatient_within_slo_last_minute") >= 0.99
    assert number(found, "carpool_impatient_within_slo_beside") >= 0.99


def test_impatient_client_waits_at_most_all_its_tries() -> None:
    """A first token that comes, comes within the time of all tries."""
    outcome = run_part(
        Part(workload=impatient_workload, policy="static", seed=1, arguments=(5.0,), options=RunOptions(patience=PATIENCE))
    )
    answered = outcome.run.measured.ttft_s[~outcome.run.measured.refused]
    assert answered.max() <= PATIENCE.wait_s * PATIENCE.tries_max + 1e-9


def test_gold_is_served_first_when_there_is_not_enough() -> None:
    """SCH-7: Gold reaches 99 % in a pool that is too small at times, and Silver pays little for it."""
    found = fairness(1, 1, say, seconds=180.0)
    assert number(found, "gold_within_slo_with") >= 0.99
    assert number(found, "gold_within_slo_without") < 0.95
    assert number(found, "silver_p95_s_with") <= 1.11 * number(found, "silver_p95_s_without")
    assert number(found, "bronze_within_slo_with") >= 0.5


def test_contention_pairs_are_the_workloads_own_models_at_their_own_load() -> None:
    """A pair's load is what each brings to the whole, so that beside and alone can be compared (OPS-9, second round)."""
    window = Window(0.0, 60.0, 120.0)
    whole = contention_workload(("small", "middle", "large"), 2).trace(1, window)
    pair = contention_workload(("small", "large"), 1)
    assert [model.name for model in pair.models] == ["small", "large"]
    trace = pair.trace(1, window)
    for mine, theirs in ((0, 0), (1, 2)):
        assert trace.arrival_s[trace.model == mine].tolist() == whole.arrival_s[whole.model == theirs].tolist()


class _Beside:
    """Stands for a run in which a target's p95 was this."""

    def __init__(self, p95_s: float | None) -> None:
        self.among: Callable[[str], None] = lambda _model: None
        self.completion: Callable[[None, float], float | None] = lambda _mine, _share: p95_s


@pytest.mark.parametrize(
    ("alone_s", "beside_s", "expected"),
    [(1.0, 1.35, 0.35), (1.0, 0.5, 0.0), (1.0, 9.0, 1.0), (2.0, 2.0, 0.0), (1.0, None, 1.0), (None, 1.0, 0.0)],
)
def test_interference_is_the_growth_of_p95_between_0_and_1(
    alone_s: float | None, beside_s: float | None, expected: float
) -> None:
    """SCH-7: max(0, p95 beside / p95 alone - 1), capped at 1; never answered beside is 1."""
    outcome = _Beside(beside_s)
    assert interference(alone_s, outcome, "m") == pytest.approx(expected)  # type: ignore[arg-type]


def test_largest_load_is_found_by_halving(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factor found bears the load and the next tried does not; both are told."""
    tried: list[float] = []

    def at_limit(limit: float) -> None:
        def fake(
            planned: Sequence[object], *, processes: int = 0, told: Callable[[Progress], None] = lambda _progress: None
        ) -> Table:
            case = getattr(planned[0], "case")  # noqa: B009
            assert isinstance(case, Case)
            tried.append(case.load)
            row = Row(case=case, policy="static", seed=1)
            row.result = _result(0.995 if case.load <= limit else 0.9)
            return Table(rows=[row])

        monkeypatch.setattr(scenario_limits, "run_suite", fake)

    for limit in (1.37, 0.12, 2.6):
        tried.clear()
        at_limit(limit)
        low, high = largest_load("static", 1, 1, say, minutes=1.0)
        assert low <= limit < high
        assert high / low < 1.3
        assert len(tried) <= scenario_limits.FACTOR_STEPS
    at_limit(0.0)
    assert largest_load("static", 1, 1, say)[0] == 0.0


class _Found:
    def __init__(self, worst: float) -> None:
        self.slo_worst_model = worst


def _result(worst: float) -> Result:
    return cast("Result", _Found(worst))


def test_clock_on_decisions_sees_every_tick_and_changes_nothing() -> None:
    """The time of a decision is taken on the very code that decides; a clock that is looked at changes no outcome."""
    made = opposite_workload(1.0)
    window = Window(0.0, 5.0, 20.0)
    context = PolicyContext(workload=made, window=window, trace=made.trace(1, window), seed=1)
    clocked, world = clocked_run(made, POLICIES["static"](context), 1, window)
    assert len(clocked.tick_s) == len(clocked.decide_s) >= 20.0 / RunOptions().tick_s - 1
    assert all(whole_s >= alone_s for whole_s, alone_s in zip(clocked.tick_s, clocked.decide_s, strict=True))
    again = clocked_run(made, POLICIES["static"](context), 1, window)[1]
    assert bytes(world.end_s) == bytes(again.end_s)


def test_load_of_scenarios_is_counted_in_what_a_replica_carries() -> None:
    """A replica that decodes n at once makes n tokens per step, less what prompts take."""
    from ops.simulator.types import SimModel

    costs = StepCosts(prefill_token_s=0.001, step_const_s=0.1)
    model = SimModel(name="m", costs=costs, weights_bytes=1, kv_bytes_per_token=1)
    assert capacity_rps(model, (100, 100), (10, 10), batch=10) == pytest.approx(1 / (0.1 + 10 * 0.01))


def test_every_scenario_says_what_it_answers() -> None:
    """``--list`` is the only place where a user learns of them."""
    assert {"pulse", "contention", "pulse-47s", "opposite", "impatient", "fairness", "load-factor", "scale"} <= set(
        SCENARIOS
    )
    assert all(10 < len(scenario.says) < 100 for scenario in SCENARIOS.values())


def test_outcome_of_nothing_is_no_failure() -> None:
    """A model that nobody asked for in some part of a run missed nothing there."""
    outcome = run_part(Part(workload=contention_workload, policy="static", seed=1, arguments=(("large",), 1)))
    nobody = outcome.among("large", begin_s=1e9)
    assert isinstance(outcome, Outcome)
    assert outcome.within_slo(nobody) == 1.0
    assert outcome.ttft(nobody, 0.99) is None
    assert outcome.queue_over_s("large", 1e9) is None
