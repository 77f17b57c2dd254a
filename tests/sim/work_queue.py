"""The work-queue of tickets in the simulated world: one shard, as ``tests/contract`` holds a real server to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from subjects.bus import ACK_WAIT_S, CONSUMER_IDLE_S, DUPLICATE_WINDOW_S, QueuedTicket, QueueLimits, Stored
from subjects.errors import QueueFull

TICKET_OVERHEAD_BYTES = 16


class Timer(Protocol):
    """A call that has not happened yet."""

    def cancel(self) -> None:
        """It will not happen."""


class Clock(Protocol):
    """Time and the order of calls: the event loop's, or a simulator's."""

    def now(self) -> float:
        """Monotonic seconds."""

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        """Calls back once, after ``delay_s``."""

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Calls back at this very time, after what was asked for before."""


@dataclass(slots=True, eq=False)
class PullRequest:
    """An open pull: whom to give tickets, and how many more."""

    remaining: int
    deliver: Callable[[QueuedTicket], None]
    open: bool = True


@dataclass(slots=True, eq=False)
class _Ticket:
    sequence: int
    subject: str
    payload: bytes
    expiry: Timer | None = None


@dataclass(slots=True, eq=False)
class _Consumer:
    """Shared by all replicas of one model, class and lane."""

    cursor: int = 0
    """Sequence up to which tickets were delivered once."""
    waiting: deque[PullRequest] = field(default_factory=deque)
    again: deque[int] = field(default_factory=deque)
    """Sequences to be delivered again, before new ones."""
    pending: dict[int, Timer] = field(default_factory=dict)
    """Delivered and not acknowledged; the timer is its ack_wait."""
    deliveries: dict[int, int] = field(default_factory=dict)
    used_at_s: float = 0.0


