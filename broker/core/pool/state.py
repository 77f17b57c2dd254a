"""What the scheduler knows of the pool: workers, devices, replicas and demand, with the verdicts on silence.

The agents' reports are the truth about what is loaded, the gateways' about who waits. Two corrections are ours: a replica
whose end we heard of stays ended even if an older report still lists it, and a replica once declared dead stays dead.

Silence is not measured in seconds but in *heard seconds*, which pass only between two round trips on our own bus that are
close to each other. While the bus, or this process, is paused nobody falls silent.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from broker.core.pool.demand import Inflow
from broker.core.pool.events import SchedulerSettings
from broker.core.pool.kv_tiers import KvTiers
from broker.core.pool.members import COMING as COMING
from broker.core.pool.members import Changes as Changes
from broker.core.pool.members import Demand as Demand
from broker.core.pool.members import Device as Device
from broker.core.pool.members import Flow as Flow
from broker.core.pool.members import Presence as Presence
from broker.core.pool.members import Replica as Replica
from broker.core.pool.members import Worker as Worker
from broker.core.pool.memory import Reservation as Reservation
from broker.core.pool.memory import Room as Room
from broker.core.pool.memory import rooms_of
from broker.core.pool.overrides import split_device
from subjects.ids import DeploymentKey, DeviceId, ReplicaId, WorkerId, base_name
from subjects.messages import OverrideKind, Overrides, ReplicaReport, ReplicaState, WorkerSnapshot


class Pool:
    """Everything reported, and the arithmetic of room on it."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self.heard_s = 0.0
        """A clock that runs only while our own bus works and we run: the one by which silence is judged."""
        self._round_trip_s: float | None = None
        self.inflow = Inflow()
        self.kv = KvTiers()
        self._ended: dict[ReplicaId, None] = {}
        self._closed: dict[tuple[str, DeviceId | None], float | None] = {}
        self._locked_devices: dict[tuple[str, DeviceId], None] = {}
        self._locked_replicas: dict[ReplicaId, None] = {}
        self.workers: dict[WorkerId, Worker] = {}
        self.replicas: dict[ReplicaId, Replica] = {}
        self._of_model: dict[DeploymentKey, dict[ReplicaId, None]] = {}
        self._of_worker: dict[WorkerId, dict[ReplicaId, None]] = {}
        self._named: dict[tuple[WorkerId, str], ReplicaId] = {}
        self._reserved_at: dict[WorkerId, dict[str, None]] = {}
        self._resized: dict[ReplicaId, tuple[int, int]] = {}
        self._device_of: dict[WorkerId, dict[DeviceId, Device]] = {}
        # What follows only remembers what was computed; whatever changes a worker or a model forgets its part.
        self._rooms: dict[WorkerId, dict[DeviceId, Room]] = {}
        self._devices: dict[bool, list[Device]] = {}
        self._serving: dict[DeploymentKey, tuple[list[Replica], int]] = {}
        self._promised_to: dict[DeploymentKey, int] | None = None
        self._in_order: list[Replica] | None = None
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
        self.layout = 0
        """Grows whenever there are other devices, or others of them take new work."""
        self.room_changes = 0
        """Grows whenever the room of some device may have become another."""

    # ------------------------------------------------------------------------------------------------------- hearing

    def round_trip(self, now_s: float) -> None:
        """Our own bus works: the time since the last proof counts as heard."""
        if self._round_trip_s is not None:
            gap_s = now_s - self._round_trip_s
            if gap_s <= self._settings.round_trip_gap_s_max:
                self.heard_s += gap_s
        self._round_trip_s = now_s

    def beat(self, worker: WorkerId, epoch_seen: int) -> bool:
        """A sign of life; True when the worker is new or back from silence."""
        self.epoch_seen_max = max(self.epoch_seen_max, epoch_seen)
        known = self.workers.get(worker)
        if known is None:
            self.workers[worker] = Worker(worker, self.heard_s, closed=(base_name(worker), None) in self._closed)
            return True
        known.last_heard = self.heard_s
        if known.presence is Presence.LIVE:
            return False
        self._verdict(known, Presence.LIVE)
        return True

    def _verdict(self, worker: Worker, presence: Presence) -> None:
        if worker.presence is not presence:
            worker.presence = presence
            self.news += 1
            self._new_layout()
            self._serving.clear()

    def _new_layout(self) -> None:
        self.layout += 1
        self._devices.clear()

    def override(self, overrides: Overrides) -> None:
        """People's drains of workers and devices, those to come included, and locks of devices and replicas; they take the
        place of what was said before."""
        entries = overrides.entries
        self._closed = {(one.about, None): one.bound_s for one in entries if one.kind is OverrideKind.WORKER_DRAIN}
        self._closed |= {split_device(one.about): one.bound_s for one in entries if one.kind is OverrideKind.DEVICE_DRAIN}
        self._locked_devices = {split_device(one.about): None for one in entries if one.kind is OverrideKind.DEVICE_LOCK}
        self._locked_replicas = {ReplicaId(one.about): None for one in entries if one.kind is OverrideKind.REPLICA_LOCK}
        for worker in self.workers.values():
            worker.closed = (base_name(worker.worker), None) in self._closed
        self.news += 1
        self._new_layout()

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
        if not self._locked_replicas and not self._locked_devices:
            return False
        return replica.replica in self._locked_replicas or any(
            self.device_locked(replica.worker, device) for device in replica.devices
        )

    def _touch(self, worker: WorkerId) -> None:
        self._rooms.pop(worker, None)
        self.room_changes += 1

    def _touch_replica(self, replica: Replica) -> None:
        """What it takes, or whether it serves, may be another now."""
        self._touch(replica.worker)
        self._serving.pop(replica.report.deployment, None)

    def report(self, now_s: float, snapshot: WorkerSnapshot) -> Changes:
        """Takes an agent's whole state; one older than what we have is only a sign of life."""
        self.beat(snapshot.worker, snapshot.epoch_seen)
        worker = self.workers[snapshot.worker]
        before = worker.snapshot
        if before is not None and snapshot.sequence <= before.sequence:
            return Changes()
        worker.snapshot = snapshot
        if snapshot.kv is not None:
            self.kv.take(now_s, snapshot.worker, snapshot.kv)
        self._take_devices(worker, before, snapshot)
        if before is not None and before.draining is not snapshot.draining:
            self._serving.clear()
        listed = {report.replica for report in snapshot.replicas}
        vanished = [replica for replica in self.replicas_of(snapshot.worker) if replica.report.replica not in listed]
        for replica in vanished:
            self.ended(replica.replica)
        appeared: list[Replica] = []
        changed: list[Replica] = []
        ended: list[Replica] = []
        for report in snapshot.replicas:
            if report.replica in self._ended:
                continue
            if report.state is ReplicaState.ABSENT:  # A load that waits for its turn: on its way, and charged.
                report = msgspec.structs.replace(report, state=ReplicaState.FETCHING)
            known = self.replicas.get(report.replica)
            if known is None or known.worker != snapshot.worker or _elsewhere(known.report, report):
                replica = self._list(now_s, snapshot.worker, report, known)
                if known is None:
                    appeared.append(replica)
                elif known.report.state is not report.state:
                    changed.append(replica)
                continue
            old = known.report
            known.report = report
            known.reported_s = now_s
            moved = old.state is not report.state
            if moved or old.budget_bytes != report.budget_bytes:
                self._touch_replica(known)
            if moved:
                changed.append(known)
                known.ready_s = None
            elif report.state is ReplicaState.FAILED and old.budget_bytes and not report.budget_bytes:
                ended.append(known)
            if report.state is ReplicaState.READY and known.ready_s is None:
                known.ready_s = now_s - report.state_s
        if not (appeared or changed or vanished or ended):
            return _NO_CHANGES
        self.news += 1
        return Changes(tuple(appeared), tuple(changed), tuple(vanished), tuple(ended))

    def _take_devices(self, worker: Worker, before: WorkerSnapshot | None, snapshot: WorkerSnapshot) -> None:
        known = self._device_of.get(snapshot.worker, {})
        same = before is not None and before.draining is snapshot.draining and before.engines == snapshot.engines
        if not same or len(known) != len(snapshot.devices) or any(d.device not in known for d in snapshot.devices):
            known = {d.device: Device(worker, d, (snapshot.worker, d.device)) for d in snapshot.devices}
            self._device_of[snapshot.worker] = known
            self._new_layout()
            self._touch(snapshot.worker)
            return
        touched = len(before.replicas) != len(snapshot.replicas) if before is not None else True
        for report in snapshot.devices:
            device = known[report.device]
            old, device.report = device.report, report
            if (old.memory_bytes, old.link, old.device_type) != (report.memory_bytes, report.link, report.device_type):
                self._new_layout()
                touched = True
            elif (old.reserved_bytes, old.contiguous_free_bytes) != (report.reserved_bytes, report.contiguous_free_bytes):
                touched = True
        if touched:
            self._touch(snapshot.worker)

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
        self._promised_to = None
        self._touch(reservation.worker)

    def release(self, replica_name: str) -> Reservation | None:
        """Takes a promise back."""
        held = self.reservations.pop(replica_name, None)
        if held is not None:
            self._reserved_at[held.worker].pop(replica_name, None)
            self._promised_to = None
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
            self._touch_replica(known)

    def resized(self, replica: ReplicaId) -> None:
        """It is as its agent says again."""
        if self._resized.pop(replica, None) is not None and replica in self.replicas:
            self._touch(self.replicas[replica].worker)

    def leave(self, replica: ReplicaId) -> None:
        """A transaction is about to end a replica."""
        self.leaving.add(replica)
        self.news += 1
        self._touch_replica(self.replicas[replica])

    def forget_plans(self, replicas: Iterable[ReplicaId]) -> None:
        """Transactions about these replicas are over."""
        for replica in replicas:
            self.leaving.discard(replica)
            self.news += 1
            if replica in self.replicas:
                self._touch_replica(self.replicas[replica])

    def forget_all_plans(self) -> None:
        """No transaction runs any more."""
        self.reservations.clear()
        self._reserved_at.clear()
        self._resized.clear()
        self.leaving.clear()
        self._rooms.clear()
        self._serving.clear()
        self._promised_to = None
        self.room_changes += 1
        self.news += 1

    def load_failed(self, replica: ReplicaId, failure: str) -> None:
        """A load ended badly and its process is gone: shown as failed until its agent forgets it, and charged no more."""
        known = self.replicas.get(replica)
        if known is not None:
            known.report = msgspec.structs.replace(known.report, state=ReplicaState.FAILED, budget_bytes=0, failure=failure)
            self.news += 1
            self._touch_replica(known)

    def _list(self, now_s: float, worker: WorkerId, report: ReplicaReport, known: Replica | None) -> Replica:
        if known is not None:
            self._unlist(known)  # An agent that says something else of it now must leave no trace of before.
        ready_s = now_s - report.state_s if report.state is ReplicaState.READY else None
        replica = Replica(worker, report, now_s, ready_s, report.replica in self.dead)
        self.replicas[report.replica] = replica
        self._of_model.setdefault(report.deployment, {})[report.replica] = None
        self._of_worker.setdefault(worker, {})[report.replica] = None
        self._named[(worker, base_name(report.replica))] = report.replica
        self._in_order = None
        self._promised_to = None
        self._touch_replica(replica)
        self._settle_reservation(report.replica)
        return replica

    def _pop(self, replica: ReplicaId) -> Replica | None:
        known = self.replicas.pop(replica, None)
        if known is not None:
            self._unlist(known)
            self.news += 1
        return known

    def _unlist(self, replica: Replica) -> None:
        self._of_model[replica.report.deployment].pop(replica.replica)
        self._of_worker[replica.worker].pop(replica.replica)
        self._named.pop((replica.worker, base_name(replica.replica)), None)
        self._in_order = None
        self._promised_to = None
        self._touch_replica(replica)

    def declare_dead(self, replica: ReplicaId) -> None:
        """For ever: an incarnation is never reused."""
        self.dead[replica] = None
        while len(self.dead) > self._settings.dead_replicas_max:
            self.dead.pop(next(iter(self.dead)))
        self.news += 1
        if replica in self.replicas:
            self.replicas[replica].dead = True
            self._touch_replica(self.replicas[replica])

    def judge(self, now_s: float) -> tuple[Worker, ...]:
        """Gives verdicts on silence and returns the workers that have just been declared dead."""
        settings = self._settings
        present = [worker for worker in self.workers.values() if worker.presence is not Presence.DEAD]
        silences = {worker.worker: self.heard_s - worker.last_heard for worker in present}
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
                self.kv.forget(worker.worker)
                for replica in self.replicas_of(worker.worker):
                    self.declare_dead(replica.replica)
            else:
                self._verdict(worker, Presence.SUSPECT if silence_s >= settings.suspect_s else Presence.LIVE)
        for worker in [w for w in self.workers.values() if w.presence is Presence.DEAD]:
            if now_s - worker.died_s >= settings.worker_forgotten_s:
                for replica in self.replicas_of(worker.worker):
                    self._pop(replica.replica)
                del self.workers[worker.worker]
                self._device_of.pop(worker.worker, None)
                self._new_layout()
        for name, held in list(self.reservations.items()):
            over = held.until_s is not None and now_s >= held.until_s
            if over or held.worker not in self.workers or self.workers[held.worker].presence is Presence.DEAD:
                self.release(name)
        self.inflow.judge(self.heard_s - settings.ingress_silent_s)
        return tuple(died)

    # -------------------------------------------------------------------------------------------------------- asking

    def replicas_in_order(self) -> list[Replica]:
        """All that is listed, in order of id."""
        if self._in_order is None:
            self._in_order = sorted(self.replicas.values(), key=lambda replica: replica.report.replica)
        return self._in_order

    def replicas_of(self, worker: WorkerId) -> list[Replica]:
        """All that is listed of a worker."""
        return [self.replicas[replica] for replica in self._of_worker.get(worker, ())]

    def replicas_for(self, model: DeploymentKey) -> list[Replica]:
        """All that is listed of a model."""
        return [self.replicas[replica] for replica in self._of_model.get(model, ())]

    def open_replicas(self, model: DeploymentKey) -> list[Replica]:
        """Ready, staying and not dead: those that serve."""
        return self._served_by(model)[0]

    def coming_replicas(self, model: DeploymentKey) -> int:
        """On their way to ready: listed ones, and promised ones that are not listed yet."""
        if self._promised_to is None:
            self._promised_to = {}
            for held in self.unlisted_reservations():
                self._promised_to[held.deployment] = self._promised_to.get(held.deployment, 0) + 1
        return self._served_by(model)[1] + self._promised_to.get(model, 0)

    def _served_by(self, model: DeploymentKey) -> tuple[list[Replica], int]:
        """The replicas that serve a model, and how many that are listed are on their way."""
        known = self._serving.get(model)
        if known is None:
            staying = [
                replica
                for replica in self.replicas_for(model)
                if not replica.dead and replica.replica not in self.leaving and not self.worker_leaves(replica.worker)
            ]
            ready = [replica for replica in staying if replica.report.state is ReplicaState.READY]
            coming = sum(replica.report.state in COMING for replica in staying)
            known = self._serving[model] = (ready, coming)
        return known

    def worker_leaves(self, worker: WorkerId) -> bool:
        """Whether a worker is dead or shuts down: what it has counts for nothing any more."""
        known = self.workers[worker]
        return known.presence is Presence.DEAD or (known.snapshot is not None and known.snapshot.draining)

    def devices(self, *, usable: bool) -> list[Device]:
        """All known devices in order of worker and device id; ``usable`` leaves only those that may take new work."""
        known = self._devices.get(usable)
        if known is None:
            known = self._devices[usable] = [
                device
                for worker in sorted(self._device_of)
                for device in sorted(self._device_of[worker].values(), key=lambda device: device.key)
                if not usable or self.usable(device)
            ]
        return known

    def usable(self, device: Device) -> bool:
        """Whether new work may go to a device: its worker is well, and no person closed or locked it."""
        worker = device.worker
        return worker.usable and not (
            self.is_closed(worker.worker, device.report.device) or self.device_locked(worker.worker, device.report.device)
        )

    def device(self, worker: WorkerId, device: DeviceId) -> Device | None:
        """One device, if it is known."""
        known = self._device_of.get(worker)
        return known.get(device) if known is not None else None

    def replica_named(self, worker: WorkerId, replica_name: str) -> Replica | None:
        """The listed replica that a load command named."""
        replica = self._named.get((worker, replica_name))
        return self.replicas[replica] if replica is not None else None

    # ---------------------------------------------------------------------------------------------------------- room

    def room(self, device: Device) -> Room:
        """The arithmetic of a device now."""
        worker = device.worker
        rooms = self._rooms.get(worker.worker)
        if rooms is None:
            assert worker.snapshot is not None, "a device is known by its worker's report"
            reservations = (self.reservations[name] for name in self._reserved_at.get(worker.worker, ()))
            rooms = self._rooms[worker.worker] = rooms_of(
                worker.snapshot, self.replicas_of(worker.worker), self._unlisted(reservations), self.leaving, self._resized
            )
        return rooms[device.report.device]

    def unlisted_reservations(self) -> list[Reservation]:
        """Promises to replicas that no agent lists yet."""
        return self._unlisted(self.reservations.values())

    def _unlisted(self, reservations: Iterable[Reservation]) -> list[Reservation]:
        return [r for r in reservations if self.replica_named(r.worker, r.replica_name) is None]


_NO_CHANGES = Changes()


def _elsewhere(one: ReplicaReport, other: ReplicaReport) -> bool:
    return one.device != other.device or one.deployment != other.deployment or one.peers != other.peers
