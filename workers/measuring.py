"""Measuring what an engine's steps take, with requests of its own, while nobody else's run there (PRO-4).

Each point is a batch of equal prompts: what it took until all had their first token tells of prefill, the rest of decoding.
The time is the engine's own account of its steps, so that neither rendering nor the event loop is in it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from profiles.costs import LENGTH_CLASS_TOKENS_MAX, sums_between
from subjects.ids import RequestId
from subjects.messages import CostPoint, Delta, Endpoint, Task
from workers.engines.base import Engine, EngineInfo, EngineRequest

PREFIX = "measure-"
FIRST_INPUT_TOKENS = 16
FIRST_OUTPUT_TOKENS = 3
FIRST_S_MAX = 0.5
"""What the first point may take where a tenth of the load's time is less: one prompt and one batch are always measured."""
OUTPUT_TOKENS = 12
BATCHES = (1, 4, 8, 2, 16, 32)
"""In the order in which they are taken."""
AT_ONCE_S_MAX = 0.5
"""The prompts of one point may take about so long, as a step cannot be broken off for a request that comes."""
INPUT_TOKENS_MIN = 16
INPUT_TOKENS_MAX = 2 * LENGTH_CLASS_TOKENS_MAX[1]
POINT_S_MAX = 120.0
POINT_TRIES_MAX = 3
"""Of one point that fails by itself, not because somebody's request came."""


class Prober:
    """One engine's. Whoever reads the engine's steps gives them to :meth:`hear` first."""

    def __init__(self, engine: Engine, info: EngineInfo, task: Task) -> None:
        self._engine = engine
        self._info = info
        self._embeds = task is Task.EMBED
        self._numbers = itertools.count(1)
        self._waiting: dict[RequestId, bool] = {}
        """Requests that run, and whether they have their first token."""
        self._changed = asyncio.Event()
        self._broken = False
        self.failures = 0
        """Points in a row that the engine refused or did not end in time."""
        self._token_s = 0.0
        """Per prompt token, the least that was seen."""

    def hear(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        """Takes what is of its own requests; returns the rest."""
        if not self._waiting and not any(delta.request.startswith(PREFIX) for delta in deltas):
            return deltas
        for delta in deltas:
            if delta.request in self._waiting:
                if delta.failure is not None and not self._broken:
                    self._broken = True
                    self.failures += 1
                self._waiting[delta.request] = True
                if delta.end:
                    del self._waiting[delta.request]
                self._changed.set()
        return [delta for delta in deltas if not delta.request.startswith(PREFIX)]

    def abandon(self) -> None:
        """A request has come, or the engine is about to change: the point that is being taken is worth nothing."""
        if self._waiting:
            self._broken = True
            for request in self._waiting:
                self._engine.abort(request, 1)
            self._waiting.clear()
            self._changed.set()

    async def first(self, budget_s: float) -> list[CostPoint]:
        """Points that take about so long together; none if not even the first does."""
        began_s = time.monotonic()
        found: list[CostPoint] = []
        try:
            async with asyncio.timeout(max(budget_s, FIRST_S_MAX)):
                batch = min(2, self._info.slots)
                found += await self.point(batch, self._fitting(batch, FIRST_INPUT_TOKENS), FIRST_OUTPUT_TOKENS)
                took_s = time.monotonic() - began_s
                for batch, tokens in self.grid(BATCHES[2]):
                    took_s = max(took_s, 2 * batch * tokens * self._token_s)
                    if time.monotonic() - began_s + took_s > budget_s:
                        break
                    begun_s = time.monotonic()
                    found += await self.point(batch, tokens)
                    took_s = time.monotonic() - begun_s
        except TimeoutError:
            self.abandon()
        return found

    def grid(self, batch_max: int) -> Iterator[tuple[int, int]]:
        """Batches and prompt lengths to measure, as far as there is room: three lengths for each batch up to ``batch_max``.

        Lengths are those of the classes of SCH-5, or what the model's context and ``AT_ONCE_S_MAX`` leave of them.
        """
        if not self._token_s:
            yield 1, self._fitting(1, INPUT_TOKENS_MIN)
        longest = self._fitting(1, INPUT_TOKENS_MAX)
        lengths = [max(INPUT_TOKENS_MIN, min(longest, longest // part)) for part in (16, 4, 1)]
        batches = [batch for batch in BATCHES if batch <= min(batch_max, self._info.slots)]
        seen: set[tuple[int, int]] = set()
        for batch in batches:
            for length in lengths:
                cell = batch, self._fitting(batch, length)
                if cell not in seen and (batch == 1 or batch * cell[1] * self._token_s <= AT_ONCE_S_MAX):
                    seen.add(cell)
                    yield cell

    def _fitting(self, batch: int, input_tokens: int) -> int:
        info = self._info
        pages = info.kv_pages // batch - 1
        most = min(info.max_context_len - OUTPUT_TOKENS - 1, pages * info.block_size - OUTPUT_TOKENS)
        if self._token_s:
            most = min(most, int(AT_ONCE_S_MAX / self._token_s) // batch)
        return max(1, min(input_tokens, max(most, INPUT_TOKENS_MIN), info.max_context_len - OUTPUT_TOKENS - 1))

    async def point(self, batch: int, input_tokens: int, output_tokens: int = OUTPUT_TOKENS) -> list[CostPoint]:
        """One measurement; nothing when it was abandoned, refused, or not over within ``POINT_S_MAX``."""
        assert not self._waiting, "one point at a time"
        self._broken = False
        before = self._engine.load().sums
        for _ in range(batch):
            self._ask(input_tokens, output_tokens)
        middle = None
        try:
            async with asyncio.timeout(POINT_S_MAX):
                await self._until(lambda: all(self._waiting.values()))
                middle = self._engine.load().sums
                await self._until(lambda: not self._waiting)
        except TimeoutError:
            self.failures += 1
            self.abandon()
        after = self._engine.load().sums
        if self._broken or before is None or middle is None or after is None:
            return []
        self.failures = 0
        prefill, decode = sums_between(before, middle), sums_between(middle, after)
        token_s = prefill.busy_s / (batch * input_tokens)
        self._token_s = min(self._token_s or token_s, token_s)
        found = [CostPoint(batch=batch, input_tokens=input_tokens, sums=prefill)]
        if decode.steps > 0 and not self._embeds:
            found.append(CostPoint(batch=batch, input_tokens=input_tokens, decodes=True, sums=decode))
        return found

    def _ask(self, input_tokens: int, output_tokens: int) -> None:
        request = RequestId(f"{PREFIX}{next(self._numbers)}")
        # Small ids are in every vocabulary. The salt keeps what was computed for one from being reused for another; it is no
        # tenant's, so nothing of it is kept in the KV tiers.
        prompt = [3 + (7 * index + len(request)) % 60 for index in range(input_tokens)]
        body: dict[str, object] = {"input": prompt}
        if not self._embeds:
            body = {"prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0}
        self._waiting[request] = False
        self._engine.add(
            EngineRequest(
                request=request,
                attempt=1,
                endpoint=Endpoint.EMBEDDINGS if self._embeds else Endpoint.COMPLETIONS,
                body=msgspec.json.encode(body),
                kv_pages_needed=-(-(input_tokens + output_tokens) // self._info.block_size),
                cache_salt=f"{time.monotonic_ns():020x}",
                test=True,
            )
        )

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done() and not self._broken:
            self._changed.clear()
            await self._changed.wait()
