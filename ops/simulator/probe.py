"""Models that share one device under a given load, watched window by window: what TWU, utilisation and clients show.

Replicas stay where they are put and nobody decides anything, so what is seen is the engines' doing alone. Each window of
``window_s`` gives a :class:`Reading`. A request is late once it has waited for longer than its target, answered or not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ops.simulator.capacity import Targets, most_rps
from ops.simulator.engine import Engine
from ops.simulator.options import RunOptions
from ops.simulator.queueing import Live
from ops.simulator.replicas import SimReplica
from ops.simulator.traces.columns import merge, one_model
from ops.simulator.traces.draws import poisson, stream
from ops.simulator.types import DEVICE_BYTES, GB, SLOTS_MAX, PoolSpec, SimModel, Trace, Window, Workload
from ops.simulator.world import World
from profiles.twu import TokenWork, allowed_s, twu, twu_raw_s
from subjects.errors import ConfigError
from subjects.ids import ReplicaId

LENGTHS = ((16, 512), (513, 2048), (2049, 8192))
"""Input tokens of the three length classes, uniform between the two."""
OUTPUTS = (50, 350)
MIX = (0.6, 0.3, 0.1)
"""Short, medium and long; also smallest, middle and largest model (SCH-5, OPS-7)."""
WINDOW_S = 1.0
OVER_S = 5.0
"""TWU is over the last so many seconds, read each window."""
LATE_OVER_S = 10.0
QUIET = RunOptions(error_sigma=0.0, max_wait_s=60.0)


@dataclass(frozen=True, slots=True)
class Reading:
    """The device at the end of a window."""

    at_s: float
    twu: float
    """Over the last ``OVER_S``, with the weights and baseline of the probe."""
    raw_s: float
    tokens_per_s: float
    utilisation: float
    """Share of the window in which an engine step ran."""
    waiting: int
    late: float
    """Share of the requests that should have been answered in the last ``LATE_OVER_S`` which were late."""


@dataclass(frozen=True, slots=True)
class Line:
    """A model on the device: its weight in TWU, its share of the requests."""

    model: SimModel
    weight: float
    share: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a request stands at the end of a window: all tokens that its device has computed for it so far."""

    weight: float
    prompt_tokens: int
    output_tokens: int
    age_s: float
    """Since its arrival; at its end for one that finished in the window."""
    ttft_s: float
    tpot_s: float
    """Its targets."""


@dataclass(frozen=True, slots=True)
class TwuReading:
    """TWU of a device over a window, and the source's form in seconds."""

    twu: float
    raw_s: float
    tokens: float


class TwuMeter:
    """TWU of one device, window by window, from where its requests stand.

    What a request did in a window is its progress since the last one, so running requests count with their elapsed part and
    nothing counts twice. Remembers only requests that ran in the last window.
    """

    def __init__(self, baseline_tokens_per_s: float) -> None:
        self.baseline_tokens_per_s = baseline_tokens_per_s
        self._done: dict[Hashable, int] = {}

    def read(
        self, window_s: float, running: Mapping[Hashable, Progress], finished: Mapping[Hashable, Progress]
    ) -> TwuReading:
        """The window that ends now: those that run, and those that finished in it, by request."""
        parts = []
        tokens = 0.0
        done: dict[Hashable, int] = {}
        for group, kept in ((running, True), (finished, False)):
            for request, progress in group.items():
                total = progress.prompt_tokens + progress.output_tokens
                new = max(0, total - self._done.get(request, 0))
                if kept:
                    done[request] = total
                slo_s = allowed_s(progress.ttft_s, progress.tpot_s, progress.output_tokens)
                parts.append(TokenWork(progress.weight, float(new), progress.age_s, slo_s))
                tokens += new
        self._done = done
        return TwuReading(
            twu(parts, window_s, self.baseline_tokens_per_s), twu_raw_s(parts, window_s, self.baseline_tokens_per_s), tokens
        )


class _Watched(World):
    """Keeps what finished since it was last asked."""

    def __init__(self, workload: Workload, trace: Trace, seed: int, start_s: float, options: RunOptions) -> None:
        super().__init__(workload, trace, seed, start_s, options)
        self.gone: list[Live] = []

    def _finish(self, replica: SimReplica, live: Live) -> None:
        super()._finish(replica, live)
        self.gone.append(live)


