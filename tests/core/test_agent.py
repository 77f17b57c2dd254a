"""The agent's core: events in, commands out."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subjects.ids import DeploymentKey, DeviceId, ModelHash, OperationId, ReplicaId, WorkerId
from subjects.messages import (
    CommandOutcome,
    CommandReply,
    DeviceKind,
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
    WorkerCommand,
    WorkerSnapshot,
)
from workers.control_messages import (
    Concurrency,
    Drain,
    Drained,
    Failed,
    Load,
    Ping,
    Pong,
    Progress,
    Ready,
    Stop,
    ToAgent,
    ToReplica,
)
from workers.core import agent
from workers.core.agent import (
    AGENT_STALL_S,
    DRAIN_GRACE_S,
    FAILED_EXIT_S,
    FAILED_SHOWN_S,
    KILL_BOUND_S,
    OPERATIONS_ENDED_MAX,
    PING_EVERY_S,
    PING_UNANSWERED_S,
    SNAPSHOT_COALESCE_S,
    SNAPSHOT_EVERY_S,
    STOP_GRACE_S,
    TRANSITIONS,
    AgentCore,
)
from workers.core.agent_events import (
    AgentCommand,
    AgentEvent,
    AgentSettings,
    BusRestored,
    CommandReceived,
    ControlLost,
    ControlReceived,
    Device,
    ExitAgent,
    KillReplica,
    MemorySampled,
    ProcessExited,
    PublishEvent,
    PublishSnapshot,
    ReplicaSpawned,
    ReplyCommand,
    SendControl,
    ShutdownStarted,
    SpawnFailed,
    SpawnReplica,
    Ticked,
)
from workers.engines.base import EngineInfo

WORKER = WorkerId("w-1")
CPU = DeviceId("cpu0")
OTHER = DeviceId("cpu1")
A_BIT = 1 / 64
"""Exact in binary, so that times compare."""
INFO = EngineInfo(slots=4, kv_pages=64, block_size=16, max_context_len=2048, gives_token_ids=True, continues=True)


def record(budget_bytes: int = 40, **fields: Any) -> ModelRecord:
    values: dict[str, Any] = {
        "name": "m",
        "model_hash": ModelHash("a" * 64),
        "deployment": DeploymentKey("d" * 64),
        "weights_hash": "b" * 64,
        "engine_type": EngineType.SIMULATED,
        "source": "",
        "weights_bytes": 0,
        "kv_bytes_per_token": 0,
        "kv_bytes": 0,
        "budget_bytes": budget_bytes,
        "max_context_len": 2048,
    }
    return ModelRecord(**(values | fields))


class Harness:
    """A core with a clock; snapshots are kept apart so that lists show what a test is about."""

    def __init__(self, *devices: tuple[DeviceId, int]) -> None:
        self.core = AgentCore(
            AgentSettings(
                worker=WORKER,
                host="h",
                devices=tuple(
                    Device(device=device, kind=DeviceKind.CPU, name="c", memory_bytes=memory_bytes)
                    for device, memory_bytes in devices or ((CPU, 100), (OTHER, 100))
                ),
                engines=(EngineType.SIMULATED, EngineType.OPENAI_HTTP),
            )
        )
        self.now_s = 1000.0
        self.snapshots: list[WorkerSnapshot] = []
        self.operations = 0
        self.feed(Ticked())

    def feed(self, event: AgentEvent) -> list[AgentCommand]:
        commands = self.core.step(self.now_s, event)
        self.snapshots += [command.snapshot for command in commands if isinstance(command, PublishSnapshot)]
        return [command for command in commands if not isinstance(command, PublishSnapshot)]

    def command(self, command: WorkerCommand, incarnation: str = "0") -> list[AgentCommand]:
        return self.feed(CommandReceived(token="t", command=command, incarnation=incarnation))

    def operation(self) -> OperationId:
        self.operations += 1
        return OperationId(f"op{self.operations}")

    def load(self, name: str = "r", device: DeviceId = CPU, timeout_s: float = 60.0, **fields: Any) -> list[AgentCommand]:
        return self.command(
            LoadModel(
                operation=self.operation(),
                epoch=1,
                device=device,
                record=record(**fields),
                replica_name=name,
                timeout_s=timeout_s,
            )
        )

    def says(self, replica: str, *messages: ToAgent) -> list[AgentCommand]:
        return [
            command
            for message in messages
            for command in self.feed(ControlReceived(replica=ReplicaId(replica), message=message))
        ]

    def spawned(self, replica: str, pid: int = 7) -> list[AgentCommand]:
        return self.feed(ReplicaSpawned(replica=ReplicaId(replica), pid=pid))

    def exited(self, replica: str, code: int | None = 0, stderr_tail: str = "") -> list[AgentCommand]:
        return self.feed(ProcessExited(replica=ReplicaId(replica), code=code, stderr_tail=stderr_tail))

    def ready(self, name: str = "r", **fields: Any) -> None:
        """A replica ``<name>-0`` that is ready."""
        self.load(name, **fields)
        self.spawned(f"{name}-0")
        self.says(f"{name}-0", Progress(state=ReplicaState.WARMING), Ready(info=INFO))
        assert self.state(f"{name}-0") is ReplicaState.READY

    def drain(self, replica: str = "r-0", timeout_s: float = 30.0) -> list[AgentCommand]:
        return self.command(
            DrainReplica(operation=self.operation(), epoch=1, replica=ReplicaId(replica), timeout_s=timeout_s)
        )

    def unload(self, replica: str = "r-0", force: bool = False) -> list[AgentCommand]:
        return self.command(UnloadReplica(operation=self.operation(), epoch=1, replica=ReplicaId(replica), force=force))

    def after(self, seconds: float) -> list[AgentCommand]:
        """Lets time pass, awake at every moment the core asks for; pings are answered unless a replica is in ``mute``."""
        end_s = self.now_s + seconds
        commands: list[AgentCommand] = []
        for _ in range(10_000):
            wake_s = self.core.next_wake_s
            if wake_s > end_s:
                break
            self.now_s = max(self.now_s, wake_s)
            for command in self.feed(Ticked()):
                match command:
                    case SendControl(replica, Ping(number=number)):
                        if replica not in self.mute:
                            self.says(replica, Pong(number=number))
                    case _:
                        commands.append(command)
        else:
            raise AssertionError("the core wants to be woken without end")
        self.now_s = end_s
        return commands

    mute: tuple[str, ...] = ()

    def report(self, replica: str) -> ReplicaReport | None:
        found = [report for report in self.core.snapshot(self.now_s).replicas if report.replica == replica]
        return found[0] if found else None

    def state(self, replica: str) -> ReplicaState | None:
        report = self.report(replica)
        return report.state if report else None


def reply(operation: str, outcome: CommandOutcome, detail: str = "", epoch: int = 1) -> ReplyCommand:
    return ReplyCommand(
        token="t",
        reply=CommandReply(operation=OperationId(operation), outcome=outcome, epoch_seen=epoch, detail=detail),
    )


def ended(operation: str, replica: str | None, failure: str = "", took_s: float = 0.0) -> PublishEvent:
    return PublishEvent(
        event=OperationEnded(
            worker=WORKER,
            operation=OperationId(operation),
            replica=ReplicaId(replica) if replica else None,
            failure=failure,
            took_s=took_s,
            withdrawn=failure == "unloaded before it was ready",
        )
    )


def progressed(operation: str, replica: str, state: ReplicaState, detail: str) -> PublishEvent:
    return PublishEvent(
        event=OperationProgressed(
            worker=WORKER, operation=OperationId(operation), replica=ReplicaId(replica), state=state, detail=detail
        )
    )


def died(replica: str, detail: str) -> PublishEvent:
    return PublishEvent(event=ReplicaDied(worker=WORKER, replica=ReplicaId(replica), detail=detail))


def send(replica: str, message: ToReplica) -> SendControl:
    return SendControl(replica=ReplicaId(replica), message=message)


def kill(replica: str) -> KillReplica:
    return KillReplica(replica=ReplicaId(replica), signal=signal.SIGKILL)


def replies(commands: Sequence[AgentCommand]) -> list[tuple[CommandOutcome, str]]:
    return [(command.reply.outcome, command.reply.detail) for command in commands if isinstance(command, ReplyCommand)]


ACCEPTED = CommandOutcome.ACCEPTED
REFUSED = CommandOutcome.REFUSED


# ------------------------------------------------------------------------------------------------------------ the life


def test_a_load_goes_from_command_to_ready() -> None:
    """One load, step by step, with every command it causes (WRK-3)."""
    h = Harness()
    assert h.load() == [
        reply("op1", ACCEPTED),
        progressed("op1", "r-0", ReplicaState.ABSENT, "accepted"),
        SpawnReplica(replica=ReplicaId("r-0"), device=CPU, record=record()),
        progressed("op1", "r-0", ReplicaState.LOADING, "starting the process"),
    ]
    h.now_s += 1
    assert h.spawned("r-0") == []
    assert h.says("r-0", Progress(state=ReplicaState.FETCHING, detail="weights")) == [
        progressed("op1", "r-0", ReplicaState.FETCHING, "weights")
    ]
    assert h.says("r-0", Progress(state=ReplicaState.LOADING, detail="engine", progress=0.5)) == [
        progressed("op1", "r-0", ReplicaState.LOADING, "engine")
    ]
    assert h.says("r-0", Progress(state=ReplicaState.WARMING, detail="engine")) == [
        progressed("op1", "r-0", ReplicaState.WARMING, "engine")
    ]
    assert h.report("r-0") == ReplicaReport(
        replica=ReplicaId("r-0"),
        model_hash=record().model_hash,
        deployment=record().deployment,
        device=CPU,
        state=ReplicaState.WARMING,
        budget_bytes=40,
    )
    assert h.says("r-0", Ready(info=INFO)) == [ended("op1", "r-0", took_s=1.0)]
    h.now_s += 0.25
    assert h.report("r-0") == ReplicaReport(
        replica=ReplicaId("r-0"),
        model_hash=record().model_hash,
        deployment=record().deployment,
        device=CPU,
        state=ReplicaState.READY,
        budget_bytes=40,
        slots=4,
        slots_max=4,
        continues=True,
        kv_pages=64,
        kv_pages_free=64,
        idle_s=0.25,
        state_s=0.25,
        progress=1.0,
    )


def test_a_drained_replica_is_stopped_and_its_budget_freed_by_its_exit_only() -> None:
    """Drain, unload, exit: the order of the design, and memory that is free only when the process is gone."""
    h = Harness()
    h.ready()
    assert h.drain(timeout_s=5) == [reply("op2", ACCEPTED), send("r-0", Drain(timeout_s=5))]
    assert h.state("r-0") is ReplicaState.DRAINING
    h.now_s += 3
    assert h.says("r-0", Drained(given_back=1)) == [ended("op2", "r-0", took_s=3.0)]
    assert h.unload() == [reply("op3", ACCEPTED), send("r-0", Stop())]
    assert h.core.reserved_bytes(CPU) == 40
    assert h.exited("r-0") == [ended("op3", "r-0")]
    assert h.core.reserved_bytes(CPU) == 0
    assert h.state("r-0") is None


def test_unload_before_drained_is_refused_unless_forced() -> None:
    """An agent unloads only after Drain has answered, unless it is told to force (DESIGN 4)."""
    h = Harness()
    h.ready()
    assert replies(h.unload()) == [(REFUSED, "replica r-0 is ready and has not drained; drain it or use force")]
    h.drain()
    assert replies(h.unload()) == [(REFUSED, "replica r-0 is draining and has not drained; drain it or use force")]
    assert h.unload(force=True) == [reply("op5", ACCEPTED), send("r-0", Stop())]
    assert h.exited("r-0") == [
        ended("op3", "r-0", "unloaded before it had drained"),
        ended("op5", "r-0"),
    ]


def test_a_replica_that_ignores_stop_is_killed_after_a_grace() -> None:
    """A stop is bounded, so nothing is "stopping" for ever (C8)."""
    h = Harness()
    h.ready()
    h.unload(force=True)
    assert h.after(STOP_GRACE_S - A_BIT) == []
    assert h.after(2 * A_BIT) == [kill("r-0")]
    assert h.exited("r-0", -9) == [ended("op2", "r-0", took_s=STOP_GRACE_S + A_BIT)]


def test_a_drain_that_does_not_answer_ends_in_stop_then_kill() -> None:
    """One stuck request cannot hold a drain for ever (C8, D6)."""
    h = Harness()
    h.ready()
    h.drain(timeout_s=5)
    failure = "the replica did not drain within its bound and was stopped"
    assert h.after(5 + DRAIN_GRACE_S - A_BIT) == []
    assert h.after(2 * A_BIT) == [send("r-0", Stop())]
    assert h.state("r-0") is ReplicaState.FAILED
    assert h.core.reserved_bytes(CPU) == 40
    assert h.after(STOP_GRACE_S) == [kill("r-0")]
    assert h.exited("r-0", -9) == [
        died("r-0", failure),
        ended("op2", "r-0", failure, took_s=5 + DRAIN_GRACE_S + STOP_GRACE_S + A_BIT),
    ]
    assert h.core.reserved_bytes(CPU) == 0


def test_drains_join_and_only_a_shorter_bound_is_told() -> None:
    """Two drains of one replica end together; the replica hears of the second only if it is in more haste."""
    h = Harness()
    h.ready()
    h.drain(timeout_s=30)
    assert h.drain(timeout_s=60) == [reply("op3", ACCEPTED)]
    assert h.drain(timeout_s=2) == [reply("op4", ACCEPTED), send("r-0", Drain(timeout_s=2))]
    assert h.says("r-0", Drained()) == [ended("op2", "r-0"), ended("op3", "r-0"), ended("op4", "r-0")]
    assert h.says("r-0", Drained()) == []
    assert h.drain() == [reply("op5", ACCEPTED), ended("op5", "r-0")]
    assert h.after(100) == []


def test_unsolicited_drained_changes_nothing() -> None:
    """A replica cannot talk itself into being unloaded."""
    h = Harness()
    h.ready()
    assert h.says("r-0", Drained()) == []
    assert h.state("r-0") is ReplicaState.READY
    assert replies(h.unload())[0][0] is REFUSED


# ------------------------------------------------------------------------------------------------------ failing loads


def test_a_process_that_exits_while_loading_fails_the_load_at_once_with_its_last_words() -> None:
    """No polling of a child that is dead already (B9)."""
    h = Harness()
    h.load()
    h.spawned("r-0")
    failure = "the process exited with code 3 while loading: Traceback: | OSError: no such model"
    assert h.exited("r-0", 3, "\n\nTraceback:\n  OSError: no such model\n") == [ended("op1", "r-0", failure)]
    assert h.report("r-0") == ReplicaReport(
        replica=ReplicaId("r-0"),
        model_hash=record().model_hash,
        deployment=record().deployment,
        device=CPU,
        state=ReplicaState.FAILED,
        budget_bytes=0,
        failure=failure,
    )
    assert h.core.reserved_bytes(CPU) == 0


def test_a_failed_replica_vanishes_after_it_was_reported() -> None:
    """It is seen in at least one periodic snapshot, then no more."""
    h = Harness()
    h.load()
    h.spawned("r-0")
    h.exited("r-0", 1)
    shown = [s for s in h.snapshots if any(r.state is ReplicaState.FAILED for r in s.replicas)]
    assert len(shown) == 1
    h.after(FAILED_SHOWN_S - A_BIT)
    assert h.state("r-0") is ReplicaState.FAILED
    h.after(2 * A_BIT)
    assert h.state("r-0") is None
    assert h.snapshots[-1].replicas == ()


def test_a_load_timeout_kills_and_fails_with_the_last_words() -> None:
    """A load that hangs is bounded (B9), and the next one on the device begins when the process is gone."""
    h = Harness()
    h.load(timeout_s=10)
    h.load("s")
    h.spawned("r-0")
    h.says("r-0", Progress(state=ReplicaState.WARMING))
    assert h.after(10 - A_BIT) == []
    assert h.after(2 * A_BIT) == [kill("r-0")]
    failure = "the load did not end within 10 s, it was warming: stuck in a lock"
    assert h.says("r-0", Ready(info=INFO)) == []
    assert h.exited("r-0", -9, "stuck in a lock") == [
        ended("op1", "r-0", failure, took_s=10 + A_BIT),
        SpawnReplica(replica=ReplicaId("s-0"), device=CPU, record=record()),
        progressed("op2", "s-0", ReplicaState.LOADING, "starting the process"),
    ]


def test_a_load_timeout_without_a_process_yet_kills_it_when_it_appears() -> None:
    """A spawn that takes too long leaves no process behind."""
    h = Harness()
    h.load(timeout_s=10)
    assert h.after(11) == []
    assert h.state("r-0") is ReplicaState.FAILED
    assert h.spawned("r-0") == [kill("r-0")]
    assert h.exited("r-0", -9) == [ended("op1", "r-0", "the load did not end within 10 s, it was loading", took_s=11.0)]


def test_a_spawn_that_fails_ends_the_load_and_frees_the_budget() -> None:
    """No process, no budget."""
    h = Harness()
    h.load(budget_bytes=100)
    assert h.feed(SpawnFailed(replica=ReplicaId("r-0"), detail="no\nmemory")) == [
        ended("op1", "r-0", "the process could not be started: no memory")
    ]
    assert h.core.reserved_bytes(CPU) == 0
    h.ready("s", budget_bytes=100)


def test_a_reported_failure_is_the_failure() -> None:
    """The replica's own line is worth more than its exit code; it gets a moment to leave by itself."""
    h = Harness()
    h.load()
    h.spawned("r-0")
    assert h.says("r-0", Failed(detail="not enough\nmemory")) == []
    assert h.state("r-0") is ReplicaState.FAILED
    assert h.says("r-0", Failed(detail="again")) == []
    assert h.after(FAILED_EXIT_S) == [kill("r-0")]
    assert h.exited("r-0", -9, "noise") == [ended("op1", "r-0", "not enough memory", took_s=FAILED_EXIT_S)]


