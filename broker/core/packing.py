"""Placement as an optimisation: which models get replicas on which devices (SCH-3).

A *layout* is a set of blocks; a block is one replica on its devices, all or nothing. Its worth is, in this order: the value of
load that is not carried (Gold before Silver before Bronze), devices in use, loads to be made. What a block carries is what it
would carry alone, times its share of its devices' time, less the standing share that its steps eat whatever their batch.

:func:`plan` starts from what is there, gives to who lacks most, empties devices one at a time, and stops when nothing helps or
its budget of trials is used up. ``exact`` solves the same problem to a proven gap for small pools.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import NamedTuple

from broker.core.catalogue import DeviceKey
from subjects.ids import ModelHash, ReplicaId

SHARING_KEEPS = 0.97
"""What is left of a device's speed when several replicas take turns on it."""
GROUPS_MAX = 70
"""Groups of linked devices that are looked at for one replica that spans several."""


@dataclass(frozen=True, slots=True)
class Site:
    """A device that blocks can be put on. Replicas that span devices need them in one ``group``."""

    key: DeviceKey
    group: str
    kind: str
    memory_bytes: int
    residents_max: int


@dataclass(frozen=True, slots=True)
class Need:
    """What one model wants. Capacity is in units of one of its replicas alone on a device on which ``rates`` is 1."""

    model: ModelHash
    load: float
    """Capacity wanted, standing shares not counted."""
    bytes_min: int
    """Of a replica on each of its devices, with the least KV that serves."""
    rates: dict[str, float]
    """By kind of device: what a replica alone there brings. It cannot live on other kinds."""
    gpus: int = 1
    standing: float = 0.0
    """Of each replica, whatever it does."""
    activity: float = 1.0
    """How likely one of its replicas has work at a moment: so much it slows its neighbours."""
    kv_bytes: float = 0.0
    """KV wanted over all replicas, beyond what ``bytes_min`` holds."""
    load_keep: float | None = None
    """At least what the rest must carry before a device is given up; None: ``load``."""
    value: float = 1.0
    """Of all its load."""
    replicas_min: int = 0
    replicas_max: int = 1 << 30
    co_locates: bool = True
    tenant: str = ""
    """Not empty: its devices hold only models of this tenant."""
    load_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Block:
    """One replica. ``replica`` names one that exists; a new one has none."""

    need: int
    sites: tuple[int, ...]
    replica: ReplicaId | None = None
    stays: bool = False
    """It may not be taken away."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What things cost beside lost value. A model of value 1000 that lacks a thousandth of its load weighs a device."""

    device: float = 1.0
    load: float = 0.02
    """For each second of a load."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Devices, wants and what is there now."""

    sites: tuple[Site, ...]
    needs: tuple[Need, ...]
    placed: tuple[Block, ...] = ()
    prices: Prices = field(default_factory=Prices)
    shares_time: bool = True
    """False: residents do not slow each other (devices with slices, or capacities that were measured side by side)."""


class Score(NamedTuple):
    """The worth of a layout, smaller is better; ``total`` adds them up by the prices."""

    lost: float
    devices: int
    load_s: float
    total: float


