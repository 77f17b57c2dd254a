"""People's words that win over whatever the scheduler would decide: locks, drains, pins and modes (SCH-9, SCH-11).

All of them are one value, :class:`subjects.messages.Overrides`, whose revision only grows: so a store that was lost or
restored from an older copy is told from somebody's unlock. Here is what may be done to that value, and what a change of it
means for the core.
"""

from __future__ import annotations

from typing import assert_never

from broker.core.pool.events import (
    DeviceLocked,
    DeviceUnlocked,
    LoadDeclared,
    LoadWithdrawn,
    ModelLocked,
    ModelPinned,
    ModelUnlocked,
    ModelUnpinned,
    ModeSet,
    ReplicaLocked,
    ReplicaUnlocked,
    SchedulerEvent,
    WorkerClosed,
    WorkerOpened,
)
from subjects.errors import ConfigError
from subjects.ids import DeviceId, ReplicaId
from subjects.messages import Mode, Override, OverrideKind, Overrides

OVERRIDES_MAX = 10_000
"""So many words of people are kept at once; one more is refused."""

Key = tuple[str, str]


def key_of(override: Override) -> Key:
    """What an override is about: there is one per kind and name."""
    return (override.kind.value, override.about)


def with_override(known: Overrides, override: Override) -> Overrides:
    """``known`` with one more, in place of an earlier one about the same; the same value when it says nothing new.

    Raises:
        ConfigError: there are too many.
    """
    entries = {key_of(entry): entry for entry in known.entries}
    old = entries.get(key_of(override))
    if old is not None and (old.value, old.bound_s, old.load) == (override.value, override.bound_s, override.load):
        return known
    if old is None and len(entries) >= OVERRIDES_MAX:
        raise ConfigError(f"{OVERRIDES_MAX} locks, drains, pins, modes and events are set already; take some back")
    entries[key_of(override)] = override
    return _next(known, entries)


def without(known: Overrides, keys: list[Key]) -> Overrides:
    """``known`` without these; the same value when none of them is there."""
    entries = {key_of(entry): entry for entry in known.entries}
    if not any(key in entries for key in keys):
        return known
    return _next(known, {key: entry for key, entry in entries.items() if key not in keys})


def _next(known: Overrides, entries: dict[Key, Override]) -> Overrides:
    return Overrides(revision=known.revision + 1, entries=tuple(entries[key] for key in sorted(entries)))


def changes(before: Overrides, after: Overrides) -> list[SchedulerEvent]:
    """What the core must hear when ``after`` takes the place of ``before``, in order of kind and name."""
    old = {key_of(entry): entry for entry in before.entries}
    new = {key_of(entry): entry for entry in after.entries}
    events: list[SchedulerEvent] = []
    for key in sorted({**old, **new}):
        if (entry := new.get(key)) is not None:
            if old.get(key) != entry:
                events.append(_set(entry))
        else:
            events.append(_taken_back(old[key]))
    return events


def _set(entry: Override) -> SchedulerEvent:
    match entry.kind:
        case OverrideKind.PIN:
            return ModelPinned(entry.about) if entry.value == PINNED else ModelUnpinned(entry.about)
        case OverrideKind.MODE:
            return ModeSet(entry.about, Mode(entry.value))
        case OverrideKind.MODEL_LOCK:
            return ModelLocked(entry.about)
        case OverrideKind.DEVICE_LOCK:
            return DeviceLocked(*split_device(entry.about))
        case OverrideKind.REPLICA_LOCK:
            return ReplicaLocked(ReplicaId(entry.about))
        case OverrideKind.WORKER_DRAIN:
            return WorkerClosed(entry.about, bound_s=entry.bound_s)
        case OverrideKind.DEVICE_DRAIN:
            return WorkerClosed(*split_device(entry.about), bound_s=entry.bound_s)
        case OverrideKind.EVENT:
            load = entry.load
            if load is None or not load.begin_unix_s < load.end_unix_s:
                # Nothing that this release wrote: it announces nothing, and what it stands in place of is not meant either.
                return LoadWithdrawn(entry.about)
            return LoadDeclared(entry.about, load.begin_unix_s, load.end_unix_s, load.model, load.factor, load.at_least)
        case _:
            assert_never(entry.kind)


def _taken_back(entry: Override) -> SchedulerEvent:
    match entry.kind:
        case OverrideKind.PIN:
            return ModelUnpinned(entry.about)
        case OverrideKind.MODE:
            return ModeSet(entry.about, None)
        case OverrideKind.MODEL_LOCK:
            return ModelUnlocked(entry.about)
        case OverrideKind.DEVICE_LOCK:
            return DeviceUnlocked(*split_device(entry.about))
        case OverrideKind.REPLICA_LOCK:
            return ReplicaUnlocked(ReplicaId(entry.about))
        case OverrideKind.WORKER_DRAIN:
            return WorkerOpened(entry.about)
        case OverrideKind.DEVICE_DRAIN:
            return WorkerOpened(*split_device(entry.about))
        case OverrideKind.EVENT:
            return LoadWithdrawn(entry.about)
        case _:
            assert_never(entry.kind)


PINNED, UNPINNED = "pinned", "unpinned"
"""Values of a pin: both win over the record, so a pin is set and changed but never taken back."""


def device_name(worker: str, device: DeviceId) -> str:
    """``<worker name>/<device>``; the worker's name without its incarnation, so that it outlives the worker's restart."""
    return f"{worker}/{device}"


def split_device(name: str) -> tuple[str, DeviceId]:
    """Worker name and device of :func:`device_name`."""
    worker, _, device = name.partition("/")
    return worker, DeviceId(device)
