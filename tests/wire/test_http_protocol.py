"""One HTTP connection on a transport that only notes what is written: how many writes an answer takes, and odd requests."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn

from broker.http_protocol import HttpCycle, HttpProtocol, Message, ServerState
from tests.waiting import until

Send = Callable[[Message], Any]


class Transport(asyncio.Transport):
    """Takes everything."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        """Notes it."""
        self.writes.append(bytes(data))

    def close(self) -> None:
        """Notes it."""
        self.closed = True

    def is_closing(self) -> bool:
        """Whether it was closed."""
        return self.closed

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no buffer."""

    def pause_reading(self) -> None:
        """Nothing is read."""

    def resume_reading(self) -> None:
        """Nothing is read."""


async def exchanged(app: Any, request: bytes) -> Transport:
    """What was written in answer to ``request`` when the application has ended."""
    config = uvicorn.Config(app, http=HttpProtocol, lifespan="off", log_config=None)
    config.load()
    config.loaded_app = app  # as it is, without uvicorn's own layers
    state = ServerState()
    protocol, transport = HttpProtocol(config, state, {}), Transport()
    protocol.connection_made(transport)
    protocol.data_received(request)
    await until(lambda: not state.tasks, "the application has ended")
    return transport


async def whole(scope: Message, receive: Any, send: Send) -> None:
    """An answer of known length."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def stream(scope: Message, receive: Any, send: Send) -> None:
    """Two chunks."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    await send({"type": "http.response.body", "body": b"data: a\n\n", "more_body": True})
    await send({"type": "http.response.body", "body": b"data: b\n\n", "more_body": False})


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_a_whole_answer_is_one_write() -> None:
    """Head and body together: each write is a system call and a packet."""
    transport = await exchanged(whole, GET)
    (data,) = transport.writes
    assert data == b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
    assert not transport.closed


async def test_a_stream_is_one_write_per_piece() -> None:
    """The head goes with the first piece, the end with the last."""
    transport = await exchanged(stream, GET)
    head, _, first = transport.writes[0].partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert [first, *transport.writes[1:]] == [b"9\r\ndata: a\n\n\r\n", b"9\r\ndata: b\n\n\r\n0\r\n\r\n"]


async def test_old_clients_get_no_chunks() -> None:
    """HTTP/1.0 knows none: the end of a stream is the end of the connection."""
    transport = await exchanged(stream, GET.replace(b"1.1", b"1.0"))
    assert b"".join(transport.writes).endswith(b"connection: close\r\n\r\ndata: a\n\ndata: b\n\n")
    assert transport.closed


async def test_head_has_no_body() -> None:
    """The length is told, the body is not sent."""
    transport = await exchanged(whole, GET.replace(b"GET", b"HEAD"))
    assert transport.writes == [b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"]


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\n", b"\x00"])
async def test_no_header_can_hold_another(value: bytes) -> None:
    """A value with a control character is our mistake: a 500 that does not show it."""

    async def app(scope: Message, receive: Any, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-model", value)]})
        await send({"type": "http.response.body", "body": b""})

    transport = await exchanged(app, GET)
    (data,) = transport.writes
    assert data.startswith(b"HTTP/1.1 500 ") and b"x-model" not in data
    assert transport.closed


async def test_what_comes_behind_an_early_answer_is_thrown_away() -> None:
    """The rest of a body that was refused is not taken for the next request; the one behind it is answered."""
    body = b"x" * 1000
    request = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    transport = await exchanged(whole, request + body + GET)
    assert b"".join(transport.writes).count(b"HTTP/1.1 200 OK") == 2


async def test_who_waits_is_told_to_go_on_once() -> None:
    """100 Continue comes when the application wants the body, and not when it answers without it."""

    async def reads(scope: Message, receive: Any, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        await whole(scope, receive, send)

    request = b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\nhi"
    assert (await exchanged(reads, request)).writes[0] == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert not any(b"100 Continue" in data for data in (await exchanged(whole, request)).writes)


async def test_a_request_leaves_nothing_to_the_garbage_collector() -> None:
    """Bodies and answers go when their request ends, not when a collection comes by."""
    gc.collect()
    gc.disable()
    try:
        await exchanged(whole, 20 * GET)
        assert not [one for one in gc.get_objects() if isinstance(one, HttpCycle)]
    finally:
        gc.enable()
