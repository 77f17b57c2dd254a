"""Signals that decisions and people go by, each as SPEC.md sections 2 and 3 define it: pure functions, no clock.

``interference`` (SCH-7) per pair, ``fairness_index`` (SCH-7) per class or model, fragmentation and expected latency (SCH-1,
SCH-2). What needs a window of readings is in ``windows``, class weights in ``priorities``, TWU in ``profiles.twu``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from broker.core.plan.tunables import FRAGMENTATION_MAX
from subjects.ids import DeploymentKey

# -------------------------------------------------------------------------------------------------- fairness, interference


def fairness_index(throughput: float, target: float, p95_s: float, slo_s: float) -> float:
    """``(throughput / target) * (1 - p95 / SLO)``, as given: negative where p95 misses the SLO, above 1 beyond the target.

    Who has no target, or asks for less than it and waits for nothing, is to be given ``target = throughput`` by the caller.
    """
    if not target > 0.0 or not slo_s > 0.0:
        raise ValueError("target and SLO must be above 0")
    return throughput / target * (1.0 - p95_s / slo_s)


def interference(p95_beside_s: float, p95_alone_s: float) -> float:
    """How much a source slows a target, from 0 to 100: ``100 * max(0, p95 beside / p95 predicted alone at this load - 1)``.

    ``INTERFERENCE_SEPARATES`` asks for the pair to be parted, ``INTERFERENCE_FAILS`` fails the load test (OPS-9).
    """
    if not p95_alone_s > 0.0:
        raise ValueError("the p95 predicted alone must be above 0")
    return min(100.0, 100.0 * max(0.0, p95_beside_s / p95_alone_s - 1.0))


def most_disturbing(by_source: Mapping[DeploymentKey, float]) -> DeploymentKey | None:
    """Who yields for a target that is treated unfairly: the source that disturbs it most, if any does."""
    source = min(by_source, key=lambda deployment: (-by_source[deployment], deployment), default=None)
    return source if source is not None and by_source[source] > 0.0 else None


# ------------------------------------------------------------------------------------------------- fragmentation, latency


def fits_whole(needed_bytes: int, free_runs: Sequence[int]) -> bool:
    """Whether one free run holds it: for what needs contiguous memory the sum of the runs says nothing."""
    return needed_bytes <= max(free_runs, default=0)


def fragmentation_runs(free_runs: Sequence[int]) -> float:
    """Where memory must be contiguous: the share of the free bytes outside the largest run. 0 when nothing is free."""
    free = sum(free_runs)
    return 1.0 - max(free_runs) / free if free > 0 else 0.0


def fragmentation_paged(free_runs: Sequence[int], block_bytes: int) -> float:
    """Where memory is paged: the share of the free bytes that make up no whole KV block of ``block_bytes``."""
    if block_bytes < 1:
        raise ValueError("a block has at least one byte")
    free = sum(free_runs)
    return sum(run % block_bytes for run in free_runs) / free if free > 0 else 0.0


def expected_latency_s(base_s: float, fragmentation: float, load_s: float = 0.0) -> float:
    """``base * (1 + fragmentation) + load overhead`` (SCH-2); ``load_s`` is 0 where the model is loaded already."""
    return base_s * (1.0 + fragmentation) + load_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """A place that passed the feasibility filter."""

    name: str
    base_s: float
    fragmentation: float
    load_s: float = 0.0

    @property
    def latency_s(self) -> float:
        """Expected there."""
        return expected_latency_s(self.base_s, self.fragmentation, self.load_s)


def cheapest(candidates: Iterable[Candidate]) -> Candidate | None:
    """The lowest expected latency among places with fragmentation under 30 %; where none is, among all of them."""
    return min(candidates, key=lambda c: (c.fragmentation >= FRAGMENTATION_MAX, c.latency_s, c.name), default=None)
