"""How long an engine takes: fitted costs of one model on one kind of device, and the arithmetic on them (PRO-4).

One engine step that decodes ``batch`` requests holding ``context`` tokens in all takes
``step_const_s + step_request_s * batch + step_context_token_s * context`` seconds; prefilling a prompt of ``L`` tokens adds
``prefill_token_s * L + prefill_token2_s * L**2``. The form is that of the public fits in ``profiles/hardware``.

Capacity is counted in replicas: 1.0 is a whole device (or group of linked ones) busy all the time. An engine batches
continuously and takes waiting prompts before it decodes, so that

* a request of ``L`` input and ``n`` output tokens costs ``prefill(L)`` and, at a batch so large that the constant part of a
  step is shared by many, ``n * (step_request_s + step_context_token_s * (L + n / 2))`` of decoding: its *work*;
* a replica whose tokens may take ``T`` seconds each makes ``1 / T`` steps per second and eats ``step_const_s / T`` of its
  devices whatever its batch: its *standing share*;
* a load of ``r`` requests per second of work ``w`` each, on ``m`` replicas, needs ``r * w + m * step_const_s / T`` in all.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Sequence

import msgspec

from subjects.messages import CostPoint, DeviceKind, EngineType, ModelRecord, StepCosts, StepSums

LENGTH_CLASS_TOKENS_MAX = (512, 2048)
"""Upper ends of the short and the medium length class, in input tokens (SCH-5)."""
LENGTH_CLASSES = ("short", "medium", "long")


def length_class(input_tokens: int) -> int:
    """0 short, 1 medium, 2 long."""
    if input_tokens <= LENGTH_CLASS_TOKENS_MAX[0]:
        return 0
    return 1 if input_tokens <= LENGTH_CLASS_TOKENS_MAX[1] else 2


def prefill_s(costs: StepCosts, input_tokens: float) -> float:
    """Seconds of the whole replica to prefill one prompt alone; of a mean of tokens too."""
    return costs.prefill_token_s * input_tokens + costs.prefill_token2_s * input_tokens * input_tokens


def context_mean_tokens(input_tokens: float, output_tokens: float) -> float:
    """Tokens that a request holds on average while it decodes."""
    return input_tokens + output_tokens / 2


def decode_work_s(costs: StepCosts, input_tokens: float, output_tokens: float) -> float:
    """Seconds of decoding that a request adds to those it is batched with, without the constant part of the steps."""
    token_s = costs.step_request_s + costs.step_context_token_s * context_mean_tokens(input_tokens, output_tokens)
    return output_tokens * token_s


def standing_share(costs: StepCosts, tpot_s: float) -> float:
    """Share of its devices that a replica with anything to decode eats whatever its batch."""
    return costs.step_const_s / tpot_s


def step_s(costs: StepCosts, batch: int, context_tokens: float) -> float:
    """Seconds of one decode step of ``batch`` requests that hold ``context_tokens`` tokens in all; 0 for an empty batch."""
    if batch == 0:
        return 0.0
    return costs.step_const_s + costs.step_request_s * batch + costs.step_context_token_s * context_tokens


def engine_name(engine: EngineType, version: str) -> str:
    """Engine and version, as measurements are kept for; the engine alone where nobody told its version."""
    return f"{engine.value}-{version}" if version else engine.value


CHUNK_SHARE = 0.5
"""Of the time per token that the prompt part of one step may take."""
CHUNK_TOKENS = (256, 512, 1024, 2048, 4096, 8192)


def chunk_tokens(costs: StepCosts, tpot_s: float) -> int:
    """Prompt tokens that one step should prefill at most, so that the answers that run get their tokens in time.

    The engine's own default is sized for throughput: 8,192 tokens of a 70B model hold up every running answer for a third of
    a second, and a short answer has no other tokens to make good for it.
    """
    fitting = [tokens for tokens in CHUNK_TOKENS if prefill_s(costs, tokens) <= CHUNK_SHARE * tpot_s]
    return max(fitting, default=CHUNK_TOKENS[0])


# ------------------------------------------------------------------------------------------- costs fitted to what steps did

BESIDE_WEIGHT = 0.25
"""Of a point that was taken while a neighbour worked on the device."""
PRIOR_WEIGHT = 0.01
"""What holds a cost that no point tells of to its estimate, beside a point's relative error."""
REWEIGHTS = 20
_PARTS = StepCosts.__struct_fields__


