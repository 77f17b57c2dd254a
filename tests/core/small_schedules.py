"""Optimal schedules of tiny workloads by exhaustive search, to hold the lower bound against.

Time goes in ticks of one second. All is allowed that the simulator allows, and more: a replica appears after its load time
wherever it fits, leaves at any tick, a step may be paused for that of a co-resident (which is at least as good as sharing a
device's time), requests move between replicas of their model for nothing, and whatever lies before the window or after its
end is free of charge. So the cost found is at most that of any real schedule: a bound above it is wrong.

``python -m tests.core.small_schedules`` tries every small case (about half an hour on two cores); the test takes a slice.
"""

from __future__ import annotations

import heapq
import itertools
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ops.simulator.bound import bound
from ops.simulator.types import LoadLadder, PoolSpec, SimModel, Trace, Window, Workload
from subjects.messages import StepCosts

DEVICES_MAX = 4


@dataclass(frozen=True)
class SmallModel:
    """Costs in whole ticks: a step takes ``const + each * decoding + prefill * prompt tokens``."""

    const: int = 1
    each: int = 0
    prefill: int = 0
    weights: int = 1
    gpus: int = 1
    kv_tokens: int = 100


@dataclass(frozen=True)
class SmallRequest:
    """``model`` is an index; ``arrival`` a tick."""

    model: int
    arrival: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class SmallCase:
    """``room`` is the memory of a device in units of weights; KV does not count against it (which only helps schedules)."""

    models: tuple[SmallModel, ...]
    requests: tuple[SmallRequest, ...]
    devices: int = DEVICES_MAX
    room: int = 2
    per_device: int = 2
    load: int = 2
    ttft: int = 4
    tpot: int = 2
    begin: int = 0
    end: int = 40
    share: float = 1.0


Step = tuple[int, tuple[int, ...]]
"""Ticks left, requests."""
Replica = tuple[int, tuple[int, ...], int, Step | None]
"""Model, devices, ticks of loading left, step."""
Progress = tuple[int, int]
"""Tokens made, tick by which the last must come (-1 before the first)."""
State = tuple[tuple[Replica, ...], tuple[Progress, ...]]


def optimum(case: SmallCase) -> int | None:
    """Least device-ticks in the window over all schedules in which enough requests meet their SLO; None if there is none."""
    failing: list[list[tuple[int, ...]]] = []
    for model in range(len(case.models)):
        mine = [i for i, request in enumerate(case.requests) if request.model == model]
        may_fail = int((1 - case.share) * len(mine) + 1e-9)
        failing.append(list(itertools.combinations(mine, may_fail)))
    best: int | None = None
    for chosen in itertools.product(*failing):
        left_out = {i for group in chosen for i in group}
        kept = tuple(request for i, request in enumerate(case.requests) if i not in left_out)
        found = _optimum(replace(case, requests=kept), best)
        if found is not None and (best is None or found < best):
            best = found
    return best


def _optimum(case: SmallCase, limit: int | None) -> int | None:
    """Dijkstra over states, a tick at a time; of equal costs the later tick first."""
    start: State = ((), tuple((0, -1) for _ in case.requests))
    order = itertools.count()
    queue: list[tuple[int, int, int, State]] = [(0, -case.begin, 0, start)]
    seen: set[tuple[int, State]] = set()
    while queue:
        cost, minus_tick, _, state = heapq.heappop(queue)
        tick = -minus_tick
        if all(made >= request.outputs for (made, _), request in zip(state[1], case.requests, strict=True)):
            return cost
        if tick == case.end:
            if _can_end(case, state):
                return cost
            continue
        if (tick, state) in seen:
            continue
        seen.add((tick, state))
        for held in _holdings(case, tick, state):
            price = len({device for _, devices, _, _ in held for device in devices})
            if limit is not None and cost + price >= limit:
                continue
            for replicas, progress in _ticks(case, tick, held, state[1]):
                after = (_canonical(case, replicas), progress)
                if (tick + 1, after) not in seen:
                    heapq.heappush(queue, (cost + price, minus_tick - 1, next(order), after))
    return None


