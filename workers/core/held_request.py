"""One request at a replica: being claimed, running, or finished but not yet confirmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain

import msgspec

from profiles.capacity import pages_for
from subjects.ids import IngressId, RequestId
from subjects.messages import Delta, Failure, FailureKind, Grant, RequestProfile

Key = tuple[RequestId, int]
"""Request and attempt: two attempts of one request are two things."""


class Phase(Enum):
    """Where a request is.

    ==========================  ==========================================================================
    from -> to                  because
    ==========================  ==========================================================================
    absent -> CLAIMING          a ticket was pulled
    absent -> RUNNING           handed over, and there is room
    CLAIMING -> RUNNING         granted: acknowledge, then start once its pages are free
    CLAIMING -> absent          refused, not answered twice, cancelled while claiming, the engine failed
    RUNNING -> FINISHED         the engine's last delta; the slot is free, the tokens are kept
    RUNNING, FINISHED -> absent cancelled, not named by two ``Held`` (which confirms a finish), the gateway silent,
                                a later attempt granted here, the bound of a drain
    ==========================  ==========================================================================
    """

    CLAIMING = "claiming"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Unconfirmed:
    """A delta that the gateway has not confirmed, and when it was last sent."""

    delta: Delta
    sent_s: float

    def confirmed_by(self, next_indexes: Sequence[int]) -> bool:
        """Whether the gateway has it. What closes without units, and the end, are confirmed only by not being named."""
        delta = self.delta
        known = 0 <= delta.choice < len(next_indexes)
        return bool(
            known and delta.units and not delta.end and delta.first_token_index + delta.units <= next_indexes[delta.choice]
        )


@dataclass(slots=True)
class HeldRequest:
    """``outbox`` holds at most what the request may generate; ``pages`` is what it may need of the KV cache."""

    request: RequestId
    attempt: int
    ingress: IngressId
    profile: RequestProfile
    pages: int
    phase: Phase = Phase.CLAIMING
    tokens: list[str] = field(default_factory=list)
    deliveries: int = 0
    tries: int = 1
    parts: list[Grant] = field(default_factory=list)
    cancelled: bool = False
    unnamed: int = 0
    start_index: int = 0
    next_indexes: dict[int, int] = field(default_factory=dict)
    outbox: list[Unconfirmed] = field(default_factory=list)
    begun: bool = False
    """Whether its gateway was sent any of its output."""
    generated: int = 0
    """Units of all choices, those of earlier attempts included."""
    gathered: list[Delta] = field(default_factory=list)
    """The latest output of an answer that nobody streams, not sent yet."""
    waits: Grant | None = None
    """Granted, and not with the engine yet: its pages are not free."""
    counted: tuple[int, int, int, int] = (0, 0, 0, 0)
    """What its replica counts for it: requests that are not finished, KV pages, prompt tokens before it, and the pages
    again once it is with the engine."""

    @property
    def key(self) -> Key:
        """Request and attempt."""
        return self.request, self.attempt

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that its engine has to compute before the next token comes; 0 once one came."""
        return 0 if self.next_indexes else self.profile.input_tokens + self.start_index

    def whole_grant(self) -> Grant:
        """The parts put together."""
        first = self.parts[0]
        if len(self.parts) == 1:
            return first
        return Grant(
            request=first.request,
            attempt=first.attempt,
            endpoint=first.endpoint,
            body=b"".join(part.body for part in self.parts),
            sent_token_ids=first.sent_token_ids,
            cache_salt=first.cache_salt,
            max_tokens=first.max_tokens,
            adapter=first.adapter,
            options=first.options,
        )

    def fault_of(self, delta: Delta) -> str:
        """Why ``delta`` breaks the engine protocol; empty when it does not. The gateway could never accept it."""
        if delta.failure is not None:
            return ""
        expected = self.next_indexes.get(delta.choice, self.start_index)
        if delta.first_token_index != expected:
            return f"the engine gave unit {delta.first_token_index} of choice {delta.choice} instead of {expected}"
        if not delta.units and delta.finish_reason is None and not delta.end:
            return "the engine gave output without a unit"
        return ""

    def note(self, delta: Delta) -> None:
        """The engine gave ``delta``."""
        self.next_indexes[delta.choice] = delta.first_token_index + delta.units
        self.generated += delta.units
        if delta.end:
            self.phase = Phase.FINISHED

    def keep(self, now_s: float, delta: Delta) -> None:
        """Keeps ``delta`` until it is confirmed."""
        self.outbox.append(Unconfirmed(delta, now_s))
        self.begun = True

    def gathers(self, delta: Delta) -> bool:
        """Whether ``delta`` can wait and be sent as one with what follows: of one choice that nobody streams, of nothing but
        text, and not its end before that of the request."""
        closes = delta.finish_reason is not None and not delta.end
        return len(self.next_indexes) == 1 and not (self.profile.stream or delta.detail or delta.failure or closes)

    def take_gathered(self) -> Delta | None:
        """What was gathered, as one delta; None when nothing was."""
        gathered, self.gathered = self.gathered, []
        if len(gathered) < 2:
            return gathered[0] if gathered else None
        return msgspec.structs.replace(
            gathered[-1],
            first_token_index=gathered[0].first_token_index,
            units=sum(delta.units for delta in gathered),
            text="".join([delta.text for delta in gathered]),
            token_ids=tuple(chain.from_iterable([delta.token_ids for delta in gathered])),
        )

    def grow(self, block_size: int, pages_max: int) -> bool:
        """An answer longer than expected holds more pages than were set aside for it: nobody else can have them."""
        pages = min(self._pages_now(block_size), pages_max)
        if pages <= self.pages:
            return False
        self.pages = pages
        return True

    def _pages_now(self, block_size: int) -> int:
        """What it holds at least; of several choices each one's pages beyond what it was expected to be."""
        if self.profile.n <= 1:
            return pages_for(self.profile.input_tokens + self.generated, block_size)
        expected = self.profile.expected_output_tokens
        beyond = sum(pages_for(max(0, index - expected), block_size) for index in self.next_indexes.values())
        return self.profile.kv_pages_needed + beyond

    def failure(self, kind: FailureKind, message: str, *, code: str) -> Delta:
        """The delta that ends this request badly."""
        return Delta(
            request=self.request,
            attempt=self.attempt,
            first_token_index=self.next_indexes.get(0, self.start_index),
            units=0,
            end=True,
            failure=Failure(kind=kind, message=message, code=code),
        )
