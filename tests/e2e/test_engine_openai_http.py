"""The openai_http engine before a real vLLM server, and before a server that says what a test tells it to."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

import workers.engines.openai_http as openai_http
from ops.servers import free_port
from subjects.errors import EngineError
from subjects.messages import Endpoint, EngineType, Failure, FailureKind, Task, Usage
from tests.e2e.engines import CONTEXT_LEN, Driver, VllmServer, replica_spec
from tests.waiting import until
from workers.engines.openai_http import OpenAiHttpEngine


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 20} | fields


# ------------------------------------------------------------------------------------------------------ before real vLLM


@pytest_asyncio.fixture
async def driver(vllm_server: VllmServer) -> AsyncIterator[Driver]:
    """An engine in front of the vLLM server, which knows its model by another name."""
    engine = OpenAiHttpEngine(replica_spec(vllm_server.url, engine_type=EngineType.OPENAI_HTTP))
    info = await engine.start()
    assert (info.slots, info.gives_token_ids, info.continues, info.max_context_len) == (8, False, False, CONTEXT_LEN)
    await engine.warm(2)
    driver = Driver(engine)
    yield driver
    await driver.close()


@pytest.mark.engine
async def test_a_chat_passes_through_unharmed(driver: Driver, vllm_server: VllmServer) -> None:
    """Text, finish reason, usage and log probabilities are those the server gives to a direct client."""
    body = ask("Grüße 😀 from 東京", logprobs=True, top_logprobs=2, n=2, seed=4, temperature=1.0)
    theirs = await asyncio.to_thread(vllm_server.post, body)
    ours = await driver.ask(body | {"model": "some-name-of-ours", "stream": False})
    ours.check()
    for index, choice in enumerate(theirs["choices"]):
        assert ours.text(index) == choice["message"]["content"]
        assert ours.finish_reason(index) == choice["finish_reason"]
        content = [entry for detail in ours.details(index) for entry in detail["logprobs"]["content"]]
        assert [entry["token"] for entry in content] == [entry["token"] for entry in choice["logprobs"]["content"]]
    assert ours.usage.prompt_tokens == theirs["usage"]["prompt_tokens"]
    assert ours.usage.completion_tokens == theirs["usage"]["completion_tokens"]


@pytest.mark.engine
async def test_a_completion_passes_through_unharmed(driver: Driver, vllm_server: VllmServer) -> None:
    """The other route, with a stop string and the grant's bound on tokens."""
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    theirs = await asyncio.to_thread(vllm_server.post, body, Endpoint.COMPLETIONS)
    ours = await driver.ask(body | {"max_tokens": 500}, Endpoint.COMPLETIONS, max_tokens=12)
    ours.check()
    assert ours.text() == theirs["choices"][0]["text"]
    assert (ours.finish_reason(), ours.usage.completion_tokens) == ("length", 12)


@pytest.mark.engine
async def test_the_servers_refusals_are_the_clients_fault(driver: Driver) -> None:
    """400s keep their status and message, a good request beside them is untouched (PAINS F4, J8)."""
    good = driver.send(ask("A good one", ignore_eos=True))
    for body in (ask("word " * 3000), ask("x", temperature=-1), ask("x", structured_outputs={"regex": "((("}), {}):
        failure = (await driver.ask(body)).failure
        assert failure is not None
        assert (failure.kind, failure.status) == (FailureKind.BAD_REQUEST, 400)
        assert failure.message
    assert (await driver.wait(good)).usage.completion_tokens == 20


@pytest.mark.engine
async def test_an_abort_reaches_the_server(driver: Driver, vllm_server: VllmServer) -> None:
    """Before the first token and in the middle of a stream: the server's own count falls to zero within 2 s (PAINS A4)."""
    for begin in (False, True):
        request = driver.send(ask("A long one", max_tokens=900, ignore_eos=True))
        answer = driver.answers[request]
        if begin:
            await until(lambda answer=answer: len(answer.deltas) >= 3, within_s=30.0)  # type: ignore[misc]
        else:
            await asyncio.sleep(0.05)
        driver.engine.abort(request, 1)
        seen = len(answer.deltas)
        for _ in range(20):
            if await asyncio.to_thread(vllm_server.running) == 0:
                break
            await asyncio.sleep(0.1)
        else:
            raise AssertionError("the server still runs an aborted request")
        assert len(answer.deltas) == seen
        assert driver.engine.load().running == 0


