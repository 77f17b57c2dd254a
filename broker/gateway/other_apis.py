"""APIs beside OpenAI's chats that are answered by translation: Anthropic's messages and OpenAI's responses (ING-1).

A request becomes a chat here, at the gateway, and the chat's answer becomes that API's answer. So it runs on every engine,
and queue, tenants, admission, metrics, cancellation and adapters know nothing of it. What a chat cannot carry is refused
with a 400 that names the field.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from broker.api import anthropic_answers, anthropic_bodies, responses_answers, responses_bodies
from broker.api.openai_answers import KEEP_ALIVE, AnswerHead
from broker.api.tokenizing import Tokenized
from broker.gateway.exchange import Ended, Exchange, Failed
from subjects.errors import ApiError
from subjects.messages import Delta, Endpoint, Usage


class AnswerWriter(Protocol):
    """Writes one answer of another API: either a stream, or all of it at once."""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """The stream's events for the next deltas; the first call also opens the stream."""

    def quiet(self) -> bytes:
        """What keeps a stream's connection open while nothing happens."""

    def end(self, usage: Usage | None) -> bytes:
        """The last events of a stream."""

    def fail(self, error: ApiError) -> bytes:
        """The last events of a stream that broke."""

    def whole(self, deltas: Sequence[Delta], usage: Usage | None) -> bytes:
        """The whole answer as JSON.

        Raises:
            ApiError: the answer cannot be told in this API.
        """


class Translation(Protocol):
    """A request of another API as a chat."""

    @property
    def chat(self) -> bytes:
        """The body of a chat request."""

    def writer(self, head: AnswerHead, input_tokens: int) -> AnswerWriter:
        """What writes its answer; ``input_tokens`` is the gateway's own count of the prompt."""


@dataclass(frozen=True, slots=True)
class OtherApi:
    """One route, by POST. Exactly one of ``translate`` and ``answer_here`` is set."""

    error_body: Callable[[ApiError], bytes]
    translate: Callable[[bytes], Translation] | None = None
    answer_here: Callable[[Tokenized, bytes], Awaitable[bytes]] | None = None
    key_header: str = ""
    """Where a key may stand instead of in ``Authorization``."""
    id_header: bytes = b""
    """Where that API's clients look for the request's id."""

    @property
    def endpoint(self) -> Endpoint | None:
        """What the pool is asked for."""
        return Endpoint.CHAT if self.translate is not None else None

    def key(self, headers: Mapping[str, str]) -> str:
        """The key as ``Authorization`` would hold it."""
        given = headers.get("authorization", "")
        own = headers.get(self.key_header, "") if self.key_header and not given else ""
        return f"Bearer {own}" if own else given


OTHER_APIS: dict[str, OtherApi] = {
    "/v1/messages": OtherApi(
        anthropic_answers.error_body, translate=anthropic_bodies.translate, key_header="x-api-key", id_header=b"request-id"
    ),
    "/v1/messages/count_tokens": OtherApi(
        anthropic_answers.error_body, answer_here=anthropic_bodies.count_tokens, key_header="x-api-key"
    ),
    "/v1/responses": OtherApi(responses_answers.error_body, translate=responses_bodies.translate),
}


async def translated(
    exchange: Exchange, translation: Translation, open_after_s: float, keep_alive_s: float
) -> AsyncIterator[tuple[bytes, bool]]:
    """The answer's bytes, and whether more follow: pieces of a stream, the first one latest after ``open_after_s``; or once
    the whole body.

    It just ends when the client leaves.

    Raises:
        ApiError: before the first bytes; the answer is this error.
    """
    deltas: list[Delta] = []
    writer: AnswerWriter | None = None
    opened = False
    while True:
        piece = await exchange.next((keep_alive_s if opened else open_after_s) if exchange.stream else None)
        if piece is None and exchange.left:
            return
        if isinstance(piece, Failed) and not opened:
            raise piece.error
        # Not before there is news: until then the model may still be another one.
        if writer is None and piece is not None:
            writer = translation.writer(exchange.head, exchange.input_tokens)
        if not exchange.stream:
            assert writer is not None and piece is not None and not isinstance(piece, Failed)
            if isinstance(piece, Ended):
                yield writer.whole(deltas, piece.usage), False
                return
            deltas.extend(piece)
            continue
        opened = True
        if piece is None or writer is None:
            yield (KEEP_ALIVE if writer is None else writer.quiet()), True
        elif isinstance(piece, Failed):
            yield writer.fail(piece.error), False
            return
        elif isinstance(piece, Ended):
            yield writer.end(piece.usage), False
            return
        elif data := writer.events(piece):
            yield data, True
