"""The SDK against a small HTTP server and a responder on a real nats-server (ING-7)."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from carpool import ApiError, AsyncCrossModelScheduler, CrossModelScheduler
from ops.servers import free_port
from subjects import names
from subjects.bus import BusMessage
from subjects.codec import decode, encode
from subjects.messages import ControlReply, ControlRequest, Endpoint, InferFrame, InferRequest, Usage
from subjects.nats.bus import NatsBus
from tests.servers import NatsServer

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
ERROR = {"error": {"message": "Too many.", "type": "rate_limit_error", "param": "model", "code": "rate_limited"}}


def whole(body: dict[str, Any]) -> dict[str, Any]:
    """A response that repeats what was asked."""
    message = {"role": "assistant", "content": f"{body['model']}: {body['messages'][-1]['content']}"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "x", "model": "tiny", "choices": [choice], "usage": USAGE, "asked": body}


def pieces() -> list[dict[str, Any]]:
    """The chunks of a streamed answer."""
    deltas: list[dict[str, Any]] = [{"role": "assistant"}, {"content": "Hé"}, {"content": "llo"}]
    chunks: list[dict[str, Any]] = [{"model": "tiny", "choices": [{"delta": d, "finish_reason": None}]} for d in deltas]
    chunks.append({"model": "tiny", "choices": [{"delta": {}, "finish_reason": "stop"}]})
    chunks.append({"model": "tiny", "choices": [], "usage": USAGE})
    return chunks


# -------------------------------------------------------------------------------------------------------------------- HTTP

SSE = {
    "good": [": waking\n\n", *(f"data: {json.dumps(piece)}\n\n" for piece in pieces()), "data: [DONE]\n\n"],
    "cut": [f"data: {json.dumps(pieces()[1])}\n\n"],
    "failing": [f"data: {json.dumps(pieces()[1])}\n\n", f"data: {json.dumps(ERROR)}\n\n", "data: [DONE]\n\n"],
    "garbage": ["data: nonsense\n\n"],
}


class HttpPool:
    """An HTTP server whose behaviour the model's name chooses."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.gone = threading.Event()
        self.port = free_port()

    @property
    def url(self) -> str:
        """For clients."""
        return f"http://127.0.0.1:{self.port}"

    async def answer(self, request: Request) -> Response:
        """Chat completions."""
        body = json.loads(await request.body())
        self.requests.append((dict(request.headers), body))
        model = body["model"]
        if model == "busy":
            return JSONResponse(ERROR, status_code=429, headers={"Retry-After": "7"})
        if model == "proxy":
            return Response("<html>Bad gateway</html>", status_code=502)
        if model == "array":
            return JSONResponse([])
        if not body.get("stream"):
            return JSONResponse(whole(body))
        return StreamingResponse(self.endless() if model == "endless" else replay(SSE.get(model, SSE["good"])))

    async def endless(self) -> AsyncIterator[str]:
        """Chunks until the client goes away."""
        try:
            while True:
                yield SSE["cut"][0]
                await asyncio.sleep(0.001)
        finally:
            self.gone.set()


async def replay(parts: Sequence[str]) -> AsyncIterator[bytes]:
    """Bytes in awkward pieces: a UTF-8 sequence and an event may be cut anywhere."""
    data = "".join(parts).replace("\\u00e9", "é").encode()
    for at in range(0, len(data), 7):
        yield data[at : at + 7]


@pytest.fixture
def http_pool() -> Iterator[HttpPool]:
    """A server in a thread of its own, so that it can serve the blocking SDK too."""
    pool = HttpPool()
    app = Starlette(routes=[Route("/v1/chat/completions", pool.answer, methods=["POST"])])
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=pool.port, log_level="error", lifespan="off", ws="none")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    yield pool
    server.should_exit = True
    thread.join()


