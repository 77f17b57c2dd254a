"""Why nobody leads is said, and who leads next has a higher epoch (SCH-12)."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from structlog.testing import capture_logs

from broker.scheduler.lease import LeaseKeeper
from subjects.bus import Bus
from subjects.errors import BusError
from subjects.nats.bus import NatsBus
from tests.servers import NatsServer
from tests.waiting import until


class _FullDisk(NatsBus):
    full = False

    async def kv_put(self, bucket: str, key: str, value: bytes, *, expected_revision: int | None = None) -> int:
        if self.full:
            raise BusError("no space left on device")
        return await super().kv_put(bucket, key, value, expected_revision=expected_revision)


async def test_a_lease_that_cannot_be_written_says_why(nats_server: NatsServer) -> None:
    """A server whose disk is full still carries messages, so the loss of the leader is all that shows."""
    bus, lost = await _FullDisk.connect(nats_server.url, name="s"), list[str]()
    assert isinstance(bus, _FullDisk)
    keeper = LeaseKeeper(bus, "s", epoch_seen=lambda: 0, on_gained=lambda _: None, on_lost=lost.append)
    with capture_logs() as logs:
        running = asyncio.create_task(keeper.run())
        await until(lambda: keeper.holds, "it leads")
        bus.full = True
        await until(lambda: bool(lost), "it counts itself out")
        bus.full = False
        await until(lambda: keeper.holds, "it leads again")
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    await bus.close()
    assert lost == ["the lease could not be renewed in time (no space left on device)"]
    assert all("no space" in entry["reason"] for entry in logs if entry["log_level"] == "warning")


async def _lead_once(bus: Bus, holder: str) -> int:
    """Leads, gives the lease back, and returns the epoch."""
    keeper = LeaseKeeper(bus, holder, epoch_seen=lambda: 0, on_gained=lambda _: None, on_lost=lambda _: None)
    running = asyncio.create_task(keeper.run())
    await until(lambda: keeper.holds, f"{holder} leads")
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    await keeper.release()
    return keeper.epoch


async def test_epochs_go_on_after_a_lease_was_given_back(nats_server: NatsServer) -> None:
    """A pool that is ended and started again names no operation as one of its journal is named (SCH-12)."""
    bus = await NatsBus.connect(nats_server.url, name="s")
    assert await _lead_once(bus, "first") < await _lead_once(bus, "second")
    await bus.close()
