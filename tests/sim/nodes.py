"""The processes of the simulated world: the production cores, with the network and the clock in place of their shells."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from broker.core.pool import events as sch
from broker.core.requests import events as req
from broker.core.requests.core import RequestCore
from broker.core.scheduler import SchedulerCore
from subjects import names
from subjects.bus import QueuedTicket, Stored
from subjects.codec import decode, encode
from subjects.ids import DeviceId, IngressId, ReplicaId, WorkerId, model_key
from subjects.messages import (
    Back,
    Claim,
    ClaimReply,
    CommandReply,
    DeviceKind,
    EngineType,
    Frames,
    Grant,
    Hand,
    IngressTelemetry,
    LoadModel,
    ModelRecord,
    PoolDigest,
    ReplicaState,
    SlaClass,
    Ticket,
    WorkerCommand,
)
from tests.sim.net import NoAnswer, Node, Pull
from workers.control_messages import (
    Changed,
    Concurrency,
    Drain,
    Drained,
    EmptyPrefixes,
    Failed,
    Load,
    Ping,
    Pong,
    Progress,
    Ready,
    Resize,
    Sleep,
    Start,
    Stop,
    ToReplica,
    Wake,
)
from workers.core import agent_events as agt
from workers.core import replica_events as rep
from workers.core import simulated as sim
from workers.core.agent import AgentCore
from workers.core.replica import ReplicaCore
from workers.engines.base import EngineInfo

if TYPE_CHECKING:
    from tests.sim.world import World

ROUND_TRIP_EVERY_S = 0.2
SPAWN_S_MAX = 0.5
EXIT_S = 0.05
WARM_S = 0.1
EXIT_DEAD = 71


class Actor(Node):
    """A process with a core that wants to be woken."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.clock, name)
        self.world = world
        self._wake: Any = None
        world.net.nodes.append(self)

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.clock.now()

    def wake_at(self, at_s: float | None, tick: Callable[[], object]) -> None:
        """Replaces the wake-up call."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if at_s is not None and at_s < math.inf and self.alive:
            # No process wakes up in the instant in which it fell asleep.
            self._wake = self.clock.call_later(max(0.0005, at_s - self.now), lambda: self.run(tick))

    def round_trips(self, made: Callable[[], object]) -> None:
        """Pings the server for ever."""
        net = self.world.net
        self.every(
            ROUND_TRIP_EVERY_S,
            lambda: net.request(
                self, net.server, lambda reply: reply(None), lambda _: made(), lambda _: None, timeout_s=1.0, lossy=False
            ),
        )

    def die(self) -> None:
        """The process is gone."""
        self.alive = False
        if self in self.world.net.nodes:
            self.world.net.nodes.remove(self)


# -------------------------------------------------------------------------------------------------------------- gateway


class GatewayNode(Actor):
    """A gateway: :class:`RequestCore` on the simulated bus."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.ingress = IngressId(name)
        self.core = RequestCore(self.ingress, continuation_enabled=world.options.continuation)
        self.digest: PoolDigest | None = None
        self._replies: dict[int, Callable[[object], None]] = {}
        self._claims = 0
        self._reports = 0
        self.round_trips(lambda: self.feed(req.BusRoundTripMade()))
        self.every(0.1, self._report)
        self.every(1.0, self._check_queues)

    def feed(self, event: req.RequestEvent) -> None:
        """One step of the core, at once."""
        for command in self.core.step(self.now, event):
            self._do(command)
        self.wake_at(self.core.next_wake_s, lambda: self.feed(req.Ticked()))

    def _do(self, command: req.RequestCommand) -> None:
        world, net = self.world, self.world.net
        match command:
            case req.PublishTicket():
                self._publish(command)
            case req.EnsureQueue():
                net.send(self, net.server, net.ensure_queue)
            case req.DeleteTicket(stored):
                net.send(self, net.server, lambda: self._delete_at_server(stored))
            case req.HandOver(replica, hand):
                self._hand(replica, hand)
            case req.AnswerClaim(token, reply):
                if isinstance(reply, Grant):
                    world.granted(self, reply, token)
                self._replies.pop(token)(reply)
            case req.SendBack(replica, back):
                node = world.replicas.get(replica)
                if node is not None:
                    net.send(self, node, lambda: node.told(back))
            case req.RecordGrant():
                pass
            case req.Deliver(request, delta):
                world.delivered(request, delta)
            case req.RecordRestart(request, attempt):
                world.restarted(request, attempt)
            case req.EndRequest(request, outcome):
                world.ended(request, outcome)
            case _:
                assert_never(command)

    def _publish(self, command: req.PublishTicket) -> None:
        net, ticket, profile = self.world.net, command.ticket, command.ticket.profile
        if ticket.publication > 1 and profile.sla_class is SlaClass.BATCH:
            self.world.happened("yielded")
        about = (ticket.request, ticket.attempt, ticket.publication)
        subject = names.tickets(model_key(profile.deployment), profile.sla_class, profile.lane, shards=1)
        reasons = {
            "full": req.NotStoredReason.QUEUE_FULL,
            "missing": req.NotStoredReason.QUEUE_MISSING,
            NoAnswer.TIMEOUT: req.NotStoredReason.TIMEOUT,
            NoAnswer.NO_RESPONDERS: req.NotStoredReason.QUEUE_MISSING,
            NoAnswer.UNAVAILABLE: req.NotStoredReason.BUS_UNAVAILABLE,
        }

        def stored(answer: object) -> None:
            if isinstance(answer, Stored):
                self.feed(req.TicketStored(*about, answer))
            else:
                assert answer in ("full", "missing")
                self.feed(req.TicketNotStored(*about, reasons[str(answer)]))

        net.request(
            self,
            net.server,
            lambda reply: reply(net.publish(subject, encode(ticket), command.message_id, command.ttl_s)),
            stored,
            lambda why: self.feed(req.TicketNotStored(*about, reasons[why])),
            timeout_s=2.0,
        )

    def _delete_at_server(self, stored: Stored) -> None:
        queue = self.world.net.queue
        if queue is not None and queue.created == stored.created:
            queue.delete(stored.sequence)

    def _hand(self, replica: ReplicaId, hand: Hand) -> None:
        node, grant = self.world.replicas.get(replica), hand.grant
        self.world.happened("handed-over")
        self.world.granted(self, grant, 0)
        self.world.net.deliver(
            self,
            node,
            lambda: node.handed(hand) if node is not None else None,
            lambda: self.feed(req.HandLost(grant.request, grant.attempt)),
        )

    def claimed(self, claim: Claim, reply: Callable[[object], None]) -> None:
        """A replica asks for a request."""
        self._claims += 1
        self._replies[self._claims] = reply
        self.feed(req.ClaimReceived(claim, self._claims))

    def framed(self, frames: Frames) -> None:
        """A replica's frames arrived."""
        self.feed(req.FramesReceived(frames))

    def pool_told(self, digest: PoolDigest) -> None:
        """A digest of the pool arrived; an older leader's is dropped."""
        known = self.digest
        if known is None or (digest.epoch, digest.sequence) > (known.epoch, known.sequence):
            self.digest = digest
            self.feed(req.PoolChanged(digest))

    def _report(self) -> None:
        self._reports += 1
        telemetry = IngressTelemetry(ingress=self.ingress, sequence=self._reports, demand=self.core.take_demand(self.now))
        for scheduler in self.world.schedulers:
            self.world.net.send(self, scheduler, lambda s=scheduler: s.feed(sch.IngressReported(telemetry)))  # type: ignore[misc]

    def _check_queues(self) -> None:
        net = self.world.net
        for key in self.core.waiting_models():
            net.request(
                self,
                net.server,
                lambda reply: reply(net.queue.created if net.queue is not None else None),
                lambda created, key=key: self.feed(req.QueueChecked(key, created)),  # type: ignore[misc]
                lambda _: None,
                timeout_s=1.0,
            )

    def bus_back(self) -> None:
        self.feed(req.BusReconnected())


