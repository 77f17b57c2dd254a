"""The target's end of the data path: pulls an offered chain into this node's tiers (KVC-4)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

import structlog

from kvcache.core.migration import Transfer, batches, lacking
from kvcache.node.data_bytes import (
    SILENCE_S_MAX,
    Job,
    Received,
    in_thread,
    prepare_socket,
    read_bytes,
    read_message,
    receive_jobs,
)
from kvcache.node.host_tier import HostBlock
from kvcache.node.settings import NodeSettings
from kvcache.node.tiers import Tiers
from kvcache.wire import messages as w
from subjects.errors import DecodeError
from subjects.ids import ReplicaId
from subjects.messages import KvOffer

FETCH_BLOCKS_MAX: Final = 1024
PULLS_MAX: Final = 4
"""Chains that a node pulls at once."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Pulled:
    """What one pull brought. ``blocks`` of ``bytes`` on the wire; ``hashes`` is the chain as the source told it."""

    blocks: int = 0
    failure: str = ""
    hashes: tuple[bytes, ...] = ()
    bytes: int = 0
    seconds: float = 0.0
    """That the transfer took."""


class NotOpened(Exception):
    """The source closed instead of telling the chain: it left the source meanwhile, or too many are pulling."""


class Puller:
    """Pulls chains that were offered into this node's tiers."""

    def __init__(self, settings: NodeSettings, tiers: Tiers, on_chain: Any = None) -> None:
        """``on_chain`` is called with the ``Opened`` of each chain."""
        self._settings = settings
        self._tiers = tiers
        self._on_chain = on_chain
        self._threads = ThreadPoolExecutor(PULLS_MAX, thread_name_prefix="kv-pull")
        self._at_once = asyncio.Semaphore(PULLS_MAX)
        self._coming: dict[bytes, asyncio.Event] = {}
        """Blocks that a pull is to bring: others that want them too wait for them, and do not fetch them again."""

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
        except NotOpened:
            result.failure = "the source did not open the chain"
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
            prepare_socket(sock)
            async with asyncio.timeout(max(0.0, min(SILENCE_S_MAX, end_s - time.monotonic()))):
                opened = await _open(sock, offer)
            hashes = w.parted(opened.hashes)
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
        opened: w.Opened,
        hashes: Sequence[bytes],
        end_s: float,
        replica: ReplicaId | None,
        result: Pulled,
    ) -> None:
        identity = opened.identity
        size = identity.signature.block_bytes
        tiers = self._tiers
        keys = [identity.key + hash for hash in hashes]
        others = {key: self._coming[key] for key in keys if key in self._coming}
        here = [key in others or tiers.holdings.get(key) is not None for key in keys]
        places = lacking(here, len(hashes))
        mine = {keys[place]: asyncio.Event() for place in places}
        self._coming |= mine
        transfer = Transfer(
            waiting=batches(places, size, self._settings.pull_batch_bytes, FETCH_BLOCKS_MAX),
            in_flight_max=self._settings.pull_batches_in_flight,
            end_s=end_s,
        )
        rooms: list[list[HostBlock]] = []
        jobs: SimpleQueue[Job | None] = SimpleQueue()
        came: asyncio.Queue[Received] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def arrived(received: Received) -> None:
            loop.call_soon_threadsafe(came.put_nowait, received)

        work = asyncio.create_task(in_thread(self._threads, sock, receive_jobs, sock, jobs, end_s, arrived))
        work.add_done_callback(lambda _: came.put_nowait(Received(failure="the thread ended")))
        try:
            await self._ask(sock, opened, hashes, transfer, rooms, jobs)
            while transfer.in_flight:
                received = await came.get()
                batch, room = transfer.in_flight[0], rooms.pop(0)
                transfer.failure = transfer.failure or received.failure
                transfer.came(len(received.sums))
                if received.failure:
                    transfer.broke(received.failure)
                self._keep(batch, room, received.sums, replica)
                result.blocks += len(received.sums)
                result.bytes += received.bytes
                await self._ask(sock, opened, hashes, transfer, rooms, jobs)
        finally:
            jobs.put(None)
            work.cancel()
            while not work.done():  # the thread has pages in its hands, whoever does not want to wait for it
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([work])
            for room in rooms:
                for block in room:
                    tiers.host.abandon(block)
            for key, event in mine.items():
                self._coming.pop(key)
                event.set()
            result.failure = transfer.failure
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, end_s - time.monotonic())):
                for event in others.values():
                    await event.wait()

    async def _ask(
        self,
        sock: socket.socket,
        opened: w.Opened,
        hashes: Sequence[bytes],
        transfer: Transfer,
        rooms: list[list[HostBlock]],
        jobs: SimpleQueue[Job | None],
    ) -> None:
        """Asks for as many batches as may be under way, once there is room for them."""
        while (batch := transfer.next(time.monotonic())) is not None:
            room = await self._rooms(opened, hashes, batch)
            if len(room) < len(batch):  # what is under way is pinned: less at once
                transfer.shrink(len(room))
            if not room:
                return
            rooms.append(room)
            question = w.frame(w.Fetch(places=batch[: len(room)]))
            # A thread may be receiving on this socket. Some questions always find room in its sending buffer.
            if sock.send(question, socket.MSG_DONTWAIT) < len(question):
                raise OSError("the source takes no questions")
            jobs.put((batch[: len(room)], room))

    def _keep(self, batch: tuple[int, ...], room: list[HostBlock], sums: list[bytes], replica: ReplicaId | None) -> None:
        for place, block, sum_ in zip(batch, room, sums, strict=False):
            self._tiers.keep(block, sum_, depth=place + 1, replica=replica)
            event = self._coming.get(block.key)
            if event is not None:
                event.set()
        for block in room[len(sums) :]:
            self._tiers.host.abandon(block)

    async def _rooms(self, opened: w.Opened, hashes: Sequence[bytes], batch: Sequence[int]) -> list[HostBlock]:
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


async def _open(sock: socket.socket, offer: KvOffer) -> w.Opened:
    host, _, port = offer.address.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(sock, (host.strip("[]"), int(port)))
    except ValueError:
        raise DecodeError("an address that is none") from None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        if await read_bytes(sock, len(w.GREETING)) != w.GREETING:
            raise DecodeError("no KV node listens there")
        await loop.sock_sendall(
            sock, w.frame(w.Open(identity=offer.identity, head=offer.head, blocks=offer.blocks, token=offer.token))
        )
        opened = await read_message(sock, w.ToTarget)
    except EOFError:
        raise NotOpened from None
    if not isinstance(opened, w.Opened):
        raise DecodeError("the source said something else")
    return opened


def _check(opened: w.Opened, hashes: Sequence[bytes], offer: KvOffer, expected: Sequence[bytes] | None) -> None:
    signature = opened.identity.signature
    if opened.identity.key != offer.identity:
        raise DecodeError("the chain is of another model, layout or tenant")
    if not hashes or len(hashes) != offer.blocks or hashes[-1] != offer.head:
        raise DecodeError("another chain than was offered")
    if len(set(hashes)) != len(hashes):
        raise DecodeError("a chain that names a block twice")
    if expected is not None and list(expected[: len(hashes)]) != list(hashes):
        raise DecodeError("the chain is not that of the prompt")
    if not 0 < signature.block_bytes <= w.BODY_BYTES_MAX or signature.block_size < 1:
        raise DecodeError("a block of that size is not carried")
