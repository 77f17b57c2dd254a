"""Admission: limits, refusals, and the choice of a model for ``auto``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.core.requests.admission import (
    RETRY_AFTER_PERMANENT_S,
    Admission,
    Limits,
    ModelView,
    Refused,
    Wish,
    context_refusal,
    no_model_fits,
    pool_refusal,
    rank_models,
    retry_after_s,
    unknown_model,
)
from subjects.ids import DeploymentKey, ModelHash, RequestId, Tenant
from subjects.messages import ModelRecord, PoolModel, SlaClass

TENANT = Tenant("t")
OTHER = Tenant("u")


def view(name: str = "m", *, ready: int = 0, pool: PoolModel | None = None, **fields: Any) -> ModelView:
    """A model as the gateway sees it."""
    given_fields: dict[str, Any] = {
        "deployment": DeploymentKey(name.encode().hex().ljust(64, "0")),
        "model_hash": ModelHash(name.encode().hex().ljust(64, "0")),
        "weights_hash": "w",
        "source": "s",
        "weights_bytes": 1,
        "kv_bytes_per_token": 1,
        "kv_bytes": 1,
        "budget_bytes": 3,
        "max_context_len": 100,
    }
    return ModelView(ModelRecord(name=name, **(given_fields | fields)), pool, ready)


def pool_model(**fields: Any) -> PoolModel:
    """The digest's word on a model."""
    return PoolModel(deployment=DeploymentKey("0" * 64), model_hash=ModelHash("0" * 64), name="m", **fields)


def admit(admission: Admission, number: int, tenant: Tenant = TENANT, of: ModelView | None = None) -> Refused | None:
    """Asks for one more silver request."""
    return admission.admit(RequestId(f"r-{number}"), tenant, SlaClass.SILVER, of or view())


def codes(refusals: list[Refused | None]) -> list[tuple[int, str] | None]:
    """What tells refusals apart."""
    return [None if refusal is None else (refusal.status, refusal.code) for refusal in refusals]


def test_the_queue_of_a_model_and_class_is_bounded() -> None:
    """Beyond ``queue_requests_max`` there is no capacity: 503; another class has a queue of its own (ING-9, G5)."""
    admission = Admission(Limits())
    model = view(queue_requests_max=2)
    refusals = [admit(admission, number, of=model) for number in range(3)]
    assert codes(refusals) == [None, None, (503, "queue_full")]
    assert refusals[2] is not None and refusals[2].retry_after_s == 1
    assert admission.admit(RequestId("g"), TENANT, SlaClass.GOLD, model) is None
    assert (admission.waiting(model.record.deployment, SlaClass.SILVER), admission.in_flight) == (2, 3)


def test_a_started_request_leaves_its_queue_but_stays_in_flight() -> None:
    """A grant makes room in the queue, not in the tenant's bound; both exactly once."""
    admission = Admission(Limits(tenant_in_flight_max=2))
    model = view(queue_requests_max=1)
    assert admit(admission, 1, of=model) is None
    admission.started(RequestId("r-1"))
    admission.started(RequestId("r-1"))
    assert codes([admit(admission, 2, of=model), admit(admission, 3, of=model)]) == [None, (429, "rate_limit_exceeded")]


def test_a_tenants_own_limit_is_429_and_leaves_others_alone() -> None:
    """Your limit and our capacity are told apart (G5); single tenants may have other bounds."""
    admission = Admission(Limits(tenant_in_flight_max=1, tenant_in_flight_max_of={OTHER: 2}))
    refusals = [admit(admission, number) for number in range(2)] + [admit(admission, 10 + n, OTHER) for n in range(3)]
    assert codes(refusals) == [None, (429, "rate_limit_exceeded"), None, None, (429, "rate_limit_exceeded")]


def test_the_gateway_takes_no_more_than_its_total() -> None:
    """The total in flight is bounded over all tenants and models, running ones included."""
    admission = Admission(Limits(in_flight_max=2))
    admit(admission, 1)
    admission.started(RequestId("r-1"))
    refusals = [admit(admission, 2, OTHER), admit(admission, 3, Tenant("v"), view("other"))]
    assert codes(refusals) == [None, (503, "overloaded")]


def test_a_request_that_waits_again_is_counted_again_and_never_refused() -> None:
    """After the loss of its replica a request waits beside a full queue, which is then over its bound."""
    admission = Admission(Limits())
    model = view(queue_requests_max=1)
    admit(admission, 1, of=model)
    admission.started(RequestId("r-1"))
    admit(admission, 2, of=model)
    admission.requeued(RequestId("r-1"))
    admission.requeued(RequestId("r-1"))
    assert admission.waiting(model.record.deployment, SlaClass.SILVER) == 2
    assert codes([admit(admission, 3, of=model)]) == [(503, "queue_full")]
    admission.ended(RequestId("r-1"))
    assert admission.waiting(model.record.deployment, SlaClass.SILVER) == 1


def test_retry_after_follows_the_estimate_within_bounds() -> None:
    """A refused client hears the pool's estimate, at least 1 and at most 60 s."""
    admission = Admission(Limits(in_flight_max=0))
    waits = [0.0, 7.4, 999.0]
    assert [retry_after_s(wait_s) for wait_s in waits] == [1, 7, 60]
    refusal = admit(admission, 1, of=view(pool=pool_model(estimated_wait_s=7.4)))
    assert refusal is not None and refusal.retry_after_s == 7


