"""What a schedule that knows the future would do: demand of every second of a trace, and residencies that cover it.

Two ways to plan, by how a model is used. *Steady* models nearly always have requests: time is cut into slices, and in each
slice replicas are placed so that their devices' time and memory carry the load (:func:`plan_steady`). *Sparse* models are
idle most of the time: each cluster of requests gets a residency that begins just in time and ends with it, and residencies
are packed so that devices are held as briefly as possible (:func:`plan_sparse`).

Device time adds up: a replica takes what its requests' work takes, and the constant part of its steps at ``PACE_S`` per
token (a device that several share gives first to those that want little, see ``device``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ops.simulator.types import PoolSpec, SimModel, Trace, Window, Workload

Floats = npt.NDArray[np.float64]

GRID_S = 0.5
PACE_S = 0.07
"""Time per token at which decoding is planned; a replica's steps cost their constant so often."""
STAY_S = 0.035
"""Time per token at which requests are taken to stay, for memory: devices are mostly less full than planned for."""
DEADLINE_PART = 0.6
"""Of the TTFT target, the time in which a burst of prompts is planned to be prefilled."""
BURSTS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Lengths of time over which arriving prompts are looked at as one burst."""
KV_PART_MIN = 0.02
"""Least part of a device's memory for a replica's KV on each of its devices."""
KV_ROOM = 1.15
"""KV planned over what runs at ``STAY_S``."""
CALM_MIN = 0.3
FITTING_ROUNDS = 12
SPLIT_ERROR = 0.01
"""Part of a model's load that may seem to be lacking after so many rounds."""
USED_DEVICE = 0.15
"""What one more replica on a device in use counts beside a new device: little, but not nothing."""
SPARSE_SLOWER = 1.5
"""Times what a request takes alone: a device's residents take turns."""
LEAVE_S = 0.8
"""From the end of a residency until its memory is free, with some room for errors."""
NOTICE_S = 0.45
"""A load is ordered so long before it must begin: the next look, and the way to the agent."""
SPARSE_BUSY_MAX = 0.9
"""A model that is at work for a smaller part of the time is sparse."""
SHARED = 0.97


@dataclass(frozen=True, slots=True)
class Residency:
    """One replica's life: ready at ``begin_s``, not needed after ``end_s``."""

    model: int
    devices: tuple[int, ...]
    begin_s: float
    end_s: float
    kv: tuple[tuple[float, int], ...]
    """(from when, KV budget over all its devices), ascending."""
    anywhere: bool = False
    """Its devices are only where it fits best: another place will do as well, if there is no room when it must begin."""

    def kv_bytes(self, now_s: float) -> int:
        """Its budget at a time; the first one before it begins."""
        found = self.kv[0][1]
        for from_s, kv_bytes in self.kv:
            if from_s <= now_s:
                found = kv_bytes
        return found


@dataclass(frozen=True, slots=True)
class Demand:
    """One model over time, on a grid of ``GRID_S`` from ``start_s`` on; time of one replica, standing part not counted."""

    work: Floats
    """Seconds of a replica per second: prompts by their deadlines, decoding at ``PACE_S`` per token."""
    kv_tokens: Floats
    running: Floats
    alive: npt.NDArray[np.bool_]
    """Whether any request is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """What the search over plans may change."""

    work: tuple[float, ...]
    """By model, times the demand."""
    calm: tuple[float, ...]
    """By model, the least part of its devices' time that its neighbours must leave it at any moment: beside busy ones a
    prompt holds up for long the answers that run."""
    slice_s: float = 5.0
    keep_s: float = 40.0
    """A device is given up only if it is not needed again for so long."""
    close_s: float = 8.0
    """How long a replica that is not needed any more may finish what it runs; then that moves."""
    sparse_gap_s: float = 10.0
    """A sparse model stays loaded over a gap of this length."""
    sparse_late: float = 0.35
    """It is ready when this part of its first request's TTFT target is over."""


