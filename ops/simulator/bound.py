"""What no schedule can go below: the least device time that the requests of a workload take (OPS-6).

Everything here is a lower bound on what the simulator counts as GPU-hours, under *any* policy, past or future known, that
keeps ``share`` of each model's requests within their SLO. The argument, for one model (``d f e`` are the constant, per
request and per context token parts of a step, ``b c`` those of a prefill, ``T`` the target of the mean TPOT):

**Work.** A device that two replicas share is not faster for it (if a pool says it is, work counts that much less), so the
device time of all engine steps is at most the time for which devices hold something. A step with the requests R, of
contexts c_r, takes ``d + sum over R (f + e c_r)``; for one whose prompt is prefilled in it, ``b L + c L**2`` stands in
place of ``f + e c_r``. All but ``d`` belongs to one request. ``d`` is shared: what of it a request bears per step (its
*share*) is a price, and a rule for it is valid when in every possible step the shares of the charged requests sum to at
most what there is. Four such rules:

- ``slots``: at most ``slots`` requests are in a step, so each bears ``d / slots``.
- ``pages``: their contexts fit in the K tokens of KV that the replica's devices hold beside the weights: ``d c_r / K``.
- ``pace``: take any schedule and let s_j be the time of step j. Each charged request r has
  ``sum of s_j over its n_r - 1 decode steps <= (n_r - 1) T``: a mean, so single steps may be longer. With multipliers
  ``m_r = k a_r >= 0``, ``a_r = f + e L_r`` its least cost per step, ``A_j`` the step's sum of ``f + e c_r`` and ``M_j`` that
  of ``m_r``, ``sum s_j >= sum [s_j (1 + M_j) - T M_j] >= sum [A_j + (d + A_j M_j) - (T - d) M_j]``. ``A_j`` is at least
  ``a = sum of a_r`` and ``M_j`` is ``k a``, so the bracket is at least ``A_j + a (2 sqrt(d k) - (T - d) k)`` for every k; at
  its maximum, ``k = d / (T - d)**2``, each request bears ``a_r d / (T - d)``. (It equals d over the batch whose step takes
  just T: no mixture of longer and shorter steps beats the even one.)
- ``apart``: two requests whose lives (arrival to the latest finish within SLO) do not meet share no step. For any set of
  requests with disjoint lives each step of theirs costs a whole ``d``; weighted interval scheduling finds the heaviest set.

Two rules mixed within one model are not valid, so the best one is chosen per model and piece of time. A token can also come
out of a second prefill, after a preemption or an interruption. It bears the same share of that step, and ``b`` times its
context at least; so ``f + e c_r`` is never charged above that. In ``pace`` only requests count for which it makes no
difference.

**Residency.** A model's weights lie on its devices from the start of a load until what it decodes is done. A first token at
F needs a replica that has been loading or ready since ``F - prefill - load_s``; F lies in [arrival + prefill, arrival + TTFT
target], so the model is resident over the section of all these intervals. Requests with disjoint lives need, one after the
other, their load (or having been ready that long), prefill and own decode steps. How many devices so many resident models
take is bin packing: with a dual-feasible function u (Fekete and Schepers 2001: sum x <= 1 implies sum u(x) <= 1) of the
weights' part of a device, or 1 / ``models_per_device_max`` for each, the devices at any instant are at least the sum of u.

**Time.** Work may be done before or after an interval if the SLO allows; only what must fall within it counts, so a window
cuts its edges generously. The window is halved again and again, and where work or residency in the halves come to more than
in the whole, they count.

**Share.** All is a sum of charges to single requests, valid whichever requests are served badly. So of each model's charges
the greatest are left out, as many as there are requests that may miss their SLO.

**Errors of profiles.** The simulator's devices are faster or slower than their profile; ``factors`` are the least by model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import overload

import numpy as np
import numpy.typing as npt

from ops.simulator.types import DEVICE_BYTES, SimModel, Trace, Window, Workload
from subjects.messages import StepCosts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PIECE_S_MIN = 60.0
"""Pieces of a window are not halved below this."""
APART_REQUESTS_MAX = 20_000
"""Of more requests at once hardly any live apart: the rule is not tried."""
USUAL_FAILING = 0.01
PACKING_K_MAX = 16
"""Dual-feasible functions tried."""


class Sharing(StrEnum):
    """Which rule divides a step's constant part among its requests (see the module's text)."""

    SLOTS = "slots"
    PAGES = "pages"
    PACE = "pace"
    APART = "apart"


EVERYWHERE = (Sharing.SLOTS, Sharing.PAGES, Sharing.PACE)
"""Rules that need only the request itself."""


@overload
def least_work_s(
    model: SimModel, input_tokens: int, output_tokens: int, sharing: Sharing | None = None, device_bytes: int = DEVICE_BYTES
) -> float: ...
@overload
def least_work_s(
    model: SimModel,
    input_tokens: npt.NDArray[np.integer],
    output_tokens: npt.NDArray[np.integer],
    sharing: Sharing | None = None,
    device_bytes: int = DEVICE_BYTES,
) -> Floats: ...
def least_work_s(
    model: SimModel,
    input_tokens: int | npt.NDArray[np.integer],
    output_tokens: int | npt.NDArray[np.integer],
    sharing: Sharing | None = None,
    device_bytes: int = DEVICE_BYTES,
) -> float | Floats:
    """Device-seconds, over all devices of the replica, that requests within their SLO take at least under any schedule.

    Sums of it are lower bounds as long as all requests of a model were charged by one rule. Without ``sharing`` that is the
    rule with the greatest sum over the given requests, so give all of a model's requests in one call.
    """
    inputs = np.atleast_1d(np.asarray(input_tokens, np.int64))
    outputs = np.atleast_1d(np.asarray(output_tokens, np.int64))
    steps = np.maximum(outputs - 1, 0)
    rules = EVERYWHERE if sharing is None else (sharing,)
    work = max(
        (_work_s(model, inputs, steps, steps, rule, device_bytes) for rule in rules), key=lambda found: float(found.sum())
    )
    return work if isinstance(input_tokens, np.ndarray) else float(work[0])


def _prefill_s(model: SimModel, tokens: Ints | Floats) -> Floats:
    length = tokens.astype(np.float64)
    return np.asarray(model.costs.prefill_token_s * length + model.costs.prefill_token2_s * length * length, np.float64)


def _work_s(
    model: SimModel, inputs: Ints, steps: Ints, steps_all: Ints, sharing: Sharing | None, device_bytes: int
) -> Floats:
    """Prefill and the first ``steps`` of ``steps_all`` decode steps, times devices; without a rule nothing of ``d``."""
    costs = model.costs
    d, f, e, b = costs.step_const_s, costs.step_request_s, costs.step_context_token_s, costs.prefill_token_s
    own_s = _prefill_s(model, inputs) + _sum_capped(f, e, b, inputs + 1, steps)
    shared_s: Floats = np.zeros(len(inputs))
    match sharing:
        case Sharing.SLOTS:
            shared_s += (steps + 1) * (d / model.slots)
        case Sharing.PAGES:
            tokens_max = model.kv_bytes_alone(device_bytes) / model.kv_bytes_per_token
            contexts = (steps + 1) * (inputs + steps / 2)
            shared_s += contexts * (d / tokens_max) if tokens_max > 0 else 0.0
        case Sharing.PACE:
            least_s = f + e * inputs
            # The budget is of all steps: of a request that is not wholly inside, the steps inside may be slow ones.
            counts = (steps == steps_all) & (b * inputs >= least_s)
            shared_s += np.where(counts, steps * least_s * d / (model.tpot_s - d), 0.0) if model.tpot_s > d else 0.0
        case Sharing.APART:
            shared_s += (steps + 1) * d
        case None:
            pass
    return np.asarray((own_s + shared_s) * model.gpus, np.float64)


def _sum_capped(per_token: float, per_context: float, cap: float, first: Ints, count: Ints) -> Floats:
    """Sum over contexts x = first, first + 1, ..., ``count`` of them, of min(per_token + per_context * x, cap * x)."""
    total = count.astype(np.float64)
    start = first.astype(np.float64)
    crossing = per_token / (cap - per_context) if cap > per_context else math.inf
    capped = np.clip(np.ceil(crossing - start), 0.0, total)
    rest = total - capped
    sum_capped = capped * start + capped * (capped - 1) / 2
    sum_rest = rest * (start + capped) + rest * (rest - 1) / 2
    return np.asarray(cap * sum_capped + per_token * rest + per_context * sum_rest, np.float64)


# ------------------------------------------------------------------------------------------------------------ one model


@dataclass(frozen=True, slots=True)
class _Requests:
    """The requests of one model that arrive in the window, by arrival; times in seconds."""

    model: SimModel
    arrival_s: Floats
    inputs: Ints
    steps: Ints
    latest_s: Floats
    """When the last token must have come."""
    step_s_min: Floats
    """Least time of one of its decode steps."""

    @property
    def first_s_max(self) -> Floats:
        return self.arrival_s + self.model.ttft_s

    def must_step_by(self, end_s: float) -> Ints:
        """Decode steps that must have ended by ``end_s``: the others, one after the other, fit before the latest finish."""
        after = np.ceil(np.maximum(self.latest_s - end_s, 0.0) / self.step_s_min - 1e-9)
        return np.asarray(np.clip(self.steps - after, 0, self.steps), np.int64)


def _requests(workload: Workload, trace: Trace, window: Window, factors: Sequence[float]) -> list[_Requests]:
    inside = (trace.arrival_s >= window.begin_s) & (trace.arrival_s < window.end_s)
    found = []
    for index, profile in enumerate(workload.models):
        model = scaled(profile, factors[index])
        mine = np.flatnonzero(inside & (trace.model == index))
        inputs = trace.input_tokens[mine].astype(np.int64)
        steps = np.maximum(trace.output_tokens[mine].astype(np.int64) - 1, 0)
        arrival_s = trace.arrival_s[mine]
        costs = model.costs
        own_s = np.minimum(
            costs.step_request_s + costs.step_context_token_s * (inputs + 1), costs.prefill_token_s * (inputs + 1)
        )
        found.append(
            _Requests(
                model=model,
                arrival_s=arrival_s,
                inputs=inputs,
                steps=steps,
                latest_s=arrival_s + model.ttft_s + model.tpot_s * steps,
                step_s_min=np.maximum(costs.step_const_s + own_s, 1e-9),
            )
        )
    return found


def _apart(begin_s: Floats, end_s: Floats, weight: Floats) -> npt.NDArray[np.bool_]:
    """The heaviest set of intervals no two of which meet (weighted interval scheduling)."""
    order = np.argsort(end_s, kind="stable")
    begins, ends, weights = begin_s[order], end_s[order], weight[order]
    before = np.searchsorted(ends, begins, side="right").tolist()
    best = [0.0] * (len(order) + 1)
    for i, w in enumerate(weights.tolist()):
        # Its own end is not before its own begin, so ``before[i] <= i``.
        best[i + 1] = max(best[i], best[min(before[i], i)] + w)
    chosen = np.zeros(len(order), bool)
    i = len(order)
    while i > 0:
        if best[i] > best[i - 1]:
            chosen[order[i - 1]] = True
            i = min(before[i - 1], i - 1)
        else:
            i -= 1
    return chosen


def _work_within(requests: _Requests, begin_s: float, end_s: float, device_bytes: int) -> Floats:
    """Charges for work that must be done between the two times, by the best rule; zero for other requests."""
    model = requests.model
    steps = requests.must_step_by(end_s)
    inside = (requests.arrival_s >= begin_s) & ((requests.first_s_max <= end_s) | (steps > 0))
    charges = np.zeros(len(inside))
    mine = np.flatnonzero(inside)
    if not len(mine):
        return charges
    inputs, some, all_steps = requests.inputs[mine], steps[mine], requests.steps[mine]
    rules: dict[str, Floats] = {rule: _work_s(model, inputs, some, all_steps, rule, device_bytes) for rule in EVERYWHERE}
    if len(mine) <= APART_REQUESTS_MAX:
        plain = _work_s(model, inputs, some, all_steps, None, device_bytes)
        alone = _work_s(model, inputs, some, all_steps, Sharing.APART, device_bytes)
        lives_end = np.minimum(requests.latest_s[mine], end_s)
        chosen = _apart(requests.arrival_s[mine], lives_end, alone - plain)
        rules[Sharing.APART] = np.where(chosen, alone, plain)
    charges[mine] = max(rules.items(), key=lambda found: (_kept_s(found[1]), found[0]))[1]
    return charges


def _kept_s(charges: Floats) -> float:
    """About what is left of charges once the costliest hundredth may fail; for choosing between valid charges only."""
    drop = round(len(charges) * USUAL_FAILING)
    return float(charges.sum() - (np.partition(charges, -drop)[-drop:].sum() if drop else 0.0))


def _resident_within(requests: _Requests, begin_s: float, end_s: float, load_s: float) -> Floats:
    """Charges for time for which the model must be resident between the two times: the better of two ways to count."""
    model = requests.model
    prefill_s = _prefill_s(model, requests.inputs)
    # The section of [F - prefill - load, F] over all first tokens F; each instant is charged to the request that starts it.
    core_begin_s = np.clip(requests.first_s_max - prefill_s - load_s, begin_s, end_s)
    core_end_s = np.clip(requests.arrival_s + prefill_s, begin_s, end_s)
    order = np.argsort(core_begin_s, kind="stable")
    reached_s = np.maximum.accumulate(np.concatenate(([begin_s], core_end_s[order])))[:-1]
    union = np.zeros(len(order))
    union[order] = np.maximum(core_end_s[order] - np.maximum(core_begin_s[order], reached_s), 0.0)
    if len(order) > APART_REQUESTS_MAX:
        return union
    steps = requests.must_step_by(end_s)
    mine = np.flatnonzero(
        (requests.arrival_s - load_s >= begin_s)
        & (requests.arrival_s < end_s)
        & ((requests.first_s_max <= end_s) | (steps > 0))
    )
    need_s = load_s + prefill_s[mine] + requests.step_s_min[mine] * steps[mine]
    lives_end_s = np.minimum(requests.latest_s[mine], end_s)
    chosen = _apart(requests.arrival_s[mine] - load_s, lives_end_s, need_s)
    apart = np.zeros(len(order))
    apart[mine] = np.where(chosen, need_s, 0.0)
    return max(union, apart, key=lambda found: float(found.sum()))


def _device_parts(models: tuple[SimModel, ...], k: int, workload: Workload) -> Floats:
    """Per model, of how many devices a resident replica takes its part, by dual-feasible function ``k``.

    0: a device holds at most ``models_per_device_max``; 1: the weights' bytes; above: ``u(x) = x`` where ``k x`` is whole,
    else ``floor(k x) / (k - 1)``.
    """
    room = workload.pool.device_bytes
    parts = []
    for model in models:
        held = -(-model.weights_bytes // model.gpus)
        if k == 0:
            part = 1.0 / workload.pool.models_per_device_max
        elif k == 1 or (k * held) % room == 0:
            part = held / room
        else:
            part = (k * held // room) / (k - 1)
        parts.append(part * model.gpus)
    return np.asarray(parts, np.float64)


# --------------------------------------------------------------------------------------------------------------- window


@dataclass(frozen=True, slots=True)
class _Piece:
    """Charges per model and request within a piece of the window, and what they come to."""

    charges: list[Floats]
    total_s: float
    work_s: float
    """Of the total, what is work and not residency."""


@dataclass(frozen=True, slots=True)
class Charges:
    """A window's device-seconds, charged to the requests that arrived there, by model. Those of several windows add up."""

    models: tuple[Floats, ...]
    hours: float
    work_part: float
    """Of the sum, what came from pieces in which work was more than residency."""


