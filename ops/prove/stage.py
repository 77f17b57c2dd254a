"""A small pool of real processes for one case of a proof, with what is seen of it from outside."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ops.control import control
from ops.prove.judging import Sample
from ops.prove.workplace import Answer, Heard, Say, apply, ask, client_of, hearing, running_pool, service, until
from ops.supervisor import Pool
from subjects.errors import CarpoolError

if TYPE_CHECKING:
    import httpx

LOOK_S = 0.25
GIVEN = "costs: {cpu: {prefill_token_s: 6.2e-5, step_const_s: 0.0126, step_request_s: 1.3e-4}}"
"""Of a simulated engine whose options say nothing else."""


@dataclass(slots=True)
class Seen:
    """A running pool; ``samples`` are looks at its replicas, one whenever something changed."""

    pool: Pool
    client: httpx.AsyncClient
    heard: Heard
    directory: Path
    samples: list[Sample] = field(default_factory=list)

    async def ask(self, model: str, tokens: int = 4, *, prompt: str = "go", delay_s: float = 0.0, **extra: Any) -> Answer:
        """One streamed answer, asked for after ``delay_s``."""
        await asyncio.sleep(delay_s)
        return await ask(self.client, model, prompt, tokens, stream=True, **extra)

    async def crowd(self, model: str, count: int, tokens: int = 4) -> list[Answer]:
        """So many requests at once."""
        return list(await asyncio.gather(*(self.ask(model, tokens) for _ in range(count))))

    async def busy(self, models: Sequence[str], seconds: float, tokens: int) -> list[Answer]:
        """A client for each of ``models`` (which may repeat) that never pauses, for ``seconds``."""
        end_s = time.monotonic() + seconds
        answers: list[Answer] = []

        async def go_on(model: str) -> None:
            while time.monotonic() < end_s:
                answers.append(await self.ask(model, tokens))
                if not answers[-1].whole:
                    await asyncio.sleep(0.1)  # A refusal comes at once.

        await asyncio.gather(*(go_on(model) for model in models))
        return answers

    async def get(self, what: str) -> list[dict[str, Any]]:
        """The rows of ``carpool get``."""
        return await control(self.pool.nats_url, "get", {"what": what}) or []

    async def row(self, what: str, name: str) -> dict[str, Any]:
        """One of them; empty when it is not there."""
        return next((row for row in await self.get(what) if name in (row.get("name"), row.get("model"))), {})

    async def tell(self, verb: str, **argument: Any) -> Any:
        """What a person says to the scheduler."""
        return await control(self.pool.nats_url, verb, argument)

    async def apply(self, services: str) -> list[dict[str, Any]]:
        """What ``carpool apply`` is told."""
        return await apply(self.pool, self.directory, services)

    def ready(self, model: str) -> int:
        """Ready replicas at the last look."""
        return self.samples[-1].ready(model) if self.samples else 0

    async def until_ready(self, model: str, count: int, limit_s: float) -> bool:
        """Whether there are exactly ``count`` within ``limit_s``."""
        return await self.until(lambda: self.ready(model) == count, limit_s)

    async def until(self, holds: Callable[[], bool], limit_s: float) -> bool:
        """Whether it holds within ``limit_s``."""

        async def asked() -> bool:
            return holds()

        return await until(asked, limit_s)

    async def _watch(self) -> None:
        """Looks until cancelled; a look that nobody answers is left out."""
        while True:
            with contextlib.suppress(CarpoolError):
                rows = await self.get("replicas")
                replicas = tuple((r["model"], f"{r['worker']}/{r['device']}", r["state"], r["replica"]) for r in rows)
                if not self.samples or self.samples[-1].replicas != replicas:
                    self.samples.append(Sample(time.monotonic(), replicas))
            await asyncio.sleep(LOOK_S)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a case plays."""

    directory: Path
    rng: random.Random
    say: Say

    @contextlib.asynccontextmanager
    async def pool(self, services: str, *devices: str, flags: Sequence[str] = ()) -> AsyncIterator[Seen]:
        """A pool of one worker with these devices, ``services`` applied and watched. ``flags`` are the worker's."""
        first, *more = devices
        words = [*(word for device in more for word in ("--device", device)), *flags]
        async with (
            running_pool(self.directory, services, first, "--no-kv", *words) as pool,
            client_of(pool) as client,
            hearing(pool) as heard,
        ):
            seen = Seen(pool, client, heard, self.directory)
            watching = asyncio.create_task(seen._watch())
            try:
                yield seen
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)


def model(
    name: str,
    gb: float = 0.6,
    *,
    load_s: float = 0.3,
    slots: int = 8,
    context: int = 2048,
    step_s: float = 0.0,
    kv: str = "64MiB",
    given: bool = False,
    strategy: str = "",
    options: Mapping[str, Any] | None = None,
) -> str:
    """A simulated model of ``gb`` GB. ``step_s``: what a step takes; ``given``: its file has costs."""
    more = {"load_s": load_s, "kv_bytes_per_token": 1024, **({"step_const_s": step_s} if step_s else {}), **(options or {})}
    engine = (
        f"type: simulated, max_num_seqs: {slots}, max_context_len: {context}, kv_cache_bytes: {kv}, "
        f"options: {{{', '.join(f'{key}: {str(value).lower()}' for key, value in more.items())}}}"
    )
    resources = f"baseline_memory_gb: {gb}" + (f", {GIVEN}" if given else "")
    waits = "" if "max_wait_s" in strategy else "max_wait_s: 30"
    return service(name, "", engine, resources=resources, strategy=", ".join(filter(None, (waits, strategy))))
