"""The server of the in-memory bus: what :class:`subjects.memory_bus.MemoryBus` connections share.

It runs on an injected clock, so a simulator can run it on virtual time and without an event loop: all calls but
``request`` end without waiting. It can be stopped, lose its memory and be started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from subjects.bus import PAYLOAD_BYTES_MAX, BusMessage, KvEntry, QueueLimits
from subjects.errors import QueueMissing, WrongRevision
from subjects.memory_queue import Clock, MemoryQueue, Timer


class Reply(Awaitable[bytes], Protocol):
    """Something to wait for."""

    def done(self) -> bool:
        """Whether it has a result or an exception."""

    def set_result(self, result: bytes, /) -> None:
        """The waiter goes on with a result."""

    def set_exception(self, exception: BaseException, /) -> None:
        """The waiter goes on with an exception."""


class HubClock(Clock, Protocol):
    """A clock that can also make something to wait for."""

    def future(self) -> Reply:
        """A fresh one."""


class LoopClock:
    """The running event loop's time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        """Monotonic seconds."""
        return self._loop.time()

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        """Calls back once, after ``delay_s``."""
        return self._loop.call_later(delay_s, callback)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Calls back in this turn of the loop or the next."""
        self._loop.call_soon(callback)

    def future(self) -> asyncio.Future[bytes]:
        """A future of the loop."""
        return self._loop.create_future()


class Member(Protocol):
    """A connection as the hub sees it."""

    def cut(self, *, silently: bool) -> None:
        """The connection is lost."""

    def join(self) -> None:
        """The connection is back."""


@dataclass(slots=True, eq=False)
class HubSubscription:
    """A core subscription of one connection."""

    member: Member
    pattern: tuple[str, ...]
    group: str
    handler: Callable[[BusMessage], None]
    active: bool = True


@dataclass(slots=True, eq=False)
class _KeptStream:
    patterns: tuple[tuple[str, ...], ...]
    memory: bool
    messages: list[BusMessage] = field(default_factory=list)
    last_sequence: int = 0


@dataclass(slots=True, eq=False)
class _Bucket:
    revision: int = 0
    entries: dict[str, KvEntry] = field(default_factory=dict)
    watchers: list[Callable[[str, KvEntry | None], None]] = field(default_factory=list)


class MemoryHub:
    """One server.

    ``latency`` says for a subject how many seconds a message takes to each subscriber, or None to lose it: for simulators.
    """

    def __init__(
        self,
        clock: HubClock | None = None,
        *,
        shards: int = 1,
        limits: QueueLimits | None = None,
        payload_bytes_max: int = PAYLOAD_BYTES_MAX,
        latency: Callable[[str], float | None] | None = None,
    ) -> None:
        self.clock: HubClock = clock if clock is not None else LoopClock()
        self.shards = shards
        self.payload_bytes_max = payload_bytes_max
        self.up = True
        self._limits = limits or QueueLimits()
        self._latency = latency
        self._members: list[Member] = []
        self._subscriptions: list[HubSubscription] = []
        self._turns: dict[tuple[str, ...], int] = {}
        self._queues: dict[int, MemoryQueue] = {}
        self._created = 0
        self._streams: dict[str, _KeptStream] = {}
        self._buckets: dict[str, _Bucket] = {}
        self._members_made = 0

    # ---- life of the server

    def stop(self, *, lose_memory: bool) -> None:
        """The server is gone; every connection is lost. Files (buckets, file streams) survive."""
        self.up = False
        for member in list(self._members):
            member.cut(silently=False)
        if lose_memory:
            for queue in self._queues.values():
                queue.lose()
            self._queues.clear()
            for name in [name for name, stream in self._streams.items() if stream.memory]:
                del self._streams[name]

    def start(self) -> None:
        """The server is there again; every connection comes back."""
        self.up = True
        for member in list(self._members):
            self.clock.call_soon(member.join)

    def restart(self, *, lose_memory: bool) -> None:
        """Stops and starts at once; each connection is lost for a moment."""
        self.stop(lose_memory=lose_memory)
        self.start()

    def admit(self, member: Member) -> int:
        """A new connection; returns its number."""
        self._members.append(member)
        self._members_made += 1
        return self._members_made

    def dismiss(self, member: Member) -> None:
        """A connection was closed."""
        if member in self._members:
            self._members.remove(member)
        for subscription in [found for found in self._subscriptions if found.member is member]:
            self.unsubscribe(subscription)

    # ---- core messages

    def subscribe(self, subscription: HubSubscription) -> None:
        """Adds a subscription."""
        self._subscriptions.append(subscription)

    def unsubscribe(self, subscription: HubSubscription) -> None:
        """Removes a subscription."""
        subscription.active = False
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def listeners(self, subject: str) -> list[HubSubscription]:
        """Who gets a message on ``subject``: every plain subscription, and of each group the next in turn."""
        tokens = tuple(subject.split("."))
        plain = []
        groups: dict[tuple[str, ...], list[HubSubscription]] = {}
        for subscription in self._subscriptions:
            if not matches(subscription.pattern, tokens):
                continue
            if subscription.group:
                groups.setdefault((subscription.group, *subscription.pattern), []).append(subscription)
            else:
                plain.append(subscription)
        for group, members in groups.items():
            turn = self._turns.get(group, 0)
            self._turns[group] = turn + 1
            plain.append(members[turn % len(members)])
        return plain

    def send(self, subject: str, payload: bytes, reply: str = "") -> bool:
        """Hands a message to those who listen, and to streams that keep it; whether anybody did."""
        message = BusMessage(subject, payload, reply)
        heard = False
        for subscription in self.listeners(subject):
            heard = True
            self._hand_over(subject, lambda found=subscription: _give(found, message))  # type: ignore[misc]
        return self._keep(subject, payload) is not None or heard

    def send_undelivered(self, subject: str) -> None:
        """Tells whoever listens to the reply subject of a message that nobody got it."""
        message = BusMessage(subject, b"", undelivered=True)
        for subscription in self.listeners(subject):
            self._hand_over(subject, lambda found=subscription: _give(found, message))  # type: ignore[misc]

    def send_back(self, subject: str, deliver: Callable[[], None]) -> None:
        """Hands a reply to its one waiter."""
        self._hand_over(subject, deliver)

    def _hand_over(self, subject: str, deliver: Callable[[], Any]) -> None:
        delay_s = self._latency(subject) if self._latency is not None else 0.0
        if delay_s is None:
            return
        if delay_s > 0:
            self.clock.call_later(delay_s, deliver)
        else:
            self.clock.call_soon(deliver)

    # ---- the work-queue

    def ensure_queues(self) -> None:
        """Creates missing shards."""
        for shard in range(self.shards):
            if shard not in self._queues:
                # A creation time is an identity: no two are alike even within one instant of a virtual clock.
                self._created = max(self._created + 1, int(self.clock.now() * 1e9))
                self._queues[shard] = MemoryQueue(self.clock, shard, self._created, self._limits)

    def queue(self, shard: int) -> MemoryQueue | None:
        """A shard, or None."""
        return self._queues.get(shard)

    # ---- kept streams

    def ensure_stream(self, name: str, subjects: Sequence[str], *, memory: bool) -> None:
        """Creates a stream, or changes its subjects."""
        patterns = tuple(tuple(subject.split(".")) for subject in subjects)
        stream = self._streams.setdefault(name, _KeptStream(patterns, memory))
        stream.patterns = patterns

    def append(self, subject: str, payload: bytes, expected_last_sequence: int | None) -> int:
        """Keeps a message and hands it to those who listen.

        Raises:
            QueueMissing, WrongRevision
        """
        stream = self._stream_for(subject)
        if stream is None:
            raise QueueMissing(f"no stream takes {subject}")
        if expected_last_sequence is not None and expected_last_sequence != stream.last_sequence:
            raise WrongRevision(f"wrong last sequence: {stream.last_sequence}")
        self.send(subject, payload)
        return stream.last_sequence

    def read(self, name: str, start_sequence: int, messages_max: int) -> list[BusMessage]:
        """Kept messages."""
        stream = self._streams.get(name)
        messages = stream.messages if stream is not None else []
        return [message for message in messages if message.sequence >= start_sequence][:messages_max]

    def _stream_for(self, subject: str) -> _KeptStream | None:
        tokens = tuple(subject.split("."))
        for stream in self._streams.values():
            if any(matches(pattern, tokens) for pattern in stream.patterns):
                return stream
        return None

    def _keep(self, subject: str, payload: bytes) -> int | None:
        stream = self._stream_for(subject)
        if stream is None:
            return None
        stream.last_sequence += 1
        stream.messages.append(BusMessage(subject, payload, sequence=stream.last_sequence))
        return stream.last_sequence

    # ---- buckets

    def bucket(self, name: str) -> _Bucket:
        """A bucket, made on first use."""
        return self._buckets.setdefault(name, _Bucket())

    def put(self, bucket_name: str, key: str, value: bytes, expected_revision: int | None) -> int:
        """Stores a value.

        Raises:
            WrongRevision
        """
        bucket = self.bucket(bucket_name)
        present = bucket.entries.get(key)
        if expected_revision is not None and expected_revision != (present.revision if present is not None else 0):
            raise WrongRevision(f"key {key} has revision {present.revision if present is not None else 0}")
        bucket.revision += 1
        entry = bucket.entries[key] = KvEntry(key, value, bucket.revision)
        for watcher in list(bucket.watchers):
            watcher(key, entry)
        return bucket.revision

    def remove(self, bucket_name: str, key: str) -> None:
        """Removes a key."""
        bucket = self.bucket(bucket_name)
        if bucket.entries.pop(key, None) is not None:
            bucket.revision += 1
            for watcher in list(bucket.watchers):
                watcher(key, None)

    def queue_of(self, subject_or_token: str) -> tuple[MemoryQueue | None, str, int, int]:
        """What an acknowledgement token names: its shard if that is still the same one, subject, sequence, deliveries."""
        shard, created, subject, sequence, deliveries = subject_or_token.split(" ")
        queue = self._queues.get(int(shard))
        if queue is not None and queue.created != int(created):
            queue = None
        return queue, subject, int(sequence), int(deliveries)


def matches(pattern: tuple[str, ...], tokens: tuple[str, ...]) -> bool:
    """Whether a subject, split at its dots, is meant by a pattern with ``*`` and ``>``."""
    for index, part in enumerate(pattern):
        if part == ">":
            return len(tokens) > index
        if index >= len(tokens) or part not in ("*", tokens[index]):
            return False
    return len(pattern) == len(tokens)


def _give(subscription: HubSubscription, message: BusMessage) -> None:
    if subscription.active:
        subscription.handler(message)
