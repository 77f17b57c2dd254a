"""The vLLM engine on the CPU with a tiny random model: what it says is what vLLM's own server says."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from subjects.errors import EngineError
from subjects.messages import Endpoint, FailureKind
from tests.e2e.engines import Driver, VllmServer, replica_spec
from tests.waiting import until
from workers.engines.base import EngineInfo
from workers.engines.vllm_cpu import VllmEngine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    # Warnings of vLLM's own modules are not ours to fix.
    pytest.mark.filterwarnings("ignore:::vllm"),
    pytest.mark.filterwarnings("ignore:::xgrammar"),
]

QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "What can you do for me?"}], "temperature": 0}
ANSWER_TOKENS = 40
STREAM_GAP_MAX_S = 1.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(tiny_model: Path) -> AsyncIterator[Driver]:
    """One started and warmed engine for the whole module."""
    environment = dict(os.environ)
    engine = VllmEngine(replica_spec(str(tiny_model)))
    info = await engine.start()
    assert info == EngineInfo(
        slots=8, kv_pages=info.kv_pages, block_size=32, max_context_len=1024, gives_token_ids=True, continues=True
    )
    await engine.warm(4)
    driver = Driver(engine)
    yield driver
    await driver.close()
    os.environ.clear()
    os.environ.update(environment)


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": ANSWER_TOKENS} | fields


CHATS = [
    ask("What can you do for me?"),
    ask("Grüße 😀 from 東京, and a long line: " + "one two three " * 40),
    ask("First", n=2, seed=7, temperature=1.0),
    ask("Penalise", presence_penalty=1.5, frequency_penalty=0.5, max_tokens=60),
    ask("Bias", logit_bias={"100": 5, "101": 4}, max_completion_tokens=30),
    ask("Sampled", temperature=0.9, top_p=0.8, top_k=20, min_p=0.01, seed=3),
    ask("Never mind the end", ignore_eos=True, min_tokens=5, max_tokens=64),
    ask("With log probabilities", logprobs=True, top_logprobs=3, max_tokens=12),
    ask("A structure", response_format={"type": "json_object"}, max_tokens=30),
]


def comparable(response: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Text, finish reason, stop reason of each choice of a server's response."""
    return [
        (
            choice["message"]["content"] if "message" in choice else choice["text"],
            choice["finish_reason"],
            choice["stop_reason"],
        )
        for choice in response["choices"]
    ]


@pytest.mark.parametrize("body", CHATS, ids=lambda body: body["messages"][0]["content"][:12])
async def test_a_chat_is_answered_as_by_vllms_own_server(
    driver: Driver, vllm_server: VllmServer, body: dict[str, Any]
) -> None:
    """Text, finish and stop reasons, usage and log probabilities equal those of `vllm serve`, token for token."""
    theirs = await asyncio.to_thread(vllm_server.post, body)
    ours = await driver.ask(body)
    ours.check()
    choices = range(body.get("n", 1))
    assert [(ours.text(i), ours.finish_reason(i), ours.choice(i)[-1].stop_reason) for i in choices] == comparable(theirs)
    assert ours.usage.prompt_tokens == theirs["usage"]["prompt_tokens"]
    assert ours.usage.completion_tokens == theirs["usage"]["completion_tokens"]
    if body.get("logprobs"):
        content = [entry for detail in ours.details() for entry in detail["logprobs"]["content"]]
        expected = theirs["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [entry["token"] for entry in expected]
        assert [entry["logprob"] for entry in content] == pytest.approx([entry["logprob"] for entry in expected], abs=1e-4)
        assert all(len(entry["top_logprobs"]) == 3 for entry in content)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0},
        {"prompt": ["one two", "three four five"], "n": 2, "seed": 5, "max_tokens": 6},
        {"prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0},
        {"prompt": "Say it again", "max_tokens": 6, "temperature": 0, "echo": True, "logprobs": 2},
    ],
    ids=["text", "prompts", "ids", "echo"],
)
async def test_a_completion_is_answered_as_by_vllms_own_server(
    driver: Driver, vllm_server: VllmServer, body: dict[str, Any]
) -> None:
    """Several prompts and choices, prompts of token ids, echo and log probabilities equal those of `vllm serve`."""
    theirs = await asyncio.to_thread(vllm_server.post, body, Endpoint.COMPLETIONS)
    ours = await driver.ask(body, Endpoint.COMPLETIONS)
    ours.check()
    found = [(ours.text(i), ours.finish_reason(i), ours.choice(i)[-1].stop_reason) for i in range(len(theirs["choices"]))]
    assert found == comparable(theirs)
    assert ours.usage.prompt_tokens == theirs["usage"]["prompt_tokens"]
    assert ours.usage.completion_tokens == theirs["usage"]["completion_tokens"]
    if "logprobs" in body:
        tokens = [token for detail in ours.details() for token in detail["logprobs"]["tokens"]]
        offsets = [offset for detail in ours.details() for offset in detail["logprobs"]["text_offset"]]
        assert tokens == theirs["choices"][0]["logprobs"]["tokens"]
        assert offsets == theirs["choices"][0]["logprobs"]["text_offset"]


