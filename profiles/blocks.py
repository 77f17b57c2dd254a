"""Chained hashes of a prompt's blocks: equal hashes mean equal tokens from the first one on, in one trust domain.

BLAKE2b with a 16-byte digest is used because it is in every Python, its value depends on no seed of the process, and a
tenant cannot construct two prompts with one hash. A block of 32 tokens costs about a microsecond.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

HASH_BYTES = 16
"""Length of one block hash."""


@lru_cache(maxsize=4096)
def tenant_salt(tenant: str, adapter_hash: str = "") -> bytes:
    """A salt of 16 bytes, so that two tenants never share a block hash, nor two adapters of a model, nor one and its base.

    ``tenant`` is the name of a tenant or of a trust domain of several, whose names are told apart (``broker.gateway.keys``).
    ``adapter_hash`` is the hex digest of a LoRA adapter's content: KV that it computed is that of no other weights.
    """
    state = hashlib.blake2b(b"carpool-tenant\0" + tenant.encode(), digest_size=HASH_BYTES, key=adapter_hash[:64].encode())
    return state.digest()


def engine_salt(salt: bytes, *, kept: bool = True) -> str:
    """What an engine is given to salt a request's KV with, in hex.

    Services that differ only in whether their KV is kept (``spec.kv.reuse``) share replicas. Where a service's is not, the
    engine's salt is a byte longer: as much apart in its own cache, but no salt that the tiers take.
    """
    return (salt if kept else salt + b"\0").hex()


def chain_hashes(token_ids: Sequence[int], block_size: int, salt: bytes = b"", parent: bytes = b"") -> list[bytes]:
    """One hash for each *full* block of ``block_size`` tokens; each covers its block and all blocks before it.

    ``parent`` is the last hash of a chain to go on from. Token ids are unsigned 32-bit numbers.

    Raises:
        ValueError: ``block_size`` is below 1.
        OverflowError: a token id is negative or over 32 bits.
    """
    if block_size < 1:
        raise ValueError("block_size must be at least 1")
    tokens = array("I", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    data = tokens.tobytes()
    step = block_size * tokens.itemsize
    hashes: list[bytes] = []
    for start in range(0, len(data) - step + 1, step):
        state = hashlib.blake2b(parent, digest_size=HASH_BYTES, key=salt)
        state.update(data[start : start + step])
        parent = state.digest()
        hashes.append(parent)
    return hashes
