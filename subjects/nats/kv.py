"""Small shared state on JetStream's key-value layout (stream ``KV_<bucket>``, subjects ``$KV.<bucket>.<key>``).

The layout is that of other NATS clients, so ``nats kv`` can read and repair it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from subjects.bus import KvEntry
from subjects.errors import BusError, QueueMissing, RequestTimeout, WrongRevision, place_of
from subjects.nats.client import Headers, Inbound
from subjects.nats.connection import Connection
from subjects.nats.jetstream import EXPECTED_LAST_SUBJECT_SEQUENCE, NANOSECONDS, JetStream, kept_stream
from subjects.tasks import end_tasks

HEARTBEAT_S: Final = 1.0
SILENCE_S_MAX: Final = 3.5
RETRY_S: Final = 0.25
WATCH_IDLE_S: Final = 5.0
SNAPSHOT_TIMEOUT_S: Final = 5.0
_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")

Watcher = Callable[[str, KvEntry | None], None]
log = structlog.get_logger(__name__)


def stream_of(bucket: str) -> str:
    """The stream that holds a bucket."""
    return f"KV_{bucket}"


def subject_of(bucket: str, key: str) -> str:
    """The subject of a key.

    Raises:
        ValueError: ``key`` cannot be a subject.
    """
    if _KEY.fullmatch(key) is None:
        raise ValueError(f"{key!r} cannot be a key: use letters, digits and -/_=, with dots in between")
    return f"$KV.{bucket}.{key}"


def _is_removal(headers: Headers | None) -> bool:
    return headers is not None and (headers.get("KV-Operation", "") in ("DEL", "PURGE") or "Nats-Marker-Reason" in headers)


class KeyValue:
    """All buckets."""

    def __init__(self, connection: Connection, jetstream: JetStream) -> None:
        self._connection = connection
        self._jetstream = jetstream

    async def ensure(self, bucket: str) -> None:
        """Creates the bucket if it is missing."""
        config = kept_stream(
            stream_of(bucket),
            [f"$KV.{bucket}.>"],
            max_age_s=0,
            max_bytes=-1,
            memory=False,
            max_msgs_per_subject=1,
            discard="new",
            allow_rollup_hdrs=True,
            deny_delete=True,
        )
        await self._jetstream.ensure(config)

    async def get(self, bucket: str, key: str) -> KvEntry | None:
        """The value, or None."""
        subject = subject_of(bucket, key)
        try:
            message = await self._jetstream.last_message(stream_of(bucket), subject)
        except QueueMissing:
            await self.ensure(bucket)
            return None
        if message is None or b"KV-Operation" in message.header_bytes() or b"Nats-Marker" in message.header_bytes():
            return None
        return KvEntry(key, message.payload(), message.seq)

    async def put(self, bucket: str, key: str, value: bytes, *, expected_revision: int | None) -> int:
        """Stores and returns the new revision."""
        subject = subject_of(bucket, key)
        try:
            return await self._store(bucket, subject, value, expected_revision)
        except WrongRevision:
            if expected_revision != 0:
                raise
            # A removed key leaves a marker behind, which counts as a message of this subject.
            marker = await self._jetstream.last_message(stream_of(bucket), subject)
            if marker is None or b"KV-Operation" not in marker.header_bytes():
                raise
            return await self._store(bucket, subject, value, marker.seq)

    async def _store(self, bucket: str, subject: str, value: bytes, expected: int | None) -> int:
        headers = None if expected is None else {EXPECTED_LAST_SUBJECT_SEQUENCE: str(expected)}
        try:
            ack = await self._jetstream.publish(subject, value, headers)
        except QueueMissing:
            await self.ensure(bucket)
            ack = await self._jetstream.publish(subject, value, headers)
        return ack.seq

    async def delete(self, bucket: str, key: str) -> None:
        """Removes a key."""
        if await self.get(bucket, key) is not None:
            await self._jetstream.publish(subject_of(bucket, key), b"", {"KV-Operation": "DEL"})

    async def entries(self, bucket: str) -> list[KvEntry]:
        """All live entries, in order of key."""
        found: dict[str, KvEntry] = {}

        def note(key: str, entry: KvEntry | None) -> None:
            if entry is not None:
                found[key] = entry

        watch = KvWatch(self._connection, self._jetstream, self, bucket, note)
        try:
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                await watch.snapshot()
        except TimeoutError as error:
            raise RequestTimeout(f"bucket {bucket} was not read within {SNAPSHOT_TIMEOUT_S} s") from error
        return [found[key] for key in sorted(found)]

    def watch(self, bucket: str, handler: Watcher) -> KvWatch:
        """A running watch."""
        watch = KvWatch(self._connection, self._jetstream, self, bucket, handler)
        watch.start()
        return watch


@dataclass(slots=True, eq=False)
class KvWatch:
    """Follows a bucket with an ordered push consumer.

    Such a consumer lives in the server's memory and dies with it, so heartbeats and sequences are checked, and after any
    doubt a new consumer gives a new snapshot. Of a snapshot only the differences to what is known are handed on.
    """

    _connection: Connection
    _jetstream: JetStream
    _kv: KeyValue
    _bucket: str
    _handler: Watcher
    _known: dict[str, int] = field(default_factory=dict)
    _created: int = 0
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Follows in the background."""
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self) -> None:
        """Ends it; calling again does nothing."""
        if self._task is not None:
            await end_tasks({self._task})

    async def snapshot(self) -> None:
        """Hands on what is there now, then ends."""
        await self._one_consumer(only_snapshot=True)

    async def _follow(self) -> None:
        while True:
            try:
                if self._connection.connected:
                    await self._one_consumer(only_snapshot=False)
            except BusError as error:
                log.debug("watch starts again", bucket=self._bucket, reason=str(error))
            except Exception as error:  # an ended watch would leave its owner with old values for ever
                log.error("watch failed and starts again", bucket=self._bucket, error=place_of(error))
            await asyncio.sleep(RETRY_S)

    async def _one_consumer(self, *, only_snapshot: bool) -> None:
        """Returns when the consumer is doubtful, or at the end of the snapshot if only that is wanted."""
        await self._kv.ensure(self._bucket)
        state = await self._jetstream.state(stream_of(self._bucket))
        if state is None:
            return
        is_other_stream, self._created = state.created != self._created, state.created
        seen: set[str] = set()
        inbound: asyncio.Queue[Inbound] = asyncio.Queue()
        inbox = self._connection.new_inbox()
        subscription = await self._connection.subscribe(inbox, inbound.put_nowait)
        forget = self._connection.on_lost(lambda: inbound.put_nowait(Inbound(inbox, "", b"", None)))
        name = ""
        try:
            answer = await self._jetstream.call(f"CONSUMER.CREATE.{stream_of(self._bucket)}", self._config(inbox))
            name = answer["name"]
            missing = answer["num_pending"]
            in_snapshot = True
            expected = 1
            while True:
                if in_snapshot and missing == 0:
                    in_snapshot = False
                    self._drop_unseen(seen)
                    if only_snapshot:
                        return
                async with asyncio.timeout(SILENCE_S_MAX):
                    message = await inbound.get()
                if message.status == "100":
                    if int((message.headers or {}).get("Nats-Last-Consumer", "0")) >= expected:
                        return  # something was lost on the way
                    continue
                if not message.reply.startswith("$JS.ACK."):
                    return
                *_, stream_sequence, consumer_sequence, _time, missing_text = message.reply.split(".")[:9]
                if int(consumer_sequence) != expected:
                    return
                expected += 1
                missing = int(missing_text)
                key = message.subject.removeprefix(f"$KV.{self._bucket}.")
                seen.add(key)
                self._hand_on(key, message, int(stream_sequence), is_other_stream=is_other_stream and in_snapshot)
        except TimeoutError:
            return
        finally:
            forget()
            with suppress(BusError):
                await subscription.stop()
                if name and self._connection.connected:
                    await self._connection.publish(f"$JS.API.CONSUMER.DELETE.{stream_of(self._bucket)}.{name}", b"")

    def _config(self, inbox: str) -> dict[str, Any]:
        return {
            "stream_name": stream_of(self._bucket),
            "config": {
                "deliver_subject": inbox,
                "deliver_policy": "last_per_subject",
                "ack_policy": "none",
                "max_deliver": 1,
                "replay_policy": "instant",
                "filter_subject": f"$KV.{self._bucket}.>",
                "idle_heartbeat": int(HEARTBEAT_S * NANOSECONDS),
                "inactive_threshold": int(WATCH_IDLE_S * NANOSECONDS),
                "mem_storage": True,
                "num_replicas": 1,
            },
        }

    def _hand_on(self, key: str, message: Inbound, revision: int, *, is_other_stream: bool) -> None:
        if _is_removal(message.headers):
            if self._known.pop(key, None) is not None:
                self._tell(key, None)
        elif is_other_stream or self._known.get(key) != revision:
            self._known[key] = revision
            self._tell(key, KvEntry(key, message.payload, revision))

    def _drop_unseen(self, seen: set[str]) -> None:
        for key in sorted(self._known.keys() - seen):
            del self._known[key]
            self._tell(key, None)

    def _tell(self, key: str, entry: KvEntry | None) -> None:
        try:
            self._handler(key, entry)
        except Exception as error:
            log.error("a watcher failed", bucket=self._bucket, key=key, error=place_of(error))