async def test_eight_at_once_get_the_answers_they_get_alone(driver: Driver) -> None:
    """Batching changes no greedy answer, and nothing of one request ends up in another."""
    bodies = [ask(f"Question number {i} of many", max_tokens=24 + i) for i in range(8)]
    alone = [await driver.ask(body) for body in bodies]
    requests = [driver.send(body) for body in bodies]
    together = [await driver.wait(request) for request in requests]
    assert [answer.token_ids() for answer in together] == [answer.token_ids() for answer in alone]
    assert [answer.text() for answer in together] == [answer.text() for answer in alone]
    assert driver.unknown == []


async def test_a_stop_string_never_leaks(driver: Driver) -> None:
    """Text before a stop string that spans tokens comes whole, none of the stop string does, for every cut."""
    whole = await driver.ask(ask("Stop me", ignore_eos=True))
    text = whole.text()
    for begin in range(4, len(text) - 4, 5):
        stop = text[begin : begin + 4]
        answer = await driver.ask(ask("Stop me", ignore_eos=True, stop=[stop]))
        assert answer.text() == text[: text.index(stop)]
        assert (answer.finish_reason(), answer.choice()[-1].stop_reason) == ("stop", stop)


async def test_a_continued_answer_is_the_unbroken_one(driver: Driver) -> None:
    """Cut after any token, and continued with the tokens sent: same ids, same text from exactly there, same usage."""
    body = ask("Continue", ignore_eos=True, stop=["\u0000never"], max_tokens=30)
    whole = await driver.ask(body)
    ids = whole.token_ids()
    assert len(ids) == 30
    for cut in range(1, 31):
        rest = await driver.ask(body, sent_token_ids=tuple(ids[:cut]))
        rest.check(first_index=cut)
        assert rest.token_ids() == ids[cut:]
        assert rest.text() == "".join(delta.text for delta in whole.choice()[cut:])
        assert rest.finish_reason() == "length"
        assert (rest.usage.prompt_tokens, rest.usage.completion_tokens) == (
            whole.usage.prompt_tokens,
            whole.usage.completion_tokens,
        )


