"""The HTTP server: uvicorn on a socket that we bound, without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Generator

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


class _TooManyHeaderBytes(Exception):
    """Raised inside the parser, which turns it into its own error."""


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol with a bound on headers, OpenAI's error shape, and a way to drop a client that does not read."""

    _header_bytes = 0

    def on_message_begin(self) -> None:
        super().on_message_begin()
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
