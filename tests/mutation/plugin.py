"""The pytest side of ``tests.mutation``: records which test runs which line, or runs exactly the planned tests in order.

Loaded with ``-p tests.mutation.plugin`` in a copy of the tree. The environment says what to do:

- ``CARPOOL_MUTATION_RECORD``: write ``{"seconds": {test: s}, "lines": {file: {line: [test]}}}`` there at the end. A line
  that runs on import belongs to the test ``""``.
- ``CARPOOL_MUTATION_PLAN``: a JSON list of tests; all others are deselected and these run in that order.

Hypothesis draws the same examples in every run and does not shrink: a mutant is to be killed, not explained.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Generator
from pathlib import Path

import coverage
import hypothesis
import pytest

MEMORY_MAX_BYTES = 6 << 30  # a mutant may loop and allocate; the machine has other users
_record = os.environ.get("CARPOOL_MUTATION_RECORD", "")
_plan = os.environ.get("CARPOOL_MUTATION_PLAN", "")
_seconds: dict[str, float] = {}
_coverage: coverage.Coverage | None = None

os.environ.setdefault("PROTOCOL_EXAMPLES", "10")  # of the request protocol's property test, which is the slowest
resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX_BYTES, MEMORY_MAX_BYTES))
hypothesis.settings.register_profile(
    "mutation",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("mutation")
if _record:
    # Started on import: the cores must not be imported before.
    _cores = ["broker/core/plan/*", "broker/core/requests/*"]
    _coverage = coverage.Coverage(data_file=None, config_file=False, include=_cores)
    _coverage.start()


def pytest_sessionstart() -> None:
    """Refuses to test another checkout's code: an installed copy would let every mutant survive."""
    import broker.core

    if not Path(broker.core.__path__[0]).is_relative_to(Path.cwd()):
        raise pytest.UsageError(f"broker.core comes from {broker.core.__path__[0]}, not from the copy in {Path.cwd()}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves the planned tests, in the planned order."""
    if _plan:
        by_name = {item.nodeid: item for item in items}
        planned = json.loads(Path(_plan).read_text())
        items[:] = [by_name[name] for name in planned if name in by_name]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Lines run from here on belong to this test."""
    if _coverage is not None:
        _coverage.switch_context(item.nodeid)
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up setup, call and teardown."""
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish() -> None:
    """Writes what was recorded."""
    if _coverage is None:
        return
    _coverage.stop()
    data = _coverage.get_data()
    lines = {str(Path(file).relative_to(Path.cwd())): data.contexts_by_lineno(file) for file in data.measured_files()}
    Path(_record).write_text(json.dumps({"seconds": _seconds, "lines": lines}))
