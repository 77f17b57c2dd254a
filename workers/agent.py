"""The agent process: one per device group. It starts, watches and ends replicas, and speaks for its devices on the bus.

A shell around :class:`workers.core.agent.AgentCore`: what arrives (commands, reports of replicas, exits, time) becomes one
event, and each command of the core is one call here. Nothing on this event loop waits for a replica, a disk or the bus, and
no engine is imported, so that beats go out on time. While the bus is away agent and replicas go on; what could not be
published is dropped, and a snapshot follows when the bus is back.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import secrets
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import msgspec
import structlog

from subjects import messages as m
from subjects import names
from subjects.bus import Bus, BusMessage
from subjects.codec import decode, encode
from subjects.errors import BusError, CarpoolError, DecodeError
from subjects.ids import DeviceId, OperationId, ReplicaId, WorkerId, incarnated, is_token
from subjects.tasks import Tasks
from workers.control import ControlStream, agent_stream, control_pair
from workers.control_messages import Start, ToAgent
from workers.core import agent_events as ev
from workers.core.agent import AgentCore
from workers.devices import gpu_used_bytes
from workers.kv_config import KvConfig, memory_note
from workers.kv_keeper import KvKeeper
from workers.processes import (
    Forwarder,
    Reaper,
    StateDirectory,
    StderrTail,
    become_subreaper,
    exec_replica,
    pss_bytes,
    reap,
    signal_group,
)
from workers.spec import ReplicaSpec
from workers.template import Template

BEAT_EVERY_S = 0.1
SAMPLE_EVERY_S = 2.0
"""How often memory is sampled, in a thread: reading a large process's page tables takes milliseconds."""
SPAWN_BOUND_S = 180.0
"""How long a fork may take, the start of the template included; the load's own timeout is usually shorter."""
LAST_WORDS_S = 0.5
"""How long an exited process's control connection is still read, so that its last report is not lost."""
OUTBOX_MESSAGES_MAX = 1024
FLUSH_S = 1.0
"""What the end of the agent waits for its last messages to leave."""
TEMPLATE_STOP_S = 12.0
FORKED_ENTRY = "workers.forked:run_forked"
"""By name: the template imports it, this process does not."""
TICK_S_MIN = 0.005

log = structlog.get_logger(__name__)


class AgentConfig(msgspec.Struct, frozen=True):
    """What ``carpool worker`` is told. ``nats_urls`` may hold credentials: never log it."""

    name: str
    nats_urls: tuple[str, ...]
    state_dir: Path
    devices: tuple[ev.Device, ...]
    engines: tuple[m.EngineType, ...] = ()
    """Empty: all whose packages are installed."""
    queue_shards: int = 1
    threads: int = 0
    """CPU threads per replica; 0 is the number of cores this process may use."""
    step_turns: bool | None = None
    """Whether vLLM engines on one device step in turns (``workers.turns``). None: on GPUs; replicas on a CPU have cores of
    their own to run on at the same time."""
    kv: KvConfig | None = None
    """What the KV node may use; None: there is none, and KV stays in the engines."""
    drain_s: float = 20.0
    """How long the end of the agent waits for running requests."""


def default_name() -> str:
    """A worker name made of the host's."""
    text = "".join(character if is_token(character) else "-" for character in platform.node())[:40].strip("-_")
    return text or "worker"


def installed_engines() -> tuple[m.EngineType, ...]:
    """The engines whose packages are here; looks without importing."""
    vllm = (m.EngineType.VLLM,) if importlib.util.find_spec("vllm") is not None else ()
    return (*vllm, m.EngineType.OPENAI_HTTP, m.EngineType.SIMULATED)


def engine_versions(engines: Sequence[m.EngineType]) -> dict[str, str]:
    """The version of vLLM where it is here, under whatever name it was packaged: other versions take other times."""
    packages = importlib.metadata.packages_distributions().get("vllm") if m.EngineType.VLLM in engines else None
    return {m.EngineType.VLLM.value: importlib.metadata.version(packages[0])} if packages else {}


async def run_agent(config: AgentConfig) -> int:
    """Runs an agent until it is told to end (SIGTERM, SIGINT); returns the exit code of the process.

    Raises:
        ConfigError: the state directory cannot be used.
    """
    from subjects.nats.bus import NatsBus

    worker = WorkerId(incarnated(config.name))
    state = StateDirectory(config.state_dir)
    become_subreaper()
    swept = await asyncio.to_thread(state.sweep)
    if swept:
        log.warning("replicas that a dead agent left behind were killed", replicas=swept)
    bus = await NatsBus.connect(config.nats_urls, name=worker, shards=config.queue_shards, wait=True)
    if config.kv is not None and (note := memory_note(config.kv, config.devices)):
        log.warning(note)
    agent = Agent(config, worker, bus, state)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stop)
    try:
        return await agent.run()
    finally:
        await bus.close()