def test_ready_without_warming_is_a_failure() -> None:
    """Ready only after the warm-up (WRK-3)."""
    h = Harness()
    h.load()
    h.spawned("r-0")
    assert h.says("r-0", Ready(info=INFO)) == [kill("r-0")]
    assert h.exited("r-0", -9) == [ended("op1", "r-0", "the replica reported ready without a warm-up")]


def test_reports_of_a_load_that_are_out_of_place_change_nothing() -> None:
    """Only the states of a load are the replica's to tell, only while it loads, and only along the table."""
    h = Harness()
    h.load()
    h.spawned("r-0")
    assert h.says("r-0", Progress(state=ReplicaState.READY, detail="x")) == []
    h.says("r-0", Progress(state=ReplicaState.WARMING))
    h.says("r-0", Progress(state=ReplicaState.FETCHING))
    assert h.state("r-0") is ReplicaState.WARMING
    h.says("r-0", Ready(info=INFO))
    assert h.says("r-0", Progress(state=ReplicaState.LOADING, detail="x"), Ready(info=INFO)) == []
    assert h.state("r-0") is ReplicaState.READY
    assert h.says("ghost-0", Drained()) == []


def test_a_closed_control_connection_means_exit_or_kill() -> None:
    """A replica that its agent cannot reach must not go on."""
    h = Harness()
    h.ready()
    assert h.feed(ControlLost(replica=ReplicaId("r-0"))) == []
    assert h.after(FAILED_EXIT_S) == [kill("r-0")]
    failure = "the replica closed its control connection and did not exit"
    assert h.exited("r-0", -9) == [died("r-0", failure)]


