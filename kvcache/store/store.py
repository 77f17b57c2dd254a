"""The tier on disk (L2, KVC-1): blocks in ``.kvc`` files of one directory, verified when they are read.

Public face; ``segments`` does the IO, ``kvc_format`` is the layout, ``core.shelf`` what is known in memory.

What is on the disk when: pages are written before their entries, and entries decide whether a block is there, so a kill
loses at most the batch that it cut off. A loss of power loses at most twice ``UNSYNCED_BYTES_MAX`` and what is under way:
after so many bytes an ``fdatasync`` begins, in a thread of its own; ``sync`` and ``close`` do one too. Nothing relies on it:
a page that is not what its entry says is dropped when it is read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from kvcache.core.identity import PAGE_BYTES, KvIdentity
from kvcache.core.shelf import Block, Policy, Rules, Shelf, pages_of
from kvcache.store.chunks import CHUNK_PAGES, Read, Write, in_pages, payload_of
from kvcache.store.format import BlockEntry, encode_entries
from kvcache.store.kept_budget import KeptBudget
from kvcache.store.rooms import Rooms, why
from kvcache.store.segments import Segment, SegmentFiles
from kvcache.store.segments import StoreLocked as StoreLocked
from kvcache.store.segments import StoreRefused as StoreRefused
from kvcache.store.stored import Evicted as Evicted
from kvcache.store.stored import Finding as Finding
from kvcache.store.stored import PutResult as PutResult
from kvcache.store.stored import Refusal as Refusal
from kvcache.store.stored import StoredBlock as StoredBlock
from kvcache.store.stored import StoredForm as StoredForm
from kvcache.store.stored import StoreStats as StoreStats
from kvcache.store.tidying import tidy

UNSYNCED_BYTES_MAX = 64 * 2**20
CLOSE_S_MAX = 60.0
_THREADS = 2
_CHUNKS_AHEAD_MAX = 3
_REMOVED_AT_ONCE = 256

_Block = Block[Segment]


class KvStore:
    """See the module. Every method may be called from any thread; calls of several threads overlap where they do IO.

    ``now_s`` is wall clock time everywhere (it is written to disk): seconds since 1970. Uses are not written down: at an
    opening, blocks that were written longer ago than ``hot_s`` count as used that long ago, in the order of their writing.
    """

    def __init__(self, rooms: Rooms) -> None:
        """By ``open`` only."""
        self._rooms = rooms
        self._quiet = threading.Condition(rooms.lock)
        self._busy = 0
        self._closed = False
        self._writers = ThreadPoolExecutor(_THREADS, "kv-store-write")
        self._readers = ThreadPoolExecutor(_THREADS, "kv-store-read")
        self._syncer = ThreadPoolExecutor(1, "kv-store-sync")
        self._syncing: Future[None] | None = None
        self._unsynced_bytes = 0

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
            rooms = Rooms(files, shelf, KeptBudget(files, write_bytes_per_day_max, now_s), bytes_max)
            rooms.take_over(now_s)
        except OSError as error:
            files.close()
            raise StoreRefused(f"KV directory {directory}: {why(error)}; give another directory") from None
        except BaseException:
            files.close()
            raise
        return cls(rooms)

    # Looking up

    def leading(self, identity: KvIdentity, hashes: Sequence[bytes]) -> int:
        """How many blocks from the first hash on are here. Reads nothing, counts as no use."""
        with self._rooms.lock:
            return len(self._rooms.shelf.leading(identity, hashes))

    def forms(self, identity: KvIdentity, hashes: Sequence[bytes]) -> list[StoredForm]:
        """The forms of those leading blocks, so that a reader can make room."""
        with self._rooms.lock:
            return [_form(block) for block in self._rooms.shelf.leading(identity, hashes)]

    def chain(self, identity: KvIdentity, head: bytes) -> list[bytes]:
        """The hashes from the first block to ``head``, or from the earliest ancestor that is here without a gap.

        Whole if ``parent(identity, hashes[0])`` is ``b""``. Empty where ``head`` is not here.
        """
        with self._rooms.lock:
            return self._rooms.shelf.chain(identity, head)

    def parent(self, identity: KvIdentity, hash: bytes) -> bytes | None:
        """``b""`` for a first block; ``None`` for one that is not here."""
        with self._rooms.lock:
            block = self._rooms.shelf.find(identity, hash)
            return block.parent if block else None

    def held(self) -> list[tuple[KvIdentity, list[bytes]]]:
        """All blocks of each identity, in the order in which they came: for an index that is built anew."""
        with self._rooms.lock:
            return [(owner.identity, list(owner.blocks)) for owner in self._rooms.shelf.owners()]

    def touch(self, identity: KvIdentity, hashes: Sequence[bytes], now_s: float) -> int:
        """These blocks, of one chain in its order, are used now; how many of them are here."""
        with self._rooms.lock:
            found = [block for hash in hashes if (block := self._rooms.shelf.find(identity, hash))]
            self._rooms.shelf.use(found, now_s)
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
                    step.start(self._rooms.files, None if not todo and not under_way else self._writers)
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
        with self._rooms.lock:
            self._rooms.shelf.use(kept, now_s)
            held = next((index for index, block in enumerate(kept) if not self._rooms.shelf.holds(block)), len(kept))
            if refused:
                count = self._rooms.counts.refused
                count[refused.value] = count.get(refused.value, 0) + len(blocks) - len(kept)
        return PutResult(held, written, written_bytes, refused)

    def _next_step(
        self, identity: KvIdentity, todo: deque[StoredBlock], now_s: float
    ) -> tuple[Write | _Block | None, Refusal | None]:
        """A block that is here already, or new ones for slots next to each other of one segment, which are reserved."""
        with self._rooms.lock:
            known = self._rooms.shelf.find(identity, todo[0].hash)
            if known:
                todo.popleft()
                self._rooms.shelf.use([known], now_s)
                return known, None
            write: Write | None = None
            while todo and (write is None or write.pages < CHUNK_PAGES):
                block = todo[0]
                if write and self._rooms.shelf.find(identity, block.hash):
                    break
                payload_bytes = payload_of(block)
                if payload_bytes is None:
                    return write, Refusal.INVALID
                pages = pages_of(payload_bytes)
                if write and not self._rooms.fits(write.segment, identity, block.codec, pages):
                    break
                place = self._rooms.reserve(identity, block.codec, pages, now_s)
                if isinstance(place, Refusal):
                    return write, place
                segment, slot = place
                if write is None:
                    write = Write(segment, slot)
                    segment.pins += 1
                write.add(block, payload_bytes, pages)
                todo.popleft()
            return write, None

    def _finish(self, write: Write, now_s: float, kept: list[_Block], *, give_up: bool) -> Refusal | None:
        """Waits until the pages are written, then writes their entries: from then on the blocks are there."""
        segment = write.segment
        refused: Refusal | None = None
        entries: list[BlockEntry] = []
        try:
            checksums = write.wait()
            if not give_up:
                entries = write.entries(checksums, [now_s] * len(write.blocks))
                self._rooms.files.write_entries(
                    segment, write.first_slot, b"".join(encode_entries(segment.header, e) for e in entries)
                )
        except OSError as error:
            refused = self._rooms.failed(error, segment.name)
            entries = []
        with self._rooms.lock:
            if not entries:
                self._rooms.give_up(write)
            for entry in entries:
                other = self._rooms.shelf.find(segment.header.identity, entry.hash)
                if other:  # another thread wrote it meanwhile
                    self._rooms.erase(segment, [(entry.first_slot, entry.pages)], 0)
                kept.append(other or self._rooms.shelve(segment, entry, now_s))
                segment.blocks += other is None
            self._rooms.unpin(segment)
            if entries:
                self._rooms.read_only = False
                self._rooms.counts.written_bytes += write.pages * PAGE_BYTES
                self._unsynced_bytes += write.pages * PAGE_BYTES
            due = self._unsynced_bytes >= UNSYNCED_BYTES_MAX
        if due:
            self._sync_behind()
        return refused

    def sync(self) -> None:
        """What was put is on the disk when this returns; where the disk refuses, a finding tells."""
        if self._enter():
            try:
                with self._rooms.lock:
                    before = self._syncing
                self._sync()
                if before:
                    before.result()
            finally:
                self._leave()

    def _sync_behind(self) -> None:
        """Syncs while more is written; waits for the sync before, so that what is not synced stays bounded."""
        with self._rooms.lock:
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
        with self._rooms.lock:
            self._unsynced_bytes = 0
            segments = [segment for segment in self._rooms.segments.values() if segment.unsynced]
            for segment in segments:
                segment.pins += 1
            made, self._rooms.made = self._rooms.made, False
        for segment in segments:
            try:
                self._rooms.files.sync(segment)
            except OSError as error:
                self._rooms.failed(error, segment.name)
        if made:
            try:
                self._rooms.files.sync_directory()
            except OSError as error:
                self._rooms.failed(error, ".")
        with self._rooms.lock:
            for segment in segments:
                self._rooms.unpin(segment)

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
        with self._rooms.lock:
            for block, room in zip(self._rooms.shelf.leading(identity, hashes), into, strict=False):
                if sum(len(buffer) for buffer in room) < block.payload_bytes or not in_pages(room):
                    break
                if not (reads and reads[-1].goes_on_with(block)):
                    reads.append(Read(block.place, block.first_slot))
                    block.place.pins += 1
                reads[-1].add(block, room)
        verified: list[_Block] = []
        bad: tuple[_Block, Segment, int] | None = None
        futures: list[Future[int]] = []
        files = self._rooms.files
        try:
            alone = len(reads) == 1
            futures.extend(_done(read, files) if alone else self._readers.submit(read.run, files) for read in reads)
            for read, future in zip(reads, futures, strict=True):
                if bad is not None and future.cancel():
                    continue
                good = future.result()
                if bad is None:
                    verified += read.blocks[:good]
                    bad = read.at(good) if good < len(read.blocks) else None
        finally:
            wait(futures)  # whatever failed: they write into buffers that are the caller's again after this
            with self._rooms.lock:
                for read in reads:
                    self._rooms.unpin(read.segment)
        with self._rooms.lock:
            if bad is not None:
                self._rooms.corrupt(*bad)
            self._rooms.shelf.use(verified, now_s)
            self._rooms.counts.hits += len(verified)
            self._rooms.counts.misses += len(hashes) - len(verified)
            self._rooms.counts.read_bytes += sum(block.stored_bytes for block in verified)
        return [_form(block) for block in verified]

    # Leaving

    def drop(self, identity: KvIdentity, hashes: Sequence[bytes]) -> Evicted:
        """These blocks, wherever they are in their chains."""
        with self._rooms.lock:
            leaving = [block for hash in hashes if (block := self._rooms.shelf.find(identity, hash))]
        return self._remove(leaving)

    def evict(self, kv_signature: str, ratio: float) -> Evicted:
        """Drops this share (0 to 1) of the bytes of one ``KvSignature.model``, least recently used first, hot ones too.

        Exact to a block: at least the share, and less than it without the last block dropped.
        """
        with self._rooms.lock:
            leaving = self._rooms.shelf.share(kv_signature, ratio)
        evicted = self._remove(leaving)
        with self._rooms.lock:
            self._rooms.counts.evicted += evicted.blocks
        return evicted

    def _remove(self, leaving: Sequence[_Block]) -> Evicted:
        """Some at a time: others that want the lock get in between, while the file system frees the room."""
        blocks = size = 0
        for start in range(0, len(leaving), _REMOVED_AT_ONCE):
            with self._rooms.lock:
                if self._closed:
                    break
                removed = self._rooms.remove(leaving[start : start + _REMOVED_AT_ONCE])
            blocks += removed.blocks
            size += removed.bytes
        return Evicted(blocks, size)

    def sweep(self, now_s: float, blocks_max: int = 1024) -> int:
        """Drops blocks that were idle for too long, at most so many per call; returns how many.

        Then it moves what is left of segments that are almost empty together, so that the store does not become a heap of
        files of a block each: at most ``tidying.SEGMENTS_MAX`` per call.
        """
        if not self._enter():
            return 0
        try:
            with self._rooms.lock:
                idle = self._rooms.shelf.idle(now_s, blocks_max)
            swept = self._remove(idle).blocks
            with self._rooms.lock:
                self._rooms.counts.idled += swept
            tidy(self._rooms, now_s)
            return swept
        finally:
            self._leave()

    # Telling

    def take_findings(self) -> list[Finding]:
        """What was found since the last call; at most 256 are kept between calls."""
        with self._rooms.lock:
            found = list(self._rooms.findings)
            self._rooms.findings.clear()
            return found

    def stats(self) -> StoreStats:
        with self._rooms.lock:
            by_model: dict[str, Evicted] = {}
            for owner in self._rooms.shelf.owners():
                before = by_model.get(owner.identity.signature.model, Evicted(0, 0))
                after = Evicted(before.blocks + len(owner.blocks), before.bytes + owner.stored_bytes)
                by_model[owner.identity.signature.model] = after
            counts = self._rooms.counts
            return StoreStats(
                bytes_used=self._rooms.bytes_used,
                bytes_max=self._rooms.bytes_max,
                blocks=len(self._rooms.shelf),
                segments=len(self._rooms.segments),
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
                opening_read_bytes=self._rooms.files.read_bytes,
                write_left_bytes=self._rooms.budget.left_bytes,
                read_only=self._rooms.read_only,
            )

    # Opening and closing

    def _enter(self) -> bool:
        with self._rooms.lock:
            if self._closed:
                return False
            self._busy += 1
            return True

    def _leave(self) -> None:
        with self._rooms.lock:
            self._busy -= 1
            self._quiet.notify_all()

    def close(self) -> None:
        """Waits for calls under way, syncs, gives the directory free. More calls do nothing; later puts are refused."""
        with self._rooms.lock:
            if self._closed:
                return
            self._closed = True
            if not self._quiet.wait_for(lambda: not self._busy, CLOSE_S_MAX):
                return  # a disk that hangs: descriptors in use must not be closed, and go with the process
        self._writers.shutdown()
        self._syncer.shutdown()
        self._readers.shutdown()
        self._sync()
        self._rooms.budget.save()
        self._rooms.files.close()


def _form(block: _Block) -> StoredForm:
    return StoredForm(block.place.header.codec, block.payload_bytes, block.pages)


def _done(read: Read, files: SegmentFiles) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(read.run(files))
    return future
