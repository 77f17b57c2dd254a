"""LoRA adapters of a model behind ``openai_http``: the server's own name of the adapter is what it is asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from subjects.messages import Adapter, EngineType, FailureKind
from tests.e2e.engines import Driver, replica_spec
from tests.e2e.test_engine_openai_http import DONE, STREAM, ScriptedServer, ask, content, event
from workers.engines.openai_http import OpenAiHttpEngine

SQL = Adapter(name="sql", source="their-sql", adapter_hash="1")


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    """A server that says what a test tells it to."""
    server = ScriptedServer()
    await server.start()
    yield server
    await server.stop()


@pytest_asyncio.fixture
async def driver(server: ScriptedServer) -> AsyncIterator[Driver]:
    """An engine in front of it."""
    server.script = [STREAM, event(content("x", finish="stop")), DONE]
    engine = OpenAiHttpEngine(replica_spec(server.url, engine_type=EngineType.OPENAI_HTTP))
    await engine.start()
    driver = Driver(engine)
    yield driver
    await driver.close()


async def test_the_server_is_asked_for_the_adapter_by_its_own_name(driver: Driver, server: ScriptedServer) -> None:
    """In ``model``, and nowhere else; a request for the base beside it asks for the base."""
    for adapter in (SQL, None):
        (await driver.ask(ask("x", model="sql", adapter="sql"), adapter=adapter)).check()
    assert [body["model"] for body in server.bodies] == ["their-sql", "theirs"]
    assert "adapter" not in server.bodies[0]


async def test_an_adapter_that_the_server_lacks_is_a_400_and_no_sickness(driver: Driver, server: ScriptedServer) -> None:
    """For the base a 404 means that the server is set up wrongly; for an adapter only that request fails."""
    error = b'{"error": {"message": "The model `their-sql` does not exist.", "code": 404}}'
    server.script = [b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n" % len(error) + error]
    failure = (await driver.ask(ask("x"), adapter=SQL)).failure
    assert failure is not None
    assert (failure.kind, failure.status, failure.code) == (FailureKind.BAD_REQUEST, 400, "adapter_unavailable")
    assert failure.message == "the server of this model does not serve the adapter 'sql'"
    base = (await driver.ask(ask("x"))).failure
    assert base is not None and base.kind is FailureKind.SICK
