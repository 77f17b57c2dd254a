"""The scheduler's shell: telemetry and events go in, commands, the digest and alerts go out.

Everything that decides is :class:`broker.core.scheduler.SchedulerCore`. Several of these processes may run: one leads, the
others listen and are ready to lead within two seconds. None of them is in the way of a running request.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, assert_never

import structlog

from broker.core.pool import events as ev
from broker.core.pool.older import told_by_gateway, told_by_worker
from broker.core.scheduler import SchedulerCore
from broker.scheduler.control import Control
from broker.scheduler.costs_sync import CostsSync
from broker.scheduler.journal_keeper import JournalKeeper
from broker.scheduler.kv_control import KvControl
from broker.scheduler.lease import LeaseKeeper
from broker.scheduler.operator_verbs import People
from broker.scheduler.overrides_sync import OverridesSync
from broker.scheduler.policies import DEFAULT_POLICY, make_policy
from broker.scheduler.recording import Recorder
from broker.scheduler.registry_sync import RegistrySync
from broker.scheduler.twu import DeviceTwu
from profiles.registry import Registry
from subjects import messages as m
from subjects import names
from subjects.bus import Bus, BusMessage, Subscription
from subjects.codec import decode, encode
from subjects.errors import BusError, DecodeError, QueueMissing, place_of
from subjects.ids import incarnated
from subjects.nats.bus import NatsBus
from subjects.tasks import Tasks

DIGEST_KEY = "digest"
DIGEST_STORED_EVERY_S = 0.5
"""The bucket lives on disk: it follows the published digest at this pace."""
ROUND_TRIP_EVERY_S = 0.1
ROUND_TRIP_S_MAX = 1.0
ALERTS_KEPT_S = 7 * 24 * 3600.0
ALERTS_BYTES_MAX = 64 * 1024 * 1024
ALERTS_QUEUED_MAX = 256
ALERT_TRIES_MAX = 3
RETRY_S = 0.5
RECORDING_BYTES_MAX = 1024 * 1024 * 1024
"""A recording ends when its file is this long; a small pool writes about 60 MB an hour."""

_T = TypeVar("_T")
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What ``carpool scheduler`` is told. ``nats_urls`` may hold credentials: never log it."""

    nats_urls: tuple[str, ...]
    name: str = "scheduler"
    state_dir: Path
    """Holds ``registry.sqlite``, this scheduler's own copy of the registry."""
    queue_shards: int = 1
    settings: ev.SchedulerSettings = field(default_factory=ev.SchedulerSettings)
    policy: str = DEFAULT_POLICY
    """A name of :mod:`broker.scheduler.policies`."""
    record: Path | None = None
    """A file that keeps what the core hears and orders, for ``carpool replay-scheduler``."""


