"""The node of one worker: its tiers, the socket for engines of its host, the bus and the data path to other nodes.

One event loop; ``open`` starts what listens, ``tend`` runs until the node is closed. It stays useful with less: without a
bus it serves its host, without a disk it keeps blocks in memory, and its own death costs engines time only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import structlog

from kvcache.core.identity import KvIdentity
from kvcache.host_tier import HostTier, LeastRecent
from kvcache.node_alerts import Alerts
from kvcache.node_exchange import DISK, Exchange
from kvcache.node_messages import Attach, KvEvicted, KvModelStats, KvPulled, KvStats, KvTierStats, KvUse, Prepare
from kvcache.node_models import KnownModels
from kvcache.node_settings import NodeSettings
from kvcache.node_socket import LocalSocket
from kvcache.node_tiers import DiskOrder, Tiers
from kvcache.store import KvStore, Refusal, StoreLocked, StoreRefused
from subjects.bus import Bus
from subjects.errors import place_of
from subjects.ids import ReplicaId, incarnated
from subjects.messages import Severity
from subjects.tasks import Tasks

TEND_S = 0.25

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
    """See the module. ``disk_refused`` says why there is no store, where one was wanted."""

    def __init__(self, settings: NodeSettings, store: KvStore | None = None, disk_order: DiskOrder | None = None) -> None:
        self.settings = settings
        self.name = incarnated("kv")
        self.alerts = Alerts(settings.worker)
        self.models = KnownModels(Path(settings.directory) if store is not None else None)
        self.tiers = Tiers(
            settings,
            HostTier(settings.host_bytes_max, LeastRecent(settings.idle_s_max)),
            store,
            disk_order=disk_order,
            on_disk_refused=self._disk_refused,
            on_read=lambda size, seconds: self.exchange.bandwidths.measured(DISK, size, seconds),
        )
        self.exchange = Exchange(settings, self.name, self.tiers, self.models)
        self._socket = LocalSocket(settings.socket_path, self.name, self.tiers, self)
        self._tasks = Tasks(lambda error: log.error("a part of the KV node failed", error=place_of(error)))
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    def with_disk(cls, settings: NodeSettings) -> Node:
        """A node whose store is open. Where the directory cannot be used it does without, and says so.

        Raises:
            StoreLocked: another process has the directory.
        """
        if not settings.directory or not settings.disk_bytes_max:
            return cls(settings)
        order = DiskOrder(LeastRecent(settings.idle_s_max))
        try:
            store = KvStore.open(
                Path(settings.directory),
                bytes_max=settings.disk_bytes_max,
                write_bytes_per_day_max=settings.write_bytes_per_day_max,
                now_s=time.time(),
                hot_s=settings.hot_s,
                idle_s_max=settings.idle_s_max,
                policy=order,
            )
        except StoreLocked:
            raise
        except StoreRefused as error:
            node = cls(settings)
            node.tiers.disk_state = str(error)
            return node
        node = cls(settings, store, order)
        node.tiers.find_disk()
        return node

    async def open(self, bus: Bus | None = None) -> None:
        """Listens, and joins others over ``bus``.

        Raises:
            OSError: the socket's path or the data path's address cannot be used.
        """
        self.alerts.bus = bus
        Path(self.settings.socket_path).parent.mkdir(parents=True, exist_ok=True)
        self._socket.open()
        if bus is not None:
            self.exchange.listen()
            await self.exchange.join(bus)
        if self.settings.directory and self.tiers.store is None and self.settings.disk_bytes_max:
            self.alerts.say("kv-disk", f"KV is kept in host memory only: {self.tiers.disk_state}")
        self._tasks.spawn(self._tend())

    async def close(self) -> None:
        """Stops listening, writes what is dirty within the bound, and gives the directory free; all callers wait for it."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._socket.close()
        await self.exchange.close()
        await self._tasks.end()
        lost_bytes = await self.tiers.flush(self.settings.flush_s_max)
        if lost_bytes and self.tiers.store is not None:
            log.warning("KV is lost with this node: the disk did not take it in time", bytes=lost_bytes)
        await self.tiers.close()

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(TEND_S)
            try:
                await self.tiers.tend()
                self._tell_findings()
            except Exception as error:
                log.error("tending the KV tiers failed", error=place_of(error))

    def _tell_findings(self) -> None:
        store = self.tiers.store
        for finding in store.take_findings() if store is not None else ():
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

    def _disk_refused(self, refusal: Refusal) -> None:
        if refusal in _DISK_ALERTS:
            kind, remedy = _DISK_ALERTS[refusal]
            text = f"the disk takes no more KV ({refusal.value}); host memory goes on"
            self.alerts.say(kind, text, remedy=remedy, directory=self.settings.directory)

    # ---- for engines and agents of this host

    def attached(self, engine: Attach) -> None:
        """See :class:`kvcache.node_socket.Answers`, here and below."""
        signature = engine.signature
        if signature is not None:
            self.tiers.codec_of[signature.model] = engine.codec
            if self.models.note(engine.weights_hash, signature, engine.model_hash, engine.codec):
                self.tiers.holdings.tell_again(engine.weights_hash, signature)

    def used(self, identity: KvIdentity, hashes: Sequence[bytes], replica: ReplicaId | None, use: KvUse) -> None:
        """A request uses these blocks."""
        self.tiers.touch(identity, hashes, replica=replica, test=use.test)

    def emptied(self, replica: ReplicaId) -> None:
        """An engine's own cache was reset."""
        self.exchange.emptied(replica)

    async def corrupt(self, identity: KvIdentity, hash: bytes) -> None:
        """A block did not have its checksum."""
        self.alerts.say(
            "kv-corrupt",
            "KV in host memory was not what had been written, is dropped and computed again",
            severity=Severity.CRITICAL,
            remedy="test the memory of this host",
        )
        await self.tiers.corrupt(identity, hash)

    async def prepare(self, identity: KvIdentity, hashes: Sequence[bytes], engine: Attach, asked: Prepare) -> int:
        """Leading blocks that can be read."""
        return await self.exchange.prepare(identity, hashes, engine, asked) if hashes else 0

    async def evict(self, kv_signature: str, ratio: float) -> KvEvicted:
        """Drops a share of a model's blocks."""
        host_bytes, disk_bytes, blocks = await self.tiers.evict(kv_signature, ratio)
        return KvEvicted(host_bytes=host_bytes, disk_bytes=disk_bytes, blocks=blocks)

    async def pull(self, kv_signature: str, source: str, deadline_s: float) -> KvPulled:
        """Fetches a model's blocks from another node."""
        return await self.exchange.pull_all(kv_signature, source, deadline_s)

    def stats(self) -> KvStats:
        """Counts and fill."""
        tiers, counts, exchange = self.tiers, self.tiers.counts, self.exchange
        host = tiers.host
        disk = tiers.store.stats() if tiers.store is not None else None
        in_host = tiers.in_host()
        in_disk = disk.by_model if disk is not None else {}
        hashes = self.models.by_signature()
        return KvStats(
            node=self.name,
            host=KvTierStats(bytes_used=host.bytes_used, bytes_max=host.bytes_max, blocks=len(host)),
            disk=KvTierStats(bytes_used=disk.bytes_used, bytes_max=disk.bytes_max, blocks=disk.blocks)
            if disk is not None
            else KvTierStats(),
            models=tuple(
                KvModelStats(
                    kv_signature=model,
                    model_hashes=hashes.get(model, ()),
                    host_blocks=in_host.get(model, (0, 0))[0],
                    host_bytes=in_host.get(model, (0, 0))[1],
                    disk_blocks=in_disk[model].blocks if model in in_disk else 0,
                    disk_bytes=in_disk[model].bytes if model in in_disk else 0,
                )
                for model in sorted({*in_host, *in_disk})
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
            disk_state=tiers.disk_state,
        )
