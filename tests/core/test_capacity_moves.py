"""Golden cases of the cross-model coordinator (SCH-3), carried out on agents: what a decision becomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from broker.core.plan.policy import Decision, PoolView, StartReplica
from broker.core.pool.events import SchedulerSettings
from tests.core.scheduler_world import World, record

SMALL = record("m7b", 1.0, max_replicas=4)
LARGE = record("m70b", 2.0, max_replicas=4)


@dataclass
class Once:
    """Decides what it is given, once, when it is told to."""

    choose: Callable[[PoolView], Decision] | None = None
    name: str = "once"
    looks: list[float] = field(default_factory=list)

    def decide(self, now_s: float, view: PoolView) -> Decision:
        """The chosen decision."""
        self.looks.append(now_s)
        choose, self.choose = self.choose, None
        return choose(view) if choose is not None else Decision()


def test_two_servers_with_room_for_one_large_or_two_small_models() -> None:
    """Two small ones share a server, so that the large one has the other; nobody is evicted for it (SCH-3)."""
    small = record("s1", 1.0), record("s2", 1.0)
    for order in (("s1", "s2", "m70b"), ("s1", "m70b", "s2"), ("m70b", "s1", "s2")):
        world = World(*small, LARGE, settings=SchedulerSettings(models_per_device_max=2))
        for server in ("w1", "w2"):
            world.agent_of(server, {"gpu0": 2.0})
        for number, name in enumerate(order):
            world.ask(name, service_s=20.0, delay_s=number * 2.0)
        world.run(12.0)
        assert world.loaded() == ["m70b", "s1", "s2"], order
        assert not world.unloads()


def test_a_card_goes_from_the_model_that_needs_less_to_the_one_that_needs_more() -> None:
    """Four cards; the 7B goes from 10 to 18 QPS at 5 per replica, the 70B from 4 to 1 at 2 per replica: one 70B replica
    yields its card to the 7B, and its requests go on elsewhere (SCH-3, SCH-8)."""
    small, large = record("m7b", 2.0, max_replicas=4), record("m70b", 2.0, max_replicas=4)
    policy = Once()
    world = World(small, large, policy=policy)
    agent = world.agent_of("w", {f"gpu{number}": 2.0 for number in range(4)})

    def before(view: PoolView) -> Decision:
        cards = list(view.devices)
        names = (small, small, large, large)
        return Decision(
            tuple(StartReplica(m.deployment, (card,), "10 and 4 QPS") for m, card in zip(names, cards, strict=True))
        )

    def after(view: PoolView) -> Decision:
        yields = view.models[large.deployment].replicas[-1]
        why = "18 QPS at 5 per replica need 4, 1 QPS at 2 needs 1"
        return Decision((StartReplica(small.deployment, yields.devices, why, (yields.replica,)),))

    world.run(1.0)
    policy.choose = before
    world.run(5.0)
    assert world.loaded() == ["m70b", "m70b", "m7b", "m7b"]
    long_ones = [world.ask("m70b", service_s=60.0) for _ in range(4)]
    world.run(0.5)
    policy.choose = after
    world.run(40.0)
    assert world.loaded() == ["m70b", "m7b", "m7b", "m7b"]
    assert len(agent.replicas) == 4
    assert len(world.unloads()) == 1
    assert world.load_commands()[-1].record == small
    assert sorted(request.lost for request in long_ones) == [0, 0, 1, 1]
    assert len({request.replica for request in long_ones}) == 1
    outcomes = [(entry.action, entry.model, entry.outcome) for entry in world.core.digests.timeline(0.0)[-2:]]
    assert outcomes == [("evict", "m70b", "done"), ("load", "m7b", "done")]


def test_a_look_costs_nothing_while_nobody_decides() -> None:
    """Each 200 ms, whatever else happens, and never before everybody was heard (SCH-4)."""
    policy = Once()
    world = World(SMALL, policy=policy)
    world.agent(cpu0=1.0)
    world.run(10.0)
    gaps = [later - sooner for sooner, later in zip(policy.looks, policy.looks[1:], strict=False)]
    assert policy.looks[0] >= 100.5 and all(0.19 < gap < 0.31 for gap in gaps)
