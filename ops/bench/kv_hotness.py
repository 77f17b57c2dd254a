"""How fast the shared index takes updates, and what one costs the caller who notes it, on a Valkey of its own.

Two of three notes are about spans that were noted before (a hot set, drawn anew by the seed), one is about a new span. An
update counts when the server has taken it: at the end each new span must be a member with its metadata, or the run fails.
Coalesced notes never reach the server and are counted apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from redis.asyncio import Redis

from kvcache.shared.index import IndexState, RedisIndex, RedisIndexSettings, SpanAccess
from ops.bench.kv import KvBench, until
from ops.kept import Kept
from ops.servers import free_port, port_is_free, valkey_server_argv
from subjects.errors import CarpoolError
from subjects.ids import ModelHash
from subjects.messages import SlaClass

MODELS = tuple(ModelHash(f"{number:x}" * 64) for number in range(1, 5))
NOTES = 600_000
HOT_SPANS = 20_000
MANY = 1_000_000
"""Distinct prefixes that a bounded index is told."""
CHUNK = 500
READ_SPANS = 64
READS = 400
_ROOMY = RedisIndexSettings(members_max=NOTES, members_total_max=2 * NOTES, flush_every_s=0.02)


async def measure(bench: KvBench) -> dict[str, Any]:
    """``hotness_updates_per_s``: updates that the server took, per second, one node, one core for both.

    ``hotness_notes_per_s`` counts the coalesced ones too; ``hotness_note_us`` is what a note takes of its caller (median of
    chunks); ``hotness_read_us_p50`` and ``_p99``: when 64 spans were used last, asked while 10,000 notes flow per second;
    ``hotness_bytes_per_member``: of the server, with metadata of one holder; ``hotness_members_of_1m``: members that are
    left of a million distinct prefixes, at the default bounds.

    Raises:
        CarpoolError: an update that was taken is not there.
    """
    with tempfile.TemporaryDirectory(prefix="carpool-bench-") as folder:
        port = free_port()
        server = Kept("valkey", valkey_server_argv(Path(folder), port), os.environ, log=Path(folder) / "log")
        await server.start()
        try:
            url = f"redis://127.0.0.1:{port}/0"
            await until(lambda: not port_is_free("127.0.0.1", port))
            async with Redis(port=port) as client:
                async with _started(url, _ROOMY) as index:
                    result = await _flow(index, client, bench.seed)
                bench.say(
                    f"hotness: {result['hotness_updates_per_s']:,.0f} updates/s, {result['hotness_note_us']} us a note"
                )
                await client.flushall()
                async with _started(url, RedisIndexSettings(flush_every_s=0.02)) as index:
                    return result | await _many(index, client)
        finally:
            await server.stop(10.0)


@contextlib.asynccontextmanager
async def _started(url: str, settings: RedisIndexSettings) -> AsyncIterator[RedisIndex]:
    async with RedisIndex(url, "bench-1", settings) as index:
        await until(lambda: index.state is IndexState.OK)
        yield index


async def _flow(index: RedisIndex, client: Any, seed: int) -> dict[str, Any]:
    random = np.random.Generator(np.random.PCG64(seed))
    is_new = random.random(NOTES) < 1 / 3
    hot = random.zipf(1.2, NOTES) % HOT_SPANS
    empty_bytes = int((await client.info("memory"))["used_memory"])
    note_us: list[float] = []
    new_spans: list[tuple[ModelHash, bytes]] = []
    began_s = time.perf_counter()
    for first in range(0, NOTES, CHUNK):
        chunk: list[tuple[ModelHash, bytes, SpanAccess]] = []
        now_s = time.time()
        for number in range(first, min(first + CHUNK, NOTES)):
            name = HOT_SPANS + number if is_new[number] else int(hot[number])
            access = SpanAccess(
                at_unix_s=now_s,
                size_bytes=5_898_240,
                request=f"gateway-0123456789-{number}",
                tenant="business-7",
                sla_class=SlaClass.GOLD,
            )
            chunk.append((MODELS[name % len(MODELS)], name.to_bytes(16, "big"), access))
            if is_new[number]:
                new_spans.append(chunk[-1][:2])
        noted_s = time.perf_counter()
        for entry in chunk:
            index.note(*entry)
        note_us.append((time.perf_counter() - noted_s) / len(chunk) * 1e6)
        await until(lambda: index.stats.waiting <= index.settings.buffer_max // 2)
        await asyncio.sleep(0)
    await until(lambda: index.settled)
    took_s = time.perf_counter() - began_s
    stats, told = index.stats, index.counts.told
    members = sum([int(await client.zcard(index.hotness_key(model))) for model in MODELS])
    distinct = len(new_spans) + len({int(name) for name, new in zip(hot, is_new, strict=True) if not new})
    missing = await _missing(index, client, new_spans)
    if members != distinct or missing or stats.overflowed or told + stats.coalesced < NOTES:
        raise CarpoolError(f"hotness: {members} members of {distinct}, {missing} without metadata, {stats}")
    used_bytes = int((await client.info("memory"))["used_memory"]) - empty_bytes
    reads_us = await _reads(index)
    cuts = statistics.quantiles(reads_us, n=100)
    return {
        "hotness_updates_per_s": round(told / took_s),
        "hotness_notes_per_s": round(NOTES / took_s),
        "hotness_note_us": round(statistics.median(note_us), 2),
        "hotness_read_us_p50": round(cuts[49]),
        "hotness_read_us_p99": round(cuts[98]),
        "hotness_bytes_per_member": round(used_bytes / members),
    }


async def _reads(index: RedisIndex) -> list[float]:
    """Microseconds of each question, a hundred per second, while known spans are noted."""
    reads_us: list[float] = []
    for number in range(READS):
        now_s = time.time()
        for one in range(100):
            name = (100 * number + one) % HOT_SPANS
            index.note(MODELS[name % len(MODELS)], name.to_bytes(16, "big"), SpanAccess(at_unix_s=now_s, size_bytes=1))
        spans = [(READ_SPANS * number + one).to_bytes(16, "big") for one in range(READ_SPANS)]
        began_s = time.perf_counter()
        await index.last_access(MODELS[number % len(MODELS)], spans)
        reads_us.append((time.perf_counter() - began_s) * 1e6)
        await asyncio.sleep(0.01)
    return reads_us


async def _missing(index: RedisIndex, client: Any, spans: list[tuple[ModelHash, bytes]]) -> int:
    """How many of the spans have no metadata in the server."""
    missing = 0
    for model in MODELS:
        names = [name.hex() for its, name in spans if its == model]
        for first in range(0, len(names), 1000):
            values = await client.hmget(index.spans_key(model), names[first : first + 1000])
            missing += sum(value is None for value in values)
    return missing


async def _many(index: RedisIndex, client: Any) -> dict[str, Any]:
    access = SpanAccess(at_unix_s=time.time(), size_bytes=5_898_240)
    highest, first = 0, 0
    while first < MANY:
        for number in range(first, min(first + CHUNK, MANY)):
            index.note(MODELS[0], number.to_bytes(16, "big"), access)
        first += CHUNK
        await until(lambda: index.stats.waiting <= index.settings.buffer_max // 2)
        if first % (100 * CHUNK) == 0:
            highest = max(highest, int(await client.zcard(index.hotness_key(MODELS[0]))))
    await until(lambda: index.settled)
    if index.counts.told != MANY:
        raise CarpoolError(f"hotness: {index.counts.told} of {MANY} prefixes told")
    return {"hotness_members_of_1m": max(highest, int(await client.zcard(index.hotness_key(MODELS[0]))))}
