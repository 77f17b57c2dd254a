"""The same placement problem as ``packing``, solved to a proven gap as a mixed integer program: for small pools.

Each device gets exactly one *pattern*: how many replicas of which models it holds. What a replica carries depends on its
neighbours only, so it is a constant of the pattern, and everything else is linear: replicas that span devices tie the
patterns of their devices together, and carry what the slowest of them allows. Memory that a pattern leaves free is KV to be
shared out.

Stops by gap or by nodes, never by time, with one thread and a fixed seed: the same problem gives the same answer everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from broker.core.plan.layout import Layout, Score
from broker.core.plan.problem import Block, Problem
from broker.core.plan.sharing import served_share, share_of_time

PATTERNS_MAX = 400
"""Patterns per device beyond which a pool counts as too big to be solved exactly."""
GROUPS_MAX = 80
SEED = 1
KV_UNIT_BYTES = 1e9
"""Memory is counted in these, so that all numbers of the program are of one order."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The best layout found, and what no layout can be better than.

    ``worth`` and ``bound`` are in the units of ``Score.total``. ``score`` may be a little worse than ``worth``: it shares
    out free memory by what models want, the program in the best way; and of a replica over several shared devices the
    program takes only the slowest into account (``sharing.share_of_all`` takes a little more off).
    """

    blocks: tuple[Block, ...]
    score: Score
    worth: float
    bound: float
    nodes: int

    @property
    def gap(self) -> float:
        """By how much of the layout's worth it might be improved at most."""
        return max(0.0, self.worth - self.bound) / max(1e-9, abs(self.worth))


def solve(problem: Problem, *, gap: float = 1e-6, nodes_max: int = 20_000) -> Solution | None:
    """The best layout, or None where the pool is too big for this.

    Blocks that are there count as kept where the new layout has a replica of that model on the same devices; those that stay
    are kept.
    """
    patterns = [list(_patterns(problem, site)) for site in range(len(problem.sites))]
    if any(len(found) > PATTERNS_MAX for found in patterns):
        return None
    groups = _groups(problem)
    if groups is None:
        return None
    model = _Program(problem, patterns, groups)
    return model.solve(gap, nodes_max)


Pattern = tuple[int, ...]
"""Replicas (or parts of them) of each model on one device."""


def _patterns(problem: Problem, site: int) -> Iterator[Pattern]:
    """What one device can hold, nothing first."""
    place = problem.sites[site]
    counts = [0] * len(problem.needs)

    def extend(need: int, free_bytes: int, residents: int) -> Iterator[Pattern]:
        if need == len(problem.needs):
            yield tuple(counts)
            return
        wanted = problem.needs[need]
        most = 0 if place.kind not in wanted.rates else min(1, residents, wanted.replicas_max)
        for count in range(most + 1):
            if count * wanted.bytes_min > free_bytes:
                break
            counts[need] = count
            if not count or _tolerated(problem, counts, need):
                yield from extend(need + 1, free_bytes - count * wanted.bytes_min, residents - count)
        counts[need] = 0

    yield from extend(0, place.memory_bytes, place.residents_max)


def _tolerated(problem: Problem, counts: list[int], need: int) -> bool:
    wanted = problem.needs[need]
    others = [problem.needs[other] for other in range(need) if counts[other]]
    return all(other.tenant == wanted.tenant and other.co_locates and wanted.co_locates for other in others)


def _groups(problem: Problem) -> list[tuple[int, tuple[int, ...]]] | None:
    """Where replicas that span devices can be, or None when there are too many places."""
    found: list[tuple[int, tuple[int, ...]]] = []
    members: dict[str, list[int]] = {}
    for site, place in enumerate(problem.sites):
        if place.group:
            members.setdefault(place.group, []).append(site)
    for need, wanted in enumerate(problem.needs):
        if wanted.gpus == 1:
            continue
        for name in sorted(members):
            fit = [site for site in members[name] if problem.sites[site].kind in wanted.rates]
            if math.comb(len(fit), wanted.gpus) > GROUPS_MAX:
                return None
            found.extend((need, group) for group in combinations(fit, wanted.gpus))
    return found