class Scheduler:
    """One scheduler on a bus."""

    def __init__(self, bus: Bus, registry: Registry, config: SchedulerConfig) -> None:
        """
        Raises:
            ConfigError: an unknown policy, or a recording that cannot be written.
        """
        self._bus = bus
        self.scheduler = incarnated(config.name)
        self.core = SchedulerCore(config.settings, make_policy(config.policy))
        about = (config.policy, config.settings, RECORDING_BYTES_MAX)
        self._recorder = Recorder(config.record, *about) if config.record is not None else None
        self.lease = LeaseKeeper(
            bus,
            self.scheduler,
            epoch_seen=lambda: self.core.pool.epoch_seen_max,
            on_gained=lambda epoch: self._tasks.spawn(self._take_over(epoch)),
            on_lost=lambda _reason: self._step(ev.LeadershipLost()),
        )
        self.journal = JournalKeeper(
            bus,
            self.scheduler,
            leads=lambda: self.lease.holds,
            on_deposed=self.lease.give_up,
            on_trouble=self._journal_troubled,
        )
        buckets = (bus, registry, self._step, lambda: self.lease.holds)
        self.registry = RegistrySync(*buckets)
        self.costs = CostsSync(*buckets)
        self.overrides = OverridesSync(*buckets)
        people = People(self.core, self.registry, self.overrides, self._step)
        self._twu = DeviceTwu(self.core, config.state_dir, time.monotonic)
        self.control = Control(
            bus,
            self.core,
            self.registry,
            people,
            KvControl(self.core, people, self._step),
            self.journal.known,
            self._twu,
            self._step,
        )
        self.undecodable = 0
        """Messages that were dropped since they are not what belongs on their subject."""
        self._digest: ev.PublishDigest | None = None
        self._digest_changed = asyncio.Event()
        self._digest_stored_s = 0.0
        self._alerts: asyncio.Queue[m.Alert] = asyncio.Queue(ALERTS_QUEUED_MAX)
        self._subscriptions: list[Subscription] = []
        self._loops = Tasks(self._broke)
        self._tasks = Tasks(lambda error: log.error("a task of the scheduler failed", error=place_of(error)))
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when a part of the scheduler ended that must not: the process should end too, and be started again."""

    # ----------------------------------------------------------------------------------------------------- start and end

    async def start(self) -> None:
        """Begins to listen, and to campaign once the registry is read; needs no bus yet."""
        heard: list[tuple[str, Any, Callable[[Any], None]]] = [
            (names.ALL_BEATS, m.WorkerBeat, lambda beat: self._step(ev.BeatSeen(beat.worker, beat.epoch_seen))),
            (names.ALL_WORKER_TELEMETRY, m.WorkerSnapshot, self._on_snapshot),
            (names.ALL_INGRESS_TELEMETRY, m.IngressTelemetry, self._on_ingress),
            (names.ALL_WORKER_EVENTS, m.WorkerEvent, lambda event: self._step(ev.OperationSeen(event))),
        ]
        for subject, kind, handler in heard:
            self._subscriptions.append(await self._bus.subscribe(subject, partial(self._hear, kind, handler)))
        self._subscriptions.append(await self._bus.subscribe(names.ALL_CONTROL, self._on_control))
        self._loops.spawn(
            self._tick(),
            self._prove_the_bus(),
            self._lead(),
            self._publish_digests(),
            self._publish_alerts(),
            self.journal.run(),
            self.journal.follow(),
        )

    async def stop(self) -> None:
        """Gives the lease back and ends; commands under way are left to the agents and the next leader."""
        await self._loops.end()
        with contextlib.suppress(BusError, TimeoutError):
            await asyncio.wait_for(self.journal.flush(), ROUND_TRIP_S_MAX)
        await self.lease.release()
        await self.registry.stop()
        await self.overrides.stop()
        await self.costs.stop()
        for subscription in self._subscriptions:
            with contextlib.suppress(BusError):
                await subscription.stop()
        await self._tasks.end()
        if self._recorder is not None:
            self._recorder.close()

    def _broke(self, error: BaseException) -> None:
        # Half a leader is worse than none: it would hold the lease and decide nothing.
        log.error("a part of the scheduler failed", error=place_of(error))
        if not self.broken.done():
            self.broken.set_result(None)

    async def _lead(self) -> None:
        await self.overrides.start()  # Before the registry, since with that decisions may begin.
        await self.costs.start()  # So that no model is loaded, or measured, by an estimate that is outdated.
        await self.registry.start()
        await self.lease.run()

    async def _take_over(self, epoch: int) -> None:
        """Goes on from the last digest, so that its dead stay dead, and with what the journal shows unfinished."""
        digest, _ = await asyncio.gather(self._last_digest(), self._read_journal())
        if digest is not None:
            self._step(ev.DigestRestored(digest))
        if self.lease.check(time.monotonic()) and self.lease.epoch == epoch:
            self._step(ev.JournalRestored(self.journal.known.unfinished()))
            self._step(ev.LeadershipGained(epoch))

    async def _last_digest(self) -> m.PoolDigest | None:
        try:
            async with asyncio.timeout(ROUND_TRIP_S_MAX):
                entry = await self._bus.kv_get(names.POOL_BUCKET, DIGEST_KEY)
            return decode(entry.value, m.PoolDigest) if entry is not None else None
        except (BusError, TimeoutError, DecodeError) as error:
            log.warning("the last digest cannot be read", reason=str(error) or type(error).__name__)
            return None

    async def _read_journal(self) -> None:
        try:
            async with asyncio.timeout(ROUND_TRIP_S_MAX):
                await self.journal.catch_up()
        except (BusError, TimeoutError) as error:
            self._journal_troubled(f"it cannot be read: {str(error) or 'no answer'}")

    def _journal_troubled(self, reason: str) -> None:
        """Decisions go on: a successor trusts the agents' reports first."""
        text = f"the journal of scale actions has a gap ({reason}); decisions go on, a new leader would know less"
        alert = m.Alert(
            at_unix_s=time.time(),
            severity=m.Severity.WARNING,
            kind="journal-lost",
            scope="pool",
            text=text,
            remedy="carpool get timeline",
        )
        self._raise(alert)

    # -------------------------------------------------------------------------------------------------------------- core

    def _step(self, event: ev.SchedulerEvent) -> None:
        now_s = time.monotonic()
        commands = self.core.step(now_s, event)
        if self._recorder is not None:
            self._recorder.step(now_s, event, commands)
        for command in commands:
            self._do(command)

    def _do(self, command: ev.SchedulerCommand) -> None:
        match command:
            case ev.SendCommand() | ev.PublishDigest() | ev.AppendJournal() if not self.lease.check(time.monotonic()):
                pass
            case ev.SendCommand():
                self._tasks.spawn(self._send(command))
            case ev.PublishDigest():
                self._digest = command
                self._digest_changed.set()
            case ev.AppendJournal():
                self.journal.append(self.lease.epoch, command.entries)
            case ev.RaiseAlert():
                self._raise(command.alert)
            case ev.KeepCosts():
                self.costs.keep(command.kept)
            case ev.Resign():
                self.lease.give_up(command.reason)
            case _:
                assert_never(command)

    def _raise(self, alert: m.Alert) -> None:
        if self._alerts.full():
            self._alerts.get_nowait()
        self._alerts.put_nowait(alert)

    async def _tick(self) -> None:
        while True:
            self.lease.check(time.monotonic())
            if (replicas := self._twu.gives_way()) is not None:
                self._step(ev.HeaviestGiveWay(replicas))
            self._step(ev.Ticked(time.time()))
            await asyncio.sleep(max(0.01, self.core.next_wake_s - time.monotonic()))

    async def _prove_the_bus(self) -> None:
        while True:
            with contextlib.suppress(BusError):
                await self._bus.round_trip(timeout_s=ROUND_TRIP_S_MAX)
                self._step(ev.BusRoundTripMade())
            await asyncio.sleep(ROUND_TRIP_EVERY_S)

    async def _send(self, command: ev.SendCommand) -> None:
        subject = names.commands(command.worker)
        operation = command.command.operation
        log.info("command", worker=command.worker, kind=type(command.command).__name__, operation=operation)
        try:
            payload = await self._bus.request(subject, encode(command.command), timeout_s=command.timeout_s)
            reply = decode(payload, m.CommandReply)
        except (BusError, DecodeError) as error:
            log.warning("a command got no answer", worker=command.worker, operation=operation, reason=str(error))
            self._step(ev.CommandUnanswered(operation))
            return
        if reply.detail:
            log.info("command answered", operation=operation, outcome=reply.outcome.value, detail=reply.detail)
        self._step(ev.CommandAnswered(reply))

    # ----------------------------------------------------------------------------------------------------------- hearing

    def _decoded(self, message: BusMessage, kind: type[_T]) -> _T | None:
        try:
            return decode(message.payload, kind)
        except DecodeError as error:
            self.undecodable += 1
            log.warning("a message was dropped", subject=message.subject, error=str(error))
            return None

    def _hear(self, kind: type[_T], handler: Callable[[_T], None], message: BusMessage) -> None:
        if (told := self._decoded(message, kind)) is not None:
            handler(told)

    def _on_snapshot(self, snapshot: m.WorkerSnapshot) -> None:
        if not self.core.catalogue.loaded and any(not one.deployment for one in snapshot.replicas):
            return  # What an older worker runs is known once the registry is; it tells again.
        self._step(ev.WorkerReported(told_by_worker(snapshot, self.core.catalogue)))

    def _on_ingress(self, telemetry: m.IngressTelemetry) -> None:
        telemetry = told_by_gateway(telemetry, self.core.catalogue)
        self._twu.hear(telemetry)
        self._step(ev.IngressReported(telemetry))

    def _on_control(self, message: BusMessage) -> None:
        # Only the leader answers; a standby that kept silent is not missed.
        if message.reply and self.core.leads:
            self._tasks.spawn(self._answer_control(message))

    async def _answer_control(self, message: BusMessage) -> None:
        verb = message.subject.rpartition(".")[2]
        if (request := self._decoded(message, m.ControlRequest)) is None:
            reply = m.ControlReply(error="the request is not a m.ControlRequest")
        else:
            reply = await self.control.answer(verb, request)
        with contextlib.suppress(BusError):
            await self._bus.publish(message.reply, encode(reply))

    # ----------------------------------------------------------------------------------------------------------- telling

    async def _publish_digests(self) -> None:
        while True:
            await self._digest_changed.wait()
            self._digest_changed.clear()
            if (digest := self._digest) is None:
                continue
            payload = encode(digest.digest)
            with contextlib.suppress(BusError):
                await self._bus.publish(names.POOL, payload)
                now_s = time.monotonic()
                if now_s - self._digest_stored_s >= DIGEST_STORED_EVERY_S:
                    self._digest_stored_s = now_s
                    self._tasks.spawn(self._store_digest(encode(digest.stored)))

    async def _store_digest(self, payload: bytes) -> None:
        with contextlib.suppress(BusError):
            await self._bus.kv_put(names.POOL_BUCKET, DIGEST_KEY, payload)

    async def _publish_alerts(self) -> None:
        while True:
            alert = await self._alerts.get()
            log.warning("alert", kind=alert.kind, scope=alert.scope, severity=alert.severity.value, text=alert.text)
            subject = names.alert(alert.severity.value, _token(alert.kind), _token(alert.scope))
            for _ in range(ALERT_TRIES_MAX):
                try:
                    await self._bus.stream_publish(subject, encode(alert))
                    break
                except QueueMissing:
                    with contextlib.suppress(BusError):
                        await self._bus.ensure_stream(
                            names.ALERT_STREAM, [names.ALL_ALERTS], max_age_s=ALERTS_KEPT_S, max_bytes=ALERTS_BYTES_MAX
                        )
                except BusError as error:
                    log.debug("an alert was not stored", reason=str(error))
                    await asyncio.sleep(RETRY_S)


def _token(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", text)[:64] or "pool"


async def run_scheduler(config: SchedulerConfig, *, on_ready: Callable[[], None] | None = None) -> int:
    """Schedules until SIGTERM or SIGINT, or until a part of it fails; returns the exit code.

    ``on_ready`` is called once it listens.

    Raises:
        ConfigError: the registry's file cannot be used.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    registry = Registry(config.state_dir / "registry.sqlite")
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(registry.close)
        bus = await NatsBus.connect(config.nats_urls, name=config.name, shards=config.queue_shards, wait=True)
        stack.push_async_callback(bus.close)
        scheduler = Scheduler(bus, registry, config)
        await scheduler.start()
        stack.push_async_callback(scheduler.stop)
        log.info("scheduler listens", scheduler=scheduler.scheduler)
        if on_ready is not None:
            on_ready()
        scheduler.broken.add_done_callback(lambda _: stop.set())
        await stop.wait()
        log.info("scheduler goes down")
    log.info("scheduler is down")
    return 1 if scheduler.broken.done() else 0
