"""The registry as a scheduler keeps it: the ``carpool-models`` bucket, mirrored in SQLite, restored after a loss (PRO-2).

A key that disappears from the bucket can mean two things: somebody deleted the model, or the server lost its store. They
must not be confused, or a lost store would unload every model. So a deletion first leaves a ``deleted.<name>`` key in the
locks bucket, with the last revision; without that key a disappearance is a loss, and the record is written again. A record
of a lower revision than ours is a loss too (revisions of a name only grow): the store was restored from an older copy.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import structlog

from broker.core.pool.events import ModelApplied, ModelRemoved, RegistryLoaded
from broker.scheduler.bucket_sync import RETRY_S, BucketSync, readable
from profiles.deployment import decode_record
from subjects.bus import KvEntry, Subscription
from subjects.codec import encode
from subjects.errors import BusError, WrongRevision
from subjects.messages import ModelRecord
from subjects.names import LOCKS_BUCKET, MODELS_BUCKET

log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class RegistrySync(BucketSync):
    """Follows the bucket, keeps the mirror, and writes what the control verbs ask for."""

    records: dict[str, ModelRecord] = field(default_factory=dict)

    async def _load(self) -> Subscription:
        mirrored = await asyncio.to_thread(self._registry.list)
        entries = await self._bus.kv_entries(MODELS_BUCKET)
        locks = await self._bus.kv_entries(LOCKS_BUCKET)
        deleted = {entry.key for entry in locks}
        records = {record.name: record for entry in entries if (record := readable(entry, decode_record)) is not None}
        revisions = {entry.key: entry.revision for entry in entries}
        for record in mirrored:
            stored = records.get(record.name)
            if stored.revision < record.revision if stored is not None else _deleted_key(record.name) not in deleted:
                log.warning("the bucket has lost a model: written again from the mirror", model=record.name)
                with suppress(WrongRevision):  # Another scheduler restores the same.
                    await self._put(record, revisions.get(record.name, 0))
                records[record.name] = record
        self.records = records
        await self._mirror(self._mirror_all, list(records.values()), mirrored)
        self._step(RegistryLoaded(tuple(records.values())))
        return await self._bus.kv_watch(MODELS_BUCKET, self._changed)

    def _mirror_all(self, records: list[ModelRecord], mirrored: list[ModelRecord]) -> None:
        known = {record.name: record for record in mirrored}
        for record in records:
            if known.pop(record.name, None) != record:
                self._registry.put(record)
        for name in known:
            self._registry.delete(name)

    def _changed(self, key: str, entry: KvEntry | None) -> None:
        if entry is None:
            if key in self.records:
                self._tasks.spawn(self._disappeared(key))
            return
        record = readable(entry, decode_record)
        known = self.records.get(key)
        if record is None or record == known:
            return
        if known is not None and record.revision < known.revision:
            # Revisions of a name only grow: the store is an older one.
            if self.leads():
                log.warning("a model in the bucket is older than ours: written again", model=key)
                self._tasks.spawn(self._put_again(known, entry.revision))
            return
        self.records[record.name] = record
        self._step(ModelApplied(record))
        self._tasks.spawn(self._mirror(self._registry.put, record))

    async def _put_again(self, record: ModelRecord, over_revision: int) -> None:
        with suppress(BusError):
            await self._put(record, over_revision)

    async def _put(self, record: ModelRecord, over_revision: int) -> None:
        await self._bus.kv_put(MODELS_BUCKET, record.name, encode(record), expected_revision=over_revision)

    async def _disappeared(self, name: str) -> None:
        while name in self.records:
            try:
                if await self._bus.kv_get(MODELS_BUCKET, name) is not None:
                    return
                if await self._bus.kv_get(LOCKS_BUCKET, _deleted_key(name)) is not None:
                    await self._forget(name)
                    return
                if self.leads():
                    log.warning("a model is missing from the bucket and was never deleted: written again", model=name)
                    await self._put(self.records[name], 0)
                    return
            except WrongRevision:
                return
            except BusError as error:
                log.debug("a missing model cannot be looked into yet", model=name, reason=str(error))
            await asyncio.sleep(RETRY_S)

    async def _forget(self, name: str) -> None:
        self.records.pop(name, None)
        self._step(ModelRemoved(name))
        await self._mirror(self._registry.delete, name)

    async def apply(self, record: ModelRecord) -> ModelRecord:
        """Stores a record under the next revision of its name; an equal one is left as it is.

        Raises:
            BusError: nothing is stored.
        """
        async with self._writing:
            old = self.records.get(record.name)
            if old is not None and old == msgspec.structs.replace(record, revision=old.revision):
                return old
            # A name that was deleted goes on where it ended, so that a mirror from before is known to be older.
            tomb = await self._bus.kv_get(LOCKS_BUCKET, _deleted_key(record.name))
            before = old.revision if old is not None else _tomb_revision(tomb)
            stored = msgspec.structs.replace(record, revision=before + 1)
            await self._bus.kv_delete(LOCKS_BUCKET, _deleted_key(record.name))
            await self._bus.kv_put(MODELS_BUCKET, record.name, encode(stored))
            self.records[record.name] = stored
            self._step(ModelApplied(stored))
            await self._mirror(self._registry.put, stored)
            return stored

    async def delete(self, name: str) -> None:
        """Removes a record, everywhere.

        Raises:
            BusError: it may be gone or not; asking again is safe.
        """
        async with self._writing:
            last = self.records[name].revision if name in self.records else 0
            await self._bus.kv_put(LOCKS_BUCKET, _deleted_key(name), str(last).encode())
            await self._bus.kv_delete(MODELS_BUCKET, name)
            await self._forget(name)


def _deleted_key(name: str) -> str:
    return f"deleted.{name}"


def _tomb_revision(tomb: KvEntry | None) -> int:
    return int(tomb.value) if tomb is not None and tomb.value.isdigit() else 0
