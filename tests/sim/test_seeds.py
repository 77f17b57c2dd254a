"""Seeds of the simulated world: safety at every event, liveness after all faults, and proof that the faults happen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.sim.world import FAULTS, run_seed

SEEDS = int(os.environ.get("CARPOOL_SIM_SEEDS", "16"))
SEEDS_PER_TEST = 4
RARE_SEEDS_MIN = 400
"""With fewer seeds than this, one percent of them says nothing about a rare event."""
SHARE_MIN = 0.01
EVENTS = (
    *(
        fault
        for fault in FAULTS
        if fault not in ("engine-dies", "loads-fail", "loads-slow", "clients-leave", "client-leaves-cold-model")
    ),
    "engine-died",
    "load-failed",
    "load-slow",
    "load-ordered",
    "client-left-running",
    "client-left-waiting",
    "client-left-while-waking",
    "handed-over",
    "yielded",
    "granted-in-parts",
    "pressure",
    "restarted",
    "continued",
    "ticket-redelivered",
    "message-lost",
    "leader-resigned",
    "replica-told-dead",
    "evicted",
    "ended-finished",
    "ended-cancelled",
    "ended-failed",
)
"""Each must occur in one percent of the seeds."""

occurred: Counter[str] = Counter()
ran: list[int] = []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_TEST))
def test_seeds(first: int) -> None:
    """Safety and liveness hold (A1-A3, B1, C1, C8, E4, F1, F7, F10, L1, L5, REL-2, REL-3)."""
    for seed in range(first, min(SEEDS, first + SEEDS_PER_TEST)):
        occurred.update(set(run_seed(seed)))
        ran.append(seed)


def test_a_seed_is_one_history() -> None:
    """The same seed gives the same history whatever order sets have in a process, so that a failure can be looked at."""
    code = "from tests.sim.world import World; w = World(5); w.run(); print(w.clock.calls, w.clock.now(), w.draw.random())"
    histories = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(histories) == 1


def test_the_events_occur() -> None:
    """A fault that never happens proves nothing: each kind occurs in one percent of many seeds, most kinds in a few."""
    if not ran:
        pytest.skip("the seeds did not run in this process")
    never = [kind for kind in EVENTS if occurred[kind] < (SHARE_MIN * len(ran) if len(ran) >= RARE_SEEDS_MIN else 0)]
    assert never == []
    assert sum(occurred[kind] > 0 for kind in EVENTS) >= len(EVENTS) // 2
