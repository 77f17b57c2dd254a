"""Where a model could go: devices that one replica can have together, free room, and who would have to leave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from broker.core.plan.usage import Leaver, Usage
from broker.core.pool.catalogue import Catalogue, DeviceKey, Model
from broker.core.pool.describe import bytes_text
from broker.core.pool.events import Placement, SchedulerSettings
from broker.core.pool.state import Device, Pool, Replica
from subjects.ids import DeploymentKey, ReplicaId, WorkerId
from subjects.messages import EngineType, ModelRecord

Group = tuple[Device, ...]
"""Devices of which one replica can have any ``gpus``: one device, or all linked ones of a worker."""


@dataclass(frozen=True, slots=True)
class Want:
    """A model that should get a replica, and what may be done for it."""

    record: ModelRecord
    wait_s: float
    why: str
    evicts: bool = True
    """Whether somebody may leave for it; else it takes free room only."""
    waits: bool = True
    """Whether requests wait for it, as opposed to a minimum to be kept."""
    grows: bool = False
    """Whether it would stand beside replicas that serve."""
    restores: bool = False
    device: DeviceKey | None = None
    """Where it came from, for one that is restored."""


class Sites:
    """Reads the pool, changes nothing. Bounded: a replica over several devices takes the best of each group, one by one."""

    def __init__(self, settings: SchedulerSettings, pool: Pool, catalogue: Catalogue, usage: Usage) -> None:
        self._settings = settings
        self._pool = pool
        self._catalogue = catalogue
        self._usage = usage
        self._layout = -1
        self._groups: dict[tuple[EngineType, int, int], list[Group]] = {}
        self._largest: tuple[int, int] = (-1, 0)

    # ------------------------------------------------------------------------------------------------------------ devices

    def groups(self, record: ModelRecord) -> list[Group]:
        """Usable devices that could hold the model together if they were empty."""
        if self._layout != self._pool.layout:
            self._layout = self._pool.layout
            self._groups.clear()
        key = (record.engine_type, record.budget_bytes, record.gpus)
        known = self._groups.get(key)
        if known is None:
            fitting = [device for device in self._pool.devices(usable=True) if self.fits(device, record)]
            known = self._groups[key] = _grouped(fitting, record.gpus)
        return known

    def fits(self, device: Device, record: ModelRecord) -> bool:
        """Whether a device could hold a model's share if it were empty."""
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
        if groups and (not self._catalogue.any_stay or self._usage.replicas_count(record.deployment)):
            return 2
        for group in groups:
            free = [d for d in group if self._usage.held_bytes(d) + record.budget_bytes <= d.report.memory_bytes]
            if len(free) >= record.gpus:
                return 2
        fitting = [device for device in self._pool.devices(usable=False) if self.fits(device, record)]
        return int(bool(_grouped(fitting, record.gpus)))

    def largest_block_bytes(self) -> int:
        """The largest block that is free, or will be, on any usable device."""
        changes = self._pool.room_changes + self._pool.layout
        if self._largest[0] != changes:
            blocks = (self._pool.room(device).largest_free_bytes for device in self._pool.devices(usable=True))
            self._largest = (changes, max(blocks, default=0))
        return self._largest[1]

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

    def block_bytes(self, device: Device, leavers: Sequence[Replica]) -> int:
        """The largest block of a device that one replica can surely get once ``leavers`` have left it too."""
        room = self._pool.room(device)
        free_bytes = room.free_planned_bytes
        for leaver in leavers:
            free_bytes += leaver.report.budget_bytes
        if device.report.contiguous_free_bytes is None:
            return free_bytes
        gone = sum(replica.replica in self._pool.leaving for replica in room.replicas) + len(leavers)
        if gone == len(room.replicas) and not room.promised:
            return free_bytes
        return min(free_bytes, max([room.largest_free_bytes, *(leaver.report.budget_bytes for leaver in leavers)]))

    # ------------------------------------------------------------------------------------------------------ who is beside it

    def strangers(self, device: Device, record: ModelRecord) -> set[DeploymentKey]:
        """Models there that cannot live beside ``record``, since one of the two wants its device for itself."""
        if self._catalogue.all_co_locate:
            return set()
        return {model for model in self.others(device, record) if not self.co_locates(record, (model,))}

    def others(self, device: Device, record: ModelRecord, gone: Iterable[Replica] = ()) -> set[DeploymentKey]:
        """Other models that a device will have, once ``gone`` have left it too."""
        leaving = self._pool.leaving
        left = {replica.replica for replica in gone}
        room = self._pool.room(device)
        there = {r.report.deployment for r in room.replicas if r.replica not in leaving and r.replica not in left}
        there.update(reservation.deployment for reservation in room.promised)
        there.discard(record.deployment)
        return there

    def co_locates(self, record: ModelRecord, others: Iterable[DeploymentKey]) -> bool:
        """Whether a model and all of ``others`` may share a device."""
        return record.allow_co_location and all(self._co_locates(other, record.tenant) for other in others)

    def _co_locates(self, deployment: DeploymentKey, tenant: str) -> bool:
        record = self._catalogue.of_deployment(deployment)
        return record is None or (record.allow_co_location and record.tenant == tenant)

    def _crowded(self, device: Device, record: ModelRecord, gone: Sequence[Replica] = ()) -> bool:
        most = self._settings.models_per_device_max
        return most is not None and len(self.others(device, record, gone)) >= most

    # ---------------------------------------------------------------------------------------------------------- free room

    def in_free_room(self, want: Want, claimed: set[DeviceKey]) -> Placement | None:
        """The devices with enough free room that it fits best."""
        record = want.record
        if self.largest_block_bytes() < record.budget_bytes:
            return None
        failed_on = self._catalogue.model(record.deployment).failed_on
        best: tuple[tuple[object, ...], list[Device], int] | None = None
        for group in self.groups(record):
            free = []
            for device in group:
                room = self._pool.room(device)
                if room.largest_free_bytes < record.budget_bytes or device.key in claimed:
                    continue
                if self.strangers(device, record) or self._crowded(device, record):
                    continue
                waits = room.block_now_bytes < record.budget_bytes or room.loads_running > 0
                free.append(
                    (
                        want.device not in (None, device.key),
                        device.key == failed_on,
                        waits,
                        room.free_planned_bytes - record.budget_bytes,
                        device.key,
                        device,
                    )
                )
            if len(free) < record.gpus:
                continue
            free.sort(key=lambda entry: entry[:5])
            chosen = free[: record.gpus]
            left = sum(entry[3] for entry in chosen)
            order = (
                all(entry[0] for entry in chosen),
                any(entry[1] for entry in chosen),
                any(entry[2] for entry in chosen),
                left,
                chosen[0][4],
            )
            if best is None or order < best[0]:
                best = (order, [entry[5] for entry in chosen], left)
        if best is None:
            return None
        return _placement(best[1], (), f"{want.why}; free room, {bytes_text(best[2])} stay free")

    # ---------------------------------------------------------------------------------------------------------- evictions

    def by_eviction(self, want: Want, claimed: set[DeviceKey]) -> Placement | None:
        """The devices where the least is lost by making room."""
        record = want.record
        model = self._catalogue.model(record.deployment)
        best: tuple[tuple[object, ...], list[Device], list[Replica], int] | None = None
        for group in self._worth_a_search(want, model):
            options = []
            for device in group:
                if device.key in claimed:
                    continue
                victims = self._victims(device, want, model)
                if victims is not None:
                    options.append((self._cost(victims, (device,), model), device, victims))
            if len(options) < record.gpus:
                continue
            options.sort(key=lambda option: option[0])
            devices = [device for _, device, _ in options[: record.gpus]]
            all_victims = {victim.replica: victim for _, _, victims in options[: record.gpus] for victim in victims}
            chosen = list(all_victims.values())
            if not chosen or not self._minimums_stay(chosen):
                continue
            cost = self._cost(chosen, devices, model)
            if best is None or cost < best[0]:
                best = (cost, devices, chosen, int(cost[0]))
        if best is None:
            return None
        _, devices, chosen, busy = best
        names = ", ".join(self._catalogue.name(victim.report.deployment) for victim in chosen)
        bound = f", over the bound of {self._settings.minority_wait_s_max:g} s" if busy else ""
        reason = f"{want.why}{bound}; {names} {'leave' if len(chosen) > 1 else 'leaves'}"
        return _placement(devices, tuple(victim.replica for victim in chosen), reason)

    def _worth_a_search(self, want: Want, model: Model) -> list[Group]:
        """The groups where somebody may leave for it: where nobody busy may, those where somebody is idle."""
        groups = self.groups(want.record)
        if want.waits and not model.failures and want.wait_s >= self._settings.minority_wait_s_max:
            return groups
        idle = self._usage.idle_devices()
        if want.record.gpus == 1 and 4 * len(idle) < len(groups):
            return [(device,) for device in idle.values() if self.fits(device, want.record)]
        return [group for group in groups if any(device.key in idle for device in group)]

    def _cost(
        self, victims: Sequence[Replica], devices: Sequence[Device], model: Model
    ) -> tuple[int, bool, int, float, DeviceKey]:
        """What is lost if ``victims`` leave, the worst first: busy ones, their number, how lately they were used."""
        usage = self._usage
        busy = sum(usage.busy(victim) for victim in victims)
        latest_s = max((usage.last_used_s(victim) for victim in victims), default=0.0)
        failed = any(device.key == model.failed_on for device in devices)
        return (busy, failed, len(victims), latest_s, devices[0].key)

    def _minimums_stay(self, victims: Sequence[Replica]) -> bool:
        models = [victim.report.deployment for victim in victims]
        return all(self._usage.spare(deployment) >= models.count(deployment) for deployment in models)

    def claim(self, want: Want, claimed: set[DeviceKey]) -> tuple[DeviceKey, ...]:
        """The devices where ``want`` will most likely get its room: of those it can have, the ones with the most to free."""
        record = want.record
        best: list[tuple[int, DeviceKey]] | None = None
        for group in self.groups(record):
            possible = sorted(
                (-(device.report.memory_bytes - self._usage.held_bytes(device)), device.key)
                for device in group
                if device.key not in claimed
                and self._usage.held_bytes(device) + record.budget_bytes <= device.report.memory_bytes
            )[: record.gpus]
            if len(possible) == record.gpus and (best is None or possible < best):
                best = possible
        return tuple(key for _, key in best) if best is not None else ()

    def _victims(self, device: Device, want: Want, model: Model) -> list[Replica] | None:
        """Who leaves ``device`` for ``want``: few, idle first, least recently used first. None if it were in vain."""
        record = want.record
        has_room = self.block_bytes(device, ()) >= record.budget_bytes and not self._crowded(device, record)
        if has_room and not self.strangers(device, record):
            return []
        leavers = [leaver for leaver in self._usage.leavers(device) if self._may_leave(leaver, want, model)]
        if not leavers:
            return None
        strangers = self.strangers(device, record)
        movable = {leaver.replica.report.deployment for leaver in leavers}
        if not strangers <= movable:
            return None
        leavers.sort(key=lambda leaver: (leaver.busy, leaver.last_used_s, leaver.replica.replica))
        chosen: list[Replica] = []
        for leaver in leavers:
            replica = leaver.replica
            deployment = replica.report.deployment
            enough = self.block_bytes(device, chosen) >= record.budget_bytes and not self._crowded(device, record, chosen)
            # One model can have several replicas here, and keeps its minimum over all that leave.
            left = self._usage.spare(deployment) - sum(r.report.deployment == deployment for r in chosen)
            if left > 0 and (not enough or deployment in strangers):
                chosen.append(replica)
        if self.block_bytes(device, chosen) < record.budget_bytes or self._crowded(device, record, chosen):
            return None
        # A small early choice may have become needless beside a later big one: the more recently used stay.
        for replica in reversed(list(chosen)):
            rest = [other for other in chosen if other is not replica]
            needless = self.block_bytes(device, rest) >= record.budget_bytes and not self._crowded(device, record, rest)
            if needless and replica.report.deployment not in strangers:
                chosen = rest
        return chosen

    def _may_leave(self, leaver: Leaver, want: Want, model: Model) -> bool:
        settings = self._settings
        deployment = leaver.replica.report.deployment
        if leaver.replica.replica in self._pool.leaving or deployment == want.record.deployment:
            return False
        if model.failures:
            return not leaver.busy and leaver.idle_s >= settings.failing_victim_idle_s
        swap_s = max(model.load_s or 0.0, self._catalogue.model(deployment).load_s or 0.0)
        paid = leaver.resident_s >= max(settings.residency_s_min, swap_s)
        if not leaver.busy:
            return paid or leaver.idle_s >= settings.idle_release_s
        return paid and want.waits and want.wait_s >= settings.minority_wait_s_max


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


def _placement(devices: Sequence[Device], victims: tuple[ReplicaId, ...], reason: str) -> Placement:
    worker, first = devices[0].key
    return Placement(worker, first, victims, reason, tuple(device.key[1] for device in devices[1:]))
