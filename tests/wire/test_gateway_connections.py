"""The HTTP server below the routes: offers to change protocols, and connections that ask nothing (ING-1, O7)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from broker import http_protocol
from tests.servers import NatsServer
from tests.wire.gateway_pool import Pool, open_pool, record

LATE_S = 0.4
WAIT_S_MAX = 20.0
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
