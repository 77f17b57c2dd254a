"""The embedded set: nats-server, Valkey, gateway, scheduler and worker agent as child processes of one supervisor.

The supervisor keeps each part running (bounded restarts, the same ports), ends them in an order that lets running requests
finish, and ties every child to its own life: when it is killed, the kernel kills them (``ops.tether``).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec

from ops.kept import Kept
from ops.servers import free_port, nats_server_argv, port_is_free, valkey_server_argv
from subjects.errors import CarpoolError, ConfigError

READY_S_MAX = 60.0
"""How long the set may take until its endpoint answers and a device is known."""
STOP_S_MAX: dict[str, float] = {"gateway": 45.0, "scheduler": 10.0, "worker": 60.0, "valkey": 10.0, "nats": 10.0}
"""After SIGTERM a part gets this long before SIGKILL."""
_STOP_ORDER = ("gateway", "scheduler", "worker", "valkey", "nats")
_POLL_S = 0.1
LOCK_S_MAX = 0.3
"""A command that looks whether a pool runs holds its lock for a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """What to start, and where. A port of 0 means any free one; a URL means: join that server, start none."""

    state_dir: Path
    host: str = "127.0.0.1"
    http_port: int = 0
    nats_url: str = ""
    nats_port: int = 0
    nats_monitor_port: int = 0
    """The embedded server's HTTP monitoring; 0 opens none."""
    redis_url: str = ""
    redis_port: int = 0
    devices: tuple[str, ...] = ()
    gateway_flags: tuple[str, ...] = ()
    worker_flags: tuple[str, ...] = ()
    scheduler_flags: tuple[str, ...] = ()
    worker: bool = True
    more: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parts beside the usual ones: a name and the words after ``carpool``, such as a second worker or a standby scheduler.
    The first word says what it is; it joins the pool's own servers and keeps its state in a folder of its name."""
    environment: Mapping[str, str] = field(default_factory=dict)


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a running pool; kept in its state directory while it runs."""

    pid: int
    http_url: str
    nats_url: str
    redis_url: str


def running_pool(state_dir: Path) -> Endpoints | None:
    """The endpoints of the pool that runs in ``state_dir``, or None when none runs there.

    Its lock tells, not its pid: a file that a killed pool left behind may name a pid that is somebody else's by now.
    """
    try:
        with (state_dir / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        pass  # held by the pool
    except OSError:
        return None
    try:
        return msgspec.json.decode((state_dir / "endpoints.json").read_bytes(), type=Endpoints)
    except (OSError, msgspec.MsgspecError):
        return None


class Pool:
    """The embedded set. ``async with Pool(options) as pool`` starts it, waits until it serves, and ends it at the exit."""

    def __init__(self, options: PoolOptions, *, say: Callable[[str], None] = lambda _line: None) -> None:
        self._options = options
        self._say = say
        self._parts: dict[str, Kept] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._lock: IO[bytes] | None = None
        self._broken: asyncio.Future[str] | None = None
        self._serving = False
        self.endpoints: Endpoints | None = None

    async def __aenter__(self) -> Pool:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def http_url(self) -> str:
        """Base URL of the gateway, without ``/v1``."""
        assert self.endpoints is not None
        return self.endpoints.http_url

    @property
    def nats_url(self) -> str:
        """URL of the bus."""
        assert self.endpoints is not None
        return self.endpoints.nats_url

    def pid(self, part: str) -> int:
        """Process id of a part now (``gateway``, ``scheduler``, ``worker``, ``nats``, ``valkey``)."""
        process = self._parts[part].process
        assert process is not None
        return process.pid

    def log_path(self, part: str) -> Path:
        """Where a part logs."""
        return self._options.state_dir / "logs" / f"{part}.log"

    async def start(self) -> None:
        """Starts everything and returns when the endpoint answers.

        Raises:
            ConfigError: a given port is taken, a given server cannot serve, or another pool runs in the same directory.
            CarpoolError: a part does not come up; the message ends with the tail of its log.
        """
        from ops.joined import check_nats

        options = self._options
        state = options.state_dir
        try:
            (state / "logs").mkdir(parents=True, exist_ok=True)
            state.chmod(0o700)
            self._take_lock(state)
        except OSError as error:
            raise ConfigError(f"{state}: cannot hold a pool's state ({error.strerror}); set $CARPOOL_STATE") from None
        self._broken = asyncio.get_running_loop().create_future()
        http_port = self._port("--port", options.http_port)
        environment = {**os.environ, **options.environment, "PYTHONUNBUFFERED": "1"}

        nats_url = options.nats_url
        if not nats_url:
            port = self._port("--nats-port", options.nats_port)
            await self._run(
                "nats", nats_server_argv(state / "nats", port, monitor_port=options.nats_monitor_port or None), environment
            )
            nats_url = f"nats://127.0.0.1:{port}"
            await self._until("nats", lambda: _listens("127.0.0.1", port))
        else:
            await check_nats(nats_url)
        redis_url = options.redis_url
        if not redis_url:
            port = self._port("--redis-port", options.redis_port)
            await self._run("valkey", valkey_server_argv(state / "valkey", port), environment)
            redis_url = f"redis://127.0.0.1:{port}/0"

        # Server addresses may hold credentials, so they travel in the environment and not in argument lists.
        environment |= {"CARPOOL_NATS": nats_url, "CARPOOL_REDIS": redis_url}
        carpool = [sys.executable, "-m", "ops.cli"]
        scheduler = [*carpool, "scheduler", "--state-dir", str(state), *options.scheduler_flags]
        await self._run("scheduler", scheduler, environment)
        if options.worker:
            devices = [flag for device in options.devices for flag in ("--device", device)]
            argv = [*carpool, "worker", "--state-dir", str(state), *devices, *options.worker_flags]
            await self._run("worker", argv, environment)
        for name, (command, *words) in options.more.items():
            await self._run(name, [*carpool, command, "--state-dir", str(state / name), *words], environment)
        gateway = [*carpool, "gateway", "--host", options.host, "--port", str(http_port), *options.gateway_flags]
        await self._run("gateway", gateway, environment)

        host = f"[{options.host}]" if ":" in options.host else options.host
        self.endpoints = Endpoints(
            pid=os.getpid(), http_url=f"http://{host}:{http_port}", nats_url=nats_url, redis_url=redis_url
        )
        await self._until_serving()
        self._serving = True
        temporary = state / "endpoints.json.new"
        temporary.touch(mode=0o600)
        temporary.write_bytes(msgspec.json.encode(self.endpoints))
        temporary.replace(state / "endpoints.json")

    async def wait_broken(self) -> str:
        """Returns the reason when a part could not be kept running."""
        assert self._broken is not None
        return await asyncio.shield(self._broken)

    async def stop(self) -> None:
        """Ends all parts in order; running requests finish within the gateway's bound. Calling again does nothing."""
        for part in self._parts.values():
            part.stopping = True
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers.clear()
        more = {name: words[0] for name, words in self._options.more.items()}
        for kind in _STOP_ORDER:
            for name in (*(name for name, command in more.items() if command == kind), kind):
                if name in self._parts:
                    await self._parts[name].stop(STOP_S_MAX[kind])
        self._parts.clear()
        if self._lock is not None:
            with contextlib.suppress(OSError):
                (self._options.state_dir / "endpoints.json").unlink()
            self._lock.close()
            self._lock = None

    def _take_lock(self, state: Path) -> None:
        lock = (state / "lock").open("wb")
        deadline_s = time.monotonic() + LOCK_S_MAX
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline_s:
                    lock.close()
                    raise ConfigError(f"another pool runs in {state}: end it, or give this one another --name") from None
                time.sleep(LOCK_S_MAX / 10)
        # The lock goes with the process, so a killed supervisor leaves none behind; its word on where it was goes now.
        self._lock = lock
        (state / "endpoints.json").unlink(missing_ok=True)

    def _port(self, flag: str, wanted: int) -> int:
        host = self._options.host if flag == "--port" else "127.0.0.1"
        try:
            free = free_port(host)
        except OSError:
            raise ConfigError(f"--host {host}: is no address of this machine") from None
        if not wanted:
            return free
        if not port_is_free(host, wanted):
            raise ConfigError(f"{flag} {wanted}: the port is taken on {host}; give another one, or 0 for any free port")
        return wanted

    async def _run(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        part = Kept(name, argv, environment, log=self.log_path(name))
        self._parts[name] = part
        await part.start()
        kept = part.keep_running(
            on_restart=partial(self._restarts, part), on_broken=self._break, may_refuse=lambda: not self._serving
        )
        self._watchers.append(asyncio.create_task(kept))

    def _restarts(self, part: Kept, code: int) -> None:
        if self._serving:
            self._say(f"{part.name} ended with code {code}: starting it again")

    def _break(self, reason: str) -> None:
        assert self._broken is not None
        if not self._broken.done():
            self._broken.set_result(reason)

    async def _until(self, part: str, ready: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + READY_S_MAX
        while not ready():
            self._check_alive(part)
            if time.monotonic() > deadline_s:
                raise CarpoolError(f"{part} is not ready after {READY_S_MAX:.0f} s; its log ends:\n{self._tail(part)}")
            await asyncio.sleep(_POLL_S)

    def _check_alive(self, part: str) -> None:
        if self._parts[part].refused:
            last = self._parts[part].log_tail(1).removeprefix("carpool: ")
            raise ConfigError(last or f"{part} does not start; see {self.log_path(part)}")
        if len(self._parts[part].restarts) >= 3:
            raise CarpoolError(f"{part} does not start; its log ends:\n{self._tail(part)}")

    def _tail(self, part: str) -> str:
        return self._parts[part].log_tail()

    async def _until_serving(self) -> None:
        import httpx

        from ops.control import control

        assert self.endpoints is not None
        deadline_s = time.monotonic() + READY_S_MAX
        missing = "the gateway's /ready"
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
            while time.monotonic() < deadline_s:
                for part in self._parts:
                    self._check_alive(part)
                try:
                    response = await client.get(f"{self.endpoints.http_url}/ready")
                    if response.status_code == 200:
                        missing = "a device from the worker agent"
                        devices = await control(self.endpoints.nats_url, "get", {"what": "devices"}, timeout_s=2.0)
                        if not self._options.worker or devices:
                            return
                except (httpx.HTTPError, CarpoolError):
                    pass
                await asyncio.sleep(_POLL_S)
        tails = "\n".join(f"--- {name}\n{part.log_tail(4)}" for name, part in self._parts.items())
        raise CarpoolError(f"not ready after {READY_S_MAX:.0f} s: waited for {missing}\n{tails}")


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((host, port)) == 0


def end_start_on_signal() -> None:
    """Until :func:`until_signal` takes over, the first SIGINT or SIGTERM cancels the calling task; more are harmless."""
    loop = asyncio.get_running_loop()
    starting = asyncio.current_task()
    told = False

    def end() -> None:
        nonlocal told
        if not told and starting is not None:
            told = True
            starting.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)


async def until_signal(pool: Pool) -> int:
    """Waits for SIGINT, SIGTERM, or a part that cannot be kept running; returns the exit code. More signals are harmless."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    broken = asyncio.create_task(pool.wait_broken())
    waits: list[asyncio.Future[Any]] = [ended, broken]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        broken.cancel()
        return 0
    print(f"carpool: {broken.result()}", file=sys.stderr)
    return 1
