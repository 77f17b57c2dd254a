"""``carpool simulate``: flags, progress, the table for people and the JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ops.simulator.cases import Case, Simulation
    from ops.simulator.suite import Progress, Row, Table

SECONDS = click.FloatRange(min=0, min_open=True)


@click.command(short_help="Compare policies for the whole pool on a virtual clock.")
@click.option(
    "--suite",
    type=click.Choice(["headline", "full"]),
    help="The four fixed workloads (or --workload): windows, or whole days.",
)
@click.option("--workload", "workloads", multiple=True, metavar="NAME", help="One workload (see --list). May be repeated.")
@click.option("--trace", "trace_file", type=click.Path(), help="A recording of your own, or a file in a public format.")
@click.option("--scenario", metavar="NAME", help="A fixed experiment with figures of its own (see --list).")
@click.option("--reality", is_flag=True, help="Compare with real vLLM engines on this machine's CPU (some minutes).")
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="One policy (see --list). May be repeated.")
@click.option("--ablations", is_flag=True, help="Also our policy with one mechanism switched off at a time.")
@click.option("--seed", default=1, show_default=True, type=click.IntRange(min=0), help="Everything is drawn from it.")
@click.option("--gpus", default=0, type=click.IntRange(0, 10_000), help="Size of the pool. Default: the workload's own.")
@click.option("--load", default=1.0, show_default=True, type=SECONDS, help="Times the workload's own rate.")
@click.option("--warm-s", "warm_s", multiple=True, type=SECONDS, help="Load time with weights near. May be repeated.")
@click.option("--cold-s", "cold_s", type=SECONDS, help="Load time with weights afar.")
@click.option("--sweep", is_flag=True, help="Warm loads of 0.3, 3, 30 and 120 s, in turn.")
@click.option("--minutes", default=0.0, type=click.FloatRange(min=0), help="Only so much of each window, to try something.")
@click.option("--jobs", default=0, type=click.IntRange(0, 256), help="Processes. Default: one per core.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write one page with plots there.")
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object on one line.")
@click.option("--list", "list_names", is_flag=True, help="Print workloads, policies and scenarios.")
def simulate(
    suite: str | None,
    workloads: tuple[str, ...],
    trace_file: str | None,
    scenario: str | None,
    reality: bool,
    policies: tuple[str, ...],
    ablations: bool,
    seed: int,
    gpus: int,
    load: float,
    warm_s: tuple[float, ...],
    cold_s: float | None,
    sweep: bool,
    minutes: float,
    jobs: int,
    html: Path | None,
    as_json: bool,
    list_names: bool,
) -> None:
    """Run the scheduler's own code on a virtual clock over public traces, beside what others do and what is possible.

    \b
    carpool simulate --list
    carpool simulate --workload five-lines --minutes 5
    carpool simulate --workload five-lines --policy carpool --gpus 8 --load 1.2
    carpool simulate --workload long-tail --sweep --policy carpool --policy on-demand
    carpool simulate --suite headline --seed 7 --html report.html --json
    carpool simulate --suite full --workload five-lines --policy carpool
    carpool simulate --trace my-recording.jsonl --policy carpool --policy static
    carpool simulate --scenario pulse --json

    Costs are GPU-hours of devices that hold a model in any state; a request is within its SLO with a first token in 2 s and
    100 ms per further token on average. `bound` is no policy: no schedule can cost less. `oracle` knows the future.
    """
    from subjects.errors import ConfigError

    if trace_file == "":
        raise ConfigError("--trace: the name is empty; give a recording, or a trace in a public format")
    trace = Path(trace_file) if trace_file is not None else None
    asked = [name for name, given in _modes(suite, workloads, trace, scenario, reality, list_names).items() if given]
    if len(asked) != 1:
        choose = "--suite headline, --workload NAME, --trace FILE, --scenario NAME, --reality or --list"
        raise ConfigError(f"{' and '.join(asked)} exclude each other; give one of {choose}" if asked else f"give {choose}")
    if list_names:
        _list()
    elif scenario is not None:
        _scenario(scenario, seed=seed, jobs=jobs, as_json=as_json)
    elif reality:
        _reality(seed=seed, as_json=as_json)
    else:
        if sweep and warm_s:
            raise ConfigError("--sweep and --warm-s exclude each other; leave one out")
        cases = _cases(suite, workloads, trace, gpus, load, warm_s, cold_s, sweep, minutes)
        _table(cases, policies, seed, ablations=ablations, jobs=jobs, html=html, as_json=as_json)


def _modes(
    suite: str | None, workloads: tuple[str, ...], trace: Path | None, scenario: str | None, reality: bool, names: bool
) -> dict[str, bool]:
    return {
        "--suite": suite is not None and not workloads,
        "--workload": bool(workloads),
        "--trace": trace is not None,
        "--scenario": scenario is not None,
        "--reality": reality,
        "--list": names,
    }


def _cases(
    suite: str | None,
    workloads: tuple[str, ...],
    trace: Path | None,
    gpus: int,
    load: float,
    warm_s: tuple[float, ...],
    cold_s: float | None,
    sweep: bool,
    minutes: float,
) -> list[Case]:
    """What the flags ask for, checked."""
    from ops.simulator.cases import HEADLINE_WORKLOADS, WARM_SWEEP_S, Case, check

    names = workloads or HEADLINE_WORKLOADS
    if trace is not None:
        names = (trace.stem,)
    warms = WARM_SWEEP_S if sweep else warm_s or (None,)
    return [
        check(
            Case(
                workload=name,
                suite=suite or "headline",
                load=load,
                gpus=gpus,
                warm_s=warm,
                cold_s=max(cold_s, warm) if cold_s is not None and warm is not None and sweep else cold_s,
                trace=str(trace) if trace is not None else "",
                minutes=minutes,
            )
        )
        for name in names
        for warm in warms
    ]


def _table(
    cases: list[Case],
    policies: tuple[str, ...],
    seed: int,
    *,
    ablations: bool,
    jobs: int,
    html: Path | None,
    as_json: bool,
) -> None:
    from ops.simulator.suite import plan, process_count, run_suite, scalars
    from subjects.errors import ConfigError

    if html is not None:
        from ops.simulator.report import check_plotly

        check_plotly()
        if not html.absolute().parent.is_dir():
            raise ConfigError(f"--html {html}: its directory is not there; make it, or give another path")
    planned = plan(cases, policies, seed, ablations=ablations, plots=html is not None)
    if len(planned) > 1:
        hint = "; the oracle takes most of the time, --policy chooses" if any(p.policy == "oracle" for p in planned) else ""
        runs = f"{len(planned)} runs, {process_count(jobs, len(planned))} at once, the longest first"
        click.echo(f"simulate: {runs}{hint}", err=True)
    with _progress(len(planned)) as told:
        table = run_suite(planned, processes=jobs, told=told)
    print_rows(table)
    if html is not None:
        from ops.simulator.report import write_page

        size = write_page(table, html)
        click.echo(f"simulate: {html} ({size / 1e6:.1f} MB)", err=True)
    for row in table.rows:
        if row.error:
            click.echo(f"simulate: {row.case.label} {row.policy}: {row.error}", err=True)
    if as_json:
        click.echo(json.dumps(scalars(table)))
    sys.exit(0 if table.ok else 1)


@contextmanager
def _progress(of: int) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal, else a line per finished simulation; both on stderr."""
    if not sys.stderr.isatty():

        def line(progress: Progress) -> None:
            failed = f" FAILED: {progress.error}" if progress.error else ""
            click.echo(
                f"simulate: {progress.done}/{of} {_title(progress.simulation)} ({progress.cpu_s:.1f} s){failed}", err=True
            )

        yield line
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=of)

        def advance(progress: Progress) -> None:
            bar.update(task, advance=1, description=_title(progress.simulation))

        yield advance


