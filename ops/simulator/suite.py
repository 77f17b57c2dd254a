"""Runs many simulations on several processes and makes the table: one row per case and policy.

Simulations are independent (a case, a policy, a window, a seed), so they run as they come, longest first; windows of a row
are merged exactly, in their order, so that a row does not depend on how many processes there were. The bound is one piece of
work for all windows of its row: the requests that may miss their SLO are those of all of them together, as in merged rows. A
policy that fails costs its own row only.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from ops.simulator.cases import Case, Simulation, build
from ops.simulator.metrics import Series
from ops.simulator.policies import POLICIES
from ops.simulator.run import Run, merge, run
from ops.simulator.types import Result, Window, Workload
from subjects.errors import CarpoolError, ConfigError

BOUND = "bound"
"""Not a policy: what no schedule can go below (``ops.simulator.bound``)."""
OURS = "carpool"
ABLATION_PREFIX = f"{OURS}-"
SLO_SHARE = 0.99
"""Goal for every model; the bound is for schedules that reach it."""
PROCESSES_MAX = 256
ATTAINMENT_POINTS = 60
"""Per window."""

WINDOW_SECONDS = {"busy-few": 60.0, "five-lines": 10.0, "scale": 200.0, "pulse": 15.0, "burst": 12.0, "long-tail": 15.0}
"""About what one window of a workload takes, only to start the longest first."""
POLICY_WEIGHTS = {"oracle": 4.0, "token-swap": 1.5, BOUND: 3.0}
"""Times that; the bound takes half of it per window, and there are up to six."""


@dataclass(frozen=True, slots=True)
class Attainment:
    """Share of requests within SLO by time of arrival, of one window; None where nothing arrived."""

    time_s: list[float]
    share: list[list[float | None]]
    """[sample][model]."""
    offered: list[int]
    """Requests that arrived, all models together."""


@dataclass(slots=True)
class Row:
    """One line of the table. ``result`` is None for the bound, which is no schedule, and for a policy that failed."""

    case: Case
    policy: str
    seed: int
    result: Result | None = None
    bound_gpu_hours: float | None = None
    series: tuple[Series, ...] = ()
    """Lines over time, one entry per window; only where plots were asked for."""
    attainment: tuple[Attainment, ...] = ()
    cpu_s: float = 0.0
    """Time of processes that it took."""
    error: str = ""

    @property
    def gpu_hours(self) -> float | None:
        """Of either kind of row."""
        return self.result.gpu_hours if self.result else self.bound_gpu_hours

    @property
    def meets_slo(self) -> bool:
        """Every model has its share within SLO."""
        return self.result is not None and self.result.slo_worst_model >= SLO_SHARE


@dataclass(slots=True)
class _Piece:
    """What one simulation brought back."""

    simulation: Simulation
    run: Run | None = None
    attainment: Attainment | None = None
    bound_gpu_hours: float = 0.0
    cpu_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """Told after each simulation."""

    done: int
    of: int
    simulation: Simulation
    cpu_s: float
    error: str


@dataclass(slots=True)
class Table:
    """All rows of one command, in the order of cases and policies."""

    rows: list[Row] = field(default_factory=list)

    def row(self, label: str, policy: str) -> Row | None:
        """The row of a case's label and a policy."""
        return next((row for row in self.rows if (row.case.label, row.policy) == (label, policy)), None)

    @property
    def ok(self) -> bool:
        """No row failed."""
        return not any(row.error for row in self.rows)


def policies_for(workload: Workload, asked: Sequence[str] = (), *, ablations: bool = False) -> list[str]:
    """Names of the rows of a workload, the bound last. Without ``asked``: all that make sense there.

    Raises:
        ConfigError: an unknown name.
    """
    known = [*POLICIES, BOUND]
    for name in asked:
        if name not in known:
            raise ConfigError(f"--policy {name}: no such policy; use one of {', '.join(known)}")
    if asked:
        return list(dict.fromkeys(asked))
    return [
        name
        for name in known
        if (ablations or not name.startswith(ABLATION_PREFIX))
        and (name != "static-slo" or workload.static_slo_replicas is not None)
    ]


