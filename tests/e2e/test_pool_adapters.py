"""LoRA adapters in a whole pool with SmolLM2 on vLLM: loaded on demand, evicted, added, removed and replaced, while one
replica of the base runs on (ING-1, ING-3, SCH-8)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import pytest_asyncio

from ops.control import control
from ops.models import records_of
from ops.supervisor import Pool, PoolOptions
from profiles.smollm2 import ensure_smollm2
from subjects import names
from subjects.bus import BusMessage
from subjects.nats.bus import NatsBus
from tests.adapters import make_adapter

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

HI: Any = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class Stage:
    """The pool, a client, the worker's events, and every replica that has answered."""

    pool: Pool
    sdk: openai.AsyncOpenAI
    directory: Path
    base: Path
    replicas: set[str]
    events: list[bytes]

    def adapter(self, name: str, seed: int) -> None:
        """Files of an adapter."""
        make_adapter(self.base, self.directory / name, seed=seed, strength=0.25)

    async def apply(self, adapters: Sequence[str]) -> None:
        """What a person does after a change of the model's file."""
        listed = ", ".join(f"{{name: {name}, source: {name}, aliases: [team/{name}]}}" for name in adapters)
        path = self.directory / "smollm2.yaml"
        path.write_text(f"""
apiVersion: llm.serving/v1
kind: ModelService
metadata: {{name: smollm2}}
spec:
  source: {self.base}
  adapters_max: 1
  adapters: [{listed}]
  engine: {{type: vllm, dtype: float32, max_context_len: 512, max_num_seqs: 4, kv_cache_bytes: 32MiB}}
""")
        records = await asyncio.to_thread(records_of, [path])
        await control(self.pool.nats_url, "apply", {"records": [msgspec.to_builtins(record) for record in records]})

    async def say(self, model: str) -> str:
        """The greedy answer of a model or adapter."""
        reply = await self.sdk.chat.completions.with_raw_response.create(
            model=model, messages=HI, temperature=0, max_tokens=12
        )
        self.replicas.add(reply.headers["x-carpool-replica"])
        answer = reply.parse()
        assert answer.model == model
        return answer.choices[0].message.content or ""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """A pool of one CPU device with the model and one adapter applied."""
    directory = tmp_path_factory.mktemp("pool-adapters")
    base = await asyncio.to_thread(ensure_smollm2)
    async with Pool(PoolOptions(state_dir=directory / "state", devices=("cpu:3GiB",))) as pool:
        bus = await NatsBus.connect([pool.nats_url], name="events")
        url = f"{pool.http_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as sdk:
            stage = Stage(pool, sdk, directory, base, set(), [])

            def hear(message: BusMessage) -> None:
                stage.events.append(message.payload)

            await bus.subscribe(names.ALL_WORKER_EVENTS, hear)
            stage.adapter("a", seed=1)
            await stage.apply(["a"])
            yield stage
        await bus.close()


async def test_adapters_change_under_a_replica_that_runs_on(stage: Stage) -> None:
    """Base and two adapters say three things with room for one adapter, each the same again after an eviction; one added,
    replaced, removed or broken later changes its own requests only. One replica answers it all and loads once."""
    base, a = await stage.say("smollm2"), await stage.say("a")
    assert "Paris" in base
    loads = len(stage.events)

    stage.adapter("b", seed=2)
    await stage.apply(["a", "b"])
    b = await stage.say("b")
    assert len({base, a, b}) == 3
    assert [await stage.say(name) for name in ("a", "team/b", "smollm2", "a")] == [a, b, base, a]
    together = await asyncio.gather(*(stage.say(name) for name in ("b", "smollm2", "a", "b")))
    assert (together[0], together[2], together[3]) == (b, a, b)
    assert [model.id for model in (await stage.sdk.models.list()).data] == ["smollm2", "a", "b"]

    stage.adapter("b", seed=3)
    stage.adapter("c", seed=4)
    await stage.apply(["b", "c"])
    with pytest.raises(openai.NotFoundError):
        await stage.say("a")
    replaced = await stage.say("b")
    assert replaced not in (a, b, base)

    shutil.rmtree(stage.directory / "c")
    with pytest.raises(openai.InternalServerError, match="the files of adapter 'c' are missing on this worker"):
        await stage.say("c")
    assert [await stage.say(name) for name in ("b", "smollm2")] == [replaced, base]

    assert len(stage.replicas) == 1, "the process that answers is the same from first to last"
    assert len(stage.events) == loads, "the worker was told nothing and had nothing to tell"
