"""The NATS ingress: the same bodies, one request in, frames out (ING-2)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from subjects import names
from subjects.bus import BusMessage
from subjects.codec import decode, encode
from subjects.messages import Endpoint, Failure, FailureKind, InferFrame, InferRequest
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.gateway_pool import WAIT_S, Pool, Run, open_pool, record

HI: Any = [{"role": "user", "content": "Hi"}]


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


async def infer(pool: Pool, request: InferRequest | bytes, *, tenant: str = "acme", inbox: str = "") -> list[InferFrame]:
    """Sends it as a client of that tenant would and returns all frames."""
    frames: list[InferFrame] = []
    done = asyncio.Event()

    def on_frame(message: BusMessage) -> None:
        frame = decode(message.payload, InferFrame)
        frames.append(frame)
        if frame.last:
            done.set()

    reply = inbox or f"_INBOX_{tenant}.test{id(frames)}"
    subscription = await pool.bus.subscribe(reply, on_frame)
    payload = request if isinstance(request, bytes) else encode(request)
    await pool.bus._connection.publish(names.infer(tenant), payload, reply=reply)
    await asyncio.wait_for(done.wait(), WAIT_S)
    await subscription.stop()
    assert [frame.sequence for frame in frames] == list(range(len(frames)))
    assert [frame.last for frame in frames] == [False] * (len(frames) - 1) + [True]
    return [frame for frame in frames if frame.body or frame.last]


def body(model: str, **fields: Any) -> bytes:
    """A chat body."""
    return json.dumps({"model": model, "messages": HI} | fields).encode()


async def test_one_reply(pool: Pool) -> None:
    """A whole answer is one frame, equal to what HTTP gives; the tenant is the subject's."""
    model = record()
    await pool.register(model)
    replica = await pool.replica(model)
    (frame,) = await infer(pool, InferRequest(body=body(model.name)))
    over_http = (await pool.chat(model.name)).json()
    answer = json.loads(frame.body)
    assert frame.status == 200 and answer["choices"] == over_http["choices"] and answer["usage"] == over_http["usage"]
    assert set(answer) == set(over_http)
    assert [ticket.profile.tenant for ticket in replica.tickets] == ["acme", "default"]


@pytest.mark.parametrize("flag", [True, False])
async def test_a_stream(pool: Pool, flag: bool) -> None:
    """A chunk a frame, asked for by the message or by the body; usage last if asked for."""
    model = record()
    await pool.register(model)
    replica = await pool.replica(model)
    raw = body(model.name) if flag else body(model.name, stream=True, stream_options={"include_usage": True})
    frames = await infer(pool, InferRequest(body=raw, stream=flag))
    chunks = [json.loads(frame.body) for frame in frames if frame.body]
    deltas = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(deltas) == "Hello world"
    assert [chunk["choices"] == [] for chunk in chunks].count(True) == (0 if flag else 1)
    assert [ticket.profile.stream for ticket in replica.tickets] == [True]  # else the replica would put its steps together


async def test_completions(pool: Pool) -> None:
    """The other route's bodies too."""
    model = record()
    await pool.register(model)
    await pool.replica(model)
    request = InferRequest(endpoint=Endpoint.COMPLETIONS, body=json.dumps({"model": model.name, "prompt": "Hi"}).encode())
    (frame,) = await infer(pool, request)
    assert json.loads(frame.body)["choices"][0]["text"] == "Hello world"


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (InferRequest(body=body("unheard-of")), 404, "model_not_found"),
        (InferRequest(body=b"{"), 400, "invalid_json"),
        (InferRequest(body=body("unheard-of", temperature=9)), 400, "invalid_value"),
        (b"\xc1\x00", 400, "invalid_payload"),
        (b"", 400, "invalid_payload"),
    ],
)
async def test_errors(pool: Pool, request_: InferRequest | bytes, status: int, code: str) -> None:
    """An error is one last frame with the status and OpenAI's error object."""
    (frame,) = await infer(pool, request_)
    assert (frame.status, json.loads(frame.body)["error"]["code"]) == (status, code)


async def test_an_error_inside_a_stream(pool: Pool) -> None:
    """After chunks the last frame has the error's status (A6)."""

    async def breaks(run: Run) -> None:
        await run.say("word")
        await run.end(failure=Failure(kind=FailureKind.SICK, message="engine died", status=500))

    model = record()
    await pool.register(model)
    await pool.replica(model, breaks)
    frames = await infer(pool, InferRequest(body=body(model.name), stream=True))
    assert [frame.status for frame in frames[:-1]] == [200] * (len(frames) - 1) and len(frames) > 1
    assert frames[-1].status >= 500 and "error" in json.loads(frames[-1].body)


async def test_a_reply_to_another_tenants_inbox_is_refused(pool: Pool) -> None:
    """The answer of one tenant goes only below its own inbox; anything else is dropped and counted (SEC-1)."""
    model = record()
    await pool.register(model)
    await pool.replica(model)
    seen: list[BusMessage] = []
    replies = ["_INBOX_other.x", "_INBOX.x", "carpool.v1.pool", "_INBOX_acmes.x", ""]
    for reply in replies:
        if reply:
            await pool.bus.subscribe(reply, seen.append)
        request = encode(InferRequest(body=body(model.name)))
        await pool.bus._connection.publish(names.infer("acme"), request, reply=reply)
    counter = 'carpool_messages_discarded_total{kind="infer-reply"}'
    await until(lambda: f"{counter} {len(replies)}.0" in pool.gateway.metrics.text().decode(), "all are counted")
    assert pool.tickets == [] and [message for message in seen if message.subject != names.POOL] == []


async def test_an_unforeseen_error_is_answered(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits in vain for an answer because of a mistake of ours, and the answer quotes nothing of it."""

    async def fails(ask: Any) -> Any:
        raise KeyError("my secret prompt")

    monkeypatch.setattr(pool.gateway, "open", fails)
    (frame,) = await infer(pool, InferRequest(endpoint=Endpoint.CHAT, body=b"{}"))
    assert frame.status == 500
    assert json.loads(frame.body)["error"]["code"] == "internal_error"
    assert b"secret" not in frame.body
