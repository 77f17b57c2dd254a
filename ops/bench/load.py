"""A closed-loop HTTP load in a process of its own: ``python -m ops.bench.load`` reads a task on stdin, prints the result.

The client is as small as HTTP allows (one prepared request per connection, headers scanned once), so that on two cores it
takes little away from what is measured. The same client measures every server of a run.
"""

from __future__ import annotations

import asyncio
import collections
import sys
import time
from typing import cast

import msgspec

from subjects.errors import CarpoolError

_HEADERS_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What to send, from how many connections, for how long. Each connection sends its next request after an answer.

    With a ``rate_per_s`` requests fall due at that rate instead, whatever is answered; one that finds no connection free
    waits for it, and its time counts from when it fell due.
    """

    host: str
    port: int
    path: str
    body: str
    connections: int
    seconds_max: float
    requests_max: int = 1_000_000
    rate_per_s: float = 0.0
    keys: tuple[str, ...] = ()
    """API keys; the connections take them in turn."""
    drain_s_max: float = 60.0
    """What is still unanswered this long after ``seconds_max`` is cut off."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came back. ``events`` counts ``data:`` lines, the closing ones included; latencies are of whole answers.

    A request that was cut off has had at least its time so far, which is what the percentiles take for it; the events that
    it had got are counted.
    """

    requests: int
    errors: int
    seconds: float
    events: int
    p50_ms: float
    p99_ms: float
    cut: int = 0


class _Connection(asyncio.Protocol):
    def __init__(self, load: _Load, request: bytes) -> None:
        self._load = load
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._since_s: float | None = None
        self._length: int | None = None
        self._status_ok = False
        self._in_body = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)
        self._load.free(self)

    def send(self, since_s: float) -> None:
        assert self._transport is not None
        self._buffer.clear()
        self._in_body = False
        self._since_s = since_s
        self._transport.write(self._request)

    def close(self) -> None:
        assert self._transport is not None
        self._transport.abort()

    def cut(self, now_s: float) -> None:
        if self._since_s is not None:
            self._load.was_cut(now_s - self._since_s, self._buffer.count(b"data: "))
            self._since_s = None
        self.close()

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
        if self._since_s is None:
            return
        self._load.done(time.perf_counter() - self._since_s, self._status_ok, self._buffer.count(b"data: "))
        self._since_s = None
        self._load.free(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.closed(lost=self._since_s is not None)


class _Load:
    """The requests of a task: who may send the next one, and what came of all."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.latencies_ms: list[float] = []
        self.errors = 0
        self.events = 0
        self.cut = 0
        self.lost = 0
        self._taken = 0
        self._open = task.connections
        self._idle: collections.deque[_Connection] = collections.deque()
        self._due: collections.deque[float] = collections.deque()
        self._all_due = task.rate_per_s <= 0
        self._started_s = time.perf_counter()
        self.ended = asyncio.Event()

    def request(self, index: int) -> bytes:
        """What the connection of this number sends."""
        task, body = self.task, self.task.body.encode()
        key = f"authorization: Bearer {task.keys[index % len(task.keys)]}\r\n" if task.keys else ""
        return (
            f"POST {task.path} HTTP/1.1\r\nhost: {task.host}:{task.port}\r\ncontent-type: application/json\r\n{key}"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode() + body

    def free(self, connection: _Connection) -> None:
        """Gives a connection its next request, or closes it when there is none."""
        if self.task.rate_per_s > 0:
            if self._due:
                connection.send(self._due.popleft())
            elif self._all_due:
                connection.close()
            else:
                self._idle.append(connection)
        elif self._may_take(time.perf_counter()):
            self._taken += 1
            connection.send(time.perf_counter())
        else:
            connection.close()

    def _may_take(self, now_s: float) -> bool:
        return self._taken < self.task.requests_max and now_s - self._started_s <= self.task.seconds_max

    async def pace(self) -> None:
        """Makes requests fall due at the task's rate."""
        while self._may_take(time.perf_counter()):
            await asyncio.sleep(self._started_s + self._taken / self.task.rate_per_s - time.perf_counter())
            self._taken += 1
            now_s = time.perf_counter()
            if self._idle:
                self._idle.popleft().send(now_s)
            else:
                self._due.append(now_s)
        self._all_due = True
        while self._idle:
            self._idle.popleft().close()

    def done(self, took_s: float, ok: bool, events: int) -> None:
        """A whole answer."""
        self.latencies_ms.append(took_s * 1000)
        self.errors += not ok
        self.events += events

    def was_cut(self, after_s: float, events: int) -> None:
        """No more is waited for."""
        self.latencies_ms.append(after_s * 1000)
        self.cut += 1
        self.events += events

    def closed(self, *, lost: bool) -> None:
        """A connection has ended; ``lost``: before its answer was whole."""
        self.lost += lost
        self._open -= 1
        if self._open == 0:
            self.ended.set()


async def _run(task: Task) -> Result:
    loop = asyncio.get_running_loop()
    load = _Load(task)
    started_s = time.perf_counter()
    connections: list[_Connection] = []
    for index in range(task.connections):
        _, connection = await loop.create_connection(
            lambda index=index: _Connection(load, load.request(index)),  # type: ignore[misc]
            task.host,
            task.port,
        )
        connections.append(connection)
    pacer = loop.create_task(load.pace()) if task.rate_per_s > 0 else None
    try:
        await asyncio.wait_for(load.ended.wait(), task.seconds_max + task.drain_s_max)
    except TimeoutError:
        for connection in connections:
            connection.cut(time.perf_counter())
    seconds = time.perf_counter() - started_s
    if pacer is not None:
        await pacer
    ordered = sorted(load.latencies_ms)
    return Result(
        requests=len(load.latencies_ms) - load.cut,
        errors=load.errors + load.lost,
        seconds=seconds,
        events=load.events,
        p50_ms=_percentile(ordered, 0.5),
        p99_ms=_percentile(ordered, 0.99),
        cut=load.cut,
    )


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def measure(task: Task) -> Result:
    """Runs ``task`` in a process of its own.

    Raises:
        CarpoolError: it came to no result, as when nobody listens at the port.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ops.bench.load", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await asyncio.wait_for(
            process.communicate(msgspec.json.encode(task)), task.seconds_max + task.drain_s_max + 30
        )
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise CarpoolError(f"the load on port {task.port} ended with exit code {process.returncode}")
    return msgspec.json.decode(output, type=Result)


def main() -> None:
    """Task on stdin, result on stdout."""
    import uvloop

    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(_run(task))))


if __name__ == "__main__":
    main()
