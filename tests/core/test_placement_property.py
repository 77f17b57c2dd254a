"""Random pools, demand and faults: budgets hold at every instant (checked inside the world), and everybody is answered."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.core.plan.coordinator import Coordinator, CoordinatorSettings
from broker.core.plan.policy import (
    Action,
    Decision,
    PoolView,
    ResizeReplicaKv,
    SetReplicaConcurrency,
    StartReplica,
    StopReplica,
)
from broker.core.pool.events import SchedulerSettings
from tests.core.scheduler_world import GIB, World, record

QUICK = SchedulerSettings(drain_s=6.0)
QUICK_TURNS = CoordinatorSettings(turn_s=4.0, residency_s=2.0)
NAMES = "abcde"
SETTLE_S = 240.0
CHANGE_S = 60.0
"""How long one change of an idle pool may take: on a bus that loses messages each is repeated until its stage's bound."""


@dataclass(frozen=True)
class Arrival:
    """A request for the model of that number."""

    model: int
    at_s: float
    service_s: float


@dataclass(frozen=True)
class Scenario:
    """A pool and what happens to it."""

    seed: int
    sizes: tuple[float, ...]
    devices: tuple[tuple[float, ...], ...]
    arrivals: tuple[Arrival, ...]
    load_times: tuple[float, ...]
    broken: frozenset[int]
    loss: float
    deaths: tuple[tuple[int, float], ...]
    freezes: tuple[tuple[int, float, float], ...]
    pauses: tuple[tuple[float, float], ...]
    wide: frozenset[int] = frozenset()
    """Models whose replicas span two devices."""
    meddles: bool = False
    """Whether a policy does this and that besides."""

    def fits(self, model: int) -> bool:
        """Whether some worker has the devices for it."""
        need = 2 if model in self.wide else 1
        return any(sum(gib >= self.sizes[model] for gib in devices) >= need for devices in self.devices)


