"""What a gateway counts for Prometheus. Labels are configured names and fixed words only, never a client's text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from subjects.messages import PoolDigest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
UNRESOLVED = "-"
"""Stands for the model of a request whose name was not resolved."""


class ModelMetrics:
    """The series of one model. Finding a series by its labels costs more than counting, so it is done once."""

    def __init__(self, of_all: GatewayMetrics, model: str) -> None:
        self.queue_wait_s = of_all.queue_wait_s.labels(model)
        self.ttft_s = of_all.ttft_s.labels(model)
        self.latency_s = of_all.latency_s.labels(model)
        self.tokens_input = of_all.tokens.labels(model, "input")
        self.tokens_output = of_all.tokens.labels(model, "output")
        self.tokens_cached = of_all.tokens.labels(model, "cached")
        self.attempts = of_all.attempts.labels(model)
        self.cancelled = of_all.cancelled.labels(model)
        self.prefix_requests = of_all.prefix_requests.labels(model)
        self.prefix_tokens = of_all.prefix_tokens.labels(model)


class GatewayMetrics:
    """One registry per gateway, so that two gateways in one process (tests) do not share counters."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        self.requests = Counter(
            "carpool_requests", "Requests ended, by HTTP status.", ["model", "status", "way"], registry=own
        )
        self.waiting = Gauge("carpool_requests_waiting", "Requests that no replica has yet.", ["model"], registry=own)
        self.running = Gauge("carpool_requests_running", "Requests that a replica has.", ["model"], registry=own)
        self.in_flight = Gauge("carpool_requests_in_flight", "Requests admitted and not ended.", registry=own)
        self.queue_wait_s = Histogram(
            "carpool_queue_wait_seconds", "From arrival to the grant.", ["model"], buckets=_SECONDS, registry=own
        )
        self.ttft_s = Histogram(
            "carpool_ttft_seconds", "From arrival to the first output.", ["model"], buckets=_SECONDS, registry=own
        )
        self.latency_s = Histogram(
            "carpool_latency_seconds", "From arrival to the end.", ["model"], buckets=_SECONDS, registry=own
        )
        self.tokens = Counter("carpool_tokens", "Tokens as the engines count them.", ["model", "kind"], registry=own)
        self.attempts = Counter("carpool_attempts_repeated", "Attempts after the first.", ["model"], registry=own)
        self.cancelled = Counter("carpool_requests_cancelled", "Requests whose client left.", ["model"], registry=own)
        self.prefix_requests = Counter(
            "carpool_prefix_requests", "Requests handed to where a part of their prompt is kept.", ["model"], registry=own
        )
        self.prefix_tokens = Counter(
            "carpool_prefix_tokens", "Tokens of those parts, as the index has them.", ["model"], registry=own
        )
        self.prefix_holdings = Gauge(
            "carpool_prefix_index_spans", "Spans in the prefix index, once for each holder.", registry=own
        )
        self.discarded = Counter("carpool_messages_discarded", "Messages that could not be decoded.", ["kind"], registry=own)
        self.bus_connected = Gauge("carpool_bus_connected", "Whether the bus is reachable.", registry=own)
        self.bus_round_trip_s = Gauge("carpool_bus_round_trip_seconds", "Last measured round trip to the bus.", registry=own)
        self.kv_eviction_rate = Gauge(
            "kv_cache_eviction_rate",
            "KV blocks per second that left the last tier outside engines; of the whole pool, the same at every gateway.",
            ["model"],
            registry=own,
        )
        self.kv_hit_ratio = Gauge(
            "kv_cache_hit_ratio",
            "Share of the blocks of the prompts that came that could be read outside the engine, since the nodes' starts. "
            "Of the whole pool.",
            ["model"],
            registry=own,
        )
        self.kv_bytes = Gauge(
            "kv_cache_bytes", "KV kept outside engines; of the whole pool.", ["model", "tier"], registry=own
        )
        self.of: Callable[[str], ModelMetrics] = cache(partial(ModelMetrics, self))
        """The series of a model of the registry."""
        self._ended: Callable[[str, str, str], Counter] = cache(self.requests.labels)

    def ended(self, model: str, status: str, way: str) -> None:
        """A request ended with an HTTP status; it came in by ``way``."""
        self._ended(model, status, way).inc()

    def kv_told(self, digest: PoolDigest | None) -> None:
        """What the pool's last digest says of KV outside engines."""
        for gauge in (self.kv_eviction_rate, self.kv_hit_ratio, self.kv_bytes):
            gauge.clear()
        for model in digest.models if digest is not None else ():
            if (kv := model.kv) is None:
                continue
            self.kv_eviction_rate.labels(model.name).set(kv.evictions_per_s)
            self.kv_bytes.labels(model.name, "host").set(kv.host_bytes)
            self.kv_bytes.labels(model.name, "disk").set(kv.disk_bytes)
            if kv.hits + kv.misses:
                self.kv_hit_ratio.labels(model.name).set(kv.hits / (kv.hits + kv.misses))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)
