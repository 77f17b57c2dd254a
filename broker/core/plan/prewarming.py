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
from collections.abc import Sequence
from dataclasses import dataclass, replace

from broker.core.plan import tunables as t
from broker.core.plan.capacity import decode_work_s, prefill_work_s
from broker.core.plan.forecast import ALL_CLASSES, DeclaredEvent, Forecaster, Key
from broker.core.plan.learning import DeviceScores
from broker.core.plan.need import ModelNeed
from broker.core.plan.policy import (
    Action,
    Decision,
    ExpectedLoad,
    ModelView,
    PoolView,
    ReplicaView,
    ResizeReplicaKv,
    SetReplicaConcurrency,
    StartReplica,
)
from broker.core.plan.problem import Need
from broker.core.plan.triggers import EngineReading, EvictNeighbourKv, Fact, GrowKv, LoadReplica, Triggers, actions
from broker.core.pool.catalogue import DeviceKey
from subjects.ids import DeploymentKey, ReplicaId
from subjects.messages import ReplicaState, StepCosts

Pairs = Sequence[tuple[ModelView, StepCosts]]


@dataclass(frozen=True, slots=True)
class Expected:
    """What the forecast says of a model, in GPU-seconds of work per second."""

    rate: float
    """The most at the moments that matter."""
    error: float
    by_event: str = ""
    """The declared event that is on then."""