def _can_end(case: SmallCase, state: State) -> bool:
    """Whether all can meet their SLO after the window's end, where each gets a loaded replica for itself at once."""
    left_of = {i: step[0] for _, _, _, step in state[0] if step is not None for i in step[1]}
    for i, ((made, latest), request) in enumerate(zip(state[1], case.requests, strict=True)):
        now = case.end
        while made < request.outputs:
            now = max(now, request.arrival)
            alone = _steps(case, request.model, [i], {i: (made, latest)})
            now += min([ticks for ticks, _ in alone] + ([left_of.pop(i)] if i in left_of else []))
            made += 1
            if made == 1:
                latest = now + case.tpot * (request.outputs - 1)
                if now > request.arrival + case.ttft:
                    return False
        if request.outputs > 1 and latest and now > latest:
            return False
    return True


def _holdings(case: SmallCase, tick: int, state: State) -> Iterator[tuple[Replica, ...]]:
    """What may be resident during the next tick: some leave, some loads begin.

    Left out is what cannot help: to leave a device that stays held though nothing begins there; to leave in the middle of a
    step or a load; more replicas of a model than it has open requests.
    """
    open_models = [r.model for (made, _), r in zip(state[1], case.requests, strict=True) if made < r.outputs]
    seen = set()
    replicas = [replica for replica in state[0] if replica[0] in open_models]
    for keep in itertools.product((True, False), repeat=len(replicas)):
        if any(not kept and (loading or step) for kept, (_, _, loading, step) in zip(keep, replicas, strict=True)):
            continue
        kept_replicas = tuple(replica for kept, replica in zip(keep, replicas, strict=True) if kept)
        left = [set(replica[1]) for kept, replica in zip(keep, replicas, strict=True) if not kept]
        for held in _with_loads(case, tick, kept_replicas, sorted(set(open_models)), open_models):
            there = {device for _, devices, _, _ in kept_replicas for device in devices}
            begun = {device for _, devices, _, _ in held[len(kept_replicas) :] for device in devices}
            if any(devices <= there - begun for devices in left):
                continue
            key = _canonical(case, held)
            if key not in seen:
                seen.add(key)
                yield key


def _with_loads(
    case: SmallCase, tick: int, replicas: tuple[Replica, ...], models: list[int], open_models: list[int]
) -> Iterator[tuple[Replica, ...]]:
    yield replicas
    loads = 0 if tick == case.begin else case.load  # What lies before the window was free.
    for index, model in enumerate(models):
        if sum(replica[0] == model for replica in replicas) >= open_models.count(model):
            continue
        tried = set()
        for devices in itertools.combinations(range(case.devices), case.models[model].gpus):
            signs = tuple(sorted(_sign(replicas, device) for device in devices))
            if signs not in tried and all(_fits(case, replicas, model, device) for device in devices):
                tried.add(signs)
                new: Replica = (model, devices, loads, None)
                yield from _with_loads(case, tick, (*replicas, new), models[index:], open_models)


def _sign(replicas: tuple[Replica, ...], device: int) -> tuple[tuple[int, int, int, Step], ...]:
    """What tells a device from others."""
    return tuple(
        sorted(
            (model, len(devices), loading, step or (0, ()))
            for model, devices, loading, step in replicas
            if device in devices
        )
    )


def _fits(case: SmallCase, replicas: tuple[Replica, ...], model: int, device: int) -> bool:
    there = [replica[0] for replica in replicas if device in replica[1]]
    weights = sum(case.models[other].weights for other in there) + case.models[model].weights
    return model not in there and len(there) < case.per_device and weights <= case.room


