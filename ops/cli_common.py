"""What the commands share: where the pool is, JSON output, running a coroutine."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
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
