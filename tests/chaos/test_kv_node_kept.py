"""The KV node as the agent keeps it: started again when it dies, gone when the agent is, never in the way of replicas."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcache.wire.client import KvClient, KvNode
from subjects.ids import OperationId, WorkerId
from subjects.messages import CommandOutcome, EvictKv, KvReport, KvTier, MigrateKv
from subjects.nats.bus import NatsBus
from tests.chaos.test_agent_processes import Desk, gone, model
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.kv_nodes import ATTACH, BLOCK_BYTES, SALT, SIGNATURE, USE, chain, right, room, rows
from workers import kv_keeper
from workers.kv_config import KvConfig
from workers.processes import StateDirectory


class KvDesk(Desk):
    """What a scheduler sees of a worker with a KV node."""

    async def start_kv(self, *flags: str, scripted: bool = True) -> WorkerId:
        worker = await self.start_agent("--kv-dir", str(self.directory / "kv"), *flags, scripted=scripted)
        await self.node_runs(worker)
        return worker

    def node(self, worker: WorkerId) -> KvReport | None:
        told = [snapshot.kv for snapshot in self.snapshots if snapshot.worker == worker]
        return told[-1] if told else None

    async def node_runs(self, worker: WorkerId, within_s: float = 30.0) -> KvReport:
        def find() -> KvReport | None:
            kv = self.node(worker)
            return kv if kv is not None and kv.running else None

        return await until(find, f"the node of {worker}", within_s=within_s)

    def node_pid(self, worker: WorkerId) -> int:
        return int(json.loads((self.directory / "state" / "replicas" / f"kv-{worker}.json").read_text())["pid"])

    def socket(self, worker: WorkerId) -> str:
        return str(self.directory / "state" / f"{worker}.kv")


@pytest.fixture
async def desk(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[KvDesk]:
    """A bus, and agents that are ended with the test."""
    bus = await NatsBus.connect(nats_server.url, name="desk", timeout_s=10)
    desk = KvDesk(bus, nats_server, tmp_path)
    await desk.listen()
    yield desk
    for agent in desk.agents:
        if agent.poll() is None:
            agent.kill()
            agent.wait(timeout=10)
    await bus.close()


async def test_a_killed_node_is_started_again_and_replicas_go_on(desk: KvDesk) -> None:
    """kill -9 of the node: told at once, a new one answers at the same place, no replica and no command is hurt (P2)."""
    worker = await desk.start_kv()
    replica = await desk.ready(worker, model("obedient"))
    first = desk.node_pid(worker)
    node = KvNode(desk.socket(worker))
    assert (await node.stats()).hits == 0
    os.kill(first, signal.SIGKILL)
    await until(lambda: any(s.kv and s.kv.note == "it was ended by SIGKILL" for s in desk.snapshots), "word of its death")
    await until(lambda: (kv := desk.node(worker)) is not None and kv.running, "another node")
    second = desk.node_pid(worker)
    assert second != first and gone(first)
    await until_async(node)
    assert desk.report(replica) is not None and desk.agent.poll() is None
    assert (await desk.drain(worker, replica)).failure == ""
    await node.close()


async def until_async(node: KvNode) -> None:
    """Until it answers again; who asks too soon is told so at once."""
    async with asyncio.timeout(30):
        while True:
            try:
                await node.stats()
                return
            except Exception:
                await asyncio.sleep(0.1)


async def test_a_frozen_node_is_killed_and_started_again(desk: KvDesk) -> None:
    """SIGSTOP of the node: after a bound without an answer another takes its place. Its command line holds no address."""
    worker = await desk.start_kv("--kv-frozen-s", "1")
    pid = desk.node_pid(worker)
    assert desk.nats.url.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: gone(pid), "the end of the frozen one")
    await until(lambda: any(s.kv and not s.kv.running and "SIGKILL" in s.kv.note for s in desk.snapshots), "word of it")
    await desk.node_runs(worker)
    assert desk.node_pid(worker) != pid


async def test_a_node_without_a_word_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What starts and says nothing that can be read does not stay: it is killed, and that is told (D8)."""
    monkeypatch.setattr(kv_keeper, "END_GRACE_S", 0.05)
    words = [sys.executable, "-c", "import time; print('no JSON', flush=True); time.sleep(600)"]
    begun: list[subprocess.Popen[bytes]] = []

    def spawn(_: object, stderr_fd: int) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        begun.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=stderr_fd, start_new_session=True))
        return begun[-1]

    told: list[KvReport] = []
    keeper = kv_keeper.KvKeeper(
        KvConfig(directory=tmp_path / "kv", memory_bytes=32 << 20, disk_bytes=0),
        worker=WorkerId("w"),
        nats_urls=(),
        state=StateDirectory(tmp_path),
        state_dir=tmp_path,
        forward=lambda _: None,
        report=told.append,
    )
    monkeypatch.setattr(keeper, "_spawn", spawn)
    running = asyncio.create_task(keeper.run())
    try:
        await until(lambda: told, "word of its end")
    finally:
        running.cancel()
        await asyncio.wait([running])
        await keeper.stop()
    assert told[0] == KvReport(running=False, note="it was ended by SIGKILL")
    assert all(gone(popen.pid) for popen in begun)


