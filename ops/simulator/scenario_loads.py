"""Scenarios with loads of their own: pulses, opposite moves, contention, impatient clients, classes under overload."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ops.simulator.models import sim_model
from ops.simulator.options import Patience, RunOptions
from ops.simulator.scenario import Figures, Outcome, Part, Say, capacity_rps, run_parts, steady_workload
from ops.simulator.traces.draws import stream
from ops.simulator.types import LoadLadder, Trace, Window, Workload
from ops.simulator.workloads import PULSE_AT_S, PULSE_QPS, PULSE_RISE_S, Steady, workload
from subjects.messages import SlaClass

INPUTS = (200, 600)
OUTPUTS = (200, 600)
LOADED = 0.65
"""Of what a replica carries, by which loads below are counted in replicas."""


def _rps(size: str, replicas: float) -> float:
    """Requests per second that so many replicas of a size carry with some room."""
    return LOADED * replicas * capacity_rps(sim_model(size, size), INPUTS, OUTPUTS)


# ---------------------------------------------------------------------------------------------------------------- pulse

STEP_QPS = (100.0, 400.0)
NEAR_S = (0.3, 3.0)
CALM_REPLICAS = 2


def pulse_workload(shape: str, warm_s: float) -> Workload:
    """OPS-9 round 3 (``ramp``), or its model going up in one step; loads take ``warm_s``."""
    made = workload("pulse")
    ladder = LoadLadder(warm_s=warm_s, cold_s=max(warm_s, made.ladder.cold_s))
    # An autoscaler starts from a split that suits the calm, as all days before the pulse have left it.
    static = made.static_replicas | {"pulsed": CALM_REPLICAS}
    if shape == "ramp":
        return replace(made, ladder=ladder, static_replicas=static)
    lines = (
        Steady(
            made.models[0],
            ((0.0, STEP_QPS[0]), (PULSE_AT_S, STEP_QPS[1])),
            input_tokens=(64, 192),
            output_tokens=(16, 48),
        ),
        Steady(made.models[1], ((0.0, 12.0),)),
        Steady(made.models[2], ((0.0, 30.0),)),
    )
    window = Window(0.0, 60.0, PULSE_AT_S + 60.0)
    return steady_workload("pulse-step", lines, window, made.pool.devices, static, ladder)


def pulse(seed: int, processes: int, say: Say) -> Figures:
    """From the pulse's begin to more capacity, and P99 in it over P99 before it, for ours and a per-model autoscaler."""
    asked = [
        *itertools.product(("ramp", "step"), NEAR_S, ("carpool",)),
        *itertools.product(("ramp", "step"), NEAR_S[1:], ("hpa",)),
    ]
    say(f"{len(asked)} runs of a pulse from {PULSE_QPS[0]:g} to {PULSE_QPS[1]:g} requests/s")
    parts = [
        Part(workload=pulse_workload, arguments=(shape, warm_s), policy=policy, seed=seed) for shape, warm_s, policy in asked
    ]
    figures: Figures = {}
    for (shape, warm_s, policy), outcome in zip(asked, run_parts(parts, processes), strict=True):
        key = f"{policy}_{shape}_warm_{warm_s:g}s"
        figures |= {f"{key}_{name}": value for name, value in pulse_figures(outcome, shape).items()}
    return figures


def pulse_figures(outcome: Outcome, shape: str) -> Figures:
    """Of one run."""
    over_s = PULSE_AT_S + (PULSE_RISE_S + 10.0 if shape == "ramp" else 10.0)
    before = outcome.among("pulsed", 0.0, PULSE_AT_S)
    during = outcome.among("pulsed", PULSE_AT_S, over_s)
    after = outcome.among("pulsed", over_s)
    result = outcome.run.result
    calm, pulsed = outcome.ttft(before, 0.99), outcome.ttft(during, 0.99)
    return {
        "new_capacity_s": outcome.replicas_grow_s("pulsed", PULSE_AT_S),
        "resource_move_s": round(result.resource_move_s, 6),
        "decision_to_effect_s": round(result.decision_to_effect_s, 6),
        "queue_over_s": outcome.queue_over_s("pulsed", PULSE_AT_S),
        "ttft_p99_before": calm,
        "ttft_p99_pulse": pulsed,
        "ttft_p99_after": outcome.ttft(after, 0.99),
        "p99_growth": round(pulsed / calm - 1.0, 4) if calm and pulsed else None,
        "within_slo": round(outcome.within_slo(outcome.among("pulsed", PULSE_AT_S)), 6),
        "slo_worst_model": round(result.slo_worst_model, 6),
        "refused": round(result.refused, 6),
        "gpu_hours": round(result.gpu_hours, 6),
    }


