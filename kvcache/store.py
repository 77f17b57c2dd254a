"""The tier on disk (L2, KVC-1): blocks in ``.kvc`` files of one directory, verified when they are read.

Public face; ``segments`` does the IO, ``kvc_format`` is the layout, ``core.shelf`` what is known in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kvcache.core.identity import KvIdentity
from subjects.errors import CarpoolError


class StoreRefused(CarpoolError):
    """The directory cannot be used as a store; the message is one line with its remedy."""


class StoreLocked(StoreRefused):
    """Another process (or another store of this one) uses the directory."""


class Refusal(Enum):
    """Why a block was not kept."""

    BUDGET = "budget"
    """The bytes that may be written per day are used up."""
    FULL = "full"
    """It is larger than the store, or nothing that may leave makes enough room."""
    HOT = "hot"
    """All that would have to leave was touched within ``hot_s``."""
    READ_ONLY = "read_only"
    NO_SPACE = "no_space"
    """Of the file system, or of a quota."""
    IO_ERROR = "io_error"
    INVALID = "invalid"
    """The block has no form that can be stored: see ``StoredBlock``."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class StoredBlock:
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


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How a block lies in the store: what a reader has to make room for, and how to decode it."""

    codec: str
    payload_bytes: int
    pages: int


@dataclass(frozen=True, slots=True)
class PutResult:
    """Of a batch: the first ``kept`` blocks are in the store now, of which ``written`` were not before.

    The first refusal ends the batch, since a block without those before it serves nobody.
    """

    kept: int
    written: int
    written_bytes: int
    """Room taken by them, whole pages."""
    refused: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Evicted:
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Finding:
    """Something an alert is due for: a file that was not taken over, a block that did not verify, a disk that refused.

    ``kind``: ``damaged``, ``foreign``, ``version``, ``truncated``, ``torn``, ``corrupt``, ``budget_file``, or the value of a
    ``Refusal`` that came from the operating system.
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


class KvStore:
    """See the module. Every method may be called from any thread; calls of several threads overlap where they do IO.

    ``now_s`` is wall clock time everywhere (it is written to disk): seconds since 1970.
    """

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        bytes_max: int,
        write_bytes_per_day_max: int | None,
        now_s: float,
        hot_s: float = 30.0,
        idle_s_max: float = 600.0,
    ) -> KvStore:
        """Takes the directory over, makes it where it is missing.

        Raises:
            StoreLocked: somebody else uses it.
            StoreRefused: it cannot be used at all.
        """
        raise NotImplementedError

    def leading(self, identity: KvIdentity, hashes: Sequence[bytes]) -> int:
        """How many blocks from the first hash on are here. Reads nothing, counts as no use."""
        raise NotImplementedError

    def forms(self, identity: KvIdentity, hashes: Sequence[bytes]) -> list[StoredForm]:
        """The forms of those leading blocks, so that a reader can make room."""
        raise NotImplementedError

    def put(self, identity: KvIdentity, blocks: Sequence[StoredBlock], now_s: float) -> PutResult:
        """Keeps blocks of one chain, in its order. Blocks that are here already count as used."""
        raise NotImplementedError

    def get(
        self, identity: KvIdentity, hashes: Sequence[bytes], into: Sequence[Sequence[memoryview]], now_s: float
    ) -> list[StoredForm]:
        """Reads the leading blocks into the caller's buffers; answers with the forms of those that are there and verified.

        ``into[i]`` is room for block ``i`` in the shape of ``StoredBlock.pages``, for at least its ``payload_bytes``; room of
        whole 64 KiB pages is filled up to the end of the last page. Reading stops before a block without enough room.
        What lies in the buffers after the answered blocks is undefined. A block that does not verify is dropped, counted
        and told as a finding.
        """
        raise NotImplementedError

    def touch(self, identity: KvIdentity, hashes: Sequence[bytes], now_s: float) -> int:
        """These blocks, of one chain in its order, are used now; how many of them are here."""
        raise NotImplementedError

    def drop(self, identity: KvIdentity, hashes: Sequence[bytes]) -> Evicted:
        raise NotImplementedError

    def evict(self, kv_signature: str, ratio: float) -> Evicted:
        """Drops this share (0 to 1) of the bytes of one ``KvSignature.model``, least recently used first, hot ones too.

        Exact to a block: at least the share, and less than it without the last block dropped.
        """
        raise NotImplementedError

    def sweep(self, now_s: float, blocks_max: int = 1024) -> int:
        """Drops blocks that were idle for too long; at most so many per call. Returns how many."""
        raise NotImplementedError

    def chain(self, identity: KvIdentity, head: bytes) -> list[bytes]:
        """The hashes from the first block to ``head``, or from the earliest ancestor that is here without a gap.

        Whole if ``parent(identity, hashes[0])`` is ``b""``. Empty where ``head`` is not here.
        """
        raise NotImplementedError

    def parent(self, identity: KvIdentity, hash: bytes) -> bytes | None:
        """``b""`` for a first block; ``None`` for one that is not here."""
        raise NotImplementedError

    def take_findings(self) -> list[Finding]:
        """What was found since the last call; at most 256 are kept between calls."""
        raise NotImplementedError

    def stats(self) -> StoreStats:
        raise NotImplementedError

    def sync(self) -> None:
        """What was put is on the disk when this returns."""
        raise NotImplementedError

    def close(self) -> None:
        """Syncs and gives the directory free. More calls do nothing; later puts are refused, gets find nothing."""
        raise NotImplementedError
