"""The verbs about KV outside engines: ``evict-kv`` and ``migrate-kv`` (SCH-8), and the rows of ``carpool get kv``.

Both verbs answer as soon as their transactions are begun, one per worker's KV node; ``explain`` of a transaction tells how
it goes on and what was done. What is asked twice while the leader changes is done once: the worker knows the operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from broker.core.pool.events import KvOrdered, SchedulerEvent
from broker.core.pool.state import Presence, Worker
from broker.core.scheduler import SchedulerCore
from broker.scheduler.operator_verbs import People
from broker.scheduler.verbs import EvictKvOf, MigrateKvOf, Row, Verbs
from subjects.errors import ConfigError
from subjects.ids import ReplicaId, WorkerId, base_name
from subjects.messages import KvOrder, KvReport, KvTier, KvTierReport, ModelRecord

EVICT_S = 60.0
"""How long a node may take to drop what it was told to."""


@dataclass(eq=False, slots=True)
class KvControl:
    """Answers those verbs."""

    _core: SchedulerCore
    _people: People
    step: Callable[[SchedulerEvent], None]

    @property
    def verbs(self) -> Verbs:
        """Those verbs."""
        return {"evict-kv": (EvictKvOf, self._evict), "migrate-kv": (MigrateKvOf, self._migrate)}

    async def _evict(self, argument: EvictKvOf) -> Row:
        record = self._with_kv(argument.model)
        workers = [self._node(argument.worker, "worker")] if argument.worker else self._nodes()
        if not workers:
            raise ConfigError("no worker has a KV node that runs; see `carpool get kv`")
        order = KvOrder(kv_signature=record.kv_signature, ratio=argument.ratio, timeout_s=EVICT_S)
        return self._begun(record, workers, order) | {"ratio": argument.ratio}

    async def _migrate(self, argument: MigrateKvOf) -> Row:
        """``source`` and ``target`` are workers, or replicas, which stand for theirs."""
        record = self._with_kv(argument.model)
        if not record.kv_reuse:
            raise ConfigError(f"model: {record.name!r} keeps no KV (its spec.kv.reuse is false)")
        source, target = self._node(argument.source, "source"), self._node(argument.target, "target")
        if source is target:
            raise ConfigError(f"target: {base_name(target.worker)!r} is the source too; name two workers")
        order = KvOrder(kv_signature=record.kv_signature, source=source.worker, timeout_s=argument.timeout_s)
        return self._begun(record, [target], order) | {"source": source.worker, "target": target.worker}

    def _begun(self, record: ModelRecord, workers: list[Worker], order: KvOrder) -> Row:
        known = set(self._core.transactions.running)
        for worker in workers:
            self.step(KvOrdered(worker.worker, record.deployment, order))
        begun = [
            {"transaction": transaction.name, "worker": transaction.worker}
            for number, transaction in self._core.transactions.running.items()
            if number not in known and transaction.kv is order
        ]
        if not begun:
            raise ConfigError("this scheduler leads no more: try again")
        return {"model": record.name, "transactions": begun}

    def _with_kv(self, model: str) -> ModelRecord:
        record = self._people.model(model)
        if not record.kv_signature:
            raise ConfigError(
                f"model: the KV of {record.name!r} is at {record.engine_type.value}'s server, not in this pool"
            )
        return record

    def _nodes(self) -> list[Worker]:
        """Workers whose node runs, by name."""
        found = [worker for worker in self._living() if (report := _report(worker)) is not None and report.running]
        return sorted(found, key=lambda worker: worker.worker)

    def _living(self) -> list[Worker]:
        return [worker for worker in self._core.pool.workers.values() if worker.presence is not Presence.DEAD]

    def _node(self, name: str, what: str) -> Worker:
        """The worker of this name, with or without its incarnation, or that of this replica, if its node runs."""
        replica = self._core.pool.replicas.get(ReplicaId(name))
        wanted = replica.worker if replica is not None else WorkerId(name)
        living = self._living()
        matches = [worker for worker in living if wanted in (worker.worker, base_name(worker.worker))]
        if not matches:
            known = ", ".join(sorted({base_name(worker.worker) for worker in living})) or "none"
            raise ConfigError(f"{what}: {name!r} is no worker or replica that is known; known workers: {known}")
        if len(matches) > 1:
            ids = ", ".join(sorted(worker.worker for worker in matches))
            raise ConfigError(f"{what}: several workers are named {name!r}; give one of {ids}")
        if (report := _report(matches[0])) is None:
            raise ConfigError(f"{what}: worker {name!r} keeps no KV outside its engines (it was started with --no-kv)")
        if not report.running:
            raise ConfigError(f"{what}: the KV node of {name!r} does not run ({report.note}); try again in a moment")
        return matches[0]

    def rows(self) -> list[Row]:
        """One row per worker and tier, as the agents last told it."""
        names: dict[str, str] = {}
        for record in self._core.catalogue.by_name:
            names.setdefault(record.kv_signature, record.name)
        return [
            _row(worker, report, tier, names)
            for worker in sorted(self._living(), key=lambda one: one.worker)
            if (report := _report(worker)) is not None
            for tier in report.tiers or (KvTierReport(tier=KvTier.HOST),)
        ]


def _report(worker: Worker) -> KvReport | None:
    return worker.snapshot.kv if worker.snapshot is not None else None


def _row(worker: Worker, report: KvReport, tier: KvTierReport, names: dict[str, str]) -> Row:
    host = tier.tier is KvTier.HOST
    held = [
        (one, *((one.host_blocks, one.host_bytes) if host else (one.disk_blocks, one.disk_bytes))) for one in report.models
    ]
    models = [
        {"model": names.get(model.kv_signature, model.kv_signature), "blocks": blocks, "bytes": used_bytes}
        for model, blocks, used_bytes in held
        if blocks
    ]
    asked = report.hits + report.misses
    # What is counted for the whole node stands in its first row, so that a sum over rows is right.
    first = tier is report.tiers[0] if report.tiers else True
    return {
        "worker": worker.worker,
        "tier": tier.tier.value,
        "used_bytes": tier.used_bytes,
        "limit_bytes": tier.limit_bytes,
        "blocks": tier.blocks,
        "models": models,
        "hits": report.hits if first else None,
        "misses": report.misses if first else None,
        "hit_ratio": round(report.hits / asked, 3) if first and asked else None,
        "corrupt": report.corrupt if first else None,
        "refused": report.refused if first else None,
        "write_left_bytes": None if host else report.write_bytes_left,
        "redis": report.redis if first else "",
        "address": report.address if first else "",
        "note": report.note if report.running else f"does not run: {report.note}",
    }
