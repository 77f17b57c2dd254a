"""What goes into the store on disk and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec


class Refusal(Enum):
    """Why a block was not kept."""

    BUDGET = "budget"
    """The bytes that may be written per day are used up."""
    FULL = "full"
    """It is larger than the store, or what may leave (by the policy) does not make enough room."""
    HOT = "hot"
    """All that would have to leave was touched within ``hot_s``, or is only now being written."""
    READ_ONLY = "read_only"
    NO_SPACE = "no_space"
    """Of the file system, or of a quota."""
    IO_ERROR = "io_error"
    INVALID = "invalid"
    """The block has no form that can be stored: see ``StoredBlock``."""
    CLOSED = "closed"


class StoredBlock(msgspec.Struct, frozen=True):
    """A block to be put. Nothing of it is copied where its buffers fit.

    ``hash`` has 16 bytes, ``parent`` 16 or none. ``pages`` are the bytes to be stored, encoded by ``codec``: each buffer a
    multiple of 64 KiB long, the last one as long as is left (it says where the payload ends). One buffer for the whole
    block is as good as one for each page. Buffers that start at multiples of 4 KiB of memory and are multiples of 4 KiB
    long are written with O_DIRECT; others go through the kernel's cache. ``codec`` is at most 24 ASCII characters.
    """

    hash: bytes
    parent: bytes
    pages: Sequence[memoryview]
    codec: str = "none"


class StoredForm(msgspec.Struct, frozen=True):
    """How a block lies in the store: what a reader has to make room for, and how to decode it."""

    codec: str
    payload_bytes: int
    pages: int


class PutResult(msgspec.Struct, frozen=True):
    """Of a batch: the first ``kept`` blocks are in the store now, of which ``written`` were not before.

    The first refusal ends the batch, since a block without those before it serves nobody.
    """

    kept: int
    written: int
    written_bytes: int
    """Room taken by them, whole pages."""
    refused: Refusal | None = None


class Evicted(msgspec.Struct, frozen=True):
    blocks: int
    bytes: int


class Finding(msgspec.Struct, frozen=True):
    """Something an alert is due for: a file that was not taken over, a block that did not verify, a disk that refused.

    ``kind``: of a file at the opening ``damaged`` or ``version`` (removed), ``foreign`` or ``unreadable`` (left alone),
    ``truncated`` or ``torn`` (some blocks of it left out); of a block ``corrupt`` (dropped); ``budget_file``; or the value
    of a ``Refusal`` that came from the operating system.
    """

    kind: str
    file: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Bytes are room taken on disk unless said otherwise; counts are since the opening."""

    bytes_used: int
    bytes_max: int
    blocks: int
    segments: int
    by_model: dict[str, Evicted] = field(default_factory=dict)
    """Blocks and bytes of each ``KvSignature.model``."""
    hits: int = 0
    """Blocks served."""
    misses: int = 0
    """Blocks asked for and not served."""
    corrupt: int = 0
    """Blocks that did not verify; they were dropped."""
    evicted: int = 0
    idled: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """Blocks by ``Refusal``."""
    set_aside: int = 0
    """Files that were not taken over at the opening."""
    written_bytes: int = 0
    read_bytes: int = 0
    opening_read_bytes: int = 0
    """What the opening read, at most 1 % of the store."""
    write_left_bytes: int | None = None
    """Of today's budget; ``None`` without one."""
    read_only: bool = False
