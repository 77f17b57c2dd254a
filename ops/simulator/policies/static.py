"""Dedicated GPUs: each model has its replicas on whole devices, always.

What most teams do. Sized by the workload: the smallest split that meets the SLO of every model, or, where the workload says
that its split follows another rule (the p99 minute), ``static-slo`` beside it. Left out: nothing; it is the base of all
savings. Loads happen before the measured time.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.core.plan.policy import Action, Decision, PoolView, StartReplica
from ops.simulator.policies.common import Floor
from ops.simulator.types import PolicyContext
from subjects.ids import DeploymentKey


class Static:
    """Starts so many replicas of each model on empty devices and leaves them alone."""

    def __init__(self, name: str, replicas: Mapping[DeploymentKey, int]) -> None:
        self.name = name
        self._replicas = dict(replicas)

    def decide(self, now_s: float, view: PoolView) -> Decision:
        """Replaces what is missing."""
        floor = Floor(view)
        actions: list[Action] = []
        # Those over several devices first: they need linked ones.
        for deployment, model in sorted(view.models.items(), key=lambda item: (-item[1].record.gpus, item[0])):
            for _ in range(self._replicas.get(deployment, 0) - len(model.replicas)):
                devices = floor.whole(model.record)
                if devices is None:
                    break
                floor.take(devices, model.record.budget_bytes)
                actions.append(StartReplica(deployment, devices, "its dedicated devices"))
        return Decision(tuple(actions))


def static(context: PolicyContext) -> Static:
    """Factory of ``static``."""
    return Static("static", _by_deployment(context, context.workload.static_replicas))


def static_slo(context: PolicyContext) -> Static:
    """Factory of ``static-slo``: the split that meets the SLO where ``static`` was sized by another rule."""
    workload = context.workload
    return Static("static-slo", _by_deployment(context, workload.static_slo_replicas or workload.static_replicas))


def _by_deployment(context: PolicyContext, replicas: Mapping[str, int]) -> dict[DeploymentKey, int]:
    return {model.deployment: replicas.get(model.name, 1) for model in context.workload.models}
