"""A pool of four devices and three models that is simulated in a moment, and a policy that does as it is told."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from broker.core.plan.policy import Action, Decision, PoolView, StartReplica
from ops.simulator.models import sim_model
from ops.simulator.traces.draws import poisson, stream
from ops.simulator.types import LoadLadder, PolicyContext, PoolSpec, SimModel, Trace, Window, Workload

SMALL, MIDDLE, LARGE = sim_model("3.8B", "small"), sim_model("8B", "middle"), sim_model("70B", "large")
WINDOW = Window(0.0, 10.0, 40.0)
Step = Callable[[PoolView], tuple[Action, ...]]


def drawn(rps: tuple[float, ...], inputs: int = 600, outputs: int = 60) -> Callable[[int, Window], Trace]:
    """Poisson arrivals by model, lengths up to these."""

    def trace(seed: int, window: Window) -> Trace:
        columns = []
        for model, rate in enumerate(rps):
            draws = stream(seed, "small", model)
            arrival_s = poisson(draws, rate, window.end_s - window.warmup_s) + window.warmup_s
            count = len(arrival_s)
            columns.append(
                (arrival_s, np.full(count, model), draws.integers(1, inputs, count), draws.integers(1, outputs, count))
            )
        arrival_s, model_at, input_tokens, output_tokens = (np.concatenate(parts) for parts in zip(*columns, strict=True))
        order = np.argsort(arrival_s, kind="stable")
        return Trace(
            arrival_s=arrival_s[order],
            model=model_at[order].astype(np.int16),
            input_tokens=input_tokens[order].astype(np.int32),
            output_tokens=output_tokens[order].astype(np.int32),
        )

    return trace


def given(*asks: tuple[float, int, int, int], sla_class: tuple[int, ...] | None = None) -> Callable[[int, Window], Trace]:
    """These very requests: arrival, model, input tokens, output tokens."""
    columns = list(zip(*asks, strict=True)) if asks else [(), (), (), ()]

    def trace(seed: int, window: Window) -> Trace:
        return Trace(
            arrival_s=np.array(columns[0], np.float64),
            model=np.array(columns[1], np.int16),
            input_tokens=np.array(columns[2], np.int32),
            output_tokens=np.array(columns[3], np.int32),
            sla_class=None if sla_class is None else np.array(sla_class, np.uint8),
        )

    return trace


def small_workload(
    trace: Callable[[int, Window], Trace],
    *,
    models: tuple[SimModel, ...] = (SMALL, MIDDLE, LARGE),
    devices: int = 4,
    window: Window = WINDOW,
    ladder: LoadLadder | None = None,
    host_bytes: int = 2_000_000_000_000,
) -> Workload:
    """One node of linked devices."""
    return Workload(
        name="small",
        models=models,
        windows=(window,),
        trace=trace,
        pool=PoolSpec(devices=devices, host_bytes=host_bytes),
        static_replicas={model.name: 1 for model in models},
        ladder=ladder or LoadLadder(),
    )


class Scripted:
    """Takes its actions at given times; steps are ``(time, function of the view)``, in order."""

    name = "scripted"

    def __init__(self, *steps: tuple[float, Step], wakes_cold_models: bool = False, cold_loads: bool = False) -> None:
        self._steps = list(steps)
        self.wakes_cold_models = wakes_cold_models
        self.cold_loads = cold_loads
        self.views: list[PoolView] = []

    def __call__(self, context: PolicyContext) -> Scripted:
        """Itself, as a factory."""
        return self

    def decide(self, now_s: float, view: PoolView) -> Decision:
        """The steps that are due."""
        self.views.append(view)
        actions: list[Action] = []
        while self._steps and self._steps[0][0] <= now_s:
            actions += self._steps.pop(0)[1](view)
        return Decision(actions=tuple(actions))


def start(model: SimModel, *numbers: int, kv_bytes: int | None = None, victims: tuple[SimModel, ...] = ()) -> Step:
    """Starts a replica on the devices of these places; the first replica of each of ``victims`` leaves."""

    def step(view: PoolView) -> tuple[Action, ...]:
        keys = list(view.devices)
        return (
            StartReplica(
                model.deployment,
                tuple(keys[number] for number in numbers),
                "told to",
                victims=tuple(view.models[victim.deployment].replicas[0].replica for victim in victims),
                kv_bytes=kv_bytes,
            ),
        )

    return step
