"""What the replica core is told (events, past tense) and what it asks for (commands, imperative).

All times ending in ``_s`` are seconds of the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from subjects import messages as m
from subjects.ids import IngressId, RequestId

CLAIM_TIMEOUT_S = 1.0
"""What the shell waits for the answer of a claim."""
CLAIM_TRIES_MAX = 2
DELIVERIES_MAX = 5
"""A ticket whose gateway never answers is acknowledged unserved at this delivery."""
GATHER_FIRST_S = 0.02
GATHER_S = 0.1
"""How long the deltas of an answer that nobody streams are put together before they are sent: its first ones, whose time is
measured, and all others."""
CONFIRM_S = 0.5
"""A delta that stays unconfirmed for so long is sent again."""
UNNAMED_HELD_MAX = 2
"""So many ``Held`` in a row that do not name a request end it here."""
HELD_SILENCE_S = 2.0
"""Without ``Held`` from a gateway for so long, while the own bus works, its requests are aborted."""
ASK_S = 0.5
"""After so long without ``Held`` from a gateway, an empty frame asks it which requests it still wants."""
ROUND_TRIP_FRESH_S = 0.5
"""The own bus counts as working for so long after a round trip; the shell makes one about every 0.2 s."""
RECONNECT_GRACE_S = 5.0
"""After our own reconnect others may still be reconnecting; their silence does not count for so long."""
FRAME_DELTAS_MAX = 512
FRAME_BYTES_MAX = 256 * 1024
"""A message of frames holds at most so many deltas, and text of about this size."""
ENDED_MAX = 4096
ENDED_S = 60.0
"""Attempts that ended here are remembered this long, and this many of them, so that none runs twice."""


# --------------------------------------------------------------------------------------------------------------- events


class Opened(msgspec.Struct, frozen=True):
    """The engine is warm and may serve: at the start, and again after a sleep. The numbers come from ``EngineInfo``."""

    slots: int
    kv_pages: int
    block_size: int
    max_context_len: int


class TicketPulled(msgspec.Struct, frozen=True):
    """A pull brought a ticket (one credit spent). ``token`` acknowledges it."""

    sla_class: m.SlaClass
    lane: m.Lane
    ticket: m.Ticket
    token: str
    deliveries: int


class PullExpired(msgspec.Struct, frozen=True):
    """A pull ended with ``credits`` unused; also when it could not be sent, and when the bus lost it."""

    sla_class: m.SlaClass
    lane: m.Lane
    credits: int


class ClaimAnswered(msgspec.Struct, frozen=True):
    """``SendClaim`` was answered; grants in parts are put together by the core."""

    request: RequestId
    attempt: int
    reply: m.ClaimReply


class Unanswered(Enum):
    """Why ``SendClaim`` has no answer."""

    TIMEOUT = "timeout"
    NO_RESPONDERS = "no-responders"
    BUS_UNAVAILABLE = "bus-unavailable"


class ClaimUnanswered(msgspec.Struct, frozen=True):
    """``SendClaim`` was not answered."""

    request: RequestId
    attempt: int
    kind: Unanswered


class HandReceived(msgspec.Struct, frozen=True):
    """A gateway hands a request over."""

    hand: m.Hand


class EngineStepped(msgspec.Struct, frozen=True):
    """What the engine generated in one step."""

    deltas: tuple[m.Delta, ...]


class EngineFailed(msgspec.Struct, frozen=True):
    """The engine is dead; ``message`` is one line that a client may see."""

    message: str


class BackReceived(msgspec.Struct, frozen=True):
    """A gateway's ``Held``, ``Resend`` or ``Cancel``."""

    back: m.Back


class PoolChanged(msgspec.Struct, frozen=True):
    """The pool's weights of the classes for this model; empty means the defaults.

    ``waiting`` lists the queues of this model where tickets wait, as the gateways report them; None when nobody says.
    """

    weights: Mapping[m.SlaClass, int]
    waiting: tuple[tuple[m.SlaClass, m.Lane], ...] | None = None
    share: float = 1.0
    """This replica's routing weight, over the largest of its model's replicas: it pulls requests for this part of its slots.
    0: it takes nothing new, and keeps what it has."""


class ConcurrencySet(msgspec.Struct, frozen=True):
    """At most ``slots`` requests may run from now on; running ones stay."""

    slots: int


class KvResized(msgspec.Struct, frozen=True):
    """The engine has so many KV pages from now on."""

    kv_pages: int


class DrainStarted(msgspec.Struct, frozen=True):
    """Take nothing new; what has not been confirmed by ``deadline_s`` is given back then."""

    deadline_s: float


class BusReconnected(msgspec.Struct, frozen=True):
    """Our connection to the bus was made again."""


class BusRoundTripMade(msgspec.Struct, frozen=True):
    """A ping to the bus came back just now."""


class Ticked(msgspec.Struct, frozen=True):
    """Time passed; due at ``next_wake_s``."""


ReplicaEvent = (
    Opened
    | TicketPulled
    | PullExpired
    | ClaimAnswered
    | ClaimUnanswered
    | HandReceived
    | EngineStepped
    | EngineFailed
    | BackReceived
    | PoolChanged
    | ConcurrencySet
    | KvResized
    | DrainStarted
    | BusReconnected
    | BusRoundTripMade
    | Ticked
)


# ------------------------------------------------------------------------------------------------------------- commands


class Pull(msgspec.Struct, frozen=True):
    """Ask the work-queue for tickets. Each credit comes back as one ``TicketPulled`` or inside a ``PullExpired``."""

    sla_class: m.SlaClass
    lane: m.Lane
    credits: int
    expires_s: float


class SendClaim(msgspec.Struct, frozen=True):
    """Request on ``claim.<ingress>`` with a timeout of ``CLAIM_TIMEOUT_S``.

    Answered by exactly one ``ClaimAnswered`` or ``ClaimUnanswered``.
    """

    ingress: IngressId
    claim: m.Claim


class AckTicket(msgspec.Struct, frozen=True):
    """Acknowledge a pulled ticket: it is granted to us, or nobody wants it."""

    token: str


class StartRequest(msgspec.Struct, frozen=True):
    """Give the request to the engine; ``grant`` is whole (``parts == 1``)."""

    grant: m.Grant
    profile: m.RequestProfile


class AbortRequest(msgspec.Struct, frozen=True):
    """Make the engine forget the request."""

    request: RequestId
    attempt: int


class SendFrames(msgspec.Struct, frozen=True):
    """Send on ``out.<ingress>``; at most once, no answer."""

    ingress: IngressId
    frames: m.Frames


class ReportLoad(msgspec.Struct, frozen=True):
    """The load changed: requests that run or are being claimed, the slots, and the KV pages not promised to any."""

    running: int
    slots: int
    kv_pages_free: int


class ReportDrained(msgspec.Struct, frozen=True):
    """Nothing is held any more; ``given_back`` counts the requests that the bound cut off."""

    given_back: int


class ExitReplica(msgspec.Struct, frozen=True):
    """The pool counts this incarnation as dead, for good: end the process without acknowledging anything."""


ReplicaCommand = (
    Pull | SendClaim | AckTicket | StartRequest | AbortRequest | SendFrames | ReportLoad | ReportDrained | ExitReplica
)
