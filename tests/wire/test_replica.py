"""A real replica process on a real nats-server; its gateway and its agent are scripted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from subjects import names
from subjects.bus import LOST_PULL_GRACE_S, PULL_EXPIRY_S_MAX
from subjects.codec import encode
from subjects.errors import BusError
from subjects.ids import RequestId, model_key
from subjects.messages import (
    EngineType,
    FailureKind,
    Frames,
    Gone,
    Lane,
    ModelRecord,
    PoolDigest,
    ReplicaState,
    SlaClass,
    Usage,
)
from subjects.nats.bus import NatsBus
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.replica_ends import AgentEnd, ScriptedGateway, simulated_record
from workers.control import EXIT_AGENT_GONE
from workers.control_messages import (
    Concurrency,
    Drain,
    Drained,
    Failed,
    Ping,
    Pong,
    Progress,
    Ready,
    Stop,
)
from workers.core.simulated import expected_answer, expected_token
from workers.replica import EXIT_DECLARED_DEAD, EXIT_FAILED


@dataclass
class Stage:
    """A bus, and what runs on it; everything is ended with the test."""

    url: str
    bus: NatsBus
    started: list[AgentEnd | ScriptedGateway] = field(default_factory=list)

    async def gateway(self, record: ModelRecord) -> ScriptedGateway:
        """A scripted gateway for one model."""
        gateway = await ScriptedGateway(self.bus, record).start()
        self.started.append(gateway)
        return gateway

    async def replica(self, record: ModelRecord, *, ready: bool = True, **fields: object) -> AgentEnd:
        """A replica process with its scripted agent."""
        agent = await AgentEnd(record, self.url, **fields).start()
        self.started.append(agent)
        if ready:
            await agent.wait_for(Ready)
        return agent


async def ensure_queue(bus: NatsBus) -> None:
    """Makes the streams, over a connection that may not know yet that it is broken."""
    while True:
        try:
            return await bus.ensure_queue()
        except BusError:
            await asyncio.sleep(0.1)


StageMaker = Callable[[NatsServer], Awaitable[Stage]]


@pytest.fixture
async def make_stage() -> AsyncIterator[StageMaker]:
    """Makes stages on servers that the test chooses."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(server: NatsServer) -> Stage:
            stage = Stage(server.url, await NatsBus.connect(server.url, name="scripted-gateway"))
            stack.push_async_callback(stage.bus.close)

            async def stop() -> None:
                await asyncio.gather(*(each.stop() for each in stage.started))

            stack.push_async_callback(stop)
            return stage

        yield make


@pytest.fixture
async def stage(make_stage: StageMaker, shared_nats_server: NatsServer) -> Stage:
    """A stage on the server that all tests share."""
    return await make_stage(shared_nats_server)


async def test_one_request_from_ticket_to_usage(stage: Stage) -> None:
    """Load, warm, ready; then pull, claim, frames with every token once, and the engine's own usage (WRK-3, I1)."""
    record = simulated_record()
    gateway, agent = await stage.gateway(record), await stage.replica(record)
    states = [message.state for message in agent.heard if isinstance(message, Progress)]
    assert states == sorted(states, key=[ReplicaState.LOADING, ReplicaState.WARMING].index)
    assert set(states) == {ReplicaState.LOADING, ReplicaState.WARMING}
    request, answer = await gateway.submit(tokens=20, content="12345678")
    await until(lambda: answer.end is not None)
    assert answer.text == expected_answer(request, 20)
    assert answer.end is not None
    assert (answer.end.finish_reason, answer.end.usage) == ("length", Usage(prompt_tokens=6, completion_tokens=20))
    assert [claim.replica for claim in gateway.claims] == [agent.spec.replica]
    await until(lambda: agent.load is not None and agent.load.running == 0 and agent.load.idle_s > 0)


async def test_64_requests_at_once(stage: Stage) -> None:
    """Over 8 slots, in all lanes: each answer is whole, claimed once, and one message carries deltas of many."""
    record = simulated_record(slots=8, kv_pages=20_000, max_context_len=32_000)
    gateway, _ = await stage.gateway(record), await stage.replica(record)
    lanes = [Lane.SMALL, Lane.MEDIUM, Lane.LARGE]
    submitted = [await gateway.submit(tokens=10 + index % 7, lane=lanes[index % 3]) for index in range(64)]
    await until(lambda: all(answer.end is not None for _, answer in submitted), within_s=30)
    for index, (request, answer) in enumerate(submitted):
        assert answer.text == expected_answer(request, 10 + index % 7)
        assert answer.granted == 1
    assert len(gateway.claims) == 64
    assert max(len(frames.deltas) for frames in gateway.frames) > 1


