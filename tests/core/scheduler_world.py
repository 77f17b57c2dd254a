"""A pool on a virtual clock for scheduler tests: real agent cores, replicas that need time, gateways that count requests.

Commands of the scheduler reach agents after a seeded delay and agents' events come back after another; either can be lost.
Two rules are checked at every instant: the budgets of all existing processes fit their device, and loads on one device are
serial.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from broker.core.plan.policy import Policy
from broker.core.pool.events import (
    BeatSeen,
    BusRoundTripMade,
    CommandAnswered,
    CommandUnanswered,
    IngressReported,
    LeadershipGained,
    OperationSeen,
    PublishDigest,
    RaiseAlert,
    RegistryLoaded,
    Resign,
    SchedulerEvent,
    SchedulerSettings,
    SendCommand,
    Ticked,
    WorkerReported,
)
from broker.core.scheduler import SchedulerCore
from profiles.budget import with_kv
from subjects.ids import DeploymentKey, DeviceId, IngressId, ModelHash, OperationId, ReplicaId, WorkerId
from subjects.messages import (
    Alert,
    CommandOutcome,
    CommandReply,
    DeviceKind,
    EngineType,
    EvictKv,
    IngressTelemetry,
    KvReport,
    Lane,
    LoadModel,
    MigrateKv,
    ModelDemand,
    ModelRecord,
    PoolDigest,
    ReplicaState,
    SlaClass,
    UnloadReplica,
)
from workers.control_messages import (
    Changed,
    Drain,
    Drained,
    Failed,
    Load,
    Ping,
    Pong,
    Progress,
    Ready,
    Resize,
    Stop,
    ToAgent,
)
from workers.core.agent import AgentCore
from workers.core.agent_events import (
    AgentCommand,
    AgentEvent,
    AgentSettings,
    AskKv,
    CommandReceived,
    ControlReceived,
    Device,
    ExitAgent,
    KillReplica,
    KvAnswered,
    KvReported,
    ProcessExited,
    PublishEvent,
    PublishSnapshot,
    ReplicaSpawned,
    ReplyCommand,
    SendControl,
    SpawnReplica,
)
from workers.core.agent_events import Ticked as AgentTicked
from workers.engines.base import EngineInfo

GIB = 2**30
UNIX_S = 1_900_000_000.0
SLOTS = 8


def record(name: str, gib: float = 1.0, **changes: object) -> ModelRecord:
    """A model of ``gib`` GiB on each of its devices, whose hash comes from its name."""
    gpus = changes.get("gpus", 1)
    assert isinstance(gpus, int)
    fields: dict[str, object] = {
        "name": name,
        "deployment": deployment(name),
        "model_hash": model_hash(name),
        "weights_hash": "0" * 64,
        "engine_type": EngineType.SIMULATED,
        "source": "",
        "weights_bytes": int(gib * GIB * 3 / 4) * gpus,
        "kv_bytes_per_token": 1024,
        "kv_bytes": int(gib * GIB / 8) * gpus,
        "overhead_bytes": int(gib * GIB / 8),
        "budget_bytes": int(gib * GIB),
        "max_context_len": 1024,
    }
    return ModelRecord(**(fields | changes))  # type: ignore[arg-type]


def model_hash(name: str) -> ModelHash:
    """The hash of the files of ``name``: never its deployment."""
    return ModelHash(name.encode().hex().ljust(64, "f")[:64])


def deployment(name: str) -> DeploymentKey:
    """64 hex digits that name a model in tests."""
    return DeploymentKey(name.encode().hex().ljust(64, "0")[:64])


@dataclass(slots=True)
class Request:
    """A request at the one gateway of the world."""

    model: DeploymentKey
    arrived_s: float
    service_s: float
    started_s: float | None = None
    ended_s: float | None = None
    refusal: str = ""
    replica: ReplicaId | None = None
    lost: int = 0


@dataclass(slots=True)
class SimReplica:
    """A replica's process."""

    replica: ReplicaId
    record: ModelRecord
    devices: tuple[DeviceId, ...]
    loading: bool = True
    open: bool = False
    draining: bool = False
    running: list[Request] = field(default_factory=list)


