"""Lengths of the Aegaeon artifact's synthetic workloads (ShareGPT conversations), and Poisson arrivals to go with them.

Synthetic: to stand beside the published settings, no evidence of how traffic arrives.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ops.simulator.traces.columns import one_model
from ops.simulator.traces.draws import poisson, stream
from ops.simulator.types import Trace
from subjects.errors import ConfigError

CELL_S = 600.0
"""Arrivals are drawn anew in each cell (a Poisson process may be), so that a window is drawn without what is before it."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthPool:
    """Distinct (input, output) token pairs and how often each occurs."""

    input_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    count: npt.NDArray[np.int64]

    def draw(
        self, random: np.random.Generator, requests: int, input_tokens_max: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Pairs, each as likely as it is frequent; inputs are capped."""
        cumulated = np.cumsum(self.count)
        picked = np.searchsorted(cumulated, np.floor(random.random(requests) * cumulated[-1]), side="right")
        return np.minimum(self.input_tokens[picked], input_tokens_max), self.output_tokens[picked]


def packaged() -> LengthPool:
    """The pool of the package's data: all files with unscaled lengths."""
    with resources.files("ops.simulator").joinpath("data/aegaeon-lengths.npz").open("rb") as file, np.load(file) as data:
        return LengthPool(
            data["input_tokens"].astype(np.int32), data["output_tokens"].astype(np.int32), data["count"].astype(np.int64)
        )


def arrays(pool: LengthPool) -> dict[str, npt.NDArray[Any]]:
    """For the package's data file."""
    return {
        "input_tokens": pool.input_tokens.astype(np.int32),
        "output_tokens": pool.output_tokens.astype(np.int32),
        "count": pool.count.astype(np.int32),
    }


def poisson_trace(
    pool: LengthPool,
    seed: int,
    name: str,
    rate_rps: float,
    begin_s: float,
    end_s: float,
    *,
    model: int,
    input_tokens_max: int,
) -> Trace:
    """One model's requests of ``[begin_s, end_s)``."""
    arrivals: list[npt.NDArray[np.float64]] = []
    inputs: list[npt.NDArray[np.int32]] = []
    outputs: list[npt.NDArray[np.int32]] = []
    for cell in range(int(begin_s // CELL_S), int(-(-end_s // CELL_S))):
        start_s = cell * CELL_S
        times = poisson(stream(seed, "aegaeon", name, cell), rate_rps, CELL_S, end_s - start_s)
        drawn = pool.draw(stream(seed, "aegaeon-lengths", name, cell), len(times), input_tokens_max)
        kept = times >= begin_s - start_s
        arrivals.append(start_s + times[kept])
        inputs.append(drawn[0][kept])
        outputs.append(drawn[1][kept])
    empty = np.zeros(0, dtype=np.int32)
    return one_model(
        np.concatenate([np.zeros(0), *arrivals]),
        np.concatenate([empty, *inputs]),
        np.concatenate([empty, *outputs]),
        model,
    )


def read_csv(path: Path) -> tuple[tuple[str, ...], Trace]:
    """One of the artifact's files (``Request Time,Model Name,Input Length,Output Length``): the models' names and requests.

    Raises :class:`ConfigError` for rows that are none.
    """
    rows: list[tuple[float, str, int, int]] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(csv.DictReader(file), start=2):
            try:
                hours, minutes, seconds = line["Request Time"].split(":")
                at_s = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
                rows.append((at_s, line["Model Name"], int(line["Input Length"]), int(line["Output Length"])))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{path}:{number}: {error!r}") from None
    return named_rows(rows)


def named_rows(rows: Iterable[tuple[float, str, int, int]]) -> tuple[tuple[str, ...], Trace]:
    """Requests as (seconds, model's name, input, output) into columns; models are numbered in the order of their names."""
    rows = sorted(rows)
    names = tuple(sorted({name for _, name, _, _ in rows}))
    number = {name: place for place, name in enumerate(names)}
    table = np.array([(number[name], max(inputs, 1), max(outputs, 1)) for _, name, inputs, outputs in rows], dtype=np.int32)
    table = table.reshape(-1, 3)
    return names, Trace(
        arrival_s=np.array([at_s for at_s, _, _, _ in rows], dtype=np.float64),
        model=table[:, 0].astype(np.int16),
        input_tokens=table[:, 1].copy(),
        output_tokens=table[:, 2].copy(),
    )
