"""What ``carpool simulate`` is asked to do, as plain values that cross a process boundary and can be checked at once."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from ops.simulator.types import Workload
from subjects.errors import ConfigError

SUITES = ("headline", "full")
HEADLINE_WORKLOADS = ("five-lines", "busy-few", "long-tail", "burst")
WARM_SWEEP_S = (0.3, 3.0, 30.0, 120.0)
GPUS_MAX = 10_000
LOAD_MAX = 1_000.0
SECONDS_MAX = 86_400.0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A workload and what was changed in it. Processes get this and build the workload themselves."""

    workload: str
    suite: str = "headline"
    """``headline`` takes windows of the day-long workloads, ``full`` whole days."""
    load: float = 1.0
    """Times the workload's own rate: copies of its requests with their arrivals moved (below 1: a random part of them)."""
    gpus: int = 0
    """Another size of pool; 0 is the workload's own."""
    warm_s: float | None = None
    cold_s: float | None = None
    trace: str = ""
    """File of a recording; then ``workload`` is only its label."""
    minutes: float = 0.0
    """Only this much of each window (to try something); 0 is all of it."""

    @property
    def label(self) -> str:
        """Key of its rows: the workload's name, and what differs from the workload as it is fixed."""
        changed = [
            *([f"load={self.load:g}"] if self.load != 1.0 else []),
            *([f"gpus={self.gpus}"] if self.gpus else []),
            *([f"warm={self.warm_s:g}s"] if self.warm_s is not None else []),
            *([f"cold={self.cold_s:g}s"] if self.cold_s is not None else []),
            *([f"minutes={self.minutes:g}"] if self.minutes else []),
        ]
        return self.workload + (f"@{','.join(changed)}" if changed else "")


def check(case: Case) -> Case:
    """``case`` itself.

    Raises:
        ConfigError: a value that no simulation can have; names the flag and what to give instead.
    """
    if case.suite not in SUITES:
        raise ConfigError(f"--suite {case.suite}: no such suite; use one of {', '.join(SUITES)}")
    if not (math.isfinite(case.load) and 0 < case.load <= LOAD_MAX):
        raise ConfigError(f"--load {case.load:g}: give a factor above 0 and up to {LOAD_MAX:g}, such as 1.2")
    if not 0 <= case.gpus <= GPUS_MAX:
        raise ConfigError(f"--gpus {case.gpus}: give 1 to {GPUS_MAX}, or leave it out for the workload's own pool")
    for flag, value in (("--warm-s", case.warm_s), ("--cold-s", case.cold_s)):
        if value is not None and not (math.isfinite(value) and 0 < value <= SECONDS_MAX):
            raise ConfigError(f"{flag} {value:g}: give seconds above 0 and up to {SECONDS_MAX:g}, such as 3")
    if not (math.isfinite(case.minutes) and case.minutes >= 0):
        raise ConfigError(f"--minutes {case.minutes:g}: give minutes above 0, such as 10")
    if case.warm_s is not None and case.cold_s is not None and case.warm_s > case.cold_s:
        raise ConfigError(
            f"--warm-s {case.warm_s:g}: a warm load cannot take longer than a cold one (--cold-s {case.cold_s:g})"
        )
    if case.trace and not os.path.exists(case.trace):
        raise ConfigError(f"--trace {case.trace}: no such file; give a recording, or a trace in a public format")
    return case


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """One run: a case, a policy, one of the case's windows, a seed."""

    case: Case
    policy: str
    window: int
    seed: int
    plots: bool = False
    """Also keep the lines over time that the page is drawn from."""


def build(case: Case) -> Workload:
    """The workload of a case.

    Raises:
        ConfigError: no such workload, or its file cannot be read.
    """
    made = _recorded(case) if case.trace else _fixed(case)
    if case.minutes:
        cut_s = case.minutes * 60.0
        made = replace(made, windows=tuple(replace(w, end_s=min(w.end_s, w.begin_s + cut_s)) for w in made.windows))
    if case.trace:
        _check_measured(case, made)
        if not case.gpus and made.pool.devices > GPUS_MAX:
            raise ConfigError(
                f"--trace {case.trace}: its busiest minutes ask for a pool of {made.pool.devices} GPUs, at most {GPUS_MAX} "
                "are simulated; correct its token counts, give a lower --load, or the pool's size with --gpus"
            )
    if case.warm_s is not None or case.cold_s is not None:
        warm_s = made.ladder.warm_s if case.warm_s is None else case.warm_s
        cold_s = max(warm_s, made.ladder.cold_s) if case.cold_s is None else case.cold_s
        made = replace(made, ladder=replace(made.ladder, warm_s=warm_s, cold_s=cold_s))
    if case.gpus:
        made = replace(
            made,
            pool=replace(made.pool, devices=case.gpus),
            static_replicas=fitted(made, made.static_replicas, case.gpus),
            static_slo_replicas=made.static_slo_replicas and fitted(made, made.static_slo_replicas, case.gpus),
        )
    return made


def _fixed(case: Case) -> Workload:
    from ops.simulator.workloads import WORKLOADS, workload

    if case.workload not in WORKLOADS:
        raise ConfigError(f"--workload {case.workload}: no such workload; use one of {', '.join(WORKLOADS)}")
    return workload(case.workload, full=case.suite == "full", load=case.load)


def _recorded(case: Case) -> Workload:
    from ops.simulator.traces.importing import read_trace
    from ops.simulator.workloads import of_recording

    try:
        recording = read_trace(Path(case.trace))
    except ConfigError as error:
        raise ConfigError(f"--trace {error}") from None
    try:
        return of_recording(case.workload, recording, load=case.load)
    except ConfigError as error:
        raise ConfigError(f"--trace {case.trace}: {error}") from None


def _check_measured(case: Case, made: Workload) -> None:
    for window in made.windows:
        arrival_s = made.trace(0, window).arrival_s
        if not ((arrival_s >= window.begin_s) & (arrival_s < window.end_s)).any():
            raise ConfigError(
                f"--trace {case.trace}: no request arrives from second {window.begin_s:g}, where the warm-up ends, to "
                f"second {window.end_s:g}: nothing would be measured; give a longer trace, or more of it (--load, --minutes)"
            )


def fitted(workload: Workload, replicas: Mapping[str, int], gpus: int) -> dict[str, int]:
    """A dedicated split for a pool that is smaller than the one which meets the SLO: one replica each while they fit, in the
    workload's order, then the model next that lacks most of what it should have."""
    left = gpus
    got = {model.name: 0 for model in workload.models}
    for model in workload.models:
        if model.gpus <= left and replicas.get(model.name, 0) > 0:
            got[model.name] = 1
            left -= model.gpus
    while True:
        lacking = [
            model for model in workload.models if model.gpus <= left and 0 < got[model.name] < replicas.get(model.name, 0)
        ]
        if not lacking:
            return got
        most = min(lacking, key=lambda model: (got[model.name] / replicas[model.name], model.name))
        got[most.name] += 1
        left -= most.gpus
