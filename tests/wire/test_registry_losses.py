"""What the registry loses on the server or on the disk comes back, and a deletion does not (PRO-2, PAINS L6)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from profiles.registry import Registry
from subjects import names
from subjects.codec import decode, encode
from subjects.messages import ModelRecord
from subjects.nats.bus import NatsBus
from tests.core.scheduler_world import record
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.test_scheduler import BOUND_S, rig_on


async def test_a_store_from_an_older_copy_loses_no_model(nats_server: NatsServer, tmp_path: Path) -> None:
    """What the mirror has in a later revision, or alone and never deleted, is written again; a deletion stays (PRO-2)."""
    registry = Registry(tmp_path / "s" / "registry.sqlite")
    for one in (record("a"), record("b", revision=2, max_num_seqs=3), record("c"), record("d")):
        registry.put(one)
    registry.close()
    async with rig_on(nats_server, tmp_path) as rig:
        await until(lambda: rig.bus.connected, "the bus is there")
        newer = record("d", revision=5)
        for one in (record("b"), newer):
            await rig.bus.kv_put(names.MODELS_BUCKET, one.name, encode(one))
        await rig.bus.kv_put(names.LOCKS_BUCKET, "deleted.c", b"1")
        scheduler = await rig.scheduler("s")
        await until(lambda: scheduler.core.leads, "leadership")
        expected = {"a": record("a"), "b": record("b", revision=2, max_num_seqs=3), "d": newer}
        assert scheduler.registry.records == expected
        assert await stored(rig.bus) == expected
        await rig.bus.kv_put(names.MODELS_BUCKET, "b", encode(record("b")))  # and while it runs
        end_s = time.monotonic() + BOUND_S
        while await stored(rig.bus) != expected:
            assert time.monotonic() < end_s
            await asyncio.sleep(0.05)
        assert scheduler.registry.records == expected


async def stored(bus: NatsBus) -> dict[str, ModelRecord]:
    """The bucket of models."""
    return {entry.key: decode(entry.value, ModelRecord) for entry in await bus.kv_entries(names.MODELS_BUCKET)}


async def test_a_deleted_name_goes_on_in_its_revisions(nats_server: NatsServer, tmp_path: Path) -> None:
    """A mirror from before the deletion must not win over the model that was applied after it."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await rig.scheduler()
        await until(lambda: scheduler.core.leads, "leadership")
        await rig.apply(record("a"))
        await rig.apply(record("a", max_num_seqs=3))
        await rig.control("delete", {"model": "a"})
        assert (await rig.apply(record("a")))[0]["revision"] == 3


async def test_a_mirror_that_cannot_be_written_stops_nothing(nats_server: NatsServer, tmp_path: Path) -> None:
    """A full disk: models are applied and deleted in the bucket, and the scheduler goes on (OPS: said in its log)."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await rig.scheduler()
        await until(lambda: scheduler.core.leads, "leadership")
        scheduler.registry._registry.close()
        assert (await rig.apply(record("a"), record("b")))[0]["revision"] == 1
        await rig.control("delete", {"model": "b"})
        assert sorted(await stored(rig.bus)) == ["a"]
        assert not scheduler.broken.done()
