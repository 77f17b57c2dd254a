"""The node's local socket: engines of this host write and read blocks there, agents and replicas ask.

Mode 0600 and the peer's user are both checked. Bodies are received straight into the arena and sent straight out of it. What
a connection may hold is bounded: one frame's blocks, and so many questions that are not answered yet.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, assert_never, cast

import msgspec
import structlog

from kvcache.core.identity import KvIdentity, KvSignature
from kvcache.node.data_bytes import accepted, receive_into
from kvcache.node.host_tier import HostBlock, checksums_of
from kvcache.node.models import is_model_hash
from kvcache.node.tiers import Tiers
from kvcache.wire import messages as w
from kvcache.wire.client import SOCKET_BUFFER_BYTES, peer_uid
from profiles.blocks import HASH_BYTES
from subjects.errors import CarpoolError, DecodeError, place_of
from subjects.ids import ReplicaId, is_token
from subjects.tasks import Tasks

CONNECTIONS_MAX = 128
ATTACH_S_MAX = 2.0
FRAME_SILENCE_S_MAX = 10.0
"""A frame that stopped midway closes the connection after that long."""
QUESTIONS_MAX = 256
"""Of one connection, not answered yet."""
ROOM_S_MAX = 0.5
"""How long a writer waits for room; its blocks are not kept then."""
READ_S_MAX = 10.0
"""From a question for blocks to their being in memory. A disk that hangs must not keep connections that nobody waits at."""
SCRATCH_BYTES = 256 * 1024

log = structlog.get_logger(__name__)


class Answers(Protocol):
    """What the node does for its host, besides keeping blocks."""

    def attached(self, engine: w.Attach) -> None:
        """An engine is here."""

    def used(self, identity: KvIdentity, hashes: Sequence[bytes], replica: ReplicaId | None, use: w.KvUse) -> None:
        """A request uses these blocks."""

    def emptied(self, replica: ReplicaId) -> None:
        """An engine's own cache was reset."""

    async def corrupt(self, identity: KvIdentity, hash: bytes) -> None:
        """A block did not have its checksum."""

    async def prepare(self, identity: KvIdentity, hashes: Sequence[bytes], engine: w.Attach, asked: w.Prepare) -> int:
        """Leading blocks that can be read."""

    async def evict(self, kv_signature: str, ratio: float) -> w.KvEvicted:
        """Drops a share of a model's blocks."""

    async def pull(self, kv_signature: str, source: str, deadline_s: float) -> w.KvPulled:
        """Fetches a model's blocks from another node."""

    async def stats(self) -> w.KvStats:
        """Counts and fill."""


class LocalSocket:
    """Listens on a path until :meth:`close`."""

    def __init__(self, path: str, node: str, tiers: Tiers, answers: Answers) -> None:
        self._path = Path(path)
        self._node = node
        self._tiers = tiers
        self._answers = answers
        self._tasks = Tasks(lambda error: log.error("a KV connection failed", error=place_of(error)))
        self._listening: socket.socket | None = None
        self._count = 0
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))

    def open(self) -> None:
        """Binds, in place of whatever a dead process left there.

        Raises:
            OSError: the directory is missing or not writable, or the path is too long.
        """
        self._path.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            sock.bind(str(self._path))
        finally:
            os.umask(before)
        self._path.chmod(0o600)
        sock.listen(CONNECTIONS_MAX)
        sock.setblocking(False)
        self._listening = sock
        self._tasks.spawn(self._accept(sock))

    async def close(self) -> None:
        """Ends all connections and removes the path."""
        await self._tasks.end()
        if self._listening is not None:
            self._listening.close()
            self._path.unlink(missing_ok=True)

    async def _accept(self, listening: socket.socket) -> None:
        async for sock in accepted(listening):
            with suppress(OSError):
                if self._count < CONNECTIONS_MAX and peer_uid(sock) in (os.getuid(), 0):
                    self._tasks.spawn(self._serve(sock))
                    continue
            sock.close()

    async def _serve(self, sock: socket.socket) -> None:
        self._count += 1
        connection = _Connection(sock, self._node, self._tiers, self._answers, self._scratch)
        try:
            await connection.run()
        except (DecodeError, ValueError) as error:
            log.warning("a KV connection was closed", reason=str(error))
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            self._count -= 1
            await connection.close()


