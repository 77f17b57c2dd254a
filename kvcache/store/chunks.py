"""A run of blocks on its way to or from slots next to each other, with the checksums of its pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvcache.core.identity import PAGE_BYTES
from kvcache.core.shelf import Block
from kvcache.store.format import CODEC_CHARS_MAX, SLOTS_MAX, BlockEntry, pack_checksums, page_checksum
from kvcache.store.segments import Segment, SegmentFiles
from kvcache.store.stored import StoredBlock
from profiles.blocks import HASH_BYTES

CHUNK_BYTES = 16 * 2**20
"""Written or read at once; while one chunk is on its way to or from the disk, another is hashed."""
CHUNK_PAGES = CHUNK_BYTES // PAGE_BYTES


class Write:
    """Blocks on their way into slots next to each other."""

    def __init__(self, segment: Segment, first_slot: int) -> None:
        self.segment = segment
        self.first_slot = first_slot
        self.blocks: list[tuple[StoredBlock, int, int]] = []
        """With payload bytes and pages."""
        self.pages = 0
        self._future: Future[list[bytes]] | None = None
        self._files: SegmentFiles | None = None

    def add(self, block: StoredBlock, payload_bytes: int, pages: int) -> None:
        self.blocks.append((block, payload_bytes, pages))
        self.pages += pages

    def goes_on_at(self, segment: Segment, slot: int) -> bool:
        """Whether these are the slots after its own."""
        return segment is self.segment and slot == self.first_slot + self.pages

    def start(self, files: SegmentFiles, pool: ThreadPoolExecutor | None) -> None:
        """In a thread of the pool; without one, when it is waited for."""
        self._files = files
        self._future = pool.submit(self._run) if pool else None

    def wait(self) -> list[bytes]:
        """The packed checksums of each block, when all pages are written.

        Raises:
            OSError: they are not.
        """
        return self._future.result() if self._future else self._run()

    def _run(self) -> list[bytes]:
        assert self._files is not None
        checksums = [pack_checksums([page_checksum(page) for page in _pages(block.pages)]) for block, _, _ in self.blocks]
        self._files.write_pages(self.segment, self.first_slot, [block.pages for block, _, _ in self.blocks])
        return checksums

    def entries(self, checksums: Sequence[bytes], times_s: Sequence[float]) -> list[BlockEntry]:
        """Of its blocks, each with its time."""
        entries: list[BlockEntry] = []
        slot = self.first_slot
        for (block, payload_bytes, pages), packed, time_s in zip(self.blocks, checksums, times_s, strict=True):
            # Copies of the names: they stay in memory, whatever they were cut from does not.
            entries.append(BlockEntry(bytes(block.hash), bytes(block.parent), slot, int(time_s), payload_bytes, packed))
            slot += pages
        return entries


class Read:
    """Blocks in slots next to each other that are read at once."""

    def __init__(self, segment: Segment, first_slot: int) -> None:
        self.segment = segment
        self.first_slot = first_slot
        self.blocks: list[Block[Segment]] = []
        self._into: list[Sequence[memoryview]] = []
        self._slots: list[int] = []
        self._pages = 0

    def goes_on_with(self, block: Block[Segment]) -> bool:
        return (
            block.place is self.segment
            and block.first_slot == self.first_slot + self._pages
            and self._pages + block.pages <= CHUNK_PAGES
        )

    def add(self, block: Block[Segment], into: Sequence[memoryview]) -> None:
        self.blocks.append(block)
        self._into.append(into)
        self._slots.append(self.first_slot + self._pages)
        self._pages += block.pages

    def at(self, index: int) -> tuple[Block[Segment], Segment, int]:
        """A block and where it lay when it was read."""
        return self.blocks[index], self.segment, self._slots[index]

    def run(self, files: SegmentFiles) -> int:
        """How many of the blocks, from the first on, are read and verified."""
        wanted = [(into, block.pages) for into, block in zip(self._into, self.blocks, strict=True)]
        try:
            if not files.read_pages(self.segment, self.first_slot, wanted):
                # One of them is cut off; those before it may be whole.
                return self._one_by_one(files)
        except OSError:
            return self._one_by_one(files)
        return self._verified()

    def _one_by_one(self, files: SegmentFiles) -> int:
        for index, (into, block, slot) in enumerate(zip(self._into, self.blocks, self._slots, strict=True)):
            try:
                if not files.read_pages(self.segment, slot, [(into, block.pages)]):
                    return min(index, self._verified())
            except OSError:
                return min(index, self._verified())
        return self._verified()

    def _verified(self) -> int:
        for index, (into, block) in enumerate(zip(self._into, self.blocks, strict=True)):
            if not is_intact(into, block.payload_bytes, block.checksums):
                return index
        return len(self.blocks)


def is_intact(pages: Sequence[memoryview], payload_bytes: int, checksums: bytes) -> bool:
    """Whether buffers hold the pages that these packed checksums are of."""
    return pack_checksums([page_checksum(page) for page in _pages(pages, payload_bytes)]) == checksums


def _pages(buffers: Sequence[memoryview], payload_bytes: int | None = None) -> Iterator[memoryview]:
    """What lies in each page of a block."""
    left = sum(len(buffer) for buffer in buffers) if payload_bytes is None else payload_bytes
    for buffer in buffers:
        for start in range(0, min(left, len(buffer)), PAGE_BYTES):
            yield buffer[start : min(start + PAGE_BYTES, left)]
        left -= len(buffer)
        if left <= 0:
            return


def in_pages(buffers: Sequence[memoryview]) -> bool:
    """Whether all buffers but the last are whole pages, and all are bytes next to each other."""
    plain = all(buffer.itemsize == 1 and buffer.ndim == 1 and buffer.c_contiguous and len(buffer) for buffer in buffers)
    return plain and all(len(buffer) % PAGE_BYTES == 0 for buffer in buffers[:-1])


def payload_of(block: StoredBlock) -> int | None:
    """Bytes of a block's payload; ``None`` where it has no form that can be stored."""
    payload_bytes = sum(len(page) for page in block.pages)
    fits = 0 < payload_bytes <= SLOTS_MAX * PAGE_BYTES and in_pages(block.pages)
    named = len(block.hash) == HASH_BYTES and len(block.parent) in (0, HASH_BYTES) and block.hash != block.parent
    return payload_bytes if fits and named and block.codec.isascii() and len(block.codec) <= CODEC_CHARS_MAX else None
