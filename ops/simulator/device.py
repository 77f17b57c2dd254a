"""Devices that several engines share: their time, how much of it they work, and how far each is from its profile."""

from __future__ import annotations

from collections.abc import Callable

from ops.simulator.engine import Engine
from ops.simulator.traces.draws import stream

SHARED_EFFICIENCY = 0.97
"""What is left of a device's time while several engines have work at once: taking turns has no gain, and a cost."""
PACE_SHARE = 0.5
"""An engine that only decodes lets its neighbours go first while its steps come at least this often, as a share of the time
per token that its model promises (ops/decisions/0008)."""


class SimDevice:
    """One device. ``engines`` are the residents' engines that have work, in the order in which they got it."""

    __slots__ = ("busy_s", "busy_since_s", "efficiency", "engines", "held_s", "held_since_s", "holds", "number")

    def __init__(self, number: int, efficiency: float = SHARED_EFFICIENCY) -> None:
        self.number = number
        self.efficiency = efficiency
        """What several engines at work share out among them."""
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


def share(engine: Engine, devices: tuple[SimDevice, ...]) -> float:
    """The rate of an engine that has work on all of ``devices``: what the most crowded one leaves it."""
    rate = 1.0
    for device in devices:
        if len(device.engines) > 1:
            rate = min(rate, _part(device, engine))
    return rate


def _part(device: SimDevice, engine: Engine) -> float:
    """Everybody gets what it wants, or as much as everybody else who wants more; what nobody wants is shared out equally."""
    wants = sorted(other.want for other in device.engines)
    count = len(wants)
    left = device.efficiency
    for number, want in enumerate(wants):
        fair = left / (count - number)
        if want > fair:
            return engine.want if engine.want < want else fair
        left -= want
    return engine.want + left / count


def began(
    now_s: float, engine: Engine, devices: tuple[SimDevice, ...], devices_of: Callable[[Engine], tuple[SimDevice, ...]]
) -> list[Engine]:
    """``engine`` got work. Returns the others whose rate changed."""
    for device in devices:
        if not device.engines:
            device.busy_since_s = now_s
        device.engines.append(engine)
    engine.set_rate(now_s, share(engine, devices))
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


def wants(
    now_s: float, engine: Engine, devices: tuple[SimDevice, ...], devices_of: Callable[[Engine], tuple[SimDevice, ...]]
) -> list[Engine]:
    """``engine`` wants more or less than before. Returns the others whose rate changed."""
    engine.set_rate(now_s, share(engine, devices))
    return _others(now_s, engine, devices, devices_of)


def _others(
    now_s: float, engine: Engine, devices: tuple[SimDevice, ...], devices_of: Callable[[Engine], tuple[SimDevice, ...]]
) -> list[Engine]:
    changed: list[Engine] = []
    for device in devices:
        for other in device.engines:
            if other is engine or other in changed:
                continue
            rate = share(other, devices_of(other))
            if rate != other.rate:
                other.set_rate(now_s, rate)
                changed.append(other)
    return changed


def error_factors(seed: int, models: int, devices: int, sigma: float) -> list[list[float]]:
    """By model and device, how many times longer everything takes than the profile says: about lognormal, with median 1.

    Made of additions and products alone, which are the same on every machine: the sum of twelve uniform draws less six is
    normal enough, and the quotient of two short polynomials (Pade) is ``exp`` to five digits where it is needed.
    """
    uniform = stream(seed, "device-error").random((12, models, devices))
    normal = uniform[0] - 6.0
    for draws in uniform[1:]:
        normal = normal + draws
    x = sigma * normal
    even, odd = 1.0 + x * x / 12.0, x / 2.0
    factors: list[list[float]] = ((even + odd) / (even - odd)).tolist()
    return factors
