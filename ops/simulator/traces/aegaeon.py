"""Lengths of the Aegaeon artifact's synthetic workloads (ShareGPT conversations), and Poisson arrivals to go with them.

Synthetic: to stand beside the published settings, no evidence of how traffic arrives.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ops.simulator.traces.columns import one_model, text
from ops.simulator.traces.draws import poisson, stream
from ops.simulator.traces.limits import SPAN_S_MAX, csv_rows, models, seconds, tokens
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


COLUMNS = ("Request Time", "Model Name", "Input Length", "Output Length")


def read_csv(path: Path) -> tuple[tuple[str, ...], Trace]:
    """One of the artifact's files (``Request Time,Model Name,Input Length,Output Length``), gzipped or not: names of
    models and requests.

    Raises :class:`ConfigError` for rows that are none, and for a file without any.
    """
    requests: list[tuple[float, str, int, int]] = []
    with text(path) as file:
        rows = csv_rows(path, csv.reader(file))
        _, header = next(rows, (0, []))
        if missing := [name for name in COLUMNS if name not in header]:
            raise ConfigError(f"{path}:1: no column {missing[0]!r}; write the columns {', '.join(COLUMNS)}")
        places = [header.index(name) for name in COLUMNS]
        for number, line in rows:
            where = f"{path}:{number}"
            if len(line) <= max(places):
                raise ConfigError(f"{where}: {len(line)} columns where {', '.join(COLUMNS)} should be; correct this line")
            at, name, inputs, outputs = (line[place] for place in places)
            requests.append((_time(where, at), name, tokens(where, COLUMNS[2], inputs), tokens(where, COLUMNS[3], outputs)))
    if not requests:
        raise ConfigError(f"{path}: no request in it; add rows below the column names")
    models(str(path), len({name for _, name, _, _ in requests}))
    return named_rows(requests)


def _time(where: str, text: str) -> float:
    try:
        hours, minutes, rest = text.split(":")
        # Each part alone: two that are out of range may not make up for each other.
        parts = [seconds(where, COLUMNS[0], float(part), SPAN_S_MAX) for part in (hours, minutes, rest)]
    except ValueError:
        raise ConfigError(f"{where}: {COLUMNS[0]}: {text[:40]!r} is no time; write one such as 00:01:00.500") from None
    return seconds(where, COLUMNS[0], parts[0] * 3600 + parts[1] * 60 + parts[2], SPAN_S_MAX)


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
