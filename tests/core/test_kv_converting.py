"""What the precision adapter of a node asks and does, without a node."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvcache.codec.precision import convert
from kvcache.core.fetching import Bandwidths
from kvcache.core.identity import PAGE_BYTES, KvIdentity, KvSignature
from kvcache.node.host_tier import checksums_of, raw_of
from kvcache.node.node import Node
from kvcache.node.precision import PrecisionAdapter
from kvcache.node.settings import NodeSettings
from profiles.blocks import chain_hashes
from subjects.messages import KvTier

WEIGHTS = "ab" * 32
ELEMENTS = 2 * 32 * 512
"""In bfloat16 one page."""


def identity(name: str, dtype: str, width: int, more: str = "") -> KvIdentity:
    signature = KvSignature(
        model=f"{WEIGHTS[:16]}-01234567-l1-h1d512-{name}-b32{more}",
        layers=1,
        kv_heads=1,
        head_size=512,
        dtype=dtype,
        form="layer,head,token,kv",
        block_size=32,
        block_bytes=width * ELEMENTS,
    )
    return KvIdentity(weights_hash=WEIGHTS, signature=signature, salt=b"s" * 16)


WIDE = identity("bfloat16", "bfloat16", 2)
FP8 = identity("fp8", "fp8_e4m3", 1, "-converted")
PLAIN = identity("fp8", "fp8_e4m3", 1)
HASHES = chain_hashes(range(6 * 32), 32, b"s" * 16)


class Place:
    """Tiers in memory with six blocks of the wide model."""

    def __init__(self, pages: int = 32) -> None:
        node = Node(NodeSettings(worker="w", socket_path="s", host_bytes_max=pages * PAGE_BYTES))
        self.tiers, self.models = node.tiers, node.models
        self.wrong: list[bytes] = []
        self.speeds = Bandwidths()
        self.adapter = PrecisionAdapter(self.tiers, self.models, self.speeds, self._wrong)
        for known in (WIDE, FP8, PLAIN):
            self.models.note(WEIGHTS, known.signature, "", "none")

    async def _wrong(self, identity: KvIdentity, hash: bytes) -> None:
        self.wrong.append(hash)
        await self.tiers.corrupt(identity, hash)

    async def write(self) -> list[bytes]:
        raws = []
        for place, hash in enumerate(HASHES):
            values = np.random.default_rng(place).normal(size=ELEMENTS).astype(np.float32)
            raws.append((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
            block = await self.tiers.reserve(WIDE, hash, HASHES[place - 1] if place else b"")
            assert block is not None
            block.views[0][:] = raws[-1]
            self.tiers.keep(block, checksums_of(block), depth=place + 1)
        return raws

    async def fill(self, target: KvIdentity = FP8, *, seconds: float = 60.0, speed: float = 100.0) -> int:
        await self.adapter.fill(target, HASHES, end_s=time.monotonic() + seconds, prefill_tokens_per_s=speed)
        return self.tiers.leading(target, HASHES)


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    made = Place()
    yield made
    await made.adapter.close()
    await made.tiers.close()


async def test_what_is_converted_are_ordinary_blocks(place: Place) -> None:
    """KVC-5: the engine's bytes, with their checksums, parents and depths; nothing stays pinned."""
    raws = await place.write()
    assert await place.fill() == 6
    for raw, block in zip(raws, [place.tiers.host.find(FP8.key + hash) for hash in HASHES], strict=True):
        assert block is not None and block.pins == 0 and block.checksums == checksums_of(block)
        wanted = bytearray(ELEMENTS)
        convert(WIDE.signature, raw, FP8.signature, memoryview(wanted))
        assert raw_of(block) == wanted
    assert [held.hash for held in place.tiers.holdings.chain(FP8.key, HASHES[-1])] == HASHES
    assert all(block.pins == 0 for block in place.tiers.host)


async def test_memory_that_changed_is_not_converted(place: Place) -> None:
    """P2: the block is told of and dropped; those before it serve, those behind it do not."""
    await place.write()
    block = place.tiers.host.find(WIDE.key + HASHES[3])
    assert block is not None
    block.views[0][77] ^= 1
    assert await place.fill() == 3
    assert place.wrong == [HASHES[3]] and place.tiers.leading(WIDE, HASHES) == 3
    assert place.tiers.host.find(FP8.key + HASHES[4]) is None and place.tiers.counts.corrupt == 1
    assert all(one.pins == 0 for one in place.tiers.host)


async def test_nobody_is_converted_for_who_did_not_ask_or_has_no_time(place: Place) -> None:
    """P2, KVC-5: an fp8 model that takes none, the wide one, one whose deadline is over or who computes faster."""
    await place.write()
    assert await place.fill(PLAIN) == 0
    assert await place.fill(seconds=0.0) == 0
    assert await place.fill(speed=1e12) == 0
    assert place.tiers.in_host() == {WIDE.signature.model: (6, 6 * PAGE_BYTES)}
    assert await place.fill() == 6
    place.tiers.host.remove(WIDE.key + HASHES[0])
    place.tiers.holdings.left(WIDE.key + HASHES[0], KvTier.HOST)
    assert await place.fill(WIDE) == 0
    assert place.models.layouts("cd" * 32) == []


async def test_a_speed_that_was_too_low_once_is_tried_again(place: Place) -> None:
    """KVC-4: a slow disk on the first try does not end converting for good."""
    await place.write()
    place.speeds.measured("convert", 1 << 20, 60.0)
    tries = 0
    while await place.fill() == 0:
        tries += 1
        assert tries < 300
    assert tries > 0


async def test_no_more_than_there_is_room_for() -> None:
    """KVC-1: a tier that is full of what is being read takes none, and lets go of what it had reserved."""
    place = Place(pages=7)
    await place.write()
    held = await place.tiers.acquire(WIDE, HASHES)
    assert await place.fill() == 1
    place.tiers.release(held)
    assert all(block.pins == 0 for block in place.tiers.host) and place.tiers.host.bytes_free == 0
    await place.adapter.close()
    await place.tiers.close()
