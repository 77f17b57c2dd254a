"""The registry as a scheduler keeps it: the ``carpool-models`` bucket, mirrored in SQLite, restored after a loss (PRO-2).

A key that disappears from the bucket can mean two things: somebody deleted the model, or the server lost its store. They
must not be confused, or a lost store would unload every model. So a deletion first leaves a ``deleted.<name>`` key in the
locks bucket, with the last revision; without that key a disappearance is a loss, and the record is written again. A record
of a lower revision than ours is a loss too (revisions of a name only grow): the store was restored from an older copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import structlog

from profiles.deployment import decode_record
from profiles.registry import Registry
from subjects.bus import Bus, KvEntry, Subscription
from subjects.codec import encode
from subjects.errors import BusError, ConfigError, DecodeError, WrongRevision, place_of
from subjects.messages import ModelRecord
from subjects.names import LOCKS_BUCKET, MODELS_BUCKET
from subjects.tasks import Tasks

RETRY_S = 0.5

log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class RegistrySync:
    """Follows the bucket, keeps the mirror, and writes what the control verbs ask for."""

    _bus: Bus
    _registry: Registry
    leads: Callable[[], bool]
    on_loaded: Callable[[tuple[ModelRecord, ...]], None]
    on_applied: Callable[[ModelRecord], None]
    on_removed: Callable[[str], None]
    _watches: list[Subscription] = field(default_factory=list)
    _tasks: Tasks = field(
        default_factory=lambda: Tasks(lambda error: log.error("a task of the registry failed", error=place_of(error)))
    )
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One verb at a time: each reads what is stored before it writes."""
    records: dict[str, ModelRecord] = field(default_factory=dict)

    async def start(self) -> None:
        """Reads the whole registry, restoring it from the mirror if the bucket is empty, then follows it. Waits for the
        bus as long as it takes."""
        while True:
            try:
                await self._load()
                self._watches.append(await self._bus.kv_watch(MODELS_BUCKET, self._model_changed))
                return
            except BusError as error:
                log.debug("the registry cannot be read yet", reason=str(error))
                await self._unwatch()
                await asyncio.sleep(RETRY_S)

    async def stop(self) -> None:
        """Follows no more."""
        await self._unwatch()
        await self._tasks.end()

    async def _unwatch(self) -> None:
        for watch in self._watches:
            await watch.stop()
        self._watches.clear()

    async def _load(self) -> None:
        mirrored = await asyncio.to_thread(self._registry.list)
        entries = await self._bus.kv_entries(MODELS_BUCKET)
        locks = await self._bus.kv_entries(LOCKS_BUCKET)
        deleted = {entry.key for entry in locks}
        records = {record.name: record for entry in entries if (record := _record(entry)) is not None}
        revisions = {entry.key: entry.revision for entry in entries}
        for record in mirrored:
            stored = records.get(record.name)
            if stored.revision < record.revision if stored is not None else _deleted_key(record.name) not in deleted:
                log.warning("the bucket has lost a model: written again from the mirror", model=record.name)
                with suppress(WrongRevision):  # Another scheduler restores the same.
                    await self._bus.kv_put(
                        MODELS_BUCKET, record.name, encode(record), expected_revision=revisions.get(record.name, 0)
                    )
                records[record.name] = record
        self.records = records
        await asyncio.to_thread(self._mirror_all, list(records.values()), mirrored)
        self.on_loaded(tuple(records.values()))

    def _mirror_all(self, records: list[ModelRecord], mirrored: list[ModelRecord]) -> None:
        known = {record.name: record for record in mirrored}
        try:
            for record in records:
                if known.pop(record.name, None) != record:
                    self._registry.put(record)
            for name in known:
                self._registry.delete(name)
        except ConfigError as error:
            _not_mirrored(error)

    async def _mirror(self, record: ModelRecord) -> None:
        try:
            await asyncio.to_thread(self._registry.put, record)
        except ConfigError as error:
            _not_mirrored(error)

    # --------------------------------------------------------------------------------------------------------- following

    def _model_changed(self, key: str, entry: KvEntry | None) -> None:
        if entry is None:
            if key in self.records:
                self._tasks.spawn(self._disappeared(key))
            return
        record = _record(entry)
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
        self.on_applied(record)
        self._tasks.spawn(self._mirror(record))

    async def _put_again(self, record: ModelRecord, over_revision: int) -> None:
        with suppress(BusError):
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
                    await self._bus.kv_put(MODELS_BUCKET, name, encode(self.records[name]), expected_revision=0)
                    return
            except WrongRevision:
                return
            except BusError as error:
                log.debug("a missing model cannot be looked into yet", model=name, reason=str(error))
            await asyncio.sleep(RETRY_S)

    async def _forget(self, name: str) -> None:
        self.records.pop(name, None)
        self.on_removed(name)
        try:
            await asyncio.to_thread(self._registry.delete, name)
        except ConfigError as error:
            _not_mirrored(error)

    # ----------------------------------------------------------------------------------------------------------- writing

    async def apply(self, record: ModelRecord) -> ModelRecord:
        """Stores a record under the next revision of its name; an equal one is left as it is.

        Raises:
            BusError: nothing is stored.
        """
        async with self._writing:
            old = self.records.get(record.name)
            if old is not None and _without_revision(old) == _without_revision(record):
                return old
            # A name that was deleted goes on where it ended, so that a mirror from before is known to be older.
            tomb = await self._bus.kv_get(LOCKS_BUCKET, _deleted_key(record.name))
            before = old.revision if old is not None else _tomb_revision(tomb)
            stored = _with_revision(record, before + 1)
            await self._bus.kv_delete(LOCKS_BUCKET, _deleted_key(record.name))
            await self._bus.kv_put(MODELS_BUCKET, record.name, encode(stored))
            self.records[record.name] = stored
            self.on_applied(stored)
            await self._mirror(stored)
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


def _not_mirrored(error: ConfigError) -> None:
    # The truth is in the bucket: it is served, and the mirror is filled at the next start.
    log.error("the registry's own copy is behind", error=str(error))


def _record(entry: KvEntry) -> ModelRecord | None:
    try:
        return decode_record(entry.value)
    except DecodeError as error:
        log.warning("a record of the registry cannot be read", model=entry.key, error=str(error))
        return None


def _with_revision(record: ModelRecord, revision: int) -> ModelRecord:
    return msgspec.structs.replace(record, revision=revision)


def _without_revision(record: ModelRecord) -> ModelRecord:
    return _with_revision(record, 0)
