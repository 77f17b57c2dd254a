"""The main job, whole: what ``carpool demo`` shows, asked for as JSON."""

from __future__ import annotations

import asyncio
import sys

import msgspec
import pytest


@pytest.mark.engine
@pytest.mark.timeout(420)
async def test_three_real_models_share_a_device_for_two() -> None:
    """Real engines make room for each other, a stream goes on meanwhile, and everything is answered, over HTTP and NATS."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ops.cli", "demo", "--json", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode(errors="replace")[-2000:]
    shown = msgspec.json.decode(output.splitlines()[-1])
    assert shown["checks"] and all(shown["checks"].values())
    requests = {row["request"]: row for row in shown["requests"]}
    assert "lane" in requests["a question"]["text"].lower()
    assert requests["long stream"]["tokens"] == 160
    assert requests["auto"]["model"] == "smollm2"
    assert requests["over NATS"]["tokens"] == 12
    assert {entry["action"] for entry in shown["timeline"]} >= {"load", "evict"}
    assert all(entry["reason"] for entry in shown["timeline"])
