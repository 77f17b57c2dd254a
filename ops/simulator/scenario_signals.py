"""Scenarios about what the scheduler knows: its forecast, the lead of TWU, what learning changes."""

from __future__ import annotations

from ops.simulator.scenario import Figures, Say


def forecast(seed: int, processes: int, say: Say) -> Figures:
    """To come."""
    return {}