def _title(one: Simulation) -> str:
    """The bound is one piece of work for all windows."""
    from ops.simulator.suite import BOUND

    return f"{one.case.label} {one.policy}" + (f" window {one.window}" if one.policy != BOUND else "")


def print_rows(table: Table) -> None:
    """A table per case; refusals beside P99, and both reaction times."""
    import os

    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(width=None if os.isatty(1) else 200, highlight=False, markup=False)
    for label in dict.fromkeys(row.case.label for row in table.rows):
        rows = [row for row in table.rows if row.case.label == label]
        shown = RichTable(title=label, box=None, header_style="bold", title_justify="left", pad_edge=False)
        for name in COLUMNS:
            shown.add_column(name, justify="left" if name == "policy" else "right", overflow="fold")
        for row in rows:
            shown.add_row(*_cells(table, row), style="bold" if row.policy == "carpool" else None)
        console.print(shown)
        console.print()


COLUMNS = (
    "policy",
    "GPU-h",
    "static/it",
    "GPUs",
    "SLO all",
    "SLO worst",
    "TTFT p50",
    "TTFT p99",
    "refused",
    "TPOT p99",
    "success",
    "loads",
    "busy",
    "useful",
    "to effect",
    "to ready",
)
"""Shares in percent, times in seconds; from a decision to an agent's act, and to the new replica."""


