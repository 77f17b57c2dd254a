"""Kinds of GPU, and the costs of a model on one kind derived from those on another.

The rule, from what bounds each part of the work:

- prefill (``prefill_token_s``, ``prefill_token2_s``) is bound by arithmetic: times the ratio of peak dense FLOPS in the
  precision that the weights have (a kind without fp8 units computes fp8 weights in bf16);
- a step's constant is reading the weights once, at ``BANDWIDTH_SHARE`` of the memory bandwidth, plus a rest (launches, CPU,
  collectives) that is the same on any kind: only the reading is scaled;
- a step's cost per token of context is reading KV: times the ratio of memory bandwidths;
- a step's cost per request is part CPU, part small kernels: times the square root of the ratio of memory bandwidths, which
  is a fit and not derived (measured: 1.3 from H800 to A100, 2.1 to A10; the rule says 1.28 and 2.36).

Errors against public measurements of the same model on two kinds are in :func:`errors` and in its test.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

from profiles.costs import prefill_s, step_s
from subjects.messages import StepCosts

GB = 1_000_000_000
GIB = 1 << 30
BANDWIDTH_SHARE = 0.8
"""Of the peak that kernels reach when they stream weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """Published figures of one kind of GPU; bandwidths in bytes per second and one direction, FLOPS dense."""

    name: str
    memory_bytes: int
    memory_bandwidth: float
    bf16_flops: float
    fp8_flops: float | None
    """None: no fp8 units."""
    host_link: float
    """To host memory."""
    peer_link: float
    """To another GPU of the same host: NVLink where there is one, else the host link."""
    networked: float = 0.0
    """To another host, per GPU; 0 where it depends on the host alone."""

    @property
    def usable_bytes(self) -> int:
        """What replicas may be given: nine tenths, in whole GB (an engine's own default is 0.92 of the memory)."""
        return math.floor(self.memory_bytes * 0.9 / GB) * GB

    def flops(self, fp8: bool) -> float:
        """Peak in the precision that weights of this kind compute in."""
        return self.fp8_flops if fp8 and self.fp8_flops else self.bf16_flops


KINDS: dict[str, DeviceKind] = {
    kind.name: kind
    for kind in (
        DeviceKind(
            name="a100-80gb",
            memory_bytes=80 * GB,
            memory_bandwidth=2.039e12,
            bf16_flops=312e12,
            fp8_flops=None,
            host_link=32e9,
            peer_link=300e9,
            networked=25e9,
        ),
        DeviceKind(
            name="h100-80gb",
            memory_bytes=80 * GB,
            memory_bandwidth=3.35e12,
            bf16_flops=989e12,
            fp8_flops=1978e12,
            host_link=64e9,
            peer_link=450e9,
            networked=50e9,
        ),
        DeviceKind(
            name="h800-80gb",
            memory_bytes=80 * GB,
            memory_bandwidth=3.35e12,
            bf16_flops=989e12,
            fp8_flops=1978e12,
            host_link=64e9,
            peer_link=200e9,
            networked=50e9,
        ),
        DeviceKind(
            name="h200-141gb",
            memory_bytes=141 * GB,
            memory_bandwidth=4.8e12,
            bf16_flops=989e12,
            fp8_flops=1978e12,
            host_link=64e9,
            peer_link=450e9,
            networked=50e9,
        ),
        DeviceKind(
            name="h20-96gb",
            memory_bytes=96 * GB,
            memory_bandwidth=4.0e12,
            bf16_flops=148e12,
            fp8_flops=296e12,
            host_link=64e9,
            peer_link=450e9,
            networked=50e9,
        ),
        DeviceKind(
            name="a10-24gb",
            memory_bytes=24 * GB,
            memory_bandwidth=0.6e12,
            bf16_flops=125e12,
            fp8_flops=None,
            host_link=32e9,
            peer_link=32e9,
        ),
        DeviceKind(
            name="l4-24gb",
            memory_bytes=24 * GB,
            memory_bandwidth=0.3e12,
            bf16_flops=121e12,
            fp8_flops=242e12,
            host_link=32e9,
            peer_link=32e9,
        ),
        DeviceKind(
            name="l40s-48gb",
            memory_bytes=48 * GB,
            memory_bandwidth=0.864e12,
            bf16_flops=362e12,
            fp8_flops=733e12,
            host_link=32e9,
            peer_link=32e9,
        ),
    )
}
REFERENCE = "h100-80gb"


