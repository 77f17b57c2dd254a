"""Costs of a model that nobody has measured yet on a kind of device: a roofline of its bytes and FLOPS (PRO-4).

What bounds each part of the work:

- prefill is bound by arithmetic: two FLOPS per parameter and token, and ``2 width`` FLOPS per pair of tokens for attention
  (queries by keys and probabilities by values, half of the pairs masked), at ``FLOPS_SHARE`` of the peak;
- a step's constant is reading the weights once at ``BANDWIDTH_SHARE`` of the memory's bandwidth, plus launches, Python and
  collectives, which are the same on any GPU;
- a step's cost per token of context is reading its KV;
- a step's cost per request is part CPU, part small kernels: it goes with the square root of the bandwidth.

The shares are fits to the public measurements of ``profiles/hardware/measured.csv``; a test holds the errors against them.
Where a model was measured on another kind, :func:`scaled` carries over how far its estimate was off there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from profiles.capacity import DTYPE_BYTES
from profiles.hardware.devices import KINDS, DeviceKind
from subjects.messages import DeviceKind as KindOfDevice
from subjects.messages import DeviceReport, EngineType, ModelRecord, StepCosts

FLOPS_SHARE = 0.65
BANDWIDTH_SHARE = 0.8
KV_BANDWIDTH_SHARE = 0.6
"""Of the peaks that kernels reach: matrix products, streaming weights, reading scattered KV pages."""
STEP_REST_S = 3e-3
COLLECTIVES_S = 1.5e-3
"""Added to the constant of a step on a GPU; the second where a replica spans several."""
REQUEST_S = 1.1e-4
"""Per request of a step on a GPU of ``REQUEST_BANDWIDTH``."""
REQUEST_BANDWIDTH = 3.35e12
CPU_THREAD_BANDWIDTH = 5e9
CPU_BANDWIDTH_MAX = 1.5e11
CPU_THREAD_FLOPS = 2e10
"""What a thread of a CPU without units for bf16 moves and computes in an engine; memory channels bound all of them together.
Cautious: with such units prefill is up to ten times faster, as the first measurement says."""
CPU_STEP_REST_S = 6e-3
CPU_REQUEST_S = 4e-4
"""Per step and per request of one, of Python on a CPU (SmolLM2 with vLLM 0.32 and two threads makes 21 tokens/s alone and
176 with eight)."""
PACKED_BYTES = 0.75
FP8_BYTES = 1.25
"""Bytes per parameter up to which weights are packed below 8 bits (computed in bf16), and up to which they are fp8."""
MEMORY_SHARE_LIKE = 0.8
"""A device of an unknown kind counts as the slowest known one of at least this share of its memory."""
SCALE_MAX = 4.0
"""An estimate is corrected by what was measured elsewhere by no more than this factor, up or down."""
WITHOUT_DEVICE = StepCosts(prefill_token_s=1e-9, step_const_s=1e-7, step_request_s=1e-8)
"""Of an engine behind a URL: what it computes is no device's of ours."""
SIMULATED = StepCosts(
    prefill_token_s=62e-6,
    prefill_token2_s=6e-11,
    step_const_s=12.6e-3,
    step_request_s=130e-6,
    step_context_token_s=0.26e-6,
)
"""Of a simulated engine whose options say nothing: a 7B model on an A100."""
_PARTS = StepCosts.__struct_fields__


class Figures(msgspec.Struct, frozen=True):
    """What a device brings into the roofline: bytes and FLOPS per second, and seconds that do not depend on the model."""

    memory_bandwidth: float
    bf16_flops: float
    fp8_flops: float
    step_rest_s: float
    request_s: float