async def test_a_cut_inside_a_character_loses_and_doubles_nothing(driver: Driver) -> None:
    """Each byte of multi-byte text is generated by an engine that only knows the bytes before it as sent tokens."""
    from tokenizers import Tokenizer

    text = "né 😀 東京"
    tokenizer = Tokenizer.from_file(str(Path(driver.engine._record.source) / "tokenizer.json"))  # type: ignore[attr-defined]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) > len(text), "the tiny tokenizer splits these characters into bytes"
    pieces = []
    for cut, token in enumerate(ids):
        body = ask("Any", allowed_token_ids=[token], max_tokens=cut + 1)
        answer = await driver.ask(body, sent_token_ids=tuple(ids[:cut]))
        assert answer.token_ids() == [token]
        pieces.append(answer.text())
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize(
    "fields",
    [{"n": 2}, {"seed": 1}, {"presence_penalty": 1.0}, {"min_tokens": 3}, {"response_format": {"type": "json_object"}}],
)
async def test_what_cannot_be_continued_exactly_is_refused(driver: Driver, fields: dict[str, Any]) -> None:
    """A continuation that would differ from the unbroken answer is refused, not approximated."""
    answer = await driver.ask(ask("Continue") | fields, sent_token_ids=(5, 6, 7))
    assert answer.failure is not None
    assert (answer.failure.kind, answer.failure.status, answer.failure.param) == (
        FailureKind.BAD_REQUEST,
        400,
        next(iter(fields)),
    )


BAD_BODIES: list[tuple[Endpoint, Any]] = [
    (Endpoint.CHAT, b"{"),
    (Endpoint.CHAT, b"[]"),
    (Endpoint.CHAT, b"\xff\xfe"),
    (Endpoint.CHAT, {}),
    (Endpoint.CHAT, {"messages": 3}),
    (Endpoint.CHAT, {"messages": []}),
    (Endpoint.CHAT, {"messages": [{"content": "no role"}]}),
    (Endpoint.CHAT, ask("word " * 3000)),
    (Endpoint.CHAT, ask("x", temperature=-1)),
    (Endpoint.CHAT, ask("x", top_p=2)),
    (Endpoint.CHAT, ask("x", n=0)),
    (Endpoint.CHAT, ask("x", n=1_000_000)),
    (Endpoint.CHAT, ask("x", max_tokens=-5)),
    (Endpoint.CHAT, ask("x", logit_bias={"999999": 1})),
    (Endpoint.CHAT, ask("x", logprobs=True, top_logprobs=100_000)),
    (Endpoint.CHAT, ask("x", stop=[""])),
    (Endpoint.CHAT, ask("x", chat_template="{{ messages }}")),
    (Endpoint.CHAT, ask("x", use_beam_search=True)),
    (Endpoint.CHAT, ask("x", tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required")),
    (
        Endpoint.CHAT,
        ask("x", response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "nonsense"}}}),
    ),
    (Endpoint.CHAT, ask("x", response_format={"type": "json_schema"})),
    (Endpoint.CHAT, ask("x", structured_outputs={"regex": "((("})),
    (Endpoint.CHAT, ask("x", structured_outputs={"grammar": "root ::= (((("})),
    (Endpoint.CHAT, ask("x", structured_outputs={"json": "{" * 2000})),
    (Endpoint.COMPLETIONS, {"prompt": ""}),
    (Endpoint.COMPLETIONS, {"prompt": [1_000_000]}),
    (Endpoint.COMPLETIONS, {"prompt": "x", "suffix": "y"}),
    (Endpoint.COMPLETIONS, {"prompt": "x", "best_of": 2}),
    (Endpoint.COMPLETIONS, {"prompt": "x", "max_tokens": 0}),
    (Endpoint.COMPLETIONS, {"max_tokens": 4}),
    (Endpoint.EMBEDDINGS, {"input": "x"}),
]


@pytest.mark.parametrize("number", range(len(BAD_BODIES)))
async def test_a_bad_request_ends_alone(driver: Driver, number: int) -> None:
    """Bodies, parameters, schemas and regexes that cannot work get a 400 of their own while others run on (PAINS J8)."""
    endpoint, body = BAD_BODIES[number]
    other = driver.send(ask("A good one", max_tokens=8, ignore_eos=True))
    answer = await driver.ask(body, endpoint)
    assert len(answer.deltas) == 1
    assert answer.deltas[0].end
    assert answer.failure is not None
    assert answer.failure.kind is FailureKind.BAD_REQUEST
    assert 400 <= answer.failure.status < 500
    assert 0 < len(answer.failure.message) <= 600
    assert (await driver.wait(other)).usage.completion_tokens == 8


