"""Forecasts of work per model and length class (SCH-5)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.core.plan import tunables
from broker.core.plan.forecast import ALL_CLASSES, Forecaster, Key
from broker.core.plan.policy import ExpectedLoad
from broker.core.plan.seasons import DAY_BINS, Seasons
from broker.core.plan.series import Series, surge_share
from broker.core.plan.tunables import BIN_S
from profiles.features import Ring
from subjects.ids import DeploymentKey

A, B = DeploymentKey("a" * 64), DeploymentKey("b" * 64)
DAY_S = 86_400


NOTHING = (0.0, 0.0)


def predict(forecaster: Forecaster, now_s: float, key: Key, horizon_s: float) -> float:
    """The mean from now on."""
    return forecaster.predict(now_s, key, 0.0, horizon_s)[0]


def rate_at(forecaster: Forecaster, now_s: float, key: Key, ahead_s: float) -> float:
    """The rate at one moment."""
    return forecaster.predict(now_s, key, ahead_s, ahead_s)[0]


def run(forecaster: Forecaster, begin_s: int, rates: list[float], model: DeploymentKey = A, per_s: int = 1) -> float:
    """One look a second; ``rates`` has the work of each second. Returns the time after it."""
    for step, rate in enumerate(rates):
        now_s = begin_s + step + 0.5
        if rate:
            forecaster.observe(now_s, (model, 0), rate, per_s)
        forecaster.heard(now_s)
    now_s = float(begin_s + len(rates))
    forecaster.heard(now_s)
    return now_s


def test_steady_load_is_forecast_as_it_is() -> None:
    """Without change every figure of every horizon is the load itself, for the class and for all classes."""
    forecaster = Forecaster()
    now_s = run(forecaster, 0, [2.0] * 400)
    for horizon_s in (0.2, 3.0, 10.0, 120.0, 1800.0):
        for key in ((A, 0), (A, ALL_CLASSES)):
            assert forecaster.predict(now_s, key, 0.0, horizon_s) == pytest.approx((2.0, 0.0))
            assert forecaster.observed_s(key) == 400.0
    assert rate_at(forecaster, now_s, (A, 0), 60.0) == pytest.approx(2.0)


def test_a_model_never_seen_has_no_load() -> None:
    """A new model's forecast is zero and says that it was observed for no time."""
    forecaster = Forecaster()
    run(forecaster, 0, [1.0])
    assert forecaster.predict(1.0, (B, 0), 0.0, 10.0) == NOTHING
    assert rate_at(forecaster, 1.0, (B, 0), 10.0) == 0.0


def test_a_new_model_counts_from_its_first_request() -> None:
    """The running means of a young series are plain means, so the first seconds are not diluted by time before it."""
    forecaster = Forecaster()
    run(forecaster, 0, [0.0] * 100)
    now_s = run(forecaster, 100, [3.0] * 5)
    assert predict(forecaster, now_s, (A, 0), 120.0) == pytest.approx(3.0)
    assert forecaster.observed_s((A, 0)) == 5.0


def test_zero_load_fades_and_a_gap_does_not() -> None:
    """Seconds without load lower the forecast; seconds that nobody heard of do not (a gap is not zero load)."""
    quiet, deaf = Forecaster(), Forecaster()
    for forecaster in (quiet, deaf):
        run(forecaster, 0, [2.0] * 600)
    run(quiet, 600, [0.0] * 600)
    assert predict(quiet, 1200.0, (A, 0), 120.0) < 0.05
    deaf.observe(1200.0, (A, 0), 1200.0)  # What was counted meanwhile comes as one lump, and is left out.
    deaf.heard(1200.0)
    assert predict(deaf, 1200.0, (A, 0), 120.0) == pytest.approx(2.0)
    now_s = run(deaf, 1201, [2.0] * 60)
    assert predict(deaf, now_s, (A, 0), 120.0) == pytest.approx(2.0)


