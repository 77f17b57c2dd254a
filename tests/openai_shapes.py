"""Answers held against OpenAI's own types and reference, whole and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

EXTENSIONS = frozenset({"stop_reason", "reasoning"})
"""What vLLM adds to choices and messages, and its users read."""


def unknown_fields(value: Any, place: str = "$") -> list[str]:
    """Places of fields that OpenAI's types do not know, in a validated model and all that it holds."""
    found: list[str] = []
    if isinstance(value, BaseModel):
        found += [f"{place}.{name}" for name in value.model_extra or {} if name not in EXTENSIONS]
        for name in value.model_fields_set:
            found += unknown_fields(getattr(value, name), f"{place}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += unknown_fields(item, f"{place}[{index}]")
    return found


def check_whole(answer: dict[str, Any]) -> None:
    """One answer that was not streamed, of a chat or of completions."""
    chat = answer["object"] == "chat.completion"
    if chat:
        assert unknown_fields(ChatCompletion.model_validate(answer)) == []
    else:
        _check_completion(answer)
    for place, choice in enumerate(answer["choices"]):
        assert choice["index"] == place
        assert {"index", "finish_reason", "logprobs", "message" if chat else "text"} <= choice.keys()
        if chat:
            message = choice["message"]
            assert message["role"] == "assistant" and {"content", "refusal"} <= message.keys()
            assert message["content"] is not None or message["tool_calls"]
            _check_chat_logprobs(choice["logprobs"])
    _check_usage(answer["usage"])


def check_stream(events: Sequence[dict[str, Any]], *, choices: int = 1, usage: bool = False) -> None:
    """All chunks of one stream: each of its type, one id and date, the role first and once, one end to each choice, and the
    usage where and only where it belongs."""
    chat = events[0]["object"] == "chat.completion.chunk"
    assert len({(one["id"], one["created"], one["model"], one["object"]) for one in events}) == 1
    ended: set[int] = set()
    begun: set[int] = set()
    for event in events:
        _check_chunk(event, chat)
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in ended, "nothing follows the end of a choice"
            if chat:
                assert ("role" in choice["delta"]) == (index not in begun)
                _check_chat_logprobs(choice["logprobs"])
            begun.add(index)
            if choice["finish_reason"] is not None:
                ended.add(index)
    assert ended == begun == set(range(choices))
    if not usage:
        assert all("usage" not in event for event in events)
        return
    assert all(event["usage"] is None and event["choices"] for event in events[:-1])
    assert events[-1]["choices"] == []
    _check_usage(events[-1]["usage"])


def _check_chunk(event: dict[str, Any], chat: bool) -> None:
    for choice in event["choices"]:
        assert {"index", "finish_reason", "logprobs", "delta" if chat else "text"} <= choice.keys()
    if chat:
        assert unknown_fields(ChatCompletionChunk.model_validate(event)) == []
        return
    # OpenAI has one type for both modes of completions, whose reason is never null; its streams have null all the same.
    choices = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in event["choices"]]
    _check_completion(event | {"choices": choices})


def _check_completion(answer: dict[str, Any]) -> None:
    choices = []
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        if logprobs is not None and logprobs["token_logprobs"] and logprobs["token_logprobs"][0] is None:
            # Nothing comes before the first token of an echoed prompt: OpenAI's servers say null, its type does not know it.
            assert logprobs["text_offset"][0] == 0 and logprobs["top_logprobs"][0] is None
            rest = {name: logprobs[name][1:] for name in ("token_logprobs", "top_logprobs")}
            choice = choice | {"logprobs": logprobs | rest}
        choices.append(choice)
    assert unknown_fields(Completion.model_validate(answer | {"choices": choices})) == []


def _check_usage(usage: dict[str, Any]) -> None:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


def _check_chat_logprobs(logprobs: dict[str, Any] | None) -> None:
    if logprobs is not None:
        assert logprobs.keys() == {"content", "refusal"}


def said(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """What each choice of a whole answer says: text, calls of tools, log probabilities and the reasons of its end."""
    found = []
    for choice in answer["choices"]:
        message = choice.get("message", {})
        calls = [
            (call["type"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ]
        text = message["content"] or "" if message else choice["text"]
        found.append(_said(text, calls, choice["logprobs"], choice["finish_reason"], choice.get("stop_reason")))
    return found


def said_in_stream(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, put together from a stream as OpenAI's clients do it."""
    count = 1 + max(choice["index"] for event in events for choice in event["choices"])
    found: list[dict[str, Any]] = []
    for index in range(count):
        text, finish, stop = "", None, None
        calls: dict[int, list[str]] = {}
        logprobs: dict[str, Any] | None = None
        for choice in (choice for event in events for choice in event["choices"] if choice["index"] == index):
            delta = choice.get("delta", {})
            text += delta.get("content") or choice.get("text") or ""
            for piece in delta.get("tool_calls") or ():
                call = calls.setdefault(piece["index"], ["", "", ""])
                function = piece.get("function") or {}
                call[0] = piece.get("type") or call[0]
                call[1] += function.get("name") or ""
                call[2] += function.get("arguments") or ""
                assert call[0] and call[1], "a call begins with its type and name"
            if choice["logprobs"] is not None:
                logprobs = logprobs or {}
                for name, value in choice["logprobs"].items():
                    logprobs[name] = [*(logprobs.get(name) or []), *value] if value is not None else logprobs.get(name)
            finish = choice["finish_reason"] or finish
            stop = choice.get("stop_reason") if choice.get("stop_reason") is not None else stop
        assert list(calls) == list(range(len(calls)))
        found.append(_said(text, [tuple(call) for call in calls.values()], logprobs, finish, stop))
    return found


def _said(text: str, calls: Sequence[Any], logprobs: Any, finish: Any, stop: Any) -> dict[str, Any]:
    return {"text": text, "calls": list(calls), "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}
