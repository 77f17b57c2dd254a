"""Azure LLM inference trace 2023: two services (code, conversation) over the same hour, one row per request."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ops.simulator.traces.columns import one_model, text
from ops.simulator.types import Trace
from subjects.errors import ConfigError

CLOCK_START = datetime(2023, 11, 16, 18, 15)
"""Second 0 of the packaged traces: a little before the first request of either service."""
SERVICES = ("code", "conv")


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


def arrays(name: str, service: AzureService) -> dict[str, npt.NDArray[Any]]:
    """For the package's data file."""
    return {
        f"{name}/tick_steps": np.diff(service.tick, prepend=0),
        f"{name}/input_tokens": service.input_tokens,
        f"{name}/output_tokens": service.output_tokens,
    }


def read_csv(path: Path, start: datetime | None = None) -> AzureService:
    """The source's CSV (``TIMESTAMP,ContextTokens,GeneratedTokens``), gzipped or not, of any of its years.

    Second 0 is ``start``, or the first row. Raises :class:`ConfigError` for rows that are none.
    """
    ticks: list[int] = []
    tokens: list[tuple[int, int]] = []
    with text(path) as file:
        reader = csv.reader(file)
        header = [name.strip().lower() for name in next(reader, [])]
        if header != ["timestamp", "contexttokens", "generatedtokens"]:
            raise ConfigError(f"{path}: want the columns TIMESTAMP, ContextTokens, GeneratedTokens")
        for number, line in enumerate(reader, start=2):
            try:
                when, digits = _instant(line[0])
                start = start or when
                ticks.append(round((when - start).total_seconds()) * 10_000_000 + digits)
                tokens.append((int(line[1]), int(line[2])))
            except (IndexError, ValueError) as error:
                raise ConfigError(f"{path}:{number}: {error}") from None
    table = np.array(tokens, dtype=np.int32).reshape(-1, 2)
    return AzureService(np.array(ticks, dtype=np.int64), table[:, 0], table[:, 1])


def _instant(text: str) -> tuple[datetime, int]:
    """Whole seconds, and the rest in 100 ns; an offset from UTC at the end is dropped (all rows carry the same)."""
    seconds, _, rest = text.strip().removesuffix("Z").split("+")[0].partition(".")
    return datetime.fromisoformat(seconds), int(rest.ljust(7, "0")[:7]) if rest else 0
