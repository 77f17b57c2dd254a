"""The plugin that applies exclusions to suites of others: what counts as excluded, and what as failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.extra import pytest_suite
from tests.extra.exclusions import Exclusion

SUITE = """
import pytest

def refused(): raise RuntimeError("Error code: 404 - no such route")

@pytest.fixture
def lost(): raise ConnectionError("the server is gone")

def test_passes(): pass
def test_fails(): assert 1 == 2, "two"
def test_skips(): pytest.skip("no model")
@pytest.mark.xfail
def test_is_let_fail(): assert False

def test_must_fail_as_listed(): refused()
def test_must_fail_otherwise(): raise RuntimeError("Error code: 500")  # not with Error code: 404
def test_must_fail_without_a_server(lost): refused()
def test_must_fail_passes(): pass
def test_must_fail_skips(): pytest.skip("no server")
@pytest.mark.skip(reason="no server")
def test_must_fail_is_skipped(): refused()

def test_may_skip_skips(): pytest.skip("no model")
def test_may_skip_runs(): pass
def test_is_not_run(): assert False
"""
RULES = [
    Exclusion(suite="s", how="fails", reason="x.", tests=("*::test_must_fail_*",), failure="Error code: 404\\b"),
    Exclusion(suite="s", how="skipped", reason="x.", tests=("*::test_may_skip_*",)),
    Exclusion(suite="s", how="not run", reason="x.", tests=("*::test_is_not_run",)),
    Exclusion(suite="s", how="not run", reason="x.", files=("test_nowhere.py",)),
]


def test_only_what_is_listed_is_excluded(tmp_path: Path) -> None:
    """A must-fail test counts with its listed error alone: not with another, without a server, passing or skipped."""
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "rules.json").write_text(json.dumps(msgspec.to_builtins(RULES)))
    variables = {
        "PYTHONPATH": str(pytest_suite.HERE / "plugin"),
        "EXTRA_EXCLUSIONS": str(tmp_path / "rules.json"),
        "EXTRA_RESULTS": str(tmp_path / "results.json"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    words = ["-p", "pytest_excluded", "-q", "--tb=short", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | variables
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "test_suite.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (tmp_path / "results.json").exists(), ended.stdout + ended.stderr
    counts: dict[str, Any] = json.loads((tmp_path / "results.json").read_text())
    failures = dict(line.removeprefix("test_suite.py::").split(": ", 1) for line in counts.pop("failures"))
    otherwise = r"it fails, but not with /Error code: 404\b/ as listed: "
    unlisted = "skipped for a reason that is not listed: "
    expected = {
        "test_fails": "AssertionError: two",
        "test_skips": unlisted,
        "test_is_let_fail": unlisted,
        "test_must_fail_otherwise": f"{otherwise}RuntimeError: Error code: 500",
        "test_must_fail_without_a_server": f"{otherwise}ConnectionError: the server is gone",
        "test_must_fail_passes": "listed as one that fails, but it passes: [XPASS(strict)] x.",
        "test_must_fail_skips": unlisted,
        "test_must_fail_is_skipped": unlisted,
        "test_may_skip_runs": "listed as skipped, but it runs and passes",
        "an exclusion matches nothing": "test_nowhere.py",
    }
    assert sorted(failures) == sorted(expected)
    assert [name for name, text in expected.items() if not failures[name].startswith(text)] == []
    assert counts == {"passed": 1, "failed": 10, "excluded": 3, "excluded_files": 0}


@pytest.mark.parametrize(("how", "failure"), [("fails", ""), ("skipped", "x"), ("not run", "x"), ("fails", "(")])
def test_a_rule_names_the_error_of_what_must_fail(how: Any, failure: str) -> None:
    """One without it would hide every fault; elsewhere it would do nothing."""
    rule = {"suite": "s", "how": how, "reason": "x.", "tests": ["*"], "failure": failure}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(rule, Exclusion)
