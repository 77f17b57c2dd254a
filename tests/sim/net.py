"""Time, processes and the bus of the simulated world: one heap of events, nothing runs beside it.

The bus behaves as a NATS server was measured to: core messages are lost while it is away, each pair of processes keeps its
order, the work-queue (``tests.sim.work_queue``) is lost with the server's memory.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from subjects.bus import QueuedTicket, QueueLimits
from subjects.errors import QueueFull
from tests.sim.work_queue import PullRequest, SimQueue

Action = Callable[[], object]


class Handle:
    """A call on the heap."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        """It will not happen."""
        self.action = None


class SimClock:
    """The heap of events; calls of one instant happen in the order in which they were asked for."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._heap: list[tuple[float, int, Handle]] = []
        self._count = 0
        self.calls = 0

    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._now_s

    def call_later(self, delay_s: float, callback: Action) -> Handle:
        """Calls back after ``delay_s``."""
        self._count += 1
        handle = Handle(callback)
        heapq.heappush(self._heap, (self._now_s + max(0.0, delay_s), self._count, handle))
        return handle

    def call_soon(self, callback: Action) -> None:
        """Calls back at this instant, after what was asked for before."""
        self.call_later(0.0, callback)

    def run(self, until_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Runs events up to ``until_s``, or until ``stop`` holds after one of them."""
        while self._heap and self._heap[0][0] <= until_s:
            self._now_s, _, handle = heapq.heappop(self._heap)
            if handle.action is not None:
                self.calls += 1
                handle.action()
                if stop():
                    return
        self._now_s = max(self._now_s, until_s)


class Node:
    """A process. It may be dead, paused (SIGSTOP), or cut off from the bus."""

    def __init__(self, clock: SimClock, name: str) -> None:
        self.clock = clock
        self.name = name
        self.alive = True
        self.connected = True
        self.paused_until_s = 0.0
        self._paused: list[Action] = []

    def run(self, action: Action) -> None:
        """Does something inside this process: now, when it is resumed, or never."""
        if not self.alive:
            return
        if self.paused_until_s > self.clock.now():
            self._paused.append(action)
        else:
            action()

    def pause(self, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after ``for_s``; what arrives meanwhile waits."""
        self.paused_until_s = self.clock.now() + for_s
        self.clock.call_later(for_s, self._resume)

    def _resume(self) -> None:
        if self.paused_until_s > self.clock.now():
            return
        waiting, self._paused = self._paused, []
        for action in waiting:
            self.run(action)

    def every(self, period_s: float, action: Action) -> None:
        """Repeats while the process lives; a paused one catches up with one call."""

        def again() -> None:
            if self.alive:
                action()
                self.clock.call_later(period_s, lambda: self.run(again))

        self.clock.call_later(period_s, lambda: self.run(again))

    def bus_lost(self) -> None:
        """The connection to the bus was lost."""

    def bus_back(self) -> None:
        """The connection to the bus was made again."""


class NoAnswer(Enum):
    """Why a request over the bus has no answer."""

    TIMEOUT = "timeout"
    NO_RESPONDERS = "no-responders"
    UNAVAILABLE = "unavailable"


@dataclass(slots=True, eq=False)
class _Asked:
    on_error: Callable[[NoAnswer], object]
    source: Node
    done: bool = False


class Network:
    """The bus: messages, requests, and one work-queue stream."""

    def __init__(self, clock: SimClock, draw: random.Random, *, latency_s: float, loss: float) -> None:
        self._clock = clock
        self._draw = draw
        self._latency_s = latency_s
        self.loss = loss
        self.up = True
        self.generation = 0
        self.server = Node(clock, "server")
        self.nodes: list[Node] = []
        self.lost = 0
        self._last_s: dict[tuple[str, str], float] = {}
        self._asked: list[_Asked] = []
        self._queues_made = 0
        self.queue: SimQueue | None = None
        self.ensure_queue()

    # ---- core messages

    def send(self, source: Node, target: Node | None, deliver: Action, *, lossy: bool = True) -> bool:
        """One message; at most once, in order per pair. False when the sender knows that it was not sent."""
        if not (self.up and source.connected):
            return False
        if lossy and self._draw.random() < self.loss:
            self.lost += 1
            return True
        if target is None:
            return True
        pair = (source.name, target.name)
        at_s = self._clock.now() + self._latency_s * (0.5 + self._draw.random())
        at_s = self._last_s[pair] = max(at_s, self._last_s.get(pair, 0.0))
        generation = self.generation

        def arrive() -> None:
            if self.generation == generation and target.connected:
                target.run(deliver)

        self._clock.call_later(at_s - self._clock.now(), arrive)
        return True

    def request(
        self,
        source: Node,
        target: Node | None,
        ask: Callable[[Callable[[object], None]], object],
        on_reply: Callable[[object], object],
        on_error: Callable[[NoAnswer], object],
        *,
        timeout_s: float,
        lossy: bool = True,
    ) -> None:
        """Asks a process and calls back exactly once: with its reply, or with why there is none."""
        asked = _Asked(on_error, source)

        def finish(action: Action) -> None:
            if not asked.done:
                asked.done = True
                source.run(action)

        def fail(why: NoAnswer) -> None:
            finish(lambda: on_error(why))

        def reply(value: object) -> None:
            if target is not None:
                self.send(target, source, lambda: finish(lambda: on_reply(value)), lossy=lossy)

        if target is None or not target.alive or not target.connected:
            sent = self.up and source.connected
            why = NoAnswer.NO_RESPONDERS if sent else NoAnswer.UNAVAILABLE
            self._clock.call_later(self._latency_s if sent else 0.0, lambda: fail(why))
        elif not self.send(source, target, lambda: ask(reply), lossy=lossy):
            self._clock.call_soon(lambda: fail(NoAnswer.UNAVAILABLE))
        self._clock.call_later(timeout_s, lambda: fail(NoAnswer.TIMEOUT))
        self._asked = [other for other in self._asked if not other.done]
        self._asked.append(asked)

    def deliver(self, source: Node, target: Node | None, deliver: Action, undelivered: Action) -> None:
        """A message with a reply subject: the server says at once when nobody is connected there."""
        if not (self.up and source.connected):
            self._clock.call_soon(lambda: source.run(undelivered))
        elif target is None or not target.alive or not target.connected:
            self._clock.call_later(self._latency_s, lambda: source.run(undelivered) if source.connected else None)
        else:
            self.send(source, target, deliver)

    # ---- the server's life

    def go_down(self, *, streams_lost: bool) -> None:
        """The server is gone; every connection breaks now."""
        self.up = False
        self.generation += 1
        if streams_lost and self.queue is not None:
            self.queue.lose()
            self.queue = None
        waiting, self._asked = self._asked, []
        for asked in waiting:
            if not asked.done:
                asked.done = True
                asked.source.run(lambda asked=asked: asked.on_error(NoAnswer.UNAVAILABLE))  # type: ignore[misc]
        for node in list(self.nodes):
            node.connected = False
            node.run(node.bus_lost)

    def come_up(self) -> None:
        """The server is back; processes reconnect one after the other within half a second."""
        self.up = True
        for node in list(self.nodes):
            self._clock.call_later(0.5 * self._draw.random(), lambda node=node: self._reconnect(node))  # type: ignore[misc]

    def cut_off(self, node: Node, for_s: float) -> None:
        """One process loses its connection and makes it again after ``for_s``."""
        node.connected = False
        waiting = [asked for asked in self._asked if asked.source is node and not asked.done]
        for asked in waiting:
            asked.done = True
            node.run(lambda asked=asked: asked.on_error(NoAnswer.UNAVAILABLE))  # type: ignore[misc]
        node.run(node.bus_lost)
        self._clock.call_later(for_s, lambda: self._reconnect(node))

    def _reconnect(self, node: Node) -> None:
        if self.up and not node.connected:
            node.connected = True
            node.run(node.bus_back)

    # ---- the work-queue

    def ensure_queue(self) -> None:
        """Creates the stream if it is missing."""
        if self.queue is None:
            self._queues_made += 1
            self.queue = SimQueue(self._clock, 0, self._queues_made, QueueLimits())

    def pull(
        self,
        source: Node,
        subject: str,
        credits: int,
        expires_s: float,
        on_ticket: Callable[[QueuedTicket, int], None],
        on_expired: Callable[[int], None],
    ) -> Pull:
        """Opens a pull; each credit comes back once, as a ticket or in ``on_expired``."""
        return Pull(self, self._clock, source, subject, credits, expires_s, on_ticket, on_expired)

    def publish(self, subject: str, payload: bytes, message_id: str, ttl_s: int) -> object:
        """Stores a ticket at the server: ``Stored``, or ``"full"``, or ``"missing"``."""
        if self.queue is None:
            return "missing"
        try:
            return self.queue.publish(subject, payload, message_id=message_id, ttl_s=ttl_s)
        except QueueFull:
            return "full"


class Pull:
    """One pull of one process, from its request to the return of its last credit."""

    def __init__(
        self,
        network: Network,
        clock: SimClock,
        source: Node,
        subject: str,
        credits: int,
        expires_s: float,
        on_ticket: Callable[[QueuedTicket, int], None],
        on_expired: Callable[[int], None],
    ) -> None:
        self._network = network
        self._source = source
        self._subject = subject
        self._left = credits
        self._on_ticket = on_ticket
        self._on_expired = on_expired
        self._open: PullRequest | None = None
        self._queue: SimQueue | None = None
        self.done = False

        def arrive() -> None:
            queue = network.queue
            if queue is None:
                network.send(network.server, source, self.end, lossy=False)
                return
            created = queue.created
            self._queue = queue
            self._open = PullRequest(credits, lambda queued: self._send_ticket(queued, created))
            queue.pull(subject, self._open)
            clock.call_later(expires_s, self._expire)

        if not network.send(source, network.server, arrive, lossy=False):
            clock.call_soon(lambda: source.run(self.end))

    def _send_ticket(self, queued: QueuedTicket, created: int) -> None:
        self._network.send(self._network.server, self._source, lambda: self._take(queued, created), lossy=False)

    def _take(self, queued: QueuedTicket, created: int) -> None:
        if not self.done:
            self._left -= 1
            self._on_ticket(queued, created)
            if self._left == 0:
                self.done = True

    def _expire(self) -> None:
        self.close_at_server()
        # In order behind the tickets that are still on their way.
        self._network.send(self._network.server, self._source, self.end, lossy=False)

    def close_at_server(self) -> None:
        """The server gives it no more tickets (expired, or its process is gone)."""
        if self._queue is not None and self._open is not None and self._open.open:
            self._queue.end_pull(self._subject, self._open)

    def end(self) -> None:
        """The process gets its unused credits back."""
        if not self.done:
            self.done = True
            if self._left:
                self._on_expired(self._left)
