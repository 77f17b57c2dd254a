"""The profile measured in small (PRO-4): its fit, its statistics, and the load of the comparison with real engines."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from ops.simulator.reality import (
    BURST,
    SLOTS,
    STEP_TOKENS,
    comparisons,
    drawn_load,
    found_at_work,
    request_constant_s,
    simulate,
    simulated_workload,
)
from ops.simulator.reality_client import Timed
from ops.simulator.reality_profile import DecodePoint, PrefillPoint, Profile, fit, probe_s, together, trimmed_median
from ops.simulator.types import Trace
from subjects.messages import StepCosts

COSTS = StepCosts(
    prefill_token_s=2.5e-3, prefill_token2_s=4e-7, step_const_s=0.04, step_request_s=2e-3, step_context_token_s=1.5e-5
)


def profile_of(costs: StepCosts, request_s: float = 0.01) -> Profile:
    """A profile as measured without any noise."""
    return Profile(costs=costs, request_s=request_s, end_s=0.001, prefill_error=0.0, decode_error=0.0)


def points(costs: StepCosts, request_s: float) -> tuple[list[PrefillPoint], list[DecodePoint]]:
    """What an engine with exactly these costs would show."""
    prefills = [
        PrefillPoint(n, request_s + costs.step_const_s + costs.prefill_token_s * n + costs.prefill_token2_s * n * n)
        for n in (16, 64, 128, 256, 512, 768)
    ]
    decodes = [
        DecodePoint(
            batch, batch * n, costs.step_const_s + costs.step_request_s * batch + costs.step_context_token_s * batch * n
        )
        for batch in (1, 2, 4, 8)
        for n in (28, 204, 652)
    ]
    return prefills, decodes


def test_fit_finds_the_coefficients_that_made_the_points() -> None:
    """Without noise the fit is exact, the constant of a request included (PRO-4)."""
    prefills, decodes = points(COSTS, 0.03)
    found = fit(prefills, decodes, 0.002)
    for name in COSTS.__struct_fields__:
        assert getattr(found.costs, name) == pytest.approx(getattr(COSTS, name), rel=1e-6), name
    assert found.request_s == pytest.approx(0.03, rel=1e-6)
    assert found.end_s == 0.002
    assert found.prefill_error < 1e-6
    assert found.decode_error < 1e-6


def test_prompt_of_several_steps_pays_the_constant_of_each() -> None:
    """An engine that prefills in chunks shows it in long prompts; the fit must not take it for the price of a token."""
    prefills, decodes = points(COSTS, 0.03)
    chunked = [
        PrefillPoint(p.input_tokens, p.seconds + (-(-p.input_tokens // 200) - 1) * COSTS.step_const_s) for p in prefills
    ]
    found = fit(chunked, decodes, 0.002, step_tokens=200)
    assert found.costs.prefill_token_s == pytest.approx(COSTS.prefill_token_s, rel=1e-6)
    assert found.prefill_error < 1e-6
    assert fit(chunked, decodes, 0.002).prefill_error > 0.01


def test_no_coefficient_is_negative_whatever_the_noise() -> None:
    """Noise must not turn into time that an engine gives back."""
    random = np.random.default_rng(5)
    for _ in range(50):
        prefills, decodes = points(COSTS, 0.0)
        noisy_prefills = [PrefillPoint(p.input_tokens, p.seconds * random.uniform(0.6, 1.6)) for p in prefills]
        noisy_decodes = [DecodePoint(p.batch, p.context, p.seconds * random.uniform(0.6, 1.6)) for p in decodes]
        found = fit(noisy_prefills, noisy_decodes, 0.0)
        assert min(getattr(found.costs, name) for name in COSTS.__struct_fields__) >= 0.0
        assert found.request_s >= 0.0


def test_median_drops_a_tenth_at_each_end() -> None:
    """PRO-4: median after trimming 10 % at each end; too few to trim leaves all."""
    assert trimmed_median([3.0, 1.0, 2.0]) == 2.0
    assert trimmed_median([1.0] * 9 + [1e9]) == 1.0
    assert trimmed_median([0.0, 0.0, *map(float, range(1, 19))], trim=0.1) == 8.5


def test_steps_count_only_while_all_answers_decode() -> None:
    """Tokens that came beside somebody's prefill are no decode steps of the whole batch."""
    early = Timed(model="m", sent_s=0.0, event_s=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    late = Timed(model="m", sent_s=0.0, event_s=[3.0, 4.0, 5.0])
    assert together([early, late]) == [1.0, 1.0]
    bunched = Timed(model="m", sent_s=0.0, event_s=[1.0, 4.0, 4.0, 4.0, 5.0])
    assert together([bunched]) == [1.0]


def test_load_is_drawn_from_the_seed_with_bursts_in_turn() -> None:
    """Both models' loads come from the seed alone, and burst in different thirds."""
    made = simulated_workload({"a": profile_of(COSTS), "b": profile_of(COSTS)}, 3000.0)
    trace = drawn_load(made.models, 3, 3000.0)
    again = drawn_load(made.models, 3, 3000.0)
    assert trace.arrival_s.tolist() == again.arrival_s.tolist()
    assert trace.input_tokens.tolist() == again.input_tokens.tolist()
    assert drawn_load(made.models, 4, 3000.0).arrival_s.tolist() != trace.arrival_s.tolist()
    for number in (0, 1):
        thirds, _ = np.histogram(trace.arrival_s[trace.model == number], [0.0, 1000.0, 2000.0, 3000.0])
        others = [count for third, count in enumerate(thirds) if third != number]
        assert thirds[number] > BURST * 0.8 * max(others)


def test_simulated_side_shows_what_the_profile_says_of_a_request_alone() -> None:
    """One request alone: constant, prefill and steps, nothing else; so that a comparison judges the simulator."""
    made = simulated_workload({"a": profile_of(COSTS), "b": profile_of(COSTS)}, 10.0)
    trace = made.trace(1, made.windows[0])
    first = trace.__class__(trace.arrival_s[:1], trace.model[:1], np.array([100], np.int32), np.array([3], np.int32))
    profiles = {model.name: profile_of(COSTS) for model in made.models}
    times = simulate(made, first, 1, profiles)
    prefill_s = COSTS.step_const_s + COSTS.prefill_token_s * 100 + COSTS.prefill_token2_s * 100**2
    steps_s = sum(COSTS.step_const_s + COSTS.step_request_s + COSTS.step_context_token_s * n for n in (101, 102))
    assert times.ttft_s[0] == pytest.approx(0.01 + prefill_s)
    assert times.completion_s[0] == pytest.approx(0.01 + prefill_s + steps_s + 0.001, rel=1e-3)


def test_simulated_engines_prefill_as_many_tokens_per_step_as_the_real_ones() -> None:
    """How long prompts hold up running answers is part of what is compared."""
    made = simulated_workload({"a": profile_of(COSTS), "b": profile_of(COSTS)}, 10.0)
    assert [model.chunk_tokens for model in made.models] == [STEP_TOKENS, STEP_TOKENS]
    assert [model.slots for model in made.models] == [SLOTS, SLOTS]


def test_one_disturbed_point_does_not_move_the_fit() -> None:
    """A machine hiccups; one point of twelve that took three times as long must not be spread over the others."""
    prefills, decodes = points(COSTS, 0.03)
    worst = decodes[5]
    decodes[5] = DecodePoint(worst.batch, worst.context, 3 * worst.seconds)
    found = fit(prefills, decodes, 0.002).costs
    assert found.step_const_s == pytest.approx(COSTS.step_const_s, rel=0.02)
    assert found.step_request_s == pytest.approx(COSTS.step_request_s, rel=0.05)
    assert found.step_context_token_s == pytest.approx(COSTS.step_context_token_s, rel=0.05)


def test_engines_slow_each_other_by_what_was_measured() -> None:
    """While both work each runs at its own measured share; alone at full speed."""
    beside = {"a": 0.5, "b": 0.8}
    profiles = {name: msgspec.structs.replace(profile_of(COSTS, 0.0), beside_rate=rate) for name, rate in beside.items()}
    made = simulated_workload(profiles, 10.0)
    alone = Trace(np.array([1.0]), np.array([0], np.int16), np.array([100], np.int32), np.array([5], np.int32))
    both = Trace(
        np.array([1.0, 1.0]), np.array([0, 1], np.int16), np.array([100, 100], np.int32), np.array([5, 5], np.int32)
    )
    whole_s = simulate(made, alone, 1, profiles).completion_s[0] - 0.001
    times = simulate(made, both, 1, profiles).completion_s - 0.001
    assert times[1] == pytest.approx(whole_s / 0.8)
    # The slower one has the machine for itself once the other is done.
    assert times[0] == pytest.approx(times[1] + (whole_s - 0.5 * times[1]))


def test_constant_of_a_request_is_that_of_the_engines_it_finds_at_work() -> None:
    """Each of the four states has its own constant; a request that is over by then counts for nobody."""
    trace = Trace(
        np.array([0.0, 1.0, 2.0, 9.0]), np.array([0, 1, 0, 1], np.int16), np.ones(4, np.int32), np.ones(4, np.int32)
    )
    states = found_at_work(trace, np.array([5.0, 4.0, 6.0, 10.0]))
    assert states == [(False, False), (False, True), (True, True), (False, False)]
    profile = msgspec.structs.replace(profile_of(COSTS, 1.0), own_busy_s=2.0, other_busy_s=3.0, both_busy_s=4.0)
    assert [request_constant_s(profile, own, other) for own, other in [*states, (True, False)]] == [1.0, 3.0, 4.0, 1.0, 2.0]


def test_probe_of_a_busy_engine_waits_for_half_a_step() -> None:
    """What is left of a probe's time beyond this is not the engine's."""
    idle_s = probe_s(COSTS, busy=False, rate=1.0)
    assert idle_s == pytest.approx(COSTS.step_const_s + COSTS.prefill_token_s * 64 + COSTS.prefill_token2_s * 64**2)
    assert probe_s(COSTS, busy=False, rate=0.5) == pytest.approx(2 * idle_s)
    step_s = COSTS.step_const_s + COSTS.step_request_s + COSTS.step_context_token_s * (64 + 150)
    assert probe_s(COSTS, busy=True, rate=1.0) == pytest.approx(1.5 * step_s + idle_s - COSTS.step_const_s)


def test_comparison_has_both_quantities_at_both_quantiles_per_model() -> None:
    """TTFT and completion time at p50 and p95, of each model, with the relative difference."""
    made = simulated_workload({"a": profile_of(COSTS), "b": profile_of(COSTS)}, 60.0)
    trace = made.trace(1, made.windows[0])
    real = simulate(made, trace, 1, {model.name: profile_of(COSTS) for model in made.models})
    slower = simulate(made, trace, 1, {model.name: profile_of(COSTS, 0.01) for model in made.models})
    rows = comparisons(made, trace, real, slower)
    assert [row.name for row in rows] == [
        f"{model}_{what}_p{share}" for model in ("a", "b") for what in ("ttft", "completion") for share in (50, 95)
    ]
    assert all(row.off == 0.0 for row in rows)
