"""The scheduler's shell on a real nats-server with a scripted agent."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from broker.core.pool.events import SchedulerSettings
from broker.scheduler.shell import Scheduler, SchedulerConfig
from ops.servers import free_port
from profiles.registry import Registry
from subjects import names
from subjects.codec import decode, encode
from subjects.errors import BusError, RequestTimeout
from subjects.ids import IngressId
from subjects.messages import (
    Alert,
    ControlReply,
    ControlRequest,
    IngressTelemetry,
    Lane,
    LoadModel,
    ModelDemand,
    ModelRecord,
    PoolDigest,
    ReplicaState,
    SlaClass,
    UnloadReplica,
)
from subjects.nats.bus import NatsBus
from subjects.tasks import end_tasks
from tests.core.scheduler_world import GIB, record
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.scripted_agent import ScriptedAgent

BOUND_S = 20.0
QUICK = SchedulerSettings()


class Rig:
    """A bus of the test's own, an agent, and as many schedulers as wanted."""

    def __init__(self, url: str, directory: Path, bus: NatsBus) -> None:
        self.url = url
        self.directory = directory
        self.bus = bus
        self.agent = ScriptedAgent(bus, memory_bytes=GIB)
        self.digest: PoolDigest | None = None
        self.waiting: dict[str, int] = {}
        self._schedulers: list[tuple[Scheduler, NatsBus, Registry]] = []
        self._sequence = 0
        self._telemetry: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.bus.subscribe(names.POOL, self._on_digest)
        await self.agent.start()
        self._telemetry = asyncio.create_task(self._tell_demand())

    def _on_digest(self, message: Any) -> None:
        self.digest = decode(message.payload, PoolDigest)

    async def _tell_demand(self) -> None:
        while True:
            self._sequence += 1
            demand = tuple(
                ModelDemand(
                    deployment=record(name).deployment,
                    model_hash=record(name).model_hash,
                    sla_class=SlaClass.SILVER,
                    lane=Lane.SMALL,
                    waiting=waiting,
                    oldest_wait_s=0.1,
                )
                for name, waiting in self.waiting.items()
                if waiting
            )
            message = IngressTelemetry(ingress=IngressId("gw-1"), sequence=self._sequence, demand=demand)
            with suppress(BusError):
                await self.bus.publish(names.ingress_telemetry(IngressId("gw-1")), encode(message))
            await asyncio.sleep(0.1)

    async def scheduler(self, name: str = "s") -> Scheduler:
        """Another scheduler with a state directory of its own."""
        bus = await NatsBus.connect([self.url], name=name, wait=True)
        registry = Registry(self.directory / name / "registry.sqlite")
        config = SchedulerConfig(nats_urls=(self.url,), name=name, state_dir=self.directory / name, settings=QUICK)
        scheduler = Scheduler(bus, registry, config)
        self._schedulers.append((scheduler, bus, registry))
        await scheduler.start()
        return scheduler

    async def end(self, scheduler: Scheduler, *, politely: bool = True) -> None:
        """Stops one; impolitely it vanishes with its lease held, as after kill -9."""
        entry = next(entry for entry in self._schedulers if entry[0] is scheduler)
        self._schedulers.remove(entry)
        if not politely:
            scheduler.lease.holds = False
        await scheduler.stop()
        await entry[1].close()
        entry[2].close()

    async def control(self, verb: str, argument: object) -> Any:
        """One verb; asked again while nobody leads, which on a slow machine can happen at any time for a moment."""
        payload = encode(ControlRequest(argument=msgspec.json.encode(argument)))
        for _ in range(4):
            with suppress(RequestTimeout):
                reply = decode(await self.bus.request(names.control(verb), payload, timeout_s=5.0), ControlReply)
                assert not reply.error, reply.error
                return msgspec.json.decode(reply.result)
        raise AssertionError(f"nobody answers {verb}")

    async def apply(self, *records: ModelRecord) -> Any:
        return await self.control("apply", {"records": [msgspec.to_builtins(one) for one in records]})

    async def close(self) -> None:
        if self._telemetry is not None:
            await end_tasks({self._telemetry})
        for scheduler, *_ in list(self._schedulers):
            await self.end(scheduler)
        await self.agent.stop()
        await self.bus.close()


