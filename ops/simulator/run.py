"""Runs a policy on a workload's window, and many such runs on several processes.

``run`` gives a :class:`Run`: the row of the table, lines over time, and what is needed to merge windows exactly. A policy
that loads from afar always (attribute ``cold_loads = True``) gets the ladder's cold time for each load.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from ops.simulator.control import Control
from ops.simulator.metrics import Measured, Meter, Series, measure, merge_measured, summarise
from ops.simulator.options import RunOptions
from ops.simulator.types import PolicyContext, PolicyFactory, Result, Window, Workload
from ops.simulator.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One window, or several merged ones (then ``series`` has each window's lines, in order)."""

    result: Result
    series: tuple[Series, ...]
    measured: Measured


def run(
    workload: Workload, policy_factory: PolicyFactory, seed: int, window: Window, *, options: RunOptions | None = None
) -> Run:
    """Simulates one window. The same arguments give the same digest on any machine."""
    options = options or RunOptions()
    trace = workload.trace(seed, window)
    policy = policy_factory(PolicyContext(workload=workload, window=window, trace=trace, seed=seed))
    world = World(workload, trace, seed, window.warmup_s, options)
    meter = Meter(workload, window, options.series_points_max, options.tick_s)
    control = Control(world, policy, meter)
    control.start()
    world.at(window.begin_s, lambda: meter.begin(world))
    world.run(window.end_s)
    meter.end(world)
    over_s = window.end_s
    while world.ended < len(trace) and over_s < window.end_s + options.tail_s_max:
        over_s += 1.0
        world.run(over_s)
    measured = measure(workload, policy.name, seed, window, trace, world, meter)
    return Run(result=summarise(measured), series=(meter.series,), measured=measured)


def merge(runs: Sequence[Run]) -> Run:
    """One over all windows of a workload, policy and seed, in the order given: counts add up, quantiles are exact."""
    measured = merge_measured([one.measured for one in runs])
    return Run(result=summarise(measured), series=tuple(s for one in runs for s in one.series), measured=measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run for another process: everything in it must be picklable, so functions of modules and partials of them."""

    make_workload: Callable[[], Workload]
    policy_factory: PolicyFactory
    seed: int
    window: int = 0
    """Which of the workload's windows."""
    options: RunOptions | None = None


def run_job(job: Job) -> Run:
    """Runs it here."""
    workload = job.make_workload()
    return run(workload, job.policy_factory, job.seed, workload.windows[job.window], options=job.options)


def run_many(jobs: Sequence[Job], processes: int) -> list[Run]:
    """Runs all on so many fresh processes; results are in the order of the jobs."""
    if processes <= 1 or len(jobs) <= 1:
        return [run_job(job) for job in jobs]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=context) as pool:
        return list(pool.map(run_job, jobs))
