"""How long an engine takes: fitted costs of one model on one kind of device, and the arithmetic on them (PRO-4).

One engine step that decodes ``batch`` requests holding ``context`` tokens in all takes
``step_const_s + step_request_s * batch + step_context_token_s * context`` seconds; prefilling a prompt of ``L`` tokens adds
``prefill_token_s * L + prefill_token2_s * L**2``. The form is that of the public fits in ``profiles/hardware``.
"""

from __future__ import annotations

from subjects.messages import StepCosts

LENGTH_CLASS_TOKENS_MAX = (512, 2048)
"""Upper ends of the short and the medium length class, in input tokens (SCH-5)."""
LENGTH_CLASSES = ("short", "medium", "long")


def length_class(input_tokens: int) -> int:
    """0 short, 1 medium, 2 long."""
    if input_tokens <= LENGTH_CLASS_TOKENS_MAX[0]:
        return 0
    return 1 if input_tokens <= LENGTH_CLASS_TOKENS_MAX[1] else 2


def prefill_s(costs: StepCosts, input_tokens: int) -> float:
    """Seconds of the whole replica to prefill one prompt alone."""
    return costs.prefill_token_s * input_tokens + costs.prefill_token2_s * input_tokens * input_tokens


def step_s(costs: StepCosts, batch: int, context_tokens: float) -> float:
    """Seconds of one decode step of ``batch`` requests that hold ``context_tokens`` tokens in all; 0 for an empty batch."""
    if batch == 0:
        return 0.0
    return costs.step_const_s + costs.step_request_s * batch + costs.step_context_token_s * context_tokens


CHUNK_SHARE = 0.5
"""Of the time per token that the prompt part of one step may take."""
CHUNK_TOKENS = (256, 512, 1024, 2048, 4096, 8192)


def chunk_tokens(costs: StepCosts, tpot_s: float) -> int:
    """Prompt tokens that one step should prefill at most, so that the answers that run get their tokens in time.

    The engine's own default is sized for throughput: 8,192 tokens of a 70B model hold up every running answer for a third of
    a second, and a short answer has no other tokens to make good for it.
    """
    fitting = [tokens for tokens in CHUNK_TOKENS if prefill_s(costs, tokens) <= CHUNK_SHARE * tpot_s]
    return max(fitting, default=CHUNK_TOKENS[0])
