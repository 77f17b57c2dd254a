"""The simulator against reality: one load of two models on real vLLM engines, and simulated with a measured profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


async def compare(*, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures, runs the load on both, and returns the figures with ``ok``."""
    raise NotImplementedError