async def test_a_json_schema_is_obeyed(driver: Driver) -> None:
    """A random model, forced by a schema, answers with JSON of that schema."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    answer = await driver.ask(ask("Give me JSON", response_format=form, max_tokens=200))
    parsed = json.loads(answer.text())
    assert set(parsed) == {"ok", "kind"}
    assert isinstance(parsed["ok"], bool)
    assert parsed["kind"] in ("a", "b")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "look_up"}}], ids=["required", "named"]
)
async def test_tool_calls_come_as_detail(driver: Driver, choice: Any) -> None:
    """For a name with a tool parser the calls are deltas of OpenAI's shape, their arguments whole and of the tool's schema.
    The engine was started for a name without one, whose requests beside it have none."""
    parameters = {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "look_up", "parameters": parameters, "strict": True}}
    body = ask("Look it up", tools=[tool], tool_choice=choice, parallel_tool_calls=False, max_tokens=200)
    with_parser = driver.send(body, options={"tool_call_parser": "hermes"})
    others: tuple[dict[str, str] | None, ...] = (None, {})
    for options in others:
        refused = (await driver.ask(body, options=options)).failure
        assert refused is not None and refused.param == "tools"
    unknown = (await driver.ask(body, options={"tool_call_parser": "nobodys"})).failure
    assert unknown is not None and unknown.status == 500 and "parser" in unknown.message
    answer = await driver.wait(with_parser)
    answer.check()
    calls = [call for detail in answer.details() for call in detail["tool_calls"]]
    assert [call["function"]["name"] for call in calls if call["function"].get("name")] == ["look_up"]
    arguments = json.loads("".join(call["function"].get("arguments") or "" for call in calls))
    assert arguments["kind"] in ("a", "b")
    assert all(set(detail) <= {"tool_calls"} for detail in answer.details())
    assert isinstance(calls[0]["function"]["arguments"], str)  # as at OpenAI: no piece is without arguments
    assert answer.finish_reason() == ("tool_calls" if choice == "required" else "stop")


@pytest.mark.parametrize("choice", [None, "auto", "required", {"type": "function", "function": {"name": "f"}}], ids=str)
async def test_tools_of_a_model_without_a_parser_are_refused(driver: Driver, choice: Any) -> None:
    """Before any token, with what the model's operator can do; a client that wants none called is served."""
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    answer = await driver.ask(ask("x") | tools | ({} if choice is None else {"tool_choice": choice}))
    assert answer.failure is not None and len(answer.deltas) == 1
    assert (answer.failure.status, answer.failure.param) == (400, "tools")
    assert "spec.engine.options.tool_call_parser" in answer.failure.message
    assert (await driver.ask(ask("x", max_tokens=3) | tools | {"tool_choice": "none"})).failure is None


