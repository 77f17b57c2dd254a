"""What gateways tell: the demand of this moment, and what arrived and ended since somebody last looked."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from broker.core.pool.members import Demand, Flow
from subjects.ids import DeploymentKey, IngressId
from subjects.messages import IngressTelemetry, Lane, SlaClass

_NO_DEMAND = Demand()
_NOWHERE: frozenset[tuple[SlaClass, Lane]] = frozenset()


@dataclass(slots=True)
class _Ingress:
    """A gateway. ``last_heard`` is in heard seconds (see ``pool``)."""

    last_heard: float
    reported_s: float
    sequence: int
    demand: dict[DeploymentKey, Demand] = field(default_factory=dict)


class Inflow:
    """Sums over all gateways. A telemetry that comes twice, or late, counts once."""

    def __init__(self) -> None:
        self._ingresses: dict[IngressId, _Ingress] = {}
        self._flow: dict[DeploymentKey, Flow] = {}
        self._known: tuple[float, dict[DeploymentKey, Demand]] | None = None

    def is_news(self, telemetry: IngressTelemetry) -> bool:
        """Whether it has not been counted yet."""
        old = self._ingresses.get(telemetry.ingress)
        return old is None or telemetry.sequence > old.sequence

    def take(self, now_s: float, heard_s: float, telemetry: IngressTelemetry) -> list[DeploymentKey]:
        """Takes a gateway's whole demand, and adds what it counted to the flow; returns the models that start to wait."""
        old = self._ingresses.get(telemetry.ingress)
        if old is not None and telemetry.sequence <= old.sequence:
            old.last_heard = heard_s
            return []
        demand: dict[DeploymentKey, Demand] = {}
        for row in telemetry.demand:
            if row.arrived or row.finished:
                self._flow.setdefault(row.deployment, Flow()).add(row)
            queues = frozenset({(row.sla_class, row.lane)}) if row.waiting else _NOWHERE
            here = Demand(row.waiting, row.running, row.oldest_wait_s, queues, row.waiting_input_tokens)
            there = demand.get(row.deployment)
            demand[row.deployment] = here if there is None else _sum(there, here)
        self._ingresses[telemetry.ingress] = _Ingress(heard_s, now_s, telemetry.sequence, demand)
        self._known = None
        before = old.demand if old is not None else {}
        return [model for model, d in demand.items() if d.waiting and not before.get(model, _NO_DEMAND).waiting]

    def take_flow(self) -> dict[DeploymentKey, Flow]:
        """What arrived and ended since the last call."""
        flow, self._flow = self._flow, {}
        return flow

    def judge(self, heard_before: float) -> None:
        """Forgets the demand of gateways that were last heard before this."""
        for ingress, seen in list(self._ingresses.items()):
            if seen.last_heard <= heard_before:
                del self._ingresses[ingress]
                self._known = None

    def demand(self, now_s: float) -> dict[DeploymentKey, Demand]:
        """Demand by model. A wait has grown since it was reported."""
        if self._known is not None and self._known[0] == now_s:
            return self._known[1]
        total: dict[DeploymentKey, Demand] = {}
        for seen in self._ingresses.values():
            age_s = now_s - seen.reported_s
            for model, demand in seen.demand.items():
                known = total.get(model)
                if demand.waiting:
                    demand = replace(demand, oldest_wait_s=demand.oldest_wait_s + age_s)
                total[model] = demand if known is None else _sum(known, demand)
        self._known = (now_s, total)
        return total


def _sum(one: Demand, other: Demand) -> Demand:
    return Demand(
        one.waiting + other.waiting,
        one.running + other.running,
        max(one.oldest_wait_s, other.oldest_wait_s),
        one.queues | other.queues,
        one.waiting_input_tokens + other.waiting_input_tokens,
    )
