"""Who makes up the pool, as last reported: workers, their devices and replicas, and what gateways ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import msgspec

from subjects import messages as m
from subjects.ids import DeviceId, ReplicaId, WorkerId

COMING = frozenset({m.ReplicaState.FETCHING, m.ReplicaState.LOADING, m.ReplicaState.WARMING})
"""States on the way to ready: busy by definition, never evicted."""


class Presence(Enum):
    """A verdict on a worker."""

    LIVE = "live"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(slots=True, eq=False)
class Worker:
    """A worker agent as we know it. ``last_heard`` is in heard seconds."""

    worker: WorkerId
    last_heard: float
    presence: Presence = Presence.LIVE
    snapshot: m.WorkerSnapshot | None = None
    died_s: float = 0.0
    closed: bool = False
    """Drained by a person."""

    @property
    def usable(self) -> bool:
        """Whether new work may go there."""
        return self.reachable and not self.closed

    @property
    def reachable(self) -> bool:
        """Whether it takes commands at all."""
        return self.presence is Presence.LIVE and self.snapshot is not None and not self.snapshot.draining


@dataclass(slots=True, eq=False)
class Replica:
    """A replica as last reported; the same object as long as it is listed.

    ``dead``: declared dead although its agent may still list it.
    """

    worker: WorkerId
    report: m.ReplicaReport
    reported_s: float
    ready_s: float | None = None
    """Since when it is ready."""
    dead: bool = False

    @property
    def replica(self) -> ReplicaId:
        return self.report.replica

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        """All that it spans, the leading one first."""
        return (self.report.device, *self.report.peers)

    @property
    def last_used_s(self) -> float:
        """When its agent last saw it hold a request."""
        return self.reported_s if self.report.running else self.reported_s - self.report.idle_s


@dataclass(slots=True, eq=False)
class Device:
    """A device of a worker, with its newest report."""

    worker: Worker
    report: m.DeviceReport
    key: tuple[WorkerId, DeviceId]


class Demand(msgspec.Struct, frozen=True):
    """Demand for one model over all gateways, now."""

    waiting: int = 0
    running: int = 0
    oldest_wait_s: float = 0.0
    queues: frozenset[tuple[m.SlaClass, m.Lane]] = frozenset()
    """Where tickets wait."""
    waiting_input_tokens: int = 0

    @property
    def any(self) -> bool:
        return self.waiting + self.running > 0


@dataclass(slots=True)
class Flow:
    """What arrived and ended over all gateways since somebody last took it, by length class where it arrived."""

    requests: list[int] = field(default_factory=lambda: [0, 0, 0])
    input_tokens: list[int] = field(default_factory=lambda: [0, 0, 0])
    output_tokens: list[int] = field(default_factory=lambda: [0, 0, 0])
    finished: int = 0
    finished_output_tokens: int = 0
    within_slo: int = 0

    def add(self, row: m.ModelDemand) -> None:
        """One gateway's counts of one model, class and lane."""
        self.finished += row.finished
        self.finished_output_tokens += row.output_tokens
        self.within_slo += row.within_slo
        if row.arrived:
            for index in range(3):
                self.requests[index] += row.arrived_lengths[index]
                self.input_tokens[index] += row.arrived_input_tokens[index]
                self.output_tokens[index] += row.arrived_output_tokens[index]


class Changes(msgspec.Struct, frozen=True):
    """What a report or verdict changed, for whoever must act on it."""

    appeared: tuple[Replica, ...] = ()
    changed: tuple[Replica, ...] = ()
    vanished: tuple[Replica, ...] = ()
    ended: tuple[Replica, ...] = ()
    """Failed before, and their processes are gone now."""

    @property
    def any(self) -> bool:
        return bool(self.appeared or self.changed or self.vanished or self.ended)