# -------------------------------------------------------------------------------------------------------------- replica


class ReplicaNode(Actor):
    """A replica process: :class:`ReplicaCore` and :class:`SimulatedCore` on the simulated bus."""

    def __init__(
        self, world: World, agent: AgentNode, replica: ReplicaId, record: ModelRecord, profile: sim.SimulatedProfile
    ) -> None:
        super().__init__(world, replica)
        self.agent = agent
        self.replica = replica
        self.record = record
        self.profile = profile
        self.core = ReplicaCore(replica)
        self.engine = sim.SimulatedCore(profile)
        self.serving = False
        self.spawned = False
        self.holds: set[tuple[str, int]] = set()
        self.back_s = 0.0
        """When it last came back to the bus."""
        self._pulls: list[Pull] = []
        self._load = rep.ReportLoad(running=0, slots=0, kv_pages_free=0)
        self._told_load: tuple[object, float] | None = None
        self._idle_since_s = 0.0
        self._engine_wake: Any = None
        self.pool: PoolDigest | None = None
        self._pool_event = rep.PoolChanged(weights={})

    # ---- life

    def begin(self) -> None:
        """Loads, warms, opens."""
        self._say(Progress(state=ReplicaState.LOADING))
        self.clock.call_later(self.profile.load_s, lambda: self.run(self._loaded))

    def _loaded(self) -> None:
        if self.profile.load_fails:
            self._say(Failed(detail="the load failed, as scripted"))
            self.exit(1)
            return
        self._say(Progress(state=ReplicaState.WARMING))
        self.clock.call_later(WARM_S, lambda: self.run(self._open))

    def _open(self) -> None:
        self.round_trips(lambda: self.feed(rep.BusRoundTripMade()))
        self.every(0.2, self._report)
        self._serve()

    def _serve(self) -> None:
        profile = self.profile
        info = EngineInfo(
            slots=profile.slots,
            kv_pages=self.engine.kv_pages,
            block_size=profile.block_size,
            max_context_len=profile.max_context_len,
            gives_token_ids=True,
            continues=True,
            resizes_kv=profile.resizes_kv,
            sleeps=True,
        )
        self.serving = True
        self._idle_since_s = self.now
        self._say(Ready(info=info))
        self.feed(rep.Opened(profile.slots, self.engine.kv_pages, profile.block_size, profile.max_context_len))

    def exit(self, code: int) -> None:
        """The process ends and its agent reaps it."""
        if not self.alive:
            return
        self.die()
        self.serving = False
        self.close_pulls()
        self.world.replica_gone(self)
        agent = self.agent
        self.clock.call_later(EXIT_S, lambda: agent.run(lambda: agent.exited(self, code)))

    def control(self, message: ToReplica) -> None:
        """The agent said something."""
        match message:
            case Ping(number=number):
                self._say(Pong(number=number))
            case Drain(timeout_s=timeout_s):
                self.feed(rep.DrainStarted(self.now + timeout_s))
            case Concurrency(slots=slots):
                self.feed(rep.ConcurrencySet(slots))
            case Resize(number=number, kv_bytes=kv_bytes):
                pages = kv_bytes // (self.record.kv_bytes_per_token * self.record.block_size)
                failure = self.engine.cannot_resize(pages)
                if not failure:
                    self._engine(sim.KvResized(pages))
                    self.feed(rep.KvResized(pages))
                self._say(Changed(number=number, failure=failure, kv_pages=pages))
            case Sleep(number=number):
                self._say(Changed(number=number))
            case Wake():
                self._say(Progress(state=ReplicaState.WARMING))
                self.clock.call_later(WARM_S, lambda: self.run(self._serve))
            case Stop():
                if self.serving:
                    self.feed(rep.DrainStarted(self.now))
                self.clock.call_later(0.1, lambda: self.run(lambda: self.exit(0)))
            case Start() | EmptyPrefixes():
                raise AssertionError("a forked replica has its spec, and nobody evicts its KV")
            case _:
                assert_never(message)

    def _say(self, message: object) -> None:
        agent = self.agent
        event = agt.ControlReceived(self.replica, message)  # type: ignore[arg-type]  # every caller passes a ToAgent
        self.clock.call_soon(lambda: agent.run(lambda: agent.feed(event)))

    def _report(self) -> None:
        state = (self._load, self.engine.waiting)
        if self._told_load is None or self._told_load[0] != state or self.now - self._told_load[1] >= 1.0:
            self._told_load = (state, self.now)
            self._say(
                Load(
                    running=self._load.running,
                    waiting=self.engine.waiting,
                    kv_pages_free=self._load.kv_pages_free,
                    idle_s=0.0 if self._load.running else self.now - self._idle_since_s,
                )
            )

    # ---- the core

    def feed(self, event: rep.ReplicaEvent) -> None:
        """One step of the core, at once."""
        for command in self.core.step(self.now, event):
            if self.alive:
                self._do(command)
        self.wake_at(self.core.next_wake_s, lambda: self.feed(rep.Ticked()))

    def _do(self, command: rep.ReplicaCommand) -> None:
        world, net = self.world, self.world.net
        match command:
            case rep.Pull():
                self._pull(command)
            case rep.SendClaim():
                self._claim(command)
            case rep.AckTicket(token):
                created, subject, sequence = world.tokens[token]
                net.send(self, net.server, lambda: self._ack_at_server(created, subject, sequence))
            case rep.StartRequest(grant, _):
                self._start(grant)
            case rep.AbortRequest(request, attempt):
                self.holds.discard((request, attempt))
                self._engine(sim.RequestAborted(request, attempt))
            case rep.SendFrames(ingress, frames):
                gateway = world.gateways.get(ingress)
                if gateway is not None:
                    if not world.options.hands:  # as a replica of an older version
                        frames = msgspec.structs.replace(frames, room=None)
                    net.send(self, gateway, lambda: gateway.framed(frames))
            case rep.ReportLoad():
                if command.running == 0 and self._load.running > 0:
                    self._idle_since_s = self.now
                self._load = command
            case rep.ReportDrained(given_back):
                self._say(Drained(given_back=given_back))
            case rep.ExitReplica():
                world.happened("replica-told-dead")
                self.exit(EXIT_DEAD)
            case _:
                assert_never(command)

    def _pull(self, command: rep.Pull) -> None:
        subject = names.tickets(model_key(self.record.deployment), command.sla_class, command.lane, shards=1)

        def taken(queued: QueuedTicket, created: int) -> None:
            token = f"{self.name}/{len(self.world.tokens)}"
            self.world.tokens[token] = (created, subject, queued.sequence)
            if queued.deliveries > 1:
                self.world.happened("ticket-redelivered")
            ticket = decode(queued.payload, Ticket)
            self.feed(rep.TicketPulled(command.sla_class, command.lane, ticket, token, queued.deliveries))

        def expired(credits: int) -> None:
            self.feed(rep.PullExpired(command.sla_class, command.lane, credits))

        self._pulls = [pull for pull in self._pulls if not pull.done]
        self._pulls.append(self.world.net.pull(self, subject, command.credits, command.expires_s, taken, expired))

    def _ack_at_server(self, created: int, subject: str, sequence: int) -> None:
        queue = self.world.net.queue
        if queue is not None and queue.created == created:
            queue.acknowledge(subject, sequence)

    def _claim(self, command: rep.SendClaim) -> None:
        gateway, claim = self.world.gateways.get(command.ingress), command.claim
        if self.world.dies_claiming(self):
            return
        kinds = {
            NoAnswer.TIMEOUT: rep.Unanswered.TIMEOUT,
            NoAnswer.NO_RESPONDERS: rep.Unanswered.NO_RESPONDERS,
            NoAnswer.UNAVAILABLE: rep.Unanswered.BUS_UNAVAILABLE,
        }

        def answered(reply: object) -> None:
            # The union has no name at run time that isinstance would take.
            self.feed(rep.ClaimAnswered(claim.request, claim.attempt, decode(encode(reply), ClaimReply)))  # type: ignore[arg-type]

        self.world.net.request(
            self,
            gateway,
            lambda reply: gateway.claimed(claim, reply) if gateway is not None else None,
            answered,
            lambda why: self.feed(rep.ClaimUnanswered(claim.request, claim.attempt, kinds[why])),
            timeout_s=rep.CLAIM_TIMEOUT_S,
        )

    def handed(self, hand: Hand) -> None:
        """A gateway hands a request over."""
        if self.serving:
            self.feed(rep.HandReceived(hand))

    def told(self, back: Back) -> None:
        """A gateway says ``Held``, ``Resend`` or ``Cancel``."""
        if self.serving:
            self.feed(rep.BackReceived(back))

    def pool_told(self, digest: PoolDigest) -> None:
        """A digest of the pool arrived."""
        if not self.serving:
            return
        if self.replica in digest.dead:
            self._do(rep.ExitReplica())
            return
        ours = {one.replica: one.weight for one in digest.replicas if one.deployment == self.record.deployment}
        share = ours.get(self.replica, 1.0) / (max(ours.values(), default=1.0) or 1.0)
        event = rep.PoolChanged(weights={}, share=share)
        for model in digest.models:
            if model.deployment == self.record.deployment:
                event = rep.PoolChanged(weights={}, waiting=model.waiting_queues, share=share)
        if event != self._pool_event:
            self._pool_event = event
            self.feed(event)

    def close_pulls(self) -> None:
        """The server saw the connection close."""
        for pull in self._pulls:
            pull.close_at_server()

    def bus_lost(self) -> None:
        self.close_pulls()
        for pull in self._pulls:
            pull.end()

    def bus_back(self) -> None:
        self.back_s = self.now
        if self.serving:
            self.feed(rep.BusReconnected())

    # ---- the engine

    def _start(self, grant: Grant) -> None:
        self.world.started(self, grant)
        parsed = sim.parse_request(
            request=grant.request,
            attempt=grant.attempt,
            endpoint=grant.endpoint,
            body=grant.body,
            sent_token_ids=grant.sent_token_ids,
            max_tokens=grant.max_tokens,
        )
        assert isinstance(parsed, sim.SimulatedRequest), parsed
        self.holds.add((grant.request, grant.attempt))
        self._engine(sim.RequestAdded(parsed))

    def _engine(self, event: sim.SimulatedEvent) -> None:
        for command in self.engine.step(self.now, event):
            match command:
                case sim.EmitDeltas(deltas):
                    self.holds -= {(delta.request, delta.attempt) for delta in deltas if delta.end}
                    # Not inside the step of the core that may have caused it.
                    self.clock.call_soon(lambda d=deltas: self.run(lambda: self.feed(rep.EngineStepped(d))))  # type: ignore[misc]
                case sim.Die(detail):
                    self.clock.call_soon(lambda d=detail: self.run(lambda: self._engine_died(d)))  # type: ignore[misc]
                case _:
                    assert_never(command)
        if self._engine_wake is not None:
            self._engine_wake.cancel()
        wake_s = self.engine.next_wake_s
        if wake_s is not None:
            self._engine_wake = self.clock.call_later(
                max(0.0, wake_s - self.now), lambda: self.run(lambda: self._engine(sim.Ticked()))
            )

    def _engine_died(self, detail: str) -> None:
        self.world.happened("engine-died")
        self.feed(rep.EngineFailed(detail))
        self._say(Failed(detail=detail))
        self.exit(1)


