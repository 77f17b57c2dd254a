"""The parts as processes of their own: ``carpool gateway``, ``carpool scheduler``, ``carpool worker``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ops import logs
from ops.cli_common import bus_url
from ops.joined import check_nats
from ops.paths import pool_state


async def gateway(
    nats_url: str,
    name: str,
    host: str,
    port: int,
    api_keys: Path | None,
    allow_open: bool,
    shards: int,
    place: tuple[Path, int, int] | None = None,
) -> int:
    """Serves HTTP and the NATS ingress until SIGTERM. ``place``: directory, number and count of processes on the port."""
    from broker.gateway.app import HttpOptions
    from broker.gateway.gateway import GatewayOptions
    from broker.gateway.main import GatewayConfig, run_gateway
    from broker.gateway.siblings import Place

    logs.configure("gateway" if place is None else f"gateway-{place[1]}")
    http = HttpOptions()
    if place is not None:
        http = replace(http, bodies_bytes_max=http.bodies_bytes_max // place[2])
    await check_nats(nats_url, must_answer=False)
    config = GatewayConfig(
        nats_urls=tuple(nats_url.split(",")),
        host=host,
        port=port,
        api_keys=api_keys,
        allow_open=allow_open,
        gateway=GatewayOptions(name=name, queue_shards=shards),
        http=http,
        place=None if place is None else Place(*place),
    )
    return await run_gateway(config)


async def scheduler(
    *, nats_url: str, name: str, state_dir: Path | None, shards: int, policy: str | None, record: Path | None
) -> int:
    """Decides until SIGTERM."""
    from broker.scheduler.policies import DEFAULT_POLICY
    from broker.scheduler.shell import SchedulerConfig, run_scheduler

    logs.configure("scheduler")
    urls = bus_url(nats_url)
    await check_nats(urls, must_answer=False)
    return await run_scheduler(
        SchedulerConfig(
            nats_urls=tuple(urls.split(",")),
            name=name,
            state_dir=state_dir or pool_state("default"),
            queue_shards=shards,
            policy=policy or DEFAULT_POLICY,
            record=record,
        )
    )


async def worker(
    *,
    nats_url: str,
    name: str,
    state_dir: Path | None,
    devices: Sequence[str],
    threads: int,
    shards: int,
    step_turns: bool | None,
    redis_url: str,
    **kv: Any,
) -> int:
    """Runs an agent, its replicas and its KV node until SIGTERM. ``kv`` is by the names of ``kv_cli.KV_FLAGS``."""
    from workers.agent import AgentConfig, default_name, run_agent
    from workers.devices import parse_devices
    from workers.kv_config import kv_config

    logs.configure("worker")
    urls = bus_url(nats_url)
    await check_nats(urls, must_answer=False)
    name, state = name or default_name(), (state_dir or pool_state("default")) / "worker"
    config = AgentConfig(
        name=name,
        nats_urls=tuple(urls.split(",")),
        state_dir=state,
        devices=parse_devices(devices),
        kv=kv_config(kv, directory=state / f"kv-{name}", redis_url=redis_url),
        threads=threads,
        queue_shards=shards,
        step_turns=step_turns,
    )
    return await run_agent(config)
