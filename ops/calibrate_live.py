"""The thresholds of TWU on a running pool: the same two stages with real requests, as clients see them (OPS-7).

Load rises step by step until 5 % of a step's requests are late, refused or failed, or the time is up. TWU is computed
afterwards from when each piece of each answer came: in a window of a second a request counts with the tokens that came in it
(its prompt spread evenly from sending to the first of them) and its age by then, as it would on the device.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from ops.calibrate import LATE_MAX, Measured, Say, Stage, Thresholds, stage_of, thresholds
from ops.simulator.reality_client import Timed, ask, body
from profiles.twu import TokenWork, allowed_s, twu, twu_raw_s
from subjects.errors import CarpoolError, ConfigError

MIX = (0.6, 0.3, 0.1)
LENGTHS = ((16, 512), (513, 2048), (2049, 8192))
GROWTH = 1.3
RUNNING_MAX = 256
"""Requests under way at once; beyond it a step has broken the SLO anyway."""
WINDOW_S = 1.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """How hard and how long a pool is loaded."""

    endpoint: str
    models: tuple[str, ...]
    """The smallest first; empty: all that the endpoint serves, in order of their speed."""
    ttft_s: float = 2.0
    tpot_s: float = 0.1
    step_s: float = 15.0
    """Length of one load."""
    minutes: float = 10.0
    """Bound on everything."""
    first_rps: float = 0.5
    input_tokens_max: int = 1024
    output_tokens: tuple[int, int] = (8, 48)
    seed: int = 1
    elsewhere: bool = False
    """Whether the endpoint may be on another host."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A request and what came of it; ``timed`` is None where it was refused or failed."""

    model: str
    sent_s: float
    timed: Timed | None


async def calibrate_live(options: LiveOptions, say: Say) -> Thresholds:
    """Both stages against an OpenAI-compatible endpoint.

    Raises:
        ConfigError: the endpoint is not loopback and nobody said that it may be elsewhere, or serves no such model.
        CarpoolError: it does not answer, or breaks the SLO at the lowest load.
    """
    host, port = _address(options)
    until_s = time.monotonic() + 60.0 * options.minutes
    load = _Load(options, host, port)
    weights = await load.weights(options.models or await asyncio.to_thread(_served, options.endpoint))
    names = tuple(weights)
    say(f"weights by time per token: {', '.join(f'{name} {weight:.2f}' for name, weight in weights.items())}")
    stages: list[Stage] = []
    baseline = 0.0
    asked = ((names[:1], (1.0, 0.0, 0.0), "smallest model alone"), (names[: len(MIX)], MIX, "all models, 60/30/10"))
    for number, (models, lengths, name) in enumerate(asked):
        end_s = until_s - (until_s - time.monotonic()) / 2 if number == 0 else until_s
        say(name)
        kept, broke = await _climb(load, models, lengths, weights, end_s, say)
        baseline = baseline or kept.tokens_per_s
        stages.append(stage_of(name, models, kept, broke, baseline))
    return thresholds(stages, baseline, weights, options.endpoint)


async def _climb(
    load: _Load, models: Sequence[str], lengths: Sequence[float], weights: dict[str, float], end_s: float, say: Say
) -> tuple[Measured, Measured]:
    """Loads that grow until one breaks the SLO. Where the time is up first, the last one counts as the limit."""
    rps = load.options.first_rps
    kept: Measured | None = None
    while True:
        seen = await load.step(models, lengths, weights, rps)
        say(f"{rps:.2f} requests/s: {seen.late:.1%} late, {seen.tokens_per_s:.0f} tokens/s")
        if seen.late > LATE_MAX:
            if kept is None:
                raise CarpoolError(f"{rps:g} requests/s break the SLO already; give a lower --rps or other targets")
            return kept, seen
        kept = seen
        rps *= GROWTH
        if time.monotonic() + load.options.step_s > end_s:
            say("the time is up before the SLO broke: the threshold is a lower bound (more --minutes, or a higher --rps)")
            return kept, kept


