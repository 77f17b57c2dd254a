"""Request bodies: what is checked before a request costs anything (ING-1, ING-9).

The structs here only *validate* and give the profile its numbers. What the engine gets is the client's own bytes: fields
that this file does not know pass through. Only fields by which a client could reach into the pool are taken out
(``WITHHELD_FIELDS``). Of a key that is given twice the last one counts, as in every parser behind us.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from profiles.features import BodyFields
from subjects.errors import ApiError
from subjects.messages import Endpoint

CHOICES_MAX = 16
PROMPT_CHOICES_MAX = 128
"""Choices of one request for completions: ``n`` for each of its prompts."""
STOP_STRINGS_MAX = 16
LOGIT_BIAS_ENTRIES_MAX = 1024
MESSAGES_MAX = 4096
TOOLS_MAX = 128
TOKENS_MAX = 1 << 24
INPUTS_MAX = 2048
"""Inputs of one request for embeddings, as at OpenAI."""
DIMENSIONS_MAX = 1 << 16
DETOKENIZED_MAX = 1 << 20
"""Token ids that are turned back into text at once."""
REASON_CHARS_MAX = 200
TOOL_CHOICES = ("none", "auto", "required")
WITHHELD_FIELDS = ("cache_salt", "request_id", "kv_transfer_params", "ec_transfer_params")
"""``cache_salt`` decides whose cached prefixes a request may reuse, so the gateway sets it by tenant (PAINS O3);
``request_id`` must be ours (J10); ``kv_transfer_params`` and ``ec_transfer_params`` would let a client name hosts to fetch
KV and encodings of media from."""

_STRUCTURED_FIELDS = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "logits_processors",
)
_FIXED_FIELDS = (
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "best_of",
    "echo",
)
"""Each of these depends on what was generated before, or is not the same after a cut (ops/decisions/0004)."""
_RARE_FIELDS = frozenset((*_STRUCTURED_FIELDS, *_FIXED_FIELDS))
"""Most bodies have none of them."""

_Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)] | None
_TokenCount = Annotated[int, Meta(ge=1, le=TOKENS_MAX)] | None
_Stop = Annotated[str, Meta(max_length=4096)]
_ModelName = Annotated[str, Meta(min_length=1, max_length=512)]
_TokenId = Annotated[int, Meta(ge=0, le=1 << 32)]


class StreamOptions(msgspec.Struct, frozen=True):
    """``stream_options``."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """``response_format``: the engine checks the schema itself."""

    type: Annotated[str, Meta(min_length=1, max_length=64)]


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message. Media may come as ``data:`` URLs only: the pool fetches nothing for a client (PAINS O5)."""

    type: Annotated[str, Meta(min_length=1, max_length=64)]
    text: str | None = None
    image_url: Any = None
    audio_url: Any = None
    video_url: Any = None


class Message(msgspec.Struct, frozen=True):
    """One message of a chat."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ToolFunction(msgspec.Struct, frozen=True):
    """The function of a tool."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]


class Tool(msgspec.Struct, frozen=True):
    """One tool a model may call."""

    type: Annotated[str, Meta(min_length=1, max_length=64)]
    function: ToolFunction | None = None


class BaseBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of all routes whose requests go to the pool."""

    model: _ModelName
    adapter: Annotated[str, Meta(max_length=512)] | None = None
    """A LoRA adapter of the model, by name; most name it as the model instead (ING-3)."""
    user: str | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    cache_salt: Raw | UnsetType = UNSET
    request_id: Raw | UnsetType = UNSET
    kv_transfer_params: Raw | UnsetType = UNSET
    ec_transfer_params: Raw | UnsetType = UNSET


class CommonBody(BaseBody, frozen=True, kw_only=True):
    """Fields that both routes for text share."""

    max_tokens: _TokenCount = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=STOP_STRINGS_MAX)] | None = None
    presence_penalty: _Penalty = None
    frequency_penalty: _Penalty = None
    repetition_penalty: Annotated[float, Meta(ge=0.0, le=1e6)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=LOGIT_BIAS_ENTRIES_MAX)] | None
    ) = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    response_format: ResponseFormat | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] | None = None


class ChatBody(CommonBody, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: _TokenCount = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: str | dict[str, Any] | None = None


class CompletionBody(CommonBody, frozen=True, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | _TokenId | list[_TokenId]]
    max_tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None


class EmbeddingBody(BaseBody, frozen=True, kw_only=True):
    """``POST /v1/embeddings``."""

    input: str | Annotated[list[str | _TokenId | list[_TokenId]], Meta(min_length=1)]
    dimensions: Annotated[int, Meta(ge=1, le=DIMENSIONS_MAX)] | None = None
    encoding_format: Literal["float", "base64"] | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /tokenize``: a ``prompt``, or the ``messages`` of a chat."""

    model: _ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_MAX)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=TOOLS_MAX)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /detokenize``."""

    model: _ModelName | None = None
    tokens: Annotated[list[Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]], Meta(max_length=DETOKENIZED_MAX)]


class ParsedBody(msgspec.Struct, frozen=True):
    """A checked request. ``raw`` is what the engine gets."""

    raw: bytes
    fields: ChatBody | CompletionBody | EmbeddingBody
    mapping: dict[str, Any]
    """The whole body decoded, for the tokenizer and its chat template."""
    asked: BodyFields
    """What the request's profile takes from it."""


def formatted(fields: BaseBody) -> bool:
    """Whether the output must follow a format."""
    return isinstance(fields, CommonBody) and fields.response_format is not None and fields.response_format.type != "text"


def _asked(fields: ChatBody | CompletionBody | EmbeddingBody, mapping: dict[str, Any]) -> BodyFields:
    if isinstance(fields, EmbeddingBody):
        return BodyFields(model=fields.model, max_tokens=0, priority=fields.priority or 0)
    n, max_tokens, tools, messages = fields.n or 1, fields.max_tokens, False, []
    if isinstance(fields, ChatBody):
        choices, messages = n, fields.messages
        max_tokens = max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
        tools = bool(fields.tools) and fields.tool_choice != "none"
    else:
        choices = n * _prompts(fields.prompt)
    rare = not _RARE_FIELDS.isdisjoint(mapping)
    structured = formatted(fields) or (rare and any(mapping.get(name) for name in _STRUCTURED_FIELDS))
    fixed = rare and (
        any(mapping.get(name) not in (None, [], {}, "", False, 0) for name in _FIXED_FIELDS) or fields.seed is not None
    )
    logprobs = fields.logprobs not in (None, False) or mapping.get("prompt_logprobs") is not None
    penalised = bool(fields.presence_penalty or fields.frequency_penalty) or fields.repetition_penalty not in (None, 1)
    return BodyFields(
        model=fields.model,
        max_tokens=max_tokens,
        stream=bool(fields.stream),
        include_usage=bool(fields.stream and fields.stream_options is not None and fields.stream_options.include_usage),
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        n=n,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        adapter=fields.adapter or "",
        structured=structured,
        tools=tools,
        priority=fields.priority or 0,
        history_turns=sum(message.role == "assistant" for message in messages),
        continuable=not (structured or tools or choices > 1 or fixed or logprobs or penalised),
    )


_DECODERS: dict[Endpoint, msgspec.json.Decoder[Any]] = {
    Endpoint.CHAT: msgspec.json.Decoder(ChatBody),
    Endpoint.COMPLETIONS: msgspec.json.Decoder(CompletionBody),
    Endpoint.EMBEDDINGS: msgspec.json.Decoder(EmbeddingBody),
}
_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_decode_mapping = msgspec.json.Decoder(dict[str, Any]).decode
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")
_UNKNOWN = re.compile(r"unknown field `(?P<field>[^`]{1,64})`")


