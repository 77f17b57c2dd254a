"""What waits to be told to the shared index, how it is packed, and when a server that failed is tried again. No IO.

A node notes every access at the moment it happens; the server hears of it in batches. Of several notes about one span the
last one stands, so a hot span costs one entry however often it is used, and the memory is bounded by spans, not by accesses.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import msgspec

from subjects.ids import ModelHash
from subjects.messages import KvTier, SlaClass

NAME_CHARS_MAX: Final = 128
"""Of a request's or tenant's id in an entry; longer ones are cut."""
AGE_S_MAX: Final = 10 * 365 * 86_400.0
_RECORD: Final = struct.Struct("<32sdH")
"""Hex of the span, age in seconds, length of the metadata, which follows. The server's script reads the same form."""


class SpanAccess(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One access to a span that the node holds, and what is known of the span. Ids only, never a prompt's content."""

    at_unix_s: float
    """By the node's own wall clock."""
    size_bytes: int
    """Of the span alone, as it is kept."""
    tier: KvTier = KvTier.HOST
    request: str = ""
    tenant: str = ""
    sla_class: SlaClass = SlaClass.SILVER


class SpanEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A span's metadata as the index keeps it, one per span and node; MessagePack of some 60 bytes."""

    tier: KvTier
    request: str
    sla_class: SlaClass
    size_bytes: int
    tenant: str


_ENTRY_DECODER: Final = msgspec.msgpack.Decoder(SpanEntry)


@dataclass(slots=True)
class IndexBatch:
    """What one model's keys are told at once."""

    model_hash: ModelHash
    noted: list[tuple[bytes, SpanAccess]] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.noted) + len(self.dropped)


@dataclass(slots=True, kw_only=True)
class BufferCounts:
    """Since the start."""

    notes: int = 0
    coalesced: int = 0
    """Notes that took the place of an earlier one."""
    overflowed: int = 0
    """Entries that made room for newer ones and were never told."""
    ignored: int = 0
    """Notes that nothing can be made of: a span that has not 16 bytes, a model that is no hash, a time that is no number."""


class IndexBuffer:
    """The newest ``entries_max`` spans about which the server is to hear something.

    ``incomplete`` is set when an entry was lost: what the server believes of this node is then to be told anew.
    """

    def __init__(self, entries_max: int) -> None:
        self._entries_max = max(1, entries_max)
        self._entries: OrderedDict[tuple[ModelHash, bytes], SpanAccess | None] = OrderedDict()
        self.counts = BufferCounts()
        self.incomplete = False

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, model_hash: ModelHash, span: bytes, access: SpanAccess) -> None:
        """The span was used, or is held elsewhere than before."""
        if len(span) != 16 or len(model_hash) != 64 or not math.isfinite(access.at_unix_s):
            self.counts.ignored += 1
            return
        self.counts.notes += 1
        self._put((model_hash, span), access)

    def dropped(self, model_hash: ModelHash, span: bytes) -> None:
        """The node holds the span no more."""
        if len(span) != 16 or len(model_hash) != 64:
            self.counts.ignored += 1
            return
        self.counts.notes += 1
        self._put((model_hash, span), None)

    def take(self, entries_max: int) -> list[IndexBatch]:
        """Removes the oldest entries and gives them by model, in the order in which the models come up."""
        batches: dict[ModelHash, IndexBatch] = {}
        entries = self._entries
        for _ in range(min(entries_max, len(entries))):
            (model_hash, span), access = entries.popitem(last=False)
            batch = batches.get(model_hash)
            if batch is None:
                batch = batches[model_hash] = IndexBatch(model_hash)
            if access is None:
                batch.dropped.append(span)
            else:
                batch.noted.append((span, access))
        return list(batches.values())

    def put_back(self, batches: Iterable[IndexBatch]) -> None:
        """Batches that were not told come first again, except where something newer is known by now or the room is gone."""
        entries = self._entries
        for batch in batches:
            old: list[tuple[bytes, SpanAccess | None]] = [*batch.noted, *((span, None) for span in batch.dropped)]
            for span, access in reversed(old):
                key = (batch.model_hash, span)
                if key in entries:
                    self.counts.coalesced += 1
                elif len(entries) >= self._entries_max:
                    self._lost()
                else:
                    entries[key] = access
                    entries.move_to_end(key, last=False)

    def clear(self) -> None:
        """Forgets all: it is told anew anyway."""
        self._entries.clear()
        self.incomplete = False

    def _put(self, key: tuple[ModelHash, bytes], access: SpanAccess | None) -> None:
        entries = self._entries
        if key in entries:
            entries.move_to_end(key)
            self.counts.coalesced += 1
        elif len(entries) >= self._entries_max:
            entries.popitem(last=False)
            self._lost()
        entries[key] = access

    def _lost(self) -> None:
        self.counts.overflowed += 1
        self.incomplete = True


