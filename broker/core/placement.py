"""The scheduler's policy: which models are loaded where, who leaves for whom, and when."""

from __future__ import annotations

from broker.core.scheduler_events import SchedulerCommand, SchedulerEvent, SchedulerSettings


class SchedulerCore:
    """Pure: events in, commands out. One instance per scheduler process, leader or standby."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        self.settings = settings or SchedulerSettings()
        self.next_wake_s = 0.0

    @property
    def epoch_seen_max(self) -> int:
        """The highest epoch that any worker has reported; a new leader's epoch must be above it."""
        raise NotImplementedError

    def step(self, now_s: float, event: SchedulerEvent) -> list[SchedulerCommand]:
        """Takes one event and returns what must be done, in order."""
        raise NotImplementedError
