"""Blocks of a GPU's KV cache as rows in pinned memory and back, in the order that the engine's own stream demands."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvcache.engine.tensors import DeviceBlocks, blocks_of, view_blocks  # noqa: E402  # torch may be absent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 8, 64, 4, 32, 64
NAMES = tuple(f"layer.{index}" for index in range(LAYERS))
SPIN_CYCLES = 200_000_000
"""Keeps a stream busy for about a tenth of a second, so that what is not ordered behind it comes first."""


def together(dtype: Any) -> dict[str, Any]:
    raw = torch.randn(LAYERS, BLOCKS, HEADS, TOKENS, 2 * DIM, device="cuda").to(dtype)
    return {name: raw[index] for index, name in enumerate(NAMES)}


def apart(dtype: Any) -> dict[str, Any]:
    return {name: torch.randn(2, BLOCKS, TOKENS, HEADS, DIM, device="cuda").to(dtype) for name in NAMES}


@pytest.mark.parametrize("make", [together, apart])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_blocks_come_back_as_they_were(make: Any, dtype: str) -> None:
    """Saved, written over, loaded: bit for bit, and no other block changes (P2)."""
    caches = make(getattr(torch, dtype))
    view = view_blocks(caches, NAMES, BLOCKS, TOKENS)
    blocks = blocks_of(view)
    assert isinstance(blocks, DeviceBlocks)
    rows = blocks.rows(4)
    assert rows.is_pinned()
    before = {name: cache.view(torch.uint8).clone() for name, cache in caches.items()}
    blocks.save([9, 1, 40, 63], rows).wait()
    axis = 0 if make is together else 1
    for cache in caches.values():
        cache.view(torch.uint8).index_fill_(axis, torch.tensor([9, 1, 40, 63], device="cuda"), 7)
    blocks.load([9, 1, 40, 63], rows, blocks.mark())
    torch.cuda.synchronize()
    for name, cache in caches.items():
        assert torch.equal(cache.view(torch.uint8), before[name])


def test_a_save_is_of_the_step_before_and_not_of_the_next() -> None:
    """The engine's stream is busy: the copy waits for what came before it, and what comes after does not get into it."""
    caches = together(torch.bfloat16)
    blocks = DeviceBlocks(view_blocks(caches, NAMES, BLOCKS, TOKENS))
    rows = blocks.rows(1)
    torch.cuda._sleep(SPIN_CYCLES)
    for cache in caches.values():
        cache[5].fill_(1.0)
    saved = blocks.save([5], rows)
    for cache in caches.values():
        cache[5].fill_(2.0)
    saved.wait()
    assert (rows.view(torch.bfloat16) == 1.0).all()


def test_a_load_comes_after_the_engines_zeroing() -> None:
    """Blocks that the engine zeroes before they are used are written after that, not before."""
    caches = together(torch.bfloat16)
    blocks = DeviceBlocks(view_blocks(caches, NAMES, BLOCKS, TOKENS))
    rows = blocks.rows(1)
    rows.view(torch.bfloat16).fill_(3.0)
    torch.cuda._sleep(SPIN_CYCLES)
    for cache in caches.values():
        cache[6].zero_()
    blocks.load([6], rows, blocks.mark())
    torch.cuda.synchronize()
    assert all(bool((cache[6] == 3.0).all()) for cache in caches.values())
