"""Commands to workers, their answers, and the events of operations."""

from __future__ import annotations

from enum import Enum

import msgspec

from subjects.ids import DeploymentKey, DeviceId, ModelHash, OperationId, ReplicaId, WorkerId
from subjects.messages.kinds import ReplicaState
from subjects.messages.registry import CostPoint, ModelRecord


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every command: applied once per operation, refused under a lower epoch than the agent has seen."""

    operation: OperationId
    epoch: int
    reason: str = ""


class LoadModel(Command, frozen=True, kw_only=True, tag="load-model"):
    """Start a replica of ``record`` on ``device`` and warm it. ``replica_name`` gets its incarnation from the agent."""

    device: DeviceId
    record: ModelRecord
    replica_name: str
    timeout_s: float = 300.0
    peers: tuple[DeviceId, ...] = ()
    """The other ``record.gpus - 1`` devices; each is charged ``record.budget_bytes`` too."""
    measure: bool = False
    """Measure costs before the replica serves, in a tenth of the load's time: nobody has, on this kind of device."""


class DrainReplica(Command, frozen=True, kw_only=True, tag="drain-replica"):
    """No new requests; finish the running ones within the bound, then give them back."""

    replica: ReplicaId
    timeout_s: float = 30.0


class UnloadReplica(Command, frozen=True, kw_only=True, tag="unload-replica"):
    """End a drained replica and free its budget. ``force`` also ends one that was not drained."""

    replica: ReplicaId
    force: bool = False


class SetConcurrency(Command, frozen=True, kw_only=True, tag="set-concurrency"):
    """Bound the requests that run at once."""

    replica: ReplicaId
    slots: int


class SleepReplica(Command, frozen=True, kw_only=True, tag="sleep-replica"):
    """Offload the weights of a drained replica to host memory."""

    replica: ReplicaId
    level: int = 1


class WakeReplica(Command, frozen=True, kw_only=True, tag="wake-replica"):
    """Bring a sleeping replica back, warm and verify it."""

    replica: ReplicaId


class EvictKv(Command, frozen=True, kw_only=True, tag="evict-kv"):
    """Drop the given share of a model's KV, in bytes, from the host memory and from the disk of this worker's KV node each,
    coldest first; with a ratio of 1 also what idle engines of the model keep for themselves."""

    replica: ReplicaId | None = None
    """Of older peers, whose command was about one replica: not looked at."""
    ratio: float
    model_hash: ModelHash | None = None
    """Of older peers, as ``replica``."""
    kv_signature: str = ""
    """``ModelRecord.kv_signature``: models that share their KV share its eviction."""
    timeout_s: float = 60.0


class ResizeKv(Command, frozen=True, kw_only=True, tag="resize-kv"):
    """Give a replica another KV budget, over all its devices."""

    replica: ReplicaId
    kv_bytes: int


class MigrateKv(Command, frozen=True, kw_only=True, tag="migrate-kv"):
    """Pull from the KV node of ``source_worker`` what this worker's node lacks of a model's chains, all tenants' (KVC-4).

    The command goes to the worker that pulls. The source keeps what it has.
    """

    source: ReplicaId | None = None
    """This one, ``target`` and ``index`` are of older peers, whose command was about replicas: not looked at."""
    target: ReplicaId | None = None
    index: bytes = b""
    source_worker: WorkerId | None = None
    model_hash: ModelHash | None = None
    """As the first three."""
    kv_signature: str = ""
    timeout_s: float = 600.0


WorkerCommand = (
    LoadModel | DrainReplica | UnloadReplica | SetConcurrency | SleepReplica | WakeReplica | EvictKv | ResizeKv | MigrateKv
)


class CommandOutcome(Enum):
    """An agent's immediate answer to a command."""

    ACCEPTED = "accepted"
    REPEATED = "repeated"
    """The operation id was applied before; its event is sent again if it has ended."""
    STALE_EPOCH = "stale-epoch"
    REFUSED = "refused"


class CommandReply(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's immediate answer; the end of the operation follows as an ``OperationEnded`` event."""

    operation: OperationId
    outcome: CommandOutcome
    epoch_seen: int
    detail: str = ""


class OperationProgressed(msgspec.Struct, frozen=True, kw_only=True, tag="operation-progressed"):
    """A step of a running operation."""

    worker: WorkerId
    operation: OperationId
    replica: ReplicaId | None = None
    state: ReplicaState
    detail: str = ""


class OperationEnded(msgspec.Struct, frozen=True, kw_only=True, tag="operation-ended"):
    """The end of an operation; ``failure`` is empty on success, else one line a person can act on."""

    worker: WorkerId
    operation: OperationId
    replica: ReplicaId | None = None
    failure: str = ""
    took_s: float = 0.0
    withdrawn: bool = False
    """A later command took it back, so the failure is nobody's fault."""
    detail: str = ""
    """What was done, where its success alone does not say; for people."""


class ReplicaDied(msgspec.Struct, frozen=True, kw_only=True, tag="replica-died"):
    """A replica's process exited without being told to, or was killed by its agent for not answering."""

    worker: WorkerId
    replica: ReplicaId
    detail: str = ""


class CostsMeasured(msgspec.Struct, frozen=True, kw_only=True, tag="costs-measured"):
    """A replica measured what its steps take. Nothing confirms it: what is missing is asked for again."""

    worker: WorkerId
    replica: ReplicaId
    model_hash: ModelHash
    deployment: DeploymentKey = DeploymentKey("")
    device_type: str = ""
    engine: str = ""
    points: tuple[CostPoint, ...]
    whole: bool = False


WorkerEvent = OperationProgressed | OperationEnded | ReplicaDied | CostsMeasured
