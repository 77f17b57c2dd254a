"""Requests find their prefix on a real bus, and only that of their own trust domain (KVC-6, PAINS F8, O3, O4)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import structlog

from broker.core.requests.affinity import reuse_costs
from broker.gateway.gateway import GatewayOptions
from broker.gateway.keys import ApiKeys, Caller
from kvcache.core.identity import SALT_BYTES
from kvcache.core.prefix_index import NOBODY
from kvcache.wire import index_sync
from profiles.blocks import tenant_salt
from subjects import names
from subjects.bus import BusMessage
from subjects.codec import decode, encode
from subjects.ids import Tenant, WorkerId
from subjects.messages import Hand, InferRequest, KvIndexed, ModelRecord, RequestStory, SlaClass, StepCosts
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.gateway_pool import Pool, Run, answer_hello, open_pool, record
from tests.wire.kv_nodes import USE, NodeProcess, rows
from tests.wire.kv_pool import HandedReplica, ScriptedNode, hashes_for, spans_for, tell_pool

AT_A, AT_B = WorkerId("w-a"), WorkerId("w-b")
KEYS = {"a": "sk-affinity-aaaaaaaa", "b": "sk-affinity-bbbbbbbb", "c": "sk-affinity-cccccccc"}
DOMAINS = {Tenant("a"): "domain:friends", Tenant("b"): "domain:friends"}
DOCUMENT = "A carpool is a car that people share. " * 70
"""Some 660 tokens: two spans."""
KEEP = "keep"


@pytest.fixture(autouse=True)
def snapshots_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pause that spreads the questions of many gateways."""
    monkeypatch.setattr(index_sync, "SNAPSHOT_PAUSE_S_MAX", 0.0)


@dataclass
class Two:
    """Two linked replicas on two workers, each with a request that runs on, ``a`` with more room; and their nodes."""

    pool: Pool
    model: ModelRecord
    a: HandedReplica
    b: HandedReplica
    node_a: ScriptedNode
    node_b: ScriptedNode
    kept_on: asyncio.Event

    async def ask(self, content: str = DOCUMENT, tenant: str = "a", **fields: Any) -> httpx.Response:
        """A chat of one message."""
        body = {"model": self.model.name, "messages": [{"role": "user", "content": content}]} | fields
        response = await self.pool.http.post(
            "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEYS[tenant]}"}
        )
        assert response.status_code == 200, response.text
        return response

    async def answers(self, content: str = DOCUMENT, tenant: str = "a", **fields: Any) -> str:
        """Which of the two answers."""
        return await self.who(await self.ask(content, tenant, **fields))

    async def who(self, response: httpx.Response) -> str:
        """Which of the two answered; its slot is free again when this returns."""
        replica = self.a if response.headers["x-carpool-replica"] == self.a.id else self.b
        await until(lambda: len(replica.running) == 1, "its slot is free again")
        return "a" if replica is self.a else "b"

    async def room(self, replica: HandedReplica, slots: int) -> None:
        """It says so to the gateway."""
        replica.slots = slots
        core = self.pool.gateway._shell._core
        link = core._links.links[replica.id]
        await until(lambda: link.room is not None and link.room.slots == slots, "the gateway knows its room")

    def holders(self, content: str = DOCUMENT, domain: str = "domain:friends") -> dict[str, int]:
        """What the gateway believes of each engine."""
        found = self.pool.gateway.prefixes.holders(self.model.model_hash, spans_for(self.model, content, domain))
        return {"a" if replica == self.a.id else "b": spans for replica, spans in found.replicas.items()}


@asynccontextmanager
async def two_replicas(nats_url: str) -> AsyncIterator[Two]:
    """A pool in which both are linked, so that requests are handed to them."""
    kept_on = asyncio.Event()

    async def script(run: Run) -> None:
        if run.body["messages"][0]["content"] == KEEP:
            await kept_on.wait()
        await answer_hello(run)

    keys = ApiKeys.of({key: Caller(Tenant(tenant)) for tenant, key in KEYS.items()})
    options = GatewayOptions(trust_domains=DOMAINS)
    async with open_pool(nats_url, keys=keys, gateway=options) as pool:
        model = record(kv_bytes=1 << 24)
        await pool.register(model)
        a, b = (HandedReplica(pool.bus, model, script, slots=1, classes=[SlaClass.SILVER]) for _ in range(2))
        nodes = [await ScriptedNode(pool.bus, worker, model).start() for worker in (AT_A, AT_B)]
        two = Two(pool, model, a, b, nodes[0], nodes[1], kept_on)
        await tell_pool(pool, (a.id, AT_A), (b.id, AT_B), model=model)
        kept = []
        for replica in (a, b):
            await replica.start()
            kept.append(asyncio.ensure_future(two.ask(KEEP)))
            await until(lambda replica=replica: bool(replica.runs), "a request runs there")  # type: ignore[misc]
        await two.room(a, 4)
        await two.room(b, 2)
        try:
            yield two
        finally:
            kept_on.set()
            await asyncio.gather(*kept, return_exceptions=True)
            for replica in (a, b):
                await replica.stop()
            for node in nodes:
                await node.stop()