def parse_body(endpoint: Endpoint, raw: bytes) -> ParsedBody:
    """The checked form of a client's JSON.

    Raises:
        ApiError: status 400 with ``param`` where one field is at fault.
    """
    fields: ChatBody | CompletionBody | EmbeddingBody
    fields, mapping = decoded(_DECODERS[endpoint], raw)
    if isinstance(fields, EmbeddingBody):
        _check_inputs(fields.input)
    else:
        _check_combinations(fields)
        if isinstance(fields, ChatBody):
            _check_messages(fields.messages)
        else:
            _check_prompt(fields)
    if any(getattr(fields, name) is not UNSET for name in WITHHELD_FIELDS):
        raw, mapping = _withhold(raw), {name: value for name, value in mapping.items() if name not in WITHHELD_FIELDS}
    return ParsedBody(raw, fields, mapping, _asked(fields, mapping))


def parse_tokenize(raw: bytes) -> tuple[TokenizeBody, dict[str, Any]]:
    """The checked form of a body for ``/tokenize``, and the whole of it decoded for the chat template.

    Raises:
        ApiError: status 400.
    """
    fields: TokenizeBody
    fields, mapping = decoded(_tokenize_decoder, raw)
    if (fields.prompt is None) == (fields.messages is None):
        raise _refuse("prompt", "Give either 'prompt' or 'messages'.")
    if fields.continue_final_message and fields.add_generation_prompt:
        both = "Only one of 'continue_final_message' and 'add_generation_prompt' can be true."
        raise _refuse("continue_final_message", both)
    if mapping.get("chat_template") is not None:
        raise _refuse("chat_template", "The model's own chat template is used: 'chat_template' is not accepted.")
    for index, message in enumerate(fields.messages or ()):
        if isinstance(message.content, list) and any(part.text is None for part in message.content):
            param = f"messages[{index}].content"
            raise _refuse(param, "Only text is tokenised here: what media add to a prompt only the engine knows.")
    # A template reads null as a value; a client that sends it means the default.
    return fields, {name: value for name, value in mapping.items() if value is not None}


def decoded(decoder: msgspec.json.Decoder[Any], raw: bytes) -> tuple[Any, dict[str, Any]]:
    """A body as the decoder's struct, and the whole of it as plain values.

    Raises:
        ApiError: status 400 with ``param`` where one field is at fault.
    """
    try:
        if not raw.isascii():
            raw.decode("utf-8")  # msgspec skips over strings of unknown fields without looking at their encoding
        fields = decoder.decode(raw)
        mapping = _decode_mapping(raw)  # also finds numbers out of range in fields that the struct does not know
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except RecursionError:
        raise ApiError(400, "The JSON of the request body is nested too deeply.", code="invalid_json") from None
    except UnicodeDecodeError:
        raise ApiError(400, "The request body is not valid UTF-8.", code="invalid_json") from None
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        reason = str(error) if isinstance(error, msgspec.DecodeError) else "it cannot be read"
        raise ApiError(400, f"We could not parse the JSON body of your request: {reason}.", code="invalid_json") from None
    return fields, mapping


def given(fields: msgspec.Struct, *names: str) -> dict[str, Any]:
    """Those of the named fields that are set."""
    return {name: value for name in names if (value := getattr(fields, name)) is not None}


def refused(field: str, reason: str) -> ApiError:
    """The 400 for a field with a value that is not served, and why."""
    return ApiError(400, f"Invalid value for '{field}': {reason}.", param=field, code="invalid_value")


def _invalid_field(text: str) -> ApiError:
    path = _PATH.search(text)
    missing = _MISSING.search(text)
    where = path["path"].removesuffix("[...]") if path else ""
    if missing:
        where = f"{where}.{missing['field']}" if where else missing["field"]
        return ApiError(400, f"Missing required parameter: '{where}'.", param=where, code="missing_required_parameter")
    unknown = _UNKNOWN.search(text)
    if unknown:  # only of APIs whose bodies are translated: fields of a chat go to the engine, known or not
        where = f"{where}.{unknown['field']}" if where else unknown["field"]
        return ApiError(400, f"Unknown parameter: '{where}'.", param=where, code="unknown_parameter")
    reason = (text[: path.start()] if path else text)[:REASON_CHARS_MAX]  # it may quote what the client wrote
    if not where:
        return ApiError(400, f"Invalid request body: {reason}.", code="invalid_type")
    return refused(where, reason)


