"""Public measurements (``profiles/hardware/*.csv``) that costs and estimates are checked against."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

from profiles.costs import prefill_s, step_s
from subjects.messages import StepCosts


def _rows(name: str) -> Iterator[dict[str, str]]:
    with resources.files("profiles.hardware").joinpath(name).open(encoding="utf-8") as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))


@dataclass(frozen=True, slots=True)
class Fit:
    """A model measured on a kind of device, as published measurements were fitted (``measured.csv``)."""

    model: str
    kind: str
    weights_bytes: int
    prefill_token_s: float
    step_const_s: float
    step_request_s: float

    def step_s(self, batch: int) -> float:
        """One decode step."""
        return self.step_const_s + batch * self.step_request_s


def fits() -> list[Fit]:
    """All rows of ``measured.csv``."""
    milliseconds = ("prefill_token_ms", "step_const_ms", "step_request_ms")
    return [
        Fit(
            row["model"],
            row["kind"],
            round(float(row["weights_gb"]) * 1e9),
            *(float(row[one]) / 1e3 for one in milliseconds),
        )
        for row in _rows("measured.csv")
    ]


@dataclass(frozen=True, slots=True)
class Served:
    """A measured server: ``concurrency`` requests at once, each with these lengths, and the time per output token."""

    model: str
    kind: str
    input_tokens: int
    output_tokens: int
    concurrency: int
    tpot_s: float

    def expected_tpot_s(self, costs: StepCosts) -> float:
        """By the costs: a step of the whole batch at its mean context, and the others' prefills spread over the steps."""
        others = (self.concurrency - 1) / self.output_tokens
        context = self.concurrency * (self.input_tokens + self.output_tokens / 2)
        return step_s(costs, self.concurrency, context) + others * prefill_s(costs, self.input_tokens)


def served() -> list[Served]:
    """All rows of ``served.csv``."""
    numbers = ("input_tokens", "output_tokens", "concurrency")
    return [
        Served(row["model"], row["kind"], inputs, outputs, concurrency, float(row["tpot_ms"]) / 1e3)
        for row in _rows("served.csv")
        for inputs, outputs, concurrency in [[int(row[one]) for one in numbers]]
    ]
