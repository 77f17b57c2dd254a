"""The local protocol between an agent and each of its replica processes.

One AF_UNIX stream socketpair per replica carries length-prefixed MessagePack: four bytes, big-endian, then one tagged
struct. The agent holds one end, the replica the other; nobody else may keep a copy, because the end of the stream is the
lifeline: whoever sees it knows that the other side is dead. A replica then leaves at once (:func:`exit_with_agent`), so
that ``kill -9`` of an agent leaves no orphan.

The order at a replica's start: an exec'd replica first gets ``Start``; a forked one already has its spec. The replica then
reports ``Progress`` (``LOADING``, then ``WARMING`` before it probes the engine) and one ``Ready`` or ``Failed``. ``Load``
follows on change and at least every second. Each ``Ping`` is answered by a ``Pong`` from the event loop that serves
requests. ``Drain`` is answered by ``Drained`` within its bound. After ``Stop`` the process exits with code 0.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
import threading
from typing import Any, Generic, TypeVar

from subjects.codec import decode, encode
from subjects.errors import DecodeError
from workers.control_messages import Start, ToAgent, ToReplica
from workers.spec import ReplicaSpec

FRAME_BYTES_MAX = 1024 * 1024
"""A model record with its options is far below this; more means that the other side is broken."""
UNSENT_BYTES_MAX = 1024 * 1024
"""What may wait for a side that does not read; a side that far behind is treated as dead."""
EXIT_AGENT_GONE = 70
"""Exit code of a replica whose agent died."""

_LENGTH = struct.Struct(">I")

T = TypeVar("T")


def control_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a new control connection: the agent's, the replica's. Neither is inherited over an exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def frame(message: ToReplica | ToAgent) -> bytes:
    """A message as it goes over the socket.

    Raises:
        ValueError: it is over ``FRAME_BYTES_MAX``.
    """
    payload = encode(message)
    if len(payload) > FRAME_BYTES_MAX:
        raise ValueError(f"control message of {len(payload)} bytes is over the limit of {FRAME_BYTES_MAX} bytes")
    return _LENGTH.pack(len(payload)) + payload


class ControlStream(Generic[T]):
    """One end of a control connection on an event loop; ``T`` is what this end receives.

    Open it with :func:`agent_stream` or :func:`replica_stream`.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receives: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._receives = receives

    def send(self, message: ToReplica | ToAgent) -> bool:
        """Sends without waiting. False when the other side is gone or too far behind to be alive; nothing was sent then."""
        if self._writer.is_closing() or self._writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            return False
        self._writer.write(frame(message))
        return True

    async def receive(self) -> T | None:
        """The next message, or None when the other side is gone.

        Raises:
            DecodeError: the bytes are no message; the connection is of no use after this.
        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > FRAME_BYTES_MAX:
                raise DecodeError(f"control frame of {length} bytes is over the limit of {FRAME_BYTES_MAX} bytes")
            payload = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        message: T = decode(payload, self._receives)
        return message

    async def close(self) -> None:
        """Sends what is buffered if the other side reads it within a second, and closes; calling again does nothing."""
        if not self._writer.is_closing():
            self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), timeout=1.0)
        except (TimeoutError, OSError):
            self._writer.transport.abort()


async def agent_stream(sock: socket.socket) -> ControlStream[ToAgent]:
    """The agent's end; the stream owns ``sock`` from here on."""
    return ControlStream(*await _open(sock), ToAgent)


async def replica_stream(sock: socket.socket) -> ControlStream[ToReplica]:
    """The replica's end; the stream owns ``sock`` from here on."""
    return ControlStream(*await _open(sock), ToReplica)


async def _open(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock.setblocking(False)
    return await asyncio.open_unix_connection(sock=sock)


def read_start(sock: socket.socket, *, timeout_s: float) -> ReplicaSpec:
    """Reads ``Start`` from the blocking socket of an exec'd replica, before it has an event loop.

    Raises:
        DecodeError: something else came first.
        EOFError: the agent is gone.
        TimeoutError: nothing came within ``timeout_s``.
    """
    sock.settimeout(timeout_s)
    (length,) = _LENGTH.unpack(_read_exactly(sock, _LENGTH.size))
    if length > FRAME_BYTES_MAX:
        raise DecodeError(f"control frame of {length} bytes is over the limit of {FRAME_BYTES_MAX} bytes")
    return decode(_read_exactly(sock, length), Start).spec


def _read_exactly(sock: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(count - len(parts))
        if not part:
            raise EOFError("the agent closed the control socket")
        parts += part
    return bytes(parts)


def exit_with_agent(sock: socket.socket) -> None:
    """Makes this replica process exit at once with ``EXIT_AGENT_GONE`` when the agent's end closes.

    A thread waits for the hang-up only, so it takes no bytes from the event loop that reads the same socket, and it works
    while that loop is busy or stuck. Call it once, after any fork, before the engine starts. The process that keeps
    ``sock`` must be the only one that has this end.
    """
    watched = os.dup(sock.fileno())
    threading.Thread(target=_wait_for_hang_up, args=(watched,), name="agent-lifeline", daemon=True).start()


def _wait_for_hang_up(watched: int) -> None:
    poller = select.poll()
    poller.register(watched, select.POLLRDHUP)
    while True:
        if any(flags & (select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, flags in poller.poll()):
            os._exit(EXIT_AGENT_GONE)
