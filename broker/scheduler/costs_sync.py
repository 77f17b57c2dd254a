"""Measured costs as a scheduler keeps them (PRO-4): the ``carpool-costs`` bucket, mirrored in its SQLite file.

Each entry is a whole measurement with the time when it was taken, so that of two the later one is right: what the bucket
lost, or has an older copy of, is written again from the mirror at the next start. What is older than ``KEPT_S_MAX`` goes at
a start: most of it is of deployments and engines that are no more, and what still serves is measured again.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from broker.core.pool.events import CostsKept
from broker.scheduler.bucket_sync import RETRY_S, BucketSync, readable
from subjects.bus import KvEntry, Subscription
from subjects.codec import decode, encode
from subjects.errors import BusError
from subjects.messages import KeptCosts
from subjects.names import COSTS_BUCKET

WRITE_TRIES_MAX = 20
KEPT_S_MAX = 90 * 86400.0

_decode = partial(decode, kind=KeptCosts)
log = structlog.get_logger(__name__)


def costs_key(kept: KeptCosts) -> str:
    """Of one deployment, kind of device, engine version and number of devices."""
    name = f"{kept.deployment}/{kept.device_type}/{kept.engine}/{kept.gpus}"
    return hashlib.sha256(name.encode()).hexdigest()[:32]


@dataclass(eq=False, slots=True)
class CostsSync(BucketSync):
    """Follows the bucket, and writes what its scheduler measured while it led."""

    async def _load(self) -> Subscription:
        nothing: Sequence[KeptCosts] = ()
        mirrored = {costs_key(kept): kept for kept in await self._mirrored(self._registry.costs, nothing)}
        entries = {entry.key: entry for entry in await self._bus.kv_entries(COSTS_BUCKET)}
        stored = {key: kept for key, entry in entries.items() if (kept := readable(entry, _decode)) is not None}
        for key, kept in mirrored.items():
            if key not in stored or stored[key].at_unix_s < kept.at_unix_s:
                stored[key] = kept
                await self._bus.kv_put(COSTS_BUCKET, key, encode(kept))
        for key in [key for key, kept in stored.items() if kept.at_unix_s < time.time() - KEPT_S_MAX]:
            del stored[key]
            await self._mirror(self._registry.delete_costs, key)
            await self._bus.kv_delete(COSTS_BUCKET, key)
        latest = sorted(stored.values(), key=lambda kept: (kept.at_unix_s, costs_key(kept)))
        self._step(CostsKept(tuple(latest)))
        return await self._bus.kv_watch(COSTS_BUCKET, self._changed)

    def keep(self, kept: KeptCosts) -> None:
        """Stores a measurement, here at once and in the bucket as soon as it can be written."""
        self._tasks.spawn(self._store(kept))

    async def _store(self, kept: KeptCosts) -> None:
        await self._mirror(self._registry.put_costs, costs_key(kept), kept)
        for _ in range(WRITE_TRIES_MAX):
            try:
                await self._bus.kv_put(COSTS_BUCKET, costs_key(kept), encode(kept))
                return
            except BusError as error:
                log.debug("measured costs are not in the bucket yet", reason=str(error))
                await asyncio.sleep(RETRY_S)

    def _changed(self, key: str, entry: KvEntry | None) -> None:
        if (kept := readable(entry, _decode)) is not None:
            self._step(CostsKept((kept,)))
            self._tasks.spawn(self._mirror(self._registry.put_costs, costs_key(kept), kept))
