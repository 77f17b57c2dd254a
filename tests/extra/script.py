"""The scripted model: reads the conversation, tools and schema that it is sent, and answers by rules. Pure.

It stands where a bigger model than this machine can run would stand. Whatever the suites check of tools and structured
output can hold only if the whole request has come through, since the answer is made of it: names of functions from
``tools``, arguments by their schemas out of the user's text, results of tools out of the messages. A conversation that is
not well formed (a tool's result without its call) is refused as at OpenAI.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SLOWLY = "slowly"
"""A request that says this gets its pieces at a pace, so that a client has time to leave."""
SLOW_PIECES = 400
PIECE_CHARS = 3
"""Arguments are cut without regard for words, so that they arrive in pieces as a real model's do."""
_DEPTH_MAX = 8


class Refused(Exception):
    """The request is not well formed: a 400."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Script:
    """One choice's answer: the text in pieces, or calls."""

    pieces: tuple[str, ...]
    calls: tuple[Call, ...]
    finish_reason: str
    slow: bool

    @property
    def tokens(self) -> int:
        """Pieces count as tokens, those of the arguments too."""
        return len(self.pieces) + sum(len(list(cut(call.arguments))) for call in self.calls)


def cut(text: str) -> Iterator[str]:
    """The text in pieces of at most ``PIECE_CHARS`` characters."""
    return (text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS))


def prompt_tokens(body: Mapping[str, Any]) -> int:
    """Words of all messages."""
    return sum(len(text_of(message).split()) + 1 for message in body["messages"])


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, its parts joined; of an image is told what its URL begins with and how long it is."""
    content = message.get("content")
    if isinstance(content, list):
        return " ".join(_of_part(part) for part in content if isinstance(part, dict))
    return str(content or "")


def _of_part(part: Mapping[str, Any]) -> str:
    if part.get("type") == "image_url":
        url = str(part["image_url"]["url"])
        return f"[{url.partition(',')[0]} {len(url)}]"
    return str(part.get("text") or "")


def answer(body: Mapping[str, Any]) -> Script:
    """What the scripted model says to ``body``.

    Raises:
        Refused: the conversation is not well formed.
    """
    messages = body["messages"]
    _check(messages)
    asked = next((text_of(message) for message in reversed(messages) if message.get("role") == "user"), "")
    last = messages[-1]
    calls = _calls(body, asked, last)
    if calls:
        forced = body.get("tool_choice") not in (None, "auto", "required")
        # As at OpenAI: a named function's answer ends with "stop".
        return Script((), calls, "stop" if forced else "tool_calls", slow=False)
    slow = SLOWLY in asked.split()
    pieces = tuple(f" {number}" for number in range(SLOW_PIECES)) if slow else _words(_text(body, asked, last))
    pieces, finish_reason = _bounded(pieces, body)
    return Script(pieces, (), finish_reason, slow)


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    open_calls: set[str] = set()
    for place, message in enumerate(messages):
        if message.get("role") == "tool":
            if message.get("tool_call_id") not in open_calls:
                raise Refused(f"messages[{place}]: a tool's result must follow the message with its call")
            open_calls.discard(str(message["tool_call_id"]))
            continue
        if open_calls:
            raise Refused(f"messages[{place}]: results are missing of the calls {', '.join(sorted(open_calls))}")
        for call in message.get("tool_calls") or ():
            json.loads(call["function"]["arguments"])
            open_calls.add(str(call["id"]))


# --------------------------------------------------------------------------------------------------------------- texts


def _text(body: Mapping[str, Any], asked: str, last: Mapping[str, Any]) -> str:
    wanted = body.get("response_format") or {}
    if wanted.get("type") == "json_schema":
        return json.dumps(instance(wanted["json_schema"].get("schema") or {}, asked), ensure_ascii=False)
    if wanted.get("type") == "json_object":
        return json.dumps(
            {name: f"{name} of {asked[:24]}" for name in _quoted(asked)} or {"answer": asked}, ensure_ascii=False
        )
    if last.get("role") == "tool":
        return f"The tool says: {text_of(last)}"
    return f"You said: {asked}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\s*\S+|\s+$", text)) or (" ",)


def _bounded(pieces: tuple[str, ...], body: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """The pieces up to a stop string or the bound on tokens, and the finish reason."""
    stop = body.get("stop") or []
    text = "".join(pieces)
    ends = [text.find(one) for one in ([stop] if isinstance(stop, str) else stop) if one in text]
    reason = "stop"
    if ends:
        pieces = _words(text[: min(ends)]) if min(ends) else ()
    bounds = [value for name in ("max_tokens", "max_completion_tokens") if isinstance(value := body.get(name), int)]
    if bounds and len(pieces) > min(bounds):
        pieces, reason = pieces[: min(bounds)], "length"
    return pieces, reason


# --------------------------------------------------------------------------------------------------------------- tools


def _calls(body: Mapping[str, Any], asked: str, last: Mapping[str, Any]) -> tuple[Call, ...]:
    functions = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or () if tool.get("function")}
    choice = body.get("tool_choice") or "auto"
    if not functions or choice == "none":
        return ()
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        if name not in functions:
            raise Refused(f"tool_choice: no tool is named {name!r}")
        chosen = name
    else:
        ranked = sorted(functions, key=lambda name: (-_fit(name, asked), list(functions).index(name)))
        chosen = ranked[0]
        if choice == "auto" and (last.get("role") != "user" or not _fit(chosen, asked)):
            return ()
    schema = functions[chosen].get("parameters") or {}
    several = body.get("parallel_tool_calls") is not False
    parts = asked.split(" and in ") if several else [asked]
    head = parts[0].rpartition(" in ")[0]
    texts = [parts[0], *(f"{head} in {part}" for part in parts[1:])]
    return tuple(Call(chosen, json.dumps(instance(schema, text), ensure_ascii=False)) for text in texts)


def _fit(name: str, asked: str) -> int:
    """How many words of a function's name the text holds; its whole name counts most."""
    words = {word.lower() for word in re.findall(r"[^\W_]+", asked)}
    return 100 * (name in asked) + len(words & {part for part in name.lower().split("_") if len(part) > 2})


