"""One HTTP connection on a transport that only notes what is written: how many writes an answer takes, and odd requests."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn

from broker.api.openai_answers import error_body
from broker.http import protocol as http_protocol
from broker.http.cycle import UNREAD_BODY_BYTES_MAX, HttpCycle, Message
from broker.http.protocol import HttpProtocol, ServerState
from subjects.errors import ApiError
from tests.waiting import until

Send = Callable[[Message], Any]


class Transport(asyncio.Transport):
    """Takes everything; for a client that reads all, or for one that reads what the test says."""

    def __init__(self, *, reads: bool = True) -> None:
        super().__init__()
        self.reads = reads
        self.writes: list[bytes] = []
        self.unsent_bytes = 0
        self.high_bytes = 0
        self.closed = False
        self.aborted = False
        self.protocol: HttpProtocol

    def write(self, data: Any) -> None:
        """Notes it."""
        assert not self.closed
        self.writes.append(bytes(data))
        if not self.reads:
            self.unsent_bytes += len(data)
            if self.unsent_bytes > self.high_bytes and not self.protocol.write_paused:
                self.protocol.pause_writing()

    def client_reads(self, size_bytes: int) -> None:
        """What the client takes of that which waits for it."""
        self.unsent_bytes = max(0, self.unsent_bytes - size_bytes)
        if self.protocol.write_paused and self.unsent_bytes <= self.high_bytes // 4:
            self.protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        """What waits for the client."""
        return self.unsent_bytes

    def abort(self) -> None:
        """As a real one does, but within the call."""
        self.aborted = self.closed = True
        self.protocol.connection_lost(None)

    def close(self) -> None:
        """Notes it."""
        self.closed = True

    def is_closing(self) -> bool:
        """Whether it was closed."""
        return self.closed

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Notes it."""
        self.high_bytes = high or 0

    def pause_reading(self) -> None:
        """Nothing is read."""

    def resume_reading(self) -> None:
        """Nothing is read."""


class Speaking:
    """An application that says HTTP's own errors as OpenAI's API does."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, *exchange: Any) -> None:
        await self._app(*exchange)

    def error_body(self, error: ApiError) -> bytes:
        return error_body(error)


def connected(app: Any, *, reads: bool = True) -> tuple[HttpProtocol, Transport, ServerState]:
    """An open connection."""
    config = uvicorn.Config(app, http=HttpProtocol, lifespan="off", log_config=None)
    config.load()
    config.loaded_app = Speaking(app)  # as it is, without uvicorn's own layers
    state = ServerState()
    protocol, transport = HttpProtocol(config, state, {}), Transport(reads=reads)
    transport.protocol = protocol
    protocol.connection_made(transport)
    return protocol, transport, state


async def exchanged(app: Any, request: bytes) -> Transport:
    """What was written in answer to ``request`` when the application has ended."""
    protocol, transport, state = connected(app)
    protocol.data_received(request)
    await until(lambda: not state.tasks, "the application has ended")
    return transport


class Clock:
    """Looks at the connections as the server does once a second, in a time that goes as the test says."""

    def __init__(self, protocol: HttpProtocol, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.protocol = protocol
        monkeypatch.setattr(protocol, "loop", self)

    def time(self) -> float:
        """As the loop's."""
        return self.now_s

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio.get_running_loop(), name)

    def goes_on(self, seconds: float) -> None:
        """Time passes."""
        for _ in range(round(seconds)):
            self.now_s += 1
            self.protocol.state.look(self.now_s)


async def whole(scope: Message, receive: Any, send: Send) -> None:
    """An answer of known length."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def stream(scope: Message, receive: Any, send: Send) -> None:
    """Two chunks."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    await send({"type": "http.response.body", "body": b"data: a\n\n", "more_body": True})
    await send({"type": "http.response.body", "body": b"data: b\n\n", "more_body": False})