@dataclass
class Meddler:
    """Decides at random, within and beyond what is possible, beside the coordinator."""

    seed: int
    name: str = "meddler"

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.coordinator = Coordinator(QUICK_TURNS)

    def decide(self, now_s: float, view: PoolView) -> Decision:
        """One action now and then, and what the coordinator wants."""
        decision = self.coordinator.decide(now_s, view)
        return msgspec.structs.replace(decision, actions=(*self._meddle(view), *decision.actions))

    def _meddle(self, view: PoolView) -> tuple[Action, ...]:
        draw = self.random
        replicas = [replica for model in view.models.values() for replica in model.replicas]
        devices = list(view.devices)
        if draw.random() < 0.5 or not devices:
            return ()
        model = draw.choice(list(view.models.values()))
        actions: list[Action] = [
            StartReplica(
                model.record.deployment,
                tuple(draw.sample(devices, min(len(devices), model.record.gpus))),
                "meddling",
                tuple(replica.replica for replica in replicas if draw.random() < 0.3),
                draw.choice([None, model.record.kv_bytes // 2, model.record.kv_bytes * 2]),
            )
        ]
        if replicas:
            replica = draw.choice(replicas)
            actions += [
                StopReplica(replica.replica, "meddling", interrupt=draw.random() < 0.5),
                ResizeReplicaKv(replica.replica, draw.choice([1, GIB // 16, GIB // 2]), "meddling"),
                SetReplicaConcurrency(replica.replica, draw.randint(1, 8), "meddling"),
            ]
        draw.shuffle(actions)
        return tuple(actions[: draw.randint(1, 2)])


gib = st.sampled_from([0.5, 1.0, 1.5, 2.0])
times = st.floats(0.0, 30.0)
scenarios = st.builds(
    Scenario,
    seed=st.integers(0, 2**16),
    sizes=st.tuples(gib, gib, gib, gib, gib),
    devices=st.lists(st.lists(gib, min_size=1, max_size=2).map(tuple), min_size=1, max_size=3).map(tuple),
    arrivals=st.lists(
        st.builds(Arrival, model=st.integers(0, 4), at_s=times, service_s=st.sampled_from([0.1, 1.0, 5.0])), max_size=25
    ).map(tuple),
    load_times=st.tuples(*[st.sampled_from([0.2, 1.0, 4.0])] * 5),
    broken=st.frozensets(st.integers(0, 4), max_size=2),
    loss=st.sampled_from([0.0, 0.1]),
    deaths=st.lists(st.tuples(st.integers(0, 2), times), max_size=1).map(tuple),
    freezes=st.lists(st.tuples(st.integers(0, 2), times, st.floats(0.5, 5.0)), max_size=2).map(tuple),
    pauses=st.lists(st.tuples(times, st.floats(0.5, 8.0)), max_size=1).map(tuple),
    wide=st.frozensets(st.integers(3, 4), max_size=2),
    meddles=st.booleans(),
)


def play(scenario: Scenario) -> World:
    """Runs a scenario to its end."""
    records = [
        record(NAMES[i], size, gpus=2 if i in scenario.wide else 1, max_replicas=2) for i, size in enumerate(scenario.sizes)
    ]
    policy = Meddler(scenario.seed) if scenario.meddles else Coordinator(QUICK_TURNS)
    world = World(*records, seed=scenario.seed, settings=QUICK, policy=policy)
    world.load_times = {NAMES[i]: load_s for i, load_s in enumerate(scenario.load_times)}
    world.broken = {NAMES[i] for i in sorted(scenario.broken)}
    world.loss = scenario.loss
    agents = [
        world.agent_of(f"w{i}", {f"d{j}": size for j, size in enumerate(devices)})
        for i, devices in enumerate(scenario.devices)
    ]
    for arrival in scenario.arrivals:
        world.ask(NAMES[arrival.model], service_s=arrival.service_s, delay_s=arrival.at_s)
    for number, at_s in scenario.deaths:
        world.later(at_s, agents[number % len(agents)].kill)
    for number, at_s, length_s in scenario.freezes:
        agent = agents[number % len(agents)]
        world.later(at_s, lambda agent=agent, length_s=length_s: agent.freeze(length_s))  # type: ignore[misc]
    for at_s, length_s in scenario.pauses:
        world.later(at_s, lambda length_s=length_s: world.pause(length_s))  # type: ignore[misc]
    world.run(31.0)
    if isinstance(policy, Meddler):
        world.core.policy = policy.coordinator
    world.run_until(world.all_ended, bound_s=SETTLE_S)
    world.run(60.0 if scenario.meddles else 10.0)  # What was begun for nobody ends by itself,
    world.run_until(lambda: not world.core.transactions.running and not world.core.pool.leaving, bound_s=CHANGE_S)
    return world


@given(scenarios)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_everybody_is_served_or_refused(scenario: Scenario) -> None:
    """Every request ends: served, or refused because its model is broken, too big, or has no worker left."""
    world = play(scenario)
    # A model's unlucky loads may be refused for a while too, when workers die or messages are lost.
    calm = not scenario.deaths and not scenario.freezes and not scenario.loss and not scenario.pauses
    for request in world.requests:
        number = next(i for i in range(5) if record(NAMES[i]).deployment == request.model)
        if request.refusal and calm:
            assert number in scenario.broken or not scenario.fits(number), request.refusal
        if not scenario.fits(number):
            assert request.refusal
        if number in scenario.broken:
            assert request.refusal
    assert world.core.transactions.running == {}
    assert world.core.pool.leaving == set()


@given(scenarios)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_swaps_are_bounded(scenario: Scenario) -> None:
    """No thrash: every load beyond the first of a model is paid for by a request that waited, a fault, or a broken model."""
    world = play(replace(scenario, meddles=False))
    healthy = [name for name in world.load_names() if name not in world.broken]
    broken = len(world.loads) - len(healthy)
    lost = sum(request.lost for request in world.requests)
    faults = len(scenario.deaths) + 2 * len(scenario.freezes)
    # A broken model may cost the residents of one device their place, once per attempt.
    allowed = len(world.requests) + lost + faults * 5 + broken * 4
    assert len(healthy) <= allowed
    assert len({command.replica for command in world.unloads()}) <= len(world.loads)


@given(scenarios)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_the_same_events_give_the_same_commands(scenario: Scenario) -> None:
    """A scenario played twice gives the same commands at the same times."""
    first, second = play(scenario), play(scenario)
    assert [(at_s, str(command)) for at_s, command in first.commands] == [
        (at_s, str(command)) for at_s, command in second.commands
    ]