# ---------------------------------------------------------------------------------------------------------------- agent


class AgentNode(Actor):
    """A worker agent: :class:`AgentCore` with simulated processes."""

    def __init__(self, world: World, host: int, incarnation: int, devices: tuple[int, ...]) -> None:
        super().__init__(world, f"worker{host}-{incarnation:010x}")
        self.worker = WorkerId(self.name)
        self.host = host
        found = tuple(
            agt.Device(device=DeviceId(f"cpu{index}"), kind=DeviceKind.CPU, name="sim", memory_bytes=memory_bytes)
            for index, memory_bytes in enumerate(devices)
        )
        self.core = AgentCore(
            agt.AgentSettings(worker=self.worker, host=f"host{host}", devices=found, engines=(EngineType.SIMULATED,))
        )
        self.children: dict[ReplicaId, ReplicaNode] = {}
        self._replies: dict[str, Callable[[object], None]] = {}
        self._commands = 0
        self.every(0.1, self._beat)
        self.feed(agt.Ticked())

    def feed(self, event: agt.AgentEvent) -> None:
        """One step of the core, at once."""
        for command in self.core.step(self.now, event):
            self._do(command)
        self.wake_at(self.core.next_wake_s, lambda: self.feed(agt.Ticked()))

    def _do(self, command: agt.AgentCommand) -> None:
        world, net = self.world, self.world.net
        match command:
            case agt.SpawnReplica():
                self._spawn(command)
            case agt.SendControl(replica, message):
                child = self.children.get(replica)
                if child is not None:
                    self._tell(child, message)
            case agt.KillReplica(replica, _):
                child = self.children.get(replica)
                if child is not None:
                    child.exit(-9)
            case agt.ReplyCommand(token, reply):
                if token:
                    self._replies.pop(token)(reply)
            case agt.PublishEvent(event):
                for scheduler in world.schedulers:
                    net.send(self, scheduler, lambda s=scheduler: s.feed(sch.OperationSeen(event)))  # type: ignore[misc]
            case agt.PublishSnapshot(snapshot):
                for scheduler in world.schedulers:
                    net.send(self, scheduler, lambda s=scheduler: s.feed(sch.WorkerReported(snapshot)))  # type: ignore[misc]
            case agt.ExitAgent() | agt.AskKv():
                raise AssertionError("nobody shuts an agent down here, and none has a KV node")
            case _:
                assert_never(command)

    def _tell(self, child: ReplicaNode, message: ToReplica) -> None:
        self.clock.call_soon(lambda: child.run(lambda: child.control(message)))

    def _spawn(self, command: agt.SpawnReplica) -> None:
        child = ReplicaNode(self.world, self, command.replica, command.record, self.world.engine_for(command.record))
        self.world.replica_born(child, int(command.device[3:]))
        self.children[command.replica] = child

        def spawned() -> None:
            self.feed(agt.ReplicaSpawned(command.replica, pid=len(self.world.born)))
            child.spawned = True
            if child.alive:
                child.begin()
            else:
                self.exited(child, -9)

        self.clock.call_later(self.world.draw.uniform(0.01, SPAWN_S_MAX), lambda: self.run(spawned))

    def exited(self, child: ReplicaNode, code: int) -> None:
        """A child was reaped, which comes after the news that it exists."""
        if child.spawned and self.children.pop(child.replica, None) is not None:
            self.feed(agt.ProcessExited(child.replica, code))

    def commanded(self, command: WorkerCommand, reply: Callable[[object], None]) -> None:
        """A scheduler's command arrived."""
        self._commands += 1
        token = f"{self.name}/{self._commands}"
        self._replies[token] = reply
        incarnation = f"{self.world.draw.getrandbits(40):010x}"
        self.feed(agt.CommandReceived(token, command, incarnation))

    def _beat(self) -> None:
        beat = sch.BeatSeen(self.worker, self.core.epoch_seen)
        for scheduler in self.world.schedulers:
            self.world.net.send(self, scheduler, lambda s=scheduler: s.feed(beat))  # type: ignore[misc]

    def bus_back(self) -> None:
        self.feed(agt.BusRestored())

    def kill(self) -> None:
        """kill -9: its replicas see their lifeline end and leave at once."""
        self.die()
        for child in list(self.children.values()):
            child.exit(70)


