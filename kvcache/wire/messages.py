"""What a node says on its two sockets: to the engines of its host, and to other nodes.

Both carry frames: eight bytes (length of the head, length of the body, both big-endian), then a MessagePack struct, then raw
bytes of blocks that the receiver reads straight into their place. A head that is no message of that place, or lengths over
the bounds below, close the connection and change nothing.

On the local socket the first message is ``Attach``. Requests are numbered by the client and answered in any order, each with
one message of the same ``number``; ``Used``, ``Emptied`` and ``Corrupt`` are not answered. Blocks travel raw, in rows of
``KvSignature.block_bytes``, the way the engine keeps them. Lists of hashes and of checksums are one byte string each.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import xxhash
from msgspec import Meta

from kvcache.core.identity import PAGE_BYTES, SALT_BYTES, KvIdentity, KvSignature
from profiles.blocks import HASH_BYTES
from subjects.codec import decode, encode
from subjects.errors import DecodeError
from subjects.messages import SlaClass

HEAD_BYTES_MAX = 256 * 1024
"""Room for the hashes and checksums of the blocks of one frame."""
BODY_BYTES_MAX = 64 * 1024 * 1024
"""Blocks of one frame; clients cut what is longer, and one block is never longer."""
BLOCKS_MAX = 8192
"""Hashes of one request: 256K tokens in blocks of 32."""
TEXT_MAX = 256
CHECKSUM_BYTES = 8

_LENGTHS = struct.Struct(">II")
LENGTHS_BYTES = _LENGTHS.size

Hashes = Annotated[bytes, Meta(max_length=BLOCKS_MAX * HASH_BYTES)]
Hash = Annotated[bytes, Meta(max_length=HASH_BYTES)]
Salt = Annotated[bytes, Meta(max_length=SALT_BYTES)]
Text = Annotated[str, Meta(max_length=TEXT_MAX)]
Count = Annotated[int, Meta(ge=0, le=BLOCKS_MAX)]
Seconds = Annotated[float, Meta(ge=0.0, le=86_400.0)]

T = TypeVar("T")


# ------------------------------------------------------------------------------------------------- engine to its node


class KvUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """About the request that writes or uses blocks; what the policy of the tiers goes by (KVC-2, KVC-3)."""

    tenant: Text = ""
    request: Text = ""
    sla_class: SlaClass = SlaClass.SILVER
    chain_id: Text = ""
    latency_s: Seconds = 0.0
    """Of the request, once it is known; 0: not yet."""
    test: bool = False
    """Load tests and the like: cold at once."""


class Attach(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="attach"):
    """The first message of a connection. Without a ``signature`` (the agent's) blocks can be neither read nor written."""

    model_hash: Text = ""
    weights_hash: Text = ""
    signature: KvSignature | None = None
    replica: Text = ""
    codec: Text = "none"
    """``ModelRecord.kv_codec``: how this model's blocks are written to disk."""


class Read(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="read"):
    """The leading blocks of this list; answered by ``Found`` and their rows."""

    number: int
    salt: Salt
    hashes: Hashes


class Write(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="write"):
    """Keep these consecutive blocks of one chain; their rows are the body. Answered by ``Kept``."""

    number: int
    salt: Salt
    parent: Hash
    """The hash of the block before the first; empty at the start of a prompt."""
    hashes: Hashes
    first: Count = 0
    """Which block of its prompt the first one is; 0 beside a parent: not told."""
    use: KvUse = KvUse()


class Used(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="used"):
    """A request uses these blocks, wherever it found them; not answered."""

    salt: Salt
    hashes: Hashes
    use: KvUse = KvUse()


class Emptied(msgspec.Struct, frozen=True, kw_only=True, tag="emptied"):
    """The engine's own cache was reset; not answered."""


class Corrupt(msgspec.Struct, frozen=True, kw_only=True, tag="corrupt"):
    """A row did not have the checksum that came with it; not answered."""

    salt: Salt
    hash: Hash


class Prepare(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="prepare"):
    """Make the longest prefix of these blocks local; answered by ``Prepared`` within the deadline."""

    number: int
    salt: Salt
    hashes: Hashes
    deadline_s: Seconds
    prefill_tokens_per_s: Annotated[float, Meta(ge=0.0)] = 0.0
    """What the engine computes; 0: not known, whatever is held elsewhere is fetched."""
    use: KvUse = KvUse()


class Evict(msgspec.Struct, frozen=True, kw_only=True, tag="evict"):
    """Drop the given share of a model's blocks, the coldest first; answered by ``KvEvicted``."""

    number: int
    kv_signature: Text
    ratio: Annotated[float, Meta(ge=0.0, le=1.0)]


class Pull(msgspec.Struct, frozen=True, kw_only=True, tag="pull"):
    """Fetch all chains of a model from another worker's node; answered by ``KvPulled`` within the deadline."""

    number: int
    kv_signature: Text
    source: Text
    deadline_s: Seconds


class AskStats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Answered by ``KvStats``."""

    number: int


ToNode = Read | Write | Used | Emptied | Corrupt | Prepare | Evict | Pull | AskStats


# ------------------------------------------------------------------------------------------------- node to its engine


class Attached(msgspec.Struct, frozen=True, kw_only=True, tag="attached"):
    """The answer to ``Attach``: the node process, a name with an incarnation."""

    node: str


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Not done, and why."""

    number: int = 0
    reason: str


class Found(msgspec.Struct, frozen=True, kw_only=True, tag="found"):
    """So many leading blocks; their rows are the body, each row with the checksums of its 64 KiB pages."""

    number: int
    blocks: Count
    checksums: bytes = b""


class Kept(msgspec.Struct, frozen=True, kw_only=True, tag="kept"):
    """So many leading blocks of a write are in the host tier now, or were already."""

    number: int
    blocks: Count


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag="prepared"):
    """So many leading blocks can be read."""

    number: int
    blocks: Count


