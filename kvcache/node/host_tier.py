"""The tier in host memory: one anonymous arena of 64 KiB pages, bounded, that readers and writers use in place.

A block is raw, as its engine has it, on pages of its own; pages need not lie together, but do where they can. Whoever reads
or writes a block pins it: a block that leaves while it is pinned is found no more, and its pages are free once the last
reader is done. Not thread-safe but for the bytes themselves: one event loop changes it, threads only fill or read views.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kvcache.core.eviction import EvictionOrder
from kvcache.core.identity import PAGE_BYTES, KvIdentity
from kvcache.wire.messages import checksums


@dataclass(slots=True, eq=False)
class HostBlock:
    """One block in the arena. ``key`` is the identity's key and the hash; ``views`` are its ``size`` bytes, in order."""

    key: bytes
    identity: KvIdentity
    hash: bytes
    parent: bytes
    size: int
    slots: list[int]
    views: list[memoryview]
    checksums: bytes = b""
    """Of each 64 KiB of it, 8 bytes each; empty until it is kept."""
    arrived_s: float = 0.0
    on_disk: bool = False
    pins: int = 0
    gone: bool = False

    @property
    def parent_key(self) -> bytes:
        """The key of the block before it; empty for the first of a prompt."""
        return self.key[: -len(self.hash)] + self.parent if self.parent else b""

    def view(self, start: int, end: int) -> list[memoryview]:
        """The parts of its bytes from ``start`` to ``end``."""
        parts: list[memoryview] = []
        at = 0
        for one in self.views:
            low, high = max(start, at), min(end, at + len(one))
            if low < high:
                parts.append(one[low - at : high - at])
            at += len(one)
        return parts


