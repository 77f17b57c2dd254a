"""A capacity profile measured in small (PRO-4): prefill and decode times of one served model, and the fitted coefficients.

Measured through the pool's own endpoint with the device exclusive, so that what the gateway, the bus and the client
take on the same cores is in the figures, as it will be under load. Each point is repeated over several rounds, trimmed
by 10 % at each end, and its median kept. What does not depend on the engine's work (HTTP, ticket, claim, the first
frame's way back) comes out as a constant per request.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ops.simulator.reality_client import Timed, ask, body
from profiles.costs import nonnegative, prefill_s
from subjects.errors import CarpoolError
from subjects.messages import StepCosts

BATCHES = (1, 2, 4, 8)
DECODE_INPUTS = (16, 192, 640)
DECODE_TOKENS = 24
PREFILL_INPUTS = (16, 64, 128, 256, 512, 768)
ROUNDS = 4
TRIM = 0.1
TRIES_MAX = 3
EXACT = 1e-4
"""Relative errors below this count as none."""
PROBE_TOKENS = 64
PROBES = 6
BACKGROUND_TOKENS = 600
STEP_TOKENS = 1 << 30
"""Of an engine that prefills a whole prompt in one step."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulator needs to stand in for a served model. ``errors`` are relative, of the fit at its own points."""

    costs: StepCosts
    request_s: float
    """Constant per request before its first token that no engine time belongs to."""
    end_s: float
    """From the last token to the end of the stream."""
    prefill_error: float
    decode_error: float
    own_busy_s: float = 0.0
    """The constant of a request that finds its engine at work: its ticket, claim and prompt are handled beside a step."""
    other_busy_s: float = 0.0
    """Where the other engine is at work."""
    both_busy_s: float = 0.0
    """Where both are."""
    beside_rate: float = 1.0
    """How fast the engine is while the other works too, as a share of alone."""


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """Time from sending to the first token of a prompt alone."""

    input_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Time of one step of ``batch`` requests with ``context`` tokens in all."""

    batch: int
    context: float
    seconds: float


def trimmed_median(values: Sequence[float], trim: float = TRIM) -> float:
    """Median after dropping ``trim`` of the values at each end."""
    ordered = sorted(values)
    cut = int(len(ordered) * trim)
    return statistics.median(ordered[cut : len(ordered) - cut])


def fit(
    prefills: Sequence[PrefillPoint], decodes: Sequence[DecodePoint], end_s: float, step_tokens: int = STEP_TOKENS
) -> Profile:
    """Least absolute relative errors, no coefficient negative.

    A prompt alone takes ``request_s + steps step_const_s + prefill_token_s L + prefill_token2_s L**2``: a step costs its
    constant also while nobody decodes, and prefills ``step_tokens`` at most.
    """
    const_s, per_request_s, per_context_s = nonnegative(
        [[1.0, point.batch, point.context] for point in decodes], [point.seconds for point in decodes], exact=EXACT
    )
    constants_s = [const_s * -(-point.input_tokens // step_tokens) for point in prefills]
    request_s, per_token_s, per_token2_s = nonnegative(
        [[1.0, point.input_tokens, point.input_tokens**2] for point in prefills],
        [max(point.seconds - constant_s, 1e-6) for point, constant_s in zip(prefills, constants_s, strict=True)],
        scale=[point.seconds for point in prefills],
        exact=EXACT,
    )
    return Profile(
        costs=StepCosts(
            prefill_token_s=per_token_s,
            prefill_token2_s=per_token2_s,
            step_const_s=const_s,
            step_request_s=per_request_s,
            step_context_token_s=per_context_s,
        ),
        request_s=request_s,
        end_s=end_s,
        prefill_error=max(
            abs((request_s + s + per_token_s * p.input_tokens + per_token2_s * p.input_tokens**2) / p.seconds - 1)
            for p, s in zip(prefills, constants_s, strict=True)
        ),
        decode_error=max(
            abs((const_s + per_request_s * p.batch + per_context_s * p.context) / p.seconds - 1) for p in decodes
        ),
    )


# ---------------------------------------------------------------------------------------------------------- measurement


@dataclass(frozen=True, slots=True)
class Served:
    """A model behind an endpoint. ``prompt`` makes token ids of a wanted count; no two prompts share a prefix block."""

    host: str
    port: int
    model: str
    prompt: Callable[[int], list[int]]

    async def ask(self, input_tokens: int, output_tokens: int) -> Timed:
        """One request of exactly these sizes; tried again where it broke off, since its time would tell nothing."""
        timed = await self._ask(input_tokens, output_tokens, TRIES_MAX)
        if (timed.input_tokens, timed.output_tokens) != (input_tokens, output_tokens):
            told = f"{timed.input_tokens} and {timed.output_tokens}"
            raise CarpoolError(f"{self.model}: asked for {input_tokens} and {output_tokens} tokens, served {told}")
        return timed

    async def _ask(self, input_tokens: int, output_tokens: int, tries: int) -> Timed:
        data = body(self.model, self.prompt(input_tokens), output_tokens)
        try:
            return await ask(self.host, self.port, self.model, data)
        except CarpoolError:
            if tries == 1:
                raise
        return await self._ask(input_tokens, output_tokens, tries - 1)


class Measurement:
    """Rounds of measurement of one model, before and after a load, so that a machine that changes its speed shows and is
    averaged."""

    def __init__(self, served: Served, step_tokens: int) -> None:
        self._served = served
        self._step_tokens = step_tokens
        self._first_s: dict[int, list[float]] = {length: [] for length in PREFILL_INPUTS}
        self._steps_s: dict[tuple[int, int], list[float]] = {
            (batch, length): [] for batch in BATCHES for length in DECODE_INPUTS
        }
        self._ends_s: list[float] = []

    async def round(self) -> None:
        """One more round. Nothing else may run on the device meanwhile."""
        served = self._served
        await served.ask(32, 4)
        for length in PREFILL_INPUTS:
            for _ in range(2):
                self._first_s[length].append((await served.ask(length, 1)).ttft_s)
        for batch, length in self._steps_s:
            answers = await asyncio.gather(*(served.ask(length, DECODE_TOKENS) for _ in range(batch)))
            self._steps_s[batch, length] += together(answers)
            self._ends_s += [answer.ended_s - answer.event_s[-1] for answer in answers if answer.event_s]

    def profile(self) -> Profile:
        """The fit to all rounds so far."""
        decodes = [
            DecodePoint(batch=batch, context=batch * (length + DECODE_TOKENS / 2), seconds=trimmed_median(steps))
            for (batch, length), steps in self._steps_s.items()
            if steps
        ]
        prefills = [PrefillPoint(length, trimmed_median(values)) for length, values in self._first_s.items()]
        return fit(prefills, decodes, trimmed_median(self._ends_s), self._step_tokens)


def together(answers: Sequence[Timed]) -> list[float]:
    """By answer the time per token while all of ``answers`` decoded. A mean over the stretch, since a client that gets no
    core for a moment sees several tokens at once."""
    if not all(answer.event_s for answer in answers):
        return []
    begin_s = max(answer.event_s[0] for answer in answers)
    end_s = min(answer.event_s[-1] for answer in answers)
    found = []
    for answer in answers:
        events = [at_s for at_s in answer.event_s if begin_s <= at_s <= end_s]
        if len(events) > 1:
            found.append((events[-1] - events[0]) / (len(events) - 1))
    return found


async def sharing_round(one: Served, other: Served) -> tuple[float, float]:
    """How fast each of two engines is beside the other, as a share of alone: their sum is 1 for time slicing without gain,
    and 2 for no contention."""
    alone = [await _pace(served) for served in (one, other)]
    both = await asyncio.gather(_pace(one), _pace(other))
    return alone[0] / both[0], alone[1] / both[1]


SHARING_S = 5.0


async def probes(served: Served, busy: Sequence[Served], count: int = PROBES) -> list[float]:
    """Times to the first token of short prompts while the engines of ``busy`` decode one answer each."""
    backgrounds = [asyncio.create_task(_decode(one)) for one in busy]
    try:
        await asyncio.sleep(1.0)
        return [(await served.ask(PROBE_TOKENS, 1)).ttft_s for _ in range(count)]
    finally:
        for background in backgrounds:
            background.cancel()
        await asyncio.gather(*backgrounds, return_exceptions=True)


async def _decode(served: Served) -> None:
    while True:
        await served.ask(PROBE_TOKENS, BACKGROUND_TOKENS)


def probe_s(costs: StepCosts, *, busy: bool, rate: float) -> float:
    """What the engine's own part of a probe takes: what is left of the step that runs, on average half, then its own."""
    context = PROBE_TOKENS + BACKGROUND_TOKENS / 4
    step = costs.step_const_s + (costs.step_request_s + costs.step_context_token_s * context if busy else 0.0)
    return ((0.5 * step if busy else 0.0) + step + prefill_s(costs, PROBE_TOKENS)) / rate


async def _pace(served: Served) -> float:
    """Seconds per request of a fixed size, two at a time so that the engine always has work, for a fixed time."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    done_s: list[float] = []

    async def client() -> None:
        while loop.time() - begun_s < SHARING_S:
            await served.ask(96, 12)
            done_s.append(loop.time())

    await asyncio.gather(client(), client())
    # The last ones of two engines do not overlap whole.
    within = [at_s for at_s in done_s if at_s - begun_s <= SHARING_S]
    return (within[-1] - begun_s) / len(within) if within else SHARING_S
