"""The arithmetic of capacity, from ``config.json`` and safetensors headers: never from a table, never from a guess.

Units: bytes, tokens, pages. A page is one KV block of ``block_size`` tokens over all layers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from profiles.hashing import canonical_json, weight_files
from subjects.errors import ConfigError
from subjects.messages import LANE_PAGES_MAX, Lane

CPU_OVERHEAD_BYTES = 384 << 20
"""What a CPU replica needs beside weights and KV.

Measured: a vLLM replica forked from a template holds about 300 MB of proportional set size with a model of 2 MB
(interpreter, libraries, its share of the template's pages); the rest is room for activations and logits of a full batch.
"""
CPU_WEIGHTS_AGAIN = 1.2
"""How many more times the weights are held on CPU.

Measured with vLLM 0.32: SmolLM2 (269 MB of bf16 weights) holds some 600 MB more than a tiny model beside equal KV, that is
2.2 times its weights: the matrix kernels keep packed copies beside the loaded tensors, and workspaces grow with the layers.
"""
SIMULATED_OVERHEAD_BYTES = 64 << 20
"""A simulated replica is a plain Python process of about 60 MB."""
KV_DEFAULT_BYTES_MAX = 4 << 30
"""Cap of the default KV budget where a full batch of longest contexts would ask for more."""


def cpu_overhead_bytes(weights_bytes: int) -> int:
    """What a CPU replica is charged beside weights and KV."""
    return CPU_OVERHEAD_BYTES + int(CPU_WEIGHTS_AGAIN * weights_bytes)


KV_SIGNATURE_PARTS = 6
"""Of :func:`kv_signature`; what follows them says what else may have happened to the bytes."""
CONVERTED = "converted"
"""One of those: the first, before a lossy codec."""
_EXPERT = ".experts."
"""In the names of the tensors of which each belongs to one expert."""
_HEADER_BYTES_MAX = 100 << 20  # the format's own limit
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
_FLOATING = frozenset({"F32", "F16", "BF16"})
_SCALED_IN_CONFIG = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "default"})
"""RoPE kinds whose ``max_position_embeddings`` already has the scaling in it, as the engine reads them."""


class Shape(msgspec.Struct, frozen=True):
    """The parts of a model's configuration that size its KV."""

    layers: int
    kv_heads: int
    head_dim: int
    max_context_len: int
    latent_dim: int = 0
    """Above 0 for multi-head latent attention: values kept per token and layer, for all heads together."""
    attention_width: int = 0
    """Layers x heads x head size."""
    experts_share: float = 1.0
    """Of a mixture of experts: the share of them that a token is sent to."""


# ------------------------------------------------------------------------------------------------------------- weights


def read_weights(directory: Path) -> list[Tensor]:
    """The tensors of all weight files, none of which is cut short.

    Raises:
        ConfigError: one line naming the file.
    """
    return [tensor for path in weight_files(directory) for tensor in read_tensors(path)]


def loaded_bytes(tensors: Iterable[Tensor], dtype: str) -> int:
    """Bytes in memory when loaded as ``dtype`` (float32, bfloat16, float16); quantized tensors keep their size."""
    each = DTYPE_BYTES[dtype]
    return sum(each * math.prod(one.shape) if one.dtype in _FLOATING else one.stored_bytes for one in tensors)


def parameters_used(tensors: Iterable[Tensor], shape: Shape) -> int:
    """Parameters that one token passes through; of packed matrices two per stored byte."""
    used = 0.0
    for tensor in tensors:
        count = math.prod(tensor.shape) if tensor.keeps_its_shape else 2 * tensor.stored_bytes
        used += count * (shape.experts_share if _EXPERT in tensor.name else 1.0)
    return int(used)


class Tensor(msgspec.Struct, frozen=True):
    """One entry of a safetensors header; ``dtype`` as it is written there."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stored_bytes: int

    @property
    def keeps_its_shape(self) -> bool:
        """Whether the shape is that of the matrix: not of one packed by a quantization."""
        return self.dtype in _FLOATING or self.dtype.startswith("F8")


def read_tensors(path: Path) -> Iterator[Tensor]:
    """The tensors of one safetensors file, from its header.

    Raises:
        ConfigError: one line naming the file, which is no such file or not all of it.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size_bytes < 8 or not 2 <= header_bytes <= min(_HEADER_BYTES_MAX, size_bytes - 8):
                raise ValueError("its header is cut short")
            header = json.loads(file.read(header_bytes))
        end_max = 0
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            shape, (start, end) = entry["shape"], entry["data_offsets"]
            if not (
                isinstance(entry["dtype"], str) and all(isinstance(item, int) and item >= 0 for item in (*shape, start, end))
            ):
                raise ValueError("its header is wrong")
            end_max = max(end_max, end)
            yield Tensor(name, entry["dtype"], tuple(shape), end - start)
        if 8 + header_bytes + end_max != size_bytes:
            raise ValueError(f"it has {size_bytes} bytes and should have {8 + header_bytes + end_max}")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the file") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else "its header is wrong"
        raise ConfigError(f"{path}: is not a complete safetensors file ({reason}); fetch it again") from None


# --------------------------------------------------------------------------------------------------------------- shape


def read_shape(config: Mapping[str, Any], place: str = "config.json") -> Shape:
    """Layers, heads and context from a model's parsed ``config.json`` (text part of multimodal ones).

    Raises:
        ConfigError: a number is missing or is not a positive integer.
    """
    inner = config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, dict) else config

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            value = text.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{place}: {name}: expected a positive integer; fetch the model's files again")
            return value
        if default is None:
            raise ConfigError(f"{place}: {names[0]}: is missing; the model is of a kind whose KV cannot be computed")
        return default

    layers = number("num_hidden_layers", "n_layer", "num_layers")
    heads = number("num_attention_heads", "n_head")
    head_dim = number("head_dim", default=0) or number("hidden_size", "n_embd") // heads
    kv_heads = number("num_key_value_heads", "num_kv_heads", default=1 if text.get("multi_query") is True else heads)
    latent_dim = number("kv_lora_rank", default=0)
    if latent_dim:
        latent_dim += number("qk_rope_head_dim", default=0)
    positions = number("max_position_embeddings", "n_positions", "max_sequence_length", default=2048)
    experts = number("num_local_experts", "num_experts", "n_routed_experts", default=1)
    sent_to = min(experts, number("num_experts_per_tok", "moe_top_k", default=experts))
    context_len = int(positions * _rope_factor(text))
    return Shape(layers, kv_heads, head_dim, context_len, latent_dim, layers * heads * head_dim, sent_to / experts)