def test_ready_after_the_connection_was_lost_is_not_ready() -> None:
    """What was still in the pipe of a dying process makes no replica."""
    h = Harness()
    h.load()
    h.spawned("r-0")
    h.says("r-0", Progress(state=ReplicaState.WARMING))
    h.feed(ControlLost(replica=ReplicaId("r-0")))
    assert h.says("r-0", Ready(info=INFO)) == []
    assert h.state("r-0") is ReplicaState.WARMING
    assert h.exited("r-0", 70) == [ended("op1", "r-0", "the process exited with code 70 while warming")]


def test_a_connection_that_closes_with_its_process_is_an_exit() -> None:
    """The end of the stream is seen before the exit; the exit says more."""
    h = Harness()
    h.ready()
    h.feed(ControlLost(replica=ReplicaId("r-0")))
    assert h.exited("r-0", -11) == [died("r-0", "the process was ended by SIGSEGV while ready")]
    assert h.exited("r-0", -11) == []
    assert h.feed(ControlLost(replica=ReplicaId("r-0"))) == []


@pytest.mark.parametrize(
    ("code", "text"),
    [(None, "exited"), (0, "exited with code 0"), (-9, "was ended by SIGKILL"), (-100, "was ended by signal 100")],
)
def test_exits_are_told_in_words(code: int | None, text: str) -> None:
    """Whatever the kernel says, the line is readable."""
    h = Harness()
    h.ready()
    assert h.exited("r-0", code) == [died("r-0", f"the process {text} while ready")]


