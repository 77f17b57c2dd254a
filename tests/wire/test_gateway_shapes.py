"""Every answer is of OpenAI's own types, streamed and whole, and both say the same (ING-1, J1 to J3)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.openai_shapes import check_stream, check_whole, said, said_in_stream
from tests.servers import NatsServer
from tests.wire.gateway_pool import Pool, Run, Script, open_pool, record

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "ask")]
ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


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


async def ask(pool: Pool, route: str, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer and the events of the streamed one."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]} if route == "chat" else {"prompt": "Hi"}
    whole = await pool.http.post(ROUTES[route], json=asked | fields)
    assert whole.status_code == 200, whole.text
    streamed = await pool.http.post(
        ROUTES[route], json={"stream": True, "stream_options": {"include_usage": True}} | asked | fields
    )
    lines = [line for line in streamed.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return whole.json(), [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def _token(token: str) -> dict[str, Any]:
    return {"token": token, "logprob": -0.5, "bytes": list(token.encode()), "top_logprobs": []}


def _call(index: int, arguments: str, name: str = "") -> dict[str, Any]:
    head = {"id": f"call-{index}", "type": "function"} if name else {}
    function = ({"name": name} if name else {}) | {"arguments": arguments}
    return {"tool_calls": [head | {"index": index, "function": function}]}


async def says(run: Run) -> None:
    """Text with a character of four bytes, and an end with its own reason."""
    await run.say("Grüße ")
    await run.say("😀 東京", finish="length")
    await run.end(finish=None)


async def says_nothing(run: Run) -> None:
    """An answer that ends at once."""
    await run.end()


async def calls_two_tools(run: Run) -> None:
    """A word, then two calls whose arguments come in pieces and interleaved."""
    await run.say("Well")
    await run.say("", detail=_call(0, "", "look"))
    await run.say("", detail=_call(1, "", "ask"))
    await run.say("", detail=_call(0, '{"a"'))
    await run.say("", detail=_call(1, "{}"))
    await run.say("", detail=_call(0, ": 1}"))
    await run.end(finish="tool_calls")


async def weighs_words(run: Run) -> None:
    """Log probabilities with and without text; one token's text is held back."""
    await run.say("", detail={"logprobs": {"content": [_token("a")]}})
    await run.say("ab", detail={"logprobs": {"content": [_token("b"), _token("c")]}})
    await run.say("c")
    await run.end()


async def weighs_a_completion(run: Run) -> None:
    """The older form, lists side by side."""
    for place, token in enumerate(("Once", " upon")):
        lists = {"tokens": [token], "token_logprobs": [-0.5], "top_logprobs": [{token: -0.5}], "text_offset": [4 * place]}
        await run.say(token, detail={"logprobs": lists})
    await run.end(finish="length")


async def answers_twice(run: Run) -> None:
    """Two choices, mixed, the second one ends first."""
    await run.say("b", choice=1)
    await run.say("a", choice=0)
    await run.say("b", choice=1, finish="length")
    await run.say("a", choice=0)
    await run.end()


CASES: list[tuple[str, Script, dict[str, Any]]] = [
    ("chat", says, {}),
    ("chat", says_nothing, {}),
    ("chat", calls_two_tools, {"tools": TOOLS}),
    ("chat", weighs_words, {"logprobs": True, "top_logprobs": 0}),
    ("chat", answers_twice, {"n": 2}),
    ("completions", says, {}),
    ("completions", says_nothing, {"max_tokens": 0}),
    ("completions", weighs_a_completion, {"logprobs": 1}),
    ("completions", answers_twice, {"n": 2}),
    ("completions", answers_twice, {"prompt": ["one", "two"]}),
    ("completions", answers_twice, {"prompt": [[1, 2], [3]]}),
]


@pytest.mark.parametrize(("route", "script", "fields"), CASES, ids=lambda one: getattr(one, "__name__", str(one)))
async def test_both_modes_are_of_openais_types_and_say_the_same(
    pool: Pool, route: str, script: Script, fields: dict[str, Any]
) -> None:
    """Required fields are there, unknown ones are not; one id and date, roles first and once, the same reasons."""
    model = record()
    await pool.register(model)
    await pool.replica(model, script)
    whole, events = await ask(pool, route, model=model.name, **fields)
    check_whole(whole)
    choices = len(whole["choices"])
    assert choices == (fields.get("n") or (len(fields["prompt"]) if "prompt" in fields else 1))
    check_stream(events, choices=choices, usage=True)
    assert said_in_stream(events) == said(whole)
    assert events[-1]["usage"] == whole["usage"]


OFFICIAL: list[dict[str, Any]] = [
    {"user": "u-1"},
    {"store": True, "metadata": {"key": "value"}},
    {"service_tier": "auto"},
    {"safety_identifier": "s", "prompt_cache_key": "k"},
    {"verbosity": "low", "reasoning_effort": "low"},
    {"prediction": {"type": "content", "content": "Hello"}},
    {"modalities": ["text"], "audio": {"format": "wav", "voice": "alloy"}},
    {"parallel_tool_calls": True},
    {"stream_options": {"include_obfuscation": False}, "stream": True},
    {"max_tokens": 7, "max_completion_tokens": 5, "seed": 1, "logit_bias": {"5": -100}, "stop": "x", "n": 1},
]


@pytest.mark.parametrize("fields", OFFICIAL, ids=lambda fields: next(iter(fields)))
async def test_fields_of_openais_reference_are_accepted(pool: Pool, fields: dict[str, Any]) -> None:
    """What the SDK can send goes to the engine as it is, whether it means anything there or not."""
    model = record()
    await pool.register(model)
    replica = await pool.replica(model)
    body = {"model": model.name, "messages": [{"role": "user", "content": "Hi"}]} | fields
    response = await pool.http.post(ROUTES["chat"], json=body)
    assert response.status_code == 200, response.text
    assert replica.runs[0].body == body


PIXEL = "data:image/png;base64,iVBORw0KGgo="


async def test_images_go_to_the_engine_as_data(pool: Pool) -> None:
    """Parts with images pass unchanged; whether the model can see is for its engine to say."""
    model = record()
    await pool.register(model)
    replica = await pool.replica(model)
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}]
    messages = [{"role": "user", "content": parts}]
    assert (await pool.chat(model.name, messages=messages)).status_code == 200
    assert replica.runs[0].body["messages"] == messages


async def test_openais_sdk_sees_our_request_id(pool: Pool) -> None:
    """``x-request-id`` is what the SDK shows as ``_request_id``; it is ours (J10)."""
    model = record()
    await pool.register(model)
    replica = await pool.replica(model)
    answer = await pool.openai(default_headers={"x-request-id": "theirs"}).chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": "Hi"}]
    )
    assert answer._request_id == replica.runs[0].ticket.request
