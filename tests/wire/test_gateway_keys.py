"""API keys and tenants (SEC-1, O1, H5, H6)."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from broker.gateway.keys import ApiKeys, Caller
from broker.gateway.main import GatewayConfig, run_gateway
from broker.http.listeners import is_loopback
from subjects.errors import ApiError, ConfigError
from subjects.ids import Tenant
from subjects.messages import SlaClass
from tests.servers import NatsServer
from tests.wire.gateway_pool import open_pool, record

KEY_A = "sk-canary-aaaaaaaaaaaa"
KEY_B = "sk-canary-bbbbbbbbbbbb"


async def test_every_route_but_health_needs_a_key(shared_nats_server: NatsServer) -> None:
    """Without a key, or with a wrong one, every path and method is 401 except the two that tell nothing (O1)."""
    keys = ApiKeys.of({KEY_A: Caller(Tenant("a"))})
    async with open_pool(shared_nats_server.url, keys=keys) as pool:
        model = record()
        await pool.register(model)
        paths = ["/v1/models", f"/v1/models/{model.name}", "/metrics", "/pool", "/v1/chat/completions", "/v1/completions"]
        paths += ["/v1/embeddings", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/openapi.json"]
        paths += [
            "/",
            "/nowhere",
            "//v1/models",
            "/v1/../v1/models",
            "/%76%31/models",
            "/health/",
            "/Health",
            "/health/../metrics",
        ]
        for path in paths:
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT"):
                for headers in ({}, {"authorization": "Bearer sk-wrong-canary"}, {"authorization": f"Basic {KEY_A}"}):
                    response = await pool.http.request(method, f"{pool.server.url}{path}", headers=headers)
                    assert response.status_code == 401, (method, path)
                    assert "canary" not in response.text and model.name not in response.text
        assert [(await pool.http.get(path)).status_code for path in ("/health", "/ready")] == [200, 200]
        assert [one.id for one in (await pool.openai(api_key=KEY_A).models.list()).data] == [model.name]


async def test_a_key_decides_tenant_class_and_salt(shared_nats_server: NatsServer) -> None:
    """The ticket carries the key's tenant and class; two tenants never share cached prefixes, one tenant does (O3)."""
    keys = ApiKeys.of({KEY_A: Caller(Tenant("a"), SlaClass.GOLD), KEY_B: Caller(Tenant("b"))})
    async with open_pool(shared_nats_server.url, keys=keys) as pool:
        model = record(sla_class=SlaClass.BRONZE)
        await pool.register(model)
        replica = await pool.replica(model, classes=[SlaClass.GOLD, SlaClass.BRONZE])
        for key in (KEY_A, KEY_B, KEY_A):
            client = pool.openai(api_key=key)
            await client.chat.completions.create(model=model.name, messages=[{"role": "user", "content": "Hi"}])
        about = [(ticket.profile.tenant, ticket.profile.sla_class) for ticket in replica.tickets]
        assert about == [("a", SlaClass.GOLD), ("b", SlaClass.BRONZE), ("a", SlaClass.GOLD)]
        salts = [run.grant.cache_salt for run in replica.runs]
        assert salts[0] == salts[2] != salts[1]
        heads = [ticket.profile.prefix_head for ticket in replica.tickets]
        assert heads[0] == heads[2]


def test_a_key_file(tmp_path: Path) -> None:
    """Plain keys and digests of keys; the class is optional."""
    path = tmp_path / "keys.yaml"
    digest = hashlib.sha256(KEY_B.encode()).hexdigest()
    path.write_text(f"keys:\n- {{key: {KEY_A}, tenant: a, class: gold}}\n- {{sha256: {digest}, tenant: b}}\n")
    keys = ApiKeys.load(path)
    assert keys.caller(f"Bearer {KEY_A}") == Caller(Tenant("a"), SlaClass.GOLD)
    assert keys.caller(f"bearer {KEY_B}") == Caller(Tenant("b"))
    for wrong in ("", "Bearer", "Bearer  ", KEY_A, f"Bearer {KEY_A}x", f"Bearer {KEY_A[:-1]}", f"Bearer {digest}"):
        with pytest.raises(ApiError) as caught:
            keys.caller(wrong)
        assert caught.value.status == 401 and "canary" not in caught.value.message


