"""Times of an engine from fitted costs, and what follows from them."""

from __future__ import annotations

import pytest

from profiles.costs import CHUNK_TOKENS, chunk_tokens, length_class, prefill_s, step_s
from subjects.messages import StepCosts

COSTS = StepCosts(
    prefill_token_s=44.6e-6, prefill_token2_s=0.0, step_const_s=11e-3, step_request_s=55e-6, step_context_token_s=2.8e-8
)


def test_times_by_hand() -> None:
    """A 70B model on four devices: 1,000 tokens of prompt, 64 answers that hold 100,000 tokens."""
    assert prefill_s(COSTS, 1000) == pytest.approx(0.0446)
    assert step_s(COSTS, 64, 100_000) == pytest.approx(0.011 + 0.00352 + 0.0028)
    assert step_s(COSTS, 0, 0) == 0.0


def test_length_classes() -> None:
    """Up to 512, up to 2,048, longer (SCH-5)."""
    assert [length_class(tokens) for tokens in (1, 512, 513, 2048, 2049)] == [0, 0, 1, 1, 2]


def test_a_step_prefills_half_the_time_per_token_at_most() -> None:
    """The largest power of two that does; never none at all."""
    assert chunk_tokens(COSTS, 0.1) == 1024
    assert chunk_tokens(COSTS, 10.0) == CHUNK_TOKENS[-1]
    assert chunk_tokens(COSTS, 0.001) == CHUNK_TOKENS[0]
