"""The store on disk: real files, real faults. What it serves is what was put, or it serves nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcache.store.segments
import kvcache.store.store
from kvcache.core.identity import PAGE_BYTES
from kvcache.core.shelf import unit_of
from kvcache.store.chunks import CHUNK_PAGES, Read
from kvcache.store.format import DATA_OFFSET, ENTRY_BYTES, HEADER_BYTES, SEGMENT_BYTES_MAX, Header, entry_offset, page_offset
from kvcache.store.store import Evicted, KvStore, PutResult, Refusal, StoredBlock, StoreLocked, StoreRefused
from tests.core.kv_store_world import (
    NOW_S,
    aligned,
    chain,
    identity,
    name,
    names,
    opened,
    payload,
    payloads,
    segments,
    served,
)

BLOCK_PAGES = 3
BLOCK_ROOM = BLOCK_PAGES * PAGE_BYTES
WHO = identity()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KvStore]:
    store = opened(tmp_path / "kv")
    yield store
    store.close()


def kinds(store: KvStore) -> list[str]:
    return [finding.kind for finding in store.take_findings()]


def flip(path: Path, offset: int, mask: int = 0x10) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


# What is put is served


def test_what_was_put_is_served_in_this_life_and_the_next(tmp_path: Path) -> None:
    """KVC-6: a prefix in L2 survives a restart; the bytes are the same."""
    blocks = chain(50)
    with contextlib.closing(opened(tmp_path)) as store:
        assert store.put(WHO, blocks, NOW_S) == PutResult(50, 50, 50 * BLOCK_ROOM)
        assert served(store, WHO, names(blocks)) == payloads(blocks)
    with contextlib.closing(opened(tmp_path)) as store:
        assert served(store, WHO, names(blocks)) == payloads(blocks)
        assert kinds(store) == []


@pytest.mark.parametrize("size", [1, 511, 4096, PAGE_BYTES, PAGE_BYTES + 1, 5 * PAGE_BYTES - 4096, 200 * PAGE_BYTES])
def test_blocks_of_any_size_come_back(store: KvStore, size: int) -> None:
    """Payloads of any length, also those that O_DIRECT cannot take as they are, in buffers of pages or in one."""
    data = payload(1, size)
    whole = aligned(data)
    pages = [whole[start : start + PAGE_BYTES] for start in range(0, size, PAGE_BYTES)]
    unaligned = memoryview(b"x" + data)[1:]
    put = [StoredBlock(name(1), b"", [whole]), StoredBlock(name(2), name(1), pages), StoredBlock(name(3), b"", [unaligned])]
    assert store.put(WHO, put, NOW_S).kept == 3
    assert served(store, WHO, [name(1), name(2), name(3)]) == [data] * 3
    arena = [aligned(bytes(PAGE_BYTES)) for _ in pages]
    assert len(store.get(WHO, [name(2)], [arena], NOW_S)) == 1 and b"".join(arena)[:size] == data
    assert store.get(WHO, [name(1)], [[memoryview(bytearray(size - 1))]], NOW_S) == [], "not enough room"
    room = bytearray(size + 1)
    assert len(store.get(WHO, [name(1)], [[memoryview(room)[1:]]], NOW_S)) == 1 and room[1:] == data


def test_what_is_left_of_a_last_page_holds_nobodys_bytes(tmp_path: Path) -> None:
    """O3: a page is written from memory that others used before; only the block's own bytes reach the disk."""
    room = aligned(b"\xee" * (2 * PAGE_BYTES))
    with contextlib.closing(opened(tmp_path)) as store:
        for index, size in enumerate((PAGE_BYTES + 4096, PAGE_BYTES + 7)):
            assert store.put(WHO, [StoredBlock(name(index), b"", [room[:size]])], NOW_S).kept == 1
    (path,) = segments(tmp_path)
    data = path.read_bytes()
    assert data[page_offset(0) :].count(0xEE) == 2 * PAGE_BYTES + 4096 + 7


def test_leading_blocks_only(store: KvStore) -> None:
    """A prefix ends at the first block that is not there."""
    blocks = chain(6)
    store.put(WHO, blocks, NOW_S)
    store.drop(WHO, [blocks[3].hash])
    assert store.leading(WHO, names(blocks)) == 3
    assert served(store, WHO, names(blocks)) == payloads(blocks)[:3]
    assert store.chain(WHO, blocks[5].hash) == names(blocks)[4:] and store.chain(WHO, blocks[3].hash) == []
    assert store.chain(WHO, blocks[2].hash) == names(blocks)[:3]
    assert (store.parent(WHO, blocks[0].hash), store.parent(WHO, blocks[3].hash)) == (b"", None)


def test_parents_in_a_circle_end(store: KvStore) -> None:
    """Blocks whose parents form a circle, which no chain of hashes can, are no chain."""
    circle = [StoredBlock(name(1), name(2), [aligned(b"a")]), StoredBlock(name(2), name(1), [aligned(b"b")])]
    assert store.put(WHO, circle, NOW_S).kept == 2
    assert store.chain(WHO, name(1)) == []


def test_a_block_is_written_once(store: KvStore) -> None:
    """Blocks that are there are used, not written again; the rest of the batch is."""
    store.put(WHO, chain(3), NOW_S)
    assert store.put(WHO, chain(5), NOW_S) == PutResult(5, 2, 2 * BLOCK_ROOM)
    assert store.stats().blocks == 5


