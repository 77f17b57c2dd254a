"""The policies that a scheduler can be told to follow."""

from __future__ import annotations

from broker.core.plan.policy import Policy
from subjects.errors import ConfigError

RULES = "rules"
"""The scheduler's own rules alone (``broker.core.scheduler``): models wake on demand, and share by turns."""
LEARNING = "carpool-learning"
"""The coordinator, learning which device suits which model while it serves (SCH-10)."""
POLICIES = ("carpool", LEARNING, RULES)
DEFAULT_POLICY = "carpool"
"""It decides about models whose costs are known; the others follow the rules beside it."""


def make_policy(name: str) -> Policy | None:
    """A fresh policy of that name; None stands for the rules alone.

    Raises:
        ConfigError: there is none of that name.
    """
    match name:
        case "carpool":
            from broker.core.plan.coordinator import Coordinator

            return Coordinator()
        case "carpool-learning":
            from broker.core.plan.coordinator import Coordinator, CoordinatorSettings

            return Coordinator(CoordinatorSettings(learns_devices=True))
        case "rules":
            return None
        case _:
            raise ConfigError(f"policy {name!r}: use one of {', '.join(POLICIES)}")
