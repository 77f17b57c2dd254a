"""What scenarios share: runs of workloads that a function makes, on several processes, and figures of parts of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ops.simulator.metrics import Series, quantile
from ops.simulator.options import RunOptions
from ops.simulator.run import Run, run
from ops.simulator.suite import executor, process_count
from ops.simulator.traces.columns import merge
from ops.simulator.types import SLOTS_MAX, LoadLadder, PoolSpec, SimModel, Trace, Window, Workload
from ops.simulator.workloads import Steady
from profiles.costs import prefill_s, step_s
from subjects.errors import ConfigError

Say = Callable[[str], None]
Figure = float | int | str | bool | None
Figures = dict[str, Figure]
Mask = npt.NDArray[np.bool_]
FINE = RunOptions(series_points_max=20_000)
"""Lines over time with an entry per tick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One run of a scenario. ``workload`` and its ``arguments`` are picklable, so that another process can make it."""

    workload: Callable[..., Workload]
    policy: str
    seed: int
    arguments: tuple[object, ...] = ()
    options: RunOptions = FINE


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run over one window, with what is needed to look at parts of it."""

    workload_models: tuple[str, ...]
    run: Run
    arrival_s: npt.NDArray[np.float64]
    """Of the measured requests, in their order."""

    @property
    def series(self) -> Series:
        """Lines over time."""
        return self.run.series[0]

    @property
    def completion_s(self) -> npt.NDArray[np.float64]:
        """From arrival to the last token."""
        measured = self.run.measured
        total: npt.NDArray[np.float64] = measured.ttft_s + measured.tpot_s * np.maximum(measured.output_tokens - 1, 0)
        return total

    def among(self, model: str | None = None, begin_s: float = 0.0, end_s: float = float("inf")) -> Mask:
        """Which requests are of a model and arrived in ``[begin_s, end_s)``."""
        mine: Mask = (self.arrival_s >= begin_s) & (self.arrival_s < end_s)
        if model is not None:
            mine &= self.run.measured.model == self.workload_models.index(model)
        return mine

    def within_slo(self, mine: Mask) -> float:
        """Share of those requests; 1 of none."""
        if not mine.any():
            return 1.0
        measured = self.run.measured
        ttft_s = np.array([model.ttft_s for model in measured.models])[measured.model]
        tpot_s = np.array([model.tpot_s for model in measured.models])[measured.model]
        good = (measured.ttft_s <= ttft_s) & (measured.tpot_s <= tpot_s)
        return float(good[mine].mean())

    def ttft(self, mine: Mask, share: float) -> float | None:
        """Quantile of the time to the first token; None where it was never answered, or nobody asked."""
        return _finite(quantile(self.run.measured.ttft_s[mine], share)) if mine.any() else None

    def completion(self, mine: Mask, share: float) -> float | None:
        """Quantile of the time to the last token."""
        return _finite(quantile(self.completion_s[mine], share)) if mine.any() else None

    def replicas_grow_s(self, model: str, after_s: float) -> float | None:
        """From ``after_s`` to the first sample with more ready replicas of a model than then; None: never."""
        number = self.workload_models.index(model)
        series = self.series
        before = 0
        for at_s, ready in zip(series.time_s, series.ready, strict=True):
            if at_s <= after_s:
                before = ready[number]
            elif ready[number] > before:
                return round(at_s - after_s, 3)
        return None

    def queue_over_s(self, model: str, after_s: float) -> float | None:
        """From ``after_s`` to the last sample in which requests of a model waited for a replica."""
        number = self.workload_models.index(model)
        waited = [
            at_s for at_s, waiting in zip(self.series.time_s, self.series.waiting, strict=True)
            if at_s > after_s and waiting[number]
        ]  # fmt: skip
        return round(waited[-1] - after_s, 3) if waited else None


def _finite(value: float) -> float | None:
    return round(value, 6) if value != float("inf") else None


def run_part(part: Part) -> Outcome:
    """Runs it here, over its workload's first window."""
    from ops.simulator.policies import POLICIES

    if part.policy not in POLICIES:
        raise ConfigError(f"no policy {part.policy!r}; there are {', '.join(POLICIES)}")
    workload = part.workload(*part.arguments)
    # Drawn once: it is needed again below.
    workload = replace(workload, trace=functools.lru_cache(maxsize=1)(workload.trace))
    window = workload.windows[0]
    done = run(workload, POLICIES[part.policy], part.seed, window, options=part.options)
    arrival_s = workload.trace(part.seed, window).arrival_s
    inside = (arrival_s >= window.begin_s) & (arrival_s < window.end_s)
    return Outcome(tuple(model.name for model in workload.models), done, arrival_s[inside])


def run_parts(parts: Sequence[Part], processes: int) -> list[Outcome]:
    """Runs all, in the order given, on so many processes (0: one per core)."""
    processes = process_count(processes, len(parts))
    if processes == 1:
        return [run_part(part) for part in parts]
    with executor(processes) as workers:
        return list(workers.map(run_part, parts))


def steady_workload(
    name: str, lines: Sequence[Steady], window: Window, devices: int, static: Mapping[str, int], ladder: LoadLadder
) -> Workload:
    """Models whose rates are piecewise constant, on a pool."""

    def trace(seed: int, asked: Window) -> Trace:
        drawn = [line.trace(n, seed, asked.warmup_s, asked.end_s, 1.0) for n, line in enumerate(lines)]
        return merge(drawn)

    return Workload(
        name=name,
        models=tuple(line.model for line in lines),
        windows=(window,),
        trace=trace,
        pool=PoolSpec(devices=devices),
        static_replicas=dict(static),
        ladder=ladder,
    )


def capacity_rps(
    model: SimModel, input_tokens: tuple[int, int], output_tokens: tuple[int, int], batch: int = SLOTS_MAX
) -> float:
    """About how many requests of these sizes (uniform between the two) a replica carries per second when it decodes
    ``batch`` of them at once: what scenarios choose their loads by."""
    inputs, outputs = sum(input_tokens) / 2, sum(output_tokens) / 2
    per_token_s = step_s(model.costs, batch, batch * (inputs + outputs / 2)) / batch
    return 1.0 / (prefill_s(model.costs, round(inputs)) + outputs * per_token_s)
