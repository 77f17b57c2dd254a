"""One request between the gateway and whoever wrote it: an HTTP connection or a NATS inbox."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from broker.api.openai_answers import AnswerHead
from subjects.errors import ApiError
from subjects.ids import ReplicaId, RequestId, Tenant
from subjects.messages import Delta, Endpoint, SlaClass, Usage

BUFFERED_BYTES_MAX = 1024 * 1024
"""What a client may leave unread of one answer; a slower one is cut off, so that it cannot hold memory (PAINS L4)."""
READ_BYTES_MAX = 64 * 1024
"""Of a stream, read at once: what waits for a slow client stays here, where it is counted."""
_DELTA_BYTES = 200
"""Counted for each delta beside its text: a flood of empty ones must count too."""


class Ask(msgspec.Struct, frozen=True):
    """A request as it came in, with what the way in knows of its sender. Header names are lower case."""

    endpoint: Endpoint
    body: bytes
    tenant: Tenant
    sla_class: SlaClass | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    way: str = "http"
    stream: bool | None = None
    """Set where the way in decides the form of the answer, not the body."""


class Ended(msgspec.Struct, frozen=True):
    """The answer is whole."""

    usage: Usage | None


class Failed(msgspec.Struct, frozen=True):
    """There is no whole answer."""

    error: ApiError


Piece = Sequence[Delta] | Ended | Failed


def unavailable(message: str, code: str, retry_after_s: int | None = 1) -> ApiError:
    """The 503 of a gateway that does not serve this now."""
    return ApiError(503, message, type="server_error", code=code, retry_after_s=retry_after_s)


@dataclass(eq=False, slots=True)
class Exchange:
    """The reading side of an answer. ``next`` may be awaited by one task; ``push`` and ``close`` never block."""

    request: RequestId
    head: AnswerHead
    model: str
    """The model that answers; differs from the asked name for ``auto`` and after a degradation."""
    stream: bool
    input_tokens: int
    """The gateway's own count of the prompt; the engine's comes with the end."""
    _leave: Callable[[], None]
    degraded_from: str = ""
    replica: ReplicaId | None = None
    attempt: int = 0
    queue_wait_s: float | None = None
    prefix_tokens: int = 0
    """Of the prompt that its replica is believed not to compute again; the engine's own count comes with the end."""
    on_news: Callable[[], None] | None = None
    """For a reader without a task: called at most once per turn of the loop, when :meth:`read_now` has something."""
    left: bool = False
    """Whether the client is gone."""
    _news_due: bool = False
    _deltas: deque[Delta] = field(default_factory=deque)
    _buffered_bytes: int = 0
    _end: Ended | Failed | None = None
    _waiter: asyncio.Future[None] | None = None
    _timer: asyncio.TimerHandle | None = None
    _quiet_s: float = math.inf
    """In the loop's time: when the reader is to be told that there is no news."""

    def push(self, deltas: Sequence[Delta]) -> bool:
        """Adds output; False when the reader is too far behind and the answer should be given up."""
        if self._end is not None or self.left:
            return True
        for delta in deltas:
            self._deltas.append(delta)
            self._buffered_bytes += _size(delta)
        if not self.stream:
            # Nobody needs it before its end, and it is bounded by its own max_tokens.
            return True
        self._wake()
        return self._buffered_bytes <= BUFFERED_BYTES_MAX

    def degrade(self, model: str, degraded_from: str, leave: Callable[[], None]) -> None:
        """Another model answers from here on (ING-8); the id that the client knows stays."""
        self.head = msgspec.structs.replace(self.head, model=model)
        self.model, self.degraded_from = model, degraded_from
        self._leave = leave

    def close(self, end: Ended | Failed) -> None:
        """Nothing follows; the first call counts."""
        if self._end is None:
            self._end = end
            self._wake()

    def drop_buffered(self) -> None:
        """Forgets what is not read yet: of an answer that is given up."""
        self._deltas.clear()
        self._buffered_bytes = 0

    def leave(self) -> None:
        """The client is gone (or has its answer); calling again does nothing."""
        if not self.left:
            self.left = True
            self.drop_buffered()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._end is None:
                self._leave()
            self._wake()

    async def whole(
        self, quiet_s: float | None = None, on_quiet: Callable[[], Awaitable[None]] | None = None
    ) -> tuple[list[Delta], Usage | None] | Failed | None:
        """An answer that is no stream, and its usage; None: the client left. ``on_quiet`` comes after each ``quiet_s``."""
        deltas: list[Delta] = []
        while True:
            piece = await self.next(quiet_s)
            if isinstance(piece, Failed):
                return piece  # Raised here, its error and this frame would hold each other.
            if isinstance(piece, Ended):
                return deltas, piece.usage
            if piece is not None:
                deltas += piece
            elif self.left or on_quiet is None:
                return None
            else:
                await on_quiet()

    async def next(self, timeout_s: float | None = None) -> Piece | None:
        """The next deltas or the end; None after ``timeout_s`` without news, or when the client left."""
        await self.wait(timeout_s)
        return self.read_now()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns when there is something to read, after ``timeout_s`` without news, or when the client left."""
        if not self._deltas and self._end is None and not self.left:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            self._quiet_s = math.inf
            if timeout_s is not None:
                self._quiet_s = loop.time() + timeout_s
                # One timer for many waits: it looks when it fires whether it is needed later.
                if self._timer is None or self._timer.when() > self._quiet_s:
                    self._set_timer(loop)
            try:
                await self._waiter
            finally:
                self._waiter = None

    def read_now(self) -> Piece | None:
        """What :meth:`next` would return without waiting; None when it would wait, or when the client left."""
        if not self._deltas:
            return self._end
        if self._buffered_bytes <= READ_BYTES_MAX or not self.stream:
            deltas = tuple(self._deltas)
            self.drop_buffered()
            return deltas
        some: list[Delta] = []
        size = 0
        while self._deltas and size < READ_BYTES_MAX:
            some.append(self._deltas.popleft())
            size += _size(some[-1])
        self._buffered_bytes -= size
        return some

    @property
    def readable(self) -> bool:
        """Whether :meth:`read_now` has something."""
        return bool(self._deltas) or self._end is not None

    def end_if_read(self) -> Ended | Failed | None:
        """The end, if it is known and all before it was read."""
        return None if self._deltas else self._end

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(self._quiet_s, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        if self._waiter is None or self._quiet_s == math.inf:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._quiet_s:
            self._set_timer(loop)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
        elif self.on_news is not None and not self._news_due:
            self._news_due = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._news_due = False
        if self.on_news is not None:
            self.on_news()


def _size(delta: Delta) -> int:
    return len(delta.text) + len(delta.detail) + _DELTA_BYTES
