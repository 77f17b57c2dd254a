"""Weights put in place before the peak: replicas that serve, and spare weights prewarmed from a prediction.

Source: WarmServe (2025). Each window the peak of the next one is predicted per model; what the peak needs beyond the
replicas that serve is prewarmed: weights with next to no KV, several models to a device ("one for many"), in the idle KV
space of devices that serve others first and on devices of their own after. A prewarmed replica takes no requests. When its
model needs one more, it is opened at once and gets the memory: on a device of spares the others leave, beside a serving one
it grows into what is free, and one with a device for itself is loaded to relieve it. Since scaling up costs nothing a
surplus is given back after seconds. Set here: windows of 60 s, the peak of the next one as the highest of the last three
plus the last rise. Left out: the switch of a GPU's memory between weights and KV without any cost (a resize takes its round
trip here), and daily periods (the measured windows are shorter).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from broker.core.plan import policy as p
from broker.core.pool.catalogue import DeviceKey
from ops.simulator.policies.common import Every, Floor, Sizer, costs_of, needed
from ops.simulator.types import PolicyContext
from subjects.ids import DeploymentKey, ReplicaId
from subjects.messages import ReplicaState

PERIOD_S = 1.0
SPAN_S = 10.0
UTILISATION = 0.8
WINDOW_S = 60.0
WINDOWS = 3
SURPLUS_S = 15.0
"""A serving replica goes when it was not needed for so long."""
FORGET_S = 600.0
"""A model without requests for so long is not prewarmed any more."""
SPARE_KV_TOKENS = 16_384
"""KV of a prewarmed replica: enough for its first requests while it gets more."""
HOST_KV_PART = 0.5
"""A serving replica keeps this part of the KV that it could have alone."""


@dataclass(slots=True)
class _State:
    """What is known of a model."""

    sizer: Sizer = field(default_factory=lambda: Sizer(SPAN_S, UTILISATION, SURPLUS_S))
    peak: int = 0
    """Of the window that runs."""
    peaks: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOWS))
    predicted: int = 0


class Prewarm:
    """``prewarm``."""

    name = "prewarm"

    def __init__(self) -> None:
        self._period, self._window = Every(PERIOD_S), Every(WINDOW_S)
        self._models: dict[DeploymentKey, _State] = {}
        self._spares: set[ReplicaId] = set()
        self._seen: set[ReplicaId] = set()

    def decide(self, now_s: float, view: p.PoolView) -> p.Decision:
        """Each second, and at once when a model waits without anything open."""
        for deployment, model in view.models.items():
            self._models.setdefault(deployment, _State()).sizer.see(now_s, model)
        weights = self._newcomers(view)
        starved = any(model.waiting and not self._open(model) for model in view.models.values())
        if not (self._period.due(now_s) or starved or weights):
            return p.Decision()
        wanted = {deployment: self._wanted(now_s, deployment, model, view) for deployment, model in view.models.items()}
        if self._window.due(now_s):
            for state in self._models.values():
                rise = state.peak - state.peaks[-1] if state.peaks else 0
                state.peaks.append(state.peak)
                state.predicted = max(state.peaks) + max(0, rise)
                state.peak = 0
        floor, actions = Floor(view), list[p.Action]()
        for deployment, model in view.models.items():
            self._scale(now_s, model, wanted[deployment], view, floor, actions, weights)
        for deployment, model in view.models.items():
            self._prewarm(now_s, self._models[deployment], model, floor, actions)
        return p.Decision(tuple(actions), weights)

    # --------------------------------------------------------------------------------------------------------- who serves

    def _newcomers(self, view: p.PoolView) -> dict[ReplicaId, float]:
        """Roles of replicas seen for the first time: one with hardly any KV is a spare and takes nothing."""
        weights: dict[ReplicaId, float] = {}
        there: set[ReplicaId] = set()
        for model in view.models.values():
            for replica in model.replicas:
                there.add(replica.replica)
                if replica.replica not in self._seen and replica.kv_bytes <= _spare_kv(model):
                    self._spares.add(replica.replica)
                    weights[replica.replica] = 0.0
        self._spares &= there
        self._seen = there
        return weights

    def _open(self, model: p.ModelView) -> list[p.ReplicaView]:
        return [replica for replica in model.replicas if replica.replica not in self._spares]

    def _wanted(self, now_s: float, deployment: DeploymentKey, model: p.ModelView, view: p.PoolView) -> int:
        state = self._models[deployment]
        busy = bool(model.waiting or model.running or any(model.arrivals.requests))
        size = state.sizer.size(now_s, model, costs_of(model, view))
        wanted = max(int(busy), model.record.min_replicas, needed(size, 1.0))
        state.peak = max(state.peak, wanted)
        return wanted

    def _scale(
        self,
        now_s: float,
        model: p.ModelView,
        wanted: int,
        view: p.PoolView,
        floor: Floor,
        actions: list[p.Action],
        weights: dict[ReplicaId, float],
    ) -> None:
        """Opens spares and loads what they cannot give; closes what was not needed for a while."""
        serving = self._open(model)
        held = max(wanted, needed(self._models[model.record.deployment].sizer.held(), 1.0))
        surplus = sorted(serving, key=lambda r: (r.state is ReplicaState.READY, r.running, r.replica))
        too_many = surplus[: max(0, len(serving) - held)]
        actions += [p.StopReplica(replica.replica, f"{held} serve the load") for replica in too_many]
        spares = [replica for replica in model.replicas if replica.replica in self._spares]
        # On a device of spares it can have all; those that are ready first.
        spares.sort(key=lambda r: (r.state is not ReplicaState.READY, self._hosted(r, floor), r.replica))
        missing = wanted - len(serving)
        for replica in spares[: max(0, missing)]:
            self._spares.discard(replica.replica)
            weights[replica.replica] = 1.0
            self._grow(model, replica, floor, actions)
            missing -= not self._hosted(replica, floor)  # Beside another it only helps until its own device is there.
        for _ in range(missing):
            devices = floor.whole(model.record)
            if devices is None:
                return
            floor.take(devices, model.record.budget_bytes)
            actions.append(p.StartReplica(model.record.deployment, devices, f"needs {wanted}"))

    def _hosted(self, replica: p.ReplicaView, floor: Floor) -> bool:
        """Whether it lies beside one that serves."""
        return any(
            other.replica not in self._spares and other.deployment != replica.deployment
            for key in replica.devices
            for other in floor.residents[key]
        )

    def _grow(self, model: p.ModelView, replica: p.ReplicaView, floor: Floor, actions: list[p.Action]) -> None:
        """Gives it its devices' memory; spares that lie there leave."""
        for other in {r.replica: r for key in replica.devices for r in floor.residents[key]}.values():
            if other.replica in self._spares:
                actions.append(p.StopReplica(other.replica, f"{model.record.name} takes the device", interrupt=True))
                floor.give(other.devices, other.budget_bytes)
                self._spares.discard(other.replica)
        more = min(floor.free_bytes[key] for key in replica.devices) * model.record.gpus
        more = min(more, model.record.kv_bytes - replica.kv_bytes)
        if more > 0 and replica.state is ReplicaState.READY:
            actions.append(p.ResizeReplicaKv(replica.replica, replica.kv_bytes + more, "it serves now"))
            floor.take(replica.devices, -(-more // model.record.gpus))

    # ----------------------------------------------------------------------------------------------------- who is prewarmed

    def _prewarm(self, now_s: float, state: _State, model: p.ModelView, floor: Floor, actions: list[p.Action]) -> None:
        """As many spares as the predicted peak needs beyond what serves; one at least while the model is remembered."""
        alive = now_s - state.sizer.seen_s < FORGET_S
        serving = len(self._open(model))
        spares = [replica for replica in model.replicas if replica.replica in self._spares]
        target = max(state.predicted, int(alive)) - serving if alive else 0
        for replica in sorted(spares, key=lambda r: r.replica)[max(0, target) :]:
            actions.append(p.StopReplica(replica.replica, f"the next peak needs {state.predicted}"))
            self._spares.discard(replica.replica)
        for _ in range(target - len(spares)):
            kv_bytes = _spare_kv(model)
            each = -(-(model.record.weights_bytes + kv_bytes) // model.record.gpus)
            devices = self._spare_room(model, each, floor, actions)
            if devices is None:
                return
            floor.take(devices, each)
            why = f"the next peak may need {state.predicted}"
            actions.append(p.StartReplica(model.record.deployment, devices, why, kv_bytes=kv_bytes))

    def _spare_room(
        self, model: p.ModelView, each: int, floor: Floor, actions: list[p.Action]
    ) -> tuple[DeviceKey, ...] | None:
        """Idle KV of devices in use first (the emptiest of them), then an empty device. Replicas over several devices are
        prewarmed on devices of their own only."""
        record = model.record
        if record.gpus > 1:
            return floor.whole(record)
        found: list[tuple[bool, int, DeviceKey]] = []
        for key, residents in floor.residents.items():
            room = floor.free_bytes[key] + sum(self._can_shrink(replica, floor) for replica in residents)
            if (
                room >= each
                and len(residents) < floor.models_max
                and all(r.deployment != record.deployment for r in residents)
            ):
                found.append((not residents, -room, key))
        if not found:
            return None
        key = min(found)[2]
        for replica in floor.residents[key]:
            short = each - floor.free_bytes[key]
            shrink = min(short, self._can_shrink(replica, floor))
            if short > 0 and shrink > 0:
                actions.append(p.ResizeReplicaKv(replica.replica, replica.kv_bytes - shrink, "room for prewarmed weights"))
                floor.give((key,), shrink)
        return (key,)

    def _can_shrink(self, replica: p.ReplicaView, floor: Floor) -> int:
        """Bytes of KV that a serving replica on one device does not use and need not keep."""
        if replica.replica in self._spares or len(replica.devices) > 1 or replica.state is not ReplicaState.READY:
            return 0
        alone = floor.view.models[replica.deployment].record.kv_bytes
        used = replica.kv_bytes * (1 - replica.kv_pages_free / replica.kv_pages) if replica.kv_pages else 0.0
        return max(0, replica.kv_bytes - max(int(alone * HOST_KV_PART), int(used * 1.25)))


def _spare_kv(model: p.ModelView) -> int:
    return SPARE_KV_TOKENS * model.record.kv_bytes_per_token


def prewarm(context: PolicyContext) -> Prewarm:
    """Factory of ``prewarm``."""
    return Prewarm()
