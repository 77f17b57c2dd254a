"""KV that outlives an engine's own cache, with vLLM on a GPU: the same greedy text, and ``cached_tokens`` that show it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from subjects.ids import DeviceId
from tests.e2e.engines import Driver, replica_spec
from tests.e2e.kv_nodes import NodeProcess

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

SALT = "aa" * 16
KV_BYTES = 1 << 30


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> NodeProcess:
    """Ends with its standard input."""
    node = NodeProcess(tmp_path_factory.mktemp("node"), "worker-gpu")
    node.start()
    return node


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(node: NodeProcess) -> AsyncIterator[Driver]:
    """An engine in its own process, with a connector."""
    from profiles.smollm2 import ensure_smollm2
    from workers.engines.vllm_gpu import VllmGpuEngine

    source: Path = await asyncio.to_thread(ensure_smollm2)
    environment = dict(os.environ)
    spec = replica_spec(
        str(source), dtype="bfloat16", kv_bytes=KV_BYTES, max_context_len=2048, kv_signature="smollm2-bf16-b32"
    )
    engine = VllmGpuEngine(msgspec.structs.replace(spec, device=DeviceId("gpu0"), kv_socket=node.socket))
    await engine.start()
    await engine.warm(4)
    driver = Driver(engine)
    yield driver
    await driver.close()
    node.stop()
    os.environ.clear()
    os.environ.update(environment)


async def test_blocks_come_back_from_the_node(driver: Driver) -> None:
    """After the engine's own cache was reset the prefix is read from the node: equal text, whole blocks cached (P2)."""
    body = {
        "messages": [{"role": "user", "content": "The lighthouse keeper wound the clock every evening. " * 60}],
        "temperature": 0,
        "max_tokens": 32,
    }
    first = await driver.ask(body, cache_salt=SALT)
    assert first.usage.cached_tokens == 0
    for _ in range(3):
        await asyncio.sleep(1.0)  # what was saved gets to the node
        assert await driver.engine._engine.reset_prefix_cache()  # type: ignore[attr-defined]
        again = await driver.ask(body, cache_salt=SALT)
        assert again.text() == first.text()
        assert again.usage.cached_tokens == (first.usage.prompt_tokens - 1) // 32 * 32
    other = await driver.ask(body, cache_salt="bb" * 16)
    assert (other.text(), other.usage.cached_tokens) == (first.text(), 0)