def test_last_words_are_bounded() -> None:
    """A failure is a line, not a log."""
    h = Harness()
    h.load()
    h.spawned("r-0")
    (command,) = h.exited("r-0", 1, "first\n" + "x" * 3000 + " the reason")
    assert isinstance(command, PublishEvent) and isinstance(command.event, OperationEnded)
    assert len(command.event.failure) <= agent.FAILURE_CHARS_MAX
    assert command.event.failure.startswith("the process exited with code 1 while loading: first")
    assert command.event.failure.endswith(" the reason")


def test_a_process_that_outlives_sigkill_is_reported_and_stays_charged() -> None:
    """A process in the kernel's hands holds its memory; saying otherwise would overbook the device."""
    h = Harness()
    h.load(timeout_s=1)
    h.load("s")
    h.spawned("r-0", pid=77)
    assert h.after(1) == [kill("r-0")]
    commands = h.after(KILL_BOUND_S)
    assert commands[:2] == [
        ended("op1", "r-0", "the load did not end within 1 s, it was loading", took_s=1 + KILL_BOUND_S),
        kill("r-0"),
    ]
    assert [type(command) for command in commands[2:]] == [SpawnReplica, PublishEvent]
    assert h.core.reserved_bytes(CPU) == 80
    assert h.after(KILL_BOUND_S) == [kill("r-0")]
    h.exited("r-0", -9)
    assert h.core.reserved_bytes(CPU) == 40


def test_an_unload_whose_process_outlives_sigkill_fails() -> None:
    """The scheduler must not plan with memory that is not free."""
    h = Harness()
    h.ready()
    h.unload(force=True)
    h.after(STOP_GRACE_S)
    detail = "process 7 outlived SIGKILL by 10 s; its memory stays charged"
    assert h.after(KILL_BOUND_S) == [ended("op2", "r-0", detail, took_s=STOP_GRACE_S + KILL_BOUND_S), kill("r-0")]
    assert h.state("r-0") is ReplicaState.FAILED
    assert h.exited("r-0", -9) == [died("r-0", detail)]


# --------------------------------------------------------------------------------------------------- serving and pings


def test_a_serving_replica_that_dies_is_reported_and_its_budget_freed() -> None:
    """Death of an engine is an event and room (WRK-1)."""
    h = Harness()
    h.ready(budget_bytes=100)
    assert h.exited("r-0", -9, "boom") == [died("r-0", "the process was ended by SIGKILL while ready: boom")]
    assert h.core.reserved_bytes(CPU) == 0
    h.ready("s", budget_bytes=100)


def test_a_replica_that_dies_while_it_drains_fails_the_drain() -> None:
    """Whoever waits for the drain hears of the death."""
    h = Harness()
    h.ready()
    h.drain()
    failure = "the process exited with code 1 while draining"
    assert h.exited("r-0", 1) == [died("r-0", failure), ended("op2", "r-0", failure)]


def test_an_unanswered_ping_kills() -> None:
    """A serving replica whose event loop is stuck is dead for its requests (DESIGN 3.7)."""
    h = Harness()
    h.ready()
    h.after(3 * PING_EVERY_S)
    h.mute = ("r-0",)
    # The last answered ping was sent just now, the next one is due in half a second.
    assert h.after(PING_EVERY_S + PING_UNANSWERED_S - A_BIT) == []
    assert h.after(2 * A_BIT) == [kill("r-0")]
    failure = "the replica left a ping unanswered for 2 s and was killed"
    assert h.exited("r-0", -9, "tail") == [died("r-0", f"{failure}: tail")]


def test_pings_are_numbered_and_a_late_answer_covers_the_earlier_ones() -> None:
    """Answers come in order, so one stands for all before it."""
    h = Harness()
    h.ready()
    sent = []
    for _ in range(3):
        h.now_s += PING_EVERY_S
        sent += h.feed(Ticked())
    assert sent == [send("r-0", Ping(number=1)), send("r-0", Ping(number=2)), send("r-0", Ping(number=3))]
    h.says("r-0", Pong(number=2))
    h.mute = ("r-0",)
    # Number 3 went out just now.
    assert h.after(PING_UNANSWERED_S - A_BIT) == []
    assert h.after(2 * A_BIT) == [kill("r-0")]


def test_a_loading_replica_is_not_pinged() -> None:
    """Loading blocks event loops; the load has its own bound."""
    h = Harness()
    h.load()
    h.spawned("r-0")
    h.mute = ("r-0",)
    assert h.after(50) == []
    assert h.state("r-0") is ReplicaState.LOADING


def test_a_stalled_agent_blames_itself_first() -> None:
    """Silence counts only while the judge itself runs."""
    h = Harness()
    h.ready()
    h.now_s += PING_EVERY_S
    assert h.feed(Ticked()) == [send("r-0", Ping(number=1))]
    h.now_s += 60
    assert h.feed(Ticked()) == [send("r-0", Ping(number=2))]
    h.mute = ("r-0",)
    assert h.after(PING_UNANSWERED_S - A_BIT) == []
    assert h.after(2 * A_BIT) == [kill("r-0")]
    assert AGENT_STALL_S > PING_EVERY_S


