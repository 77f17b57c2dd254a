"""The bus as the rest of Carpool sees it: a small protocol, and what its users may count on.

:class:`subjects.nats.bus.NatsBus` is its form, on a server with JetStream. It behaves as a NATS 2.15 server was measured to
(``tests/contract``): an expired pull returns its credits, a repeated message id is
swallowed for two minutes even after the first was acked, memory streams and their consumers are gone after a restart.

Handlers are plain functions called on the event loop; they must not block. A handler that raises is logged and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from subjects.errors import BusError
from subjects.ids import ModelKey
from subjects.messages import Lane, SlaClass

DUPLICATE_WINDOW_S = 120
"""How long the work-queue swallows a repeated message id."""
ACK_WAIT_S = 2.0
"""A pulled ticket that is not acknowledged within this time is redelivered."""
CONSUMER_IDLE_S = 30.0
"""A lane's consumer that nobody pulls from is forgotten after this time."""
PULL_EXPIRY_S_MAX = 1.0
"""The longest pull; pulls cannot be withdrawn."""
LOST_PULL_GRACE_S = 1.0
"""After its expiry a pull of which nothing was heard for this long has lost its server; its credits come back."""
PAYLOAD_BYTES_MAX = 8 * 1024 * 1024
"""What our own server takes in one message; bigger request bodies are refused with 413."""


class QueueLimits(msgspec.Struct, frozen=True):
    """Safety net of one shard of the work-queue; the gateways' own limits come first."""

    messages_max: int = 200_000
    bytes_max: int = 256 * 1024 * 1024


class BusMessage(msgspec.Struct, frozen=True):
    """A core or kept message; ``reply`` is empty when nobody waits for an answer, ``sequence`` is 0 unless it is kept.

    ``undelivered``: it is no answer but the server's word that nobody listened to what was posted with ``subject`` as reply.
    """

    subject: str
    payload: bytes
    reply: str = ""
    sequence: int = 0
    undelivered: bool = False


class Stored(msgspec.Struct, frozen=True):
    """Where the work-queue keeps a ticket. Sequences restart with a lost stream, so ``created`` (the stream's creation time,
    nanoseconds since the epoch) belongs to the sequence. ``duplicate``: the message id was seen within the window."""

    shard: int
    sequence: int
    created: int
    duplicate: bool = False


class QueuedTicket(msgspec.Struct, frozen=True):
    """A pulled ticket. ``token`` acknowledges it (from any connection); ``deliveries`` counts from 1."""

    payload: bytes
    token: str
    sequence: int
    deliveries: int


class KvEntry(msgspec.Struct, frozen=True):
    """A value of a bucket; revisions grow over the whole bucket."""

    key: str
    value: bytes
    revision: int


class Subscription(Protocol):
    """A running subscription or watch."""

    async def stop(self) -> None:
        """Ends it; calling again does nothing."""


class Puller(Protocol):
    """Pulls tickets of one model, class and lane. Its consumer exists only while pulls are made and expires when idle.

    Credits granted by :meth:`pull` come back either as ``on_ticket`` calls (one credit each) or as one ``on_expired`` call
    per pull with the credits it did not use (also when the server refuses the pull, restarts, or loses the stream).
    """

    async def pull(self, credits: int, expires_s: float) -> None:
        """Asks for up to ``credits`` tickets within ``expires_s`` (at most 1 s); returns when the request is sent.

        Raises:
            BusUnavailable: not connected; the credits were not spent.
        """

    async def stop(self) -> None:
        """Forgets outstanding pulls; tickets that still arrive are left to be redelivered."""