class _Connection:
    """One engine or agent."""

    def __init__(self, sock: socket.socket, node: str, tiers: Tiers, answers: Answers, scratch: memoryview) -> None:
        self._sock = sock
        self._node = node
        self._tiers = tiers
        self._answers = answers
        self._scratch = scratch
        self._loop = asyncio.get_running_loop()
        self._engine = w.Attach()
        self._replica: ReplicaId | None = None
        self._sending = asyncio.Lock()
        self._questions = 0
        self._tasks = Tasks(lambda error: log.error("a KV question failed", error=place_of(error)))
        self._start = memoryview(bytearray(w.LENGTHS_BYTES))
        self._identities: dict[bytes, KvIdentity] = {}

    async def run(self) -> None:
        """Until the other end closes.

        Raises:
            DecodeError: what came is no message of this place.
            OSError, EOFError, TimeoutError: the connection is gone.
        """
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        async with asyncio.timeout(ATTACH_S_MAX):
            engine, body_bytes = await self._head(w.Attach)
        if body_bytes:
            raise DecodeError("a body where none belongs")
        self._attach(cast("w.Attach", engine))
        await self._send(w.Attached(node=self._node))
        while True:
            message, body_bytes = await self._head(w.ToNode)
            await self._take(cast("w.ToNode", message), body_bytes)

    async def close(self) -> None:
        """Ends what it still asked for."""
        await self._tasks.end()
        self._sock.close()

    def _attach(self, engine: w.Attach) -> None:
        signature = engine.signature
        if signature is not None and (
            signature.block_bytes < 1 or signature.block_bytes > w.BODY_BYTES_MAX or signature.block_size < 1
        ):
            raise DecodeError("a block of that size is not carried")
        # Both go into messages to others, who refuse a whole message for one id that is none.
        if engine.replica and not is_token(engine.replica):
            raise DecodeError("a replica's id that is none")
        if engine.model_hash and not is_model_hash(engine.model_hash):
            raise DecodeError("a model's hash that is none")
        self._engine = engine
        self._replica = ReplicaId(engine.replica) if engine.replica else None
        self._answers.attached(engine)

    def _identity(self, salt: bytes) -> KvIdentity:
        signature: KvSignature | None = self._engine.signature
        if signature is None:
            raise DecodeError("blocks need an engine's signature")
        identity = self._identities.get(salt)
        if identity is None:
            if len(self._identities) >= w.BLOCKS_MAX:
                self._identities.clear()
            identity = KvIdentity(weights_hash=self._engine.weights_hash, signature=signature, salt=salt)
            self._identities[salt] = identity
        return identity

    async def _take(self, message: w.ToNode, body_bytes: int) -> None:
        if body_bytes and not isinstance(message, w.Write):
            raise DecodeError("a body where none belongs")
        match message:
            case w.Read():
                await self._read(message)
            case w.Write():
                async with asyncio.timeout(FRAME_SILENCE_S_MAX + ROOM_S_MAX):
                    await self._write(message, body_bytes)
            case w.Used():
                self._answers.used(self._identity(message.salt), w.parted(message.hashes), self._replica, message.use)
            case w.Emptied():
                if self._replica is not None:
                    self._answers.emptied(self._replica)
            case w.Corrupt():
                await self._answers.corrupt(self._identity(message.salt), message.hash)
            case w.Prepare():
                identity, hashes = self._identity(message.salt), w.parted(message.hashes)
                self._ask(message.number, self._prepared(identity, hashes, message))
            case w.Evict():
                self._ask(message.number, self._answers.evict(message.kv_signature, message.ratio))
            case w.Pull():
                self._ask(message.number, self._answers.pull(message.kv_signature, message.source, message.deadline_s))
            case w.AskStats():
                self._ask(message.number, self._answers.stats())
            case _:
                assert_never(message)

    # ---- blocks

    async def _read(self, message: w.Read) -> None:
        identity = self._identity(message.salt)
        hashes = w.parted(message.hashes)
        size = identity.signature.block_bytes
        if len(hashes) * size > w.BODY_BYTES_MAX:
            raise DecodeError("more blocks than a frame takes")
        async with asyncio.timeout(READ_S_MAX):
            blocks = await self._tiers.acquire(identity, hashes, replica=self._replica)
        try:
            found = w.Found(
                number=message.number, blocks=len(blocks), checksums=b"".join([block.checksums for block in blocks])
            )
            async with self._sending, asyncio.timeout(FRAME_SILENCE_S_MAX):
                await self._loop.sock_sendall(self._sock, w.frame(found, len(blocks) * size))
                for block in blocks:
                    for view in block.views:
                        await self._loop.sock_sendall(self._sock, view)
        finally:
            self._tiers.release(blocks)

    async def _write(self, message: w.Write, body_bytes: int) -> None:
        identity = self._identity(message.salt)
        hashes = w.parted(message.hashes)
        size = identity.signature.block_bytes
        if body_bytes != len(hashes) * size or len(message.parent) not in (0, HASH_BYTES):
            raise DecodeError("rows that do not fit their hashes")
        parent = message.parent
        kept = 0
        keeping = True
        for place, hash in enumerate(hashes):
            keeping = keeping and await self._take_row(identity, hash, parent, message, place)
            if keeping:
                kept += 1
            else:
                await self._discard(size)
            parent = hash
        counts = self._tiers.counts
        counts.written += kept
        counts.refused += len(hashes) - kept
        await self._send(w.Kept(number=message.number, blocks=kept))

    async def _take_row(self, identity: KvIdentity, hash: bytes, parent: bytes, message: w.Write, place: int) -> bool:
        """Receives one row; False: it is not kept, and still to be received."""
        if self._tiers.leading(identity, [hash]):
            await self._discard(identity.signature.block_bytes)
            self._tiers.used(identity, [hash], self._replica)
            return True
        block: HostBlock | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(ROOM_S_MAX):
                block = await self._tiers.reserve(identity, hash, parent)
        if block is None:
            return False
        try:
            for view in block.views:
                await receive_into(self._sock, view)
        except BaseException:
            self._tiers.host.abandon(block)
            raise
        depth = message.first + place + 1 if message.first or not message.parent else 0
        self._tiers.keep(block, checksums_of(block), depth=depth, replica=self._replica, test=message.use.test)
        return True

    # ---- questions

    async def _prepared(self, identity: KvIdentity, hashes: Sequence[bytes], message: w.Prepare) -> w.Prepared:
        blocks = await self._answers.prepare(identity, hashes, self._engine, message)
        return w.Prepared(number=message.number, blocks=blocks)

    def _ask(self, number: int, answer: Awaitable[Any]) -> None:
        self._questions += 1
        self._tasks.spawn(self._answer(number, answer))

    async def _answer(self, number: int, answer: Awaitable[Any]) -> None:
        try:
            if self._questions > QUESTIONS_MAX:
                reply: Any = w.Refused(number=number, reason="too many questions at once")
                cast("Any", answer).close()
            else:
                try:
                    reply = _numbered(await answer, number)
                except CarpoolError as error:
                    reply = w.Refused(number=number, reason=str(error)[:500])
            with suppress(OSError, TimeoutError):
                await self._send(reply)
        finally:
            self._questions -= 1

    # ---- bytes

    async def _head(self, kind: Any) -> tuple[Any, int]:
        await receive_into(self._sock, self._start)
        head_bytes, body_bytes = w.lengths(self._start)
        head = bytearray(head_bytes)
        async with asyncio.timeout(FRAME_SILENCE_S_MAX):
            await receive_into(self._sock, memoryview(head))
        return w.read_head(bytes(head), kind), body_bytes

    async def _discard(self, size: int) -> None:
        while size > 0:
            part = self._scratch[: min(size, len(self._scratch))]
            await receive_into(self._sock, part)
            size -= len(part)

    async def _send(self, message: Any) -> None:
        async with self._sending, asyncio.timeout(FRAME_SILENCE_S_MAX):
            await self._loop.sock_sendall(self._sock, w.frame(message))


def _numbered(reply: Any, number: int) -> Any:
    return reply if reply.number == number else msgspec.structs.replace(reply, number=number)
