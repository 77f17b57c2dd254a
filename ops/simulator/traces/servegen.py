"""ServeGen: production traffic of Alibaba Cloud Model Studio as clients, rates and length distributions (not a request log).

Per client and ten-minute cell the source gives the arrival rate, the CV of the inter-arrival times and the family that
fits them; per client and six-hour span the distribution of token counts. Requests are drawn from these: within a cell a
client is a renewal process in equilibrium with that rate, CV (capped) and family. The published parameters of a Weibull fit
often miss the published rate and CV (by a factor of 0.3 to 3), so its shape and scale follow from CV and rate here, as is
exact for the gamma fits.

Scaling a rate keeps the CV: fewer requests arrive as unevenly, which is the source's own way of scaling and harder to serve
than a thinned stream.
"""

from __future__ import annotations

import ast
import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ops.simulator.traces.columns import merge, one_model
from ops.simulator.traces.draws import FAMILIES, GAMMA, WEIBULL, lengths, renewals, stream
from ops.simulator.traces.limits import RATE_RPS_MAX, TOKENS_MAX
from ops.simulator.types import Trace
from subjects.errors import ConfigError

CELL_S = 600
LENGTHS_S = 21_600
DAY_S = 86_400
CV_MAX = 4.0
INPUT_TOKENS_MAX = 16_384
MODELS = ("m-small", "m-mid", "mm-image", "deepseek-r1", "m-large")
INPUT_FIELDS = ("input_tokens", "text_tokens", "image_tokens", "audio_tokens", "video_tokens")
"""A request's input is the sum of those that the model has."""
QUANTILES = 100


