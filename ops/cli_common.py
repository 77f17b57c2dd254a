"""What the commands share: where the pool is, JSON output, running a coroutine."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import click

nats_option = click.option(
    "--nats",
    "nats_url",
    envvar="CARPOOL_NATS",
    default="",
    help="Bus to join, nats://host:port. Default: $CARPOOL_NATS, else the pool that `carpool up` runs here.",
)
pool_name_option = click.option(
    "--name", "pool_name", default="default", show_default=True, help="Which pool of this machine."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on one line.")


def bus_url(nats_url: str, pool_name: str = "default") -> str:
    """The given bus, else that of the pool that runs here.

    Raises:
        ConfigError: no such pool runs.
    """
    if nats_url:
        return nats_url
    from ops.paths import pool_state
    from ops.supervisor import running_pool
    from subjects.errors import ConfigError

    endpoints = running_pool(pool_state(pool_name))
    if endpoints is None:
        start = "carpool up" if pool_name == "default" else f"carpool up --name {pool_name}"
        raise ConfigError(
            f"no pool named {pool_name!r} runs on this machine: start it with `{start}`, or give --nats nats://host:4222"
        )
    return endpoints.nats_url


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """The result of ``main``; Ctrl-C ends it with exit code 130."""
    import uvloop

    try:
        return uvloop.run(main)
    except KeyboardInterrupt:
        sys.exit(130)


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool that a command is about, and how it is to answer."""

    nats_url: str
    name: str
    as_json: bool

    @property
    def url(self) -> str:
        """Its bus; see :func:`bus_url`."""
        return bus_url(self.nats_url, self.name)

    def ask(self, verb: str, **argument: Any) -> Any:
        """The scheduler's answer to a verb of ``ctl``."""
        from ops.control import control

        return run(control(self.url, verb, argument))

    def tell(self, result: Any, told: Callable[[], str]) -> None:
        """Prints what was asked for, as JSON or for people."""
        import msgspec

        click.echo(msgspec.json.encode(result).decode() if self.as_json else told())


def on_pool(command: Callable[..., None]) -> Callable[..., None]:
    """Options that say which pool, given to ``command`` as its first argument."""

    @json_option
    @nats_option
    @pool_name_option
    @functools.wraps(command)
    def given(as_json: bool, nats_url: str, pool_name: str, **rest: Any) -> None:
        command(Pool(nats_url, pool_name, as_json), **rest)

    return given


def clock(unix_s: float, form: str = "%H:%M:%S") -> str:
    """Local time."""
    return time.strftime(form, time.localtime(unix_s))
