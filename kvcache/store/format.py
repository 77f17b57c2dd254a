"""The layout of a ``.kvc`` file, as bytes; no IO.

One file is a *segment*: blocks of one ``KvIdentity`` in one codec.

::

    offset 0       header, 1 KiB
    offset 1024    960 entries of 64 bytes, one for each page slot; all zero where the slot holds nothing
    offset 65536   960 pages of 64 KiB

Header (little-endian): magic 8, version u16, length of the body u16, reserved u32, checksum u64 over all of it but itself,
then the body: MessagePack of identity, codec, time, and a serial number that no other segment has. Entry: hash of the block
16, hash of its parent 16 (zero: none), checksum of the page u64, time u32 (seconds since 1970), bytes of payload in the page
u32, part u16, parts u16, flags u16 and reserved u16 (zero), checksum of the entry u64. Checksums are XXH3-64. That of an
entry is seeded with that of the header, so that an entry means something in its own segment only; it covers the page's
checksum and its place in the block.

A block is the run of its parts in slots next to each other. It is whole or not there: pages are written before their
entries, and a run of entries that is not complete, not intact or points past the end of the file is no block. Reading
``HEADER_BYTES + 64 x slots`` of a file is enough to know it: at most 0.83 % of it (one slot), 0.1 % when it is full.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec
import xxhash

from kvcache.core.identity import PAGE_BYTES, KvIdentity

VERSION = 1
MAGIC = b"\x89KVCARP\n"
SUFFIX = ".kvc"
HEADER_BYTES = 1024
ENTRY_BYTES = 64
SLOTS_MAX = 960
"""Pages of a full segment: 60 MiB."""
DATA_OFFSET = PAGE_BYTES
SEGMENT_BYTES_MAX = DATA_OFFSET + SLOTS_MAX * PAGE_BYTES
CODEC_CHARS_MAX = 24
NO_HASH = bytes(16)

_PREFIX = struct.Struct("<8sHHI")
_CHECKSUM = struct.Struct("<Q")
_BODY_OFFSET = _PREFIX.size + _CHECKSUM.size
BODY_BYTES_MAX = HEADER_BYTES - _BODY_OFFSET
_ENTRY = struct.Struct("<16s16sQIIHHHHQ")
_ENTRY_SEALED = ENTRY_BYTES - 8
_NO_ENTRY = bytes(ENTRY_BYTES)
_TIME_MAX = 2**32 - 1

assert _ENTRY.size == ENTRY_BYTES
assert HEADER_BYTES + SLOTS_MAX * ENTRY_BYTES <= DATA_OFFSET


class FormatError(ValueError):
    """Bytes that are no header of this version. ``kind`` is ``foreign``, ``version`` or ``damaged``."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Header(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Whose blocks a segment holds, and in which codec."""

    identity: KvIdentity
    codec: str
    serial: bytes
    """8 random bytes, also the file's name."""
    created_s: float

    @cached_property
    def encoded(self) -> bytes:
        """``HEADER_BYTES`` bytes.

        Raises:
            ValueError: identity and codec have more bytes than there is room for.
        """
        body = msgspec.msgpack.encode(self)
        if len(body) > BODY_BYTES_MAX:
            raise ValueError(f"header of {len(body)} bytes, at most {BODY_BYTES_MAX}")
        prefix = _PREFIX.pack(MAGIC, VERSION, len(body), 0)
        return (prefix + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(prefix + body)) + body).ljust(HEADER_BYTES, b"\0")

    @cached_property
    def seed(self) -> int:
        """Of the checksums of this segment's entries."""
        return int(_CHECKSUM.unpack_from(self.encoded, _PREFIX.size)[0])

    @property
    def file_name(self) -> str:
        return self.serial.hex() + SUFFIX


_BODY = msgspec.msgpack.Decoder(Header)


def is_own_name(name: str) -> bool:
    """Whether a segment of ours can have this file name."""
    stem = name.removesuffix(SUFFIX)
    return name.endswith(SUFFIX) and len(stem) == 16 and all(letter in "0123456789abcdef" for letter in stem)


def decode_header(data: bytes) -> Header:
    """From the first bytes of a file.

    Raises:
        FormatError: they are not a header of this version that is intact.
    """
    if len(data) < HEADER_BYTES:
        raise FormatError("damaged", f"{len(data)} bytes instead of a header")
    magic, version, body_bytes, _ = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise FormatError("foreign", "not a .kvc file")
    if version != VERSION:
        raise FormatError("version", f"version {version} instead of {VERSION}")
    if body_bytes > BODY_BYTES_MAX:
        raise FormatError("damaged", "length of the header")
    prefix, body = data[: _PREFIX.size], data[_BODY_OFFSET : _BODY_OFFSET + body_bytes]
    if _CHECKSUM.unpack_from(data, _PREFIX.size)[0] != xxhash.xxh3_64_intdigest(prefix + body):
        raise FormatError("damaged", "checksum of the header")
    try:
        header = _BODY.decode(body)
    except msgspec.MsgspecError:
        raise FormatError("damaged", "body of the header") from None
    if header.encoded != data[:HEADER_BYTES]:
        raise FormatError("damaged", "header in another form than ours")
    return header


