"""What the baselines share: devices that are free in a view, loads over the last seconds, how many replicas a load needs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from broker.core.plan.policy import Arrivals, DeviceView, ModelView, PoolView, ReplicaView
from broker.core.pool.catalogue import DeviceKey
from ops.simulator.capacity import Load, Targets, compute_share, kv_bytes_needed
from profiles.costs import prefill_s, standing_share
from subjects.ids import DeploymentKey
from subjects.messages import ModelRecord, ReplicaState, StepCosts

BACKLOG_S = 10.0
FILLED = 0.7
"""The part of its capacity to which operators let a replica be used."""


class Floor:
    """The devices of a view while a decision is made: what is free once everything planned has happened."""

    def __init__(self, view: PoolView) -> None:
        self.view = view
        self.models_max = view.models_per_device_max
        self.free_bytes = {key: device.free_planned_bytes for key, device in view.devices.items()}
        self.residents: dict[DeviceKey, list[ReplicaView]] = {key: [] for key in view.devices}
        """Replicas that nobody has told to leave."""
        for model in view.models.values():
            for replica in model.replicas:
                for key in replica.devices:
                    self.residents.setdefault(key, []).append(replica)

    def whole(self, record: ModelRecord) -> tuple[DeviceKey, ...] | None:
        """Empty devices for one replica that wants them for itself: linked ones, of the fullest worker that has enough."""
        by_link: dict[tuple[str, str], list[DeviceKey]] = {}
        for key, device in self.view.devices.items():
            if self.free_bytes[key] == device.memory_bytes and device.memory_bytes >= record.budget_bytes:
                by_link.setdefault((key[0], device.link), []).append(key)
        enough = sorted((len(keys), keys) for keys in by_link.values() if len(keys) >= record.gpus)
        return tuple(enough[0][1][: record.gpus]) if enough else None

    def take(self, devices: Sequence[DeviceKey], budget_bytes: int) -> None:
        """So much of each is gone."""
        for key in devices:
            self.free_bytes[key] -= budget_bytes

    def give(self, devices: Sequence[DeviceKey], budget_bytes: int) -> None:
        """So much of each is free again."""
        for key in devices:
            self.free_bytes[key] += budget_bytes


class Recent:
    """A model's arrivals over the last ``span_s`` seconds."""

    def __init__(self, span_s: float) -> None:
        self.span_s = span_s
        self._began_s: float | None = None
        self._seen: deque[tuple[float, Arrivals]] = deque()

    def add(self, now_s: float, arrivals: Arrivals) -> None:
        """What arrived since the last call."""
        if self._began_s is None:
            self._began_s = now_s
        if any(arrivals.requests):
            self._seen.append((now_s, arrivals))
        while self._seen and self._seen[0][0] <= now_s - self.span_s:
            self._seen.popleft()

    def covered_s(self, now_s: float) -> float:
        """Seconds of the span that were observed."""
        return 0.0 if self._began_s is None else min(self.span_s, now_s - self._began_s)

    def loads(self, now_s: float) -> list[Load]:
        """Requests per second and mean tokens, by length class; empty before anything was observed."""
        span_s = max(self.covered_s(now_s), 1.0)
        found = []
        for length in range(3):
            count = sum(arrivals.requests[length] for _, arrivals in self._seen)
            if count:
                inputs = sum(arrivals.input_tokens[length] for _, arrivals in self._seen)
                outputs = sum(arrivals.output_tokens[length] for _, arrivals in self._seen)
                found.append(Load(count / span_s, inputs / count, outputs / count))
        return found


def capacity_used(record: ModelRecord, costs: StepCosts, loads: Sequence[Load], kv_bytes: int) -> float:
    """How many replicas with ``kv_bytes`` of KV each the loads fill altogether: their engines' time, slots or KV.

    A replica is full when its steps take the whole TPOT target. Slots and KV are counted at the length of steps that it has
    when it is filled to ``FILLED``, where requests stay for a shorter time.
    """
    tpot_s = Targets.of(record).tpot_s
    left = 1.0 - standing_share(costs, tpot_s)
    time = compute_share(costs, loads, tpot_s, replicas=0) / left if left > 0 else math.inf
    step_s = _step_s(costs, tpot_s, FILLED)
    slots = sum(load.rps * load.output_tokens for load in loads) * step_s / record.max_num_seqs
    kv = kv_bytes_needed(record.kv_bytes_per_token, loads, step_s) / kv_bytes if kv_bytes else 0.0
    return max(time, slots, kv)


