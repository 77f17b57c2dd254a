"""The work-queue of tickets on JetStream: memory streams with work-queue retention, shared pull consumers, exact credits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import structlog

from subjects import names
from subjects.bus import (
    ACK_WAIT_S,
    CONSUMER_IDLE_S,
    DUPLICATE_WINDOW_S,
    LOST_PULL_GRACE_S,
    PULL_EXPIRY_S_MAX,
    QueuedTicket,
    QueueLimits,
    Stored,
)
from subjects.errors import BusError, BusUnavailable, QueueMissing, RequestTimeout
from subjects.ids import ModelKey
from subjects.messages import Lane, SlaClass
from subjects.nats.client import Inbound
from subjects.nats.connection import Connection, CoreSubscription
from subjects.nats.jetstream import API, MESSAGE_MISSING, NANOSECONDS, JetStream, JetStreamRefused

CONSUMERS_MAX: Final = 20_000
"""Models x classes x lanes in use at once on one shard; the server's own default is 1,000."""
PULLS_WAITING_MAX: Final = 8_192
"""Open pulls of all replicas on one lane; beyond it the server answers 409 and the credits come back at the expiry."""
TICKETS_UNACKNOWLEDGED_MAX: Final = 65_536

log = structlog.get_logger(__name__)


def stream_config(shard: int, limits: QueueLimits) -> dict[str, Any]:
    """The work-queue stream of one shard."""
    return {
        "name": names.queue_stream(shard),
        "subjects": [names.queue_stream_subjects(shard)],
        "retention": "workqueue",
        "storage": "memory",
        "num_replicas": 1,
        "discard": "new",
        "max_msgs": limits.messages_max,
        "max_bytes": limits.bytes_max,
        "max_age": 0,
        "max_consumers": CONSUMERS_MAX,
        "duplicate_window": DUPLICATE_WINDOW_S * NANOSECONDS,
        "allow_msg_ttl": True,
    }


def consumer_config(model: ModelKey, sla_class: SlaClass, lane: Lane, *, shards: int) -> dict[str, Any]:
    """The consumer that all replicas of a model share for one class and lane."""
    name = names.ticket_consumer(model, sla_class, lane)
    return {
        "name": name,
        "durable_name": name,
        "filter_subject": names.tickets(model, sla_class, lane, shards=shards),
        "deliver_policy": "all",
        "replay_policy": "instant",
        "ack_policy": "explicit",
        "ack_wait": int(ACK_WAIT_S * NANOSECONDS),
        "max_deliver": -1,  # a finite number strands tickets in the stream
        "max_waiting": PULLS_WAITING_MAX,
        "max_ack_pending": TICKETS_UNACKNOWLEDGED_MAX,
        "inactive_threshold": int(CONSUMER_IDLE_S * NANOSECONDS),
        "mem_storage": True,
        "num_replicas": 1,
    }


