"""A node among others: what it tells the index, what it offers, and what it fetches.

Everything heard here is a hint. Whether a block is used is decided by reading and verifying it, so a wrong hint costs one
look. Waits are bounded: an ask by ``ask_s_max``, a pull by its deadline; what did not come is computed.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from kvcache.core.fetching import Bandwidths, Choice, choose
from kvcache.core.holdings import SpanNews
from kvcache.core.identity import KvIdentity, blocks_per_span, spans_of
from kvcache.core.prefix_index import PrefixIndex
from kvcache.node.data_path import DataServer, Tokens
from kvcache.node.data_pull import Puller
from kvcache.node.models import KnownModels
from kvcache.node.settings import NodeSettings
from kvcache.node.tiers import Tiers
from kvcache.wire.index_sync import IndexSync
from kvcache.wire.messages import Attach, KvPulled, Opened, Prepare
from subjects import names
from subjects.bus import Bus, BusMessage, Subscription
from subjects.codec import decode, encode
from subjects.errors import BusError, BusUnavailable, DecodeError, place_of
from subjects.ids import ModelHash, ReplicaId, WorkerId
from subjects.messages import KvAsk, KvIndexed, KvModelSpans, KvOffer, KvSnapshot
from subjects.tasks import Tasks, end_tasks

SPANS_PER_MESSAGE = 500
"""Some 50 KB, and 2 ms of a gateway that takes it in."""
OFFER_TIMEOUT_S = 1.0
FETCH_LATENCY_S = 0.01
"""What is believed that asking and opening take."""
DISK_LATENCY_S = 0.002
DISK = "disk"
"""Path of the bandwidth of this node's own disk."""
PULLS_PER_PREPARE_MAX = 3
ANSWER_MARGIN_S = 0.005
"""A deadline is kept with so much to spare for the answer's own way."""
VAIN_S = 5.0
"""A node that did not have what the index said is not asked for that chain again for so long."""
SILENT_S = 1.0
"""A node that did not answer is not asked at all for so long."""
VAIN_MAX = 4096
OFFER_LISTS_MAX = 8
OFFER_LIST_S = 60.0

log = structlog.get_logger(__name__)


