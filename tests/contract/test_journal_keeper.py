"""The journal of scale actions on a real nats-server (SCH-8)."""

from __future__ import annotations

import asyncio

import pytest

from broker.scheduler import journal_keeper
from broker.scheduler.journal_keeper import JournalKeeper
from subjects import names
from subjects.bus import Bus
from subjects.codec import encode
from subjects.errors import BusUnavailable
from subjects.ids import DeviceId, OperationId, ReplicaId, WorkerId
from subjects.messages import (
    DrainReplica,
    JournalEntry,
    JournalRecord,
    StepEnded,
    StepSent,
    TransactionBegan,
    TransactionEnded,
)
from subjects.tasks import end_tasks
from tests.contract.conftest import Backend
from tests.waiting import until

WORKER = WorkerId("w-0123456789")


def began(name: str, *, reason: str = "idle") -> TransactionBegan:
    """A retirement of one replica."""
    return TransactionBegan(
        transaction=name,
        kind="retire",
        at_unix_s=1.0,
        reason=reason,
        worker=WORKER,
        devices=(DeviceId("cpu0"),),
        replicas=(ReplicaId(f"r-{name}"),),
    )


def sent(name: str) -> StepSent:
    """Its drain goes out."""
    command = DrainReplica(operation=OperationId(f"op-{name}"), epoch=1, replica=ReplicaId(f"r-{name}"))
    return StepSent(transaction=name, operation=command.operation, worker=WORKER, at_unix_s=2.0, command=command)


def ended(name: str) -> TransactionEnded:
    """It is done."""
    return TransactionEnded(transaction=name, at_unix_s=3.0)


class Writer:
    """A journal keeper with what it said to its scheduler."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.troubles: list[str] = []
        self.deposed: list[str] = []
        self.keeper = JournalKeeper(
            bus, name, leads=lambda: True, on_deposed=self.deposed.append, on_trouble=self.troubles.append
        )

    async def write(self, epoch: int, *entries: JournalEntry) -> None:
        """Appends one record and stores it."""
        self.keeper.append(epoch, entries)
        await self.keeper.flush()


async def stored(bus: Bus) -> list[bytes]:
    """What the stream holds."""
    return [message.payload for message in await bus.stream_read(names.JOURNAL_STREAM)]


async def test_a_successor_learns_what_is_unfinished(backend: Backend) -> None:
    """What one leader began and did not end is what the next one reads, and nothing else (SCH-8)."""
    first = Writer(await backend.connect(), "one")
    await first.write(1, began("1-1"), sent("1-1"))
    await first.write(1, began("1-2"))
    await first.write(1, ended("1-2"))
    second = Writer(await backend.connect(), "two")
    await second.keeper.catch_up()
    assert second.keeper.known.unfinished() == (began("1-1"), sent("1-1"))
    await second.write(2, StepEnded(transaction="1-1", operation=OperationId("op-1-1"), at_unix_s=4.0), ended("1-1"))
    assert second.keeper.known.unfinished() == ()
    assert len(await stored(await backend.connect())) == 4
    assert (second.deposed, second.troubles, first.troubles) == ([], [], [])


async def test_the_journal_survives_a_restart_of_the_server(backend: Backend) -> None:
    """It is on disk (SCH-8)."""
    first = Writer(await backend.connect(), "one")
    await first.write(1, began("1-1"))
    await backend.restart()
    await first.write(1, began("1-2"))
    second = Writer(await backend.connect(), "two")
    await second.keeper.catch_up()
    assert second.keeper.known.unfinished() == (began("1-1"), began("1-2"))


async def test_a_lost_journal_is_begun_anew(backend: Backend) -> None:
    """The server lost its store: the next record makes the stream again, and a successor knows what is in it."""
    bus = await backend.connect()
    first = Writer(bus, "one")
    for number in range(5):
        await first.write(1, began(f"1-{number}"))
    await backend.lose_files()
    await first.write(1, began("1-5"))
    # Meanwhile somebody else may have made it, and written.
    await first.write(1, began("1-6"))
    second = Writer(await backend.connect(), "two")
    await second.keeper.catch_up()
    assert second.keeper.known.unfinished() == (began("1-5"), began("1-6"))
    assert (first.troubles, first.deposed) == ([], [])
    await backend.lose_files()
    await second.write(2, began("2-0"))
    await first.write(1, began("1-7"))  # Its end of the old stream is beyond that of the new one.
    assert len(first.deposed) == 1


async def test_a_deposed_leader_hears_of_it(backend: Backend) -> None:
    """Its append finds another end than it expects, written under a higher epoch, and is not stored (BUS-4)."""
    old, new = Writer(await backend.connect(), "old"), Writer(await backend.connect(), "new")
    await old.write(1, began("1-1"))
    await new.keeper.catch_up()
    await new.write(2, began("2-1"))
    await old.write(1, began("1-2"))
    assert len(old.deposed) == 1 and "epoch 2" in old.deposed[0]
    await new.write(2, ended("2-1"))
    assert new.deposed == []
    assert began("1-2") not in new.keeper.known.unfinished()


async def test_a_late_record_of_a_predecessor_stops_nobody(backend: Backend) -> None:
    """It arrived after its successor had read: the successor learns of it and goes on."""
    old, new = Writer(await backend.connect(), "old"), Writer(await backend.connect(), "new")
    await old.write(1, began("1-1"))
    await new.keeper.catch_up()
    await old.write(1, began("1-2"))
    await new.write(2, began("2-1"))
    assert new.deposed == [] and new.troubles == []
    assert new.keeper.known.find("1-2") is not None
    assert len(await stored(await backend.connect())) == 3


async def test_a_record_whose_answer_was_lost_is_not_stored_twice(backend: Backend) -> None:
    """The append that is tried again finds itself (BUS-4)."""
    bus = await backend.connect()
    writer = Writer(bus, "one")
    await writer.write(1, began("1-1"))
    twin = JournalRecord(epoch=1, writer="one", entries=(began("1-2"),))
    await bus.stream_publish(names.JOURNAL, encode(twin))  # What it is about to write is there already.
    await writer.write(1, began("1-2"))
    await writer.write(1, began("1-3"))
    assert len(await stored(bus)) == 3 and writer.deposed == []


async def test_a_journal_that_grew_too_old_is_written_on(backend: Backend) -> None:
    """All its records are gone by age, so a new scheduler cannot know where it ends."""
    bus = await backend.connect()
    await bus.ensure_stream(names.JOURNAL_STREAM, [names.JOURNAL], max_age_s=0.1)
    await bus.stream_publish(names.JOURNAL, encode(JournalRecord(epoch=1, writer="before", entries=(began("1-1"),))))
    async with asyncio.timeout(10):
        while await stored(bus):
            await asyncio.sleep(0.05)
    writer = Writer(bus, "one")
    await writer.write(2, began("2-1"))
    await bus.ensure_stream(names.JOURNAL_STREAM, [names.JOURNAL], max_age_s=3600)
    await writer.write(2, began("2-2"))
    assert writer.troubles == [] and len(await stored(bus)) >= 1


async def test_a_long_journal_is_read_in_pages_from_where_it_begins(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old records fall off its bounded head; the rest is read whole."""
    monkeypatch.setattr(journal_keeper, "PAGE_MESSAGES", 7)
    bus = await backend.connect()
    await bus.ensure_stream(names.JOURNAL_STREAM, [names.JOURNAL], max_bytes=20_000)
    writer = Writer(bus, "one")
    for number in range(100):
        await writer.write(1, began(f"1-{number}", reason="x" * 200))
    reader = Writer(bus, "two")
    await reader.keeper.catch_up()
    known = [entry.transaction for entry in reader.keeper.known.unfinished()]
    assert known == [f"1-{number}" for number in range(100)][-len(known) :] and len(known) > 20
    await reader.write(2, began("2-0"))
    assert reader.troubles == []


