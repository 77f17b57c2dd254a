"""The simulated engine's core: events in, commands out, on a clock that the test moves."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from subjects.ids import RequestId
from subjects.messages import Delta, Endpoint, Failure, FailureKind, Usage
from workers.core.simulated import (
    Die,
    EmitDeltas,
    KvResized,
    RequestAborted,
    RequestAdded,
    SimulatedCommand,
    SimulatedCore,
    SimulatedProfile,
    SimulatedRequest,
    Ticked,
    expected_answer,
    expected_text,
    expected_token,
    parse_request,
    profile_from_options,
)

FLAT = SimulatedProfile(
    slots=2,
    kv_pages=64,
    block_size=4,
    max_context_len=128,
    prefill_token_s=0.0,
    prefill_token2_s=0.0,
    step_const_s=1.0,
    step_request_s=0.0,
    step_context_token_s=0.0,
)
"""Every step takes one second, whatever is in it."""


def asked(name: str, tokens: int = 2, **fields: object) -> SimulatedRequest:
    """A request of 8 input tokens."""
    values: dict[str, object] = {
        "request": RequestId(name),
        "attempt": 1,
        "input_tokens": 8,
        "tokens": tokens,
        "max_tokens": tokens,
    }
    return SimulatedRequest(**{**values, **fields})  # type: ignore[arg-type]  # tests name fields freely


def token_delta(name: str, index: int, **fields: object) -> Delta:
    """The delta that carries one token of an answer."""
    request = RequestId(name)
    values: dict[str, object] = {
        "request": request,
        "attempt": 1,
        "first_token_index": index,
        "units": 1,
        "text": expected_text(request, index),
        "token_ids": (expected_token(request, index),),
    }
    return Delta(**{**values, **fields})  # type: ignore[arg-type]  # tests name fields freely


def last_delta(name: str, index: int, *, usage: Usage, **fields: object) -> Delta:
    """The delta that carries the last token of an answer."""
    return token_delta(name, index, **{"finish_reason": "length", "end": True, "usage": usage, **fields})


def drive(core: SimulatedCore, until_s: float) -> list[tuple[float, SimulatedCommand]]:
    """Ticks the core exactly when it asks for it, and returns what came out with its time."""
    out: list[tuple[float, SimulatedCommand]] = []
    while (wake_s := core.next_wake_s) is not None and wake_s <= until_s:
        out += [(wake_s, command) for command in core.step(wake_s, Ticked())]
    return out


def deltas_of(out: list[tuple[float, SimulatedCommand]]) -> list[Delta]:
    """All deltas in order."""
    return [delta for _, command in out if isinstance(command, EmitDeltas) for delta in command.deltas]


def test_one_request_prefills_and_decodes() -> None:
    """The step that ends the prefill brings the first token, each further step one more, the last one the usage."""
    core = SimulatedCore(FLAT)
    assert core.step(0.0, RequestAdded(asked("r"))) == []
    assert (core.running, core.next_wake_s) == (1, 1.0)
    usage = Usage(prompt_tokens=8, completion_tokens=2)
    assert drive(core, 10.0) == [
        (1.0, EmitDeltas((token_delta("r", 0),))),
        (2.0, EmitDeltas((last_delta("r", 1, usage=usage),))),
    ]
    assert (core.running, core.waiting, core.kv_pages_free, core.next_wake_s) == (0, 0, 64, None)


def test_step_times_follow_the_profile() -> None:
    """Prefill takes b*L + c*L^2, in chunks too; a decode step takes d + f*batch + e*context."""
    profile = replace(
        FLAT, prefill_token_s=0.25, prefill_token2_s=0.5, step_request_s=4.0, step_context_token_s=0.125, chunk_tokens=5
    )
    core = SimulatedCore(profile)
    core.step(0.0, RequestAdded(asked("r", tokens=2)))
    times = [at_s for at_s, _ in drive(core, 1000.0)]
    # Two prefill steps (5 and 3 tokens) of one second each, then one decode step with 9 tokens in its context.
    prefill_s = 2 * 1.0 + 0.25 * 8 + 0.5 * 8**2
    assert times == pytest.approx([prefill_s, prefill_s + 1.0 + 4.0 + 0.125 * 9])
    scaled = SimulatedCore(replace(profile, time_scale=0.5))
    scaled.step(0.0, RequestAdded(asked("r", tokens=2)))
    assert [at_s for at_s, _ in drive(scaled, 1000.0)] == pytest.approx([at_s / 2 for at_s in times])


def test_requests_share_steps_and_wait_for_slots() -> None:
    """Two requests run in the same steps; the third starts when a slot is free, in order of arrival."""
    core = SimulatedCore(FLAT)
    core.step(0.0, RequestAdded(asked("a", tokens=3)))
    for name in ("b", "c", "d"):
        core.step(0.0, RequestAdded(asked(name, tokens=1)))
    assert (core.running, core.waiting) == (1, 3)
    out = drive(core, 100.0)
    seen = [
        (at_s, delta.request, delta.first_token_index) for at_s, command in out for delta in deltas_of([(at_s, command)])
    ]
    assert seen == [(1.0, "a", 0), (2.0, "b", 0), (2.0, "a", 1), (3.0, "c", 0), (3.0, "a", 2), (4.0, "d", 0)]


def test_nobody_overtakes_a_head_that_waits_for_pages() -> None:
    """A small request behind a large one waits too: order of arrival, so that the large one cannot starve."""
    core = SimulatedCore(replace(FLAT, kv_pages=6, preempts=False, slots=3))
    core.step(0.0, RequestAdded(asked("a", tokens=8)))  # 4 pages
    core.step(0.0, RequestAdded(asked("b", tokens=8)))  # 4 pages: must wait
    core.step(0.0, RequestAdded(asked("c", tokens=0 + 1, input_tokens=3)))  # 1 page, but behind b
    drive(core, 1.0)
    assert (core.running, core.waiting, core.kv_pages_free) == (1, 2, 2)
    ends = [delta.request for delta in deltas_of(drive(core, 100.0)) if delta.end]
    assert ends == ["a", "c", "b"]


def test_preemption_takes_the_youngest_and_loses_no_token() -> None:
    """When pages run out the youngest gives way, is computed again, and both answers are whole."""
    core = SimulatedCore(replace(FLAT, kv_pages=6))
    core.step(0.0, RequestAdded(asked("a", tokens=12)))
    core.step(0.0, RequestAdded(asked("b", tokens=12)))
    deltas = deltas_of(drive(core, 1000.0))
    assert core.preempted >= 1
    for name in ("a", "b"):
        mine = [delta for delta in deltas if delta.request == name]
        assert [delta.first_token_index for delta in mine] == list(range(12))
        assert "".join(delta.text for delta in mine) == expected_answer(RequestId(name), 12)
    assert [delta.request for delta in deltas if delta.end] == ["a", "b"]
    assert core.kv_pages_free == 6


@pytest.mark.parametrize("seed", range(20))
def test_pages_and_slots_are_never_oversold(seed: int) -> None:
    """Random adds and aborts under few pages: counters stay in bounds, every unaborted answer is exact, nothing leaks."""
    draw = random.Random(seed)
    profile = replace(FLAT, kv_pages=draw.randint(8, 20), slots=draw.randint(1, 4), preempts=draw.random() < 0.5)
    profile = replace(profile, chunk_tokens=draw.randint(1, 16), tokens_per_step=draw.randint(1, 3))
    core = SimulatedCore(profile)
    now_s, count, aborted, out = 0.0, 0, set[str](), list[tuple[float, SimulatedCommand]]()
    for _ in range(200):
        now_s += draw.random()
        out += drive(core, now_s)
        if draw.random() < 0.7:
            request = asked(f"r{count}", tokens=draw.randint(1, 9), input_tokens=draw.randint(1, 20))
            out += [(now_s, command) for command in core.step(now_s, RequestAdded(request))]
            count += 1
        elif count:
            name = f"r{draw.randrange(count)}"
            core.step(now_s, RequestAborted(RequestId(name), 1))
            aborted.add(name)
        assert 0 <= core.kv_pages_free <= profile.kv_pages
        assert core.running <= profile.slots
    out += drive(core, 1e6)
    assert (core.running, core.waiting, core.kv_pages_free) == (0, 0, profile.kv_pages)
    by_request: dict[str, list[Delta]] = {}
    for delta in deltas_of(out):
        by_request.setdefault(delta.request, []).append(delta)
    for index in range(count):
        mine = by_request.get(f"r{index}", [])
        tokens = [token for delta in mine for token in delta.token_ids]
        assert tokens == [expected_token(RequestId(f"r{index}"), at) for at in range(len(tokens))]
        assert sum(delta.end for delta in mine) == 1 or f"r{index}" in aborted
    assert len(aborted) < count


def test_abort_stops_at_once() -> None:
    """An aborted request frees its slot in the middle of a step and nothing more comes out for it (A4)."""
    core = SimulatedCore(FLAT)
    for name in ("a", "b", "c"):
        core.step(0.0, RequestAdded(asked(name, tokens=5)))
    drive(core, 2.0)
    core.step(2.5, RequestAborted(RequestId("a"), 1))
    core.step(2.5, RequestAborted(RequestId("a"), 1))
    core.step(2.5, RequestAborted(RequestId("b"), 2))
    assert (core.running, core.aborted) == (1, 1)
    assert {delta.request for delta in deltas_of(drive(core, 100.0))} == {"b", "c"}


def test_an_engine_may_ignore_aborts() -> None:
    """The scripted fault of C8 and D6: an abort is counted and the stream goes on."""
    core = SimulatedCore(replace(FLAT, ignores_aborts=True))
    core.step(0.0, RequestAdded(asked("a", tokens=2)))
    core.step(0.5, RequestAborted(RequestId("a"), 1))
    assert (core.running, core.aborted) == (1, 1)
    assert len(deltas_of(drive(core, 10.0))) == 2


def test_choices_are_numbered_and_end_one_by_one() -> None:
    """With n choices each has its own tokens and finish reason; only the last delta ends the request (J2)."""
    core = SimulatedCore(FLAT)
    core.step(0.0, RequestAdded(asked("r", tokens=1, choices=2)))
    request = RequestId("r")
    second = token_delta(
        "r",
        0,
        choice=1,
        text=expected_text(request, 0, 1),
        token_ids=(expected_token(request, 0, 1),),
        finish_reason="length",
        end=True,
        usage=Usage(prompt_tokens=8, completion_tokens=2),
    )
    assert drive(core, 5.0) == [(1.0, EmitDeltas((token_delta("r", 0, finish_reason="length"), second)))]
    assert expected_token(request, 0, 1) != expected_token(request, 0)


def test_a_continuation_starts_after_the_sent_tokens() -> None:
    """The first delta has the index after the sent tokens; usage counts the whole answer (I1)."""
    core = SimulatedCore(FLAT)
    core.step(0.0, RequestAdded(asked("r", tokens=4, sent_tokens=3, attempt=2)))
    usage = Usage(prompt_tokens=8, completion_tokens=4)
    assert drive(core, 5.0) == [(1.0, EmitDeltas((last_delta("r", 3, usage=usage, attempt=2),)))]


def test_a_continuation_of_a_whole_answer_only_closes() -> None:
    """When only the finish was lost, the finish alone is made again."""
    core = SimulatedCore(FLAT)
    [command] = core.step(0.0, RequestAdded(asked("r", tokens=3, sent_tokens=3)))
    assert command == EmitDeltas(
        (
            Delta(
                request=RequestId("r"),
                attempt=1,
                first_token_index=3,
                units=0,
                finish_reason="length",
                end=True,
                usage=Usage(prompt_tokens=8, completion_tokens=3),
            ),
        )
    )


def test_instant_mode_takes_no_time() -> None:
    """The engine of the gateway bench: every token still is its own step, at the same instant."""
    core = SimulatedCore(replace(FLAT, mode="instant"))
    core.step(7.0, RequestAdded(asked("r", tokens=3)))
    out = drive(core, 7.0)
    assert [at_s for at_s, _ in out] == [7.0, 7.0, 7.0]
    assert "".join(delta.text for delta in deltas_of(out)) == expected_answer(RequestId("r"), 3)


def test_a_scripted_pace_delays_tokens() -> None:
    """``first_token_s`` and ``token_s`` hold one request back while others go on (A1, A2)."""
    core = SimulatedCore(replace(FLAT, mode="instant"))
    core.step(0.0, RequestAdded(asked("slow", tokens=3, first_token_s=15.0, token_s=2.0)))
    core.step(0.0, RequestAdded(asked("fast", tokens=1)))
    out = drive(core, 100.0)
    assert [(at_s, delta.request) for at_s, command in out for delta in deltas_of([(at_s, command)])] == [
        (0.0, "fast"),
        (15.0, "slow"),
        (17.0, "slow"),
        (19.0, "slow"),
    ]


def test_scripted_failures() -> None:
    """A request can ask to fail after some tokens; a share of all requests fails as sick, always the same ones."""
    core = SimulatedCore(FLAT)
    core.step(0.0, RequestAdded(asked("r", tokens=5, fail=FailureKind.BUSY, fail_after_tokens=1)))
    first, second = deltas_of(drive(core, 100.0))
    assert first == token_delta("r", 0)
    assert (second.units, second.first_token_index, second.end) == (0, 1, True)
    assert second.failure is not None
    assert (second.failure.kind, second.failure.status) == (FailureKind.BUSY, 503)

    def failed(rate: float) -> set[str]:
        sick = SimulatedCore(replace(FLAT, mode="instant", fail_rate=rate))
        names: set[str] = set()
        for index in range(200):
            sick.step(0.0, RequestAdded(asked(f"r{index}", tokens=1)))
            names |= {delta.request for delta in deltas_of(drive(sick, 0.0)) if delta.failure is not None}
        return names

    assert failed(0.0) == set()
    assert failed(0.25) < failed(0.5)
    assert 20 < len(failed(0.25)) < 80
    assert len(failed(1.0)) == 200


def test_scripted_death_and_freeze() -> None:
    """After the given number of tokens the engine dies with one line, or says nothing any more."""
    core = SimulatedCore(replace(FLAT, die_after_tokens=2))
    core.step(0.0, RequestAdded(asked("r", tokens=5)))
    *_, (at_s, last) = drive(core, 100.0)
    assert (at_s, type(last)) == (2.0, Die)
    assert core.step(3.0, RequestAdded(asked("s"))) == []
    frozen = SimulatedCore(replace(FLAT, freeze_after_tokens=2))
    frozen.step(0.0, RequestAdded(asked("r", tokens=5)))
    assert len(deltas_of(drive(frozen, 100.0))) == 2
    assert (frozen.running, frozen.next_wake_s, frozen.step(9.0, RequestAdded(asked("s")))) == (1, None, [])


@pytest.mark.parametrize("fields", [{"input_tokens": 120, "tokens": 9}, {"tokens": 100, "choices": 4}])
def test_what_can_never_fit_is_refused(fields: Mapping[str, object]) -> None:
    """A request over the context or over all pages fails at once as a bad request, with the numbers."""
    core = SimulatedCore(FLAT)
    [command] = core.step(0.0, RequestAdded(asked("r", **fields)))  # type: ignore[arg-type]  # tests name fields freely
    assert isinstance(command, EmitDeltas)
    [delta] = command.deltas
    assert delta.end
    assert delta.failure is not None
    assert (delta.failure.kind, delta.failure.status) == (FailureKind.BAD_REQUEST, 400)
    assert core.running == 0


# ------------------------------------------------------------------------------------------------------------- parsing


def parsed(body: object, endpoint: Endpoint = Endpoint.CHAT, **fields: object) -> SimulatedRequest | Failure:
    """``parse_request`` of a body given as a value or as raw bytes."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = RequestId("r")
    return parse_request(request=request, attempt=1, endpoint=endpoint, body=raw, **fields)  # type: ignore[arg-type]  # as above