class WorkQueue:
    """Publishes and deletes tickets."""

    def __init__(self, connection: Connection, jetstream: JetStream, *, shards: int, limits: QueueLimits) -> None:
        self._connection = connection
        self._jetstream = jetstream
        self._shards = shards
        self._limits = limits
        self._created: dict[int, int] = {}
        self._reading = [asyncio.Lock() for _ in range(shards)]
        connection.on_lost(self._created.clear)

    async def ensure(self) -> None:
        """Creates the streams that are missing."""
        for shard in range(self._shards):
            await self._jetstream.ensure(stream_config(shard, self._limits))
            await self._read_created(shard)

    async def created(self, model: ModelKey) -> int | None:
        """Creation time of the stream of ``model``, asked of the server."""
        return await self._read_created(names.queue_shard(model, self._shards))

    async def _read_created(self, shard: int) -> int | None:
        state = await self._jetstream.state(names.queue_stream(shard))
        if state is None:
            self._created.pop(shard, None)
            return None
        self._created[shard] = state.created
        return state.created

    async def publish(
        self, model: ModelKey, sla_class: SlaClass, lane: Lane, payload: bytes, *, message_id: str, ttl_s: int
    ) -> Stored:
        """Stores a ticket."""
        shard = names.queue_shard(model, self._shards)
        # The creation time is read before the ticket is stored. Should the stream be lost and made again in between, the
        # older time makes a later delete refuse, which is safe; the newer time could delete somebody else's ticket.
        created = self._created.get(shard)
        if created is None:
            async with self._reading[shard]:  # after a reconnect a whole gateway publishes again at once
                created = self._created.get(shard) or await self._read_created(shard)
        if created is None:
            raise QueueMissing(f"no stream {names.queue_stream(shard)}")
        headers = {"Nats-Msg-Id": message_id, "Nats-TTL": str(max(1, ttl_s))}
        try:
            ack = await self._jetstream.publish(names.tickets(model, sla_class, lane, shards=self._shards), payload, headers)
        except QueueMissing:
            self._created.pop(shard, None)
            raise
        return Stored(shard=shard, sequence=ack.seq, created=created, duplicate=ack.duplicate)

    async def delete(self, stored: Stored) -> bool:
        """Deletes a ticket from the very stream it was stored in."""
        generation = self._connection.generation
        state = await self._jetstream.state(names.queue_stream(stored.shard))
        if state is None or state.created != stored.created or generation != self._connection.generation:
            return False
        argument = {"seq": stored.sequence, "no_erase": True}
        try:
            await self._jetstream.call(f"STREAM.MSG.DELETE.{names.queue_stream(stored.shard)}", argument)
        except JetStreamRefused as error:
            if error.code in MESSAGE_MISSING:
                return False
            raise
        except QueueMissing:
            return False
        return True


@dataclass(slots=True, eq=False)
class _Pull:
    """One request to the consumer: how many credits it has left and when the server forgets it."""

    remaining: int
    expires_at_s: float
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class _Inbox:
    """A subscription that serves one pull at a time, so that each delivery belongs to exactly one pull.

    Deliveries carry the ticket's own subject, so only the subscription they arrive on tells the pull they answer.
    """

    subject: str
    subscription: CoreSubscription | None = None
    pull: _Pull | None = None


