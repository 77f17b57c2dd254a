"""Two names of one model that need different memory: who speaks for it, and what the gateways are told."""

from __future__ import annotations

import pytest

from broker.core.pool.events import ModelApplied, ModelRemoved
from broker.core.requests import events as e
from broker.core.requests.admission import ModelView, pool_refusal
from subjects.ids import ReplicaId, RequestId
from subjects.messages import LoadModel, ModelRecord, PoolModel
from tests.core.scheduler_world import deployment, record
from tests.core.test_outlook import told, words
from tests.core.test_placement import Bench, V, W, commands, listed, settled
from tests.core.test_requests import Gateway
from tests.core.words import pin, said

SHARED = deployment("x")


def named(name: str, gib: float) -> ModelRecord:
    """A name of the shared model."""
    return record(name, gib, deployment=SHARED)


def loads(bench: Bench, **waiting: float) -> list[str]:
    """The names of the records that are loaded, once requests wait for the shared model."""
    out = commands(bench.demand(**(waiting or {"x": 0.2})) + bench.tick(0.2))
    return [command.record.name for command in out if isinstance(command, LoadModel)]


def refusal_of(bench: Bench, one: ModelRecord) -> str | None:
    """The code that a client of a name gets by a new digest: gateways keep its words by deployment."""
    told(bench, one.name)
    by_deployment: dict[str, PoolModel] = {model.deployment: model for model in bench.digest.models}
    refused = pool_refusal(ModelView(one, by_deployment[one.deployment]))
    return refused.code if refused is not None else None


@pytest.mark.parametrize(("small", "large"), [("a", "b"), ("b", "a")])
def test_the_record_that_fits_is_loaded_for_all_names(small: str, large: str) -> None:
    """Whichever comes first by name; no name of the model is refused, and none waits for ever."""
    bench = settled(named(small, 1.0), named(large, 2.0))
    bench.report(gib=1.5)
    bench.tick(0.1)
    assert [refusal_of(bench, named(name, 1.0)) for name in (small, large)] == [None, None]
    assert words(told(bench, small)) == words(told(bench, large))
    assert loads(bench) == [small]
    assert "cannot-fit" not in bench.alerts()


@pytest.mark.parametrize(("small", "large"), [("a", "b"), ("b", "a")])
def test_a_name_that_is_applied_later_and_does_not_fit_changes_nothing(small: str, large: str) -> None:
    """Once the one that fits goes it is refused, and not before."""
    bench = settled(named(small, 1.0))
    bench.report(gib=1.5)
    bench.step(ModelApplied(named(large, 2.0)))
    assert loads(bench) == [small]
    bench = settled(named(small, 1.0), named(large, 2.0))
    bench.report(gib=1.5)
    bench.step(ModelRemoved(small))
    bench.tick(0.1)
    assert refusal_of(bench, named(large, 2.0)) == "model_cannot_fit"
    assert loads(bench) == []


def test_where_none_fits_requests_for_every_name_get_503() -> None:
    """Those that wait and those that come; each name is told its own numbers."""
    both = (named("a", 2.0), named("b", 3.0))
    bench = settled(*both)
    gateway = Gateway()
    assert gateway.submit(RequestId("waits"), deployment=SHARED)[0].startswith("publish")
    bench.report(gib=1.5)
    bench.tick(0.1)
    assert [refusal_of(bench, one) for one in both] == ["model_cannot_fit"] * 2
    assert [words(told(bench, name))[1][:13] for name in "ab"] == ["needs 2.0 GiB", "needs 3.0 GiB"]
    assert "end waits 503 model_cannot_fit" in gateway(e.PoolChanged(bench.digest))
    assert gateway.submit(RequestId("comes"), deployment=SHARED) == ["end comes 503 model_cannot_fit"]
    assert loads(bench) == []
    assert bench.alerts().count("cannot-fit") == 2


def test_where_both_fit_the_first_name_speaks_again() -> None:
    """A larger device came."""
    bench = settled(named("a", 2.0), named("b", 1.0))
    bench.report(gib=1.5)
    bench.tick(0.1)
    assert bench.core.catalogue.name(SHARED) == "b"
    bench.report(worker=V, gib=4.0)
    bench.tick(0.1, beats=(W, V))
    assert bench.core.catalogue.name(SHARED) == "a"
    assert loads(bench) == ["a"]


def test_a_device_that_cannot_be_used_for_a_moment_refuses_nobody() -> None:
    """Its worker is silent: the record that fits still speaks, so nobody hears that the other one never will (F10)."""
    bench = settled(named("a", 2.0), named("b", 1.0))
    bench.report(gib=1.5)
    bench.tick(0.1)
    bench.tick(2.0, beats=())
    assert not bench.core.pool.workers[W].usable
    assert bench.core.catalogue.name(SHARED) == "b"
    assert refusal_of(bench, named("a", 2.0)) is None


@pytest.mark.parametrize("pinned_gib", [1.0, 2.5])
def test_the_record_that_fits_beside_what_must_stay_is_loaded(pinned_gib: float) -> None:
    """Both fit the empty device, one beside a pinned model; where none does, both names are told that for now."""
    both = (named("a", 2.5), named("b", 1.0))
    bench = settled(record("kept", pinned_gib), *both)
    bench.step(said(pin("kept")))
    bench.report(listed("kept", replica="kept-9-1-00000000aa", gib=pinned_gib), gib=3.0)
    bench.tick(0.1)
    fits = pinned_gib == 1.0
    assert [refusal_of(bench, one) for one in both] == [None if fits else "model_unavailable"] * 2
    assert loads(bench) == (["b"] if fits else [])


def test_a_pinned_model_does_not_stand_in_its_own_way() -> None:
    """Its own replica holds the room: the first name that fits the device speaks, look after look."""
    bench = settled(named("a", 2.0), named("b", 1.0))
    bench.step(said(pin("a")))
    bench.report(listed("x", replica="a-9-1-00000000aa", gib=2.0), gib=3.5)
    seen = []
    for _ in range(4):
        bench.tick(0.1)
        seen.append((bench.core.catalogue.name(SHARED), bench.core.catalogue.news))
    assert seen == [("a", seen[0][1])] * 4
    assert [model.refusal for model in bench.digest.models] == ["", ""]
    assert [replica.replica for replica in bench.digest.replicas] == [ReplicaId("a-9-1-00000000aa")]