# ------------------------------------------------------------------------------------------------------------ scheduler


class SchedulerNode(Actor):
    """A scheduler: :class:`SchedulerCore` on the simulated bus."""

    def __init__(self, world: World, name: str, epoch: int, settings: sch.SchedulerSettings) -> None:
        super().__init__(world, name)
        self.core = SchedulerCore(settings)
        self.epoch = epoch
        self.round_trips(lambda: self.feed(sch.BusRoundTripMade()))
        self.feed(sch.RegistryLoaded(tuple(world.records)))
        if world.last_digest is not None:
            self.feed(sch.DigestRestored(world.last_digest))
        self.feed(sch.LeadershipGained(epoch))

    def feed(self, event: sch.SchedulerEvent) -> None:
        """One step of the core, at once."""
        if not self.alive:
            return
        for command in self.core.step(self.now, event):
            self._do(command)
        self.wake_at(self.core.next_wake_s, lambda: self.feed(sch.Ticked(unix_s=1e9 + self.now)))

    def _do(self, command: sch.SchedulerCommand) -> None:
        world, net = self.world, self.world.net
        match command:
            case sch.SendCommand(worker, order, timeout_s):
                agent = world.agents.get(worker)
                if isinstance(order, LoadModel):
                    world.happened("load-ordered")

                def answered(reply: object) -> None:
                    assert isinstance(reply, CommandReply)
                    self.feed(sch.CommandAnswered(reply))

                net.request(
                    self,
                    agent,
                    lambda reply: agent.commanded(order, reply) if agent is not None else None,
                    answered,
                    lambda _: self.feed(sch.CommandUnanswered(order.operation)),
                    timeout_s=timeout_s,
                )
            case sch.PublishDigest(digest):
                world.last_digest = command.stored
                for gateway in world.gateways.values():
                    net.send(self, gateway, lambda g=gateway: g.pool_told(digest))  # type: ignore[misc]
                for replica in list(world.replicas.values()):
                    net.send(self, replica, lambda r=replica: r.pool_told(digest))  # type: ignore[misc]
            case sch.AppendJournal() | sch.KeepCosts():
                pass
            case sch.RaiseAlert(alert):
                world.happened(f"alert-{alert.kind}")
            case sch.Resign():
                world.happened("leader-resigned")
                world.scheduler_resigned(self)
            case _:
                assert_never(command)
