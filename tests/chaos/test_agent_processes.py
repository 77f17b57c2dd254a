"""The agent as a process, with real replica processes on a real bus."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest

from subjects import names
from subjects.bus import BusMessage
from subjects.codec import decode, encode
from subjects.ids import DeviceId, ModelHash, OperationId, ReplicaId, WorkerId
from subjects.messages import (
    CommandOutcome,
    CommandReply,
    DrainReplica,
    EngineType,
    LoadModel,
    ModelRecord,
    OperationEnded,
    OperationProgressed,
    ReplicaDied,
    ReplicaReport,
    ReplicaState,
    ResizeKv,
    SetConcurrency,
    SleepReplica,
    UnloadReplica,
    WakeReplica,
    WorkerBeat,
    WorkerCommand,
    WorkerEvent,
    WorkerSnapshot,
)
from subjects.nats.bus import NatsBus
from tests.servers import NatsServer
from tests.waiting import until
from workers.processes import start_time

T = TypeVar("T")
PATIENCE_S = 30.0
"""How long a test waits for what should take a second, on a busy machine."""


def model(script: str = "", budget_bytes: int = 40) -> ModelRecord:
    return ModelRecord(
        name="tiny",
        model_hash=ModelHash("c" * 64),
        weights_hash="d" * 64,
        engine_type=EngineType.SIMULATED,
        source="",
        weights_bytes=0,
        kv_bytes_per_token=1,
        kv_bytes=1024,
        budget_bytes=budget_bytes,
        block_size=16,
        max_context_len=256,
        max_num_seqs=2,
        engine_options={"script": script} if script else {},
    )


def gone(pid: int) -> bool:
    """Whether the process is not running any more (a zombie is not)."""
    return start_time(pid) is None


class Desk:
    """What a scheduler would see and do."""

    def __init__(self, bus: NatsBus, nats: NatsServer, directory: Path) -> None:
        self.bus = bus
        self.nats = nats
        self.directory = directory
        self.snapshots: list[WorkerSnapshot] = []
        self.events: list[WorkerEvent] = []
        self.beats: list[WorkerBeat] = []
        self.agents: list[subprocess.Popen[bytes]] = []
        self.operations = 0

    async def listen(self) -> None:
        def telemetry(message: BusMessage) -> None:
            self.snapshots.append(decode(message.payload, WorkerSnapshot))

        def event(message: BusMessage) -> None:
            self.events.append(decode(message.payload, WorkerEvent))  # type: ignore[arg-type]

        def beat(message: BusMessage) -> None:
            self.beats.append(decode(message.payload, WorkerBeat))

        await self.bus.subscribe(names.ALL_WORKER_TELEMETRY, telemetry)
        await self.bus.subscribe(names.ALL_WORKER_EVENTS, event)
        await self.bus.subscribe(names.ALL_BEATS, beat)
        await self.bus.round_trip(timeout_s=5)

    async def start_agent(self, *flags: str, scripted: bool = True) -> WorkerId:
        """Starts an agent and waits for its first words."""
        argv = [sys.executable, "-m", "tests.chaos.agent_main", "--nats", self.nats.url]
        argv += ["--state-dir", str(self.directory / "state"), *(["--scripted"] if scripted else []), *flags]
        before = {snapshot.worker for snapshot in self.snapshots}
        with (self.directory / "agent.log").open("ab") as log:
            self.agents.append(subprocess.Popen(argv, stdout=log, stderr=log))
        new = await until(lambda: [s for s in self.snapshots if s.worker not in before], "a snapshot of the new agent")
        return new[0].worker

    @property
    def agent(self) -> subprocess.Popen[bytes]:
        return self.agents[-1]

    def log(self) -> str:
        return (self.directory / "agent.log").read_text(errors="replace")

    async def command(self, worker: WorkerId, command: WorkerCommand) -> CommandReply:
        return decode(await self.bus.request(names.commands(worker), encode(command), timeout_s=10), CommandReply)

    def operation(self) -> OperationId:
        self.operations += 1
        return OperationId(f"op{self.operations}")

    async def load(self, worker: WorkerId, record: ModelRecord, timeout_s: float = 60.0) -> OperationId:
        """Sends a load that is accepted."""
        operation = self.operation()
        command = LoadModel(
            operation=operation, epoch=1, device=DeviceId("cpu0"), record=record, replica_name="tiny", timeout_s=timeout_s
        )
        reply = await self.command(worker, command)
        assert reply.outcome is CommandOutcome.ACCEPTED, reply
        return operation

    async def end_of(self, operation: OperationId, patience_s: float = PATIENCE_S) -> OperationEnded:
        def find() -> OperationEnded | None:
            ends = [e for e in self.events if isinstance(e, OperationEnded) and e.operation == operation]
            return ends[0] if ends else None

        return await until(find, f"the end of {operation}", within_s=patience_s)

    async def ready(self, worker: WorkerId, record: ModelRecord) -> ReplicaId:
        """Loads a replica and waits until it is ready."""
        end = await self.end_of(await self.load(worker, record))
        assert end.failure == "" and end.replica is not None, (end, self.log())
        return end.replica

    async def drain(self, worker: WorkerId, replica: ReplicaId, timeout_s: float = 5.0) -> OperationEnded:
        operation = self.operation()
        await self.command(worker, DrainReplica(operation=operation, epoch=1, replica=replica, timeout_s=timeout_s))
        return await self.end_of(operation)

    async def unload(self, worker: WorkerId, replica: ReplicaId, *, force: bool = False) -> OperationEnded:
        operation = self.operation()
        reply = await self.command(worker, UnloadReplica(operation=operation, epoch=1, replica=replica, force=force))
        assert reply.outcome is CommandOutcome.ACCEPTED, reply
        return await self.end_of(operation)

    def last(self) -> WorkerSnapshot:
        return self.snapshots[-1]

    def report(self, replica: ReplicaId) -> ReplicaReport | None:
        found = [report for report in self.last().replicas if report.replica == replica]
        return found[0] if found else None

    async def death_of(self, replica: ReplicaId) -> ReplicaDied:
        def find() -> ReplicaDied | None:
            deaths = [e for e in self.events if isinstance(e, ReplicaDied) and e.replica == replica]
            return deaths[0] if deaths else None

        return await until(find, f"the death of {replica}")

    def pid_of(self, replica: ReplicaId) -> int:
        """As the state directory has it."""
        note = json.loads((self.directory / "state" / "replicas" / f"{replica}.json").read_text())
        pid = note["pid"]
        assert isinstance(pid, int)
        return pid


@pytest.fixture
async def desk(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Desk]:
    """A bus, and agents that are ended with the test."""
    bus = await NatsBus.connect(nats_server.url, name="desk", timeout_s=10)
    desk = Desk(bus, nats_server, tmp_path)
    await desk.listen()
    yield desk
    for agent in desk.agents:
        if agent.poll() is None:
            agent.kill()
            agent.wait(timeout=10)
    await bus.close()


async def test_load_drain_and_unload_of_a_simulated_replica(desk: Desk) -> None:
    """The real replica process, by commands over the bus: states, counters, memory, budget (WRK-1, WRK-3, BUS-4)."""
    worker = await desk.start_agent(scripted=False)
    operation = await desk.load(worker, model())
    end = await desk.end_of(operation)
    assert end.failure == "" and end.replica is not None, (end, desk.log())
    replica = end.replica
    states = [e.state for e in desk.events if isinstance(e, OperationProgressed) and e.operation == operation]
    assert [s for i, s in enumerate(states) if s not in states[:i]] == [
        ReplicaState.ABSENT,
        ReplicaState.LOADING,
        ReplicaState.WARMING,
    ]
    await until(lambda: (r := desk.report(replica)) and r.state is ReplicaState.READY, "ready in a snapshot")
    assert desk.last().devices[0].reserved_bytes == 40
    await until(lambda: (r := desk.report(replica)) and r.memory_bytes > 2**20, "a sample of its memory")
    told = SetConcurrency(operation=desk.operation(), epoch=1, replica=replica, slots=1)
    assert (await desk.command(worker, told)).outcome is CommandOutcome.ACCEPTED
    pid = desk.pid_of(replica)
    assert (await desk.drain(worker, replica)).failure == ""
    assert (await desk.unload(worker, replica)).failure == ""
    assert gone(pid)
    await until(lambda: desk.last().replicas == () and desk.last().devices[0].reserved_bytes == 0, "an empty worker")
    beats = len(desk.beats)
    await until(lambda: len(desk.beats) >= beats + 3, "beats that go on")
    assert {beat.worker for beat in desk.beats} == {worker}


async def test_kv_slots_and_sleep_of_a_simulated_replica(desk: Desk) -> None:
    """Changes reach the engine of a real process and come back in its report; a sleeping one frees its room (SCH-8)."""
    worker = await desk.start_agent("--memory", str(32 * 1024), scripted=False)
    small = msgspec.structs.replace(
        model(), kv_bytes=16 * 1024, overhead_bytes=8, kv_bytes_per_token=64, budget_bytes=16 * 1024 + 8
    )
    replica = await desk.ready(worker, small)

    async def change(command: Callable[[OperationId], WorkerCommand]) -> OperationEnded:
        operation = desk.operation()
        reply = await desk.command(worker, command(operation))
        assert reply.outcome is CommandOutcome.ACCEPTED, reply
        return await desk.end_of(operation)

    def shows(**fields: object) -> bool:
        report = desk.report(replica)
        return report is not None and all(getattr(report, name) == value for name, value in fields.items())

    await until(lambda: shows(kv_pages=16, kv_bytes=16 * 1024, state=ReplicaState.READY), "its pages")
    grown = await change(lambda op: ResizeKv(operation=op, epoch=1, replica=replica, kv_bytes=24 * 1024))
    assert grown.failure == ""
    less = await change(lambda op: ResizeKv(operation=op, epoch=1, replica=replica, kv_bytes=4 * 1024))
    assert less.failure == ""
    tiny = await change(lambda op: ResizeKv(operation=op, epoch=1, replica=replica, kv_bytes=1))
    assert tiny.failure == "that is less than one page"
    slots = await change(lambda op: SetConcurrency(operation=op, epoch=1, replica=replica, slots=1))
    assert slots.failure == ""
    await until(lambda: shows(kv_pages=4, kv_pages_free=4, kv_bytes=4 * 1024, slots=1), "the changes in a report")
    assert (await desk.drain(worker, replica)).failure == ""
    assert (await change(lambda op: SleepReplica(operation=op, epoch=1, replica=replica))).failure == ""
    await until(lambda: shows(state=ReplicaState.ASLEEP, budget_bytes=8), "its sleep in a report")
    assert (await change(lambda op: WakeReplica(operation=op, epoch=1, replica=replica))).failure == ""
    await until(lambda: shows(state=ReplicaState.READY, kv_pages=4), "its return in a report")
    assert (await desk.drain(worker, replica, timeout_s=0.0)).failure == ""
    assert (await desk.unload(worker, replica)).failure == ""


async def test_a_killed_replica_is_reported_and_its_budget_freed(desk: Desk) -> None:
    """kill -9 of an engine process is an event, never the end of its agent (WRK-1)."""
    worker = await desk.start_agent()
    replica = await desk.ready(worker, model("obedient", budget_bytes=100))
    os.kill(desk.pid_of(replica), signal.SIGKILL)
    assert (await desk.death_of(replica)).detail == "the process was ended by SIGKILL while ready"
    again = await desk.ready(worker, model("obedient", budget_bytes=100))
    assert again != replica
    assert desk.agent.poll() is None


async def test_a_frozen_replica_is_killed_after_the_ping_bound(desk: Desk) -> None:
    """A process that stops to answer is not left to hold its requests (DESIGN 3.7)."""
    worker = await desk.start_agent()
    replica = await desk.ready(worker, model("obedient"))
    pid = desk.pid_of(replica)
    os.kill(pid, signal.SIGSTOP)
    assert (await desk.death_of(replica)).detail == "the replica left a ping unanswered for 2 s and was killed"
    assert gone(pid)


async def test_a_child_that_exits_at_once_fails_the_load_with_its_last_words(desk: Desk) -> None:
    """Nobody waits for a child that is dead already (B9); the figure is the agent's own, from command to end."""
    worker = await desk.start_agent()
    end = await desk.end_of(await desk.load(worker, model("exit")))
    assert end.failure == (
        "the process exited with code 3 while loading: loading weights | RuntimeError: the weights are broken"
    )
    assert end.took_s < 10
    assert [type(e) for e in desk.events if isinstance(e, ReplicaDied)] == []
    end = await desk.end_of(await desk.load(worker, model("fail")))
    assert end.failure == "not a model"
    assert await desk.ready(worker, model("obedient", budget_bytes=100))


