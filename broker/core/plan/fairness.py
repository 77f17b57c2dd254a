"""Which classes are served below their due, and the class weights that follow (SCH-7).

Fed with what gateways count anyway (``ModelDemand``). Per model and class it keeps throughput, what was asked for, and the
last times to a first token. Every 200 ms it reads the fairness index; after three readings in a row below the level a class
is boosted, unless a higher one is below it too: value goes first. Weights also answer to compute density, so a class of long
prompts does not crowd out others (``priorities``).

For the scheduler: ``take`` on each ``IngressReported``, ``look`` on each tick, ``weights(model)`` into
``PoolModel.class_weights`` of the digest (empty while a replica's own weights will do). ``indexes`` is for export.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from broker.core.plan import tunables as t
from broker.core.plan.priorities import Boosts, class_weights, densities
from broker.core.plan.series import Ring
from broker.core.plan.signals import fairness_index
from broker.core.plan.windows import FairnessWatch
from profiles.costs import prefill_s
from subjects.ids import DeploymentKey
from subjects.messages import ModelDemand, ModelRecord, SlaClass


@dataclass(frozen=True, slots=True)
class FairnessSettings:
    """When it acts."""

    models_max: int = t.KEPT_MAX


@dataclass(slots=True)
class _Class:
    """Counts fade with ``memory_s``."""

    arrived: float = 0.0
    finished: float = 0.0
    work: float = 0.0
    ttft_s: Ring = field(default_factory=lambda: Ring(t.FAIR_SAMPLES))
    waiting: int = 0
    oldest_wait_s: float = 0.0
    index: float | None = None


@dataclass(slots=True)
class _Model:
    classes: dict[SlaClass, _Class] = field(default_factory=dict)
    boosts: Boosts = field(default_factory=Boosts)
    weights: dict[str, int] = field(default_factory=dict)


class Fairness:
    """Of all models. One thread; bounded."""

    def __init__(self, settings: FairnessSettings | None = None) -> None:
        self.settings = settings or FairnessSettings()
        self.news = False
        """Whether the last look changed a weight."""
        self._models: dict[DeploymentKey, _Model] = {}
        self._watch = FairnessWatch(t.FAIR_LEVEL)
        self._faded_s: float | None = None
        self._read_s = self._alone_read_s = -math.inf

    def take(self, demand: Iterable[ModelDemand], records: Mapping[DeploymentKey, ModelRecord]) -> None:
        """One gateway's counts. Rows of models without a record are left out, and so is batch: it has no target, and those
        that have missed theirs wait there (ops/decisions/0009)."""
        for row in demand:
            record = records.get(row.deployment)
            if record is None or row.sla_class is SlaClass.BATCH:
                continue
            counts = self._class_of(row)
            counts.arrived += row.arrived
            counts.finished += row.finished
            counts.work += _work(record, row)
            counts.waiting += row.waiting
            counts.oldest_wait_s = max(counts.oldest_wait_s, row.oldest_wait_s)
            if row.finished:
                # A row is a tenth of a second of one lane, so its mean is nearly a single request's time.
                counts.ttft_s.add(row.ttft_s_sum / row.finished)

    def look(self, now_s: float, records: Mapping[DeploymentKey, ModelRecord]) -> None:
        """Reads all indexes if a reading is due, and works out the weights of models that more than one class asks for."""
        if now_s - self._read_s < t.READING_S * 0.95:
            return
        self._read_s = now_s
        self._fade(now_s)
        for deployment in [known for known in self._models if known not in records]:
            del self._models[deployment]
        self.news = False
        alone_too = now_s - self._alone_read_s >= t.LOOK_S
        if alone_too:
            self._alone_read_s = now_s
        for deployment, model in self._models.items():
            if len(model.classes) == 1 and not alone_too:
                continue
            before = model.weights
            slo_s = records[deployment].sla.ttft_p95_ms / 1000
            below: dict[SlaClass, bool] = {}
            higher_fine = True
            for sla_class in SlaClass:
                counts = model.classes.get(sla_class)
                if counts is None:
                    continue
                counts.index = self._index(counts, slo_s)
                held = counts.index is not None and self._watch.read(now_s, (deployment, sla_class), counts.index)
                below[sla_class] = held and higher_fine
                higher_fine = higher_fine and (counts.index is None or counts.index >= t.FAIR_LEVEL)
                counts.waiting, counts.oldest_wait_s = 0, 0.0
            boost = model.boosts.take(below)
            busy = {c: counts for c, counts in model.classes.items() if counts.arrived >= 0.5}
            model.weights = {}
            if len(busy) > 1:
                work = {c: counts.work for c, counts in busy.items()}
                requests = {c: max(1, round(counts.arrived)) for c, counts in busy.items()}
                model.weights = class_weights(densities(work, requests), boost)
            self.news = self.news or model.weights != before

    def weights(self, deployment: DeploymentKey) -> dict[str, int]:
        """For the digest; empty where one class alone asks for the model."""
        model = self._models.get(deployment)
        return {} if model is None else model.weights

    def indexes(self) -> dict[tuple[DeploymentKey, SlaClass], float]:
        """The last readings, for export."""
        return {
            (deployment, sla_class): counts.index
            for deployment, model in self._models.items()
            for sla_class, counts in model.classes.items()
            if counts.index is not None
        }

    def _index(self, counts: _Class, slo_s: float) -> float | None:
        """None where too little was seen. Who waits longer than the p95 of those served counts as that late."""
        if len(counts.ttft_s) < t.FAIR_SAMPLES_MIN and counts.oldest_wait_s <= slo_s:
            return None
        p95_s = max(counts.ttft_s.quantile(0.95), counts.oldest_wait_s)
        # What waits is asked for too; without it a class that is not served at all would have no target.
        target = max(counts.arrived, counts.finished, float(counts.waiting))
        return fairness_index(counts.finished, target, p95_s, slo_s) if target > 0.0 else None

    def _fade(self, now_s: float) -> None:
        gone_s = now_s - self._faded_s if self._faded_s is not None else 0.0
        self._faded_s = now_s
        left = math.exp(-max(0.0, gone_s) / t.FAIR_MEMORY_S)
        for model in self._models.values():
            for counts in model.classes.values():
                counts.arrived *= left
                counts.finished *= left
                counts.work *= left

    def _class_of(self, row: ModelDemand) -> _Class:
        model = self._models.get(row.deployment)
        if model is None:
            if len(self._models) >= self.settings.models_max:
                del self._models[next(iter(self._models))]
            model = self._models[row.deployment] = _Model()
        counts = model.classes.get(row.sla_class)
        if counts is None:
            counts = model.classes[row.sla_class] = _Class(ttft_s=Ring(t.FAIR_SAMPLES))
        return counts


def _work(record: ModelRecord, row: ModelDemand) -> float:
    """Work of what arrived in a row: by the first costs that are known, else by tokens."""
    costs = next(iter(record.costs.values()), None)
    inputs, outputs = row.arrived_input_tokens, row.arrived_output_tokens
    if costs is None:
        return float(sum(inputs)) + t.OUTPUT_TOKEN_WEIGHT * sum(outputs)
    total = 0.0
    for count, tokens, made in zip(row.arrived_lengths, inputs, outputs, strict=True):
        if count:
            context = tokens / count + made / count / 2
            total += count * prefill_s(costs, tokens // count)
            total += made * (costs.step_request_s + costs.step_context_token_s * context)
    return total
