"""Suites of simulations: rows, processes, failures, the JSON for programs and the page for people (OPS-6)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from broker.core.plan.policy import Decision, PoolView
from ops.cli import main
from ops.simulator import suite
from ops.simulator.bound import bound_windows
from ops.simulator.cases import HEADLINE_WORKLOADS, Case, Simulation, build
from ops.simulator.policies import POLICIES
from ops.simulator.report import page, write_page
from ops.simulator.suite import BOUND, SCALARS, Scalar, Table, plan, policies_for, run_suite, scalars
from ops.simulator.types import PolicyContext
from subjects.errors import ConfigError


class _Broken:
    """A policy with a mistake in it."""

    name = "broken"

    def decide(self, now_s: float, view: PoolView) -> Decision:
        raise KeyError("a model that is not there")


def broken(context: PolicyContext) -> _Broken:
    """Its factory."""
    return _Broken()


@pytest.fixture(scope="module", autouse=True)
def tracker() -> Iterator[None]:
    """Python's own keeper of semaphores: it starts with the first pool of processes and stays until this process ends."""
    resource_tracker.ensure_running()
    yield


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Two minutes of two models; the name has to be escaped in a page."""
    path = tmp_path_factory.mktemp("traces") / "mine.jsonl"
    random = np.random.default_rng(1)
    lines = [{"carpool_recording": 1, "models": {"chat": {"size": "8B"}, "big": {"size": "70B"}}}]
    lines += [
        {"at_s": float(at_s), "model": model, "input_tokens": int(tokens), "output_tokens": int(tokens) // 4 + 1}
        for model, rps in (("chat", 2.0), ("big", 0.3))
        for at_s, tokens in zip(
            np.sort(random.uniform(0, 120, int(120 * rps))), random.integers(20, 400, int(120 * rps)), strict=True
        )
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return Case(workload="<mine> & yours", trace=str(path))


def table_of(case: Case, policies: list[str], *, processes: int = 1, plots: bool = False, seed: int = 3) -> Table:
    """The rows of some policies."""
    return run_suite(plan([case], policies, seed, ablations=False, plots=plots), processes=processes)


@pytest.fixture(scope="module")
def table(case: Case) -> Table:
    """With plots, of three rows."""
    return table_of(case, ["static", "global-reactive", BOUND], plots=True)


def test_rows_come_in_order_and_are_the_same_on_any_number_of_processes(case: Case, table: Table) -> None:
    """A row's digest and scalars depend on case, policy and seed alone."""
    several = table_of(case, ["static", "global-reactive", BOUND], processes=2)
    assert [row.policy for row in several.rows] == ["static", "global-reactive", BOUND]
    assert _without_time(several, case) == _without_time(table, case)
    other = table_of(case, ["global-reactive"], seed=4)
    assert other.rows[0].result is not None
    assert other.rows[0].result.digest != scalars(table)[case.label]["global-reactive"]["digest"]


def _without_time(table: Table, case: Case) -> dict[str, dict[str, Scalar]]:
    rows = scalars(table)[case.label]
    return {policy: {name: value for name, value in row.items() if name != "cpu_s"} for policy, row in rows.items()}


def test_json_has_the_scalars_of_one_seed(case: Case, table: Table) -> None:
    """``{workload: {policy: {...}}}`` with numbers, a digest, and None where a bound has nothing to say."""
    found = json.loads(json.dumps(scalars(table), allow_nan=False))
    assert list(found) == [case.label]
    rows = found[case.label]
    assert list(rows) == ["static", "global-reactive", BOUND]
    for values in rows.values():
        assert set(SCALARS) <= set(values)
        assert all(value is None or isinstance(value, int | float | str) for value in values.values())
    assert re.fullmatch("[0-9a-f]{64}", rows["static"]["digest"])
    assert rows[BOUND]["slo_all"] is None
    assert 0 < rows[BOUND]["gpu_hours"] <= min(rows["static"]["gpu_hours"], rows["global-reactive"]["gpu_hours"])
    assert rows["static"]["static_over_this"] == 1.0
    assert rows["global-reactive"]["static_over_this"] == pytest.approx(
        rows["static"]["gpu_hours"] / rows["global-reactive"]["gpu_hours"], rel=1e-4
    )
    for name in ("slo_all", "slo_worst_model", "success", "refused", "utilisation", "useful_utilisation"):
        assert 0.0 <= rows["static"][name] <= 1.0


