"""Signals by their definitions, with the golden cases of SPEC.md (SCH-6, SCH-7)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.core.plan import tunables as t
from broker.core.plan.fairness import CLASS_VALUES, boosted, class_weights, densities, fairness_index
from broker.core.plan.in_row import InRow
from ops.simulator.probe import Progress, TwuMeter
from profiles.twu import TokenWork, allowed_s, current_weights, default_weight, twu, twu_raw_s
from subjects.ids import DeploymentKey
from subjects.messages import SlaClass
from workers.core.pulling import DEFAULT_WEIGHTS

SMALL, MIDDLE, LARGE = DeploymentKey("1" * 64), DeploymentKey("2" * 64), DeploymentKey("3" * 64)
GB = 1_000_000_000


# ------------------------------------------------------------------------------------------------------------------- TWU


def test_twu_is_use_times_stress() -> None:
    """A device that makes half of its baseline with every request at 0.8 of its allowed time has a TWU of 0.4 (SCH-6)."""
    parts = [TokenWork(1.0, 250.0, 0.8, 1.0), TokenWork(1.0, 250.0, 1.6, 2.0)]
    assert twu(parts, 1.0, 1000.0) == pytest.approx(0.4)
    assert twu_raw_s(parts, 1.0, 1000.0) == pytest.approx((250 * 0.8 + 250 * 1.6) / 1000)
    assert twu([], 1.0, 1000.0) == 0.0


def test_twu_counts_weights_and_scale_free_time() -> None:
    """A token of the 72B counts 8.7 times; twice the window for twice the tokens changes nothing (SCH-6)."""
    one = [TokenWork(1.0, 100.0, 1.0, 1.0)]
    heavy = [TokenWork(8.7, 100.0, 1.0, 1.0)]
    assert twu(heavy, 1.0, 1000.0) == pytest.approx(8.7 * twu(one, 1.0, 1000.0))
    assert twu([*one, *one], 2.0, 1000.0) == pytest.approx(twu(one, 1.0, 1000.0))


@pytest.mark.parametrize(("window_s", "baseline"), [(0.0, 1.0), (1.0, 0.0), (math.nan, 1.0)])
def test_twu_needs_a_window_and_a_baseline(window_s: float, baseline: float) -> None:
    """Without them there is no quotient."""
    for function in (twu, twu_raw_s):
        with pytest.raises(ValueError, match="above 0"):
            function([], window_s, baseline)


def test_running_requests_count_with_their_elapsed_part() -> None:
    """A long context under way raises TWU in every window, and nothing counts twice when it finishes (SCH-6)."""
    meter = TwuMeter(1000.0)
    target = {"ttft_s": 2.0, "tpot_s": 0.1}
    first = meter.read(1.0, {"r": Progress(1.0, 4000, 0, 1.0, **target)}, {})
    assert first.tokens == 4000.0
    assert first.twu == pytest.approx(4.0 * 1.0 / 2.0)
    assert first.raw_s == pytest.approx(4.0)
    second = meter.read(1.0, {"r": Progress(1.0, 8000, 0, 2.0, **target)}, {})
    assert second.twu == pytest.approx(4.0 * 2.0 / 2.0)
    last = meter.read(1.0, {}, {"r": Progress(1.0, 8000, 11, 3.0, **target)})
    assert last.tokens == 11.0
    assert last.twu == pytest.approx(0.011 * 3.0 / 3.0)
    assert meter.read(1.0, {}, {}).twu == 0.0
    assert allowed_s(2.0, 0.1, 0) == allowed_s(2.0, 0.1, 1) == 2.0
    assert allowed_s(2.0, 0.1, 11) == 3.0


def test_weights() -> None:
    """1.0, 2.3 and 8.7 by size (SCH-6)."""
    assert [default_weight(round(size * GB)) for size in (7.6, 16, 29, 70, 144)] == [1.0, 2.3, 2.3, 8.7, 8.7]


def test_above_a_twu_of_08_the_heaviest_counts_less() -> None:
    """The heaviest model's weight is multiplied by 0.6, not at 0.8 but above it; a model alone gives way to nobody."""
    base = {SMALL: 1.0, MIDDLE: 2.3, LARGE: 8.7}
    assert current_weights(base, 0.8) == base
    assert current_weights(base, 0.81) == {SMALL: 1.0, MIDDLE: 2.3, LARGE: pytest.approx(5.22)}
    assert current_weights({LARGE: 8.7}, 0.9) == {LARGE: 8.7}
    assert current_weights({MIDDLE: 2.0, SMALL: 2.0}, 0.9) == {MIDDLE: 2.0, SMALL: 1.2}


