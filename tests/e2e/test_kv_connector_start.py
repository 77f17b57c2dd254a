"""How vLLM's connector starts: what it cannot carry costs the tiers, never the engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache.core.identity import KvSignature
from kvcache.wire.messages import BODY_BYTES_MAX
from workers.engines.vllm_process import prepare_process

pytestmark = [
    pytest.mark.engine,
    # Warnings of vLLM's own modules are not ours to fix.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize(("block_bytes", "starts"), [(BODY_BYTES_MAX, True), (BODY_BYTES_MAX + 1, False)])
def test_blocks_too_large_for_a_node_cost_the_tiers(tmp_path: Path, block_bytes: int, starts: bool) -> None:
    """A large model in large blocks is served without tiers; its replica reads no report and asks no node (P2)."""
    prepare_process(on_cpu=True)
    from kvcache.engine.vllm_connector import CarpoolConnector, ConnectorConfig

    connector: Any = CarpoolConnector.__new__(CarpoolConnector)
    connector.config = ConnectorConfig(
        socket=str(tmp_path / "kv"),
        model_hash="0" * 64,
        weights_hash="0" * 64,
        kv_signature="m",
        replica="r",
        report=str(tmp_path / "signature"),
    )
    connector.worker, connector.scheduler, connector._fits = None, None, True
    connector._vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(rank=0), scheduler_config=SimpleNamespace(max_num_batched_tokens=2048)
    )
    connector._kv_cache_config = SimpleNamespace(num_blocks=100)
    signature = KvSignature(
        model="m", layers=1, kv_heads=1, head_size=1, dtype="float16", form="f", block_size=32, block_bytes=block_bytes
    )
    connector._signature = lambda caches: (signature, SimpleNamespace(block_bytes=block_bytes))
    connector.register_kv_caches({})
    try:
        assert (connector.worker is not None, (tmp_path / "signature.0").exists()) == (starts, starts)
    finally:
        connector.shutdown()
