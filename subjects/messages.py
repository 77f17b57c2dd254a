"""Every message that crosses a process boundary (BUS-1).

All are frozen, keyword-only msgspec structs carried as MessagePack maps. New fields get defaults, so that an older peer can
still be understood; unknown fields of a newer peer are ignored. Times named ``*_unix_s`` are wall-clock seconds; a duration
or age is relative to the moment of sending, since clocks of two machines differ. Tokens, pages and bytes are integers.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from subjects.ids import (
    DeviceId,
    IngressId,
    ModelHash,
    OperationId,
    ReplicaId,
    RequestId,
    Tenant,
    WorkerId,
)

# ---------------------------------------------------------------------------------------------------------------- kinds


class SlaClass(Enum):
    """Service classes in falling order of value."""

    GOLD = "gold"
    SILVER = "silver"
    BRONZE = "bronze"
    BATCH = "batch"


class Lane(Enum):
    """Size lanes of a request by its KV pages; ``LANE_PAGES_MAX`` gives the ceilings."""

    SMALL = "s"
    MEDIUM = "m"
    LARGE = "l"


LANE_PAGES_MAX: dict[Lane, int] = {Lane.SMALL: 64, Lane.MEDIUM: 512}
"""Ceiling of a lane in KV pages; the large lane's ceiling is the pages of the model's longest context."""


class RequestKind(Enum):
    """Only inference counts as demand for serving replicas (ING-4)."""

    INFERENCE = "inference"
    BATCH = "batch"
    FINE_TUNE_VALIDATION = "fine-tune-validation"
    LOAD_TEST = "load-test"
    HEALTH_CHECK = "health-check"


class Endpoint(Enum):
    """Which OpenAI route a body belongs to."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"


class Task(Enum):
    """What a model is for: it makes text, or one vector for each input."""

    GENERATE = "generate"
    EMBED = "embed"


TASK_OF: dict[Endpoint, Task] = {
    Endpoint.CHAT: Task.GENERATE,
    Endpoint.COMPLETIONS: Task.GENERATE,
    Endpoint.EMBEDDINGS: Task.EMBED,
}
"""Which models an endpoint is for."""


class EngineType(Enum):
    """The implementations of the engine protocol."""

    VLLM = "vllm"
    OPENAI_HTTP = "openai_http"
    SIMULATED = "simulated"


class Mode(Enum):
    """How far the scheduler may go with a model by itself (SCH-11)."""

    OBSERVE = "observe"
    ADVISE = "advise"
    ACT = "act"


class DeviceKind(Enum):
    """What a device is."""

    CPU = "cpu"
    GPU = "gpu"
    MIG = "mig"


class ReplicaState(Enum):
    """States of a replica (WRK-3)."""

    FETCHING = "fetching"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    ASLEEP = "asleep"
    FAILED = "failed"
    ABSENT = "absent"


class KvTier(Enum):
    """Where a span lies; the first is the fastest."""

    ENGINE = "engine"
    HOST = "host"
    DISK = "disk"


# -------------------------------------------------------------------------------------------------------------- request


class RequestProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool knows of a request: numbers, never the prompt (ING-3, ING-4).

    ``token_ratio`` is expected output tokens over input tokens; ``prompt_entropy`` is in bits over the distribution of the
    prompt's token ids. ``prefix_head`` and ``prefix_blocks`` stand for the chain of block hashes: the hash of its last
    full block and how many blocks it has.
    """

    model_hash: ModelHash
    endpoint: Endpoint
    tenant: Tenant
    sla_class: SlaClass = SlaClass.SILVER
    lane: Lane = Lane.SMALL
    kind: RequestKind = RequestKind.INFERENCE
    max_tokens: int
    stream: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    stop_count: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    adapter: str = ""
    structured: bool = False
    tools: bool = False
    priority: int = 0
    input_tokens: int
    prompt_entropy: float = 0.0
    expected_output_tokens: int
    token_ratio: float = 0.0
    history_turns: int = 0
    prefix_head: bytes = b""
    prefix_blocks: int = 0
    kv_pages_needed: int
    preferred_engine: EngineType | None = None
    business_id: str = ""
    chain_id: str = ""
    environment: str = "production"
    task_priority: int = 10
    deadline_unix_s: float
    continuable: bool = False
    """Whether the tokens already sent may be continued elsewhere (ops/decisions/0004)."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """A request on the work-queue: who to claim it from, and what it needs."""

    request: RequestId
    attempt: int
    publication: int
    ingress: IngressId
    profile: RequestProfile


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A replica asks a gateway for a request whose ticket it holds.

    ``part`` above zero asks for a further part of a grant that was too large for one message.
    """

    request: RequestId
    attempt: int
    replica: ReplicaId
    part: int = 0
    adapters: bool = False
    """Whether it heeds the adapter of a grant. An older replica would answer with the base's weights: it is granted none."""


class RefusalReason(Enum):
    """Why a claim is refused. All but ``DEAD`` mean: acknowledge the ticket and forget it."""

    TAKEN = "taken"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    STALE_ATTEMPT = "stale-attempt"
    UNKNOWN = "unknown"
    DEAD = "dead"


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter of a model: a model of its own for clients, a few more weights for the replicas of its base.

    ``source`` is the directory with its files, or for ``openai_http`` the name that the server knows it by.
    ``adapter_hash`` is of the files' content: an adapter of the same name with other files is another one. ``size_bytes``
    and ``rank`` (the largest of its parts) are read from the files, and 0 where there are none.
    """

    name: str
    aliases: tuple[str, ...] = ()
    source: str = ""
    adapter_hash: str
    rank: int = 0
    size_bytes: int = 0


class Grant(msgspec.Struct, frozen=True, kw_only=True, tag="grant"):
    """The request is yours: its body, or its token ids, and the tokens that the client already has.

    ``body`` is the client's JSON, whole or one of ``parts`` pieces. ``sent_token_ids`` is not empty only for a continuation;
    the first delta then has ``first_token_index == len(sent_token_ids)``.
    """

    request: RequestId
    attempt: int
    part: int = 0
    parts: int = 1
    endpoint: Endpoint = Endpoint.CHAT
    body: bytes = b""
    prompt_token_ids: tuple[int, ...] = ()
    sent_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    max_tokens: int = 0
    adapter: Adapter | None = None
    """What answers in place of the base model; the replica loads it when it has not (only with part 0)."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """The request is not yours."""

    request: RequestId
    attempt: int
    reason: RefusalReason


ClaimReply = Grant | Refusal


class Hand(msgspec.Struct, frozen=True, kw_only=True):
    """Ticket and grant in one, on ``run.<replica>``: for a replica that said that it has room (ops/decisions/0026).

    ``number`` grows with whatever this gateway hands over. Nothing answers it but the request's frames, or ``Gone`` with
    ``full`` from a replica that cannot take it after all.
    """

    number: int
    ingress: IngressId
    profile: RequestProfile
    grant: Grant


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica would take of one gateway at once, after the ``hands`` that it has seen: requests, KV pages for them
    all, and prompt tokens, of which the last request may have any number."""

    hands: int
    slots: int
    pages: int
    tokens: int


class FailureKind(Enum):
    """Sick, busy and bad request are told apart (REL-1)."""

    BAD_REQUEST = "bad-request"
    SICK = "sick"
    BUSY = "busy"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's refusal or failure of one request, in terms a client may see."""

    kind: FailureKind
    message: str
    status: int = 500
    param: str | None = None
    code: str | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts as the engine reports them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New output of one choice of one request.

    ``first_token_index`` numbers the choice's units from 0: tokens where the engine gives ids (then
    ``units == len(token_ids)``), else chunks (``units == 1``). A delta that only closes has ``units == 0``. Each choice ends
    with a ``finish_reason``; the last delta of the request also has ``end=True`` and carries ``usage`` or ``failure``.
    ``detail`` is JSON of an OpenAI choice delta for what text cannot carry (tool calls, reasoning, logprobs). For embeddings
    it is ``{"data": [{"index": .., "embedding": ..}, ..]}`` of some of the inputs, in the ``encoding_format`` asked for.
    """

    request: RequestId
    attempt: int
    choice: int = 0
    first_token_index: int
    units: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    detail: bytes = b""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    end: bool = False
    usage: Usage | None = None
    failure: Failure | None = None


class Gone(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The replica neither holds this request nor is claiming it. ``full``: it was handed over, and there was no room."""

    request: RequestId
    attempt: int
    full: bool = False


