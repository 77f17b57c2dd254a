"""People's words that win over whatever the scheduler would decide: locks, drains, pins and modes (SCH-9, SCH-11).

All of them are one value, :class:`subjects.messages.Overrides`, whose revision only grows: so a store that was lost or
restored from an older copy is told from somebody's unlock. Here is what may be done to that value; what it means is the
catalogue's and the pool's to know.
"""

from __future__ import annotations

from subjects.errors import ConfigError
from subjects.ids import DeviceId
from subjects.messages import Override, Overrides

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


PINNED, UNPINNED = "pinned", "unpinned"
"""Values of a pin: both win over the record."""


def device_name(worker: str, device: DeviceId) -> str:
    """``<worker name>/<device>``; the worker's name without its incarnation, so that it outlives the worker's restart."""
    return f"{worker}/{device}"


def split_device(name: str) -> tuple[str, DeviceId]:
    """Worker name and device of :func:`device_name`."""
    worker, _, device = name.partition("/")
    return worker, DeviceId(device)