def _refuse(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


def _check_combinations(fields: ChatBody | CompletionBody) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise _refuse("stream_options", "The 'stream_options' parameter is only allowed when 'stream' is enabled.")
    if fields.stop == "" or (isinstance(fields.stop, list) and "" in fields.stop):
        raise refused("stop", "an empty string would stop everywhere")
    for token in fields.logit_bias or ():
        if not token.isascii() or not token.isdigit():
            raise refused("logit_bias", "keys must be token ids")
    if isinstance(fields, ChatBody) and fields.top_logprobs is not None and not fields.logprobs:
        raise _refuse("top_logprobs", "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.")
    if isinstance(fields, ChatBody) and isinstance(fields.tool_choice, str) and fields.tool_choice not in TOOL_CHOICES:
        raise refused("tool_choice", "use 'none', 'auto', 'required', or name a tool")
    if isinstance(fields, ChatBody) and fields.tool_choice not in (None, "none", "auto") and not fields.tools:
        raise _refuse("tool_choice", "The 'tool_choice' parameter is only allowed when 'tools' are given.")


def _check_messages(messages: list[Message]) -> None:
    for index, message in enumerate(messages):
        if message.content is None and message.role not in ("assistant", "tool", "function"):
            raise _refuse(f"messages[{index}].content", f"Missing 'content' in a message of role '{message.role[:32]}'.")
        if not isinstance(message.content, list):
            continue
        for place, part in enumerate(message.content):
            for kind in ("image_url", "audio_url", "video_url"):
                link = getattr(part, kind)
                if link is not None and not _is_data_url(link):
                    param = f"messages[{index}].content[{place}].{kind}"
                    raise _refuse(
                        param, f"Only 'data:' URLs are accepted in '{kind}': this service fetches no remote media."
                    )


def _is_data_url(link: Any) -> bool:
    url = link.get("url") if isinstance(link, dict) else link
    return isinstance(url, str) and url[:5].lower() == "data:"


def _check_prompt(fields: CompletionBody) -> None:
    prompt = fields.prompt
    if isinstance(prompt, list):
        if len({type(one) for one in prompt}) > 1:
            raise refused("prompt", "strings, token ids and lists of them cannot be mixed")
        if not prompt or any(one == [] for one in prompt):
            raise refused("prompt", "it is empty")
    choices = _prompts(prompt) * (fields.n or 1)
    if choices > PROMPT_CHOICES_MAX:
        message = (
            f"Prompts times 'n' may be at most {PROMPT_CHOICES_MAX} in one request, not {choices}: send several requests."
        )
        raise _refuse("prompt", message)


def _prompts(prompt: str | list[str | int | list[int]]) -> int:
    """How many prompts it holds: a list of token ids is one."""
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1


def _check_inputs(inputs: str | list[str | int | list[int]]) -> None:
    if isinstance(inputs, list):
        kinds = {type(one) for one in inputs}
        if len(kinds) > 1:
            raise refused("input", "strings, token ids and lists of them cannot be mixed")
        if kinds != {int} and len(inputs) > INPUTS_MAX:
            raise refused("input", f"at most {INPUTS_MAX} inputs are taken in one request")
    if inputs == "" or (isinstance(inputs, list) and any(one in ("", []) for one in inputs)):
        raise refused("input", "it is empty")


def _withhold(raw: bytes) -> bytes:
    kept = msgspec.json.decode(raw, type=dict[str, Raw])
    return msgspec.json.encode({name: value for name, value in kept.items() if name not in WITHHELD_FIELDS})