class _Load:
    def __init__(self, options: LiveOptions, host: str, port: int) -> None:
        self.options = options
        self._host, self._port = host, port
        self._random = random.Random(options.seed)  # noqa: S311 - a load, no secret

    async def weights(self, models: Sequence[str]) -> dict[str, float]:
        """Seconds per token of each model alone, relative to the fastest, which comes first."""
        seconds = {}
        for model in models:
            await self._one(model, 32, 8)  # Wakes and warms it.
            timed = (await self._one(model, 128, 32)).timed
            if timed is None:
                raise CarpoolError(f"{model}: does not answer a single request; see `carpool explain {model}`")
            seconds[model] = timed.completion_s / max(1, timed.input_tokens + timed.output_tokens)
        ordered = list(models) if self.options.models else sorted(models, key=lambda model: (seconds[model], model))
        return {model: round(seconds[model] / seconds[ordered[0]], 3) for model in ordered}

    async def step(self, models: Sequence[str], lengths: Sequence[float], weights: dict[str, float], rps: float) -> Measured:
        """Sends requests at ``rps`` for one step, waits for all of them, and measures the step."""
        o = self.options
        draw = self._random
        tasks: list[asyncio.Task[Answer]] = []
        begin_s = time.monotonic()
        at_s = begin_s
        overrun = 0
        while (at_s := at_s + draw.expovariate(rps)) < begin_s + o.step_s:
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            if sum(not task.done() for task in tasks) >= RUNNING_MAX:
                overrun += 1
                continue
            model = draw.choices(models, weights=MIX[: len(models)])[0]
            low, high = draw.choices(LENGTHS, weights=lengths)[0]
            tokens = min(draw.randint(low, high), o.input_tokens_max)
            tasks.append(asyncio.create_task(self._one(model, tokens, draw.randint(*o.output_tokens))))
        answers = [await task for task in tasks]
        late = overrun + sum(self._late(answer) for answer in answers)
        served = [answer.timed for answer in answers if answer.timed is not None]
        window = parts_per_window(served, weights, begin_s, o.step_s, o.ttft_s, o.tpot_s)
        count = len(window) or 1
        return Measured(
            rps=rps,
            late=late / max(1, len(answers) + overrun),
            twu_unscaled=sum(twu(parts, WINDOW_S, 1.0) for parts in window) / count,
            raw_s_unscaled=sum(twu_raw_s(parts, WINDOW_S, 1.0) for parts in window) / count,
            tokens_per_s=sum(part.tokens for parts in window for part in parts) / (count * WINDOW_S),
        )

    def _late(self, answer: Answer) -> bool:
        timed = answer.timed
        if timed is None or timed.ttft_s > self.options.ttft_s:
            return True
        rest = timed.output_tokens - 1
        return rest > 0 and (timed.completion_s - timed.ttft_s) / rest > self.options.tpot_s

    async def _one(self, model: str, input_tokens: int, output_tokens: int) -> Answer:
        # A number each so that no two prompts share a prefix: cached prompts cost nothing.
        prompt = f"{self._random.getrandbits(32)} " + " ".join(
            self._random.choice(("one", "two", "red", "car", "sun")) for _ in range(max(1, input_tokens - 8))
        )
        sent_s = time.monotonic()
        try:
            return Answer(model, sent_s, await ask(self._host, self._port, model, body(model, prompt, output_tokens)))
        except CarpoolError:
            return Answer(model, sent_s, None)


def parts_per_window(
    answers: Sequence[Timed], weights: dict[str, float], begin_s: float, seconds: float, ttft_s: float, tpot_s: float
) -> list[list[TokenWork]]:
    """What each request did in each window of a step; the first window is left out where a longer step allows it."""
    count = max(1, round(seconds / WINDOW_S))
    windows: list[list[TokenWork]] = [[] for _ in range(count)]
    for timed in answers:
        if not timed.event_s:
            continue
        first_s = timed.event_s[0]
        per_event = timed.output_tokens / len(timed.event_s)
        for place in range(count):
            from_s, to_s = begin_s + place * WINDOW_S, begin_s + (place + 1) * WINDOW_S
            if timed.ended_s <= from_s or timed.sent_s >= to_s:
                continue
            waited_s = max(1e-6, first_s - timed.sent_s)
            prompt = timed.input_tokens * max(0.0, min(to_s, first_s) - max(from_s, timed.sent_s)) / waited_s
            made = sum(1 for event_s in timed.event_s if event_s <= to_s)
            new = sum(1 for event_s in timed.event_s if from_s < event_s <= to_s)
            age_s = min(to_s, timed.ended_s) - timed.sent_s
            windows[place].append(
                TokenWork(
                    weights.get(timed.model, 1.0),
                    prompt + new * per_event,
                    age_s,
                    allowed_s(ttft_s, tpot_s, round(made * per_event)),
                )
            )
    return windows[1:] if count > 2 else windows


def _address(options: LiveOptions) -> tuple[str, int]:
    parts = urlsplit(options.endpoint if "//" in options.endpoint else f"http://{options.endpoint}")
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(f"--endpoint {options.endpoint}: want http://host:port")
    if parts.hostname not in LOOPBACK and not options.elsewhere:
        raise ConfigError(
            f"--endpoint {options.endpoint}: loads another host up to its limit; add --elsewhere if you mean it"
        )
    return parts.hostname, parts.port or 80


def _served(endpoint: str) -> tuple[str, ...]:
    url = (endpoint if "//" in endpoint else f"http://{endpoint}").rstrip("/") + "/v1/models"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - http was checked
            names = [str(model["id"]) for model in json.load(answer)["data"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CarpoolError(f"{url}: {error}") from None
    if not names:
        raise ConfigError(f"{endpoint} serves no model; `carpool apply` one first")
    return tuple(names)
