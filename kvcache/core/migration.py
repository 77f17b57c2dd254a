"""What the target of a migration lacks, and in which order it asks for it (KVC-4).

The target knows the chain, by its own tokens or from the source; it asks for places in it. Blocks are asked for from the
first one on, since a block without those before it serves nobody, in batches of bounded bytes, of which a bounded number is
under way. What came whole stays, whatever happens to the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


def lacking(here: Sequence[bool], room_blocks: int) -> list[int]:
    """Places of the chain that are not here, from the first on, at most ``room_blocks``."""
    return [place for place, held in enumerate(here) if not held][: max(0, room_blocks)]


def batches(places: Sequence[int], block_bytes: int, batch_bytes: int, batch_blocks_max: int) -> list[tuple[int, ...]]:
    """``places`` in their order, cut into batches of at most so many bytes and blocks; each has one block at least."""
    step = min(batch_blocks_max, max(1, batch_bytes // block_bytes))
    return [tuple(places[start : start + step]) for start in range(0, len(places), step)]


@dataclass(slots=True)
class Transfer:
    """The batches of one pull. Some are under way at once; it ends with the first that comes short."""

    waiting: list[tuple[int, ...]]
    in_flight_max: int
    end_s: float
    """The deadline, on the caller's clock."""
    in_flight: list[tuple[int, ...]] = field(default_factory=list)
    arrived: int = 0
    """Blocks."""
    failure: str = ""

    def next(self, now_s: float) -> tuple[int, ...] | None:
        """A batch to be asked for now; it is under way then. None: not now."""
        if self.failure or not self.waiting or len(self.in_flight) >= self.in_flight_max:
            return None
        if now_s >= self.end_s:
            self.failure = "deadline"
            return None
        batch = self.waiting.pop(0)
        self.in_flight.append(batch)
        return batch

    def shrink(self, blocks: int) -> None:
        """There was room for so many blocks of the batch asked last; the rest waits, and nothing more is asked at once."""
        batch = self.in_flight.pop()
        self.waiting.insert(0, batch[blocks:])
        if blocks:
            self.in_flight.append(batch[:blocks])
        self.in_flight_max = max(1, len(self.in_flight))
        if not self.in_flight:
            self.failure = "no room in host memory"

    def came(self, blocks: int) -> None:
        """The oldest batch under way was answered with so many leading blocks that were right."""
        batch = self.in_flight.pop(0)
        self.arrived += blocks
        if blocks < len(batch) and not self.failure:
            self.failure = "the source no longer has all of it"

    def broke(self, why: str) -> None:
        """Nothing more will come."""
        self.failure = self.failure or why
        self.in_flight.clear()

    @property
    def done(self) -> bool:
        """Whether nothing is under way and nothing more is asked for."""
        return not self.in_flight and (bool(self.failure) or not self.waiting)
