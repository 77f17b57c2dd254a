"""What the oracles of the KV tiers share: documents and questions, the pool they ask, and moving the model around in it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from ops.control import control
from ops.models import records_of
from ops.prove.greedy_reference import reference
from ops.prove.workplace import Answer, Say, apply, ask, client_of, running_pool, service, unload, until
from ops.supervisor import Pool

if TYPE_CHECKING:
    import httpx

MODEL = "real"
TOKENS = 16
CONTEXT_LEN = 1024
_ENGINE = (
    f"type: vllm, dtype: float32, max_num_seqs: 4, max_context_len: {CONTEXT_LEN}, kv_cache_bytes: 256MiB, block_size: 32"
)
READY_S_MAX = 120.0
SETTLED_S_MAX = 30.0

_WHO = (
    "The harbour master",
    "Her sister",
    "A young engineer",
    "The old teacher",
    "Nobody in the village",
    "The night train",
)
_DID = ("repaired", "painted", "forgot", "measured", "sold", "described", "carried", "counted", "hid", "borrowed")
_WHAT = ("the lighthouse", "seven boats", "a map of the coast", "the brass clock", "three letters", "the stone bridge")
_WHEN = ("before the storm", "in early spring", "on a Sunday", "after the war", "at low tide", "twice a year", "at noon")
_QUESTIONS = (
    "What is this text about?",
    "Who is named first in the text?",
    "Write a title for the text.",
    "Continue the text with one sentence.",
    "Which objects are mentioned?",
    "When do these things happen?",
)


def document(rng: random.Random, sentences: int) -> str:
    """So many sentences of about ten tokens each; no two of its starts are alike but by chance."""
    return " ".join(
        f"{rng.choice(_WHO)} {rng.choice(_DID)} {rng.choice(_WHAT)} {rng.choice(_WHEN)}." for _ in range(sentences)
    )


def questions(rng: random.Random, count: int) -> list[str]:
    """Different ones."""
    return rng.sample(_QUESTIONS, count)


def services_of(*, replicas: int = 0, codec: str = "none", name: str = MODEL) -> str:
    """The model of the proofs; ``replicas`` are kept ready; 0: it is loaded when asked for."""
    strategy = f"min_replicas: {replicas}, max_replicas: 2, max_wait_s: 110"
    return service(name, "builtin:smollm2-135m-instruct", _ENGINE, strategy=strategy)


async def right_answers(directory: Path, prompts: Sequence[str]) -> tuple[dict[str, str], float]:
    """By prompt what vLLM alone answers, and the smallest distance between a chosen token and the next best."""
    path = directory / "reference.yaml"
    path.write_text(services_of())
    record = (await asyncio.to_thread(records_of, [path]))[0]
    texts, margin = await reference(record, prompts, TOKENS, directory)
    return dict(zip(prompts, texts, strict=True)), margin


@dataclass(slots=True)
class Tally:
    """What was asked, and what was wrong with it."""

    say: Say
    right: dict[str, str]
    compared: int = 0
    wrong: int = 0
    slowest_s: float = 0.0
    slowest: str = ""
    cached: dict[str, int] = field(default_factory=dict)
    """By phase: the fewest cached tokens of its answers."""

    def add(self, phase: str, prompt: str, answer: Answer) -> None:
        self.compared += 1
        took_s = answer.ended_s - answer.begun_s
        if took_s > self.slowest_s:
            self.slowest_s, self.slowest = took_s, phase
        self.cached[phase] = min(self.cached.get(phase, CONTEXT_LEN), answer.cached_tokens)
        if answer.text != self.right[prompt]:
            self.wrong += 1
            self.say(f"{phase}: {answer.text!r} ({answer.error or answer.status}) for {self.right[prompt]!r}")


class Place:
    """A running pool with the model in it."""

    def __init__(self, directory: Path, pool: Pool, client: httpx.AsyncClient, tally: Tally) -> None:
        self.directory = directory
        self.pool = pool
        self.client = client
        self.tally = tally

    async def ask(self, phase: str, *prompts: str) -> list[Answer]:
        """Asks one after the other and compares."""
        answers = []
        for prompt in prompts:
            answer = await ask(self.client, MODEL, prompt, TOKENS, stream=False)
            self.tally.add(phase, prompt, answer)
            answers.append(answer)
        return answers

    async def replicas(self) -> list[dict[str, str]]:
        """Rows of the model's replicas that serve."""
        rows = await control(self.pool.nats_url, "get", {"what": "replicas"}) or []
        return [row for row in rows if row["model"] == MODEL and row["state"] == "ready"]

    async def until_ready(self, count: int) -> list[dict[str, str]]:
        """Waits for so many ready replicas.

        Raises:
            TimeoutError: they do not come.
        """

        async def there() -> bool:
            return len(await self.replicas()) == count

        if not await until(there, READY_S_MAX):
            raise TimeoutError(f"{count} replicas of {MODEL} were not ready within {READY_S_MAX:.0f} s")
        return await self.replicas()

    async def order(self, verb: str, **argument: object) -> None:
        """One verb of the scheduler."""
        await control(self.pool.nats_url, verb, argument)

    def kill_replica(self, replica: str) -> None:
        """kill -9, by the note that its agent keeps."""
        (note,) = self.directory.glob(f"**/replicas/{replica}.json")
        psutil.Process(msgspec.json.decode(note.read_bytes())["pid"]).kill()

    def nodes(self, part: str = "worker") -> list[psutil.Process]:
        """The KV node of a worker; none while it is started again."""
        found = []
        for child in psutil.Process(self.pool.pid(part)).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "kvcache.node.main" in child.cmdline():
                    found.append(child)
        return found

    async def until_node(self, part: str = "worker", *, other_than: int = 0) -> psutil.Process:
        """The KV node, once it runs.

        Raises:
            TimeoutError: it does not come.
        """

        async def there() -> bool:
            return any(node.pid != other_than for node in self.nodes(part))

        if not await until(there, SETTLED_S_MAX):
            raise TimeoutError(f"{part}: no KV node runs after {SETTLED_S_MAX:.0f} s")
        return self.nodes(part)[0]

    async def until_elsewhere(self, worker: str) -> None:
        """Waits until no replica of the model is on ``worker``.

        Raises:
            TimeoutError: one stays.
        """

        async def gone() -> bool:
            rows = await control(self.pool.nats_url, "get", {"what": "replicas"}) or []
            return all(row["worker"] != worker for row in rows if row["model"] == MODEL)

        if not await until(gone, READY_S_MAX):
            raise TimeoutError(f"{MODEL} still has a replica on {worker} after {READY_S_MAX:.0f} s")

    async def places_with(self, word: str) -> list[str]:
        """Where ``word`` is found: logs, metrics, Redis keys and values."""
        import redis.asyncio

        logs = sorted(self.directory.glob("**/logs/*.log"))
        found = [log.name for log in logs if word in log.read_text(errors="replace")]
        response = await self.client.get(f"{self.pool.http_url}/metrics")
        if word in response.text:
            found.append("/metrics")
        assert self.pool.endpoints is not None
        async with redis.asyncio.from_url(self.pool.endpoints.redis_url, socket_timeout=5.0) as server:
            async for key in server.scan_iter(count=1000):
                value: object
                match await server.type(key):
                    case b"zset":
                        value = await server.zrange(key, 0, -1)
                    case b"hash":
                        value = await server.hgetall(key)
                    case b"set":
                        value = await server.smembers(key)
                    case _:
                        value = await server.dump(key)
                if word in repr((key, value)):
                    found.append(f"Redis key {key!r}")
        return found

    async def reload(self) -> None:
        """Unloads the model, so that the next request starts an engine without any KV."""
        await unload(self.pool, MODEL)


@contextlib.asynccontextmanager
async def running_place(
    directory: Path, tally: Tally, services: str, *flags: str, key: str = "", **more: Any
) -> AsyncIterator[Place]:
    """A pool with room for two replicas on each worker; ``flags`` are the first worker's."""
    pooled = running_pool(directory, services, "cpu:6GiB", "--threads", "1", *flags, **more)
    async with pooled as pool, client_of(pool, key=key) as client:
        yield Place(directory, pool, client, tally)


async def apply_replicas(place: Place, replicas: int) -> None:
    """Applies the model anew, with so many replicas kept ready."""
    await apply(place.pool, place.directory, services_of(replicas=replicas))
