"""Many seeds on all cores: ``python -m tests.sim.many --seeds 1000``.

Prints one JSON object last; exit code 0 when every seed held and each kind of event occurred in one percent of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.sim.test_seeds import EVENTS, SHARE_MIN
from tests.sim.world import run_seed


def _run(seed: int) -> tuple[int, list[str], str]:
    try:
        return seed, sorted(set(run_seed(seed))), ""
    except Exception as error:
        return seed, [], f"{type(error).__name__}: {error}".splitlines()[0]


def main() -> int:
    """Runs the seeds; a violated invariant is a failure of its seed, an event in under one percent of them of the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    occurred: Counter[str] = Counter()
    failures: dict[int, str] = {}
    started_s = time.monotonic()
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for done, (seed, events, failure) in enumerate(pool.map(_run, seeds, chunksize=4), 1):
            occurred.update(events)
            if failure:
                failures[seed] = failure
                print(f"seed {seed}: {failure}", file=sys.stderr, flush=True)
            if done % 50 == 0:
                print(f"{done} of {len(seeds)}, {len(failures)} failed", file=sys.stderr, flush=True)
    rare = sorted(kind for kind in EVENTS if occurred[kind] < SHARE_MIN * len(seeds))
    rarest = min(EVENTS, key=lambda kind: (occurred[kind], kind))
    summary = {
        "seeds": len(seeds),
        "first": options.first,
        "failed": failures,
        "events": len(EVENTS),
        "events_in_under_one_percent": rare,
        "rarest_event": {rarest: occurred[rarest]},
        "seconds": round(time.monotonic() - started_s, 1),
    }
    print(json.dumps(summary))
    return 0 if not failures and not rare else 1


if __name__ == "__main__":
    sys.exit(main())
