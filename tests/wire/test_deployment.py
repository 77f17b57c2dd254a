"""Deployments on a real nats-server: names with the same files, kept apart by their shape or sharing a queue."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest_asyncio

from profiles.deployment import with_deployment
from subjects import names
from subjects.ids import DeploymentKey, ReplicaId
from subjects.messages import LoadModel, ModelRecord, PoolModel, ReplicaState
from tests.core.test_deployment import as_before, record
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.gateway_pool import Pool, Run, open_pool
from tests.wire.gateway_pool import record as served_record
from tests.wire.replica_ends import AgentEnd, simulated_record
from tests.wire.scripted_agent import ScriptedAgent
from tests.wire.test_scheduler import Rig, rig_on
from workers.control_messages import Ready


@pytest_asyncio.fixture
async def pool(shared_nats_server: NatsServer) -> AsyncIterator[Pool]:
    """A gateway."""
    async with open_pool(shared_nats_server.url) as pool:
        yield pool
        await pool.clear()


def shaped(base: ModelRecord, name: str, **changes: object) -> ModelRecord:
    """Another name of the same files."""
    return with_deployment(msgspec.structs.replace(base, name=name, deployment=DeploymentKey(""), **changes))


async def test_a_long_prompt_is_served_by_the_replica_that_has_the_context(pool: Pool) -> None:
    """``a-short`` and ``long`` have the same files: 1,021 tokens go to the replica of 2,048, and requests to the
    short one wait for a replica of their own, whatever the long one has free."""
    base = simulated_record()
    short, long = shaped(base, "a-short", max_context_len=512, max_wait_s=1.0), shaped(base, "long", max_context_len=2048)
    await pool.register(short, long)
    process = await AgentEnd(long, pool.nats_url).start()
    try:
        await process.wait_for(Ready)
        prompt = [{"role": "user", "content": "x" * 4 * 1013}]
        answer = (await pool.chat("long", messages=prompt, max_tokens=8)).json()
        assert (answer["usage"]["completion_tokens"], answer["usage"]["prompt_tokens"] > 1000) == (8, True)
        assert (await pool.chat("a-short", messages=prompt, max_tokens=8)).status_code == 400
        waited = await pool.chat("a-short", max_tokens=8)
        assert (waited.status_code, waited.json()["error"]["code"]) == (503, "no_capacity")
        refusal = PoolModel(
            model_hash=short.model_hash, deployment=short.deployment, name="a-short", refusal="it is too large"
        )
        await pool.publish_digest(ready=[long], models=[refusal])
        assert (await pool.chat("a-short", max_tokens=8)).status_code == 503
        assert (await pool.chat("long", max_tokens=8)).status_code == 200
    finally:
        await process.stop()


async def test_names_of_one_deployment_share_a_replica_and_keep_their_parsers(pool: Pool) -> None:
    """The grant brings how the asked name reads answers; no parser is said too."""
    base = served_record("plain")
    tools = shaped(base, "tools", engine_options={"tool_call_parser": "hermes", "reasoning_parser": "qwen3"})
    plain = shaped(base, "plain")
    await pool.register(plain, tools)
    replica = await pool.replica(tools, answer_with_its_parser)
    said = [(await pool.chat(name)).json()["choices"][0]["message"]["content"] for name in ("plain", "tools", "plain")]
    assert said == ["none", "hermes qwen3", "none"]
    assert len(replica.runs) == 3


async def answer_with_its_parser(run: Run) -> None:
    """The parsers that the grant names."""
    assert run.grant.options is not None
    await run.say(" ".join(str(value) for value in run.grant.options.values()) or "none")
    await run.end()


# ------------------------------------------------------------------------------------------------------------- scheduler


async def test_apply_says_who_shares_replicas(nats_server: NatsServer, tmp_path: Path) -> None:
    """Of one deployment, and not of another tenant's; ``get`` and ``explain`` show which it is."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await rig.scheduler()
        await until(lambda: scheduler.core.leads, "leadership")
        a, b, red = record("a"), record("b", min_replicas=0), record("red", tenant="red")
        notes = {row["name"]: row["note"] for row in await rig.apply(a, b, red)}
        assert notes == {"a": "shares replicas with b", "b": "shares replicas with a", "red": ""}
        rows = {row["name"]: row["deployment"] for row in await rig.control("get", {"what": "models"})}
        assert rows["a"] == rows["b"] == a.deployment[:16] and rows["red"] == red.deployment[:16] != rows["a"]
        explained = await rig.control("explain", {"what": "b"})
        assert explained["deployment"] == f"{a.deployment[:16]}, shared with a"


class OlderAgent(ScriptedAgent):
    """It knows no deployments."""

    def _put(self, command: LoadModel, replica: ReplicaId, state: ReplicaState) -> None:
        super()._put(command, replica, state)
        self.replicas[replica] = msgspec.structs.replace(self.replicas[replica], deployment=DeploymentKey(""))


async def older(rig: Rig) -> ScriptedAgent:
    """The rig's worker, as an older version of it."""
    await rig.agent.stop()
    rig.agent = OlderAgent(rig.bus, memory_bytes=rig.agent.memory_bytes)
    await rig.agent.start()
    return rig.agent


async def test_an_older_registry_and_worker_go_on_under_a_new_scheduler(nats_server: NatsServer, tmp_path: Path) -> None:
    """The bucket's record of before gets its key; the replica that the worker has stays and serves, over a takeover too."""
    async with rig_on(nats_server, tmp_path) as rig:
        await until(lambda: rig.bus.connected, "the bus is there")
        agent = await older(rig)
        one = record("a", min_replicas=1)
        await rig.bus.kv_put(names.MODELS_BUCKET, "a", as_before(one))
        first = await rig.scheduler("s")
        await until(lambda: agent.ready == ["a"], "a is loaded")
        assert first.registry.records == {"a": one}
        await rig.end(first)
        second = await rig.scheduler("t")
        await until(
            lambda: second.core.leads and second.core.digests.latest and second.core.digests.latest.replicas,
            "the new leader's digest",
        )
        digest = second.core.digests.latest
        assert digest is not None
        ((told,), (model,)) = digest.replicas, digest.models
        assert (told.deployment, told.state, model.deployment) == (one.deployment, ReplicaState.READY, one.deployment)
        assert [type(command) for command in agent.commands] == [LoadModel]
        assert len(second.core.pool.open_replicas(one.deployment)) == 1
