"""The fixed workloads, so that figures can be compared: ``workload("five-lines")``, or its whole day with ``full=True``.

Rates of ``five-lines`` and ``busy-few`` are ServeGen's first day times one constant per model, chosen so that the smallest
dedicated split that meets the SLO over the day is the stated one; constants and replica counts are found by
``python -m tests.workloads.scale_rates`` and stored in ``rates``. The headline measures six windows of ten minutes of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ops.simulator import rates
from ops.simulator.models import SIZES, sim_model, usable_share, work_s
from ops.simulator.traces import aegaeon, azure, servegen
from ops.simulator.traces.columns import cut, jittered_copies, merge, one_model, only, thinned
from ops.simulator.traces.draws import poisson, stream
from ops.simulator.traces.recording import Recording
from ops.simulator.types import PoolSpec, SimModel, Trace, Window, Workload
from subjects.errors import ConfigError
from subjects.messages import SlaClass

DAY_S = 86_400.0
HOUR_S = 3_600.0
WARMUP_S = 180.0
MEASURED_S = 600.0
INPUT_TOKENS_MAX = 16_384
HEADLINE_HOURS = (0, 4, 8, 12, 16, 20)

HEADLINE_WINDOWS = tuple(
    Window(hour * HOUR_S, hour * HOUR_S + WARMUP_S, hour * HOUR_S + WARMUP_S + MEASURED_S) for hour in HEADLINE_HOURS
)
"""Six of ten minutes, each after three of warm-up that begin at 0, 4, ... 20 h."""
DAY_WINDOW = Window(0.0, WARMUP_S, DAY_S)


def workload(name: str, *, full: bool = False, load: float = 1.0) -> Workload:
    """A workload by name. ``full``: whole days instead of windows. ``load``: times the rates of every model.

    Replica counts of the static split are those at ``load`` 1.

    Raises:
        ConfigError: no such workload.
    """
    if name not in _MADE:
        raise ConfigError(f"no workload {name!r}; there are {', '.join(_MADE)}")
    return _MADE[name](full, load)


MINUTE_FILL = 0.75
"""Of a replica's throughput what a split counts on that is sized by minutes: a quarter is for what happens within one."""


