"""A request on its way: profile, ticket, claim, grant, frames, and the NATS ingress."""

from __future__ import annotations

from enum import Enum

import msgspec

from subjects.ids import DeploymentKey, IngressId, ModelHash, ReplicaId, RequestId, Tenant
from subjects.messages.kinds import Endpoint, EngineType, Lane, RequestKind, SlaClass
from subjects.messages.registry import Adapter


class RequestProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool knows of a request: numbers, never the prompt (ING-3, ING-4).

    ``token_ratio`` is expected output tokens over input tokens; ``prompt_entropy`` is in bits over the distribution of the
    prompt's token ids. ``prefix_head`` and ``prefix_blocks`` stand for the chain of block hashes: the hash of its last
    full block and how many blocks it has.
    """

    model_hash: ModelHash
    deployment: DeploymentKey = DeploymentKey("")
    endpoint: Endpoint
    tenant: Tenant
    sla_class: SlaClass = SlaClass.SILVER
    lane: Lane = Lane.SMALL
    kind: RequestKind = RequestKind.INFERENCE
    max_tokens: int
    stream: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    stop_count: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    adapter: str = ""
    structured: bool = False
    tools: bool = False
    priority: int = 0
    input_tokens: int
    prompt_entropy: float = 0.0
    expected_output_tokens: int
    token_ratio: float = 0.0
    history_turns: int = 0
    prefix_head: bytes = b""
    prefix_blocks: int = 0
    kv_pages_needed: int
    preferred_engine: EngineType | None = None
    business_id: str = ""
    chain_id: str = ""
    environment: str = "production"
    task_priority: int = 10
    deadline_unix_s: float
    continuable: bool = False
    """Whether the tokens already sent may be continued elsewhere (ops/decisions/0004)."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """A request on the work-queue: who to claim it from, and what it needs."""

    request: RequestId
    attempt: int
    publication: int
    ingress: IngressId
    profile: RequestProfile


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A replica asks a gateway for a request whose ticket it holds.

    ``part`` above zero asks for a further part of a grant that was too large for one message.
    """

    request: RequestId
    attempt: int
    replica: ReplicaId
    part: int = 0
    adapters: bool = False
    """Whether it heeds the adapter of a grant. An older replica would answer with the base's weights: it is granted none."""


class RefusalReason(Enum):
    """Why a claim is refused. All but ``DEAD`` mean: acknowledge the ticket and forget it."""

    TAKEN = "taken"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    STALE_ATTEMPT = "stale-attempt"
    UNKNOWN = "unknown"
    DEAD = "dead"


class Grant(msgspec.Struct, frozen=True, kw_only=True, tag="grant"):
    """The request is yours: its body, or its token ids, and the tokens that the client already has.

    ``body`` is the client's JSON, whole or one of ``parts`` pieces. ``sent_token_ids`` is not empty only for a continuation;
    the first delta then has ``first_token_index == len(sent_token_ids)``.
    """

    request: RequestId
    attempt: int
    part: int = 0
    parts: int = 1
    endpoint: Endpoint = Endpoint.CHAT
    body: bytes = b""
    prompt_token_ids: tuple[int, ...] = ()
    """Never filled and never read: the replica renders ``body``. Peers of older versions have the field."""
    sent_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    max_tokens: int = 0
    adapter: Adapter | None = None
    """What answers in place of the base model; the replica loads it when it has not (only with part 0)."""
    options: dict[str, str | int | float | bool] | None = None
    """How the name that was asked for parses answers (``profiles.deployment.PARSING_OPTIONS``; only with part 0). None, of
    older gateways: as the record that the replica was started with."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """The request is not yours."""

    request: RequestId
    attempt: int
    reason: RefusalReason


ClaimReply = Grant | Refusal


class Hand(msgspec.Struct, frozen=True, kw_only=True):
    """Ticket and grant in one, on ``run.<replica>``: for a replica that said that it has room (ops/decisions/0026).

    ``number`` grows with whatever this gateway hands over. Nothing answers it but the request's frames, or ``Gone`` with
    ``full`` from a replica that cannot take it after all.
    """

    number: int
    ingress: IngressId
    profile: RequestProfile
    grant: Grant


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica would take of one gateway at once, after the ``hands`` that it has seen: requests, KV pages for them
    all, and prompt tokens, of which the last request may have any number."""

    hands: int
    slots: int
    pages: int
    tokens: int


