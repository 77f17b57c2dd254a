"""Moves bytes of the data path: small messages on the event loop, bodies in threads, from and into pages of the arena."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final

from kvcache.core.identity import PAGE_BYTES
from kvcache.node.host_tier import HostBlock, checksums_of, decoded
from kvcache.wire import messages as w
from subjects.errors import DecodeError

ACCEPT_PAUSE_S: Final = 0.05
SILENCE_S_MAX: Final = 2.0
"""A side that moves no byte for that long is given up."""
SOCKET_BUFFER_BYTES: Final = 4 << 20
"""Of both sides: on one host they take turns on the cores, and each turn should move megabytes."""
SUMMED_BYTES: Final = 4 * PAGE_BYTES
"""Received and summed at a time."""
BUFFERS_MAX: Final = 512
"""Of one system call."""
_TIMEVAL = struct.Struct("@ll")


def prepare_socket(sock: socket.socket) -> None:
    """Before it connects, or the socket that listens."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)


async def accepted(listening: socket.socket) -> AsyncIterator[socket.socket]:
    """Connections as they come, for the event loop."""
    while True:
        try:
            sock, _ = await asyncio.get_running_loop().sock_accept(listening)
        except OSError:  # out of descriptors, or the peer was gone at once
            await asyncio.sleep(ACCEPT_PAUSE_S)
            continue
        sock.setblocking(False)
        yield sock


async def read_message(sock: socket.socket, kind: Any) -> Any:
    """A message without a body."""
    start = await read_bytes(sock, w.LENGTHS_BYTES)
    head_bytes, body_bytes = w.lengths(start)
    if body_bytes:
        raise DecodeError("a body where none belongs")
    return w.read_head(bytes(await read_bytes(sock, head_bytes)), kind)


async def read_bytes(sock: socket.socket, size: int) -> bytearray:
    """So many bytes.

    Raises:
        EOFError: the other side closed before.
    """
    data = bytearray(size)
    await receive_into(sock, memoryview(data))
    return data