def test_codecs_lie_apart_and_come_back_with_their_name(store: KvStore) -> None:
    """KVC-5: the codec is told with each block; a chain may change it."""
    blocks = [*chain(2, codec="none"), *chain(2, size=100, codec="int4g32", start=2)]
    store.put(WHO, blocks, NOW_S)
    forms = store.forms(WHO, names(blocks))
    assert [(form.codec, form.payload_bytes, form.pages) for form in forms[1:3]] == [
        ("none", 2 * PAGE_BYTES + 4096, 3),
        ("int4g32", 100, 1),
    ]
    assert served(store, WHO, names(blocks)) == payloads(blocks)


def test_tenants_and_models_never_meet(store: KvStore) -> None:
    """O3, both halves: another tenant's or model's block is not there under the same hash, one's own is."""
    blocks = chain(2)
    store.put(WHO, blocks, NOW_S)
    for other in (identity(tenant="other"), identity("model-b")):
        assert store.leading(other, names(blocks)) == 0 and served(store, other, names(blocks)) == []
        mine = chain(2, of=other.weights_hash)
        theirs = [StoredBlock(a.hash, a.parent, b.pages) for a, b in zip(blocks, mine, strict=True)]
        store.put(other, theirs, NOW_S)
        assert served(store, other, names(blocks)) == payloads(mine)
    assert served(store, WHO, names(blocks)) == payloads(blocks)


def test_segments_are_full_before_the_next(tmp_path: Path) -> None:
    """960 slots a file, also over a restart: a store does not fall into small files."""
    for start in range(0, 40, 8):
        with contextlib.closing(opened(tmp_path)) as store:
            assert store.put(WHO, chain(8, size=40 * PAGE_BYTES, start=start), NOW_S).kept == 8
    assert [path.stat().st_size for path in segments(tmp_path)].count(SEGMENT_BYTES_MAX) == 1
    assert len(segments(tmp_path)) == 2


def test_forms_that_cannot_be_stored_are_refused_not_raised(store: KvStore) -> None:
    """A refusal in the middle of a batch is a value; what came before it is kept."""
    good = chain(1)
    for bad in (
        StoredBlock(name(1), name(0), []),
        StoredBlock(b"short", name(0), [aligned(b"x")]),
        StoredBlock(name(1), name(0), [aligned(b"x" * 100), aligned(b"y")]),
        StoredBlock(name(1), name(0), [aligned(b"x")], "a" * 25),
        StoredBlock(name(1), name(0), [memoryview(bytes(961 * PAGE_BYTES))]),
    ):
        assert store.put(WHO, [*good, bad, *chain(1, start=2)], NOW_S).kept == 1
        assert store.put(WHO, [*good, bad, *chain(1, start=2)], NOW_S).refused is Refusal.INVALID
    assert store.stats().blocks == 1


# The directory


def test_one_store_per_directory(tmp_path: Path) -> None:
    """The second opener is told at once and in one line; when the first has gone, it gets in."""
    with (
        contextlib.closing(opened(tmp_path)),
        pytest.raises(StoreLocked, match="used by another process; stop it") as caught,
    ):
        opened(tmp_path)
    assert "\n" not in str(caught.value)
    opened(tmp_path).close()


def test_only_its_user_may_look_in(tmp_path: Path) -> None:
    """Mode 0700 for the directory, 0600 for all in it; a directory with other things in it is left alone."""
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    shared.chmod(0o755)
    (shared / "thesis.txt").write_text("mine")
    with pytest.raises(StoreRefused, match=r"open to others and holds thesis\.txt"):
        opened(shared)
    assert shared.stat().st_mode & 0o777 == 0o755
    own = tmp_path / "own"
    own.mkdir()
    own.chmod(0o755)
    with contextlib.closing(opened(own, per_day=10**9)) as store:
        store.put(WHO, chain(1), NOW_S)
        store.sync()
    assert own.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in own.iterdir()} == {0o600} and len(list(own.iterdir())) == 2


