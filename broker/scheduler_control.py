"""The verbs of ``ctl.<verb>``: what a person may ask of the scheduler and tell it.

Results are rows of plain values for tables and JSON. Columns that end in ``_bytes``, ``_s`` carry their unit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from broker.core.describe import model_state
from broker.core.placement import SchedulerCore
from broker.core.planning import Outlook
from broker.core.pool import Demand, Presence
from broker.people import People
from broker.registry_sync import RegistrySync
from subjects.errors import BusError, ConfigError
from subjects.messages import ControlReply, ControlRequest, ModelRecord

Row = dict[str, Any]


class Control:
    """Answers control requests from the core's state, and changes the registry."""

    def __init__(
        self,
        core: SchedulerCore,
        registry: RegistrySync,
        people: People,
        *,
        now_s: Callable[[], float],
        unix_offset_s: Callable[[], float],
        unload: Callable[[str], None],
    ) -> None:
        self._core = core
        self._registry = registry
        self._people = people
        self._now_s = now_s
        self._unix_offset_s = unix_offset_s
        self._unload = unload
        self._verbs: dict[str, Callable[[Row], Awaitable[Any]]] = {
            "apply": self._apply,
            "get": self._get,
            "unload": self._unload_model,
            "delete": self._delete,
            **people.verbs,
        }

    async def answer(self, verb: str, payload: ControlRequest) -> ControlReply:
        """The reply to one request; every mistake of the asker is an error with its remedy."""
        handler = self._verbs.get(verb)
        if handler is None:
            return ControlReply(error=f"unknown verb {verb!r}: use {', '.join(sorted(self._verbs))}")
        try:
            argument = msgspec.json.decode(payload.argument)
            if not isinstance(argument, dict):
                raise ConfigError("the argument must be a JSON object")
            return ControlReply(result=msgspec.json.encode(await handler(argument)))
        except (msgspec.MsgspecError, ValueError, ConfigError) as error:
            return ControlReply(error=f"{verb}: {error}")
        except BusError as error:
            return ControlReply(error=f"{verb}: the bus refused it ({error}): try again")

    # ------------------------------------------------------------------------------------------------------------- verbs

    async def _apply(self, argument: Row) -> list[Row]:
        records = msgspec.convert(argument.get("records"), list[ModelRecord])
        rows: list[Row] = []
        for record in records:
            known = self._registry.records.get(record.name)
            stored = await self._registry.apply(record)
            outlook = self._core.planner.outlook(self._now_s(), stored)
            note = "unchanged" if stored is known else outlook.refusal
            rows.append({"name": stored.name, "revision": stored.revision, "note": note})
        applied = {name for record in self._registry.records.values() for name in (record.name, *record.aliases)}
        for row, record in zip(rows, records, strict=True):
            if record.fallback and record.fallback not in applied:
                lacks = f"its fallback {record.fallback!r} is not applied"
                row["note"] = f"{row['note']}; {lacks}" if row["note"] else lacks
        return rows

    async def _unload_model(self, argument: Row) -> Row:
        record = self._people.model(argument)
        replicas = [r for r in self._core.pool.replicas_for(record.model_hash) if not r.dead]
        self._unload(record.name)
        return {"name": record.name, "replicas": len(replicas)}

    async def _delete(self, argument: Row) -> Row:
        record = self._people.model(argument)
        await self._registry.delete(record.name)
        await self._people.forget_model(record.name)
        return {"name": record.name, "deleted": True}

    async def _get(self, argument: Row) -> list[Row]:
        views = {
            "models": self._models,
            "replicas": self._replicas,
            "devices": self._devices,
            "queues": self._queues,
            "timeline": self._timeline,
            "locks": self._people.rows,
        }
        what = argument.get("what")
        if what not in views:
            raise ConfigError(f"what: {what!r} is not one of {', '.join(views)}")
        return views[what]()

    # ------------------------------------------------------------------------------------------------------------- views

    def _models(self) -> list[Row]:
        core, now_s = self._core, self._now_s()
        demand = core.pool.demand(now_s)
        rows = []
        for record in core.catalogue.by_name():
            replicas = [r for r in core.pool.replicas_for(record.model_hash) if not r.dead]
            states = {r.report.state for r in replicas}
            outlook = core.planner.outlook(now_s, record)
            asked = demand.get(record.model_hash, Demand())
            rows.append(
                {
                    "name": record.name,
                    "state": model_state(states, refused=bool(outlook.refusal)),
                    "replicas": len(core.pool.open_replicas(record.model_hash)),
                    "class": record.sla_class.value,
                    "waiting": asked.waiting,
                    "running": asked.running,
                    "budget_bytes": record.budget_bytes,
                    "note": self._note(record, outlook),
                }
            )
        return rows

    def _note(self, record: ModelRecord, outlook: Outlook) -> str:
        notes = [
            "pinned" if self._core.catalogue.pinned(record) else "",
            "random weights" if record.random_weights else "",
            outlook.refusal,
        ]
        return "; ".join(note for note in notes if note)

    def _replicas(self) -> list[Row]:
        core = self._core
        return [
            {
                "replica": replica.replica,
                "model": core.catalogue.name(replica.report.model_hash),
                "worker": replica.worker,
                "device": replica.report.device,
                "state": "dead" if replica.dead else replica.report.state.value,
                "running": replica.report.running,
                "slots": replica.report.slots,
                "kv_pages_free": replica.report.kv_pages_free,
                "budget_bytes": replica.report.budget_bytes,
                "memory_bytes": replica.report.memory_bytes,
                "note": replica.report.failure,
            }
            for replica in sorted(core.pool.replicas.values(), key=lambda r: r.replica)
        ]

    def _devices(self) -> list[Row]:
        core = self._core
        return [
            {
                "worker": device.worker.worker,
                "device": device.report.device,
                "kind": device.report.kind.value,
                "state": device.worker.presence.value,
                "capacity_bytes": device.report.memory_bytes,
                "charged_bytes": core.pool.room(device).charged_bytes,
                "used_bytes": device.report.used_bytes,
                "models": sorted(core.catalogue.name(model) for model in core.pool.room(device).models),
            }
            for device in core.pool.devices(usable=False)
            if device.worker.presence is not Presence.DEAD
        ]

    def _queues(self) -> list[Row]:
        core, now_s = self._core, self._now_s()
        return [
            {
                "model": core.catalogue.name(model_hash),
                "waiting": demand.waiting,
                "running": demand.running,
                "oldest_wait_s": round(demand.oldest_wait_s, 3),
                "estimated_wait_s": self._estimate(now_s, record),
            }
            for model_hash, demand in sorted(core.pool.demand(now_s).items())
            if (record := core.catalogue.of_hash(model_hash)) is not None
        ]

    def _estimate(self, now_s: float, record: ModelRecord) -> float:
        return round(self._core.planner.outlook(now_s, record).estimated_wait_s, 1)

    def _timeline(self) -> list[Row]:
        entries = self._core.digests.timeline(self._unix_offset_s())
        rows: list[Row] = msgspec.to_builtins(entries)
        return list(rows)
