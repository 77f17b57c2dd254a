"""The simulated engine at its bounds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from subjects.ids import RequestId
from subjects.messages import Endpoint, Failure
from tests.core.test_simulated import FLAT, asked, deltas_of, drive
from workers.core.simulated import (
    CHOICES_MAX,
    RequestAdded,
    SimulatedCore,
    SimulatedProfile,
    SimulatedRequest,
    parse_request,
)


@pytest.mark.parametrize(("tokens", "max_tokens", "reason"), [(2, 2, "length"), (2, 3, "stop")])
def test_an_answer_says_whether_it_was_cut(tokens: int, max_tokens: int, reason: str) -> None:
    """``length`` at the asked maximum, ``stop`` before it."""
    core = SimulatedCore(FLAT)
    core.step(0.0, RequestAdded(asked("a", tokens, max_tokens=max_tokens)))
    assert deltas_of(drive(core, 60.0))[-1].finish_reason == reason


@pytest.mark.parametrize(
    ("fields", "good"),
    [
        ({"max_tokens": 1}, True),
        ({"max_tokens": -1}, False),
        ({"max_tokens": 1, "n": CHOICES_MAX}, True),
        ({"max_tokens": 1, "n": CHOICES_MAX + 1}, False),
        ({"max_tokens": 1, "n": 0}, False),
    ],
)
def test_the_bounds_of_a_body(fields: dict[str, int], good: bool) -> None:
    """The least and the most that a body may ask for."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    found = parse_request(request=RequestId("r"), attempt=1, endpoint=Endpoint.CHAT, body=body)
    assert isinstance(found, SimulatedRequest if good else Failure)


def test_a_request_that_fits_exactly_is_served() -> None:
    """Context and pages may be used to the last token; one more is refused."""
    for extra, served in ((0, True), (1, False)):
        core = SimulatedCore(replace(FLAT, max_context_len=12))
        core.step(0.0, RequestAdded(asked("a", 4 + extra)))
        assert (core.running == 1) is served
    for pages, served in ((3, True), (2, False)):
        core = SimulatedCore(replace(FLAT, kv_pages=pages))
        core.step(0.0, RequestAdded(asked("a", 4)))
        assert (core.running == 1) is served


@pytest.mark.parametrize(
    ("name", "least", "below"),
    [
        *(
            (name, 1, 0)
            for name in ("slots", "kv_pages", "block_size", "max_context_len", "chunk_tokens", "tokens_per_step")
        ),
        *((name, 0.0, -0.5) for name in ("prefill_token_s", "prefill_token2_s", "step_const_s", "time_scale", "load_s")),
        *((name, 0.0, -1e-9) for name in ("step_request_s", "step_context_token_s", "fail_rate")),
        *((name, 0, -1) for name in ("die_after_tokens", "freeze_after_tokens")),
    ],
)
def test_the_least_of_each_number_of_a_profile(name: str, least: float, below: float) -> None:
    """Nothing below it is taken, it itself is."""
    assert getattr(replace(FLAT, **{name: least}), name) == least  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=name):
        replace(FLAT, **{name: below})  # type: ignore[arg-type]


def test_a_profile_is_a_7b_model_on_an_a100_unless_told_otherwise() -> None:
    """The published numbers of the default, so that comparisons stay comparable."""
    assert SimulatedProfile() == SimulatedProfile(
        slots=8,
        kv_pages=1024,
        block_size=32,
        max_context_len=8192,
        mode="hash",
        prefill_token_s=62e-6,
        prefill_token2_s=6e-11,
        step_const_s=12.6e-3,
        step_request_s=130e-6,
        step_context_token_s=0.26e-6,
        time_scale=1.0,
        chunk_tokens=2048,
        tokens_per_step=1,
        preempts=True,
        load_s=0.0,
        load_fails=False,
        die_after_tokens=0,
        freeze_after_tokens=0,
        fail_rate=0.0,
        ignores_aborts=False,
    )
