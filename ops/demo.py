"""``carpool demo``: real engines share one CPU device that has room for two of three models.

A SmolLM2 and two tiny models with random weights are served through the ``openai`` SDK by an embedded pool of its own (free
ports, temporary state), so that it can run beside anything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ops.control import control
from ops.models import print_table, records_of, size
from ops.supervisor import Pool, PoolOptions, end_start_on_signal, until_signal
from ops.up import INTERRUPTED
from subjects.errors import CarpoolError
from subjects.messages import ModelRecord

if TYPE_CHECKING:
    from openai import AsyncOpenAI

REAL = "smollm2"
TINY_A = "tiny-a"
TINY_B = "tiny-b"
QUESTION = "What is a carpool lane? Answer in one sentence."
_REQUEST_S_MAX = 120.0
_SILENCE_S_MAX = 4.0
"""After this long without a line the show says what the pool is doing."""
_RATE_S_MIN = 0.05
"""Text that came within less is one piece, which tells nothing of the speed."""


@dataclass
class Outcome:
    """What one request saw."""

    label: str
    model: str
    wait_s: float | None
    wake_s: float
    ttft_s: float
    tokens: int
    tokens_per_s: float | None
    text: str

    def row(self) -> dict[str, Any]:
        """A line of the closing table."""
        return {
            "request": self.label,
            "model": self.model,
            "queue wait s": round(self.wait_s, 2) if self.wait_s is not None else None,
            "of that wake s": round(self.wake_s, 2) if self.wake_s else None,
            "first token s": round(self.ttft_s, 2),
            "tokens": self.tokens,
            "tokens/s": round(self.tokens_per_s, 1) if self.tokens_per_s is not None else None,
        }


class _Stage:
    """Prints a line with the time since the start of the show."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self.started_s = self.spoke_s = time.monotonic()

    def say(self, line: str) -> None:
        self.spoke_s = time.monotonic()
        if not self._quiet:
            print(f"[{time.monotonic() - self.started_s:5.1f} s] {line}", flush=True)


EXAMPLES = Path(__file__).parent / "examples"
DEVICE = "cpu:1600MiB"
"""Room for any two of the three examples (1,077 + 402 + 402 MiB), never for all."""


def models_of_demo(*, quiet: bool) -> list[ModelRecord]:
    """The three models, fetched, converted and made when they are not in the cache yet."""
    _Stage(quiet).say("models: one real (SmolLM2-135M-Instruct) and two tiny ones with random weights")
    return records_of([EXAMPLES / f"{name}.yaml" for name in (REAL, TINY_A, TINY_B)])


async def run_demo(records: Sequence[ModelRecord], *, keep: bool, as_json: bool) -> int:
    """Runs the show; returns 0 when every step of it happened."""
    stage = _Stage(quiet=as_json)
    end_start_on_signal()
    try:
        return await _run(stage, records, keep=keep, as_json=as_json)
    except asyncio.CancelledError:
        print("carpool: demo ended before its end", file=sys.stderr)
        return INTERRUPTED


async def _run(stage: _Stage, records: Sequence[ModelRecord], *, keep: bool, as_json: bool) -> int:
    with tempfile.TemporaryDirectory(prefix="carpool-demo-", ignore_cleanup_errors=True) as temporary:
        directory = Path(temporary)
        options = PoolOptions(state_dir=directory / "state", devices=(DEVICE,))
        stage.say(f"starting NATS, Valkey, scheduler, gateway and a worker with one device, {DEVICE}")
        async with Pool(options, say=stage.say) as pool:
            await control(pool.nats_url, "apply", {"records": [msgspec.to_builtins(record) for record in records]})
            for record in records:
                note = " (random weights)" if record.random_weights else ""
                stage.say(f"applied {record.name}{note}: needs {size(record.budget_bytes)}")
            stage.say(f"OpenAI endpoint: {pool.http_url}/v1")
            teller = asyncio.create_task(_tell(pool, stage))
            try:
                outcomes = await _show(pool, stage)
            except asyncio.CancelledError:
                stage.say("ending")
                raise
            finally:
                teller.cancel()
            timeline = await control(pool.nats_url, "get", {"what": "timeline"})
            checks = _checks(outcomes, timeline)
            _report(outcomes, timeline, checks, as_json=as_json)
            if keep:
                stage.say(f"still serving {pool.http_url}/v1 with {REAL}, {TINY_A}, {TINY_B}; Ctrl-C ends it")
                await until_signal(pool)
            elif not as_json:
                print("\nA pool of your own: `.venv/bin/carpool up`; or `carpool demo --keep` leaves this one running.")
    return 0 if all(checks.values()) else 1


