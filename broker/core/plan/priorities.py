"""Priority in two dimensions: service class and compute density, as weights with which nobody starves (SCH-7).

A replica serves the classes that wait by deficit round robin over requests (``workers.core.pulling``), so a weight is a
share of turns. Compute density is the work of a class's mean request over that of the model's mean request. Dividing by it
turns shares of turns into shares of work: a class of long prompts does not take more than its class is worth. Weights are
whole numbers from 1 to ``WEIGHT_MAX``, so every class gets a turn in a bounded number of them, whatever the others send.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker.core.plan.tunables import BOOST_MAX, CLASS_SHARES, WEIGHT_MAX, WEIGHT_SCALE
from subjects.messages import SlaClass

CLASS_VALUES: Mapping[SlaClass, int] = dict(zip(SlaClass, CLASS_SHARES, strict=True))
"""Turns by class where all requests are alike; the weights of a replica that was told none."""


def class_weights(density: Mapping[SlaClass, float], boost: Mapping[SlaClass, float] | None = None) -> dict[str, int]:
    """Weights for the digest (``PoolModel.class_weights``): value times boost over density, from 1 to ``WEIGHT_MAX``.

    ``density`` is 1 for a class that is not in it. ``boost`` (from 1 to ``BOOST_MAX``) is what fairness adds for a class
    that is served below its due. A higher class never falls below a lower one: that its own requests are heavy is no reason
    to be served after others.
    """
    weights: dict[str, int] = {}
    least = 1
    for sla_class in reversed(SlaClass):
        share = density.get(sla_class, 1.0)
        if not share > 0.0:
            raise ValueError(f"density of {sla_class.value} must be above 0")
        raised = min(BOOST_MAX, max(1.0, boost.get(sla_class, 1.0) if boost else 1.0))
        weight = round(WEIGHT_SCALE * CLASS_VALUES[sla_class] * min(raised / share, 2 * raised))
        least = max(least, min(WEIGHT_MAX, weight))
        weights[sla_class.value] = least
    return {sla_class.value: weights[sla_class.value] for sla_class in SlaClass}


def densities(work_s: Mapping[SlaClass, float], requests: Mapping[SlaClass, int]) -> dict[SlaClass, float]:
    """Compute density by class from the work that arrived lately; classes without requests are left out."""
    all_requests = sum(requests.values())
    all_work_s = sum(work_s.values())
    if all_requests == 0 or all_work_s <= 0.0:
        return {}
    mean_s = all_work_s / all_requests
    return {
        sla_class: max(1e-3, work_s.get(sla_class, 0.0) / requests[sla_class] / mean_s)
        for sla_class in SlaClass
        if requests.get(sla_class, 0) > 0
    }


class Boosts:
    """What fairness adds to classes below their due: doubled while they stay so, taken back by steps afterwards. Bounded."""

    def __init__(self) -> None:
        self._boosts: dict[SlaClass, float] = {}

    def take(self, below: Mapping[SlaClass, bool]) -> dict[SlaClass, float]:
        """One reading: which classes are to be helped now (``FairnessWatch.read``). Returns the boosts."""
        for sla_class in SlaClass:
            boost = self._boosts.get(sla_class, 1.0)
            boost = min(BOOST_MAX, boost * 2.0) if below.get(sla_class, False) else max(1.0, boost * 0.9)
            self._boosts[sla_class] = boost
        return {sla_class: boost for sla_class, boost in self._boosts.items() if boost > 1.0}
