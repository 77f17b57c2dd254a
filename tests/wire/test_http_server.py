"""Taking connections: many in one turn of the loop, and later when there are no file descriptors."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import uvloop

from broker.http import server as http_server
from broker.http.protocol import HttpProtocol
from broker.http.server import Accepter
from tests.waiting import until

CLIENTS = 48
TURNS = 6


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A socket with connections that nobody has accepted yet."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=CLIENTS))
        for _ in range(CLIENTS):
            stack.enter_context(socket.create_connection(server.getsockname()))
        yield server


class Counted(asyncio.Protocol):
    """Is counted, and ends its connection."""

    def __init__(self, made: list[Counted]) -> None:
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Here it is."""
        self._made.append(self)
        transport.close()


def new_connection(made: list[Counted]) -> HttpProtocol:
    """What the server makes for each connection."""
    return Counted(made)  # type: ignore[return-value] # of a protocol only its base is used here


def test_a_crowd_is_accepted_at_once(listening: socket.socket) -> None:
    """uvloop's own servers take one connection per turn, so that in a busy gateway the last of a crowd wait for seconds."""
    made: list[Counted] = []

    async def turns() -> int:
        accepter = Accepter(asyncio.get_running_loop(), listening, lambda: new_connection(made))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        accepter.close()
        await accepter.wait_closed()
        return len(made)

    assert uvloop.run(turns()) == CLIENTS


async def test_who_leaves_a_port_takes_along_who_had_connected(listening: socket.socket) -> None:
    """Nobody's connection breaks, and the next one is another process's business."""
    made: list[Counted] = []
    address = listening.getsockname()
    accepter = Accepter(asyncio.get_running_loop(), listening, lambda: new_connection(made))
    accepter.leave()
    accepter.leave()
    accepter.close()
    await until(lambda: len(made) == CLIENTS)
    await accepter.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)


async def test_it_goes_on_after_file_descriptors_ran_out(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not ask again and again meanwhile, and the backlog keeps who came."""
    monkeypatch.setattr(http_server, "ACCEPT_PAUSE_S", 0.05)
    asked = 0

    class Poor(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    made: list[Counted] = []
    with Poor(fileno=listening.detach()) as poor:
        accepter = Accepter(asyncio.get_running_loop(), poor, lambda: new_connection(made))
        await asyncio.sleep(0.01)
        assert (asked, made) == (1, [])
        await asyncio.sleep(0.2)
        accepter.close()
        await accepter.wait_closed()
    assert len(made) == CLIENTS
