"""``carpool gateway --processes N``: one gateway as several processes on one port.

This process serves nothing itself. It keeps the port, starts the processes, starts again whichever ends, and passes the end
on: on SIGTERM or SIGINT all finish what they have begun. Each is a gateway of its own on the bus, named after its number;
what one holds of requests dies with it alone. Bounds in requests (:class:`broker.core.requests.admission.Limits`) are
each process's own; the bound on bytes of bodies is the machine's, so it is shared out.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from broker.gateway.siblings import Place
from broker.http.listeners import base_url, reserve
from ops import logs
from ops.kept import REFUSED, Kept
from subjects.errors import ConfigError

PROCESSES_MAX = 64
STOP_S_MAX = 42.0
"""After SIGTERM the processes get this long: their 30 s for running requests, and what it takes to close."""
LISTEN_S_MAX = 60.0
"""From a process's start until it listens, which it does with a bus or without; then the gateway is given up."""
WATCHERS_S_MAX = 5.0
"""For what watches the processes to see that they have ended."""
_POLL_S = 0.05

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayProcesses:
    """What to start. ``flags`` are words of ``carpool gateway`` for each process; ``nats_url`` may hold credentials."""

    processes: int
    name: str
    host: str
    port: int
    nats_url: str
    flags: Sequence[str] = ()


async def run_processes(options: GatewayProcesses) -> int:
    """Serves until SIGTERM or SIGINT, or until a process cannot be kept running; returns the exit code.

    Raises:
        ConfigError: the port is taken, or there are too many processes.
    """
    logs.configure("gateway")
    if not 1 <= options.processes <= PROCESSES_MAX:
        raise ConfigError(f"--processes {options.processes}: use 1 to {PROCESSES_MAX}")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)  # again and again: it does no harm
    with (
        reserve(options.host, options.port) as reserved,
        tempfile.TemporaryDirectory(prefix="carpool-gateway-") as directory,
    ):
        port = int(reserved.getsockname()[1])
        group = _Group(options, port, Path(directory), stop)
        try:
            # One first: what is wrong with the flags is then said once.
            await group.start(0)
            for index in range(1, options.processes):
                if not stop.is_set():
                    await group.start(index)
            if not stop.is_set():
                log.info("gateway listens", url=base_url(options.host, port), processes=options.processes)
            await stop.wait()
        finally:
            await group.end()
    return group.code


class _Group:
    """The processes."""

    def __init__(self, options: GatewayProcesses, port: int, directory: Path, stop: asyncio.Event) -> None:
        self.code = 0
        self._options = options
        self._port = port
        self._directory = directory
        self._stop = stop
        self._kept: list[Kept] = []
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self, index: int) -> None:
        """Returns when the process listens, or when there is no use in waiting."""
        options = self._options
        place = Place(self._directory, index, options.processes)
        words = ["--host", options.host, "--port", str(self._port), "--id", f"{options.name}-{index}", *options.flags]
        words += ["--processes", str(options.processes), "--process", str(index), "--process-dir", str(self._directory)]
        # The bus's address may hold credentials, so it travels in the environment.
        environment = {**os.environ, "CARPOOL_NATS": options.nats_url}
        kept = Kept(f"process {index}", [sys.executable, "-m", "ops.cli", "gateway", *words], environment)
        await kept.start()
        self._kept.append(kept)
        kept_running = kept.keep_running(
            on_restart=partial(self._restarts, index),
            on_broken=self._broken,
            may_refuse=lambda: not place.socket_path(index).exists(),
        )
        watcher = asyncio.create_task(kept_running)
        watcher.add_done_callback(lambda _: self._refused(kept))
        self._watchers.append(watcher)
        deadline_s = time.monotonic() + LISTEN_S_MAX
        while not self._stop.is_set() and not place.socket_path(index).exists():
            if time.monotonic() > deadline_s:
                self._broken(f"{kept.name} does not listen {LISTEN_S_MAX:g} s after its start")
                return
            await asyncio.sleep(_POLL_S)

    async def end(self) -> None:
        """All at once, so that no request waits for another process's."""
        await asyncio.gather(*(kept.stop(STOP_S_MAX) for kept in self._kept))
        if self._watchers:
            _, late = await asyncio.wait(self._watchers, timeout=WATCHERS_S_MAX)
            for watcher in late:
                watcher.cancel()

    def _restarts(self, index: int, code: int) -> None:
        Place(self._directory, index, self._options.processes).socket_path(index).unlink(missing_ok=True)
        log.warning("a process of the gateway ended and is started again", process=index, code=code)

    def _broken(self, reason: str) -> None:
        log.error("the gateway goes down", reason=reason)
        self.code = 1
        self._stop.set()

    def _refused(self, kept: Kept) -> None:
        if kept.refused:
            self.code = REFUSED
            self._stop.set()