async def test_a_request_finds_its_prefix_as_long_as_it_is_there(shared_nats_server: NatsServer) -> None:
    """Most room, then the holder, then not the holder when it is full, nor when its worker's node starts anew (F8)."""
    async with two_replicas(shared_nats_server.url) as two:
        assert await two.answers() == "a"
        await two.node_b.say(spans_for(two.model, DOCUMENT, "domain:friends"), two.b.id)
        await until(lambda: two.holders() == {"b": 2}, "the gateway knows who holds it")
        response = await two.ask()
        assert response.headers["x-carpool-prefix-tokens"] == "512"
        assert await two.who(response) == "b"
        assert await two.answers("Something else. " * 200) == "a"
        text = two.pool.gateway.metrics_text().decode()
        assert f'carpool_prefix_tokens_total{{model="{two.model.name}"}} 512.0' in text
        assert f'carpool_prefix_requests_total{{model="{two.model.name}"}} 1.0' in text
        story = await two.pool.bus.request(
            names.why(two.pool.gateway.ingress), response.headers["x-request-id"].encode(), timeout_s=5
        )
        assert [attempt.prefix_tokens for attempt in decode_story(story).attempts] == [512]

        await two.room(two.b, 0)
        assert await two.answers() == "a"
        await two.room(two.b, 2)
        assert await two.answers() == "b"

        two.node_b.name, two.node_b.sequence, two.node_b.holds = "node-2", 0, {}
        await two.node_b.say()
        await until(lambda: two.holders() == {}, "nothing is believed of it")
        assert await two.answers() == "a"


async def test_a_reset_engine_draws_no_requests(shared_nats_server: NatsServer) -> None:
    """The node's own tiers still draw them to its worker; without the node's word nothing does (F8)."""
    async with two_replicas(shared_nats_server.url) as two:
        await two.node_b.say(spans_for(two.model, DOCUMENT, "domain:friends"), two.b.id)
        await until(lambda: two.holders() == {"b": 2})
        await two.node_b.say(emptied=[two.b.id])
        await until(lambda: two.holders() == {})
        assert await two.answers() == "b"
        two.pool.gateway.prefixes.forget_worker(AT_B)
        assert await two.answers() == "a"


