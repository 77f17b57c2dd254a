"""The vLLM engine on the CPU with an embedding model: its vectors are those of the same weights in transformers."""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from profiles.tokenizer import ModelTokenizer
from subjects.errors import EngineError
from subjects.messages import Endpoint, FailureKind, Task
from tests.e2e.engines import Driver, replica_spec
from workers.engines.base import EngineInfo
from workers.engines.factory import make_engine
from workers.engines.vllm_cpu import VllmEngine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:::vllm"),
    pytest.mark.filterwarnings("ignore:::xgrammar"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(tiny_model: Path) -> AsyncIterator[Driver]:
    """One started and warmed engine for the whole module."""
    environment = dict(os.environ)
    engine = VllmEngine(replica_spec(str(tiny_model), task=Task.EMBED))
    info = await engine.start()
    assert info == EngineInfo(
        slots=8, kv_pages=info.kv_pages, block_size=32, max_context_len=1024, gives_token_ids=True, continues=False
    )
    await engine.warm(4)
    driver = Driver(engine)
    yield driver
    await driver.close()
    os.environ.clear()
    os.environ.update(environment)


def reference(model: Path, prompts: list[list[int]]) -> list[list[float]]:
    """The last token's hidden state, made to length 1, by another implementation of the model."""
    import torch
    from transformers import AutoModel

    theirs = AutoModel.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        states = [theirs(torch.tensor([ids])).last_hidden_state[0, -1] for ids in prompts]
    return [torch.nn.functional.normalize(state, dim=0).tolist() for state in states]


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_vectors_are_those_of_the_weights(driver: Driver, tiny_model: Path, encoding: str) -> None:
    """Short and long texts in one request, in order, with exact usage; more inputs than the engine has slots."""
    texts = ["Hi", "Grüße 😀 from 東京", "one two three " * 40, *(f"text {number}" for number in range(12))]
    prompts = ModelTokenizer(tiny_model).prompts(Endpoint.EMBEDDINGS, {"input": texts})
    answer = await driver.ask({"input": texts, "encoding_format": encoding}, Endpoint.EMBEDDINGS, cache_salt="salt")
    answer.check()
    assert answer.usage.prompt_tokens == sum(map(len, prompts)) and answer.usage.completion_tokens == 0
    found = [one for detail in answer.details() for one in detail["data"]]
    assert [one["index"] for one in found] == list(range(len(texts)))
    for one, expected in zip(found, reference(tiny_model, prompts), strict=True):
        vector = one["embedding"]
        if encoding == "base64":
            vector = struct.unpack(f"<{len(expected)}f", base64.b64decode(vector))
        assert list(vector) == pytest.approx(expected, abs=1e-4)


async def test_token_ids_are_taken_as_they_are(driver: Driver, tiny_model: Path) -> None:
    """One list of ids, and a list of such lists."""
    for inputs, prompts in (([5, 6, 7], [[5, 6, 7]]), ([[5, 6], [7]], [[5, 6], [7]])):
        (detail,) = (await driver.ask({"input": inputs}, Endpoint.EMBEDDINGS)).details()
        for one, expected in zip(detail["data"], reference(tiny_model, prompts), strict=True):
            assert one["embedding"] == pytest.approx(expected, abs=1e-4)


BAD: list[tuple[Endpoint, Any]] = [
    (Endpoint.EMBEDDINGS, b"{"),
    (Endpoint.EMBEDDINGS, {}),
    (Endpoint.EMBEDDINGS, {"input": {"a": 1}}),
    (Endpoint.EMBEDDINGS, {"input": "x", "dimensions": 8}),
    (Endpoint.EMBEDDINGS, {"input": "x", "encoding_format": "bytes"}),
    (Endpoint.EMBEDDINGS, {"input": "x", "embed_dtype": "float16", "encoding_format": "base64"}),
    (Endpoint.EMBEDDINGS, {"input": "word " * 3000}),
    (Endpoint.EMBEDDINGS, {"input": [1_000_000]}),
    (Endpoint.CHAT, {"messages": [{"role": "user", "content": "Hi"}]}),
    (Endpoint.COMPLETIONS, {"prompt": "Hi"}),
]


@pytest.mark.parametrize(
    ("endpoint", "body"), BAD, ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else ""
)
async def test_bad_bodies_fail_alone(driver: Driver, endpoint: Endpoint, body: Any) -> None:
    """Each is the client's fault and says why; a good one sent beside it is answered (F4)."""
    good = driver.send({"input": "A good one"}, Endpoint.EMBEDDINGS)
    failure = (await driver.ask(body, endpoint)).failure
    assert failure is not None and failure.message
    assert (failure.kind, failure.status) == (FailureKind.BAD_REQUEST, 400)
    assert (await driver.wait(good)).usage.prompt_tokens > 0


async def test_an_abort_leaves_nothing(driver: Driver) -> None:
    """Nothing comes out for it, and the engine is as free as before (A4)."""
    request = driver.send({"input": ["word " * 200] * 64}, Endpoint.EMBEDDINGS)
    driver.engine.abort(request, 1)
    await driver.ask({"input": "after"}, Endpoint.EMBEDDINGS)
    assert not driver.answers[request].deltas
    assert (driver.engine.load().running, driver.engine.load().waiting) == (0, 0)


async def test_a_gpu_says_that_it_cannot(tiny_model: Path) -> None:
    """Where nobody has tried it, a replica fails with one line instead of half working."""
    import msgspec

    from subjects.ids import DeviceId

    spec = msgspec.structs.replace(replica_spec(str(tiny_model), task=Task.EMBED), device=DeviceId("gpu0"))
    with pytest.raises(EngineError, match="use openai_http"):
        make_engine(spec)
