"""Who gets room, where, and who leaves for it. Reads the pool and the catalogue, changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from broker.core.catalogue import Catalogue, DeviceKey, Model
from broker.core.describe import bytes_text, describe_need, seconds_text
from broker.core.pool import Demand, Device, Pool, Presence, Replica
from broker.core.scheduler_events import Placement, SchedulerSettings
from broker.core.transactions import Stage, Transactions
from subjects.ids import ModelHash
from subjects.messages import ModelRecord, ReplicaState


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


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a gateway is told of a model: how long a newcomer may wait, or why there is no point in waiting."""

    estimated_wait_s: float = 0.0
    refusal: str = ""
    retry_after_s: int = 0
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class Leaver:
    """A ready replica that is neither pinned nor needed, with what decides whether it may leave."""

    replica: Replica
    busy: bool
    idle_s: float
    resident_s: float
    last_used_s: float


class Planner:
    """The rules of ``placement`` as questions."""

    def __init__(self, settings: SchedulerSettings, pool: Pool, catalogue: Catalogue, transactions: Transactions) -> None:
        self._settings = settings
        self._pool = pool
        self._catalogue = catalogue
        self._transactions = transactions
        self._no_worker_since_s: dict[ModelHash, float] = {}
        self._demand: dict[ModelHash, Demand] = {}
        self._held: dict[DeviceKey, int] = {}
        self._leavers_on: dict[DeviceKey, list[Leaver]] = {}

    def look(self, now_s: float) -> dict[ModelHash, Demand]:
        """Takes the demand of this moment; what follows refers to it."""
        self._demand = self._pool.demand(now_s)
        self._held.clear()
        self._leavers_on.clear()
        return self._demand

    def demand(self, model_hash: ModelHash) -> Demand:
        """Demand for one model, as of the last :meth:`look`."""
        return self._demand.get(model_hash, Demand())

    # ------------------------------------------------------------------------------------------------------ who wants room

    def wants(self, restores: list[Want]) -> list[Want]:
        """All models that should get a replica now, the most urgent first: what is restored, what waits (longest first),
        minimum replicas, one more replica beside busy ones."""
        found: list[tuple[int, float, str, Want]] = []
        restored: set[ModelHash] = set()
        for want in restores:
            model_hash = want.record.model_hash
            if model_hash not in restored and self.lacks(want.record):
                restored.add(model_hash)
                found.append((0, 0.0, want.record.name, want))
        for record in self._catalogue.by_hash():
            demand = self.demand(record.model_hash)
            count = self.replicas_count(record.model_hash)
            waits = f"{demand.waiting} waiting for {seconds_text(demand.oldest_wait_s)}"
            if demand.waiting and count == 0:
                found.append((1, -demand.oldest_wait_s, record.name, Want(record, demand.oldest_wait_s, waits)))
            elif count < record.min_replicas and not self._catalogue.model(record.model_hash).held_down:
                want = Want(record, 0.0, f"below its minimum of {record.min_replicas}", waits=False)
                found.append((2, 0.0, record.name, want))
            elif (
                demand.waiting
                and count < record.max_replicas
                and self._pool.coming_replicas(record.model_hash) == 0
                and demand.oldest_wait_s >= self._settings.scale_out_wait_s
            ):
                want = Want(record, demand.oldest_wait_s, f"{waits} beside {count} ready", evicts=False, grows=True)
                found.append((3, -demand.oldest_wait_s, record.name, want))
        found.sort(key=lambda entry: entry[:3])
        return [want for *_, want in found]

    def lacks(self, record: ModelRecord) -> bool:
        """Whether a model has fewer replicas than somebody needs."""
        needed = max(record.min_replicas, int(self.demand(record.model_hash).any))
        return self.replicas_count(record.model_hash) < needed

    # --------------------------------------------------------------------------------------------------------------- where

    def in_free_room(self, want: Want, claimed: set[DeviceKey]) -> Placement | None:
        """The device with enough free room that it fits best."""
        record = want.record
        model = self._catalogue.model(record.model_hash)
        devices = [device for device in self.candidates(record) if device.key not in claimed]
        free = []
        for device in devices:
            room = self._pool.room(device).free_planned_bytes - record.budget_bytes
            if room >= 0 and not self._strangers(device, record):
                waits = (
                    self._pool.room(device).free_now_bytes < record.budget_bytes or self._pool.room(device).loads_running > 0
                )
                order = (want.device not in (None, device.key), device.key == model.failed_on, waits, room, device.key)
                free.append((order, device, room))
        if not free:
            return None
        _, device, room = min(free, key=lambda entry: entry[0])
        reason = f"{want.why}; free room, {bytes_text(room)} stay free"
        return Placement(*device.key, (), reason)

    def by_eviction(self, now_s: float, want: Want, claimed: set[DeviceKey]) -> Placement | None:
        """The device where the least is lost by making room."""
        record = want.record
        model = self._catalogue.model(record.model_hash)
        devices = [device for device in self.candidates(record) if device.key not in claimed]
        evictions = []
        for device in devices:
            victims = self._victims(now_s, device, want, model)
            if victims:
                busy = sum(self.busy(now_s, victim) for victim in victims)
                latest_s = max(self._last_used_s(victim) for victim in victims)
                cost = (busy, device.key == model.failed_on, len(victims), latest_s, device.key)
                evictions.append((cost, device, victims, busy))
        if not evictions:
            return None
        _, device, victims, busy = min(evictions, key=lambda entry: entry[0])
        names = ", ".join(self._catalogue.name(victim.report.model_hash) for victim in victims)
        bound = f", over the bound of {self._settings.minority_wait_s_max:g} s" if busy else ""
        reason = f"{want.why}{bound}; {names} {'leave' if len(victims) > 1 else 'leaves'}"
        return Placement(*device.key, tuple(victim.replica for victim in victims), reason)

    def claim(self, want: Want, claimed: set[DeviceKey]) -> DeviceKey | None:
        """The device where ``want`` will most likely get its room: of those it can have, the one with the most to free."""
        possible = [
            (-(device.report.memory_bytes - self._held_bytes(device)), device.key)
            for device in self.candidates(want.record)
            if device.key not in claimed
            and self._held_bytes(device) + want.record.budget_bytes <= device.report.memory_bytes
        ]
        return min(possible)[1] if possible else None

    def _victims(self, now_s: float, device: Device, want: Want, model: Model) -> list[Replica]:
        """Who leaves ``device`` for ``want``: few, idle first, least recently used first; nobody if it were in vain."""
        leavers = [leaver for leaver in self._leavers(now_s, device) if self._may_leave(leaver, want, model)]
        if not leavers:
            return []
        need = want.record.budget_bytes - self._pool.room(device).free_planned_bytes
        strangers = self._strangers(device, want.record)
        movable = {leaver.replica.report.model_hash for leaver in leavers}
        if any(stranger not in movable for stranger in sorted(strangers)):
            return []
        leavers.sort(key=lambda leaver: (leaver.busy, leaver.last_used_s, leaver.replica.replica))
        chosen: list[Replica] = []
        for leaver in leavers:
            replica = leaver.replica
            model_hash = replica.report.model_hash
            enough = sum(r.report.budget_bytes for r in chosen) >= need
            # One model can have several replicas here, and keeps its minimum over all that leave.
            left = self._spare(model_hash) - sum(r.report.model_hash == model_hash for r in chosen)
            if left > 0 and (not enough or model_hash in strangers):
                chosen.append(replica)
        if sum(r.report.budget_bytes for r in chosen) < need:
            return []
        # A small early choice may have become needless beside a later big one: the more recently used stay.
        for replica in reversed(list(chosen)):
            freed = sum(r.report.budget_bytes for r in chosen)
            if freed - replica.report.budget_bytes >= need and replica.report.model_hash not in strangers:
                chosen.remove(replica)
        return chosen

    def _leavers(self, now_s: float, device: Device) -> list[Leaver]:
        """Ready replicas of a device that somebody could make leave, as of the last :meth:`look`."""
        known = self._leavers_on.get(device.key)
        if known is None:
            known = self._leavers_on[device.key] = [
                Leaver(
                    replica,
                    self.busy(now_s, replica),
                    self.idle_s(now_s, replica),
                    now_s - (replica.ready_s if replica.ready_s is not None else now_s),
                    self._last_used_s(replica),
                )
                for replica in self._pool.room(device).replicas
                if replica.report.state is ReplicaState.READY and not replica.dead and not self.stays(replica)
            ]
        return known

    def _may_leave(self, leaver: Leaver, want: Want, model: Model) -> bool:
        settings = self._settings
        model_hash = leaver.replica.report.model_hash
        if leaver.replica.replica in self._pool.leaving or model_hash == want.record.model_hash:
            return False
        if model.failures:
            return not leaver.busy and leaver.idle_s >= settings.failing_victim_idle_s
        swap_s = max(model.load_s or 0.0, self._catalogue.model(model_hash).load_s or 0.0)
        paid = leaver.resident_s >= max(settings.residency_s_min, swap_s)
        if not leaver.busy:
            return paid or leaver.idle_s >= settings.idle_release_s
        return paid and want.waits and want.wait_s >= settings.minority_wait_s_max

    def candidates(self, record: ModelRecord) -> list[Device]:
        """Usable devices that could hold the model if they were empty."""
        return [
            device
            for device in self._pool.devices(usable=True)
            if device.report.memory_bytes >= record.budget_bytes and _runs(device, record)
        ]

    def cannot_span(self, record: ModelRecord, devices: Sequence[Device]) -> str:
        """Why a replica cannot have exactly these devices, their room aside; empty when it can."""
        first = devices[0] if devices else None
        if first is None or len({device.key for device in devices}) != record.gpus or len(devices) != record.gpus:
            return f"{record.name} spans {record.gpus} devices, not these {len(devices)}"
        if any(device.worker is not first.worker for device in devices):
            return "a replica cannot span workers"
        if len(devices) > 1 and (not first.report.link or any(d.report.link != first.report.link for d in devices)):
            return "the devices are not linked with each other"
        if not _runs(first, record):
            return f"{first.worker.worker} does not run the engine {record.engine_type.value}"
        if not all(self._pool.usable(device) for device in devices):
            return "a device takes no new work"
        return ""

    def block_bytes(self, device: Device, leavers: Sequence[Replica]) -> int:
        """The largest block of a device that one replica can surely get once ``leavers`` have left it too."""
        room = self._pool.room(device)
        freed = [leaver.report.budget_bytes for leaver in leavers]
        free_bytes = room.free_planned_bytes + sum(freed)
        if device.report.contiguous_free_bytes is None:
            return free_bytes
        gone = sum(replica.replica in self._pool.leaving for replica in room.replicas) + len(leavers)
        if gone == len(room.replicas) and not room.promised:
            return free_bytes
        return min(free_bytes, max([room.largest_free_bytes, *freed]))

    def _strangers(self, device: Device, record: ModelRecord) -> set[ModelHash]:
        """Models there that cannot live beside ``record``, since one of the two wants its device for itself."""
        if self._catalogue.all_co_locate:
            return set()
        there = {r.report.model_hash for r in self._pool.room(device).replicas if r.replica not in self._pool.leaving}
        there.update(reservation.model_hash for reservation in self._pool.room(device).promised)
        there.discard(record.model_hash)
        return {model for model in there if not self.co_locates(record, (model,))}

    def co_locates(self, record: ModelRecord, others: Iterable[ModelHash]) -> bool:
        """Whether a model and all of ``others`` may share a device."""
        return record.allow_co_location and all(self._co_locates(other) for other in others)

    def _co_locates(self, model_hash: ModelHash) -> bool:
        record = self._catalogue.of_hash(model_hash)
        return record is None or record.allow_co_location

    # -------------------------------------------------------------------------------------------------------- small facts

    def replicas_count(self, model_hash: ModelHash) -> int:
        """Replicas that serve or will."""
        return len(self._pool.open_replicas(model_hash)) + self._pool.coming_replicas(model_hash)

    def _spare(self, model_hash: ModelHash) -> int:
        """How many open replicas a model has above its minimum."""
        record = self._catalogue.of_hash(model_hash)
        return len(self._pool.open_replicas(model_hash)) - (record.min_replicas if record is not None else 0)

    def stays(self, replica: Replica) -> bool:
        """Whether a ready replica may not be evicted by anybody: pinned, locked, or needed for its model's minimum."""
        record = self._catalogue.of_hash(replica.report.model_hash)
        return (record is not None and self.all_stay(record)) or self._pool.replica_locked(replica)

    def all_stay(self, record: ModelRecord) -> bool:
        """Whether no replica of a model may be evicted now."""
        if self._catalogue.pinned(record) or self._catalogue.locked(record.model_hash):
            return True
        return record.min_replicas > 0 and self._spare(record.model_hash) <= 0

    def _held_bytes(self, device: Device) -> int:
        """What pinned models and minimum replicas keep of a device whatever anybody wants, those on their way included.

        As of the last :meth:`look`: it is asked for every model and device.
        """
        known = self._held.get(device.key)
        if known is None:
            room = self._pool.room(device)
            known = sum(r.budget_bytes for r in room.promised if self._holds(r.model_hash))
            for replica in room.replicas:
                if not replica.dead and replica.replica not in self._pool.leaving and self._holds(replica.report.model_hash):
                    known += replica.report.budget_bytes
            self._held[device.key] = known
        return known

    def _holds(self, model_hash: ModelHash) -> bool:
        record = self._catalogue.of_hash(model_hash)
        if record is None:
            return False
        if self._catalogue.pinned(record) or self._catalogue.locked(model_hash):
            return True
        return 0 < self.replicas_count(model_hash) <= record.min_replicas

    def busy(self, now_s: float, replica: Replica) -> bool:
        """Whether a replica's model has demand, and this replica a part in it.

        The gateways' word counts, not the replica's own counters: those can be stuck (PAINS K1).
        """
        demand = self.demand(replica.report.model_hash)
        if not demand.any:
            return False
        alone = len(self._pool.open_replicas(replica.report.model_hash)) <= 1
        unused = not replica.report.running and now_s - replica.last_used_s >= self._settings.idle_release_s
        return alone or demand.waiting > 0 or not unused

    def _last_used_s(self, replica: Replica) -> float:
        return max(replica.last_used_s, self._catalogue.model(replica.report.model_hash).last_used_s)

    def idle_s(self, now_s: float, replica: Replica) -> float:
        """Since it was last used, or became ready."""
        ready_s = replica.ready_s if replica.ready_s is not None else now_s
        return now_s - max(self._last_used_s(replica), ready_s)

    def usage(self, now_s: float, replica: Replica) -> str:
        """Why it was this one that had to leave."""
        if self.busy(now_s, replica):
            return "busy, and others have waited for long"
        return f"idle for {seconds_text(self.idle_s(now_s, replica))}, least recently used"

    # ------------------------------------------------------------------------------------------------------------ outlook

    def outlook(self, now_s: float, record: ModelRecord) -> Outlook:
        """What to tell about a model."""
        model = self._catalogue.model(record.model_hash)
        if self._pool.open_replicas(record.model_hash):
            return Outlook()
        load_s = model.load_s if model.load_s is not None else describe_need(record).load_s_guess
        if self._pool.coming_replicas(record.model_hash):
            return Outlook(estimated_wait_s=self._coming_wait_s(now_s, record.model_hash, load_s))
        refusal = self._infeasible(now_s, record)
        if refusal is not None:
            return refusal
        if model.failures and model.retry_s > now_s:
            pause_s = model.retry_s - now_s
            text = f"loading failed {_times(model.failures)}, next try in {pause_s:.0f} s: {model.failure}"
            return Outlook(pause_s + load_s, text, math.ceil(pause_s))
        if model.failures and not self._may_try_again(now_s, record):
            text = f"loading failed {_times(model.failures)}, and no free room to try again: {model.failure}"
            return Outlook(load_s, text, math.ceil(self._settings.minority_wait_s_max))
        return Outlook(estimated_wait_s=load_s + self._room_wait_s(now_s, record))

    def _may_try_again(self, now_s: float, record: ModelRecord) -> bool:
        want = Want(record, 0.0, "")
        return self.in_free_room(want, set()) is not None or self.by_eviction(now_s, want, set()) is not None

    def _coming_wait_s(self, now_s: float, model_hash: ModelHash, load_s: float) -> float:
        for transaction in self._transactions.running.values():
            if transaction.record is not None and transaction.record.model_hash == model_hash:
                begun_s = transaction.load_begun_s if transaction.stage is Stage.LOADING else now_s
                return max(0.5, load_s - (now_s - begun_s))
        return load_s

    def _room_wait_s(self, now_s: float, record: ModelRecord) -> float:
        """Nothing when there is room or an idle model may leave, else the grouping bound."""
        for device in self.candidates(record):
            if self._pool.room(device).free_planned_bytes >= record.budget_bytes:
                return 0.0
            if any(
                not self.busy(now_s, replica) and not self.stays(replica) for replica in self._pool.room(device).replicas
            ):
                return 0.0
        return self._settings.minority_wait_s_max

    def _infeasible(self, now_s: float, record: ModelRecord) -> Outlook | None:
        """Why no patience helps: no worker for it, too big for every device, or the room is held by what must stay."""
        known = [device for device in self._pool.devices(usable=False) if _runs(device, record)]
        if not any(device.worker.presence is not Presence.DEAD for device in known):
            # By the clock of what could be heard: while we are paused or the bus is away, nobody's absence shows.
            since_s = self._no_worker_since_s.setdefault(record.model_hash, self._pool.heard_s)
            if self._pool.heard_s - since_s < self._settings.worker_missing_s:
                return None
            return Outlook(refusal=f"no connected worker runs the engine {record.engine_type.value}", retry_after_s=5)
        self._no_worker_since_s.pop(record.model_hash, None)
        largest_bytes = max(device.report.memory_bytes for device in known)
        if largest_bytes < record.budget_bytes:
            text = f"needs {describe_need(record).text}, largest device has {bytes_text(largest_bytes)}"
            return Outlook(refusal=text, permanent=True)
        candidates = self.candidates(record)
        blocked = [
            device for device in candidates if self._held_bytes(device) + record.budget_bytes > device.report.memory_bytes
        ]
        if not candidates or len(blocked) < len(candidates):
            return None
        holders = {
            self._catalogue.name(model_hash)
            for device in blocked
            for model_hash in self._pool.room(device).models
            if self._holds(model_hash)
        }
        text = f"no capacity, pinned: needs {describe_need(record).text}; pinned models or minimum replicas hold the room"
        return Outlook(refusal=f"{text} ({', '.join(sorted(holders))})", retry_after_s=30)


def _runs(device: Device, record: ModelRecord) -> bool:
    snapshot = device.worker.snapshot
    return snapshot is not None and record.engine_type in snapshot.engines


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
