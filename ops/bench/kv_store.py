"""What the KV store on disk makes of the disk: its put and get against a plain sequential write and read of the same bytes.

Both sides move the same bytes in the same directory in turn, past the kernel's cache where the file system allows it, and
call ``fdatasync`` after as many bytes. Median of some rounds, since other work on the machine disturbs each of them.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvcache.core.identity import PAGE_BYTES, KvIdentity, KvSignature
from kvcache.store import UNSYNCED_BYTES_MAX, KvStore, StoredBlock
from subjects.errors import CarpoolError

BYTES_DEFAULT = 2 * 2**30
ROUNDS_DEFAULT = 3
_BLOCK_BYTES = 737_280
"""SmolLM2-135M in bfloat16, 32 tokens: 30 layers x 3 heads x 64 elements x keys and values x 2 bytes."""
_BATCH_BLOCKS = 80
_PLAIN_BYTES = 4 * 2**20
"""Of one call of the plain side: where larger calls gain nothing more."""
_SCATTERED = 200
_SIGNATURE = KvSignature(
    model="bench",
    layers=30,
    kv_heads=3,
    head_size=64,
    dtype="bfloat16",
    form="bench",
    block_size=32,
    block_bytes=_BLOCK_BYTES,
)
_IDENTITY = KvIdentity(weights_hash="0" * 64, signature=_SIGNATURE, salt=bytes(16))


async def measure(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``settings``: ``bytes`` (2 GiB), ``rounds`` (3), ``directory`` (where temporary files go: up to twice ``bytes``).

    ``l2_write_ratio`` and ``l2_read_ratio`` are medians over rounds of the store's speed over that of the plain side, in
    bytes of blocks; ``l2_*_gb_per_s`` are 10^9 bytes a second of both; ``l2_block_read_ms``: a block from a random place.
    """
    return await asyncio.to_thread(
        _measure,
        int(settings.get("bytes", BYTES_DEFAULT)),
        int(settings.get("rounds", ROUNDS_DEFAULT)),
        settings.get("directory"),
    )


