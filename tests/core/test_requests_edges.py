"""The gateway's core when it is woken late, at its bounds, and in its numbers."""

from __future__ import annotations

import pytest

from broker.core.requests import events as e
from broker.core.requests.live import State
from subjects.ids import ReplicaId, RequestId
from subjects.messages import Claim, FailureKind, PoolDigest, PoolModel, Sla, Usage
from tests.core.test_requests import (
    DEPLOYMENT,
    MODEL,
    OTHER,
    STORED,
    Gateway,
    R,
    brief,
    delta,
    failure,
    in_state,
)

NUDGE = e.ClaimReceived(Claim(request=RequestId("none"), attempt=1, replica=OTHER), 9)


@pytest.mark.parametrize(
    ("state", "after_s", "first"),
    [
        (State.UNSTORED, 0.25, "publish gw-1.1.1 to s for 20"),
        (State.STORED, 20.5, "delete 7@1"),
        (State.PUBLISHING, 20.5, "end gw-1 503 no_capacity"),
        (State.RUNNING, 100.5, "cancel gw-1.1 at rep-a"),
        (State.STORED, 100.5, "delete 7@1"),
    ],
)
def test_what_is_overdue_is_done_before_any_event(state: State, after_s: float, first: str) -> None:
    """A gateway that stood still does first what it should have done, whatever it hears."""
    assert in_state(state)(NUDGE, after_s=after_s)[0] == first


def test_a_late_shutdown_ends_everything() -> None:
    """Its bound may pass unnoticed."""
    gateway = in_state(State.RUNNING)
    gateway(e.ShutdownStarted(deadline_s=5.0))
    assert gateway.core.next_wake_s == pytest.approx(0.2)
    assert "end gw-1 503 shutting_down" in gateway(e.Ticked(), after_s=7)
    assert Gateway()(e.ShutdownStarted(deadline_s=5.0)) == []


def test_times_and_tokens_of_a_finished_request() -> None:
    """First token from submission, tokens by the engine's usage, or by count where there is none."""
    for usage, output_tokens in ((Usage(prompt_tokens=3, completion_tokens=9), 9), (None, 4)):
        gateway = Gateway()
        gateway.submit()
        gateway.now_s = 1.0
        gateway.claim()
        gateway.now_s = 2.0
        gateway.frames(delta(0, 2))
        gateway.now_s = 3.5
        gateway.frames(delta(2, 2))
        gateway.frames(delta(4, 0, finish_reason="stop", end=True, usage=usage))
        (row,) = gateway.core.take_demand(4.0)
        assert (row.finished, row.input_tokens, row.output_tokens) == (1, 3, output_tokens)
        assert (row.ttft_s_sum, row.latency_s_sum) == (2.0, 3.5)


@pytest.mark.parametrize(("ttft_ms", "tpot_ms", "within"), [(2000, 500, 1), (1999, 500, 0), (2000, 499, 0)])
def test_a_finished_request_met_its_targets_or_not(ttft_ms: int, tpot_ms: int, within: int) -> None:
    """Its first token came after 2 s and three more in 1.5 s: the mean counts, and both targets must be met."""
    gateway = Gateway()
    gateway.submit(sla=Sla(ttft_p95_ms=ttft_ms, tpot_ms=tpot_ms))
    gateway.claim()
    gateway.now_s = 2.0
    gateway.frames(delta(0, 1))
    gateway.now_s = 3.5
    gateway.frames(delta(1, 3))
    gateway.frames(delta(4, 0, finish_reason="stop", end=True))
    (row,) = gateway.core.take_demand(4.0)
    assert (row.finished, row.within_slo) == (1, within)


def test_a_failed_request_counts_as_failed_and_a_left_one_as_nothing() -> None:
    """What a client took back is no failure of ours."""
    gateway = in_state(State.RUNNING)
    gateway.submit(RequestId("gw-2"))
    gateway.frames(failure(FailureKind.BAD_REQUEST, 400))
    gateway(e.ClientLeft(RequestId("gw-2")))
    (row,) = gateway.core.take_demand(1.0)
    assert (row.arrived, row.failed, row.finished, row.waiting, row.running) == (2, 1, 0, 0, 0)


@pytest.mark.parametrize(("status", "told"), [(399, 400), (400, 400), (422, 422), (499, 499), (500, 400)])
def test_a_bad_request_is_the_clients_fault(status: int, told: int) -> None:
    """Whatever status an engine gave it."""
    gateway = in_state(State.RUNNING)
    assert gateway.frames(failure(FailureKind.BAD_REQUEST, status))[-1].startswith(f"end gw-1 {told} ")


def test_a_busy_engine_after_output_is_a_loss() -> None:
    """It is no busy engine then."""
    gateway = in_state(State.RUNNING)
    gateway.frames(delta(0))
    busy = delta(1, 0, end=True, failure=failure(FailureKind.BUSY).failure)
    assert gateway.frames(busy) == ["cancel gw-1.1 at rep-a", "end gw-1 502 engine_failed"]


@pytest.mark.parametrize(("choice", "delivered"), [(0, True), (1, True), (2, False), (-1, False)])
def test_choices_that_were_not_asked_for_are_ignored(choice: int, delivered: bool) -> None:
    """An engine's mistake neither reaches the client nor ends anything."""
    gateway = Gateway()
    gateway.submit(n=2)
    gateway.claim()
    lines = gateway.frames(delta(0, choice=choice))
    assert lines == ([f"deliver gw-1 {choice}:0+1"] if delivered else [])
    assert gateway.core.unfinished == 1


