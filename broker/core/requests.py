"""The gateway's side of the request protocol."""

from __future__ import annotations

from broker.core.request_events import RequestCommand, RequestEvent
from subjects.ids import IngressId, ModelKey
from subjects.messages import ModelDemand


class RequestCore:
    """Owns every request of one gateway from its first byte to its last: the only judge of who runs what."""

    def __init__(self, ingress: IngressId, *, continuation_enabled: bool = False) -> None:
        raise NotImplementedError

    @property
    def next_wake_s(self) -> float | None:
        """When a ``Ticked`` is due, or None when nothing is."""
        raise NotImplementedError

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        raise NotImplementedError

    def waiting_models(self) -> tuple[ModelKey, ...]:
        """Models with stored tickets, whose streams are worth a ``QueueChecked`` (about every second), in order of key."""
        raise NotImplementedError

    def take_demand(self, now_s: float) -> tuple[ModelDemand, ...]:
        """Waiting and running now, and what arrived and ended since the last call, for the telemetry of the gateway."""
        raise NotImplementedError

    def step(self, now_s: float, event: RequestEvent) -> list[RequestCommand]:
        """Takes one event; returns what to do, in order."""
        raise NotImplementedError
