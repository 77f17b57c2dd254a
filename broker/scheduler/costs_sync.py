"""Measured costs as a scheduler keeps them (PRO-4): the ``carpool-costs`` bucket, mirrored in its SQLite file.

Each entry is a whole measurement with the time when it was taken, so that of two the later one is right: what the bucket
lost, or has an older copy of, is written again from the mirror at the next start.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from profiles.registry import Registry
from subjects.bus import Bus, KvEntry, Subscription
from subjects.codec import decode, encode
from subjects.errors import BusError, ConfigError, DecodeError, place_of
from subjects.messages import KeptCosts
from subjects.names import COSTS_BUCKET
from subjects.tasks import Tasks

RETRY_S = 0.5
WRITE_TRIES_MAX = 20

log = structlog.get_logger(__name__)


def costs_key(kept: KeptCosts) -> str:
    """Of one deployment, kind of device, engine version and number of devices."""
    name = f"{kept.deployment}/{kept.device_type}/{kept.engine}/{kept.gpus}"
    return hashlib.sha256(name.encode()).hexdigest()[:32]


@dataclass(eq=False, slots=True)
class CostsSync:
    """Follows the bucket, and writes what its scheduler measured while it led."""

    _bus: Bus
    _registry: Registry
    on_kept: Callable[[tuple[KeptCosts, ...]], None]
    _watch: Subscription | None = None
    _tasks: Tasks = field(
        default_factory=lambda: Tasks(lambda error: log.error("a task of the kept costs failed", error=place_of(error)))
    )

    async def start(self) -> None:
        """Reads what is kept, restoring what the bucket has lost, then follows it. Waits for the bus as long as it takes."""
        mirrored = {costs_key(kept): kept for kept in await asyncio.to_thread(self._mirrored)}
        while True:
            try:
                entries = {entry.key: entry for entry in await self._bus.kv_entries(COSTS_BUCKET)}
                stored = {key: kept for key, entry in entries.items() if (kept := _decoded(entry)) is not None}
                for key, kept in mirrored.items():
                    if key not in stored or stored[key].at_unix_s < kept.at_unix_s:
                        stored[key] = kept
                        await self._bus.kv_put(COSTS_BUCKET, key, encode(kept))
                self.on_kept(tuple(sorted(stored.values(), key=lambda kept: (kept.at_unix_s, costs_key(kept)))))
                self._watch = await self._bus.kv_watch(COSTS_BUCKET, self._changed)
                return
            except BusError as error:
                log.debug("kept costs cannot be read yet", reason=str(error))
                await asyncio.sleep(RETRY_S)

    async def stop(self) -> None:
        """Follows no more."""
        if self._watch is not None:
            await self._watch.stop()
        await self._tasks.end()

    def keep(self, kept: KeptCosts) -> None:
        """Stores a measurement, here at once and in the bucket as soon as it can be written."""
        self._tasks.spawn(self._store(kept))

    async def _store(self, kept: KeptCosts) -> None:
        await self._mirror(kept)
        for _ in range(WRITE_TRIES_MAX):
            try:
                await self._bus.kv_put(COSTS_BUCKET, costs_key(kept), encode(kept))
                return
            except BusError as error:
                log.debug("measured costs are not in the bucket yet", reason=str(error))
                await asyncio.sleep(RETRY_S)

    def _changed(self, key: str, entry: KvEntry | None) -> None:
        kept = _decoded(entry) if entry is not None else None
        if kept is not None:
            self.on_kept((kept,))
            self._tasks.spawn(self._mirror(kept))

    async def _mirror(self, kept: KeptCosts) -> None:
        try:
            await asyncio.to_thread(self._registry.put_costs, costs_key(kept), kept)
        except ConfigError as error:
            log.error("the copy of measured costs is behind", error=str(error))

    def _mirrored(self) -> Sequence[KeptCosts]:
        try:
            return self._registry.costs()
        except ConfigError as error:
            log.error("the copy of measured costs cannot be read", error=str(error))
            return ()


def _decoded(entry: KvEntry) -> KeptCosts | None:
    try:
        return decode(entry.value, KeptCosts)
    except DecodeError as error:
        log.warning("measured costs in the bucket cannot be read", error=str(error))
        return None