def work_s(costs: StepCosts, sums: StepSums) -> float:
    """Seconds that steps of this work take."""
    return (
        costs.step_const_s * sums.steps
        + costs.step_request_s * sums.requests
        + costs.step_context_token_s * sums.context_tokens
        + costs.prefill_token_s * sums.prompt_tokens
        + costs.prefill_token2_s * sums.prompt_tokens2
    )


def is_sane(sums: StepSums) -> bool:
    """Whether steps were made that took a time, as no message from elsewhere need say."""
    counts = (sums.prompt_tokens, sums.prompt_tokens2, sums.requests, sums.context_tokens)
    return sums.steps > 0 and 0 < sums.busy_s < math.inf and min(counts) >= 0


def sums_between(before: StepSums, after: StepSums) -> StepSums:
    """What was done from one moment to a later one."""
    return StepSums(**{name: getattr(after, name) - getattr(before, name) for name in StepSums.__struct_fields__})


def knee(costs: StepCosts, input_tokens: float) -> float:
    """The batch at which a replica makes half of the tokens per second that any batch of such contexts could: beyond it,
    requests that join slow down each other more than they share. Infinite where they cost nothing beside the constant."""
    each_s = costs.step_request_s + costs.step_context_token_s * input_tokens
    return costs.step_const_s / each_s if each_s > 0 else math.inf


def sums_of(one: StepSums, other: StepSums, took_s: float = 0.0) -> StepSums:
    """Both together; ``took_s`` is added to their time."""
    both = {name: getattr(one, name) + getattr(other, name) for name in StepSums.__struct_fields__}
    return StepSums(**both | {"busy_s": both["busy_s"] + took_s})


def median_error(costs: StepCosts, measured: Sequence[StepSums]) -> float:
    """Median over measurements of how far the costs are off, relative to the time that each took; NaN without any."""
    errors = [abs(work_s(costs, sums) / sums.busy_s - 1.0) for sums in measured if sums.busy_s > 0]
    return statistics.median(errors) if errors else math.nan


def fit_costs(points: Sequence[CostPoint], prior: StepCosts) -> StepCosts:
    """Costs from measured points: least absolute relative errors, no cost negative.

    What the points leave open stays in proportion to ``prior``, an estimate of which only the proportions count.
    """
    taken = [point for point in points if is_sane(point.sums)]
    if not taken:
        return prior
    around = _scaled_to(taken, _floor(prior))
    rows = [
        [work_s(StepCosts(**(_NOTHING | {part: getattr(around, part)})), point.sums) for part in _PARTS] for point in taken
    ]
    weights = [BESIDE_WEIGHT if point.beside else 1.0 for point in taken]
    found = nonnegative(rows, [point.sums.busy_s for point in taken], weights=weights, ridge=PRIOR_WEIGHT)
    return StepCosts(**{part: factor * getattr(around, part) for part, factor in zip(_PARTS, found, strict=True)})


_NOTHING = dict.fromkeys(_PARTS, 0.0)


def _scaled_to(points: Sequence[CostPoint], prior: StepCosts) -> StepCosts:
    """The prior, its steps scaled to the points that decode and its prefill to what the others take beside their steps."""
    steps = msgspec.structs.replace(prior, prefill_token_s=0.0, prefill_token2_s=0.0)
    prefill = msgspec.structs.replace(prior, step_const_s=0.0, step_request_s=0.0, step_context_token_s=0.0)
    decoding = [point.sums for point in points if point.decodes]
    scale = statistics.median(sums.busy_s / work_s(steps, sums) for sums in decoding) if decoding else 1.0
    first = [
        max(sums.busy_s - scale * work_s(steps, sums), 0.1 * sums.busy_s) / work_s(prefill, sums)
        for sums in (point.sums for point in points if not point.decodes and point.sums.prompt_tokens)
    ]
    prefill_scale = statistics.median(first) if first else scale
    parts = {part: scale * getattr(steps, part) + prefill_scale * getattr(prefill, part) for part in _PARTS}
    return StepCosts(**parts)


