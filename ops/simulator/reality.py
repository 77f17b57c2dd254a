"""The simulator against reality: one load of two models on real vLLM engines, and simulated with a measured profile.

A pool of its own serves SmolLM2-135M and a random model of 38 million parameters on this machine's CPU, one core per
engine. First each is measured alone and both together (``reality_profile``); then requests of known sizes come at times
drawn from the seed, each to the real pool and into the simulator's world, and the quantiles that clients saw are
compared.

What the simulator is told beside the profile: slots and prompt tokens per step, how fast each engine is while the other
works (they share memory, caches, and the cores with gateway, bus and client), and a constant per request for all that
is not the engine's, by which engines are at work when it comes; all measured. Taking turns (ops/decisions/0008) is off
as is usual on CPUs: the simulator's turns are fluid, which suits steps of 10 ms and not those of a second that a CPU
makes.

``python -m ops.simulator.reality --minutes 1`` is a quick look; figures worth keeping need a machine that does nothing
else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ops.simulator.metrics import quantile
from ops.simulator.options import RunOptions
from ops.simulator.reality_client import Timed, ask, body
from ops.simulator.reality_profile import (
    ROUNDS,
    Measurement,
    Profile,
    Served,
    probe_s,
    probes,
    sharing_round,
    trimmed_median,
)
from ops.simulator.replicas import SimReplica
from ops.simulator.traces.draws import stream
from ops.simulator.types import GB, PoolSpec, SimModel, Trace, Window, Workload
from ops.simulator.world import World
from subjects.errors import CarpoolError
from subjects.ids import ReplicaId

SMOL, RANDOM = "smollm2", "random-38m"
SLOTS = 8
STEP_TOKENS = 512
"""Prompt tokens that a step prefills at most."""
TPOT_S = 0.4
"""Promised time per token."""
KV_BYTES = 400 * 1024 * 1024
CONTEXT_TOKENS = 2048
INPUT_TOKENS = (16, 512)
OUTPUT_TOKENS = (8, 32)
UTILISATION = 0.4
"""Of each engine when nothing runs beside it and nothing is batched."""
BURST = 2.0
"""Each model comes at this times its rate in one third of the time, the two in different thirds."""
GOAL = 0.15
MINUTES = 10.0
SETTLE_S = 5.0
LOOK_S = 3.0
BUSY_SHARE = 0.1
"""Of all cores: more than this before anything of ours runs is not a quiet machine."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One quantity at one quantile, in seconds."""

    name: str
    real_s: float
    simulated_s: float

    @property
    def off(self) -> float:
        """How far the simulator is from reality, relative; -1 where reality failed."""
        return self.simulated_s / self.real_s - 1 if self.real_s else 0.0