def test_a_drained_replica_is_still_pinged() -> None:
    """It still holds its memory; nobody must wait for a stuck one at the unload."""
    h = Harness()
    h.ready()
    h.drain()
    h.says("r-0", Drained())
    h.mute = ("r-0",)
    assert h.after(2 * PING_EVERY_S + PING_UNANSWERED_S) == [kill("r-0")]


# ------------------------------------------------------------------------------------------------------------- budgets


def test_a_load_that_does_not_fit_is_refused_with_the_numbers() -> None:
    """The budget is checked before the load (E4), queued and ending replicas included."""
    h = Harness()
    h.load(budget_bytes=60)
    h.load("s", budget_bytes=40)
    assert h.load("t", budget_bytes=1) == [
        reply("op3", REFUSED, "m needs 1 bytes on cpu0; 0 of 100 bytes are free"),
    ]
    h.load("u", device=OTHER, budget_bytes=100)
    assert [h.core.reserved_bytes(device) for device in (CPU, OTHER)] == [100, 100]
    assert [(d.device, d.memory_bytes, d.reserved_bytes) for d in h.snapshots[-1].devices] == [
        (CPU, 100, 100),
        (OTHER, 100, 100),
    ]


def test_loads_on_one_device_run_one_after_the_other_and_devices_do_not_wait_for_each_other() -> None:
    """Four loads at once on one device are serialised in order (E4)."""
    h = Harness()
    spawns = [
        [c.replica for c in h.load(name, device=device, budget_bytes=20) if isinstance(c, SpawnReplica)]
        for name, device in (("a", CPU), ("b", CPU), ("c", OTHER), ("d", CPU), ("e", OTHER))
    ]
    assert spawns == [["a-0"], [], ["c-0"], [], []]
    order = []
    for name in "abd":
        h.spawned(f"{name}-0")
        commands = h.says(f"{name}-0", Progress(state=ReplicaState.WARMING), Ready(info=INFO))
        order.append([c.replica for c in commands if isinstance(c, SpawnReplica)])
    assert order == [["b-0"], ["d-0"], []]
    assert h.state("e-0") is ReplicaState.ABSENT


def test_what_a_load_takes_begins_with_its_turn() -> None:
    """A load that waited 5 s for another one on its device and then took 2 s is told as 2 s: prices of loads follow it."""
    h = Harness()
    h.load("a", budget_bytes=20)
    h.load("b", budget_bytes=20)
    for name, seconds in (("a", 5.0), ("b", 2.0)):
        h.spawned(f"{name}-0")
        h.now_s += seconds
        commands = h.says(f"{name}-0", Progress(state=ReplicaState.WARMING), Ready(info=INFO))
        (end,) = [c.event for c in commands if isinstance(c, PublishEvent) and isinstance(c.event, OperationEnded)]
        assert end.took_s == pytest.approx(seconds)


def test_a_queued_load_is_unloaded_without_force_and_never_starts() -> None:
    """Nobody is served by it; there is nothing to drain."""
    h = Harness()
    h.load("a")
    h.load("b")
    assert h.unload("b-0") == [
        reply("op3", ACCEPTED),
        ended("op2", "b-0", "unloaded before it was ready"),
        ended("op3", "b-0"),
    ]
    assert h.core.reserved_bytes(CPU) == 40
    h.spawned("a-0")
    assert [type(c) for c in h.says("a-0", Progress(state=ReplicaState.WARMING), Ready(info=INFO))] == [
        PublishEvent,
        PublishEvent,
    ]


def test_a_forced_unload_of_a_load_kills_it() -> None:
    """A load holds no request; asking it nicely would only take time."""
    h = Harness()
    h.load("a")
    assert replies(h.unload("a-0"))[0][0] is REFUSED
    h.spawned("a-0")
    assert h.unload("a-0", force=True) == [reply("op3", ACCEPTED), kill("a-0")]
    assert h.unload("a-0") == [reply("op4", ACCEPTED)]
    assert h.exited("a-0", -9) == [
        ended("op1", "a-0", "unloaded before it was ready"),
        ended("op3", "a-0"),
        ended("op4", "a-0"),
    ]


def test_a_forced_unload_while_the_process_is_made_kills_it_when_it_appears() -> None:
    """No process is left behind by an unload that was faster than the spawn."""
    h = Harness()
    h.load("a")
    assert h.unload("a-0", force=True) == [reply("op2", ACCEPTED)]
    assert h.spawned("a-0") == [kill("a-0")]
    h.exited("a-0", -9)
    h.load("b")
    h.unload("b-0", force=True)
    assert h.feed(SpawnFailed(replica=ReplicaId("b-0"), detail="x")) == [
        ended("op3", "b-0", "unloaded before it was ready"),
        ended("op4", "b-0"),
    ]


def test_unloading_a_failed_replica_forgets_it() -> None:
    """The scheduler may clear what failed."""
    h = Harness()
    h.load()
    h.spawned("r-0")
    h.exited("r-0", 1)
    assert h.unload() == [reply("op2", ACCEPTED), ended("op2", "r-0")]
    assert h.state("r-0") is None


# ---------------------------------------------------------------------------------------------- operations and epochs


def test_a_repeated_operation_is_applied_once() -> None:
    """Its event is sent again if it has ended (BUS-4)."""
    h = Harness()
    load = LoadModel(operation=OperationId("op"), epoch=1, device=CPU, record=record(), replica_name="r")
    h.command(load)
    assert h.command(load, incarnation="1") == [reply("op", CommandOutcome.REPEATED)]
    h.spawned("r-0")
    h.says("r-0", Progress(state=ReplicaState.WARMING), Ready(info=INFO))
    h.now_s += 1
    assert h.command(load, incarnation="2") == [reply("op", CommandOutcome.REPEATED), ended("op", "r-0")]
    assert [report.replica for report in h.core.snapshot(h.now_s).replicas] == ["r-0"]


def test_a_refused_operation_stays_refused() -> None:
    """A late copy of a command must not be applied after the scheduler has moved on."""
    h = Harness()
    h.ready("a", budget_bytes=100)
    load = LoadModel(operation=OperationId("op"), epoch=1, device=CPU, record=record(), replica_name="r")
    detail = "m needs 40 bytes on cpu0; 0 of 100 bytes are free"
    assert h.command(load) == [reply("op", REFUSED, detail)]
    h.exited("a-0", 1)
    assert h.command(load) == [reply("op", REFUSED, detail)]