def _ticks(
    case: SmallCase, tick: int, replicas: tuple[Replica, ...], progress: tuple[Progress, ...]
) -> Iterator[tuple[tuple[Replica, ...], tuple[Progress, ...]]]:
    """Every way to use one tick: which replicas work, and on which batch those do that begin a step."""
    in_steps = {i for _, _, _, step in replicas if step is not None for i in step[1]}
    free = [
        i
        for i, (made, _) in enumerate(progress)
        if made < case.requests[i].outputs and case.requests[i].arrival <= tick and i not in in_steps
    ]

    def choose(
        index: int, busy: frozenset[int], taken: frozenset[int], done: tuple[Replica, ...], ended: tuple[int, ...]
    ) -> Iterator[tuple[tuple[Replica, ...], tuple[Progress, ...]]]:
        if index == len(replicas):
            after = _advance(case, tick, progress, ended)
            if after is not None:
                yield done, after
            return
        model, devices, loading, step = replicas[index]
        if loading:
            yield from choose(index + 1, busy, taken, (*done, (model, devices, loading - 1, None)), ended)
            return
        if (
            step is None
            or busy.intersection(devices)
            or any(set(later[1]).intersection(devices) for later in replicas[index + 1 :])
        ):
            # Idle; one in a step is paused only for somebody else on its devices.
            yield from choose(index + 1, busy, taken, (*done, replicas[index]), ended)
        if busy.intersection(devices):
            return
        begun = [step] if step is not None else _steps(case, model, [i for i in free if i not in taken], progress)
        for left, batch in begun:
            now = (model, devices, 0, (left - 1, batch) if left > 1 else None)
            finished = ended if left > 1 else (*ended, *batch)
            yield from choose(index + 1, busy.union(devices), taken.union(batch), (*done, now), finished)

    yield from choose(0, frozenset(), frozenset(), (), ())


def _steps(case: SmallCase, model: int, free: list[int], progress: Sequence[Progress] | dict[int, Progress]) -> list[Step]:
    kind = case.models[model]
    mine = [i for i in free if case.requests[i].model == model]
    found: list[Step] = []
    for size in range(1, len(mine) + 1):
        for batch in itertools.combinations(mine, size):
            contexts = [case.requests[i].inputs + progress[i][0] for i in batch]
            if sum(contexts) > kind.kv_tokens:
                continue
            ticks = kind.const
            for i, context in zip(batch, contexts, strict=True):
                # A token may come out of a second prefill where that is quicker.
                ticks += min(kind.each, kind.prefill * context) if progress[i][0] else kind.prefill * context
            if ticks > 0:
                found.append((ticks, batch))
    return found


def _advance(
    case: SmallCase, tick: int, progress: tuple[Progress, ...], ended: tuple[int, ...]
) -> tuple[Progress, ...] | None:
    """Progress at the end of the tick, or None when somebody has missed its SLO."""
    after = list(progress)
    for i in ended:
        made, latest = after[i]
        after[i] = (made + 1, latest if made else tick + 1 + case.tpot * (case.requests[i].outputs - 1))
    for (made, latest), request in zip(after, case.requests, strict=True):
        if made < request.outputs and tick + 1 >= (latest if made else request.arrival + case.ttft):
            return None
    for i in ended:
        made, latest = after[i]
        late = tick + 1 > (latest if made > 1 else case.requests[i].arrival + case.ttft)
        if late:
            return None
        if made == case.requests[i].outputs:
            after[i] = (made, 0)  # Complete: what was due when makes no difference any more.
    return tuple(after)