@given(st.lists(st.tuples(st.sampled_from(["admit", "start", "requeue", "end"]), st.integers(0, 5)), max_size=60))
def test_counters_never_leak(steps: list[tuple[str, int]]) -> None:
    """Whatever is reported, however often and in whatever order: when all have ended, nothing is counted (K3)."""
    admission = Admission(Limits(in_flight_max=4, tenant_in_flight_max=3))
    model = view(queue_requests_max=2)
    alive: set[int] = set()
    for step, number in steps:
        request = RequestId(f"r-{number}")
        if step == "admit" and number not in alive and admit(admission, number, of=model) is None:
            alive.add(number)
        elif step == "start":
            admission.started(request)
        elif step == "requeue":
            admission.requeued(request)
        elif step == "end":
            admission.ended(request)
            alive.discard(number)
        assert admission.in_flight == len(alive) <= 3
        assert 0 <= admission.waiting(model.record.deployment, SlaClass.SILVER) <= len(alive)
    for number in sorted(alive):
        admission.ended(RequestId(f"r-{number}"))
    assert admission.in_flight == admission.waiting(model.record.deployment, SlaClass.SILVER) == 0
    assert [admit(admission, 100 + number, of=model) for number in range(2)] == [None, None]


@pytest.mark.parametrize(
    ("pool", "ready", "expected"),
    [
        (None, 0, None),
        (pool_model(), 0, None),
        (pool_model(refusal="needs 9 GiB, has 4", permanent=True), 0, (503, "model_cannot_fit", RETRY_AFTER_PERMANENT_S)),
        (pool_model(refusal="loads fail", retry_after_s=9), 0, (503, "model_unavailable", 9)),
        (pool_model(refusal="loads fail"), 0, (503, "model_unavailable", 1)),
        (pool_model(refusal="loads fail", permanent=True), 1, None),
    ],
)
def test_the_pools_refusal(pool: PoolModel | None, ready: int, expected: tuple[int, str, int] | None) -> None:
    """What cannot come up fails at once with the reason, but never while a replica of it is ready (B8)."""
    refusal = pool_refusal(view(pool=pool, ready=ready))
    assert (None if refusal is None else (refusal.status, refusal.code, refusal.retry_after_s)) == expected
    assert refusal is None or (pool is not None and pool.refusal in refusal.message)
    admission = Admission(Limits(in_flight_max=0))
    outcome = admit(admission, 1, of=view(pool=pool, ready=ready))
    assert outcome is not None and (outcome.code == "overloaded") == (expected is None)


@pytest.mark.parametrize(
    ("input_tokens", "max_tokens", "fits"),
    [(99, None, True), (100, None, False), (90, 10, True), (90, 11, False), (101, 1, False)],
)
def test_the_context_must_hold_input_and_output(input_tokens: int, max_tokens: int | None, fits: bool) -> None:
    """The last token that fits, and the first that does not; the message has the numbers (A7)."""
    refusal = context_refusal(view().record, input_tokens=input_tokens, max_tokens=max_tokens)
    assert (refusal is None) == fits
    if refusal is not None:
        assert (refusal.status, refusal.code, refusal.retry_after_s) == (400, "context_length_exceeded", None)
        assert f"{input_tokens} tokens" in refusal.message and "100 tokens" in refusal.message
        assert max_tokens is None or f"{max_tokens} were asked" in refusal.message


def test_auto_ranks_by_quality_then_cost_then_readiness_then_name() -> None:
    """Readiness decides only between models of equal quality and cost (ING-5)."""
    views = [
        view("cheap", quality_tier=1, cost_weight=0.5, ready=1),
        view("b-cold", quality_tier=2, cost_weight=2.0),
        view("z-ready", quality_tier=2, cost_weight=2.0, ready=1),
        view("a-cold", quality_tier=2, cost_weight=2.0),
        view("dear", quality_tier=2, cost_weight=3.0, ready=1),
        view("best", quality_tier=3, cost_weight=9.0),
    ]
    names = [one.record.name for one in rank_models(Wish(), views)]
    assert names == ["best", "z-ready", "a-cold", "b-cold", "dear", "cheap"]


def test_auto_takes_only_what_can_do_it() -> None:
    """All tags, at least the tier, and not refused by the pool; otherwise a 404 that names the wish."""
    refused = pool_model(refusal="too large", permanent=True)
    views = [
        view("plain"),
        view("tools", tags=("tools",)),
        view("both", tags=("structured", "tools"), quality_tier=1),
        view("gone", tags=("structured", "tools"), pool=refused),
    ]
    wish = Wish(("structured", "tools"))
    assert [one.record.name for one in rank_models(wish, views)] == ["both"]
    assert rank_models(Wish(quality_tier_min=2), views) == ()
    refusal = no_model_fits(Wish(("vision",), 2))
    assert (refusal.status, refusal.code) == (404, "no_model_fits")
    assert "vision" in refusal.message and "tier 2" in refusal.message


def test_an_unknown_name_is_not_repeated_without_bound() -> None:
    """404 model_not_found with a bounded echo of the name."""
    refusal = unknown_model("x" * 5000)
    assert (refusal.status, refusal.code, refusal.param) == (404, "model_not_found", "model")
    assert len(refusal.message) < 300
