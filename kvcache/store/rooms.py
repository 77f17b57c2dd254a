"""Which segments a store has and what room they take: taken over, filled, emptied, removed.

All of it is done under one lock, which the store shares.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvcache.core.identity import PAGE_BYTES, KvIdentity
from kvcache.core.shelf import Block, Shelf
from kvcache.store.chunks import Write
from kvcache.store.format import BlockEntry, Header
from kvcache.store.kept_budget import BUDGET_FILE, KeptBudget
from kvcache.store.segments import Scanned, Segment, SegmentFiles
from kvcache.store.stored import Evicted, Finding, Refusal

FINDINGS_MAX = 256
_ROUNDS_MAX = 64
_REFUSALS = {
    errno.ENOSPC: Refusal.NO_SPACE,
    errno.EDQUOT: Refusal.NO_SPACE,
    errno.EFBIG: Refusal.NO_SPACE,
    errno.EROFS: Refusal.READ_ONLY,
    errno.EACCES: Refusal.READ_ONLY,
    errno.EPERM: Refusal.READ_ONLY,
}

_Block = Block[Segment]


@dataclass(slots=True)
class Counts:
    """Since the opening; see ``StoreStats``."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    evicted: int = 0
    idled: int = 0
    set_aside: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    refused: dict[str, int] = field(default_factory=dict)


