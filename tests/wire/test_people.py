"""Locks, drains and modes through a scheduler on a real nats-server: kept, obeyed, given back (SCH-9, SCH-11)."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.scheduler.shell import Scheduler
from profiles.registry import Registry
from subjects import names
from subjects.codec import decode, encode
from subjects.errors import BusError, DecodeError
from subjects.ids import base_name
from subjects.messages import (
    ControlReply,
    ControlRequest,
    DeclaredLoad,
    DrainReplica,
    LoadModel,
    Override,
    OverrideKind,
    Overrides,
)
from tests.core.scheduler_world import record
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.test_scheduler import Rig, rig_on


async def led(rig: Rig, name: str = "s") -> Scheduler:
    """A scheduler that leads."""
    scheduler = await rig.scheduler(name)
    await until(lambda: scheduler.core.leads, "leadership")
    return scheduler


async def refused(rig: Rig, verb: str, argument: dict[str, Any]) -> str:
    """What a verb says against."""
    payload = encode(ControlRequest(argument=msgspec.json.encode(argument)))
    return decode(await rig.bus.request(names.control(verb), payload, timeout_s=5.0), ControlReply).error


async def test_a_locked_model_is_left_alone_and_orders_are_obeyed(nats_server: NatsServer, tmp_path: Path) -> None:
    """Nothing starts it, nothing evicts it; a person's unload does; an unlock gives it back (SCH-11)."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await led(rig)
        await rig.apply(record("a", aliases=("first",)), record("b"))
        rig.waiting = {"a": 1}
        await until(lambda: rig.agent.ready == ["a"], "a is loaded")
        assert await rig.control("lock", {"model": "first"}) == {"model": "a", "locked": True, "changed": True}
        assert (await rig.control("lock", {"model": "a"}))["changed"] is False
        rig.waiting = {"b": 1}
        await asyncio.sleep(0.7)  # b may evict an idle a after half a second of residency
        assert rig.agent.ready == ["a"]
        rows = {row["name"]: row for row in await rig.control("get", {"what": "models"})}
        assert rows["a"]["note"] == "locked"
        await rig.control("unload", {"model": "a"})
        await until(lambda: rig.agent.ready == ["b"], "the order is obeyed, and b takes the room")
        rig.waiting = {"a": 1}
        await asyncio.sleep(0.7)
        assert (
            rig.agent.ready == ["b"] and [c for c in rig.agent.commands if isinstance(c, LoadModel)][-1].record.name == "b"
        )
        assert (await rig.control("unlock", {"model": "a"}))["changed"] is True
        await until(lambda: rig.agent.ready == ["a"], "a may start again")
        assert (await rig.control("unlock", {"model": "a"}))["changed"] is False
        assert scheduler.overrides.known == Overrides(revision=2)


async def test_a_drained_worker_empties_and_stays_empty(nats_server: NatsServer, tmp_path: Path) -> None:
    """Within its bound; pins do not hold; nothing comes until it is given back (SCH-9)."""
    async with rig_on(nats_server, tmp_path) as rig:
        await led(rig)
        await rig.apply(record("a"))
        await rig.control("pin", {"model": "a"})
        rig.waiting = {"a": 1}
        await until(lambda: rig.agent.ready == ["a"], "a is loaded")
        async with asyncio.timeout(20):  # The scheduler hears of it a moment later.
            while not await rig.control("get", {"what": "replicas"}):
                await asyncio.sleep(0.02)
        worker = base_name(rig.agent.worker)
        told = await rig.control("drain", {"worker": rig.agent.worker, "bound_s": 7})
        assert told == {"worker": worker, "replicas": 1, "running": 0, "changed": True}
        await until(lambda: rig.agent.ready == [], "it is empty")
        assert [c.timeout_s for c in rig.agent.commands if isinstance(c, DrainReplica)] == [7.0]
        (device,) = await rig.control("get", {"what": "devices"})
        assert device["note"] == "drained"
        await asyncio.sleep(0.5)
        assert rig.agent.ready == []
        await rig.control("unlock", {"worker": worker})
        await until(lambda: rig.agent.ready == ["a"], "a is back")


