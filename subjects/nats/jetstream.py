"""JetStream's JSON API over one :class:`~subjects.nats.connection.Connection`: streams, kept messages, acknowledgements."""

from __future__ import annotations

import asyncio
import base64
import calendar
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from subjects.errors import BusError, BusUnavailable, NoResponders, QueueFull, QueueMissing, RequestTimeout, WrongRevision
from subjects.nats.client import Headers, Inbound
from subjects.nats.connection import Connection

API: Final = "$JS.API"
API_TIMEOUT_S: Final = 5.0
PUBLISH_TIMEOUT_S: Final = 2.0
NANOSECONDS: Final = 1_000_000_000

STREAM_MISSING: Final = 10059
CONSUMER_MISSING: Final = 10014
STREAM_EXISTS_OTHERWISE: Final = 10058
MESSAGE_MISSING: Final = frozenset({10037, 10043, 10057})
WRONG_LAST_SEQUENCE: Final = frozenset({10071, 10164})
LIMIT_REACHED: Final = frozenset({10077, 10047, 10028, 10122, 10023})

EXPECTED_LAST_SEQUENCE: Final = "Nats-Expected-Last-Sequence"
EXPECTED_LAST_SUBJECT_SEQUENCE: Final = "Nats-Expected-Last-Subject-Sequence"


class JetStreamRefused(BusError):
    """An error of the API that has no better name here; ``code`` is the server's error code."""

    def __init__(self, code: int, description: str) -> None:
        super().__init__(f"JetStream error {code}: {description}")
        self.code = code


