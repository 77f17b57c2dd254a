"""The event-to-event engine of the simulator: golden cases by hand, and the step-by-step engine beside it."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
