"""The connector's half beside the tensors: one thread reads blocks from the node, one writes them; no step waits for either.

**Loads** are read in pieces into a buffer of our own and copied from there, so that a read that was given up can never write
into blocks that belong to somebody else by then. A load is over when all is there, when the node has no more, when no piece
came for ``STALL_S``, or at its deadline; whatever the end, its request and its missing blocks are reported once (PAINS E5).

**Saves** are copied after the step into a bounded ring of rows, from where the thread writes them. What finds no room, or
comes while the node is away, is skipped and counted.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import structlog

from kvcache.engine.orders import LoadBlocks, SaveBlocks, StepNews, StepOrders, TellUsed
from kvcache.errors import KvUnavailable
from kvcache.wire.messages import KvUse
from subjects.errors import CarpoolError, place_of

if TYPE_CHECKING:
    from kvcache.engine.tensors import Blocks, Saved

log = structlog.get_logger(__name__)

STALL_S = 0.25
"""A load of which nothing came for so long is given up: the node is frozen or gone."""
PIECE_BYTES = 8 * 1024 * 1024
"""Read and copied at a time."""
STAGING_BLOCKS_MIN = 8
AWAY_S = 1.0
"""After a failure nothing is copied for the node for so long."""
QUEUE_MAX = 4096
"""Jobs of the saving thread."""
REPORT_S = 60.0
"""Between two lines of the log about what was lost."""
FLUSH_S = 1.0
"""What an end waits for saves under way."""


class BlockClient(Protocol):
    """The node, for one thread: ``kvcache.wire.client.KvClient``."""

    def read(self, salt: bytes, hashes: Sequence[bytes], into: memoryview) -> int: ...

    def write(
        self, salt: bytes, parent: bytes, hashes: Sequence[bytes], data: memoryview, use: KvUse, *, first: int = 0
    ) -> int: ...

    def used(self, salt: bytes, hashes: Sequence[bytes], use: KvUse) -> None: ...

    def emptied(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Counts:
    """Since the start, in blocks but for ``failed_loads``."""

    loaded: int = 0
    not_loaded: int = 0
    failed_loads: int = 0
    saved: int = 0
    skipped_full: int = 0
    """Not saved, since staging was full."""
    skipped_away: int = 0
    """Not saved, since the node was away or kept no more."""


@dataclass(slots=True, eq=False)
class _Load:
    order: LoadBlocks
    after: object
    began_s: float
    progress_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while blocks of the engine are written."""
    done: int = 0
    over: bool = False
    given_up: bool = False

    def wanted(self) -> bool:
        """Whether nobody gave it up yet, in whatever thread."""
        return not self.given_up


