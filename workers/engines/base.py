"""The engine protocol: what a replica may ask of whatever generates tokens.

Differences between engines are inputs to scheduling (``EngineInfo``), never flattened away. An engine is used from one event
loop. Its own threads stay behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

import msgspec

from subjects.errors import EngineError
from subjects.ids import RequestId
from subjects.messages import Adapter, Delta, Endpoint, SlaClass, StepSums
from workers.core.held_request import Key
from workers.engines.outbox import Outbox

TEST_ENVIRONMENTS = ("test", "load-test", "benchmark")
"""Values of ``X-Environment`` whose requests are no real traffic."""


class EngineInfo(msgspec.Struct, frozen=True):
    """What a started engine can do. A page is one KV block of ``block_size`` tokens."""

    slots: int
    """Requests that run at once."""
    kv_pages: int
    block_size: int
    max_context_len: int
    gives_token_ids: bool
    continues: bool
    """Whether a request can be continued after tokens that were already sent."""
    resizes_kv: bool = False
    """Whether its KV budget can be another while it runs."""
    sleeps: bool = False
    """Whether it can free its device's memory and come back (SCH-8)."""


class EngineRequest(msgspec.Struct, frozen=True):
    """A granted request. The engine renders ``body`` (the client's JSON) with the model's own tokenizer and template."""

    request: RequestId
    attempt: int
    endpoint: Endpoint
    body: bytes
    kv_pages_needed: int
    sent_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    max_tokens: int = 0
    adapter: Adapter | None = None
    """The LoRA adapter that answers; None: the base model."""
    options: Mapping[str, str | int | float | bool] | None = None
    """How its answer is parsed (``profiles.deployment.PARSING_OPTIONS``); None: as the model's record has it."""
    tenant: str = ""
    sla_class: SlaClass = SlaClass.SILVER
    chain_id: str = ""
    test: bool = False
    """Test traffic: its KV is the first to go (KVC-2)."""


class EngineLoad(msgspec.Struct, frozen=True):
    """Now."""

    running: int
    waiting: int
    kv_pages_free: int
    busy_s: float = 0.0
    """Seconds since the start in which a step ran; 0 where the engine does not tell."""
    preemptions: int = 0
    step_s: float = 0.0
    """Running mean of a step's time."""
    hit_ratio: float | None = None
    """Share of the last prompts' tokens that were found in the prefix cache; None where too few are known."""
    sums: StepSums | None = None
    """Of all steps since the start; None where it does not tell."""


class PrefixHits:
    """Share of prompt tokens that were found in the prefix cache, over about the last so many tokens."""

    MEMORY_TOKENS = 100_000
    TOKENS_MIN = 2_000
    """Of fewer nothing is said."""

    def __init__(self) -> None:
        self._asked = self._found = 0.0

    def add(self, asked: int, found: int) -> None:
        """Prompts of ``asked`` tokens, of which ``found`` need not be computed."""
        fade = 0.5 ** (asked / self.MEMORY_TOKENS)
        self._asked = self._asked * fade + asked
        self._found = self._found * fade + found

    @property
    def ratio(self) -> float | None:
        """From 0 to 1."""
        return self._found / self._asked if self._asked >= self.TOKENS_MIN else None


class Engine(Protocol):
    """One model in one replica."""

    async def start(self) -> EngineInfo:
        """Loads the weights and gets ready to generate.

        Raises:
            EngineError: with one line a person can act on.
        """

    async def warm(self, tokens: int) -> None:
        """Generates ``tokens`` tokens and checks that the answer is sane; a replica is ready only after this.

        Raises:
            EngineError: the probe failed.
        """

    def add(self, request: EngineRequest) -> None:
        """Takes a request; everything about it, refusals too, comes out of :meth:`steps`."""

    def abort(self, request: RequestId, attempt: int) -> None:
        """Stops a request within a second; nothing more comes out for it. Unknown ones are ignored."""

    def steps(self) -> AsyncIterator[Sequence[Delta]]:
        """The deltas of all requests, one item per engine step. Raises ``EngineError`` when the engine is dead."""

    def load(self) -> EngineLoad:
        """The engine's own counters, cheaply."""

    async def resize_kv(self, kv_bytes: int) -> int:
        """Gives it another KV budget and returns its pages from now on.

        Raises:
            EngineError: it cannot, or not now; nothing changed.
        """

    async def empty_prefixes(self) -> bool:
        """Drops its own prefix cache, all of it; what the KV tiers hold stays. False: it cannot, or not while something
        runs; nothing changed."""

    async def sleep(self, level: int) -> None:
        """Frees the device's memory; nothing runs.

        Raises:
            EngineError: it cannot; nothing changed.
        """

    async def wake(self) -> EngineInfo:
        """Comes back after :meth:`sleep`; :meth:`warm` follows.

        Raises:
            EngineError: it does not come back.
        """

    async def stop(self) -> None:
        """Ends it and frees its memory; calling again does nothing."""


class FixedEngine:
    """What an engine answers that has the same memory from its start to its end."""

    async def resize_kv(self, kv_bytes: int) -> int:
        """Not offered."""
        raise EngineError("resize-kv is not offered by this engine")

    async def empty_prefixes(self) -> bool:
        """Not offered."""
        return False

    async def sleep(self, level: int) -> None:
        """Not offered."""
        raise EngineError("sleep is not offered by this engine")

    async def wake(self) -> EngineInfo:
        """Not offered."""
        raise EngineError("wake is not offered by this engine")


class TaskEngine(FixedEngine):
    """An engine in which each request is a task of its own, :meth:`_run`, whose deltas go through one outbox."""

    def __init__(self) -> None:
        self._outbox = Outbox()
        self._running: dict[Key, asyncio.Task[None]] = {}

    def add(self, request: EngineRequest) -> None:
        """Starts the request's task; an attempt that has one already is ignored."""
        key = (request.request, request.attempt)
        if key in self._running:
            return
        task = asyncio.get_running_loop().create_task(self._run(request))
        self._running[key] = task
        task.add_done_callback(lambda _: self._running.pop(key, None))

    def abort(self, request: RequestId, attempt: int) -> None:
        """Cancels the request's task; nothing more comes out for it."""
        key = (request, attempt)
        task = self._running.get(key)
        if task is not None and self._outbox.mute(key):
            task.add_done_callback(lambda _: self._outbox.over(key))
            task.cancel()

    def steps(self) -> AsyncIterator[Sequence[Delta]]:
        """The deltas that one turn of the event loop brought."""
        return self._outbox.steps()

    async def _run(self, request: EngineRequest) -> None:
        """All of one request, its refusal too; cancelled by an abort."""
        raise NotImplementedError
