"""Both tiers of a node as one: blocks come into host memory, go to disk, and come back when they are read.

Runs on the node's event loop; what touches the disk or encodes runs in threads, on blocks that are pinned meanwhile. A block
is *dirty* until it is on disk. Dirty blocks go there once they are settled, when room is needed, and when the node stops; a
disk that refuses is left alone for a while, and blocks that must leave memory in that time are gone.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, TypeVarTuple

from kvcache.core.holdings import Held, Holdings, coldest
from kvcache.core.identity import PAGE_BYTES, KvIdentity
from kvcache.node.disk import BATCH_BYTES as BATCH_BYTES
from kvcache.node.disk import DiskThreads, Use, one_batch
from kvcache.node.host_tier import HostBlock, HostTier, pages_of
from kvcache.node.settings import NodeSettings
from kvcache.store.store import KvStore, Refusal
from subjects.ids import ReplicaId
from subjects.messages import KvTier

DISK_RETRY_S = 30.0
"""A disk that refused is tried again after that long."""
HOT_RETRY_S = 5.0
ROOM_TRIES_MAX = 3
TOLD_S = 2.0
"""A block that is read so soon after a request's use was told is not used again by it."""
USES_MAX = 256
"""Uses that wait for the store, a quarter of a second long, half a megabyte each at most; the earliest go first."""
DROPPED_AT_ONCE = 512
FREE_SHARE = 0.03
"""Of the arena that is kept free, so that writers seldom wait."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Keeper(Protocol):
    """What policy says of a block that is to leave."""

    def pinned(self, block: HostBlock) -> bool:
        """Hot: stays in memory."""

    def needed(self, block: HostBlock) -> bool:
        """A running chain of requests needs it: not dropped while it lies nowhere else."""


@dataclass(slots=True)
class TierCounts:
    """Blocks since the start. Hits are those of a prompt that could be read when it came, misses its others."""

    hits: int = 0
    misses: int = 0
    written: int = 0
    refused: int = 0
    corrupt: int = 0
    of_model: dict[str, list[int]] = field(default_factory=dict)
    """Hits and misses by ``KvSignature.model``."""

    def asked(self, model: str, blocks: int, found: int) -> None:
        """A prompt came."""
        self.hits += found
        self.misses += blocks - found
        of_model = self.of_model.setdefault(model, [0, 0])
        of_model[0] += found
        of_model[1] += blocks - found


class Tiers:
    """Host memory and disk of one node."""

    def __init__(
        self,
        settings: NodeSettings,
        host: HostTier,
        store: KvStore | None,
        *,
        take_gone: Callable[[], list[bytes]],
        holdings: Holdings,
        keeper: Keeper,
        on_disk_refused: Callable[[Refusal], None],
        on_memory_wrong: Callable[[], None],
        on_read: Callable[[int, float], None],
    ) -> None:
        self.host = host
        self.store = store
        self._disk = DiskThreads(store) if store is not None else None
        self._take_gone = take_gone
        self.holdings = holdings
        self.counts = TierCounts()
        self.codec_of: dict[str, str] = {}
        """By ``KvSignature.model``."""
        self.disk_state = ""
        """Empty while the disk is used or none is wanted, else why it is not."""
        self._settings = settings
        self._keeper = keeper
        self._on_disk_refused = on_disk_refused
        self._on_memory_wrong = on_memory_wrong
        self._on_read = on_read
        self._dirty: dict[bytes, HostBlock] = {}
        self._uses: deque[Use] = deque(maxlen=USES_MAX)
        """That the store is to hear of: it may be at the disk, which the event loop does not wait for."""
        self._disk_rests_until_s = 0.0
        self._promoting: dict[bytes, asyncio.Event] = {}
        self._room = asyncio.Lock()
        self._demoting = asyncio.Lock()
        self._apart: set[asyncio.Task[Any]] = set()
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="kv-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-write")

    @staticmethod
    def now_s() -> float:
        """The node's clock."""
        return time.monotonic()

    @property
    def dirty_bytes(self) -> int:
        """Of blocks that are not on disk yet."""
        return sum(block.size for block in self._dirty.values())

    # ---- looking

    def leading(self, identity: KvIdentity, hashes: Sequence[bytes]) -> int:
        """How many of these blocks are in either tier, from the first on."""
        return self.holdings.leading(identity, hashes)

    def in_host(self) -> dict[str, tuple[int, int]]:
        """Blocks and bytes of pages in memory, by ``KvSignature.model``."""
        found: dict[str, tuple[int, int]] = {}
        for block in self.host:
            blocks, size = found.get(block.identity.signature.model, (0, 0))
            found[block.identity.signature.model] = (blocks + 1, size + len(block.slots) * PAGE_BYTES)
        return found

    async def acquire(
        self, identity: KvIdentity, hashes: Sequence[bytes], *, replica: ReplicaId | None = None
    ) -> list[HostBlock]:
        """The leading blocks, in memory and pinned; :meth:`release` them."""
        found: list[HostBlock] = []
        prefix = identity.key
        try:
            tries = 0
            while len(found) < len(hashes):
                at = len(found)
                block = self.host.find(prefix + hashes[at])
                if block is not None:
                    self.host.pin(block)
                    found.append(block)
                    tries = 0
                    continue
                tries += 1
                if self.store is None or tries > ROOM_TRIES_MAX:
                    break
                if not await self._whole(self._promote(identity, hashes[at:])):
                    break
        except BaseException:
            self.release(found)
            raise
        now_s = self.now_s()
        for block in found:
            held = self.holdings.get(block.key)
            if held is not None and now_s - held.used_s > TOLD_S:
                self.host.order.touch(block.key, now_s)
            self.holdings.used(block.key, now_s, replica)
        return found

    def release(self, blocks: Iterable[HostBlock]) -> None:
        """The opposite of :meth:`acquire`."""
        for block in blocks:
            self.host.unpin(block)

    def used(self, identity: KvIdentity, hashes: Sequence[bytes], replica: ReplicaId | None = None) -> None:
        """A request uses these blocks, of one chain in its order; ``replica``: an engine that has them itself now."""
        now_s = self.now_s()
        prefix = identity.key
        for hash in hashes:
            self.holdings.used(prefix + hash, now_s, replica)
        if self.store is not None:
            self._uses.append((identity, hashes, time.time()))

    async def stored(self, identity: KvIdentity, hash: bytes) -> tuple[memoryview, str] | None:
        """A block's payload as it lies on disk, verified, and its codec; None where it is not there (any more)."""
        if self._disk is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._disk.stored, identity, hash)

    # ---- coming

    async def reserve(self, identity: KvIdentity, hash: bytes, parent: bytes) -> HostBlock | None:
        """Pages for a block that is to come, once others made room; None where none can."""
        size = identity.signature.block_bytes
        for _ in range(ROOM_TRIES_MAX):
            block = self.host.reserve(identity, hash, parent, size)
            if block is not None:
                return block
            if not await self.make_room(pages_of(size) * PAGE_BYTES):
                break
        return None

    def keep(
        self,
        block: HostBlock,
        sums: bytes,
        *,
        depth: int = 0,
        replica: ReplicaId | None = None,
        test: bool = False,
        on_disk: bool = False,
    ) -> None:
        """The bytes of a reserved block are there."""
        now_s = self.now_s()
        if not self.host.keep(block, sums, now_s, test=test):
            return
        block.on_disk = on_disk
        if not on_disk and self.store is not None:
            self._dirty[block.key] = block
        self.holdings.came(
            block.identity,
            block.hash,
            block.parent,
            tier=KvTier.HOST,
            size=block.size,
            now_s=now_s,
            depth=depth,
            replica=replica,
        )

    async def make_room(self, wanted_bytes: int) -> bool:
        """Lets blocks leave memory until so many bytes are free; what is dirty is written first where the disk takes it."""
        return await self._whole(self._make_room(wanted_bytes))

    async def _make_room(self, wanted_bytes: int) -> bool:
        async with self._room:
            if self.host.bytes_free >= wanted_bytes:
                return True
            victims = self.host.victims(wanted_bytes - self.host.bytes_free, self.now_s(), self._keeper.pinned)
            dirty = [block for block in victims if not block.on_disk]
            for block in victims:
                if block.on_disk:
                    self._forget(block)
            try:
                if dirty:
                    await self._demote(dirty)
            finally:  # whatever the disk does, none stays that no order knows
                for block in dirty:
                    if block.gone:
                        continue
                    if block.on_disk or not self._keeper.needed(block):
                        self._forget(block)
                    else:
                        self.host.stay(block, self.now_s())
            return self.host.bytes_free >= wanted_bytes

    # ---- going

    async def tend(self) -> None:
        """What is due by now: settled blocks are written, some memory is kept free, the store drops what was idle."""
        now_s = self.now_s()
        if self.store is not None and self._disk is not None:
            uses = list(self._uses)
            self._uses.clear()
            await self._write(self._disk.touch, uses)
            settled = [block for block in self._dirty.values() if now_s - block.arrived_s >= self._settings.settle_s]
            await self._demote(settled)
            await self._write(self.store.sweep, time.time())
            await self._reconcile()
        for block in self.host.idle(now_s, self._keeper.pinned):
            if self._keeper.needed(block) and not block.on_disk:
                self.host.stay(block, now_s)
            else:
                self._forget(block)
        free = int(self.host.bytes_max * FREE_SHARE)
        if self.host.bytes_free < free:
            await self.make_room(free)

    async def demote(self, keys: Iterable[bytes]) -> int:
        """These blocks leave memory for the disk (they are cold); returns how many left."""
        blocks = [block for block in map(self.host.find, keys) if block is not None and not block.pins]
        await self._demote([block for block in blocks if not block.on_disk])
        left = [block for block in blocks if block.on_disk and not block.gone and not block.pins]
        for block in left:
            self._forget(block)
        return len(left)

    async def flush(self, bound_s: float) -> int:
        """Writes what is dirty; returns how many bytes are not on disk after ``bound_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(bound_s):
                await self._demote(list(self._dirty.values()))
        return self.dirty_bytes

    async def evict(self, model: str, ratio: float) -> tuple[int, int, int]:
        """Drops this share of a model's blocks from both tiers; bytes in memory, bytes on disk, blocks."""
        return await self._whole(self._evict(model, ratio))

    async def _evict(self, model: str, ratio: float) -> tuple[int, int, int]:
        async with self._demoting:  # what is on its way to disk would be there again
            # In a thread, and some at a time: of a million blocks the event loop would hear nobody for seconds.
            mine = self.holdings.of_model(model)
            leaving = await asyncio.get_running_loop().run_in_executor(self._readers, coldest, mine, ratio)
            host_bytes = disk_bytes = blocks = 0
            for start in range(0, len(leaving), DROPPED_AT_ONCE):
                some = [held for held in leaving[start : start + DROPPED_AT_ONCE] if self.holdings.get(held.key) is held]
                of_host, of_disk = await self._drop(some)
                host_bytes, disk_bytes, blocks = host_bytes + of_host, disk_bytes + of_disk, blocks + len(some)
                await asyncio.sleep(0)
            if ratio >= 1.0 and self.store is not None:
                # Also what the store has and nothing here knows of, such as the end of a batch whose beginning left at once.
                more = await self._write(self.store.evict, model, 1.0)
                disk_bytes, blocks = disk_bytes + more.bytes, blocks + more.blocks
            return host_bytes, disk_bytes, blocks

    async def _drop(self, leaving: Sequence[Held]) -> tuple[int, int]:
        """Out of both tiers; bytes in memory and on disk that come free. While ``_demoting`` is held."""
        host_bytes = disk_bytes = 0
        by_identity: dict[bytes, list[Held]] = {}
        for held in leaving:
            block = self.host.find(held.key)
            if block is not None:
                host_bytes += len(block.slots) * PAGE_BYTES
                self._forget(block)
            if held.disk:
                by_identity.setdefault(held.identity.key, []).append(held)
        for some in by_identity.values():
            if self.store is not None:
                gone = await self._write(self.store.drop, some[0].identity, [held.hash for held in some])
                disk_bytes += gone.bytes
            for held in some:
                self.holdings.left(held.key, KvTier.DISK)
        return host_bytes, disk_bytes

    async def corrupt(self, identity: KvIdentity, hash: bytes) -> None:
        """A block was not what it had been: it leaves both tiers and is computed again."""
        await self._whole(self._corrupt(identity, hash))

    async def _corrupt(self, identity: KvIdentity, hash: bytes) -> None:
        async with self._demoting:
            held = self.holdings.get(identity.key + hash)
            if held is not None:
                self.counts.corrupt += 1
                await self._drop([held])

    def find_disk(self) -> None:
        """What the store holds at the start is held."""
        if self.store is None:
            return
        for identity, hashes in self.store.held():
            size = identity.signature.block_bytes
            for hash in hashes:
                if (parent := self.store.parent(identity, hash)) is not None:
                    self.holdings.came(identity, hash, parent, tier=KvTier.DISK, size=size, now_s=0.0)

    async def _reconcile(self) -> None:
        """Blocks that the store dropped by itself are no longer believed to be there.

        Looked for by the thread that writes, so that no later write of such a block is taken back.
        """
        gone = [held for key in self._take_gone() if (held := self.holdings.get(key)) is not None and held.disk]
        if not gone or self._disk is None:
            return
        for held in await self._write(self._disk.gone, gone):
            self.holdings.left(held.key, KvTier.DISK)
            block = self.host.find(held.key)
            if block is not None:
                block.on_disk = False

    async def close(self) -> None:
        """Ends the threads and closes the store."""
        if self._apart:
            await asyncio.wait(set(self._apart))
        if self.store is not None:
            await self._write(self.store.close)
        self._readers.shutdown(wait=True)
        self._writer.shutdown(wait=True)

    # ---- inner

    def _forget(self, block: HostBlock) -> None:
        self.host.remove(block.key)
        self._dirty.pop(block.key, None)
        self.holdings.left(block.key, KvTier.HOST)

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Work that goes on to its end even when nobody waits for it any more: threads have pages in their hands."""
        task = asyncio.get_running_loop().create_task(work)
        self._apart.add(task)
        task.add_done_callback(self._apart.discard)
        return await asyncio.shield(task)

    async def _write(self, call: Callable[[*Ts], T], *arguments: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, call, *arguments)

    async def _promote(self, identity: KvIdentity, hashes: Sequence[bytes]) -> bool:
        """Reads leading blocks from disk into memory, as many as one batch takes; whether the first may be there now."""
        assert self._disk is not None
        loop = asyncio.get_running_loop()
        size = identity.signature.block_bytes
        prefix = identity.key
        first = prefix + hashes[0]
        busy = self._promoting.get(first)
        if busy is not None:
            await busy.wait()
            return True
        arrived = self._promoting[first] = asyncio.Event()
        rooms: list[HostBlock] = []
        came = 0
        try:
            some = hashes[: max(1, BATCH_BYTES // size)]
            found = await loop.run_in_executor(self._readers, self._disk.look, identity, some)
            for hash, (parent, _) in zip(some, found, strict=False):
                key = prefix + hash
                if self.host.find(key) is not None or self._promoting.get(key, arrived) is not arrived:
                    break
                block = await self.reserve(identity, hash, parent)
                if block is None:
                    break
                self._promoting[key] = arrived
                rooms.append(block)
            if rooms:
                begin_s = self.now_s()
                forms = [form for _, form in found]
                sums = await loop.run_in_executor(self._readers, self._disk.read, self.host, identity, rooms, forms)
                for block, sum_ in zip(rooms, sums, strict=False):
                    self.keep(block, sum_, on_disk=True)
                    self.holdings.came(identity, block.hash, block.parent, tier=KvTier.DISK, size=size, now_s=self.now_s())
                    came += 1
                self._on_read(came * size, self.now_s() - begin_s)
        finally:
            for key in (first, *(block.key for block in rooms)):
                self._promoting.pop(key, None)
            for block in rooms[came:]:
                self.host.abandon(block)
            arrived.set()
        if came < len(rooms) or not found:  # what did not verify is no longer in the store
            await self._reconcile()
        return self.host.find(first) is not None

    async def _demote(self, blocks: Sequence[HostBlock]) -> None:
        """Writes dirty blocks to disk, as far as it takes them."""
        if self.store is None:
            return
        waiting = list(blocks)
        while waiting and self.now_s() >= self._disk_rests_until_s:
            async with self._demoting:
                waiting = [block for block in waiting if not block.on_disk and not block.gone]
                batch = one_batch(waiting)
                chosen = set(batch)
                waiting = [block for block in waiting if block not in chosen]
                await self._whole(self._demote_batch(batch))

    async def _demote_batch(self, batch: Sequence[HostBlock]) -> None:
        batch = [block for block in batch if not block.gone]
        if not batch:
            return
        identity = batch[0].identity
        codec = self.codec_of.get(identity.signature.model, "none")
        for block in batch:
            self.host.pin(block)
        try:
            assert self._disk is not None
            kept, refusal, wrong = await self._write(self._disk.put, identity, batch, codec)
        finally:
            for block in batch:
                self.host.unpin(block)
        now_s = self.now_s()
        if wrong is not None:  # memory changed under it: what was before it in the batch is written, it is gone
            self.counts.corrupt += 1
            self._forget(wrong)
            self._on_memory_wrong()
        for block in batch[:kept]:
            self._dirty.pop(block.key, None)
            if not block.gone:
                block.on_disk = True
            held = self.holdings.get(block.key)
            self.holdings.came(
                identity,
                block.hash,
                block.parent,
                tier=KvTier.DISK,
                size=block.size,
                now_s=held.used_s if held is not None else now_s,
            )
        await self._reconcile()
        if refusal is None:
            self.disk_state = ""
            return
        self._refused(refusal, batch[kept] if kept < len(batch) else None)

    def _refused(self, refusal: Refusal, block: HostBlock | None) -> None:
        if refusal is Refusal.INVALID:
            if block is not None:
                self._dirty.pop(block.key, None)
            return
        self.disk_state = refusal.value
        self._disk_rests_until_s = self.now_s() + (HOT_RETRY_S if refusal is Refusal.HOT else DISK_RETRY_S)
        self._on_disk_refused(refusal)