async def compare(
    *, seed: int, say: Callable[[str], None], minutes: float = MINUTES, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Measures, runs the load on both, and returns the figures; ``ok`` is whether all are within ``GOAL``.

    Raises:
        CarpoolError: the pool does not come up, or a request was not answered.
    """
    with _load() as load:
        await asyncio.sleep(LOOK_S)
    busy, _ = load()
    if busy > BUSY_SHARE:
        say(f"the machine is {busy:.0%} busy with other things; the figures will tell more of them than of the simulator")
    with tempfile.TemporaryDirectory(prefix="carpool-reality-", ignore_cleanup_errors=True) as temporary:
        async with _pool(Path(temporary), say) as served:
            measured = _Measured(served, say)
            before = max(1, -(-rounds // 2))
            await measured.rounds(before)
            first = measured.profiles()
            workload = simulated_workload(first, minutes * 60.0)
            trace = workload.trace(seed, workload.windows[0])
            say(f"{len(trace)} requests in {minutes:g} minutes on the real engines")
            with _load() as load:
                real = await _run_real(served, trace, say)
            used, stolen = load()
            await measured.rounds(rounds - before)
            profiles = measured.profiles()
    # The load is that which was drawn; the profile knows by now how fast the machine was before and after it.
    simulated = simulate(simulated_workload(profiles, minutes * 60.0), trace, seed, profiles)
    rows = comparisons(workload, trace, real, simulated)
    for row in rows:
        say(f"{row.name}: real {row.real_s:.3f} s, simulated {row.simulated_s:.3f} s ({row.off:+.1%})")
    return {
        "reality": "vllm-cpu",
        "seed": seed,
        "minutes": minutes,
        "requests": len(trace),
        "failed": int(np.isinf(real.ttft_s).sum()),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_used_before": busy,
        "cpu_used": used,
        "cpu_stolen": stolen,
        "step_changed": {
            name: round(profiles[name].costs.step_const_s / first[name].costs.step_const_s - 1.0, 4)
            for name in profiles
            if first[name].costs.step_const_s
        },
        "profiles": {name: msgspec.to_builtins(profile) for name, profile in profiles.items()},
        **{row.name: {"real_s": _rounded(row.real_s), "simulated_s": _rounded(row.simulated_s)} for row in rows},
        "worst_off": round(max(abs(row.off) for row in rows), 4),
        "goal": GOAL,
        "ok": all(abs(row.off) <= GOAL for row in rows),
    }


class _Measured:
    """Both models' profiles, alone and beside each other."""

    def __init__(self, served: Sequence[Served], say: Callable[[str], None]) -> None:
        self._served = served
        self._say = say
        self._measurements = [Measurement(one, STEP_TOKENS) for one in served]
        self._beside: list[tuple[float, float]] = []
        self._probes: list[dict[str, list[float]]] = [{"own": [], "other": [], "both": []} for _ in served]

    async def rounds(self, count: int) -> None:
        """So many more of everything."""
        for _ in range(count):
            for one, measurement in zip(self._served, self._measurements, strict=True):
                self._say(f"measuring {one.model} alone")
                await measurement.round()
            self._say("measuring both together")
            self._beside.append(await sharing_round(self._served[0], self._served[1]))
            for one, other, found in zip(self._served, reversed(self._served), self._probes, strict=True):
                found["own"] += await probes(one, [one])
                found["other"] += await probes(one, [other])
                found["both"] += await probes(one, [one, other])

    def profiles(self) -> dict[str, Profile]:
        """By model, from all rounds so far."""
        return {one.model: self._profile(number) for number, one in enumerate(self._served)}

    def _profile(self, number: int) -> Profile:
        profile = self._measurements[number].profile()
        rate = min(1.0, trimmed_median([pair[number] for pair in self._beside]))
        constant = {
            name: max(
                0.0,
                trimmed_median(self._probes[number][name])
                - probe_s(profile.costs, busy=name != "other", rate=1.0 if name == "own" else rate),
            )
            for name in ("own", "other", "both")
        }
        return msgspec.structs.replace(
            profile,
            own_busy_s=constant["own"],
            other_busy_s=constant["other"],
            both_busy_s=constant["both"],
            beside_rate=rate,
        )


def _rounded(seconds: float) -> float | None:
    return round(seconds, 4) if np.isfinite(seconds) else None


# ----------------------------------------------------------------------------------------------------------- simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel(SimModel):
    """One that real engines serve too."""

    @property
    def chunk_tokens(self) -> int:
        """What the real engines are told."""
        return STEP_TOKENS


def simulated_workload(profiles: dict[str, Profile], seconds: float) -> Workload:
    """The two served models as the simulator's, both on one device, and their load."""
    models = tuple(
        ServedModel(
            name=name,
            costs=profile.costs,
            weights_bytes=GB,
            kv_bytes_per_token=16_384,
            slots=SLOTS,
            min_replicas=1,
            tpot_s=TPOT_S,
        )
        for name, profile in profiles.items()
    )
    return Workload(
        name="reality",
        models=models,
        windows=(Window(0.0, 0.0, seconds),),
        trace=lambda seed, window: drawn_load(models, seed, window.end_s),
        pool=PoolSpec(devices=1, takes_turns=False),
        static_replicas={model.name: 1 for model in models},
    )


def drawn_load(models: Sequence[SimModel], seed: int, seconds: float) -> Trace:
    """Poisson arrivals with a burst per model, lengths log-uniform in and uniform out."""
    arrival_s, model_of, inputs, outputs = [], [], [], []
    for number, model in enumerate(models):
        random = stream(seed, "reality", model.name)
        low, high = np.log(INPUT_TOKENS[0]), np.log(INPUT_TOKENS[1])
        mean_input = (INPUT_TOKENS[1] - INPUT_TOKENS[0]) / (high - low)
        mean_output = sum(OUTPUT_TOKENS) / 2
        costs = model.costs
        step_s = costs.step_const_s + costs.step_request_s + costs.step_context_token_s * (mean_input + mean_output / 2)
        alone_s = costs.prefill_token_s * mean_input + mean_output * step_s
        base_rps = UTILISATION / alone_s / (1 + (BURST - 1) / 3)
        at_s = 0.0
        while True:
            third = int(3 * at_s / seconds)
            at_s += float(random.exponential(1 / (base_rps * (BURST if third == number else 1.0))))
            if at_s >= seconds:
                break
            arrival_s.append(at_s)
            model_of.append(number)
            inputs.append(int(np.exp(low + (high - low) * random.random())))
            outputs.append(int(random.integers(OUTPUT_TOKENS[0], OUTPUT_TOKENS[1] + 1)))
    order = np.argsort(np.asarray(arrival_s), kind="stable")
    return Trace(
        arrival_s=np.asarray(arrival_s)[order],
        model=np.asarray(model_of, np.int16)[order],
        input_tokens=np.asarray(inputs, np.int32)[order],
        output_tokens=np.asarray(outputs, np.int32)[order],
    )


@dataclass(frozen=True, slots=True)
class Times:
    """What clients saw, by request; infinite for one that failed."""

    ttft_s: np.ndarray[Any, np.dtype[np.float64]]
    completion_s: np.ndarray[Any, np.dtype[np.float64]]


class _Served(World):
    """Each engine has a core for itself, and is slowed by the other's work as was measured."""

    beside: tuple[float, ...] = ()

    def _began(self, replica: SimReplica) -> None:
        super()._began(replica)
        self._set_rates()

    def _ended(self, replica: SimReplica) -> None:
        super()._ended(replica)
        self._set_rates()

    def _set_rates(self) -> None:
        working = [replica for replica in self.replicas.values() if replica.working]
        for replica in working:
            replica.engine.set_rate(self.now_s, self.beside[replica.model] if len(working) > 1 else 1.0)
            self._push(replica)


def simulate(workload: Workload, trace: Trace, seed: int, profiles: dict[str, Profile]) -> Times:
    """The load in the simulator's world, one ready replica per model."""
    window = workload.windows[0]
    # The profile was measured on these very engines, so that no error is drawn.
    world = _Served(workload, trace, seed, window.warmup_s, RunOptions(error_sigma=0.0))
    by_model = [profiles[model.name] for model in workload.models]
    world.beside = tuple(profile.beside_rate for profile in by_model)
    for number, model in enumerate(workload.models):
        kv_bytes = CONTEXT_TOKENS * SLOTS * model.kv_bytes_per_token
        world.make_ready(world.spawn(ReplicaId(f"r{number}"), number, [0], kv_bytes))
    until_s = window.end_s
    while world.ended < len(trace) and until_s < window.end_s + 3600:
        until_s += 10.0
        world.run(until_s)
    first_s, last_s = np.frombuffer(world.first_s, np.float64), np.frombuffer(world.end_s, np.float64)
    constant_s = np.array(
        [
            request_constant_s(by_model[model], own, other)
            for model, (own, other) in zip(trace.model.tolist(), found_at_work(trace, last_s), strict=True)
        ]
    )
    end_s = np.array([by_model[model].end_s for model in trace.model.tolist()])
    return Times(ttft_s=first_s - trace.arrival_s + constant_s, completion_s=last_s - trace.arrival_s + constant_s + end_s)


def found_at_work(trace: Trace, end_s: npt.NDArray[np.float64]) -> list[tuple[bool, bool]]:
    """By request: whether its own engine had another request when it came, and whether the other engine had any."""
    found = []
    for index, (arrival_s, model) in enumerate(zip(trace.arrival_s.tolist(), trace.model.tolist(), strict=True)):
        there = (trace.arrival_s[:index] <= arrival_s) & (end_s[:index] > arrival_s)
        own = trace.model[:index] == model
        found.append((bool((there & own).any()), bool((there & ~own).any())))
    return found


def request_constant_s(profile: Profile, own_busy: bool, other_busy: bool) -> float:
    """What a request costs beside its engine's work."""
    if own_busy:
        return profile.both_busy_s if other_busy else profile.own_busy_s
    return profile.other_busy_s if other_busy else profile.request_s


def comparisons(workload: Workload, trace: Trace, real: Times, simulated: Times) -> list[Comparison]:
    """Per model: time to the first token and to the end, at p50 and p95."""
    rows = []
    for number, model in enumerate(workload.models):
        mine = trace.model == number
        for what in ("ttft_s", "completion_s"):
            for share in (0.50, 0.95):
                values = [quantile(getattr(times, what)[mine], share) for times in (real, simulated)]
                rows.append(Comparison(f"{model.name}_{what.removesuffix('_s')}_p{share * 100:.0f}", *values))
    return rows


# ---------------------------------------------------------------------------------------------------------------- real


async def _run_real(served: Sequence[Served], trace: Trace, say: Callable[[str], None]) -> Times:
    """Sends every request at its time, whatever became of those before it."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(SETTLE_S)
    bodies = [
        body(served[model].model, served[model].prompt(inputs), outputs)
        for model, inputs, outputs in zip(
            trace.model.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True
        )
    ]
    begun_s = loop.time() + 0.5

    async def one(index: int) -> Timed | None:
        at_s = begun_s + float(trace.arrival_s[index])
        await asyncio.sleep(max(0.0, at_s - loop.time()))
        to = served[int(trace.model[index])]
        try:
            answer = await ask(to.host, to.port, to.model, bodies[index])
        except CarpoolError as error:
            say(str(error))
            return None
        # Late by the client's own doing is late all the same.
        return dataclasses.replace(answer, sent_s=at_s)

    answers = await asyncio.gather(*(one(index) for index in range(len(trace))))
    for index, answer in enumerate(answers):
        if answer is not None and answer.output_tokens != int(trace.output_tokens[index]):
            raise CarpoolError(f"{answer.model}: asked for {trace.output_tokens[index]} tokens, got {answer.output_tokens}")
    return Times(
        ttft_s=np.array([answer.ttft_s if answer else np.inf for answer in answers]),
        completion_s=np.array([answer.completion_s if answer else np.inf for answer in answers]),
    )


@contextmanager
def _load() -> Iterator[Callable[[], tuple[float, float]]]:
    """How busy the machine was meanwhile: shares of all cores' time that were used, and that its host took away."""
    import psutil

    before = psutil.cpu_times()
    yield lambda: _shares(before, psutil.cpu_times())


def _shares(before: Any, after: Any) -> tuple[float, float]:
    spent = {name: getattr(after, name) - getattr(before, name) for name in ("user", "system", "idle", "iowait", "steal")}
    total = sum(spent.values()) or 1.0
    return round((spent["user"] + spent["system"]) / total, 4), round(spent["steal"] / total, 4)


class _pool:
    """A pool with both models loaded: ``async with`` gives what serves them."""

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._say = say
        self._stack: Any = None

    async def __aenter__(self) -> list[Served]:
        from contextlib import AsyncExitStack

        from ops.control import control
        from ops.models import fetch_model, records_of
        from ops.supervisor import Pool, PoolOptions
        from profiles.tiny import make_tiny

        random_directory = make_tiny(RANDOM, self._directory / RANDOM, seed=38, size="medium")
        sources = {SMOL: await asyncio.to_thread(fetch_model, "smollm2"), RANDOM: random_directory}
        services = self._directory / "services.yaml"
        services.write_text("".join(_service(name, source) for name, source in sources.items()))
        records = await asyncio.to_thread(records_of, [services])
        need = sum(record.budget_bytes for record in records)
        options = PoolOptions(
            state_dir=self._directory / "state",
            devices=(f"cpu:{-(-need // (1 << 20))}MiB",),
            worker_flags=("--threads", "1"),
            environment={"VLLM_CPU_ATTN_SPLIT_KV": "0"},
        )
        self._stack = AsyncExitStack()
        self._say("starting a pool, and loading both models")
        pool = await self._stack.enter_async_context(Pool(options))
        await control(pool.nats_url, "apply", {"records": [msgspec.to_builtins(record) for record in records]})
        host, _, port = pool.http_url.removeprefix("http://").rpartition(":")
        served = [
            Served(host=host, port=int(port), model=name, prompt=_Prompts(number, _vocabulary(source)))
            for number, (name, source) in enumerate(sources.items())
        ]
        try:
            for one in served:
                await one.ask(16, 2)
        except BaseException:
            await self._stack.aclose()
            raise
        return served

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


def _service(name: str, source: Path) -> str:
    return (
        f"---\napiVersion: llm.serving/v1\nkind: ModelService\nmetadata: {{name: {name}}}\nspec:\n"
        f"  source: {msgspec.json.encode(str(source)).decode()}\n"
        f"  sla: {{tpot_ms: {TPOT_S * 1000:.0f}}}\n  strategy: {{min_replicas: 1, pinned: true, max_wait_s: 280}}\n"
        f"  engine: {{type: vllm, dtype: bfloat16, max_num_seqs: {SLOTS}, max_context_len: {CONTEXT_TOKENS}, "
        f"kv_cache_bytes: {KV_BYTES}, options: {{max_num_batched_tokens: {STEP_TOKENS}}}}}\n"
    )


def _vocabulary(source: Path) -> int:
    return int(msgspec.json.decode((source / "config.json").read_bytes())["vocab_size"])


class _Prompts:
    """Token ids that were never sent before, so that no prefix is found in a cache."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._random = stream(seed, "reality-prompts")
        self._vocabulary = vocabulary

    def __call__(self, count: int) -> list[int]:
        # Special tokens have the lowest or the highest ids.
        return [int(token) for token in self._random.integers(100, min(self._vocabulary, 40_000) - 100, count)]


def main() -> None:
    """A command of its own for other lengths than the usual one."""
    import argparse
    import json

    parser = argparse.ArgumentParser(prog="python -m ops.simulator.reality", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="length of the load")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of measurement")
    given = parser.parse_args()
    begun_s = time.monotonic()
    say = lambda line: print(f"[{time.monotonic() - begun_s:5.0f} s] {line}", flush=True)  # noqa: E731
    figures = asyncio.run(compare(seed=given.seed, say=say, minutes=given.minutes, rounds=given.rounds))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