@asynccontextmanager
async def rig_on(server: NatsServer, directory: Path) -> AsyncIterator[Rig]:
    bus = await NatsBus.connect([server.url], name="test", wait=True)
    rig = Rig(server.url, directory, bus)
    try:
        await rig.start()
        yield rig
    finally:
        await rig.close()


async def test_demand_loads_a_model_and_everybody_hears_of_it(nats_server: NatsServer, tmp_path: Path) -> None:
    """Apply, demand, load, digest, eviction for another model, rows of every view (SCH-8)."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await rig.scheduler()
        await until(lambda: scheduler.core.leads, "leadership")
        rows = await rig.apply(record("a"), record("b"), record("huge", 9.0))
        assert [(row["name"], row["revision"]) for row in rows] == [("a", 1), ("b", 1), ("huge", 1)]
        assert (await rig.apply(record("a")))[0]["note"] == "unchanged"
        rig.waiting = {"a": 3}
        await until(lambda: rig.agent.ready == ["a"], "a is loaded")
        rig.waiting = {"b": 1}
        await until(lambda: rig.agent.ready == ["b"], "b is loaded")
        rig.waiting = {}
        await until(
            lambda: rig.digest is not None and [r.state for r in rig.digest.replicas] == [ReplicaState.READY], "the digest"
        )
        assert rig.digest is not None
        refusals = {model.name: (model.refusal, model.permanent) for model in rig.digest.models}
        assert refusals["a"] == ("", False)
        assert refusals["huge"][0].startswith("needs 9.0 GiB") and refusals["huge"][1]
        kinds = [type(command).__name__ for command in rig.agent.commands]
        assert kinds == ["LoadModel", "DrainReplica", "UnloadReplica", "LoadModel"]
        models = {row["name"]: row for row in await rig.control("get", {"what": "models"})}
        assert (models["a"]["state"], models["b"]["state"], models["huge"]["state"]) == ("unloaded", "ready", "refused")
        (device,) = await rig.control("get", {"what": "devices"})
        assert (device["capacity_bytes"], device["charged_bytes"], device["models"]) == (GIB, GIB, ["b"])
        (replica,) = await rig.control("get", {"what": "replicas"})
        assert (replica["model"], replica["state"]) == ("b", "ready")
        timeline = await rig.control("get", {"what": "timeline"})
        assert [(e["action"], e["model"], e["outcome"]) for e in timeline] == [
            ("load", "a", "done"),
            ("evict", "a", "done"),
            ("load", "b", "done"),
        ]
        assert abs(timeline[0]["at_unix_s"] - time.time()) < 60
        rig.waiting = {"b": 2}
        await until(
            lambda: any(d.waiting == 2 for d in scheduler.core.pool.inflow.demand(time.monotonic()).values()), "demand"
        )
        (queue,) = await rig.control("get", {"what": "queues"})
        assert (queue["model"], queue["waiting"]) == ("b", 2)
        assert (await rig.bus.kv_get(names.POOL_BUCKET, "digest")) is not None


async def test_control_says_what_is_wrong(nats_server: NatsServer, tmp_path: Path) -> None:
    """Every mistake of a control request is an error with its remedy, and nothing dies."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await rig.scheduler()
        await until(lambda: scheduler.core.leads, "leadership")
        bad: list[tuple[str, bytes, str]] = [
            ("dance", b"{}", "unknown verb"),
            ("get", b"{", "get:"),
            ("get", b"[]", "expected `object`"),
            ("get", b'{"what": "weather"}', "is not one of models"),
            ("pin", b'{"model": "nobody"}', "is not applied"),
            ("apply", b'{"records": [{"name": "a"}]}', "missing required field"),
            ("apply", msgspec.json.encode({"records": [record("a b")]}), "cannot be a key"),
            ("unload", b'{"model": 7}', "model: expected `str`, got `int`"),
        ]
        for verb, argument, words in bad:
            payload = encode(ControlRequest(argument=argument))
            reply = decode(await rig.bus.request(names.control(verb), payload, timeout_s=5.0), ControlReply)
            assert words in reply.error, (verb, argument)
        for subject in ("tel.beat.x", "tel.worker.x", "tel.ingress.x", "evt.worker.x", "ctl.get"):
            for junk in (b"", b"\x80\x04junk", b"\xc1" * 50, b"\x91" * 10_000):
                await rig.bus.publish(f"{names.PREFIX}.{subject}", junk)
        await until(lambda: scheduler.undecodable >= 16, "junk is counted")
        assert await rig.control("get", {"what": "models"}) == []


