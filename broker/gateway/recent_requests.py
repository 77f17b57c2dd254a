"""What a gateway remembers of its requests for ``carpool explain``: numbers, never a prompt or an answer."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from msgspec.structs import replace

from subjects.ids import ReplicaId, RequestId
from subjects.messages import RequestAttempt, RequestProfile, RequestStory

ENDED_MAX = 5000
"""So many ended requests are remembered, the latest ones."""


class RecentRequests:
    """Live requests, and the latest that ended. Times are the gateway's monotonic seconds."""

    def __init__(self, *, ended_max: int = ENDED_MAX) -> None:
        self._ended_max = ended_max
        self._live: dict[RequestId, tuple[RequestStory, float]] = {}
        """With the time of its arrival."""
        self._ended: OrderedDict[RequestId, RequestStory] = OrderedDict()

    def arrived(
        self, request: RequestId, model: str, profile: RequestProfile, arrived_s: float, arrived_unix_s: float
    ) -> None:
        """It was admitted."""
        story = RequestStory(
            request=request,
            known=True,
            model=model,
            sla_class=profile.sla_class,
            lane=profile.lane,
            input_tokens=profile.input_tokens,
            expected_output_tokens=profile.expected_output_tokens,
            arrived_unix_s=arrived_unix_s,
            state="waiting",
        )
        self._live[request] = story, arrived_s

    def granted(
        self, request: RequestId, attempt: int, replica: ReplicaId, waited_s: float, *, prefix_tokens: int = 0
    ) -> None:
        """A replica has it."""
        if request in self._live:
            new = RequestAttempt(attempt=attempt, replica=replica, waited_s=round(waited_s, 3), prefix_tokens=prefix_tokens)
            self._tell(request, state="running", attempts=(*self._live[request][0].attempts, new))

    def restarted(self, request: RequestId, *, begun: bool = True) -> None:
        """It waits again; ``begun``: its replica had it, and it was not just handed over in vain."""
        if request in self._live and (attempts := self._live[request][0].attempts):
            lost = replace(attempts[-1], lost=True, begun=begun)
            self._tell(request, state="waiting", attempts=(*attempts[:-1], lost))

    def first_output(self, request: RequestId, now_s: float) -> None:
        """Its client got the first piece of the answer."""
        if request in self._live:
            self._tell(request, first_output_s=round(now_s - self._live[request][1], 3))

    def _tell(self, request: RequestId, **news: Any) -> None:
        story, arrived_s = self._live[request]
        self._live[request] = replace(story, **news), arrived_s

    def ended(
        self, request: RequestId, now_s: float, *, status: int, code: str = "", output_tokens: int | None = None
    ) -> None:
        """It has ended in one way or another."""
        if request in self._live:
            self._tell(request, state="ended", status=status, code=code, output_tokens=output_tokens)
            self._ended[request] = self.story(request, now_s)
            del self._live[request]
            while len(self._ended) > self._ended_max:
                self._ended.popitem(last=False)

    def story(self, request: RequestId, now_s: float) -> RequestStory:
        """What is known of it now."""
        if request in self._live:
            story, arrived_s = self._live[request]
            return replace(story, age_s=round(now_s - arrived_s, 3))
        return self._ended.get(request) or RequestStory(request=request, known=False)
