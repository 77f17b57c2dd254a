"""One request on a connection and its answer: ASGI's two functions, and what they cannot say."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from subjects.errors import ApiError, place_of

if TYPE_CHECKING:
    from broker.http.protocol import HttpProtocol

UNREAD_BODY_BYTES_MAX = 64 * 1024
"""A body waits with so much, and what one read brought, until somebody takes it."""
CYCLE = "carpool.cycle"
"""Key of the ASGI scope: the :class:`HttpCycle` of the request."""

Message = MutableMapping[str, Any]


class App(Protocol):
    """An ASGI application that says errors in its own API's shape."""

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]], /
    ) -> None:
        """One exchange."""
        ...

    def error_body(self, error: ApiError) -> bytes:
        """The body of an answer that HTTP itself gives, before the application or in its place."""
        ...


_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

log = structlog.get_logger(__name__)


def internal_error() -> ApiError:
    """The 500 for what nobody foresaw."""
    return ApiError(500, "The gateway failed on this request.", type="server_error", code="internal_error")


@functools.cache
def status_line(status: int) -> bytes:
    """The first line of an answer."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


@dataclass(eq=False, slots=True)
class HttpCycle:
    """One request and its answer: ASGI's two functions, and what they cannot say."""

    _protocol: HttpProtocol
    _transport: asyncio.Transport
    _scope: Message
    keep_alive: bool
    _expects: bool
    gone: bool = False
    """The client has left before its answer was complete."""
    on_gone: Callable[[], None] | None = None
    """Called in the moment when the client leaves."""
    on_writable: Callable[[], None] | None = None
    """Called when :attr:`write_paused` ends."""
    task: asyncio.Task[None] | None = None
    _parts: list[bytes] = field(default_factory=list)
    parts_bytes: int = 0
    """Of the body: what is here and not taken yet."""
    held_bytes: int = 0
    """Of the body: what the application has taken and still holds; it counts this itself."""
    _body_ended: bool = False
    _body_given: bool = False
    _news: asyncio.Future[None] | None = None
    _head: tuple[int, Iterable[tuple[bytes, bytes]]] | None = None
    """Held back until the first bytes of the body, so that both are one write."""
    begun: bool = False
    """Whether something of the answer is written."""
    _complete: bool = False
    _chunked: bool = False

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
            if not self.begun:
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
        if not self.begun:
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
            if self._parts:
                self._parts.clear()
                self.parts_bytes = 0
            self._wake()
            self._protocol.answered(self)

    def _head_bytes(self) -> bytes:
        if self._head is None:
            raise RuntimeError("the body of an answer before its head")
        status, headers = self._head
        sized = False
        lines = [status_line(status), self._protocol.state.default_head]
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
        self.begun = True
        self._expects = False
        if given:
            lines.append(b"\r\n".join(given) + b"\r\n")
        if not sized and status not in (204, 304):
            if self._scope["http_version"] == "1.0":
                self.keep_alive = False
            else:
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        return b"".join(lines)

    def _give_up(self) -> None:
        if self.begun:
            self._protocol.close()
            return
        body = self._protocol.app.error_body(internal_error())
        self._head = (500, [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())])
        self.keep_alive = False
        self.write(body, more=False)

    # ----------------------------------------------------------------------------------------------- from the protocol

    def body_came(self, body: bytes) -> None:
        """A part of the body; of one that is answered already it is thrown away."""
        if self._complete:
            return
        self._parts.append(body)
        self.parts_bytes += len(body)
        if self.parts_bytes > UNREAD_BODY_BYTES_MAX:
            self._protocol.pause_reading()
        self._wake()

    def body_ended(self) -> None:
        """Nothing of the body follows."""
        self._body_ended = True
        self._wake()

    def forget(self) -> None:
        """It is not to be run: what holds each other lets go."""
        self._scope.pop(CYCLE, None)

    def lost(self) -> None:
        """The connection is no more."""
        self.gone = True
        self._wake()
        if self.on_gone is not None:
            self.on_gone()

    def _take(self) -> bytes:
        parts = self._parts
        self._parts = []
        self.parts_bytes = 0
        self._protocol.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