def test_a_place_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    """One line that says what to do."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreRefused, match="give one that this user may write"):
        opened(tmp_path / "file")


# Damage


@pytest.mark.parametrize("hurt", [0, 3, 7])
def test_a_flipped_bit_in_a_page_is_never_served(tmp_path: Path, hurt: int) -> None:
    """The block and what follows is not served, it is dropped, counted and told; those before it are served."""
    blocks = chain(8)
    with contextlib.closing(opened(tmp_path)) as store:
        store.put(WHO, blocks, NOW_S)
    flip(segments(tmp_path)[0], page_offset(hurt * BLOCK_PAGES + 1) + 77)
    with contextlib.closing(opened(tmp_path)) as store:
        assert store.leading(WHO, names(blocks)) == 8
        assert served(store, WHO, names(blocks)) == payloads(blocks)[:hurt]
        assert (store.stats().corrupt, kinds(store), store.leading(WHO, names(blocks))) == (1, ["corrupt"], hurt)
        assert store.put(WHO, blocks, NOW_S).written == 1 and served(store, WHO, names(blocks)) == payloads(blocks)


def test_a_flipped_bit_in_an_entry_takes_its_block(tmp_path: Path) -> None:
    """The others of the segment are still there."""
    blocks = chain(4)
    with contextlib.closing(opened(tmp_path)) as store:
        store.put(WHO, blocks, NOW_S)
    flip(segments(tmp_path)[0], entry_offset(2 * BLOCK_PAGES + 1) + 5)
    with contextlib.closing(opened(tmp_path)) as store:
        assert kinds(store) == ["torn"]
        assert served(store, WHO, names(blocks)) == payloads(blocks)[:2]
        assert served(store, WHO, names(blocks)[3:]) == payloads(blocks)[3:]
        store.put(WHO, blocks, NOW_S)
        assert len(segments(tmp_path)) == 2, "slots of a file with torn entries are not used again"


def test_room_of_writes_and_drops_that_a_kill_cut_off_comes_back(tmp_path: Path) -> None:
    """Pages without entries, and entries that were erased before their pages, take no room after the next opening."""
    blocks = chain(40, size=3 * PAGE_BYTES)
    with contextlib.closing(opened(tmp_path)) as store:
        store.put(WHO, blocks, NOW_S)
    (path,) = segments(tmp_path)
    with path.open("r+b") as file:
        file.seek(entry_offset(6))
        file.write(bytes(ENTRY_BYTES * 60))
        file.seek(0, os.SEEK_END)
        file.write(os.urandom(20 * PAGE_BYTES))
        file.flush()
        os.fsync(file.fileno())
    assert on_disk(tmp_path) >= 140 * PAGE_BYTES
    with contextlib.closing(opened(tmp_path)) as store:
        assert kinds(store) == [] and store.stats().bytes_used == (2 + 18) * BLOCK_ROOM + PAGE_BYTES
        assert on_disk(tmp_path) <= store.stats().bytes_used
        assert served(store, WHO, names(blocks)) == payloads(blocks)[:2]
        assert served(store, WHO, names(blocks)[22:]) == payloads(blocks)[22:]


@pytest.mark.parametrize(("offset", "kind"), [(0, "damaged"), (8, "version"), (300, "damaged")])
def test_a_file_with_a_wrong_header_is_not_taken_over(tmp_path: Path, offset: int, kind: str) -> None:
    """P2: magic, version or body wrong: nothing of it is served, it is told and removed; other files are served."""
    with contextlib.closing(opened(tmp_path)) as store:
        store.put(WHO, chain(2), NOW_S)
        store.put(identity("model-b"), chain(2, of="b"), NOW_S)
    path = next(path for path in segments(tmp_path) if b"model-b" not in path.read_bytes()[:HEADER_BYTES])
    flip(path, offset)
    with contextlib.closing(opened(tmp_path)) as store:
        assert (kinds(store), store.stats().set_aside) == ([kind], 1)
        assert (
            store.leading(WHO, names(chain(2))) == 0
            and len(served(store, identity("model-b"), names(chain(2, of="b")))) == 2
        )
    assert not path.exists()


def test_a_wrong_models_file_under_this_ones_name_serves_nothing(tmp_path: Path) -> None:
    """P2: the header says whose a file is, its name does not; under a wrong name it is not taken over at all."""
    with contextlib.closing(opened(tmp_path)) as store:
        store.put(WHO, chain(2), NOW_S)
        store.put(identity("model-b"), chain(2, of="b"), NOW_S)
    first, second = segments(tmp_path)
    shutil.move(second, first)
    with contextlib.closing(opened(tmp_path)) as store:
        assert (kinds(store), store.stats().blocks) == (["damaged"], 0)


def test_a_page_of_another_tenant_in_this_ones_file_is_not_served(tmp_path: Path) -> None:
    """O3: pages and entries that are copied between the files of two tenants are no blocks of the other."""
    other = identity(tenant="other")
    blocks = chain(2)
    with contextlib.closing(opened(tmp_path)) as store:
        store.put(WHO, blocks, NOW_S)
    mine = segments(tmp_path)[0]
    with contextlib.closing(opened(tmp_path)) as store:
        store.put(other, [StoredBlock(one.hash, one.parent, [aligned(b"secret" * 30_000)]) for one in blocks], NOW_S)
    theirs = next(path for path in segments(tmp_path) if path != mine).read_bytes()
    data = bytearray(mine.read_bytes())
    data[DATA_OFFSET:] = theirs[DATA_OFFSET : len(data)]  # pages alone
    mine.write_bytes(data)
    with contextlib.closing(opened(tmp_path)) as store:
        assert served(store, WHO, names(blocks)) == [] and store.stats().corrupt == 1
    data = bytearray(theirs)
    data[:HEADER_BYTES] = Header(identity=WHO, codec="none", serial=b"12345678", created_s=NOW_S).encoded
    (tmp_path / f"{b'12345678'.hex()}.kvc").write_bytes(data)  # all but the header
    with contextlib.closing(opened(tmp_path)) as store:
        assert store.leading(WHO, names(blocks)) == 0


@pytest.mark.parametrize("keep", [0, 100, HEADER_BYTES + 10, DATA_OFFSET + 100, page_offset(7), page_offset(8) + 4095])
def test_a_truncated_segment_keeps_what_it_still_has(tmp_path: Path, keep: int) -> None:
    """Blocks whose bytes are gone are not there, those before them are; the file goes on being used or is removed."""
    blocks = chain(4)
    with contextlib.closing(opened(tmp_path)) as store:
        store.put(WHO, blocks, NOW_S)
    os.truncate(segments(tmp_path)[0], keep)
    left = max(0, (keep - page_offset(0)) // BLOCK_ROOM)
    with contextlib.closing(opened(tmp_path)) as store:
        assert served(store, WHO, names(blocks)) == payloads(blocks)[:left]
        assert store.put(WHO, blocks, NOW_S).kept == 4 and served(store, WHO, names(blocks)) == payloads(blocks)


def test_files_that_are_not_ours_stay(tmp_path: Path) -> None:
    """A text, a folder, a link and a pipe with the right ending are told, left alone, and do not stop the opening."""
    with contextlib.closing(opened(tmp_path)) as store:
        store.put(WHO, chain(2), NOW_S)
    (tmp_path / "notes.kvc").write_text("my notes" * 1000)
    (tmp_path / "folder.kvc").mkdir()
    (tmp_path / "link.kvc").symlink_to(segments(tmp_path)[0])
    os.mkfifo(tmp_path / "pipe.kvc")
    with contextlib.closing(opened(tmp_path)) as store:
        assert kinds(store) == ["foreign"] * 4 and len(served(store, WHO, names(chain(2)))) == 2
    assert len(list(tmp_path.glob("*.kvc"))) == 5


def test_a_file_that_goes_or_shrinks_while_it_is_used_costs_its_blocks_only(tmp_path: Path) -> None:
    """Somebody cuts a segment under a running store: what it has no longer is a miss, never an error."""
    blocks = chain(6)
    with contextlib.closing(opened(tmp_path)) as store:
        store.put(WHO, blocks, NOW_S)
        os.truncate(segments(tmp_path)[0], page_offset(4 * BLOCK_PAGES) + 100)
        assert served(store, WHO, names(blocks)) == payloads(blocks)[:4]
        assert store.stats().corrupt == 1


# What the disk refuses


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        (errno.ENOSPC, Refusal.NO_SPACE),
        (errno.EDQUOT, Refusal.NO_SPACE),
        (errno.EROFS, Refusal.READ_ONLY),
        (errno.EIO, Refusal.IO_ERROR),
    ],
)
def test_a_disk_that_refuses_pages_leaves_the_store_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, refused: Refusal
) -> None:
    """The refusal is a value with its reason, no part of a block shows, and when the disk is well again puts go on."""
    blocks = chain(48, size=12 * PAGE_BYTES)
    real = os.pwritev
    calls = 0

    def pwritev(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        if offset >= DATA_OFFSET:
            calls += 1
            if calls == 2:
                return real(fd, [buffers[0][:8192]], offset)
            if calls > 2:
                raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset)

    with contextlib.closing(opened(tmp_path)) as store:
        store.put(WHO, blocks[:2], NOW_S)
        monkeypatch.setattr(os, "pwritev", pwritev)
        result = store.put(WHO, blocks, NOW_S)
        monkeypatch.setattr(os, "pwritev", real)
        assert result.refused is refused and 2 <= result.kept < 48
        assert refused.value in kinds(store) and store.stats().refused == {refused.value: 48 - result.kept}
        assert served(store, WHO, names(blocks)) == payloads(blocks)[: result.kept]
        with contextlib.closing(copied(tmp_path, tmp_path.parent / f"{tmp_path.name}-copy")) as killed:
            assert served(killed, WHO, names(blocks)) == payloads(blocks)[: result.kept]
        assert store.put(WHO, blocks, NOW_S).kept == 48 and served(store, WHO, names(blocks)) == payloads(blocks)
        assert store.stats().bytes_used >= on_disk(tmp_path) - 65536


def test_a_full_disk_as_the_kernel_tells_it(tmp_path: Path) -> None:
    """A real limit of the kernel on file size: the batch ends with ``no_space``, what was written is served."""
    blocks = chain(40, size=12 * PAGE_BYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.closing(opened(tmp_path)) as store:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (page_offset(300), hard))
            result = store.put(WHO, blocks, NOW_S)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert result.refused is Refusal.NO_SPACE and 0 < result.kept <= 25
        assert served(store, WHO, names(blocks)) == payloads(blocks)[: result.kept]


def test_a_read_only_disk_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening, reading, sweeping and closing work; puts are refused with their reason; nothing is removed."""
    blocks = chain(3)
    with contextlib.closing(opened(tmp_path, per_day=10**9)) as store:
        store.put(WHO, blocks, NOW_S)
    real = os.open

    def read_only(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, mode, dir_fd=dir_fd)

    def no_unlink(path: str, *, dir_fd: int | None = None) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        patch.setattr(os, "unlink", no_unlink)
        with contextlib.closing(opened(tmp_path, per_day=10**9)) as store:
            assert store.stats().read_only
            assert served(store, WHO, names(blocks)) == payloads(blocks)
            result = store.put(WHO, [*blocks, *chain(1, start=3)], NOW_S)
            assert (result.kept, result.refused) == (3, Refusal.READ_ONLY)
            assert store.sweep(NOW_S + 10_000) == 3
    with contextlib.closing(opened(tmp_path)) as store:
        assert served(store, WHO, names(blocks)) == payloads(blocks)


