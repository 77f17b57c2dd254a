"""The bus on a NATS server with JetStream."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence

from subjects import names
from subjects.bus import BusMessage, KvEntry, QueuedTicket, QueueLimits, Stored
from subjects.errors import BusError, QueueMissing
from subjects.ids import ModelKey
from subjects.messages import Lane, SlaClass
from subjects.nats.client import Inbound
from subjects.nats.connection import NO_RESPONDERS, Connection, CoreSubscription, Replies
from subjects.nats.jetstream import EXPECTED_LAST_SEQUENCE, JetStream, kept_stream
from subjects.nats.kv import KeyValue, KvWatch
from subjects.nats.queue import NatsPuller, WorkQueue, consumer_config

CONNECT_TIMEOUT_S = 2.0


class NatsBus:
    """A :class:`subjects.bus.Bus` on NATS, where its methods are described; make one with :meth:`connect`."""

    def __init__(self, connection: Connection, *, shards: int, limits: QueueLimits) -> None:
        self._connection = connection
        self._shards = shards
        self._jetstream = JetStream(connection)
        self._queue = WorkQueue(connection, self._jetstream, shards=shards, limits=limits)
        self._kv = KeyValue(connection, self._jetstream)
        self._pullers: list[NatsPuller] = []
        self._watches: list[KvWatch] = []

    @classmethod
    async def connect(
        cls,
        urls: str | Sequence[str],
        *,
        name: str,
        shards: int = 1,
        wait: bool = False,
        timeout_s: float = CONNECT_TIMEOUT_S,
        limits: QueueLimits | None = None,
        inbox_prefix: str = "_INBOX",
        user: str | None = None,
        password: str | None = None,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> NatsBus:
        """Connects to one of ``urls``; ``name`` is shown in the server's monitoring.

        ``shards`` is the number of work-queue streams and must be the same in a whole pool. With ``wait`` a bus is returned
        at once: it connects in the background, however long that takes, and refuses everything with BusUnavailable until
        then (subscriptions and watches are kept and start with the connection).

        Raises:
            BusUnavailable: without ``wait``, no server answered within ``timeout_s``.
        """
        connection = Connection(
            [urls] if isinstance(urls, str) else urls,
            name=name,
            inbox_prefix=inbox_prefix,
            user=user,
            password=password,
            token=token,
            tls=tls,
        )
        bus = cls(connection, shards=shards, limits=limits or QueueLimits())
        if wait:
            connection.open_later()
        else:
            await connection.open(timeout_s=timeout_s)
        return bus

    @property
    def connected(self) -> bool:
        """Whether the connection is up as far as this side knows."""
        return self._connection.connected

    @property
    def payload_bytes_max(self) -> int:
        """The largest message the server takes."""
        return self._connection.payload_bytes_max

    def counters(self) -> dict[str, int]:
        """For metrics: messages and bytes in and out, reconnects, failed handlers."""
        return self._connection.counters()

    def on_reconnected(self, callback: Callable[[], None]) -> None:
        """Calls back after every re-established connection, and after the first one of a bus made with ``wait``."""
        self._connection.on_connected(callback)

    async def publish(self, subject: str, payload: bytes) -> None:
        await self._connection.publish(subject, payload)

    def post(self, subject: str, payload: bytes, *, reply: str = "") -> None:
        self._connection.post(subject, payload, reply)

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        return (await self._connection.request(subject, payload, timeout_s=timeout_s)).payload

    async def request_many(
        self,
        subject: str,
        payload: bytes,
        *,
        on_reply: Callable[[bytes], None],
        on_error: Callable[[BusError], None],
    ) -> Replies:

        def replied(message: Inbound) -> None:
            on_reply(message.payload)

        return await self._connection.request_many(subject, payload, on_reply=replied, on_error=on_error)

    async def subscribe(self, subject: str, handler: Callable[[BusMessage], None], *, group: str = "") -> CoreSubscription:

        def received(message: Inbound) -> None:
            undelivered = message.headers is not None and message.status == NO_RESPONDERS
            handler(BusMessage(message.subject, message.payload, message.reply, undelivered=undelivered))

        return await self._connection.subscribe(subject, received, group=group)

    async def round_trip(self, *, timeout_s: float) -> float:
        return await self._connection.round_trip(timeout_s)

    # ---- the work-queue of tickets

    async def ensure_queue(self) -> None:
        await self._queue.ensure()

    async def queue_created(self, model: ModelKey) -> int | None:
        return await self._queue.created(model)

    async def queue_publish(
        self, model: ModelKey, sla_class: SlaClass, lane: Lane, payload: bytes, *, message_id: str, ttl_s: int
    ) -> Stored:
        return await self._queue.publish(model, sla_class, lane, payload, message_id=message_id, ttl_s=ttl_s)

    async def queue_delete(self, stored: Stored) -> bool:
        return await self._queue.delete(stored)

    async def queue_ack(self, token: str) -> None:
        await self._connection.publish(token, b"+ACK")

    async def open_puller(
        self,
        model: ModelKey,
        sla_class: SlaClass,
        lane: Lane,
        *,
        on_ticket: Callable[[QueuedTicket], None],
        on_expired: Callable[[int], None],
    ) -> NatsPuller:
        puller = NatsPuller(
            self._connection,
            self._jetstream,
            names.queue_stream(names.queue_shard(model, self._shards)),
            consumer_config(model, sla_class, lane, shards=self._shards),
            on_ticket,
            on_expired,
        )
        self._pullers = [other for other in self._pullers if not other.stopped]
        self._pullers.append(puller)
        return puller

    # ---- small state and kept messages

    async def kv_get(self, bucket: str, key: str) -> KvEntry | None:
        return await self._kv.get(bucket, key)

    async def kv_put(self, bucket: str, key: str, value: bytes, *, expected_revision: int | None = None) -> int:
        return await self._kv.put(bucket, key, value, expected_revision=expected_revision)

    async def kv_delete(self, bucket: str, key: str) -> None:
        await self._kv.delete(bucket, key)

    async def kv_entries(self, bucket: str) -> Sequence[KvEntry]:
        return await self._kv.entries(bucket)

    async def kv_watch(self, bucket: str, handler: Callable[[str, KvEntry | None], None]) -> KvWatch:
        watch = self._kv.watch(bucket, handler)
        self._watches.append(watch)
        return watch

    async def ensure_stream(
        self, name: str, subjects: Sequence[str], *, max_age_s: float = 0, max_bytes: int = -1, memory: bool = False
    ) -> None:
        await self._jetstream.ensure(kept_stream(name, subjects, max_age_s=max_age_s, max_bytes=max_bytes, memory=memory))

    async def stream_publish(self, subject: str, payload: bytes, *, expected_last_sequence: int | None = None) -> int:
        headers = None if expected_last_sequence is None else {EXPECTED_LAST_SEQUENCE: str(expected_last_sequence)}
        return (await self._jetstream.publish(subject, payload, headers)).seq

    async def stream_read(self, name: str, *, start_sequence: int = 1, messages_max: int = 1000) -> Sequence[BusMessage]:
        try:
            found = await self._jetstream.read(name, start_sequence=start_sequence, messages_max=messages_max)
        except QueueMissing:
            return ()
        return [BusMessage(message.subject, message.payload, sequence=sequence) for sequence, message in found]

    async def close(self) -> None:
        for watch in self._watches:
            await watch.stop()
        for puller in self._pullers:
            await puller.stop()
        self._watches.clear()
        self._pullers.clear()
        await self._connection.close()
