"""A tokenizer and chat template bound to a model hash (ING-6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from subjects.ids import ModelHash
from subjects.messages import Endpoint, ModelRecord

DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For models that bring no chat template; the engine uses the same one."""


class PromptTokenizer(Protocol):
    """What the gateway needs of a model's tokenizer. All methods may be called from any thread."""

    exact: bool
    """False where the model brings no tokenizer and counts are estimates from UTF-8 bytes."""

    def prompts(self, endpoint: Endpoint, body: Mapping[str, Any]) -> list[list[int]]:
        """Token ids of each prompt of a parsed request body: one for chat, one or more for completions.

        Raises:
            ApiError: 400, the body cannot be rendered.
        """

    def count(self, text: str) -> int:
        """Tokens of plain text, without special tokens."""


class Tokenizers:
    """Loaded tokenizers by model hash; the least recently used one beyond ``entries_max`` is dropped. Thread-safe."""

    def __init__(self, entries_max: int = 32) -> None: ...

    def get(self, record: ModelRecord) -> PromptTokenizer:
        """Loads at first use (up to a second: call it in a thread), then at once.

        Raises:
            ConfigError: the tokenizer's files are missing or broken.
        """
        raise NotImplementedError

    def forget(self, model_hash: ModelHash) -> None:
        """Drops one."""
