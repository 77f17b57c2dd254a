"""What is foreseen reaches the plan: daily rises, declared events, triggers, learned devices; and nothing without them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from broker.core.plan.coordinator import Coordinator, CoordinatorSettings
from broker.core.plan.forecast import Forecaster
from broker.core.plan.policy import (
    Decision,
    ExpectedLoad,
    PoolView,
    ReplicaView,
    ResizeReplicaKv,
    SetReplicaConcurrency,
)
from subjects.ids import ReplicaId
from subjects.messages import ReplicaState
from tests.core.coordinator_world import KIND, FluidPool, Model, Replica, model

DAY_S = 86_400.0
NINE_S = 9 * 3600.0
LOOK_S = 4.0
"""Between two looks of the past days: no gap yet."""


@dataclass
class ToldPool(FluidPool):
    """A pool whose views also carry events and what engines say."""

    events: tuple[ExpectedLoad, ...] = ()
    unix_offset_s: float = 0.0
    says: Callable[[Replica, ReplicaView], ReplicaView] = field(default=lambda _replica, view: view)

    def view(self) -> PoolView:
        """With both."""
        return replace(super().view(), events=self.events, unix_offset_s=self.unix_offset_s)

    def _replica(self, replica: Replica) -> ReplicaView:
        view = super()._replica(replica)
        return self.says(replica, view) if view.state is ReplicaState.READY else view


def rate(size: str, replicas: float) -> float:
    """Requests per second that are so many replicas' work."""
    return 0.85 * replicas / model(size, "x", 0.0).work_s


def past(forecaster: Forecaster, one: Model, begin_s: float, end_s: float, work: Callable[[float], float]) -> None:
    """What a scheduler would have told the forecast of one model."""
    now_s = begin_s
    while now_s < end_s:
        rate_now = work(now_s)
        if rate_now:
            forecaster.observe(now_s, (one.record.deployment, 0), rate_now * LOOK_S, 1)
        forecaster.heard(now_s)
        now_s += LOOK_S


def office_hours(now_s: float) -> float:
    """Two hours of work a day, from nine o'clock sharp."""
    return 1.3 if NINE_S <= now_s % DAY_S < NINE_S + 7200.0 else 0.0


@pytest.mark.parametrize(("days", "before"), [(2, True), (1, False)])
def test_a_model_that_rises_every_day_is_loaded_before_it_the_third_day(days: int, before: bool) -> None:
    """Of one day nobody knows yet whether it comes again (SCH-5)."""
    at_s = days * DAY_S + NINE_S
    one = model("8B", "office", lambda now_s: rate("8B", 1.3) if now_s >= at_s else 0.0)
    policy = Coordinator()
    assert policy.prospects is not None
    past(policy.prospects.forecaster, one, 0.0, at_s - 200.0, office_hours)
    world = ToldPool(policy, [one], 4, now_s=at_s - 200.0)
    world.run(195.0)
    starts = world.starts(one)
    if not before:
        assert starts == []
        return
    assert len(starts) == 2 and all("the forecast expects work of 1.3" in start.reason for start in starts)
    assert min(done.at_s for done in world.done) >= at_s - 125.0
    note = [decision.notes[one.record.deployment] for decision in world.decisions if decision.notes]
    assert note[-1].startswith("the forecast expects")
    served = len(world.of(one, ready=True))
    world.run(20.0)
    assert served == 2 and len(world.starts(one)) == 2 and one.waiting == 0.0


def test_what_usually_comes_and_does_not_come_is_given_up() -> None:
    """A holiday: the replicas go a few minutes later."""
    at_s = 2 * DAY_S + NINE_S
    one = model("8B", "office", 0.0)
    policy = Coordinator()
    assert policy.prospects is not None
    past(policy.prospects.forecaster, one, 0.0, at_s - 125.0, office_hours)
    world = ToldPool(policy, [one], 4, now_s=at_s - 125.0)
    world.run(60.0)
    assert world.starts(one)
    world.run(400.0)
    assert world.of(one) == []