def prefill_speed(kind: DeviceKind, *, fp8: bool = False) -> float:
    """Relative to the reference: what a unit of prefill work is worth on this kind."""
    return kind.flops(fp8) / KINDS[REFERENCE].flops(fp8)


def decode_speed(kind: DeviceKind) -> float:
    """Relative to the reference: what a unit of work bound by memory bandwidth is worth on this kind."""
    return kind.memory_bandwidth / KINDS[REFERENCE].memory_bandwidth


def derived(
    costs: StepCosts, weights_bytes: int, measured: DeviceKind, wanted: DeviceKind, *, fp8: bool = False
) -> StepCosts:
    """Costs on ``wanted`` of a model with ``weights_bytes`` per GPU, from its costs on ``measured``."""
    compute = measured.flops(fp8) / wanted.flops(fp8)
    memory = measured.memory_bandwidth / wanted.memory_bandwidth
    reading_s = min(weights_bytes / (BANDWIDTH_SHARE * measured.memory_bandwidth), costs.step_const_s)
    return StepCosts(
        prefill_token_s=costs.prefill_token_s * compute,
        prefill_token2_s=costs.prefill_token2_s * compute,
        step_const_s=costs.step_const_s + reading_s * (memory - 1.0),
        step_request_s=costs.step_request_s * math.sqrt(memory),
        step_context_token_s=costs.step_context_token_s * memory,
    )


# ------------------------------------------------------------------------------------------------- against measurements


@dataclass(frozen=True, slots=True)
class Fit:
    """A model measured on a kind of device, as published measurements were fitted (``measured.csv``)."""

    model: str
    kind: str
    weights_bytes: int
    prefill_token_s: float
    step_const_s: float
    step_request_s: float

    @property
    def costs(self) -> StepCosts:
        """The parts that the measurements support; their contexts are too short for a cost per token of context."""
        return StepCosts(
            prefill_token_s=self.prefill_token_s, step_const_s=self.step_const_s, step_request_s=self.step_request_s
        )


@dataclass(frozen=True, slots=True)
class DerivationError:
    """Derived over measured less 1, per part, and for a decode step of 16 requests."""

    model: str
    measured: str
    wanted: str
    prefill: float
    step_const: float
    step_request: float
    step_of_16: float


def fits() -> list[Fit]:
    """All rows of ``measured.csv``."""
    with resources.files("profiles.hardware").joinpath("measured.csv").open(encoding="utf-8") as file:
        return [
            Fit(
                model=row["model"],
                kind=row["kind"],
                weights_bytes=round(float(row["weights_gb"]) * GB),
                prefill_token_s=float(row["prefill_token_ms"]) / 1e3,
                step_const_s=float(row["step_const_ms"]) / 1e3,
                step_request_s=float(row["step_request_ms"]) / 1e3,
            )
            for row in csv.DictReader(line for line in file if not line.startswith("#"))
        ]


def errors(reference: str = "h800-80gb") -> Iterator[DerivationError]:
    """For each model measured on ``reference`` and another kind: how far the rule is off there."""
    rows = fits()
    for base in rows:
        if base.kind != reference:
            continue
        for other in rows:
            if other.model != base.model or other.kind == reference:
                continue
            got = derived(base.costs, base.weights_bytes, KINDS[base.kind], KINDS[other.kind])
            yield DerivationError(
                model=base.model,
                measured=base.kind,
                wanted=other.kind,
                prefill=got.prefill_token_s / other.prefill_token_s - 1,
                step_const=got.step_const_s / other.step_const_s - 1,
                step_request=got.step_request_s / other.step_request_s - 1,
                step_of_16=(got.step_const_s + 16 * got.step_request_s) / (other.step_const_s + 16 * other.step_request_s)
                - 1,
            )


@dataclass(frozen=True, slots=True)
class Served:
    """A measured server: ``concurrency`` requests at once, each with these lengths, and the time per output token."""

    model: str
    kind: str
    gpus: int
    engine: str
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
    with resources.files("profiles.hardware").joinpath("served.csv").open(encoding="utf-8") as file:
        return [
            Served(
                model=row["model"],
                kind=row["kind"],
                gpus=int(row["gpus"]),
                engine=row["engine"],
                input_tokens=int(row["input_tokens"]),
                output_tokens=int(row["output_tokens"]),
                concurrency=int(row["concurrency"]),
                tpot_s=float(row["tpot_ms"]) / 1e3,
            )
            for row in csv.DictReader(line for line in file if not line.startswith("#"))
        ]
