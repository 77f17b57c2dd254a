"""What the store on disk knows without touching it: blocks by hash, who was used least recently, what may be written a day.

Pure: no IO, no clock. A *place* is where a block lies (for the store a segment, here anything); its slots are pages.
Look-ups, insertions, uses and removals are O(1). A block costs about 0.4 KiB of memory (measured in the tests), 0.06 % of one
of 720 KiB.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcache.core.identity import PAGE_BYTES, KvIdentity

CANDIDATES_MAX = 256
"""Blocks shown at a time to the function that orders candidates for eviction."""
DAY_S = 86_400.0

P = TypeVar("P")


class Block(Generic[P]):
    """One block on the shelf. Its hash and that of its parent are 16 bytes each; the parent of a first block is ``b""``."""

    __slots__ = ("first_slot", "hash", "owner", "parent", "payload_bytes", "place", "used_s")

    def __init__(
        self, owner: Owner[P], hash: bytes, parent: bytes, place: P, first_slot: int, payload_bytes: int, used_s: float
    ) -> None:
        self.owner = owner
        self.hash = hash
        self.parent = parent
        self.place = place
        self.first_slot = first_slot
        self.payload_bytes = payload_bytes
        """Of the block as it is stored, encoded or not."""
        self.used_s = used_s

    @property
    def pages(self) -> int:
        return pages_of(self.payload_bytes)

    @property
    def stored_bytes(self) -> int:
        """Room that its pages take."""
        return self.pages * PAGE_BYTES

    @property
    def identity(self) -> KvIdentity:
        return self.owner.identity


class Owner(Generic[P]):
    """All blocks of one identity."""

    __slots__ = ("blocks", "identity", "stored_bytes")

    def __init__(self, identity: KvIdentity) -> None:
        self.identity = identity
        self.blocks: dict[bytes, Block[P]] = {}
        self.stored_bytes = 0


Order = Callable[[Sequence[Block[P]], float], Iterable[Block[P]]]
"""Candidates (least recently used first, none of them hot) and the time now, to those that may leave, first to go first.
One that is left out stays. It must not change them."""


def pages_of(payload_bytes: int) -> int:
    """Pages that so many bytes take; at least one."""
    return max(1, -(-payload_bytes // PAGE_BYTES))


def least_recent_first(candidates: Sequence[Block[P]], now_s: float) -> Iterable[Block[P]]:
    """The order of LRU."""
    return candidates


@dataclass(frozen=True, slots=True)
class Rules:
    """KVC-1: a block touched in the last ``hot_s`` is never evicted to make room; one idle for ``idle_s_max`` leaves."""

    hot_s: float = 30.0
    idle_s_max: float = 600.0


class Shelf(Generic[P]):
    """Blocks by identity and hash, and the order of their use.

    Of blocks used together the later ones of a chain count as used earlier, so that a chain is lost from its end: what is
    left of it is still a prefix.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._owners: dict[bytes, Owner[P]] = {}
        self._recency: OrderedDict[Block[P], None] = OrderedDict()
        self.stored_bytes = 0

    def __len__(self) -> int:
        return len(self._recency)

    def __iter__(self) -> Iterator[Block[P]]:
        """Least recently used first."""
        return iter(self._recency)

    def owners(self) -> Iterable[Owner[P]]:
        """In the order in which their first block came."""
        return self._owners.values()

    def find(self, identity: KvIdentity, hash: bytes) -> Block[P] | None:
        owner = self._owners.get(identity.key)
        return owner.blocks.get(hash) if owner else None

    def leading(self, identity: KvIdentity, hashes: Sequence[bytes]) -> list[Block[P]]:
        """The blocks from the first hash on, up to the first that is not here."""
        owner = self._owners.get(identity.key)
        if owner is None:
            return []
        found: list[Block[P]] = []
        for hash in hashes:
            block = owner.blocks.get(hash)
            if block is None:
                break
            found.append(block)
        return found

    def chain(self, identity: KvIdentity, head: bytes) -> list[bytes]:
        """From the earliest ancestor of ``head`` that is here without a gap, to ``head``; empty where ``head`` is not here."""
        owner = self._owners.get(identity.key)
        hashes: list[bytes] = []
        if owner is None:
            return hashes
        block = owner.blocks.get(head)
        while block is not None and len(hashes) <= len(owner.blocks):
            hashes.append(block.hash)
            block = owner.blocks.get(block.parent)
        if len(hashes) > len(owner.blocks):  # parents in a circle, which no writer of ours makes
            return []
        hashes.reverse()
        return hashes

    def add(
        self, identity: KvIdentity, hash: bytes, parent: bytes, place: P, first_slot: int, payload_bytes: int, used_s: float
    ) -> Block[P]:
        """As the most recently used. The hash is not here yet."""
        key = identity.key
        owner = self._owners.get(key)
        if owner is None:
            owner = self._owners[key] = Owner(identity)
        assert hash not in owner.blocks
        before = owner.blocks.get(parent)
        # The parent's own object, so that a hash is in memory once.
        block = Block(owner, hash, before.hash if before else parent, place, first_slot, payload_bytes, used_s)
        owner.blocks[hash] = block
        self._recency[block] = None
        owner.stored_bytes += block.stored_bytes
        self.stored_bytes += block.stored_bytes
        return block

    def use(self, blocks: Sequence[Block[P]], now_s: float) -> None:
        """Blocks of one chain, in its order, are used now."""
        for block in reversed(blocks):
            if self.holds(block):
                block.used_s = max(block.used_s, now_s)
                self._recency.move_to_end(block)

    def holds(self, block: Block[P]) -> bool:
        """Whether exactly this one is still here."""
        return block in self._recency

    def remove(self, block: Block[P]) -> bool:
        """``False`` where it had gone already."""
        if block not in self._recency:
            return False
        del self._recency[block]
        owner = block.owner
        del owner.blocks[block.hash]
        owner.stored_bytes -= block.stored_bytes
        self.stored_bytes -= block.stored_bytes
        if not owner.blocks:
            del self._owners[owner.identity.key]
        return True

    def is_hot(self, block: Block[P], now_s: float) -> bool:
        return now_s - block.used_s < self.rules.hot_s

    def victims(self, now_s: float, order: Order[P]) -> Iterator[Block[P]]:
        """Who goes to make room, first to go first; at most ``CANDIDATES_MAX``, so that the cost has a bound. None is hot."""
        candidates = [block for block in itertools.islice(self._recency, CANDIDATES_MAX) if not self.is_hot(block, now_s)]
        for block in order(candidates, now_s):
            if self.holds(block) and not self.is_hot(block, now_s):
                yield block

    def idle(self, now_s: float, blocks_max: int) -> list[Block[P]]:
        """Blocks that nobody used for ``idle_s_max``, longest first, at most ``blocks_max``."""
        found: list[Block[P]] = []
        for block in itertools.islice(self._recency, blocks_max):
            if now_s - block.used_s <= self.rules.idle_s_max:
                break
            found.append(block)
        return found

    def share(self, model: str, ratio: float) -> list[Block[P]]:
        """The least recently used blocks of one model (``KvSignature.model``) that make up ``ratio`` of its bytes.

        Exact to a block: without the last of them it would be less than asked.
        """
        mine = [owner for owner in self._owners.values() if owner.identity.signature.model == model]
        wanted = min(1.0, max(0.0, ratio)) * sum(owner.stored_bytes for owner in mine)
        found: list[Block[P]] = []
        taken = 0
        if not mine:
            return found
        for block in self._recency:
            if taken >= wanted:
                break
            if block.owner.identity.signature.model == model:
                found.append(block)
                taken += block.stored_bytes
        return found