def _measure(bytes_wanted: int, rounds: int, directory: str | None) -> dict[str, Any]:
    blocks = max(1, bytes_wanted // _BLOCK_BYTES)
    with tempfile.TemporaryDirectory(prefix="carpool-bench-kv-", dir=directory) as made:
        place = Path(made)
        need = 2 * (blocks + _BATCH_BLOCKS) * 12 * PAGE_BYTES
        if shutil.disk_usage(place).free < need:
            raise CarpoolError(f"the bench needs {need >> 20} MiB free in {place.parent}; say --directory")
        room = _Room()
        timed: dict[str, list[float]] = {}
        for turn in range(rounds):
            sides: list[Callable[[], dict[str, float]]] = [
                lambda: _plain(place / "plain", blocks, room),
                lambda: _store(place / "store", blocks, room),
            ]
            for side in sides if turn % 2 == 0 else reversed(sides):
                for name, value in side().items():
                    timed.setdefault(name, []).append(value)
    return _figures(timed, blocks)


def _figures(timed: Mapping[str, list[float]], blocks: int) -> dict[str, Any]:
    size = blocks * _BLOCK_BYTES

    def ratio(what: str) -> float:
        pairs = zip(timed[f"plain_{what}_s"], timed[f"store_{what}_s"], strict=True)
        return round(statistics.median(plain / store for plain, store in pairs), 3)

    def speed(what: str) -> float:
        return round(size / statistics.median(timed[f"{what}_s"]) / 1e9, 2)

    return {
        "l2_write_ratio": ratio("write"),
        "l2_read_ratio": ratio("read"),
        "l2_write_gb_per_s": {"store": speed("store_write"), "plain": speed("plain_write")},
        "l2_read_gb_per_s": {"store": speed("store_read"), "plain": speed("plain_read")},
        "l2_block_read_ms": round(1000 * statistics.median(timed["scattered_s"]), 3),
        "l2_bytes": size,
        "l2_rounds": len(timed["plain_write_s"]),
    }


class _Room:
    """Pages in memory that start where O_DIRECT wants it, with bytes that no disk can shrink."""

    def __init__(self) -> None:
        self.pages_per_block = _IDENTITY.pages_per_block
        self.block_room = self.pages_per_block * PAGE_BYTES
        self.memory = memoryview(mmap.mmap(-1, _BATCH_BLOCKS * self.block_room))
        for start in range(0, len(self.memory), 2**20):
            self.memory[start : start + 2**20] = os.urandom(min(2**20, len(self.memory) - start))

    def block(self, index: int) -> memoryview:
        """Its bytes, without what is left of its last page."""
        return self.memory[index * self.block_room : index * self.block_room + _BLOCK_BYTES]

    def pages(self, index: int) -> memoryview:
        return self.memory[index * self.block_room : (index + 1) * self.block_room]


def _plain(path: Path, blocks: int, room: _Room) -> dict[str, float]:
    size = blocks * _BLOCK_BYTES // 4096 * 4096
    fd = _open_direct(path)
    try:
        begun = time.perf_counter()
        unsynced = 0
        for offset, part in _parts(size, room):
            os.pwrite(fd, part, offset)
            unsynced += len(part)
            if unsynced >= UNSYNCED_BYTES_MAX:
                os.fdatasync(fd)
                unsynced = 0
        os.fdatasync(fd)
        written = time.perf_counter()
        for offset, part in _parts(size, room):
            if os.preadv(fd, [part], offset) != len(part):
                raise CarpoolError(f"{path} is shorter than it was written")
        return {"plain_write_s": written - begun, "plain_read_s": time.perf_counter() - written}
    finally:
        os.close(fd)
        path.unlink()


def _parts(size: int, room: _Room) -> list[tuple[int, memoryview]]:
    step = min(_PLAIN_BYTES, len(room.memory))
    spots = len(room.memory) // step
    return [
        (offset, room.memory[(index % spots) * step :][: min(step, size - offset)])
        for index, offset in enumerate(range(0, size, step))
    ]


def _open_direct(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with suppress(OSError):
        return os.open(path, flags | os.O_DIRECT, 0o600)
    path.unlink(missing_ok=True)
    return os.open(path, flags, 0o600)


def _store(path: Path, blocks: int, room: _Room) -> dict[str, float]:
    now_s = time.time()
    hashes = [index.to_bytes(16, "big") for index in range(1, blocks + 1)]
    store = KvStore.open(path, bytes_max=2**62, write_bytes_per_day_max=None, now_s=now_s)
    try:
        begun = time.perf_counter()
        for start in range(0, blocks, _BATCH_BLOCKS):
            batch = [
                StoredBlock(hash, hashes[start + index - 1] if start + index else b"", [room.block(index)])
                for index, hash in enumerate(hashes[start : start + _BATCH_BLOCKS])
            ]
            result = store.put(_IDENTITY, batch, now_s)
            if result.refused:
                raise CarpoolError(f"the store refused a block: {result.refused.value}")
        store.sync()
        written = time.perf_counter()
        for start in range(0, blocks, _BATCH_BLOCKS):
            wanted = hashes[start : start + _BATCH_BLOCKS]
            into = [[room.pages(index)] for index in range(len(wanted))]
            if len(store.get(_IDENTITY, wanted, into, now_s)) != len(wanted):
                raise CarpoolError("the store did not serve what was put")
        read = time.perf_counter()
        # A fixed stride that meets all blocks in an order far from that of the disk.
        scattered = [hashes[index * 7_919 % blocks] for index in range(min(_SCATTERED, blocks))]
        for hash in scattered:
            store.get(_IDENTITY, [hash], [[room.pages(0)]], now_s)
        last = time.perf_counter()
        return {
            "store_write_s": written - begun,
            "store_read_s": read - written,
            "scattered_s": (last - read) / len(scattered),
        }
    finally:
        store.close()
        shutil.rmtree(path)