def test_a_lower_epoch_is_refused_and_not_remembered() -> None:
    """A leader that was replaced changes nothing any more (BUS-4); its operation id is not used up."""
    h = Harness()
    load = LoadModel(operation=OperationId("op"), epoch=4, device=CPU, record=record(), replica_name="r")
    h.command(SetConcurrency(operation=OperationId("x"), epoch=5, replica=ReplicaId("none"), slots=1))
    assert h.core.epoch_seen == 5
    assert h.command(load) == [reply("op", CommandOutcome.STALE_EPOCH, "epoch 4 is over; epoch 5 was seen", 5)]
    same = LoadModel(operation=OperationId("op"), epoch=5, device=CPU, record=record(), replica_name="r")
    assert h.command(same)[0] == reply("op", ACCEPTED, epoch=5)
    assert h.snapshots[-1].epoch_seen == 5
    assert h.command(load) == [reply("op", CommandOutcome.STALE_EPOCH, "epoch 4 is over; epoch 5 was seen", 5)]


def test_ended_operations_are_remembered_up_to_a_bound() -> None:
    """Memory is bounded; the newest are kept."""
    h = Harness()
    h.ready()
    commands = [
        SetConcurrency(operation=OperationId(f"c{index}"), epoch=1, replica=ReplicaId("r-0"), slots=2)
        for index in range(OPERATIONS_ENDED_MAX)
    ]
    for command in commands:
        h.command(command)
    assert replies(h.command(commands[0])) == [(CommandOutcome.REPEATED, "")]
    h.command(SetConcurrency(operation=OperationId("one more"), epoch=1, replica=ReplicaId("r-0"), slots=2))
    assert replies(h.command(commands[0])) == [(ACCEPTED, "")]
    assert replies(h.command(commands[-1])) == [(CommandOutcome.REPEATED, "")]


def test_running_operations_are_bounded() -> None:
    """A flood of drains is refused, not stored."""
    h = Harness()
    h.ready()
    for _ in range(agent.OPERATIONS_RUNNING_MAX):
        assert replies(h.drain()) == [(ACCEPTED, "")]
    assert replies(h.drain()) == [(REFUSED, f"{agent.OPERATIONS_RUNNING_MAX} operations run already")]


def test_concurrency_is_told_and_bounded() -> None:
    """The replica hears it, the snapshot shows it."""
    h = Harness()
    h.ready()

    def told(slots: int) -> list[AgentCommand]:
        return h.command(SetConcurrency(operation=h.operation(), epoch=1, replica=ReplicaId("r-0"), slots=slots))

    assert told(4) == [reply("op2", ACCEPTED), send("r-0", Concurrency(slots=4)), ended("op2", "r-0")]
    assert told(1) == [reply("op3", ACCEPTED), send("r-0", Concurrency(slots=1)), ended("op3", "r-0")]
    report = h.report("r-0")
    assert report is not None and report.slots == 1
    for slots in (0, 5):
        assert replies(told(slots)) == [(REFUSED, f"slots {slots}: this engine takes 1 to 4")]
    h.drain()
    assert replies(told(2)) == [(REFUSED, "replica r-0 is draining; only a ready one takes this")]


@pytest.mark.parametrize(
    "command",
    [
        SleepReplica(operation=OperationId("op"), epoch=1, replica=ReplicaId("r-0")),
        WakeReplica(operation=OperationId("op"), epoch=1, replica=ReplicaId("r-0")),
        ResizeKv(operation=OperationId("op"), epoch=1, replica=ReplicaId("r-0"), kv_bytes=1),
    ],
)
def test_what_no_engine_offers_is_refused(command: WorkerCommand) -> None:
    """A command that nobody carries out is not accepted."""
    h = Harness()
    h.ready()
    ((outcome, detail),) = replies(h.command(command))
    assert outcome is REFUSED and detail.endswith("is not offered by this engine")


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"device": DeviceId("gpu9")}, "there is no device gpu9; this worker has cpu0, cpu1"),
        ({"engine_type": EngineType.VLLM}, "engine vllm is not offered by this worker"),
        ({"name": "a.b"}, "replica_name: use 1 to 48 letters, digits, '-' or '_'"),
        ({"name": "a" * 49}, "replica_name: use 1 to 48 letters, digits, '-' or '_'"),
        ({"timeout_s": 0.0}, "timeout_s 0.0: use more than 0 and at most 3600"),
        ({"timeout_s": math.nan}, "timeout_s nan: use more than 0 and at most 3600"),
        ({"timeout_s": 3601.0}, "timeout_s 3601.0: use more than 0 and at most 3600"),
        ({"budget_bytes": -1}, "budget_bytes -1: must not be negative"),
        ({"budget_bytes": 101}, "m needs 101 bytes on cpu0; 100 of 100 bytes are free"),
    ],
)
def test_loads_that_cannot_be_are_refused_with_the_reason(fields: dict[str, Any], detail: str) -> None:
    """Nothing is spawned, nothing is charged."""
    h = Harness()
    assert h.load(**fields) == [reply("op1", REFUSED, detail)]
    assert h.core.reserved_bytes(CPU) == 0


def test_commands_for_replicas_that_are_not_here_are_refused() -> None:
    """An incarnation that is gone is gone."""
    h = Harness()
    told = SetConcurrency(operation=h.operation(), epoch=1, replica=ReplicaId("r-0"), slots=1)
    assert [replies(c) for c in (h.command(told), h.drain(), h.unload())] == [[(REFUSED, "replica r-0 is not here")]] * 3


@pytest.mark.parametrize("timeout_s", [-1.0, math.nan, 3601.0])
def test_a_drain_without_a_sane_bound_is_refused(timeout_s: float) -> None:
    """Every wait has a bound."""
    h = Harness()
    h.ready()
    assert replies(h.drain(timeout_s=timeout_s)) == [(REFUSED, f"timeout_s {timeout_s}: use 0 to 3600")]


def test_only_a_ready_replica_drains() -> None:
    """Others hold no request, or end already."""
    h = Harness()
    h.load()
    h.load("s")
    assert replies(h.drain("r-0")) == [(REFUSED, "replica r-0 is loading; only a ready one can drain")]
    assert replies(h.drain("s-0")) == [(REFUSED, "replica s-0 is queued; only a ready one can drain")]
    h.spawned("r-0")
    h.says("r-0", Progress(state=ReplicaState.WARMING), Ready(info=INFO))
    h.unload(force=True)
    assert replies(h.drain("r-0")) == [(REFUSED, "replica r-0 is ending; only a ready one can drain")]


