"""TWU of a device: use times latency stress, as a number without unit (SCH-6); pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from subjects.ids import DeploymentKey

TWU_FREE = 0.4
"""Below it a device can take more models; to be calibrated per site (OPS-7)."""
TWU_FULL = 0.85
"""Above it models or requests must leave the device; to be calibrated per site (OPS-7)."""
TWU_LOWERS_HEAVIEST = 0.8
HEAVIEST_FACTOR = 0.6
WEIGHT_SMALL, WEIGHT_8B, WEIGHT_72B = 1.0, 2.3, 8.7
"""Base weights where nothing was measured."""


class TokenWork(msgspec.Struct, frozen=True):
    """The part of one request that a device did in a window.

    ``tokens``: prompt tokens computed and tokens generated in the window. ``latency_s``: the time since its arrival, to the
    end of the window for one that still runs. ``slo_s``: the time that its targets allow for what it has so far
    (:func:`allowed_s`), so that the quotient is 1 for a request exactly on its targets, finished or not.
    """

    weight: float
    tokens: float
    latency_s: float
    slo_s: float


def allowed_s(ttft_s: float, tpot_s: float, output_tokens: int) -> float:
    """Time that the targets allow for so many output tokens; before the first one, the time to the first."""
    return ttft_s + tpot_s * max(0, output_tokens - 1)


def twu(parts: Iterable[TokenWork], window_s: float, baseline_tokens_per_s: float) -> float:
    """``sum(weight * tokens * latency / slo) / (window * baseline)``: use times latency stress, without unit.

    All requests that ran in the window count, those still running with their elapsed part: the long contexts that it must
    warn of finish too late to be seen otherwise. ``baseline_tokens_per_s`` is what the device makes at weight 1.
    """
    _check(window_s, baseline_tokens_per_s)
    return sum(part.weight * part.tokens * part.latency_s / part.slo_s for part in parts) / (
        window_s * baseline_tokens_per_s
    )


def twu_raw_s(parts: Iterable[TokenWork], window_s: float, baseline_tokens_per_s: float) -> float:
    """The source's form, ``sum(tokens * latency) / (window * baseline)``, in seconds; exported beside :func:`twu`."""
    _check(window_s, baseline_tokens_per_s)
    return sum(part.tokens * part.latency_s for part in parts) / (window_s * baseline_tokens_per_s)


def _check(window_s: float, baseline_tokens_per_s: float) -> None:
    if not window_s > 0.0 or not baseline_tokens_per_s > 0.0:
        raise ValueError("window and baseline must be above 0")


def default_weight(weights_bytes: int) -> float:
    """The base weight of a model of that size where no capacity profile gives one: small, 8B or 72B, nearest in ratio.

    Bounds are the geometric means of 7.6 GB, 16 GB and 144 GB of weights.
    """
    if weights_bytes < 11_000_000_000:
        return WEIGHT_SMALL
    return WEIGHT_8B if weights_bytes < 48_000_000_000 else WEIGHT_72B


def current_weights(base: Mapping[DeploymentKey, float], device_twu: float) -> dict[DeploymentKey, float]:
    """Above a TWU of 0.8 the heaviest model's weight is multiplied by 0.6: lower priority, never refusal.

    Of equally heavy models the one with the lowest hash is meant. A model alone has nobody to give way to.
    """
    weights = dict(base)
    if device_twu > TWU_LOWERS_HEAVIEST and len(weights) > 1:
        heaviest = min(weights, key=lambda deployment: (-weights[deployment], deployment))
        weights[heaviest] *= HEAVIEST_FACTOR
    return weights
