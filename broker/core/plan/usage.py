"""Who uses what, who may leave and who stays: the pool's demand and replicas as of one look.

A decision asks the same questions for many models and devices, so answers are kept until the next :meth:`Usage.look`.
"""

from __future__ import annotations

from dataclasses import dataclass

from broker.core.pool.catalogue import Catalogue, DeviceKey
from broker.core.pool.describe import seconds_text
from broker.core.pool.events import SchedulerSettings
from broker.core.pool.state import Demand, Device, Pool, Replica
from subjects.ids import DeploymentKey
from subjects.messages import ModelRecord, ReplicaState

_NO_DEMAND = Demand()


@dataclass(frozen=True, slots=True)
class Leaver:
    """A ready replica that is neither pinned nor needed, with what decides whether it may leave."""

    replica: Replica
    busy: bool
    idle_s: float
    resident_s: float
    last_used_s: float


class Usage:
    """The questions; reads the pool and the catalogue, changes nothing."""

    def __init__(self, settings: SchedulerSettings, pool: Pool, catalogue: Catalogue) -> None:
        self._settings = settings
        self._pool = pool
        self._catalogue = catalogue
        self.looked_s = 0.0
        """When the last look was."""
        self._demand: dict[DeploymentKey, Demand] = {}
        self._held: dict[DeviceKey, int] = {}
        self._leavers_on: dict[DeviceKey, list[Leaver]] = {}
        self._idle_on: dict[DeviceKey, Device] | None = None

    def look(self, now_s: float) -> dict[DeploymentKey, Demand]:
        """Takes the demand of this moment; what follows refers to it."""
        self.looked_s = now_s
        self._demand = self._pool.demand(now_s)
        self._held.clear()
        self._leavers_on.clear()
        self._idle_on = None
        return self._demand

    def demand(self, deployment: DeploymentKey) -> Demand:
        """Demand for one model, as of the last :meth:`look`."""
        return self._demand.get(deployment, _NO_DEMAND)

    def replicas_count(self, deployment: DeploymentKey) -> int:
        """Replicas that serve or will."""
        return len(self._pool.open_replicas(deployment)) + self._pool.coming_replicas(deployment)

    def spare(self, deployment: DeploymentKey) -> int:
        """How many open replicas a model has above its minimum."""
        record = self._catalogue.of_deployment(deployment)
        return len(self._pool.open_replicas(deployment)) - (record.min_replicas if record is not None else 0)

    # ------------------------------------------------------------------------------------------------------------ who stays

    def stays(self, replica: Replica) -> bool:
        """Whether a ready replica may not be evicted by anybody: pinned, locked, or needed for its model's minimum."""
        record = self._catalogue.of_deployment(replica.report.deployment)
        return (record is not None and self.all_stay(record)) or self._pool.replica_locked(replica)

    def all_stay(self, record: ModelRecord) -> bool:
        """Whether no replica of a model may be evicted now."""
        if self._catalogue.pinned(record) or self._catalogue.locked(record.deployment):
            return True
        return record.min_replicas > 0 and self.spare(record.deployment) <= 0

    def held_bytes(self, device: Device) -> int:
        """What pinned models and minimum replicas keep of a device whatever anybody wants, those on their way included."""
        if not self._catalogue.any_stay:
            return 0
        known = self._held.get(device.key)
        if known is None:
            room = self._pool.room(device)
            known = sum(r.budget_bytes for r in room.promised if self.holds(r.deployment))
            for replica in room.replicas:
                if not replica.dead and replica.replica not in self._pool.leaving and self.holds(replica.report.deployment):
                    known += self._least_bytes(replica)
            self._held[device.key] = known
        return known

    def _least_bytes(self, replica: Replica) -> int:
        """Of its budget, what a replica keeps when others need room: KV that it was lent beyond its own need goes back."""
        record = self._catalogue.of_deployment(replica.report.deployment)
        held = replica.report.budget_bytes
        return held if record is None or self._catalogue.locked(record.deployment) else min(held, record.budget_bytes)

    def holds(self, deployment: DeploymentKey) -> bool:
        """Whether all replicas that a model has are kept."""
        record = self._catalogue.of_deployment(deployment)
        if record is None:
            return False
        if self._catalogue.pinned(record) or self._catalogue.locked(deployment):
            return True
        return 0 < self.replicas_count(deployment) <= record.min_replicas

    # ---------------------------------------------------------------------------------------------------------- who is busy

    def busy(self, replica: Replica) -> bool:
        """Whether a replica's model has demand, and this replica a part in it.

        The gateways' word counts, not the replica's own counters: those can be stuck (PAINS K1).
        """
        demand = self._demand.get(replica.report.deployment, _NO_DEMAND)
        if not demand.any:
            return False
        if demand.waiting > 0 or replica.report.running:
            return True
        if self.looked_s - replica.last_used_s < self._settings.idle_release_s:
            return True
        return len(self._pool.open_replicas(replica.report.deployment)) <= 1

    def last_used_s(self, replica: Replica) -> float:
        """When the replica, or its model anywhere, was last used."""
        return max(replica.last_used_s, self._catalogue.model(replica.report.deployment).last_used_s)

    def idle_s(self, now_s: float, replica: Replica) -> float:
        """Since it was last used, or became ready."""
        ready_s = replica.ready_s if replica.ready_s is not None else now_s
        return now_s - max(self.last_used_s(replica), ready_s)

    def text(self, now_s: float, replica: Replica) -> str:
        """Why it was this one that had to leave."""
        if self.busy(replica):
            return "busy, and others have waited for long"
        return f"idle for {seconds_text(self.idle_s(now_s, replica))}, least recently used"

    # --------------------------------------------------------------------------------------------------------- who may leave

    def leavers(self, device: Device) -> list[Leaver]:
        """Ready replicas of a device that somebody could make leave."""
        known = self._leavers_on.get(device.key)
        if known is None:
            now_s = self.looked_s
            known = self._leavers_on[device.key] = [
                Leaver(
                    replica,
                    self.busy(replica),
                    self.idle_s(now_s, replica),
                    now_s - (replica.ready_s if replica.ready_s is not None else now_s),
                    self.last_used_s(replica),
                )
                for replica in self._pool.room(device).replicas
                if replica.report.state is ReplicaState.READY and not replica.dead and not self.stays(replica)
            ]
        return known

    def idle_devices(self) -> dict[DeviceKey, Device]:
        """Devices on which an idle replica could leave, in order: in a busy pool they are few."""
        if self._idle_on is None:
            self._idle_on = {
                device.key: device
                for device in self._pool.devices(usable=True)
                if any(
                    replica.report.state is ReplicaState.READY
                    and not replica.dead
                    and not self.busy(replica)
                    and not self.stays(replica)
                    for replica in self._pool.room(device).replicas
                )
            }
        return self._idle_on