def lines_of(models: Sequence[SimModel], mix: Sequence[float] = MIX) -> tuple[Line, ...]:
    """The smallest model first; weights by how many times fewer tokens a model makes than the first (SCH-6).

    Raises:
        ConfigError: they do not fit on one device together.
    """
    ordered = sorted(models, key=lambda model: (model.weights_bytes, model.name))
    if any(model.gpus != 1 for model in ordered) or kv_each(ordered) < GB:
        raise ConfigError(f"{', '.join(model.name for model in ordered)} do not fit on one device; name smaller models")
    shares = list(mix[: len(ordered)])
    rates = [tokens_per_s(model, kv_each(ordered)) for model in ordered]
    return tuple(
        Line(model, round(rates[0] / rate, 3), share / sum(shares))
        for model, rate, share in zip(ordered, rates, shares, strict=True)
    )


def kv_each(models: Sequence[SimModel]) -> int:
    """KV bytes of each where they share what their weights leave."""
    return (DEVICE_BYTES - sum(model.weights_bytes for model in models)) // len(models)


def tokens_per_s(model: SimModel, kv_bytes: int) -> float:
    """Tokens per second, prompts and answers, that a replica alone carries of the mix (capacity profile)."""
    inputs = sum(share * sum(ends) / 2 for share, ends in zip(MIX, LENGTHS, strict=True))
    outputs = sum(OUTPUTS) / 2
    most = most_rps(
        model.costs,
        inputs,
        outputs,
        Targets(model.ttft_s, model.tpot_s),
        kv_tokens=kv_bytes / model.kv_bytes_per_token,
        slots=SLOTS_MAX,
    )
    return most * (inputs + outputs)


def capacity_rps(lines: Sequence[Line], lengths: Sequence[float] = MIX) -> float:
    """Requests per second of all lines together that fill the device by the profiles: what load factors count in."""
    inputs = sum(share * sum(ends) / 2 for share, ends in zip(lengths, LENGTHS, strict=True)) / sum(lengths)
    per_request = sum(
        line.share
        / most_rps(
            line.model.costs,
            inputs,
            sum(OUTPUTS) / 2,
            Targets(line.model.ttft_s, line.model.tpot_s),
            kv_tokens=math.inf,
            slots=SLOTS_MAX,
        )
        for line in lines
    )
    return 1.0 / per_request


def ramp(
    lines: Sequence[Line], seed: int, pieces: Sequence[tuple[float, float]], seconds: float, lengths: Sequence[float] = MIX
) -> Trace:
    """Poisson requests: ``pieces`` has from when on how many per second arrive over all lines."""
    parts = []
    for number, line in enumerate(lines):
        for piece, (from_s, rps) in enumerate(pieces):
            until_s = pieces[piece + 1][0] if piece + 1 < len(pieces) else seconds
            times = poisson(stream(seed, "probe", number, piece), rps * line.share, until_s - from_s)
            uniform = stream(seed, "probe-lengths", number, piece).random((len(times), 3))
            kind = np.searchsorted(np.cumsum(lengths) / sum(lengths), uniform[:, 0], side="right").clip(0, 2)
            low, high = (np.array([ends[end] for ends in LENGTHS])[kind] for end in (0, 1))
            inputs = (low + np.floor(uniform[:, 1] * (high - low + 1))).astype(np.int32)
            outputs = (OUTPUTS[0] + np.floor(uniform[:, 2] * (OUTPUTS[1] - OUTPUTS[0] + 1))).astype(np.int32)
            parts.append(one_model(from_s + times, inputs, outputs, number))
    return merge(parts)


