"""An engine's process of ``test_turns``: ``work DIRECTORY DEVICES PACE_S URGENT STEPS`` or ``hold DIRECTORY``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from workers.turns import DeviceTurns

STEP_S = 0.005


def main() -> None:
    """Says ready or held, waits for a line, says stepped after one step, and tells when each step began and ended."""
    kind, directory, *rest = sys.argv[1:]
    if kind == "hold":
        DeviceTurns(Path(directory), ("gpu0",), 0.0).take(urgent=True)
        say("held")
        sys.stdin.readline()
        return
    devices, pace_s, urgent, steps = rest
    turns = DeviceTurns(Path(directory), tuple(devices.split(",")), float(pace_s), wait_s_max=60.0, rest_s=60.0)
    say("ready")
    sys.stdin.readline()
    times = []
    for _ in range(int(steps)):
        turns.take(urgent=urgent == "urgent")
        began_s = time.monotonic()
        time.sleep(STEP_S)
        times.append((began_s, time.monotonic()))
        turns.give()
        if len(times) == 1:
            say("stepped")
    say(json.dumps([times, turns.overruns]))
    turns.close()


def say(text: str) -> None:
    """One line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