CHAT = [{"role": "user", "content": "12345678"}]


@pytest.mark.parametrize(
    ("body", "endpoint", "input_tokens", "choices"),
    [
        ({"messages": CHAT}, Endpoint.CHAT, 6, 1),
        ({"messages": [*CHAT, {"role": "assistant", "content": None}]}, Endpoint.CHAT, 10, 1),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "abcd"}]}], "n": 3}, Endpoint.CHAT, 5, 3),
        ({"prompt": "123456789"}, Endpoint.COMPLETIONS, 3, 1),
        ({"prompt": [5, 6, 7]}, Endpoint.COMPLETIONS, 3, 1),
        ({"prompt": ["abcd", "efgh"], "n": 2}, Endpoint.COMPLETIONS, 2, 4),
        ({"prompt": [[1, 2], [3]]}, Endpoint.COMPLETIONS, 3, 2),
    ],
)
def test_bodies_are_counted(body: object, endpoint: Endpoint, input_tokens: int, choices: int) -> None:
    """Input tokens and choices of every form of prompt."""
    request = parsed(body, endpoint)
    assert isinstance(request, SimulatedRequest)
    assert (request.input_tokens, request.choices, request.tokens) == (input_tokens, choices, 16)


def test_lengths_and_scripts() -> None:
    """The grant's bound wins over the body's, ``carpool_sim`` can only shorten, and it scripts pace and failure."""
    body = {
        "messages": CHAT,
        "max_tokens": 50,
        "carpool_sim": {"tokens": 7, "token_s": 0.5, "fail": "sick", "fail_after_tokens": 3},
    }
    request = parsed(body)
    assert isinstance(request, SimulatedRequest)
    assert (request.tokens, request.max_tokens, request.token_s) == (7, 50, 0.5)
    assert (request.fail, request.fail_after_tokens) == (FailureKind.SICK, 3)
    bounded = parsed(body, max_tokens=4)
    assert isinstance(bounded, SimulatedRequest)
    assert (bounded.tokens, bounded.max_tokens) == (4, 4)


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"\xff",
        b"[" * 5000,
        [],
        {"messages": []},
        {"messages": "text"},
        {"messages": CHAT, "n": 0},
        {"messages": CHAT, "n": 1000},
        {"messages": CHAT, "max_tokens": -1},
        {"messages": CHAT, "carpool_sim": {"unknown": 1}},
        {},
    ],
)
def test_bad_bodies_are_bad_requests(body: object) -> None:
    """Whatever is wrong with a body is the client's fault and is told without quoting it."""
    failure = parsed(body)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.status) == (FailureKind.BAD_REQUEST, 400)


