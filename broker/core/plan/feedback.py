"""What turns out to be too little: more is asked for where requests wait or go on missing targets (decisions 0023, 0025).

Two things can be wrong with what was reckoned. There may be more work than it says: then more *load* is asked for. Or what
is there carries the load, but answers too slowly beside its neighbours: then more *of its devices' time* is asked for, which
helps models whose load is small and whose prompts are long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CorrectionSettings:
    """Numbers found by simulation."""

    missed_memory_s: float = 30.0
    missed_prior: float = 20.0
    missed_free: float = 0.006
    """Share of requests that may miss their targets before more load is asked for than is reckoned,"""
    load_missed: float = 0.3
    """by so much of it per second and share above it,"""
    wait_share: float = 0.5
    load_waiting: float = 0.03
    """and by so much per second in which somebody has waited for this part of the time to the first token;"""
    load_max: float = 0.2
    """at most by so much."""
    memory_s: float = 90.0
    memory_s_max: float = 600.0
    relapse_s: float = 30.0
    relapse_memory_s: float = 1800.0
    """How fast that is forgotten; twice as slowly each time it turns out, after so long a pause, to be needed after all.
    That in turn is forgotten within half an hour."""
    lasting_s: float = 600.0
    lasting_prior: float = 100.0
    lasting_missed: float = 0.008
    """Misses last when, of the requests of about so long, more than this share missed; fully so at twice it."""
    lasting_after_s: float = 90.0
    """What is missed so soon after a model's first replica is ready tells of its load only."""
    load_lasting: float = 0.5
    """By so much more load may be asked for while they last in full,"""
    share_s: float = 60.0
    share_memory_s: float = 300.0
    share_max: float = 0.9
    """and the share of time that is asked for goes from nothing to all within so long, at most to ``share_max``; forgotten
    within ``share_memory_s``."""


class Correction:
    """Of one model."""

    __slots__ = (
        "_begun_s",
        "_finished",
        "_lasting_finished",
        "_lasting_missed",
        "_memory_s",
        "_missed",
        "_raised_s",
        "load",
        "settings",
        "share",
    )

    def __init__(self, settings: CorrectionSettings) -> None:
        self.settings = settings
        self.load = 0.0
        """By how much more load is asked for than is reckoned, as a share of it."""
        self.share = 0.0
        """Of its devices' time: what each of its replicas should have."""
        self._memory_s = settings.memory_s
        self._raised_s = math.inf
        """When ``load`` last grew; never so far: infinite."""
        self._begun_s = math.inf
        self._finished = self._missed = 0.0
        self._lasting_finished = self._lasting_missed = 0.0

    def look(self, now_s: float, gone_s: float, finished: int, missed: int, waits: float, *, cold: bool = False) -> None:
        """What happened in the last ``gone_s`` seconds: requests that ended, how many of them missed their targets, and
        for how much of the time to the first token (1: all of it) the first in the queue has waited. ``cold``: no replica
        is ready."""
        s = self.settings
        self._begun_s = now_s if cold else min(self._begun_s, now_s)
        lasting = self._lasting(now_s, gone_s, finished, missed)
        self.share = min(s.share_max, self.share * math.exp(-gone_s / s.share_memory_s) + lasting * gone_s / s.share_s)
        fade = math.exp(-gone_s / s.missed_memory_s)
        self._finished = self._finished * fade + finished
        self._missed = self._missed * fade + missed
        excess = self._missed / (self._finished + s.missed_prior) - s.missed_free
        more = s.load_missed * min(max(excess, 0.0), 0.1)
        if waits > s.wait_share:
            more += s.load_waiting
        self.load *= math.exp(-gone_s / self._memory_s)
        if more > 0:
            if now_s - self._raised_s > s.relapse_s:
                self._memory_s = min(2.0 * self._memory_s, s.memory_s_max)
            self._raised_s = now_s
            most = s.load_max + s.load_lasting * lasting
            self.load = max(self.load, min(self.load + more * gone_s, most))
        else:
            self._memory_s += (s.memory_s - self._memory_s) * gone_s / s.relapse_memory_s

    def _lasting(self, now_s: float, gone_s: float, finished: int, missed: int) -> float:
        """How much misses last, from 0 to 1."""
        s = self.settings
        if now_s - self._begun_s < s.lasting_after_s:
            return 0.0
        fade = math.exp(-gone_s / s.lasting_s)
        self._lasting_finished = self._lasting_finished * fade + finished
        self._lasting_missed = self._lasting_missed * fade + missed
        share = self._lasting_missed / (self._lasting_finished + s.lasting_prior)
        return min(max(share / s.lasting_missed - 1.0, 0.0), 1.0)
