"""Online learning of (model, device) factors (SCH-10)."""

from __future__ import annotations

import math

import pytest

from broker.core.plan import tunables
from broker.core.plan.learning import DeviceScores
from broker.core.pool.catalogue import DeviceKey
from subjects.ids import DeploymentKey, DeviceId, WorkerId

A, B = DeploymentKey("a" * 64), DeploymentKey("b" * 64)
DEVICES = [(WorkerId("w"), DeviceId(f"gpu{number}")) for number in range(6)]
TRUE = [1.0, 1.1, 0.9, 1.6, 1.0, 1.3]


def teach(
    scores: DeviceScores, begin_s: float, periods: int, true: list[float], model: DeploymentKey = A, common: float = 1.2
) -> float:
    """So many periods of 40 observations per device, spread evenly around the true factor; returns the time after them."""
    now_s = begin_s
    scores.look(now_s)
    for _ in range(periods):
        for number in range(40):
            noise = math.exp(0.3 * math.sin(number))
            for device, factor in zip(DEVICES, true, strict=True):
                scores.observe(model, device, 1.0, common * factor * noise)
        now_s += 300.0
        for _ in range(20):
            scores.look(now_s)
    return now_s


def relative(true: list[float]) -> dict[DeviceKey, float]:
    """The factors over their geometric mean."""
    mean = math.prod(true) ** (1 / len(true))
    return {device: factor / mean for device, factor in zip(DEVICES, true, strict=True)}


def test_slow_devices_are_found() -> None:
    """After four periods each device's preference is within a tenth of the truth; what all share cancels out (SCH-10)."""
    scores = DeviceScores()
    teach(scores, 0.0, 4, TRUE)
    assert scores.preference(A, DEVICES) == pytest.approx(relative(TRUE), rel=0.1)
    weights = scores.routing_weights(A, {f"r{number}": device for number, device in enumerate(DEVICES)})
    assert max(weights, key=weights.__getitem__) == "r2"
    assert min(weights, key=weights.__getitem__) == "r3"


def test_what_was_learned_of_a_device_helps_other_models() -> None:
    """A model never seen on a slow device expects it to be slower than others."""
    scores = DeviceScores()
    teach(scores, 0.0, 4, TRUE)
    preference = scores.preference(B, DEVICES)
    assert max(preference, key=preference.__getitem__) == DEVICES[3]


def test_a_change_is_followed() -> None:
    """When the slow device is repaired and another one throttles, the preference turns within an hour."""
    scores = DeviceScores()
    now_s = teach(scores, 0.0, 12, TRUE)
    swapped = [TRUE[3], *TRUE[1:3], TRUE[0], *TRUE[4:]]
    teach(scores, now_s, 12, swapped)
    preference = scores.preference(A, DEVICES)
    assert preference[DEVICES[0]] > 1.15 > preference[DEVICES[3]]


def test_few_or_senseless_observations_teach_nothing() -> None:
    """A pair seen less than five times in a period, or a time of zero, makes no example."""
    scores = DeviceScores()
    scores.look(0.0)
    for _ in range(4):
        scores.observe(A, DEVICES[0], 1.0, 9.0)
        for predicted_s, seen_s in ((0.0, 1.0), (1.0, 0.0), (math.nan, 1.0)):
            scores.observe(A, DEVICES[1], predicted_s, seen_s)
    scores.look(300.0)
    assert scores.learned == 0
    assert scores.factor(A, DEVICES[0]) == 1.0
    assert scores.preference(A, []) == {}


def test_factors_are_bounded_and_repeatable() -> None:
    """However slow a device is, its factor stays within the bound; the same calls give the same digits."""
    extreme = [1.0, 1.0, 1.0, 50.0, 1.0, 0.01]
    first, second = DeviceScores(), DeviceScores()
    for scores in (first, second):
        teach(scores, 0.0, 10, extreme)
    factors = [first.factor(A, device) for device in DEVICES]
    assert all(0.5 <= factor <= 2.0 for factor in factors)
    assert factors == [second.factor(A, device) for device in DEVICES]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """More pairs and examples than fit are left out, and a look learns only so many."""
    monkeypatch.setattr(tunables, "KEPT_MAX", 10)
    monkeypatch.setattr(tunables, "SEEN_MIN", 1)
    scores = DeviceScores()
    scores.look(0.0)
    for number in range(50):
        scores.observe(DeploymentKey(f"{number:064x}"), DEVICES[0], 1.0, 2.0, 1.0)
    scores.look(300.0)
    assert scores.learned == 10
    assert len(scores._rates) == 10
    assert not scores._examples
