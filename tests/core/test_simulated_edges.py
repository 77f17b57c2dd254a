"""The simulated engine at its bounds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from subjects.ids import RequestId
from subjects.messages import Endpoint, Failure, FailureKind
from tests.core.test_simulated import FLAT, asked, deltas_of, drive
from workers.core.simulated import (
    CHOICES_MAX,
    Die,
    RequestAdded,
    SimulatedCore,
    SimulatedProfile,
    SimulatedRequest,
    Ticked,
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
        ({"max_tokens": 0}, False),
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


def test_pages_follow_the_context() -> None:
    """Pages of four tokens: three for 8 + 1 to 11 + 1 tokens, the fourth with the thirteenth, none more than it can need."""
    core = SimulatedCore(FLAT)
    core.step(0.0, RequestAdded(asked("a", 6)))
    free = [core.kv_pages_free]
    while core.next_wake_s is not None:
        core.step(core.next_wake_s, Ticked())
        free.append(core.kv_pages_free)
    assert [64 - pages for pages in free] == [3, 3, 3, 3, 4, 4, 0]
    wide = SimulatedCore(replace(FLAT, tokens_per_step=2))
    wide.step(0.0, RequestAdded(asked("a", 4, choices=3)))
    assert 64 - wide.kv_pages_free == 4, "room for two tokens of each of three choices"
    whole = SimulatedCore(replace(FLAT, preempts=False))
    whole.step(0.0, RequestAdded(asked("a", 6)))
    assert 64 - whole.kv_pages_free == 4


def test_a_step_prefills_a_chunk_of_all_prompts_together() -> None:
    """Ten tokens: eight of the first and two of the second; the rest of it goes with the first one's decode."""
    core = SimulatedCore(replace(FLAT, chunk_tokens=10, slots=3))
    core.step(0.0, RequestAdded(asked("z", 1)))
    core.step(0.5, RequestAdded(asked("a", 2)))
    core.step(0.5, RequestAdded(asked("b", 2)))
    seen = [(at_s, d.request) for at_s, command in drive(core, 60.0) for d in deltas_of([(at_s, command)])]
    assert seen == [(1.0, "z"), (2.0, "a"), (3.0, "b"), (3.0, "a"), (4.0, "b")]


def test_an_engine_that_waits_for_paced_requests_wakes_for_the_earliest() -> None:
    """Whichever came first."""
    for first_s, second_s in ((5.0, 9.0), (9.0, 5.0)):
        core = SimulatedCore(FLAT)
        core.step(0.0, RequestAdded(asked("a", 1, first_token_s=first_s)))
        core.step(0.0, RequestAdded(asked("b", 1, first_token_s=second_s)))
        core.step(1.0, Ticked())
        core.step(2.0, Ticked())
        assert core.next_wake_s == 5.0
        seen = [(at_s, d.request) for at_s, command in drive(core, 60.0) for d in deltas_of([(at_s, command)])]
        assert sorted(name for _, name in seen) == ["a", "b"]
        assert [at_s for at_s, _ in seen] == [6.0, 10.0]


@pytest.mark.parametrize(
    ("kind", "status"), [(FailureKind.BAD_REQUEST, 400), (FailureKind.SICK, 500), (FailureKind.BUSY, 503)]
)
def test_a_scripted_failure_comes_after_its_tokens(kind: FailureKind, status: int) -> None:
    """With the status of its kind, and its pages and slot are free again."""
    core = SimulatedCore(FLAT)
    core.step(0.0, RequestAdded(asked("a", 5, fail=kind, fail_after_tokens=2)))
    *before, last = deltas_of(drive(core, 60.0))
    assert [delta.first_token_index for delta in before] == [0, 1]
    assert last.failure is not None and (last.failure.kind, last.failure.status) == (kind, status)
    assert (last.first_token_index, last.units, last.end) == (2, 0, True)
    assert (core.running, core.kv_pages_free) == (0, 64)


def test_a_script_without_a_number_fails_before_the_first_token() -> None:
    """Nothing comes out of it."""
    body = {"messages": [{"role": "user", "content": "hi"}], "carpool_sim": {"fail": "sick"}}
    found = parse_request(request=RequestId("r"), attempt=1, endpoint=Endpoint.CHAT, body=json.dumps(body).encode())
    assert isinstance(found, SimulatedRequest)
    core = SimulatedCore(FLAT)
    core.step(0.0, RequestAdded(found))
    (only,) = deltas_of(drive(core, 60.0))
    assert only.failure is not None and only.failure.kind is FailureKind.SICK


@pytest.mark.parametrize(("rate", "failed"), [(0.0, 0), (1.0, 50)])
def test_a_share_of_requests_fails_as_sick(rate: float, failed: int) -> None:
    """None, all, or about the share that was asked for."""
    for share, least, most in ((rate, failed, failed), (0.5, 15, 35)):
        core = SimulatedCore(replace(FLAT, fail_rate=share))
        for number in range(50):
            core.step(0.0, RequestAdded(asked(f"r{number}", 1)))
        assert least <= sum(delta.failure is not None for delta in deltas_of(drive(core, 600.0))) <= most


def test_death_and_freeze_come_at_their_token() -> None:
    """Not one earlier; a dead engine says so, a frozen one says nothing."""
    for name, ends in (("die_after_tokens", ["Die"]), ("freeze_after_tokens", [])):
        core = SimulatedCore(replace(FLAT, **{name: 3}))  # type: ignore[arg-type]
        core.step(0.0, RequestAdded(asked("a", 9)))
        out = drive(core, 60.0)
        assert sum(len(delta.token_ids) for delta in deltas_of(out)) == 3
        assert [type(command).__name__ for _, command in out if isinstance(command, Die)] == ends
        assert core.step(99.0, RequestAdded(asked("b", 1))) == []
        assert core.next_wake_s is None
