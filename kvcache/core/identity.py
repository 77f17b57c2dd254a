"""Whose KV may stand for whose: the fingerprint that every file, request and index entry carries."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import msgspec

SPAN_TOKENS = 256
"""Tokens of one span, the unit of the index (KVC-2): a context of 128K tokens is 512 members."""
PAGE_BYTES = 64 * 1024
"""One page of host memory or of a ``.kvc`` file (KVC-1)."""
SALT_BYTES = 16


class KvSignature(msgspec.Struct, frozen=True, kw_only=True):
    """How the bytes of a block are to be read. Blocks with equal signatures may be exchanged, all others may not (P2).

    ``model`` is ``ModelRecord.kv_signature``: weights, configuration, precision. ``form`` names the order of the bytes
    inside a block as the engine keeps them, for instance ``layer,head,token,kv``.
    """

    model: str
    layers: int
    kv_heads: int
    head_size: int
    """Elements of one head's keys of one token; values have as many."""
    dtype: str
    """``float32``, ``float16``, ``bfloat16`` or ``fp8_e4m3``."""
    form: str
    block_size: int
    """Tokens."""
    block_bytes: int


class KvIdentity(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One trust domain's KV of one model's weights in one layout."""

    weights_hash: str
    """SHA-256 in hex (PRO-3)."""
    signature: KvSignature
    salt: bytes = b""
    """Of the tenant or its trust domain, and of the adapter (``profiles.blocks.tenant_salt``); 16 bytes or none."""

    @cached_property
    def key(self) -> bytes:
        """16 bytes that stand for all of it."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()

    @property
    def pages_per_block(self) -> int:
        """Pages of one block as the engine has it, without a codec."""
        return -(-self.signature.block_bytes // PAGE_BYTES)


def blocks_per_span(block_size: int) -> int:
    """Blocks that make a span; at least one where blocks are larger than spans."""
    return max(1, SPAN_TOKENS // block_size)


def spans_of(hashes: Sequence[bytes], block_size: int) -> list[bytes]:
    """The full spans of a chain of block hashes, in order: the hash of each span's last block."""
    step = blocks_per_span(block_size)
    return list(hashes[step - 1 :: step])
