"""How engines and agents reach the node of their host: blocks over a blocking socket, questions over an asyncio one.

Every call is bounded in seconds. A node that is away, frozen or broken is ``KvUnavailable`` at once until the next try to
connect, at least a second after the last; whoever gets that computes what it wanted to read, and forgets what it wanted to
write.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from kvcache.core.identity import PAGE_BYTES
from kvcache.errors import KvRefused, KvUnavailable
from kvcache.wire import messages as w
from subjects.errors import DecodeError
from subjects.ids import WorkerId

CALL_TIMEOUT_S = 1.0
"""Of a blocking call: the longest silence of the node. What it sends or takes may go on for longer."""
ATTACH_TIMEOUT_S = 1.0
"""Of an asyncio end, beside the bound of the question that it connects for."""
RECONNECT_S = 1.0
BYTES_PER_S_MIN = 200e6
"""A node that is slower than this is given up: reading from it would take longer than computing."""
ANSWER_GRACE_S = 0.05
"""On top of a deadline that the node knows."""
STATS_TIMEOUT_S = 2.0
SOCKET_BUFFER_BYTES = 1024 * 1024

_UCRED = struct.Struct("3i")
T = TypeVar("T")


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket, as the kernel knows it.

    Raises:
        OSError: the connection is gone.
    """
    _pid, uid, _gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


