"""A worker agent in the test process: it speaks the messages, its replicas are numbers."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from subjects import names
from subjects.bus import Bus, BusMessage, Subscription
from subjects.codec import decode, encode
from subjects.errors import BusError
from subjects.ids import DeviceId, ReplicaId, WorkerId, incarnated
from subjects.messages import (
    CommandOutcome,
    CommandReply,
    DeviceKind,
    DeviceReport,
    DrainReplica,
    EngineType,
    EvictKv,
    KvReport,
    LoadModel,
    MigrateKv,
    OperationEnded,
    ReplicaReport,
    ReplicaState,
    UnloadReplica,
    WorkerBeat,
    WorkerCommand,
    WorkerSnapshot,
)
from subjects.tasks import end_tasks

DEVICE = DeviceId("cpu0")


class ScriptedAgent:
    """Answers commands at once and ends loads after ``load_s``; models in ``broken`` fail to load."""

    def __init__(self, bus: Bus, *, memory_bytes: int, load_s: float = 0.2) -> None:
        self.bus = bus
        self.worker = WorkerId(incarnated("w"))
        self.memory_bytes = memory_bytes
        self.load_s = load_s
        self.broken: set[str] = set()
        self.epoch_seen = 0
        self.commands: list[WorkerCommand] = []
        self.kv: KvReport | None = None
        """How its KV node is."""
        self.kv_failure = ""
        self.replicas: dict[ReplicaId, ReplicaReport] = {}
        self._names: dict[ReplicaId, str] = {}
        self._sequence = 0
        self._subscription: Subscription | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._subscription = await self.bus.subscribe(names.commands(self.worker), self._on_command)
        self._spawn(self._beat())

    async def stop(self) -> None:
        await end_tasks(self._tasks)
        if self._subscription is not None:
            await self._subscription.stop()

    @property
    def ready(self) -> list[str]:
        """Names of the models that are ready."""
        return sorted(self._names[r.replica] for r in self.replicas.values() if r.state is ReplicaState.READY)

    async def _beat(self) -> None:
        while True:
            self._sequence += 1
            with suppress(BusError):
                beat = WorkerBeat(worker=self.worker, sequence=self._sequence, epoch_seen=self.epoch_seen)
                await self.bus.publish(names.beat(self.worker), encode(beat))
                if self._sequence % 10 == 1:
                    await self._snapshot()
            await asyncio.sleep(0.1)

    async def _snapshot(self) -> None:
        self._sequence += 1
        reserved = sum(replica.budget_bytes for replica in self.replicas.values())
        snapshot = WorkerSnapshot(
            worker=self.worker,
            sequence=self._sequence,
            epoch_seen=self.epoch_seen,
            engines=(EngineType.SIMULATED,),
            devices=(
                DeviceReport(device=DEVICE, kind=DeviceKind.CPU, memory_bytes=self.memory_bytes, reserved_bytes=reserved),
            ),
            replicas=tuple(self.replicas.values()),
            kv=self.kv,
        )
        await self.bus.publish(names.worker_telemetry(self.worker), encode(snapshot))

    def _on_command(self, message: BusMessage) -> None:
        command: WorkerCommand = decode(message.payload, WorkerCommand)  # type: ignore[arg-type]
        self._spawn(self._apply(message.reply, command))

    async def _apply(self, reply: str, command: WorkerCommand) -> None:
        stale = command.epoch < self.epoch_seen
        self.epoch_seen = max(self.epoch_seen, command.epoch)
        outcome = CommandOutcome.STALE_EPOCH if stale else CommandOutcome.ACCEPTED
        answer = CommandReply(operation=command.operation, outcome=outcome, epoch_seen=self.epoch_seen)
        await self.bus.publish(reply, encode(answer))
        if stale:
            return
        self.commands.append(command)
        match command:
            case LoadModel():
                await self._load(command)
            case DrainReplica():
                await self._ended(command, command.replica)
            case UnloadReplica():
                self.replicas.pop(command.replica, None)
                await self._ended(command, command.replica)
            case EvictKv() | MigrateKv():
                await self._ended(command, None, self.kv_failure, detail="412 blocks, 289.0 MiB")
            case _:
                raise AssertionError(command)

    async def _load(self, command: LoadModel) -> None:
        replica = ReplicaId(incarnated(command.replica_name))
        self._names[replica] = command.record.name
        self._put(command, replica, ReplicaState.LOADING)
        await self._snapshot()
        await asyncio.sleep(self.load_s)
        if command.record.name in self.broken:
            del self.replicas[replica]
            await self._ended(command, replica, "RuntimeError: weights are damaged")
        else:
            self._put(command, replica, ReplicaState.READY)
            await self._ended(command, replica)

    def _put(self, command: LoadModel, replica: ReplicaId, state: ReplicaState) -> None:
        self.replicas[replica] = ReplicaReport(
            replica=replica,
            model_hash=command.record.model_hash,
            deployment=command.record.deployment,
            device=command.device,
            state=state,
            budget_bytes=command.record.budget_bytes,
        )

    async def _ended(
        self, command: WorkerCommand, replica: ReplicaId | None, failure: str = "", *, detail: str = ""
    ) -> None:
        event = OperationEnded(
            worker=self.worker, operation=command.operation, replica=replica, failure=failure, detail=detail
        )
        await self.bus.publish(names.worker_events(self.worker), encode(event))
        await self._snapshot()

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