# ----------------------------------------------------------------------------------------------------------- snapshots


def test_counters_are_gathered_and_states_are_told_at_once() -> None:
    """A busy replica does not flood the bus; a change of state does not wait."""
    h = Harness()
    h.ready()
    h.after(1)
    before = len(h.snapshots)
    for running in (1, 2, 3):
        h.says("r-0", Load(running=running, waiting=0, kv_pages_free=60))
    assert len(h.snapshots) <= before + 1
    h.after(SNAPSHOT_COALESCE_S)
    assert len(h.snapshots) <= before + 2
    report = h.snapshots[-1].replicas[0]
    assert (report.running, report.kv_pages_free, report.idle_s) == (3, 60, 0.0)
    h.drain()
    assert h.snapshots[-1].replicas[0].state is ReplicaState.DRAINING


def test_idle_time_grows_between_reports() -> None:
    """The replica says since when, the agent adds the time since then."""
    h = Harness()
    h.ready()
    h.says("r-0", Load(running=0, waiting=1, kv_pages_free=64, idle_s=0))
    h.after(2)
    busy = h.report("r-0")
    h.says("r-0", Load(running=0, waiting=0, kv_pages_free=64, idle_s=7))
    h.after(2)
    idle = h.report("r-0")
    assert busy is not None and busy.idle_s == 0 and busy.running == 1
    assert idle is not None and idle.idle_s == pytest.approx(9)


def test_a_full_snapshot_is_periodic_and_follows_the_bus() -> None:
    """Every 5 s, and at once when the bus is back; sequence numbers grow by one."""
    h = Harness()
    assert [s.sequence for s in h.snapshots] == [1]
    h.after(SNAPSHOT_EVERY_S - A_BIT)
    assert [s.sequence for s in h.snapshots] == [1]
    h.after(2 * A_BIT)
    assert [s.sequence for s in h.snapshots] == [1, 2]
    assert h.feed(BusRestored()) == []
    assert [s.sequence for s in h.snapshots] == [1, 2, 3]
    assert h.snapshots[-1].engines == (EngineType.SIMULATED, EngineType.OPENAI_HTTP)


def test_memory_is_reported_of_replicas_and_devices() -> None:
    """On CPU the used bytes are the sum of the replicas; a driver's figure stands where there is one."""
    h = Harness()
    h.ready()
    h.feed(MemorySampled(replicas=((ReplicaId("r-0"), 30), (ReplicaId("ghost-0"), 5)), devices=((OTHER, 12),)))
    h.after(1)
    assert h.snapshots[-1].replicas[0].memory_bytes == 30
    assert [device.used_bytes for device in h.snapshots[-1].devices] == [30, 12]
    h.exited("r-0", 1)
    assert [device.used_bytes for device in h.snapshots[-1].devices] == [0, 12]


# ------------------------------------------------------------------------------------------------------------ shutdown


def test_an_idle_agent_ends_at_once_and_once() -> None:
    """A second signal is harmless."""
    h = Harness()
    assert h.feed(ShutdownStarted(drain_s=5)) == [ExitAgent(code=0)]
    assert h.feed(ShutdownStarted(drain_s=5)) == []
    assert h.snapshots[-1].draining


def test_shutdown_drains_what_serves_and_kills_what_loads() -> None:
    """Running requests get their time; a load has nothing to lose; what is queued never starts."""
    h = Harness()
    h.ready("a", budget_bytes=20)
    h.ready("b", budget_bytes=20)
    h.drain("b-0")
    h.says("b-0", Drained())
    h.load("c", budget_bytes=20)
    h.spawned("c-0")
    h.load("d", budget_bytes=20)
    assert h.feed(ShutdownStarted(drain_s=5)) == [
        ended("op5", "d-0", "unloaded before it was ready"),
        send("a-0", Drain(timeout_s=5)),
        send("b-0", Stop()),
        kill("c-0"),
    ]
    assert replies(h.load("e")) == [(REFUSED, "this worker is shutting down")]
    assert h.feed(ShutdownStarted(drain_s=1)) == []
    assert h.exited("c-0", -9) == [ended("op4", "c-0", "unloaded before it was ready")]
    assert h.exited("b-0") == []
    assert h.says("a-0", Drained()) == [send("a-0", Stop())]
    assert h.exited("a-0") == [ExitAgent(code=0)]


def test_shutdown_is_bounded() -> None:
    """A replica that neither drains nor stops is killed (D6)."""
    h = Harness()
    h.ready()
    h.feed(ShutdownStarted(drain_s=5))
    assert h.after(5 + DRAIN_GRACE_S + STOP_GRACE_S) == [send("r-0", Stop()), kill("r-0")]
    failure = "the replica did not drain within its bound and was stopped"
    assert h.exited("r-0", -9) == [died("r-0", failure), ExitAgent(code=0)]


def test_shutdown_shortens_a_long_drain_and_waits_for_a_spawn() -> None:
    """The end has one bound for all; a process that is being made is ended when it is there."""
    h = Harness()
    h.ready("a")
    h.drain("a-0", timeout_s=3000)
    h.load("b")
    assert h.feed(ShutdownStarted(drain_s=5)) == [send("a-0", Drain(timeout_s=5))]
    assert h.spawned("b-0") == [kill("b-0")]
    h.exited("b-0", -9)
    assert h.says("a-0", Drained()) == [ended("op2", "a-0"), send("a-0", Stop())]
    assert h.exited("a-0") == [ExitAgent(code=0)]


# ----------------------------------------------------------------------------------------------------------- the tables


def test_the_tables_are_whole_and_every_state_leads_to_the_end() -> None:
    """Each state has a row, and from each the replica can be gone."""
    assert set(TRANSITIONS) == set(ReplicaState)
    assert set(agent.PROCESS_TRANSITIONS) == set(agent.Process)
    for state in ReplicaState:
        reached = {state}
        while more := {after for before in reached for after in TRANSITIONS[before]} - reached:
            reached |= more
        assert ReplicaState.FAILED in reached and ReplicaState.ABSENT in reached
        assert ReplicaState.READY not in TRANSITIONS[state] or state is ReplicaState.WARMING


KINDS = [
    "load",
    "load",
    "load",
    "spawned",
    "spawned",
    "spawn-failed",
    "warming",
    "warming",
    "ready",
    "ready",
    "failed",
    "exited",
    "drain",
    "drained",
    "unload",
    "force",
    "lost",
    "time",
    "time",
    "pong",
    "repeat",
    "stale",
    "shutdown",
]
EVENTS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.sampled_from([0.0, 0.1, 0.7, 3.0, 12.0])), max_size=60
)


