"""LoRA adapters for tests, written by hand: random, and strong enough that they change what a model says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiles.adapters import build_adapters
from profiles.capacity import read_tensors
from profiles.model_files import write_bfloat16, write_json
from profiles.service import parse_services
from subjects.messages import Adapter

ALPHA = 16
MODULES = ("q_proj", "v_proj")
ALL_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")


def make_adapter(
    base: Path,
    directory: Path,
    *,
    seed: int,
    rank: int = 4,
    strength: float = 0.3,
    modules: Sequence[str] = MODULES,
    **config: Any,
) -> Path:
    """An adapter of these modules of the Llama-shaped model at ``base``; ``config`` replaces fields of its own."""
    random = np.random.Generator(np.random.PCG64(seed))

    def part(*shape: int) -> NDArray[np.float32]:
        return np.float32(strength) * random.standard_normal(shape, np.float32)

    tensors: dict[str, NDArray[np.float32]] = {}
    for tensor in sorted(read_tensors(base / "model.safetensors"), key=lambda each: each.name):
        module = tensor.name.removesuffix(".weight")
        if module.rpartition(".")[2] not in modules:
            continue
        outputs, inputs = tensor.shape
        if module.endswith("embed_tokens"):
            tensors[f"base_model.model.{module}.lora_embedding_A"] = part(rank, outputs)
            tensors[f"base_model.model.{module}.lora_embedding_B"] = part(inputs, rank)
        else:
            tensors[f"base_model.model.{module}.lora_A.weight"] = part(rank, inputs)
            tensors[f"base_model.model.{module}.lora_B.weight"] = part(outputs, rank)
    directory.mkdir(parents=True, exist_ok=True)
    write_bfloat16(directory / "adapter_model.safetensors", tensors)
    own = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": ALPHA, "bias": "none"}
    own |= {"target_modules": list(modules), "base_model_name_or_path": str(base)}
    write_json(directory / "adapter_config.json", own | config)
    return directory


def adapter_at(base: Path, directory: Path, name: str) -> Adapter:
    """The adapter as the registry has it after ``carpool apply``."""
    spec = {"source": str(base), "adapters_rank_max": 512, "adapters": [{"name": name, "source": str(directory)}]}
    service = {"apiVersion": "llm.serving/v1", "kind": "ModelService", "metadata": {"name": "base"}, "spec": spec}
    tensors = read_tensors(base / "model.safetensors")
    return build_adapters(parse_services(json.dumps(service).encode())[0], base, tensors)[0]
