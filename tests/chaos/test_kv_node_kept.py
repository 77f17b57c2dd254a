"""The KV node as the agent keeps it: started again when it dies, gone when the agent is, never in the way of replicas."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvcache.client import KvNode
from subjects.ids import OperationId, WorkerId
from subjects.messages import CommandOutcome, EvictKv, KvReport, KvTier
from subjects.nats_bus import NatsBus
from tests.chaos.test_agent_processes import Desk, gone, model
from tests.servers import NatsServer
from tests.waiting import until


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
    other = await desk.start_agent("--kv-dir", str(desk.directory / "kv"), "--name", "two")
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