def test_foreign_sent_tokens_are_noticed() -> None:
    """A continuation with tokens of another request is an error of ours, never answered."""
    request = RequestId("r")
    mine = tuple(expected_token(request, index) for index in range(3))
    good = parsed({"messages": CHAT}, sent_token_ids=mine)
    assert isinstance(good, SimulatedRequest)
    assert good.sent_tokens == 3
    bad = parsed({"messages": CHAT}, sent_token_ids=(*mine[:2], mine[2] + 1))
    assert isinstance(bad, Failure)
    assert bad.kind is FailureKind.SICK


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"step_cost_s": 1.0}, "step_cost_s"),
        ({"slots": "many"}, "slots"),
        ({"slots": True}, "slots"),
        ({"slots": 0}, "slots"),
        ({"mode": "fast"}, "mode"),
        ({"fail_rate": 1.5}, "fail_rate"),
        ({"load_s": -1}, "load_s"),
    ],
)
def test_wrong_options_are_named(options: Mapping[str, str | int | float | bool], named: str) -> None:
    """A typo in ``engine_options`` is an error that names it, never a silent default."""
    with pytest.raises(ValueError, match=named):
        profile_from_options(options, slots=1, kv_pages=8, block_size=4, max_context_len=64)


def test_options_override_the_record() -> None:
    """Options win over the record's fields; whole numbers do for times."""
    profile = profile_from_options({"slots": 3, "load_s": 2}, slots=1, kv_pages=8, block_size=4, max_context_len=64)
    assert profile == SimulatedProfile(slots=3, kv_pages=8, block_size=4, max_context_len=64, load_s=2.0)


