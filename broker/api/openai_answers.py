"""Answers in OpenAI's shapes: stream chunks, whole responses, error bodies (ING-1).

A stream's bytes are built once, here. Text comes from :attr:`Delta.text`; what text cannot carry comes from
:attr:`Delta.detail`, a JSON object whose ``logprobs`` (and other keys of ``CHOICE_KEYS``) belong to the choice, and all
other keys (``tool_calls``, ``reasoning_content``) to the choice's ``delta`` or ``message``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from subjects.errors import ApiError
from subjects.ids import RequestId
from subjects.messages import Delta, Endpoint, Usage

CHOICE_KEYS = ("logprobs", "prompt_logprobs", "token_ids", "prompt_token_ids")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_OBJECTS = {Endpoint.CHAT: "chat.completion", Endpoint.COMPLETIONS: "text_completion", Endpoint.EMBEDDINGS: "list"}
_ID_PREFIX = {Endpoint.CHAT: "chatcmpl", Endpoint.COMPLETIONS: "cmpl", Endpoint.EMBEDDINGS: "embd"}
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class AnswerHead(msgspec.Struct, frozen=True):
    """What every part of one answer repeats."""

    request: RequestId
    endpoint: Endpoint
    model: str
    created_unix_s: int
    choices: int
    include_usage: bool

    @property
    def public_id(self) -> str:
        """The id a client sees."""
        return f"{_ID_PREFIX[self.endpoint]}-{self.request}"


# ---------------------------------------------------------------------------------------------------------------- errors


def error_body(error: ApiError) -> bytes:
    """``{"error": {...}}`` in OpenAI's shape (PAINS J5)."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return _encode({"error": fields})


# ---------------------------------------------------------------------------------------------------------------- usage


def usage_fields(usage: Usage) -> dict[str, Any]:
    """The engine's own counts, never ours (PAINS I1)."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def detail_of(delta: Delta) -> dict[str, Any]:
    """What text cannot carry; empty where it is no object: a replica's mistake must not break the stream of its text."""
    try:
        detail = _decode(delta.detail) if delta.detail else {}
    except msgspec.DecodeError:
        return {}
    return detail if isinstance(detail, dict) else {}


def _sorted_detail(delta: Delta) -> tuple[dict[str, Any], dict[str, Any]]:
    """``(keys of the choice, keys of the choice's delta)``"""
    detail = detail_of(delta)
    choice_keys = {key: detail.pop(key) for key in list(detail) if key in CHOICE_KEYS}
    return choice_keys, detail


# --------------------------------------------------------------------------------------------------------------- answers


class OpenAiWriter:
    """Writes one answer: whole, or as chunks: role first, contents, a finish chunk per choice, then usage if asked for."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._chat = head.endpoint is Endpoint.CHAT
        start: dict[str, Any] = {
            "id": head.public_id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": head.created_unix_s,
            "model": head.model,
        }
        self._open = _encode(start)[:-1] + b',"choices":['
        # With include_usage every chunk but the last says that it has none, as OpenAI's reference has it.
        self._close = b'],"usage":null}' if head.include_usage else b"]}"
        self._role_sent = [False] * head.choices
        # Most chunks are plain text: of those only the text is encoded anew.
        field = b'"delta":{"content":' if self._chat else b'"text":'
        self._text_open = [self._open + b'{"index":%d,' % choice + field for choice in range(head.choices)]
        self._text_close = (b"}" if self._chat else b"") + b',"logprobs":null,"finish_reason":null}' + self._close

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """The next deltas as server-sent events."""
        return b"".join([_event(chunk) for delta in deltas for chunk in self.chunks(delta)])

    def quiet(self) -> bytes:
        """What keeps a stream's connection open while nothing happens."""
        return KEEP_ALIVE

    def end(self, usage: Usage | None) -> bytes:
        """The last events of a stream."""
        chunk = self.usage_chunk(usage)
        return DONE if chunk is None else _event(chunk) + DONE

    def fail(self, error: ApiError) -> bytes:
        """An error inside an open stream, and its end (PAINS A6): SDKs raise instead of taking a cut text for whole."""
        return _event(error_body(error)) + DONE

    def chunks(self, delta: Delta) -> list[bytes]:
        """The chunks of one delta; may be none."""
        chunks: list[bytes] = []
        index = delta.choice
        if self._chat and not self._role_sent[index] and (delta.text or delta.detail or delta.finish_reason is not None):
            self._role_sent[index] = True
            # As at OpenAI: an answer that begins with a call has no content, one that begins with text has none yet.
            begins_with_call = not delta.text and b'"tool_calls"' in delta.detail
            chunks.append(self._chat_chunk(index, {"role": "assistant", "content": None if begins_with_call else ""}, {}))
        if delta.text and not delta.detail and delta.finish_reason is None:
            chunks.append(self._text_open[index] + _encode(delta.text) + self._text_close)
            return chunks
        choice_keys, delta_keys = _sorted_detail(delta)
        if not self._chat:
            if delta.text or choice_keys or delta.finish_reason is not None:
                choice = {"index": index, "text": delta.text, "logprobs": None, **choice_keys, **_finish(delta)}
                chunks.append(self._open + _encode(choice) + self._close)
            return chunks
        content = {"content": delta.text, **delta_keys} if delta.text else delta_keys
        if content or choice_keys:
            chunks.append(self._chat_chunk(index, content, choice_keys))
        if delta.finish_reason is not None:
            chunks.append(self._chat_chunk(index, {}, {}, delta))
        return chunks

    def usage_chunk(self, usage: Usage | None) -> bytes | None:
        """The last chunk, for those who asked for it (PAINS J1): no choices, only the counts."""
        if usage is None or not self._head.include_usage:
            return None
        return self._open + b'],"usage":' + _encode(usage_fields(usage)) + b"}"

    def whole(self, deltas: Sequence[Delta], usage: Usage | None) -> bytes:
        """The JSON of an answer that is not streamed, of all its deltas in order."""
        head = self._head
        body: dict[str, Any] = {
            "id": head.public_id,
            "object": _OBJECTS[head.endpoint],
            "created": head.created_unix_s,
            "model": head.model,
        }
        if head.endpoint is Endpoint.EMBEDDINGS:
            told = [one for delta in deltas if delta.detail for one in _decode_embeddings(delta.detail).data]
            vectors = {one.index: one.embedding for one in told}
            body["data"] = [{"object": "embedding", "index": i, "embedding": vectors[i]} for i in sorted(vectors)]
            if usage is not None:
                body["usage"] = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
            return _encode(body)
        choices = [_Choice() for _ in range(head.choices)]
        for delta in deltas:
            choices[delta.choice].add(delta)
        body["choices"] = [choice.body(index, chat=self._chat) for index, choice in enumerate(choices)]
        if usage is not None:
            body["usage"] = usage_fields(usage)
        return _encode(body)

    def _chat_chunk(
        self, index: int, content: dict[str, Any], choice_keys: dict[str, Any], finish: Delta | None = None
    ) -> bytes:
        end = {"finish_reason": None} if finish is None else _finish(finish)
        choice = {"index": index, "delta": content, "logprobs": None, **_whole_logprobs(choice_keys), **end}
        return self._open + _encode(choice) + self._close


