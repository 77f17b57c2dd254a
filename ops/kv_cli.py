"""``carpool evict-kv`` and ``migrate-kv``, and the flags of a worker's KV tiers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ops.cli_common import bus_url, json_option, nats_option, pool_name_option, run

POLL_S = 0.3
PROGRESS_AFTER_S = 2.0
GRACE_S = 20.0
"""How much longer than the operation's own bound a command waits to hear how it ended."""
EVICT_S = 60.0
UNDER_WAY = "under way"

_F = TypeVar("_F", bound=Callable[..., Any])

# ---------------------------------------------------------------------------------------------------------------- flags

KV_FLAGS = (
    click.option("--kv/--no-kv", default=True, help="Keep computed KV beyond its engine, in host memory and on disk."),
    click.option(
        "--kv-dir",
        type=click.Path(path_type=Path),
        help="Where the tier on disk lies; one worker alone uses it. Default: below the state.",
    ),
    click.option(
        "--kv-memory",
        default="",
        metavar="SIZE",
        help="Host memory for KV, beside the devices' own. Default: 5% of what is available, at most 1GiB.",
    ),
    click.option("--kv-disk", default="8GiB", show_default=True, metavar="SIZE", help="Disk for KV; 0: none."),
    click.option(
        "--kv-write-budget",
        default="100GiB",
        show_default=True,
        metavar="SIZE",
        help="Written to that disk per day at most, since writing wears SSDs; 0: without a bound.",
    ),
    click.option(
        "--kv-data-host",
        default="127.0.0.1",
        show_default=True,
        help="Address on which other workers fetch KV; one of the pool's own network for several machines.",
    ),
    click.option(
        "--kv-rate", default="0", metavar="SIZE", help="Bytes per second that they may fetch; 0 (default): without a bound."
    ),
    click.option(
        "--kv-hot", default=30.0, show_default=True, type=click.FloatRange(0, 3600), help="Seconds KV stays hot after use."
    ),
    click.option(
        "--kv-idle",
        default=600.0,
        show_default=True,
        type=click.FloatRange(1, 31_536_000),
        help="Seconds after which unused KV is deleted.",
    ),
)


def kv_options(command: _F) -> _F:
    """All of ``KV_FLAGS``, in this order in the help."""
    for option in reversed(KV_FLAGS):
        command = option(command)
    return command


def worker_flags(given: dict[str, Any]) -> tuple[str, ...]:
    """The flags of ``kv_options`` as words for a ``carpool worker``; ``given`` is by parameter name."""
    if not given["kv"]:
        return ("--no-kv",)
    words: list[str] = []
    for name in ("kv_dir", "kv_memory", "kv_disk", "kv_write_budget", "kv_data_host", "kv_rate", "kv_hot", "kv_idle"):
        value = given[name]
        if value not in (None, ""):
            value = value.absolute() if isinstance(value, Path) else value
            words += [f"--{name.replace('_', '-')}", str(value)]
    return tuple(words)


# ------------------------------------------------------------------------------------------------------------- commands


@click.command("evict-kv", short_help="Drop a share of what is kept of a model's KV.")
@click.argument("model")
@click.option(
    "--ratio", type=float, required=True, help="Share of the bytes, in each tier of each worker: 0.5, or 1 for all."
)
@click.option("--worker", default="", help="At this worker alone, or that of this replica.")
@json_option
@nats_option
@pool_name_option
def evict_kv(model: str, ratio: float, worker: str, as_json: bool, nats_url: str, pool_name: str) -> None:
    """Drop a share of what is kept of a model's KV in host memory and on disk, coldest first, and say what was dropped.

    What is dropped is computed again when it is asked for; answers stay the same. Of what an engine has in its own memory
    vLLM can only drop all, and only while nothing runs: with a ratio of 1 idle engines are told to. `carpool get kv` shows
    what is kept.

    \b
    carpool evict-kv smollm2 --ratio 0.5
    carpool evict-kv smollm2 --ratio 1 --worker gpu-host-1
    """
    argument: dict[str, Any] = {"model": model, "ratio": ratio}
    if worker:
        argument["worker"] = worker
    _finish(run(carried_out("evict-kv", argument, EVICT_S, bus_url(nats_url, pool_name), quiet=as_json)), as_json)


@click.command("migrate-kv", short_help="Copy a model's KV from one worker to another.")
@click.argument("model")
@click.option(
    "--from", "source", required=True, metavar="WORKER", help="A worker, or a replica, which stands for its worker."
)
@click.option("--to", "target", required=True, metavar="WORKER", help="Likewise.")
@click.option(
    "--timeout-s", type=click.FloatRange(1, 3600), default=600.0, show_default=True, help="What came by then is kept."
)
@json_option
@nats_option
@pool_name_option
def migrate_kv(model: str, source: str, target: str, timeout_s: float, as_json: bool, nats_url: str, pool_name: str) -> None:
    """Copy what a worker keeps of a model's KV to another worker, which pulls what it lacks; the source keeps its own.

    Do it before a model moves, so that its replica there need not compute its prompts' beginnings again.

    \b
    carpool migrate-kv smollm2 --from gpu-host-1 --to gpu-host-2
    carpool migrate-kv smollm2 --from smollm2-3-1-5be0cd19c1 --to gpu-host-2
    """
    argument = {"model": model, "source": source, "target": target, "timeout_s": timeout_s}
    _finish(run(carried_out("migrate-kv", argument, timeout_s, bus_url(nats_url, pool_name), quiet=as_json)), as_json)


async def carried_out(verb: str, argument: dict[str, Any], bound_s: float, url: str, *, quiet: bool) -> dict[str, Any]:
    """Begins an operation and waits until all its transactions have ended, telling how far they are."""
    from ops.control import control
    from subjects.errors import CarpoolError

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
    from ops.control import control
    from ops.models import size

    waits = {row["worker"] for row in rows if not row["ended"]}
    held: dict[str, int] = {}
    for tier in await control(url, "get", {"what": "kv"}) or []:
        if tier["worker"] in waits:
            held[tier["worker"]] = held.get(tier["worker"], 0) + sum(
                one["bytes"] for one in tier["models"] if one["model"] == model
            )
    return "; ".join(f"{worker}: holds {size(count)}" for worker, count in sorted(held.items()))


def _finish(result: dict[str, Any], as_json: bool) -> None:
    rows = result["transactions"]
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(result).decode())
    else:
        for row in rows:
            told = row["outcome"] if row["ended"] else f"still under way: `carpool explain {row['transaction']}` tells more"
            click.echo(f"{result['model']} at {row['worker']}: {told}")
    if any(row["failed"] or not row["ended"] for row in rows):
        sys.exit(1)
