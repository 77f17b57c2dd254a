"""The node of one worker: its tiers, the socket for engines of its host, the bus and the data path to other nodes.

One event loop; ``open`` starts what listens, ``tend`` runs until the node is closed. It stays useful with less: without a
bus it serves its host, without a disk it keeps blocks in memory, and its own death costs engines time only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import structlog

from kvcache.core.identity import KvIdentity
from kvcache.host_tier import HostTier, LeastRecent
from kvcache.node_messages import Attach, KvEvicted, KvModelStats, KvPulled, KvStats, KvTierStats, KvUse, Prepare
from kvcache.node_settings import NodeSettings
from kvcache.node_socket import LocalSocket
from kvcache.node_tiers import Tiers
from subjects.errors import place_of
from subjects.ids import ReplicaId, incarnated
from subjects.tasks import Tasks

TEND_S = 0.25

log = structlog.get_logger(__name__)


class Node:
    """See the module."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.name = incarnated("kv")
        self.tiers = Tiers(settings, HostTier(settings.host_bytes_max, LeastRecent()), None)
        self._socket = LocalSocket(settings.socket_path, self.name, self.tiers, self)
        self._tasks = Tasks(lambda error: log.error("a part of the KV node failed", error=place_of(error)))

    async def open(self) -> None:
        """Listens.

        Raises:
            OSError: the socket's path cannot be used.
        """
        Path(self.settings.socket_path).parent.mkdir(parents=True, exist_ok=True)
        self._socket.open()
        self._tasks.spawn(self._tend())

    async def close(self) -> None:
        """Stops listening, writes what is dirty within the bound, and gives the directory free."""
        await self._socket.close()
        await self._tasks.end()
        await self.tiers.flush(self.settings.flush_s_max)
        await self.tiers.close()

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(TEND_S)
            try:
                await self.tiers.tend()
            except Exception as error:
                log.error("tending the KV tiers failed", error=place_of(error))

    # ---- for engines and agents of this host

    def attached(self, engine: Attach) -> None:
        """See :class:`kvcache.node_socket.Answers`."""
        if engine.signature is not None:
            self.tiers.codec_of[engine.signature.model] = engine.codec

    def used(self, identity: KvIdentity, hashes: Sequence[bytes], replica: ReplicaId | None, use: KvUse) -> None:
        """See :class:`kvcache.node_socket.Answers`."""
        self.tiers.touch(identity, hashes, replica=replica, test=use.test)

    def emptied(self, replica: ReplicaId) -> None:
        """See :class:`kvcache.node_socket.Answers`."""
        self.tiers.holdings.emptied(replica)

    async def corrupt(self, identity: KvIdentity, hash: bytes) -> None:
        """See :class:`kvcache.node_socket.Answers`."""
        await self.tiers.corrupt(identity, hash)

    async def prepare(self, identity: KvIdentity, hashes: Sequence[bytes], engine: Attach, asked: Prepare) -> int:
        """See :class:`kvcache.node_socket.Answers`."""
        return self.tiers.leading(identity, hashes)

    async def evict(self, kv_signature: str, ratio: float) -> KvEvicted:
        """See :class:`kvcache.node_socket.Answers`."""
        host_bytes, disk_bytes, blocks = await self.tiers.evict(kv_signature, ratio)
        return KvEvicted(host_bytes=host_bytes, disk_bytes=disk_bytes, blocks=blocks)

    async def pull(self, kv_signature: str, source: str, deadline_s: float) -> KvPulled:
        """See :class:`kvcache.node_socket.Answers`."""
        return KvPulled(failure="this node is on no bus")

    def stats(self) -> KvStats:
        """See :class:`kvcache.node_socket.Answers`."""
        tiers, counts = self.tiers, self.tiers.counts
        disk = tiers.store.stats() if tiers.store is not None else None
        return KvStats(
            node=self.name,
            host=KvTierStats(bytes_used=tiers.host.bytes_used, bytes_max=tiers.host.bytes_max, blocks=len(tiers.host)),
            disk=KvTierStats(bytes_used=disk.bytes_used, bytes_max=disk.bytes_max, blocks=disk.blocks)
            if disk
            else KvTierStats(),
            models=self._models(),
            hits=counts.hits,
            misses=counts.misses,
            written=counts.written,
            refused=counts.refused,
            corrupt=counts.corrupt,
            write_bytes_left=disk.write_left_bytes if disk else None,
            disk_state=tiers.disk_state,
        )

    def _models(self) -> tuple[KvModelStats, ...]:
        host: dict[str, list[int]] = {}
        for block in self.tiers.host:
            count = host.setdefault(block.identity.signature.model, [0, 0])
            count[0] += 1
            count[1] += len(block.slots) * 65536
        disk = self.tiers.store.stats().by_model if self.tiers.store is not None else {}
        return tuple(
            KvModelStats(
                kv_signature=model,
                host_blocks=host.get(model, [0, 0])[0],
                host_bytes=host.get(model, [0, 0])[1],
                disk_blocks=disk[model].blocks if model in disk else 0,
                disk_bytes=disk[model].bytes if model in disk else 0,
            )
            for model in sorted({*host, *disk})
        )
