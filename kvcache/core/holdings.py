"""What one node holds, block by block and span by span, and which spans to tell the index of.

A span is told of when all blocks of it are here, and no more as soon as one is not (KVC-2: members are spans, never pages).
Which span a block belongs to follows from its depth; where that is not known (its parent is not here and the engine did not
say), the block is held and found by its hash, but no index hears of it.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from kvcache.core.identity import KvIdentity, KvSignature, blocks_per_span
from subjects.ids import ReplicaId
from subjects.messages import KvSpan, KvTier

CHAIN_BLOCKS_MAX = 8192
"""A longer chain is not followed: 256K tokens in blocks of 32."""


@dataclass(slots=True, eq=False)
class Held:
    """One block. ``depth`` counts blocks from the start of the prompt to its end; 0: not known."""

    identity: KvIdentity
    hash: bytes
    parent: bytes
    depth: int
    size: int
    host: bool = False
    disk: bool = False
    used_s: float = 0.0
    replica: ReplicaId | None = None
    """Whose engine wrote or read it last."""
    span: bytes = b""
    """Key of the span that it was used in last, for hotness."""
    children: list[bytes] = field(default_factory=list)

    @property
    def key(self) -> bytes:
        """Of the block in all tables of a node."""
        return self.identity.key + self.hash


def coldest(blocks: Sequence[Held], ratio: float) -> list[Held]:
    """This share of the blocks, those used longest ago first, of one moment the last of a chain first."""
    count = len(blocks) if ratio >= 1.0 else round(len(blocks) * max(0.0, ratio))
    return heapq.nsmallest(count, blocks, key=lambda block: (block.used_s, -block.depth, block.key))


class SpanNews(msgspec.Struct, frozen=True):
    """What changed of one identity's spans."""

    identity: KvIdentity
    held: tuple[KvSpan, ...]
    dropped: tuple[bytes, ...]


