"""The event-to-event engine of the simulator: golden cases by hand, and the step-by-step engine beside it."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.simulator.device import SHARED_EFFICIENCY, SimDevice, began, ended, error_factors
from ops.simulator.engine import Engine, Sequence
from subjects.ids import RequestId
from subjects.messages import StepCosts
from workers.core.simulated import EmitDeltas, RequestAdded, SimulatedCore, SimulatedProfile, SimulatedRequest, Ticked

COSTS = StepCosts(
    prefill_token_s=1e-4, prefill_token2_s=1e-9, step_const_s=0.01, step_request_s=0.001, step_context_token_s=1e-6
)
Ask = tuple[float, int, int]
"""Arrival, input tokens, output tokens."""


def fast(asks: list[Ask], *, kv_pages: int, slots: int, chunk: int) -> tuple[list[tuple[float, float]], int]:
    """First token and end of every request, and preemptions, by the engine under test."""
    engine = Engine(COSTS, kv_pages=kv_pages, slots=slots, chunk_tokens=chunk)
    times = [(-1.0, -1.0)] * len(asks)
    pending = list(enumerate(asks))
    while pending or engine.end_s < inf:
        if pending and pending[0][1][0] < engine.end_s:
            index, (at_s, inputs, outputs) = pending.pop(0)
            engine.add(at_s, Sequence(index, inputs, outputs))
            continue
        now_s = engine.end_s
        engine.step(now_s)
        for sequence in engine.finished:
            times[sequence.index] = (sequence.first_s, now_s)
        engine.finished.clear()
    assert (engine.running, engine.waiting, engine.backlog_tokens, engine.kv_pages_free) == (0, 0, 0, kv_pages)
    return times, engine.preempted


def stepped(asks: list[Ask], *, kv_pages: int, slots: int, chunk: int) -> tuple[list[tuple[float, float]], int]:
    """The same by the engine of the worker, step by step."""
    core = SimulatedCore(
        SimulatedProfile(
            slots=slots,
            kv_pages=kv_pages,
            block_size=16,
            max_context_len=1 << 20,
            chunk_tokens=chunk,
            prefill_token_s=COSTS.prefill_token_s,
            prefill_token2_s=COSTS.prefill_token2_s,
            step_const_s=COSTS.step_const_s,
            step_request_s=COSTS.step_request_s,
            step_context_token_s=COSTS.step_context_token_s,
        )
    )
    first = [-1.0] * len(asks)
    last = [-1.0] * len(asks)
    pending = list(enumerate(asks))
    while True:
        due_s = core.next_wake_s
        if pending and (due_s is None or pending[0][1][0] < due_s):
            index, (at_s, inputs, outputs) = pending.pop(0)
            asked = SimulatedRequest(
                request=RequestId(str(index)), attempt=1, input_tokens=inputs, tokens=outputs, max_tokens=outputs
            )
            commands = core.step(at_s, RequestAdded(asked))
        elif due_s is not None:
            at_s = due_s
            commands = core.step(at_s, Ticked())
        else:
            return list(zip(first, last, strict=True)), core.preempted
        for command in commands:
            assert isinstance(command, EmitDeltas)
            for delta in command.deltas:
                index = int(delta.request)
                if first[index] < 0:
                    first[index] = at_s
                last[index] = at_s


asks = st.lists(
    st.tuples(st.floats(0.0, 3.0).map(lambda s: round(s, 4) + 0.000013), st.integers(1, 400), st.integers(1, 120)),
    min_size=1,
    max_size=12,
).map(lambda found: sorted(found))


@settings(max_examples=250, deadline=None)
@given(found=asks, kv_pages=st.integers(34, 120), slots=st.integers(1, 8), chunk=st.sampled_from([64, 256, 8192]))
def test_it_agrees_with_the_step_by_step_engine(found: list[Ask], kv_pages: int, slots: int, chunk: int) -> None:
    """Preemptions are equal, and every time too but for rounding: sums of a few thousand steps against a product."""
    ours, preempted = fast(found, kv_pages=kv_pages, slots=slots, chunk=chunk)
    theirs, preempted_there = stepped(found, kv_pages=kv_pages, slots=slots, chunk=chunk)
    assert preempted == preempted_there
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, abs=1e-9)


def engine_of(kv_pages: int = 1000, **settings: int) -> Engine:
    """With round costs: a step takes 10 ms, 1 ms per request and 1 us per token of context; a prompt 0.1 ms per token."""
    costs = StepCosts(prefill_token_s=1e-4, step_const_s=0.01, step_request_s=0.001, step_context_token_s=1e-6)
    return Engine(costs, kv_pages=kv_pages, **settings)


def run_out(engine: Engine) -> dict[int, tuple[float, float]]:
    """First token and end of all that it holds, by index."""
    times = {}
    while engine.end_s < inf:
        now_s = engine.end_s
        engine.step(now_s)
        times.update({sequence.index: (sequence.first_s, now_s) for sequence in engine.finished})
        engine.finished.clear()
    return times


def test_one_request_alone() -> None:
    """The first token comes after the prefill and the constant part of its step, each further one after its own step."""
    engine = engine_of()
    engine.add(5.0, Sequence(0, 100, 4))
    steps_s = [0.01 + 0.001 + 1e-6 * context for context in (101, 102, 103)]
    assert run_out(engine) == {0: pytest.approx((5.02, 5.02 + sum(steps_s)))}


def test_a_newcomer_joins_at_the_end_of_the_step_that_runs() -> None:
    """It is prefilled in the next step, which holds up the one that decodes."""
    engine = engine_of()
    engine.add(0.0, Sequence(0, 100, 10))
    assert engine.end_s == pytest.approx(0.02)
    engine.step(engine.end_s)
    engine.add(0.0345, Sequence(1, 200, 1))
    assert engine.end_s == pytest.approx(0.02 + 0.011101 + 0.011102), "the second step runs, of nine that were planned"
    second_s = engine.end_s
    engine.step(second_s)
    prefill_s = 0.01 + 0.001 + 103e-6 + 0.02
    assert engine.end_s == pytest.approx(second_s + prefill_s)
    assert run_out(engine)[1] == pytest.approx((second_s + prefill_s, second_s + prefill_s))


def test_prompts_share_the_budget_of_a_step() -> None:
    """Of 150 and 100 tokens a step with a budget of 200 computes all of the older prompt and 50 of the other."""
    engine = engine_of(chunk_tokens=200)
    engine.add(0.0, Sequence(0, 16, 9))
    engine.add(0.001, Sequence(1, 150, 1))
    engine.add(0.002, Sequence(2, 100, 1))
    assert engine.backlog_tokens == 266
    assert engine.end_s == pytest.approx(0.0116), "they join at the end of the step"
    engine.step(engine.end_s)
    assert engine.end_s == pytest.approx(0.0116 + 0.011017 + 0.02)
    engine.step(engine.end_s)
    assert (engine.backlog_tokens, [s.index for s in engine.finished]) == (50, [1])


def test_the_youngest_gives_way_when_pages_run_out() -> None:
    """Requests of 32 and 16 tokens, with the page that each grows into, leave none of five pages free."""
    engine = engine_of(kv_pages=5)
    engine.add(0.0, Sequence(0, 32, 40))
    engine.add(0.0, Sequence(1, 16, 3))
    engine.step(engine.end_s)
    assert (engine.running, engine.kv_pages_free) == (2, 0)
    times = run_out(engine)
    assert engine.preempted == 0, "the second is done before the first needs more"
    assert times[1][1] < times[0][1]
    engine = engine_of(kv_pages=5)
    engine.add(0.0, Sequence(0, 32, 40))
    engine.add(0.0, Sequence(1, 16, 30))
    times = run_out(engine)
    assert engine.preempted == 1
    assert times[0][1] < times[1][1], "the elder keeps its pages, the other is computed again when it has ended"
    assert times[1][0] < 0.1, "its first token had come before"


def test_what_is_interrupted_keeps_the_tokens_of_complete_steps() -> None:
    """The step that runs is lost; who waits has none."""
    engine = engine_of(slots=1)
    first, second = Sequence(0, 100, 10), Sequence(1, 50, 5)
    engine.add(0.0, first)
    engine.add(0.0, second)
    engine.step(engine.end_s)
    taken = engine.take_all(0.02 + 0.011101 + 0.011102 + 0.005)
    assert [(s.index, s.made, s.engine) for s in taken] == [(0, 3, None), (1, 0, None)]
    assert (engine.end_s, engine.active, engine.held, engine.backlog_tokens, engine.kv_pages_free) == (
        inf,
        False,
        0,
        0,
        1000,
    )
    engine.add(1.0, first)
    engine.step(engine.end_s)
    assert first.made == 4, "it continues with the fourth token"
    assert first.first_s == pytest.approx(0.02)


def test_an_aborted_request_leaves_at_the_end_of_the_step() -> None:
    """Its pages are free then; one that only waits leaves at once."""
    engine = engine_of(slots=1)
    first, second = Sequence(0, 100, 1000), Sequence(1, 50, 5)
    engine.add(0.0, first)
    engine.add(0.0, second)
    engine.abort(0.0, second)
    assert (engine.waiting, engine.backlog_tokens) == (0, 100)
    engine.step(engine.end_s)
    engine.abort(0.025, first)
    assert engine.end_s == pytest.approx(0.031101)
    engine.step(engine.end_s)
    assert (engine.running, engine.end_s, engine.kv_pages_free, engine.finished) == (0, inf, 1000, [])


def test_fewer_pages_and_fewer_slots_take_effect_at_the_end_of_the_step() -> None:
    """Who is over the slots finishes; who is over the pages waits, the youngest first."""
    engine = engine_of()
    for index in range(3):
        engine.add(0.0, Sequence(index, 160, 200))
    engine.step(engine.end_s)
    engine.step(engine.end_s)
    engine.set_slots(0.1, 1)
    engine.add(0.1, Sequence(3, 16, 2))
    engine.step(engine.end_s)
    assert (engine.running, engine.waiting) == (3, 1)
    engine.resize(0.2, 23)
    engine.step(engine.end_s)
    assert (engine.running, engine.waiting, engine.preempted) == (2, 2, 1)
    assert sorted(run_out(engine)) == [0, 1, 2, 3]


@settings(max_examples=100, deadline=None)
@given(
    found=asks,
    changes=st.lists(st.tuples(st.floats(0.001, 0.4), st.sampled_from([1.0, 0.485, 0.97 / 3])), min_size=1, max_size=6),
)
def test_a_slower_engine_does_the_same_steps_later(found: list[Ask], changes: list[tuple[float, float]]) -> None:
    """All requests at once, so that only the clock differs: work done is the integral of the rate."""
    plain, slowed = engine_of(), engine_of()
    for engine in (plain, slowed):
        for index, (_, inputs, outputs) in enumerate(found):
            engine.add(0.0, Sequence(index, inputs, outputs))
    expected = {index: end_s for index, (_, end_s) in run_out(plain).items()}
    now_s = work_s = 0.0
    done: dict[int, float] = {}
    for gap_s, rate in changes:
        until_s = now_s + gap_s
        while slowed.end_s <= until_s:
            at_s = slowed.end_s
            slowed.step(at_s)
            done.update({s.index: work_s + (at_s - now_s) * slowed.rate for s in slowed.finished})
            slowed.finished.clear()
        work_s += gap_s * slowed.rate
        now_s = until_s
        slowed.set_rate(now_s, rate)
    rest = run_out(slowed)
    done.update({index: work_s + (end_s - now_s) * slowed.rate for index, (_, end_s) in rest.items()})
    assert done == pytest.approx(expected)


def test_engines_with_work_share_a_device() -> None:
    """Two of them run at half speed less 3 % each, three at a third; one over two devices at the pace of the fuller one."""
    one, two = SimDevice(0), SimDevice(1)
    places = {0: (one,), 1: (one, two), 2: (one,)}
    engines = [engine_of(number=number) for number in places]

    def devices_of(engine: Engine) -> tuple[SimDevice, ...]:
        return places[engine.number]

    assert began(0.0, engines[0], places[0], devices_of) == []
    assert began(1.0, engines[1], places[1], devices_of) == [engines[0]]
    assert [engine.rate for engine in engines[:2]] == [SHARED_EFFICIENCY / 2] * 2
    assert began(2.0, engines[2], places[2], devices_of) == engines[:2]
    assert [engine.rate for engine in engines] == [SHARED_EFFICIENCY / 3] * 3
    assert ended(4.0, engines[0], places[0], devices_of) == engines[1:]
    assert ended(5.0, engines[1], places[1], devices_of) == engines[2:]
    assert engines[2].rate == 1.0
    ended(6.0, engines[2], places[2], devices_of)
    assert (one.busy_until_s(9.0), two.busy_until_s(9.0)) == (6.0, 4.0)


def test_two_equal_requests_on_one_device() -> None:
    """Each takes 2 / 0.97 times as long as alone."""
    device = SimDevice(0)
    engines = [engine_of(number=number) for number in range(2)]
    for engine in engines:
        engine.add(0.0, Sequence(0, 100, 4))
        began(0.0, engine, (device,), lambda _: (device,))
    alone = engine_of()
    alone.add(0.0, Sequence(0, 100, 4))
    expected_s = run_out(alone)[0][1] * 2 / SHARED_EFFICIENCY
    assert [run_out(engine)[0][1] for engine in engines] == pytest.approx([expected_s] * 2)


def test_time_held_is_counted_once_however_many_replicas_there_are() -> None:
    """From the first that comes to the last that leaves."""
    device = SimDevice(0)
    device.hold(10.0, +1)
    device.hold(15.0, +1)
    device.hold(20.0, -1)
    assert device.held_until_s(25.0) == 15.0
    device.hold(30.0, -1)
    assert device.held_until_s(99.0) == 20.0


def test_profiles_are_never_exactly_right() -> None:
    """The factors are around 1, differ by model and device, and are those of the seed."""
    factors = error_factors(7, 3, 100, 0.05)
    assert factors == error_factors(7, 3, 100, 0.05)
    flat = sorted(value for row in factors for value in row)
    assert len(set(flat)) > 290
    assert 0.98 < flat[150] < 1.02
    assert 0.8 < flat[0] < 0.95
    assert 1.05 < flat[-1] < 1.25
    assert factors != error_factors(8, 3, 100, 0.05)
    assert error_factors(7, 1, 2, 0.0) == [[1.0, 1.0]]