@dataclass(slots=True)
class _Child:
    """A replica's process and what connects us to it."""

    pid: int
    pidfd: int
    control: ControlStream[ToAgent]
    stderr: StderrTail
    popen: subprocess.Popen[bytes] | None
    listener: asyncio.Task[None] | None = None


class Agent:
    """See the module's docstring."""

    def __init__(self, config: AgentConfig, worker: WorkerId, bus: Bus, state: StateDirectory) -> None:
        self._config = config
        self._worker = worker
        self._bus = bus
        self._state = state
        engines = config.engines or installed_engines()
        self._threads = config.threads or len(os.sched_getaffinity(0))
        self._core = AgentCore(
            ev.AgentSettings(
                worker=worker,
                host=platform.node(),
                devices=tuple(
                    msgspec.structs.replace(device, threads=self._threads) if device.kind is m.DeviceKind.CPU else device
                    for device in config.devices
                ),
                engines=engines,
                engine_versions=engine_versions(engines),
                resizing=tuple(engine for engine in engines if engine is m.EngineType.SIMULATED),
                kv=config.kv is not None,
            )
        )
        self._kinds = {device.device: device.kind for device in config.devices}
        self._forks = m.EngineType.VLLM in engines and m.DeviceKind.CPU in self._kinds.values()
        self._template = Template(FORKED_ENTRY, lambda pid: state.record(ReplicaId(f"template-{worker}"), pid))
        self._loop = asyncio.get_running_loop()
        self._children: dict[ReplicaId, _Child] = {}
        self._forwarder = Forwarder()
        self._kv = self._kv_keeper(config.kv) if config.kv is not None else None
        self._reaper = Reaper()
        self._tasks = Tasks(self._task_failed)
        self._timer: asyncio.TimerHandle | None = None
        self._outbox: deque[tuple[str, bytes]] = deque(maxlen=OUTBOX_MESSAGES_MAX)
        self._outbox_filled = asyncio.Event()
        self._outbox_empty = asyncio.Event()
        self._outbox_empty.set()
        self._ended: asyncio.Future[int] = self._loop.create_future()

    # ---- life

    def stop(self) -> None:
        """Starts the end: replicas are drained within the configured bound. Calling again does nothing."""
        log.info("ending: replicas are drained", drain_s=self._config.drain_s)
        self._feed(ev.ShutdownStarted(drain_s=self._config.drain_s))

    async def run(self) -> int:
        """Serves until the core says that the end is reached; returns the exit code."""
        self._bus.on_reconnected(lambda: self._feed(ev.BusRestored()))
        await self._bus.subscribe(names.commands(self._worker), self._command_received)
        self._tasks.spawn(self._beat(), self._send_outbox(), self._sample())
        if self._forks:
            self._tasks.spawn(self._warm_template())
        if self._kv is not None:
            self._tasks.spawn(self._kv.run())
        self._feed(ev.Ticked())
        log.info("worker", worker=self._worker, devices=[device.device for device in self._config.devices])
        try:
            code = await self._ended
            with suppress(TimeoutError):
                await asyncio.wait_for(self._outbox_empty.wait(), FLUSH_S)
            return code
        finally:
            if self._timer is not None:
                self._timer.cancel()
            await self._tasks.end()
            # On the clean path no replica is left; after an error here none may outlive its agent.
            for child in self._children.values():
                signal_group(child.pid, signal.SIGKILL)
            if self._kv is not None:
                await self._kv.stop()  # Last of those that matter: what replicas computed is written down now.
            with suppress(TimeoutError, CarpoolError, OSError):
                await asyncio.wait_for(self._template.stop(), TEMPLATE_STOP_S)
            self._state.forget(ReplicaId(f"template-{self._worker}"))

    def _task_failed(self, error: BaseException) -> None:
        # A part of the agent is missing now. To end is honest: whoever supervises it starts a whole one.
        if not self._ended.done():
            self._ended.set_exception(error)

    # ---- the core

    def _feed(self, event: ev.AgentEvent) -> None:
        if self._ended.done():
            return
        try:
            for command in self._core.step(self._loop.time(), event):
                self._do(command)
        except Exception as error:
            self._ended.set_exception(error)
            return
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(TICK_S_MIN, self._core.next_wake_s - self._loop.time())
        self._timer = self._loop.call_later(delay_s, self._feed, ev.Ticked())

    def _do(self, command: ev.AgentCommand) -> None:
        match command:
            case ev.SpawnReplica():
                self._tasks.spawn(self._start_replica(command))
            case ev.SendControl(replica, message):
                child = self._children.get(replica)
                if child is not None and not child.control.send(message):
                    log.warning("a replica does not read its control connection", replica=replica)
            case ev.KillReplica(replica, number):
                child = self._children.get(replica)
                if child is not None:
                    log.info("killing", replica=replica, signal=number)
                    signal_group(child.pid, number)
            case ev.AskKv(asked):
                self._tasks.spawn(self._ask_kv(asked))
            case ev.ReplyCommand(token, reply):
                if token:
                    self._put(token, encode(reply))
            case ev.PublishEvent(event):
                _log_event(event)
                self._put(names.worker_events(self._worker), encode(event))
            case ev.PublishSnapshot(snapshot):
                self._put(names.worker_telemetry(self._worker), encode(snapshot), replaces=True)
            case ev.ExitAgent(code):
                self._ended.set_result(code)
            case _:
                assert_never(command)

    # ---- the bus

    def _command_received(self, message: BusMessage) -> None:
        try:
            command: m.WorkerCommand = decode(message.payload, m.WorkerCommand)  # type: ignore[arg-type]
        except DecodeError as error:
            log.warning("a command could not be read", error=str(error))
            if message.reply:
                refusal = m.CommandReply(
                    operation=OperationId(""),
                    outcome=m.CommandOutcome.REFUSED,
                    epoch_seen=self._core.epoch_seen,
                    detail=str(error),
                )
                self._put(message.reply, encode(refusal))
            return
        log.info("command", kind=type(command).__name__, operation=command.operation, reason=command.reason)
        # Drawn here because a core draws nothing; the same form as ``subjects.ids.incarnated``.
        incarnation = secrets.token_hex(5)
        self._feed(ev.CommandReceived(token=message.reply, command=command, incarnation=incarnation))

    def _put(self, subject: str, payload: bytes, *, replaces: bool = False) -> None:
        """Queues a message; ``replaces`` drops an unsent one on the same subject. When full, the oldest goes."""
        if replaces:
            for index, (waiting, _) in enumerate(self._outbox):
                if waiting == subject:
                    del self._outbox[index]
                    break
        self._outbox.append((subject, payload))
        self._outbox_filled.set()
        self._outbox_empty.clear()

    async def _send_outbox(self) -> None:
        while True:
            await self._outbox_filled.wait()
            while self._outbox:
                subject, payload = self._outbox.popleft()
                try:
                    await self._bus.publish(subject, payload)
                except BusError as error:
                    log.debug("a message was not sent", subject=subject, error=type(error).__name__)
            self._outbox_filled.clear()
            self._outbox_empty.set()

    async def _beat(self) -> None:
        subject = names.beat(self._worker)
        sequence = 0
        due_s = self._loop.time()
        while True:
            sequence += 1
            beat = m.WorkerBeat(worker=self._worker, sequence=sequence, epoch_seen=self._core.epoch_seen)
            with suppress(BusError):
                await self._bus.publish(subject, encode(beat))
            now_s = self._loop.time()
            # Beats that were missed are not made up for.
            due_s = max(due_s + BEAT_EVERY_S, now_s)
            await asyncio.sleep(due_s - now_s)

    # ---- processes

    async def _warm_template(self) -> None:
        try:
            await self._template.start()
        except (CarpoolError, OSError, ImportError) as error:
            # The first load tries again and then says why.
            log.warning("the template for vLLM did not start", error=str(error))

    def _turns_directory(self, device: DeviceId) -> str:
        wanted = self._config.step_turns
        if wanted is None:
            wanted = self._kinds[device] is not m.DeviceKind.CPU
        return str(self._config.state_dir / "turns") if wanted else ""

    def _kv_keeper(self, config: KvConfig) -> KvKeeper:
        return KvKeeper(
            config,
            worker=self._worker,
            nats_urls=self._config.nats_urls,
            state=self._state,
            state_dir=self._config.state_dir,
            forward=self._forwarder.forward,
            report=lambda report: self._feed(ev.KvReported(report)),
        )

    async def _ask_kv(self, command: m.EvictKv | m.MigrateKv) -> None:
        assert self._kv is not None, "the core refuses what nobody could do"
        failure, detail = await self._kv.carry_out(command)
        self._feed(ev.KvAnswered(command.operation, failure=failure, detail=detail))

    async def _start_replica(self, command: ev.SpawnReplica) -> None:
        replica, record = command.replica, command.record
        spec = ReplicaSpec(
            replica=replica,
            worker=self._worker,
            device=command.device,
            peers=command.peers,
            record=msgspec.structs.replace(record, adapters=()),  # each grant brings its own
            nats_urls=self._config.nats_urls,
            queue_shards=self._config.queue_shards,
            threads=self._threads,
            turns_directory=self._turns_directory(command.device),
            kv_socket=self._kv.socket_path if self._kv is not None and record.kv_reuse else "",
            measure=command.measure,
        )
        ours, theirs = control_pair()
        stderr = StderrTail(self._loop, self._forwarder.forward)
        popen: subprocess.Popen[bytes] | None = None
        try:
            if record.engine_type is m.EngineType.VLLM and self._kinds[command.device] is m.DeviceKind.CPU:
                socket.send_fds(ours, [b"\0"], [stderr.write_fd])
                pid = await asyncio.wait_for(self._template.fork(spec, theirs), SPAWN_BOUND_S)
            else:
                popen = await asyncio.to_thread(exec_replica, theirs.fileno(), stderr.write_fd)
                pid = popen.pid
        except (CarpoolError, OSError, EOFError, ImportError, TimeoutError) as error:
            ours.close()
            detail = str(error) or type(error).__name__
            self._feed(ev.SpawnFailed(replica=replica, detail=f"{detail} {stderr.finish()}"))
            return
        finally:
            theirs.close()
            stderr.close_write_end()
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            ours.close()  # the lifeline: if the process does exist after all, it leaves now
            self._feed(ev.SpawnFailed(replica=replica, detail=f"process {pid} was gone at once: {error} {stderr.finish()}"))
            return
        control = await agent_stream(ours)
        child = _Child(pid=pid, pidfd=pidfd, control=control, stderr=stderr, popen=popen)
        self._children[replica] = child
        self._state.record(replica, pid)
        if popen is not None:
            control.send(Start(spec=spec))
        log.info("replica process", replica=replica, model=record.name, pid=pid)
        self._feed(ev.ReplicaSpawned(replica=replica, pid=pid))
        child.listener = self._loop.create_task(self._listen(replica, control))
        self._loop.add_reader(pidfd, self._exit_seen, replica)

    async def _listen(self, replica: ReplicaId, control: ControlStream[ToAgent]) -> None:
        try:
            while (message := await control.receive()) is not None:
                self._feed(ev.ControlReceived(replica=replica, message=message))
        except DecodeError as error:
            log.error("a replica sent garbage to its agent", replica=replica, error=str(error))
        self._feed(ev.ControlLost(replica=replica))

    def _exit_seen(self, replica: ReplicaId) -> None:
        child = self._children[replica]
        self._loop.remove_reader(child.pidfd)
        self._tasks.spawn(self._bury(replica, child))

    async def _bury(self, replica: ReplicaId, child: _Child) -> None:
        # Before it is reaped its pid is nobody else's, so what it left in its group can be ended safely.
        signal_group(child.pid, signal.SIGKILL)
        if child.listener is not None:
            # Its end of the connection is closed, so this takes only as long as reading what it had said.
            await asyncio.wait({child.listener}, timeout=LAST_WORDS_S)
            child.listener.cancel()
        code = reap(child.pid)
        if child.popen is not None:
            child.popen.returncode = code if code is not None else -1  # else Popen would wait for it again
        os.close(child.pidfd)
        del self._children[replica]
        self._state.forget(replica)
        log.info("replica process exited", replica=replica, pid=child.pid, code=code)
        self._feed(ev.ProcessExited(replica=replica, code=code, stderr_tail=child.stderr.finish()))
        await child.control.close()

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            pids = [(replica, child.pid) for replica, child in self._children.items()]
            replicas, devices = await asyncio.to_thread(_sample_memory, pids, self._config.devices)
            self._feed(ev.MemorySampled(replicas=replicas, devices=devices))
            owned = [child.pid for child in self._children.values()]
            if self._kv is not None and self._kv.pid is not None:
                owned.append(self._kv.pid)
            self._reaper.reap(owned)
            if self._forks and self._template.died and not self._ended.done():
                log.warning("the template died; no replica is hurt, and it is started again")
                self._tasks.spawn(self._warm_template())


def _sample_memory(
    pids: Sequence[tuple[ReplicaId, int]], devices: Sequence[ev.Device]
) -> tuple[tuple[tuple[ReplicaId, int], ...], tuple[tuple[DeviceId, int], ...]]:
    sampled = ((replica, pss_bytes(pid)) for replica, pid in pids)
    return tuple((replica, count) for replica, count in sampled if count is not None), gpu_used_bytes(devices)


def _log_event(event: m.WorkerEvent) -> None:
    match event:
        case m.OperationProgressed():
            log.debug("progress", operation=event.operation, state=event.state.value, detail=event.detail)
        case m.OperationEnded():
            emit = log.warning if event.failure else log.info
            emit("operation ended", operation=event.operation, replica=event.replica, failure=event.failure)
        case m.CostsMeasured():
            log.info("costs measured", replica=event.replica, points=len(event.points), whole=event.whole)
        case m.ReplicaDied():
            log.warning("replica died", replica=event.replica, detail=event.detail)
        case _:
            assert_never(event)
