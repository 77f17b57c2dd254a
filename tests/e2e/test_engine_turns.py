"""A real vLLM engine that shares its device takes turns for its steps, and prompts in it wait for young answers
(ops/decisions/0008 and 0018)."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from subjects.messages import Sla
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

LONGS = ("the quick brown fox ", "a lazy dog ")


def long_body(text: str) -> dict[str, Any]:
    """A prompt that takes many steps when they are small."""
    return {"messages": [{"role": "user", "content": text * 40}], "temperature": 0, "max_tokens": 20}


async def test_it_waits_for_its_turn_and_goes_on_when_a_neighbour_hangs(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is the same beside a neighbour that never gives its turn back: each step waits its bound and goes on.

    Long prompts that come meanwhile wait for the short answer, whose promise no step with a prompt could keep. And however
    many prompt tokens the steps are allowed, each answer has its token in every step, and all answers are the same.
    """
    environment = dict(os.environ)
    record = replica_spec(str(tiny_model), sla=Sla(tpot_ms=1, ttft_p95_ms=100_000))
    spec = msgspec.structs.replace(record, turns_directory=str(tmp_path))
    engine = VllmEngine(spec)
    neighbour = DeviceTurns(tmp_path, (spec.device,), 0.0)
    try:
        await engine.start()
        await engine.warm(4)
        driver = Driver(engine)
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 6}
        alone = await driver.ask(body)
        scheduler = engine._engine.engine_core.engine_core.scheduler
        turns = scheduler.turns
        assert turns.overruns == 0
        neighbour.take(urgent=True)
        short = driver.send(body)
        # Its steps take a quarter of a second each now, so the others come in the middle of it.
        await until(lambda: driver.answers[short].deltas)
        longs = [driver.send(long_body(text)) for text in LONGS]
        beside = await driver.wait(short)
        assert turns.overruns >= 5
        assert beside.token_ids() == alone.token_ids()
        assert scheduler.decode_only_steps >= 3
        assert not any(driver.answers[long].deltas for long in longs), "nobody prefilled while the short answer was young"
        neighbour.give()
        held_back = [(await driver.wait(long)).token_ids() for long in longs]
        await until(lambda: engine.load().running == 0)
        most = scheduler.max_num_scheduled_tokens
        assert (len(scheduler.young), most) == (0, scheduler.scheduler_config.max_num_batched_tokens)
        schedule = scheduler.schedule
        steps: list[tuple[bool, int]] = []

        def watched(*arguments: Any) -> Any:
            # The worst order for those that decode.
            scheduler.running.sort(key=lambda request: not request.is_prefill_chunk)
            decoding = {request.request_id for request in scheduler.running if not request.is_prefill_chunk}
            output = schedule(*arguments)
            scheduled = output.num_scheduled_tokens
            if decoding:
                steps.append((decoding <= scheduled.keys(), sum(scheduled.values()) - len(decoding)))
            return output

        monkeypatch.setattr(scheduler, "schedule", watched)
        for allowed in ([most], [0, 7, 40]):
            decisions = itertools.cycle(allowed)

            def decide(_: float, answers: Any, *__: Any, decisions: Any = decisions, **___: Any) -> int:
                return next(decisions) if any(True for _ in answers) else 40

            monkeypatch.setattr(scheduler.young, "prompt_tokens", decide)
            mixed = [driver.send(each, cache_salt=str(allowed)) for each in (body, *map(long_body, LONGS), body)]
            answers = [(await driver.wait(each)).token_ids() for each in mixed]
            assert answers == [alone.token_ids(), *held_back, alone.token_ids()]
            assert scheduler.max_num_scheduled_tokens == most
            if most not in allowed:
                assert all(complete for complete, _ in steps)
                assert {tokens for _, tokens in steps} >= set(allowed)
                assert max(tokens for _, tokens in steps) == max(allowed)
            steps.clear()
        monkeypatch.undo()
        await until(lambda: engine.load().running == 0)
        before = turns.overruns
        again = await driver.ask(body)
        assert (turns.overruns, again.token_ids()) == (before, alone.token_ids())
        await driver.close()
    finally:
        neighbour.close()
        os.environ.clear()
        os.environ.update(environment)