# --------------------------------------------------------------------------------------- before a server we give the words


class ScriptedServer:
    """A server on loopback that answers a chat with the raw bytes in ``script`` and remembers what it was sent."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.script: list[bytes | float] = []
        self.models: Any = {"object": "list", "data": [{"id": "theirs", "owned_by": "vllm", "max_model_len": 512}]}
        self.health = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[bytes] = []
        self.closed_by_client = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", self.port)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server.close_clients() if hasattr(self._server, "close_clients") else None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1]
            length = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
            body = await reader.readexactly(length[0]) if length else b""
            if path.endswith(b"/models"):
                writer.write(_json_reply(self.models))
            elif path.endswith(b"/health"):
                writer.write(self.health.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            else:
                self.bodies.append(json.loads(body))
                self.headers.append(head.lower())
                for part in self.script:
                    if isinstance(part, float):
                        gone = asyncio.create_task(reader.read(1))
                        done, _ = await asyncio.wait({gone}, timeout=part)
                        if done:
                            self.closed_by_client += 1
                            break
                        gone.cancel()
                    else:
                        writer.write(part)
                        await writer.drain()
        writer.close()


def _json_reply(value: Any, status: str = "200 OK") -> bytes:
    content = json.dumps(value).encode()
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + content


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(*choices: dict[str, Any], **fields: Any) -> bytes:
    """One chunk; text goes out as it is, not escaped."""
    return b"data: " + json.dumps({"choices": choices, **fields}, ensure_ascii=False).encode() + b"\n\n"


def content(text: str, index: int = 0, finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": {"content": text}, "finish_reason": finish}


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer()
    await server.start()
    yield server
    await server.stop()


@pytest_asyncio.fixture
async def scripted(server: ScriptedServer) -> AsyncIterator[Driver]:
    engine = OpenAiHttpEngine(replica_spec(server.url, engine_type=EngineType.OPENAI_HTTP))
    await engine.start()
    driver = Driver(engine)
    yield driver
    await driver.close()


async def test_what_text_cannot_carry_is_kept(scripted: Driver, server: ScriptedServer) -> None:
    """Reasoning, tool calls and unknown delta fields come out as `detail`, whatever characters they hold."""
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\u2028\u0085"}'}}
    server.script = [
        STREAM,
        b": keepalive\n\n",
        event({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}),
        event({"index": 0, "delta": {"reasoning_content": "hm\u2028"}, "finish_reason": None}),
        event(content("a\u2028b\u0085c")),
        event({"index": 0, "delta": {"tool_calls": [call], "content": None}, "finish_reason": None, "logprobs": None}),
        event({"index": 0, "delta": {}, "finish_reason": "tool_calls", "stop_reason": 7}),
        event(usage={"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}),
        DONE,
    ]
    answer = await scripted.ask(ask("x"))
    answer.check()
    assert answer.text() == "a\u2028b\u0085c"
    assert answer.details() == [{"reasoning_content": "hm\u2028"}, {"tool_calls": [call]}]
    assert (answer.finish_reason(), answer.deltas[-1].stop_reason) == ("tool_calls", 7)
    assert answer.usage == Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2)


async def test_the_body_is_the_clients_but_for_what_is_ours(scripted: Driver, server: ScriptedServer) -> None:
    """Model id, streaming, usage, the tighter token bound and the cache salt are set; the rest passes as it was."""
    server.script = [STREAM, event(content("x", finish="stop")), DONE]
    body = ask(
        "x",
        model="ours",
        stream=False,
        stream_options={"other": 1},
        max_tokens=None,
        max_completion_tokens=90,
        extra={"a": [1]},
    )
    await scripted.ask(body, max_tokens=50, cache_salt="salt")
    await scripted.ask({"messages": []}, max_tokens=50)
    changed = {"model": "theirs", "stream": True, "stream_options": {"other": 1, "include_usage": True}}
    assert server.bodies[0] == body | changed | {"max_completion_tokens": 50, "cache_salt": "salt"}
    assert server.bodies[1] == {"messages": [], "max_tokens": 50} | changed | {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_two_choices_end_one_after_the_other(scripted: Driver, server: ScriptedServer, size: int) -> None:
    """Each choice counts its own chunks; one end, on the last; bytes cut anywhere, also within characters, are no matter."""
    stream = (
        STREAM
        + event(content("a😀"), content("b", 1))
        + event(content("東", finish="stop"))
        + event(content("d", 1, "length"))
        + DONE
    )
    server.script = [stream[at : at + size] for at in range(0, len(stream), size)]
    answer = await scripted.ask(ask("x", n=2))
    answer.check()
    assert [answer.text(0), answer.text(1)] == ["a😀東", "bd"]
    assert [answer.finish_reason(0), answer.finish_reason(1)] == ["stop", "length"]


@pytest.mark.parametrize(
    ("script", "kind", "status"),
    [
        (
            [_json_reply({"error": {"message": "too long", "param": "messages", "code": 400}}, "400 Bad Request")],
            "bad-request",
            400,
        ),
        ([_json_reply({"message": "no", "code": "x"}, "422 Unprocessable")], "bad-request", 422),
        ([_json_reply({"error": {"message": "bad (parameter=stop, value=a secret)"}}, "400 Bad")], "bad-request", 400),
        ([_json_reply({"error": {"message": "long " * 9000}}, "400 Bad Request")], "bad-request", 400),
        ([_json_reply({"error": "slow down"}, "429 Too Many Requests")], "busy", 429),
        ([b"HTTP/1.1 503 Unavailable\r\ncontent-length: 4\r\nconnection: close\r\n\r\noops"], "busy", 503),
        ([_json_reply({"error": {"message": "no such model"}}, "404 Not Found")], "sick", 502),
        ([_json_reply({"error": {"message": "key"}}, "401 Unauthorized")], "sick", 502),
        ([_json_reply({}, "500 Internal Server Error")], "sick", 500),
        ([STREAM, event(content("a")), b'data: {"error": {"message": "died", "code": 500}}\n\n', DONE], "sick", 500),
        ([STREAM, b'data: {"error": {"message": "bad", "code": 400}}\n\n', DONE], "bad-request", 400),
        ([STREAM, event(content("a"))], "sick", 502),
        ([STREAM, event(content("a", finish="stop"), content("b", 1))], "sick", 502),
        ([STREAM, DONE], "sick", 502),
        ([STREAM, b"data: {not json\n\n"], "sick", 502),
        ([STREAM, b'data: {"choices": 5}\n\n'], "sick", 502),
        ([STREAM, event({"index": 0, "delta": {"content": ["a"]}, "finish_reason": None})], "sick", 502),
        ([STREAM, event({"index": 0, "delta": {}, "finish_reason": 7})], "sick", 502),
        ([STREAM, b'data: {"choices": [], "usage": {"prompt_tokens": Infinity}}\n\n'], "sick", 502),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\ndata: "], "sick", 502),
        ([b""], "sick", 502),
    ],
)
async def test_failures_are_told_apart(
    scripted: Driver, server: ScriptedServer, script: list[bytes | float], kind: str, status: int
) -> None:
    """Bad request, busy and sick differ; a stream that just stops is a failure, never a short answer (PAINS A6)."""
    server.script = script
    answer = await scripted.ask(ask("x"))
    answer.check()
    assert answer.failure is not None
    assert (answer.failure.kind.value, answer.failure.status) == (kind, status)
    assert 0 < len(answer.failure.message) <= 600 and "secret" not in answer.failure.message


async def test_a_stream_without_done_ends_when_every_choice_has(scripted: Driver, server: ScriptedServer) -> None:
    """Some servers close the connection in place of [DONE]."""
    server.script = [STREAM, event(content("a")), event(content("b", finish="stop"))]
    answer = await scripted.ask(ask("x"))
    assert (answer.text(), answer.failure, answer.deltas[-1].end) == ("ab", None, True)


async def test_an_abort_closes_the_connection(scripted: Driver, server: ScriptedServer) -> None:
    """The server sees the close, nothing more comes out, and the slot is free."""
    server.script = [STREAM, event(content("a")), 30.0, event(content("b", finish="stop")), DONE]
    request = scripted.send(ask("x"))
    await until(lambda: len(scripted.answers[request].deltas) == 1, within_s=5.0)
    scripted.engine.abort(request, 1)
    scripted.engine.abort(request, 1)
    await until(lambda: server.closed_by_client == 1, within_s=2.0)
    assert scripted.engine.load().running == 0
    assert len(scripted.answers[request].deltas) == 1


async def test_a_continuation_is_refused(scripted: Driver, server: ScriptedServer) -> None:
    """Without token ids nothing can be continued; the server is not even asked."""
    answer = await scripted.ask(ask("x"), sent_token_ids=(1,))
    assert isinstance(answer.failure, Failure)
    assert server.bodies == []
    assert (await scripted.ask(b"nonsense")).failure == Failure(
        kind=FailureKind.BAD_REQUEST, message="the body is not a JSON object", status=400
    )


async def test_a_server_that_vanishes_kills_the_engine(
    scripted: Driver, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health checks that fail in a row end `steps()`; a request meanwhile fails as sick."""
    monkeypatch.setattr(openai_http, "HEALTH_EVERY_S", 0.05)
    await server.stop()
    answer = await scripted.ask(ask("x"))
    assert answer.failure is not None
    assert (answer.failure.kind, answer.failure.status) == (FailureKind.SICK, 502)
    death = await scripted.death()
    assert isinstance(death, EngineError)
    assert "failed 5 health checks" in str(death)