async def test_choices_of_one_request(stage: Stage) -> None:
    """n=3: three indices, each with its own tokens and finish reason (J2)."""
    record = simulated_record()
    gateway, _ = await stage.gateway(record), await stage.replica(record)
    request, answer = await gateway.submit(tokens=4, n=3)
    await until(lambda: answer.end is not None)
    for choice in range(3):
        mine = [delta for delta in answer.deltas if delta.choice == choice]
        assert "".join(delta.text for delta in mine) == expected_answer(request, 4, choice)
        assert [delta.finish_reason for delta in mine if delta.finish_reason] == ["length"]


async def test_cancel_frees_the_slot(stage: Stage) -> None:
    """A cancel in mid stream aborts in the engine within a second: the one slot serves the next request (A1, A4)."""
    record = simulated_record(slots=1)
    gateway, agent = await stage.gateway(record), await stage.replica(record)
    request, answer = await gateway.submit(tokens=5000, token_s=0.01)
    await until(lambda: len(answer.deltas) > 3)
    await gateway.cancel(request)
    _, following = await gateway.submit(tokens=2)
    await until(lambda: following.end is not None)
    seen = len(answer.deltas)
    await asyncio.sleep(0.3)
    assert len(answer.deltas) == seen < 1000
    assert b"aborted in the engine" in agent.stderr


async def test_a_request_that_held_does_not_name_is_aborted(stage: Stage) -> None:
    """A lost ``Cancel`` costs nothing but 0.4 s: two ``Held`` without its name end a request."""
    record = simulated_record(slots=1)
    gateway, _ = await stage.gateway(record), await stage.replica(record)
    _, answer = await gateway.submit(tokens=5000, token_s=0.01)
    await until(lambda: len(answer.deltas) > 3)
    answer.named = False
    _, following = await gateway.submit(tokens=2)
    await until(lambda: following.end is not None)


async def test_silence_of_the_gateway_aborts(stage: Stage) -> None:
    """A gateway that says nothing for 2 s is dead: what it asked for is not generated any more; others go on."""
    record = simulated_record(slots=4)
    silent, alive = await stage.gateway(record), await stage.gateway(record)
    agent = await stage.replica(record)
    _, lost = await silent.submit(tokens=20_000, token_s=0.005)
    _, kept = await alive.submit(tokens=20_000, token_s=0.005)
    await until(lambda: len(lost.deltas) > 3 and len(kept.deltas) > 3)
    await until(lambda: agent.load is not None and agent.load.running == 2)
    silent.says_held = False
    await until(lambda: agent.load is not None and agent.load.running == 1)
    seen = len(kept.deltas)
    await until(lambda: len(kept.deltas) > seen + 5)


async def test_lost_frames_are_sent_again(stage: Stage) -> None:
    """Lost messages in mid stream are asked for again; a lost finish comes again by itself, since it leaves no gap."""
    record = simulated_record()
    gateway, _ = await stage.gateway(record), await stage.replica(record)
    numbers = iter(range(10**9))
    gateway.drop_frames = lambda frames: bool(frames.deltas) and next(numbers) % 4 == 1
    submitted = [await gateway.submit(tokens=30) for _ in range(4)]
    await until(lambda: all(answer.end is not None for _, answer in submitted))
    assert [answer.text for _, answer in submitted] == [expected_answer(request, 30) for request, _ in submitted]
    finishes: list[int] = []

    def drop_first_finish(frames: Frames) -> bool:
        if any(delta.end for delta in frames.deltas):
            finishes.append(frames.sequence)
        return len(finishes) == 1

    gateway.drop_frames = drop_first_finish
    request, answer = await gateway.submit(tokens=3)
    await until(lambda: answer.end is not None)
    assert answer.text == expected_answer(request, 3)
    assert len(finishes) >= 2


