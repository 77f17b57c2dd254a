"""What the scheduler's copies of buckets have in common: read once, then followed, however long the bus is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from broker.core.pool.events import SchedulerEvent
from profiles.registry import Registry
from subjects.bus import Bus, KvEntry, Subscription
from subjects.errors import BusError, ConfigError, DecodeError, place_of
from subjects.tasks import Tasks

RETRY_S = 0.5

_T = TypeVar("_T")
log = structlog.get_logger(__name__)


def readable(entry: KvEntry | None, read: Callable[[bytes], _T]) -> _T | None:
    """A bucket's value; None where there is none, or none that can be read."""
    try:
        return read(entry.value) if entry is not None else None
    except DecodeError as error:
        log.warning("a value of a bucket cannot be read", key=entry.key if entry is not None else "", error=str(error))
        return None


def _tasks() -> Tasks:
    return Tasks(lambda error: log.error("a task of what is kept in the bucket failed", error=place_of(error)))


@dataclass(eq=False, slots=True)
class BucketSync:
    """One bucket, and its mirror in the scheduler's SQLite file; the scheduler hears of changes as events."""

    _bus: Bus
    _registry: Registry
    _step: Callable[[SchedulerEvent], None]
    leads: Callable[[], bool]
    _watch: Subscription | None = field(default=None, init=False)
    _tasks: Tasks = field(default_factory=_tasks, init=False)
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """One change at a time: each reads what is stored before it writes."""

    async def start(self) -> None:
        """Reads all, restoring from the mirror what the bucket has lost, then follows it. Waits as long as it takes."""
        while True:
            try:
                self._watch = await self._load()
                return
            except BusError as error:
                log.debug("a bucket cannot be read yet", sync=type(self).__name__, reason=str(error))
                await asyncio.sleep(RETRY_S)

    async def stop(self) -> None:
        """Follows no more."""
        if self._watch is not None:
            await self._watch.stop()
        await self._tasks.end()

    async def _load(self) -> Subscription:
        """Reads what is there and begins to follow it.

        Raises:
            BusError: it is tried again.
        """
        raise NotImplementedError

    async def _mirror(self, write: Callable[..., object], *what: object) -> None:
        try:
            await asyncio.to_thread(write, *what)
        except ConfigError as error:
            # The truth is in the bucket: it is followed, and the mirror is filled at the next change or start.
            log.error("the mirror of a bucket is behind", sync=type(self).__name__, error=str(error))

    async def _mirrored(self, read: Callable[[], _T], nothing: _T) -> _T:
        try:
            return await asyncio.to_thread(read)
        except ConfigError as error:
            log.error("the mirror of a bucket cannot be read", sync=type(self).__name__, error=str(error))
            return nothing
