"""A Redis or Valkey that may freeze, vanish or refuse at any time, asked so that nobody waits for it longer than he said.

Two pools: one for questions (``ask``: a few milliseconds, then the caller goes on without), one for the index's own task
(``tell``). A question that is late is left to end by itself: its connection is never handed on in the middle of an answer,
and it is closed when its own timeout passes. So no cancelled command leaves its reply to the next caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvcache.core.index_buffer import Breaker
from subjects.errors import ConfigError, place_of
from subjects.tasks import end_tasks

T = TypeVar("T")
_NOT_OURS: Final = ("retry", "retry_on_timeout", "retry_on_error", "max_connections", "timeout", "decode_responses")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Bounds of one server's connections."""

    connect_timeout_s: float = 0.5
    read_timeout_s: float = 0.25
    """After this a question's connection is given up; its caller went on long before."""
    write_timeout_s: float = 1.0
    """For one batch."""
    reads_max: int = 8
    """Questions at a time; another one is answered with nothing at once."""
    failures_max: int = 3
    pause_s: float = 0.5
    pause_s_max: float = 2.0
    """A server that is back is noticed within this."""


class Refusal(Enum):
    """Why there was no answer."""

    AWAY = "away"
    """No connection, or no answer in time."""
    MEMORY = "memory"
    """The server takes no more data."""
    SCRIPT = "script"
    """It does not know the script (any more)."""
    WRONG = "wrong"
    """Any other error that the server answered, such as a key of another type or a command that is not allowed."""
    BUG = "bug"
    """Nobody foresaw it: ours or the client library's."""


def refusal_of(error: BaseException) -> Refusal:
    """What an error of the client means."""
    if isinstance(error, NoScriptError):
        return Refusal.SCRIPT
    if isinstance(error, OutOfMemoryError) or (isinstance(error, ResponseError) and "OOM " in str(error)[:64]):
        return Refusal.MEMORY
    if isinstance(error, ReadOnlyError | RedisConnectionError | RedisTimeoutError | OSError | asyncio.TimeoutError):
        return Refusal.AWAY
    return Refusal.WRONG if isinstance(error, RedisError) else Refusal.BUG


class RedisLink:
    """Connections to one server, and whether it is worth asking.

    Raises:
        ConfigError: the URL is none. The message does not quote it, since it may hold a password.
    """

    def __init__(self, url: str, settings: LinkSettings, *, breaker: Breaker | None = None) -> None:
        self.address, options = _options_of(url)
        """``host:port`` or a path; safe to log."""
        self.breaker = breaker or Breaker(
            failures_max=settings.failures_max, pause_s=settings.pause_s, pause_s_max=settings.pause_s_max
        )
        self.refusals: Counter[str] = Counter()
        """By ``Refusal``, and ``late`` (the caller went on) and ``skipped`` (not asked at all)."""
        self.last_error = ""
        """Type of the last one, and where it came up if nobody foresaw it; never its text."""
        self._settings = settings
        self._asking: set[asyncio.Task[Any]] = set()
        self._readers = _client(options, settings, timeout_s=settings.read_timeout_s, connections_max=settings.reads_max)
        self._writer = _client(options, settings, timeout_s=settings.write_timeout_s, connections_max=1)

    async def ask(self, question: Callable[[Redis], Awaitable[T]], deadline_s: float) -> T | None:
        """The answer, or None when there is none within ``deadline_s``; raises nothing but cancellation."""
        if not self.breaker.closed or len(self._asking) >= self._settings.reads_max:
            self.refusals["skipped"] += 1
            return None
        task = asyncio.get_running_loop().create_task(self._guarded(question, self._readers))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        done, _ = await asyncio.wait((task,), timeout=deadline_s)
        if not done:
            self.refusals["late"] += 1
            return None
        return None if task.cancelled() else task.result()[0]

    async def tell(self, work: Callable[[Redis], Awaitable[T]]) -> tuple[T | None, Refusal | None]:
        """For the index's one task: the result, or why there is none. Waits for the write timeout at most, per command."""
        return await self._guarded(work, self._writer)

    async def probe(self) -> bool:
        """While the server counts as away: tries it if the pause is over. Returns whether it may be asked."""
        if self.breaker.closed:
            return True
        if not self.breaker.probe(time.monotonic()):
            return False
        answered = False
        try:
            # The question's client: its timeout is the shorter one. What was open before is not trusted any more.
            await self._forget_connections()
            answered = await _ping(self._readers)
        except Exception as error:
            self.refused(refusal_of(error), error)
        finally:
            self.breaker.probed(answered, time.monotonic())
        return answered

    async def close(self) -> None:
        """Ends what still waits and closes all connections."""
        await end_tasks(tuple(self._asking))
        for client in (self._readers, self._writer):
            with contextlib.suppress(RedisError, OSError):
                await client.connection_pool.aclose()

    async def _guarded(self, work: Callable[[Redis], Awaitable[T]], client: Redis) -> tuple[T | None, Refusal | None]:
        try:
            result = await work(client)
        except Exception as error:  # Whatever it is, the caller goes on without an answer.
            refusal = refusal_of(error)
            self.refused(refusal, error)
            return None, refusal
        self.breaker.succeeded()
        return result, None

    def refused(self, refusal: Refusal, error: Exception) -> None:
        """Counts a failure, and gives the server a rest when it was not there too often."""
        self.refusals[refusal.value] += 1
        if refusal is not Refusal.SCRIPT:  # Any server lacks them at first.
            self.last_error = place_of(error) if refusal is Refusal.BUG else type(error).__name__
        if refusal is Refusal.AWAY:
            self.breaker.failed(time.monotonic())

    async def _forget_connections(self) -> None:
        for client in (self._readers, self._writer):
            with contextlib.suppress(RedisError, OSError):
                await client.connection_pool.disconnect(inuse_connections=False)


async def _ping(client: Redis) -> bool:
    return bool(await client.ping())


def _options_of(url: str) -> tuple[str, dict[str, Any]]:
    try:
        options: dict[str, Any] = dict(parse_url(url))
    except ValueError:
        # The parser's text may quote parts of the URL, and a password that holds a ``/`` or ``#`` lands in any of them.
        raise ConfigError("redis URL: use redis://, rediss:// or unix://, with a password percent-encoded") from None
    for name in _NOT_OURS:
        options.pop(name, None)
    path = options.get("path")
    address = path if path else f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
    return str(address), options


def _client(options: dict[str, Any], settings: LinkSettings, *, timeout_s: float, connections_max: int) -> Redis:
    pool = BlockingConnectionPool(
        **{
            **options,  # Ours come last: a URL that says ``?socket_timeout=0`` must not make us wait for ever.
            "max_connections": connections_max,
            "timeout": timeout_s,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": settings.connect_timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "health_check_interval": 0,
            "driver_info": None,
            "protocol": 2,
        }
    )
    return Redis(connection_pool=pool)
