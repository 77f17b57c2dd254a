"""The gateway as a process: bus, gateway, HTTP server, NATS ingress, signals."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from broker.gateway.app import HttpApp, HttpOptions
from broker.gateway.gateway import Gateway, GatewayOptions
from broker.gateway.keys import ApiKeys
from broker.gateway.nats_ingress import NatsIngress
from broker.gateway.siblings import Place, Siblings
from broker.http.listeners import is_loopback
from broker.http.server import HttpServer
from subjects.errors import ConfigError
from subjects.nats.bus import NatsBus

DESCRIPTORS_MAX = 1024 * 1024
"""Of this process: each connection takes one, and shells often allow 1,024 where the system allows far more."""

GC_THRESHOLDS = (10_000, 20, 50)
"""Python's own (700, 10, 10) looks at all that lives many times a second, for garbage that no request makes: what belongs to
a request goes by reference counts, and a test sees to that."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """What ``carpool gateway`` is told. ``nats_urls`` may hold credentials: never log it."""

    nats_urls: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    """0 takes any free one."""
    api_keys: Path | None = None
    allow_open: bool = False
    shutdown_s: float = 30.0
    """Running requests may finish within this time after SIGTERM."""
    place: Place | None = None
    """Which of several processes on one port this is; None: the only one, which shares its port with nobody."""
    gateway: GatewayOptions = field(default_factory=GatewayOptions)
    http: HttpOptions = field(default_factory=HttpOptions)


async def run_gateway(config: GatewayConfig, *, on_ready: Callable[[str], None] | None = None) -> int:
    """Serves until SIGTERM or SIGINT, or until a part of it fails; returns the exit code.

    ``on_ready`` gets the base URL once connections are accepted.

    Raises:
        ConfigError: one line with the flag and the remedy.
    """
    keys = ApiKeys.load(config.api_keys) if config.api_keys is not None else None
    if keys is None and not config.allow_open and not is_loopback(config.host):
        remedy = "give --api-keys FILE, or --allow-open if that is meant"
        raise ConfigError(f"--host {config.host}: others could use the pool without a key; {remedy}")
    _take_descriptors()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        bus = await NatsBus.connect(
            config.nats_urls, name=config.gateway.name, shards=config.gateway.queue_shards, wait=True
        )
        stack.push_async_callback(bus.close)
        domains = {} if keys is None else keys.trust_domains
        gateway = Gateway(bus, dataclasses.replace(config.gateway, trust_domains=domains))
        siblings = None if config.place is None else Siblings(config.place, gateway.metrics_text)
        app = HttpApp(gateway, config.http, keys, metrics=None if siblings is None else siblings.metrics)
        server = HttpServer(app, host=config.host, port=config.port, shared_port=siblings is not None)
        ingress = NatsIngress(bus, gateway)
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        await ingress.start()
        stack.push_async_callback(ingress.stop)
        await server.start()
        stack.push_async_callback(server.stop)
        if siblings is not None:
            await siblings.start()
            stack.push_async_callback(siblings.stop)
        log.info("gateway listens", url=server.url, ingress=gateway.ingress, keys=keys is not None)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        if on_ready is not None:
            on_ready(server.url)
        gateway.broken.add_done_callback(lambda _: stop.set())
        await stop.wait()
        started_s = time.monotonic()
        # A gateway with a part missing cannot finish what runs: its clients are told so, and may ask again.
        shutdown_s = 0.0 if gateway.broken.done() else config.shutdown_s
        log.info("gateway goes down; running requests may finish", within_s=shutdown_s)
        if siblings is not None:
            server.leave_port()
        await ingress.stop_taking()
        await gateway.drain(shutdown_s)
    log.info("gateway is down", took_s=round(time.monotonic() - started_s, 1))
    return 1 if gateway.broken.done() else 0


def _take_descriptors() -> None:
    """As many as we may have; nobody need know of ``ulimit``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
