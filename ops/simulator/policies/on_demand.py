"""Serverless LLM serving: an instance is loaded when a request needs one, where that is quickest, and kept while it is used.

Source: ServerlessLLM (OSDI 2024): loading-optimised checkpoints in host memory and on SSD, the server with the least
estimated start-up time is chosen, instances scale with requests in flight (``target_ongoing_requests``) and end when idle
for ``keep_alive``; when the pool is full the least recently used idle instance leaves. One instance has its devices for
itself. Set here: a target of what an instance holds when it is used to 70 %, and a keep-alive of 5 minutes, since a load
takes longer than the TTFT target. Left out: live migration of a running request off a server with the wanted checkpoint;
all nodes of the simulated pools hold all weights in host memory.
"""

from __future__ import annotations

import math

from broker.core.plan import policy as p
from ops.simulator.policies.common import Floor, Recent, costs_of, requests_at, waiting_first
from ops.simulator.types import PolicyContext
from subjects.ids import DeploymentKey, ReplicaId
from subjects.messages import ReplicaState

KEEP_ALIVE_S = 300.0
TARGET = 0.7
SPAN_S = 60.0
"""Over which the mean lengths are learned that say how many requests an instance carries."""


class OnDemand:
    """Loads on request, evicts the least recently used."""

    name = "on-demand"

    def __init__(self) -> None:
        self._recent: dict[DeploymentKey, Recent] = {}

    def decide(self, now_s: float, view: p.PoolView) -> p.Decision:
        """Acts on requests in flight as they are at this look."""
        floor = Floor(view)
        actions: list[p.Action] = []
        gone: set[ReplicaId] = set()
        for deployment, model in view.models.items():
            self._recent.setdefault(deployment, Recent(SPAN_S)).add(now_s, model.arrivals)
        wanted = {
            deployment: math.ceil((model.waiting + model.running) / self._target(now_s, deployment, model, view))
            for deployment, model in view.models.items()
        }
        for deployment, model in view.models.items():
            spare = max(0, len(model.replicas) - wanted[deployment])
            for replica in _least_recent(model.replicas)[:spare]:
                if not replica.running and now_s - replica.last_used_s >= KEEP_ALIVE_S:
                    gone.add(replica.replica)
                    actions.append(p.StopReplica(replica.replica, f"idle for {KEEP_ALIVE_S:g} s"))
        for deployment, model in waiting_first(view):
            for _ in range(wanted[deployment] - len(model.replicas)):
                devices = floor.whole(model.record)
                victims: tuple[p.ReplicaView, ...] = ()
                if devices is None:
                    victims = _idle_for(view, model, gone)
                    if not victims:
                        break
                    devices = victims[0].devices[: model.record.gpus]
                    gone.update(victim.replica for victim in victims)
                else:
                    floor.take(devices, model.record.budget_bytes)
                why = f"{model.waiting + model.running} in flight"
                actions.append(p.StartReplica(deployment, devices, why, victims=tuple(v.replica for v in victims)))
        return p.Decision(tuple(actions))

    def _target(self, now_s: float, deployment: DeploymentKey, model: p.ModelView, view: p.PoolView) -> float:
        loads = self._recent[deployment].loads(now_s)
        return requests_at(model.record, costs_of(model, view), loads, model.record.kv_bytes, TARGET)


def _least_recent(replicas: tuple[p.ReplicaView, ...]) -> list[p.ReplicaView]:
    ready = [replica for replica in replicas if replica.state is ReplicaState.READY and not replica.stays]
    return sorted(ready, key=lambda replica: (replica.last_used_s, replica.replica))


def _idle_for(view: p.PoolView, model: p.ModelView, gone: set[ReplicaId]) -> tuple[p.ReplicaView, ...]:
    """The idle replica used longest ago whose devices are enough."""
    idle = [
        replica
        for other in view.models.values()
        for replica in _least_recent(other.replicas)
        if other is not model
        and not replica.running
        and replica.replica not in gone
        and len(replica.devices) >= model.record.gpus
    ]
    return tuple(sorted(idle, key=lambda replica: (replica.last_used_s, replica.replica))[:1])


def on_demand(context: PolicyContext) -> OnDemand:
    """Factory of ``on-demand``."""
    return OnDemand()
