"""What workers and gateways report, and the digest of the pool that everybody is told."""

from __future__ import annotations

import msgspec

from subjects.ids import DeploymentKey, DeviceId, IngressId, ModelHash, ReplicaId, WorkerId
from subjects.messages.kinds import DeviceKind, EngineType, KvTier, Lane, ReplicaState, SlaClass
from subjects.messages.registry import StepCosts, StepSums


class WorkerBeat(msgspec.Struct, frozen=True, kw_only=True):
    """The agent is alive; some 24 bytes every 100 ms."""

    worker: WorkerId
    sequence: int
    epoch_seen: int = 0


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """One device. On CPU ``memory_bytes`` is the configured budget and ``reserved_bytes`` the sum charged to replicas."""

    device: DeviceId
    kind: DeviceKind
    name: str = ""
    memory_bytes: int
    reserved_bytes: int
    used_bytes: int = 0
    device_type: str = ""
    """Key into ``ModelRecord.costs``: a kind such as ``h100-80gb`` or ``cpu``."""
    link: str = ""
    """Devices of one worker with the same link group are joined closely enough for one replica to span them."""
    contiguous_free_bytes: int | None = None
    """Largest free run where the device needs one (MIG, engines with arenas); None where pages make it irrelevant."""
    busy_s: float = 0.0
    """Seconds since the worker's start in which an engine step ran there."""
    throttled: bool = False
    threads: int = 0
    """Of a CPU device: what each replica there may use; 0: not told."""


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as its agent sees it. ``idle_s`` is the time since it last held a request (0 while it holds one)."""

    replica: ReplicaId
    model_hash: ModelHash
    deployment: DeploymentKey = DeploymentKey("")
    device: DeviceId
    state: ReplicaState
    budget_bytes: int
    running: int = 0
    slots: int = 0
    slots_max: int = 0
    """What its engine was started with: ``slots`` may be fewer. 0 while it does not serve."""
    kv_pages_free: int = 0
    kv_pages: int = 0
    idle_s: float = 0.0
    state_s: float = 0.0
    """Time in this state."""
    memory_bytes: int = 0
    """Proportional set size of the process."""
    failure: str = ""
    progress: float = 0.0
    peers: tuple[DeviceId, ...] = ()
    """The other devices that it spans."""
    kv_bytes: int = 0
    """KV budget over all its devices."""
    preemptions: int = 0
    """Requests preempted since its start."""
    step_s: float = 0.0
    """Running mean of the engine's step time."""
    hit_ratio: float | None = None
    """Share of the last prompts' tokens that the engine found in its prefix cache; None where it does not tell."""
    resizes_kv: bool = False
    """Whether its KV budget can be another while it runs; told by one that serves."""
    continues: bool = False
    """Whether another replica of its model can go on with its answers where they stopped; told by one that serves."""
    sums: StepSums | None = None
    """Of all its steps since its start; None where the engine does not tell."""