# ----------------------------------------------------------------------------------------------------------- contention


def contention_workload(models: tuple[str, ...], devices: int) -> Workload:
    """Those of OPS-9 round 2's models, with their own loads."""
    made = workload("contention")
    numbers = [number for number, model in enumerate(made.models) if model.name in models]

    def trace(seed: int, window: Window) -> Trace:
        whole = made.trace(seed, window)
        kept = np.isin(whole.model, numbers)
        place = np.zeros(len(made.models), np.int16)
        place[numbers] = np.arange(len(numbers))
        return Trace(whole.arrival_s[kept], place[whole.model[kept]], whole.input_tokens[kept], whole.output_tokens[kept])

    return replace(
        made,
        models=tuple(made.models[number] for number in numbers),
        trace=trace,
        pool=replace(made.pool, devices=devices),
        static_replicas={made.models[number].name: 1 for number in numbers},
    )


INTERFERENCE_MAX = 0.4


def contention(seed: int, processes: int, say: Say) -> Figures:
    """Interference of source on target: p95 of the target beside it over p95 alone at the same load, less one, from 0 to 1.

    Once per pair forced onto one GPU, and as a pool of two GPUs (three models, so some share one) and one of three place
    all. Devices are shared by time slices without gain here, so whoever shares one with an engine that always runs takes
    twice as long: within its SLO, but an interference of 1.
    """
    names = tuple(model.name for model in workload("contention").models)
    alone = [Part(workload=contention_workload, arguments=((name,), 1), policy="carpool", seed=seed) for name in names]
    pairs = list(itertools.combinations(names, 2))
    forced = [Part(workload=contention_workload, arguments=(pair, 1), policy="carpool", seed=seed) for pair in pairs]
    pools = (2, 3)
    together = [Part(workload=contention_workload, arguments=(names, gpus), policy="carpool", seed=seed) for gpus in pools]
    say(f"{len(names)} models alone, {len(pairs)} pairs on one GPU, all on two and on three")
    outcomes = run_parts([*alone, *forced, *together], processes)
    p95 = {name: outcomes[place].completion(outcomes[place].among(name), 0.95) for place, name in enumerate(names)}
    figures: Figures = {}
    for pair, outcome in zip(pairs, outcomes[len(names) : -len(pools)], strict=True):
        for target, source in (pair, pair[::-1]):
            figures[f"on_one_gpu_{source}_on_{target}"] = interference(p95[target], outcome, target)
    for gpus, outcome in zip(pools, outcomes[-len(pools) :], strict=True):
        pooled = {name: interference(p95[name], outcome, name) for name in names}
        result = outcome.run.result
        figures |= {f"on_{gpus}_gpus_on_{name}": value for name, value in pooled.items()}
        figures |= {
            f"on_{gpus}_gpus_worst": max(pooled.values()),
            f"on_{gpus}_gpus_ok": max(pooled.values()) <= INTERFERENCE_MAX,
            f"on_{gpus}_gpus_slo_worst_model": round(result.slo_worst_model, 6),
            f"on_{gpus}_gpus_gpu_hours": round(result.gpu_hours, 6),
            f"on_{gpus}_gpus_utilisation": round(result.utilisation, 4),
        }
    return figures | {"goal": INTERFERENCE_MAX}


def interference(alone_p95_s: float | None, outcome: Outcome, target: str) -> float:
    """SCH-7's definition as a share: max(0, p95 beside / p95 alone - 1), at most 1."""
    beside_s = outcome.completion(outcome.among(target), 0.95)
    if beside_s is None:
        return 1.0
    if not alone_p95_s:
        return 0.0
    return round(min(1.0, max(0.0, beside_s / alone_p95_s - 1.0)), 4)


# ------------------------------------------------------------------------------------------------- a pulse of 47 seconds

PULSE_47_AT_S = 600.0
PULSE_47_S = 47.0
TAIL_S = 1800.0


def pulse_47s_workload(tail_s: float, at_s: float) -> Workload:
    """Two replicas' worth of an 8B for ever, three times that for 47 s; beside it two steady models. The dedicated split is
    that of the calm, from which a per-model autoscaler starts too."""
    low = _rps("8B", 2)
    end_s = at_s + PULSE_47_S
    lines = (
        Steady(sim_model("8B", "pulsed"), ((0.0, low), (at_s, 3 * low), (end_s, low)), INPUTS, OUTPUTS),
        Steady(sim_model("14B", "steady-a"), ((0.0, _rps("14B", 1)),), INPUTS, OUTPUTS),
        Steady(sim_model("3.8B", "steady-b"), ((0.0, _rps("3.8B", 1)),), INPUTS, OUTPUTS),
    )
    static = {"pulsed": 2, "steady-a": 1, "steady-b": 1}
    return steady_workload("pulse-47s", lines, Window(0.0, at_s - 120.0, end_s + tail_s), 8, static, LoadLadder())


