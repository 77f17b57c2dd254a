"""Engines of one device step in turns; a dead or frozen one holds up nobody (ops/decisions/0008, SCH-7)."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from workers.turns import WAIT_S_MAX, DeviceTurns


class Engine:
    """A process of ``turns_process``."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "tests.core.turns_process", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.line() in ("ready", "held")

    def line(self) -> str:
        """What it says next."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        """Lets it begin."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def result(self) -> tuple[list[tuple[float, float]], int]:
        """When its steps were, and how many were made without a turn."""
        times, overruns = json.loads(self.line())
        self.end()
        return times, overruns

    def end(self) -> None:
        """Waits for its end."""
        self.process.communicate(timeout=20)


def overlaps(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> int:
    """Pairs of steps that ran at the same time."""
    return sum(a < d and c < b for a, b in one for c, d in other)


def test_steps_never_overlap_and_a_paced_engine_lets_the_other_go_first(tmp_path: Path) -> None:
    """While one prefills, one that only decodes makes about a step per pace, not every other step."""
    urgent = Engine("work", tmp_path, "gpu0", 0.0, "urgent", 60)
    paced = Engine("work", tmp_path, "gpu0", 0.05, "decodes", 8)
    urgent.go()
    paced.go()
    (one, _), (other, _) = urgent.result(), paced.result()
    assert overlaps(one, other) == 0
    during = [began_s for began_s, _ in other if one[0][0] < began_s < one[-1][1]]
    assert all(later - earlier > 0.03 for earlier, later in itertools.pairwise(during[1:]))


def test_engines_that_span_devices_do_not_wait_for_each_other_for_ever(tmp_path: Path) -> None:
    """Locks are taken in one order, whatever order the devices are named in."""
    engines = [Engine("work", tmp_path, devices, 0.0, "urgent", 20) for devices in ("a,b", "b,a", "b")]
    for engine in engines:
        engine.go()
    results = [engine.result() for engine in engines]
    assert [overruns for _, overruns in results] == [0, 0, 0]
    assert overlaps(results[0][0], results[1][0]) == overlaps(results[1][0], results[2][0]) == 0


def test_a_frozen_neighbour_costs_a_bounded_wait_and_a_dead_one_none(tmp_path: Path) -> None:
    """SIGSTOP while it holds the turn, then SIGKILL: the kernel takes the lock back, its place in the table is void."""
    holder = Engine("hold", tmp_path)
    os.kill(holder.process.pid, signal.SIGSTOP)
    try:
        turns = DeviceTurns(tmp_path, ("gpu0",), 0.0)
        began_s = time.monotonic()
        turns.take(urgent=True)
        turns.give()
        assert turns.overruns == 1
        assert time.monotonic() - began_s >= WAIT_S_MAX
    finally:
        holder.process.kill()
        holder.end()
    turns.take(urgent=True)
    turns.give()
    assert turns.overruns == 1
    turns.close()


def test_an_early_step_is_free_where_nobody_asks(tmp_path: Path) -> None:
    """A pace never slows an engine that is alone."""
    turns = DeviceTurns(tmp_path, ("gpu0",), 100.0)
    for _ in range(50):
        turns.take(urgent=False)
        turns.give()
    assert turns.overruns == 0
    turns.close()
