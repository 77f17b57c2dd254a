"""The deciding side of the simulated pool: the scheduler's core with the policy under test, an agent core per node.

Commands, answers, events and snapshots take ``bus_s`` each way. A spawned replica is ready when its load is over: after the
ladder's warm time where its node's host memory holds the weights, else after the cold time over the node's link, which its
loads share. Drains end with the last request or at their bound. Nothing dies here, so beats are left out and the scheduler
takes nobody's silence amiss.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec

from broker.core.plan.policy import Policy
from broker.core.pool import events as ev
from broker.core.scheduler import SchedulerCore
from ops.simulator.link import NodeLink
from ops.simulator.metrics import Meter
from ops.simulator.replicas import SimReplica
from ops.simulator.types import BLOCK_TOKENS
from ops.simulator.world import World
from subjects import messages as m
from subjects.ids import DeviceId, IngressId, OperationId, ReplicaId, WorkerId, base_name
from workers import control_messages as c
from workers.core import agent_events as agents
from workers.core.agent import AgentCore
from workers.engines.base import EngineInfo

TAIL_TICK_S = 1.0
"""Cadence of telemetry and decisions once the window is over: nothing arrives then, and device time counts no more."""
UNLOAD_S = 0.1
"""From the order to end a drained replica to its memory's being free."""
NEVER_S = 1e9
QUIET = ev.SchedulerSettings(
    suspect_s=NEVER_S,
    dead_s=NEVER_S,
    ingress_silent_s=NEVER_S,
    load_s_max=3600.0,
    listen_s=0.0,
    listen_s_max=0.0,
    interrupts=True,
    outlives_policy=False,
)
"""Of a pool where nobody falls silent, a load may take as long as a ladder says, and an interrupted answer goes on elsewhere
(REL-2: the cores and the engine can; the gateway's switch for it is still off by default)."""


class _Node:
    """A worker: its agent, its host memory, its link."""

    def __init__(self, worker: WorkerId, agent: AgentCore, first_device: int, link: NodeLink, host_bytes: int) -> None:
        self.worker = worker
        self.agent = agent
        self.first_device = first_device
        self.link = link
        self._host_bytes = host_bytes
        self._kept: OrderedDict[int, int] = OrderedDict()
        """Bytes by model whose weights its host memory holds, the least recently used first."""
        self.loading: dict[ReplicaId, Callable[[], None]] = {}
        """What gives a load up."""
        self.told: dict[ReplicaId, tuple[int, int, float]] = {}
        """Counters as last told to the agent."""

    def holds(self, model: int) -> bool:
        """Whether its host memory has the weights; they count as used now."""
        if model not in self._kept:
            return False
        self._kept.move_to_end(model)
        return True

    def keep(self, model: int, weights_bytes: int) -> None:
        """Keeps weights, in place of those used longest ago; not what is larger than all of the memory."""
        if weights_bytes > self._host_bytes:
            return
        self._kept[model] = weights_bytes
        self._kept.move_to_end(model)
        while sum(self._kept.values()) > self._host_bytes:
            self._kept.popitem(last=False)


