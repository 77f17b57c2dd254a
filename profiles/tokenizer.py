"""A tokenizer and chat template bound to a model hash (ING-6).

The gateway counts a prompt's tokens and hashes its blocks with these; the engine renders the request itself, from the same
files. Where a model brings no tokenizer (a foreign server, a simulated engine) the count is an estimate from UTF-8 bytes and
says so with ``exact = False``: another model's tokenizer is never used.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from subjects.errors import ApiError, ConfigError
from subjects.ids import ModelHash
from subjects.messages import Endpoint, ModelRecord

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer

DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""For models that bring no chat template; the engine uses the same one."""
ESTIMATE_BYTES_PER_TOKEN = 4
"""How prompts are counted where the model brings no tokenizer."""
ESTIMATE_MESSAGE_TOKENS = 4
"""What a chat template adds around one message, in such an estimate."""
PROMPTS_MAX = 2048
"""Prompts in one completions body, inputs in one for embeddings."""
_TEMPLATE_BYTES_MAX = 1 << 20
_MARK = "CARPOOL-CONTINUES-HERE "
_FIELDS = {Endpoint.COMPLETIONS: "prompt", Endpoint.EMBEDDINGS: "input"}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")


class PromptTokenizer(Protocol):
    """What the gateway needs of a model's tokenizer. All methods may be called from any thread."""

    exact: bool
    """False where the model brings no tokenizer and counts are estimates from UTF-8 bytes."""

    def prompts(self, endpoint: Endpoint, body: Mapping[str, Any]) -> list[list[int]]:
        """Token ids of each prompt of a parsed request body: one for chat, one or more for completions and embeddings.

        A prompt of 100,000 tokens takes a few hundred milliseconds: use a thread for long ones; other threads run meanwhile.

        Raises:
            ApiError: 400, the body cannot be rendered.
        """

    def count(self, text: str) -> int:
        """Tokens of plain text, without special tokens."""


SHORT_TEXT_CHARS_MAX = 2048


class ModelTokenizer:
    """The tokenizer and chat template of one model, from the files in its directory."""

    exact = True

    def __init__(self, directory: Path, chat_template: str = "") -> None:
        """Loads both; ``chat_template`` is one that the service declares in place of the model's own.

        Raises:
            ConfigError: files are missing or broken.
        """
        from tokenizers import Tokenizer

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{directory}: no tokenizer.json; save the model's fast tokenizer there")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path}: is not a tokenizer ({_line(error)}); fetch the model's files again") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer: Tokenizer = tokenizer
        config = _optional_json(directory / "tokenizer_config.json")
        self._special = _special_tokens(config, _optional_json(directory / "special_tokens_map.json"))
        sources = {"default": chat_template} if chat_template else _template_sources(directory, config)
        self._templates = {name: _Template(source, str(directory)) for name, source in sources.items()}

    def prompts(self, endpoint: Endpoint, body: Mapping[str, Any]) -> list[list[int]]:
        """See :class:`PromptTokenizer`."""
        if endpoint is Endpoint.CHAT:
            # The template writes the special tokens itself, unless the client asks for the tokenizer's too.
            return self._encode([self.render_chat(body)], bool(body.get("add_special_tokens", False)))
        special = bool(body.get("add_special_tokens", True))
        return _given_prompts(body, _FIELDS[endpoint], lambda texts: self._encode(texts, special))

    def render_chat(self, body: Mapping[str, Any]) -> str:
        """The prompt text of a chat body.

        Raises:
            ApiError: 400, the messages are malformed or the template refuses them.
        """
        tools = body.get("tools") or None
        if body.get("tool_choice") == "none":
            tools = None
        template = self._templates.get("tool_use" if tools else "default") or self._templates["default"]
        extra = body.get("chat_template_kwargs") or {}
        if not isinstance(extra, Mapping):
            raise _bad("chat_template_kwargs must be an object", "chat_template_kwargs")
        messages = [_message(message, index, template.takes_parts) for index, message in enumerate(_messages(body))]
        continued = body.get("continue_final_message") is True
        if continued:
            messages[-1] = _marked(messages[-1])
        variables = {
            **self._special,
            **{name: value for name, value in extra.items() if isinstance(name, str)},
            "messages": messages,
            "tools": tools,
            "documents": body.get("documents") or None,
            "add_generation_prompt": body.get("add_generation_prompt", True) is True and not continued,
        }
        text = template.render(variables)
        return _cut_at_mark(text) if continued else text

    def count(self, text: str) -> int:
        """See :class:`PromptTokenizer`."""
        return len(self._encode([text], False)[0])

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it, which is not always text of its own.

        Raises:
            ApiError: 400, an id is not in the vocabulary.
        """
        strings: list[str] = []
        for token in token_ids:
            string = self._tokenizer.id_to_token(token)
            if string is None:
                raise _bad(f"token id {token} is not in the model's vocabulary", "tokens")
            strings.append(string)
        return strings

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included. Thread as for :meth:`PromptTokenizer.prompts`.

        Raises:
            ApiError: 400, an id is not in the vocabulary.
        """
        self.token_strings(token_ids)  # the library would leave unknown ids out without a word
        (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=False)
        return text

    def _encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        # The batch call lets other threads run meanwhile, and the fast one leaves out offsets, which nobody here reads; but
        # it hands its work to threads, which costs more than a short text itself.
        try:
            if len(texts) == 1 and len(texts[0]) <= SHORT_TEXT_CHARS_MAX:
                return [self._tokenizer.encode(texts[0], add_special_tokens=special).ids]
            return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)]
        except (UnicodeEncodeError, TypeError):  # half of a surrogate pair, which JSON can carry and UTF-8 cannot
            raise _bad("the prompt holds an unpaired surrogate, which is no text", None) from None


