"""``carpool event``: load that people know of beforehand, so that capacity is there when it comes (SCH-5)."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

import click

from ops.cli_common import bus_url, json_option, nats_option, pool_name_option, run

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class Moment(click.ParamType[float]):
    """A moment as Unix time: ``+90m`` from now, or a date and time, local unless it says its zone."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds since 1970."""
        if isinstance(value, int | float):
            return float(value)
        ahead = re.fullmatch(r"\+(\d+(?:\.\d+)?)([smhd])", value)
        if ahead is not None:
            return time.time() + float(ahead[1]) * _UNITS_S[ahead[2]]
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            self.fail(f"{value!r}: say for example +90m, 2027-01-31T09:00 or 2027-01-31T09:00+01:00", param, ctx)


def _ask(verb: str, argument: dict[str, Any], nats_url: str, pool_name: str) -> Any:
    from ops.control import control

    return run(control(bus_url(nats_url, pool_name), verb, argument))


def _clock(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


@click.group(short_help="Tell the scheduler of load that will come.")
def event() -> None:
    """Tell the scheduler of load that will come: a launch, a sale, a nightly batch.

    \b
    carpool event add launch --model smollm2 --begin +2d --end +3d --factor 3
    carpool event list
    carpool event remove launch
    """


@event.command("add")
@click.argument("name")
@click.option("--model", default="", help="Which model; without it all.")
@click.option("--begin", type=Moment(), default="+0s", help="When it begins: +90m, 2027-01-31T09:00. Default: now.")
@click.option("--end", type=Moment(), required=True, help="When it ends.")
@click.option("--factor", type=click.FloatRange(0.01, 1000), default=1.0, help="So many times the load there would be.")
@click.option("--at-least", type=click.FloatRange(0), default=0.0, help="Work to expect at least, in whole devices.")
@json_option
@nats_option
@pool_name_option
def add(
    name: str,
    model: str,
    begin: float,
    end: float,
    factor: float,
    at_least: float,
    as_json: bool,
    nats_url: str,
    pool_name: str,
) -> None:
    """Declare an event, or change the one of that name. Capacity is loaded shortly before it begins.

    +90m counts from now, for both ends. Only models whose file says `resources.costs` are planned ahead for.

    \b
    carpool event add launch --model smollm2 --begin +90m --end +4h --factor 3
    carpool event add batch --model smollm2 --begin 2027-01-31T22:00 --end 2027-02-01T01:00 --at-least 2
    """
    argument = {
        "name": name,
        "model": model,
        "begin_unix_s": begin,
        "end_unix_s": end,
        "factor": factor,
        "at_least": at_least,
    }
    result = _ask("declare", argument, nats_url, pool_name)
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(result).decode())
    else:
        click.echo(f"{name}: {result['model'] or 'all models'} from {_clock(begin)} to {_clock(end)}")


@event.command("remove")
@click.argument("name")
@nats_option
@pool_name_option
def remove(name: str, nats_url: str, pool_name: str) -> None:
    """Take an event back."""
    result = _ask("withdraw", {"name": name}, nats_url, pool_name)
    click.echo(f"{name}: removed" if result["changed"] else f"{name}: was not declared")


@event.command("list")
@json_option
@nats_option
@pool_name_option
def listed(as_json: bool, nats_url: str, pool_name: str) -> None:
    """Show what was declared."""
    from ops.models import print_table

    rows = _ask("get", {"what": "events"}, nats_url, pool_name) or []
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode({"events": rows}).decode())
    elif not rows:
        click.echo("no events")
    else:
        print_table(
            [
                {
                    "event": row["event"],
                    "model": row["model"] or "all",
                    "begin": _clock(row["begin_unix_s"]),
                    "end": _clock(row["end_unix_s"]),
                    "factor": row["factor"],
                    "at least": row["at_least"],
                }
                for row in rows
            ]
        )
