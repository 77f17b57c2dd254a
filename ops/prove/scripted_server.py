"""An OpenAI-compatible server that does what the request says and remembers when its clients left.

The proof of cancellation needs an engine that sees nothing but a closed connection, so this one runs behind ``openai_http``.
The body's ``carpool_script`` is ``{"first_s": float, "tokens": int, "every_s": float, "tag": str}``.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


class ScriptedServer:
    """``async with ScriptedServer() as server``: listens on ``server.url``; ``left_s`` maps tags to monotonic seconds."""

    def __init__(self) -> None:
        self.url = ""
        self.begun_s: dict[str, float] = {}
        self.left_s: dict[str, float] = {}
        self.finished: set[str] = set()
        self.running = 0
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ScriptedServer:
        import uvicorn

        from ops.servers import free_port

        port = free_port("127.0.0.1")
        config = uvicorn.Config(
            self._app, "127.0.0.1", port, interface="asgi3", log_level="error", access_log=False, lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.01)
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        if self._task is not None:
            await self._task

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "GET":
            models = {"object": "list", "data": [{"id": "scripted", "object": "model", "max_model_len": 100_000}]}
            await _answer(send, 200, models)
            return
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        request = msgspec.json.decode(bytes(body))
        script = request.get("carpool_script") or {}
        tag = str(script.get("tag", ""))
        self.begun_s[tag] = time.monotonic()
        self.running += 1
        answering = asyncio.create_task(self._generate(send, request, script))
        leaving = asyncio.create_task(_until_left(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done() and answering.exception() is None:
                self.finished.add(tag)
            else:
                self.left_s[tag] = time.monotonic()
        finally:
            self.running -= 1
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _generate(self, send: Send, request: dict[str, Any], script: dict[str, Any]) -> None:
        tokens = int(script.get("tokens", request.get("max_tokens") or 4))
        stream = bool(request.get("stream"))
        await asyncio.sleep(float(script.get("first_s", 0)))
        usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}
        head = {"id": "scripted", "created": int(time.time()), "model": "scripted"}
        if stream:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        words = []
        for index in range(tokens):
            if index:
                await asyncio.sleep(float(script.get("every_s", 0)))
            words.append(f" w{index}")
            if stream:
                delta = {"index": 0, "delta": {"content": words[-1]}, "finish_reason": None}
                await _event(send, head | {"object": "chat.completion.chunk", "choices": [delta]})
        if stream:
            closing = {"index": 0, "delta": {}, "finish_reason": "length"}
            await _event(send, head | {"object": "chat.completion.chunk", "choices": [closing]})
            await _event(send, head | {"object": "chat.completion.chunk", "choices": [], "usage": usage})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
            return
        message = {"role": "assistant", "content": "".join(words)}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        await _answer(send, 200, head | {"object": "chat.completion", "choices": [choice], "usage": usage})


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _event(send: Send, chunk: dict[str, Any]) -> None:
    body = b"data: " + msgspec.json.encode(chunk) + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _answer(send: Send, status: int, body: object) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(body)})
