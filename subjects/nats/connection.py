"""One connection to NATS that never gives up, never blocks and never sends late: what :mod:`subjects.nats.bus` stands on.

:mod:`subjects.nats.client` does the protocol. Here are subscriptions that survive reconnects, requests over one inbox for
all, and a client that has given up is started again. What was not written when the connection broke is dropped, and waiting
requests fail at once.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlparse

import structlog
from nats.errors import Error as NatsError

from subjects.errors import BusError, BusUnavailable, NoResponders, PayloadTooLarge, RequestTimeout, place_of
from subjects.nats.client import HANDSHAKE_TIMEOUT_S, PENDING_BYTES_MAX, Handler, Headers, Inbound, NatsClient
from subjects.tasks import end_tasks

PING_INTERVAL_S: Final = 1
PINGS_OUTSTANDING_MAX: Final = 2
RECONNECT_WAIT_S: Final = 0.25
CLOSE_TIMEOUT_S: Final = 2.0
REVIVE_INTERVAL_S: Final = 1.0
FLUSH_TIMEOUT_S: Final = 2.0

NO_RESPONDERS: Final = "503"
"""The status with which the server answers a message with a reply subject that nobody listens to."""

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class CoreSubscription:
    """A running core subscription."""

    _client: NatsClient
    _sid: int

    async def stop(self) -> None:
        """Ends it; calling again does nothing."""
        await self._client.remove(self._sid)


@dataclass(slots=True, eq=False)
class _Waiter:
    """Who gets the replies to one request: messages, or an error that ends it."""

    on_reply: Callable[[Inbound], None]
    on_error: Callable[[BusError], None]


@dataclass(slots=True, eq=False)
class Replies:
    """Replies to one request, until stopped."""

    _waiting: dict[str, _Waiter]
    _token: str

    async def stop(self) -> None:
        """Takes no more replies; calling again does nothing."""
        self._waiting.pop(self._token, None)


class Connection:
    """Subscriptions, publishes and requests on one socket to one of ``urls`` at a time."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        name: str,
        inbox_prefix: str = "_INBOX",
        user: str | None = None,
        password: str | None = None,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._urls = list(urls)
        self._options: dict[str, Any] = {
            "name": name,
            "user": user,
            "password": password,
            "token": token,
            "tls": tls,
            "inbox_prefix": inbox_prefix,
        }
        self._client = NatsClient()
        self._closing = False
        self._opened = False
        self._opener: asyncio.Task[None] | None = None
        self._reviver: asyncio.Task[None] | None = None
        self._on_connected: list[Callable[[], None]] = []
        self._on_lost: list[Callable[[], None]] = []
        self._waiting: dict[str, _Waiter] = {}
        self._tokens = 0
        self._inbox = f"{inbox_prefix}.{self._client._nuid.next().decode()}"
        self._client.add(f"{self._inbox}.*", "", self._replied)
        self.last_error = ""
        self.generation = 0
        """Grows whenever the connection is lost: what was known of the server before may be wrong now."""

    # ---- the connection itself

    async def open(self, *, timeout_s: float) -> None:
        """Connects.

        Raises:
            BusUnavailable: no server answered within ``timeout_s``.
            ValueError: a malformed URL.
        """
        self.open_later()
        assert self._opener is not None
        done, _ = await asyncio.wait({self._opener}, timeout=timeout_s)
        if not done:
            await self.close()
            raise BusUnavailable(f"no NATS server at {self.servers}: {self.last_error or 'no answer'}")
        self._opener.result()

    def open_later(self) -> None:
        """Connects in the background, however long it takes.

        Raises:
            ValueError: a malformed URL.
        """
        for url in self._urls:
            try:
                self._client._parse_server_uri(url)
            except NatsError as error:
                raise ValueError(f"{url!r} is not the URL of a NATS server: use nats://HOST:PORT") from error
        loop = asyncio.get_running_loop()
        self._opener = loop.create_task(self._open())
        self._reviver = loop.create_task(self._revive())

    async def _open(self) -> None:
        await self._client.connect(
            self._urls,
            error_cb=self._failed,
            disconnected_cb=self._lost,
            reconnected_cb=self._regained,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type] # annotated int, used as seconds
            connect_timeout=HANDSHAKE_TIMEOUT_S,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=PINGS_OUTSTANDING_MAX,
            pending_size=PENDING_BYTES_MAX,
            flush_timeout=FLUSH_TIMEOUT_S,
            **self._options,
        )
        # No other task ran since the server's first pong, so nothing was sent ahead of the subscriptions.
        self._client.write_subscriptions()
        self._opened = True
        self._call(self._on_connected)

    async def _revive(self) -> None:
        while True:
            await asyncio.sleep(REVIVE_INTERVAL_S)
            if self._opened and self._client.is_given_up():
                log.warning("the bus client stopped reconnecting; starting it again", error=self.last_error)
                self._client.revive()

    async def _failed(self, error: Exception) -> None:
        before, self.last_error = self.last_error, str(error) or type(error).__name__
        # An absent server is said once, when the connection is lost; wrong credentials once, not with every attempt.
        if self.last_error != before and not isinstance(error, (OSError, TimeoutError)):
            log.warning("bus error", error=self.last_error)

    async def _lost(self) -> None:
        self.generation += 1
        self._client.drop_unsent()
        if self._closing:
            return
        log.warning("bus connection lost", error=self._client.lost_because)
        self._fail_waiters("connection lost")
        self._call(self._on_lost)

    async def _regained(self) -> None:
        log.info("bus connection is back")
        self._call(self._on_connected)

    def _fail_waiters(self, text: str) -> None:
        waiting = list(self._waiting.values())
        self._waiting.clear()
        for waiter in waiting:
            waiter.on_error(BusUnavailable(text))

    def _call(self, callbacks: list[Callable[[], None]]) -> None:
        for callback in list(callbacks):
            try:
                callback()
            except Exception as error:
                self._client.handler_errors += 1
                log.error("a callback of the bus connection failed", error=place_of(error))

    async def close(self) -> None:
        """Sends what waits and closes; calling again does nothing."""
        if self._closing:
            return
        self._closing = True
        await end_tasks(task for task in (self._opener, self._reviver) if task is not None)
        client = self._client
        try:
            if client.is_connected:
                client.write_all()
                await client.flush(timeout=CLOSE_TIMEOUT_S)  # type: ignore[arg-type] # annotated int, used as seconds
        except (NatsError, OSError, TimeoutError):
            log.debug("the last bytes may not have reached the server")
        client.drop_unsent()
        if client._flush_queue is not None:
            await client.close()
        client.abort()
        self._fail_waiters("closed")

    def on_connected(self, callback: Callable[[], None]) -> None:
        """Calls back after the first connection that :meth:`open_later` makes, and after every later one."""
        self._on_connected.append(callback)

    def on_lost(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back whenever the connection is lost, until the function that is returned is called."""
        self._on_lost.append(callback)
        return lambda: self._on_lost.remove(callback)

    @property
    def connected(self) -> bool:
        """Whether the connection is up as far as this side knows."""
        return self._opened and not self._closing and self._client.is_connected

    @property
    def payload_bytes_max(self) -> int:
        """The largest message the server takes."""
        return self._client.max_payload

    @property
    def servers(self) -> str:
        """Hosts and ports, without credentials."""
        parsed = [urlparse(url if "//" in url else f"nats://{url}") for url in self._urls]
        return ", ".join(f"{url.hostname}:{url.port or 4222}" for url in parsed)

    def counters(self) -> dict[str, int]:
        """Messages and bytes in and out, reconnects, failed handlers."""
        return {**self._client.stats, "handler_errors": self._client.handler_errors}

    # ---- messages

    def check(self, size_bytes: int) -> None:
        """Raises BusUnavailable or PayloadTooLarge unless a message of this size may be sent now."""
        if not self.connected:
            raise BusUnavailable(f"not connected to {self.servers}: {self.last_error or 'connecting'}")
        if size_bytes > self._client.max_payload:
            raise PayloadTooLarge(size_bytes, self._client.max_payload)

    def post(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Sends a message at the end of this turn of the loop; what waits for a slow server is bounded."""
        self.check(len(payload))
        self._client.post(subject, payload, reply)

    async def publish(self, subject: str, payload: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        """Sends a message, and waits while the server reads too slowly."""
        self.check(len(payload))
        try:
            if headers is None:
                self._client.post(subject, payload, reply)
                await self._client.drain()
            else:
                await self._client.publish(subject, payload, reply, headers)
        except NatsError as error:
            raise _translated(error) from error

    async def subscribe(self, subject: str, handler: Handler, *, group: str = "") -> CoreSubscription:
        """Calls ``handler`` for each message, also after reconnects."""
        sid = self._client.add(subject, group, handler)
        if self.connected:
            await self._client.announce(sid)
        return CoreSubscription(self._client, sid)

    def new_inbox(self) -> str:
        """A subject for a subscription of one's own."""
        return self._client.new_inbox()

    async def round_trip(self, timeout_s: float) -> float:
        """Seconds for a ping to the server and its pong."""
        self.check(0)
        try:
            return await self._client.rtt(timeout=timeout_s)  # type: ignore[arg-type] # annotated int, used as seconds
        except TimeoutError as error:
            raise RequestTimeout(f"no pong within {timeout_s} s") from error
        except NatsError as error:
            raise _translated(error) from error

    # ---- requests: one inbox for all, one token each

    async def request_many(
        self,
        subject: str,
        payload: bytes,
        *,
        on_reply: Callable[[Inbound], None],
        on_error: Callable[[BusError], None],
        headers: Headers | None = None,
    ) -> Replies:
        """Sends a request and hands on all its replies until stopped, or one error: nobody listens, connection lost."""
        self._tokens += 1
        key = format(self._tokens, "x")
        self._waiting[key] = _Waiter(on_reply, on_error)
        try:
            await self.publish(subject, payload, reply=f"{self._inbox}.{key}", headers=headers)
        except BaseException:
            self._waiting.pop(key, None)
            raise
        return Replies(self._waiting, key)

    async def request(self, subject: str, payload: bytes, *, timeout_s: float, headers: Headers | None = None) -> Inbound:
        """Sends a request and waits for its one reply."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Inbound] = loop.create_future()
        replies = await self.request_many(
            subject,
            payload,
            on_reply=lambda message: None if future.done() else future.set_result(message),
            on_error=lambda error: None if future.done() else future.set_exception(error),
            headers=headers,
        )
        timer = loop.call_later(timeout_s, _time_out, future, subject, timeout_s)
        try:
            return await future
        finally:
            timer.cancel()
            self._waiting.pop(replies._token, None)

    def _replied(self, message: Inbound) -> None:
        waiter = self._waiting.get(message.subject.rpartition(".")[2])
        if waiter is None:
            return
        if message.status == NO_RESPONDERS:
            self._waiting.pop(message.subject.rpartition(".")[2], None)
            waiter.on_error(NoResponders("nobody listens there"))
        else:
            waiter.on_reply(message)


def _time_out(future: asyncio.Future[Inbound], subject: str, timeout_s: float) -> None:
    if not future.done():
        future.set_exception(RequestTimeout(f"no reply on {subject} within {timeout_s} s"))


def _translated(error: NatsError) -> BusError:
    from nats.errors import BadSubjectError, MaxPayloadError

    if isinstance(error, MaxPayloadError):
        return BusError("message too large")
    return BusError("malformed subject") if isinstance(error, BadSubjectError) else BusUnavailable(str(error))
