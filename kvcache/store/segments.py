"""The files of a store: opened, read, written, holes punched. Knows slots and bytes, no blocks in use.

Pages go past the kernel's cache (O_DIRECT) where file system and buffers allow it, through it otherwise. Headers and
entries, 64 bytes here and there, always go through it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvcache.core.identity import PAGE_BYTES
from kvcache.store import format as fmt
from subjects.errors import CarpoolError

FILES_OPEN_MAX = 96
"""Segments with open files; each takes two descriptors."""
_BUFFERS_PER_CALL_MAX = 1024
"""IOV_MAX of Linux."""
_DIRECT_MULTIPLE = 4096
_PUNCH = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE of linux/falloc.h."""
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_PROBE = "probe.tmp"
_OURS = (fmt.SUFFIX, ".tmp", ".budget", ".msgpack")
_READ_ONLY_ERRORS = (errno.EROFS, errno.EACCES, errno.EPERM)


class StoreRefused(CarpoolError):
    """The directory cannot be used as a store; the message is one line with its remedy."""


class StoreLocked(StoreRefused):
    """Another process (or another store of this one) uses the directory."""


class Segment:
    """One file. ``next_slot`` is the first that was never written; slots are never used twice."""

    __slots__ = ("blocks", "header", "name", "next_slot", "pages", "pins", "unsynced")

    def __init__(self, name: str, header: fmt.Header, next_slot: int) -> None:
        self.name = name
        self.header = header
        self.next_slot = next_slot
        self.pages = 0
        """Slots that take room."""
        self.blocks = 0
        self.pins = 0
        """Who reads or writes it now; it is not unlinked before they are done."""
        self.unsynced = False

    @property
    def room(self) -> int:
        """Slots left."""
        return fmt.SLOTS_MAX - self.next_slot

    @property
    def bytes_used(self) -> int:
        return PAGE_BYTES * (self.pages + 1)


class Scanned(msgspec.Struct, frozen=True):
    """A file that the opening found: a segment and what is in it, or why it is none."""

    name: str
    segment: Segment | None = None
    scan: fmt.Scan | None = None
    kind: str = ""
    """Of a ``FormatError``, or ``unreadable``; empty for a segment."""
    detail: str = ""


@dataclass(slots=True)
class _Open:
    direct: int
    """-1 where the file system refuses it."""
    cached: int
    writable: bool = True
    users: int = 0

    def to_write(self) -> int:
        if not self.writable:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return self.cached


