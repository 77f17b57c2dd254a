"""What turns out to be too little: more is asked for where requests wait or go on missing targets (decisions 0023, 0025).

Two things can be wrong with what was reckoned. There may be more work than it says: then more *load* is asked for. Or what
is there carries the load, but answers too slowly beside its neighbours: then more *of its devices' time* is asked for, which
helps models whose load is small and whose prompts are long.
"""

from __future__ import annotations

import math

from broker.core.plan import tunables as t


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
        "share",
    )

    def __init__(self) -> None:
        self.load = 0.0
        """By how much more load is asked for than is reckoned, as a share of it."""
        self.share = 0.0
        """Of its devices' time: what each of its replicas should have."""
        self._memory_s = t.LOAD_MEMORY_S
        self._raised_s = math.inf
        """When ``load`` last grew; never so far: infinite."""
        self._begun_s = math.inf
        self._finished = self._missed = 0.0
        self._lasting_finished = self._lasting_missed = 0.0

    def look(self, now_s: float, gone_s: float, finished: int, missed: int, waits: float, *, cold: bool = False) -> None:
        """What happened in the last ``gone_s`` seconds: requests that ended, how many of them missed their targets, and
        for how much of the time to the first token (1: all of it) the first in the queue has waited. ``cold``: no replica
        is ready."""
        self._begun_s = now_s if cold else min(self._begun_s, now_s)
        lasting = self._lasting(now_s, gone_s, finished, missed)
        self.share = min(
            t.SHARE_MIN_MOST, self.share * math.exp(-gone_s / t.SHARE_MEMORY_S) + lasting * gone_s / t.SHARE_RISE_S
        )
        fade = math.exp(-gone_s / t.MISSED_MEMORY_S)
        self._finished = self._finished * fade + finished
        self._missed = self._missed * fade + missed
        excess = self._missed / (self._finished + t.MISSED_PRIOR) - t.MISSED_FREE
        more = t.LOAD_MISSED * min(max(excess, 0.0), 0.1)
        if waits > t.WAIT_SHARE:
            more += t.LOAD_WAITING
        self.load *= math.exp(-gone_s / self._memory_s)
        if more > 0:
            if now_s - self._raised_s > t.MISSED_MEMORY_S:
                self._memory_s = min(2.0 * self._memory_s, t.LOAD_MEMORY_S_MAX)
            self._raised_s = now_s
            most = t.LOAD_MAX + t.LOAD_LASTING * lasting
            self.load = max(self.load, min(self.load + more * gone_s, most))
        else:
            self._memory_s += (t.LOAD_MEMORY_S - self._memory_s) * gone_s / t.RELAPSE_MEMORY_S

    def _lasting(self, now_s: float, gone_s: float, finished: int, missed: int) -> float:
        """How much misses last, from 0 to 1."""
        if now_s - self._begun_s < t.LASTING_AFTER_S:
            return 0.0
        fade = math.exp(-gone_s / t.LASTING_S)
        self._lasting_finished = self._lasting_finished * fade + finished
        self._lasting_missed = self._lasting_missed * fade + missed
        share = self._lasting_missed / (self._lasting_finished + t.LASTING_PRIOR)
        return min(max(share / t.LASTING_MISSED - 1.0, 0.0), 1.0)
