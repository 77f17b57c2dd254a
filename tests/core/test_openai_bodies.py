"""Bodies: whatever a client sends is either checked and profiled, or a 400; nothing else (ING-1, O7)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from broker.api.openai_bodies import WITHHELD_FIELDS, ChatBody, CompletionBody, EmbeddingBody, formatted, parse_body
from profiles.features import OutputLengths, RequestContext
from profiles.tokenizer import EstimatedTokenizer
from subjects.errors import ApiError
from subjects.ids import ModelHash, Tenant
from subjects.messages import Endpoint, ModelRecord
from tests.core.profiled import build_profile

RECORD = ModelRecord(
    name="m",
    model_hash=ModelHash("0" * 64),
    weights_hash="w",
    source="s",
    weights_bytes=1,
    kv_bytes_per_token=1,
    kv_bytes=1,
    budget_bytes=3,
    max_context_len=4096,
)
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Hi"}
EMBEDDING: dict[str, Any] = {"model": "m", "input": "Hi"}
GOOD = {Endpoint.CHAT: CHAT, Endpoint.COMPLETIONS: COMPLETION, Endpoint.EMBEDDINGS: EMBEDDING}
EXTRA = ("chat_template_kwargs", "documents", "add_special_tokens", "lora", "adapter", "functions", "top_k", "ignore_eos")
STRUCTS = (ChatBody, CompletionBody, EmbeddingBody)
FIELDS = sorted({*(name for struct in STRUCTS for name in struct.__struct_fields__), *EXTRA} - set(WITHHELD_FIELDS))
NUMBERS = st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**30, 0.5, -0.5, 1.0, 1e308, True, False])
SCALARS = st.none() | NUMBERS | st.text(max_size=8) | st.sampled_from(["auto", "none", "required", "json_object", "text"])
KEYS = st.text(max_size=4) | st.sampled_from(
    ["type", "text", "role", "content", "function", "name", "index", "url", "tool_calls"]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer", ""])
PARTS = st.fixed_dictionaries({}, optional={"type": st.just("text") | SCALARS, "text": VALUES, "image_url": VALUES})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": ROLES | VALUES,
            "content": VALUES | st.lists(PARTS, max_size=3),
            "tool_calls": VALUES,
            "name": VALUES,
        },
    ),
    max_size=3,
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(list(Endpoint)),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
    st.none() | MESSAGES,
)
@example(Endpoint.CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": 7}}]}, None)
@example(Endpoint.COMPLETIONS, {"prompt": [[2**32]]}, None)
@example(Endpoint.COMPLETIONS, {"prompt": ["a", "b"], "n": 3}, None)
@example(Endpoint.COMPLETIONS, {"prompt": [[1], [2, 3]]}, None)
@example(Endpoint.EMBEDDINGS, {"input": [[2**32]]}, None)
def test_any_body_is_profiled_or_a_400(endpoint: Endpoint, fields: dict[str, Any], messages: Any) -> None:
    """The whole way from bytes to a profile raises nothing but our own error, and that one is the client's fault."""
    body = {**GOOD[endpoint], **({"messages": messages} if messages else {}), **fields}
    try:
        parsed = parse_body(endpoint, json.dumps(body).encode())
        prompts = EstimatedTokenizer().prompts(endpoint, parsed.mapping)
        context = RequestContext(tenant=Tenant("t"), deadline_unix_s=1.0)
        profile = build_profile(RECORD, endpoint, parsed.asked, prompts, context, OutputLengths())
    except ApiError as error:
        assert error.status == 400 and error.message
    else:
        asked = parsed.asked
        assert profile.n == asked.n * (len(prompts) if endpoint is Endpoint.COMPLETIONS else 1)
        assert (profile.stream, profile.tools, profile.structured) == (asked.stream, asked.tools, asked.structured)
        assert profile.max_tokens >= (endpoint is Endpoint.CHAT)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(list(Endpoint)), st.binary(max_size=40))
@example(Endpoint.CHAT, b'{"model":"m","messages":[{"role":"user","content":"x"}],"unknown":1e999}')
@example(Endpoint.CHAT, b'{"model":"m","messages":[{"role":"user","content":"x"}],"unknown":' + b"9" * 5000 + b"}")
def test_any_bytes_are_a_400(endpoint: Endpoint, raw: bytes) -> None:
    """Bytes that are no good body are refused, whatever they are."""
    with pytest.raises(ApiError) as caught:
        parse_body(endpoint, raw)
    assert caught.value.status == 400


