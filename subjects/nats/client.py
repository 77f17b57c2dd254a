"""nats-py's client with what hurts here changed: what :mod:`subjects.nats.connection` stands on.

nats-py does the protocol, authentication, TLS and the choice of servers. This module changes:

- A half-open connection: nats-py waits for its write buffer to drain before it reconnects, which TCP may take a quarter of
  an hour for. Ours aborts the socket.
- Any ``-ERR`` but a permission violation closes nats-py's client for good. Ours reconnects.
- A pong that comes after its waiter gave up kills nats-py's read loop. Ours is ignored.
- nats-py sends a ping past what waits to be written, so that its pong proves nothing about subscriptions made before. Ours
  keeps the order.
- nats-py takes a server for dead whose pongs wait behind a flood of messages. Here any message is a sign of life.
- Messages go straight from the read loop to plain functions, with no queue and no task per subscription in between. What a
  slow handler does not take stays in the socket and in the server, so nothing is dropped here.
- nats-py matches six regular expressions and copies a buffer per message. Ours cuts plain messages out of what was read, and
  leaves all else to nats-py.
- nats-py wakes a task for what is to be sent. Here all that is posted in one turn of the loop is one write at its end.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog
from nats.aio.client import Client, Srv
from nats.aio.subscription import Subscription as NatsSubscription
from nats.aio.transport import TcpTransport
from nats.errors import Error as NatsError
from nats.protocol.parser import AWAITING_CONTROL_LINE, AWAITING_MSG_PAYLOAD, Parser

from subjects.errors import BusError, BusUnavailable, place_of

HANDSHAKE_TIMEOUT_S: Final = 2
PENDING_BYTES_MAX: Final = 32 * 1024 * 1024
SLOW_SERVER_BYTES: Final = 1024 * 1024
"""From so much that the kernel did not take, who waits for a publish waits for the server."""
READ_BUFFER_BYTES: Final = 256 * 1024

_BREAKS_A_LINE = re.compile(r"[\s\x00]")
"""A subject with one of these would be read as a command of its own."""

Headers = dict[str, str]
Handler = Callable[["Inbound"], None]
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Inbound:
    """A message as it came from the server. ``status`` is its inline status (``"503"``), else empty."""

    subject: str
    reply: str
    payload: bytes
    headers: Headers | None

    @property
    def status(self) -> str:
        """The inline status of a control message."""
        return self.headers.get("Status", "") if self.headers is not None and not self.payload else ""


class _AbortingTransport(TcpTransport):
    """TCP whose close does not wait for a peer that reads no more."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        if self._io_writer is not None:
            self._io_writer.transport.abort()

    async def wait_closed(self) -> None:
        """Nothing to wait for after an abort."""


class _Parser(Parser):
    """nats-py's parser with a short way for plain messages that came whole."""

    nc: NatsClient

    async def parse(self, data: bytes = b"") -> None:
        place, size = 0, len(data)
        if self.state == AWAITING_MSG_PAYLOAD and not self.header_needed:
            missing = self.needed + 2 - len(self.buf)
            if size < missing:
                self.buf += data
                return
            self.buf += data[:missing]
            message, payload = self.msg_arg, bytes(self.buf[: self.needed])
            self.buf.clear()
            self.state, place = AWAITING_CONTROL_LINE, missing
            self.nc.take(message["sid"], message["subject"], message["reply"], payload, None)
        elif self.state != AWAITING_CONTROL_LINE:
            await super().parse(data)
            return
        elif self.buf:  # a control line that came in part
            data = bytes(self.buf) + data
            self.buf.clear()
            size = len(data)
        while place < size and data.startswith(b"MSG ", place):
            line_end = data.find(b"\r\n", place)
            if line_end < 0:
                break
            fields = data[place + 4 : line_end].split()
            start = line_end + 2
            end = start + int(fields[-1])
            reply = fields[2] if len(fields) == 4 else b""
            if end + 2 > size:
                self.msg_arg = {"subject": fields[0], "sid": int(fields[1]), "reply": reply}
                self.needed, self.header_needed, self.state = end - start, 0, AWAITING_MSG_PAYLOAD
                self.buf += data[start:]
                return
            self.nc.take(int(fields[1]), fields[0], reply, data[start:end], None)
            place = end + 2
        if place < size:
            await super().parse(data[place:])


