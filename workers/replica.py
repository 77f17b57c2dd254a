"""The replica process: one engine with one model, a core that decides, and the bus.

``run_replica`` is the whole life of the process: load, warm, serve, end. It runs in a forked child as well as in a process
of its own (``python -m workers.replica --control-fd N``), and makes its own event loop in both.

While it serves, everything it hears is one event for :class:`workers.core.replica.ReplicaCore`, and everything it does is
one command of it. Pings of the agent are answered by this same event loop, so that a stuck loop is noticed. Nothing that a
client sent or gets is ever logged; nor is the text of an engine's error once requests run, since it may quote a prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from typing import assert_never

import structlog

from subjects import messages as m
from subjects import names
from subjects.bus import Bus, BusMessage, Puller, QueuedTicket
from subjects.codec import decode, encode
from subjects.errors import BusError, BusUnavailable, CarpoolError, DecodeError, EngineError, NoResponders, place_of
from subjects.ids import DeploymentKey, model_key
from subjects.logs import log_json
from subjects.tasks import Tasks, end_tasks
from workers import control_messages as c
from workers.control import (
    ControlStream,
    exit_with_agent,
    read_start,
    replica_stream,
)
from workers.core import replica_events as ev
from workers.core.replica import ReplicaCore
from workers.engines.base import TEST_ENVIRONMENTS, Engine, EngineInfo, EngineRequest
from workers.engines.factory import make_engine
from workers.measuring import POINT_TRIES_MAX, Prober
from workers.spec import ReplicaSpec

log = structlog.get_logger(__name__)

START_TIMEOUT_S = 10.0
"""How long an exec'd replica waits for its spec."""
CONNECT_TIMEOUT_S = 2.0
CONNECT_RETRY_S = 0.5
"""Between two tries to reach the bus; the agent bounds the whole load."""
ROUND_TRIP_EVERY_S = 0.2
ROUND_TRIP_TIMEOUT_S = 1.0
REPORT_EVERY_S = 0.2
"""How often the load may be reported when it changed."""
REPORT_AT_LEAST_EVERY_S = 1.0
MEASURE_SHARE = 0.1
"""Of the time that a load took so far, what measuring may add to it (PRO-4)."""
MEASURE_IDLE_S = 0.25
"""Nothing has run for so long when a point is begun."""
MEASURE_AGAIN_S = 5.0
"""When all is measured and the scheduler does not know yet."""
STEPS_EVERY_S = 0.001
"""How often what the engine gives is sent at most. No model on an accelerator makes a step in less."""
GC_THRESHOLDS = (10_000, 20, 50)
"""What belongs to a request goes by reference counts; collections look for what does not."""
GIVE_BACK_S = 1.0
"""What a stop waits for the core to give back the requests that still run."""
CLOSE_TIMEOUT_S = 3.0
EXIT_FAILED = 1
EXIT_DECLARED_DEAD = 71
"""Exit code of a replica that the pool counts as dead."""
ENGINE_DIED = "the engine that ran this request failed"


def run_replica(spec: ReplicaSpec, control: socket.socket) -> int:
    """Runs the replica until it is told to stop or fails; returns the exit code of the process.

    Call it once per process, from its main thread, with the only copy of this end of the control connection.
    """
    exit_with_agent(control)
    random.seed()
    log_json()
    loop = _new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(_live(spec, control))
    finally:
        # Threads of an engine that is still loading are not waited for: the process is about to exit.
        loop.close()


def _new_event_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


async def _live(spec: ReplicaSpec, control: socket.socket) -> int:
    structlog.contextvars.bind_contextvars(replica=spec.replica, model=spec.record.name)
    replica = Replica(spec, await replica_stream(control))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, replica.stop)
    # Ctrl-C reaches the whole terminal; the agent tells its replicas what to do.
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    return await replica.run()