def test_only_sockets_that_nobody_listens_at_are_cleared_away(tmp_path: Path) -> None:
    """That of a killed agent's node goes; that of another agent's stays, though its node is frozen and takes nobody (D8)."""
    dead, frozen = tmp_path / "dead.kv", tmp_path / "frozen.kv"
    with contextlib.ExitStack() as stack:
        listeners = {path: stack.enter_context(socket.socket(socket.AF_UNIX)) for path in (dead, frozen)}
        for path, listener in listeners.items():
            listener.bind(str(path))
            listener.listen(0)
        listeners[dead].close()
        while True:
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            if client.connect_ex(str(frozen)):
                break
        assert kv_keeper._socket_path(tmp_path, WorkerId("w")) == str(tmp_path / "w.kv")
        assert (dead.exists(), frozen.exists()) == (False, True)


def test_reports_of_engines_that_were_killed_are_cleared_away(tmp_path: Path) -> None:
    """By the next agent: a replica that is killed while it loads leaves its own behind; one that loads now is left alone."""
    old, young = tmp_path / "w.kv.replica-1.0", tmp_path / "w.kv.replica-2.0"
    for report in (old, young):
        report.write_bytes(b"{}")
    os.utime(old, (0, 0))
    kv_keeper._socket_path(tmp_path, WorkerId("w"))
    assert list(tmp_path.iterdir()) == [young]


async def test_a_killed_agent_leaves_no_node(desk: KvDesk) -> None:
    """kill -9 of the agent: its node ends by itself (D8, WRK-1)."""
    worker = await desk.start_kv()
    pid = desk.node_pid(worker)
    desk.agent.kill()
    desk.agent.wait(timeout=10)
    await until(lambda: gone(pid), "the end of the node")


async def test_the_next_agent_sweeps_a_node_that_is_stuck(desk: KvDesk) -> None:
    """A stopped process does not see that its agent is gone; the next agent kills it and takes the directory over (D8)."""
    worker = await desk.start_kv()
    pid = desk.node_pid(worker)
    os.kill(pid, signal.SIGSTOP)
    desk.agent.kill()
    desk.agent.wait(timeout=10)
    assert not gone(pid)
    again = await desk.start_kv()
    assert gone(pid) and again != worker
    kv = desk.node(again)
    assert kv is not None and [tier.tier for tier in kv.tiers] == [KvTier.HOST, KvTier.DISK] and kv.note == ""
    assert not Path(desk.socket(worker)).exists()


async def test_the_end_of_an_agent_ends_its_node_after_its_replicas(desk: KvDesk) -> None:
    """SIGTERM: replicas first, then the node with time to write; nothing is left, not even the socket (WRK-1)."""
    worker = await desk.start_kv(scripted=False)
    replica = await desk.ready(worker, model())
    pids = [desk.pid_of(replica), desk.node_pid(worker)]
    desk.agent.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(desk.agent.wait, 40) == 0
    assert all(gone(pid) for pid in pids)
    assert not Path(desk.socket(worker)).exists()
    assert list((desk.directory / "state" / "replicas").glob("*.json")) == []


