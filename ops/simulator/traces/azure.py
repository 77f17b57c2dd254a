"""Azure LLM inference trace 2023: two services (code, conversation) over the same hour, one row per request."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ops.simulator.traces.columns import one_model, text
from ops.simulator.traces.limits import SPAN_S_MAX, csv_rows, tokens
from ops.simulator.types import Trace
from subjects.errors import ConfigError

CLOCK_START = datetime(2023, 11, 16, 18, 15)
"""Second 0 of the packaged traces: a little before the first request of either service."""
SERVICES = ("code", "conv")
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
TICKS_PER_S = 10_000_000
_INSTANT = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII)


@dataclass(frozen=True, slots=True, eq=False)
class AzureService:
    """Requests of one service. ``tick`` counts 100 ns since ``CLOCK_START`` (or since the first row of a user's file)."""

    tick: npt.NDArray[np.int64]
    input_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]

    def trace(self, model: int = 0) -> Trace:
        """As requests of model number ``model``, seconds on the services' shared clock."""
        return one_model(self.tick / 1e7, self.input_tokens, self.output_tokens, model)


def packaged() -> dict[str, AzureService]:
    """Both services by name."""
    with resources.files("ops.simulator").joinpath("data/azure-2023.npz").open("rb") as file, np.load(file) as data:
        return {
            name: AzureService(
                tick=np.cumsum(data[f"{name}/tick_steps"], dtype=np.int64),
                input_tokens=data[f"{name}/input_tokens"].astype(np.int32),
                output_tokens=data[f"{name}/output_tokens"].astype(np.int32),
            )
            for name in SERVICES
        }


def read_csv(path: Path, start: datetime | None = None) -> AzureService:
    """The source's CSV (``TIMESTAMP,ContextTokens,GeneratedTokens``), gzipped or not, of any of its years.

    Second 0 is ``start``, or the first row. Raises :class:`ConfigError` for rows that are none, that are not in order of
    time or that are in several time zones, and for a file without any.
    """
    ticks: list[int] = []
    counts: list[tuple[int, int]] = []
    zone = None
    with text(path) as file:
        rows = csv_rows(path, csv.reader(file))
        _, header = next(rows, (0, []))
        if [name.strip().lower() for name in header] != [name.lower() for name in COLUMNS]:
            raise ConfigError(f"{path}:1: want the columns {', '.join(COLUMNS)}; write that line first")
        for number, line in rows:
            where = f"{path}:{number}"
            if len(line) != len(COLUMNS):
                raise ConfigError(f"{where}: {len(line)} columns where {', '.join(COLUMNS)} should be; correct this line")
            when, digits, own_zone = _instant(where, line[0])
            start, zone = start or when, own_zone if zone is None else zone
            if own_zone != zone:
                raise ConfigError(
                    f"{where}: TIMESTAMP: its time zone is not that of the rows before; write all in the same one"
                )
            tick = round((when - start).total_seconds()) * TICKS_PER_S + digits
            if ticks and tick < ticks[-1]:
                raise ConfigError(f"{where}: TIMESTAMP: is before that of the row before; sort the rows by time")
            if ticks and tick - ticks[0] > SPAN_S_MAX * TICKS_PER_S:
                raise ConfigError(
                    f"{where}: TIMESTAMP: is over {SPAN_S_MAX // 86_400} days after the first row; cut the file"
                )
            ticks.append(tick)
            counts.append((tokens(where, COLUMNS[1], line[1]), tokens(where, COLUMNS[2], line[2])))
    if not ticks:
        raise ConfigError(f"{path}: no request in it; add rows below the column names")
    table = np.array(counts, dtype=np.int32).reshape(-1, 2)
    return AzureService(np.array(ticks, dtype=np.int64), table[:, 0], table[:, 1])


def _instant(where: str, text: str) -> tuple[datetime, int, str]:
    """Whole seconds, the rest in 100 ns, and the offset from UTC as it is written."""
    try:
        if (found := _INSTANT.fullmatch(text.strip())) is None:
            raise ValueError
        return datetime.fromisoformat(found[1]), int((found[2] or "").ljust(7, "0")[:7]), found[3] or ""
    except ValueError:
        raise ConfigError(
            f"{where}: TIMESTAMP: {text[:40]!r} is no time; write one such as 2023-11-16 18:17:03.9799600"
        ) from None
