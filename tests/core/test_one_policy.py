"""Models that do not fit together take turns: what urgency in the objective is for (SCH-3).

Agents are real cores on a virtual clock. A client asks again as soon as it has its answer.
"""

from __future__ import annotations

import pytest

from subjects.messages import ModelRecord, SlaClass, StepCosts
from tests.core.scheduler_world import Request, World, record

COSTS = {"": StepCosts(prefill_token_s=62e-6, step_const_s=12.6e-3, step_request_s=130e-6)}
SERVICE_S = 0.9
LOAD_S = 1.2
WAIT_S_MAX = 12.4
"""The longest wait of two models on a device with room for one, each yielding after ten seconds of the other's waiting."""


def pair(gib: float = 0.6, **changes: object) -> tuple[ModelRecord, ModelRecord]:
    """Two simulated models with costs, of which a GiB holds one."""
    return record("a", gib, costs=COSTS, **changes), record("b", gib, costs=COSTS, **changes)


class Clients:
    """Clients that never pause."""

    def __init__(self, world: World, name: str, count: int, service_s: float = SERVICE_S) -> None:
        self.world = world
        self.name = name
        self.asked: list[Request] = []
        for _ in range(count):
            self._ask(service_s)

    def _ask(self, service_s: float) -> None:
        request = self.world.ask(self.name, service_s=service_s)
        self.asked.append(request)

        def again() -> None:
            if request.ended_s is not None:
                self._ask(service_s)
            else:
                self.world.later(0.02, again)

        self.world.later(0.02, again)

    @property
    def answers(self) -> int:
        """Answers so far."""
        return sum(request.ended_s is not None and not request.refusal for request in self.asked)

    @property
    def longest_wait_s(self) -> float:
        """Of those that were served, and of those that wait still."""
        now_s = self.world.now_s
        return max((r.started_s if r.started_s is not None else now_s) - r.arrived_s for r in self.asked)


def slow(world: World, *names: str, load_s: float = LOAD_S) -> World:
    """The same world with loads of so long."""
    world.load_times.update(dict.fromkeys(names, load_s))
    return world


@pytest.mark.parametrize("seed", range(3))
def test_two_busy_models_take_turns_on_a_device_that_holds_one(seed: int) -> None:
    """Nine tenths of the 300 answers that turns of ten seconds give, and no longer a wait."""
    world = slow(World(*pair(), seed=seed), "a", "b")
    world.agent(cpu0=1.0)
    a, b = Clients(world, "a", 3), Clients(world, "b", 3)
    world.run(60)
    print(a.answers, b.answers, a.longest_wait_s, b.longest_wait_s, len(world.loads))
    # A client that never waits gets 60 / 0.9 answers in a minute: three of one model 200 at most.
    assert a.answers + b.answers >= 0.9 * 0.8 * 200
    assert min(a.answers, b.answers) >= 0.35 * (a.answers + b.answers)
    assert max(a.longest_wait_s, b.longest_wait_s) <= WAIT_S_MAX
    assert all(request.lost == 0 and not request.refusal for request in world.requests)


@pytest.mark.parametrize(("load_s", "every_s", "loads_max"), [(10.0, 20.0, 4), (10.0, 60.0, 12), (3.0, 20.0, 32)])
def test_a_model_of_few_requests_keeps_its_place_while_a_swap_would_cost_more(
    load_s: float, every_s: float, loads_max: int
) -> None:
    """A model that lacks a second place does not take that of another which is back before both are loaded."""
    world = slow(World(*pair(max_num_seqs=4)), "a", "b", load_s=load_s)
    world.agent(cpu0=1.0, cpu1=1.0)
    busy = Clients(world, "b", 24)
    seldom: list[Request] = []

    def ask() -> None:
        seldom.append(world.ask("a", service_s=0.5))
        world.later(every_s, ask)

    world.later(30 + load_s, ask)
    world.run(300)
    waits = [(one.started_s if one.started_s is not None else world.now_s) - one.arrived_s for one in seldom]
    assert len(world.loads) <= loads_max
    assert max(waits) <= 2 * load_s and (every_s > 2 * load_s or max(waits[1:]) < 1.0)
    assert busy.answers > 300 / SERVICE_S * 4 and not any(one.lost or one.refusal for one in world.requests)