class SimAgent:
    """A real agent core with simulated processes behind it."""

    def __init__(
        self, world: World, name: str, devices: dict[str, float], engines: tuple[EngineType, ...], *, kv: bool = False
    ) -> None:
        self.world = world
        self.kv_asked: list[EvictKv | MigrateKv] = []
        """What its KV node was asked for."""
        self.kv_s: float | None = 0.2
        """How long the node takes to do it; None: it never answers."""
        self.worker = WorkerId(f"{name}-{world.draw():010x}")
        self.alive = True
        self.deaf = False
        """Whether commands get lost on their way here."""
        self.frozen_until_s = 0.0
        self.core = AgentCore(
            AgentSettings(
                worker=self.worker,
                host=name,
                devices=tuple(
                    Device(DeviceId(device), DeviceKind.CPU, device, int(gib * GIB), link="board")
                    for device, gib in devices.items()
                ),
                engines=engines,
                kv=kv,
            )
        )
        self.capacity = {DeviceId(device): int(gib * GIB) for device, gib in devices.items()}
        self.replicas: dict[ReplicaId, SimReplica] = {}
        self._beats = 0
        self._replies: dict[str, Callable[[CommandReply], None]] = {}
        self._tick()
        self._beat()
        if kv:
            self.step(KvReported(KvReport(running=True)))

    def _beat(self) -> None:
        if not self.alive:
            return
        if self.world.now_s >= self.frozen_until_s:
            self._beats += 1
            self.world.send(BeatSeen(self.worker, self.core.epoch_seen))
        self.world.later(0.1, self._beat)

    def _tick(self) -> None:
        if not self.alive:
            return
        if self.world.now_s >= self.frozen_until_s:
            self.step(AgentTicked())
        self.world.later(0.05, self._tick)

    def step(self, event: AgentEvent) -> None:
        if not self.alive:
            return
        if self.world.now_s < self.frozen_until_s:
            self.world.later(self.frozen_until_s - self.world.now_s + 0.001, lambda: self.step(event))
            return
        for command in self.core.step(self.world.now_s, event):
            self._do(command)
        self._check()

    def _check(self) -> None:
        for device, capacity in self.capacity.items():
            there = [replica for replica in self.replicas.values() if device in replica.devices]
            assert sum(replica.record.budget_bytes for replica in there) <= capacity, "budgets over capacity"
            assert self.core.reserved_bytes(device) <= capacity
            assert sum(replica.loading for replica in there) <= 1, "two loads at once on one device"

    def command(self, event: SendCommand, answer: Callable[[CommandReply], None]) -> None:
        token = f"{event.command.operation}/{self.world.draw()}"
        self._replies[token] = answer
        self.step(CommandReceived(token, event.command, f"{self.world.draw():010x}"))

    def kill(self) -> None:
        """The agent dies, and its replicas with it."""
        self.alive = False
        for replica in list(self.replicas.values()):
            self._exit(replica, -9)

    def freeze(self, seconds: float) -> None:
        """The agent's process stands still; what is sent to it waits."""
        self.frozen_until_s = self.world.now_s + seconds

    def kill_replica(self, replica: SimReplica) -> None:
        self._exit(replica, -9)

    def _do(self, command: AgentCommand) -> None:
        world = self.world
        match command:
            case SpawnReplica():
                replica = SimReplica(command.replica, command.record, (command.device, *command.peers))
                self.replicas[command.replica] = replica
                world.loads.append((world.now_s, command.record.name, self.worker))
                world.later(0.05, lambda: self._spawned(replica))
            case SendControl():
                self._control(self.replicas.get(command.replica), command.message)
            case KillReplica():
                found = self.replicas.get(command.replica)
                if found is not None:
                    world.later(0.02, lambda: self._exit(found, -9))
            case AskKv():
                self.kv_asked.append(command.command)
                if self.kv_s is not None:
                    answer = KvAnswered(command.command.operation, detail="412 blocks")
                    world.later(self.kv_s, lambda: self.step(answer))
            case ReplyCommand():
                self._replies.pop(command.token)(command.reply)
            case PublishEvent():
                if not world.lose():
                    world.send(OperationSeen(command.event))
            case PublishSnapshot():
                if not world.lose():
                    world.send(WorkerReported(command.snapshot))
            case ExitAgent():
                self.alive = False

    def _spawned(self, replica: SimReplica) -> None:
        self.step(ReplicaSpawned(replica.replica, 1))
        load_s = self.world.load_s(replica.record)
        if replica.record.name in self.world.broken:
            self.world.later(load_s, lambda: self._break(replica))
        else:
            self.world.later(load_s / 2, lambda: self._say(replica, Progress(state=ReplicaState.WARMING)))
            self.world.later(load_s, lambda: self._ready(replica))

    def _break(self, replica: SimReplica) -> None:
        self._say(replica, Failed(detail="RuntimeError: weights are damaged"))
        self.world.later(0.01, lambda: self._exit(replica, 1))

    def _ready(self, replica: SimReplica) -> None:
        if self.replicas.get(replica.replica) is replica:
            replica.loading = False
            replica.open = True
            info = EngineInfo(SLOTS, 1024, 32, 1024, True, True, resizes_kv=True)
            self._say(replica, Ready(info=info))
            self.world.dispatch()

    def _say(self, replica: SimReplica, message: ToAgent) -> None:
        if self.replicas.get(replica.replica) is replica:
            self.step(ControlReceived(replica.replica, message))

    def _control(self, replica: SimReplica | None, message: object) -> None:
        if replica is None:
            return
        match message:
            case Ping():
                self.world.later(0.001, lambda: self._say(replica, Pong(number=message.number)))
            case Drain():
                replica.open = False
                replica.draining = True
                self.world.later(0.001, lambda: self.drained(replica))
                self.world.later(message.timeout_s, lambda: self._give_back(replica))
            case Resize():
                replica.record = with_kv(replica.record, message.kv_bytes)
                changed = Changed(number=message.number, kv_pages=1024)
                self.world.later(0.01, lambda: self._say(replica, changed))
            case Stop():
                self.world.later(0.05, lambda: self._exit(replica, 0))
            case _:
                pass

    def _give_back(self, replica: SimReplica) -> None:
        if replica.draining and replica.replica in self.replicas:
            self.world.lose_requests(replica)
            self.drained(replica)

    def drained(self, replica: SimReplica) -> None:
        if replica.draining and not replica.running and not self.world.endless_drain:
            replica.draining = False
            self._say(replica, Drained())

    def counted(self, replica: SimReplica) -> None:
        """Its number of running requests changed."""
        load = Load(running=len(replica.running), waiting=0, kv_pages_free=0)
        self.world.later(0.05, lambda: self._say(replica, load))
        self.drained(replica)

    def _exit(self, replica: SimReplica, code: int) -> None:
        if self.replicas.pop(replica.replica, None) is None:
            return
        self.world.lose_requests(replica)
        self.step(ProcessExited(replica.replica, code))


