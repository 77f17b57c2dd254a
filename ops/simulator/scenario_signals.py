"""Scenarios about what the scheduler knows rather than what it does."""

from __future__ import annotations

from ops.simulator.scenario import Figures, Say


def forecast(seed: int, processes: int, say: Say) -> Figures:
    """How right the forecast is over a public week and over five-lines' day (``forecast_report``), beside naive ones."""
    from ops.simulator.forecast_report import report

    figures: Figures = {}
    for name in ("week", "five-lines"):
        say(f"{name}, second by second")
        figures |= report(name, seed)
    return figures


def twu_lead(seed: int, processes: int, say: Say) -> Figures:
    """How long before congestion TWU warns, and utilisation at a level that is as quiet (``twu_report``)."""
    from ops.simulator.twu_report import report

    found = report(seed, say=say)
    return {name: value for name, value in found.items() if isinstance(value, int | float) or value is None}


def learning(seed: int, processes: int, say: Say) -> Figures:
    """Variance over time of p95 with and without learned scores of devices (``learning_report``)."""
    from ops.simulator.learning_report import report

    say("pools of unlike devices, an hour each, with learning and without")
    return {name: value for name, value in report(seed).items() if isinstance(value, int | float)}