def figures(device: DeviceReport) -> Figures:
    """Of a device: its kind's published ones, those of its threads, or a cautious guess from its memory."""
    if device.kind is KindOfDevice.CPU:
        threads = max(1, device.threads)
        flops = threads * CPU_THREAD_FLOPS
        bandwidth = min(threads * CPU_THREAD_BANDWIDTH, CPU_BANDWIDTH_MAX)
        return Figures(bandwidth, flops, flops, CPU_STEP_REST_S, CPU_REQUEST_S)
    return kind_figures(device.device_type, device.memory_bytes)


def kind_figures(device_type: str, memory_bytes: int = 0) -> Figures:
    """Of a kind of GPU; of an unknown one by its memory, and of the smallest one where that is unknown too."""
    kind = KINDS.get(device_type) or _like(memory_bytes)
    request_s = REQUEST_S * math.sqrt(REQUEST_BANDWIDTH / kind.memory_bandwidth)
    return Figures(kind.memory_bandwidth, kind.bf16_flops, kind.flops(fp8=True), STEP_REST_S, request_s)


def _like(memory_bytes: int) -> DeviceKind:
    ample = [kind for kind in KINDS.values() if kind.memory_bytes >= MEMORY_SHARE_LIKE * memory_bytes]
    if not ample:
        return max(KINDS.values(), key=lambda kind: (kind.memory_bytes, kind.name))
    return min(ample, key=lambda kind: (kind.memory_bandwidth, kind.name))


def estimate(record: ModelRecord, device: Figures) -> StepCosts:
    """Costs of one replica of ``record`` on ``record.gpus`` devices like this one.

    A simulated engine's are what its options say, those of an engine behind a URL next to nothing.
    """
    match record.engine_type:
        case EngineType.SIMULATED:
            return _simulated(record.engine_options)
        case EngineType.OPENAI_HTTP:
            return WITHOUT_DEVICE
        case EngineType.VLLM:
            return _roofline(record, device)


def _roofline(record: ModelRecord, device: Figures) -> StepCosts:
    gpus = record.gpus
    parameters = record.parameters or record.weights_bytes / DTYPE_BYTES.get(record.dtype, 2)
    each_bytes = record.weights_bytes / max(1, parameters)
    flops = device.fp8_flops if PACKED_BYTES < each_bytes <= FP8_BYTES else device.bf16_flops
    flops *= FLOPS_SHARE * gpus / (2 if record.dtype == "float32" else 1)
    bandwidth = device.memory_bandwidth * gpus
    rest_s = device.step_rest_s + (COLLECTIVES_S if gpus > 1 else 0.0)
    return StepCosts(
        prefill_token_s=2 * parameters / flops,
        prefill_token2_s=2 * record.attention_width / flops,
        step_const_s=record.weights_bytes / (BANDWIDTH_SHARE * bandwidth) + rest_s,
        step_request_s=device.request_s,
        step_context_token_s=record.kv_bytes_per_token / (KV_BANDWIDTH_SHARE * bandwidth),
    )


def _simulated(options: Mapping[str, str | int | float | bool]) -> StepCosts:
    if options.get("mode") == "instant":
        return WITHOUT_DEVICE
    scale = _number(options, "time_scale", 1.0)
    return StepCosts(**{part: scale * _number(options, part, getattr(SIMULATED, part)) for part in _PARTS})


def _number(options: Mapping[str, str | int | float | bool], name: str, default: float) -> float:
    value = options.get(name, default)
    # Values of other types, and absurd ones, are the engine's to refuse.
    return float(value) if isinstance(value, int | float) and 0 <= value < math.inf else default


def scaled(measured: StepCosts, estimated_there: StepCosts, estimated_here: StepCosts) -> StepCosts:
    """Costs on one kind from those measured on another: each part's estimate here, times how far it was off there."""
    parts = {}
    for part in _PARTS:
        was, there, here = getattr(measured, part), getattr(estimated_there, part), getattr(estimated_here, part)
        ratio = was / there if there > 0 else 1.0
        parts[part] = here * min(max(ratio, 1 / SCALE_MAX), SCALE_MAX)
    return StepCosts(**parts)
