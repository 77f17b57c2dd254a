"""What an agent does with commands about KV, and how it tells of its node."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from subjects.ids import DeviceId, ModelHash, OperationId, ReplicaId, WorkerId
from subjects.messages import (
    CommandOutcome,
    CommandReply,
    DeviceKind,
    EngineType,
    EvictKv,
    KvReport,
    LoadModel,
    MigrateKv,
    ModelRecord,
    OperationEnded,
    ReplicaState,
    WorkerSnapshot,
)
from workers.control_messages import EmptyPrefixes, Load, Progress, Ready
from workers.core.agent import AgentCore
from workers.core.agent_events import (
    AgentCommand,
    AgentEvent,
    AgentSettings,
    AskKv,
    CommandReceived,
    ControlReceived,
    Device,
    ExitAgent,
    KvAnswered,
    KvReported,
    PublishEvent,
    PublishSnapshot,
    ReplicaSpawned,
    ReplyCommand,
    SendControl,
    ShutdownStarted,
    Ticked,
)
from workers.core.agent_kv import KV_ANSWER_GRACE_S, KV_RUNNING_MAX
from workers.engines.base import EngineInfo

WORKER = WorkerId("w-1")
EVICT = EvictKv(operation=OperationId("op1"), epoch=1, ratio=0.5, kv_signature="k")
MIGRATE = MigrateKv(operation=OperationId("op1"), epoch=1, source_worker=WorkerId("w-2"), kv_signature="k", timeout_s=60.0)


class Harness:
    """A core with a clock and a node that runs unless told otherwise."""

    def __init__(self, *, kv: bool = True, running: bool = True) -> None:
        devices = (Device(device="cpu0", kind=DeviceKind.CPU, name="c", memory_bytes=100),)  # type: ignore[arg-type]
        self.core = AgentCore(
            AgentSettings(worker=WORKER, host="h", devices=devices, engines=(EngineType.SIMULATED,), kv=kv)
        )
        self.now_s = 1000.0
        self.snapshots: list[WorkerSnapshot] = []
        self.feed(Ticked())
        if running:
            self.feed(KvReported(KvReport(running=True)))

    def feed(self, event: AgentEvent) -> list[AgentCommand]:
        commands = self.core.step(self.now_s, event)
        self.snapshots += [command.snapshot for command in commands if isinstance(command, PublishSnapshot)]
        return [command for command in commands if not isinstance(command, PublishSnapshot)]

    def command(self, command: EvictKv | MigrateKv) -> list[AgentCommand]:
        return self.feed(CommandReceived(token="t", command=command, incarnation="0"))

    def refusal(self, command: EvictKv | MigrateKv) -> str:
        (reply,) = self.command(command)
        assert isinstance(reply, ReplyCommand) and reply.reply.outcome is CommandOutcome.REFUSED
        return reply.reply.detail


def reply(outcome: CommandOutcome) -> ReplyCommand:
    return ReplyCommand("t", CommandReply(operation=OperationId("op1"), outcome=outcome, epoch_seen=1))


def ended(failure: str = "", detail: str = "", took_s: float = 0.0) -> PublishEvent:
    return PublishEvent(
        OperationEnded(worker=WORKER, operation=OperationId("op1"), failure=failure, detail=detail, took_s=took_s)
    )


@pytest.mark.parametrize("command", [EVICT, MIGRATE])
def test_an_operation_about_kv_ends_with_what_the_node_did(command: EvictKv | MigrateKv) -> None:
    """Accepted at once, asked of the node once, and its end says what was done (SCH-8)."""
    h = Harness()
    assert h.command(command) == [reply(CommandOutcome.ACCEPTED), AskKv(command)]
    h.now_s += 1.5
    told = ended(detail="412 blocks", took_s=1.5)
    assert h.feed(KvAnswered(OperationId("op1"), detail="412 blocks")) == [told]
    assert h.feed(KvAnswered(OperationId("op1"), detail="again")) == []
    assert h.command(command) == [reply(CommandOutcome.REPEATED), told]


def test_a_node_that_does_not_answer_cannot_hold_an_operation() -> None:
    """The bound is the command's own and a grace; the core asks to be woken for it."""
    h = Harness()
    h.command(EVICT)
    h.now_s += EVICT.timeout_s + KV_ANSWER_GRACE_S - 0.5
    assert h.feed(Ticked()) == []
    assert h.core.next_wake_s <= h.now_s + 0.5
    h.now_s += 0.5
    took_s = EVICT.timeout_s + KV_ANSWER_GRACE_S
    assert h.feed(Ticked()) == [ended(failure="the KV node did not answer in time", took_s=took_s)]
    assert h.feed(KvAnswered(OperationId("op1"), detail="late")) == []


@pytest.mark.parametrize(
    ("command", "changes", "detail"),
    [
        (EVICT, {"ratio": 0.0}, "ratio 0: use more than 0 and at most 1"),
        (EVICT, {"ratio": 1.5}, "ratio 1.5: use more than 0 and at most 1"),
        (EVICT, {"ratio": float("nan")}, "ratio nan: use more than 0 and at most 1"),
        (EVICT, {"kv_signature": ""}, "kv_signature: is missing; it says whose KV is meant"),
        (EVICT, {"timeout_s": 0.0}, "timeout_s 0: use more than 0 and at most 3600"),
        (MIGRATE, {"source_worker": None}, "source_worker: is missing; it says from where"),
        (MIGRATE, {"source_worker": WORKER}, "source_worker: is this worker itself"),
        (MIGRATE, {"kv_signature": ""}, "kv_signature: is missing; it says whose KV is meant"),
    ],
)
def test_what_makes_no_sense_is_refused(command: EvictKv | MigrateKv, changes: dict[str, Any], detail: str) -> None:
    """One line that says what would be right, also for what an older peer sends."""
    assert Harness().refusal(msgspec.structs.replace(command, **changes)) == detail


