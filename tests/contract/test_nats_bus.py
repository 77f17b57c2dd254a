"""What only a real server can do to a connection: freeze, be absent, refuse, forget (PAINS L1-L4)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ops.servers import nats_server_binary
from subjects.bus import KvEntry, QueuedTicket
from subjects.errors import BusError, BusUnavailable, RequestTimeout
from subjects.ids import ModelKey
from subjects.messages import Lane, SlaClass
from subjects.nats.bus import NatsBus
from subjects.nats.client import NatsClient
from subjects.tasks import end_tasks
from tests.servers import NatsServer
from tests.waiting import until

MODEL = ModelKey("0123456789abcdef")
Connect = Callable[..., Awaitable[NatsBus]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Makes connections and closes them after the test."""
    buses: list[NatsBus] = []

    async def make(server: NatsServer, **options: Any) -> NatsBus:
        bus = await NatsBus.connect(server.url, name="test", **options)
        buses.append(bus)
        return bus

    yield make
    for bus in buses:
        await bus.close()


async def test_a_frozen_server_is_noticed_and_left_behind(nats_server: NatsServer, connect: Connect) -> None:
    """Half-open TCP with a full socket: publishes fail instead of hanging, and soon after the thaw all works (PAINS L2)."""
    bus = await connect(nats_server)
    steady = await connect(nats_server)
    heard: list[bytes] = []
    tickets: list[QueuedTicket] = []
    returned: list[int] = []
    await steady.subscribe("s", lambda message: heard.append(message.payload))
    await bus.ensure_queue()
    puller = await steady.open_puller(MODEL, SlaClass.GOLD, Lane.SMALL, on_ticket=tickets.append, on_expired=returned.append)
    await puller.pull(3, 1)
    await steady.round_trip(timeout_s=5)
    nats_server.freeze()
    refused = 0
    end_s = time.monotonic() + 4.5
    while time.monotonic() < end_s:
        try:
            async with asyncio.timeout(3):
                await bus.publish("flood", bytes(200_000))
        except BusUnavailable:
            refused += 1
        await asyncio.sleep(0.02)
    assert refused > 0
    assert not bus.connected
    assert not steady.connected
    assert returned == [3]
    nats_server.thaw()
    await until(lambda: bus.connected and steady.connected, within_s=8)
    for one in (bus, steady):
        await one.round_trip(timeout_s=5)
    await bus.publish("s", b"again")
    await until(lambda: heard == [b"again"])
    # The work-queue was not lost, and the credits of the old pull are not given twice.
    await bus.queue_publish(MODEL, SlaClass.GOLD, Lane.SMALL, b"t", message_id="t", ttl_s=60)
    while not tickets:
        before = len(returned)
        await puller.pull(1, 0.5)
        await until(lambda b=before: bool(tickets) or len(returned) > b)  # type: ignore[misc]
    assert tickets[0].payload == b"t"


async def test_a_short_freeze_costs_no_connection(nats_server: NatsServer, connect: Connect) -> None:
    """A round trip that nobody answered in time is a RequestTimeout, and its late pong harms nobody."""
    bus = await connect(nats_server)
    nats_server.freeze()
    with pytest.raises(RequestTimeout):
        await bus.round_trip(timeout_s=0.2)
    nats_server.thaw()
    assert await bus.round_trip(timeout_s=5) >= 0
    heard: list[bytes] = []
    await bus.subscribe("s", lambda message: heard.append(message.payload))
    await bus.publish("s", b"1")
    await until(lambda: heard == [b"1"])
    assert bus.counters()["reconnects"] == 0


async def test_an_absent_server_is_said_at_once_or_waited_for(stopped_nats_server: NatsServer, connect: Connect) -> None:
    """Without ``wait`` an error that names the server; with it a bus that refuses until the server is there (PAINS L3)."""
    server = stopped_nats_server
    with pytest.raises(BusUnavailable, match=f"127.0.0.1:{server.port}"):
        await connect(server, timeout_s=0.3)
    bus = await connect(server, wait=True)
    heard: list[bytes] = []
    entries: list[tuple[str, KvEntry | None]] = []
    connected: list[bool] = []
    bus.on_reconnected(lambda: connected.append(bus.connected))
    await bus.subscribe("s", lambda message: heard.append(message.payload))
    await bus.kv_watch("bucket", lambda key, entry: entries.append((key, entry)))
    assert not bus.connected
    async with asyncio.timeout(1):
        with pytest.raises(BusUnavailable):
            await bus.publish("s", b"lost")
        with pytest.raises(BusUnavailable):
            await bus.request("s", b"lost", timeout_s=60)
        with pytest.raises(BusUnavailable):
            await bus.queue_publish(MODEL, SlaClass.GOLD, Lane.SMALL, b"t", message_id="t", ttl_s=60)
    await asyncio.to_thread(server.start)
    await until(lambda: connected == [True])
    await bus.publish("s", b"1")
    await bus.kv_put("bucket", "key", b"v")
    await until(lambda: heard == [b"1"] and len(entries) == 1)