class _ApiError(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class PublishAck(msgspec.Struct):
    """What the server says of a stored message."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: _ApiError | None = None


class RawMessage(msgspec.Struct):
    """A kept message as the API gives it."""

    subject: str
    seq: int
    hdrs: str = ""
    data: str = ""

    def payload(self) -> bytes:
        """The message's bytes."""
        return base64.b64decode(self.data)

    def header_bytes(self) -> bytes:
        """The message's header block."""
        return base64.b64decode(self.hdrs)


class _RawReply(msgspec.Struct):
    message: RawMessage | None = None
    error: _ApiError | None = None


class StreamState(msgspec.Struct, frozen=True):
    """When a stream was created (nanoseconds since the epoch) and how far it goes."""

    created: int
    messages: int
    last_sequence: int


_ack_decoder = msgspec.json.Decoder(PublishAck)
_raw_decoder = msgspec.json.Decoder(_RawReply)


def nanoseconds(rfc3339: str) -> int:
    """``2026-11-29T21:00:00.123456789Z`` as nanoseconds since the epoch.

    The standard library would cut the fraction to microseconds, and a creation time is an identity here.
    """
    seconds, _, fraction = rfc3339.removesuffix("Z").partition(".")
    whole = calendar.timegm(time.strptime(seconds, "%Y-%m-%dT%H:%M:%S"))
    return whole * NANOSECONDS + int(fraction.ljust(9, "0")[:9] or 0)


def _raise(error: _ApiError) -> None:
    code, text = error.err_code, error.description
    if code in (STREAM_MISSING, CONSUMER_MISSING):
        raise QueueMissing(text)
    if code in WRONG_LAST_SEQUENCE:
        raise WrongRevision(text)
    if code in LIMIT_REACHED:
        raise QueueFull(text)
    raise JetStreamRefused(code, text)


class JetStream:
    """The calls that our bus needs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def call(self, what: str, argument: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One request to the API.

        Raises:
            QueueMissing, QueueFull, WrongRevision, JetStreamRefused, BusUnavailable, RequestTimeout
        """
        payload = b"" if argument is None else msgspec.json.encode(argument)
        try:
            reply = await self._connection.request(f"{API}.{what}", payload, timeout_s=API_TIMEOUT_S)
        except NoResponders as error:
            raise BusUnavailable("the server has no JetStream (start it with -js)") from error
        answer: dict[str, Any] = msgspec.json.decode(reply.payload)
        if "error" in answer:
            _raise(msgspec.convert(answer["error"], _ApiError))
        return answer

    async def publish(
        self, subject: str, payload: bytes, headers: Headers | None, *, timeout_s: float = PUBLISH_TIMEOUT_S
    ) -> PublishAck:
        """Stores a message and waits for the acknowledgement.

        Raises:
            QueueMissing: no stream takes this subject.
            QueueFull, WrongRevision, JetStreamRefused, BusUnavailable, RequestTimeout, PayloadTooLarge
        """
        try:
            reply = await self._connection.request(subject, payload, timeout_s=timeout_s, headers=headers)
        except NoResponders as error:
            raise QueueMissing(f"no stream takes {subject}") from error
        ack = _ack_decoder.decode(reply.payload)
        if ack.error is not None:
            _raise(ack.error)
        return ack

    async def ensure(self, config: Mapping[str, Any]) -> None:
        """Creates a stream, or gives an existing one these limits."""
        name = config["name"]
        try:
            await self.call(f"STREAM.CREATE.{name}", config)
        except JetStreamRefused as error:
            if error.code != STREAM_EXISTS_OTHERWISE:
                raise
            await self.call(f"STREAM.UPDATE.{name}", config)

    async def state(self, name: str) -> StreamState | None:
        """A stream's state, or None when there is no such stream."""
        try:
            info = await self.call(f"STREAM.INFO.{name}")
        except QueueMissing:
            return None
        return StreamState(nanoseconds(info["created"]), info["state"]["messages"], info["state"]["last_seq"])

    async def last_message(self, stream: str, subject: str) -> RawMessage | None:
        """The last message on ``subject``, asked of the stream's leader, or None.

        Raises:
            QueueMissing: no such stream.
        """
        payload = msgspec.json.encode({"last_by_subj": subject})
        reply = await self._connection.request(f"{API}.STREAM.MSG.GET.{stream}", payload, timeout_s=API_TIMEOUT_S)
        answer = _raw_decoder.decode(reply.payload)
        if answer.error is not None:
            if answer.error.err_code in MESSAGE_MISSING:
                return None
            _raise(answer.error)
        return answer.message

    async def read(self, stream: str, *, start_sequence: int, messages_max: int) -> list[tuple[int, Inbound]]:
        """Kept messages with their sequences.

        Raises:
            QueueMissing: no such stream.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        found: list[tuple[int, Inbound]] = []

        def replied(message: Inbound) -> None:
            if message.status:
                if not ended.done():
                    ended.set_result(None)
                return
            headers = message.headers or {}
            message.subject = headers.get("Nats-Subject", "")
            found.append((int(headers.get("Nats-Sequence", "0")), message))

        payload = msgspec.json.encode({"seq": max(start_sequence, 1), "batch": messages_max})
        replies = await self._connection.request_many(
            f"{API}.DIRECT.GET.{stream}",
            payload,
            on_reply=replied,
            on_error=lambda error: None if ended.done() else ended.set_exception(error),
        )
        try:
            async with asyncio.timeout(API_TIMEOUT_S):
                await ended
        except NoResponders as error:
            raise QueueMissing(f"no stream {stream}") from error
        except TimeoutError as error:
            raise RequestTimeout(f"stream {stream} was not read within {API_TIMEOUT_S} s") from error
        finally:
            await replies.stop()
        return found


def kept_stream(
    name: str, subjects: Sequence[str], *, max_age_s: float, max_bytes: int, memory: bool, **more: Any
) -> dict[str, Any]:
    """The configuration of a stream that keeps what is published."""
    return {
        "name": name,
        "subjects": list(subjects),
        "retention": "limits",
        "storage": "memory" if memory else "file",
        "discard": "old",
        "max_age": int(max_age_s * NANOSECONDS),
        "max_bytes": max_bytes,
        "max_msgs": -1,
        "max_consumers": -1,
        "num_replicas": 1,
        "allow_direct": True,
        **more,
    }
