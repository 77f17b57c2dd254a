"""Replicas of the simulated pool, and which of them takes a request."""

from __future__ import annotations

from math import inf

from ops.simulator.device import SimDevice
from ops.simulator.engine import Engine
from ops.simulator.queueing import Live
from ops.simulator.types import BLOCK_TOKENS
from subjects.ids import ReplicaId
from workers.core.pulling import room_for

TOKENS_AS_REQUEST = 256.0
"""So many tokens not yet prefilled weigh as much as one running request when a replica is chosen."""


class SimReplica:
    """A replica: its engine, its place, and what was taken. ``held`` counts its requests."""

    __slots__ = (
        "devices",
        "draining",
        "engine",
        "held",
        "kv_bytes",
        "kv_pages",
        "last_used_s",
        "model",
        "number",
        "pages_taken",
        "pushed",
        "ready",
        "replica",
        "slots",
        "want",
        "weight",
        "working",
    )

    def __init__(
        self, number: int, replica: ReplicaId, model: int, devices: tuple[SimDevice, ...], engine: Engine, kv_bytes: int
    ) -> None:
        self.number = number
        self.replica = replica
        self.model = model
        self.devices = devices
        self.engine = engine
        self.kv_bytes = kv_bytes
        self.kv_pages = engine.kv_pages
        self.slots = engine.slots
        self.held = 0
        self.pages_taken = 0
        """By what its requests were expected to need."""
        self.weight = 1.0
        self.ready = False
        self.draining = False
        self.want = 1.0
        """What its devices know of its engine's ``want``."""
        self.working = False
        """Whether its devices count it among the engines that have work."""
        self.last_used_s = 0.0
        self.pushed = -1
        """Version of the engine's end that is in the heap."""

    @property
    def pages_free(self) -> int:
        """What is neither set aside nor held: some answers are longer than was expected, and hold more."""
        return min(self.kv_pages - self.pages_taken, self.engine.kv_pages_open)


def least_loaded(replicas: list[SimReplica], live: Live) -> SimReplica | None:
    """Of those that have room for it the one with the least load for its weight; the first of equals."""
    best: SimReplica | None = None
    best_load = inf
    pages = live.pages_needed
    most = live.input_tokens + live.output_tokens
    for replica in replicas:
        kv_pages = replica.kv_pages
        if replica.weight <= 0.0 or most > kv_pages * BLOCK_TOKENS:
            continue
        backlog = replica.engine.backlog_tokens
        needed = pages if pages < kv_pages else kv_pages
        if room_for(replica.slots - replica.held, replica.pages_free, needed, backlog):
            load = (replica.held + backlog / TOKENS_AS_REQUEST) / replica.weight
            if load < best_load:
                best, best_load = replica, load
    return best