class Loader:
    """Loads, one after the other. ``wake`` is called from its thread when one is over."""

    def __init__(self, blocks: Blocks, client: BlockClient, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._blocks = blocks
        self._client = client
        self._clock = clock
        self._count = max(1, PIECE_BYTES // blocks.block_bytes)
        self._rows: Any = None
        self._queue: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()
        self._open: list[_Load] = []
        self._current: _Load | None = None
        self._thread = threading.Thread(target=self._run, name="kv-load", daemon=True)
        self._thread.start()
        self.wake: Callable[[], None] = lambda: None

    def start(self, order: LoadBlocks, after: object) -> None:
        """In the engine's thread."""
        now_s = self._clock()
        load = _Load(order=order, after=after, began_s=now_s, progress_s=now_s)
        current = self._current
        if current is not None and current.given_up:
            load.given_up = True  # The thread hangs in a read. This one would only wait for it.
        else:
            self._queue.put(load)
        self._open.append(load)

    def over(self) -> list[tuple[LoadBlocks, int]]:
        """Loads that are over, with the number of leading blocks that are there. In the engine's thread; each comes once."""
        if not self._open:
            return []
        now_s = self._clock()
        ended = [load for load in self._open if load.over or load.given_up or self._give_up(load, now_s)]
        if ended:
            self._open = [load for load in self._open if load not in ended]
        return [(load.order, load.done) for load in ended]

    @property
    def open(self) -> int:
        """Loads under way."""
        return len(self._open)

    def close(self) -> None:
        """Ends the thread; loads under way are given up."""
        for load in self._open:
            load.given_up = True
        self._queue.put(None)
        self._thread.join(FLUSH_S)
        self._client.close()

    def _give_up(self, load: _Load, now_s: float) -> bool:
        waits = load is not self._current
        stalled = now_s - load.progress_s > STALL_S and not waits
        if not stalled and now_s - load.began_s <= load.order.deadline_s:
            return False
        if not load.lock.acquire(blocking=False):
            return False  # It is being copied at this moment, which takes milliseconds.
        try:
            load.given_up = True
        finally:
            load.lock.release()
        return True

    def _run(self) -> None:
        while (load := self._queue.get()) is not None:
            if load.given_up:
                continue
            load.progress_s = self._clock()
            self._current = load
            try:
                self._load(load)
            except CarpoolError:
                pass  # It is away: the rest is computed.
            except Exception as error:
                log.error("a load of KV failed", error=place_of(error))
            finally:
                load.over = True
                self._current = None
                self.wake()

    def _load(self, load: _Load) -> None:
        order = load.order
        if self._rows is None:
            self._rows = self._blocks.rows(self._count)
        rows = self._rows
        view = memoryview(rows.numpy())
        while load.done < len(order.hashes) and load.wanted():
            some = slice(load.done, load.done + self._count)
            hashes = order.hashes[some]
            found = self._client.read(order.salt, hashes, view)
            with load.lock:
                if not load.wanted():
                    return
                if found:
                    self._blocks.load(order.block_ids[some][:found], rows[:found], load.after)
                load.done += found
                load.progress_s = self._clock()
            if found < len(hashes):
                return


class Ring:
    """Rows of a buffer, taken at one end and given back at the other, by two threads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._next = 0
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, wanted: int) -> tuple[int, int]:
        """The first row and the number of consecutive rows, at most ``wanted`` and perhaps none."""
        with self._lock:
            count = min(wanted, self._size - self._taken, self._size - self._next)
            first = self._next
            self._next = (first + count) % self._size
            self._taken += count
            return first, count

    def give(self, count: int) -> None:
        """The rows that were taken first are free again."""
        with self._lock:
            self._taken -= count

    @property
    def taken(self) -> int:
        """Rows in use."""
        return self._taken


class _Write(msgspec.Struct, frozen=True):
    salt: bytes
    parent: bytes
    first: int
    hashes: tuple[bytes, ...]
    row: int
    saved: Saved
    use: KvUse


class Saver:
    """Saves, in order. ``staging_bytes`` is the most that waits for the node."""

    def __init__(
        self, blocks: Blocks, client: BlockClient, staging_bytes: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._blocks = blocks
        self._client = client
        self._clock = clock
        self._count = max(STAGING_BLOCKS_MIN, staging_bytes // blocks.block_bytes)
        self._rows: Any = None
        self._ring = Ring(self._count)
        self._queue: queue.Queue[_Write | TellUsed | bool | None] = queue.Queue(QUEUE_MAX)
        self._away_until_s = 0.0
        self._news: deque[tuple[tuple[bytes, ...], bool]] = deque()
        self.counts = Counts()
        self._thread = threading.Thread(target=self._run, name="kv-save", daemon=True)
        self._thread.start()

    def save(self, order: SaveBlocks) -> None:
        """Copies as many of the blocks as there is room for. In the engine's thread."""
        done, total = 0, len(order.hashes)
        if self._clock() < self._away_until_s:
            self.counts.skipped_away += total
            self._news.append((order.hashes, False))
            return
        if self._rows is None:
            self._rows = self._blocks.rows(self._count)
        while done < total and not self._queue.full():
            row, count = self._ring.take(total - done)
            if not count:
                break
            some = slice(done, done + count)
            saved = self._blocks.save(order.block_ids[some], self._rows[row : row + count])
            parent = order.hashes[done - 1] if done else order.parent
            self._queue.put_nowait(_Write(order.salt, parent, order.first + done, order.hashes[some], row, saved, order.use))
            done += count
        if done < total:
            self.counts.skipped_full += total - done
            self._news.append((order.hashes[done:], False))

    def tell(self, order: TellUsed | bool) -> None:
        """Passes on a use of blocks, or, for True, that the engine's cache was emptied. Dropped when too much waits."""
        if not self._queue.full():
            self._queue.put_nowait(order)

    def news(self) -> tuple[list[bytes], bool]:
        """Blocks that did not get to the node since the last call, and whether it broke off."""
        lost: list[bytes] = []
        away = False
        while self._news:
            hashes, broke = self._news.popleft()
            lost.extend(hashes)
            away = away or broke
        return lost, away

    def idle(self) -> bool:
        """Whether nothing waits to be written."""
        return not self._ring.taken and self._queue.empty()

    def close(self) -> None:
        """Ends the thread after what waits, but not later than ``FLUSH_S``."""
        end_s = time.monotonic() + FLUSH_S
        while not self.idle() and time.monotonic() < end_s:
            time.sleep(0.01)
        if not self._queue.full():
            self._queue.put_nowait(None)
        self._thread.join(0.2)
        self._client.close()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                if isinstance(job, _Write):
                    self._write(job)
                elif isinstance(job, TellUsed):
                    self._client.used(job.salt, job.hashes, job.use)
                else:
                    self._client.emptied()
            except KvUnavailable:
                self._broke(job)
            except Exception as error:
                log.error("KV was not saved", error=place_of(error))
                self._broke(job)
            finally:
                if isinstance(job, _Write):
                    self._ring.give(len(job.hashes))

    def _write(self, job: _Write) -> None:
        # Rows are given back in order even when nothing is written: the copy into them must be over first.
        job.saved.wait()
        if self._clock() < self._away_until_s:
            self._skip(job.hashes)
            return
        data = memoryview(self._rows[job.row : job.row + len(job.hashes)].numpy())
        kept = self._client.write(job.salt, job.parent, job.hashes, data, job.use, first=job.first)
        self.counts.saved += kept
        if kept < len(job.hashes):
            self._skip(job.hashes[kept:])

    def _skip(self, hashes: tuple[bytes, ...], *, broke: bool = False) -> None:
        self.counts.skipped_away += len(hashes)
        self._news.append((hashes, broke))

    def _broke(self, job: _Write | TellUsed | bool) -> None:
        self._away_until_s = self._clock() + AWAY_S
        self._skip(job.hashes if isinstance(job, _Write) else (), broke=True)


class WorkerSide:
    """Loads and saves of one engine worker, as the scheduler's half orders them; all calls in the engine's thread."""

    def __init__(self, blocks: Blocks, make_client: Callable[[], BlockClient], staging_bytes: int) -> None:
        self._blocks = blocks
        self.loader = Loader(blocks, make_client())
        self.saver = Saver(blocks, make_client(), staging_bytes)
        self._failed: set[int] = set()
        self._loaded: dict[str, int] = {}
        self._report_at_s = 0.0
        self._reported = Counts()

    @property
    def counts(self) -> Counts:
        """What was done so far."""
        return self.saver.counts

    def start_loads(self, orders: StepOrders) -> None:
        """The step was submitted."""
        if orders.loads:
            after = self._blocks.mark()
            for order in orders.loads:
                self.loader.start(order, after)

    def start_saves(self, orders: StepOrders) -> None:
        """The step's blocks are full."""
        for save in orders.saves:
            self.saver.save(save)
        for used in orders.used:
            self.saver.tell(used)
        if orders.emptied:
            self.saver.tell(True)

    def ended_loads(self) -> set[str]:
        """Requests whose load is over, one way or the other."""
        ended = set()
        for order, done in self.loader.over():
            ended.add(order.request)
            self._loaded[order.request] = done
            self.counts.loaded += done
            missing = order.block_ids[done:]
            if missing:
                self._failed.update(missing)
                self.counts.not_loaded += len(missing)
                self.counts.failed_loads += 1
        return ended

    def failed_blocks(self) -> set[int]:
        """Blocks that were to be loaded and were not, of the loads that :meth:`ended_loads` returned since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def news(self) -> StepNews:
        """For the scheduler's half."""
        lost, away = self.saver.news()
        loaded, self._loaded = self._loaded, {}
        self._report()
        return StepNews(loaded=loaded, lost=lost, away=away)

    def _report(self) -> None:
        counts, reported = self.counts, self._reported
        losses = (counts.not_loaded, counts.skipped_full, counts.skipped_away)
        now_s = time.monotonic()
        if losses == (reported.not_loaded, reported.skipped_full, reported.skipped_away) or now_s < self._report_at_s:
            return
        self._report_at_s, self._reported = now_s + REPORT_S, replace(counts)
        log.warning(
            "KV was computed again or not saved",
            blocks_not_loaded=counts.not_loaded,
            blocks_not_saved_staging_full=counts.skipped_full,
            blocks_not_saved_node_away=counts.skipped_away,
            blocks_loaded=counts.loaded,
            blocks_saved=counts.saved,
        )

    def close(self) -> None:
        """Ends both threads, after at most about two seconds."""
        self.loader.close()
        self.saver.close()
