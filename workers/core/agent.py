"""The decisions of a worker agent: which replica may start, when it is ended, and what is said about it.

The rules, all on this page:

- A load is refused unless the budgets of all replicas on the device, its own included, fit the device; the budget is held
  from then until the process has exited, so the sum is within the capacity at every instant.
- A replica that spans several devices is charged its budget on each of them, or is refused.
- Loads on one device run one after the other, in the order they were accepted; waking is a load.
- While a change of KV is under way the larger budget is charged. One asleep is charged its overhead alone.
- An operation ends only when its effect is complete: of a failed load or an unload, when the process is gone.
- A replica is unloaded only after ``Drained``, unless forced. One that does not drain in its bound is stopped, one that
  does not stop is killed, and one that serves and leaves a ping unanswered is killed.
- An operation id is applied once. A repeated one is answered so, and the event of its end is sent again.
- A command under a lower epoch than the highest seen is refused.
- What is asked of the KV node ends with its answer or with its bound; its death ends no replica (``agent_kv``).

Pings are judged only while a replica serves: loading may block its event loop, and the load has its own bound.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from typing import assert_never

import msgspec

from profiles.budget import with_kv
from profiles.costs import engine_name
from subjects import messages as m
from subjects.ids import DeviceId, OperationId, ReplicaId
from workers import control_messages as c
from workers.core import agent_events as ev
from workers.core.agent_devices import DeviceLedger
from workers.core.agent_kv import KvDesk
from workers.core.agent_refusals import Refusals
from workers.core.agent_replica import (
    LOAD_STATES,
    SERVING_STATES,
    Operation,
    PendingChange,
    Replica,
)
from workers.core.agent_replica import (
    PING_UNANSWERED_S as PING_UNANSWERED_S,
)
from workers.core.agent_replica import (
    PROCESS_TRANSITIONS as PROCESS_TRANSITIONS,
)
from workers.core.agent_replica import (
    TRANSITIONS as TRANSITIONS,
)
from workers.core.agent_replica import (
    Process as Process,
)

PING_EVERY_S = 0.5
AGENT_STALL_S = 1.0
"""A longer gap between two steps means that this agent did not run; pings sent before it prove nothing."""
DRAIN_GRACE_S = 2.0
"""How long past its bound a drain may answer before the replica is stopped."""
STOP_GRACE_S = 5.0
"""How long a replica that was told to stop may take before it is killed."""
FAILED_EXIT_S = 1.0
"""How long a replica that reported its own failure, or closed its control connection, may take to exit."""
CHANGE_S_MAX = 30.0
"""How long a change of KV or a sleep may take to be answered."""
WAKE_S_MAX = 120.0
"""How long a wake may take, its warm-up included."""
KILL_BOUND_S = 10.0
"""A process that outlives SIGKILL this long is reported; its budget stays charged."""
SNAPSHOT_EVERY_S = 5.0
SNAPSHOT_COALESCE_S = 0.2
"""Changes of counters alone are gathered this long; changes of state are told at once."""
FAILED_SHOWN_S = 10.0
"""A failed replica stays in snapshots this long after its process is gone (two full snapshots), then vanishes."""
OPERATIONS_RUNNING_MAX = 256
OPERATIONS_ENDED_MAX = 1024
"""How many ended operations are remembered, to answer a repeated id."""
FAILURE_CHARS_MAX = 600
_STDERR_LINES_MAX = 6


class AgentCore:
    """See the module's docstring. Wants a :class:`Ticked` at :attr:`next_wake_s` and no later than a few 10 ms after."""

    def __init__(self, settings: ev.AgentSettings) -> None:
        self._settings = settings
        self._ledger = DeviceLedger(settings.devices)
        self._replicas: dict[ReplicaId, Replica] = {}
        self._kv = KvDesk(settings.worker, enabled=settings.kv)
        self._refusals = Refusals(settings, self._ledger, self._replicas, self._kv)
        self._loading: dict[DeviceId, ReplicaId] = {}
        self._operations: dict[OperationId, Operation] = {}
        self._ended: deque[OperationId] = deque()
        self._epoch_seen = 0
        self._sequence = 0
        self._stepped_s = -math.inf
        self._published_s = -math.inf
        self._changed = True
        self._counters_changed = False
        self._shutting_down = False
        self._exited = False
        self._out: list[ev.AgentCommand] = []

    # ---- what the shell may read

    @property
    def epoch_seen(self) -> int:
        """The highest epoch of any command; beats carry it."""
        return self._epoch_seen

    @property
    def next_wake_s(self) -> float:
        """When a ``Ticked`` is wanted; never infinite, since full snapshots are periodic."""
        wakes = [self._snapshot_due_s, self._kv.next_wake_s]
        for replica in self._replicas.values():
            wakes.extend(replica.timers())
        return min(wakes)

    @property
    def _snapshot_due_s(self) -> float:
        # One expression for "when" and "whether", since a sum and a difference of floats need not agree.
        return self._published_s + (SNAPSHOT_COALESCE_S if self._counters_changed else SNAPSHOT_EVERY_S)

    def reserved_bytes(self, device: DeviceId) -> int:
        """The sum of the budgets that are charged to a device now."""
        return self._ledger.charged(device)

    def snapshot(self, now_s: float) -> m.WorkerSnapshot:
        """The whole state, under the last sequence number."""
        return m.WorkerSnapshot(
            worker=self._settings.worker,
            sequence=self._sequence,
            epoch_seen=self._epoch_seen,
            host=self._settings.host,
            engines=self._settings.engines,
            engine_versions=dict(self._settings.engine_versions),
            resizing=self._settings.resizing,
            devices=tuple(
                self._ledger.report(device.device, self._resident_bytes(device.device)) for device in self._settings.devices
            ),
            replicas=tuple(self._report(now_s, replica) for replica in self._replicas.values()),
            draining=self._shutting_down,
            kv=self._kv.report,
        )

    def _resident_bytes(self, device: DeviceId) -> int:
        return sum(replica.memory_bytes for replica in self._replicas.values() if replica.device == device)

    def _report(self, now_s: float, replica: Replica) -> m.ReplicaReport:
        serves = replica.state in SERVING_STATES
        idle = serves and replica.running == 0
        return m.ReplicaReport(
            replica=replica.replica,
            model_hash=replica.record.model_hash,
            deployment=replica.record.deployment,
            device=replica.device,
            state=replica.state,
            budget_bytes=self._ledger.charge_of(replica.replica, replica.device),
            running=replica.running if serves else 0,
            slots=replica.slots if serves else 0,
            slots_max=replica.engine_slots if serves else 0,
            kv_pages_free=replica.kv_pages_free if serves else 0,
            kv_pages=replica.kv_pages if serves else 0,
            idle_s=replica.idle_s + now_s - replica.counted_s if idle else 0.0,
            state_s=now_s - replica.state_since_s,
            memory_bytes=replica.memory_bytes,
            failure=replica.failure,
            progress=replica.progress,
            peers=replica.devices[1:],
            kv_bytes=replica.record.kv_bytes if replica.state is not m.ReplicaState.ASLEEP else 0,
            preemptions=replica.preemptions,
            step_s=replica.step_s,
            hit_ratio=replica.hit_ratio if serves else None,
            sums=replica.sums if serves else None,
            resizes_kv=serves and replica.resizes_kv,
            continues=serves and replica.continues,
        )

    @staticmethod
    def _budget_bytes(replica: Replica) -> int:
        """What a replica's process is charged on each of its devices."""
        record = replica.record
        if replica.state is m.ReplicaState.ASLEEP and not replica.wakes:
            return min(record.overhead_bytes, record.budget_bytes)
        change = replica.change.record if replica.change is not None else None
        return max(record.budget_bytes, change.budget_bytes) if change is not None else record.budget_bytes

    def _charge(self, replica: Replica) -> None:
        self._ledger.charge(replica.replica, replica.devices, self._budget_bytes(replica))

    # ---- the step

    def step(self, now_s: float, event: ev.AgentEvent) -> list[ev.AgentCommand]:
        """Applies one event and returns what is to be done, in order."""
        self._out = []
        self._forgive_after_stall(now_s)
        match event:
            case ev.CommandReceived():
                self._command(now_s, event)
            case ev.ReplicaSpawned():
                self._spawned(now_s, event)
            case ev.SpawnFailed():
                self._spawn_failed(now_s, event)
            case ev.ControlReceived():
                replica = self._replicas.get(event.replica)
                if replica is not None and replica.process is not Process.GONE:
                    self._control(now_s, replica, event.message)
            case ev.ControlLost():
                replica = self._replicas.get(event.replica)
                if replica is not None and replica.process is Process.RUNNING:
                    # Its exit normally follows at once and says more; this only bounds the wait for it.
                    self._expect_exit(now_s, replica, FAILED_EXIT_S)
            case ev.ProcessExited():
                self._process_exited(now_s, event)
            case ev.MemorySampled():
                self._memory_sampled(event)
            case ev.KvReported():
                self._kv_reported(event)
            case ev.KvAnswered():
                self._kv_answered(now_s, event.operation, event.failure, event.detail)
            case ev.BusRestored():
                self._changed = True
            case ev.ShutdownStarted():
                self._shut_down(now_s, event.drain_s)
            case ev.Ticked():
                for replica in list(self._replicas.values()):
                    self._tick(now_s, replica)
                for operation in self._kv.overdue(now_s):
                    self._kv_answered(now_s, operation, "the KV node did not answer in time", "")
            case _:
                assert_never(event)
        self._publish(now_s)
        if self._shutting_down and not self._exited and all(r.process is Process.GONE for r in self._replicas.values()):
            self._exited = True
            self._out.append(ev.ExitAgent(code=0))
        return self._out

    def _publish(self, now_s: float) -> None:
        if self._changed or now_s >= self._snapshot_due_s:
            self._changed = self._counters_changed = False
            self._published_s = now_s
            self._sequence += 1
            self._out.append(ev.PublishSnapshot(snapshot=self.snapshot(now_s)))

    def _forgive_after_stall(self, now_s: float) -> None:
        if now_s - self._stepped_s > AGENT_STALL_S:
            for replica in self._replicas.values():
                replica.pings = deque((number, now_s) for number, _ in replica.pings)
        self._stepped_s = now_s

    # ---- commands

    def _command(self, now_s: float, event: ev.CommandReceived) -> None:
        command = event.command
        if command.epoch < self._epoch_seen:
            detail = f"epoch {command.epoch} is over; epoch {self._epoch_seen} was seen"
            self._reply(event.token, command.operation, m.CommandOutcome.STALE_EPOCH, detail)
            return
        self._epoch_seen = command.epoch
        known = self._operations.get(command.operation)
        if known is not None:
            self._repeat(event.token, command.operation, known)
            return
        refusal = self._admission_refusal() or self._refusals.of(command)
        if refusal:
            self._operations[command.operation] = Operation(started_s=now_s, replica=None, refusal=refusal)
            self._remember_ended(command.operation)
            self._reply(event.token, command.operation, m.CommandOutcome.REFUSED, refusal)
            return
        self._operations[command.operation] = Operation(started_s=now_s, replica=None)
        self._reply(event.token, command.operation, m.CommandOutcome.ACCEPTED, "")
        self._apply(now_s, command, event.incarnation)

    def _repeat(self, token: str, operation: OperationId, known: Operation) -> None:
        if known.refusal:
            self._reply(token, operation, m.CommandOutcome.REFUSED, known.refusal)
            return
        self._reply(token, operation, m.CommandOutcome.REPEATED, "")
        if known.ended is not None:
            self._out.append(ev.PublishEvent(event=known.ended))

    def _reply(self, token: str, operation: OperationId, outcome: m.CommandOutcome, detail: str) -> None:
        reply = m.CommandReply(operation=operation, outcome=outcome, epoch_seen=self._epoch_seen, detail=detail)
        self._out.append(ev.ReplyCommand(token=token, reply=reply))

    def _admission_refusal(self) -> str:
        if self._shutting_down:
            return "this worker is shutting down"
        if len(self._operations) - len(self._ended) >= OPERATIONS_RUNNING_MAX:
            return f"{OPERATIONS_RUNNING_MAX} operations run already"
        return ""

    def _apply(self, now_s: float, command: m.WorkerCommand, incarnation: str) -> None:
        operation = self._operations[command.operation]
        match command:
            case m.LoadModel():
                replica = Replica(
                    replica=ReplicaId(f"{command.replica_name}-{incarnation}"),
                    devices=(command.device, *command.peers),
                    record=command.record,
                    load_timeout_s=command.timeout_s,
                    state_since_s=now_s,
                    load_operation=command.operation,
                    measure=command.measure,
                )
                assert replica.replica not in self._replicas, "an incarnation is never drawn twice"
                operation.replica = replica.replica
                self._replicas[replica.replica] = replica
                self._charge(replica)
                self._changed = True
                self._progressed(replica, "accepted")
                self._load_next(now_s)
            case m.DrainReplica():
                replica = self._replicas[command.replica]
                operation.replica = command.replica
                if replica.drained:
                    self._end(now_s, command.operation, "")
                    return
                replica.drain_operations.append(command.operation)
                self._drain(now_s, replica, command.timeout_s)
            case m.UnloadReplica():
                replica = self._replicas[command.replica]
                operation.replica = command.replica
                replica.unload_operations.append(command.operation)
                if replica.process is Process.GONE:
                    self._end(now_s, command.operation, "")
                    self._forget(replica)
                    return
                self._wind_up(now_s, replica, gently=self._listens(replica))
            case m.SetConcurrency():
                replica = self._replicas[command.replica]
                operation.replica = command.replica
                replica.slots = command.slots
                self._changed = True
                self._say(replica, c.Concurrency(slots=command.slots))
                self._end(now_s, command.operation, "")
            case m.ResizeKv():
                replica = self._replicas[command.replica]
                operation.replica = command.replica
                change = self._begin_change(now_s, replica, command.operation)
                change.record = with_kv(replica.record, command.kv_bytes)
                self._charge(replica)
                self._changed = True
                self._say(replica, c.Resize(number=change.number, kv_bytes=command.kv_bytes))
            case m.SleepReplica():
                replica = self._replicas[command.replica]
                operation.replica = command.replica
                change = self._begin_change(now_s, replica, command.operation)
                self._say(replica, c.Sleep(number=change.number, level=command.level))
            case m.WakeReplica():
                replica = self._replicas[command.replica]
                operation.replica = command.replica
                replica.load_operation = command.operation
                replica.load_timeout_s = WAKE_S_MAX
                replica.wakes = True
                self._charge(replica)
                self._changed = True
                self._load_next(now_s)
            case m.EvictKv() | m.MigrateKv():
                self._kv.begin(now_s, command)
                self._out.append(ev.AskKv(command=command))
            case _:
                assert_never(command)

    def _say(self, replica: Replica, message: c.Concurrency | c.Resize | c.Sleep | c.Wake | c.EmptyPrefixes) -> None:
        self._out.append(ev.SendControl(replica=replica.replica, message=message))

    def _begin_change(self, now_s: float, replica: Replica, operation: OperationId) -> PendingChange:
        replica.changes += 1
        replica.change = PendingChange(replica.changes, operation, now_s + CHANGE_S_MAX)
        return replica.change

    # ---- the ends of operations

    def _progressed(self, replica: Replica, detail: str) -> None:
        if replica.load_operation is not None:
            self._out.append(
                ev.PublishEvent(
                    event=m.OperationProgressed(
                        worker=self._settings.worker,
                        operation=replica.load_operation,
                        replica=replica.replica,
                        state=replica.state,
                        detail=detail,
                    )
                )
            )

    def _end(
        self, now_s: float, operation_id: OperationId, failure: str, *, withdrawn: bool = False, detail: str = ""
    ) -> None:
        operation = self._operations[operation_id]
        assert operation.ended is None, "an operation ends once"
        operation.ended = m.OperationEnded(
            worker=self._settings.worker,
            operation=operation_id,
            replica=operation.replica,
            failure=failure,
            took_s=now_s - operation.started_s,
            withdrawn=withdrawn,
            detail=detail,
        )
        self._out.append(ev.PublishEvent(event=operation.ended))
        self._remember_ended(operation_id)

    def _remember_ended(self, operation_id: OperationId) -> None:
        self._ended.append(operation_id)
        if len(self._ended) > OPERATIONS_ENDED_MAX:
            del self._operations[self._ended.popleft()]

    def _end_all(self, now_s: float, replica: Replica, *, unload_failure: str) -> None:
        """Ends whatever waits for this replica, in the order load, drains, unloads."""
        if replica.load_operation is not None:
            failure = replica.failure or "unloaded before it was ready"
            self._end(now_s, replica.load_operation, failure, withdrawn=not replica.failure)
            replica.load_operation = None
        for operation_id in replica.drain_operations:
            self._end(now_s, operation_id, replica.failure or "unloaded before it had drained")
        if replica.change is not None:
            self._end(now_s, replica.change.operation, replica.failure or "unloaded before it was changed")
            replica.change = None
        for operation_id in replica.unload_operations:
            self._end(now_s, operation_id, unload_failure)
        replica.drain_operations.clear()
        replica.unload_operations.clear()

    # ---- the KV node

    def _kv_reported(self, event: ev.KvReported) -> None:
        before = self._kv.report
        assert before is not None, "only a worker with a node hears of one"
        self._kv.report = event.report
        self._changed |= (before.running, before.note) != (event.report.running, event.report.note)
        self._counters_changed |= before != event.report

    def _kv_answered(self, now_s: float, operation: OperationId, failure: str, detail: str) -> None:
        command = self._kv.ended(operation)
        if command is None:
            return
        if isinstance(command, m.EvictKv) and command.ratio == 1 and not failure:
            # The share that an engine drops of its own cache is all or nothing, and nothing while it runs.
            idle = [r for r in self._replicas.values() if r.record.kv_signature == command.kv_signature and r.is_idle]
            for replica in idle:
                self._say(replica, c.EmptyPrefixes())
            engines = f"{len(idle)} idle engine{'' if len(idle) == 1 else 's'}"
            detail += f"; told to {engines}" if idle else ""
        self._end(now_s, operation, _one_line(failure), detail=_one_line(detail))

    # ---- from load to ready

    def _load_next(self, now_s: float) -> None:
        """Begins the loads whose devices load nothing, in the order they were accepted on each device."""
        taken = set(self._loading)
        for replica in list(self._replicas.values()):
            wakes = replica.wakes and replica.process is Process.RUNNING
            if replica.process is not Process.QUEUED and not wakes:
                continue
            if taken.isdisjoint(replica.devices):
                self._loading.update(dict.fromkeys(replica.devices, replica.replica))
                self._begin_load(now_s, replica)
            taken.update(replica.devices)

    def _begin_load(self, now_s: float, replica: Replica) -> None:
        replica.load_deadline_s = now_s + replica.load_timeout_s
        if replica.load_operation in self._operations:
            self._operations[
                replica.load_operation
            ].started_s = now_s  # The wait for a turn is no part of what a load takes.
        if replica.wakes:
            replica.wakes = replica.drained = False
            # What blocks its event loop now is a load: pings say nothing until it serves.
            replica.ping_at_s = None
            replica.pings.clear()
            self._go(now_s, replica, m.ReplicaState.LOADING)
            self._say(replica, c.Wake())
            self._progressed(replica, "waking")
            return
        self._go_process(replica, Process.SPAWNING)
        self._go(now_s, replica, m.ReplicaState.LOADING)
        self._out.append(
            ev.SpawnReplica(
                replica=replica.replica,
                device=replica.device,
                record=replica.record,
                peers=replica.devices[1:],
                measure=replica.measure,
            )
        )
        self._progressed(replica, "starting the process")

    def _loaded(self, now_s: float, replica: Replica) -> None:
        """Lets the next load begin: this one is ready or gone."""
        if self._loading.get(replica.device) == replica.replica:
            for device in replica.devices:
                del self._loading[device]
            self._load_next(now_s)

    def _spawned(self, now_s: float, event: ev.ReplicaSpawned) -> None:
        replica = self._replicas[event.replica]
        replica.pid = event.pid
        self._go_process(replica, Process.RUNNING)
        if replica.ending or replica.failure:
            self._kill(now_s, replica)

    def _spawn_failed(self, now_s: float, event: ev.SpawnFailed) -> None:
        replica = self._replicas[event.replica]
        if not replica.ending and not replica.failure:
            self._fail(now_s, replica, f"the process could not be started: {_one_line(event.detail)}")
        self._gone(now_s, replica)

    def _control(self, now_s: float, replica: Replica, message: c.ToAgent) -> None:
        match message:
            case c.Pong():
                while replica.pings and replica.pings[0][0] <= message.number:
                    replica.pings.popleft()
            case c.Progress():
                self._progress(now_s, replica, message)
            case c.Ready():
                self._ready(now_s, replica, message)
            case c.Load():
                counters = (replica.running, replica.kv_pages_free, replica.busy_s)
                self._ledger.was_busy(replica.devices, max(0.0, message.busy_s - replica.busy_s))
                replica.running = message.running + message.waiting
                replica.kv_pages_free = message.kv_pages_free
                replica.idle_s = message.idle_s
                replica.busy_s = message.busy_s
                replica.preemptions = message.preemptions
                replica.step_s = message.step_s
                replica.hit_ratio = message.hit_ratio
                replica.sums = message.sums
                replica.counted_s = now_s
                self._counters_changed |= counters != (replica.running, replica.kv_pages_free, replica.busy_s)
            case c.Drained():
                self._drained(now_s, replica)
            case c.Changed():
                self._was_changed(now_s, replica, message)
            case c.Measured():
                self._was_measured(replica, message)
            case c.Failed():
                if replica.process is Process.RUNNING:
                    self._fail(now_s, replica, _one_line(message.detail))
                    self._expect_exit(now_s, replica, FAILED_EXIT_S)
            case _:
                assert_never(message)

    def _progress(self, now_s: float, replica: Replica, message: c.Progress) -> None:
        # A late or odd report changes nothing: only the states of a load are the replica's to tell.
        if replica.state not in LOAD_STATES or replica.ending or message.state not in LOAD_STATES:
            return
        moves = message.state is not replica.state and message.state in TRANSITIONS[replica.state]
        news = moves or message.detail != replica.detail
        if moves:
            self._go(now_s, replica, message.state)
        if replica.progress != message.progress:
            replica.progress = message.progress
            self._counters_changed = True
        if news:
            replica.detail = message.detail
            self._progressed(replica, _one_line(message.detail))

    def _ready(self, now_s: float, replica: Replica, message: c.Ready) -> None:
        if replica.ending or replica.process is not Process.RUNNING or replica.state not in LOAD_STATES:
            return
        if replica.state is not m.ReplicaState.WARMING:
            self._fail(now_s, replica, "the replica reported ready without a warm-up")
            self._kill(now_s, replica)
            return
        self._go(now_s, replica, m.ReplicaState.READY)
        replica.served = True
        replica.progress = 1.0
        replica.load_deadline_s = None
        replica.engine_slots = replica.slots = message.info.slots
        replica.kv_pages = replica.kv_pages_free = message.info.kv_pages
        replica.resizes_kv, replica.sleeps = message.info.resizes_kv, message.info.sleeps
        replica.continues = message.info.continues
        replica.counted_s = now_s
        replica.ping_at_s = now_s + PING_EVERY_S
        assert replica.load_operation is not None, "a load runs until its replica is ready"
        self._end(now_s, replica.load_operation, "")
        replica.load_operation = None
        self._loaded(now_s, replica)

    def _was_changed(self, now_s: float, replica: Replica, message: c.Changed) -> None:
        change = replica.change
        if change is None or change.number != message.number:
            return
        replica.change = None
        failure = _one_line(message.failure)
        if not failure and change.record is not None:
            replica.record = change.record
            # Its next report may well be the same as its last one, and then none comes: what is held has not changed.
            held = replica.kv_pages - replica.kv_pages_free
            replica.kv_pages = message.kv_pages
            replica.kv_pages_free = max(0, message.kv_pages - held)
        elif not failure and replica.state is m.ReplicaState.DRAINING:
            self._go(now_s, replica, m.ReplicaState.ASLEEP)
        self._charge(replica)
        self._changed = True
        self._end(now_s, change.operation, failure)

    def _was_measured(self, replica: Replica, message: c.Measured) -> None:
        """Points that were taken while something else worked on its devices are marked."""
        others = [
            one for one in self._replicas.values() if one is not replica and not set(one.devices).isdisjoint(replica.devices)
        ]
        beside = any(one.running or one.state in LOAD_STATES for one in others)
        kind = next((one.device_type for one in self._settings.devices if one.device == replica.device), "")
        version = self._settings.engine_versions.get(replica.record.engine_type.value, "")
        event = m.CostsMeasured(
            worker=self._settings.worker,
            replica=replica.replica,
            model_hash=replica.record.model_hash,
            deployment=replica.record.deployment,
            device_type=kind,
            engine=engine_name(replica.record.engine_type, version),
            points=tuple(msgspec.structs.replace(point, beside=beside) for point in message.points),
            whole=message.whole,
        )
        self._out.append(ev.PublishEvent(event=event))

    def _change_timed_out(self, now_s: float, replica: Replica, change: PendingChange) -> None:
        """Nobody knows what it holds now: the larger budget stays charged, and one that fell asleep unheard is ended."""
        failure = f"the replica did not answer within {CHANGE_S_MAX:g} s"
        if change.record is None:
            self._fail(now_s, replica, failure)
            self._kill(now_s, replica)
            return
        if change.record.budget_bytes > replica.record.budget_bytes:
            replica.record = change.record
        replica.change = None
        self._charge(replica)
        self._end(now_s, change.operation, failure)

    # ---- from ready to gone

    def _drain(self, now_s: float, replica: Replica, timeout_s: float) -> None:
        deadline_s = now_s + timeout_s + DRAIN_GRACE_S
        if replica.state is m.ReplicaState.DRAINING and replica.drain_deadline_s is not None:
            if deadline_s >= replica.drain_deadline_s:
                return
        else:
            self._go(now_s, replica, m.ReplicaState.DRAINING)
        replica.drain_deadline_s = deadline_s
        self._out.append(ev.SendControl(replica=replica.replica, message=c.Drain(timeout_s=timeout_s)))

    def _drained(self, now_s: float, replica: Replica) -> None:
        if replica.state is not m.ReplicaState.DRAINING or replica.drained:
            return
        replica.drained = True
        replica.drain_deadline_s = None
        for operation_id in replica.drain_operations:
            self._end(now_s, operation_id, "")
        replica.drain_operations.clear()
        if self._shutting_down:
            self._wind_up(now_s, replica, gently=True)

    def _wind_up(self, now_s: float, replica: Replica, *, gently: bool) -> None:
        """Ends a replica on purpose: a serving one is asked, one that holds no request yet is killed."""
        replica.ending = True
        match replica.process:
            case Process.QUEUED:
                self._gone(now_s, replica)
            case Process.RUNNING:
                if gently:
                    if replica.state is m.ReplicaState.READY:
                        self._go(now_s, replica, m.ReplicaState.DRAINING)
                    self._stop(now_s, replica)
                else:
                    self._kill(now_s, replica)
            case Process.SPAWNING | Process.STOPPING | Process.KILLED | Process.GONE:
                pass  # a process that is being made is killed as soon as its pid is known; the others end already
            case _:
                assert_never(replica.process)

    @staticmethod
    def _listens(replica: Replica) -> bool:
        """Whether it can be asked to stop, as opposed to one whose engine is being loaded."""
        return replica.state in SERVING_STATES or replica.state is m.ReplicaState.ASLEEP

    def _stop(self, now_s: float, replica: Replica) -> None:
        self._out.append(ev.SendControl(replica=replica.replica, message=c.Stop()))
        self._expect_exit(now_s, replica, STOP_GRACE_S)

    def _expect_exit(self, now_s: float, replica: Replica, grace_s: float) -> None:
        self._go_process(replica, Process.STOPPING)
        self._quiet(replica)
        replica.kill_at_s = now_s + grace_s

    def _kill(self, now_s: float, replica: Replica) -> None:
        self._go_process(replica, Process.KILLED)
        self._quiet(replica)
        replica.kill_bound_s = now_s + KILL_BOUND_S
        self._out.append(ev.KillReplica(replica=replica.replica, signal=signal.SIGKILL))

    @staticmethod
    def _quiet(replica: Replica) -> None:
        """Clears the timers of a life that is over."""
        replica.wakes = False
        if replica.change is not None:
            replica.change.deadline_s = math.inf
        replica.load_deadline_s = replica.drain_deadline_s = replica.ping_at_s = replica.kill_at_s = None
        replica.pings.clear()

    def _fail(self, now_s: float, replica: Replica, failure: str) -> None:
        replica.failure = failure
        self._go(now_s, replica, m.ReplicaState.FAILED)

    def _process_exited(self, now_s: float, event: ev.ProcessExited) -> None:
        replica = self._replicas.get(event.replica)
        if replica is None or replica.process is Process.GONE:
            return
        words = _last_words(event.stderr_tail)
        if replica.failure:
            if replica.wants_stderr and words:
                replica.failure = _bounded(f"{replica.failure}: {words}")
        elif not replica.ending:
            failure = f"the process {_exit_text(event.code)} while {replica.state.value}"
            self._fail(now_s, replica, _bounded(f"{failure}: {words}" if words else failure))
        self._gone(now_s, replica)

    def _gone(self, now_s: float, replica: Replica) -> None:
        """The process does not exist (any more): its budget is free, its operations end, the next load begins."""
        self._go_process(replica, Process.GONE)
        self._ledger.release(replica.replica, replica.devices)
        self._quiet(replica)
        replica.kill_bound_s = None
        replica.memory_bytes = 0
        self._changed = True
        if replica.served and replica.failure:
            self._out.append(
                ev.PublishEvent(
                    event=m.ReplicaDied(worker=self._settings.worker, replica=replica.replica, detail=replica.failure)
                )
            )
        self._end_all(now_s, replica, unload_failure="")
        if replica.failure and not replica.ending:
            replica.vanish_at_s = now_s + FAILED_SHOWN_S
        else:
            self._forget(replica)
        self._loaded(now_s, replica)

    def _forget(self, replica: Replica) -> None:
        del self._replicas[replica.replica]
        self._changed = True

    # ---- time

    def _tick(self, now_s: float, replica: Replica) -> None:
        if replica.load_deadline_s is not None and now_s >= replica.load_deadline_s:
            self._load_timed_out(now_s, replica)
        if replica.change is not None and now_s >= replica.change.deadline_s:
            self._change_timed_out(now_s, replica, replica.change)
        if replica.drain_deadline_s is not None and now_s >= replica.drain_deadline_s:
            self._fail(now_s, replica, "the replica did not drain within its bound and was stopped")
            self._stop(now_s, replica)
        if replica.kill_at_s is not None and now_s >= replica.kill_at_s:
            if not replica.failure and not replica.ending:
                self._fail(now_s, replica, "the replica closed its control connection and did not exit")
            self._kill(now_s, replica)
        if replica.kill_bound_s is not None and now_s >= replica.kill_bound_s:
            self._outlived_kill(now_s, replica)
        if replica.pings and now_s >= replica.pings[0][1] + PING_UNANSWERED_S:
            replica.wants_stderr = True
            self._fail(now_s, replica, f"the replica left a ping unanswered for {PING_UNANSWERED_S:g} s and was killed")
            self._kill(now_s, replica)
        if replica.ping_at_s is not None and now_s >= replica.ping_at_s:
            replica.pings_sent += 1
            replica.pings.append((replica.pings_sent, now_s))
            replica.ping_at_s = now_s + PING_EVERY_S
            self._out.append(ev.SendControl(replica=replica.replica, message=c.Ping(number=replica.pings_sent)))
        if replica.vanish_at_s is not None and now_s >= replica.vanish_at_s:
            self._forget(replica)

    def _load_timed_out(self, now_s: float, replica: Replica) -> None:
        replica.wants_stderr = True
        failure = f"the load did not end within {replica.load_timeout_s:g} s, it was {replica.state.value}"
        self._fail(now_s, replica, failure)
        replica.load_deadline_s = None
        if replica.process is Process.RUNNING:
            self._kill(now_s, replica)

    def _outlived_kill(self, now_s: float, replica: Replica) -> None:
        detail = f"process {replica.pid} outlived SIGKILL by {KILL_BOUND_S:g} s; its memory stays charged"
        if not replica.failure:
            self._fail(now_s, replica, detail)
        self._end_all(now_s, replica, unload_failure=detail)
        replica.kill_bound_s = now_s + KILL_BOUND_S
        self._out.append(ev.KillReplica(replica=replica.replica, signal=signal.SIGKILL))
        self._loaded(now_s, replica)

    def _memory_sampled(self, event: ev.MemorySampled) -> None:
        for replica_id, memory_bytes in event.replicas:
            replica = self._replicas.get(replica_id)
            if replica is not None and replica.process is not Process.GONE and replica.memory_bytes != memory_bytes:
                replica.memory_bytes = memory_bytes
                self._counters_changed = True
        for device, used_bytes in event.devices:
            self._counters_changed |= self._ledger.sampled(device, used_bytes)

    def _shut_down(self, now_s: float, drain_s: float) -> None:
        if self._shutting_down:
            return
        self._shutting_down = True
        self._changed = True
        for operation in self._kv.running():
            self._kv_answered(now_s, operation, "this worker is shutting down", "")
        # Queued loads first: ending a running load would start the next one.
        for replica in sorted(self._replicas.values(), key=lambda r: (r.process is not Process.QUEUED, r.replica)):
            if replica.state in SERVING_STATES and replica.process is Process.RUNNING and not replica.drained:
                self._drain(now_s, replica, drain_s)
            else:
                self._wind_up(now_s, replica, gently=self._listens(replica))

    # ---- the tables

    def _go(self, now_s: float, replica: Replica, state: m.ReplicaState) -> None:
        assert state in TRANSITIONS[replica.state], f"{replica.state.value} -> {state.value}"
        replica.state = state
        replica.state_since_s = now_s
        self._changed = True

    @staticmethod
    def _go_process(replica: Replica, process: Process) -> None:
        assert process in PROCESS_TRANSITIONS[replica.process], f"{replica.process.value} -> {process.value}"
        replica.process = process


def _exit_text(code: int | None) -> str:
    if code is None:
        return "exited"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _one_line(text: str) -> str:
    return _bounded(" ".join(text.split()))


def _last_words(stderr_tail: str) -> str:
    lines = [line.strip() for line in stderr_tail.splitlines() if line.strip()]
    return " | ".join(lines[-_STDERR_LINES_MAX:])


def _bounded(text: str) -> str:
    """The end of a too long text is kept: the last line of a traceback says most, and so does the head of our sentence."""
    if len(text) <= FAILURE_CHARS_MAX:
        return text
    head = FAILURE_CHARS_MAX // 3
    return f"{text[:head]} ... {text[len(text) - (FAILURE_CHARS_MAX - head - 5) :]}"
