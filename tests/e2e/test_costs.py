"""Costs of a real engine: estimated when its model is applied, measured when it is ready, kept over a restart (PRO-4)."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ops.control import control
from ops.models import records_of
from ops.supervisor import Pool, PoolOptions
from profiles.tiny import make_tiny

pytestmark = [pytest.mark.engine, pytest.mark.asyncio, pytest.mark.timeout(480)]

SERVICE = """
apiVersion: llm.serving/v1
kind: ModelService
metadata: {{name: tiny}}
spec:
  source: {source}
  engine: {{type: vllm, dtype: float32, max_context_len: 512, max_num_seqs: 8, kv_cache_bytes: 16MiB}}
"""
BOUND_S = 180.0


async def _costs(pool: Pool) -> dict[str, Any]:
    (row,) = await control(pool.nats_url, "get", {"what": "costs"})
    return dict(row)


async def _until(pool: Pool, wanted: str) -> dict[str, Any]:
    began_s = time.monotonic()
    while True:
        row = await _costs(pool)
        if row[wanted]:
            return row
        assert time.monotonic() - began_s < BOUND_S, row
        await asyncio.sleep(0.3)


async def test_a_real_engine_is_measured(tmp_path: Path) -> None:
    """From an estimate to points that the replica takes before it serves and in idle moments; requests then tell how far
    the fit is off, and a pool that is started again knows all of it."""
    path = tmp_path / "tiny.yaml"
    path.write_text(SERVICE.format(source=make_tiny("tiny", tmp_path / "tiny", seed=1)))
    records = [msgspec.to_builtins(record) for record in await asyncio.to_thread(records_of, [path])]
    options = PoolOptions(state_dir=tmp_path / "state", devices=("cpu:2GiB",))
    body = {"model": "tiny", "prompt": "one two three", "max_tokens": 200, "ignore_eos": True}
    async with Pool(options) as pool, httpx.AsyncClient(base_url=f"{pool.http_url}/v1", timeout=BOUND_S) as http:
        await control(pool.nats_url, "apply", {"records": records})
        row = await _costs(pool)
        assert (row["kind"], row["source"], row["points"]) == ("cpu", "estimated", 0)
        assert row["costs"]["step_const_s"] > 0
        assert (await http.post("/completions", json=body | {"max_tokens": 1})).status_code == 200
        assert (await _until(pool, "points"))["source"] == "measured"
        row = await _until(pool, "whole")
        batches = {point["batch"] for point in row["measured"]}
        lengths = {point["input_tokens"] for point in row["measured"]}
        assert batches >= {1, 4, 8} and len(lengths) >= 3
        for _ in range(3):
            assert (await http.post("/completions", json=body)).status_code == 200
        row = await _until(pool, "steps")
        assert row["source"] in ("measured", "corrected") and math.isfinite(row["error"])
        told = await control(pool.nats_url, "explain", {"what": "tiny"})
        assert "measured with vllm" in told["costs"][0] or "corrected with vllm" in told["costs"][0]
    async with Pool(options) as pool:
        assert (await _until(pool, "points"))["whole"]
