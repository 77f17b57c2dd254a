"""The coordinator: one policy for the whole pool (SCH-3, SCH-4).

At every look it follows what each model asks for (``needs``, ``headroom``). The *fast* part acts at once: a model that lacks
capacity gets it where that costs least, one in a rush may use its spares, KV moves between neighbours. The *slow* part, once
a second, looks whether devices can be given up, and whether who lacks in vain can be helped by neighbours that go. What it
wants is a layout (``layout``, ``packing``); how the pool gets there is here:

* A replica that the layout does without is *doomed*. Once others are ready to take over it is *closed*: it takes nothing
  new, can be had back at once, and goes when it holds nothing any more, or after ``drain_s``.
* Beside the layout there may be *spares* (``spares``).
* A new replica waits until its memory is free; the closed ones and the spares in its way go.
"""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from broker.core.plan import policy as p
from broker.core.plan import tunables as t
from broker.core.plan.advice import advice
from broker.core.plan.layout import Layout
from broker.core.plan.learning import DeviceScores
from broker.core.plan.memory import Memory
from broker.core.plan.need import ModelNeed, Needs, standing
from broker.core.plan.prewarming import Prospects
from broker.core.plan.problem import Block, Look, Need, Place, Problem, Site, fixed_bytes, kv_least_bytes, kv_used_bytes
from broker.core.plan.search import Search, named, plan
from broker.core.plan.standby import SpareChooser, Spares
from broker.core.plan.turns import Turns
from profiles.costs import decode_work_s, prefill_s
from subjects.ids import DeploymentKey, ReplicaId
from subjects.messages import ModelRecord, ReplicaState, SlaClass, StepCosts

SHUT = "shut"
"""Kind of a site to which nothing can come, whatever the model."""


class CoordinatorSettings(msgspec.Struct, frozen=True):
    """What operators, ablations and tests vary; all other numbers are in ``tunables`` alone."""

    learns_headroom: bool = True
    need_keep_s: float = t.NEED_KEEP_S
    need_keep_lives: float = t.NEED_KEEP_LIVES
    class_values: tuple[float, ...] = t.CLASS_WORTH
    foresees: bool = True
    """False: nothing is forecast, and no trigger heard."""
    learns_devices: bool = False
    """Routing weights lean towards devices that do better than their profile."""
    calm_s: float = t.CALM_S
    close_s: float = t.CLOSE_S
    keep_s: float = t.KEEP_S
    residency_s: float = t.RESIDENCY_S
    turn_s: float = t.TURN_S
    spare_level: float = t.SPARE_LEVEL
    shares_devices: bool = True
    """False: every replica has its devices for itself."""
    residents_max: int | None = None
    """Models that may share a device (SCH-3), where the pool sets no lower bound; None: as many as its memory holds."""
    resizes_kv: bool = True
    """False: a replica keeps the KV budget that it was loaded with."""


