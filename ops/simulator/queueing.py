"""Requests that wait for a replica: one queue per model, classes by weight, first come first served within a class."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf

from ops.simulator.engine import Sequence
from subjects.messages import RequestProfile, SlaClass
from workers.core.pulling import DEFAULT_WEIGHTS

CLASSES = tuple(SlaClass)
BATCH = CLASSES.index(SlaClass.BATCH)


class Live(Sequence):
    """A request in the world: what its engine counts, and what its gateway and its replica know of it."""

    __slots__ = ("model", "pages_needed", "profile", "queue_class", "since_s", "tries", "waiting", "yields_s")

    def __init__(
        self,
        index: int,
        model: int,
        profile: RequestProfile,
        output_tokens: int,
        since_s: float,
        queue_class: int | None = None,
    ) -> None:
        """``queue_class`` is the place of the profile's class in ``CLASSES``, where the caller knows it."""
        super().__init__(index, profile.input_tokens, output_tokens)
        self.model = model
        self.profile = profile
        self.pages_needed = profile.kv_pages_needed
        self.queue_class = CLASSES.index(profile.sla_class) if queue_class is None else queue_class
        self.since_s = since_s
        """Since when it waits, this time."""
        self.yields_s = inf
        """When it goes behind those that can still meet their target."""
        self.waiting = False
        self.tries = 1
        """How often its client has come with it."""


class ModelQueue:
    """What waits for one model. Takes turns as replicas do (``workers.core.pulling``): each class earns its weight."""

    __slots__ = ("_deficits", "_weights", "classes", "count")

    def __init__(self) -> None:
        self.classes: tuple[deque[Live], ...] = tuple(deque() for _ in CLASSES)
        self.count = 0
        self._weights = [DEFAULT_WEIGHTS[sla_class] for sla_class in CLASSES]
        self._deficits = [0] * len(CLASSES)

    def set_weights(self, weights: Mapping[str, int]) -> None:
        """The pool's weights by class; missing ones keep their default."""
        self._weights = [max(1, weights.get(c.value, DEFAULT_WEIGHTS[c])) for c in CLASSES]

    def put(self, live: Live) -> None:
        """At the end of its class."""
        live.waiting = True
        self.classes[live.queue_class].append(live)
        self.count += 1

    def put_back(self, live: Live) -> None:
        """At the head of its class: it ran before."""
        live.waiting = True
        self.classes[live.queue_class].appendleft(live)
        self.count += 1

    def remove(self, live: Live) -> None:
        """It waits no more."""
        live.waiting = False
        self.classes[live.queue_class].remove(live)
        self.count -= 1

    def next(self, now_s: float) -> Live | None:
        """Who would be served next, or None. Does not take it: see :meth:`take`."""
        chosen = self._turn(now_s)
        return None if chosen is None else self.classes[chosen][0]

    def take(self, live: Live) -> None:
        """It goes to a replica: its class pays for all that wait."""
        live.waiting = False
        self.count -= 1
        line = self.classes[live.queue_class]
        if line[0] is live:
            line.popleft()
        else:
            line.remove(live)
        others = [c for c, other in enumerate(self.classes) if other and c != live.queue_class]
        if others:
            present = [*others, live.queue_class]
            for c in present:
                self._deficits[c] += self._weights[c]
            self._deficits[live.queue_class] -= sum(self._weights[c] for c in present)

    def others(self, live: Live, most: int) -> list[Live]:
        """Up to ``most`` that come after ``live`` in its class."""
        line = self.classes[live.queue_class]
        return [line[place] for place in range(1, min(len(line), most + 1))]

    def late(self, since_s: float) -> list[Live]:
        """Who has waited since then or longer. Those at a head that ran before wait anew, and may hide others: look past."""
        found = []
        for line in self.classes:
            for live in line:
                if live.since_s <= since_s:
                    found.append(live)
                elif not live.made:
                    break
        return found

    def _turn(self, now_s: float) -> int | None:
        best: int | None = None
        for c, line in enumerate(self.classes):
            while c != BATCH and line and line[0].yields_s <= now_s:
                late = line.popleft()
                late.queue_class = BATCH
                late.yields_s = inf
                self.classes[BATCH].append(late)
            if line and (best is None or self._rank(c) > self._rank(best)):
                best = c
        return best

    def _rank(self, c: int) -> tuple[int, int, int]:
        return (self._deficits[c] + self._weights[c], self._weights[c], -c)