def test_a_declared_event_is_loaded_for_beforehand_and_not_for_ever() -> None:
    """By wall-clock time, in proportion, with its name in the reason; only for its model (SCH-5)."""
    launch, other = model("8B", "launch", rate("8B", 0.5)), model("8B", "other", rate("8B", 0.5))
    world = ToldPool(Coordinator(), [launch, other], 6, residents_max=1, unix_offset_s=1e9)
    for device, one in enumerate((launch, other)):
        world.there(one, device)
    world.run(60.0)
    assert world.starts() == []
    begin_s = world.now_s + 150.0
    event = ExpectedLoad("sale", 1e9 + begin_s, 1e9 + begin_s + 60.0, launch.record.deployment, factor=4.0)
    world.events = (event,)
    world.run(20.0)
    assert world.starts() == []
    world.run(120.0)
    starts = world.starts(launch)
    assert len(starts) >= 1 and world.starts(other) == []
    assert all("the event 'sale' expects work of" in start.reason for start in starts)
    assert len(world.of(launch, ready=True)) >= 2
    world.run(160.0)
    assert len(world.of(launch)) == 1


def test_a_declared_event_wakes_a_model_that_nobody_has_asked_for() -> None:
    """A nightly batch: work that people have promised counts though nothing was seen; withdrawn it is forgotten."""
    batch = model("8B", "batch", 0.0)
    world = ToldPool(Coordinator(), [batch], 4)
    world.events = (ExpectedLoad("batch", 1060.0, 4000.0, batch.record.deployment, at_least=1.6),)
    world.run(20.0)
    assert len(world.starts(batch)) == 3  # 1.6 and room, less what each replica's steps always take.
    world.run(60.0)
    assert len(world.of(batch)) == 3
    world.events = ()
    world.run(60.0)
    assert world.of(batch) == []


def test_without_a_day_of_history_every_decision_is_as_it_was() -> None:
    """Bursts and lulls of ten minutes: action by action the same, forecast or not."""

    def run(settings: CoordinatorSettings) -> list[Decision]:
        burst = model("8B", "burst", lambda now_s: rate("8B", 2.2 if now_s % 60 < 20 else 0.3))
        steady = model("14B", "steady", rate("14B", 0.4))
        world = ToldPool(Coordinator(settings), [burst, steady], 6)
        world.run(100.0)
        assert world.starts(burst)
        return world.decisions

    assert run(CoordinatorSettings()) == run(CoordinatorSettings(foresees=False))


def test_lost_prefix_hits_grow_kv() -> None:
    """Hits at half of what they were: KV grows at once where it is free, stays, and the note says why (SCH-13)."""
    one = model("8B", "one", rate("8B", 0.3))
    world = ToldPool(Coordinator(CoordinatorSettings(resizes_kv=False)), [one], 1)
    before = world.there(one, 0, kv_gb=20.0).kv_bytes
    ratio = 0.6
    world.says = lambda _replica, view: replace(view, hit_ratio=ratio)
    world.run(40.0)
    begin_s = world.now_s
    ratio = 0.3
    world.run(4.0)
    grown = [done.action for done in world.done if done.at_s > begin_s and isinstance(done.action, ResizeReplicaKv)]
    assert grown == [ResizeReplicaKv(ReplicaId("one-0001"), int(before * 1.25), "prefix hits 50% are under 85%")]
    notes = [decision.notes for decision in world.decisions if decision.notes]
    assert "a trigger asks for more KV: prefix hits 50%" in notes[-1][one.record.deployment]


def test_a_locked_replica_is_left_alone_by_triggers() -> None:
    """A person's word wins (SCH-11)."""
    one = model("8B", "one", rate("8B", 0.3))
    world = ToldPool(Coordinator(CoordinatorSettings(resizes_kv=False)), [one], 1)
    world.there(one, 0, stays=True)
    ratios = iter([0.6] * 100 + [0.2] * 1000)
    world.says = lambda _replica, view: replace(view, hit_ratio=next(ratios))
    world.run(60.0)
    assert not any(isinstance(done.action, ResizeReplicaKv) for done in world.done)


