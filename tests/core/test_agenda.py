"""The agenda: what is due next, without ever comparing keys."""

from __future__ import annotations

from broker.core.requests.agenda import Agenda


def due(agenda: Agenda[object], now_s: float) -> list[object]:
    """All that is due, in order."""
    found: list[object] = []
    while (key := agenda.pop_due(now_s)) is not None:
        found.append(key)
    return found


def test_keys_are_due_in_order_of_time_and_then_of_setting() -> None:
    """Keys of one moment that cannot be compared come in the order in which they were set."""
    agenda: Agenda[object] = Agenda()
    keys = [object() for _ in range(5)]
    for key in keys:
        agenda.set(key, 2.0)
    agenda.set("first", 1.0)
    assert due(agenda, 0.9) == []
    assert agenda.next_s == 1.0
    assert due(agenda, 2.0) == ["first", *keys]
    assert agenda.next_s is None


def test_a_key_is_due_once_at_its_latest_time() -> None:
    """Moved later, moved earlier, moved to where it is, moved away and back, dropped: what counts is the last word."""
    agenda: Agenda[object] = Agenda()
    for key, times in {"later": (1.0, 3.0), "earlier": (3.0, 1.0), "same": (2.0, 2.0), "back": (2.0, 9.0, 2.0)}.items():
        for due_s in times:
            agenda.set(key, due_s)
    agenda.set("dropped", 1.0)
    agenda.drop("dropped")
    agenda.drop("never there")
    assert agenda.next_s == 1.0
    assert due(agenda, 1.5) == ["earlier"]
    assert due(agenda, 2.5) == ["same", "back"]
    assert agenda.next_s == 3.0
    assert due(agenda, 3.0) == ["later"]
    assert due(agenda, 100.0) == []


def test_an_agenda_does_not_grow_by_moving() -> None:
    """A key that is moved with every request leaves nothing behind, and order survives."""
    agenda: Agenda[object] = Agenda()
    agenda.set("a", 50.0)
    for number in range(10_000):
        agenda.set("b", 100.0 + number)
        assert len(agenda._heap) <= 2 * 2 + 64
    assert due(agenda, 20_000.0) == ["a", "b"]
