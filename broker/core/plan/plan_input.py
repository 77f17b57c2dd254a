"""What the coordinator sees of the pool at one moment, in the terms of its plan."""

from __future__ import annotations

from dataclasses import dataclass

from broker.core.plan.need import ModelNeed
from broker.core.plan.policy import ModelView, PoolView, ReplicaView
from broker.core.plan.problem import Problem
from subjects.ids import ReplicaId
from subjects.messages import ModelRecord, ReplicaState, StepCosts


@dataclass(slots=True)
class Look:
    """One look at the pool. Models, needs, costs and the problem's needs have the same order."""

    now_s: float
    view: PoolView
    models: list[ModelView]
    needs: list[ModelNeed]
    costs: list[StepCosts]
    problem: Problem
    replicas: dict[ReplicaId, ReplicaView]

    def ready(self, replica: ReplicaId) -> bool:
        """Whether it serves."""
        return self.replicas[replica].state is ReplicaState.READY


def kv_least_bytes(model: ModelView, tokens_min: int) -> int:
    """The least KV that a replica gets, over all its devices: ``tokens_min`` where it can grow later; else that of one
    longest context, and the page that the engine keeps for itself."""
    record = model.record
    tokens = tokens_min if model.resizes_kv else (-(-record.max_context_len // record.block_size) + 1) * record.block_size
    return min(tokens * record.kv_bytes_per_token, max(record.kv_bytes, record.kv_bytes_per_token))


def fixed_bytes(record: ModelRecord) -> int:
    """What a replica is charged on each device beside its KV."""
    parts_bytes = -(-record.weights_bytes // record.gpus) + record.overhead_bytes
    return max(parts_bytes, record.budget_bytes - -(-record.kv_bytes // record.gpus))


def kv_used_bytes(record: ModelRecord, replica: ReplicaView) -> int:
    """What its requests hold, and a little more for their next tokens, over all its devices."""
    used = (replica.kv_pages - replica.kv_pages_free) * record.block_size * record.kv_bytes_per_token
    return int(used * 1.05) + record.block_size * record.kv_bytes_per_token
