"""``evict-kv``, ``migrate-kv`` and ``get kv`` through a scheduler on a real nats-server (SCH-8)."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ops.kv_cli import worker_flags
from subjects.errors import ConfigError
from subjects.ids import DeviceId, ReplicaId, base_name
from subjects.messages import (
    EvictKv,
    KvModelReport,
    KvReport,
    KvTier,
    KvTierReport,
    MigrateKv,
    ReplicaReport,
    ReplicaState,
)
from tests.core.scheduler_world import GIB, deployment, model_hash, record
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.scripted_agent import ScriptedAgent
from tests.wire.test_people import led, refused
from tests.wire.test_scheduler import Rig, rig_on
from workers.kv_config import DISK_BYTES_MIN, KvConfig, disk_room, kv_config, memory_note

NODE = KvReport(
    running=True,
    tiers=(
        KvTierReport(tier=KvTier.HOST, used_bytes=5 << 20, limit_bytes=32 << 20, blocks=8),
        KvTierReport(tier=KvTier.DISK, used_bytes=9 << 20, limit_bytes=1 << 30, blocks=14),
    ),
    models=(
        KvModelReport(kv_signature="sig", host_bytes=4 << 20, host_blocks=6, disk_bytes=9 << 20, disk_blocks=14),
        KvModelReport(kv_signature="old", host_bytes=1 << 20, host_blocks=2),
    ),
    hits=30,
    misses=10,
    write_bytes_left=7 << 30,
    redis="up",
    address="127.0.0.1:4711",
)


@dataclass(frozen=True)
class Told:
    """What a command said."""

    exit_code: int
    stdout: str
    stderr: str


async def carpool(rig: Rig, *words: str) -> Told:
    """The command line as a process of its own, against this bus."""
    argv = [sys.executable, "-m", "ops.cli", *words, "--nats", rig.url]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    stdout, stderr = await process.communicate()
    return Told(process.returncode or 0, stdout.decode(), stderr.decode())


async def seen(rig: Rig, agents: int) -> None:
    """Until the scheduler knows so many workers."""
    async with asyncio.timeout(20):
        while len(await rig.control("get", {"what": "devices"})) < agents:
            await asyncio.sleep(0.02)


async def test_an_eviction_asks_every_node_and_tells_what_each_did(nats_server: NatsServer, tmp_path: Path) -> None:
    """By the command line, as people and as JSON; a node's failure is the command's."""
    async with rig_on(nats_server, tmp_path) as rig:
        rig.agent.kv = NODE
        other = ScriptedAgent(rig.bus, memory_bytes=GIB)
        other.kv = KvReport(running=True)
        await other.start()
        try:
            await led(rig)
            await rig.apply(record("m", kv_signature="sig", aliases=("first",)))
            await seen(rig, 2)
            told = await carpool(rig, "evict-kv", "first", "--ratio", "0.5")
            assert told.exit_code == 0, told.stderr
            workers = sorted((rig.agent.worker, other.worker))
            assert told.stdout.splitlines() == [f"m at {worker}: 412 blocks, 289.0 MiB" for worker in workers]
            for agent in (rig.agent, other):
                (command,) = [command for command in agent.commands if isinstance(command, EvictKv)]
                assert (command.ratio, command.kv_signature) == (0.5, "sig")
            other.kv_failure = "the KV node: away"
            alone = await carpool(rig, "evict-kv", "m", "--ratio", "1", "--worker", other.worker, "--json")
            assert alone.exit_code == 1
            (row,) = json.loads(alone.stdout)["transactions"]
            assert (row["worker"], row["ended"], row["failed"]) == (other.worker, True, True)
            assert row["outcome"] == "failed: the KV node: away"
            actions = [(row["action"], row["device"]) for row in await rig.control("get", {"what": "timeline"})]
            assert actions == [*(("evict-kv", worker) for worker in workers), ("evict-kv", other.worker)]
        finally:
            await other.stop()


async def test_a_migration_goes_to_the_worker_that_pulls(nats_server: NatsServer, tmp_path: Path) -> None:
    """Workers by their names, or by a replica that stands for its own."""
    async with rig_on(nats_server, tmp_path) as rig:
        rig.agent.kv = KvReport(running=True)
        source = ScriptedAgent(rig.bus, memory_bytes=GIB)
        source.kv = KvReport(running=True)
        replica = ReplicaReport(
            replica=ReplicaId("m-1-1-aaaaaaaaaa"),
            deployment=deployment("m"),
            model_hash=model_hash("m"),
            device=DeviceId("cpu0"),
            state=ReplicaState.READY,
            budget_bytes=1,
        )
        source.replicas[replica.replica] = replica
        await source.start()
        try:
            await led(rig)
            await rig.apply(record("m", kv_signature="sig"))
            await seen(rig, 2)
            await until(lambda: rig.digest is not None and len(rig.digest.replicas) == 1, "the replica")
            words = ("migrate-kv", "m", "--from", replica.replica, "--to", rig.agent.worker, "--timeout-s", "30")
            told = await carpool(rig, *words)
            assert told.exit_code == 0, told.stderr
            assert told.stdout == f"m at {rig.agent.worker}: 412 blocks, 289.0 MiB\n"
            (command,) = [command for command in rig.agent.commands if isinstance(command, MigrateKv)]
            assert (command.source_worker, command.kv_signature, command.timeout_s) == (source.worker, "sig", 30.0)
            assert not [command for command in source.commands if isinstance(command, MigrateKv)]
            same = {"model": "m", "source": replica.replica, "target": source.worker}
            assert await refused(rig, "migrate-kv", same) == (
                f"migrate-kv: target: '{base_name(source.worker)}' is the source too; name two workers"
            )
        finally:
            await source.stop()


async def test_what_cannot_be_is_said_in_one_line(nats_server: NatsServer, tmp_path: Path) -> None:
    """Unknown models and workers, no KV there, no node, a node that does not run, numbers that make no sense."""
    async with rig_on(nats_server, tmp_path) as rig:
        await led(rig)
        server = record("server", source="http://h/v1")
        await rig.apply(record("m", kv_signature="sig"), server, record("off", kv_signature="sig", kv_reuse=False))
        await seen(rig, 1)
        worker = rig.agent.worker

        async def says(verb: str, **argument: Any) -> str:
            return await refused(rig, verb, {"model": "m", "ratio": 0.5} | argument)

        assert (await says("evict-kv", model="x")).startswith("evict-kv: model: 'x' is not applied; known models: m, off")
        assert await says("evict-kv", model="server") == (
            "evict-kv: model: the KV of 'server' is at simulated's server, not in this pool"
        )
        for ratio, bound in ((0, "> 0.0"), (-1, "> 0.0"), (1.01, "<= 1.0")):
            assert await says("evict-kv", ratio=ratio) == f"evict-kv: ratio: expected `float` {bound}"
        assert await says("evict-kv", ratio="half") == "evict-kv: ratio: expected `float`, got `str`"
        assert await says("evict-kv") == "evict-kv: no worker has a KV node that runs; see `carpool get kv`"
        assert await says("evict-kv", worker=worker) == (
            f"evict-kv: worker: worker {worker!r} keeps no KV outside its engines (it was started with --no-kv)"
        )
        assert await says("migrate-kv", model="off", source="a", target="b") == (
            "migrate-kv: model: 'off' keeps no KV (its spec.kv.reuse is false)"
        )
        assert await says("migrate-kv", source="nowhere", target=worker) == (
            "migrate-kv: source: 'nowhere' is no worker or replica that is known; known workers: w"
        )
        assert await says("migrate-kv", target=worker) == ("migrate-kv: object missing required field `source`")
        rig.agent.kv = KvReport(running=False, note="it was ended by SIGKILL")
        async with asyncio.timeout(20):
            while not await rig.control("get", {"what": "kv"}):
                await asyncio.sleep(0.02)
        assert await says("evict-kv", worker=worker) == (
            f"evict-kv: worker: the KV node of {worker!r} does not run (it was ended by SIGKILL); try again in a moment"
        )
        (row,) = await rig.control("get", {"what": "kv"})
        assert (row["worker"], row["note"]) == (worker, "does not run: it was ended by SIGKILL")
        rig.agent.kv = NODE
        assert not [command for command in rig.agent.commands if isinstance(command, EvictKv | MigrateKv)]


async def test_get_kv_shows_each_tier_of_each_worker(nats_server: NatsServer, tmp_path: Path) -> None:
    """Bytes, limits and blocks by model; what is counted for the node stands once; a table for people."""
    async with rig_on(nats_server, tmp_path) as rig:
        rig.agent.kv = NODE
        await led(rig)
        await rig.apply(record("m", kv_signature="sig"))
        await seen(rig, 1)
        host, disk = json.loads((await carpool(rig, "get", "kv", "--json")).stdout)["kv"]
        assert host == {
            "worker": rig.agent.worker,
            "tier": "host",
            "used_bytes": 5 << 20,
            "limit_bytes": 32 << 20,
            "blocks": 8,
            "models": [
                {"model": "m", "blocks": 6, "bytes": 4 << 20},
                {"model": "old", "blocks": 2, "bytes": 1 << 20},
            ],
            "hits": 30,
            "misses": 10,
            "hit_ratio": 0.75,
            "corrupt": 0,
            "refused": 0,
            "write_left_bytes": None,
            "redis": "up",
            "address": "127.0.0.1:4711",
            "note": "",
        }
        assert (disk["tier"], disk["blocks"], disk["models"]) == (
            "disk",
            14,
            [{"model": "m", "blocks": 14, "bytes": 9 << 20}],
        )
        assert (disk["hits"], disk["write_left_bytes"], disk["address"]) == (None, 7 << 30, "")
        table = (await carpool(rig, "get", "kv")).stdout
        assert "m 6 (4 MiB)" in table and "127.0.0.1:4711" in table


# ---------------------------------------------------------------------------------------------------------------- flags


FLAGS: dict[str, Any] = {
    "kv": True,
    "kv_dir": None,
    "kv_memory": "64MiB",
    "kv_disk": "8GiB",
    "kv_write_budget": "0",
    "kv_data_host": "127.0.0.1",
    "kv_rate": "0",
    "kv_hot": 30.0,
    "kv_idle": 600.0,
}


def config(directory: Path = Path("/kv"), **flags: Any) -> KvConfig | None:
    return kv_config(FLAGS | flags, directory=directory, redis_url="redis://h/0")


def test_flags_say_what_a_node_may_use() -> None:
    """Sizes in bytes, none of a tier as 0, nothing at all with --no-kv; the folder named wins over the default."""
    assert config() == KvConfig(directory=Path("/kv"), memory_bytes=64 << 20, disk_bytes=8 << 30, redis_url="redis://h/0")
    assert config(kv=False) is None
    given = config(kv_disk="0", kv_rate="10MB", kv_write_budget="1GiB", kv_dir=Path("/nvme"), kv_idle=60.0)
    assert given is not None
    assert (given.disk_bytes, given.rate_bytes_per_s, given.write_bytes_per_day) == (0, 10_000_000, 1 << 30)
    assert (given.directory, given.idle_s) == (Path("/nvme"), 60.0)
    default = config(kv_memory="")
    assert default is not None and 16 << 20 <= default.memory_bytes <= 1 << 30


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"kv_memory": "lots"}, "--kv-memory: 'lots' is not a size; write it like 4GiB or 512MiB"),
        ({"kv_memory": "1MiB"}, "--kv-memory 1MiB: give at least 16MiB, or --no-kv for no KV tiers"),
        ({"kv_disk": "1MiB"}, "--kv-disk 1MiB: give at least 64MiB, or 0 for no disk"),
        ({"kv_write_budget": "-1"}, "--kv-write-budget: '-1' is not a size; write it like 4GiB or 512MiB"),
        ({"kv_rate": "fast"}, "--kv-rate: 'fast' is not a size; write it like 4GiB or 512MiB"),
        ({"kv_data_host": "0.0.0.0"}, "--kv-data-host 0.0.0.0: other nodes are told it; give one address, such as 10.0.0.7"),
        ({"kv_data_host": "http://h"}, "--kv-data-host 'http://h': give an address of this machine, such as 10.0.0.7"),
    ],
)
def test_wrong_flags_are_one_line(flags: dict[str, Any], line: str) -> None:
    """The flag, what is wrong, and what would be right."""
    with pytest.raises(ConfigError) as caught:
        config(**flags)
    assert str(caught.value) == line


def test_a_disk_smaller_than_asked_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies there already counts as the tier's own; where next to nothing is left there is no tier."""
    asked = config(tmp_path / "kv")
    assert asked is not None
    usage = msgspec.defstruct("Usage", [("free", int)])
    free = {"bytes": 100 << 30}
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(free["bytes"]))
    assert disk_room(asked) == (8 << 30, "")
    free["bytes"] = 2 << 30
    room, note = disk_room(asked)
    assert room == int((2 << 30) * 0.95)
    assert note == f"the tier on disk is 1945 MiB instead of 8192 MiB: {tmp_path / 'kv'} has room for 1945 MiB"
    (tmp_path / "kv" / "own.kvc").write_bytes(b"x" * (1 << 20))
    assert disk_room(asked)[0] == room + (1 << 20)
    free["bytes"] = 0
    assert disk_room(asked) == (0, f"no tier on disk: {tmp_path / 'kv'} has room for 1 MiB")
    assert DISK_BYTES_MIN > (1 << 20)
    (tmp_path / "file").touch()
    blocked = config(tmp_path / "file" / "kv")
    assert blocked is not None
    assert disk_room(blocked) == (0, f"no tier on disk: {tmp_path / 'file' / 'kv'}: Not a directory")


