"""A small OpenAI server with the scripted model: ``python -m tests.extra.scripted PORT``, an engine for ``openai_http``.

``GET /counts`` tells how many requests run, ended and were left by their client, which is how a suite sees that an abort has
come as far as the engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.extra.script import Refused, Script, answer, cut, prompt_tokens

MODEL = "scripted"
SLOW_PIECE_S = 0.05
"""A slow answer's pace: ``script.SLOW_PIECES`` of them take 20 s."""


class _Counts:
    running = 0
    ended = 0
    left = 0


def application() -> Starlette:
    """The ASGI application."""
    counts = _Counts()

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "us"}]})

    async def health(request: Request) -> Response:
        return Response()

    async def count(request: Request) -> Response:
        return JSONResponse({"running": counts.running, "ended": counts.ended, "left": counts.left})

    async def chat(request: Request) -> Response:
        body = json.loads(await request.body())
        try:
            script = answer(body)
        except (Refused, LookupError, TypeError, ValueError) as error:
            reason = str(error) if isinstance(error, Refused) else f"the request cannot be read ({type(error).__name__})"
            return JSONResponse({"error": {"message": reason, "type": "invalid_request_error", "code": None}}, 400)
        if not body.get("stream"):
            return JSONResponse(_whole(body, script))
        return StreamingResponse(_counted(_events(body, script), counts), media_type="text/event-stream")

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/counts", count),
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat, methods=["POST"]),
        ]
    )


async def _counted(events: AsyncIterator[str], counts: _Counts) -> AsyncIterator[str]:
    counts.running += 1
    whole = False
    try:
        async for event in events:
            yield event
        whole = True
    finally:
        counts.running -= 1
        counts.ended += whole
        counts.left += not whole


def _whole(body: dict[str, Any], script: Script) -> dict[str, Any]:
    """What a warm-up asks for; requests of clients come as streams."""
    message = {"role": "assistant", "content": "".join(script.pieces)}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": script.finish_reason}
    return {**_head("chat.completion"), "choices": [choice], "usage": _usage(body, script)}


def _usage(body: dict[str, Any], script: Script) -> dict[str, int]:
    prompt, completion = prompt_tokens(body), script.tokens * int(body.get("n") or 1)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _head(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-scripted", "object": kind, "created": 1, "model": MODEL}


async def _events(body: dict[str, Any], script: Script) -> AsyncIterator[str]:
    choices = int(body.get("n") or 1)
    for index in range(choices):
        yield _event([_choice(index, {"role": "assistant", "content": ""})])
    for piece in script.pieces:
        await asyncio.sleep(SLOW_PIECE_S if script.slow else 0)
        for index in range(choices):
            yield _event([_choice(index, {"content": piece}, logprobs=_logprobs(piece, body))])
    for place, call in enumerate(script.calls):
        for index in range(choices):
            head = {"index": place, "id": f"call_{index}_{place}", "type": "function"}
            yield _tool(index, head | {"function": {"name": call.name, "arguments": ""}})
            for part in cut(call.arguments):
                yield _tool(index, {"index": place, "function": {"arguments": part}})
    for index in range(choices):
        yield _event([_choice(index, {}, finish_reason=script.finish_reason)])
    if (body.get("stream_options") or {}).get("include_usage"):
        yield _event([], _usage(body, script))
    yield "data: [DONE]\n\n"


def _tool(index: int, call: dict[str, Any]) -> str:
    return _event([_choice(index, {"tool_calls": [call]})])


def _choice(
    index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(piece: str, body: dict[str, Any]) -> dict[str, Any] | None:
    if not body.get("logprobs"):
        return None
    entry = {"token": piece, "logprob": -0.25, "bytes": list(piece.encode())}
    return {"content": [entry | {"top_logprobs": [entry] * min(1, int(body.get("top_logprobs") or 0))}], "refusal": None}


def _event(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
    chunk = {**_head("chat.completion.chunk"), "choices": choices, "usage": usage}
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


def main() -> None:
    """Serves on loopback until SIGTERM."""
    import uvicorn

    uvicorn.run(application(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