class NatsClient(Client):
    """nats-py's client with these changes."""

    def __init__(self) -> None:
        super().__init__()
        self._ps = _Parser(self)
        self._flush_is_due = False
        self.handlers: dict[int, Handler] = {}
        self.registered: dict[int, NatsSubscription] = {}
        self.handler_errors = 0
        self.lost_because = ""

    async def _connect_to_server(self, s: Srv) -> None:
        self.abort()  # the socket of an attempt that failed during its handshake
        transport = _AbortingTransport()
        await transport.connect(s.uri, buffer_size=READ_BUFFER_BYTES, connect_timeout=HANDSHAKE_TIMEOUT_S)
        self._transport = transport

    async def _process_err(self, err_msg: str) -> None:
        if "permissions violation" in err_msg:
            await self._error_cb(NatsError(f"nats: {err_msg}"))
            return
        await self._process_op_err(NatsError(f"nats: {err_msg}"))

    async def _process_op_err(self, e: Exception) -> None:
        self.lost_because = str(e) or type(e).__name__
        await super()._process_op_err(e)

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        self.write_all()
        await super()._send_ping(future)

    async def _process_pong(self) -> None:
        self._pings_outstanding = 0
        self._pongs_received += 1
        if self._pongs:
            future = self._pongs.pop(0)
            if not future.done():
                future.set_result(True)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        self.take(sid, subject, reply, data, await self._process_headers(headers) if headers else None)

    def take(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: Headers | None) -> None:
        """Hands a message to its handler."""
        # Whatever arrives proves that the server lives: under a flood its pong waits behind megabytes of messages.
        self._pings_outstanding = 0
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        handler = self.handlers.get(sid)
        if handler is None:
            return
        try:
            handler(Inbound(subject.decode(), reply.decode(), data, headers))
        except Exception as error:
            self.handler_errors += 1
            log.error("a handler of bus messages failed", error=place_of(error), failures=self.handler_errors)

    def abort(self) -> None:
        """Drops the socket."""
        if self._transport:
            self._transport.close()  # type: ignore[no-untyped-call]

    def drop_unsent(self) -> None:
        """Forgets what was not written; subscriptions are sent again from the list of them."""
        self._pending = []
        self._pending_data_size = 0

    def is_given_up(self) -> bool:
        """Whether nobody works on a connection any more."""
        return not self.is_connected and (self._reconnection_task is None or self._reconnection_task.done())

    def revive(self) -> None:
        """Starts to reconnect again after nats-py stopped."""
        self._status = Client.RECONNECTING
        self._subs = dict(self.registered)
        self._reconnection_task = asyncio.get_running_loop().create_task(self._attempt_reconnect())

    def write_subscriptions(self) -> None:
        """Sends all subscriptions on a fresh first connection."""
        self.drop_unsent()
        self._subs = dict(self.registered)
        assert self._transport is not None
        for sid, subscription in self.registered.items():
            self._transport.write(f"SUB {subscription.subject} {subscription.queue} {sid}\r\n".encode())

    def add(self, subject: str, group: str, handler: Handler) -> int:
        """Registers a subscription without telling the server."""
        self._sid += 1
        sid = self._sid
        subscription = NatsSubscription(self, sid, subject, queue=group)
        self.registered[sid] = self._subs[sid] = subscription
        self.handlers[sid] = handler
        return sid

    async def announce(self, sid: int) -> None:
        """Tells the server of a registered subscription."""
        await self._send_subscribe(self.registered[sid])

    async def remove(self, sid: int) -> None:
        """Ends a subscription."""
        self.handlers.pop(sid, None)
        self._subs.pop(sid, None)
        if self.registered.pop(sid, None) is not None and self.is_connected:
            await self._send_unsubscribe(sid)

    def post(self, subject: str, payload: bytes, reply: str) -> None:
        """Sends a message at the end of this turn of the loop.

        Raises:
            BusUnavailable: the server takes so little that too much waits already.
            BusError: a malformed subject.
        """
        if not subject or _BREAKS_A_LINE.search(subject) or _BREAKS_A_LINE.search(reply):
            raise BusError("malformed subject")
        if self._pending_data_size + self.unwritten_bytes() > PENDING_BYTES_MAX:
            raise BusUnavailable("the server reads too slowly")
        head = f"PUB {subject} {reply} {len(payload)}\r\n" if reply else f"PUB {subject} {len(payload)}\r\n"
        self._pending += (head.encode(), payload, b"\r\n")
        self._pending_data_size += len(head) + len(payload) + 2
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self.is_connected:
            self.write_all()

    def unwritten_bytes(self) -> int:
        """What the kernel did not take yet."""
        writer = self._transport._io_writer if isinstance(self._transport, TcpTransport) else None
        return 0 if writer is None else writer.transport.get_write_buffer_size()

    async def drain(self) -> None:
        """Waits while much is unsent and the server reads too slowly."""
        if self._pending_data_size > SLOW_SERVER_BYTES:
            self.write_all()
        if self._transport is not None and self.unwritten_bytes() > SLOW_SERVER_BYTES:
            await self._transport.drain()  # type: ignore[no-untyped-call]

    def write_all(self) -> None:
        """Hands everything that waits to the socket, in order."""
        if self._pending and self._transport:
            waiting, self._pending, self._pending_data_size = self._pending, [], 0
            self._transport.writelines(waiting)
