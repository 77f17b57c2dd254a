"""What can be changed about a run beside workload, policy and seed."""

from __future__ import annotations

from dataclasses import dataclass

from broker.core.pool.events import SchedulerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Clients that give up and come again: after ``wait_s`` without a first token, at most ``tries_max`` times in all."""

    wait_s: float
    tries_max: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Defaults are those of all tables."""

    error_sigma: float = 0.05
    """Spread of the factor per model and device by which everything takes longer or shorter than the profile says."""
    tick_s: float = 0.2
    """Cadence of telemetry and decisions."""
    bus_s: float = 0.002
    """From one process to another."""
    max_wait_s: float = 120.0
    """Longest wait of a request for a replica; then it is refused."""
    tail_s_max: float = 900.0
    """How long after its window a run waits for the last requests."""
    patience: Patience | None = None
    fair: bool = True
    """Whether classes take turns by weight; else all requests of a model are served in order of arrival."""
    settings: SchedulerSettings | None = None
    """The scheduler's; None takes those of a quiet pool, where nobody falls silent."""
    series_points_max: int = 600
