"""People's locks, drains, pins and modes as a scheduler keeps them (SCH-11).

They are one value in the ``carpool-locks`` bucket with a copy in the scheduler's SQLite file, so that neither a lost store
nor a lost scheduler forgets them.

The value's revision only grows. So one that is gone, or lower than ours, is a store that was lost or restored from an older
copy, and is written again; an unlock is a higher revision without the lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec
import structlog

from broker.core.pool.events import OverridesChanged
from broker.core.pool.overrides import PINNED, UNPINNED, with_override
from broker.scheduler.bucket_sync import RETRY_S, BucketSync, readable
from subjects.bus import KvEntry, Subscription
from subjects.codec import decode, encode
from subjects.errors import BusError, WrongRevision
from subjects.messages import Override, OverrideKind, Overrides
from subjects.names import LOCKS_BUCKET

KEY = "overrides"
WRITES_MAX = 5
"""Tries of one change against others who write at the same time."""
_OLD_PIN = "pin."
"""Pins were keys of their own once, ``pin.<name>``."""

log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class OverridesSync(BucketSync):
    """Follows the value, keeps its copy, and writes what people ask for."""

    _restoring: bool = False
    known: Overrides = field(default_factory=Overrides)

    async def _load(self) -> Subscription:
        mirrored = await self._mirrored(self._registry.overrides, Overrides())
        entries = {entry.key: entry for entry in await self._bus.kv_entries(LOCKS_BUCKET)}
        entry = entries.get(KEY)
        stored = _decoded(entry)
        if mirrored.revision > stored.revision:
            log.warning("the bucket has lost locks: written again from the mirror", entries=len(mirrored.entries))
            with suppress(WrongRevision):  # Another scheduler restores the same.
                await self._put(mirrored, entry.revision if entry is not None else 0)
            stored = mirrored
        for key in sorted(entries):
            name = key.removeprefix(_OLD_PIN)
            known = any(one.kind is OverrideKind.PIN and one.about == name for one in stored.entries)
            if key.startswith(_OLD_PIN) and not known:
                value = PINNED if entries[key].value == PINNED.encode() else UNPINNED
                old = with_override(stored, Override(kind=OverrideKind.PIN, about=name, value=value))
                stored = msgspec.structs.replace(old, revision=stored.revision)  # Nobody has said it again.
        self._take(stored)
        await self._mirror(self._registry.put_overrides, stored)
        return await self._bus.kv_watch(LOCKS_BUCKET, self._changed)

    def _take(self, overrides: Overrides) -> None:
        before, self.known = self.known, overrides
        if before != overrides:
            self._step(OverridesChanged(overrides))

    def _changed(self, key: str, entry: KvEntry | None) -> None:
        if key != KEY:
            return
        stored = _decoded(entry)
        if stored.revision > self.known.revision:
            self._take(stored)
            self._tasks.spawn(self._mirror(self._registry.put_overrides, stored))
        elif stored.revision < self.known.revision and not self._restoring:
            self._restoring = True
            self._tasks.spawn(self._restore())

    async def _restore(self) -> None:
        """The bucket has lost what we know. Whoever leads writes it again; so we look until somebody has, or we lead."""
        try:
            while True:
                with suppress(BusError):
                    entry = await self._bus.kv_get(LOCKS_BUCKET, KEY)
                    if _decoded(entry).revision >= self.known.revision:
                        return
                    if self.leads():
                        log.warning("the locks in the bucket are lost or older than ours: written again")
                        await self._put(self.known, entry.revision if entry is not None else 0)
                        return
                await asyncio.sleep(RETRY_S)
        finally:
            self._restoring = False

    async def _put(self, overrides: Overrides, over_revision: int) -> None:
        await self._bus.kv_put(LOCKS_BUCKET, KEY, encode(overrides), expected_revision=over_revision)

    async def change(self, edit: Callable[[Overrides], Overrides]) -> bool:
        """Stores ``edit`` of what is known; False when that says nothing new.

        Raises:
            BusError: nothing is stored, as far as we know; asking again is safe.
            ConfigError: ``edit`` refuses.
        """
        async with self._writing:
            for _ in range(WRITES_MAX):
                entry = await self._bus.kv_get(LOCKS_BUCKET, KEY)
                stored = _decoded(entry)
                base = stored if stored.revision > self.known.revision else self.known
                wanted = edit(base)
                if wanted == base:
                    return False
                try:
                    await self._put(wanted, entry.revision if entry is not None else 0)
                except WrongRevision:
                    continue  # Somebody was faster; their word and ours both count.
                self._take(wanted)
                await self._mirror(self._registry.put_overrides, wanted)
                return True
            raise WrongRevision(f"others changed the locks {WRITES_MAX} times at the same moment")


def _decoded(entry: KvEntry | None) -> Overrides:
    return readable(entry, partial(decode, kind=Overrides)) or Overrides()
