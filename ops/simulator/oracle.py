"""A clairvoyant schedule: what could be saved by somebody who knows every request in advance.

Not a bound but a feasible schedule, and no policy: it is planned offline from the trace (``foresight``), then the simulator
runs it like any other, request by request, through the same scheduler, agents and engines. Its margins are searched for:
each trial plans, simulates, and gives models that missed the SLO more and the others less; the cheapest schedule that meets
the SLO of every model is taken. Our own policy's run is one of the trials, so the result is never dearer than that. The
search stops after a number of trials, not by time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from broker.core.plan import policy as p
from broker.core.pool.catalogue import DeviceKey
from ops.simulator.foresight import NOTICE_S, Margins, Residency, calm_needed, demand, is_sparse, plan_sparse, plan_steady
from ops.simulator.types import PolicyContext, PolicyFactory, Result
from subjects.ids import DeploymentKey, ReplicaId
from subjects.messages import ReplicaState

SHARE = 0.99
TRIALS = (2, 8)
"""Schedules simulated for a window, least and most."""
TRIAL_EFFORT = 600_000
"""Requests, and seconds times models, simulated in all trials of a window, where that allows more than the least."""
CALM_STEP = 0.15
MORE, LESS, LEAST_STEP = 0.07, 0.03, 0.94
"""A model's margin is multiplied by its misses over those allowed to the power of ``MORE`` (or ``LESS``, where it has less),
and goes down by a step at most."""
RESCUE_S = 10.0
RESCUE_KV_TOKENS = 16_384
START_KV_PART = 0.25
"""A replica is started with this part of its planned KV at least."""
AGAIN_S = 1.0
"""A start that was dropped is tried again after so long."""


class Oracle:
    """Carries out a plan."""

    name = "oracle"

    def __init__(
        self, deployments: Sequence[DeploymentKey], plan: Sequence[Residency], load_s: float, close_s: float
    ) -> None:
        self._deployments = list(deployments)
        self._load_s = load_s
        self._close_s = close_s
        self._coming = sorted(plan, key=lambda one: (one.begin_s, one.model, one.devices))
        self._next = 0
        self._active: list[Residency] = []
        self._tried_s: dict[str, float] = {}
        self._room: dict[DeviceKey, int] = {}
        self._loads: dict[DeviceKey, int] = {}
        self._closing_s: dict[ReplicaId, float] = {}

    def decide(self, now_s: float, view: p.PoolView) -> p.Decision:
        """What the plan has for this moment and is not so yet."""
        keys = list(view.devices)
        self._active = [one for one in self._active if one.end_s > now_s]
        lead_s = self._load_s + NOTICE_S
        while self._next < len(self._coming) and self._coming[self._next].begin_s - lead_s <= now_s:
            if self._coming[self._next].end_s > now_s:
                self._active.append(self._coming[self._next])
            self._next += 1
        there: dict[tuple[DeploymentKey, tuple[DeviceKey, ...]], p.ReplicaView] = {}
        for model in view.models.values():
            for replica in model.replicas:
                there.setdefault((replica.deployment, tuple(sorted(replica.devices))), replica)
        self._room = {key: device.free_planned_bytes for key, device in view.devices.items()}
        self._loads = {key: device.loads_coming for key, device in view.devices.items()}
        wanted: dict[ReplicaId, None] = {}
        missing: list[tuple[Residency, tuple[DeviceKey, ...]]] = []
        changes: list[tuple[int, p.ReplicaView]] = []
        for one in self._active:
            place = tuple(keys[number] for number in one.devices)
            found = there.get((self._deployments[one.model], tuple(sorted(place))))
            if found is None and one.anywhere:
                found = next(iter(view.models[self._deployments[one.model]].replicas), None)
            if found is None:
                missing.append((one, place))
                continue
            wanted[found.replica] = None
            changes.append((one.kv_bytes(now_s + lead_s) - found.kv_bytes, found))
        stops, weights = self._close(now_s, view, wanted)
        actions = stops
        actions += self._resize(now_s, view, [change for change in changes if change[0] < 0])
        for one, place in missing:
            actions += self._start(now_s, view, one, place)
        actions += self._rescue(now_s, view)
        actions += self._resize(now_s, view, [change for change in changes if change[0] > 0])
        return p.Decision(tuple(actions), weights)

    def _elsewhere(self, view: p.PoolView, need_bytes: int) -> tuple[DeviceKey, ...]:
        """The fullest device in use where a replica fits and nothing is being loaded; else an empty one."""
        crowd = dict.fromkeys(view.devices, 0)
        for model in view.models.values():
            for replica in model.replicas:
                for key in replica.devices:
                    crowd[key] += 1
        options = [
            (self._room[key] == device.memory_bytes, self._room[key], key)
            for key, device in view.devices.items()
            if self._room[key] >= need_bytes and crowd[key] < view.models_per_device_max and not self._loads[key]
        ]
        return (min(options)[2],) if options else ()

    def _rescue(self, now_s: float, view: p.PoolView) -> list[p.Action]:
        """A model that a plan had no room for is loaded wherever there is some, so that nothing waits for ever."""
        found: list[p.Action] = []
        planned = {self._deployments[one.model] for one in self._active}
        for deployment, model in view.models.items():
            record = model.record
            if model.oldest_wait_s < RESCUE_S or model.replicas or deployment in planned or record.gpus > 1:
                continue
            kv_bytes = min(record.kv_bytes, RESCUE_KV_TOKENS * record.kv_bytes_per_token)
            room = [key for key in view.devices if self._room[key] >= record.weights_bytes + kv_bytes]
            if room:
                key = min(room, key=lambda key: (self._room[key], key))
                self._room[key] -= record.weights_bytes + kv_bytes
                found.append(p.StartReplica(deployment, (key,), "not planned and asked for", kv_bytes=kv_bytes))
        return found

    def _resize(self, now_s: float, view: p.PoolView, changes: Sequence[tuple[int, p.ReplicaView]]) -> list[p.Action]:
        """Gives replicas the KV of the plan, as far as there is room now."""
        found: list[p.Action] = []
        for change, replica in changes:
            gpus = len(replica.devices)
            change = min(change, min(self._room[key] for key in replica.devices) * gpus)
            changed_s = self._tried_s.get(replica.replica, -math.inf)
            settled = replica.state is ReplicaState.READY and now_s - changed_s >= AGAIN_S
            if not settled or abs(change) < 0.08 * replica.kv_bytes:
                continue
            self._tried_s[replica.replica] = now_s
            found.append(p.ResizeReplicaKv(replica.replica, replica.kv_bytes + change, "planned"))
            for key in replica.devices:
                self._room[key] -= -(-change // gpus)
        return found

    def _start(self, now_s: float, view: p.PoolView, one: Residency, place: tuple[DeviceKey, ...]) -> list[p.Action]:
        """Begins a load, with what KV there is room for if that will do for a while."""
        record = view.models[self._deployments[one.model]].record
        name = f"{record.name} {one.devices}"
        if now_s - self._tried_s.get(name, -math.inf) < AGAIN_S:
            return []
        wanted = one.kv_bytes(now_s)
        room = min(self._room[key] for key in place) * record.gpus - record.weights_bytes - record.gpus
        kv_bytes = min(wanted, room)
        if kv_bytes < START_KV_PART * wanted or (one.anywhere and self._loads[place[0]]):
            if not one.anywhere:
                return []
            kv_bytes = wanted
            place = self._elsewhere(view, record.weights_bytes + kv_bytes)
            if not place:
                return []
        self._tried_s[name] = now_s
        for key in place:
            self._room[key] -= -(-(record.weights_bytes + kv_bytes) // record.gpus)
            self._loads[key] += 1
        return [p.StartReplica(record.deployment, place, "planned", kv_bytes=kv_bytes)]

    def _close(
        self, now_s: float, view: p.PoolView, wanted: dict[ReplicaId, None]
    ) -> tuple[list[p.Action], dict[ReplicaId, float]]:
        """What the plan has no more takes nothing new, and goes when it is done; where others can go on, after a while."""
        stops: list[p.Action] = []
        weights: dict[ReplicaId, float] = {}
        seen: dict[ReplicaId, None] = {}
        for model in view.models.values():
            others = any(r.replica in wanted and r.state is ReplicaState.READY for r in model.replicas)
            for replica in model.replicas:
                seen[replica.replica] = None
                if replica.replica in wanted:
                    if self._closing_s.pop(replica.replica, None) is not None:
                        weights[replica.replica] = 1.0
                    continue
                if replica.state is not ReplicaState.READY or (not others and (replica.running or model.waiting)):
                    continue
                since_s = self._closing_s.setdefault(replica.replica, now_s)
                if others and since_s == now_s:
                    weights[replica.replica] = 0.0
                if not replica.running or (others and now_s - since_s >= self._close_s):
                    stops.append(p.StopReplica(replica.replica, "no longer planned", interrupt=others))
        self._closing_s = {replica: since for replica, since in self._closing_s.items() if replica in seen}
        return stops, weights


def schedule(context: PolicyContext, margins: Margins) -> list[Residency]:
    """The residencies for a window under some margins."""
    workload, trace, window = context.workload, context.trace, context.window
    load_s = min(workload.ladder.warm_s, workload.ladder.cold_s)
    demands = [demand(model, trace, n, window.warmup_s, window.end_s) for n, model in enumerate(workload.models)]
    models = workload.models
    sparse = [n for n, found in enumerate(demands) if models[n].gpus == 1 and is_sparse(models[n], found)]
    steady = [n for n in range(len(demands)) if n not in sparse]
    limit = workload.pool.devices if not sparse else max(0, workload.pool.devices - len(sparse))
    found = plan_steady(workload, demands, steady, window, margins, limit)
    first = 1 + max((max(one.devices) for one in found), default=-1)
    return found + plan_sparse(workload, trace, sparse, margins, first, load_s)


def _executed(context: PolicyContext, margins: Margins) -> Oracle:
    ladder = context.workload.ladder
    deployments = [model.deployment for model in context.workload.models]
    return Oracle(deployments, schedule(context, margins), min(ladder.warm_s, ladder.cold_s), margins.close_s)


@dataclass(slots=True)
class _Search:
    """The next margins to try, and the best schedule so far."""

    margins: Margins
    ttft_s: list[float]
    tpot_s: list[float]
    best: tuple[float, PolicyFactory] | None = None

    @classmethod
    def of(cls, context: PolicyContext) -> _Search:
        """Before anything was tried."""
        models = context.workload.models
        calm = tuple(calm_needed(model, context.trace, number) for number, model in enumerate(models))
        return cls(
            Margins(work=(1.0,) * len(models), calm=calm),
            [model.ttft_s for model in models],
            [model.tpot_s for model in models],
        )

    def learn(self, result: Result, goals: dict[str, float]) -> bool:
        """From a run with the present margins: the next ones. Whether every model met its goal."""
        work, calm = list(self.margins.work), list(self.margins.calm)
        met = True
        for number, (name, row) in enumerate(result.models.items()):
            share = row.within_slo / row.requests if row.requests else 1.0
            missed = (1.0 - share) / max(1e-9, 1.0 - goals[name])
            if share < goals[name]:
                met = False
                late = row.tpot_p99_s > self.tpot_s[number]
                if late and calm[number] < 1.0:
                    # Answers are held up: calmer neighbours help, more room does not.
                    calm[number] = min(1.0, calm[number] + CALM_STEP)
                    if row.ttft_p99_s <= self.ttft_s[number]:
                        continue
                work[number] *= max(1.03, missed**MORE)
            else:
                work[number] *= max(LEAST_STEP, missed**LESS)
        self.margins = replace(self.margins, work=tuple(work), calm=tuple(calm))
        return met


def oracle(context: PolicyContext) -> p.Policy:
    """Factory of ``oracle``: searches, and returns what carries out the best schedule found."""
    from ops.simulator.policies.carpool import carpool
    from ops.simulator.run import run

    workload = context.workload

    def simulate(factory: PolicyFactory) -> Result:
        return run(workload, factory, context.seed, context.window).result

    seconds = context.window.end_s - context.window.warmup_s
    effort = len(context.trace) + round(seconds * len(workload.models))
    trials = min(max(TRIAL_EFFORT // max(1, effort), TRIALS[0]), TRIALS[1])
    ours = simulate(carpool)
    # Where ours serves a window worse than the goal, so may the oracle: the goal is for all windows together.
    goals = {name: min(SHARE, row.within_slo / row.requests if row.requests else 1.0) for name, row in ours.models.items()}
    search = _Search.of(context)
    search.best = (ours.gpu_hours, carpool)
    for _ in range(trials - 1):
        margins = search.margins

        def planned(context: PolicyContext, margins: Margins = margins) -> p.Policy:
            return _executed(context, margins)

        result = simulate(planned)
        if search.learn(result, goals) and result.gpu_hours < search.best[0]:
            search.best = (result.gpu_hours, planned)
    assert search.best is not None
    best = search.best[1](context)
    best.name = "oracle"
    return best