@pytest.mark.parametrize(
    ("models", "options", "reason"),
    [
        ({"data": [{"id": "a"}, {"id": "b"}]}, {}, "set engine option model to one of what .* serves: a, b"),
        ({"data": [{"id": "a"}]}, {"model": "c"}, "set engine option model"),
        ({"data": []}, {}, "set engine option model"),
        (["odd"], {}, "is not an OpenAI model list"),
        ({"data": [{"id": "a"}]}, {"api_key_env": "CARPOOL_TEST_NO_SUCH_KEY"}, "CARPOOL_TEST_NO_SUCH_KEY, which is not set"),
    ],
)
async def test_a_wrong_setup_is_one_line(server: ScriptedServer, models: Any, options: dict[str, Any], reason: str) -> None:
    """A start that cannot work says what to change."""
    server.models = models
    engine = OpenAiHttpEngine(replica_spec(server.url, engine_type=EngineType.OPENAI_HTTP, engine_options=options))
    with pytest.raises(EngineError, match=reason):
        await engine.start()
    await engine.stop()


async def test_no_server_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listening ends the start after its bound."""
    monkeypatch.setattr(openai_http, "START_TIMEOUT_S", 0.2)
    monkeypatch.setattr(openai_http, "START_POLL_S", 0.05)
    engine = OpenAiHttpEngine(replica_spec(f"http://127.0.0.1:{free_port()}", engine_type=EngineType.OPENAI_HTTP))
    with pytest.raises(EngineError, match=r"no OpenAI server answers at http://127.0.0.1:\d+ \(ConnectError\)"):
        await engine.start()
    await engine.stop()
    await engine.stop()


async def test_the_key_goes_along(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key named by the option is sent, and a proxy of the environment is not asked."""
    monkeypatch.setenv("CARPOOL_TEST_KEY", "secret")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    options: dict[str, Any] = {"api_key_env": "CARPOOL_TEST_KEY"}
    engine = OpenAiHttpEngine(replica_spec(server.url, engine_type=EngineType.OPENAI_HTTP, engine_options=options))
    await engine.start()
    driver = Driver(engine)
    server.script = [STREAM, event(content("x", finish="stop")), DONE]
    await driver.ask(ask("x"))
    await driver.close()
    assert b"authorization: bearer secret" in server.headers[0]


