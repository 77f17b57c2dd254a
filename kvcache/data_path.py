"""Blocks between nodes, over TCP: the source's server, and the target's pull of one chain (KVC-4).

The frames of :mod:`kvcache.node_messages`: the target opens a connection with the token of an offer, is told the chain, and
asks for places in it, several batches at once. HTTP ranges would do the same with more words: a chain is many ranges of
pages that do not lie together, each with checksums and a codec of its own, and the receiver wants them in its own pages.

The token is a MAC, by a secret that the source drew when it started, over the chain and an expiry: it opens this chain, for
a minute, and nothing else. Nothing is encrypted. Who has no token gets no answer, holds no thread, and is closed soon.

Bytes are moved by threads (a blocking call that moves megabytes lets the event loop go on), each bounded in silence and in
time; the source sends from the arena and the target receives into it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import mmap
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import structlog

from kvcache.core.holdings import Held
from kvcache.core.identity import PAGE_BYTES
from kvcache.core.migration import Transfer, batches, lacking
from kvcache.host_tier import HostBlock
from kvcache.node_messages import (
    BLOCKS_MAX,
    BODY_BYTES_MAX,
    LENGTHS_BYTES,
    Block,
    Blocks,
    Fetch,
    Open,
    Opened,
    ToSource,
    ToTarget,
    checksums,
    frame,
    joined,
    lengths,
    parted,
    read_head,
)
from kvcache.node_settings import NodeSettings
from kvcache.node_tiers import Tiers, checksums_of, decoded
from subjects.errors import DecodeError, place_of
from subjects.ids import ReplicaId
from subjects.messages import KvOffer
from subjects.tasks import Tasks, end_tasks

OPEN_S_MAX: Final = 2.0
"""From the connection to a token that opens it."""
STRANGERS_MAX: Final = 64
"""Connections that no token has opened yet."""
IDLE_S_MAX: Final = 10.0
"""Between two questions of a target."""
SILENCE_S_MAX: Final = 2.0
"""A side that moves no byte for that long is given up."""
FETCH_BLOCKS_MAX: Final = 1024
BUFFERS_MAX: Final = 512
"""Of one system call."""
PULLS_MAX: Final = 4
"""Chains that a node pulls at once."""
RATE_STEP_S: Final = 0.05
_TOKEN = struct.Struct(">Q")
_TIMEVAL = struct.Struct("@ll")
_MAC_BYTES = 32

log = structlog.get_logger(__name__)


class Tokens:
    """Makes and checks tokens of one source."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def make(self, identity: bytes, head: bytes, blocks: int, expires_s: float) -> bytes:
        """Opens this chain until ``expires_s`` on this node's monotonic clock."""
        expiry = _TOKEN.pack(int(expires_s * 1000))
        return expiry + self._mac(identity, head, blocks, expiry)

    def opens(self, asked: Open, now_s: float) -> bool:
        """Whether the token is ours, of this chain, and not expired; takes equally long for each wrong one."""
        expiry, mac = asked.token[: _TOKEN.size], asked.token[_TOKEN.size :]
        right = hmac.compare_digest(mac, self._mac(asked.identity, asked.head, asked.blocks, expiry))
        return right and len(expiry) == _TOKEN.size and now_s * 1000 <= _TOKEN.unpack(expiry)[0]

    def _mac(self, identity: bytes, head: bytes, blocks: int, expiry: bytes) -> bytes:
        state = blake2b(key=self._secret, digest_size=_MAC_BYTES)
        for part in (identity, head, str(blocks).encode(), expiry):
            state.update(len(part).to_bytes(4, "big") + part)
        return state.digest()


