"""The HTTP server below the routes: offers to change protocols, and connections that ask nothing (ING-1, O7)."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from broker.gateway import exchange
from broker.http import protocol as http_protocol
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.gateway_pool import Pool, Run, open_pool, record

LATE_S = 0.4
WAIT_S_MAX = 20.0
PIECE_BYTES = 20_000
CLIENT_BYTES = 64 * 1024
OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
WEBSOCKET = "Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAA\r\nSec-WebSocket-Version: 13\r\n"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(shared_nats_server: NatsServer) -> AsyncIterator[Pool]:
    """One gateway with a model that answers."""
    async with open_pool(shared_nats_server.url) as pool:
        model = record("known")
        await pool.register(model)
        await pool.replica(model)
        yield pool


def post(headers: str = "", *, chunked: bool = False) -> bytes:
    """A good chat request."""
    body = json.dumps({"model": "known", "messages": [{"role": "user", "content": "Hi"}]}).encode()
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}{length}\r\n\r\n"
    return head.encode() + (b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body)


async def statuses(pool: Pool, data: bytes, answers: int, *, piece: int = 0) -> list[int]:
    """Sends ``data``, whole or in pieces, and returns the statuses of the answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", pool.server.port)
    try:
        for at in range(0, len(data), piece or len(data)):
            writer.write(data[at : at + (piece or len(data))])
            await writer.drain()
            await asyncio.sleep(0)
        found = []
        async with asyncio.timeout(WAIT_S_MAX):
            for _ in range(answers):
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                found.append(int(head.split()[1]))
                await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
        return found
    finally:
        writer.close()


@pytest.mark.parametrize("offer", [OFFER, WEBSOCKET])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("piece", [0, 37])
async def test_an_offer_to_change_protocols_is_passed_over(pool: Pool, offer: str, chunked: bool, piece: int) -> None:
    """Such a request is answered as any other, with its body, and so are those behind it on the connection."""
    data = post(offer, chunked=chunked) + post() + post(offer)
    assert await statuses(pool, data, 3, piece=piece) == [200, 200, 200]


