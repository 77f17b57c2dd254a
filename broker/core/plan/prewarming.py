"""What the coordinator knows beyond the present: the forecast, what engines say of themselves, and which devices are good.

Three modules of their own right meet the coordinator's plan here:

* ``forecast`` (SCH-5): about once a second what arrived is told to it, as work by model and length class. Once a model has a
  day of history, or people have declared an event for it, the plan asks for what is expected when capacity asked for now
  would be ready: more than now is loaded for beforehand, and where less is coming the most of lately is kept no longer.
* ``triggers`` (SCH-13): readings of the engines become operations at once, and wishes for the next plans.
* ``learning`` (SCH-10), where it is switched on: routing weights lean towards devices that do better than their profile.

Without history, events and readings nothing here changes a decision.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from broker.core.plan import policy as p
from broker.core.plan import tunables as t
from broker.core.plan.forecast import ALL_CLASSES, Forecaster, Key
from broker.core.plan.learning import DeviceScores
from broker.core.plan.need import ModelNeed
from broker.core.plan.problem import Need
from broker.core.plan.triggers import EngineReading, Triggers
from broker.core.pool.catalogue import DeviceKey
from profiles.costs import decode_work_s, prefill_s
from subjects.ids import DeploymentKey, ReplicaId
from subjects.messages import ReplicaState, StepCosts

Pairs = Sequence[tuple[p.ModelView, StepCosts]]


class Expected(msgspec.Struct, frozen=True):
    """What the forecast says of a model, in GPU-seconds of work per second."""

    rate: float
    """The most at the moments that matter."""
    error: float
    by_event: str = ""
    """The declared event that is on then."""


@dataclass(slots=True)
class _Known:
    """Of one model that is there."""

    arrived: list[int] = field(default_factory=lambda: [0] * 9)
    """Since the last round: requests, input tokens and output tokens by length class."""
    level: float = 0.0
    expected: Expected | None = None
    usual: tuple[float, float, float] = (-math.inf, 0.0, 0.0)
    """What usually comes at this time of day: until when that is waited for, the rate, and by how much days differ."""
    best_hits: float = 0.0
    step_ratio: float | None = None
    """How many times its profile its step takes with its devices to itself."""


class Prospects:
    """See the module. :meth:`look` at each look, then :meth:`adjusted` per model while planning, then :meth:`told`."""

    def __init__(self, scores: DeviceScores | None = None) -> None:
        self.forecaster = Forecaster()
        self.triggers = Triggers()
        self.scores = scores
        self._models: defaultdict[DeploymentKey, _Known] = defaultdict(_Known)
        self._telling: list[tuple[Key, float, int]] | None = None
        """What arrived before this round and is not told yet; None: it is told that this was all."""
        self._part = 0
        self._round_s = -math.inf
        self._began_s = math.inf
        self._events: tuple[p.ExpectedLoad, ...] = ()
        self._rounds = 0
        self._more_replicas: dict[DeploymentKey, tuple[float, int, str]] = {}
        """Until when a model should have so many at least, and why."""
        self._more_kv: dict[DeploymentKey, tuple[float, str]] = {}
        self._held: dict[ReplicaId, tuple[float, p.Action, int]] = {}
        """What triggers did lately, until when it holds, and what was there before."""
        self._actions: list[p.Action] = []
        self._weights: dict[ReplicaId, float] = {}
        self._why: dict[DeploymentKey, str] = {}
        self._told: dict[DeploymentKey, str] = {}

    # ------------------------------------------------------------------------------------------------------------ looking

    def look(self, now_s: float, view: p.PoolView, pairs: Pairs, needs: Sequence[ModelNeed]) -> None:
        """Takes what arrived and what engines say; ``needs`` are in the order of ``pairs``."""
        for model, _ in pairs:
            arrivals = model.arrivals
            if any(arrivals.requests):
                known = self._models[model.record.deployment]
                new = (*arrivals.requests, *arrivals.input_tokens, *arrivals.output_tokens)
                known.arrived = list(map(int.__add__, known.arrived, new))
        if now_s - self._round_s < t.LOOK_S - 1e-6:
            if self._telling:
                self._tell(self._telling, self._part)
            return
        if self._telling is not None:
            self._tell(self._telling, len(self._telling))
        self._begin(now_s, view, pairs, needs)
        self._follow(now_s, view, pairs)
        self._read(now_s, view, pairs, needs)

    def _begin(self, now_s: float, view: p.PoolView, pairs: Pairs, needs: Sequence[ModelNeed]) -> None:
        """A round: all that arrived before it is told under its time, over the next looks."""
        gone_s = now_s - self._round_s
        self._round_s = now_s
        if abs(view.unix_offset_s - self.forecaster.unix_offset_s) > 1.0:  # A clock corrected a little moves no season.
            self.forecaster.unix_offset_s = view.unix_offset_s
        self._began_s = min(self._began_s, now_s)
        # Until it is as old as its time constant the running mean is the plain one.
        age_s = max(now_s - self._began_s, 1e-9)
        fade = min(math.exp(-gone_s / t.NOW_S), max(0.0, 1.0 - gone_s / age_s))
        # The forecast itself forgets nobody here: a model may only be out of sight, and it bounds itself.
        present = {model.record.deployment for model, _ in pairs}
        for gone in [known for known in self._models if known not in present]:
            del self._models[gone]
            self._why.pop(gone, None)
        self._telling = []
        for (model, costs), need in zip(pairs, needs, strict=True):
            known = self._models[model.record.deployment]
            counts, known.arrived = known.arrived, [0] * 9
            # What is expected at arrival is a cautious quantile; plans go by the mean of those that ended.
            scale = need.output_tokens * sum(counts[:3]) / max(1, sum(counts[6:]))
            work_s = 0.0
            for place, requests in enumerate(counts[:3]):
                if requests:
                    inputs, outputs = counts[3 + place] / requests, counts[6 + place] * scale / requests
                    priced = requests * (prefill_s(costs, inputs) + decode_work_s(costs, inputs, outputs))
                    self._telling.append(((model.record.deployment, place), priced, requests))
                    work_s += priced
            if math.isfinite(gone_s):
                known.level = known.level * fade + (1 - fade) * work_s / gone_s
        self._part = max(1, -(-len(self._telling) // t.TELLING_PARTS))

    def _tell(self, telling: list[tuple[Key, float, int]], most: int) -> None:
        for key, work_s, requests in telling[:most]:
            self.forecaster.observe(self._round_s, key, work_s, requests)
        del telling[:most]
        if not telling:
            self._telling = None
            self.forecaster.heard(self._round_s)

    # --------------------------------------------------------------------------------------------------------- forecasting

    def _follow(self, now_s: float, view: p.PoolView, pairs: Pairs) -> None:
        """Asks the forecast for each model that it can say something of, one now and then; all once there is an event."""
        declared = view.events != self._events
        if declared:
            self.forecaster.declare(view.events)
            self._events = view.events
        self._rounds += 1
        for place, (model, _) in enumerate(pairs):
            if not declared and (place + self._rounds) % t.ASK_ROUNDS:
                continue
            known, key = self._models[model.record.deployment], (model.record.deployment, ALL_CLASSES)
            soon_s = model.load_s + t.SLACK_S
            step_s = max(0.0, t.HORIZON_S - soon_s) / (t.MOMENTS - 1)
            ahead_s = [soon_s + step_s * moment for moment in range(t.MOMENTS)]
            event = self.forecaster.event_of(model.record.deployment, now_s, now_s + ahead_s[-1])
            known.expected = None
            if event or self.forecaster.observed_s(key) >= t.HISTORY_S:
                rate = max(self.forecaster.predict(now_s, key, ahead, ahead)[0] for ahead in ahead_s)
                _, error = self.forecaster.predict(now_s, key, 0.0, t.HORIZON_S)
                known.expected = self._by_season(now_s, known, key, ahead_s[-1], Expected(rate, error, event))

    def _by_season(self, now_s: float, known: _Known, key: Key, ahead_s: float, expected: Expected) -> Expected:
        """With the usual change at this time of day, where that is larger than what days differ by."""
        change, miss = self.forecaster.usual_change(now_s, key, ahead_s) or (0.0, 0.0)
        if change > miss:
            known.usual = (now_s + ahead_s + t.EXPECTED_LATE_S, known.level + change, miss)
        elif -change > miss and not expected.by_event:
            known.usual = (-math.inf, 0.0, 0.0)
            return Expected(max(0.0, known.level + change), miss)
        until_s, rate, miss = known.usual
        return Expected(rate, miss, expected.by_event) if until_s > now_s and rate > expected.rate else expected

    # ------------------------------------------------------------------------------------------------------------ readings

    def _read(self, now_s: float, view: p.PoolView, pairs: Pairs, needs: Sequence[ModelNeed]) -> None:
        replicas = {replica.replica: replica for model, _ in pairs for replica in model.replicas}
        self._held = {name: held for name, held in self._held.items() if held[0] > now_s and name in replicas}
        self._more_replicas = {name: wish for name, wish in self._more_replicas.items() if wish[0] > now_s}
        self._more_kv = {name: wish for name, wish in self._more_kv.items() if wish[0] > now_s}
        if not any(r.hit_ratio is not None or r.step_s is not None for r in replicas.values()):
            return
        takers = Counter(device for replica in replicas.values() if replica.running for device in replica.devices)
        readings = [
            self._reading(model, costs, need, replica, takers)
            for (model, costs), need in zip(pairs, needs, strict=True)
            for replica in model.replicas
            if replica.state is ReplicaState.READY
        ]
        if self.scores is not None:
            self._score(now_s, self.scores, pairs)
        if not any(reading.hit_ratio is not None or reading.step_s is not None for reading in readings):
            return
        asked = self.triggers.look(now_s, readings, {key: device.free_planned_bytes for key, device in view.devices.items()})
        models = {model.record.deployment: model for model, _ in pairs}
        for name, action in asked.actions.items():
            replica = replicas[name]
            if isinstance(action, p.SetReplicaConcurrency):
                self._held[name] = (now_s + t.QUIET_S, action, replica.slots)
            elif models[replica.deployment].resizes_kv:
                self._held[name] = (now_s + t.QUIET_S, action, replica.kv_bytes)
            else:
                continue
            self._actions.append(action)
        for deployment, why in asked.more_replicas.items():
            model = models[deployment]
            self._more_replicas[deployment] = (now_s + t.WISH_S + model.load_s, len(model.replicas) + 1, why)
        self._more_kv |= {deployment: (now_s + t.WISH_S, why) for deployment, why in asked.more_kv.items()}

    def _reading(
        self, model: p.ModelView, costs: StepCosts, need: ModelNeed, replica: p.ReplicaView, takers: Counter[DeviceKey]
    ) -> EngineReading:
        """Turns with neighbours are planned for, and a profile may be wrong for a model: neither is contention. An engine
        counts all prompt tokens, also those of prompts without any known prefix: so what there is to find is taken to be the
        best that was found within the last hour or so."""
        known = self._models[replica.deployment]
        step_s = alone_s = hits = None
        if replica.step_s is not None and replica.running:
            beside = max((takers[device] for device in replica.devices), default=0)
            profile_s = self._profile_s(model, costs, need, replica)
            if beside == 1:
                ratio, before = replica.step_s / profile_s, known.step_ratio
                known.step_ratio = ratio if before is None else before + 0.1 * (ratio - before)
                if self.scores is not None:
                    self.scores.observe(replica.deployment, replica.devices[0], profile_s, replica.step_s, need.rps)
            elif known.step_ratio is not None:
                step_s, alone_s = replica.step_s, profile_s * known.step_ratio * beside
        if replica.hit_ratio is not None:
            known.best_hits = max(replica.hit_ratio, known.best_hits * math.exp(-t.LOOK_S / t.HITS_MEMORY_S))
            hits = replica.hit_ratio / known.best_hits if known.best_hits >= t.HITS_KNOWN_MIN else None
        return EngineReading(replica, model.waiting, hits, step_s, alone_s)

    def _profile_s(self, model: p.ModelView, costs: StepCosts, need: ModelNeed, replica: p.ReplicaView) -> float:
        """What a step with this batch takes by the profile, prompts that share steps with answers counted on average."""
        tokens = (replica.kv_pages - replica.kv_pages_free) * model.record.block_size
        decode_s = costs.step_const_s + replica.running * costs.step_request_s + tokens * costs.step_context_token_s
        share = min(t.PREFILL_SHARE_MAX, need.mean / max(1, len(model.replicas)))
        return max(1e-6, decode_s / (1.0 - share))

    def _score(self, now_s: float, scores: DeviceScores, pairs: Pairs) -> None:
        scores.look(now_s)
        self._weights = {}
        for model, _ in pairs if scores.learned else ():
            places = {r.replica: r.devices[0] for r in model.replicas if r.state is ReplicaState.READY}
            if len(places) > 1:
                self._weights |= scores.routing_weights(model.record.deployment, places)

    # ------------------------------------------------------------------------------------------------------------ planning

    def adjusted(self, wanted: Need, need: ModelNeed) -> Need:
        """A model's part of the plan's problem, by what is expected and what triggers wish; mostly as it was."""
        deployment = wanted.model
        why = []
        known = self._models[deployment]
        if known.expected is not None:
            wanted, told = self._raised(wanted, need, known.level, known.expected)
            why.append(told)
        more_kv = self._more_kv.get(deployment)
        if more_kv is not None:
            keep = wanted.kv_keep_bytes if wanted.kv_keep_bytes is not None else wanted.kv_bytes
            wanted = replace(wanted, kv_bytes=wanted.kv_bytes * t.KV_GROWTH, kv_keep_bytes=keep * t.KV_GROWTH)
            why.append(f"a trigger asks for more KV: {more_kv[1]}")
        more_replicas = self._more_replicas.get(deployment)
        if more_replicas is not None and more_replicas[1] <= wanted.replicas_max:
            wanted = replace(wanted, replicas_min=max(wanted.replicas_min, more_replicas[1]))
            why.append(f"a trigger asks for another replica: {more_replicas[2]}")
        text = "; ".join(filter(None, why))
        if text:
            self._why[deployment] = text
        else:
            self._why.pop(deployment, None)
        return wanted

    def _raised(self, wanted: Need, need: ModelNeed, now: float, expected: Expected) -> tuple[Need, str]:
        change = max(t.GAIN_MIN * now, 0.0 if expected.by_event else expected.error)
        cause = f"the event {expected.by_event!r}" if expected.by_event else "the forecast"
        if expected.rate - now > change:
            mean = need.mean + need.decode
            room = (need.load - need.queue) / mean if mean > 0.1 * expected.rate else 1.2
            load = expected.rate * min(max(room, 1.0), t.FORECAST_ROOM_MAX)
            keep = max(load, wanted.load, wanted.load_keep or 0.0)
            wanted = replace(wanted, load=max(wanted.load, load), load_keep=keep, replicas_min=max(wanted.replicas_min, 1))
            if wanted.idle_s:  # Work that comes makes it no place for others to take.
                wanted = replace(wanted, idle_s=0.0, lack_none=max(wanted.lack_none, 1.0))
            return wanted, f"{cause} expects work of {expected.rate:.2f} within {t.HORIZON_S:.0f} s, now {now:.2f}"
        if now - expected.rate > change and wanted.load_keep is not None and wanted.load_keep > wanted.load:
            told = f"{cause} expects less work, {expected.rate:.2f} within {t.HORIZON_S:.0f} s, now {now:.2f}"
            return replace(wanted, load_keep=wanted.load), told
        return wanted, ""

    def weight(self, replica: ReplicaId) -> float:
        """By how much its routing weight is to be multiplied; 1 while nothing is learned."""
        return self._weights.get(replica, 1.0)

    def told(self, now_s: float, decision: p.Decision) -> p.Decision:
        """The decision with what triggers do at once, and with what was foreseen in its reasons and notes."""
        at_once, self._actions = self._actions, []
        notes = {}
        if self._why != self._told:
            notes = {deployment: self._why.get(deployment, "") for deployment in {**self._told, **self._why}}
            self._told = dict(self._why)
        if not self._held and not at_once and not notes and not self._why:
            return decision
        busy = {action.replica for action in at_once if isinstance(action, p.ResizeReplicaKv | p.SetReplicaConcurrency)}
        starts = any(isinstance(action, p.StartReplica) for action in decision.actions)
        rest: list[p.Action] = []
        for action in decision.actions:
            match action:
                case p.StartReplica() if action.deployment in self._why:
                    rest.append(replace(action, reason=f"{action.reason}; {self._why[action.deployment]}"))
                case p.ResizeReplicaKv() | p.SetReplicaConcurrency() if action.replica in busy or (
                    not starts and self._undoes(now_s, action)
                ):
                    pass
                case _:
                    rest.append(action)
        return replace(decision, actions=(*at_once, *rest), notes=decision.notes | notes)

    def _undoes(self, now_s: float, action: p.ResizeReplicaKv | p.SetReplicaConcurrency) -> bool:
        """Whether it takes back what a trigger has just done."""
        until_s, done, was = self._held.get(action.replica, (-math.inf, action, 0))
        match done, action:
            case p.ResizeReplicaKv(), p.ResizeReplicaKv() if now_s < until_s:
                return (done.kv_bytes > was) == (action.kv_bytes < done.kv_bytes) and action.kv_bytes != done.kv_bytes
            case p.SetReplicaConcurrency(), p.SetReplicaConcurrency() if now_s < until_s:
                return action.slots > done.slots
        return False