def test_policy_that_fails_costs_its_own_row_only(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """After three quarters of an hour one policy's mistake must not take the others' figures with it."""
    monkeypatch.setitem(POLICIES, "broken", broken)
    seen: list[str] = []
    planned = plan([case], ["broken", "static"], 1, ablations=False, plots=False)
    mixed = run_suite(planned, processes=1, told=lambda progress: seen.append(progress.error))
    assert not mixed.ok
    assert sum(bool(error) for error in seen) == 1
    rows = scalars(mixed)[case.label]
    assert str(rows["broken"]["error"]).startswith("KeyError: 'a model that is not there' (test_suite.py:")
    assert rows["broken"]["gpu_hours"] is None
    assert "error" not in rows["static"]
    assert rows["static"]["gpu_hours"]


def test_windows_are_merged_in_order_into_one_row(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The headline's six windows are one row: hours add up, and the row waits for the last of them."""
    whole = build(case)
    window = whole.windows[0]
    middle_s = (window.begin_s + window.end_s) / 2
    halves = (replace(window, end_s=middle_s), replace(window, begin_s=middle_s))
    monkeypatch.setattr(suite, "build", lambda _case: replace(whole, windows=halves))
    planned = plan([case], ["static"], 3, ablations=False, plots=True)
    assert [simulation.window for simulation in planned] == [0, 1]
    split = run_suite(list(reversed(planned)), processes=1).rows[0]
    monkeypatch.undo()
    one = table_of(case, ["static"], plots=True).rows[0]
    assert split.result is not None and one.result is not None
    assert split.result.gpu_hours == pytest.approx(one.result.gpu_hours)
    requests = [{name: model.requests for name, model in row.result.models.items()} for row in (split, one) if row.result]
    assert requests[0] == requests[1]
    assert len(split.series) == 2
    assert split.attainment[0].time_s[0] < split.attainment[1].time_s[0]


def test_bound_of_a_row_is_of_all_its_windows_together(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy may miss its hundredth of merged windows wherever it likes, so bounds per window are too high (OPS-6)."""
    whole = build(case)
    window = whole.windows[0]
    edges = np.linspace(window.begin_s, window.end_s, 5).tolist()
    quarters = tuple(replace(window, begin_s=begin_s, end_s=end_s) for begin_s, end_s in pairwise(edges))
    split = replace(whole, windows=quarters)
    monkeypatch.setattr(suite, "build", lambda _case: split)
    told: list[tuple[int, int]] = []
    planned = plan([case], [BOUND, "static"], 3, ablations=False, plots=False)
    assert [simulation.policy for simulation in planned].count(BOUND) == 1
    planned = planned[:1]
    row = run_suite(planned, processes=1, told=lambda progress: told.append((progress.done, progress.of))).rows[0]
    assert told == [(1, 1)]
    assert row.gpu_hours == bound_windows(split, 3)
    assert row.gpu_hours < sum(bound_windows(replace(split, windows=(quarter,)), 3) for quarter in quarters)


def test_headline_is_the_four_workloads_under_all_policies_with_the_bound() -> None:
    """The suite's rows are fixed: 25 of them could not quietly become fewer."""
    assert HEADLINE_WORKLOADS == ("five-lines", "busy-few", "long-tail", "burst")
    for case in [Case(workload=name) for name in HEADLINE_WORKLOADS]:
        workload = build(case)
        rows = policies_for(workload)
        assert rows[-1] == BOUND
        assert {"static", "hpa"} <= set(rows)
        assert ("static-slo" in rows) == (case.workload == "burst")
        assert not [name for name in rows if name.startswith("carpool-")]
        assert len(workload.windows) == (6 if case.workload in ("five-lines", "busy-few") else 1)
    assert len(build(Case(workload="five-lines", suite="full")).windows) == 1


def test_unknown_policy_is_one_line() -> None:
    """A mistyped policy is told with those there are."""
    with pytest.raises(ConfigError, match=r"^--policy statik: no such policy; use one of static, .*bound$"):
        policies_for(build(Case(workload="burst")), ["statik"])


# ------------------------------------------------------------------------------------------------------------- the page


class _Page(HTMLParser):
    """Reads a page's structure."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.counts: dict[str, int] = {}
        self.outside: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.outside += [
            value or "" for name, value in attrs if name in ("src", "href") and not (value or "").startswith("#")
        ]
        if tag not in ("meta", "link", "br"):
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] not in ("script", "style"):
            self.text.append(data)


def test_page_is_self_contained_whole_and_escaped(case: Case, table: Table) -> None:
    """It opens without a network, its tags close, a user's names are text, and the assumptions are stated."""
    made = page(table)
    parsed = _Page()
    parsed.feed(made)
    assert parsed.stack == []
    assert parsed.outside == []
    text = " ".join(parsed.text)
    assert case.workload in text
    assert "<mine>" not in made.split("<main>")[1]
    assert "its time by turns" in " ".join(text.split())
    assert "3 s with the weights in the node's memory" in text
    assert parsed.counts["table"] == 2
    assert parsed.counts["tr"] == 1 + len(table.rows) + 1 + len(build(case).models)
    assert "a load takes 3 s with the weights near and 60 s from afar" in " ".join(text.split())
    assert len(re.findall(r"Plotly\.newPlot", made.split("<main>")[1])) == 2


def test_page_is_bounded(table: Table, tmp_path: Path) -> None:
    """Beyond plotly itself a case with a few policies takes a fraction of a megabyte."""
    from plotly.offline import get_plotlyjs

    size = write_page(table, tmp_path / "page.html")
    assert size == (tmp_path / "page.html").stat().st_size
    assert size - len(get_plotlyjs().encode()) < 400_000


def test_page_of_a_failed_row_says_why(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is written whatever failed."""
    monkeypatch.setitem(POLICIES, "broken", broken)
    made = page(table_of(case, ["broken"]))
    assert "KeyError" in made.split("<main>")[1]


# ---------------------------------------------------------------------------------------------------------- the command


def test_command_ends_with_one_json_object_on_one_line(case: Case, tmp_path: Path) -> None:
    """A program reads the last line of stdout; people read the table before it; progress is on stderr."""
    html = tmp_path / "out.html"
    flags = ["--policy", "static", "--policy", BOUND, "--jobs", "1", "--html", str(html), "--json"]
    done = CliRunner().invoke(main, ["simulate", "--trace", case.trace, *flags])
    assert done.exit_code == 0, done.output
    *before, last = done.stdout.strip().splitlines()
    assert list(json.loads(last)) == ["mine"]
    assert list(json.loads(last)["mine"]) == ["static", BOUND]
    assert any("refused" in line and "TTFT p99" in line and "to effect" in line and "to ready" in line for line in before)
    assert "simulate: 2/2" in done.stderr
    assert html.stat().st_size > 1_000_000


@pytest.mark.parametrize(
    ("flags", "cases"),
    [
        (["--suite", "headline"], ["five-lines", "busy-few", "long-tail", "burst"]),
        (["--suite", "full", "--workload", "five-lines"], ["five-lines"]),
        (["--workload", "burst", "--sweep"], [f"burst@warm={warm}s" for warm in ("0.3", "3", "30", "120")]),
        (["--workload", "burst", "--warm-s", "1", "--gpus", "8", "--load", "1.2"], ["burst@load=1.2,gpus=8,warm=1s"]),
    ],
)
def test_flags_become_cases(flags: list[str], cases: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command line asks for is what is simulated, with the seed it names."""
    asked: list[Simulation] = []

    def fake(planned: Sequence[Simulation], *, processes: int, told: object) -> Table:
        asked.extend(planned)
        return Table()

    monkeypatch.setattr(suite, "run_suite", fake)
    done = CliRunner().invoke(main, ["simulate", *flags, "--policy", "static", "--seed", "9", "--json"])
    assert done.exit_code == 0, done.output
    assert list(dict.fromkeys(simulation.case.label for simulation in asked)) == cases
    assert {(simulation.policy, simulation.seed) for simulation in asked} == {("static", 9)}
    assert {simulation.case.suite for simulation in asked} == {"full" if "full" in flags else "headline"}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "give --suite headline"),
        (["--workload", "burst", "--list"], "--workload and --list exclude each other"),
        (["--workload", "nowhere"], "--workload nowhere: no such workload"),
        (["--scenario", "nowhere"], "--scenario nowhere: no such scenario; use one of pulse,"),
        (["--workload", "burst", "--policy", "nobody"], "--policy nobody: no such policy"),
        (["--workload", "burst", "--sweep", "--warm-s", "3"], "--sweep and --warm-s exclude each other"),
        (
            ["--workload", "burst", "--html", "/nowhere/at/all.html"],
            "--html /nowhere/at/all.html: its directory is not there",
        ),
        (["--trace", "/nowhere.jsonl"], "--trace /nowhere.jsonl: no such file"),
    ],
)
def test_wrong_flags_are_told_in_one_line(flags: list[str], line: str) -> None:
    """Exit code 2, and one line that names the flag and the remedy."""
    done = CliRunner().invoke(main, ["simulate", *flags])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"carpool: {line}")
    assert done.stderr.count("\n") == 1


def test_list_names_everything_there_is() -> None:
    """``--list`` is where names are looked up."""
    done = CliRunner().invoke(main, ["simulate", "--list"])
    assert done.exit_code == 0
    for name in ("five-lines", "busy-few", "long-tail", "burst", "static", BOUND, "contention", "pulse-47s", "load-factor"):
        assert name in done.stdout
