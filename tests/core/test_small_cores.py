"""The small parts of the broker's cores on their own: demand in numbers, numbers in words, models by name and hash."""

from __future__ import annotations

import pytest

from broker.core.pool.catalogue import Catalogue, Model
from broker.core.pool.describe import bytes_text, describe_need, load_s_guess, seconds_text
from broker.core.requests.demand import DemandLedger
from subjects.ids import DeploymentKey, DeviceId, RequestId, Tenant, WorkerId
from subjects.messages import (
    Endpoint,
    Lane,
    ModelDemand,
    Override,
    OverrideKind,
    Overrides,
    RequestKind,
    RequestProfile,
    SlaClass,
)
from tests.core.scheduler_world import deployment, model_hash, record

KIB, MIB, GIB = 2**10, 2**20, 2**30


def profile(model: str = "a", **fields: object) -> RequestProfile:
    """What a gateway knows of a request."""
    values: dict[str, object] = {
        "deployment": deployment(model),
        "model_hash": model_hash(model),
        "endpoint": Endpoint.CHAT,
        "tenant": Tenant("t"),
        "lane": Lane.SMALL,
        "max_tokens": 9,
        "input_tokens": 3,
        "expected_output_tokens": 4,
        "kv_pages_needed": 1,
        "deadline_unix_s": 0.0,
    }
    return RequestProfile(**(values | fields))  # type: ignore[arg-type]  # tests name fields freely


def row(model: str = "a", **fields: object) -> ModelDemand:
    """What is told of it."""
    values: dict[str, object] = {
        "deployment": deployment(model),
        "model_hash": model_hash(model),
        "sla_class": SlaClass.SILVER,
        "lane": Lane.SMALL,
    }
    return ModelDemand(**(values | fields))  # type: ignore[arg-type]  # tests name fields freely


def test_demand_is_counted_from_arrival_to_end() -> None:
    """Arrivals and ends start again from zero when they were told, waiting and running go on."""
    ledger = DemandLedger()
    for number, since_s in ((1, 10.0), (2, 12.0), (3, 13.0)):
        ledger.arrived(profile())
        ledger.waits(profile(), RequestId(f"r{number}"), since_s)
    ledger.stopped_waiting(profile(), RequestId("r1"))
    ledger.runs(profile(), 1)
    assert ledger.take(15.0) == (
        row(
            arrived=3,
            waiting=2,
            running=1,
            oldest_wait_s=3.0,
            arrived_lengths=(3, 0, 0),
            arrived_input_tokens=(9, 0, 0),
            arrived_output_tokens=(12, 0, 0),
            waiting_input_tokens=6,
        ),
    )
    ledger.finished(profile(), output_tokens=7, ttft_s=0.5, latency_s=2.0, within_slo=True)
    ledger.finished(profile(), output_tokens=5, ttft_s=1.0, latency_s=3.0)
    ledger.failed(profile())
    ledger.failed(profile())
    assert ledger.take(16.0) == (
        row(
            finished=2,
            failed=2,
            waiting=2,
            running=1,
            oldest_wait_s=4.0,
            input_tokens=6,
            output_tokens=12,
            ttft_s_sum=1.5,
            latency_s_sum=5.0,
            waiting_input_tokens=6,
            within_slo=1,
        ),
    )
    ledger.runs(profile(), -1)
    ledger.stopped_waiting(profile(), RequestId("r2"))
    ledger.stopped_waiting(profile(), RequestId("r3"))
    assert ledger.take(17.0) == ()


@pytest.mark.parametrize("what", ["arrived", "waiting", "running", "finished", "failed"])
def test_one_of_anything_is_worth_a_row(what: str) -> None:
    """A row is told when anything happened, and no longer than something lasts."""
    ledger = DemandLedger()
    match what:
        case "arrived":
            ledger.arrived(profile())
        case "waiting":
            ledger.waits(profile(), RequestId("r"), 5.0)
        case "running":
            ledger.runs(profile(), 1)
        case "finished":
            ledger.finished(profile(), output_tokens=0, ttft_s=0.0, latency_s=0.0)
        case _:
            ledger.failed(profile())
    (told,) = ledger.take(5.0)
    assert getattr(told, what) == 1
    assert len(ledger.take(6.0)) == (what in ("waiting", "running"))