async def test_what_was_missed_is_read_again(shared_nats_server: NatsServer) -> None:
    """A node that is met late, or of which a batch was lost, tells all it holds, page by page."""
    async with two_replicas(shared_nats_server.url) as two:
        spans = spans_for(two.model, DOCUMENT * 3, "domain:friends")
        node = two.node_b
        await node.say(spans, two.b.id)
        await until(lambda: two.pool.gateway.prefixes.wanted_page(AT_B) is None and node.asked)
        pages = -(-len(spans) // node.page_spans)
        assert [ask.cursor for ask in node.asked] == [b"", *(str(n * node.page_spans).encode() for n in range(1, pages))]
        assert {str(ask.worker) for ask in node.asked} == {str(two.pool.gateway.ingress)}
        node.asked.clear()
        node.sequence += 1
        await node.say()
        await until(lambda: len(node.asked) == pages)
        await until(lambda: two.holders(DOCUMENT * 3) == {"b": len(spans)})


async def test_what_is_no_news_of_a_node_is_discarded(shared_nats_server: NatsServer) -> None:
    """Bytes that are none, and a node that speaks for another worker (O2)."""
    async with two_replicas(shared_nats_server.url) as two:
        await two.pool.bus.publish(names.kv_index(AT_A), b"\xc1")
        await two.pool.bus.publish(names.kv_index(AT_A), encode(KvIndexed(worker=AT_B, node="n", sequence=1)))
        discarded = two.pool.gateway.metrics.discarded.labels("kv-indexed")
        await until(lambda: discarded._value.get() == 2)
        assert two.pool.gateway.prefixes.wanting() == []


async def test_only_a_trust_domain_shares_prefixes(shared_nats_server: NatsServer) -> None:
    """What ``a`` computed is found for ``a`` and for ``b`` of the same domain, over HTTP and NATS, never for ``c``; the salt
    that goes to the engine is that of the hashes, whatever a body says (O3)."""
    async with two_replicas(shared_nats_server.url) as two:
        await two.node_b.say(spans_for(two.model, DOCUMENT, "domain:friends"), two.b.id)
        await until(lambda: two.holders() == {"b": 2})
        for tenant, expected in (("a", "b"), ("b", "b"), ("c", "a")):
            assert await two.answers(tenant=tenant, cache_salt="of-another-tenant") == expected, tenant
        body = {"model": two.model.name, "messages": [{"role": "user", "content": DOCUMENT}], "cache_salt": "theirs"}
        for tenant, replica in (("b", two.b), ("c", two.a)):
            before = len(replica.hands)
            reply = f"_INBOX_{tenant}.affinity"
            subscription = await two.pool.bus.subscribe(reply, lambda message: None)
            request = encode(InferRequest(body=json.dumps(body).encode()))
            await two.pool.bus._connection.publish(names.infer(tenant), request, reply=reply)
            await until(lambda n=before, r=replica: len(r.hands) == n + 1, tenant)  # type: ignore[misc]
            await until(lambda r=replica: len(r.running) == 1)  # type: ignore[misc]
            await subscription.stop()
        hands = {tenant: salts(two, tenant) for tenant in KEYS}
        assert hands["a"] == hands["b"] and len(hands["a"]) == 1
        assert len(hands["c"]) == 1 and hands["c"] != hands["a"]
        bodies = [json.loads(hand.grant.body) for hand in (*two.a.hands, *two.b.hands)]
        assert len(bodies) == 5 and not any("cache_salt" in each for each in bodies)


async def test_a_service_that_keeps_no_kv_keeps_none_in_a_shared_replica(shared_nats_server: NatsServer) -> None:
    """Another service of the same files and engine may keep its own. What goes to the engine is no salt that the tiers take,
    apart by tenant all the same, and no prefix is looked for (O3)."""
    async with two_replicas(shared_nats_server.url) as two:
        await two.pool.register(msgspec.structs.replace(two.model, name="quiet", kv_reuse=False))
        await two.node_b.say(spans_for(two.model, DOCUMENT, "domain:friends"), two.b.id)
        await until(lambda: two.holders() == {"b": 2})
        assert [await two.answers(tenant=tenant, model="quiet") for tenant in ("a", "c")] == ["a", "a"]
        quiet = [hand.grant.cache_salt for hand in two.a.hands]
        assert len(set(quiet)) == 2 and all(len(bytes.fromhex(salt)) == SALT_BYTES + 1 for salt in quiet)
        assert await two.answers(tenant="a") == "b"
        assert len(bytes.fromhex(two.b.hands[-1].grant.cache_salt)) == SALT_BYTES


def salts(two: Two, tenant: str) -> set[tuple[str, bytes]]:
    """With what a tenant's requests for the document were salted: what the engine got, and what the hashes came to."""
    hands: list[Hand] = [*two.a.hands, *two.b.hands]
    return {(hand.grant.cache_salt, hand.profile.prefix_head) for hand in hands if hand.profile.tenant == tenant}


async def test_other_ways_in_take_no_salt_from_a_body(shared_nats_server: NatsServer) -> None:
    """The translated APIs refuse it, and what they make carries the tenant's salt like any other request (O3)."""
    async with two_replicas(shared_nats_server.url) as two:
        headers = {"authorization": f"Bearer {KEYS['c']}", "x-api-key": KEYS["c"]}
        messages = {"model": two.model.name, "max_tokens": 9, "messages": [{"role": "user", "content": DOCUMENT}]}
        responses = {"model": two.model.name, "input": DOCUMENT, "store": False}
        for path, body in (("/v1/messages", messages), ("/v1/responses", responses)):
            salted = await two.pool.http.post(path, json=body | {"cache_salt": "theirs"}, headers=headers)
            assert salted.status_code == 400 and "cache_salt" in salted.text, path
            assert (await two.pool.http.post(path, json=body, headers=headers)).status_code == 200
        await two.ask(tenant="c")
        assert len(two.a.hands) == 3 and len({hand.grant.cache_salt for hand in two.a.hands}) == 1


async def test_nothing_of_a_prompt_is_told(shared_nats_server: NatsServer) -> None:
    """A canary in a prompt reaches its replica and nobody else: no subject, no ticket, no word to nodes, no log, no metric,
    no answer or error of another tenant (O4)."""
    canary = "canary-7f3a"
    document = f"{canary} {DOCUMENT}"
    async with two_replicas(shared_nats_server.url) as two:
        seen: list[BusMessage] = []
        subscription = await two.pool.bus.subscribe(f"{names.PREFIX}.>", seen.append)
        with structlog.testing.capture_logs() as lines:
            await two.node_b.say(spans_for(two.model, document, "domain:friends"), two.b.id)
            await until(lambda: two.holders(document) == {"b": 2})
            assert await two.answers(document) == "b"
            await two.room(two.b, 0)
            await two.room(two.a, 0)
            queued = asyncio.ensure_future(two.ask(document))
            await until(lambda: any(message.subject.startswith(f"{names.PREFIX}.req.") for message in seen))
            await two.room(two.a, 2)
            await queued
            others = [await two.ask(DOCUMENT, tenant="c"), await two.ask(document.replace(canary, "x"), tenant="b")]
        story = await two.pool.bus.request(names.why(two.pool.gateway.ingress), b"none", timeout_s=5)
        await subscription.stop()
        told = {message.subject for message in seen if canary.encode() in message.payload}
        assert told <= {names.run(two.b.id), names.run(two.a.id)} and names.run(two.b.id) in told
        assert not any(canary in message.subject for message in seen)
        elsewhere = [two.pool.gateway.metrics_text().decode(), str(lines), story.decode(errors="replace")]
        elsewhere += [response.text + str(response.headers) for response in others]
        assert not any(canary in text for text in elsewhere)
        tickets = [ticket for replica in (two.a, two.b) for ticket in replica.tickets]
        assert tickets and not any(canary.encode() in encode(ticket) for ticket in tickets)


def decode_story(payload: bytes) -> RequestStory:
    """The gateway's account of a request."""
    return decode(payload, RequestStory)


async def test_a_node_that_does_not_answer_is_asked_again(
    shared_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few times in one go, then after a pause, for as long as it speaks and has not told all; requests wait for none of
    it."""
    monkeypatch.setattr(index_sync, "RETRY_S", 0.2)
    monkeypatch.setattr(index_sync, "LOOK_EVERY_S", 0.05)
    async with two_replicas(shared_nats_server.url) as two:
        spans = spans_for(two.model, DOCUMENT, "domain:friends")
        await two.node_b.say(spans, two.b.id)
        await until(lambda: two.pool.gateway.prefixes.wanted_page(AT_B) is None)
        await two.node_b.stop()
        two.node_b.sequence += 1
        await two.node_b.say()
        sync = two.pool.gateway._kv_sync
        await until(lambda: AT_B not in sync._asking and two.pool.gateway.prefixes.wanting() == [AT_B], "it gave up once")
        assert two.holders() == {} and await two.answers() == "a"
        await two.node_b.start()
        await until(lambda: two.holders() == {"b": 2}, "it was asked again")


async def test_costs_that_were_measured_since_count(shared_nats_server: NatsServer) -> None:
    """The costs that the pool's digest tells are those by which reuse is weighed from then on."""
    async with open_pool(shared_nats_server.url) as pool:
        model = record()
        costs = StepCosts(prefill_token_s=0.5, step_const_s=1.0)
        found = [pool.gateway._reuse_costs(model, told) for told in (None, costs, costs)]
        assert found == [reuse_costs(model), reuse_costs(model, costs), reuse_costs(model, costs)]
        assert found[0] != found[1]


async def test_a_real_node_draws_requests_to_its_worker(shared_nats_server: NatsServer, tmp_path: Path) -> None:
    """What an engine gives to its worker's node is found by the next request of that domain; an engine that was reset is not
    believed to have it, its node is; a node that was killed and came back with nothing draws nothing (F8)."""
    async with two_replicas(shared_nats_server.url) as two:
        node = NodeProcess(tmp_path, AT_B, shared_nats_server.url)
        client = node.client(two.b.id, model_hash=two.model.model_hash)
        try:
            hashes = hashes_for(two.model, DOCUMENT, "domain:friends")
            salt = tenant_salt("domain:friends")
            assert await asyncio.to_thread(client.write, salt, b"", hashes, rows(hashes), USE) == len(hashes)
            await until(lambda: two.holders() == {"b": 2}, "the gateway knows who holds it")
            assert await two.answers() == "b"
            assert await two.answers(tenant="c") == "a"
            await asyncio.to_thread(client.emptied)
            await until(lambda: two.holders() == {}, "its engine has nothing any more")
            assert await two.answers() == "b"
            node.kill()
            node.start()
            prefixes, spans = two.pool.gateway.prefixes, spans_for(two.model, DOCUMENT, "domain:friends")
            await until(lambda: prefixes.holders(two.model.model_hash, spans) is NOBODY, "nothing is believed of it")
            assert await two.answers() == "a"
        finally:
            client.close()
            node.stop()
