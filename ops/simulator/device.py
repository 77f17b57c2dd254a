"""Devices that several engines share: their time, how much of it they work, and how far each is from its profile."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ops.simulator.engine import Engine
from ops.simulator.traces.draws import stream

SHARED_EFFICIENCY = 0.97
"""While k engines of one device have work at once, each runs at this over k: time slices without any gain, at a cost."""


class SimDevice:
    """One device. ``engines`` are the residents' engines that have work, in the order in which they got it."""

    __slots__ = ("busy_s", "busy_since_s", "efficiency", "engines", "held_s", "held_since_s", "holds", "number")

    def __init__(self, number: int, efficiency: float = SHARED_EFFICIENCY) -> None:
        self.number = number
        self.efficiency = efficiency
        """While k engines have work at once, each runs at this over k."""
        self.engines: list[Engine] = []
        self.busy_s = 0.0
        """Time in which an engine worked, up to ``busy_since_s``."""
        self.busy_since_s = 0.0
        self.holds = 0
        """Replicas on it, in any state."""
        self.held_s = 0.0
        """Time with a replica on it, up to ``held_since_s``."""
        self.held_since_s = 0.0

    def busy_until_s(self, now_s: float) -> float:
        """Seconds since the start in which an engine worked there."""
        return self.busy_s + (now_s - self.busy_since_s if self.engines else 0.0)

    def held_until_s(self, now_s: float) -> float:
        """Seconds since the start in which it held a replica."""
        return self.held_s + (now_s - self.held_since_s if self.holds else 0.0)

    def hold(self, now_s: float, change: int) -> None:
        """One more replica (+1) or one less (-1)."""
        self.held_s = self.held_until_s(now_s)
        self.held_since_s = now_s
        self.holds += change


def share(devices: tuple[SimDevice, ...]) -> float:
    """The rate of an engine that has work on all of ``devices``: that of the most crowded one."""
    rate = 1.0
    for device in devices:
        count = len(device.engines)
        if count > 1:
            rate = min(rate, device.efficiency / count)
    return rate


def began(
    now_s: float, engine: Engine, devices: tuple[SimDevice, ...], devices_of: Callable[[Engine], tuple[SimDevice, ...]]
) -> list[Engine]:
    """``engine`` got work. Returns the others whose rate changed."""
    for device in devices:
        if not device.engines:
            device.busy_since_s = now_s
        device.engines.append(engine)
    engine.set_rate(now_s, share(devices))
    return _others(now_s, engine, devices, devices_of)


def ended(
    now_s: float, engine: Engine, devices: tuple[SimDevice, ...], devices_of: Callable[[Engine], tuple[SimDevice, ...]]
) -> list[Engine]:
    """``engine`` has no work any more. Returns the others whose rate changed."""
    for device in devices:
        device.engines.remove(engine)
        if not device.engines:
            device.busy_s += now_s - device.busy_since_s
    return _others(now_s, engine, devices, devices_of)


def _others(
    now_s: float, engine: Engine, devices: tuple[SimDevice, ...], devices_of: Callable[[Engine], tuple[SimDevice, ...]]
) -> list[Engine]:
    changed: list[Engine] = []
    for device in devices:
        for other in device.engines:
            if other is engine or other in changed:
                continue
            rate = share(devices_of(other))
            if rate != other.rate:
                other.set_rate(now_s, rate)
                changed.append(other)
    return changed


def error_factors(seed: int, models: int, devices: int, sigma: float) -> list[list[float]]:
    """By model and device, how many times longer everything takes than the profile says: lognormal with median 1.

    Rounded to six digits, so that the last bit of a machine's ``exp`` changes nothing.
    """
    if sigma == 0.0:
        return [[1.0] * devices for _ in range(models)]
    drawn = np.exp(sigma * stream(seed, "device-error").standard_normal((models, devices)))
    return [[round(float(value), 6) for value in row] for row in drawn]
