"""The proof of the KV tiers: text is the same with reuse and without, whatever happens to the pages meanwhile.

What is right comes from vLLM itself, in a process without any of our layers, which computes every prompt anew. Each oracle
runs a pool of its own with SmolLM2 and asks through the public endpoint. ``seed`` changes documents and questions.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

from ops.prove.kv_faults import prove_faults
from ops.prove.kv_places import (
    MODEL,
    TOKENS,
    Tally,
    apply_replicas,
    document,
    questions,
    right_answers,
    running_place,
    services_of,
)
from ops.prove.workplace import Figures, Say, ask, client_of, run_oracles
from profiles.blocks import tenant_salt

KEYS = {tenant: f"sk-proof-tenant-{tenant}-0001" for tenant in ("a", "b", "c", "d")}
"""Tenants of the proof; b and c are of one trust domain."""
_SECOND_WORKER = ("worker", "--id", "second", "--device", "cpu:6GiB", "--threads", "1")


async def run(say: Say, only: tuple[str, ...], seed: int = 0) -> dict[str, Any]:
    """All oracles (or those named in ``only``) in turn; every figure with its bound beside it, and ``ok``."""
    return await run_oracles("kv", (prove_reuse, prove_faults, prove_tenants, prove_policy), say, only, seed)


async def prove_reuse(directory: Path, rng: random.Random, say: Say) -> Figures:
    """Greedy text equals vLLM's own, and prompt tokens are found: in the same replica, after an eviction, after kill -9, in
    another replica of the worker, on another worker, and for a prefix alone."""
    texts = [document(rng, 28) for _ in range(2)]
    first, other, last = questions(rng, 3)
    whole = [f"{text}\n\n{first}" for text in texts]
    partly = [f"{text}\n\n{other}" for text in texts]
    short = f"{document(rng, 1)} {last}"
    say("reuse: asking vLLM directly")
    right, margin = await right_answers(directory, [*whole, *partly, short])
    tally = Tally(say, right)
    async with running_place(directory, tally, services_of(), more={"second": _SECOND_WORKER}) as place:
        await place.ask("cold", *whole, short)
        await place.ask("same replica", *whole)
        await place.ask("partial prefix", *partly)
        await place.reload()
        await place.ask("evicted and loaded again", *whole)
        (row,) = await place.until_ready(1)
        place.kill_replica(row["replica"])
        await place.ask("killed and started again", *whole)
        await place.ask("short prompt", short)
        say("reuse: a second replica")
        await apply_replicas(place, 2)
        before = await place.until_ready(2)
        old = min(row["replica"] for row in before)
        await place.order("drain", replica=old, bound_s=5)
        await place.ask("other replica of the worker", *whole)
        say("reuse: another worker")
        await place.order("drain", worker=before[0]["worker"], bound_s=5)
        await place.until_elsewhere(before[0]["worker"])
        await place.ask("other worker", *whole)
        await apply_replicas(place, 0)
        await place.reload()
        await place.ask("other worker, evicted and loaded again", *partly)
    reused = {phase: tokens for phase, tokens in tally.cached.items() if phase not in ("cold", "short prompt")}
    figures = {
        "mismatches": tally.wrong,
        "compared": tally.compared,
        "cached_tokens": tally.cached,
        "smallest_top2_margin": margin,
    }
    held = {"mismatches == 0": tally.wrong == 0, "prompt tokens were found in every phase": all(reused.values())}
    return figures, held


async def prove_tenants(directory: Path, rng: random.Random, say: Say) -> Figures:
    """A tenant's KV serves that tenant and its trust domain, from the engine and from the tiers; a salt in a body changes
    nothing; a word of a prompt is found nowhere outside the engine."""
    canary = f"zq{rng.getrandbits(48):012x}"
    question = questions(rng, 1)[0]
    prompts = [f"{canary} {document(rng, 20)}\n\n{question}" for _ in range(3)]
    say("tenants: asking vLLM directly")
    right, _ = await right_answers(directory, prompts)
    tally = Tally(say, right)
    keys = directory / "keys.yaml"
    entries = "".join(f"- {{key: {key}, tenant: {tenant}}}\n" for tenant, key in KEYS.items())
    keys.write_text(f"keys:\n{entries}trust_domains: {{shared: [b, c]}}\n")
    salts: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"cache_salt": tenant_salt("a").hex()}]
    gateway = ("--api-keys", str(keys))
    async with running_place(directory, tally, services_of(), key=KEYS["a"], gateway_flags=gateway) as place:
        clients = {tenant: client_of(place.pool, key=KEYS[tenant]) for tenant in KEYS}
        cached: dict[str, int] = {}

        async def all_of(phase: str, tenant: str) -> None:
            found = 0
            for prompt, salt in zip(prompts, salts, strict=True):
                answer = await ask(clients[tenant], MODEL, prompt, TOKENS, stream=False, **salt)
                tally.add(phase, prompt, answer)
                found += answer.cached_tokens
            cached[phase] = found

        async with contextlib.AsyncExitStack() as stack:
            for client in clients.values():
                await stack.enter_async_context(client)
            await all_of("a: first", "a")
            await all_of("a: again", "a")
            await all_of("b: what a has in the engine", "b")
            await place.reload()
            await all_of("a: from the tiers", "a")
            await place.reload()
            await all_of("d: what a has in the tiers", "d")
            await all_of("c: what b has", "c")
        leaks = await place.places_with(canary)
    for leak in leaks:
        say(f"tenants: the canary is in {leak}")
    # The prompts begin alike (the template's own words), so each tenant finds that much of what it asked before.
    own = cached["a: first"]
    cross = sum(abs(tokens - own) for phase, tokens in cached.items() if "what a has" in phase)
    figures = {
        "cross_tenant_hits": cross,
        "tenants_cached_tokens": cached,
        "tenants_mismatches": tally.wrong,
        "canary_leaks": len(leaks),
    }
    held = {
        "cross_tenant_hits == 0": cross == 0,
        "the same tenant and its trust domain hit": all(
            cached[phase] > own for phase in ("a: again", "a: from the tiers", "c: what b has")
        ),
        "tenants_mismatches == 0": tally.wrong == 0,
        "canary_leaks == 0": not leaks,
    }
    return figures, held


async def prove_policy(_directory: Path, rng: random.Random, say: Say) -> Figures:
    """On a public trace the order of eviction finds at least what LRU and LFU find, at each size."""
    from ops.bench.kv import KvBench
    from ops.bench.kv_replay import measure

    replay = (await measure(KvBench(say=say, seed=rng.randrange(1 << 30))))["replay"]
    ratios = {size: row["all"] for size, row in replay["sizes"].items()}
    worse = [size for size, row in ratios.items() if row["ours"] < max(row["lru"], row["lfu"])]
    figures = {"policy_hit_ratios": ratios, "policy_unlimited": replay["unlimited"]["all"]}
    return figures, {"policy: at least LRU and LFU at each size": not worse}