class KvEvicted(msgspec.Struct, frozen=True, kw_only=True, tag="evicted"):
    """What an ``evict`` removed; a block that lay in both tiers counts in both byte counts and once in ``blocks``."""

    number: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    blocks: int = 0


class KvPulled(msgspec.Struct, frozen=True, kw_only=True, tag="pulled"):
    """What a ``pull`` brought; ``failure`` is empty when all that the source had and this node lacked came."""

    number: int = 0
    blocks: int = 0
    bytes: int = 0
    chains: int = 0
    """Chains that were looked at."""
    failure: str = ""


class KvTierStats(msgspec.Struct, frozen=True, kw_only=True):
    """``bytes_used`` counts whole pages (host) or bytes of files (disk)."""

    bytes_used: int = 0
    bytes_max: int = 0
    blocks: int = 0


class KvModelStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the tiers hold of one model's weights in one layout, of all tenants."""

    kv_signature: str
    model_hashes: tuple[str, ...] = ()
    host_blocks: int = 0
    host_bytes: int = 0
    disk_blocks: int = 0
    disk_bytes: int = 0
    hits: int = 0
    """Blocks that were read, since the node's start; the rest likewise."""
    misses: int = 0
    """Blocks that were asked for in vain."""
    evicted: int = 0
    """Blocks that left the last tier that had them, by order, for room or by age."""


class KvStats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Counts since the node's start, and what it holds now."""

    number: int = 0
    node: str = ""
    host: KvTierStats = KvTierStats()
    disk: KvTierStats = KvTierStats()
    models: tuple[KvModelStats, ...] = ()
    hits: int = 0
    """Blocks that were read."""
    misses: int = 0
    """Blocks that were asked for in vain."""
    written: int = 0
    """Blocks that engines wrote and the host tier kept."""
    refused: int = 0
    """Blocks that it did not keep."""
    corrupt: int = 0
    """Blocks dropped because a checksum was wrong."""
    pulled_blocks: int = 0
    pulled_bytes: int = 0
    served_blocks: int = 0
    served_bytes: int = 0
    write_bytes_left: int | None = None
    """Of the disk's budget of today; None: without a bound, or no disk."""
    disk_state: str = ""
    """Empty while the disk is used, else why it is not."""
    redis_state: str = "off"
    """``off``, ``up`` or ``down``."""