async def test_a_load_that_hangs_is_killed_at_its_timeout(desk: Desk) -> None:
    """The next load works (B9)."""
    worker = await desk.start_agent()
    end = await desk.end_of(await desk.load(worker, model("hang"), timeout_s=3))
    assert end.failure == "the load did not end within 3 s, it was loading: waiting for a lock"
    assert await desk.ready(worker, model("obedient", budget_bytes=100))


async def test_what_a_replica_started_ends_with_it(desk: Desk) -> None:
    """A signal reaches the whole process group, so an engine's own children are no orphans.

    This replica also writes more than a pipe holds before it is ready: its output is read however much there is.
    """
    worker = await desk.start_agent()
    replica = await desk.ready(worker, model("parent"))
    (child,) = psutil.Process(desk.pid_of(replica)).children()
    assert (await desk.unload(worker, replica, force=True)).failure == ""
    await until(lambda: gone(child.pid), "the end of the grandchild")


@pytest.mark.parametrize("scripted", [True, False])
async def test_a_killed_agent_leaves_no_orphan(desk: Desk, scripted: bool) -> None:
    """kill -9 of the agent: its replicas leave by themselves (D8, WRK-1)."""
    worker = await desk.start_agent(scripted=scripted)
    replica = await desk.ready(worker, model("obedient" if scripted else ""))
    pid = desk.pid_of(replica)
    desk.agent.kill()
    desk.agent.wait(timeout=10)
    await until(lambda: gone(pid), "the end of the replica")


