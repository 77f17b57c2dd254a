"""Answers over HTTP: what a client of OpenAI's API sees."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.servers import NatsServer
from tests.wire.gateway_pool import Pool, open_pool, record, until


@pytest.fixture
async def pool(shared_nats_server: NatsServer) -> AsyncIterator[Pool]:
    """One gateway."""
    async with open_pool(shared_nats_server.url) as pool:
        yield pool


async def test_a_whole_answer(pool: Pool) -> None:
    """Text, finish reason and the engine's own usage, under the asked name (ING-1, I1, J12)."""
    model = record(aliases=("nick",))
    await pool.register(model)
    replica = await pool.replica(model)
    answer = await pool.openai().chat.completions.create(model="nick", messages=[{"role": "user", "content": "Hi"}])
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (17, 5)
    assert answer.model == "nick"
    assert answer.id == f"chatcmpl-{replica.runs[0].ticket.request}"
    await until(lambda: not replica.running, "the finish is confirmed")


async def test_a_stream(pool: Pool) -> None:
    """Role first, contents, one finish chunk, no usage unless asked for (J1)."""
    model = record()
    await pool.register(model)
    await pool.replica(model)
    stream = await pool.openai().chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": "Hi"}], stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content or "" for chunk in chunks] == ["", "Hello ", "world", ""]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and {chunk.model for chunk in chunks} == {model.name}
