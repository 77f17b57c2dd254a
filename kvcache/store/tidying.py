"""What is left in segments that are almost empty is moved together.

A segment whose blocks have mostly left costs little room where holes can be punched, but its header and entries are read at
every opening, and its last blocks are often the most used: beginnings of prompts that many share. They are written once more
(the write budget pays) and the segment is removed. So an opening reads at most 1 % of what is stored.
"""

from __future__ import annotations

import mmap

from kvcache.core.identity import PAGE_BYTES
from kvcache.core.shelf import Block
from kvcache.store.chunks import Read, Write
from kvcache.store.format import ENTRY_BYTES, HEADER_BYTES, BlockEntry, encode_entries
from kvcache.store.rooms import Rooms, runs
from kvcache.store.segments import Segment
from kvcache.store.stored import Refusal, StoredBlock

SEGMENTS_MAX = 8
"""Per call; each has at most 6 MiB of pages left."""
READ_SHARE_MAX = 0.01


def tidy(rooms: Rooms, now_s: float) -> int:
    """Empties some of the segments that are almost empty. Returns how many."""
    with rooms.lock:
        if rooms.files.read_only or not rooms.files.punches:
            return 0
        left = rooms.budget.left_at(now_s)
        sparse = [
            segment
            for segment in rooms.segments.values()
            if is_sparse(segment) and (left is None or left >= segment.pages * PAGE_BYTES)
        ][:SEGMENTS_MAX]
    return sum(_empty(rooms, segment, now_s) for segment in sparse)


def is_sparse(segment: Segment) -> bool:
    """Whether an opening reads too much for what it has; never so where it is full to the slot that it has come to."""
    read_bytes = HEADER_BYTES + ENTRY_BYTES * segment.next_slot
    return not segment.pins and read_bytes > READ_SHARE_MAX * segment.bytes_used


def _empty(rooms: Rooms, segment: Segment, now_s: float) -> bool:
    try:
        scan = rooms.files.entries(segment)
    except OSError as error:
        with rooms.lock:
            rooms.failed(error, segment.name)
        return False
    with rooms.lock:
        if rooms.segments.get(segment.name) is not segment or not is_sparse(segment):
            return False
        key = (segment.header.identity.key, segment.header.codec)
        if rooms.growing.get(key) is segment:
            del rooms.growing[key]
        found = [rooms.shelf.find(segment.header.identity, entry.hash) for entry in scan.blocks]
        blocks = [block for block in found if block is not None and block.place is segment]
        segment.pins += 1
    try:
        _move(rooms, segment, blocks, now_s)
    finally:
        with rooms.lock:
            rooms.unpin(segment)
    return True


def _move(rooms: Rooms, segment: Segment, blocks: list[Block[Segment]], now_s: float) -> None:
    writes: list[Write] = []
    moved: list[list[Block[Segment]]] = []
    for block in blocks:
        room = memoryview(mmap.mmap(-1, block.stored_bytes))
        read = Read(segment, block.first_slot)
        read.add(block, [room])
        if not read.run(rooms.files):
            with rooms.lock:
                rooms.corrupt(*read.at(0))
            continue
        stored = StoredBlock(block.hash, block.parent, [room[: block.payload_bytes]], segment.header.codec)
        with rooms.lock:
            if not rooms.shelf.holds(block):
                continue
            place = rooms.reserve(block.identity, stored.codec, block.pages, now_s)
            if isinstance(place, Refusal):
                break
            if not writes or not writes[-1].goes_on_at(*place):
                writes.append(Write(*place))
                moved.append([])
                place[0].pins += 1
            writes[-1].add(stored, block.payload_bytes, block.pages)
            moved[-1].append(block)
    for write, of_it in zip(writes, moved, strict=True):
        _finish(rooms, segment, write, of_it)


def _finish(rooms: Rooms, old: Segment, write: Write, blocks: list[Block[Segment]]) -> None:
    new = write.segment
    entries: list[BlockEntry] = []
    try:
        write.start(rooms.files, None)
        entries = write.entries(write.wait(), [block.used_s for block in blocks])
        rooms.files.write_entries(new, write.first_slot, b"".join(encode_entries(new.header, one) for one in entries))
    except OSError as error:
        entries = []
        with rooms.lock:
            rooms.failed(error, new.name)
    with rooms.lock:
        if not entries:
            rooms.give_up(write)
        gone = runs([block for block in blocks if rooms.shelf.holds(block)]) if entries else []
        stayed = 0
        for block, entry in zip(blocks, entries, strict=False):
            if rooms.shelf.holds(block):
                block.place, block.first_slot = new, entry.first_slot
                new.blocks += 1
                stayed += 1
            else:
                rooms.erase(new, [(entry.first_slot, entry.pages)], 0)
        if stayed:
            rooms.counts.written_bytes += write.pages * PAGE_BYTES
            rooms.erase(old, gone, stayed)
        rooms.unpin(new)
