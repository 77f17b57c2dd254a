"""Blocks of an engine's KV cache as rows of bytes, and back: which axis counts blocks, how bytes are ordered, how they move.

A *row* is one block in all layers, ``block_bytes`` long: layer after layer, each as the engine keeps it, whatever the order
of its memory. vLLM 0.32 hands every layer over as a view ``[blocks, heads, tokens, keys and values]`` (one head for MLA);
the older forms of FlashAttention (``[2, blocks, ...]``), FlashInfer (``[blocks, 2, ...]``) and MLA
(``[blocks, tokens, latent]``) are read too. What lies inside differs by backend, so it is part of the form's name:

==========================================  =====================================================================
``layer,head,k:dim.token,v:token.dim``      CPU: of each head all keys, one dimension after the other, then all
                                            values, one token after the other (seen by writing known numbers)
``layer,head,kv:<isa>``                     CPU with AMX and others: keys and values packed for that instruction set
``layer,head,token,kv@<backend>``           GPU: of each head's token the key, then the value
``layer,kv,token,head,dim@<backend>``       the older forms; ``layer,kv,head,token,dim`` where heads come first
``layer,token,latent@<backend>``            MLA
==========================================  =====================================================================

Behind it stand the engine's version and the shard, each after a semicolon.

On a CPU the copies are numpy's: they leave the GIL alone and use one thread, so a step of the engine goes on beside them. On
a GPU blocks are gathered into one buffer on the engine's own stream, which orders that before any later step, and cross the
bus on a stream of ours into pinned memory; nothing waits for it but our own thread. UNVERIFIED on a GPU: ``tests/gpu``.

This is the only module of the folder that imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from kvcache.core.identity import KvSignature
from subjects.errors import CarpoolError

CPU_FORM = "layer,head,k:dim.token,v:token.dim"
_DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.uint8: "fp8_e4m3",  # vLLM keeps fp8 caches as bytes
}


class UnknownLayout(CarpoolError):
    """These tensors cannot be taken apart into blocks; the engine goes without tiers."""


class BlockView(msgspec.Struct, frozen=True):
    """All layers as one tensor ``[blocks, layers, ...]``, or one ``[blocks, ...]`` for each where they lie apart."""

    parts: tuple[torch.Tensor, ...]
    layers: int
    layer_shape: tuple[int, ...]
    """Of one block of one layer."""
    order: str
    """Names of its axes, without the backend's name."""
    dtype: str
    kv_heads: int
    head_size: int
    block_bytes: int

    def signature(
        self, *, model: str, block_size: int, backend: str = "", isa: str = "", engine: str = "", shard: str = ""
    ) -> KvSignature:
        """What these blocks are, for the tiers. ``isa`` is set on a CPU only. ``engine`` is its version, since what lies
        inside a layer's block is its own affair and files outlive an update. ``shard`` is ``<rank>/<ranks>`` of a replica
        that spans devices, each of which keeps its own heads."""
        form = self.order
        if isa:
            form = CPU_FORM if isa == "vec" else f"layer,head,kv:{isa}"
        elif backend:
            form = f"{form}@{backend}"
        return KvSignature(
            model=model,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            dtype=self.dtype,
            form=";".join(filter(None, (form, engine, shard))),
            block_size=block_size,
            block_bytes=self.block_bytes,
        )


def view_blocks(caches: Mapping[str, Any], names: Sequence[str], blocks: int, block_size: int) -> BlockView:
    """The layers ``names`` of an engine's caches, block by block. ``blocks`` is how many the engine counts.

    Raises:
        UnknownLayout: no axis counts blocks, or more than one may; layers differ; or one is no tensor.
    """
    layers = [_by_block(caches[name], blocks, block_size) for name in _distinct(caches, names)]
    if not layers:
        raise UnknownLayout("the engine has no KV cache")
    first = layers[0]
    if any(layer.shape != first.shape or layer.dtype != first.dtype for layer in layers):
        raise UnknownLayout("layers have KV of different shapes or precisions")
    if first.dtype not in _DTYPES:
        raise UnknownLayout(f"KV of {first.dtype} is not known")
    shape = tuple(first.shape[1:])
    order, kv_heads, head_size = _axes(shape, block_size)
    together = _together(layers)
    return BlockView(
        parts=(together,) if together is not None else tuple(layers),
        layers=len(layers),
        layer_shape=shape,
        order=order,
        dtype=_DTYPES[first.dtype],
        kv_heads=kv_heads,
        head_size=head_size,
        block_bytes=len(layers) * prod(shape) * first.element_size(),
    )