async def test_the_next_agent_sweeps_what_a_dead_one_left(desk: Desk) -> None:
    """A replica that is deaf to the end of its agent is killed by the next one, by pid and start time (D8)."""
    worker = await desk.start_agent()
    replica = await desk.ready(worker, model("deaf"))
    pid = desk.pid_of(replica)
    desk.agent.kill()
    desk.agent.wait(timeout=10)
    assert not gone(pid)
    # A note whose pid now belongs to somebody else must hurt nobody.
    bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        notes = desk.directory / "state" / "replicas"
        note = json.loads((notes / f"{replica}.json").read_text())
        (notes / "other.json").write_text(json.dumps({**note, "pid": bystander.pid}))
        (notes / "broken.json").write_text("{")
        await desk.start_agent()
        assert gone(pid)
        assert bystander.poll() is None
        assert list(notes.glob("*.json")) == []
    finally:
        bystander.kill()
        bystander.wait(timeout=10)


async def test_a_sweep_leaves_the_replicas_of_a_living_agent_alone(desk: Desk) -> None:
    """Two agents may share a directory."""
    worker = await desk.start_agent()
    replica = await desk.ready(worker, model("obedient"))
    pid = desk.pid_of(replica)
    await desk.start_agent()
    assert not gone(pid)
    assert (await desk.drain(worker, replica)).failure == ""