async def _tell(pool: Pool, stage: _Stage) -> None:
    """Says what the pool is doing whenever the show has been silent for long."""
    while True:
        await asyncio.sleep(0.5)
        if time.monotonic() - stage.spoke_s < _SILENCE_S_MAX:
            continue
        with contextlib.suppress(CarpoolError):
            rows: list[dict[str, Any]] = await control(pool.nats_url, "get", {"what": "models"}) or []
            doing = [f"{row['name']} {'answers' if row['running'] else row['state']}" for row in rows]
            stage.say(f"... {', '.join(doing)}")


async def _show(pool: Pool, stage: _Stage) -> list[Outcome]:
    from openai import AsyncOpenAI

    outcomes: list[Outcome] = []
    async with AsyncOpenAI(base_url=f"{pool.http_url}/v1", api_key="none", max_retries=0, timeout=_REQUEST_S_MAX) as client:
        stage.say(f"asking {REAL}, which is not loaded: {QUESTION}")
        outcomes.append(await _ask(client, pool, "a question", REAL, QUESTION, 48))
        stage.say(f"{REAL}: {outcomes[-1].text.strip()}")

        stage.say(f"asking {TINY_A}: it fits beside {REAL}")
        outcomes.append(await _ask(client, pool, "first of tiny-a", TINY_A, "Say something.", 16))

        stage.say(f"a long stream from {REAL}; meanwhile {TINY_B} asks for room that is not there")
        stream = asyncio.create_task(_ask(client, pool, "long stream", REAL, "Write a short story about a bus.", 160))
        await asyncio.sleep(0.5)
        newcomer = asyncio.create_task(_ask(client, pool, "newcomer", TINY_B, "Say something.", 16))
        outcomes += [await newcomer, await stream]
        stage.say(f"{TINY_B} was served, and the stream of {REAL} ended whole with {outcomes[-1].tokens} tokens")

        stage.say(f"asking {TINY_A} again: it was evicted and comes back")
        outcomes.append(await _ask(client, pool, "back again", TINY_A, "Say something else.", 16))

        stage.say('model "auto": the pool chooses')
        outcomes.append(await _ask(client, pool, "auto", "auto", "What is a bus? One sentence.", 32))
        stage.say(f"auto chose {outcomes[-1].model}: {outcomes[-1].text.strip()}")
    stage.say("the same over NATS with the SDK")
    outcomes.append(await _ask_over_nats(pool))
    return outcomes


async def _ask(client: AsyncOpenAI, pool: Pool, label: str, model: str, prompt: str, tokens: int) -> Outcome:
    started_s = time.monotonic()
    first_s = last_s = 0.0
    text: list[str] = []
    usage_tokens = 0
    raw = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    served = raw.headers.get("x-carpool-model", model)
    told_ms = raw.headers.get("x-carpool-queue-wait-ms")
    stream: AsyncIterator[Any] = raw.parse()
    finished = False
    async for chunk in stream:
        served = chunk.model if chunk.model != "auto" else served
        if chunk.usage is not None:
            usage_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            finished = finished or choice.finish_reason is not None
            if choice.delta.content:
                last_s = time.monotonic()
                first_s = first_s or last_s
                text.append(choice.delta.content)
    if not finished:
        raise CarpoolError(f"{label}: the stream of {model} ended without a finish reason")
    wake_s, woken_s = await _wake(pool, served, started_s)
    first_s = first_s or time.monotonic()
    decode_s = last_s - first_s
    return Outcome(
        label=label,
        model=served,
        # A stream that was opened before its request was granted could not yet say how long that would take.
        wait_s=float(told_ms) / 1000 if told_ms is not None else min(woken_s, first_s - started_s) or None,
        wake_s=wake_s,
        ttft_s=first_s - started_s,
        tokens=usage_tokens,
        tokens_per_s=(usage_tokens - 1) / decode_s if usage_tokens > 1 and decode_s >= _RATE_S_MIN else None,
        text="".join(text),
    )


