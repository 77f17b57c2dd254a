"""Which classes are served below their due, and the class weights that follow (SCH-7).

Fed with what gateways count anyway (``ModelDemand``). Per model and class it keeps throughput, what was asked for, and the
last times to a first token. Every 200 ms it reads the fairness index; after three readings in a row below the level a class
is boosted, unless a higher one is below it too: value goes first.

A replica serves the classes that wait by deficit round robin over requests (``workers.core.pulling``), so a weight is a
share of turns. Compute density is the work of a class's mean request over that of the model's mean request. Dividing by it
turns shares of turns into shares of work: a class of long prompts does not take more than its class is worth. Weights are
whole numbers from 1 to ``WEIGHT_MAX``, so every class gets a turn in a bounded number of them, whatever the others send.

For the scheduler: ``take`` on each ``IngressReported``, ``look`` on each tick, ``weights(model)`` into
``PoolModel.class_weights`` of the digest (empty while a replica's own weights will do).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from broker.core.plan import tunables as t
from broker.core.plan.in_row import InRow
from profiles.costs import prefill_s
from profiles.features import Ring
from subjects.ids import DeploymentKey
from subjects.messages import ModelDemand, ModelRecord, SlaClass

CLASS_VALUES: Mapping[SlaClass, int] = dict(zip(SlaClass, t.CLASS_SHARES, strict=True))
"""Turns by class where all requests are alike; the weights of a replica that was told none."""


def fairness_index(throughput: float, target: float, p95_s: float, slo_s: float) -> float:
    """``(throughput / target) * (1 - p95 / SLO)``, as given: negative where p95 misses the SLO, above 1 beyond the target.

    Who has no target, or asks for less than it and waits for nothing, is to be given ``target = throughput`` by the caller.
    """
    if not target > 0.0 or not slo_s > 0.0:
        raise ValueError("target and SLO must be above 0")
    return throughput / target * (1.0 - p95_s / slo_s)


def class_weights(density: Mapping[SlaClass, float], boosts: Mapping[SlaClass, float]) -> dict[str, int]:
    """Weights for the digest (``PoolModel.class_weights``): value times boost over density, from 1 to ``WEIGHT_MAX``.

    Density and boost are 1 for a class without one. A higher class never falls below a lower one: that its own requests are
    heavy is no reason to be served after others.
    """
    weights: dict[str, int] = {}
    least = 1
    for sla_class in reversed(SlaClass):
        share = density.get(sla_class, 1.0)
        if not share > 0.0:
            raise ValueError(f"density of {sla_class.value} must be above 0")
        raised = min(t.BOOST_MAX, max(1.0, boosts.get(sla_class, 1.0)))
        weight = round(t.WEIGHT_SCALE * CLASS_VALUES[sla_class] * min(raised / share, 2 * raised))
        weights[sla_class.value] = least = max(least, min(t.WEIGHT_MAX, weight))
    return dict(reversed(weights.items()))


def densities(work_s: Mapping[SlaClass, float], requests: Mapping[SlaClass, int]) -> dict[SlaClass, float]:
    """Compute density by class from the work that arrived lately; classes without requests are left out."""
    mean_s = sum(work_s.values()) / max(1, sum(requests.values()))
    if mean_s <= 0.0:
        return {}
    asked = [sla_class for sla_class in SlaClass if requests.get(sla_class, 0) > 0]
    return {sla_class: max(1e-3, work_s.get(sla_class, 0.0) / requests[sla_class] / mean_s) for sla_class in asked}


def boosted(boosts: Mapping[SlaClass, float], below: Mapping[SlaClass, bool]) -> dict[SlaClass, float]:
    """What fairness adds to classes below their due after one more reading: doubled while they are to be helped, taken back
    by steps afterwards."""
    before = {sla_class: boosts.get(sla_class, 1.0) for sla_class in SlaClass}
    return {c: min(t.BOOST_MAX, was * 2.0) if below.get(c) else max(1.0, was * 0.9) for c, was in before.items()}


@dataclass(slots=True)
class _Class:
    """Counts fade with ``FAIR_MEMORY_S``."""

    arrived: float = 0.0
    finished: float = 0.0
    work: float = 0.0
    ttft_s: Ring[float] = field(default_factory=lambda: Ring(t.FAIR_SAMPLES))
    waiting: int = 0
    oldest_wait_s: float = 0.0
    index: float | None = None

    def read(self, slo_s: float) -> None:
        """The index; None where too little was seen. Who waits longer than the p95 of those served counts as that late."""
        seen = len(self.ttft_s) >= t.FAIR_SAMPLES_MIN or self.oldest_wait_s > slo_s
        # What waits is asked for too; without it a class that is not served at all would have no target.
        target = max(self.arrived, self.finished, float(self.waiting))
        p95_s = max(self.ttft_s.quantile(0.95) if len(self.ttft_s) else 0.0, self.oldest_wait_s)
        self.index = fairness_index(self.finished, target, p95_s, slo_s) if seen and target > 0.0 else None
        self.waiting, self.oldest_wait_s = 0, 0.0


@dataclass(slots=True)
class _Model:
    classes: dict[SlaClass, _Class] = field(default_factory=dict)
    boosts: dict[SlaClass, float] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)


class Fairness:
    """Of all models. One thread; bounded."""

    def __init__(self) -> None:
        self.news = False
        """Whether the last look changed a weight."""
        self._models: dict[DeploymentKey, _Model] = {}
        self._below = InRow()
        self._read_s = self._alone_read_s = -math.inf

    def take(self, demand: Iterable[ModelDemand], records: Mapping[DeploymentKey, ModelRecord]) -> None:
        """One gateway's counts. Rows of models without a record are left out, and so is batch: it has no target, and those
        that have missed theirs wait there (ops/decisions/0009)."""
        for row in demand:
            record = records.get(row.deployment)
            if record is None or row.sla_class is SlaClass.BATCH:
                continue
            model = self._models.get(row.deployment)
            if model is None:
                if len(self._models) >= t.KEPT_MAX:
                    del self._models[next(iter(self._models))]
                model = self._models[row.deployment] = _Model()
            counts = model.classes.get(row.sla_class)
            if counts is None:
                counts = model.classes[row.sla_class] = _Class()
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
        gone_s = now_s - self._read_s
        if gone_s < t.READING_S * 0.95:
            return
        self._read_s = now_s
        left = math.exp(-gone_s / t.FAIR_MEMORY_S) if gone_s < math.inf else 1.0
        self._models = {deployment: model for deployment, model in self._models.items() if deployment in records}
        self.news = False
        alone_too = now_s - self._alone_read_s >= t.LOOK_S
        if alone_too:
            self._alone_read_s = now_s
        for deployment, model in self._models.items():
            for counts in model.classes.values():
                counts.arrived *= left
                counts.finished *= left
                counts.work *= left
            if len(model.classes) == 1 and not alone_too:
                continue
            before = model.weights
            self._read(now_s, deployment, model, records[deployment].sla.ttft_p95_ms / 1000)
            busy = {c: counts for c, counts in model.classes.items() if counts.arrived >= 0.5}
            model.weights = {}
            if len(busy) > 1:
                work = {c: counts.work for c, counts in busy.items()}
                requests = {c: max(1, round(counts.arrived)) for c, counts in busy.items()}
                model.weights = class_weights(densities(work, requests), model.boosts)
            self.news = self.news or model.weights != before

    def _read(self, now_s: float, deployment: DeploymentKey, model: _Model, slo_s: float) -> None:
        below: dict[SlaClass, bool] = {}
        higher_fine = True
        for sla_class in SlaClass:
            counts = model.classes.get(sla_class)
            if counts is None:
                continue
            counts.read(slo_s)
            fine = counts.index is None or counts.index >= t.FAIR_LEVEL
            if counts.index is not None:
                below[sla_class] = self._below.read(now_s, (deployment, sla_class), not fine) and higher_fine
            higher_fine = higher_fine and fine
        model.boosts = boosted(model.boosts, below)

    def weights(self, deployment: DeploymentKey) -> dict[str, int]:
        """For the digest; empty where one class alone asks for the model."""
        model = self._models.get(deployment)
        return {} if model is None else model.weights


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