def watch(lines: Sequence[Line], trace: Trace, seed: int, seconds: float, baseline_tokens_per_s: float) -> list[Reading]:
    """Runs the load on one device that holds a replica per line; a reading per window."""
    models = tuple(line.model for line in lines)
    pool = PoolSpec(devices=1)
    window = Window(0.0, 0.0, seconds)
    made = Workload(name="probe", models=models, windows=(window,), trace=lambda _, __: trace, pool=pool, static_replicas={})
    world = _Watched(made, trace, seed, 0.0, QUIET)
    for number in range(len(models)):
        world.make_ready(world.spawn(ReplicaId(f"r{number}"), number, [0], kv_each(models)))
    readings: list[Reading] = []
    meter = TwuMeter(baseline_tokens_per_s)
    recent: deque[tuple[float, float, float]] = deque(maxlen=round(OVER_S / WINDOW_S))
    lateness = _Lateness(world, lines)
    busy_s = 0.0
    for step in range(round(seconds / WINDOW_S)):
        now_s = (step + 1) * WINDOW_S
        world.run(now_s)
        world.look_after_queues()
        running: dict[Hashable, Progress] = {
            live.index: _progress(world, lines, live, now_s, made_by(live.engine, live, now_s))
            for replica in world.replicas.values()
            for live in replica.engine.sequences()
            if isinstance(live, Live) and live.engine is not None
        }
        finished: dict[Hashable, Progress] = {
            live.index: _progress(world, lines, live, world.end_s[live.index], live.output_tokens) for live in world.gone
        }
        world.gone.clear()
        reading = meter.read(WINDOW_S, running, finished)
        recent.append((reading.twu, reading.raw_s, reading.tokens / WINDOW_S))
        busy_before_s, busy_s = busy_s, world.devices[0].busy_until_s(now_s)
        twu, raw_s, rate = (sum(entry[place] for entry in recent) / len(recent) for place in range(3))
        waiting = sum(queue.count for queue in world.queues)
        utilisation = (busy_s - busy_before_s) / WINDOW_S
        readings.append(Reading(now_s, twu, raw_s, rate, utilisation, waiting, lateness.share(now_s)))
    return readings


def made_by(engine: Engine | None, live: Live, now_s: float) -> tuple[int, int]:
    """Prompt tokens computed and tokens made by now, the steps of the running segment included."""
    if engine is None or live.finish_step < 0:
        return live.input_tokens + live.made - live.prefill_left if live.pages else 0, live.made
    steps = engine._steps + (engine._steps_by(now_s, begun=False) if engine.active else 0)
    return live.input_tokens, live.output_tokens - max(0, live.finish_step - steps)


def _progress(world: World, lines: Sequence[Line], live: Live, now_s: float, made: int | tuple[int, int]) -> Progress:
    line = lines[live.model]
    prompt, output = made if isinstance(made, tuple) else (live.input_tokens, made)
    age_s = max(0.0, now_s - world.arrival_s[live.index])
    return Progress(line.weight, prompt, output, age_s, line.model.ttft_s, line.model.tpot_s)


class _Lateness:
    """Who was late in the last seconds. Each request is judged once, when it had to be answered or when it was late."""

    def __init__(self, world: _Watched, lines: Sequence[Line]) -> None:
        self._world = world
        self._lines = lines
        self._due: deque[tuple[float, int]] = deque()
        """By when a first token had to be there, by request."""
        self._next = 0
        self._judged: deque[tuple[float, bool]] = deque()
        self._slow: dict[int, bool] = {}

    def share(self, now_s: float) -> float:
        """Of those judged in the last ``LATE_OVER_S``."""
        world = self._world
        while self._next < len(world.arrival_s) and world.arrival_s[self._next] <= now_s:
            ttft_s = self._lines[world.model_at[self._next]].model.ttft_s
            self._due.append((world.arrival_s[self._next] + ttft_s, self._next))
            self._next += 1
        live = {
            sequence.index: sequence.first_s
            for replica in world.replicas.values()
            for sequence in replica.engine.sequences()
        }
        while self._due and self._due[0][0] <= now_s:
            due_s, index = self._due.popleft()
            first_s = live.get(index, world.first_s[index])
            self._judged.append((due_s, first_s < 0.0 or first_s > due_s))
        while self._judged and self._judged[0][0] <= now_s - LATE_OVER_S:
            self._judged.popleft()
        return sum(late for _, late in self._judged) / len(self._judged) if self._judged else 0.0
