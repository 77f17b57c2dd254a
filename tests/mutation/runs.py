"""Runs pytest again and again for ``tests.mutation``: ``python -m tests.mutation.runs`` in a copy of the tree.

Each line on stdin is an order ``{"files": [...], "limit_s": s, "variables": {...}}``; each line on stdout is the answer
``[exit code or null when out of time, end of the output]``. What no mutant changes is imported once and inherited by a fork
for each order, which saves most of the time of a short run. Ends when stdin is closed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from typing import Any

import pytest

INHERITED = ("coverage", "hypothesis.stateful", "msgspec", "psutil", "subjects.messages", "subjects.nats.bus")
"""Neither cores nor tests, whose assertions pytest rewrites when it imports them."""
POLL_S = 0.02
OUTPUT_CHARS_MAX = 4000
OPTIONS = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "tests.mutation.plugin"]
# Inheriting hypothesis means that pytest cannot rewrite its assertions, and says so.
WARNINGS = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]


def _run(order: dict[str, Any]) -> tuple[int | None, str]:
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.environ.update(order["variables"])
            code = pytest.main([*OPTIONS, *WARNINGS, *order["files"]])
            sys.stdout.flush()
            os._exit(int(code))
        end_s = time.monotonic() + order["limit_s"]
        ended, status = os.waitpid(child, os.WNOHANG)
        while not ended and time.monotonic() < end_s:
            time.sleep(POLL_S)
            ended, status = os.waitpid(child, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # the child itself when it is out of time, and whatever it started
        if not ended:
            os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status) if ended else None, output.read()[-OUTPUT_CHARS_MAX:]


def main() -> None:
    """Takes orders until stdin is closed."""
    for name in INHERITED:
        importlib.import_module(name)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_run(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
