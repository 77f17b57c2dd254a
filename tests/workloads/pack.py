"""Makes the files of ``ops/simulator/data`` from the public data sets: ``python -m tests.workloads.pack --help``.

Needs scipy for the quantiles of the gamma distribution; nothing else in the product does. Where each set comes from, and
under which licence, stands in ``ops/simulator/data/SOURCES.md``.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ops import simulator
from ops.simulator.traces import aegaeon, azure, mooncake, servegen
from ops.simulator.traces.columns import text
from ops.simulator.traces.draws import FAMILIES, TABLE_OCTAVES, TABLE_STEPS

DATA = Path(simulator.__file__).parent / "data"
CV_GRID = np.round(np.geomspace(0.1, 4.0, 32), 4)
MOONCAKE_MS = 600_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servegen", nargs=2, type=Path, metavar=("ARRIVALS", "QUANTILES"), help="the two tables as CSV")
    parser.add_argument("--azure", nargs=2, type=Path, metavar=("CODE", "CONV"), help="the two CSV files")
    parser.add_argument("--aegaeon", type=Path, metavar="DIRECTORY", help="the artifact's synth-*.csv")
    parser.add_argument("--mooncake", type=Path, metavar="JSONL", help="the conversation trace")
    chosen = parser.parse_args()
    write("arrival-tables.npz", tables())
    if chosen.servegen:
        arrays: dict[str, npt.NDArray[Any]] = {}
        for model in read_tables(*chosen.servegen):
            arrays |= servegen_arrays(model)
        write("servegen-day0.npz", arrays)
    if chosen.azure:
        services = [azure.read_csv(path, azure.CLOCK_START) for path in chosen.azure]
        write("azure-2023.npz", azure_arrays("code", services[0]) | azure_arrays("conv", services[1]))
    if chosen.aegaeon:
        pairs: Counter[tuple[int, int]] = Counter()
        for path in sorted(chosen.aegaeon.glob("synth-*-1.0-1.0.csv")):
            _, trace = aegaeon.read_csv(path)
            pairs.update(zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True))
        table = np.array(sorted((*pair, count) for pair, count in pairs.items()), dtype=np.int64)
        pool = aegaeon.LengthPool(table[:, 0].astype(np.int32), table[:, 1].astype(np.int32), table[:, 2])
        write("aegaeon-lengths.npz", aegaeon_arrays(pool))
    if chosen.mooncake:
        write("mooncake-sample.npz", mooncake_arrays(mooncake.read_jsonl(chosen.mooncake), MOONCAKE_MS))


def write(name: str, arrays: dict[str, npt.NDArray[Any]]) -> None:
    """Compressed, arrays in the order of their names."""
    path = DATA / name
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **{key: arrays[key] for key in sorted(arrays)})
    print(f"{path.name}: {path.stat().st_size:,} bytes")


def read_tables(
    arrivals: Path, quantiles: Path, names: Iterable[str] = servegen.MODELS, until_s: float = servegen.DAY_S
) -> list[servegen.ServeGenModel]:
    """All models from two CSV files: ``model,client,window_start_s,rate_rps,iat_cv,dist,...`` and
    ``model,client,window_start_s,field,mean,std,q0.5,...,q99.5`` (each may be gzipped)."""
    cells: dict[str, list[servegen._Cell]] = {name: [] for name in names}
    rows: dict[str, dict[tuple[int, int], dict[str, list[int]]]] = {name: {} for name in names}
    with text(arrivals) as file:
        for line in csv.DictReader(file):
            if line["model"] in cells and float(line["window_start_s"]) < until_s and float(line["rate_rps"]) > 0:
                cells[line["model"]].append(
                    servegen._Cell(
                        client=int(line["client"]),
                        cell=int(float(line["window_start_s"]) // servegen.CELL_S),
                        rate_rps=float(line["rate_rps"]),
                        cv=float(line["iat_cv"]),
                        family=FAMILIES.index(line["dist"].lower()),
                    )
                )
    columns = [f"q{place}.5" for place in range(servegen.QUANTILES)]
    with text(quantiles) as file:
        for line in csv.DictReader(file):
            if line["model"] in rows and float(line["window_start_s"]) < until_s:
                key = (int(line["client"]), int(float(line["window_start_s"]) // servegen.LENGTHS_S))
                values = [round(float(line[column])) for column in columns]
                rows[line["model"]].setdefault(key, {})[line["field"]] = values
    found = []
    for name in cells:
        known = [
            servegen._Row(
                client,
                span,
                {key: fields[key] for key in servegen.INPUT_FIELDS if key in fields},
                fields["output_tokens"],
            )
            for (client, span), fields in rows[name].items()
        ]
        found.append(servegen.build(name, cells[name], known))
    return found


def servegen_arrays(model: servegen.ServeGenModel) -> dict[str, npt.NDArray[Any]]:
    """For the package's data file: small types, names prefixed with the model's."""
    found: dict[str, npt.NDArray[Any]] = {
        "client": model.client.astype(np.int16),
        "cell": model.cell.astype(np.int16),
        "rate_rps": model.rate_rps.astype(np.float32),
        "cv": model.cv.astype(np.float32),
        "family": model.family.astype(np.int8),
        "lengths_client": model.lengths_client.astype(np.int16),
        "lengths_span": model.lengths_span.astype(np.int16),
        "outputs": _steps(model.outputs),
    }
    for place, quantiles in enumerate(model.inputs):
        found[f"inputs{place}"] = _steps(quantiles)
    return {f"{model.name}/{name}": array for name, array in found.items()}


def _steps(quantiles: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Differences along a row, which compress better."""
    return np.diff(quantiles, axis=1, prepend=0).astype(np.int32)