class SegmentFiles:
    """The directory and its files; every method may be called from any thread. Failures are ``OSError``."""

    def __init__(self, directory: Path) -> None:
        """Takes the directory: makes it where it is missing (mode 0700), locks it.

        The lock is on the directory itself (flock), so that it needs no file, works where nothing can be written, and is
        gone with its process.

        Raises:
            StoreLocked: somebody else uses it.
            StoreRefused: it cannot be used.
        """
        self.directory = directory
        self.read_only = False
        self.punches = True
        """Whether the file system gives the room of dropped pages back at once; else it comes back with the whole file."""
        self.read_bytes = 0
        """Of headers, entries and small files."""
        self._direct_works = False
        self._guard = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._zeros = memoryview(mmap.mmap(-1, PAGE_BYTES)).toreadonly()
        self._junk = memoryview(mmap.mmap(-1, PAGE_BYTES))
        self._fd = _take(directory)
        self._probe()

    def close(self) -> None:
        with self._guard:
            for opened in self._open.values():
                _shut(opened)
            self._open.clear()
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

    def _probe(self) -> None:
        """Learns what the file system can do, from one page that is written and removed."""
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_PROBE, dir_fd=self._fd)
            fd = os.open(_PROBE, _CREATE, 0o600, dir_fd=self._fd)
        except OSError as error:
            self.read_only = error.errno in _READ_ONLY_ERRORS
            return
        try:
            with contextlib.suppress(OSError):
                os.pwrite(fd, self._zeros, 0)
                self.punches = _punch(fd, 0, PAGE_BYTES)
            with contextlib.suppress(OSError):
                os.close(os.open(_PROBE, os.O_RDWR | _O_DIRECT | os.O_CLOEXEC, dir_fd=self._fd))
                self._direct_works = bool(_O_DIRECT)
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(_PROBE, dir_fd=self._fd)

    # Files ------------------------------------------------------------

    def scan(self) -> Iterator[Scanned]:
        """Every ``.kvc`` file by its name, reading headers and entries only."""
        for name in sorted(os.listdir(self._fd)):
            if name.endswith(fmt.SUFFIX):
                yield self._scan_one(name)

    def _scan_one(self, name: str) -> Scanned:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._fd)
        except OSError as error:
            kind = "foreign" if error.errno == errno.ELOOP else "unreadable"
            return Scanned(name, kind=kind, detail=_why(error))
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return Scanned(name, kind="foreign", detail="not a file")
            # The kernel would read ahead what is not asked for.
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            slots = fmt.slots_of(status.st_size)
            data = os.pread(fd, fmt.HEADER_BYTES + slots * fmt.ENTRY_BYTES, 0)
            self.read_bytes += len(data)
            header = fmt.decode_header(data[: fmt.HEADER_BYTES])
            if header.file_name != name:
                raise fmt.FormatError("foreign", "under another name than its own")
            scan = fmt.decode_entries(header, data[fmt.HEADER_BYTES :], status.st_size)
            ends = [block.first_slot + block.pages for block in scan.blocks]
            segment = Segment(name, header, max([slots, *ends]))
            # A torn entry may have a page behind it that the file does not reach; such slots are not used again.
            if scan.torn or scan.truncated:
                segment.next_slot = fmt.SLOTS_MAX
            segment.blocks = len(scan.blocks)
            segment.pages = sum(block.pages for block in scan.blocks) if self.punches else slots
            self._reclaim(segment, scan, slots, status.st_blocks * 512)
            return Scanned(name, segment, scan)
        except fmt.FormatError as error:
            return Scanned(name, kind=_kind(error.kind, name), detail=str(error))
        except OSError as error:
            return Scanned(name, kind="unreadable", detail=_why(error))
        finally:
            os.close(fd)

    def _reclaim(self, segment: Segment, scan: fmt.Scan, slots: int, allocated_bytes: int) -> None:
        """Gives back the room of slots that hold no block: of writes and drops that a kill cut off."""
        if allocated_bytes <= segment.bytes_used or self.read_only:
            return
        gaps: list[tuple[int, int]] = []
        at = 0
        for block in scan.blocks:
            if block.first_slot > at:
                gaps.append((at, block.first_slot - at))
            at = block.first_slot + block.pages
        if at < slots:
            gaps.append((at, slots - at))
        with contextlib.suppress(OSError):
            self.erase(segment, gaps)

    def entries(self, segment: Segment) -> fmt.Scan:
        """What the entries of a segment say now."""
        with self._opened(segment) as opened:
            data = os.pread(opened.cached, fmt.ENTRY_BYTES * segment.next_slot, fmt.HEADER_BYTES)
        return fmt.decode_entries(segment.header, data, fmt.SEGMENT_BYTES_MAX)

    def create(self, header: fmt.Header) -> Segment:
        """A new file with its header in it."""
        data = header.encoded
        fd = os.open(header.file_name, _CREATE, 0o600, dir_fd=self._fd)
        try:
            _write_all(fd, [memoryview(data)], 0)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(header.file_name, dir_fd=self._fd)
            raise
        finally:
            os.close(fd)
        return Segment(header.file_name, header, 0)

    def unlink(self, name: str) -> None:
        """Who still has it open may go on reading it."""
        with self._guard:
            opened = self._open.pop(name, None)
        if opened:
            _shut(opened)
        os.unlink(name, dir_fd=self._fd)

    def write_pages(self, segment: Segment, first_slot: int, blocks: Sequence[Sequence[memoryview]]) -> None:
        """Blocks in slots next to each other, each from the start of a slot; what is left of its last page becomes zero."""
        buffers: list[memoryview] = []
        for pages in blocks:
            buffers += self._padded(pages)
        with self._opened(segment) as opened:
            _write_all(opened.to_write(), buffers, fmt.page_offset(first_slot), opened.direct)

    def _padded(self, pages: Sequence[memoryview]) -> list[memoryview]:
        rest = -sum(len(page) for page in pages) % PAGE_BYTES
        if not rest:
            return list(pages)
        if rest % _DIRECT_MULTIPLE == 0:
            return [*pages, self._zeros[:rest]]
        last = pages[-1]
        whole = len(last) - len(last) % PAGE_BYTES
        page = memoryview(mmap.mmap(-1, PAGE_BYTES))
        page[: len(last) - whole] = last[whole:]
        return [*pages[:-1], *([last[:whole]] if whole else []), page]

    def read_pages(self, segment: Segment, first_slot: int, blocks: Sequence[tuple[Sequence[memoryview], int]]) -> bool:
        """Into buffers, for blocks (each with its pages) in slots next to each other; ``False``: the file ends before."""
        buffers: list[memoryview] = []
        for into, pages in blocks:
            wanted = pages * PAGE_BYTES
            for buffer in into:
                if wanted:
                    buffers.append(buffer if len(buffer) <= wanted else buffer[:wanted])
                    wanted -= len(buffers[-1])
            if wanted:
                assert wanted < PAGE_BYTES
                buffers.append(self._junk[:wanted])
        with self._opened(segment) as opened:
            return _read_all(opened.cached, buffers, fmt.page_offset(first_slot), opened.direct)

    def write_entries(self, segment: Segment, first_slot: int, data: bytes) -> None:
        with self._opened(segment) as opened:
            _write_all(opened.to_write(), [memoryview(data)], fmt.entry_offset(first_slot))
            segment.unsynced = True

    def erase(self, segment: Segment, runs: Sequence[tuple[int, int]]) -> None:
        """Slots (first and number of each run) hold nothing from now on: their entries first, so that none lies."""
        with self._opened(segment) as opened:
            for first_slot, slots in runs:
                _write_all(opened.to_write(), [memoryview(bytes(fmt.ENTRY_BYTES * slots))], fmt.entry_offset(first_slot))
            if self.punches:
                for first_slot, slots in runs:
                    _punch(opened.cached, fmt.page_offset(first_slot), slots * PAGE_BYTES)

    def sync(self, segment: Segment) -> None:
        with self._opened(segment) as opened:
            segment.unsynced = False
            try:
                os.fdatasync(opened.cached)
            except OSError:
                segment.unsynced = True
                raise

    def sync_directory(self) -> None:
        os.fsync(self._fd)

    def read_small(self, name: str, bytes_max: int) -> bytes | None:
        """A small file beside the segments; ``None`` where there is none."""
        try:
            # Without O_NONBLOCK the opening of a pipe would wait for somebody who writes to it.
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a file")
            data = os.read(fd, bytes_max)
            self.read_bytes += len(data)
            return data
        finally:
            os.close(fd)

    def write_small(self, name: str, data: bytes) -> None:
        """Replaces it as a whole, on the disk when this returns."""
        temporary = name + ".tmp"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=self._fd)
        fd = os.open(temporary, _CREATE, 0o600, dir_fd=self._fd)
        try:
            _write_all(fd, [memoryview(data)], 0)
            os.fdatasync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self.sync_directory()

    # Descriptors ------------------------------------------------------------

    @contextlib.contextmanager
    def _opened(self, segment: Segment) -> Iterator[_Open]:
        with self._guard:
            opened = self._open.get(segment.name)
            if opened is None:
                opened = self._open[segment.name] = self._open_one(segment.name)
                self._close_unused()
            self._open.move_to_end(segment.name)
            opened.users += 1
        try:
            yield opened
        finally:
            with self._guard:
                opened.users -= 1

    def _open_one(self, name: str) -> _Open:
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        writable = True
        try:
            cached = os.open(name, os.O_RDWR | flags, dir_fd=self._fd)
            flags |= os.O_RDWR
        except OSError as error:
            if error.errno not in _READ_ONLY_ERRORS:
                raise
            writable = False
            cached = os.open(name, os.O_RDONLY | flags, dir_fd=self._fd)
        direct = -1
        if self._direct_works:
            with contextlib.suppress(OSError):
                direct = os.open(name, flags | _O_DIRECT, dir_fd=self._fd)
        return _Open(direct, cached, writable)

    def _close_unused(self) -> None:
        unused = [name for name, opened in self._open.items() if not opened.users]
        for name in unused[: max(0, len(self._open) - FILES_OPEN_MAX)]:
            _shut(self._open.pop(name))


