"""Random streams by name, and draws that are equal on every machine.

A library's gamma or Weibull draw goes through ``log`` and ``pow``, whose last bit differs between processors; one bit can
reorder two events and change everything after. Here a draw is a uniform number from PCG64 (exact), a place in a stored table
of quantiles, and a linear step between two entries, each operation rounded as IEEE 754 says.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from importlib import resources

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

GAMMA, WEIBULL = 0, 1
FAMILIES = ("gamma", "weibull")

TABLE_OCTAVES = 20
TABLE_STEPS = 12
"""Entries per halving of the upper tail."""


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """The random stream of this seed and these names; any two differ in all their draws."""
    words = [seed & 0xFFFF_FFFF_FFFF_FFFF, *(name if isinstance(name, int) else _word(name) for name in names)]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))


@functools.cache
def _word(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


@dataclass(frozen=True, slots=True)
class ArrivalTables:
    """Quantiles of inter-arrival times with mean 1, by family and coefficient of variation (CV).

    Entry ``j`` of a row is the quantile whose upper tail ``v`` has ``-log2(v)``-like position ``j / TABLE_STEPS`` (linear
    within each halving of ``v``), so that tails are as fine as the middle.
    """

    cv: Floats
    """Ascending, one per row."""
    gaps: npt.NDArray[np.float32]
    """[family, row, entry]: times between two arrivals."""
    spans: npt.NDArray[np.float32]
    """[family, row, entry]: the gap that a fixed instant falls into, which is a longer one (mean ``1 + cv**2``)."""


@functools.cache
def arrival_tables() -> ArrivalTables:
    """The package's own, made by ``traces.pack``."""
    with resources.files("ops.simulator").joinpath("data/arrival-tables.npz").open("rb") as file, np.load(file) as data:
        return ArrivalTables(cv=data["cv"].astype(np.float64), gaps=data["gaps"], spans=data["spans"])


def _row(table: npt.NDArray[np.float32], grid: Floats, cv: float) -> Floats:
    """The quantiles for this CV, between two rows of the grid."""
    bounded = min(max(cv, float(grid[0])), float(grid[-1]))
    upper = min(max(int(np.searchsorted(grid, bounded)), 1), len(grid) - 1)
    share = (bounded - float(grid[upper - 1])) / (float(grid[upper]) - float(grid[upper - 1]))
    below = table[upper - 1].astype(np.float64)
    row: Floats = below + (table[upper].astype(np.float64) - below) * share
    return row


def from_quantiles(row: Floats, uniform: Floats) -> Floats:
    """Turns uniform numbers in [0, 1) into draws from a row of :class:`ArrivalTables`."""
    mantissa, exponent = np.frexp(1.0 - uniform)
    place = (2.0 * (1.0 - mantissa) - exponent) * TABLE_STEPS
    place = np.minimum(place, TABLE_OCTAVES * TABLE_STEPS)
    index = np.minimum(place.astype(np.int64), TABLE_OCTAVES * TABLE_STEPS - 1)
    low = row[index]
    drawn: Floats = low + (row[index + 1] - low) * (place - index)
    return drawn


def renewals(random: np.random.Generator, family: int, cv: float, rate: float, span_s: float, until_s: float) -> Floats:
    """Arrivals in ``[0, min(span_s, until_s))`` at ``rate`` per second with gaps of ``family`` and CV.

    The process is in equilibrium at 0 (the first arrival is a uniform part of a longer gap), so that the expected count is
    ``rate * span_s`` for any CV; a process that began anew in each cell would add ``(cv**2 - 1) / 2`` requests to each.
    The draws up to an instant do not depend on ``until_s``.
    """
    end_s = min(span_s, until_s)
    if rate <= 0.0 or end_s <= 0.0:
        return np.zeros(0)
    tables = arrival_tables()
    first = random.random(2)
    span_row = _row(tables.spans[family], tables.cv, cv)
    arrived = float(first[0]) * float(from_quantiles(span_row, first[1:])[0]) / rate
    if arrived >= end_s:
        return np.zeros(0)
    gap_row = _row(tables.gaps[family], tables.cv, cv)
    parts = [np.array([arrived])]
    while arrived < end_s:
        expected = (end_s - arrived) * rate
        gaps = from_quantiles(gap_row, random.random(int(expected * 1.1) + 32)) / rate
        gaps[0] += arrived
        times = np.cumsum(gaps)
        arrived = float(times[-1])
        parts.append(times)
    joined: Floats = np.concatenate(parts)
    return joined[: int(np.searchsorted(joined, end_s, side="left"))]


def poisson(random: np.random.Generator, rate: float, span_s: float, until_s: float | None = None) -> Floats:
    """Poisson arrivals in ``[0, min(span_s, until_s))``."""
    return renewals(random, GAMMA, 1.0, rate, span_s, span_s if until_s is None else until_s)


def lengths(quantiles: npt.NDArray[np.int32], rows: npt.NDArray[np.intp], uniform: Floats) -> Ints:
    """Token counts: for each request a draw from its row of mid-point quantiles (0.5 %, 1.5 %, ... 99.5 % for 100 columns).

    Between two mid-points it is linear; below the first and above the last it stays there, so a sampled maximum never
    exceeds the source's last quantile.
    """
    columns = quantiles.shape[1]
    place = np.clip(uniform * columns - 0.5, 0.0, columns - 1.0)
    index = np.minimum(place.astype(np.int64), columns - 2)
    low = quantiles[rows, index].astype(np.float64)
    high = quantiles[rows, index + 1].astype(np.float64)
    drawn: Ints = np.floor(low + (high - low) * (place - index) + 0.5).astype(np.int32)
    return drawn
