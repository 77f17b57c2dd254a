"""Anthropic's messages and OpenAI's responses as chats: what is said stays said, the rest is a 400 that names it (ING-1)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.api import anthropic_answers, anthropic_bodies, responses_bodies
from broker.api.anthropic_bodies import MessagesBody
from broker.api.openai_bodies import parse_body
from broker.api.responses_bodies import ResponsesBody
from subjects.errors import ApiError
from subjects.messages import Endpoint

PNG = "iVBORw0KGgo="
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
MESSAGES: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [USER]}
RESPONSES: dict[str, Any] = {"model": "m", "input": [USER]}
PICTURE: dict[str, Any] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
CALL: dict[str, Any] = {"type": "tool_use", "id": "t", "name": "look", "input": {"a": 1}}
TOOL: dict[str, Any] = {"name": "look", "input_schema": {"type": "object"}}
FUNCTION: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def chat_of(body: dict[str, Any]) -> dict[str, Any]:
    """The chat of a body of either API; it must pass the chat's own check."""
    api = responses_bodies.translate if "input" in body else anthropic_bodies.translate
    raw = api(json.dumps(body).encode()).body
    return parse_body(Endpoint.CHAT, raw).mapping


def messages_of(*messages: dict[str, Any], **fields: Any) -> Any:
    """Chat messages of Anthropic's."""
    return chat_of(MESSAGES | {"messages": list(messages)} | fields)["messages"]


def items_of(*items: dict[str, Any], **fields: Any) -> Any:
    """Chat messages of items of a response."""
    return chat_of(RESPONSES | {"input": list(items)} | fields)["messages"]


# --------------------------------------------------------------------------------------------------------- messages


def test_turns_of_one_role_are_one() -> None:
    """Anthropic joins them, and many chat templates want roles to alternate; pictures and texts keep their order."""
    assistant = {"role": "assistant", "content": "a"}
    more: dict[str, Any] = {"role": "user", "content": [PICTURE, {"type": "text", "text": "this"}]}
    told = messages_of(USER, more, assistant, assistant, USER)
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    parts = [{"type": "text", "text": "Hi"}, url, {"type": "text", "text": "this"}]
    assert told == [{"role": "user", "content": parts}, {"role": "assistant", "content": "aa"}, USER]


def test_results_of_tools() -> None:
    """They stand right behind the call; a picture in one goes to the user's turn, where a chat can have it."""
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "red"}, PICTURE]}
    told = messages_of(USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]})
    function = {"name": "look", "arguments": '{"a":1}'}
    assert told[1] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "t", "type": "function", "function": function}],
    }
    assert told[2] == {"role": "tool", "tool_call_id": "t", "content": "red"}
    assert [part["type"] for part in told[3]["content"]] == ["image_url"]
    empty = {"type": "tool_result", "tool_use_id": "t"}
    told = messages_of(USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [empty]})
    assert told[2:] == [{"role": "tool", "tool_call_id": "t", "content": ""}]


def test_a_last_message_of_the_assistant_is_continued() -> None:
    """The answer goes on where it ends; otherwise a new turn begins."""
    body = MESSAGES | {"messages": [USER, {"role": "assistant", "content": "The answer is ("}]}
    chat = chat_of(body)
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in chat_of(MESSAGES)


def test_system_texts() -> None:
    """Blocks are joined; the billing note of Claude Code is no prompt; a later system message stays where it is."""
    note = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=0f"}
    told = messages_of(
        USER, {"role": "system", "content": "Now."}, USER, system=[note, *({"type": "text", "text": t} for t in "ab")]
    )
    assert told == [{"role": "system", "content": "a\nb"}, USER, {"role": "system", "content": "Now."}, USER]


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, {"thinking_token_budget": 1024}),
        ({"type": "disabled"}, {"reasoning_effort": "none"}),
        ({"type": "adaptive"}, {}),
    ],
)
def test_thinking(thinking: dict[str, Any], expected: dict[str, Any]) -> None:
    """A budget is the engine's to keep or to refuse; "adaptive" asks for nothing."""
    chat = chat_of(MESSAGES | {"thinking": thinking})
    assert {name: chat[name] for name in ("thinking_token_budget", "reasoning_effort") if name in chat} == expected
    chat = chat_of(MESSAGES | {"thinking": thinking, "output_config": {"effort": "low"}})
    assert chat["reasoning_effort"] == expected.get("reasoning_effort", "low")


def test_a_schema_for_the_answer() -> None:
    """``output_config`` becomes a chat's format and effort."""
    config = {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}}
    chat = chat_of(MESSAGES | {"output_config": config})
    assert chat["reasoning_effort"] == "high"
    assert chat["response_format"]["json_schema"]["schema"] == {"type": "object"}