def _shut(opened: _Open) -> None:
    for fd in (opened.direct, opened.cached):
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def _take(directory: Path) -> int:
    """A descriptor of the directory that holds its lock."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreRefused(f"KV directory {directory}: {_why(error)}; give one that this user may write") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _make_private(fd, directory)
    except BlockingIOError:
        os.close(fd)
        raise StoreLocked(
            f"KV directory {directory} is used by another process; stop it or give another directory"
        ) from None
    except OSError as error:
        os.close(fd)
        raise StoreRefused(f"KV directory {directory}: {_why(error)}; give another directory") from None
    except StoreRefused:
        os.close(fd)
        raise
    return fd


def _make_private(fd: int, directory: Path) -> None:
    """Nobody else may look into it; a directory that holds other things than a store is left as it is, and refused."""
    if not os.fstat(fd).st_mode & 0o077:
        return
    others = [name for name in os.listdir(fd) if not name.endswith(_OURS)]
    if others:
        raise StoreRefused(f"KV directory {directory} is open to others and holds {others[0]}; give one of its own")
    try:
        os.fchmod(fd, 0o700)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise


def _kind(kind: str, name: str) -> str:
    """Under a name of ours it was ours, whatever its first bytes say now; under another one it never was."""
    if not fmt.is_own_name(name):
        return "foreign"
    return "damaged" if kind == "foreign" else kind


def _why(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


def _write_all(fd: int, buffers: list[memoryview], offset: int, direct: int = -1) -> None:
    """All buffers one after the other from ``offset`` on; by the descriptor ``direct`` as long as that works."""
    while buffers:
        batch = buffers[:_BUFFERS_PER_CALL_MAX]
        try:
            done = os.pwritev(direct if direct >= 0 else fd, batch, offset)
        except OSError as error:
            if direct < 0 or error.errno != errno.EINVAL:
                raise
            direct = -1
            continue
        if not done:
            raise OSError(errno.EIO, "nothing was written")
        offset += done
        buffers = _after(buffers, done)


def _read_all(fd: int, buffers: list[memoryview], offset: int, direct: int) -> bool:
    while buffers:
        batch = buffers[:_BUFFERS_PER_CALL_MAX]
        try:
            done = os.preadv(direct if direct >= 0 else fd, batch, offset)
        except OSError as error:
            if direct < 0 or error.errno != errno.EINVAL:
                raise
            direct = -1
            continue
        if not done:
            return False
        offset += done
        buffers = _after(buffers, done)
    return True


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers without their first ``done`` bytes."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]] if done else buffers[index:]
        done -= len(buffer)
    return []


_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _punch(fd: int, offset: int, length: int) -> bool:
    """Gives the room of a range back to the file system, where it reads as zeros from then on; ``False``: it cannot."""
    return _fallocate is not None and _fallocate(fd, _PUNCH, offset, length) == 0
