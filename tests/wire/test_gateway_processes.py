"""One gateway as several processes on one port: who answers, a death, figures of all, and the end (D1, REL-3)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.gateway.siblings import joined
from subjects import names
from subjects.codec import encode
from subjects.messages import ModelRecord, SlaClass
from subjects.nats.bus import NatsBus
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.gateway_pool import WAIT_S, Run, ScriptedReplica, record

PROCESSES = 2
DIALS_MAX = 60
"""Each new connection meets a process by a hash: so many meet one only, of two, with a chance of 2 ** -59."""


class Processes:
    """A gateway of several processes."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    @classmethod
    async def start(cls, nats_url: str, *flags: str) -> Processes:
        """Returns when all listen; its log goes on being read."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ops.cli", "gateway", "--port", "0", "--processes", str(PROCESSES), *flags),
            env={**os.environ, "CARPOOL_NATS": nats_url},
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        while True:
            line = await asyncio.wait_for(process.stderr.readline(), 60)
            assert line, "the gateway ended"
            said = json.loads(line) if line.startswith(b"{") else {}
            if said.get("event") == "gateway listens" and said.get("processes") == PROCESSES:
                return cls(process, said["url"])

    def children(self) -> list[psutil.Process]:
        """The serving processes."""
        return psutil.Process(self.process.pid).children()

    async def up(self) -> set[str]:
        """Numbers of the processes that answer; none where a dying one was asked."""
        try:
            async with httpx.AsyncClient(base_url=self.url, timeout=WAIT_S) as http:
                text = (await http.get("/metrics")).text
        except httpx.HTTPError:
            return set()  # A connection that the kernel gave to a process which is just being killed ends with it.
        (family,) = [one for one in text_string_to_metric_families(text) if one.name == "carpool_gateway_process_up"]
        return {sample.labels["process"] for sample in family.samples if sample.value}

    async def client_of(self, model: str, other_than: str = "") -> tuple[httpx.AsyncClient, str]:
        """A client whose one connection is with a process (its ingress) other than the one named."""
        for _ in range(DIALS_MAX):
            http = httpx.AsyncClient(base_url=self.url, timeout=WAIT_S)
            answer = await chat(http, model)
            ingress = answer.headers["x-carpool-request-id"].rpartition("-")[0]
            if ingress != other_than:
                return http, ingress
            await http.aclose()
        raise AssertionError("one process alone answers")

    async def stop(self) -> None:
        """Kills what is left."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


async def chat(http: httpx.AsyncClient, model: str, text: str = "Hi") -> httpx.Response:
    """A request."""
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    return await http.post("/v1/chat/completions", json=body)


async def reads(process: asyncio.subprocess.Process) -> None:
    """Keeps the log's pipe empty."""
    assert process.stderr is not None
    while await process.stderr.readline():
        pass


