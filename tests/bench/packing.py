"""How far the greedy plan is from the best one: small random pools, solved both ways.

The *gap* of a problem is the share of what the greedy plan costs (lost value, devices and loads together) that a better plan
might save at most: 0 is proven best. Half of the pools are too small for their load, which is where greed errs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from broker.core.plan.layout import Layout
from broker.core.plan.problem import Block, Need, Problem, Site
from broker.core.plan.search import Plan, plan
from subjects.ids import DeploymentKey, DeviceId, ReplicaId, WorkerId
from tests.bench.exact import Solution, solve

GB = 1_000_000_000
PROBLEMS = 25
MODELS_MAX = 4
DEVICES_MAX = 5
VALUES = (3000.0, 1000.0, 300.0)
"""Gold, Silver, Bronze."""


def random_problem(
    seed: int, *, models_max: int = MODELS_MAX, devices_max: int = DEVICES_MAX, spans: bool = True, kv: bool = True
) -> Problem:
    """A small pool with what matters in large ones: two kinds of devices, classes, neighbours that slow each other, least
    shares, replicas that are there already. ``spans`` has replicas over two devices too, ``kv`` models that want memory."""
    random = np.random.Generator(np.random.PCG64(seed))

    def among(*values: float) -> float:
        return values[int(random.integers(len(values)))]

    devices = int(random.integers(2, devices_max + 1))
    load_max = 0.6 if seed % 2 else 1.6
    sites = tuple(
        Site(
            (WorkerId("w"), DeviceId(f"gpu{n}")),
            "g",
            "h100" if random.random() < 0.8 else "a100",
            72 * GB,
            int(random.integers(1, 4)),
        )
        for n in range(devices)
    )
    needs = tuple(
        Need(
            model=DeploymentKey(f"{n:064x}"),
            load=round(float(random.uniform(0.05, load_max)), 3),
            bytes_min=int(among(10, 20, 35) * GB),
            rates={"h100": 1.0, "a100": 0.5} if random.random() < 0.6 else {"h100": 1.0},
            gpus=2 if spans and devices > 2 and random.random() < 0.2 else 1,
            standing=among(0.05, 0.11, 0.17),
            usage=round(float(random.uniform(0.05, 0.8)), 3),
            share_min=among(0.0, 0.0, 0.3, 0.6),
            kv_bytes=round(float(random.uniform(0, 30e9))) if kv and random.random() < 0.5 else 0.0,
            value=among(*VALUES),
            replicas_min=int(random.integers(0, 2)),
            replicas_max=int(random.integers(1, 5)),
            co_locates=bool(random.random() < 0.9),
            load_s=among(3.0, 3.0, 60.0),
        )
        for n in range(int(random.integers(1, models_max + 1)))
    )
    problem = Problem(sites, needs)
    return replace(problem, placed=_placed(problem, random))


def _placed(problem: Problem, random: np.random.Generator) -> tuple[Block, ...]:
    """Some replicas where they fit, as if they had come for another load."""
    layout = Layout(problem)
    for _ in range(len(problem.sites)):
        need = int(random.integers(len(problem.needs)))
        first = int(random.integers(len(problem.sites)))
        sites = tuple(range(first, first + problem.needs[need].gpus))
        if sites[-1] < len(problem.sites) and random.random() < 0.6 and layout.fits(need, sites):
            layout.add(need, sites)
    return tuple(replace(layout.blocks[n], replica=ReplicaId(f"r-{n}")) for n in sorted(layout.blocks))


@dataclass(frozen=True, slots=True)
class Compared:
    """One problem, solved both ways."""

    problem: Problem
    greedy: Plan
    exact: Solution

    @property
    def gap(self) -> float:
        """The share of the greedy plan's cost above the proven bound, from 0 to 1."""
        total = self.greedy.score.total
        return max(0.0, total - self.exact.bound) / max(1e-9, total)

    @property
    def lost(self) -> float:
        """The share of all models' value that the greedy plan loses beyond the best layout found."""
        return (self.greedy.score.lost - self.exact.score.lost) / sum(need.value for need in self.problem.needs)


def compare(problem: Problem, *, trials_max: int = 6000) -> Compared | None:
    """None where the pool is too big to be solved exactly, or nothing is feasible."""
    solved = solve(problem)
    return Compared(problem, plan(problem, trials_max=trials_max), solved) if solved is not None else None


def measure_gap(problems: int = PROBLEMS, *, first_seed: int = 1) -> dict[str, float]:
    """Over so many random problems. ``solved_exactly`` of them were solved to a proven gap of a millionth."""
    compared = [compare(random_problem(first_seed + number)) for number in range(problems)]
    found = [one for one in compared if one is not None]
    gaps = [one.gap for one in found]
    return {
        "problems": problems,
        "gap_mean": round(sum(gaps) / len(gaps), 6) if gaps else 0.0,
        "gap_max": round(max(gaps, default=0.0), 6),
        "lost_mean": round(sum(one.lost for one in found) / len(found), 6) if found else 0.0,
        "solved_exactly": sum(one.exact.gap <= 1e-6 for one in found),
        "equal": sum(gap <= 1e-6 for gap in gaps),
    }
