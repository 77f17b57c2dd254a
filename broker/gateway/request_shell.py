"""Runs the request core on a bus: decode, step, encode. Nothing is decided here."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING, assert_never

import structlog

from broker.core.requests import events as ev
from broker.core.requests.core import RequestCore
from kvcache.core.prefix_index import PrefixIndex
from subjects import names
from subjects.bus import Bus, BusMessage, Subscription
from subjects.codec import decode, encode
from subjects.errors import (
    BusError,
    BusUnavailable,
    DecodeError,
    PayloadTooLarge,
    QueueFull,
    QueueMissing,
    RequestTimeout,
    place_of,
)
from subjects.ids import IngressId, ModelKey, RequestId, model_key
from subjects.messages import Claim, Frames, ModelDemand
from subjects.tasks import Tasks

if TYPE_CHECKING:
    from broker.gateway.gateway import Gateway

ROUND_TRIP_EVERY_S = 0.2
ROUND_TRIP_TIMEOUT_S = 1.0
QUEUE_CHECK_EVERY_S = 1.0
BUS_RETRY_S = 0.5
_NOT_STORED: dict[type[BusError], ev.NotStoredReason] = {
    QueueFull: ev.NotStoredReason.QUEUE_FULL,
    QueueMissing: ev.NotStoredReason.QUEUE_MISSING,
    RequestTimeout: ev.NotStoredReason.TIMEOUT,
}

log = structlog.get_logger(__name__)


class RequestShell:
    """Connects one :class:`RequestCore` to one bus."""

    def __init__(
        self, bus: Bus, ingress: IngressId, gateway: Gateway, *, queue_shards: int = 1, prefixes: PrefixIndex | None = None
    ) -> None:
        """``gateway`` hears of its requests inside a step: it may submit events, not raise. The core reads ``prefixes``."""
        self._bus = bus
        self._ingress = ingress
        self._gateway = gateway
        self._shards = queue_shards
        self._core = RequestCore(ingress, prefixes=prefixes)
        self._events: deque[ev.RequestEvent] = deque()
        self._stepping = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s: float | None = None
        self._loops = Tasks(gateway.broke)
        self._tasks = Tasks(lambda error: log.error("a task of the gateway failed", error=place_of(error)))
        self._ensuring_queue = False
        self._unheard = names.all_unheard(ingress).removesuffix("*.*")
        self._replies: dict[int, str] = {}
        self._claims = 0
        self._subscriptions: list[Subscription] = []
        self._stopped = False
        self.round_trip_s: float | None = None
        """The last measured round trip to the bus, None while it does not answer."""

    def take_demand(self) -> tuple[ModelDemand, ...]:
        """Counts for the telemetry since the last call."""
        return self._core.take_demand(time.monotonic())

    async def start(self) -> None:
        """Subscribes, and keeps the streams of the work-queue in being. Works without a bus; it may come later."""
        self._subscriptions = [
            await self._bus.subscribe(names.claim(self._ingress), self._on_claim),
            await self._bus.subscribe(names.out(self._ingress), self._on_frames),
            await self._bus.subscribe(names.all_unheard(self._ingress), self._on_unheard),
        ]
        self._bus.on_reconnected(self._on_reconnected)
        self._loops.spawn(self._check_round_trip(), self._check_queues())
        self._tasks.spawn(self._ensure_queue())

    async def stop(self) -> None:
        """Forgets everything that runs here."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        for subscription in self._subscriptions:
            await subscription.stop()
        await self._loops.end()
        await self._tasks.end()

    def step(self, event: ev.RequestEvent) -> None:
        """Tells the core and does what it asks for. A call from inside a step waits for that step's end."""
        self._events.append(event)
        if self._stepping or self._stopped:
            return
        self._stepping = True
        try:
            while self._events:
                for command in self._core.step(time.monotonic(), self._events.popleft()):
                    self._do(command)
        finally:
            self._stepping = False
        self._arm()

    # ------------------------------------------------------------------------------------------------------ commands out

    def _do(self, command: ev.RequestCommand) -> None:
        match command:
            case ev.Deliver():
                self._gateway.delivered(command)
            case ev.HandOver():
                self._hand_over(command)
            case ev.RecordGrant():
                self._gateway.granted(command)
            case ev.EndRequest():
                self._gateway.ended(command)
            case ev.SendBack():
                self._post(names.back(command.replica), encode(command.back))
            case ev.PublishTicket():
                self._tasks.spawn(self._publish(command))
            case ev.AnswerClaim():
                reply = self._replies.pop(command.token, "")
                if reply:
                    self._post(reply, encode(command.reply))
            case ev.DeleteTicket():
                self._tasks.spawn(self._delete(command))
            case ev.RecordRestart():
                self._gateway.restarted(command)
            case ev.EnsureQueue():
                self._tasks.spawn(self._ensure_queue())
            case _:
                assert_never(command)

    def _post(self, subject: str, payload: bytes) -> None:
        """Core messages may be lost, as on any bus: the core says again what still matters."""
        try:
            self._bus.post(subject, payload)
        except PayloadTooLarge as error:
            log.warning("a message is too large for the bus", subject=subject, size_bytes=error.size_bytes)
        except BusError:
            pass

    async def _publish(self, command: ev.PublishTicket) -> None:
        ticket, profile = command.ticket, command.ticket.profile
        about = (ticket.request, ticket.attempt, ticket.publication)
        try:
            stored = await self._bus.queue_publish(
                model_key(profile.deployment),
                profile.sla_class,
                profile.lane,
                encode(ticket),
                message_id=command.message_id,
                ttl_s=command.ttl_s,
            )
        except BusError as error:
            self.step(ev.TicketNotStored(*about, _NOT_STORED.get(type(error), ev.NotStoredReason.BUS_UNAVAILABLE)))
        else:
            self.step(ev.TicketStored(*about, stored))

    def _hand_over(self, command: ev.HandOver) -> None:
        grant = command.hand.grant
        reply = names.unheard(self._ingress, grant.request, grant.attempt)
        try:
            self._bus.post(names.run(command.replica), encode(command.hand), reply=reply)
        except BusError:
            self._events.append(ev.HandLost(grant.request, grant.attempt))

    def _on_unheard(self, message: BusMessage) -> None:
        request, _, attempt = message.subject.removeprefix(self._unheard).rpartition(".")
        if message.undelivered and attempt.isdecimal():
            self.step(ev.HandLost(RequestId(request), int(attempt)))

    async def _delete(self, command: ev.DeleteTicket) -> None:
        try:
            await self._bus.queue_delete(command.stored)
        except BusError as error:
            log.debug("a ticket was not deleted; its claim will be refused", error=str(error))

    async def _ensure_queue(self) -> None:
        if self._ensuring_queue:
            return  # Every ticket that finds no queue asks for one.
        self._ensuring_queue = True
        try:
            while True:
                try:
                    await self._bus.ensure_queue()
                    return
                except BusUnavailable:
                    pass
                except BusError as error:
                    log.warning("the work-queue could not be created", error=str(error))
                await asyncio.sleep(BUS_RETRY_S)
        finally:
            self._ensuring_queue = False

    # -------------------------------------------------------------------------------------------------------- events in

    def _on_claim(self, message: BusMessage) -> None:
        try:
            claim = decode(message.payload, Claim)
        except DecodeError:
            self._gateway.discarded("claim")
            return
        self._claims += 1
        token = self._claims
        self._replies[token] = message.reply
        self.step(ev.ClaimReceived(claim, token))
        self._replies.pop(token, None)

    def _on_frames(self, message: BusMessage) -> None:
        try:
            frames = decode(message.payload, Frames)
        except DecodeError:
            self._gateway.discarded("frames")
            return
        self.step(ev.FramesReceived(frames))

    def _on_reconnected(self) -> None:
        self.step(ev.BusReconnected())
        self._tasks.spawn(self._ensure_queue())

    async def _check_round_trip(self) -> None:
        while True:
            started_s = time.monotonic()
            try:
                await self._bus.round_trip(timeout_s=ROUND_TRIP_TIMEOUT_S)
            except BusError:
                self.round_trip_s = None
            else:
                self.round_trip_s = time.monotonic() - started_s  # the event loop's own clock is too coarse for this
                self.step(ev.BusRoundTripMade())
            await asyncio.sleep(ROUND_TRIP_EVERY_S)

    async def _check_queues(self) -> None:
        while True:
            await asyncio.sleep(QUEUE_CHECK_EVERY_S)
            shards: defaultdict[int, list[ModelKey]] = defaultdict(list)
            for model in self._core.waiting_models():
                shards[names.queue_shard(model, self._shards)].append(model)
            for models in shards.values():
                try:
                    created = await self._bus.queue_created(models[0])
                except BusError:
                    continue
                for model in models:
                    self.step(ev.QueueChecked(model, created))

    # -------------------------------------------------------------------------------------------------------------- time

    def _arm(self) -> None:
        due_s = self._core.next_wake_s
        if due_s == self._timer_due_s and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_due_s = due_s
        if due_s is not None and not self._stopped:
            delay_s = max(0.001, due_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.step(ev.Ticked())
