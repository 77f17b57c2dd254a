"""What the scheduler knows of the pool: workers, devices, replicas and demand, with the verdicts on silence.

The agents' reports are the truth about what is loaded, the gateways' about who waits. Two corrections are ours: a replica
whose end we heard of stays ended even if an older report still lists it, and a replica once declared dead stays dead.

Silence is not measured in seconds but in *heard seconds*, which pass only between two round trips on our own bus that are
close to each other. While the bus, or this process, is paused nobody falls silent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

import msgspec

from broker.core.scheduler_events import SchedulerSettings
from subjects.ids import DeviceId, IngressId, ModelHash, ReplicaId, WorkerId, base_name
from subjects.messages import (
    DeviceReport,
    IngressTelemetry,
    Lane,
    ModelDemand,
    ReplicaReport,
    ReplicaState,
    SlaClass,
    WorkerSnapshot,
)

COMING = frozenset({ReplicaState.FETCHING, ReplicaState.LOADING, ReplicaState.WARMING})
"""States on the way to ready: busy by definition, never evicted."""


class Presence(Enum):
    """A verdict on a worker."""

    LIVE = "live"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(slots=True)
class Worker:
    """A worker agent as we know it. ``last_heard`` is in heard seconds."""

    worker: WorkerId
    last_heard: float
    presence: Presence = Presence.LIVE
    snapshot: WorkerSnapshot | None = None
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


@dataclass(slots=True)
class Replica:
    """A replica as last reported. ``dead``: declared dead although its agent may still list it."""

    worker: WorkerId
    report: ReplicaReport
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


@dataclass(frozen=True, slots=True)
class Device:
    """A device of a worker."""

    worker: Worker
    report: DeviceReport

    @property
    def key(self) -> tuple[WorkerId, DeviceId]:
        return (self.worker.worker, self.report.device)


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand for one model over all gateways, now."""

    waiting: int = 0
    running: int = 0
    oldest_wait_s: float = 0.0
    queues: frozenset[tuple[SlaClass, Lane]] = frozenset()
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
    within_slo: int = 0

    def add(self, row: ModelDemand) -> None:
        """One gateway's counts of one model, class and lane."""
        self.finished += row.finished
        self.within_slo += row.within_slo
        if row.arrived:
            for index in range(3):
                self.requests[index] += row.arrived_lengths[index]
                self.input_tokens[index] += row.arrived_input_tokens[index]
                self.output_tokens[index] += row.arrived_output_tokens[index]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room promised to a replica that is not listed yet; ``sent`` once its load command went out.

    One with ``until_s`` has outlived its transaction: the agent may hold that room, and its next report will tell.
    """

    worker: WorkerId
    devices: tuple[DeviceId, ...]
    """All that it will span, the leading one first."""
    replica_name: str
    model_hash: ModelHash
    budget_bytes: int
    """On each device."""
    sent: bool = False
    until_s: float | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """The arithmetic of one device at one moment."""

    replicas: tuple[Replica, ...]
    """All that is listed there, in order of id."""
    promised: tuple[Reservation, ...]
    """Room that is promised and not yet taken."""
    charged_bytes: int
    """What replicas take now, with load commands that went out and what the agent holds back besides."""
    free_now_bytes: int
    """Room for a load that starts this instant."""
    block_now_bytes: int
    """Of ``free_now_bytes``: the largest block."""
    free_planned_bytes: int
    """Room once all running transactions have ended as planned: who leaves is gone, who was promised room has it."""
    largest_free_bytes: int
    """Of ``free_planned_bytes``: the largest block that one replica can surely get."""
    loads_running: int
    """Loads under way: they are serial."""
    loads_coming: int
    """Loads under way or promised."""
    models: tuple[ModelHash, ...]
    """Models listed or promised there."""


@dataclass(slots=True)
class _Ingress:
    last_heard: float
    reported_s: float
    sequence: int
    demand: dict[ModelHash, Demand] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Changes:
    """What a report or verdict changed, for whoever must act on it."""

    appeared: tuple[Replica, ...] = ()
    changed: tuple[Replica, ...] = ()
    vanished: tuple[Replica, ...] = ()

    @property
    def any(self) -> bool:
        return bool(self.appeared or self.changed or self.vanished)


class Pool:
    """Everything reported, and the arithmetic of room on it."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._heard_s = 0.0
        self._round_trip_s: float | None = None
        self._ingresses: dict[IngressId, _Ingress] = {}
        self._flow: dict[ModelHash, Flow] = {}
        self._ended: dict[ReplicaId, None] = {}
        self._closed: dict[tuple[str, DeviceId | None], float | None] = {}
        self._locked_devices: dict[tuple[str, DeviceId], None] = {}
        self._locked_replicas: dict[ReplicaId, None] = {}
        self.workers: dict[WorkerId, Worker] = {}
        self.replicas: dict[ReplicaId, Replica] = {}
        self._of_model: dict[ModelHash, dict[ReplicaId, None]] = {}
        self._of_worker: dict[WorkerId, dict[ReplicaId, None]] = {}
        self._named: dict[tuple[WorkerId, str], ReplicaId] = {}
        self._reserved_at: dict[WorkerId, dict[str, None]] = {}
        self._resized: dict[ReplicaId, tuple[int, int]] = {}
        self._rooms: dict[WorkerId, dict[DeviceId, Room]] = {}
        self._devices: dict[bool, list[Device]] = {}
        self._promised_to: dict[ModelHash, int] | None = None
        # The three above only remember what was computed; whatever changes a worker forgets its part.
        self.dead: dict[ReplicaId, None] = {}
        """Declared dead, oldest first; bounded."""
        self.reservations: dict[str, Reservation] = {}
        """By replica name."""
        self.leaving: set[ReplicaId] = set()
        """Replicas that a transaction drains or unloads. Only ever asked for membership."""
        self.epoch_seen_max = 0
        self.mass_silence = False
        self.news = 0
        """Grows whenever something changes that others should hear of."""

    # ------------------------------------------------------------------------------------------------------- hearing

    @property
    def heard_s(self) -> float:
        """A clock that runs only while our own bus works and we run: the one by which silence is judged."""
        return self._heard_s

    def round_trip(self, now_s: float) -> None:
        """Our own bus works: the time since the last proof counts as heard."""
        if self._round_trip_s is not None:
            gap_s = now_s - self._round_trip_s
            if gap_s <= self._settings.round_trip_gap_s_max:
                self._heard_s += gap_s
        self._round_trip_s = now_s

    def beat(self, worker: WorkerId, epoch_seen: int) -> bool:
        """A sign of life; True when the worker is new or back from silence."""
        self.epoch_seen_max = max(self.epoch_seen_max, epoch_seen)
        known = self.workers.get(worker)
        if known is None:
            self.workers[worker] = Worker(worker, self._heard_s, closed=(base_name(worker), None) in self._closed)
            return True
        known.last_heard = self._heard_s
        if known.presence is Presence.LIVE:
            return False
        self._verdict(known, Presence.LIVE)
        return True

    def _verdict(self, worker: Worker, presence: Presence) -> None:
        if worker.presence is not presence:
            worker.presence = presence
            self.news += 1
            self._devices.clear()

    def close(self, name: str, closed: bool, device: DeviceId | None = None, *, bound_s: float | None = None) -> None:
        """A person drains the workers of this name (without incarnation), those to come included, or one device of them; or
        opens them again."""
        if closed:
            self._closed[(name, device)] = bound_s
        else:
            self._closed.pop((name, device), None)
        for worker in self.workers.values():
            if device is None and base_name(worker.worker) == name:
                worker.closed = closed
        self.news += 1
        self._devices.clear()

    def lock_device(self, name: str, device: DeviceId, locked: bool) -> None:
        """A person's word: nothing comes to or goes from this device of the workers of that name by itself."""
        if locked:
            self._locked_devices[(name, device)] = None
        else:
            self._locked_devices.pop((name, device), None)
        self.news += 1
        self._devices.clear()

    def lock_replica(self, replica: ReplicaId, locked: bool) -> None:
        """A person's word: nothing automatic stops or changes this replica."""
        if locked:
            self._locked_replicas[replica] = None
        else:
            self._locked_replicas.pop(replica, None)
        self.news += 1

    def is_closed(self, worker: WorkerId, device: DeviceId) -> bool:
        """Whether a person drains that device, or its whole worker."""
        name = base_name(worker)
        return (name, None) in self._closed or (name, device) in self._closed

    def drained(self, replica: Replica) -> tuple[bool, float | None]:
        """Whether a person drains a device of that replica, and how long its requests may take (None: the usual time)."""
        name = base_name(replica.worker)
        for key in ((name, None), *((name, device) for device in replica.devices)):
            if key in self._closed:
                return True, self._closed[key]
        return False, None

    def device_locked(self, worker: WorkerId, device: DeviceId) -> bool:
        """Whether a person locked that device."""
        return (base_name(worker), device) in self._locked_devices

    def replica_locked(self, replica: Replica) -> bool:
        """Whether a person locked a replica, or a device that it is on."""
        report = replica.report
        return replica.replica in self._locked_replicas or any(
            self.device_locked(replica.worker, device) for device in (report.device, *report.peers)
        )

    def _touch(self, worker: WorkerId) -> None:
        self._rooms.pop(worker, None)
        self._promised_to = None

    def report(self, now_s: float, snapshot: WorkerSnapshot) -> Changes:
        """Takes an agent's whole state; one older than what we have is only a sign of life."""
        self.beat(snapshot.worker, snapshot.epoch_seen)
        worker = self.workers[snapshot.worker]
        if worker.snapshot is not None and snapshot.sequence <= worker.snapshot.sequence:
            return Changes()
        worker.snapshot = snapshot
        self._devices.clear()
        self._touch(snapshot.worker)
        reports = [_queued_as_coming(report) for report in snapshot.replicas]
        listed = {report.replica for report in reports}
        vanished = [replica for replica in self.replicas_of(snapshot.worker) if replica.replica not in listed]
        for replica in vanished:
            self.ended(replica.replica)
        appeared: list[Replica] = []
        changed: list[Replica] = []
        for report in reports:
            if report.replica in self._ended:
                continue
            old = self.replicas.get(report.replica)
            ready_s = None
            if report.state is ReplicaState.READY:
                ready_s = old.ready_s if old is not None and old.ready_s is not None else now_s - report.state_s
            replica = Replica(snapshot.worker, report, now_s, ready_s, report.replica in self.dead)
            self._put(replica)
            if old is None:
                appeared.append(replica)
            elif old.report.state is not report.state:
                changed.append(replica)
        changes = Changes(tuple(appeared), tuple(changed), tuple(vanished))
        self.news += changes.any
        return changes

    def ended(self, replica: ReplicaId) -> Replica | None:
        """The replica's process is gone; older reports cannot bring it back."""
        self._ended[replica] = None
        while len(self._ended) > self._settings.dead_replicas_max:
            self._ended.pop(next(iter(self._ended)))
        self._settle_reservation(replica)
        return self._pop(replica)

    def _settle_reservation(self, replica: ReplicaId) -> None:
        """A reservation that outlived its transaction ends once its replica was listed, or is gone."""
        held = self.reservations.get(base_name(replica))
        if held is not None and held.until_s is not None:
            self.release(held.replica_name)

    def reserve(self, reservation: Reservation) -> None:
        """Promises room, or says more of a promise."""
        self.reservations[reservation.replica_name] = reservation
        self._reserved_at.setdefault(reservation.worker, {})[reservation.replica_name] = None
        self._touch(reservation.worker)

    def release(self, replica_name: str) -> Reservation | None:
        """Takes a promise back."""
        held = self.reservations.pop(replica_name, None)
        if held is not None:
            self._reserved_at[held.worker].pop(replica_name, None)
            self._touch(held.worker)
        return held

    def resize(self, replica: ReplicaId, sure_bytes: int, planned_bytes: int) -> None:
        """A transaction changes what a replica is charged on each device: until it ends the charge is at least
        ``sure_bytes``, and ``planned_bytes`` is what it is meant to be."""
        self._resized[replica] = (sure_bytes, planned_bytes)
        self._touch(self.replicas[replica].worker)

    def was_resized(self, replica: ReplicaId, budget_bytes: int, kv_bytes: int) -> None:
        """Its agent has changed it: true until the next report, which will say the same."""
        known = self.replicas.get(replica)
        if known is not None:
            known.report = msgspec.structs.replace(known.report, budget_bytes=budget_bytes, kv_bytes=kv_bytes)
            self._touch(known.worker)

    def resized(self, replica: ReplicaId) -> None:
        """It is as its agent says again."""
        if self._resized.pop(replica, None) is not None and replica in self.replicas:
            self._touch(self.replicas[replica].worker)

    def leave(self, replica: ReplicaId) -> None:
        """A transaction is about to end a replica."""
        self.leaving.add(replica)
        self.news += 1
        self._touch(self.replicas[replica].worker)

    def forget_plans(self, replicas: Iterable[ReplicaId]) -> None:
        """Transactions about these replicas are over."""
        for replica in replicas:
            self.leaving.discard(replica)
            self.news += 1
            if replica in self.replicas:
                self._touch(self.replicas[replica].worker)

    def forget_all_plans(self) -> None:
        """No transaction runs any more."""
        self.reservations.clear()
        self._reserved_at.clear()
        self._resized.clear()
        self.leaving.clear()
        self._rooms.clear()
        self._promised_to = None
        self.news += 1

    def load_failed(self, replica: ReplicaId, failure: str) -> None:
        """A load ended badly and its process is gone: shown as failed until its agent forgets it, and charged no more."""
        known = self.replicas.get(replica)
        if known is not None:
            known.report = msgspec.structs.replace(known.report, state=ReplicaState.FAILED, budget_bytes=0, failure=failure)
            self.news += 1
            self._touch(known.worker)

    def _put(self, replica: Replica) -> None:
        known = self.replicas.get(replica.replica)
        if known is not None:
            self._unlist(known)  # An agent that says something else of it now must leave no trace of before.
        self.replicas[replica.replica] = replica
        self._of_model.setdefault(replica.report.model_hash, {})[replica.replica] = None
        self._of_worker.setdefault(replica.worker, {})[replica.replica] = None
        self._named[(replica.worker, base_name(replica.replica))] = replica.replica
        self._touch(replica.worker)
        self._settle_reservation(replica.replica)

    def _pop(self, replica: ReplicaId) -> Replica | None:
        known = self.replicas.pop(replica, None)
        if known is not None:
            self._unlist(known)
            self.news += 1
        return known

    def _unlist(self, replica: Replica) -> None:
        self._of_model[replica.report.model_hash].pop(replica.replica)
        self._of_worker[replica.worker].pop(replica.replica)
        self._named.pop((replica.worker, base_name(replica.replica)), None)
        self._touch(replica.worker)

    def declare_dead(self, replica: ReplicaId) -> None:
        """For ever: an incarnation is never reused."""
        self.dead[replica] = None
        while len(self.dead) > self._settings.dead_replicas_max:
            self.dead.pop(next(iter(self.dead)))
        self.news += 1
        if replica in self.replicas:
            self.replicas[replica].dead = True
            self._touch(self.replicas[replica].worker)

    def judge(self, now_s: float) -> tuple[Worker, ...]:
        """Gives verdicts on silence and returns the workers that have just been declared dead."""
        settings = self._settings
        present = [worker for worker in self.workers.values() if worker.presence is not Presence.DEAD]
        silences = {worker.worker: self._heard_s - worker.last_heard for worker in present}
        # Agents that fall silent together do not fall silent in the same millisecond: half the bound counts as together.
        together = sum(silence_s >= settings.dead_s / 2 for silence_s in silences.values())
        self.mass_silence = together >= settings.mass_silence_workers_min and together > settings.mass_silence_share * len(
            present
        )
        bound_s = settings.dead_s + (settings.mass_silence_extra_s if self.mass_silence else 0.0)
        died = []
        for worker in present:
            silence_s = silences[worker.worker]
            if silence_s >= bound_s:
                self._verdict(worker, Presence.DEAD)
                worker.died_s = now_s
                died.append(worker)
                for replica in self.replicas_of(worker.worker):
                    self.declare_dead(replica.replica)
            else:
                self._verdict(worker, Presence.SUSPECT if silence_s >= settings.suspect_s else Presence.LIVE)
        for worker in [w for w in self.workers.values() if w.presence is Presence.DEAD]:
            if now_s - worker.died_s >= settings.worker_forgotten_s:
                for replica in self.replicas_of(worker.worker):
                    self._pop(replica.replica)
                del self.workers[worker.worker]
                self._devices.clear()
        for name, held in list(self.reservations.items()):
            over = held.until_s is not None and now_s >= held.until_s
            if over or held.worker not in self.workers or self.workers[held.worker].presence is Presence.DEAD:
                self.release(name)
        for ingress, seen in list(self._ingresses.items()):
            if self._heard_s - seen.last_heard >= settings.ingress_silent_s:
                del self._ingresses[ingress]
        return tuple(died)

    def ingress(self, now_s: float, telemetry: IngressTelemetry) -> list[ModelHash]:
        """Takes a gateway's whole demand, and adds what it counted to the flow; returns the models that start to wait."""
        old = self._ingresses.get(telemetry.ingress)
        if old is not None and telemetry.sequence <= old.sequence:
            old.last_heard = self._heard_s
            return []
        demand: dict[ModelHash, Demand] = {}
        for row in telemetry.demand:
            if row.arrived or row.finished:
                self._flow.setdefault(row.model_hash, Flow()).add(row)
            queues = frozenset({(row.sla_class, row.lane)}) if row.waiting else _NOWHERE
            here = Demand(row.waiting, row.running, row.oldest_wait_s, queues, row.waiting_input_tokens)
            there = demand.get(row.model_hash)
            demand[row.model_hash] = here if there is None else _sum(there, here)
        self._ingresses[telemetry.ingress] = _Ingress(self._heard_s, now_s, telemetry.sequence, demand)
        before = old.demand if old is not None else {}
        return [model for model, d in demand.items() if d.waiting and not before.get(model, _NO_DEMAND).waiting]

    def take_flow(self) -> dict[ModelHash, Flow]:
        """What arrived and ended since the last call, each telemetry counted once."""
        flow, self._flow = self._flow, {}
        return flow

    # -------------------------------------------------------------------------------------------------------- asking

    def demand(self, now_s: float) -> dict[ModelHash, Demand]:
        """Demand by model over all gateways. A wait has grown since it was reported."""
        total: dict[ModelHash, Demand] = {}
        for seen in self._ingresses.values():
            for model, demand in seen.demand.items():
                age_s = now_s - seen.reported_s
                if demand.waiting:
                    demand = replace(demand, oldest_wait_s=demand.oldest_wait_s + age_s)
                known = total.get(model)
                total[model] = demand if known is None else _sum(known, demand)
        return total

    def replicas_of(self, worker: WorkerId) -> list[Replica]:
        """All that is listed of a worker."""
        return [self.replicas[replica] for replica in self._of_worker.get(worker, ())]

    def replicas_for(self, model: ModelHash) -> list[Replica]:
        """All that is listed of a model."""
        return [self.replicas[replica] for replica in self._of_model.get(model, ())]

    def open_replicas(self, model: ModelHash) -> list[Replica]:
        """Ready, staying and not dead: those that serve."""
        return [
            replica
            for replica in self.replicas_for(model)
            if replica.report.state is ReplicaState.READY
            and not replica.dead
            and replica.replica not in self.leaving
            and not self.worker_leaves(replica.worker)
        ]

    def coming_replicas(self, model: ModelHash) -> int:
        """On their way to ready: listed ones, and promised ones that are not listed yet."""
        listed = [
            replica
            for replica in self.replicas_for(model)
            if replica.report.state in COMING
            and not replica.dead
            and replica.replica not in self.leaving
            and not self.worker_leaves(replica.worker)
        ]
        if self._promised_to is None:
            self._promised_to = {}
            for held in self._unlisted(self.reservations.values()):
                self._promised_to[held.model_hash] = self._promised_to.get(held.model_hash, 0) + 1
        return len(listed) + self._promised_to.get(model, 0)

    def worker_leaves(self, worker: WorkerId) -> bool:
        """Whether a worker is dead or shuts down: what it has counts for nothing any more."""
        known = self.workers[worker]
        return known.presence is Presence.DEAD or (known.snapshot is not None and known.snapshot.draining)

    def devices(self, *, usable: bool) -> list[Device]:
        """All known devices in order of worker and device id; ``usable`` leaves only those that may take new work."""
        known = self._devices.get(usable)
        if known is not None:
            return known
        found = [
            Device(worker, report)
            for worker in self.workers.values()
            if worker.snapshot is not None and (worker.usable or not usable)
            for report in worker.snapshot.devices
            if not usable
            or not (self.is_closed(worker.worker, report.device) or self.device_locked(worker.worker, report.device))
        ]
        found.sort(key=lambda device: device.key)
        self._devices[usable] = found
        return found

    def usable(self, device: Device) -> bool:
        """Whether new work may go to a device: its worker is well, and no person closed or locked it."""
        worker = device.worker
        return worker.usable and not (
            self.is_closed(worker.worker, device.report.device) or self.device_locked(worker.worker, device.report.device)
        )

    def device(self, worker: WorkerId, device: DeviceId) -> Device | None:
        """One device, if it is known."""
        known = self.workers.get(worker)
        if known is None or known.snapshot is None:
            return None
        return next((Device(known, report) for report in known.snapshot.devices if report.device == device), None)

    def replica_named(self, worker: WorkerId, replica_name: str) -> Replica | None:
        """The listed replica that a load command named."""
        replica = self._named.get((worker, replica_name))
        return self.replicas[replica] if replica is not None else None

    # ---------------------------------------------------------------------------------------------------------- room

    def room(self, device: Device) -> Room:
        """The arithmetic of a device now."""
        rooms = self._rooms.get(device.worker.worker)
        if rooms is None:
            rooms = self._rooms[device.worker.worker] = self._compute_rooms(device.worker)
        return rooms[device.report.device]

    def _compute_rooms(self, worker: Worker) -> dict[DeviceId, Room]:
        snapshot = worker.snapshot
        if snapshot is None:
            return {}
        listed: dict[DeviceId, list[Replica]] = {device.device: [] for device in snapshot.devices}
        in_report = dict.fromkeys(listed, 0)
        promised: dict[DeviceId, list[Reservation]] = {device.device: [] for device in snapshot.devices}
        for replica in sorted(self.replicas_of(worker.worker), key=lambda r: r.replica):
            for device in replica.devices:
                if device in listed:
                    listed[device].append(replica)
        for report in snapshot.replicas:
            for device in (report.device, *report.peers):
                if device in listed:
                    in_report[device] += report.budget_bytes
        reservations = (self.reservations[name] for name in self._reserved_at.get(worker.worker, ()))
        for reservation in self._unlisted(reservations):
            for device in reservation.devices:
                if device in listed:
                    promised[device].append(reservation)
        return {
            report.device: self._room(report, listed[report.device], promised[report.device], in_report[report.device])
            for report in snapshot.devices
        }

    def _room(self, report: DeviceReport, replicas: list[Replica], promised: list[Reservation], in_report: int) -> Room:
        charged = max(0, report.reserved_bytes - in_report)
        unsent = leaving = growth = 0
        for replica in replicas:
            budget = replica.report.budget_bytes
            sure, planned = self._resized.get(replica.replica, (budget, budget))
            charged += max(budget, sure)
            if replica.replica in self.leaving:
                leaving += max(budget, sure)
            else:
                growth += planned - max(budget, sure)
        for reservation in promised:
            if reservation.sent:
                charged += reservation.budget_bytes
            else:
                unsent += reservation.budget_bytes
        loads = sum(r.report.state in COMING and not r.dead for r in replicas) + sum(r.sent for r in promised)
        free_now = report.memory_bytes - charged
        free_planned = free_now - unsent + leaving - growth
        block_now, largest = free_now, free_planned
        if report.contiguous_free_bytes is not None and replicas:
            # Nobody knows how freed blocks join with free ones: the largest of each is sure. An empty device is one block.
            freed = [r.report.budget_bytes for r in replicas if r.replica in self.leaving]
            if len(freed) < len(replicas):
                run = report.contiguous_free_bytes - sum(r.budget_bytes for r in promised)
                largest = min(free_planned, max([run, *freed]))
            block_now = min(free_now, report.contiguous_free_bytes - sum(r.budget_bytes for r in promised if r.sent))
        return Room(
            replicas=tuple(replicas),
            promised=tuple(promised),
            charged_bytes=charged,
            free_now_bytes=free_now,
            block_now_bytes=block_now,
            free_planned_bytes=free_planned,
            largest_free_bytes=largest,
            loads_running=loads,
            loads_coming=loads + sum(not r.sent for r in promised),
            models=tuple(r.report.model_hash for r in replicas) + tuple(r.model_hash for r in promised),
        )

    def unlisted_reservations(self) -> list[Reservation]:
        """Promises to replicas that no agent lists yet."""
        return self._unlisted(self.reservations.values())

    def _unlisted(self, reservations: Iterable[Reservation]) -> list[Reservation]:
        return [r for r in reservations if self.replica_named(r.worker, r.replica_name) is None]


_NO_DEMAND = Demand()
_NOWHERE: frozenset[tuple[SlaClass, Lane]] = frozenset()


def _queued_as_coming(report: ReplicaReport) -> ReplicaReport:
    """A load that waits for its turn is listed as absent; to us it is on its way, and charged."""
    if report.state is not ReplicaState.ABSENT:
        return report
    return msgspec.structs.replace(report, state=ReplicaState.FETCHING)


def _sum(one: Demand, other: Demand) -> Demand:
    return Demand(
        one.waiting + other.waiting,
        one.running + other.running,
        max(one.oldest_wait_s, other.oldest_wait_s),
        one.queues | other.queues,
        one.waiting_input_tokens + other.waiting_input_tokens,
    )