def test_trust_domains_of_a_key_file(tmp_path: Path) -> None:
    """By tenant; their names are never a tenant's own, so that a tenant called as a domain is not in it (O3)."""
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys: [{{key: {KEY_A}, tenant: a}}]\ntrust_domains: {{a: [b, c], lonely: [d]}}\n")
    assert ApiKeys.load(path).trust_domains == {"b": "domain:a", "c": "domain:a", "d": "domain:lonely"}
    path.write_text(f"keys: [{{key: {KEY_A}, tenant: a}}]\n")
    assert ApiKeys.load(path).trust_domains == {}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "keys"),
        (f"keys: [{{key: {KEY_A}, tenant: a}}]\ntrust_domains: {{x: [a], y: [b, a]}}", "trust_domains.y[1]"),
        (f"keys: [{{key: {KEY_A}, tenant: a}}]\ntrust_domains: {{x: []}}", "trust_domains"),
        (f"keys: [{{key: {KEY_A}, tenant: a}}]\ntrust_domains: {{x: a}}", "trust_domains"),
        (f"keys: [{{key: {KEY_A}, tenant: a}}]\ntrust_domains: {{'x:y': [a]}}", "trust_domains"),
        ("[", "YAML"),
        ("keys: []", "keys"),
        ("keys: [{tenant: a}]", "keys[0]"),
        (f"keys: [{{key: {KEY_A}}}]", "keys"),
        (f"keys: [{{key: {KEY_A}, sha256: {'0' * 64}, tenant: a}}]", "keys[0]"),
        ("keys: [{key: short-canary, tenant: a}]", "keys[0].key"),
        (f"keys: [{{key: {KEY_A}, tenant: 'a b'}}]", "keys"),
        (f'keys: [{{key: {KEY_A}, tenant: "a\\n"}}]', "keys"),
        (f"keys: [{{key: {KEY_A}, tenant: a, class: platinum}}]", "keys"),
        (f"keys: [{{key: {KEY_A}, tenant: a, klass: gold}}]", "keys"),
        (f"keys: [{{key: {KEY_A}, tenant: a}}, {{key: {KEY_A}, tenant: b}}]", "keys[1]"),
        ("keys: [{sha256: canary-not-hex, tenant: a}]", "keys[0].sha256"),
    ],
)
def test_a_wrong_key_file_is_told_in_one_line(tmp_path: Path, text: str, field: str) -> None:
    """File and field are named, and never a key (H5)."""
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        ApiKeys.load(path)
    message = str(caught.value)
    assert str(path) in message and field in message and "\n" not in message
    assert "canary" not in message.replace(str(path), "")


def test_a_missing_key_file_is_told(tmp_path: Path) -> None:
    """One line with the file."""
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        ApiKeys.load(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("10.0.0.1", False)],
)
def test_what_is_loopback(host: str, expected: bool) -> None:
    """Only an address that nobody else can reach counts."""
    assert is_loopback(host) is expected


async def test_an_open_endpoint_without_keys_is_refused() -> None:
    """Binding to other than loopback needs keys or an explicit flag (H6)."""
    config = GatewayConfig(nats_urls=("nats://127.0.0.1:1",), host="0.0.0.0", port=0)
    with pytest.raises(ConfigError, match="--allow-open"):
        await asyncio.wait_for(run_gateway(config), 10)


async def test_a_taken_port_is_told_in_one_line(shared_nats_server: NatsServer) -> None:
    """The flag, the address and what to do."""
    async with open_pool(shared_nats_server.url) as pool:
        config = GatewayConfig(nats_urls=(shared_nats_server.url,), port=pool.server.port)
        with pytest.raises(ConfigError, match=f"--port {pool.server.port}: cannot listen"):
            await asyncio.wait_for(run_gateway(config), 10)