# ------------------------------------------------------------------------------------------------------------- schemas


def instance(schema: Mapping[str, Any], text: str) -> Any:
    """A value that ``schema`` allows, its numbers and strings taken from ``text`` in order as far as they go."""
    numbers = iter(re.findall(r"-?\d+(?:\.\d+)?", text))
    quoted = iter(_quoted(text))
    return _value(schema, schema, text, numbers, quoted, 0)


def _value(
    schema: Mapping[str, Any],
    root: Mapping[str, Any],
    text: str,
    numbers: Iterator[str],
    quoted: Iterator[str],
    depth: int,
) -> Any:
    if depth > _DEPTH_MAX:
        raise Refused("the schema is nested too deeply")

    def inner(part: Mapping[str, Any]) -> Any:
        return _value(part, root, text, numbers, quoted, depth + 1)

    if "$ref" in schema:
        target: Any = root
        for step in str(schema["$ref"]).removeprefix("#/").split("/"):
            target = target[step]
        return inner(target)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return next((value for value in schema["enum"] if str(value).lower() in text.lower()), schema["enum"][0])
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return inner(schema[several][0])
    kind = schema.get("type", "object" if "properties" in schema else "string")
    match kind[0] if isinstance(kind, list) else kind:
        case "object":
            return {name: inner(part) for name, part in (schema.get("properties") or {}).items()}
        case "array":
            return [
                inner(schema.get("items") or {"type": "string"}) for _ in range(max(1, int(schema.get("minItems") or 1)))
            ]
        case "integer":
            return int(float(next(numbers, "1")))
        case "number":
            return float(next(numbers, "1"))
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return next(quoted, None) or _place(text)


def _quoted(text: str) -> list[str]:
    return [found.group(2) for found in re.finditer(r"(?<!\w)(['\"])(.+?)\1(?!\w)", text)]


def _place(text: str) -> str:
    """What follows the last "in", else the last words."""
    return (text.rpartition(" in ")[2] or text).strip(" ?!.") or "something"
