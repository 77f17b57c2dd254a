"""``/openapi.json`` is true: what is described is answered, and what is answered is described (ING-1)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from starlette.routing import Route

from broker.api.openai_bodies import WITHHELD_FIELDS, ChatBody
from broker.gateway.app import OPEN_ROUTES
from broker.gateway.post_routes import POST_ROUTES
from tests.servers import NatsServer
from tests.wire.gateway_pool import Pool, open_pool, record

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(shared_nats_server: NatsServer) -> AsyncIterator[Pool]:
    """One gateway with one model and no replica."""
    async with open_pool(shared_nats_server.url) as pool:
        await pool.register(record("known"))
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def described(pool: Pool) -> dict[str, Any]:
    """The document as a client gets it."""
    response = await pool.http.get("/openapi.json")
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    document: dict[str, Any] = response.json()
    return document


async def test_every_route_answered_is_described_and_the_other_way_round(pool: Pool, described: dict[str, Any]) -> None:
    """The tables that requests are routed by hold exactly the paths and methods of the document."""
    answered = {(path, "post") for path in POST_ROUTES}
    for route in pool.app._rest.routes:
        assert isinstance(route, Route) and route.methods == {"GET", "HEAD"}
        answered.add((route.path.replace(":path}", "}"), "get"))
    assert {(path, method) for path, methods in described["paths"].items() for method in methods} == answered


async def test_described_routes_answer_with_described_statuses(pool: Pool, described: dict[str, Any]) -> None:
    """Each one over a real connection, with an empty body where it takes one; the other method is refused."""
    for path, methods in described["paths"].items():
        ((method, operation),) = methods.items()
        url = path.replace("{name}", "known")
        takes_body = "requestBody" in operation
        response = await pool.http.request(method, url, json={} if takes_body else None)
        assert str(response.status_code) in operation["responses"], (path, response.status_code)
        assert response.status_code == (400 if takes_body else 200), path
        kind = response.headers["content-type"].partition(";")[0]
        assert kind in operation["responses"][str(response.status_code)]["content"]
        other = await pool.http.request("get" if method == "post" else "post", url)
        assert other.status_code == 405 and other.headers["allow"] == method.upper()
        assert (operation["security"] == []) == (path in OPEN_ROUTES)


async def test_schemas_are_those_that_check_bodies(described: dict[str, Any]) -> None:
    """Each field of the struct, none of those that are taken out; every reference leads somewhere."""
    schemas = described["components"]["schemas"]
    fields = {field.encode_name for field in msgspec.structs.fields(ChatBody)}
    assert set(schemas["ChatBody"]["properties"]) == fields - set(WITHHELD_FIELDS)
    assert set(schemas["ChatBody"]["required"]) == {"model", "messages"}
    references = json.dumps(described).split('"$ref": "')[1:]
    assert {text.partition('"')[0] for text in references} <= {f"#/components/schemas/{name}" for name in schemas}


async def test_an_error_has_the_described_shape(pool: Pool, described: dict[str, Any]) -> None:
    """Exactly the keys of ``ErrorBody``; where the API is Anthropic's, of its own."""
    schemas = described["components"]["schemas"]
    for path, prefix in (("/v1/chat/completions", ""), ("/v1/responses", ""), ("/v1/messages", "Messages")):
        answer = (await pool.http.post(path, json={})).json()
        assert set(answer) == set(schemas[f"{prefix}ErrorBody"]["required"])
        assert set(answer["error"]) == set(schemas[f"{prefix}ErrorFields"]["required"])


async def test_models_have_the_described_shape(pool: Pool, described: dict[str, Any]) -> None:
    """Exactly the keys of ``ModelEntry``."""
    (entry,) = (await pool.http.get("/v1/models")).json()["data"]
    assert set(entry) == set(described["components"]["schemas"]["ModelEntry"]["required"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_completions_have_the_described_shape(pool: Pool, described: dict[str, Any], path: str) -> None:
    """Each object of an answer has what its schema requires, and nothing else than it names."""
    model = record()
    await pool.register(model)
    await pool.replica(model)
    body = {"model": model.name, "messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}
    answer = (await pool.http.post(path, json=body)).json()
    (choice,) = answer["choices"]
    objects = [("Completion", answer), ("Choice", choice), ("TokenUsage", answer["usage"])]
    objects += [("ChoiceMessage", choice["message"])] if "message" in choice else []
    for name, value in objects:
        schema = described["components"]["schemas"][name]
        assert set(schema["required"]) <= set(value) <= set(schema["properties"])
    assert choice["finish_reason"] in described["components"]["schemas"]["Choice"]["properties"]["finish_reason"]["enum"]
