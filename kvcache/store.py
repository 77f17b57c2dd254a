"""The tier on disk (L2, KVC-1): blocks in ``.kvc`` files of one directory, verified when they are read.

Public face; ``segments`` does the IO, ``kvc_format`` is the layout, ``core.shelf`` what is known in memory.

What is on the disk when: pages are written before their entries, and entries decide whether a block is there, so a kill
loses at most the batch that it cut off. A loss of power loses at most twice ``UNSYNCED_BYTES_MAX`` and what is under way:
after so many bytes an ``fdatasync`` begins, in a thread of its own; ``sync`` and ``close`` do one too. Nothing relies on it:
a page that is not what its entry says is dropped when it is read.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kvcache.chunks import CHUNK_PAGES, Read, Write, in_pages, payload_of
from kvcache.core.identity import PAGE_BYTES, KvIdentity
from kvcache.core.shelf import Block, Policy, Rules, Shelf, pages_of
from kvcache.kept_budget import BUDGET_FILE, KeptBudget
from kvcache.kvc_format import BlockEntry, Header, encode_entries
from kvcache.segments import Scanned, Segment, SegmentFiles
from kvcache.segments import StoreLocked as StoreLocked
from kvcache.segments import StoreRefused as StoreRefused
from kvcache.stored import Evicted as Evicted
from kvcache.stored import Finding as Finding
from kvcache.stored import PutResult as PutResult
from kvcache.stored import Refusal as Refusal
from kvcache.stored import StoredBlock as StoredBlock
from kvcache.stored import StoredForm as StoredForm
from kvcache.stored import StoreStats as StoreStats

UNSYNCED_BYTES_MAX = 64 * 2**20
CLOSE_S_MAX = 60.0
FINDINGS_MAX = 256
_THREADS = 2
_CHUNKS_AHEAD_MAX = 3

_Block = Block[Segment]


class KvStore:
    """See the module. Every method may be called from any thread; calls of several threads overlap where they do IO.

    ``now_s`` is wall clock time everywhere (it is written to disk): seconds since 1970. Uses are not written down: at an
    opening, blocks that were written longer ago than ``hot_s`` count as used that long ago, in the order of their writing.
    """

    def __init__(self, files: SegmentFiles, shelf: Shelf[Segment], budget: KeptBudget, bytes_max: int) -> None:
        """By ``open`` only."""
        self._files = files
        self._shelf = shelf
        self._budget = budget
        self._bytes_max = bytes_max
        self._lock = threading.RLock()
        self._quiet = threading.Condition(self._lock)
        self._busy = 0
        self._closed = False
        self._writers = ThreadPoolExecutor(_THREADS, "kv-store-write")
        self._readers = ThreadPoolExecutor(_THREADS, "kv-store-read")
        self._syncer = ThreadPoolExecutor(1, "kv-store-sync")
        self._syncing: Future[None] | None = None
        self._segments: dict[str, Segment] = {}
        self._growing: dict[tuple[bytes, str], Segment] = {}
        """The segment that new blocks of an identity in a codec go to."""
        self._bytes_used = 0
        self._unsynced_bytes = 0
        self._findings: deque[Finding] = deque(maxlen=FINDINGS_MAX)
        self._counts = _Counts()
        self._read_only = files.read_only

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
        policy: Policy | None = None,
    ) -> KvStore:
        """Takes the directory over, makes it where it is missing.

        ``policy`` decides who goes first; without one the least recently used does. It is called under the store's lock.

        Raises:
            StoreLocked: somebody else uses it.
            StoreRefused: it cannot be used at all.
        """
        files = SegmentFiles(directory)
        try:
            shelf: Shelf[Segment] = Shelf(Rules(hot_s, idle_s_max), policy)
            store = cls(files, shelf, KeptBudget(files, write_bytes_per_day_max, now_s), bytes_max)
            store._take_over(now_s)
        except OSError as error:
            files.close()
            raise StoreRefused(f"KV directory {directory}: {_why(error)}; give another directory") from None
        except BaseException:
            files.close()
            raise
        return store

    def _take_over(self, now_s: float) -> None:
        found: list[tuple[BlockEntry, Segment]] = []
        if self._budget.damaged:
            self._find("budget_file", BUDGET_FILE, "not readable; the budget counts as used up")
        for scanned in self._files.scan():
            found += self._scanned(scanned)
        found.sort(key=lambda one: (one[0].time_s, one[1].name, one[0].first_slot))
        hot_s = self._shelf.rules.hot_s
        for time_s, group in itertools.groupby(found, key=lambda one: one[0].time_s):
            used_s = max(min(float(time_s), now_s), now_s - hot_s)
            together: list[_Block] = []
            for entry, segment in group:
                if self._shelf.find(segment.header.identity, entry.hash):
                    self._erase(segment, [(entry.first_slot, entry.pages)], 1)
                else:
                    together.append(self._shelve(segment, entry, used_s))
            self._shelf.use(together, used_s)
        if not self._files.read_only:
            self._make_room(0, now_s + hot_s)

    def _scanned(self, scanned: Scanned) -> Iterator[tuple[BlockEntry, Segment]]:
        segment, scan = scanned.segment, scanned.scan
        if segment is None or scan is None:
            self._counts.set_aside += 1
            self._find(scanned.kind, scanned.name, scanned.detail)
            if scanned.kind in ("damaged", "version"):
                self._unlink(scanned.name)
            return
        if scan.torn:
            self._find("torn", scanned.name, f"{scan.torn} entries of no whole block")
        if scan.truncated:
            self._find("truncated", scanned.name, f"{scan.truncated} blocks past the end of the file")
        if not scan.blocks:
            self._unlink(scanned.name)
            return
        self._segments[segment.name] = segment
        self._bytes_used += segment.bytes_used
        if segment.room:
            self._growing[segment.header.identity.key, segment.header.codec] = segment
        for entry in scan.blocks:
            yield entry, segment

    def _shelve(self, segment: Segment, entry: BlockEntry, used_s: float) -> _Block:
        return self._shelf.add(
            segment.header.identity,
            entry.hash,
            entry.parent,
            segment,
            entry.first_slot,
            entry.payload_bytes,
            entry.checksums,
            used_s,
        )

    # Looking up

    def leading(self, identity: KvIdentity, hashes: Sequence[bytes]) -> int:
        """How many blocks from the first hash on are here. Reads nothing, counts as no use."""
        with self._lock:
            return len(self._shelf.leading(identity, hashes))

    def forms(self, identity: KvIdentity, hashes: Sequence[bytes]) -> list[StoredForm]:
        """The forms of those leading blocks, so that a reader can make room."""
        with self._lock:
            return [_form(block) for block in self._shelf.leading(identity, hashes)]

    def chain(self, identity: KvIdentity, head: bytes) -> list[bytes]:
        """The hashes from the first block to ``head``, or from the earliest ancestor that is here without a gap.

        Whole if ``parent(identity, hashes[0])`` is ``b""``. Empty where ``head`` is not here.
        """
        with self._lock:
            return self._shelf.chain(identity, head)

    def parent(self, identity: KvIdentity, hash: bytes) -> bytes | None:
        """``b""`` for a first block; ``None`` for one that is not here."""
        with self._lock:
            block = self._shelf.find(identity, hash)
            return block.parent if block else None

    def held(self) -> list[tuple[KvIdentity, list[bytes]]]:
        """All blocks of each identity, in the order in which they came: for an index that is built anew."""
        with self._lock:
            return [(owner.identity, list(owner.blocks)) for owner in self._shelf.owners()]

    def touch(self, identity: KvIdentity, hashes: Sequence[bytes], now_s: float) -> int:
        """These blocks, of one chain in its order, are used now; how many of them are here."""
        with self._lock:
            found = [block for hash in hashes if (block := self._shelf.find(identity, hash))]
            self._shelf.use(found, now_s)
            return len(found)

    # Writing

    def put(self, identity: KvIdentity, blocks: Sequence[StoredBlock], now_s: float) -> PutResult:
        """Keeps blocks of one chain, in its order. Blocks that are here already count as used."""
        if not self._enter():
            return PutResult(0, 0, 0, Refusal.CLOSED)
        try:
            return self._put(identity, blocks, now_s)
        finally:
            self._leave()

    def _put(self, identity: KvIdentity, blocks: Sequence[StoredBlock], now_s: float) -> PutResult:
        todo = deque(blocks)
        under_way: deque[Write | _Block] = deque()
        kept: list[_Block] = []
        written = written_bytes = 0
        refused: Refusal | None = None
        while True:
            while todo and refused is None and len(under_way) < _CHUNKS_AHEAD_MAX:
                step, refused = self._next_step(identity, todo, now_s)
                if isinstance(step, Write):
                    step.start(self._files, None if not todo and not under_way else self._writers)
                if step is not None:
                    under_way.append(step)
            if not under_way:
                break
            step = under_way.popleft()
            if isinstance(step, Block):
                kept.append(step)
                continue
            failure = self._finish(step, now_s, kept, give_up=False)
            if failure:
                refused = failure
                break
            written += len(step.blocks)
            written_bytes += step.pages * PAGE_BYTES
        for step in under_way:
            if isinstance(step, Write):
                self._finish(step, now_s, kept, give_up=True)
        with self._lock:
            self._shelf.use(kept, now_s)
            held = next((index for index, block in enumerate(kept) if not self._shelf.holds(block)), len(kept))
            if refused:
                count = self._counts.refused
                count[refused.value] = count.get(refused.value, 0) + len(blocks) - len(kept)
        return PutResult(held, written, written_bytes, refused)

    def _next_step(
        self, identity: KvIdentity, todo: deque[StoredBlock], now_s: float
    ) -> tuple[Write | _Block | None, Refusal | None]:
        """A block that is here already, or new ones for slots next to each other of one segment, which are reserved."""
        with self._lock:
            known = self._shelf.find(identity, todo[0].hash)
            if known:
                todo.popleft()
                self._shelf.use([known], now_s)
                return known, None
            write: Write | None = None
            while todo and (write is None or write.pages < CHUNK_PAGES):
                block = todo[0]
                if write and self._shelf.find(identity, block.hash):
                    break
                payload_bytes = payload_of(block)
                if payload_bytes is None:
                    return write, Refusal.INVALID
                pages = pages_of(payload_bytes)
                growing = self._growing.get((identity.key, block.codec))
                fits = growing is not None and growing.room >= pages
                if write and not (fits and growing is write.segment):
                    break
                refused = self._make_room((pages + (0 if fits else 1)) * PAGE_BYTES, now_s)
                if refused is None and not self._budget.take(pages * PAGE_BYTES, now_s):
                    refused = Refusal.BUDGET
                if refused:
                    return write, refused
                if growing is None or not fits:
                    made = self._grow(identity, block.codec, now_s)
                    if isinstance(made, Refusal):
                        self._budget.give_back(pages * PAGE_BYTES)
                        return write, made
                    growing = made
                if write is None:
                    write = Write(growing, growing.next_slot)
                    growing.pins += 1
                write.add(block, payload_bytes, pages)
                growing.next_slot += pages
                growing.pages += pages
                self._bytes_used += pages * PAGE_BYTES
                todo.popleft()
            return write, None

    def _grow(self, identity: KvIdentity, codec: str, now_s: float) -> Segment | Refusal:
        """A new segment for an identity and codec."""
        header = Header(identity=identity, codec=codec, serial=os.urandom(8), created_s=now_s)
        try:
            segment = self._files.create(header)
        except OSError as error:
            return self._failed(error, header.file_name)
        except ValueError:
            return Refusal.INVALID
        self._segments[segment.name] = self._growing[identity.key, codec] = segment
        self._bytes_used += segment.bytes_used
        return segment

    def _finish(self, write: Write, now_s: float, kept: list[_Block], *, give_up: bool) -> Refusal | None:
        """Waits until the pages are written, then writes their entries: from then on the blocks are there."""
        segment = write.segment
        refused: Refusal | None = None
        entries: list[BlockEntry] = []
        try:
            checksums = write.wait()
            if not give_up:
                entries = write.entries(checksums, now_s)
                self._files.write_entries(
                    segment, write.first_slot, b"".join(encode_entries(segment.header, e) for e in entries)
                )
        except OSError as error:
            refused = self._failed(error, segment.name)
            entries = []
        with self._lock:
            if not entries:
                self._budget.give_back(write.pages * PAGE_BYTES)
                self._growing.pop((segment.header.identity.key, segment.header.codec), None)
                self._erase(segment, [(write.first_slot, write.pages)], 0)
            for entry in entries:
                segment.blocks += 1
                other = self._shelf.find(segment.header.identity, entry.hash)
                if other:  # another thread wrote it meanwhile
                    self._erase(segment, [(entry.first_slot, entry.pages)], 1)
                kept.append(other or self._shelve(segment, entry, now_s))
            self._unpin(segment)
            if entries:
                self._read_only = False
                self._counts.written_bytes += write.pages * PAGE_BYTES
                self._unsynced_bytes += write.pages * PAGE_BYTES
            due = self._unsynced_bytes >= UNSYNCED_BYTES_MAX
        if due:
            self._sync_behind()
        return refused

    def sync(self) -> None:
        """What was put is on the disk when this returns; where the disk refuses, a finding tells."""
        if self._enter():
            try:
                self._sync()
            finally:
                self._leave()

    def _sync_behind(self) -> None:
        """Syncs while more is written; waits for the sync before, so that what is not synced stays bounded."""
        with self._lock:
            before, self._syncing = self._syncing, Future()
            done = self._syncing
        if before:
            before.result()

        def sync() -> None:
            try:
                self._sync()
            finally:
                done.set_result(None)

        self._syncer.submit(sync)

    def _sync(self) -> None:
        with self._lock:
            self._unsynced_bytes = 0
            segments = [segment for segment in self._segments.values() if segment.unsynced]
            for segment in segments:
                segment.pins += 1
        for segment in segments:
            try:
                self._files.sync(segment)
            except OSError as error:
                self._failed(error, segment.name)
        with self._lock:
            for segment in segments:
                self._unpin(segment)

    # Reading

    def get(
        self, identity: KvIdentity, hashes: Sequence[bytes], into: Sequence[Sequence[memoryview]], now_s: float
    ) -> list[StoredForm]:
        """Reads the leading blocks into the caller's buffers; answers with the forms of those that are there and verified.

        ``into[i]`` is room for block ``i`` in the shape of ``StoredBlock.pages``, for at least its ``payload_bytes``; room
        of whole 64 KiB pages is filled up to the end of the last page. Reading stops before a block without enough room.
        What lies in the buffers after the answered blocks is undefined. A block that does not verify is dropped, counted
        and told as a finding.
        """
        if not self._enter():
            return []
        try:
            return self._get(identity, hashes, into, now_s)
        finally:
            self._leave()

    def _get(
        self, identity: KvIdentity, hashes: Sequence[bytes], into: Sequence[Sequence[memoryview]], now_s: float
    ) -> list[StoredForm]:
        reads: list[Read] = []
        with self._lock:
            for block, room in zip(self._shelf.leading(identity, hashes), into, strict=False):
                if sum(len(buffer) for buffer in room) < block.payload_bytes or not in_pages(room):
                    break
                if not (reads and reads[-1].goes_on_with(block)):
                    reads.append(Read(block.place, block.first_slot))
                    block.place.pins += 1
                reads[-1].add(block, room)
        verified: list[_Block] = []
        bad: _Block | None = None
        if len(reads) > 1:
            futures = [self._readers.submit(read.run, self._files) for read in reads]
        else:
            futures = [_done(read.run(self._files)) for read in reads]
        for read, future in zip(reads, futures, strict=True):
            if bad is not None and future.cancel():
                continue
            good = future.result()  # waits: it writes into the caller's buffers
            if bad is None:
                verified += read.blocks[:good]
                bad = read.blocks[good] if good < len(read.blocks) else None
        with self._lock:
            if bad is not None and self._shelf.holds(bad):
                self._counts.corrupt += 1
                self._find("corrupt", bad.place.name, f"block of {bad.pages} pages from slot {bad.first_slot} on")
                self._remove([bad])
            for read in reads:
                self._unpin(read.segment)
            self._shelf.use(verified, now_s)
            self._counts.hits += len(verified)
            self._counts.misses += len(hashes) - len(verified)
            self._counts.read_bytes += sum(block.stored_bytes for block in verified)
        return [_form(block) for block in verified]

    # Leaving

    def drop(self, identity: KvIdentity, hashes: Sequence[bytes]) -> Evicted:
        """These blocks, wherever they are in their chains."""
        with self._lock:
            return self._remove([block for hash in hashes if (block := self._shelf.find(identity, hash))])

    def evict(self, kv_signature: str, ratio: float) -> Evicted:
        """Drops this share (0 to 1) of the bytes of one ``KvSignature.model``, least recently used first, hot ones too.

        Exact to a block: at least the share, and less than it without the last block dropped.
        """
        with self._lock:
            evicted = self._remove(self._shelf.share(kv_signature, ratio))
            self._counts.evicted += evicted.blocks
            return evicted

    def sweep(self, now_s: float, blocks_max: int = 1024) -> int:
        """Drops blocks that were idle for too long; at most so many per call. Returns how many."""
        with self._lock:
            if self._closed:
                return 0
            swept = self._remove(self._shelf.idle(now_s, blocks_max)).blocks
            self._counts.idled += swept
            return swept

    def _make_room(self, wanted_bytes: int, now_s: float) -> Refusal | None:
        """Under the lock. Evicts nothing where that would not be enough."""
        if wanted_bytes > self._bytes_max:
            return Refusal.FULL
        for _ in range(_ROUNDS_MAX):
            over = self._bytes_used + wanted_bytes - self._bytes_max
            if over <= 0:
                return None
            asked = over
            while True:
                victims = self._shelf.victims(asked, now_s)
                if self._gain(victims) >= over:
                    break
                self._shelf.keep(victims)
                if asked >= self._shelf.stored_bytes:
                    oldest = next(iter(self._shelf), None)
                    return Refusal.HOT if oldest is None or self._shelf.is_hot(oldest, now_s) else Refusal.FULL
                asked = min(2 * asked, self._shelf.stored_bytes)
            before = self._bytes_used
            self._counts.evicted += self._remove(victims).blocks
            if self._bytes_used >= before:
                break
        return Refusal.FULL

    def _gain(self, blocks: Iterable[_Block]) -> int:
        """Room that comes free without these blocks: of their pages, and of segments that they leave empty."""
        left: dict[str, int] = {}
        gain = 0
        for block in blocks:
            segment = block.place
            left[segment.name] = left.get(segment.name, segment.blocks) - 1
            gain += block.stored_bytes if self._files.punches else 0
            if not left[segment.name]:
                gain += PAGE_BYTES if self._files.punches else segment.bytes_used
        return gain

    def _remove(self, blocks: Iterable[_Block]) -> Evicted:
        """Under the lock."""
        gone: dict[str, list[_Block]] = {}
        count = size = 0
        for block in blocks:
            if self._shelf.remove(block):
                gone.setdefault(block.place.name, []).append(block)
                count += 1
                size += block.stored_bytes
        for of_one in gone.values():
            self._erase(of_one[0].place, _runs(of_one), len(of_one))
        return Evicted(count, size)

    def _erase(self, segment: Segment, runs: Sequence[tuple[int, int]], blocks: int) -> None:
        """Under the lock: these slots hold nothing any more."""
        segment.blocks -= blocks
        if not segment.blocks and not segment.pins:
            self._forget(segment)
            return
        try:
            self._files.erase(segment, runs)
        except OSError as error:
            self._failed(error, segment.name)
            return
        if self._files.punches:
            pages = sum(slots for _, slots in runs)
            segment.pages -= pages
            self._bytes_used -= pages * PAGE_BYTES

    def _unpin(self, segment: Segment) -> None:
        """Under the lock."""
        segment.pins -= 1
        if not segment.pins and not segment.blocks:
            self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        """Under the lock: nothing is in it any more."""
        if self._segments.pop(segment.name, None) is None:
            return
        self._bytes_used -= segment.bytes_used
        key = (segment.header.identity.key, segment.header.codec)
        if self._growing.get(key) is segment:
            del self._growing[key]
        self._unlink(segment.name)

    def _unlink(self, name: str) -> None:
        try:
            self._files.unlink(name)
        except OSError as error:
            self._failed(error, name)

    # Telling

    def take_findings(self) -> list[Finding]:
        """What was found since the last call; at most 256 are kept between calls."""
        with self._lock:
            found = list(self._findings)
            self._findings.clear()
            return found

    def stats(self) -> StoreStats:
        with self._lock:
            by_model: dict[str, Evicted] = {}
            for owner in self._shelf.owners():
                before = by_model.get(owner.identity.signature.model, Evicted(0, 0))
                after = Evicted(before.blocks + len(owner.blocks), before.bytes + owner.stored_bytes)
                by_model[owner.identity.signature.model] = after
            counts = self._counts
            return StoreStats(
                bytes_used=self._bytes_used,
                bytes_max=self._bytes_max,
                blocks=len(self._shelf),
                segments=len(self._segments),
                by_model=by_model,
                hits=counts.hits,
                misses=counts.misses,
                corrupt=counts.corrupt,
                evicted=counts.evicted,
                idled=counts.idled,
                refused=dict(counts.refused),
                set_aside=counts.set_aside,
                written_bytes=counts.written_bytes,
                read_bytes=counts.read_bytes,
                opening_read_bytes=self._files.read_bytes,
                write_left_bytes=self._budget.left_bytes,
                read_only=self._read_only,
            )

    def _find(self, kind: str, file: str, detail: str) -> None:
        with self._lock:
            self._findings.append(Finding(kind, file, detail))

    def _failed(self, error: OSError, name: str) -> Refusal:
        refused = _REFUSALS.get(error.errno or 0, Refusal.IO_ERROR)
        with self._lock:
            self._read_only = self._read_only or refused is Refusal.READ_ONLY
            self._find(refused.value, name, _why(error))
        return refused

    # Opening and closing

    def _enter(self) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._busy += 1
            return True

    def _leave(self) -> None:
        with self._lock:
            self._busy -= 1
            self._quiet.notify_all()

    def close(self) -> None:
        """Waits for calls under way, syncs, gives the directory free. More calls do nothing; later puts are refused."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._quiet.wait_for(lambda: not self._busy, CLOSE_S_MAX):
                return  # a disk that hangs: descriptors in use must not be closed, and go with the process
        self._writers.shutdown()
        self._syncer.shutdown()
        self._readers.shutdown()
        self._sync()
        self._budget.save()
        self._files.close()


_ROUNDS_MAX = 64
_REFUSALS = {
    errno.ENOSPC: Refusal.NO_SPACE,
    errno.EDQUOT: Refusal.NO_SPACE,
    errno.EFBIG: Refusal.NO_SPACE,
    errno.EROFS: Refusal.READ_ONLY,
    errno.EACCES: Refusal.READ_ONLY,
    errno.EPERM: Refusal.READ_ONLY,
}


@dataclass(slots=True)
class _Counts:
    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    evicted: int = 0
    idled: int = 0
    set_aside: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    refused: dict[str, int] = field(default_factory=dict)


def _form(block: _Block) -> StoredForm:
    return StoredForm(block.place.header.codec, block.payload_bytes, block.pages)


def _runs(blocks: Sequence[_Block]) -> list[tuple[int, int]]:
    """Slots of blocks of one segment: first and number of each run without a gap."""
    runs: list[tuple[int, int]] = []
    for block in sorted(blocks, key=lambda one: one.first_slot):
        if runs and sum(runs[-1]) == block.first_slot:
            runs[-1] = (runs[-1][0], runs[-1][1] + block.pages)
        else:
            runs.append((block.first_slot, block.pages))
    return runs


def _done(value: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(value)
    return future


def _why(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()