CHOICES: list[tuple[dict[str, Any], Any]] = [
    ({"type": "auto"}, "auto"),
    ({"type": "any"}, "required"),
    ({"type": "none"}, "none"),
    ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
]


@pytest.mark.parametrize(("choice", "expected"), CHOICES)
def test_choice_of_tools(choice: dict[str, Any], expected: Any) -> None:
    """Each kind of ``tool_choice``."""
    assert chat_of(MESSAGES | {"tools": [TOOL], "tool_choice": choice})["tool_choice"] == expected


def in_message(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    """A conversation with these blocks."""
    return {"messages": [{"role": role, "content": list(blocks)}, USER]}


def in_source(**source: Any) -> dict[str, Any]:
    """A conversation with a picture."""
    return in_message({"type": "image", "source": source})


RESULT = {"type": "tool_result", "tool_use_id": "t"}
REFUSED_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": []}, "mcp_servers"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management.edits[0].keep"),
    ({"n": 2}, "n"),
    ({"cache_salt": "x"}, "cache_salt"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"temperature": 3}, "temperature"),
    ({"system": [PICTURE]}, "system[0].type"),
    (in_message({"type": "document"}), "messages[0].content[0].type"),
    (in_message({"type": "text"}), "messages[0].content[0].text"),
    (in_message(CALL), "messages[0].content[0].type"),
    (in_message(PICTURE, role="assistant"), "messages[0].content[0].type"),
    (in_message({"type": "redacted_thinking", "data": "x"}, role="assistant"), "messages[0].content[0].type"),
    (in_message(CALL | {"id": ""}, role="assistant"), "messages[0].content[0].id"),
    (in_message({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
    (in_message(RESULT | {"content": [{"type": "search_result"}]}), "messages[0].content[0].content[0].type"),
    ({"messages": [USER, {"role": "assistant", "content": [CALL]}]}, "messages"),
    (in_source(type="url", url="https://example.org/x.png"), "messages[0].content[0].source.type"),
    (in_source(type="file", file_id="f"), "messages[0].content[0].source.type"),
    (in_source(type="base64", media_type="text/html", data=PNG), "messages[0].content[0].source.media_type"),
    (in_source(type="base64", media_type="image/png", data="?"), "messages[0].content[0].source.data"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"output_config": {"format": {"type": "grammar", "schema": {}}}}, "output_config.format.type"),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED_MESSAGES)
def test_refused_messages(fields: dict[str, Any], field: str) -> None:
    """400, and the message names the field, since Anthropic's error has no other place for it."""
    with pytest.raises(ApiError) as caught:
        anthropic_bodies.translate(json.dumps(MESSAGES | fields).encode())
    assert (caught.value.status, caught.value.param) == (400, field)
    assert f"'{field}'" in json.loads(anthropic_answers.error_body(caught.value))["error"]["message"]


# -------------------------------------------------------------------------------------------------------- responses


def test_input_may_be_a_text() -> None:
    """Text alone is the user's; instructions stand before it."""
    assert chat_of({"model": "m", "input": "Hi"})["messages"] == [USER]
    told = chat_of({"model": "m", "input": "Hi", "instructions": "Be."})["messages"]
    assert told == [{"role": "system", "content": "Be."}, USER]


def test_items_become_messages() -> None:
    """Leading instructions are one message, a turn of the assistant is one message, pictures come as data."""
    url = f"data:image/png;base64,{PNG}"
    told = items_of(
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "low"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "why"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "x"}, {"type": "refusal", "refusal": "y"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": ""},
        {"type": "function_call_output", "call_id": "c", "output": "red"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "developer", "content": "c"},
        USER,
        instructions="first",
    )
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    assert told == [
        {"role": "system", "content": "first\n\na\n\nb"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}]},
        {"role": "assistant", "content": "xy", "reasoning_content": "why", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "red"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "system", "content": "c"},
        USER,
    ]


