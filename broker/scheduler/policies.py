"""The policies that a scheduler can be told to follow, with what may be set of them: ``carpool:gold=5000,keep_s=600``."""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec.structs import replace

from broker.core.plan.coordinator import Coordinator, CoordinatorSettings
from broker.core.plan.policy import Policy
from subjects.errors import ConfigError
from subjects.messages import SlaClass

DEFAULT_POLICY = "carpool"
LEARNING = "carpool-learning"
"""The same, learning which device suits which model while it serves (SCH-10)."""
POLICIES = (DEFAULT_POLICY, LEARNING)
_CLASSES = [sla_class.value for sla_class in SlaClass]
_Set = Callable[[CoordinatorSettings, float], CoordinatorSettings]
SETTINGS: dict[str, _Set] = {
    **{
        name: lambda s, value, place=place: replace(  # type: ignore[misc]  # a default binds the loop's variable
            s, class_values=(*s.class_values[:place], value, *s.class_values[place + 1 :])
        )
        for place, name in enumerate(_CLASSES)
    },
    "keep_s": lambda s, value: replace(s, keep_s=value),
    "models_per_device": lambda s, value: replace(s, residents_max=max(1, round(value))),
}
"""What all load of a class is worth, in devices; how long an idle model stays; how many may share a device."""


def make_policy(text: str) -> Policy:
    """A fresh policy of that name and with these settings.

    Raises:
        ConfigError: there is none of that name, or a setting is unknown or no number from 0 up.
    """
    name, _, words = text.partition(":")
    if name not in POLICIES:
        raise ConfigError(f"policy {name!r}: use one of {', '.join(POLICIES)}")
    settings = CoordinatorSettings(learns_devices=name == LEARNING)
    for word in filter(None, words.split(",")):
        key, _, number = word.partition("=")
        if (change := SETTINGS.get(key)) is None:
            raise ConfigError(f"policy {text!r}: no setting {key!r}; there are {', '.join(SETTINGS)}")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise ConfigError(f"policy {text!r}: {key}={number}: write a number from 0 up, such as {key}=600")
        settings = change(settings, value)
    return Coordinator(settings)
