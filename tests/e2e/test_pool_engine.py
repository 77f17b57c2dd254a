"""A whole pool with real vLLM engines, seen by its clients: OpenAI's SDK, raw HTTP and the SDK over NATS (PAINS J, B8)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest
import pytest_asyncio

from ops.control import control
from ops.models import records_of
from ops.supervisor import Pool, PoolOptions
from profiles.tiny import make_tiny
from subjects import names
from subjects.bus import BusMessage
from subjects.client import AsyncCrossModelScheduler
from subjects.codec import decode
from subjects.errors import ApiError
from subjects.messages import Alert
from subjects.nats.bus import NatsBus

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

HI: Any = [{"role": "user", "content": "What can you do for me?"}]
BOUND_S = 60.0


def _service(name: str, source: Path, *, aliases: str = "", tier: int = 1) -> str:
    return f"""
---
apiVersion: llm.serving/v1
kind: ModelService
metadata: {{name: {name}, aliases: [{aliases}]}}
spec:
  source: {source}
  strategy: {{quality_tier: {tier}}}
  engine: {{type: vllm, dtype: float32, max_context_len: 1024, max_num_seqs: 8, kv_cache_bytes: 16MiB}}
"""


@dataclass
class Stage:
    """The pool, clients for it, and every alert it has published."""

    pool: Pool
    http: httpx.AsyncClient
    sdk: openai.AsyncOpenAI
    alerts: list[Alert] = field(default_factory=list)

    async def chat(self, body: dict[str, Any], **headers: str) -> tuple[dict[str, Any], httpx.Response]:
        """A whole answer."""
        response = await self.http.post(
            "/chat/completions", json={"model": "tiny", "temperature": 0} | body, headers=headers
        )
        return response.json(), response

    async def stream(self, body: dict[str, Any], route: str = "/chat/completions") -> list[dict[str, Any]]:
        """All chunks of a streamed answer, which ends with ``[DONE]``."""
        sent = {"model": "tiny", "temperature": 0, "stream": True, "stream_options": {"include_usage": True}} | body
        async with self.http.stream("POST", route, json=sent) as response:
            assert response.status_code == 200, await response.aread()
            lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """One pool with a good tiny model, one whose configuration does not match its weights, and one changed since it was
    applied."""
    directory = tmp_path_factory.mktemp("pool-engine")
    good = make_tiny("tiny", directory / "good", seed=1)
    mismatching = Path(shutil.copytree(good, directory / "mismatching"))
    config = json.loads((mismatching / "config.json").read_text())
    (mismatching / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] * 2}))
    changed = make_tiny("changed", directory / "changed", seed=2)
    path = directory / "services.yaml"
    path.write_text(
        _service("tiny", good, aliases="tiny-alias", tier=2)
        + _service("mismatching", mismatching)
        + _service("changed", changed)
    )
    records = await asyncio.to_thread(records_of, [path])
    weights = changed / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    async with Pool(PoolOptions(state_dir=directory / "state", devices=("cpu:3GiB",))) as pool:
        await control(pool.nats_url, "apply", {"records": [msgspec.to_builtins(record) for record in records]})
        bus = await NatsBus.connect([pool.nats_url], name="alerts")
        url = f"{pool.http_url}/v1"
        async with (
            httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http,
            openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as sdk,
        ):
            stage = Stage(pool, http, sdk)

            def hear(message: BusMessage) -> None:
                stage.alerts.append(decode(message.payload, Alert))

            await bus.subscribe(names.ALL_ALERTS, hear)
            yield stage
        await bus.close()


def _put_together(chunks: list[dict[str, Any]]) -> tuple[dict[int, str], dict[int, str], dict[str, Any]]:
    """Text and finish reason of each choice, and the usage, of a streamed answer."""
    text: dict[int, str] = {}
    finish: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
            text[choice["index"]] = text.get(choice["index"], "") + (piece or "")
            if choice["finish_reason"]:
                assert choice["index"] not in finish, "a choice ends once"
                finish[choice["index"]] = choice["finish_reason"]
    assert [bool(chunk.get("usage")) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"] == []
    return text, finish, chunks[-1]["usage"]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": HI, "max_tokens": 24},
        {"messages": HI, "max_tokens": 12, "n": 3, "seed": 5, "temperature": 1.0},
        {"messages": HI, "max_tokens": 64, "ignore_eos": True, "min_tokens": 64},
        {"messages": [*HI, {"role": "assistant", "content": ""}, {"role": "user", "content": "Go on"}], "max_tokens": 8},
        {"prompt": "Once upon a time", "max_tokens": 16},
    ],
    ids=["plain", "three choices", "to the length", "empty assistant turn", "completion"],
)
async def test_streamed_and_whole_answers_say_the_same(stage: Stage, body: dict[str, Any]) -> None:
    """Text, finish reasons and usage of each choice are equal in both modes (J1, J2, J6, I1)."""
    route = "/completions" if "prompt" in body else "/chat/completions"
    response = await stage.http.post(route, json={"model": "tiny", "temperature": 0} | body)
    assert response.status_code == 200, response.text
    whole = response.json()
    text, finish, usage = _put_together(await stage.stream(body, route))
    content = {c["index"]: c["message"]["content"] if "message" in c else c["text"] for c in whole["choices"]}
    assert set(text) == set(range(body.get("n", 1)))
    assert text == content
    assert finish == {choice["index"]: choice["finish_reason"] for choice in whole["choices"]}
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [usage[count] for count in counts] == [whole["usage"][count] for count in counts]
    assert usage["completion_tokens"] <= body["max_tokens"] * body.get("n", 1)


async def test_logprobs_without_top_logprobs_in_a_stream_of_three(stage: Stage) -> None:
    """Each token of each of three choices has its log probability, and no alternatives that nobody asked for (J2, J3)."""
    body = {"messages": HI, "max_tokens": 6, "n": 3, "seed": 2, "temperature": 1.0, "logprobs": True}
    chunks = await stage.stream(body)
    _, finish, usage = _put_together(chunks)
    assert set(finish) == {0, 1, 2}
    entries = [e for c in chunks for choice in c["choices"] for e in (choice.get("logprobs") or {}).get("content") or ()]
    assert len(entries) == usage["completion_tokens"]
    assert all(isinstance(entry["logprob"], float) and entry["top_logprobs"] == [] for entry in entries)
    whole, response = await stage.chat(body)
    assert response.status_code == 200
    assert sum(len(choice["logprobs"]["content"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]


async def test_stop_strings_never_leak(stage: Stage) -> None:
    """A stop string that lies across tokens ends the answer before it, alike in both modes and in every chunk."""
    plain, _ = await stage.chat({"messages": HI, "max_tokens": 40})
    full: str = plain["choices"][0]["message"]["content"]
    for begin in (len(full) // 3, len(full) // 2):
        stop = full[begin : begin + 5]
        body = {"messages": HI, "max_tokens": 40, "stop": [stop]}
        text, finish, _ = _put_together(await stage.stream(body))
        whole, _ = await stage.chat(body)
        assert text[0] == whole["choices"][0]["message"]["content"] == full[: full.index(stop)]
        assert finish[0] == whole["choices"][0]["finish_reason"] == "stop"


async def test_characters_arrive_whole(stage: Stage) -> None:
    """No chunk holds half a character, however the tokens cut it."""
    text = "né 😀 東京 👩‍👩‍👧 🇪🇺"
    body = {"messages": HI, "max_tokens": 120, "structured_outputs": {"choice": [text]}}
    chunks = await stage.stream(body)
    pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == text
    assert sum(1 for piece in pieces if piece) > 5
    assert not any("\ufffd" in piece for piece in pieces)


async def test_junk_schemas_are_the_clients_fault_and_harm_nobody(stage: Stage) -> None:
    """A 400 of OpenAI's shape, streamed or not, and the same replica answers the next one (J8, A7)."""
    junk: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "nonsense"}}}},
        {"structured_outputs": {"regex": "((("}},
    ]
    replica = (await stage.chat({"messages": HI, "max_tokens": 2}))[1].headers["x-carpool-replica"]
    for extra in junk:
        for stream in (False, True):
            body = {"messages": HI, "max_tokens": 4, "stream": stream} | extra
            answer, response = await stage.chat(body)
            assert response.status_code == 400, answer
            assert response.headers["content-type"].startswith("application/json")
            assert answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"
    _, response = await stage.chat({"messages": HI, "max_tokens": 2})
    assert (response.status_code, response.headers["x-carpool-replica"]) == (200, replica)


