"""The parts as processes of their own: ``carpool gateway``, ``carpool scheduler``, ``carpool worker``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ops import logs
from ops.joined import check_nats


async def gateway(
    *,
    nats_urls: Sequence[str],
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
    await check_nats(",".join(nats_urls), must_answer=False)
    config = GatewayConfig(
        nats_urls=tuple(nats_urls),
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
    *, nats_urls: Sequence[str], name: str, state_dir: Path, shards: int, policy: str | None, record: Path | None
) -> int:
    """Decides until SIGTERM."""
    from broker.scheduler.policies import DEFAULT_POLICY
    from broker.scheduler.shell import SchedulerConfig, run_scheduler

    logs.configure("scheduler")
    await check_nats(",".join(nats_urls), must_answer=False)
    return await run_scheduler(
        SchedulerConfig(
            nats_urls=tuple(nats_urls),
            name=name,
            state_dir=state_dir,
            queue_shards=shards,
            policy=policy or DEFAULT_POLICY,
            record=record,
        )
    )


async def worker(
    *,
    nats_urls: Sequence[str],
    name: str,
    state_dir: Path,
    devices: Sequence[str],
    threads: int,
    shards: int,
    step_turns: bool | None = None,
    kv: Mapping[str, Any],
    redis_url: str = "",
) -> int:
    """Runs an agent, its replicas and its KV node until SIGTERM. ``kv`` is by the names of ``kv_cli.KV_FLAGS``."""
    from workers.agent import AgentConfig, default_name, run_agent
    from workers.devices import parse_devices
    from workers.kv_config import kv_config

    logs.configure("worker")
    await check_nats(",".join(nats_urls), must_answer=False)
    name = name or default_name()
    config = AgentConfig(
        name=name,
        nats_urls=tuple(nats_urls),
        state_dir=state_dir / "worker",
        devices=parse_devices(devices),
        kv=kv_config(kv, directory=state_dir / "worker" / f"kv-{name}", redis_url=redis_url),
        threads=threads,
        queue_shards=shards,
        step_turns=step_turns,
    )
    return await run_agent(config)
