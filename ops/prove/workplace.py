"""What proofs share: a pool of their own on free ports, its services, its clients, and what is seen on its bus."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ops.control import control
from ops.models import records_of
from ops.supervisor import Pool, PoolOptions
from subjects import codec, names
from subjects.errors import ConfigError
from subjects.messages import Alert, LoadModel, WorkerCommand

if TYPE_CHECKING:
    import httpx

    from subjects.bus import BusMessage

Say = Callable[[str], None]
Figures = tuple[dict[str, Any], dict[str, bool]]
"""Figures by name, and for each bound whether it held."""
Oracle = Callable[[Path, random.Random, Say], Awaitable[Figures]]

ANSWER_S_MAX = 120.0


async def run_oracles(part: str, oracles: Sequence[Oracle], say: Say, only: tuple[str, ...], seed: int) -> dict[str, Any]:
    """All oracles (or those named in ``only``) in turn; every figure with its bound beside it, and ``ok``.

    Raises:
        ConfigError: ``only`` names one that is not there.
    """
    known = [oracle.__name__.removeprefix("prove_") for oracle in oracles]
    for name in only:
        if name not in known:
            raise ConfigError(f"--only {name}: no such oracle; use one of {', '.join(known)}")
    result: dict[str, Any] = {"part": part, "seed": seed}
    bounds: dict[str, bool] = {}
    for name, oracle in zip(known, oracles, strict=True):
        if only and name not in only:
            continue
        started_s = time.monotonic()
        say(f"{name}: running")
        with tempfile.TemporaryDirectory(prefix="carpool-prove-", ignore_cleanup_errors=True) as temporary:
            figures, held = await oracle(Path(temporary), random.Random(seed), say)  # noqa: S311 - workloads, not secrets
        result |= figures
        bounds |= held
        missed = [bound for bound, ok in held.items() if not ok]
        say(f"{name}: {'held' if not missed else 'MISSED ' + ', '.join(missed)} in {time.monotonic() - started_s:.0f} s")
    result["bounds"] = bounds
    result["ok"] = all(bounds.values())
    return result


@contextlib.asynccontextmanager
async def running_pool(
    directory: Path,
    services: str,
    device: str,
    *flags: str,
    scheduler_flags: Sequence[str] = (),
    gateway_flags: Sequence[str] = (),
    more: Mapping[str, Sequence[str]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Pool]:
    """A running pool with ``services`` (YAML) applied. ``flags`` are the worker's; ``more`` parts run beside the usual."""
    options = PoolOptions(
        state_dir=directory / "state",
        devices=(device,),
        worker_flags=flags,
        scheduler_flags=tuple(scheduler_flags),
        gateway_flags=tuple(gateway_flags),
        environment=dict(environment or {}),
        more={name: tuple(words) for name, words in (more or {}).items()},
    )
    async with Pool(options) as pool:
        await apply(pool, directory, services)
        yield pool


async def apply(pool: Pool, directory: Path, services: str) -> list[dict[str, Any]]:
    """Applies ``services`` (YAML); returns what is told of each."""
    path = directory / "services.yaml"
    path.write_text(services)
    records = await asyncio.to_thread(records_of, [path])
    return await control(pool.nats_url, "apply", {"records": [msgspec.to_builtins(record) for record in records]}) or []


def service(name: str, source: str, engine: str, *, resources: str = "", strategy: str = "") -> str:
    lines = ["---", "apiVersion: llm.serving/v1", "kind: ModelService", f"metadata: {{name: {name}}}", "spec:"]
    lines += [f"  source: {source}"] if source else []
    lines += [f"  resources: {{{resources}}}"] if resources else []
    lines += [f"  strategy: {{{strategy}}}"] if strategy else []
    return "\n".join([*lines, f"  engine: {{{engine}}}", ""])


def simulated(name: str, *, load_s: float, baseline_gb: float, slots: int = 8, options: str = "") -> str:
    more = f", {options}" if options else ""
    engine = (
        f"type: simulated, max_num_seqs: {slots}, max_context_len: 2048, kv_cache_bytes: 64MiB, "
        f"options: {{load_s: {load_s}{more}}}"
    )
    return service(name, "", engine, resources=f"baseline_memory_gb: {baseline_gb}", strategy="max_wait_s: 110")


