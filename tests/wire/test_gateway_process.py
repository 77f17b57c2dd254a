"""The gateway as a process: signals, and what becomes of its requests (D1)."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import psutil
import pytest

from broker.gateway.main import DESCRIPTORS_MAX
from subjects import names
from subjects.codec import encode
from subjects.messages import ModelRecord, SlaClass
from subjects.nats.bus import NatsBus
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.gateway_pool import WAIT_S, Run, ScriptedReplica, record

MAIN = """
import asyncio, sys
from broker.gateway.main import GatewayConfig, run_gateway
config = GatewayConfig(nats_urls=(sys.argv[1],), port=0, shutdown_s=float(sys.argv[2]))
sys.exit(asyncio.run(run_gateway(config, on_ready=lambda url: print(url, flush=True))))
"""


class GatewayProcess:
    """A gateway of its own, and a client for it."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.http = httpx.AsyncClient(base_url=url, timeout=WAIT_S)

    @classmethod
    async def start(cls, nats_url: str, shutdown_s: float) -> GatewayProcess:
        """Waits until it is ready."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", MAIN, nats_url, str(shutdown_s), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        url = ""
        while not url.startswith("http://"):
            line = await asyncio.wait_for(process.stdout.readline(), 30)
            assert line, "the gateway ended"
            url = line.decode().strip()
        gateway = cls(process, url)
        while (await gateway.http.get("/ready")).status_code != 200:
            await asyncio.sleep(0.02)
        return gateway

    async def chat(self, model: str, *, stream: bool = False) -> httpx.Response:
        """A request."""
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
        return await self.http.post("/v1/chat/completions", json=body)

    async def stop(self) -> None:
        """Kills what is left."""
        await self.http.aclose()
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


@pytest.fixture
async def bus(shared_nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    """A connection for the replica."""
    bus = await NatsBus.connect(shared_nats_server.url, name="tests")
    yield bus
    await bus.close()


async def serve(bus: NatsBus, gateway: GatewayProcess, script: Callable[[Run], Any]) -> tuple[ModelRecord, ScriptedReplica]:
    """A model with a replica, known to the gateway."""
    model = record()
    await bus.kv_put(names.MODELS_BUCKET, model.name, encode(model))
    replica = ScriptedReplica(bus, model, script, slots=16, classes=[SlaClass.SILVER])
    await replica.start()
    while (await gateway.http.get(f"/v1/models/{model.name}")).status_code != 200:
        await asyncio.sleep(0.02)
    return model, replica


async def test_sigterm_lets_running_requests_finish(shared_nats_server: NatsServer, bus: NatsBus) -> None:
    """After SIGTERM new requests get 503, running ones their whole answer; a second signal is harmless; exit code 0 (D1)."""
    go_on = asyncio.Event()

    async def waits(run: Run) -> None:
        await run.say("begun ")
        await go_on.wait()
        await run.say("done")
        await run.end()

    gateway = await GatewayProcess.start(shared_nats_server.url, 20.0)
    try:
        model, replica = await serve(bus, gateway, waits)
        running = [asyncio.ensure_future(gateway.chat(model.name, stream=number % 2 == 0)) for number in range(6)]
        await until(lambda: len(replica.running) == 6, "six run")
        gateway.process.send_signal(signal.SIGTERM)
        while (await gateway.http.get("/ready")).status_code == 200:
            await asyncio.sleep(0.02)
        refused = await gateway.chat(model.name)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert int(refused.headers["retry-after"]) >= 1
        gateway.process.send_signal(signal.SIGTERM)
        go_on.set()
        answers = await asyncio.gather(*running)
        assert [answer.status_code for answer in answers] == [200] * 6
        assert all("begun" in answer.text and "done" in answer.text for answer in answers)
        assert await asyncio.wait_for(gateway.process.wait(), WAIT_S) == 0
        await replica.stop()
        await bus.kv_delete(names.MODELS_BUCKET, model.name)
    finally:
        await gateway.stop()


async def test_after_the_bound_each_stream_gets_an_error(shared_nats_server: NatsServer, bus: NatsBus) -> None:
    """What has not finished in time ends with an error event and ``[DONE]``, or a 503; exit code 0 (D1)."""

    async def talks(run: Run) -> None:
        while True:
            await run.say("word ")
            await asyncio.sleep(0.05)

    gateway = await GatewayProcess.start(shared_nats_server.url, 0.5)
    try:
        model, replica = await serve(bus, gateway, talks)
        stream = asyncio.ensure_future(gateway.chat(model.name, stream=True))
        whole = asyncio.ensure_future(gateway.chat(model.name))
        await until(lambda: len(replica.running) == 2 and all(run.sent for run in replica.running), "both run")
        gateway.process.send_signal(signal.SIGTERM)
        assert (await whole).status_code == 503
        events = [event for event in (await stream).text.split("\n\n") if event]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert await asyncio.wait_for(gateway.process.wait(), WAIT_S) == 0
        await replica.stop()
        await bus.kv_delete(names.MODELS_BUCKET, model.name)
    finally:
        await gateway.stop()


async def test_sigterm_without_a_bus_ends_at_once() -> None:
    """A gateway that never found its bus ends cleanly too (L3)."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"nats://127.0.0.1:{taken.getsockname()[1]}"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", MAIN, url, "5", stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        while not (line := await asyncio.wait_for(process.stdout.readline(), 30)).startswith(b"http"):
            assert line, "the gateway ended"
        async with httpx.AsyncClient(base_url=line.decode().strip()) as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/ready")).status_code == 503
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
        await process.communicate()


async def test_a_shell_s_limit_on_descriptors_is_lifted() -> None:
    """A thousand streams must not end at the 1,024 files that shells often allow: the process takes what it may have."""
    shell = f'ulimit -Sn 100; exec "{sys.executable}" -c "$0" nats://127.0.0.1:1 1'
    process = await asyncio.create_subprocess_exec("sh", "-c", shell, MAIN, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    while not (line := await asyncio.wait_for(process.stdout.readline(), 60)).startswith(b"http"):
        assert line, "the gateway ended"
    soft, hard = psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE)
    process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(process.communicate(), WAIT_S)
    assert soft == min(hard, DESCRIPTORS_MAX)