def _floor(prior: StepCosts) -> StepCosts:
    """The prior with no part at zero, so that measurements may find one there."""
    return StepCosts(
        prefill_token_s=prior.prefill_token_s or 1e-9,
        prefill_token2_s=prior.prefill_token2_s or prior.prefill_token_s / 50_000,
        step_const_s=prior.step_const_s or 1e-6,
        step_request_s=prior.step_request_s or prior.step_const_s / 200,
        step_context_token_s=prior.step_context_token_s or prior.step_const_s / 1e6,
    )


def nonnegative(
    rows: Sequence[Sequence[float]],
    wanted: Sequence[float],
    *,
    scale: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
    ridge: float = 0.0,
    exact: float = 0.01,
) -> list[float]:
    """Coefficients of the columns, none negative, with the least sum of absolute errors relative to ``scale`` (``wanted``
    itself if None): a point that something else disturbed pulls no more than any other.

    By iteratively reweighted least squares; relative errors below ``exact`` count as none. A column whose coefficient would
    be negative is left out, the most negative first. ``ridge`` holds each coefficient to 1 with this weight.
    """
    scale = wanted if scale is None else scale
    given = weights or [1.0] * len(rows)
    scaled_rows = [[value / unit for value in row] for row, unit in zip(rows, scale, strict=True)]
    targets = [value / unit for value, unit in zip(wanted, scale, strict=True)]
    columns = len(rows[0])
    kept = list(range(columns))
    while True:
        pulls = list(given)
        solved = [0.0] * columns
        for _ in range(REWEIGHTS):
            solved = _least_squares(scaled_rows, targets, pulls, kept, ridge)
            misses = [abs(_dot(row, solved) - target) for row, target in zip(scaled_rows, targets, strict=True)]
            pulls = [weight / max(miss, exact) for weight, miss in zip(given, misses, strict=True)]
        worst = min(kept, key=lambda column: (solved[column], column))
        if solved[worst] >= 0 or len(kept) == 1:
            return [max(0.0, value) for value in solved]
        kept.remove(worst)


def _dot(row: Sequence[float], values: Sequence[float]) -> float:
    return math.fsum(map(operator.mul, row, values))


def _least_squares(
    rows: Sequence[Sequence[float]], targets: Sequence[float], pulls: Sequence[float], kept: Sequence[int], ridge: float
) -> list[float]:
    """Normal equations of the ``kept`` columns by Gauss elimination with pivots; the others get 0."""
    held = ridge * max(pulls)
    matrix = []
    for one in kept:
        line = [sum(pull * row[one] * row[other] for pull, row in zip(pulls, rows, strict=True)) for other in kept]
        line.append(sum(pull * row[one] * target for pull, row, target in zip(pulls, rows, targets, strict=True)) + held)
        matrix.append(line)
    size = len(kept)
    for place in range(size):
        matrix[place][place] += held
    for place in range(size):
        pivot = max(range(place, size), key=lambda index: (abs(matrix[index][place]), -index))
        matrix[place], matrix[pivot] = matrix[pivot], matrix[place]
        if abs(matrix[place][place]) < 1e-300:
            matrix[place][place] = math.inf  # a column of nothing: its coefficient is 0
        for index in range(place + 1, size):
            factor = matrix[index][place] / matrix[place][place]
            matrix[index] = [below - factor * above for below, above in zip(matrix[index], matrix[place], strict=True)]
    solved = [0.0] * len(rows[0])
    for place in reversed(range(size)):
        rest = matrix[place][size] - sum(matrix[place][index] * solved[kept[index]] for index in range(place + 1, size))
        solved[kept[place]] = rest / matrix[place][place]
    return solved


SEQUENCES = {DeviceKind.CPU: 8, DeviceKind.GPU: 64}
"""Requests at once where a model's file says nothing: a CPU computes no faster for more, a GPU reads its weights for 64
requests as fast as for one."""


def sequences(record: ModelRecord, kind: DeviceKind) -> int:
    """Requests that a replica of a model runs at once on this kind of device."""
    return record.max_num_seqs or SEQUENCES[kind]
