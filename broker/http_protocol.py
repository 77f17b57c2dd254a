"""One HTTP connection: httptools' parser on one side, the ASGI application on the other.

It stands in uvicorn in the place of its ``HttpToolsProtocol``, which makes a task, an event and up to three timers for each
request beside ours, and tells of a client that left only to a task that waits for it. Here are bounds on headers, OpenAI's
error shape, and one time per connection at which it is dropped; the server looks at those times once a second.

=====================  ============================================================================================
held for a connection  at most
=====================  ============================================================================================
headers                ``HEADER_BYTES_MAX`` of a request; ``PIPELINED_MAX`` more requests, or what one read brought
body not taken yet     ``UNREAD_BODY_BYTES_MAX``, and what one read brought (up to 256 KiB)
answer not sent yet    ``UNSENT_BYTES_MAX`` and one piece of it; then :meth:`HttpCycle.send` waits, a stream's output gathers
                       in :mod:`broker.exchange`, and the answer is given up at ``BUFFERED_BYTES_MAX`` there
answer in the kernel   twice ``SEND_BUFFER_BYTES`` (Linux doubles it for its own needs)
=====================  ============================================================================================
"""

from __future__ import annotations

import asyncio
import functools
import math
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

import httptools
import structlog
import uvicorn
from uvicorn.server import ServerState as UvicornState

from broker.openai_answers import error_body
from subjects.errors import ApiError, place_of

HEADER_BYTES_MAX = 64 * 1024
HEADER_BYTES_EACH = 32
"""Counted for each header beside its text: a flood of empty ones takes memory too."""
HEAD_S_MAX = 30.0
"""A connection on which nobody has asked anything, or whose headers trickle in, is dropped after this time (PAINS O7)."""
IDLE_S_MAX = 75.0
"""A connection is kept so long for a next request: longer than clients and balancers keep theirs, which are often at 60 s.
Whoever closes first must be the one that sends, or a request meets a connection that is just being closed."""
CLOSING_S_MAX = 30.0
"""So long may the last bytes of an answer wait for their reader on a connection that is to close."""
UNREAD_BODY_BYTES_MAX = 64 * 1024
PIPELINED_MAX = 4
UNSENT_BYTES_MAX = 64 * 1024
SEND_BUFFER_BYTES = 256 * 1024
"""Of the kernel, per connection. Its own choice grows to 4 MiB, for each client that reads nothing."""
CYCLE = "carpool.cycle"
"""Key of the ASGI scope: the :class:`HttpCycle` of the request."""

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

log = structlog.get_logger(__name__)


class ServerState(UvicornState):
    """What the connections of a server share."""

    default_head = b""
    """Header lines of every answer: the date."""

    def look(self, now_s: float) -> None:
        """Once a second: drops the connections whose time is over, and takes over the date that uvicorn has renewed."""
        self.default_head = b"".join([name + b": " + value + b"\r\n" for name, value in self.default_headers])
        connections: set[HttpProtocol] = self.connections  # type: ignore[assignment] # uvicorn names its own protocols only
        for connection in [one for one in connections if one.drop_s <= now_s]:
            connection.abort()


class _TooManyHeaderBytes(Exception):
    """Raised inside the parser, which turns it into its own error."""


@functools.cache
def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


@functools.lru_cache(maxsize=128)
def _split(url: bytes) -> tuple[str, bytes, bytes]:
    """``(path, raw path, query)``"""
    parsed = httptools.parse_url(url)
    raw: bytes = parsed.path or b"/"
    path = raw.decode("ascii")
    return unquote(path) if "%" in path else path, raw, parsed.query or b""


