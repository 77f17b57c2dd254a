"""A pool on a nats-server that somebody else runs, and its parts started one by one, as on several machines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ops.control import control
from ops.models import records_of
from ops.servers import free_port
from ops.supervisor import Pool, PoolOptions, running_pool
from subjects.errors import ConfigError
from tests.servers import NatsServer

BOUND_S = 40.0
SERVICES = """
apiVersion: llm.serving/v1
kind: ModelService
metadata: {name: quick}
spec:
  resources: {baseline_memory_gb: 0.5}
  strategy: {min_replicas: 2, max_replicas: 2}
  engine: {type: simulated, max_num_seqs: 8, max_context_len: 2048, kv_cache_bytes: 64MiB}
---
apiVersion: llm.serving/v1
kind: ModelService
metadata: {name: cold}
spec:
  resources: {baseline_memory_gb: 0.1}
  engine: {type: simulated, max_num_seqs: 8, max_context_len: 2048, kv_cache_bytes: 64MiB, options: {load_s: 1.0}}
"""


class BareServer(NatsServer):
    """A nats-server with the configuration that its lines give."""

    def __init__(self, directory: Path, *lines: str) -> None:
        self._lines = lines
        super().__init__(directory)

    def argv(self) -> list[str]:
        """Its own few lines in place of ours."""
        argv = super().argv()
        Path(argv[-1]).write_text("\n".join([f"listen: 127.0.0.1:{self.port}", *self._lines]))
        return argv


@pytest.mark.parametrize(
    ("lines", "said"),
    [((), "has no JetStream; start it with -js"), (("jetstream {}", "max_payload: 64KB"), "raise max_payload")],
)
async def test_a_server_that_cannot_serve_is_told_in_one_line(tmp_path: Path, lines: tuple[str, ...], said: str) -> None:
    """Without JetStream, or with too small messages, nothing is started and the remedy is named; so for a single part."""
    own = [line.replace("{}", f"{{store_dir: {str(tmp_path)!r}}}") for line in lines]
    server = BareServer(tmp_path / "nats", *own)
    try:
        pool = Pool(PoolOptions(state_dir=tmp_path / "state", nats_url=server.url, devices=("cpu:1GiB",)))
        with pytest.raises(ConfigError) as told:
            async with pool:
                pytest.fail("it started")
        argv = [sys.executable, "-m", "ops.cli", "worker", "--nats", server.url, "--state-dir", str(tmp_path)]
        part = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=60)
    finally:
        server.stop()
    assert said in str(told.value)
    assert str(told.value).startswith("--nats: ") and "\n" not in str(told.value)
    assert (part.returncode, part.stderr) == (2, f"carpool: {told.value}\n")


async def test_no_server_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens where ``--nats`` points to."""
    monkeypatch.setattr("ops.joined.CONNECT_S_MAX", 0.5)
    options = PoolOptions(state_dir=tmp_path, nats_url=f"nats://127.0.0.1:{free_port()}", devices=("cpu:1GiB",))
    with pytest.raises(ConfigError, match=r"^--nats: no NATS server at .*check the address"):
        async with Pool(options):
            pytest.fail("it started")