def charges_of(workload: Workload, trace: Trace, window: Window, factors: Sequence[float] | None = None) -> Charges:
    """The charges of one window. ``factors`` are the least of each model: how many times its profile's times it takes."""
    models = _requests(workload, trace, window, factors or [1.0] * len(workload.models))
    piece = _best(workload, models, window.begin_s, window.end_s)
    return Charges(
        models=tuple(piece.charges),
        hours=(window.end_s - window.begin_s) / 3600,
        work_part=piece.work_s / piece.total_s if piece.total_s > 0 else 1.0,
    )


def least_gpu_hours(windows: Sequence[Charges], share: float = 0.99) -> float:
    """GPU-hours of some windows together below which no schedule can keep ``share`` of each model's requests within SLO."""
    total_s = 0.0
    for model in zip(*(window.models for window in windows), strict=True):
        charges = np.sort(np.concatenate(model))
        # The costliest may fail, in whichever window they are.
        total_s += float(charges[: len(charges) - math.floor((1.0 - share) * len(charges) + 1e-9)].sum())
    return total_s / 3600


def bound(
    workload: Workload, trace: Trace, window: Window, share: float = 0.99, factors: Sequence[float] | None = None
) -> float:
    """:func:`least_gpu_hours` of one window by itself."""
    return least_gpu_hours([charges_of(workload, trace, window, factors)], share)