async def test_headers_are_bounded_when_an_offer_is_among_them(pool: Pool) -> None:
    """The second reading of a head counts its bytes as the first does."""
    padding = f"X-Padding: {'a' * http_protocol.HEADER_BYTES_MAX}\r\n"
    assert await statuses(pool, post(OFFER + padding), 1) == [400]


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: "])
async def test_a_connection_that_asks_nothing_is_dropped(pool: Pool, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent, or with a head that never ends: it must not hold a descriptor for ever."""
    monkeypatch.setattr(http_protocol, "HEAD_S_MAX", LATE_S)
    reader, writer = await asyncio.open_connection("127.0.0.1", pool.server.port)
    writer.write(sent)
    async with asyncio.timeout(WAIT_S_MAX):
        with pytest.raises(ConnectionResetError):
            while await reader.read(1000):
                pass
            raise ConnectionResetError  # closed in order is as good
    writer.close()


async def test_half_a_head_behind_an_answer_under_way_does_not_cut_it(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on a head begins when somebody waits for it."""
    monkeypatch.setattr(http_protocol, "HEAD_S_MAX", LATE_S)
    slow = record("slow")
    await pool.register(slow)
    asked = post().replace(b'"known"', b'"slow" ')
    request = asyncio.create_task(statuses(pool, asked + asked[:40], 1))
    await asyncio.sleep(4 * LATE_S)
    assert not request.done()
    await pool.replica(slow)
    assert await request == [200]


async def test_an_idle_connection_is_closed(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an answer a connection waits for a next request for a while, and not for ever."""
    monkeypatch.setattr(http_protocol, "IDLE_S_MAX", LATE_S)
    reader, writer = await asyncio.open_connection("127.0.0.1", pool.server.port)
    writer.write(post())
    async with asyncio.timeout(WAIT_S_MAX):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
        assert not reader.at_eof() and b"connection: close" not in head
        assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("path", ["/openapi.json", "/metrics"])
async def test_a_client_that_reads_no_answer_of_ours_is_dropped(
    pool: Pool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that come from no replica are bounded in the same way (L4, O7)."""
    monkeypatch.setattr(http_protocol, "UNREAD_S_MAX", LATE_S)
    asked = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    with unread() as client:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", pool.server.port))
        await until(lambda: not pool.server.busy, "nothing else runs")
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(WAIT_S_MAX):
                while True:
                    await loop.sock_sendall(client, asked)
                    await asyncio.sleep(0)
    await until(lambda: not pool.server.busy, "the request has ended")


async def test_a_client_with_a_second_request_behind_leaves(pool: Pool) -> None:
    """It is known at once that it left, though a pipelined request waits: one is cancelled, the other never runs (A1)."""
    held = record("held")
    await pool.register(held)
    replica = await pool.replica(held, thinks_for_ever)
    _, writer = await asyncio.open_connection("127.0.0.1", pool.server.port)
    writer.write(2 * post().replace(b'"known"', b'"held" '))
    await until(lambda: len(replica.running) == 1, "the first one runs")
    run = replica.running[0]
    writer.close()
    await until(run.ended.is_set, "the replica is told")
    assert (run.cancelled_by, len(replica.runs)) == ("cancel", 1)
    assert not pool.server.busy


def unread() -> socket.socket:
    """Of a client that reads nothing, nor its kernel much."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CLIENT_BYTES)
    client.setblocking(False)
    return client


async def thinks_for_ever(run: Run) -> None:
    """No first token."""
    await asyncio.Event().wait()


async def floods(run: Run) -> None:
    """Much text without end, but not faster than the gateway takes it."""
    while True:
        await run.say("x" * PIECE_BYTES)
        await asyncio.sleep(0.005)


async def test_what_a_client_that_reads_nothing_holds(pool: Pool) -> None:
    """Its stream is given up when the documented bounds are reached: ours, uvloop's and the kernel's on both sides (L4)."""
    loud = record("loud")
    await pool.register(loud)
    replica = await pool.replica(loud, floods)
    with unread() as client:
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", pool.server.port))
        asked = post().replace(b'"known"', b'"loud" ').replace(b'"messages"', b'"stream":true,"messages"')
        length = len(asked.partition(b"\r\n\r\n")[2])
        asked = re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % length, asked)
        await asyncio.get_running_loop().sock_sendall(client, asked)
        await until(lambda: replica.runs and replica.runs[0].ended.is_set(), "the flood is stopped")
        run = replica.runs[0]
        connections = pool.server._server.server_state.connections
        (unsent,) = [size for one in connections if (size := one.transport.get_write_buffer_size())]
    assert run.cancelled_by == "cancel"
    piece = exchange.READ_BYTES_MAX + PIECE_BYTES
    assert http_protocol.UNSENT_BYTES_MAX < unsent <= http_protocol.UNSENT_BYTES_MAX + piece
    kernel = 2 * http_protocol.SEND_BUFFER_BYTES + 2 * CLIENT_BYTES
    gateway_and_kernel = exchange.BUFFERED_BYTES_MAX + http_protocol.UNSENT_BYTES_MAX + 2 * piece + kernel
    on_its_way = 64 * PIECE_BYTES
    """Said before the cancel came."""
    assert sum(len(delta.text) for _, delta in run.sent) <= gateway_and_kernel + on_its_way


async def talks_for_ever(run: Run) -> None:
    """A chunk every few milliseconds."""
    while True:
        await run.say("word ")
        await asyncio.sleep(0.005)


def asked_of(name: str, fields: str = "", path: bytes = b"/v1/chat/completions") -> bytes:
    """A chat request to that model, or what is like one."""
    body = b'{"model":"%s",%s"messages":[{"role":"user","content":"Hi"}]}' % (name.encode(), fields.encode())
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" % path
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


STREAM = '"stream":true,"max_tokens":100,'
MESSAGES = b"/v1/messages"


async def reads_to(pool: Pool, data: bytes, end: bytes) -> None:
    """A client that leaves when it has read ``end``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", pool.server.port)
    writer.write(data)
    async with asyncio.timeout(WAIT_S_MAX):
        await reader.readuntil(end)
    writer.close()
    await writer.wait_closed()


async def test_no_request_leaves_work_to_the_garbage_collector(pool: Pool) -> None:
    """Answered, streamed, refused, left in the middle or behind another one: each goes when it ends, its connection too.

    A gateway lets the collector run seldom (``GC_THRESHOLDS``): what waits for it would pile up until then.
    """
    talker = record("talker")
    await pool.register(talker)
    replica = await pool.replica(talker, talks_for_ever)
    await reads_to(pool, asked_of("known"), b"}}")  # what is made once
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            await reads_to(pool, asked_of("known") + asked_of("known"), b"}}")
            await reads_to(pool, asked_of("known", STREAM), b"[DONE]")
            await reads_to(pool, asked_of("nobody"), b"}}")
            await reads_to(pool, asked_of("known", '"n":-1,'), b"}}")
            await reads_to(pool, b"GET /v1/models HTTP/1.1\r\n\r\n", b"}]}")
            await reads_to(pool, asked_of("known", STREAM, MESSAGES), b"message_stop")
            await reads_to(pool, asked_of("talker", STREAM, MESSAGES), b"word")
            await reads_to(pool, asked_of("talker", STREAM), b"word")
            await reads_to(pool, asked_of("talker", STREAM) + 3 * asked_of("talker"), b"word")
        await until(lambda: not pool.server.busy and not replica.running, "all have ended")
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not sorted({type(one).__name__ for one in gc.garbage if type(one).__module__.startswith("broker.")})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