async def test_a_bus_that_waits_can_be_closed_before_it_connects(stopped_nats_server: NatsServer, connect: Connect) -> None:
    """Nothing is left running."""
    bus = await NatsBus.connect(stopped_nats_server.url, name="later", wait=True)
    await asyncio.sleep(0.05)
    await bus.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_malformed_url_is_named() -> None:
    """Also when the bus would connect later."""
    with pytest.raises(ValueError, match="nats://HOST:PORT"):
        await NatsBus.connect("nats://host:port", name="bad", wait=True)


async def test_errors_do_not_quote_credentials(stopped_nats_server: NatsServer, connect: Connect) -> None:
    """The URL may hold a password."""
    url = f"nats://user:secret@127.0.0.1:{stopped_nats_server.port}"
    with pytest.raises(BusUnavailable) as caught:
        await NatsBus.connect(url, name="now", timeout_s=0.2)
    assert "secret" not in str(caught.value)


async def test_an_error_of_the_server_does_not_end_the_bus(nats_server: NatsServer, connect: Connect) -> None:
    """The server closes the connection after a protocol error; the client library would stay closed for good."""
    bus = await connect(nats_server)
    heard: list[bytes] = []
    await bus.subscribe("s", lambda message: heard.append(message.payload))
    transport = bus._connection._client._transport
    assert transport is not None
    transport.write(b"NONSENSE\r\n")
    await until(lambda: bus.counters()["reconnects"] == 1)
    await bus.publish("s", b"1")
    await until(lambda: heard == [b"1"])


async def test_a_client_that_stopped_reconnecting_is_started_again(nats_server: NatsServer, connect: Connect) -> None:
    """Whatever ended its reconnecting, the bus comes back (PAINS L3)."""
    bus = await connect(nats_server)
    heard: list[bytes] = []
    await bus.subscribe("s", lambda message: heard.append(message.payload))
    await asyncio.to_thread(nats_server.kill)
    await until(lambda: bus._connection._client._reconnection_task is not None)
    task = bus._connection._client._reconnection_task
    assert task is not None
    await end_tasks({task})
    await asyncio.to_thread(nats_server.start)
    await until(lambda: bus.connected)
    await bus.round_trip(timeout_s=5)
    await bus.publish("s", b"1")
    await until(lambda: heard == [b"1"])


async def test_a_flood_on_a_slow_handler_loses_nothing(nats_server: NatsServer, connect: Connect) -> None:
    """What is not handled yet waits in sockets and in the server; other subscribers are served meanwhile (PAINS L4)."""
    slow = await connect(nats_server)
    fast = await connect(nats_server)
    flooding = await connect(nats_server)
    at_slow: list[int] = []
    at_fast: list[int] = []

    def slowly(payload: bytes) -> None:
        at_slow.append(int(payload[:8]))
        time.sleep(0.0001)

    await slow.subscribe("frames", lambda message: slowly(message.payload))
    await fast.subscribe("frames", lambda message: at_fast.append(int(message.payload[:8])))
    for bus in (slow, fast):
        await bus.round_trip(timeout_s=5)
    count = 12_000
    for index in range(count):
        await flooding.publish("frames", b"%08d" % index + bytes(2_000))
    await until(lambda: len(at_slow) == count and len(at_fast) == count, within_s=60)
    assert at_slow == list(range(count))
    assert at_fast == list(range(count))
    for bus in (slow, fast, flooding):
        assert bus.counters()["reconnects"] == 0


async def test_a_server_that_reads_nothing_is_not_posted_to_for_ever(nats_server: NatsServer, connect: Connect) -> None:
    """What waits for it is bounded; the message that is too much is refused, not kept (PAINS L4)."""
    bus = await connect(nats_server)
    nats_server.freeze()
    try:
        with pytest.raises(BusUnavailable, match="reads too slowly"):
            for _ in range(40):
                bus.post("s", bytes(1024 * 1024))
    finally:
        nats_server.thaw()


