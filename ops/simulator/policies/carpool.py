"""Ours (``broker.core.plan.coordinator``), and itself without one mechanism each: which of them wins what.

- ``no-forecast``: capacity follows what arrives now; no headroom for bursts is learned, no spares wait for them, and
  nothing of ``broker.core.plan.prewarming`` is asked: seasons, declared events, readings of the engines.
- ``no-coresidence``: every replica has its devices for itself.
- ``no-resize``: a replica keeps the KV budget that it was loaded with.
- ``no-grouping``: nothing keeps requests of one model together on what is loaded: no minimum residency, no calm between
  moves, no capacity kept for those that come next.
"""

from __future__ import annotations

from broker.core.plan.coordinator import Coordinator, CoordinatorSettings
from ops.simulator.types import PolicyContext


class _Named(Coordinator):
    """Under another name in the tables."""

    def __init__(self, name: str, settings: CoordinatorSettings) -> None:
        super().__init__(settings)
        self.name = name


def carpool(context: PolicyContext) -> Coordinator:
    """Factory of ``carpool``."""
    return Coordinator()


def without_forecast(context: PolicyContext) -> Coordinator:
    """Factory of ``carpool-no-forecast``."""
    return _Named("carpool-no-forecast", CoordinatorSettings(learns_headroom=False, spare_level=0.0, foresees=False))


def without_coresidence(context: PolicyContext) -> Coordinator:
    """Factory of ``carpool-no-coresidence``."""
    return _Named("carpool-no-coresidence", CoordinatorSettings(shares_devices=False))


def without_resize(context: PolicyContext) -> Coordinator:
    """Factory of ``carpool-no-resize``."""
    return _Named("carpool-no-resize", CoordinatorSettings(resizes_kv=False))


def without_grouping(context: PolicyContext) -> Coordinator:
    """Factory of ``carpool-no-grouping``."""
    settings = CoordinatorSettings(
        need_keep_s=0.0, need_keep_lives=0.0, residency_s=0.0, calm_s=0.0, close_s=0.0, keep_s=60.0
    )
    return _Named("carpool-no-grouping", settings)