class Holdings:
    """All blocks of one node, in either tier."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, Held] = {}
        self._orphans: dict[bytes, list[bytes]] = {}
        """Blocks that came before their parents, by the parent's key."""
        self._doubtful: dict[bytes, tuple[KvIdentity, bytes]] = {}
        """Last blocks of spans that may have changed since the last news."""
        self._told: dict[bytes, tuple[KvIdentity, KvSpan]] = {}
        self._sorted: list[bytes] | None = None
        self.gone: dict[str, int] = {}
        """Blocks that left the last tier that had them, by ``KvSignature.model``."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._blocks.values())

    def get(self, key: bytes) -> Held | None:
        """A block by identity and hash."""
        return self._blocks.get(key)

    # ---- what comes and goes

    def came(
        self,
        identity: KvIdentity,
        hash: bytes,
        parent: bytes,
        *,
        tier: KvTier,
        size: int,
        now_s: float,
        depth: int = 0,
        replica: ReplicaId | None = None,
    ) -> Held:
        """A block is in ``tier`` now (``HOST`` or ``DISK``), maybe beside the other."""
        key = identity.key + hash
        block = self._blocks.get(key)
        if block is None:
            block = self._new(identity, hash, parent, depth, size)
        elif depth and not block.depth:
            block.depth = depth
            self._deepen(block)
        block.host |= tier is KvTier.HOST
        block.disk |= tier is KvTier.DISK
        block.used_s = max(block.used_s, now_s)
        block.replica = replica or block.replica
        self._doubt(block)
        return block

    def left(self, key: bytes, tier: KvTier) -> None:
        """A block is no longer in ``tier``; unknown ones are ignored."""
        block = self._blocks.get(key)
        if block is None:
            return
        self._doubt(block)
        if tier is KvTier.HOST:
            block.host = False
        else:
            block.disk = False
        if block.host or block.disk:
            return
        del self._blocks[key]
        model = block.identity.signature.model
        self.gone[model] = self.gone.get(model, 0) + 1
        prefix = block.identity.key
        parent = self._blocks.get(prefix + block.parent) if block.parent else None
        if parent is not None:
            parent.children.remove(block.hash)
        elif block.parent:
            self._unorphan(prefix + block.parent, block.hash)
        if block.children:
            self._orphans[key] = block.children

    def used(self, key: bytes, now_s: float, replica: ReplicaId | None = None) -> Held | None:
        """A request uses the block, at an engine that has it in its own cache from now on."""
        block = self._blocks.get(key)
        if block is not None:
            block.used_s = max(block.used_s, now_s)
            if replica is not None and replica != block.replica:
                block.replica = replica
                if block.depth and not block.depth % blocks_per_span(block.identity.signature.block_size):
                    self._doubtful[key] = (block.identity, block.hash)
        return block

    def emptied(self, replica: ReplicaId) -> None:
        """An engine's own cache is empty. Those who listen are told by name: nothing is news because of it."""
        for block in self._blocks.values():
            if block.replica == replica:
                block.replica = None
        for key, (identity, span) in list(self._told.items()):
            if span.replica == replica:
                self._told[key] = (identity, KvSpan(span=span.span, depth=span.depth, tier=span.tier))

    # ---- chains

    def leading(self, identity: KvIdentity, hashes: Sequence[bytes]) -> int:
        """How many of these blocks are here, from the first on."""
        prefix, blocks = identity.key, self._blocks
        count = 0
        for hash in hashes:
            if prefix + hash not in blocks:
                break
            count += 1
        return count

    def chain(self, identity_key: bytes, head: bytes, blocks_max: int = CHAIN_BLOCKS_MAX) -> list[Held]:
        """The blocks from the first of the prompt to ``head``; empty where one is not here or there are too many."""
        found: list[Held] = []
        block = self._blocks.get(identity_key + head)
        while block is not None and len(found) < blocks_max:
            found.append(block)
            if not block.parent:
                found.reverse()
                return found
            block = self._blocks.get(identity_key + block.parent)
        return []

    def heads(self, model: str) -> list[bytes]:
        """Keys of the last blocks of all chains of a model (``KvSignature.model``), in their order."""
        return sorted(
            key for key, block in self._blocks.items() if not block.children and block.identity.signature.model == model
        )

    def of_model(self, model: str) -> list[Held]:
        """All blocks of a model (``KvSignature.model``)."""
        return [block for block in self._blocks.values() if block.identity.signature.model == model]

    # ---- the index

    def news(self, spans_max: int) -> list[SpanNews]:
        """What changed since the last call, at most so many spans; the rest comes with the next call."""
        held: dict[bytes, list[KvSpan]] = {}
        dropped: dict[bytes, list[bytes]] = {}
        identities: dict[bytes, KvIdentity] = {}
        for key in list(self._doubtful)[:spans_max]:
            identity, hash = self._doubtful.pop(key)
            before = self._told.get(key)
            now = self._span(key)
            if now is None:
                if before is not None:
                    del self._told[key]
                    self._sorted = None
                    dropped.setdefault(identity.key, []).append(hash)
                    identities[identity.key] = identity
            elif before is None or before[1] != now:
                if before is None:
                    self._sorted = None
                self._told[key] = (identity, now)
                held.setdefault(identity.key, []).append(now)
                identities[identity.key] = identity
        return [
            SpanNews(identity, tuple(held.get(key, ())), tuple(dropped.get(key, ()))) for key, identity in identities.items()
        ]

    def told(self, cursor: bytes, spans_max: int) -> tuple[list[SpanNews], bytes]:
        """What the index was told and still holds: a page after ``cursor``, and the cursor of the next, empty at the end."""
        page, after = self.told_page(cursor, spans_max)
        spans: dict[bytes, list[KvSpan]] = {}
        identities: dict[bytes, KvIdentity] = {}
        for key in page:
            identity, span = self._told[key]
            identities[identity.key] = identity
            spans.setdefault(identity.key, []).append(span)
        news = [SpanNews(identity, tuple(spans[key]), ()) for key, identity in identities.items()]
        return news, after

    def told_page(self, cursor: bytes, spans_max: int) -> tuple[list[bytes], bytes]:
        """Keys of spans that were told, a page after ``cursor``, and the cursor of the next, empty at the end."""
        if self._sorted is None:
            self._sorted = sorted(self._told)
        start = bisect.bisect_right(self._sorted, cursor) if cursor else 0
        page = self._sorted[start : start + spans_max]
        return page, page[-1] if len(page) == spans_max else b""

    def told_keys(self) -> list[bytes]:
        """Keys of all spans that were told."""
        return list(self._told)

    def tell_again(self, weights_hash: str, signature: KvSignature) -> None:
        """All spans of these weights in this layout are news again: by now it is known which models they are of."""
        for key, (identity, span) in list(self._told.items()):
            if identity.weights_hash == weights_hash and identity.signature == signature:
                del self._told[key]
                self._sorted = None
                self._doubtful[key] = (identity, span.span)

    # ---- inner

    def _new(self, identity: KvIdentity, hash: bytes, parent: bytes, depth: int, size: int) -> Held:
        prefix = identity.key
        key = prefix + hash
        before = self._blocks.get(prefix + parent) if parent else None
        if not parent:
            depth = 1
        elif before is not None and before.depth:
            depth = before.depth + 1
        # The parent's own object, so that a hash is in memory once.
        block = Held(identity, hash, before.hash if before is not None else parent, depth, size)
        self._blocks[key] = block
        if before is not None:
            before.children.append(hash)
        elif parent:
            self._orphans.setdefault(prefix + parent, []).append(hash)
        block.children = self._orphans.pop(key, [])
        self._deepen(block)
        return block

    def _deepen(self, block: Held) -> None:
        waiting = [block] if block.depth else []
        while waiting:
            parent = waiting.pop()
            for hash in parent.children:
                child = self._blocks[parent.identity.key + hash]
                if not child.depth:
                    child.depth = parent.depth + 1
                    waiting.append(child)
                    self._doubt(child)

    def _unorphan(self, parent_key: bytes, hash: bytes) -> None:
        siblings = self._orphans.get(parent_key)
        if siblings is not None:
            siblings.remove(hash)
            if not siblings:
                del self._orphans[parent_key]

    def _doubt(self, block: Held) -> None:
        """The spans that this block is part of have to be looked at again: those that end at it or at its descendants."""
        if not block.depth:
            return
        step = blocks_per_span(block.identity.signature.block_size)
        prefix = block.identity.key
        waiting: list[Held] = [block]
        while waiting:
            one = waiting.pop()
            if one.depth % step == 0:
                self._doubtful[prefix + one.hash] = (one.identity, one.hash)
                continue
            # Only deeper ones: an engine that names its blocks in a circle must not keep us here.
            children = [self._blocks[prefix + hash] for hash in one.children]
            waiting.extend(child for child in children if child.depth > one.depth)

    def _span(self, key: bytes) -> KvSpan | None:
        last = self._blocks.get(key)
        if last is None or not last.depth:
            return None
        step = blocks_per_span(last.identity.signature.block_size)
        if last.depth % step:
            return None
        host = True
        block: Held | None = last
        for _ in range(step):
            if block is None:
                return None
            host = host and block.host
            block = self._blocks.get(last.identity.key + block.parent) if block.parent else None
        return KvSpan(span=last.hash, depth=last.depth, tier=KvTier.HOST if host else KvTier.DISK, replica=last.replica)
