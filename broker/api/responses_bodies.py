"""OpenAI's responses as chats: ``POST /v1/responses``, without state (ING-1).

Served: ``input`` as text or items (messages, calls of functions and their outputs, reasoning), ``instructions``, pictures as
``data:`` URLs, functions as tools, ``tool_choice``, ``text.format``, ``reasoning.effort``, sampling, log probabilities.
Nothing is stored: ``store`` is taken and answered with false. Everything else is a 400 that names the field: what needs
stored state (``previous_response_id``, ``conversation``, ``prompt``, ``background``), tools that OpenAI runs, files,
``truncation: auto``.

Field by field as in OpenAI's reference (https://platform.openai.com/docs/api-reference/responses).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from broker.api.answer_parts import Translation
from broker.api.openai_bodies import MESSAGES_MAX, STOP_STRINGS_MAX, TOKENS_MAX, TOOLS_MAX, decoded, given, refused
from broker.api.responses_answers import ResponseWriter

LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""What ``include`` may name. Reasoning is given as it is, so there is nothing to encrypt."""
STORED_FIELDS = ("previous_response_id", "conversation", "prompt", "background")
"""Fields that need state on the server."""

_encode = msgspec.json.Encoder().encode
_Short = Annotated[str, Meta(max_length=512)]


class InputContent(msgspec.Struct, frozen=True):
    """One part of a message or of a function's output."""

    type: Annotated[str, Meta(min_length=1, max_length=64)]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None


class InputItem(msgspec.Struct, frozen=True):
    """One item of ``input``; which fields count says ``type``."""

    type: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputContent] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputContent] | None = None
    summary: list[InputContent] | None = None
    encrypted_content: str | None = None


class FunctionTool(msgspec.Struct, frozen=True):
    """A function that the client runs."""

    type: Annotated[str, Meta(min_length=1, max_length=64)]
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextFormat(msgspec.Struct, frozen=True):
    """``text.format``."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``text``."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``reasoning``. Reasoning is given in full where the engine tells it apart, never summarised."""

    effort: str | None = None
    summary: Literal["auto"] | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``stream_options``: nothing is padded here."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/responses``."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MESSAGES_MAX)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, _Short], Meta(max_length=16)] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    max_tool_calls: int | None = None
    """Counts tools that OpenAI runs; there are none here."""
    user: str | None = None
    safety_identifier: _Short | None = None
    prompt_cache_key: _Short | None = None
    """Prefixes are always cached, within a tenant."""
    prompt_cache_retention: str | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    stop: (
        Annotated[str, Meta(max_length=4096)]
        | Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=STOP_STRINGS_MAX)]
        | None
    ) = None
    """Not OpenAI's: goes to the engine, as the other fields of ``_PASSED`` do."""
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    priority: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_PASSED = (
    "temperature",
    "top_p",
    "user",
    "stop",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "priority",
    "chat_template_kwargs",
)
"""Fields of the same name and meaning in a chat; the chat's own check bounds them."""
_decoder = msgspec.json.Decoder(ResponsesBody)


def translate(raw: bytes) -> Translation:
    """The chat of a body of ``POST /v1/responses``.

    Raises:
        ApiError: 400, with the field.
    """
    body: ResponsesBody = decoded(_decoder, raw)[0]
    for name in STORED_FIELDS:
        if getattr(body, name):
            raise refused(name, "this service keeps no responses; send the whole conversation in 'input'")
    for index, name in enumerate(body.include or ()):
        if name not in INCLUDED:
            raise refused(f"include[{index}]", f"it must be one of {', '.join(INCLUDED)}")
    chat: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    chat |= given(body, *_PASSED)
    if body.max_output_tokens is not None:
        chat["max_tokens"] = body.max_output_tokens
    if body.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None and body.text.format.type != "text":
        chat["response_format"] = _response_format(body.text.format)
    _add_tools(body, chat)
    echo = _echo(body)
    return Translation(_encode(chat), lambda head, _input_tokens: ResponseWriter(head, echo))


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.schema is None:
        raise refused("text.format.schema", "it must be given")
    schema = {"name": wanted.name or "answer", "schema": wanted.schema, **given(wanted, "strict", "description")}
    return {"type": "json_schema", "json_schema": schema}


