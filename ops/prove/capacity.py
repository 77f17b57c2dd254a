"""The proof of capacity: any model file is enough, one policy decides for all, and devices follow the load.

``moves`` runs vLLM engines whose files say nothing of costs; ``costs`` checks what the pool thinks that their steps take;
``overload`` and ``cases`` run simulated engines in real processes. ``seed`` changes prompts and the instants of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from functools import partial, update_wrapper
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from broker.core.plan.tunables import WAIT_BOUND_S
from ops.models import records_of
from ops.prove import judging
from ops.prove.capacity_cases import CASES, Faults
from ops.prove.stage import Seen, Stage, model
from ops.prove.workplace import Answer, Figures, Say, run_oracles, service
from profiles.costs import sums_between
from subjects import codec, names
from subjects.bus import BusMessage
from subjects.errors import CarpoolError
from subjects.ids import ReplicaId
from subjects.messages import ModelRecord, StepCosts, StepSums, WorkerSnapshot

TURN_S = 10.0
"""What a busy model may keep its place for while another of its class waits (SCH-4)."""
LOAD_S, SIMULATED_LOAD_S = 10.0, 5.0
"""What a load of a vLLM engine, and of a simulated one, may take beside others that work on the same two cores."""
BOUND_S_MAX = 30.0


async def run(say: Say, only: tuple[str, ...], seed: int = 0) -> dict[str, Any]:
    """All oracles (or those named in ``only``, which may name single cases too); each figure with its bound, and ``ok``."""
    cases = tuple(name for name in only if name in CASES)
    some = partial(prove_cases, names_of=cases or tuple(CASES))
    update_wrapper(some, prove_cases)
    oracles = (prove_moves, prove_costs, prove_overload, some)
    chosen = tuple(dict.fromkeys("cases" if name in CASES else name for name in only))
    return await run_oracles("capacity", oracles, say, chosen, seed)


# -------------------------------------------------------------------------------------------- devices that follow the load

MODELS = ("a", "b", "c")
PHASES = ("a", "b", "a", "b", "a")
"""The load moves from one to another and back, twice."""
PHASE_S = 40.0
HIGH_RPS, LOW_RPS = 3.0, 0.1
TOKENS = 16
LOADS_PER_MOVE_MAX = 3
"""The risen model, the third one that it may have to make room for, and one more: beyond that the pool thrashes."""


def _tiny(name: str, number: int) -> str:
    engine = "type: vllm, dtype: float32, max_context_len: 512, kv_cache_bytes: 64MiB"
    return service(name, f"builtin:tiny-{number}", engine, strategy="max_wait_s: 60")


async def prove_moves(directory: Path, rng: random.Random, say: Say) -> Figures:
    """Three vLLM models without a word on costs, and two devices with room for one each. The load moves between two of them;
    the third is asked now and then."""
    services = "".join(_tiny(name, number) for number, name in enumerate(MODELS))
    (directory / "before.yaml").write_text(services)
    records = await asyncio.to_thread(records_of, [directory / "before.yaml"])
    bound_s = _wait_bound_s(records[0], ahead=len(MODELS) - 2, turn_s=TURN_S, load_s=LOAD_S)
    answers: list[Answer] = []
    followed: list[float | None] = []
    device = f"cpu:{int(1.3 * records[0].budget_bytes) >> 20}MiB"
    async with Stage(directory, rng, say).pool(services, device, device, flags=("--threads", "1")) as seen:
        begun_s = time.monotonic()
        for number, busy in enumerate(PHASES):
            turned_s = time.monotonic()
            say(f"moves: {HIGH_RPS:g} requests a second for {busy}, {LOW_RPS:g} for c")
            answers += await _load(seen, rng, {busy: HIGH_RPS, "c": LOW_RPS}, PHASE_S)
            if number:
                followed.append(judging.followed_s(seen.samples, busy, turned_s))
                say(f"moves: {busy} has a device {followed[-1] or 0:.1f} s after the turn")
        ended_s = time.monotonic()
        timeline = await seen.get("timeline")
        for row in timeline:
            if row["action"] in ("load", "evict", "unload"):
                say(f"moves: {row['action']} {row['model']}: {row['reason']} ({row['outcome']})")
    lost = [answer for answer in answers if not answer.whole]
    for answer in lost[:3]:
        say(f"moves: {answer.model}: status {answer.status}, {answer.error or answer.finish_reason}")
    sla = records[0].sla
    shares = judging.attainment(answers, sla.ttft_p95_ms / 1000, sla.tpot_ms / 1000)
    used_s = judging.device_seconds(seen.samples, ended_s)
    static_s = judging.static_device_seconds(seen.samples, ended_s)
    in_time = sum(1 for took_s in followed if took_s is not None and took_s <= bound_s)
    longest_s = judging.longest_wait_s(answers)
    loads = sum(row["action"] == "load" for row in timeline)
    loads_max = len(MODELS) + LOADS_PER_MOVE_MAX * len(followed)
    figures = {
        "loads": loads,
        "loads_max": loads_max,
        "requests": len(answers),
        "requests_lost": len(lost),
        "moves": len(followed),
        "moves_followed": in_time,
        "moves_followed_s": [None if took_s is None else round(took_s, 1) for took_s in followed],
        "longest_wait_s": round(longest_s, 2),
        "longest_wait_bound_s": bound_s,
        "device_seconds": round(used_s, 1),
        "static_device_seconds": round(static_s, 1),
        "attainment": {name: round(share, 4) for name, share in shares.items()},
        "attainment_worst": round(min(shares.values()), 4),
        "moves_s": round(ended_s - begun_s, 1),
    }
    held = {
        "moves_followed == moves": in_time == len(followed),
        "requests_lost == 0": not lost,
        "longest_wait_s <= longest_wait_bound_s <= 30": longest_s <= bound_s <= BOUND_S_MAX,
        "device_seconds < static_device_seconds": used_s < static_s,
        "loads <= loads_max": loads <= loads_max,
    }
    return figures, held


def _wait_bound_s(record: ModelRecord, *, ahead: int, turn_s: float, load_s: float) -> float:
    """By the file alone: before anything runs."""
    answer_s = TOKENS * record.sla.tpot_ms / 1000
    bound_s = judging.wait_bound_s(
        turn_s=turn_s, answer_s=answer_s, load_s=load_s, ahead=ahead, bound_s_max=min(BOUND_S_MAX, record.max_wait_s)
    )
    return round(bound_s, 1)


async def _load(seen: Seen, rng: random.Random, rates: dict[str, float], seconds: float) -> list[Answer]:
    """Poisson arrivals for each model, open loop, and all their answers."""
    asked = []
    for name, rate in rates.items():
        at_s = rng.expovariate(rate)
        while at_s < seconds:
            prompt = f"Tell {rng.randrange(10**6)}"
            asked.append(seen.ask(name, TOKENS, prompt=prompt, delay_s=at_s, ignore_eos=True))
            at_s += rng.expovariate(rate)
    return list(await asyncio.gather(*asked))


# ------------------------------------------------------------------------------------------------------- what steps take

HELD_OUT_STEPS = 200
MEASURED_ERROR_MAX = 0.15
MEASURED_S_MAX = 120.0
BATCHES = (1, 2, 3, 5, 6, 4, 1, 7)


async def prove_costs(directory: Path, rng: random.Random, say: Say) -> Figures:
    """What the pool says that steps of a real model take, against 200 steps that nothing was fitted to: estimated before it
    was ever loaded, and measured."""
    engine = "type: vllm, dtype: float32, max_num_seqs: 8, max_context_len: 512, kv_cache_bytes: 256MiB"
    services = service("real", "builtin:smollm2-135m-instruct", engine, strategy="max_wait_s: 110")
    async with Stage(directory, rng, say).pool(services, "cpu:4GiB", flags=("--threads", "1")) as seen:
        try:
            estimated = await seen.row("costs", "real")
        except CarpoolError as error:
            return {"measured_error": None, "costs": str(error)}, {f"measured_error <= {MEASURED_ERROR_MAX:g}": False}
        say(f"costs: {estimated.get('source')} before it was loaded; waking it")
        answer = await seen.ask("real")

        measured: dict[str, Any] = {}
        deadline_s = time.monotonic() + MEASURED_S_MAX
        while not measured.get("whole") and time.monotonic() < deadline_s:
            await asyncio.sleep(1.0)
            measured = await seen.row("costs", "real")
        say(f"costs: {measured.get('source')} at {measured.get('points')} points; now steps that nothing was fitted to")
        async with _steps(seen) as windows:
            while sum(window.steps for window in windows) < HELD_OUT_STEPS and time.monotonic() < deadline_s + 120:
                for batch in BATCHES:
                    prompts = [" ".join("word" for _ in range(rng.randrange(3, 120))) for _ in range(batch)]
                    await asyncio.gather(*(seen.ask("real", 16, prompt=prompt, ignore_eos=True) for prompt in prompts))
    errors = {
        f"{source}_error": judging.cost_error(windows, msgspec.convert(row["costs"], StepCosts))
        for source, row in (("estimate", estimated), ("measured", measured))
    }
    off = errors["measured_error"]
    figures: dict[str, Any] = {name: None if error is None else round(error, 3) for name, error in errors.items()}
    figures |= {
        "held_out_steps": sum(window.steps for window in windows),
        "costs_sources": [estimated["source"], measured["source"]],
        "costs_points": measured["points"],
    }
    held = {
        f"measured_error <= {MEASURED_ERROR_MAX:g}": answer.whole and off is not None and off <= MEASURED_ERROR_MAX,
        "held_out_steps >= 200": figures["held_out_steps"] >= HELD_OUT_STEPS,
        "the costs are estimated first and measured then": figures["costs_sources"][0] == "estimated"
        and figures["costs_sources"][1] in ("measured", "corrected"),
    }
    return figures, held


@contextlib.asynccontextmanager
async def _steps(seen: Seen) -> Any:
    """Windows of engine steps, as agents tell of them."""
    from subjects.nats.bus import NatsBus

    windows: list[StepSums] = []
    last: dict[ReplicaId, StepSums] = {}

    def hear(message: BusMessage) -> None:
        for report in codec.decode(message.payload, WorkerSnapshot).replicas:
            if report.sums is not None:
                before = last.get(report.replica)
                last[report.replica] = report.sums
                if before is not None and report.sums.steps > before.steps:
                    windows.append(sums_between(before, report.sums))

    bus = await NatsBus.connect([seen.pool.nats_url], name="carpool-wiretap")
    try:
        await bus.subscribe(f"{names.PREFIX}.tel.worker.*", hear)
        yield windows
    finally:
        await bus.close()


# ------------------------------------------------------------------------------------------------------------- overload

OVERLOAD_DEVICES = 8
OVERLOAD_S = 60.0


async def prove_overload(directory: Path, rng: random.Random, say: Say) -> Figures:
    """Twelve models that never pause, eight devices with room for one each: nobody waits beyond the bound, and Gold waits
    less than Silver."""
    gold, silver = [f"gold-{number}" for number in range(4)], [f"silver-{number}" for number in range(8)]
    services = "".join(model(name, strategy=f"class: {name.partition('-')[0]}, max_wait_s: 60") for name in (*gold, *silver))
    (directory / "before.yaml").write_text(services)
    records = await asyncio.to_thread(records_of, [directory / "before.yaml"])
    ahead = -(-len(records) // OVERLOAD_DEVICES) - 1
    bound_s = _wait_bound_s(records[0], ahead=ahead, turn_s=WAIT_BOUND_S, load_s=SIMULATED_LOAD_S)
    async with Stage(directory, rng, say).pool(services, *["cpu:800MiB"] * OVERLOAD_DEVICES) as seen:
        answers = await seen.busy([*gold, *silver] * 2, OVERLOAD_S, TOKENS)
    lost = [answer for answer in answers if not answer.whole]
    for answer in lost[:3]:
        say(f"overload: {answer.model}: status {answer.status}, {answer.error or answer.finish_reason}")
    by_class = {kind: [a for a in answers if a.model.startswith(kind)] for kind in ("gold", "silver")}
    mean_s = {kind: fmean(judging.waits_s(some)) if some else float("inf") for kind, some in by_class.items()}
    longest_s = judging.longest_wait_s(answers)
    unserved = sorted({*gold, *silver} - {answer.model for answer in answers if answer.whole})
    figures = {
        "overload_answers": {kind: len(some) for kind, some in by_class.items()},
        "overload_lost": len(lost),
        "overload_unserved": unserved,
        "overload_longest_wait_s": round(longest_s, 2),
        "overload_longest_wait_bound_s": bound_s,
        "overload_mean_wait_s": {kind: round(value, 3) for kind, value in mean_s.items()},
    }
    held = {
        "overload_lost == 0": not lost and not unserved,
        "overload_longest_wait_s <= bound": longest_s <= bound_s,
        "Gold waits less than Silver": mean_s["gold"] < mean_s["silver"],
    }
    return figures, held


# ---------------------------------------------------------------------------------------------------------------- cases


async def prove_cases(directory: Path, rng: random.Random, say: Say, names_of: tuple[str, ...]) -> Figures:
    """Each case in a pool of its own."""
    faults: dict[str, Faults] = {}
    for name in names_of:
        begun_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="case-", dir=directory, ignore_cleanup_errors=True) as own:
            try:
                wrong = await CASES[name](Stage(Path(own), rng, say))
            except Exception as error:  # A case that breaks has failed; the others go on.
                wrong = [f"{type(error).__name__}: {error}".splitlines()[0]]
        if wrong:
            faults[name] = wrong
        say(f"cases: {name}: {'; '.join(wrong) or 'holds'} ({time.monotonic() - begun_s:.0f} s)")
    figures = {"cases": len(names_of), "cases_failed": len(faults), "cases_faults": faults}
    return figures, {"cases_failed == 0": not faults}
