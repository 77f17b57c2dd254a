"""Admission: which requests a gateway takes on, for which model, and how it says no (ING-5, ING-8, ING-9).

Pure. Refusals are typed values with everything that a client is told. Two kinds are kept apart (PAINS G5): *your limit*
(429) and *no capacity* (503); both say when to come back. A known model is never "not found", whatever its state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from profiles.costs import prefill_s
from subjects import messages as m
from subjects.ids import DeploymentKey, RequestId, Tenant

_Key = TypeVar("_Key")

AUTO = "auto"
RETRY_AFTER_S_DEFAULT = 1
RETRY_AFTER_S_MAX = 60
RETRY_AFTER_PERMANENT_S = 600
"""For a model that cannot fit: only an operator can change that."""
_ABILITIES = {m.Task.GENERATE: "chat and text completions", m.Task.EMBED: "embeddings"}


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one gateway, in requests."""

    in_flight_max: int = 4096
    tenant_in_flight_max: int = 1024
    tenant_in_flight_max_of: Mapping[Tenant, int] = msgspec.field(default_factory=dict)
    """Where a tenant's bound differs."""


class Refused(msgspec.Struct, frozen=True):
    """What the client is told instead of an answer."""

    status: int
    message: str
    type: str
    code: str
    param: str | None = None
    retry_after_s: int | None = None


class ModelView(msgspec.Struct, frozen=True):
    """One model as a gateway sees it now: its record, the digest's word on it, and replicas that are ready.

    With ``adapter`` it is that adapter of the model: the same queue and replicas under another name.
    """

    record: m.ModelRecord
    pool: m.PoolModel | None = None
    replicas_ready: int = 0
    adapter: m.Adapter | None = None

    @property
    def name(self) -> str:
        """What the client is told, and what is counted."""
        return self.record.name if self.adapter is None else self.adapter.name

    @property
    def aliases(self) -> tuple[str, ...]:
        """Its other names."""
        return self.record.aliases if self.adapter is None else self.adapter.aliases

    def is_called(self, name: str) -> bool:
        """Whether a client may have meant this by ``name``: that of the model too, where it named an adapter beside it."""
        return name == self.name or name in self.aliases or name == self.record.name or name in self.record.aliases


class Wish(msgspec.Struct, frozen=True):
    """What a request asks of a model when it leaves the choice to us."""

    tags: tuple[str, ...] = ()
    quality_tier_min: int = 0
    task: m.Task = m.Task.GENERATE


def retry_after_s(estimated_wait_s: float) -> int:
    """Whole seconds for a Retry-After header."""
    return max(RETRY_AFTER_S_DEFAULT, min(RETRY_AFTER_S_MAX, round(estimated_wait_s)))


def pool_refusal(view: ModelView) -> Refused | None:
    """The scheduler's word that no replica of this model will come up: never, or not for now (PAINS B8)."""
    pool = view.pool
    if pool is None or not pool.refusal or view.replicas_ready > 0:
        return None
    message = f"The model '{view.record.name}' cannot be served: {pool.refusal}"
    if pool.permanent:
        return Refused(503, message, "server_error", "model_cannot_fit", "model", RETRY_AFTER_PERMANENT_S)
    return Refused(503, message, "server_error", "model_unavailable", "model", max(1, pool.retry_after_s))


def context_refusal(record: m.ModelRecord, *, input_tokens: int, max_tokens: int | None) -> Refused | None:
    """A prompt that leaves no room for an answer, or not for the answer asked for, fails before it costs anything."""
    context = record.max_context_len
    wanted = 1 if max_tokens is None else max_tokens
    if input_tokens + wanted <= context:
        return None
    asked = f" and {max_tokens} were asked for the completion" if max_tokens is not None else ""
    message = (
        f"This model's maximum context length is {context} tokens. However, your input has {input_tokens} tokens{asked}. "
        "Please shorten the input or the completion."
    )
    return Refused(400, message, "invalid_request_error", "context_length_exceeded", "messages")


def task_refusal(record: m.ModelRecord, endpoint: m.Endpoint) -> Refused | None:
    """A model that cannot do what the route is for says so, and what it can, before anything wakes for it."""
    if record.task is m.TASK_OF[endpoint]:
        return None
    able, asked = _ABILITIES[record.task], _ABILITIES[m.TASK_OF[endpoint]]
    message = f"The model '{record.name}' cannot do {asked}; it can do {able}."
    return Refused(400, message, "invalid_request_error", "unsupported_by_model", "model")


def unknown_model(name: str) -> Refused:
    """Nobody configured this name (PAINS B3, J12)."""
    shown = name if len(name) <= 128 else name[:128] + "..."
    return Refused(
        404, f"The model '{shown}' does not exist. See /v1/models.", "invalid_request_error", "model_not_found", "model"
    )