# ----------------------------------------------------------------------------------------------------------- embeddings


VECTORS = [[0.25, -1.5], [3.0, 1e-3], [0.1, 2.0]]


def embedded(*indexes: int, base64_form: bool = False, **fields: Any) -> bytes:
    """A server's answer with the vectors of these inputs, in this order."""
    data = []
    for index in indexes:
        vector: Any = VECTORS[index]
        if base64_form:
            vector = base64.b64encode(struct.pack("<2f", *vector)).decode()
        data.append({"object": "embedding", "index": index, "embedding": vector})
    usage = {"prompt_tokens": 9, "total_tokens": 9}
    return _json_reply({"object": "list", "data": data, "model": "theirs", "usage": usage} | fields)


@pytest.mark.parametrize("base64_form", [False, True])
@pytest.mark.parametrize("encoding", [None, "float", "base64"])
async def test_embeddings_come_in_the_format_asked_for(
    scripted: Driver, server: ScriptedServer, base64_form: bool, encoding: str | None
) -> None:
    """Whatever the server knows of formats, and in the order of the inputs; the body is the client's but for the model."""
    server.script = [embedded(2, 0, 1, base64_form=base64_form)]
    body: dict[str, Any] = {"input": ["a", "b", "c"], "model": "ours", "dimensions": 2, "extra": [1]}
    body |= {"encoding_format": encoding} if encoding else {}
    answer = await scripted.ask(body, Endpoint.EMBEDDINGS, max_tokens=50, cache_salt="salt")
    answer.check()
    assert server.bodies == [body | {"model": "theirs"}]
    assert server.headers[0].startswith(b"post /v1/embeddings ")
    assert answer.usage == Usage(prompt_tokens=9, completion_tokens=0) and answer.finish_reason() == "stop"
    (detail,) = answer.details()
    for one, expected in zip(detail["data"], VECTORS, strict=True):
        vector = one["embedding"]
        if encoding == "base64":
            vector = struct.unpack("<2f", base64.b64decode(vector))
        assert list(vector) == pytest.approx(expected)
        if not base64_form and encoding != "base64":
            assert vector == expected


