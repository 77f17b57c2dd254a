"""What the request core is told (events, past tense) and what it asks for (commands, imperative).

All times ending in ``_s`` are seconds of the caller's monotonic clock unless a name says otherwise.
"""

from __future__ import annotations

from enum import Enum
from math import inf

import msgspec

from broker.core.requests.affinity import PromptPrefix, Why
from subjects import messages as m
from subjects.bus import Stored
from subjects.ids import ModelKey, ReplicaId, RequestId

HELD_EVERY_S = 0.2
"""How often each replica with requests of this gateway hears which ones are still wanted."""
HELD_UNANSWERED_MAX = 10
"""So many ``Held`` in a row without any frame: the replica's requests are taken away from it."""
HELD_LINGER_S = 2.0
"""How long ``Held`` goes on to a replica that has nothing left, so that it learns what is not wanted any more."""
ROUND_TRIP_FRESH_S = 0.5
"""The own bus counts as working for so long after a round trip; the shell makes one about every 0.2 s."""
RECONNECT_GRACE_S = 5.0
"""After our own reconnect others may still be reconnecting; their silence does not count for so long."""
RESEND_EVERY_S = 0.1
"""At most one ``Resend`` per choice of a request in this time."""
PARK_S = 0.25
PARK_S_MAX = 0.5
"""A request is parked for a replica that takes what it is handed but has no room. After ``PARK_S`` it is published if a
replica has spoken meanwhile and had none, after ``PARK_S_MAX`` in any case: a busy gateway may read that word late."""
PUBLISH_RETRY_S = 0.2
"""Pause before a ticket that was not stored, or that met a busy engine, is published again."""
UNFIT_S = 1.0
"""After an engine could not load a request's adapter, other replicas may have the request first for so long."""
LOSSES_MAX = 3
"""A request ends with an error when it has lost its replica, or met a sick engine, this many times."""
GRANT_PART_BYTES_MAX = 256 * 1024
"""Larger bodies are granted in parts."""
RECENT_ENDS_MAX = 8192
RECENT_ENDS_S = 60.0
"""Ended requests are remembered this long, and this many of them, to answer late claims with the right reason."""


# ------------------------------------------------------------------------------------------------------------- outcomes


class Finished(msgspec.Struct, frozen=True):
    """The engine ended the request."""

    usage: m.Usage | None


class Failed(msgspec.Struct, frozen=True):
    """The fields of :class:`subjects.errors.ApiError`; one per request, before or after its first token."""

    status: int
    message: str
    type: str = "server_error"
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None


class Cancelled(msgspec.Struct, frozen=True):
    """The client left; there is nobody to tell."""


Outcome = Finished | Failed | Cancelled


# --------------------------------------------------------------------------------------------------------------- events


class RequestSubmitted(msgspec.Struct, frozen=True):
    """An admitted request. ``wait_until_s`` bounds the wait for a grant, ``deadline_s`` everything.

    ``body`` is the client's JSON. After ``yields_at_s`` it can no longer meet its first-token target, and waits behind those
    that can (ops/decisions/0009). ``sla`` are its model's targets, by which its end is counted. ``adapter`` answers in place
    of the base model; ``options`` are its name's parsers. ``prefix`` is that of its prompt, where it could be found
    again; it crosses no bus.
    """

    request: RequestId
    profile: m.RequestProfile
    body: bytes
    wait_until_s: float
    deadline_s: float
    cache_salt: str = ""
    yields_at_s: float = inf
    sla: m.Sla | None = None
    adapter: m.Adapter | None = None
    options: dict[str, str | int | float | bool] | None = None
    prefix: PromptPrefix | None = None


class TicketStored(msgspec.Struct, frozen=True):
    """``PublishTicket`` succeeded."""

    request: RequestId
    attempt: int
    publication: int
    stored: Stored


class NotStoredReason(Enum):
    """Why ``PublishTicket`` failed (``QueueFull``, ``QueueMissing``, ``BusUnavailable``, ``RequestTimeout``)."""

    QUEUE_FULL = "queue-full"
    QUEUE_MISSING = "queue-missing"
    BUS_UNAVAILABLE = "bus-unavailable"
    TIMEOUT = "timeout"


class TicketNotStored(msgspec.Struct, frozen=True):
    """``PublishTicket`` failed, or may have."""

    request: RequestId
    attempt: int
    publication: int
    reason: NotStoredReason


