"""Answers in the shapes of OpenAI's responses: a stream's events, whole responses, errors (ING-1).

A stream is ``response.created``, ``response.in_progress``, for each item ``response.output_item.added``, its parts and
deltas, ``response.output_item.done``, and in the end ``response.completed``, ``response.incomplete`` or
``response.failed`` with the whole response. Each event has the next ``sequence_number``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from broker.api import openai_answers
from broker.api.answer_parts import Change, Closed, Grew, Kind, Opened, Part, PartsWriter
from broker.api.openai_answers import AnswerHead
from subjects.errors import ApiError
from subjects.messages import Usage

OWN_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of a chat, which an engine may complain of, as they are called in this API."""
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why a response is incomplete, by the chat's finish reason; any other finish is ``completed``."""

_encode = msgspec.json.Encoder().encode
_FIELD = re.compile(r"[a-z_]+")
# Most events of a stream are these: of them only the text is encoded anew.
_DELTA_EVENT = (
    b'event: %b.delta\ndata: {"type":"%b.delta","sequence_number":%d,"output_index":%d,"item_id":"%b",%b"delta":%b}\n\n'
)
_ID_PREFIX = {Kind.TEXT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}
_EVENTS = {
    Kind.TEXT: "response.output_text",
    Kind.REASONING: "response.reasoning_text",
    Kind.CALL: "response.function_call_arguments",
}


def error_body(error: ApiError) -> bytes:
    """OpenAI's shape, with the field as this API calls it."""
    return openai_answers.error_body(_named(error))


def _named(error: ApiError) -> ApiError:
    field = _FIELD.match(error.param or "")
    name = OWN_NAMES.get(field[0]) if field else None
    if field is None or name is None or error.param is None:
        return error
    # Messages and items of the input do not have the same numbers.
    param = name if name == "input" else name + error.param[field.end() :]
    return ApiError(
        error.status, error.message, type=error.type, param=param, code=error.code, retry_after_s=error.retry_after_s
    )


class ResponseWriter(PartsWriter):
    """Writes one response."""

    def __init__(self, head: AnswerHead, echo: dict[str, Any]) -> None:
        super().__init__(head)
        self._echo = echo
        self._sequence = 0

    def fail(self, error: ApiError) -> bytes:
        """The stream ends here."""
        start = self._told(())
        codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        about = {"code": codes.get(error.status, "server_error"), "message": error.message}
        response = self._response("failed", None) | {"error": about}
        return start + self._event("response.failed", {"response": response})

    def _last(self, usage: Usage | None) -> bytes:
        response = self._whole(usage)
        return self._event(f"response.{response['status']}", {"response": response})

    def _whole(self, usage: Usage | None) -> dict[str, Any]:
        return self._response(self._status(), usage)

    def _status(self) -> str:
        return "incomplete" if self._parts.finish_reason in INCOMPLETE else "completed"

    def _opening(self) -> bytes:
        about = {"response": self._response("in_progress", None)}
        return self._event("response.created", about) + self._event("response.in_progress", about)

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        body = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: " + name.encode() + b"\ndata: " + _encode(body) + b"\n\n"

    def _changed(self, change: Change) -> bytes:
        part = change.part
        if isinstance(change, Grew):
            return self._grew(part, change.text, change.logprobs)
        item = {"output_index": part.index, "item_id": self._item_id(part)}
        place = item if part.kind is Kind.CALL else item | {"content_index": 0}
        match change:
            case Opened():
                events = self._event("response.output_item.added", self._whole_item(part, "in_progress", empty=True))
                if part.kind is not Kind.CALL:
                    events += self._event("response.content_part.added", place | {"part": _content(part, "", [])})
                return events
            case Closed():
                fields: dict[str, Any] = {"text": part.text}
                if part.kind is Kind.CALL:
                    fields = {"arguments": part.text, "name": part.name}
                if part.kind is Kind.TEXT:
                    fields["logprobs"] = part.logprobs
                events = self._event(f"{_EVENTS[part.kind]}.done", place | fields)
                if part.kind is not Kind.CALL:
                    done = _content(part, part.text, part.logprobs)
                    events += self._event("response.content_part.done", place | {"part": done})
                return events + self._event("response.output_item.done", self._whole_item(part, self._part_status(part)))

    def _grew(self, part: Part, text: str, logprobs: Sequence[Any]) -> bytes:
        name = _EVENTS[part.kind].encode()
        more = b"" if part.kind is Kind.CALL else b'"content_index":0,'
        if part.kind is Kind.TEXT:
            more += b'"logprobs":' + (_encode(logprobs) if logprobs else b"[]") + b","
        number, self._sequence = self._sequence, self._sequence + 1
        return _DELTA_EVENT % (name, name, number, part.index, self._item_id(part).encode(), more, _encode(text))

    def _whole_item(self, part: Part, status: str, *, empty: bool = False) -> dict[str, Any]:
        return {"output_index": part.index, "item": self._item(part, status, empty=empty)}

    def _item_id(self, part: Part) -> str:
        return f"{_ID_PREFIX[part.kind]}_{self._head.request}_{part.index}"

    def _part_status(self, part: Part) -> str:
        """Only what was being written when the answer was cut is incomplete."""
        return self._status() if part is self._parts.parts[-1] else "completed"

    def _item(self, part: Part, status: str, *, empty: bool = False) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(part), "status": status}
        content = [] if empty else [_content(part, part.text, part.logprobs)]
        match part.kind:
            case Kind.TEXT:
                return item | {"type": "message", "role": "assistant", "content": content}
            case Kind.REASONING:
                return item | {"type": "reasoning", "summary": [], "content": content}
            case Kind.CALL:
                arguments = "" if empty else part.text
                return item | {"type": "function_call", "call_id": part.call_id, "name": part.name, "arguments": arguments}

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        reason = INCOMPLETE.get(self._parts.finish_reason or "") if status == "incomplete" else None
        parts = [] if status == "in_progress" else self._parts.parts
        return {
            "id": f"resp_{self._head.request}",
            "object": "response",
            "created_at": self._head.created_unix_s,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": None if reason is None else {"reason": reason},
            "model": self._head.model,
            "output": [self._item(part, self._part_status(part) if status != "failed" else "incomplete") for part in parts],
            "usage": None if usage is None else _usage(usage),
            **self._echo,
        }


def _content(part: Part, text: str, logprobs: list[Any]) -> dict[str, Any]:
    if part.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: Usage) -> dict[str, Any]:
    """The engine's own counts; how many tokens were reasoning it does not say."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
