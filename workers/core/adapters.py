"""Which LoRA adapters are in an engine's slots: loaded at first use, the least recently used one evicted for the next.

A request for an adapter joins it, or waits until a slot is free. A slot is free once nothing uses its adapter: an adapter in
use is never taken away, since an engine would load it again in the middle of a step. So that an adapter in constant use does
not keep another one out for ever, the least recently used one is closed to new requests while somebody waits for a slot and
none is idle; requests for the others go on. Requests for the base model use no slot.

Two adapters are the same only if name, source and content are (:func:`identity_of`), and an id is never given twice: what an
engine loaded under an id is what it answers with.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from subjects.messages import Adapter, FailureKind
from workers.core.held_request import Key

Identity = tuple[str, str, str]


def identity_of(adapter: Adapter) -> Identity:
    """Name, source, hash of the content."""
    return adapter.name, adapter.source, adapter.adapter_hash


class LoadAdapter(msgspec.Struct, frozen=True):
    """Bring it into a slot under this id; :meth:`AdapterSlots.loaded` or :meth:`AdapterSlots.failed` follows."""

    adapter: Adapter
    slot_id: int


class EvictAdapter(msgspec.Struct, frozen=True):
    """Take it out of its slot; nothing uses it."""

    adapter: Adapter
    slot_id: int


class AdmitRequest(msgspec.Struct, frozen=True):
    """The adapter of this request is in the slot."""

    key: Key
    slot_id: int


class RefuseRequest(msgspec.Struct, frozen=True):
    """The adapter of this request did not load. ``kind`` tells whether another replica may have more luck."""

    key: Key
    reason: str
    kind: FailureKind = FailureKind.SICK


AdapterCommand = LoadAdapter | EvictAdapter | AdmitRequest | RefuseRequest


@dataclass(slots=True)
class _Slot:
    adapter: Adapter
    slot_id: int
    used: int
    ready: bool = False
    users: dict[Key, None] = field(default_factory=dict)


class AdapterSlots:
    """The slots of one engine; all methods return what is to be done now, in order."""

    def __init__(self, slots_max: int) -> None:
        self._slots_max = slots_max
        self._slots: dict[Identity, _Slot] = {}
        self._waiting: deque[tuple[Key, Adapter]] = deque()
        self._closing: Identity | None = None
        self._user_of: dict[Key, Identity] = {}
        self._ids = 0
        self._uses = 0

    @property
    def waiting(self) -> int:
        """Requests whose adapter has no slot yet, or is being loaded."""
        return len(self._waiting) + sum(len(slot.users) for slot in self._slots.values() if not slot.ready)

    @property
    def resident(self) -> tuple[str, ...]:
        """Names of the adapters in slots, the least recently used one first."""
        return tuple(slot.adapter.name for slot in sorted(self._slots.values(), key=_last_use))

    def ask(self, key: Key, adapter: Adapter) -> list[AdapterCommand]:
        """A request for ``adapter`` has come; each key only once."""
        if self._slots_max < 1:
            return [RefuseRequest(key, "this replica was started without adapters", FailureKind.BAD_REQUEST)]
        self._waiting.append((key, adapter))
        return self._pump()

    def loaded(self, adapter: Adapter) -> list[AdapterCommand]:
        """``LoadAdapter`` succeeded."""
        slot = self._slots[identity_of(adapter)]
        slot.ready = True
        admitted: list[AdapterCommand] = [AdmitRequest(key, slot.slot_id) for key in slot.users]
        return admitted + self._pump()

    def failed(self, adapter: Adapter, reason: str) -> list[AdapterCommand]:
        """``LoadAdapter`` did not succeed: those who wait for it hear why, nobody else is touched."""
        identity = identity_of(adapter)
        slot = self._slots.pop(identity)
        if self._closing == identity:
            self._closing = None
        for key in slot.users:
            del self._user_of[key]
        refused: list[AdapterCommand] = [RefuseRequest(key, reason) for key in slot.users]
        return refused + self._pump()

    def over(self, key: Key) -> list[AdapterCommand]:
        """A request has ended or was aborted, wherever it was; unknown ones are ignored."""
        identity = self._user_of.pop(key, None)
        if identity is not None:
            del self._slots[identity].users[key]
        elif any(waits == key for waits, _ in self._waiting):
            self._waiting = deque((waits, adapter) for waits, adapter in self._waiting if waits != key)
        else:
            return []
        return self._pump()

    def clear(self) -> list[AdapterCommand]:
        """Evicts all that nothing uses: an engine that sleeps may lose what its slots held."""
        idle = [slot for slot in self._slots.values() if slot.ready and not slot.users]
        for slot in idle:
            del self._slots[identity_of(slot.adapter)]
        return [EvictAdapter(slot.adapter, slot.slot_id) for slot in idle] + self._pump()

    # ------------------------------------------------------------------------------------------------------------ within

    def _pump(self) -> list[AdapterCommand]:
        out: list[AdapterCommand] = []
        while True:
            self._join(out)
            if not self._waiting:
                self._closing = None
                return out
            adapter = self._waiting[0][1]  # the first of those who need a slot
            if identity_of(adapter) == self._closing:
                self._closing = None  # whoever it was closed for has left
                continue
            if len(self._slots) >= self._slots_max and not self._evict(out):
                return out
            self._ids += 1
            self._slots[identity_of(adapter)] = _Slot(adapter, self._ids, self._next_use())
            out.append(LoadAdapter(adapter, self._ids))

    def _join(self, out: list[AdapterCommand]) -> None:
        """All who wait for an adapter that is there, or is coming, and is not closing."""
        still: deque[tuple[Key, Adapter]] = deque()
        for key, adapter in self._waiting:
            identity = identity_of(adapter)
            slot = self._slots.get(identity)
            if slot is None or identity == self._closing:
                still.append((key, adapter))
                continue
            slot.users[key] = None
            slot.used = self._next_use()
            self._user_of[key] = identity
            if slot.ready:
                out.append(AdmitRequest(key, slot.slot_id))
        self._waiting = still

    def _evict(self, out: list[AdapterCommand]) -> bool:
        """Frees a slot, or closes one so that it will be free."""
        idle = [slot for slot in self._slots.values() if slot.ready and not slot.users]
        if not idle:
            if self._closing is None:
                self._closing = identity_of(min(self._slots.values(), key=_last_use).adapter)
            return False
        slot = min(idle, key=_last_use)
        del self._slots[identity_of(slot.adapter)]
        self._closing = None
        out.append(EvictAdapter(slot.adapter, slot.slot_id))
        return True

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses


def _last_use(slot: _Slot) -> tuple[int, int]:
    return slot.used, slot.slot_id
