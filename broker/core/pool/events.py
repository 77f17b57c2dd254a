"""What the scheduler core hears, what it orders, and the numbers of its policy.

Events are in the past tense, commands in the imperative. All durations are seconds; ``now_s`` inside the core is monotonic.
"""

from __future__ import annotations

import msgspec

from subjects import messages as m
from subjects.ids import DeploymentKey, OperationId, ReplicaId, WorkerId


class SchedulerSettings(msgspec.Struct, frozen=True):
    """The numbers of the first policy, each with its reason."""

    suspect_s: float = 0.3
    """A worker this long without a beat gets no new work."""
    dead_s: float = 2.0
    """A worker this long without a beat is dead, and so are its replicas, for ever."""
    mass_silence_extra_s: float = 5.0
    """How much longer the verdict waits when many workers fall silent together: then it is rather the network."""
    mass_silence_share: float = 0.3
    mass_silence_workers_min: int = 4
    round_trip_gap_s_max: float = 1.0
    """Silence is counted between two round trips on our own bus at most this far apart, and at no other time."""
    ingress_silent_s: float = 2.0
    """The demand of a gateway that is silent this long is forgotten."""
    drain_s: float = 30.0
    """How long a drained replica may finish its requests; then they are given back and continue elsewhere."""
    backoff_s_min: float = 2.0
    backoff_s_max: float = 60.0
    """Doubling between these two bounds gives at most five attempts in the first minute."""
    excuses_max: int = 3
    """Loads that ended by no fault of the model (worker died, agent refused) before they count as its failure."""
    excuse_pause_s: float = 1.0
    load_s_max: float = 300.0
    unload_s_max: float = 15.0
    change_s_max: float = 10.0
    """How long a change of KV or concurrency may wait for room, and take."""
    step_grace_s: float = 10.0
    """How much longer than the agent's own bound a step may take before it counts as failed."""
    answer_s_max: float = 1.0
    """How long a command may go without an answer before it is sent again."""
    sends_max: int = 4
    """How often one command is sent without any answer before its step has failed."""
    ask_again_s: float = 5.0
    """An accepted operation without an end is asked for again this often: its event may have been lost."""
    worker_missing_s: float = 10.0
    """Requests wait this long for a worker that could run them before they are refused."""
    worker_forgotten_s: float = 60.0
    """How long a dead worker's devices still count when we ask whether a model could ever fit."""
    listen_s: float = 0.5
    """A new leader listens this long before its first decision, and until each beating worker has reported,"""
    listen_s_max: float = 6.0
    """but no longer than this."""
    digest_s: float = 1.0
    tick_s: float = 0.1
    timeline_entries_max: int = 200
    dead_replicas_max: int = 1000
    policy_look_s: float = 0.2
    """The policy is asked at most this often, and at once when a model without replicas starts to wait."""
    outlives_policy: bool = True
    """A policy's mistake costs its decision, and people are told; False: it ends whoever asked, as a simulation should."""
    interrupts: bool = False
    """Whether a policy may interrupt answers that run: only where gateways let them go on elsewhere (REL-2). Else every stop
    drains."""
    models_per_device_max: int | None = None
    """Different models that may share a device (SCH-3); None: as many as its memory holds."""


# ---------------------------------------------------------------------------------------------------------------- events


class BeatSeen(msgspec.Struct, frozen=True):
    """A worker is alive; ``epoch_seen`` is the highest epoch it has obeyed."""

    worker: WorkerId
    epoch_seen: int


class WorkerReported(msgspec.Struct, frozen=True):
    """A worker's whole state arrived."""

    snapshot: m.WorkerSnapshot


class IngressReported(msgspec.Struct, frozen=True):
    """A gateway's whole demand arrived: a model that it does not name has none there."""

    telemetry: m.IngressTelemetry


class CommandAnswered(msgspec.Struct, frozen=True):
    """A worker answered a command at once."""

    reply: m.CommandReply


class CommandUnanswered(msgspec.Struct, frozen=True):
    """No answer came in time, or nobody listens."""

    operation: OperationId


class OperationSeen(msgspec.Struct, frozen=True):
    """A worker told of an operation's progress or end, or of a replica's death."""

    event: m.WorkerEvent


class RegistryLoaded(msgspec.Struct, frozen=True):
    """The whole registry was read. Before this nothing is decided, or every loaded model would look like an orphan."""

    records: tuple[m.ModelRecord, ...]


class ModelApplied(msgspec.Struct, frozen=True):
    """A record was stored. It replaces the one of the same name and clears the model's failures."""

    record: m.ModelRecord


class ModelRemoved(msgspec.Struct, frozen=True):
    """A record was deleted; what is loaded of it will be drained and unloaded."""

    name: str


