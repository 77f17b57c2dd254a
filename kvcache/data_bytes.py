"""Moves bytes of the data path: small messages on the event loop, bodies in threads, from and into pages of the arena."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from kvcache.host_tier import HostBlock, checksums_of, decoded
from kvcache.node_messages import (
    LENGTHS_BYTES,
    Block,
    Blocks,
    ToTarget,
    checksums,
    lengths,
    read_head,
)
from subjects.errors import DecodeError

SILENCE_S_MAX: Final = 2.0
"""A side that moves no byte for that long is given up."""
BUFFERS_MAX: Final = 512
"""Of one system call."""
_TIMEVAL = struct.Struct("@ll")


async def read_message(sock: socket.socket, kind: Any) -> Any:
    """A message without a body."""
    start = await _read(sock, LENGTHS_BYTES)
    head_bytes, body_bytes = lengths(start)
    if body_bytes:
        raise DecodeError("a body where none belongs")
    return read_head(bytes(await _read(sock, head_bytes)), kind)


async def _read(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    loop = asyncio.get_running_loop()
    while len(view):
        count = await loop.sock_recv_into(sock, view)
        if not count:
            raise EOFError("the other side closed")
        view = view[count:]
    return data


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


def send_all(sock: socket.socket, buffers: Sequence[memoryview]) -> None:
    """In a thread. Raises OSError (BlockingIOError) when nothing is taken for ``SILENCE_S_MAX``."""
    with _blocking(sock):
        waiting = [view for view in buffers if len(view)]
        at = 0
        while at < len(waiting):
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


def receive_blocks(
    sock: socket.socket, batch: Sequence[int], room: Sequence[HostBlock], end_s: float
) -> tuple[list[bytes], int]:
    """In a thread: the answer to one ``Fetch`` into ``room``; the checksums of the leading blocks that are right, and bytes.

    Raises:
        OSError, EOFError, TimeoutError: the source is gone or too slow.
        DecodeError: it said something else than was asked.
    """
    with _blocking(sock):
        start = bytearray(LENGTHS_BYTES)
        _receive_all(sock, [memoryview(start)], end_s)
        head_bytes, body_bytes = lengths(start)
        head = bytearray(head_bytes)
        _receive_all(sock, [memoryview(head)], end_s)
        blocks = _fitting(read_head(bytes(head), ToTarget), batch, room, body_bytes)
        sums: list[bytes] = []
        right = True
        for told, block in zip(blocks, room, strict=False):
            # Block by block: a checksum costs a third while the bytes are in the cache.
            if told.codec == "none":
                _receive_all(sock, block.views, end_s)
                found = checksums_of(block)
                right = right and found == told.checksums
            else:
                payload = memoryview(mmap.mmap(-1, told.size))
                _receive_all(sock, [payload], end_s)
                right = right and checksums(payload) == told.checksums and decoded(block, payload, told.codec)
                found = checksums_of(block)
            if right:
                sums.append(found)
        return sums, body_bytes


def _fitting(message: object, batch: Sequence[int], room: Sequence[HostBlock], body_bytes: int) -> tuple[Block, ...]:
    if not isinstance(message, Blocks):
        raise DecodeError("the source said something else")
    blocks = message.blocks
    if [block.place for block in blocks] != list(batch[: len(blocks)]) or body_bytes != sum(block.size for block in blocks):
        raise DecodeError("other blocks than were asked for")
    for told, block in zip(blocks, room, strict=False):
        size_max = block.size
        if told.codec != "none":
            from kvcache import codecs  # with numpy: only for those who need it

            if told.codec not in codecs.CODECS:
                raise DecodeError("an unknown codec")
            size_max = codecs.payload_bytes_max(block.identity.signature, told.codec)
        if told.size > size_max or not told.size or (told.codec == "none" and told.size != block.size):
            raise DecodeError("a block of another size than its signature says")
    return blocks
