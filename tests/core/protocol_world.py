"""A small pool on a virtual clock: real cores, a modelled bus and work-queue, a scripted engine, and faults.

Everything that can go wrong between the cores is here: a network that loses, doubles, delays and reorders; a work-queue
that redelivers, forgets itself on a restart and swallows repeated ids; processes that die, freeze or lose the bus. The
promises of the protocol are checked while it runs (``Broken`` is raised at once) and by :meth:`World.heal_and_check`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import msgspec

from broker.core.requests import events as g
from broker.core.requests.affinity import PromptPrefix, ReuseCosts
from broker.core.requests.core import RequestCore
from broker.core.requests.live import State
from kvcache.core.prefix_index import PrefixIndex
from subjects.bus import ACK_WAIT_S, DUPLICATE_WINDOW_S, Stored
from subjects.ids import DeploymentKey, IngressId, ModelHash, ModelKey, ReplicaId, RequestId, Tenant, WorkerId, model_key
from subjects.messages import (
    Back,
    Claim,
    ClaimReply,
    Delta,
    Endpoint,
    Failure,
    FailureKind,
    Frames,
    Grant,
    Hand,
    KvIndexed,
    KvModelSpans,
    KvSpan,
    KvTier,
    Lane,
    PoolDigest,
    RequestProfile,
    SlaClass,
    StepCosts,
    Ticket,
    Usage,
)
from workers.core import replica_events as w
from workers.core.held_request import Key
from workers.core.replica import ReplicaCore

MODEL = ModelHash("5e" * 32)
DEPLOYMENT = DeploymentKey("d5" * 32)
ENGINE_STEP_S = 0.02
ROUND_TRIP_EVERY_S = 0.2
QUEUE_CHECK_EVERY_S = 1.0
BODY = bytes(range(251)) * 2000
PREFIX = PromptPrefix(
    (b"first", b"second"),
    256,
    ReuseCosts(StepCosts(prefill_token_s=1e-3, step_const_s=1e-3, step_request_s=1e-4), 1e-5, 1e-5, 1e-5),
)
"""Of all prompts: worth half a second, so that a request would rather wait for it."""
STALE_RUN_MAX_S = 1.0
"""How long an attempt that is over may go on running when its gateway and its replica can hear each other."""
HEAL_BOUND_S = 30.0
"""How long after the end of all trouble every request has ended."""
CLEAN_BOUND_S = 60.0
"""How long after that nothing is left: tickets of dead gateways go at their fifth delivery."""
WAIT_BOUND_S = 200.0
DEADLINE_S = 600.0


class Broken(AssertionError):
    """A promise of the protocol was broken."""


def token_of(request: RequestId, choice: int, index: int) -> int:
    """Token ``index`` of a choice, the same on every replica."""
    return int.from_bytes(hashlib.blake2b(f"{request}/{choice}/{index}".encode(), digest_size=4).digest(), "big")


@dataclass
class Faults:
    """What the network and the bus do to messages right now."""

    loss: float = 0.0
    doubling: float = 0.0
    delay_s: float = 0.001
    reorder: bool = False


@dataclass(repr=False)
class Process:
    """What a gateway and a replica have in common."""

    name: str
    alive: bool = True
    connected: bool = True
    frozen_until_s: float = 0.0
    backlog: list[Callable[[], None]] = field(default_factory=list)
    wake_s: float | None = None

    def __repr__(self) -> str:
        return self.name


@dataclass(repr=False)
class GatewayProcess(Process):
    """A gateway and the number of claims that it was asked."""

    core: RequestCore = field(default_factory=lambda: RequestCore(IngressId("none")))
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    replies: dict[int, tuple[ReplicaProcess, Key, int]] = field(default_factory=dict)


@dataclass
class Run:
    """One attempt inside an engine. ``number`` tells runs apart, since no two runs of a model need to agree."""

    number: int
    next_indexes: list[int]
    totals: list[int]
    failure: Failure | None
    first_step_s: float
    stale_since_s: float | None = None


@dataclass(repr=False)
class ReplicaProcess(Process):
    """A replica with its scripted engine."""

    core: ReplicaCore = field(default_factory=lambda: ReplicaCore(ReplicaId("none")))
    runs: dict[Key, Run] = field(default_factory=dict)
    claims: dict[int, Key] = field(default_factory=dict)
    pulls: list[list[int]] = field(default_factory=list)
    drained: bool = False
    stepping: bool = False


@dataclass
class Client:
    """What a client asked for and has seen."""

    gateway: GatewayProcess
    totals: list[int]
    failures: list[FailureKind]
    scripted: bool
    prefills_s: list[float]
    left: bool = False
    outcome: g.Outcome | None = None
    seen: list[int] = field(default_factory=list)
    closed: list[bool] = field(default_factory=list)
    run: int | None = None


@dataclass
class Queued:
    """A ticket in the work-queue."""

    ticket: Ticket
    expires_s: float
    deliveries: int = 0
    hidden_until_s: float = 0.0


@dataclass
class OpenPull:
    """A pull that waits at the work-queue."""

    replica: ReplicaProcess
    credits: int
    expires_s: float


class World:
    """The pool. Rules of a test call its methods; :meth:`advance` lets virtual time pass."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 100.0
        self.faults = Faults()
        self.trouble = False
        self.hands = True
        self._told = 0
        self.handed = 0
        self.unserved_acks: set[RequestId] = set()
        self.gateways: list[GatewayProcess] = []
        self.replicas: list[ReplicaProcess] = []
        self.clients: dict[RequestId, Client] = {}
        self.log: list[tuple[float, str, object, object]] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._last_arrival: dict[tuple[str, str], float] = {}
        self._bus_up = True
        self._created: int | None = 1
        self._sequence = 0
        self._queue: dict[int, Queued] = {}
        self._ids: dict[str, tuple[float, Stored]] = {}
        self._pulls: dict[tuple[SlaClass, Lane], list[OpenPull]] = {}
        self._dead: list[ReplicaId] = []
        self._runs = 0

    # ------------------------------------------------------------------------------------------------------- plumbing

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Schedules ``action``; equal times keep their order."""
        self._count += 1
        heappush(self._heap, (time_s, self._count, action))

    def advance(self, duration_s: float) -> None:
        """Lets time pass."""
        end_s = self.now_s + duration_s
        while self._heap and self._heap[0][0] <= end_s:
            time_s, _, action = heappop(self._heap)
            self.now_s = max(self.now_s, time_s)
            action()
        self.now_s = end_s
        self._check_runs()

    def _on(self, process: Process, action: Callable[[], None]) -> None:
        """Runs ``action`` inside a process: later if it is frozen, never if it is dead."""
        if not process.alive:
            return
        if self.now_s < process.frozen_until_s:
            process.backlog.append(action)
            return
        action()

    def _thaw(self, process: Process) -> None:
        if self.now_s < process.frozen_until_s:
            return
        backlog, process.backlog = process.backlog, []
        for action in backlog:
            self._on(process, action)

    def _send(self, source: Process, target: Process, action: Callable[[], None]) -> None:
        """A core message: at most once as NATS promises, and worse when faults are on."""
        if not (self._bus_up and source.connected):
            return
        copies = 0 if self.random.random() < self.faults.loss else 1
        copies += 1 if self.random.random() < self.faults.doubling else 0
        for _ in range(copies):
            arrival_s = self.now_s + self.random.uniform(0.2, 1.0) * self.faults.delay_s
            if not self.faults.reorder:
                link = (source.name, target.name)
                arrival_s = max(arrival_s, self._last_arrival.get(link, 0.0))
                self._last_arrival[link] = arrival_s
            self.at(arrival_s, lambda: self._arrive(target, action))

    def _arrive(self, target: Process, action: Callable[[], None]) -> None:
        if self._bus_up and target.connected:
            self._on(target, action)

    def _every(self, process: Process, period_s: float, action: Callable[[], None]) -> None:
        def again() -> None:
            if process.alive:
                self._on(process, action)
                self.at(self.now_s + period_s, again)

        self.at(self.now_s + period_s * self.random.random(), again)

    def _arm(self, process: GatewayProcess | ReplicaProcess) -> None:
        wake_s = process.core.next_wake_s
        if wake_s is None or (process.wake_s is not None and process.wake_s <= wake_s):
            return
        process.wake_s = max(wake_s, self.now_s)
        due_s = process.wake_s

        def wake() -> None:
            if process.wake_s == due_s:
                process.wake_s = None
                self._on(process, lambda: self._tick(process))

        self.at(due_s, wake)

    def _tick(self, process: GatewayProcess | ReplicaProcess) -> None:
        if isinstance(process, GatewayProcess):
            self._gateway(process, g.Ticked())
        else:
            self._replica(process, w.Ticked())

    # ------------------------------------------------------------------------------------------------------ processes

    def start_gateway(self) -> GatewayProcess:
        """A gateway under a fresh incarnation."""
        name = f"gw-{len(self.gateways)}"
        prefixes = PrefixIndex()
        process = GatewayProcess(name, core=RequestCore(IngressId(name), prefixes=prefixes), prefixes=prefixes)
        self.gateways.append(process)
        self._every(process, ROUND_TRIP_EVERY_S, lambda: self._ping(process))
        self._every(process, QUEUE_CHECK_EVERY_S, lambda: self._check_queue(process))
        self._gateway(process, g.PoolChanged(self._digest()))
        return process

    def start_replica(self, *, slots: int = 2, kv_pages: int = 600) -> ReplicaProcess:
        """A replica under a fresh incarnation."""
        name = f"rep-{len(self.replicas)}"
        process = ReplicaProcess(name, core=ReplicaCore(ReplicaId(name)))
        self.replicas.append(process)
        self._every(process, ROUND_TRIP_EVERY_S, lambda: self._ping(process))
        self._replica(process, w.Opened(slots=slots, kv_pages=kv_pages, block_size=16, max_context_len=16 * 1024))
        return process

    def tell_prefix(self, process: ReplicaProcess) -> None:
        """A node says that this engine has what all prompts here begin with, rightly or not."""
        self._told += 1
        replica = ReplicaId(process.name)
        held = tuple(KvSpan(span=span, depth=1, tier=KvTier.HOST, replica=replica) for span in PREFIX.spans)
        models = (KvModelSpans(model_hash=MODEL, block_size=16, held=held),)
        news = KvIndexed(worker=WorkerId("w"), node="n", sequence=self._told, models=models)
        for gateway in self.gateways:
            gateway.prefixes.indexed(self.now_s, news)

    def kill(self, process: GatewayProcess | ReplicaProcess, *, noticed: bool = True) -> None:
        """Kill -9. A noticed death of a replica reaches the gateways by the pool's digest after 2 s."""
        self.trouble = True
        process.alive = False
        if isinstance(process, GatewayProcess):
            for client in self.clients.values():
                client.left = client.left or client.gateway is process  # The connection broke.
        elif noticed:
            self.at(self.now_s + 2.0, lambda: self.declare_dead(process))

    def declare_dead(self, process: ReplicaProcess) -> None:
        """The pool's digest lists the replica as dead, rightly or not."""
        self.trouble = self.trouble or process.alive
        replica = ReplicaId(process.name)
        if replica not in self._dead:
            self._dead.append(replica)
        for gateway in self.gateways:
            self._on(gateway, lambda gateway=gateway: self._gateway(gateway, g.PoolChanged(self._digest())))  # type: ignore[misc]

    def freeze(self, process: Process, duration_s: float) -> None:
        """SIGSTOP for a while."""
        self.trouble = True
        process.frozen_until_s = self.now_s + duration_s
        self.at(process.frozen_until_s, lambda: self._thaw(process))

    def cut_off(self, process: GatewayProcess | ReplicaProcess, duration_s: float) -> None:
        """The process loses the bus for a while and notices."""
        self.trouble = True
        if process.connected:
            process.connected = False
            self.at(self.now_s + duration_s, lambda: self._reconnect(process))

    def restart_bus(self, down_s: float) -> None:
        """Kill -9 of the NATS server: memory streams are gone, clients come back one by one."""
        self.trouble = True
        if not self._bus_up:
            return
        self._bus_up = False
        self._created = None
        self._queue.clear()
        self._ids.clear()
        for process in self._processes():
            if process.connected:
                process.connected = False
                self.at(self.now_s + down_s + self.random.random(), lambda process=process: self._reconnect(process))  # type: ignore[misc]
        for pulls in self._pulls.values():
            pulls.clear()
        self.at(self.now_s + down_s, self._bus_is_back)

    def _bus_is_back(self) -> None:
        self._bus_up = True

    def _reconnect(self, process: GatewayProcess | ReplicaProcess) -> None:
        if not process.alive or process.connected:
            return
        if not self._bus_up:
            self.at(self.now_s + 0.5, lambda: self._reconnect(process))
            return
        process.connected = True
        if isinstance(process, GatewayProcess):
            # From here on its waiting tickets are in the work-queue again.
            self.unserved_acks -= {r for r, client in self.clients.items() if client.gateway is process}
            self._on(process, lambda: self._gateway(process, g.BusReconnected()))
        else:
            self._on(process, lambda: self._replica(process, w.BusReconnected()))

    def drain(self, process: ReplicaProcess, bound_s: float) -> None:
        """The agent asks the replica to drain."""
        self._on(process, lambda: self._replica(process, w.DrainStarted(self.now_s + bound_s)))

    def _processes(self) -> list[GatewayProcess | ReplicaProcess]:
        return [*self.gateways, *self.replicas]

    def _digest(self) -> PoolDigest:
        return PoolDigest(epoch=1, sequence=len(self._dead), dead=tuple(self._dead))

    def _ping(self, process: GatewayProcess | ReplicaProcess) -> None:
        if not (self._bus_up and process.connected) or self.random.random() < self.faults.loss:
            return
        if isinstance(process, GatewayProcess):
            self._gateway(process, g.BusRoundTripMade())
        else:
            self._replica(process, w.BusRoundTripMade())

    # --------------------------------------------------------------------------------------------------- the gateways

    def submit(
        self,
        gateway: GatewayProcess,
        *,
        totals: list[int],
        sla_class: SlaClass = SlaClass.SILVER,
        lane: Lane = Lane.SMALL,
        failures: list[FailureKind] | None = None,
        prefills_s: list[float] | None = None,
        body_bytes: int = 10,
        stream: bool = True,
    ) -> RequestId:
        """A client's request for ``totals`` tokens per choice; its first runs fail as ``failures`` says and give
        their first token after ``prefills_s``."""
        request = RequestId(f"{gateway.name}-{len(self.clients)}")
        self.clients[request] = Client(
            gateway,
            totals,
            failures or [],
            bool(failures),
            prefills_s or [],
            seen=[0] * len(totals),
            closed=[False] * len(totals),
        )
        profile = RequestProfile(
            model_hash=MODEL,
            deployment=DEPLOYMENT,
            endpoint=Endpoint.CHAT,
            tenant=Tenant("t"),
            sla_class=sla_class,
            lane=lane,
            max_tokens=max(totals),
            n=len(totals),
            stream=stream,
            input_tokens=10,
            expected_output_tokens=sum(totals),
            kv_pages_needed={Lane.SMALL: 30, Lane.MEDIUM: 300, Lane.LARGE: 590}[lane],
            deadline_unix_s=0.0,
        )
        submitted = g.RequestSubmitted(
            request=request,
            profile=profile,
            body=BODY[:body_bytes],
            wait_until_s=self.now_s + WAIT_BOUND_S,
            deadline_s=self.now_s + DEADLINE_S,
            prefix=PREFIX,
        )
        self._on(gateway, lambda: self._gateway(gateway, submitted))
        return request

    def leave(self, request: RequestId) -> None:
        """The client closes its connection; nothing may reach it afterwards."""
        client = self.clients[request]

        def left() -> None:
            if client.outcome is None:
                client.left = True
                self._gateway(client.gateway, g.ClientLeft(request))
                if client.outcome is None:
                    raise Broken(f"{request} did not end when its client left")

        self._on(client.gateway, left)

    def _gateway(self, process: GatewayProcess, event: g.RequestEvent) -> None:
        commands = process.core.step(self.now_s, event)
        self.log.append((self.now_s, process.name, event, commands))
        for command in commands:
            self._do_gateway(process, command)
        self._arm(process)

    def _do_gateway(self, process: GatewayProcess, command: g.RequestCommand) -> None:
        match command:
            case g.PublishTicket():
                self._publish(process, command)
            case g.EnsureQueue():
                if self._bus_up and process.connected and self._created is None:
                    self._sequence = 0
                    self._created = int(self.now_s * 1000) + 2
            case g.DeleteTicket(stored):
                if self._bus_up and process.connected and stored.created == self._created:
                    self._queue.pop(stored.sequence, None)
            case g.HandOver(replica, hand):
                self._hand(process, self._replica_named(replica), hand)
            case g.AnswerClaim(token, reply):
                target, key, number = process.replies.pop(token)
                self._send(process, target, lambda: self._claim_answered(target, key, number, reply))
            case g.SendBack(replica, back):
                target = self._replica_named(replica)
                self._send(process, target, lambda: self._hear_back(target, back))
            case g.Deliver(request, delta):
                self._deliver(request, delta)
            case g.EndRequest(request, outcome):
                self._ended(request, outcome)
            case g.RecordGrant() | g.RecordRestart():
                pass

    def _hear_back(self, process: ReplicaProcess, back: Back) -> None:
        self._replica(process, w.BackReceived(back))

    def _replica_named(self, name: str) -> ReplicaProcess:
        return next(process for process in self.replicas if process.name == name)

    def _deliver(self, request: RequestId, delta: Delta) -> None:
        client = self.clients[request]
        if client.left or client.outcome is not None:
            raise Broken(f"{request} got a delta after its end")
        if delta.failure is not None:
            raise Broken(f"{request} got a failure as a delta")
        seen = client.seen[delta.choice]
        if delta.first_token_index != seen or client.closed[delta.choice]:
            raise Broken(f"{request} got unit {delta.first_token_index} of choice {delta.choice} after {seen}")
        wanted = tuple(token_of(request, delta.choice, seen + i) for i in range(delta.units))
        if delta.token_ids != wanted:
            raise Broken(f"{request} got a foreign token")
        runs = {int(word) for word in delta.text.split()}
        if client.run is None and runs:
            client.run = min(runs)
        if runs - {client.run}:
            raise Broken(f"{request} got tokens of two runs")
        client.seen[delta.choice] += delta.units
        client.closed[delta.choice] = delta.finish_reason is not None

    def _ended(self, request: RequestId, outcome: g.Outcome) -> None:
        client = self.clients[request]
        if client.outcome is not None:
            raise Broken(f"{request} ended twice: {client.outcome}, {outcome}")
        client.outcome = outcome
        if isinstance(outcome, g.Finished):
            if client.seen != client.totals:
                raise Broken(f"{request} finished with {client.seen} of {client.totals} tokens")
            if outcome.usage is not None and outcome.usage.completion_tokens != sum(client.totals):
                raise Broken(f"{request} finished with the usage of another")
        if isinstance(outcome, g.Cancelled) and not client.left:
            raise Broken(f"{request} was cancelled though its client stayed")
        if isinstance(outcome, g.Failed) and not client.left and not self.trouble and not client.scripted:
            raise Broken(f"{request} failed without any trouble: {outcome}")

    # --------------------------------------------------------------------------------------------------- the replicas

    def _replica(self, process: ReplicaProcess, event: w.ReplicaEvent) -> None:
        commands = process.core.step(self.now_s, event)
        if commands and not (isinstance(event, w.Ticked | w.BusRoundTripMade)):
            self.log.append((self.now_s, process.name, event, commands))
        for command in commands:
            self._do_replica(process, command)
        self._arm(process)

    def _do_replica(self, process: ReplicaProcess, command: w.ReplicaCommand) -> None:
        match command:
            case w.Pull():
                self._pull(process, command)
            case w.SendClaim(ingress, claim):
                self._claim(process, ingress, claim)
            case w.AckTicket(token):
                self._ack(process, token)
            case w.StartRequest(grant, _):
                self._start(process, grant)
            case w.AbortRequest(request, attempt):
                if process.runs.pop((request, attempt), None) is None:
                    raise Broken(f"{process.name} aborts {request} attempt {attempt}, which does not run")
            case w.SendFrames(ingress, frames):
                self._send_frames(process, ingress, frames)
            case w.ReportDrained():
                process.drained = True
                if process.runs:
                    raise Broken(f"{process.name} reported drained while {list(process.runs)} run")
            case w.ExitReplica():
                self.kill(process, noticed=False)
            case w.ReportLoad():
                pass

    def _send_frames(self, process: ReplicaProcess, ingress: str, frames: Frames) -> None:
        gateway = next(gateway for gateway in self.gateways if gateway.name == ingress)
        if not self.hands:  # as a replica of an older version
            frames = msgspec.structs.replace(frames, room=None)
        self._send(process, gateway, lambda: self._gateway(gateway, g.FramesReceived(frames)))

    def _start(self, process: ReplicaProcess, grant: Grant) -> None:
        if grant.body != BODY[: len(grant.body)] or grant.parts != 1:
            raise Broken("the body was put together wrongly")
        client = self.clients[grant.request]
        self._runs += 1
        kind = client.failures.pop(0) if client.failures else None
        failure = None if kind is None else Failure(kind=kind, message="scripted", status=400)
        if (grant.request, grant.attempt) in process.runs:
            raise Broken(f"{grant.request} was started twice")
        prefill_s = client.prefills_s.pop(0) if client.prefills_s else 0.0
        run = Run(self._runs, [0] * len(client.totals), client.totals, failure, self.now_s + prefill_s)
        process.runs[grant.request, grant.attempt] = run
        if not process.stepping:
            process.stepping = True
            self.at(self.now_s + ENGINE_STEP_S, lambda: self._keep_stepping(process))

    def _keep_stepping(self, process: ReplicaProcess) -> None:
        process.stepping = bool(process.alive and process.runs)
        if process.stepping:
            self._on(process, lambda: self._step_engine(process))
            self.at(self.now_s + ENGINE_STEP_S, lambda: self._keep_stepping(process))

    def _step_engine(self, process: ReplicaProcess) -> None:
        deltas: list[Delta] = []
        ended: list[Key] = []
        for (request, attempt), run in list(process.runs.items()):
            if self.now_s < run.first_step_s:
                continue
            if run.failure is not None:
                deltas.append(
                    Delta(request=request, attempt=attempt, first_token_index=0, units=0, end=True, failure=run.failure)
                )
                ended.append((request, attempt))
                continue
            for choice, total in enumerate(run.totals):
                index = run.next_indexes[choice]
                if index >= total:
                    continue
                units = min(1 + run.number % 2, total - index)
                run.next_indexes[choice] = index + units
                end = run.next_indexes == run.totals
                deltas.append(
                    Delta(
                        request=request,
                        attempt=attempt,
                        choice=choice,
                        first_token_index=index,
                        units=units,
                        text=f"{run.number} ",
                        token_ids=tuple(token_of(request, choice, index + i) for i in range(units)),
                        finish_reason="stop" if index + units == total else None,
                        end=end,
                        usage=Usage(prompt_tokens=10, completion_tokens=sum(run.totals)) if end else None,
                    )
                )
            if run.next_indexes == run.totals:
                ended.append((request, attempt))
        if deltas:
            self._replica(process, w.EngineStepped(tuple(deltas)))
        for key in ended:  # the replica may have aborted it before it heard of this step
            process.runs.pop(key, None)

    def _claim(self, process: ReplicaProcess, ingress: str, claim: Claim) -> None:
        self._count += 1
        number = self._count
        key = (claim.request, claim.attempt)
        process.claims[number] = key
        gateway = next((gateway for gateway in self.gateways if gateway.name == ingress), None)
        if not (self._bus_up and process.connected):
            self.at(self.now_s, lambda: self._unanswered(process, number, w.Unanswered.BUS_UNAVAILABLE))
        elif gateway is None or not gateway.alive or not gateway.connected:
            self.at(self.now_s + 0.001, lambda: self._unanswered(process, number, w.Unanswered.NO_RESPONDERS))
        else:
            self._send(process, gateway, lambda: self._hear_claim(gateway, process, number, claim))
            self.at(self.now_s + w.CLAIM_TIMEOUT_S, lambda: self._unanswered(process, number, w.Unanswered.TIMEOUT))

    def _hear_claim(self, gateway: GatewayProcess, process: ReplicaProcess, number: int, claim: Claim) -> None:
        self._count += 1
        gateway.replies[self._count] = (process, (claim.request, claim.attempt), number)
        self._gateway(gateway, g.ClaimReceived(claim, self._count))

    def _claim_answered(self, process: ReplicaProcess, key: Key, number: int, reply: ClaimReply) -> None:
        if process.claims.pop(number, None) is not None:
            self._replica(process, w.ClaimAnswered(key[0], key[1], reply))

    def _unanswered(self, process: ReplicaProcess, number: int, kind: w.Unanswered) -> None:
        def tell() -> None:
            key = process.claims.pop(number, None)
            if key is not None:
                self._replica(process, w.ClaimUnanswered(key[0], key[1], kind))

        self._on(process, tell)

    def _hand(self, gateway: GatewayProcess, process: ReplicaProcess, hand: Hand) -> None:
        """The server says at once, and mostly rightly, when nobody is connected there."""
        self.handed += 1
        if self._bus_up and gateway.connected and process.alive and process.connected:
            self._send(gateway, process, lambda: self._replica(process, w.HandReceived(hand)))
        elif self.random.random() >= self.faults.loss:
            lost = g.HandLost(hand.grant.request, hand.grant.attempt)
            self.at(self.now_s + 0.001, lambda: self._on(gateway, lambda: self._gateway(gateway, lost)))

    # -------------------------------------------------------------------------------------------------- the work-queue

    def _publish(self, process: GatewayProcess, command: g.PublishTicket) -> None:
        ticket = command.ticket

        def not_stored(reason: g.NotStoredReason) -> None:
            event = g.TicketNotStored(ticket.request, ticket.attempt, ticket.publication, reason)
            self._on(process, lambda: self._gateway(process, event))

        if not (self._bus_up and process.connected):
            self.at(self.now_s + 0.001, lambda: not_stored(g.NotStoredReason.BUS_UNAVAILABLE))
            return
        if self._created is None:
            self.at(self.now_s + 0.001, lambda: not_stored(g.NotStoredReason.QUEUE_MISSING))
            return
        if self.random.random() < self.faults.loss:
            self.at(self.now_s + 1.0, lambda: not_stored(g.NotStoredReason.TIMEOUT))
            return
        known = self._ids.get(command.message_id)
        if known is not None and self.now_s - known[0] < DUPLICATE_WINDOW_S:
            stored = Stored(shard=0, sequence=known[1].sequence, created=known[1].created, duplicate=True)
        else:
            self._sequence += 1
            stored = Stored(shard=0, sequence=self._sequence, created=self._created)
            self._queue[stored.sequence] = Queued(ticket, self.now_s + command.ttl_s)
            self._ids[command.message_id] = (self.now_s, stored)
            self._serve(ticket.profile.sla_class, ticket.profile.lane)
        if self.random.random() < self.faults.loss:
            self.at(self.now_s + 1.0, lambda: not_stored(g.NotStoredReason.TIMEOUT))
            return
        event = g.TicketStored(ticket.request, ticket.attempt, ticket.publication, stored)
        self.at(self.now_s + 0.001, lambda: self._on(process, lambda: self._gateway(process, event)))

    def _check_queue(self, process: GatewayProcess) -> None:
        if not (self._bus_up and process.connected):
            return
        created = self._created
        for model in process.core.waiting_models():
            assert model == model_key(DEPLOYMENT)
            self._gateway(process, g.QueueChecked(ModelKey(model), created))

    def _pull(self, process: ReplicaProcess, command: w.Pull) -> None:
        queue = (command.sla_class, command.lane)
        pull = OpenPull(process, command.credits, self.now_s + command.expires_s)
        if self._bus_up and process.connected and self._created is not None:
            self._pulls.setdefault(queue, []).append(pull)
            self.at(self.now_s + 0.0005, lambda: self._serve(*queue))
            self.at(pull.expires_s, lambda: self._expire(queue, pull))
        else:
            self.at(self.now_s, lambda: self._expire(queue, pull))

    def _expire(self, queue: tuple[SlaClass, Lane], pull: OpenPull) -> None:
        if pull in self._pulls.get(queue, ()):
            self._pulls[queue].remove(pull)
        credits, pull.credits = pull.credits, 0
        if credits:
            self._on(pull.replica, lambda: self._replica(pull.replica, w.PullExpired(*queue, credits)))

    def _serve(self, sla_class: SlaClass, lane: Lane) -> None:
        """Gives visible tickets of one queue to its open pulls, oldest first."""
        pulls = self._pulls.get((sla_class, lane), [])
        for sequence, queued in sorted(self._queue.items()):
            profile = queued.ticket.profile
            if (profile.sla_class, profile.lane) != (sla_class, lane) or queued.hidden_until_s > self.now_s:
                continue
            if queued.expires_s <= self.now_s:
                del self._queue[sequence]
                continue
            pull = next((p for p in pulls if p.credits and p.replica.connected and p.expires_s > self.now_s), None)
            if pull is None or not self._bus_up:
                return
            pull.credits -= 1
            queued.deliveries += 1
            queued.hidden_until_s = self.now_s + ACK_WAIT_S
            token = f"{self._created}/{sequence}"
            event = w.TicketPulled(sla_class, lane, queued.ticket, token, queued.deliveries)
            target = pull.replica
            self.at(self.now_s + 0.001, lambda target=target, event=event: self._ticket(target, event))  # type: ignore[misc]
            self.at(queued.hidden_until_s, lambda: self._serve(sla_class, lane))

    def _ticket(self, process: ReplicaProcess, event: w.TicketPulled) -> None:
        if self._bus_up and process.connected and self.random.random() >= self.faults.loss:
            self._on(process, lambda: self._replica(process, event))
        else:
            self._on(process, lambda: self._replica(process, w.PullExpired(event.sla_class, event.lane, 1)))

    def _ack(self, process: ReplicaProcess, token: str) -> None:
        created, _, sequence = token.partition("/")
        if not (self._bus_up and process.connected) or created != str(self._created):
            return
        if self.random.random() < self.faults.loss:
            return
        queued = self._queue.pop(int(sequence), None)
        if queued is not None and queued.deliveries >= w.DELIVERIES_MAX:
            self.unserved_acks.add(queued.ticket.request)

    # ----------------------------------------------------------------------------------------------------- the promises

    def _check_runs(self) -> None:
        """One current attempt runs, at its holder; an older one ends within a second of contact."""
        calm = self.faults.loss == 0 and self.faults.delay_s < 0.05 and self._bus_up
        for process in self.replicas:
            for (request, attempt), run in process.runs.items():
                client = self.clients[request]
                live = client.gateway.core._live.get(request)
                current = live is not None and live.attempt == attempt and live.state is State.RUNNING
                if live is not None and live.attempt < attempt:
                    raise Broken(f"{process.name} runs an attempt of {request} that never was")
                if current and live is not None and live.holder == process.name:
                    run.stale_since_s = None
                    continue
                if current:
                    raise Broken(f"{process.name} runs the attempt of {request} that {live and live.holder} holds")
                ends = (process, client.gateway)
                contact = all(p.alive and p.connected and self.now_s >= p.frozen_until_s for p in ends)
                if not (contact and calm):
                    run.stale_since_s = None
                elif run.stale_since_s is None:
                    run.stale_since_s = self.now_s
                elif self.now_s - run.stale_since_s > STALE_RUN_MAX_S:
                    raise Broken(f"{process.name} still runs attempt {attempt} of {request}, which is over")

    def heal_and_check(self) -> None:
        """Ends all faults and demands that every request ends soon and that nothing is left anywhere."""
        self.faults = Faults()
        self.at(self.now_s, lambda: None)
        for process in self._processes():
            process.frozen_until_s = min(process.frozen_until_s, self.now_s)
            self._thaw(process)
            self.at(self.now_s + 0.5, lambda process=process: self._reconnect(process))  # type: ignore[misc]
        if not self._bus_up:
            self._bus_is_back()
        for replica in self.replicas:
            if replica.alive and (replica.drained or replica.core._draining):
                self.kill(replica)  # What is drained is unloaded.
        self.start_replica(slots=64, kv_pages=64 * 1024)  # Room for all that waits.
        open_requests: list[RequestId] = []
        for _ in range(int(HEAL_BOUND_S * 4)):
            self.advance(0.25)
            open_requests = [
                request for request, client in self.clients.items() if client.outcome is None and not client.left
            ]
            if not open_requests:
                break
        lost = [request for request in open_requests if request not in self.unserved_acks]
        if lost:
            raise Broken(f"{lost} did not end within {HEAL_BOUND_S} s of the end of all trouble")
        for request in open_requests:
            self.leave(request)
        leftovers: list[str] = []
        for _ in range(int(CLEAN_BOUND_S * 4)):
            self.advance(0.25)
            leftovers = self._leftovers()
            if not leftovers:
                return
        raise Broken(f"{leftovers} are still there {CLEAN_BOUND_S} s after the last end")

    def _leftovers(self) -> list[str]:
        kept = [f"{p.name}: {p.core._live} {p.core._links.links}" for p in self.gateways if p.alive and not p.core.idle]
        kept += [f"{p.name}: {p.runs} {p.core._requests}" for p in self.replicas if p.alive and (p.runs or not p.core.idle)]
        return kept + [f"ticket {queued}" for queued in self._queue.values()]
