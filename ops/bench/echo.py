"""The yardstick: a bare ASGI server that reads the body and answers at once, whole or as 64 events.

``python -m ops.bench.echo PORT``. The same server as the gateway's (uvicorn, httptools, uvloop) with nothing behind it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_ANSWER = (
    b'{"id":"echo","object":"chat.completion","created":1,"model":"echo","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":" hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
)
_EVENT = (
    b'data: {"id":"echo","object":"chat.completion.chunk","created":1,"model":"echo","choices":[{"index":0,"delta":'
    b'{"content":" hello"},"finish_reason":null}]}\n\n'
)
EVENTS = 64


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """One exchange."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    stream = b'"stream":true' in body
    kind = b"text/event-stream" if stream else b"application/json"
    headers = [(b"content-type", kind)] + ([] if stream else [(b"content-length", str(len(_ANSWER)).encode())])
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if stream:
        for _ in range(EVENTS):
            await send({"type": "http.response.body", "body": _EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
    else:
        await send({"type": "http.response.body", "body": _ANSWER})


def main() -> None:
    """Serves on loopback until SIGTERM."""
    import uvicorn

    uvicorn.run(
        app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", access_log=False, loop="uvloop", http="httptools"
    )


if __name__ == "__main__":
    main()