async def test_a_second_worker_in_the_same_directory_does_without_a_disk(desk: KvDesk) -> None:
    """One node owns a directory; another is told so and keeps KV in memory, after it has waited for the first to end."""
    await desk.start_kv("--name", "one")
    flags = ("--kv-dir", str(desk.directory / "kv"), "--name", "two", "--kv-locked-tries", "1")
    other = await desk.start_agent(*flags)
    kv = await desk.node_runs(other, within_s=90)
    assert [tier.tier for tier in kv.tiers] == [KvTier.HOST]
    assert "is used by another process" in kv.note


async def test_an_eviction_reaches_the_real_node(desk: KvDesk) -> None:
    """From the command to the node's words; one that holds nothing says so (SCH-8)."""
    worker = await desk.start_kv()
    operation = OperationId("evict")
    command = EvictKv(operation=operation, epoch=1, ratio=0.5, kv_signature="nobody-b32")
    assert (await desk.command(worker, command)).outcome is CommandOutcome.ACCEPTED
    end = await desk.end_of(operation)
    assert (end.failure, end.detail) == ("", "0 blocks, 0 B from host memory, 0 B from disk")


async def test_all_of_it_reaches_idle_engines_too(desk: KvDesk) -> None:
    """A real replica process hears that its engine should drop its own prefix cache (SCH-8)."""
    worker = await desk.start_kv(scripted=False)
    await desk.ready(worker, msgspec.structs.replace(model(), kv_signature="k-b16"))
    command = EvictKv(operation=OperationId("all"), epoch=1, ratio=1.0, kv_signature="k-b16")
    assert (await desk.command(worker, command)).outcome is CommandOutcome.ACCEPTED
    end = await desk.end_of(OperationId("all"))
    assert (end.failure, end.detail.rpartition("; ")[2]) == ("", "told to 1 idle engine")
    await until(lambda: '"emptied": true' in desk.log(), "the engine's word")


async def test_a_migration_goes_from_node_to_node(desk: KvDesk) -> None:
    """Two workers with nodes of their own: the one that is told pulls what it lacks, over the data path, and says what
    came; what it has then can be dropped to the half (SCH-8, KVC-4)."""
    source = await desk.start_kv("--name", "one")
    target = await desk.start_agent("--kv-dir", str(desk.directory / "kv2"), "--name", "two")
    await desk.node_runs(target)
    hashes = chain(1, 12)

    def client(worker: WorkerId) -> KvClient:
        return KvClient(desk.socket(worker), ATTACH, timeout_s=10.0)

    writer = client(source)
    assert await asyncio.to_thread(writer.write, SALT, b"", hashes, rows(hashes), USE) == 12
    writer.close()

    async def done(name: str, worker: WorkerId, **fields: Any) -> str:
        kind = MigrateKv if "source_worker" in fields else EvictKv
        command = kind(operation=OperationId(name), epoch=1, kv_signature=SIGNATURE.model, **fields)
        assert (await desk.command(worker, command)).outcome is CommandOutcome.ACCEPTED
        end = await desk.end_of(OperationId(name))
        return end.failure or end.detail

    async with asyncio.timeout(40):
        # A node joins the bus after it serves its own host; until then nobody offers it anything.
        attempt = 0
        while not (told := await done(f"pull{attempt}", target, source_worker=source, timeout_s=10.0)).startswith("12 "):
            attempt += 1
            await asyncio.sleep(0.2)
    assert told == f"12 blocks of 1 chains, {12 * BLOCK_BYTES // 1024} KiB"
    reader = client(target)
    into = room(12)
    assert await asyncio.to_thread(reader.read, SALT, hashes, into) == 12 and right(into, hashes, 12)
    reader.close()
    assert (await done("evict", target, ratio=0.5)).startswith("6 blocks, ")
    assert await until(lambda: held(desk.node(target)) == 6 and held(desk.node(source)) == 12, "what is left of it")
    kv = desk.node(target)
    assert kv is not None
    (counts,) = [(model.kv_signature, model.hits, model.evicted) for model in kv.models]
    assert counts == (SIGNATURE.model, 0, 6), "no prompt came"


def held(kv: KvReport | None) -> int:
    """Blocks of the model in a node's host memory, as its agent told it last."""
    return sum(model.host_blocks for model in kv.models) if kv is not None else 0
