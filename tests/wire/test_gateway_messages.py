"""Anthropic's messages over HTTP, as Anthropic's own SDK sees them (ING-1)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic

from broker.gateway.app import HttpOptions
from broker.gateway.keys import ApiKeys, Caller
from profiles.tiny import make_tiny
from profiles.tokenizer import ModelTokenizer
from subjects.ids import Tenant
from subjects.messages import Endpoint, Failure, FailureKind
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.gateway_pool import WAIT_S, Pool, Run, open_pool, record, thinks_and_calls

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [{"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_pool(shared_nats_server: NatsServer) -> AsyncIterator[Pool]:
    """One gateway that says early that it is still there."""
    options = HttpOptions(sse_open_after_s=0.2, keep_alive_s=0.2)
    async with open_pool(shared_nats_server.url, http=options) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def pool(running_pool: Pool) -> AsyncIterator[Pool]:
    """The same gateway for each test, with nothing left of the one before."""
    yield running_pool
    await running_pool.clear()


@pytest_asyncio.fixture(loop_scope="module")
async def sdk(pool: Pool) -> AsyncIterator[AsyncAnthropic]:
    """Anthropic's client as users have it, but one that checks every field of every answer against its types."""
    async with client_of(pool) as client:
        yield client


def client_of(pool: Pool, key: str = "no-key-needed") -> AsyncAnthropic:
    """A client without retries."""
    return AsyncAnthropic(
        base_url=pool.server.url, api_key=key, max_retries=0, timeout=WAIT_S, _strict_response_validation=True
    )


async def events_of(pool: Pool, model: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream as they are on the wire; each one's name must be its data's type."""
    body = {"model": model, "max_tokens": 50, "messages": HI, "stream": True} | fields
    response = await pool.http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return parsed(response)


def parsed(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a whole stream, without comments."""
    events = []
    for block in response.text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


async def test_a_whole_message(pool: Pool, sdk: AsyncAnthropic) -> None:
    """Text, stop reason and the engine's own usage; the engine gets a chat that says the same (I1)."""
    model = record(aliases=("nick",))
    await pool.register(model)
    replica = await pool.replica(model)
    response = await sdk.messages.with_raw_response.create(
        model="nick",
        max_tokens=50,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
            {"role": "user", "content": "Again"},
        ],
        stop_sequences=["END"],
        metadata={"user_id": "u-1"},
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 3},
    )
    message = await response.parse()
    assert message.content[0].type == "text" and message.content[0].text == "Hello world"
    assert (message.role, message.type, message.model) == ("assistant", "message", "nick")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (17, 5)
    (run,) = replica.runs
    assert message.id == f"msg_{run.ticket.request}" and response.headers["request-id"] == run.ticket.request
    assert run.body == {
        "model": "nick",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "Again"},
        ],
        "max_tokens": 50,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stop": ["END"],
        "user": "u-1",
    }
    await until(lambda: not replica.running, "the finish is confirmed")


