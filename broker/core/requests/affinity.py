"""Whether a request goes to where its prefix is (KVC-6), or waits a moment for it: seconds saved against seconds lost.

*Saved* at a replica is the time to compute the tokens that it, or its worker's node, already has, less the time to fetch
what is not in the engine itself; what another worker's node has can be fetched over the network and counts for all replicas
alike. *Lost* is what the load there costs: prompts that were handed over just before are computed first, and each request
that runs beside ours slows it down, as ours does it. So a popular prefix fills its holder only until that costs more than it
saves, and the next replica computes the prefix once and holds it too.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from math import inf
from typing import NamedTuple

import msgspec

from kvcache.core.identity import SPAN_TOKENS, blocks_per_span, spans_of
from kvcache.core.prefix_index import PrefixHolders, WorkerPrefix
from subjects.ids import ReplicaId, WorkerId
from subjects.messages import KvTier, ModelRecord, StepCosts

COSTS_DEFAULT = StepCosts(prefill_token_s=1e-4, step_const_s=0.02, step_request_s=5e-5)
"""Of a model whose costs nobody measured: an 8B model on a middling GPU, in round figures."""
HOST_BYTES_PER_S = 1.5e9
DISK_BYTES_PER_S = 1.0e9
LINK_BYTES_PER_S = 0.5e9
"""What fetching KV from a node's memory, its disk and another worker's node is taken to bring into an engine, with copies
and checks. Too low a figure costs a little reuse, too high a figure waits for fetches that the replica then gives up."""
HELD_OUT_MAX = 8
"""So many requests of one gateway wait for one replica rather than go to another one that has room."""
_EQUAL_S = 1e-6


class ReuseCosts(msgspec.Struct, frozen=True):
    """What reuse saves and costs for one model."""

    step: StepCosts
    host_token_s: float
    """Seconds to fetch the KV of a token from the memory of the replica's own worker."""
    disk_token_s: float
    link_token_s: float

    def prefill_s(self, first: float, end: float) -> float:
        """Seconds to compute the tokens of a prompt from ``first`` to ``end``, when those before it are there."""
        return self.step.prefill_token_s * (end - first) + self.step.prefill_token2_s * (end * end - first * first)


class PromptPrefix(msgspec.Struct, frozen=True):
    """A prompt's spans, in order, and what reusing them is worth. Stays in the gateway."""

    spans: tuple[bytes, ...]
    span_tokens: int
    costs: ReuseCosts


class Place(NamedTuple):
    """A replica that could be handed the request. ``slots`` 0: it has no room for it now."""

    replica: ReplicaId
    worker: WorkerId | None
    slots: int
    running: float
    """Requests of this gateway there, for the replica's share of its devices' time."""
    unseen_tokens: int
    """Of prompts that were handed to it and that its last word does not know of."""
    held_out: int = 0
    """How many requests wait for it already rather than go elsewhere."""


class Why(Enum):
    """What decided."""

    ROOM = "room"
    """The most room: where it goes its prefix saves nothing, nor would it elsewhere."""
    PREFIX = "prefix"
    """Its prefix is there, and saves more than the load there costs."""
    SPREAD = "spread"
    """Its prefix is elsewhere, but the load there costs more than it saves."""
    WAIT = "wait"
    """Its prefix is where there is no room now, but soon."""
    FULL = "full"
    """No room anywhere."""


class Choice(msgspec.Struct, frozen=True):
    """Where a request goes: to ``replica``, or nowhere now; with ``waits_for`` it waits ``wait_s_max`` for that one."""

    why: Why | None
    """None: nobody has anything of its prefix, or it has none; the most room decides."""
    replica: ReplicaId | None = None
    tokens: int = 0
    """Of the prompt that need not be computed there."""
    waits_for: ReplicaId | None = None
    wait_s_max: float = 0.0


NOWHERE = Choice(Why.FULL)


def reuse_costs(record: ModelRecord, step: StepCosts | None = None) -> ReuseCosts:
    """Of the kind of device that computes the model fastest, where reuse saves the least: ``step``, as the pool has it."""
    step = step or COSTS_DEFAULT
    size = record.kv_bytes_per_token
    return ReuseCosts(step, size / HOST_BYTES_PER_S, size / DISK_BYTES_PER_S, size / LINK_BYTES_PER_S)


