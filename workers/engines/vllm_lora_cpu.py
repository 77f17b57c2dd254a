"""vLLM's LoRA arithmetic on a CPU, adapter by adapter: named to vLLM in place of its own ``PunicaWrapperCPU``.

vLLM 0.32 gathers each token's matrices by the index of its slot. A token without an adapter has index -1, which in torch is
the last slot: a request for the base model beside one for an adapter got that adapter's weights added, and another answer
(vllm-project/vllm#48421 and #49656, open when this was written). The gathering also copies the matrices for every token of a
step: measured with SmolLM2, a prompt of 961 tokens took 15.7 s with an adapter and 4.6 s without.

Here the tokens of one adapter are multiplied together, and those without are left alone. Importing this imports vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform


def install() -> None:
    """From now on vLLM uses it in this process, where the platform is a CPU."""
    platform: Any = current_platform
    platform.get_punica_wrapper = lambda: f"{__name__}.{GroupedLora.__name__}"


class GroupedLora(PunicaWrapperCPU):  # type: ignore[misc]  # vLLM comes without types
    """``y += x @ A.T @ B.T * scale`` for the rows of each adapter."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._tokens: list[tuple[int, Any]] = []
        self._sampled: list[tuple[int, Any]] = []

    def update_metadata(self, *arguments: Any, **named: Any) -> None:
        """Once a step: which rows are whose."""
        super().update_metadata(*arguments, **named)
        self._tokens = _groups(self.token_lora_indices)
        self._sampled = _groups(self.sampler_indices)

    def add_shrink(self, y: Any, x: Any, lora_a_stacked: Any, scale: float, **_: Any) -> None:
        """``y[i] = x @ A[i].T * scale``; ``y`` comes as zeros."""
        x = x.view(-1, x.shape[-1])
        for slot, rows in self._tokens:
            wanted = x[rows].float()
            for target, stacked in zip(y, lora_a_stacked, strict=True):
                target.view(-1, target.shape[-1])[rows] = wanted @ stacked[slot, 0].float().T * scale

    def add_expand(
        self,
        y: Any,
        x: Any,
        lora_b_stacked: Any,
        output_slices: Any,
        offset_start: int = 0,
        add_inputs: bool = True,
        **_: Any,
    ) -> None:
        """``y[:, slice i] += x[i] @ B[i].T``; without ``add_inputs`` it is set instead."""
        y = y.view(-1, y.shape[-1])
        for slot, rows in self._tokens:
            offset = offset_start
            for shrunk, stacked, size in zip(x, lora_b_stacked, output_slices, strict=True):
                change = shrunk.view(-1, shrunk.shape[-1])[rows].float() @ stacked[slot, 0].float().T
                place = y[:, offset : offset + size]
                place[rows] = (place[rows] + change if add_inputs else change).to(y.dtype)
                offset += size

    def add_lora_embedding(self, y: Any, x: Any, lora_b_stacked: Any, add_inputs: bool = True, **_: Any) -> None:
        """``y += x @ B.T``, ``x`` being the rows of A that the tokens name."""
        for slot, rows in self._tokens:
            change = x[rows].float() @ lora_b_stacked[slot, 0].float().T
            y[rows] = (y[rows] + change if add_inputs else change).to(y.dtype)

    def add_lora_logits(
        self, y: Any, x: Any, lora_a_stacked: Any, lora_b_stacked: Any, scale: float, *, buffer: Any = None, **_: Any
    ) -> None:
        """``y += x @ A.T @ B.T * scale`` for the sampled rows; ``y`` may be narrower, without the padding of the head."""
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for slot, rows in self._sampled:
            change = (x[rows].float() @ lora_a_stacked[slot, 0].float().T * scale) @ lora_b_stacked[slot, 0].float().T
            width = min(y.shape[-1], change.shape[-1])
            y[rows, :width] = (y[rows, :width] + change[:, :width]).to(y.dtype)


def _groups(indices: Any) -> list[tuple[int, Any]]:
    """``(slot, its rows)`` for each slot in use."""
    return [(slot, torch.nonzero(indices == slot).flatten()) for slot in torch.unique(indices).tolist() if slot >= 0]
