"""Which queues a replica pulls from, and with how many credits: the whole policy.

A queue is one class and one lane. Pulls cannot be withdrawn, so credits are few and short-lived:

1. Nothing is pulled while no slot is free or too much of what was taken is not computed yet, and no queue whose ceiling the
   free KV pages do not cover (:func:`room_for`).
2. *Busy* queues (their last pull brought a ticket) share the free slots by deficit round robin over the classes. A queue's
   window grows with each ticket and falls back to one when a pull expires, so that idle credits do not pin slots; where one
   of them got no credit, all pulls are short.
3. Queues *believed empty* share ``PULL_SLACK`` more credits, one each, taking turns: recently used ones first, and always
   ``TURNS_MIN`` for the others. So the sum never exceeds free slots + ``PULL_SLACK``.
4. A queue that has not fitted for its ageing bound stops the smaller lanes until it fits. Where the pool says what waits,
   only queues with waiting tickets age; where it does not, a queue found empty ages more slowly each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf

from subjects.messages import LANE_PAGES_MAX, Lane, SlaClass
from workers.core.replica_events import Pull

PULL_EXPIRES_S = 1.0
"""How long a pull stays open when its queue need not take turns."""
PULL_EXPIRES_SHORT_S = 0.25
"""How long it stays open when it must."""
PULL_SLACK = 6
TURNS_MIN = 2
WARM_S = 60.0
"""A queue counts as recently used for so long after its last ticket."""
AGEING_S = 5.0
AGEING_MAX_S = 60.0
PAUSE_S = 0.25
PAUSE_BELOW_S = 0.05
"""A pull that comes back unused sooner than this was refused, not empty: pause, so that refusals make no busy loop."""
HANDS_BESIDE_PULLS = 2
"""So many requests may be handed over for slots that open pulls were promised."""
WRITE_OFF_S = 5.0
"""Credits that did not come back so long after their pull expired are taken for lost."""
BACKLOG_TOKENS_MAX = 4096
"""Prompt tokens taken and not yet computed from which on a replica takes no more: what waits in the queue can still go to
somebody else, or be overtaken by a higher class, and a step that prefills holds up all answers that run."""
DEFAULT_WEIGHTS: Mapping[SlaClass, int] = {SlaClass.GOLD: 8, SlaClass.SILVER: 4, SlaClass.BRONZE: 2, SlaClass.BATCH: 1}


def room_for(free_slots: int, free_pages: int, pages: int, backlog_tokens: int) -> bool:
    """Whether a replica should take one more request that may need ``pages``: it has a free slot, the KV pages, and fewer
    than ``BACKLOG_TOKENS_MAX`` prompt tokens before it that are not computed yet."""
    return free_slots > 0 and pages <= free_pages and backlog_tokens < BACKLOG_TOKENS_MAX


@dataclass(slots=True)
class _Queue:
    """What is known of one queue. ``window`` above zero means busy, zero believed empty; ``pulled_s`` is the time of its
    last pull, ``oldest_pulled_s`` of the oldest one that may still be open; ``order`` breaks ties, higher classes first."""

    sla_class: SlaClass
    lane: Lane
    order: int
    ceiling_pages: int = 0
    outstanding: int = 0
    window: int = 0
    pulled_s: float = -inf
    oldest_pulled_s: float = -inf
    expires_s: float = PULL_EXPIRES_S
    found_s: float = -inf
    blocked_since_s: float | None = None
    ageing_s: float = AGEING_S


class PullPlanner:
    """Keeps the credits of one replica."""

    def __init__(self) -> None:
        self._queues: dict[tuple[SlaClass, Lane], _Queue] = {}
        self._deficits = dict.fromkeys(SlaClass, 0)
        self._weights = dict(DEFAULT_WEIGHTS)
        self._waiting: frozenset[tuple[SlaClass, Lane]] | None = None
        self._paused_until_s = -inf
        self._longest_pages = 0
        self.aged_pages = 0
        """The ceiling of the largest lane that has not fitted for too long: nothing smaller may be taken."""
        self._planned_for: tuple[int, int] | None = None
        """The room of the last plan while nothing else changed: the same room would give no new pulls."""

    def open(self, *, kv_pages: int, block_size: int, max_context_len: int) -> None:
        """A lane's ceiling is capped at the replica's pages, so that a small replica still serves what fits."""
        self._longest_pages = ceil(max_context_len / block_size)
        self.set_kv_pages(kv_pages)

    def set_kv_pages(self, kv_pages: int) -> None:
        """The replica has so many pages from now on."""
        longest_pages = self._longest_pages
        for sla_class in SlaClass:
            for lane in Lane:
                ceiling_pages = min(LANE_PAGES_MAX.get(lane, longest_pages), longest_pages, kv_pages)
                queue = self._queues.setdefault((sla_class, lane), _Queue(sla_class, lane, len(self._queues)))
                queue.ceiling_pages = ceiling_pages
        self._planned_for = None

    @property
    def outstanding(self) -> int:
        """Credits that have not come back."""
        return sum(queue.outstanding for queue in self._queues.values())

    def slots_nobody_waits_for(self, free_slots: int) -> int:
        """Of the free slots, those that no ticket is likely to come for: what open pulls were promised is taken off, and
        nothing is left while a larger lane waits for the pages of all others to come free.

        Some slots may be promised twice, so that a pool in which requests come one by one gets from pulls to hands.
        """
        if self.aged_pages:
            return 0
        promised = 0
        for queue in self._queues.values():
            # One that has no pull open (its lane does not fit, or others took their turn) may hold another ticket.
            promised += max(1, queue.outstanding) if queue.window else 0
        return max(free_slots - promised, min(free_slots, HANDS_BESIDE_PULLS))

    def next_wake_s(self, *, pulling: bool) -> float:
        """When :meth:`write_off` or (while ``pulling``) :meth:`plan` has something to do though nothing happened."""
        due_s = [q.pulled_s + q.expires_s + WRITE_OFF_S for q in self._queues.values() if q.outstanding]
        if pulling and self._paused_until_s > -inf:
            due_s.append(self._paused_until_s)
        return min(due_s, default=inf)

    def set_pool(self, weights: Mapping[SlaClass, int], waiting: tuple[tuple[SlaClass, Lane], ...] | None) -> None:
        """Takes the pool's weights (missing ones keep their default) and what waits where."""
        self._weights = {sla_class: max(1, weights.get(sla_class, DEFAULT_WEIGHTS[sla_class])) for sla_class in SlaClass}
        self._waiting = None if waiting is None else frozenset(waiting)
        self._planned_for = None

    def found(self, now_s: float, sla_class: SlaClass, lane: Lane) -> None:
        """A pull brought a ticket."""
        queue = self._queues[sla_class, lane]
        queue.outstanding = max(0, queue.outstanding - 1)
        self._planned_for = None
        queue.window += 1
        queue.found_s = now_s
        queue.ageing_s = AGEING_S

    def expired(self, now_s: float, sla_class: SlaClass, lane: Lane, credits: int) -> None:
        """A pull ended with ``credits`` unused."""
        queue = self._queues[sla_class, lane]
        queue.outstanding = max(0, queue.outstanding - credits)
        self._planned_for = None
        if now_s - queue.oldest_pulled_s < min(PAUSE_BELOW_S, queue.expires_s):
            self._paused_until_s = now_s + PAUSE_S
        elif credits:
            queue.window = 0
            queue.ageing_s = min(AGEING_MAX_S, queue.ageing_s * 2)

    def rearm(self) -> None:
        """The bus is back: do not wait for the pause to end."""
        self._paused_until_s = -inf
        self._planned_for = None

    def write_off(self, now_s: float) -> None:
        """Takes credits for lost that should have come back long ago, so that no lost message stops a replica for ever."""
        for queue in self._queues.values():
            if queue.outstanding and now_s >= queue.pulled_s + queue.expires_s + WRITE_OFF_S:
                queue.outstanding = 0
                self._planned_for = None

    def plan(self, now_s: float, *, free_slots: int, free_pages: int, backlog_tokens: int = 0) -> list[Pull]:
        """New pulls for what is free now; their credits count as outstanding from here on. ``backlog_tokens`` are those of
        prompts that were taken and are not computed yet."""
        if now_s < self._paused_until_s:
            return []
        self._paused_until_s = -inf
        if not room_for(free_slots, max(0, free_pages), 0, backlog_tokens) or self._planned_for == (free_slots, free_pages):
            return []
        self._planned_for = (free_slots, free_pages)
        free_pages -= sum(q.outstanding * q.ceiling_pages for q in self._queues.values() if q.window)
        self.aged_pages = self._note_ageing(now_s, free_pages)
        fitting = [q for q in self._queues.values() if self.aged_pages <= q.ceiling_pages <= free_pages]
        credits: dict[tuple[SlaClass, Lane], int] = {}
        self._share_slots([q for q in fitting if q.window], free_slots, free_pages, credits)
        left_out = any(q.window and not q.outstanding and (q.sla_class, q.lane) not in credits for q in fitting)
        expires_s = PULL_EXPIRES_SHORT_S if left_out else PULL_EXPIRES_S
        pulls = [self._pull(now_s, self._queues[key], count, expires_s) for key, count in credits.items()]
        return pulls + self._take_turns(now_s, [q for q in fitting if not q.window], free_slots)

    def _note_ageing(self, now_s: float, free_pages: int) -> int:
        """Starts and stops the clocks of what does not fit; returns the ceiling below which no lane may be pulled."""
        aged_pages = 0
        for key, queue in self._queues.items():
            wanted = queue.window > 0 or self._waiting is None or key in self._waiting
            fits = queue.ceiling_pages <= free_pages
            if not wanted or (queue.outstanding and fits):
                queue.blocked_since_s = None
            elif queue.blocked_since_s is None:
                queue.blocked_since_s = None if fits else now_s
            elif now_s - queue.blocked_since_s >= (queue.ageing_s if self._waiting is None else AGEING_S):
                aged_pages = max(aged_pages, queue.ceiling_pages)
        return aged_pages

    def _share_slots(
        self, busy: list[_Queue], free_slots: int, free_pages: int, credits: dict[tuple[SlaClass, Lane], int]
    ) -> None:
        """Deficit round robin with a quantum of one credit: each round every class in question earns its weight, the
        richest one pays for all. Within a class the queue that was served longest ago comes first."""
        left = free_slots - sum(q.outstanding for q in self._queues.values() if q.window)
        while left > 0:
            ready = [
                q
                for q in busy
                if q.ceiling_pages <= free_pages and q.outstanding + credits.get((q.sla_class, q.lane), 0) < q.window
            ]
            classes = [c for c in SlaClass if any(q.sla_class is c for q in ready)]
            if not classes:
                return
            for sla_class in classes:
                self._deficits[sla_class] += self._weights[sla_class]
            richest = max(classes, key=lambda c: (self._deficits[c], self._weights[c], c.value))
            self._deficits[richest] -= sum(self._weights[c] for c in classes)
            queue = min(
                (q for q in ready if q.sla_class is richest),
                key=lambda q: (credits.get((q.sla_class, q.lane), 0), q.pulled_s, q.order),
            )
            credits[queue.sla_class, queue.lane] = credits.get((queue.sla_class, queue.lane), 0) + 1
            free_pages -= queue.ceiling_pages
            left -= 1

    def _take_turns(self, now_s: float, empty: list[_Queue], free_slots: int) -> list[Pull]:
        """One credit each: aged queues first, then those with waiting tickets or used recently, and ``TURNS_MIN`` for
        whoever was pulled longest ago."""
        left = min(PULL_SLACK, free_slots + TURNS_MIN) - sum(q.outstanding for q in self._queues.values() if not q.window)
        idle = [q for q in empty if not q.outstanding]
        if left <= 0 or not idle:
            return []
        idle.sort(key=lambda q: (q.pulled_s, q.order))
        aged = [q for q in idle if q.blocked_since_s is not None]
        warm = [q for q in idle if q.blocked_since_s is None and self._warm(now_s, q)]
        first = (aged + warm)[: max(0, left - TURNS_MIN)]
        others = [q for q in idle if q not in first][: left - len(first)]
        crowded = len(idle) > len(first) + len(others)
        pulls = [self._pull(now_s, q, 1, PULL_EXPIRES_S) for q in first]
        return pulls + [self._pull(now_s, q, 1, PULL_EXPIRES_SHORT_S if crowded else PULL_EXPIRES_S) for q in others]

    def _warm(self, now_s: float, queue: _Queue) -> bool:
        waiting = self._waiting is not None and (queue.sla_class, queue.lane) in self._waiting
        return waiting or now_s - queue.found_s < WARM_S

    def _pull(self, now_s: float, queue: _Queue, credits: int, expires_s: float) -> Pull:
        if not queue.outstanding:
            queue.oldest_pulled_s = now_s
        queue.outstanding += credits
        queue.pulled_s = now_s
        queue.expires_s = expires_s
        queue.blocked_since_s = None
        return Pull(queue.sla_class, queue.lane, credits, expires_s)
