"""``make check-extra``: ``python -m tests.extra [--json] [--only SUITE]... [--write-page]``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ops.supervisor import end_start_on_signal
from subjects.errors import CarpoolError
from tests.extra import aiperf, langchain, openai_python, script_suites
from tests.extra.exclusions import PAGE, page
from tests.extra.outcome import FAILURES_SHOWN_MAX, Outcome, Suite, Surroundings
from tests.extra.pool import pool_with_models, wake
from tests.extra.tools import ToolAbsent

SUITES: dict[str, Suite] = {
    openai_python.SUITE: openai_python.run,
    **{name: langchain.suite(name) for name in langchain.SUITES},
    script_suites.NPM: script_suites.run_npm,
    script_suites.LITELLM: script_suites.run_litellm,
    aiperf.SUITE: aiperf.run_aiperf,
}


PREFIX = "carpool-extra-"
CHECK_S_MAX = 19 * 60.0
"""For all suites, what they install included; the rest of twenty minutes is for starting and ending the pool."""


async def check(names: Sequence[str], directory: Path, outcomes: list[Outcome]) -> None:
    """Starts the pool, runs the suites one after another, each result into ``outcomes``, and ends the pool.

    Raises:
        CarpoolError: the pool or a model did not start.
    """
    real = langchain.REAL in names
    deadline_s = time.monotonic() + CHECK_S_MAX
    _say("starting NATS, Valkey, scheduler, gateway, worker agent and a scripted OpenAI server")
    async with pool_with_models(directory, _say, real=real) as surroundings:
        asked: dict[str, object] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        models = ("simulated", "scripted", "paced", *(("smollm2",) if real else ()))
        _say(f"waking {', '.join(models)}")
        bodies = [("/chat/completions", {"model": name} | asked) for name in models]
        await wake(surroundings.base_url, [*bodies, ("/embeddings", {"model": "embedder", "input": "Hello"})])
        for name in names:
            _say(f"{name}: installing what is missing, and running")
            outcome = await _outcome(name, surroundings, deadline_s - time.monotonic())
            outcomes.append(outcome)
            print(outcome.line(), flush=True)
            for failure in outcome.failures[:FAILURES_SHOWN_MAX]:
                print(f"  {failure}", flush=True)
            if len(outcome.failures) > FAILURES_SHOWN_MAX:
                print(f"  and {len(outcome.failures) - FAILURES_SHOWN_MAX} more", flush=True)


async def _outcome(name: str, surroundings: Surroundings, left_s: float) -> Outcome:
    started_s = time.monotonic()
    try:
        async with asyncio.timeout(left_s):
            outcome = await SUITES[name](surroundings)
    except TimeoutError:
        outcome = Outcome(suite=name, failed=1, failures=(f"no time was left of {CHECK_S_MAX:.0f} s for the whole check",))
    except ToolAbsent as reason:
        outcome = Outcome(suite=name, skipped=str(reason))
    except CarpoolError as error:
        outcome = Outcome(suite=name, failed=1, failures=(str(error),))
    return dataclasses.replace(outcome, took_s=round(time.monotonic() - started_s, 1))


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def main() -> int:
    """Runs the check; returns 0 when nothing failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.extra", description="suites that others wrote, run against our pool"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--only", action="append", choices=list(SUITES), help="run this suite (may be given several times)")
    parser.add_argument("--keep", type=Path, help="keep logs and state in a new folder below this one")
    parser.add_argument("--write-page", action="store_true", help=f"write {PAGE.name} from the list, and end")
    options = parser.parse_args()
    if options.write_page:
        PAGE.write_text(page())
        return 0
    names = options.only or list(SUITES)
    outcomes: list[Outcome] = []
    with contextlib.ExitStack() as stack:
        if options.keep is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)))
        else:
            options.keep.mkdir(parents=True, exist_ok=True)
            directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=options.keep)).resolve()
            _say(f"logs are kept in {directory}")
        whole = asyncio.run(_checked(names, directory, outcomes))
    ok = whole and bool(outcomes) and all(outcome.ok for outcome in outcomes)
    if options.json:
        suites = {outcome.suite: dataclasses.asdict(outcome) | {"ok": outcome.ok} for outcome in outcomes}
        print(json.dumps({"check": "extra", "ok": ok, "suites": suites}))
    return 0 if ok else 1


async def _checked(names: Sequence[str], directory: Path, outcomes: list[Outcome]) -> bool:
    end_start_on_signal()
    try:
        await check(names, directory, outcomes)
    except asyncio.CancelledError:
        print("check-extra: ended before its end", file=sys.stderr)
    except CarpoolError as error:
        print(f"check-extra: {error}", file=sys.stderr)
    else:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
