"""A fixed placement with a shared queue in front of it: nothing ever moves.

The idea of AlpaServe and MuxServe: models are placed once, by what they need on average, several on one GPU where their
weights and their mean shares of its time fit, and a queue per model feeds whichever of its replicas has room. Averages are
those of another day of the same services (the workload drawn from another seed), with each device planned to 70 %. Left out:
partitions of a GPU's cores (time is shared by turns) and re-planning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from broker.core.plan.policy import Action, Decision, PoolView, StartReplica
from broker.core.pool.catalogue import DeviceKey
from ops.simulator.capacity import Load, kv_bytes_needed
from ops.simulator.policies.common import FILLED, capacity_used
from ops.simulator.types import PolicyContext, PoolSpec, SimModel
from profiles.costs import LENGTH_CLASS_TOKENS_MAX
from subjects.ids import DeploymentKey

OTHER_DAY = 1_000_003
"""Added to the seed: another day of the same services."""
KV_PART_MIN = 0.025
"""Least part of a device's memory that a replica gets for KV on each of its devices."""


@dataclass(slots=True)
class _Place:
    """A device while it is filled."""

    share: float = 0.0
    held_bytes: int = 0
    replicas: list[_Planned] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Planned:
    model: SimModel
    share: float
    kv_bytes: int
    """Least KV budget over all its devices; grows to what its devices have left."""
    devices: tuple[int, ...] = ()

    @property
    def bytes_each(self) -> int:
        return -(-(self.model.weights_bytes + self.kv_bytes) // self.model.gpus)


class QueueOnly:
    """Starts its placement and never changes it."""

    name = "queue-only"

    def __init__(self, planned: Sequence[_Planned]) -> None:
        self._planned = planned

    def decide(self, now_s: float, view: PoolView) -> Decision:
        """Starts what is planned and not there."""
        keys = list(view.devices)
        there: set[tuple[DeploymentKey, tuple[DeviceKey, ...]]] = {
            (deployment, replica.devices) for deployment, model in view.models.items() for replica in model.replicas
        }
        actions: list[Action] = []
        for planned in self._planned:
            devices = tuple(keys[number] for number in planned.devices)
            if (planned.model.deployment, devices) not in there:
                why = f"its mean share is {planned.share:.2f}"
                actions.append(StartReplica(planned.model.deployment, devices, why, kv_bytes=planned.kv_bytes))
        return Decision(tuple(actions))


def place(pool: PoolSpec, loads: Sequence[tuple[SimModel, Sequence[Load]]]) -> list[_Planned]:
    """First fit by decreasing share; what does not fit any more (a pool too small) is left out."""
    wanted: list[_Planned] = []
    for model, mean in loads:
        record = model.record(model.kv_bytes_alone(pool.device_bytes))
        used = capacity_used(record, model.costs, mean, record.kv_bytes) / FILLED
        count = max(1, math.ceil(used - 1e-9))
        kv_bytes = int(kv_bytes_needed(model.kv_bytes_per_token, mean, model.tpot_s / 2) / count)
        kv_bytes = min(max(kv_bytes, int(KV_PART_MIN * pool.device_bytes) * model.gpus), record.kv_bytes)
        wanted += [_Planned(model, used / count, kv_bytes) for _ in range(count)]
    wanted.sort(key=lambda one: (-one.model.gpus, -one.share, one.model.name))
    places = [_Place() for _ in range(pool.devices)]
    for one in wanted:
        one.devices = _first_fit(pool, places, one)
        for number in one.devices:
            places[number].share += one.share
            places[number].held_bytes += one.bytes_each
            places[number].replicas.append(one)
    placed = [one for one in wanted if one.devices]
    for one in placed:
        # What is left of the fullest of its devices goes to those there in proportion to their shares.
        part = min(
            (pool.device_bytes - places[n].held_bytes) * (one.share / places[n].share if places[n].share else 0.0)
            for n in one.devices
        )
        one.kv_bytes += int(part * 0.999) * one.model.gpus
    return placed


def _first_fit(pool: PoolSpec, places: Sequence[_Place], one: _Planned) -> tuple[int, ...]:
    for first in range(0, pool.devices, pool.devices_per_node):
        node = range(first, min(first + pool.devices_per_node, pool.devices))
        fitting = [
            number
            for number in node
            if places[number].share + one.share <= 1.0
            and places[number].held_bytes + one.bytes_each <= pool.device_bytes
            and len(places[number].replicas) < pool.models_per_device_max
            and not any(other.model is one.model for other in places[number].replicas)
        ]
        if len(fitting) >= one.model.gpus:
            return tuple(fitting[: one.model.gpus])
    return ()


def queue_only(context: PolicyContext) -> QueueOnly:
    """Factory of ``queue-only``."""
    workload = context.workload
    seconds = sum(window.end_s - window.warmup_s for window in workload.windows)
    traces = [workload.trace(context.seed + OTHER_DAY, window) for window in workload.windows]
    loads: list[tuple[SimModel, list[Load]]] = []
    for number, model in enumerate(workload.models):
        inputs = np.concatenate([trace.input_tokens[trace.model == number] for trace in traces])
        outputs = np.concatenate([trace.output_tokens[trace.model == number] for trace in traces])
        classes = np.searchsorted(LENGTH_CLASS_TOKENS_MAX, inputs, side="left")
        mean = [
            Load(float(mine.sum()) / seconds, float(inputs[mine].mean()), float(outputs[mine].mean()))
            for mine in (classes == length for length in range(3))
            if mine.any()
        ]
        loads.append((model, mean))
    return QueueOnly(place(workload.pool, loads))