async def test_one_request_id_for_twenty_requests(stage: Stage) -> None:
    """A client's own ``X-Request-Id`` names nothing inside: twenty at once get their own answers and their own ids (J10)."""
    bodies = [{"messages": [{"role": "user", "content": f"Number {n}"}], "max_tokens": 8} for n in range(20)]
    alone = [(await stage.chat(body))[0]["choices"][0]["message"]["content"] for body in bodies]
    together = await asyncio.gather(*(stage.chat(body, **{"X-Request-Id": "same"}) for body in bodies))
    assert [answer["choices"][0]["message"]["content"] for answer, _ in together] == alone
    assert len(set(alone)) > 1
    assert len({answer["id"] for answer, _ in together}) == 20
    assert len({response.headers["x-carpool-request-id"] for _, response in together}) == 20


async def test_turns_that_openai_accepts(stage: Stage) -> None:
    """Content of null beside tool calls is fine, no messages at all are a 400 (J6)."""
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    turns = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "1", "content": "found"})
    assert (await stage.chat({"messages": turns, "max_tokens": 4}))[1].status_code == 200
    assert (await stage.chat({"messages": [], "max_tokens": 4}))[1].status_code == 400


async def test_names_and_bounds_by_the_sdk(stage: Stage) -> None:
    """A typo is not found, an alias answers under its name, a prompt that is too long is a 400 even streamed (J12, A7)."""
    with pytest.raises(openai.NotFoundError) as unknown:
        await stage.sdk.chat.completions.create(model="tinny", messages=HI)
    assert unknown.value.code == "model_not_found"
    answer = await stage.sdk.chat.completions.create(model="tiny-alias", messages=HI, max_tokens=4)
    assert answer.model == "tiny-alias"
    with pytest.raises(openai.BadRequestError) as long:
        await stage.sdk.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "word " * 3000}], stream=True
        )
    assert long.value.code == "context_length_exceeded"
    auto = await stage.sdk.chat.completions.create(model="auto", messages=HI, max_tokens=4)
    assert auto.model == "tiny"


