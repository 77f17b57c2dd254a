"""Waiting for what happens elsewhere: the only loop that looks again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

WAIT_S = 20.0
"""Generous: tests share a small machine with each other."""
LOOK_EVERY_S = 0.01

T = TypeVar("T")


async def until(condition: Callable[[], T | None], what: str = "what the test waits for", *, within_s: float = WAIT_S) -> T:
    """The first true value of ``condition``; fails when there is none within the bound."""
    end_s = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < end_s, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(LOOK_EVERY_S)
    return value