class EstimatedTokenizer:
    """Counts where the model brings no tokenizer: one pseudo token for every 4 bytes of UTF-8.

    Equal prompts give equal ids and equal beginnings give equal first ids, so that features still mean something.
    """

    exact = False

    def prompts(self, endpoint: Endpoint, body: Mapping[str, Any]) -> list[list[int]]:
        """See :class:`PromptTokenizer`."""
        if endpoint is not Endpoint.CHAT:
            return _given_prompts(body, _FIELDS[endpoint], lambda texts: [_pseudo_ids(text) for text in texts])
        ids: list[int] = []
        for index, message in enumerate(_messages(body)):
            ids += [0] * ESTIMATE_MESSAGE_TOKENS
            content = _message(message, index, False).get("content")
            ids += _pseudo_ids(content if isinstance(content, str) else "")
        if body.get("tools"):
            ids += _pseudo_ids(json.dumps(body["tools"], ensure_ascii=False))
        return [ids]

    def count(self, text: str) -> int:
        """See :class:`PromptTokenizer`."""
        return len(_pseudo_ids(text))


class Tokenizers:
    """Loaded tokenizers by model hash; the least recently used one beyond ``entries_max`` is dropped. Thread-safe.

    Models with equal tokenizer files (precision variants, fine-tunes) share one loaded tokenizer.
    """

    def __init__(self, entries_max: int = 32) -> None:
        if entries_max < 1:
            raise ValueError("entries_max must be at least 1")
        self._entries_max = entries_max
        self._entries: OrderedDict[ModelHash, tuple[str, PromptTokenizer]] = OrderedDict()
        self._lock = threading.Lock()
        self._loading = threading.Lock()

    def peek(self, record: ModelRecord) -> PromptTokenizer | None:
        """The tokenizer of that model if it is loaded; never blocks on loading."""
        with self._lock:
            entry = self._entries.get(record.model_hash)
            if entry is None:
                return None
            self._entries.move_to_end(record.model_hash)
            return entry[1]

    def get(self, record: ModelRecord) -> PromptTokenizer:
        """Loads at first use (up to a second: call it in a thread), then at once.

        Raises:
            ConfigError: the tokenizer's files are missing or broken.
        """
        if (loaded := self.peek(record)) is not None:
            return loaded
        with self._loading:  # one load at a time: many requests for a cold model arrive together
            if (loaded := self.peek(record)) is not None:
                return loaded
            with self._lock:
                alike = (one for known, one in self._entries.values() if known and known == record.tokenizer_hash)
                tokenizer = next(alike, None)
            if tokenizer is None and record.tokenizer_source:
                template = str(record.engine_options.get("chat_template", ""))
                tokenizer = ModelTokenizer(Path(record.tokenizer_source), template)
            tokenizer = tokenizer or EstimatedTokenizer()
            with self._lock:
                self._entries[record.model_hash] = (record.tokenizer_hash, tokenizer)
                while len(self._entries) > self._entries_max:
                    self._entries.popitem(last=False)
            return tokenizer

    def forget(self, model_hash: ModelHash) -> None:
        """Drops one."""
        with self._lock:
            self._entries.pop(model_hash, None)


