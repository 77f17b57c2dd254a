"""Engines of one device step in turns; a dead or frozen one holds up nobody (ops/decisions/0008, SCH-7)."""

from __future__ import annotations

import fcntl
import heapq
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from workers.turns import POLL_S, REST_S, WAIT_S_MAX, DeviceTurns

NEVER_DUE_S = 1e9
STEP_S = 0.005
PACE_S = 0.05


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
        said = self.line()
        times, overruns = json.loads(self.line() if said == "stepped" else said)
        self.end()
        return times, overruns

    def end(self) -> None:
        """Waits for its end."""
        self.process.communicate(timeout=20)


def overlaps(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> int:
    """Pairs of steps that ran at the same time."""
    return sum(a < d and c < b for a, b in one for c, d in other)


class Clock:
    """A clock that only moves when all sleep; stands for ``time`` in ``workers.turns``. One thread runs at a time."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._sleepers: list[tuple[float, int, threading.Semaphore]] = []
        self._numbers = itertools.count()

    def monotonic(self) -> float:
        """Seconds."""
        return self.now_s

    def sleep(self, sleep_s: float) -> None:
        """Lets all run who wake earlier."""
        gate = self._gate(sleep_s)
        self._wake()
        assert gate.acquire(timeout=20)

    def run(self, *jobs: Callable[[], None]) -> None:
        """Runs them side by side to their ends, always in the same order."""

        def runs(job: Callable[[], None], gate: threading.Semaphore) -> None:
            assert gate.acquire(timeout=20)
            try:
                job()
            finally:
                self._wake()

        with ThreadPoolExecutor(len(jobs)) as pool:
            ends = [pool.submit(runs, job, self._gate(0.0)) for job in jobs]
            self._wake()
        for end in ends:
            end.result()

    def _gate(self, sleep_s: float) -> threading.Semaphore:
        gate = threading.Semaphore(0)
        heapq.heappush(self._sleepers, (self.now_s + sleep_s, next(self._numbers), gate))
        return gate

    def _wake(self) -> None:
        if self._sleepers:
            self.now_s, _, gate = heapq.heappop(self._sleepers)
            gate.release()


@dataclass
class Step:
    """Of one engine, when what happened."""

    asked_s: float
    due_s: float
    began_s: float
    ended_s: float


def steps(clock: Clock, turns: DeviceTurns, count: int, *, pace_s: float = 0.0, gap_s: float = 0.0) -> list[Step]:
    """Makes steps, urgent ones without a pace, and says how they went."""
    made: list[Step] = []
    for number in range(count):
        asked_s = clock.now_s
        due_s = (made[-1].began_s if made else 0.0) + pace_s if pace_s else asked_s
        turns.take(urgent=not pace_s)
        began_s = clock.now_s
        clock.sleep(STEP_S)
        made.append(Step(asked_s, due_s, began_s, clock.now_s))
        turns.give()
        clock.sleep(gap_s * (number % 4) / 4)
    assert turns.overruns == 0
    return made


def passed_over(one: list[Step], other: list[Step]) -> int:
    """Steps of ``one`` that began while ``other`` already waited for one due earlier."""
    return sum(b.asked_s < a.began_s < b.began_s and b.due_s < a.due_s for a in one for b in other)


@pytest.mark.parametrize("stall_s", [0.0, 0.0001, 0.0004])
def test_the_step_due_first_begins_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stall_s: float) -> None:
    """While one prefills, one that only decodes makes a step per pace, and none in the moments between the other's steps.

    Neither begins while the other waits for a step due earlier, even if engines stall before they lock or after they unlock.
    """
    clock = Clock()
    monkeypatch.setattr("workers.turns.time", clock)
    lock = fcntl.flock

    def stalls(file: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            clock.sleep(stall_s)
        lock(file, operation)
        if operation & fcntl.LOCK_UN:
            clock.sleep(stall_s)

    urgent, paced = DeviceTurns(tmp_path, ("gpu0",), 0.0), DeviceTurns(tmp_path, ("gpu0",), PACE_S)
    one: list[Step] = []
    other: list[Step] = []
    monkeypatch.setattr(fcntl, "flock", stalls)
    clock.run(
        lambda: one.extend(steps(clock, urgent, 100, gap_s=0.8 * REST_S)),
        lambda: other.extend(steps(clock, paced, 20, pace_s=PACE_S)),
    )
    monkeypatch.undo()
    urgent.close()
    paced.close()
    assert not any(a.began_s < b.ended_s and b.began_s < a.ended_s for a in one for b in other)
    assert (passed_over(one, other), passed_over(other, one)) == (0, 0)
    during = [step.began_s for step in other if one[0].began_s < step.began_s < one[-1].ended_s]
    between_s = [later_s - earlier_s for earlier_s, later_s in itertools.pairwise(during)]
    assert len(between_s) >= 8
    assert min(between_s) >= PACE_S
    assert max(between_s) <= PACE_S + 2 * STEP_S
    assert other[-1].began_s - other[-2].began_s < PACE_S, "alone again it has no need to wait"


def test_an_early_step_waits_for_a_short_rest_and_one_that_is_due_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that prefilled may have no more to do, so neighbours wait just as long as it may take to come back."""
    clock = Clock()
    monkeypatch.setattr("workers.turns.time", clock)
    urgent, other = DeviceTurns(tmp_path, ("gpu0",), 0.0), DeviceTurns(tmp_path, ("gpu0",), NEVER_DUE_S)
    waits_s = []
    for prefilled, prefills in ((True, True), (False, False), (True, False)):
        urgent.take(urgent=prefilled)
        urgent.give()
        ended_s = clock.now_s
        other.take(urgent=prefills)
        other.give()
        waits_s.append(clock.now_s - ended_s)
        clock.sleep(1.0)
    urgent.close()
    other.close()
    assert waits_s[:2] == [0.0, 0.0]
    assert REST_S <= waits_s[2] <= REST_S + 2 * POLL_S


def test_steps_of_processes_never_overlap_and_a_paced_engine_lets_the_other_go_first(tmp_path: Path) -> None:
    """One that is not due begins when the other, which rests for long between its steps, has left."""
    urgent = Engine("work", tmp_path, "gpu0", 0.0, "urgent", 40)
    paced = Engine("work", tmp_path, "gpu0", NEVER_DUE_S, "decodes", 8)
    due = Engine("work", tmp_path, "gpu0", 0.0, "decodes", 8)
    urgent.go()
    assert urgent.line() == "stepped"
    paced.go()
    due.go()
    results = [engine.result() for engine in (urgent, due, paced)]
    assert [overruns for _, overruns in results] == [0, 0, 0]
    (one, _), (two, _), (three, _) = results
    assert overlaps(one, two) == overlaps(one, three) == overlaps(two, three) == 0
    assert one[-1][1] <= three[0][0]


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
