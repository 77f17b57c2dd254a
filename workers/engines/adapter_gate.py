"""Where a request for a LoRA adapter waits until the adapter is in the engine: :class:`workers.core.adapters.AdapterSlots`
with files and an engine behind it.

One task loads and evicts, in the order that the core says. A load reads the adapter's files in a thread first and compares
their hash with the one that was applied, so that an engine never answers with other weights than the client asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, assert_never

import structlog

from profiles.adapters import verify_adapter
from subjects.errors import EngineError
from subjects.messages import Adapter, Failure, FailureKind, ModelRecord
from subjects.tasks import end_tasks
from workers.core.adapters import (
    AdapterCommand,
    AdapterSlots,
    AdmitRequest,
    EvictAdapter,
    LoadAdapter,
    RefuseRequest,
)
from workers.core.held_request import Key

log = structlog.get_logger(__name__)


class AdapterRefused(EngineError):
    """The adapter cannot answer; the message is for a client. Nobody else is touched by it.

    Files that are missing, and an engine that does not load, are this worker's fault: the request is tried again, here or
    on another replica, a bounded number of times. Only what is wrong on every replica is the client's.
    """

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message)
        self._kind = kind

    @property
    def failure(self) -> Failure:
        """What ends the request, or this attempt at it."""
        status = 400 if self._kind is FailureKind.BAD_REQUEST else 500
        return Failure(kind=self._kind, message=str(self), status=status, param="model", code="adapter_unavailable")


class AdapterGate:
    """The adapters of one engine; used from one event loop.

    ``load`` and ``evict`` change the engine and raise what the engine raises.
    """

    def __init__(
        self,
        record: ModelRecord,
        *,
        load: Callable[[Adapter, int], Awaitable[None]],
        evict: Callable[[int], Awaitable[None]],
    ) -> None:
        self._rank_max = record.adapters_rank_max
        self._slots = AdapterSlots(record.adapters_max)
        self._load = load
        self._evict = evict
        self._entering: dict[Key, asyncio.Future[int]] = {}
        self._changes: asyncio.Queue[LoadAdapter | EvictAdapter] = asyncio.Queue()
        self._changer: asyncio.Task[None] | None = None

    @property
    def resident(self) -> tuple[str, ...]:
        """Names of the adapters in the engine, the least recently used one first."""
        return self._slots.resident

    async def enter(self, key: Key, adapter: Adapter) -> int:
        """Waits until the adapter is in the engine and returns its id there; :meth:`leave` follows, also when cancelled.

        Raises:
            AdapterRefused: it does not load.
        """
        if adapter.rank > self._rank_max > 0:
            message = (
                f"the adapter '{adapter.name}' has rank {adapter.rank}, and this replica takes {self._rank_max} at most"
            )
            raise AdapterRefused(message, FailureKind.BAD_REQUEST)
        entering: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._entering[key] = entering
        try:
            self._do(self._slots.ask(key, adapter))
            return await entering
        except BaseException:
            self.leave(key)
            raise
        finally:
            del self._entering[key]

    def leave(self, key: Key) -> None:
        """The request has ended or was aborted; unknown ones are ignored."""
        self._do(self._slots.over(key))

    async def clear(self) -> None:
        """Takes all adapters out that nothing uses."""
        self._do(self._slots.clear())
        await self._changes.join()

    async def close(self) -> None:
        """Ends the task; whoever still waits is left to its caller."""
        if self._changer is not None:
            await end_tasks([self._changer])

    def _do(self, commands: Sequence[AdapterCommand]) -> None:
        for command in commands:
            match command:
                case LoadAdapter() | EvictAdapter():
                    self._changes.put_nowait(command)
                    if self._changer is None:
                        self._changer = asyncio.get_running_loop().create_task(self._change())
                case AdmitRequest(key=key, slot_id=slot_id):
                    if (entering := self._waits(key)) is not None:
                        entering.set_result(slot_id)
                case RefuseRequest(key=key, reason=reason, kind=kind):
                    if (entering := self._waits(key)) is not None:
                        entering.set_exception(AdapterRefused(reason, kind))
                case _:
                    assert_never(command)

    def _waits(self, key: Key) -> asyncio.Future[int] | None:
        entering = self._entering.get(key)
        return None if entering is None or entering.done() else entering

    async def _change(self) -> None:
        while True:
            change = await self._changes.get()
            try:
                if isinstance(change, EvictAdapter):
                    await self._take_out(change)
                else:
                    self._do(await self._bring_in(change))
            finally:
                self._changes.task_done()

    async def _take_out(self, change: EvictAdapter) -> None:
        try:
            await self._evict(change.slot_id)
            log.info("adapter evicted", adapter=change.adapter.name)
        except Exception as error:
            # The engine's own bound on adapters still holds: the next load evicts what it used longest ago.
            log.warning("an adapter was not evicted", adapter=change.adapter.name, error=str(error))

    async def _bring_in(self, change: LoadAdapter) -> list[AdapterCommand]:
        adapter = change.adapter
        try:
            await asyncio.to_thread(verify_adapter, adapter)
            await self._load(adapter, change.slot_id)
        except EngineError as error:
            log.warning("an adapter is not loaded", adapter=adapter.name, source=adapter.source, error=str(error))
            return self._slots.failed(adapter, str(error))
        except Exception as error:
            # An engine's reason may hold paths, which are the operator's business.
            log.warning("an adapter is not loaded", adapter=adapter.name, source=adapter.source, error=str(error))
            reason = f"the engine does not load the adapter '{adapter.name}'; the worker's log says why"
            return self._slots.failed(adapter, reason)
        log.info("adapter loaded", adapter=adapter.name, hash=adapter.adapter_hash[:16], resident=self._slots.resident)
        return self._slots.loaded(adapter)


def adapter_arguments(record: ModelRecord) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``EngineArgs``; none where replicas are started without adapters.

    As many are kept in host memory as on the device, so that vLLM loads one only when it is told to.
    """
    if not record.adapters_max:
        return {}
    return {
        "enable_lora": True,
        "max_loras": record.adapters_max,
        "max_cpu_loras": record.adapters_max,
        "max_lora_rank": record.adapters_rank_max,
    }


def lora_request(adapter: Adapter, slot_id: int) -> Any:
    """vLLM's own form. Its prefix cache tells adapters apart by this name, so the content's hash is in it."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"{adapter.name}@{adapter.adapter_hash[:16]}", slot_id, adapter.source)
