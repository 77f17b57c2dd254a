"""What the agent core hears and what it orders. Times are monotonic seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from subjects import messages as m
from subjects.ids import DeviceId, OperationId, ReplicaId, WorkerId
from workers.control_messages import (
    ToAgent,
    ToReplica,
)

# ------------------------------------------------------------------------------------------------------------- the world


@dataclass(frozen=True, slots=True)
class Device:
    """A device that replicas are charged to; ``memory_bytes`` is what the sum of their budgets may reach."""

    device: DeviceId
    kind: m.DeviceKind
    name: str
    memory_bytes: int
    uuid: str = ""
    """As the driver names it; empty on CPU."""
    device_type: str = ""
    """Key into ``ModelRecord.costs``."""
    link: str = ""
    """Devices with an equal one can be spanned by one replica."""
    threads: int = 0
    """Of a CPU: what each replica may use."""
    needs_blocks: bool = False
    """Whether a replica's memory must be one run of addresses there (engines with arenas)."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What an agent knows at its start."""

    worker: WorkerId
    host: str
    devices: tuple[Device, ...]
    engines: tuple[m.EngineType, ...]
    engine_versions: Mapping[str, str] = field(default_factory=dict)
    kv: bool = False
    """Whether a KV node belongs to this worker."""
    resizing: tuple[m.EngineType, ...] = ()
    """Of ``engines``, those whose replicas can change their KV budget while they run."""


# ---------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class CommandReceived:
    """A command came over the bus; ``token`` finds its reply, ``incarnation`` is freshly drawn for a replica it may make."""

    token: str
    command: m.WorkerCommand
    incarnation: str


@dataclass(frozen=True, slots=True)
class ReplicaSpawned:
    """The process of a ``SpawnReplica`` exists."""

    replica: ReplicaId
    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """There is no process and there will be none."""

    replica: ReplicaId
    detail: str


@dataclass(frozen=True, slots=True)
class ControlReceived:
    """A replica said something."""

    replica: ReplicaId
    message: ToAgent


@dataclass(frozen=True, slots=True)
class ControlLost:
    """A replica's end of the control connection closed or sent garbage."""

    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """A process is gone and reaped. ``code`` is negative for a signal, None when nobody can tell."""

    replica: ReplicaId
    code: int | None
    stderr_tail: str = ""


@dataclass(frozen=True, slots=True)
class MemorySampled:
    """Proportional set sizes of replicas, and used bytes of devices where the driver tells."""

    replicas: tuple[tuple[ReplicaId, int], ...]
    devices: tuple[tuple[DeviceId, int], ...] = ()


@dataclass(frozen=True, slots=True)
class KvReported:
    """How the KV node is, or that it does not run."""

    report: m.KvReport


@dataclass(frozen=True, slots=True)
class KvAnswered:
    """The node has done what it was asked for (``detail`` says what), or has not (``failure``)."""

    operation: OperationId
    failure: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class BusRestored:
    """The bus was away; what was published meanwhile is lost."""


@dataclass(frozen=True, slots=True)
class ShutdownStarted:
    """The agent was asked to end; ``drain_s`` bounds the drains."""

    drain_s: float


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed."""


AgentEvent = (
    CommandReceived
    | ReplicaSpawned
    | SpawnFailed
    | ControlReceived
    | ControlLost
    | ProcessExited
    | MemorySampled
    | KvReported
    | KvAnswered
    | BusRestored
    | ShutdownStarted
    | Ticked
)

# -------------------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class SpawnReplica:
    """Start a process; exactly one ``ReplicaSpawned`` or ``SpawnFailed`` answers."""

    replica: ReplicaId
    device: DeviceId
    record: m.ModelRecord
    peers: tuple[DeviceId, ...] = ()
    """The other devices that it spans."""
    measure: bool = False


@dataclass(frozen=True, slots=True)
class SendControl:
    """Say something to a replica; it may be dead already."""

    replica: ReplicaId
    message: ToReplica


@dataclass(frozen=True, slots=True)
class KillReplica:
    """Send a signal to a replica's process group; ``ProcessExited`` follows."""

    replica: ReplicaId
    signal: int


@dataclass(frozen=True, slots=True)
class AskKv:
    """Ask the KV node within the command's bound; one ``KvAnswered`` answers."""

    command: m.EvictKv | m.MigrateKv


@dataclass(frozen=True, slots=True)
class ReplyCommand:
    """Answer a command."""

    token: str
    reply: m.CommandReply


@dataclass(frozen=True, slots=True)
class PublishEvent:
    """Tell the scheduler."""

    event: m.WorkerEvent


@dataclass(frozen=True, slots=True)
class PublishSnapshot:
    """Tell the whole state; a newer one makes an unsent one worthless."""

    snapshot: m.WorkerSnapshot


@dataclass(frozen=True, slots=True)
class ExitAgent:
    """No replica is left; end the process with this code."""

    code: int


AgentCommand = SpawnReplica | SendControl | KillReplica | AskKv | ReplyCommand | PublishEvent | PublishSnapshot | ExitAgent