@pytest.mark.parametrize(
    ("reply", "kind", "status"),
    [
        (_json_reply({"error": {"message": "not supported", "code": 400}}, "400 Bad Request"), "bad-request", 400),
        (_json_reply({"error": "slow down"}, "429 Too Many Requests"), "busy", 429),
        (embedded(0), "sick", 502),
        (embedded(0, 1, 2), "sick", 502),
        (embedded(0, 0), "sick", 502),
        (embedded(0, 1, data=[{"index": 0, "embedding": None}, {"index": 1, "embedding": {}}]), "sick", 502),
        (embedded(0, 1, data=7), "sick", 502),
        (embedded(0, 1, usage={"prompt_tokens": "many"}), "sick", 502),
        (STREAM + event(content("x")), "sick", 502),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", "sick", 502),
    ],
)
async def test_what_is_no_embeddings_answer_fails_the_request_alone(
    scripted: Driver, server: ScriptedServer, reply: bytes, kind: str, status: int
) -> None:
    """A refusal keeps its kind; a vector too few, too many or none at all is the server's fault, and the engine lives."""
    server.script = [reply]
    body = {"input": ["a", "b"], "model": "m"}
    failure = (await scripted.ask(body, Endpoint.EMBEDDINGS)).failure
    assert failure is not None and (failure.kind.value, failure.status) == (kind, status)
    server.script = [embedded(1, 0)]
    assert (await scripted.ask(body, Endpoint.EMBEDDINGS)).usage.prompt_tokens == 9


async def test_an_embedding_is_aborted_by_closing(scripted: Driver, server: ScriptedServer) -> None:
    """As a stream is (A4)."""
    server.script = [30.0]
    request = scripted.send({"input": "a", "model": "m"}, Endpoint.EMBEDDINGS)
    await until(lambda: bool(server.bodies))
    scripted.engine.abort(request, 1)
    await until(lambda: server.closed_by_client == 1)
    assert not scripted.answers[request].deltas and scripted.engine.load().running == 0


@pytest.mark.parametrize(
    ("reply", "word"),
    [(embedded(0), ""), (embedded(0, data=[]), "IndexError"), (_json_reply({}, "404 Not Found"), "status 404")],
)
async def test_an_embedding_model_warms_with_an_embedding(server: ScriptedServer, reply: bytes, word: str) -> None:
    """A server that makes no vectors is not ready, whatever else it answers."""
    server.script = [reply]
    engine = OpenAiHttpEngine(replica_spec(server.url, engine_type=EngineType.OPENAI_HTTP, task=Task.EMBED))
    await engine.start()
    try:
        if word:
            with pytest.raises(EngineError, match=word):
                await engine.warm(4)
        else:
            await engine.warm(4)
        assert [sorted(body) for body in server.bodies] == [["encoding_format", "input", "model"]]
    finally:
        await engine.stop()