class HandLost(msgspec.Struct, frozen=True):
    """``HandOver`` did not reach its replica, for certain: it is not connected, or we are not."""

    request: RequestId
    attempt: int


class ClaimReceived(msgspec.Struct, frozen=True):
    """A replica asks for a request; ``token`` is the shell's own number for the reply."""

    claim: m.Claim
    token: int


class FramesReceived(msgspec.Struct, frozen=True):
    """A replica's deltas, or its empty answer to ``Held``."""

    frames: m.Frames


class ClientLeft(msgspec.Struct, frozen=True):
    """The client closed its connection; unknown and ended requests are ignored."""

    request: RequestId


class PoolChanged(msgspec.Struct, frozen=True):
    """A digest of the pool arrived."""

    digest: m.PoolDigest


class BusReconnected(msgspec.Struct, frozen=True):
    """Our connection to the bus was made again."""


class QueueChecked(msgspec.Struct, frozen=True):
    """The creation time of the stream that holds a model's tickets; None when it is gone. Read about every second."""

    model: ModelKey
    created: int | None


class BusRoundTripMade(msgspec.Struct, frozen=True):
    """A ping to the bus came back just now."""


class ShutdownStarted(msgspec.Struct, frozen=True):
    """The gateway goes down: what has not ended by ``deadline_s`` ends with an error then."""

    deadline_s: float


class Ticked(msgspec.Struct, frozen=True):
    """Time passed; due at ``next_wake_s``."""


RequestEvent = (
    RequestSubmitted
    | TicketStored
    | TicketNotStored
    | HandLost
    | ClaimReceived
    | FramesReceived
    | ClientLeft
    | PoolChanged
    | BusReconnected
    | QueueChecked
    | BusRoundTripMade
    | ShutdownStarted
    | Ticked
)


# ------------------------------------------------------------------------------------------------------------- commands


class PublishTicket(msgspec.Struct, frozen=True):
    """Store the ticket on the work-queue of ``model_key(ticket.profile.deployment)``, its class and its lane.

    Answered by exactly one ``TicketStored`` or ``TicketNotStored``. A retry keeps the message id.
    """

    ticket: m.Ticket
    message_id: str
    ttl_s: int


class EnsureQueue(msgspec.Struct, frozen=True):
    """Create the streams that are missing; no answer is awaited."""


class DeleteTicket(msgspec.Struct, frozen=True):
    """Delete a stored ticket (only in that very stream); no answer is awaited."""

    stored: Stored


class HandOver(msgspec.Struct, frozen=True):
    """Send on ``run.<replica>``; answered by one ``HandLost`` only where it is certain that it did not arrive."""

    replica: ReplicaId
    hand: m.Hand


class AnswerClaim(msgspec.Struct, frozen=True):
    """Reply to the claim that came with ``token``."""

    token: int
    reply: m.ClaimReply


class SendBack(msgspec.Struct, frozen=True):
    """Send on ``back.<replica>``; at most once, no answer."""

    replica: ReplicaId
    back: m.Back


class RecordGrant(msgspec.Struct, frozen=True):
    """A replica now has the request, after ``waited_s`` since it began to wait: for logs, metrics and timelines.

    ``why`` says what decided for this replica where the gateway chose, and ``prefix_tokens`` how much of the prompt it is
    believed not to compute again.
    """

    request: RequestId
    attempt: int
    replica: ReplicaId
    waited_s: float
    prefix_tokens: int = 0
    why: Why | None = None


class Deliver(msgspec.Struct, frozen=True):
    """Give the client this delta: in order, without gap or repeat, never a failure."""

    request: RequestId
    delta: m.Delta


class RecordRestart(msgspec.Struct, frozen=True):
    """The request lost its replica and waits again under a new attempt; ``reason`` is for people.

    ``handed``: the replica that it was handed to had never begun with it, which is no news in a busy pool.
    """

    request: RequestId
    attempt: int
    reason: str
    handed: bool = False


class EndRequest(msgspec.Struct, frozen=True):
    """The end, exactly once per request; nothing about it follows."""

    request: RequestId
    outcome: Outcome


RequestCommand = (
    PublishTicket
    | EnsureQueue
    | DeleteTicket
    | HandOver
    | AnswerClaim
    | SendBack
    | RecordGrant
    | Deliver
    | RecordRestart
    | EndRequest
)