def test_who_can_never_come_is_refused_and_shuts_no_device_to_others() -> None:
    """Beside another tenant's model that stays there is no place, however much memory is free."""
    kept, other = (record(name, 0.6, costs=COSTS, tenant="red", min_replicas=n) for name, n in (("a", 1), ("c", 0)))
    world = slow(World(kept, other, record("b", 0.6, costs=COSTS, tenant="blue")), "a", "b", "c")
    world.agent(cpu0=4.0)
    world.run(5)
    never = world.ask("b")
    world.run(15)
    served = world.ask("c")
    world.run(5)
    assert "pinned models or minimum replicas" in never.refusal
    assert served.started_s is not None and served.started_s - served.arrived_s <= 3.0


def test_forty_that_wait_are_served_beside_an_idle_resident() -> None:
    """An idle resident leaves for those who wait, at once."""
    world = slow(World(*pair()), "a", "b")
    world.agent(cpu0=1.0)
    world.ask("a")
    world.run(10)
    asked = [world.ask("b") for _ in range(40)]
    world.run(12)
    assert all(request.ended_s is not None and not request.refusal for request in asked)
    assert max((request.started_s or 0) - request.arrived_s for request in asked) <= 3.0 + 40 / 8 * 0.5


def test_the_third_small_model_gets_in_where_memory_holds_it() -> None:
    """How many models share a device is a matter of memory."""
    three = [record(name, 147 / 1024, costs=COSTS) for name in "abc"]
    world = slow(World(*three), "a", "b", "c")
    world.agent(cpu0=4.0)
    for name in "abc":
        world.ask(name)
        world.run(4)
    assert world.all_ended() and world.loaded() == ["a", "b", "c"]
    assert not world.unloads()


@pytest.mark.parametrize("idle", [("a", "b"), ("a",)])
def test_a_cold_model_has_its_place_beside_idle_ones_within_three_seconds(idle: tuple[str, ...]) -> None:
    """As many of them leave as must, the least recently used first."""
    newcomer = record("c", 0.9 if len(idle) > 1 else 0.6, costs=COSTS)
    world = slow(World(record("a", 0.45), record("b", 0.45), newcomer), "a", "b", "c")
    world.agent(cpu0=1.0)
    for name in "ab":
        world.ask(name)
        world.run(6)
    request = world.ask("c")
    world.run(3.0)
    assert request.started_s is not None
    assert world.loaded() == (["c"] if len(idle) > 1 else ["b", "c"])


def test_many_clients_beside_empty_devices_have_replicas_in_parallel() -> None:
    """Several replicas start at once where the need says so."""
    model = record("a", 0.8, costs=COSTS, max_replicas=3)
    world = slow(World(model), "a", load_s=2.0)
    world.agent(cpu0=1.0, cpu1=1.0, cpu2=1.0)
    world.ask("a")
    world.run(6)
    clients = Clients(world, "a", 24)
    world.run(8)
    assert world.loaded() == ["a", "a", "a"]
    assert world.loads[-1][0] - world.loads[-2][0] < 1.0
    assert clients.longest_wait_s < 6.0


def test_fewer_replicas_are_allowed_and_one_leaves() -> None:
    """``max_replicas`` from 2 to 1."""
    from broker.core.pool.events import ModelApplied

    model = record("a", 0.8, costs=COSTS, max_replicas=2, min_replicas=2)
    world = slow(World(model), "a")
    world.agent(cpu0=1.0, cpu1=1.0)
    world.run(6)
    assert world.loaded() == ["a", "a"]
    world.step(ModelApplied(record("a", 0.8, costs=COSTS, max_replicas=1, min_replicas=1)))
    world.run(6)
    assert world.loaded() == ["a"]


