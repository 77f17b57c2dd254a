"""What the registry holds of a model: its record, service levels, step costs and adapters."""

from __future__ import annotations

import msgspec

from subjects.ids import DeploymentKey, ModelHash
from subjects.messages.kinds import EngineType, Mode, SlaClass, Task


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
    costs: StepCosts
    """Fitted to the points."""
    points: tuple[CostPoint, ...] = ()
    whole: bool = False
    """Whether all the points were taken: three lengths of prompts, three batch sizes, as far as the engine has room."""
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
    deployment: DeploymentKey = DeploymentKey("")
    """What its replicas are replicas of; ``profiles.deployment`` fills it in where an older version left it out."""
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
    """Requests that a replica runs at once; 0: by the kind of its device (``profiles.costs.sequences``)."""
    max_output_tokens_default: int = 256
    warmup_tokens: int = 4
    min_replicas: int = 0
    max_replicas: int = 1
    keep_s: float | None = None
    """How long it stays loaded without a request while nobody else needs its place; None: as long as the pool keeps one."""
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
    """How KV is written to disk (``kvcache.codec.codecs``)."""
    kv_converted: bool = False
    """Whether it takes the KV of the same files in a wider precision (``spec.kv.converted``)."""
    parameters: int = 0
    """That one token passes through (of a mixture of experts those it is sent to); 0: as many as the weights' bytes tell."""
    attention_width: int = 0
    """Layers x heads x head size; 0: unknown."""
