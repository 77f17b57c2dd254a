"""OpenAI's surface over a pool with a real vLLM engine: each feature in both modes, by OpenAI's own types (ING-1)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from ops.control import control
from ops.models import records_of
from ops.supervisor import Pool, PoolOptions
from tests.openai_shapes import check_stream, check_whole, said, said_in_stream

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

SERVICE = """
apiVersion: llm.serving/v1
kind: ModelService
metadata: {{name: tiny}}
spec:
  source: {source}
  engine:
    type: vllm
    dtype: float32
    max_context_len: 1024
    max_num_seqs: 8
    kv_cache_bytes: 16MiB
    options: {{tool_call_parser: hermes}}
"""
SECRET = "xyzzy-7391"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a pool with one tiny model that is set up for tools."""
    directory = tmp_path_factory.mktemp("pool-surface")
    path = directory / "service.yaml"
    path.write_text(SERVICE.format(source=tiny_model))
    records = await asyncio.to_thread(records_of, [path])
    async with Pool(PoolOptions(state_dir=directory / "state", devices=("cpu:3GiB",))) as pool:
        await control(pool.nats_url, "apply", {"records": [msgspec.to_builtins(record) for record in records]})
        async with httpx.AsyncClient(base_url=f"{pool.http_url}/v1", timeout=120, trust_env=False) as client:
            yield client


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"What of {SECRET}?"}], "max_tokens": 16, "temperature": 0} | fields


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": f"Once {SECRET}", "max_tokens": 12, "temperature": 0} | fields


async def post(http: httpx.AsyncClient, body: dict[str, Any], **fields: Any) -> httpx.Response:
    route = "/completions" if "prompt" in body else "/chat/completions"
    return await http.post(route, json={"model": "tiny"} | body | fields)


