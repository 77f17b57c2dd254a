"""What the agent core remembers of a replica and of an operation, and the tables of their states."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from subjects.ids import DeviceId, OperationId, ReplicaId
from subjects.messages import ModelRecord, OperationEnded, ReplicaState, StepSums

PING_UNANSWERED_S = 2.0
"""A serving replica that leaves a ping unanswered this long is killed."""

TRANSITIONS: dict[ReplicaState, tuple[ReplicaState, ...]] = {
    ReplicaState.ABSENT: (ReplicaState.LOADING, ReplicaState.FAILED),
    ReplicaState.FETCHING: (ReplicaState.LOADING, ReplicaState.FAILED, ReplicaState.ABSENT),
    ReplicaState.LOADING: (ReplicaState.FETCHING, ReplicaState.WARMING, ReplicaState.FAILED, ReplicaState.ABSENT),
    ReplicaState.WARMING: (ReplicaState.READY, ReplicaState.FAILED, ReplicaState.ABSENT),
    ReplicaState.READY: (ReplicaState.DRAINING, ReplicaState.FAILED),
    ReplicaState.DRAINING: (ReplicaState.ASLEEP, ReplicaState.FAILED, ReplicaState.ABSENT),
    ReplicaState.ASLEEP: (ReplicaState.LOADING, ReplicaState.FAILED, ReplicaState.ABSENT),
    ReplicaState.FAILED: (ReplicaState.ABSENT,),
}
"""What may follow a state (WRK-3). ABSENT waits for its turn to load, or has gone; ASLEEP has a process and no memory."""

LOAD_STATES = (ReplicaState.FETCHING, ReplicaState.LOADING, ReplicaState.WARMING)
SERVING_STATES = (ReplicaState.READY, ReplicaState.DRAINING)


class Process(Enum):
    """A replica's process, as opposed to the state of its model."""

    QUEUED = "queued"
    SPAWNING = "spawning"
    RUNNING = "running"
    STOPPING = "stopping"
    KILLED = "killed"
    GONE = "gone"


PROCESS_TRANSITIONS: dict[Process, tuple[Process, ...]] = {
    Process.QUEUED: (Process.SPAWNING, Process.GONE),
    Process.SPAWNING: (Process.RUNNING, Process.GONE),
    Process.RUNNING: (Process.STOPPING, Process.KILLED, Process.GONE),
    Process.STOPPING: (Process.KILLED, Process.GONE),
    Process.KILLED: (Process.GONE,),
    Process.GONE: (),
}
"""What may follow: a budget is freed by GONE and by nothing else."""


@dataclass(slots=True)
class PendingChange:
    """Another KV budget, or a sleep, that the replica was asked for and has not answered."""

    number: int
    operation: OperationId
    deadline_s: float
    record: ModelRecord | None = None
    """With the new budget; None for a sleep."""


@dataclass(slots=True)
class Replica:
    """One replica; ``devices`` is what it spans, the leading one first."""

    replica: ReplicaId
    devices: tuple[DeviceId, ...]
    record: ModelRecord
    load_timeout_s: float
    state_since_s: float
    state: ReplicaState = ReplicaState.ABSENT
    process: Process = Process.QUEUED
    pid: int | None = None
    ending: bool = False
    """Told to end by an unload or a shutdown, as opposed to having failed."""
    failure: str = ""
    wants_stderr: bool = False
    """Whether the failure was found by this agent, so that the process's last words add something to it."""
    served: bool = False
    drained: bool = False
    load_operation: OperationId | None = None
    drain_operations: list[OperationId] = field(default_factory=list)
    unload_operations: list[OperationId] = field(default_factory=list)
    load_deadline_s: float | None = None
    drain_deadline_s: float | None = None
    kill_at_s: float | None = None
    kill_bound_s: float | None = None
    ping_at_s: float | None = None
    vanish_at_s: float | None = None
    change: PendingChange | None = None
    changes: int = 0
    """Changes that it was asked for."""
    wakes: bool = False
    """Asleep, and told to wake when its devices load nothing else."""
    pings: deque[tuple[int, float]] = field(default_factory=deque)
    """Number and time of the unanswered ones, oldest first."""
    pings_sent: int = 0
    running: int = 0
    kv_pages_free: int = 0
    idle_s: float = 0.0
    counted_s: float = 0.0
    engine_slots: int = 0
    slots: int = 0
    kv_pages: int = 0
    resizes_kv: bool = False
    continues: bool = False
    sleeps: bool = False
    busy_s: float = 0.0
    preemptions: int = 0
    step_s: float = 0.0
    hit_ratio: float | None = None
    sums: StepSums | None = None
    measure: bool = False
    memory_bytes: int = 0
    progress: float = 0.0
    detail: str = ""

    @property
    def is_idle(self) -> bool:
        """Whether it serves, and holds no request as far as it told."""
        return self.state is ReplicaState.READY and self.process is Process.RUNNING and not self.running

    @property
    def device(self) -> DeviceId:
        """The leading device."""
        return self.devices[0]

    def timers(self) -> Iterator[float]:
        """When something of it is due."""
        for at_s in (
            self.load_deadline_s,
            self.drain_deadline_s,
            self.kill_at_s,
            self.kill_bound_s,
            self.ping_at_s,
            self.vanish_at_s,
        ):
            if at_s is not None:
                yield at_s
        if self.change is not None:
            yield self.change.deadline_s
        if self.pings:
            yield self.pings[0][1] + PING_UNANSWERED_S


@dataclass(slots=True)
class Operation:
    """One command that was taken or refused."""

    started_s: float
    """When work on it began; that of a load when its devices were free for it."""
    replica: ReplicaId | None
    refusal: str = ""
    ended: OperationEnded | None = None
