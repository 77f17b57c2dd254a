"""Models, traces, workloads, pools and results of the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from broker.core.plan.policy import Policy
from profiles.costs import chunk_tokens
from subjects.ids import DeploymentKey, ModelHash
from subjects.messages import EngineType, ModelRecord, Sla, SlaClass, StepCosts

GB = 1_000_000_000
BLOCK_TOKENS = 16
DEVICE_TYPE = "h100-80gb"
DEVICE_BYTES = 72 * GB
"""Usable of an H100's 80 GB."""
SLOTS_MAX = 256
"""Requests that one engine runs at once."""
CONTEXT_TOKENS_MAX = 131_072


@dataclass(frozen=True, slots=True, kw_only=True)
class SimModel:
    """A model of a workload. ``kv_bytes_per_token`` is over all its devices."""

    name: str
    costs: StepCosts
    weights_bytes: int
    kv_bytes_per_token: int
    gpus: int = 1
    sla_class: SlaClass = SlaClass.SILVER
    ttft_s: float = 2.0
    tpot_s: float = 0.1
    min_replicas: int = 0
    slots: int = SLOTS_MAX
    """Requests that one replica runs at once."""

    @property
    def deployment(self) -> DeploymentKey:
        """A made-up one, the same for the same name everywhere."""
        import hashlib

        return DeploymentKey(hashlib.sha256(self.name.encode()).hexdigest())

    @property
    def chunk_tokens(self) -> int:
        """Prompt tokens per step, as a careful operator sets them; the same under every policy."""
        return chunk_tokens(self.costs, self.tpot_s)

    def kv_bytes_alone(self, device_bytes: int = DEVICE_BYTES) -> int:
        """KV budget of a replica that has its devices to itself."""
        return device_bytes * self.gpus - self.weights_bytes

    def record(self, kv_bytes: int) -> ModelRecord:
        """Its registry record with a KV budget over all its devices."""
        return ModelRecord(
            name=self.name,
            model_hash=ModelHash(self.deployment),
            deployment=self.deployment,
            weights_hash=self.deployment,
            engine_type=EngineType.SIMULATED,
            source="simulated",
            sla=Sla(ttft_p95_ms=round(self.ttft_s * 1000), tpot_ms=round(self.tpot_s * 1000)),
            sla_class=self.sla_class,
            weights_bytes=self.weights_bytes,
            kv_bytes_per_token=self.kv_bytes_per_token,
            kv_bytes=kv_bytes,
            budget_bytes=-(-(self.weights_bytes + kv_bytes) // self.gpus),
            block_size=BLOCK_TOKENS,
            max_context_len=CONTEXT_TOKENS_MAX,
            max_num_seqs=self.slots,
            min_replicas=self.min_replicas,
            max_replicas=1024,
            gpus=self.gpus,
            costs={DEVICE_TYPE: self.costs},
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests as columns of equal length, sorted by arrival. ``model`` indexes the workload's models."""

    arrival_s: npt.NDArray[np.float64]
    model: npt.NDArray[np.int16]
    input_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    sla_class: npt.NDArray[np.uint8] | None = None
    """Index into ``SlaClass`` where requests differ from their model; None: each has its model's class."""

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of a workload that is simulated by itself: all is measured from ``begin_s`` to ``end_s`` only."""

    warmup_s: float
    """Trace time at which the simulation starts."""
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Identical nodes. Devices of one node are linked."""

    devices: int
    devices_per_node: int = 8
    device_type: str = DEVICE_TYPE
    device_bytes: int = DEVICE_BYTES
    host_bytes: int = 2_000 * GB
    """Host memory of a node for weights."""
    models_per_device_max: int = 4
    shared_efficiency: float = 0.97
    """What is left of a device's time while several engines have work at once."""
    takes_turns: bool = True
    """Whether engines that share a device let each other go first by what their answers need (ops/decisions/0008); else each
    of k at work gets 1/k."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLadder:
    """Seconds from a load command to ready, by where the weights are; shared links make parallel loads slower.

    ``warm_s`` and ``cold_s`` are the whole time of a load of any model that has its link to itself: from host memory of the
    node, and from anywhere else.
    """

    warm_s: float = 3.0
    cold_s: float = 60.0
    all_warm: bool = True
    """Every node has every model in host memory from the start, as far as its memory reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Something to compare policies on. ``trace`` draws the requests of one window from a seed."""

    name: str
    models: tuple[SimModel, ...]
    windows: tuple[Window, ...]
    trace: Callable[[int, Window], Trace]
    pool: PoolSpec
    """What is there at most. GPUs that hold nothing cost nothing."""
    static_replicas: dict[str, int]
    """By model: the smallest dedicated split that meets the SLO."""
    static_slo_replicas: dict[str, int] | None = None
    """The same where ``static_replicas`` was sized by another rule."""
    ladder: LoadLadder = field(default_factory=LoadLadder)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """What a policy is made for. Only the oracle may look at ``trace``."""

    workload: Workload
    window: Window
    trace: Trace
    seed: int


PolicyFactory = Callable[[PolicyContext], Policy]


class ModelResult(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and quantiles of one model over the measured time."""

    requests: int
    within_slo: int
    succeeded: int
    refused: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p99_s: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One workload under one policy and one seed. Shares are from 0 to 1; names as in the suite's JSON."""

    workload: str
    policy: str
    seed: int
    gpu_hours: float
    """Device time with a replica on it in any state, over the measured time."""
    gpus_owned: int
    """Most devices that held something at once."""
    slo_all: float
    slo_worst_model: float
    ttft_p50: float
    ttft_p99: float
    tpot_p99: float
    success: float
    refused: float
    switches: int
    """Loads that began."""
    utilisation: float
    """Share of owned device time in which an engine step ran."""
    useful_utilisation: float
    """Share of owned device time that the least work for the requests within SLO would take (``bound`` gives that work)."""
    decision_to_effect_s: float
    """Median time from a decision to the agent's first effect."""
    resource_move_s: float
    """Median time from a decision to the new replica's being ready."""
    digest: str
    """Hash over every request's times: equal on any machine for the same seed."""
    models: dict[str, ModelResult] = {}
    extra: dict[str, float] = {}
