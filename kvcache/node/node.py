"""The node of one worker: its tiers, the socket for engines of its host, the bus and the data path to other nodes.

One event loop; ``open`` starts what listens, ``tend`` runs until the node is closed. It stays useful with less: without a
bus it serves its host, without a disk it keeps blocks in memory, and its own death costs engines time only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from kvcache.core.identity import KvIdentity
from kvcache.node.alerts import Alerts
from kvcache.node.exchange import DISK, Exchange
from kvcache.node.host_tier import HostTier
from kvcache.node.models import KnownModels
from kvcache.node.policy import NodePolicy
from kvcache.node.precision import PrecisionAdapter
from kvcache.node.settings import NodeSettings
from kvcache.node.socket import LocalSocket
from kvcache.node.tiers import Tiers
from kvcache.store.store import KvStore, Refusal, StoreLocked, StoreRefused, StoreStats
from kvcache.wire import messages as w
from subjects.bus import Bus
from subjects.errors import place_of
from subjects.ids import ReplicaId, base_name, incarnated
from subjects.messages import Severity
from subjects.tasks import Tasks

if TYPE_CHECKING:
    from kvcache.shared.index import RedisIndex

TEND_S = 0.25
DISK_S_MAX = 0.5
"""How long the store is waited for where its counts are asked for."""

log = structlog.get_logger(__name__)

_DISK_ALERTS = {
    Refusal.BUDGET: (
        "kv-write-budget",
        "raise the write budget, or let it be: new KV stays in host memory until it fills up",
    ),
    Refusal.READ_ONLY: ("kv-disk", "make the directory writable"),
    Refusal.NO_SPACE: ("kv-disk", "free some space on that file system"),
    Refusal.IO_ERROR: ("kv-disk", "look at the disk's health in the kernel's log"),
}


class Node:
    """See the module."""

    def __init__(self, settings: NodeSettings) -> None:
        """Opens the store, where one is wanted.

        Raises:
            StoreLocked: another process has the directory. One that cannot be used otherwise is done without.
        """
        self.settings = settings
        self.name = incarnated(f"{(base_name(settings.worker) or settings.worker)[:44]}-kv")
        self.alerts = Alerts(settings.worker)
        store: KvStore | None = None
        self._no_disk = ""
        directory = Path(settings.directory) if settings.directory and settings.disk_bytes_max else None
        self.models = KnownModels(directory)
        self.policy = NodePolicy(settings, self.models)
        if directory is not None:
            try:
                store = KvStore.open(
                    directory,
                    bytes_max=settings.disk_bytes_max,
                    write_bytes_per_day_max=settings.write_bytes_per_day_max,
                    now_s=time.time(),
                    hot_s=settings.hot_s,
                    idle_s_max=settings.idle_s_max,
                    policy=self.policy.disk_order,
                )
            except StoreLocked:
                raise
            except StoreRefused as error:
                self._no_disk = str(error)
                self.models.keep_nowhere()
        self.tiers = Tiers(
            settings,
            HostTier(settings.host_bytes_max, self.policy.host_order),
            store,
            take_gone=self.policy.disk_order.take_gone,
            holdings=self.policy.holdings,
            keeper=self.policy,
            on_disk_refused=self._disk_refused,
            on_memory_wrong=self._memory_wrong,
            on_read=lambda size, seconds: self.exchange.bandwidths.measured(DISK, size, seconds),
        )
        self.tiers.disk_state = self._no_disk
        self.tiers.find_disk()
        self.exchange = Exchange(settings, self.name, self.tiers, self.models, self.policy.dropped)
        self._adapter = PrecisionAdapter(self.tiers, self.models, self.exchange.bandwidths, self.corrupt)
        self._socket = LocalSocket(settings.socket_path, self.name, self.tiers, self)
        self._tasks = Tasks(lambda error: log.error("a part of the KV node failed", error=place_of(error)))
        self._closing: asyncio.Task[None] | None = None
        self._disk_asked: asyncio.Task[StoreStats] | None = None
        self._disk_known: StoreStats | None = None

    async def open(self, *, alone: bool = False) -> None:
        """Listens. ``alone``: there is no bus to :meth:`join` later.

        Raises:
            OSError: the socket's path or the data path's address cannot be used.
        """
        Path(self.settings.socket_path).parent.mkdir(parents=True, exist_ok=True)
        self._socket.open()
        self.exchange.listen(alone=alone)
        if self._no_disk:
            self.alerts.say("kv-disk", f"KV is kept in host memory only: {self._no_disk}")
        self._tasks.spawn(self._tend())

    async def join(self, bus: Bus) -> None:
        """Works with other nodes from now on."""
        self.alerts.bus = bus
        await self.exchange.join(bus)

    def share(self, redis: RedisIndex) -> None:
        """Shares its hotness with other nodes from now on."""
        self.policy.redis = redis
        redis.start()

    async def close(self) -> None:
        """Stops listening, writes what is dirty within the bound, and gives the directory free; all callers wait for it."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._socket.close()
        await self.exchange.close()
        await self._adapter.close()
        await self._tasks.end()
        lost_bytes = await self.tiers.flush(self.settings.flush_s_max)
        if lost_bytes and self.tiers.store is not None:
            log.warning("KV is lost with this node: the disk did not take it in time", bytes=lost_bytes)
        await self.tiers.close()
        if self.policy.redis is not None:
            await self.policy.redis.close()

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(TEND_S)
            try:
                now_s = time.monotonic()
                cold = self.policy.cold(now_s)
                if cold:
                    await self.tiers.demote(cold)
                await self.tiers.tend()
                await self.policy.hear_others(now_s)
                await self._tell_findings()
                self.alerts.post()
            except Exception as error:
                log.error("tending the KV tiers failed", error=place_of(error))

    async def _tell_findings(self) -> None:
        # In a thread, here and for the counts: the store may be at the disk, which the event loop does not wait for.
        store = self.tiers.store
        for finding in await asyncio.to_thread(store.take_findings) if store is not None else ():
            if finding.kind == "corrupt":
                self.tiers.counts.corrupt += 1
            if finding.kind in ("corrupt", "damaged", "foreign"):
                self.alerts.say(
                    "kv-corrupt",
                    f"KV on disk was not what had been written, is dropped and computed again: {finding.detail}",
                    remedy="look at the disk's health if it comes again",
                    file=finding.file,
                    finding=finding.kind,
                )
            else:
                log.info("KV store", finding=finding.kind, file=finding.file, detail=finding.detail)

    def _memory_wrong(self) -> None:
        self.alerts.say(
            "kv-corrupt",
            "KV in host memory was not what had been written, is dropped and computed again",
            severity=Severity.CRITICAL,
            remedy="test the memory of this host",
        )

    def _disk_refused(self, refusal: Refusal) -> None:
        if refusal in _DISK_ALERTS:
            kind, remedy = _DISK_ALERTS[refusal]
            text = f"the disk takes no more KV ({refusal.value}); host memory goes on"
            self.alerts.say(kind, text, remedy=remedy, directory=self.settings.directory)

    # ---- for engines and agents of this host

    def attached(self, engine: w.Attach) -> None:
        """See :class:`kvcache.node.socket.Answers`, here and below."""
        signature = engine.signature
        if signature is not None:
            self.tiers.codec_of[signature.model] = engine.codec
            if self.models.note(engine.weights_hash, signature, engine.model_hash, engine.codec):
                self.tiers.holdings.tell_again(engine.weights_hash, signature)

    def used(self, identity: KvIdentity, hashes: Sequence[bytes], replica: ReplicaId | None, use: w.KvUse) -> None:
        """A request used these blocks."""
        self.policy.used(identity, hashes, use, time.monotonic())
        self.tiers.used(identity, hashes, replica)

    def emptied(self, replica: ReplicaId) -> None:
        """An engine's own cache was reset."""
        self.exchange.emptied(replica)

    async def corrupt(self, identity: KvIdentity, hash: bytes) -> None:
        """A block did not have its checksum."""
        self._memory_wrong()
        await self.tiers.corrupt(identity, hash)

    async def prepare(self, identity: KvIdentity, hashes: Sequence[bytes], engine: w.Attach, asked: w.Prepare) -> int:
        """Leading blocks that can be read."""
        if not hashes:
            return 0
        self.policy.asked(identity, hashes, asked.use, time.monotonic())
        begin_s = time.monotonic()
        # Half of the time: what is lacking then may still be fetched.
        await self._adapter.fill(
            identity, hashes, end_s=begin_s + asked.deadline_s / 2, prefill_tokens_per_s=asked.prefill_tokens_per_s
        )
        left_s = max(0.0, begin_s + asked.deadline_s - time.monotonic())
        asked = msgspec.structs.replace(asked, deadline_s=left_s)
        blocks = await self.exchange.prepare(identity, hashes, engine, asked)
        self.tiers.counts.asked(identity.signature.model, len(hashes), blocks)
        self.tiers.used(identity, hashes[:blocks])
        return blocks

    async def evict(self, kv_signature: str, ratio: float) -> w.KvEvicted:
        """Drops a share of a model's blocks."""
        host_bytes, disk_bytes, blocks = await self.tiers.evict(kv_signature, ratio)
        return w.KvEvicted(host_bytes=host_bytes, disk_bytes=disk_bytes, blocks=blocks)

    async def pull(self, kv_signature: str, source: str, deadline_s: float) -> w.KvPulled:
        """Fetches a model's blocks from another node."""
        return await self.exchange.pull_all(kv_signature, source, deadline_s)

    async def stats(self) -> w.KvStats:
        """Counts and fill."""
        tiers, counts, exchange = self.tiers, self.tiers.counts, self.exchange
        host = tiers.host
        disk = await self._disk_stats()
        in_host = tiers.in_host()
        in_disk = disk.by_model if disk is not None else {}
        hashes = self.models.by_signature()
        gone = tiers.holdings.gone
        return w.KvStats(
            node=self.name,
            host=w.KvTierStats(bytes_used=host.bytes_used, bytes_max=host.bytes_max, blocks=len(host)),
            disk=w.KvTierStats(bytes_used=disk.bytes_used, bytes_max=disk.bytes_max, blocks=disk.blocks)
            if disk is not None
            else w.KvTierStats(),
            models=tuple(
                w.KvModelStats(
                    kv_signature=model,
                    model_hashes=hashes.get(model, ()),
                    host_blocks=in_host.get(model, (0, 0))[0],
                    host_bytes=in_host.get(model, (0, 0))[1],
                    disk_blocks=in_disk[model].blocks if model in in_disk else 0,
                    disk_bytes=in_disk[model].bytes if model in in_disk else 0,
                    hits=counts.of_model.get(model, (0, 0))[0],
                    misses=counts.of_model.get(model, (0, 0))[1],
                    evicted=gone.get(model, 0),
                )
                for model in sorted({*in_host, *in_disk, *counts.of_model, *gone})
            ),
            hits=counts.hits,
            misses=counts.misses,
            written=counts.written,
            refused=counts.refused,
            corrupt=counts.corrupt,
            pulled_blocks=exchange.pulled_blocks,
            pulled_bytes=exchange.pulled_bytes,
            served_blocks=exchange.server.served_blocks,
            served_bytes=exchange.server.served_bytes,
            write_bytes_left=disk.write_left_bytes if disk is not None else None,
            disk_state=tiers.disk_state or ("silent" if self._disk_asked is not None else ""),
            redis_state=self._redis_state(),
        )

    async def _disk_stats(self) -> StoreStats | None:
        """In a thread, since the store may be at the disk; of a disk that hangs what was known last."""
        if self.tiers.store is None:
            return None
        asked = self._disk_asked
        if asked is None:
            asked = self._disk_asked = asyncio.create_task(asyncio.to_thread(self.tiers.store.stats))
        await asyncio.wait([asked], timeout=DISK_S_MAX)
        if asked.done():
            self._disk_known, self._disk_asked = asked.result(), None
        else:
            self.alerts.say(
                "kv-disk",
                "the disk does not answer; host memory goes on",
                remedy="look at the disk's health in the kernel's log",
                directory=self.settings.directory,
            )
        return self._disk_known

    def _redis_state(self) -> str:
        if self.policy.redis is None:
            return "off"
        return "down" if self.policy.redis.state.value == "degraded" else "up"
