"""The bus inside one process: connections to a :class:`~subjects.memory_hub.MemoryHub`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from subjects import names
from subjects.bus import (
    LOST_PULL_GRACE_S,
    PULL_EXPIRY_S_MAX,
    BusMessage,
    KvEntry,
    QueuedTicket,
    Stored,
)
from subjects.errors import (
    BusError,
    BusUnavailable,
    NoResponders,
    PayloadTooLarge,
    QueueMissing,
    RequestTimeout,
    place_of,
)
from subjects.ids import ModelKey
from subjects.memory_hub import HubSubscription, MemoryHub
from subjects.memory_queue import PullRequest, Timer
from subjects.messages import Lane, SlaClass

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Stop:
    """A running thing that can be stopped."""

    end: Callable[[], None]

    async def stop(self) -> None:
        """Ends it; calling again does nothing."""
        self.end()


@dataclass(slots=True, eq=False)
class _Waiter:
    on_reply: Callable[[bytes], None]
    on_error: Callable[[BusError], None]


@dataclass(slots=True, eq=False)
class _Pull:
    request: PullRequest
    timer: Timer | None = None


class MemoryBus:
    """A :class:`subjects.bus.Bus` on a hub. ``MemoryBus(hub)`` is connected at once if the hub is up."""

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub
        self._up = hub.up
        self._closed = False
        self._subscriptions: list[HubSubscription] = []
        self._waiting: dict[str, _Waiter] = {}
        self._pullers: list[MemoryPuller] = []
        self._watches: list[_Stop] = []
        self._on_reconnected: list[Callable[[], None]] = []
        self._requests = 0
        self.handler_errors = 0
        self._inbox = f"_INBOX.{hub.admit(self)}"
        hub.subscribe(HubSubscription(self, (*self._inbox.split("."), "*"), "", self._replied))

    # ---- the connection

    def disconnect(self) -> None:
        """Loses the connection of this bus alone, until :meth:`reconnect`."""
        self.cut(silently=False)

    def reconnect(self) -> None:
        """Ends :meth:`disconnect`."""
        if self._hub.up:
            self.join()

    def cut(self, *, silently: bool) -> None:
        """The connection is lost: waiting requests fail, open pulls are forgotten by the server."""
        if not self._up:
            return
        self._up = False
        for puller in self._pullers:
            puller.forget_at_server()
        waiting = list(self._waiting.values())
        self._waiting.clear()
        if silently:
            return
        for waiter in waiting:
            self._hub.clock.call_soon(lambda found=waiter: found.on_error(BusUnavailable("connection lost")))  # type: ignore[misc]

    def join(self) -> None:
        """The connection is back."""
        if self._up or self._closed or not self._hub.up:
            return
        self._up = True
        for callback in list(self._on_reconnected):
            self._guarded(callback)

    @property
    def connected(self) -> bool:
        """Whether the connection is up."""
        return self._up and not self._closed

    @property
    def payload_bytes_max(self) -> int:
        """The largest message the hub takes."""
        return self._hub.payload_bytes_max

    def on_reconnected(self, callback: Callable[[], None]) -> None:
        """See :meth:`subjects.bus.Bus.on_reconnected`."""
        self._on_reconnected.append(callback)

    def _check(self, size_bytes: int = 0) -> None:
        if not self.connected:
            raise BusUnavailable("not connected")
        if size_bytes > self._hub.payload_bytes_max:
            raise PayloadTooLarge(size_bytes, self._hub.payload_bytes_max)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self.handler_errors += 1
            log.error("a handler of bus messages failed", error=place_of(error), failures=self.handler_errors)

    # ---- core messages

    async def publish(self, subject: str, payload: bytes) -> None:
        """See :meth:`subjects.bus.Bus.publish`."""
        self._check(len(payload))
        self._hub.send(subject, payload)

    def post(self, subject: str, payload: bytes, *, reply: str = "") -> None:
        """See :meth:`subjects.bus.Bus.post`."""
        self._check(len(payload))
        if not self._hub.send(subject, payload, reply) and reply:
            self._hub.send_undelivered(reply)

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """See :meth:`subjects.bus.Bus.request`."""
        future = self._hub.clock.future()
        replies = await self.request_many(
            subject,
            payload,
            on_reply=lambda reply: None if future.done() else future.set_result(reply),
            on_error=lambda error: None if future.done() else future.set_exception(error),
        )
        late = RequestTimeout(f"no reply on {subject} within {timeout_s} s")
        timer = self._hub.clock.call_later(timeout_s, lambda: None if future.done() else future.set_exception(late))
        try:
            return await future
        finally:
            timer.cancel()
            await replies.stop()

    async def request_many(
        self,
        subject: str,
        payload: bytes,
        *,
        on_reply: Callable[[bytes], None],
        on_error: Callable[[BusError], None],
    ) -> _Stop:
        """See :meth:`subjects.bus.Bus.request_many`."""
        self._check(len(payload))
        self._requests += 1
        token = f"{self._inbox}.{self._requests}"
        waiter = self._waiting[token] = _Waiter(on_reply, on_error)
        if not self._hub.send(subject, payload, token):
            self._hub.clock.call_soon(lambda: self._nobody(token, waiter))
        return _Stop(lambda: _forget(self._waiting, token))

    def _nobody(self, token: str, waiter: _Waiter) -> None:
        if self._waiting.pop(token, None) is not None:
            waiter.on_error(NoResponders("nobody listens there"))

    def _replied(self, message: BusMessage) -> None:
        waiter = self._waiting.get(message.subject)
        if waiter is not None and self.connected:
            self._guarded(lambda: waiter.on_reply(message.payload))

    async def subscribe(self, subject: str, handler: Callable[[BusMessage], None], *, group: str = "") -> _Stop:
        """See :meth:`subjects.bus.Bus.subscribe`."""

        def received(message: BusMessage) -> None:
            if self.connected:
                self._guarded(lambda: handler(message))

        subscription = HubSubscription(self, tuple(subject.split(".")), group, received)
        self._hub.subscribe(subscription)
        return _Stop(lambda: self._hub.unsubscribe(subscription))

    async def round_trip(self, *, timeout_s: float) -> float:
        """See :meth:`subjects.bus.Bus.round_trip`."""
        self._check()
        return 0.0

    # ---- the work-queue of tickets

    async def ensure_queue(self) -> None:
        """See :meth:`subjects.bus.Bus.ensure_queue`."""
        self._check()
        self._hub.ensure_queues()

    async def queue_created(self, model: ModelKey) -> int | None:
        """See :meth:`subjects.bus.Bus.queue_created`."""
        self._check()
        queue = self._hub.queue(names.queue_shard(model, self._hub.shards))
        return None if queue is None else queue.created

    async def queue_publish(
        self, model: ModelKey, sla_class: SlaClass, lane: Lane, payload: bytes, *, message_id: str, ttl_s: int
    ) -> Stored:
        """See :meth:`subjects.bus.Bus.queue_publish`."""
        self._check(len(payload))
        queue = self._hub.queue(names.queue_shard(model, self._hub.shards))
        if queue is None:
            raise QueueMissing("no work-queue")
        subject = names.tickets(model, sla_class, lane, shards=self._hub.shards)
        return queue.publish(subject, payload, message_id=message_id, ttl_s=ttl_s)

    async def queue_delete(self, stored: Stored) -> bool:
        """See :meth:`subjects.bus.Bus.queue_delete`."""
        self._check()
        queue = self._hub.queue(stored.shard)
        return queue is not None and queue.created == stored.created and queue.delete(stored.sequence)

    async def queue_ack(self, token: str) -> None:
        """See :meth:`subjects.bus.Bus.queue_ack`."""
        self._check()
        queue, subject, sequence, _ = self._hub.queue_of(token)
        if queue is not None:
            queue.acknowledge(subject, sequence)

    async def queue_nak(self, token: str) -> None:
        """See :meth:`subjects.bus.Bus.queue_nak`."""
        self._check()
        queue, subject, sequence, deliveries = self._hub.queue_of(token)
        if queue is not None:
            queue.refuse(subject, sequence, deliveries)

    async def open_puller(
        self,
        model: ModelKey,
        sla_class: SlaClass,
        lane: Lane,
        *,
        on_ticket: Callable[[QueuedTicket], None],
        on_expired: Callable[[int], None],
    ) -> MemoryPuller:
        """See :meth:`subjects.bus.Bus.open_puller`."""
        subject = names.tickets(model, sla_class, lane, shards=self._hub.shards)
        puller = MemoryPuller(self, names.queue_shard(model, self._hub.shards), subject, on_ticket, on_expired)
        self._pullers = [other for other in self._pullers if not other.stopped]
        self._pullers.append(puller)
        return puller

    # ---- small state and kept messages

    async def kv_get(self, bucket: str, key: str) -> KvEntry | None:
        """See :meth:`subjects.bus.Bus.kv_get`."""
        self._check()
        return self._hub.bucket(bucket).entries.get(key)

    async def kv_put(self, bucket: str, key: str, value: bytes, *, expected_revision: int | None = None) -> int:
        """See :meth:`subjects.bus.Bus.kv_put`."""
        self._check(len(value))
        return self._hub.put(bucket, key, value, expected_revision)

    async def kv_delete(self, bucket: str, key: str) -> None:
        """See :meth:`subjects.bus.Bus.kv_delete`."""
        self._check()
        self._hub.remove(bucket, key)

    async def kv_entries(self, bucket: str) -> Sequence[KvEntry]:
        """See :meth:`subjects.bus.Bus.kv_entries`."""
        self._check()
        entries = self._hub.bucket(bucket).entries
        return [entries[key] for key in sorted(entries)]

    async def kv_watch(self, bucket: str, handler: Callable[[str, KvEntry | None], None]) -> _Stop:
        """See :meth:`subjects.bus.Bus.kv_watch`."""
        watch = _Watch(self, self._hub, bucket, handler)
        self._on_reconnected.append(watch.catch_up)
        watch.start()
        stop = _Stop(watch.end)
        self._watches.append(stop)
        return stop

    async def ensure_stream(
        self, name: str, subjects: Sequence[str], *, max_age_s: float = 0, max_bytes: int = -1, memory: bool = False
    ) -> None:
        """See :meth:`subjects.bus.Bus.ensure_stream`. The limits are not applied in memory."""
        self._check()
        self._hub.ensure_stream(name, subjects, memory=memory)

    async def stream_publish(self, subject: str, payload: bytes, *, expected_last_sequence: int | None = None) -> int:
        """See :meth:`subjects.bus.Bus.stream_publish`."""
        self._check(len(payload))
        return self._hub.append(subject, payload, expected_last_sequence)

    async def stream_read(self, name: str, *, start_sequence: int = 1, messages_max: int = 1000) -> Sequence[BusMessage]:
        """See :meth:`subjects.bus.Bus.stream_read`."""
        self._check()
        return self._hub.read(name, start_sequence, messages_max)

    async def close(self) -> None:
        """See :meth:`subjects.bus.Bus.close`."""
        if self._closed:
            return
        for watch in self._watches:
            await watch.stop()
        for puller in self._pullers:
            await puller.stop()
        self.cut(silently=False)
        self._closed = True
        self._hub.dismiss(self)


def _forget(waiting: dict[str, _Waiter], token: str) -> None:
    waiting.pop(token, None)


@dataclass(slots=True, eq=False)
class MemoryPuller:
    """A :class:`subjects.bus.Puller` of one connection."""

    _bus: MemoryBus
    _shard: int
    _subject: str
    _on_ticket: Callable[[QueuedTicket], None]
    _on_expired: Callable[[int], None]
    _pulls: list[_Pull] = field(default_factory=list)
    stopped: bool = False

    async def pull(self, credits: int, expires_s: float) -> None:
        """See :meth:`subjects.bus.Puller.pull`."""
        if credits <= 0 or self.stopped:
            return
        bus = self._bus
        bus._check()
        expires_s = min(expires_s, PULL_EXPIRY_S_MAX)
        request = PullRequest(credits, lambda ticket: self._delivered(pull, ticket))
        pull = _Pull(request)
        pull.timer = bus._hub.clock.call_later(expires_s, lambda: self._expired(pull))
        self._pulls.append(pull)
        queue = bus._hub.queue(self._shard)
        if queue is not None:
            queue.pull(self._subject, request)

    async def stop(self) -> None:
        """See :meth:`subjects.bus.Puller.stop`."""
        self.stopped = True
        self.forget_at_server()
        for pull in self._pulls:
            if pull.timer is not None:
                pull.timer.cancel()
        self._pulls.clear()

    def forget_at_server(self) -> None:
        """The server serves the open pulls no more; their credits come back when they are seen to be lost."""
        queue = self._bus._hub.queue(self._shard)
        for pull in self._pulls:
            if not pull.request.open:
                continue
            pull.request.open = False
            if queue is not None:
                queue.end_pull(self._subject, pull.request)
            if pull.timer is not None and not self.stopped:
                pull.timer.cancel()
                wait_s = PULL_EXPIRY_S_MAX + LOST_PULL_GRACE_S
                pull.timer = self._bus._hub.clock.call_later(wait_s, lambda found=pull: self._expired(found))  # type: ignore[misc]

    def _delivered(self, pull: _Pull, ticket: QueuedTicket) -> None:
        if pull.request.remaining == 0:
            self._end(pull)
        self._bus._hub.clock.call_soon(lambda: self._hand_on(ticket))

    def _hand_on(self, ticket: QueuedTicket) -> None:
        if self.stopped:
            return
        if self._bus.connected:
            self._bus._guarded(lambda: self._on_ticket(ticket))
        else:  # lost on the way: the server will deliver it again, and the credit comes back as that of a lost pull does
            wait_s = PULL_EXPIRY_S_MAX + LOST_PULL_GRACE_S
            self._bus._hub.clock.call_later(wait_s, lambda: None if self.stopped else self._on_expired(1))

    def _expired(self, pull: _Pull) -> None:
        self._end(pull)
        if not self.stopped and pull.request.remaining > 0:
            self._bus._guarded(lambda: self._on_expired(pull.request.remaining))

    def _end(self, pull: _Pull) -> None:
        if pull.timer is not None:
            pull.timer.cancel()
        if pull in self._pulls:
            self._pulls.remove(pull)
        queue = self._bus._hub.queue(self._shard)
        if queue is not None:
            queue.end_pull(self._subject, pull.request)
        pull.request.open = False


@dataclass(slots=True, eq=False)
class _Watch:
    """Hands on changes of a bucket; what happened while its connection was lost is handed on after it is back."""

    _bus: MemoryBus
    _hub: MemoryHub
    _bucket: str
    _handler: Callable[[str, KvEntry | None], None]
    _known: dict[str, int] = field(default_factory=dict)
    _ended: bool = False

    def start(self) -> None:
        """Begins with what is there."""
        self._hub.bucket(self._bucket).watchers.append(self._changed)
        self.catch_up()

    def end(self) -> None:
        """Stops."""
        self._ended = True
        watchers = self._hub.bucket(self._bucket).watchers
        if self._changed in watchers:
            watchers.remove(self._changed)

    def catch_up(self) -> None:
        """Hands on the differences to what is known."""
        if self._ended or not self._bus.connected:
            return
        entries = self._hub.bucket(self._bucket).entries
        for key in sorted(self._known.keys() - entries.keys()):
            self._changed(key, None)
        for key in sorted(entries):
            if self._known.get(key) != entries[key].revision:
                self._changed(key, entries[key])

    def _changed(self, key: str, entry: KvEntry | None) -> None:
        if self._ended or not self._bus.connected:
            return
        if entry is None:
            self._known.pop(key, None)
        else:
            self._known[key] = entry.revision
        self._hub.clock.call_soon(lambda: None if self._ended else self._bus._guarded(lambda: self._handler(key, entry)))
