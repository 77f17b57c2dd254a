"""Everybody's part of the memory of the devices, and the starts of new replicas in it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from broker.core.plan.layout import Layout
from broker.core.plan.policy import Action, ReplicaView, ResizeReplicaKv, StartReplica
from broker.core.plan.problem import Block, Look, Place, fixed_bytes, kv_least_bytes, kv_used_bytes
from broker.core.plan.standby import Spares
from broker.core.plan.tunables import GAIN_MIN, GROW_BY, KV_TOKENS_MIN, ROUNDING_BYTES, SHRINK_BY, START_FACTOR
from broker.core.pool.catalogue import DeviceKey
from broker.core.pool.describe import seconds_text
from subjects.ids import DeploymentKey, ReplicaId
from subjects.messages import ModelRecord


@dataclass(eq=False, slots=True)
class Memory:
    """Plans the memory of one look: :attr:`actions` in order, and who must go for them."""

    _look: Look
    _layout: Layout
    _blocks: tuple[Block, ...]
    _spares: Spares
    _doomed: Iterable[ReplicaId]
    _closed: Mapping[ReplicaId, float]
    _stopping: Container[ReplicaId]
    _victims: Mapping[Place, tuple[ReplicaId, ...]]
    """By place of a new block: who leaves for it."""
    _routine: bool
    """Also what nobody is in a hurry for is evened out."""
    _resizes: bool
    """False: each keeps what it began with."""
    evicted: dict[ReplicaId, None] = field(default_factory=dict)
    """Replicas that take nothing new any more, and whose memory is needed now."""
    actions: list[Action] = field(default_factory=list)
    spares: list[Place] = field(default_factory=list)
    """Places of the spares that are started."""
    _free: list[int] = field(default_factory=list)
    _beside: dict[int, list[ReplicaId]] = field(default_factory=dict)
    _spare_bytes: dict[int, int] = field(default_factory=dict)
    _shared_bytes: dict[int, int] = field(default_factory=dict)
    _site_of: dict[DeviceKey, int] = field(default_factory=dict)
    _records: dict[DeploymentKey, ModelRecord] = field(default_factory=dict)
    _fixed: set[DeploymentKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        look, blocks, spares = self._look, self._blocks, self._spares
        sites = look.problem.sites
        devices = look.view.devices
        self._free = [devices[site.key].free_planned_bytes if site.key in devices else 0 for site in sites]
        out = {**dict.fromkeys(self._doomed), **spares.kept}
        for block in look.problem.placed:
            if block.replica is not None and block.replica in out:
                for site in block.sites:
                    self._beside.setdefault(site, []).append(block.replica)
        for block in spares.new:
            site = block.sites[0]
            self._spare_bytes[site] = self._spare_bytes.get(site, 0) + look.problem.needs[block.need].bytes_min
        self._site_of = {site.key: number for number, site in enumerate(sites)}
        self._records = {model.record.deployment: model.record for model in look.models}
        self._fixed = {model.record.deployment for model in look.models if not model.resizes_kv}
        new = [block for block in blocks if block.replica is None]
        urgent = {site for block in (*new, *spares.new) for site in block.sites}
        if self._routine:
            urgent.update(self._starved(blocks))
        grows = []
        for block in blocks:
            hurry = not urgent.isdisjoint(block.sites)
            due = self._resizes and (hurry or self._routine) and look.models[block.need].resizes_kv
            if due and block.replica is not None and look.ready(block.replica):
                replica = look.replicas[block.replica]
                if target := self._resize(block, replica, hurry):
                    grows.append((block, replica, target))
        if self._resizes:
            self._squeeze(urgent)
        for block in new:
            self._start(block)
        if not new:
            for block in spares.new:
                self._start_spare(block)
            for block, replica, target in grows:
                self._grow(block, replica, target)

    def _starved(self, blocks: tuple[Block, ...]) -> list[int]:
        """Sites where somebody should have clearly more and nothing is free: the others must give."""
        sites: list[int] = []
        for block in blocks:
            if block.replica is not None and self._look.ready(block.replica):
                replica, gpus = self._look.replicas[block.replica], self._look.models[block.need].record.gpus
                more = (self._target(block) - replica.kv_bytes) // gpus
                if more * gpus > GROW_BY * replica.kv_bytes:
                    sites.extend(site for site in block.sites if self._free[site] < more)
        return sites

    def _squeeze(self, urgent: set[int]) -> None:
        """Closed replicas in the way keep only what their requests hold."""
        for site in sorted(urgent):
            for name in self._beside.get(site, ()):
                replica = self._look.replicas[name]
                stays = name not in self._closed or name in self._stopping or not self._look.ready(name)
                if stays or replica.devices[0] != self._look.problem.sites[site].key or replica.deployment in self._fixed:
                    continue
                record = self._records[replica.deployment]
                target = kv_used_bytes(record, replica)
                if target < replica.kv_bytes * 0.9:
                    self.actions.append(ResizeReplicaKv(name, target, "it leaves, and its memory is needed"))
                    freed = (replica.kv_bytes - target) // record.gpus
                    for key in replica.devices:
                        self._free[self._site_of[key]] += freed

    def _held(self, site: int) -> int:
        """What those beside the plan hold on a site, and will."""
        held = self._spare_bytes.get(site, 0)
        for name in self._beside.get(site, ()):
            replica = self._look.replicas[name]
            if name in self._closed and self._look.ready(name) and replica.deployment not in self._fixed:
                record = self._records[replica.deployment]
                held += fixed_bytes(record) + kv_used_bytes(record, replica) // record.gpus
            else:
                held += replica.budget_bytes
        return held

    def _least(self, block: Block) -> int:
        return kv_least_bytes(self._look.models[block.need], KV_TOKENS_MIN)

    def _target(self, block: Block) -> int:
        """KV over all devices: the least, and its part of what its sites have free beside those of no plan."""
        record = self._look.models[block.need].record
        extra = min(self._shared(site) * self._layout.kv_part(site, block.need) for site in block.sites)
        return self._least(block) + max(0, int(extra)) * record.gpus

    def _shared(self, site: int) -> int:
        """What the plan's replicas on a site can share out beyond what each needs at least."""
        if (known := self._shared_bytes.get(site)) is None:
            layout, needs = self._layout, self._look.problem.needs
            blocks = [layout.blocks[number] for number in layout.on[site]]
            least = sum(block.bytes_held or needs[block.need].bytes_min for block in blocks)
            known = self._look.problem.sites[site].memory_bytes - self._held(site) - least
            self._shared_bytes[site] = known
        return known

    def _resize(self, block: Block, replica: ReplicaView, hurry: bool) -> int:
        """Shrinks it if that is due; returns what it should grow to, or 0."""
        record = self._look.models[block.need].record
        used = (replica.kv_pages - replica.kv_pages_free) * record.block_size * record.kv_bytes_per_token
        least = min(replica.kv_bytes, self._least(block))
        target = max(self._target(block), int(used * (1.01 if hurry else 1.1)), least)
        if target < replica.kv_bytes * (0.99 if hurry else 1 - SHRINK_BY):
            self.actions.append(ResizeReplicaKv(replica.replica, target, "its neighbours need the memory"))
            self._take(block, (target - replica.kv_bytes) // record.gpus)
        return target if target > replica.kv_bytes * (1 + GROW_BY) else 0

    def _grow(self, block: Block, replica: ReplicaView, target: int) -> None:
        record = self._look.models[block.need].record
        room = max(0, min(self._free[site] for site in block.sites)) * record.gpus
        target = min(target, replica.kv_bytes + room)
        if target > replica.kv_bytes * (1 + GROW_BY):
            self.actions.append(ResizeReplicaKv(replica.replica, target, "memory beside it is free"))
            self._take(block, -(-(target - replica.kv_bytes) // record.gpus))

    def _take(self, block: Block, each_bytes: int) -> None:
        for site in block.sites:
            self._free[site] -= each_bytes

    def _start(self, block: Block) -> None:
        """Starts a new replica where its memory is free, else makes those go that are not needed there any more."""
        look = self._look
        record = look.models[block.need].record
        need = look.needs[block.need]
        fixed, least = fixed_bytes(record), self._least(block)
        victims = self._victims.get(block.place, ())
        if victims and not all(look.ready(victim) for victim in victims):
            return  # What is not ready is taken back first.
        for victim in victims:
            for key in look.replicas[victim].devices:
                if key in self._site_of:
                    self._free[self._site_of[key]] += look.replicas[victim].budget_bytes
        room = min(self._free[site] for site in block.sites) - fixed
        if room * record.gpus < least:
            for site in block.sites:
                if self._free[site] - fixed < -(-least // record.gpus):
                    self.evicted.update(
                        dict.fromkeys(r for r in self._beside.get(site, ()) if r in self._closed or r in self._spares.kept)
                    )
            return
        each = need.kv_tokens * record.kv_bytes_per_token / max(1, len(self._layout.of[block.need]))
        grows = self._resizes and look.models[block.need].resizes_kv
        wanted = int(START_FACTOR * each) if grows else record.kv_bytes
        kv = max(least, min(wanted, self._target(block), (room - ROUNDING_BYTES) * record.gpus))
        if not grows and room * record.gpus >= record.kv_bytes <= self._target(block):
            kv = record.kv_bytes
        keys = tuple(look.problem.sites[site].key for site in block.sites)
        reason = self._reason(block, victims)
        self.actions.append(StartReplica(record.deployment, keys, reason, victims, kv_bytes=kv))
        self._take(block, fixed + -(-kv // record.gpus))

    def _reason(self, block: Block, victims: tuple[ReplicaId, ...]) -> str:
        """Who waits, who leaves for it, and what the model needs."""
        look = self._look
        model, need = look.models[block.need], look.needs[block.need]
        parts = []
        if model.waiting:
            parts.append(f"{model.waiting} waiting for {seconds_text(model.oldest_wait_s)}")
        elif len(model.replicas) < model.record.min_replicas:
            parts.append(f"below its minimum of {model.record.min_replicas}")
        if victims:
            names = [self._records[look.replicas[victim].deployment].name for victim in victims]
            parts.append(f"{', '.join(names)} {'leave' if len(names) > 1 else 'leaves'}")
        if need.load >= GAIN_MIN or not parts:
            parts.append(need.text)
        return "; ".join(parts)

    def _start_spare(self, block: Block) -> None:
        record = self._look.models[block.need].record
        least = self._least(block)
        each = fixed_bytes(record) + least
        site = block.sites[0]
        if self._free[site] >= each:
            need = self._look.needs[block.need]
            reason = f"spare for rushes of {need.level:.2f}; {need.text}"
            key = self._look.problem.sites[site].key
            self.actions.append(StartReplica(record.deployment, (key,), reason, kv_bytes=least))
            self.spares.append(block.place)
            self._take(block, each)
