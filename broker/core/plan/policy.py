"""The seam between the scheduler and whatever decides for the pool.

A policy is pure: it looks at a :class:`PoolView` and answers with a :class:`Decision`. The scheduler core makes the view,
checks each action against the room that there is and against people's locks, and carries it out as a transaction. Ours is
``coordinator.Coordinator``; the simulator's yardsticks implement the same protocol.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from broker.core.pool.catalogue import DeviceKey
from subjects.ids import DeploymentKey, ReplicaId
from subjects.messages import DeviceKind, ModelRecord, ReplicaState


class DeviceView(msgspec.Struct, frozen=True):
    """A device that may take work. Bytes once all running transactions have ended as planned."""

    key: DeviceKey
    kind: DeviceKind
    device_type: str
    """Key into ``ModelRecord.costs``."""
    link: str
    """Devices of one worker with an equal, non-empty link can be spanned by one replica."""
    memory_bytes: int
    free_planned_bytes: int
    largest_free_bytes: int
    """Largest block that one replica can get; equal to ``free_planned_bytes`` where memory is paged."""
    loads_coming: int
    """Loads under way or promised there; they are serial."""
    busy_s: float
    """Seconds since its worker's start in which an engine step ran."""
    engines: tuple[str, ...] = ()
    """What its worker can run, in order; empty: nothing is known of that."""


class ReplicaView(msgspec.Struct, frozen=True):
    """A replica, ready or on its way, that nobody has told to leave."""

    replica: ReplicaId
    """For one that is promised and not yet listed: the name of its reservation."""
    deployment: DeploymentKey
    devices: tuple[DeviceKey, ...]
    """All that it spans, the first one leading."""
    state: ReplicaState
    """READY, or LOADING for everything on its way."""
    since_s: float
    """When it became ready, or when its load was decided."""
    budget_bytes: int
    """Charged on each device."""
    kv_bytes: int
    """KV budget over all devices."""
    running: int
    slots: int
    kv_pages: int
    kv_pages_free: int
    last_used_s: float
    stays: bool
    """Pinned, locked or needed for its model's minimum: actions against it are dropped."""
    hit_ratio: float | None = None
    """Share of the last prompts' tokens that its engine found in its prefix cache; None where it does not tell."""
    step_s: float | None = None
    """Running mean of its engine's step time; None where it does not tell."""
    slots_max: int = 0
    """What its engine was started with; 0 where nobody told."""


class Arrivals(msgspec.Struct, frozen=True):
    """What arrived for a model since the policy's last look, by length class (short, medium, long inputs)."""

    requests: tuple[int, int, int] = (0, 0, 0)
    input_tokens: tuple[int, int, int] = (0, 0, 0)
    output_tokens: tuple[int, int, int] = (0, 0, 0)
    """Expected ones."""


class ModelView(msgspec.Struct, frozen=True):
    """A model, its replicas and its demand now."""

    record: ModelRecord
    replicas: tuple[ReplicaView, ...]
    leaving: int
    """Replicas that drain or unload; they still serve what they hold."""
    waiting: int
    waiting_input_tokens: int
    running: int
    oldest_wait_s: float
    arrivals: Arrivals
    finished: int
    """Since the last look."""
    within_slo: int
    """Of ``finished``."""
    load_s: float
    """What a load is expected to take now, by where its weights lie."""
    may_load: bool
    """False while it backs off after a failed load, or a person holds it down or has locked it."""
    may_act: bool
    """False in the modes observe and advise: its replicas stay, and none is started."""
    finished_output_tokens: int = 0
    """Of ``finished``: all their output tokens."""
    advises: bool = False
    """Whether what would be done for it is to be told, though it may not be done."""
    fails: bool = False
    """Whether its last load failed."""
    failed_on: DeviceKey | None = None
    """Where that was."""
    resizes_kv: bool = True
    """Whether its replicas can change their KV budget while they run."""

    @property
    def seats(self) -> int:
        """Requests that one of its replicas runs at once: as their engines tell, before that as its record does."""
        told = [replica.slots_max for replica in self.replicas if replica.slots_max]
        return sum(told) // len(told) if told else self.record.max_num_seqs


class ExpectedLoad(msgspec.Struct, frozen=True):
    """Load that people have declared beforehand: so many times what it would be, and at least so much work per second."""

    name: str
    begin_unix_s: float
    end_unix_s: float
    deployment: DeploymentKey | None = None
    """None: every model."""
    factor: float = 1.0
    at_least: float = 0.0


class PoolView(msgspec.Struct, frozen=True):
    """All that a policy may know. Mappings are in order of their keys."""

    now_s: float
    models: dict[DeploymentKey, ModelView]
    devices: dict[DeviceKey, DeviceView]
    models_per_device_max: int
    unix_offset_s: float = 0.0
    """Added to ``now_s`` it gives wall-clock time: where in the day this is."""
    events: tuple[ExpectedLoad, ...] = ()
    """In order of their names."""


class StartReplica(msgspec.Struct, frozen=True):
    """Load one more replica. ``victims`` leave those devices first (expand first where there is room: then empty)."""

    deployment: DeploymentKey
    devices: tuple[DeviceKey, ...]
    reason: str
    victims: tuple[ReplicaId, ...] = ()
    kv_bytes: int | None = None
    """Another KV budget than the record's; None takes the record's."""


class StopReplica(msgspec.Struct, frozen=True):
    """Drain and unload, within the drain bound."""

    replica: ReplicaId
    reason: str
    interrupt: bool = False
    """Do not let running requests finish: they continue elsewhere, or here later, from the tokens already sent."""


class ResizeReplicaKv(msgspec.Struct, frozen=True):
    """Give it another KV budget: the fast lever between co-residents."""

    replica: ReplicaId
    kv_bytes: int
    reason: str


class SetReplicaConcurrency(msgspec.Struct, frozen=True):
    """Bound what it runs at once."""

    replica: ReplicaId
    slots: int
    reason: str


Action = StartReplica | StopReplica | ResizeReplicaKv | SetReplicaConcurrency


class Decision(msgspec.Struct, frozen=True):
    """What to do now, in order of priority; what does not fit any more is dropped and decided again next time."""

    actions: tuple[Action, ...] = ()
    weights: dict[ReplicaId, float] = msgspec.field(default_factory=dict)
    """Routing weights that changed (1.0 is neutral; 0.0 takes no new requests); neutral for models that may not act."""
    notes: dict[DeploymentKey, str] = msgspec.field(default_factory=dict)
    """Per model one line on why it has what it has, for ``explain``."""


class Policy(Protocol):
    """Decides for the whole pool."""

    name: str

    def decide(self, now_s: float, view: PoolView) -> Decision:
        """Called at most every 200 ms of the scheduler's clock, and at once when a model without replicas starts to wait."""
        ...