def pulse_47s(
    seed: int,
    processes: int,
    say: Say,
    tail_s: float = TAIL_S,
    at_s: float = PULSE_47_AT_S,
    policies: Sequence[str] = ("carpool", "hpa", "static"),
) -> Figures:
    """What a pulse costs under each: its requests within SLO, when capacity came, what was held in the half hour after."""
    say(f"a pulse of {PULSE_47_S:g} s under {', '.join(policies)}")
    parts = [Part(workload=pulse_47s_workload, arguments=(tail_s, at_s), policy=policy, seed=seed) for policy in policies]
    figures: Figures = {"pulse_s": PULSE_47_S, "tail_s": tail_s}
    end_s = at_s + PULSE_47_S
    for policy, outcome in zip(policies, run_parts(parts, processes), strict=True):
        held = np.array(outcome.series.gpus, np.float64)
        times = np.array(outcome.series.time_s)
        before = held[(times >= at_s - 120.0) & (times < at_s)].mean()
        tail = held[times >= end_s].mean()
        figures |= {
            f"{policy}_within_slo_in_pulse": round(outcome.within_slo(outcome.among("pulsed", at_s, end_s)), 6),
            f"{policy}_new_capacity_s": outcome.replicas_grow_s("pulsed", at_s),
            f"{policy}_ttft_p99_in_pulse": outcome.ttft(outcome.among("pulsed", at_s, end_s), 0.99),
            f"{policy}_gpus_before": round(float(before), 3),
            f"{policy}_gpus_in_tail": round(float(tail), 3),
            f"{policy}_idle_tail_gpu_hours": round(float(max(0.0, tail - before)) * tail_s / 3600, 4),
            f"{policy}_gpu_hours": round(outcome.run.result.gpu_hours, 4),
            f"{policy}_refused": round(outcome.run.result.refused, 6),
        }
    return figures


# -------------------------------------------------------------------------------------------------------- opposite moves

OPPOSITE_AT_S = 240.0


def opposite_workload(seconds: float) -> Workload:
    """A goes from two replicas' worth to four while B goes from four to two, on six GPUs: all that is there."""
    two, four = _rps("8B", 2), _rps("8B", 4)
    lines = (
        Steady(sim_model("8B", "doubles"), ((0.0, two), (OPPOSITE_AT_S, four)), INPUTS, OUTPUTS),
        Steady(sim_model("8B", "halves"), ((0.0, four), (OPPOSITE_AT_S, two)), INPUTS, OUTPUTS),
    )
    window = Window(0.0, 120.0, OPPOSITE_AT_S + seconds)
    return steady_workload("opposite", lines, window, 6, {"doubles": 2, "halves": 4}, LoadLadder())


def opposite(
    seed: int, processes: int, say: Say, seconds: float = 300.0, policies: Sequence[str] = ("carpool", "hpa", "static")
) -> Figures:
    """The pool is full on both sides of the move, so capacity has to change hands."""
    say(f"A doubles while B halves, under {', '.join(policies)}")
    parts = [Part(workload=opposite_workload, arguments=(seconds,), policy=policy, seed=seed) for policy in policies]
    figures: Figures = {}
    for policy, outcome in zip(policies, run_parts(parts, processes), strict=True):
        after = outcome.among("doubles", OPPOSITE_AT_S)
        result = outcome.run.result
        figures |= {
            f"{policy}_within_slo_doubles": round(outcome.within_slo(after), 6),
            f"{policy}_within_slo_halves": round(outcome.within_slo(outcome.among("halves", OPPOSITE_AT_S)), 6),
            f"{policy}_new_capacity_s": outcome.replicas_grow_s("doubles", OPPOSITE_AT_S),
            f"{policy}_ttft_p99_doubles": outcome.ttft(after, 0.99),
            f"{policy}_refused": round(result.refused, 6),
            f"{policy}_gpu_hours": round(result.gpu_hours, 4),
            f"{policy}_resource_move_s": round(result.resource_move_s, 4),
        }
    return figures


# ---------------------------------------------------------------------------------------------------- impatient clients

PATIENCE = Patience(wait_s=2.0, tries_max=3)