def _cells(table: Table, row: Row) -> list[str]:
    from ops.simulator.suite import ratio_to

    if row.error:
        return [row.policy, "failed", *[""] * (len(COLUMNS) - 2)]
    ratio = ratio_to(table, row, "static", inverse=True)
    head = [row.policy, _number(row.gpu_hours), f"{ratio:.2f}" if ratio else "-"]
    result = row.result
    if result is None:
        return [*head, *["-"] * (len(COLUMNS) - 3)]
    return [
        *head,
        str(result.gpus_owned),
        _percent(result.slo_all),
        _percent(result.slo_worst_model),
        _number(result.ttft_p50),
        _number(result.ttft_p99),
        _percent(result.refused),
        _number(result.tpot_p99),
        _percent(result.success),
        str(result.switches),
        _percent(result.utilisation),
        _percent(result.useful_utilisation),
        _number(result.decision_to_effect_s),
        _number(result.resource_move_s),
    ]


def _percent(share: float) -> str:
    # Never rounded up to a goal that was missed.
    return f"{int(share * 10_000) / 100:.2f}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value == float("inf"):
        return "never"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _list() -> None:
    from ops.simulator.policies import POLICIES
    from ops.simulator.scenarios import SCENARIOS
    from ops.simulator.suite import BOUND
    from ops.simulator.workloads import WORKLOADS

    click.echo(f"workloads: {', '.join(WORKLOADS)}")
    click.echo(f"policies:  {', '.join([*POLICIES, BOUND])}")
    click.echo("scenarios:")
    for name, scenario in SCENARIOS.items():
        click.echo(f"  {name:<16} {scenario.says}")


def _scenario(name: str, *, seed: int, jobs: int, as_json: bool) -> None:
    from ops.simulator.scenarios import SCENARIOS
    from subjects.errors import ConfigError

    if name not in SCENARIOS:
        raise ConfigError(f"--scenario {name}: no such scenario; use one of {', '.join(SCENARIOS)}")
    say = lambda line: click.echo(f"simulate: {line}", err=True)  # noqa: E731
    figures = SCENARIOS[name].run(seed, jobs, say)
    _print_figures({"scenario": name, "seed": seed, **figures}, as_json=as_json)


def _reality(*, seed: int, as_json: bool) -> None:
    import asyncio

    from ops.simulator.reality import compare

    say = lambda line: click.echo(f"simulate: {line}", err=True)  # noqa: E731
    figures = asyncio.run(compare(seed=seed, say=say))
    _print_figures(figures, as_json=as_json)
    sys.exit(0 if figures["ok"] else 1)


def _print_figures(figures: dict[str, Any], *, as_json: bool) -> None:
    click.echo(json.dumps(figures) if as_json else json.dumps(figures, indent=2))