class KvClient:
    """Blocks to and from the node, for one thread; ``attach`` says whose, with the signature that sizes them."""

    def __init__(self, socket_path: str, attach: w.Attach, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        if attach.signature is None or not 0 < attach.signature.block_bytes <= w.BODY_BYTES_MAX:
            raise ValueError(f"blocks of 1 to {w.BODY_BYTES_MAX} bytes are carried")
        self._path = socket_path
        self._attach = attach
        self._block_bytes = attach.signature.block_bytes
        self._timeout_s = timeout_s
        self._sock: socket.socket | None = None
        self._retry_at_s = 0.0
        self._number = 0
        self.corrupt = 0
        """Rows that did not have their checksum."""

    @property
    def blocks_per_frame(self) -> int:
        """Blocks that go over the socket at once."""
        return min(w.BLOCKS_MAX, max(1, w.BODY_BYTES_MAX // self._block_bytes))

    def read(self, salt: bytes, hashes: Sequence[bytes], into: memoryview) -> int:
        """Reads the leading blocks that are there into consecutive rows of ``into``, verified and decoded; returns how many.

        Raises:
            ValueError: ``into`` is smaller than ``len(hashes)`` rows.
            KvUnavailable: the node broke off; the rows may hold anything.
        """
        rows = _bytes_of(into, len(hashes) * self._block_bytes)
        done = 0
        while done < len(hashes):
            some = hashes[done : done + self.blocks_per_frame]
            found = self._read_some(salt, some, rows[done * self._block_bytes :])
            done += found
            if found < len(some):
                break
        return done

    def write(
        self, salt: bytes, parent: bytes, hashes: Sequence[bytes], data: memoryview, use: w.KvUse, *, first: int = 0
    ) -> int:
        """Gives consecutive blocks of one chain to the node; returns how many leading ones it keeps.

        ``parent`` is the hash before ``hashes[0]``, empty at the start of a prompt; ``first`` is the place of
        ``hashes[0]`` in its prompt, which helps where the node does not hold the parent.

        Raises:
            ValueError: ``data`` is smaller than ``len(hashes)`` rows.
            KvUnavailable: the node broke off.
        """
        rows = _bytes_of(data, len(hashes) * self._block_bytes)
        done = 0
        while done < len(hashes):
            some = hashes[done : done + self.blocks_per_frame]
            size = len(some) * self._block_bytes
            message = w.Write(
                number=self._next(),
                salt=salt,
                parent=hashes[done - 1] if done else parent,
                hashes=w.joined(some),
                first=first + done if first or not parent else 0,
                use=use,
            )
            start = done * self._block_bytes
            kept = self._call(message, w.Kept, body=rows[start : start + size], size=size).blocks
            done += min(kept, len(some))
            if kept < len(some):
                break
        return done

    def used(self, salt: bytes, hashes: Sequence[bytes], use: w.KvUse) -> None:
        """Tells of an access to these blocks, wherever they were found.

        Raises:
            KvUnavailable
        """
        for start in range(0, len(hashes), w.BLOCKS_MAX):
            self._tell(w.Used(salt=salt, hashes=w.joined(hashes[start : start + w.BLOCKS_MAX]), use=use))

    def emptied(self) -> None:
        """Tells that the engine's own cache was reset.

        Raises:
            KvUnavailable
        """
        self._tell(w.Emptied())

    def close(self) -> None:
        """Closes the connection; a later call opens it again."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    # ---- one frame and its answer

    def _read_some(self, salt: bytes, hashes: Sequence[bytes], rows: memoryview) -> int:
        row_bytes = self._block_bytes
        found = self._call(
            w.Read(number=self._next(), salt=salt, hashes=w.joined(hashes)), w.Found, size=len(hashes) * row_bytes, into=rows
        )
        sums_bytes = -(-row_bytes // PAGE_BYTES) * w.CHECKSUM_BYTES
        for row in range(found.blocks):
            view = rows[row * row_bytes : (row + 1) * row_bytes]
            if w.checksums(view) != found.checksums[row * sums_bytes : (row + 1) * sums_bytes]:
                self.corrupt += 1
                self._tell(w.Corrupt(salt=salt, hash=hashes[row]))
                return row
        return found.blocks

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _tell(self, message: w.Used | w.Emptied | w.Corrupt) -> None:
        sock = self._connected()
        try:
            _send(sock, w.frame(message), time.monotonic() + self._timeout_s)
        except OSError as error:
            raise self._broken(error) from None

    def _call(
        self,
        message: w.Read | w.Write,
        kind: type[T],
        *,
        size: int,
        body: memoryview | None = None,
        into: memoryview | None = None,
    ) -> T:
        sock = self._connected()
        silence_s = self._timeout_s
        end_s = time.monotonic() + silence_s + size / BYTES_PER_S_MIN
        try:
            _send(sock, w.frame(message, len(body) if body is not None else 0), end_s)
            if body is not None:
                _send(sock, body, end_s, silence_s=silence_s)
            answer, body_bytes = _receive_head(sock, end_s)
            if isinstance(answer, w.Refused):
                raise DecodeError(f"the node refused: {answer.reason}")
            if not isinstance(answer, kind) or getattr(answer, "number", 0) != message.number:
                raise DecodeError("an answer to something else")
            wanted = answer.blocks * self._block_bytes if isinstance(answer, w.Found) else 0
            if body_bytes != wanted or wanted > size:
                raise DecodeError(f"{body_bytes} bytes came, {wanted} were announced")
            if into is not None and wanted:
                _receive(sock, into[:wanted], end_s, silence_s=silence_s)
            return cast("T", answer)
        except (OSError, EOFError, DecodeError) as error:
            raise self._broken(error) from None

    def _connected(self) -> socket.socket:
        if self._sock is not None:
            return self._sock
        now_s = time.monotonic()
        if now_s < self._retry_at_s:
            raise KvUnavailable("the KV node is away")
        self._retry_at_s = now_s + RECONNECT_S
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end_s = now_s + self._timeout_s
            sock.settimeout(self._timeout_s)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
            sock.connect(self._path)
            if peer_uid(sock) not in (os.getuid(), 0):
                raise ConnectionError("the socket belongs to somebody else")
            _send(sock, w.frame(self._attach), end_s)
            answer, _ = _receive_head(sock, end_s)
            if not isinstance(answer, w.Attached):
                raise DecodeError("the node did not accept this engine")
        except (OSError, EOFError, DecodeError) as error:
            sock.close()
            self._retry_at_s = time.monotonic() + RECONNECT_S
            raise KvUnavailable(f"the KV node is away: {error}") from None
        self._sock = sock
        return sock

    def _broken(self, error: Exception) -> KvUnavailable:
        self.close()
        self._retry_at_s = time.monotonic() + RECONNECT_S
        return KvUnavailable(f"the KV node broke off: {error}")


class KvNode:
    """Questions to the node, for one event loop. An agent gives only ``socket_path``; a replica says which model it has."""

    def __init__(self, socket_path: str, attach: w.Attach | None = None) -> None:
        self._path = socket_path
        self._attach = attach or w.Attach()
        self._retry_at_s = 0.0
        self._number = 0
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connecting: asyncio.Lock = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def prepare(
        self,
        salt: bytes,
        hashes: Sequence[bytes],
        *,
        deadline_s: float,
        prefill_tokens_per_s: float,
        use: w.KvUse,
    ) -> int:
        """Makes the longest prefix of these blocks local and returns how many leading ones can be read.

        ``prefill_tokens_per_s`` is what the engine would compute; 0: not known, whatever is held elsewhere is fetched.

        Raises:
            KvUnavailable: no answer within the deadline (and 50 ms).
        """
        message = w.Prepare(
            number=self._next(),
            salt=salt,
            hashes=w.joined(hashes[: w.BLOCKS_MAX]),
            deadline_s=deadline_s,
            prefill_tokens_per_s=prefill_tokens_per_s,
            use=use,
        )
        return min(len(hashes), (await self._ask(message, w.Prepared, deadline_s + ANSWER_GRACE_S)).blocks)

    async def evict(self, kv_signature: str, ratio: float, *, timeout_s: float = 30.0) -> w.KvEvicted:
        """Drops this share of a model's blocks from host memory and disk, the coldest first; 1.0 drops all.

        Raises:
            KvUnavailable
        """
        return await self._ask(w.Evict(number=self._next(), kv_signature=kv_signature, ratio=ratio), w.KvEvicted, timeout_s)

    async def pull(self, kv_signature: str, source: WorkerId, *, deadline_s: float) -> w.KvPulled:
        """Fetches all chains of a model that the node of ``source`` holds and this one lacks.

        Raises:
            KvUnavailable
        """
        message = w.Pull(number=self._next(), kv_signature=kv_signature, source=source, deadline_s=deadline_s)
        return await self._ask(message, w.KvPulled, deadline_s + 1.0)

    async def stats(self, *, timeout_s: float = STATS_TIMEOUT_S) -> w.KvStats:
        """Counts and fill of the tiers.

        Raises:
            KvUnavailable
        """
        return await self._ask(w.AskStats(number=self._next()), w.KvStats, timeout_s)

    async def close(self) -> None:
        """Closes the connection; a later call opens it again."""
        reading = self._reading
        self._drop("closed")
        if reading is not None:
            reading.cancel()
            await asyncio.wait([reading])

    # ---- the connection

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def _ask(self, message: w.Prepare | w.Evict | w.Pull | w.AskStats, kind: type[T], timeout_s: float) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                writer = await self._connected()
                answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                self._waiting[message.number] = answer
                try:
                    writer.write(w.frame(message))
                    reply = await answer
                finally:
                    self._waiting.pop(message.number, None)
        except TimeoutError:
            # A node that is frozen would make everybody wait: the next ones are told at once, until it attaches again.
            self._drop("no answer")
            raise KvUnavailable(f"the KV node did not answer within {timeout_s:.2f} s") from None
        if isinstance(reply, w.Refused):
            raise KvRefused(reply.reason)
        if not isinstance(reply, kind):
            raise KvUnavailable("the KV node answered something else")
        return reply

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._connecting:  # those who come while another connects want the same connection
            if self._writer is not None:
                return self._writer
            now_s = time.monotonic()
            if now_s < self._retry_at_s:
                raise KvUnavailable("the KV node is away")
            self._retry_at_s = now_s + RECONNECT_S
            writer: asyncio.StreamWriter | None = None
            try:
                async with asyncio.timeout(ATTACH_TIMEOUT_S):
                    reader, writer = await asyncio.open_unix_connection(self._path)
                    if peer_uid(writer.get_extra_info("socket")) not in (os.getuid(), 0):
                        raise ConnectionError("the socket belongs to somebody else")
                    writer.write(w.frame(self._attach))
                    if not isinstance(await _next_head(reader), w.Attached):
                        raise DecodeError("the node did not accept this end")
            except BaseException as error:
                # Also whoever's deadline ends before: the loop would hold the connection to a frozen node for ever.
                if writer is not None:
                    writer.transport.abort()
                if isinstance(error, OSError | EOFError | TimeoutError | DecodeError):
                    raise KvUnavailable(f"the KV node is away: {error}") from None
                raise
            self._writer = writer
            self._reading = asyncio.get_running_loop().create_task(self._read(reader, writer))
            return writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        why = "the KV node is gone"
        try:
            while True:
                message = await _next_head(reader)
                waiter = self._waiting.get(getattr(message, "number", 0))
                if waiter is not None and not waiter.done():
                    waiter.set_result(message)
        except DecodeError as error:
            why = str(error)
        except (OSError, EOFError):
            pass
        finally:
            if self._writer is writer:
                self._drop(why)
            writer.transport.abort()

    def _drop(self, why: str) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.transport.abort()
        self._retry_at_s = time.monotonic() + RECONNECT_S
        for waiter in list(self._waiting.values()):
            if not waiter.done():
                waiter.set_exception(KvUnavailable(why))


def _bytes_of(view: memoryview, size: int) -> memoryview:
    data = view.cast("B") if view.nbytes and (view.format != "B" or view.ndim != 1) else view
    if data.nbytes < size:
        raise ValueError(f"{data.nbytes} bytes are too small for rows of {size} bytes together")
    return data


def _send(sock: socket.socket, data: bytes | memoryview, end_s: float, *, silence_s: float = 3600.0) -> None:
    view = memoryview(data)
    while len(view):
        sock.settimeout(max(0.001, min(silence_s, end_s - time.monotonic())))
        view = view[sock.send(view) :]
        if time.monotonic() > end_s:
            raise TimeoutError("too slow")


def _receive(sock: socket.socket, into: memoryview, end_s: float, *, silence_s: float = 3600.0) -> None:
    while len(into):
        sock.settimeout(max(0.001, min(silence_s, end_s - time.monotonic())))
        count = sock.recv_into(into)
        if not count:
            raise EOFError("the node closed the connection")
        into = into[count:]
        if time.monotonic() > end_s and len(into):
            raise TimeoutError("too slow")


def _receive_head(sock: socket.socket, end_s: float) -> tuple[w.FromNode, int]:
    start = bytearray(w.LENGTHS_BYTES)
    _receive(sock, memoryview(start), end_s)
    head_bytes, body_bytes = w.lengths(start)
    head = bytearray(head_bytes)
    _receive(sock, memoryview(head), end_s)
    return cast("w.FromNode", w.read_head(bytes(head), w.FromNode)), body_bytes


async def _next_head(reader: asyncio.StreamReader) -> w.FromNode:
    head_bytes, body_bytes = w.lengths(await reader.readexactly(w.LENGTHS_BYTES))
    if body_bytes:
        raise DecodeError("a body where none belongs")
    return cast("w.FromNode", w.read_head(await reader.readexactly(head_bytes), w.FromNode))
