"""``GET /openapi.json``: what this gateway answers, described from the very structs that check the bodies (ING-1).

Bodies may hold fields that are not listed: they go to the engine as they are. Fields that are taken out of a body
(``WITHHELD_FIELDS``) are not described.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from broker.api.anthropic_bodies import CountTokensBody, MessagesBody
from broker.api.openai_bodies import WITHHELD_FIELDS, ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from broker.api.responses_bodies import ResponsesBody
from broker.api.tokenizing import DetokenizeAnswer, TokenizeAnswer
from subjects.messages import Task

_REF = "#/components/schemas/{name}"


class ErrorFields(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is no success."""

    error: ErrorFields


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model; ``state`` is one word for people. ``parent`` is the model that a LoRA adapter belongs to."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    state: str
    max_model_len: int | None
    tags: list[str]
    task: Task | None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models, unloaded ones too."""

    object: str
    data: list[ModelEntry]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """One word; ``bus`` only on ``/health``."""

    status: str
    bus: str | None = None


class MessagesErrorFields(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, in Anthropic's words."""

    type: str
    message: str


class MessagesErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer of Anthropic's routes that is no success."""

    type: str
    error: MessagesErrorFields


_MESSAGE = {
    "type": "object",
    "required": ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": {"type": "string"},
        "content": {"type": "array", "items": {"type": "object"}},
        "stop_reason": {"type": ["string", "null"]},
        "stop_sequence": {"type": ["string", "null"]},
        "usage": {"type": "object"},
    },
}
_MESSAGE_TOKENS = {
    "type": "object",
    "required": ["input_tokens"],
    "properties": {"input_tokens": {"type": "integer"}},
}
_RESPONSE = {
    "type": "object",
    "required": ["id", "object", "created_at", "model", "status", "output", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "response"},
        "created_at": {"type": "integer"},
        "model": {"type": "string"},
        "status": {"enum": ["completed", "incomplete"]},
        "incomplete_details": {"type": ["object", "null"]},
        "output": {"type": "array", "items": {"type": "object"}},
        "usage": {"type": ["object", "null"]},
    },
}
_COMPLETION = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices"],
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": {"$ref": _REF.format(name="Choice")}},
        "usage": {"$ref": _REF.format(name="Usage")},
    },
}
_CHOICE = {
    "type": "object",
    "required": ["index", "logprobs", "finish_reason"],
    "properties": {
        "index": {"type": "integer"},
        "message": {"$ref": _REF.format(name="ChoiceMessage"), "description": "Of a chat."},
        "text": {"type": "string", "description": "Of a completion."},
        "logprobs": {"type": ["object", "null"]},
        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
        "stop_reason": {"type": ["string", "integer"], "description": "The stop string or token that ended it, if one did."},
    },
}
_CHOICE_MESSAGE = {
    "type": "object",
    "required": ["role", "content", "refusal"],
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": ["string", "null"]},
        "refusal": {"type": ["string", "null"]},
        "reasoning": {"type": "string", "description": "Of a model whose engine tells reasoning from answers."},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
    },
}
_EMBEDDING = {
    "type": "object",
    "required": ["object", "index", "embedding"],
    "properties": {
        "object": {"const": "embedding"},
        "index": {"type": "integer"},
        "embedding": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string"}]},
    },
}
_EMBEDDINGS = {
    "type": "object",
    "required": ["object", "data", "model"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "list"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "data": {"type": "array", "items": {"$ref": _REF.format(name="Embedding")}},
        "usage": {"$ref": _REF.format(name="Usage")},
    },
}
_USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "total_tokens"],
    "properties": {
        "prompt_tokens": {"type": "integer"},
        "completion_tokens": {"type": "integer"},
        "total_tokens": {"type": "integer"},
        "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": {"type": "integer"}}},
    },
}


@dataclass(frozen=True, slots=True)
class _Described:
    """One route: its method is POST where it takes a body, else GET."""

    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | str | None = None
    """A struct, the name of a schema that is written out here, or None for any JSON."""
    media: str = "application/json"
    streams: bool = False
    open: bool = False
    errors: tuple[int, ...] = ()
    error: type[msgspec.Struct] = ErrorBody


