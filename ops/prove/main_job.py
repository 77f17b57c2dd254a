"""The proof of the main job: real models share one device, and no request is lost, cut, doubled or starved by it.

Every oracle starts a pool of its own on free ports and works through the public endpoint; what happens inside is read from
the bus (a wiretap) and from the scheduler's timeline. ``seed`` changes the prompts and the order of bursts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.control import control
from ops.models import records_of
from ops.prove.judging import cut_attempts
from ops.prove.scripted_server import ScriptedServer
from ops.prove.workplace import (
    Answer,
    Figures,
    Oracle,
    Say,
    ask,
    client_of,
    hearing,
    run_oracles,
    running_pool,
    service,
    simulated,
    unload,
    until,
)

MINORITY_WAIT_S_MAX = 10.0
"""The scheduler's own bound on how long a busy resident may keep a waiting model out."""
CANCEL_S_MAX = 1.0
GREEDY_PROMPTS = 8
GREEDY_TOKENS = 24
COLD_PAIR_ROUNDS = 20
FIRST_REQUESTS = 200
KILL_REQUESTS = 40
_SUBJECTS = ("a bus", "the sea", "bread", "a mountain", "rain", "a violin", "the moon", "a bridge", "tea", "a lighthouse")
_ASKS = ("Describe {} in one sentence.", "Write a short poem about {}.", "Why do people like {}?", "Tell a story of {}.")


async def run(say: Say, only: tuple[str, ...], seed: int = 0) -> dict[str, Any]:
    """All oracles (or those named in ``only``) in turn; every figure with its bound beside it, and ``ok``."""
    return await run_oracles("main-job", ORACLES, say, only, seed)


# ---------------------------------------------------------------------------------------------------------- the oracles


async def prove_greedy(directory: Path, rng: random.Random, say: Say) -> Figures:
    """Text through the gateway equals vLLM called directly: alone and 8 in parallel, streamed or not, before and after
    an eviction (SmolLM2, float32, eager, one thread)."""
    from ops.prove.greedy_reference import reference

    prompts = [rng.choice(_ASKS).format(rng.choice(_SUBJECTS)) + f" ({index})" for index in range(GREEDY_PROMPTS)]
    engine = "type: vllm, dtype: float32, max_num_seqs: 8, max_context_len: 512, kv_cache_bytes: 256MiB"
    services = service("real", "builtin:smollm2-135m-instruct", engine)
    path = directory / "reference.yaml"
    path.write_text(services)
    record = (await asyncio.to_thread(records_of, [path]))[0]
    say("greedy: asking vLLM directly")
    expected, margin = await reference(record, prompts, GREEDY_TOKENS, directory)
    mismatches, compared = 0, 0
    first_difference = ""

    def compare(answers: Sequence[Answer], kind: str) -> None:
        nonlocal mismatches, compared, first_difference
        for answer, prompt, text in zip(answers, prompts, expected, strict=True):
            compared += 1
            if answer.text != text:
                mismatches += 1
                first_difference = first_difference or f"{kind}, {prompt!r}: {answer.text!r} ({answer.error}) for {text!r}"

    async with running_pool(directory, services, "cpu:4GiB", "--threads", "1") as pool, client_of(pool) as client:
        for phase in ("before eviction", "after eviction"):
            for stream in (False, True):
                kind = f"{phase}, {'streamed' if stream else 'whole'}"
                say(f"greedy: {kind}")
                alone = [await ask(client, "real", prompt, GREEDY_TOKENS, stream=stream) for prompt in prompts]
                compare(alone, f"{kind}, alone")
                together = [ask(client, "real", prompt, GREEDY_TOKENS, stream=stream) for prompt in prompts]
                compare(await asyncio.gather(*together), f"{kind}, {GREEDY_PROMPTS} in parallel")
            if phase == "before eviction":
                await unload(pool, "real")
    figures = {"greedy_mismatches": mismatches, "greedy_compared": compared, "greedy_smallest_top2_margin": margin}
    if first_difference:
        say(f"greedy: first difference: {first_difference}")
    return figures, {"greedy_mismatches == 0": mismatches == 0}


