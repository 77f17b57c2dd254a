"""Blocks of an engine's tensors as rows and back, for the layouts that engines have; no engine, no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvcache.engine.tensors import (  # noqa: E402  # torch may be absent
    CPU_FORM,
    BlockView,
    DeviceBlocks,
    HostBlocks,
    UnknownLayout,
    blocks_of,
    view_blocks,
)

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 3, 7, 2, 32, 4
NAMES = tuple(f"layer.{index}" for index in range(LAYERS))


def numbered(shape: tuple[int, ...], dtype: Any = None, start: int = 0) -> Any:
    """A tensor in which every element differs from its neighbours."""
    count = torch.Size(shape).numel()
    return ((torch.arange(start, start + count) * 7) % 251).reshape(shape).to(dtype or torch.bfloat16)


def together(order: str) -> dict[str, Any]:
    """vLLM's views ``[blocks, heads, tokens, 2 x dim]`` of one allocation with its axes in this order in memory."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": 2 * DIM}
    raw = numbered(tuple(sizes[axis] for axis in order))
    views = raw.permute([order.index(axis) for axis in "LBHNC"])
    return {name: views[index] for index, name in enumerate(NAMES)}


def apart(shape: tuple[int, ...], dtype: Any = None) -> dict[str, Any]:
    """One tensor of its own for each layer."""
    return {name: numbered(shape, dtype, start=index * 13) for index, name in enumerate(NAMES)}


CPU_ORDER, FUSED = "LBHNC", ("LBHNC", "LBNHC", "BLHNC", "BHLNC")
APART: dict[str, tuple[int, ...]] = {
    "apart": (BLOCKS, HEADS, TOKENS, 2 * DIM),
    "MLA": (BLOCKS, 1, TOKENS, 2 * DIM),
    "older FlashAttention": (2, BLOCKS, TOKENS, HEADS, DIM),
    "older FlashInfer": (BLOCKS, 2, HEADS, TOKENS, DIM),
    "older MLA": (BLOCKS, TOKENS, 2 * DIM),
}


def caches_of(kind: str) -> dict[str, Any]:
    return together(kind) if kind in FUSED else apart(APART[kind])


def viewed(kind: str) -> BlockView:
    return view_blocks(caches_of(kind), NAMES, BLOCKS, TOKENS)


@contextlib.contextmanager
def _nothing(_stream: Any) -> Iterator[None]:
    yield


