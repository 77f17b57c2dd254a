"""LoRA adapters at the gateway: names that go to their base's replicas (ING-1, ING-3, PAINS J12)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from msgspec.structs import replace

from subjects.messages import Adapter, Failure, FailureKind, ModelRecord
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.gateway_pool import Pool, Run, open_pool, record

HI: Any = [{"role": "user", "content": "Hi, a long message. " * 40}]
SQL = Adapter(name="sql", aliases=("team/sql",), source="/adapters/sql", adapter_hash="1" * 64, rank=8, size_bytes=1000)
LAW = Adapter(name="law", source="/adapters/law", adapter_hash="2" * 64, rank=8, size_bytes=1000)


@pytest_asyncio.fixture
async def pool(shared_nats_server: NatsServer) -> AsyncIterator[Pool]:
    """A gateway."""
    async with open_pool(shared_nats_server.url) as pool:
        yield pool
        await pool.clear()


def base(**fields: Any) -> ModelRecord:
    """A model with two adapters."""
    return record("base", aliases=("b",), adapters=(SQL, LAW), adapters_max=1, adapters_rank_max=16, **fields)


async def say_who(run: Run) -> None:
    """Answers with the name of the adapter that the grant brought."""
    await run.say(run.grant.adapter.name if run.grant.adapter is not None else "base")
    await run.end()


async def test_each_name_goes_to_the_bases_replicas_with_its_adapter(pool: Pool) -> None:
    """Base, adapters, aliases, and an adapter named beside the model: one queue, the right adapter in the grant and in the
    profile, the asked name in the answer, the one that answered in the header."""
    model = base()
    await pool.register(model)
    replica = await pool.replica(model, say_who)
    asked: list[tuple[dict[str, str], str, str]] = [
        ({"model": "base"}, "base", ""),
        ({"model": "sql"}, "sql", "sql"),
        ({"model": "team/sql"}, "sql", "sql"),
        ({"model": "law"}, "law", "law"),
        ({"model": "base", "adapter": "law"}, "law", "law"),
        ({"model": "b", "adapter": "team/sql"}, "sql", "sql"),
        ({"model": "law", "adapter": "law"}, "law", "law"),
        ({"model": "auto", "adapter": "law"}, "law", "law"),
    ]
    for fields, says, adapter in asked:
        response = await pool.chat(**fields)
        answer = response.json()
        assert answer["choices"][0]["message"]["content"] == says
        assert answer["model"] == (says if fields["model"] == "auto" else fields["model"])
        assert response.headers["x-carpool-model"] == says
        assert "x-carpool-degraded-from" not in response.headers
        assert replica.tickets[-1].profile.adapter == adapter
    assert {ticket.profile.deployment for ticket in replica.tickets} == {model.deployment}
    assert [run.grant.adapter for run in replica.runs[:4]] == [None, SQL, SQL, LAW]
    both = await pool.chat("sql", adapter="law")
    assert (both.status_code, both.json()["error"]["param"]) == (400, "adapter")
    ran = len(replica.runs)
    for name in ("base", "b"):
        plain = await pool.chat("auto", adapter=name)
        assert (plain.status_code, plain.json()["error"]["param"]) == (400, "adapter")
    assert len(replica.runs) == ran
    number = await pool.http.post("/v1/embeddings", json={"model": "base", "input": "x", "adapter": 5})
    assert (number.status_code, number.json()["error"]["param"]) == (400, "adapter")


async def test_adapters_are_listed_as_models_with_their_parent(pool: Pool) -> None:
    """After the models, with ``root`` and ``parent``, no path of the operator's; each can be asked for by itself."""
    await pool.register(base(), record("other"))
    listed = [each.model_dump() for each in (await pool.openai().models.list()).data]
    assert [(each["id"], each["root"], each["parent"]) for each in listed] == [
        ("base", "base", None),
        ("other", "other", None),
        ("law", "base", "base"),
        ("sql", "base", "base"),
    ]
    assert listed[3]["max_model_len"] == 2048
    assert "/adapters" not in (await pool.http.get("/v1/models")).text
    assert (await pool.openai().models.retrieve("sql")).model_dump()["parent"] == "base"


async def test_an_unknown_adapter_is_a_404(pool: Pool) -> None:
    """A typo, another model's adapter, or one that was removed is never answered by the base (J12)."""
    other = record("other")
    await pool.register(base(), other)
    replica = await pool.replica(other)
    for fields in ({"model": "sqll"}, {"model": "base", "adapter": "sqll"}, {"model": "other", "adapter": "sql"}):
        with pytest.raises(openai.NotFoundError) as caught:
            await pool.openai().chat.completions.create(model=fields["model"], messages=HI, extra_body=fields)
        assert caught.value.code == "model_not_found"
    assert replica.tickets == []


async def test_adapters_change_while_replicas_run(pool: Pool) -> None:
    """One more, one less, and one with other files under the same name: the next request has it so; nothing reloads."""
    model = base()
    await pool.register(model)
    replica = await pool.replica(model, say_who)
    await pool.chat("sql")
    newer = Adapter(name="sql", source="/adapters/sql", adapter_hash="3" * 64)
    poems = Adapter(name="poems", source="/adapters/poems", adapter_hash="4" * 64)
    changed = replace(model, adapters=(newer, poems), revision=2)
    await pool.register(changed)
    for name in ("sql", "poems"):
        assert (await pool.chat(name)).status_code == 200
    assert (await pool.chat("law")).status_code == 404
    assert [run.grant.adapter for run in replica.runs] == [SQL, newer, poems]


