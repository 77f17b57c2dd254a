"""Requests that wait: cold models, bounds, keep-alive, fallbacks, and a bus that comes and goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from openai import APIError, AsyncOpenAI

from broker.core.requests.admission import Limits
from broker.gateway.app import HttpOptions
from broker.gateway.gateway import GatewayOptions
from subjects import names
from subjects.codec import decode
from subjects.ids import Tenant
from subjects.messages import Failure, FailureKind, PoolModel, RequestStory, SlaClass
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.gateway_pool import Pool, Run, answer_hello, open_pool, record

QUICK = HttpOptions(sse_open_after_s=0.2, keep_alive_s=0.1)
HI: Any = [{"role": "user", "content": "Hi"}]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_pool(shared_nats_server: NatsServer) -> AsyncIterator[Pool]:
    """One gateway that opens streams and sends keep-alive comments early."""
    async with open_pool(shared_nats_server.url, http=QUICK) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def pool(running_pool: Pool) -> AsyncIterator[Pool]:
    """The same gateway for each test, with nothing left of the one before."""
    yield running_pool
    await running_pool.clear()


async def test_a_cold_model_holds_its_requests(pool: Pool) -> None:
    """Requests for a model without replicas wait, the telemetry says so at once, and a replica answers all (ING-9, B3)."""
    model = record()
    await pool.register(model)
    waiting = [asyncio.ensure_future(pool.chat(model.name)) for _ in range(3)]
    await until(
        lambda: any(
            entry.deployment == model.deployment and entry.waiting == 3 for one in pool.telemetry for entry in one.demand
        ),
        "the telemetry has three waiting",
    )
    assert not any(task.done() for task in waiting)
    await pool.replica(model)
    assert [response.status_code for response in await asyncio.gather(*waiting)] == [200, 200, 200]
    await until(
        lambda: sum(entry.finished for one in pool.telemetry for entry in one.demand) == 3, "three finished in the telemetry"
    )
    assert sum(entry.arrived for one in pool.telemetry for entry in one.demand) == 3


async def test_what_became_of_a_request_is_told_by_its_id(pool: Pool) -> None:
    """While it waits and after its end: waits, replica, tokens, status, and nothing of what was said (SCH-11)."""
    model = record()
    await pool.register(model)
    prompt = "a prompt that nobody else may read"
    answer = asyncio.ensure_future(pool.chat(model.name, messages=[{"role": "user", "content": prompt}]))

    async def story(request: str) -> RequestStory:
        payload = await pool.bus.request(names.why(pool.gateway.ingress), request.encode(), timeout_s=5.0)
        assert prompt.encode() not in payload
        return decode(payload, RequestStory)

    await until(lambda: list(pool.gateway._live), "the request waits")
    (request,) = pool.gateway._live
    waits = await story(request)
    assert (waits.state, waits.model, waits.attempts, waits.status) == ("waiting", model.name, (), 0)
    replica = await pool.replica(model)
    assert (await answer).headers["x-carpool-request-id"] == request
    told = await story(request)
    (attempt,) = told.attempts
    assert (told.state, told.status, attempt.replica, attempt.lost) == ("ended", 200, replica.id, False)
    assert told.output_tokens and told.first_output_s is not None and attempt.waited_s <= told.first_output_s <= told.age_s
    for unknown in ("nobody-1", "", "a b"):
        assert not (await story(unknown)).known


async def test_comments_flow_while_a_model_wakes(pool: Pool) -> None:
    """The stream opens after the configured time and comments keep it alive; SDKs still read the answer (A9)."""
    model = record()
    await pool.register(model)
    async with pool.http.stream(
        "POST", "/v1/chat/completions", json={"model": model.name, "messages": HI, "stream": True}
    ) as response:
        assert (response.status_code, response.headers["x-accel-buffering"]) == (200, "no")
        lines = response.aiter_lines()
        comments = [line for line in [await anext(lines) for _ in range(6)] if line]
        assert comments == [": keep-alive"] * 3
        await pool.replica(model)
        rest = [line async for line in lines if line and not line.startswith(":")]
    assert rest[-1] == "data: [DONE]" and "Hello" in "".join(rest)


async def test_the_sdk_reads_past_comments(pool: Pool) -> None:
    """OpenAI's client sees the chunks only (A9)."""
    model = record()
    await pool.register(model)

    async def ask(client: AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model=model.name, messages=HI, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    answer = asyncio.ensure_future(ask(pool.openai()))
    await asyncio.sleep(0.5)
    await pool.replica(model)
    assert await answer == "Hello world"


async def test_an_error_after_the_stream_opened_is_framed(pool: Pool) -> None:
    """Once comments flowed, even an engine's 400 comes as an event, and the SDK raises (A6, A7)."""
    bad = Failure(kind=FailureKind.BAD_REQUEST, message="bad schema", status=400, code="bad")

    async def refuses_late(run: Run) -> None:
        await asyncio.sleep(0.5)
        await run.end(failure=bad)

    model = record()
    await pool.register(model)
    await pool.replica(model, refuses_late)
    stream = await pool.openai().chat.completions.create(model=model.name, messages=HI, stream=True)
    with pytest.raises(APIError, match="bad schema"):
        assert [chunk async for chunk in stream] == []


async def test_no_capacity_is_503_your_limit_is_429(shared_nats_server: NatsServer) -> None:
    """A full queue and a full gateway are 503, a tenant's own bound is 429; each says when to come back (ING-9, G3, G5)."""
    limits = Limits(tenant_in_flight_max=3, in_flight_max=4, tenant_in_flight_max_of={Tenant("x"): 1})
    async with open_pool(shared_nats_server.url, gateway=GatewayOptions(limits=limits)) as pool:
        narrow, wide = record(queue_requests_max=1), record()
        await pool.register(narrow, wide)
        held = [asyncio.ensure_future(pool.chat(narrow.name))]
        await until(lambda: len(pool.tickets) == 1, "one waits")
        full = await pool.chat(narrow.name)
        assert (full.status_code, full.json()["error"]["code"]) == (503, "queue_full")
        assert int(full.headers["retry-after"]) >= 1
        held += [asyncio.ensure_future(pool.chat(wide.name)) for _ in range(2)]
        await until(lambda: len(pool.tickets) == 3, "three wait")
        yours = await pool.chat(wide.name)
        assert (yours.status_code, yours.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(yours.headers["retry-after"]) >= 1
        await pool.replica(narrow)
        await pool.replica(wide)
        assert [response.status_code for response in await asyncio.gather(*held)] == [200] * 3
        assert len(pool.tickets) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_nobody_waits_longer_than_the_bound(shared_nats_server: NatsServer, stream: bool) -> None:
    """After the model's bound a waiter gets 503 with Retry-After (G3)."""
    async with open_pool(shared_nats_server.url) as pool:
        model = record(max_wait_s=0.3)
        await pool.register(model)
        response = await pool.chat(model.name, stream=stream)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["message"]


async def test_a_deadline_of_the_clients_own(pool: Pool) -> None:
    """``X-Timeout-S`` ends a request that is neither waiting too long nor finished."""

    async def thinks(run: Run) -> None:
        await asyncio.Event().wait()

    model = record()
    await pool.register(model)
    replica = await pool.replica(model, thinks)
    body = {"model": model.name, "messages": HI}
    response = await pool.http.post("/v1/chat/completions", json=body, headers={"x-timeout-s": "0.5"})
    assert response.status_code == 504
    await until(lambda: replica.runs[0].cancelled_by, "the replica stops")


async def test_a_model_degrades_to_its_fallback(pool: Pool) -> None:
    """Beyond its waiting bound, or when it can never fit, a request goes to the declared fallback and says so (ING-8)."""
    small = record()
    large = record(fallback=small.name, max_wait_s=0.3)
    await pool.register(small, large)
    await pool.replica(small)
    waited = await pool.chat(large.name)
    assert waited.status_code == 200, waited.text
    assert waited.headers["x-carpool-degraded-from"] == large.name
    assert waited.headers["x-carpool-model"] == waited.json()["model"] == small.name
    refusal = PoolModel(
        model_hash=large.model_hash, deployment=large.deployment, name=large.name, refusal="needs 9 GiB of 4", permanent=True
    )
    await pool.publish_digest(models=[refusal])
    at_once = await pool.chat(large.name)
    assert (at_once.status_code, at_once.headers["x-carpool-degraded-from"]) == (200, large.name)


async def test_a_fallback_that_fails_in_an_unforeseen_way_ends_the_request(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request between two models belongs to nobody's core: it ends all the same, with the first model's refusal."""
    small = record()
    large = record(fallback=small.name, max_wait_s=0.3)
    await pool.register(small, large)
    profile = pool.gateway._profile

    async def fails_for_small(ask: Any, body: Any, model: Any, arrived_s: float) -> Any:
        if model.name == small.name:
            raise KeyError(model.name)
        return await profile(ask, body, model, arrived_s)

    monkeypatch.setattr(pool.gateway, "_profile", fails_for_small)
    response = await pool.chat(large.name)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_capacity")


@pytest.mark.parametrize(("permanent", "retry_after_s"), [(True, 600), (False, 7)])
async def test_what_cannot_come_up_fails_at_once(pool: Pool, permanent: bool, retry_after_s: int) -> None:
    """A model that never fits, or whose loads fail, is 503 with the reason, for new and for waiting requests (B8, B9)."""
    model = record()
    await pool.register(model)
    waiting = asyncio.ensure_future(pool.chat(model.name))
    await until(lambda: pool.tickets, "one waits")
    word = PoolModel(
        model_hash=model.model_hash,
        deployment=model.deployment,
        name=model.name,
        refusal="needs 9 GiB, has 4",
        permanent=permanent,
        retry_after_s=7,
    )
    await pool.publish_digest(models=[word])
    for response in (await pool.chat(model.name), await waiting):
        assert response.status_code == 503
        assert "needs 9 GiB, has 4" in response.json()["error"]["message"]
    new = await pool.chat(model.name)
    assert int(new.headers["retry-after"]) == retry_after_s
    assert new.json()["error"]["code"] == ("model_cannot_fit" if permanent else "model_unavailable")
    await pool.publish_digest()


async def test_a_lost_replica_is_replaced_before_the_first_token(pool: Pool) -> None:
    """A replica that falls silent or forgets a request before its first token: another one answers, attempt 2 (F7)."""

    async def forgets(run: Run) -> None:
        run.cancelled_by = "amnesia"

    model = record()
    await pool.register(model)
    first = await pool.replica(model, forgets, slots=1)
    answer = asyncio.ensure_future(pool.chat(model.name))
    await until(lambda: first.runs, "the first replica has it")
    await pool.replica(model)
    response = await answer
    assert (response.status_code, response.headers["x-carpool-attempt"]) == (200, "2")
    for run in first.runs:
        run.ended.set()


async def test_a_broken_tokenizer_hurts_its_model_only(pool: Pool) -> None:
    """503 for the model whose tokenizer does not load, 200 for the others; no path is told."""
    broken = record(tokenizer_source="/nowhere/at/all")
    good = record()
    await pool.register(broken, good)
    await pool.replica(good)
    response = await pool.chat(broken.name)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "tokenizer_broken")
    assert "nowhere" not in response.text and int(response.headers["retry-after"]) >= 1
    assert (await pool.chat(good.name)).status_code == 200


async def test_a_changed_record_is_followed_and_a_broken_one_ignored(pool: Pool) -> None:
    """The registry's changes count at once; a record that cannot be read leaves the last good one (N2)."""
    model = record(aliases=("old",))
    await pool.register(model)
    await pool.replica(model)
    await pool.bus.kv_put("carpool-models", model.name, b"\xc1 no record")
    assert (await pool.chat("old")).status_code == 200
    changed = record(model.name, model_hash=model.model_hash, aliases=("new",), revision=2)
    await pool.register(changed)
    assert [(await pool.chat(name)).status_code for name in ("new", "old")] == [200, 404]
    await pool.bus.kv_delete("carpool-models", model.name)
    known = pool.gateway.model_states
    await until(lambda: all(view.name != model.name for view, _ in known()), "the model is gone")
    assert (await pool.chat(model.name)).status_code == 404


# ------------------------------------------------------------------------------------------------------------------ auto


async def test_auto_picks_by_the_profile(nats_server: NatsServer) -> None:
    """Context that fits, tags, quality, then cost, ready ones on a tie; the answer names the model (ING-5)."""
    async with open_pool(nats_server.url) as pool:
        small = record("small", max_context_len=300, cost_weight=1.0)
        large = record("large", max_context_len=4000, cost_weight=5.0, tags=("tools", "vision"))
        twin = record("twin", max_context_len=300, cost_weight=1.0)
        await pool.register(small, large, twin)
        for one in (small, large, twin):
            await pool.replica(one)

        async def chosen(headers: dict[str, str] | None = None, **fields: Any) -> str:
            body = {"model": "auto", "messages": HI} | fields
            response = await pool.http.post("/v1/chat/completions", json=body, headers=headers)
            assert response.status_code == 200, response.text
            name = response.headers["x-carpool-model"]
            assert response.json()["model"] == name
            return name

        assert await chosen() == "small"
        await pool.publish_digest(ready=[twin])
        assert await chosen() == "twin"
        assert await chosen(messages=[{"role": "user", "content": "long words " * 200}]) == "large"
        assert await chosen(max_tokens=1000) == "large"
        assert await chosen(tools=[{"type": "function", "function": {"name": "f"}}]) == "large"
        assert await chosen({"X-Carpool-Tags": "vision"}) == "large"
        nothing = await pool.http.post(
            "/v1/chat/completions", json={"model": "auto", "messages": HI}, headers={"X-Carpool-Tags": "sings"}
        )
        assert (nothing.status_code, nothing.json()["error"]["code"]) == (404, "no_model_fits")
        too_long = await pool.chat("auto", max_tokens=100_000)
        assert (too_long.status_code, too_long.json()["error"]["code"]) == (404, "no_model_fits")


async def test_the_profile_in_the_ticket(pool: Pool) -> None:
    """What the pool learns of a request: numbers and ids, and nothing of its text (ING-3, ING-4, BUS-2)."""
    model = record()
    await pool.register(model)
    replica = await pool.replica(model, answer_hello, classes=list(SlaClass))
    headers = {"X-Business-Id": "shop", "X-Chain-Id": "c-1", "X-Environment": "test", "X-Request-Kind": "load-test"}
    body = {
        "model": model.name,
        "messages": [{"role": "user", "content": "canary " * 20}],
        "max_tokens": 33,
        "temperature": 0.5,
        "stop": ["END", "FIN"],
    }
    assert (await pool.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    profile = replica.tickets[0].profile
    assert (profile.max_tokens, profile.temperature, profile.stop_count) == (33, 0.5, 2)
    assert (profile.business_id, profile.chain_id, profile.environment) == ("shop", "c-1", "test")
    assert (profile.kind.value, profile.tenant, profile.deployment) == ("load-test", "default", model.deployment)
    assert profile.input_tokens > 20 and profile.kv_pages_needed >= 1
    assert "canary" not in repr(replica.tickets[0])


# ------------------------------------------------------------------------------------------------------------ the bus


async def test_without_a_bus_the_gateway_answers_and_recovers(stopped_nats_server: NatsServer) -> None:
    """Started before its bus: alive, not ready, 503 at once; ready and serving when the bus appears (L3)."""
    async with open_pool(stopped_nats_server.url, wait_for_bus=False) as pool:
        assert (await pool.http.get("/health")).json() == {"status": "alive", "bus": "lost"}
        assert (await pool.http.get("/ready")).status_code == 503
        response = await asyncio.wait_for(pool.chat("any"), 5)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "bus_unavailable")
        assert int(response.headers["retry-after"]) >= 1
        stopped_nats_server.start()
        await until(lambda: pool.bus.connected and not pool.gateway.unready_reason(), "the gateway is ready")
        model = record()
        await pool.register(model)
        await pool.replica(model)
        assert (await pool.chat(model.name)).status_code == 200
        assert (await pool.http.get("/ready")).status_code == 200


async def test_waiting_requests_survive_a_restart_of_the_bus(nats_server: NatsServer) -> None:
    """kill -9 of the bus erases the work-queue; what waits is published again and answered once (REL-3, L1)."""
    async with open_pool(nats_server.url) as pool:
        model = record()
        await pool.register(model)
        waiting = [asyncio.ensure_future(pool.chat(model.name)) for _ in range(5)]
        await until(lambda: len(pool.tickets) == 5, "five wait")
        nats_server.restart()
        await until(lambda: pool.bus.connected and pool.gateway.bus_connected, "all are connected again")
        replica = await pool.replica(model)
        assert [response.status_code for response in await asyncio.gather(*waiting)] == [200] * 5
        assert len({run.ticket.request for run in replica.runs}) == len(replica.runs) == 5


async def test_a_running_stream_survives_a_restart_of_the_bus(nats_server: NatsServer) -> None:
    """A stream goes on after the bus came back, without a gap or a repeat (REL-3)."""
    go_on = asyncio.Event()

    async def pauses(run: Run) -> None:
        await run.say("one ")
        await go_on.wait()
        await run.say("two ")
        await run.end()

    async with open_pool(nats_server.url) as pool:
        model = record()
        await pool.register(model)
        replica = await pool.replica(model, pauses)
        answer = asyncio.ensure_future(pool.chat(model.name, stream=True))
        await until(lambda: replica.runs and replica.runs[0].sent, "it has begun")
        nats_server.kill()
        await until(lambda: not pool.bus.connected, "the loss is noticed")
        go_on.set()
        await asyncio.sleep(0.3)
        nats_server.start()
        response = await answer
        events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "one two "