class World:
    """One scheduler, some agents, one gateway, a heap of events."""

    def __init__(
        self,
        *records: ModelRecord,
        seed: int = 0,
        settings: SchedulerSettings | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.now_s = 100.0
        self.random = random.Random(seed)
        self.core = SchedulerCore(settings, policy)
        self.agents: list[SimAgent] = []
        self.requests: list[Request] = []
        self.loads: list[tuple[float, str, WorkerId]] = []
        """Every process that was started: when, of which model, where."""
        self.commands: list[tuple[float, SendCommand]] = []
        self.alerts: list[Alert] = []
        self.digest: PoolDigest | None = None
        self.resigned = ""
        self.broken: set[str] = set()
        self.load_times: dict[str, float] = {}
        self.loss = 0.0
        self.endless_drain = False
        self.refuses = True
        """Whether the gateway obeys the digest's refusals."""
        self.paused_until_s = 0.0
        self.bus_paused_until_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._sequence = 0
        self._inbox: list[SchedulerEvent] = []
        self.step(RegistryLoaded(records))
        self.step(LeadershipGained(1))
        self._tick()
        self._telemetry()

    # ---- time

    def draw(self) -> int:
        return self.random.getrandbits(40)

    def lose(self) -> bool:
        return self.random.random() < self.loss

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._count, action))

    def run(self, seconds: float) -> None:
        """Lets time pass."""
        end_s = self.now_s + seconds
        while self._heap and self._heap[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
        self.now_s = end_s

    def run_until(self, condition: Callable[[], bool], *, bound_s: float) -> float:
        """Lets time pass until ``condition`` holds and returns how long that took."""
        start_s = self.now_s
        while not condition():
            assert self.now_s - start_s < bound_s, f"not within {bound_s} s"
            self.run(0.02)
        return self.now_s - start_s

    def pause(self, seconds: float) -> None:
        """The scheduler's process stands still; what is sent to it waits."""
        self.paused_until_s = self.now_s + seconds

    # ---- the bus and the scheduler

    def send(self, event: SchedulerEvent) -> None:
        """Something is published for the scheduler."""
        delay_s = 0.001 + self.random.random() * 0.004
        if self.now_s >= self.bus_paused_until_s:
            self.later(delay_s, lambda: self.step(event))

    def step(self, event: SchedulerEvent) -> None:
        if self.now_s < self.paused_until_s:
            self._inbox.append(event)
            return
        inbox, self._inbox = self._inbox, []
        for one in [*inbox, event]:
            for command in self.core.step(self.now_s, one):
                match command:
                    case SendCommand():
                        self.commands.append((self.now_s, command))
                        self._deliver(command)
                    case PublishDigest():
                        self.digest = command.digest
                        self.later(0.001, self.dispatch)
                    case RaiseAlert():
                        self.alerts.append(command.alert)
                    case Resign():
                        self.resigned = command.reason

    def _deliver(self, command: SendCommand) -> None:
        operation = command.command.operation
        agent = next((agent for agent in self.agents if agent.worker == command.worker and agent.alive), None)
        if agent is None or agent.deaf or self.lose() or self.now_s < self.bus_paused_until_s:
            self.later(command.timeout_s if agent else 0.001, lambda: self.step(CommandUnanswered(operation)))
            return
        self.later(0.002, lambda: agent.command(command, self._answer(operation, command.timeout_s)))

    def _answer(self, operation: OperationId, timeout_s: float) -> Callable[[CommandReply], None]:
        def answer(reply: CommandReply) -> None:
            if self.lose():
                self.later(timeout_s, lambda: self.step(CommandUnanswered(operation)))
            else:
                assert not (reply.outcome is CommandOutcome.REFUSED and "bytes are free" in reply.detail), reply.detail
                self.later(0.002, lambda: self.step(CommandAnswered(reply)))

        return answer

    def _tick(self) -> None:
        if self.now_s >= self.paused_until_s:
            if self.now_s >= self.bus_paused_until_s:
                self.step(BusRoundTripMade())
            self.step(Ticked(UNIX_S + self.now_s))
        self.later(0.1, self._tick)

    # ---- gateway

    def ask(self, name: str, *, service_s: float = 0.5, delay_s: float = 0.0) -> Request:
        """A request arrives."""
        request = Request(deployment(name), self.now_s + delay_s, service_s)

        def arrive() -> None:
            self.requests.append(request)
            self.dispatch()
            if request.started_s is None and not request.refusal:
                self.send(self._report())

        self.later(delay_s, arrive)
        return request

    def cancel(self, request: Request) -> None:
        """The client leaves before it was served."""
        assert request.started_s is None
        request.ended_s = self.now_s
        request.refusal = "cancelled"

    def _telemetry(self) -> None:
        self.send(self._report())
        self.later(0.1, self._telemetry)

    def _report(self) -> IngressReported:
        demand: list[ModelDemand] = []
        for model in sorted({request.model for request in self.requests if request.ended_s is None}):
            live = [request for request in self.requests if request.model == model and request.ended_s is None]
            waits = [self.now_s - request.arrived_s for request in live if request.started_s is None]
            demand.append(
                ModelDemand(
                    deployment=model,
                    model_hash=ModelHash(model),
                    sla_class=SlaClass.SILVER,
                    lane=Lane.SMALL,
                    waiting=len(waits),
                    running=len(live) - len(waits),
                    oldest_wait_s=max(waits, default=0.0),
                )
            )
        self._sequence += 1
        return IngressReported(IngressTelemetry(ingress=IngressId("gw-1"), sequence=self._sequence, demand=tuple(demand)))

    def dispatch(self) -> None:
        """Replicas pull what waits; the digest's refusals are obeyed where nobody is ready."""
        open_replicas = [
            (agent, replica) for agent in self.agents if agent.alive for replica in agent.replicas.values() if replica.open
        ]
        refusals = {model.deployment: model.refusal for model in self.digest.models} if self.digest is not None else {}
        for request in self.requests:
            if request.ended_s is not None or request.started_s is not None:
                continue
            serving = [(a, r) for a, r in open_replicas if r.record.deployment == request.model]
            free = [(a, r) for a, r in serving if len(r.running) < SLOTS]
            if free:
                agent, replica = min(free, key=lambda entry: (len(entry[1].running), entry[1].replica))
                request.started_s = self.now_s
                request.replica = replica.replica
                replica.running.append(request)
                agent.counted(replica)
                self.later(request.service_s, self._finisher(agent, replica, request))
            elif not serving and self.refuses and refusals.get(request.model):
                request.refusal = refusals[request.model]
                request.ended_s = self.now_s

    def _finisher(self, agent: SimAgent, replica: SimReplica, request: Request) -> Callable[[], None]:
        def finish() -> None:
            if request in replica.running and agent.replicas.get(replica.replica) is replica:
                replica.running.remove(request)
                request.ended_s = self.now_s
                agent.counted(replica)
                self.dispatch()

        return finish

    def lose_requests(self, replica: SimReplica) -> None:
        """What ran there waits again."""
        for request in replica.running:
            request.started_s = None
            request.lost += 1
        replica.running.clear()
        self.later(0.01, self.dispatch)

    # ---- what tests ask

    def agent(
        self,
        name: str = "w",
        engines: tuple[EngineType, ...] = (EngineType.SIMULATED,),
        *,
        kv: bool = False,
        **devices: float,
    ) -> SimAgent:
        """A worker with devices of so many GiB, and with a KV node that answers if ``kv``."""
        return self.agent_of(name, devices or {"cpu0": 1.0}, engines, kv=kv)

    def agent_of(
        self,
        name: str,
        devices: dict[str, float],
        engines: tuple[EngineType, ...] = (EngineType.SIMULATED,),
        *,
        kv: bool = False,
    ) -> SimAgent:
        """The same for computed devices."""
        agent = SimAgent(self, name, devices, engines, kv=kv)
        self.agents.append(agent)
        return agent

    def load_s(self, model: ModelRecord) -> float:
        return self.load_times.get(model.name, 1.0)

    def loaded(self) -> list[str]:
        """Names of the models that serve now."""
        return sorted(
            replica.record.name
            for agent in self.agents
            if agent.alive
            for replica in agent.replicas.values()
            if replica.open
        )

    def load_names(self) -> list[str]:
        """Models in the order of their loads."""
        return [name for _, name, _ in self.loads]

    def load_commands(self) -> list[LoadModel]:
        return [command.command for _, command in self.commands if isinstance(command.command, LoadModel)]

    def unloads(self) -> list[UnloadReplica]:
        return [command.command for _, command in self.commands if isinstance(command.command, UnloadReplica)]

    def outlook(self, name: str) -> tuple[str, bool, int]:
        """Refusal, permanent, Retry-After of a model in the last digest."""
        assert self.digest is not None
        model = next(model for model in self.digest.models if model.name == name)
        return (model.refusal, model.permanent, model.retry_after_s)

    def all_ended(self) -> bool:
        return all(request.ended_s is not None for request in self.requests)
