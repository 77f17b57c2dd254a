"""Layouts: which models have replicas on which devices, what they carry there, and what that is worth.

A *block* is one replica on its devices, all or nothing. A layout's worth is, in this order: the value of load that is not
carried (Gold before Silver before Bronze), devices in use, loads to be made. What a block carries is what it would carry
alone, times its share of its devices' time, less the standing share that its steps eat whatever their batch.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from broker.core.plan.problem import Block, Place, Problem
from broker.core.plan.sharing import served_share, share_of_all, share_of_time
from broker.core.plan.tunables import CRAMPED_DEVICES, CRAMPED_LACK_MAX


def cramped_lack(value: float) -> float:
    """The most that a model of this value can lack for want of a larger share of time alone."""
    return min(CRAMPED_LACK_MAX, CRAMPED_DEVICES / value) if value > 0 else 0.0


class Score(NamedTuple):
    """The worth of a layout, smaller is better; ``total`` adds them up by the prices."""

    lost: float
    devices: int
    load_s: float
    """Device time of the loads to be made."""
    total: float


class _Lacks:
    """What each model lacks, as far as it is known, and what all of that is worth.

    A value is what it was when it was last asked for after one of the model's blocks, or of its neighbours', had changed;
    ``at`` is the state of the layout at that time.
    """

    __slots__ = ("at", "known", "stale", "terms", "total")

    def __init__(self, needs: int) -> None:
        self.at = [-1] * needs
        self.known: list[float | None] = [None] * needs
        self.stale = list(range(needs))
        """All that are not known, and others."""
        self.terms = [0.0] * needs
        """Value times lack."""
        self.total = 0.0
        """Of the terms, while none is stale."""

    def forget_but(self, state: int) -> None:
        """All are to be asked for anew but those that were reckoned in this state."""
        known = self.known
        for need, at in enumerate(self.at):
            if at != state and known[need] is not None:
                known[need] = None
                self.stale.append(need)


class _Change(msgspec.Struct, frozen=True):
    """A block that came or went, and what was true before, so that a rollback need not reckon again."""

    number: int
    block: Block
    added: bool
    state: int
    made: int
    """The state before, and the one that it made."""
    carried: list[tuple[int, float, float]]
    """Block, what it carried and its share of time."""
    models: list[tuple[int, float, float | None, int, float]]
    """Capacity, lack, its state and term."""
    lacks: _Lacks
    total: float | None


class Layout:
    """A set of blocks that can be changed and taken back. Not thread-safe.

    Blocks that are there (``Problem.placed``) cost no load wherever a layout has them.
    """

    def __init__(self, problem: Problem, blocks: Iterable[Block] = ()) -> None:
        self.problem = problem
        self.blocks: dict[int, Block] = {}
        self.trials = 0
        """Changes made so far: the search's own measure of effort."""
        self._keep = False
        self._next = 0
        self._there: dict[Place, int] = {}
        self._left_bytes: dict[Place, int] = {}
        self.paid = [False] * len(problem.sites)
        """By site whether something that is not in the layout keeps the device for a while anyway."""
        self._staying: list[list[int]] = [[] for _ in problem.sites]
        """Models of those that go on there for a while though no layout has them, by site."""
        self.free_bytes = [site.memory_bytes for site in problem.sites]
        """By site the memory beyond what the blocks there need at least."""
        for block in problem.placed:
            place = block.place
            self._there[place] = self._there.get(place, 0) + 1
            if block.bytes_left:
                self._left_bytes[place] = block.bytes_left
                for site in block.sites:
                    self.free_bytes[site] -= block.bytes_left
                    self.paid[site] = True
                    self._staying[site].append(block.need)
        self._have: dict[Place, int] = {}
        self.on: list[list[int]] = [[] for _ in problem.sites]
        self.of: list[list[int]] = [[] for _ in problem.needs]
        """Numbers of the blocks on each site, and of each model."""
        self.carried: dict[int, float] = {}
        """What each block carries; :attr:`capacity` by model what all of its blocks do."""
        self._shares: dict[int, float] = {}
        """Of its devices' time what each block gets."""
        self._beside = [share_of_time([need.usage]) for need in problem.needs]
        """By model the share of a resident beside one replica of it."""
        self.capacity = [0.0] * len(problem.needs)
        self._state = self._states = 0
        """Each change makes a new state; a rollback leads back to an old one."""
        self._lacks_now, self._lacks_keep = _Lacks(len(problem.needs)), _Lacks(len(problem.needs))
        self._lacks = self._lacks_now
        self.devices = 0
        """How many sites hold something."""
        self._load_price_s = 0.0
        self._parts = 0
        self._journal: list[_Change] = []
        for block in blocks:
            self._put(self._number(), block)
        for number, block in self.blocks.items():
            self.carried[number] = self._carries(number, block)
        for model in range(len(problem.needs)):
            self.capacity[model] = self._capacity_of(model)

    # ------------------------------------------------------------------------------------------------------------ reading

    @property
    def keep(self) -> bool:
        """Whether loads count as those that must be carried before a device is given up."""
        return self._keep

    @keep.setter
    def keep(self, keep: bool) -> None:
        if keep is not self._keep:
            self._keep = keep
            self._lacks = self._lacks_keep if keep else self._lacks_now
            self._lacks.forget_but(self._state)
            self._states += 1

    def is_there(self, place: Place) -> bool:
        """Whether one more block of this kind exists already than the layout has."""
        return self._there.get(place, 0) > self._have.get(place, 0)

    def left(self) -> list[Place]:
        """Places of blocks that exist and are not in the layout."""
        return [place for place in self._there if self.is_there(place)]

    def kv_bytes(self, need: int) -> float:
        """KV that a model can have beyond the least: what is free on a site is shared by what its residents want."""
        total = 0.0
        for number in self.of[need]:
            held, sites = self.blocks[number].bytes_held, self.blocks[number].sites
            if held:
                each: float = max(0, held - self.problem.needs[need].bytes_min)
            else:
                each = min([self.free_bytes[site] * self.kv_part(site, need) for site in sites])
            total += each * len(sites)
        return total

    def kv_part(self, site: int, need: int) -> float:
        """The part of what is free on a site that one block of a model gets: by how much each still wants."""
        on = self.on[site]
        if len(on) == 1:
            return 1.0
        total = 0.0
        own: float | None = None
        sharers = 0
        for number in on:
            block = self.blocks[number]
            if not block.bytes_held:  # Those have theirs.
                sharers += 1
                wanted = self._kv_wanted(block.need)
                total += wanted
                if block.need == need:
                    own = wanted
        if total <= 0:
            return 1 / max(1, sharers)
        return (self._kv_wanted(need) if own is None else own) / total

    def _kv_wanted(self, need: int) -> float:
        wanted = self.problem.needs[need]
        return wanted.kv_bytes / ((len(self.of[need]) or 1) * wanted.gpus)

    def lack(self, need: int) -> float:
        """Share of a model's load that is not carried, for want of time, of replicas or of KV memory."""
        lacks = self._lacks
        if (known := lacks.known[need]) is None:
            known = lacks.known[need] = self._lack(need)
            lacks.at[need] = self._state
            lacks.terms[need] = self.problem.needs[need].value * known
        return known

    def _lack(self, need: int) -> float:
        wanted = self.problem.needs[need]
        load = wanted.load_keep if self._keep and wanted.load_keep is not None else wanted.load
        lack = max(0.0, 1 - self.capacity[need] / load) if load > 0 else 0.0
        replicas = len(self.of[need])
        seats = max(wanted.replicas_min, wanted.replicas_wanted)
        if not replicas and (load > 0 or seats):
            return wanted.lack_none
        if replicas < seats:
            lack = max(lack, 1 - replicas / seats)
        floor = wanted.share_floor
        if floor > 0.0 and replicas and load > 0:
            most = cramped_lack(wanted.value)
            if lack < most:
                missing = sum(max(0.0, 1.0 - self._shares[number] / floor) for number in self.of[need])
                lack = max(lack, most * missing / replicas)
        kv_bytes = wanted.kv_keep_bytes if self._keep and wanted.kv_keep_bytes is not None else wanted.kv_bytes
        if kv_bytes > 0 and lack < 1:
            lack = max(lack, 1 - self.kv_bytes(need) / kv_bytes)
        return lack

    def lost(self) -> float:
        """The value of all load that is not carried."""
        lacks = self._lacks
        if lacks.stale:
            for need in lacks.stale:
                if lacks.known[need] is None:
                    self.lack(need)
            lacks.stale.clear()
            lacks.total = float(sum(lacks.terms))
        return lacks.total

    def score(self) -> Score:
        """The worth of the whole layout."""
        lost = self.lost()
        prices = self.problem.prices
        total = lost + prices.device * self.devices + prices.load * self._load_price_s + prices.block * self._parts
        return Score(lost, self.devices, self._load_price_s, total)

    # ----------------------------------------------------------------------------------------------------------- changing

    def fits(self, need: int, sites: Sequence[int]) -> bool:
        """Whether a block can be added there: memory, kinds, residents, and who may live beside whom."""
        wanted = self.problem.needs[need]
        if len(sites) != wanted.gpus or len(self.of[need]) >= wanted.replicas_max:
            return False
        place = (need, tuple(sites))
        if not self.may_come(place):
            return False
        own = self._left_bytes.get(place, 0) if self.is_there(place) else 0
        return all(self.fits_site(need, site, own) for site in sites)

    def may_come(self, place: Place) -> bool:
        """Whether a block there exists already, or may be started beside all that do."""
        of, starts_max = self.of[place[0]], self.problem.needs[place[0]].starts_max
        if starts_max > len(of) or self.is_there(place):
            return True
        return sum(self.blocks[number].place not in self._there for number in of) < starts_max

    def fits_site(self, need: int, site: int, own_bytes: int = 0) -> bool:
        """The same for one of its sites; ``own_bytes`` are held there by a block that would come back."""
        wanted = self.problem.needs[need]
        place = self.problem.sites[site]
        on = self.on[site]
        if (
            self.free_bytes[site] + own_bytes < wanted.bytes_min
            or len(on) >= place.residents_max
            or place.kind not in wanted.rates
        ):
            return False
        for number in on:
            other = self.problem.needs[self.blocks[number].need]
            # A second one of the same model only costs where residents take turns.
            if other is wanted or other.tenant != wanted.tenant or not (other.co_locates and wanted.co_locates):
                return False
        return True

    def add(self, need: int, sites: tuple[int, ...]) -> int:
        """Puts a block where it fits (the caller asked) and returns its number."""
        number = self._number()
        block = Block(need, sites)
        self._put(number, block)
        self._settle(number, block, True)
        return number

    def lost_with(self, need: int, site: int) -> float:
        """What would be lost with one more block on one site: the same numbers, at the same count of trials, as adding it,
        asking and rolling back, without the books in between. All lacks must be known (``lost``)."""
        self.trials += 2
        number = self._number()
        block = Block(need, (site,))
        on, of, free_bytes = self.on[site], self.of[need], self.free_bytes[site]
        capacity, carried, terms = self.capacity, self.carried, self._lacks.terms
        own = self._left_bytes.get(block.place, 0) if self._left_bytes and self.is_there(block.place) else 0
        self.blocks[number] = block
        on.append(number)  # The highest number of all.
        of.append(number)
        self.free_bytes[site] = free_bytes - self.problem.needs[need].bytes_min + own
        shares = self._shares
        before = [(carried[other], shares[other]) for other in on[:-1]]
        models = {need: None}
        for other in on:
            beside = self.blocks[other]
            carried[other] = self._carries(other, beside)
            models[beside.need] = None
        had = [(model, capacity[model], terms[model]) for model in models]
        for model in models:
            capacity[model] = self._capacity_of(model)
            terms[model] = self.problem.needs[model].value * self._lack(model)
        lost = float(sum(terms))
        on.pop()
        of.pop()
        del self.blocks[number], carried[number], shares[number]
        self.free_bytes[site] = free_bytes
        for other, were in zip(on, before, strict=True):
            carried[other], shares[other] = were
        for model, was, term in had:
            capacity[model], terms[model] = was, term
        self._forget([model for model in models if self._lacks.at[model] != self._state])
        return lost

    def remove(self, number: int) -> Block:
        """Takes a block away."""
        block = self._take(number)
        self._settle(number, block, False)
        return block

    def mark(self) -> int:
        """A point to roll back to."""
        return len(self._journal)

    def rollback(self, mark: int) -> None:
        """Takes back all changes since ``mark``, the last one first."""
        if len(self._journal) > mark:
            self._state = self._journal[mark].state
        while len(self._journal) > mark:
            change = self._journal.pop()
            if change.added:
                self._take(change.number)
                del self.carried[change.number], self._shares[change.number]
            else:
                self._put(change.number, change.block)
            self._unsettle(change)

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _take(self, number: int) -> Block:
        block = self.blocks.pop(number)
        self.of[block.need].remove(number)
        for site in block.sites:
            self.on[site].remove(number)
        self._book(block, -1)
        return block

    def _put(self, number: int, block: Block) -> None:
        self._book(block, 1)
        self.blocks[number] = block
        insort(self.of[block.need], number)
        for site in block.sites:
            insort(self.on[site], number)

    def _book(self, block: Block, sign: int) -> None:
        """Counts a block that comes (1) or has gone (-1), while it is not on its sites."""
        wanted, place, parts = self.problem.needs[block.need], block.place, sign * len(block.sites)
        had = self._have.get(place, 0)
        self._have[place] = had + sign
        self._parts += parts
        change = block.bytes_held or wanted.bytes_min
        if max(had, had + sign) > self._there.get(place, 0):
            self._load_price_s += wanted.load_s * parts
        else:
            change -= self._left_bytes.get(place, 0)
        for site in block.sites:
            self.free_bytes[site] -= sign * change
            if not self.on[site]:
                self.devices += sign

    def _settle(self, number: int, changed: Block, added: bool) -> None:
        """What the blocks beside a changed one, and it, carry now. Goes into the journal."""
        self.trials += 1
        carried, capacity, lacks = self.carried, self.capacity, self._lacks
        shares = self._shares
        before: list[tuple[int, float, float]] = []
        if not added:
            before.append((number, carried.pop(number), shares.pop(number)))
        models = {changed.need: None}
        for site in changed.sites:
            for other in self.on[site]:
                block = self.blocks[other]
                if other != number:
                    before.append((other, carried[other], shares[other]))
                carried[other] = self._carries(other, block)
                models[block.need] = None
        known, at, terms = lacks.known, lacks.at, lacks.terms
        change = _Change(
            number,
            changed,
            added,
            self._state,
            self._states + 1,
            before,
            [(model, capacity[model], known[model], at[model], terms[model]) for model in models],
            lacks,
            None if lacks.stale else lacks.total,
        )
        self._journal.append(change)
        for model in models:
            capacity[model] = self._capacity_of(model)
        self._forget(models)
        self._states += 1
        self._state = self._states

    def _unsettle(self, change: _Change) -> None:
        """Carried loads and capacities as they were; a lack only if it was reckoned in the state to which all goes back."""
        self.trials += 1
        state = self._state
        for number, carried, share in reversed(change.carried):
            self.carried[number], self._shares[number] = carried, share
        self._forget([model for model, *_ in change.models])
        lacks = self._lacks
        # While only lacks were read since the change, those of all other models are what they were.
        whole = change.total is not None and change.made == self._states
        for model, capacity, lack, at, term in change.models:
            self.capacity[model] = capacity
            if lacks is change.lacks and lack is not None and at == state:
                lacks.known[model], lacks.at[model], lacks.terms[model] = lack, at, term
            else:
                whole = False
        if whole and change.total is not None:
            lacks.stale.clear()
            lacks.total = change.total

    def _forget(self, models: Iterable[int]) -> None:
        for lacks in (self._lacks_now, self._lacks_keep):
            known = lacks.known
            for model in models:
                if known[model] is not None:
                    known[model] = None
                    lacks.stale.append(model)

    def _capacity_of(self, model: int) -> float:
        capacity = 0.0
        for number in self.of[model]:
            capacity += self.carried[number]
        return capacity

    def _carries(self, number: int, block: Block) -> float:
        """What a block that is there carries, at the speed of the slowest of its sites; keeps its share of their time."""
        wanted, sites = self.problem.needs[block.need], self.problem.sites
        share = self._shares[number] = self._share_of(block)
        if len(block.sites) == 1:
            speed = wanted.rates[sites[block.sites[0]].kind] * share
        else:
            speed = share * min(wanted.rates[sites[site].kind] for site in block.sites)
        return max(0.0, speed - wanted.standing) * served_share(share, wanted.share_min)

    def _share_of(self, block: Block) -> float:
        if len(block.sites) == 1:
            return self.share(block.need, block.sites[0])
        return share_of_all([self.share(block.need, site) for site in block.sites])

    def share(self, need: int, site: int) -> float:
        """The share of a site's time that a resident of this model gets while it has more work than it can do."""
        on, staying = self.on[site], self._staying[site]
        if len(on) + len(staying) < 2:
            return 1.0
        blocks, needs = self.blocks, self.problem.needs
        if len(on) == 2 and not staying:
            first, second = blocks[on[0]].need, blocks[on[1]].need
            if first == need or second == need:
                return self._beside[second if first == need else first]
        others = []
        own = False
        for number in on:
            model = blocks[number].need
            if model != need or own:
                others.append(needs[model].usage)
            else:
                own = True
        if staying:
            here = [blocks[number].need for number in on]
            others.extend(needs[model].usage for model in staying if model not in here)
        return share_of_time(others)
