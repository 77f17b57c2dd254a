"""A child that is kept running: its end amid a restart, and bounds on every wait (REL-3)."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ops import gateway_processes, logs
from ops.gateway_processes import GatewayProcesses, run_processes
from ops.kept import Kept
from tests.waiting import WAIT_S, until

LIVES = [sys.executable, "-c", "import time; time.sleep(600)"]


def keep(one: Kept) -> asyncio.Task[None]:
    """Its watcher."""
    return asyncio.create_task(
        one.keep_running(on_restart=lambda _: None, on_broken=lambda _: None, may_refuse=lambda: False)
    )


async def test_stop_while_it_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that is just being started ends too, and so does its watcher."""
    spawning, may_spawn = asyncio.Event(), asyncio.Event()
    spawn = asyncio.create_subprocess_exec

    async def slow(*argv: str, **options: Any) -> asyncio.subprocess.Process:
        spawning.set()
        await may_spawn.wait()
        return await spawn(*argv, **options)

    one = Kept("one", [sys.executable, "-c", "raise SystemExit(3)"], os.environ)
    await one.start()
    one.argv = LIVES
    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    watcher = keep(one)
    try:
        async with asyncio.timeout(WAIT_S):
            await spawning.wait()
            stopping = asyncio.create_task(one.stop(WAIT_S))
            await asyncio.sleep(0)
            may_spawn.set()
            await stopping
            await watcher
        assert one.process is not None and one.process.returncode is not None
    finally:
        watcher.cancel()
        if one.process is not None and one.process.returncode is None:
            one.process.kill()
            await one.process.wait()


async def test_stop_while_it_waits_to_be_started_again() -> None:
    """Nothing is started any more."""
    one = Kept("one", [sys.executable, "-c", "raise SystemExit(3)"], os.environ)
    await one.start()
    first = one.process
    assert first is not None
    await first.wait()
    await one.stop(WAIT_S)
    await one.start()
    assert one.process is first


async def test_what_does_not_heed_sigterm_is_killed(tmp_path: Path) -> None:
    """After the bound that the caller gives."""
    words = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    one = Kept("one", [sys.executable, "-c", words], os.environ, log=tmp_path / "log")
    await one.start()
    watcher = keep(one)
    await until(lambda: "deaf" in one.log_tail(), "it ignores SIGTERM")
    await one.stop(0.05)
    await asyncio.wait_for(watcher, WAIT_S)
    assert one.process is not None and one.process.returncode == -9


async def test_a_process_that_never_listens_ends_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for without bound: the gateway says so, ends what it began and exits with 1."""
    made: list[Kept] = []

    def hung(name: str, argv: Sequence[str], environment: Mapping[str, str]) -> Kept:
        made.append(Kept(name, LIVES, environment))
        return made[-1]

    monkeypatch.setattr(gateway_processes, "Kept", hung)
    monkeypatch.setattr(gateway_processes, "LISTEN_S_MAX", 0.05)
    monkeypatch.setattr(logs, "configure", lambda _: None)
    options = GatewayProcesses(processes=2, name="g", host="127.0.0.1", port=0, nats_url="nats://127.0.0.1:1")
    assert await asyncio.wait_for(run_processes(options), WAIT_S) == 1
    assert [one.process is not None and one.process.returncode for one in made] == [-15]
