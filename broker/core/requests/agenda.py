"""Which keys are due when: one time per key, cheap to move."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

K = TypeVar("K")

_SLACK_ENTRIES = 64


class Agenda(Generic[K]):
    """A heap with lazy removal. Keys that are due at the same time come out in the order in which they were set."""

    def __init__(self) -> None:
        self._due_s: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._sets = 0

    def __len__(self) -> int:
        return len(self._due_s)

    @property
    def next_s(self) -> float | None:
        """The earliest due time, or None when nothing is on the agenda."""
        self._trim()
        return self._heap[0][0] if self._heap else None

    def set(self, key: K, due_s: float) -> None:
        """Puts ``key`` on the agenda, or moves it."""
        present = self._due_s.get(key)
        if present is not None and present[0] == due_s:
            return
        self._sets += 1  # Also breaks ties, so that keys themselves are never compared.
        self._due_s[key] = (due_s, self._sets)
        heappush(self._heap, (due_s, self._sets, key))
        if len(self._heap) > 2 * len(self._due_s) + _SLACK_ENTRIES:
            self._heap = [(due, number, key) for key, (due, number) in self._due_s.items()]
            heapify(self._heap)

    def drop(self, key: K) -> None:
        """Takes ``key`` off the agenda if it is on it."""
        self._due_s.pop(key, None)

    def pop_due(self, now_s: float) -> K | None:
        """Takes off and returns the first key that is due, or None."""
        self._trim()
        if not self._heap or self._heap[0][0] > now_s:
            return None
        key = heappop(self._heap)[2]
        del self._due_s[key]
        return key

    def _trim(self) -> None:
        while self._heap:
            due_s, number, key = self._heap[0]
            if self._due_s.get(key) == (due_s, number):
                return
            heappop(self._heap)