class Prospects:
    """See the module. :meth:`look` at each look, then :meth:`adjusted` per model while planning, then :meth:`told`."""

    def __init__(self, scores: DeviceScores | None = None) -> None:
        self.forecaster = Forecaster()
        self.triggers = Triggers()
        self.scores = scores
        self._arrived: dict[DeploymentKey, list[int]] = {}
        """Since the last round: requests, input tokens and output tokens by length class."""
        self._telling: list[tuple[tuple[DeploymentKey, int], float, int]] = []
        self._part = 0
        self._told_all = True
        self._round_s = -math.inf
        self._began_s = math.inf
        self._levels: dict[DeploymentKey, float] = {}
        self._events: tuple[ExpectedLoad, ...] = ()
        self._events_offset_s = 0.0
        self._expected: dict[DeploymentKey, Expected] = {}
        self._rounds = 0
        self._asks_all = False
        """Something was declared: all are asked for at once."""
        self._usual: dict[DeploymentKey, tuple[float, float, float]] = {}
        """What usually comes at this time of day: until when that is waited for, the rate, and by how much days differ."""
        self._best_hits: dict[DeploymentKey, float] = {}
        self._step_ratio: dict[DeploymentKey, float] = {}
        """How many times its profile a model's step takes with its devices to itself."""
        self._more_replicas: dict[DeploymentKey, tuple[float, int, str]] = {}
        """Until when a model should have so many at least, and why."""
        self._more_kv: dict[DeploymentKey, tuple[float, str]] = {}
        self._held: dict[ReplicaId, tuple[float, Action, int]] = {}
        """What triggers did lately, until when it holds, and what was there before."""
        self._actions: list[Action] = []
        self._replicas: dict[ReplicaId, ReplicaView] = {}
        self._weights: dict[ReplicaId, float] = {}
        self._why: dict[DeploymentKey, str] = {}
        self._told: dict[DeploymentKey, str] = {}

    # ------------------------------------------------------------------------------------------------------------ looking

    def look(self, now_s: float, view: PoolView, pairs: Pairs, needs: Sequence[ModelNeed]) -> None:
        """Takes what arrived and what engines say; ``needs`` are in the order of ``pairs``."""
        for model, _ in pairs:
            arrivals = model.arrivals
            if any(arrivals.requests):
                new = (*arrivals.requests, *arrivals.input_tokens, *arrivals.output_tokens)
                known = self._arrived.get(model.record.deployment)
                total = new if known is None else map(int.__add__, known, new)
                self._arrived[model.record.deployment] = list(total)
        if now_s - self._round_s < t.LOOK_S - 1e-6:
            if self._telling:
                self._tell(self._part)
            return
        self._tell(len(self._telling))
        self._begin(now_s, view, pairs, needs)
        self._follow(now_s, view, pairs)
        self._read(now_s, view, pairs, needs)

    def _begin(self, now_s: float, view: PoolView, pairs: Pairs, needs: Sequence[ModelNeed]) -> None:
        """A round: all that arrived before it is told under its time, over the next looks."""
        gone_s = now_s - self._round_s
        self._round_s = now_s
        offset_s = view.unix_offset_s
        if abs(offset_s - self.forecaster.unix_offset_s) > 1.0:  # A clock that is corrected a little moves no season.
            self.forecaster.unix_offset_s = offset_s
        arrived, self._arrived = self._arrived, {}
        self._began_s = min(self._began_s, now_s)
        # Until it is as old as its time constant the running mean is the plain one.
        age_s = max(now_s - self._began_s, 1e-9)
        fade = min(math.exp(-gone_s / t.NOW_S), max(0.0, 1.0 - gone_s / age_s))
        present: dict[DeploymentKey, None] = {}
        for (model, costs), need in zip(pairs, needs, strict=True):
            deployment = model.record.deployment
            present[deployment] = None
            work_s = 0.0
            counts = arrived.get(deployment)
            if counts is not None:
                # What is expected at arrival is a cautious quantile; plans go by the mean of those that ended.
                scale = need.output_tokens * sum(counts[:3]) / max(1, sum(counts[6:]))
                for place in range(3):
                    requests = counts[place]
                    if requests:
                        inputs, outputs = counts[3 + place] / requests, counts[6 + place] * scale / requests
                        priced = requests * (prefill_work_s(costs, inputs) + decode_work_s(costs, inputs, outputs))
                        self._telling.append(((deployment, place), priced, requests))
                        work_s += priced
            if math.isfinite(gone_s):
                level = self._levels.get(deployment, 0.0)
                self._levels[deployment] = level * fade + (1 - fade) * work_s / gone_s
        # The forecast itself forgets nobody here: a model may only be out of sight, and it bounds itself.
        for known in (self._levels, self._expected, self._usual, self._best_hits, self._step_ratio, self._why):
            for deployment in [gone for gone in known if gone not in present]:
                del known[deployment]
        self._part = max(1, -(-len(self._telling) // t.TELLING_PARTS))
        self._told_all = False

    def _tell(self, most: int) -> None:
        if self._told_all:
            return
        for key, work_s, requests in self._telling[:most]:
            self.forecaster.observe(self._round_s, key, work_s, requests)
        del self._telling[:most]
        if not self._telling:
            self._told_all = True
            self.forecaster.heard(self._round_s)

    # --------------------------------------------------------------------------------------------------------- forecasting

    def _follow(self, now_s: float, view: PoolView, pairs: Pairs) -> None:
        """Asks the forecast for each model that it can say something of, one now and then."""
        if view.events != self._events or (view.events and abs(view.unix_offset_s - self._events_offset_s) > 1.0):
            self._declare(view)
        self._rounds += 1
        asks_all, self._asks_all = self._asks_all, False
        for place, (model, _) in enumerate(pairs):
            if not asks_all and (place + self._rounds) % t.ASK_ROUNDS:
                continue
            deployment = model.record.deployment
            key = (deployment, ALL_CLASSES)
            soon_s = model.load_s + t.SLACK_S
            step_s = max(0.0, t.HORIZON_S - soon_s) / (t.MOMENTS - 1)
            ahead_s = [soon_s + step_s * place for place in range(t.MOMENTS)]
            event = self._event_of(deployment, now_s, now_s + ahead_s[-1])
            if event is None and self.forecaster.observed_s(key) < t.HISTORY_S:
                self._expected.pop(deployment, None)
                continue
            rates = [self.forecaster.rate_at(now_s, key, ahead) for ahead in ahead_s]
            error = self.forecaster.predict(now_s, key, t.HORIZON_S).error
            name = event.name if event is not None else ""
            self._expected[deployment] = self._by_season(now_s, key, ahead_s[-1], Expected(max(rates), error, name))

    def _by_season(self, now_s: float, key: Key, ahead_s: float, expected: Expected) -> Expected:
        """With the usual change at this time of day, where that is larger than what days differ by."""
        deployment = key[0]
        now = self._levels.get(deployment, 0.0)
        found = self.forecaster.usual_change(now_s, key, ahead_s)
        if found is not None and abs(found[0]) > found[1]:
            change, miss = found
            if change > 0:
                self._usual[deployment] = (now_s + ahead_s + t.EXPECTED_LATE_S, now + change, miss)
            elif not expected.by_event:
                self._usual.pop(deployment, None)
                return Expected(max(0.0, now + change), miss)
        usual = self._usual.get(deployment)
        if usual is None or usual[0] <= now_s or usual[1] <= expected.rate:
            return expected
        return Expected(usual[1], usual[2], expected.by_event)

    def _declare(self, view: PoolView) -> None:
        kept = {event.name for event in view.events}
        for gone in [event.name for event in self._events if event.name not in kept]:
            self.forecaster.withdraw(gone)
        offset_s = view.unix_offset_s
        for event in view.events:
            begin_s, end_s = event.begin_unix_s - offset_s, event.end_unix_s - offset_s
            self.forecaster.declare(
                DeclaredEvent(event.name, begin_s, end_s, event.deployment, event.factor, event.at_least)
            )
        self._events, self._events_offset_s = view.events, offset_s
        self._asks_all = True

    def _event_of(self, deployment: DeploymentKey, begin_s: float, end_s: float) -> ExpectedLoad | None:
        offset_s = self._events_offset_s
        for event in self._events:
            concerns = event.deployment is None or event.deployment == deployment
            if concerns and event.begin_unix_s - offset_s < end_s and event.end_unix_s - offset_s > begin_s:
                return event
        return None

    # ------------------------------------------------------------------------------------------------------------ readings

    def _read(self, now_s: float, view: PoolView, pairs: Pairs, needs: Sequence[ModelNeed]) -> None:
        self._replicas = {replica.replica: replica for model, _ in pairs for replica in model.replicas}
        self._held = {name: held for name, held in self._held.items() if held[0] > now_s and name in self._replicas}
        self._more_replicas = {name: wish for name, wish in self._more_replicas.items() if wish[0] > now_s}
        self._more_kv = {name: wish for name, wish in self._more_kv.items() if wish[0] > now_s}
        if not any(r.hit_ratio is not None or r.step_s is not None for r in self._replicas.values()):
            return
        takers: dict[DeviceKey, int] = {}
        for replica in self._replicas.values():
            for device in replica.devices if replica.running else ():
                takers[device] = takers.get(device, 0) + 1
        readings = [
            self._reading(model, costs, need, replica, takers)
            for (model, costs), need in zip(pairs, needs, strict=True)
            for replica in model.replicas
            if replica.state is ReplicaState.READY
        ]
        if self.scores is not None:
            self._score(now_s, pairs)
        if any(reading.hit_ratio is not None or reading.step_s is not None for reading in readings):
            facts = self.triggers.look(now_s, readings)
            if facts:
                self._act(now_s, view, pairs, facts)

    def _reading(
        self,
        model: ModelView,
        costs: StepCosts,
        need: ModelNeed,
        replica: ReplicaView,
        takers: dict[DeviceKey, int],
    ) -> EngineReading:
        """Turns with neighbours are planned for, and a profile may be wrong for a model: neither is contention."""
        deployment = replica.deployment
        step_s = alone_s = None
        beside = max((takers.get(device, 0) for device in replica.devices), default=0)
        if replica.step_s is not None and replica.running:
            profile_s = self._profile_s(model, costs, need, replica)
            if beside == 1:
                ratio, known = replica.step_s / profile_s, self._step_ratio.get(deployment)
                self._step_ratio[deployment] = ratio if known is None else known + 0.1 * (ratio - known)
                if self.scores is not None:
                    self.scores.observe(deployment, replica.devices[0], profile_s, replica.step_s, need.rps)
            elif deployment in self._step_ratio:
                step_s, alone_s = replica.step_s, profile_s * self._step_ratio[deployment] * beside
        return EngineReading(
            replica.replica,
            deployment,
            replica.devices,
            model.waiting,
            hit_ratio=self._hits(deployment, replica.hit_ratio),
            step_s=step_s,
            step_alone_s=alone_s,
            stays=replica.stays,
        )

    def _profile_s(self, model: ModelView, costs: StepCosts, need: ModelNeed, replica: ReplicaView) -> float:
        """What a step with this batch takes by the profile, prompts that share steps with answers counted on average."""
        tokens = (replica.kv_pages - replica.kv_pages_free) * model.record.block_size
        decode_s = costs.step_const_s + replica.running * costs.step_request_s + tokens * costs.step_context_token_s
        share = min(t.PREFILL_SHARE_MAX, need.mean / max(1, len(model.replicas)))
        return max(1e-6, decode_s / (1.0 - share))

    def _hits(self, deployment: DeploymentKey, ratio: float | None) -> float | None:
        """The engine counts all prompt tokens, also those of prompts without any known prefix. So what there is to find is
        taken to be the best that was found within the last hour or so."""
        if ratio is None:
            return None
        fade = math.exp(-t.LOOK_S / t.HITS_MEMORY_S)
        best = self._best_hits[deployment] = max(ratio, self._best_hits.get(deployment, 0.0) * fade)
        return ratio / best if best >= t.HITS_KNOWN_MIN else None

    def _score(self, now_s: float, pairs: Pairs) -> None:
        assert self.scores is not None
        self.scores.look(now_s)
        self._weights = {}
        if not self.scores.learned:
            return
        for model, _ in pairs:
            places = {str(r.replica): r.devices[0] for r in model.replicas if r.state is ReplicaState.READY}
            if len(places) > 1:
                found = self.scores.routing_weights(model.record.deployment, places)
                self._weights.update({ReplicaId(replica): weight for replica, weight in found.items()})

    def _act(self, now_s: float, view: PoolView, pairs: Pairs, facts: tuple[Fact, ...]) -> None:
        free_bytes = {key: device.free_planned_bytes for key, device in view.devices.items()}
        fixed = {replica.replica for model, _ in pairs if not model.resizes_kv for replica in model.replicas}
        for action in actions(facts, self._replicas, free_bytes):
            assert isinstance(action, ResizeReplicaKv | SetReplicaConcurrency)
            if isinstance(action, ResizeReplicaKv) and action.replica in fixed:
                continue
            before = self._replicas[action.replica]
            was = before.kv_bytes if isinstance(action, ResizeReplicaKv) else before.slots
            self._held[action.replica] = (now_s + t.QUIET_S, action, was)
            self._actions.append(action)
        models = {model.record.deployment: model for model, _ in pairs}
        for fact in facts:
            match fact:
                case LoadReplica():
                    model = models[fact.deployment]
                    until_s, count = now_s + t.WISH_S + model.load_s, len(model.replicas) + 1
                    self._more_replicas[fact.deployment] = (until_s, count, fact.reason)
                case GrowKv() | EvictNeighbourKv():
                    self._more_kv[self._replicas[fact.replica].deployment] = (now_s + t.WISH_S, fact.reason)
                case _:
                    pass  # Its action says all.

    # ------------------------------------------------------------------------------------------------------------ planning

    def adjusted(self, wanted: Need, need: ModelNeed) -> Need:
        """A model's part of the plan's problem, by what is expected and what triggers wish; mostly as it was."""
        deployment = wanted.model
        why = []
        expected = self._expected.get(deployment)
        if expected is not None:
            wanted, told = self._raised(wanted, need, expected)
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

    def _raised(self, wanted: Need, need: ModelNeed, expected: Expected) -> tuple[Need, str]:
        now = self._levels.get(wanted.model, 0.0)
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

    def told(self, now_s: float, decision: Decision) -> Decision:
        """The decision with what triggers do at once, and with what was foreseen in its reasons and notes."""
        planned = decision.actions
        if self._held:
            starts = any(isinstance(action, StartReplica) for action in planned)
            planned = tuple([action for action in planned if starts or not self._undoes(now_s, action)])
        at_once, self._actions = self._actions, []
        if self._why:
            planned = tuple([self._with_reason(action) for action in planned])
        notes = dict(decision.notes)
        if self._why != self._told:
            notes |= {deployment: self._why.get(deployment, "") for deployment in {**self._told, **self._why}}
            self._told = dict(self._why)
        if not at_once and not notes and planned is decision.actions:
            return decision
        busy = {action.replica for action in at_once if isinstance(action, ResizeReplicaKv | SetReplicaConcurrency)}
        rest = [a for a in planned if not (isinstance(a, ResizeReplicaKv | SetReplicaConcurrency) and a.replica in busy)]
        return replace(decision, actions=(*at_once, *rest), notes=notes)

    def _with_reason(self, action: Action) -> Action:
        if isinstance(action, StartReplica) and action.deployment in self._why:
            return replace(action, reason=f"{action.reason}; {self._why[action.deployment]}")
        return action

    def _undoes(self, now_s: float, action: Action) -> bool:
        """Whether it takes back what a trigger has just done."""
        if not isinstance(action, ResizeReplicaKv | SetReplicaConcurrency):
            return False
        until_s, done, was = self._held.get(action.replica, (-math.inf, action, 0))
        if now_s >= until_s:
            return False
        match done, action:
            case ResizeReplicaKv(), ResizeReplicaKv():
                grew = done.kv_bytes > was
                return action.kv_bytes < done.kv_bytes if grew else action.kv_bytes > done.kv_bytes
            case SetReplicaConcurrency(), SetReplicaConcurrency():
                return action.slots > done.slots
            case _:
                return False
