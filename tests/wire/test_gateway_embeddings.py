"""``/v1/embeddings`` through the pool: queue, replica process, frames, answer (ING-1, ING-2)."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from subjects.messages import Endpoint, EngineType, InferRequest, ModelRecord, Task
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.gateway_pool import Pool, Run, open_pool, record
from tests.wire.replica_ends import AgentEnd
from tests.wire.test_gateway_nats import infer
from workers.control_messages import Ready
from workers.core.simulated import expected_embedding

pytestmark = pytest.mark.asyncio(loop_scope="module")


def embeds(name: str = "", **fields: Any) -> ModelRecord:
    """An embedding model."""
    return record(name, task=Task.EMBED, **fields)


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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(shared_nats_server: NatsServer) -> AsyncIterator[ModelRecord]:
    """A real replica process with the simulated engine; the record of its model, which each test registers."""
    model = embeds("sim-embed", engine_type=EngineType.SIMULATED, engine_options={"mode": "instant", "kv_pages": 4096})
    agent = await AgentEnd(model, shared_nats_server.url).start()
    await agent.wait_for(Ready)
    yield model
    await agent.stop()


async def gives(run: Run) -> None:
    """One vector."""
    await run.say("", detail={"data": [{"index": 0, "embedding": [0.5]}]})
    await run.end(usage=(3, 0))


# ---------------------------------------------------------------------------------------------------------- the whole way


async def test_embeddings_by_the_openai_client(pool: Pool, real: ModelRecord) -> None:
    """Its default asks for base64: every input in its place, exact usage, the asked name."""
    await pool.register(real)
    texts = ["Hi", "Grüße 世界", "x" * 100]
    answer = await pool.openai().embeddings.create(model=real.name, input=texts)
    assert [one.index for one in answer.data] == [0, 1, 2] and answer.model == real.name
    for one, text in zip(answer.data, texts, strict=True):
        assert one.embedding == pytest.approx(expected_embedding(text), abs=1e-6)
    tokens = sum(-(-len(text.encode()) // 4) for text in texts)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)


@pytest.mark.parametrize(
    ("fields", "inputs"),
    [
        ({"input": "Hi"}, ["Hi"]),
        ({"input": "Hi", "encoding_format": "float", "user": "u-1"}, ["Hi"]),
        ({"input": ["Hi"], "dimensions": 12}, ["Hi"]),
        ({"input": [7, 8, 9]}, [[7, 8, 9]]),
        ({"input": [[7, 8], [9]], "stream": True}, [[7, 8], [9]]),
        ({"input": ["Hi", "Ho"], "encoding_format": "base64"}, ["Hi", "Ho"]),
    ],
)
async def test_every_form_of_input(pool: Pool, real: ModelRecord, fields: dict[str, Any], inputs: list[Any]) -> None:
    """Texts and token ids, one or many, both encodings, fewer dimensions; the answer comes whole whatever is asked."""
    await pool.register(real)
    response = await pool.http.post("/v1/embeddings", json={"model": real.name} | fields)
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    assert response.headers["x-carpool-model"] == real.name and "x-carpool-replica" in response.headers
    answer = response.json()
    assert answer["object"] == "list" and answer["id"].startswith("embd-")
    dimensions = fields.get("dimensions", 256)
    for place, (one, item) in enumerate(zip(answer["data"], inputs, strict=True)):
        vector = one["embedding"]
        if fields.get("encoding_format") == "base64":
            vector = struct.unpack(f"<{dimensions}f", base64.b64decode(vector))
        assert (one["object"], one["index"]) == ("embedding", place)
        assert list(vector) == pytest.approx(expected_embedding(item, dimensions), abs=1e-6)


async def test_an_answer_of_many_frames(pool: Pool, real: ModelRecord) -> None:
    """2,048 inputs in one request: all vectors arrive, each once (a vector takes some 1,400 bytes)."""
    await pool.register(real)
    texts = [f"text {number}" for number in range(2048)]
    answer = await pool.openai().embeddings.create(model=real.name, input=texts)
    assert [one.index for one in answer.data] == list(range(2048))
    assert answer.data[-1].embedding == pytest.approx(expected_embedding(texts[-1]), abs=1e-6)


async def test_the_engines_refusal_is_a_400(pool: Pool, real: ModelRecord) -> None:
    """More dimensions than the model has."""
    await pool.register(real)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        await pool.openai().embeddings.create(model=real.name, input="Hi", dimensions=4096)


async def test_over_nats(pool: Pool, real: ModelRecord) -> None:
    """The same body over the other way in is one frame, even if a stream is asked for (ING-2)."""
    await pool.register(real)
    body = json.dumps({"model": real.name, "input": "Hi"}).encode()
    (frame,) = await infer(pool, InferRequest(endpoint=Endpoint.EMBEDDINGS, body=body, stream=True))
    assert frame.status == 200
    assert json.loads(frame.body)["data"][0]["embedding"] == pytest.approx(expected_embedding("Hi"), abs=1e-6)


# ------------------------------------------------------------------------------------------- as any other request


async def test_a_ticket_as_any_other(pool: Pool) -> None:
    """Queue, demand and metrics count it; the engine gets the client's own bytes, a salt beside them, and no bound."""
    model = embeds()
    await pool.register(model)
    replica = await pool.replica(model, gives)
    response = await pool.http.post("/v1/embeddings", json={"model": model.name, "input": "Hi", "unknown": 7})
    assert response.json()["data"] == [{"object": "embedding", "index": 0, "embedding": [0.5]}]
    (run,) = replica.runs
    assert (run.grant.endpoint, run.grant.max_tokens, run.body["unknown"]) == (Endpoint.EMBEDDINGS, 0, 7)
    assert run.ticket.profile.endpoint is Endpoint.EMBEDDINGS and run.ticket.profile.input_tokens == 1
    await until(lambda: any(one.arrived for sent in pool.telemetry for one in sent.demand), "the demand is counted")
    metrics = (await pool.http.get("/metrics")).text
    assert any(model.name in line and 'status="200"' in line and line.endswith(" 1.0") for line in metrics.splitlines())