def _distinct(caches: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Without layers that share the tensor of another."""
    seen: set[int] = set()
    distinct = []
    for name in names:
        cache = caches.get(name)
        if not isinstance(cache, torch.Tensor):
            raise UnknownLayout(f"{name} keeps its state in no single tensor")
        if cache.data_ptr() not in seen:
            seen.add(cache.data_ptr())
            distinct.append(name)
    return distinct


def _by_block(cache: torch.Tensor, blocks: int, block_size: int) -> torch.Tensor:
    """A view whose first axis counts the engine's blocks."""
    shape = tuple(cache.shape)
    if len(shape) >= 4 and shape[0] == 2 and shape[1] == blocks and shape[0] != blocks:
        return cache.movedim(1, 0)
    if len(shape) < 3 or shape[0] % blocks or (len(shape) >= 5 and shape[:2] == (2, 2) and blocks == 2):
        raise UnknownLayout(f"no axis of {shape} counts {blocks} blocks")
    pieces = shape[0] // blocks
    if pieces == 1:
        return cache
    # The attention kernel takes smaller blocks than the engine counts: one of ours is several of its.
    if cache.stride(0) * pieces * blocks > cache.untyped_storage().nbytes() // cache.element_size():
        raise UnknownLayout(f"{shape} does not hold {blocks} blocks of {pieces} pieces")
    split: torch.Tensor = cache.unflatten(0, (blocks, pieces))
    return split


def _axes(shape: tuple[int, ...], block_size: int) -> tuple[str, int, int]:
    """Names of a block's axes, its heads, and the elements of one head's key."""
    match shape:
        case (heads, tokens, content) if tokens == block_size and content % 2 == 0:
            return "layer,head,token,kv", heads, content // 2
        case (2, tokens, heads, dim) if tokens == block_size:
            return "layer,kv,token,head,dim", heads, dim
        case (2, heads, tokens, dim) if tokens == block_size:
            return "layer,kv,head,token,dim", heads, dim
        case (tokens, latent) if tokens == block_size and latent % 2 == 0:
            return "layer,token,latent", 1, latent // 2
        case (pieces, heads, tokens, content) if pieces * tokens == block_size and content % 2 == 0:
            return f"layer,piece{pieces},head,token,kv", heads, content // 2
    raise UnknownLayout(f"a block of shape {shape} is not known for {block_size} tokens")


def _together(layers: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """All layers as one view, where the engine allocated them at even distances."""
    first = layers[0]
    storage = first.untyped_storage().data_ptr()
    offsets = [layer.storage_offset() for layer in layers]
    step = offsets[1] - offsets[0] if len(offsets) > 1 else 0
    even = all(offset == offsets[0] + index * step for index, offset in enumerate(offsets))
    same = all(layer.untyped_storage().data_ptr() == storage and layer.stride() == first.stride() for layer in layers)
    if not even or not same or step < 0:
        return None
    return torch.as_strided(
        first,
        (first.shape[0], len(layers), *first.shape[1:]),
        (first.stride(0), step, *first.stride()[1:]),
        offsets[0],
    )


class Saved(Protocol):
    """A copy into host memory that was asked for."""

    def wait(self) -> None:
        """Returns when the rows hold it."""


class Blocks(Protocol):
    """Moves blocks between the engine and rows in host memory. One thread saves, one loads; they may do so at once."""

    block_bytes: int

    def rows(self, count: int) -> torch.Tensor:
        """A buffer in host memory, ``[count, block_bytes]`` bytes."""

    def save(self, block_ids: Sequence[int], rows: torch.Tensor) -> Saved:
        """Starts the copy of blocks into rows. In the engine's thread, after the step that filled them was submitted; what
        later steps write into the same blocks is not in the copy."""

    def mark(self) -> object:
        """This moment of the engine's thread, for :meth:`load`."""

    def load(self, block_ids: Sequence[int], rows: torch.Tensor, after: object) -> None:
        """Copies rows into blocks that nothing else uses and returns when they are there. Not before the engine has done
        what it had submitted at ``after`` (it may have zeroed them)."""


class _Done:
    def wait(self) -> None:
        """It is over already."""


class HostBlocks:
    """Blocks that lie in host memory."""

    def __init__(self, view: BlockView) -> None:
        self.block_bytes = view.block_bytes
        kept = 2 if len(view.parts) == 1 else 1
        self._parts = [_as_bytes(part, kept) for part in view.parts]
        self._row_shape = (view.layers, *self._parts[0].shape[kept:])

    def rows(self, count: int) -> torch.Tensor:
        """Not touched, so that memory is taken only as it is used."""
        return torch.empty((count, self.block_bytes), dtype=torch.uint8)

    def save(self, block_ids: Sequence[int], rows: torch.Tensor) -> Saved:
        """Copies them at once."""
        target = rows.numpy().reshape(-1, *self._row_shape)
        if len(self._parts) == 1:
            for row, block in enumerate(block_ids):
                target[row] = self._parts[0][block]
        else:
            for layer, part in enumerate(self._parts):
                for row, block in enumerate(block_ids):
                    target[row, layer] = part[block]
        return _Done()

    def mark(self) -> object:
        """Steps are over when they return."""
        return None

    def load(self, block_ids: Sequence[int], rows: torch.Tensor, after: object) -> None:
        """Copies them at once."""
        source = rows.numpy().reshape(-1, *self._row_shape)
        if len(self._parts) == 1:
            for row, block in enumerate(block_ids):
                self._parts[0][block] = source[row]
        else:
            for layer, part in enumerate(self._parts):
                for row, block in enumerate(block_ids):
                    part[block] = source[row, layer]


def _as_bytes(part: torch.Tensor, kept: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The same memory as bytes: ``kept`` leading axes, then those that do not lie densely, then one for all that do."""
    array: np.ndarray[Any, np.dtype[np.uint8]] = part.view(torch.uint8).numpy()
    dense, axes = 1, array.ndim
    while axes > kept and array.strides[axes - 1] == dense:
        dense *= array.shape[axes - 1]
        axes -= 1
    return np.lib.stride_tricks.as_strided(array, (*array.shape[:axes], dense), (*array.strides[:axes], 1))


class DeviceBlocks:
    """Blocks that lie on a CUDA device, copied over pinned host memory on streams of our own.

    ``cuda`` is ``torch.cuda``; the tests pass one that runs on a CPU.
    """

    def __init__(self, view: BlockView, *, cuda: Any = None) -> None:
        self.block_bytes = view.block_bytes
        self._parts = view.parts
        self._cuda = torch.cuda if cuda is None else cuda
        self._device = view.parts[0].device
        self._dtype = view.parts[0].dtype
        self._row_shape = (view.layers, *view.layer_shape)
        self._saves = self._cuda.Stream(device=self._device)
        self._loads = self._cuda.Stream(device=self._device)

    def rows(self, count: int) -> torch.Tensor:
        """Pinned, so that copies need not wait for the host."""
        return torch.empty((count, self.block_bytes), dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def save(self, block_ids: Sequence[int], rows: torch.Tensor) -> Saved:
        """Gathers on the engine's stream: later steps, which may give the blocks away, come after it."""
        gathered = self._gather(block_ids)
        ready = self._cuda.Event()
        ready.record(self._cuda.current_stream(self._device))
        done = self._cuda.Event()
        with self._cuda.stream(self._saves):
            self._saves.wait_event(ready)
            rows.copy_(gathered, non_blocking=True)
            done.record(self._saves)
        # The allocator must not give the buffer to the engine's stream while ours still reads it.
        if gathered.is_cuda:
            gathered.record_stream(self._saves)
        return _Event(done)

    def mark(self) -> object:
        """An event on the engine's stream."""
        moment = self._cuda.Event()
        moment.record(self._cuda.current_stream(self._device))
        return moment

    def load(self, block_ids: Sequence[int], rows: torch.Tensor, after: object) -> None:
        """Scatters on a stream of ours and waits for it, in our thread alone."""
        done = self._cuda.Event()
        # A new thread stands at the first device, whichever is its worker's; going back to it from our stream would take
        # memory there.
        with self._cuda.device(self._device), self._cuda.stream(self._loads):
            self._loads.wait_event(after)
            self._scatter(block_ids, rows.to(self._device, non_blocking=True))
            done.record(self._loads)
        done.synchronize()

    def _gather(self, block_ids: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(block_ids, dtype=torch.int64).to(self._device, non_blocking=True)
        if len(self._parts) == 1:
            found = self._parts[0].index_select(0, index)
        else:
            found = torch.stack([part.index_select(0, index) for part in self._parts], dim=1)
        return found.reshape(len(block_ids), -1).view(torch.uint8)

    def _scatter(self, block_ids: Sequence[int], rows: torch.Tensor) -> None:
        index = torch.tensor(block_ids, dtype=torch.int64).to(self._device, non_blocking=True)
        blocks = rows.view(self._dtype).reshape(len(block_ids), *self._row_shape)
        if len(self._parts) == 1:
            self._parts[0].index_copy_(0, index, blocks)
        else:
            for layer, part in enumerate(self._parts):
                part.index_copy_(0, index, blocks[:, layer])


class _Event:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


def blocks_of(view: BlockView) -> Blocks:
    """Who moves these blocks."""
    return HostBlocks(view) if view.parts[0].device.type == "cpu" else DeviceBlocks(view)
