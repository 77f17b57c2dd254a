"""People's words as one value, and what a change of it tells the core (SCH-9, SCH-11)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.core.pool import overrides
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
from broker.core.pool.overrides import changes, device_name, key_of, split_device, with_override, without
from subjects.errors import ConfigError
from subjects.ids import DeviceId, ReplicaId
from subjects.messages import DeclaredLoad, Mode, Override, OverrideKind, Overrides

GPU = DeviceId("gpu0")
EVENTS: list[tuple[Override, SchedulerEvent, SchedulerEvent]] = [
    (Override(kind=OverrideKind.PIN, about="m", value="pinned"), ModelPinned("m"), ModelUnpinned("m")),
    (Override(kind=OverrideKind.PIN, about="m", value="unpinned"), ModelUnpinned("m"), ModelUnpinned("m")),
    (Override(kind=OverrideKind.MODE, about="m", value="advise"), ModeSet("m", Mode.ADVISE), ModeSet("m", None)),
    (Override(kind=OverrideKind.MODEL_LOCK, about="m"), ModelLocked("m"), ModelUnlocked("m")),
    (Override(kind=OverrideKind.DEVICE_LOCK, about="h/gpu0"), DeviceLocked("h", GPU), DeviceUnlocked("h", GPU)),
    (
        Override(kind=OverrideKind.REPLICA_LOCK, about="r-1"),
        ReplicaLocked(ReplicaId("r-1")),
        ReplicaUnlocked(ReplicaId("r-1")),
    ),
    (
        Override(kind=OverrideKind.WORKER_DRAIN, about="h", bound_s=5.0),
        WorkerClosed("h", bound_s=5.0),
        WorkerOpened("h"),
    ),
    (Override(kind=OverrideKind.DEVICE_DRAIN, about="h/gpu0"), WorkerClosed("h", GPU), WorkerOpened("h", GPU)),
    (
        Override(
            kind=OverrideKind.EVENT,
            about="launch",
            load=DeclaredLoad(begin_unix_s=1.0, end_unix_s=2.0, model="m", factor=3.0, at_least=0.5),
        ),
        LoadDeclared("launch", 1.0, 2.0, "m", 3.0, 0.5),
        LoadWithdrawn("launch"),
    ),
]


@pytest.mark.parametrize(("override", "said", "taken_back"), EVENTS)
def test_every_word_is_told_and_taken_back(override: Override, said: SchedulerEvent, taken_back: SchedulerEvent) -> None:
    """One event when it is set, one when it is taken back, none when it is said again."""
    nothing = Overrides()
    one = with_override(nothing, override)
    assert one == Overrides(revision=1, entries=(override,))
    assert changes(nothing, one) == [said]
    assert changes(one, one) == []
    none = without(one, [key_of(override)])
    assert none == Overrides(revision=2)
    assert changes(one, none) == [taken_back]


@pytest.mark.parametrize(
    "load", [None, DeclaredLoad(begin_unix_s=2.0, end_unix_s=2.0), DeclaredLoad(begin_unix_s=2.0, end_unix_s=1.0)]
)
def test_an_event_that_says_nothing_of_its_load_is_none(load: DeclaredLoad | None) -> None:
    """What some other writer left in the bucket announces nothing, and takes the place of what had its name (SCH-5)."""
    told = Override(kind=OverrideKind.EVENT, about="launch", load=DeclaredLoad(begin_unix_s=1.0, end_unix_s=2.0, factor=3.0))
    whole = with_override(Overrides(), told)
    empty = with_override(whole, Override(kind=OverrideKind.EVENT, about="launch", load=load))
    assert changes(whole, empty) == changes(Overrides(), empty) == [LoadWithdrawn("launch")]
    assert changes(empty, whole) == [LoadDeclared("launch", 1.0, 2.0, factor=3.0)]


def test_saying_the_same_again_is_nothing_new() -> None:
    """Not even a later time of it; another value is."""
    first = with_override(Overrides(), Override(kind=OverrideKind.MODE, about="m", value="act", at_unix_s=1.0))
    assert with_override(first, Override(kind=OverrideKind.MODE, about="m", value="act", at_unix_s=2.0)) is first
    assert without(first, [("pin", "m"), ("mode", "n")]) is first
    other = with_override(first, Override(kind=OverrideKind.MODE, about="m", value="observe"))
    assert (other.revision, len(other.entries)) == (2, 1)
    assert changes(first, other) == [ModeSet("m", Mode.OBSERVE)]
    wider = with_override(other, Override(kind=OverrideKind.WORKER_DRAIN, about="h", bound_s=1.0))
    assert changes(wider, with_override(wider, Override(kind=OverrideKind.WORKER_DRAIN, about="h", bound_s=9.0))) == [
        WorkerClosed("h", bound_s=9.0)
    ]


def test_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused with a remedy; a change of one that is there is not."""
    monkeypatch.setattr(overrides, "OVERRIDES_MAX", 2)
    full = Overrides()
    for name in "ab":
        full = with_override(full, Override(kind=OverrideKind.MODEL_LOCK, about=name))
    with pytest.raises(ConfigError, match="take some back"):
        with_override(full, Override(kind=OverrideKind.MODEL_LOCK, about="c"))
    assert with_override(full, Override(kind=OverrideKind.MODEL_LOCK, about="a", bound_s=1.0)).revision == 3


WORDS = st.builds(
    Override,
    kind=st.sampled_from([OverrideKind.MODEL_LOCK, OverrideKind.WORKER_DRAIN, OverrideKind.REPLICA_LOCK]),
    about=st.sampled_from(["a", "b", "c"]),
    bound_s=st.sampled_from([None, 1.0]),
)


@given(st.lists(st.tuples(st.booleans(), WORDS), max_size=12), st.integers(0, 12))
def test_following_every_change_or_only_the_last_ends_in_the_same(said: list[tuple[bool, Override]], seen: int) -> None:
    """A standby that missed changes tells its core what one that saw each of them does, and revisions only grow."""
    steps = [Overrides()]
    for sets, override in said:
        known = steps[-1]
        steps.append(with_override(known, override) if sets else without(known, [key_of(override)]))
    assert [step.revision for step in steps] == sorted(step.revision for step in steps)
    middle = steps[min(seen, len(said))]

    def state(*path: Overrides) -> dict[str, SchedulerEvent]:
        told: dict[str, SchedulerEvent] = {}
        for before, after in pairwise(path):
            for event in changes(before, after):
                kind = type(event).__name__.replace("Unlocked", "Locked").replace("Opened", "Closed")
                told[f"{kind} {getattr(event, 'name', '')}{getattr(event, 'replica', '')}"] = event
        return {
            key: event
            for key, event in told.items()
            if type(event).__name__ in ("ModelLocked", "ReplicaLocked", "WorkerClosed")
        }

    assert state(*steps) == state(steps[0], middle, steps[-1]) == state(steps[0], steps[-1])


def test_a_device_is_named_by_its_workers_name() -> None:
    """So that it outlives the worker's incarnation."""
    assert split_device(device_name("host", GPU)) == ("host", GPU)
