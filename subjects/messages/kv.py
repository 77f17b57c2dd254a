"""What KV nodes tell each other and the index of prefixes."""

from __future__ import annotations

import msgspec

from subjects.ids import ModelHash, ReplicaId, WorkerId
from subjects.messages.kinds import KvTier


class KvSpan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A run of blocks that covers 256 tokens (KVC-2), by the hash of its last block, which names all tokens before it."""

    span: bytes
    depth: int
    """Blocks from the start of the prompt to its end."""
    tier: KvTier
    """The fastest outside an engine; ``ENGINE``: only ``replica`` has it."""
    replica: ReplicaId | None = None
    """Whose engine computed or loaded it last, and so most likely still has it."""


class KvModelSpans(msgspec.Struct, frozen=True, kw_only=True):
    """What changed for one model."""

    model_hash: ModelHash
    block_size: int
    """Tokens of one block."""
    held: tuple[KvSpan, ...] = ()
    """Gained, or held elsewhere than before."""
    dropped: tuple[bytes, ...] = ()


class KvIndexed(msgspec.Struct, frozen=True, kw_only=True):
    """A node's batch for the index, and its beat every few seconds when nothing changed.

    ``sequence`` grows by one. Who misses one drops what it believed of the node and asks for all of it (``KvAsk.snapshot``).
    Another ``node`` of the same worker is a new process: what the old one held counts no more until it says so.
    """

    worker: WorkerId
    node: str
    """Name plus incarnation of the node process."""
    sequence: int
    models: tuple[KvModelSpans, ...] = ()
    emptied: tuple[ReplicaId, ...] = ()
    """Engines whose own cache was reset, slept or ended, before they gained what ``models`` says of them."""


class KvAsk(msgspec.Struct, frozen=True, kw_only=True):
    """What do you hold of this chain? Or, with ``snapshot``: say all that you hold, from ``cursor`` on.

    ``identity`` is the key of the KV's identity (weights, layout, salt); ``head`` the hash of the chain's last block, and
    ``blocks`` its number of blocks. Without a head the node offers its chains of ``signature`` one after the other, the one
    after ``cursor`` next.
    """

    worker: WorkerId
    """Who asks."""
    identity: bytes = b""
    signature: str = ""
    """``ModelRecord.kv_signature``, of all tenants."""
    head: bytes = b""
    blocks: int = 0
    snapshot: bool = False
    cursor: bytes = b""


class KvOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The index message of a migration (KVC-4): at most 1 KiB whatever the context.

    The target resolves the rest: it hashes the tokens itself or reads the chain of ``head`` at ``address``, and fetches only
    the blocks that it lacks. ``token`` opens ``address`` for this chain alone and expires.
    """

    identity: bytes = b""
    head: bytes = b""
    blocks: int = 0
    """How many of the chain's leading blocks are here; 0: none, or there is no such chain."""
    bytes_total: int = 0
    address: str = ""
    """``host:port`` of the data path."""
    token: bytes = b""
    expires_s: float = 0.0
    """From now."""
    cursor: bytes = b""
    """Ask on with this; empty: that was all."""


class KvSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One page of all that a node holds, as of ``sequence``."""

    worker: WorkerId
    node: str
    sequence: int
    models: tuple[KvModelSpans, ...] = ()
    cursor: bytes = b""
    """Ask on with this; empty: that was all."""
