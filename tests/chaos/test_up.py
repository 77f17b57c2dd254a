"""The embedded set as real processes: what a kill -9 of any part leaves behind, and what goes on."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from ops.control import control
from ops.models import records_of
from ops.servers import port_is_free
from ops.supervisor import Endpoints, Pool, PoolOptions, running_pool
from ops.up import INTERRUPTED

SERVICES = """
apiVersion: llm.serving/v1
kind: ModelService
metadata: {name: quick}
spec:
  resources: {baseline_memory_gb: 0.1}
  engine: {type: simulated, max_num_seqs: 8, max_context_len: 2048, kv_cache_bytes: 64MiB}
"""


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    """A running pool with one simulated model."""
    (tmp_path / "quick.yaml").write_text(SERVICES)
    async with Pool(PoolOptions(state_dir=tmp_path / "state", devices=("cpu:1GiB",))) as running:
        records = records_of([tmp_path / "quick.yaml"])
        await control(running.nats_url, "apply", {"records": [msgspec.to_builtins(record) for record in records]})
        yield running


async def _ask(pool: Pool, tokens: int = 4, **script: Any) -> httpx.Response:
    body = {"model": "quick", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "carpool_sim": script}
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        return await client.post(f"{pool.http_url}/v1/chat/completions", json=body)


async def _eventually(holds: Callable[[], bool], limit_s: float = 15.0) -> bool:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if holds():
            return True
        await asyncio.sleep(0.05)
    return False


def _gone(pids: list[int]) -> Callable[[], bool]:
    def runs(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return lambda: not any(runs(pid) for pid in pids)


@pytest.mark.timeout(300)
async def test_killed_parts_come_back_on_their_ports(pool: Pool) -> None:
    """kill -9 of any part: no orphan, the same endpoint, and the next request is answered (REL-3, PAINS D8)."""
    assert (await _ask(pool)).status_code == 200
    for part in ("nats", "valkey", "scheduler", "worker", "gateway"):
        killed = psutil.Process(pool.pid(part))
        below = [child.pid for child in killed.children(recursive=True)]
        killed.kill()
        assert await _eventually(_gone([killed.pid, *below])), f"{part} left children behind"
        deadline_s = time.monotonic() + 40
        while not await _answered(pool):
            assert time.monotonic() < deadline_s, f"no answer 40 s after {part} was killed"
            await asyncio.sleep(0.2)


async def _answered(pool: Pool) -> bool:
    try:
        return (await _ask(pool)).status_code == 200
    except httpx.HTTPError:
        return False


async def test_running_request_outlives_the_control_plane(pool: Pool) -> None:
    """A request that is being generated goes on while index, scheduler and bus die and come back (REL-3, F10)."""
    assert (await _ask(pool)).status_code == 200
    running = asyncio.create_task(_ask(pool, tokens=60, token_s=0.1))
    for part in ("valkey", "scheduler", "nats"):
        await asyncio.sleep(1.0)
        psutil.Process(pool.pid(part)).kill()
    response = await running
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 60
    assert response.headers["x-carpool-attempt"] == "1"


@contextlib.contextmanager
def _carpool_up(state_home: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-m", "ops.cli", "up", "--port", "0", "--device", "cpu:1GiB", *flags],
        env={**os.environ, "CARPOOL_STATE": str(state_home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


async def _up(state_home: Path, process: subprocess.Popen[bytes]) -> list[int]:
    """Waits until it serves; returns the pids of everything below it."""
    assert await _eventually(lambda: running_pool(state_home / "default") is not None, 60), process.stdout
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


async def test_killed_supervisor_leaves_nothing(tmp_path: Path) -> None:
    """kill -9 of ``carpool up`` takes every process and every port with it (PAINS D8)."""
    with _carpool_up(tmp_path) as process:
        below = await _up(tmp_path, process)
        endpoints = running_pool(tmp_path / "default")
        assert endpoints is not None
        assert len(below) >= 5
        process.kill()
    assert await _eventually(_gone(below)), below
    assert running_pool(tmp_path / "default") is None
    for url in (endpoints.http_url, endpoints.nats_url, endpoints.redis_url.removesuffix("/0")):
        assert port_is_free("127.0.0.1", int(url.rpartition(":")[2])), url


async def test_ctrl_c_ends_everything_and_a_second_signal_is_harmless(tmp_path: Path) -> None:
    """SIGINT, then SIGTERM while it ends: exit code 0 and no process left."""
    with _carpool_up(tmp_path) as process:
        below = await _up(tmp_path, process)
        process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
    assert await _eventually(_gone(below))


async def test_second_pool_of_one_name_says_so_in_one_line(tmp_path: Path) -> None:
    """Two pools in one state directory would share ports and files: the second is told, and the first goes on."""
    with _carpool_up(tmp_path) as first:
        await _up(tmp_path, first)
        with _carpool_up(tmp_path) as second:
            output, _ = await asyncio.to_thread(second.communicate)
        assert second.returncode == 2
        assert "another pool runs in" in output.decode().splitlines()[-1]
        assert first.poll() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after_s", [0.0, 0.7])
async def test_a_signal_while_it_starts_ends_what_was_started(tmp_path: Path, number: int, after_s: float) -> None:
    """In order, with one line; a second signal is harmless, and the next start is none the worse (PAINS D8)."""
    with _carpool_up(tmp_path) as process:
        assert process.stdout is not None
        await asyncio.to_thread(process.stdout.readline)
        await asyncio.sleep(after_s)
        below = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(number)
        await asyncio.sleep(0.1)
        process.send_signal(number)
        output, _ = await asyncio.to_thread(process.communicate, None, 60)
        assert process.returncode in (INTERRUPTED, -number)  # the second may hit the interpreter's own end
        assert output.decode().splitlines()[-1] == "carpool: ended while it started"
    assert await _eventually(_gone(below))
    assert running_pool(tmp_path / "default") is None


def test_what_a_killed_pool_left_behind_names_no_pool(tmp_path: Path) -> None:
    """Its pid may be anybody's by now, and the file may be broken: only the lock tells that a pool runs."""
    endpoints = Endpoints(pid=os.getpid(), http_url="http://127.0.0.1:1", nats_url="nats://127.0.0.1:1", redis_url="")
    assert running_pool(tmp_path) is None
    (tmp_path / "endpoints.json").write_bytes(msgspec.json.encode(endpoints))
    assert running_pool(tmp_path) is None
    (tmp_path / "lock").touch()
    assert running_pool(tmp_path) is None
    with (tmp_path / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert running_pool(tmp_path) == endpoints
        (tmp_path / "endpoints.json").write_bytes(b'{"pid": 99999999999999999999999}')
        assert running_pool(tmp_path) is None
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").mkdir()
    assert running_pool(tmp_path) is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "70000"], "70000"),
        (["--redis-port", "-1"], "-1"),
        (["--host", "no-such-host.invalid"], "--host no-such-host.invalid: is no address of this machine"),
    ],
)
def test_wrong_flags_are_told_in_one_line(tmp_path: Path, flags: list[str], said: str) -> None:
    """Exit code 2 and no traceback."""
    with _carpool_up(tmp_path, *flags) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said in output.decode().splitlines()[-1]
    assert b"Traceback" not in output


def test_a_state_directory_that_cannot_be_is_told_in_one_line(tmp_path: Path) -> None:
    """A file stands where the directory should be."""
    (tmp_path / "file").touch()
    with _carpool_up(tmp_path / "file") as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "cannot hold a pool's state" in output.decode().splitlines()[-1]
    assert b"Traceback" not in output
