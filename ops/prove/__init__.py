"""Proofs: the fixed oracles of a part, run on real processes (``carpool prove PART``).

Each part is a module with ``run(say) -> dict``: figures by name, of which ``ok`` says whether every bound held. The bounds
stand beside the figures they judge.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

PARTS = {
    "main-job": "ops.prove.main_job",
    "scheduler": "ops.prove.scheduler",
    "capacity": "ops.prove.capacity",
    "kv": "ops.prove.kv",
}


async def prove(part: str, say: Callable[[str], None], only: tuple[str, ...] = (), seed: int = 0) -> dict[str, Any]:
    """Runs one part (or only the named oracles of it) and returns its figures."""
    module = importlib.import_module(PARTS[part])
    result: dict[str, Any] = await module.run(say, only, seed)
    return result