class _Program:
    """The program in columns and rows, as HiGHS takes it."""

    def __init__(self, problem: Problem, patterns: list[list[Pattern]], groups: list[tuple[int, tuple[int, ...]]]) -> None:
        self.problem = problem
        self.patterns = patterns
        self.groups = groups
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.lower: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[tuple[float, float, dict[int, float]]] = []
        self.at = [[self._column(self._price(pattern), 1.0, True) for pattern in found] for found in patterns]
        self.span = [self._column(0.0, 1.0, True) for _ in groups]
        self.carried = [self._column(0.0, math.inf, False) for _ in groups]
        self.lack = [self._column(need.value, 1.0, False) for need in problem.needs]
        self._devices()
        self._spans()
        self._loads()
        self._kept()

    def _column(self, cost: float, upper: float, whole: bool, lower: float = 0.0) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.lower.append(lower)
        self.whole.append(whole)
        return len(self.cost) - 1

    def _price(self, pattern: Pattern) -> float:
        prices = self.problem.prices
        return prices.device * any(pattern) + prices.block * sum(pattern)

    def _devices(self) -> None:
        for columns in self.at:
            self.rows.append((1.0, 1.0, dict.fromkeys(columns, 1.0)))

    def _share(self, need: int, pattern: Pattern) -> float:
        others = [self.problem.needs[o].usage for o, count in enumerate(pattern) for _ in range(count - (o == need))]
        return share_of_time(others)

    def _carries(self, need: int, site: int, pattern: Pattern) -> float:
        """What one replica carries on one of its devices."""
        wanted = self.problem.needs[need]
        share = self._share(need, pattern)
        rate = wanted.rates.get(self.problem.sites[site].kind, 0.0)
        return max(0.0, rate * share - wanted.standing) * served_share(share, wanted.share_min)

    def _spans(self) -> None:
        """A replica over several devices is in the pattern of each, and is as fast as the slowest."""
        for site, columns in enumerate(self.at):
            for need, wanted in enumerate(self.problem.needs):
                if wanted.gpus == 1:
                    continue
                row = {column: float(self.patterns[site][q][need]) for q, column in enumerate(columns)}
                for index, (owner, group) in enumerate(self.groups):
                    if owner == need and site in group:
                        row[self.span[index]] = -1.0
                self.rows.append((0.0, 0.0, row))
        for index, (need, group) in enumerate(self.groups):
            wanted = self.problem.needs[need]
            best = max(wanted.rates.values())
            self.rows.append((-math.inf, 0.0, {self.carried[index]: 1.0, self.span[index]: -best}))
            for site in group:
                row = {self.carried[index]: 1.0}
                for q, column in enumerate(self.at[site]):
                    if self.patterns[site][q][need]:
                        row[column] = -self._carries(need, site, self.patterns[site][q])
                self.rows.append((-math.inf, 0.0, row))

    def _loads(self) -> None:
        infinite = math.inf
        kv: dict[int, dict[int, float]] = {need: {} for need, wanted in enumerate(self.problem.needs) if wanted.kv_bytes > 0}
        for site, columns in enumerate(self.at):
            free = {}
            for need in kv:
                column = self._column(0.0, infinite, False)
                kv[need][column] = 1.0
                free[column] = 1.0
                present = {c: -self._free(site, q) for q, c in enumerate(columns) if self.patterns[site][q][need]}
                self.rows.append((-infinite, 0.0, {column: 1.0, **present}))
            if free:
                room = {column: -self._free(site, q) for q, column in enumerate(columns)}
                self.rows.append((-infinite, 0.0, {**free, **room}))
        for need, wanted in enumerate(self.problem.needs):
            if wanted.load > 0:
                row = {self.lack[need]: wanted.load, **self._carried_by(need)}
                self.rows.append((wanted.load, infinite, row))
            seats = max(wanted.replicas_min, wanted.replicas_wanted)
            if seats:
                row = {self.lack[need]: float(seats), **self._replicas(need)}
                self.rows.append((float(seats), infinite, row))
            if wanted.replicas_max < len(self.problem.sites) * 8:
                self.rows.append((-infinite, float(wanted.replicas_max), self._replicas(need)))
            if need in kv:
                kv_units = wanted.kv_bytes / KV_UNIT_BYTES
                self.rows.append((kv_units, infinite, {self.lack[need]: kv_units, **kv[need]}))

    def _free(self, site: int, q: int) -> float:
        used = sum(count * self.problem.needs[need].bytes_min for need, count in enumerate(self.patterns[site][q]))
        return (self.problem.sites[site].memory_bytes - used) / KV_UNIT_BYTES

    def _carried_by(self, need: int) -> dict[int, float]:
        wanted = self.problem.needs[need]
        if wanted.gpus > 1:
            return {self.carried[index]: 1.0 for index, (owner, _) in enumerate(self.groups) if owner == need}
        row = {}
        for site, columns in enumerate(self.at):
            for q, column in enumerate(columns):
                count = self.patterns[site][q][need]
                if count:
                    row[column] = count * self._carries(need, site, self.patterns[site][q])
        return row

    def _replicas(self, need: int) -> dict[int, float]:
        if self.problem.needs[need].gpus > 1:
            return {self.span[index]: 1.0 for index, (owner, _) in enumerate(self.groups) if owner == need}
        return {
            column: float(self.patterns[site][q][need])
            for site, columns in enumerate(self.at)
            for q, column in enumerate(columns)
            if self.patterns[site][q][need]
        }

    def _kept(self) -> None:
        """Replicas cost their load, but those that are there already and are kept cost nothing."""
        price = self.problem.prices.load
        there: dict[tuple[int, tuple[int, ...]], int] = {}
        pinned: dict[tuple[int, tuple[int, ...]], int] = {}
        for block in self.problem.placed:
            key = (block.need, tuple(sorted(block.sites)))
            there[key] = there.get(key, 0) + 1
            pinned[key] = pinned.get(key, 0) + block.stays
        spanning = {key: self.span[index] for index, key in enumerate(self.groups)}
        for need, wanted in enumerate(self.problem.needs):
            for column, count in self._replicas(need).items():
                self.cost[column] += count * wanted.load_s * wanted.gpus * price
        for key in sorted(there):
            need, sites = key
            if self.problem.needs[need].gpus > 1:
                row = {spanning[key]: -1.0}
            else:
                row = {c: -float(self.patterns[sites[0]][q][need]) for q, c in enumerate(self.at[sites[0]])}
            saved = -self.problem.needs[need].load_s * self.problem.needs[need].gpus * price
            kept = self._column(saved, float(there[key]), False, lower=float(pinned[key]))
            self.rows.append((-math.inf, 0.0, {kept: 1.0, **row}))

    def solve(self, gap: float, nodes_max: int) -> Solution | None:
        """Runs HiGHS; None when there is no layout at all (blocks that stay where they do not fit)."""
        import highspy
        import numpy as np

        highs: Any = highspy.Highs()
        options: dict[str, Any] = {
            "output_flag": False,
            "threads": 1,
            "parallel": "off",
            "random_seed": SEED,
            "mip_rel_gap": gap,
            "mip_abs_gap": 1e-7,
            "mip_max_nodes": nodes_max,
        }
        for name, value in options.items():
            highs.setOptionValue(name, value)
        program = highspy.HighsLp()
        program.num_col_ = len(self.cost)
        program.num_row_ = len(self.rows)
        program.col_cost_ = np.array(self.cost)
        program.col_lower_ = np.array(self.lower)
        program.col_upper_ = np.array(self.upper)
        program.row_lower_ = np.array([row[0] for row in self.rows])
        program.row_upper_ = np.array([row[1] for row in self.rows])
        program.integrality_ = [highspy.HighsVarType.kInteger if w else highspy.HighsVarType.kContinuous for w in self.whole]
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        starts = np.cumsum([0, *(len(row[2]) for row in self.rows)])
        program.a_matrix_.start_ = starts.astype(np.int32)
        program.a_matrix_.index_ = np.array([c for row in self.rows for c in row[2]], dtype=np.int32)
        program.a_matrix_.value_ = np.array([v for row in self.rows for v in row[2].values()])
        highs.passModel(program)
        highs.run()
        info = highs.getInfo()
        if info.primal_solution_status != 2:  # 2: a feasible point is there.
            return None
        values = list(highs.getSolution().col_value)
        return self._read(values, float(info.objective_function_value), float(info.mip_dual_bound), int(info.mip_node_count))

    def _read(self, values: list[float], worth: float, bound: float, nodes: int) -> Solution:
        old: dict[tuple[int, tuple[int, ...]], list[Block]] = {}
        for block in self.problem.placed:
            old.setdefault((block.need, tuple(sorted(block.sites))), []).append(block)
        blocks: list[Block] = []

        def place(need: int, sites: tuple[int, ...]) -> None:
            kept = old.get((need, sites))
            blocks.append(kept.pop(0) if kept else Block(need, sites))

        for site, columns in enumerate(self.at):
            q = max(range(len(columns)), key=lambda index: (values[columns[index]], -index))
            for need, count in enumerate(self.patterns[site][q]):
                if self.problem.needs[need].gpus == 1:
                    for _ in range(count):
                        place(need, (site,))
        for index, (need, group) in enumerate(self.groups):
            if values[self.span[index]] > 0.5:
                place(need, tuple(sorted(group)))
        layout = Layout(self.problem, blocks)
        return Solution(tuple(blocks), layout.score(), worth, bound, nodes)
