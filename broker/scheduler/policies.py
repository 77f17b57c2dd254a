"""The policies that a scheduler can be told to follow."""

from __future__ import annotations

from broker.core.plan.coordinator import Coordinator, CoordinatorSettings
from broker.core.plan.policy import Policy
from subjects.errors import ConfigError

DEFAULT_POLICY = "carpool"
LEARNING = "carpool-learning"
"""The same, learning which device suits which model while it serves (SCH-10)."""
POLICIES = (DEFAULT_POLICY, LEARNING)


def make_policy(name: str) -> Policy:
    """A fresh policy of that name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in POLICIES:
        raise ConfigError(f"policy {name!r}: use one of {', '.join(POLICIES)}")
    return Coordinator(CoordinatorSettings(learns_devices=name == LEARNING))
