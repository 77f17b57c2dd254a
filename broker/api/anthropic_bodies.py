"""Anthropic's messages as chats: ``POST /v1/messages`` and ``POST /v1/messages/count_tokens`` (ING-1).

Served: text, ``system``, several turns, pictures as base64, tools and their results, ``tool_choice``, ``stop_sequences``,
sampling, ``thinking`` and ``output_config`` as far as the engine has them, and a last message of the assistant, which is
continued. Taken without effect: ``cache_control`` (prefixes are always cached, within a tenant), ``service_tier``, the
signatures of thinking, ``is_error`` of a result (its text says so), and a ``context_management`` that keeps all thinking.
Everything else is a 400 that names the field: documents, pictures by URL or file id, tools that Anthropic runs or defines
itself, containers, edits of the context.

Field by field as in Anthropic's reference (https://docs.claude.com/en/api/messages).
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from broker.api.answer_parts import Translation
from broker.api.anthropic_answers import MessageWriter
from broker.api.openai_bodies import MESSAGES_MAX, STOP_STRINGS_MAX, TOKENS_MAX, TOOLS_MAX, decoded, given, refused
from broker.api.tokenizing import Tokenized
from profiles.tokenizer import ModelTokenizer
from subjects.messages import Endpoint, ModelRecord

PICTURES = ("image/jpeg", "image/png", "image/gif", "image/webp")
BILLING_HEADER = "x-anthropic-billing-header"
"""A block of ``system`` that begins so is Claude Code's note to Anthropic's billing, no prompt; it holds a hash that differs
for each request, which no cached prefix would survive."""

_encode = msgspec.json.Encoder().encode
_Name = Annotated[str, Meta(min_length=1, max_length=256)]


class ImageSource(msgspec.Struct, frozen=True):
    """Where a picture is: in the request itself."""

    type: str
    media_type: str = ""
    data: str = ""


class ContentBlock(msgspec.Struct, frozen=True):
    """One block of a message; which fields count says ``type``."""

    type: Annotated[str, Meta(min_length=1, max_length=64)]
    text: str | None = None
    source: ImageSource | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None
    thinking: str | None = None


class MessageParam(msgspec.Struct, frozen=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class ToolParam(msgspec.Struct, frozen=True):
    """A tool that the client runs."""

    name: _Name
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolChoiceParam(msgspec.Struct, frozen=True):
    """Which tool to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(msgspec.Struct, frozen=True):
    """How much the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)] | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """A schema that the answer follows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``output_config``."""

    effort: str | None = None
    format: OutputFormat | None = None


class ContextEdit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is cut out of a long conversation: here, nothing."""

    type: Annotated[str, Meta(pattern="^clear_thinking_")]
    keep: Literal["all"]


class ContextManagement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``context_management``, as agents send it who keep all thinking."""

    edits: list[ContextEdit] | None = None


class CountTokensBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/messages/count_tokens``."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=MESSAGES_MAX)]
    system: str | list[ContentBlock] | None = None
    tools: Annotated[list[ToolParam], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Not Anthropic's: goes to the engine, as the other fields of ``_PASSED`` do."""


