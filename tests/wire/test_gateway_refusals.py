"""Bad input: the right status in OpenAI's error shape, and nothing reaches the pool (ING-1, ING-9, J5, O7)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from broker.gateway.app import HttpOptions
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.gateway_pool import Pool, open_pool, record

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "Hi"}
BODY_BYTES_MAX = 256 * 1024

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(shared_nats_server: NatsServer) -> AsyncIterator[Pool]:
    """One gateway that knows the model ``known`` with a context of 2,048 tokens; no replica anywhere."""
    async with open_pool(shared_nats_server.url, http=HttpOptions(body_bytes_max=BODY_BYTES_MAX)) as pool:
        await pool.register(record("known"))
        yield pool


def chat(**fields: Any) -> dict[str, Any]:
    """A good chat body with changes."""
    return {"model": "known", "messages": [USER]} | fields


def prompt(**fields: Any) -> dict[str, Any]:
    """A good completions body with changes."""
    return {"model": "known", "prompt": "Hi"} | fields


BAD_FIELDS: list[tuple[str, dict[str, Any], int, str | None, str | None]] = [
    (CHAT, {"messages": [USER]}, 400, "model", "missing_required_parameter"),
    (CHAT, {"model": "known"}, 400, "messages", "missing_required_parameter"),
    (CHAT, chat(model=""), 400, "model", None),
    (CHAT, chat(model=7), 400, "model", None),
    (CHAT, chat(model="unheard-of"), 404, "model", "model_not_found"),
    (CHAT, chat(messages=[]), 400, "messages", None),
    (CHAT, chat(messages="Hi"), 400, "messages", None),
    (CHAT, chat(messages=["Hi"]), 400, "messages[0]", None),
    (CHAT, chat(messages=[{"content": "Hi"}]), 400, "messages[0].role", "missing_required_parameter"),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "messages[0].content", None),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, "messages[0].content", None),
    (CHAT, chat(messages=[{"role": "user", "content": [{"text": "Hi"}]}]), 400, "messages[0].content[0].type", None),
    (CHAT, chat(messages=[USER] * 5000), 400, "messages", None),
    (CHAT, chat(max_tokens=0), 400, "max_tokens", None),
    (CHAT, chat(max_tokens=-1), 400, "max_tokens", None),
    (CHAT, chat(max_tokens="9"), 400, "max_tokens", None),
    (CHAT, chat(max_tokens=1.5), 400, "max_tokens", None),
    (CHAT, chat(max_completion_tokens=0), 400, "max_completion_tokens", None),
    (CHAT, chat(max_tokens=2048), 400, "messages", "context_length_exceeded"),
    (CHAT, chat(messages=[{"role": "user", "content": "long " * 9000}]), 400, "messages", "context_length_exceeded"),
    (CHAT, chat(messages=[{"role": "user", "content": "long " * 9000}], stream=True), 400, None, "context_length_exceeded"),
    (CHAT, chat(temperature=2.1), 400, "temperature", None),
    (CHAT, chat(temperature=-0.1), 400, "temperature", None),
    (CHAT, chat(temperature="warm"), 400, "temperature", None),
    (CHAT, chat(top_p=1.1), 400, "top_p", None),
    (CHAT, chat(n=0), 400, "n", None),
    (CHAT, chat(n=1_000_000), 400, "n", None),
    (CHAT, chat(n=True), 400, "n", None),
    (CHAT, chat(stop=["x"] * 17), 400, "stop", None),
    (CHAT, chat(stop=[1]), 400, "stop[0]", None),
    (CHAT, chat(presence_penalty=2.5), 400, "presence_penalty", None),
    (CHAT, chat(frequency_penalty=-2.5), 400, "frequency_penalty", None),
    (CHAT, chat(logit_bias={str(n): 1 for n in range(2000)}), 400, "logit_bias", None),
    (CHAT, chat(logit_bias={"1": 101}), 400, "logit_bias", None),
    (CHAT, chat(stop=["x", ""]), 400, "stop", None),
    (CHAT, chat(logit_bias={"one": 1}), 400, "logit_bias", None),
    (CHAT, chat(top_logprobs=3), 400, "top_logprobs", None),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", None),
    (CHAT, chat(stream="yes"), 400, "stream", None),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options", None),
    (CHAT, chat(seed=2**70), 400, "seed", None),
    (CHAT, chat(response_format="json"), 400, "response_format", None),
    (CHAT, chat(response_format={}), 400, "response_format.type", "missing_required_parameter"),
    (CHAT, chat(tools=[{"type": "function", "function": {}}]), 400, "tools[0].function.name", "missing_required_parameter"),
    (CHAT, chat(tools=[{}] * 200), 400, None, None),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice", None),
    (CHAT, chat(tool_choice="x" * 9000), 400, "tool_choice", None),
    (CHAT, chat(stop={"x" * 9000: 1}), 400, "stop", None),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}]}]),
        400,
        "messages[0].content[0].image_url",
        None,
    ),
    (COMPLETIONS, {"model": "known"}, 400, "prompt", "missing_required_parameter"),
    (CHAT, chat(adapter=5), 400, "adapter", None),
    (COMPLETIONS, prompt(prompt=None), 400, "prompt", "invalid_value"),
    (COMPLETIONS, prompt(prompt=[None]), 400, "prompt[0]", "invalid_value"),
    (COMPLETIONS, prompt(prompt=[]), 400, "prompt", None),
    (COMPLETIONS, prompt(prompt=[[]]), 400, "prompt", None),
    (COMPLETIONS, prompt(prompt={"a": 1}), 400, "prompt", None),
    (COMPLETIONS, prompt(prompt=[-1]), 400, "prompt[0]", None),
    (COMPLETIONS, prompt(prompt=["a", 5]), 400, "prompt", None),
    (COMPLETIONS, prompt(prompt=["a"] * 129), 400, "prompt", None),
    (COMPLETIONS, prompt(prompt=["a"] * 9, n=16), 400, "prompt", None),
    (COMPLETIONS, prompt(max_tokens=-1), 400, "max_tokens", None),
    (COMPLETIONS, prompt(logprobs=True), 400, "logprobs", None),
    (COMPLETIONS, prompt(best_of=99), 400, "best_of", None),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "code"), BAD_FIELDS)
async def test_bad_fields(
    pool: Pool, path: str, body: dict[str, Any], status: int, param: str | None, code: str | None
) -> None:
    """Each wrong field: its status, its name in ``param``, and no ticket."""
    error = await refused(pool, "POST", path, status, content=json.dumps(body).encode(), headers=JSON)
    assert param is None or error["param"] == param
    assert code is None or error["code"] == code


def _raw(text: str) -> bytes:
    return ('{"model":"known","messages":[{"role":"user","content":"Hi"}],' + text + "}").encode()


BAD_BYTES: list[tuple[bytes, int, str]] = [
    (b"", 400, "invalid_json"),
    (b"{", 400, "invalid_json"),
    (_raw('"user":"u"') + b" {}", 400, "invalid_json"),
    (b"[]", 400, "invalid_type"),
    (b"null", 400, "invalid_type"),
    (b'"text"', 400, "invalid_type"),
    (b"model=known", 400, "invalid_json"),
    (b"\xff\xfe{", 400, "invalid_json"),
    ('{"model":"known"}'.encode("utf-16"), 400, "invalid_json"),
    (b'{"model":"known","messages":[{"role":"user","content":"\xff"}]}', 400, "invalid_json"),
    (_raw('"unknown":"\xff"').replace(b"\xc3\xbf", b"\xff"), 400, "invalid_json"),
    (_raw('"user":"\\ud800"'), 400, "invalid_json"),
    (_raw('"temperature":NaN'), 400, "invalid_json"),
    (_raw('"temperature":Infinity'), 400, "invalid_json"),
    (_raw('"unknown":NaN'), 400, "invalid_json"),
    (_raw('"temperature":1e308'), 400, "invalid_value"),
    (_raw('"temperature":1e999'), 400, "invalid_value"),
    (_raw('"unknown":' + "[" * 20_000 + "]" * 20_000), 400, "invalid_json"),
    (_raw('"tool_choice":' + '{"a":' * 8_000 + "1" + "}" * 8_000), 400, "invalid_json"),
]


@pytest.mark.parametrize(("body", "status", "code"), BAD_BYTES)
async def test_bad_bytes(pool: Pool, body: bytes, status: int, code: str) -> None:
    """What is no JSON object is a 400, however it is broken."""
    assert (await refused(pool, "POST", CHAT, status, content=body, headers=JSON))["code"] == code


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "code"),
    [
        ("POST", CHAT, {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ("POST", CHAT, {}, 415, "unsupported_media_type"),
        ("POST", CHAT, {"content-type": "multipart/form-data; boundary=x"}, 415, "unsupported_media_type"),
        ("GET", CHAT, {}, 405, "method_not_allowed"),
        ("DELETE", COMPLETIONS, {}, 405, "method_not_allowed"),
        ("POST", "/v1/models", JSON, 405, "method_not_allowed"),
        ("POST", "/v1/images/generations", JSON, 404, "unknown_url"),
        ("POST", CHAT + "/", JSON, 404, "unknown_url"),
        ("POST", "/" + CHAT, JSON, 404, "unknown_url"),
        ("GET", "/", {}, 404, "unknown_url"),
        ("GET", "/v1/models/unheard-of", {}, 404, "model_not_found"),
        ("POST", CHAT, JSON | {"x-timeout-s": "soon"}, 400, "invalid_value"),
        ("POST", CHAT, JSON | {"x-timeout-s": "nan"}, 400, "invalid_value"),
        ("POST", CHAT, JSON | {"x-timeout-s": "-1"}, 400, "invalid_value"),
        ("POST", CHAT, JSON | {"x-request-kind": "mining"}, 400, "invalid_value"),
    ],
)
async def test_bad_requests_around_the_body(
    pool: Pool, method: str, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    """Wrong type, method, path or header: OpenAI's shape everywhere (J5)."""
    content = json.dumps(chat()).encode() if method == "POST" else None
    error = await refused(pool, method, path, status, content=content, headers=headers)
    assert error["code"] == code and (code != "unknown_url" or "See /openapi.json" in error["message"])


