"""Who holds how much of a prompt's prefix: fed by what nodes say (``KvIndexed``, ``KvSnapshot``) and by the pool's digest.

Gateways ask it where a request finds its prefix, nodes where they could fetch one. Both feed one each, on one thread.

A *holder* is a worker (what its node has outside engines) or a replica (what its engine most likely still has). Per model a
table maps each span to the set of its holders; equal sets are one object. A look-up walks a prompt's spans until nobody has
the next one, so its cost follows what is found, never how many replicas or workers there are.

What is believed is dropped rather than trusted (PAINS F8): all of a worker and its engines when a message of its node was
missed, when another node process speaks for it, or when it has been silent; all of an engine when it was reset, slept, ended
or died; and what an engine must have thrown out since, as its cache is only so large.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from subjects.ids import ModelHash, ReplicaId, WorkerId
from subjects.messages import KvIndexed, KvModelSpans, KvSnapshot, KvTier, PoolDigest, ReplicaState

SILENT_S_MAX = 16.0
"""A node beats at least every 5 s; after so long without a word nothing of its worker is believed any more."""
WORKER_SPANS_MAX = 262_144
"""Of one model at one worker: 64 Mi tokens. What was said or used longest ago goes first."""
ENGINE_SPANS_DEFAULT = 1024
"""Of one engine, while nobody said how large its cache is: 256 Ki tokens."""
HOLDINGS_MAX = 1_048_576
"""Of all holders together, some 200 MB; the largest holder gives way."""
CHANGED_MAX = 65_536
"""Changes that are remembered while a snapshot is under way, so that an older page does not undo them."""
DEAD_MAX = 4096
"""So many dead incarnations are remembered: what is said of them late counts no more."""
_GIVE_WAY_SHARE = 64
"""One part in so many goes at once where there are too many: the first keys of a dict are found slowly one by one."""
_SETS_MAX = 16_384
_EMPTY: frozenset[int] = frozenset()
_WITHOUT_KV = frozenset({ReplicaState.ASLEEP, ReplicaState.FAILED, ReplicaState.ABSENT})


class WorkerPrefix(msgspec.Struct, frozen=True):
    """What a worker's node has of a prompt, outside engines."""

    worker: WorkerId
    spans: int
    """Leading spans."""
    tier: KvTier
    """``HOST`` or ``DISK``: where the last of them lies. Earlier ones are shared by more prompts and tend to be faster."""


class PrefixHolders(msgspec.Struct, frozen=True):
    """Who holds a prompt's leading spans."""

    replicas: Mapping[ReplicaId, int] = {}
    """Leading spans that each engine is believed to have."""
    workers: tuple[WorkerPrefix, ...] = ()
    """Longest first, of equals in order of id."""


NOBODY = PrefixHolders()


@dataclass(slots=True)
class _Holder:
    number: int
    worker: WorkerId
    replica: ReplicaId | None = None
    """None: what the worker's node has outside engines."""
    spans: dict[ModelHash, dict[bytes, KvTier]] = field(default_factory=dict)
    """In order of last use."""
    count: int = 0


@dataclass(slots=True)
class _Node:
    """What we know of the node process that speaks for a worker."""

    node: str
    sequence: int
    heard_s: float
    wants_snapshot: bool = True
    cursor: bytes = b""
    """Of the next page of the snapshot."""
    floor: int = 0
    """Pages as of earlier sequences are of no use."""
    changed: dict[tuple[ModelHash, bytes], int] = field(default_factory=dict)
    """Which sequence said something of a span last, while a snapshot is wanted."""
    emptied: dict[ReplicaId, int] = field(default_factory=dict)


