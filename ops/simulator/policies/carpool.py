"""Ours (``broker.core.coordinator``), and itself without one mechanism each: which of them wins what."""

from __future__ import annotations

from broker.core.coordinator import Coordinator, CoordinatorSettings
from ops.simulator.types import PolicyContext


class _Named(Coordinator):
    """Under another name in the tables."""

    def __init__(self, name: str, settings: CoordinatorSettings) -> None:
        super().__init__(settings)
        self.name = name


def carpool(context: PolicyContext) -> Coordinator:
    """Factory of ``carpool``."""
    return Coordinator()


def without_coresidence(context: PolicyContext) -> Coordinator:
    """Every replica has its devices for itself."""
    return _Named("carpool-no-coresidence", CoordinatorSettings(shares_devices=False))


def without_resize(context: PolicyContext) -> Coordinator:
    """A replica keeps the KV budget that it was loaded with."""
    return _Named("carpool-no-resize", CoordinatorSettings(resizes_kv=False))
