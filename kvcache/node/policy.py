"""What a node's tiers go by: chains that are used, how hot spans are, what running chains of requests need (KVC-2, KVC-3).

A request is heard of twice: when it asks for its prompt (``asked``), and when it ended (``used``), then with its latency.
The first counts for the order of both tiers, which learns from whole chains; the second for hotness, chains of requests and
the hotness that nodes share over Redis.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from kvcache.core.chains import RequestGraph
from kvcache.core.eviction import EvictionOrder, EvictionSettings
from kvcache.core.holdings import Held, Holdings
from kvcache.core.hotness import HotnessTracker
from kvcache.core.identity import KvIdentity, blocks_per_span
from kvcache.core.index_buffer import SpanAccess
from kvcache.node.host_tier import HostBlock
from kvcache.node.models import KnownModels
from kvcache.node.settings import NodeSettings
from kvcache.wire.messages import KvUse
from subjects.ids import ModelHash
from subjects.messages import KvTier, SlaClass

if TYPE_CHECKING:
    from kvcache.shared.index import RedisIndex

GRAIN_TOKENS = 512
REQUESTS_MAX = 4096
"""Requests that asked and of which no end was heard yet."""
WEIGHTS = {SlaClass.GOLD: 2.0, SlaClass.SILVER: 1.0, SlaClass.BRONZE: 0.5, SlaClass.BATCH: 0.25}
"""What a hit is worth, by class of the request."""
SHARED_EVERY_S = 5.0
SHARED_SPANS_MAX = 512
"""Spans of which the shared hotness is asked at a time."""


class DiskOrder:
    """The order of the store, heard: who left the disk by itself is known here, so that no index goes on naming it.

    The store calls it under its own lock, from any thread; the node tells it of uses from its loop.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._order = _order(settings)
        self._lock = threading.Lock()
        self._gone: deque[bytes] = deque()

    def take_gone(self) -> list[bytes]:
        """Blocks that left since the last call; some may have come again."""
        gone: list[bytes] = []
        with suppress(IndexError):
            while True:
                gone.append(self._gone.popleft())
        return gone

    def used(self, units: Sequence[bytes], now_s: float, *, weight: float) -> None:
        """A request wants this chain."""
        with self._lock:
            self._order.used(units, now_s, weight=weight)

    def used_elsewhere(self, unit: bytes, last_access_s: float) -> None:
        """Another node's request did."""
        with self._lock:
            self._order.used_elsewhere(unit, last_access_s)

    def add(self, unit: bytes, parent: bytes, size_bytes: int, now_s: float) -> None:
        """See :class:`kvcache.core.shelf.Policy`, here and below."""
        with self._lock:
            self._order.add(unit, parent, size_bytes, now_s)

    def touch(self, unit: bytes, now_s: float) -> bool:
        """The store read or wrote it. A request's use is told by ``used``: counted twice it would seem popular."""
        return True

    def remove(self, unit: bytes) -> None:
        """It left."""
        self._gone.append(unit)
        with self._lock:
            self._order.remove(unit)

    def victims(self, bytes_min: int, now_s: float, keep: Callable[[bytes], bool] | None = None) -> list[bytes]:
        """Who makes room."""
        with self._lock:
            return self._order.victims(bytes_min, now_s, keep)

    def idle(self, now_s: float, units_max: int = 1000, keep: Callable[[bytes], bool] | None = None) -> list[bytes]:
        """Who was idle for too long."""
        with self._lock:
            return self._order.idle(now_s, units_max, keep)