async def test_a_subject_cannot_smuggle_a_command(nats_server: NatsServer, connect: Connect) -> None:
    """A line break in a subject would be read by the server as the next command."""
    bus = await connect(nats_server)
    for subject, reply in (("a b", ""), ("a\r\nPING", ""), ("", ""), ("a", "b c"), ("a", "b\nc")):
        with pytest.raises(BusError, match="malformed subject"):
            bus.post(subject, b"", reply=reply)
    assert await bus.round_trip(timeout_s=5) >= 0


@given(
    st.lists(
        st.tuples(st.sampled_from([b"a.b", b"c"]), st.sampled_from([b"", b"r.1"]), st.binary(max_size=40), st.booleans())
    ),
    st.lists(st.integers(1, 30)),
)
@example([(b"c", b"", b"MSG a 1 2\r\n", False), (b"c", b"r.1", b"\r\n", True)], [1] * 200)
def test_messages_are_the_same_however_they_are_cut(sent: list[tuple[bytes, bytes, bytes, bool]], cuts: list[int]) -> None:
    """The short way through what was read and nats-py's own take turns at any byte."""
    client = NatsClient()
    heard: list[tuple[str, str, bytes, str]] = []
    client.handlers[7] = lambda m: heard.append((m.subject, m.reply, m.payload, (m.headers or {}).get("k", "")))
    stream = b""
    for subject, reply, payload, headed in sent:
        head = b"NATS/1.0\r\nk: v\r\n\r\n" if headed else b""
        sizes = b"%d %d" % (len(head), len(head) + len(payload)) if headed else b"%d" % len(payload)
        words = [b"HMSG" if headed else b"MSG", subject, b"7", *([reply] if reply else []), sizes]
        stream += b" ".join(words) + b"\r\n" + head + payload + b"\r\n" + (b"+OK\r\n" if len(payload) % 2 else b"")

    async def read() -> None:
        place = 0
        for size in [*cuts, len(stream)]:
            await client._ps.parse(stream[place : place + size])
            place += size

    asyncio.run(read())
    assert heard == [
        (subject.decode(), reply.decode(), payload, "v" if headed else "") for subject, reply, payload, headed in sent
    ]


async def test_a_lost_consumer_is_made_again(nats_server: NatsServer, connect: Connect) -> None:
    """The server forgot the lane's consumer: the open pull's credits come back at expiry, and the next pull is served."""
    bus = await connect(nats_server)
    await bus.ensure_queue()
    tickets: list[QueuedTicket] = []
    returned: list[int] = []
    puller = await bus.open_puller(MODEL, SlaClass.GOLD, Lane.SMALL, on_ticket=tickets.append, on_expired=returned.append)
    await puller.pull(2, 0.5)
    await bus._jetstream.call(f"CONSUMER.DELETE.{puller.stream}.{puller.config['name']}")
    await until(lambda: returned == [2])
    await puller.pull(1, 1)
    await bus.queue_publish(MODEL, SlaClass.GOLD, Lane.SMALL, b"t", message_id="t", ttl_s=60)
    await until(lambda: len(tickets) == 1)
    assert returned == [2]
    # Forgotten between two pulls: the request meets no consumer, and again nothing is lost but its time.
    await bus._jetstream.call(f"CONSUMER.DELETE.{puller.stream}.{puller.config['name']}")
    await puller.pull(4, 0.3)
    await until(lambda: returned == [2, 4])
    await puller.pull(1, 1)
    await until(lambda: len(tickets) == 2 or len(returned) == 3)
    assert tickets[-1].payload == b"t"


async def test_wrong_credentials_are_said(no_child_is_left: None, tmp_path: Path) -> None:
    """The server's own words, and right credentials work beside them."""

    class Guarded(NatsServer):
        def argv(self) -> list[str]:
            return [*super().argv(), "--user", "u", "--pass", "p"]

    server = Guarded(tmp_path)
    try:
        with pytest.raises(BusUnavailable, match=r"(?i)authorization"):
            await NatsBus.connect(server.url, name="wrong", user="u", password="x", timeout_s=0.5)
        bus = await NatsBus.connect(server.url, name="right", user="u", password="p")
        assert await bus.round_trip(timeout_s=5) >= 0
        await bus.close()
    finally:
        server.stop()


async def test_a_server_without_jetstream_is_named(no_child_is_left: None, tmp_path: Path) -> None:
    """A joined server may lack it; the error says what to do."""

    class Plain(NatsServer):
        def argv(self) -> list[str]:
            return [str(nats_server_binary()), "--addr", "127.0.0.1", "--port", str(self.port)]

    server = Plain(tmp_path)
    try:
        bus = await NatsBus.connect(server.url, name="plain")
        with pytest.raises(BusError, match="JetStream"):
            await bus.ensure_queue()
        await bus.close()
    finally:
        server.stop()
