"""One request that has not ended: its state, its attempt, and how far its answer has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import inf

import msgspec

from broker.core.requests.affinity import PromptPrefix
from broker.core.requests.events import GRANT_PART_BYTES_MAX, RESEND_EVERY_S, UNFIT_S
from profiles.twu import allowed_s
from subjects.bus import Stored
from subjects.ids import DeploymentKey, ReplicaId, RequestId
from subjects.messages import Adapter, Delta, Grant, RequestProfile, Sla, SlaClass


class State(Enum):
    """Where a request is. A claim is granted in each of them, and all but ``RUNNING`` wait for one or for room."""

    PARKED = "parked"
    """A replica may have room for it in a moment; else it is published at ``retry_s``."""
    PUBLISHING = "publishing"
    """The ticket is on its way to the work-queue."""
    UNSTORED = "unstored"
    """The work-queue did not take it, or an engine was busy; it is published (again) at ``retry_s``."""
    STORED = "stored"
    """The work-queue holds it, as far as we know."""
    RUNNING = "running"
    """``holder`` was granted the current attempt, or was handed it."""


TRANSITIONS: dict[State | None, frozenset[State | None]] = {
    None: frozenset({State.PARKED, State.PUBLISHING, State.RUNNING, None}),
    State.PARKED: frozenset({State.PUBLISHING, State.RUNNING, None}),
    State.PUBLISHING: frozenset({State.PUBLISHING, State.UNSTORED, State.STORED, State.RUNNING, None}),
    State.UNSTORED: frozenset({State.PUBLISHING, State.RUNNING, None}),
    State.STORED: frozenset({State.PUBLISHING, State.UNSTORED, State.RUNNING, None}),
    State.RUNNING: frozenset({State.PUBLISHING, State.UNSTORED, None}),
}
"""The state table; None is before the first and after the last.

================  =========================================================================================
from -> to        because
================  =========================================================================================
None -> RUN.      submitted while nobody waits and a replica has room: handed over to it
None -> PARKED    submitted while nobody waits in the queue, and a replica may have room in a moment
None -> PUBL.     submitted
PARKED -> PUBL.   none had room so soon, or our bus reconnected
PARKED -> RUN.    handed over
PUBL. -> PUBL.    our bus reconnected: a new publication of the same attempt
PUBL. -> STORED   the work-queue acknowledged this very publication
PUBL. -> UNST.    it did not (yet)
UNST. -> PUBL.    the pause is over, or our bus reconnected
STORED -> PUBL.   our bus reconnected, the stream is another one or gone, or it yields: it cannot meet its target now
P., S. -> UNST.   a replica that cannot answer with its adapter claimed it, and acknowledges the ticket
waiting -> RUN.   a claim of the current attempt: the holder is noted, then answered
RUN. -> PUBL.     the holder is lost or its engine sick: a new attempt, if nothing was sent or it can be continued; also
                  when it was handed over and did not arrive, or there was no room after all
