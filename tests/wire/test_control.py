"""The local protocol between an agent and a replica: frames, bounds, and the lifeline."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import pytest

from subjects.errors import DecodeError
from subjects.ids import DeploymentKey, DeviceId, ModelHash, ReplicaId, WorkerId
from subjects.messages import ModelRecord, ReplicaState
from workers import control
from workers.control import (
    EXIT_AGENT_GONE,
    FRAME_BYTES_MAX,
    agent_stream,
    control_pair,
    frame,
    read_start,
    replica_stream,
)
from workers.control_messages import (
    Concurrency,
    Drain,
    Drained,
    Failed,
    Load,
    Ping,
    Pong,
    Progress,
    Ready,
    Start,
    Stop,
    ToAgent,
    ToReplica,
)
from workers.engines.base import EngineInfo
from workers.spec import ReplicaSpec

SPEC = ReplicaSpec(
    replica=ReplicaId("r-0"),
    worker=WorkerId("w-0"),
    device=DeviceId("cpu0"),
    record=ModelRecord(
        name="m",
        deployment=DeploymentKey("a" * 64),
        model_hash=ModelHash("a" * 64),
        weights_hash="b" * 64,
        source="",
        weights_bytes=1,
        kv_bytes_per_token=1,
        kv_bytes=1,
        budget_bytes=1,
        max_context_len=1,
    ),
    nats_urls=("nats://127.0.0.1:1",),
)
INFO = EngineInfo(slots=4, kv_pages=64, block_size=16, max_context_len=2048, gives_token_ids=True, continues=False)
TO_REPLICA: list[ToReplica] = [Start(spec=SPEC), Ping(number=3), Drain(timeout_s=1.5), Concurrency(slots=2), Stop()]
TO_AGENT: list[ToAgent] = [
    Progress(state=ReplicaState.WARMING, detail="x", progress=0.5),
    Ready(info=INFO),
    Load(running=1, waiting=2, kv_pages_free=3, idle_s=4.5),
    Pong(number=3),
    Drained(given_back=1),
    Failed(detail="y"),
]


async def test_every_message_arrives_as_it_was_sent() -> None:
    """Both ways, in order, then the end."""
    ours, theirs = control_pair()
    agent, replica = await agent_stream(ours), await replica_stream(theirs)
    assert all(agent.send(message) for message in TO_REPLICA)
    assert all(replica.send(message) for message in TO_AGENT)
    assert [await replica.receive() for _ in TO_REPLICA] == TO_REPLICA
    assert [await agent.receive() for _ in TO_AGENT] == TO_AGENT
    await replica.close()
    assert await agent.receive() is None
    await agent.close()
    await agent.close()
    assert not agent.send(Stop())


@pytest.mark.parametrize(
    "garbage",
    [
        (FRAME_BYTES_MAX + 1).to_bytes(4, "big"),
        (3).to_bytes(4, "big") + b"\xc1\xc1\xc1",
        frame(Pong(number=1)),
    ],
)
async def test_what_is_no_message_is_an_error(garbage: bytes) -> None:
    """Too long, not MessagePack, or a message of the other direction."""
    ours, theirs = control_pair()
    replica = await replica_stream(theirs)
    ours.sendall(garbage)
    with pytest.raises(DecodeError):
        await replica.receive()
    ours.close()
    await replica.close()


async def test_a_frame_cut_short_is_the_end() -> None:
    """A side that dies in the middle of a message is dead, not wrong."""
    ours, theirs = control_pair()
    replica = await replica_stream(theirs)
    ours.sendall(frame(Stop())[:-1])
    ours.close()
    assert await replica.receive() is None
    await replica.close()


async def test_what_waits_for_a_side_that_does_not_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stuck replica cannot make its agent grow."""
    monkeypatch.setattr(control, "UNSENT_BYTES_MAX", 10_000)
    ours, theirs = control_pair()
    agent = await agent_stream(ours)
    sent = 0
    while agent.send(Start(spec=SPEC)):
        sent += 1
        assert sent < 10_000
        await asyncio.sleep(0)
    theirs.close()
    await agent.close()


def test_the_spec_is_read_before_there_is_an_event_loop() -> None:
    """And anything else in its place is told apart: another message, the end, silence."""
    ours, theirs = control_pair()
    ours.sendall(frame(Start(spec=SPEC)) + frame(Ping(number=1)))
    assert read_start(theirs, timeout_s=5) == SPEC
    with pytest.raises(DecodeError):
        read_start(theirs, timeout_s=5)
    with pytest.raises(TimeoutError):
        read_start(theirs, timeout_s=0.01)
    ours.close()
    with pytest.raises(EOFError):
        read_start(theirs, timeout_s=5)
    theirs.close()


def test_a_frame_over_the_bound_is_not_sent() -> None:
    """The sender learns of it, not the receiver."""
    with pytest.raises(ValueError, match="over the limit"):
        frame(Failed(detail="x" * FRAME_BYTES_MAX))


async def test_a_replica_leaves_with_its_agent_though_its_loop_is_stuck() -> None:
    """The lifeline works while bytes wait unread and the main thread runs something else (D8)."""
    ours, theirs = control_pair()
    code = f"""
import socket, sys
from workers.control import exit_with_agent
exit_with_agent(socket.socket(fileno={theirs.fileno()}))
print("up", flush=True)
while True:
    sum(range(10**6))
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, pass_fds=(theirs.fileno(),), stdout=asyncio.subprocess.PIPE
    )
    theirs.close()
    assert process.stdout is not None and await process.stdout.readline() == b"up\n"
    ours.sendall(frame(Ping(number=1)))
    await asyncio.sleep(0.1)
    assert process.returncode is None
    ours.close()
    assert await asyncio.wait_for(process.wait(), 30) == EXIT_AGENT_GONE


def test_a_forked_replica_takes_the_output_its_agent_sent() -> None:
    """Its last words are its own, not its template's."""
    ours, theirs = control_pair()
    reading, writing = os.pipe()
    socket.send_fds(ours, [b"\0"], [writing])
    os.close(writing)
    code = f"""
import os, socket, sys
import workers.forked
workers.forked.run_replica = lambda spec, control: (os.write(2, spec), 5)[1]
sys.exit(workers.forked.run_forked(b"last words", socket.socket(fileno={theirs.fileno()})))
"""
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", code],
        {**os.environ, "PYTHONPATH": os.getcwd()},
        file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 90), (os.POSIX_SPAWN_DUP2, 90, theirs.fileno())],
    )
    theirs.close()
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"last words"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    ours.close()
