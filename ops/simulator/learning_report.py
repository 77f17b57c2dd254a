"""What learning which device suits a model changes: ``carpool simulate --scenario learning`` (SCH-10).

One model on devices of one kind that are not alike: each is slower or faster than its profile by a factor drawn from the
seed. Replicas take requests by load over routing weight, as everywhere. With learning, finished requests teach
``DeviceScores`` (time taken over what the profile says for that batch). After each period of five minutes the routing
weights follow its factors, and the replica on the worst device moves to a free one that is expected to be better. Without
learning nothing is ever changed. Both see the same requests and the same devices.

The figure is the variance over time of the p95, per minute, of the time per token that clients see, from the second period
on.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from broker.core.plan.learning import DeviceScores
from broker.core.plan.tunables import PERIOD_S
from broker.core.pool.catalogue import DeviceKey
from ops.simulator.metrics import quantile
from ops.simulator.models import sim_model
from ops.simulator.options import RunOptions
from ops.simulator.queueing import Live
from ops.simulator.replicas import SimReplica
from ops.simulator.scenario import Figures, Say, capacity_rps, steady_workload
from ops.simulator.types import LoadLadder, Trace, Window, Workload
from ops.simulator.workloads import Steady
from ops.simulator.world import World
from profiles.costs import prefill_s, step_s
from subjects.ids import DeviceId, ReplicaId, WorkerId

DEVICES, REPLICAS = 8, 6
SIGMA = 0.25
"""Of the factors' logarithms: one device in six is more than 28 % slower than its profile."""
LOAD = 0.75
SECONDS = 3_600.0
INPUTS, OUTPUTS = (100, 900), (200, 600)
LOOK_S = 5.0
MOVE_GAIN = 1.1
"""A replica moves for a device that is expected to be this much better."""
WARM_S = 3.0
SEEDS = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run."""

    variance: float
    """Of the p95 per minute, in seconds squared."""
    p95_s: float
    """Over all measured requests."""
    within_slo: float
    moves: int


class _Taught(World):
    """Tells the scores of what finished."""

    def __init__(self, workload: Workload, trace: Trace, seed: int, scores: DeviceScores | None) -> None:
        super().__init__(workload, trace, seed, 0.0, RunOptions(error_sigma=SIGMA))
        self.scores = scores

    def _finish(self, replica: SimReplica, live: Live) -> None:
        batch = replica.held
        super()._finish(replica, live)
        steps = live.output_tokens - 1
        if self.scores is None or steps < 1:
            return
        costs = self.models[live.model].costs
        context = live.input_tokens + live.output_tokens / 2
        each_s = step_s(costs, batch, batch * context)
        # Others' prompts are prefilled meanwhile: about one per answer, as many as finish.
        predicted_s = steps * each_s + batch * prefill_s(costs, live.input_tokens)
        self.scores.observe(self.deployments[live.model], device_key(replica), predicted_s, self.now_s - live.first_s)


def device_key(replica: SimReplica) -> DeviceKey:
    """Its first device, as the scheduler names it."""
    return (WorkerId("node-000"), DeviceId(f"gpu{replica.devices[0].number}"))


def pool(load: float, seconds: float) -> Workload:
    """One 14B model with waves of load."""
    model = sim_model("14B", "shared")
    rps = load * REPLICAS * capacity_rps(model, INPUTS, OUTPUTS, batch=64)
    waves = tuple(
        (begin_s, rps * (0.85 if place % 2 else 1.15))
        for place, begin_s in enumerate(np.arange(0.0, seconds, 300.0).tolist())
    )
    line = Steady(model, waves, INPUTS, OUTPUTS)
    return steady_workload("learning", (line,), Window(0.0, 0.0, seconds), DEVICES, {"shared": REPLICAS}, LoadLadder())


def run_pool(seed: int, *, learns: bool, load: float = LOAD, seconds: float = SECONDS) -> Outcome:
    """One run, from the second period on."""
    workload = pool(load, seconds)
    trace = workload.trace(seed, workload.windows[0])
    scores = DeviceScores() if learns else None
    world = _Taught(workload, trace, seed, scores)
    world.when_drained = world.end
    kv_bytes = workload.models[0].kv_bytes_alone()
    for number in range(REPLICAS):
        world.make_ready(world.spawn(ReplicaId(f"r{number}"), 0, [number], kv_bytes))
    moves = 0
    learned_s = 0.0
    for now_s in np.arange(LOOK_S, seconds + LOOK_S, LOOK_S).tolist():
        world.run(now_s)
        world.look_after_queues()
        if scores is None:
            continue
        scores.look(now_s)
        if scores.learned and now_s - learned_s >= PERIOD_S:
            learned_s = now_s
            moves += _follow(world, scores, kv_bytes, f"m{moves}")
    return _outcome(workload, trace, world, moves)


def _follow(world: _Taught, scores: DeviceScores, kv_bytes: int, name: str) -> int:
    """Routing weights by what was learned; the replica on the worst device moves where a better one is free."""
    serving = {str(replica.replica): device_key(replica) for replica in world.serving[0]}
    for replica, weight in scores.routing_weights(world.deployments[0], serving).items():
        world.set_weight(world.replicas[ReplicaId(replica)], weight)
    free = [device.number for device in world.devices if not device.holds]
    every = {(WorkerId("node-000"), DeviceId(f"gpu{number}")): number for number in range(len(world.devices))}
    factors = {number: scores.factor(world.deployments[0], key) for key, number in every.items()}
    worst = max(world.serving[0], key=lambda replica: (factors[replica.devices[0].number], replica.number))
    best = min(free, key=lambda number: (factors[number], number), default=None)
    if best is None or factors[worst.devices[0].number] < MOVE_GAIN * factors[best]:
        return 0
    fresh = world.spawn(ReplicaId(name), 0, [best], kv_bytes)

    def ready() -> None:
        world.make_ready(fresh)
        world.drain(worst, 30.0)

    world.at(world.now_s + WARM_S, ready)
    return 1


def _outcome(workload: Workload, trace: Trace, world: World, moves: int) -> Outcome:
    first, end = np.array(world.first_s), np.array(world.end_s)
    model = workload.models[0]
    measured = (trace.arrival_s >= 2 * PERIOD_S) & (trace.arrival_s < workload.windows[0].end_s - 120.0)
    done = measured & (end >= 0.0)
    tpot: npt.NDArray[np.float64] = (end - first) / np.maximum(1, trace.output_tokens - 1)
    minute = (trace.arrival_s // 60.0).astype(np.int64)
    p95 = [quantile(tpot[done & (minute == place)], 0.95) for place in np.unique(minute[done])]
    good = done & (first - trace.arrival_s <= model.ttft_s) & (tpot <= model.tpot_s)
    return Outcome(
        variance=float(np.var(p95)),
        p95_s=float(quantile(tpot[done], 0.95)),
        within_slo=float(good.sum() / measured.sum()),
        moves=moves,
    )


def report(seed: int, processes: int, say: Say) -> Figures:
    """Variance over time of p95 with and without learned scores of devices, over ``SEEDS`` pools."""
    say("pools of unlike devices, an hour each, with learning and without")
    pairs = [[run_pool(seed + number, learns=learns) for learns in (False, True)] for number in range(SEEDS)]
    without, learned = ([pair[place] for pair in pairs] for place in (0, 1))
    figures: Figures = {}
    for name, outcomes in (("without", without), ("with", learned)):
        figures[f"variance_{name}"] = statistics.fmean(one.variance for one in outcomes)
        figures[f"p95_s_{name}"] = round(statistics.fmean(one.p95_s for one in outcomes), 6)
        figures[f"within_slo_{name}"] = round(statistics.fmean(one.within_slo for one in outcomes), 6)
    both = [statistics.fmean(one.variance for one in outcomes) for outcomes in (without, learned)]
    return figures | {"change": round(both[1] / both[0] - 1.0, 4), "moves": sum(one.moves for one in learned)}