def test_without_a_node_that_runs_nothing_is_accepted() -> None:
    """A worker without KV tiers says so, and one whose node is being started says that it may be asked again."""
    assert Harness(kv=False, running=False).refusal(EVICT) == (
        "this worker keeps no KV outside its engines (it was started with --no-kv)"
    )
    h = Harness(running=False)
    assert h.refusal(EVICT) == "the KV node of this worker does not run (it is being started); try again in a moment"


def test_operations_about_kv_are_bounded() -> None:
    """Nobody can pile them up at one node."""
    h = Harness()
    for number in range(KV_RUNNING_MAX):
        h.command(msgspec.structs.replace(EVICT, operation=OperationId(f"n{number}")))
    assert h.refusal(EVICT) == f"{KV_RUNNING_MAX} operations about KV run already"


def test_the_node_is_part_of_the_worker_s_report() -> None:
    """Its start and its death are told at once, its counters with the next snapshot; its death ends nothing else."""
    h = Harness(running=False)
    assert h.snapshots[-1].kv == KvReport(running=False, note="it is being started")
    h.feed(KvReported(KvReport(running=True)))
    told = len(h.snapshots)
    h.feed(KvReported(KvReport(running=True, hits=5)))
    assert len(h.snapshots) == told
    h.now_s = h.core.next_wake_s
    h.feed(Ticked())
    assert h.snapshots[-1].kv == KvReport(running=True, hits=5)
    assert h.feed(KvReported(KvReport(running=False, note="it was ended by SIGKILL"))) == []
    assert h.snapshots[-1].kv == KvReport(running=False, note="it was ended by SIGKILL")
    assert Harness(kv=False, running=False).snapshots[-1].kv is None


def test_the_end_of_an_agent_waits_for_no_node() -> None:
    """What was asked for ends, so that whoever asked hears why; the node is ended by the shell, afterwards (WRK-1)."""
    h = Harness()
    h.command(EVICT)
    assert h.feed(ShutdownStarted(drain_s=5.0)) == [ended(failure="this worker is shutting down"), ExitAgent(code=0)]


def test_replicas_are_told_apart_from_kv() -> None:
    """A command of an older peer, about one replica, is refused in words and harms nothing."""
    old = EvictKv(operation=OperationId("op1"), epoch=1, replica=ReplicaId("r-0"), ratio=0.5)
    assert Harness().refusal(old) == "kv_signature: is missing; it says whose KV is meant"


def test_all_of_it_is_dropped_by_idle_engines_too() -> None:
    """An engine can only drop its whole cache, and only while nothing runs: with a ratio of 1 idle ones are told (SCH-8)."""
    h = Harness()
    for name, running in (("idle", 0), ("busy", 1), ("other", 0)):
        signature = "k2" if name == "other" else "k"
        record = ModelRecord(
            name="m",
            model_hash=ModelHash("a" * 64),
            weights_hash="b" * 64,
            kv_signature=signature,
            engine_type=EngineType.SIMULATED,
            source="",
            weights_bytes=0,
            kv_bytes_per_token=0,
            kv_bytes=0,
            budget_bytes=10,
            max_context_len=2048,
        )
        load = LoadModel(
            operation=OperationId(name), epoch=1, device=DeviceId("cpu0"), record=record, replica_name=name, timeout_s=60.0
        )
        replica = ReplicaId(f"{name}-0")
        h.feed(CommandReceived(token="t", command=load, incarnation="0"))
        h.feed(ReplicaSpawned(replica=replica, pid=7))
        h.feed(ControlReceived(replica=replica, message=Progress(state=ReplicaState.WARMING)))
        info = EngineInfo(4, 64, 16, 2048, gives_token_ids=True, continues=True)
        h.feed(ControlReceived(replica=replica, message=Ready(info=info)))
        h.feed(ControlReceived(replica=replica, message=Load(running=running, waiting=0, kv_pages_free=9)))
    h.command(EVICT)
    assert h.feed(KvAnswered(OperationId("op1"), detail="4 blocks")) == [ended(detail="4 blocks")]
    everything = msgspec.structs.replace(EVICT, operation=OperationId("op2"), ratio=1.0)
    h.command(everything)
    told = h.feed(KvAnswered(OperationId("op2"), detail="4 blocks"))
    assert told[0] == SendControl(ReplicaId("idle-0"), EmptyPrefixes())
    assert isinstance(told[1], PublishEvent) and isinstance(told[1].event, OperationEnded)
    assert told[1].event.detail == "4 blocks; told to 1 idle engine" and len(told) == 2
    h.command(msgspec.structs.replace(everything, operation=OperationId("op3")))
    (failed,) = h.feed(KvAnswered(OperationId("op3"), failure="away"))
    assert isinstance(failed, PublishEvent)
