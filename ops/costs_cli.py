"""``carpool profile``: a model's whole curves, measured on a replica that is idle (PRO-4)."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from ops.cli_common import Pool, on_pool, run

ASK_EVERY_S = 1.0
LEASE_S = 5.0
"""Who asks no more for so long wants nothing more: also one that was killed leaves nothing behind."""
ROUND_S_MAX = 900.0
CLASS_TOKENS = (256, 1024, 4096)
"""Prompts that stand for the three length classes."""


@click.command(short_help="Measure a model's curves on an idle replica, as YAML to paste.")
@click.argument("model")
@click.option("--rounds", default=1, show_default=True, type=click.IntRange(1, 10), help="How often each point is taken.")
@click.option("--batch-max", default=32, show_default=True, type=click.IntRange(1, 32), help="The largest batch.")
@on_pool
def profile(pool: Pool, model: str, rounds: int, batch_max: int) -> None:
    """Measure what a model's steps take: batches of 1 to 32, three lengths of prompts, where they stop to pay (the knee).

    One ready replica measures whenever it is idle; requests go first. Prints the curves and what to paste under
    spec.resources.costs. Ctrl-C ends it and leaves nothing behind.

    \b
    carpool profile smollm2
    carpool profile smollm2 --rounds 3
    """
    row = run(_measured(pool.url, model, rounds, batch_max))
    pool.tell(row, lambda: "\n".join(_told(row)))


async def _measured(nats_url: str, model: str, rounds: int, batch_max: int) -> dict[str, Any]:
    """The row of the kind of device that was measured, once every round is over."""
    import asyncio

    from ops.control import control
    from subjects.errors import CarpoolError

    async def ask(for_s: float) -> dict[str, Any]:
        argument = {"model": model, "for_s": for_s, "batch_max": batch_max}
        rows = (await control(nats_url, "profile", argument))["rows"]
        return max(rows, key=lambda row: (row["measured_unix_s"], row["kind"]))

    row: dict[str, Any] = {}
    try:
        for number in range(rounds):
            begun_s, told = time.monotonic(), -1
            row = await ask(LEASE_S)
            while not row["whole"]:
                if row["points"] != told:
                    told = row["points"]
                    click.echo(f"round {number + 1} of {rounds}: {told} points", err=True)
                if time.monotonic() - begun_s > ROUND_S_MAX:
                    raise CarpoolError(f"{model} was not idle for long enough within {ROUND_S_MAX:.0f} s: try again later")
                await asyncio.sleep(ASK_EVERY_S)
                row = await ask(LEASE_S)
            await ask(0.0)
        return row
    finally:
        if sys.exc_info()[0] is not None:
            await asyncio.shield(ask(0.0))


def _told(row: dict[str, Any]) -> list[str]:
    from profiles.costs import knee
    from subjects.messages import StepCosts

    costs = StepCosts(**row["costs"])
    lines = [f"{row['model']} on {row['kind']} with {row['engine'] or 'its engine'}: {row['points']} points"]
    lines.append(f"{'batch':>8} {'prompt':>8} {'prefill':>12} {'step':>10} {'tokens/s':>10}")
    cells: dict[tuple[int, int], dict[bool, dict[str, Any]]] = {}
    for point in row["measured"]:
        cells.setdefault((point["batch"], point["input_tokens"]), {})[point["decodes"]] = point["sums"]
    for (batch, tokens), sums in sorted(cells.items()):
        first, steps = sums.get(False), sums.get(True)
        prefill = f"{1e3 * first['busy_s'] / first['prompt_tokens']:.3f} ms/t" if first and first["prompt_tokens"] else "-"
        step_s = steps["busy_s"] / steps["steps"] if steps else 0.0
        rate = f"{steps['requests'] / steps['busy_s']:.0f}" if steps else "-"
        lines.append(f"{batch:>8} {tokens:>8} {prefill:>12} {f'{1e3 * step_s:.2f} ms' if steps else '-':>10} {rate:>10}")
    lines += [f"knee with {tokens} tokens each: a batch of {min(knee(costs, tokens), 9999):.0f}" for tokens in CLASS_TOKENS]
    lines += ["", "spec:", "  resources:", "    costs:", f"      {row['kind']}:"]
    lines += [f"        {part}: {value:.6g}" for part, value in row["costs"].items()]
    return lines
