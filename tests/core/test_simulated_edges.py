"""The simulated engine at its bounds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from subjects.ids import RequestId
from subjects.messages import Endpoint, Failure
from tests.core.test_simulated import FLAT, asked, deltas_of, drive
from workers.core.simulated import CHOICES_MAX, RequestAdded, SimulatedCore, SimulatedRequest, parse_request


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
