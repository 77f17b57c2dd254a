"""What an engine has to say, on its way to ``steps()``: deltas in order, silence after an abort, and the engine's death."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec

from subjects.errors import EngineError
from subjects.messages import Delta
from workers.core.held_request import Key


class _Over(msgspec.Struct, frozen=True):
    key: Key


class Outbox:
    """One consumer, on the event loop it was made for. What waits here is bounded by the output of the requests that run."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Sequence[Delta] | _Over | EngineError] = asyncio.Queue()
        self._muted: set[Key] = set()

    def put(self, deltas: Sequence[Delta]) -> None:
        """Adds the deltas of one step."""
        self._queue.put_nowait(deltas)

    def die(self, error: EngineError) -> None:
        """Makes ``steps()`` raise after what was put before."""
        self._queue.put_nowait(error)

    def mute(self, key: Key) -> bool:
        """From now on nothing of ``key`` comes out; False if that was so already."""
        if key in self._muted:
            return False
        self._muted.add(key)
        return True

    def over(self, key: Key) -> None:
        """Nothing more of a muted ``key`` will be put."""
        self._queue.put_nowait(_Over(key))

    async def steps(self) -> AsyncIterator[Sequence[Delta]]:
        """All deltas that wait, as one item; waits for the first."""
        while True:
            items = [await self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get_nowait())
            deltas: list[Delta] = []
            death: EngineError | None = None
            for item in items:
                if isinstance(item, EngineError):
                    death = death or item
                elif isinstance(item, _Over):
                    self._muted.discard(item.key)
                else:
                    deltas.extend(delta for delta in item if (delta.request, delta.attempt) not in self._muted)
            if deltas:
                yield deltas
            if death is not None:
                raise death