def least_factors(workload: Workload, seed: int, error_sigma: float) -> list[float]:
    """By model, how many times its profile's times it takes on its fastest device under this seed."""
    from ops.simulator.device import error_factors

    return [min(by_device) for by_device in error_factors(seed, len(workload.models), workload.pool.devices, error_sigma)]


def bound_windows(workload: Workload, seed: int, share: float = 0.99, error_sigma: float | None = None) -> float:
    """:func:`least_gpu_hours` of all windows of a workload, with the devices of this seed."""
    from ops.simulator.options import RunOptions

    factors = least_factors(workload, seed, RunOptions().error_sigma if error_sigma is None else error_sigma)
    windows = [charges_of(workload, workload.trace(seed, window), window, factors) for window in workload.windows]
    return least_gpu_hours(windows, share)


def scaled(model: SimModel, factor: float) -> SimModel:
    """The model on a device that takes ``factor`` times as long for everything."""
    costs = model.costs
    return replace(
        model,
        costs=StepCosts(
            prefill_token_s=costs.prefill_token_s * factor,
            prefill_token2_s=costs.prefill_token2_s * factor,
            step_const_s=costs.step_const_s * factor,
            step_request_s=costs.step_request_s * factor,
            step_context_token_s=costs.step_context_token_s * factor,
        ),
    )


