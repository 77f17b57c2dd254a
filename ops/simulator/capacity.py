"""What a load needs and what a replica carries, by the profiles: how baselines and workloads are sized.

The engine's model is that of ``profiles.costs``, for loads that are known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from profiles.costs import context_mean_tokens, decode_work_s, prefill_s, standing_share, step_s
from subjects.messages import ModelRecord, StepCosts

LATE_SHARE_MAX = 0.01
"""Share of requests that may miss the target."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one length class: how many per second, and their mean tokens."""

    rps: float
    input_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds to the first token, and per token after it."""

    ttft_s: float
    tpot_s: float

    @classmethod
    def of(cls, record: ModelRecord) -> Targets:
        """Those of a record."""
        return cls(record.sla.ttft_p95_ms / 1000, record.sla.tpot_ms / 1000)


def compute_share(costs: StepCosts, loads: Sequence[Load], tpot_s: float, replicas: int = 1) -> float:
    """GPU-seconds per second (of whole replicas) that ``loads`` need on ``replicas`` replicas at ``tpot_s`` per token."""
    work = sum(
        load.rps * (prefill_s(costs, load.input_tokens) + decode_work_s(costs, load.input_tokens, load.output_tokens))
        for load in loads
    )
    return work + replicas * standing_share(costs, tpot_s)


def kv_bytes_needed(kv_bytes_per_token: int, loads: Sequence[Load], tpot_s: float) -> float:
    """KV of the requests that run at once when each token takes ``tpot_s`` (Little's law), whole outputs counted."""
    tokens = sum(load.rps * load.output_tokens * tpot_s * (load.input_tokens + load.output_tokens) for load in loads)
    return tokens * kv_bytes_per_token


def most_rps(
    costs: StepCosts, input_tokens: float, output_tokens: float, targets: Targets, *, kv_tokens: float, slots: int
) -> float:
    """The most requests per second, arriving as Poisson's, that one replica carries within its targets.

    * Time per token: all work and the standing share fit into the replica's time.
    * Slots and KV: with at most ``b`` requests at once, ``r * n * step(b) + b * r * prefill <= b``.
    * First token: of the prompts' queue (heavy-traffic form of a single server) at most ``LATE_SHARE_MAX`` waits longer than
      the target leaves beside the prompt's own prefill.
    """
    first_s = prefill_s(costs, input_tokens)
    rest_s = decode_work_s(costs, input_tokens, output_tokens)
    by_tpot = max(0.0, 1 - standing_share(costs, targets.tpot_s)) / (first_s + rest_s) if first_s + rest_s else math.inf
    held_tokens = input_tokens + output_tokens
    most = min(kv_tokens / held_tokens if held_tokens else math.inf, float(slots))
    if most < 1:
        return 0.0
    constant_s = costs.step_const_s * output_tokens
    each_s = output_tokens * step_s(costs, 1, context_mean_tokens(input_tokens, output_tokens)) - constant_s
    by_room = most / (constant_s + most * (each_s + first_s))
    return min(by_tpot, by_room, _rate_within(first_s, targets.ttft_s - first_s))


def _rate_within(service_s: float, wait_s: float) -> float:
    """Arrival rate at which a share ``LATE_SHARE_MAX`` of customers waits longer than ``wait_s`` for one server.

    P(W > t) is taken as u * exp(-2 (1 - u) t / (1.25 * service)) at utilisation u: exact for Poisson and exponential service
    with a variation of 1; 0.25 is the squared variation of prompt lengths within a class.
    """
    if wait_s <= 0:
        return 0.0
    if service_s <= 0:
        return math.inf
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        late = middle * math.exp(-2 * (1 - middle) * wait_s / (1.25 * service_s))
        low, high = (middle, high) if late <= LATE_SHARE_MAX else (low, middle)
    return low / service_s
