"""Classes below their due, and the weights that follow (SCH-7)."""

from __future__ import annotations

from typing import Any

import pytest

from broker.core.plan import tunables
from broker.core.plan.fairness import Fairness
from broker.core.pool.events import (
    BusRoundTripMade,
    IngressReported,
    LeadershipGained,
    PublishDigest,
    RegistryLoaded,
    SchedulerCommand,
    Ticked,
)
from broker.core.scheduler import SchedulerCore
from subjects.ids import DeploymentKey, IngressId, ModelHash
from subjects.messages import IngressTelemetry, Lane, ModelDemand, ModelRecord, SlaClass, StepCosts

A = DeploymentKey("a" * 64)
RECORD = ModelRecord(
    name="a",
    deployment=A,
    model_hash=ModelHash(A),
    weights_hash="w",
    source="/m",
    weights_bytes=1,
    kv_bytes_per_token=1,
    kv_bytes=1,
    budget_bytes=3,
    max_context_len=4096,
)
RECORDS = {A: RECORD}


def row(sla_class: SlaClass, arrived: int = 1, finished: int = 1, ttft_s: float = 0.2, **more: Any) -> ModelDemand:
    """Counts of one class in a tenth of a second; prompts of 100 tokens, answers of 10."""
    values: dict[str, Any] = {
        "deployment": A,
        "model_hash": A,
        "sla_class": sla_class,
        "lane": Lane.SMALL,
        "arrived": arrived,
        "finished": finished,
        "ttft_s_sum": ttft_s * finished,
        "arrived_lengths": (arrived, 0, 0),
        "arrived_input_tokens": (100 * arrived, 0, 0),
        "arrived_output_tokens": (10 * arrived, 0, 0),
    }
    return ModelDemand(**values | more)


def feed(fairness: Fairness, seconds: float, *rows: ModelDemand, begin_s: float = 0.0) -> float:
    """The same rows every 100 ms, a look every 200 ms; returns the time after it."""
    for step in range(round(seconds * 10)):
        fairness.take(rows, RECORDS)
        if step % 2 == 0:
            fairness.look(begin_s + step / 10, RECORDS)
    return begin_s + seconds


def indexes(fairness: Fairness) -> dict[tuple[DeploymentKey, SlaClass], float]:
    """The last readings."""
    return {
        (deployment, sla_class): counts.index
        for deployment, model in fairness._models.items()
        for sla_class, counts in model.classes.items()
        if counts.index is not None
    }


def test_one_class_needs_no_weights() -> None:
    """Where one class alone asks for a model, a replica's own weights will do."""
    fairness = Fairness()
    feed(fairness, 5.0, row(SlaClass.SILVER))
    assert fairness.weights(A) == {}
    assert fairness.weights(DeploymentKey("b" * 64)) == {}
    assert indexes(fairness) == {(A, SlaClass.SILVER): pytest.approx(0.9, abs=0.01)}


def test_a_class_below_its_due_is_helped() -> None:
    """Silver's p95 at nine tenths of its target in three readings in a row raises its weight; once well, it falls back."""
    fairness = Fairness()
    now_s = feed(fairness, 5.0, row(SlaClass.GOLD), row(SlaClass.SILVER))
    assert fairness.weights(A) == {"gold": 32, "silver": 16, "bronze": 8, "batch": 4}
    now_s = feed(fairness, 20.0, row(SlaClass.GOLD), row(SlaClass.SILVER, ttft_s=1.8), begin_s=now_s)
    assert fairness.weights(A)["silver"] == 64
    assert indexes(fairness)[(A, SlaClass.SILVER)] == pytest.approx(0.1, abs=0.01)
    feed(fairness, 20.0, row(SlaClass.GOLD), row(SlaClass.SILVER), begin_s=now_s)
    assert fairness.weights(A) == {"gold": 32, "silver": 16, "bronze": 8, "batch": 4}