def p99_minute(model: SimModel, trace: Trace, window: Window) -> int:
    """Replicas that carry the 99th percentile of a window's minutes at ``MINUTE_FILL`` of their throughput."""
    count = max(1, int((window.end_s - window.warmup_s) // 60))
    minute = np.minimum(((trace.arrival_s - window.warmup_s) // 60).astype(np.int64), count - 1)
    busy = np.bincount(minute, weights=work_s(model, trace), minlength=count) / 60.0
    return max(1, math.ceil(float(np.quantile(busy, 0.99)) / usable_share(model) / MINUTE_FILL))


# ------------------------------------------------------------------------------------------------------------- ServeGen


LINES: dict[str, dict[str, str]] = {
    "five-lines": {"m-small": "3.8B", "m-mid": "8B", "mm-image": "14B", "deepseek-r1": "32B", "m-large": "70B"},
    "busy-few": {"m-small": "8B", "m-mid": "32B", "deepseek-r1": "70B", "m-large": "70B"},
}
"""Which of our sizes each ServeGen model is served as."""
DEVICES = {"five-lines": 16, "busy-few": 80}


def _lines(name: str, full: bool, load: float) -> Workload:
    """Business lines: ServeGen models on one clock."""
    lines = LINES[name]
    constants = rates.SCALES[name]

    def trace(seed: int, window: Window) -> Trace:
        sources = _servegen()
        return merge(
            [
                sources[line].sample(
                    seed,
                    window.warmup_s,
                    window.end_s,
                    scale=constants[line] * load,
                    model=number,
                    input_tokens_max=INPUT_TOKENS_MAX,
                )
                for number, line in enumerate(lines)
            ]
        )

    return Workload(
        name=name,
        models=tuple(sim_model(size, line) for line, size in lines.items()),
        windows=(DAY_WINDOW,) if full else HEADLINE_WINDOWS,
        trace=trace,
        pool=PoolSpec(devices=DEVICES[name]),
        static_replicas=dict(rates.STATIC[name]),
    )


@functools.cache
def _servegen() -> dict[str, servegen.ServeGenModel]:
    return servegen.packaged()


# ------------------------------------------------------------------------------------------------------------ long tail

LONG_TAIL_MODELS = 64
LONG_TAIL_RPS = (0.02, 0.1)
LONG_TAIL_S = 7_200.0


@functools.cache
def _lengths() -> aegaeon.LengthPool:
    return aegaeon.packaged()


def _long_tail(full: bool, load: float) -> Workload:
    """64 models that are hardly used: two thirds 8B, one third 14B. Rates belong to the workload and do not vary by seed."""
    drawn = stream(0, "long-tail").random(LONG_TAIL_MODELS)
    rps = LONG_TAIL_RPS[0] + (LONG_TAIL_RPS[1] - LONG_TAIL_RPS[0]) * drawn
    models = tuple(sim_model("14B" if number % 3 == 2 else "8B", f"tail-{number:02d}") for number in range(LONG_TAIL_MODELS))

    def trace(seed: int, window: Window) -> Trace:
        return merge(
            [
                aegaeon.poisson_trace(
                    _lengths(),
                    seed,
                    model.name,
                    float(rps[number]) * load,
                    window.warmup_s,
                    window.end_s,
                    model=number,
                    input_tokens_max=INPUT_TOKENS_MAX,
                )
                for number, model in enumerate(models)
            ]
        )

    return Workload(
        name="long-tail",
        models=models,
        windows=(Window(0.0, WARMUP_S, WARMUP_S + LONG_TAIL_S),),
        trace=trace,
        pool=PoolSpec(devices=LONG_TAIL_MODELS),
        static_replicas={model.name: 1 for model in models},
    )


# ---------------------------------------------------------------------------------------------------------------- burst

BURST_FACTORS = {"code": 5.0, "conv": 2.7}
BURST_SIZES = {"code": "8B", "conv": "14B"}
BURST_JITTER_S = 1.0
"""Small: copies of one burst stay one burst, as when more users work on the same code base."""
BURST_END_S = 3_570.0
"""After the last request of either service."""


@functools.lru_cache(maxsize=4)
def _burst_trace(seed: int, load: float) -> Trace:
    services = azure.packaged()
    return merge(
        [
            jittered_copies(services[name].trace(number), factor * load, BURST_JITTER_S, seed, f"burst-{name}")
            for number, (name, factor) in enumerate(BURST_FACTORS.items())
        ]
    )


def _burst(full: bool, load: float) -> Workload:
    """Two services of one real hour, code with bursts that dwarf its mean."""
    return Workload(
        name="burst",
        models=tuple(sim_model(size, name) for name, size in BURST_SIZES.items()),
        windows=(Window(0.0, WARMUP_S, BURST_END_S),),
        trace=lambda seed, window: cut(_burst_trace(seed, load), window.warmup_s, window.end_s),
        pool=PoolSpec(devices=32),
        static_replicas=dict(rates.STATIC["burst"]),
        static_slo_replicas=dict(rates.STATIC["burst-slo"]),
    )


# ------------------------------------------------------------------------------------------------- pulse and contention


@dataclass(frozen=True, slots=True)
class Steady:
    """A model whose rate is piecewise constant."""

    model: SimModel
    rates: tuple[tuple[float, float], ...]
    """(from second, requests per second), ascending, the first at 0."""
    input_tokens: tuple[int, int] | None = None
    """Uniform between these; None: pairs of the Aegaeon pool."""
    output_tokens: tuple[int, int] = (1, 1)

    def trace(self, number: int, seed: int, begin_s: float, end_s: float, load: float) -> Trace:
        """Poisson within each piece; a piece is always drawn from its own begin, so that windows agree."""
        parts = []
        for piece, (from_s, rps) in enumerate(self.rates):
            until_s = self.rates[piece + 1][0] if piece + 1 < len(self.rates) else float("inf")
            if until_s <= begin_s or from_s >= end_s:
                continue
            span_s = min(until_s, end_s) - from_s
            times = poisson(stream(seed, "steady", self.model.name, piece), rps * load, span_s)
            random = stream(seed, "steady-lengths", self.model.name, piece)
            if self.input_tokens is None:
                inputs, outputs = _lengths().draw(random, len(times), INPUT_TOKENS_MAX)
            else:
                uniform = random.random((len(times), 2))
                inputs, outputs = (
                    (low + np.floor(uniform[:, column] * (high - low + 1))).astype(np.int32)
                    for column, (low, high) in enumerate((self.input_tokens, self.output_tokens))
                )
            parts.append(one_model(from_s + times, inputs, outputs, number))
        return cut(merge(parts), begin_s, end_s)


def _steady(
    name: str, lines: tuple[Steady, ...], window: Window, devices: int, static: dict[str, int], load: float
) -> Workload:
    return Workload(
        name=name,
        models=tuple(line.model for line in lines),
        windows=(window,),
        trace=lambda seed, asked: merge(
            [line.trace(number, seed, asked.warmup_s, asked.end_s, load) for number, line in enumerate(lines)]
        ),
        pool=PoolSpec(devices=devices),
        static_replicas=static,
    )


PULSE_AT_S = 120.0
"""When the pulse begins to rise."""
PULSE_RISE_S = 20.0
PULSE_QPS = (100.0, 800.0)
PULSE_HOLD_S = 100.0


def _pulse(full: bool, load: float) -> Workload:
    """OPS-9, third round: one model from 100 to 800 requests per second in 20 s, beside two that stay as they are."""
    low, high = PULSE_QPS
    rise = tuple(
        (PULSE_AT_S + second, low + (high - low) * (second + 0.5) / PULSE_RISE_S) for second in range(int(PULSE_RISE_S))
    )
    top_s = PULSE_AT_S + PULSE_RISE_S
    lines = (
        Steady(
            sim_model("8B", "pulsed", sla_class=SlaClass.GOLD),
            ((0.0, low), *rise, (top_s, high), (top_s + PULSE_HOLD_S, low)),
            input_tokens=(64, 192),
            output_tokens=(16, 48),
        ),
        Steady(sim_model("14B", "steady-a"), ((0.0, 12.0),)),
        Steady(sim_model("3.8B", "steady-b", sla_class=SlaClass.BRONZE), ((0.0, 30.0),)),
    )
    return _steady("pulse", lines, Window(0.0, 60.0, 330.0), 16, dict(rates.STATIC["pulse"]), load)


CONTENTION_RPS = 12.0


def _contention(full: bool, load: float) -> Workload:
    """OPS-9, second round: three models share two devices, with 70, 20 and 10 % of the requests."""
    lines = tuple(
        Steady(sim_model(size, name, sla_class=sla_class), ((0.0, CONTENTION_RPS * share),))
        for size, name, share, sla_class in (
            ("3.8B", "small", 0.7, SlaClass.BRONZE),
            ("8B", "middle", 0.2, SlaClass.SILVER),
            ("14B", "large", 0.1, SlaClass.GOLD),
        )
    )
    return _steady("contention", lines, Window(0.0, 60.0, 660.0), 2, dict(rates.STATIC["contention"]), load)


# ---------------------------------------------------------------------------------------------------------------- scale

SCALE_MODELS = 200
SCALE_DEVICES = 1_000
SCALE_RPS = 4_000.0
"""All models together, on average over a day."""
SCALE_SWING = 0.6
"""Of the daily wave: a model's rate lies between 0.4 and 1.6 times its mean."""
SCALE_CELL_S = 60.0
SCALE_SIZES = ("8B", "3.8B", "14B", "8B", "32B", "3.8B", "14B", "8B", "3.8B", "70B")


def scale_rates() -> list[float]:
    """Mean requests per second per model: popularity falls as 1 over the rank."""
    weights = [1.0 / rank for rank in range(1, SCALE_MODELS + 1)]
    return [SCALE_RPS * weight / sum(weights) for weight in weights]


def _spread(model: SimModel, peak_rps: float) -> int:
    """Replicas that carry a model's daily peak with requests of the Aegaeon pool at ``MINUTE_FILL`` of their throughput."""
    pool = _lengths()
    each = Trace(np.zeros(len(pool.count)), np.zeros(len(pool.count), dtype=np.int16), pool.input_tokens, pool.output_tokens)
    mean_s = float((work_s(model, each) * pool.count).sum() / pool.count.sum())
    return max(1, math.ceil(peak_rps * mean_s / usable_share(model) / MINUTE_FILL))


def _wave(position: float) -> float:
    """A triangle between -1 and 1 with period 1."""
    return 4.0 * abs(position % 1.0 - 0.5) - 1.0


def _scale(full: bool, load: float) -> Workload:
    """200 models on 1,000 GPUs for five minutes, each with its own hour of peak: for the speed of decisions."""
    models = tuple(
        sim_model(SCALE_SIZES[number % len(SCALE_SIZES)], f"scale-{number:03d}") for number in range(SCALE_MODELS)
    )
    means = scale_rates()
    phases = stream(0, "scale").random(SCALE_MODELS)
    noon_s = DAY_S / 2

    def trace(seed: int, window: Window) -> Trace:
        parts = []
        for number, model in enumerate(models):
            pieces = tuple(
                (
                    cell * SCALE_CELL_S,
                    means[number]
                    * (1 + SCALE_SWING * _wave((noon_s + cell * SCALE_CELL_S) / DAY_S + float(phases[number]))),
                )
                for cell in range(int(-(-window.end_s // SCALE_CELL_S)))
            )
            parts.append(Steady(model, pieces).trace(number, seed, window.warmup_s, window.end_s, load))
        return merge(parts)

    return Workload(
        name="scale",
        models=models,
        windows=(Window(0.0, 60.0, 300.0),),
        trace=trace,
        pool=PoolSpec(devices=SCALE_DEVICES),
        static_replicas={
            model.name: _spread(model, means[number] * (1 + SCALE_SWING)) for number, model in enumerate(models)
        },
    )


_MADE: dict[str, Callable[[bool, float], Workload]] = {
    "five-lines": functools.partial(_lines, "five-lines"),
    "busy-few": functools.partial(_lines, "busy-few"),
    "long-tail": _long_tail,
    "burst": _burst,
    "pulse": _pulse,
    "contention": _contention,
    "scale": _scale,
}

WORKLOADS: dict[str, Callable[[], Workload]] = {name: functools.partial(workload, name) for name in _MADE}
"""By name, as the headline takes them."""


# ------------------------------------------------------------------------------------------------------- a user's trace


def of_recording(
    name: str, recording: Recording, *, load: float = 1.0, devices: int | None = None, seed: int = 0
) -> Workload:
    """A recording (``traces.importing.read_trace``) as a workload: one window over all of it, a tenth of it (at most three
    minutes) as warm-up.

    ``load`` above 1 adds copies of requests with their arrivals moved by up to 5 s, below 1 it keeps that share of them. The
    static split is what the 99th percentile of the minutes asks for; the pool holds half as much again, at least 8 devices.
    """
    unknown = sorted({model.size for model in recording.models.values()} - set(SIZES))
    if unknown:
        raise ConfigError(f"size {unknown[0]!r}: the costs of {', '.join(SIZES)} are known")
    models = tuple(
        sim_model(known.size, each, sla_class=known.sla_class, ttft_s=known.ttft_s, tpot_s=known.tpot_s)
        for each in recording.names
        for known in (recording.models[each],)
    )
    trace = recording.trace
    if load > 1:
        trace = jittered_copies(trace, load, RECORDING_JITTER_S, seed, "recording")
    elif load < 1:
        trace = thinned(trace, load, seed, "recording")
    end_s = float(trace.arrival_s[-1]) + 1.0 if len(trace) else 1.0
    window = Window(0.0, min(WARMUP_S, end_s / 10), end_s)
    static = {model.name: p99_minute(model, only(trace, number), window) for number, model in enumerate(models)}
    owned = sum(model.gpus * static[model.name] for model in models)
    return Workload(
        name=name,
        models=models,
        windows=(window,),
        trace=lambda _seed, asked: cut(trace, asked.warmup_s, asked.end_s),
        pool=PoolSpec(devices=devices or max(8, -(-owned * 3 // 2))),
        static_replicas=static,
    )


RECORDING_JITTER_S = 5.0