@pytest.mark.parametrize(
    ("flag", "option"), [("--port", "http_port"), ("--nats-port", "nats_port"), ("--redis-port", "redis_port")]
)
async def test_a_taken_port_is_told_in_one_line(tmp_path: Path, flag: str, option: str) -> None:
    """A port given by hand that somebody else holds: the flag, the number and the remedy, and nothing stays behind."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^{flag} {port}: the port is taken .*0 for any free port$"):
            async with Pool(PoolOptions(state_dir=tmp_path, devices=("cpu:1GiB",), **{option: port})):
                pytest.fail("it started")
    assert running_pool(tmp_path) is None


async def test_a_pool_joins_a_running_server(nats_server: NatsServer, tmp_path: Path) -> None:
    """``carpool up --nats``: it starts no server of its own, serves, and leaves the server running at its end."""
    options = PoolOptions(state_dir=tmp_path / "state", nats_url=nats_server.url, devices=("cpu:1GiB",))
    async with Pool(options) as pool:
        await _apply(tmp_path, pool.nats_url)
        assert not (tmp_path / "state" / "nats").exists()
        answer = await _ask(pool.http_url, "cold")
        assert answer.status_code == 200 and answer.headers["x-carpool-model"] == "cold"
    assert nats_server.running


# ------------------------------------------------------------------------------------------------------------ single parts


@contextlib.contextmanager
def _part(directory: Path, server: NatsServer, part: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """``carpool PART`` as a process, ended by SIGTERM."""
    argv = [sys.executable, "-m", "ops.cli", part, "--nats", server.url, *flags]
    environment = {**os.environ, "CARPOOL_STATE": str(directory)}
    with (directory / f"{part}-{len(list(directory.iterdir()))}.log").open("wb") as log:
        process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            assert process.wait(30) == 0, part
        finally:
            process.kill()


async def _apply(directory: Path, nats_url: str) -> None:
    path = directory / "services.yaml"
    path.write_text(SERVICES)
    records = await asyncio.to_thread(records_of, [path])
    await control(nats_url, "apply", {"records": [msgspec.to_builtins(record) for record in records]})


async def _ask(url: str, model: str, **script: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "carpool_sim": script}
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        return await client.post(f"{url}/v1/chat/completions", json=body)


async def _rows(server: NatsServer, what: str, count: int, **fields: Any) -> list[dict[str, Any]]:
    """Waits until ``carpool get`` shows ``count`` rows with these fields."""
    end_s = time.monotonic() + BOUND_S
    while True:
        rows: list[dict[str, Any]] = []
        with contextlib.suppress(Exception):  # the scheduler may still start
            rows = await control(server.url, "get", {"what": what}) or []
        rows = [row for row in rows if fields.items() <= row.items()]
        if len(rows) == count:
            return rows
        assert time.monotonic() < end_s, f"{what}: {rows}"
        await asyncio.sleep(0.1)


@pytest.fixture
async def parts(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[tuple[str, str]]:
    """A scheduler, two workers and two gateways, each a command of its own; yields the gateways' URLs."""
    ports = (free_port(), free_port())
    with contextlib.ExitStack() as stack:

        def start(part: str, *flags: str) -> None:
            stack.enter_context(_part(tmp_path, nats_server, part, *flags))

        start("scheduler", "--state-dir", str(tmp_path / "scheduler"))
        for name in ("left", "right"):
            start("worker", "--id", name, "--device", "cpu:1GiB", "--state-dir", str(tmp_path / name))
        for index, port in enumerate(ports):
            start("gateway", "--id", f"door-{index}", "--port", str(port))
        await _rows(nats_server, "devices", 2)
        yield f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"


@pytest.mark.timeout(240)
async def test_parts_started_alone_make_one_pool(parts: tuple[str, str], nats_server: NatsServer, tmp_path: Path) -> None:
    """Two workers and two gateways: a replica on each worker, used by both doors; a third door finds the cold model.

    A gateway that starts while nothing of a model is loaded never says 404 for it (B3), and all doors wake it once (B6).
    """
    await _apply(tmp_path, nats_server.url)
    replicas = await _rows(nats_server, "replicas", 2, model="quick", state="ready")
    assert len({row["worker"] for row in replicas}) == 2
    # Sixteen long requests need the eight slots of both.
    answers = await asyncio.gather(*(_ask(parts[number % 2], "quick", token_s=0.7) for number in range(16)))
    assert [answer.status_code for answer in answers] == [200] * 16
    assert len({answer.headers["x-carpool-replica"] for answer in answers}) == 2

    port = free_port()
    with _part(tmp_path, nats_server, "gateway", "--id", "door-2", "--port", str(port)):
        first = await _first_answers(f"http://127.0.0.1:{port}", "cold")
        others = await asyncio.gather(*(_ask(url, "cold") for url in parts))
        listed = [_states((await _get(url, "/v1/models")).json()) for url in (*parts, f"http://127.0.0.1:{port}")]
    assert 404 not in first and first[-1] == 200, first
    assert [answer.status_code for answer in others] == [200, 200]
    assert listed[0].keys() == listed[1].keys() == listed[2].keys() == {"quick", "cold"}
    timeline = await control(nats_server.url, "get", {"what": "timeline"})
    assert sum(1 for entry in timeline if (entry["action"], entry["model"]) == ("load", "cold")) == 1


def _states(body: dict[str, Any]) -> dict[str, str]:
    return {row["id"]: row["state"] for row in body["data"]}


async def _get(url: str, path: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
        return await client.get(f"{url}{path}")


async def _first_answers(url: str, model: str) -> list[int]:
    """Asks a gateway that is starting until it answers with 200; all statuses on the way."""
    statuses: list[int] = []
    end_s = time.monotonic() + BOUND_S
    while 200 not in statuses:
        assert time.monotonic() < end_s, statuses
        try:
            statuses.append((await _ask(url, model)).status_code)
        except httpx.HTTPError:
            await asyncio.sleep(0.01)
    return statuses