def test_what_the_engine_gets_is_the_clients_bytes() -> None:
    """Byte for byte, spaces and number formats included, unless a withheld field must go; escaped names are found too."""
    raw = b'{ "model": "m", "messages": [{"role":"user","content":"x"}], "top_k": 1.50e1,\n"unknown": {"a": null} }'
    assert parse_body(Endpoint.CHAT, raw).raw == raw
    others = b'"request_id": 1, "kv_transfer_params": {}, "ec_transfer_params": {"a": 1}'
    hidden = raw.replace(b'"top_k"', b'"cache\\u005fsalt": "x", ' + others + b', "top_k"')
    cleaned = parse_body(Endpoint.CHAT, hidden)
    assert json.loads(cleaned.raw) == json.loads(raw) == cleaned.mapping
    assert b"1.50e1" in cleaned.raw


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {}}]},
        {"role": "assistant"},
        {"role": "tool", "content": "", "tool_call_id": "1"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]},
    ],
)
def test_what_openai_accepts_is_accepted(message: dict[str, Any]) -> None:
    """Empty assistant content, none beside tool calls, media as data (J6)."""
    body = CHAT | {"messages": [{"role": "user", "content": "Hi"}, message]}
    assert parse_body(Endpoint.CHAT, json.dumps(body).encode()).asked.model == "m"


@pytest.mark.parametrize("kind", ["image_url", "audio_url", "video_url"])
@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/x", "https://e.org/i.png", "file:///etc/passwd", "gopher://x", "//x", "", 5, {}]
)
def test_the_pool_fetches_nothing_for_a_client(kind: str, url: Any) -> None:
    """Media that would have to be fetched are refused before any engine sees them (O5)."""
    for link in (url, {"url": url}):
        body = CHAT | {"messages": [{"role": "user", "content": [{"type": kind, kind: link}]}]}
        with pytest.raises(ApiError, match="data:"):
            parse_body(Endpoint.CHAT, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("fields", "stream", "usage", "max_tokens", "n", "tools", "structured"),
    [
        ({}, False, False, None, 1, False, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True, True, None, 1, False, False),
        ({"stream": True, "stream_options": {}}, True, False, None, 1, False, False),
        ({"stream": None, "max_tokens": 5, "max_completion_tokens": 6, "n": 3}, False, False, 6, 3, False, False),
        ({"max_tokens": 5, "tools": [{"type": "function", "function": {"name": "f"}}]}, False, False, 5, 1, True, False),
        ({"tools": [{"type": "custom"}], "tool_choice": "none"}, False, False, None, 1, False, False),
        ({"response_format": {"type": "text"}}, False, False, None, 1, False, False),
        ({"response_format": {"type": "json_object"}}, False, False, None, 1, False, True),
    ],
)
def test_what_a_body_asks_for(
    fields: dict[str, Any], stream: bool, usage: bool, max_tokens: int | None, n: int, tools: bool, structured: bool
) -> None:
    """The views that the gateway decides by."""
    parsed = parse_body(Endpoint.CHAT, json.dumps(CHAT | fields).encode())
    asked = parsed.asked
    assert (asked.stream, asked.include_usage, asked.max_tokens, asked.n) == (stream, usage, max_tokens, n)
    assert (asked.tools, formatted(parsed.fields), asked.structured) == (tools, structured, structured)


@pytest.mark.parametrize(
    ("prompt", "n", "choices"),
    [
        ("a", None, 1),
        ("a", 3, 3),
        ([1, 2, 3], 2, 2),
        (["a"], 1, 1),
        (["a", "b", "c"], 2, 6),
        ([[1], [2, 3]], 3, 6),
        (["a"] * 128, 1, 128),
    ],
)
def test_each_prompt_has_its_choices(prompt: Any, n: int | None, choices: int) -> None:
    """Several prompts are served in one request; a list of token ids is one prompt (ING-1)."""
    parsed = parse_body(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": prompt, "n": n}).encode())
    assert len(EstimatedTokenizer().prompts(Endpoint.COMPLETIONS, parsed.mapping)) * parsed.asked.n == choices
    assert parsed.asked.continuable == (choices == 1)


@pytest.mark.parametrize("prompt", [[], [[]], ["a", 1], ["a", [1]], [1, [1]], ["a"] * 129, ["a", "", 5]])
def test_prompts_that_are_none(prompt: Any) -> None:
    """Empty ones, mixed ones and too many are a 400 that names the field."""
    with pytest.raises(ApiError) as caught:
        parse_body(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode())
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"n": 17}, "n"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    """``param`` is a field of the body as the client wrote it, whatever part of it is wrong (J5)."""
    with pytest.raises(ApiError) as caught:
        parse_body(Endpoint.CHAT, json.dumps(CHAT | fields).encode())
    assert (caught.value.status, caught.value.param) == (400, param)
