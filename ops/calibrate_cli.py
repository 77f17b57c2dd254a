"""``carpool calibrate``: flags, progress, the table for people and the JSON for programs."""

from __future__ import annotations

from pathlib import Path

import click

from ops.cli_common import json_option, pool_name_option, run


@click.command(short_help="Find this site's thresholds of TWU.")
@click.option("--endpoint", default="", metavar="URL", help="A running pool, http://127.0.0.1:8080. Default: the simulator.")
@click.option("--model", "models", multiple=True, help="The smallest first; up to three. May be repeated.")
@click.option(
    "--rounds", default=3, show_default=True, type=click.IntRange(1, 9), help="In the simulator; the median counts."
)
@click.option("--quick", is_flag=True, help="In the simulator: coarse, in a few seconds.")
@click.option("--seed", default=1, show_default=True, type=click.IntRange(min=0), help="All loads are drawn from it.")
@click.option("--minutes", default=10.0, show_default=True, type=click.FloatRange(0.5, 120), help="Bound on a live run.")
@click.option("--rps", default=0.5, show_default=True, type=click.FloatRange(0.01, 1000), help="First load of a live run.")
@click.option("--step-s", default=15.0, show_default=True, type=click.FloatRange(3, 300), help="Length of one live load.")
@click.option("--ttft-ms", default=2000, show_default=True, type=click.IntRange(1, 600_000), help="Target of a live run.")
@click.option("--tpot-ms", default=100, show_default=True, type=click.IntRange(1, 60_000), help="Target of a live run.")
@click.option("--input-max", default=1024, show_default=True, type=click.IntRange(16, 131_072), help="Longest live prompt.")
@click.option("--elsewhere", is_flag=True, help="The endpoint may be on another host, which is loaded to its limit.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Default: the pool's state directory.")
@json_option
@pool_name_option
def calibrate(
    endpoint: str,
    models: tuple[str, ...],
    rounds: int,
    quick: bool,
    seed: int,
    minutes: float,
    rps: float,
    step_s: float,
    ttft_ms: int,
    tpot_ms: int,
    input_max: int,
    elsewhere: bool,
    output: Path | None,
    as_json: bool,
    pool_name: str,
) -> None:
    """Find the levels of TWU at which a device is full, and free, on this site.

    Two stages, each up to the load at which the SLO breaks: the smallest model alone, then all models with 60 % short, 30 %
    medium and 10 % long prompts. TWU at the second break, times 0.8, is written to a file, by which `carpool get devices`
    tells each device's TWU from then on.

    \b
    carpool calibrate                                       in the simulator: 3.8B, 8B and 14B on one GPU
    carpool calibrate --model 8B --model 14B --json
    carpool calibrate --endpoint http://127.0.0.1:8080      all models of a running pool, up to its limit
    carpool calibrate --endpoint http://127.0.0.1:8080 --model small --model large --minutes 5 --ttft-ms 4000
    """
    import json
    from dataclasses import asdict

    from ops.calibrate import calibrate_simulated, write
    from ops.paths import pool_state

    path = output or pool_state(pool_name) / "twu-thresholds.json"

    def say(line: str) -> None:
        click.echo(f"calibrate: {line}", err=True)

    if endpoint:
        from ops.calibrate_live import LiveOptions, calibrate_live

        options = LiveOptions(
            endpoint=endpoint,
            models=models,
            ttft_s=ttft_ms / 1000,
            tpot_s=tpot_ms / 1000,
            step_s=step_s,
            minutes=minutes,
            first_rps=rps,
            input_tokens_max=input_max,
            seed=seed,
            elsewhere=elsewhere,
        )
        found = run(calibrate_live(options, say))
    else:
        found = calibrate_simulated(models or ("3.8B", "8B", "14B"), seed, rounds, say, quick=quick)
    write(found, path)
    if as_json:
        click.echo(json.dumps(asdict(found) | {"file": str(path)}))
        return
    click.echo(f"{'stage':24}{'requests/s':>12}{'tokens/s':>12}{'late':>8}{'TWU':>8}{'in use':>8}")
    for stage in found.stages:
        use = f"{stage.utilisation:>8.0%}" if stage.utilisation is not None else f"{'-':>8}"
        click.echo(f"{stage.name:24}{stage.rps:>12.2f}{stage.tokens_per_s:>12.0f}{stage.late:>8.1%}{stage.twu:>8.3f}{use}")
    click.echo(
        f"a device is full above a TWU of {found.twu_full:.3f} and free below {found.twu_free:.3f} (of {found.measured_on})"
    )
    click.echo(f"written to {path}")
