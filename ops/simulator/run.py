"""Runs a policy on a workload's window, and merges windows.

``run`` gives a :class:`Run`: the row of the table, lines over time, and what is needed to merge windows exactly. A policy
that loads from afar always (attribute ``cold_loads = True``) gets the ladder's cold time for each load.
"""

from __future__ import annotations

from collections.abc import Sequence
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
