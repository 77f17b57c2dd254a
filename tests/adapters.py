"""LoRA adapters for tests, written by hand: random, and strong enough that they change what a model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from profiles.model_files import write_bfloat16, write_json


def make_adapter(base: Path, directory: Path, *, seed: int, rank: int = 4, strength: float = 0.3, **config: Any) -> Path:
    """An adapter of the queries and values of the Llama-shaped model at ``base``; ``config`` replaces fields of its own."""
    shape = json.loads((base / "config.json").read_text())
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    head_dim = shape.get("head_dim") or hidden // heads
    outputs = {"q_proj": heads * head_dim, "v_proj": shape["num_key_value_heads"] * head_dim}
    random = np.random.Generator(np.random.PCG64(seed))
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for module, output in outputs.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = np.float32(strength) * random.standard_normal((rank, hidden), np.float32)
            tensors[f"{name}.lora_B.weight"] = np.float32(strength) * random.standard_normal((output, rank), np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    write_bfloat16(directory / "adapter_model.safetensors", tensors)
    own = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16, "bias": "none"}
    own |= {"target_modules": sorted(outputs), "base_model_name_or_path": str(base)}
    write_json(directory / "adapter_config.json", own | config)
    return directory
