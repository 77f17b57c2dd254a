"""A vLLM engine in a process of its own that answers commands, one JSON object a line: vLLM has one connector a process.

``python -m ops.bench.kv_engine_child FD SPEC`` with an inherited socket and a ``ReplicaSpec`` as JSON; the tests fork it
from a template instead and add commands of theirs.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from subjects.errors import EngineError
from subjects.ids import RequestId
from subjects.messages import Endpoint
from workers.engines.base import EngineRequest
from workers.engines.vllm_cpu import VllmEngine
from workers.spec import ReplicaSpec

ANSWER_TOKENS = 8
SETTLED_S_MAX = 20.0
WARM_TOKENS = 2


class ServedEngine:
    """Commands are its methods; their keyword arguments and what they return are JSON."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.engine = VllmEngine(spec)
        self._count = 0
        self._answers: dict[str, dict[str, Any]] = {}
        self._began_s: dict[str, float] = {}
        self._done: dict[str, asyncio.Event] = {}

    async def serve(self, control: socket.socket) -> int:
        """Until the end of the socket, or ``exit``."""
        reader, writer = await asyncio.open_unix_connection(sock=control)
        pump: asyncio.Task[None] | None = None
        while line := (await reader.readline()).decode().strip():
            command = json.loads(line)
            name = command.pop("do")
            if name == "exit":
                await self.engine.stop()
                # An engine's threads must not hold up the end.
                os._exit(0)
            try:
                answer = await getattr(self, name)(**command)
                if name == "start":
                    pump = asyncio.get_running_loop().create_task(self._pump())
            except EngineError as error:
                answer = {"error": str(error)}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        if pump is not None:
            pump.cancel()
        return 0

    async def start(self) -> dict[str, Any]:
        """Builds and warms the engine."""
        info = await self.engine.start()
        await self.engine.warm(WARM_TOKENS)
        return {"kv_pages": info.kv_pages, "has_connector": self.engine._kv is not None}

    async def send(
        self, prompt: Sequence[int], salt: str, sent: Sequence[int] = (), tokens: int = ANSWER_TOKENS, **fields: Any
    ) -> dict[str, Any]:
        """Gives a request of token ids to the engine; answers with its name."""
        self._count += 1
        name = f"gateway-1-{self._count}"
        self._answers[name], self._done[name] = {"token_ids": [], "first_s": 0.0}, asyncio.Event()
        self._began_s[name] = time.monotonic()
        body = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}
        self.engine.add(
            EngineRequest(
                request=RequestId(name),
                attempt=1,
                endpoint=Endpoint.COMPLETIONS,
                body=json.dumps(body).encode(),
                kv_pages_needed=1,
                sent_token_ids=tuple(sent),
                cache_salt=salt,
                tenant="bench",
            )
        )
        return {"name": name}

    async def answer(self, name: str) -> dict[str, Any]:
        """Waits for a request's end: token ids, ``cached`` tokens, ``failure``, seconds to the first token and in all."""
        await self._done[name].wait()
        del self._done[name]
        return self._answers.pop(name)

    async def ask(self, settle: bool = True, **fields: Any) -> dict[str, Any]:
        """Both; with ``settle`` what it saves is at the node before this answers."""
        answer = await self.answer((await self.send(**fields))["name"])
        if settle:
            await self.settled()
        return answer

    async def abort(self, name: str) -> dict[str, Any]:
        """The client is gone."""
        self.engine.abort(RequestId(name), 1)
        return {}

    async def reset(self) -> dict[str, Any]:
        """Empties the engine's own prefix cache."""
        return {"done": await self.engine.empty_prefixes()}

    async def load(self) -> dict[str, Any]:
        """What runs, and pages that are free."""
        load = self.engine.load()
        return {"running": load.running, "waiting": load.waiting, "free": load.kv_pages_free}

    async def counts(self) -> dict[str, Any]:
        """Blocks loaded and saved so far."""
        counts = self.worker().counts
        return {name: getattr(counts, name) for name in counts.__slots__}

    async def settled(self) -> dict[str, Any]:
        """Waits until nothing is on its way to the node."""
        worker = self.worker()
        end_s = time.monotonic() + SETTLED_S_MAX
        while worker is not None and not worker.saver.idle() and time.monotonic() < end_s:  # noqa: ASYNC110 (a thread's)
            await asyncio.sleep(0.005)
        return {}

    def worker(self) -> Any:
        """The connector's half beside the tensors; None without one."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        return get_kv_transfer_group().worker if has_kv_transfer_group() else None

    async def _pump(self) -> None:
        async for deltas in self.engine.steps():
            now_s = time.monotonic()
            for delta in deltas:
                answer = self._answers.get(delta.request)
                if answer is None:
                    continue
                answer["first_s"] = answer["first_s"] or now_s - self._began_s[delta.request]
                answer["token_ids"] += delta.token_ids
                if delta.end:
                    answer["failure"] = delta.failure.message if delta.failure is not None else ""
                    answer["cached"] = delta.usage.cached_tokens if delta.usage is not None else 0
                    answer["all_s"] = now_s - self._began_s.pop(delta.request)
                    self._done[delta.request].set()


def main() -> int:
    """Serves one engine on an inherited socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    spec = msgspec.json.decode(sys.argv[2], type=ReplicaSpec)
    return asyncio.run(ServedEngine(spec).serve(control))


if __name__ == "__main__":
    os._exit(main())
