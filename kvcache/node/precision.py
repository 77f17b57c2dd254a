"""Blocks of a wider precision serve an engine of the same weights with an fp8 cache (KVC-5; ``precision`` says which).

When an engine whose model takes them (``spec.kv.converted``) asks for a prompt, blocks that this node has for it in a wider
precision only are converted, as far as that beats computing them. They are kept like blocks that the engine wrote. What
other nodes have is fetched in the engine's own precision alone: what is wider there is converted there, when it is asked
for there. Engines read only what was prepared, so that reading converts nothing.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Final

import structlog

from kvcache.core.fetching import Bandwidths, choose
from kvcache.core.identity import KvIdentity
from kvcache.node.host_tier import HostBlock, checksums_of, filled, raw_of
from kvcache.node.models import KnownModels
from kvcache.node.tiers import BATCH_BYTES, Tiers
from profiles.capacity import takes_converted
from subjects.errors import place_of

CONVERT: Final = "convert"
"""Path of the bandwidth of converting, in bytes of what comes out."""
LATENCY_S: Final = 0.002
"""What is believed that a batch takes beside its bytes."""

log = structlog.get_logger(__name__)


class PrecisionAdapter:
    """See the module. One conversion at a time, in a thread of its own."""

    def __init__(
        self,
        tiers: Tiers,
        models: KnownModels,
        bandwidths: Bandwidths,
        on_wrong: Callable[[KvIdentity, bytes], Awaitable[None]],
    ) -> None:
        """``on_wrong`` is told of a block in memory that is no longer what had been written."""
        self._tiers = tiers
        self._models = models
        self._bandwidths = bandwidths
        self._on_wrong = on_wrong
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-convert")
        self._one = asyncio.Lock()
        self._work: set[asyncio.Task[None]] = set()
        self._closed = False

    async def close(self) -> None:
        """Waits for the batch under way."""
        self._closed = True
        if self._work:
            await asyncio.wait(set(self._work))
        self._thread.shutdown(wait=True)

    async def fill(
        self, identity: KvIdentity, hashes: Sequence[bytes], *, end_s: float, prefill_tokens_per_s: float
    ) -> None:
        """Converts what this prompt lacks, until ``end_s`` on the monotonic clock; a batch under way then still comes."""
        if not takes_converted(identity.signature.model) or self._closed:
            return
        if self._tiers.leading(identity, hashes) == len(hashes):
            return
        if not any(one != identity.signature for one in self._models.layouts(identity.weights_hash)):
            return
        # A task of its own: its thread has pages in its hands, whoever stops waiting.
        work = asyncio.get_running_loop().create_task(self._fill(identity, hashes, end_s, prefill_tokens_per_s))
        self._work.add(work)
        work.add_done_callback(self._ended)
        await asyncio.wait([work], timeout=max(0.0, end_s - time.monotonic()))

    def _ended(self, work: asyncio.Task[None]) -> None:
        self._work.discard(work)
        if not work.cancelled() and (error := work.exception()) is not None:
            log.error("converting KV failed", error=place_of(error))

    async def _fill(self, identity: KvIdentity, hashes: Sequence[bytes], end_s: float, speed: float) -> None:
        loop, tiers = asyncio.get_running_loop(), self._tiers
        # With numpy: only for those who need it.
        precision = await loop.run_in_executor(self._thread, importlib.import_module, "kvcache.codec.precision")
        sources = [
            source
            for signature in self._models.layouts(identity.weights_hash)
            if precision.convertible_from(
                source := KvIdentity(weights_hash=identity.weights_hash, signature=signature, salt=identity.salt), identity
            )
        ]
        async with self._one:
            kept: list[HostBlock] = []  # pinned to the end: they are not what makes room for those after them
            try:
                await self._fill_from(sources, precision, identity, hashes, end_s, speed, kept)
            finally:
                tiers.release(kept)

    async def _fill_from(
        self,
        sources: Sequence[KvIdentity],
        precision: ModuleType,
        identity: KvIdentity,
        hashes: Sequence[bytes],
        end_s: float,
        speed: float,
        kept: list[HostBlock],
    ) -> None:
        tiers = self._tiers
        before = -1
        while sources and not self._closed and time.monotonic() < end_s:
            local = tiers.leading(identity, hashes)
            if local <= before:
                return
            before, lacking = local, hashes[local:]
            source = max(sources, key=lambda one: (tiers.leading(one, lacking), one.key))
            there = tiers.leading(source, lacking)
            choice = choose(
                there,
                block_bytes=identity.signature.block_bytes,
                block_tokens=identity.signature.block_size,
                bytes_per_s=self._bandwidths.bytes_per_s(CONVERT),
                latency_s=LATENCY_S,
                prefill_tokens_per_s=speed,
                deadline_s=end_s - time.monotonic(),
            )
            if there and not choice.blocks:
                self._bandwidths.passed_over(CONVERT)
            count = min(choice.blocks, max(1, BATCH_BYTES // source.signature.block_bytes))
            parent = hashes[local - 1] if local else b""
            if not count:
                return
            kept += await self._convert(precision, source, identity, parent, lacking[:count], local)

    async def _convert(
        self,
        precision: ModuleType,
        source: KvIdentity,
        target: KvIdentity,
        parent: bytes,
        hashes: Sequence[bytes],
        depth: int,
    ) -> list[HostBlock]:
        """Converts these consecutive blocks; those that came, pinned. ``depth``: of the block before the first."""
        tiers = self._tiers
        begin_s = time.monotonic()
        blocks = await tiers.acquire(source, hashes)
        rooms: list[HostBlock] = []
        sums: list[bytes] = []
        try:
            for block in blocks:
                room = await tiers.reserve(target, block.hash, parent)
                if room is None:
                    break
                rooms.append(room)
                parent = block.hash
            loop = asyncio.get_running_loop()
            sums = await loop.run_in_executor(self._thread, _converted, precision, blocks, rooms)
        finally:
            tiers.release(blocks)
            for room in rooms[len(sums) :]:
                tiers.host.abandon(room)
        for place, (room, sum_) in enumerate(zip(rooms, sums, strict=False), depth + 1):
            tiers.keep(room, sum_, depth=place)
        came = [here for room in rooms[: len(sums)] if (here := tiers.host.find(room.key)) is not None]
        for one in came:
            tiers.host.pin(one)
        self._bandwidths.measured(CONVERT, len(sums) * target.signature.block_bytes, time.monotonic() - begin_s)
        if len(sums) < len(rooms):
            await self._on_wrong(source, blocks[len(sums)].hash)
        return came


def _converted(precision: ModuleType, blocks: Sequence[HostBlock], rooms: Sequence[HostBlock]) -> list[bytes]:
    """In a thread: checksums of the leading blocks that came, up to one that is not what had been written (P2)."""
    sums: list[bytes] = []
    for block, room in zip(blocks, rooms, strict=False):
        if checksums_of(block) != block.checksums:
            break
        with filled(room) as into:
            precision.convert(block.identity.signature, raw_of(block), room.identity.signature, into)
        sums.append(checksums_of(room))
    return sums
