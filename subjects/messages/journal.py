"""The journal of scale actions, and the lease of the leader."""

from __future__ import annotations

import msgspec

from subjects.ids import DeploymentKey, DeviceId, ModelHash, OperationId, ReplicaId, WorkerId
from subjects.messages.commands import WorkerCommand
from subjects.messages.registry import ModelRecord


class KvOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked of a model's KV tiers."""

    kv_signature: str
    ratio: float = 0.0
    """Of an eviction."""
    source: WorkerId | None = None
    """Of a migration: from where."""
    timeout_s: float = 60.0


class TransactionBegan(msgspec.Struct, frozen=True, kw_only=True, tag="began"):
    """A transaction was decided: everything that a successor needs to finish it. Times are wall-clock seconds."""

    transaction: str
    """``<epoch>-<number>``."""
    kind: str
    """``place``, ``retire``, ``resize-kv``, ``set-concurrency``, ``evict-kv`` or ``migrate-kv``."""
    at_unix_s: float
    reason: str
    worker: WorkerId
    devices: tuple[DeviceId, ...]
    """The leading one first."""
    record: ModelRecord | None = None
    """What ``place`` loads, with the budget that was decided."""
    replica_name: str = ""
    """The newcomer's name without its incarnation."""
    restores: bool = False
    by_policy: bool = False
    """Of older leaders, whose bytes stay readable as they are; nothing reads the two."""
    replicas: tuple[ReplicaId, ...] = ()
    """Those that leave, or the one that is changed."""
    model_hashes: tuple[ModelHash, ...] = ()
    """Of older leaders, in place of ``deployments``."""
    deployments: tuple[DeploymentKey, ...] = ()
    """Of ``replicas``, in the same order."""
    forced: bool = False
    drain_s: float = 0.0
    kv_bytes: int | None = None
    slots: int | None = None
    kv: KvOrder | None = None
    """What ``evict-kv`` and ``migrate-kv`` ask of the KV node of ``worker``."""


class StepSent(msgspec.Struct, frozen=True, kw_only=True, tag="step-sent"):
    """A command of a transaction goes out; sending it again is not told."""

    transaction: str
    operation: OperationId
    worker: WorkerId
    at_unix_s: float
    command: WorkerCommand


class StepEnded(msgspec.Struct, frozen=True, kw_only=True, tag="step-ended"):
    """The end of a step; ``failure`` is empty when it did what it should."""

    transaction: str
    operation: OperationId
    at_unix_s: float
    failure: str = ""
    detail: str = ""
    """What was done, where its success alone does not say."""


class TransactionEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """Commit (``failure`` empty) or abort. What an abort leaves to be made good is begun as transactions of its own."""

    transaction: str
    at_unix_s: float
    failure: str = ""


JournalEntry = TransactionBegan | StepSent | StepEnded | TransactionEnded


class JournalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the journal (``names.JOURNAL``): what one leader did in one step, in order."""

    epoch: int
    writer: str
    """The scheduler that wrote it: a name with an incarnation."""
    entries: tuple[JournalEntry, ...]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Who leads (bucket ``carpool-leader``); without a holder: it was given back, and the next epoch is higher."""

    holder: str
    epoch: int