def test_demand_is_told_apart_and_in_order() -> None:
    """By model, class, lane and business; health checks are none; a clock that went back makes no negative wait."""
    ledger = DemandLedger()
    for one in (
        profile("b"),
        profile("a", lane=Lane.MEDIUM),
        profile("a", sla_class=SlaClass.GOLD),
        profile("a", business_id="z"),
        profile("a"),
        profile("a", kind=RequestKind.HEALTH_CHECK),
    ):
        ledger.arrived(one)
        ledger.waits(one, RequestId("r"), 9.0)
    told = ledger.take(8.0)
    assert [one.oldest_wait_s for one in told] == [0.0] * 5
    keys = [(one.deployment, one.sla_class.value, one.lane.value, one.business_id) for one in told]
    assert keys == sorted(keys) and len(set(keys)) == 5


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 KiB"),
        (3 * KIB, "3 KiB"),
        (MIB - 1, "1024 KiB"),
        (MIB, "1.0 MiB"),
        (GIB - MIB, "1023.0 MiB"),
        (GIB, "1.0 GiB"),
        (GIB * 5 // 2, "2.5 GiB"),
    ],
)
def test_bytes_in_words(count: int, text: str) -> None:
    """The unit that a person would choose."""
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.44, "0.4 s"), (9.9, "9.9 s"), (10.0, "10 s"), (119.0, "119 s"), (120.0, "2 min"), (600.0, "10 min")],
)
def test_seconds_in_words(seconds: float, text: str) -> None:
    """Tenths while they matter, minutes when seconds do not."""
    assert seconds_text(seconds) == text


def test_a_need_is_told_with_its_parts_and_a_first_guess() -> None:
    """Five seconds and what 200 MiB a second take, as long as no load was seen."""
    need = record("a", 4.0)
    assert describe_need(need) == "4.0 GiB (weights 3.0 GiB + KV 512.0 MiB + overhead 512.0 MiB)"
    assert load_s_guess(need) == pytest.approx(5.0 + 3072 / 200)


def test_names_of_one_hash_share_a_model() -> None:
    """The first name speaks; when it goes the next one does; what nobody applied has its hash for a name."""
    shared = deployment("x")
    catalogue = Catalogue()
    loaded = [catalogue.loaded]
    catalogue.load([record("b", deployment=shared), record("a", deployment=shared), record("c")])
    loaded.append(catalogue.loaded)
    assert loaded == [False, True]
    assert [one.name for one in catalogue.by_name] == ["a", "b", "c"]
    assert [one.name for one in catalogue.by_deployment] == ["a", "c"]
    assert catalogue.name(shared) == "a"
    catalogue.remove("a")
    assert catalogue.name(shared) == "b"
    catalogue.remove("b")
    catalogue.remove("never there")
    assert catalogue.of_deployment(shared) is None
    assert catalogue.name(DeploymentKey("0123456789abcdef" * 4)) == "0123456789abcdef"


def test_a_new_record_forgets_failures_but_not_what_was_learnt() -> None:
    """A person who applies a model wants it tried again."""
    catalogue = Catalogue()
    catalogue.apply(record("a"))
    model = catalogue.model(deployment("a"))
    model.failures, model.excuses, model.early_deaths = 3, 2, 1
    model.failure, model.retry_s, model.held_down, model.load_s = "broken", 99.0, True, 7.0
    model.failed_on = (WorkerId("w"), DeviceId("d"))
    catalogue.apply(record("a"))
    assert model == Model(load_s=7.0)


def test_every_change_of_the_catalogue_is_news() -> None:
    """What depends on it is computed again."""
    catalogue = Catalogue()
    seen = [catalogue.news]
    catalogue.load([record("a", pinned=True), record("b", allow_co_location=False)])
    seen.append(catalogue.news)
    shared = [catalogue.all_co_locate]
    assert [catalogue.pinned(one) for one in catalogue.by_name] == [True, False]
    words = (("a", "unpinned"), ("b", "pinned"))
    pins = tuple(Override(kind=OverrideKind.PIN, about=about, value=value) for about, value in words)
    catalogue.override(Overrides(entries=pins))
    seen.append(catalogue.news)
    assert [catalogue.pinned(one) for one in catalogue.by_name] == [False, True]
    catalogue.remove("b")
    seen.append(catalogue.news)
    shared.append(catalogue.all_co_locate)
    assert shared == [False, True]
    assert seen == sorted(set(seen))