class HttpProtocol(asyncio.Protocol):
    """One connection.

    An offer to change to another protocol is passed over, as HTTP allows. httptools takes what follows such a request for
    that other protocol, its body too, so the request is parsed again without the offer. Java's own client makes it to all.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.app: App = config.loaded_app
        self.state = server_state
        self.loop = _loop or asyncio.get_running_loop()
        self.parser = self._new_parser()
        self.transport: asyncio.Transport
        self.write_paused = False
        self.drop_s = math.inf
        """In the loop's time: when this connection is dropped, if nothing changes."""
        self._writable: asyncio.Future[None] | None = None
        self._read_paused = False
        self._shutting_down = False
        self._in_head = False
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._header_bytes = 0
        self._expects = False
        self._reading: HttpCycle | None = None
        """Whose body comes in."""
        self._running: HttpCycle | None = None
        self._waiting: deque[HttpCycle] = deque()

    # ------------------------------------------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's are not subclasses of asyncio.Transport
        self.transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        self.state.connections.add(self)  # type: ignore[arg-type] # uvicorn names its own protocols only
        self.drop_s = self.loop.time() + HEAD_S_MAX

    def connection_lost(self, exc: Exception | None) -> None:
        self.state.connections.discard(self)
        running = self._running
        self._waiting.clear()
        self._running = self._reading = None
        self.resume_writing()
        self.parser = None  # type: ignore[assignment] # it holds our methods, and we hold it
        if running is not None:
            running.lost()

    def eof_received(self) -> None:
        """The client has closed its side: for HTTP clients that is to leave, and the transport closes."""

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._writable is not None:
            if not self._writable.done():
                self._writable.set_result(None)
            self._writable = None
        if self._running is not None and self._running.on_writable is not None:
            self._running.on_writable()

    async def drain(self) -> None:
        """Returns when the client has read enough, or is gone."""
        while self.write_paused:
            if self._writable is None:
                self._writable = self.loop.create_future()
            await asyncio.shield(self._writable)

    def pause_reading(self) -> None:
        if not self._read_paused:
            self._read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._read_paused and len(self._waiting) < PIPELINED_MAX and not self.transport.is_closing():
            self._read_paused = False
            self.transport.resume_reading()

    def shutdown(self) -> None:
        """The server goes down: closes now, or when the answer under way is out."""
        self._shutting_down = True
        if self._running is None:
            self.close()
        else:
            self._running.keep_alive = False

    def close(self) -> None:
        """Closes when all is written, or drops the rest after ``CLOSING_S_MAX``."""
        self.drop_s = self.loop.time() + CLOSING_S_MAX
        self.transport.close()

    def abort(self) -> None:
        """Drops the connection without waiting for its reader."""
        self.transport.abort()

    # --------------------------------------------------------------------------------------------------- requests come

    def data_received(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._offers_upgrade():
                    return  # CONNECT: it was answered, and what follows is not HTTP.
                data = self._head_without_offer() + data[upgrade.args[0] :]
                continue
            except httptools.HttpParserError:
                self._refuse("Invalid HTTP request received.")
            return

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._header_bytes = 0
        self._expects = False
        self._in_head = True
        if self._running is None:
            self.drop_s = self.loop.time() + HEAD_S_MAX

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + HEADER_BYTES_EACH
        if self._header_bytes > HEADER_BYTES_MAX:
            raise _TooManyHeaderBytes
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        parser = self.parser
        if parser.should_upgrade() and self._offers_upgrade():
            return
        self._in_head = False
        version = parser.get_http_version()
        path, raw_path, query = _split(self._url)
        transport = self.transport
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": None,
            "client": None,
            "scheme": "http",
            "method": parser.get_method().decode("ascii"),
            "root_path": "",
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self._headers,
        }
        keep_alive = version != "1.0" and parser.should_keep_alive() and not self._shutting_down
        cycle = scope[CYCLE] = HttpCycle(self, transport, scope, keep_alive=keep_alive, expects=self._expects)
        self._reading = cycle
        if self._running is None:
            self._start(cycle)
        else:
            self._waiting.append(cycle)
            if len(self._waiting) >= PIPELINED_MAX:
                self.pause_reading()

    def on_body(self, body: bytes) -> None:
        if self._reading is not None:
            self._reading.body_came(body)

    def on_message_complete(self) -> None:
        if self._reading is not None:
            self._reading.body_ended()
            self._reading = None

    def _start(self, cycle: HttpCycle) -> None:
        self._running = cycle
        self.drop_s = math.inf
        cycle.task = self.loop.create_task(cycle.run(self.app))
        self.state.tasks.add(cycle.task)

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > HEADER_BYTES_MAX:
            raise _TooManyHeaderBytes

    def _refuse(self, message: str) -> None:
        body = error_body(ApiError(400, message, code="invalid_http"))
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(_status_line(400) + head.encode() + body)
        self.close()

    def _offers_upgrade(self) -> bool:
        return bool(self.parser.should_upgrade()) and any(name == b"upgrade" for name, _ in self._headers)

    def _head_without_offer(self) -> bytes:
        """The head of the request just parsed, for a fresh parser, which takes the place of the old one."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self._url, self.parser.get_http_version().encode())]
        for name, value in self._headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(option for option in options if option.lower() not in _UPGRADE_HEADERS)
            if name not in _UPGRADE_HEADERS and (value or name != b"connection"):
                lines.append(name + b": " + value)
        self.parser = self._new_parser()
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # A request may come behind one that asked to close: its answer closes, and what came is thrown away (as in uvicorn).
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    # -------------------------------------------------------------------------------------------------- answers go out

    def answered(self, cycle: HttpCycle) -> None:
        """The last byte of an answer is with the transport."""
        self.state.total_requests += 1
        self._running = None
        if self.transport.is_closing():
            return
        if not cycle.keep_alive:
            self.close()
            return
        if self._waiting:
            self._start(self._waiting.popleft())
        else:
            self.drop_s = self.loop.time() + (HEAD_S_MAX if self._in_head else IDLE_S_MAX)
        self.resume_reading()


class HttpCycle:
    """One request and its answer: ASGI's two functions, and what they cannot say."""

    __slots__ = (
        "_begun",
        "_body_ended",
        "_body_given",
        "_chunked",
        "_complete",
        "_expects",
        "_head",
        "_news",
        "_parts",
        "_parts_bytes",
        "_protocol",
        "_scope",
        "_transport",
        "gone",
        "keep_alive",
        "on_gone",
        "on_writable",
        "task",
    )

    def __init__(
        self, protocol: HttpProtocol, transport: asyncio.Transport, scope: Message, *, keep_alive: bool, expects: bool
    ) -> None:
        self.keep_alive = keep_alive
        self.gone = False
        """The client has left before its answer was complete."""
        self.on_gone: Callable[[], None] | None = None
        """Called in the moment when the client leaves."""
        self.on_writable: Callable[[], None] | None = None
        """Called when :attr:`write_paused` ends."""
        self.task: asyncio.Task[None] | None = None
        self._protocol = protocol
        self._transport = transport
        self._scope = scope
        self._expects = expects
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._body_ended = False
        self._body_given = False
        self._news: asyncio.Future[None] | None = None
        self._head: tuple[int, Iterable[tuple[bytes, bytes]]] | None = None
        """Held back until the first bytes of the body, so that both are one write."""
        self._begun = False
        self._complete = False
        self._chunked = False

    # ----------------------------------------------------------------------------------------- beside ASGI, for the app

    def body_now(self) -> bytes | None:
        """The whole body, if it is here already."""
        if not self._body_ended or self.gone:
            return None
        self._body_given = True
        return self._take()

    @property
    def write_paused(self) -> bool:
        """Whether the client leaves too much unread: who calls :meth:`write` waits then, as :meth:`send` does."""
        return self._protocol.write_paused

    def drop_in(self, seconds: float) -> None:
        """Drops the connection if this answer is not out after ``seconds`` (looked at once a second)."""
        if not self._complete:
            self._protocol.drop_s = self._protocol.loop.time() + seconds

    # ------------------------------------------------------------------------------------------- ASGI, for the app

    async def run(self, app: App) -> None:
        """The task of the request."""
        try:
            await app(self._scope, self.receive, self.send)
        except Exception as error:
            log.error("a request ended by an exception", error=place_of(error))
        finally:
            if self.task is not None:
                self._protocol.state.tasks.discard(self.task)
            if not self._complete and not self.gone:
                self._give_up()
            # What holds each other would wait for the garbage collector, and make it run more often.
            self.task = None
            self._scope.pop(CYCLE, None)

    async def receive(self) -> Message:
        """A part of the body, or the news that the client has left or has its whole answer."""
        if self._expects and not self.gone:
            self._expects = False
            if not self._begun:
                self._transport.write(_CONTINUE)
        while not (self.gone or self._complete):
            if self._parts or (self._body_ended and not self._body_given):
                self._body_given = self._body_ended
                return {"type": "http.request", "body": self._take(), "more_body": not self._body_ended}
            self._protocol.resume_reading()
            self._news = self._protocol.loop.create_future()
            await self._news
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """The head of the answer or a part of its body; waits while the client leaves too much unread."""
        if self.gone:
            return
        if message["type"] == "http.response.start":
            self._head = (message["status"], message.get("headers", ()))
            return
        if self._protocol.write_paused:
            await self._protocol.drain()
        self.write(message.get("body", b""), more=message.get("more_body", False))

    def write(self, body: bytes, *, more: bool) -> None:
        """The next part of the body, after the head where that is still to be written."""
        if self._complete or self.gone:
            return
        head = b""
        if not self._begun:
            head = self._head_bytes()
        if self._scope["method"] == "HEAD":
            data = head
        elif self._chunked:
            last = b"" if more else b"0\r\n\r\n"
            data = b"%b%x\r\n%b\r\n%b" % (head, len(body), body, last) if body else head + last
        else:
            data = head + body if head else body
        if data:
            self._transport.write(data)
        if not more:
            self._complete = True
            self._wake()
            self._protocol.answered(self)

    def _head_bytes(self) -> bytes:
        if self._head is None:
            raise RuntimeError("the body of an answer before its head")
        status, headers = self._head
        sized = False
        lines = [_status_line(status), self._protocol.state.default_head]
        given = []
        for name, value in headers:
            if name == b"content-length":
                sized = True
            elif name == b"connection" and value == b"close":
                self.keep_alive = False
                continue
            given.append(name + b": " + value)
        if _CONTROL.search(b"".join(given)):
            raise RuntimeError("a header with a control character")
        self._head = None
        self._begun = True
        self._expects = False
        lines.append(b"\r\n".join(given))
        if not sized and status not in (204, 304):
            if self._scope["http_version"] == "1.0":
                self.keep_alive = False
            else:
                self._chunked = True
                lines.append(b"\r\ntransfer-encoding: chunked")
        lines.append(b"\r\n\r\n" if self.keep_alive else b"\r\nconnection: close\r\n\r\n")
        return b"".join(lines)

    def _give_up(self) -> None:
        if self._begun:
            self._protocol.close()
            return
        body = error_body(ApiError(500, "The gateway failed on this request.", type="server_error", code="internal_error"))
        self._head = (500, [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())])
        self.keep_alive = False
        self.write(body, more=False)

    # ----------------------------------------------------------------------------------------------- from the protocol

    def body_came(self, body: bytes) -> None:
        """A part of the body; of one that is answered already it is thrown away."""
        if self._complete:
            return
        self._parts.append(body)
        self._parts_bytes += len(body)
        if self._parts_bytes > UNREAD_BODY_BYTES_MAX:
            self._protocol.pause_reading()
        self._wake()

    def body_ended(self) -> None:
        """Nothing of the body follows."""
        self._body_ended = True
        self._wake()

    def lost(self) -> None:
        """The connection is no more."""
        self.gone = True
        self._wake()
        if self.on_gone is not None:
            self.on_gone()

    def _take(self) -> bytes:
        parts = self._parts
        self._parts = []
        self._parts_bytes = 0
        self._protocol.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