def test_a_file_system_without_direct_writes_or_holes_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes go through the cache, and room comes back with the whole segment."""
    monkeypatch.setattr(kvcache.store.segments, "_O_DIRECT", 0)
    monkeypatch.setattr(kvcache.store.segments, "_fallocate", None)
    blocks = chain(30, size=40 * PAGE_BYTES)
    with contextlib.closing(opened(tmp_path, bytes_max=SEGMENT_BYTES_MAX + 8 * 41 * PAGE_BYTES, hot_s=0.0)) as store:
        assert store.put(WHO, blocks[:24], NOW_S).kept == 24
        assert served(store, WHO, names(blocks)) == payloads(blocks)[:24]
        store.drop(WHO, names(blocks)[20:24])
        assert store.stats().bytes_used == SEGMENT_BYTES_MAX
        assert store.put(WHO, [*chain(9, size=40 * PAGE_BYTES, of="later")], NOW_S + 1).kept == 9
        assert store.stats().bytes_used <= SEGMENT_BYTES_MAX + 8 * 41 * PAGE_BYTES and store.leading(WHO, names(blocks)) == 0


def on_disk(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in segments(directory))


def copied(directory: Path, to: Path) -> KvStore:
    """The directory as a kill would leave it now, opened again."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(mode=0o700)
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(path, to / path.name)
    return opened(to)