def test_value_goes_first() -> None:
    """While Gold is below its due nobody under it is helped: it gets the boost, not Silver."""
    fairness = Fairness()
    feed(fairness, 20.0, row(SlaClass.GOLD, ttft_s=1.9), row(SlaClass.SILVER, ttft_s=1.9))
    assert fairness.weights(A) == {"gold": 64, "silver": 16, "bronze": 8, "batch": 4}


def test_who_waits_counts_before_it_is_served() -> None:
    """A class that gets no answer at all has an index too: by what it asks for and how long its oldest request waits."""
    fairness = Fairness()
    starved = row(SlaClass.SILVER, finished=0, waiting=40, oldest_wait_s=3.0)
    feed(fairness, 2.0, row(SlaClass.GOLD), starved)
    assert indexes(fairness)[(A, SlaClass.SILVER)] <= 0.0
    assert fairness.weights(A)["silver"] > 16


def test_heavy_requests_get_fewer_turns() -> None:
    """A class whose requests are long gets fewer turns than one of the same class value would with short ones."""
    fairness = Fairness()
    long = row(SlaClass.BRONZE, arrived_input_tokens=(0, 0, 4000), arrived_lengths=(0, 0, 1))
    feed(fairness, 5.0, row(SlaClass.GOLD), long)
    by_tokens = fairness.weights(A)["bronze"]
    assert by_tokens < 8
    priced = Fairness()
    costs = StepCosts(prefill_token_s=1e-4, step_const_s=0.01, step_request_s=1e-4)
    records = {
        A: ModelRecord(**{name: getattr(RECORD, name) for name in RECORD.__struct_fields__} | {"costs": {"gpu": costs}})
    }
    for step in range(50):
        priced.take([row(SlaClass.GOLD), long], records)
        priced.look(step / 10, records)
    assert priced.weights(A)["bronze"] < 8


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are gone are forgotten, unknown ones are left out, many push out the first."""
    monkeypatch.setattr(tunables, "KEPT_MAX", 2)
    fairness = Fairness()
    fairness.take([row(SlaClass.GOLD, deployment=DeploymentKey("f" * 64))], RECORDS)
    assert not fairness._models
    others = {DeploymentKey(f"{number:064x}"): RECORD for number in range(3)}
    fairness.take([row(SlaClass.GOLD, deployment=deployment) for deployment in others], others)
    assert list(fairness._models) == [DeploymentKey(f"{number:064x}") for number in (1, 2)]
    fairness.look(0.0, {})
    assert not fairness._models


def test_batch_is_not_helped() -> None:
    """It has no target; those that missed theirs wait there, and must not be preferred for it (0009)."""
    fairness = Fairness()
    feed(fairness, 5.0, row(SlaClass.SILVER), row(SlaClass.BATCH, finished=0, waiting=50, oldest_wait_s=60.0))
    assert fairness.weights(A) == {}
    assert list(indexes(fairness)) == [(A, SlaClass.SILVER)]


def test_the_scheduler_tells_replicas_the_weights() -> None:
    """Counts of gateways go in once each, weights come out in the digest, and a change of them is published (SCH-7)."""
    core = SchedulerCore()
    out: list[SchedulerCommand] = core.step(0.0, LeadershipGained(1))
    out += core.step(0.0, RegistryLoaded((RECORD,)))
    rows = (row(SlaClass.GOLD, finished=0, waiting=40, oldest_wait_s=9.0), row(SlaClass.BRONZE))
    sequence = 0
    for tick in range(60):
        now_s = tick / 10
        sequence += tick % 2 == 0  # Each telemetry comes twice.
        report = IngressTelemetry(ingress=IngressId("gw-1"), sequence=sequence, demand=rows)
        out += core.step(now_s, BusRoundTripMade())
        out += core.step(now_s, IngressReported(report))
        out += core.step(now_s, Ticked(1e9 + now_s))
    told = [c.digest.models[0].class_weights for c in out if isinstance(c, PublishDigest) and c.digest.models]
    assert told[0] == {}
    assert told[-1] == core.fairness.weights(A)
    assert told[-1]["gold"] > 4 * told[-1]["bronze"]
    assert indexes(core.fairness)[A, SlaClass.GOLD] < 0.5
