"""A real vLLM engine that shares its device takes turns for its steps (ops/decisions/0008)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.engines import Driver, replica_spec
from tests.waiting import until
from workers.engines.vllm_cpu import VllmEngine
from workers.turns import DeviceTurns

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio,
    pytest.mark.filterwarnings("ignore:::vllm"),
    pytest.mark.filterwarnings("ignore:::xgrammar"),
]


async def test_it_waits_for_its_turn_and_goes_on_when_a_neighbour_hangs(tiny_model: Path, tmp_path: Path) -> None:
    """The answer is the same beside a neighbour that never gives its turn back: each step waits its bound and goes on."""
    environment = dict(os.environ)
    spec = msgspec.structs.replace(replica_spec(str(tiny_model)), turns_directory=str(tmp_path))
    engine = VllmEngine(spec)
    neighbour = DeviceTurns(tmp_path, (spec.device,), 0.0)
    try:
        await engine.start()
        await engine.warm(4)
        driver = Driver(engine)
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 6}
        alone = await driver.ask(body)
        turns = engine._engine.engine_core.engine_core.scheduler.turns
        assert turns.overruns == 0
        neighbour.take(urgent=True)
        beside = await driver.ask(body)
        assert turns.overruns >= 5
        assert beside.token_ids() == alone.token_ids()
        neighbour.give()
        await until(lambda: engine.load().running == 0)
        before = turns.overruns
        again = await driver.ask(body)
        assert (turns.overruns, again.token_ids()) == (before, alone.token_ids())
        await driver.close()
    finally:
        neighbour.close()
        os.environ.clear()
        os.environ.update(environment)
