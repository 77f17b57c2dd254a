"""What the KV store on disk makes of the disk: its put and get against a plain sequential write and read of the same bytes.

Both sides move the same bytes in the same directory, past the kernel's cache where the file system allows it, and call
``fdatasync`` after as many bytes. They take turns after each batch, so that other work on the machine disturbs both alike;
the figures are medians over all batches.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from kvcache.core.identity import PAGE_BYTES, KvIdentity, KvSignature
from kvcache.store.store import UNSYNCED_BYTES_MAX, KvStore, StoredBlock
from ops.bench.kv import KvBench
from subjects.errors import CarpoolError, ConfigError

ROUNDS = 3
_BLOCK_BYTES = 737_280
"""SmolLM2-135M in bfloat16, 32 tokens: 30 layers x 3 heads x 64 elements x keys and values x 2 bytes. It fills 11.25 pages
of 64 KiB, so that the store writes and reads 6.7 % more than is asked of it."""
_BATCH_BYTES = 256 * 2**20
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


async def measure(bench: KvBench) -> dict[str, Any]:
    """Temporary files take a bit more than twice ``bench.store_bytes``.

    ``l2_write_ratio`` and ``l2_read_ratio``: the store's speed over that of the plain side, in bytes of blocks.
    ``l2_write_gb_per_s`` and ``l2_read_gb_per_s``: 10^9 bytes a second of both. ``l2_block_read_ms``: one block from a
    random place of the store.

    Raises:
        ConfigError: the directory is not there or has no room.
    """
    return await asyncio.to_thread(_measure, bench.store_bytes, bench.directory)


def _measure(bytes_wanted: int, directory: Path | None) -> dict[str, Any]:
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"--directory {directory}: there is no such directory; create it or name another one")
    blocks = max(1, bytes_wanted // _BLOCK_BYTES)
    timed = _Timed()
    with tempfile.TemporaryDirectory(prefix="carpool-bench-kv-", dir=directory) as made:
        need = int(2.2 * blocks * _BLOCK_BYTES) + 2**20
        if shutil.disk_usage(made).free < need:
            raise ConfigError(
                f"--gib: needs {need >> 20} MiB free in {Path(made).parent}; give less, or a --directory with more"
            )
        room = _Room(min(blocks, _BATCH_BYTES // _BLOCK_BYTES))
        for _ in range(ROUNDS):
            _round(Path(made), blocks, room, timed)
    return timed.figures(blocks * _BLOCK_BYTES, ROUNDS)


class _Timed:
    """Seconds of each batch."""

    def __init__(self) -> None:
        self.plain: dict[str, list[float]] = {"write": [], "read": []}
        self.store: dict[str, list[float]] = {"write": [], "read": []}
        self.sizes: list[int] = []
        self.scattered_s: list[float] = []

    def figures(self, size: int, rounds: int) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        for what in ("write", "read"):
            plain, store = self.plain[what], self.store[what]
            figures[f"l2_{what}_ratio"] = round(statistics.median(a / b for a, b in zip(plain, store, strict=True)), 3)
            speeds = {"store": store, "plain": plain}
            figures[f"l2_{what}_gb_per_s"] = {
                side: round(statistics.median(size / s for size, s in zip(self.sizes, seconds, strict=True)) / 1e9, 2)
                for side, seconds in speeds.items()
            }
        figures["l2_block_read_ms"] = round(1000 * statistics.median(self.scattered_s), 3)
        return figures | {"l2_bytes": size, "l2_rounds": rounds}


class _Room:
    """Pages in memory that start where O_DIRECT wants it, with bytes that no disk can shrink."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.block_room = _IDENTITY.pages_per_block * PAGE_BYTES
        self.memory = memoryview(mmap.mmap(-1, blocks * self.block_room))
        for start in range(0, len(self.memory), 2**20):
            self.memory[start : start + 2**20] = os.urandom(min(2**20, len(self.memory) - start))

    def pages(self, index: int) -> memoryview:
        return self.memory[index * self.block_room : (index + 1) * self.block_room]


def _round(place: Path, blocks: int, room: _Room, timed: _Timed) -> None:
    now_s = time.time()
    hashes = [index.to_bytes(16, "big") for index in range(1, blocks + 1)]
    batches = [range(start, min(start + room.blocks, blocks)) for start in range(0, blocks, room.blocks)]
    timed.sizes += [len(batch) * _BLOCK_BYTES for batch in batches]
    plain = _open_direct(place / "plain")
    store = KvStore.open(place / "store", bytes_max=2**62, write_bytes_per_day_max=None, now_s=now_s)
    try:

        def put(batch: range) -> None:
            stored = [
                StoredBlock(hashes[at], hashes[at - 1] if at else b"", [room.pages(index)[:_BLOCK_BYTES]])
                for index, at in enumerate(batch)
            ]
            result = store.put(_IDENTITY, stored, now_s)
            store.sync()
            if result.refused:
                raise CarpoolError(f"the store refused a block: {result.refused.value}")

        def get(batch: range) -> None:
            into = [[room.pages(index)] for index in range(len(batch))]
            if len(store.get(_IDENTITY, hashes[batch.start : batch.stop], into, now_s)) != len(batch):
                raise CarpoolError("the store did not serve what was put")

        for turn, batch in enumerate(batches):
            _both(turn, "write", timed, partial(_write, plain, batch, room), partial(put, batch))
        for turn, batch in enumerate(batches):
            _both(turn, "read", timed, partial(_read, plain, batch, room), partial(get, batch))
        for index in range(min(_SCATTERED, blocks)):
            # A fixed stride that meets the blocks in an order far from that of the disk.
            begun = time.perf_counter()
            store.get(_IDENTITY, [hashes[index * 7_919 % blocks]], [[room.pages(0)]], now_s)
            timed.scattered_s.append(time.perf_counter() - begun)
    finally:
        os.close(plain)
        store.close()
        (place / "plain").unlink()
        shutil.rmtree(place / "store")


def _both(turn: int, what: str, timed: _Timed, plain: Callable[[], None], store: Callable[[], None]) -> None:
    """Each side goes first as often as the other."""
    sides = [(timed.plain[what], plain), (timed.store[what], store)]
    for seconds, side in sides if turn % 2 == 0 else reversed(sides):
        begun = time.perf_counter()
        side()
        seconds.append(time.perf_counter() - begun)


def _write(fd: int, batch: range, room: _Room) -> None:
    unsynced = 0
    for offset, part in _parts(batch, room):
        if os.pwrite(fd, part, offset) != len(part):
            raise CarpoolError("the disk took less than it was given")
        unsynced += len(part)
        if unsynced >= UNSYNCED_BYTES_MAX:
            os.fdatasync(fd)
            unsynced = 0
    os.fdatasync(fd)


def _read(fd: int, batch: range, room: _Room) -> None:
    for offset, part in _parts(batch, room):
        if os.preadv(fd, [part], offset) != len(part):
            raise CarpoolError("the disk gave less than it was asked for")


def _parts(batch: range, room: _Room) -> Iterator[tuple[int, memoryview]]:
    """Places in the plain file and in memory of the bytes of these blocks, next to each other."""
    size = len(batch) * _BLOCK_BYTES
    for start in range(0, size, _PLAIN_BYTES):
        yield batch.start * _BLOCK_BYTES + start, room.memory[start : min(start + _PLAIN_BYTES, size)]


def _open_direct(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with suppress(OSError):
        return os.open(path, flags | os.O_DIRECT, 0o600)
    path.unlink(missing_ok=True)
    return os.open(path, flags, 0o600)
