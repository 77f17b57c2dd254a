"""Costs over processes: a replica measures, a scheduler keeps what it measured over restarts and losses (PRO-4)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from broker.scheduler.costs_sync import KEPT_S_MAX
from broker.scheduler.shell import Scheduler
from profiles.costs import work_s
from subjects import names
from subjects.codec import decode, encode
from subjects.ids import ReplicaId, RequestId
from subjects.messages import (
    CostPoint,
    CostsMeasured,
    EngineType,
    KeptCosts,
    ModelRecord,
    PoolDigest,
    PoolReplica,
    ReplicaState,
    StepCosts,
    StepSums,
    Task,
)
from subjects.nats.bus import NatsBus
from tests.core.scheduler_world import record
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.replica_ends import AgentEnd, ScriptedGateway, simulated_record
from tests.wire.test_scheduler import Rig, rig_on
from workers import measuring
from workers.control_messages import Load, Measured, Ready
from workers.engines.base import Engine, EngineInfo, EngineLoad, EngineRequest

POINTS = (
    CostPoint(batch=1, input_tokens=64, sums=StepSums(steps=1, prompt_tokens=64, prompt_tokens2=4096, busy_s=0.07)),
    CostPoint(batch=1, input_tokens=64, decodes=True, sums=StepSums(steps=10, requests=10, context_tokens=700, busy_s=0.5)),
)
TIMES: dict[str, float] = {"prefill_token_s": 1e-4, "step_const_s": 0.004, "step_request_s": 1e-3}


def _model() -> ModelRecord:
    return record("m", engine_type=EngineType.VLLM)


async def _until_kept(rig: Rig) -> None:
    async with asyncio.timeout(20.0):
        while not await rig.bus.kv_entries(names.COSTS_BUCKET):
            await asyncio.sleep(0.02)


async def _leads(scheduler: Scheduler) -> None:
    """It leads, and knows the device, by which the part of the costs is estimated that the points leave open."""
    await until(lambda: scheduler.core.leads and bool(scheduler.core.pool.devices(usable=True)), "leadership and a device")


async def _row(rig: Rig) -> dict[str, Any]:
    (row,) = [row for row in await rig.control("get", {"what": "costs"}) if row["kind"] == ""]
    return dict(row)


async def test_measurements_outlive_schedulers_and_lost_stores(nats_server: NatsServer, tmp_path: Path) -> None:
    """Measured once: a scheduler that is started again knows it, also when the bucket has lost it; and so does another
    scheduler, from the bucket alone."""
    async with rig_on(nats_server, tmp_path) as rig:
        first = await rig.scheduler()
        await _leads(first)
        await rig.apply(_model())
        event = CostsMeasured(
            worker=rig.agent.worker,
            replica=ReplicaId("m-1"),
            deployment=_model().deployment,
            model_hash=_model().model_hash,
            engine="vllm-1",
            points=POINTS,
        )
        await rig.bus.publish(names.worker_events(rig.agent.worker), encode(event))

        await _until_kept(rig)
        row = await _row(rig)
        assert (row["source"], row["points"], row["engine"]) == ("measured", 2, "vllm-1")
        assert row["costs"]["step_const_s"] + row["costs"]["step_request_s"] == pytest.approx(0.05, rel=0.02)
        await rig.end(first)
        for entry in await rig.bus.kv_entries(names.COSTS_BUCKET):
            await rig.bus.kv_delete(names.COSTS_BUCKET, entry.key)
        again = await rig.scheduler()
        await _leads(again)
        assert (await _row(rig))["costs"] == row["costs"]
        await _until_kept(rig)
        await rig.end(again)
        other = await rig.scheduler("other")
        await _leads(other)
        told = await _row(rig)
        assert (told["source"], told["costs"]) == ("measured", row["costs"])
        await rig.end(other)
        (entry,) = await rig.bus.kv_entries(names.COSTS_BUCKET)
        old = msgspec.structs.replace(decode(entry.value, KeptCosts), at_unix_s=time.time() - KEPT_S_MAX - 60.0)
        await rig.bus.kv_put(names.COSTS_BUCKET, entry.key, encode(old))
        await _leads(await rig.scheduler("third"))
        assert all(row["source"] == "estimated" for row in await rig.control("get", {"what": "costs"}))
        assert not await rig.bus.kv_entries(names.COSTS_BUCKET)


class _Silent:
    """An engine that takes requests and never answers."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def load(self) -> EngineLoad:
        return EngineLoad(running=0, waiting=0, kv_pages_free=64, sums=StepSums())

    def add(self, request: EngineRequest) -> None:
        pass

    def abort(self, request: RequestId, attempt: int) -> None:
        self.aborted.append(request)