def demand(model: SimModel, trace: Trace, number: int, start_s: float, end_s: float) -> Demand:
    """Of one model of a trace."""
    mine = trace.model == number
    arrival_s = trace.arrival_s[mine]
    inputs = trace.input_tokens[mine].astype(np.float64)
    outputs = trace.output_tokens[mine].astype(np.float64)
    costs = model.costs
    cells = max(1, math.ceil((end_s - start_s) / GRID_S))
    at = np.clip(((arrival_s - start_s) / GRID_S).astype(np.int64), 0, cells - 1)
    prefill_s = costs.prefill_token_s * inputs + costs.prefill_token2_s * inputs * inputs
    each_s = costs.step_request_s + costs.step_context_token_s * (inputs + outputs / 2)

    def over_life(values: Floats, token_s: float) -> Floats:
        """Sum of the values of those that are there if a token takes so long."""
        life_s = np.maximum(outputs * token_s, 0.2)
        last = np.clip(((arrival_s + life_s - start_s) / GRID_S).astype(np.int64), 0, cells - 1)
        change = np.zeros(cells + 1)
        np.add.at(change, at, values)
        np.add.at(change, last + 1, -values)
        return np.asarray(np.cumsum(change)[:cells], np.float64)

    deadline_s = DEADLINE_PART * model.ttft_s
    arriving = np.bincount(at, weights=prefill_s, minlength=cells)
    total = np.concatenate(([0.0], np.cumsum(arriving)))
    prompts = np.zeros(cells)
    for burst_s in BURSTS_S:
        length = round(burst_s / GRID_S)
        first = np.maximum(np.arange(1, cells + 1) - length, 0)
        rate = (total[1:] - total[first]) / (burst_s + deadline_s)
        prompts = np.maximum(prompts, rate)
    held = prompts.copy()
    for ahead in range(1, math.ceil(deadline_s / GRID_S) + 1):
        held[ahead:] = np.maximum(held[ahead:], prompts[:-ahead])
    running = over_life(np.ones(len(inputs)), STAY_S)
    return Demand(
        work=held + over_life(each_s / PACE_S, PACE_S),
        kv_tokens=over_life(inputs + outputs, STAY_S),
        running=running,
        alive=running > 0.5,
    )


def calm_needed(model: SimModel, trace: Trace, number: int) -> float:
    """A first guess at ``Margins.calm``: that a short answer (all but one of twenty have more tokens) during which another
    prompt of its model is prefilled (all but one of ten are shorter) still has its time per token."""
    mine = trace.model == number
    outputs = trace.output_tokens[mine]
    several = outputs[outputs >= 2]
    if not len(several):
        return CALM_MIN
    steps = float(np.quantile(several, 0.05)) - 1.0
    costs = model.costs
    inputs = float(np.quantile(trace.input_tokens[mine], 0.9))
    prefill_s = costs.prefill_token_s * inputs + costs.prefill_token2_s * inputs * inputs
    return min(1.0, max(CALM_MIN, (steps * costs.step_const_s + prefill_s) / (0.95 * steps * model.tpot_s)))


def standing(model: SimModel) -> float:
    """The part of its devices that a working replica's steps eat whatever their batch."""
    return model.costs.step_const_s / PACE_S


def is_sparse(model: SimModel, found: Demand) -> bool:
    """Whether a model is idle most of the time, and one replica is enough for it."""
    return float(found.alive.mean()) < SPARSE_BUSY_MAX and float(found.work.max()) + standing(model) < SHARED


# --------------------------------------------------------------------------------------------------------------- steady


@dataclass(frozen=True, slots=True)
class Want:
    """What steady models need in a slice: time of replicas, and bytes of KV, by model."""

    work: Sequence[float]
    kv: Sequence[float]