def _best(workload: Workload, models: list[_Requests], begin_s: float, end_s: float) -> _Piece:
    whole = _piece(workload, models, begin_s, end_s)
    if end_s - begin_s < 2 * PIECE_S_MIN:
        return whole
    middle_s = (begin_s + end_s) / 2
    first = _best(workload, models, begin_s, middle_s)
    second = _best(workload, models, middle_s, end_s)
    if first.total_s + second.total_s <= whole.total_s:
        return whole
    charges = [a + b for a, b in zip(first.charges, second.charges, strict=True)]
    return _Piece(charges, first.total_s + second.total_s, first.work_s + second.work_s)


def _piece(workload: Workload, models: list[_Requests], begin_s: float, end_s: float) -> _Piece:
    """The greater of work and residency in one piece."""
    gain = max(1.0, workload.pool.shared_efficiency)
    work = [_work_within(requests, begin_s, end_s, workload.pool.device_bytes) / gain for requests in models]
    work_s = float(sum(charges.sum() for charges in work))
    load_s = min(workload.ladder.warm_s, workload.ladder.cold_s)
    resident = [_resident_within(requests, begin_s, end_s, load_s) for requests in models]
    resident_s = np.asarray([float(charges.sum()) for charges in resident])
    parts = max(
        (_device_parts(workload.models, k, workload) for k in range(PACKING_K_MAX + 1)),
        key=lambda candidate: float(candidate @ resident_s),
    )
    if work_s >= float(parts @ resident_s):
        return _Piece(work, work_s, work_s)
    charges = [seconds * part for seconds, part in zip(resident, parts, strict=True)]
    return _Piece(charges, float(parts @ resident_s), 0.0)
