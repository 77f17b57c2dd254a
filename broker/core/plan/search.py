"""The search for a good layout, greedy and then local (SCH-3): whatever the size of the pool.

:func:`plan` starts from what is there, gives to who lacks most, empties devices one at a time, and stops when nothing helps
or its budget of trials is used up. ``exact`` solves the same problem to a proven gap for small pools.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from itertools import combinations, islice

import msgspec

from broker.core.plan.layout import Layout, Score
from broker.core.plan.problem import Block, Place, Problem
from broker.core.plan.tunables import GROUPS_MAX, LARGE_DEVICES, PLACES_MAX, TAKEOVERS_MAX, THRIFT


class Plan(msgspec.Struct, frozen=True):
    """A layout that was found, and how."""

    blocks: tuple[Block, ...]
    """Those that exist carry their replica's name."""
    score: Score
    trials: int


def plan(problem: Problem, *, trials_max: int = 6000, keep: bool = False) -> Plan:
    """A good layout, from what is there and from nothing, whichever ends better. The same problem gives the same plan.

    ``trials_max`` bounds the changes tried; with ``keep`` loads count as in ``Layout.keep``.
    """
    best: Layout | None = None
    trials = 0
    starts = [(problem.placed, False), (problem.placed, True), ((), False), ((), True)]
    stays = tuple(block for block in problem.placed if block.stays)
    for blocks, thrifty in starts if problem.placed else starts[2:]:
        layout = Layout(problem, blocks or stays)
        layout.keep = keep
        search = Search(layout, (trials_max - trials) // 2, thrifty=thrifty)
        search.grow()
        search.shrink()
        search.improve()
        trials += layout.trials
        if best is None or layout.score().total < best.score().total - 1e-9:
            best = layout
    assert best is not None
    return Plan(named(best), best.score(), trials)


def named(layout: Layout) -> tuple[Block, ...]:
    """A layout's blocks, each with the name of a replica that is there already where there is one; those that stay first."""
    there: dict[Place, list[Block]] = {}
    for block in sorted(layout.problem.placed, key=lambda block: not block.stays):
        there.setdefault(block.place, []).append(block)
    blocks = []
    for number in sorted(layout.blocks):
        block = layout.blocks[number]
        known = there.get(block.place)
        blocks.append(known.pop(0) if known else Block(block.need, block.sites))
    return tuple(blocks)


class Search:
    """Greedy steps and local search on one layout.

    ``thrifty`` prefers, of two changes, the one that brings more for its price; else the one that brings more.
    """

    def __init__(self, layout: Layout, trials_max: int = 6000, *, thrifty: bool = False) -> None:
        self.layout = layout
        self.thrifty = thrifty
        self.helpless: set[int] = set()
        """Needs for which ``grow`` found nothing that would be worth its price."""
        self._until = layout.trials + trials_max

    @property
    def tired(self) -> bool:
        """Whether the budget of trials is used up."""
        return self.layout.trials >= self._until

    # ------------------------------------------------------------------------------------------------------------- giving

    def grow(self, *, new_devices: bool = True, shut: Sequence[int] = (), only: Sequence[int] | None = None) -> None:
        """Gives blocks to who lacks most, as long as that is worth its price, on any device but those that are ``shut``."""
        needs = self.layout.problem.needs
        open_needs = list(range(len(needs))) if only is None else list(only)
        while open_needs and not self.tired:
            lost, need = min((-needs[need].value * self.layout.lack(need), need) for need in open_needs)
            if lost >= 0:
                return
            if not self.give(need, new_devices=new_devices, shut=shut):
                open_needs.remove(need)
                self.helpless.add(need)

    def give(self, need: int, *, new_devices: bool = True, shut: Sequence[int] = ()) -> bool:
        """The best single change that brings a model more; False when none is worth its price."""
        layout = self.layout
        best: tuple[float, int] | None = None
        options = self._options(need, new_devices, shut)
        for index, option in enumerate(options):
            if not option.leave and len(option.sites) == 1:
                # Where it fits (``_places``) it need not be put there to be judged.
                won = layout.lost() - layout.lost_with(need, option.sites[0])
                gain = self._worth(won, self._load_price(need, option.sites), int(not layout.on[option.sites[0]]))
            else:
                mark = layout.mark()
                gain = self._gain(need, option)
                layout.rollback(mark)
            if gain is not None and (best is None or gain > best[0] + 1e-12):
                best = (gain, index)
        if best is not None:
            self._gain(need, options[best[1]])
            return True
        return self._give_first(need, options)

    def _give_first(self, need: int, options: Sequence[_Option]) -> bool:
        """A model has its file's minimum, and one replica when it is wanted, where there is room: whatever its class, and
        however little one helps by its numbers."""
        layout = self.layout
        wanted = layout.problem.needs[need]
        if len(layout.of[need]) >= max(wanted.floor, min(1, wanted.replicas_min)):
            return False
        free = (option.sites for option in options if option.sites and not option.leave)
        first = next((sites for sites in free if layout.fits(need, sites)), None)
        if first is not None:
            layout.add(need, first)
        return first is not None

    def _gain(self, need: int, option: _Option) -> float | None:
        """Makes a change and returns what it is worth; None (and a layout to be rolled back) when that is nothing."""
        layout = self.layout
        lost, devices = layout.lost(), layout.devices
        for number in option.leave:
            layout.remove(number)
        price = 0.0
        for owner, sites in (*option.moves, *([(need, option.sites)] if option.sites else [])):
            if not layout.fits(owner, sites):
                return None
            price += self._load_price(owner, sites)
            layout.add(owner, sites)
        return self._worth(lost - layout.lost(), price, layout.devices - devices)

    def _load_price(self, need: int, sites: tuple[int, ...]) -> float:
        problem = self.layout.problem
        if self.layout.is_there((need, sites)):
            return 0.0
        return problem.needs[need].load_s * problem.prices.load * len(sites)

    def _worth(self, won: float, price: float, devices: int) -> float | None:
        price += self.layout.problem.prices.device * devices
        if won <= price + 1e-9:
            return None
        return won / (price + THRIFT) if self.thrifty else won - price

    def _options(self, need: int, new_devices: bool, shut: Sequence[int]) -> list[_Option]:
        layout = self.layout
        if len(layout.of[need]) >= layout.problem.needs[need].replicas_max:
            return self._departures(need)
        places = [_Option(sites) for sites in self._places(need, new_devices, shut)]
        others = () if places else self._takeovers(need, shut) or self._exchanges(need, shut)
        return [*places, *self._departures(need), *others]

    def _places(self, need: int, new_devices: bool, shut: Sequence[int]) -> list[tuple[int, ...]]:
        """Where one more block fits: every place in use, and of the unused ones one of each kind and group."""
        layout, on, paid = self.layout, self.layout.on, self.layout.paid
        wanted, sites_there = layout.problem.needs[need], layout.problem.sites
        used: dict[str, list[int]] = {}
        empty: dict[tuple[str, str], list[int]] = {}
        firsts: dict[tuple[str, bool], int] = {}
        """For a replica of one device the smallest unused site of each kind, not the one that it avoids if there is another:
        which of a thousand alike fit need not be asked."""
        for site, place in enumerate(sites_there):
            if site in shut or not (new_devices or on[site]):
                continue
            if wanted.gpus == 1 and not on[site]:
                first = firsts.get((place.kind, paid[site]))
                smaller = first is None or place.memory_bytes < sites_there[first].memory_bytes
                taken = first is not None and (site == wanted.avoids or not (smaller or first == wanted.avoids))
                if not taken and layout.fits_site(need, site):
                    firsts[place.kind, paid[site]] = site
            elif layout.fits_site(need, site):
                if on[site]:
                    used.setdefault(place.group, []).append(site)
                else:
                    empty.setdefault((place.group, place.kind), []).append(site)
        places = [
            sites
            for model, sites in layout.left()
            if model == need and all(site not in shut and (new_devices or on[site]) for site in sites)
        ]
        if wanted.gpus == 1:
            found = [sites for sites in places if layout.fits(need, sites)]
            others = [(site,) for sites in used.values() for site in sites]
            others.extend((site,) for site in firsts.values())
            found.extend(place for place in others if layout.may_come((need, place)))
            elsewhere = [place for place in found if place != (wanted.avoids,)]
            return list(dict.fromkeys(elsewhere or found))
        names = [name for name in dict.fromkeys([*used, *(group for group, _ in empty)]) if name]
        each = min(GROUPS_MAX, max(1, PLACES_MAX // max(1, len(names)) - 1))
        for group in names:
            fresh = [site for (name, _), sites in empty.items() if name == group for site in sites]
            fresh.sort(key=lambda site: (paid[site], site))
            members = sorted(used.get(group, []), key=lambda site: (len(on[site]), site)) + fresh
            if len(members) >= wanted.gpus:
                # Those that are in use come first, so the empty ones by themselves would come last, if at all.
                if len(fresh) >= wanted.gpus:
                    places.append(tuple(sorted(fresh[: wanted.gpus])))
                places.extend(islice(_combinations(members, wanted.gpus), each))
        return [sites for sites in dict.fromkeys(places) if layout.fits(need, sites)]

    def _departures(self, need: int) -> list[_Option]:
        """Neighbours that leave, so that the model's own blocks get more of their devices' time."""
        layout = self.layout
        at = [(number, site) for number in layout.of[need] for site in layout.blocks[number].sites]
        neighbours = dict.fromkeys(other for _, site in at for other in layout.on[site])
        options = [_Option((), (number,)) for number in neighbours if self._may_leave(number, need)]
        for number, site in at:
            others = tuple(other for other in layout.on[site] if other != number and self._may_leave(other, need))
            if len(others) > 1:
                options.append(_Option((), others))
        return options

    def _may_leave(self, number: int, newcomer: int) -> bool:
        block = self.layout.blocks[number]
        return not block.stays and block.need != newcomer and len(self.layout.of[block.need]) > self._floor(block.need)

    def _floor(self, need: int) -> int:
        """Replicas that a model keeps whoever else lacks."""
        owner = self.layout.problem.needs[need]
        return max(owner.replicas_min, int(owner.load > 0))

    def _takeovers(self, need: int, shut: Sequence[int]) -> list[_Option]:
        """Places that one block of another model would have to leave, or all on several devices."""
        layout = self.layout
        if layout.problem.needs[need].gpus > 1:
            return self._takeovers_over_several(need, shut)
        options: list[_Option] = []
        for number in sorted(layout.blocks):
            block = layout.blocks[number]
            if not self._may_leave(number, need) or self.tired or any(site in shut for site in block.sites):
                continue
            mark = layout.mark()
            layout.remove(number)
            options.extend(_Option((site,), (number,)) for site in block.sites if layout.fits_site(need, site))
            layout.rollback(mark)
        return options

    def _exchanges(self, need: int, shut: Sequence[int]) -> list[_Option]:
        """Places of others that may not leave but can move to where there is room, in pools up to ``LARGE_DEVICES``."""
        layout, sites = self.layout, range(len(self.layout.problem.sites))
        if layout.problem.needs[need].gpus > 1 or len(sites) > LARGE_DEVICES:
            return []
        options: list[_Option] = []
        for number in sorted(layout.blocks):
            block = layout.blocks[number]
            if block.stays or block.need == need or len(block.sites) > 1 or block.sites[0] in shut or self.tired:
                continue
            mark = layout.mark()
            layout.remove(number)
            if layout.fits_site(need, block.sites[0]):
                rest = [site for site in sites if (site,) != block.sites and site not in shut]
                to = next((site for site in rest if layout.fits(block.need, (site,))), None)
                options += [] if to is None else [_Option(block.sites, (number,), ((block.need, (to,)),))]
            layout.rollback(mark)
        return options

    def _takeovers_over_several(self, need: int, shut: Sequence[int]) -> list[_Option]:
        """Of each group those devices that carry least; who lives there and leaves no room would have to leave."""
        layout = self.layout
        wanted = layout.problem.needs[need]
        groups: dict[str, list[tuple[float, int, tuple[int, ...]]]] = {}
        for site, place in enumerate(layout.problem.sites):
            if place.group and place.kind in wanted.rates and site not in shut:
                fits = layout.fits_site(need, site)
                leave = () if fits else tuple(layout.on[site])
                if (fits or leave) and all(self._may_leave(number, need) for number in leave):
                    carried = math.fsum(layout.carried[number] for number in leave)
                    groups.setdefault(place.group, []).append((carried, site, leave))
        found: list[tuple[float, _Option]] = []
        for members in groups.values():
            chosen: list[tuple[float, int, tuple[int, ...]]] = []
            leaves: dict[int, None] = {}
            for member in sorted(members):
                if len(chosen) < wanted.gpus and self._may_all_leave([*leaves, *member[2]]):
                    chosen.append(member)
                    leaves.update(dict.fromkeys(member[2]))
            if len(chosen) == wanted.gpus and leaves:
                sites = tuple(sorted(site for _, site, _ in chosen))
                found.append((math.fsum(carried for carried, *_ in chosen), _Option(sites, tuple(leaves))))
        found.sort(key=lambda entry: (entry[0], entry[1].sites))
        return [option for _, option in found[:TAKEOVERS_MAX]]

    def _may_all_leave(self, leave: Sequence[int]) -> bool:
        """Whether of no model more leave than can be spared."""
        layout = self.layout
        left = Counter(layout.blocks[number].need for number in dict.fromkeys(leave))
        return all(len(layout.of[owner]) - gone >= self._floor(owner) for owner, gone in left.items())

    # ----------------------------------------------------------------------------------------------------------- emptying

    def shrink(self) -> list[int]:
        """Empties devices, the least needed first, one after the other, while the rest can take over. Returns which."""
        return [site for site in self.emptiest() if not self.tired and self.layout.on[site] and self.empty(site)]

    def emptiest(self) -> list[int]:
        """Devices in use from which everything may go, those that carry least first."""
        layout = self.layout
        order = []
        for site in range(len(layout.problem.sites)):
            blocks = [layout.blocks[number] for number in layout.on[site]]
            if blocks and not any(block.stays for block in blocks):
                carried = math.fsum(layout.carried[number] / len(layout.blocks[number].sites) for number in layout.on[site])
                order.append((sum(len(block.sites) for block in blocks), carried, site))
        return [site for *_, site in sorted(order)]

    def empty(self, site: int, *, moves: bool = True) -> bool:
        """Takes all off a device and lets the rest take over; taken back unless that is better. Without ``moves`` nothing
        new is put elsewhere."""
        return self.again(list(self.layout.on[site]), new_devices=False, shut=(site,), moves=moves)

    def trim(self, spared: Container[int] = (), first: int = 0) -> int:
        """Takes off what its model and its neighbours can do without, on all sites but those that are ``spared``.

        Begins with block number ``first``. Returns where to go on when it was tired, else 0.
        """
        layout = self.layout
        for number in sorted(layout.blocks, key=lambda number: (number < first, number)):
            block = layout.blocks[number]
            floor = layout.problem.needs[block.need].replicas_min
            if block.stays or len(layout.of[block.need]) <= floor or any(site in spared for site in block.sites):
                continue
            if self.tired:
                return number
            self.again([number], moves=False)
        return 0

    def relieve(self, need: int, spared: Container[int] = ()) -> bool:
        """All neighbours of one of a model's replicas, on all of its devices at once, go or find room elsewhere; none of
        the ``spared`` sites is touched, and no model loses its last replica. True when that was better, else all is as it
        was."""
        layout = self.layout
        for number in list(layout.of[need]):
            sites = layout.blocks[number].sites
            neighbours = list(dict.fromkeys(other for site in sites for other in layout.on[site] if other != number))
            blocks = [layout.blocks[other] for other in neighbours]
            if self.tired:
                return False
            if not blocks or any(block.stays or any(site in spared for site in block.sites) for block in blocks):
                continue
            owners = {block.need for block in blocks}
            mark = layout.mark()
            if self.again(neighbours, shut=sites):
                if all(len(layout.of[owner]) >= self._floor(owner) for owner in owners):
                    return True
                layout.rollback(mark)
        return False

    # ---------------------------------------------------------------------------------------------------------- improving

    def improve(self) -> None:
        """Local search: what is on a device is taken off and given again, as long as that makes the whole better."""
        layout = self.layout
        better = True
        while better and not self.tired:
            better = False
            for site in range(len(layout.problem.sites)):
                leavers = [number for number in layout.on[site] if not layout.blocks[number].stays]
                groups = [leavers, *([number] for number in leavers)] if len(leavers) > 1 else [leavers]
                for group in groups:
                    there = [number for number in group if number in layout.blocks]
                    if there and not self.tired:
                        better = self.again(there) or better

    def again(
        self, leavers: Sequence[int], *, new_devices: bool = True, shut: Sequence[int] = (), moves: bool = True
    ) -> bool:
        """Takes blocks off and gives again to those that then lack; taken back unless that is better."""
        layout = self.layout
        keep, layout.keep = layout.keep, True
        before = layout.score().total
        mark = layout.mark()
        for number in leavers:
            layout.remove(number)
        if moves:
            self.grow(new_devices=new_devices, shut=shut)
        better = layout.score().total < before - 1e-9
        if not better:
            layout.rollback(mark)
        layout.keep = keep
        return better


class _Option(msgspec.Struct, frozen=True):
    """One more block on ``sites`` (none: nobody comes); ``leave`` go first, and ``moves`` is where they go instead."""

    sites: tuple[int, ...]
    leave: tuple[int, ...] = ()
    moves: tuple[Place, ...] = ()


def _combinations(members: Sequence[int], size: int) -> Iterable[tuple[int, ...]]:
    """All groups where they are few, else runs of neighbours in the order given."""
    if math.comb(len(members), size) <= GROUPS_MAX:
        return (tuple(sorted(group)) for group in combinations(members, size))
    return (tuple(sorted(members[first : first + size])) for first in range(len(members) - size + 1))
