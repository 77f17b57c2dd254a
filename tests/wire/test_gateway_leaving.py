"""Clients that leave: whoever they are and whenever they go, generation stops and nothing is kept (PAINS A1 to A3, B1)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from broker.gateway.gateway import GatewayOptions
from broker.http import protocol as http_protocol
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.gateway_pool import Pool, Run, open_pool, record

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_pool(shared_nats_server: NatsServer) -> AsyncIterator[Pool]:
    """One gateway."""
    async with open_pool(shared_nats_server.url) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def pool(running_pool: Pool) -> AsyncIterator[Pool]:
    """The same gateway for each test, with nothing left of the one before."""
    yield running_pool
    await running_pool.clear()


class Client:
    """A raw connection with one request on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def ask(cls, pool: Pool, model: str, *, stream: bool) -> Client:
        """Sends a chat request and returns without waiting for an answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", pool.server.port)
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": stream}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await writer.drain()
        return cls(reader, writer)

    async def leave(self) -> None:
        """Closes the socket."""
        self.writer.close()
        await self.writer.wait_closed()


async def thinks_for_ever(run: Run) -> None:
    """No first token."""
    await asyncio.Event().wait()


async def talks_for_ever(run: Run) -> None:
    """A chunk every 20 ms."""
    while True:
        await run.say("word ")
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("talks", [True, False])
async def test_a_client_that_leaves_stops_its_generation(pool: Pool, stream: bool, talks: bool) -> None:
    """Before the first token and in the middle, streamed or not, the replica gets a cancel (A1, A2, A3)."""
    model = record()
    await pool.register(model)
    replica = await pool.replica(model, talks_for_ever if talks else thinks_for_ever)
    client = await Client.ask(pool, model.name, stream=stream)
    await until(lambda: replica.running and (len(replica.running[0].sent) > 3 or not talks), "it generates")
    if stream and talks:
        assert b"word" in await asyncio.wait_for(client.reader.readuntil(b"word"), 15)
    run = replica.running[0]
    await client.leave()
    await until(run.ended.is_set, "the replica is told")
    assert run.cancelled_by == "cancel"
    text = (await pool.http.get("/metrics")).text
    assert "carpool_requests_in_flight 0.0" in text
    assert f'carpool_requests_cancelled_total{{model="{model.name}"}} 1.0' in text


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_its_model_wakes_is_never_granted(pool: Pool, stream: bool) -> None:
    """A request whose client left before any replica came is not run when one comes; the next one is (A2)."""
    model = record()
    await pool.register(model)
    client = await Client.ask(pool, model.name, stream=stream)
    await until(lambda: pool.tickets, "its ticket was published")
    await client.leave()
    await until(lambda: "carpool_requests_in_flight 0.0" in _metrics(pool), "it is forgotten")
    replica = await pool.replica(model)
    assert (await pool.chat(model.name)).status_code == 200
    assert len(replica.runs) == 1


async def test_one_of_many_waiters_leaves(pool: Pool) -> None:
    """Five wait for a cold model and one leaves: the other four are answered (B1)."""
    model = record()
    await pool.register(model)
    leaver = await Client.ask(pool, model.name, stream=True)
    await until(lambda: len(pool.tickets) == 1, "the first one waits")
    others = [asyncio.ensure_future(pool.chat(model.name)) for _ in range(4)]
    await until(lambda: len(pool.tickets) == 5, "five wait")
    await leaver.leave()
    replica = await pool.replica(model)
    assert [response.status_code for response in await asyncio.gather(*others)] == [200] * 4
    assert len(replica.runs) == 4


async def test_a_queued_client_that_leaves_frees_its_place(shared_nats_server: NatsServer) -> None:
    """With a full queue the place of a client that left is given to the next one (A2, K3)."""
    async with open_pool(shared_nats_server.url, gateway=GatewayOptions()) as pool:
        model = record(queue_requests_max=1)
        await pool.register(model)
        first = await Client.ask(pool, model.name, stream=False)
        await until(lambda: len(pool.tickets) == 1, "the first one waits")
        assert (await pool.chat(model.name)).status_code == 503
        await first.leave()
        await until(lambda: "carpool_requests_in_flight 0.0" in _metrics(pool), "it is forgotten")
        await pool.replica(model)
        assert (await pool.chat(model.name)).status_code == 200


async def test_many_short_tempers(pool: Pool) -> None:
    """Fifty clients that give up after a moment leave nothing running (A3)."""
    model = record()
    await pool.register(model)
    replica = await pool.replica(model, thinks_for_ever, slots=50)
    clients = [await Client.ask(pool, model.name, stream=number % 2 == 0) for number in range(50)]
    await until(lambda: len(replica.running) == 50, "all run")
    await asyncio.gather(*[client.leave() for client in clients])
    await until(lambda: not replica.running, "all are cancelled")
    assert {run.cancelled_by for run in replica.runs} == {"cancel"}


async def floods(run: Run) -> None:
    """Much text, without end."""
    while True:
        await run.say("x" * 50_000)
        await asyncio.sleep(0)


async def test_a_slow_reader_is_told(pool: Pool) -> None:
    """A client that falls far behind a stream does not make the gateway hold it all: cancelled, with an error event (L4)."""
    model, other = record(), record()
    await pool.register(model, other)
    replica = await pool.replica(model, floods)
    await pool.replica(other)
    client = await Client.ask(pool, model.name, stream=True)
    await until(lambda: replica.runs and replica.runs[0].ended.is_set(), "the flood is stopped")
    assert replica.runs[0].cancelled_by == "cancel"
    assert (await pool.chat(other.name)).status_code == 200
    rest = b""
    while b"[DONE]" not in rest[-200:]:
        part = await asyncio.wait_for(client.reader.read(1 << 20), 15)
        assert part, "the connection closed without a word"
        rest += part
    assert b"reads too slowly" in rest[-400:]
    await client.leave()


async def test_a_client_that_never_reads_is_dropped(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection with an answer that nobody reads does not stay for ever (L4, E6)."""
    monkeypatch.setattr(http_protocol, "UNREAD_S_MAX", 0.2)
    model = record()
    await pool.register(model)
    replica = await pool.replica(model, floods)
    client = await Client.ask(pool, model.name, stream=True)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await until(lambda: replica.runs and replica.runs[0].ended.is_set(), "the flood is stopped")
    await until(lambda: not pool.server.busy, "the connection is dropped")
    client.writer.transport.abort()


def _metrics(pool: Pool) -> str:
    return pool.gateway.metrics_text().decode()
