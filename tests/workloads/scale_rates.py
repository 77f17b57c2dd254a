"""Finds the constants in ``rates``: ``python -m tests.workloads.scale_rates five-lines|busy-few|check|static WORKLOAD``.

``five-lines`` and ``busy-few``: for each model the largest multiple of the source's rates at which the stated number of
dedicated replicas still meets the SLO for 99 % of the day's requests and of the headline's windows, times a :func:`margin`;
one replica fewer must miss it. The day is looked at in strata: its ``BUSY_CELLS`` ten-minute cells with the most work are
simulated, and of the others every ``QUIET_STEP``-th, which stands for its neighbours. Of a cell with many requests a part is
simulated, after as much warm-up (at most three minutes); neighbours that are simulated whole are simulated in one go.

``check`` runs stored constants over the whole day and the headline's windows with seeds that were not used to find them.
``static WORKLOAD`` finds the smallest dedicated split of another workload by the same rule over its own windows, and what
the 99th percentile of its minutes asks for.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ops.simulator import rates
from ops.simulator.models import sim_model, usable_share, work_s
from ops.simulator.options import RunOptions
from ops.simulator.traces import servegen
from ops.simulator.traces.columns import only
from ops.simulator.types import SimModel, Trace
from ops.simulator.workloads import HEADLINE_WINDOWS, INPUT_TOKENS_MAX, LINES, WARMUP_S, p99_minute, workload
from tests.workloads.dedicated import attainment, within_slo

GOAL = 0.99
SINGLE_MARGIN = 0.07
"""Taken off for one replica, less for more (:func:`margin`). Devices differ from their profiles by 5 % (standard deviation),
and a split is sized before anybody knows how: one replica in twelve is slower than its profile by more than this."""
SEEDS = (7_001, 7_002, 7_003, 7_004)
"""Used for nothing else. The day is long enough for the first one alone; an hour of windows depends on its bursts, and must
meet the SLO with each."""
CHECK_SEEDS = (7_101, 7_102)
CELL_S = servegen.CELL_S
CELLS = servegen.DAY_S // CELL_S
BUSY_CELLS = 36
QUIET_STEP = 9
CELL_REQUESTS = 3_000
"""So many requests of a cell are measured, ..."""
PART_S_MIN = 30.0
"""... or so many seconds, if that is more."""
CLOSE = 1.03
"""The search ends when what is known to do and what is known to fail are this close."""

PLANNED: dict[str, dict[str, int]] = {
    "five-lines": {"m-small": 1, "m-mid": 2, "mm-image": 2, "deepseek-r1": 3, "m-large": 1},
    "busy-few": {"m-small": 2, "m-mid": 14, "deepseek-r1": 6, "m-large": 6},
}
"""Replicas that the rates are scaled to."""


def margin(replicas: int) -> float:
    """What is stored is the largest scale times this: errors of several devices partly cancel."""
    return 1.0 - SINGLE_MARGIN / math.sqrt(replicas)


class Day:
    """One ServeGen model's first day, served by replicas of one of our models."""

    def __init__(self, source: servegen.ServeGenModel, model: SimModel, seed: int = SEEDS[0]) -> None:
        self.source = source
        self.model = model
        self.seed = seed

    def trace(self, scale: float, begin_s: float, end_s: float) -> Trace:
        """Requests of a part of it."""
        return self.source.sample(self.seed, begin_s, end_s, scale=scale, input_tokens_max=INPUT_TOKENS_MAX)

    def strata(self, scale: float) -> tuple[list[int], list[int]]:
        """The busy cells, and those that stand for the others."""
        whole = self.trace(scale, 0, servegen.DAY_S)
        cell = (whole.arrival_s // CELL_S).astype(np.int64)
        work = np.bincount(cell, weights=work_s(self.model, whole), minlength=CELLS)
        order = [int(one) for one in np.argsort(-work, kind="stable")]
        return sorted(order[:BUSY_CELLS]), sorted(order[BUSY_CELLS::QUIET_STEP])

    def attainment(self, scale: float, replicas: int, options: RunOptions | None = None) -> float:
        """Estimated share of the day's requests within SLO."""
        busy, quiet = self.strata(scale)
        weight = (CELLS - len(busy)) / len(quiet)
        rps = self.source.total_rps(CELLS) * scale
        met = missed = 0.0
        for first, last in _runs(sorted(busy + quiet), whole=float(rps.max()) * CELL_S <= CELL_REQUESTS):
            part_s = min(CELL_S, max(PART_S_MIN, CELL_REQUESTS / float(rps[first]))) if first == last else CELL_S
            begin_s, end_s = first * CELL_S, last * CELL_S + part_s
            start_s = max(0.0, begin_s - min(WARMUP_S, part_s))
            trace = self.trace(scale, start_s, end_s)
            good = within_slo(self.model, trace, replicas, self.seed, start_s, options=options)
            cell = (trace.arrival_s // CELL_S).astype(np.int64)
            counts = np.where(np.isin(cell, quiet), weight, 1.0) * (CELL_S / part_s) * (trace.arrival_s >= begin_s)
            met += float(counts[good].sum())
            missed += float(counts[~good].sum())
        return met / (met + missed)

    def headline_attainment(self, scale: float, replicas: int, options: RunOptions | None = None) -> float:
        """Share of the requests of the headline's windows within SLO."""
        met = measured = 0
        for window in HEADLINE_WINDOWS:
            trace = self.trace(scale, window.warmup_s, window.end_s)
            inside = trace.arrival_s >= window.begin_s
            good = within_slo(self.model, trace, replicas, self.seed, window.warmup_s, options=options)
            met += int(good[inside].sum())
            measured += int(inside.sum())
        return met / measured

    def meets(self, scale: float, replicas: int, options: RunOptions) -> bool:
        """Whether so many replicas carry the day and, with every seed, the headline's windows."""
        if self.attainment(scale, replicas, options) < GOAL:
            return False
        others = (Day(self.source, self.model, seed) for seed in SEEDS)
        return all(other.headline_attainment(scale, replicas, options) >= GOAL for other in others)

    def whole_attainment(self, scale: float, replicas: int, options: RunOptions | None = None) -> float:
        """The same from the whole day."""
        trace = self.trace(scale, 0, servegen.DAY_S)
        return float(within_slo(self.model, trace, replicas, self.seed, 0.0, options=options)[_after_warmup(trace)].mean())

    def first_guess(self, replicas: int) -> float:
        """The scale at which the 99th percentile of the cells fills the replicas by a fluid reckoning."""
        scale = 1.0 / float(self.source.total_rps(CELLS).mean())
        whole = self.trace(scale * 4, 0, servegen.DAY_S)
        cell = (whole.arrival_s // CELL_S).astype(np.int64)
        work = np.bincount(cell, weights=work_s(self.model, whole), minlength=CELLS) / CELL_S
        return 4 * scale * replicas * usable_share(self.model) / float(np.quantile(work, 0.95))

    def largest_scale(self, replicas: int, options: RunOptions) -> float:
        """By bisection, from a bracket around the guess."""
        low = high = self.first_guess(replicas)
        while self.meets(high, replicas, options):
            low, high = high, high * 1.25
        while low == high or not self.meets(low, replicas, options):
            low, high = low / 1.25, low
        while high / low > CLOSE:
            middle = float(np.sqrt(low * high))
            if self.meets(middle, replicas, options):
                low = middle
            else:
                high = middle
        return low


def _runs(cells: Sequence[int], *, whole: bool) -> list[tuple[int, int]]:
    """Neighbouring cells as (first, last) if they are simulated whole, else each alone."""
    found: list[tuple[int, int]] = []
    for cell in cells:
        if whole and found and found[-1][1] == cell - 1:
            found[-1] = (found[-1][0], cell)
        else:
            found.append((cell, cell))
    return found


def _after_warmup(trace: Trace) -> npt.NDArray[np.bool_]:
    later: npt.NDArray[np.bool_] = trace.arrival_s >= WARMUP_S
    return later


def scale(name: str, only_lines: Sequence[str]) -> None:
    """Prints the constants of a workload, a line per model."""
    exact = RunOptions(error_sigma=0.0)
    sources = servegen.packaged()
    for line, size in LINES[name].items():
        if only_lines and line not in only_lines:
            continue
        began_s = time.monotonic()
        replicas = PLANNED[name][line]
        day = Day(sources[line], sim_model(size, line))
        largest = day.largest_scale(replicas, exact)
        stored = float(f"{largest * margin(replicas):.3g}")
        fewer = [ask(stored, replicas - 1, exact) for ask in (day.attainment, day.headline_attainment) if replicas > 1]
        rps = stored * float(sources[line].total_rps(CELLS).mean())
        print(
            f"{name} {line} {size}: {replicas} replicas, largest {largest:.4g}, stored {stored:.3g} ({rps:.2f} requests/s), "
            f"with one fewer (day, headline) {[round(share, 3) for share in fewer]}; {time.monotonic() - began_s:.0f} s",
            flush=True,
        )


def check(name: str, only_lines: Sequence[str], whole: bool) -> None:
    """Prints attainment with the stored constants: over the headline's windows, and over the day (in strata or whole)."""
    sources = servegen.packaged()
    asked = workload(name)
    for number, (line, size) in enumerate(LINES[name].items()):
        if only_lines and line not in only_lines:
            continue
        for seed in CHECK_SEEDS:
            day = Day(sources[line], sim_model(size, line), seed)
            stored, replicas = rates.SCALES[name][line], rates.STATIC[name][line]
            over_day = day.whole_attainment if whole else day.attainment
            for count in (replicas, replicas - 1):
                if count:
                    print(
                        f"{name} {line} seed {seed}: {count} replicas: day {over_day(stored, count):.4f}, "
                        f"headline {attainment(asked, number, count, seed):.4f}",
                        flush=True,
                    )


def static(name: str, seeds: Sequence[int] = CHECK_SEEDS) -> None:
    """Prints the smallest split by the SLO (with every seed) and by the 99th percentile of the minutes."""
    asked = workload(name)
    by_slo: dict[str, int] = {}
    by_minute: dict[str, int] = {}
    for number, model in enumerate(asked.models):
        window = asked.windows[0]
        by_minute[model.name] = p99_minute(model, only(asked.trace(seeds[0], window), number), window)
        replicas = max(1, by_minute[model.name] // 2)
        while min(attainment(asked, number, replicas, seed) for seed in seeds) < GOAL:
            replicas += 1
        while replicas > 1 and min(attainment(asked, number, replicas - 1, seed) for seed in seeds) >= GOAL:
            replicas -= 1
        by_slo[model.name] = replicas
    gpus = {model.name: model.gpus for model in asked.models}
    for label, split in (("SLO", by_slo), ("p99 minute", by_minute)):
        print(f"{name} by {label}: {sum(gpus[key] * count for key, count in split.items())} GPUs, {split}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*LINES, "check", "static"])
    parser.add_argument("names", nargs="*", help="models to look at, or for check and static the workload (then models)")
    parser.add_argument("--whole", action="store_true", help="check: simulate the whole day instead of strata")
    chosen = parser.parse_args()
    if chosen.what == "check":
        check(chosen.names[0], chosen.names[1:], chosen.whole)
    elif chosen.what == "static":
        static(chosen.names[0])
    else:
        scale(chosen.what, chosen.names)


if __name__ == "__main__":
    main()
