"""``carpool evict-kv`` and ``migrate-kv``, and the flags of a worker's KV tiers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ops.cli_common import Pool, on_pool, run

EVICT_S = 60.0

_F = TypeVar("_F", bound=Callable[..., Any])

# ---------------------------------------------------------------------------------------------------------------- flags

KV_FLAGS = (
    click.option("--kv/--no-kv", default=True, help="Keep computed KV beyond its engine, in host memory and on disk."),
    click.option(
        "--kv-dir",
        type=click.Path(path_type=Path),
        help="Where the tier on disk lies; one worker alone uses it. Default: below the state, by the worker's name.",
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
        help="Seconds after which unused KV is deleted, counted anew from each start of its node.",
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
@click.option("--ratio", type=float, required=True, help="Share of the blocks that each worker keeps: 0.5, or 1 for all.")
@click.option("--worker", default="", help="At this worker alone, or that of this replica.")
@on_pool
def evict_kv(pool: Pool, model: str, ratio: float, worker: str) -> None:
    """Drop a share of what is kept of a model's KV in host memory and on disk, coldest first, and say what was dropped.

    What is dropped is computed again when it is asked for; answers stay the same. Of what an engine has in its own memory
    vLLM can only drop all, and only while nothing runs: with a ratio of 1 idle engines are told to. `carpool get kv` shows
    what is kept.

    \b
    carpool evict-kv smollm2 --ratio 0.5
    carpool evict-kv smollm2 --ratio 1 --worker gpu-host-1
    """
    from ops.kv_orders import carried_out

    argument = {"model": model, "ratio": ratio, "worker": worker}
    _finish(pool, run(carried_out("evict-kv", argument, EVICT_S, pool.url, quiet=pool.as_json)))


@click.command("migrate-kv", short_help="Copy a model's KV from one worker to another.")
@click.argument("model")
@click.option(
    "--from", "source", required=True, metavar="WORKER", help="A worker, or a replica, which stands for its worker."
)
@click.option("--to", "target", required=True, metavar="WORKER", help="Likewise.")
@click.option(
    "--timeout-s", type=click.FloatRange(1, 3600), default=600.0, show_default=True, help="What came by then is kept."
)
@on_pool
def migrate_kv(pool: Pool, model: str, source: str, target: str, timeout_s: float) -> None:
    """Copy what a worker keeps of a model's KV to another worker, which pulls what it lacks; the source keeps its own.

    Do it before a model moves, so that its replica there need not compute its prompts' beginnings again.

    \b
    carpool migrate-kv smollm2 --from gpu-host-1 --to gpu-host-2
    carpool migrate-kv smollm2 --from smollm2-3-1-5be0cd19c1 --to gpu-host-2
    """
    from ops.kv_orders import carried_out

    argument = {"model": model, "source": source, "target": target, "timeout_s": timeout_s}
    _finish(pool, run(carried_out("migrate-kv", argument, timeout_s, pool.url, quiet=pool.as_json)))


def _finish(pool: Pool, result: dict[str, Any]) -> None:
    rows = result["transactions"]
    pool.tell(result, lambda: "\n".join(f"{result['model']} at {row['worker']}: {_told(row)}" for row in rows))
    if any(row["failed"] or not row["ended"] for row in rows):
        sys.exit(1)


def _told(row: dict[str, Any]) -> str:
    under_way = f"still under way: `carpool explain {row['transaction']}` tells more"
    return str(row["outcome"]) if row["ended"] else under_way