async def test_a_point_that_is_never_over_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests end, it counts as failed, and the next point begins from nothing."""
    monkeypatch.setattr(measuring, "POINT_S_MAX", 0.05)
    engine = _Silent()
    info = EngineInfo(4, 64, 16, 512, gives_token_ids=False, continues=False)
    prober = measuring.Prober(cast("Engine", engine), info, Task.GENERATE)
    for failures in (1, 2):
        assert await prober.point(2, 16) == []
        assert prober.failures == failures and len(engine.aborted) == 2 * failures


@pytest.fixture
async def replica_stack(shared_nats_server: NatsServer) -> AsyncIterator[tuple[NatsBus, AsyncExitStack]]:
    """A bus, and a stack for what is ended with the test."""
    async with AsyncExitStack() as stack:
        bus = await NatsBus.connect(shared_nats_server.url, name="scripted-gateway")
        stack.push_async_callback(bus.close)
        yield bus, stack


async def _replica(
    bus: NatsBus, stack: AsyncExitStack, model: ModelRecord, url: str, **fields: object
) -> tuple[AgentEnd, ScriptedGateway]:
    gateway = await ScriptedGateway(bus, model).start()
    stack.push_async_callback(gateway.stop)
    agent = await AgentEnd(model, url, **fields).start()
    stack.push_async_callback(agent.stop)
    await agent.wait_for(Ready)
    return agent, gateway


def _digest(agent: AgentEnd, measure: int) -> bytes:
    spec = agent.spec
    row = PoolReplica(
        replica=spec.replica,
        model_hash=spec.record.model_hash,
        worker=spec.worker,
        device=spec.device,
        state=ReplicaState.READY,
        measure=measure,
    )
    return encode(PoolDigest(epoch=1, sequence=1, replicas=(row,)))


def _points(agent: AgentEnd) -> list[CostPoint]:
    return [point for message in agent.heard if isinstance(message, Measured) for point in message.points]


async def test_a_replica_measures_before_it_serves(
    replica_stack: tuple[NatsBus, AsyncExitStack], shared_nats_server: NatsServer
) -> None:
    """At least one prompt and one batch, by the engine's own account of what its steps did."""
    agent, _ = await _replica(*replica_stack, simulated_record(**TIMES), shared_nats_server.url, measure=True)
    ready = next(index for index, message in enumerate(agent.heard) if isinstance(message, Ready))
    measured = next(index for index, message in enumerate(agent.heard) if isinstance(message, Measured))
    assert measured < ready
    prefill, decode = _points(agent)[:2]
    assert (prefill.batch, prefill.input_tokens, prefill.sums.prompt_tokens) == (2, 16, 32)
    assert decode.decodes and decode.sums.requests > decode.sums.steps
    for point in (prefill, decode):
        assert point.sums.busy_s == pytest.approx(work_s(StepCosts(**TIMES), point.sums))


async def test_idle_moments_are_measured_and_requests_go_first(
    replica_stack: tuple[NatsBus, AsyncExitStack], shared_nats_server: NatsServer
) -> None:
    """Points come while nothing runs; none does while a request does; at the end the replica says that it has them all."""
    model = simulated_record(**TIMES, max_context_len=600)
    agent, gateway = await _replica(*replica_stack, model, shared_nats_server.url)
    bus, _ = replica_stack
    assert not _points(agent)
    await bus.publish(names.POOL, _digest(agent, 4))
    await until(lambda: len(_points(agent)) >= 2, "a point")
    _, answer = await gateway.submit(tokens=150, content="12345678")
    await until(lambda: bool(answer.deltas), "the answer begins")
    before = len(_points(agent))
    await until(lambda: answer.end is not None, "the answer")
    assert answer.end is not None and answer.end.failure is None
    assert len(_points(agent)) <= before
    await until(lambda: any(isinstance(one, Measured) and one.whole for one in agent.heard), "all points", within_s=30.0)
    assert {point.batch for point in _points(agent)} == {1, 2, 4}
    assert len({point.input_tokens for point in _points(agent)}) >= 3
    load = await agent.wait_for(Load)
    assert load.sums is not None and load.sums.steps > 150
