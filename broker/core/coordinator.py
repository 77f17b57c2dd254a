"""The coordinator: one policy for the whole pool (SCH-3, SCH-4)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from broker.core.layout import Block, Layout, Need, Prices, Problem, Site
from broker.core.needs import ModelNeed, Needs, NeedSettings, standing
from broker.core.packing import Search, named
from broker.core.policy import (
    Action,
    Decision,
    DeviceView,
    ModelView,
    PoolView,
    ReplicaView,
    ResizeReplicaKv,
    SetReplicaConcurrency,
    StartReplica,
    StopReplica,
)
from subjects.ids import ReplicaId
from subjects.messages import ReplicaState, SlaClass, StepCosts

VALUES = {SlaClass.GOLD: 3000.0, SlaClass.SILVER: 1000.0, SlaClass.BRONZE: 300.0, SlaClass.BATCH: 50.0}


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """The numbers of the coordinator, and switches for ablations."""

    needs: NeedSettings = field(default_factory=NeedSettings)
    slow_s: float = 1e9
    """Cadence of the whole plan."""
    shrink_s: float = 1.0
    """Cadence of the question whether a device can be given up."""
    calm_s: float = 5.0
    """Replicas move only when nothing has loaded or left for so long."""
    shrink_tries: int = 3
    """Devices that are looked at each time: the least needed one, and others in turn."""
    close_s: float = 1.0
    """How long a replica takes nothing before it goes: so long it can be had back at once."""
    drain_s: float = 60.0
    """How long its requests may take after that."""
    kv_tokens_min: int = 24_000
    kv_s: float = 1.0
    slots_s: float = 1.0
    tpot_run: float = 0.85
    """Share of the time per token at which the number of requests at once is bounded."""
    trials_max: int = 1500
    forget_s: float = 1800.0
    lack_free: float = 0.06
    shares_devices: bool = True
    resizes_kv: bool = True
    bounds_slots: bool = True


@dataclass(slots=True)
class _Look:
    """One look at the pool."""

    now_s: float
    view: PoolView
    models: list[ModelView]
    needs: list[ModelNeed]
    costs: list[StepCosts]
    problem: Problem
    replicas: dict[ReplicaId, ReplicaView]


class Coordinator:
    """Implements ``policy.Policy``."""

    name = "carpool"
    needs_costs = True
    """Models without costs are left to the scheduler's own rules."""

    def __init__(self, settings: CoordinatorSettings | None = None) -> None:
        self.settings = settings or CoordinatorSettings()
        self.wakes_cold_models = False
        self.needs = Needs(self.settings.needs)
        self._doomed: dict[ReplicaId, str] = {}
        """Replicas that the plan does without, and why."""
        self._closed: dict[ReplicaId, float] = {}
        """Those of them that take nothing new, since when."""
        self._turn = 0
        self._calm_s = -math.inf
        self._shrunk_s = self._planned_s = self._kv_s = self._slots_s = -math.inf

    def decide(self, now_s: float, view: PoolView) -> Decision:
        """See ``policy.Policy``."""
        s = self.settings
        look = self._look(now_s, view)
        self._doomed = {replica: why for replica, why in self._doomed.items() if replica in look.replicas}
        blocks = [block for block in look.problem.placed if block.replica not in self._doomed]
        layout = Layout(look.problem, blocks)
        search = Search(layout, s.trials_max)
        search.grow()
        why = ""
        if self._doomed or any(replica.state is not ReplicaState.READY for replica in look.replicas.values()):
            self._calm_s = now_s
        if now_s - self._shrunk_s >= s.shrink_s and layout.trials == 0:
            self._shrunk_s = now_s
            moves = now_s - self._calm_s >= s.calm_s
            candidates = search.emptiest()
            for site in candidates:
                if search.empty(site, moves=False):
                    why = f"{look.problem.sites[site].key[1]} is not needed"
                    break
            else:
                if moves:
                    for turn in range(min(s.shrink_tries, len(candidates))):
                        site = candidates[(self._turn + turn) % len(candidates)]
                        if search.empty(site):
                            why = f"{look.problem.sites[site].key[1]} is not needed"
                            break
                    self._turn += s.shrink_tries
        if now_s - self._planned_s >= s.slow_s:
            self._planned_s = now_s
            layout = self._replan(look, layout)
        return self._carry(look, layout, why or "the rest carries it")

    def _replan(self, look: _Look, layout: Layout) -> Layout:
        best = layout
        for thrifty in (False, True):
            stays = [block for block in look.problem.placed if block.stays]
            fresh = Layout(look.problem, stays)
            search = Search(fresh, self.settings.trials_max, thrifty=thrifty)
            search.grow()
            search.shrink()
            if fresh.score().total < best.score().total - 0.5:
                best = fresh
        return best

    # ------------------------------------------------------------------------------------------------------------ looking

    def _look(self, now_s: float, view: PoolView) -> _Look:
        kinds = dict.fromkeys(device.device_type for device in view.devices.values())
        pairs = []
        for model in view.models.values():
            costs = next((model.record.costs[kind] for kind in kinds if kind in model.record.costs), None)
            if costs is not None:
                pairs.append((model, costs))
        models = [model for model, _ in pairs]
        found = self.needs.look(now_s, pairs)
        needs = [found[model.record.model_hash] for model in models]
        keys = list(view.devices)
        number = {key: index for index, key in enumerate(keys)}
        sites = tuple(self._site(view, device) for device in view.devices.values())
        blocks = []
        replicas = {}
        wanted = []
        for index, (model, costs) in enumerate(pairs):
            wanted.append(self._need(now_s, model, costs, needs[index]))
            for replica in model.replicas:
                places = [number[key] for key in replica.devices if key in number]
                if len(places) == model.record.gpus:
                    held = 0 if replica.state is ReplicaState.READY else replica.budget_bytes
                    blocks.append(Block(index, tuple(sorted(places)), replica.replica, replica.stays, held))
                    replicas[replica.replica] = replica
        problem = Problem(sites, tuple(wanted), tuple(blocks), Prices())
        return _Look(now_s, view, models, needs, [costs for _, costs in pairs], problem, replicas)

    def _site(self, view: PoolView, device: DeviceView) -> Site:
        residents = view.models_per_device_max if self.settings.shares_devices else 1
        group = f"{device.key[0]}/{device.link}" if device.link else ""
        return Site(device.key, group, device.device_type, device.memory_bytes, residents)

    def _need(self, now_s: float, model: ModelView, costs: StepCosts, need: ModelNeed) -> Need:
        s = self.settings
        record = model.record
        kv_min = s.kv_tokens_min * record.kv_bytes_per_token
        bytes_min = -(-(record.weights_bytes + kv_min) // record.gpus) + record.overhead_bytes
        alive = now_s - need.last_seen_s < s.forget_s
        kv_bytes = need.kv_tokens * record.kv_bytes_per_token - kv_min * len(model.replicas)
        return Need(
            model=record.model_hash,
            load=need.load * (1 - s.lack_free),
            load_keep=need.load,
            bytes_min=bytes_min,
            rates=dict.fromkeys(record.costs, 1.0),
            gpus=record.gpus,
            standing=standing(model, costs),
            activity=need.activity,
            share_min=need.share_min,
            kv_bytes=max(0.0, kv_bytes),
            value=VALUES[record.sla_class],
            replicas_min=max(record.min_replicas, int(alive)),
            replicas_max=record.max_replicas,
            co_locates=record.allow_co_location,
            load_s=model.load_s,
        )

    # ------------------------------------------------------------------------------------------------------- carrying out

    def _carry(self, look: _Look, layout: Layout, why: str) -> Decision:
        blocks = named(layout)
        kept = {block.replica: block for block in blocks if block.replica is not None}
        for replica in look.replicas:
            if replica in kept:
                self._doomed.pop(replica, None)
            elif replica not in self._doomed:
                self._doomed[replica] = why
        weights: dict[ReplicaId, float] = {}
        stops: dict[ReplicaId, StopReplica] = {}
        self._close(look, blocks, weights, stops)
        memory = _Memory(self, look, layout, blocks)
        for replica in memory.evicted:
            if look.replicas[replica].state is ReplicaState.READY:
                stops.setdefault(replica, StopReplica(replica, "its memory is needed", interrupt=True))
        actions: list[Action] = [*stops.values(), *memory.actions]
        if self.settings.bounds_slots and look.now_s - self._slots_s >= self.settings.slots_s:
            self._slots_s = look.now_s
            actions.extend(self._slots(look, layout, kept))
        return Decision(tuple(actions), weights)

    def _close(
        self, look: _Look, blocks: tuple[Block, ...], weights: dict[ReplicaId, float], stops: dict[ReplicaId, StopReplica]
    ) -> None:
        """Doomed replicas take nothing new once others are ready to take over, and go when they hold nothing any more."""
        s, now_s = self.settings, look.now_s
        self._closed = {replica: since for replica, since in self._closed.items() if replica in look.replicas}
        coming = {block.need for block in blocks if self._coming(look, block)}
        served = {block.need for block in blocks if not self._coming(look, block)}
        for index, model in enumerate(look.models):
            for view in model.replicas:
                replica = view.replica
                doomed = replica in self._doomed
                if view.state is not ReplicaState.READY:
                    if doomed:
                        stops[replica] = StopReplica(replica, self._doomed[replica])
                    continue
                wanted = look.problem.needs[index].replicas_min > 0
                closes = doomed and index not in coming and (index in served or not wanted)
                if closes and replica not in self._closed:
                    self._closed[replica] = now_s
                    weights[replica] = 0.0
                elif not closes and replica in self._closed:
                    del self._closed[replica]
                    weights[replica] = 1.0
                since_s = self._closed.get(replica)
                if since_s is None or now_s - since_s < s.close_s:
                    continue
                if not view.running or now_s - since_s >= s.drain_s:
                    stops[replica] = StopReplica(replica, self._doomed[replica], interrupt=True)

    def _coming(self, look: _Look, block: Block) -> bool:
        return block.replica is None or look.replicas[block.replica].state is not ReplicaState.READY

    def _slots(self, look: _Look, layout: Layout, kept: dict[ReplicaId, Block]) -> list[Action]:
        """Bounds what runs at once so that tokens come in time even when requests queue."""
        s = self.settings
        actions: list[Action] = []
        for replica, block in kept.items():
            view = look.replicas[replica]
            if view.state is not ReplicaState.READY:
                continue
            need, costs, record = look.needs[block.need], look.costs[block.need], look.models[block.need].record
            share = min(layout.share(block.need, site) for site in block.sites)
            tpot_s = record.sla.tpot_ms / 1000 * s.tpot_run
            slots = record.max_num_seqs
            if need.request_s > 0:
                slots = int(need.output_tokens * max(0.0, tpot_s * share - costs.step_const_s) / need.request_s)
            slots = min(max(slots, 4), record.max_num_seqs)
            if view.slots and abs(slots - view.slots) > 0.15 * view.slots:
                actions.append(SetReplicaConcurrency(replica, slots, f"{slots} at once keep {tpot_s * 1000:.0f} ms a token"))
        return actions


class _Memory:
    """Everybody's part of the memory of the devices, and the starts of new replicas in it."""

    def __init__(self, owner: Coordinator, look: _Look, layout: Layout, blocks: tuple[Block, ...]) -> None:
        self._settings = owner.settings
        self._look = look
        self._layout = layout
        self.evicted: dict[ReplicaId, None] = {}
        """Replicas that take nothing new any more and whose memory is needed now."""
        self.actions: list[Action] = []
        sites = look.problem.sites
        self._closed = owner._closed
        self._free = [look.view.devices[site.key].free_planned_bytes for site in sites]
        self._doomed: list[list[ReplicaId]] = [[] for _ in sites]
        for block in look.problem.placed:
            if block.replica in owner._doomed:
                for site in block.sites:
                    self._doomed[site].append(block.replica)
        new = [block for block in blocks if block.replica is None]
        urgent = {site for block in new for site in block.sites}
        routine = owner.settings.resizes_kv and look.now_s - owner._kv_s >= owner.settings.kv_s
        if routine:
            owner._kv_s = look.now_s
        grows = []
        for block in blocks:
            if block.replica is None:
                continue
            replica = look.replicas[block.replica]
            if replica.state is not ReplicaState.READY:
                continue
            hurry = not urgent.isdisjoint(block.sites)
            if routine or hurry:
                change = self._resize(block, replica, hurry)
                if change > 0:
                    grows.append((block, replica, change))
        for block in new:
            self._start(block)
        if not new:
            for block, replica, target in grows:
                self._grow(block, replica, target)

    def _held(self, site: int) -> int:
        return sum(self._look.replicas[replica].budget_bytes for replica in self._doomed[site])

    def _least(self, block: Block) -> int:
        record = self._look.models[block.need].record
        return min(self._settings.kv_tokens_min * record.kv_bytes_per_token, max(record.kv_bytes, record.kv_bytes_per_token))

    def _target(self, block: Block) -> int:
        """KV over all devices: the least, and its part of what its sites have free beside those that still leave."""
        record = self._look.models[block.need].record
        extra = math.inf
        for site in block.sites:
            free = self._layout.free_bytes(site)
            part = self._layout.kv_share(site, block.need) / free if free > 0 else 1.0
            extra = min(extra, (free - self._held(site)) * part)
        return self._least(block) + max(0, int(extra)) * record.gpus

    def _resize(self, block: Block, replica: ReplicaView, hurry: bool) -> int:
        """Shrinks it if that is due; returns what it should grow to, or 0."""
        record = self._look.models[block.need].record
        target = self._target(block)
        used = (replica.kv_pages - replica.kv_pages_free) * record.block_size * record.kv_bytes_per_token
        target = max(target, int(used * 1.05)) if not hurry else max(target, min(replica.kv_bytes, self._least(block)))
        if target < replica.kv_bytes * (0.98 if hurry else 0.85):
            self.actions.append(ResizeReplicaKv(replica.replica, target, "its neighbours need the memory"))
            self._take(block, (target - replica.kv_bytes) // record.gpus)
        return target if target > replica.kv_bytes * 1.1 else 0

    def _grow(self, block: Block, replica: ReplicaView, target: int) -> None:
        record = self._look.models[block.need].record
        room = min(self._free[site] for site in block.sites) * record.gpus
        target = min(target, replica.kv_bytes + room)
        if target > replica.kv_bytes * 1.1:
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
        fixed = -(-record.weights_bytes // record.gpus) + record.overhead_bytes
        least = self._least(block)
        room = min(self._free[site] for site in block.sites) - fixed
        if room * record.gpus < least:
            for site in block.sites:
                if self._free[site] - fixed < -(-least // record.gpus):
                    self.evicted.update(dict.fromkeys(r for r in self._doomed[site] if r in self._closed))
            return
        wanted = need.kv_tokens * record.kv_bytes_per_token / max(1, len(self._layout.of(block.need)))
        kv = max(least, min(int(1.5 * wanted), self._target(block), (room - ROUNDING_BYTES) * record.gpus))
        keys = tuple(look.problem.sites[site].key for site in block.sites)
        self.actions.append(StartReplica(record.model_hash, keys, need.text, kv_bytes=kv))
        self._take(block, fixed + -(-kv // record.gpus))


ROUNDING_BYTES = 1 << 20
