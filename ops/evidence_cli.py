"""Commands that show what the pool does: ``prove``, ``replay-scheduler`` and ``bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ops.cli_common import json_option, run


@click.command(short_help="Run the fixed oracles of a part on real processes.")
@click.argument("part", type=click.Choice(["main-job", "scheduler", "capacity", "kv"]))
@click.option("--only", multiple=True, help="Run only this oracle of the part. May be repeated.")
@click.option("--seed", default=0, show_default=True, help="Another seed gives other prompts and other bursts.")
@json_option
def prove(part: str, only: tuple[str, ...], seed: int, as_json: bool) -> None:
    """Run the fixed oracles of a part on real processes; exit code 0 when every bound held.

    \b
    carpool prove main-job --json
    carpool prove main-job --only cancels --only kill9
    carpool prove kv --json
    """
    from ops.prove import prove as run_proof

    result = run(run_proof(part, lambda line: click.echo(f"prove: {line}", err=True), only, seed))
    _print(result, as_json)
    sys.exit(0 if result["ok"] else 1)


@click.command("replay-scheduler", short_help="Decide again what a scheduler's recording holds, and compare.")
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def replay_scheduler(file: Path, as_json: bool) -> None:
    """Feed a scheduler's recording to a fresh one and compare what it orders; exit code 0 when it is the very same.

    \b
    carpool up --record-scheduler decisions.rec
    carpool replay-scheduler decisions.rec
    """
    from ops.replay_scheduler import replay_and_tell

    sys.exit(replay_and_tell(file, as_json=as_json))


@click.group(short_help="Measure a part beside what bounds it, in the same run.")
def bench() -> None:
    """Measure a part beside what bounds it, in the same run: what counts is the ratio, not the figure.

    \b
    carpool bench gateway --json
    carpool bench kv --json
    """


@bench.command("gateway")
@click.option("--peers", is_flag=True, help="Beside the routers of others that are on PATH, at 16 and 256 connections.")
@click.option("--seconds", type=float, help="Length of each measurement.  [default: 8, with --peers 4]")
@click.option("--connections", default=16, show_default=True, help="Connections of the load, without --peers.")
@json_option
def bench_gateway(peers: bool, seconds: float | None, connections: int, as_json: bool) -> None:
    """Measure the gateway beside a bare echo server in the same run.

    With --peers: vllm-router, smg, sglang-router and litellm, each installed by pip into an environment of its own whose bin
    is on PATH (pip install vllm-router smg 'litellm[proxy]'). A quarter of an hour on two cores; always one line of JSON.

    \b
    carpool bench gateway --json
    PATH="$HOME/peers/bin:$PATH" carpool bench gateway --peers
    """
    from ops.bench import gateway

    if peers:
        from ops.bench.against_peers import Plan, bench_against_peers

        _print(run(bench_against_peers(_say, Plan() if seconds is None else Plan(seconds=seconds))), as_json=True)
        return
    _print(run(gateway.bench_gateway(_say, seconds=8.0 if seconds is None else seconds, connections=connections)), as_json)


@bench.command("kv")
@click.option(
    "--only",
    multiple=True,
    help="Only store, transfer, hotness, affinity, replay, codecs or engine. May be repeated.",
)
@click.option("--seed", default=0, show_default=True, help="Another seed gives other prompts, documents and accesses.")
@click.option(
    "--gib",
    type=click.FloatRange(0.01, 4096),
    default=2.0,
    show_default=True,
    help="GiB that the disk tier writes and reads in a round.",
)
@click.option(
    "--directory", type=click.Path(path_type=Path, file_okay=False), help="On which disk.  [default: the temporary one]"
)
@click.option("--text", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="Text that codecs are tried on.")
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="Mooncake trace to replay.")
@json_option
def bench_kv(
    only: tuple[str, ...],
    seed: int,
    gib: float,
    directory: Path | None,
    text: Path | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Measure the KV tiers: disk, transfer, reuse by a real engine, index, codecs, and the policy on a public trace.

    \b
    carpool bench kv --json
    carpool bench kv --only store --gib 8 --directory /mnt/nvme
    """
    from ops.bench import kv

    settings = kv.KvBench(say=_say, seed=seed, store_bytes=int(gib * (1 << 30)), directory=directory, text=text, trace=trace)
    _print(run(kv.bench_kv(settings, only)), as_json)


def _say(line: str) -> None:
    click.echo(f"bench: {line}", err=True)


def _print(result: dict[str, Any], as_json: bool) -> None:
    import json

    click.echo(json.dumps(result) if as_json else json.dumps(result, indent=2))
