"""Ending tasks, as every shell does it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

CANCEL_AGAIN_S = 0.2


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels and waits until all have ended.

    Once is not enough: ``asyncio.wait_for`` of Python 3.11, which the bus client uses too, loses a cancellation that comes
    in the same moment as the result it waits for. The task then goes on, and whoever gathers it waits for ever.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
