"""Constants of the fixed workloads that ``python -m ops.simulator.scale_rates`` finds."""

from __future__ import annotations

SCALES: dict[str, dict[str, float]] = {
    "five-lines": {"m-small": 0.106, "m-mid": 0.0328, "mm-image": 1.28, "deepseek-r1": 0.0961, "m-large": 0.0301},
    "busy-few": {"m-small": 0.135, "m-mid": 0.0923, "deepseek-r1": 0.807, "m-large": 0.239},
}
"""By workload and ServeGen model: times the source's rates."""

STATIC: dict[str, dict[str, int]] = {
    "five-lines": {"m-small": 1, "m-mid": 2, "mm-image": 2, "deepseek-r1": 3, "m-large": 1},
    "busy-few": {"m-small": 2, "m-mid": 14, "deepseek-r1": 6, "m-large": 6},
    "burst": {"code": 4, "conv": 4},
    "burst-slo": {"code": 12, "conv": 4},
    "pulse": {"pulsed": 6, "steady-a": 2, "steady-b": 2},
    "contention": {"small": 1, "middle": 1, "large": 1},
}
"""Replicas of the smallest dedicated split, by workload and model."""