def pack_noted(noted: Iterable[tuple[bytes, SpanAccess]], now_unix_s: float) -> bytes:
    """The notes of a batch in one string.

    Ages travel, not times: the server turns them into scores of its own clock, so that nodes whose clocks differ agree on
    what was used last. A time in the future counts as now.
    """
    parts: list[bytes] = []
    encode = msgspec.msgpack.encode
    for span, access in noted:
        age_s = min(max(0.0, now_unix_s - access.at_unix_s), AGE_S_MAX)
        request, tenant = access.request[:NAME_CHARS_MAX], access.tenant[:NAME_CHARS_MAX]
        try:
            entry = encode(SpanEntry(access.tier, request, access.sla_class, access.size_bytes, tenant))
        except (ValueError, OverflowError):
            continue  # Half a character pair in a name, or a size beyond 64 bits: one such entry must not hold up the rest.
        parts.append(_RECORD.pack(span.hex().encode(), age_s, len(entry)))
        parts.append(entry)
    return b"".join(parts)


def pack_dropped(dropped: Iterable[bytes]) -> bytes:
    """The spans of a batch that are gone, in one string: 32 hex digits each."""
    return b"".join(dropped).hex().encode()


def unpack_entry(value: bytes) -> SpanEntry | None:
    """An entry as the index keeps it; None for bytes that are none."""
    try:
        return _ENTRY_DECODER.decode(value)
    except msgspec.MsgspecError:
        return None


def plausible_time(score: float | None, now_unix_s: float, *, ahead_s_max: float = 60.0) -> bool:
    """Whether a score can be the time of an access: a number, not before 1970, not in the future."""
    return score is not None and math.isfinite(score) and 0.0 < score <= now_unix_s + ahead_s_max


class BreakerState(Enum):
    """Of a server that others depend on."""

    CLOSED = "closed"
    """It answers; ask it."""
    OPEN = "open"
    """It failed; nobody asks until the pause is over."""
    HALF_OPEN = "half-open"
    """One asks, to see whether it answers again."""


class Breaker:
    """Stops asking a server that does not answer; each failed try makes the pause longer, up to ``pause_s_max``.

    ``pause_s_max`` bounds how long it takes to notice that the server is back.
    """

    def __init__(self, *, failures_max: int = 3, pause_s: float = 0.5, pause_s_max: float = 2.0) -> None:
        self._failures_max = failures_max
        self._pause_first_s = pause_s
        self._pause_s_max = pause_s_max
        self._pause_s = pause_s
        self._failures = 0
        self._open_until_s = 0.0
        self.state = BreakerState.CLOSED
        self.opened = 0
        """How often it went from closed to open."""

    @property
    def closed(self) -> bool:
        """Whether everybody may ask."""
        return self.state is BreakerState.CLOSED

    def probe(self, now_s: float) -> bool:
        """Whether the caller is to try the server now, as the only one; it must say :meth:`probed` afterwards."""
        if self.state is not BreakerState.OPEN or now_s < self._open_until_s:
            return False
        self.state = BreakerState.HALF_OPEN
        return True

    def probed(self, answered: bool, now_s: float) -> None:
        """How the try ended. Only this closes it again: answers and failures of calls that began before do not count."""
        if self.state is not BreakerState.HALF_OPEN:
            return
        if answered:
            self.state = BreakerState.CLOSED
            self._failures = 0
            self._pause_s = self._pause_first_s
        else:
            self._pause_s = min(self._pause_s_max, self._pause_s * 2)
            self._open(now_s)

    def succeeded(self) -> None:
        """The server answered somebody."""
        if self.state is BreakerState.CLOSED:
            self._failures = 0

    def failed(self, now_s: float) -> bool:
        """The server did not answer somebody. Returns whether this opened it."""
        if self.state is not BreakerState.CLOSED:
            return False
        self._failures += 1
        if self._failures < self._failures_max:
            return False
        self.opened += 1
        self._open(now_s)
        return True

    def _open(self, now_s: float) -> None:
        self._failures = 0
        self._open_until_s = now_s + self._pause_s
        self.state = BreakerState.OPEN