class Rate:
    """A token bucket over all connections; a second's bytes may go at once."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    @property
    def step_bytes(self) -> int:
        """What should be sent at once so that the rate is even."""
        return max(PAGE_BYTES, int(self._bytes_per_s * RATE_STEP_S)) if self._bytes_per_s else BODY_BYTES_MAX

    async def take(self, size: int) -> None:
        """Waits until ``size`` more bytes may go."""
        if not self._bytes_per_s:
            return
        now_s = time.monotonic()
        begin_s = max(now_s - RATE_STEP_S, self._free_s)
        self._free_s = begin_s + size / self._bytes_per_s
        if self._free_s > now_s:
            await asyncio.sleep(self._free_s - now_s)


# ------------------------------------------------------------------------------------------------------------- source


class DataServer:
    """Serves chains of this node's tiers to whoever has a token."""

    def __init__(self, settings: NodeSettings, tiers: Tiers, tokens: Tokens, model_hashes: Any) -> None:
        """``model_hashes`` gives the model hashes that are known for a ``KvIdentity``."""
        self._settings = settings
        self._tiers = tiers
        self._tokens = tokens
        self._model_hashes = model_hashes
        self._rate = Rate(settings.data_bytes_per_s_max)
        self._threads = ThreadPoolExecutor(settings.data_connections_max, thread_name_prefix="kv-serve")
        self._tasks = Tasks(lambda error: log.error("serving a chain failed", error=place_of(error)))
        self._listening: socket.socket | None = None
        self._strangers = 0
        self._targets = 0
        self.address = ""
        self.served_blocks = 0
        self.served_bytes = 0
        self.refused = 0

    def open(self) -> None:
        """Listens.

        Raises:
            OSError: the address cannot be used.
        """
        settings = self._settings
        family = socket.AF_INET6 if ":" in settings.data_host else socket.AF_INET
        sock = socket.create_server((settings.data_host, settings.data_port), family=family, backlog=STRANGERS_MAX)
        sock.setblocking(False)
        host, port = sock.getsockname()[:2]
        self.address = settings.data_address or f"{host}:{port}"
        self._listening = sock
        self._tasks.spawn(self._accept(sock))

    async def close(self) -> None:
        """Ends all transfers."""
        await self._tasks.end()
        if self._listening is not None:
            self._listening.close()
        self._threads.shutdown(wait=True)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError:  # out of descriptors, or the peer was gone at once
                await asyncio.sleep(0.05)
                continue
            if self._strangers >= STRANGERS_MAX:
                self.refused += 1
                sock.close()
                continue
            sock.setblocking(False)
            self._tasks.spawn(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        self._strangers += 1
        target = False
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                async with asyncio.timeout(OPEN_S_MAX):
                    asked = await _head(sock, ToSource)
            finally:
                self._strangers -= 1
            chain = self._opened(asked)
            self._targets += 1
            target = True
            identity = chain[0].identity
            opened = Opened(
                identity=identity,
                model_hashes=self._model_hashes(identity),
                codec=self._tiers.codec_of.get(identity.signature.model, "none"),
                hashes=joined([block.hash for block in chain]),
            )
            async with asyncio.timeout(SILENCE_S_MAX):
                await asyncio.get_running_loop().sock_sendall(sock, frame(opened))
            while True:
                async with asyncio.timeout(IDLE_S_MAX):
                    fetch = await _head(sock, ToSource)
                await self._answer(sock, chain, fetch)
        except (DecodeError, ValueError) as error:
            self.refused += 1
            log.warning("a KV data connection was closed", reason=str(error))
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            self._targets -= target
            sock.close()

    def _opened(self, asked: object) -> list[Held]:
        if not isinstance(asked, Open) or not self._tokens.opens(asked, time.monotonic()):
            raise DecodeError("no valid token")
        if self._targets >= self._settings.data_connections_max:
            raise DecodeError("too many transfers")
        chain = self._tiers.holdings.chain(asked.identity, asked.head, BLOCKS_MAX)
        if len(chain) != asked.blocks or not chain:
            raise DecodeError("the chain is no longer here")
        return chain

    async def _answer(self, sock: socket.socket, chain: Sequence[Held], fetch: object) -> None:
        if not isinstance(fetch, Fetch):
            raise DecodeError("a second token")
        identity = chain[0].identity
        size = identity.signature.block_bytes
        if len(fetch.places) * size > max(size, BODY_BYTES_MAX) or any(place >= len(chain) for place in fetch.places):
            raise DecodeError("places out of bounds")
        pinned: list[HostBlock] = []
        blocks: list[Block] = []
        bodies: list[memoryview] = []
        try:
            for place in fetch.places:
                held = chain[place]
                block = self._tiers.host.find(held.key)
                if block is not None:
                    self._tiers.host.pin(block)
                    pinned.append(block)
                    blocks.append(Block(place=place, size=block.size, codec="none", checksums=block.checksums))
                    bodies += block.views
                    continue
                stored = await self._tiers.stored(identity, held.hash)
                if stored is None:
                    break
                payload, codec = stored
                blocks.append(Block(place=place, size=len(payload), codec=codec, checksums=checksums(payload)))
                bodies.append(payload)
            total = sum(block.size for block in blocks)
            await self._send(sock, [memoryview(frame(Blocks(blocks=tuple(blocks)), total)), *bodies])
            self.served_blocks += len(blocks)
            self.served_bytes += total
        finally:
            self._tiers.release(pinned)

    async def _send(self, sock: socket.socket, buffers: Sequence[memoryview]) -> None:
        for part in _parts(buffers, self._rate.step_bytes):
            await self._rate.take(sum(map(len, part)))
            await _in_thread(self._threads, sock, _send_all, sock, part)


# ------------------------------------------------------------------------------------------------------------- target


@dataclass(slots=True)
class Pulled:
    """What one pull brought. ``blocks`` of ``bytes`` on the wire; ``hashes`` is the chain as the source told it."""

    blocks: int = 0
    failure: str = ""
    hashes: tuple[bytes, ...] = ()
    bytes: int = 0
    seconds: float = 0.0
    """That the transfer took."""


class Puller:
    """Pulls chains that were offered into this node's tiers."""

    def __init__(self, settings: NodeSettings, tiers: Tiers, on_chain: Any = None) -> None:
        """``on_chain`` is called with the ``Opened`` of each chain."""
        self._settings = settings
        self._tiers = tiers
        self._on_chain = on_chain
        self._threads = ThreadPoolExecutor(PULLS_MAX, thread_name_prefix="kv-pull")
        self._at_once = asyncio.Semaphore(PULLS_MAX)

    def close(self) -> None:
        """Ends the threads, once the pulls have ended."""
        self._threads.shutdown(wait=True)

    async def pull(
        self,
        offer: KvOffer,
        end_s: float,
        *,
        expected: Sequence[bytes] | None = None,
        replica: ReplicaId | None = None,
    ) -> Pulled:
        """Brings what this node lacks of an offered chain, until ``end_s`` on the monotonic clock.

        ``expected``: the chain as this side hashed it; another one is not taken. Never raises for what a source does: what
        arrived whole and right stays, ``failure`` says why the rest did not.
        """
        result = Pulled()
        try:
            async with self._at_once:
                await self._pull(offer, end_s, expected, replica, result)
        except (OSError, EOFError, TimeoutError, DecodeError, ValueError) as error:
            result.failure = result.failure or f"{type(error).__name__}: {error}"
        return result

    async def _pull(
        self,
        offer: KvOffer,
        end_s: float,
        expected: Sequence[bytes] | None,
        replica: ReplicaId | None,
        result: Pulled,
    ) -> None:
        sock = socket.socket(socket.AF_INET6 if offer.address.startswith("[") else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(max(0.0, min(SILENCE_S_MAX, end_s - time.monotonic()))):
                opened = await _open(sock, offer)
            hashes = parted(opened.hashes)
            _check(opened, hashes, offer, expected)
            result.hashes = tuple(hashes)
            if self._on_chain is not None:
                self._on_chain(opened)
            begin_s = time.monotonic()
            await self._transfer(sock, opened, hashes, end_s, replica, result)
            result.seconds = time.monotonic() - begin_s
        finally:
            sock.close()

    async def _transfer(
        self,
        sock: socket.socket,
        opened: Opened,
        hashes: Sequence[bytes],
        end_s: float,
        replica: ReplicaId | None,
        result: Pulled,
    ) -> None:
        identity = opened.identity
        size = identity.signature.block_bytes
        tiers = self._tiers
        here = [tiers.holdings.get(identity.key + hash) is not None for hash in hashes]
        transfer = Transfer(
            waiting=batches(lacking(here, len(hashes)), size, self._settings.pull_batch_bytes, FETCH_BLOCKS_MAX),
            in_flight_max=self._settings.pull_batches_in_flight,
            end_s=end_s,
        )
        rooms: list[list[HostBlock]] = []
        work: asyncio.Task[tuple[list[bytes], int]] | None = None
        arrived: tuple[tuple[int, ...], list[HostBlock], list[bytes]] | None = None
        try:
            await self._ask(sock, opened, hashes, transfer, rooms)
            while transfer.in_flight:
                batch, room = transfer.in_flight[0], rooms[0]
                # A thread receives this batch while the one before it is kept and the next one is asked for.
                work = asyncio.create_task(_in_thread(self._threads, sock, _receive_blocks, sock, batch, room, end_s))
                if arrived is not None:
                    self._keep(*arrived, replica)
                    arrived = None
                await self._ask(sock, opened, hashes, transfer, rooms)
                sums, came_bytes = await work
                del rooms[0]
                arrived = (batch, room, sums)
                transfer.came(len(sums))
                result.blocks += len(sums)
                result.bytes += came_bytes
        finally:
            if work is not None:
                await end_tasks([work])
            if arrived is not None:
                self._keep(*arrived, replica)
            for room in rooms:
                for block in room:
                    tiers.host.abandon(block)
            result.failure = transfer.failure

    async def _ask(
        self, sock: socket.socket, opened: Opened, hashes: Sequence[bytes], transfer: Transfer, rooms: list[list[HostBlock]]
    ) -> None:
        """Asks for as many batches as may be under way, once there is room for them."""
        while (batch := transfer.next(time.monotonic())) is not None:
            room = await self._rooms(opened, hashes, batch)
            if len(room) < len(batch):  # what is under way is pinned: less at once
                transfer.shrink(len(room))
            if not room:
                return
            rooms.append(room)
            question = frame(Fetch(places=batch[: len(room)]))
            # A thread may be receiving on this socket. Some questions always find room in its sending buffer.
            if sock.send(question, socket.MSG_DONTWAIT) < len(question):
                raise OSError("the source takes no questions")

    def _keep(self, batch: tuple[int, ...], room: list[HostBlock], sums: list[bytes], replica: ReplicaId | None) -> None:
        for place, block, sum_ in zip(batch, room, sums, strict=False):
            self._tiers.keep(block, sum_, depth=place + 1, replica=replica)
        for block in room[len(sums) :]:
            self._tiers.host.abandon(block)

    async def _rooms(self, opened: Opened, hashes: Sequence[bytes], batch: Sequence[int]) -> list[HostBlock]:
        room: list[HostBlock] = []
        try:
            for place in batch:
                block = await self._tiers.reserve(opened.identity, hashes[place], hashes[place - 1] if place else b"")
                if block is None:
                    break
                room.append(block)
        except BaseException:
            for block in room:
                self._tiers.host.abandon(block)
            raise
        return room


async def _open(sock: socket.socket, offer: KvOffer) -> Opened:
    host, _, port = offer.address.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(sock, (host.strip("[]"), int(port)))
    except ValueError:
        raise DecodeError("an address that is none") from None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    await loop.sock_sendall(
        sock, frame(Open(identity=offer.identity, head=offer.head, blocks=offer.blocks, token=offer.token))
    )
    opened = await _head(sock, ToTarget)
    if not isinstance(opened, Opened):
        raise DecodeError("the source said something else")
    return opened


def _check(opened: Opened, hashes: Sequence[bytes], offer: KvOffer, expected: Sequence[bytes] | None) -> None:
    signature = opened.identity.signature
    if opened.identity.key != offer.identity:
        raise DecodeError("the chain is of another model, layout or tenant")
    if not hashes or len(hashes) != offer.blocks or hashes[-1] != offer.head:
        raise DecodeError("another chain than was offered")
    if expected is not None and list(expected[: len(hashes)]) != list(hashes):
        raise DecodeError("the chain is not that of the prompt")
    if not 0 < signature.block_bytes <= BODY_BYTES_MAX or signature.block_size < 1:
        raise DecodeError("a block of that size is not carried")


# -------------------------------------------------------------------------------------------------------------- bytes


async def _head(sock: socket.socket, kind: Any) -> Any:
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


async def _in_thread(threads: ThreadPoolExecutor, sock: socket.socket, call: Any, *arguments: Any) -> Any:
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


def _parts(buffers: Sequence[memoryview], step_bytes: int) -> list[list[memoryview]]:
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


def _send_all(sock: socket.socket, buffers: Sequence[memoryview]) -> None:
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


def _receive_blocks(
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