async def test_what_is_no_record_is_passed_over(backend: Backend) -> None:
    """Bytes of a later version, or anybody's, break no takeover (PAINS O2)."""
    bus = await backend.connect()
    await Writer(bus, "one").write(1, began("1-1"))
    await bus.stream_publish(names.JOURNAL, b"\xc1 no record")
    reader = Writer(bus, "two")
    await reader.keeper.catch_up()
    assert reader.keeper.known.unfinished() == (began("1-1"),)
    await reader.write(2, began("2-1"))
    assert reader.troubles == []


async def test_a_bus_that_is_away_costs_records_and_an_alert_but_no_time(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Appending returns at once; what cannot be stored is given up in bounded time, and told once (SCH-8)."""
    monkeypatch.setattr(journal_keeper, "RETRY_S", 0.01)
    monkeypatch.setattr(journal_keeper, "WAITING_RECORDS_MAX", 3)
    bus = await backend.connect()
    writer = Writer(bus, "one")
    await writer.write(1, began("1-0"))
    whole = bus.stream_publish

    async def away(*_: object, **__: object) -> int:
        raise BusUnavailable("the bus is away")

    monkeypatch.setattr(bus, "stream_publish", away)
    for number in range(1, 7):
        writer.keeper.append(1, (began(f"1-{number}"),))
    await writer.keeper.flush()
    assert writer.keeper.lost == 6 and len(writer.troubles) == 1
    monkeypatch.setattr(bus, "stream_publish", whole)
    await writer.write(1, began("1-7"))
    reader = Writer(bus, "two")
    await reader.keeper.catch_up()
    assert reader.keeper.known.unfinished() == (began("1-0"), began("1-7"))
    assert len(writer.keeper.known.unfinished()) == 8


async def test_a_standby_keeps_up(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it has little left to read when it must lead (SCH-12)."""
    monkeypatch.setattr(journal_keeper, "FOLLOW_EVERY_S", 0.05)
    writer = Writer(await backend.connect(), "one")
    standby = JournalKeeper(
        await backend.connect(), "two", leads=lambda: False, on_deposed=_unexpected, on_trouble=_unexpected
    )
    following = asyncio.create_task(standby.follow())
    appending = asyncio.create_task(writer.keeper.run())
    try:
        writer.keeper.append(1, (began("1-1"), sent("1-1")))
        await until(lambda: standby.known.unfinished() == (began("1-1"), sent("1-1")), "the standby knows")
    finally:
        await end_tasks({following, appending})


def _unexpected(text: str) -> None:
    raise AssertionError(text)
