"""The verbs by which people overrule the scheduler: lock, unlock, drain, mode, pin, unpin, and tell it of load that comes:
declare, withdraw (SCH-5, SCH-9, SCH-11).

What they say is kept as :class:`subjects.messages.Overrides`, but for the drain of one replica, which is an act and not a
state. Each verb names exactly one thing: a model, a device, a worker or a replica.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from broker.core.pool.events import DrainRequested, SchedulerEvent
from broker.core.pool.overrides import PINNED, UNPINNED, device_name, with_override, without
from broker.core.pool.state import Presence
from broker.core.scheduler import SchedulerCore
from broker.scheduler.overrides_sync import OverridesSync
from broker.scheduler.registry_sync import RegistrySync
from broker.scheduler.verbs import Declare, Named, OfModel, Row, SetMode, Verbs, Withdraw
from subjects.errors import ConfigError
from subjects.ids import DeviceId, ReplicaId, WorkerId, base_name
from subjects.messages import DeclaredLoad, Mode, ModelRecord, Override, OverrideKind, Overrides

REPLICA_LOCK_KEPT_S = 3600.0
"""The lock of a replica that is gone is forgotten after this time, at the next change."""
EVENT_KEPT_S = 24 * 3600.0
"""An event that is over is forgotten after this time, at the next change."""
KINDS = {"model": OverrideKind.MODEL_LOCK, "device": OverrideKind.DEVICE_LOCK, "replica": OverrideKind.REPLICA_LOCK}
"""Locks by what they are of."""
UNLOCKED = {
    "model": (OverrideKind.MODEL_LOCK,),
    "device": (OverrideKind.DEVICE_LOCK, OverrideKind.DEVICE_DRAIN),
    "replica": (OverrideKind.REPLICA_LOCK,),
    "worker": (OverrideKind.WORKER_DRAIN,),
}
"""What an unlock takes back."""


@dataclass(eq=False, slots=True)
class People:
    """Answers those verbs."""

    _core: SchedulerCore
    _registry: RegistrySync
    _overrides: OverridesSync
    step: Callable[[SchedulerEvent], None]

    @property
    def verbs(self) -> Verbs:
        """Those verbs."""
        return {
            "lock": (Named, self._lock),
            "unlock": (Named, self._unlock),
            "drain": (Named, self._drain),
            "mode": (SetMode, self._mode),
            "pin": (OfModel, lambda argument: self._pin(argument, PINNED)),
            "unpin": (OfModel, lambda argument: self._pin(argument, UNPINNED)),
            "declare": (Declare, self._declare),
            "withdraw": (Withdraw, self._withdraw),
        }

    async def _lock(self, argument: Named) -> Row:
        what, name = self._named(argument, tuple(KINDS))
        return {what: name, "locked": True, "changed": await self._set(KINDS[what], name)}

    async def _unlock(self, argument: Named) -> Row:
        what, name = self._named(argument, tuple(UNLOCKED), must_exist=False)
        return {what: name, "locked": False, "changed": await self._take_back(name, *UNLOCKED[what])}

    async def _drain(self, argument: Named) -> Row:
        what, name = self._named(argument, ("replica", "device", "worker"))
        if what == "replica":
            replica = self._core.pool.replicas[ReplicaId(name)]
            self.step(DrainRequested(replica.replica, bound_s=argument.bound_s))
            return {"replica": name, "replicas": 1, "running": replica.report.running, "changed": True}
        kind = OverrideKind.DEVICE_DRAIN if what == "device" else OverrideKind.WORKER_DRAIN
        # Counted before it is told: the first may be gone before the words are stored.
        leaving = [
            replica
            for replica in self._core.pool.replicas.values()
            if not replica.dead
            and name in (base_name(replica.worker), device_name(base_name(replica.worker), replica.report.device))
        ]
        running = sum(replica.report.running for replica in leaving)
        changed = await self._set(kind, name, bound_s=argument.bound_s)
        return {what: name, "replicas": len(leaving), "running": running, "changed": changed}

    async def _mode(self, argument: SetMode) -> Row:
        record, mode = self.model(argument.model), argument.mode
        known = [*(one.value for one in Mode), "default"]
        if mode not in known:
            raise ConfigError(f"mode: {mode!r} is not one of {', '.join(known)}")
        if mode == "default":
            changed = await self._take_back(record.name, OverrideKind.MODE)
            return {"model": record.name, "mode": record.mode.value, "changed": changed}
        return {"model": record.name, "mode": mode, "changed": await self._set(OverrideKind.MODE, record.name, value=mode)}

    async def _pin(self, argument: OfModel, value: str) -> Row:
        record = self.model(argument.model)
        await self._set(OverrideKind.PIN, record.name, value=value)
        return {"name": record.name, "pinned": value == PINNED}

    async def _declare(self, argument: Declare) -> Row:
        model = self.model(argument.model).name if argument.model else ""
        if argument.end_unix_s <= max(argument.begin_unix_s, time.time()):
            raise ConfigError("end: the event must end after it begins, and later than now")
        if argument.factor == 1.0 and not argument.at_least:
            raise ConfigError("factor: say how many times the load is meant (or at_least, in devices)")
        load = msgspec.convert(msgspec.structs.asdict(argument) | {"model": model}, DeclaredLoad)
        changed = await self._set(OverrideKind.EVENT, argument.name, load=load)
        return {"event": argument.name, "model": model, "changed": changed}

    async def _withdraw(self, argument: Withdraw) -> Row:
        changed = await self._take_back(argument.name, OverrideKind.EVENT)
        return {"event": argument.name, "changed": changed}

    async def forget_model(self, name: str) -> None:
        """What was said about a model that is deleted goes with it.

        Raises:
            BusError: it may still be known; asking again is safe.
        """
        await self._take_back(name, OverrideKind.PIN, OverrideKind.MODE, OverrideKind.MODEL_LOCK)

    def rows(self) -> list[Row]:
        """All that people have said, for ``carpool get locks``."""
        return [
            {
                "kind": entry.kind.value,
                "about": entry.about,
                "value": entry.value,
                "bound_s": entry.bound_s,
                "since_unix_s": entry.at_unix_s,
            }
            for entry in self._overrides.known.entries
            if entry.kind is not OverrideKind.EVENT
        ]

    def events(self) -> list[Row]:
        """Load that people have declared, for ``carpool event list``."""
        return [
            {"event": entry.about, "model": entry.load.model, **msgspec.structs.asdict(entry.load)}
            for entry in self._overrides.known.entries
            if entry.load is not None
        ]

    async def _set(
        self,
        kind: OverrideKind,
        about: str,
        *,
        value: str = "",
        bound_s: float | None = None,
        load: DeclaredLoad | None = None,
    ) -> bool:
        override = Override(kind=kind, about=about, value=value, bound_s=bound_s, load=load, at_unix_s=time.time())
        return await self._overrides.change(lambda known: with_override(self._pruned(known), override))

    async def _take_back(self, name: str, *kinds: OverrideKind) -> bool:
        return await self._overrides.change(lambda known: without(known, [(kind.value, name) for kind in kinds]))

    def _pruned(self, known: Overrides) -> Overrides:
        """Without locks of replicas that are gone for long (an incarnation is never reused), and without past events."""
        unix_s, replicas = time.time(), self._core.pool.replicas
        over = [
            (entry.kind.value, entry.about)
            for entry in known.entries
            if (
                entry.kind is OverrideKind.REPLICA_LOCK
                and ReplicaId(entry.about) not in replicas
                and unix_s - entry.at_unix_s > REPLICA_LOCK_KEPT_S
            )
            or (entry.load is not None and unix_s - entry.load.end_unix_s > EVENT_KEPT_S)
        ]
        return without(known, over)

    def model(self, name: str) -> ModelRecord:
        """The record of a model by its name or an alias.

        Raises:
            ConfigError: nobody applied it.
        """
        records = self._registry.records
        if (record := records.get(name)) is None:
            record = next((records[one] for one in sorted(records) if name in records[one].aliases), None)
        if record is None and (base := adapter_base(records, name)) is not None:
            raise ConfigError(
                f"model: {name!r} is an adapter of {base.name!r}; name that model, or change its spec.adapters"
            )
        if record is None:
            known = ", ".join(sorted(records)) or "none"
            raise ConfigError(f"model: {name!r} is not applied; known models: {known}")
        return record

    def _named(self, argument: Named, kinds: tuple[str, ...], *, must_exist: bool = True) -> tuple[str, str]:
        """The one thing that the argument names, by its full name."""
        given = [(kind, name) for kind in kinds if (name := getattr(argument, kind)) is not None]
        if len(given) != 1:
            raise ConfigError(f"name exactly one of {', '.join(kinds)}")
        what, name = given[0]
        match what:
            case "model":
                return what, self.model(name).name
            case "device":
                return what, self._device(name, must_exist=must_exist)
            case "worker":
                return what, self._worker(name, must_exist=must_exist)
            case _:
                if must_exist and ReplicaId(name) not in self._core.pool.replicas:
                    raise ConfigError(f"replica: {name!r} is not known; see `carpool get replicas`")
                return what, name

    def _worker(self, name: str, *, must_exist: bool) -> str:
        """A worker's name without its incarnation; given with or without it."""
        workers = [worker for worker in self._core.pool.workers.values() if worker.presence is not Presence.DEAD]
        known = {base_name(worker.worker) for worker in workers}
        if any(worker.worker == name for worker in workers):
            return base_name(name)
        if must_exist and name not in known:
            raise ConfigError(f"worker: {name!r} is not known; known workers: {', '.join(sorted(known)) or 'none'}")
        return name

    def _device(self, name: str, *, must_exist: bool) -> str:
        """``<worker>/<device>``; the device alone where only one worker has one of that name."""
        worker, slash, device = name.rpartition("/")
        devices = [one for one in self._core.pool.devices(usable=False) if one.worker.presence is not Presence.DEAD]
        known = sorted({device_name(base_name(one.worker.worker), one.report.device) for one in devices})
        if slash:
            worker = base_name(worker) if WorkerId(worker) in self._core.pool.workers else worker
            full = device_name(worker, DeviceId(device))
        else:
            matches = [one for one in known if one.endswith(f"/{name}")]
            full = matches[0] if len(matches) == 1 else name
        if full not in known and (must_exist or not slash):
            raise ConfigError(f"device: {name!r} is not known, or not alone; known devices: {', '.join(known) or 'none'}")
        return full


def adapter_base(records: Mapping[str, ModelRecord], name: str) -> ModelRecord | None:
    """The first model, by name, that has an adapter of this name or alias."""
    for one in sorted(records):
        if any(name == adapter.name or name in adapter.aliases for adapter in records[one].adapters):
            return records[one]
    return None
