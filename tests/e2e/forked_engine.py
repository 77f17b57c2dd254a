"""What the template's tests fork in place of a replica: an engine that answers commands on the control socket."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import threading
import time

from subjects.errors import EngineError
from subjects.ids import RequestId
from subjects.messages import Endpoint
from workers.engines.base import EngineRequest
from workers.engines.vllm_cpu import VllmEngine
from workers.spec import ReplicaSpec


def run(spec: ReplicaSpec, control: socket.socket) -> int:
    """Answers one JSON line for each command line; 0 at ``exit`` or at the end of the socket."""
    return asyncio.run(_serve(spec, control))


def _born() -> dict[str, object]:
    import numpy
    import torch

    return {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "random": random.random(),
        "numpy": float(numpy.random.random()),
        "torch": float(torch.rand(1).item()),
        "open_fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
        "control": -1,
    }


async def _serve(spec: ReplicaSpec, control: socket.socket) -> int:
    reader, writer = await asyncio.open_unix_connection(sock=control)
    engine: VllmEngine | None = None
    while line := (await reader.readline()).decode().strip():
        answer: dict[str, object]
        try:
            match line:
                case "born":
                    answer = _born()
                case "start":
                    began = time.perf_counter()
                    engine = VllmEngine(spec)
                    info = await engine.start()
                    await engine.warm(4)
                    answer = {"took_s": time.perf_counter() - began, "kv_pages": info.kv_pages}
                case "ask":
                    assert engine is not None
                    answer = {"text": await _ask(engine)}
                case "exit":
                    return 7
                case _:
                    answer = {"error": f"unknown command {line}"}
        except EngineError as error:
            answer = {"error": str(error)}
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
    return 0


async def _ask(engine: VllmEngine) -> str:
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16, "temperature": 0}
    request = RequestId("gateway-1-1")
    engine.add(
        EngineRequest(request=request, attempt=1, endpoint=Endpoint.CHAT, body=json.dumps(body).encode(), kv_pages_needed=2)
    )
    text = ""
    async for deltas in engine.steps():
        text += "".join(delta.text for delta in deltas)
        if any(delta.end for delta in deltas):
            return text
    raise AssertionError("steps() ended")
