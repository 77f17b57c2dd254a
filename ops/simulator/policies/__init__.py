"""Policies to compare with, all behind ``broker.core.policy.Policy``: what people run today, what was published, and ours.

Each is faithful to its idea and set as a competent operator would set it; each module says what the idea is, where it comes
from and what is left out. None but the oracle reads the trace. :data:`POLICIES` has them by the names of the reports.
"""

from __future__ import annotations

from ops.simulator.types import LoadLadder, PolicyFactory, Workload

POLICIES: dict[str, PolicyFactory] = {}
"""By name, in the order of the reports."""

COLD = ("hpa",)
"""Policies whose every load is cold: a new pod pulls its weights."""


def ladder_of(policy: str, workload: Workload) -> LoadLadder:
    """The load times under which a policy runs."""
    ladder = workload.ladder
    if policy not in COLD:
        return ladder
    return LoadLadder(warm_s=ladder.cold_s, cold_s=ladder.cold_s, all_warm=ladder.all_warm)