async def test_nothing_a_client_sent_is_logged(driver: Driver, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither good nor bad requests leave a trace of their content in the process's output."""
    secret = "xyzzy-7391"
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": secret}}}
    for body in (
        ask(f"Tell me about {secret}"),
        ask(secret * 500),
        ask("x", response_format=schema),
        ask("x", structured_outputs={"regex": f"{secret}((("}),
        ask("x", stop=[secret], user=secret, metadata={"key": secret}),
        {"messages": secret},
    ):
        await driver.ask(body)
    out, err = capfd.readouterr()
    assert secret not in out + err


def held(driver: Driver) -> tuple[int, int, int]:
    """Requests that run and wait, and free pages; the load's clocks go on whatever happens."""
    load = driver.engine.load()
    return load.running, load.waiting, load.kv_pages_free


async def test_an_aborted_request_frees_its_slot_and_pages(driver: Driver) -> None:
    """In the middle of a stream the abort frees slot and KV within a second, and nothing more comes out (PAINS A4)."""

    idle = held(driver)
    assert idle[:2] == (0, 0)
    request = driver.send(ask("A long one", max_tokens=900, ignore_eos=True))
    answer = driver.answers[request]
    await until(lambda: len(answer.deltas) >= 5, within_s=20.0)
    assert driver.engine.load().running == 1
    driver.engine.abort(request, 1)
    seen = len(answer.deltas)
    await until(lambda: held(driver) == idle, within_s=1.0)
    assert (await driver.ask(QUESTION | {"max_tokens": 3})).usage.completion_tokens == 3
    assert len(answer.deltas) == seen
    assert not answer.done.is_set()


async def test_requests_aborted_before_they_run_never_speak(driver: Driver) -> None:
    """Aborts right after add, twice, of unknown requests and of waiting ones leave nothing behind (PAINS A2)."""
    idle = held(driver)
    requests = [driver.send(ask(f"Number {i}", max_tokens=500, ignore_eos=True, n=3)) for i in range(6)]
    driver.engine.abort(requests[0], 1)
    driver.engine.abort(requests[0], 2)
    await asyncio.sleep(0.05)
    for request in requests:
        driver.engine.abort(request, 1)
        driver.engine.abort(request, 1)
    counts = [len(driver.answers[request].deltas) for request in requests]
    assert counts[0] == 0
    await until(lambda: held(driver) == idle, within_s=1.0)
    await driver.ask(QUESTION | {"max_tokens": 3})
    assert [len(driver.answers[request].deltas) for request in requests] == counts
    # The same attempt id may be heard of again.
    assert driver.engine._outbox._muted == set()  # type: ignore[attr-defined]


async def test_cached_tokens_are_reported_and_salted(driver: Driver) -> None:
    """A repeated prefix is reused and counted; another tenant's salt shares nothing."""
    body = ask("The same beginning, long enough to fill blocks. " * 4, max_tokens=2)
    first = await driver.ask(body, cache_salt="tenant-a")
    again = await driver.ask(body, cache_salt="tenant-a")
    other = await driver.ask(body, cache_salt="tenant-b")
    assert first.usage.cached_tokens == 0
    assert again.usage.cached_tokens >= 64
    assert again.usage.cached_tokens % 32 == 0
    assert other.usage.cached_tokens == 0
    assert first.text() == again.text() == other.text()


async def test_the_share_of_prefix_hits_is_told(driver: Driver) -> None:
    """Once enough prompts are over; the triggers live on it (SCH-13)."""
    body = ask("Always the same beginning, many times over. " * 25, max_tokens=2)
    answers = [await driver.ask(body, cache_salt="hits") for _ in range(12)]
    asked = sum(answer.usage.prompt_tokens for answer in answers)
    found = sum(answer.usage.cached_tokens for answer in answers)
    ratio = driver.engine.load().hit_ratio
    assert asked >= 2_000 and ratio is not None and 0.5 < ratio < 1.0
    assert ratio == pytest.approx(found / asked, abs=0.35)  # Those of the tests before count too.


async def test_the_grants_bound_holds_over_the_bodys(driver: Driver) -> None:
    """`max_tokens` of the grant bounds a body that asks for more or says nothing."""
    assert (await driver.ask(ask("x", ignore_eos=True, max_tokens=50), max_tokens=7)).usage.completion_tokens == 7
    unbounded = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
    assert (await driver.ask(unbounded, max_tokens=9)).usage.completion_tokens == 9


async def test_a_dead_engine_says_so(driver: Driver) -> None:
    """A step that raises ends `steps()` with an error that quotes no request. The last test here: it kills the engine."""
    engine = driver.engine
    assert isinstance(engine, VllmEngine)

    def broken() -> None:
        raise RuntimeError("out of memory\nsecond line")

    engine._engine.step = broken
    driver.send(ask("A prompt nobody may read in a log"))
    death = await driver.death()
    assert isinstance(death, EngineError)
    assert str(death) == "tiny: the engine died: RuntimeError: out of memory"
    with pytest.raises(EngineError, match="the engine died"):
        await engine.warm(2)
