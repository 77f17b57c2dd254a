"""The HTTP server: uvicorn on a socket that we bound, without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Generator

import uvicorn

from broker.http_app import HttpApp
from broker.http_protocol import SEND_BUFFER_BYTES, HttpProtocol, ServerState
from subjects.errors import ConfigError

BACKLOG_CONNECTIONS = 2048
CLOSE_S_MAX = 5
_TICKS_PER_LOOK = 10
"""uvicorn's tick is 100 ms."""


class _Server(uvicorn.Server):
    """Signals belong to the process's main function, not to its HTTP server."""

    server_state: ServerState

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state = ServerState()
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def on_tick(self, counter: int) -> bool:
        over = await super().on_tick(counter)
        if counter % _TICKS_PER_LOOK == 0:
            self.server_state.look(asyncio.get_running_loop().time())
        return over

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
            http=HttpProtocol,
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
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # its connections inherit it
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--port {port}: cannot listen on {host}:{port} ({error.strerror}); take another one, or 0"
        ) from None
    listener.setblocking(False)
    return listener