async def _wake(pool: Pool, model: str, started_s: float) -> tuple[float, float]:
    """Seconds that loading ``model`` took if it was loaded after ``started_s``, and from then until it was there; else 0."""
    timeline: Sequence[dict[str, Any]] = await control(pool.nats_url, "get", {"what": "timeline"}) or []
    since_unix_s = time.time() - (time.monotonic() - started_s)
    for entry in reversed(timeline):
        if (entry["model"], entry["action"], entry["outcome"]) != (model, "load", "done"):
            continue
        if entry["at_unix_s"] >= since_unix_s - 0.5:
            # Whoever left for it was told so at the same time, and had to be gone first.
            left = [
                other["took_s"]
                for other in timeline
                if other["action"] == "evict" and other["at_unix_s"] == entry["at_unix_s"]
            ]
            ready_unix_s = entry["at_unix_s"] + max(left, default=0.0) + entry["took_s"]
            return float(entry["took_s"]), max(0.0, ready_unix_s - since_unix_s)
    return 0.0, 0.0


async def _ask_over_nats(pool: Pool) -> Outcome:
    from subjects.client import AsyncCrossModelScheduler

    started_s = time.monotonic()
    async with AsyncCrossModelScheduler(pool.nats_url) as scheduler:
        result = await scheduler.infer("Name one colour.", max_tokens=12, model=REAL)
    took_s = time.monotonic() - started_s
    tokens = result.usage.completion_tokens if result.usage else 0
    return Outcome("over NATS", result.model, None, 0.0, took_s, tokens, tokens / took_s, result.text)


def _checks(outcomes: Sequence[Outcome], timeline: Sequence[dict[str, Any]]) -> dict[str, bool]:
    by_label = {outcome.label: outcome for outcome in outcomes}
    actions = [(entry["action"], entry["model"]) for entry in timeline if entry.get("outcome") in ("", "done", "ok")]
    return {
        "every request was answered": all(outcome.tokens > 0 for outcome in outcomes),
        "the stream was not cut": by_label["long stream"].tokens > 0 and bool(by_label["long stream"].text),
        "a model made room": any(action in ("evict", "unload") for action, _ in actions),
        "an evicted model came back": actions.count(("load", TINY_A)) >= 2 or actions.count(("load", REAL)) >= 2,
    }


def _report(
    outcomes: Sequence[Outcome], timeline: Sequence[dict[str, Any]], checks: dict[str, bool], *, as_json: bool
) -> None:
    if as_json:
        rows = [outcome.row() | {"text": outcome.text} for outcome in outcomes]
        print(msgspec.json.encode({"requests": rows, "timeline": timeline, "checks": checks}).decode())
        return
    print()
    print_table([outcome.row() for outcome in outcomes], title="requests")
    print()
    start_unix_s = float(timeline[0]["at_unix_s"]) if timeline else 0.0
    rows = [
        {
            "at s": round(float(entry["at_unix_s"]) - start_unix_s, 1),
            "action": entry["action"],
            "model": entry["model"],
            "took s": round(float(entry["took_s"]), 1),
            "outcome": entry["outcome"],
            "reason": entry["reason"],
        }
        for entry in timeline
    ]
    if rows:
        print_table(rows, title="timeline of the device")
    print()
    for check, held in checks.items():
        print(f"{'ok  ' if held else 'FAIL'} {check}")
