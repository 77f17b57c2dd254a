"""One model alone on replicas of its own: what a static split gives it, without a scheduler.

The replicas, queue, pull rule and engines are the world's; only who decides is missing, because nothing is decided. Models
of a static split share no device, so each can be looked at alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ops.simulator.options import RunOptions
from ops.simulator.traces.columns import only as only
from ops.simulator.types import PoolSpec, SimModel, Trace, Window, Workload
from ops.simulator.world import World
from subjects.ids import ReplicaId

REFUSE_EVERY_S = 1.0


def within_slo(
    model: SimModel, trace: Trace, replicas: int, seed: int, start_s: float, *, options: RunOptions | None = None
) -> npt.NDArray[np.bool_]:
    """Which requests of ``trace`` (all of one model, from ``start_s`` on) meet the SLO with so many replicas."""
    options = options or RunOptions()
    gpus = model.gpus
    workload = Workload(
        name="dedicated",
        models=(model,),
        windows=(),
        trace=lambda _seed, _window: trace,
        pool=PoolSpec(devices=replicas * gpus),
        static_replicas={model.name: replicas},
    )
    alone = Trace(trace.arrival_s, np.zeros(len(trace), dtype=np.int16), trace.input_tokens, trace.output_tokens)
    world = World(workload, alone, seed, start_s, options)
    for number in range(replicas):
        places = list(range(number * gpus, (number + 1) * gpus))
        world.make_ready(world.spawn(ReplicaId(f"alone-{number}"), 0, places, model.kv_bytes_alone()))
    last_s = float(trace.arrival_s[-1]) if len(trace) else start_s
    at_s = start_s
    while at_s <= last_s or (world.ended < len(trace) and at_s < last_s + options.tail_s_max):
        at_s += REFUSE_EVERY_S
        world.run(at_s)
        world.look_after_queues()
    first_s, end_s = np.frombuffer(world.first_s), np.frombuffer(world.end_s)
    ttft_s = first_s - trace.arrival_s
    tpot_s = (end_s - first_s) / np.maximum(trace.output_tokens - 1, 1)
    met: npt.NDArray[np.bool_] = (end_s >= 0) & (ttft_s <= model.ttft_s) & (tpot_s <= model.tpot_s)
    return met


def attainment(workload: Workload, model: int, replicas: int, seed: int, windows: tuple[Window, ...] | None = None) -> float:
    """Share of a model's measured requests within SLO, over the workload's windows or others."""
    met = measured = 0
    for window in windows or workload.windows:
        trace = only(workload.trace(seed, window), model)
        inside = (trace.arrival_s >= window.begin_s) & (trace.arrival_s < window.end_s)
        met += int(within_slo(workload.models[model], trace, replicas, seed, window.warmup_s)[inside].sum())
        measured += int(inside.sum())
    return met / measured if measured else 1.0
