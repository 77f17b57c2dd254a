"""One HTTP connection: httptools' parser on one side, the ASGI application on the other.

It stands in uvicorn in the place of its ``HttpToolsProtocol``, which makes a task, an event and up to three timers for each
request beside ours, and tells of a client that left only to a task that waits for it. Here are bounds on headers, OpenAI's
error shape, and one time per connection at which it is dropped; the server looks at those times once a second.

=====================  ============================================================================================
held for a connection  at most
=====================  ============================================================================================
requests               one that is answered, and ``PIPELINED_MAX`` more, or what one read (up to 256 KiB) brought behind
                       them, but never over ``WAITING_MAX``: with the answer to the last of those the connection ends
headers                ``HEADER_BYTES_MAX`` of each request
body not taken yet     ``UNREAD_BODY_BYTES_MAX`` of each request, and what one read brought
answer not sent yet    ``UNSENT_BYTES_MAX`` and one piece of it; then :meth:`HttpCycle.send` waits, a stream's output gathers
                       in :mod:`broker.gateway.exchange`, and the answer is given up at ``BUFFERED_BYTES_MAX`` there
answer in the kernel   twice ``SEND_BUFFER_BYTES`` (Linux doubles it for its own needs)
=====================  ============================================================================================

Nor for ever: a connection on which nothing is asked is dropped, and one whose client takes nothing of what waits for it
within ``UNREAD_S_MAX``. Slow readers keep theirs as long as they read on.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections import deque
from typing import Any, cast
from urllib.parse import unquote

import httptools
import uvicorn
from uvicorn.server import ServerState as UvicornState

from broker.http.cycle import CYCLE, UNREAD_BODY_BYTES_MAX, App, HttpCycle, status_line
from subjects.errors import ApiError

HEADER_BYTES_MAX = 64 * 1024
HEADER_BYTES_EACH = 32
"""Counted for each header beside its text: a flood of empty ones takes memory too."""
HEAD_S_MAX = 30.0
"""A connection on which nobody has asked anything, or whose headers trickle in, is dropped after this time (PAINS O7)."""
IDLE_S_MAX = 75.0
"""A connection is kept so long for a next request: longer than clients and balancers keep theirs, which are often at 60 s.
Whoever closes first must be the one that sends, or a request meets a connection that is just being closed."""
UNREAD_S_MAX = 30.0
"""A client that takes nothing of what waits for it within this time is dropped; looked at from one such time to the next.
The kernel takes more in steps of a third of its buffer: who reads slower than some 6 KB/s may seem to read nothing."""
PIPELINED_MAX = 4
"""So many requests wait on a connection; then it is not read until one less does."""
WAITING_MAX = 32
"""What one read brings may be more requests than that: with so many waiting the next ones are not taken."""
UNSENT_BYTES_MAX = 64 * 1024
SEND_BUFFER_BYTES = 256 * 1024
"""Of the kernel, per connection. Its own choice grows to 4 MiB, for each client that reads nothing."""
_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")


class ServerState(UvicornState):
    """What the connections of a server share."""

    default_head = b""
    """Header lines of every answer: the date."""

    def look(self, now_s: float) -> None:
        """Once a second: sees to the connections whose time is over, and takes over the date that uvicorn has renewed."""
        self.default_head = b"".join([name + b": " + value + b"\r\n" for name, value in self.default_headers])
        connections: set[HttpProtocol] = self.connections  # type: ignore[assignment] # uvicorn names its own protocols only
        for connection in [one for one in connections if one.drop_s <= now_s]:
            connection.overdue(now_s)


class _TooMuch(Exception):
    """Of headers or requests. Raised inside the parser, which turns it into its own error."""


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
        """In the loop's time: when this connection is dropped, if its client does nothing."""
        self._unsent_bytes = 0
        """What the transport held when we looked last; 0 where there is nothing to compare with."""
        self._writable: asyncio.Future[None] | None = None
        self._read_paused = False
        self._shutting_down = False
        self._deaf = False
        """What comes is thrown away: the connection ends with the answers to what came before."""
        self._refusal = b""
        """To be said behind those answers."""
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
        while self._waiting:
            self._waiting.pop().forget()
        self._running = self._reading = None
        self.resume_writing()
        self.parser = None  # type: ignore[assignment] # it holds our methods, and we hold it
        if running is not None:
            running.lost()

    def eof_received(self) -> None:
        """The client has closed its side: for HTTP clients that is to leave, and the transport closes."""

    def pause_writing(self) -> None:
        self.write_paused = True
        self._await_reader()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._unsent_bytes = 0
        if self._running is not None:
            self.drop_s = math.inf
        elif not self.transport.is_closing():
            self._await_request(self.loop.time())
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
        if (
            self._read_paused
            and len(self._waiting) < PIPELINED_MAX
            and (self._reading is None or self._reading.parts_bytes <= UNREAD_BODY_BYTES_MAX)
            and not self.transport.is_closing()
        ):
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
        """Closes when all is written, or drops what the client does not read."""
        self._await_reader()
        self.transport.close()

    def overdue(self, now_s: float) -> None:
        """``drop_s`` is over: drops the connection, unless its client has read something meanwhile."""
        unsent_bytes = self.transport.get_write_buffer_size()
        if not unsent_bytes and self._unsent_bytes and not self.transport.is_closing():
            self._unsent_bytes = 0  # All is read by now, and it may ask again.
            self._await_request(now_s)
        elif unsent_bytes and (unsent_bytes < self._unsent_bytes or not self._unsent_bytes):
            self._unsent_bytes = unsent_bytes
            self.drop_s = now_s + UNREAD_S_MAX
        else:
            self.transport.abort()

    def _await_reader(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self.drop_s = self.loop.time() + UNREAD_S_MAX

    def _await_request(self, now_s: float) -> None:
        self.drop_s = now_s + (HEAD_S_MAX if self._in_head else IDLE_S_MAX)

    # --------------------------------------------------------------------------------------------------- requests come

    def data_received(self, data: bytes) -> None:
        while not self._deaf:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._offers_upgrade():
                    return  # CONNECT: it was answered, and what follows is not HTTP.
                data = self._head_without_offer() + data[upgrade.args[0] :]
                continue
            except httptools.HttpParserError:
                if not self._deaf:
                    self._refuse("Invalid HTTP request received.")
            return

    def on_message_begin(self) -> None:
        if len(self._waiting) >= WAITING_MAX:
            self._waiting[-1].keep_alive = False
            self._deaf = True
            raise _TooMuch
        self._url = b""
        self._headers = []
        self._header_bytes = 0
        self._expects = False
        self._in_head = True
        if self._running is None and not self.write_paused:
            self.drop_s = self.loop.time() + HEAD_S_MAX

    def on_url(self, url: bytes) -> None:
        self._header_bytes += len(url)
        if self._header_bytes > HEADER_BYTES_MAX:
            raise _TooMuch
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + HEADER_BYTES_EACH
        if self._header_bytes > HEADER_BYTES_MAX:
            raise _TooMuch
        if not self._in_head:
            return  # A trailer: it would stand among the headers, where a proxy may have set or struck out the same name.
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
        cycle = scope[CYCLE] = HttpCycle(self, transport, scope, keep_alive, self._expects)
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
        if not self.write_paused:
            self.drop_s = math.inf
            self._unsent_bytes = 0
        cycle.task = self.loop.create_task(cycle.run(self.app))
        self.state.tasks.add(cycle.task)

    def _refuse(self, message: str) -> None:
        """What comes is no HTTP: said behind the answers to what came before it."""
        self._deaf = True
        body = self.app.error_body(ApiError(400, message, code="invalid_http"))
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self._refusal = status_line(400) + head.encode() + body
        broken, self._reading = self._reading, None
        if self._running is None:
            self._end()
        elif broken is self._running:
            self._running = None
            if broken.begun:
                self._refusal = b""
            broken.lost()
            self._end()
        elif broken is not None:
            self._waiting.pop().forget()

    def _end(self) -> None:
        if self._refusal:
            self.transport.write(self._refusal)
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
        elif self._refusal:
            self._end()
        elif not self.write_paused:
            self._await_request(self.loop.time())
        self.resume_reading()
