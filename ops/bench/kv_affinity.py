"""What prefix affinity costs a gateway per request, and its index in memory: its own code, one core, no bus.

The pool is 64 linked replicas of one model on 16 workers, all with room. Of each prompt 8 engines hold a part, of different
lengths, and 4 workers' nodes as well (20 replicas in all could reuse some of it), among a few hundred other prompts. A place
for the same request is chosen with the index and without one, in turns; times are of the thread's CPU, medians over many
turns. They belong to the machine.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
import tracemalloc
from typing import Any

from broker.core.requests.affinity import PromptPrefix, ReuseCosts, prompt_prefix, reuse_costs
from broker.core.requests.links import Links
from broker.core.requests.live import LiveRequest
from kvcache.core.identity import spans_of
from kvcache.core.prefix_index import PrefixIndex
from ops.bench.kv import KvBench
from profiles.blocks import chain_hashes, tenant_salt
from subjects import messages as m
from subjects.codec import decode, encode
from subjects.errors import CarpoolError
from subjects.ids import DeploymentKey, DeviceId, ModelHash, ReplicaId, RequestId, Tenant, WorkerId

REPLICAS = 64
WORKERS = 16
HOLDING_REPLICAS = 8
HOLDING_WORKERS = 4
OTHER_PROMPTS = 400
PROMPTS = {"1k": 1024, "32k": 32_768}
BLOCK = 32
TURNS = 60
CALLS = 50
SPANS = 100_000
SPANS_PER_BATCH = 500
_MODEL = ModelHash("5" * 64)
_RECORD = m.ModelRecord(
    name="bench",
    model_hash=_MODEL,
    deployment=DeploymentKey(_MODEL),
    weights_hash="5" * 64,
    engine_type=m.EngineType.SIMULATED,
    source="simulated",
    weights_bytes=1 << 34,
    kv_bytes_per_token=131_072,
    kv_bytes=1 << 36,
    budget_bytes=1 << 36,
    max_context_len=131_072,
)


async def measure(bench: KvBench) -> dict[str, Any]:
    """``gateway_overhead_us``: what affinity adds to the choice of a replica for a prompt of 1,024 tokens at 64 replicas;
    ``gateway_overhead_us_32k``: for 32,768 tokens; ``gateway_choice_us``: the choice by room alone. Each with the making of
    the prompt's spans out of its hashes, which are there anyway, and the noting of their use. ``gateway_overhead_miss_us``:
    where nobody holds anything of the prompt.

    ``prefix_index_bytes_per_100k_spans``: memory of spans that a worker and one engine hold; ``prefix_index_span_us``: to
    decode one out of a node's batch and take it in.

    Raises:
        CarpoolError: a request did not go to where its prefix is, so that the figures would mean nothing.
    """
    return await asyncio.to_thread(_measure, bench)


def _measure(bench: KvBench) -> dict[str, Any]:
    costs = reuse_costs(_RECORD)
    chains = {name: _chain(number, tokens) for number, (name, tokens) in enumerate(PROMPTS.items())}
    index = _index(list(chains.values()))
    with_index, without = _hands(index), _hands(None)
    result: dict[str, Any] = {}
    plain_us: list[float] = []
    for name, chain in (*chains.items(), ("miss", _chain(1 << 20, PROMPTS["1k"]))):
        chosen = with_index.pick(0.0, _live(chain, prompt_prefix(chain, _RECORD, costs)))
        if bool(chosen.tokens) is not (name != "miss"):
            raise CarpoolError(
                f"a request with {len(chain) * BLOCK} tokens went to {chosen.replica}, prefix {chosen.tokens}"
            )
        added_us: list[float] = []
        for _ in range(TURNS):
            plain = _time_us(without, chain, None)
            plain_us.append(plain)
            added_us.append(_time_us(with_index, chain, costs) - plain)
        key = {"1k": "gateway_overhead_us", "32k": "gateway_overhead_us_32k", "miss": "gateway_overhead_miss_us"}[name]
        result[key] = round(statistics.median(added_us), 1)
        bench.say(f"affinity: {name} adds {result[key]} us to the choice among {REPLICAS} replicas")
    result["gateway_choice_us"] = round(statistics.median(plain_us), 1)
    result["prefix_index_span_us"] = round(_batch_us(), 2)
    result["prefix_index_bytes_per_100k_spans"] = _memory()
    return result


def _chain(number: int, tokens: int) -> list[bytes]:
    return chain_hashes([number, *range(tokens - 1)], BLOCK, tenant_salt("bench"))


def _time_us(hands: Links, chain: list[bytes], costs: ReuseCosts | None) -> float:
    """Of one choice, the mean of a few in a row."""
    lives = [_live(chain, None) for _ in range(CALLS)]
    started_s = time.thread_time()
    for live in lives:
        if costs is not None:
            live.prefix = prompt_prefix(chain, _RECORD, costs)
        choice = hands.pick(0.0, live)
        if choice.replica is not None:
            hands.goes_to(choice.replica, live)
    return (time.thread_time() - started_s) / CALLS * 1e6


def _live(chain: list[bytes], prefix: PromptPrefix | None) -> LiveRequest:
    profile = m.RequestProfile(
        model_hash=_MODEL,
        deployment=_RECORD.deployment,
        endpoint=m.Endpoint.CHAT,
        tenant=Tenant("bench"),
        max_tokens=256,
        input_tokens=len(chain) * BLOCK,
        expected_output_tokens=256,
        kv_pages_needed=len(chain) + 8,
        deadline_unix_s=0.0,
    )
    return LiveRequest(
        request=RequestId("bench-1"),
        profile=profile,
        body=b"",
        cache_salt="",
        submitted_s=0.0,
        wait_bound_s=60.0,
        wait_until_s=60.0,
        deadline_s=60.0,
        prefix=prefix,
    )


def _replica(number: int) -> ReplicaId:
    return ReplicaId(f"replica-{number:02}")


def _worker(number: int) -> WorkerId:
    return WorkerId(f"worker-{number:02}")


def _hands(index: PrefixIndex | None) -> Links:
    hands = Links(index)
    for number in range(REPLICAS):
        hands.serves(_replica(number), _RECORD.deployment)
        room = m.Room(hands=0, slots=8 + number % 5, pages=1 << 16, tokens=1 << 20)
        hands.links[_replica(number)].room_is(0.0, room)
    return hands


def _index(chains: list[list[bytes]]) -> PrefixIndex:
    index = PrefixIndex()
    index.engine_is(_MODEL, 1 << 16)
    replicas = tuple(
        m.PoolReplica(
            replica=_replica(number),
            model_hash=_MODEL,
            deployment=_RECORD.deployment,
            worker=_worker(number % WORKERS),
            device=DeviceId("gpu0"),
            state=m.ReplicaState.READY,
        )
        for number in range(REPLICAS)
    )
    index.pool_is(m.PoolDigest(epoch=1, sequence=1, replicas=replicas))
    others = [_chain(1000 + number, 4096) for number in range(OTHER_PROMPTS)]
    for worker in range(WORKERS):
        held: list[m.KvSpan] = []
        mine = [number for number in range(REPLICAS) if number % WORKERS == worker]
        for chain in chains:
            spans = spans_of(chain, BLOCK)
            if worker < HOLDING_WORKERS:
                held += _spans(spans[: -(-len(spans) * (worker + 1) // HOLDING_WORKERS)], m.KvTier.HOST, None)
            for number in mine:
                if number < HOLDING_REPLICAS:
                    part = spans[: -(-len(spans) * (number + 1) // HOLDING_REPLICAS)]
                    held += _spans(part, m.KvTier.HOST, _replica(number))
        for at, chain in enumerate(others):
            if at % WORKERS == worker:
                held += _spans(spans_of(chain, BLOCK), m.KvTier.DISK, _replica(mine[at % len(mine)]))
        # One span may be named several times, by the engines that hold it: each in a batch of its own.
        for sequence, one in enumerate(held, 1):
            index.indexed(0.0, _batch(worker, sequence, [one]))
    return index


def _spans(spans: list[bytes], tier: m.KvTier, replica: ReplicaId | None) -> list[m.KvSpan]:
    return [m.KvSpan(span=span, depth=8 * at, tier=tier, replica=replica) for at, span in enumerate(spans, 1)]


def _batch(worker: int, sequence: int, spans: list[m.KvSpan]) -> m.KvIndexed:
    models = (m.KvModelSpans(model_hash=_MODEL, block_size=BLOCK, held=tuple(spans)),)
    return m.KvIndexed(worker=_worker(worker), node="node-1", sequence=sequence, models=models)


def _payloads() -> list[bytes]:
    """Batches of spans as they come over the bus: prompts of 16K tokens, each in one engine and its worker's memory."""
    hashes = chain_hashes(range(SPANS), 1, tenant_salt("bench"))
    spans = [
        m.KvSpan(span=span, depth=8 * (at % 64 + 1), tier=m.KvTier.HOST, replica=_replica(at // 64 % 4))
        for at, span in enumerate(hashes)
    ]
    batches = [spans[at : at + SPANS_PER_BATCH] for at in range(0, SPANS, SPANS_PER_BATCH)]
    return [encode(_batch(0, sequence, batch)) for sequence, batch in enumerate(batches, 1)]


def _take(payloads: list[bytes]) -> PrefixIndex:
    index = PrefixIndex()
    index.engine_is(_MODEL, SPANS)
    for payload in payloads:
        index.indexed(0.0, decode(payload, m.KvIndexed))
    return index


def _batch_us() -> float:
    payloads = _payloads()
    started_s = time.thread_time()
    _take(payloads)
    return (time.thread_time() - started_s) / SPANS * 1e6


def _memory() -> int:
    payloads = _payloads()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        index = _take(payloads)
        index._nodes[_worker(0)].changed.clear()  # as after its snapshot
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if index.holdings != 2 * SPANS:
        raise CarpoolError(f"the index has {index.holdings} of {2 * SPANS} holdings")
    return (after - before) * 100_000 // SPANS
