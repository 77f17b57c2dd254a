"""What learning changes on devices that are not alike (SCH-10)."""

from __future__ import annotations

from ops.simulator.learning_report import run_pool


def test_learning_steadies_the_p95() -> None:
    """The same requests on the same uneven devices: with learning replicas leave slow devices and the p95 varies less."""
    without, with_learning = (run_pool(1, learns=learns, seconds=1200.0) for learns in (False, True))
    assert without.moves == 0
    assert 1 <= with_learning.moves <= 3
    assert with_learning.variance < 0.8 * without.variance
    assert with_learning.p95_s < without.p95_s
    assert with_learning.within_slo >= without.within_slo
