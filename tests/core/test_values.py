"""What the cores take and give are values: whoever keeps one, nobody can change it for the others."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pkgutil
import types
from typing import Any

import msgspec
import pytest

import broker.core
import workers.core

MODULES = [
    importlib.import_module(found.name)
    for package in (broker.core, workers.core)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
CLASSES = sorted(
    {
        found
        for module in MODULES
        for _, found in inspect.getmembers(module, inspect.isclass)
        if found.__module__ == module.__name__
    },
    key=lambda found: (found.__module__, found.__qualname__),
)
DATA = [found for found in CLASSES if dataclasses.is_dataclass(found)]
# What a core keeps and changes itself. Everything else is an event, a command, a setting or an answer.
STATE = {
    "broker.core.plan.costs.Account",
    "broker.core.plan.memory.Memory",
    "broker.core.plan.problem.Look",
    "broker.core.plan.turns.Turns",
    "broker.core.plan.standby.Spares",
    "_Account",
    "_Cell",
    "_Charge",
    "_Tracker",
    "Correction",
    "Series",
    "_Class",
    "_Factor",
    "_Ingress",
    "_Judged",
    "_Known",
    "_Link",
    "_Look",
    "_Model",
    "_Queue",
    "_Seen",
    "_Sequence",
    "_Slot",
    "_Spares",
    "_Taken",
    "Actions",
    "Choice",
    "DigestBuilder",
    "Feasibility",
    "Flow",
    "HeldRequest",
    "Link",
    "LiveRequest",
    "Model",
    "ModelNeed",
    "Operation",
    "Outcomes",
    "PendingChange",
    "Recorded",
    "Replica",
    "Step",
    "Transaction",
    "Unconfirmed",
    "Victim",
    "ViewBuilder",
    "Worker",
    "broker.core.pool.members.Device",
}


def name_of(found: type) -> str:
    """The name that a failed test shows."""
    return f"{found.__module__}.{found.__qualname__}"


@pytest.mark.parametrize("data", DATA, ids=name_of)
def test_values_are_frozen(data: Any) -> None:
    """No field of an event, command, setting or answer can be assigned."""
    assert data.__dataclass_params__.frozen is STATE.isdisjoint({data.__name__, name_of(data)})


def test_events_and_commands_are_values() -> None:
    """Every member of a union of events or commands is a dataclass or a struct, those without fields too: equal ones are
    equal."""
    members = {
        member
        for module in MODULES
        for found in vars(module).values()
        if isinstance(found, types.UnionType)
        for member in found.__args__
        if member in CLASSES
    }
    assert len(members) > 60
    assert sorted(name_of(each) for each in members if each not in DATA and not issubclass(each, msgspec.Struct)) == []


@pytest.mark.parametrize("data", DATA, ids=name_of)
def test_a_mistyped_field_is_an_error(data: Any) -> None:
    """Slots: assigning a field that does not exist cannot go unnoticed, and a hundred thousand requests fit in memory."""
    assert not any("__dict__" in vars(base) for base in data.__mro__)


@pytest.mark.parametrize("body", [found for found in CLASSES if issubclass(found, msgspec.Struct)], ids=name_of)
def test_what_was_decoded_stays_as_it_was(body: Any) -> None:
    """Parts of bodies that clients sent are values too."""
    assert body.__struct_config__.frozen


@pytest.mark.parametrize("states", [found for found in CLASSES if issubclass(found, enum.Enum)], ids=name_of)
def test_states_are_distinct(states: type[enum.Enum]) -> None:
    """No two names of a state mean the same state."""
    assert list(states.__members__) == [state.name for state in states]
