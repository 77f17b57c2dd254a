"""Fixed experiments with figures of their own, each ``carpool simulate --scenario NAME``.

A scenario answers one question with a few scalars; what it compares with is in the same answer. The tests run the same code
on smaller loads. Their own loads are in ``scenario_loads``; ``scenario_limits`` looks for how far something goes, and
the reports at what the scheduler knows rather than at what it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ops.simulator import forecast_report, learning_report, scenario_limits, scenario_loads, twu_report
from ops.simulator.scenario import Figures, Say


@dataclass(frozen=True, slots=True)
class Scenario:
    """``run`` gets the seed, how many processes it may use (0: one per core) and where to tell what it does."""

    says: str
    """One line of what it answers."""
    run: Callable[[int, int, Say], Figures]


SCENARIOS: dict[str, Scenario] = {
    "pulse": Scenario(
        "100 to 800 requests/s in 20 s, and in one step: time to new capacity, growth of P99", scenario_loads.pulse
    ),
    "contention": Scenario("three models on two GPUs, 70/20/10: interference per pair", scenario_loads.contention),
    "pulse-47s": Scenario(
        "a pulse of three times the load for 47 s, beside a per-model autoscaler", scenario_loads.pulse_47s
    ),
    "opposite": Scenario("one model doubles while another halves, on a full pool", scenario_loads.opposite),
    "impatient": Scenario("clients that hang up after 2 s and come again", scenario_loads.impatient),
    "fairness": Scenario("Gold and Silver under overload, with and without taking turns by class", scenario_loads.fairness),
    "load-factor": Scenario("largest load of five-lines on 8 GPUs with every model at 99 %", scenario_limits.load_factor),
    "scale": Scenario("200 models on 1,000 GPUs: time of a decision on one core", scenario_limits.scale),
    "learning": Scenario("variance of p95 on unlike devices, with learned scores and without", learning_report.report),
    "twu-lead": Scenario("how long before congestion TWU warns, beside utilisation", twu_report.report),
    "forecast": Scenario("how right the forecast is, beside naive and seasonal-naive", forecast_report.report),
}
"""By name."""
