"""Who holds how much of a prompt's prefix: fed by what nodes say (``KvIndexed``, ``KvSnapshot``) and by the pool's digest.

Gateways ask it where a request finds its prefix, nodes where they could fetch one. Both feed one each, on one thread.

A *holder* is a worker (what its node has outside engines) or a replica (what its engine most likely still has). Per model a
table maps each span to the set of its holders; equal sets are one object. A look-up walks a prompt's spans until nobody has
the next one, so its cost follows what is found, never how many replicas or workers there are.

What is believed is dropped rather than trusted (PAINS F8): all of a worker when a message of its node was missed, when
another node process speaks for it, or when it has been silent; all of an engine when it was reset, slept, ended or died,
and what it must have thrown out since its cache is only so large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from subjects.ids import ModelHash, ReplicaId, WorkerId
from subjects.messages import KvIndexed, KvSnapshot, KvTier, PoolDigest

SILENT_S_MAX = 16.0
"""A node beats at least every 5 s; after so long without a word nothing of its worker is believed any more."""
WORKER_SPANS_MAX = 262_144
"""Of one model at one worker: 64 Mi tokens. What was said or used longest ago goes first."""
ENGINE_SPANS_DEFAULT = 1024
"""Of one engine, while nobody said how large its cache is: 256 Ki tokens."""
HOLDINGS_MAX = 1_048_576
"""Of all holders together, some 150 MB; the largest holder gives way."""


class WorkerPrefix(msgspec.Struct, frozen=True):
    """What a worker's node has of a prompt, outside engines."""

    worker: WorkerId
    spans: int
    """Leading spans."""
    tier: KvTier
    """``HOST`` or ``DISK``: where the last of them lies. Earlier ones are shared by more prompts and tend to be faster."""


class PrefixHolders(msgspec.Struct, frozen=True):
    """Who holds a prompt's leading spans; longest first, of equals in order of id."""

    replicas: Mapping[ReplicaId, int] = {}
    """Leading spans that each engine is believed to have."""
    workers: tuple[WorkerPrefix, ...] = ()


NOBODY = PrefixHolders()


class PrefixIndex:
    """One process's belief about all nodes and engines. ``now_s`` is any monotonic clock's."""

    def __init__(self, *, worker_spans_max: int = WORKER_SPANS_MAX, holdings_max: int = HOLDINGS_MAX) -> None:
        raise NotImplementedError

    def indexed(self, now_s: float, news: KvIndexed) -> bool:
        """Takes a node's batch or beat. True: ask the node for a snapshot (``KvAsk.snapshot``), from the first page on."""
        raise NotImplementedError

    def page(self, now_s: float, page: KvSnapshot) -> bytes | None:
        """Takes one page of a snapshot; returns the cursor to ask on with, ``b""`` after the last page.

        None: it is of no use, since another node process has spoken or messages were missed; ask again from the start if
        :meth:`wants_snapshot` says so.
        """
        raise NotImplementedError

    def wants_snapshot(self, worker: WorkerId) -> bool:
        """Whether what is known of a worker has gaps that only a snapshot fills."""
        raise NotImplementedError

    def engine_is(self, model: ModelHash, spans: int) -> None:
        """How many spans an engine of this model can have at once (its KV pages)."""
        raise NotImplementedError

    def pool_is(self, digest: PoolDigest) -> None:
        """Which replicas there are, where they are, and which are dead."""
        raise NotImplementedError

    def worker_of(self, replica: ReplicaId) -> WorkerId | None:
        """Where a replica runs, as the digest or its node said."""
        raise NotImplementedError

    def expire(self, now_s: float) -> list[WorkerId]:
        """Drops what is believed of silent workers; returns them. To be called about every second."""
        raise NotImplementedError

    def forget_worker(self, worker: WorkerId) -> None:
        """Drops a worker and its engines."""
        raise NotImplementedError

    def forget_replica(self, replica: ReplicaId) -> None:
        """Drops what an engine is believed to have."""
        raise NotImplementedError

    def holders(self, model: ModelHash, spans: Sequence[bytes]) -> PrefixHolders:
        """Who holds the leading spans of a prompt (:func:`kvcache.core.identity.spans_of`), and how many of them."""
        raise NotImplementedError

    def used(self, model: ModelHash, replica: ReplicaId, spans: Sequence[bytes]) -> None:
        """A prompt with these spans goes to a replica: what its engine has of them stays longest."""
        raise NotImplementedError

    @property
    def holdings(self) -> int:
        """Spans, counted once for each holder."""
        raise NotImplementedError