class Layout:
    """A set of blocks that can be changed and taken back. Not thread-safe."""

    def __init__(self, problem: Problem, blocks: Iterable[Block] = ()) -> None:
        self.problem = problem
        self.blocks: dict[int, Block] = {}
        self.trials = 0
        self._next = 0
        self._on: list[list[int]] = [[] for _ in problem.sites]
        self._of: list[list[int]] = [[] for _ in problem.needs]
        self._free = [site.memory_bytes for site in problem.sites]
        self._crowd = [0.0] * len(problem.sites)
        self._carried: dict[int, float] = {}
        self._capacity = [0.0] * len(problem.needs)
        self._kept = 0
        for block in blocks:
            self.add(block)

    # ------------------------------------------------------------------------------------------------------------ reading

    def on(self, site: int) -> list[int]:
        """Numbers of the blocks on a site."""
        return self._on[site]

    def of(self, need: int) -> list[int]:
        """Numbers of a model's blocks."""
        return self._of[need]

    def free_bytes(self, site: int) -> int:
        """Memory beyond what the blocks there need at least."""
        return self._free[site]

    def used(self, site: int) -> bool:
        """Whether anything is there."""
        return bool(self._on[site])

    def capacity(self, need: int) -> float:
        """What a model's blocks carry in all."""
        return self._capacity[need]

    def kv_bytes(self, need: int) -> float:
        """KV that a model can have beyond the least: on each site what is free is shared by how much residents still want."""
        total = 0.0
        for number in self._of[need]:
            block = self.blocks[number]
            total += min(self._kv_share(site, need) for site in block.sites) * len(block.sites)
        return total

    def _kv_share(self, site: int, need: int) -> float:
        wants = {other: 0.0 for other in sorted({self.blocks[number].need for number in self._on[site]})}
        for other in wants:
            wanted = self.problem.needs[other]
            wants[other] = wanted.kv_bytes / max(1, len(self._of[other]) * wanted.gpus)
        wanted_here = sum(wants[self.blocks[number].need] for number in self._on[site])
        if wanted_here <= 0:
            return self._free[site] / len(self._on[site])
        return self._free[site] * min(1.0, wants[need] / wanted_here)

    def lack(self, need: int, keep: bool = False) -> float:
        """Share of a model's load that is not carried, for want of time or of KV memory."""
        wanted = self.problem.needs[need]
        load = wanted.load_keep if keep and wanted.load_keep is not None else wanted.load
        lack = 0.0
        if load > 0:
            lack = max(0.0, 1 - self._capacity[need] / load)
        if len(self._of[need]) < wanted.replicas_min:
            lack = max(lack, 1 - len(self._of[need]) / wanted.replicas_min)
        if wanted.kv_bytes > 0 and lack < 1:
            lack = max(lack, 1 - self.kv_bytes(need) / wanted.kv_bytes)
        return lack

    def score(self, keep: bool = False) -> Score:
        """The worth of the whole layout."""
        lost = sum(need.value * self.lack(index, keep) for index, need in enumerate(self.problem.needs))
        devices = sum(1 for blocks in self._on if blocks)
        load_s = sum(self.problem.needs[b.need].load_s for b in self.blocks.values() if b.replica is None)
        prices = self.problem.prices
        return Score(lost, devices, load_s, lost + prices.device * devices + prices.load * load_s)

    # ----------------------------------------------------------------------------------------------------------- changing

    def fits(self, need: int, sites: Sequence[int]) -> bool:
        """Whether a block can be added there: memory, kinds, residents, and who may live beside whom."""
        wanted = self.problem.needs[need]
        if len(sites) != wanted.gpus or len(self._of[need]) >= wanted.replicas_max:
            return False
        return all(self.fits_site(need, site) for site in sites)

    def fits_site(self, need: int, site: int) -> bool:
        """The same for one of its sites."""
        wanted = self.problem.needs[need]
        place = self.problem.sites[site]
        if (
            self._free[site] < wanted.bytes_min
            or len(self._on[site]) >= place.residents_max
            or place.kind not in wanted.rates
        ):
            return False
        for number in self._on[site]:
            other = self.problem.needs[self.blocks[number].need]
            if other.tenant != wanted.tenant or not (
                other.model == wanted.model or (other.co_locates and wanted.co_locates)
            ):
                return False
        return True

    def add(self, block: Block) -> int:
        """Puts a block where it fits (the caller asked) and returns its number."""
        number = self._next
        self._next += 1
        self._put(number, block)
        return number

    def remove(self, number: int) -> Block:
        """Takes a block away."""
        block = self.blocks.pop(number)
        wanted = self.problem.needs[block.need]
        self._capacity[block.need] -= self._carried.pop(number)
        self._of[block.need].remove(number)
        for site in block.sites:
            self._on[site].remove(number)
            self._free[site] += wanted.bytes_min
        self._settle(block.sites)
        return block

    def restore(self, number: int, block: Block) -> None:
        """Takes a removal back."""
        self._put(number, block)

    def _put(self, number: int, block: Block) -> None:
        wanted = self.problem.needs[block.need]
        self.blocks[number] = block
        self._carried[number] = 0.0
        self._of[block.need].append(number)
        for site in block.sites:
            self._on[site].append(number)
            self._free[site] -= wanted.bytes_min
        self._settle(block.sites)

    def _settle(self, sites: Sequence[int]) -> None:
        """What the blocks on these sites carry now."""
        self.trials += 1
        touched: dict[int, None] = {}
        for site in sites:
            self._crowd[site] = sum(self.problem.needs[self.blocks[number].need].activity for number in self._on[site])
            touched.update(dict.fromkeys(self._on[site]))
        for number in touched:
            block = self.blocks[number]
            carried = self.carries(block)
            self._capacity[block.need] += carried - self._carried[number]
            self._carried[number] = carried

    def carries(self, block: Block) -> float:
        """What a block that is there carries, at the speed of the slowest of its sites."""
        wanted = self.problem.needs[block.need]
        slowest = min(wanted.rates[self.problem.sites[site].kind] * self.share(block.need, site) for site in block.sites)
        return max(0.0, slowest - wanted.standing)

    def share(self, need: int, site: int) -> float:
        """The share of a site's time that a resident of this model gets while it works."""
        if not self.problem.shares_time:
            return 1.0
        return share_of_time(max(0.0, self._crowd[site] - self.problem.needs[need].activity))


def share_of_time(others: float) -> float:
    """The share that one replica gets beside ``others`` (mean number of other replicas that work at a moment)."""
    if others <= 0:
        return 1.0
    return 1 - others * (1 - SHARING_KEEPS / 2) if others < 1 else SHARING_KEEPS / (1 + others)
