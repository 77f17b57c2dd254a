"""A policy that needs costs, in a pool where not every file gives them: nobody is forgotten (SCH-3)."""

from __future__ import annotations

from msgspec.structs import replace

from broker.core.plan.policy import Decision, PoolView, StartReplica
from broker.core.pool.events import LeadershipGained, RegistryLoaded, SchedulerSettings
from broker.core.scheduler import SchedulerCore
from profiles.estimate import SIMULATED
from subjects.messages import StepCosts
from tests.core.scheduler_world import GIB, World, record
from workers.core.agent import AgentCore

COSTS = StepCosts(prefill_token_s=1e-5, step_const_s=0.01)


class Sees:
    """Starts what waits, wherever there is room, and remembers what it saw."""

    name = "sees"

    def __init__(self) -> None:
        self.models: set[str] = set()
        self.memory: set[int] = set()
        self.costs: dict[str, dict[str, StepCosts]] = {}

    def decide(self, now_s: float, view: PoolView) -> Decision:
        self.models |= {model.record.name for model in view.models.values()}
        self.costs |= {model.record.name: model.record.costs for model in view.models.values()}
        self.memory |= {device.memory_bytes for device in view.devices.values()}
        actions = [
            StartReplica(model.record.deployment, (device.key,), "it waits")
            for model in view.models.values()
            for device in view.devices.values()
            if model.waiting and not model.replicas and device.free_planned_bytes >= model.record.budget_bytes
        ]
        return Decision(actions=tuple(actions[:1]))


def world_of(policy: Sees, kind: str) -> World:
    """``priced`` has costs on H100s alone, ``free`` on nothing; one device of 2 GiB of this kind."""
    records = (record("priced", 1.0, costs={"h100-80gb": COSTS}), record("free", 1.0))
    world = World(*records)
    world.core = SchedulerCore(SchedulerSettings(), policy)
    world.step(RegistryLoaded(records))
    world.step(LeadershipGained(1))
    agent = world.agent("w", gpu0=2.0)
    settings = agent.core._settings
    agent.core = AgentCore(replace(settings, devices=tuple(replace(one, device_type=kind) for one in settings.devices)))
    return world


def test_a_policy_sees_every_model_with_costs() -> None:
    """SCH-3: what the file does not give is estimated; the policy decides about all models and all of the memory."""
    policy = Sees()
    world = world_of(policy, "h100-80gb")
    requests = [world.ask("free"), world.ask("priced", delay_s=3.0)]
    world.run(10.0)
    assert world.all_ended() and not any(request.refusal for request in requests)
    assert world.loaded() == ["free", "priced"]
    assert policy.models == {"free", "priced"}
    assert policy.memory == {2 * GIB}
    assert policy.costs["priced"] == {"h100-80gb": COSTS}
    assert policy.costs["free"] == {"h100-80gb": SIMULATED}


def test_costs_on_another_kind_of_device_do_for_this_one() -> None:
    """SCH-3: nothing here has the kind that the file tells of; a simulated engine is as fast as its options say."""
    policy = Sees()
    world = world_of(policy, "l4-24gb")
    world.ask("priced")
    world.run(5.0)
    assert world.all_ended() and world.loaded() == ["priced"]
    assert policy.costs["priced"] == {"h100-80gb": COSTS, "l4-24gb": SIMULATED}
