"""Spare replicas: beside the plan, on devices that it uses anyway, for rushes that are over before a load is.

A spare costs memory that is free and no device. It takes no requests (weight 0) until its model is in a rush; then it has a
share of its device's time at once, while the replicas that the plan adds are still loading.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from itertools import islice

from broker.core.plan.layout import Layout
from broker.core.plan.problem import Block, Look, Need
from broker.core.plan.tunables import SPARE_BESIDE_SHARE_MAX, SPARE_LIFE_S_MAX, SPARE_SHARE
from subjects.ids import DeploymentKey, ReplicaId


@dataclass(slots=True)
class Spares:
    """Replicas beside the plan: those that stay, those to come, and what each model could count on at once with them."""

    kept: dict[ReplicaId, None] = field(default_factory=dict)
    new: list[Block] = field(default_factory=list)
    share: dict[DeploymentKey, float] = field(default_factory=dict)


class SpareChooser:
    """Chooses among the devices of one layout."""

    def __init__(self, look: Look, layout: Layout) -> None:
        self._look = look
        self._layout = layout
        problem = look.problem
        self._free = [float(layout.free_bytes[site]) for site in range(len(problem.sites))]
        self._residents = [len(layout.on[site]) for site in range(len(problem.sites))]
        for block in layout.blocks.values():
            need = problem.needs[block.need]
            if need.kv_bytes:
                wanted = need.kv_bytes / len(layout.of[block.need]) / len(block.sites)
                for site in block.sites:
                    self._free[site] -= wanted

        # What does not depend on the newcomer, once for all of them: there may be a thousand sites and hundreds of models.
        self._tenant: dict[int, str] = {}
        """By site with room for a spare: whose models live there."""
        for site in range(len(problem.sites)):
            on = [problem.needs[layout.blocks[number].need] for number in layout.on[site]]
            if not on or len(on) >= problem.sites[site].residents_max or any(need.tenant != on[0].tenant for need in on):
                continue
            if all(need.co_locates and max(need.share_min, need.share_floor) <= SPARE_BESIDE_SHARE_MAX for need in on):
                self._tenant[site] = on[0].tenant
        self._orders: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
        """Those sites by the number of their residents, each with what it has free, negative, in the order of preference."""
        for site in self._tenant:
            insort(self._orders[self._residents[site]], (-self._free[site], site))
        self._beside: defaultdict[int, list[Block]] = defaultdict(list)
        """By model: replicas that the plan does without."""

    def choose(self, kept: dict[ReplicaId, Block], yields: Container[ReplicaId], level: float, count_max: int) -> Spares:
        """Spares that cover ``level`` times the rate at which a model's work comes while it comes, those most in want first.

        ``kept`` are the replicas of the plan, ``yields`` those that leave for others now.
        """
        problem = self._look.problem
        spares = Spares()
        self._beside.clear()
        for block in problem.placed:
            if block.replica is not None and block.replica not in kept and block.replica not in yields:
                self._beside[block.need].append(block)
        order = []
        for index, seen in enumerate(self._look.needs):
            need = problem.needs[index]
            if need.gpus > 1 or not need.replicas_min or not need.co_locates or seen.life_s > SPARE_LIFE_S_MAX:
                continue
            lacking = level * seen.level - seen.burst_share * self._layout.capacity[index]
            if lacking > 0:
                order.append((-lacking, index))
        for lacking, index in sorted(order):
            self._for_model(index, min(math.ceil(-lacking / SPARE_SHARE), count_max), spares)
        return spares

    def _for_model(self, index: int, count: int, spares: Spares) -> None:
        look, layout = self._look, self._layout
        need = look.problem.needs[index]
        taken = {site for number in layout.of[index] for site in layout.blocks[number].sites}
        chosen = 0
        for block in self._beside.get(index, ()):
            if block.replica is not None and chosen < count and self._fits(block.sites[0], need, taken):
                chosen += 1
                spares.kept[block.replica] = None
                self._use(block.sites[0], need, taken)
                if look.ready(block.replica):
                    spares.share[need.model] = spares.share.get(need.model, 0.0) + SPARE_SHARE
        if chosen < count and look.models[index].may_load:
            for site in list(islice(self._fitting(need, taken), count - chosen)):
                spares.new.append(Block(index, (site,)))
                self._use(site, need, taken)

    def _fitting(self, need: Need, taken: set[int]) -> Iterator[int]:
        """Sites that one more fits on, those with few residents and much room first."""
        for residents in sorted(self._orders):
            for free, site in self._orders[residents]:
                if -free < need.bytes_min:
                    break
                if self._fits(site, need, taken):
                    yield site

    def _fits(self, site: int, need: Need, taken: set[int]) -> bool:
        place = self._look.problem.sites[site]
        if self._free[site] < need.bytes_min or site in taken or self._residents[site] >= place.residents_max:
            return False
        return place.kind in need.rates and self._tenant.get(site) == need.tenant

    def _use(self, site: int, need: Need, taken: set[int]) -> None:
        if site in self._tenant:
            order, entry = self._orders[self._residents[site]], (-self._free[site], site)
            del order[bisect_left(order, entry)]
            insort(self._orders[self._residents[site] + 1], (-self._free[site] + need.bytes_min, site))
        self._free[site] -= need.bytes_min
        self._residents[site] += 1
        taken.add(site)