def _add_tools(body: ResponsesBody, chat: dict[str, Any]) -> None:
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            raise refused(f"tools[{index}].type", "only tools that the client runs ('function') are served")
        if tool.name is None:
            raise refused(f"tools[{index}].name", "it must be given")
        function = {"name": tool.name, **given(tool, "description", "parameters", "strict")}
        tools.append({"type": "function", "function": function})
    choice = _tool_choice(body.tool_choice)
    if not tools:
        if choice not in (None, "auto", "none"):
            raise refused("tool_choice", "it needs 'tools'")
        return
    chat["tools"] = tools
    if choice is not None:
        chat["tool_choice"] = choice
    if body.parallel_tool_calls is not None:
        chat["parallel_tool_calls"] = body.parallel_tool_calls


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise refused("tool_choice.type", "it must be 'function'")
        if not isinstance(choice.get("name"), str):
            raise refused("tool_choice.name", "it must be the name of a function")
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice not in (None, "auto", "none", "required"):
        raise refused("tool_choice", "it must be 'auto', 'none', 'required' or a function")
    return choice


def _echo(body: ResponsesBody) -> dict[str, Any]:
    reasoning, wanted = body.reasoning or ReasoningConfig(), (body.text and body.text.format) or TextFormat("text")
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": {"format": {"type": wanted.type, **given(wanted, "name", "schema", "strict", "description")}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [
            {"type": "function"} | {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
            for tool in body.tools or ()
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


# --------------------------------------------------------------------------------------------------------- messages


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """Leading instructions become one system message: many chat templates take no more than one, and only first."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
        return messages
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        match item.type or "message":
            case "message":
                _add_message(messages, item, where)
            case "function_call":
                _add_call(messages, item, where)
            case "function_call_output":
                _add_output(messages, item, where)
            case "reasoning":
                _add_reasoning(messages, item, where)
            case other:
                raise refused(f"{where}.type", f"items of type '{other[:32]}' are not served here")
    return messages


def _add_message(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    where = f"{where}.content"
    content = [InputContent("input_text", item.content)] if isinstance(item.content, str) else item.content
    if content is None:
        raise refused(where, "it must be given")
    match item.role:
        case "user":
            parts = [_part(each, f"{where}[{place}]") for place, each in enumerate(content)]
            plain = len(parts) == 1 and parts[0]["type"] == "text"
            messages.append({"role": "user", "content": parts[0]["text"] if plain else parts})
        case "assistant":
            text = "".join(_texts(content, where))
            last = messages[-1] if messages else {}
            if last.get("role") == "assistant" and last["content"] is None:
                last["content"] = text
            else:
                messages.append({"role": "assistant", "content": text})
        case "system" | "developer":
            text = "\n".join(_texts(content, where))
            if len(messages) == 1 and messages[0]["role"] == "system":
                messages[0]["content"] += "\n\n" + text
            else:
                messages.append({"role": "system", "content": text})
        case None:
            raise refused(where.replace(".content", ".role"), "it must be given")


def _add_call(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    for name in ("call_id", "name"):
        if not getattr(item, name):
            raise refused(f"{where}.{name}", "it must be given")
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    function = {"name": item.name, "arguments": item.arguments or "{}"}
    messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


def _add_output(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    if not item.call_id:
        raise refused(f"{where}.call_id", "it must be given")
    if item.output is None:
        raise refused(f"{where}.output", "it must be given")
    text = item.output if isinstance(item.output, str) else "\n".join(_texts(item.output, f"{where}.output"))
    messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})


def _add_reasoning(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    if item.encrypted_content:
        raise refused(f"{where}.encrypted_content", "only OpenAI can read it")
    content = item.content if isinstance(item.content, list) else []
    text = "".join(part.text or "" for part in content or item.summary or ())
    if text:
        messages.append({"role": "assistant", "content": None, "reasoning_content": text})


def _part(content: InputContent, where: str) -> dict[str, Any]:
    if content.type != "input_image":
        return {"type": "text", "text": _text(content, where)}
    if content.image_url is None or content.image_url[:5].lower() != "data:":
        raise refused(f"{where}.image_url", "pictures come as 'data:' URLs only: this service fetches none")
    link = {"url": content.image_url}
    if content.detail in ("low", "high", "auto"):
        link["detail"] = content.detail
    return {"type": "image_url", "image_url": link}


def _texts(contents: Sequence[InputContent], where: str) -> list[str]:
    return [_text(content, f"{where}[{place}]") for place, content in enumerate(contents)]


def _text(content: InputContent, where: str) -> str:
    if content.type not in ("input_text", "output_text", "text", "refusal"):
        raise refused(f"{where}.type", f"content of type '{content.type[:32]}' is not served here")
    if (text := content.refusal if content.type == "refusal" else content.text) is None:
        raise refused(f"{where}.text", "it must be given")
    return text
