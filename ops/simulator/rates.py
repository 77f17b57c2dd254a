"""Constants of the fixed workloads that ``python -m tests.workloads.scale_rates`` finds.

Found largest scales (before the margin): five-lines m-small 0.1143, m-mid 0.0346, mm-image 1.342, deepseek-r1 0.1002,
m-large 0.0324; busy-few m-small 0.1454, m-mid 0.0993, deepseek-r1 0.868, m-large 0.257. One is set lower than its
margin asks: m-large of five-lines is a single replica whose windows hang on a few bursts; at 0.0301 and 0.0275 one of
nine unseen seeds missed the SLO over the headline's windows (0.989), at 0.0255 the worst of nine has 0.995.
"""

from __future__ import annotations

SCALES: dict[str, dict[str, float]] = {
    "five-lines": {"m-small": 0.106, "m-mid": 0.0328, "mm-image": 1.28, "deepseek-r1": 0.0961, "m-large": 0.0255},
    "busy-few": {"m-small": 0.138, "m-mid": 0.0974, "deepseek-r1": 0.843, "m-large": 0.25},
}
"""By workload and ServeGen model: times the source's rates."""

STATIC: dict[str, dict[str, int]] = {
    "five-lines": {"m-small": 1, "m-mid": 2, "mm-image": 2, "deepseek-r1": 3, "m-large": 1},
    "busy-few": {"m-small": 2, "m-mid": 14, "deepseek-r1": 6, "m-large": 6},
    "burst": {"code": 4, "conv": 4},
    "burst-slo": {"code": 12, "conv": 3},
    "pulse": {"pulsed": 6, "steady-a": 2, "steady-b": 2},
    "contention": {"small": 1, "middle": 1, "large": 1},
}
"""Replicas of the smallest dedicated split, by workload and model."""