async def test_two_sigterms_end_the_agent_cleanly(desk: Desk) -> None:
    """Replicas are drained and stopped, the second signal is harmless, the exit code is 0."""
    worker = await desk.start_agent(scripted=False)
    replica = await desk.ready(worker, model())
    pid = desk.pid_of(replica)
    desk.agent.send_signal(signal.SIGTERM)
    desk.agent.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(desk.agent.wait, 30) == 0
    assert gone(pid)
    assert desk.last().draining and desk.last().replicas == ()
    assert not [e for e in desk.events if isinstance(e, ReplicaDied)]


async def test_the_end_of_an_agent_is_bounded(desk: Desk) -> None:
    """A replica that neither drains nor stops is killed and reported; it cannot hold its agent (C8, D6)."""
    worker = await desk.start_agent("--drain-s", "0.5")
    replica = await desk.ready(worker, model("stubborn"))
    pid = desk.pid_of(replica)
    desk.agent.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(desk.agent.wait, 30) == 0
    assert gone(pid)
    assert (await desk.death_of(replica)).detail == "the replica did not drain within its bound and was stopped"


async def test_agent_and_replicas_go_on_without_the_bus(desk: Desk) -> None:
    """A restart of the server costs nothing that is loaded, and the worker takes commands again (F12)."""
    worker = await desk.start_agent()
    replica = await desk.ready(worker, model("obedient"))
    pid = desk.pid_of(replica)
    desk.nats.kill()
    await asyncio.sleep(3)  # longer than the bound on pings, so that the agent had to judge without the bus
    desk.nats.start()
    seen = len(desk.snapshots)
    await until(lambda: len(desk.snapshots) > seen and desk.report(replica), "a snapshot after the restart")
    assert not gone(pid)
    await until(lambda: desk.bus.connected, "our own connection")
    assert (await desk.drain(worker, replica)).failure == ""
    assert (await desk.unload(worker, replica)).failure == ""


async def test_garbage_on_the_command_subject_is_answered_and_harms_nothing(desk: Desk) -> None:
    """Bytes from anybody are no reason to stop."""
    worker = await desk.start_agent()
    for payload in (b"", b"\xc1", b"\x81\xa4type\xa1x", encode({"type": "load-model"}), b"\x00" * 10_000):
        reply = decode(await desk.bus.request(names.commands(worker), payload, timeout_s=10), CommandReply)
        assert reply.outcome is CommandOutcome.REFUSED
    assert await desk.ready(worker, model("obedient"))