# Room, rules of time, write budget


def test_the_bound_holds_on_the_disk(tmp_path: Path) -> None:
    """``bytes_max`` bounds what the files take, whatever is put; the least recently used leaves, a chain from its end."""
    limit = 20 * BLOCK_ROOM + 2 * PAGE_BYTES
    with contextlib.closing(opened(tmp_path, bytes_max=limit)) as store:
        for turn in range(12):
            blocks = chain(7, of=f"chain-{turn}")
            assert store.put(WHO, blocks, NOW_S + 40 * turn).kept == 7
            store.touch(WHO, names(chain(7, of="chain-0")), NOW_S + 40 * turn)
            assert store.stats().bytes_used <= limit and on_disk(tmp_path) <= limit
        assert store.leading(WHO, names(chain(7, of="chain-0"))) == 7
        assert store.leading(WHO, names(chain(7, of="chain-10"))) == 20 - 14
        assert store.stats().evicted == 12 * 7 - 20


def test_what_was_touched_in_the_last_30_s_is_not_evicted(tmp_path: Path) -> None:
    """KVC-1: when all is hot the put is refused, nothing is lost; 30 s later there is room."""
    with contextlib.closing(opened(tmp_path, bytes_max=5 * BLOCK_ROOM + PAGE_BYTES)) as store:
        blocks = chain(5)
        assert store.put(WHO, blocks, NOW_S).kept == 5
        more = chain(1, of="more")
        assert store.put(WHO, more, NOW_S + 29.9) == PutResult(0, 0, 0, Refusal.HOT)
        assert store.leading(WHO, names(blocks)) == 5
        assert store.put(WHO, more, NOW_S + 30.0).kept == 1
        assert store.leading(WHO, names(blocks)) == 4
        assert store.put(WHO, chain(9, of="long"), NOW_S + 100) == PutResult(5, 5, 5 * BLOCK_ROOM, Refusal.HOT)
        assert store.put(WHO, [StoredBlock(name(9), b"", [aligned(bytes(6 * BLOCK_ROOM))])], NOW_S).refused is Refusal.FULL


def test_what_is_idle_for_10_minutes_leaves(tmp_path: Path) -> None:
    """KVC-1: a sweep takes at most as many as it may, the idlest first; what was read meanwhile stays."""
    with contextlib.closing(opened(tmp_path)) as store:
        old, young = chain(6, of="old"), chain(2, of="young")
        store.put(WHO, old, NOW_S)
        store.put(WHO, young, NOW_S + 300)
        served(store, WHO, names(old)[:2], NOW_S + 500)
        assert store.sweep(NOW_S + 600) == 0
        assert store.sweep(NOW_S + 601, blocks_max=3) == 3 and store.leading(WHO, names(old)) == 3
        assert store.sweep(NOW_S + 601) == 1 and store.sweep(NOW_S + 901) == 2
        assert (store.leading(WHO, names(old)), store.leading(WHO, names(young))) == (2, 0)
        assert store.sweep(NOW_S + 1200) == 2 and segments(tmp_path) == []
        assert store.stats().idled == 8


def test_a_restart_gives_blocks_their_idle_time_again(tmp_path: Path) -> None:
    """Uses are not on disk: after an hour's pause nothing is swept at once; the order of writing is kept."""
    with contextlib.closing(opened(tmp_path)) as store:
        store.put(WHO, chain(2, of="first"), NOW_S)
        store.put(WHO, chain(2, of="second"), NOW_S + 50)
    with contextlib.closing(opened(tmp_path, NOW_S + 3600, bytes_max=3 * BLOCK_ROOM + PAGE_BYTES)) as store:
        assert store.sweep(NOW_S + 3600) == 0
        assert store.leading(WHO, names(chain(2, of="first"))) == 1 and store.leading(WHO, names(chain(2, of="second"))) == 2
        assert store.sweep(NOW_S + 3600 + 601) == 3


def test_a_share_of_one_model_is_evicted_to_the_block(tmp_path: Path) -> None:
    """``evict``: at least the share, not a block more, the least recently used first, no other model."""
    with contextlib.closing(opened(tmp_path)) as store:
        mine, tenant = chain(10), identity(tenant="other")
        store.put(WHO, mine, NOW_S)
        store.put(tenant, chain(10, of="t"), NOW_S + 1)
        store.put(identity("model-b"), chain(4, of="b"), NOW_S - 1)
        assert store.evict("model-a", 0.26) == Evicted(6, 6 * BLOCK_ROOM)
        assert (store.leading(WHO, names(mine)), store.stats().by_model["model-b"].blocks) == (4, 4)
        assert store.evict("model-a", 0.0) == Evicted(0, 0) and store.evict("nobody", 1.0) == Evicted(0, 0)
        assert store.evict("model-a", 1.0) == Evicted(14, 14 * BLOCK_ROOM)
        assert store.stats().by_model == {"model-b": Evicted(4, 4 * BLOCK_ROOM)}
        assert on_disk(tmp_path) <= 4 * BLOCK_ROOM + PAGE_BYTES


def test_dropping_many_blocks_lets_others_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration or an eviction of thousands of blocks holds the store's lock for some of them at a time."""
    monkeypatch.setattr(kvcache.store.store, "_REMOVED_AT_ONCE", 4)
    with contextlib.closing(opened(tmp_path)) as store:
        blocks = chain(10)
        store.put(WHO, blocks, NOW_S)
        at_once: list[int] = []
        remove = store._rooms.remove

        def counted(leaving: Sequence[Any]) -> Evicted:
            at_once.append(len(leaving))
            return remove(leaving)

        monkeypatch.setattr(store._rooms, "remove", counted)
        assert store.drop(WHO, [*names(blocks), b"x" * 16]) == Evicted(10, 10 * BLOCK_ROOM)
        assert at_once == [4, 4, 2] and store.leading(WHO, names(blocks)) == 0


