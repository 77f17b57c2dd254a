"""What would be done for models in the mode advise, and what that would save (SCH-11): for people, never carried out."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from broker.core.plan.layout import Layout
from broker.core.plan.policy import Action, ModelView, StartReplica, StopReplica
from broker.core.plan.problem import Block, Look
from broker.core.plan.search import Search, named
from broker.core.plan.turns import Turns
from broker.core.pool.describe import seconds_text


def advice(look: Look, blocks: list[Block], value_max: float, trials_max: int) -> list[Action]:
    """Starts and stops of advised models, as if they could be acted for; ``blocks`` are the replicas of the plan."""
    advised = {index for index, model in enumerate(look.models) if model.advises}
    needs = tuple(
        replace(need, replicas_max=look.models[index].record.max_replicas) if index in advised else need
        for index, need in enumerate(look.problem.needs)
    )

    def unlocked(block: Block) -> Block:
        stays = block.replica is not None and look.replicas[block.replica].stays
        return replace(block, stays=stays) if block.need in advised else block

    free = dataclasses.replace(
        look, problem=replace(look.problem, needs=needs, placed=tuple(map(unlocked, look.problem.placed)))
    )
    layout = Layout(free.problem, map(unlocked, blocks))
    devices = layout.devices
    search = Search(layout, trials_max)
    search.grow(only=sorted(advised))
    Turns(free, layout, value_max).take(only=advised)
    search.trim()
    kept = named(layout)
    staying = {block.replica for block in kept}
    leaving = [block for block in blocks if block.replica is not None and block.replica not in staying]
    saved = max(0, devices - layout.devices)
    reason = f"the rest carries it; acting would save {saved} {'device' if saved == 1 else 'devices'}"
    actions: list[Action] = []
    for block in kept:
        if block.replica is None and block.need in advised:
            keys = tuple(look.problem.sites[site].key for site in block.sites)
            model = look.models[block.need]
            victims = tuple(b.replica for b in leaving if b.replica is not None and not set(b.sites).isdisjoint(block.sites))
            actions.append(StartReplica(model.record.deployment, keys, _saved_s(model), victims))
    stopped = [block.replica for block in leaving if block.need in advised]
    return [*actions, *(StopReplica(replica, reason) for replica in stopped if replica is not None)]


def _saved_s(model: ModelView) -> str:
    if not model.waiting:
        return f"its load asks for it; acting would save what waits later: it is ready in {seconds_text(model.load_s)}"
    waits = f"{model.waiting} waiting for {seconds_text(model.oldest_wait_s)}"
    return f"{waits}; acting would save all but {seconds_text(model.load_s)} of each wait"
