"""Cross-model scaling that reacts: whole GPUs go to whoever needs them now, without a forecast.

The control loop of SageServe, Chiron and most in-house schedulers without their forecasts (``global-reactive``): each second
every model's load of the last seconds, and what waits, is turned into replicas by the measured capacity; who lacks one takes
a free device at once, else one of the model with the greatest surplus; who has had too many for a minute gives them
back; an idle model goes after five minutes. Every replica has its devices for itself. Left out: SLO classes (none of the
workloads mixes them within a model), migration of running requests (replicas drain).
"""

from __future__ import annotations

from dataclasses import dataclass

from broker.core.plan.policy import Action, Decision, ModelView, PoolView, StartReplica, StopReplica
from ops.simulator.policies.common import Every, Floor, Sizer, costs_of, idlest, needed
from ops.simulator.types import PolicyContext
from subjects.ids import DeploymentKey, ReplicaId
from subjects.messages import ReplicaState


@dataclass(frozen=True, slots=True)
class ReactiveSettings:
    """As an operator would set them for a TTFT of 2 s and loads of 3 s."""

    period_s: float = 1.0
    span_s: float = 15.0
    """Over which the load is measured."""
    utilisation: float = 0.8
    surplus_s: float = 60.0
    """A surplus must last so long before it is given back."""
    idle_s: float = 300.0
    """After so long without a request a model gives up its last replica."""


class Reactive:
    """``global-reactive``."""

    name = "global-reactive"

    def __init__(self, settings: ReactiveSettings | None = None) -> None:
        self.settings = settings or ReactiveSettings()
        self._period = Every(self.settings.period_s)
        self._sizers: dict[DeploymentKey, Sizer] = {}

    def decide(self, now_s: float, view: PoolView) -> Decision:
        """Looks at all models each second, and at once when one waits that has nothing."""
        s = self.settings
        for deployment, model in view.models.items():
            if deployment not in self._sizers:
                self._sizers[deployment] = Sizer(s.span_s, s.utilisation, s.surplus_s)
            self._sizers[deployment].see(now_s, model)
        starved = any(model.waiting and not model.replicas for model in view.models.values())
        if not (self._period.due(now_s) or starved):
            return Decision()
        wanted = {deployment: self._wanted(now_s, deployment, model, view) for deployment, model in view.models.items()}
        floor = Floor(view)
        actions: list[Action] = []
        gone: set[ReplicaId] = set()
        for deployment, model in view.models.items():
            held = max(wanted[deployment], needed(self._sizers[deployment].held(), 1.0))
            for replica in idlest(model.replicas, len(model.replicas) - held):
                gone.add(replica.replica)
                actions.append(StopReplica(replica.replica, f"{held} are enough for {self.settings.surplus_s:g} s"))
        # Who lacks the largest part of what it needs comes first.
        lacking = [
            ((wanted[deployment] - len(model.replicas)) / wanted[deployment], deployment)
            for deployment, model in view.models.items()
            if wanted[deployment] > len(model.replicas)
        ]
        for _, deployment in sorted(lacking, key=lambda entry: (-entry[0], entry[1])):
            model = view.models[deployment]
            for _ in range(wanted[deployment] - len(model.replicas)):
                start = self._start(view, deployment, floor, wanted, gone)
                if start is None:
                    break
                actions.append(start)
        return Decision(tuple(actions))

    def _wanted(self, now_s: float, deployment: DeploymentKey, model: ModelView, view: PoolView) -> int:
        sizer = self._sizers[deployment]
        alive = now_s - sizer.seen_s < self.settings.idle_s
        return max(int(alive), model.record.min_replicas, needed(sizer.size(now_s, model, costs_of(model, view)), 1.0))

    def _start(
        self, view: PoolView, deployment: DeploymentKey, floor: Floor, wanted: dict[DeploymentKey, int], gone: set[ReplicaId]
    ) -> StartReplica | None:
        record = view.models[deployment].record
        devices = floor.whole(record)
        if devices is not None:
            floor.take(devices, record.budget_bytes)
            return StartReplica(deployment, devices, f"needs {wanted[deployment]}")
        # Somebody with a surplus gives up one that holds as many devices or more.
        for _, other_deployment in sorted(
            (
                (len(other.replicas) - wanted[other_deployment], other_deployment)
                for other_deployment, other in view.models.items()
            ),
            key=lambda entry: (-entry[0], entry[1]),
        ):
            other = view.models[other_deployment]
            left = [replica for replica in other.replicas if replica.replica not in gone]
            if other_deployment == deployment or len(left) <= wanted[other_deployment] or other.record.gpus < record.gpus:
                continue
            victims = [replica for replica in idlest(left, len(left)) if replica.state is ReplicaState.READY]
            if victims:
                victim = victims[0]
                gone.add(victim.replica)
                reason = f"needs {wanted[deployment]}, {other.record.name} has more than it needs"
                return StartReplica(deployment, victim.devices[: record.gpus], reason, victims=(victim.replica,))
        return None


def reactive(context: PolicyContext) -> Reactive:
    """Factory of ``global-reactive``."""
    return Reactive()