class _Layout:
    """Which steady models have replicas where. Devices are numbers; a replica over several takes neighbours of one node."""

    def __init__(self, pool: PoolSpec, models: Sequence[SimModel], limit: int, calm: Sequence[float]) -> None:
        self.pool = pool
        self.models = models
        self.calm = calm
        self.busy = [0.0] * len(models)
        """Work of each model in the slice at hand."""
        self.devices = limit
        self.places: list[list[tuple[int, ...]]] = [[] for _ in models]
        self.on: list[list[int]] = [[] for _ in range(limit)]
        """Models by device."""

    def copy(self) -> _Layout:
        other = _Layout(self.pool, self.models, self.devices, self.calm)
        other.busy = self.busy
        other.places = [list(places) for places in self.places]
        other.on = [list(on) for on in self.on]
        return other

    def add(self, model: int, place: tuple[int, ...]) -> None:
        self.places[model].append(place)
        for device in place:
            self.on[device].append(model)

    def remove(self, model: int, place: tuple[int, ...]) -> None:
        self.places[model].remove(place)
        for device in place:
            self.on[device].remove(model)

    def used(self) -> list[int]:
        return [device for device in range(self.devices) if self.on[device]]

    def free_bytes(self, device: int) -> float:
        """Memory beyond the weights and the least KV of those that are there."""
        return self.pool.device_bytes - sum(self.least_bytes(model) for model in self.on[device])

    def least_bytes(self, model: int) -> float:
        """Of one replica on each of its devices."""
        spec = self.models[model]
        return spec.weights_bytes / spec.gpus + KV_PART_MIN * self.pool.device_bytes

    def fits(self, model: int, device: int) -> bool:
        """Whether one more replica can be there."""
        on = self.on[device]
        if model in on or len(on) >= self.pool.models_per_device_max:
            return False
        if self.free_bytes(device) < self.least_bytes(model):
            return False
        presses = {other: self.presses(other) for other in on} | {model: self.presses(model, 1)}
        total = sum(presses.values())
        return not on or all(SHARED - (total - press) >= self.calm[other] for other, press in presses.items())

    def presses(self, model: int, more: int = 0) -> float:
        """The part of a device's time that a replica keeps from a neighbour that could use it: its work, half at most."""
        return min(0.5, self.busy[model] / max(1, len(self.places[model]) + more) + standing(self.models[model]))

    def room(self, device: int) -> float:
        """Its time beside the standing parts of its residents."""
        on = self.on[device]
        whole = 1.0 if len(on) <= 1 else SHARED
        return whole - sum(standing(self.models[model]) for model in on)

    def deficit(self, want: Want) -> tuple[float, frozenset[int]]:
        """What of a load cannot be carried, in devices, and by the lack of whose replicas; none if all can."""
        carried = [0.0] * len(self.models)
        for (model, _), part in self.split(want).items():
            carried[model] += part
        missing = [
            max(0.0, 1.0 - have / wanted) if wanted > 0 else 0.0 for have, wanted in zip(carried, want.work, strict=True)
        ]
        lack = sum(m * w * spec.gpus for m, w, spec in zip(missing, want.work, self.models, strict=True) if m > SPLIT_ERROR)
        late = frozenset(model for model, m in enumerate(missing) if m > SPLIT_ERROR)
        uneasy, pressing = self._uneasy()
        return lack + uneasy, late or pressing

    def split(self, want: Want) -> dict[tuple[int, tuple[int, ...]], float]:
        """Work that each replica does, so that all models get about the same part of what they want (all of it, or more, if
        there is enough): devices give time and, with the work, KV; iterative proportional fitting."""
        kv_each = [
            kv / work / spec.gpus if work > 0 else 0.0
            for kv, work, spec in zip(want.kv, want.work, self.models, strict=True)
        ]
        time = {device: max(0.0, self.room(device)) for device in self.used()}
        memory = {device: max(0.0, self.free_bytes(device)) for device in time}
        pull = [work / max(1, len(places)) for work, places in zip(want.work, self.places, strict=True)]
        parts: dict[tuple[int, tuple[int, ...]], float] = {}
        for _ in range(FITTING_ROUNDS):
            scale = {}
            for device in time:
                asked = kv = 0.0
                for model in self.on[device]:
                    asked += pull[model]
                    kv += pull[model] * kv_each[model]
                scale[device] = min(time[device] / asked if asked > 0 else 1e9, memory[device] / kv if kv > 0 else 1e9)
            least = 1e9
            for model, places in enumerate(self.places):
                if want.work[model] <= 0:
                    continue
                got = 0.0
                for place in places:
                    part = pull[model] * min(scale[device] for device in place)
                    parts[(model, place)] = part
                    got += part
                got /= want.work[model]
                least = min(least, got)
                pull[model] = pull[model] / max(got, 1e-3)
            if least >= 1.0:
                break
        return parts

    def _uneasy(self) -> tuple[float, frozenset[int]]:
        """What is missing to the calm of the residents of all devices, and who presses: its work can be spread out more."""
        missing = 0.0
        pressing = frozenset[int]()
        for on in self.on:
            if len(on) < 2:
                continue
            presses = {model: self.presses(model) for model in on}
            total = sum(presses.values())
            for model in on:
                short = self.calm[model] - (SHARED - (total - presses[model]))
                if short > 1e-9:
                    missing += short
                    pressing |= {other for other in on if other != model and self.models[other].gpus == 1}
        return missing, pressing