def test_pages_come_and_go_while_the_engine_runs() -> None:
    """More pages let the next request in at once; those in use, or promised to a request that is here, cannot go (SCH-8)."""
    core = SimulatedCore(replace(FLAT, kv_pages=3))
    core.step(0.0, RequestAdded(asked("a", tokens=4)))
    core.step(0.0, RequestAdded(asked("b", tokens=4)))
    assert (core.running, core.waiting, core.kv_pages_free) == (1, 1, 0)
    assert core.cannot_resize(2) == "3 pages are in use, only 2 would be left"
    assert core.cannot_resize(0) == "that is less than one page"
    assert core.cannot_resize(6) == ""
    core.step(0.5, KvResized(6))
    core.step(1.0, Ticked())
    assert (core.running, core.waiting, core.kv_pages_free) == (2, 0, 0)
    core.step(1.0, RequestAborted(RequestId("b"), 1))
    assert core.cannot_resize(2) == "3 pages are in use, only 2 would be left"
    core.step(1.0, RequestAborted(RequestId("a"), 1))
    assert core.cannot_resize(1) == ""
    core.step(1.0, KvResized(2))
    (refused,) = core.step(2.0, RequestAdded(asked("c", tokens=4)))
    assert isinstance(refused, EmitDeltas) and refused.deltas[0].failure is not None


def test_an_engine_counts_the_time_of_its_steps() -> None:
    """Only while something runs (SCH-6)."""
    core = SimulatedCore(FLAT)
    core.step(10.0, RequestAdded(asked("a", tokens=2)))
    while (wake_s := core.next_wake_s) is not None:
        core.step(wake_s, Ticked())
    core.step(50.0, Ticked())
    assert (core.busy_s, core.step_s) == (2.0, 1.0)