async def test_a_locked_device_lets_nothing_come_or_go(nats_server: NatsServer, tmp_path: Path) -> None:
    """By its full name, or alone where it is the only one of that name; a replica can be locked and drained too (SCH-11)."""
    async with rig_on(nats_server, tmp_path) as rig:
        await led(rig)
        await rig.apply(record("a"), record("b"))
        rig.waiting = {"a": 1}
        await until(lambda: rig.agent.ready == ["a"], "a is loaded")
        device = f"{base_name(rig.agent.worker)}/cpu0"
        assert (await rig.control("lock", {"device": "cpu0"}))["device"] == device
        rig.waiting = {"b": 1}
        await asyncio.sleep(0.7)
        assert rig.agent.ready == ["a"]
        (row,) = await rig.control("get", {"what": "devices"})
        assert row["note"] == "locked"
        (replica,) = await rig.control("get", {"what": "replicas"})
        assert (await rig.control("lock", {"replica": replica["replica"]}))["changed"] is True
        assert (await rig.control("unlock", {"device": f"{rig.agent.worker}/cpu0"}))["changed"] is True
        await asyncio.sleep(0.7)
        assert rig.agent.ready == ["a"]  # the replica's own lock holds
        locks = await rig.control("get", {"what": "locks"})
        assert [(lock["kind"], lock["about"]) for lock in locks] == [("replica-lock", replica["replica"])]
        told = await rig.control("drain", {"replica": replica["replica"], "bound_s": 0})
        assert told["replicas"] == 1
        await until(lambda: rig.agent.ready == ["b"], "the drain wins over the lock, and b takes the room")


async def test_a_mode_is_set_and_taken_back(nats_server: NatsServer, tmp_path: Path) -> None:
    """It wins over the record until ``default``."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await led(rig)
        await rig.apply(record("a"))
        assert (await rig.control("mode", {"model": "a", "mode": "advise"}))["mode"] == "advise"
        assert scheduler.core.catalogue.mode(record("a").deployment).value == "advise"
        assert (await rig.control("mode", {"model": "a", "mode": "default"}))["mode"] == "act"
        assert scheduler.core.catalogue.mode(record("a").deployment).value == "act"
        await rig.control("lock", {"model": "a"})
        await rig.control("delete", {"model": "a"})
        assert scheduler.overrides.known.entries == ()


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("lock", {}, "name exactly one of model, device, replica"),
    ("lock", {"model": "a", "device": "cpu0"}, "name exactly one of"),
    ("lock", {"model": "nobody"}, "known models: a"),
    ("lock", {"device": "cpu7"}, "known devices: w/cpu0"),
    ("lock", {"replica": "r-9"}, "carpool get replicas"),
    ("lock", {"model": 3}, "model: expected `str | null`, got `int`"),
    ("unlock", {"worker": ""}, "worker: expected `str` of length >= 1"),
    ("unlock", {"model": "nobody"}, "is not applied"),
    ("drain", {"worker": "nobody"}, "known workers: w"),
    ("drain", {"worker": "w", "bound_s": -1}, "bound_s: expected `float` >= 0.0"),
    ("drain", {"worker": "w", "bound_s": 3601}, "bound_s: expected `float` <= 3600.0"),
    ("drain", {"worker": "w", "bound_s": True}, "bound_s: expected `float | null`, got `bool`"),
    ("mode", {"model": "a", "mode": "dance"}, "is not one of observe, advise, act, default"),
    ("explain", {}, "missing required field `what`"),
    ("explain", {"what": "nobody"}, "no request id"),
    ("explain", {"what": "gateway-0123456789-7"}, "no gateway 'gateway-0123456789' runs"),
]


async def test_what_people_say_wrong(nats_server: NatsServer, tmp_path: Path) -> None:
    """One line with what is known instead, and nothing is kept of it."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await led(rig)
        await rig.apply(record("a"))
        await until(lambda: bool(scheduler.core.pool.devices(usable=True)), "the device is known")
        for verb, argument, words in WRONG:
            assert words in await refused(rig, verb, argument), (verb, argument)
        assert scheduler.overrides.known == Overrides()


