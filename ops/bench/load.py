"""A closed-loop HTTP load in a process of its own: ``python -m ops.bench.load`` reads a task on stdin, prints the result.

The client is as small as HTTP allows (one prepared request per connection, headers scanned once), so that on two cores it
takes little away from what is measured. The same client measures every server of a run.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import cast

import msgspec

_HEADERS_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What to send, from how many connections, for how long. Each connection sends its next request after an answer."""

    host: str
    port: int
    path: str
    body: str
    connections: int
    seconds_max: float
    requests_max: int = 1_000_000


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came back. ``events`` counts ``data:`` lines, the closing ones included; latencies are of whole answers."""

    requests: int
    errors: int
    seconds: float
    events: int
    p50_ms: float
    p99_ms: float


class _Connection(asyncio.Protocol):
    def __init__(self, load: _Load) -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._sent_s = 0.0
        self._length: int | None = None
        self._status_ok = False
        self._in_body = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def _send(self) -> None:
        assert self._transport is not None
        if not self._load.take():
            self._transport.close()
            return
        self._buffer.clear()
        self._in_body = False
        self._sent_s = time.perf_counter()
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._in_body:
            end = self._buffer.find(_HEADERS_END)
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            del self._buffer[: end + 4]
            self._status_ok = head.startswith(b"http/1.1 200")
            at = head.find(b"content-length:")
            self._length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else None
            self._in_body = True
        if self._length is not None:
            if len(self._buffer) < self._length:
                return
        elif not self._buffer.endswith(_LAST_CHUNK):
            return
        self._load.done(time.perf_counter() - self._sent_s, self._status_ok, self._buffer.count(b"data: "))
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.closed()


class _Load:
    def __init__(self, task: Task) -> None:
        self.task = task
        body = task.body.encode()
        self.request = (
            f"POST {task.path} HTTP/1.1\r\nhost: {task.host}:{task.port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode() + body
        self.latencies_ms: list[float] = []
        self.errors = 0
        self.events = 0
        self._taken = 0
        self._open = task.connections
        self._started_s = time.perf_counter()
        self.ended = asyncio.Event()

    def take(self) -> bool:
        if self._taken >= self.task.requests_max or time.perf_counter() - self._started_s > self.task.seconds_max:
            return False
        self._taken += 1
        return True

    def done(self, took_s: float, ok: bool, events: int) -> None:
        self.latencies_ms.append(took_s * 1000)
        self.errors += not ok
        self.events += events

    def closed(self) -> None:
        self._open -= 1
        if self._open == 0:
            self.ended.set()


async def _run(task: Task) -> Result:
    loop = asyncio.get_running_loop()
    load = _Load(task)
    started_s = time.perf_counter()
    for _ in range(task.connections):
        await loop.create_connection(lambda: _Connection(load), task.host, task.port)
    await asyncio.wait_for(load.ended.wait(), task.seconds_max + 60)
    ordered = sorted(load.latencies_ms)
    return Result(
        requests=len(load.latencies_ms),
        errors=load.errors + load._taken - len(load.latencies_ms),
        seconds=time.perf_counter() - started_s,
        events=load.events,
        p50_ms=_percentile(ordered, 0.5),
        p99_ms=_percentile(ordered, 0.99),
    )


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def measure(task: Task) -> Result:
    """Runs ``task`` in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ops.bench.load", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(msgspec.json.encode(task)), task.seconds_max + 90)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return msgspec.json.decode(output, type=Result)


def main() -> None:
    """Task on stdin, result on stdout."""
    import uvloop

    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(_run(task))))


if __name__ == "__main__":
    main()