def _canonical(case: SmallCase, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
    """The same with devices named in a fixed order: equal devices are interchangeable."""
    order = sorted(range(case.devices), key=lambda device: (_sign(replicas, device), device), reverse=True)
    names = {device: name for name, device in enumerate(order)}
    renamed = [(m, tuple(sorted(names[d] for d in devices)), loading, step) for m, devices, loading, step in replicas]
    return tuple(sorted(renamed, key=lambda r: (r[0], r[1], r[2], r[3] or (0, ()))))


# ------------------------------------------------------------------------------------------------------- beside the bound


def bound_ticks(case: SmallCase) -> float:
    """What the bound says of the case, in device-ticks."""
    unit = math.lcm(*(kind.kv_tokens for kind in case.models))
    models = tuple(
        SimModel(
            name=f"m{index}",
            costs=StepCosts(
                prefill_token_s=kind.prefill, step_const_s=kind.const, step_request_s=kind.each, step_context_token_s=0.0
            ),
            weights_bytes=kind.weights * kind.gpus * unit,
            # So that just ``kv_tokens`` fit beside the weights.
            kv_bytes_per_token=max(1, (case.room - kind.weights) * kind.gpus * unit // kind.kv_tokens),
            gpus=kind.gpus,
            ttft_s=case.ttft,
            tpot_s=case.tpot,
        )
        for index, kind in enumerate(case.models)
    )
    requests = sorted(case.requests, key=lambda r: r.arrival)
    trace = Trace(
        np.asarray([r.arrival for r in requests], np.float64),
        np.asarray([r.model for r in requests], np.int16),
        np.asarray([r.inputs for r in requests], np.int32),
        np.asarray([r.outputs for r in requests], np.int32),
    )
    window = Window(case.begin, case.begin, case.end)
    workload = Workload(
        name="small",
        models=models,
        windows=(window,),
        trace=lambda seed, window: trace,
        pool=PoolSpec(devices=case.devices, device_bytes=case.room * unit, models_per_device_max=case.per_device),
        static_replicas={},
        ladder=LoadLadder(warm_s=case.load, cold_s=case.load),
    )
    return bound(workload, trace, window, case.share) * 3600


# ---------------------------------------------------------------------------------------------------------------- cases

KINDS = (
    SmallModel(),
    SmallModel(each=1),
    SmallModel(const=2, prefill=1),
    SmallModel(weights=2),
    SmallModel(gpus=2),
    SmallModel(each=1, prefill=1, kv_tokens=5),
)
"""Plain; batches badly; long steps; too large for company; on two devices; little KV."""
SHAPES = (
    ((0, 0, 2), (1, 0, 2), (2, 0, 2)),
    ((0, 0, 3), (1, 1, 1), (2, 2, 2)),
    ((0, 0, 2), (0, 2, 2), (1, 1, 2)),
    ((0, 0, 3), (0, 1, 3), (0, 4, 1)),
    ((0, 0, 1), (1, 3, 1), (0, 6, 1)),
    ((0, 0, 4), (1, 4, 2)),
    ((0, 0, 2), (0, 0, 2), (0, 0, 2)),
)
"""(model, arrival, output tokens) of each request."""
FRAMES = (
    {"begin": -4},
    {"begin": 0},
    {"begin": -4, "end": 4},
    {"begin": -4, "tpot": 1, "ttft": 3, "load": 1},
    {"begin": -4, "tpot": 4, "per_device": 1},
    {"begin": -4, "share": 0.5, "load": 3, "devices": 2},
)
"""All the cost of loads counted; loads before the window free; a cut; tight targets; slack ones; some may fail."""


def cases() -> Iterator[SmallCase]:
    """Every small case: up to three models and three requests on up to four devices."""
    for shape in SHAPES:
        count = 1 + max(model for model, _, _ in shape)
        alike = len({request[1:] for request in shape}) == 1 and count == len(shape)
        for kinds in (
            itertools.combinations_with_replacement(KINDS, count) if alike else itertools.product(KINDS, repeat=count)
        ):
            longer = any(kind.prefill for kind in kinds)
            for frame, inputs in itertools.product(FRAMES, (1, 2) if longer else (1,)):
                requests = tuple(SmallRequest(model, arrival, inputs, outputs) for model, arrival, outputs in shape)
                yield SmallCase(kinds, requests, **frame)  # type: ignore[arg-type]  # FRAMES holds its fields


def compare(case: SmallCase) -> tuple[int | None, float]:
    """The optimum and the bound of a case."""
    return optimum(case), bound_ticks(case)


def main() -> int:
    """Holds the bound against the optimum of every case, on all cores; 1 if it is above one."""
    tried = wrong = tight = 0
    every = list(cases())
    with multiprocessing.get_context("spawn").Pool() as pool:
        for case, (best, least) in zip(every, pool.imap(compare, every, chunksize=8), strict=True):
            if best is None:
                continue
            tried += 1
            tight += least >= best - 1e-6
            if least > best + 1e-6:
                wrong += 1
                print(f"bound {least:g} above the optimum {best}: {case}", flush=True)
    print(f"{len(every)} cases, {tried} feasible, bound met exactly in {tight}, wrong in {wrong}")
    return 1 if wrong or not tried else 0


if __name__ == "__main__":
    raise SystemExit(main())
