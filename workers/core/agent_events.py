"""What the agent core hears and what it orders. Times are monotonic seconds."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from subjects import messages as m
from subjects.ids import DeviceId, OperationId, ReplicaId, WorkerId
from workers.control_messages import (
    ToAgent,
    ToReplica,
)

# ------------------------------------------------------------------------------------------------------------- the world


class Device(msgspec.Struct, frozen=True):
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


class AgentSettings(msgspec.Struct, frozen=True):
    """What an agent knows at its start."""

    worker: WorkerId
    host: str
    devices: tuple[Device, ...]
    engines: tuple[m.EngineType, ...]
    engine_versions: Mapping[str, str] = msgspec.field(default_factory=dict)
    kv: bool = False
    """Whether a KV node belongs to this worker."""
    resizing: tuple[m.EngineType, ...] = ()
    """Of ``engines``, those whose replicas can change their KV budget while they run."""


# ---------------------------------------------------------------------------------------------------------------- events


class CommandReceived(msgspec.Struct, frozen=True):
    """A command came over the bus; ``token`` finds its reply, ``incarnation`` is freshly drawn for a replica it may make."""

    token: str
    command: m.WorkerCommand
    incarnation: str


class ReplicaSpawned(msgspec.Struct, frozen=True):
    """The process of a ``SpawnReplica`` exists."""

    replica: ReplicaId
    pid: int


class SpawnFailed(msgspec.Struct, frozen=True):
    """There is no process and there will be none."""

    replica: ReplicaId
    detail: str


class ControlReceived(msgspec.Struct, frozen=True):
    """A replica said something."""

    replica: ReplicaId
    message: ToAgent


class ControlLost(msgspec.Struct, frozen=True):
    """A replica's end of the control connection closed or sent garbage."""

    replica: ReplicaId


class ProcessExited(msgspec.Struct, frozen=True):
    """A process is gone and reaped. ``code`` is negative for a signal, None when nobody can tell."""

    replica: ReplicaId
    code: int | None
    stderr_tail: str = ""


class MemorySampled(msgspec.Struct, frozen=True):
    """Proportional set sizes of replicas, and used bytes of devices where the driver tells."""

    replicas: tuple[tuple[ReplicaId, int], ...]
    devices: tuple[tuple[DeviceId, int], ...] = ()


class KvReported(msgspec.Struct, frozen=True):
    """How the KV node is, or that it does not run."""

    report: m.KvReport


class KvAnswered(msgspec.Struct, frozen=True):
    """The node has done what it was asked for (``detail`` says what), or has not (``failure``)."""

    operation: OperationId
    failure: str = ""
    detail: str = ""


class BusRestored(msgspec.Struct, frozen=True):
    """The bus was away; what was published meanwhile is lost."""


class ShutdownStarted(msgspec.Struct, frozen=True):
    """The agent was asked to end; ``drain_s`` bounds the drains."""

    drain_s: float


class Ticked(msgspec.Struct, frozen=True):
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


class SpawnReplica(msgspec.Struct, frozen=True):
    """Start a process; exactly one ``ReplicaSpawned`` or ``SpawnFailed`` answers."""

    replica: ReplicaId
    device: DeviceId
    record: m.ModelRecord
    peers: tuple[DeviceId, ...] = ()
    """The other devices that it spans."""
    measure: bool = False


class SendControl(msgspec.Struct, frozen=True):
    """Say something to a replica; it may be dead already."""

    replica: ReplicaId
    message: ToReplica


class KillReplica(msgspec.Struct, frozen=True):
    """Send a signal to a replica's process group; ``ProcessExited`` follows."""

    replica: ReplicaId
    signal: int


class AskKv(msgspec.Struct, frozen=True):
    """Ask the KV node within the command's bound; one ``KvAnswered`` answers."""

    command: m.EvictKv | m.MigrateKv


class ReplyCommand(msgspec.Struct, frozen=True):
    """Answer a command."""

    token: str
    reply: m.CommandReply


class PublishEvent(msgspec.Struct, frozen=True):
    """Tell the scheduler."""

    event: m.WorkerEvent


class PublishSnapshot(msgspec.Struct, frozen=True):
    """Tell the whole state; a newer one makes an unsent one worthless."""

    snapshot: m.WorkerSnapshot


class ExitAgent(msgspec.Struct, frozen=True):
    """No replica is left; end the process with this code."""

    code: int


AgentCommand = SpawnReplica | SendControl | KillReplica | AskKv | ReplyCommand | PublishEvent | PublishSnapshot | ExitAgent