# ------------------------------------------------------------------------------------------------------------ templates


class _Template:
    """One chat template, rendered as the transformers library does: sandboxed, trimmed blocks, its four helpers."""

    def __init__(self, source: str, place: str) -> None:
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation_extension(), loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
            self.takes_parts = _loops_over_content(environment.parse(source))
            """Whether the template itself walks through lists of content parts; else texts are joined for it."""
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(
                f"{place}: the chat template is broken ({_line(error)}); fetch the model's files again"
            ) from None

    def render(self, variables: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError as Refused

        try:
            return self._template.render(**variables)
        except (Refused, TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            # Templates refuse by raising, for example when roles do not alternate; their text is the model's, and short.
            raise _bad(f"the model's chat template refused the messages: {_line(error)}", "messages") from None


def _generation_extension() -> type[jinja2.ext.Extension]:
    """``{% generation %}`` marks what an assistant said, for training; here it only lets its content through."""
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which a prompt must not have.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(str(message))


def _loops_over_content(tree: jinja2.nodes.Template) -> bool:
    from jinja2 import nodes

    def is_content(node: nodes.Node | None) -> bool:
        if isinstance(node, nodes.Filter | nodes.Test):
            return is_content(node.node)
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Getitem):
            if isinstance(node.arg, nodes.Slice):
                return is_content(node.node)
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Name) and node.name == "content"

    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _template_sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; there is always a ``default`` one. A file beats the configuration, as in transformers."""
    sources: dict[str, str] = {}
    declared = config.get("chat_template")
    if isinstance(declared, str):
        sources["default"] = declared
    elif isinstance(declared, list):
        for entry in declared:
            if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str):
                sources[entry["name"]] = entry["template"]
    in_json = _optional_json(directory / "chat_template.json").get("chat_template")
    if isinstance(in_json, str):
        sources["default"] = in_json
    files = [("default", directory / "chat_template.jinja")]
    files += [(path.stem, path) for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))]
    for name, path in files:
        if path.is_file():
            try:
                sources[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                raise ConfigError(f"{path}: is not text in UTF-8; fetch the model's files again") from None
    for name, source in sources.items():
        if len(source) > _TEMPLATE_BYTES_MAX:
            raise ConfigError(f"{directory}: the chat template {name!r} is over 1 MiB; fetch the model's files again")
    if "default" not in sources:
        sources["default"] = next(iter(sources.values()), DEFAULT_CHAT_TEMPLATE)
    return sources


def _special_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like, which templates use as variables."""
    found: dict[str, str] = {}
    for config in configs:
        for name, value in config.items():
            if name.endswith("_token"):
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str):
                    found.setdefault(name, text)
    return found


def _optional_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        raise ConfigError(f"{path}: is not JSON; fetch the model's files again") from None
    return value if isinstance(value, dict) else {}


# --------------------------------------------------------------------------------------------------------------- bodies


