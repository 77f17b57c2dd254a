"""The HTTP server: uvicorn on a socket that we bound, without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Generator

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from broker.http_app import ABORT, HttpApp
from broker.openai_answers import error_body
from subjects.errors import ApiError, ConfigError

BACKLOG_CONNECTIONS = 2048
CLOSE_S_MAX = 5
HEADER_BYTES_MAX = 64 * 1024
HEADER_BYTES_EACH = 32
"""Counted for each header beside its text: a flood of empty ones takes memory too."""
HEAD_S_MAX = 30.0
"""A connection on which nobody has asked anything, or whose headers trickle in, is dropped after this time (PAINS O7)."""
_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")


class _TooManyHeaderBytes(Exception):
    """Raised inside the parser, which turns it into its own error."""


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds on headers, OpenAI's error shape, and a way to drop a client that does not read.

    An offer to change to another protocol is passed over, as HTTP allows. httptools takes what follows such a request for
    that other protocol, its body too, so the request is parsed again without the offer. Java's own client makes it to all.
    """

    _header_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await_head_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while True:
            self._unset_keepalive_if_required()
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._offers_upgrade():
                    return  # CONNECT: it was answered, and what follows is not HTTP.
                data = self._head_without_offer() + data[upgrade.args[0] :]
                continue
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
            return

    def on_headers_complete(self) -> None:
        self._await_head_no_more()
        if not self._offers_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._offers_upgrade():
            super().on_message_complete()

    def _offers_upgrade(self) -> bool:
        return bool(self.parser.should_upgrade()) and any(name == b"upgrade" for name, _ in self.headers)

    def _head_without_offer(self) -> bytes:
        """The head of the request just parsed, for a fresh parser, which takes the place of the old one."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(option for option in options if option.lower() not in _UPGRADE_HEADERS)
            if name not in _UPGRADE_HEADERS and (value or name != b"connection"):
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _await_head(self) -> None:
        self._await_head_no_more()
        self._head_timer = self.loop.call_later(HEAD_S_MAX, self._head_is_late)

    def _head_is_late(self) -> None:
        if self.cycle and not self.cycle.response_complete:
            self._await_head()  # The rest may wait behind the answer that is under way.
        else:
            self._abort()

    def _await_head_no_more(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._await_head()
        self._header_bytes = 0
        self.scope[ABORT] = self._abort  # type: ignore[literal-required] # a key of our own

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + HEADER_BYTES_EACH)
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        body = error_body(ApiError(400, msg, code="invalid_http"))
        head = (
            f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
        )
        self.transport.write(head.encode() + b"\r\n\r\n" + body)
        self.transport.close()

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > HEADER_BYTES_MAX:
            raise _TooManyHeaderBytes

    def _abort(self) -> None:
        self.transport.abort()


class _Server(uvicorn.Server):
    """Signals belong to the process's main function, not to its HTTP server."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class HttpServer:
    """Serves one :class:`broker.http_app.HttpApp`."""

    def __init__(self, app: HttpApp, *, host: str, port: int) -> None:
        self._socket = _bind(host, port)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG_CONNECTIONS,
            timeout_graceful_shutdown=CLOSE_S_MAX,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Base URL, without ``/v1``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def busy(self) -> int:
        """Exchanges that are under way."""
        return len(self._server.server_state.tasks)

    async def start(self) -> None:
        """Returns when connections are accepted."""
        self._task = asyncio.get_running_loop().create_task(self._server.serve([self._socket]))
        await self._server.listening.wait()

    async def stop(self) -> None:
        """Closes idle connections at once and the others when their answer is out, within ``CLOSE_S_MAX``."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, _, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError:
        raise ConfigError(f"--host {host}: is no address of this machine") from None
    # asyncio does not see that a socket without a named protocol is TCP, and leaves the 40 ms of Nagle's algorithm on.
    listener = socket.socket(family, socket.SOCK_STREAM, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--port {port}: cannot listen on {host}:{port} ({error.strerror}); take another one, or 0"
        ) from None
    listener.setblocking(False)
    return listener
