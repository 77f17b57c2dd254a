"""The HTTP server: uvicorn on a socket that we bound, without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator

import structlog
import uvicorn

from broker.http.cycle import App
from broker.http.listeners import base_url, bind
from broker.http.protocol import SEND_BUFFER_BYTES, HttpProtocol, ServerState
from subjects.tasks import Tasks

BACKLOG_CONNECTIONS = 2048
ACCEPTED_PER_TURN_MAX = 64
ACCEPT_PAUSE_S = 0.5
CLOSE_S_MAX = 5
log = structlog.get_logger(__name__)
_TICKS_PER_LOOK = 10
"""uvicorn's tick is 100 ms."""


class Accepter:
    """Accepts connections on a socket; in uvicorn it stands for an ``asyncio.Server``.

    libuv accepts one connection in each turn of the loop. A turn of a busy gateway takes milliseconds, and whoever connected
    as one of hundreds waited for seconds, with a connection that looked open from outside.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, listening: socket.socket, new_connection: Callable[[], HttpProtocol]
    ) -> None:
        self._loop = loop
        self._socket = listening
        self._new_connection = new_connection
        self._tasks = Tasks(lambda error: log.info("a connection was not taken", error=type(error).__name__))
        self._again: asyncio.TimerHandle | None = None
        self._closed = False
        listening.setblocking(False)
        listening.listen(BACKLOG_CONNECTIONS)
        loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Accepts no more; the socket is the caller's. Calling again does nothing."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket)
        if self._again is not None:
            self._again.cancel()

    def leave(self) -> None:
        """Takes whoever has connected already, and gives the port up: others that share it get all who come."""
        if not self._closed:
            self._accept()
            self.close()
            self._socket.close()

    async def wait_closed(self) -> None:
        """Connections are their protocols' business, which the server ends."""
        await self._tasks.end()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_PER_TURN_MAX):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file descriptor is left, or no memory: the backlog keeps them meanwhile
                log.warning("connections cannot be accepted", error=error.strerror)
                self._loop.remove_reader(self._socket)
                self._again = self._loop.call_later(ACCEPT_PAUSE_S, self._loop.add_reader, self._socket, self._accept)
                return
            connection.setblocking(False)
            self._tasks.spawn(self._connect(connection))

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._new_connection, connection)
        except BaseException:
            connection.close()
            raise


class _Server(uvicorn.Server):
    """Signals belong to the process's main function, not to its HTTP server."""

    server_state: ServerState

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.server_state = ServerState()
        self.listening = asyncio.Event()
        self.accepters: list[Accepter] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        loop = asyncio.get_running_loop()
        self.accepters = [Accepter(loop, one, self._new_connection) for one in sockets or ()]
        self.servers = list(self.accepters)  # type: ignore[arg-type] # see there
        self.listening.set()

    def _new_connection(self) -> HttpProtocol:
        return HttpProtocol(self.config, self.server_state, self.lifespan.state)

    async def on_tick(self, counter: int) -> bool:
        over = await super().on_tick(counter)
        if counter % _TICKS_PER_LOOK == 0:
            self.server_state.look(asyncio.get_running_loop().time())
        return over

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """Serves one application."""

    def __init__(self, app: App, *, host: str, port: int, shared_port: bool = False) -> None:
        """Takes the port, and raises what :func:`broker.http.listeners.bind` does."""
        self._socket = bind(host, port, shared=shared_port)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # its connections inherit it
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
        return base_url(self.host, self.port)

    @property
    def busy(self) -> int:
        """Exchanges that are under way."""
        return len(self._server.server_state.tasks)

    async def start(self) -> None:
        """Returns when connections are accepted."""
        self._task = asyncio.get_running_loop().create_task(self._server.serve([self._socket]))
        await self._server.listening.wait()

    def leave_port(self) -> None:
        """Takes no new connections from here on; those that are open go on."""
        for accepter in self._server.accepters:
            accepter.leave()

    async def stop(self) -> None:
        """Closes idle connections at once and the others when their answer is out, within ``CLOSE_S_MAX``."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
