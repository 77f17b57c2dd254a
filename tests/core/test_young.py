"""Prompts wait for young answers: the rule, and the simulator's engine with it (ops/decisions/0018, SCH-7)."""

from __future__ import annotations

from math import inf

import pytest

from ops.simulator.engine import Engine, Sequence
from subjects.messages import StepCosts
from workers.core.young import YOUNG_TOKENS, StepTimes, YoungAnswers

COSTS = StepCosts(prefill_token_s=1e-4, step_const_s=0.01, step_request_s=0.001)


def young_of() -> YoungAnswers:
    """A bare step takes 10 ms and a prompt token 0.1 ms; promised are 100 ms per token and 2 s to the first."""
    young = YoungAnswers(tpot_s=0.1, ttft_s=2.0)
    young.times.took(9.0, 0.01, 0)
    young.times.took(0.0, 0.11, 1000)
    young.came(0.0, "answer")
    young.answered(10.0, "answer")
    young.came(10.0, "prompt")
    return young


@pytest.mark.parametrize(
    ("now_s", "made", "left", "expected"),
    [
        (10.0, 1, 9000, 850),  # 95 ms, less a bare step, at 0.1 ms each.
        (10.05, 1, 9000, 0),  # Too few to be worth it.
        (10.05, 1, 300, 350),  # Enough for all that is left.
        (10.05, 12, 9000, 8192),  # It has made up for it.
        (10.5, 1, 9000, 500),  # The prompt has waited for its bound.
        (10.3, 1, 9000, 0),
        (10.3, YOUNG_TOKENS, 9000, 8192),  # Not young any more.
        (10.3, 0, 9000, 8192),  # Has no token yet, so none can be late.
    ],
)
def test_how_many_prompt_tokens(now_s: float, made: int, left: int, expected: int) -> None:
    """As many as fit before the next token of a young answer is late."""
    found = young_of().prompt_tokens(now_s, [("answer", made)], [("prompt", left)], least=500, most=8192)
    assert found == pytest.approx(expected, abs=1)


def test_the_first_token_counts_once_and_what_left_is_forgotten() -> None:
    """A request that is computed again keeps its times; a prompt that nobody announced never waits."""
    young = young_of()
    young.answered(20.0, "answer")
    young.came(20.0, "prompt")
    ask = {"least": 500, "most": 8192}
    assert young.prompt_tokens(10.3, [("answer", 1)], [("prompt", 9000)], **ask) == 0
    assert young.prompt_tokens(10.3, [("answer", 1)], [("unknown", 9000)], **ask) == 500
    young.keep({"prompt"})
    assert len(young) == 1
    assert young.prompt_tokens(10.3, [("answer", 1)], [("prompt", 9000)], **ask) == pytest.approx(850, abs=1)


def test_what_a_step_takes_follows_the_newest() -> None:
    """Waits for turns count with prompts only, a hiccup is cut, nothing measured means no limit."""
    times = StepTimes(longest_s=1.0)
    assert times.tokens_within(0.01) == inf
    assert times.tokens_within(-0.01) == 0.0
    times.took(5.0, 0.02, 0)
    times.took(0.03, 0.12, 1000)
    assert times.tokens_within(0.15) == pytest.approx(1000)
    assert times.tokens_within(0.05) == 0.0
    times.took(0.03, 100.0, 1000)
    for _ in range(40):
        times.took(0.03, 0.22, 1000)
    assert times.tokens_within(0.25) == pytest.approx(1000, rel=0.01)


def engine_of(*, tpot_s: float = 0.1, chunk_tokens: int = 2000) -> Engine:
    """A step takes 11 ms and more, a prompt token 0.1 ms; promised are ``tpot_s`` and 2 s to the first token."""
    return Engine(COSTS, kv_pages=10_000, chunk_tokens=chunk_tokens, pace_s=0.05, tpot_s=tpot_s, ttft_s=2.0)


def times_of(engine: Engine) -> dict[int, tuple[float, float]]:
    """First token and end of all that is left in it."""
    times = {}
    while engine.end_s < inf:
        now_s = engine.end_s
        engine.step(now_s)
        times.update({one.index: (one.first_s, now_s) for one in engine.finished})
        engine.finished.clear()
    return times


@pytest.mark.parametrize(("tpot_s", "keeps"), [(0.1, True), (0.0, False)])
@pytest.mark.parametrize("chunk_tokens", [1000, 2000])
def test_a_short_answer_beside_a_long_prompt(tpot_s: float, keeps: bool, chunk_tokens: int) -> None:
    """It keeps its time per token of 100 ms at half speed; without a promise the prompt is prefilled between its tokens."""
    engine = engine_of(tpot_s=tpot_s, chunk_tokens=chunk_tokens)
    engine.set_rate(0.0, 0.485)
    engine.add(0.0, Sequence(0, 100, 4))
    first_s = engine.end_s
    engine.step(first_s)
    engine.add(first_s + 1e-4, Sequence(1, 8000, 2))
    times = times_of(engine)
    assert ((times[0][1] - times[0][0]) / 3 <= 0.1) is keeps
    assert times[1][0] - first_s < 0.4 + 0.8 / 0.485 + 20 * 0.011 / 0.485, "waited for its bound, and its own steps"


def test_a_prompt_waits_no_longer_than_its_bound() -> None:
    """So slow a device leaves no room beside a young answer: only after 0.2 of its 2 s is the prompt prefilled."""
    engine = engine_of()
    engine.set_rate(0.0, 0.1)
    engine.add(0.0, Sequence(0, 100, 40))
    came_s = engine.end_s + 1e-4
    engine.step(engine.end_s)
    engine.add(came_s, Sequence(1, 3000, 2))
    ends_s = []
    while engine.backlog_tokens == 3000:
        ends_s.append(engine.end_s - came_s)
        engine.step(engine.end_s)
    step_s = 0.011 / 0.1
    assert ends_s[:-1] == pytest.approx([step_s * count - 1e-4 for count in range(1, len(ends_s))])
    assert 0.4 < ends_s[-2] <= 0.4 + step_s
    assert ends_s[-1] - ends_s[-2] == pytest.approx((0.011 + 0.2) / 0.1), "then it takes its chunk"


@pytest.mark.parametrize("how", ["abort", "take_all", "preempt"])
def test_who_is_gone_holds_up_nobody(how: str) -> None:
    """After an abort, an interruption or a preemption of the young answer the next prompt is prefilled in its first step."""
    engine = engine_of()
    engine.set_rate(0.0, 0.1)
    young, prompt = Sequence(0, 100, 40), Sequence(1, 1000, 2)
    engine.add(0.0, young)
    now_s = engine.end_s + 1e-4
    engine.step(engine.end_s)
    if how == "abort":
        engine.abort(now_s, young)
        engine.add(now_s, prompt)
        engine.step(engine.end_s)
    elif how == "take_all":
        engine.take_all(now_s)
        engine.add(now_s, prompt)
    else:
        engine.resize(now_s, 1)
        engine.step(engine.end_s)
        assert (engine.preempted, engine.running, engine.waiting) == (1, 0, 1)
        engine.resize(now_s, 10_000)
        now_s += 1.0
        engine.add(now_s, prompt)
        assert engine.running == 2
        assert engine.backlog_tokens == 1000 + young.input_tokens + young.made
    before = engine.backlog_tokens
    engine.step(engine.end_s)
    assert (before >= 1000, engine.backlog_tokens) == (True, 0)
