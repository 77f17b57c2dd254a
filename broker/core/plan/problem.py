"""A placement problem: devices, what each model wants of them, what is there now, and what things cost; and the look at the
pool that it was made from.

``layout`` is what may be done about it, ``packing`` and ``exact`` look for the best.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from broker.core.plan.need import ModelNeed
from broker.core.plan.policy import ModelView, PoolView, ReplicaView
from broker.core.plan.tunables import DEVICE_PRICE, LOAD_PRICE, REPLICA_PRICE
from broker.core.pool.catalogue import DeviceKey
from subjects.ids import DeploymentKey, ReplicaId
from subjects.messages import ModelRecord, ReplicaState, StepCosts

Place = tuple[int, tuple[int, ...]]
"""Which model, and on which sites, ascending: replicas of the same place are as good as one another."""


class Site(msgspec.Struct, frozen=True):
    """A device that blocks can be put on. Replicas that span devices need them in one ``group``."""

    key: DeviceKey
    group: str
    kind: str
    memory_bytes: int
    residents_max: int


class Need(msgspec.Struct, frozen=True):
    """What one model wants. Capacity is in units of one of its replicas alone on a device on which ``rates`` is 1."""

    model: DeploymentKey
    load: float
    """Capacity wanted, standing shares not counted."""
    bytes_min: int
    """Of a replica on each of its devices, with the least KV that serves."""
    rates: dict[str, float]
    """By kind of device: what a replica alone there brings. It cannot live on other kinds."""
    gpus: int = 1
    standing: float = 0.0
    """Of each replica, whatever it does."""
    usage: float = 0.0
    """What one of its replicas takes of its devices' time on average: so much it slows its neighbours."""
    share_min: float = 0.0
    """Of a device's time, below which a replica cannot prefill its longest prompts within the target."""
    share_floor: float = 0.0
    """Of a device's time, what its replicas turned out to need for their targets, whatever the load."""
    kv_bytes: float = 0.0
    """KV wanted over all replicas, beyond what ``bytes_min`` holds."""
    kv_keep_bytes: float | None = None
    """At least what must be left before a device is given up; None: ``kv_bytes``."""
    load_keep: float | None = None
    """At least what the rest must carry before a device is given up; None: ``load``."""
    value: float = 1.0
    """Of all its load."""
    lack_none: float = 1.0
    """What it lacks without any replica: 1 is all of its load, more while requests wait, little for one that is idle."""
    wait_s: float = 0.0
    """How long its first request in the queue has waited; 0 while none does."""
    idle_s: float = 0.0
    """How long it has had no request; 0 while it has any."""
    rested: bool = True
    """Whether it has been idle for as long as it takes to load another in its place and itself again: so long its place has
    cost no more than its return will (the rule of ski rental, Karlin et al. 1988)."""
    turn_s: float = 0.0
    """While it is busy: its only replica yields to a model that has waited longer than this, in seconds of equal value."""
    residency_s: float = 0.0
    """How long a replica serves until it has paid for its load."""
    floor: int = 0
    """Replicas that it keeps whoever waits."""
    fails: bool = False
    """Its last load failed: for it only those leave that nobody has used for long."""
    avoids: int = -1
    """The site where that was: it comes last."""
    replicas_min: int = 0
    """It never has fewer, whoever lacks what."""
    replicas_wanted: int = 0
    """With fewer it lacks seats for the requests that run at once."""
    replicas_max: int = 1 << 30
    starts_max: int = 1 << 30
    """New replicas that may come while all that exist are still there: with none left, nothing moves before one is gone."""
    co_locates: bool = True
    tenant: str = ""
    """Not empty: its devices hold only models of this tenant."""
    load_s: float = 3.0


class Block(msgspec.Struct, frozen=True):
    """One replica. ``replica`` names one that exists; a new one has none."""

    need: int
    sites: tuple[int, ...]
    """Ascending."""
    replica: ReplicaId | None = None
    stays: bool = False
    """It may not be taken away."""
    bytes_held: int = 0
    """Of each of its devices, where that cannot be changed now; 0: the least that its model needs."""
    bytes_left: int = 0
    """What it goes on holding of each of its devices for a while though no layout has it: its requests are not over."""

    @property
    def place(self) -> Place:
        """Where it is."""
        return (self.need, self.sites)


class Prices(msgspec.Struct, frozen=True):
    """What things cost beside lost value. A model of value 1000 that lacks a thousandth of its load weighs a device."""

    device: float = DEVICE_PRICE
    load: float = LOAD_PRICE
    block: float = REPLICA_PRICE


class Problem(msgspec.Struct, frozen=True):
    """Devices, wants and what is there now."""

    sites: tuple[Site, ...]
    needs: tuple[Need, ...]
    placed: tuple[Block, ...] = ()
    prices: Prices = msgspec.field(default_factory=Prices)


@dataclass(slots=True)
class Look:
    """One look at the pool. Models, needs, costs and the problem's needs have the same order."""

    now_s: float
    view: PoolView
    models: list[ModelView]
    needs: list[ModelNeed]
    costs: list[StepCosts]
    problem: Problem
    replicas: dict[ReplicaId, ReplicaView]

    def ready(self, replica: ReplicaId) -> bool:
        """Whether it serves."""
        return self.replicas[replica].state is ReplicaState.READY


def kv_least_bytes(model: ModelView, tokens_min: int) -> int:
    """The least KV that a replica gets, over all its devices: ``tokens_min`` where it can grow later; else that of one
    longest context, and the page that the engine keeps for itself."""
    record = model.record
    tokens = tokens_min if model.resizes_kv else (-(-record.max_context_len // record.block_size) + 1) * record.block_size
    return min(tokens * record.kv_bytes_per_token, max(record.kv_bytes, record.kv_bytes_per_token))


def fixed_bytes(record: ModelRecord) -> int:
    """What a replica is charged on each device beside its KV."""
    parts_bytes = -(-record.weights_bytes // record.gpus) + record.overhead_bytes
    return max(parts_bytes, record.budget_bytes - -(-record.kv_bytes // record.gpus))


def kv_used_bytes(record: ModelRecord, replica: ReplicaView) -> int:
    """What its requests hold, and a little more for their next tokens, over all its devices."""
    used = (replica.kv_pages - replica.kv_pages_free) * record.block_size * record.kv_bytes_per_token
    return int(used * 1.05) + record.block_size * record.kv_bytes_per_token