async def test_nats_and_http_answer_alike(stage: Stage) -> None:
    """The same body over the bus: same text, finish reason and usage, streamed or not; without a model the pool chooses."""
    expected, _ = await stage.chat({"messages": HI, "max_tokens": 24})
    async with AsyncCrossModelScheduler(stage.pool.nats_url) as scheduler:
        assert [device["worker"] for device in scheduler.devices] or await scheduler.discover()
        for model in ("tiny", None):
            whole = await scheduler.infer(messages=HI, max_tokens=24, model=model, temperature=0)
            assert whole.model == "tiny"
            assert whole.text == expected["choices"][0]["message"]["content"]
            assert whole.finish_reason == expected["choices"][0]["finish_reason"]
            assert whole.usage is not None
            assert whole.usage.completion_tokens == expected["usage"]["completion_tokens"]
        pieces = [
            chunk.text
            async for chunk in await scheduler.infer(messages=HI, max_tokens=24, model="tiny", temperature=0, stream=True)
        ]
        assert "".join(pieces) == expected["choices"][0]["message"]["content"]
        with pytest.raises(ApiError) as unknown:
            await scheduler.infer("Hi", model="tinny")
        assert unknown.value.status == 404


async def test_other_apis_say_the_same_as_a_chat(stage: Stage) -> None:
    """Anthropic's messages and OpenAI's responses, by their own SDKs: text, end and usage of a chat, in both modes (J1)."""
    chat, _ = await stage.chat({"messages": HI, "max_tokens": 24})
    text: str = chat["choices"][0]["message"]["content"]
    counts = [chat["usage"][name] for name in ("prompt_tokens", "completion_tokens")]
    stop = text[len(text) // 2 :][:5]
    asked: Any = {"model": "tiny", "messages": HI, "max_tokens": 24, "extra_body": {"temperature": 0}}
    async with anthropic.AsyncAnthropic(base_url=stage.pool.http_url, api_key="none", max_retries=0) as sdk:
        assert (await sdk.messages.count_tokens(model="tiny", messages=HI)).input_tokens == counts[0]
        for more, reason, expected in (
            ({}, "max_tokens", text),
            ({"stop_sequences": [stop]}, "stop_sequence", text[: text.index(stop)]),
        ):
            body: Any = asked | more
            async with sdk.messages.stream(**body) as stream:
                streamed: anthropic.types.Message = await stream.get_final_message()
            whole = await sdk.messages.create(**body)
            for message in (whole, streamed):
                assert "".join(block.model_dump()["text"] for block in message.content) == expected
                assert (message.stop_reason, message.stop_sequence) == (reason, stop if more else None)
                usage = message.usage
                assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counts[0]
                assert more or usage.output_tokens == counts[1]
        half = text[: len(text) // 2]
        begun: Any = asked | {"messages": [*HI, {"role": "assistant", "content": half}]}
        counted = await sdk.messages.count_tokens(model="tiny", messages=begun["messages"])
        continued: anthropic.types.Message = await sdk.messages.create(**begun)
        usage = continued.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens > counts[0]
        with pytest.raises(anthropic.BadRequestError, match="thinking_token_budget"):
            await sdk.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})
    about: Any = {"model": "tiny", "input": HI, "max_output_tokens": 24, "temperature": 0}
    whole_response = await stage.sdk.responses.create(**about)
    last = [event async for event in await stage.sdk.responses.create(**about, stream=True)][-1]
    assert last.type == "response.incomplete"
    for response in (whole_response, last.response):
        assert (response.output_text, response.status) == (text, "incomplete") and response.usage is not None
        assert [response.usage.input_tokens, response.usage.output_tokens] == counts
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
    shaped = await stage.sdk.responses.create(**about, text=form)
    assert shaped.status == "completed" and json.loads(shaped.output_text) == {"a": 7}


