"""``carpool up``: the embedded set in the foreground."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from ops.models import apply_records
from ops.supervisor import Pool, PoolOptions, end_start_on_signal, until_signal
from subjects.messages import ModelRecord

INTERRUPTED = 130
"""Exit code after a signal that came before the pool was ready."""


async def run_up(options: PoolOptions, records: Sequence[ModelRecord]) -> int:
    """Starts the set, prints its endpoints, applies ``records`` and waits for a signal. Returns the exit code."""
    end_start_on_signal()
    print("carpool: starting", flush=True)
    try:
        async with Pool(options, say=lambda line: print(f"carpool: {line}", flush=True)) as pool:
            assert pool.endpoints is not None
            print(f"  OpenAI endpoint  {pool.http_url}/v1")
            print(f"  NATS             {_without_secret(pool.endpoints.nats_url)}")
            print(f"  Redis            {_without_secret(pool.endpoints.redis_url)}")
            print(f"  logs             {options.state_dir / 'logs'}", flush=True)
            if records:
                await apply_records(records, nats_url=pool.nats_url)
            print("carpool: ready (Ctrl-C ends it; running requests finish first)", flush=True)
            code = await until_signal(pool)
            print("carpool: ending", flush=True)
    except asyncio.CancelledError:
        print("carpool: ended while it started", file=sys.stderr)
        return INTERRUPTED
    return code


def _without_secret(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
