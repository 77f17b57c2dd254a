"""Makes the seven days of ``ops.simulator.week``: ``python -m tests.workloads.week ARRIVALS QUANTILES``."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ops.simulator import week
from ops.simulator.traces import servegen
from ops.simulator.week import CELL_S, CELLS, DAY_S, DAYS, FILE, SIZES
from tests.workloads.pack import read_tables


def reduce(model: servegen.ServeGenModel) -> npt.NDArray[np.float32]:
    """Four rows of cells: rate, dispersion, mean input and mean output tokens."""
    rate = np.bincount(model.cell, weights=model.rate_rps, minlength=CELLS)[:CELLS]
    safe = np.where(rate > 0.0, rate, 1.0)
    squared = np.minimum(model.cv, servegen.CV_MAX) ** 2
    dispersion = np.bincount(model.cell, weights=model.rate_rps * squared, minlength=CELLS)[:CELLS] / safe
    rows = [rate, np.where(rate > 0.0, dispersion, 1.0)]
    known: dict[tuple[int, int], int] = {
        (int(client), int(span)): row
        for row, (client, span) in enumerate(zip(model.lengths_client, model.lengths_span, strict=True))
    }
    place = np.array(
        [
            known.get((int(c), int(k) * CELL_S // servegen.LENGTHS_S), -1)
            for c, k in zip(model.client, model.cell, strict=True)
        ]
    )
    for quantiles in (sum(model.inputs), model.outputs):
        means = np.minimum(quantiles, servegen.INPUT_TOKENS_MAX).mean(axis=1)
        weight = model.rate_rps * (place >= 0)
        total = np.bincount(model.cell, weights=weight, minlength=CELLS)[:CELLS]
        tokens = np.bincount(model.cell, weights=weight * means[place], minlength=CELLS)[:CELLS]
        overall = float((weight * means[place]).sum() / weight.sum())
        rows.append(np.where(total > 0.0, tokens / np.where(total > 0.0, total, 1.0), overall))
    return np.array(rows, dtype=np.float32)


def main(arrivals: str, quantiles: str) -> None:
    """Writes the package's data file."""
    models = read_tables(Path(arrivals), Path(quantiles), SIZES, until_s=float(DAYS * DAY_S))
    path = Path(week.__file__).with_name("data") / FILE
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **{model.name: reduce(model) for model in models})
    print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
