"""Turns: who leaves for a model that waits and has no place (SCH-3).

An auction in the currency of the objective, devices. A model that waits without any replica bids its value for each second
that its first request has waited: waiting raises urgency, so whoever has waited longest gets a place first. What a replica
asks for its place: that of an idle model its load and next to nothing, the less the longer it has been idle; one of several
a part of its model's value, and so much for each second by which it has not yet paid for its load; the only one of a busy
model its value for ``Need.turn_s`` seconds, once it has paid, else it is not for sale. So models that do not fit together
take turns: each serves until the other has waited longer than this one will have to. Who has waited for ``WAIT_BOUND_S``
bids as the highest class does.

Others may have no place of their own either: a model below its minimum, or one whose replicas do not keep up, gets the
places of idle models, the last one of a model only when that has rested (``Need.rested``). A bidder that spans several
devices and finds no place in time claims those that it is nearest to.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from broker.core.plan import tunables as t
from broker.core.plan.layout import Layout
from broker.core.plan.problem import Block, Look, Need, Place
from subjects.ids import ReplicaId


class Turn(msgspec.Struct, frozen=True):
    """One more replica, in the places of others."""

    need: int
    sites: tuple[int, ...]
    victims: tuple[ReplicaId, ...]


class _Seller(msgspec.Struct, frozen=True):
    """A block that may leave its place, and what that costs; the last of its model or not does not change with others."""

    number: int
    replica: ReplicaId
    need: int
    sites: tuple[int, ...]
    bytes_each: int
    price: float
    idle_s: float
    """0: its model is busy."""
    last: bool


@dataclass(slots=True)
class Turns:
    """The auction of one look. ``claims`` are the devices that those wait for who found no place in time."""

    look: Look
    layout: Layout
    value_max: float
    claims: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def take(self, only: Container[int] | None = None) -> list[Turn]:
        """The turns to take now, the most urgent first; the layout has them all. ``only``: no others bid."""
        bids = [
            (-bid, need.model, index)
            for index, need in enumerate(self.look.problem.needs)
            if (only is None or index in only) and (bid := self._bid(index, need)) > 0
        ]
        if not bids:
            return []
        sellers = self._sellers()
        turns = []
        most = max(4, min(t.BIDS_MAX, t.SITES_MAX // max(1, len(self.look.problem.sites))))
        for bid, _, index in sorted(bids)[:most]:
            if (turn := self._buy(index, -bid, sellers)) is not None:
                turns.append(turn)
                gone = set(turn.victims)
                for site, there in list(sellers.items()):
                    sellers[site] = [seller for seller in there if seller.replica not in gone]
        return turns

    def overdue(self) -> list[int]:
        """Models that have waited for a turn's time without a place, the longest waiting first."""
        found = [
            (-need.wait_s, need.model, index)
            for index, need in enumerate(self.look.problem.needs)
            if need.wait_s >= t.TURN_S and not self.layout.of[index] and need.replicas_max > 0 and not need.fails
        ]
        return [index for *_, index in sorted(found)]

    def claim(self, overdue: Iterable[int]) -> None:
        """Keeps the devices that they are nearest to from those that have waited less."""
        for index in overdue:
            if not self.layout.of[index]:
                self.claims[index] = self._nearest(index)

    def claimed(self, but: int = -1) -> list[int]:
        """Devices that others than this model wait for."""
        return [site for index, sites in self.claims.items() if index != but for site in sites]

    def _bid(self, index: int, need: Need) -> float:
        """What one more place is worth to a model, in devices; 0: it has what it needs, or may not have more."""
        count = len(self.layout.of[index])
        if count >= need.replicas_max or (need.idle_s > 0 and count >= max(need.floor, need.replicas_min)):
            return 0.0
        if count == 0:
            value = self.value_max if need.wait_s >= t.WAIT_BOUND_S else need.value
            return value * max(need.wait_s, 1.0 if self.layout.lack(index) > 0 else 0.0)
        late = need.wait_s >= t.LATE_S or count < need.floor
        return need.value * self.layout.lack(index) if late else 0.0

    def _sellers(self) -> dict[int, list[_Seller]]:
        """By site those that could leave it, the cheapest first."""
        look, layout = self.look, self.layout
        placed: dict[Place, Block] = {block.place: block for block in look.problem.placed}
        found: dict[int, list[_Seller]] = {}
        for number in sorted(layout.blocks):
            block = layout.blocks[number]
            if (there := placed.get(block.place)) is None or there.replica is None or there.stays:
                continue
            need = look.problem.needs[block.need]
            count = len(layout.of[block.need])
            last = count == 1
            unpaid_s = need.residency_s - (look.now_s - look.replicas[there.replica].since_s)
            if need.idle_s > 0:
                again = need.load_s * look.problem.prices.load * need.gpus
                price = t.IDLE_PRICE / (1.0 + need.idle_s / t.IDLE_HALF_S) + again
            elif not look.ready(there.replica) or (last and unpaid_s > 0):
                continue
            else:
                price = need.value * (need.turn_s if last else max(1.0, unpaid_s) / count)
            if last and need.floor:
                continue
            held = self._held_bytes(number)
            seller = _Seller(number, there.replica, block.need, block.sites, held, price, need.idle_s, last)
            for site in block.sites:
                found.setdefault(site, []).append(seller)
        for on_site in found.values():
            on_site.sort(key=lambda seller: (seller.price, seller.replica))
        return found

    def _sells(self, seller: _Seller, index: int) -> bool:
        """Whether a block may leave for this bidder."""
        need = self.look.problem.needs[index]
        if seller.need == index or (need.fails and seller.idle_s < t.FAILING_IDLE_S):
            return False
        if seller.idle_s > 0:
            return not self.layout.of[index] or not seller.last or self.look.problem.needs[seller.need].rested
        # A busy model gives its last place only to one that waits and has none.
        return not self.layout.of[index] and (not seller.last or need.wait_s > 0)

    def _buy(self, index: int, bid: float, sellers: dict[int, list[_Seller]]) -> Turn | None:
        need = self.look.problem.needs[index]
        groups: dict[str, list[tuple[float, int, tuple[_Seller, ...]]]] = {}
        claimed = set(self.claimed(index)) if need.wait_s < t.TURN_S else ()
        # Who has replicas gets places of idle models only, and in a large busy pool they are few.
        idle = [site for site, there in sellers.items() if any(seller.idle_s > 0 for seller in there)]
        for site in sorted(idle) if self.layout.of[index] else range(len(self.look.problem.sites)):
            place = self.look.problem.sites[site]
            avoided = site == need.avoids and len(self.look.problem.sites) > 1
            if avoided or place.kind not in need.rates or site in claimed:
                continue
            there = sellers.get(site, [])
            if self.layout.free_bytes[site] + sum([seller.bytes_each for seller in there]) < need.bytes_min:
                continue
            if (offer := self._offer(index, need, site, there)) is not None:
                price = sum(seller.price for seller in offer)
                groups.setdefault(place.group if need.gpus > 1 else "", []).append((price, site, offer))
                if not offer and need.gpus == 1:
                    break  # Nobody need leave: no other place costs less.
        best: tuple[float, tuple[int, ...], list[_Seller]] | None = None
        for name, offers in groups.items():
            if len(offers) < need.gpus or (need.gpus > 1 and not name):
                continue
            offers.sort(key=lambda offer: offer[:2])
            chosen = offers[: need.gpus]
            leave = list({seller.replica: seller for *_, offer in chosen for seller in offer}.values())
            price = sum(seller.price for seller in leave) + need.load_s * self.look.problem.prices.load * need.gpus
            sites = tuple(sorted(site for _, site, _ in chosen))
            if (
                (leave or not self.layout.of[index])
                and price < bid
                and self._floors_hold(leave)
                and (best is None or (price, sites) < best[:2])
            ):
                best = (price, sites, leave)
        if best is None:
            return None
        _, sites, leave = best
        for seller in leave:
            self.layout.remove(seller.number)
        self.layout.add(index, sites)
        return Turn(index, sites, tuple(seller.replica for seller in leave))

    def _offer(self, index: int, need: Need, site: int, there: Iterable[_Seller]) -> tuple[_Seller, ...] | None:
        """Who would leave a site so that a block of the bidder fits; None: it would not."""
        chosen: dict[int, _Seller] = {}
        movable = [seller for seller in there if self._sells(seller, index)]
        while not self._fits(need, index, site, chosen):
            if not movable:
                return None
            seller = movable.pop(0)
            chosen[seller.number] = seller
        # A cheap early one may have become needless beside a later, larger one.
        for number in list(reversed(chosen)):
            rest = [other for other in chosen if other != number]
            if self._fits(need, index, site, rest):
                del chosen[number]
        return tuple(chosen.values())

    def _fits(self, need: Need, index: int, site: int, gone: Collection[int]) -> bool:
        """Whether a block of the bidder may be on a site once these blocks have left."""
        layout, place = self.layout, self.look.problem.sites[site]
        if layout.free_bytes[site] + sum(self._held_bytes(number) for number in gone) < need.bytes_min:
            return False
        rest = [layout.blocks[number].need for number in layout.on[site] if number not in gone]
        if len(rest) >= place.residents_max or index in rest:
            return False
        others = [self.look.problem.needs[other] for other in rest]
        return all(other.tenant == need.tenant and other.co_locates and need.co_locates for other in others)

    def _held_bytes(self, number: int) -> int:
        block = self.layout.blocks[number]
        return block.bytes_held or self.look.problem.needs[block.need].bytes_min

    def _floors_hold(self, leave: Sequence[_Seller]) -> bool:
        """Whether of no model more leave than it can spare."""
        needs, layout = self.look.problem.needs, self.layout
        for owner in dict.fromkeys(seller.need for seller in leave):
            going = [seller for seller in leave if seller.need == owner]
            least = needs[owner].floor or (0 if any(seller.last for seller in going) or needs[owner].idle_s > 0 else 1)
            if len(layout.of[owner]) - len(going) < least:
                return False
        return True

    def _nearest(self, index: int) -> tuple[int, ...]:
        """The devices that a bidder will most likely get: those of one group with the most that can become free."""
        need, layout = self.look.problem.needs[index], self.layout
        groups: dict[str, list[tuple[int, int]]] = {}
        for site, place in enumerate(self.look.problem.sites):
            if place.kind not in need.rates:
                continue
            movable = [number for number in layout.on[site] if not layout.blocks[number].stays]
            if self._fits(need, index, site, movable):
                free = layout.free_bytes[site] + sum(self._held_bytes(number) for number in movable)
                groups.setdefault(place.group if need.gpus > 1 else str(site), []).append((-free, site))
        options = [sorted(found)[: need.gpus] for found in groups.values() if len(found) >= need.gpus]
        return tuple(site for _, site in min(options, default=()))