def test_ended_requests_are_remembered_in_bounded_number() -> None:
    """The oldest of 8193 is forgotten, the others are known."""
    gateway = Gateway()
    for number in range(8193):
        gateway.submit(RequestId(f"r{number}"))
        gateway(e.ClientLeft(RequestId(f"r{number}")))
    assert gateway.claim(RequestId("r0")) == ["5: refuse unknown"]
    assert gateway.claim(RequestId("r1")) == ["5: refuse cancelled"]
    assert gateway.claim(RequestId("r8192")) == ["5: refuse cancelled"]


def test_dead_replicas_are_remembered_in_bounded_number() -> None:
    """The oldest of 4097 may claim again: the pool's digest goes on naming it while that matters."""
    gateway = in_state(State.STORED)
    dead = tuple(ReplicaId(f"d{number}") for number in range(4097))
    gateway(e.PoolChanged(PoolDigest(epoch=1, sequence=1, dead=dead)))
    assert gateway.claim(replica=dead[1]) == ["5: refuse dead"]
    assert gateway.claim(replica=dead[-1]) == ["5: refuse dead"]
    assert gateway.claim(replica=dead[0])[0] == "5: grant gw-1.1 part 0/1"


def test_a_ticket_lives_as_long_as_its_request_may_wait() -> None:
    """Whole seconds, at least one, and never beyond the deadline."""
    for wait_s, deadline_s, ttl_s in ((0.2, 50.0, 1), (7.3, 50.0, 8), (20.0, 5.0, 5)):
        gateway = Gateway()
        gateway.submit(RequestId("first"))
        event = e.RequestSubmitted(
            request=R,
            profile=gateway.core._live[RequestId("first")].profile,
            body=b"{}",
            wait_until_s=wait_s,
            deadline_s=deadline_s,
        )
        assert [brief(command) for command in gateway.core.step(0.0, event)] == [f"publish gw-1.1.1 to s for {ttl_s}"]


def test_a_model_that_is_refused_ends_what_waits_and_not_what_runs() -> None:
    """With the pool's own words and time; for ever is another code."""
    for permanent, retry_after_s, code, told_s in (
        (False, 7, "model_unavailable", 7),
        (False, 0, "model_unavailable", 5),
        (True, 7, "model_cannot_fit", None),
    ):
        gateway = in_state(State.RUNNING)
        gateway.submit(RequestId("gw-2"))
        word = PoolModel(
            model_hash=MODEL, deployment=DEPLOYMENT, name="m", refusal="no", permanent=permanent, retry_after_s=retry_after_s
        )
        (end,) = gateway.core.step(0.0, e.PoolChanged(PoolDigest(epoch=1, sequence=1, models=(word,))))
        assert isinstance(end, e.EndRequest) and isinstance(end.outcome, e.Failed)
        assert (end.request, end.outcome.code, end.outcome.retry_after_s) == ("gw-2", code, told_s)
        assert gateway.core.state_of(R) is State.RUNNING
        assert gateway.submit(RequestId("gw-3")) == [f"end gw-3 503 {code}"]


def test_a_gateway_is_idle_when_nobody_has_to_hear_of_anything() -> None:
    """The replica of the last request hears for two seconds that nothing is wanted."""
    gateway = in_state(State.RUNNING)
    gateway.frames(delta(0, finish_reason="stop", end=True))
    idle: list[bool] = []
    for _ in range(40):
        gateway(e.BusRoundTripMade())
        gateway(e.Ticked(), after_s=0.1)
        if gateway.now_s < 1.9:
            gateway.frames()
        idle.append(gateway.core.idle)
    assert idle == sorted(idle)
    assert 18 <= idle.index(True) <= 39
    assert gateway.core.next_wake_s is None


def test_another_stream_means_another_publication() -> None:
    """The stream of a model was made anew: its tickets are published again; the same stream changes nothing."""
    gateway = in_state(State.STORED)
    (key,) = gateway.core.waiting_models()
    assert gateway(e.QueueChecked(key, STORED.created)) == []
    assert gateway(e.QueueChecked(key, 2)) == ["publish gw-1.1.2 to s for 20"]
    gateway = in_state(State.STORED)
    assert gateway(e.QueueChecked(key, None)) == ["publish gw-1.1.2 to s for 20"]
    assert gateway.core.waiting_models() == ()


@pytest.mark.parametrize(("after_s", "reason"), [(59.5, "cancelled"), (60.0, "unknown"), (60.5, "unknown")])
def test_ended_requests_are_remembered_for_a_minute(after_s: float, reason: str) -> None:
    """A claim may come late, but not for ever."""
    gateway = in_state(State.STORED)
    gateway(e.ClientLeft(R))
    gateway(e.Ticked(), after_s=after_s)
    assert gateway.claim() == [f"5: refuse {reason}"]


def test_a_replica_that_is_done_does_not_keep_others_from_their_held() -> None:
    """Each beat goes to everybody who has something, or just had."""
    gateway = in_state(State.RUNNING)
    gateway.submit(RequestId("gw-2"))
    gateway.claim(RequestId("gw-2"), replica=OTHER)
    gateway.frames(delta(0, finish_reason="stop", end=True))
    beats: list[list[str]] = []
    for _ in range(30):
        gateway(e.BusRoundTripMade())
        beats.append([line.split(" to ")[1] for line in gateway(e.Ticked(), after_s=0.2) if line.startswith("held")])
        gateway.frames(replica=OTHER)
        if gateway.now_s < 1.5:
            gateway.frames()
    assert all("rep-b: gw-2.1[0]" in beat for beat in beats)
    assert ["rep-a: " in beat for beat in beats][:9] == [True] * 9
    assert beats[-1] == ["rep-b: gw-2.1[0]"]
