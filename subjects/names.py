"""Every subject, stream, bucket and consumer name of Carpool, and nothing else (BUS-1)."""

from __future__ import annotations

import functools

from subjects.ids import IngressId, ModelKey, ReplicaId, RequestId, WorkerId, is_token
from subjects.messages import Lane, SlaClass

PREFIX = "carpool.v1"

POOL = f"{PREFIX}.pool"
ALL_BEATS = f"{PREFIX}.tel.beat.*"
ALL_WORKER_TELEMETRY = f"{PREFIX}.tel.worker.*"
ALL_INGRESS_TELEMETRY = f"{PREFIX}.tel.ingress.*"
ALL_WORKER_EVENTS = f"{PREFIX}.evt.worker.*"
ALL_ALERTS = f"{PREFIX}.alert.>"
ALL_CONTROL = f"{PREFIX}.ctl.*"
ALL_KV_INDEX = f"{PREFIX}.kv.index.*"
ALL_INFER = f"{PREFIX}.infer.*"

ALERT_STREAM = "carpool-alert"
JOURNAL_STREAM = "carpool-ops-journal"
JOURNAL = f"{PREFIX}.ops.journal"
MODELS_BUCKET = "carpool-models"
POOL_BUCKET = "carpool-pool"
LEADER_BUCKET = "carpool-leader"
LOCKS_BUCKET = "carpool-locks"
COSTS_BUCKET = "carpool-costs"


def _token(text: str) -> str:
    if not is_token(text):
        raise ValueError(f"{text!r} is not a subject token: use letters, digits, '-' and '_'")
    return text


def queue_shard(model: ModelKey, shards: int) -> int:
    """Which of the work-queue streams holds the tickets of ``model``."""
    return int(model, 16) % shards


def queue_stream(shard: int) -> str:
    """The work-queue stream of one shard."""
    return f"carpool-req-{shard}"


def queue_stream_subjects(shard: int) -> str:
    """What the stream of one shard binds to.

    The shard is a token of the subject because a stream can only select by wildcards, not by ranges of a hash.
    """
    return f"{PREFIX}.req.{shard}.>"


def tickets(model: ModelKey, sla_class: SlaClass, lane: Lane, *, shards: int) -> str:
    """``req.<shard>.<model>.<class>.<lane>``"""
    return f"{PREFIX}.req.{queue_shard(model, shards)}.{_token(model)}.{sla_class.value}.{lane.value}"


def ticket_consumer(model: ModelKey, sla_class: SlaClass, lane: Lane) -> str:
    """The durable consumer that all replicas of a model share for one class and lane."""
    return f"{_token(model)}-{sla_class.value}-{lane.value}"


def claim(ingress: IngressId) -> str:
    """Where a gateway answers claims."""
    return f"{PREFIX}.claim.{_token(ingress)}"


def run(replica: ReplicaId) -> str:
    """Where a replica is handed requests."""
    return f"{PREFIX}.run.{_token(replica)}"


def out(ingress: IngressId) -> str:
    """Where a gateway receives frames."""
    return f"{PREFIX}.out.{_token(ingress)}"


def unheard(ingress: IngressId, request: RequestId, attempt: int) -> str:
    """The reply subject of a request that is handed over: the server tells there that the replica is not connected.

    ``request`` is one of the gateway's own: its id, a hyphen and a number, and so a token as the id is.
    """
    return f"{_unheard(ingress)}.{request}.{attempt}"


def all_unheard(ingress: IngressId) -> str:
    """What :func:`unheard` makes for a gateway."""
    return f"{_unheard(ingress)}.*.*"


@functools.lru_cache(maxsize=16)  # asked for each request, always of the same gateway
def _unheard(ingress: IngressId) -> str:
    return f"{PREFIX}.unheard.{_token(ingress)}"


def why(ingress: IngressId) -> str:
    """Where a gateway tells what became of a request: asked with its id, answered with a ``RequestStory``."""
    return f"{PREFIX}.why.{_token(ingress)}"


def back(replica: ReplicaId) -> str:
    """Where a replica hears from gateways: ``Held``, ``Resend``, ``Cancel``."""
    return f"{PREFIX}.back.{_token(replica)}"


def infer(tenant: str) -> str:
    """The NATS ingress of one tenant."""
    return f"{PREFIX}.infer.{_token(tenant)}"


def beat(worker: WorkerId) -> str:
    """An agent's alive beat."""
    return f"{PREFIX}.tel.beat.{_token(worker)}"


def worker_telemetry(worker: WorkerId) -> str:
    """An agent's snapshots."""
    return f"{PREFIX}.tel.worker.{_token(worker)}"


def ingress_telemetry(ingress: IngressId) -> str:
    """A gateway's counts."""
    return f"{PREFIX}.tel.ingress.{_token(ingress)}"


def commands(worker: WorkerId) -> str:
    """Where an agent takes commands."""
    return f"{PREFIX}.cmd.{_token(worker)}"


def worker_events(worker: WorkerId) -> str:
    """Where an agent reports progress and outcomes of operations."""
    return f"{PREFIX}.evt.worker.{_token(worker)}"


def alert(severity: str, kind: str, scope: str) -> str:
    """``alert.<severity>.<kind>.<scope>``"""
    return f"{PREFIX}.alert.{_token(severity)}.{_token(kind)}.{_token(scope)}"


def control(verb: str) -> str:
    """Where the scheduler answers the CLI."""
    return f"{PREFIX}.ctl.{_token(verb)}"


def kv_index(worker: WorkerId) -> str:
    """Spans of KV that a worker's node gained, used or lost (``KvIndexed``)."""
    return f"{PREFIX}.kv.index.{_token(worker)}"


def kv_ask(worker: WorkerId) -> str:
    """Where a worker's node answers ``KvAsk``: what it has of a chain, and where to fetch it."""
    return f"{PREFIX}.kv.ask.{_token(worker)}"
