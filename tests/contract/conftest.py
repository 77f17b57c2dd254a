"""Both forms of the bus behind one fixture, so that every contract test runs on each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from subjects.bus import Bus, QueueLimits
from subjects.memory_bus import MemoryBus
from subjects.memory_hub import LoopClock, MemoryHub
from subjects.memory_queue import Timer
from subjects.nats.bus import NatsBus
from tests.servers import NatsServer
from tests.waiting import until

WAIT_S = 15.0
LIMITS = QueueLimits(messages_max=8, bytes_max=1024 * 1024)


class Backend:
    """A server of either form, and connections to it."""

    shards = 2
    pace = 1.0
    """Seconds of the bus per second."""

    def __init__(self) -> None:
        self.buses: list[Bus] = []

    async def connect(self) -> Bus:
        """A new connection."""
        bus = await self._connect()
        self.buses.append(bus)
        return bus

    async def _connect(self) -> Bus:
        raise NotImplementedError

    async def sleep(self, bus_s: float) -> None:
        """Lets time of the bus pass."""
        await asyncio.sleep(bus_s / self.pace)

    async def restart(self) -> None:
        """kill -9 and start again: memory streams and consumers are lost, files are not. Waits for the connections."""
        await self._restart()
        await until(lambda: all(bus.connected for bus in self.buses))

    async def _restart(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """Closes all connections."""
        for bus in self.buses:
            await bus.close()


class FastClock(LoopClock):
    """Ten seconds in one: the in-memory bus waits for nobody else."""

    pace = 10.0

    def now(self) -> float:
        """Seconds of the bus."""
        return super().now() * self.pace

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        """Calls back sooner."""
        return super().call_later(delay_s / self.pace, callback)


class MemoryBackend(Backend):
    """A hub on a fast clock."""

    pace = FastClock.pace

    def __init__(self) -> None:
        super().__init__()
        self.hub = MemoryHub(FastClock(), shards=self.shards, limits=LIMITS)

    async def _connect(self) -> Bus:
        return MemoryBus(self.hub)

    async def _restart(self) -> None:
        self.hub.stop(lose_memory=True)
        await asyncio.sleep(0.01)
        self.hub.start()


class NatsBackend(Backend):
    """A real nats-server."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.server = NatsServer(directory)

    async def _connect(self) -> Bus:
        return await NatsBus.connect(self.server.url, name="contract", shards=self.shards, limits=LIMITS)

    async def _restart(self) -> None:
        await asyncio.to_thread(self.server.kill)
        await until(lambda: not any(bus.connected for bus in self.buses))
        await asyncio.to_thread(self.server.start)


@pytest.fixture(params=["memory", "nats"])
async def backend(request: pytest.FixtureRequest, no_child_is_left: None, tmp_path: Path) -> AsyncIterator[Backend]:
    """A fresh server of each form."""
    found: Backend = MemoryBackend() if request.param == "memory" else NatsBackend(tmp_path / "nats")
    yield found
    await found.close()
    if isinstance(found, NatsBackend):
        found.server.stop()


@pytest.fixture
async def bus(backend: Backend) -> Bus:
    """A connection to it."""
    return await backend.connect()