class Replica:
    """The shell around :class:`ReplicaCore`."""

    def __init__(self, spec: ReplicaSpec, control: ControlStream[c.ToReplica]) -> None:
        self._spec = spec
        # Of a scheduler that places by the model hash: then so does whoever queues for it.
        self._deployment = spec.record.deployment or DeploymentKey(spec.record.model_hash)
        self._control = control
        self._core = ReplicaCore(spec.replica)
        self._engine: Engine | None = None
        self._bus: Bus | None = None
        self._tasks = Tasks(self._task_failed)
        self._timer: asyncio.TimerHandle | None = None
        self._wake_s = 0.0
        self._fresh: list[m.Delta] = []
        self._fresh_timer: asyncio.TimerHandle | None = None
        self._fed_s = 0.0
        self._pullers: dict[tuple[m.SlaClass, m.Lane], Puller] = {}
        self._pool = ev.PoolChanged(weights={})
        self._load = ev.ReportLoad(running=0, slots=0, kv_pages_free=0)
        self._idle_since_s = self._began_s = time.monotonic()
        self._prober: Prober | None = None
        self._measure_max = 0
        """The largest batch to measure in idle moments; 0: nothing is to be measured."""
        self._measure_again = False
        """Whether it became another batch, so that the points are to be taken from the first one on."""
        self._measuring: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()
        self._stopping = asyncio.Event()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    # ---- life

    def stop(self) -> None:
        """Ends the process with code 0; what runs is given back. Calling again does nothing."""
        self._stopping.set()

    async def run(self) -> int:
        """Loads, serves and ends; returns the exit code."""
        self._tasks.spawn(self._hear_agent())
        self._tasks.spawn(self._stop_when_told())
        loading = asyncio.get_running_loop().create_task(self._load_and_serve())
        code = await self._ended
        await _bounded(end_tasks([loading]), CLOSE_TIMEOUT_S)
        await self._close()
        return code

    async def _load_and_serve(self) -> None:
        try:
            info = await self._load_engine()
            self._bus = await self._connect()
            await self._open(self._bus, info)
        except CarpoolError as error:
            self._fail(str(error) or type(error).__name__)
        except Exception as error:
            log.exception("the replica could not start")
            self._fail(f"{type(error).__name__}: {error}".splitlines()[0])

    async def _load_engine(self) -> EngineInfo:
        record = self._spec.record
        self._control.send(c.Progress(state=m.ReplicaState.LOADING, detail="checking the files"))
        if record.engine_type is m.EngineType.VLLM:
            from profiles.record import verify_record

            await asyncio.to_thread(verify_record, record)
        self._control.send(c.Progress(state=m.ReplicaState.LOADING, detail="starting the engine", progress=0.1))
        self._engine = make_engine(self._spec)
        info = await self._engine.start()
        self._control.send(c.Progress(state=m.ReplicaState.WARMING, progress=0.9))
        await self._engine.warm(record.warmup_tokens)
        self._prober = Prober(self._engine, info, record.task)
        self._tasks.spawn(self._run_engine())
        if self._spec.measure:
            budget_s = MEASURE_SHARE * (time.monotonic() - self._began_s)
            points = await self._prober.first(budget_s)
            if points:
                self._control.send(c.Measured(points=tuple(points)))
        return info

    async def _connect(self) -> Bus:
        from subjects.nats.bus import NatsBus

        while True:
            try:
                return await NatsBus.connect(
                    self._spec.nats_urls,
                    name=self._spec.replica,
                    shards=self._spec.queue_shards,
                    timeout_s=CONNECT_TIMEOUT_S,
                )
            except BusUnavailable as error:
                log.warning("no bus yet", error=str(error))
                await asyncio.sleep(CONNECT_RETRY_S)

    async def _open(self, bus: Bus, info: EngineInfo) -> None:
        self._tasks.spawn(self._make_round_trips(bus), self._report())
        bus.on_reconnected(lambda: self._feed(ev.BusReconnected()))
        await bus.subscribe(names.run(self._spec.replica), self._handed)
        await bus.subscribe(names.back(self._spec.replica), self._told)
        await bus.subscribe(names.POOL, self._pool_told)
        with contextlib.suppress(BusError):  # it subscribes again when it is back
            await bus.round_trip(timeout_s=ROUND_TRIP_TIMEOUT_S)
        self._serve(info)

    def _serve(self, info: EngineInfo) -> None:
        # What is here now stays: collections need not walk through it while requests run.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        self._control.send(c.Ready(info=info))
        log.info("ready", slots=info.slots, kv_pages=info.kv_pages)
        self._feed(
            ev.Opened(
                slots=info.slots, kv_pages=info.kv_pages, block_size=info.block_size, max_context_len=info.max_context_len
            )
        )

    def _fail(self, detail: str) -> None:
        log.error("the replica failed", detail=detail)
        self._control.send(c.Failed(detail=detail))
        self._end(EXIT_FAILED)

    def _end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    async def _stop_when_told(self) -> None:
        await self._stopping.wait()
        if self._bus is not None:
            self._drained.clear()
            self._feed(ev.DrainStarted(deadline_s=time.monotonic()))
            await _bounded(self._drained.wait(), GIVE_BACK_S)
        self._end(0)

    async def _close(self) -> None:
        if self._measuring is not None:
            self._measuring.cancel()
        for timer in (self._timer, self._fresh_timer):
            if timer is not None:
                timer.cancel()
        if self._engine is not None:
            await _bounded(self._engine.stop(), CLOSE_TIMEOUT_S)
        await _bounded(self._tasks.end(), CLOSE_TIMEOUT_S)
        if self._bus is not None:
            await _bounded(self._bus.close(), CLOSE_TIMEOUT_S)
        await self._control.close()

    def _task_failed(self, error: BaseException) -> None:
        log.error("a task of the replica failed", error=place_of(error))
        self._fail(f"internal error: {type(error).__name__}")

    # ---- the core

    def _feed(self, event: ev.ReplicaEvent) -> None:
        if self._ended.done():
            return
        now_s = time.monotonic()
        try:
            for command in self._core.step(now_s, event):
                self._do(command)
        except Exception as error:
            # Half a step was done: to end is honest.
            self._fail(f"internal error on {type(event).__name__}: {place_of(error)}")
            return
        wake_s = self._core.next_wake_s
        if wake_s is not None and (self._timer is None or wake_s < self._wake_s):
            # A timer that is too early does no harm, and most events do not change when the next one is due.
            if self._timer is not None:
                self._timer.cancel()
            self._wake_s = wake_s
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wake_s - now_s), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._feed(ev.Ticked())

    def _do(self, command: ev.ReplicaCommand) -> None:
        bus, engine = self._bus, self._engine
        assert bus is not None and engine is not None
        match command:
            case ev.Pull():
                self._tasks.spawn(self._pull(bus, command))
            case ev.SendClaim():
                self._tasks.spawn(self._claim(bus, command))
            case ev.AckTicket(token=acknowledges):
                self._tasks.spawn(self._acknowledge(bus, acknowledges))
            case ev.StartRequest(grant, profile):
                if self._prober is not None:
                    self._prober.abandon()
                engine.add(
                    EngineRequest(
                        request=grant.request,
                        attempt=grant.attempt,
                        endpoint=grant.endpoint,
                        body=grant.body,
                        kv_pages_needed=profile.kv_pages_needed,
                        sent_token_ids=grant.sent_token_ids,
                        cache_salt=grant.cache_salt,
                        max_tokens=grant.max_tokens or profile.max_tokens,
                        adapter=grant.adapter,
                        options=grant.options,
                        tenant=profile.tenant,
                        sla_class=profile.sla_class,
                        chain_id=profile.chain_id,
                        test=profile.environment in TEST_ENVIRONMENTS,
                    )
                )
            case ev.AbortRequest(request, attempt):
                engine.abort(request, attempt)
                log.info("aborted in the engine", request=request, attempt=attempt)
            case ev.SendFrames(ingress, frames):
                self._post(bus, names.out(ingress), encode(frames))
            case ev.ReportLoad():
                if command.running == 0 and self._load.running > 0:
                    self._idle_since_s = time.monotonic()
                self._load = command
            case ev.ReportDrained(given_back):
                self._drained.set()
                self._control.send(c.Drained(given_back=given_back))
            case ev.ExitReplica():
                log.warning("the pool counts this replica as dead; it ends")
                self._end(EXIT_DECLARED_DEAD)
            case _:
                assert_never(command)

    # ---- the bus

    def _post(self, bus: Bus, subject: str, payload: bytes) -> None:
        try:
            bus.post(subject, payload)
        except BusError as error:
            # What is late is wrong: the core repeats what was not confirmed.
            log.debug("a message was not sent", error=type(error).__name__)

    async def _acknowledge(self, bus: Bus, token: str) -> None:
        try:
            await bus.queue_ack(token)
        except BusError as error:
            log.debug("a ticket was not acknowledged; it comes again", error=type(error).__name__)

    async def _pull(self, bus: Bus, command: ev.Pull) -> None:
        sla_class, lane = command.sla_class, command.lane
        try:
            puller = self._pullers.get((sla_class, lane))
            if puller is None:
                opened = await bus.open_puller(
                    model_key(self._deployment),
                    sla_class,
                    lane,
                    on_ticket=lambda queued: self._pulled(sla_class, lane, queued),
                    on_expired=lambda credits: self._feed(ev.PullExpired(sla_class, lane, credits)),
                )
                puller = self._pullers.setdefault((sla_class, lane), opened)
            await puller.pull(command.credits, command.expires_s)
        except BusError as error:
            log.debug("a pull was not sent", error=type(error).__name__)
            self._feed(ev.PullExpired(sla_class, lane, command.credits))

    def _pulled(self, sla_class: m.SlaClass, lane: m.Lane, queued: QueuedTicket) -> None:
        bus = self._bus
        assert bus is not None
        try:
            ticket = decode(queued.payload, m.Ticket)
        except DecodeError:
            # Nobody can ever serve it, and unacknowledged it would come back for ever.
            log.warning("a ticket cannot be read; it is acknowledged unserved")
            self._tasks.spawn(self._acknowledge(bus, queued.token))
            self._feed(ev.PullExpired(sla_class, lane, 1))
            return
        self._feed(
            ev.TicketPulled(sla_class=sla_class, lane=lane, ticket=ticket, token=queued.token, deliveries=queued.deliveries)
        )

    async def _claim(self, bus: Bus, command: ev.SendClaim) -> None:
        claim = command.claim
        unanswered = ev.Unanswered.TIMEOUT
        try:
            payload = await bus.request(names.claim(command.ingress), encode(claim), timeout_s=ev.CLAIM_TIMEOUT_S)
            self._feed(ev.ClaimAnswered(claim.request, claim.attempt, decode(payload, m.ClaimReply)))  # type: ignore[arg-type]
            return
        except NoResponders:
            unanswered = ev.Unanswered.NO_RESPONDERS
        except BusUnavailable:
            unanswered = ev.Unanswered.BUS_UNAVAILABLE
        except (BusError, DecodeError) as error:
            log.warning("a claim was not answered", error=type(error).__name__)
        self._feed(ev.ClaimUnanswered(claim.request, claim.attempt, unanswered))

    def _handed(self, message: BusMessage) -> None:
        self._feed(ev.HandReceived(decode(message.payload, m.Hand)))

    def _told(self, message: BusMessage) -> None:
        self._feed(ev.BackReceived(decode(message.payload, m.Back)))  # type: ignore[arg-type]  # a union is no type to mypy

    def _pool_told(self, message: BusMessage) -> None:
        digest = decode(message.payload, m.PoolDigest)
        if self._spec.replica in digest.dead:
            self._do(ev.ExitReplica())
            return
        mine = next((one for one in digest.replicas if one.replica == self._spec.replica), None)
        most = max((one.weight for one in digest.replicas if one.deployment == self._deployment), default=0.0)
        share = mine.weight / (most or 1.0) if mine is not None else 1.0
        self._measure(mine.measure if mine is not None and mine.state is m.ReplicaState.READY else 0)
        pool = ev.PoolChanged(weights={}, share=share)
        for model in digest.models:
            if model.deployment == self._deployment:
                weights = {kind: model.class_weights[kind.value] for kind in m.SlaClass if kind.value in model.class_weights}
                pool = ev.PoolChanged(weights=weights, waiting=model.waiting_queues, share=share)
        if pool != self._pool:
            self._pool = pool
            self._feed(pool)

    async def _make_round_trips(self, bus: Bus) -> None:
        while True:
            try:
                await bus.round_trip(timeout_s=ROUND_TRIP_TIMEOUT_S)
                self._feed(ev.BusRoundTripMade())
            except BusError:
                pass  # Silence is the news: the core notices that no round trip was made.
            await asyncio.sleep(ROUND_TRIP_EVERY_S)

    # ---- the engine

    async def _run_engine(self) -> None:
        engine = self._engine
        assert engine is not None
        cause = "its stream of steps ended"
        try:
            async for deltas in engine.steps():
                self._stepped(deltas)
            if self._stopping.is_set() or self._ended.done():
                return
        except Exception as error:  # whatever an engine raises, it is dead
            cause = type(error.__cause__ or error).__name__
        self._feed_fresh()
        self._feed(ev.EngineFailed(message=ENGINE_DIED))
        self._fail(f"the engine died while it served: {cause}")

    def _stepped(self, deltas: Sequence[m.Delta]) -> None:
        """What an engine gives goes on at once, unless it steps so fast that sending each step would cost more than making
        it: then several steps share one message. First tokens and ends do not wait for that."""
        if self._prober is not None:
            deltas = self._prober.hear(deltas)
            if not deltas:
                return
        self._fresh.extend(deltas)
        wait_s = self._fed_s + STEPS_EVERY_S - time.monotonic()
        if wait_s <= 0 or any(delta.end or not delta.first_token_index for delta in deltas):
            self._feed_fresh()
        elif self._fresh_timer is None:
            self._fresh_timer = asyncio.get_running_loop().call_later(wait_s, self._feed_fresh)

    def _feed_fresh(self) -> None:
        if self._fresh_timer is not None:
            self._fresh_timer.cancel()
            self._fresh_timer = None
        fresh, self._fresh = self._fresh, []
        self._fed_s = time.monotonic()
        self._feed(ev.EngineStepped(deltas=tuple(fresh)))

    # ---- measuring

    def _measure(self, batch_max: int) -> None:
        """From now on idle moments are used to measure batches of up to so many; 0: no longer."""
        self._measure_again = self._measure_again or batch_max != self._measure_max
        self._measure_max = batch_max
        if not batch_max and self._prober is not None:
            self._prober.abandon()
        elif batch_max and self._measuring is None:
            self._measuring = asyncio.get_running_loop().create_task(self._measure_when_idle())
            self._measuring.add_done_callback(self._measured)

    def _measured(self, task: asyncio.Task[None]) -> None:
        self._measuring = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("costs were not measured", error=place_of(error))
            self._measure_max = 0

    async def _measure_when_idle(self) -> None:
        prober = self._prober
        assert prober is not None
        while self._measure_max:
            self._measure_again = False
            for batch, tokens in prober.grid(self._measure_max):
                points: list[m.CostPoint] = []
                prober.failures = 0
                while not points and self._measure_max and not self._measure_again and prober.failures < POINT_TRIES_MAX:
                    await asyncio.sleep(MEASURE_IDLE_S)
                    idle_s = time.monotonic() - self._idle_since_s
                    if not (self._core.held or self._load.running) and idle_s >= MEASURE_IDLE_S:
                        points = await prober.point(batch, tokens)
                if points:
                    self._control.send(c.Measured(points=tuple(points)))
                elif prober.failures:
                    log.warning("a point of the costs could not be measured", batch=batch, input_tokens=tokens)
            if self._measure_max and not self._measure_again:
                self._control.send(c.Measured(points=(), whole=True))
                await asyncio.sleep(MEASURE_AGAIN_S)

    # ---- the agent

    async def _hear_agent(self) -> None:
        while (message := await self._control.receive()) is not None:
            if isinstance(message, c.Drain | c.Resize | c.Sleep | c.EmptyPrefixes):
                self._measure(0)  # until the next digest
            match message:
                case c.Ping(number=number):
                    self._control.send(c.Pong(number=number))
                case c.Drain(timeout_s=timeout_s):
                    if self._bus is None:
                        self._control.send(c.Drained())
                    else:
                        self._feed(ev.DrainStarted(deadline_s=time.monotonic() + timeout_s))
                case c.Concurrency(slots=slots):
                    if self._bus is not None:
                        self._feed(ev.ConcurrencySet(slots=slots))
                case c.Resize():
                    self._tasks.spawn(self._resize(message))
                case c.Sleep():
                    self._tasks.spawn(self._sleep(message))
                case c.Wake():
                    self._tasks.spawn(self._wake())
                case c.EmptyPrefixes():
                    self._tasks.spawn(self._empty_prefixes())
                case c.Stop():
                    self.stop()
                case c.Start():
                    log.warning("a second start is ignored")
                case _:
                    assert_never(message)

    async def _resize(self, command: c.Resize) -> None:
        assert self._engine is not None
        try:
            pages = await self._engine.resize_kv(command.kv_bytes)
        except EngineError as error:
            self._control.send(c.Changed(number=command.number, failure=str(error)))
            return
        self._feed(ev.KvResized(kv_pages=pages))
        self._control.send(c.Changed(number=command.number, kv_pages=pages))

    async def _sleep(self, command: c.Sleep) -> None:
        assert self._engine is not None
        failure = ""
        try:
            await self._engine.sleep(command.level)
        except EngineError as error:
            failure = str(error)
        self._control.send(c.Changed(number=command.number, failure=failure))

    async def _empty_prefixes(self) -> None:
        assert self._engine is not None
        try:
            emptied = await self._engine.empty_prefixes()
        except EngineError as error:
            log.warning("the engine did not drop its prefix cache", error=str(error))
        else:
            log.info("prefix cache", emptied=emptied)

    async def _wake(self) -> None:
        assert self._engine is not None
        try:
            info = await self._engine.wake()
            self._control.send(c.Progress(state=m.ReplicaState.WARMING, progress=0.9))
            await self._engine.warm(self._spec.record.warmup_tokens)
        except EngineError as error:
            self._fail(str(error))
            return
        self._serve(info)

    async def _report(self) -> None:
        engine = self._engine
        assert engine is not None
        reported: ev.ReportLoad | None = None
        reported_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if self._load != reported or now_s - reported_s >= REPORT_AT_LEAST_EVERY_S:
                reported, reported_s = self._load, now_s
                engines = engine.load()
                self._control.send(
                    c.Load(
                        running=reported.running,
                        waiting=engines.waiting,
                        kv_pages_free=reported.kv_pages_free,
                        idle_s=0.0 if reported.running else now_s - self._idle_since_s,
                        busy_s=engines.busy_s,
                        preemptions=engines.preemptions,
                        step_s=engines.step_s,
                        hit_ratio=engines.hit_ratio,
                        sums=engines.sums,
                    )
                )
            await asyncio.sleep(REPORT_EVERY_S)


async def _bounded(awaitable: Coroutine[object, None, object], timeout_s: float) -> None:
    """Waits, but never longer than ``timeout_s``; what it raises is of no more interest."""
    try:
        await asyncio.wait_for(awaitable, timeout_s)
    except TimeoutError:
        pass
    except Exception as error:
        log.debug("ignored at the end", error=type(error).__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of an exec'd replica; its spec is the first message on the control socket."""
    parser = argparse.ArgumentParser(prog="python -m workers.replica", description=__doc__.splitlines()[0])
    parser.add_argument("--control-fd", type=int, required=True, help="an inherited AF_UNIX stream socket")
    control = socket.socket(fileno=parser.parse_args(arguments).control_fd)
    try:
        spec = read_start(control, timeout_s=START_TIMEOUT_S)
    except (DecodeError, EOFError, TimeoutError) as error:
        print(f"no start message from the agent: {error}", file=sys.stderr)  # noqa: T201  # no logging yet
        return EXIT_FAILED
    return run_replica(spec, control)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Not sys.exit: an engine's threads must not hold up the end.
    os._exit(code)