def test_zero_load_for_hours_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long silence that was heard costs as little as a short one, and ends in a forecast of nothing."""
    monkeypatch.setattr(tunables, "PER_LOOK", 1)
    forecaster = Forecaster()
    run(forecaster, 0, [1.0] * 60)
    for now_s in range(60, 20_000, 4):
        forecaster.heard(float(now_s))
    assert predict(forecaster, 19_996.0, (A, 0), 120.0) == pytest.approx(0.0, abs=1e-6)
    series = Series(0)
    series.add(5.0, 1)
    series.settle(10 * DAY_S, 0.0)
    assert (series.windows, series.surge()) == (10 * DAY_S, None)
    assert series.mix(0.0, 1800.0, 0.0)[0] == pytest.approx(0.0, abs=1e-6)


def test_bursts_do_not_move_the_mean() -> None:
    """One second in ten with all the load: the mean is a tenth."""
    forecaster = Forecaster()
    now_s = run(forecaster, 0, ([10.0] + [0.0] * 9) * 60)
    assert predict(forecaster, now_s, (A, 0), 120.0) == pytest.approx(1.0, rel=0.15)


def test_a_surge_is_followed_at_once() -> None:
    """Load that jumps far above its noise moves the next two minutes' mean within seconds, and half an hour's less."""
    forecaster = Forecaster()
    calm = [0.9, 1.1, 1.0, 1.2, 0.8] * 100
    now_s = run(forecaster, 0, calm, per_s=10)
    assert predict(forecaster, now_s, (A, 0), 120.0) == pytest.approx(1.0, rel=0.1)
    now_s = run(forecaster, 500, [8.0] * 5, per_s=80)
    mean = predict(forecaster, now_s, (A, 0), 120.0)
    assert mean > 3.5
    assert predict(forecaster, now_s, (A, 0), 1800.0) < mean
    assert [surge_share(horizon_s) for horizon_s in (0.0, 120.0, 1200.0)] == [1.0, 1.0, 0.1]


def test_one_heavy_request_is_no_surge() -> None:
    """A single long prompt is work, not a change of traffic."""
    forecaster = Forecaster()
    run(forecaster, 0, [0.1] * 500)
    now_s = run(forecaster, 500, [40.0])
    assert predict(forecaster, now_s, (A, 0), 120.0) < 3.5


def test_the_day_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one day with a step at 3 h the forecast ten minutes before it is above the load now, unlike the last value."""
    monkeypatch.setattr(tunables, "GAP_S", 100.0)
    forecaster = Forecaster(unix_offset_s=7 * 3600.0)
    step, end = 3 * 60, DAY_S // 60 + 3 * 60 - 10
    for minute in range(end):
        busy = step <= minute % 1440 < step + 480
        forecaster.observe(minute * 60.0, (A, 0), (4.0 if busy else 1.0) * 60.0, 60)
        forecaster.heard(minute * 60.0)
        forecaster.heard(minute * 60.0 + 30)
    now_s = end * 60.0
    forecaster.heard(now_s)
    assert predict(forecaster, now_s, (A, 0), 1800.0) > 1.25  # The last value says 1.
    assert rate_at(forecaster, now_s, (A, 0), 1200.0) > 1.25 * rate_at(forecaster, now_s, (A, 0), 60.0)


def test_seasons_need_an_earlier_day() -> None:
    """What was never seen is unknown; a bin leans on its neighbours; the week is told apart from the second week on."""
    seasons = Seasons()
    for number in range(9 * DAY_BINS):
        weekend = number // DAY_BINS % 7 in (5, 6)
        seasons.learn(number, 1.0 if weekend else 3.0)
        if number == DAY_BINS // 2:
            assert seasons.mean_rate(number + 2, number + 3) is None
            assert seasons.mean_rate(0, 5) == 3.0
    saturday = 12 * DAY_BINS
    assert seasons.mean_rate(saturday + 100, saturday + 110, week=True) == 1.0
    assert seasons.mean_rate(saturday - 100, saturday - 90, week=True) == 3.0
    assert seasons.mean_rate(100, 110) == pytest.approx(3.0, abs=0.9)
    assert BIN_S * DAY_BINS == DAY_S


def test_an_event_is_foreseen_and_leaves_no_trace() -> None:
    """A declared event multiplies what is expected in its time, by the share that it covers; afterwards all is as before."""
    forecaster = Forecaster()
    now_s = run(forecaster, 0, [2.0] * 600)
    forecaster.declare([ExpectedLoad("sale", 660.0, 1260.0, A, factor=3.0)])
    assert predict(forecaster, now_s, (A, 0), 30.0) == pytest.approx(2.0)
    assert predict(forecaster, now_s, (A, 0), 120.0) == pytest.approx(4.0)
    assert rate_at(forecaster, now_s, (A, 0), 90.0) == pytest.approx(6.0)
    now_s = run(forecaster, 600, [2.0] * 60 + [6.0] * 540)
    assert predict(forecaster, now_s, (A, 0), 10.0) == pytest.approx(6.0)
    assert rate_at(forecaster, now_s, (A, 0), 120.0) == pytest.approx(2.0)
    forecaster.declare([])
    assert predict(forecaster, now_s, (A, 0), 10.0) == pytest.approx(2.0)


