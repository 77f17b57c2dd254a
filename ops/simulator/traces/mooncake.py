"""Mooncake FAST'25 conversation trace: long conversations of one service, with the ids of their prefix blocks.

Its time stamps are quantised to some three seconds; the hour is a sample of the service's requests.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ops.simulator.traces.columns import one_model
from ops.simulator.traces.limits import milliseconds, tokens
from ops.simulator.types import Trace
from subjects.errors import ConfigError

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True, eq=False)
class Conversations:
    """Requests in order of arrival."""

    arrival_ms: npt.NDArray[np.int64]
    input_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    shared_tokens: npt.NDArray[np.int32]
    """How much of the input is a prefix that was seen before, in whole blocks: what a cache without limits would save."""

    def trace(self, model: int = 0) -> Trace:
        """As requests of model number ``model``."""
        return one_model(self.arrival_ms / 1e3, self.input_tokens, self.output_tokens, model)


def packaged() -> Conversations:
    """The first ten minutes, from the package's data."""
    with resources.files("ops.simulator").joinpath("data/mooncake-sample.npz").open("rb") as file, np.load(file) as data:
        return Conversations(
            data["arrival_ms"].astype(np.int64),
            data["input_tokens"].astype(np.int32),
            data["output_tokens"].astype(np.int32),
            data["shared_tokens"].astype(np.int32),
        )


def read_jsonl(path: Path) -> Conversations:
    """The source's JSONL (``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids``), gzipped or not.

    Raises :class:`ConfigError` for lines that are none.
    """
    seen: set[int] = set()
    rows: list[tuple[int, int, int, int]] = []
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                request = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where}: not JSON ({error}); correct this line") from None
            if not isinstance(request, dict):
                raise ConfigError(f"{where}: {type(request).__name__} where an object should be; correct this line")
            if missing := [name for name in ("timestamp", "input_length", "output_length") if name not in request]:
                raise ConfigError(f"{where}: {missing[0]}: is missing; add it or remove the request")
            at_ms = milliseconds(where, "timestamp", request["timestamp"])
            inputs = tokens(where, "input_length", request["input_length"])
            outputs = tokens(where, "output_length", request["output_length"])
            try:
                ids = [int(block) for block in request.get("hash_ids", ())]
            except (TypeError, ValueError, OverflowError):
                raise ConfigError(f"{where}: hash_ids: not a list of whole numbers; correct or remove it") from None
            shared = 0
            while shared < len(ids) and ids[shared] in seen:
                shared += 1
            seen.update(ids)
            rows.append((at_ms, inputs, outputs, min(shared * BLOCK_TOKENS, inputs)))
    if not rows:
        raise ConfigError(f"{path}: no request in it; add one JSON object per line")
    table = np.array(sorted(rows, key=lambda row: row[0]), dtype=np.int64).reshape(-1, 4)
    return Conversations(
        table[:, 0], table[:, 1].astype(np.int32), table[:, 2].astype(np.int32), table[:, 3].astype(np.int32)
    )
