"""Random pools, demand and faults: budgets hold at every instant (checked inside the world), and everybody is answered."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.core.scheduler_events import SchedulerSettings
from tests.core.scheduler_world import World, record

QUICK = SchedulerSettings(minority_wait_s_max=4.0, residency_s_min=2.0, idle_release_s=1.0, drain_s=6.0)
NAMES = "abcde"
SETTLE_S = 240.0


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
)


def play(scenario: Scenario) -> World:
    """Runs a scenario to its end."""
    records = [record(NAMES[i], size) for i, size in enumerate(scenario.sizes)]
    world = World(*records, seed=scenario.seed, settings=QUICK)
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
    world.run_until(world.all_ended, bound_s=SETTLE_S)
    world.run(5.0)
    return world


@given(scenarios)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_everybody_is_served_or_refused(scenario: Scenario) -> None:
    """Every request ends: served, or refused because its model is broken, too big, or has no worker left."""
    world = play(scenario)
    # A model's unlucky loads may be refused for a while too, when workers die or messages are lost.
    calm = not scenario.deaths and not scenario.freezes and not scenario.loss and not scenario.pauses
    largest = max(size for devices in scenario.devices for size in devices)
    for request in world.requests:
        number = next(i for i in range(5) if record(NAMES[i]).model_hash == request.model)
        if request.refusal and calm:
            assert number in scenario.broken or scenario.sizes[number] > largest, request.refusal
        if scenario.sizes[number] > largest:
            assert request.refusal
        if number in scenario.broken:
            assert request.refusal
    assert world.core.transactions.running == {}
    assert world.core.pool.leaving == set()


@given(scenarios)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_swaps_are_bounded(scenario: Scenario) -> None:
    """No thrash: every load beyond the first of a model is paid for by a request that waited, a fault, or a broken model."""
    world = play(scenario)
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
