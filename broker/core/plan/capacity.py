"""What a replica can carry, and what share of a device a load needs (PRO-4): arithmetic on fitted step costs.

One unit of capacity is one replica's devices for one second per second: 1.0 is a whole device (or a whole group of linked
ones) busy all the time. The model of an engine is continuous batching in which waiting prompts go before decoding:

* A request of ``L`` input and ``n`` output tokens costs ``prefill(L)`` and, at a batch so large that the constant part of a
  step is shared by many, ``n * (step_request_s + step_context_token_s * (L + n / 2))`` of decoding: its *work*.
* The constant part is paid once per step whatever the batch. A replica whose tokens may take ``T`` seconds each makes
  ``1 / T`` steps per second, so it eats ``step_const_s / T`` of its devices: its *standing share*. Slower steps have larger
  batches, so the cost of a request falls with the batch, and the targets say how far it may.
* A load of ``r`` requests per second of work ``w`` each, on ``m`` replicas, needs ``r * w + m * step_const_s / T`` in all.

Where several replicas share a device's time, each has the speed ``share`` of one that is alone. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from broker.core.plan.policy import Arrivals
from profiles.costs import step_s
from subjects.messages import ModelRecord, StepCosts

TPOT_USED = 0.65
"""Share of the time per token that plans use; the rest is for bursts and for profiles that are a little wrong."""
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


class Limit(Enum):
    """What bounds a throughput."""

    KV = "KV memory"
    SLOTS = "slots"
    TPOT = "time per token"
    TTFT = "time to first token"


@dataclass(frozen=True, slots=True)
class Throughput:
    """The most that one replica carries within its targets, and what stops it there."""

    rps: float
    batch: float
    limit: Limit


# ------------------------------------------------------------------------------------------------------ one request's work


def context_mean_tokens(input_tokens: float, output_tokens: float) -> float:
    """Tokens that a request holds on average while it decodes."""
    return input_tokens + output_tokens / 2


def decode_work_s(costs: StepCosts, input_tokens: float, output_tokens: float) -> float:
    """Seconds of decoding that a request adds to those it is batched with, without the constant part of the steps."""
    token_s = costs.step_request_s + costs.step_context_token_s * context_mean_tokens(input_tokens, output_tokens)
    return output_tokens * token_s


def prefill_work_s(costs: StepCosts, input_tokens: float) -> float:
    """Seconds of prefill, for a mean of tokens too."""
    return costs.prefill_token_s * input_tokens + costs.prefill_token2_s * input_tokens * input_tokens


def request_s(costs: StepCosts, input_tokens: float, output_tokens: float, batch: float) -> float:
    """Seconds of a replica that one of ``batch`` equal requests costs, its part of the constant included."""
    constant_s = output_tokens * costs.step_const_s / batch
    return prefill_work_s(costs, input_tokens) + constant_s + decode_work_s(costs, input_tokens, output_tokens)


def arrivals_work_s(costs: StepCosts, arrivals: Arrivals) -> tuple[float, float]:
    """Prefill and decode seconds of what arrived; within a length class all requests count as equal."""
    first_s = rest_s = 0.0
    for count, inputs, outputs in zip(arrivals.requests, arrivals.input_tokens, arrivals.output_tokens, strict=True):
        if count:
            first_s += count * prefill_work_s(costs, inputs / count)
            rest_s += count * decode_work_s(costs, inputs / count, outputs / count)
    return first_s, rest_s


# ------------------------------------------------------------------------------------------------- what a load needs


def standing_share(costs: StepCosts, tpot_s: float) -> float:
    """Share of its devices that a replica with anything to decode eats whatever its batch."""
    return costs.step_const_s / tpot_s


def compute_share(costs: StepCosts, loads: Sequence[Load], tpot_s: float, replicas: int = 1) -> float:
    """GPU-seconds per second (of whole replicas) that ``loads`` need on ``replicas`` replicas at ``tpot_s`` per token."""
    work = sum(
        load.rps * (prefill_work_s(costs, load.input_tokens) + decode_work_s(costs, load.input_tokens, load.output_tokens))
        for load in loads
    )
    return work + replicas * standing_share(costs, tpot_s)


def kv_bytes_needed(kv_bytes_per_token: int, loads: Sequence[Load], tpot_s: float) -> float:
    """KV of the requests that run at once when each token takes ``tpot_s`` (Little's law), whole outputs counted."""
    tokens = sum(load.rps * load.output_tokens * tpot_s * (load.input_tokens + load.output_tokens) for load in loads)
    return tokens * kv_bytes_per_token


# --------------------------------------------------------------------------------------------- what a replica can carry


def throughput(
    costs: StepCosts,
    input_tokens: float,
    output_tokens: float,
    targets: Targets,
    *,
    kv_tokens: float,
    slots: int,
    share: float = 1.0,
    burstiness: float = 1.0,
) -> Throughput:
    """The most requests per second that one replica carries within its targets.

    ``burstiness`` is the squared coefficient of variation of the times between arrivals (1 for Poisson). Bounds:

    * Time per token: all work and the standing share fit into ``share``.
    * Slots and KV: with at most ``b`` requests at once, ``r * n * step(b) + b * r * prefill <= b * share``.
    * First token: of the prompts' queue (heavy-traffic form of a single server) at most ``LATE_SHARE_MAX`` waits longer than
      the target leaves beside the prompt's own prefill.
    """
    first_s = prefill_work_s(costs, input_tokens) / share
    rest_s = decode_work_s(costs, input_tokens, output_tokens) / share
    constant = standing_share(costs, targets.tpot_s) / share
    by_tpot = max(0.0, 1 - constant) / (first_s + rest_s) if first_s + rest_s else math.inf
    held_tokens = input_tokens + output_tokens
    most, limit = min(
        (kv_tokens / held_tokens if held_tokens else math.inf, Limit.KV), (float(slots), Limit.SLOTS), key=lambda b: b[0]
    )
    decode_s = output_tokens * step_s(costs, 1, context_mean_tokens(input_tokens, output_tokens)) / share
    if most < 1:
        return Throughput(0.0, 0.0, limit)
    constant_s = costs.step_const_s * output_tokens / share
    each_s = decode_s - constant_s
    by_room = most / (constant_s + most * (each_s + first_s))
    by_ttft = _rate_within(first_s, targets.ttft_s - first_s, burstiness)
    rps, bound = min((by_tpot, Limit.TPOT), (by_room, limit), (by_ttft, Limit.TTFT), key=lambda entry: entry[0])
    free = 1 - rps * (first_s + rest_s)
    batch = min(most, rps * constant_s / free) if free > 0 else most
    return Throughput(rps, batch, bound)


def _rate_within(service_s: float, wait_s: float, burstiness: float) -> float:
    """Arrival rate at which a share ``LATE_SHARE_MAX`` of customers waits longer than ``wait_s`` for one server.

    P(W > t) is taken as u * exp(-2 (1 - u) t / ((burstiness + 0.25) * service)) at utilisation u: exact for Poisson and
    exponential service with a variation of 1, and 0.25 is the squared variation of prompt lengths within a class.
    """
    if wait_s <= 0:
        return 0.0
    if service_s <= 0:
        return math.inf
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        late = middle * math.exp(-2 * (1 - middle) * wait_s / ((burstiness + 0.25) * service_s))
        low, high = (middle, high) if late <= LATE_SHARE_MAX else (low, middle)
    return low / service_s