class OverridesChanged(msgspec.Struct, frozen=True):
    """People's words that win over automatic decisions: all that hold from now on, in place of those that held before.

    A pin or mode wins over the record; nothing automatic starts, stops or changes a replica of a locked model, on a locked
    device, or one that is locked itself; a drained worker or device (by its worker's name without incarnation) takes nothing
    new, and what is there leaves, locked, pinned or not; an event is load that is known beforehand.
    """

    overrides: m.Overrides


class UnloadRequested(msgspec.Struct, frozen=True):
    """A person wants a model out now; it comes back on the next demand."""

    name: str


class KvOrdered(msgspec.Struct, frozen=True):
    """A person wants something done about a model's KV by a worker's node: evicted, or pulled from another's (SCH-8)."""

    worker: WorkerId
    deployment: DeploymentKey
    order: m.KvOrder


class CostsKept(msgspec.Struct, frozen=True):
    """What was measured and kept before, or what another scheduler has kept just now."""

    entries: tuple[m.KeptCosts, ...]


class ProfileAsked(msgspec.Struct, frozen=True):
    """A person wants whole curves of a model for the next ``for_s`` seconds; 0: no longer."""

    deployment: DeploymentKey
    for_s: float
    batch_max: int


class DrainRequested(msgspec.Struct, frozen=True):
    """A person wants one replica out, locked, pinned or not. ``interrupt`` does not let its requests finish there."""

    replica: ReplicaId
    interrupt: bool = False
    bound_s: float | None = None
    """How long its requests may take to finish; None takes ``drain_s``."""


class JournalRestored(msgspec.Struct, frozen=True):
    """What earlier leaders left unfinished: the entries of all transactions without an end, oldest first.

    Comes before :class:`LeadershipGained`. The agents' reports are trusted first; what they do not show as done is done.
    """

    entries: tuple[m.JournalEntry, ...]


class DigestRestored(msgspec.Struct, frozen=True):
    """The last digest of an earlier leader: its dead stay dead, its timeline goes on."""

    digest: m.PoolDigest


class LeadershipGained(msgspec.Struct, frozen=True):
    """This scheduler leads from now on, under ``epoch``."""

    epoch: int


class LeadershipLost(msgspec.Struct, frozen=True):
    """This scheduler leads no more; it goes on listening."""


class HeaviestGiveWay(msgspec.Struct, frozen=True):
    """These replicas, and no others from now on, are of the heaviest model on a device whose TWU is too high (SCH-6)."""

    replicas: tuple[ReplicaId, ...]


class BusRoundTripMade(msgspec.Struct, frozen=True):
    """A ping to the bus came back just now."""


class Ticked(msgspec.Struct, frozen=True):
    """Time passed. ``unix_s`` is the wall clock, used only to stamp what people read."""

    unix_s: float


SchedulerEvent = (
    BeatSeen
    | WorkerReported
    | IngressReported
    | CommandAnswered
    | CommandUnanswered
    | OperationSeen
    | RegistryLoaded
    | ModelApplied
    | ModelRemoved
    | OverridesChanged
    | UnloadRequested
    | KvOrdered
    | DrainRequested
    | JournalRestored
    | DigestRestored
    | LeadershipGained
    | LeadershipLost
    | HeaviestGiveWay
    | BusRoundTripMade
    | CostsKept
    | ProfileAsked
    | Ticked
)


# -------------------------------------------------------------------------------------------------------------- commands


class SendCommand(msgspec.Struct, frozen=True):
    """Send to a worker and report the answer, or its absence after ``timeout_s``."""

    worker: WorkerId
    command: m.WorkerCommand
    timeout_s: float


class AppendJournal(msgspec.Struct, frozen=True):
    """Append to the journal, in this order.

    Comes before the :class:`SendCommand` it tells of; the shell need not wait for the append, since a successor trusts what
    agents report more than what the journal says.
    """

    entries: tuple[m.JournalEntry, ...]


class PublishDigest(msgspec.Struct, frozen=True):
    """Tell everybody the state of the pool. ``stored`` is the copy for the bucket, from which a successor goes on: it has
    the timeline and all of the dead besides."""

    digest: m.PoolDigest
    stored: m.PoolDigest


class RaiseAlert(msgspec.Struct, frozen=True):
    """Publish an alert."""

    alert: m.Alert


class Resign(msgspec.Struct, frozen=True):
    """A worker has obeyed a higher epoch: somebody else leads. Give the lease up."""

    reason: str


class KeepCosts(msgspec.Struct, frozen=True):
    """Keep what was measured, over restarts of everything."""

    kept: m.KeptCosts


SchedulerCommand = SendCommand | AppendJournal | PublishDigest | RaiseAlert | Resign | KeepCosts