class HostTier:
    """The arena and what lies in it."""

    def __init__(self, bytes_max: int, order: EvictionOrder) -> None:
        """``bytes_max`` is rounded down to whole pages; no page is touched before it is used.

        Raises:
            OSError: the kernel does not give so much address space.
        """
        self.order = order
        self.pages = bytes_max // PAGE_BYTES
        self._arena = mmap.mmap(-1, max(1, self.pages) * PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):
            self._arena.madvise(mmap.MADV_HUGEPAGE)  # fewer faults on the first write of each page
        self._memory = memoryview(self._arena)
        # Popped from the end: pages are used in order, and those of a block that left lie together again.
        self._free = list(range(self.pages - 1, -1, -1))
        self._blocks: dict[bytes, HostBlock] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[HostBlock]:
        return iter(self._blocks.values())

    @property
    def bytes_max(self) -> int:
        """Of the arena."""
        return self.pages * PAGE_BYTES

    @property
    def bytes_free(self) -> int:
        """In pages that nobody has."""
        return len(self._free) * PAGE_BYTES

    @property
    def bytes_used(self) -> int:
        """In pages of blocks, also of those being written or read for the last time."""
        return self.bytes_max - self.bytes_free

    def find(self, key: bytes) -> HostBlock | None:
        """A block that was kept."""
        return self._blocks.get(key)

    def reserve(self, identity: KvIdentity, hash: bytes, parent: bytes, size: int) -> HostBlock | None:
        """Pages for a block that is to come, pinned; None while there are not enough. Then ``keep`` or ``abandon``."""
        count = pages_of(size)
        if count > len(self._free):
            return None
        slots = self._free[-count:]
        del self._free[-count:]
        slots.reverse()
        return HostBlock(
            key=identity.key + hash,
            identity=identity,
            hash=hash,
            parent=parent,
            size=size,
            slots=slots,
            views=self._views(slots, size),
            pins=1,
        )

    def keep(self, block: HostBlock, checksums: bytes, now_s: float, *, test: bool = False) -> bool:
        """The bytes of a reserved block are there: it can be found, and is no longer pinned by its writer.

        False: another writer was first; this one's pages are free again.
        """
        if block.key in self._blocks:
            self.abandon(block)
            return False
        block.checksums = checksums
        block.arrived_s = now_s
        self._blocks[block.key] = block
        self.order.add(block.key, block.parent_key, len(block.slots) * PAGE_BYTES, now_s, test=test)
        self.unpin(block)
        return True

    def abandon(self, block: HostBlock) -> None:
        """The bytes of a reserved block will not come."""
        block.gone = True
        self.unpin(block)

    def rooms(self, block: HostBlock) -> list[memoryview]:
        """Its whole pages, for readers of files that fill pages to their end."""
        return self._views(block.slots, len(block.slots) * PAGE_BYTES)

    def pin(self, block: HostBlock) -> None:
        """Its pages stay as they are until ``unpin``."""
        assert not block.gone
        block.pins += 1

    def unpin(self, block: HostBlock) -> None:
        """The opposite of ``pin``."""
        assert block.pins > 0
        block.pins -= 1
        if block.gone and not block.pins:
            self._give_back(block)

    def remove(self, key: bytes) -> HostBlock | None:
        """The block is found no more; its pages are free when nobody has it pinned."""
        block = self._blocks.pop(key, None)
        if block is not None:
            self.order.remove(key)
            block.gone = True
            if not block.pins:
                self._give_back(block)
        return block

    def victims(self, bytes_min: int, now_s: float, keep: Callable[[HostBlock], bool]) -> list[HostBlock]:
        """Blocks that are to leave, in that order. They are out of the order: ``remove`` them, or ``stay``."""
        return self._found(self.order.victims(bytes_min, now_s, self._kept(keep)))

    def idle(self, now_s: float, keep: Callable[[HostBlock], bool]) -> list[HostBlock]:
        """Blocks that nobody used for too long, as by :meth:`victims`."""
        return self._found(self.order.idle(now_s, keep=self._kept(keep)))

    def _kept(self, keep: Callable[[HostBlock], bool]) -> Callable[[bytes], bool]:
        """Of keys: what is pinned stays too."""

        def kept(key: bytes) -> bool:
            block = self._blocks.get(key)
            return block is not None and (block.pins > 0 or keep(block))

        return kept

    def _found(self, keys: Sequence[bytes]) -> list[HostBlock]:
        return [block for key in keys if (block := self._blocks.get(key)) is not None]

    def stay(self, block: HostBlock, now_s: float) -> None:
        """A victim that does not leave after all."""
        if not block.gone:
            self.order.add(block.key, block.parent_key, len(block.slots) * PAGE_BYTES, now_s)

    def _give_back(self, block: HostBlock) -> None:
        self._free.extend(reversed(block.slots))
        block.slots = []
        block.views = []

    def _views(self, slots: Sequence[int], size: int) -> list[memoryview]:
        views: list[memoryview] = []
        first = last = slots[0]
        left = size
        for slot in [*slots[1:], -1]:
            if slot == last + 1:
                last = slot
                continue
            length = min(left, (last - first + 1) * PAGE_BYTES)
            views.append(self._memory[first * PAGE_BYTES : first * PAGE_BYTES + length])
            left -= length
            first = last = slot
        return views


def pages_of(size: int) -> int:
    """Pages of so many bytes; at least one."""
    return max(1, -(-size // PAGE_BYTES))


def raw_of(block: HostBlock) -> memoryview:
    """The bytes of a block as one piece; a copy where its pages do not lie together."""
    return block.views[0] if len(block.views) == 1 else memoryview(b"".join(block.views))


def checksums_of(block: HostBlock) -> bytes:
    """Of the bytes that lie in the block's pages now, whatever pages they are."""
    return b"".join([checksums(view) for view in block.views])


def encoded(block: HostBlock, codec: str) -> bytes | None:
    """The payload of a block for the disk; None where the codec cannot be used for its layout, or is not known."""
    from kvcache.codec import codecs  # with numpy: only for those who want it

    try:
        return codecs.encode(block.identity.signature, raw_of(block), codec)
    except codecs.CodecError:
        return None


def decoded(block: HostBlock, payload: memoryview, codec: str) -> bool:
    """Fills a reserved block from an encoded payload; False: the payload is corrupt."""
    from kvcache.codec import codecs  # with numpy: only for those who want it

    try:
        with filled(block) as into:
            codecs.decode(block.identity.signature, payload, codec, into)
    except codecs.CodecError:
        return False
    return True


@contextmanager
def filled(block: HostBlock) -> Iterator[memoryview]:
    """The bytes of a reserved block as one piece to be written; they are in its pages when this ends without an error."""
    if len(block.views) == 1:
        yield block.views[0]
        return
    scratch = memoryview(bytearray(block.size))
    yield scratch
    at = 0
    for view in block.views:
        view[:] = scratch[at : at + len(view)]
        at += len(view)
