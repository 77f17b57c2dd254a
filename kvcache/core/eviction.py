"""Who goes first from a tier (KVC-1, KVC-2, KVC-3).

Two rules. Leaves first: a unit never goes before its descendants, so what is left of a chain can be used as a prefix. Among
leaves, the one least worth its place: worth is learned per age and kind (``returns``), a kind being how often a chain
was taken up again and how much the last request added to it. ``ops/bench/kv_replay.py`` measures it against other rules.

All units that a request used form its *visit* and share kind and age; so the order is kept per visit, and a unit costs O(1)
when it is added, used or evicted. One call of ``victims`` sorts kinds times bins of age, some hundreds at most.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvcache.core.returns import BINS, EDGES_S, LOWER_S, Kind, Returns, bin_of

_BEHIND: Kind = (-1, 0)
"""What stays of a visit after a later request took most of it and went on differently: a stale branch."""
_BEHIND_FACTOR = 0.1
"""Worth of those; they are not followed."""
_STEP_S = 0.25
"""Ages are looked at that often; the first bin is ten times as wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionSettings:
    """Rules of time of a tier, and bounds of what the order remembers."""

    young_s: float = 30.0
    """Used within that time, up to the next edge of ages: goes only when nothing older is left (KVC-1). 0: no such rule."""
    young_share_max: float = 0.25
    """The rule rests while more of the tier than that is younger: a tier that turns over in minutes is to choose freely."""
    idle_s_max: float = 600.0
    """``idle`` names what was not used for that long (KVC-1); infinite: nothing."""
    absent_max: int = 200_000
    """Units that are not here and are remembered, about 150 bytes each: they tell what would have been hit."""
    kept_s: float = 1.0
    """A unit that had to stay is looked at again after that time, so that many of them do not slow each call down."""
    judge_s: float = 5.0
    """The tables of returns are read that often."""
    turns_max: int = 3
    """Chains that were taken up more often are of one kind."""
    added_bits_max: int = 4
    """Requests that added 2 ** (this - 1) grains or more are of one kind."""
    grain_units: int = 1
    """Units of about 512 tokens: 16 for blocks of 32 tokens, 2 for spans."""
    prior_returns: float = 50.0
    half_life_s: float = 4 * 3600.0


@dataclass(slots=True, eq=False)
class _Visit:
    number: int
    kind: Kind
    weight: float
    used_s: float
    turn: int
    anchor: bytes
    followed: int
    """Units that it stands for in the table of returns; 0: not followed, or its anchor was used again."""
    bin: int = 0
    leaves: dict[bytes, _Unit] = field(default_factory=dict)
    """Its units without children, the one that came last goes first."""

    @property
    def group(self) -> tuple[Kind, float]:
        return self.kind, self.weight


@dataclass(slots=True, eq=False)
class _Unit:
    id: bytes
    parent: bytes
    size_bytes: int
    visit: _Visit
    children: int = 0