def _kind(layout: _Layout, place: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Who is on each device of a place: places of the same kind are as good as each other, and one of them is enough to look
    at (a pool of sixty devices has a dozen kinds)."""
    return tuple(sorted(tuple(sorted(layout.on[device])) for device in place))


def _options(layout: _Layout, model: int, shut: frozenset[int], fresh: bool) -> list[tuple[int, ...]]:
    """Where one more replica fits: of devices in use one of each kind, and (``fresh``) the first that is not."""
    gpus = layout.models[model].gpus
    pool = layout.pool
    found: list[tuple[int, ...]] = []
    kinds: dict[tuple[tuple[int, ...], ...], None] = {}
    if gpus == 1:
        for device in range(layout.devices):
            kind = _kind(layout, (device,))
            if device in shut or kind in kinds or not layout.fits(model, device):
                continue
            if layout.on[device]:
                kinds[kind] = None
                found.append((device,))
            elif fresh:
                found.append((device,))
                break
        return found
    for first in range(0, layout.devices - gpus + 1, gpus):
        place = tuple(range(first, first + gpus))
        if first // pool.devices_per_node != (first + gpus - 1) // pool.devices_per_node:
            continue
        kind = _kind(layout, place)
        if kind in kinds or any(device in shut or not layout.fits(model, device) for device in place):
            continue
        kinds[kind] = None
        if all(layout.on[device] for device in place):
            found.append(place)
        elif fresh:
            found.append(place)
            if not any(layout.on[device] for device in place):
                break
    return found


def _grow(layout: _Layout, want: Want, shut: frozenset[int] = frozenset(), fresh: bool = True) -> bool:
    """Adds replicas until the load is carried; whether it is. Devices in use come first, then those that bring most."""
    layout.busy = list(want.work)
    for _ in range(4 * layout.devices + 8):
        lack, culprits = layout.deficit(want)
        if lack <= 1e-9:
            return True
        best: tuple[float, int, int, tuple[int, ...]] | None = None
        for model in sorted(culprits):
            for place in _options(layout, model, shut, fresh):
                new = sum(not layout.on[device] for device in place)
                layout.add(model, place)
                won = lack - layout.deficit(want)[0]
                layout.remove(model, place)
                if won > 1e-6:
                    # What it brings for each device: one in use costs little, not nothing.
                    key = (-won / (new + USED_DEVICE), new, model, place)
                    if best is None or key < best:
                        best = key
        if best is None:
            return False
        layout.add(best[2], best[3])
    return layout.deficit(want)[0] <= 1e-9


def _shrink(layout: _Layout, want: Want) -> _Layout:
    """Gives up devices whose work the others can do, with some replicas put elsewhere; the emptiest first."""
    given_up = True
    while given_up:
        given_up = False
        kept: dict[tuple[tuple[int, ...], ...], None] = {}
        order = sorted(layout.used(), key=lambda device: (len(layout.on[device]), -layout.room(device), -device))
        for device in order:
            if (kind := _kind(layout, (device,))) in kept:
                continue
            kept[kind] = None
            tried = layout.copy()
            for model in list(tried.on[device]):
                place = next(place for place in tried.places[model] if device in place)
                tried.remove(model, place)
            if _grow(tried, want, frozenset((device,)), fresh=False) and len(tried.used()) < len(layout.used()):
                layout = tried
                given_up = True
                break
    # A replica that nobody needs only costs its standing part.
    for model in range(len(layout.models)):
        for place in sorted(layout.places[model], reverse=True):
            if len(layout.places[model]) < 2:
                break
            layout.remove(model, place)
            if layout.deficit(want)[0] > 1e-9:
                layout.add(model, place)
    return layout


def plan_steady(
    workload: Workload, demands: Sequence[Demand], steady: Sequence[int], window: Window, margins: Margins, devices: int
) -> list[Residency]:
    """Residencies of the steady models on the first ``devices`` devices, slice by slice."""
    if not steady:
        return []
    models = [workload.models[number] for number in steady]
    cells = round(margins.slice_s / GRID_S)
    slices = math.ceil(len(demands[steady[0]].work) / cells)

    def most(values: Floats) -> Floats:
        padded = np.concatenate((values, np.zeros(slices * cells - len(values))))
        return np.asarray(padded.reshape(slices, cells).max(axis=1), np.float64)

    loads = np.stack([most(demands[n].work) * margins.work[n] for n in steady])
    alive = np.stack([most(demands[n].alive.astype(np.float64)) > 0 for n in steady])
    loads = np.where(alive, np.maximum(loads, 1e-6), 0.0)
    kv = np.stack(
        [most(demands[n].kv_tokens) * KV_ROOM * model.kv_bytes_per_token for n, model in zip(steady, models, strict=True)]
    )
    ahead = max(1, round(margins.keep_s / margins.slice_s))
    keep_loads, keep_kv = loads.copy(), kv.copy()
    for step in range(1, ahead + 1):
        keep_loads[:, :-step] = np.maximum(keep_loads[:, :-step], loads[:, step:])
        keep_kv[:, :-step] = np.maximum(keep_kv[:, :-step], kv[:, step:])
    layout = _Layout(workload.pool, models, devices, [margins.calm[n] for n in steady])
    layouts: list[_Layout] = []
    for index in range(slices):
        layout = layout.copy()
        _grow(layout, Want(loads[:, index].tolist(), kv[:, index].tolist()))
        keep = Want(keep_loads[:, index].tolist(), keep_kv[:, index].tolist())
        for model in range(len(models)):
            if keep.work[model] <= 0:
                for place in list(layout.places[model]):
                    layout.remove(model, place)
        layout = _shrink(layout, keep)
        layouts.append(layout)
    wants = [Want(loads[:, index].tolist(), kv[:, index].tolist()) for index in range(slices)]
    return _residencies(workload, steady, layouts, wants, window.warmup_s, margins.slice_s)


def _residencies(
    workload: Workload,
    steady: Sequence[int],
    layouts: Sequence[_Layout],
    wants: Sequence[Want],
    start_s: float,
    slice_s: float,
) -> list[Residency]:
    """Runs of slices in which a replica is in the layout, with its part of the memory in each."""
    open_ones: dict[tuple[int, tuple[int, ...]], Residency] = {}
    found: list[Residency] = []
    for index, layout in enumerate(layouts):
        at_s = start_s + index * slice_s
        there = _kv_parts(layout, wants[index])
        found += [replace(open_ones.pop(key), end_s=at_s) for key in list(open_ones) if key not in there]
        for key, kv_bytes in there.items():
            known = open_ones.get(key)
            if known is None:
                open_ones[key] = Residency(steady[key[0]], key[1], at_s, math.inf, ((at_s, kv_bytes),))
            elif abs(known.kv[-1][1] - kv_bytes) > 0.1 * known.kv[-1][1]:
                open_ones[key] = replace(known, kv=(*known.kv, (at_s, kv_bytes)))
    found.extend(open_ones.values())
    return sorted(found, key=lambda one: (one.begin_s, one.model, one.devices))


def _kv_parts(layout: _Layout, want: Want) -> dict[tuple[int, tuple[int, ...]], int]:
    """KV of every replica over all its devices: the least, and of what is free there a part by the work it does."""
    parts = layout.split(want)
    needs = {key: part * want.kv[key[0]] / max(want.work[key[0]], 1e-9) / len(key[1]) + 1.0 for key, part in parts.items()}
    asked = dict.fromkeys(layout.used(), 0.0)
    for (_, place), need in needs.items():
        for device in place:
            asked[device] += need
    least = KV_PART_MIN * layout.pool.device_bytes
    found = {}
    for model, places in enumerate(layout.places):
        for place in places:
            need = needs.get((model, place), 1.0)
            part = min(max(0.0, layout.free_bytes(device)) * need / max(asked[device], need) for device in place)
            found[(model, place)] = int((part + least) * 0.998) * len(place)
    return found


# --------------------------------------------------------------------------------------------------------------- sparse


@dataclass(slots=True)
class _Shelf:
    """A device while residencies are packed on it, in order of their begin."""

    number: int
    held: list[tuple[float, float, float, int]] = field(default_factory=list)
    """(begin, end, bytes, model) of those that may still be there."""
    until_s: float = -math.inf
    loaded_s: float = -math.inf
    """When its last load is over: those on one device come one after the other."""


def plan_sparse(
    workload: Workload, trace: Trace, sparse: Sequence[int], margins: Margins, first_device: int, load_s: float
) -> list[Residency]:
    """Residencies of the sparse models on devices from ``first_device`` on: clusters of requests in order of arrival, each
    on the device whose time it lengthens least."""
    pool = workload.pool
    wanted: list[tuple[float, float, int, int]] = []
    for number in sparse:
        wanted += _clusters(workload.models[number], trace, number, margins, load_s)
    wanted.sort()
    shelves = [_Shelf(number) for number in range(first_device, pool.devices)]
    found: list[Residency] = []
    for begin_s, end_s, number, kv_bytes in wanted:
        model = workload.models[number]
        from_s = begin_s - load_s - NOTICE_S
        until_s = end_s + LEAVE_S
        each = (model.weights_bytes + kv_bytes) / model.gpus
        options: list[tuple[float, float, int]] = []
        for index, shelf in enumerate(shelves):
            shelf.held = [one for one in shelf.held if one[1] > from_s]
            taken = sum(one[2] for one in shelf.held)
            if shelf.loaded_s > from_s:
                continue
            crowded = len(shelf.held) >= pool.models_per_device_max or any(one[3] == number for one in shelf.held)
            if taken + each > pool.device_bytes * 0.998 or crowded:
                continue
            longer_s = until_s - max(from_s, shelf.until_s)
            options.append((max(0.0, longer_s), taken + each if longer_s > 0 else -(taken + each), index))
            if not shelf.held and shelf.until_s == -math.inf:
                break  # The others are as empty as this one.
        if model.gpus > 1 or not options:
            continue  # No workload has sparse models over several devices; the pool's rules wake what has no plan.
        _, _, chosen = min(options)
        shelf = shelves[chosen]
        shelf.held.append((from_s, until_s, each, number))
        shelf.until_s = max(shelf.until_s, until_s)
        shelf.loaded_s = from_s + load_s + NOTICE_S
        found.append(Residency(number, (shelf.number,), begin_s, end_s, ((begin_s, kv_bytes),), anywhere=True))
    return sorted(found, key=lambda one: (one.begin_s, one.model, one.devices))


def _clusters(
    model: SimModel, trace: Trace, number: int, margins: Margins, load_s: float
) -> list[tuple[float, float, int, int]]:
    """(begin, end, model, KV) of runs of requests between which it is not worth while to leave."""
    costs = model.costs
    mine = np.flatnonzero(trace.model == number)
    arrival_s = trace.arrival_s[mine]
    inputs = trace.input_tokens[mine].astype(np.float64)
    outputs = trace.output_tokens[mine].astype(np.float64)
    alone_s = costs.prefill_token_s * inputs + costs.prefill_token2_s * inputs**2
    alone_s += outputs * (costs.step_const_s + costs.step_request_s + costs.step_context_token_s * (inputs + outputs))
    found: list[tuple[float, float, int, int]] = []
    tokens: list[tuple[float, float]] = []
    begin_s = last_s = -math.inf
    most = 0.0
    lives_s = (SPARSE_SLOWER * margins.work[number] * alone_s).tolist()
    for at_s, life_s, held in zip(arrival_s.tolist(), lives_s, (inputs + outputs).tolist(), strict=True):
        if at_s > last_s + max(margins.sparse_gap_s, load_s):
            if last_s > -math.inf:
                found.append((begin_s, last_s, number, _kv_of(model, most)))
            begin_s, most, tokens = at_s + margins.sparse_late * model.ttft_s, 0.0, []
        until_s = max(at_s, begin_s) + life_s
        tokens = [(end, count) for end, count in tokens if end > at_s] + [(until_s, held)]
        most = max(most, sum(count for _, count in tokens))
        last_s = max(last_s, until_s)
    if last_s > -math.inf:
        found.append((begin_s, last_s, number, _kv_of(model, most)))
    return found


def _kv_of(model: SimModel, tokens: float) -> int:
    """KV for so many tokens at once, with room for lengths that the gateway overestimates."""
    return int(max(1.5 * tokens, 8192) * model.kv_bytes_per_token)