def test_an_idle_model_leaves_after_its_keep_time() -> None:
    """``strategy.keep_s`` of a model's file; one of another model stays for the pool's own time."""
    world = slow(World(record("a", 0.4, costs=COSTS, keep_s=20.0), record("b", 0.4, costs=COSTS)), "a", "b")
    world.agent(cpu0=1.0)
    world.ask("a")
    world.ask("b")
    world.run(15)
    assert world.loaded() == ["a", "b"]
    world.run(25)
    assert world.loaded() == ["b"]


def test_surplus_replicas_leave_when_the_rush_is_over() -> None:
    """What stood beside the first replica goes."""
    world = slow(World(record("a", 0.8, costs=COSTS, max_replicas=3)), "a")
    world.agent(cpu0=1.0, cpu1=1.0, cpu2=1.0)
    for _ in range(100):
        world.ask("a", service_s=2.0)
    world.run(20)
    assert len(world.loaded()) > 1
    world.run(90)
    assert world.loaded() == ["a"]


def test_overload_nobody_waits_beyond_the_bound_and_gold_is_before_silver() -> None:
    """Eight devices, sixteen busy models of which each needs a whole one."""
    models = [
        record(f"m{n:02d}", 0.8, costs=COSTS, sla_class=SlaClass.GOLD if n % 4 == 0 else SlaClass.SILVER) for n in range(16)
    ]
    world = slow(World(*models), *(model.name for model in models))
    world.agent_of("w", {f"cpu{n}": 1.0 for n in range(8)})
    clients = [Clients(world, model.name, 3) for model in models]
    world.run(120)
    gold = [c for n, c in enumerate(clients) if n % 4 == 0]
    silver = [c for n, c in enumerate(clients) if n % 4]
    print([c.answers for c in clients], [round(c.longest_wait_s, 1) for c in clients], len(world.loads))
    assert max(c.longest_wait_s for c in clients) <= 30.0
    assert max(c.longest_wait_s for c in gold) <= max(c.longest_wait_s for c in silver)
    assert sum(c.answers for c in gold) / len(gold) > 1.2 * sum(c.answers for c in silver) / len(silver)
    assert all(not request.refusal for request in world.requests)


def test_a_model_that_fails_to_load_evicts_nobody_that_is_used() -> None:
    """A broken model's clients wait or are told; the healthy one beside it is not evicted again and again."""
    world = slow(World(*pair()), "a", "b")
    world.agent(cpu0=1.0)
    world.broken.add("b")
    healthy = Clients(world, "a", 2)
    world.run(5)
    Clients(world, "b", 2)
    world.run(90)
    evictions = [entry for entry in world.core.digests.timeline(0.0) if entry.action == "evict"]
    assert len(evictions) <= 2
    assert healthy.longest_wait_s < 20.0


def test_what_a_class_is_worth_and_keep_times_can_be_set() -> None:
    """In the policy's own words; a wrong one is named."""
    from broker.core.plan.coordinator import Coordinator
    from broker.scheduler.policies import make_policy
    from subjects.errors import ConfigError

    plain, made = make_policy("carpool"), make_policy("carpool-learning:gold=5000,batch=1,keep_s=600,models_per_device=2")
    assert isinstance(plain, Coordinator) and isinstance(made, Coordinator)
    assert plain.settings.class_values == (3000.0, 1000.0, 300.0, 50.0)
    assert made.settings.class_values == (5000.0, 1000.0, 300.0, 1.0)
    assert (made.settings.keep_s, made.settings.residents_max, made.settings.learns_devices) == (600.0, 2, True)
    for text, says in (
        ("rules", "use one of carpool, carpool-learning"),
        ("carpool:platinum=3", "no setting 'platinum'; there are gold, silver"),
        ("carpool:gold=much", "gold=much: write a number from 0 up"),
        ("carpool:keep_s=-1", "keep_s=-1: write a number from 0 up"),
    ):
        with pytest.raises(ConfigError, match=says):
            make_policy(text)