class EvictionOrder:
    """The order of one tier. A *unit* is what the tier evicts at once: a span, or a block; ``parent`` is the unit before it.

    The order needs no parent to be there: it may come later, or never. It does nothing by itself: the caller adds what it
    keeps, and drops what ``victims`` names. The same calls give the same victims on any machine.
    """

    def __init__(self, settings: EvictionSettings | None = None) -> None:
        self._settings = settings or EvictionSettings()
        self._units: dict[bytes, _Unit] = {}
        self._children: dict[bytes, int] = {}
        """Of parents that are not here."""
        self._absent: OrderedDict[bytes, _Visit] = OrderedDict()
        self._groups: dict[tuple[Kind, float], list[OrderedDict[int, _Visit]]] = {}
        """Visits with leaves by kind, weight and bin of age, in each the longest there first."""
        self._ageing: list[OrderedDict[int, _Visit]] = [OrderedDict() for _ in range(BINS)]
        """All visits that have leaves or are followed."""
        self._kept: deque[tuple[float, _Unit]] = deque()
        self._returns = Returns(prior_returns=self._settings.prior_returns, half_life_s=self._settings.half_life_s)
        self._advanced_s = -math.inf
        self._judged_s = -math.inf
        self._touched: _Visit | None = None
        self._added: deque[tuple[float, int]] = deque()
        """Bytes that came lately, by steps of time."""
        self._added_bytes = 0
        self._sparing = True
        self._visits = 0
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._units)

    def __contains__(self, unit: object) -> bool:
        return unit in self._units

    @property
    def bytes_held(self) -> int:
        """Of all units that were added and not removed."""
        return self._bytes

    def used(self, units: Sequence[bytes], now_s: float, *, weight: float = 1.0) -> int:
        """A request wants this chain, from its first unit on; tell it once. Returns how many of its first units are here.

        Those that are not here are remembered, so that ``add`` knows what request they belong to. ``weight``: what a hit is
        worth, by class; 0 (test traffic): goes before all others until another request uses it.
        """
        self._advance(now_s)
        chain = list(dict.fromkeys(units))
        if not chain:
            return 0
        leading, known, before = self._look(chain)
        grain = self._settings.grain_units
        # A first grain alone is the system prompt that everybody has.
        turn = before.turn + 1 if before is not None and known > grain else 0
        bits = (-((known - len(chain)) // grain)).bit_length()
        kind = (min(turn, self._settings.turns_max), min(bits, self._settings.added_bits_max))
        visit = self._visit(kind, weight, now_s, turn, chain)
        for name in chain:
            unit = self._units.get(name)
            if unit is not None:
                self._take(unit.visit, name, now_s)
                self._detach(unit)
                unit.visit = visit
                self._attach(unit)
            else:
                earlier = self._absent.pop(name, None)
                if earlier is not None:
                    self._take(earlier, name, now_s)
                self._absent[name] = visit
        self._forget_absent(now_s)
        return leading

    def add(self, unit: bytes, parent: bytes, size_bytes: int, now_s: float, *, test: bool = False) -> None:
        """A unit came into the tier; ``parent`` is empty for the first of a chain. One that is here gets the new size only.

        It belongs to the last request that wanted it (``used``), else to that of its parent (an answer's blocks).
        """
        held = self._units.get(unit)
        if held is not None:
            self._bytes += size_bytes - held.size_bytes
            held.size_bytes = size_bytes
            return
        self._advance(now_s)
        visit = self._absent.pop(unit, None)
        above = self._units.get(parent)
        if visit is None and above is not None:
            visit = above.visit
            if visit.bin > 0:
                self._restart(visit, now_s)
        elif visit is None:
            visit = self._visit((0, 1), 0.0 if test else 1.0, now_s, 0, [unit], followed=False)
        here = self._units[unit] = _Unit(unit, parent, size_bytes, visit, self._children.pop(unit, 0))
        self._bytes += size_bytes
        self._count_added(size_bytes, now_s)
        if above is not None:
            above.children += 1
            self._detach(above)
        elif parent:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._attach(here)

    def touch(self, unit: bytes, now_s: float, *, test: bool = False) -> bool:
        """One unit is used, by a request whose chain was not told (``used`` is better). Whether it is here.

        Call it for parents before their children: those of one request get one age. Nothing is learned from it.
        """
        here = self._units.get(unit)
        if here is None:
            return False
        self._advance(now_s)
        above = self._units.get(here.parent)
        if above is not None and above.visit is self._touched and now_s - self._touched.used_s < _STEP_S:
            visit = self._touched
        else:
            old = here.visit
            visit = self._visit(old.kind, 0.0 if test else 1.0, now_s, old.turn, [unit], followed=False)
            self._touched = visit
        self._take(here.visit, unit, now_s)
        self._detach(here)
        here.visit = visit
        self._attach(here)
        return True

    def used_elsewhere(self, unit: bytes, last_access_s: float) -> None:
        """Another node knows of a later access (the score in Redis, on this node's clock). Ignored when it is not later."""
        here = self._units.get(unit)
        if here is None or last_access_s <= here.visit.used_s:
            return
        old = here.visit
        self._detach(here)
        here.visit = self._visit(old.kind, old.weight, last_access_s, old.turn, [unit], followed=False)
        self._attach(here)

    def remove(self, unit: bytes) -> None:
        """It has left the tier by other ways (corrupt, dropped by command); unknown ones are ignored."""
        here = self._units.get(unit)
        if here is not None:
            self._drop(here)

    def victims(self, bytes_min: int, now_s: float, keep: Callable[[bytes], bool] | None = None) -> list[bytes]:
        """Units of together at least ``bytes_min``, children before parents, in the order in which they are to go.

        They are no longer in the order: who keeps one after all adds it again. ``keep`` says of a unit that it must stay (in
        use, pinned, needed by a running chain); it and its parents are passed over, and it is asked about again a second
        later. Fewer bytes come when no others may go.
        """
        self._advance(now_s)
        self._look_again(now_s)
        self._forget_added(now_s)
        self._sparing = self._added_bytes <= self._settings.young_share_max * self._bytes
        names: list[bytes] = []
        bytes_free = 0
        ranks = [
            self._rank(group, number) for group, bins in self._groups.items() for number, visits in enumerate(bins) if visits
        ]
        heapq.heapify(ranks)
        while ranks and bytes_free < bytes_min:
            _, _, age, kind, weight = ranks[0]
            visits = self._groups[kind, weight][-age]
            if not visits:
                heapq.heappop(ranks)
                continue
            visit = next(iter(visits.values()))
            unit = next(reversed(visit.leaves.values()))
            if keep is not None and keep(unit.id):
                self._detach(unit)
                self._kept.append((now_s + self._settings.kept_s, unit))
                continue
            names.append(unit.id)
            bytes_free += unit.size_bytes
            freed = self._drop(unit)
            if freed is not None and freed is not visit:
                heapq.heappush(ranks, self._rank(freed.group, freed.bin))
        return names

    def idle(self, now_s: float, units_max: int = 1000, keep: Callable[[bytes], bool] | None = None) -> list[bytes]:
        """Units that were not used for ``idle_s_max``, children before parents. They are taken out, as by ``victims``."""
        names: list[bytes] = []
        idle_s = self._settings.idle_s_max
        if not math.isfinite(idle_s):
            return names
        self._advance(now_s)
        self._look_again(now_s)
        todo = [
            visit
            for number in range(BINS - 1, bin_of(idle_s) - 1, -1)
            for bins in self._groups.values()
            for visit in bins[number].values()
            if now_s - visit.used_s >= idle_s
        ]
        todo.reverse()
        while todo and len(names) < units_max:
            visit = todo.pop()
            while visit.leaves and len(names) < units_max:
                unit = next(reversed(visit.leaves.values()))
                if keep is not None and keep(unit.id):
                    self._detach(unit)
                    self._kept.append((now_s + self._settings.kept_s, unit))
                    continue
                names.append(unit.id)
                freed = self._drop(unit)
                if freed is not None and freed is not visit and now_s - freed.used_s >= idle_s:
                    todo.append(freed)
        return names

    def _rank(self, group: tuple[Kind, float], number: int) -> tuple[bool, float, int, Kind, float]:
        """Of the visits of a group and bin; the lowest go first, of equals the oldest."""
        kind, weight = group
        young = self._sparing and weight > 0.0 and LOWER_S[number] < self._settings.young_s
        worth = self._returns.worth(kind, number) * (_BEHIND_FACTOR if kind == _BEHIND else 1.0)
        return young, weight * worth, -number, kind, weight

    def _count_added(self, size_bytes: int, now_s: float) -> None:
        self._added_bytes += size_bytes
        if self._added and now_s - self._added[-1][0] < _STEP_S:
            at_s, before = self._added.pop()
            self._added.append((at_s, before + size_bytes))
        else:
            self._added.append((now_s, size_bytes))
            self._forget_added(now_s)

    def _forget_added(self, now_s: float) -> None:
        while self._added and now_s - self._added[0][0] >= self._settings.young_s:
            self._added_bytes -= self._added.popleft()[1]

    def _look(self, chain: list[bytes]) -> tuple[int, int, _Visit | None]:
        """How many of its first units are here, how many are here or remembered, and the visit of the deepest of those."""
        leading = known = 0
        before: _Visit | None = None
        for name in chain:
            unit = self._units.get(name)
            visit = unit.visit if unit is not None else self._absent.get(name)
            if visit is None:
                break
            if unit is not None and leading == known:
                leading += 1
            known += 1
            before = visit
        return leading, known, before

    def _visit(
        self, kind: Kind, weight: float, used_s: float, turn: int, chain: list[bytes], *, followed: bool = True
    ) -> _Visit:
        self._visits += 1
        units = len(chain)
        visit = _Visit(self._visits, kind, weight, used_s, turn, chain[3 * units // 4], units if followed else 0)
        if followed:
            self._returns.came(kind, 0, units, used_s)
            self._ageing[0][visit.number] = visit
        return visit

    def _take(self, visit: _Visit, name: bytes, now_s: float) -> None:
        """A later request uses a unit of the visit."""
        if name == visit.anchor and visit.kind != _BEHIND:
            self._unfollow(visit, now_s, returned=True)
            self._leave_behind(visit)

    def _unfollow(self, visit: _Visit, now_s: float, *, returned: bool) -> None:
        if not visit.followed:
            return
        age_s = max(LOWER_S[visit.bin], now_s - visit.used_s)
        self._returns.went(visit.kind, visit.bin, visit.followed, visit.used_s, age_s, returned=returned)
        visit.followed = 0
        if not visit.leaves:
            self._ageing[visit.bin].pop(visit.number, None)

    def _leave_behind(self, visit: _Visit) -> None:
        if visit.leaves:
            del self._groups[visit.group][visit.bin][visit.number]
        visit.kind = _BEHIND
        if visit.leaves:
            self._queue(visit)

    def _forget_absent(self, now_s: float) -> None:
        while len(self._absent) > self._settings.absent_max:
            name, visit = self._absent.popitem(last=False)
            if name == visit.anchor:
                self._unfollow(visit, now_s, returned=False)

    def _attach(self, unit: _Unit) -> None:
        """Into its visit's leaves, if it is one."""
        if unit.children:
            return
        visit = unit.visit
        if not visit.leaves:
            self._queue(visit)
        visit.leaves[unit.id] = unit

    def _detach(self, unit: _Unit) -> None:
        visit = unit.visit
        if visit.leaves.pop(unit.id, None) is not None and not visit.leaves:
            del self._groups[visit.group][visit.bin][visit.number]
            if not visit.followed:
                self._ageing[visit.bin].pop(visit.number, None)

    def _queue(self, visit: _Visit) -> None:
        bins = self._groups.get(visit.group)
        if bins is None:
            bins = self._groups[visit.group] = [OrderedDict() for _ in range(BINS)]
        bins[visit.bin][visit.number] = visit
        self._ageing[visit.bin].setdefault(visit.number, visit)

    def _drop(self, unit: _Unit) -> _Visit | None:
        """Out of the order; the visit of its parent when that is a leaf now."""
        freed: _Visit | None = None
        above = self._units.get(unit.parent)
        if above is not None:
            above.children -= 1
            if not above.children:
                # Before its child leaves: their visit keeps its turn.
                self._attach(above)
                freed = above.visit
        elif unit.parent:
            left = self._children[unit.parent] - 1
            if left:
                self._children[unit.parent] = left
            else:
                del self._children[unit.parent]
        self._detach(unit)
        del self._units[unit.id]
        self._bytes -= unit.size_bytes
        self._absent[unit.id] = unit.visit
        self._forget_absent(self._advanced_s)
        if unit.children:
            self._children[unit.id] = unit.children
        return freed

    def _restart(self, visit: _Visit, now_s: float) -> None:
        """Its request still writes: its age begins anew."""
        followed = visit.followed
        self._move(visit, 0, now_s)
        if followed:
            self._returns.came(visit.kind, 0, followed, now_s)
        visit.used_s = now_s

    def _move(self, visit: _Visit, number: int, now_s: float) -> None:
        """To another bin; if it is followed the caller says that it came there."""
        if visit.followed:
            self._returns.went(visit.kind, visit.bin, visit.followed, visit.used_s, now_s - visit.used_s, returned=False)
        if visit.leaves:
            bins = self._groups[visit.group]
            del bins[visit.bin][visit.number]
            bins[number][visit.number] = visit
        if self._ageing[visit.bin].pop(visit.number, None) is not None:
            self._ageing[number][visit.number] = visit
        visit.bin = number

    def _advance(self, now_s: float) -> None:
        """Moves visits to the bins of their ages, and reads the tables of returns from time to time."""
        if now_s - self._advanced_s < _STEP_S:
            return
        self._advanced_s = now_s
        for number, edge_s in enumerate(EDGES_S):
            ageing = self._ageing[number]
            while ageing:
                visit = next(iter(ageing.values()))
                passed_s = visit.used_s + edge_s
                if passed_s > now_s:
                    break
                self._move(visit, number + 1, passed_s)
                if visit.followed:
                    self._returns.came(visit.kind, number + 1, visit.followed, visit.used_s)
        if now_s - self._judged_s >= self._settings.judge_s:
            self._judged_s = now_s
            self._returns.judge(now_s)

    def _look_again(self, now_s: float) -> None:
        """Units that had to stay may go again."""
        while self._kept and self._kept[0][0] <= now_s:
            _, unit = self._kept.popleft()
            if self._units.get(unit.id) is unit:
                self._attach(unit)
