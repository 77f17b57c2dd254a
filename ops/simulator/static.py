"""The smallest dedicated split of a workload: how many whole-GPU replicas each model needs when it has them for itself.

Found by simulating each model alone (``dedicated``), not by arithmetic: with so many replicas it meets the SLO, with one
less it misses it.
"""

from __future__ import annotations

from ops.simulator.bound import charges_of, least_gpu_hours
from ops.simulator.dedicated import attainment, only
from ops.simulator.types import Workload

REPLICAS_MAX = 1024


def least_replicas(workload: Workload, model: int, seed: int, share: float = 0.99) -> int:
    """The fewest dedicated replicas with which one model has ``share`` of its measured requests within SLO.

    Raises:
        ValueError: not even ``REPLICAS_MAX`` are enough.
    """
    tried: dict[int, bool] = {}

    def enough(replicas: int) -> bool:
        if replicas not in tried:
            tried[replicas] = attainment(workload, model, replicas, seed) >= share
        return tried[replicas]

    high = low = _surely_needed(workload, model, seed, share)
    while not enough(high):
        if high == REPLICAS_MAX:
            raise ValueError(f"{workload.models[model].name} misses its SLO with {REPLICAS_MAX} replicas too")
        low = high + 1
        high = min(REPLICAS_MAX, max(high + 1, high * 3 // 2))
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return high


def _surely_needed(workload: Workload, model: int, seed: int, share: float) -> int:
    """A number below which nothing need be tried. Devices may be faster than their profile, by less than a fifth."""
    charges = []
    for window in workload.windows:
        whole = charges_of(workload, only(workload.trace(seed, window), model), window, [0.8] * len(workload.models))
        charges.append(whole)
    hours = sum(window.hours for window in charges)
    # ``only`` keeps the model's number, so the other models have no charges.
    return max(1, int(least_gpu_hours(charges, share) / hours / workload.models[model].gpus))