def azure_arrays(name: str, service: azure.AzureService) -> dict[str, npt.NDArray[Any]]:
    """For the package's data file."""
    return {
        f"{name}/tick_steps": np.diff(service.tick, prepend=0),
        f"{name}/input_tokens": service.input_tokens,
        f"{name}/output_tokens": service.output_tokens,
    }


def aegaeon_arrays(pool: aegaeon.LengthPool) -> dict[str, npt.NDArray[Any]]:
    """For the package's data file."""
    return {
        "input_tokens": pool.input_tokens.astype(np.int32),
        "output_tokens": pool.output_tokens.astype(np.int32),
        "count": pool.count.astype(np.int32),
    }


def mooncake_arrays(conversations: mooncake.Conversations, until_ms: int) -> dict[str, npt.NDArray[Any]]:
    """For the package's data file."""
    kept = conversations.arrival_ms < until_ms
    return {
        "arrival_ms": conversations.arrival_ms[kept].astype(np.int32),
        "input_tokens": conversations.input_tokens[kept],
        "output_tokens": conversations.output_tokens[kept],
        "shared_tokens": conversations.shared_tokens[kept],
    }


def tables() -> dict[str, npt.NDArray[Any]]:
    """Quantiles of gamma and Weibull gaps with mean 1, and of the gaps that a fixed instant falls into."""
    from scipy import optimize, special

    places = np.arange(TABLE_OCTAVES * TABLE_STEPS + 1) / TABLE_STEPS
    octave = np.floor(places)
    tail = (2.0 - (places - octave)) * 0.5 ** (octave + 1)
    gaps = np.zeros((2, len(CV_GRID), len(places)))
    spans = np.zeros_like(gaps)
    gaps_middle, spans_middle = np.zeros((2, len(CV_GRID))), np.zeros((2, len(CV_GRID)))
    middle_tail = (1.0 + tail[1]) / 2
    for row, cv in enumerate(CV_GRID):
        shape = 1.0 / cv**2
        gaps[0, row] = special.gammainccinv(shape, tail) / shape
        spans[0, row] = special.gammainccinv(shape + 1.0, tail) / shape
        gaps_middle[0, row] = special.gammainccinv(shape, middle_tail) / shape
        spans_middle[0, row] = special.gammainccinv(shape + 1.0, middle_tail) / shape

        def excess(power: float, cv: float = float(cv)) -> float:
            return float(special.gamma(1 + 2 / power) / special.gamma(1 + 1 / power) ** 2 - 1 - cv**2)

        power = optimize.brentq(excess, 0.2, 20.0)
        mean = special.gamma(1 + 1 / power)
        gaps[1, row] = (-np.log(tail)) ** (1 / power) / mean
        spans[1, row] = special.gammainccinv(1 + 1 / power, tail) ** (1 / power) / mean
        gaps_middle[1, row] = (-np.log(middle_tail)) ** (1 / power) / mean
        spans_middle[1, row] = special.gammainccinv(1 + 1 / power, middle_tail) ** (1 / power) / mean
    for quantiles, middle in ((gaps, gaps_middle), (spans, spans_middle)):  # a line from 0 would widen the narrow ones
        quantiles[..., 0] = np.maximum(2 * middle - quantiles[..., 1], 0)
    gaps /= table_mean(gaps, tail)[..., None]
    spans *= ((1.0 + CV_GRID**2) / table_mean(spans, tail))[..., None]
    return {"cv": CV_GRID, "gaps": gaps.astype(np.float32), "spans": spans.astype(np.float32)}


def table_mean(quantiles: npt.NDArray[np.float64], tail: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Mean of what is drawn from a table: linear between entries, the last entry beyond."""
    inner = ((quantiles[..., 1:] + quantiles[..., :-1]) / 2 * (tail[:-1] - tail[1:])).sum(axis=-1)
    mean: npt.NDArray[np.float64] = inner + quantiles[..., -1] * tail[-1]
    return mean


if __name__ == "__main__":
    main()