@dataclass(slots=True, eq=False)
class NatsPuller:
    """Pulls tickets of one model, class and lane."""

    connection: Connection
    jetstream: JetStream
    stream: str
    config: dict[str, Any]
    on_ticket: Callable[[QueuedTicket], None]
    on_expired: Callable[[int], None]
    _idle: list[_Inbox] = field(default_factory=list)
    _busy: set[_Inbox] = field(default_factory=set)
    _ensured: int | None = None
    """Generation of the connection in which the consumer was last known to exist."""
    _last_pull_s: float = 0.0
    _stopped: bool = False
    _ensuring: asyncio.Lock = field(default_factory=asyncio.Lock)
    _retiring: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stopped

    async def pull(self, credits: int, expires_s: float) -> None:
        """Asks for tickets; see :class:`subjects.bus.Puller`."""
        if credits <= 0 or self._stopped:
            return
        loop = asyncio.get_running_loop()
        expires_s = min(expires_s, PULL_EXPIRY_S_MAX)
        pull = _Pull(credits, loop.time() + expires_s)
        self.connection.check(0)
        try:
            await self._ensure_consumer()
        except (QueueMissing, JetStreamRefused, RequestTimeout) as error:
            log.debug("no consumer to pull from", stream=self.stream, reason=str(error))
            self._give_back_at_expiry(pull)
            return
        inbox = self._idle.pop() if self._idle else await self._new_inbox()
        inbox.pull = pull
        self._busy.add(inbox)
        pull.timer = loop.call_at(pull.expires_at_s + LOST_PULL_GRACE_S, self._lost, inbox, pull)
        request = msgspec.json.encode({"batch": credits, "expires": int(expires_s * NANOSECONDS)})
        try:
            await self.connection.publish(
                f"{API}.CONSUMER.MSG.NEXT.{self.stream}.{self.config['name']}", request, reply=inbox.subject
            )
        except BusError:
            self._settle(inbox)
            raise

    async def stop(self) -> None:
        """Forgets outstanding pulls."""
        self._stopped = True
        inboxes = [*self._idle, *self._busy]
        self._idle.clear()
        self._busy.clear()
        for inbox in inboxes:
            await self._retire(inbox)

    async def _ensure_consumer(self) -> None:
        loop = asyncio.get_running_loop()
        async with self._ensuring:
            # The server forgets an idle consumer, so after half of that time it is asked for again.
            fresh = loop.time() - self._last_pull_s < CONSUMER_IDLE_S / 2
            self._last_pull_s = loop.time()
            if fresh and self._ensured == self.connection.generation:
                return
            generation = self.connection.generation
            argument = {"stream_name": self.stream, "config": self.config}
            await self.jetstream.call(f"CONSUMER.DURABLE.CREATE.{self.stream}.{self.config['name']}", argument)
            self._ensured = generation

    async def _new_inbox(self) -> _Inbox:
        inbox = _Inbox(self.connection.new_inbox())
        inbox.subscription = await self.connection.subscribe(inbox.subject, lambda message: self._received(inbox, message))
        return inbox

    def _received(self, inbox: _Inbox, message: Inbound) -> None:
        pull = inbox.pull
        if pull is None or self._stopped:
            return
        if not message.reply.startswith("$JS.ACK."):
            self._refused_or_expired(inbox, pull, message.status)
            return
        pull.remaining -= 1
        if pull.remaining == 0:
            self._settle(inbox)
        self.on_ticket(_ticket(message))

    def _refused_or_expired(self, inbox: _Inbox, pull: _Pull, status: str) -> None:
        if status == "100":
            return
        self._settle(inbox)
        if status in ("404", "408"):
            self.on_expired(pull.remaining)
            return
        # 409 (too many pulls, consumer deleted, server going down) and 503 (no such consumer) come at once. The credits come
        # back when the pull would have expired, or the puller would ask again and again.
        self._ensured = None
        self._give_back_at_expiry(pull)

    def _give_back_at_expiry(self, pull: _Pull) -> None:
        asyncio.get_running_loop().call_at(pull.expires_at_s, self._give_back, pull.remaining)

    def _give_back(self, credits: int) -> None:
        if not self._stopped:
            self.on_expired(credits)

    def _settle(self, inbox: _Inbox) -> None:
        if inbox.pull is not None and inbox.pull.timer is not None:
            inbox.pull.timer.cancel()
        inbox.pull = None
        self._busy.discard(inbox)
        if not self._stopped:
            self._idle.append(inbox)

    def _lost(self, inbox: _Inbox, pull: _Pull) -> None:
        """Nothing was heard of a pull, so the server or the consumer is gone. Its inbox is not used again: should the server
        only have been frozen, what it still sends there is left to be redelivered."""
        if inbox.pull is not pull:
            return
        inbox.pull = None
        self._busy.discard(inbox)
        self._ensured = None
        task = asyncio.get_running_loop().create_task(self._retire(inbox))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)
        self._give_back(pull.remaining)

    async def _retire(self, inbox: _Inbox) -> None:
        if inbox.pull is not None and inbox.pull.timer is not None:
            inbox.pull.timer.cancel()
        inbox.pull = None
        if inbox.subscription is not None:
            try:
                await inbox.subscription.stop()
            except BusUnavailable:
                log.debug("an inbox ended with its connection")


def _ticket(message: Inbound) -> QueuedTicket:
    # $JS.ACK.<stream>.<consumer>.<deliveries>.<stream sequence>.<consumer sequence>.<time>.<pending>; newer servers may put
    # a domain and an account hash behind ACK and a token at the end.
    tokens = message.reply.split(".")
    start = 2 if len(tokens) < 11 else 4
    return QueuedTicket(
        payload=message.payload,
        token=message.reply,
        sequence=int(tokens[start + 3]),
        deliveries=int(tokens[start + 2]),
    )
