"""What the scheduler remembers of one transaction and of one command on its way."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import msgspec

from subjects.ids import DeploymentKey, DeviceId, OperationId, ReplicaId, WorkerId
from subjects.messages import KvOrder, ModelRecord, WorkerCommand


class Kind(Enum):
    """What a transaction does."""

    PLACE = "place"
    RETIRE = "retire"
    RESIZE_KV = "resize-kv"
    SET_CONCURRENCY = "set-concurrency"
    EVICT_KV = "evict-kv"
    MIGRATE_KV = "migrate-kv"


class Stage(Enum):
    """Where a transaction is."""

    LEAVING = "leaving"
    WAITING = "waiting"
    LOADING = "loading"
    CHANGING = "changing"
    DONE = "done"
    ABORTED = "aborted"


TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    Stage.LEAVING: frozenset({Stage.WAITING, Stage.DONE, Stage.ABORTED}),
    Stage.WAITING: frozenset({Stage.LOADING, Stage.CHANGING, Stage.ABORTED}),
    Stage.LOADING: frozenset({Stage.DONE, Stage.ABORTED}),
    Stage.CHANGING: frozenset({Stage.DONE, Stage.ABORTED}),
    Stage.DONE: frozenset(),
    Stage.ABORTED: frozenset(),
}


class Fault(Enum):
    """Why a transaction aborted."""

    NONE = "none"
    MODEL = "model"
    """The load failed: the model backs off."""
    PLACE = "place"
    """The worker died, refused or did not answer: no fault of the model."""
    UNWANTED = "unwanted"
    """Nobody waits any more, or it was taken back."""


@dataclass(slots=True)
class Operation:
    """One command on its way: sent until it is answered, asked for again until it has ended."""

    operation: OperationId
    transaction: int
    worker: WorkerId
    command: WorkerCommand
    victim: ReplicaId | None
    begun_s: float
    deadline_s: float
    sent_s: float
    sends: int = 1
    answered: bool = False


@dataclass(slots=True)
class Victim:
    """A replica that leaves. ``unloads`` counts unload commands; the second and later ones are forced."""

    replica: ReplicaId
    deployment: DeploymentKey
    drained: bool = False
    forced: bool = False
    unloads: int = 0
    not_before_s: float = 0.0
    gone: bool = False
    begun_s: float = 0.0
    gone_s: float = 0.0


class Change(msgspec.Struct, frozen=True):
    """Another KV budget or concurrency for a replica that stays."""

    replica: ReplicaId
    kv_bytes: int | None = None
    budget_bytes: int = 0
    """What each device is to be charged under ``kv_bytes``."""
    growth_bytes: int = 0
    """How much more that is than now; nothing is taken before so much is free."""
    slots: int | None = None


@dataclass(slots=True)
class Transaction:
    """One scale action. ``record`` is None unless something is loaded."""

    number: int
    name: str
    """In the journal: ``<epoch>-<number>`` of its beginning."""
    kind: Kind
    worker: WorkerId
    devices: tuple[DeviceId, ...]
    reason: str
    begun_s: float
    stage_s: float
    record: ModelRecord | None = None
    replica_name: str = ""
    drain_s: float = 0.0
    """How long the victims' requests may take to finish."""
    change: Change | None = None
    kv: KvOrder | None = None
    """What the KV node of ``worker`` is asked for; such a one takes no device."""
    detail: str = ""
    """What was done, as the worker tells it."""
    victims: dict[ReplicaId, Victim] = field(default_factory=dict)
    stage: Stage = Stage.LEAVING
    fault: Fault = Fault.NONE
    failure: str = ""
    load_begun_s: float = 0.0
    took_s: float = 0.0
    replica: ReplicaId | None = None
    """The newcomer, once it is listed or named by its agent."""
    overran: bool = False
    """A victim did not finish its requests within the bound."""
    cancelled: bool = False
    """Its load was taken back; what fails of it now is nobody's fault."""

    @property
    def device(self) -> DeviceId:
        """The leading device."""
        return self.devices[0]

    def move(self, now_s: float, stage: Stage) -> None:
        """Takes the next stage of the table."""
        assert stage in TRANSITIONS[self.stage], f"transaction {self.number}: {self.stage} to {stage}"
        self.stage = stage
        self.stage_s = now_s