class PrefixIndex:
    """One process's belief about all nodes and engines. ``now_s`` is any monotonic clock's."""

    def __init__(self, *, worker_spans_max: int = WORKER_SPANS_MAX, holdings_max: int = HOLDINGS_MAX) -> None:
        self._worker_spans_max = worker_spans_max
        self._holdings_max = holdings_max
        self._table: dict[ModelHash, dict[bytes, frozenset[int]]] = {}
        self._sets: dict[frozenset[int], frozenset[int]] = {}
        self._holders: dict[int, _Holder] = {}
        self._workers: dict[WorkerId, _Holder] = {}
        self._replicas: dict[ReplicaId, _Holder] = {}
        self._nodes: dict[WorkerId, _Node] = {}
        self._engine_spans: dict[ModelHash, int] = {}
        self._listed: dict[ReplicaId, WorkerId] | None = None
        self._at: dict[WorkerId, list[ReplicaId]] = {}
        self._dead: OrderedDict[ReplicaId, None] = OrderedDict()
        self._number = 0
        self._holdings = 0

    # ------------------------------------------------------------------------------------------------- what nodes say

    def indexed(self, now_s: float, news: KvIndexed) -> bool:
        """Takes a node's batch or beat. True: ask the node for a snapshot (``KvAsk.snapshot``), from the first page on."""
        node = self._nodes.get(news.worker)
        if node is not None and node.node == news.node:
            node.heard_s = now_s
            if news.sequence <= node.sequence:
                return False
        lost = node is None or node.node != news.node or news.sequence != node.sequence + 1
        if node is None or lost:
            self.forget_worker(news.worker)
            node = self._nodes[news.worker] = _Node(news.node, news.sequence, now_s, floor=news.sequence)
        node.sequence = news.sequence
        for replica in news.emptied:
            self.forget_replica(replica)
            if node.wants_snapshot:
                node.emptied[replica] = news.sequence
        for model in news.models:
            self._take(news.worker, model)
            if node.wants_snapshot:
                for span in (*(one.span for one in model.held), *model.dropped):
                    node.changed[model.model_hash, span] = news.sequence
        if len(node.changed) + len(node.emptied) > CHANGED_MAX:
            node.floor, node.cursor = news.sequence, b""
            node.changed.clear()
            node.emptied.clear()
        return lost

    def page(self, now_s: float, page: KvSnapshot, asked: bytes) -> bytes | None:
        """Takes the page of a snapshot that was asked for with the cursor ``asked``; returns the next one, ``b""`` at last.

        None: it is of no use, since another node process speaks, or messages were missed meanwhile. Ask again with
        :meth:`wanted_page`.
        """
        node = self._nodes.get(page.worker)
        if node is None or node.node != page.node or not node.wants_snapshot:
            return None
        if asked != node.cursor or page.sequence < node.floor:
            return None
        node.heard_s = now_s
        for model in page.models:
            newer = [one for one in model.held if node.changed.get((model.model_hash, one.span), -1) <= page.sequence]
            for at, one in enumerate(newer):
                if one.replica is not None and node.emptied.get(one.replica, -1) > page.sequence:
                    newer[at] = msgspec.structs.replace(one, replica=None)
            self._take(
                page.worker, KvModelSpans(model_hash=model.model_hash, block_size=model.block_size, held=tuple(newer))
            )
        node.cursor = page.cursor
        if not page.cursor:
            node.wants_snapshot = False
            node.changed.clear()
            node.emptied.clear()
        return page.cursor

    def wanted_page(self, worker: WorkerId) -> bytes | None:
        """The cursor to ask a worker's node for its snapshot with; None when nothing is missing."""
        node = self._nodes.get(worker)
        return node.cursor if node is not None and node.wants_snapshot else None

    def wanting(self) -> list[WorkerId]:
        """Workers whose node has not told all it holds, in order of id."""
        return sorted(worker for worker, node in self._nodes.items() if node.wants_snapshot)

    def expire(self, now_s: float) -> list[WorkerId]:
        """Drops what is believed of silent workers; returns them. To be called about every second."""
        silent = [worker for worker, node in self._nodes.items() if now_s - node.heard_s > SILENT_S_MAX]
        for worker in silent:
            self.forget_worker(worker)
        return silent

    def _take(self, worker: WorkerId, model: KvModelSpans) -> None:
        """Spans that a worker gained or lost. The deeper ones first: an engine throws out the end of a prompt before its
        beginning, and so do we."""
        for span in model.dropped:
            for number in sorted(self._table.get(model.model_hash, {}).get(span, _EMPTY)):
                if (holder := self._holders[number]).worker == worker:
                    self._drop(holder, model.model_hash, span)
        engines: dict[ReplicaId, _Holder] = {}
        for one in sorted(model.held, key=lambda one: (-one.depth, one.span)):
            if one.tier is KvTier.ENGINE:
                self._drop(self._workers.get(worker), model.model_hash, one.span)
            else:
                self._add(self._worker(worker), model.model_hash, one.span, one.tier)
            if one.replica is not None and one.replica not in self._dead:
                engines[one.replica] = self._replica(worker, one.replica)
                self._add(engines[one.replica], model.model_hash, one.span, KvTier.ENGINE)
        self._trim(self._workers.get(worker), model.model_hash, self._worker_spans_max)
        for engine in engines.values():
            self._trim(engine, model.model_hash, self._engine_spans.get(model.model_hash, ENGINE_SPANS_DEFAULT))
        while self._holdings > self._holdings_max:
            largest = max(self._holders.values(), key=lambda holder: (holder.count, holder.number))
            model_hash, spans = max(largest.spans.items(), key=lambda item: (len(item[1]), item[0]))
            self._trim(largest, model_hash, len(spans) - 1)

    # ----------------------------------------------------------------------------------------- what the pool's digest says

    def engine_is(self, model: ModelHash, spans: int) -> None:
        """How many spans an engine of this model can have at once (its KV pages)."""
        self._engine_spans[model] = max(1, spans)

    def pool_is(self, digest: PoolDigest) -> None:
        """Which replicas there are, where they are, and which are dead. Engines that it does not list are not named."""
        self._listed = {one.replica: one.worker for one in digest.replicas}
        self._at = {}
        for one in digest.replicas:
            self._at.setdefault(one.worker, []).append(one.replica)
            if one.state in _WITHOUT_KV:
                self.forget_replica(one.replica)
        for replica in digest.dead:
            if replica not in self._dead:
                self._dead[replica] = None
                self.forget_replica(replica)
        while len(self._dead) > DEAD_MAX:
            self._dead.popitem(last=False)

    def worker_of(self, replica: ReplicaId) -> WorkerId | None:
        """Where a replica runs, as the digest or its node said."""
        worker = self._listed.get(replica) if self._listed is not None else None
        if worker is None and (holder := self._replicas.get(replica)) is not None:
            return holder.worker
        return worker

    def replicas_at(self, worker: WorkerId) -> Sequence[ReplicaId]:
        """Who runs there, as the digest has it."""
        return self._at.get(worker, ())

    def forget_worker(self, worker: WorkerId) -> None:
        """Drops a worker and its engines."""
        self._nodes.pop(worker, None)
        self._forget(self._workers.pop(worker, None))
        for replica in [replica for replica, holder in self._replicas.items() if holder.worker == worker]:
            self.forget_replica(replica)

    def forget_replica(self, replica: ReplicaId) -> None:
        """Drops what an engine is believed to have."""
        self._forget(self._replicas.pop(replica, None))

    # ------------------------------------------------------------------------------------------------------- look-ups

    @property
    def empty(self) -> bool:
        """Whether nobody is known to hold anything."""
        return not self._holdings

    @property
    def holdings(self) -> int:
        """Spans, counted once for each holder."""
        return self._holdings

    def holders(self, model: ModelHash, spans: Sequence[bytes]) -> PrefixHolders:
        """Who holds the leading spans of a prompt (:func:`kvcache.core.identity.spans_of`), and how many of them."""
        table = self._table.get(model)
        held = None if table is None or not spans else table.get(spans[0])
        if table is None or held is None:
            return NOBODY
        alive = last = held
        depth = 0
        found: list[tuple[int, int]] = []
        for span in spans:
            held = table.get(span)
            if held is None:
                break
            if held is not last:
                left = alive & held
                if len(left) != len(alive):
                    found += [(depth, number) for number in alive - left]
                    alive = left
                    if not alive:
                        break
                last = held
            depth += 1
        found += [(depth, number) for number in alive]
        return self._named(model, spans, found)

    def _named(self, model: ModelHash, spans: Sequence[bytes], found: list[tuple[int, int]]) -> PrefixHolders:
        replicas: dict[ReplicaId, int] = {}
        workers: list[WorkerPrefix] = []
        listed = self._listed
        for depth, number in found:
            holder = self._holders[number]
            if holder.replica is None:
                workers.append(WorkerPrefix(holder.worker, depth, holder.spans[model][spans[depth - 1]]))
            elif listed is None or holder.replica in listed:
                replicas[holder.replica] = depth
        if len(workers) > 1:
            workers.sort(key=lambda one: (-one.spans, one.worker))
        return PrefixHolders(replicas, tuple(workers))

    def used(self, model: ModelHash, replica: ReplicaId, spans: Sequence[bytes]) -> None:
        """A prompt with these spans goes to a replica: what its engine and its worker have of them stays longest.

        Nothing is done for a holder that is less than half full: when it is full, it will have heard of as much again.
        """
        worker = self.worker_of(replica)
        engine_max = self._engine_spans.get(model, ENGINE_SPANS_DEFAULT)
        self._touch(self._replicas.get(replica), model, spans, engine_max)
        self._touch(None if worker is None else self._workers.get(worker), model, spans, self._worker_spans_max)

    def _touch(self, holder: _Holder | None, model: ModelHash, spans: Sequence[bytes], spans_max: int) -> None:
        mine = holder.spans.get(model) if holder is not None else None
        if mine is None or 2 * len(mine) < spans_max:
            return
        for span in reversed(spans):
            tier = mine.pop(span, None)
            if tier is not None:
                mine[span] = tier

    # ------------------------------------------------------------------------------------------------------ the table

    def _worker(self, worker: WorkerId) -> _Holder:
        found = self._workers.get(worker)
        if found is None:
            found = self._workers[worker] = self._new(worker, None)
        return found

    def _replica(self, worker: WorkerId, replica: ReplicaId) -> _Holder:
        found = self._replicas.get(replica)
        if found is None:
            found = self._replicas[replica] = self._new(worker, replica)
        return found

    def _new(self, worker: WorkerId, replica: ReplicaId | None) -> _Holder:
        self._number += 1
        holder = self._holders[self._number] = _Holder(self._number, worker, replica)
        return holder

    def _add(self, holder: _Holder, model: ModelHash, span: bytes, tier: KvTier) -> None:
        mine = holder.spans.get(model)
        if mine is None:
            mine = holder.spans[model] = {}
        if mine.pop(span, None) is None:
            table = self._table.setdefault(model, {})
            table[span] = self._shared(table.get(span, _EMPTY) | {holder.number})
            holder.count += 1
            self._holdings += 1
        mine[span] = tier

    def _drop(self, holder: _Holder | None, model: ModelHash, span: bytes) -> None:
        mine = holder.spans.get(model) if holder is not None else None
        if holder is None or mine is None or mine.pop(span, None) is None:
            return
        if not mine:
            del holder.spans[model]
        self._unlist(holder, model, (span,))
        if holder.replica is not None and not holder.count:
            self.forget_replica(holder.replica)

    def _trim(self, holder: _Holder | None, model: ModelHash, spans_max: int) -> None:
        mine = holder.spans.get(model) if holder is not None else None
        if holder is None or mine is None or len(mine) <= spans_max:
            return
        gone = list(islice(mine, max(len(mine) - spans_max, spans_max // _GIVE_WAY_SHARE)))
        for span in gone:
            del mine[span]
        if not mine:
            del holder.spans[model]
        self._unlist(holder, model, gone)

    def _forget(self, holder: _Holder | None) -> None:
        if holder is None:
            return
        for model, mine in holder.spans.items():
            self._unlist(holder, model, mine)
        del self._holders[holder.number]

    def _unlist(self, holder: _Holder, model: ModelHash, spans: Iterable[bytes]) -> None:
        table = self._table[model]
        for span in spans:
            left = table[span] - {holder.number}
            if left:
                table[span] = self._shared(left)
            else:
                del table[span]
            holder.count -= 1
            self._holdings -= 1
        if not table:
            del self._table[model]

    def _shared(self, numbers: frozenset[int]) -> frozenset[int]:
        """The one object of all equal sets; when there were too many sets some become two, which costs only memory."""
        if len(self._sets) > _SETS_MAX:
            self._sets.clear()
        return self._sets.setdefault(numbers, numbers)
