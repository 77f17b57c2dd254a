"""Fixed experiments with figures of their own, each ``carpool simulate --scenario NAME``.

A scenario answers one question with a few scalars; what it compares with is in the same answer. Those that the tests rely on
take their size as arguments, so that a test runs the same code on a small pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Say = Callable[[str], None]
Figure = float | int | str | bool | None | list[float] | dict[str, float]
Figures = dict[str, Figure]


@dataclass(frozen=True, slots=True)
class Scenario:
    """``run`` gets the seed, how many processes it may use (0: one per core) and where to tell what it does."""

    says: str
    """One line of what it answers."""
    run: Callable[[int, int, Say], Figures]


SCENARIOS: dict[str, Scenario] = {}
"""By name."""