@dataclass(frozen=True, slots=True, eq=False)
class ServeGenModel:
    """One model of the source. Cells are sorted by (cell, client), length rows by (span, client)."""

    name: str
    client: npt.NDArray[np.int32]
    cell: npt.NDArray[np.int32]
    rate_rps: npt.NDArray[np.float64]
    cv: npt.NDArray[np.float64]
    family: npt.NDArray[np.int8]
    lengths_client: npt.NDArray[np.int32]
    lengths_span: npt.NDArray[np.int32]
    inputs: tuple[npt.NDArray[np.int32], ...]
    """Per input field [row, quantile]."""
    outputs: npt.NDArray[np.int32]
    _pools: dict[int, tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]] = field(default_factory=dict)

    def total_rps(self, cells: int) -> npt.NDArray[np.float64]:
        """Rate of all clients together in the cells from 0."""
        return np.bincount(self.cell, weights=self.rate_rps, minlength=cells)[:cells].astype(np.float64)

    def sample(
        self,
        seed: int,
        begin_s: float,
        end_s: float,
        *,
        scale: float = 1.0,
        model: int = 0,
        input_tokens_max: int = INPUT_TOKENS_MAX,
        cv_max: float = CV_MAX,
    ) -> Trace:
        """The requests of ``[begin_s, end_s)`` at ``scale`` times the source's rates, as model number ``model``.

        The same seed and scale give the same requests whatever the ends are.
        """
        first, last = np.searchsorted(self.cell, (int(begin_s // CELL_S), int(-(-end_s // CELL_S))), side="left")
        arrivals: list[npt.NDArray[np.float64]] = []
        inputs: list[npt.NDArray[np.int32]] = []
        outputs: list[npt.NDArray[np.int32]] = []
        for row in range(int(first), int(last)):
            cell, client = int(self.cell[row]), int(self.client[row])
            start_s = float(cell * CELL_S)
            times = renewals(
                stream(seed, "servegen", self.name, client, cell),
                int(self.family[row]),
                min(float(self.cv[row]), cv_max),
                float(self.rate_rps[row]) * scale,
                CELL_S,
                end_s - start_s,
            )
            if len(times) == 0:
                continue
            drawn = self._lengths(stream(seed, "servegen-lengths", self.name, client, cell), client, cell, len(times))
            kept = times >= begin_s - start_s
            arrivals.append(start_s + times[kept])
            inputs.append(np.minimum(drawn[0][kept], input_tokens_max))
            outputs.append(drawn[1][kept])
        if not arrivals:
            return merge([])
        return one_model(np.concatenate(arrivals), np.concatenate(inputs), np.concatenate(outputs), model)

    def _lengths(
        self, random: np.random.Generator, client: int, cell: int, count: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Input and output tokens; a client without lengths of its own draws another of the model's for each request."""
        uniform = random.random((count, 2 + len(self.inputs)))
        span = cell * CELL_S // LENGTHS_S
        own = np.flatnonzero((self.lengths_client == client) & (self.lengths_span == span))
        if len(own):
            rows = np.full(count, own[0])
        else:
            pool, cumulated = self._pool(span)
            picked = np.searchsorted(cumulated, uniform[:, 0] * cumulated[-1], side="right")
            rows = pool[np.minimum(picked, len(pool) - 1)]
        total = np.zeros(count, dtype=np.int32)
        for place, quantiles in enumerate(self.inputs):
            total += lengths(quantiles, rows, uniform[:, 2 + place])
        return total, lengths(self.outputs, rows, uniform[:, 1])

    def _pool(self, span: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """Length rows of a six-hour span and the cumulated rates of their clients in it: what a request of unknown lengths
        most likely looks like. A span without any rows takes the nearest one that has some."""
        if span not in self._pools:
            spans = sorted(set(self.lengths_span.tolist()), key=lambda other: (abs(other - span), other))
            for other in spans:
                rows = np.flatnonzero(self.lengths_span == other)
                inside = self.cell * CELL_S // LENGTHS_S == other
                clients = int(max(self.client.max(), self.lengths_client.max())) + 1
                rates = np.bincount(self.client[inside], weights=self.rate_rps[inside], minlength=clients)
                cumulated = np.cumsum(rates[self.lengths_client[rows]])
                if len(rows) and cumulated[-1] > 0:
                    self._pools[span] = (rows, cumulated.astype(np.float64))
                    break
            else:
                raise ConfigError(f"{self.name}: no client has token counts")
        return self._pools[span]


def packaged(names: Iterable[str] = MODELS) -> dict[str, ServeGenModel]:
    """Day 0 of the models, from the package's data."""
    with resources.files("ops.simulator").joinpath("data/servegen-day0.npz").open("rb") as file, np.load(file) as data:
        return {name: _unpacked(name, data) for name in names}


def _unpacked(name: str, data: Mapping[str, npt.NDArray[Any]]) -> ServeGenModel:
    def quantiles(key: str) -> npt.NDArray[np.int32]:
        return np.cumsum(data[f"{name}/{key}"], axis=1, dtype=np.int32)

    fields = [key for place in range(len(INPUT_FIELDS)) if f"{name}/{(key := f'inputs{place}')}" in data]
    return ServeGenModel(
        name=name,
        client=data[f"{name}/client"].astype(np.int32),
        cell=data[f"{name}/cell"].astype(np.int32),
        rate_rps=data[f"{name}/rate_rps"].astype(np.float64),
        cv=data[f"{name}/cv"].astype(np.float64),
        family=data[f"{name}/family"],
        lengths_client=data[f"{name}/lengths_client"].astype(np.int32),
        lengths_span=data[f"{name}/lengths_span"].astype(np.int32),
        inputs=tuple(quantiles(key) for key in fields),
        outputs=quantiles("outputs"),
    )


# ------------------------------------------------------------------------------------------------------- a user's files


@dataclass(frozen=True, slots=True)
class _Cell:
    client: int
    cell: int
    rate_rps: float
    cv: float
    family: int


@dataclass(frozen=True, slots=True)
class _Row:
    client: int
    span: int
    inputs: dict[str, list[int]]
    outputs: list[int]


def read_directory(directory: Path, until_s: float = DAY_S) -> ServeGenModel:
    """One model in the source's own layout: ``chunk-<client>-trace.csv`` and ``chunk-<client>-dataset.json``.

    Raises :class:`ConfigError` for a directory without them and for rows that cannot be read.
    """
    cells: list[_Cell] = []
    rows: list[_Row] = []
    for path in sorted(directory.glob("chunk-*-trace.csv")):
        client = int(path.name.split("-")[1])
        with path.open(encoding="utf-8") as file:
            cells.extend(_cells(path, client, csv.reader(file), until_s))
        dataset = path.with_name(path.name.replace("-trace.csv", "-dataset.json"))
        if dataset.exists():
            rows.extend(_dataset_rows(client, json.loads(dataset.read_bytes()), until_s))
    if not cells:
        raise ConfigError(f"{directory}: a directory without a chunk-*-trace.csv with a rate above 0; name a file")
    return build(directory.name, cells, rows)


def _cells(path: Path, client: int, lines: Iterable[list[str]], until_s: float) -> Iterator[_Cell]:
    for number, line in enumerate(lines, start=1):
        try:
            start_s, rate, cv, family = float(line[0]), float(line[1]), float(line[2] or 1), line[3].strip().lower()
        except (IndexError, ValueError) as error:
            raise ConfigError(f"{path}:{number}: want start,rate,cv,family,...: {error}; correct this line") from None
        for name, value, most in (("start", start_s, math.inf), ("rate", rate, RATE_RPS_MAX), ("cv", cv, math.inf)):
            if not (math.isfinite(value) and 0 <= value <= most):
                raise ConfigError(f"{path}:{number}: {name}: {value} is not from 0 to {most}; correct this line")
        if start_s < until_s and rate > 0:
            yield _Cell(client, int(start_s // CELL_S), rate, cv, WEIBULL if family == FAMILIES[WEIBULL] else GAMMA)


def _dataset_rows(client: int, dataset: dict[str, dict[str, Any]], until_s: float) -> Iterator[_Row]:
    for start, fields in dataset.items():
        if float(start) >= until_s:
            continue
        inputs = {name: _quantiles(fields[name]) for name in INPUT_FIELDS if fields.get(name)}
        if inputs and fields.get("output_tokens"):
            yield _Row(client, int(float(start) // LENGTHS_S), inputs, _quantiles(fields["output_tokens"]))


def _quantiles(distribution: str | dict[Any, float]) -> list[int]:
    """Mid-point quantiles of ``{value: probability}``, which the source writes as text inside its JSON."""
    pairs = ast.literal_eval(distribution) if isinstance(distribution, str) else distribution
    ordered = sorted((float(value), float(weight)) for value, weight in pairs.items())
    values = np.array([value for value, _ in ordered])
    cumulated = np.cumsum([weight for _, weight in ordered])
    if not pairs or not np.isfinite(cumulated[-1]) or not 0 <= values[0] <= values[-1] <= TOKENS_MAX:
        raise ValueError(f"a distribution of tokens that are not from 0 to {TOKENS_MAX}, or without any")
    places = (np.arange(QUANTILES) + 0.5) / QUANTILES * cumulated[-1]
    found = values[np.minimum(np.searchsorted(cumulated, places), len(values) - 1)]
    return [int(value) for value in np.rint(found)]


def build(name: str, cells: Iterable[_Cell], rows: Iterable[_Row]) -> ServeGenModel:
    """Sorts and keeps the input fields that are not zero everywhere."""
    cells = sorted(cells, key=lambda one: (one.cell, one.client))
    rows = sorted(rows, key=lambda one: (one.span, one.client))
    fields = [key for key in INPUT_FIELDS if any(any(row.inputs.get(key, ())) for row in rows)]
    return ServeGenModel(
        name=name,
        client=np.array([one.client for one in cells], dtype=np.int32),
        cell=np.array([one.cell for one in cells], dtype=np.int32),
        rate_rps=np.array([one.rate_rps for one in cells]),
        cv=np.array([one.cv for one in cells]),
        family=np.array([one.family for one in cells], dtype=np.int8),
        lengths_client=np.array([row.client for row in rows], dtype=np.int32),
        lengths_span=np.array([row.span for row in rows], dtype=np.int32),
        inputs=tuple(
            np.array([row.inputs.get(key, [0] * QUANTILES) for row in rows], dtype=np.int32).reshape(-1, QUANTILES)
            for key in fields
        ),
        outputs=np.array([row.outputs for row in rows], dtype=np.int32).reshape(-1, QUANTILES),
    )