# ----------------------------------------------------------------------------------------------------------------- fairness


def test_fairness_index_as_given() -> None:
    """At target throughput it is 0.8 exactly where p95 is a fifth of the SLO; beyond the SLO it is negative (SCH-7)."""
    assert fairness_index(10.0, 10.0, 0.4, 2.0) == pytest.approx(0.8)
    assert fairness_index(5.0, 10.0, 1.0, 2.0) == pytest.approx(0.25)
    assert fairness_index(10.0, 10.0, 3.0, 2.0) == pytest.approx(-0.5)
    for target, slo_s in ((0.0, 1.0), (1.0, 0.0)):
        with pytest.raises(ValueError, match="above 0"):
            fairness_index(1.0, target, 1.0, slo_s)


def test_three_readings_in_a_row() -> None:
    """Acted on at the third reading below the level, 200 ms apart; one above it starts the count again (SCH-7)."""
    rows = InRow()
    times = [0.0, 0.2, 0.25, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4]
    indexes = [0.4, 0.4, 0.4, 0.4, 0.4, 0.5, 0.4, 0.4, 0.4]
    #                    too soon       act   act  fine
    said = [rows.read(now_s, SlaClass.SILVER, index < 0.5) for now_s, index in zip(times, indexes, strict=True)]
    assert said == [False, False, False, True, True, False, False, False, True]
    assert not rows.read(2.0, SlaClass.GOLD, True)


def test_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many keys push out the one seen first."""
    monkeypatch.setattr(t, "KEPT_MAX", 2)
    row = InRow()
    for key in "abc":
        row.read(0.0, key, True)
    for key in "bc":
        row.read(t.READING_S, key, True)
    assert [row.read(2 * t.READING_S, key, True) for key in "bc"] == [True, True]
    assert not row.read(2 * t.READING_S, "a", True)


# ------------------------------------------------------------------------------------------------------------- priorities


def test_class_weights_are_those_of_a_replica_where_all_is_alike() -> None:
    """Without densities the shares are those that a replica uses by itself: 8, 4, 2, 1 (SCH-7)."""
    assert CLASS_VALUES == DEFAULT_WEIGHTS
    assert class_weights({}, {}) == {"gold": 32, "silver": 16, "bronze": 8, "batch": 4}


def test_density_turns_turns_into_work() -> None:
    """A class of heavy requests gets fewer turns, a class of light ones more, and no class falls below a lower one."""
    weights = class_weights({SlaClass.SILVER: 1.6, SlaClass.BRONZE: 0.5}, {})
    assert weights == {"gold": 32, "silver": 16, "bronze": 16, "batch": 4}
    assert class_weights({SlaClass.GOLD: 100.0}, {})["gold"] == 16
    assert densities({SlaClass.GOLD: 6.0, SlaClass.SILVER: 2.0}, {SlaClass.GOLD: 1, SlaClass.SILVER: 3}) == {
        SlaClass.GOLD: pytest.approx(3.0),
        SlaClass.SILVER: pytest.approx(1 / 3),
    }
    assert densities({}, {}) == {}
    with pytest.raises(ValueError, match="gold"):
        class_weights({SlaClass.GOLD: 0.0}, {})


@given(
    st.dictionaries(st.sampled_from(SlaClass), st.floats(1e-3, 1e3)),
    st.dictionaries(st.sampled_from(SlaClass), st.floats(0.0, 100.0)),
)
def test_nobody_starves(density: dict[SlaClass, float], boost: dict[SlaClass, float]) -> None:
    """Whatever is asked for: weights from 1 to the bound, in order of class, so each has a turn within a bound."""
    weights = class_weights(density, boost)
    values = [weights[sla_class.value] for sla_class in SlaClass]
    assert values == sorted(values, reverse=True)
    assert 1 <= values[-1] <= values[0] <= t.WEIGHT_MAX
    assert -(-sum(values) // values[-1]) <= 4 * t.WEIGHT_MAX


def test_boosts_double_and_fade() -> None:
    """A class below its due gets twice as much at each reading up to the bound, and gives it back by steps."""
    boosts: dict[SlaClass, float] = {}
    for expected in (2.0, 4.0, t.BOOST_MAX):
        boosts = boosted(boosts, {SlaClass.BRONZE: True})
        assert boosts == {sla_class: expected if sla_class is SlaClass.BRONZE else 1.0 for sla_class in SlaClass}
    boosts = boosted(boosts, {})
    assert boosts[SlaClass.BRONZE] == pytest.approx(3.6)
    for _ in range(20):
        boosts = boosted(boosts, {})
    assert set(boosts.values()) == {1.0}