class NodePolicy:
    """See the module. ``now_s`` is the node's monotonic clock, but for the disk, whose clock is the wall's."""

    def __init__(self, settings: NodeSettings, models: KnownModels) -> None:
        self.host_order = _order(settings)
        self.disk_order = DiskOrder(settings)
        self.hotness = HotnessTracker(settings.host_bytes_max)
        self.graph = RequestGraph()
        self.redis: RedisIndex | None = None
        self.holdings = Holdings()
        """Of the tiers that this policy is of."""
        self._models = models
        self._asked: OrderedDict[str, None] = OrderedDict()
        self._shared_s = 0.0
        self._shared_at = b""

    # ---- requests

    def asked(self, identity: KvIdentity, hashes: Sequence[bytes], use: KvUse, now_s: float) -> None:
        """A request wants this prompt, which it has not computed yet."""
        self._order(identity, hashes, use, now_s)
        if use.request:
            self._asked[use.request] = None
            if len(self._asked) > REQUESTS_MAX:
                self._asked.popitem(last=False)
        if use.chain_id and use.request:
            self.graph.began(use.chain_id, use.request, now_s)

    def used(self, identity: KvIdentity, hashes: Sequence[bytes], use: KvUse, now_s: float) -> None:
        """A request ended that used these blocks, of one chain from its first."""
        if use.request not in self._asked:
            self._order(identity, hashes, use, now_s)
        self._asked.pop(use.request, None)
        signature = identity.signature
        model = signature.model
        if use.latency_s > 0.0:
            self.hotness.took(model, use.latency_s)
        step = blocks_per_span(signature.block_size)
        size = step * signature.block_bytes
        prefix = identity.key
        spans: list[bytes] = []
        for end in range(step, len(hashes) + 1, step):
            span = prefix + hashes[end - 1]
            spans.append(span)
            self.hotness.accessed(span, model, size, now_s, high=use.sla_class is SlaClass.GOLD, test=use.test)
            for hash in hashes[end - step : end]:
                held = self.holdings.get(prefix + hash)
                if held is not None:
                    held.span = span
        if use.chain_id:
            self.graph.used(use.chain_id, spans, now_s)
            self.graph.ended(use.chain_id, use.request, now_s)
        if self.redis is not None:
            self._share(identity, spans, size, use)

    def _order(self, identity: KvIdentity, hashes: Sequence[bytes], use: KvUse, now_s: float) -> None:
        weight = 0.0 if use.test else WEIGHTS[use.sla_class]
        units = [identity.key + hash for hash in hashes]
        self.host_order.used(units, now_s, weight=weight)
        self.disk_order.used(units, time.time(), weight=weight)

    # ---- blocks that are to leave

    def pinned(self, block: HostBlock) -> bool:
        """Hot: stays in memory."""
        held = self.holdings.get(block.key)
        return held is not None and bool(held.span) and self.hotness.pinned(held.span, time.monotonic())

    def needed(self, block: HostBlock) -> bool:
        """A running chain of requests needs it: not dropped while it lies nowhere else."""
        held = self.holdings.get(block.key)
        return held is not None and bool(held.span) and self.graph.needs(held.span, time.monotonic())

    def cold(self, now_s: float) -> list[bytes]:
        """Keys of blocks whose spans became cold: they leave memory for the disk."""
        keys: list[bytes] = []
        for span in self.hotness.cooled(now_s):
            keys += (held.key for held in self._blocks_of(span))
        return keys

    def _blocks_of(self, span: bytes) -> Iterable[Held]:
        block = self.holdings.get(span)
        left = blocks_per_span(block.identity.signature.block_size) if block is not None else 0
        while block is not None and left:
            yield block
            left -= 1
            block = self.holdings.get(block.identity.key + block.parent) if block.parent else None

    # ---- hotness that nodes share

    def _share(self, identity: KvIdentity, spans: Sequence[bytes], size: int, use: KvUse) -> None:
        assert self.redis is not None
        at_s = time.time()
        for model_hash in self._models.hashes(identity):
            for span in spans:
                held = self.holdings.get(span)
                if held is not None:
                    self.redis.note(model_hash, held.hash, _access(held, size, at_s, use))

    def dropped(self, identity: KvIdentity, spans: Sequence[bytes]) -> None:
        """The node holds these spans no more."""
        for hash in spans:
            self.hotness.forget(identity.key + hash)
            if self.redis is not None:
                for model_hash in self._models.hashes(identity):
                    self.redis.dropped(model_hash, hash)

    def all_shared(self) -> Iterable[tuple[ModelHash, bytes, SpanAccess]]:
        """All spans that the node holds, for a server that lost them; resumed batch by batch."""
        ahead_s = time.time() - time.monotonic()
        for key in self.holdings.told_keys():
            held = self.holdings.get(key)
            if held is None:
                continue
            size = blocks_per_span(held.identity.signature.block_size) * held.size
            at_s = held.used_s + ahead_s if held.used_s else time.time() - 3600.0
            for model_hash in self._models.hashes(held.identity):
                yield model_hash, held.hash, _access(held, size, at_s, KvUse())

    async def hear_others(self, now_s: float) -> None:
        """Every few seconds: when others used some of our spans last, off every request's way."""
        if self.redis is None or now_s - self._shared_s < SHARED_EVERY_S:
            return
        self._shared_s = now_s
        keys, self._shared_at = self.holdings.told_page(self._shared_at, SHARED_SPANS_MAX)
        wanted: dict[ModelHash, list[Held]] = {}
        for key in keys:
            held = self.holdings.get(key)
            if held is not None:
                for model_hash in self._models.hashes(held.identity):
                    wanted.setdefault(model_hash, []).append(held)
        ahead_s = time.time() - now_s
        for model_hash, some in wanted.items():
            found = await self.redis.last_access(model_hash, [held.hash for held in some])
            for held in some:
                at_s = found.get(held.hash)
                if at_s is None or at_s - ahead_s <= held.used_s:
                    continue
                self.hotness.accessed_elsewhere(held.key, at_s - ahead_s)
                for one in list(self._blocks_of(held.key)):
                    self.host_order.used_elsewhere(one.key, at_s - ahead_s)
                    self.disk_order.used_elsewhere(one.key, at_s)


def _access(held: Held, size: int, at_s: float, use: KvUse) -> SpanAccess:
    return SpanAccess(
        at_unix_s=at_s,
        size_bytes=size,
        tier=KvTier.HOST if held.host else KvTier.DISK,
        request=use.request,
        tenant=use.tenant,
        sla_class=use.sla_class,
    )


def _order(settings: NodeSettings) -> EvictionOrder:
    return EvictionOrder(
        EvictionSettings(young_s=settings.hot_s, idle_s_max=settings.idle_s_max, grain_units=GRAIN_TOKENS // 32)
    )
