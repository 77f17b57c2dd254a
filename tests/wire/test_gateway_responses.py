"""OpenAI's responses over HTTP, as OpenAI's own SDK sees them (ING-1)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.responses import Response

from subjects.messages import Failure, FailureKind
from tests.servers import NatsServer
from tests.wire.gateway_pool import Pool, Run, open_pool, record, thinks_and_calls

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS: Any = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}]
KINDS_OF_TEXT = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


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


@pytest_asyncio.fixture(loop_scope="module")
async def sdk(pool: Pool) -> AsyncOpenAI:
    """OpenAI's client as users have it, but one that checks every field of every answer against its types."""
    return pool.openai(_strict_response_validation=True)


async def events_of(pool: Pool, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream as they are on the wire: named by their type and numbered from 0."""
    response = await pool.http.post("/v1/responses", json={"input": "Hi", "stream": True} | fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_a_whole_response(pool: Pool, sdk: AsyncOpenAI) -> None:
    """Text, status and the engine's own usage; the engine gets a chat that says the same; nothing is stored (I1)."""
    model = record()
    await pool.register(model)
    replica = await pool.replica(model)
    response = await sdk.responses.create(
        model=model.name,
        instructions="Be brief.",
        input=[{"role": "developer", "content": "And kind."}, {"role": "user", "content": "Hi"}],
        max_output_tokens=50,
        temperature=0.5,
        top_p=0.9,
        store=True,
        metadata={"a": "b"},
        text={"format": {"type": "json_schema", "name": "shape", "schema": {"type": "object"}, "strict": True}},
        reasoning={"effort": "low"},
        user="u-1",
    )
    (run,) = replica.runs
    assert response.output_text == "Hello world" and response.id == f"resp_{run.ticket.request}"
    assert (response.status, response.incomplete_details, response.error) == ("completed", None, None)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (17, 5, 22)
    assert (response.model, response.instructions, response.metadata) == (model.name, "Be brief.", {"a": "b"})
    assert (response.max_output_tokens, response.temperature, response.top_p) == (50, 0.5, 0.9)
    assert response.model_dump()["store"] is False
    schema = {"name": "shape", "schema": {"type": "object"}, "strict": True}
    assert run.body == {
        "model": model.name,
        "messages": [{"role": "system", "content": "Be brief.\n\nAnd kind."}, {"role": "user", "content": "Hi"}],
        "temperature": 0.5,
        "top_p": 0.9,
        "user": "u-1",
        "max_tokens": 50,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": schema},
    }


async def test_a_stream_in_exact_order(pool: Pool, sdk: AsyncOpenAI) -> None:
    """Every event the SDK knows of one message, numbered; the last one has the whole response (J1)."""
    model = record()
    await pool.register(model)
    await pool.replica(model)
    events = await events_of(pool, model=model.name)
    assert [event["type"] for event in events] == KINDS_OF_TEXT
    item = events[2]["item"]["id"]
    assert [event["delta"] for event in events[4:6]] == ["Hello ", "world"]
    assert {event["item_id"] for event in events[3:8]} == {item}
    assert events[6]["text"] == "Hello world" and events[7]["part"]["text"] == "Hello world"
    first, last = events[0]["response"], events[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert (last["status"], last["output"], last["id"]) == ("completed", [events[8]["item"]], first["id"])
    assert last["usage"]["total_tokens"] == 22
    stream = await sdk.responses.create(model=model.name, input="Hi", stream=True)
    assert [event.type async for event in stream] == KINDS_OF_TEXT


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_and_functions(pool: Pool, sdk: AsyncOpenAI, stream: bool) -> None:
    """The same items streamed or not, and they go in again with the functions' outputs (J3)."""
    model = record()
    await pool.register(model)
    replica = await pool.replica(model, thinks_and_calls)
    asked: Any = {
        "model": model.name,
        "input": "Hi",
        "tools": TOOLS,
        "tool_choice": {"type": "function", "name": "look"},
        "parallel_tool_calls": False,
    }
    if stream:
        async with sdk.responses.stream(**asked) as answer:
            response: Response = await answer.get_final_response()
    else:
        response = await sdk.responses.create(**asked)
    reasoning, message, *calls = response.output
    assert reasoning.type == "reasoning" and [part.text for part in reasoning.content or ()] == ["Let me see."]
    assert message.type == "message" and response.output_text == "I will look."
    told = [(call.call_id, call.name, call.arguments) for call in calls if call.type == "function_call"]
    assert told == [("call-1", "look", '{"a":[1]}'), ("call-2", "look", "{}")]
    assert response.status == "completed" and {item.model_dump()["status"] for item in response.output} == {"completed"}
    body = replica.runs[0].body
    function = {"name": "look", "parameters": TOOLS[0]["parameters"], "strict": False}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert body["parallel_tool_calls"] is False
    history: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        *[item.model_dump(exclude_none=True) for item in response.output],
        {"type": "function_call_output", "call_id": "call-1", "output": "red"},
        {"type": "function_call_output", "call_id": "call-2", "output": [{"type": "input_text", "text": "blue"}]},
    ]
    await sdk.responses.create(model=model.name, input=history, tools=TOOLS)
    assert replica.runs[1].body["messages"] == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "I will look.",
            "reasoning_content": "Let me see.",
            "tool_calls": [
                {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"a":[1]}'}},
                {"id": "call-2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": "red"},
        {"role": "tool", "tool_call_id": "call-2", "content": "blue"},
    ]


async def test_events_of_a_function(pool: Pool) -> None:
    """A call is an item whose arguments grow; reasoning is one with a text part."""
    model = record()
    await pool.register(model)
    await pool.replica(model, thinks_and_calls)
    events = await events_of(pool, model=model.name, tools=TOOLS)
    place = [event.get("output_index") for event in events]
    kinds = [[event["type"] for event, index in zip(events, place, strict=True) if index == wanted] for wanted in range(4)]
    part = ["response.content_part.added", "response.content_part.done"]
    assert kinds[0] == [
        "response.output_item.added",
        part[0],
        *["response.reasoning_text.delta"] * 2,
        "response.reasoning_text.done",
        part[1],
        "response.output_item.done",
    ]
    for kind, deltas in ((kinds[2], 2), (kinds[3], 1)):
        assert kind == [
            "response.output_item.added",
            *["response.function_call_arguments.delta"] * deltas,
            "response.function_call_arguments.done",
            "response.output_item.done",
        ]
    assert [index for index in place if index is not None] == sorted(index for index in place if index is not None)


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
async def test_a_response_that_was_cut_is_incomplete(pool: Pool, sdk: AsyncOpenAI, finish: str, reason: str) -> None:
    """Status, reason, the message's own status, and the stream's last event; the same in both modes (J2)."""

    async def script(run: Run) -> None:
        await run.say("half")
        await run.end(finish=finish)

    model = record()
    await pool.register(model)
    await pool.replica(model, script)
    whole = await sdk.responses.create(model=model.name, input="Hi")
    events = [event async for event in await sdk.responses.create(model=model.name, input="Hi", stream=True)]
    last = events[-1]
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        assert response.status == "incomplete" and response.incomplete_details is not None
        assert response.incomplete_details.reason == reason
        assert [item.model_dump()["status"] for item in response.output] == ["incomplete"]
        assert response.output_text == "half"


async def test_log_probabilities(pool: Pool, sdk: AsyncOpenAI) -> None:
    """Asked for by ``include``, they are in the text, and in a stream with the delta they belong to."""
    tokens = [
        {"token": token, "logprob": -0.5, "bytes": [*token.encode()], "top_logprobs": []} for token in ("Hel", "lo", "!")
    ]

    async def script(run: Run) -> None:
        await run.say("", detail={"logprobs": {"content": tokens[:1]}})
        await run.say("Hello", detail={"logprobs": {"content": tokens[1:2]}})
        await run.say("!", detail={"logprobs": {"content": tokens[2:]}})
        await run.end()

    model = record()
    await pool.register(model)
    replica = await pool.replica(model, script)
    asked: Any = {"model": model.name, "input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = await sdk.responses.create(**asked)
    (message,) = response.output
    assert message.type == "message" and message.content[0].type == "output_text"
    assert [one.token for one in message.content[0].logprobs or ()] == ["Hel", "lo", "!"]
    assert (replica.runs[0].body["logprobs"], replica.runs[0].body["top_logprobs"]) == (True, 2)
    events = await events_of(pool, **asked)
    told = [[one["token"] for one in event["logprobs"]] for event in events if event["type"].endswith("text.delta")]
    assert told == [["Hel", "lo"], ["!"]]


async def test_an_error_keeps_its_status_or_ends_the_stream(pool: Pool, sdk: AsyncOpenAI) -> None:
    """Before the first output an HTTP status with the field as it is called here, after it ``response.failed`` (A6, A7)."""
    refusal = Failure(kind=FailureKind.BAD_REQUEST, message="bad schema", status=400, param="response_format", code="bad")
    death = Failure(kind=FailureKind.SICK, message="engine died", status=500)

    async def script(run: Run) -> None:
        if run.body.get("response_format"):
            await run.end(failure=refusal)
            return
        await run.say("half ")
        await run.end(failure=death)

    model = record()
    await pool.register(model)
    await pool.replica(model, script)
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.responses.create(model=model.name, input="Hi", text={"format": {"type": "json_object"}}, stream=True)
    assert (caught.value.param, caught.value.code) == ("text.format", "bad")
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.create(model="nobody", input="Hi")
    events = [event async for event in await sdk.responses.create(model=model.name, input="Hi", stream=True)]
    last = events[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error is not None and last.response.error.code == "server_error"
    assert last.response.output_text == "half " and "response.completed" not in [event.type for event in events]
    with pytest.raises(RuntimeError):
        async with sdk.responses.stream(model=model.name, input="Hi") as answer:
            await answer.get_final_response()


async def test_a_client_that_leaves_stops_its_generation(pool: Pool, sdk: AsyncOpenAI) -> None:
    """In the middle of a stream: the replica hears of it at once (A1)."""

    async def script(run: Run) -> None:
        await run.say("endless ")
        await run.ended.wait()

    model = record()
    await pool.register(model)
    replica = await pool.replica(model, script)
    stream = await sdk.responses.create(model=model.name, input="Hi", stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await asyncio.wait_for(replica.runs[0].ended.wait(), 15)
    assert replica.runs[0].cancelled_by == "cancel"


@pytest.mark.parametrize("path", ["/v1/responses/resp_1", "/v1/responses/resp_1/input_items"])
async def test_nothing_is_stored(pool: Pool, path: str) -> None:
    """Routes of stored responses do not exist."""
    assert (await pool.http.get(path)).status_code == 404