async def test_leaving_a_stream_empties_the_engine(stage: Stage) -> None:
    """The client of a long answer goes; soon the replica runs nothing (A1, A4)."""
    stream = await stage.sdk.chat.completions.create(
        model="tiny", messages=HI, max_tokens=900, stream=True, extra_body={"ignore_eos": True, "min_tokens": 900}
    )
    async for _ in stream:
        break

    async def running() -> int:
        rows = await control(stage.pool.nats_url, "get", {"what": "replicas"})
        return sum(row["running"] for row in rows if row["model"] == "tiny")

    await stream.close()
    end_s = time.monotonic() + 15
    while await running():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(("model", "said"), [("mismatching", "size"), ("changed", "changed")])
async def test_a_model_that_cannot_load_is_refused_and_alerted(stage: Stage, model: str, said: str) -> None:
    """The client hears that, the alert says why, and the healthy model stays (B8, B9, PRO-3, BUS-5)."""
    before = (await stage.chat({"messages": HI, "max_tokens": 2}))[1].headers["x-carpool-replica"]
    for _ in range(2):
        with pytest.raises(openai.InternalServerError) as refused:
            await stage.sdk.chat.completions.create(model=model, messages=HI, max_tokens=4)
        assert refused.value.status_code == 503
        assert "loading failed" in refused.value.message, refused.value.message
        assert int(refused.value.response.headers["retry-after"]) >= 1
    after = (await stage.chat({"messages": HI, "max_tokens": 2}))[1].headers["x-carpool-replica"]
    assert after == before
    timeline = await control(stage.pool.nats_url, "get", {"what": "timeline"})
    assert not [entry for entry in timeline if entry["model"] == "tiny" and entry["action"] in ("evict", "unload", "drain")]
    assert 1 <= sum(1 for entry in timeline if (entry["model"], entry["action"]) == (model, "load")) <= 3
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(BOUND_S):
            while not [alert for alert in stage.alerts if alert.scope == model]:
                await asyncio.sleep(0.1)
    mine = [alert for alert in stage.alerts if alert.scope == model]
    assert mine and mine[0].kind == "load-failed" and said in mine[0].text and mine[0].remedy