def test_a_days_writes_are_bounded_over_restarts(tmp_path: Path) -> None:
    """SSD life: the budget is a bucket, what is left of it survives a restart and a kill, and fills in its own time."""
    day = 100 * BLOCK_ROOM
    with contextlib.closing(opened(tmp_path, per_day=day)) as store:
        assert store.put(WHO, chain(60), NOW_S).kept == 60
        assert store.stats().write_left_bytes == 40 * BLOCK_ROOM
        with contextlib.closing(copied(tmp_path, tmp_path.parent / f"{tmp_path.name}-copy")) as _:
            pass
        killed = opened(tmp_path.parent / f"{tmp_path.name}-copy", per_day=day)
        left = killed.stats().write_left_bytes
        killed.close()
        assert left is not None and 35 * BLOCK_ROOM <= left <= 40 * BLOCK_ROOM
    with contextlib.closing(opened(tmp_path, per_day=day)) as store:
        result = store.put(WHO, chain(60, of="more"), NOW_S)
        assert (result.kept, result.refused) == (40, Refusal.BUDGET)
        assert store.put(WHO, chain(60), NOW_S) == PutResult(60, 0, 0)
    with contextlib.closing(opened(tmp_path, NOW_S - 9e6, per_day=day)) as store:  # a clock that goes back
        assert store.put(WHO, chain(60, of="more"), NOW_S - 9e6).kept == 40
    with contextlib.closing(opened(tmp_path, NOW_S, per_day=day)) as store:
        assert store.put(WHO, chain(60, of="more"), NOW_S + 8640.5).kept >= 50


def test_a_small_file_is_on_the_disk_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of power gives no spent budget back: the directory is synced once the new file has its name."""
    with contextlib.closing(opened(tmp_path)) as store:
        done: list[str] = []

        def told(name: str, call: Callable[..., None]) -> Callable[..., None]:
            def one(*arguments: Any, **more: Any) -> None:
                done.append(name)
                call(*arguments, **more)

            return one

        for name in ("fdatasync", "rename", "fsync"):
            monkeypatch.setattr(os, name, told(name, getattr(os, name)))
        store._rooms.files.write_small("written.budget", b"{}")
        assert done == ["fdatasync", "rename", "fsync"]


def test_a_budget_file_that_cannot_be_read_counts_as_used_up(tmp_path: Path) -> None:
    """It is told; the store reads on, and the budget fills again in its own time."""
    with contextlib.closing(opened(tmp_path, per_day=10**9)) as store:
        store.put(WHO, chain(1), NOW_S)
    (tmp_path / "written.budget").write_bytes(b"\xff{")
    with contextlib.closing(opened(tmp_path, per_day=10**9)) as store:
        assert kinds(store) == ["budget_file"] and store.put(WHO, chain(2), NOW_S).refused is Refusal.BUDGET
        assert store.put(WHO, chain(2), NOW_S + 3600).kept == 2


def test_a_pipe_in_the_place_of_the_budget_file_holds_nobody_up(tmp_path: Path) -> None:
    """Opening one waits for whoever writes to it; this one counts as a file that cannot be read."""
    os.mkfifo(tmp_path / "written.budget")
    with contextlib.closing(opened(tmp_path, per_day=10**9)) as store:
        assert kinds(store) == ["budget_file"]


class FirstWrittenFirst:
    """A policy of another kind: in order of arrival, but nothing of one name."""

    def __init__(self, pinned: bytes) -> None:
        self.units: dict[bytes, int] = {}
        self.pinned = pinned

    def add(self, unit: bytes, parent: bytes, size_bytes: int, now_s: float) -> None:
        self.units[unit] = size_bytes

    def touch(self, unit: bytes, now_s: float) -> bool:
        return unit in self.units

    def remove(self, unit: bytes) -> None:
        self.units.pop(unit, None)

    def victims(self, bytes_min: int, now_s: float, keep: Callable[[bytes], bool] | None = None) -> list[bytes]:
        found: list[bytes] = []
        for unit in list(self.units):
            if bytes_min > 0 and unit != self.pinned and not (keep and keep(unit)):
                found.append(unit)
                bytes_min -= self.units.pop(unit)
        return found

    def idle(self, now_s: float, units_max: int = 1000, keep: Callable[[bytes], bool] | None = None) -> list[bytes]:
        return []


def test_a_policy_decides_who_goes(tmp_path: Path) -> None:
    """KVC-2: the order of eviction is the policy's, and what it keeps stays; the 30 s rule stands over it."""
    blocks = chain(5)
    policy = FirstWrittenFirst(unit_of(WHO, blocks[1].hash))
    with contextlib.closing(opened(tmp_path, bytes_max=5 * BLOCK_ROOM + PAGE_BYTES, policy=policy)) as store:
        store.put(WHO, blocks, NOW_S)
        store.touch(WHO, [blocks[2].hash], NOW_S + 90)
        assert store.put(WHO, chain(2, of="new"), NOW_S + 100).kept == 2
        assert [store.leading(WHO, [hash]) for hash in names(blocks)] == [0, 1, 1, 0, 1]
        assert store.put(WHO, chain(5, of="newer"), NOW_S + 101).refused is Refusal.FULL
        assert len(policy.units) == store.stats().blocks == 5


