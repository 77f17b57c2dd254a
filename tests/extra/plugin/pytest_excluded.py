"""A pytest plugin that is loaded into suites which we did not write: applies exclusions and counts.

It runs in a suite's own environment (``-p pytest_excluded``), so it imports nothing but pytest. ``$EXTRA_EXCLUSIONS`` names
a JSON file with the suite's exclusions, ``$EXTRA_RESULTS`` where the counts go. The suite's files stay as they are.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

LINE_CHARS_MAX = 300


class Excluded:
    """Applies the list to one run."""

    def __init__(self, rules: list[dict[str, Any]]) -> None:
        self._rules = rules
        self._used = [0] * len(rules)
        self._must_fail: dict[str, int] = {}
        self._may_skip: dict[str, int] = {}
        self._over: set[str] = set()
        self.passed = 0
        self.failed = 0
        self.excluded = 0
        self.files = 0
        self.failures: list[str] = []

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """Files of routes that are not served are not even read."""
        if not collection_path.is_file() or collection_path.suffix != ".py":
            return None
        name = collection_path.relative_to(config.rootpath).as_posix()
        for index, rule in enumerate(self._rules):
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in rule["files"]):
                self._used[index] += 1
                self.files += collection_path.name.startswith("test_")
                return True
        return None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Sorts the tests by the list."""
        kept: list[pytest.Item] = []
        left_out: list[pytest.Item] = []
        for item in items:
            index = self._rule_of(item.nodeid)
            how = "" if index is None else self._rules[index]["how"]
            if index is not None:
                self._used[index] += 1
            if how == "not run":
                left_out.append(item)
                continue
            kept.append(item)
            if index is not None and how == "fails":
                self._must_fail[item.nodeid] = index
                item.add_marker(pytest.mark.xfail(reason=self._rules[index]["reason"], strict=True))
            elif index is not None and how == "skipped":
                self._may_skip[item.nodeid] = index
        self.excluded += len(left_out)
        if left_out:
            config.hook.pytest_deselected(items=left_out)
        items[:] = kept

    def _rule_of(self, nodeid: str) -> int | None:
        for index, rule in enumerate(self._rules):
            if any(fnmatch.fnmatchcase(nodeid, pattern) for pattern in rule["tests"]):
                return index
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Each test counts once."""
        nodeid = report.nodeid
        if nodeid in self._over:
            if report.failed:
                self._fail(nodeid, report)
            return
        if report.when == "call" or report.failed or report.skipped:
            self._over.add(nodeid)
            # A test that must fail and does is told as skipped, with ``wasxfail``; so is one that its suite lets fail.
            failed_as_listed = report.skipped and hasattr(report, "wasxfail") and nodeid in self._must_fail
            if report.failed:
                passes = report.longreprtext.startswith("[XPASS(strict)]") and nodeid in self._must_fail
                self._fail(nodeid, report, "listed as one that fails, but it passes: " if passes else "")
            elif failed_as_listed:
                expected = self._rules[self._must_fail[nodeid]]["failure"]
                if re.search(expected, "\n".join(_errors(report))):
                    self.excluded += 1
                else:
                    self._fail(nodeid, report, f"it fails, but not with /{expected}/ as listed: ")
            elif report.skipped:
                if nodeid in self._may_skip:
                    self.excluded += 1
                else:
                    self._fail(nodeid, report, "skipped for a reason that is not listed: ")
            elif nodeid in self._may_skip:
                self._fail(nodeid, report, "listed as skipped, but it runs and passes")
            else:
                self.passed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read is a failure."""
        if report.failed:
            self._fail(report.nodeid, report)

    def _fail(self, nodeid: str, report: pytest.TestReport | pytest.CollectReport, reason: str = "") -> None:
        self.failed += 1
        self.failures.append(f"{nodeid}: {reason}{_errors(report)[0]}"[:LINE_CHARS_MAX])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Writes the counts."""
        for rule, used in zip(self._rules, self._used, strict=True):
            if not used:
                self.failed += 1
                self.failures.append(f"an exclusion matches nothing: {', '.join((*rule['files'], *rule['tests']))}")
        counts = {
            "passed": self.passed,
            "failed": self.failed,
            "excluded": self.excluded,
            "excluded_files": self.files,
            "failures": self.failures,
        }
        Path(os.environ["EXTRA_RESULTS"]).write_text(json.dumps(counts))


def _errors(report: pytest.TestReport | pytest.CollectReport) -> list[str]:
    """What was raised or not true, without the source that pytest shows around it; else the last line."""
    lines = report.longreprtext.strip().splitlines()
    return [line[1:].strip() for line in lines if line.startswith("E ")] or lines[-1:] or [""]


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin with the suite's list."""
    rules = json.loads(Path(os.environ["EXTRA_EXCLUSIONS"]).read_text())
    config.pluginmanager.register(Excluded(rules), "extra-excluded")
