"""Seven days of three ServeGen models as rates per ten minutes: for what needs earlier days, that is seasons.

Only totals over all clients are kept: requests per second, how unevenly they come (the rate-weighted mean of the clients'
squared CV, capped as everywhere: the dispersion of their sum over long times), mean tokens. Requests drawn from it are a
renewal process of that dispersion, and their token counts exponential about the mean. So it is a fair picture of how load
rises and falls in a week, and a coarse one of single requests. Cells without any rate are gaps in the collection: nothing is
drawn there and nothing should be learned from them.

``tests.workloads.week`` makes the file from the same two tables as ``tests.workloads.pack``.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import numpy as np
import numpy.typing as npt

from ops.simulator import rates
from ops.simulator.models import sim_model, work_s
from ops.simulator.traces import servegen
from ops.simulator.traces.columns import one_model
from ops.simulator.traces.draws import GAMMA, renewals, stream
from ops.simulator.types import SimModel

DAYS = 7
DAY_S = 86_400
CELL_S = servegen.CELL_S
CELLS = DAYS * DAY_S // CELL_S
SIZES = {"m-small": "3.8B", "m-mid": "8B", "m-large": "70B"}
FILE = "servegen-week.npz"
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Week:
    """One model, a value per cell; rates as in the source."""

    name: str
    rate_rps: Floats
    dispersion: Floats
    input_tokens: Floats
    output_tokens: Floats

    @property
    def model(self) -> SimModel:
        """As in ``five-lines``."""
        return sim_model(SIZES[self.name], self.name)

    def gap(self, second: int) -> bool:
        """Whether nothing was collected then."""
        return bool(self.rate_rps[second // CELL_S] == 0.0)

    def work_per_s(self, seed: int, days: int = DAYS) -> tuple[Floats, Floats]:
        """GPU-seconds of work and requests that arrive in each second of the first days, at the rates of ``five-lines``."""
        scale = rates.SCALES["five-lines"][self.name]
        model = self.model
        work, count = np.zeros(days * DAY_S), np.zeros(days * DAY_S)
        for cell in range(days * DAY_S // CELL_S):
            random = stream(seed, "week", self.name, cell)
            cv = float(np.sqrt(self.dispersion[cell]))
            times = renewals(random, GAMMA, cv, float(self.rate_rps[cell]) * scale, CELL_S, CELL_S)
            drawn = random.standard_exponential((2, len(times)))
            means = (self.input_tokens[cell], self.output_tokens[cell])
            inputs, outputs = (
                np.clip(np.rint(mean * row), 1, servegen.INPUT_TOKENS_MAX).astype(np.int32)
                for mean, row in zip(means, drawn, strict=True)
            )
            seconds = np.minimum(times.astype(np.int64), CELL_S - 1)
            each = work_s(model, one_model(times, inputs, outputs, 0)) * model.gpus
            begin = cell * CELL_S
            work[begin : begin + CELL_S] = np.bincount(seconds, weights=each, minlength=CELL_S)
            count[begin : begin + CELL_S] = np.bincount(seconds, minlength=CELL_S)
        return work, count


def packaged() -> dict[str, Week]:
    """From the package's data."""
    with resources.files("ops.simulator").joinpath(f"data/{FILE}").open("rb") as file, np.load(file) as data:
        return {name: Week(name, *(row.astype(np.float64) for row in data[name])) for name in SIZES}
