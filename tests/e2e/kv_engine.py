"""The benchmark's engine process, forked from a template, with commands that let a node be hurt at a chosen moment."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

from ops.bench.kv_engine_child import ServedEngine
from workers.engines.vllm_cpu import VllmEngine
from workers.spec import ReplicaSpec

HELD_S_MAX = 60


def run(spec: ReplicaSpec, control: socket.socket) -> int:
    """The template's entry."""
    return asyncio.run(HurtEngine(spec).serve(control))


class HurtEngine(ServedEngine):
    """Reads from the node can be held up between ``prepare`` and the read."""

    def __init__(self, spec: ReplicaSpec) -> None:
        super().__init__(spec)
        self._spec = spec
        self._released = threading.Event()
        self._reading = threading.Event()

    async def second(self) -> dict[str, Any]:
        """Another engine in this process."""
        await VllmEngine(self._spec).start()
        return {}

    async def hold(self) -> dict[str, Any]:
        """Reads wait from now on."""
        client = self.worker().loader._client
        read, released, reading = type(client).read, threading.Event(), threading.Event()

        def held(*arguments: Any) -> int:
            reading.set()
            released.wait(HELD_S_MAX)
            return int(read(client, *arguments))

        self._released, self._reading = released, reading
        client.read = held
        return {}

    async def held_read(self) -> dict[str, Any]:
        """Waits until a read is held."""
        return {"held": await asyncio.to_thread(self._reading.wait, HELD_S_MAX)}

    async def release(self) -> dict[str, Any]:
        """Reads go on, and are not held again; answers once the one that was held is over."""
        loader = self.worker().loader
        del loader._client.read
        self._released.set()
        while loader._current is not None:
            await asyncio.sleep(0.005)
        return {}