async def test_a_client_that_leaves_cancels(pool: Pool) -> None:
    """While it is queued no replica gets it; while it runs the replica is told (A1)."""
    model = embeds()
    await pool.register(model)

    async def never(run: Run) -> None:
        await run.ended.wait()

    replica = await pool.replica(model, never)
    asking = asyncio.create_task(pool.http.post("/v1/embeddings", json={"model": model.name, "input": "Hi"}))
    await until(lambda: bool(replica.running), "it runs")
    asking.cancel()
    await until(lambda: not replica.running, "the replica was told")
    assert replica.runs[0].cancelled_by


async def test_the_other_kind_of_model_refuses_before_it_wakes(pool: Pool) -> None:
    """A 400 that names what the model can do; no ticket is written and nothing waits."""
    generates, makes_vectors = record(), embeds()
    await pool.register(generates, makes_vectors)
    refused: list[tuple[httpx.Response, str]] = [
        (await pool.http.post("/v1/embeddings", json={"model": generates.name, "input": "Hi"}), "chat and text completions"),
        (await pool.chat(makes_vectors.name), "embeddings"),
        (await pool.http.post("/v1/completions", json={"model": makes_vectors.name, "prompt": "Hi"}), "embeddings"),
    ]
    for response, able in refused:
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_by_model", "model")
        assert error["message"].endswith(f"it can do {able}.")
    assert pool.tickets == []
    listed = {one["id"]: one["task"] for one in (await pool.http.get("/v1/models")).json()["data"]}
    assert listed == {generates.name: "generate", makes_vectors.name: "embed"}


async def test_auto_finds_the_embedding_model(pool: Pool) -> None:
    """Among models of higher tiers that generate; the answer names the model (ING-5)."""
    model = embeds()
    await pool.register(model, record(quality_tier=9))
    await pool.replica(model, gives)
    answer = (await pool.http.post("/v1/embeddings", json={"model": "auto", "input": "Hi"})).json()
    assert answer["model"] == model.name


async def test_a_fallback_of_another_kind_is_none(pool: Pool) -> None:
    """A model that generates is no substitute for one that embeds (ING-8)."""
    other = record()
    model = embeds(fallback=other.name, max_wait_s=0.3)
    await pool.register(model, other)
    await pool.replica(other)
    response = await pool.http.post("/v1/embeddings", json={"model": model.name, "input": "Hi"})
    assert response.status_code == 503


async def test_an_input_beyond_the_context(pool: Pool) -> None:
    """A 400 before anything is published."""
    model = embeds(max_context_len=16)
    await pool.register(model)
    response = await pool.http.post("/v1/embeddings", json={"model": model.name, "input": ["Hi", "x" * 100]})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
    assert pool.tickets == []
