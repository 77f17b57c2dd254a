"""What a client is told when vLLM will not take its request: small, in a client's words, without what it sent.

vLLM's own texts name flags of ``vllm serve``, classes of pydantic, paths of models and values out of the body. Importing
this module imports vLLM.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest
from vllm.entrypoints.serve import create_error_response

from subjects.messages import Endpoint, Failure, FailureKind
from workers.core.refusals import client_message
from workers.engines.base import EngineRequest

EXTRAS = {
    "functions": "the deprecated 'functions' are not offered: use 'tools'",
    "function_call": "the deprecated 'function_call' is not offered: use 'tools' and 'tool_choice'",
    "modalities": "this model writes text only",
    "web_search_options": "this model cannot search the web",
    "moderation": "moderation is not offered",
    "best_of": "'best_of' is not offered: ask for 'n' choices",
    "prompt_logprobs": "log probabilities of a prompt are given by /v1/completions with 'echo' and 'logprobs' only",
    "return_token_ids": "token ids are not returned; /tokenize gives those of a text",
    "return_prompt_text": "the rendered prompt is not returned",
    "use_beam_search": "beam search is not offered",
}
"""Fields whose effect a client would miss in the answer, were they ignored as vLLM ignores them."""
_NO_TOOLS = "this model is not set up for tools: its operator can name a parser in 'spec.engine.options.tool_call_parser'"
_TEXT_ONLY = "this model reads text only: images, audio and video are not offered"
_MAIN_FIELD = {Endpoint.CHAT: "messages", Endpoint.COMPLETIONS: "prompt", Endpoint.EMBEDDINGS: "input"}
_FIELDS = {
    Endpoint.CHAT: ChatCompletionRequest.model_fields,
    Endpoint.COMPLETIONS: CompletionRequest.model_fields,
    Endpoint.EMBEDDINGS: EmbeddingCompletionRequest.model_fields,
}
_FIRST_WORD = re.compile(r"[`'\"]?([a-z_]+)\b")
_MEDIA = re.compile(r"\b(image|audio|video)\b")
_PLAIN_STEP = re.compile(r"[a-z0-9_]+")


class Refused(Exception):
    """The request cannot run; ``failure`` is what the client is told."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def bad_request(message: str, param: str | None) -> Failure:
    """A 400 in our own words."""
    return Failure(kind=FailureKind.BAD_REQUEST, message=client_message(message), status=400, param=param)


def check_extras(body: Any) -> None:
    """Refuses fields of ``EXTRAS`` that ask for something; ``body`` is vLLM's request object.

    Raises:
        Refused: one of them does.
    """
    for name, message in EXTRAS.items():
        value = getattr(body, name, None)
        if _asks(name, value, body):
            raise Refused(bad_request(message, name))


def _asks(name: str, value: Any, body: Any) -> bool:
    if value is None or value is False or value == []:
        return False
    match name:
        case "functions":
            return getattr(body, "function_call", None) != "none"
        case "function_call":
            return value not in ("none", "auto")
        case "modalities":
            return bool(value != ["text"])
        case "best_of":
            return bool(value != (body.n or 1))
        case _:
            return True


def refusal(error: Exception, request: EngineRequest) -> Failure:
    """What a client is told about an error that its request caused before it ran."""
    fields = _FIELDS[request.endpoint]
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        steps = [str(step) for step in first["loc"] if _PLAIN_STEP.fullmatch(str(step))]
        if not steps or steps[0] not in fields:
            steps = [_MAIN_FIELD[request.endpoint], *steps] if steps else []
        message = f"{'.'.join(steps)}: {first['msg']}" if steps else str(first["msg"])
        return bad_request(message, steps[0] if steps else None)
    return failure_of(create_error_response(error), request)


def failure_of(response: Any, request: EngineRequest) -> Failure:
    """The same for an error response of vLLM's own."""
    message, status, param = response.error.message, response.error.code, response.error.param
    fields, main_field = _FIELDS[request.endpoint], _MAIN_FIELD[request.endpoint]
    message = client_message(message)
    if "--tool-call-parser" in message:
        message, param = _NO_TOOLS, "tools"
    elif message.endswith("is not a multimodal model"):
        message, param = _TEXT_ONLY, main_field
    root = (param or "").partition(".")[0]
    if param is None:
        word = _FIRST_WORD.match(message)
        param = word[1] if word is not None and word[1] in fields else main_field if _MEDIA.search(message) else None
    elif root not in fields:
        param = main_field
    bad = 400 <= status < 500 or status == 501
    return Failure(
        kind=FailureKind.BAD_REQUEST if bad else FailureKind.SICK,
        message=message,
        status=400 if status == 501 else status,
        param=param,
    )
