"""Which share of a trace's blocks each order of eviction finds again, in a tier of 1, 5 and 20 % of its distinct blocks.

A block is a hit when it and all before it are there, as an engine can use it. Each request is looked up whole; then its
blocks come in, and victims go until the rest fits: so a rule may refuse what has just come. All rules evict leaves first.

``belady`` evicts the block whose next use is farthest, the deepest first. It is the most that any rule can reach here: as
blocks have one size, evicting the farthest (with the choice of refusing) has the most hits of single blocks (Belady 1966;
Mattson et al. 1970); prefix hits are never more than those; and since a block is never used without its parents, theirs is
never the farther use, so that no hit of it lacks its prefix.
"""

from __future__ import annotations

import asyncio
import gzip
import heapq
import lzma
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvcache.core.eviction import EvictionOrder, EvictionSettings
from ops.bench.kv import KvBench
from subjects.errors import ConfigError

TRACE = Path(__file__).parent / "data" / "mooncake-conversation.jsonl.xz"
SHARES = (0.01, 0.05, 0.2)
_TIMELESS = EvictionSettings(young_s=0.0, idle_s_max=math.inf)
Score = tuple[float, ...]


class _Line(msgspec.Struct):
    timestamp: float
    """Milliseconds."""
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class Replayed:
    """One request of a trace."""

    time_s: float
    blocks: list[bytes]
    """From the start of the prompt on."""


@dataclass(frozen=True, slots=True)
class Hits:
    """Of all requests, and of those after the first half, for which rules have had the time to learn."""

    ratio: float
    late_ratio: float


class Rule(Protocol):
    """A tier of bounded size."""

    def request(self, number: int, now_s: float, blocks: Sequence[bytes]) -> int:
        """Looks the blocks up, keeps what the rule keeps; how many of the first were there."""


class Ours:
    """The order that nodes use; units are the trace's blocks."""

    def __init__(self, blocks_max: int, settings: EvictionSettings = _TIMELESS) -> None:
        self._blocks_max = blocks_max
        self.order = EvictionOrder(settings)

    def request(self, number: int, now_s: float, blocks: Sequence[bytes]) -> int:
        """See ``Rule``. What was idle for too long goes before the look-up."""
        order = self.order
        while order.idle(now_s):
            pass
        hits = order.used(blocks, now_s)
        parent = b""
        for block in blocks:
            if block not in order:
                order.add(block, parent, 1, now_s)
            parent = block
        if order.bytes_held > self._blocks_max:
            order.victims(order.bytes_held - self._blocks_max, now_s)
        return hits


class Scored:
    """Leaves with the lowest score first; a block is scored when it is used, and of equals the deepest goes first."""

    def __init__(self, blocks_max: int, score: Callable[[int, int, bytes, float], Score]) -> None:
        """``score`` of request number, depth, block, and what the last victim scored first."""
        self._blocks_max = blocks_max
        self._score = score
        self._scores: dict[bytes, tuple[Score, int]] = {}
        self._parents: dict[bytes, bytes] = {}
        self._children: dict[bytes, int] = {}
        self._leaves: list[tuple[Score, int, bytes]] = []
        self._floor = 0.0

    def request(self, number: int, now_s: float, blocks: Sequence[bytes]) -> int:
        """See ``Rule``."""
        hits = next((depth for depth, block in enumerate(blocks) if block not in self._scores), len(blocks))
        parent = b""
        for depth, block in enumerate(blocks):
            if block not in self._scores:
                self._parents[block] = parent
                self._children[parent] = self._children.get(parent, 0) + 1
            self._scores[block] = (self._score(number, depth, block, self._floor), -depth)
            self._leaf(block)
            parent = block
        while len(self._scores) > self._blocks_max:
            *scored, block = heapq.heappop(self._leaves)
            if self._children.get(block) or self._scores.get(block) != tuple(scored):
                continue
            self._floor = self._scores.pop(block)[0][0]
            parent = self._parents.pop(block)
            self._children[parent] -= 1
            self._leaf(parent)
        return hits

    def _leaf(self, block: bytes) -> None:
        if not self._children.get(block) and block in self._scores:
            heapq.heappush(self._leaves, (*self._scores[block], block))


def read_trace(path: Path) -> list[Replayed]:
    """Requests in the order of the file.

    Raises:
        ConfigError: there is no such file, or a line of it is not of Mooncake's form.
    """
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    decode = msgspec.json.Decoder(_Line).decode
    requests = []
    try:
        with openers.get(path.suffix, open)(path, "rb") as lines:
            for line in lines:
                read = decode(line)
                blocks = list(dict.fromkeys(one.to_bytes(8, "big") for one in read.hash_ids))
                requests.append(Replayed(read.timestamp / 1000.0, blocks))
    except (OSError, EOFError, lzma.LZMAError, msgspec.MsgspecError, OverflowError) as problem:
        raise ConfigError(f"trace {path}: {problem}") from problem
    if not requests:
        raise ConfigError(f"trace {path}: no requests in it")
    return requests


def distinct(requests: Sequence[Replayed]) -> int:
    """The working set: how many blocks there are."""
    return len({block for request in requests for block in request.blocks})


