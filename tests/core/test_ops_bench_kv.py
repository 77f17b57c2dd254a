"""The parts of ``carpool bench kv`` are found by name: no type checker sees whether they take what they are given."""

from __future__ import annotations

import importlib
import inspect

import pytest

from ops.bench.kv import PARTS


@pytest.mark.parametrize("part", PARTS)
def test_each_part_takes_the_settings_of_the_command(part: str) -> None:
    """One that took a mapping instead ended with an AttributeError, and no check had seen it."""
    measure = importlib.import_module(f"ops.bench.kv_{part}").measure

    assert inspect.iscoroutinefunction(measure)
    assert [one.annotation for one in inspect.signature(measure).parameters.values()] == ["KvBench"]