@dataclass(slots=True)
class WriteBudget:
    """A token bucket of bytes: it holds one day's share at most and fills evenly.

    ``bytes_per_day_max`` of ``None`` is no limit. ``left`` is what may be written at ``at_s``.
    """

    bytes_per_day_max: int | None
    left: float
    at_s: float

    @classmethod
    def full(cls, bytes_per_day_max: int | None, now_s: float) -> WriteBudget:
        return cls(bytes_per_day_max, float(bytes_per_day_max or 0), now_s)

    def refill(self, now_s: float) -> None:
        """A clock that went back refills nothing."""
        if self.bytes_per_day_max is None:
            return
        gone_s = max(0.0, now_s - self.at_s)
        self.left = min(float(self.bytes_per_day_max), self.left + gone_s * self.bytes_per_day_max / DAY_S)
        self.at_s = now_s

    def take(self, wanted_bytes: int, now_s: float) -> bool:
        """Whether so much may be written now; it then counts as written."""
        if self.bytes_per_day_max is None:
            return True
        self.refill(now_s)
        if wanted_bytes > self.left:
            return False
        self.left -= wanted_bytes
        return True

    def give_back(self, unused_bytes: int) -> None:
        """What was taken and not written after all."""
        if self.bytes_per_day_max is not None:
            self.left = min(float(self.bytes_per_day_max), self.left + unused_bytes)