def test_an_event_can_announce_a_new_model() -> None:
    """``at_least`` gives a forecast to a model that nobody has called yet; it is told of all classes together."""
    forecaster = Forecaster()
    forecaster.declare([ExpectedLoad("launch", 100.0, 200.0, B, at_least=5.0)])
    assert predict(forecaster, 100.0, (B, ALL_CLASSES), 100.0) == 5.0
    assert predict(forecaster, 0.0, (B, ALL_CLASSES), 200.0) == 2.5
    assert forecaster.predict(100.0, (B, 0), 0.0, 100.0) == NOTHING
    assert forecaster.predict(100.0, (A, ALL_CLASSES), 0.0, 100.0) == NOTHING
    assert rate_at(forecaster, 0.0, (B, ALL_CLASSES), 150.0) == 5.0


@pytest.mark.parametrize(
    "event",
    [
        ExpectedLoad("x", 1.0, 1.0),
        ExpectedLoad("x", 0.0, 1.0, factor=0.0),
        ExpectedLoad("x", 0.0, 1.0, factor=math.nan),
        ExpectedLoad("x", 0.0, 1.0, at_least=-1.0),
    ],
)
def test_a_wrong_event_is_refused(event: ExpectedLoad) -> None:
    """An event without time, or with a factor that is no factor."""
    with pytest.raises(ValueError, match="event 'x'"):
        Forecaster().declare([event])


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """More keys than fit push out the one without load for longest; of events what is over goes, then the furthest."""
    monkeypatch.setattr(tunables, "KEPT_MAX", 4)
    monkeypatch.setattr(tunables, "EVENTS_MAX", 2)
    forecaster = Forecaster()
    for number in range(6):
        forecaster.observe(float(number), (DeploymentKey(f"{number:064x}"), 0), 1.0)
        forecaster.heard(float(number))
    assert len(forecaster._series) == 4
    forecaster.heard(6.0)
    assert forecaster.observed_s((DeploymentKey(f"{5:064x}"), 0)) > 0
    assert forecaster.predict(6.0, (DeploymentKey(f"{0:064x}"), 0), 0.0, 10.0) == NOTHING
    events = [ExpectedLoad(f"e{number}", 6.0, 10.0 + number, A, at_least=1.0 + number) for number in (2, 0, 1)]
    forecaster.declare(events)
    assert predict(forecaster, 6.0, (A, ALL_CLASSES), 4.0) == 2.0
    assert predict(forecaster, 10.5, (A, ALL_CLASSES), 0.0) == 2.0
    forecaster.heard(10.5)
    forecaster.declare([*events[1:], ExpectedLoad("later", 20.0, 30.0, A, at_least=9.0)])
    assert rate_at(forecaster, 10.5, (A, ALL_CLASSES), 0.0) == 2.0
    assert rate_at(forecaster, 10.5, (A, ALL_CLASSES), 10.0) == 9.0


@pytest.mark.parametrize("work_s", [-1.0, math.nan, math.inf])
def test_work_is_a_number(work_s: float) -> None:
    """What would spoil every later mean is refused."""
    with pytest.raises(ValueError, match="work_s"):
        Forecaster().observe(0.0, (A, 0), work_s)


looks = st.lists(st.tuples(st.floats(0.05, 8.0), st.sampled_from([0, 1, 2]), st.floats(0.0, 50.0)), max_size=60)


@given(looks, st.sampled_from([0.2, 3.0, 10.0, 120.0, 1800.0]))
def test_figures_are_finite(steps: list[tuple[float, int, float]], horizon_s: float) -> None:
    """Whatever arrives, with gaps and pauses: nothing is negative or infinite."""
    forecaster = Forecaster()
    now_s = 0.0
    for pause_s, place, work_s in steps:
        now_s += pause_s
        forecaster.observe(now_s, (A, place), work_s)
        forecaster.heard(now_s)
        for key in ((A, place), (A, ALL_CLASSES)):
            assert all(0.0 <= figure < math.inf for figure in forecaster.predict(now_s, key, 0.0, horizon_s))


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=50))
def test_a_ring_is_the_sorted_last_values(values: list[float]) -> None:
    """Quantiles equal those of the last values."""
    ring: Ring[float] = Ring(8)
    for value in values:
        ring.add(value)
    last = sorted(values[-8:])
    assert len(ring) == len(last)
    assert ring.quantile(0.5) == last[math.ceil(len(last) / 2) - 1]