async def test_prefixes_of_adapters_are_apart(pool: Pool) -> None:
    """One prompt under the base, two adapters, and one adapter with other files: four salts, four prefix chains; the same
    again is the same."""
    model = base()
    await pool.register(model)
    replica = await pool.replica(model, say_who)
    names = ("base", "sql", "law", "sql")
    for name in names:
        await pool.openai().chat.completions.create(model=name, messages=HI)
    await pool.register(replace(model, adapters=(replace(SQL, adapter_hash="5" * 64),), revision=2))
    await pool.openai().chat.completions.create(model="sql", messages=HI)
    salts = [run.grant.cache_salt for run in replica.runs]
    heads = [ticket.profile.prefix_head for ticket in replica.tickets]
    for marks in (salts, heads):
        assert marks[1] == marks[3]
        assert len(set(marks)) == 4


async def test_requests_and_tokens_are_counted_by_adapter(pool: Pool) -> None:
    """Labels are configured names: an alias counts for its adapter, an unknown name for nobody."""
    model = base()
    await pool.register(model)
    await pool.replica(model, say_who)
    for name in ("base", "team/sql", "sql", "nonsense-name"):
        await pool.chat(name)
    text = (await pool.http.get("/metrics")).text
    assert 'carpool_requests_total{model="sql",status="200",way="http"} 2.0' in text
    assert 'carpool_requests_total{model="base",status="200",way="http"} 1.0' in text
    assert 'carpool_tokens_total{kind="output",model="sql"} 10.0' in text
    assert 'carpool_requests_waiting{model="law"} 0.0' in text
    assert "nonsense" not in text and "team/sql" not in text


async def test_an_adapter_that_no_replica_can_take_is_the_clients_400(pool: Pool) -> None:
    """The engine's word on the adapter reaches the client; the request is not tried elsewhere and the base goes on."""
    model = base()
    await pool.register(model)

    async def refuse(run: Run) -> None:
        if run.grant.adapter is None:
            await say_who(run)
            return
        message = "the adapter 'sql' has rank 64, and this replica takes 16 at most"
        failure = Failure(
            kind=FailureKind.BAD_REQUEST, message=message, status=400, param="model", code="adapter_unavailable"
        )
        await run.end(failure=failure)

    replica = await pool.replica(model, refuse)
    with pytest.raises(openai.BadRequestError) as caught:
        await pool.openai().chat.completions.create(model="sql", messages=HI)
    assert (caught.value.code, caught.value.param) == ("adapter_unavailable", "model")
    assert "takes 16 at most" in caught.value.message
    assert len(replica.runs) == 1
    assert (await pool.chat("base")).json()["choices"][0]["message"]["content"] == "base"


async def test_an_adapter_that_one_worker_lacks_is_tried_again_elsewhere(pool: Pool) -> None:
    """Where all lack it, it ends after a few attempts with the last word of an engine; where one has it, that one answers
    (REL-1)."""
    model = base()
    await pool.register(model)

    async def lacks(run: Run) -> None:
        message = "the files of adapter 'sql' are missing on this worker"
        await run.end(failure=Failure(kind=FailureKind.SICK, message=message, param="model", code="adapter_unavailable"))

    without = await pool.replica(model, lacks)
    failed = await pool.chat("sql")
    error = failed.json()["error"]
    assert (failed.status_code, error["code"]) == (502, "adapter_unavailable")
    assert "the files of adapter 'sql' are missing on this worker" in error["message"]
    assert [run.ticket.attempt for run in without.runs] == [1, 2, 3]
    await pool.replica(model, say_who)
    answers = [await pool.chat("sql") for _ in range(6)]
    assert [answer.json()["choices"][0]["message"]["content"] for answer in answers] == ["sql"] * 6


async def test_a_replica_of_an_older_version_answers_no_adapter(pool: Pool) -> None:
    """It would answer with the base's weights and say nothing: its claims, which name no adapters, are refused, and a newer
    replica gets the request; the base is everybody's."""
    model = base()
    await pool.register(model)
    older = await pool.replica(model, say_who)
    older.knows_adapters = False
    asked = asyncio.ensure_future(pool.chat("sql"))
    await until(lambda: older.refused, "the older replica claimed it")
    await pool.replica(model, say_who)
    assert (await asked).json()["choices"][0]["message"]["content"] == "sql"
    assert older.runs == []
    assert {(await pool.chat("base")).status_code for _ in range(4)} == {200}


async def test_names_that_clash(pool: Pool) -> None:
    """A model wins over an adapter, a name over an alias, the first model by name over the next; a loser comes up when the
    winner goes."""
    mine = Adapter(name="x", source="mine", adapter_hash="1")
    theirs = Adapter(name="x", aliases=("y",), source="theirs", adapter_hash="2")
    first, second, x = record("m1", adapters=(mine,)), record("m2", adapters=(theirs,)), record("x")
    await pool.register(second, first, x)
    replicas = {each.name: await pool.replica(each) for each in (first, second, x)}

    async def who(name: str) -> tuple[str, str]:
        before = {name: len(replica.runs) for name, replica in replicas.items()}
        assert (await pool.chat(name)).status_code == 200
        (served,) = (name for name, replica in replicas.items() if len(replica.runs) > before[name])
        adapter = replicas[served].runs[-1].grant.adapter
        return served, adapter.source if adapter is not None else ""

    assert await who("x") == ("x", "")
    assert [view.name for view, _ in pool.gateway.model_states()] == ["m1", "m2", "x"]
    await pool.bus.kv_delete("carpool-models", "x")
    await until(lambda: len(pool.gateway.model_states()) == 3, "the model has gone, its name's adapter is listed")
    assert await who("x") == ("m1", "mine")
    assert await who("y") == ("m2", "theirs")
    listed = [each.model_dump() for each in (await pool.openai().models.list()).data]
    assert [(each["id"], each["parent"]) for each in listed] == [("m1", None), ("m2", None), ("x", "m1")]