class MessagesBody(CountTokensBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/messages``."""

    max_tokens: Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
    stop_sequences: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=4096)]], Meta(max_length=STOP_STRINGS_MAX)] | None
    ) = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    priority: int | None = None


_PASSED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "priority",
)
"""Fields of the same name and meaning in a chat; the chat's own check bounds them."""
_messages_decoder = msgspec.json.Decoder(MessagesBody)
_count_decoder = msgspec.json.Decoder(CountTokensBody)


def translate(raw: bytes) -> Translation:
    """The chat of a body of ``POST /v1/messages``.

    Raises:
        ApiError: 400, with the field.
    """
    body: MessagesBody = decoded(_messages_decoder, raw)[0]
    chat = _prompt(body)
    chat["max_tokens"] = body.max_tokens
    chat |= given(body, *_PASSED)
    if body.stop_sequences:
        chat["stop"] = body.stop_sequences
    if body.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    user = (body.metadata or {}).get("user_id")
    if isinstance(user, str):
        chat["user"] = user
    return Translation(_encode(chat), partial(MessageWriter, stop_sequences=body.stop_sequences or ()))


async def count_tokens(tokenized: Tokenized, raw: bytes) -> bytes:
    """The answer to a body of ``POST /v1/messages/count_tokens``: counted by the gateway, no model wakes for it.

    Raises:
        ApiError: it is refused.
    """
    body: CountTokensBody = decoded(_count_decoder, raw)[0]
    chat = _prompt(body)
    for index, message in enumerate(body.messages):
        for place, block in enumerate(message.content if isinstance(message.content, list) else ()):
            nested = block.content if isinstance(block.content, list) else []
            if any(each.type == "image" for each in (block, *nested)):
                raise refused(f"messages[{index}].content[{place}]", "only text is counted here, no pictures")

    def work(tokenizer: ModelTokenizer, record: ModelRecord) -> bytes:
        return _encode({"input_tokens": len(tokenizer.prompts(Endpoint.CHAT, chat)[0])})

    return await tokenized(body.model, len(raw), work)


# -------------------------------------------------------------------------------------------------------- the prompt


def _prompt(body: CountTokensBody) -> dict[str, Any]:
    """What both routes share: model, messages, tools, thinking, format."""
    chat: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    if body.messages[-1].role == "assistant":
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    if body.tools:
        chat["tools"] = [_tool(tool, index) for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        _choose_tool(body.tool_choice, chat)
    config = body.output_config or OutputConfig()
    if config.effort is not None:
        chat["reasoning_effort"] = config.effort
    if body.thinking is not None:  # after the effort: a model that shall not think makes none
        _think(body.thinking, chat)
    if config.format is not None:
        schema = {"name": "answer", "schema": config.format.schema}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if body.chat_template_kwargs is not None:
        chat["chat_template_kwargs"] = body.chat_template_kwargs
    return chat


def _think(thinking: ThinkingParam, chat: dict[str, Any]) -> None:
    # "adaptive" is what a model does by itself. A budget is vLLM's to keep: it says so where it cannot.
    if thinking.type == "disabled":
        chat["reasoning_effort"] = "none"
    elif thinking.type == "enabled":
        if thinking.budget_tokens is None:
            raise refused("thinking.budget_tokens", "it must be given where thinking is enabled")
        chat["thinking_token_budget"] = thinking.budget_tokens


def _tool(tool: ToolParam, index: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise refused(f"tools[{index}].type", "only tools that the client defines and runs ('custom') are served")
    if tool.input_schema is None:
        raise refused(f"tools[{index}].input_schema", "it must be given")
    if tool.defer_loading:
        raise refused(f"tools[{index}].defer_loading", "all tools are given to the model at once")
    function = {"name": tool.name, "parameters": tool.input_schema, **given(tool, "description", "strict")}
    return {"type": "function", "function": function}


def _choose_tool(choice: ToolChoiceParam, chat: dict[str, Any]) -> None:
    if not chat.get("tools"):
        if choice.type in ("any", "tool"):
            raise refused("tool_choice", "it needs 'tools'")
        return
    if choice.disable_parallel_tool_use:
        chat["parallel_tool_calls"] = False
    if choice.type != "tool":
        chat["tool_choice"] = {"auto": "auto", "any": "required", "none": "none"}[choice.type]
        return
    if choice.name not in {tool["function"]["name"] for tool in chat["tools"]}:
        raise refused("tool_choice.name", "it must be the name of one of 'tools'")
    chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}


# --------------------------------------------------------------------------------------------------------- messages


def _messages(body: CountTokensBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    system = _system_text(body.system, "system") if body.system is not None else ""
    if system:
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(body.messages):
        where = f"messages[{index}].content"
        blocks = [ContentBlock("text", message.content)] if isinstance(message.content, str) else message.content
        match message.role:
            case "user":
                _add_user(messages, blocks, where)
            case "assistant":
                _add_assistant(messages, blocks, where)
            case "system":
                messages.append({"role": "system", "content": _system_text(message.content, where)})
    if messages[-1].get("tool_calls"):
        raise refused("messages", "the last message calls a tool; the result of the call must follow")
    for message_ in messages:
        parts = message_.get("content")
        if isinstance(parts, list) and len(parts) == 1 and parts[0]["type"] == "text":
            message_["content"] = parts[0]["text"]
    return messages


def _system_text(system: str | Sequence[ContentBlock], where: str) -> str:
    if isinstance(system, str):
        return system
    texts = [_text(block, f"{where}[{index}]") for index, block in enumerate(system)]
    return "\n".join(text for text in texts if not text.startswith(BILLING_HEADER))


def _add_user(messages: list[dict[str, Any]], blocks: Sequence[ContentBlock], where: str) -> None:
    """Results of tools first, as the chat's order wants it; turns in a row of the same role are one turn."""
    parts: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        here = f"{where}[{place}]"
        if block.type == "tool_result":
            texts, pictures = _tool_result(block, here)
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": "\n".join(texts)})
            parts += pictures
        else:
            parts.append(_part(block, here))
    if not parts and any(block.type == "tool_result" for block in blocks):
        return
    if messages and messages[-1]["role"] == "user":
        messages[-1]["content"] += parts
    else:
        messages.append({"role": "user", "content": parts})


def _tool_result(block: ContentBlock, where: str) -> tuple[list[str], list[dict[str, Any]]]:
    if not block.tool_use_id:
        raise refused(f"{where}.tool_use_id", "it must be given")
    if isinstance(block.content, str):
        return [block.content], []
    parts = [_part(each, f"{where}.content[{index}]") for index, each in enumerate(block.content or ())]
    return [part["text"] for part in parts if part["type"] == "text"], [part for part in parts if part["type"] != "text"]


def _part(block: ContentBlock, where: str) -> dict[str, Any]:
    if block.type == "image":
        return {"type": "image_url", "image_url": {"url": _data_url(block.source, f"{where}.source")}}
    return {"type": "text", "text": _text(block, where)}


def _data_url(source: ImageSource | None, where: str) -> str:
    if source is None or source.type != "base64":
        raise refused(f"{where}.type", "pictures come as 'base64' only: this service fetches none")
    if source.media_type not in PICTURES:
        raise refused(f"{where}.media_type", f"it must be one of {', '.join(PICTURES)}")
    try:
        binascii.a2b_base64(source.data, strict_mode=True)
    except ValueError:
        raise refused(f"{where}.data", "it is not base64") from None
    return f"data:{source.media_type};base64,{source.data}"


def _add_assistant(messages: list[dict[str, Any]], blocks: Sequence[ContentBlock], where: str) -> None:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        here = f"{where}[{place}]"
        match block.type:
            case "tool_use":
                if not block.id or not block.name:
                    raise refused(f"{here}.{'name' if block.id else 'id'}", "it must be given")
                function = {"name": block.name, "arguments": _encode(block.input or {}).decode()}
                calls.append({"id": block.id, "type": "function", "function": function})
            case "thinking":
                thoughts.append(block.thinking or "")
            case _:
                texts.append(_text(block, here))
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    message = messages[-1]
    if texts:
        message["content"] = (message["content"] or "") + "".join(texts)
    if thoughts:
        message["reasoning_content"] = message.get("reasoning_content", "") + "".join(thoughts)
    if calls:
        message["tool_calls"] = message.get("tool_calls", []) + calls


def _text(block: ContentBlock, where: str) -> str:
    if block.type != "text":
        raise refused(f"{where}.type", f"blocks of type '{block.type[:32]}' are not served here")
    if block.text is None:
        raise refused(f"{where}.text", "it must be given")
    return block.text