class NoCuda:
    """``torch.cuda`` on a CPU, where everything is over when it returns; it notes what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def Stream(self, device: Any) -> Any:
        return _Stream(f"stream{self.calls.count('new stream')}", self.calls)

    def Event(self) -> Any:
        return _Event(self.calls)

    def current_stream(self, device: Any) -> Any:
        return _Stream("engine", self.calls)

    def device(self, device: Any) -> Any:
        self.calls.append("its device")
        return _nothing(device)

    stream = staticmethod(_nothing)


class _Stream:
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self._calls = calls
        if name != "engine":
            calls.append("new stream")

    def wait_event(self, event: Any) -> None:
        self._calls.append(f"{self.name} waits for {event.of}")


class _Event:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls
        self.of = "nothing"

    def record(self, stream: Any) -> None:
        self.of = stream.name
        self._calls.append(f"event on {stream.name}")

    def synchronize(self) -> None:
        self._calls.append(f"wait for {self.of}")


@pytest.mark.parametrize("kind", [*FUSED, *APART])
@pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])
def test_rows_hold_blocks_and_bring_them_back(kind: str, staged: bool) -> None:
    """A row is one block of all layers in order; written into other blocks it changes those and no other (P2)."""
    caches = caches_of(kind)
    axis = 1 if kind == "older FlashAttention" else 0
    view = view_blocks(caches, NAMES, BLOCKS, TOKENS)
    assert len(view.parts) == (1 if kind in FUSED else LAYERS)
    blocks = DeviceBlocks(view, cuda=NoCuda()) if staged else HostBlocks(view)
    rows = blocks.rows(3)
    blocks.save([5, 0, 3], rows).wait()
    assert torch.equal(rows, _rows_of(view, caches, axis, (5, 0, 3)))
    before = {name: tensor.clone() for name, tensor in caches.items()}
    blocks.load([1, 6], rows[:2], blocks.mark())
    for name in NAMES:
        for block in range(BLOCKS):
            source = {1: 5, 6: 0}.get(block, block)
            assert torch.equal(caches[name].select(axis, block), before[name].select(axis, source))


def _rows_of(view: BlockView, caches: dict[str, Any], axis: int, block_ids: tuple[int, ...]) -> Any:
    rows = [
        torch.cat([caches[name].select(axis, block).contiguous().view(torch.uint8).flatten() for name in NAMES])
        for block in block_ids
    ]
    assert len(rows[0]) == view.block_bytes
    return torch.stack(rows)


def test_a_signature_says_what_the_bytes_are() -> None:
    """The order of a CPU's packed keys, a GPU's backend, the engine's version and a shard are parts of the form: none is
    read as another (P2)."""
    view = viewed(CPU_ORDER)
    on_cpu = view.signature(model="m", block_size=TOKENS, backend="CPU_ATTN", isa="vec")
    assert (on_cpu.layers, on_cpu.kv_heads, on_cpu.head_size, on_cpu.dtype) == (LAYERS, HEADS, DIM, "bfloat16")
    assert on_cpu.block_bytes == LAYERS * HEADS * TOKENS * 2 * DIM * 2
    forms = [
        on_cpu.form,
        view.signature(model="m", block_size=TOKENS, backend="CPU_ATTN", isa="amx").form,
        view.signature(model="m", block_size=TOKENS, backend="FLASH_ATTN").form,
        view.signature(model="m", block_size=TOKENS, backend="FLASH_ATTN", engine="vllm1", shard="1/2").form,
        viewed("older FlashAttention").order,
        viewed("older FlashInfer").order,
        viewed("older MLA").order,
    ]
    assert forms == [
        CPU_FORM,
        "layer,head,kv:amx",
        "layer,head,token,kv@FLASH_ATTN",
        "layer,head,token,kv@FLASH_ATTN;vllm1;1/2",
        "layer,kv,token,head,dim",
        "layer,kv,head,token,dim",
        "layer,token,latent",
    ]


def test_smaller_blocks_of_a_kernel_are_put_together() -> None:
    """Where the attention kernel has blocks of half the size, two of its blocks are one of the engine's."""
    caches = apart((2 * BLOCKS, HEADS, TOKENS // 2, 2 * DIM))
    view = view_blocks(caches, NAMES, BLOCKS, TOKENS)
    blocks = HostBlocks(view)
    rows = blocks.rows(1)
    blocks.save([4], rows)
    assert torch.equal(rows[0], torch.cat([caches[name][8:10].view(torch.uint8).flatten() for name in NAMES]))
    assert view.signature(model="m", block_size=TOKENS).form == "layer,piece2,head,token,kv"


def test_layers_that_share_a_tensor_are_one() -> None:
    """A layer that reads another layer's KV has none of its own."""
    caches = apart((BLOCKS, HEADS, TOKENS, 2 * DIM))
    caches["layer.2"] = caches["layer.1"]
    assert view_blocks(caches, NAMES, BLOCKS, TOKENS).layers == 2


@pytest.mark.parametrize(
    ("caches", "blocks"),
    [
        ({}, BLOCKS),
        ({name: [torch.zeros(1)] for name in NAMES}, BLOCKS),
        (apart((BLOCKS, HEADS, TOKENS, 2 * DIM)), 5),
        (apart((BLOCKS, HEADS, 16, 2 * DIM)), BLOCKS),
        (apart((2, 2, TOKENS, HEADS, DIM)), 2),
        (apart((BLOCKS, HEADS, TOKENS, 2 * DIM), torch.int32), BLOCKS),
        (apart((BLOCKS, HEADS, TOKENS, 2 * DIM)) | {"layer.2": numbered((BLOCKS, 1, TOKENS, 2 * DIM))}, BLOCKS),
    ],
    ids=["none", "states", "other count", "other tokens", "two blocks or two halves", "dtype", "layers differ"],
)
def test_what_cannot_be_taken_apart_is_refused(caches: dict[str, Any], blocks: int) -> None:
    """Rather no tiers than bytes in the wrong order."""
    with pytest.raises(UnknownLayout):
        view_blocks(caches, NAMES, blocks, TOKENS)


def test_copies_of_a_device_never_outrun_its_steps() -> None:
    """A save is gathered on the engine's stream; a load waits for what the engine had submitted; only our threads wait."""
    cuda = NoCuda()
    blocks = DeviceBlocks(viewed(CPU_ORDER), cuda=cuda)
    cuda.calls.clear()
    rows = blocks.rows(1)
    saved = blocks.save([2], rows)
    assert cuda.calls == ["event on engine", "stream0 waits for engine", "event on stream0"]
    saved.wait()
    assert cuda.calls.pop() == "wait for stream0"
    cuda.calls.clear()
    blocks.load([2], rows, blocks.mark())
    assert cuda.calls == [
        "event on engine",
        "its device",
        "stream1 waits for engine",
        "event on stream1",
        "wait for stream1",
    ]


def test_a_cpu_needs_no_staging() -> None:
    """Where the tensors lie in host memory nothing is pinned."""
    assert isinstance(blocks_of(viewed(CPU_ORDER)), HostBlocks)
