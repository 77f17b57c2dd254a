"""Suite 7: ``aiperf`` streams chats and cancels a part of them while their answers run."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import msgspec

from subjects.errors import CarpoolError
from tests.extra.outcome import Outcome, Surroundings
from tests.extra.pool import environment_of_tools
from tests.extra.tools import pinned, python_of, run

SUITE = "aiperf"
MODEL = "paced"
REQUESTS = 100
CONCURRENCY = 8
OUTPUT_TOKENS = 40
"""At 50 tokens per second an answer takes 0.8 s, more than the delay of a cancellation."""
CANCEL_PERCENT = 30
CANCEL_DELAY_S = 0.3
CANCELLED_MIN = 10
"""Of 100 requests; a run with fewer would be one draw in 10^6 at 30 percent."""
TIMEOUT_S = 240.0
UNSEEN_MAX = 2
"""Cancellations that a busy machine may let through before our gateway has read the request, or after its answer."""
SETTLE_S_MAX = 10.0
_TAIL_CHARS = 2000


class _Metadata(msgspec.Struct, frozen=True):
    was_cancelled: bool


class _Record(msgspec.Struct, frozen=True):
    metadata: _Metadata
    metrics: dict[str, object] = {}
    error: dict[str, object] | None = None


async def run_aiperf(surroundings: Surroundings) -> Outcome:
    """Each request is a test: it was answered with all its tokens, or it was cancelled. Then nothing may be left running."""
    python = await python_of(SUITE)
    artifacts = surroundings.directory / "aiperf"
    words = {
        "--model": MODEL,
        "--url": surroundings.base_url.removesuffix("/v1"),
        "--endpoint-type": "chat",
        "--concurrency": CONCURRENCY,
        "--request-count": REQUESTS,
        "--request-cancellation-rate": CANCEL_PERCENT,
        "--request-cancellation-delay": CANCEL_DELAY_S,
        "--isl": 64,
        "--osl": OUTPUT_TOKENS,
        "--extra-inputs": "ignore_eos:true",
        "--random-seed": 7,
        "--workers-max": 1,
        "--tokenizer": surroundings.tokenizer,
        "--artifact-dir": artifacts,
        "--ui": "none",
    }
    flags = ["--streaming", "--no-gpu-telemetry", "--no-server-metrics"]
    argv = [str(python.parent / "aiperf"), "profile", *flags, *(str(part) for pair in words.items() for part in pair)]
    # Not HF_HUB_OFFLINE: with it aiperf looks for a tokenizer in the hub's cache only, and ours is a folder.
    variables = environment_of_tools() | {"HF_HUB_DISABLE_TELEMETRY": "1", "HOME": str(surroundings.directory)}
    code, output = await run(argv, cwd=surroundings.directory, environment=variables, timeout_s=TIMEOUT_S)
    (surroundings.directory / f"{SUITE}.log").write_text(output)
    if code:
        raise CarpoolError(f"{SUITE}: ended with code {code}: {output[-_TAIL_CHARS:]}")
    records = _records(artifacts)
    cancelled = [record for record in records if record.metadata.was_cancelled]
    errors = [record for record in records if record.error and not record.metadata.was_cancelled]
    failures = [f"an error that was no cancellation: {str(record.error)[:200]}" for record in errors]
    if len(records) != REQUESTS:
        failures.append(f"{len(records)} of {REQUESTS} requests have a record")
    if len(cancelled) < CANCELLED_MIN:
        failures.append(f"only {len(cancelled)} requests were cancelled")
    failures += await _left_over(surroundings.base_url.removesuffix("/v1"), len(cancelled))
    return Outcome(
        suite=SUITE,
        version=pinned(f"{SUITE}.lock")["aiperf"],
        passed=len(records) - len(errors),
        failed=len(failures),
        failures=tuple(failures),
        figures={"requests": len(records), "cancelled": len(cancelled)},
    )


def _records(artifacts: Path) -> list[_Record]:
    found = sorted(artifacts.rglob("profile_export.jsonl"))
    if len(found) != 1:
        raise CarpoolError(f"{SUITE}: expected one profile_export.jsonl, found {len(found)}")
    decode = msgspec.json.Decoder(_Record).decode
    return [decode(line) for line in found[0].read_bytes().splitlines() if line]


async def _left_over(gateway: str, cancelled: int) -> list[str]:
    """What the gateway's own figures say after the run: nothing in flight, each cancellation seen."""
    deadline_s = time.monotonic() + SETTLE_S_MAX
    async with httpx.AsyncClient(trust_env=False) as client:
        while True:
            figures = _figures((await client.get(f"{gateway}/metrics")).text)
            in_flight = sum(value for name, value in figures.items() if name.startswith("carpool_requests_in_flight"))
            seen = sum(
                value
                for name, value in figures.items()
                if name.startswith("carpool_requests_cancelled_total{") and f'model="{MODEL}"' in name
            )
            left = []
            if in_flight:
                left.append(f"{in_flight:.0f} requests are in flight {SETTLE_S_MAX:.0f} s after the run")
            if abs(seen - cancelled) > UNSEEN_MAX:
                left.append(f"aiperf cancelled {cancelled} requests, the gateway counts {seen:.0f}")
            if not left or time.monotonic() > deadline_s:
                return left
            await asyncio.sleep(0.2)


def _figures(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}