class World:
    """Plays a kernel and replicas that may do anything a process can do, and checks every command against it."""

    def __init__(self) -> None:
        self.h = Harness((CPU, 100), (OTHER, 60))
        self.spawning: list[ReplicaId] = []
        self.alive: dict[ReplicaId, tuple[DeviceId, int]] = {}
        self.warm: list[ReplicaId] = []
        self.loading: dict[DeviceId, ReplicaId] = {}
        self.where: dict[ReplicaId, tuple[DeviceId, int]] = {}
        self.sent: list[WorkerCommand] = []
        self.accepted: set[OperationId] = set()
        self.ends: dict[OperationId, OperationEnded] = {}
        self.killed: dict[ReplicaId, float] = {}
        self.exits = 0

    def feed(self, event: AgentEvent) -> list[AgentCommand]:
        commands = self.h.feed(event)
        for command in commands:
            match command:
                case SpawnReplica(replica, device, model):
                    assert device not in self.loading, "loads on one device are serial"
                    self.loading[device] = replica
                    self.spawning.append(replica)
                    self.where[replica] = (device, model.budget_bytes)
                    self.alive[replica] = self.where[replica]
                case KillReplica(replica):
                    assert replica in self.alive and replica not in self.spawning, "only what exists is killed"
                    self.killed.setdefault(replica, self.h.now_s)
                case SendControl(replica):
                    assert replica in self.alive and replica not in self.spawning
                case ReplyCommand(reply=answer) if answer.outcome is ACCEPTED:
                    assert answer.operation not in self.accepted, "an operation is applied once"
                    self.accepted.add(answer.operation)
                case PublishEvent(event=OperationEnded() as end):
                    assert end.operation in self.accepted
                    assert self.ends.setdefault(end.operation, end) == end, "an operation ends in one way"
                case ExitAgent():
                    self.exits += 1
                    assert not self.alive and self.exits == 1
                case _:
                    pass
        for device, memory_bytes in ((CPU, 100), (OTHER, 60)):
            used = sum(budget for where, budget in self.alive.values() if where == device)
            assert used <= self.h.core.reserved_bytes(device) <= memory_bytes, "sum of budgets <= capacity (E4)"
        assert self.h.core.next_wake_s < math.inf
        return commands

    def gone(self, replica: ReplicaId) -> None:
        self.alive.pop(replica)
        device = self.where[replica][0]
        if self.loading.get(device) == replica:
            del self.loading[device]

    def act(self, kind: str, number: int, delay_s: float) -> None:
        h = self.h
        # What is killed is gone within the bound; the case that it is not has tests of its own.
        for replica, at_s in sorted(self.killed.items()):
            if replica in self.alive and h.now_s + delay_s >= at_s + KILL_BOUND_S:
                self.gone(replica)
                self.feed(ProcessExited(replica=replica, code=-9))
        h.now_s += delay_s
        running = sorted(replica for replica in self.alive if replica not in self.spawning)
        some = running[number % len(running)] if running else ReplicaId("ghost-0")
        match kind:
            case "load":
                device = (CPU, OTHER)[number % 2]
                load = LoadModel(
                    operation=h.operation(),
                    epoch=1,
                    device=device,
                    record=record(15 * (1 + number)),
                    replica_name="r",
                    timeout_s=5,
                )
                self.command(load)
            case "spawned" if self.spawning:
                self.feed(ReplicaSpawned(replica=self.spawning.pop(number % len(self.spawning)), pid=number))
            case "spawn-failed" if self.spawning:
                replica = self.spawning.pop(number % len(self.spawning))
                self.gone(replica)
                self.feed(SpawnFailed(replica=replica, detail="x"))
            case "warming":
                self.feed(ControlReceived(replica=some, message=Progress(state=ReplicaState.WARMING)))
            case "ready":
                if h.state(some) is ReplicaState.WARMING and self.loading.get(self.where[some][0]) == some:
                    del self.loading[self.where[some][0]]
                self.feed(ControlReceived(replica=some, message=Ready(info=INFO)))
            case "failed":
                self.feed(ControlReceived(replica=some, message=Failed(detail="x")))
            case "pong":
                self.feed(ControlReceived(replica=some, message=Pong(number=number)))
            case "drained":
                self.feed(ControlReceived(replica=some, message=Drained()))
            case "exited" if running:
                self.gone(some)
                self.feed(ProcessExited(replica=some, code=1))
            case "lost":
                self.feed(ControlLost(replica=some))
            case "drain":
                self.command(DrainReplica(operation=h.operation(), epoch=1, replica=some, timeout_s=2))
            case "unload" | "force":
                self.command(UnloadReplica(operation=h.operation(), epoch=1, replica=some, force=kind == "force"))
            case "repeat" if self.sent:
                self.feed(CommandReceived(token="t", command=self.sent[number % len(self.sent)], incarnation="again"))
            case "stale":
                stale = DrainReplica(operation=h.operation(), epoch=0, replica=some)
                assert replies(self.command(stale))[0][0] is CommandOutcome.STALE_EPOCH or not self.accepted
            case "shutdown" if number == 0:
                self.feed(ShutdownStarted(drain_s=1))
            case _:
                self.feed(Ticked())

    def command(self, command: WorkerCommand) -> list[AgentCommand]:
        self.sent.append(command)
        return self.feed(
            CommandReceived(token="t", command=command, incarnation=str(h) if (h := self.h.operations) else "0")
        )

    def run_out(self) -> None:
        """From any state: if processes die when they are killed, every operation ends and the agent can end."""
        self.feed(ShutdownStarted(drain_s=1))
        for _ in range(2000):
            for replica in list(self.spawning):
                self.spawning.remove(replica)
                for command in self.feed(ReplicaSpawned(replica=replica, pid=1)):
                    if isinstance(command, KillReplica):
                        self.gone(command.replica)
                        self.feed(ProcessExited(replica=command.replica, code=-9))
            if self.exits:
                break
            self.h.now_s = max(self.h.now_s, self.h.core.next_wake_s)
            for command in self.feed(Ticked()):
                if isinstance(command, KillReplica) and command.replica in self.alive:
                    self.gone(command.replica)
                    self.feed(ProcessExited(replica=command.replica, code=-9))
        assert self.exits == 1
        assert set(self.ends) == self.accepted, "every accepted operation ends"


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_whatever_happens_budgets_hold_loads_are_serial_and_operations_end_once(
    events: list[tuple[str, int, float]],
) -> None:
    """Any order of commands, reports, deaths and delays (E4, BUS-4, C8)."""
    world = World()
    for event in events:
        world.act(*event)
    world.run_out()