# Opening, memory


@pytest.mark.parametrize("owners", [1, 60])
def test_an_opening_reads_at_most_a_hundredth(tmp_path: Path, owners: int) -> None:
    """O(1 %): of one full segment, and of many with a single page each; also when the process was killed."""
    with contextlib.closing(opened(tmp_path / "kv")) as store:
        for owner in range(owners):
            whose = identity(tenant=f"tenant-{owner}")
            count = 80 if owners == 1 else 1
            size = 12 * PAGE_BYTES if owners == 1 else 1000
            assert store.put(whose, chain(count, size=size, of=str(owner)), NOW_S).kept == count
        with contextlib.closing(copied(tmp_path / "kv", tmp_path / "copy")) as killed:
            stats = killed.stats()
            assert stats.blocks == (80 if owners == 1 else owners)
            assert 0 < stats.opening_read_bytes <= stats.bytes_used / 100
            assert stats.opening_read_bytes >= owners * (HEADER_BYTES + ENTRY_BYTES)


def test_what_is_left_of_emptied_segments_moves_together(tmp_path: Path) -> None:
    """O(1 %): segments of which a block or two are left are moved together by sweeps, so that openings stay cheap."""
    with contextlib.closing(opened(tmp_path / "kv")) as store:
        kept: list[StoredBlock] = []
        for turn in range(3):
            blocks = chain(24, size=40 * PAGE_BYTES - 9, of=str(turn))
            store.put(WHO, blocks, NOW_S + turn)
            store.drop(WHO, names(blocks)[1:])
            kept.append(blocks[0])
        assert store.stats().segments == 3
        before = store.stats().written_bytes
        store.sync()  # what is being synced is not moved
        assert store.sweep(NOW_S + 5) == 0
        assert store.stats().segments == 1 and len(segments(tmp_path / "kv")) == 1
        assert store.stats().written_bytes == before + 3 * 40 * PAGE_BYTES
        assert store.stats().bytes_used == 3 * 40 * PAGE_BYTES + PAGE_BYTES >= on_disk(tmp_path / "kv") - 65536
        for block in kept:
            assert served(store, WHO, [block.hash]) == payloads([block])
        store.sweep(NOW_S + 6)
        assert store.stats().written_bytes == before + 3 * 40 * PAGE_BYTES
    with contextlib.closing(opened(tmp_path / "kv")) as store:
        assert store.stats().opening_read_bytes <= store.stats().bytes_used / 100
        assert [served(store, WHO, [block.hash]) for block in kept] == [payloads([block]) for block in kept]


def test_a_move_serves_nothing_wrong(tmp_path: Path) -> None:
    """A block that is corrupt when its segment is emptied is dropped and told; without budget nothing moves."""
    blocks = chain(24, size=PAGE_BYTES)
    with contextlib.closing(opened(tmp_path, per_day=25 * PAGE_BYTES, idle_s_max=1e9)) as store:
        store.put(WHO, blocks, NOW_S)
        store.drop(WHO, names(blocks)[2:])
        store.sweep(NOW_S)
        assert (store.stats().written_bytes, store.stats().segments) == (24 * PAGE_BYTES, 1)
        flip(segments(tmp_path)[0], page_offset(1) + 9)
        store.sweep(NOW_S + 43_200)
        assert (kinds(store), store.stats().corrupt, store.stats().written_bytes) == (["corrupt"], 1, 25 * PAGE_BYTES)
        assert served(store, WHO, names(blocks)) == payloads(blocks)[:1]


def test_a_read_that_fails_leaves_the_callers_buffers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: when one part of a read fails, no other writes into the buffers after the call, and files are let go."""
    with contextlib.closing(opened(tmp_path)) as store:
        blocks = chain(2 * CHUNK_PAGES // BLOCK_PAGES)
        store.put(WHO, blocks, NOW_S)
        parts: list[Read] = []
        run, failed, writing = Read.run, threading.Event(), threading.Event()

        def run_or_fail(read: Read, files: kvcache.store.segments.SegmentFiles) -> int:
            parts.append(read)
            if read.first_slot == 0:
                assert writing.wait(10)
                failed.set()
                raise MemoryError
            writing.set()
            assert failed.wait(10)
            time.sleep(0.05)
            return run(read, files)

        monkeypatch.setattr(Read, "run", run_or_fail)
        into = [[aligned(bytes(BLOCK_ROOM))] for _ in blocks]
        with pytest.raises(MemoryError):
            store.get(WHO, names(blocks), into, NOW_S)
        before = [bytes(room[0]) for room in into]
        time.sleep(0.1)
        assert [bytes(room[0]) for room in into] == before and len(parts) > 1
        monkeypatch.undo()
        assert store.drop(WHO, names(blocks)).blocks == len(blocks) and segments(tmp_path) == []


def test_threads_read_what_others_write_and_drop(tmp_path: Path) -> None:
    """Puts, gets, drops and sweeps of several threads at once: right bytes or none, no error, nothing left over."""
    failures: list[str] = []
    with contextlib.closing(opened(tmp_path, bytes_max=100 * BLOCK_ROOM, hot_s=0.0)) as store:

        def work(worker: int) -> None:
            try:
                for turn in range(25):
                    blocks = chain(6, of=f"chain-{(worker + turn) % 7}")
                    store.put(WHO, blocks, NOW_S + turn)
                    got = served(store, WHO, names(blocks), NOW_S + turn)
                    if got != payloads(blocks)[: len(got)]:
                        failures.append("wrong bytes")
                    if turn % 3 == worker % 3:
                        store.drop(WHO, names(blocks)[turn % 6 :])
                    store.sweep(NOW_S + turn)
            except BaseException as error:
                failures.append(repr(error))
                raise

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == [] and store.stats().corrupt == 0
        assert store.evict("model-a", 1.0).blocks >= 0 and store.stats().bytes_used == 0
        assert segments(tmp_path) == [] and kinds(store) == []


WRITER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from kvcache.core.identity import PAGE_BYTES
    from tests.core.kv_store_world import NOW_S, chain, identity, opened
    store = opened(Path(sys.argv[1]))
    for turn in range(10_000):
        store.put(identity(), chain(6, size=5 * PAGE_BYTES + 100, of=f"chain-{turn}"), NOW_S)
        print(turn, flush=True)
    """
)


