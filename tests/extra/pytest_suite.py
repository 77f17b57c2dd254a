"""Runs a suite of pytest tests in its own environment, with the plugin that applies our exclusions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from subjects.errors import CarpoolError
from tests.extra.exclusions import exclusions
from tests.extra.outcome import Outcome
from tests.extra.pool import environment_of_tools
from tests.extra.tools import run

HERE = Path(__file__).parent
_TAIL_CHARS = 2000


class _Counts(msgspec.Struct, frozen=True):
    passed: int
    failed: int
    excluded: int
    excluded_files: int
    failures: tuple[str, ...]


async def pytest_outcome(
    suite: str,
    *,
    version: str,
    python: Path,
    words: Sequence[str],
    cwd: Path,
    directory: Path,
    environment: Mapping[str, str],
    timeout_s: float,
) -> Outcome:
    """The counts of one run of pytest, whose output is kept as ``<suite>.log`` in ``directory``.

    Raises:
        CarpoolError: pytest ended without telling counts.
    """
    rules, results = directory / f"{suite}.exclusions.json", directory / f"{suite}.results.json"
    rules.write_text(json.dumps(msgspec.to_builtins(exclusions(suite))))
    argv = [str(python), "-m", "pytest", "-p", "pytest_excluded", "-q", "--tb=short", "-p", "no:cacheprovider", *words]
    variables = environment_of_tools() | dict(environment)
    variables |= {
        "PYTHONPATH": str(HERE / "plugin"),
        "EXTRA_EXCLUSIONS": str(rules),
        "EXTRA_RESULTS": str(results),
    }
    code, output = await run(argv, cwd=cwd, environment=variables, timeout_s=timeout_s)
    (directory / f"{suite}.log").write_text(output)
    try:
        counts = msgspec.json.decode(results.read_bytes(), type=_Counts)
    except (OSError, msgspec.MsgspecError):
        raise CarpoolError(f"{suite}: pytest ended with code {code}: {output[-_TAIL_CHARS:]}") from None
    return Outcome(suite=suite, version=version, **msgspec.structs.asdict(counts))
