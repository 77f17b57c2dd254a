"""One autoscaler per model, as Kubernetes' Horizontal Pod Autoscaler does it.

Source: the algorithm of the HPA's documentation (desired = ceil(current x metric / target), a tolerance of 10 %, the
highest recommendation of the last 300 s on the way down), with metrics that LLM operators use in place of GPU utilisation,
which is near 100 % at any load: the request rate over what one replica carries within its SLO, and requests in flight over
what a replica holds when it is used to 70 %; as with several metrics in Kubernetes the larger desire counts. Target 70 %,
sampled each 60 s, at least one replica, whole GPUs; a new pod pulls its weights, so every load is cold. It knows one model:
it takes free devices only and never one of another model. Left out: the limit on pods added per 15 s, which a 60 s sample
never meets, and the first 300 s after the controller's start, in which Kubernetes would not scale down: here it may at its
first sample.
"""

from __future__ import annotations

from collections import deque

from broker.core.plan.policy import Action, Decision, ModelView, PoolView, StartReplica, StopReplica
from ops.simulator.policies import common as common
from ops.simulator.types import PolicyContext
from subjects.ids import DeploymentKey

UTILISATION = 0.7
TOLERANCE = 0.1
SAMPLE_S = 60.0
STABILISATION_S = 300.0


class Hpa:
    """Per model one loop; what they share is only the free devices."""

    name = "hpa"
    cold_loads = True

    def __init__(self, starts_with: dict[DeploymentKey, int]) -> None:
        self._desired = dict(starts_with)
        self._sample = common.Every(SAMPLE_S)
        self._recent: dict[DeploymentKey, common.Recent] = {}
        self._recommended: dict[DeploymentKey, deque[tuple[float, int]]] = {}
        self._sampled = False

    def decide(self, now_s: float, view: PoolView) -> Decision:
        """Samples once a minute; pods that could not be placed are tried again at every look."""
        for deployment, model in view.models.items():
            self._recent.setdefault(deployment, common.Recent(SAMPLE_S)).add(now_s, model.arrivals)
        if self._sample.due(now_s):
            # Nothing was observed before the first period is over.
            for deployment, model in view.models.items() if self._sampled else ():
                self._desired[deployment] = self._desire(now_s, deployment, model, view)
            self._sampled = True
        floor = common.Floor(view)
        actions: list[Action] = []
        for deployment, model in sorted(view.models.items(), key=lambda item: (-item[1].record.gpus, item[0])):
            desired = self._desired.get(deployment, 1)
            surplus = common.idlest(model.replicas, len(model.replicas) - desired)
            actions += [StopReplica(replica.replica, f"desired {desired}") for replica in surplus]
            for _ in range(desired - len(model.replicas)):
                devices = floor.whole(model.record)
                if devices is None:
                    break
                floor.take(devices, model.record.budget_bytes)
                actions.append(StartReplica(deployment, devices, f"desired {desired}"))
        return Decision(tuple(actions))

    def _desire(self, now_s: float, deployment: DeploymentKey, model: ModelView, view: PoolView) -> int:
        record, costs = model.record, common.costs_of(model, view)
        loads = self._recent[deployment].loads(now_s)
        by_rate = common.capacity_used(record, costs, loads, record.kv_bytes)
        in_flight = common.requests_at(record, costs, loads, record.kv_bytes, UTILISATION)
        used = max(by_rate, UTILISATION * (model.waiting + model.running) / in_flight)
        current = max(1, len(model.replicas))
        ratio = used / current / UTILISATION
        wanted = current if abs(ratio - 1.0) <= TOLERANCE else max(1, common.needed(used, UTILISATION))
        kept = self._recommended.setdefault(deployment, deque())
        kept.append((now_s, wanted))
        while kept[0][0] <= now_s - STABILISATION_S:
            kept.popleft()
        return max(wanted, min(current, max(count for _, count in kept)))


def hpa(context: PolicyContext) -> Hpa:
    """Factory of ``hpa``: it starts with the pods of the static split."""
    workload = context.workload
    return Hpa({model.deployment: workload.static_replicas.get(model.name, 1) for model in workload.models})
