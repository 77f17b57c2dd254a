"""What the KV nodes of the pool tell of each model, added up (OPS-2): for metrics, never for decisions."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from subjects.ids import WorkerId
from subjects.messages import KvModelReport, KvReport, PoolKv


class _Told(msgspec.Struct, frozen=True):
    """The last report of a worker's node, and how fast it evicts."""

    at_s: float
    report: KvReport
    models: dict[str, KvModelReport]
    evictions_per_s: dict[str, float]


class KvTiers:
    """By worker; sums are made when somebody asks for them, and kept until another report comes."""

    def __init__(self) -> None:
        self._told: dict[WorkerId, _Told] = {}
        self._sums: dict[str, PoolKv | None] = {}

    def take(self, now_s: float, worker: WorkerId, report: KvReport | None) -> None:
        """A worker's report. Counts that went down are those of a new node, which began at nothing."""
        known = self._told.get(worker)
        if report is None or not report.running:
            if known is not None:
                self.forget(worker)
            return
        if known is not None and known.report == report:
            # Nothing was counted for a whole report: whatever was evicted before, nothing is now.
            self._told[worker] = replace(known, at_s=now_s, evictions_per_s={})
            self._sums.clear()
            return
        models = {model.kv_signature: model for model in report.models}
        rates: dict[str, float] = {}
        for signature, model in models.items():
            before = known.models.get(signature) if known is not None else None
            if known is not None and before is not None and now_s > known.at_s and model.evicted > before.evicted:
                rates[signature] = (model.evicted - before.evicted) / (now_s - known.at_s)
        self._told[worker] = _Told(now_s, report, models, rates)
        self._sums.clear()

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone, and what it had with it."""
        if self._told.pop(worker, None) is not None:
            self._sums.clear()

    def of(self, kv_signature: str) -> PoolKv | None:
        """All nodes' word on one model's KV; None where none has or had any."""
        if not self._told or not kv_signature:
            return None
        if kv_signature not in self._sums:
            self._sums[kv_signature] = self._sum(kv_signature)
        return self._sums[kv_signature]

    def _sum(self, kv_signature: str) -> PoolKv | None:
        found = [(one, one.models[kv_signature]) for one in self._told.values() if kv_signature in one.models]
        if not found:
            return None
        return PoolKv(
            host_bytes=sum(model.host_bytes for _, model in found),
            disk_bytes=sum(model.disk_bytes for _, model in found),
            hits=sum(model.hits for _, model in found),
            misses=sum(model.misses for _, model in found),
            evictions_per_s=round(sum(one.evictions_per_s.get(kv_signature, 0.0) for one, _ in found), 3),
        )
