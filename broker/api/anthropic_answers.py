"""Answers in the shapes of Anthropic's messages: a stream's events, whole messages, errors (ING-1).

A stream is ``message_start``, for each block ``content_block_start``, its deltas and ``content_block_stop``, then
``message_delta`` with the engine's own counts, and ``message_stop``. While nothing happens, ``ping``. An error inside a
stream is an ``error`` event, at which Anthropic's SDKs raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from broker.api.answer_parts import Change, Closed, Grew, Kind, Opened, Part, PartsWriter
from broker.api.openai_answers import AnswerHead
from subjects.errors import ApiError
from subjects.messages import Usage

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By HTTP status; any other below 500 is ``invalid_request_error``, above ``api_error``."""
OWN_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "thinking",
}
"""Fields of a chat, which an engine may complain of, as Anthropic calls them."""
PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
# Most events of a stream are these: of them only the text is encoded anew.
_DELTA_EVENT = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}\n\n'
)
_DELTAS = {
    Kind.TEXT: ("text_delta", "text"),
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}


def error_body(error: ApiError) -> bytes:
    """``{"type": "error", "error": {...}}``; the shape has no place for a field's name, so the message tells it."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    field = OWN_NAMES.get(error.param or "", error.param)
    if field and f"'{field}'" not in message:
        message = f"{message} (in '{field}')"
    return _encode({"type": "error", "error": {"type": kind, "message": message}})


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode({"type": name, **fields}) + b"\n\n"


class MessageWriter(PartsWriter):
    """Writes one message."""

    def __init__(self, head: AnswerHead, input_tokens: int, stop_sequences: Sequence[str]) -> None:
        super().__init__(head)
        self._input_tokens = input_tokens
        self._stop_sequences = stop_sequences

    def quiet(self) -> bytes:
        """A ping, or a comment where nothing was said yet: ``message_start`` is the first event."""
        return PING if self._opened else super().quiet()

    def fail(self, error: ApiError) -> bytes:
        """The stream ends here."""
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    def _last(self, usage: Usage | None) -> bytes:
        stop_reason, stop_sequence = self._stop()
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        return _event("message_delta", {"delta": delta, "usage": self._usage(usage)}) + _event("message_stop", {})

    def _whole(self, usage: Usage | None) -> dict[str, Any]:
        stop_reason, stop_sequence = self._stop()
        parts = self._parts.parts
        cut = parts[-1] if parts and stop_reason != "tool_use" else None
        content = [self._block(part, cut=part is cut) for part in parts]
        return self._message(content, stop_reason, stop_sequence, self._usage(usage))

    def _opening(self) -> bytes:
        # The engine tells its counts at the end; until then the gateway's own count of the prompt stands.
        return _event("message_start", {"message": self._message([], None, None, self._usage(None))})

    def _changed(self, change: Change) -> bytes:
        index = change.part.index
        match change:
            case Opened(part):
                return _event("content_block_start", {"index": index, "content_block": _opening(part)})
            case Grew(part, text):
                kind, field = _DELTAS[part.kind]
                return _DELTA_EVENT % (index, kind.encode(), field.encode(), _encode(text))
            case Closed():
                return _event("content_block_stop", {"index": index})

    def _message(
        self, content: list[dict[str, Any]], stop_reason: str | None, stop_sequence: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self._head.request}",
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }

    def _usage(self, usage: Usage | None) -> dict[str, int]:
        """Anthropic counts cached tokens beside ``input_tokens``, not within them."""
        counts = usage or Usage(prompt_tokens=self._input_tokens, completion_tokens=0)
        return {
            "input_tokens": counts.prompt_tokens - counts.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.cached_tokens,
            "output_tokens": counts.completion_tokens,
        }

    def _stop(self) -> tuple[str, str | None]:
        """``(stop_reason, stop_sequence)``. A call that a stop sequence cut short must not run, a complete one must."""
        reason, matched = self._parts.finish_reason, self._parts.stop_reason
        calls = self._parts.calls
        if reason == "length":
            return "max_tokens", None
        if reason == "content_filter":
            return "refusal", None
        if (
            isinstance(matched, str)
            and matched in self._stop_sequences
            and not (calls and _arguments(calls[-1]) is not None)
        ):
            return "stop_sequence", matched
        return ("tool_use" if calls else "end_turn"), None

    def _block(self, part: Part, cut: bool) -> dict[str, Any]:
        if part.kind is not Kind.CALL:
            return _opening(part) | {_DELTAS[part.kind][1]: part.text}
        arguments = _arguments(part)
        if arguments is None and not cut:
            message = f"The model called the tool '{part.name}' with arguments that are no JSON object."
            raise ApiError(502, message, type="server_error", code="invalid_tool_call")
        return _opening(part) | {"input": arguments or {}}


def _arguments(part: Part) -> dict[str, Any] | None:
    try:
        arguments = _decode(part.text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _opening(part: Part) -> dict[str, Any]:
    match part.kind:
        case Kind.TEXT:
            return {"type": "text", "text": ""}
        case Kind.REASONING:
            # A signature proves to Anthropic that a thought is its own; nobody here asks for one.
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Kind.CALL:
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
