"""``carpool bench kv``: what the KV tiers give, each figure beside what bounds it, measured in the same run."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subjects.errors import CarpoolError, ConfigError

WAIT_S_MAX = 120.0
PARTS = ("store", "transfer", "hotness", "affinity", "replay", "codecs", "engine")
"""Each is a module ``ops.bench.kv_<part>`` with ``async def measure(bench: KvBench) -> dict``."""

_GOALS: dict[str, tuple[str, float]] = {
    "codec_loss.int4.saved_percent": (">=", 72.0),
    "codec_loss.int4.perplexity_change_percent": ("<=", 0.3),
    "l2_write_ratio": (">=", 0.8),
    "l2_read_ratio": (">=", 0.8),
    "migrate_ratio": (">=", 0.7),
    "ttft_hit_ratio": ("<=", 0.35),
    "shared_doc_latency_cut": (">=", 0.29),
}


@dataclass(frozen=True, slots=True)
class KvBench:
    """What a run is told; the defaults are the figures that decisions and notes give."""

    say: Callable[[str], None]
    """Takes lines of progress."""
    seed: int = 0
    store_bytes: int = 2 << 30
    """What the disk tier writes and reads in one round."""
    directory: Path | None = None
    """Where the disk tier's files go; None: the temporary directory."""
    text: Path | None = None
    """Text that the codecs are tried on; None: the one that comes with us."""
    trace: Path | None = None
    """Trace in Mooncake's form (a JSON object per line, gzip or plain); None: the one that comes with us."""


async def bench_kv(bench: KvBench, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """Runs the parts one after the other and merges their figures; ``goals`` says which were met.

    Raises:
        ConfigError: ``only`` names a part that is not there.
    """
    for name in only:
        if name not in PARTS:
            raise ConfigError(f"--only {name}: no such part; use one of {', '.join(PARTS)}")
    result: dict[str, Any] = {"bench": "kv", "seed": bench.seed}
    for part in PARTS:
        if only and part not in only:
            continue
        began_s = time.monotonic()
        bench.say(f"{part}: measuring")
        result |= await importlib.import_module(f"ops.bench.kv_{part}").measure(bench)
        bench.say(f"{part}: done in {time.monotonic() - began_s:.0f} s")
    result["goals"] = {
        f"{name} {sign} {bound:g}": figure >= bound if sign == ">=" else figure <= bound
        for name, (sign, bound) in _GOALS.items()
        if (figure := _figure(result, name)) is not None
    }
    return result


async def until(holds: Callable[[], bool]) -> None:
    """Waits for a server of a benchmark.

    Raises:
        CarpoolError: it does not hold after ``WAIT_S_MAX``.
    """
    end_s = time.monotonic() + WAIT_S_MAX
    while not holds():
        if time.monotonic() > end_s:
            raise CarpoolError(f"a server of the benchmark did not get so far within {WAIT_S_MAX:.0f} s")
        await asyncio.sleep(0.002)


def _figure(result: dict[str, Any], name: str) -> float | None:
    """By its path, with dots."""
    found: Any = result
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, int | float) else None