class Bus(Protocol):
    """What a Carpool process may ask of the bus."""

    @property
    def connected(self) -> bool:
        """Whether the connection is up as far as this side knows."""

    @property
    def payload_bytes_max(self) -> int:
        """The largest message the server takes."""

    def on_reconnected(self, callback: Callable[[], None]) -> None:
        """Calls back after every re-established connection (and after the first, if that came after the bus was made)."""

    async def publish(self, subject: str, payload: bytes) -> None:
        """Sends a core message; at most once.

        Raises:
            BusUnavailable: not connected (nothing is buffered for later: what is late is wrong).
            PayloadTooLarge: checked before sending, since the server would drop the connection.
        """

    def post(self, subject: str, payload: bytes, *, reply: str = "") -> None:
        """Like :meth:`publish`, without waiting: it goes out with all else that is posted in this turn of the event loop.

        Raises:
            BusUnavailable: not connected, or the server takes so little that too much waits already.
            PayloadTooLarge: as for :meth:`publish`.
        """

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Sends and waits for one reply.

        Raises:
            NoResponders: nobody listens.
            RequestTimeout: no reply within ``timeout_s``.
            BusUnavailable, PayloadTooLarge: as for :meth:`publish`.
        """

    async def request_many(
        self,
        subject: str,
        payload: bytes,
        *,
        on_reply: Callable[[bytes], None],
        on_error: Callable[[BusError], None],
    ) -> Subscription:
        """Sends a request that is answered by any number of messages, until the result is stopped.

        ``on_error`` is called at most once, and then ends it: NoResponders, or BusUnavailable when the connection is lost.

        Raises:
            BusUnavailable, PayloadTooLarge: as for :meth:`publish`.
        """

    async def subscribe(self, subject: str, handler: Callable[[BusMessage], None], *, group: str = "") -> Subscription:
        """Calls ``handler`` for each message; of the members of a ``group`` only one gets each message.

        The subscription survives reconnects.
        """

    async def round_trip(self, *, timeout_s: float) -> float:
        """Seconds that a ping to the server and back took: the proof that silence is not our own.

        When it returns, the server has taken what was subscribed and published on this connection before.

        Raises:
            RequestTimeout, BusUnavailable
        """

    # ---- the work-queue of tickets

    async def ensure_queue(self) -> None:
        """Creates the work-queue streams that are missing."""

    async def queue_created(self, model: ModelKey) -> int | None:
        """Creation time of the stream that holds the tickets of ``model``, or None when there is no such stream.

        Raises:
            BusUnavailable, RequestTimeout
        """

    async def queue_publish(
        self, model: ModelKey, sla_class: SlaClass, lane: Lane, payload: bytes, *, message_id: str, ttl_s: int
    ) -> Stored:
        """Stores a ticket and waits for the acknowledgement.

        Raises:
            QueueFull: a limit of the stream is reached.
            QueueMissing: the stream is gone; call :meth:`ensure_queue`.
            BusUnavailable, RequestTimeout
        """

    async def queue_delete(self, stored: Stored) -> bool:
        """Deletes a ticket by sequence, only from the very stream it was stored in; False when it is not there.

        A ticket that was already pulled can be deleted too; its late acknowledgement is harmless.
        """

    async def queue_ack(self, token: str) -> None:
        """Acknowledges a pulled ticket."""

    async def open_puller(
        self,
        model: ModelKey,
        sla_class: SlaClass,
        lane: Lane,
        *,
        on_ticket: Callable[[QueuedTicket], None],
        on_expired: Callable[[int], None],
    ) -> Puller:
        """A puller for one lane. The consumer is created on the first pull and again whenever it is missing."""

    # ---- small state and kept messages

    async def kv_get(self, bucket: str, key: str) -> KvEntry | None:
        """The value, or None. Buckets are created on first use (file storage)."""

    async def kv_put(self, bucket: str, key: str, value: bytes, *, expected_revision: int | None = None) -> int:
        """Stores and returns the new revision. ``expected_revision=0`` creates; None overwrites.

        Raises:
            WrongRevision: another value was stored since.
        """

    async def kv_delete(self, bucket: str, key: str) -> None:
        """Removes a key; a missing one is no error."""

    async def kv_entries(self, bucket: str) -> Sequence[KvEntry]:
        """All live entries, in order of key."""

    async def kv_watch(self, bucket: str, handler: Callable[[str, KvEntry | None], None]) -> Subscription:
        """Calls ``handler(key, entry)`` for each present entry and each later change; None is a removal.

        The watch survives restarts of the server.
        """

    async def ensure_stream(
        self, name: str, subjects: Sequence[str], *, max_age_s: float = 0, max_bytes: int = -1, memory: bool = False
    ) -> None:
        """A limits-retention stream that keeps what is published on ``subjects``."""

    async def stream_publish(self, subject: str, payload: bytes, *, expected_last_sequence: int | None = None) -> int:
        """Publishes into a stream and returns the sequence.

        Raises:
            WrongRevision: another message was appended since ``expected_last_sequence``.
            QueueMissing, BusUnavailable, RequestTimeout
        """

    async def stream_read(self, name: str, *, start_sequence: int = 1, messages_max: int = 1000) -> Sequence[BusMessage]:
        """Kept messages from ``start_sequence`` on, at most ``messages_max``."""

    async def close(self) -> None:
        """Flushes and closes; calling again does nothing."""