def _whole_logprobs(choice_keys: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's reference requires both lists of a chat's log probabilities, null where there is none."""
    logprobs = choice_keys.get("logprobs")
    if isinstance(logprobs, dict):
        for name in ("content", "refusal"):
            logprobs.setdefault(name, None)
    return choice_keys


def _finish(delta: Delta) -> dict[str, Any]:
    fields: dict[str, Any] = {"finish_reason": delta.finish_reason}
    if delta.stop_reason is not None:
        fields["stop_reason"] = delta.stop_reason
    return fields


def _event(chunk: bytes) -> bytes:
    return b"data: " + chunk + b"\n\n"


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)
    message: dict[str, Any] = field(default_factory=dict)
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish: dict[str, Any] = field(default_factory=lambda: {"finish_reason": None})

    def add(self, delta: Delta) -> None:
        if delta.text:
            self.texts.append(delta.text)
        choice_keys, delta_keys = _sorted_detail(delta)
        _merge_choice_keys(self.keys, choice_keys)
        _merge_message(self, delta_keys)
        if delta.finish_reason is not None:
            self.finish = _finish(delta)

    def body(self, index: int, *, chat: bool) -> dict[str, Any]:
        text = "".join(self.texts)
        said: dict[str, Any] = {"text": text}
        if chat:
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, **self.message}
            if self.tool_calls:
                message["tool_calls"] = [self.tool_calls[place] for place in sorted(self.tool_calls)]
                message["content"] = text or None
            said = {"message": message}
            _whole_logprobs(self.keys)
        return {"index": index, **said, "logprobs": None, **self.keys, **self.finish}


class _Embedding(msgspec.Struct, frozen=True):
    index: int
    embedding: msgspec.Raw
    """Not parsed: the engine wrote it as the client asked."""


class _Embeddings(msgspec.Struct, frozen=True):
    data: list[_Embedding]


_decode_embeddings = msgspec.json.Decoder(_Embeddings).decode


def _merge_choice_keys(kept: dict[str, Any], new: dict[str, Any]) -> None:
    """Logprobs are objects of lists that grow: ``content`` of a chat, ``tokens`` and its sisters of a completion."""
    for key, value in new.items():
        old = kept.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _merge_choice_keys(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            old.extend(value)
        elif value is not None or key not in kept:
            kept[key] = value


def _merge_message(choice: _Choice, new: dict[str, Any]) -> None:
    for key, value in new.items():
        if key == "tool_calls" and isinstance(value, list):
            for call in value:
                if isinstance(call, dict):
                    _merge_tool_call(choice.tool_calls, call)
        elif isinstance(value, str) and isinstance(choice.message.get(key), str) and key != "role":
            choice.message[key] += value
        elif value is not None or key not in choice.message:
            choice.message[key] = value


def _merge_tool_call(calls: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    """A streamed call comes in pieces: its id and name once, its arguments bit by bit."""
    place = part.get("index")
    place = place if isinstance(place, int) else len(calls)
    kept = calls.setdefault(place, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    for key in ("id", "type"):
        if part.get(key):
            kept[key] = part[key]
    function = part.get("function")
    if isinstance(function, dict):
        kept["function"]["name"] = function.get("name") or kept["function"]["name"]
        kept["function"]["arguments"] += function.get("arguments") or ""