async def both(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer, which was checked, and against the streamed one."""
    response = await post(http, body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    check_whole(whole)
    streamed = await post(http, body, stream=True, stream_options={"include_usage": True})
    lines = [line for line in streamed.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    check_stream(events, choices=len(whole["choices"]), usage=True)
    assert said_in_stream(events) == said(whole)
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [events[-1]["usage"][count] for count in counts] == [whole["usage"][count] for count in counts]
    return whole


def parameters(*names: str) -> dict[str, Any]:
    properties = {name: {"type": "string", "enum": ["a", "b"]} for name in names}
    return {"type": "object", "properties": properties, "required": list(names), "additionalProperties": False}


TOOLS = [{"type": "function", "function": {"name": name, "parameters": parameters("kind")}} for name in ("look", "ask")]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": parameters("kind", "other"), "strict": True}}
NAMED = {"type": "function", "function": {"name": "ask"}}
REPETITION = {"min_pattern_size": 1, "max_pattern_size": 3, "min_count": 4}
MANY_BYTES = "né 😀 東京 👩‍👩‍👧"

# What is asked, how many choices, the finish reason of all of them.
CASES: dict[str, tuple[dict[str, Any], int, str]] = {
    "plain": (chat(), 1, "length"),
    "both bounds": (chat(max_tokens=9, max_completion_tokens=5), 1, "length"),
    "seed": (chat(seed=3, temperature=1.0), 1, "length"),
    "choices": (chat(n=3, seed=3, temperature=1.0), 3, "length"),
    "greedy choices": (chat(n=2), 2, "length"),
    "logprobs": (chat(logprobs=True), 1, "length"),
    "top_logprobs": (chat(logprobs=True, top_logprobs=3, n=2, temperature=1.0, seed=1), 2, "length"),
    "logit_bias": (chat(logit_bias={"100": 100}), 1, "length"),
    "characters": (chat(structured_outputs={"choice": [MANY_BYTES]}, max_tokens=90), 1, "stop"),
    "stop in characters": (chat(structured_outputs={"choice": [MANY_BYTES]}, max_tokens=90, stop="東"), 1, "stop"),
    "json_object": (chat(response_format={"type": "json_object"}, max_tokens=20), 1, ""),
    "json_schema": (chat(response_format=SCHEMA, max_tokens=200), 1, "stop"),
    "repetition": (chat(logit_bias={"100": 100}, max_tokens=40, repetition_detection=REPETITION), 1, "stop"),
    "text": (chat(response_format={"type": "text"}), 1, "length"),
    "tools, none called": (chat(tools=TOOLS), 1, "length"),
    "tool_choice none": (chat(tools=TOOLS, tool_choice="none"), 1, "length"),
    "tool_choice required": (chat(tools=TOOLS, tool_choice="required", max_tokens=100), 1, ""),
    "tool_choice named": (chat(tools=TOOLS, tool_choice=NAMED, max_tokens=200), 1, "stop"),
    "one call": (chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=200), 1, "tool_calls"),
    "completion": (completion(), 1, "length"),
    "completion choices": (completion(n=2, seed=3, temperature=1.0), 2, "length"),
    "prompts": (completion(prompt=["one two", "three"], n=2, seed=3, temperature=1.0), 4, "length"),
    "prompts of ids": (completion(prompt=[[5, 6, 7], [8, 9]]), 2, "length"),
    "completion logprobs 0": (completion(logprobs=0), 1, "length"),
    "completion logprobs": (completion(logprobs=2, n=2, seed=3, temperature=1.0), 2, "length"),
    "echo": (completion(echo=True), 1, "length"),
    "echo of prompts": (completion(echo=True, prompt=["one two", "three"], logprobs=1), 2, "length"),
    "echo only": (completion(echo=True, max_tokens=0, logprobs=1), 1, "length"),
    "best_of n": (completion(best_of=1), 1, "length"),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_feature_in_both_modes(http: httpx.AsyncClient, name: str) -> None:
    """Of OpenAI's types; texts, calls, log probabilities, reasons and counts are the same streamed and whole."""
    body, choices, reason = CASES[name]
    answer = await both(http, body)
    assert len(answer["choices"]) == choices
    assert not reason or {choice["finish_reason"] for choice in answer["choices"]} == {reason}
    usage, found = answer["usage"], said(answer)
    limit = body.get("max_completion_tokens", body["max_tokens"]) * choices
    assert usage["completion_tokens"] <= limit and (reason != "length" or usage["completion_tokens"] == limit)
    for one in found:
        if body.get("logprobs") is True:
            assert all(len(entry["top_logprobs"]) == body.get("top_logprobs", 0) for entry in one["logprobs"]["content"])
        elif "logprobs" in body:
            tokens = one["logprobs"]["tokens"]
            assert len(tokens) == len(one["logprobs"]["token_logprobs"]) == len(one["logprobs"]["text_offset"])
            assert "".join(tokens) == one["text"]
        else:
            assert one["logprobs"] is None
    match name:
        case "characters" | "stop in characters":
            assert found[0]["text"] == MANY_BYTES.partition(body.get("stop", "never"))[0]
        case "json_schema":
            assert set(json.loads(found[0]["text"])) == {"kind", "other"}
        case "greedy choices":
            assert found[0] == found[1] == said(await both(http, body | {"n": 1}))[0]
        case "tool_choice required" | "tool_choice named" | "one call":
            assert found[0]["text"] == "" and len(whole_calls(found[0])) >= 1
            for _, function, arguments in whole_calls(found[0]):
                assert function in (("ask",) if body["tool_choice"] is NAMED else ("look", "ask"))
                assert json.loads(arguments)["kind"] in ("a", "b")
        case "echo" | "echo only":
            assert found[0]["text"].startswith(body["prompt"])
            assert (found[0]["text"] == body["prompt"]) == (body["max_tokens"] == 0)


def whole_calls(one: dict[str, Any]) -> list[Any]:
    """The calls of a choice without the one that the bound on tokens may have cut."""
    calls: list[Any] = one["calls"]
    return calls[:-1] if one["finish_reason"] == "length" else calls


async def test_parallel_calls_are_many_and_one_when_the_client_says_so(http: httpx.AsyncClient) -> None:
    """A model that may not end yet calls on; with ``parallel_tool_calls: false`` it may end, and has one call."""
    body = chat(tools=TOOLS, tool_choice="required", max_tokens=300)
    many = whole_calls(said(await both(http, body | {"min_tokens": 120}))[0])
    assert len(many) >= 2 and all(json.loads(arguments)["kind"] in ("a", "b") for _, _, arguments in many)
    assert len(said(await both(http, body | {"parallel_tool_calls": False}))[0]["calls"]) == 1


async def test_a_forced_call_has_an_object_for_arguments_whatever_the_tool_says(http: httpx.AsyncClient) -> None:
    """Clients seldom say ``strict``: a bare string or null as arguments would be a 502 of ``/v1/messages``."""
    tool = {
        "name": "ask",
        "input_schema": {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]},
    }
    body = chat(model="tiny", tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=200)
    response = await http.post("/messages", json=body)
    assert response.status_code == 200, response.text
    (block,) = response.json()["content"]
    assert (block["type"], block["name"]) == ("tool_use", "ask") and block["input"]["kind"] in ("a", "b")


