"""Keeps a prefix index fed, a gateway's or a node's: what nodes say of their KV, and snapshots of what was missed.

Snapshots are asked for page by page, a few nodes at a time and each after a random pause, so that a bus that comes back
does not have everybody ask every node at once. Nothing here is on a request's way: without nodes, or while they do not
answer, requests go where there is most room, and nodes fetch nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import structlog

from kvcache.core.prefix_index import PrefixIndex
from subjects import names
from subjects.bus import Bus, BusMessage, Subscription
from subjects.codec import decode, encode
from subjects.errors import BusError, DecodeError, place_of
from subjects.ids import WorkerId
from subjects.messages import KvAsk, KvIndexed, KvSnapshot
from subjects.tasks import Tasks

SNAPSHOTS_AT_ONCE_MAX = 4
SNAPSHOT_PAUSE_S_MAX = 1.0
"""Before the first page of a node's snapshot; drawn anew each time."""
PAGE_TIMEOUT_S = 2.0
PAGE_PAUSE_S = 0.002
"""Between two pages: requests go first."""
PAGES_MAX = 4096
"""Of one node in one go."""
TRIES_MAX = 3
"""Of one page; then the node is asked again after ``RETRY_S``."""
RETRY_S = 10.0
LOOK_EVERY_S = 1.0

log = structlog.get_logger(__name__)


class IndexSync:
    """Follows all nodes but ``asker``'s own, the name under which their snapshots are asked for."""

    def __init__(self, bus: Bus, index: PrefixIndex, asker: str, *, discarded: Callable[[str], None]) -> None:
        self._bus = bus
        self._index = index
        self._asker = WorkerId(asker)
        self._discarded = discarded
        self._subscription: Subscription | None = None
        self._tasks = Tasks(lambda error: log.error("a snapshot of KV was not read", error=place_of(error)))
        self._asking: dict[WorkerId, None] = {}
        self._not_before_s: dict[WorkerId, float] = {}
        self._turns = asyncio.Semaphore(SNAPSHOTS_AT_ONCE_MAX)

    async def start(self) -> None:
        """Begins to listen; works without a bus, which may come later."""
        self._subscription = await self._bus.subscribe(names.ALL_KV_INDEX, self._on_indexed)
        self._tasks.spawn(self._look())

    async def stop(self) -> None:
        """Listens no more."""
        if self._subscription is not None:
            await self._subscription.stop()
        await self._tasks.end()

    def _on_indexed(self, message: BusMessage) -> None:
        try:
            news = decode(message.payload, KvIndexed)
        except DecodeError:
            self._discarded("kv-indexed")
            return
        if names.kv_index(news.worker) != message.subject:
            self._discarded("kv-indexed")  # a node speaks for its own worker only, as its credentials have it
            return
        if news.worker != self._asker and self._index.indexed(time.monotonic(), news):
            self._not_before_s.pop(news.worker, None)
            self._ask(news.worker)

    async def _look(self) -> None:
        """Forgets the silent, and asks those again that have not told all."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now_s = time.monotonic()
            for worker in self._index.expire(now_s):
                log.info("a worker's node is silent; its KV counts no more", worker=worker)
            wanting = self._index.wanting()
            self._not_before_s = {one: at_s for one, at_s in self._not_before_s.items() if one in wanting}
            for worker in wanting:
                if now_s >= self._not_before_s.get(worker, 0.0):
                    self._ask(worker)

    def _ask(self, worker: WorkerId) -> None:
        if worker not in self._asking:
            self._asking[worker] = None
            self._tasks.spawn(self._read_snapshot(worker))

    async def _read_snapshot(self, worker: WorkerId) -> None:
        try:
            async with self._turns:
                await asyncio.sleep(random.uniform(0.0, SNAPSHOT_PAUSE_S_MAX))  # noqa: S311 - no secret
                tries = 0
                for _ in range(PAGES_MAX):
                    cursor = self._index.wanted_page(worker)
                    if cursor is None:
                        return
                    if await self._read_page(worker, cursor):
                        tries = 0
                    elif (tries := tries + 1) == TRIES_MAX:
                        break
                    await asyncio.sleep(PAGE_PAUSE_S)
        finally:
            self._asking.pop(worker, None)
            self._not_before_s[worker] = time.monotonic() + RETRY_S

    async def _read_page(self, worker: WorkerId, cursor: bytes) -> bool:
        ask = KvAsk(worker=self._asker, snapshot=True, cursor=cursor)
        try:
            payload = await self._bus.request(names.kv_ask(worker), encode(ask), timeout_s=PAGE_TIMEOUT_S)
            page = decode(payload, KvSnapshot)
        except BusError as error:
            log.debug("a node did not tell what KV it has", worker=worker, error=str(error))
            return False
        except DecodeError:
            self._discarded("kv-snapshot")
            return False
        return page.worker == worker and self._index.page(time.monotonic(), page, cursor) is not None
