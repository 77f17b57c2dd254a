"""Blocks, identities and buffers that tests of the KV store put in and expect back."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from pathlib import Path

from kvcache.core.identity import PAGE_BYTES, KvIdentity, KvSignature
from kvcache.core.shelf import Policy
from kvcache.store.store import KvStore, StoredBlock

NOW_S = 1_900_000_000.0


def signature(model: str = "model-a", block_bytes: int = 3 * PAGE_BYTES) -> KvSignature:
    return KvSignature(
        model=model,
        layers=2,
        kv_heads=1,
        head_size=64,
        dtype="bfloat16",
        form="layer,head,token,kv",
        block_size=32,
        block_bytes=block_bytes,
    )


def identity(model: str = "model-a", tenant: str = "acme") -> KvIdentity:
    digest = hashlib.sha256(model.encode()).hexdigest()
    salt = hashlib.blake2b(tenant.encode(), digest_size=16).digest()
    return KvIdentity(weights_hash=digest, signature=signature(model), salt=salt)


def name(index: int, of: str = "") -> bytes:
    return hashlib.blake2b(f"{of}/{index}".encode(), digest_size=16).digest()


def payload(index: int, size: int, of: str = "") -> bytes:
    """Bytes that no other block has."""
    seed = hashlib.blake2b(f"{of}-{index}-{size}".encode(), digest_size=64).digest()
    return (seed * (size // 64 + 1))[:size]


def aligned(data: bytes) -> memoryview:
    """The same bytes where O_DIRECT takes them from."""
    room = memoryview(mmap.mmap(-1, -(-len(data) // PAGE_BYTES) * PAGE_BYTES))
    room[: len(data)] = data
    return room[: len(data)]


def chain(
    count: int, size: int = 2 * PAGE_BYTES + 4096, of: str = "", codec: str = "none", start: int = 0
) -> list[StoredBlock]:
    """Blocks ``start`` to ``start + count`` of one chain."""
    return [
        StoredBlock(name(index, of), name(index - 1, of) if index else b"", [aligned(payload(index, size, of))], codec)
        for index in range(start, start + count)
    ]


def names(blocks: Sequence[StoredBlock]) -> list[bytes]:
    return [block.hash for block in blocks]


def served(store: KvStore, whose: KvIdentity, hashes: Sequence[bytes], now_s: float = NOW_S) -> list[bytes]:
    """The payloads that the store serves of the leading blocks."""
    forms = store.forms(whose, hashes)
    rooms = [memoryview(mmap.mmap(-1, form.pages * PAGE_BYTES)) for form in forms]
    got = store.get(whose, hashes, [[room] for room in rooms], now_s)
    return [bytes(room[: form.payload_bytes]) for room, form in zip(rooms, got, strict=False)]


def payloads(blocks: Sequence[StoredBlock]) -> list[bytes]:
    return [b"".join(bytes(page) for page in block.pages) for block in blocks]


def opened(
    directory: Path,
    now_s: float = NOW_S,
    *,
    bytes_max: int = 2**30,
    per_day: int | None = None,
    hot_s: float = 30.0,
    idle_s_max: float = 600.0,
    policy: Policy | None = None,
) -> KvStore:
    return KvStore.open(
        directory,
        bytes_max=bytes_max,
        write_bytes_per_day_max=per_day,
        now_s=now_s,
        hot_s=hot_s,
        idle_s_max=idle_s_max,
        policy=policy,
    )


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.kvc"))
