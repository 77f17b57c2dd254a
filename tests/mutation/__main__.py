"""Mutation testing of the pure cores: ``python -m tests.mutation --seed 1 --count 240``.

Do the tests notice when the cores are wrong? cosmic-ray's operators say what can be changed; this module draws a random
sample of the places, changes one at a time in a copy of the tree, and runs the core tests that reach the changed line.

- A *site* is a span of code that some operator can change. Sites are drawn evenly over all files, and one of the mutants of
  each site is drawn evenly, so that an operator with eleven replacements does not outvote one with a single one.
- Annotations are no sites: ``from __future__ import annotations`` makes them text that nothing evaluates.
- What is no Python (cosmic-ray takes the star of a signature for an operator) is invalid and left out of all counts.
- Killed: a test fails, nothing can be imported, or the time limit passes. Everything else survived: mutants that no test
  reaches and mutants that mean the same as the original included. No comment in the code can exclude anything.

The last line of the output is one JSON object (see ``Summary``). Not in CI: it takes half an hour.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORES = ("broker/core/plan", "broker/core/requests")
TREE = ("carpool", "subjects", "profiles", "kvcache", "broker", "workers", "ops", "tests", "pyproject.toml")
TESTS = "tests/core"
TESTS_WITHOUT_CORES = ("test_profiles_*", "test_openai_*", "test_devices*")
KILLED_MIN = 0.85
WORKERS = 2
NICE = 10
BASELINE_MAX_S = 600.0
MUTANT_LEAST_S = 20.0  # a run may take this long and four times what its tests took, then it counts as killed
MUTANT_TIMES = 4.0


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: the given occurrence of a cosmic-ray operator in a file; lines count from 1, columns from 0."""

    path: str
    operator: str
    occurrence: int
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant: ``verdict`` is killed, timeout, survived, unreached (no test runs the line), or invalid."""

    mutant: Mutant
    verdict: str
    diff: str


@dataclass(frozen=True, slots=True)
class Summary:
    """``killed`` includes ``timeouts``, ``survived`` includes ``unreached``; ``modules``: [killed, sampled] of each file."""

    seed: int
    sites: int
    invalid: int
    sampled: int
    killed: int
    timeouts: int
    survived: int
    unreached: int
    score: float
    ok: bool
    seconds: float
    modules: dict[str, list[int]]
    survivors: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Reach:
    """Which tests run which lines, and how long each test takes."""

    seconds: dict[str, float]
    lines: dict[str, dict[str, list[str]]]

    def tests_of(self, source: str, mutant: Mutant) -> list[str]:
        """The tests that run the mutant's statement, quick ones first; all tests for code that runs on import."""
        span = _statement_lines(source, mutant)
        of_file = self.lines.get(mutant.path, {})
        tests = {test for line in span for test in of_file.get(str(line), [])}
        if "" in tests:
            tests = set(self.seconds)
        return sorted(tests, key=lambda test: (self.seconds[test], test))

    def limit_s(self, tests: list[str]) -> float:
        """Seconds that a run of these tests may take."""
        return MUTANT_LEAST_S + MUTANT_TIMES * sum(self.seconds[test] for test in tests)


def _statement_lines(source: str, mutant: Mutant) -> range:
    """Lines of the innermost statement around the mutant; of a compound statement only its header."""
    found = range(mutant.line, mutant.line + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.stmt, ast.match_case)):
            first = node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno
            decorators = getattr(node, "decorator_list", [])
            first = min([first, *(decorator.lineno for decorator in decorators)])
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else getattr(node, "end_lineno", first)
            if first <= mutant.line <= max(first, last):
                found = range(first, max(first, last) + 1)
    return found


