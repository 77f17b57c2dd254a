"""``carpool replay-scheduler``: does the scheduler decide the same again?"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec

from broker.scheduler.policies import make_policy
from broker.scheduler.recording import Difference, replay


def replay_and_tell(file: Path, *, as_json: bool) -> int:
    """Prints what a replay found; the exit code is 0 when every command was the same.

    Raises:
        ConfigError: the file cannot be replayed, in one line.
    """
    begun_s = time.monotonic()
    found = replay(file, make_policy)
    took_s = time.monotonic() - begun_s
    same = not found.differences
    if as_json:
        result: dict[str, Any] = {
            "same": same,
            "runs": found.runs,
            "steps": found.steps,
            "commands": found.commands,
            "orders": found.orders,
            "differences": msgspec.to_builtins(found.differences),
            "took_s": round(took_s, 3),
        }
        print(json.dumps(result))
        return 0 if same else 1
    print(
        f"{found.runs} run{'' if found.runs == 1 else 's'}, {found.steps} events, {found.commands} commands, "
        f"{found.orders} of them to workers: {'the same again' if same else 'not the same'} ({took_s:.1f} s)"
    )
    for difference in found.differences:
        print("\n".join(_told(difference)))
    return 0 if same else 1


def _told(difference: Difference) -> list[str]:
    lines = [f"run {difference.run}, step {difference.step}: {difference.event} at {difference.now_s:.3f} s"]
    for who, keys, orders in (
        ("recorded", difference.recorded, difference.recorded_orders),
        ("replayed", difference.replayed, difference.replayed_orders),
    ):
        lines.append(f"  {who}: {', '.join(keys) or 'nothing'}")
        lines += [f"    {order}" for order in orders]
    return lines