def page_offset(slot: int) -> int:
    return DATA_OFFSET + slot * PAGE_BYTES


def entry_offset(slot: int) -> int:
    return HEADER_BYTES + slot * ENTRY_BYTES


def slots_of(file_bytes: int) -> int:
    """Slots that a file of this length reaches into, a torn one at its end included."""
    return min(SLOTS_MAX, max(0, -(-(file_bytes - DATA_OFFSET) // PAGE_BYTES)))


def page_checksum(page: memoryview) -> int:
    """Over the payload of one page."""
    return xxhash.xxh3_64_intdigest(page)


def pack_checksums(checksums: Sequence[int]) -> bytes:
    """The checksums of a block's pages as they are kept in memory: 8 bytes each."""
    return struct.pack(f"<{len(checksums)}Q", *checksums)


def unpack_checksums(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 8}Q", packed)


class BlockEntry(msgspec.Struct, frozen=True):
    """The entries of one block together. ``parent`` is ``b""`` for a first block."""

    hash: bytes
    parent: bytes
    first_slot: int
    time_s: int
    payload_bytes: int
    checksums: bytes
    """See ``pack_checksums``."""

    @property
    def pages(self) -> int:
        return len(self.checksums) // 8

    @property
    def end_bytes(self) -> int:
        """Where its payload ends in the file."""
        return page_offset(self.first_slot) + self.payload_bytes


def encode_entries(header: Header, block: BlockEntry) -> bytes:
    """64 bytes for each page, to be written at ``entry_offset(block.first_slot)``."""
    parts = block.pages
    time_s = min(_TIME_MAX, max(0, int(block.time_s)))
    packed = bytearray()
    left = block.payload_bytes
    for part, checksum in enumerate(unpack_checksums(block.checksums)):
        payload = min(PAGE_BYTES, left)
        left -= payload
        fields = (block.hash, block.parent or NO_HASH, checksum, time_s, payload, part, parts, 0, 0)
        sealed = _ENTRY.pack(*fields, 0)[:_ENTRY_SEALED]
        packed += sealed
        packed += _CHECKSUM.pack(xxhash.xxh3_64_intdigest(sealed, header.seed))
    return bytes(packed)


@dataclass(slots=True)
class Scan:
    """What the entries of a segment say."""

    blocks: list[BlockEntry]
    torn: int = 0
    """Entries that are neither empty nor part of a block."""
    truncated: int = 0
    """Blocks whose pages the file does not have (any more)."""


def decode_entries(header: Header, data: bytes, file_bytes: int) -> Scan:
    """All whole blocks among the entries in ``data`` (from slot 0 on), in order of their slots."""
    scan = Scan([])
    run: list[_Entry] = []
    for slot in range(len(data) // ENTRY_BYTES):
        raw = data[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES]
        entry = None if raw == _NO_ENTRY else _Entry.intact(raw, header.seed)
        if run and (entry is None or not entry.follows(run[-1])):
            scan.torn += len(run)
            run = []
        if entry is None:
            scan.torn += raw != _NO_ENTRY
            continue
        if not run and entry.part != 0:
            scan.torn += 1
            continue
        run.append(entry)
        if len(run) < entry.parts:
            continue
        block = BlockEntry(
            hash=entry.hash,
            parent=b"" if entry.parent == NO_HASH else entry.parent,
            first_slot=slot + 1 - len(run),
            time_s=entry.time_s,
            payload_bytes=sum(part.payload_bytes for part in run),
            checksums=pack_checksums([part.checksum for part in run]),
        )
        run = []
        if block.end_bytes > file_bytes:
            scan.truncated += 1
        else:
            scan.blocks.append(block)
    scan.torn += len(run)
    return scan


class _Entry(NamedTuple):
    hash: bytes
    parent: bytes
    checksum: int
    time_s: int
    payload_bytes: int
    part: int
    parts: int
    flags: int
    reserved: int
    seal: int

    @classmethod
    def intact(cls, raw: bytes, seed: int) -> _Entry | None:
        """``None`` where its checksum is wrong, or what it says cannot be."""
        entry = cls._make(_ENTRY.unpack(raw))
        if entry.seal != xxhash.xxh3_64_intdigest(raw[:_ENTRY_SEALED], seed) or entry.part >= entry.parts:
            return None
        is_last = entry.part == entry.parts - 1
        return entry if 0 < entry.payload_bytes <= PAGE_BYTES and (is_last or entry.payload_bytes == PAGE_BYTES) else None

    def follows(self, before: _Entry) -> bool:
        """Whether it is the next part of the same writing of the same block."""
        return (
            self.part == before.part + 1
            and self.hash == before.hash
            and self.parent == before.parent
            and self.parts == before.parts
            and self.time_s == before.time_s
        )