@pytest.fixture
async def bus(shared_nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    """A connection for the replica."""
    bus = await NatsBus.connect(shared_nats_server.url, name="tests")
    yield bus
    await bus.close()


async def replica_of(bus: NatsBus, script: object = None) -> tuple[ModelRecord, ScriptedReplica]:
    """A model with a replica."""
    model = record()
    await bus.kv_put(names.MODELS_BUCKET, model.name, encode(model))
    replica = ScriptedReplica(bus, model, script or answer, slots=16, classes=[SlaClass.SILVER])  # type: ignore[arg-type]
    await replica.start()
    return model, replica


go_on = asyncio.Event()


async def answer(run: Run) -> None:
    """At once, or after ``go_on`` where the question says so."""
    await run.say("begun ")
    if "wait" in str(run.body):
        await go_on.wait()
    await run.say("done")
    await run.end()


async def test_processes_share_a_port(shared_nats_server: NatsServer, bus: NatsBus) -> None:
    """Both answer; one killed by -9 takes only its own with it and comes back; figures of all; SIGTERM drains all (D1)."""
    go_on.clear()
    model, replica = await replica_of(bus)
    gateway = await Processes.start(shared_nats_server.url)
    reading = asyncio.create_task(reads(gateway.process))
    try:
        assert await gateway.up() == {"0", "1"}
        async with httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http:
            while (await http.get(f"/v1/models/{model.name}")).status_code != 200:
                await asyncio.sleep(0.02)
        one, ingress = await gateway.client_of(model.name)
        other, other_ingress = await gateway.client_of(model.name, other_than=ingress)
        assert {ingress.rpartition("-")[0], other_ingress.rpartition("-")[0]} == {"gateway-0", "gateway-1"}

        text = (await one.get("/metrics")).text
        ended = [
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "carpool_requests_total" and sample.labels["model"] == model.name
        ]
        assert {sample.labels["process"] for sample in ended} == {"0", "1"}
        assert sum(sample.value for sample in ended) == len(replica.runs)

        doomed, waiting = (asyncio.create_task(chat(http, model.name, "wait")) for http in (one, other))
        await until(lambda: len(replica.running) == 2, "both run")
        number = ingress.rpartition("-")[0].rpartition("-")[2]
        next(child for child in gateway.children() if f"--process {number}" in " ".join(child.cmdline())).kill()
        with pytest.raises(httpx.HTTPError):
            await doomed
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while await gateway.up() != {"0", "1"}:
            assert asyncio.get_running_loop().time() < deadline, "the killed process did not come back"
            await asyncio.sleep(0.05)
        assert not waiting.done()

        gateway.process.send_signal(signal.SIGTERM)
        gateway.process.send_signal(signal.SIGTERM)
        await until(lambda: refuses(gateway.url), "new connections are told or refused")
        gateway.process.send_signal(signal.SIGTERM)
        go_on.set()
        assert "begun done" in (await waiting).text
        assert await asyncio.wait_for(gateway.process.wait(), WAIT_S) == 0
        await one.aclose()
        await other.aclose()
    finally:
        go_on.set()
        reading.cancel()
        await gateway.stop()
        await replica.stop()
        await bus.kv_delete(names.MODELS_BUCKET, model.name)


def refuses(url: str) -> bool:
    """Whether the gateway says that it goes down."""
    try:
        return httpx.get(f"{url}/ready", timeout=WAIT_S).status_code == 503
    except httpx.HTTPError:
        return True


async def test_a_taken_port_is_told(shared_nats_server: NatsServer) -> None:
    """Also when who has it would share it: another gateway's port must not be shared by accident; exit code 2, one line."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ops.cli", "gateway", "--port", port, "--processes", "2"),
            env={**os.environ, "CARPOOL_NATS": shared_nats_server.url},
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert len(said.splitlines()) == 1 and f"--port {port}" in said.decode()


async def test_what_is_wrong_for_all_is_said_once(shared_nats_server: NatsServer) -> None:
    """Flags that each process refuses: exit code 2 and one complaint, not one per process and no restarts."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ops.cli", "gateway", "--port", "0", "--processes", "3", "--api-keys", "/nowhere.yaml"),
        env={**os.environ, "CARPOOL_NATS": shared_nats_server.url},
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert said.count(b"/nowhere.yaml") == 1


def test_figures_of_several_processes() -> None:
    """Families stay together, each series has its process's label, and one that is silent is told as down."""
    own = b'# HELP a_total A.\n# TYPE a_total counter\na_total{model="m {x"} 1.0\n# HELP b B.\n# TYPE b gauge\nb 2.0\n'
    text = joined({0: own, 1: None, 2: own.replace(b"1.0", b"5.0")}).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert text.count("# TYPE a_total counter") == 1
    assert [(s.labels, s.value) for s in families["a"].samples] == [
        ({"process": "0", "model": "m {x"}, 1.0),
        ({"process": "2", "model": "m {x"}, 5.0),
    ]
    assert [(s.labels, s.value) for s in families["b"].samples] == [({"process": "0"}, 2.0), ({"process": "2"}, 2.0)]
    assert [s.value for s in families["carpool_gateway_process_up"].samples] == [1.0, 0.0, 1.0]
