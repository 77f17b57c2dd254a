"""People's words as a scheduler's core hears them: all that hold, each time."""

from __future__ import annotations

from broker.core.pool.events import OverridesChanged
from broker.core.pool.overrides import PINNED, with_override
from subjects.messages import DeclaredLoad, Mode, Override, OverrideKind, Overrides


def said(*words: Override) -> OverridesChanged:
    """These hold from now on, and no others."""
    known = Overrides()
    for word in words:
        known = with_override(known, word)
    return OverridesChanged(known)


def pin(name: str, value: str = PINNED) -> Override:
    """A model is pinned, or unpinned."""
    return Override(kind=OverrideKind.PIN, about=name, value=value)


def lock(name: str) -> Override:
    """A model is locked."""
    return Override(kind=OverrideKind.MODEL_LOCK, about=name)


def mode(name: str, value: Mode) -> Override:
    """How far the scheduler may go with a model."""
    return Override(kind=OverrideKind.MODE, about=name, value=value.value)


def expect(
    name: str, begin_unix_s: float, end_unix_s: float, model: str = "", factor: float = 1.0, at_least: float = 0.0
) -> Override:
    """Load that is known of beforehand."""
    load = DeclaredLoad(begin_unix_s=begin_unix_s, end_unix_s=end_unix_s, model=model, factor=factor, at_least=at_least)
    return Override(kind=OverrideKind.EVENT, about=name, load=load)
