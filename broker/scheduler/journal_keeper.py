"""The journal of scale actions on the bus: a kept stream that the leader appends to and its successor reads (SCH-8).

The journal never holds a decision up: records wait here in a bounded line while the bus is slow, and what cannot be stored
is given up with an alert. A successor then learns less from the journal, and the same from the agents.

Each append names the sequence that it must follow. So of two schedulers that both believe to lead, the one that was deposed
hears of it at its next append.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from broker.core.pool.journal import TransactionLog
from subjects import names
from subjects.bus import Bus
from subjects.codec import decode, encode
from subjects.errors import BusError, DecodeError, QueueMissing, WrongRevision
from subjects.messages import JournalEntry, JournalRecord

KEPT_S_MAX = 24 * 3600.0
KEPT_BYTES_MAX = 16 * 1024 * 1024
"""A record takes one or two KiB: thousands of transactions, read in a fraction of a second."""
WAITING_RECORDS_MAX = 1000
"""Records that wait for the bus; beyond it the oldest are given up."""
APPEND_TRIES_MAX = 3
RETRY_S = 0.5
FOLLOW_EVERY_S = 5.0
"""A standby reads what is new at this pace, so that little is left to read when it must lead."""
PAGE_MESSAGES = 1000
TELL_AGAIN_S = 60.0

log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class JournalKeeper:
    """One scheduler's hand on the journal. ``known`` has the latest transactions, whoever led."""

    _bus: Bus
    _writer: str
    leads: Callable[[], bool]
    on_deposed: Callable[[str], None]
    """Hears that somebody leads under a higher epoch."""
    on_trouble: Callable[[str], None]
    """Hears that records are lost, and why, at most once a minute."""
    known: TransactionLog = field(default_factory=TransactionLog)
    lost: int = 0
    """Records that could not be stored."""
    _last_sequence: int = 0
    _waiting: deque[JournalRecord] = field(default_factory=deque)
    _filled: asyncio.Event = field(default_factory=asyncio.Event)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _told_s: float | None = None

    async def catch_up(self) -> None:
        """Reads what is new.

        Raises:
            BusError: some of it may have been read; what is missing is read the next time.
        """
        async with self._reading:
            await self._read_new()

    async def _read_new(self) -> list[JournalRecord]:
        new: list[JournalRecord] = []
        while True:
            page = await self._bus.stream_read(
                names.JOURNAL_STREAM, start_sequence=self._last_sequence + 1, messages_max=PAGE_MESSAGES
            )
            if not page:
                return new
            for message in page:
                self._last_sequence = message.sequence
                try:
                    record = decode(message.payload, JournalRecord)
                except DecodeError as error:
                    log.warning("a record of the journal cannot be read", error=str(error))
                    continue
                new.append(record)
                for entry in record.entries:
                    self.known.add(entry)

    async def follow(self) -> None:
        """Keeps up with a leader until cancelled."""
        while True:
            if not self.leads():
                try:
                    await self.catch_up()
                except BusError as error:
                    log.debug("the journal cannot be read", reason=str(error))
            await asyncio.sleep(FOLLOW_EVERY_S)

    def append(self, epoch: int, entries: tuple[JournalEntry, ...]) -> None:
        """Takes the next record and returns at once; :meth:`run` stores it."""
        for entry in entries:
            self.known.add(entry)
        self._waiting.append(JournalRecord(epoch=epoch, writer=self._writer, entries=entries))
        if len(self._waiting) > WAITING_RECORDS_MAX:
            self._waiting.popleft()
            self._lose(f"more than {WAITING_RECORDS_MAX} records wait for the bus")
        self._filled.set()

    async def run(self) -> None:
        """Stores what was appended, in order, until cancelled."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            await self.flush()

    async def flush(self) -> None:
        """Stores what still waits; the caller bounds it at a shutdown."""
        while self._waiting:
            await self._store(self._waiting.popleft())

    async def _store(self, record: JournalRecord) -> None:
        payload = encode(record)
        failure = ""
        for tries in range(APPEND_TRIES_MAX):
            if tries and failure:
                await asyncio.sleep(RETRY_S)
            failure = ""
            try:
                async with self._reading:
                    await self._append(record, payload)
            except QueueMissing:
                failure = await self._make_stream()
            except BusError as error:
                failure = str(error) or type(error).__name__
            else:
                if self._told_s is not None:
                    self._told_s = None
                    log.info("the journal is written again", records_lost=self.lost)
                return
        self._lose(failure or "it is gone as soon as it is made")

    async def _append(self, record: JournalRecord, payload: bytes) -> None:
        try:
            self._last_sequence = await self._bus.stream_publish(
                names.JOURNAL, payload, expected_last_sequence=self._last_sequence
            )
            return
        except WrongRevision:
            pass
        before = self._last_sequence
        others = await self._read_new()
        if not others and before:
            # Shorter than we knew it: another stream of the same name.
            self._last_sequence = 0
            others = await self._read_new()
        if record in others:
            return  # It was stored, and the answer to it was lost.
        higher = max((other.epoch for other in others if other.writer != self._writer), default=0)
        if higher > record.epoch:
            self.on_deposed(f"another scheduler writes the journal under epoch {higher}, ours is {record.epoch}")
            return
        # What is left: a late record of somebody who led before us, or a stream whose records have all grown too old to
        # tell its end; then nothing can be expected of it.
        expected = self._last_sequence or None
        self._last_sequence = await self._bus.stream_publish(names.JOURNAL, payload, expected_last_sequence=expected)

    async def _make_stream(self) -> str:
        """Why it cannot be made; empty when it was."""
        try:
            await self._bus.ensure_stream(
                names.JOURNAL_STREAM, [names.JOURNAL], max_age_s=KEPT_S_MAX, max_bytes=KEPT_BYTES_MAX
            )
        except BusError as error:
            return str(error) or type(error).__name__
        self._last_sequence = 0
        return ""

    def _lose(self, reason: str) -> None:
        self.lost += 1
        now_s = time.monotonic()
        if self._told_s is None or now_s - self._told_s >= TELL_AGAIN_S:
            self._told_s = now_s
            self.on_trouble(reason)