class Control:
    """Runs the cores on a world."""

    def __init__(self, world: World, policy: Policy, meter: Meter) -> None:
        self._world = world
        self._meter = meter
        workload, options = world.workload, world.options
        pool = workload.pool
        self._ladder = workload.ladder
        self._always_cold = bool(getattr(policy, "cold_loads", False))
        settings = options.settings or QUIET
        if settings.models_per_device_max is None:
            settings = msgspec.structs.replace(settings, models_per_device_max=pool.models_per_device_max)
        self.core = SchedulerCore(settings, policy)
        self._incarnations = 0
        self._telemetries = 0
        self._began_s = 0.0
        self._ticks = 0
        self._sent_s: dict[OperationId, float] = {}
        self._node_of: dict[ReplicaId, _Node] = {}
        self._nodes: dict[WorkerId, _Node] = {}
        for first in range(0, pool.devices, pool.devices_per_node):
            worker = WorkerId(f"node-{first // pool.devices_per_node:03d}")
            devices = tuple(
                agents.Device(
                    device=DeviceId(f"gpu{n}"),
                    kind=m.DeviceKind.GPU,
                    name=pool.device_type,
                    memory_bytes=pool.device_bytes,
                    device_type=pool.device_type,
                    link="nvlink",
                )
                for n in range(min(pool.devices_per_node, pool.devices - first))
            )
            agent = AgentCore(
                agents.AgentSettings(
                    worker=worker,
                    host=str(worker),
                    devices=devices,
                    engines=(m.EngineType.SIMULATED,),
                    resizing=(m.EngineType.SIMULATED,),
                )
            )
            node = self._nodes[worker] = _Node(worker, agent, first, NodeLink(world), pool.host_bytes)
            if self._ladder.all_warm:
                for number, model in reversed(list(enumerate(workload.models))):
                    node.keep(number, model.weights_bytes)
        world.when_starved = lambda model: self._tell_demand()
        world.when_drained = self._drained

    # ------------------------------------------------------------------------------------------------------------- clock

    def start(self) -> None:
        """The agents report, then the scheduler takes the lead and decides for the first time."""
        for node in self._nodes.values():
            self._agent(node, agents.Ticked())
        self._after(self._lead)

    def _lead(self) -> None:
        self._began_s = self._world.now_s
        self._scheduler(ev.BusRoundTripMade())
        self._scheduler(ev.RegistryLoaded(tuple(self._world.records)))
        self._scheduler(ev.LeadershipGained(1))
        self._tick()

    def _tick(self) -> None:
        world = self._world
        self._ticks += 1
        now_s = world.now_s
        world.look_after_queues()
        for node in self._nodes.values():
            self._tell_load(node)
            if node.agent.next_wake_s <= now_s:
                self._agent(node, agents.Ticked())
        self._tell_demand()
        self._scheduler(ev.BusRoundTripMade())
        self._scheduler(ev.Ticked(unix_s=now_s))
        self._meter.sample(world)
        if now_s < self._meter.window.end_s:
            world.at(self._began_s + self._ticks * world.options.tick_s, self._tick)
        else:
            world.at(now_s + TAIL_TICK_S, self._tick)

    def _after(self, action: Callable[[], None]) -> None:
        self._world.at(self._world.now_s + self._world.options.bus_s, action)

    # ---------------------------------------------------------------------------------------------------------- scheduler

    def _tell_demand(self) -> None:
        """A gateway's telemetry: on every tick, and at once when a model without replicas starts to wait."""
        self._telemetries += 1
        demand = self._world.ledger.take(self._world.now_s)
        telemetry = m.IngressTelemetry(ingress=IngressId("gateway"), sequence=self._telemetries, demand=demand)
        self._scheduler(ev.IngressReported(telemetry))

    def _scheduler(self, event: ev.SchedulerEvent) -> None:
        self._obey(self.core.step(self._world.now_s, event))

    def _obey(self, commands: Sequence[ev.SchedulerCommand]) -> None:
        for command in commands:
            match command:
                case ev.SendCommand():
                    self._send(command.worker, command.command)
                case ev.PublishDigest():
                    self._take_digest(command.digest)
                case ev.RaiseAlert():
                    self._meter.alerts += 1
                case ev.AppendJournal() | ev.KeepCosts():
                    pass  # Nobody leads after this scheduler.
                case ev.Resign():
                    raise AssertionError(command.reason)
                case _:
                    assert_never(command)

    def _send(self, worker: WorkerId, command: m.WorkerCommand) -> None:
        now_s = self._world.now_s
        decided_s = now_s
        if isinstance(command, m.LoadModel):
            transaction = self.core.transactions.loading(command.replica_name)
            if transaction is not None and not transaction.victims:
                decided_s = transaction.begun_s
        self._sent_s[command.operation] = decided_s
        self._incarnations += 1
        event = agents.CommandReceived(
            token=str(command.operation), command=command, incarnation=f"{self._incarnations:08x}"
        )
        self._after(lambda: self._agent(self._nodes[worker], event))

    def _take_digest(self, digest: m.PoolDigest) -> None:
        world = self._world
        for row in digest.replicas:
            replica = world.replicas.get(row.replica)
            if replica is not None and replica.weight != row.weight:
                world.set_weight(replica, row.weight)
        for model in digest.models:
            if model.class_weights:
                world.queues[world.model_of[model.deployment]].set_weights(model.class_weights)

    # ------------------------------------------------------------------------------------------------------------- agents

    def _agent(self, node: _Node, event: agents.AgentEvent) -> None:
        for command in node.agent.step(self._world.now_s, event):
            match command:
                case agents.SpawnReplica():
                    self._effect(event)
                    self._spawn(node, command)
                case agents.SendControl():
                    self._effect(event)
                    self._control(node, command.replica, command.message)
                case agents.KillReplica():
                    self._exit(node, command.replica, -command.signal)
                case agents.ReplyCommand():
                    reply = ev.CommandAnswered(command.reply)
                    self._after(lambda reply=reply: self._scheduler(reply))  # type: ignore[misc]
                case agents.PublishEvent():
                    seen = ev.OperationSeen(command.event)
                    self._after(lambda seen=seen: self._scheduler(seen))  # type: ignore[misc]
                case agents.PublishSnapshot():
                    report = ev.WorkerReported(command.snapshot)
                    self._after(lambda report=report: self._scheduler(report))  # type: ignore[misc]
                case agents.ExitAgent() | agents.AskKv():
                    raise AssertionError("no agent is told to end, and none has a KV node")
                case _:
                    assert_never(command)

    def _effect(self, event: agents.AgentEvent) -> None:
        """What was decided begins to happen."""
        if isinstance(event, agents.CommandReceived):
            decided_s = self._sent_s.pop(event.command.operation, None)
            if decided_s is not None:
                self._meter.effect(decided_s, self._world.now_s)

    def _tell_load(self, node: _Node) -> None:
        """Its replicas' counters, where they changed."""
        now_s = self._world.now_s
        for replica_id, told in list(node.told.items()):
            replica = self._world.replicas[replica_id]
            engine = replica.engine
            counters = (replica.held, replica.pages_free, engine.work_by_s(now_s))
            if counters == told:
                continue
            node.told[replica_id] = counters
            message = c.Load(
                running=replica.held,
                waiting=0,
                kv_pages_free=max(0, counters[1]),
                idle_s=0.0 if replica.held else now_s - replica.last_used_s,
                busy_s=counters[2],
                preemptions=engine.preempted,
                step_s=engine.step_s(),
            )
            self._agent(node, agents.ControlReceived(replica_id, message))

    def _spawn(self, node: _Node, command: agents.SpawnReplica) -> None:
        world = self._world
        record = command.record
        model = world.model_of[record.deployment]
        devices = [node.first_device + int(d.removeprefix("gpu")) for d in (command.device, *command.peers)]
        replica = world.spawn(command.replica, model, devices, record.kv_bytes)
        self._node_of[command.replica] = node
        self._meter.load_began(world.now_s)
        self._agent(node, agents.ReplicaSpawned(command.replica, replica.number))
        self._agent(node, agents.ControlReceived(command.replica, c.Progress(state=m.ReplicaState.WARMING)))

        def loaded() -> None:
            if node.loading.pop(command.replica, None) is not None:
                self._ready(node, replica)

        if not self._always_cold and not node.holds(model):
            node.loading[command.replica] = node.link.load(self._ladder.cold_s, loaded)
        else:
            alone_s = self._ladder.cold_s if self._always_cold else self._ladder.warm_s
            node.loading[command.replica] = lambda: None
            world.at(world.now_s + alone_s, loaded)

    def _ready(self, node: _Node, replica: SimReplica) -> None:
        world = self._world
        spec = world.models[replica.model]
        node.keep(replica.model, spec.weights_bytes)
        info = EngineInfo(
            slots=replica.slots,
            kv_pages=replica.kv_pages,
            block_size=BLOCK_TOKENS,
            max_context_len=world.records[replica.model].max_context_len,
            gives_token_ids=True,
            continues=True,
            resizes_kv=True,
        )
        transaction = self.core.transactions.loading(base_name(replica.replica))
        if transaction is not None:
            self._meter.moved(transaction.begun_s, world.now_s)
        self._agent(node, agents.ControlReceived(replica.replica, c.Ready(info=info)))
        node.told[replica.replica] = (0, replica.kv_pages, 0.0)
        world.make_ready(replica)

    def _control(self, node: _Node, replica_id: ReplicaId, message: c.ToReplica) -> None:
        world = self._world
        replica = world.replicas.get(replica_id)
        if replica is None:
            return
        match message:
            case c.Ping():
                node.agent.step(world.now_s, agents.ControlReceived(replica_id, c.Pong(number=message.number)))
            case c.Drain():
                world.drain(replica, message.timeout_s)
            case c.Concurrency():
                world.set_slots(replica, message.slots)
            case c.Stop():
                world.at(world.now_s + UNLOAD_S, lambda: self._exit(node, replica_id, 0))
            case c.Resize():
                self._resize(node, replica, message)
            case c.Start() | c.Sleep() | c.Wake() | c.EmptyPrefixes():
                raise AssertionError("not sent: this engine does not say that it sleeps, and nobody evicts its KV")
            case _:
                assert_never(message)

    def _resize(self, node: _Node, replica: SimReplica, message: c.Resize) -> None:
        """Refused while pages that would go are in use, as a real engine would."""
        pages = self._world.pages_of(replica, message.kv_bytes)
        used = replica.engine.kv_pages - replica.engine.kv_pages_free
        if pages < used:
            changed = c.Changed(number=message.number, failure=f"{used} pages are in use, {pages} would stay")
        else:
            self._world.resize(replica, message.kv_bytes)
            changed = c.Changed(number=message.number, kv_pages=pages)
        self._agent(node, agents.ControlReceived(replica.replica, changed))

    def _drained(self, replica: SimReplica) -> None:
        replica.draining = False
        node = self._node_of[replica.replica]
        self._agent(node, agents.ControlReceived(replica.replica, c.Drained()))

    def _exit(self, node: _Node, replica_id: ReplicaId, code: int) -> None:
        replica = self._world.replicas.get(replica_id)
        if replica is None:
            return
        give_up = node.loading.pop(replica_id, None)
        if give_up is not None:
            give_up()
        node.told.pop(replica_id, None)
        self._node_of.pop(replica_id)
        self._world.end(replica)
        self._agent(node, agents.ProcessExited(replica_id, code))
