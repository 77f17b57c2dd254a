"""Answers over HTTP: what a client of OpenAI's API sees."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import structlog
from openai import APIError

from subjects.messages import Failure, FailureKind, SlaClass
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.gateway_pool import Pool, Run, Script, open_pool, record

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


async def test_a_whole_answer(pool: Pool) -> None:
    """Text, finish reason and the engine's own usage, under the asked name (ING-1, I1, J12)."""
    model = record(aliases=("nick",))
    await pool.register(model)
    replica = await pool.replica(model)
    answer = await pool.openai().chat.completions.create(model="nick", messages=[{"role": "user", "content": "Hi"}])
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (17, 5)
    assert answer.model == "nick"
    assert answer.id == f"chatcmpl-{replica.runs[0].ticket.request}"
    await until(lambda: not replica.running, "the finish is confirmed")


async def test_a_stream(pool: Pool) -> None:
    """Role first, contents, one finish chunk, no usage unless asked for (J1)."""
    model = record()
    await pool.register(model)
    await pool.replica(model)
    stream = await pool.openai().chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": "Hi"}], stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content or "" for chunk in chunks] == ["", "Hello ", "world", ""]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and {chunk.model for chunk in chunks} == {model.name}


@pytest.mark.parametrize(("options", "expected"), [({}, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)])
async def test_usage_in_a_stream_only_when_asked(pool: Pool, options: dict[str, bool], expected: int) -> None:
    """With include_usage exactly one last chunk has the counts and no choices; otherwise none has any (J1)."""
    model = record()
    await pool.register(model)
    await pool.replica(model)
    events = await sse(pool, model.name, stream_options=options)
    with_usage = [event for event in events if event.get("usage")]
    assert len(with_usage) == expected
    if expected:
        assert events[-1] is with_usage[0] and events[-1]["choices"] == []
        assert (events[-1]["usage"]["prompt_tokens"], events[-1]["usage"]["total_tokens"]) == (17, 22)
    else:
        assert all("usage" not in event for event in events)


async def two_choices(run: Run) -> None:
    """Interleaved, with different ends."""
    await run.say("a0 ", choice=0)
    await run.say("b0 ", choice=1)
    await run.say("b1", choice=1, finish="length")
    await run.say("a1", choice=0)
    await run.end(choice=0)


async def test_several_choices(pool: Pool) -> None:
    """n=2 keeps each choice's index, text and finish reason, streamed and not (J2)."""
    model = record()
    await pool.register(model)
    await pool.replica(model, two_choices)
    events = await sse(pool, model.name, n=2)
    texts: list[str] = ["", ""]
    reasons: list[str | None] = [None, None]
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
        reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert (texts, reasons) == (["a0 a1", "b0 b1"], ["stop", "length"])
    whole = (await pool.chat(model.name, n=2)).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == texts
    assert [choice["finish_reason"] for choice in whole["choices"]] == reasons
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]


def _logprob(token: str) -> dict[str, Any]:
    return {"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": []}


