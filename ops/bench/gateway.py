"""``carpool bench gateway``: what the gateway, the bus and a replica shell cost beside a bare echo server in the same run.

The engine is simulated and answers at once, so that everything measured is ours; tokenising (with the tokenizer of a tiny
model) and the request profile are on. Gateway, replica, NATS, echo server and load run in processes of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from ops.bench.echo import EVENTS
from ops.bench.load import Result, Task, measure
from ops.bench.peers import body
from ops.bench.processes import bus_messages
from ops.control import control
from ops.models import make_tiny_model, records_of
from ops.servers import free_port, port_is_free
from ops.supervisor import Pool, PoolOptions
from subjects.errors import CarpoolError

PAIRS = 10
PAIR_REQUESTS = 200


async def bench_gateway(say: Callable[[str], None], *, seconds: float = 8.0, connections: int = 16) -> dict[str, Any]:
    """Measures and returns the figures; rates are per second, times in milliseconds.

    Raises:
        CarpoolError: answers were errors, so that the figures would mean nothing.
    """
    with tempfile.TemporaryDirectory(prefix="carpool-bench-", ignore_cleanup_errors=True) as temporary:
        directory = Path(temporary)
        tiny = make_tiny_model("bench", seed=1, directory=directory / "tiny")
        services = directory / "bench.yaml"
        services.write_text(
            "apiVersion: llm.serving/v1\nkind: ModelService\nmetadata: {name: bench}\n"
            f"spec:\n  tokenizer: {msgspec.json.encode(str(tiny)).decode()}\n"
            "  engine: {type: simulated, max_num_seqs: 256, max_context_len: 2048, kv_cache_bytes: 1GiB, "
            "options: {mode: instant}}\n"
        )
        monitor_port = free_port("127.0.0.1")
        options = PoolOptions(state_dir=directory / "state", devices=("cpu:4GiB",), nats_monitor_port=monitor_port)
        async with Pool(options) as pool, _echo() as echo_port:
            records = records_of([services])
            await control(pool.nats_url, "apply", {"records": [msgspec.to_builtins(record) for record in records]})
            port = int(pool.http_url.rpartition(":")[2])

            def task(target: int, *, stream: bool, **more: Any) -> Task:
                bounds = {"connections": connections, "seconds_max": seconds} | more
                content = body(stream=stream, tokens=EVENTS if stream else 4)
                return Task(host="127.0.0.1", port=target, path="/v1/chat/completions", body=content, **bounds)

            say("waking the model and warming up")
            for target in (port, echo_port):
                _checked(await measure(task(target, stream=False, seconds_max=2.0)))
                _checked(await measure(task(target, stream=True, seconds_max=1.0)))
            say(f"{connections} connections, {seconds:.0f} s each: whole answers, then streams of {EVENTS} events")
            echo = _checked(await measure(task(echo_port, stream=False)))
            before = await bus_messages(monitor_port)
            ours = _checked(await measure(task(port, stream=False)))
            messages = await bus_messages(monitor_port) - before
            echo_stream = _checked(await measure(task(echo_port, stream=True)))
            stream = _checked(await measure(task(port, stream=True)))
            say(f"one connection, {PAIRS} pairs of {PAIR_REQUESTS} requests, direct and through the pool")
            added_ms: list[float] = []
            for _ in range(PAIRS):
                single = {"connections": 1, "requests_max": PAIR_REQUESTS, "seconds_max": 30.0}
                direct = _checked(await measure(task(echo_port, stream=False, **single)))
                through = _checked(await measure(task(port, stream=False, **single)))
                added_ms.append(through.p50_ms - direct.p50_ms)
    return {
        "bench": "gateway",
        "connections": connections,
        "rps": round(ours.requests / ours.seconds, 1),
        "p50_ms": round(ours.p50_ms, 3),
        "p99_ms": round(ours.p99_ms, 3),
        "added_p50_ms": round(statistics.median(added_ms), 3),
        "stream_chunks_per_s": round(stream.events / stream.seconds, 1),
        "echo_rps": round(echo.requests / echo.seconds, 1),
        "echo_p50_ms": round(echo.p50_ms, 3),
        "echo_stream_chunks_per_s": round(echo_stream.events / echo_stream.seconds, 1),
        "ratio": round((ours.requests / ours.seconds) / (echo.requests / echo.seconds), 4),
        "stream_ratio": round((stream.events / stream.seconds) / (echo_stream.events / echo_stream.seconds), 4),
        "bus_messages_per_request": round(messages / ours.requests, 2),
        "stream_events_per_request": round(stream.events / stream.requests, 2),
    }


def _checked(result: Result) -> Result:
    if result.errors or not result.requests:
        raise CarpoolError(f"bench: {result.errors} of {result.requests} answers were errors; see the pool's logs")
    return result


@contextlib.asynccontextmanager
async def _echo() -> AsyncIterator[int]:
    port = free_port("127.0.0.1")
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "ops.bench.echo", str(port))
    try:
        for _ in range(200):
            if not port_is_free("127.0.0.1", port):
                break
            await asyncio.sleep(0.05)
        yield port
    finally:
        process.terminate()
        await process.wait()
