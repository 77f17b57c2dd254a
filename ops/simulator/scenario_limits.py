"""Scenarios that look for how far something goes: the largest load of a pool, the speed of decisions in a large one."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field, replace

from broker.core.plan.policy import Decision, Policy, PoolView
from broker.core.pool.events import SchedulerCommand, SchedulerEvent
from ops.simulator.cases import Case
from ops.simulator.control import Control
from ops.simulator.metrics import Meter
from ops.simulator.options import RunOptions
from ops.simulator.scenario import Figures, Say
from ops.simulator.suite import SLO_SHARE, plan, run_suite
from ops.simulator.types import PolicyContext, Window, Workload
from ops.simulator.workloads import workload
from ops.simulator.world import World

FACTOR_FIRST = 1.0
FACTOR_MIN, FACTOR_MAX = 0.05, 4.0
FACTOR_STEPS = 6
LIMIT_GPUS = 8


def load_factor(seed: int, processes: int, say: Say) -> Figures:
    """Largest load of five-lines on 8 GPUs with every model at 99 %, by halving; ours, and dedicated GPUs."""
    figures: Figures = {}
    for policy in ("carpool", "static"):
        low, high = largest_load(policy, seed, processes, say)
        figures |= {f"{policy}_load_factor": round(low, 3), f"{policy}_fails_at": round(high, 3)}
    return figures


def largest_load(
    policy: str,
    seed: int,
    processes: int,
    say: Say,
    *,
    name: str = "five-lines",
    gpus: int = LIMIT_GPUS,
    minutes: float = 0.0,
) -> tuple[float, float]:
    """A load factor that every model bears, and one that is too much, after some halvings of what lies between (in ratio).

    The first is 0 where even the smallest load tried is too much; both are the largest tried where nothing was.
    """

    def bears(factor: float) -> bool:
        case = Case(workload=name, gpus=gpus, load=round(factor, 4), minutes=minutes)
        row = run_suite(plan([case], [policy], seed, ablations=False, plots=False), processes=processes).rows[0]
        worst = row.result.slo_worst_model if row.result else 0.0
        say(f"{policy} on {gpus} GPUs, load x{factor:.3f}: worst model {worst:.2%}{' ' + row.error if row.error else ''}")
        return worst >= SLO_SHARE

    low, high = 0.0, FACTOR_MAX
    factor = FACTOR_FIRST
    for _ in range(FACTOR_STEPS):
        if bears(factor):
            low = factor
        else:
            high = factor
        if low == 0.0:
            factor = max(FACTOR_MIN, high / 3)
            if high <= FACTOR_MIN:
                break
        elif high == FACTOR_MAX:
            factor = min(FACTOR_MAX, low * 1.5)
        else:
            factor = (low * high) ** 0.5
    return low, high


# ---------------------------------------------------------------------------------------------------------------- scale

TICK_MS_MAX = 100.0


@dataclass(slots=True)
class Clocked:
    """How long decisions took, in seconds of this process's own time."""

    decide_s: list[float] = field(default_factory=list)
    """The policy alone."""
    tick_s: list[float] = field(default_factory=list)
    """Steps of the scheduler's core in which the policy was asked, with all that follows: view, policy, checks, commands."""


class _ClockedPolicy:
    """A policy, and how long it takes."""

    def __init__(self, policy: Policy, clocked: Clocked) -> None:
        self._policy = policy
        self._clocked = clocked
        self.name = policy.name

    def decide(self, now_s: float, view: PoolView) -> Decision:
        begun_s = time.process_time()
        decision = self._policy.decide(now_s, view)
        self._clocked.decide_s.append(time.process_time() - begun_s)
        return decision


def clocked_run(made: Workload, policy: Policy, seed: int, window: Window) -> tuple[Clocked, World]:
    """Runs a window with clocks on its decisions.

    The world's objects, millions that a scheduler does not have, are kept out of the garbage collector's sight, else its
    pauses would be counted as decisions. Collections are therefore not in the figures, those of a real scheduler neither.
    """
    clocked = Clocked()
    options = RunOptions()
    trace = made.trace(seed, window)
    world = World(made, trace, seed, window.warmup_s, options)
    meter = Meter(made, window, options.series_points_max, options.tick_s)
    control = Control(world, _ClockedPolicy(policy, clocked), meter)
    step = control.core.step

    def timed(now_s: float, event: SchedulerEvent) -> list[SchedulerCommand]:
        decided = len(clocked.decide_s)
        gc.freeze()
        begun_s = time.process_time()
        commands = step(now_s, event)
        if len(clocked.decide_s) > decided:
            clocked.tick_s.append(time.process_time() - begun_s)
        return commands

    control.core.step = timed  # type: ignore[method-assign]
    control.start()
    try:
        world.run(window.end_s)
    finally:
        gc.unfreeze()
    return clocked, world


def scale(seed: int, processes: int, say: Say, *, seconds: float = 300.0) -> Figures:
    """200 models on 1,000 GPUs, five simulated minutes: time of a decision on one core, in milliseconds."""
    from ops.simulator.policies import POLICIES

    made = workload("scale")
    window = replace(made.windows[0], end_s=min(made.windows[0].end_s, seconds))
    policy = POLICIES["carpool"](PolicyContext(workload=made, window=window, trace=made.trace(seed, window), seed=seed))
    say(f"{len(made.models)} models on {made.pool.devices} GPUs, {seconds:g} simulated seconds")
    begun_s = time.process_time()
    clocked, world = clocked_run(made, policy, seed, window)
    measured = clocked.tick_s
    return {
        "models": len(made.models),
        "gpus": made.pool.devices,
        "requests": len(world.arrival_s),
        "decisions": len(clocked.decide_s),
        "tick_p50_ms": _quantile_ms(measured, 0.5),
        "tick_p99_ms": _quantile_ms(measured, 0.99),
        "tick_max_ms": _quantile_ms(measured, 1.0),
        "decide_p50_ms": _quantile_ms(clocked.decide_s, 0.5),
        "decide_p99_ms": _quantile_ms(clocked.decide_s, 0.99),
        "goal_ms": TICK_MS_MAX,
        "ok": _quantile_ms(measured, 0.99) <= TICK_MS_MAX,
        "cpu_s": round(time.process_time() - begun_s, 1),
    }


def _quantile_ms(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else 0.0