async def prove_grouping(directory: Path, rng: random.Random, say: Say) -> Figures:
    """A, B, A, A, C, A, B, C and bursts on one slot: few swaps, none while the victim answers, no minority starves."""
    services = "".join(simulated(name, load_s=0.5, baseline_gb=0.6) for name in ("a", "b", "c"))
    script = {"token_s": 0.05}
    async with running_pool(directory, services, "cpu:1GiB") as pool, client_of(pool) as client:

        async def ask_later(delay_s: float, model: str) -> Answer:
            await asyncio.sleep(delay_s)
            return await ask(client, model, "go", 10, stream=True, carpool_sim=script)

        async with hearing(pool) as heard:
            sequence = await asyncio.gather(*(ask_later(0.05 * at, model) for at, model in enumerate("abaacabc")))
            swaps = len(heard.loads()) - 1
        say("grouping: bursts, and a majority that never pauses")
        bursts = await asyncio.gather(*(ask_later(rng.uniform(0, 3), rng.choice("abc")) for _ in range(60)))
        busy = [ask_later(0.1 * at, "a") for at in range(200)]
        minority = [ask_later(3.0, "b"), ask_later(3.5, "c"), ask_later(12.0, "b")]
        mixed = await asyncio.gather(*busy, *minority)
        answers = [*sequence, *bursts, *mixed]
        timeline = await control(pool.nats_url, "get", {"what": "timeline"})
        again = [answer for answer in answers if answer.attempt > 1]
        stories = [await control(pool.nats_url, "explain", {"what": answer.request}) for answer in again]
    # One that was handed to a replica as it left, and came back before anything was computed, waited: nothing was cut.
    begun_twice = [answer for answer, story in zip(again, stories, strict=True) if cut_attempts(story["attempts"])]
    cut = [answer for answer in answers if not answer.whole or answer in begun_twice]
    for answer in cut[:3]:
        say(f"grouping: {answer.model}: {answer.status}, attempt {answer.attempt}, {answer.error or answer.finish_reason}")
    longest_s = max(answer.first_s - answer.begun_s for answer in mixed[len(busy) :])
    # Two models can wait for the slot at once: the bound, the running requests and a load, once for each of them.
    bound_s = 2 * (MINORITY_WAIT_S_MAX + 2.5)
    figures = {
        "swaps": swaps,
        "swaps_max": 3,
        "swaps_during_victims_request": len(cut),
        "hand_overs_that_came_back": len(again) - len(begun_twice),
        "grouping_requests": len(answers),
        "grouping_loads": sum(1 for entry in timeline if entry["action"] == "load"),
        "longest_minority_wait_s": round(longest_s, 2),
        "longest_minority_wait_bound_s": bound_s,
    }
    held = {
        "swaps <= 3": swaps <= 3,
        "swaps_during_victims_request == 0": not cut,
        "longest_minority_wait_s within the bound": longest_s <= bound_s,
    }
    return figures, held


async def prove_one_wake(directory: Path, _rng: random.Random, _say: Say) -> Figures:
    """200 first requests at once wake a model once, and all are answered."""
    services = simulated("cold", load_s=2.0, baseline_gb=0.5, slots=32)
    async with (
        running_pool(directory, services, "cpu:1GiB") as pool,
        client_of(pool) as client,
        hearing(pool) as heard,
    ):
        asks = [ask(client, "cold", "go", 4, stream=number % 2 == 0) for number in range(FIRST_REQUESTS)]
        answers = await asyncio.gather(*asks)
        count = len(heard.loads())
    unanswered = sum(1 for answer in answers if not answer.whole)
    figures = {"loads_for_200_first_requests": count, "first_requests_unanswered": unanswered}
    return figures, {"loads_for_200_first_requests == 1": count == 1, "first_requests_unanswered == 0": unanswered == 0}


async def prove_cold_pairs(directory: Path, _rng: random.Random, say: Say) -> Figures:
    """Two cold models asked for at the same instant, with room for one: both are served, 20 times."""
    services = "".join(simulated(name, load_s=0.3, baseline_gb=0.6) for name in ("left", "right"))
    failed = 0
    async with running_pool(directory, services, "cpu:1GiB") as pool, client_of(pool) as client:
        for number in range(COLD_PAIR_ROUNDS):
            answers = await asyncio.gather(*(ask(client, name, "go", 4, stream=True) for name in ("left", "right")))
            if not all(answer.whole for answer in answers):
                failed += 1
                say(f"cold_pairs: round {number}: {[answer.error or answer.finish_reason for answer in answers]}")
            for name in ("left", "right"):
                await unload(pool, name)
    figures = {"cold_pair_rounds": COLD_PAIR_ROUNDS, "cold_pair_rounds_failed": failed}
    return figures, {"cold_pair_rounds_failed == 0": failed == 0}