RUN. -> UNST.     its engine was busy: a new attempt after a pause
any -> None       finished, failed, client left, waiting bound, deadline, losses, shutdown
================  =========================================================================================
"""


QUEUED = frozenset({State.PUBLISHING, State.UNSTORED, State.STORED})
"""Where a request waits in the work-queue, or for its place there."""


class Taken(Enum):
    """What becomes of a delta of the current attempt and holder."""

    ACCEPTED = "accepted"
    REPEATED = "repeated"
    GAP = "gap"


@dataclass(slots=True)
class Choice:
    """How far one choice of the answer has come."""

    next_index: int = 0
    closed: bool = False
    resend_asked_s: float = -inf


@dataclass(slots=True)
class LiveRequest:
    """``start_token_ids`` are what the client had when the current attempt began, ``sent_token_ids`` what it has now."""

    request: RequestId
    profile: RequestProfile
    body: bytes
    cache_salt: str
    submitted_s: float
    wait_bound_s: float
    wait_until_s: float
    deadline_s: float
    yields_at_s: float = inf
    """When it can no longer meet its first-token target, and from then on waits behind those that can."""
    sla: Sla | None = None
    """Its model's targets."""
    adapter: Adapter | None = None
    """What answers in place of the base model."""
    options: dict[str, str | int | float | bool] | None = None
    """How the name that was asked for parses answers."""
    prefix: PromptPrefix | None = None
    """Its prompt's spans, if it has any and somebody may look for them."""
    may_hold_out: bool = True
    """Whether it may still wait for the replica that has its prefix while another has room."""
    unfit: ReplicaId | None = None
    """Whose engine could not load the adapter last."""
    state: State | None = None
    attempt: int = 1
    publication: int = 0
    losses: int = 0
    waits_since_s: float = 0.0
    retry_s: float = inf
    stored: Stored | None = None
    holder: ReplicaId | None = None
    choices: list[Choice] = field(default_factory=list)
    start_token_ids: tuple[int, ...] = ()
    sent_token_ids: list[int] = field(default_factory=list)
    ids_complete: bool = True
    sent_in_attempt: bool = False
    first_sent_s: float | None = None
    stressed_tokens: int = 0
    """Of them :meth:`stress` was told already."""
    parks_as: tuple[DeploymentKey, str] = field(init=False)
    queued_as: RequestProfile = field(init=False)
    """Its profile as it waits: in the batch class once it has yielded."""

    def __post_init__(self) -> None:
        self.choices = [Choice() for _ in range(max(1, self.profile.n))]
        self.queued_as = self.profile
        self.parks_as = (self.profile.deployment, self.profile.sla_class._value_)

    @property
    def has_yielded(self) -> bool:
        """Whether it waits behind those that can still meet their target."""
        return self.queued_as is not self.profile

    def yields(self) -> None:
        """Waits in the batch class from its next publication on."""
        self.yields_at_s = inf
        if self.profile.sla_class is not SlaClass.BATCH:
            self.queued_as = msgspec.structs.replace(self.profile, sla_class=SlaClass.BATCH)

    def due_s(self) -> float:
        """When something has to be done about it, whatever else happens."""
        if self.state is State.RUNNING:
            return self.deadline_s
        yields_at_s = self.yields_at_s if self.state is State.STORED else inf
        return min(self.retry_s, self.wait_until_s, self.deadline_s, yields_at_s)

    def next_indexes(self) -> tuple[int, ...]:
        """The next unit wanted of each choice."""
        return tuple(choice.next_index for choice in self.choices)

    def all_closed(self) -> bool:
        """Whether every choice has its finish reason, so that only the usage may be missing."""
        return all(choice.closed for choice in self.choices)

    def continuable(self) -> bool:
        """Whether another replica can go on after the tokens that were sent."""
        return self.profile.continuable and self.ids_complete and len(self.choices) == 1

    def take(self, delta: Delta) -> Taken:
        """Advances by ``delta`` if it is the next one of its choice.

        A resend keeps the first boundaries, so a delta is wanted whole or not at all. One without units is wanted only
        for what it closes; the one that ends the request only when no other choice has a gap.
        """
        choice = self.choices[delta.choice]
        if delta.first_token_index > choice.next_index:
            return Taken.GAP
        if delta.first_token_index < choice.next_index:
            return Taken.REPEATED
        closes = delta.finish_reason is not None or delta.end
        if (choice.closed and not (delta.end and not delta.units)) or not (delta.units or closes):
            return Taken.REPEATED
        if delta.end and any(not other.closed for other in self.choices if other is not choice):
            return Taken.GAP
        choice.next_index += delta.units
        choice.closed = choice.closed or closes
        self.sent_in_attempt = True
        self.ids_complete = self.ids_complete and len(delta.token_ids) == delta.units
        if len(self.choices) == 1 and self.profile.continuable and self.ids_complete:
            self.sent_token_ids.extend(delta.token_ids)
        return Taken.ACCEPTED

    def stress(self, now_s: float) -> float:
        """Tokens since the last call, the prompt's with the first output, times the age over what the targets allow."""
        made = sum(choice.next_index for choice in self.choices)
        tokens = self.profile.input_tokens + made if made else 0
        new, self.stressed_tokens = tokens - self.stressed_tokens, tokens
        if self.sla is None or new <= 0:
            return 0.0
        return new * (now_s - self.submitted_s) / allowed_s(self.sla.ttft_p95_ms / 1000, self.sla.tpot_ms / 1000, made)

    def gaps(self, now_s: float, delta: Delta) -> list[tuple[int, int]]:
        """What to ask again after ``delta`` met a gap, as (choice, from index); each choice once per ``RESEND_EVERY_S``."""
        behind = delta.first_token_index > self.choices[delta.choice].next_index
        wanted: list[tuple[int, int]] = []
        for number, choice in enumerate(self.choices):
            missing = number == delta.choice if behind else not choice.closed and number != delta.choice
            if missing and now_s - choice.resend_asked_s >= RESEND_EVERY_S:
                choice.resend_asked_s = now_s
                wanted.append((number, choice.next_index))
        return wanted

    def better_elsewhere(self, now_s: float, replica: ReplicaId, *, adapters: bool) -> bool:
        """Whether that replica cannot answer it with its adapter: it heeds none, or has just failed to load this one, which
        may be missing on its worker only."""
        if self.adapter is None:
            return False
        return not adapters or (replica == self.unfit and now_s < self.waits_since_s + UNFIT_S)

    def begin_attempt(self, now_s: float) -> None:
        """Moves to the next attempt, which starts after the tokens that were sent."""
        self.attempt += 1
        self.publication = 0
        self.holder = None
        self.stored = None
        self.start_token_ids = tuple(self.sent_token_ids)
        self.sent_in_attempt = False
        self.waits_since_s = now_s
        for choice in self.choices:
            choice.resend_asked_s = -inf

    def grant_parts(self) -> int:
        """In how many messages it is granted."""
        return max(1, -(-len(self.body) // GRANT_PART_BYTES_MAX))

    def grant(self, part: int) -> Grant | None:
        """Part ``part`` of the grant of the current attempt, the same each time; None when there is no such part."""
        parts = self.grant_parts()
        if not 0 <= part < parts:
            return None
        return Grant(
            request=self.request,
            attempt=self.attempt,
            part=part,
            parts=parts,
            endpoint=self.profile.endpoint,
            body=self.body[part * GRANT_PART_BYTES_MAX : (part + 1) * GRANT_PART_BYTES_MAX],
            sent_token_ids=self.start_token_ids if part == 0 else (),
            cache_salt=self.cache_salt,
            max_tokens=self.profile.max_tokens,
            adapter=self.adapter if part == 0 else None,
            options=self.options if part == 0 else None,
        )