class KvTierReport(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of a KV node; ``limit_bytes`` is what it may use."""

    tier: KvTier
    used_bytes: int = 0
    limit_bytes: int = 0
    blocks: int = 0


class KvModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a KV node holds of one model's KV, and counts since the node's start, in blocks."""

    kv_signature: str
    host_bytes: int = 0
    host_blocks: int = 0
    disk_bytes: int = 0
    disk_blocks: int = 0
    hits: int = 0
    """Blocks that were asked for and found in a tier or fetched."""
    misses: int = 0
    evicted: int = 0
    """Blocks that left the last tier that had them."""


KV_STARTS = "it is being started"
"""``KvReport.note`` of a node that has not run yet."""


class KvReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's KV node, as its agent last heard it."""

    running: bool
    note: str = ""
    """Why it does not run, or what it does without (a disk that cannot be written)."""
    tiers: tuple[KvTierReport, ...] = ()
    models: tuple[KvModelReport, ...] = ()
    """Those with most bytes; bounded."""
    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    """Blocks that were dropped since their checksum was wrong."""
    refused: int = 0
    """Blocks that were not kept: no room, or the write budget is spent."""
    write_bytes_left: int | None = None
    """What may still be written to disk today; None: no bound."""
    redis: str = ""
    """``up``, ``down``, or empty: there is none."""
    address: str = ""
    """Where other nodes fetch from."""


class WorkerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's whole state: on change, and every 5 s. What the agent says is loaded is the truth."""

    worker: WorkerId
    sequence: int
    epoch_seen: int
    host: str = ""
    engines: tuple[EngineType, ...] = ()
    engine_versions: dict[str, str] = {}
    """By the type of each engine that has one."""
    devices: tuple[DeviceReport, ...]
    replicas: tuple[ReplicaReport, ...]
    draining: bool = False
    kv: KvReport | None = None
    """Its KV node; None: there is none."""
    resizing: tuple[EngineType, ...] = ()
    """Of ``engines``, those whose replicas can change their KV budget while they run, as far as is known beforehand."""


class ModelDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one model at one gateway since its last telemetry (arrived, finished, failed) or now (the rest)."""

    model_hash: ModelHash
    deployment: DeploymentKey = DeploymentKey("")
    sla_class: SlaClass
    lane: Lane
    business_id: str = ""
    arrived: int = 0
    finished: int = 0
    failed: int = 0
    waiting: int = 0
    running: int = 0
    oldest_wait_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    ttft_s_sum: float = 0.0
    latency_s_sum: float = 0.0
    arrived_lengths: tuple[int, int, int] = (0, 0, 0)
    """Of ``arrived``: those with short, medium and long inputs."""
    arrived_input_tokens: tuple[int, int, int] = (0, 0, 0)
    arrived_output_tokens: tuple[int, int, int] = (0, 0, 0)
    """Expected output tokens of those that arrived, by the same length classes."""
    waiting_input_tokens: int = 0
    within_slo: int = 0
    """Of ``finished``: those that met their model's targets."""
    stress: float = 0.0
    """Tokens of the last second or so, each times its request's age over what the targets allow: TWU's sum (SCH-6)."""


class IngressTelemetry(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway's demand, every 100 ms and at once when a model starts to wait."""

    ingress: IngressId
    sequence: int
    demand: tuple[ModelDemand, ...] = ()


class PoolReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica in the digest."""

    replica: ReplicaId
    model_hash: ModelHash
    deployment: DeploymentKey = DeploymentKey("")
    worker: WorkerId
    device: DeviceId
    state: ReplicaState
    suspect: bool = False
    weight: float = 1.0
    measure: int = 0
    """It should measure its costs in idle moments, with batches of up to so many; 0: it need not."""


class PoolKv(msgspec.Struct, frozen=True, kw_only=True):
    """What the KV nodes of the whole pool tell of one model, for metrics (OPS-2)."""

    host_bytes: int = 0
    disk_bytes: int = 0
    hits: int = 0
    """Blocks found, since the nodes' starts; as are the misses."""
    misses: int = 0
    evictions_per_s: float = 0.0


class PoolModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway needs to know of a model; ``refusal`` is set when it can never fit, with the numbers."""

    model_hash: ModelHash
    deployment: DeploymentKey = DeploymentKey("")
    name: str
    estimated_wait_s: float = 0.0
    refusal: str = ""
    retry_after_s: int = 0
    permanent: bool = False
    """Whether waiting cannot help (it never fits), or may (loads fail and back off)."""
    class_weights: dict[str, int] = {}
    waiting_queues: tuple[tuple[SlaClass, Lane], ...] | None = None
    """Where gateways report waiting tickets, so that replicas make room only for lanes in need; None when not counted."""
    kv: PoolKv | None = None
    """Its KV outside engines; None where no node has any."""
    costs: StepCosts | None = None
    """What its steps cost on the kind of device that computes it fastest, as plans go by; None: nobody knows."""


class PoolDigest(msgspec.Struct, frozen=True, kw_only=True):
    """Placement, weights, suspects and the dead: what all processes know of the pool, at least once a second."""

    epoch: int
    sequence: int
    replicas: tuple[PoolReplica, ...] = ()
    models: tuple[PoolModel, ...] = ()
    dead: tuple[ReplicaId, ...] = ()
    timeline: tuple[TimelineEntry, ...] = ()
    """The last operations, newest last; bounded."""


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One placement action and why it was taken."""

    at_unix_s: float
    action: str
    model: str
    replica: ReplicaId | None = None
    device: str = ""
    reason: str = ""
    outcome: str = ""
    took_s: float = 0.0
