"""``carpool event``: load that people know of beforehand, so that capacity is there when it comes (SCH-5)."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

import click

from ops.cli_common import Pool, clock, on_pool

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
@on_pool
def add(pool: Pool, name: str, model: str, begin: float, end: float, factor: float, at_least: float) -> None:
    """Declare an event, or change the one of that name. Capacity is loaded shortly before it begins.

    +90m counts from now, for both ends. Only models whose file says `resources.costs` are planned ahead for.

    \b
    carpool event add launch --model smollm2 --begin +90m --end +4h --factor 3
    carpool event add batch --model smollm2 --begin 2027-01-31T22:00 --end 2027-02-01T01:00 --at-least 2
    """
    times = {"begin_unix_s": begin, "end_unix_s": end}
    result = pool.ask("declare", name=name, model=model, factor=factor, at_least=at_least, **times)
    pool.tell(result, lambda: f"{name}: {result['model'] or 'all models'} from {_day(begin)} to {_day(end)}")


@event.command("remove")
@click.argument("name")
@on_pool
def remove(pool: Pool, name: str) -> None:
    """Take an event back."""
    result = pool.ask("withdraw", name=name)
    pool.tell(result, lambda: f"{name}: removed" if result["changed"] else f"{name}: was not declared")


@event.command("list")
@on_pool
def listed(pool: Pool) -> None:
    """Show what was declared."""
    from ops.models import print_table

    rows = pool.ask("get", what="events") or []
    if pool.as_json or not rows:
        pool.tell({"events": rows}, lambda: "no events")
        return
    print_table(
        [
            {
                "event": row["event"],
                "model": row["model"] or "all",
                "begin": _day(row["begin_unix_s"]),
                "end": _day(row["end_unix_s"]),
                "factor": row["factor"],
                "at least": row["at_least"],
            }
            for row in rows
        ]
    )


def _day(unix_s: float) -> str:
    return clock(unix_s, "%Y-%m-%d %H:%M")
