"""Blocks between nodes, over TCP: the source's server, and the target's pull of one chain (KVC-4).

The frames of :mod:`kvcache.wire.messages`: the target opens a connection with the token of an offer, is told the chain, and
asks for places in it, several batches at once. HTTP ranges would do the same with more words: a chain is many ranges of
pages that do not lie together, each with checksums and a codec of its own, and the receiver wants them in its own pages.

The token is a MAC, by a secret that the source drew when it started, over the chain and an expiry: it opens this chain, for
a minute, and nothing else. Nothing is encrypted. Who has no token gets no answer, holds no thread, and is closed soon.

Bytes are moved by threads (a blocking call that moves megabytes lets the event loop go on), each bounded in silence and in
time; the source sends from the arena and the target receives into it.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, Final

import structlog

from kvcache.core.holdings import Held
from kvcache.core.identity import PAGE_BYTES
from kvcache.node.data_bytes import SILENCE_S_MAX, accepted, in_thread, parts_of, prepare_socket, read_message, send_all
from kvcache.node.host_tier import HostBlock
from kvcache.node.settings import NodeSettings
from kvcache.node.tiers import Tiers
from kvcache.wire import messages as w
from subjects.errors import DecodeError, place_of
from subjects.tasks import Tasks

OPEN_S_MAX: Final = 2.0
"""From the connection to a token that opens it."""
STRANGERS_MAX: Final = 64
"""Connections that no token has opened yet."""
IDLE_S_MAX: Final = 10.0
"""Between two questions of a target."""
TARGET_BYTES_PER_S_MIN: Final = 1e6
"""A target that takes less is given up."""
RATE_STEP_S: Final = 0.05
_TOKEN = struct.Struct(">Q")
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

    def opens(self, asked: w.Open, now_s: float) -> bool:
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
    """A token bucket over all connections; the bytes of ``RATE_STEP_S`` may go at once."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    @property
    def step_bytes(self) -> int:
        """What should be sent at once so that the rate is even."""
        return max(PAGE_BYTES, int(self._bytes_per_s * RATE_STEP_S)) if self._bytes_per_s else w.BODY_BYTES_MAX

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
        prepare_socket(sock)
        sock.setblocking(False)
        host, port = sock.getsockname()[:2]
        self.address = settings.data_address or (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        self._listening = sock
        self._tasks.spawn(self._accept(sock))

    async def close(self) -> None:
        """Ends all transfers."""
        await self._tasks.end()
        if self._listening is not None:
            self._listening.close()
        self._threads.shutdown(wait=True)

    async def _accept(self, listening: socket.socket) -> None:
        async for sock in accepted(listening):
            if self._strangers >= STRANGERS_MAX:
                self.refused += 1
                sock.close()
            else:
                self._tasks.spawn(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        self._strangers += 1
        target = False
        try:
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                async with asyncio.timeout(OPEN_S_MAX):
                    await asyncio.get_running_loop().sock_sendall(sock, w.GREETING)
                    asked = await read_message(sock, w.ToSource)
            finally:
                self._strangers -= 1
            chain = self._opened(asked)
            self._targets += 1
            target = True
            identity = chain[0].identity
            opened = w.Opened(
                identity=identity,
                model_hashes=self._model_hashes(identity),
                codec=self._tiers.codec_of.get(identity.signature.model, "none"),
                hashes=w.joined([block.hash for block in chain]),
            )
            async with asyncio.timeout(SILENCE_S_MAX):
                await asyncio.get_running_loop().sock_sendall(sock, w.frame(opened))
            while True:
                async with asyncio.timeout(IDLE_S_MAX):
                    fetch = await read_message(sock, w.ToSource)
                await self._answer(sock, chain, fetch)
        except LookupError as error:
            self.refused += 1
            log.info("a chain of KV was not opened", reason=str(error))
        except (DecodeError, ValueError) as error:
            self.refused += 1
            log.warning("a KV data connection was closed", reason=str(error))
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            self._targets -= target
            sock.close()

    def _opened(self, asked: object) -> list[Held]:
        if not isinstance(asked, w.Open) or not self._tokens.opens(asked, time.monotonic()):
            raise DecodeError("no valid token")
        if self._targets >= self._settings.data_connections_max:
            raise LookupError("too many transfers")
        chain = self._tiers.holdings.chain(asked.identity, asked.head, w.BLOCKS_MAX)
        if len(chain) != asked.blocks or not chain:
            raise LookupError("it is no longer here")
        return chain

    async def _answer(self, sock: socket.socket, chain: Sequence[Held], fetch: object) -> None:
        if not isinstance(fetch, w.Fetch):
            raise DecodeError("a second token")
        identity = chain[0].identity
        size = identity.signature.block_bytes
        if len(fetch.places) * size > max(size, w.BODY_BYTES_MAX) or any(place >= len(chain) for place in fetch.places):
            raise DecodeError("places out of bounds")
        pinned: list[HostBlock] = []
        blocks: list[w.Block] = []
        bodies: list[memoryview] = []
        try:
            for place in fetch.places:
                held = chain[place]
                block = self._tiers.host.find(held.key)
                if block is not None:
                    self._tiers.host.pin(block)
                    pinned.append(block)
                    blocks.append(w.Block(place=place, size=block.size, codec="none", checksums=block.checksums))
                    bodies += block.views
                    continue
                stored = await self._tiers.stored(identity, held.hash)
                if stored is None:
                    break
                payload, codec = stored
                blocks.append(w.Block(place=place, size=len(payload), codec=codec, checksums=w.checksums(payload)))
                bodies.append(payload)
            total = sum(block.size for block in blocks)
            await self._send(sock, [memoryview(w.frame(w.Blocks(blocks=tuple(blocks)), total)), *bodies])
            self.served_blocks += len(blocks)
            self.served_bytes += total
        finally:
            self._tiers.release(pinned)

    async def _send(self, sock: socket.socket, buffers: Sequence[memoryview]) -> None:
        for part in parts_of(buffers, self._rate.step_bytes):
            size = sum(map(len, part))
            await self._rate.take(size)
            # Who takes a byte now and then would otherwise hold a thread and pages for ever.
            end_s = time.monotonic() + SILENCE_S_MAX + size / TARGET_BYTES_PER_S_MIN
            await in_thread(self._threads, sock, send_all, sock, part, end_s)
