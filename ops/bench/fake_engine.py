"""A fake engine that every HTTP router of a run stands before: ``python -m ops.bench.fake_engine PORT``.

It is not a server for anybody else: one request is read at a time from a connection, and only what routers ask is known. A
stream sends each of its events by a write of its own, each in a turn of the loop of its own, as an engine makes its steps.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

STREAM_CHUNKS = 64
HOLD = "hold this stream open"
"""A streamed request that says this gets one chunk and then nothing more, until its client goes."""

_BODY_BYTES_MAX = 1 << 20
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_ANSWER = (
    b'{"id":"chatcmpl-fake","object":"chat.completion","created":1,"model":"bench","choices":[{"index":0,"message":{"role":'
    b'"assistant","content":" a car that is shared"},"finish_reason":"stop"}],"usage":{"prompt_tokens":24,'
    b'"completion_tokens":4,"total_tokens":28}}'
)
_CHUNK = (
    b'data: {"id":"chatcmpl-fake","object":"chat.completion.chunk","created":1,"model":"bench","choices":[{"index":0,'
    b'"delta":{"role":"assistant","content":" hello"},"finish_reason":%s}]}\n\n'
)
_GET = {
    b"/v1/models": b'{"object":"list","data":[{"id":"bench","object":"model","created":1,"owned_by":"vllm",'
    b'"max_model_len":2048}]}',
    b"/version": b'{"version":"0.1"}',
}
_INFO = b'{"model_path":"bench","served_model_name":"bench","is_generation":true,"tp_size":1,"dp_size":1}'


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


_FRAMES = (
    *(_framed(_CHUNK % b"null") for _ in range(STREAM_CHUNKS - 1)),
    _framed(_CHUNK % b'"stop"'),
    _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n",
)
_WHOLE = _HEAD % (len(_ANSWER), _ANSWER)


class _Engine(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end])
        at = head.lower().find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if b"chunked" in head.lower() or length > _BODY_BYTES_MAX:
            self._transport.close()
            return
        if len(self._buffer) < end + 4 + length:
            return
        body = bytes(self._buffer[end + 4 : end + 4 + length])
        self._buffer.clear()
        method, path, _ = head.split(b" ", 2)
        if method == b"GET":
            known = _GET.get(path, _INFO)
            self._transport.write(_HEAD % (len(known), known))
        elif b'"stream":true' in body or b'"stream": true' in body:
            self._transport.write(_STREAM_HEAD)
            self._send(0, 1 if HOLD.encode() in body else len(_FRAMES))
        else:
            self._transport.write(_WHOLE)

    def _send(self, index: int, until: int) -> None:
        if self._transport is None or index == until:
            return
        self._transport.write(_FRAMES[index])
        self._loop.call_soon(self._send, index + 1, until)


async def _serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Engine(loop), "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


def main() -> None:
    """Serves on loopback until SIGTERM."""
    import uvloop

    uvloop.run(_serve(int(sys.argv[1])))


if __name__ == "__main__":
    main()
