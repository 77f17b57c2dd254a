"""What the proof of capacity concludes from what it recorded."""

from __future__ import annotations

from ops.prove import judging
from ops.prove.capacity_cases import answered, parses
from ops.prove.judging import Sample
from ops.prove.workplace import Answer
from subjects.messages import StepCosts, StepSums


def answer(model: str = "a", *, first_s: float = 1.0, ended_s: float = 2.0, status: int = 200, pieces: int = 11) -> Answer:
    finish = "length" if status == 200 else ""
    return Answer(model, status, "", finish, 1, 0.0, first_s, ended_s, "" if status == 200 else "no room", pieces=pieces)


def sample(at_s: float, *replicas: str) -> Sample:
    """Replicas as ``model@device`` or ``model@device/state``."""
    split = [one.replace("@", "/").split("/") for one in replicas]
    return Sample(at_s, tuple((one[0], one[1], one[2] if one[2:] else "ready", f"{one[0]}-{one[1]}") for one in split))


def test_devices_count_while_they_hold_anything() -> None:
    """One that loads counts, two models on a device count once, a dead replica holds nothing."""
    samples = [sample(0.0, "a@x"), sample(10.0, "a@x", "b@x/loading", "b@y"), sample(14.0, "a@x/dead", "b@y")]
    assert judging.device_seconds(samples, 20.0) == 10 + 2 * 4 + 6
    assert judging.device_seconds([], 20.0) == 0


def test_static_gives_each_model_its_own_peak_from_the_first_look_on() -> None:
    """Two of a at once and later two of b are four devices throughout."""
    samples = [sample(5.0, "a@x", "a@y"), sample(10.0, "a@x", "b@y"), sample(12.0, "b@x", "b@y"), sample(14.0, "b@x/dead")]
    assert judging.static_device_seconds(samples, 25.0) == 4 * 20
    assert judging.static_device_seconds([], 25.0) == 0


def test_a_model_has_followed_when_it_was_seen_ready() -> None:
    """One that loads has not; what was before the turn does not count; one that never is has none."""
    samples = [sample(0.0, "a@x"), sample(2.0, "a@x", "b@y/loading"), sample(3.5, "b@x/ready")]
    assert judging.followed_s(samples, "b", 1.0) == 2.5
    assert judging.followed_s(samples, "a", 3.5) is None
    assert judging.followed_s(samples, "c", 0.0) is None


def test_one_that_was_ready_before_the_turn_and_still_is_has_followed_at_once() -> None:
    """Nothing changed since, so no later look is there to say so."""
    assert judging.followed_s([sample(0.0, "a@x")], "a", 7.0) == 0.0
    assert judging.followed_s([sample(0.0, "a@x"), sample(5.0)], "a", 7.0) is None


def test_a_refusal_has_waited_until_it_came() -> None:
    """The longest wait is not hidden by who was never answered."""
    assert judging.longest_wait_s([answer(), answer(first_s=30.0, ended_s=30.0, status=503)]) == 30.0
    assert judging.longest_wait_s([]) == 0
    assert answered([answer(), answer(status=503)], 5.0) == ["1 of 2 not answered: a: 503 no room"]
    assert answered([answer(first_s=6.0, ended_s=7.0)], 5.0) == ["one waited 6.0 s, bound 5 s"]
    assert answered([answer()], 5.0) == []


def test_attainment_is_by_first_token_and_pace() -> None:
    """Ten pieces after the first in a second are 100 ms each."""
    answers = [answer(), answer(first_s=2.5, ended_s=3.0), answer(ended_s=2.2), answer(status=500), answer("b")]
    assert judging.attainment(answers, 2.0, 0.1) == {"a": 0.25, "b": 1.0}


def test_the_bound_of_a_wait_grows_with_who_may_be_before() -> None:
    """It is never above its cap."""
    numbers = {"turn_s": 10.0, "answer_s": 2.0, "load_s": 3.0}
    assert judging.wait_bound_s(**numbers, ahead=1, bound_s_max=30.0) == 15.0
    assert judging.wait_bound_s(**numbers, ahead=3, bound_s_max=30.0) == 30.0


def test_shares_are_compared_with_weights() -> None:
    """A replica that answered nothing counts; without answers or weights nothing was honoured."""
    assert judging.share_error({"x": 30, "y": 10}, {"x": 3.0, "y": 1.0}) == 0
    assert judging.share_error({"x": 20}, {"x": 1.0, "y": 1.0}) == 0.5
    assert judging.share_error({}, {"x": 1.0}) == judging.share_error({"x": 1}, {"x": 0.0}) == 1.0


def test_a_hand_over_that_came_back_is_no_cut_answer() -> None:
    """Only a replica that had begun and was lost cuts one."""
    story = [{"lost": True, "begun": False}, {"lost": True, "begun": True}, {"lost": False, "begun": True}]
    assert judging.cut_attempts(story) == 1
    assert judging.cut_attempts(story[:1] + story[2:]) == 0


def test_steps_are_judged_each() -> None:
    """The median is over steps, not over windows; windows without steps say nothing."""
    costs = StepCosts(prefill_token_s=1e-3, step_const_s=0.01, step_request_s=0.001)
    off, right = StepSums(steps=1, busy_s=0.022, requests=1), StepSums(steps=3, busy_s=0.033, requests=3)
    assert judging.cost_error([StepSums()], costs) is None
    assert abs(judging.cost_error([off], costs) or 0) - 0.5 < 1e-9
    assert (judging.cost_error([off, off, right], costs) or 0) < 1e-9
    prompt = StepSums(steps=1, busy_s=0.2, prompt_tokens=90)
    assert abs((judging.cost_error([prompt], costs) or 0) - 0.5) < 1e-9


def test_a_remedy_is_tried_on_the_commands() -> None:
    """Prose is no command; one that does not exist, or takes no such word, is told."""
    assert parses("carpool get timeline") and parses("carpool explain a or ask somebody") and parses("test the memory")
    assert not parses("carpool doctor") and not parses("carpool get models a") and not parses("carpool get nothing")