_POOL_ERRORS = (400, 404, 408, 413, 415, 429, 500, 502, 503, 504)
_HERE_ERRORS = (400, 404, 408, 413, 415, 500, 503)
_TOKENIZE = _Described(
    "The token ids of a prompt or a chat, by the model's own tokenizer", TokenizeBody, TokenizeAnswer, errors=_HERE_ERRORS
)
_DETOKENIZE = _Described("The text of token ids", DetokenizeBody, DetokenizeAnswer, errors=_HERE_ERRORS)
ROUTES: dict[str, _Described] = {
    "/v1/chat/completions": _Described("Chat", ChatBody, "Completion", streams=True, errors=_POOL_ERRORS),
    "/v1/completions": _Described("Completion", CompletionBody, "Completion", streams=True, errors=_POOL_ERRORS),
    "/v1/embeddings": _Described("One vector for each input", EmbeddingBody, "Embeddings", errors=_POOL_ERRORS),
    "/v1/messages": _Described(
        "Anthropic's messages", MessagesBody, "Message", streams=True, errors=_POOL_ERRORS, error=MessagesErrorBody
    ),
    "/v1/messages/count_tokens": _Described(
        "How long a prompt is", CountTokensBody, "MessageTokens", errors=_HERE_ERRORS, error=MessagesErrorBody
    ),
    "/v1/responses": _Described(
        "OpenAI's responses, of which none is stored", ResponsesBody, "Response", streams=True, errors=_POOL_ERRORS
    ),
    "/tokenize": _TOKENIZE,
    "/detokenize": _DETOKENIZE,
    "/v1/tokenize": _TOKENIZE,
    "/v1/detokenize": _DETOKENIZE,
    "/v1/models": _Described("All models of the pool, unloaded ones too", answer=ModelList),
    "/v1/models/{name}": _Described("One model", answer=ModelEntry, errors=(404,)),
    "/health": _Described("Whether the process is alive", answer=Status, open=True),
    "/ready": _Described("Whether requests are taken; 503 with the same body when not", answer=Status, open=True),
    "/metrics": _Described("Prometheus metrics", media="text/plain"),
    "/pool": _Described("The scheduler's last digest of the pool, or null"),
    "/openapi.json": _Described("This document"),
}


@cache
def document() -> bytes:
    """The document as JSON."""
    return msgspec.json.encode(_document())


def _document() -> dict[str, Any]:
    structs: set[type[msgspec.Struct]] = set()
    for route in ROUTES.values():
        structs |= {kind for kind in (route.body, route.answer, route.error) if isinstance(kind, type)}
    kinds = sorted(structs, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    for schema in schemas.values():
        for name in WITHHELD_FIELDS:
            schema.get("properties", {}).pop(name, None)
        if "description" in schema:
            schema["description"] = schema["description"].replace("``", "`")
    return {
        "openapi": "3.1.0",
        "info": {"title": "Carpool", "version": _version(), "description": "OpenAI's API over a pool of shared devices."},
        "paths": {path: {"post" if route.body else "get": _operation(path, route)} for path, route in ROUTES.items()},
        "components": {
            "schemas": {
                **schemas,
                "Choice": _CHOICE,
                "ChoiceMessage": _CHOICE_MESSAGE,
                "Completion": _COMPLETION,
                "Embedding": _EMBEDDING,
                "Embeddings": _EMBEDDINGS,
                "Message": _MESSAGE,
                "MessageTokens": _MESSAGE_TOKENS,
                "Response": _RESPONSE,
                "Usage": _USAGE,
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(path: str, route: _Described) -> dict[str, Any]:
    content: dict[str, Any] = {route.media: _schema_of(route)}
    if route.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    whose = "Anthropic" if route.error is MessagesErrorBody else "OpenAI"
    failed = {
        "description": f"{whose}'s error shape",
        "content": {"application/json": _reference(route.error.__name__)},
    }
    responses: dict[str, Any] = {"200": {"description": "Success", "content": content}}
    if path == "/ready":
        responses["503"] = {"description": "Not now", "content": content}
    for status in (*(() if route.open else (401,)), *route.errors):
        responses[str(status)] = failed
    operation: dict[str, Any] = {"summary": route.summary, "responses": responses}
    # A gateway without a file of keys asks for none.
    operation["security"] = [] if route.open else [{"key": []}, {}]
    if whose == "Anthropic":
        operation["security"].insert(1, {"x-api-key": []})
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": _reference(route.body.__name__)}}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _schema_of(route: _Described) -> dict[str, Any]:
    if route.answer is not None:
        return _reference(route.answer if isinstance(route.answer, str) else route.answer.__name__)
    return {"schema": {"type": "string"}} if route.media == "text/plain" else {"schema": {}}


def _reference(name: str) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(name=name)}}


def _version() -> str:
    try:
        return version("carpool")
    except PackageNotFoundError:
        return "0"