class Exchange:
    """See the module."""

    def __init__(
        self,
        settings: NodeSettings,
        node: str,
        tiers: Tiers,
        models: KnownModels,
        on_dropped: Callable[[KvIdentity, Sequence[bytes]], None] = lambda identity, spans: None,
    ) -> None:
        """``on_dropped`` hears which spans the node holds no more."""
        self._on_dropped = on_dropped
        self._settings = settings
        self._node = node
        self._worker = WorkerId(settings.worker)
        self._tiers = tiers
        self._models = models
        self._tokens = Tokens()
        self.server = DataServer(settings, tiers, self._tokens, models.hashes)
        self.puller = Puller(settings, tiers, self._chain_came)
        self.index = PrefixIndex()
        self.bandwidths = Bandwidths()
        self._bus: Bus | None = None
        self._subscription: Subscription | None = None
        self._sync: IndexSync | None = None
        self._tasks = Tasks(lambda error: log.error("a part of the KV node's exchange failed", error=place_of(error)))
        self._sequence = 0
        self._emptied: dict[ReplicaId, None] = {}
        self._told_s = 0.0
        self._pulls: dict[bytes, asyncio.Task[None]] = {}
        self._vain: dict[tuple[WorkerId, bytes], float] = {}
        self._offer_lists: dict[tuple[WorkerId, str], tuple[float, list[bytes]]] = {}
        self.pulled_blocks = 0
        self.pulled_bytes = 0

    def listen(self, *, alone: bool) -> None:
        """Opens the data path. ``alone``: no bus will come, so that nothing waits to be told.

        Raises:
            OSError: its address cannot be used.
        """
        self.server.open()
        if alone:
            self._tasks.spawn(self._tell())

    async def join(self, bus: Bus) -> None:
        """Speaks and answers on the bus from now on, also on one that connects later."""
        self._bus = bus
        self._subscription = await bus.subscribe(names.kv_ask(self._worker), self._on_ask)
        self._sync = IndexSync(bus, self.index, self._worker, discarded=_discarded)
        await self._sync.start()
        self._tasks.spawn(self._tell())

    async def close(self) -> None:
        """Leaves the bus; pulls under way end."""
        for part in (self._subscription, self._sync):
            with suppress(BusError):
                if part is not None:
                    await part.stop()
        await self._tasks.end()
        await end_tasks(list(self._pulls.values()))
        await self.server.close()
        self.puller.close()

    # ---- telling

    def emptied(self, replica: ReplicaId) -> None:
        """An engine's own cache was reset; said with the next message."""
        self._tiers.holdings.emptied(replica)
        self._emptied[replica] = None

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(self._settings.publish_s)
            self._tell_once()

    def _tell_once(self) -> None:
        now_s = time.monotonic()
        news = self._tiers.holdings.news(SPANS_PER_MESSAGE)
        for one in news:
            if one.dropped:
                self._on_dropped(one.identity, one.dropped)
        if not news and not self._emptied and now_s - self._told_s < self._settings.beat_s:
            return
        self._sequence += 1
        self._told_s = now_s
        message = KvIndexed(
            worker=self._worker,
            node=self._node,
            sequence=self._sequence,
            models=self._by_model(news),
            emptied=tuple(self._emptied),
        )
        self._emptied.clear()
        # Lost when the bus is away: whoever listens misses a number then, and asks for everything.
        if self._bus is None:
            return
        with suppress(BusUnavailable):
            self._bus.post(names.kv_index(self._worker), encode(message))

    def _by_model(self, news: Sequence[SpanNews]) -> tuple[KvModelSpans, ...]:
        return tuple(
            KvModelSpans(
                model_hash=model_hash,
                block_size=one.identity.signature.block_size,
                held=one.held,
                dropped=one.dropped,
            )
            for one in news
            for model_hash in self._models.hashes(one.identity)
        )

    # ---- answering

    def _on_ask(self, message: BusMessage) -> None:
        if not message.reply or self._bus is None:
            return
        try:
            ask = decode(message.payload, KvAsk)
        except DecodeError as error:
            log.warning("what asked for KV cannot be read", error=str(error))
            return
        answer = self._snapshot(ask.cursor) if ask.snapshot else self._offer(ask)
        with suppress(BusError):
            self._bus.post(message.reply, encode(answer))

    def _snapshot(self, cursor: bytes) -> KvSnapshot:
        news, after = self._tiers.holdings.told(cursor, SPANS_PER_MESSAGE)
        return KvSnapshot(
            worker=self._worker, node=self._node, sequence=self._sequence, models=self._by_model(news), cursor=after
        )

    def _offer(self, ask: KvAsk) -> KvOffer:
        if ask.head:
            return self._offer_chain(ask.identity, ask.head)
        heads = self._heads(ask)
        for at in range(bisect.bisect_right(heads, ask.cursor) if ask.cursor else 0, len(heads)):
            key = heads[at]
            offer = self._offer_chain(key[:16], key[16:], cursor=key if at + 1 < len(heads) else b"")
            if offer.blocks:
                return offer
        return KvOffer()

    def _offer_chain(self, identity: bytes, head: bytes, *, cursor: bytes = b"") -> KvOffer:
        chain = self._tiers.holdings.chain(identity, head)
        if not chain or not self.server.address:
            return KvOffer(identity=identity, head=head, cursor=cursor)
        expires_s = time.monotonic() + self._settings.offer_s
        return KvOffer(
            identity=identity,
            head=head,
            blocks=len(chain),
            bytes_total=sum(block.size for block in chain),
            address=self.server.address,
            token=self._tokens.make(identity, head, len(chain), expires_s),
            expires_s=self._settings.offer_s,
            cursor=cursor,
        )

    def _heads(self, ask: KvAsk) -> list[bytes]:
        """Ends of chains in order, as of the first ask of a migration."""
        now_s = time.monotonic()
        key = (ask.worker, ask.signature)
        known = self._offer_lists.pop(key, None)
        if known is None or not ask.cursor or now_s - known[0] > OFFER_LIST_S:
            known = (now_s, self._tiers.holdings.heads(ask.signature))
        self._offer_lists[key] = (now_s, known[1])
        while len(self._offer_lists) > OFFER_LISTS_MAX:
            del self._offer_lists[next(iter(self._offer_lists))]
        return known[1]

    # ---- fetching

    def _chain_came(self, opened: Opened) -> None:
        identity = opened.identity
        for model_hash in opened.model_hashes or ("",):
            self._models.note(identity.weights_hash, identity.signature, model_hash, opened.codec)
        self._tiers.codec_of.setdefault(identity.signature.model, opened.codec)

    async def prepare(self, identity: KvIdentity, hashes: Sequence[bytes], engine: Attach, asked: Prepare) -> int:
        """Makes the longest prefix local that pays within the deadline; how many leading blocks are worth reading."""
        end_s = time.monotonic() + asked.deadline_s - ANSWER_MARGIN_S
        replica = ReplicaId(engine.replica) if engine.replica else None
        for _ in range(PULLS_PER_PREPARE_MAX):  # each from another node, or after somebody else's pull of the same
            local = self._tiers.leading(identity, hashes)
            found = self._best(identity, hashes, local, engine, asked, end_s)
            if found is None:
                break
            worker, blocks = found
            key = identity.key + hashes[local + blocks - 1]
            before = self._pulls.get(key)
            if before is None:
                before = asyncio.get_running_loop().create_task(
                    self._fetch(identity, hashes[: local + blocks], worker, end_s, replica)
                )
                self._pulls[key] = before
                before.add_done_callback(functools.partial(self._pull_ended, key))
            await asyncio.wait([before], timeout=max(0.0, end_s - time.monotonic()))
            if not before.done():
                break
        return self._worth_reading(identity, hashes, asked, end_s)

    def _pull_ended(self, key: bytes, task: asyncio.Task[None]) -> None:
        self._pulls.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a pull failed", error=place_of(error))

    def _best(
        self,
        identity: KvIdentity,
        hashes: Sequence[bytes],
        local: int,
        engine: Attach,
        asked: Prepare,
        end_s: float,
    ) -> tuple[WorkerId, int] | None:
        """Whom to fetch from, and how many blocks beyond the local ones; None: nothing that pays."""
        if self._bus is None or not self._bus.connected or local >= len(hashes) or not engine.model_hash:
            return None
        signature = identity.signature
        step = blocks_per_span(signature.block_size)
        spans = spans_of(hashes, signature.block_size)
        best: tuple[float, int, WorkerId] | None = None
        now_s = time.monotonic()
        left_s = end_s - now_s
        for holder in self.index.holders(ModelHash(engine.model_hash), spans).workers:
            if holder.worker == self._worker or self._vain.get((holder.worker, b""), 0.0) > now_s:
                continue
            more = holder.spans * step - local
            if more <= 0:
                continue
            choice = choose(
                more,
                block_bytes=signature.block_bytes,
                block_tokens=signature.block_size,
                bytes_per_s=self.bandwidths.bytes_per_s(holder.worker),
                latency_s=FETCH_LATENCY_S,
                prefill_tokens_per_s=asked.prefill_tokens_per_s,
                deadline_s=left_s,
            )
            if not choice.blocks:
                self.bandwidths.passed_over(holder.worker)
                continue
            if self._vain.get((holder.worker, hashes[local + choice.blocks - 1]), 0.0) > now_s:
                continue
            if best is None or (choice.saves_s, choice.blocks) > best[:2]:
                best = (choice.saves_s, choice.blocks, holder.worker)
        return (best[2], best[1]) if best is not None else None

    async def _fetch(
        self, identity: KvIdentity, hashes: Sequence[bytes], worker: WorkerId, end_s: float, replica: ReplicaId | None
    ) -> None:
        offer = await self._ask(worker, KvAsk(worker=self._worker, identity=identity.key, head=hashes[-1]), end_s)
        now_s = time.monotonic()
        if offer is None:
            self._vain[worker, b""] = now_s + SILENT_S
            return
        if not offer.blocks:  # what the index said is not so
            self._vain[worker, hashes[-1]] = now_s + VAIN_S
            while len(self._vain) > VAIN_MAX:
                del self._vain[next(iter(self._vain))]
            return
        if offer.identity != identity.key or offer.head != hashes[-1]:
            return
        await self._pull(offer, worker, end_s, expected=hashes, replica=replica)

    async def _ask(self, worker: WorkerId, ask: KvAsk, end_s: float) -> KvOffer | None:
        assert self._bus is not None
        timeout_s = min(self._settings.ask_s_max, end_s - time.monotonic())
        if timeout_s <= 0.0:
            return None
        try:
            return decode(await self._bus.request(names.kv_ask(worker), encode(ask), timeout_s=timeout_s), KvOffer)
        except (BusError, DecodeError) as error:
            log.debug("a node did not answer", worker=worker, error=str(error))
            return None

    async def _pull(
        self,
        offer: KvOffer,
        worker: WorkerId,
        end_s: float,
        *,
        expected: Sequence[bytes] | None = None,
        replica: ReplicaId | None = None,
    ) -> KvPulled:
        pulled = await self.puller.pull(offer, end_s, expected=expected, replica=replica)
        self.pulled_blocks += pulled.blocks
        self.pulled_bytes += pulled.bytes
        self.bandwidths.measured(worker, pulled.bytes, pulled.seconds)
        if pulled.failure == "deadline" or "Error" in pulled.failure:  # no want of blocks or of room: those are no path's
            self.bandwidths.failed(worker)
        if pulled.failure:
            log.info("a chain of KV came in part", source=worker, blocks=pulled.blocks, reason=pulled.failure)
        return KvPulled(blocks=pulled.blocks, bytes=pulled.bytes, chains=1, failure=pulled.failure)

    def _worth_reading(self, identity: KvIdentity, hashes: Sequence[bytes], asked: Prepare, end_s: float) -> int:
        """Of the local blocks those that are in memory, and those on disk if reading them beats computing them."""
        local = self._tiers.leading(identity, hashes)
        prefix, find = identity.key, self._tiers.host.find
        in_memory = next((at for at in range(local) if find(prefix + hashes[at]) is None), local)
        if in_memory == local:
            return local
        signature = identity.signature
        choice: Choice = choose(
            local - in_memory,
            block_bytes=signature.block_bytes,
            block_tokens=signature.block_size,
            bytes_per_s=self.bandwidths.bytes_per_s(DISK),
            latency_s=DISK_LATENCY_S,
            prefill_tokens_per_s=asked.prefill_tokens_per_s,
            deadline_s=max(asked.deadline_s, 1.0),
        )
        if not choice.blocks:
            self.bandwidths.passed_over(DISK)
        return in_memory + choice.blocks

    async def pull_all(self, kv_signature: str, source: str, deadline_s: float) -> KvPulled:
        """Fetches all chains of a model that another node has, one after the other, until the deadline."""
        end_s = time.monotonic() + deadline_s
        blocks = size = chains = 0
        cursor = b""
        failure = ""
        if self._bus is None:
            return KvPulled(failure="this node is on no bus")
        try:
            subject = names.kv_ask(WorkerId(source))
        except ValueError:
            return KvPulled(failure="no such worker")
        while True:
            left_s = end_s - time.monotonic()
            if left_s <= 0.0:
                failure = "deadline"
                break
            ask = KvAsk(worker=self._worker, signature=kv_signature, cursor=cursor)
            try:
                offer = decode(
                    await self._bus.request(subject, encode(ask), timeout_s=min(OFFER_TIMEOUT_S, left_s)), KvOffer
                )
            except (BusError, DecodeError) as error:
                failure = f"the source does not answer: {type(error).__name__}"
                break
            if offer.blocks:
                came = await self._pull(offer, WorkerId(source), end_s)
                blocks, size, chains = blocks + came.blocks, size + came.bytes, chains + 1
                if came.failure:
                    failure = came.failure
                    if came.failure == "deadline" or "Error" in came.failure:
                        break
            if not offer.cursor:
                break
            cursor = offer.cursor
        return KvPulled(blocks=blocks, bytes=size, chains=chains, failure=failure)


def _discarded(kind: str) -> None:
    log.warning("what another node says of its KV cannot be read", kind=kind)