def client_of(pool: Pool, *, key: str = "") -> httpx.AsyncClient:
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(
        base_url=f"{pool.http_url}/v1", timeout=ANSWER_S_MAX, limits=limits, trust_env=False, headers=headers
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it; times are monotonic seconds."""

    model: str
    status: int
    text: str
    finish_reason: str
    attempt: int
    begun_s: float
    first_s: float
    ended_s: float
    error: str = ""
    cached_tokens: int = 0
    """Of the prompt; only answers that are not streamed tell."""
    pieces: int = 0
    """Of text, as they were streamed."""
    request: str = ""
    replica: str = ""

    @property
    def whole(self) -> bool:
        """Answered to its regular end."""
        return self.status == 200 and self.finish_reason in ("stop", "length") and not self.error


async def ask(client: httpx.AsyncClient, model: str, prompt: str, tokens: int, *, stream: bool, **extra: Any) -> Answer:
    """Sends one chat request and reads its answer to the end; never raises for what the server does."""
    import httpx

    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": stream,
        **extra,
    }
    begun_s = time.monotonic()
    status, attempt, first_s, finish, error, cached, request, replica = 0, 0, 0.0, "", "", 0, "", ""
    text: list[str] = []
    try:
        async with client.stream("POST", "/chat/completions", json=body) as response:
            status = response.status_code
            attempt = int(response.headers.get("x-carpool-attempt", 1))
            request, replica = (response.headers.get(f"x-carpool-{what}", "") for what in ("request-id", "replica"))
            if not stream or status != 200:
                content = msgspec.json.decode(await response.aread())
                first_s = time.monotonic()
                if status == 200:
                    text.append(content["choices"][0]["message"]["content"] or "")
                    finish = content["choices"][0]["finish_reason"] or ""
                    cached = (content["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                else:
                    error = str(content["error"]["message"])
            else:
                async for line in response.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    chunk = msgspec.json.decode(line[6:])
                    error = str(chunk["error"]["message"]) if "error" in chunk else error
                    for choice in chunk.get("choices", ()):
                        finish = choice.get("finish_reason") or finish
                        if choice["delta"].get("content"):
                            first_s = first_s or time.monotonic()
                            text.append(choice["delta"]["content"])
    except httpx.HTTPError as problem:
        error = f"{type(problem).__name__}: {problem}"
    ended_s = time.monotonic()
    first_s = first_s or ended_s
    return Answer(
        model, status, "".join(text), finish, attempt, begun_s, first_s, ended_s, error, cached, len(text), request, replica
    )


@dataclass(slots=True)
class Heard:
    """What a bus carried: commands to workers with their (monotonic) times, once per operation, and alerts."""

    commands: dict[str, tuple[float, WorkerCommand]] = field(default_factory=dict)
    alerts: list[Alert] = field(default_factory=list)

    def hear(self, message: BusMessage) -> None:
        """Keeps one message of either kind."""
        if message.subject.startswith(f"{names.PREFIX}.alert."):
            self.alerts.append(codec.decode(message.payload, Alert))
            return
        command: WorkerCommand = codec.decode(message.payload, WorkerCommand)  # type: ignore[arg-type]
        self.commands.setdefault(command.operation, (time.monotonic(), command))

    def loads(self, model: str = "") -> list[tuple[float, LoadModel]]:
        """Load commands, in order; of one model if it is named."""
        return [
            (at_s, command)
            for at_s, command in self.commands.values()
            if isinstance(command, LoadModel) and model in ("", command.record.name)
        ]


@contextlib.asynccontextmanager
async def hearing(pool: Pool) -> AsyncIterator[Heard]:
    """A wiretap on the pool's bus."""
    from subjects.nats.bus import NatsBus

    heard = Heard()
    bus = await NatsBus.connect([pool.nats_url], name="carpool-wiretap")
    try:
        for subject in ("cmd.*", "alert.>"):
            await bus.subscribe(f"{names.PREFIX}.{subject}", heard.hear)
        yield heard
    finally:
        await bus.close()


async def until(holds: Callable[[], Awaitable[bool]], limit_s: float) -> bool:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if await holds():
            return True
        await asyncio.sleep(0.05)
    return False


async def states(pool: Pool, model: str) -> list[str]:
    rows = await control(pool.nats_url, "get", {"what": "replicas"}) or []
    return [row["state"] for row in rows if row["model"] == model]


async def unload(pool: Pool, model: str) -> None:
    async def gone() -> bool:
        return not await states(pool, model)

    await control(pool.nats_url, "unload", {"model": model})
    if not await until(gone, 60):
        raise TimeoutError(f"{model} was not unloaded within 60 s")
