"""The routes that take a body, by path: OpenAI's own, and APIs that are answered by translation (ING-1).

A request of Anthropic's messages or OpenAI's responses becomes a chat here, at the gateway, and the chat's answer becomes
that API's answer. So it runs on every engine, and queue, tenants, admission, metrics, cancellation and adapters know nothing
of it. What a chat cannot carry is refused with a 400 that names the field.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec

from broker.api import anthropic_answers, anthropic_bodies, openai_answers, responses_answers, responses_bodies, tokenizing
from broker.api.answer_parts import Translation
from subjects.errors import ApiError
from subjects.messages import Endpoint


def _as_it_is(body: bytes) -> Translation:
    return Translation(body, lambda head, _input_tokens: openai_answers.OpenAiWriter(head))


class PostRoute(msgspec.Struct, frozen=True):
    """One route. With ``answer_here`` no model runs for it; else the pool is asked for ``endpoint``."""

    endpoint: Endpoint = Endpoint.CHAT
    answer_here: Callable[[tokenizing.Tokenized, bytes], Awaitable[bytes]] | None = None
    translate: Callable[[bytes], Translation] = _as_it_is
    error_body: Callable[[ApiError], bytes] = openai_answers.error_body
    key_header: str = ""
    """Where a key may stand instead of in ``Authorization``."""
    id_header: bytes = b""
    """Where that API's clients look for the request's id."""

    def key(self, headers: Mapping[str, str]) -> str:
        """The key as ``Authorization`` would hold it."""
        given = headers.get("authorization", "")
        own = headers.get(self.key_header, "") if self.key_header and not given else ""
        return f"Bearer {own}" if own else given


POST_ROUTES: dict[str, PostRoute] = {
    "/v1/chat/completions": PostRoute(),
    "/v1/completions": PostRoute(Endpoint.COMPLETIONS),
    "/v1/embeddings": PostRoute(Endpoint.EMBEDDINGS),
    "/v1/messages": PostRoute(
        translate=anthropic_bodies.translate,
        error_body=anthropic_answers.error_body,
        key_header="x-api-key",
        id_header=b"request-id",
    ),
    "/v1/messages/count_tokens": PostRoute(
        answer_here=anthropic_bodies.count_tokens, error_body=anthropic_answers.error_body, key_header="x-api-key"
    ),
    "/v1/responses": PostRoute(translate=responses_bodies.translate, error_body=responses_answers.error_body),
    "/tokenize": PostRoute(answer_here=tokenizing.tokenize),
    "/detokenize": PostRoute(answer_here=tokenizing.detokenize),
    "/v1/tokenize": PostRoute(answer_here=tokenizing.tokenize),
    "/v1/detokenize": PostRoute(answer_here=tokenizing.detokenize),
}
NO_POST = PostRoute()
"""Stands for every other path."""
