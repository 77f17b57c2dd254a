"""What the store on disk knows without touching it: blocks by hash, who was used least recently, what may be written a day.

Pure: no IO, no clock. A *place* is where a block lies (for the store a segment, here anything); its slots are pages.
Look-ups, insertions, uses and removals are O(1). A block of 12 pages costs 450 bytes of memory (CPython 3.11), a terabyte of
blocks of 720 KiB so 0.6 GB.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from kvcache.core.identity import PAGE_BYTES, KvIdentity

DAY_S = 86_400.0

P = TypeVar("P")


class Block(Generic[P]):
    """One block on the shelf. Its hash and that of its parent are 16 bytes each; the parent of a first block is ``b""``."""

    __slots__ = ("checksums", "first_slot", "hash", "owner", "parent", "payload_bytes", "place", "used_s")

    def __init__(
        self,
        owner: Owner[P],
        hash: bytes,
        parent: bytes,
        place: P,
        first_slot: int,
        payload_bytes: int,
        checksums: bytes,
        used_s: float,
    ) -> None:
        self.owner = owner
        self.hash = hash
        self.parent = parent
        self.place = place
        self.first_slot = first_slot
        self.payload_bytes = payload_bytes
        """Of the block as it is stored, encoded or not."""
        self.checksums = checksums
        """Of its pages."""
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


class Policy(Protocol):
    """Who else may decide the order of eviction (``core.eviction``). A unit is one block: ``unit_of`` names it."""

    def add(self, unit: bytes, parent: bytes, size_bytes: int, now_s: float) -> None: ...

    def touch(self, unit: bytes, now_s: float) -> bool:
        """Of blocks used together, those that come first in the chain are touched first."""

    def remove(self, unit: bytes) -> None: ...

    def victims(self, bytes_min: int, now_s: float, keep: Callable[[bytes], bool] | None = None) -> list[bytes]:
        """Units that go to make room, first to go first, none that ``keep`` names; it has forgotten them then."""

    def idle(self, now_s: float, units_max: int = 1000, keep: Callable[[bytes], bool] | None = None) -> list[bytes]:
        """Units that were idle for too long; it has forgotten them then."""


def pages_of(payload_bytes: int) -> int:
    """Pages that so many bytes take; at least one."""
    return max(1, -(-payload_bytes // PAGE_BYTES))


def unit_of(identity: KvIdentity, hash: bytes) -> bytes:
    """The name of a block in a ``Policy``: 32 bytes, or none for no block."""
    return identity.key + hash if hash else b""


class Rules(msgspec.Struct, frozen=True):
    """KVC-1: a block touched in the last ``hot_s`` is never evicted to make room; one idle for ``idle_s_max`` leaves."""

    hot_s: float = 30.0
    idle_s_max: float = 600.0


class Shelf(Generic[P]):
    """Blocks by identity and hash, and the order of their use.

    Of blocks used together the later ones of a chain count as used earlier, so that a chain is lost from its end: what is
    left of it is still a prefix.
    """

    def __init__(self, rules: Rules, policy: Policy | None = None) -> None:
        """Without a ``policy``, the least recently used goes first."""
        self.rules = rules
        self._policy = policy
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
        """From the earliest ancestor of ``head`` that is here without a gap, to ``head``; empty without ``head``."""
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
        self,
        identity: KvIdentity,
        hash: bytes,
        parent: bytes,
        place: P,
        first_slot: int,
        payload_bytes: int,
        checksums: bytes,
        used_s: float,
    ) -> Block[P]:
        """As the most recently used. The hash is not here yet."""
        key = identity.key
        owner = self._owners.get(key)
        if owner is None:
            owner = self._owners[key] = Owner(identity)
        assert hash not in owner.blocks
        before = owner.blocks.get(parent)
        # The parent's own object, so that a hash is in memory once.
        parent = before.hash if before else parent
        block = Block(owner, hash, parent, place, first_slot, payload_bytes, checksums, used_s)
        owner.blocks[hash] = block
        self._recency[block] = None
        owner.stored_bytes += block.stored_bytes
        self.stored_bytes += block.stored_bytes
        if self._policy:
            self._policy.add(unit_of(identity, hash), unit_of(identity, parent), block.stored_bytes, used_s)
        return block

    def use(self, blocks: Sequence[Block[P]], now_s: float) -> None:
        """Blocks of one chain, in its order, are used now."""
        for block in reversed(blocks):
            if self.holds(block):
                block.used_s = max(block.used_s, now_s)
                self._recency.move_to_end(block)
        if self._policy:
            for block in blocks:
                if self.holds(block):
                    self._policy.touch(unit_of(block.identity, block.hash), now_s)

    def holds(self, block: Block[P]) -> bool:
        """Whether exactly this one is still here."""
        return block in self._recency

    def remove(self, block: Block[P]) -> bool:
        """``False`` where it had gone already."""
        if block not in self._recency:
            return False
        del self._recency[block]
        owner = block.owner
        if self._policy:
            self._policy.remove(unit_of(owner.identity, block.hash))
        del owner.blocks[block.hash]
        owner.stored_bytes -= block.stored_bytes
        self.stored_bytes -= block.stored_bytes
        if not owner.blocks:
            del self._owners[owner.identity.key]
        return True

    def is_hot(self, block: Block[P], now_s: float) -> bool:
        return now_s - block.used_s < self.rules.hot_s

    def victims(self, bytes_min: int, now_s: float) -> list[Block[P]]:
        """Who goes to make room of at least so much, first to go first, none of them hot; fewer where there are no more.

        Their cost is that of those found. They are still here: who is not removed must be told by ``keep``.
        """
        found: list[Block[P]] = []
        room = 0
        for block in self._going(bytes_min, now_s):
            if room >= bytes_min or self.is_hot(block, now_s):
                break
            found.append(block)
            room += block.stored_bytes
        return found

    def _going(self, bytes_min: int, now_s: float) -> Iterable[Block[P]]:
        if self._policy is None:
            return self._recency
        found = (
            self._by_unit(unit) for unit in self._policy.victims(bytes_min, now_s, lambda unit: self._stays(unit, now_s))
        )
        return [block for block in found if block]

    def keep(self, blocks: Sequence[Block[P]]) -> None:
        """These ``victims`` stay after all."""
        if self._policy:
            for block in blocks:
                unit, parent = unit_of(block.identity, block.hash), unit_of(block.identity, block.parent)
                self._policy.add(unit, parent, block.stored_bytes, block.used_s)

    def idle(self, now_s: float, blocks_max: int) -> list[Block[P]]:
        """Blocks that nobody used for ``idle_s_max``, at most ``blocks_max``. To be removed, as ``victims``."""
        if self._policy:
            found = (self._by_unit(unit) for unit in self._policy.idle(now_s, blocks_max))
            return [block for block in found if block]
        idle: list[Block[P]] = []
        for block in self._recency:
            if now_s - block.used_s <= self.rules.idle_s_max or len(idle) >= blocks_max:
                break
            idle.append(block)
        return idle

    def _by_unit(self, unit: bytes) -> Block[P] | None:
        owner = self._owners.get(unit[:16])
        return owner.blocks.get(unit[16:]) if owner else None

    def _stays(self, unit: bytes, now_s: float) -> bool:
        block = self._by_unit(unit)
        return block is None or self.is_hot(block, now_s)

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