def engine_spans(record: ModelRecord) -> int | None:
    """How many spans an engine's own cache holds; None where the record does not tell."""
    span_bytes = blocks_per_span(record.block_size) * record.block_size * record.kv_bytes_per_token
    return max(1, record.kv_bytes // span_bytes) if span_bytes and record.kv_bytes else None


def prompt_prefix(hashes: list[bytes], record: ModelRecord, costs: ReuseCosts) -> PromptPrefix | None:
    """The prefix of a prompt by the hashes of its blocks; None when it has no full span."""
    if len(hashes) * record.block_size < SPAN_TOKENS:
        return None
    spans = tuple(spans_of(hashes, record.block_size))
    return PromptPrefix(spans, blocks_per_span(record.block_size) * record.block_size, costs) if spans else None


def _reuse(prefix: PromptPrefix, engine: int, node: WorkerPrefix | None, anywhere: int) -> tuple[float, int]:
    """Seconds saved and tokens not computed where an engine has so many leading spans, its worker's node some, and any
    node ``anywhere``."""
    costs, step = prefix.costs, prefix.span_tokens
    at = engine * step
    saved_s = costs.prefill_s(0, at)
    local, token_s = 0, 0.0
    if node is not None:
        local, token_s = node.spans, costs.disk_token_s if node.tier is KvTier.DISK else costs.host_token_s
    for spans, fetch_token_s in ((local, token_s), (anywhere, costs.link_token_s)):
        end = spans * step
        gain_s = costs.prefill_s(at, end) - (end - at) * fetch_token_s if end > at else 0.0
        if gain_s > 0.0:
            saved_s += gain_s
            at = end
    return saved_s, at


def choose(
    places: Iterable[Place], holders: PrefixHolders, prefix: PromptPrefix, *, output_tokens: int, wait_s_max: float
) -> Choice:
    """Where a request goes whose prefix ``holders`` have. ``places`` are those of all engines that keep a part of it, and of
    the others the best of each kind; in order of preference among equals.

    ``output_tokens`` are those expected of it, and taken for those of its neighbours; ``wait_s_max`` is how long it may
    still wait for one replica while another has room.
    """
    step = prefix.costs.step
    beside_s = 2.0 * step.step_request_s * output_tokens
    engines = holders.replicas
    nodes = {one.worker: one for one in holders.workers}
    anywhere = holders.workers[0].spans if holders.workers else 0
    known: dict[tuple[int, WorkerId | None], tuple[float, int]] = {}
    best: ReplicaId | None = None
    best_s, best_slots, best_saved_s, best_tokens, most_saved_s = -inf, 0, 0.0, 0, 0.0
    busy: list[tuple[float, float, ReplicaId]] = []
    for replica, worker, slots, running, unseen_tokens, held_out in places:
        kind = (engines.get(replica, 0), worker)
        reuse = known.get(kind)
        if reuse is None:
            reuse = known[kind] = _reuse(prefix, kind[0], None if worker is None else nodes.get(worker), anywhere)
        saved_s, tokens = reuse
        net_s = saved_s - running * beside_s - unseen_tokens * step.prefill_token_s
        if saved_s > most_saved_s:
            most_saved_s = saved_s
        if not slots:
            if saved_s > 0.0 and running and held_out < HELD_OUT_MAX:
                ends_s = output_tokens * (step.step_const_s + step.step_request_s * running) / running
                busy.append((net_s + beside_s, ends_s * (held_out + 1), replica))
        elif net_s > best_s + _EQUAL_S or (net_s > best_s - _EQUAL_S and slots > best_slots):
            best, best_s, best_slots, best_saved_s, best_tokens = replica, net_s, slots, saved_s, tokens
    if best is None:
        return NOWHERE
    waits_for, most_left_s, bound_s = None, _EQUAL_S, 0.0
    for net_s, waits_s, replica in busy:
        gain_s = net_s - best_s
        if waits_s < wait_s_max and gain_s - waits_s > most_left_s:
            waits_for, most_left_s, bound_s = replica, gain_s - waits_s, min(wait_s_max, gain_s)
    if waits_for is not None:
        return Choice(Why.WAIT, waits_for=waits_for, wait_s_max=bound_s)
    if best_saved_s < most_saved_s - _EQUAL_S:
        return Choice(Why.SPREAD, best, best_tokens)
    return Choice(Why.PREFIX if best_saved_s > 0.0 else Why.ROOM, best, best_tokens)