def requests_at(record: ModelRecord, costs: StepCosts, loads: Sequence[Load], kv_bytes: int, filled: float) -> float:
    """Requests in flight at one replica that such loads fill to ``filled``; all its slots where there are no loads."""
    used = capacity_used(record, costs, loads, kv_bytes)
    if used <= 0:
        return float(record.max_num_seqs)
    step_s = _step_s(costs, Targets.of(record).tpot_s, filled)
    in_flight = sum(load.rps * (load.output_tokens * step_s + prefill_s(costs, load.input_tokens)) for load in loads)
    return max(1.0, in_flight / used * filled)


def _step_s(costs: StepCosts, tpot_s: float, filled: float) -> float:
    """A replica's steps when it is filled to that part."""
    return costs.step_const_s / max(1.0 - filled * (1.0 - standing_share(costs, tpot_s)), 1e-9)


def costs_of(model: ModelView, view: PoolView) -> StepCosts:
    """The fitted costs on the pool's kind of device (the simulated pools are of one kind)."""
    device: DeviceView | None = next(iter(view.devices.values()), None)
    return model.record.costs[device.device_type] if device is not None else next(iter(model.record.costs.values()))


def needed(used: float, utilisation: float) -> int:
    """Replicas so that each is filled to ``utilisation`` at most."""
    return math.ceil(used / utilisation - 1e-9)


class Sizer:
    """How many whole replicas a model needs now, by its load over the last seconds and by what waits."""

    def __init__(self, span_s: float, utilisation: float, surplus_s: float) -> None:
        """The most that was needed within ``surplus_s`` is held on to."""
        self.recent = Recent(span_s)
        self.seen_s = -math.inf
        """When the model last had anything to do."""
        self._utilisation = utilisation
        self._surplus_s = surplus_s
        self._needs: deque[tuple[float, float]] = deque()

    def see(self, now_s: float, model: ModelView) -> None:
        """At every look."""
        self.recent.add(now_s, model.arrivals)
        if model.waiting or model.running or any(model.arrivals.requests):
            self.seen_s = now_s

    def size(self, now_s: float, model: ModelView, costs: StepCosts) -> float:
        """Replicas needed, as a fraction: to carry the load, to prefill within the TTFT target what waits, and to work that
        off within ``BACKLOG_S``."""
        record = model.record
        loads = self.recent.loads(now_s)
        used = capacity_used(record, costs, loads, record.kv_bytes)
        if model.waiting:
            prefill_each_s = prefill_s(costs, model.waiting_input_tokens / model.waiting)
            rps = sum(load.rps for load in loads)
            work_each_s = compute_share(costs, loads, Targets.of(record).tpot_s, replicas=0) / rps if rps else prefill_each_s
            ttft_s = Targets.of(record).ttft_s
            used += model.waiting * max(prefill_each_s / ttft_s, work_each_s / BACKLOG_S)
        size = used / self._utilisation
        self._needs.append((now_s, size))
        while self._needs[0][0] <= now_s - self._surplus_s:
            self._needs.popleft()
        return size

    def held(self) -> float:
        """The most that was needed in the last while, as of the last :meth:`size`."""
        return max(size for _, size in self._needs)


def idlest(replicas: Sequence[ReplicaView], count: int) -> list[ReplicaView]:
    """``count`` of them to give up: those on their way first, then those that run the least."""
    order = sorted(replicas, key=lambda r: (r.state is ReplicaState.READY, r.running, -r.since_s, r.replica))
    return [replica for replica in order if not replica.stays][: max(0, count)]


class Every:
    """True once per period of the policy's clock."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._next_s = -math.inf

    def due(self, now_s: float) -> bool:
        """Whether the period is over; then the next one begins."""
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._period_s
        return True


def waiting_first(view: PoolView) -> list[tuple[DeploymentKey, ModelView]]:
    """Models by how long their oldest request waits, longest first."""
    return sorted(view.models.items(), key=lambda item: (-item[1].oldest_wait_s, item[0]))
