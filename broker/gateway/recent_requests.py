"""What a gateway remembers of its requests for ``carpool explain``: numbers, never a prompt or an answer."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from subjects.ids import ReplicaId, RequestId
from subjects.messages import RequestAttempt, RequestProfile, RequestStory

ENDED_MAX = 5000
"""So many ended requests are remembered, the latest ones."""


@dataclass(slots=True)
class _Known:
    model: str
    profile: RequestProfile
    arrived_s: float
    arrived_unix_s: float
    attempts: list[RequestAttempt] = field(default_factory=list)
    running: bool = False
    first_output_s: float | None = None
    ended_s: float | None = None
    status: int = 0
    code: str = ""
    output_tokens: int | None = None


class RecentRequests:
    """Live requests, and the latest that ended. Times are the gateway's monotonic seconds."""

    def __init__(self, *, ended_max: int = ENDED_MAX) -> None:
        self._ended_max = ended_max
        self._live: dict[RequestId, _Known] = {}
        self._ended: OrderedDict[RequestId, _Known] = OrderedDict()

    def arrived(
        self, request: RequestId, model: str, profile: RequestProfile, arrived_s: float, arrived_unix_s: float
    ) -> None:
        """It was admitted."""
        self._live[request] = _Known(model, profile, arrived_s, arrived_unix_s)

    def granted(
        self, request: RequestId, attempt: int, replica: ReplicaId, waited_s: float, *, prefix_tokens: int = 0
    ) -> None:
        """A replica has it."""
        if (known := self._live.get(request)) is not None:
            known.running = True
            known.attempts.append(
                RequestAttempt(attempt=attempt, replica=replica, waited_s=round(waited_s, 3), prefix_tokens=prefix_tokens)
            )

    def restarted(self, request: RequestId, *, begun: bool = True) -> None:
        """It waits again; ``begun``: its replica had it, and it was not just handed over in vain."""
        known = self._live.get(request)
        if known is not None and known.attempts:
            known.attempts[-1] = msgspec.structs.replace(known.attempts[-1], lost=True, begun=begun)
            known.running = False

    def first_output(self, request: RequestId, now_s: float) -> None:
        """Its client got the first piece of the answer."""
        if (known := self._live.get(request)) is not None:
            known.first_output_s = now_s - known.arrived_s

    def ended(
        self, request: RequestId, now_s: float, *, status: int, code: str = "", output_tokens: int | None = None
    ) -> None:
        """It has ended in one way or another."""
        known = self._live.pop(request, None)
        if known is None:
            return
        known.ended_s, known.status, known.code, known.output_tokens = now_s, status, code, output_tokens
        self._ended[request] = known
        while len(self._ended) > self._ended_max:
            self._ended.popitem(last=False)

    def story(self, request: RequestId, now_s: float) -> RequestStory:
        """What is known of it now."""
        known = self._live.get(request) or self._ended.get(request)
        return RequestStory(request=request, known=False) if known is None else _story(request, known, now_s)


def _story(request: RequestId, known: _Known, now_s: float) -> RequestStory:
    profile = known.profile
    state = "ended" if known.ended_s is not None else "running" if known.running else "waiting"
    until_s = now_s if known.ended_s is None else known.ended_s
    return RequestStory(
        request=request,
        known=True,
        model=known.model,
        sla_class=profile.sla_class,
        lane=profile.lane,
        input_tokens=profile.input_tokens,
        expected_output_tokens=profile.expected_output_tokens,
        output_tokens=known.output_tokens,
        arrived_unix_s=known.arrived_unix_s,
        state=state,
        age_s=round(until_s - known.arrived_s, 3),
        attempts=tuple(known.attempts),
        first_output_s=None if known.first_output_s is None else round(known.first_output_s, 3),
        status=known.status,
        code=known.code,
    )