async def test_a_body_over_the_limit(pool: Pool) -> None:
    """413, with an announced length and without; the connection's other requests are not harmed (O7)."""
    large = json.dumps(chat(messages=[{"role": "user", "content": "x" * (9 << 20)}])).encode()
    assert (await refused(pool, "POST", CHAT, 413, content=large, headers=JSON))["code"] == "request_too_large"

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(large), 1 << 20):
            yield large[start : start + (1 << 20)]

    assert (await refused(pool, "POST", CHAT, 413, content=pieces(), headers=JSON))["code"] == "request_too_large"
    just_over = json.dumps(chat(user="x" * BODY_BYTES_MAX)).encode()
    assert (await refused(pool, "POST", CHAT, 413, content=just_over, headers=JSON))["code"] == "request_too_large"


async def test_a_giant_announced_body_is_refused_unread(pool: Pool) -> None:
    """A length beyond all reason is answered at once, before any of the body is sent (O7)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", pool.server.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1")
    writer.write(b"0" * 12 + b"\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(4096), 15)
    assert answer.startswith(b"HTTP/1.1 413 ") and b"request_too_large" in answer
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-request-id: " + b"x" * (1 << 20) + b"\r\n\r\n",
        b"GET /" + b"x" * (1 << 20) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
        b"\x16\x03\x01 no HTTP at all\r\n\r\n",
    ],
)
async def test_hostile_heads(pool: Pool, head: bytes) -> None:
    """A request id of a megabyte, endless headers, or no HTTP: 400 in OpenAI's shape or a closed connection (J5, J10)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", pool.server.port)
    answer = b""
    with contextlib.suppress(ConnectionError):
        writer.write(head)
        await writer.drain()
        answer = await asyncio.wait_for(reader.read(4096), 15)
    writer.transport.abort()
    assert answer == b"" or (answer.startswith(b"HTTP/1.1 400 ") and b'"code":"invalid_http"' in answer)
    assert (await pool.http.get("/health")).status_code == 200