async def test_a_second_grant_does_not_run_twice(stage: Stage) -> None:
    """The same attempt, published twice, is granted twice to its holder and runs once (L5)."""
    record = simulated_record(slots=4)
    gateway, agent = await stage.gateway(record), await stage.replica(record)
    request, answer = await gateway.submit(tokens=60, token_s=0.02)
    await until(lambda: answer.granted == 1 and len(answer.deltas) > 2)
    await gateway.publish(request, publication=2)
    running: list[int] = []
    while answer.end is None:
        running.append(agent.load.running if agent.load else 0)
        await asyncio.sleep(0.05)
    assert max(running) == 1
    assert answer.text == expected_answer(request, 60)
    assert answer.repeats == 0
    following, second = await gateway.submit(tokens=2)
    await until(lambda: second.end is not None)
    assert second.text == expected_answer(following, 2)


async def test_a_large_body_comes_in_parts(stage: Stage) -> None:
    """A body of over 1 MB is granted in parts; the engine counts every byte of it."""
    record = simulated_record(kv_pages=50_000)
    gateway, _ = await stage.gateway(record), await stage.replica(record)
    content = "x" * (1 << 20)
    request, answer = await gateway.submit(tokens=2, content=content, lane=Lane.LARGE)
    await until(lambda: answer.end is not None)
    assert answer.text == expected_answer(request, 2)
    assert answer.end is not None
    assert answer.end.usage == Usage(prompt_tokens=len(content) // 4 + 4, completion_tokens=2)
    assert sorted(claim.part for claim in gateway.claims) == [0, 1, 2, 3, 4]


async def test_drain_waits_for_confirmation(stage: Stage) -> None:
    """``Drained`` comes only when every request was confirmed, its finish included; then nothing is pulled (D1, D2)."""
    record = simulated_record()
    gateway, agent = await stage.gateway(record), await stage.replica(record)
    gateway.confirms = False
    request, answer = await gateway.submit(tokens=10)
    await until(lambda: len(answer.deltas) > 2)
    agent.send(Drain(timeout_s=30))
    await until(lambda: answer.end is not None)
    assert answer.text == expected_answer(request, 10)
    await asyncio.sleep(1.0)
    assert not any(isinstance(message, Drained) for message in agent.heard)
    gateway.confirms = True
    assert (await agent.wait_for(Drained)).given_back == 0
    _, later = await gateway.submit(tokens=2)
    await asyncio.sleep(1.5)
    assert later.granted == 0
    agent.send(Stop())
    assert await agent.exit_code() == 0


async def test_a_drain_past_its_bound_gives_back(stage: Stage) -> None:
    """What does not finish in the bound is given back, so that the gateway can go on elsewhere (D6, C8)."""
    record = simulated_record()
    gateway, agent = await stage.gateway(record), await stage.replica(record)
    request, answer = await gateway.submit(tokens=20_000, token_s=0.05)
    await until(lambda: len(answer.deltas) > 2)
    agent.send(Drain(timeout_s=0.3))
    assert (await agent.wait_for(Drained)).given_back == 1
    await until(lambda: any(gone.request == request for gone in gateway.gone))


async def test_death_of_the_agent_ends_the_replica(stage: Stage) -> None:
    """When the agent's end closes, as in kill -9, the replica is gone at once (D8)."""
    record = simulated_record()
    gateway, agent = await stage.gateway(record), await stage.replica(record)
    _, answer = await gateway.submit(tokens=20_000, token_s=0.05)
    await until(lambda: len(answer.deltas) > 2)
    agent.die()
    assert await agent.exit_code(within_s=5) == EXIT_AGENT_GONE


async def test_restart_of_the_bus_with_lost_streams(make_stage: StageMaker, nats_server: NatsServer) -> None:
    """kill -9 of the server loses the streams: running answers arrive whole, new work is pulled (L1, REL-3)."""
    stage = await make_stage(nats_server)
    record = simulated_record()
    gateway, agent = await stage.gateway(record), await stage.replica(record)
    running = [await gateway.submit(tokens=200, token_s=0.02) for _ in range(4)]
    await until(lambda: all(len(answer.deltas) > 3 for _, answer in running))
    await asyncio.to_thread(nats_server.restart)
    await until(lambda: stage.bus.connected, within_s=20)
    await asyncio.wait_for(ensure_queue(stage.bus), 20)
    request, answer = await gateway.submit(tokens=5)
    await until(lambda: answer.end is not None, within_s=30)
    assert answer.text == expected_answer(request, 5)
    await until(lambda: all(answer.end is not None for _, answer in running), within_s=30)
    for request, answer in running:
        assert answer.text == expected_answer(request, 200)
        assert answer.granted == 1
    assert gateway.gone == []
    assert not any(isinstance(message, Failed) for message in agent.heard)


async def test_a_continuation(stage: Stage) -> None:
    """A grant with tokens already sent goes on at the next index, and usage counts the whole answer."""
    record = simulated_record()
    gateway, _ = await stage.gateway(record), await stage.replica(record)
    request, answer = gateway.new(tokens=10, content="12345678")
    answer.sent_token_ids = tuple(expected_token(request, index) for index in range(6))
    answer.next_indexes = [6]
    await gateway.publish(request)
    await until(lambda: answer.end is not None)
    assert expected_answer(request, 6) + answer.text == expected_answer(request, 10)
    assert answer.end is not None
    assert answer.end.usage == Usage(prompt_tokens=6, completion_tokens=10)


async def test_what_is_handed_over_runs_at_once_or_comes_back(stage: Stage) -> None:
    """Without a ticket and a claim; where no slot is free its gateway hears so."""
    record = simulated_record(slots=1)
    gateway, agent = await stage.gateway(record), await stage.replica(record)

    def hand_over(number: int, tokens: int) -> RequestId:
        request, _ = gateway.new(tokens=tokens, token_s=0.01)
        stage.bus.post(names.run(agent.spec.replica), encode(gateway.hand(request, number)))
        return request

    request = hand_over(1, tokens=50)
    await until(lambda: gateway.answers[request].text != "")
    refused = hand_over(2, tokens=5)
    await until(lambda: gateway.gone == [Gone(request=refused, attempt=1, full=True)])
    await until(lambda: gateway.answers[request].end is not None)
    assert gateway.answers[request].text == expected_answer(request, 50)
    assert gateway.claims == []


async def test_concurrency_can_be_lowered(stage: Stage) -> None:
    """``Concurrency`` bounds what runs at once from then on."""
    record = simulated_record(slots=8)
    gateway, agent = await stage.gateway(record), await stage.replica(record)
    agent.send(Concurrency(slots=1))
    # Pulls that were made before cannot be withdrawn: what they bring is run, so they must have expired first.
    await asyncio.sleep(PULL_EXPIRY_S_MAX + LOST_PULL_GRACE_S)
    submitted = [await gateway.submit(tokens=4, token_s=0.05) for _ in range(4)]
    most = 0
    while not all(answer.end is not None for _, answer in submitted):
        most = max(most, sum(bool(answer.deltas) and answer.end is None for _, answer in submitted))
        await asyncio.sleep(0.01)
    assert most == 1


async def test_pings_are_answered_while_the_engine_loads(stage: Stage) -> None:
    """The event loop runs during a load, and the replica is not ready before its engine is (F3)."""
    record = simulated_record(load_s=1.0)
    agent = await stage.replica(record, ready=False)
    agent.send(Ping(number=7))
    assert (await agent.wait_for(Pong)).number == 7
    assert not any(isinstance(message, Ready) for message in agent.heard)
    await agent.wait_for(Ready)


async def test_a_failing_load_is_told_in_one_line(stage: Stage) -> None:
    """An engine that does not load, or options that are wrong, end the process with one line for a person (B8, B9)."""
    failing = await stage.replica(simulated_record(load_fails=True), ready=False)
    wrong = await stage.replica(simulated_record(step_cost_s=1.0), ready=False)
    assert "failed to load" in (await failing.wait_for(Failed)).detail
    assert "step_cost_s" in (await wrong.wait_for(Failed)).detail
    assert [await agent.exit_code() for agent in (failing, wrong)] == [EXIT_FAILED, EXIT_FAILED]


async def test_changed_weights_are_refused(stage: Stage, tmp_path: Path) -> None:
    """Files that are not those that were registered are never loaded (PRO-3)."""
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    record = replace(simulated_record(), engine_type=EngineType.VLLM, source=str(tmp_path), weights_hash="0" * 64)
    agent = await stage.replica(record, ready=False)
    assert "weights changed" in (await agent.wait_for(Failed)).detail
    assert await agent.exit_code() == EXIT_FAILED


async def test_a_load_can_be_stopped(stage: Stage) -> None:
    """``Stop`` and SIGTERM end a replica that still loads, at once."""
    record = simulated_record(load_s=60)
    told, signalled = await stage.replica(record, ready=False), await stage.replica(record, ready=False)
    await asyncio.gather(told.wait_for(Progress), signalled.wait_for(Progress))
    told.send(Stop())
    os.kill(signalled.pid, signal.SIGTERM)
    assert [await told.exit_code(within_s=5), await signalled.exit_code(within_s=5)] == [0, 0]


async def test_a_dying_engine_ends_the_replica(stage: Stage) -> None:
    """The death of an engine is told to the agent; nothing of the request is in the report or the log (O4)."""
    record = simulated_record(die_after_tokens=5)
    gateway, agent = await stage.gateway(record), await stage.replica(record)
    await gateway.submit(tokens=50, content="canary-4711")
    assert "died" in (await agent.wait_for(Failed)).detail
    assert await agent.exit_code() == EXIT_FAILED
    await asyncio.sleep(0.1)
    assert b"canary" not in agent.stderr


async def test_failures_of_requests_reach_the_gateway(stage: Stage) -> None:
    """A refused body and a sick engine are told apart, and the replica serves on (REL-1, F4)."""
    record = simulated_record(max_context_len=100)
    gateway, _ = await stage.gateway(record), await stage.replica(record)
    _, long = await gateway.submit(tokens=2, content="x" * 1000)
    _, sick = await gateway.submit(tokens=5, fail="sick", fail_after_tokens=2)
    request, fine = await gateway.submit(tokens=5)
    await until(lambda: all(answer.end is not None for answer in (long, sick, fine)))
    failures = [answer.end.failure.kind for answer in (long, sick) if answer.end and answer.end.failure]
    assert failures == [FailureKind.BAD_REQUEST, FailureKind.SICK]
    assert fine.text == expected_answer(request, 5)


async def test_stop_and_sigterm(stage: Stage) -> None:
    """``Stop`` and SIGTERM end the process with code 0; a second SIGTERM is harmless; running requests are given back."""
    record = simulated_record()
    gateway, told, signalled = await stage.gateway(record), await stage.replica(record), await stage.replica(record)
    submitted = [await gateway.submit(tokens=20_000, token_s=0.05) for _ in range(4)]
    await until(lambda: all(answer.deltas for _, answer in submitted))
    told.send(Stop())
    os.kill(signalled.pid, signal.SIGTERM)
    os.kill(signalled.pid, signal.SIGTERM)
    assert [await told.exit_code(), await signalled.exit_code()] == [0, 0]
    await until(lambda: {gone.request for gone in gateway.gone} == {request for request, _ in submitted})


async def test_a_replica_that_the_pool_counts_as_dead_ends(stage: Stage) -> None:
    """A dead incarnation stays dead: it leaves by itself when it learns of its verdict."""
    agent = await stage.replica(simulated_record())
    digest = PoolDigest(epoch=1, sequence=1, dead=(agent.spec.replica,))
    await stage.bus.publish(names.POOL, encode(digest))
    assert await agent.exit_code() == EXIT_DECLARED_DEAD


async def test_hostile_bytes_do_no_harm(stage: Stage) -> None:
    """Garbage on each of its subjects is dropped, a ticket that nobody can read is acknowledged, and it serves on (O2)."""
    record = simulated_record()
    gateway, agent = await stage.gateway(record), await stage.replica(record)
    for subject in (names.run(agent.spec.replica), names.back(agent.spec.replica), names.POOL):
        for junk in (b"", b"\xc1" * 100, b"\x80\x04pickle", b"\x91" * 10_000):
            await stage.bus.publish(subject, junk)
    key = model_key(record.deployment)
    await stage.bus.queue_publish(key, SlaClass.SILVER, Lane.SMALL, b"\xc1", message_id="junk", ttl_s=60)
    request, answer = await gateway.submit(tokens=5)
    await until(lambda: answer.end is not None)
    assert answer.text == expected_answer(request, 5)
