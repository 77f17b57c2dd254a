"""A real server behind one fixture, and connections to it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator

import pytest

from subjects.bus import Bus, QueueLimits
from subjects.nats.bus import NatsBus
from tests.servers import NatsServer
from tests.waiting import until

LIMITS = QueueLimits(messages_max=8, bytes_max=1024 * 1024)


class Backend:
    """A nats-server, and connections to it."""

    shards = 2

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.buses: list[Bus] = []

    async def connect(self) -> Bus:
        """A new connection."""
        bus = await NatsBus.connect(self.server.url, name="contract", shards=self.shards, limits=LIMITS)
        self.buses.append(bus)
        return bus

    async def restart(self) -> None:
        """kill -9 and start again: memory streams and consumers are lost, files are not. Waits for the connections."""
        await asyncio.to_thread(self.server.kill)
        await until(lambda: not any(bus.connected for bus in self.buses))
        await asyncio.to_thread(self.server.start)
        await until(lambda: all(bus.connected for bus in self.buses))

    async def lose_files(self) -> None:
        """The same with an empty disk: buckets and streams are gone too."""
        await asyncio.to_thread(self.server.kill)
        await until(lambda: not any(bus.connected for bus in self.buses))
        for entry in self.server.directory.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
        await asyncio.to_thread(self.server.start)
        await until(lambda: all(bus.connected for bus in self.buses))

    async def close(self) -> None:
        """Closes all connections."""
        for bus in self.buses:
            await bus.close()


@pytest.fixture
async def backend(nats_server: NatsServer) -> AsyncIterator[Backend]:
    """A fresh server."""
    found = Backend(nats_server)
    yield found
    await found.close()


@pytest.fixture
async def bus(backend: Backend) -> Bus:
    """A connection to it."""
    return await backend.connect()