def test_a_long_queue_with_lost_hits_loads_another_replica() -> None:
    """In parallel to the cut of a neighbour's KV, in the next plan, as long as the wish holds (SCH-13)."""
    late = model("8B", "late", rate("8B", 0.2))
    beside = model("3.8B", "beside", rate("3.8B", 0.1))
    world = ToldPool(Coordinator(), [late, beside], 3)
    world.there(late, 0, kv_gb=8.0)
    other = world.there(beside, 0, kv_gb=20.0)
    ratio = 0.8
    world.says = lambda replica, view: replace(view, hit_ratio=ratio if replica.model == late.record.deployment else None)
    world.run(40.0)
    begin_s = world.now_s
    ratio = 0.2
    late.waiting = 60.0
    for _ in range(25):
        late.waiting = 60.0
        world.run(0.2)
    cuts = [
        done.action
        for done in world.done
        if done.at_s > begin_s
        and isinstance(done.action, ResizeReplicaKv)
        and done.action.replica == other.replica
        and done.action.reason.endswith("requests wait with prefix hits at 25%")
    ]
    assert len(cuts) == 1
    starts = world.starts(late, begin_s)
    assert starts and any("a trigger asks for another replica" in start.reason for start in starts)


def test_steps_that_stall_beside_a_neighbour_bound_it() -> None:
    """Twice what turns explain: the neighbour runs less at once, and the plan does not take that back at once (SCH-13)."""
    slow = model("8B", "slow", rate("8B", 0.25))
    beside = model("8B", "beside", lambda now_s: rate("8B", 0.25) if now_s > 1030.0 else 0.0)
    world = ToldPool(Coordinator(), [slow, beside], 1)
    stalls = 1.0

    def says(replica: Replica, view: ReplicaView) -> ReplicaView:
        costs = world.model_of(replica).record.costs[KIND]
        return replace(view, step_s=costs.step_const_s * (stalls if replica.model == slow.record.deployment else 1.0))

    world.says = says
    world.there(slow, 0, kv_gb=10.0)
    world.there(beside, 0, kv_gb=10.0)
    world.run(60.0)
    begin_s, stalls = world.now_s, 6.0
    world.run(6.0)
    eased = [
        done.action
        for done in world.done
        if done.at_s > begin_s and isinstance(done.action, SetReplicaConcurrency) and "stall" in done.action.reason
    ]
    names = {replica.replica for replica in world.of(beside)}
    assert len(eased) == 1 and eased[0].replica in names
    assert world.replicas[eased[0].replica].slots == eased[0].slots


def test_scores_steer_weights_when_they_are_on() -> None:
    """A replica on a device that takes twice what the profile says gets fewer requests (SCH-10); off, both are equal."""

    def weights(learns: bool) -> list[float]:
        one = model("8B", "one", rate("8B", 1.6))
        world = ToldPool(Coordinator(CoordinatorSettings(learns_devices=learns)), [one], 2)
        slow = world.there(one, 0)
        fast = world.there(one, 1)

        def says(replica: Replica, view: ReplicaView) -> ReplicaView:
            costs = one.record.costs[KIND]
            context = (view.kv_pages - view.kv_pages_free) * one.record.block_size
            step_s = costs.step_const_s + view.running * costs.step_request_s + context * costs.step_context_token_s
            return replace(view, step_s=step_s * (2.0 if replica.replica == slow.replica else 1.0))

        world.says = says
        world.run(330.0 if learns else 20.0)
        assert {slow.replica, fast.replica} <= set(world.replicas)
        return [slow.weight, fast.weight]

    slow, fast = weights(True)
    assert slow < 0.8 * fast
    slow, fast = weights(False)
    assert slow == fast


def test_off_means_that_nothing_of_the_learning_library_is_loaded() -> None:
    """Importing it takes seconds (SCH-10)."""
    make = "from broker.scheduler.policies import make_policy; make_policy('carpool')"
    code = f"import sys; {make}; print('river' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