async def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fills ``view``.

    Raises:
        EOFError: the other side closed before.
    """
    receive = asyncio.get_running_loop().sock_recv_into
    while len(view):
        count = await receive(sock, view)
        if not count:
            raise EOFError("the other side closed")
        view = view[count:]


async def in_thread(threads: ThreadPoolExecutor, sock: socket.socket, call: Any, *arguments: Any) -> Any:
    """Runs a call that moves bytes of ``sock``. Who is cancelled shuts the socket and waits for the thread: it has pages in
    its hands that must not be given to others meanwhile."""
    work = asyncio.get_running_loop().run_in_executor(threads, call, *arguments)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()
        raise


def parts_of(buffers: Sequence[memoryview], step_bytes: int) -> list[list[memoryview]]:
    """The same bytes in parts of about ``step_bytes``."""
    parts: list[list[memoryview]] = [[]]
    room = step_bytes
    for buffer in buffers:
        view = buffer
        while len(view):
            if room <= 0:
                parts.append([])
                room = step_bytes
            parts[-1].append(view[:room])
            taken = min(room, len(view))
            view = view[taken:]
            room -= taken
    return parts


def send_all(sock: socket.socket, buffers: Sequence[memoryview], end_s: float) -> None:
    """In a thread. Raises OSError when nothing is taken for ``SILENCE_S_MAX``, TimeoutError at ``end_s``."""
    with _blocking(sock):
        waiting = [view for view in buffers if len(view)]
        at = 0
        while at < len(waiting):
            if time.monotonic() > end_s:
                raise TimeoutError("too slow")
            count = sock.sendmsg(waiting[at : at + BUFFERS_MAX])
            at = _skip(waiting, at, count)


def _receive_all(sock: socket.socket, buffers: Sequence[memoryview], end_s: float) -> None:
    """In a thread, with the socket blocking. Raises OSError, EOFError, TimeoutError."""
    waiting = [view for view in buffers if len(view)]
    at = 0
    while at < len(waiting):
        left_s = end_s - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError("deadline")
        if left_s < SILENCE_S_MAX:
            _set_silence(sock, left_s)
        # The kernel waits for all of it: one call for megabytes. What comes before the silence is answered as part.
        count = sock.recvmsg_into(waiting[at : at + BUFFERS_MAX], 0, socket.MSG_WAITALL)[0]
        if not count:
            raise EOFError("the source closed the connection")
        at = _skip(waiting, at, count)


@contextlib.contextmanager
def _blocking(sock: socket.socket) -> Iterator[None]:
    """The kernel itself waits, at most ``SILENCE_S_MAX`` for a byte to move: no system call between for a poll."""
    sock.setblocking(True)
    _set_silence(sock, SILENCE_S_MAX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            sock.setblocking(False)


def _set_silence(sock: socket.socket, seconds: float) -> None:
    value = _TIMEVAL.pack(int(seconds), max(1000, int(seconds % 1 * 1e6)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _skip(waiting: list[memoryview], at: int, count: int) -> int:
    while count:
        view = waiting[at]
        if count < len(view):
            waiting[at] = view[count:]
            return at
        count -= len(view)
        at += 1
    return at


@dataclass(slots=True)
class Received:
    """The answer to one ``Fetch``: checksums of the leading blocks that are right, and why no more will come, if so."""

    sums: list[bytes] = field(default_factory=list)
    bytes: int = 0
    failure: str = ""


Job = tuple[Sequence[int], Sequence[HostBlock]]
"""Places that were asked for, and where their blocks go."""


def receive_jobs(
    sock: socket.socket, jobs: SimpleQueue[Job | None], end_s: float, arrived: Callable[[Received], None]
) -> None:
    """In a thread: the answers to all ``Fetch``, one after the other, until ``None`` or the first failure.

    One thread for all of them: handing each to the event loop and back would leave the connection idle in between.
    """
    with _blocking(sock):
        while (job := jobs.get()) is not None:
            received = Received()
            try:
                _receive_blocks(sock, *job, end_s, received)
            except (OSError, EOFError, TimeoutError, DecodeError) as error:
                late = time.monotonic() >= end_s
                received.failure = "deadline" if late else f"{type(error).__name__}: {error}"
            arrived(received)
            if received.failure:
                return


def _receive_blocks(
    sock: socket.socket, batch: Sequence[int], room: Sequence[HostBlock], end_s: float, received: Received
) -> None:
    start = bytearray(w.LENGTHS_BYTES)
    _receive_all(sock, [memoryview(start)], end_s)
    head_bytes, body_bytes = w.lengths(start)
    head = bytearray(head_bytes)
    _receive_all(sock, [memoryview(head)], end_s)
    blocks = _fitting(w.read_head(bytes(head), w.ToTarget), batch, room, body_bytes)
    right = True
    for told, block in zip(blocks, room, strict=False):
        if told.codec == "none":
            found = b"".join([_receive_summed(sock, view, end_s) for view in block.views])
            right = right and found == told.checksums
        else:
            payload = memoryview(mmap.mmap(-1, told.size))
            _receive_all(sock, [payload], end_s)
            right = right and w.checksums(payload) == told.checksums and decoded(block, payload, told.codec)
            found = checksums_of(block)
        received.bytes += told.size
        if right:
            received.sums.append(found)


def _receive_summed(sock: socket.socket, view: memoryview, end_s: float) -> bytes:
    """Fills ``view``; the checksums of its pages, made while their bytes are in the cache: a third of the time."""
    sums: list[bytes] = []
    for at in range(0, len(view), SUMMED_BYTES):
        part = view[at : at + SUMMED_BYTES]
        _receive_all(sock, [part], end_s)
        sums.append(w.checksums(part))
    return b"".join(sums)


def _fitting(message: object, batch: Sequence[int], room: Sequence[HostBlock], body_bytes: int) -> tuple[w.Block, ...]:
    if not isinstance(message, w.Blocks):
        raise DecodeError("the source said something else")
    blocks = message.blocks
    if [block.place for block in blocks] != list(batch[: len(blocks)]) or body_bytes != sum(block.size for block in blocks):
        raise DecodeError("other blocks than were asked for")
    for told, block in zip(blocks, room, strict=False):
        size_max = block.size
        if told.codec != "none":
            from kvcache.codec import codecs  # with numpy: only for those who need it

            if told.codec not in codecs.CODECS:
                raise DecodeError("an unknown codec")
            size_max = codecs.payload_bytes_max(block.identity.signature, told.codec)
        if told.size > size_max or not told.size or (told.codec == "none" and told.size != block.size):
            raise DecodeError("a block of another size than its signature says")
    return blocks