def plan(cases: Sequence[Case], asked: Sequence[str], seed: int, *, ablations: bool, plots: bool) -> list[Simulation]:
    """All simulations in the order of the table; the bound's only one, named by window 0, is of all windows."""
    planned: list[Simulation] = []
    for case in cases:
        workload = build(case)
        planned += [
            Simulation(case=case, policy=policy, window=window, seed=seed, plots=plots)
            for policy in policies_for(workload, asked, ablations=ablations)
            for window in range(1 if policy == BOUND else len(workload.windows))
        ]
    return planned


def run_suite(
    planned: Sequence[Simulation], *, processes: int = 0, told: Callable[[Progress], None] = lambda _progress: None
) -> Table:
    """Runs ``planned`` on so many processes (0: one per core of this process) and returns the table."""
    processes = process_count(processes, len(planned))
    waiting: dict[tuple[str, str, int], list[Simulation]] = {}
    for simulation in planned:
        waiting.setdefault(_row_key(simulation), []).append(simulation)
    found: dict[tuple[str, str, int], list[_Piece]] = {key: [] for key in waiting}
    rows: dict[tuple[str, str, int], Row] = {}
    for done, piece in enumerate(_pieces(planned, processes), start=1):
        key = _row_key(piece.simulation)
        found[key].append(piece)
        if len(found[key]) == len(waiting[key]):
            # Merged as soon as it is whole: the columns of a day of requests are large.
            rows[key] = _row(sorted(found.pop(key), key=lambda one: one.simulation.window))
        told(Progress(done, len(planned), piece.simulation, piece.cpu_s, piece.error))
    return Table(rows=[rows[key] for key in waiting])


def process_count(asked: int, jobs: int) -> int:
    """How many processes to use for so many jobs; 0 asks for one per core that this process may use."""
    return min(asked or len(os.sched_getaffinity(0)), PROCESSES_MAX, max(1, jobs))


def _row_key(simulation: Simulation) -> tuple[str, str, int]:
    return simulation.case.label, simulation.policy, simulation.seed


def _cost(simulation: Simulation) -> float:
    seconds = WINDOW_SECONDS.get(simulation.case.workload, 5.0) * max(1.0, simulation.case.load)
    return seconds * POLICY_WEIGHTS.get(simulation.policy, 1.0)


def _pieces(planned: Sequence[Simulation], processes: int) -> Iterator[_Piece]:
    longest_first = sorted(range(len(planned)), key=lambda index: (-_cost(planned[index]), index))
    if processes == 1:
        yield from (simulate(planned[index]) for index in longest_first)
        return
    with executor(processes) as workers:
        futures: list[Future[_Piece]] = [workers.submit(simulate, planned[index]) for index in longest_first]
        for future in as_completed(futures):
            yield future.result()
            futures.remove(future)


