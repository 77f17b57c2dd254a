"""``python -m kvcache.node.main SETTINGS``: the node process, made by a worker's agent.

``SETTINGS`` is :class:`kvcache.node.settings.NodeSettings` as JSON; URLs with credentials come in ``CARPOOL_NATS`` and
``CARPOOL_REDIS``. Once it serves it writes one JSON line to standard output: ``{"node": .., "socket": .., "data": ..}``.
SIGTERM (and the end of standard input, if so set) stops it within the bound of its flush; a second one changes nothing.
Exit codes: 0 stopped, 2 bad settings, 3 the directory is used by another process, 4 it cannot listen, 5 the
host has not as much memory.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import os
import signal
import sys

import msgspec
import structlog

from kvcache.node.node import Node
from kvcache.node.settings import NATS_VARIABLE, REDIS_VARIABLE, Exit, NodeSettings
from kvcache.store.segments import StoreLocked
from subjects.bus import Bus
from subjects.errors import CarpoolError, place_of
from subjects.logs import log_json
from subjects.tasks import end_tasks

log = structlog.get_logger(__name__)


async def run(settings: NodeSettings) -> int:
    """The life of the process; returns its exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if settings.exit_with_stdin:
        loop.add_reader(sys.stdin.fileno(), _stdin_told, stop)
    try:
        node = Node(settings)
    except StoreLocked as error:
        log.error("the KV node cannot have its directory", error=str(error))
        return Exit.LOCKED
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        log.error("the KV node cannot have its memory", error=str(error), memory_bytes=settings.host_bytes_max)
        return Exit.MEMORY
    try:
        await node.open(alone=not os.environ.get(NATS_VARIABLE))
    except OSError as error:
        log.error("the KV node cannot listen", error=str(error))
        return Exit.LISTEN
    ready = {"node": node.name, "socket": settings.socket_path, "data": node.exchange.server.address}
    sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
    sys.stdout.flush()
    joining = loop.create_task(_join(node))
    await stop.wait()
    await end_tasks([joining])
    bus = joining.result() if not joining.cancelled() and joining.exception() is None else None
    if settings.exit_with_stdin:
        loop.remove_reader(sys.stdin.fileno())
    await node.close()
    if bus is not None:
        await bus.close()
    return 0


async def _join(node: Node) -> Bus | None:
    """Bus and Redis, once engines are served: their clients take longest to import."""
    bus: Bus | None = None
    try:
        urls = os.environ.get(NATS_VARIABLE, "").split()
        if urls:
            module = await asyncio.to_thread(importlib.import_module, "subjects.nats.bus")
            bus = await module.NatsBus.connect(urls, name=f"{node.settings.worker}-kv", wait=True)
            await node.join(bus)
        redis_url = os.environ.get(REDIS_VARIABLE, "")
        if redis_url:
            module = await asyncio.to_thread(importlib.import_module, "kvcache.shared.index")
            node.share(module.RedisIndex(redis_url, node.name, on_lost=node.policy.all_shared))
    except CarpoolError as error:
        log.error("the KV node goes without others", error=str(error))
    except Exception as error:  # a client that is not installed, for one: its host is served all the same
        log.error("the KV node goes without others", error=place_of(error))
    return bus


def _stdin_told(stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        stop.set()


def main() -> int:
    """Reads the settings and serves."""
    import uvloop

    log_json()
    try:
        settings = msgspec.json.decode(sys.argv[1] if len(sys.argv) == 2 else "", type=NodeSettings)
    except msgspec.MsgspecError as error:
        sys.stderr.write(f"settings of the KV node: {error}\n")
        return Exit.SETTINGS
    return uvloop.run(run(settings))


if __name__ == "__main__":
    sys.exit(main())