async def large(scope: Message, receive: Any, send: Send) -> None:
    """An answer of which much waits for a slow client."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LARGE_BYTES)]})
    await send({"type": "http.response.body", "body": bytes(LARGE_BYTES)})


LARGE_BYTES = 1_000_000
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


async def test_an_answer_without_headers_has_a_whole_head() -> None:
    """Each line of a head ends, be it the last but one or not."""

    async def app(scope: Message, receive: Any, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"hello"})

    transport = await exchanged(app, GET)
    assert transport.writes == [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"]


async def test_a_trailer_is_no_header() -> None:
    """What stands behind a body does not replace what a proxy has put before it; but it is counted."""
    seen: list[Any] = []

    async def app(scope: Message, receive: Any, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        seen.append(scope["headers"])
        await whole(scope, receive, send)

    request = b"POST / HTTP/1.1\r\nauthorization: proxy\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n"
    transport = await exchanged(app, request + b"authorization: client\r\nexpect: 100-continue\r\n\r\n")
    assert seen == [[(b"authorization", b"proxy"), (b"transfer-encoding", b"chunked")]]
    assert len(transport.writes) == 1
    flood = b"".join(b"x-%d: 0\r\n" % number for number in range(http_protocol.HEADER_BYTES_MAX // 32))
    transport = await exchanged(app, request + flood + b"\r\n")
    assert b"".join(transport.writes).startswith(b"HTTP/1.1 400 ")
    assert transport.closed


async def test_what_is_no_http_is_refused_behind_the_answers_before_it() -> None:
    """A 400 in the middle of a stream would be taken for a part of it."""
    protocol, transport, state = connected(stream)
    protocol.data_received(GET)
    await asyncio.sleep(0)
    protocol.data_received(GET + b"\x01garbage\r\n\r\n")
    protocol.data_received(GET)
    await until(lambda: not state.tasks, "the application has ended")
    answers = b"".join(transport.writes).split(b"HTTP/1.1 ")
    assert [answer[:3] for answer in answers] == [b"", b"200", b"200", b"400"]
    assert all(answer.endswith(b"data: b\n\n\r\n0\r\n\r\n") for answer in answers[1:3])
    assert transport.closed


@pytest.mark.parametrize("begun", [False, True])
async def test_a_body_that_breaks_ends_its_request(begun: bool) -> None:
    """With a 400 where nothing of the answer is out, and with the end of the connection where something is."""
    heard: list[Message] = []

    async def app(scope: Message, receive: Any, send: Send) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"hello", "more_body": True})
        heard.append(await receive())
        heard.append(await receive())
        await whole(scope, receive, send)

    protocol, transport, state = connected(app)
    protocol.data_received(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n")
    await until(lambda: len(heard) == 1, "half of the body is there")
    protocol.data_received(b"no number\r\n")
    await until(lambda: not state.tasks, "the application has ended")
    assert heard[1]["type"] == "http.disconnect"
    assert len(transport.writes) == 1
    assert transport.writes[0].startswith(b"HTTP/1.1 200 " if begun else b"HTTP/1.1 400 ")
    assert transport.closed


async def test_one_read_does_not_bring_any_number_of_requests() -> None:
    """Of 14,000 tiny ones the first are taken, answered, and the connection ends with them: the others may be sent again."""
    protocol, transport, state = connected(whole)
    tiny = b"GET / HTTP/1.1\r\n\r\n"
    protocol.data_received(tiny * (256 * 1024 // len(tiny)))
    assert len(protocol._waiting) == http_protocol.WAITING_MAX
    protocol.data_received(tiny)
    await until(lambda: not state.tasks, "the application has ended")
    assert len(transport.writes) == 1 + http_protocol.WAITING_MAX
    assert [number for number, data in enumerate(transport.writes) if b"connection: close" in data] == [
        len(transport.writes) - 1
    ]
    assert transport.closed


async def test_a_waiting_body_does_not_grow_with_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is not read again for a request's sake while the body of a later one is over its bound."""
    protocol, transport, state = connected(whole)
    answers_at: list[int] = []
    monkeypatch.setattr(transport, "resume_reading", lambda: answers_at.append(len(transport.writes)))
    part = bytes(2 * UNREAD_BODY_BYTES_MAX)
    post = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (2 * len(part))
    protocol.data_received(3 * GET + post + part)
    await until(lambda: not state.tasks, "the application has ended")
    assert answers_at == [4]
    protocol.data_received(part + GET)
    await until(lambda: len(transport.writes) == 5, "the rest is thrown away, and the next one answered")


async def test_who_reads_nothing_is_dropped_whatever_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that no exchange makes wait for their reader too, and so do the requests behind them (L4, E6)."""
    protocol, transport, state = connected(large, reads=False)
    clock = Clock(protocol, monkeypatch)
    protocol.data_received(3 * GET)
    await until(lambda: transport.writes, "one answer is written")
    await asyncio.sleep(0)
    clock.goes_on(http_protocol.UNREAD_S_MAX - 1)
    assert (len(transport.writes), len(state.tasks), transport.aborted) == (1, 1, False)
    clock.goes_on(1)
    assert transport.aborted
    await until(lambda: not state.tasks, "the application has ended")


@pytest.mark.parametrize("close", [False, True])
async def test_a_slow_reader_gets_its_whole_answer(close: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads on is not cut, whatever time it takes; the idle time begins when all is read."""
    protocol, transport, state = connected(large, reads=False)
    clock = Clock(protocol, monkeypatch)
    protocol.data_received(GET.replace(b"host: x", b"connection: close") if close else GET)
    await until(lambda: transport.writes and not state.tasks, "the answer is written")
    while transport.unsent_bytes:
        clock.goes_on(http_protocol.UNREAD_S_MAX - 1)
        transport.client_reads(LARGE_BYTES // 20)
        assert not transport.aborted
    assert clock.now_s > 5 * http_protocol.IDLE_S_MAX
    if not close:
        clock.goes_on(http_protocol.IDLE_S_MAX - http_protocol.UNREAD_S_MAX)
        assert not transport.aborted
        clock.goes_on(2 * http_protocol.UNREAD_S_MAX)
        assert transport.aborted


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("left_bytes", [LARGE_BYTES // 2, 1000])
async def test_a_reader_that_stops_is_dropped(close: bool, left_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of its answer, and with the little that is left of it."""
    protocol, transport, state = connected(large, reads=False)
    clock = Clock(protocol, monkeypatch)
    protocol.data_received(GET.replace(b"host: x", b"connection: close") if close else GET)
    await until(lambda: transport.writes and not state.tasks, "the answer is written")
    transport.client_reads(LARGE_BYTES - left_bytes)
    clock.goes_on(http_protocol.IDLE_S_MAX + 2 * http_protocol.UNREAD_S_MAX)
    assert transport.aborted


async def test_a_request_leaves_nothing_to_the_garbage_collector() -> None:
    """Bodies and answers go when their request ends, not when a collection comes by."""
    gc.collect()
    gc.disable()
    try:
        await exchanged(whole, 20 * GET)
        assert not [one for one in gc.get_objects() if type(one) is HttpCycle]
    finally:
        gc.enable()