async def prove_cancels(directory: Path, _rng: random.Random, say: Say) -> Figures:
    """A client that leaves stops its request: before the first token, mid stream, not streamed, queued, and waking."""
    import httpx

    rounds = 10
    took_s: list[float] = []
    unseen: list[str] = []
    begun_though_left: list[str] = []
    async with ScriptedServer() as server:
        engine = "type: openai_http, max_num_seqs: 4, max_context_len: 4096"
        services = service("scripted", server.url, engine, strategy="max_wait_s: 110")
        async with running_pool(directory, services, "cpu:1GiB") as pool, client_of(pool) as client:

            async def leave(tag: str, *, stream: bool, leave_s: float = 0.4, chunks: int = 0, **script: Any) -> None:
                body = {
                    "model": "scripted",
                    "messages": [{"role": "user", "content": "go"}],
                    "stream": stream,
                    "max_tokens": 1000,
                    "carpool_script": {"tag": tag, **script},
                }

                # The moment of the decision to leave: closing the connection is part of what is measured.
                left_s: list[float] = []

                async def read() -> None:
                    async with client.stream("POST", "/chat/completions", json=body) as response:
                        seen = 0
                        async for line in response.aiter_lines():
                            seen += line.startswith("data: ")
                            if chunks and seen >= chunks:
                                left_s.append(time.monotonic())
                                return

                begun_s = time.monotonic()
                with contextlib.suppress(TimeoutError, httpx.HTTPError):
                    await asyncio.wait_for(read(), 30 if chunks else leave_s)
                if tag.startswith(("queued", "waking")):
                    return

                async def noticed() -> bool:
                    return tag in server.left_s

                if await until(noticed, 10):
                    took_s.append(server.left_s[tag] - (left_s[0] if left_s else begun_s + leave_s))
                else:
                    unseen.append(tag)

            say("cancels: waking")
            others = [
                asyncio.create_task(ask(client, "scripted", "go", 3, stream=True, carpool_script={"tokens": 3}))
                for _ in range(4)
            ]
            await leave("waking", stream=True, leave_s=0.01)
            if not all(answer.whole for answer in await asyncio.gather(*others)):
                unseen.append("waking: the others were not answered")
            for number in range(rounds):
                await leave(f"before-{number}", stream=True, first_s=30)
                await leave(f"middle-{number}", stream=True, chunks=3, tokens=500, every_s=0.05)
                await leave(f"whole-{number}", stream=False, tokens=1, first_s=30)
            say("cancels: queued behind a full engine")
            holders = [
                asyncio.create_task(leave(f"holder-{slot}", stream=True, leave_s=2.0, first_s=30)) for slot in range(4)
            ]
            await asyncio.sleep(0.7)
            await asyncio.gather(*(leave(f"queued-{number}", stream=number % 2 == 0) for number in range(rounds)))
            await asyncio.gather(*holders)
            last = await ask(client, "scripted", "go", 2, stream=True, carpool_script={"tokens": 2})
            if not last.whole:
                unseen.append("the request after the cancelled ones was not answered")
            begun_though_left = [tag for tag in sorted(server.begun_s) if tag.startswith(("queued", "waking"))]
            running = server.running
    took_s.sort()
    p99_s = took_s[min(len(took_s) - 1, int(len(took_s) * 0.99))] if took_s else float("inf")
    figures = {
        "cancels": len(took_s),
        "cancels_reaching_engine_s": {"p50": round(took_s[len(took_s) // 2], 3) if took_s else None, "p99": round(p99_s, 3)},
        "cancels_not_seen": unseen,
        "queued_or_waking_cancels_that_ran": begun_though_left,
        "requests_left_in_engine": running,
    }
    held = {
        "cancels_reaching_engine_s p99 < 1": p99_s < CANCEL_S_MAX,
        "every cancel reached the engine": not unseen and running == 0,
        "no cancelled request began": not begun_though_left,
    }
    return figures, held


async def prove_kill9(directory: Path, _rng: random.Random, say: Say) -> Figures:
    """kill -9 of the replica before the first token loses no request."""
    import psutil

    services = simulated("victim", load_s=0.5, baseline_gb=0.5, slots=16)
    async with running_pool(directory, services, "cpu:1GiB") as pool, client_of(pool) as client:
        first = await ask(client, "victim", "go", 2, stream=True)
        say(f"kill9: warm ({first.finish_reason or first.error})")
        asks = [
            asyncio.create_task(ask(client, "victim", "go", 5, stream=number % 2 == 0, carpool_sim={"first_token_s": 2.0}))
            for number in range(KILL_REQUESTS)
        ]
        await asyncio.sleep(0.8)
        replicas = [
            child
            for child in psutil.Process(pool.pid("worker")).children(recursive=True)
            if "workers.replica" in child.cmdline()
        ]
        for replica in replicas:
            replica.kill()
        answers = await asyncio.gather(*asks)
    lost = [answer for answer in answers if not answer.whole]
    for answer in lost[:3]:
        say(f"kill9: status {answer.status}, {answer.error or answer.finish_reason}")
    again = sum(1 for answer in answers if answer.attempt > 1)
    figures = {
        "requests_lost_on_kill9_before_first_token": len(lost),
        "kill9_requests": len(answers),
        "kill9_replicas_killed": len(replicas),
        "kill9_second_attempts": again,
    }
    held = {
        "requests_lost_on_kill9_before_first_token == 0": not lost,
        "the kill hit running requests": bool(replicas) and again > 0,
    }
    return figures, held


ORACLES: tuple[Oracle, ...] = (
    prove_one_wake,
    prove_cold_pairs,
    prove_grouping,
    prove_cancels,
    prove_kill9,
    prove_greedy,
)