def test_memory_is_not_promised_twice_unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory for KV is beside the CPU devices' budgets: together they should be there."""
    from subjects.messages import DeviceKind
    from workers.core.agent_events import Device

    monkeypatch.setattr("workers.kv_config.available_bytes", lambda: 1 << 30)
    asked = config()
    assert asked is not None
    cpu = Device(DeviceId("cpu0"), DeviceKind.CPU, "c", 960 << 20)
    gpu = Device(DeviceId("gpu0"), DeviceKind.GPU, "g", 80 << 30)
    assert memory_note(asked, [cpu, gpu]) == ""
    more = Device(DeviceId("cpu0"), DeviceKind.CPU, "c", 961 << 20)
    assert memory_note(asked, [more]) == (
        "--kv-memory 64 MiB beside CPU devices of 961 MiB is more than the 1024 MiB that are available: lower one of them"
    )


def test_a_pool_passes_its_flags_on_to_its_worker() -> None:
    """As the worker's own command line has them; a folder by its full name."""
    flags = FLAGS | {"kv_memory": "", "kv_dir": Path("here")}
    assert worker_flags(flags) == (
        *("--kv-dir", str(Path("here").absolute()), "--kv-disk", "8GiB", "--kv-write-budget", "0"),
        *("--kv-data-host", "127.0.0.1", "--kv-rate", "0", "--kv-hot", "30.0", "--kv-idle", "600.0"),
    )
    assert worker_flags(FLAGS | {"kv": False}) == ("--no-kv",)