def _messages(body: Mapping[str, Any]) -> Sequence[Any]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _bad("messages must be a list with at least one message", "messages")
    return messages


def _message(message: Any, index: int, takes_parts: bool) -> dict[str, Any]:
    """One message as templates expect it: texts joined where they cannot walk parts, arguments of tool calls parsed."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _bad(f"messages[{index}] must be an object with a role", "messages")
    result = {key: value for key, value in message.items() if isinstance(key, str)}
    content = result.get("content")
    if isinstance(content, list):
        parts = [_part(part, index) for part in content]
        result["content"] = parts if takes_parts else "\n".join(part["text"] for part in parts if part["type"] == "text")
    elif content is not None and not isinstance(content, str):
        raise _bad(f"messages[{index}].content must be a string or a list of parts", "messages")
    elif content is None:
        result["content"] = [] if takes_parts else ""
    if result["role"] == "assistant" and isinstance(calls := result.get("tool_calls"), list):
        if calls:
            result["tool_calls"] = [_tool_call(call) for call in calls]
        else:
            del result["tool_calls"]
    return result


def _part(part: Any, index: int) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise _bad(f"messages[{index}].content must hold objects with a type", "messages")
    kind = part.get("type", "text")
    if kind in _TEXT_PARTS:
        text = part.get("text", part.get(kind))
        if not isinstance(text, str):
            raise _bad(f"messages[{index}].content has a text part without text", "messages")
        return {**part, "type": "text", "text": text}
    # Pictures and sound are the engine's business: what they add to the prompt only its processor knows.
    return {"type": {"image_url": "image", "input_audio": "audio", "video_url": "video"}.get(str(kind), str(kind))}


def _tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str | None):
        return call
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError):
        arguments = {}  # an earlier malformed call must not make the whole conversation unusable
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _given_prompts(
    body: Mapping[str, Any], field: str, encode: Callable[[Sequence[str]], list[list[int]]]
) -> list[list[int]]:
    prompt = body.get(field)
    if isinstance(prompt, str):
        return encode([prompt])
    if not isinstance(prompt, list) or not prompt:
        raise _bad(f"{field} must be a string, a list of strings, or a list of token ids", field)
    if all(isinstance(item, str) for item in prompt) and len(prompt) <= PROMPTS_MAX:
        return encode(prompt)
    if _are_ids(prompt):
        return [prompt]
    if all(isinstance(item, list) and item and _are_ids(item) for item in prompt) and len(prompt) <= PROMPTS_MAX:
        return prompt
    raise _bad(f"{field} must be a string, up to {PROMPTS_MAX} strings, token ids, or lists of token ids", field)


def _are_ids(items: Sequence[Any]) -> bool:
    return all(type(item) is int and 0 <= item < 2**31 for item in items)


def _pseudo_ids(text: str) -> list[int]:
    data = text.encode("utf-8", "surrogatepass")
    step = ESTIMATE_BYTES_PER_TOKEN
    return [int.from_bytes(data[start : start + step], "little") for start in range(0, len(data), step)]


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """For ``continue_final_message``: a message whose text ends with a mark, at which the rendered text is cut.

    A mark, as in the transformers library, since templates trim what they like and the text may stand there twice.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": str(content or "") + _MARK}
    for place in reversed(range(len(content))):
        if content[place].get("type") == "text":
            marked = {**content[place], "text": content[place]["text"] + _MARK}
            return {**message, "content": [*content[:place], marked, *content[place + 1 :]]}
    raise _bad("continue_final_message: the last message has no text", "messages")


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_MARK.rstrip())
    if at < 0:
        raise _bad("continue_final_message: the chat template does not show the last message's text", "messages")
    # Where the mark's own space is gone, the template trims messages, and would have trimmed this one before its mark.
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()


def _bad(message: str, param: str | None) -> ApiError:
    return ApiError(400, message, param=param)


def _line(error: Exception) -> str:
    """An error of the library as one short line."""
    text = " ".join(str(error).split())
    return text[:200] or type(error).__name__
