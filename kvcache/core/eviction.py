"""Who goes first from a tier (KVC-1, KVC-2, KVC-3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionSettings:
    """Rules of time of a tier; what else is in here belongs to the policy."""

    young_s: float = 30.0
    """Touched within that time: goes only when nothing older is left (KVC-1). 0: no such rule."""
    idle_s_max: float = 600.0
    """``idle`` names what was not touched for that long (KVC-1); infinite: nothing."""


class EvictionOrder:
    """The order of one tier. A *unit* is what the tier evicts at once: a span, or a block; ``parent`` is the unit before it.

    A parent never goes before its descendants: what is left of a chain can always be used. The order needs no parent to be
    there: it may come later, or never. Knows nothing of bytes that are not added; the same calls give the same victims.
    """

    def __init__(self, bytes_max: int, settings: EvictionSettings | None = None) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __contains__(self, unit: object) -> bool:
        raise NotImplementedError

    @property
    def bytes_held(self) -> int:
        """Of all units that were added and not removed."""
        raise NotImplementedError

    def add(self, unit: bytes, parent: bytes, size_bytes: int, now_s: float, *, test: bool = False) -> None:
        """A unit came into the tier, or came again (then it was touched, and has a new size).

        ``parent`` is empty for the first of a chain. ``test``: of test traffic, goes before all others until others use it.
        """
        raise NotImplementedError

    def touch(self, unit: bytes, now_s: float, *, test: bool = False) -> bool:
        """A request used it, first the parents, then their children. False: it is not here (remembered a while)."""
        raise NotImplementedError

    def touched_elsewhere(self, unit: bytes, last_access_s: float) -> None:
        """Another node knows of a later access (the score in Redis, on this node's clock). Ignored when it is not later."""
        raise NotImplementedError

    def remove(self, unit: bytes) -> None:
        """It has left the tier by other ways (corrupt, dropped by command); unknown ones are ignored."""
        raise NotImplementedError

    def victims(self, bytes_min: int, now_s: float, keep: Callable[[bytes], bool] | None = None) -> list[bytes]:
        """Units of together at least ``bytes_min``, children before parents, in the order in which they are to go.

        They are no longer in the order: who keeps one after all adds it again. ``keep`` says of a unit that it must stay (in
        use, pinned, needed by a running chain); it and its parents are passed over. Fewer bytes come when no others may go.
        """
        raise NotImplementedError

    def idle(self, now_s: float, units_max: int = 1000, keep: Callable[[bytes], bool] | None = None) -> list[bytes]:
        """Units that were not touched for ``idle_s_max``, children before parents. They are taken out, as by ``victims``."""
        raise NotImplementedError
