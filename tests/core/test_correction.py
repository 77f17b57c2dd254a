"""What is asked for beyond what was reckoned (decisions 0023, 0025)."""

from __future__ import annotations

import pytest

from broker.core.plan import tunables
from broker.core.plan.need import Correction

TICK_S = 0.2


def looked(
    correction: Correction, begin_s: float, seconds: float, *, missed: float = 0.0, waits: float = 0.0, cold: bool = False
) -> float:
    """Ten requests a second end, of which a share misses. Returns when that is over."""
    now_s, owed = begin_s, 0.0
    while now_s < begin_s + seconds - 1e-9:
        now_s += TICK_S
        owed += 10 * TICK_S * missed
        bad = int(owed)
        owed -= bad
        correction.look(now_s, TICK_S, int(10 * TICK_S), bad, waits, cold=cold)
    return now_s


def test_nothing_more_is_asked_for_while_targets_are_met() -> None:
    correction = Correction()
    looked(correction, 0.0, 600.0, missed=0.004)
    assert correction.load == 0.0 and correction.share == 0.0


def test_who_waits_gets_a_little_more_load_at_once_and_no_share() -> None:
    correction = Correction()
    now_s = looked(correction, 0.0, 2.0, waits=0.6)
    assert correction.load == pytest.approx(0.06, rel=0.1) and correction.share == 0.0
    looked(correction, now_s, 60.0, waits=0.6)
    assert correction.load == pytest.approx(tunables.LOAD_MAX)


def test_misses_that_last_raise_load_and_share_to_their_bounds_and_are_forgotten() -> None:
    correction = Correction()
    now_s = looked(correction, 0.0, 600.0, missed=0.05)
    assert correction.share == pytest.approx(tunables.SHARE_MIN_MOST)
    assert correction.load == pytest.approx(tunables.LOAD_MAX + tunables.LOAD_LASTING)
    looked(correction, now_s, 3600.0)
    assert correction.share < 0.01 and correction.load < 0.01


def test_what_a_cold_start_missed_asks_for_no_share() -> None:
    """All of the first requests came too late, and none after them."""
    correction = Correction()
    now_s = looked(correction, 0.0, 60.0, missed=1.0)
    now_s = looked(correction, now_s, 300.0)
    assert correction.share == 0.0
    now_s = looked(correction, now_s, 600.0, cold=True)  # It leaves, and is woken much later.
    looked(correction, now_s, 60.0, missed=1.0)
    assert correction.share == 0.0


def test_a_relapse_is_forgotten_more_slowly() -> None:
    """The same wait once more, a minute later: what it asked for fades at half the speed."""
    correction = Correction()
    left = []
    now_s = 0.0
    for _ in range(2):
        now_s = looked(correction, now_s, 10.0, waits=1.0)
        raised = correction.load
        now_s = looked(correction, now_s, 60.0)
        left.append(correction.load / raised)
    assert left[0] < left[1] - 0.1


def test_a_higher_bound_that_no_longer_holds_takes_nothing_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunables, "LASTING_S", 1.0)
    correction = Correction()
    now_s = looked(correction, 0.0, 200.0, missed=0.5)
    most = correction.load
    looked(correction, now_s, 10.0, waits=1.0)
    assert tunables.LOAD_MAX < most * 0.8 <= correction.load
