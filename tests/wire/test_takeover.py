"""What a killed leader left, its successor finishes; a journal that cannot be written stops nobody (SCH-8, SCH-12)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.scheduler import journal_keeper
from broker.scheduler.shell import Scheduler
from subjects import names
from subjects.codec import decode, encode
from subjects.errors import QueueFull
from subjects.ids import ReplicaId
from subjects.messages import (
    Alert,
    JournalRecord,
    LoadModel,
    StepSent,
    TransactionBegan,
    TransactionEnded,
    UnloadReplica,
    WorkerCommand,
)
from tests.core.scheduler_world import record
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.scripted_agent import ScriptedAgent
from tests.wire.test_scheduler import Rig, rig_on


async def journal(rig: Rig) -> list[tuple[str, object]]:
    """Who wrote what, in order."""
    messages = await rig.bus.stream_read(names.JOURNAL_STREAM)
    records = [decode(message.payload, JournalRecord) for message in messages]
    return [(one.writer, entry) for one in records for entry in one.entries]


async def written(rig: Rig, who: Scheduler, last: type) -> list[tuple[str, object]]:
    """The journal once ``who`` wrote a ``last`` into it; a record leaves the line before the bus has it."""
    for _ in range(400):
        entries = await journal(rig)
        if any(writer == who.scheduler and isinstance(entry, last) for writer, entry in entries):
            return entries
        await asyncio.sleep(0.02)
    raise AssertionError(f"{who.scheduler} wrote no {last.__name__}")


async def test_a_swap_whose_leader_dies_between_unload_and_load_is_finished(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under its own name, by one load, with every step in the journal (SCH-8)."""
    whole = ScriptedAgent._ended

    async def slow(agent: ScriptedAgent, command: WorkerCommand, replica: ReplicaId, failure: str = "") -> None:
        if isinstance(command, UnloadReplica):
            await asyncio.sleep(0.5)
        await whole(agent, command, replica, failure)

    monkeypatch.setattr(ScriptedAgent, "_ended", slow)
    async with rig_on(nats_server, tmp_path) as rig:
        first = await rig.scheduler("one")
        await until(lambda: first.core.leads, "one leads")
        second = await rig.scheduler("two")
        await rig.apply(record("a"), record("b"))
        rig.waiting = {"a": 1}
        await until(lambda: rig.agent.ready == ["a"], "a is loaded")
        rig.waiting = {"b": 1}
        await until(lambda: any(isinstance(c, UnloadReplica) for c in rig.agent.commands), "a is told to leave")
        writer = first.scheduler
        await rig.end(first, politely=False)
        await until(lambda: second.core.leads, "two leads")
        await until(lambda: rig.agent.ready == ["b"], "b is loaded")
        assert [c.record.name for c in rig.agent.commands if isinstance(c, LoadModel)] == ["a", "b"]
        await until(lambda: second.journal.known.unfinished() == (), "nothing is left unfinished")
        entries = await written(rig, second, TransactionEnded)
        begun = [(w, e.transaction) for w, e in entries if isinstance(e, TransactionBegan) and e.record is not None]
        assert [w for w, _ in begun] == [writer, writer]
        swap = begun[1][1]
        loads = [
            w for w, e in entries if isinstance(e, StepSent) and e.transaction == swap and isinstance(e.command, LoadModel)
        ]
        ends = [(w, e.failure) for w, e in entries if isinstance(e, TransactionEnded) and e.transaction == swap]
        assert (loads, ends) == ([second.scheduler], [(second.scheduler, "")])
        told = await rig.control("explain", {"what": swap})
        assert told["outcome"] == "done"
        assert [step["what"].split()[0] for step in told["steps"]] == ["drain", "unload", "load"]


async def test_a_journal_that_cannot_be_written_stops_nobody(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads go on, people are told once, and a successor works from what the agents say (SCH-8)."""
    monkeypatch.setattr(journal_keeper, "RETRY_S", 0.01)
    alerts: list[Alert] = []
    async with rig_on(nats_server, tmp_path) as rig:
        await rig.bus.subscribe(names.ALL_ALERTS, lambda message: alerts.append(decode(message.payload, Alert)))
        scheduler = await rig.scheduler("one")
        await until(lambda: scheduler.core.leads, "one leads")
        bus = scheduler.journal._bus
        whole = bus.stream_publish

        async def full(subject: str, payload: bytes, *, expected_last_sequence: int | None = None) -> int:
            if subject == names.JOURNAL:
                raise QueueFull("no space left on device")
            return await whole(subject, payload, expected_last_sequence=expected_last_sequence)

        monkeypatch.setattr(bus, "stream_publish", full)
        await rig.apply(record("a"), record("b"))
        rig.waiting = {"a": 1}
        await until(lambda: rig.agent.ready == ["a"], "a is loaded")
        await until(lambda: [alert.kind for alert in alerts] == ["journal-lost"], "people are told")
        assert "no space left on device" in alerts[0].text
        rig.waiting = {"b": 1}
        await until(lambda: rig.agent.ready == ["b"], "b is loaded")
        assert scheduler.journal.lost >= 2
        second = await rig.scheduler("two")
        await rig.end(scheduler, politely=False)
        await until(lambda: second.core.leads, "two leads")
        rig.waiting = {"a": 1}
        await until(lambda: rig.agent.ready == ["a"], "two goes on")
        await asyncio.sleep(0.1)
        assert [alert.kind for alert in alerts if alert.kind == "journal-lost"] == ["journal-lost"]


async def test_a_deposed_leader_that_writes_gives_up_its_lease(nats_server: NatsServer, tmp_path: Path) -> None:
    """It was frozen past its lease: the journal tells it that somebody else leads, before any agent has to."""
    async with rig_on(nats_server, tmp_path) as rig:
        scheduler = await rig.scheduler("one")
        await until(lambda: scheduler.core.leads, "one leads")
        await rig.apply(record("a"))
        rig.waiting = {"a": 1}
        await until(lambda: rig.agent.ready == ["a"], "a is loaded")
        await written(rig, scheduler, StepSent)
        assert scheduler.lease.epoch is not None
        other = JournalRecord(epoch=scheduler.lease.epoch + 1, writer="another", entries=())
        await rig.bus.stream_publish(names.JOURNAL, encode(other))
        lost: list[str] = []
        scheduler.lease.on_lost = lost.append
        await rig.control("unload", {"model": "a"})
        await until(lambda: bool(lost), "the lease is given up")
        assert "another scheduler writes the journal under epoch" in lost[0]
