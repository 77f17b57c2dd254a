"""``GET /openapi.json``: what this gateway answers, described from the very structs that check the bodies (ING-1).

Bodies may hold fields that are not listed: they go to the engine as they are. Fields that are taken out of a body
(``WITHHELD_FIELDS``) are not described.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

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


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of Anthropic's messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class MessageTokens(msgspec.Struct, frozen=True, kw_only=True):
    """How long a prompt of Anthropic's messages is."""

    input_tokens: int


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """One of OpenAI's responses."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete"]
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    incomplete_details: dict[str, Any] | UnsetType | None = UNSET


class TokenUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens as the engine counted them."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | UnsetType = UNSET
    prompt_tokens_details: dict[str, int] | UnsetType = UNSET


class ChoiceMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat's choice says; ``reasoning`` of a model whose engine tells reasoning from answers."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """``message`` of a chat, ``text`` of a completion; ``stop_reason``: the stop string or token that ended it, if any."""

    index: int
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    message: ChoiceMessage | UnsetType = UNSET
    text: str | UnsetType = UNSET
    stop_reason: str | int | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer of a chat or a completion."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: TokenUsage | UnsetType = UNSET


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One vector: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """One vector for each input."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    id: str | UnsetType = UNSET
    created: int | UnsetType = UNSET
    usage: TokenUsage | UnsetType = UNSET


class _Described(msgspec.Struct, frozen=True):
    """One route: its method is POST where it takes a body, else GET."""

    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    """None: any JSON."""
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
    "/v1/chat/completions": _Described("Chat", ChatBody, Completion, streams=True, errors=_POOL_ERRORS),
    "/v1/completions": _Described("Completion", CompletionBody, Completion, streams=True, errors=_POOL_ERRORS),
    "/v1/embeddings": _Described("One vector for each input", EmbeddingBody, Embeddings, errors=_POOL_ERRORS),
    "/v1/messages": _Described(
        "Anthropic's messages", MessagesBody, MessageAnswer, streams=True, errors=_POOL_ERRORS, error=MessagesErrorBody
    ),
    "/v1/messages/count_tokens": _Described(
        "How long a prompt is", CountTokensBody, MessageTokens, errors=_HERE_ERRORS, error=MessagesErrorBody
    ),
    "/v1/responses": _Described(
        "OpenAI's responses, of which none is stored", ResponsesBody, Response, streams=True, errors=_POOL_ERRORS
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
        structs |= {kind for kind in (route.body, route.answer, route.error) if kind is not None}
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
            "schemas": schemas,
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
    failed = {"description": f"{whose}'s error shape", "content": {"application/json": _reference(route.error.__name__)}}
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
        return _reference(route.answer.__name__)
    return {"schema": {"type": "string"}} if route.media == "text/plain" else {"schema": {}}


def _reference(name: str) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(name=name)}}


def _version() -> str:
    try:
        return version("carpool")
    except PackageNotFoundError:
        return "0"
