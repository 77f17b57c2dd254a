"""``/tokenize`` and ``/detokenize``: vLLM's routes, answered by the gateway with the model's own tokenizer (ING-1, ING-6).

Names and shapes are those of ``vllm serve``. No ticket is written, so a cold model stays cold.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from broker.api.openai_bodies import DetokenizeBody, decoded, parse_tokenize
from profiles.tokenizer import ModelTokenizer
from subjects.messages import Endpoint, ModelRecord

_encode = msgspec.json.Encoder().encode
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)

Tokenized = Callable[[str | None, int, Callable[[ModelTokenizer, ModelRecord], bytes]], Awaitable[bytes]]
"""What the gateway lends: ``tokenized(model, body bytes, work)`` runs ``work`` with the model's own tokenizer."""


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What ``/tokenize`` answers; ``token_strs`` only where they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What ``/detokenize`` answers."""

    prompt: str


async def tokenize(tokenized: Tokenized, raw: bytes) -> bytes:
    """The answer to a body of ``POST /tokenize``.

    Raises:
        ApiError: it is refused.
    """
    body, mapping = parse_tokenize(raw)
    endpoint = Endpoint.COMPLETIONS if body.prompt is not None else Endpoint.CHAT

    def work(tokenizer: ModelTokenizer, record: ModelRecord) -> bytes:
        (tokens,) = tokenizer.prompts(endpoint, mapping)
        texts = tokenizer.token_strings(tokens) if body.return_token_strs else None
        answer = TokenizeAnswer(count=len(tokens), max_model_len=record.max_context_len, tokens=tokens, token_strs=texts)
        return _encode(answer)

    return await tokenized(body.model, len(raw), work)


async def detokenize(tokenized: Tokenized, raw: bytes) -> bytes:
    """The answer to a body of ``POST /detokenize``.

    Raises:
        ApiError: it is refused.
    """
    body: DetokenizeBody = decoded(_detokenize_decoder, raw)[0]

    def work(tokenizer: ModelTokenizer, record: ModelRecord) -> bytes:
        return _encode(DetokenizeAnswer(prompt=tokenizer.text(body.tokens)))

    return await tokenized(body.model, len(raw), work)