@contextmanager
def executor(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Fresh processes that end with the command, whatever ends it.

    Raises:
        CarpoolError: one of them was killed.
    """
    import multiprocessing

    made = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"), initializer=_one_thread)
    try:
        yield made
    except BaseException as error:
        for process in list((made._processes or {}).values()):
            process.terminate()
        made.shutdown(wait=False, cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise CarpoolError("a process of the simulation was killed (out of memory?); try --jobs 1") from None
        raise
    made.shutdown()


def _one_thread() -> None:
    """One core per process: a library's own threads would only take them from each other."""
    import signal

    os.environ.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The command ends its processes itself.


def simulate(simulation: Simulation) -> _Piece:
    """Runs one in this process. What a policy raises becomes its row's error."""
    started_s = time.process_time()
    piece = _Piece(simulation)
    try:
        workload = build(simulation.case)
        if simulation.policy == BOUND:
            from ops.simulator.bound import bound_windows

            piece.bound_gpu_hours = bound_windows(workload, simulation.seed, SLO_SHARE)
        else:
            window = workload.windows[simulation.window]
            piece.run = run(workload, POLICIES[simulation.policy], simulation.seed, window)
            if simulation.plots:
                piece.attainment = _attainment(workload, simulation.seed, window, piece.run)
            else:
                piece.run = Run(result=piece.run.result, series=(), measured=piece.run.measured)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        piece.error = f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"
    piece.cpu_s = time.process_time() - started_s
    return piece


def _attainment(workload: Workload, seed: int, window: Window, done: Run) -> Attainment:
    import numpy as np

    arrival_s = workload.trace(seed, window).arrival_s
    arrival_s = arrival_s[(arrival_s >= window.begin_s) & (arrival_s < window.end_s)]
    measured = done.measured
    edges = np.linspace(window.begin_s, window.end_s, ATTAINMENT_POINTS + 1)
    share: list[list[float | None]] = [[None] * len(workload.models) for _ in range(ATTAINMENT_POINTS)]
    for number, model in enumerate(workload.models):
        mine = measured.model == number
        good = (measured.ttft_s[mine] <= model.ttft_s) & (measured.tpot_s[mine] <= model.tpot_s)
        came, _ = np.histogram(arrival_s[mine], edges)
        well, _ = np.histogram(arrival_s[mine][good], edges)
        for point in np.flatnonzero(came).tolist():
            share[point][number] = round(float(well[point] / came[point]), 4)
    offered, _ = np.histogram(arrival_s, edges)
    middles = ((edges[:-1] + edges[1:]) / 2).tolist()
    return Attainment(time_s=middles, share=share, offered=offered.tolist())


def _row(pieces: Sequence[_Piece]) -> Row:
    first = pieces[0].simulation
    row = Row(case=first.case, policy=first.policy, seed=first.seed, cpu_s=sum(piece.cpu_s for piece in pieces))
    row.error = next((piece.error for piece in pieces if piece.error), "")
    if row.error:
        return row
    if first.policy == BOUND:
        row.bound_gpu_hours = pieces[0].bound_gpu_hours
        return row
    merged = merge([piece.run for piece in pieces if piece.run is not None])
    row.result, row.series = merged.result, merged.series
    row.attainment = tuple(piece.attainment for piece in pieces if piece.attainment is not None)
    return row


# --------------------------------------------------------------------------------------------------------------- output

Scalar = float | int | str | None
SCALARS = (
    "gpu_hours",
    "gpus_owned",
    "slo_all",
    "slo_worst_model",
    "ttft_p50",
    "ttft_p99",
    "tpot_p99",
    "success",
    "refused",
    "switches",
    "utilisation",
    "useful_utilisation",
    "decision_to_effect_s",
    "resource_move_s",
    "digest",
)


def scalars(table: Table) -> dict[str, dict[str, dict[str, Scalar]]]:
    """``{workload: {policy: {name: value}}}`` of one seed; what a row has not is None, as all but cost is for the bound."""
    out: dict[str, dict[str, dict[str, Scalar]]] = {}
    for row in table.rows:
        values: dict[str, Scalar] = dict.fromkeys(SCALARS)
        if row.result is not None:
            fields = msgspec.structs.asdict(row.result)
            values |= {name: _json(fields[name]) for name in SCALARS}
            values |= {name: _json(value) for name, value in sorted(row.result.extra.items())}
        values["gpu_hours"] = _json(row.gpu_hours)
        for name, other in (("static_over_this", "static"), ("this_over_oracle", "oracle"), ("this_over_bound", BOUND)):
            values[name] = _json(ratio_to(table, row, other, inverse=name.startswith("static")))
        if row.error:
            values["error"] = row.error
        values["cpu_s"] = round(row.cpu_s, 2)
        out.setdefault(row.case.label, {})[row.policy] = values
    return out


def ratio_to(table: Table, row: Row, policy: str, *, inverse: bool = False) -> float | None:
    """GPU-hours of ``row`` over those of another policy on the same case, or the other way round."""
    other = table.row(row.case.label, policy)
    mine, theirs = row.gpu_hours, other.gpu_hours if other else None
    if mine is None or theirs is None or mine == 0 or theirs == 0:
        return None
    return theirs / mine if inverse else mine / theirs


def _json(value: Scalar) -> Scalar:
    if isinstance(value, float):
        # Times of requests that were never answered are infinite, which JSON cannot say.
        return round(value, 6) if abs(value) != float("inf") and value == value else None
    return value
