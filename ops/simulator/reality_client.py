"""A streaming client that is as small as HTTP allows, for measurements on a machine whose cores the engines need."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec

from subjects.errors import CarpoolError

ANSWER_S_MAX = 300.0
LINE_BYTES_MAX = 1 << 20


@dataclass(slots=True)
class Timed:
    """One streamed answer; monotonic seconds. ``event_s`` has the time of each event that carried text."""

    model: str
    sent_s: float
    ended_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    event_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """From sending to the first text."""
        return (self.event_s[0] if self.event_s else self.ended_s) - self.sent_s

    @property
    def completion_s(self) -> float:
        """From sending to the end."""
        return self.ended_s - self.sent_s


def body(model: str, prompt: list[int] | str, tokens: int) -> bytes:
    """A completions request for exactly ``tokens`` tokens, streamed, with usage."""
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def ask(host: str, port: int, model: str, data: bytes) -> Timed:
    """Sends one request on a connection of its own and times what comes back.

    Raises:
        CarpoolError: the answer is an error, or is not there after ``ANSWER_S_MAX``.
    """
    try:
        return await asyncio.wait_for(_ask(host, port, model, data), ANSWER_S_MAX)
    except TimeoutError:
        raise CarpoolError(f"{model}: no whole answer in {ANSWER_S_MAX:.0f} s") from None
    except OSError as error:
        raise CarpoolError(f"{model}: {error}") from None


async def _ask(host: str, port: int, model: str, data: bytes) -> Timed:
    reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES_MAX)
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
        )
        timed = Timed(model=model, sent_s=time.monotonic())
        writer.write(head.encode() + data)
        status = await reader.readline()
        if b" 200 " not in status:
            raise CarpoolError(f"{model}: {status.decode(errors='replace').strip()}: {(await reader.read(2048))[-500:]!r}")
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            now_s = time.monotonic()
            if line.startswith(b"data: [DONE]"):
                timed.ended_s = now_s
                break
            chunk = msgspec.json.decode(line[6:])
            if "error" in chunk:
                raise CarpoolError(f"{model}: {chunk['error'].get('message')}")
            if usage := chunk.get("usage"):
                timed.input_tokens, timed.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            if any(choice.get("text") for choice in chunk.get("choices", ())):
                timed.event_s.append(now_s)
        if not timed.ended_s:
            raise CarpoolError(f"{model}: the stream ended early")
        return timed
    finally:
        writer.close()