class FailureKind(Enum):
    """Sick, busy and bad request are told apart (REL-1)."""

    BAD_REQUEST = "bad-request"
    SICK = "sick"
    BUSY = "busy"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's refusal or failure of one request, in terms a client may see."""

    kind: FailureKind
    message: str
    status: int = 500
    param: str | None = None
    code: str | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts as the engine reports them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New output of one choice of one request.

    ``first_token_index`` numbers the choice's units from 0: tokens where the engine gives ids (then
    ``units == len(token_ids)``), else chunks (``units == 1``). A delta that only closes has ``units == 0``. Each choice ends
    with a ``finish_reason``; the last delta of the request also has ``end=True`` and carries ``usage`` or ``failure``.
    ``detail`` is JSON of an OpenAI choice delta for what text cannot carry (tool calls, reasoning, logprobs). For embeddings
    it is ``{"data": [{"index": .., "embedding": ..}, ..]}`` of some of the inputs, in the ``encoding_format`` asked for.
    """

    request: RequestId
    attempt: int
    choice: int = 0
    first_token_index: int
    units: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    detail: bytes = b""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    end: bool = False
    usage: Usage | None = None
    failure: Failure | None = None


class Gone(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The replica neither holds this request nor is claiming it. ``full``: it was handed over, and there was no room."""

    request: RequestId
    attempt: int
    full: bool = False


class Frames(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message per engine step with the deltas of all requests of one gateway; empty when it only answers ``Held``.

    Without ``room`` nothing can be handed over.
    """

    replica: ReplicaId
    sequence: int
    deltas: tuple[Delta, ...] = ()
    gone: tuple[Gone, ...] = ()
    room: Room | None = None


class HeldEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the gateway believes runs at the replica; ``next_indexes`` has the next unit wanted of each choice."""

    request: RequestId
    attempt: int
    next_indexes: tuple[int, ...]


class Held(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """Every 200 ms, gateway to replica: confirmation, beat and reconciliation in one."""

    ingress: IngressId
    sequence: int
    entries: tuple[HeldEntry, ...]
    hands: int = 0
    """The number of the last hand before it: what did not come by then is lost."""


class Resend(msgspec.Struct, frozen=True, kw_only=True, tag="resend"):
    """A gap: send this choice again from ``from_index``, with the first boundaries."""

    ingress: IngressId
    request: RequestId
    attempt: int
    choice: int
    from_index: int


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Stop generating; nobody wants the rest."""

    ingress: IngressId
    request: RequestId
    attempt: int


Back = Held | Resend | Cancel


class RequestAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One replica that had the request."""

    attempt: int
    replica: ReplicaId
    waited_s: float
    """From when it began to wait (again) until this grant."""
    lost: bool = False
    """The replica was lost, busy or drained, and the request waited again."""
    begun: bool = True
    """False: it was handed over and came back before the replica had begun it; nothing of the answer was lost."""
    prefix_tokens: int = 0
    """Of the prompt, that this replica was chosen for: it is believed not to compute them again."""


class RequestStory(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway still knows of a request: numbers, never the prompt or the answer. Durations count from its arrival."""

    request: RequestId
    known: bool
    """False: it was never here, or is forgotten."""
    model: str = ""
    sla_class: SlaClass = SlaClass.SILVER
    lane: Lane = Lane.SMALL
    input_tokens: int = 0
    expected_output_tokens: int = 0
    output_tokens: int | None = None
    arrived_unix_s: float = 0.0
    age_s: float = 0.0
    """When this was told, or at its end."""
    state: str = ""
    """``waiting``, ``running`` or ``ended``."""
    attempts: tuple[RequestAttempt, ...] = ()
    first_output_s: float | None = None
    status: int = 0
    """HTTP status of its end; 0 while it has none."""
    code: str = ""


class InferRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request over NATS: the same body as the HTTP route's (ING-2)."""

    endpoint: Endpoint = Endpoint.CHAT
    body: bytes
    headers: dict[str, str] = {}
    stream: bool = False


class InferFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the answer: JSON of an OpenAI chunk (stream) or of the whole response; ``last`` closes the answer."""

    sequence: int
    status: int = 200
    body: bytes = b""
    last: bool = False
