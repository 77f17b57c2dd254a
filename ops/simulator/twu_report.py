"""Does TWU warn before a device is congested? ``carpool simulate --scenario twu-lead`` (SCH-6).

Three models share a GPU with the 60/30/10 mix. Load rises evenly from half of what the device bears (found by ``calibrate``)
to well beyond it. *Congestion* is when more than 5 % of the requests of the last ten seconds are late in three readings in a
row. A signal *warns* at the last of three readings in a row above its level. Each signal gets the lowest level at which it
is silent for five minutes at 70 % of the bearable load, the same rule for both; TWU's is the calibrated one where that is
higher. The lead is by how many seconds a warning comes before congestion; 0 where it does not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ops.calibrate import LATE_MAX, calibrate_simulated
from ops.simulator.models import sim_model
from ops.simulator.probe import Line, Reading, lines_of, ramp, watch
from ops.simulator.scenario import Figures, Say

SIZES = ("3.8B", "8B", "14B")
CALM_SHARE = 0.7
CALM_S = 300.0
RISE_S = 240.0
RISE = (0.5, 1.5)
RISE_STEP_S = 5.0
ROW = 3
SETTLE_S = 20
SEEDS = 9


@dataclass(frozen=True, slots=True)
class Lead:
    """Of one rise of load. Seconds from its begin; None for what did not happen."""

    congested_s: float | None
    twu_warns_s: float | None
    utilisation_warns_s: float | None

    @staticmethod
    def _before(warns_s: float | None, congested_s: float | None) -> float:
        return max(0.0, congested_s - warns_s) if warns_s is not None and congested_s is not None else 0.0

    @property
    def twu_s(self) -> float:
        """How long before congestion TWU warned."""
        return self._before(self.twu_warns_s, self.congested_s)

    @property
    def utilisation_s(self) -> float:
        """How long before congestion utilisation warned."""
        return self._before(self.utilisation_warns_s, self.congested_s)


def first_of_row(readings: Sequence[Reading], holds: Callable[[Reading], bool], row: int = ROW) -> float | None:
    """When the last of ``row`` readings in a row came for which it holds; None: never."""
    count = 0
    for reading in readings:
        count = count + 1 if holds(reading) else 0
        if count == row:
            return reading.at_s
    return None


def rising(lines: Sequence[Line], bearable_rps: float, seed: int) -> list[tuple[float, float]]:
    """Pieces of the rise: from when on how many requests per second."""
    steps = round(RISE_S / RISE_STEP_S)
    return [
        (step * RISE_STEP_S, bearable_rps * (RISE[0] + (RISE[1] - RISE[0]) * (step + 0.5) / steps)) for step in range(steps)
    ]


def lead(lines: Sequence[Line], bearable_rps: float, baseline: float, calibrated: float, seed: int) -> Lead:
    """One seed: the calm load sets the levels, the rise is judged."""
    calm = watch(lines, ramp(lines, seed + 1000, [(0.0, CALM_SHARE * bearable_rps)], CALM_S), seed, CALM_S, baseline)
    settled = calm[SETTLE_S:]
    twu_level = max(calibrated, _silent(settled, lambda reading: reading.twu))
    use_level = _silent(settled, lambda reading: reading.utilisation)
    rise = watch(lines, ramp(lines, seed, rising(lines, bearable_rps, seed), RISE_S), seed, RISE_S, baseline)
    seen = rise[SETTLE_S:]
    return Lead(
        congested_s=first_of_row(seen, lambda reading: reading.late > LATE_MAX),
        twu_warns_s=first_of_row(seen, lambda reading: reading.twu > twu_level),
        utilisation_warns_s=first_of_row(seen, lambda reading: reading.utilisation > use_level),
    )


def _silent(readings: Sequence[Reading], value: Callable[[Reading], float]) -> float:
    """The lowest level that no ``ROW`` of these readings in a row exceed."""
    values = [value(reading) for reading in readings]
    return max(min(values[place : place + ROW]) for place in range(len(values) - ROW + 1))


def report(seed: int, processes: int, say: Say) -> Figures:
    """Medians over ``SEEDS`` rises of load."""
    lines = lines_of([sim_model(size) for size in SIZES])
    found = calibrate_simulated(SIZES, seed, 1, say)
    bearable_rps = found.stages[-1].rps
    rises = [
        lead(lines, bearable_rps, found.baseline_tokens_per_s, found.twu_full, seed + number) for number in range(SEEDS)
    ]
    congested = [one for one in rises if one.congested_s is not None]
    return {
        "twu_lead_s": _median([one.twu_s for one in congested]),
        "utilisation_lead_s": _median([one.utilisation_s for one in congested]),
        "lead_over_utilisation_s": _median([one.twu_s - one.utilisation_s for one in congested]),
        "congested": len(congested),
        "rises": SEEDS,
        "twu_full": found.twu_full,
        "bearable_rps": bearable_rps,
        "utilisation_at_calm": round(_utilisation(lines, bearable_rps, seed), 4),
    }


def _utilisation(lines: Sequence[Line], bearable_rps: float, seed: int) -> float:
    calm = watch(lines, ramp(lines, seed, [(0.0, CALM_SHARE * bearable_rps)], 60.0), seed, 60.0, 1.0)[SETTLE_S:]
    return sum(reading.utilisation for reading in calm) / len(calm)


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None