def test_what_is_taken_without_effect() -> None:
    """Hints for a cache, tiers and storage change nothing of the chat."""
    hints = {
        "store": True,
        "truncation": "disabled",
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "include": ["reasoning.encrypted_content"],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "background": False,
        "previous_response_id": None,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": None, "summary": "auto"},
    }
    assert chat_of(RESPONSES | hints) == chat_of(RESPONSES)
    of_messages = {
        "cache_control": {"type": "ephemeral"},
        "service_tier": "auto",
        "tool_choice": {"type": "auto"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    assert chat_of(MESSAGES | of_messages) == chat_of(MESSAGES)


def of_input(item: dict[str, Any]) -> dict[str, Any]:
    """A request of one item."""
    return {"input": [item]}


def of_content(**content: Any) -> dict[str, Any]:
    """A request of one part."""
    return of_input({"role": "user", "content": [content]})


REFUSED_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"n": 2}, "n"),
    ({"messages": []}, "messages"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"input": []}, "input"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    (of_input({"type": "item_reference", "id": "i"}), "input[0].type"),
    (of_input({"type": "web_search_call", "id": "i"}), "input[0].type"),
    (of_input({"type": "reasoning", "summary": [], "encrypted_content": "x"}), "input[0].encrypted_content"),
    (of_input({"type": "function_call", "name": "f"}), "input[0].call_id"),
    (of_input({"type": "function_call_output", "output": "x"}), "input[0].call_id"),
    (of_input({"type": "function_call_output", "call_id": "c"}), "input[0].output"),
    (of_input({"content": "x"}), "input[0].role"),
    (of_input({"role": "user"}), "input[0].content"),
    (of_content(type="input_file", file_id="f"), "input[0].content[0].type"),
    (of_content(type="input_text"), "input[0].content[0].text"),
    (of_content(type="input_image", image_url="https://example.org/x.png"), "input[0].content[0].image_url"),
    (of_content(type="input_image", file_id="f"), "input[0].content[0].image_url"),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED_RESPONSES)
def test_refused_responses(fields: dict[str, Any], field: str) -> None:
    """400 with the field as OpenAI's error names it, in the message too."""
    with pytest.raises(ApiError) as caught:
        responses_bodies.translate(json.dumps(RESPONSES | fields).encode())
    assert (caught.value.status, caught.value.param) == (400, field)
    assert f"'{field}'" in caught.value.message


# -------------------------------------------------------------------------------------------------------- whatever comes

NUMBERS = st.sampled_from([0, 1, -1, 2**31, 2**64, 10**30, 0.5, 1e308, True, False])
WORDS_TEXT = (
    "text image tool_use tool_result thinking function_call function_call_output reasoning input_text "
    "input_image user assistant system developer message auto tool custom function json_schema enabled base64 "
    "image/png data:,"
)
WORDS = st.sampled_from([*WORDS_TEXT.split(), PNG, ""])
KEYS_TEXT = (
    "type role content text id name input tool_use_id source media_type data thinking call_id arguments "
    "output summary image_url format schema input_schema effort"
)
KEYS = st.sampled_from(KEYS_TEXT.split())
VALUES = st.recursive(
    st.none() | NUMBERS | st.text(max_size=4) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
TYPES_TEXT = (
    "text image tool_use tool_result thinking message function_call function_call_output reasoning input_text "
    "input_image output_text function custom"
)
TYPES = st.sampled_from(TYPES_TEXT.split())
PARTS = st.fixed_dictionaries(
    {"type": TYPES},
    optional={
        "text": st.text(max_size=4),
        "id": st.text(max_size=2),
        "name": st.text(max_size=2),
        "input": st.dictionaries(KEYS, VALUES, max_size=2),
        "tool_use_id": st.text(max_size=2),
        "thinking": st.text(max_size=2),
        "content": st.text(max_size=2),
        "source": st.just(PICTURE["source"]),
        "image_url": st.sampled_from(["data:,", "http://x"]),
    },
)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"])},
        optional={
            "content": st.text(max_size=4) | st.lists(PARTS, max_size=3),
            "type": TYPES,
            "call_id": st.text(max_size=2),
            "name": st.text(max_size=2),
            "arguments": st.text(max_size=4),
            "output": st.text(max_size=2) | st.lists(PARTS, max_size=2),
        },
    ),
    max_size=4,
)


@pytest.mark.parametrize(
    ("translate", "base", "struct"),
    [
        (anthropic_bodies.translate, MESSAGES, MessagesBody),
        (responses_bodies.translate, RESPONSES, ResponsesBody),
    ],
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_comes_is_a_chat_or_a_400(translate: Any, base: dict[str, Any], struct: Any, data: st.DataObject) -> None:
    """Never another exception, neither here nor in the chat's own check (O7)."""
    body = dict(base)
    conversation = "input" if "input" in base else "messages"
    if data.draw(st.booleans()):
        body[conversation] = data.draw(ITEMS)
    body |= data.draw(st.dictionaries(st.sampled_from([*struct.__struct_fields__]), VALUES, max_size=2))
    try:
        parse_body(Endpoint.CHAT, translate(json.dumps(body).encode()).body)
    except ApiError as error:
        assert error.status == 400 and len(error.message) < 400
