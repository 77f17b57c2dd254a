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
from kvcache.core.prefix_index import PrefixHolders
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
    running: int
    """Requests of this gateway there."""
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


def reuse_costs(record: ModelRecord) -> ReuseCosts:
    """Of the kind of device that computes the model fastest: where reuse saves the least."""
    step = min(record.costs.items(), key=lambda item: (item[1].prefill_token_s, item[0]), default=("", COSTS_DEFAULT))[1]
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


class _Reuse(NamedTuple):
    saved_s: float
    tokens: int


class _Worth:
    """What reuse saves at each replica; most of them are alike, so each kind is computed once."""

    def __init__(self, prefix: PromptPrefix, holders: PrefixHolders) -> None:
        self._prefix = prefix
        self._engines = holders.replicas
        self._nodes = {one.worker: one for one in holders.workers}
        self._anywhere = holders.workers[0].spans if holders.workers else 0
        self._known: dict[tuple[int, WorkerId | None], _Reuse] = {}

    def at(self, replica: ReplicaId, worker: WorkerId | None) -> _Reuse:
        engine = self._engines.get(replica, 0)
        node = self._nodes.get(worker) if worker is not None else None
        key = (engine, None if node is None else node.worker)
        found = self._known.get(key)
        if found is None:
            tier, local = (None, 0) if node is None else (node.tier, node.spans)
            found = self._known[key] = self._reuse(engine, tier, local)
        return found

    def _reuse(self, engine: int, tier: KvTier | None, local: int) -> _Reuse:
        costs, step = self._prefix.costs, self._prefix.span_tokens
        at = engine * step
        saved_s = costs.prefill_s(0, at)
        token_s = costs.disk_token_s if tier is KvTier.DISK else costs.host_token_s
        for spans, fetch_token_s in ((local, token_s), (self._anywhere, costs.link_token_s)):
            end = spans * step
            gain_s = costs.prefill_s(at, end) - (end - at) * fetch_token_s if end > at else 0.0
            if gain_s > 0.0:
                saved_s += gain_s
                at = end
        return _Reuse(saved_s, at)


def choose(
    places: Iterable[Place], holders: PrefixHolders, prefix: PromptPrefix, *, output_tokens: int, wait_s_max: float
) -> Choice:
    """Where a request goes whose prefix ``holders`` have. ``places`` are in order of acquaintance.

    ``output_tokens`` are those expected of it, and taken for those of its neighbours; ``wait_s_max`` is how long it may
    still wait for one replica while another has room.
    """
    step = prefix.costs.step
    beside_s = 2.0 * step.step_request_s * output_tokens
    worth = _Worth(prefix, holders)
    best: Place | None = None
    best_s, best_reuse, most_saved_s = -inf, _Reuse(0.0, 0), 0.0
    busy: list[tuple[float, float, Place]] = []
    for place in places:
        reuse = worth.at(place.replica, place.worker)
        net_s = reuse.saved_s - place.running * beside_s - place.unseen_tokens * step.prefill_token_s
        most_saved_s = max(most_saved_s, reuse.saved_s)
        if not place.slots:
            if reuse.saved_s > 0.0 and place.running and place.held_out < HELD_OUT_MAX:
                ends_s = output_tokens * (step.step_const_s + step.step_request_s * place.running) / place.running
                busy.append((net_s + beside_s, ends_s * (place.held_out + 1), place))
            continue
        more = best is None or net_s > best_s + _EQUAL_S
        if more or (best is not None and net_s > best_s - _EQUAL_S and place.slots > best.slots):
            best, best_s, best_reuse = place, net_s, reuse
    if best is None:
        return NOWHERE
    longest: tuple[float, ReplicaId] | None = None
    most_left_s = _EQUAL_S
    for net_s, waits_s, place in busy:
        gain_s = net_s - best_s
        if waits_s < wait_s_max and gain_s - waits_s > most_left_s:
            most_left_s = gain_s - waits_s
            longest = (min(wait_s_max, gain_s), place.replica)
    if longest is not None:
        return Choice(Why.WAIT, waits_for=longest[1], wait_s_max=longest[0])
    if best_reuse.saved_s >= most_saved_s - _EQUAL_S:
        why = Why.PREFIX if best_reuse.saved_s > 0.0 else Why.ROOM
    else:
        why = Why.SPREAD
    return Choice(why, best.replica, best_reuse.tokens)
