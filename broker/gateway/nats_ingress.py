"""The NATS way in: the same bodies as over HTTP, one request in, frames out (ING-2)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import structlog

from broker.api.openai_answers import OpenAiWriter, error_body
from broker.gateway.exchange import Ask, Ended, Exchange, Failed, unavailable
from broker.gateway.gateway import Gateway
from broker.http.cycle import internal_error
from subjects import names
from subjects.bus import Bus, BusMessage, Subscription
from subjects.codec import decode, encode
from subjects.errors import ApiError, BusError, DecodeError, PayloadTooLarge, place_of
from subjects.ids import Tenant
from subjects.messages import InferFrame, InferRequest
from subjects.tasks import end_tasks

GROUP = "gateways"
KEEP_ALIVE_S = 5.0
"""An empty frame after so much silence tells the requester that its request is alive."""
REQUESTS_MAX = 4096
LAST_FRAMES_S_MAX = 1.0

log = structlog.get_logger(__name__)


def inbox_prefix(tenant: str) -> str:
    """Replies go only below this, which only that tenant's credentials may subscribe to (SEC-1)."""
    return f"_INBOX_{tenant}."


@dataclass(eq=False, slots=True)
class NatsIngress:
    """Answers requests on ``infer.<tenant>``; each one goes to a single gateway of the pool."""

    _bus: Bus
    _gateway: Gateway
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _subscription: Subscription | None = None

    async def start(self) -> None:
        """Subscribes."""
        self._subscription = await self._bus.subscribe(names.ALL_INFER, self._on_request, group=GROUP)

    async def stop_taking(self) -> None:
        """New requests go to other gateways from here on."""
        if self._subscription is not None:
            await self._subscription.stop()

    async def stop(self) -> None:
        """Ends what still runs."""
        await self.stop_taking()
        tasks = list(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_FRAMES_S_MAX)
        await end_tasks(tasks)

    def _on_request(self, message: BusMessage) -> None:
        tenant = message.subject.rpartition(".")[2]
        if not message.reply.startswith(inbox_prefix(tenant)):
            # Whoever it is, the answer to this tenant's request must not go to another subject.
            self._gateway.discarded("infer-reply")
            return
        answer = _Answer(self._bus, message.reply)
        task = asyncio.get_running_loop().create_task(self._answer(Tenant(tenant), message.payload, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, tenant: Tenant, payload: bytes, answer: _Answer) -> None:
        exchange: Exchange | None = None
        try:
            if len(self._tasks) > REQUESTS_MAX:
                raise unavailable("Too many requests over NATS.", "overloaded")
            try:
                request = decode(payload, InferRequest)
            except DecodeError:
                raise ApiError(400, "The payload is not an InferRequest in MessagePack.", code="invalid_payload") from None
            ask = Ask(
                endpoint=request.endpoint,
                body=request.body,
                tenant=tenant,
                headers={name.lower(): value for name, value in request.headers.items()},
                way="nats",
                stream=True if request.stream else None,
            )
            exchange = await self._gateway.open(ask)
            if exchange.stream:
                await _stream(exchange, answer)
            else:
                await _whole(exchange, answer)
        except ApiError as error:
            await answer.fail(error)
        except BusError as error:
            log.debug("an answer over NATS was cut off", error=str(error))
        except Exception as error:
            log.error("a request over NATS failed", error=place_of(error))
            await answer.fail(internal_error())
        finally:
            # Core NATS does not tell when a requester is gone; its request is bounded by its deadline.
            if exchange is not None:
                exchange.leave()


@dataclass(eq=False, slots=True)
class _Answer:
    """Numbers and sends the frames of one answer."""

    _bus: Bus
    _reply: str
    _sequence: int = 0

    async def send(self, body: bytes, *, status: int = 200, last: bool = False) -> None:
        frame = InferFrame(sequence=self._sequence, status=status, body=body, last=last)
        self._sequence += 1
        await self._bus.publish(self._reply, encode(frame))

    async def fail(self, error: ApiError) -> None:
        try:
            await self.send(error_body(error), status=error.status, last=True)
        except BusError as lost:
            log.debug("an error was not sent over NATS", error=str(lost))


async def _stream(exchange: Exchange, answer: _Answer) -> None:
    writer: OpenAiWriter | None = None
    while True:
        if (piece := await exchange.next(KEEP_ALIVE_S)) is None:
            await answer.send(b"")
            continue
        if isinstance(piece, Failed):
            raise piece.error
        writer = writer or OpenAiWriter(exchange.head)
        if isinstance(piece, Ended):
            await answer.send(writer.usage_chunk(piece.usage) or b"", last=True)
            return
        for delta in piece:
            for chunk in writer.chunks(delta):
                await answer.send(chunk)


async def _whole(exchange: Exchange, answer: _Answer) -> None:
    told = await exchange.whole(KEEP_ALIVE_S, lambda: answer.send(b""))
    assert told is not None, "only its own answer leaves an exchange over NATS"
    if isinstance(told, Failed):
        raise told.error
    try:
        await answer.send(OpenAiWriter(exchange.head).whole(*told), last=True)
    except PayloadTooLarge:
        message = "The answer is larger than the bus takes in one message; ask for a stream."
        raise ApiError(500, message, type="server_error", code="answer_too_large") from None