async def test_the_sdk_raises_its_typed_errors(pool: Pool) -> None:
    """OpenAI's client maps our errors to its own exceptions, with a message (J5)."""
    client = pool.openai()
    with pytest.raises(openai.NotFoundError, match=r"does not exist\. See /v1/models\."):
        await client.chat.completions.create(model="unheard-of", messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.chat.completions.create(
            model="known", messages=[{"role": "user", "content": "Hi"}], temperature=9, stream=True
        )


async def test_models_are_listed_loaded_or_not(pool: Pool) -> None:
    """The list has unloaded models with their state; a known name is never 404 (B3)."""
    client = pool.openai()
    listed = {model.id: model.model_dump() for model in (await client.models.list()).data}
    assert listed["known"]["state"] == "unloaded" and listed["known"]["object"] == "model"
    assert (await client.models.retrieve("known")).id == "known"


async def test_metrics_tell_refusals_by_status_and_no_text(pool: Pool) -> None:
    """Refusals are counted; no client's text reaches a label (O4)."""
    await pool.chat("canary-in-a-model-name")
    await pool.chat("known", temperature=9, user="canary-user")
    text = (await pool.http.get("/metrics")).text
    assert 'carpool_requests_total{model="-",status="404",way="http"}' in text
    assert 'carpool_requests_total{model="-",status="400",way="http"}' in text
    assert "canary" not in text


async def test_hostile_bytes_on_the_gateways_subjects_are_counted(pool: Pool) -> None:
    """Bytes that are no message are dropped and counted on every subject; the gateway lives (O2)."""
    from subjects import names

    ingress = pool.gateway.ingress
    subjects = [names.claim(ingress), names.out(ingress), names.POOL, names.infer("t")]
    hostile = [b"", b"\x80\x04\x95.", b"\xc1", b"\x91" * 10_000, b"\xc7\xff\x05" + b"x" * 10, b"\xdf\xff\xff\xff\xff"]
    for subject in subjects:
        for payload in hostile:
            await pool.bus.publish(subject, payload)

    async def counted() -> dict[str, int]:
        text = (await pool.http.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("carpool_messages_discarded_total{")]
        return {line.split('"')[1]: int(float(line.split()[-1])) for line in lines}

    expected = {kind: len(hostile) for kind in ("claim", "frames", "pool", "infer-reply")}
    for _ in range(300):
        if await counted() == expected:
            break
        await asyncio.sleep(0.02)
    assert await counted() == expected
    assert (await pool.http.get("/ready")).status_code == 200


async def refused(
    pool: Pool, method: str, path: str, status: int, *, content: Any = None, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """Sends it, checks status and shape and that no ticket was published; returns the error object."""
    url = httpx.URL(f"{pool.server.url}{path}")
    before = len(pool.tickets)
    response = await pool.http.request(method, url, content=content, headers=headers)
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json"), response.text
    body = response.json()
    assert list(body) == ["error"] and set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    assert error["message"] and isinstance(error["message"], str) and isinstance(error["type"], str)
    assert len(response.content) < 1000, "errors are small, whatever the request is"
    assert len(pool.tickets) == before
    return error


async def test_the_gateway_still_serves_after_all_that(pool: Pool) -> None:
    """After the whole table a good request is answered; the check above for tickets can therefore see one."""
    model = record()
    await pool.register(model)
    await pool.replica(model)
    assert (await pool.chat(model.name)).status_code == 200
    await until(lambda: len(pool.tickets) == 1, "its ticket was seen")


async def test_the_bodies_of_all_requests_are_bounded_together(nats_server: NatsServer) -> None:
    """A flood of large prompts cannot take the gateway's memory: one too many is 503, and there is room again later."""
    async with open_pool(nats_server.url, http=HttpOptions(bodies_bytes_max=100_000)) as pool:
        model = record(max_context_len=1 << 16)
        await pool.register(model)
        large = [{"role": "user", "content": "x" * 60_000}]
        waiting = asyncio.ensure_future(pool.chat(model.name, messages=large, max_tokens=1))
        await until(lambda: pool.app._bodies_bytes > 60_000 or waiting.done(), "the first is held")
        refused = await pool.chat(model.name, messages=large)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"] == "1"
        waiting.cancel()
        await until(lambda: pool.app._bodies_bytes == 0, "nothing is held any more")
        assert (await pool.chat("unheard-of", messages=large)).status_code == 404