async def test_http_whole_answer(http_pool: HttpPool) -> None:
    """The prompt becomes a user turn, no model becomes auto, other fields pass, the key is a bearer token."""
    async with AsyncCrossModelScheduler(http_pool.url + "/v1", api_key="sk-1") as scheduler:
        result = await scheduler.infer("Hi", 5, temperature=0.5)
        assert await scheduler.discover() == scheduler.devices == ()
    headers, body = http_pool.requests[0]
    assert headers["authorization"] == "Bearer sk-1"
    assert body == {
        "model": "auto",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 5,
        "temperature": 0.5,
    }
    assert (result.text, result.model, result.finish_reason) == ("auto: Hi", "tiny", "stop")
    assert result.usage == Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    assert result.raw["id"] == "x"


async def test_http_stream(http_pool: HttpPool) -> None:
    """Comments are skipped, cut events are put together, usage comes with the last chunk."""
    async with AsyncCrossModelScheduler(http_pool.url) as scheduler:
        turns = [{"role": "user", "content": "Hi"}]
        chunks = [chunk async for chunk in await scheduler.infer(messages=turns, model="good", stream=True)]
    assert http_pool.requests[0][1] == {
        "model": "good",
        "messages": turns,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert [chunk.text for chunk in chunks] == ["", "Hé", "llo", "", ""]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, None, "stop", None]
    assert chunks[-1].usage == Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)


@pytest.mark.parametrize(
    ("model", "stream", "status", "code", "text"),
    [
        ("busy", False, 429, "rate_limited", ""),
        ("busy", True, 429, "rate_limited", ""),
        ("proxy", False, 502, None, ""),
        ("array", False, 502, "broken_answer", ""),
        ("cut", True, 502, "broken_answer", "Hé"),
        ("failing", True, 500, "rate_limited", "Hé"),
        ("garbage", True, 502, "broken_answer", ""),
    ],
)
async def test_http_errors(http_pool: HttpPool, model: str, stream: bool, status: int, code: str | None, text: str) -> None:
    """Refusals, broken answers and errors in the middle of a stream are all ApiErrors; a cut answer is never a short one."""
    got = ""
    async with AsyncCrossModelScheduler(http_pool.url) as scheduler:
        with pytest.raises(ApiError) as caught:
            if stream:
                async for chunk in await scheduler.infer("Hi", model=model, stream=True):
                    got += chunk.text
            else:
                await scheduler.infer("Hi", model=model)
    assert (caught.value.status, caught.value.code, got) == (status, code, text)
    if status == 429:
        assert (caught.value.message, caught.value.type, caught.value.param) == ("Too many.", "rate_limit_error", "model")
        assert caught.value.retry_after_s == 7


async def test_leaving_a_stream_ends_the_request(http_pool: HttpPool) -> None:
    """The server sees the client go when the iterator is closed."""
    async with AsyncCrossModelScheduler(http_pool.url) as scheduler:
        chunks = await scheduler.infer("Hi", model="endless", stream=True)
        await anext(chunks)
        await chunks.aclose()
        assert await asyncio.to_thread(http_pool.gone.wait, 15)