async def test_a_fallback_that_nobody_applied_is_noted(nats_server: NatsServer, tmp_path: Path) -> None:
    """A fallback may be applied later, so this is a note and no refusal; one of the same file, or an alias, is known."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await rig.scheduler()
        await until(lambda: scheduler.core.leads, "leadership")
        rows = await rig.apply(
            record("a", fallback="nobody"), record("b", fallback="c-too"), record("c", aliases=("c-too",))
        )
        assert ["nobody" in row["note"] for row in rows] == [True, False, False]


async def test_two_applies_at_once_store_two_revisions(nats_server: NatsServer, tmp_path: Path) -> None:
    """Each verb reads what is stored before it writes, so of two at the same time one waits for the other."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await rig.scheduler()
        await until(lambda: scheduler.core.leads, "leadership")
        await rig.apply(record("a"))
        rows = await asyncio.gather(*(rig.apply(record("a", warmup_tokens=tokens)) for tokens in (31, 32, 33)))
        assert sorted(row["revision"] for (row,) in rows) == [2, 3, 4]


async def test_a_scheduler_with_a_part_missing_says_so(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader whose clock stands still must not keep the lease: the process is told to end."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await rig.scheduler()
        assert not scheduler.broken.done()

        def fails(now_s: float, event: object) -> NoReturn:
            raise KeyError(now_s)

        monkeypatch.setattr(scheduler.core, "step", fails)
        await until(scheduler.broken.done, "the scheduler is broken")
        monkeypatch.undo()


async def test_a_failed_load_is_told_as_refusal_and_alert(nats_server: NatsServer, tmp_path: Path) -> None:
    """A broken model is refused, and an alert is kept in the stream (B8, OPS-3).

    What the load said may name addresses and paths: operators read it in ``carpool get``; the digest, of which clients are
    told, is without it.
    """
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await rig.scheduler()
        await until(lambda: scheduler.core.leads, "leadership")
        rig.agent.broken.add("a")
        await rig.apply(record("a"))
        rig.waiting = {"a": 1}

        def refusal() -> str:
            return "".join(model.refusal for model in rig.digest.models) if rig.digest is not None else ""

        told = await until(refusal, "refusal")
        assert told.startswith("loading failed") and "damaged" not in told
        note = (await rig.control("get", {"what": "models"}))[0]["note"]
        assert note.startswith("loading failed") and note.endswith(
            "; its last load failed: RuntimeError: weights are damaged"
        )
        rig.waiting = {}

        async def kept() -> list[Alert]:
            with suppress(BusError):
                return [decode(m.payload, Alert) for m in await rig.bus.stream_read(names.ALERT_STREAM)]
            return []

        end_s = time.monotonic() + BOUND_S
        while not (alerts := await kept()):
            assert time.monotonic() < end_s
            await asyncio.sleep(0.1)
        assert alerts[0].kind == "load-failed" and alerts[0].scope == "a"
        assert "weights are damaged" in alerts[0].text and alerts[0].remedy


@pytest.mark.parametrize("politely", [True, False])
async def test_a_standby_takes_over_and_reloads_nothing(nats_server: NatsServer, tmp_path: Path, politely: bool) -> None:
    """Of two schedulers one acts; when it ends or vanishes the other leads in seconds under a higher epoch (SCH-12, K4)."""
    async with rig_on(nats_server, tmp_path) as rig:
        both = [await rig.scheduler("s1"), await rig.scheduler("s2")]
        await until(lambda: any(one.core.leads for one in both), "leadership")
        await rig.apply(record("a"), record("b"))
        rig.waiting = {"a": 1}
        await until(lambda: rig.agent.ready == ["a"], "a is loaded")
        await until(lambda: all("b" in one.core.catalogue.records for one in both), "both know the registry")
        await until(lambda: sum(one.core.leads for one in both) == 1, "one of the two leads")
        first, second = sorted(both, key=lambda one: not one.core.leads)
        epoch = first.lease.epoch
        await rig.end(first, politely=politely)
        await until(lambda: second.core.leads, "the standby leads")
        assert second.core.epoch is not None and second.core.epoch > epoch
        await asyncio.sleep(1.5)
        assert [type(command) for command in rig.agent.commands] == [LoadModel]
        rig.waiting = {"b": 1}
        await until(lambda: rig.agent.ready == ["b"], "b is loaded by the new leader")
        assert rig.agent.epoch_seen > epoch


async def test_a_lost_store_unloads_nothing_and_the_registry_comes_back(nats_server: NatsServer, tmp_path: Path) -> None:
    """The server restarts with an empty store: nothing is unloaded, and the bucket of models is full again (F10, L6)."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await rig.scheduler()
        await until(lambda: scheduler.core.leads, "leadership")
        await rig.apply(record("a"), record("b"), record("c"))
        await rig.control("delete", {"model": "c"})
        await rig.control("pin", {"model": "a"})
        rig.waiting = {"a": 1}
        await until(lambda: rig.agent.ready == ["a"], "a is loaded")
        rig.waiting = {}
        nats_server.kill()
        for entry in nats_server.directory.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
        nats_server.start()
        end_s = time.monotonic() + BOUND_S
        while True:
            with suppress(BusError):
                if [entry.key for entry in await rig.bus.kv_entries(names.MODELS_BUCKET)] == ["a", "b"]:
                    break
            assert time.monotonic() < end_s
            await asyncio.sleep(0.1)
        await until(lambda: scheduler.core.leads, "leads again")
        await asyncio.sleep(1.0)
        assert not [command for command in rig.agent.commands if isinstance(command, UnloadReplica)]
        assert rig.agent.ready == ["a"]
        assert sorted(scheduler.core.catalogue.records) == ["a", "b"]
        assert (await rig.control("get", {"what": "models"}))[0]["note"] == "pinned"


async def test_a_fresh_server_gets_the_registry_from_the_mirror(stopped_nats_server: NatsServer, tmp_path: Path) -> None:
    """A scheduler that starts before its server waits for it, and fills an empty bucket from its own copy (PRO-2, L3)."""
    registry = Registry(tmp_path / "s" / "registry.sqlite")
    registry.put(record("a"))
    registry.close()
    bus = await NatsBus.connect([stopped_nats_server.url], name="test", wait=True)
    rig = Rig(stopped_nats_server.url, tmp_path, bus)
    try:
        await rig.start()
        scheduler = await rig.scheduler("s")
        await asyncio.sleep(1.0)
        assert not scheduler.core.leads
        stopped_nats_server.start()
        await until(lambda: scheduler.core.leads, "leadership")
        rig.waiting = {"a": 1}
        await until(lambda: rig.agent.ready == ["a"], "a is loaded")
        assert [entry.key for entry in await bus.kv_entries(names.MODELS_BUCKET)] == ["a"]
    finally:
        await rig.close()


async def test_a_frozen_server_unloads_nothing(nats_server: NatsServer, tmp_path: Path) -> None:
    """The bus stands still for seconds: nobody is declared dead, nothing is unloaded or loaded again (F10)."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await rig.scheduler()
        await until(lambda: scheduler.core.leads, "leadership")
        await rig.apply(record("a"))
        rig.waiting = {"a": 1}
        await until(lambda: rig.agent.ready == ["a"], "a is loaded")
        nats_server.freeze()
        await asyncio.sleep(3.5)
        assert not scheduler.core.leads, "a leader that cannot renew counts itself out"
        nats_server.thaw()
        await until(lambda: scheduler.core.leads, "leads again")
        await asyncio.sleep(1.5)
        assert [type(command) for command in rig.agent.commands] == [LoadModel]
        assert list(scheduler.core.pool.dead) == []


def test_sigterm_ends_it_cleanly_with_or_without_a_server(nats_server: NatsServer, tmp_path: Path) -> None:
    """SIGTERM, and a second one, end the process with code 0 in a few seconds; the lease is given back (D1)."""
    code = (
        "import asyncio, pathlib, sys\n"
        "from broker.scheduler.shell import SchedulerConfig, run_scheduler\n"
        "config = SchedulerConfig(nats_urls=(sys.argv[1],), state_dir=pathlib.Path(sys.argv[2]))\n"
        "sys.exit(asyncio.run(run_scheduler(config, on_ready=lambda: print('listens', flush=True))))\n"
    )
    for url in (nats_server.url, f"nats://127.0.0.1:{free_port()}"):
        process = subprocess.Popen(
            [sys.executable, "-c", code, url, str(tmp_path / "state")], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        while (line := process.stdout.readline()) != "listens\n":
            assert line, "it ended before it listened"
        time.sleep(1.0)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait(timeout=BOUND_S) == 0
        process.stdout.close()
