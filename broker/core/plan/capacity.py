"""What share of a device a load needs (PRO-4): arithmetic on fitted step costs.

One unit of capacity is one replica's devices for one second per second: 1.0 is a whole device (or a whole group of linked
ones) busy all the time. The model of an engine is continuous batching in which waiting prompts go before decoding:

* A request of ``L`` input and ``n`` output tokens costs ``prefill(L)`` and, at a batch so large that the constant part of a
  step is shared by many, ``n * (step_request_s + step_context_token_s * (L + n / 2))`` of decoding: its *work*.
* The constant part is paid once per step whatever the batch. A replica whose tokens may take ``T`` seconds each makes
  ``1 / T`` steps per second, so it eats ``step_const_s / T`` of its devices: its *standing share*. Slower steps have larger
  batches, so the cost of a request falls with the batch, and the targets say how far it may.
* A load of ``r`` requests per second of work ``w`` each, on ``m`` replicas, needs ``r * w + m * step_const_s / T`` in all.

All functions are pure.
"""

from __future__ import annotations

from subjects.messages import StepCosts


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


def standing_share(costs: StepCosts, tpot_s: float) -> float:
    """Share of its devices that a replica with anything to decode eats whatever its batch."""
    return costs.step_const_s / tpot_s