def test_http_without_asyncio(http_pool: HttpPool) -> None:
    """The same answers, chunks and errors; an early break ends the request; several threads may ask."""
    with CrossModelScheduler(http_pool.url) as scheduler:
        assert scheduler.infer("Hi").text == "auto: Hi"
        assert "".join(chunk.text for chunk in scheduler.infer("Hi", stream=True, model="good")) == "Héllo"
        with pytest.raises(ApiError, match="Too many"):
            scheduler.infer("Hi", model="busy")
        for chunk in scheduler.infer("Hi", stream=True, model="endless"):
            assert chunk.text == "Hé"
            break
        assert http_pool.gone.wait(15)
        texts: list[str] = []
        threads = [threading.Thread(target=lambda i=i: texts.append(scheduler.infer(f"{i}").text)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(texts) == [f"auto: {i}" for i in range(4)]
    scheduler.close()
    assert "carpool-sdk" not in {thread.name for thread in threading.enumerate()}


async def test_nobody_there(stopped_nats_server: NatsServer) -> None:
    """An ApiError 503 either way, that names the place."""
    for url in (f"http://127.0.0.1:{stopped_nats_server.port}", stopped_nats_server.url):
        async with AsyncCrossModelScheduler(url, timeout_s=0.5) as scheduler:
            with pytest.raises(ApiError, match=f"127.0.0.1:{stopped_nats_server.port}") as caught:
                await scheduler.infer("Hi")
            assert (caught.value.status, caught.value.code) == (503, "unreachable")


async def test_wrong_use() -> None:
    """Said where it is made."""
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        AsyncCrossModelScheduler("127.0.0.1:8000")
    with pytest.raises(ValueError, match="tenant"):
        CrossModelScheduler("nats://127.0.0.1", tenant="a.b")
    async with AsyncCrossModelScheduler("http://127.0.0.1:9") as scheduler:
        with pytest.raises(ValueError, match="prompt or messages"):
            await scheduler.infer()
        with pytest.raises(ValueError, match="prompt or messages"):
            await scheduler.infer("Hi", messages=[])


# -------------------------------------------------------------------------------------------------------------------- NATS


class NatsPool:
    """Answers as a gateway and a scheduler would; the model's name chooses how."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus
        self.requests: list[tuple[str, InferRequest]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Subscribes."""
        await self.bus.subscribe(names.ALL_INFER, self.asked)
        await self.bus.subscribe(names.ALL_CONTROL, self.controlled)
        await self.bus.round_trip(timeout_s=5)

    def asked(self, message: BusMessage) -> None:
        """A request."""
        assert message.reply.startswith(f"_INBOX_{message.subject.rpartition('.')[2]}.")
        request = decode(message.payload, InferRequest)
        self.requests.append((message.subject, request))
        self.tasks.append(asyncio.get_running_loop().create_task(self.answer(request, message.reply)))

    async def answer(self, request: InferRequest, reply: str) -> None:
        """The frames."""
        for frame in self.frames(json.loads(request.body), request.stream):
            await self.bus.publish(reply, frame if isinstance(frame, bytes) else encode(frame))

    def frames(self, body: dict[str, Any], stream: bool) -> list[InferFrame | bytes]:
        """What a model of this name answers."""
        model = body["model"]
        parts = (
            [b"", *(json.dumps(piece).encode() for piece in pieces())] if stream else [b"", json.dumps(whole(body)).encode()]
        )
        frames = [InferFrame(sequence=i, body=part, last=i == len(parts) - 1) for i, part in enumerate(parts)]
        if model == "busy":
            return [InferFrame(sequence=0, status=429, body=json.dumps(ERROR).encode(), last=True)]
        if model == "gap":
            return [*frames[:2], *frames[3:]]
        if model == "twice":
            return [frame for frame in frames for _ in range(2)]
        if model == "garbage":
            return [b"\xc1"]
        if model == "silent":
            return [*frames[:1]]
        return list(frames)

    def controlled(self, message: BusMessage) -> None:
        """A verb."""
        assert json.loads(decode(message.payload, ControlRequest).argument) == {"what": "devices"}
        reply = ControlReply(result=b'[{"worker":"w-1","device":"gpu0","memory_bytes":8}]')
        self.tasks.append(asyncio.get_running_loop().create_task(self.bus.publish(message.reply, encode(reply))))


@pytest.fixture
async def nats_pool(nats_server: NatsServer) -> AsyncIterator[NatsPool]:
    """A responder on a fresh server."""
    bus = await NatsBus.connect(nats_server.url, name="pool")
    pool = NatsPool(bus)
    await pool.start()
    yield pool
    await asyncio.gather(*pool.tasks)
    await bus.close()


async def test_nats_whole_answer_and_devices(nats_server: NatsServer, nats_pool: NatsPool) -> None:
    """The same body on the tenant's subject, the reply below the tenant's inbox; devices are read once."""
    async with AsyncCrossModelScheduler(nats_server.url, tenant="acme", api_key="sk-1") as scheduler:
        assert not scheduler.devices
        result = await scheduler.infer("Hi", 5)
        assert list(scheduler.devices) == [{"worker": "w-1", "device": "gpu0", "memory_bytes": 8}]
    subject, request = nats_pool.requests[0]
    assert (subject, request.endpoint, request.stream) == (names.infer("acme"), Endpoint.CHAT, False)
    assert request.headers == {"authorization": "Bearer sk-1"}
    assert json.loads(request.body) == {
        "model": "auto",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 5,
    }
    assert (result.text, result.model) == ("auto: Hi", "tiny")
    assert result.usage == Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)


@pytest.mark.parametrize("model", ["good", "twice"])
async def test_nats_stream(nats_server: NatsServer, nats_pool: NatsPool, model: str) -> None:
    """Chunks in order; empty frames only show that the gateway lives, and a repeated frame is not a repeated word."""
    async with AsyncCrossModelScheduler(nats_server.url, False) as scheduler:
        chunks = [chunk async for chunk in await scheduler.infer("Hi", model=model, stream=True)]
        assert scheduler.devices == ()
    assert "".join(chunk.text for chunk in chunks) == "Héllo"
    assert (chunks[-2].finish_reason, chunks[-1].usage is not None) == ("stop", True)


@pytest.mark.parametrize(
    ("model", "status", "code"),
    [
        ("busy", 429, "rate_limited"),
        ("gap", 502, "broken_answer"),
        ("garbage", 502, "broken_answer"),
        ("silent", 504, "timeout"),
    ],
)
async def test_nats_errors(nats_server: NatsServer, nats_pool: NatsPool, model: str, status: int, code: str) -> None:
    """A refusal, a lost frame, bytes that are no frame, silence."""
    async with AsyncCrossModelScheduler(nats_server.url, timeout_s=0.5) as scheduler:
        with pytest.raises(ApiError) as caught:
            async for _ in await scheduler.infer("Hi", model=model, stream=True):
                pass
    assert (caught.value.status, caught.value.code) == (status, code)


async def test_nats_without_a_gateway(nats_server: NatsServer) -> None:
    """Said at once, and discovery alone fails nothing."""
    async with AsyncCrossModelScheduler(nats_server.url) as scheduler:
        assert await scheduler.discover() == ()
        async with asyncio.timeout(5):
            with pytest.raises(ApiError, match="no gateway listens") as caught:
                await scheduler.infer("Hi")
    assert caught.value.status == 503


async def test_nats_lost_while_waiting(nats_server: NatsServer, nats_pool: NatsPool) -> None:
    """The server dies under a request: an error at once, not after the silence."""
    async with AsyncCrossModelScheduler(nats_server.url, False) as scheduler:
        waiting = asyncio.create_task(scheduler.infer("Hi", model="silent"))
        while not nats_pool.requests:
            await asyncio.sleep(0.005)
        await asyncio.gather(*nats_pool.tasks)
        await nats_pool.bus.round_trip(timeout_s=5)
        await asyncio.to_thread(nats_server.kill)
        with pytest.raises(ApiError) as caught:
            await waiting
    assert (caught.value.status, caught.value.code) == (503, "unreachable")


async def test_nats_without_asyncio(nats_server: NatsServer, nats_pool: NatsPool) -> None:
    """The blocking form on a thread of its own beside the responder's loop."""

    def ask() -> tuple[str, str, int]:
        with CrossModelScheduler(nats_server.url) as scheduler:
            text = "".join(chunk.text for chunk in scheduler.infer("Hi", model="good", stream=True))
            return scheduler.infer("Hi").text, text, len(scheduler.devices)

    assert await asyncio.to_thread(ask) == ("auto: Hi", "Héllo", 1)
