"""``/tokenize`` and ``/detokenize`` by the model's own tokenizer, without the model (ING-1, ING-6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from broker.gateway.app import HttpOptions
from profiles.tiny import make_tiny
from profiles.tokenizer import ModelTokenizer
from subjects.messages import Endpoint
from tests.servers import NatsServer
from tests.wire.gateway_pool import Pool, open_pool, record

pytestmark = pytest.mark.asyncio(loop_scope="module")
USER = {"role": "user", "content": "Hi"}
TEXT = "Grüße, 世界 🙂!"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's files."""
    return make_tiny("a", tmp_path_factory.mktemp("models") / "a", seed=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_pool(shared_nats_server: NatsServer) -> AsyncIterator[Pool]:
    """One gateway."""
    async with open_pool(shared_nats_server.url, http=HttpOptions(body_bytes_max=1 << 20)) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def pool(running_pool: Pool, directory: Path) -> AsyncIterator[Pool]:
    """The same gateway for each test; it knows ``own`` with a tokenizer and ``bare`` without, and no replica runs."""
    own = record("own", tokenizer_source=str(directory), tokenizer_hash="t", aliases=("nick",))
    await running_pool.register(own, record("bare"))
    yield running_pool
    await running_pool.clear()


async def tokens_of(pool: Pool, path: str = "/tokenize", **body: Any) -> dict[str, Any]:
    """The answer to a good body."""
    response = await pool.http.post(path, json={"model": "own"} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_text_goes_to_tokens_and_back(pool: Pool, directory: Path, prefix: str) -> None:
    """vLLM's names and shapes, both prefixes, an alias too; special tokens and emoji come back whole."""
    text = TEXT + "<|im_end|>"
    own = ModelTokenizer(directory).prompts(Endpoint.COMPLETIONS, {"prompt": text})[0]
    answer = await tokens_of(pool, f"{prefix}/tokenize", model="nick", prompt=text)
    assert answer == {"count": len(own), "max_model_len": 2048, "tokens": own, "token_strs": None}
    assert 258 in own
    assert await tokens_of(pool, f"{prefix}/detokenize", tokens=own) == {"prompt": text}


async def test_a_chat_goes_through_the_template(pool: Pool, directory: Path) -> None:
    """The very ids that a chat request is counted by; the template's switches work; null means the default."""
    tokenizer = ModelTokenizer(directory)
    (counted,) = tokenizer.prompts(Endpoint.CHAT, {"messages": [USER]})
    nothing: dict[str, Any] = {"add_generation_prompt": None, "tools": None, "chat_template_kwargs": None}
    assert (await tokens_of(pool, messages=[USER]))["tokens"] == counted
    assert (await tokens_of(pool, messages=[USER], **nothing))["tokens"] == counted
    shorter = await tokens_of(pool, messages=[USER], add_generation_prompt=False, return_token_strs=True)
    assert counted[: shorter["count"]] == shorter["tokens"] != counted
    assert len(shorter["token_strs"]) == shorter["count"] and shorter["token_strs"][0] == "<|im_start|>"


async def test_long_texts_leave_the_loop_free(pool: Pool, directory: Path) -> None:
    """A long text is counted in a thread: short ones overtake it."""
    done: list[str] = []

    async def ask(name: str, prompt: str) -> None:
        await tokens_of(pool, prompt=prompt)
        done.append(name)

    long = asyncio.create_task(ask("long", "the quick brown fox " * 40_000))
    await asyncio.gather(*(ask("short", "Hi") for _ in range(3)))
    await long
    assert done == ["short"] * 3 + ["long"]


async def test_nothing_reaches_the_pool(pool: Pool) -> None:
    """No ticket is written and nothing waits, so that a cold model stays cold (B3)."""
    await tokens_of(pool, prompt=TEXT)
    await tokens_of(pool, "/detokenize", tokens=[72])
    assert pool.tickets == []
    assert all(not demand.arrived for sent in pool.telemetry for demand in sent.demand)


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/tokenize", {"model": "bare", "prompt": "Hi"}, 400, "model", "no_tokenizer"),
        ("/detokenize", {"model": "bare", "tokens": [1]}, 400, "model", "no_tokenizer"),
        ("/tokenize", {"model": "unheard-of", "prompt": "Hi"}, 404, "model", "model_not_found"),
        ("/tokenize", {"prompt": "Hi"}, 400, "model", "missing_required_parameter"),
        ("/tokenize", {"model": "own"}, 400, "prompt", None),
        ("/tokenize", {"model": "own", "prompt": "Hi", "messages": [USER]}, 400, "prompt", None),
        ("/tokenize", {"model": "own", "prompt": ["Hi"]}, 400, "prompt", None),
        ("/tokenize", {"model": "own", "messages": []}, 400, "messages", None),
        ("/tokenize", {"model": "own", "messages": [USER], "chat_template": "x"}, 400, "chat_template", None),
        (
            "/tokenize",
            {"model": "own", "messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
            400,
            "continue_final_message",
            None,
        ),
        (
            "/tokenize",
            {"model": "own", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}]}]},
            400,
            "messages[0].content",
            None,
        ),
        ("/detokenize", {"model": "own"}, 400, "tokens", "missing_required_parameter"),
        ("/detokenize", {"model": "own", "tokens": [-1]}, 400, "tokens[0]", None),
        ("/detokenize", {"model": "own", "tokens": [384]}, 400, "tokens", None),
        ("/detokenize", {"model": "own", "tokens": "Hi"}, 400, "tokens", None),
    ],
)
async def test_refusals(pool: Pool, path: str, body: Any, status: int, param: str, code: str | None) -> None:
    """The right status, parameter and code in OpenAI's shape, without the prompt (J5)."""
    response = await pool.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert code is None or error["code"] == code
    assert len(response.content) < 400


async def test_the_same_doors_as_every_route(pool: Pool) -> None:
    """POST only, JSON only, bounded bodies."""
    assert (await pool.http.get("/tokenize")).status_code == 405
    assert (await pool.http.post("/tokenize", content=b"{", headers={"content-type": "text/plain"})).status_code == 415
    assert (await pool.http.post("/tokenize", json={"model": "own", "prompt": "x" * (1 << 21)})).status_code == 413
    assert (await pool.http.post("/tokenize", content=b"{", headers={"content-type": "application/json"})).status_code == 400


async def test_the_only_model_needs_no_name(running_pool: Pool, directory: Path) -> None:
    """As in vLLM, ``model`` may be left out where there is one model."""
    await running_pool.register(record("only", tokenizer_source=str(directory), tokenizer_hash="t"))
    response = await running_pool.http.post("/tokenize", json={"prompt": "Hi"})
    assert response.json()["tokens"] == [72, 105]
    await running_pool.clear()