def rank_models(wish: Wish, views: Sequence[ModelView]) -> tuple[ModelView, ...]:
    """The models that may answer an ``auto`` request, best first: quality tier, then cost, then ready ones, then by name.

    Whether the context fits is for the caller to ask in this order, since only a model's own tokenizer can count (ING-6).
    """
    suitable = [
        view
        for view in views
        if view.record.task is wish.task
        and view.record.quality_tier >= wish.quality_tier_min
        and all(tag in view.record.tags for tag in wish.tags)
        and pool_refusal(view) is None
    ]

    def rank(view: ModelView) -> tuple[int, float, bool, str]:
        return (-view.record.quality_tier, view.record.cost_weight, view.replicas_ready == 0, view.record.name)

    return tuple(sorted(suitable, key=rank))


def no_model_fits(wish: Wish) -> Refused:
    """No model of the registry can take an ``auto`` request."""
    wanted = f" with the tags {', '.join(wish.tags)}" if wish.tags else ""
    tier = f" of quality tier {wish.quality_tier_min} or more" if wish.quality_tier_min else ""
    purpose = f" for {_ABILITIES[wish.task]}" if wish.task is not m.Task.GENERATE else ""
    message = f"No model{purpose}{wanted}{tier} whose context fits this request is available."
    return Refused(404, message, "invalid_request_error", "no_model_fits", "model")


def yields_at_s(record: m.ModelRecord, input_tokens: int, arrived_s: float) -> float:
    """When a request that still waits can no longer meet its model's target for the first token (ops/decisions/0009).

    From then on it waits behind those that can. Never where no costs of the model are known: the target may then be one that
    this pool cannot meet at all, and order of arrival is the fairest there is.
    """
    if not record.costs:
        return math.inf
    fastest_s = min(prefill_s(costs, input_tokens) + costs.step_const_s for costs in record.costs.values())
    return arrived_s + max(0.0, record.sla.ttft_p95_ms / 1000 - fastest_s)


@dataclass(slots=True)
class _Taken:
    tenant: Tenant
    queue: tuple[DeploymentKey, m.SlaClass]
    waiting: bool = True


class Admission:
    """Counts what a gateway has taken on. Every way out of it may be reported twice or for an unknown request, so that no
    path of a shell can make a counter leak (PAINS K3)."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._taken: dict[RequestId, _Taken] = {}
        self._of_tenant: dict[Tenant, int] = {}
        self._waiting: dict[tuple[DeploymentKey, m.SlaClass], int] = {}

    @property
    def in_flight(self) -> int:
        """Requests taken on and not ended."""
        return len(self._taken)

    def waiting(self, model: DeploymentKey, sla_class: m.SlaClass) -> int:
        """Requests of one queue that no replica has yet."""
        return self._waiting.get((model, sla_class), 0)

    def admit(self, request: RequestId, tenant: Tenant, sla_class: m.SlaClass, view: ModelView) -> Refused | None:
        """Takes the request on, or says why not.

        The order of the checks decides which reason a client hears: what can never work, then its own limit, then ours.
        """
        refusal = pool_refusal(view)
        if refusal is not None:
            return refusal
        record = view.record
        estimate_s = view.pool.estimated_wait_s if view.pool is not None else 0.0
        allowed = self._limits.tenant_in_flight_max_of.get(tenant, self._limits.tenant_in_flight_max)
        if self._of_tenant.get(tenant, 0) >= allowed:
            message = f"Rate limit reached: this tenant already has {allowed} requests in flight."
            return Refused(429, message, "rate_limit_error", "rate_limit_exceeded", None, retry_after_s(estimate_s))
        if len(self._taken) >= self._limits.in_flight_max:
            message = "This gateway has as many requests in flight as it takes."
            return Refused(503, message, "server_error", "overloaded", None, retry_after_s(estimate_s))
        queue = (record.deployment, sla_class)
        if self._waiting.get(queue, 0) >= record.queue_requests_max:
            message = f"The queue of model '{record.name}' is full: {record.queue_requests_max} requests wait already."
            return Refused(503, message, "server_error", "queue_full", "model", retry_after_s(estimate_s))
        self._taken[request] = _Taken(tenant, queue)
        self._of_tenant[tenant] = self._of_tenant.get(tenant, 0) + 1
        self._waiting[queue] = self._waiting.get(queue, 0) + 1
        return None

    def started(self, request: RequestId) -> None:
        """A replica has it."""
        taken = self._taken.get(request)
        if taken is not None and taken.waiting:
            taken.waiting = False
            _decrement(self._waiting, taken.queue)

    def requeued(self, request: RequestId) -> None:
        """It lost its replica and waits again. It was admitted once and is never refused for that."""
        taken = self._taken.get(request)
        if taken is not None and not taken.waiting:
            taken.waiting = True
            self._waiting[taken.queue] = self._waiting.get(taken.queue, 0) + 1

    def ended(self, request: RequestId) -> None:
        """It has ended, in whichever way."""
        taken = self._taken.pop(request, None)
        if taken is None:
            return
        _decrement(self._of_tenant, taken.tenant)
        if taken.waiting:
            _decrement(self._waiting, taken.queue)


def _decrement(counts: dict[_Key, int], key: _Key) -> None:
    counts[key] -= 1
    if counts[key] == 0:
        del counts[key]
