"""The models of the fixed workloads: costs of one replica on H100 80 GB, weights and KV.

A prefill of ``L`` tokens takes ``b L + c L**2`` and a decode step of a batch takes ``d + f batch + e context`` (context in
tokens over the whole batch). The table below is in milliseconds, as measurements are published; :func:`step_costs` turns it
into the seconds of ``StepCosts``. KV bytes per token are over all GPUs of a replica.

Checked against public measurements (``profiles/hardware``, ``tests/core/test_hardware.py``), none changed:

- 8B and 14B are the fits of the 7B and 14B models on H800 with vLLM of 2024 (``measured.csv``; 8B scaled by parameters);
  3.8B is scaled from 8B. ``e`` is KV bytes per token over 2 TB/s, 60 % of the bandwidth: the measured contexts are too short
  for a fit.
- Time per output token of whole servers under 4 to 128 requests at once (``served.csv``): 70B within 6 % (15 rows, median
  error 1.6 %), 32B median error 6 % (42 rows; up to 59 % too slow at 128 requests). 8B is 45 % slower than TensorRT-LLM on
  one H100 (42 rows): another engine than the one fitted, so it stays; what is simulated of the small models is on the slow
  side, for every policy alike.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ops.simulator.types import GB, SimModel, Trace
from subjects.messages import SlaClass, StepCosts


def step_costs(*, d: float, b: float, c: float, f: float, e: float) -> StepCosts:
    """Costs from milliseconds: ``b`` per prompt token, ``c`` per prompt token squared, ``d`` per step, ``f`` per request of
    the batch, ``e`` per token of context in the batch."""
    return StepCosts(
        prefill_token_s=b / 1000,
        prefill_token2_s=c / 1000,
        step_const_s=d / 1000,
        step_request_s=f / 1000,
        step_context_token_s=e / 1000,
    )


_MODELS: dict[str, tuple[StepCosts, float, int, int]] = {
    # costs in ms, weights in GB, KV bytes per token, GPUs
    "3.8B": (step_costs(d=6.4, b=0.0108, c=1e-7, f=0.060, e=6.5e-5), 7.6, 131_072, 1),
    "8B": (step_costs(d=8.8, b=0.0226, c=2e-7, f=0.098, e=6.5e-5), 16.0, 131_072, 1),
    "14B": (step_costs(d=13.2, b=0.0436, c=1.2e-6, f=0.142, e=9.8e-5), 29.0, 196_608, 1),
    "32B": (step_costs(d=13.6, b=0.0730, c=0.0, f=0.108, e=6.5e-5), 33.0, 131_072, 1),  # fp8
    "70B": (step_costs(d=11.0, b=0.0446, c=0.0, f=0.055, e=2.8e-5), 70.0, 163_840, 4),  # fp8, tensor parallel
}

SIZES = tuple(_MODELS)


def sim_model(
    size: str, name: str | None = None, *, sla_class: SlaClass = SlaClass.SILVER, ttft_s: float = 2.0, tpot_s: float = 0.1
) -> SimModel:
    """A model of one of ``SIZES`` under a name of its own."""
    costs, weights_gb, kv_bytes_per_token, gpus = _MODELS[size]
    return SimModel(
        name=name or size,
        costs=costs,
        weights_bytes=round(weights_gb * GB),
        kv_bytes_per_token=kv_bytes_per_token,
        gpus=gpus,
        sla_class=sla_class,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
    )


def work_s(model: SimModel, trace: Trace) -> npt.NDArray[np.float64]:
    """Seconds of a replica that each request takes beside the constant of its steps, which all running ones share."""
    costs = model.costs
    inputs = trace.input_tokens.astype(np.float64)
    outputs = trace.output_tokens.astype(np.float64)
    prefill = costs.prefill_token_s * inputs + costs.prefill_token2_s * inputs * inputs
    decode = outputs * (costs.step_request_s + costs.step_context_token_s * (inputs + outputs / 2))
    total: npt.NDArray[np.float64] = prefill + decode
    return total


def usable_share(model: SimModel) -> float:
    """Of a replica's time what is left for :func:`work_s` when its steps take the whole TPOT target."""
    return 1.0 - model.costs.step_const_s / model.tpot_s