@pytest.mark.parametrize("given", [{}, {"parameters": {}}], ids=["absent", "empty"])
async def test_a_tool_without_parameters_is_called_with_an_object(http: httpx.AsyncClient, given: dict[str, Any]) -> None:
    """At OpenAI such a function has none; vLLM alone lets the model answer any JSON, such as null."""
    tool = {"type": "function", "function": {"name": "now"} | given}
    answer = await both(http, chat(tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=100))
    ((_, function, arguments),) = said(answer)[0]["calls"]
    assert (function, json.loads(arguments)) == ("now", {})


async def test_stop_in_all_forms(http: httpx.AsyncClient) -> None:
    """A string, a list, token ids, with and without the stop in the output; what ended the answer is told."""
    full = said(await both(http, chat(max_tokens=40)))[0]["text"]
    stop = full[len(full) // 2 : len(full) // 2 + 4]
    before = full[: full.index(stop)]
    for given in (stop, [stop], ["\u0000never", stop], [stop, *["\u0000never"] * 15]):
        one = said(await both(http, chat(max_tokens=40, stop=given)))[0]
        assert (one["text"], one["finish_reason"], one["stop_reason"]) == (before, "stop", stop)
    kept = said(await both(http, chat(max_tokens=40, stop=stop, include_stop_str_in_output=True)))[0]
    assert kept["text"] == before + stop
    ids = (await http.post("/tokenize", json={"model": "tiny", "prompt": full, "add_special_tokens": False})).json()[
        "tokens"
    ]
    one = said(await both(http, chat(max_tokens=40, stop_token_ids=[ids[3]])))[0]
    assert one["finish_reason"] == "stop" and one["stop_reason"] == ids[3] and full.startswith(one["text"])


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "other"}}), "tool_choice", "tool"),
    (chat(tools=TOOLS, tool_choice=SECRET), "tool_choice", "tool_choice"),
    (chat(tools=[]), "tools", "tools"),
    (chat(tools=[{"type": "custom", "custom": {"name": "x"}}]), "tools", "function"),
    (chat(tool_choice="required"), "tool_choice", "tools"),
    (chat(functions=[TOOLS[0]["function"]]), "functions", "tools"),
    (chat(function_call={"name": "look"}), "function_call", "tools"),
    (chat(modalities=["text", "audio"]), "modalities", "text"),
    (chat(web_search_options={}), "web_search_options", "search"),
    (chat(prompt_logprobs=0), "prompt_logprobs", "echo"),
    (chat(return_token_ids=True), "return_token_ids", "tokenize"),
    (chat(response_format={"type": "xml"}), "response_format", "json_object"),
    (chat(response_format={"type": "json_schema"}), "response_format", "json_schema"),
    (chat(response_format={"type": "json_schema", "json_schema": {"name": "s"}}), "response_format", "schema"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs", "20"),
    (chat(logit_bias={"999999": 1}), "logit_bias", "vocab"),
    (chat(messages=[{"role": "user", "content": [{"type": "text", "text": SECRET}, {"type": "hologram"}]}]), "messages", ""),
    (
        chat(
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": SECRET},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
                    ],
                }
            ]
        ),
        "messages",
        "text only",
    ),
    (completion(best_of=3), "best_of", "best_of"),
    (completion(suffix="the end"), "suffix", "suffix"),
    (completion(max_tokens=0), "max_tokens", "max_tokens"),
    (completion(prompt=[]), "prompt", "prompt"),
    (completion(prompt=[f"{SECRET} {number}" for number in range(129)]), "prompt", "128"),
    (completion(prompt=[SECRET, 5]), "prompt", "mixed"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
async def test_what_cannot_be_done_is_a_400_that_says_so(http: httpx.AsyncClient, number: int) -> None:
    """Before any token, alike in both modes, with the field's name; the error is small and holds nothing of the prompt."""
    body, param, word = REFUSED[number]
    whole = await post(http, body)
    streamed = await post(http, body, stream=True)
    assert (whole.status_code, streamed.status_code) == (400, 400), whole.text
    error = whole.json()["error"]
    assert whole.json() == streamed.json()
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert word in error["message"]
    assert len(whole.content) < 1000 and SECRET not in whole.text