async def test_a_stream_in_exact_order(pool: Pool) -> None:
    """Start, block, deltas, block's end, counts, end; nothing else (J1)."""
    model = record()
    await pool.register(model)
    replica = await pool.replica(model)
    start, *rest = await events_of(pool, model.name)
    request = replica.runs[0].ticket
    counts = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    assert start == {
        "type": "message_start",
        "message": {
            "id": f"msg_{request.request}",
            "type": "message",
            "role": "assistant",
            "model": model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": request.profile.input_tokens, "output_tokens": 0} | counts,
        },
    }
    assert rest == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello "}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "world"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"input_tokens": 17, "output_tokens": 5} | counts,
        },
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_and_tools(pool: Pool, sdk: AsyncAnthropic, stream: bool) -> None:
    """The SDK puts together the same blocks, streamed or not (J3)."""
    model = record()
    await pool.register(model)
    replica = await pool.replica(model, thinks_and_calls)
    asked: Any = {
        "model": model.name,
        "max_tokens": 50,
        "messages": HI,
        "tools": TOOLS,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    if stream:
        async with sdk.messages.stream(**asked) as answer:
            message: anthropic.types.Message = await answer.get_final_message()
    else:
        message = await sdk.messages.create(**asked)
    assert [block.model_dump(include={"type", "thinking", "text", "id", "name", "input"}) for block in message.content] == [
        {"type": "thinking", "thinking": "Let me see."},
        {"type": "text", "text": "I will look."},
        {"type": "tool_use", "id": "call-1", "name": "look", "input": {"a": [1]}},
        {"type": "tool_use", "id": "call-2", "name": "look", "input": {}},
    ]
    assert message.stop_reason == "tool_use" and message.usage.output_tokens == 5
    body = replica.runs[0].body
    function = {"name": "look", "parameters": TOOLS[0]["input_schema"], "description": "Looks."}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("required", False)
    # What came out goes in again, with the results.
    history = [
        *HI,
        message.to_param(),
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call-1", "content": [{"type": "text", "text": "red"}]},
                {"type": "tool_result", "tool_use_id": "call-2", "content": "blue", "is_error": False},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    await sdk.messages.create(model=model.name, max_tokens=50, messages=history, tools=TOOLS)
    told = replica.runs[1].body["messages"]
    assert told[1] == {
        "role": "assistant",
        "content": "I will look.",
        "reasoning_content": "Let me see.",
        "tool_calls": [
            {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"a":[1]}'}},
            {"id": "call-2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
        ],
    }
    assert told[2:] == [
        {"role": "tool", "tool_call_id": "call-1", "content": "red"},
        {"role": "tool", "tool_call_id": "call-2", "content": "blue"},
        {"role": "user", "content": "And?"},
    ]


ENDS = [
    ("length", None, "max_tokens", None),
    ("stop", "END", "stop_sequence", "END"),
    ("stop", "<|im_end|>", "end_turn", None),
    ("stop", 2, "end_turn", None),
    ("content_filter", None, "refusal", None),
]


@pytest.mark.parametrize(("finish", "matched", "reason", "sequence"), ENDS)
async def test_why_a_message_ends(
    pool: Pool, sdk: AsyncAnthropic, finish: str, matched: str | int | None, reason: str, sequence: str | None
) -> None:
    """A matched stop sequence is told if it is one of the client's own, the same in both modes (J2)."""

    async def script(run: Run) -> None:
        await run.say("word")
        await run._send(text="", choice=0, units=0, finish_reason=finish, stop_reason=matched)
        await run.end(finish=None)

    model = record()
    await pool.register(model)
    await pool.replica(model, script)
    asked: Any = {"model": model.name, "max_tokens": 50, "messages": HI, "stop_sequences": ["STOP", "END"]}
    whole = await sdk.messages.create(**asked)
    async with sdk.messages.stream(**asked) as answer:
        streamed = await answer.get_final_message()
    for message in (whole, streamed):
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
        assert [block.model_dump()["text"] for block in message.content] == ["word"]


@pytest.mark.parametrize(
    ("finish", "calls", "status"),
    [("tool_calls", ['{"a": '], 502), ("length", ['{"a": '], 200), ("length", ["x", "{"], 502)],
)
async def test_broken_arguments_of_a_call(pool: Pool, finish: str, calls: list[str], status: int) -> None:
    """Arguments that are no object are never told as if they were empty, but where the answer says that it was cut there."""

    async def script(run: Run) -> None:
        for index, arguments in enumerate(calls):
            function = {"name": "look", "arguments": arguments}
            call = {"index": index, "id": f"c{index}", "type": "function", "function": function}
            await run.say("", detail={"tool_calls": [call]})
        await run.end(finish=finish)

    model = record()
    await pool.register(model)
    await pool.replica(model, script)
    body = {"model": model.name, "max_tokens": 50, "messages": HI, "tools": TOOLS}
    response = await pool.http.post("/v1/messages", json=body)
    assert response.status_code == status
    if status == 502:
        assert response.json()["error"]["type"] == "api_error"
    else:
        assert response.json()["stop_reason"] == "max_tokens"


async def test_pings_while_nothing_happens(pool: Pool) -> None:
    """Before the first output a comment keeps the connection, after it a ping; the start stays the first event (A9)."""
    gone_on = asyncio.Event()

    async def script(run: Run) -> None:
        await asyncio.sleep(0.5)
        await run.say("slow ")
        await gone_on.wait()
        await run.say("words")
        await run.end()

    model = record()
    await pool.register(model)
    await pool.replica(model, script)
    body = {"model": model.name, "max_tokens": 50, "messages": HI, "stream": True}
    text = ""
    async with pool.http.stream("POST", "/v1/messages", json=body) as response:
        async for piece in response.aiter_text():
            text += piece
            if "event: ping" in text:
                gone_on.set()
    assert text.startswith(": keep-alive\n\n")
    kinds = [line.removeprefix("event: ") for line in text.split("\n") if line.startswith("event: ")]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "ping" in kinds


@pytest.mark.parametrize(
    ("path", "body", "kinds"),
    [
        ("/v1/messages", {"max_tokens": 50, "messages": HI}, ["error"]),
        ("/v1/responses", {"input": "Hi"}, ["response.created", "response.in_progress", "response.failed"]),
    ],
)
async def test_a_failure_after_the_stream_opened(pool: Pool, path: str, body: dict[str, Any], kinds: list[str]) -> None:
    """Too late for an HTTP status and before any output: still told in the API's own events (A6, A7)."""

    async def script(run: Run) -> None:
        await asyncio.sleep(0.5)
        await run.end(failure=Failure(kind=FailureKind.BAD_REQUEST, message="bad", status=400))

    model = record()
    await pool.register(model)
    await pool.replica(model, script)
    response = await pool.http.post(path, json=body | {"model": model.name, "stream": True})
    assert response.status_code == 200 and response.text.startswith(": keep-alive\n\n")
    assert [event["type"] for event in parsed(response)] == kinds


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_stops_its_generation(pool: Pool, stream: bool) -> None:
    """In the middle of an answer, streamed or not: the replica hears of it at once (A1 to A3)."""

    async def script(run: Run) -> None:
        await run.say("endless ")
        await run.ended.wait()

    model = record()
    await pool.register(model)
    replica = await pool.replica(model, script)
    body = {"model": model.name, "max_tokens": 50, "messages": HI, "stream": stream}
    task = asyncio.ensure_future(pool.http.post("/v1/messages", json=body))
    await until(lambda: bool(replica.runs and replica.runs[0].sent), "it generates")
    task.cancel()
    await until(lambda: replica.runs[0].ended.is_set(), "it has ended")
    assert replica.runs[0].cancelled_by == "cancel"


async def test_errors_in_anthropics_form(pool: Pool, sdk: AsyncAnthropic) -> None:
    """Each status with its own type, and the SDK raises its own exceptions (J5)."""
    model = record()
    await pool.register(model)
    refusal = Failure(kind=FailureKind.BAD_REQUEST, message="bad schema", status=400, param="response_format", code="bad")

    async def script(run: Run) -> None:
        await run.end(failure=refusal)

    await pool.replica(model, script)
    with pytest.raises(anthropic.BadRequestError) as caught:
        await sdk.messages.create(model=model.name, max_tokens=5, messages=HI)
    message = "bad schema (in 'output_config.format')"
    assert caught.value.body == {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        await sdk.messages.create(model="nobody", max_tokens=5, messages=HI)
    for method, kind, status in (("GET", "", 405), ("POST", "application/json", 400), ("POST", "text/plain", 415)):
        response = await pool.http.request(method, "/v1/messages", content=b"{", headers={"content-type": kind})
        assert (response.status_code, response.json()["type"]) == (status, "error")
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_an_error_inside_a_stream(pool: Pool, sdk: AsyncAnthropic) -> None:
    """It is an event of its own, at which the SDK raises; no end of the message follows (A6)."""

    async def script(run: Run) -> None:
        await run.say("half ")
        await run.end(failure=Failure(kind=FailureKind.SICK, message="engine died", status=500))

    model = record()
    await pool.register(model)
    await pool.replica(model, script)
    events = await events_of(pool, model.name)
    assert [event["type"] for event in events[:3]] == ["message_start", "content_block_start", "content_block_delta"]
    assert [event["type"] for event in events[3:]] == ["error"]
    assert events[-1]["error"]["type"] == "api_error"
    with pytest.raises(anthropic.APIStatusError):
        async with sdk.messages.stream(model=model.name, max_tokens=5, messages=HI) as answer:
            await answer.get_final_message()


async def test_tokens_are_counted_without_the_model(pool: Pool, sdk: AsyncAnthropic, tmp_path: Path) -> None:
    """As many as a request would have, by the model's own template, and nothing reaches the pool (B3)."""
    directory = make_tiny("counted", tmp_path / "counted", seed=1)
    model = record("counted", tokenizer_source=str(directory), tokenizer_hash="t")
    await pool.register(model, record("bare"))
    chat = {"messages": [{"role": "system", "content": "Be."}, *HI]}
    expected = len(ModelTokenizer(directory).prompts(Endpoint.CHAT, chat)[0])
    counted = await sdk.messages.count_tokens(model="counted", system="Be.", messages=HI)
    assert counted.input_tokens == expected
    assert pool.tickets == []
    replica = await pool.replica(model)
    await sdk.messages.create(model="counted", system="Be.", messages=HI, max_tokens=5)
    assert replica.tickets[0].profile.input_tokens == expected
    picture: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]"):
        await sdk.messages.count_tokens(model="counted", messages=[{"role": "user", "content": [picture]}])
    with pytest.raises(anthropic.BadRequestError, match="tokenizer"):
        await sdk.messages.count_tokens(model="bare", messages=HI)


async def test_a_key_in_its_own_header(shared_nats_server: NatsServer) -> None:
    """``x-api-key`` and ``Authorization`` both do, on Anthropic's routes only; without one it is a 401 (SEC-1, O1)."""
    key = "sk-canary-aaaaaaaaaaaa"
    keys = ApiKeys.of({key: Caller(Tenant("a"))})
    async with open_pool(shared_nats_server.url, keys=keys) as pool:
        model = record()
        await pool.register(model)
        replica = await pool.replica(model)
        async with client_of(pool, key) as client:
            await client.messages.create(model=model.name, max_tokens=5, messages=HI)
        async with client_of(pool, "sk-wrong-canary-aaa") as client:
            with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
                await client.messages.create(model=model.name, max_tokens=5, messages=HI)
        body = {"model": model.name, "max_tokens": 5, "messages": HI}
        bearer = {"authorization": f"Bearer {key}"}
        assert (await pool.http.post("/v1/messages", json=body, headers=bearer)).status_code == 200
        assert [ticket.profile.tenant for ticket in replica.tickets] == ["a", "a"]
        own = {"x-api-key": key}
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/models"):
            assert (await pool.http.post(path, json=body, headers=own)).status_code == 401
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            response = await pool.http.post(path, json=body)
            assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