def _annotation_spans(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Start and end (line, column) of all annotations."""
    annotations: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.arg, ast.AnnAssign)):
            annotations.append(node.annotation)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            annotations.append(node.returns)
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0))
        for node in annotations
        if node is not None
    ]


def sites_of(root: Path) -> list[list[Mutant]]:
    """All sites of the cores below ``root`` in a stable order, each with its mutants."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    operators = [(name, plugins.get_operator(name)) for name in plugins.operator_names()]
    sites: dict[tuple[str, tuple[int, int], tuple[int, int]], list[Mutant]] = {}
    for path in sorted(path for core in CORES for path in (root / core).glob("*.py")):
        source = path.read_text()
        name = str(path.relative_to(root))
        annotations = _annotation_spans(source)
        nodes = list(ast_nodes(get_ast(source)))
        for operator_name, operator_class in operators:
            if operator_class.arguments():
                continue  # these two want names of variables of ours
            operator = operator_class()
            spans = (span for node in nodes for span in operator.mutation_positions(node))
            for occurrence, (start, end) in enumerate(spans):
                if any(first <= start and end <= last for first, last in annotations):
                    continue
                mutant = Mutant(name, operator_name.removeprefix("core/"), occurrence, start[0], start[1])
                sites.setdefault((name, start, end), []).append(mutant)
    return [sites[key] for key in sorted(sites)]


def draw(sites: list[list[Mutant]], count: int, seed: int) -> list[Mutant]:
    """``count`` sites in random order, one mutant of each."""
    chance = random.Random(seed)
    return [chance.choice(site) for site in chance.sample(sites, min(count, len(sites)))]


def mutated(source: str, mutant: Mutant) -> str:
    """The source with the mutant's change."""
    from cosmic_ray import plugins
    from cosmic_ray.mutating import mutate_code

    code = mutate_code(source, plugins.get_operator(f"core/{mutant.operator}")(), mutant.occurrence)
    assert isinstance(code, str), mutant
    return code


class Tree:
    """A copy of the tree, and a process there that has imported what every test run needs and forks for each of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in TREE:
            if Path(name).is_dir():
                shutil.copytree(name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                path.mkdir(parents=True, exist_ok=True)
                shutil.copy2(name, path / name)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.mutation.runs"],
            cwd=path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is ours to answer
        )

    def run(self, files: list[str], limit_s: float, **variables: str) -> tuple[int | None, str]:
        """Runs pytest on files; returns its exit code (None: out of time) and the end of its output."""
        assert self._server.stdin is not None and self._server.stdout is not None
        order = {"files": files, "limit_s": limit_s, "variables": variables}
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        code, output = json.loads(self._server.stdout.readline())
        return code, output

    def close(self) -> None:
        """Ends the process."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def _write_source(path: Path, source: str) -> None:
    """Writes a module and forgets its bytecode, whose freshness Python judges by size and whole seconds."""
    path.write_text(source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def _unchanged_passes(trees: list[Tree], of_first: dict[str, str]) -> None:
    files = [f"--ignore-glob=*/{pattern}" for pattern in TESTS_WITHOUT_CORES] + [TESTS]
    with ThreadPoolExecutor(len(trees)) as pool:
        variables = [of_first, *({} for _ in trees[1:])]
        runs = [pool.submit(tree.run, files, BASELINE_MAX_S, **more) for tree, more in zip(trees, variables, strict=True)]
        for run in runs:
            code, output = run.result()
            if code != 0:
                sys.exit(f"mutation: the tests fail without any mutant ({code})\n{output}")


def _baseline(trees: list[Tree], scratch: Path) -> Reach:
    """Runs the unchanged tree in each copy: it must pass, and the first run records who reaches what."""
    record = scratch / "reach.json"
    _unchanged_passes(trees, {"CARPOOL_MUTATION_RECORD": str(record)})
    recorded = json.loads(record.read_text())
    return Reach(recorded["seconds"], recorded["lines"])


def _test(tree: Tree, mutant: Mutant, reach: Reach) -> Outcome:
    """Runs one mutant in ``tree`` and puts the original back."""
    path = tree.path / mutant.path
    source = path.read_text()
    changed = mutated(source, mutant)
    diff = "\n".join(difflib.unified_diff(source.split("\n"), changed.split("\n"), lineterm="", n=0)).partition("@@\n")[2]
    try:
        compile(changed, mutant.path, "exec")
    except SyntaxError:
        return Outcome(mutant, "invalid", diff)
    tests = reach.tests_of(source, mutant)
    if not tests:
        return Outcome(mutant, "unreached", diff)
    plan = tree.path / "plan.json"
    plan.write_text(json.dumps(tests))
    files = sorted({test.partition("::")[0] for test in tests})
    _write_source(path, changed)
    try:
        code, output = tree.run(files, reach.limit_s(tests), CARPOOL_MUTATION_PLAN=str(plan))
    finally:
        _write_source(path, source)
    if code is None:
        return Outcome(mutant, "timeout", diff)
    if code == 5:  # no test was run: the plan is wrong, which must not look like a kill
        raise RuntimeError(f"{mutant}: no test ran\n{output}")
    return Outcome(mutant, "killed" if code else "survived", diff)


def _summary(drawn: list[Outcome], seed: int, sites: int, seconds: float) -> Summary:
    outcomes = [outcome for outcome in drawn if outcome.verdict != "invalid"]
    killed = [outcome for outcome in outcomes if outcome.verdict in ("killed", "timeout")]
    modules: dict[str, list[int]] = {}
    for outcome in outcomes:
        figures = modules.setdefault(outcome.mutant.path, [0, 0])
        figures[0] += outcome in killed
        figures[1] += 1
    score = len(killed) / len(outcomes) if outcomes else 0.0
    return Summary(
        seed=seed,
        sites=sites,
        invalid=len(drawn) - len(outcomes),
        sampled=len(outcomes),
        killed=len(killed),
        timeouts=sum(outcome.verdict == "timeout" for outcome in outcomes),
        survived=len(outcomes) - len(killed),
        unreached=sum(outcome.verdict == "unreached" for outcome in outcomes),
        score=round(score, 4),
        ok=score >= KILLED_MIN,
        seconds=round(seconds, 1),
        modules={path: modules[path] for path in sorted(modules)},
        survivors=[
            {
                "at": f"{outcome.mutant.path}:{outcome.mutant.line}",
                "operator": outcome.mutant.operator,
                "unreached": outcome.verdict == "unreached",
                "diff": outcome.diff,
            }
            for outcome in sorted(outcomes, key=lambda outcome: (outcome.mutant.path, outcome.mutant.line))
            if outcome not in killed
        ],
    )


def run(seed: int, count: int, seconds_max: float) -> Summary:
    """Draws, tests and sums up. What has not begun within ``seconds_max``, or before a first SIGTERM or Ctrl-C, is left out:
    the order is random, so what was tested is still a fair sample."""
    began = time.monotonic()
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    os.nice(NICE)
    with tempfile.TemporaryDirectory(prefix="carpool-mutation-") as scratch:
        trees = [Tree(Path(scratch, f"tree-{number}")) for number in range(WORKERS)]
        sites = sites_of(trees[0].path)
        reach = _baseline(trees, Path(scratch))
        print(
            f"{len(sites)} sites, {len(reach.seconds)} tests, {time.monotonic() - began:.0f} s for the baseline", flush=True
        )
        free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for tree in trees:
            free.put(tree)

        def one(mutant: Mutant) -> Outcome | None:
            if stopped.is_set() or time.monotonic() - began > seconds_max:
                return None
            tree = free.get()
            try:
                outcome = _test(tree, mutant, reach)
            finally:
                free.put(tree)
            survived = outcome.verdict in ("survived", "unreached")
            diff = f"\n{outcome.diff}" if survived else ""
            print(f"{outcome.verdict:9} {mutant.path}:{mutant.line} {mutant.operator}{diff}", flush=True)
            return outcome

        with ThreadPoolExecutor(WORKERS) as pool:
            outcomes = [outcome for outcome in pool.map(one, draw(sites, count, seed)) if outcome is not None]
        _unchanged_passes(trees, {})  # Else kills may have been accidents, of a test or of a source that was not put back.
        for tree in trees:
            tree.close()
    return _summary(outcomes, seed, len(sites), time.monotonic() - began)


def main() -> None:
    """Exit code 0: at least ``KILLED_MIN`` of the sample was killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description="Mutation testing of the pure cores.")
    parser.add_argument("--seed", type=int, default=1, help="another seed draws another sample")
    parser.add_argument("--count", type=int, default=240, help="mutants to draw")
    parser.add_argument("--seconds-max", type=float, default=1800.0, help="begin no mutant after this long")
    options = parser.parse_args()
    summary = run(options.seed, options.count, options.seconds_max)
    for survivor in summary.survivors:
        print(
            f"\n{survivor['at']} {survivor['operator']}{' (unreached)' if survivor['unreached'] else ''}\n{survivor['diff']}"
        )
    print(json.dumps(dataclasses.asdict(summary)))
    sys.exit(0 if summary.ok else 1)


if __name__ == "__main__":
    main()
