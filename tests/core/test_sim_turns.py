"""Engines that share a device take turns by what their answers need (ops/decisions/0008)."""

from __future__ import annotations

import pytest

from ops.simulator.device import SimDevice, began, share, wants
from ops.simulator.engine import Engine, Sequence
from subjects.messages import StepCosts

COSTS = StepCosts(prefill_token_s=1e-4, step_const_s=0.009, step_request_s=1e-3)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ([1.0], [1.0]),
        ([1.0, 1.0], [0.485, 0.485]),
        ([0.1, 1.0], [0.1, 0.87]),
        ([0.1, 0.2], [0.435, 0.535]),
        ([0.1, 1.0, 1.0], [0.1, 0.435, 0.435]),
        ([1.0, 0.56, 0.1], [0.435, 0.435, 0.1]),
    ],
)
def test_shares(asked: list[float], given: list[float]) -> None:
    """Small wants are met, large ones share what is left, and what nobody wants goes to all."""
    device = SimDevice(0)
    engines = [Engine(COSTS, kv_pages=100, number=number) for number in range(len(asked))]
    for engine, want in zip(engines, asked, strict=True):
        engine.want = want
        began(0.0, engine, (device,), lambda _: (device,))
    for engine in engines:
        wants(0.0, engine, (device,), lambda _: (device,))
    assert [share(engine, (device,)) for engine in engines] == pytest.approx(given)
    assert [engine.rate for engine in engines] == pytest.approx(given)


def test_what_an_engine_asks_for() -> None:
    """All while it prefills; then a step of 10 ms each 50 ms is a fifth; without a pace always all."""
    for pace_s, decoding in ((0.05, 0.2), (0.0, 1.0)):
        engine = Engine(COSTS, kv_pages=100, pace_s=pace_s)
        engine.add(0.0, Sequence(0, 10, 50))
        assert engine.want == 1.0
        engine.step(engine.end_s)
        assert engine.want == decoding