def test_a_writer_killed_in_the_middle_loses_only_what_was_under_way(tmp_path: Path) -> None:
    """F: kill -9 of a real process while it writes: all that it had reported is there and intact, nothing else is served."""
    for life in range(2):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "kv")], stdout=subprocess.PIPE, text=True)
        try:
            assert writer.stdout is not None
            reported = -1
            deadline = time.monotonic() + 60
            while reported < 40 + 30 * life and time.monotonic() < deadline:
                reported = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            rest = writer.stdout.read().split()
            reported = max([reported, *(int(line) for line in rest if line)])
        finally:
            writer.kill()
            writer.wait()
            if writer.stdout:
                writer.stdout.close()
        with contextlib.closing(opened(tmp_path / "kv")) as store:
            assert store.stats().opening_read_bytes <= store.stats().bytes_used / 100
            for turn in range(reported + 2):
                blocks = chain(6, size=5 * PAGE_BYTES + 100, of=f"chain-{turn}")
                got = served(store, WHO, names(blocks))
                assert got == payloads(blocks)[: len(got)] and (len(got) == 6 or turn > reported)
            assert store.stats().corrupt == 0


# Anything may happen


OPERATIONS = st.one_of(
    st.tuples(
        st.just("put"), st.integers(0, 5), st.integers(1, 6), st.sampled_from([700, PAGE_BYTES, 3 * PAGE_BYTES + 4096])
    ),
    st.tuples(st.just("get"), st.integers(0, 5), st.integers(1, 6), st.just(0)),
    st.tuples(st.just("drop"), st.integers(0, 5), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 300), st.just(0), st.just(0)),
    st.tuples(st.just("reopen"), st.just(0), st.just(0), st.just(0)),
    st.tuples(st.just("kill"), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 2)),
)


@given(operations=st.lists(OPERATIONS, min_size=3, max_size=14), limit=st.sampled_from([12, 40, 10_000]))
@settings(max_examples=60, deadline=None)
def test_whatever_happens_only_what_was_put_is_served(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int, int, int]], limit: int
) -> None:
    """Puts, gets, drops, restarts, kills with torn tails and flipped bits in any order: right bytes or none."""
    directory = tmp_path_factory.mktemp("kv")
    now_s = NOW_S
    bytes_max = limit * PAGE_BYTES
    store = opened(directory, now_s, bytes_max=bytes_max)
    put: dict[bytes, list[bytes]] = {}
    try:
        for step, (what, first, second, third) in enumerate(operations):
            if what == "put":
                whose = identity(tenant=f"tenant-{first % 2}")
                blocks = [
                    StoredBlock(one.hash, one.parent, [aligned(payload(step, third + index, whose.salt.hex()))])
                    for index, one in enumerate(chain(second, of=f"chain-{first}"))
                ]
                known = store.leading(whose, names(blocks))
                result = store.put(whose, blocks, now_s)
                assert result.kept == 0 or store.leading(whose, names(blocks)) >= min(result.kept, known)
                for block, data in zip(blocks, payloads(blocks), strict=True):
                    put.setdefault(whose.salt + block.hash, []).append(data)
            elif what == "get":
                for tenant in (0, 1):
                    whose = identity(tenant=f"tenant-{tenant}")
                    hashes = names(chain(second, of=f"chain-{first}"))
                    for hash, data in zip(hashes, served(store, whose, hashes, now_s), strict=False):
                        assert data in put.get(whose.salt + hash, [])
            elif what == "drop":
                whose = identity(tenant=f"tenant-{first % 2}")
                hash = name(second, f"chain-{first}")
                store.drop(whose, [hash])
                assert store.leading(whose, [hash]) == 0
            elif what == "wait":
                now_s += first
                store.sweep(now_s)
            else:
                if what == "kill":
                    copy = tmp_path_factory.mktemp("kv")
                    shutil.copytree(directory, copy, dirs_exist_ok=True)
                    store.close()
                    directory = copy
                    files = segments(directory)
                    if files:
                        path = files[first % len(files)]
                        size = path.stat().st_size
                        if third == 0:
                            os.truncate(path, second % (size + 1))
                        elif third == 1 and size:
                            # Mostly where headers and entries are, else somewhere in the pages.
                            flip(path, second % min(size, HEADER_BYTES + 640) if first % 3 else second % size)
                else:
                    store.close()
                store = opened(directory, now_s, bytes_max=bytes_max)
            assert store.stats().bytes_used <= bytes_max and on_disk(directory) <= bytes_max + PAGE_BYTES
        for key, datas in put.items():
            whose = next(one for one in (identity(tenant="tenant-0"), identity(tenant="tenant-1")) if one.salt == key[:16])
            for data in served(store, whose, [key[16:]], now_s):
                assert data in datas
    finally:
        store.close()
