"""The simulated engine in real time: :class:`workers.core.simulated.SimulatedCore` on the running loop's clock.

``engine_options`` of the model record are the fields of :class:`workers.core.simulated.SimulatedProfile`; slots, block size,
context and KV pages come from the record where the options do not say otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import assert_never

from subjects.errors import EngineError
from subjects.ids import RequestId
from subjects.messages import Delta, Failure
from workers.core import simulated as sim
from workers.engines.base import EngineInfo, EngineLoad, EngineRequest
from workers.spec import ReplicaSpec

WARM_REQUEST = RequestId("warm-probe")
WARM_INPUT_TOKENS = 8
WARM_TIMEOUT_S = 60.0
TIMER_S = 0.001
"""Resolution of the event loop's timers."""


def profile_of(spec: ReplicaSpec) -> sim.SimulatedProfile:
    """The profile that a replica's record describes.

    Raises:
        EngineError: an engine option is unknown or wrong.
    """
    record = spec.record
    block_bytes = record.kv_bytes_per_token * record.block_size
    pages = record.kv_bytes // block_bytes if block_bytes else sim.SimulatedProfile().kv_pages
    try:
        return sim.profile_from_options(
            record.engine_options,
            slots=record.max_num_seqs,
            kv_pages=pages,
            block_size=record.block_size,
            max_context_len=record.max_context_len,
        )
    except ValueError as error:
        raise EngineError(f"model {record.name}: {error}") from None


class SimulatedEngine:
    """An engine whose tokens are hashes and whose times are arithmetic."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.profile = profile_of(spec)
        self._block_bytes = spec.record.kv_bytes_per_token * spec.record.block_size
        self._core = sim.SimulatedCore(self.profile)
        self._ready: deque[sim.SimulatedCommand] = deque()
        self._wake = asyncio.Event()
        self._stopped = False

    async def start(self) -> EngineInfo:
        """Takes ``load_s``, then fails or is ready as the options say."""
        await asyncio.sleep(self.profile.load_s)
        if self.profile.load_fails:
            raise EngineError("the simulated engine failed to load, as its options ask")
        return self._info()

    def _info(self) -> EngineInfo:
        return EngineInfo(
            slots=self.profile.slots,
            kv_pages=self._core.kv_pages,
            block_size=self.profile.block_size,
            max_context_len=self.profile.max_context_len,
            gives_token_ids=True,
            continues=True,
            resizes_kv=self.profile.resizes_kv and self._block_bytes > 0,
            sleeps=self.profile.sleeps,
        )

    async def warm(self, tokens: int) -> None:
        """Runs one request of ``tokens`` tokens through the same core on the same clock and compares its tokens.

        Faults that are counted in tokens start with the first real request.
        """
        if tokens < 1:
            return
        probe = sim.SimulatedCore(replace(self.profile, die_after_tokens=0, freeze_after_tokens=0, fail_rate=0.0))
        request = sim.SimulatedRequest(
            request=WARM_REQUEST, attempt=1, input_tokens=WARM_INPUT_TOKENS, tokens=tokens, max_tokens=tokens
        )
        commands = probe.step(time.monotonic(), sim.RequestAdded(request))
        seen: list[int] = []
        deadline_s = time.monotonic() + WARM_TIMEOUT_S
        while True:
            for command in commands:
                if isinstance(command, sim.EmitDeltas):
                    seen += [token for delta in command.deltas for token in delta.token_ids]
            wake_s = probe.next_wake_s
            if wake_s is None:
                break
            if wake_s > deadline_s:
                raise EngineError(f"{tokens} warm-up tokens take longer than {WARM_TIMEOUT_S:.0f} s")
            await asyncio.sleep(max(0.0, wake_s - time.monotonic()))
            commands = probe.step(time.monotonic(), sim.Ticked())
        if seen != [sim.expected_token(WARM_REQUEST, index) for index in range(tokens)]:
            raise EngineError("the warm-up answer of the simulated engine was wrong")

    def add(self, request: EngineRequest) -> None:
        """Takes a request; a body that cannot be served comes out as a failure."""
        parsed = sim.parse_request(
            request=request.request,
            attempt=request.attempt,
            endpoint=request.endpoint,
            body=request.body,
            sent_token_ids=request.sent_token_ids,
            max_tokens=request.max_tokens,
        )
        if isinstance(parsed, Failure):
            index = len(request.sent_token_ids)
            self._out([sim.EmitDeltas((sim.failure_delta(request.request, request.attempt, parsed, index=index),))])
            return
        self._out(self._core.step(time.monotonic(), sim.RequestAdded(parsed)))

    def abort(self, request: RequestId, attempt: int) -> None:
        """Stops a request at once."""
        self._out(self._core.step(time.monotonic(), sim.RequestAborted(request, attempt)))

    def _out(self, commands: Sequence[sim.SimulatedCommand]) -> None:
        self._ready.extend(commands)
        self._wake.set()

    async def steps(self) -> AsyncIterator[Sequence[Delta]]:
        """One item per step of the core; between two steps the loop gets its turn, also where steps take no time."""
        loop = asyncio.get_running_loop()
        while not self._stopped:
            while self._ready:
                command = self._ready.popleft()
                match command:
                    case sim.EmitDeltas(deltas):
                        yield deltas
                    case sim.Die(detail):
                        raise EngineError(detail)
                    case _:
                        assert_never(command)
            wake_s = self._core.next_wake_s
            now_s = time.monotonic()
            if wake_s is not None and wake_s <= now_s:
                self._ready.extend(self._core.step(now_s, sim.Ticked()))
                await asyncio.sleep(0)
                continue
            self._wake.clear()
            # At least a timer's resolution: one that fires early must not make this a busy loop. The core's own clock does
            # not drift by it, since its steps follow each other back to back.
            timer = None if wake_s is None else loop.call_later(max(TIMER_S, wake_s - now_s), self._wake.set)
            try:
                await self._wake.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    def load(self) -> EngineLoad:
        """The core's own counters."""
        core = self._core
        return EngineLoad(
            core.running, core.waiting, core.kv_pages_free, core.busy_s, core.preempted, core.step_s, sums=core.sums
        )

    async def resize_kv(self, kv_bytes: int) -> int:
        """Takes or gives pages at once; pages in use cannot go."""
        if not self.profile.resizes_kv or not self._block_bytes:
            raise EngineError("resize-kv is not offered by this engine, as its options say")
        pages = kv_bytes // self._block_bytes
        refusal = self._core.cannot_resize(pages)
        if refusal:
            raise EngineError(refusal)
        self._out(self._core.step(time.monotonic(), sim.KvResized(pages)))
        return pages

    async def empty_prefixes(self) -> bool:
        """Nothing is kept that could be dropped."""
        return not (self._core.running or self._core.waiting)

    async def sleep(self, level: int) -> None:
        """Nothing is kept that a sleep would free."""
        if not self.profile.sleeps:
            raise EngineError("sleep is not offered by this engine, as its options say")
        if self._core.running or self._core.waiting:
            raise EngineError("requests are still here")

    async def wake(self) -> EngineInfo:
        """Takes ``wake_s``."""
        await asyncio.sleep(self.profile.wake_s)
        return self._info()

    async def stop(self) -> None:
        """Ends :meth:`steps`."""
        self._stopped = True
        self._wake.set()