class Frames(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message per engine step with the deltas of all requests of one gateway; empty when it only answers ``Held``.

    Without ``room`` nothing can be handed over.
    """

    replica: ReplicaId
    sequence: int
    deltas: tuple[Delta, ...] = ()
    gone: tuple[Gone, ...] = ()
    room: Room | None = None


class HeldEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the gateway believes runs at the replica; ``next_indexes`` has the next unit wanted of each choice."""

    request: RequestId
    attempt: int
    next_indexes: tuple[int, ...]


class Held(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """Every 200 ms, gateway to replica: confirmation, beat and reconciliation in one."""

    ingress: IngressId
    sequence: int
    entries: tuple[HeldEntry, ...]
    hands: int = 0
    """The number of the last hand before it: what did not come by then is lost."""


class Resend(msgspec.Struct, frozen=True, kw_only=True, tag="resend"):
    """A gap: send this choice again from ``from_index``, with the first boundaries."""

    ingress: IngressId
    request: RequestId
    attempt: int
    choice: int
    from_index: int


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Stop generating; nobody wants the rest."""

    ingress: IngressId
    request: RequestId
    attempt: int


Back = Held | Resend | Cancel


# ------------------------------------------------------------------------------------------------------------- registry


class Sla(msgspec.Struct, frozen=True, kw_only=True):
    """Targets of a model."""

    p95_latency_ms: int | None = None
    ttft_p95_ms: int = 2000
    tpot_ms: int = 100
    min_throughput_qps: float = 0.0
    max_error_rate: float = 0.05


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted times of one model on one kind of device, in seconds (PRO-4; the arithmetic is ``profiles.costs``)."""

    prefill_token_s: float
    prefill_token2_s: float = 0.0
    step_const_s: float
    step_request_s: float = 0.0
    step_context_token_s: float = 0.0


class StepSums(msgspec.Struct, frozen=True, kw_only=True):
    """What engine steps did and how long they took, summed: what ``StepCosts`` are fitted to and checked against.

    Of steps that prefilled ``t`` tokens of a prompt after ``d`` that were there, ``prompt_tokens2`` sums
    ``(d + t)**2 - d**2``; ``requests`` and ``context_tokens`` sum those that decoded in each step, and what they held.
    """

    steps: int = 0
    prompt_tokens: int = 0
    prompt_tokens2: int = 0
    requests: int = 0
    context_tokens: int = 0
    busy_s: float = 0.0


class CostPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of a replica: ``batch`` prompts of ``input_tokens`` each, prefilled or decoded together."""

    batch: int
    input_tokens: int
    decodes: bool = False
    beside: bool = False
    """A neighbour worked on the device meanwhile: it weighs less."""
    sums: StepSums


class KeptCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a deployment's measured costs on one kind of device (bucket ``carpool-costs``)."""

    deployment: str
    device_type: str
    gpus: int = 1
    engine: str = ""
    """Engine and version, such as ``vllm-0.11.0``."""
    points: tuple[CostPoint, ...] = ()
    whole: bool = False
    """Whether all the points were taken: three lengths of prompts, three batch sizes, as far as the engine has room."""
    correction: float = 1.0
    """Seconds that steps take, over what the fit to the points says."""
    at_unix_s: float = 0.0


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One model as the registry holds it (PRO-2) and as a load command carries it.

    ``weights_bytes``, ``kv_bytes_per_token`` and ``overhead_bytes`` are computed from the files, never declared.
    ``budget_bytes`` is what each of the replica's ``gpus`` devices is charged: its share of weights and KV, and overhead;
    the other byte counts are of the whole replica. ``source`` is a directory with the model's files,
    or the base URL of an OpenAI-compatible server. ``revision`` counts applies of one name.
    """

    name: str
    version: str = "1"
    revision: int = 1
    model_hash: ModelHash
    weights_hash: str
    kv_signature: str = ""
    engine_type: EngineType = EngineType.VLLM
    source: str
    aliases: tuple[str, ...] = ()
    sla: Sla = msgspec.field(default_factory=Sla)
    sla_class: SlaClass = SlaClass.SILVER
    tags: tuple[str, ...] = ()
    quality_tier: int = 1
    cost_weight: float = 1.0
    dtype: str = "auto"
    weights_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int
    overhead_bytes: int = 0
    budget_bytes: int
    block_size: int = 32
    max_context_len: int
    max_num_seqs: int = 8
    max_output_tokens_default: int = 256
    warmup_tokens: int = 4
    min_replicas: int = 0
    max_replicas: int = 1
    pinned: bool = False
    allow_co_location: bool = True
    tenant: str = ""
    """Whose models alone may be beside it; empty: those of nobody in particular."""
    fallback: str = ""
    max_wait_s: float = 120.0
    queue_requests_max: int = 512
    random_weights: bool = False
    """Made by ``carpool models make-tiny``: answers are noise, on purpose."""
    model_id: str = ""
    """The model's own id; for ``openai_http`` the name that the server knows it by."""
    tokenizer_source: str = ""
    """A directory with the tokenizer's files; empty where the model brings none (ING-6)."""
    tokenizer_hash: str = ""
    mode: Mode = Mode.ACT
    supported_dtypes: tuple[str, ...] = ()
    gpu_memory_utilization: float = 0.92
    baseline_memory_gb: float | None = None
    compute_efficiency: float | None = None
    latency_sensitivity: float | None = None
    engine_options: dict[str, str | int | float | bool] = {}
    gpus: int = 1
    """Linked devices that one replica spans (tensor parallel)."""
    costs: dict[str, StepCosts] = {}
    """By kind of device (``DeviceReport.device_type``), as the file gives them: they win over estimates and measurements."""
    task: Task = Task.GENERATE
    adapters: tuple[Adapter, ...] = ()
    adapters_max: int = 0
    """Adapters that one replica holds at once; 0: it is started without any."""
    adapters_rank_max: int = 0
    """The largest rank of an adapter that it takes."""
    kv_reuse: bool = True
    """Whether KV that was computed may outlive its engine (``spec.kv.reuse``)."""
    kv_codec: str = "none"
    """How KV is written to disk (``kvcache.codecs``)."""
    kv_converted: bool = False
    """Whether it takes the KV of the same files in a wider precision (``spec.kv.converted``)."""
    parameters: int = 0
    """That one token passes through (of a mixture of experts those it is sent to); 0: as many as the weights' bytes tell."""
    attention_width: int = 0
    """Layers x heads x head size; 0: unknown."""


# ------------------------------------------------------------------------------------------------------------ telemetry


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
    device: DeviceId
    state: ReplicaState
    budget_bytes: int
    running: int = 0
    slots: int = 0
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


class ModelDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one model at one gateway since its last telemetry (arrived, finished, failed) or now (the rest)."""

    model_hash: ModelHash
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


class IngressTelemetry(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway's demand, every 100 ms and at once when a model starts to wait."""

    ingress: IngressId
    sequence: int
    demand: tuple[ModelDemand, ...] = ()


# ----------------------------------------------------------------------------------------------------------- the digest


class PoolReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica in the digest."""

    replica: ReplicaId
    model_hash: ModelHash
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


# ------------------------------------------------------------------------------------------------------------- KV tiers


class KvSpan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A run of blocks that covers 256 tokens (KVC-2), by the hash of its last block, which names all tokens before it."""

    span: bytes
    depth: int
    """Blocks from the start of the prompt to its end."""
    tier: KvTier
    """The fastest outside an engine; ``ENGINE``: only ``replica`` has it."""
    replica: ReplicaId | None = None
    """Whose engine computed or loaded it last, and so most likely still has it."""


class KvModelSpans(msgspec.Struct, frozen=True, kw_only=True):
    """What changed for one model."""

    model_hash: ModelHash
    block_size: int
    """Tokens of one block."""
    held: tuple[KvSpan, ...] = ()
    """Gained, or held elsewhere than before."""
    dropped: tuple[bytes, ...] = ()


class KvIndexed(msgspec.Struct, frozen=True, kw_only=True):
    """A node's batch for the index, and its beat every few seconds when nothing changed.

    ``sequence`` grows by one. Who misses one drops what it believed of the node and asks for all of it (``KvAsk.snapshot``).
    Another ``node`` of the same worker is a new process: what the old one held counts no more until it says so.
    """

    worker: WorkerId
    node: str
    """Name plus incarnation of the node process."""
    sequence: int
    models: tuple[KvModelSpans, ...] = ()
    emptied: tuple[ReplicaId, ...] = ()
    """Engines whose own cache was reset, slept or ended, before they gained what ``models`` says of them."""


class KvAsk(msgspec.Struct, frozen=True, kw_only=True):
    """What do you hold of this chain? Or, with ``snapshot``: say all that you hold, from ``cursor`` on.

    ``identity`` is the key of the KV's identity (weights, layout, salt); ``head`` the hash of the chain's last block, and
    ``blocks`` its number of blocks. Without a head the node offers its chains of ``signature`` one after the other, the one
    after ``cursor`` next.
    """

    worker: WorkerId
    """Who asks."""
    identity: bytes = b""
    signature: str = ""
    """``ModelRecord.kv_signature``, of all tenants."""
    head: bytes = b""
    blocks: int = 0
    snapshot: bool = False
    cursor: bytes = b""


class KvOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The index message of a migration (KVC-4): at most 1 KiB whatever the context.

    The target resolves the rest: it hashes the tokens itself or reads the chain of ``head`` at ``address``, and fetches only
    the blocks that it lacks. ``token`` opens ``address`` for this chain alone and expires.
    """

    identity: bytes = b""
    head: bytes = b""
    blocks: int = 0
    """How many of the chain's leading blocks are here; 0: none, or there is no such chain."""
    bytes_total: int = 0
    address: str = ""
    """``host:port`` of the data path."""
    token: bytes = b""
    expires_s: float = 0.0
    """From now."""
    cursor: bytes = b""
    """Ask on with this; empty: that was all."""


class KvSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One page of all that a node holds, as of ``sequence``."""

    worker: WorkerId
    node: str
    sequence: int
    models: tuple[KvModelSpans, ...] = ()
    cursor: bytes = b""
    """Ask on with this; empty: that was all."""


# ------------------------------------------------------------------------------------------------------------- commands


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
    device_type: str = ""
    engine: str = ""
    points: tuple[CostPoint, ...]
    whole: bool = False


WorkerEvent = OperationProgressed | OperationEnded | ReplicaDied | CostsMeasured


# -------------------------------------------------------------------------------------------------------------- journal


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
    """Whether a policy wants it, whoever waits or does not."""
    replicas: tuple[ReplicaId, ...] = ()
    """Those that leave, or the one that is changed."""
    model_hashes: tuple[ModelHash, ...] = ()
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


# ------------------------------------------------------------------------------------------------------- people's words


class OverrideKind(Enum):
    """What a person has said about a model (by name), a replica, a worker (by name) or ``<worker name>/<device>``."""

    PIN = "pin"
    """A model's replicas are kept from eviction, or not, whatever its record says."""
    MODE = "mode"
    """How far the scheduler may go with a model, whatever its record says."""
    MODEL_LOCK = "model-lock"
    """Nothing automatic starts, stops or changes a replica of it."""
    DEVICE_LOCK = "device-lock"
    """Nothing comes or goes there by itself."""
    REPLICA_LOCK = "replica-lock"
    """Nothing automatic stops or changes it."""
    WORKER_DRAIN = "worker-drain"
    """Nothing new goes there, and what is there leaves."""
    DEVICE_DRAIN = "device-drain"
    """The same for one device."""
    EVENT = "event"
    """Load is expected, under a name of its own."""


class DeclaredLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load that people know of beforehand (SCH-5): while it lasts so many times what it would be, and at least so much."""

    begin_unix_s: float
    end_unix_s: float
    model: str = ""
    """Empty: every model."""
    factor: float = 1.0
    at_least: float = 0.0
    """GPU-seconds of work per second."""


class Override(msgspec.Struct, frozen=True, kw_only=True):
    """One word of a person that wins over automatic decisions (SCH-11)."""

    kind: OverrideKind
    about: str
    value: str = ""
    """``pinned`` or ``unpinned``, or a mode."""
    bound_s: float | None = None
    """Of a drain: how long running requests may take to finish."""
    load: DeclaredLoad | None = None
    """Of an event."""
    at_unix_s: float = 0.0


class Overrides(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, in order of kind and name (bucket ``carpool-locks``). The revision grows with every change."""

    revision: int = 0
    entries: tuple[Override, ...] = ()


# ---------------------------------------------------------------------------------------------------- a request explained


class RequestAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One replica that had the request."""

    attempt: int
    replica: ReplicaId
    waited_s: float
    """From when it began to wait (again) until this grant."""
    lost: bool = False
    """The replica was lost, busy or drained, and the request waited again."""
    prefix_tokens: int = 0
    """Of the prompt, that this replica was chosen for: it is believed not to compute them again."""


class RequestStory(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway still knows of a request: numbers, never the prompt or the answer. Durations count from its arrival."""

    request: RequestId
    known: bool
    """False: it was never here, or is forgotten."""
    model: str = ""
    sla_class: SlaClass = SlaClass.SILVER
    lane: Lane = Lane.SMALL
    input_tokens: int = 0
    expected_output_tokens: int = 0
    output_tokens: int | None = None
    arrived_unix_s: float = 0.0
    age_s: float = 0.0
    """When this was told, or at its end."""
    state: str = ""
    """``waiting``, ``running`` or ``ended``."""
    attempts: tuple[RequestAttempt, ...] = ()
    first_output_s: float | None = None
    status: int = 0
    """HTTP status of its end; 0 while it has none."""
    code: str = ""


# ------------------------------------------------------------------------------------------------------ control, alerts


class ControlRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A verb of the CLI or the web page with its JSON argument."""

    argument: bytes = b"{}"


class ControlReply(msgspec.Struct, frozen=True, kw_only=True):
    """``error`` is empty on success; ``result`` is JSON."""

    result: bytes = b"null"
    error: str = ""


class Severity(Enum):
    """How much an alert matters."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """Something a person should know, with evidence and the command that would help (OPS-3)."""

    at_unix_s: float
    severity: Severity
    kind: str
    scope: str
    text: str
    evidence: dict[str, str] = {}
    remedy: str = ""


class InferRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request over NATS: the same body as the HTTP route's (ING-2)."""

    endpoint: Endpoint = Endpoint.CHAT
    body: bytes
    headers: dict[str, str] = {}
    stream: bool = False


class InferFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the answer: JSON of an OpenAI chunk (stream) or of the whole response; ``last`` closes the answer."""

    sequence: int
    status: int = 200
    body: bytes = b""
    last: bool = False


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Who leads (bucket ``carpool-leader``); without a holder: it was given back, and the next epoch is higher."""

    holder: str
    epoch: int
