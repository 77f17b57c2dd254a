"""People's words as one value, and what it means to the core (SCH-9, SCH-11)."""

from __future__ import annotations

import pytest

from broker.core.pool import overrides
from broker.core.pool.catalogue import Catalogue
from broker.core.pool.events import SchedulerSettings
from broker.core.pool.overrides import PINNED, UNPINNED, device_name, key_of, split_device, with_override, without
from broker.core.pool.state import Pool
from subjects.errors import ConfigError
from subjects.ids import DeviceId, WorkerId
from subjects.messages import DeclaredLoad, Mode, Override, OverrideKind, Overrides
from tests.core.scheduler_world import record

GPU = DeviceId("gpu0")
WORKER = WorkerId("h-0000000001")
LOAD = DeclaredLoad(begin_unix_s=1.0, end_unix_s=2.0, model="m", factor=3.0, at_least=0.5)
M = record("m")


def meaning(known: Overrides) -> dict[str, object]:
    """What these words mean to a scheduler with one worker ``h``, one device of it, and a model ``m``."""
    catalogue, pool = Catalogue(), Pool(SchedulerSettings())
    catalogue.load([M])
    pool.beat(WORKER, 0)
    catalogue.override(known)
    pool.override(known)
    return {
        "pinned": catalogue.pinned(M),
        "mode": catalogue.mode(M.deployment),
        "locked": catalogue.locked(M.deployment),
        "declared": catalogue.declared,
        "device locked": pool.device_locked(WORKER, GPU),
        "device closed": pool.is_closed(WORKER, GPU),
        "other closed": pool.is_closed(WORKER, DeviceId("gpu1")),
        "worker usable": pool.workers[WORKER].usable,
    }


NOTHING = meaning(Overrides())
WORDS: list[tuple[Override, dict[str, object]]] = [
    (Override(kind=OverrideKind.PIN, about="m", value=PINNED), {"pinned": True}),
    (Override(kind=OverrideKind.PIN, about="m", value=UNPINNED), {}),
    (Override(kind=OverrideKind.MODE, about="m", value="advise"), {"mode": Mode.ADVISE}),
    (Override(kind=OverrideKind.MODEL_LOCK, about="m"), {"locked": True}),
    (Override(kind=OverrideKind.DEVICE_LOCK, about="h/gpu0"), {"device locked": True}),
    (
        Override(kind=OverrideKind.WORKER_DRAIN, about="h", bound_s=5.0),
        {"device closed": True, "other closed": True, "worker usable": False},
    ),
    (Override(kind=OverrideKind.DEVICE_DRAIN, about="h/gpu0"), {"device closed": True}),
    (Override(kind=OverrideKind.EVENT, about="launch", load=LOAD), {"declared": {"launch": LOAD}}),
]


@pytest.mark.parametrize(("override", "means"), WORDS)
def test_every_word_has_its_meaning_and_is_taken_back(override: Override, means: dict[str, object]) -> None:
    """While it is said, and nothing is left of it afterwards (SCH-9, SCH-11)."""
    one = with_override(Overrides(), override)
    assert one == Overrides(revision=1, entries=(override,))
    assert meaning(one) == NOTHING | means
    none = without(one, [key_of(override)])
    assert none == Overrides(revision=2)
    assert meaning(none) == NOTHING


def test_a_pin_wins_over_the_record_both_ways() -> None:
    """What is declared pinned can be unpinned, and without a word the record counts."""
    catalogue, declared = Catalogue(), record("m", pinned=True)
    catalogue.load([declared])
    for value, pinned in ((UNPINNED, False), (PINNED, True)):
        catalogue.override(with_override(Overrides(), Override(kind=OverrideKind.PIN, about="m", value=value)))
        assert catalogue.pinned(declared) is pinned
    catalogue.override(Overrides())
    assert catalogue.pinned(declared)


@pytest.mark.parametrize(
    "load", [None, DeclaredLoad(begin_unix_s=2.0, end_unix_s=2.0), DeclaredLoad(begin_unix_s=2.0, end_unix_s=1.0)]
)
def test_an_event_that_says_nothing_of_its_load_is_none(load: DeclaredLoad | None) -> None:
    """What some other writer left in the bucket announces nothing, and takes the place of what had its name (SCH-5)."""
    whole = with_override(Overrides(), Override(kind=OverrideKind.EVENT, about="launch", load=LOAD))
    empty = with_override(whole, Override(kind=OverrideKind.EVENT, about="launch", load=load))
    assert meaning(empty) == NOTHING


def test_saying_the_same_again_is_nothing_new() -> None:
    """Not even a later time of it; another value is."""
    first = with_override(Overrides(), Override(kind=OverrideKind.MODE, about="m", value="act", at_unix_s=1.0))
    assert with_override(first, Override(kind=OverrideKind.MODE, about="m", value="act", at_unix_s=2.0)) is first
    assert without(first, [("pin", "m"), ("mode", "n")]) is first
    other = with_override(first, Override(kind=OverrideKind.MODE, about="m", value="observe"))
    assert (other.revision, len(other.entries)) == (2, 1)
    assert meaning(other) == NOTHING | {"mode": Mode.OBSERVE}
    wider = with_override(other, Override(kind=OverrideKind.WORKER_DRAIN, about="h", bound_s=1.0))
    longer = with_override(wider, Override(kind=OverrideKind.WORKER_DRAIN, about="h", bound_s=9.0))
    assert (longer.revision, [entry.bound_s for entry in longer.entries]) == (4, [None, 9.0])


def test_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused with a remedy; a change of one that is there is not."""
    monkeypatch.setattr(overrides, "OVERRIDES_MAX", 2)
    full = Overrides()
    for name in "ab":
        full = with_override(full, Override(kind=OverrideKind.MODEL_LOCK, about=name))
    with pytest.raises(ConfigError, match="take some back"):
        with_override(full, Override(kind=OverrideKind.MODEL_LOCK, about="c"))
    assert with_override(full, Override(kind=OverrideKind.MODEL_LOCK, about="a", bound_s=1.0)).revision == 3


def test_a_device_is_named_by_its_workers_name() -> None:
    """So that it outlives the worker's incarnation."""
    assert split_device(device_name("host", GPU)) == ("host", GPU)