FromNode = Attached | Refused | Found | Kept | Prepared | KvEvicted | KvPulled | KvStats


# ------------------------------------------------------------------------------------------------- node to node (TCP)


GREETING = b"carpool-kv 1\n"
"""What a source says first, to everybody. A target tells nothing before it: the address came from others, and whoever else
listens there must not be made to obey bytes that others chose."""


class Open(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """The first message: the token of a ``KvOffer``, which opens this chain alone."""

    identity: Annotated[bytes, Meta(max_length=16)]
    head: Hash
    blocks: Count
    token: Annotated[bytes, Meta(max_length=128)]


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """The chain, from its first block to ``head``: its hashes, and whose it is."""

    identity: KvIdentity
    model_hashes: tuple[str, ...] = ()
    codec: str = "none"
    hashes: Hashes


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Send these blocks of the chain, by their places in it; answered by ``Blocks``."""

    places: Annotated[tuple[Annotated[int, Meta(ge=0, lt=BLOCKS_MAX)], ...], Meta(max_length=1024)]


class Block(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One block of a body: ``size`` bytes of payload, encoded as ``codec`` says, with the checksum of each 64 KiB of it."""

    place: int
    size: Annotated[int, Meta(ge=0, le=BODY_BYTES_MAX)]
    codec: Text
    checksums: bytes


class Blocks(msgspec.Struct, frozen=True, kw_only=True, tag="blocks"):
    """What is still there of a ``Fetch``, in its order; the payloads are the body, one after the other."""

    blocks: tuple[Block, ...] = ()


ToSource = Open | Fetch
ToTarget = Opened | Blocks


# ------------------------------------------------------------------------------------------------------------- frames


def frame(message: Any, body_bytes: int = 0) -> bytes:
    """The lengths and the head; the caller sends ``body_bytes`` of body behind it.

    Raises:
        ValueError: the head or the body is over its bound.
    """
    head = encode(message)
    if len(head) > HEAD_BYTES_MAX or body_bytes > BODY_BYTES_MAX:
        raise ValueError(f"frame of {len(head)} and {body_bytes} bytes is over the bounds")
    return _LENGTHS.pack(len(head), body_bytes) + head


def lengths(data: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Lengths of head and body.

    Raises:
        DecodeError: one is over its bound.
    """
    head, body = _LENGTHS.unpack(data)
    if not 0 < head <= HEAD_BYTES_MAX or body > BODY_BYTES_MAX:
        raise DecodeError(f"frame of {head} and {body} bytes is over the bounds")
    return head, body


def read_head(payload: bytes, kind: Any) -> Any:
    """A head as a message of ``kind``.

    Raises:
        DecodeError: it is none.
    """
    return decode(payload, kind)


def joined(hashes: Sequence[bytes]) -> bytes:
    """A list of hashes as one byte string."""
    return b"".join(hashes)


def parted(data: bytes) -> list[bytes]:
    """The list again.

    Raises:
        DecodeError: the length is no multiple of a hash's.
    """
    if len(data) % HASH_BYTES:
        raise DecodeError(f"{len(data)} bytes are no list of hashes")
    return [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]


def checksums(payload: memoryview) -> bytes:
    """The checksum of each 64 KiB of ``payload``, 8 bytes each: XXH3, which finds flipped and lost bits, not forgers."""
    digest = xxhash.xxh3_64_digest
    return b"".join([digest(payload[at : at + PAGE_BYTES]) for at in range(0, len(payload), PAGE_BYTES)])