def replay(requests: Sequence[Replayed], rule: Rule) -> Hits:
    """Shares of all blocks asked for."""
    half = len(requests) // 2
    hits = [rule.request(number, request.time_s, request.blocks) for number, request in enumerate(requests)]
    blocks = [len(request.blocks) for request in requests]
    return Hits(sum(hits) / max(1, sum(blocks)), sum(hits[half:]) / max(1, sum(blocks[half:])))


def lru(blocks_max: int) -> Scored:
    """The longest unused first."""
    return Scored(blocks_max, lambda number, depth, block, floor: (number,))


def lfu(blocks_max: int) -> Scored:
    """The one with the fewest uses so far first, those while it was not there included; of equals the longest unused."""
    uses: dict[bytes, int] = {}

    def score(number: int, depth: int, block: bytes, floor: float) -> Score:
        uses[block] = uses.get(block, 0) + 1
        return uses[block], number

    return Scored(blocks_max, score)


def lfu_ageing(blocks_max: int) -> Scored:
    """Uses so far, plus what the last victim scored (dynamic ageing: Arlitt et al. 2000)."""
    uses: dict[bytes, int] = {}

    def score(number: int, depth: int, block: bytes, floor: float) -> Score:
        uses[block] = uses.get(block, 0) + 1
        return floor + uses[block], number

    return Scored(blocks_max, score)


def again(blocks_max: int) -> Scored:
    """Those that were used once before those that were used again; the longest unused first (two queues, as in 2Q)."""
    seen: set[bytes] = set()

    def score(number: int, depth: int, block: bytes, floor: float) -> Score:
        before = block in seen
        seen.add(block)
        return float(before), number

    return Scored(blocks_max, score)


def belady(requests: Sequence[Replayed], blocks_max: int) -> Scored:
    """The farthest next use first."""
    following: dict[bytes, int] = {}
    uses: list[list[float]] = []
    for number in range(len(requests) - 1, -1, -1):
        blocks = requests[number].blocks
        uses.append([following.get(block, math.inf) for block in blocks])
        following.update(dict.fromkeys(blocks, number))
    uses.reverse()
    return Scored(blocks_max, lambda number, depth, block, floor: (-uses[number][depth],))


def compare(requests: Sequence[Replayed], share: float) -> dict[str, Hits]:
    """All rules in a tier of that share of the working set."""
    blocks_max = max(1, int(share * distinct(requests)))
    return {
        "ours": replay(requests, Ours(blocks_max)),
        "lru": replay(requests, lru(blocks_max)),
        "lfu": replay(requests, lfu(blocks_max)),
        "lfu_ageing": replay(requests, lfu_ageing(blocks_max)),
        "again": replay(requests, again(blocks_max)),
        "belady": replay(requests, belady(requests, blocks_max)),
    }


def replayed(requests: Sequence[Replayed], say: Callable[[str], None]) -> dict[str, Any]:
    """The figures of ``measure``."""
    blocks = distinct(requests)
    unlimited = replay(requests, lru(blocks))
    sizes: dict[str, Any] = {}
    for share in SHARES:
        blocks_max = max(1, int(share * blocks))
        hits = compare(requests, share)
        rules = {
            "young_30_s": EvictionSettings(idle_s_max=math.inf),
            "idle_600_s": EvictionSettings(young_s=0.0),
            "both": EvictionSettings(),
        }
        sizes[f"{share:.0%}"] = {
            "blocks": blocks_max,
            "all": {name: round(one.ratio, 4) for name, one in hits.items()},
            "second_half": {name: round(one.late_ratio, 4) for name, one in hits.items()},
            "ours_with_rules_of_time": {
                name: round(replay(requests, Ours(blocks_max, settings)).ratio, 4) for name, settings in rules.items()
            },
            "lru_to_belady": round((hits["ours"].ratio - hits["lru"].ratio) / (hits["belady"].ratio - hits["lru"].ratio), 3)
            if hits["belady"].ratio > hits["lru"].ratio
            else 1.0,
        }
        say(f"replay: {share:.0%} of the working set, {sizes[f'{share:.0%}']['all']}")
    began_s = time.thread_time()
    replay(requests, Ours(max(1, int(SHARES[1] * blocks))))
    took_s = time.thread_time() - began_s
    accesses = sum(len(request.blocks) for request in requests)
    return {
        "requests": len(requests),
        "accesses": accesses,
        "working_set_blocks": blocks,
        "unlimited": {"all": round(unlimited.ratio, 4), "second_half": round(unlimited.late_ratio, 4)},
        "sizes": sizes,
        "ours_us_per_access": round(1e6 * took_s / accesses, 2),
    }


async def measure(bench: KvBench) -> dict[str, Any]:
    """Hit ratios per rule and size; ``lru_to_belady`` is how much of the way from LRU to the bound ours goes.

    Raises:
        ConfigError: the trace cannot be read.
    """
    requests = await asyncio.to_thread(read_trace, bench.trace or TRACE)
    figures = await asyncio.to_thread(replayed, requests, bench.say)
    at_least_lru = all(size["all"]["ours"] >= size["all"]["lru"] for size in figures["sizes"].values())
    return {"replay": figures, "replay_at_least_lru": at_least_lru}
