"""The replica's side of the request protocol."""

from __future__ import annotations

from subjects.ids import ReplicaId
from workers.core.replica_events import ReplicaCommand, ReplicaEvent


class ReplicaCore:
    """Pulls by capacity, claims, runs, and sends each token until the gateway has confirmed it."""

    def __init__(self, replica: ReplicaId) -> None:
        raise NotImplementedError

    @property
    def next_wake_s(self) -> float | None:
        """When a ``Ticked`` is due, or None when nothing is."""
        raise NotImplementedError

    def step(self, now_s: float, event: ReplicaEvent) -> list[ReplicaCommand]:
        """Takes one event; returns what to do, in order."""
        raise NotImplementedError