class SimQueue:
    """One work-queue stream. Lost with its server, like the real one."""

    def __init__(self, clock: Clock, shard: int, created: int, limits: QueueLimits) -> None:
        self._clock = clock
        self._shard = shard
        self._limits = limits
        self._tickets: dict[int, _Ticket] = {}
        self._bytes = 0
        self._last_sequence = 0
        self._seen: dict[str, tuple[float, int]] = {}
        self._consumers: dict[str, _Consumer] = {}
        self.created = created

    def __len__(self) -> int:
        """Tickets that are stored."""
        return len(self._tickets)

    def lose(self) -> None:
        """Everything is gone: tickets, consumers, open pulls."""
        for ticket in self._tickets.values():
            if ticket.expiry is not None:
                ticket.expiry.cancel()
        for consumer in self._consumers.values():
            for timer in consumer.pending.values():
                timer.cancel()
            for pull in consumer.waiting:
                pull.open = False
        self._tickets.clear()
        self._consumers.clear()

    def publish(self, subject: str, payload: bytes, *, message_id: str, ttl_s: int) -> Stored:
        """Stores a ticket, unless its id was seen within the window.

        Raises:
            QueueFull: a limit is reached.
        """
        now_s = self._clock.now()
        for known, (seen_at_s, _) in list(self._seen.items()):
            if now_s - seen_at_s < DUPLICATE_WINDOW_S:
                break
            del self._seen[known]
        if message_id in self._seen:
            return Stored(self._shard, self._seen[message_id][1], self.created, duplicate=True)
        size_bytes = len(subject) + len(payload) + TICKET_OVERHEAD_BYTES
        if len(self._tickets) >= self._limits.messages_max or self._bytes + size_bytes > self._limits.bytes_max:
            raise QueueFull(f"{len(self._tickets)} tickets, {self._bytes} bytes")
        self._last_sequence += 1
        sequence = self._last_sequence
        self._seen[message_id] = (now_s, sequence)
        ticket = self._tickets[sequence] = _Ticket(sequence, subject, payload)
        self._bytes += size_bytes
        ticket.expiry = self._clock.call_later(max(1, ttl_s), lambda: self._remove(sequence))
        consumer = self._consumers.get(subject)
        if consumer is not None:
            self._serve(subject, consumer)
        return Stored(self._shard, sequence, self.created)

    def delete(self, sequence: int) -> bool:
        """Removes a ticket, pulled or not."""
        return self._remove(sequence)

    def pull(self, subject: str, request: PullRequest) -> None:
        """Opens a pull; its consumer is made if it is missing or was forgotten."""
        now_s = self._clock.now()
        consumer = self._consumers.get(subject)
        if consumer is None or (not consumer.waiting and now_s - consumer.used_at_s >= CONSUMER_IDLE_S):
            for timer in consumer.pending.values() if consumer is not None else ():
                timer.cancel()
            consumer = self._consumers[subject] = _Consumer()
        consumer.used_at_s = now_s
        consumer.waiting.append(request)
        self._serve(subject, consumer)

    def end_pull(self, subject: str, request: PullRequest) -> None:
        """Takes no more tickets for a pull."""
        request.open = False
        consumer = self._consumers.get(subject)
        if consumer is not None and request in consumer.waiting:
            consumer.waiting.remove(request)
            consumer.used_at_s = self._clock.now()

    def acknowledge(self, subject: str, sequence: int) -> None:
        """The ticket is done. Late acknowledgements count, and one for a ticket that is gone does nothing."""
        consumer = self._consumers.get(subject)
        if consumer is not None and sequence in consumer.deliveries:
            self._remove(sequence)

    def refuse(self, subject: str, sequence: int, deliveries: int) -> None:
        """The ticket is delivered again at once, unless that has happened already."""
        consumer = self._consumers.get(subject)
        if consumer is None or consumer.deliveries.get(sequence) != deliveries or sequence not in consumer.pending:
            return
        consumer.pending.pop(sequence).cancel()
        self._again(subject, consumer, sequence)

    def _again(self, subject: str, consumer: _Consumer, sequence: int) -> None:
        consumer.pending.pop(sequence, None)
        consumer.again.append(sequence)
        self._serve(subject, consumer)

    def _remove(self, sequence: int) -> bool:
        ticket = self._tickets.pop(sequence, None)
        if ticket is None:
            return False
        self._bytes -= len(ticket.subject) + len(ticket.payload) + TICKET_OVERHEAD_BYTES
        if ticket.expiry is not None:
            ticket.expiry.cancel()
        consumer = self._consumers.get(ticket.subject)
        if consumer is not None:
            timer = consumer.pending.pop(sequence, None)
            if timer is not None:
                timer.cancel()
            consumer.deliveries.pop(sequence, None)
        return True

    def _serve(self, subject: str, consumer: _Consumer) -> None:
        while consumer.waiting:
            if not consumer.waiting[0].open:
                consumer.waiting.popleft()
                continue
            ticket = self._next(subject, consumer)
            if ticket is None:
                return
            self._deliver(subject, consumer, ticket)

    def _next(self, subject: str, consumer: _Consumer) -> _Ticket | None:
        while consumer.again:
            ticket = self._tickets.get(consumer.again.popleft())
            if ticket is not None:
                return ticket
        for sequence in range(consumer.cursor + 1, self._last_sequence + 1):
            consumer.cursor = sequence
            ticket = self._tickets.get(sequence)
            if ticket is not None and ticket.subject == subject:
                return ticket
        return None

    def _deliver(self, subject: str, consumer: _Consumer, ticket: _Ticket) -> None:
        request = consumer.waiting.popleft()
        request.remaining -= 1
        if request.remaining > 0:
            consumer.waiting.append(request)  # the server takes turns between open pulls
        sequence = ticket.sequence
        consumer.used_at_s = self._clock.now()
        deliveries = consumer.deliveries[sequence] = consumer.deliveries.get(sequence, 0) + 1
        consumer.pending[sequence] = self._clock.call_later(ACK_WAIT_S, lambda: self._again(subject, consumer, sequence))
        token = f"{self._shard} {self.created} {subject} {sequence} {deliveries}"
        request.deliver(QueuedTicket(ticket.payload, token, sequence, deliveries))
