"""Starting and ending tasks, as every shell does it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
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


class Tasks:
    """The tasks that one part of a process runs beside each other: none fails unheard, and none outlives the part."""

    def __init__(self, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._running: set[asyncio.Task[Any]] = set()
        self._ended = False

    def spawn(self, *work: Coroutine[Any, Any, Any]) -> None:
        """Starts each of them; after :meth:`end` nothing is started any more."""
        for one in work:
            if self._ended:
                one.close()
                continue
            task = asyncio.get_running_loop().create_task(one)
            self._running.add(task)
            task.add_done_callback(self._done)

    async def end(self) -> None:
        """Cancels all and waits until they have ended; calling again does nothing."""
        self._ended = True
        await end_tasks(self._running)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)
