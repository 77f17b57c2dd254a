"""What may be: where a model fits, who may not leave, beside whom it may live. Filters that say why not, with the numbers.

Reads the pool and the catalogue, changes nothing. A decision asks the same questions for many models and devices, so answers
are kept until the next :meth:`Feasibility.look`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from broker.core.pool.catalogue import Catalogue, DeviceKey
from broker.core.pool.describe import bytes_text
from broker.core.pool.events import SchedulerSettings
from broker.core.pool.state import Demand, Device, Pool, Replica
from subjects.ids import DeploymentKey, WorkerId
from subjects.messages import EngineType, Mode, ModelRecord, ReplicaState

Group = tuple[Device, ...]
"""Devices of which one replica can have any ``gpus``: one device, or all linked ones of a worker."""
_NO_DEMAND = Demand()


@dataclass(eq=False, slots=True)
class Feasibility:
    """The questions, as of the last look at the pool's demand."""

    _settings: SchedulerSettings
    _pool: Pool
    _catalogue: Catalogue
    _demand: dict[DeploymentKey, Demand] = field(default_factory=dict)
    _held: dict[DeviceKey, int] = field(default_factory=dict)
    _layout: int = -1
    _groups: dict[tuple[EngineType, int, int], list[Group]] = field(default_factory=dict)

    def look(self, now_s: float) -> dict[DeploymentKey, Demand]:
        """Takes the demand of this moment; what follows refers to it."""
        self._demand = self._pool.inflow.demand(now_s)
        self._held.clear()
        return self._demand

    def demand(self, deployment: DeploymentKey) -> Demand:
        """Demand for one model, as of the last :meth:`look`."""
        return self._demand.get(deployment, _NO_DEMAND)

    def replicas_count(self, deployment: DeploymentKey) -> int:
        """Replicas that serve or will."""
        return len(self._pool.open_replicas(deployment)) + self._pool.coming_replicas(deployment)

    def stays(self, replica: Replica) -> bool:
        """Whether a replica may not be evicted by anybody: pinned, locked, or needed for its model's minimum."""
        record = self._catalogue.of_deployment(replica.report.deployment)
        return (record is not None and self.all_stay(record)) or self._pool.replica_locked(replica)

    def all_stay(self, record: ModelRecord) -> bool:
        """Whether no replica of a model may be evicted now."""
        if self._catalogue.pinned(record) or self._catalogue.locked(record.deployment):
            return True
        return 0 < record.min_replicas >= len(self._pool.open_replicas(record.deployment))

    def holds(self, deployment: DeploymentKey) -> bool:
        """Whether all replicas that a model has are kept, be it because nothing happens by itself in its mode."""
        record = self._catalogue.of_deployment(deployment)
        return record is not None and (
            self.all_stay(record)
            or self._catalogue.mode(deployment) is not Mode.ACT
            or 0 < self.replicas_count(deployment) <= record.min_replicas
        )

    def held_bytes(self, device: Device) -> int:
        """What stays on a device whatever anybody wants, that which is on its way included."""
        if not self._catalogue.any_stay:
            return 0
        if (known := self._held.get(device.key)) is None:
            room = self._pool.room(device)
            known = sum(r.budget_bytes for r in room.promised if self.holds(r.deployment))
            for replica in room.replicas:
                if not replica.dead and replica.replica not in self._pool.leaving and self.holds(replica.report.deployment):
                    known += self._least_bytes(replica)
            self._held[device.key] = known
        return known

    def shut(self, device: Device, record: ModelRecord) -> bool:
        """Whether what stays on a device keeps a model from it, be it by its bytes or because they may not be neighbours."""
        if self.held_bytes(device) + record.budget_bytes > device.report.memory_bytes:
            return True
        room = self._pool.room(device)
        leavers = [replica for replica in room.replicas if not self.holds(replica.report.deployment)]
        stay = [other for other in self._others(device, record, leavers) if self.holds(other)]
        return bool(stay) and bool(self._neighbours_refusal(device, record, stay))

    def _least_bytes(self, replica: Replica) -> int:
        """Of its budget, what a replica keeps when others need room: KV that it was lent beyond its own need goes back."""
        record = self._catalogue.of_deployment(replica.report.deployment)
        held = replica.report.budget_bytes
        return held if record is None or self._catalogue.locked(record.deployment) else min(held, record.budget_bytes)

    def minimum_refusal(self, victims: Sequence[Replica]) -> str:
        """Why these replicas may not leave all together: a model would have less than its minimum. Empty: they may."""
        models = [victim.report.deployment for victim in victims]
        for deployment in dict.fromkeys(models):
            record = self._catalogue.of_deployment(deployment)
            left = len(self._pool.open_replicas(deployment)) - models.count(deployment)
            if record is not None and left < record.min_replicas:
                return f"{record.name} would have less than its minimum of {record.min_replicas}"
        return ""

    def leave_refusal(self, replica: Replica) -> str:
        """Why a replica may not leave; empty when it may."""
        if replica.replica in self._pool.leaving:
            return f"{replica.replica} leaves already"
        if replica.dead or replica.report.state is not ReplicaState.READY:
            return f"{replica.replica} is not ready"
        if self.stays(replica):
            return f"{replica.replica} is pinned, locked or needed for a minimum"
        return ""

    def groups(self, record: ModelRecord) -> list[Group]:
        """Usable devices that could hold the model together if they were empty."""
        if self._layout != self._pool.layout:
            self._layout = self._pool.layout
            self._groups.clear()
        key = (record.engine_type, record.budget_bytes, record.gpus)
        if (known := self._groups.get(key)) is None:
            fitting = [device for device in self._pool.devices(usable=True) if self._fits(device, record)]
            known = self._groups[key] = _grouped(fitting, record.gpus)
        return known

    def _fits(self, device: Device, record: ModelRecord) -> bool:
        return device.report.memory_bytes >= record.budget_bytes and runs(device, record)

    def names_to_stand_back(self) -> frozenset[str]:
        """Of models with several names, those whose record has less hope of room than that of another name: the pool shall
        be asked for what it can give, so that a model is refused only when no record of it fits."""
        back: list[str] = []
        for named in self._catalogue.shared:
            hopes = [self._hope(record) for record in named]
            back += [record.name for record, hope in zip(named, hopes, strict=True) if hope < max(hopes)]
        return frozenset(back)

    def _hope(self, record: ModelRecord) -> int:
        """2 where devices could hold it beside what must stay, 1 where they could if that left or they were usable, else 0.

        What must stay does not count once the model has replicas: it may be those.
        """
        groups = self.groups(record)
        if groups and (not self._catalogue.any_stay or self.replicas_count(record.deployment)):
            return 2
        for group in groups:
            if sum(not self.shut(device, record) for device in group) >= record.gpus:
                return 2
        fitting = [device for device in self._pool.devices(usable=False) if self._fits(device, record)]
        return int(bool(_grouped(fitting, record.gpus)))

    def cannot_span(self, record: ModelRecord, devices: Sequence[Device]) -> str:
        """Why a replica cannot have exactly these devices, their room aside; empty when it can."""
        first = devices[0] if devices else None
        if first is None or len({device.key for device in devices}) != record.gpus or len(devices) != record.gpus:
            return f"{record.name} spans {record.gpus} devices, not these {len(devices)}"
        if any(device.worker is not first.worker for device in devices):
            return "a replica cannot span workers"
        if len(devices) > 1 and (not first.report.link or any(d.report.link != first.report.link for d in devices)):
            return "the devices are not linked with each other"
        if not runs(first, record):
            return f"{first.worker.worker} does not run the engine {record.engine_type.value}"
        if not all(self._pool.usable(device) for device in devices):
            return "a device takes no new work"
        return ""

    def room_refusal(self, record: ModelRecord, devices: Sequence[Device], victims: Sequence[Replica]) -> str:
        """Why a replica has no room on these devices once ``victims`` have left; empty when it has."""
        for device in devices:
            name = device.report.device
            leavers = [victim for victim in victims if name in victim.devices]
            block_bytes = self.block_bytes(device, leavers)
            if block_bytes < record.budget_bytes:
                return (
                    f"{record.name} needs {bytes_text(record.budget_bytes)} on {name}, "
                    f"{bytes_text(max(0, block_bytes))} are to be had"
                )
            if refusal := self._neighbours_refusal(device, record, self._others(device, record, leavers)):
                return refusal
        return ""

    def _neighbours_refusal(self, device: Device, record: ModelRecord, others: Sequence[DeploymentKey]) -> str:
        """Why a model may not live on a device beside these others; empty when it may."""
        models_max, name = self._settings.models_per_device_max, device.report.device
        if models_max is not None and len(others) >= models_max:
            return f"{name} has {len(others)} other models, at most {models_max} may share it"
        if others and not (record.allow_co_location and all(self._co_locates(other, record) for other in others)):
            return f"{record.name} or a model on {name} wants its device for itself"
        return ""

    def block_bytes(self, device: Device, leavers: Sequence[Replica]) -> int:
        """The largest block of a device that one replica can surely get once ``leavers`` have left it too."""
        room = self._pool.room(device)
        free_bytes = room.free_planned_bytes + sum(leaver.report.budget_bytes for leaver in leavers)
        if device.report.contiguous_free_bytes is None:
            return free_bytes
        gone = sum(replica.replica in self._pool.leaving for replica in room.replicas) + len(leavers)
        if gone == len(room.replicas) and not room.promised:
            return free_bytes
        return min(free_bytes, max([room.largest_free_bytes, *(leaver.report.budget_bytes for leaver in leavers)]))

    def _others(self, device: Device, record: ModelRecord, gone: Iterable[Replica]) -> list[DeploymentKey]:
        """Other models that a device will have, once ``gone`` have left it too."""
        left = {replica.replica for replica in gone}
        room = self._pool.room(device)
        there = [r.report.deployment for r in room.replicas if r.replica not in self._pool.leaving and r.replica not in left]
        there += [reservation.deployment for reservation in room.promised]
        return [deployment for deployment in dict.fromkeys(there) if deployment != record.deployment]

    def _co_locates(self, deployment: DeploymentKey, newcomer: ModelRecord) -> bool:
        record = self._catalogue.of_deployment(deployment)
        return record is None or (record.allow_co_location and record.tenant == newcomer.tenant)


def runs(device: Device, record: ModelRecord) -> bool:
    """Whether a device's worker runs the model's engine."""
    snapshot = device.worker.snapshot
    return snapshot is not None and record.engine_type in snapshot.engines


def _grouped(devices: Sequence[Device], gpus: int) -> list[Group]:
    if gpus == 1:
        return [(device,) for device in devices]
    linked: dict[tuple[WorkerId, str], list[Device]] = {}
    for device in devices:
        if device.report.link:
            linked.setdefault((device.worker.worker, device.report.link), []).append(device)
    return [tuple(group) for group in linked.values() if len(group) >= gpus]
