"""What a run is judged by: one row per request of the measured time, device time, switches, and a few lines over time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ops.simulator.bound import least_work_s
from ops.simulator.types import ModelResult, Result, SimModel, Trace, Window, Workload
from ops.simulator.world import World
from subjects.messages import SlaClass

Floats = npt.NDArray[np.float64]
CLASSES = tuple(SlaClass)


@dataclass(slots=True)
class Series:
    """Lines over time, one entry per sample; ``models`` in the workload's order."""

    time_s: list[float] = field(default_factory=list)
    models: tuple[str, ...] = ()
    ready: list[list[int]] = field(default_factory=list)
    """Ready replicas, [sample][model]."""
    coming: list[list[int]] = field(default_factory=list)
    """Replicas that load."""
    waiting: list[list[int]] = field(default_factory=list)
    """Requests that wait for a replica."""
    running: list[list[int]] = field(default_factory=list)
    gpus: list[int] = field(default_factory=list)
    """Devices that hold something."""
    utilisation: list[float] = field(default_factory=list)
    """Share of the time since the last sample in which a device that holds something worked."""


class Meter:
    """Listens while a run goes on. Everything counts only inside the window."""

    def __init__(self, workload: Workload, window: Window, points_max: int, tick_s: float) -> None:
        self.window = window
        self.series = Series(models=tuple(model.name for model in workload.models))
        ticks = (window.end_s - window.warmup_s) / tick_s
        self._every = max(1, -(-int(ticks) // points_max))
        self._ticks = 0
        self._last = (0.0, 0.0)
        self._begin = (0.0, 0.0)
        self._end = (0.0, 0.0)
        self.switches = 0
        self.effects_s: list[float] = []
        self.moves_s: list[float] = []
        self.alerts = 0

    def _inside(self, at_s: float) -> bool:
        return self.window.begin_s <= at_s < self.window.end_s

    def load_began(self, now_s: float) -> None:
        """A load began: a switch."""
        self.switches += self._inside(now_s)

    def effect(self, decided_s: float, now_s: float) -> None:
        """An agent began to do what was decided."""
        if self._inside(decided_s):
            self.effects_s.append(now_s - decided_s)

    def moved(self, decided_s: float, now_s: float) -> None:
        """What was decided is a ready replica."""
        if self._inside(decided_s):
            self.moves_s.append(now_s - decided_s)

    def begin(self, world: World) -> None:
        """The measured time begins."""
        self._begin = _device_time(world)
        world.most_held = world.held_devices

    def end(self, world: World) -> None:
        """It is over."""
        self._end = _device_time(world)
        self.gpus_owned = world.most_held

    gpus_owned = 0

    @property
    def held_s(self) -> float:
        """Device time with a replica on it."""
        return self._end[0] - self._begin[0]

    @property
    def busy_s(self) -> float:
        """Device time in which an engine worked."""
        return self._end[1] - self._begin[1]

    def sample(self, world: World) -> None:
        """Once each tick."""
        self._ticks += 1
        if (self._ticks - 1) % self._every or world.now_s > self.window.end_s:
            return
        held, busy = _device_time(world)
        held_s, busy_s = held - self._last[0], busy - self._last[1]
        self._last = (held, busy)
        models = range(len(world.models))
        ready = [len(world.serving[m]) for m in models]
        coming = [0] * len(ready)
        for replica in world.replicas.values():
            coming[replica.model] += not (replica.ready or replica.draining)
        series = self.series
        series.time_s.append(world.now_s)
        series.ready.append(ready)
        series.coming.append(coming)
        series.waiting.append([world.queues[m].count for m in models])
        series.running.append(list(world.running))
        series.gpus.append(world.held_devices)
        series.utilisation.append(busy_s / held_s if held_s > 0 else 0.0)


def _device_time(world: World) -> tuple[float, float]:
    held = busy = 0.0
    for device in world.devices:
        held += device.held_until_s(world.now_s)
        busy += device.busy_until_s(world.now_s)
    return held, busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run's raw result over its window; several merge exactly. Columns have a row per request that arrived there."""

    workload: str
    policy: str
    seed: int
    models: tuple[SimModel, ...]
    model: npt.NDArray[np.int16]
    input_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    sla_class: npt.NDArray[np.uint8] | None
    ttft_s: Floats
    """Infinite where no request finished."""
    tpot_s: Floats
    refused: npt.NDArray[np.bool_]
    held_s: float
    busy_s: float
    gpus_owned: int
    switches: int
    effects_s: tuple[float, ...]
    moves_s: tuple[float, ...]
    counts: dict[str, float]
    """Further numbers that add up over windows."""
    digest: str


def measure(
    workload: Workload, policy: str, seed: int, window: Window, trace: Trace, world: World, meter: Meter
) -> Measured:
    """Takes the columns out of a world that has ended."""
    arrival_s = trace.arrival_s
    inside = (arrival_s >= window.begin_s) & (arrival_s < window.end_s)
    first_s = np.frombuffer(world.first_s, np.float64)
    end_s = np.frombuffer(world.end_s, np.float64)
    refused = np.frombuffer(world.refused, np.uint8).astype(np.bool_)
    done = end_s >= 0.0
    ttft_s = np.where(done, first_s - arrival_s, np.inf)
    tpot_s = np.where(done, (end_s - first_s) / np.maximum(1, trace.output_tokens - 1), np.inf)
    nanoseconds = np.rint(np.stack((first_s, end_s)) * 1e9).astype("<i8")
    replicas = list(world.replicas.values())
    return Measured(
        workload=workload.name,
        policy=policy,
        seed=seed,
        models=workload.models,
        model=trace.model[inside],
        input_tokens=trace.input_tokens[inside],
        output_tokens=trace.output_tokens[inside],
        sla_class=None if trace.sla_class is None else trace.sla_class[inside],
        ttft_s=ttft_s[inside],
        tpot_s=tpot_s[inside],
        refused=refused[inside],
        held_s=meter.held_s,
        busy_s=meter.busy_s,
        gpus_owned=meter.gpus_owned,
        switches=meter.switches,
        effects_s=tuple(meter.effects_s),
        moves_s=tuple(meter.moves_s),
        counts={
            "interrupted": float(world.interrupted),
            "retries": float(world.retries),
            "preempted": float(world.preempted + sum(replica.engine.preempted for replica in replicas)),
            "alerts": float(meter.alerts),
            "unfinished": float(np.count_nonzero(~done & ~refused & inside)),
        },
        digest=hashlib.sha256(nanoseconds.tobytes() + bytes(world.refused)).hexdigest(),
    )


def merge_measured(parts: Sequence[Measured]) -> Measured:
    """One over all windows of a workload, policy and seed."""
    first = parts[0]
    if any((p.workload, p.policy, p.seed) != (first.workload, first.policy, first.seed) for p in parts):
        raise ValueError("only windows of one workload, policy and seed can be merged")
    if len(parts) == 1:
        return first
    classes = [part.sla_class for part in parts if part.sla_class is not None]
    return Measured(
        workload=first.workload,
        policy=first.policy,
        seed=first.seed,
        models=first.models,
        model=np.concatenate([part.model for part in parts]),
        input_tokens=np.concatenate([part.input_tokens for part in parts]),
        output_tokens=np.concatenate([part.output_tokens for part in parts]),
        sla_class=np.concatenate(classes) if classes else None,
        ttft_s=np.concatenate([part.ttft_s for part in parts]),
        tpot_s=np.concatenate([part.tpot_s for part in parts]),
        refused=np.concatenate([part.refused for part in parts]),
        held_s=sum(part.held_s for part in parts),
        busy_s=sum(part.busy_s for part in parts),
        gpus_owned=max(part.gpus_owned for part in parts),
        switches=sum(part.switches for part in parts),
        effects_s=tuple(value for part in parts for value in part.effects_s),
        moves_s=tuple(value for part in parts for value in part.moves_s),
        counts={name: sum(part.counts[name] for part in parts) for name in first.counts},
        digest=hashlib.sha256(" ".join(part.digest for part in parts).encode()).hexdigest(),
    )


def summarise(measured: Measured) -> Result:
    """The row of the table."""
    good = np.zeros(len(measured.model), np.bool_)
    useful_s = 0.0
    models: dict[str, ModelResult] = {}
    for number, model in enumerate(measured.models):
        mine = measured.model == number
        ttft_s, tpot_s = measured.ttft_s[mine], measured.tpot_s[mine]
        within = (ttft_s <= model.ttft_s) & (tpot_s <= model.tpot_s)
        good[mine] = within
        if within.any():
            work = least_work_s(model, measured.input_tokens[mine][within], measured.output_tokens[mine][within])
            useful_s += float(work.sum())
        models[model.name] = ModelResult(
            requests=len(ttft_s),
            within_slo=int(within.sum()),
            succeeded=int(np.isfinite(ttft_s).sum()),
            refused=int(measured.refused[mine].sum()),
            ttft_p50_s=quantile(ttft_s, 0.50),
            ttft_p99_s=quantile(ttft_s, 0.99),
            tpot_p99_s=quantile(tpot_s, 0.99),
        )
    count = max(1, len(good))
    extra = {name: round(value, 9) for name, value in measured.counts.items()}
    if measured.sla_class is not None:
        for c, sla_class in enumerate(CLASSES):
            mine = measured.sla_class == c
            if mine.any():
                extra[f"slo_{sla_class.value}"] = float(good[mine].mean())
    held_s = measured.held_s
    return Result(
        workload=measured.workload,
        policy=measured.policy,
        seed=measured.seed,
        gpu_hours=held_s / 3600,
        gpus_owned=measured.gpus_owned,
        slo_all=float(good.sum()) / count if len(good) else 1.0,
        slo_worst_model=min((m.within_slo / m.requests for m in models.values() if m.requests), default=1.0),
        ttft_p50=quantile(measured.ttft_s, 0.50),
        ttft_p99=quantile(measured.ttft_s, 0.99),
        tpot_p99=quantile(measured.tpot_s, 0.99),
        success=float(np.isfinite(measured.ttft_s).sum()) / count if len(good) else 1.0,
        refused=float(measured.refused.sum()) / count,
        switches=measured.switches,
        utilisation=measured.busy_s / held_s if held_s else 0.0,
        useful_utilisation=useful_s / held_s if held_s else 0.0,
        decision_to_effect_s=quantile(np.asarray(measured.effects_s), 0.5),
        resource_move_s=quantile(np.asarray(measured.moves_s), 0.5),
        digest=measured.digest,
        models=models,
        extra=extra,
    )


def quantile(values: Floats, share: float) -> float:
    """The smallest value that at least ``share`` of all values do not exceed; 0 of none."""
    if not len(values):
        return 0.0
    place = min(len(values) - 1, max(0, int(np.ceil(share * len(values))) - 1))
    return float(np.partition(values, place)[place])
