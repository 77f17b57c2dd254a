"""What simulators need of the in-memory bus: virtual time, no event loop, faults on demand, the same run each time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

import pytest

from subjects.bus import ACK_WAIT_S, CONSUMER_IDLE_S, DUPLICATE_WINDOW_S, BusMessage, QueuedTicket
from subjects.errors import BusError, BusUnavailable, RequestTimeout
from subjects.ids import ModelKey
from subjects.memory_bus import MemoryBus
from subjects.memory_hub import MemoryHub, matches
from subjects.messages import Lane, SlaClass

MODEL = ModelKey("0123456789abcdef")
T = TypeVar("T")


class VirtualTimer:
    """A call on the heap."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """It will not happen."""
        self.callback = None


class VirtualReply:
    """A future without a loop: what awaits it is resumed by the test."""

    def __init__(self) -> None:
        self._result: bytes | None = None
        self._exception: BaseException | None = None

    def done(self) -> bool:
        """Whether it has an outcome."""
        return self._result is not None or self._exception is not None

    def set_result(self, result: bytes, /) -> None:
        """An outcome."""
        self._result = result

    def set_exception(self, exception: BaseException, /) -> None:
        """An outcome."""
        self._exception = exception

    def __await__(self) -> Generator[Any, Any, bytes]:
        while not self.done():
            yield
        if self._exception is not None:
            raise self._exception
        assert self._result is not None
        return self._result


class VirtualClock:
    """A heap of calls."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._calls = 0
        self._heap: list[tuple[float, int, VirtualTimer]] = []

    def now(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> VirtualTimer:
        """Puts a call on the heap."""
        timer = VirtualTimer(callback)
        self._calls += 1
        heapq.heappush(self._heap, (self._now_s + delay_s, self._calls, timer))
        return timer

    def call_soon(self, callback: Callable[[], object]) -> None:
        """At this instant, after what is there."""
        self.call_later(0, callback)

    def future(self) -> VirtualReply:
        """Something to wait for."""
        return VirtualReply()

    def run(self, for_s: float = 0.0) -> None:
        """Lets time pass."""
        end_s = self._now_s + for_s
        while self._heap and self._heap[0][0] <= end_s:
            self._now_s, _, timer = heapq.heappop(self._heap)
            if timer.callback is not None:
                timer.callback()
        self._now_s = end_s


def now(call: Coroutine[Any, Any, T]) -> T:
    """The result of a call that does not wait."""
    try:
        call.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("the call waits")


class World:
    """A hub on virtual time with one puller."""

    def __init__(self, **options: Any) -> None:
        self.clock = VirtualClock()
        self.hub = MemoryHub(self.clock, **options)
        self.bus = MemoryBus(self.hub)
        self.other = MemoryBus(self.hub)
        self.tickets: list[QueuedTicket] = []
        self.returned: list[int] = []
        now(self.bus.ensure_queue())
        self.puller = now(
            self.bus.open_puller(
                MODEL, SlaClass.GOLD, Lane.SMALL, on_ticket=self.tickets.append, on_expired=self.returned.append
            )
        )

    def put(self, text: str, ttl_s: int = 600) -> bool:
        """Stores a ticket; whether its id was known."""
        call = self.other.queue_publish(MODEL, SlaClass.GOLD, Lane.SMALL, text.encode(), message_id=text, ttl_s=ttl_s)
        return now(call).duplicate

    def pull(self, credits: int, expires_s: float = 1.0) -> None:
        """Asks for tickets."""
        now(self.puller.pull(credits, expires_s))


def test_everything_happens_on_virtual_time() -> None:
    """A ticket waits, is pulled, is delivered again after ack_wait, and its id is free after the window."""
    world = World()
    world.put("a")
    world.pull(2)
    assert world.tickets == []
    world.clock.run()
    assert [ticket.payload for ticket in world.tickets] == [b"a"]
    world.clock.run(1.0)
    assert world.returned == [1]
    world.pull(1)
    world.clock.run(ACK_WAIT_S - 1.0 - 0.001)
    assert len(world.tickets) == 1
    world.clock.run(0.002)
    assert [ticket.deliveries for ticket in world.tickets] == [1, 2]
    now(world.bus.queue_ack(world.tickets[1].token))
    world.clock.run(DUPLICATE_WINDOW_S - world.clock.now() + 1000.0 - 0.001)
    assert world.put("a")
    world.clock.run(0.002)
    assert not world.put("a")


def test_a_request_is_answered_or_times_out_without_a_loop() -> None:
    """The waiting coroutine is resumed by whoever runs the simulation."""
    world = World()
    now(world.other.subscribe("echo", lambda message: now(world.other.publish(message.reply, message.payload))))
    now(world.other.subscribe("mute", lambda message: None))
    call = world.bus.request("echo", b"1", timeout_s=1)
    call.send(None)
    world.clock.run()
    with pytest.raises(StopIteration) as stop:
        call.send(None)
    assert stop.value.value == b"1"
    call = world.bus.request("mute", b"1", timeout_s=1)
    call.send(None)
    world.clock.run(0.999)
    call.send(None)
    world.clock.run(0.002)
    with pytest.raises(RequestTimeout):
        call.send(None)


def test_one_connection_can_be_cut() -> None:
    """The others go on; its open pulls are forgotten, what was on its way is delivered again, credits come back once."""
    world = World()
    back: list[bool] = []
    errors: list[BusError] = []
    world.bus.on_reconnected(lambda: back.append(True))
    now(world.other.subscribe("mute", lambda message: None))
    now(world.bus.request_many("mute", b"", on_reply=lambda reply: None, on_error=errors.append))
    world.pull(3)
    world.put("a")
    world.bus.disconnect()
    assert (world.bus.connected, world.other.connected) == (False, True)
    with pytest.raises(BusUnavailable):
        world.pull(1)
    world.put("b")
    world.clock.run(1.5)
    assert [type(error) for error in errors] == [BusUnavailable]
    world.bus.reconnect()
    assert back == [True]
    world.clock.run(1.0)
    assert (world.tickets, sum(world.returned)) == ([], 3)
    world.pull(2)
    world.clock.run()
    assert [(ticket.payload, ticket.deliveries) for ticket in world.tickets] == [(b"a", 2), (b"b", 1)]


def test_an_idle_consumer_is_forgotten() -> None:
    """Its count of deliveries starts again; tickets are not lost."""
    world = World()
    world.put("a")
    world.pull(1)
    world.clock.run(CONSUMER_IDLE_S + 1)
    world.pull(1)
    world.clock.run()
    assert [ticket.deliveries for ticket in world.tickets] == [1, 1]


def test_messages_can_be_delayed_and_lost() -> None:
    """By subject, as the simulator says."""
    world = World(latency=lambda subject: {"lost": None, "late": 0.5}.get(subject, 0.0))
    heard: list[tuple[float, str]] = []

    def hear(message: BusMessage) -> None:
        heard.append((world.clock.now(), message.subject))

    now(world.bus.subscribe("*", hear))
    for subject in ("late", "lost", "now"):
        now(world.other.publish(subject, b""))
    world.clock.run(1)
    assert heard == [(1000.0, "now"), (1000.5, "late")]


def test_wildcards() -> None:
    """As NATS matches them."""
    table = {
        ("a.b", "a.b"): True,
        ("a.*", "a.b"): True,
        ("*.*", "a.b"): True,
        ("a.>", "a.b.c"): True,
        (">", "a"): True,
        ("a.>", "a"): False,
        ("a.*", "a"): False,
        ("a.*", "a.b.c"): False,
        ("a.b", "a.c"): False,
    }
    got = {pair: matches(tuple(pair[0].split(".")), tuple(pair[1].split("."))) for pair in table}
    assert got == table
