"""The verbs of ``ctl.<verb>``: what a person may ask of the scheduler and tell it.

An explanation is of a model by its name or alias or an adapter's, a transaction, one of its operations, a replica, or a
request, in this order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import structlog

from broker.core.pool.events import ProfileAsked, SchedulerEvent, UnloadRequested
from broker.core.pool.journal import TransactionLog
from broker.core.pool.state import Demand, Device, Presence
from broker.core.scheduler import SchedulerCore
from broker.scheduler.explain import explain_model, explain_transaction, living, state_of
from broker.scheduler.kv_control import KvControl
from broker.scheduler.operator_verbs import People, adapter_base
from broker.scheduler.registry_sync import RegistrySync
from broker.scheduler.twu import DeviceTwu
from broker.scheduler.verbs import Apply, OfModel, ProfileOf, Row, Verbs, What, asked
from profiles.deployment import sharers, with_deployment
from subjects import names
from subjects.bus import Bus
from subjects.codec import decode
from subjects.errors import BusError, ConfigError, DecodeError, NoResponders, RequestTimeout, place_of
from subjects.ids import IngressId, ReplicaId, RequestId, base_name, is_token
from subjects.messages import ControlReply, ControlRequest, EngineType, Mode, ModelRecord, RequestStory

ASK_GATEWAY_S_MAX = 2.0

log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class Control:
    """Answers control requests from the core's state, and changes the registry."""

    _bus: Bus
    _core: SchedulerCore
    _registry: RegistrySync
    _people: People
    _kv: KvControl
    _transactions: TransactionLog
    _twu: DeviceTwu
    step: Callable[[SchedulerEvent], None]

    @property
    def _verbs(self) -> Verbs:
        return {
            "apply": (Apply, self._apply),
            "get": (What, self._get),
            "unload": (OfModel, self._unload_model),
            "delete": (OfModel, self._delete),
            "explain": (What, self._explain),
            "profile": (ProfileOf, self._profile),
            **self._people.verbs,
            **self._kv.verbs,
        }

    async def answer(self, verb: str, payload: ControlRequest) -> ControlReply:
        """The reply to one request; every mistake of the asker is an error with its remedy."""
        verbs = self._verbs
        if verb not in verbs:
            return ControlReply(error=f"unknown verb {verb!r}: use {', '.join(sorted(verbs))}")
        try:
            kind, handler = verbs[verb]
            return ControlReply(result=msgspec.json.encode(await handler(asked(kind, payload.argument))))
        except (msgspec.MsgspecError, ValueError, ConfigError) as error:
            return ControlReply(error=f"{verb}: {error}")
        except BusError as error:
            return ControlReply(error=f"{verb}: the bus refused it ({error}): try again")
        except Exception as error:
            log.error("a control request failed", verb=verb, error=place_of(error))
            return ControlReply(error=f"{verb}: failed inside the scheduler ({type(error).__name__}); its log says where")

    # ------------------------------------------------------------------------------------------------------------- verbs

    async def _apply(self, argument: Apply) -> list[Row]:
        records = [with_deployment(record) for record in argument.records]
        rows: list[Row] = []
        for record in records:
            known = self._registry.records.get(record.name)
            stored = await self._registry.apply(record)
            note = "unchanged" if stored is known else "; ".join(self._refusal(stored))
            rows.append({"name": stored.name, "revision": stored.revision, "note": note})
        for row, record in zip(rows, records, strict=True):
            row["note"] = "; ".join(filter(None, (row["note"], *self._name_notes(record))))
        return rows

    def _name_notes(self, record: ModelRecord) -> Iterator[str]:
        """Whose replicas it shares, and what a name in it does not do: gateways decide by that order (``ModelTable``)."""
        known = self._registry.records
        if shared := sharers(record, known.values()):
            yield f"shares replicas with {', '.join(shared)}"
        fallback = record.fallback
        if fallback and fallback not in self._names() and adapter_base(known, fallback) is None:
            yield f"its fallback {fallback!r} is not applied"
        for adapter in record.adapters:
            winner = known.get(adapter.name) or adapter_base(known, adapter.name)
            if winner is not None and winner.name != record.name:
                yield f"its adapter {adapter.name!r} is hidden by {winner.name!r}"

    def _names(self) -> set[str]:
        return {name for record in self._registry.records.values() for name in (record.name, *record.aliases)}

    async def _unload_model(self, argument: OfModel) -> Row:
        record = self._people.model(argument.model)
        replicas = len(living(self._core, record))
        self.step(UnloadRequested(record.name))
        return {"name": record.name, "replicas": replicas}

    async def _delete(self, argument: OfModel) -> Row:
        record = self._people.model(argument.model)
        await self._registry.delete(record.name)
        await self._people.forget_model(record.name)
        return {"name": record.name, "deleted": True}

    async def _explain(self, argument: What) -> Row:
        what = argument.what
        now_s, unix_s = time.monotonic(), time.time()
        if what not in self._names() and (base := adapter_base(self._registry.records, what)) is not None:
            what = base.name
        record = self._people.model(what) if what in self._names() else None
        if record is None and (transaction := self._transactions.find(what)) is not None:
            return {"explains": "transaction", **explain_transaction(self._core, transaction, now_s, unix_s)}
        if record is None and (replica := self._core.pool.replicas.get(ReplicaId(what))) is not None:
            record = self._core.catalogue.of_deployment(replica.report.deployment)
        if record is not None:
            return {"explains": "model", **explain_model(self._core, self._transactions, record, now_s, unix_s)}
        story = await self._story(what)
        told = {"explains": "request", **msgspec.to_builtins(story)}
        if story.state == "waiting" and (waits := self._registry.records.get(story.model)) is not None:
            about = explain_model(self._core, self._transactions, waits, now_s, unix_s)
            told["model_state"], told["waits_for"] = about["state"], [*about["waits_for"], *about["why"]]
        return told

    async def _profile(self, argument: ProfileOf) -> Row:
        """Wants whole curves of a model for the next few seconds, so that one who asks no more leaves nothing behind."""
        record = self._people.model(argument.model)
        if record.engine_type is not EngineType.VLLM:
            raise ConfigError(
                f"model: {record.name} runs on {record.engine_type.value}, which takes no time of a device here"
            )
        if argument.for_s and not self._core.pool.open_replicas(record.deployment):
            raise ConfigError(f"model: no replica of {record.name} is ready: send it a request first, then run this again")
        self.step(ProfileAsked(record.deployment, argument.for_s, argument.batch_max))
        return {"model": record.name, "rows": self._costs_of(record)}

    async def _story(self, request: str) -> RequestStory:
        """What the gateway in the request's id knows of it."""
        request = request.removeprefix("chatcmpl-").removeprefix("cmpl-")
        ingress = base_name(request)
        unknown = f"what: {request!r} is no model, transaction, operation or replica that is known here"
        if not is_token(ingress):
            raise ConfigError(f"{unknown}, and no request id")
        try:
            payload = await self._bus.request(names.why(IngressId(ingress)), request.encode(), timeout_s=ASK_GATEWAY_S_MAX)
            story = decode(payload, RequestStory)
        except NoResponders:
            raise ConfigError(f"{unknown}, and no gateway {ingress!r} runs that could know a request") from None
        except RequestTimeout:
            raise ConfigError(f"what: the gateway {ingress!r} does not answer: try again") from None
        except DecodeError as error:
            raise ConfigError(f"what: the gateway {ingress!r} gave no answer that can be read ({error})") from None
        if not story.known:
            raise ConfigError(f"what: the gateway {ingress!r} does not know {RequestId(request)!r} (any more)")
        return story

    async def _get(self, argument: What) -> list[Row]:
        views = {
            "models": self._models,
            "replicas": self._replicas,
            "devices": self._devices,
            "queues": self._queues,
            "timeline": self._timeline,
            "locks": self._people.rows,
            "events": self._people.events,
            "kv": self._kv.rows,
            "costs": self._costs,
        }
        if argument.what not in views:
            raise ConfigError(f"what: {argument.what!r} is not one of {', '.join(views)}")
        return views[argument.what]()

    # ------------------------------------------------------------------------------------------------------------- views

    def _models(self) -> list[Row]:
        core = self._core
        demand = core.pool.inflow.demand(time.monotonic())
        return [
            {
                "name": record.name,
                "state": state_of(core, record),
                "replicas": len(core.pool.open_replicas(record.deployment)),
                "class": record.sla_class.value,
                "waiting": (asked := demand.get(record.deployment, Demand())).waiting,
                "running": asked.running,
                "budget_bytes": record.budget_bytes,
                "deployment": record.deployment[:16],
                "note": self._note(record),
            }
            for record in core.catalogue.by_name
        ]

    def _note(self, record: ModelRecord) -> str:
        catalogue = self._core.catalogue
        mode = catalogue.mode(record.deployment)
        notes = [
            "locked" if catalogue.locked(record.deployment) else "",
            f"mode {mode.value}" if mode is not Mode.ACT else "",
            "pinned" if catalogue.pinned(record) else "",
            "random weights" if record.random_weights else "",
            *self._refusal(record),
        ]
        return "; ".join(filter(None, notes))

    def _refusal(self, record: ModelRecord) -> list[str]:
        """Why requests are refused, if they are; and what the last load said, which clients are not told."""
        refusal = self._core.digests.told(record).refusal
        failure = self._core.catalogue.model(record.deployment).failure
        return [refusal, *([f"its last load failed: {failure}"] if failure else [])] if refusal else []

    def _replicas(self) -> list[Row]:
        core = self._core
        return [
            {
                "replica": replica.replica,
                "model": core.catalogue.name(replica.report.deployment),
                "worker": replica.worker,
                "device": replica.report.device,
                "state": "dead" if replica.dead else replica.report.state.value,
                "running": replica.report.running,
                "slots": replica.report.slots,
                "kv_pages_free": replica.report.kv_pages_free,
                "budget_bytes": replica.report.budget_bytes,
                "memory_bytes": replica.report.memory_bytes,
                "deployment": replica.report.deployment[:16],
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
                "type": device.report.device_type,
                "state": device.worker.presence.value,
                "capacity_bytes": device.report.memory_bytes,
                "charged_bytes": core.pool.room(device).charged_bytes,
                "used_bytes": device.report.used_bytes,
                "models": sorted(core.catalogue.name(model) for model in core.pool.room(device).models),
                "twu": (twu := self._twu.of(device))[0],
                "note": self._device_note(device, twu[1]),
            }
            for device in core.pool.devices(usable=False)
            if device.worker.presence is not Presence.DEAD
        ]

    def _device_note(self, device: Device, use: str) -> str:
        pool, key = self._core.pool, device.key
        notes = [use, "drained" if pool.is_closed(*key) else "", "locked" if pool.device_locked(*key) else ""]
        return "; ".join(filter(None, notes))

    def _queues(self) -> list[Row]:
        core, now_s = self._core, time.monotonic()
        return [
            {
                "model": core.catalogue.name(deployment),
                "waiting": demand.waiting,
                "running": demand.running,
                "oldest_wait_s": round(demand.oldest_wait_s, 3),
                "estimated_wait_s": round(self._core.digests.told(record).estimated_wait_s, 1),
            }
            for deployment, demand in sorted(core.pool.inflow.demand(now_s).items())
            if (record := core.catalogue.of_deployment(deployment)) is not None
        ]

    def _costs(self) -> list[Row]:
        return [row for record in self._core.catalogue.by_name for row in self._costs_of(record)]

    def _costs_of(self, record: ModelRecord) -> list[Row]:
        unix_s = time.time()
        return [
            {
                "model": row.model,
                "kind": row.device_type,
                "source": row.source.value,
                "age_s": round(max(0.0, unix_s - kept.at_unix_s), 1) if kept is not None else None,
                "measured_unix_s": kept.at_unix_s if kept is not None else 0.0,
                "points": len(row.points),
                "whole": kept is not None and kept.whole,
                "engine": kept.engine if kept is not None else "",
                "correction": round(row.account.correction, 3),
                "error": round(row.error, 4) if row.error == row.error else None,
                "steps": row.account.window_steps,
                "deviates": row.account.deviates,
                "costs": msgspec.to_builtins(row.costs),
                "measured": msgspec.to_builtins(row.points),
            }
            for row in self._core.costs.rows(record)
            for kept in (row.account.kept,)
        ]

    def _timeline(self) -> list[Row]:
        return list(msgspec.to_builtins(self._core.digests.timeline(time.time() - time.monotonic())))