async def test_a_verb_that_fails_inside_is_answered(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its kind and no more, since its text may quote anything; the scheduler goes on (PAINS O2)."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await led(rig)
        await rig.apply(record("a"))

        def fails(*_: object) -> None:
            raise KeyError("a secret")

        monkeypatch.setattr("broker.scheduler.control.explain_model", fails)
        told = await refused(rig, "explain", {"what": "a"})
        assert told == "explain: failed inside the scheduler (KeyError); its log says where"
        assert not scheduler.broken.done()


async def test_locks_outlive_the_bus_the_scheduler_and_each_other(nats_server: NatsServer, tmp_path: Path) -> None:
    """A lost store is filled from the scheduler, a lost scheduler from the store, and both from the copy on disk (L6)."""
    async with rig_on(nats_server, tmp_path) as rig:
        first = await led(rig)
        await rig.apply(record("a"), record("b"))
        await rig.control("lock", {"model": "a"})
        await rig.control("pin", {"model": "b"})
        wanted = first.overrides.known
        assert wanted.revision == 2
        nats_server.kill()
        for entry in nats_server.directory.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
        nats_server.start()
        await until_stored(rig, wanted)
        await rig.end(first)
        second = await led(rig, "another")  # with an empty state directory of its own
        assert second.overrides.known == wanted
        assert second.core.catalogue.locked(record("a").deployment)
        await rig.end(second)
        await rig.bus.kv_delete(names.LOCKS_BUCKET, "overrides")
        third = await led(rig, "another")
        assert third.overrides.known == wanted
        assert third.core.catalogue.pinned(record("b"))
        await until_stored(rig, wanted)


async def until_stored(rig: Rig, wanted: Overrides) -> None:
    """Waits until the bucket holds this value."""
    async with asyncio.timeout(20):
        while True:
            with suppress(BusError, DecodeError):
                entry = await rig.bus.kv_get(names.LOCKS_BUCKET, "overrides")
                if entry is not None and decode(entry.value, Overrides) == wanted:
                    return
            await asyncio.sleep(0.05)


async def test_an_older_store_does_not_bring_a_lock_back(nats_server: NatsServer, tmp_path: Path) -> None:
    """The value of the higher revision wins; bytes that are no value count as lost; pins of old become words of today."""
    registry = Registry(tmp_path / "s" / "registry.sqlite")
    unlocked = Overrides(revision=5)
    registry.put_overrides(unlocked)
    registry.close()
    async with rig_on(nats_server, tmp_path) as rig:
        await until(lambda: rig.bus.connected, "the bus is there")
        lock = Override(kind=OverrideKind.MODEL_LOCK, about="a")
        await rig.bus.kv_put(names.LOCKS_BUCKET, "overrides", encode(Overrides(revision=4, entries=(lock,))))
        await rig.bus.kv_put(names.LOCKS_BUCKET, "pin.b", b"pinned")
        scheduler = await led(rig)
        pin = Override(kind=OverrideKind.PIN, about="b", value="pinned")
        assert scheduler.overrides.known == Overrides(revision=5, entries=(pin,))
        await rig.bus.kv_put(names.LOCKS_BUCKET, "overrides", b"\xc1")
        await until_stored(rig, scheduler.overrides.known)
        newer = Overrides(revision=9, entries=(lock,))
        await rig.bus.kv_put(names.LOCKS_BUCKET, "overrides", encode(newer))
        await until(lambda: "a" in scheduler.core.catalogue._locks, "another scheduler's word is heard")
        assert scheduler.overrides.known == newer
        await asyncio.sleep(0.2)
        assert scheduler.registry._registry.overrides() == newer


async def test_a_declared_event_is_kept_told_and_taken_back(nats_server: NatsServer, tmp_path: Path) -> None:
    """It reaches the core with the model's own name, outlives the scheduler, and is no lock (SCH-5)."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await led(rig)
        await rig.apply(record("a", aliases=("first",)))
        argument = {"name": "launch", "model": "first", "begin_unix_s": 4e9, "end_unix_s": 5e9, "factor": 3}
        assert await rig.control("declare", argument) == {"event": "launch", "model": "a", "changed": True}
        assert (await rig.control("declare", argument))["changed"] is False
        row = {"event": "launch", "model": "a", "begin_unix_s": 4e9, "end_unix_s": 5e9, "factor": 3.0, "at_least": 0.0}
        assert await rig.control("get", {"what": "events"}) == [row]
        assert await rig.control("get", {"what": "locks"}) == []
        declared = DeclaredLoad(begin_unix_s=4e9, end_unix_s=5e9, model="a", factor=3.0)
        assert scheduler.core.catalogue.declared == {"launch": declared}
        standby = await rig.scheduler("standby")
        await until(lambda: standby.core.catalogue.declared == {"launch": declared}, "a standby knows it too")
        assert "later than now" in await refused(rig, "declare", argument | {"end_unix_s": 5.0})
        assert "how many times" in await refused(rig, "declare", argument | {"factor": 1.0})
        assert "not applied" in await refused(rig, "declare", argument | {"model": "b"})
        assert "name: expected `str` matching" in await refused(rig, "declare", argument | {"name": "a b"})
        assert (await rig.control("withdraw", {"name": "launch"}))["changed"] is True
        assert scheduler.core.catalogue.declared == {} and await rig.control("get", {"what": "events"}) == []