async def calls_a_tool(run: Run) -> None:
    """A tool call in pieces, and logprobs."""
    await run.say("", detail={"logprobs": {"content": [_logprob("x")]}})
    call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "look", "arguments": ""}}
    await run.say("", detail={"tool_calls": [call]})
    await run.say("", detail={"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]})
    await run.say(
        "",
        detail={
            "tool_calls": [{"index": 0, "function": {"arguments": "1}"}}],
            "logprobs": {"content": [_logprob("y"), _logprob("z")]},
        },
    )
    await run.end(finish="tool_calls")


async def test_tool_calls_and_logprobs_are_merged(pool: Pool) -> None:
    """What text cannot carry goes through unchanged in a stream and is put together in a whole answer (J3)."""
    model = record()
    await pool.register(model)
    await pool.replica(model, calls_a_tool)
    tools: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    answer = await pool.openai().chat.completions.create(
        model=model.name,
        messages=[{"role": "user", "content": "Hi"}],
        tools=tools,
        logprobs=True,
    )
    message = answer.choices[0].message
    assert message.content is None and message.tool_calls is not None
    assert [call.model_dump()["function"] for call in message.tool_calls] == [{"name": "look", "arguments": '{"a":1}'}]
    assert answer.choices[0].finish_reason == "tool_calls"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and [one.token for one in logprobs.content or ()] == ["x", "y", "z"]
    events = await sse(pool, model.name, tools=tools, logprobs=True)
    pieces = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert [piece["function"]["arguments"] for piece in pieces] == ["", '{"a":', "1}"]
    listed = [one["token"] for event in events for one in (event["choices"][0]["logprobs"] or {}).get("content", [])]
    assert listed == ["x", "y", "z"]


async def test_completions(pool: Pool) -> None:
    """The older route, whole and streamed, with its own objects."""
    model = record()
    await pool.register(model)
    await pool.replica(model)
    client = pool.openai()
    whole = await client.completions.create(model=model.name, prompt="Once", max_tokens=5)
    assert (whole.object, whole.choices[0].text, whole.choices[0].finish_reason) == (
        "text_completion",
        "Hello world",
        "stop",
    )
    stream = await client.completions.create(model=model.name, prompt=[1, 2, 3], max_tokens=5, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello world"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
    assert whole.id.startswith("cmpl-") and {chunk.object for chunk in chunks} == {"text_completion"}


async def test_the_engine_gets_the_clients_own_bytes(pool: Pool) -> None:
    """Unknown fields pass through unharmed; what reaches into the pool is taken out, the salt is the tenant's (O3)."""
    model = record()
    await pool.register(model)
    replica = await pool.replica(model)
    kept = {
        "model": model.name,
        "messages": [{"role": "user", "content": "Hi ✓"}],
        "top_k": 5,
        "x_unknown": {"deep": [1.50]},
    }
    raw = json.dumps(kept)
    headers = {"content-type": "application/json"}
    assert (await pool.http.post("/v1/chat/completions", content=raw, headers=headers)).status_code == 200
    assert replica.runs[0].body == kept
    hostile: dict[str, Any] = kept | {
        "cache_salt": "theirs",
        "request_id": "mine",
        "kv_transfer_params": {"host": "10.0.0.1"},
    }
    assert (await pool.http.post("/v1/chat/completions", json=hostile)).status_code == 200
    assert replica.runs[1].body == kept
    salts = {run.grant.cache_salt for run in replica.runs}
    assert len(salts) == 1 and salts != {""} and salts != {"theirs"}


async def test_a_large_body_is_granted_in_parts(pool: Pool) -> None:
    """A body above one part arrives whole at the replica."""
    model = record(max_context_len=1 << 22)
    await pool.register(model)
    replica = await pool.replica(model, classes=[SlaClass.SILVER])
    content = "long words " * 60_000
    response = await pool.chat(model.name, messages=[{"role": "user", "content": content}])
    assert response.status_code == 200, response.text
    assert replica.runs[0].body["messages"][0]["content"] == content


async def test_who_answered_is_in_the_headers(pool: Pool) -> None:
    """Request, model, replica, attempt and wait are told; the client's own request id is neither used nor repeated (J10)."""
    model = record()
    await pool.register(model)
    replica = await pool.replica(model, slots=4)
    body = {"model": model.name, "messages": [{"role": "user", "content": "Hi"}]}
    own_id = {"X-Request-Id": "x" * 30_000}
    responses = await asyncio.gather(
        *[pool.http.post("/v1/chat/completions", json=body | {"stream": n % 2 == 0}, headers=own_id) for n in range(20)]
    )
    assert {response.status_code for response in responses} == {200}
    ids = [response.headers["x-carpool-request-id"] for response in responses]
    assert sorted(ids) == sorted(run.ticket.request for run in replica.runs) and len(set(ids)) == 20
    one = responses[0].headers
    assert (one["x-carpool-model"], one["x-carpool-replica"], one["x-carpool-attempt"]) == (model.name, replica.id, "1")
    assert int(one["x-carpool-queue-wait-ms"]) >= 0
    assert all("xxxx" not in response.text and "xxxx" not in str(response.headers) for response in responses)


# ---------------------------------------------------------------------------------------------------------------- errors


def fails(failure: Failure, after: int) -> Script:
    """Says ``after`` chunks and fails."""

    async def script(run: Run) -> None:
        for _ in range(after):
            await run.say("word ")
        await run.end(failure=failure)

    return script


BAD_SCHEMA = Failure(kind=FailureKind.BAD_REQUEST, message="bad schema", status=400, param="response_format", code="bad")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_refusal_before_the_first_token_keeps_its_status(pool: Pool, stream: bool) -> None:
    """A bad request found by the engine is a real HTTP 400 with JSON, streamed or not (A7, J8), and runs once only."""
    model = record()
    await pool.register(model)
    replica = await pool.replica(model, fails(BAD_SCHEMA, after=0))
    response = await pool.chat(model.name, stream=stream)
    assert (response.status_code, response.headers["content-type"]) == (400, "application/json")
    assert response.json()["error"] == {
        "message": "bad schema",
        "type": "invalid_request_error",
        "param": "response_format",
        "code": "bad",
    }
    assert len(replica.runs) == 1


async def test_a_failure_inside_a_stream_is_framed(pool: Pool) -> None:
    """After the first chunk an error is an event of its own and ``[DONE]`` follows; the SDK raises (A6)."""
    model = record()
    await pool.register(model)
    await pool.replica(model, fails(Failure(kind=FailureKind.SICK, message="engine died", status=500), after=2))
    response = await pool.chat(model.name, stream=True)
    events = [event for event in response.text.split("\n\n") if event]
    assert response.status_code == 200 and events[-1] == "data: [DONE]"
    assert set(json.loads(events[-2].removeprefix("data: "))["error"]) == {"message", "type", "param", "code"}
    stream = await pool.openai().chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": "Hi"}], stream=True
    )
    texts = []
    with pytest.raises(APIError):
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")  # noqa: PERF401
    assert texts == ["", "word ", "word "]


async def test_a_failure_inside_a_whole_answer_is_a_5xx(pool: Pool) -> None:
    """A cut answer that is not streamed is an error, never a short text (A6)."""
    model = record()
    await pool.register(model)
    await pool.replica(model, fails(Failure(kind=FailureKind.SICK, message="engine died", status=500), after=2))
    response = await pool.chat(model.name)
    assert response.status_code in (500, 502, 503) and "error" in response.json()


async def test_what_an_engine_says_of_a_request_is_not_logged(pool: Pool) -> None:
    """An engine's error may quote the prompt: the client reads it, the log does not, not even when the request goes on."""
    model = record()
    await pool.register(model)
    await pool.replica(model, fails(Failure(kind=FailureKind.SICK, message="cannot read 'my secret'", status=500), after=0))
    with structlog.testing.capture_logs() as lines:
        response = await pool.chat(model.name)
    assert response.status_code == 502 and "my secret" in response.text
    assert [line["event"] for line in lines].count("a request waits again") == 2
    assert "my secret" not in str(lines)


async def sse(pool: Pool, model: str, **fields: Any) -> list[dict[str, Any]]:
    """The JSON events of a chat stream; the last line must be ``[DONE]``."""
    response = await pool.chat(model, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