class Rooms:
    """See the module. Methods are called with the lock held, or before others know of the object."""

    def __init__(self, files: SegmentFiles, shelf: Shelf[Segment], budget: KeptBudget, bytes_max: int) -> None:
        self.files = files
        self.shelf = shelf
        self.budget = budget
        self.bytes_max = bytes_max
        self.lock = threading.RLock()
        self.segments: dict[str, Segment] = {}
        self.growing: dict[tuple[bytes, str], Segment] = {}
        """The segment that new blocks of an identity in a codec go to."""
        self.made = False
        """Whether there are new files that the directory was not synced with."""
        self.bytes_used = 0
        self.findings: deque[Finding] = deque(maxlen=FINDINGS_MAX)
        self.counts = Counts()
        self.read_only = files.read_only

    def take_over(self, now_s: float) -> None:
        """Learns what the files hold, removes those that are of no use, and keeps to ``bytes_max``."""
        found: list[tuple[BlockEntry, Segment]] = []
        if self.budget.damaged:
            self.find("budget_file", BUDGET_FILE, "not readable; the budget counts as used up")
        for scanned in self.files.scan():
            found += self._scanned(scanned)
        found.sort(key=lambda one: (one[0].time_s, one[1].name, one[0].first_slot))
        hot_s = self.shelf.rules.hot_s
        for time_s, group in itertools.groupby(found, key=lambda one: one[0].time_s):
            used_s = max(min(float(time_s), now_s), now_s - hot_s)
            together: list[_Block] = []
            for entry, segment in group:
                if self.shelf.find(segment.header.identity, entry.hash):
                    self.erase(segment, [(entry.first_slot, entry.pages)], 1)
                else:
                    together.append(self.shelve(segment, entry, used_s))
            self.shelf.use(together, used_s)
        if not self.files.read_only:
            self.make_room(0, now_s + hot_s)

    def _scanned(self, scanned: Scanned) -> Iterator[tuple[BlockEntry, Segment]]:
        segment, scan = scanned.segment, scanned.scan
        if segment is None or scan is None:
            self.counts.set_aside += 1
            self.find(scanned.kind, scanned.name, scanned.detail)
            if scanned.kind in ("damaged", "version"):
                self._unlink(scanned.name)
            return
        if scan.torn:
            self.find("torn", scanned.name, f"{scan.torn} entries of no whole block")
        if scan.truncated:
            self.find("truncated", scanned.name, f"{scan.truncated} blocks past the end of the file")
        if not scan.blocks:
            self._unlink(scanned.name)
            return
        self.segments[segment.name] = segment
        self.bytes_used += segment.bytes_used
        if segment.room:
            self.growing[segment.header.identity.key, segment.header.codec] = segment
        for entry in scan.blocks:
            yield entry, segment

    def shelve(self, segment: Segment, entry: BlockEntry, used_s: float) -> _Block:
        """Makes a block known whose entries are written."""
        return self.shelf.add(
            segment.header.identity,
            entry.hash,
            entry.parent,
            segment,
            entry.first_slot,
            entry.payload_bytes,
            entry.checksums,
            used_s,
        )

    def fits(self, segment: Segment, identity: KvIdentity, codec: str, pages: int) -> bool:
        """Whether a block would go into this segment, after what is in it."""
        return self.growing.get((identity.key, codec)) is segment and segment.room >= pages

    def reserve(self, identity: KvIdentity, codec: str, pages: int, now_s: float) -> tuple[Segment, int] | Refusal:
        """Slots next to each other for a block to be written: the segment and the first of them. Room is made for them."""
        segment = self.growing.get((identity.key, codec))
        if segment is not None and segment.room < pages:
            segment = None
        refused = self.make_room((pages + (segment is None)) * PAGE_BYTES, now_s)
        if refused is None and not self.budget.take(pages * PAGE_BYTES, now_s):
            refused = Refusal.BUDGET
        if refused:
            return refused
        # Making room may have emptied the segment, which is gone then.
        if segment is None or self.segments.get(segment.name) is not segment:
            made = self._grow(identity, codec, now_s)
            if isinstance(made, Refusal):
                self.budget.give_back(pages * PAGE_BYTES)
                return made
            segment = made
        slot = segment.next_slot
        segment.next_slot += pages
        segment.pages += pages
        self.bytes_used += pages * PAGE_BYTES
        return segment, slot

    def give_up(self, write: Write) -> None:
        """Reserved slots that were not written, or not all of them. The segment takes no more.

        The budget gets nothing back: what of it reached the disk is not known, and a disk that refuses shall not be worn out
        by tries.
        """
        key = (write.segment.header.identity.key, write.segment.header.codec)
        if self.growing.get(key) is write.segment:
            del self.growing[key]
        self.erase(write.segment, [(write.first_slot, write.pages)], 0)

    def _grow(self, identity: KvIdentity, codec: str, now_s: float) -> Segment | Refusal:
        """A new segment for an identity and codec."""
        header = Header(identity=identity, codec=codec, serial=os.urandom(8), created_s=now_s)
        try:
            segment = self.files.create(header)
        except OSError as error:
            return self.failed(error, header.file_name)
        except ValueError:
            return Refusal.INVALID
        self.segments[segment.name] = self.growing[identity.key, codec] = segment
        self.made = True
        self.bytes_used += segment.bytes_used
        return segment

    def make_room(self, wanted_bytes: int, now_s: float) -> Refusal | None:
        """Under the lock. Evicts nothing where that would not be enough."""
        if wanted_bytes > self.bytes_max:
            return Refusal.FULL
        for _ in range(_ROUNDS_MAX):
            over = self.bytes_used + wanted_bytes - self.bytes_max
            if over <= 0:
                return None
            asked = over
            while True:
                victims = self.shelf.victims(asked, now_s)
                if self._gain(victims) >= over:
                    break
                self.shelf.keep(victims)
                if sum(block.stored_bytes for block in victims) < asked:  # there are no more
                    oldest = next(iter(self.shelf), None)
                    return Refusal.HOT if oldest is None or self.shelf.is_hot(oldest, now_s) else Refusal.FULL
                asked *= 2
            before = self.bytes_used
            self.counts.evicted += self.remove(victims).blocks
            if self.bytes_used >= before:
                break
        return Refusal.FULL

    def _gain(self, blocks: Iterable[_Block]) -> int:
        """Room that comes free without these blocks: of their pages, and of segments that they leave empty."""
        left: dict[str, int] = {}
        gain = 0
        for block in blocks:
            segment = block.place
            left[segment.name] = left.get(segment.name, segment.blocks) - 1
            gain += block.stored_bytes if self.files.punches else 0
            if not left[segment.name]:
                gain += PAGE_BYTES if self.files.punches else segment.bytes_used
        return gain

    def corrupt(self, block: _Block, place: Segment, slot: int) -> None:
        """A block that did not verify where it lay; nothing is wrong where it has left that place meanwhile."""
        if not self.shelf.holds(block) or block.place is not place or block.first_slot != slot:
            return
        self.counts.corrupt += 1
        self.find("corrupt", place.name, f"block of {block.pages} pages from slot {slot} on")
        self.remove([block])

    def remove(self, blocks: Iterable[_Block]) -> Evicted:
        """Under the lock."""
        gone: dict[str, list[_Block]] = {}
        count = size = 0
        for block in blocks:
            if self.shelf.remove(block):
                gone.setdefault(block.place.name, []).append(block)
                count += 1
                size += block.stored_bytes
        for of_one in gone.values():
            self.erase(of_one[0].place, runs(of_one), len(of_one))
        return Evicted(count, size)

    def erase(self, segment: Segment, runs: Sequence[tuple[int, int]], blocks: int) -> None:
        """Under the lock: these slots hold nothing any more."""
        segment.blocks -= blocks
        if not segment.blocks and not segment.pins:
            self._forget(segment)
            return
        try:
            self.files.erase(segment, runs)
        except OSError as error:
            self.failed(error, segment.name)
            return
        if self.files.punches:
            pages = sum(slots for _, slots in runs)
            segment.pages -= pages
            self.bytes_used -= pages * PAGE_BYTES

    def unpin(self, segment: Segment) -> None:
        """Under the lock."""
        segment.pins -= 1
        if not segment.pins and not segment.blocks:
            self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        """Under the lock: nothing is in it any more."""
        if self.segments.pop(segment.name, None) is None:
            return
        self.bytes_used -= segment.bytes_used
        key = (segment.header.identity.key, segment.header.codec)
        if self.growing.get(key) is segment:
            del self.growing[key]
        self._unlink(segment.name)

    def _unlink(self, name: str) -> None:
        try:
            self.files.unlink(name)
        except OSError as error:
            self.failed(error, name)

    def find(self, kind: str, file: str, detail: str) -> None:
        with self.lock:
            self.findings.append(Finding(kind, file, detail))

    def failed(self, error: OSError, name: str) -> Refusal:
        refused = _REFUSALS.get(error.errno or 0, Refusal.IO_ERROR)
        with self.lock:
            self.read_only = self.read_only or refused is Refusal.READ_ONLY
            self.find(refused.value, name, why(error))
        return refused


def runs(blocks: Sequence[_Block]) -> list[tuple[int, int]]:
    """Slots of blocks of one segment: first and number of each run without a gap."""
    runs: list[tuple[int, int]] = []
    for block in sorted(blocks, key=lambda one: one.first_slot):
        if runs and sum(runs[-1]) == block.first_slot:
            runs[-1] = (runs[-1][0], runs[-1][1] + block.pages)
        else:
            runs.append((block.first_slot, block.pages))
    return runs


def why(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()
