"""Operations on KV that take a while: begun at the scheduler, and waited for until all their transactions have ended."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from ops.control import control
from subjects.errors import CarpoolError

POLL_S = 0.3
PROGRESS_AFTER_S = 2.0
GRACE_S = 20.0
"""How much longer than the operation's own bound a command waits to hear how it ended."""
UNDER_WAY = "under way"


async def carried_out(verb: str, argument: dict[str, Any], bound_s: float, url: str, *, quiet: bool) -> dict[str, Any]:
    """Begins an operation and waits until all its transactions have ended, telling how far they are."""
    begun: dict[str, Any] = await control(url, verb, argument)
    rows = [{**one, "ended": False, "failed": False, "outcome": UNDER_WAY} for one in begun["transactions"]]
    begun_s = time.monotonic()
    end_s = begun_s + bound_s + GRACE_S
    told = ""
    while time.monotonic() < end_s and not all(row["ended"] for row in rows):
        await asyncio.sleep(POLL_S)
        try:
            for row in rows:
                if not row["ended"]:
                    _look(row, await control(url, "explain", {"what": row["transaction"]}))
            late = not quiet and time.monotonic() - begun_s > PROGRESS_AFTER_S
            progress = await _progress(url, begun["model"], rows) if late else ""
        except CarpoolError:
            continue  # The leader changes; its successor goes on with what the journal has.
        if progress and progress != told:
            told = progress
            print(told, file=sys.stderr, flush=True)
    return {**begun, "transactions": rows}


def _look(row: dict[str, Any], explained: dict[str, Any]) -> None:
    if explained["took_s"] is None:
        return
    failed = explained["outcome"] != "done"
    steps = explained["steps"]
    row |= {
        "ended": True,
        "failed": failed,
        "outcome": explained["outcome"] if failed or not steps else steps[-1]["outcome"],
        "took_s": explained["took_s"],
    }


async def _progress(url: str, model: str, rows: list[dict[str, Any]]) -> str:
    """What the workers that are at it hold of the model now."""
    from ops.models import size

    waits = {row["worker"] for row in rows if not row["ended"]}
    held: dict[str, int] = {}
    for tier in await control(url, "get", {"what": "kv"}) or []:
        if tier["worker"] in waits:
            held[tier["worker"]] = held.get(tier["worker"], 0) + sum(
                one["bytes"] for one in tier["models"] if one["model"] == model
            )
    return "; ".join(f"{worker}: holds {size(count)}" for worker, count in sorted(held.items()))