class Coordinator:
    """Implements ``policy.Policy``."""

    name = "carpool"

    def __init__(self, settings: CoordinatorSettings | None = None) -> None:
        s = self.settings = settings or CoordinatorSettings()
        self.needs = Needs(s.need_keep_s, s.need_keep_lives, learns=s.learns_headroom)
        self._values = dict(zip(SlaClass, self.settings.class_values, strict=True))
        scores = DeviceScores() if self.settings.learns_devices else None
        self.prospects = Prospects(scores) if self.settings.foresees else None
        self._doomed: dict[ReplicaId, str] = {}
        """Replicas that the plan does without, and why."""
        self._closed: dict[ReplicaId, float] = {}
        """Those of them that take nothing new, since when."""
        self._spares = Spares()
        self._spare_places: list[Place] = []
        """Where those that were asked for at the last look will be."""
        self._rush_s: dict[DeploymentKey, float] = {}
        """Models in a rush, and when they last needed their spares."""
        self._told: dict[ReplicaId, float] = {}
        """Routing weights as last told."""
        self._seen: tuple[tuple[tuple[ReplicaId, ReplicaState], ...], tuple[DeploymentKey, ...]] = ((), ())
        """Replicas and models of the last look; ``_capacity`` is of these models."""
        self._helpless: dict[DeploymentKey, float] = {}
        """Whom the last looks could not help, and what they lacked: others are looked at more often."""
        self._relief_s: dict[DeploymentKey, float] = {}
        """When relief was last looked for."""
        self._trimmed = 0
        """Where trimming goes on."""
        self._capacity: list[float] = []
        self._speed: list[float] = []
        """By model: share of devices that its ready replicas of the plan have."""
        self._shares: dict[DeploymentKey, float] = {}
        """By model: what each of them has on average."""
        self._turn = 0
        self._victims: dict[Place, tuple[ReplicaId, ...]] = {}
        """By place of a block of this look's plan: who leaves for it."""
        self._advised_s = self._decided_s = self._watches_since_s = -math.inf
        self._looked_s = self._slots_s = self._replanned_s = self._calm_s = -math.inf

    def decide(self, now_s: float, view: p.PoolView) -> p.Decision:
        """See ``policy.Policy``."""
        if now_s - self._decided_s > t.GAP_S:
            self._watches_since_s = now_s
        self._decided_s = now_s
        pairs = self._pairs(view)
        needs = self.needs.look(now_s, pairs, self._spares.share, self._shares)
        if self.prospects is None:
            return self._decided(now_s, view, pairs, needs)
        self.prospects.look(now_s, view, pairs, needs)
        return self.prospects.told(now_s, self._decided(now_s, view, pairs, needs))

    def _decided(
        self, now_s: float, view: p.PoolView, pairs: list[tuple[p.ModelView, StepCosts]], needs: list[ModelNeed]
    ) -> p.Decision:
        seen = (
            tuple([(replica.replica, replica.state) for model, _ in pairs for replica in model.replicas]),
            tuple([model.record.deployment for model, _ in pairs]),
        )
        due = seen != self._seen or now_s - self._looked_s >= t.LOOK_S - 1e-6 or bool(self._doomed)
        # In a large pool who waits beside its own replicas waits for the next whole look: looks cost time there.
        late_s = t.LATE_S if len(view.devices) <= t.LARGE_DEVICES else math.inf
        starved = any(model.waiting and (not model.replicas or model.oldest_wait_s >= late_s) for model, _ in pairs)
        lacks = zip(needs, self._capacity, strict=True)
        if not due and not starved and not any(self._at_least(need.load) > capacity for need, capacity in lacks):
            return p.Decision((), self._rushes([model for model, _ in pairs], needs, now_s))
        self._seen = seen
        return self._plan(self._look(now_s, view, pairs, needs))

    def _at_least(self, load: float) -> float:
        """What of a load must be carried: less makes somebody act."""
        return load - min(t.LACK_FREE * load, t.LACK_REPLICAS)

    # ------------------------------------------------------------------------------------------------------------ looking

    def _pairs(self, view: p.PoolView) -> list[tuple[p.ModelView, StepCosts]]:
        """Models with what they cost on the first kind of device that is known for them."""
        kinds = dict.fromkeys(device.device_type for device in view.devices.values())
        pairs = []
        for model in view.models.values():
            for kind in kinds:
                if (costs := model.record.costs.get(kind)) is not None:
                    pairs.append((model, costs))
                    break
        return pairs

    def _look(
        self, now_s: float, view: p.PoolView, pairs: list[tuple[p.ModelView, StepCosts]], needs: list[ModelNeed]
    ) -> Look:
        number = {key: index for index, key in enumerate(view.devices)}
        sites = [self._site(view, device) for device in view.devices.values()]
        kinds = {_kind(device): device for device in view.devices.values()}
        blocks = []
        replicas: dict[ReplicaId, p.ReplicaView] = {}
        wanted = []
        for index, (model, costs) in enumerate(pairs):
            asked = self._need(now_s, model, costs, needs[index], kinds)
            if model.failed_on in number:
                asked = replace(asked, avoids=number[model.failed_on])
            wanted.append(self.prospects.adjusted(asked, needs[index]) if self.prospects else asked)
            for replica in model.replicas:
                stays = replica.stays or not model.may_act
                for key in replica.devices if stays else ():
                    if key not in number:
                        # Its device is locked, or its worker silent for a moment: nothing comes, and what stays goes on.
                        number[key] = len(sites)
                        sites.append(Site(key, "", SHUT, replica.budget_bytes, 0))
                places = [number[key] for key in replica.devices if key in number]
                if len(places) == model.record.gpus:
                    held = left = 0
                    if replica.state is not ReplicaState.READY or not model.resizes_kv:
                        held = fixed_bytes(model.record) + -(-replica.kv_bytes // model.record.gpus)
                    elif replica.replica not in self._spares.kept and replica.running:
                        left = fixed_bytes(model.record) + kv_used_bytes(model.record, replica) // model.record.gpus
                    place = tuple(sorted(places))
                    blocks.append(Block(index, place, replica.replica, stays, held, left))
                    replicas[replica.replica] = replica
        problem = Problem(tuple(sites), tuple(wanted), tuple(blocks))
        return Look(now_s, view, [model for model, _ in pairs], needs, [costs for _, costs in pairs], problem, replicas)

    def _site(self, view: p.PoolView, device: p.DeviceView) -> Site:
        own = self.settings.residents_max if self.settings.shares_devices else 1
        residents = min(own or view.models_per_device_max, view.models_per_device_max)
        group = f"{device.key[0]}/{device.link}" if device.link else ""
        return Site(device.key, group, _kind(device), device.memory_bytes, residents)

    def _need(
        self, now_s: float, model: p.ModelView, costs: StepCosts, need: ModelNeed, kinds: dict[str, p.DeviceView]
    ) -> Need:
        s = self.settings
        record = model.record
        kv_min = kv_least_bytes(model, t.KV_TOKENS_MIN)
        idle_s = now_s - need.last_seen_s if now_s - need.last_seen_s >= t.IDLE_S else 0.0
        keep_s = record.keep_s if record.keep_s is not None else s.keep_s
        rested = idle_s > max(0.0, 2 * model.load_s)
        alive = not idle_s or (bool(model.replicas) and idle_s < keep_s)
        may_start = model.may_load and model.may_act
        residency_s = max(s.residency_s, model.load_s)
        turn_s = max(s.turn_s, residency_s + model.load_s)
        if idle_s and (record.min_replicas or not model.replicas):
            lack_none = 1.0
        elif rested:
            lack_none = t.IDLE_PRICE / (1.0 + idle_s / t.IDLE_HALF_S) / self._values[record.sla_class]
        else:
            lack_none = 1.0 + (turn_s if model.replicas else model.oldest_wait_s)
        kv_bytes = need.kv_tokens * record.kv_bytes_per_token - kv_min * len(model.replicas) if alive else 0.0
        return Need(
            model=record.deployment,
            load=self._at_least(need.load) if alive else 0.0,
            load_keep=need.load_keep if alive else 0.0,
            bytes_min=fixed_bytes(record) + -(-kv_min // record.gpus),
            rates=_rates(record, costs, need, kinds),
            gpus=record.gpus,
            standing=standing(model, costs),
            usage=self._usage(model, costs, need),
            share_min=need.share_min,
            share_floor=need.share_floor if now_s - need.last_seen_s < t.SHARE_KEEP_S else 0.0,
            kv_bytes=max(0.0, kv_bytes) * (1 - t.KV_LACK_FREE),
            kv_keep_bytes=max(0.0, kv_bytes),
            value=self._values[record.sla_class],
            lack_none=lack_none,
            wait_s=model.oldest_wait_s if model.waiting else 0.0,
            idle_s=idle_s,
            rested=rested,
            turn_s=turn_s,
            residency_s=residency_s,
            floor=record.min_replicas,
            fails=model.fails,
            replicas_min=max(record.min_replicas, int(alive)),
            replicas_wanted=math.ceil(need.seats / model.seats) if alive else 0,
            replicas_max=min(record.max_replicas, record.max_replicas if may_start else len(model.replicas)),
            starts_max=max(0, record.max_replicas - len(model.replicas)),
            co_locates=record.allow_co_location,
            tenant=record.tenant,
            load_s=model.load_s,
        )

    def _usage(self, model: p.ModelView, costs: StepCosts, need: ModelNeed) -> float:
        """What one of its replicas takes of its devices' time on average, with the fewest replicas that can be soon."""
        alone = standing(model, costs)
        fewest = math.ceil(need.load / max(0.2, 1.0 - alone))
        work = need.mean + need.decode
        return min(1.0, work / max(1, fewest, len(model.replicas) - 1) + alone * need.activity)

    # ----------------------------------------------------------------------------------------------------------- planning

    def _plan(self, look: Look) -> p.Decision:
        now_s = look.now_s
        self._doomed = {replica: why for replica, why in self._doomed.items() if replica in look.replicas}
        layout = Layout(look.problem, self._blocks(look))
        self._cut(look, layout)
        routine = now_s - self._looked_s >= t.LOOK_S - 1e-6
        trials_max = self._trials_max(look)
        search = Search(layout, trials_max)
        there = set(layout.blocks)
        deployments = [model.record.deployment for model in look.models]
        if routine:
            self._helpless = {}
        known = [self._helpless.get(key, -1.0) for key in deployments]
        auction = Turns(look, layout, max(self.settings.class_values))
        overdue = auction.overdue()
        search.grow(only=overdue)
        auction.claim(overdue)
        search.grow(
            only=[index for index, lack in enumerate(known) if lack < 0 or layout.lack(index) > lack + t.LACK_GROWN],
            shut=auction.claimed(),
        )
        self._helpless.update((deployments[index], layout.lack(index)) for index in search.helpless)
        layout = self._turns(look, layout, auction)
        enough = set(layout.blocks) == there
        why = "the rest carries it"
        spares = self._spares.kept
        if self._doomed or any(not look.ready(replica) for replica in look.replicas if replica not in spares):
            self._calm_s = now_s
        if routine:
            self._looked_s = now_s
            if enough and now_s - self._watches_since_s >= t.WATCH_S:
                if (relieved := self._relieved(look, layout)) is not None:
                    return self._carry(look, relieved, "a neighbour lacks more")
                if emptied := self._give_up(look, search):
                    names = ", ".join("/".join(look.problem.sites[site].key) for site in emptied)
                    why = f"{names} not needed: the rest carries it"
                else:
                    if (better := self._replan(look, layout)) is not None:
                        layout, why = better, "moved: all together need less so"
        return self._carry(look, layout, why)

    def _cut(self, look: Look, layout: Layout) -> None:
        """Takes off what a model has above ``max_replicas``: those not ready before those that run least."""
        for index, model in enumerate(look.models):
            over = len(layout.of[index]) - model.record.max_replicas
            views = [
                (look.replicas[block.replica], number)
                for number in (layout.of[index] if over > 0 else ())
                if (block := layout.blocks[number]).replica is not None and not block.stays
            ]
            views.sort(key=lambda entry: (look.ready(entry[0].replica), entry[0].running, entry[0].replica))
            for _, number in views[: max(0, over)]:
                layout.remove(number)

    def _turns(self, look: Look, layout: Layout, auction: Turns) -> Layout:
        """Who waits without a place gets that of others; see ``turns``. What yields does so at once, so that what its
        requests hold does not count as staying."""
        self._victims = {}
        taken = auction.take()
        if not taken:
            return layout
        gone = {victim for turn in taken for victim in turn.victims}
        placed = tuple(replace(block, bytes_left=0) if block.replica in gone else block for block in look.problem.placed)
        look.problem = replace(look.problem, placed=placed)
        self._victims = {(turn.need, turn.sites): turn.victims for turn in taken}
        return Layout(look.problem, layout.blocks.values())

    def _trials_max(self, look: Look) -> int:
        return max(t.TRIALS_MIN, t.TRIALS_MAX * t.LARGE_DEVICES // max(t.LARGE_DEVICES, len(look.problem.sites)))

    def _relieved(self, look: Look, layout: Layout) -> Layout | None:
        """Where no single change helps a model that lacks, all that is beside one of its replicas may have to go at once.

        That is judged by what will be when those that go are gone: until then they take their part of the time.
        """
        now_s = look.now_s
        self._relief_s = {key: since for key, since in self._relief_s.items() if now_s - since < t.CALM_S}
        least = t.RELIEF_LACK if len(look.problem.sites) <= t.LARGE_DEVICES else t.RELIEF_LACK_LARGE
        lacks = [
            (-lack * wanted.value, index)
            for index, wanted in enumerate(look.problem.needs)
            if (lack := layout.lack(index)) > least and layout.of[index] and wanted.model not in self._relief_s
        ]
        lacking = [index for _, index in sorted(lacks)[: t.TRIES]]
        if not lacking:
            return None
        settled = replace(look.problem, placed=tuple(replace(block, bytes_left=0) for block in look.problem.placed))
        search = Search(Layout(settled, layout.blocks.values()), self._trials_max(look))
        young = self._young_sites(look)
        self._relief_s.update((look.problem.needs[index].model, now_s) for index in lacking)
        if not any(search.relieve(index, young) for index in lacking):
            return None
        return Layout(look.problem, search.layout.blocks.values())

    def _replan(self, look: Look, layout: Layout) -> Layout | None:
        """Now and then a whole plan is made anew: some layouts are better though no single step leads to them."""
        s, now_s = self.settings, look.now_s
        small = len(look.problem.sites) <= t.LARGE_DEVICES
        if not small or now_s - self._calm_s < s.calm_s or now_s - self._replanned_s < t.REPLAN_S:
            return None
        self._replanned_s = now_s
        found = plan(look.problem, trials_max=t.TRIALS_MAX, keep=True)
        lacking = layout.lost()
        layout.keep = True
        now = layout.score()
        layout.keep = False
        # What is lacking only beside the most of lately is no reason to move, but nothing may be lost by it.
        gained = (now.total - now.lost) - (found.score.total - found.score.lost) + max(0.0, lacking - found.score.lost)
        if gained < t.REPLAN_GAIN or found.score.lost > max(now.lost, lacking) + 1e-9:
            return None
        return Layout(look.problem, found.blocks)

    def _blocks(self, look: Look) -> list[Block]:
        """The replicas of the plan, those coming included."""
        coming_spares = dict.fromkeys(self._spare_places)
        blocks = []
        for block in look.problem.placed:
            assert block.replica is not None
            if block.replica in self._doomed or block.replica in self._spares.kept:
                continue
            if block.place in coming_spares:
                del coming_spares[block.place]
                continue
            blocks.append(block)
        return blocks

    def _give_up(self, look: Look, search: Search) -> list[int]:
        """Devices that the others can do without; when all is calm also by moving what is there."""
        young = self._young_sites(look)
        candidates = [site for site in search.emptiest() if site not in young]
        emptied = [site for site in candidates if search.layout.on[site] and search.empty(site, moves=False)]
        self._trimmed = Search(search.layout, self._trials_max(look)).trim(young, self._trimmed)
        if emptied or look.now_s - self._calm_s < self.settings.calm_s:
            return emptied
        tries = min(t.TRIES, len(candidates))
        turns = [candidates[(self._turn + turn) % len(candidates)] for turn in range(tries)]
        self._turn += tries
        return next(([site] for site in turns if search.empty(site)), [])

    def _young_sites(self, look: Look) -> set[int]:
        views = [(block, look.replicas[block.replica]) for block in look.problem.placed if block.replica is not None]
        return {
            site
            for block, view in views
            if view.state is not ReplicaState.READY or look.now_s - view.since_s < self.settings.residency_s
            for site in block.sites
        }

    # ------------------------------------------------------------------------------------------------------- carrying out

    def _carry(self, look: Look, layout: Layout, why: str) -> p.Decision:
        s, now_s = self.settings, look.now_s
        blocks = named(layout)
        kept = {block.replica: block for block in blocks if block.replica is not None}
        yields = {replica for victims in self._victims.values() for replica in victims if look.ready(replica)}
        chooser = SpareChooser(look, layout)
        spares = chooser.choose(kept, yields, s.spare_level, t.SPARES_MAX) if s.spare_level else Spares()
        self._spares = spares
        for replica in look.replicas:
            if replica in kept or replica in spares.kept or replica in yields:
                self._doomed.pop(replica, None)
            elif replica not in self._doomed:
                self._doomed[replica] = why
        stops: dict[ReplicaId, p.StopReplica] = {}
        self._close(look, blocks, stops)
        leaving = (self._doomed, self._closed, stops, self._victims)
        memory = Memory(look, layout, blocks, spares, *leaving, now_s == self._looked_s, s.resizes_kv)
        for replica in memory.evicted:
            if look.ready(replica) and (replica in spares.kept or self._goes(look, replica)):
                stops.setdefault(replica, p.StopReplica(replica, "its memory is needed", interrupt=True))
        self._spare_places = memory.spares
        actions: list[p.Action] = [*stops.values(), *memory.actions, *self._advice(look)]
        if now_s - self._slots_s >= t.LOOK_S - 1e-6:
            self._slots_s = now_s
            actions.extend(self._slots(look, layout, kept))
        self._capacity = [layout.capacity[index] for index in range(len(look.models))]
        return p.Decision(tuple(actions), self._weights(look, layout, kept))

    def _advice(self, look: Look) -> list[p.Action]:
        """What people are told now and then of models that may not be acted for."""
        due = look.now_s - self._advised_s >= t.LOOK_S
        if not due or not any(model.advises for model in look.models):
            return []
        self._advised_s = look.now_s
        return advice(look, self._blocks(look), max(self.settings.class_values), self._trials_max(look))

    def _close(self, look: Look, blocks: tuple[Block, ...], stops: dict[ReplicaId, p.StopReplica]) -> None:
        """Doomed replicas take nothing new once others are ready to take over, and go when they hold nothing any more."""
        s, now_s = self.settings, look.now_s
        if not self._doomed and not self._closed:
            return
        self._closed = {replica: since for replica, since in self._closed.items() if replica in look.replicas}
        planned = {block.need for block in blocks}
        coming = {block.need for block in blocks if block.replica is None or not look.ready(block.replica)}
        served = {block.need for block in blocks if block.replica is not None and look.ready(block.replica)}
        for index, model in enumerate(look.models):
            for view in model.replicas:
                replica = view.replica
                doomed = replica in self._doomed
                if view.state is not ReplicaState.READY:
                    if doomed:
                        stops[replica] = p.StopReplica(replica, self._doomed[replica])
                    continue
                wanted = look.problem.needs[index].replicas_min > 0 and index in planned
                closes = doomed and index not in coming and (index in served or not wanted)
                if closes and replica not in self._closed:
                    self._closed[replica] = now_s
                elif not closes and replica in self._closed:
                    del self._closed[replica]
                since_s = self._closed.get(replica, math.inf)
                if now_s - since_s >= s.close_s and self._goes(look, replica):
                    stops[replica] = p.StopReplica(replica, self._doomed[replica], interrupt=True)

    def _goes(self, look: Look, replica: ReplicaId) -> bool:
        """Whether a closed replica may be ended: what it still runs costs little to compute again, or has had its time."""
        view = look.replicas[replica]
        closed_s = look.now_s - self._closed.get(replica, look.now_s)
        if closed_s >= t.CLOSED_S_MAX or not view.running:
            return True
        index = next(i for i, model in enumerate(look.models) if model.record.deployment == view.deployment)
        need = look.needs[index]
        again_s = view.running * prefill_s(look.costs[index], need.input_tokens + need.output_tokens / 2)
        return again_s <= t.AGAIN_S_MAX + t.AGAIN_SHARE * closed_s

    # ------------------------------------------------------------------------------------------------------------ routing

    def _weights(self, look: Look, layout: Layout, kept: dict[ReplicaId, Block]) -> dict[ReplicaId, float]:
        """Routing: by share of time among the plan's replicas, spares only in a rush, none to those that close."""
        weights: dict[ReplicaId, float] = {}
        self._speed, counts = [0.0] * len(look.models), [0] * len(look.models)
        for replica, block in kept.items():
            if look.ready(replica):
                share = min(layout.share(block.need, site) for site in block.sites)
                weights[replica] = share * self.prospects.weight(replica) if self.prospects else share
                self._speed[block.need] += share
                counts[block.need] += 1
        self._shares = {
            model.record.deployment: speed / count
            for model, speed, count in zip(look.models, self._speed, counts, strict=True)
            if count
        }
        for replica in self._doomed:
            weights[replica] = 0.0 if replica in self._closed else 0.5
        there = {view.replica: model.may_act for model in look.view.models.values() for view in model.replicas}
        self._told = {replica: weight for replica, weight in self._told.items() if replica in there}
        # Where people only want to see what would be done, the routing stays as it is by itself.
        changed = self._changed({replica: weight if there[replica] else 1.0 for replica, weight in weights.items()})
        changed.update(self._rushes(look.models, look.needs, look.now_s))
        return changed

    def _rushes(self, models: list[p.ModelView], needs: list[ModelNeed], now_s: float) -> dict[ReplicaId, float]:
        """Opens and closes spares: a rush is more work than the plan's own replicas do, until it is clearly over."""
        weights: dict[ReplicaId, float] = {}
        if not self._spares.kept:
            return weights
        for model, need, speed in zip(models, needs, self._speed, strict=True):
            deployment = model.record.deployment
            have = speed * need.burst_share
            rush = not have or need.waiting_s > 0.25 * have or need.fast > 0.95 * have
            if rush or (deployment in self._rush_s and (need.waiting_s > 0 or need.fast > 0.8 * have)):
                self._rush_s[deployment] = now_s
            elif now_s - self._rush_s.get(deployment, -math.inf) > 1.0:
                self._rush_s.pop(deployment, None)
            for view in model.replicas:
                if view.replica in self._spares.kept and model.may_act:
                    weights[view.replica] = 0.5 if deployment in self._rush_s else 0.0
        return self._changed(weights)

    def _changed(self, weights: dict[ReplicaId, float]) -> dict[ReplicaId, float]:
        """Those that differ enough from what was told, which they are from now on."""
        pairs = [(replica, weight, self._told.get(replica, 1.0)) for replica, weight in weights.items()]
        changed = {r: weight for r, weight, told in pairs if (weight > 0) != (told > 0) or abs(weight - told) > 0.2}
        self._told.update(changed)
        return changed

    def _slots(self, look: Look, layout: Layout, kept: dict[ReplicaId, Block]) -> list[p.Action]:
        """Bounds what runs at once so that tokens come in time even when requests queue."""
        actions: list[p.Action] = []
        for replica, block in kept.items():
            view = look.replicas[replica]
            if view.state is not ReplicaState.READY or not view.slots:
                continue
            need, costs, record = look.needs[block.need], look.costs[block.need], look.models[block.need].record
            share = min(layout.share(block.need, site) for site in block.sites)
            tpot_s = record.sla.tpot_ms / 1000 * t.TPOT_RUN
            most = slots = view.slots_max or record.max_num_seqs
            # Where the steps alone take longer than that, fewer at once would bring no token in time.
            if need.request_s > 0 and tpot_s * share > costs.step_const_s:
                slots = int(need.output_tokens * (tpot_s * share - costs.step_const_s) / need.request_s)
            slots = min(max(slots, t.SLOTS_MIN), most)
            if abs(slots - view.slots) > max(1.0, 0.15 * view.slots):
                actions.append(
                    p.SetReplicaConcurrency(replica, slots, f"{slots} at once keep {tpot_s * 1000:.0f} ms a token")
                )
        return actions


def _kind(device: p.DeviceView) -> str:
    """Devices of one kind are equal to a plan: the same hardware, and the same engines to run on it."""
    return " ".join((device.device_type, *device.engines))


def _rates(record: ModelRecord, costs: StepCosts, need: ModelNeed, kinds: dict[str, p.DeviceView]) -> dict[str, float]:
    """By kind how fast a model's usual request is served there, over how fast with ``costs``; those where it can run."""
    rates = {SHUT: 1.0}
    tokens = (need.input_tokens, need.output_tokens)
    work_s = prefill_s(costs, need.input_tokens) + decode_work_s(costs, *tokens)
    for kind, device in kinds.items():
        there = record.costs.get(device.device_type)
        if there is None or (device.engines and record.engine_type.value not in device.engines):
            continue
        takes_s = prefill_s(there, need.input_tokens) + decode_work_s(there, *tokens)
        rates[kind] = work_s / takes_s if there is not costs and takes_s > 0 else 1.0
    return rates