def _rope_factor(text: Mapping[str, Any]) -> float:
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    if not isinstance(scaling, dict):
        return 1.0
    factor = scaling.get("factor")
    if scaling.get("rope_type", scaling.get("type", "default")) in _SCALED_IN_CONFIG or not isinstance(factor, int | float):
        return 1.0
    return max(float(factor), 1.0)


def resolve_dtype(config: Mapping[str, Any], wanted: str) -> str:
    """The precision to load in: ``wanted``, or for ``auto`` the configuration's own, with float32 taken as bfloat16.

    The record then names a precision, so that every device and engine version computes with the same one.
    """
    if wanted != "auto":
        return wanted
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        name = part.get("dtype") or part.get("torch_dtype")
        if isinstance(name, str):
            name = name.removeprefix("torch.")
            return name if name in ("bfloat16", "float16") else "bfloat16"
    return "bfloat16"


# ------------------------------------------------------------------------------------------------------------------ KV


def kv_bytes_per_token(shape: Shape, dtype: str) -> int:
    """2 x layers x kv_heads x head_dim x bytes; with latent attention layers x latent x bytes."""
    values = shape.latent_dim if shape.latent_dim else 2 * shape.kv_heads * shape.head_dim
    return shape.layers * values * DTYPE_BYTES[dtype]


def kv_signature(shape: Shape, dtype: str, weights_hash: str, config: Mapping[str, Any], block_size: int) -> str:
    """Equal signatures mean that KV pages may be exchanged: same weights, same computation, same layout.

    The configuration is part of it since it holds what weights do not, such as the base of rotary embeddings.
    """
    config_hash = hashlib.sha256(canonical_json(config).encode()).hexdigest()
    heads = f"mla{shape.latent_dim}" if shape.latent_dim else f"h{shape.kv_heads}d{shape.head_dim}"
    return f"{weights_hash[:16]}-{config_hash[:8]}-l{shape.layers}-{heads}-{dtype}-b{block_size}"


def takes_converted(signature: str) -> bool:
    """Whether blocks of this signature may come from the same model's KV in a wider precision (``spec.kv.converted``)."""
    return CONVERTED in signature.split("-")[KV_SIGNATURE_PARTS:]


def pages_for(tokens: int, block_size: int) -> int:
    """KV pages that hold ``tokens`` tokens."""
    return -(-tokens // block_size)


def kv_default_bytes(per_token: int, block_size: int, context_len: int, seqs: int) -> int:
    """The default KV budget: every slot with a longest context, at most ``KV_DEFAULT_BYTES_MAX``, at least one context.

    One page more is added because the engine keeps one for itself.
    """
    page_bytes = per_token * block_size
    one = pages_for(context_len, block_size)
    pages = max(one, min(one * seqs, KV_DEFAULT_BYTES_MAX // page_bytes))
    return (pages + 1) * page_bytes


def lane_of(kv_pages: int) -> Lane:
    """The smallest lane whose ceiling covers that many pages."""
    for lane, ceiling in LANE_PAGES_MAX.items():
        if kv_pages <= ceiling:
            return lane
    return Lane.LARGE
