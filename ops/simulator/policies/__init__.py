"""Policies to compare with, all behind ``broker.core.plan.policy.Policy``: what people run today, what was published, ours.

Each is faithful to its idea and set as a competent operator would set it; each module says what the idea is, where it comes
from and what is left out. None but the oracle reads the trace. :data:`POLICIES` has them by the names of the reports.
A policy whose loads are all cold says so with ``cold_loads = True``.
"""

from __future__ import annotations

from ops.simulator.oracle import oracle
from ops.simulator.policies.carpool import (
    carpool,
    without_coresidence,
    without_forecast,
    without_grouping,
    without_resize,
)
from ops.simulator.policies.hpa import hpa
from ops.simulator.policies.on_demand import on_demand
from ops.simulator.policies.prewarm import prewarm
from ops.simulator.policies.queue_only import queue_only
from ops.simulator.policies.reactive import reactive
from ops.simulator.policies.static import static, static_slo
from ops.simulator.policies.token_swap import token_swap
from ops.simulator.types import PolicyFactory

POLICIES: dict[str, PolicyFactory] = {
    "static": static,
    "static-slo": static_slo,
    "hpa": hpa,
    "queue-only": queue_only,
    "global-reactive": reactive,
    "on-demand": on_demand,
    "prewarm": prewarm,
    "token-swap": token_swap,
    "carpool": carpool,
    "carpool-no-forecast": without_forecast,
    "carpool-no-coresidence": without_coresidence,
    "carpool-no-resize": without_resize,
    "carpool-no-grouping": without_grouping,
    "oracle": oracle,
}
"""By name, in the order of the reports."""