def impatient_workload(seconds: float) -> Workload:
    """One model that fills the pool, and for a minute twice what the pool can do; a small one beside it."""
    fills = _rps("14B", 4)
    at_s = 180.0
    lines = (
        Steady(sim_model("14B", "crowded"), ((0.0, fills), (at_s, 2.5 * fills), (at_s + 60.0, fills)), INPUTS, OUTPUTS),
        Steady(sim_model("3.8B", "beside"), ((0.0, _rps("3.8B", 0.5)),), INPUTS, OUTPUTS),
    )
    window = Window(0.0, 120.0, at_s + 60.0 + seconds)
    return steady_workload("impatient", lines, window, 5, {"crowded": 4, "beside": 1}, LoadLadder())


def impatient(
    seed: int, processes: int, say: Say, seconds: float = 240.0, policies: Sequence[str] = ("carpool", "static", "hpa")
) -> Figures:
    """Retries multiply an overload; whether the pool recovers from it, and what is left of its work for others."""
    say(f"clients that come again, under {', '.join(policies)}")
    parts = [
        Part(
            workload=impatient_workload,
            arguments=(seconds,),
            policy=policy,
            seed=seed,
            options=RunOptions(series_points_max=20_000, patience=patience),
        )
        for policy in policies
        for patience in (PATIENCE, None)
    ]
    outcomes = iter(run_parts(parts, processes))
    figures: Figures = {"gives_up_s": PATIENCE.wait_s, "tries_max": PATIENCE.tries_max}
    for policy in policies:
        for patience in ("impatient", "patient"):
            outcome = next(outcomes)
            result = outcome.run.result
            figures |= {
                f"{policy}_{patience}_within_slo": round(result.slo_all, 6),
                f"{policy}_{patience}_within_slo_beside": round(outcome.within_slo(outcome.among("beside")), 6),
                f"{policy}_{patience}_refused": round(result.refused, 6),
                f"{policy}_{patience}_ttft_p99": outcome.ttft(outcome.among("crowded"), 0.99),
                f"{policy}_{patience}_retries": int(result.extra.get("retries", 0.0)),
                f"{policy}_{patience}_within_slo_last_minute": round(
                    outcome.within_slo(outcome.among("crowded", begin_s=180.0 + seconds)), 6
                ),
            }
    return figures


# -------------------------------------------------------------------------------------------------------------- fairness

GOLD_SHARE, SILVER_SHARE = 0.3, 0.4


def fairness_workload(seconds: float) -> Workload:
    """One model on two GPUs with requests of three classes, and bursts of more than both GPUs can do."""
    rps = _rps("8B", 2)
    calm = ((0.0, rps),)
    bursts = tuple(
        piece
        for begin_s in np.arange(120.0, 120.0 + seconds, 90.0).tolist()
        for piece in ((begin_s + 30.0, 2.0 * rps), (begin_s + 60.0, rps))
    )
    line = Steady(sim_model("8B", "shared"), calm + bursts, INPUTS, OUTPUTS)
    made = steady_workload("fairness", (line,), Window(0.0, 120.0, 120.0 + seconds), 2, {"shared": 2}, LoadLadder())

    def trace(seed: int, window: Window) -> Trace:
        whole = made.trace(seed, window)
        drawn = stream(seed, "fairness").random(len(whole))
        classes = tuple(SlaClass)
        gold, silver, bronze = (classes.index(c) for c in (SlaClass.GOLD, SlaClass.SILVER, SlaClass.BRONZE))
        sla_class = np.where(drawn < GOLD_SHARE, gold, np.where(drawn < GOLD_SHARE + SILVER_SHARE, silver, bronze))
        return replace(whole, sla_class=sla_class.astype(np.uint8))

    return replace(made, trace=trace)


def fairness(seed: int, processes: int, say: Say, seconds: float = 540.0) -> Figures:
    """Attainment and latency by class in a pool that is too small at times, with classes taking turns and without."""
    say("three classes of one model, with fairness and without")
    parts = [
        Part(
            workload=fairness_workload,
            arguments=(seconds,),
            policy="carpool",
            seed=seed,
            options=RunOptions(series_points_max=2_000, fair=fair),
        )
        for fair in (True, False)
    ]
    figures: Figures = {}
    for word, outcome in zip(("with", "without"), run_parts(parts, processes), strict=True):
        measured = outcome.run.measured
        assert measured.sla_class is not None
        for number, sla_class in enumerate(SlaClass):
            mine = measured.sla_class == number
            if mine.any():
                figures |= {
                    f"{sla_class.value}_within_slo_{word}": round(outcome.within_slo(mine), 6),
                    f"{sla_class.value}_p95_s_{word}": outcome.completion(mine, 0.95),
                }
    return figures
