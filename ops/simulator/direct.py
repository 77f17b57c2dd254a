"""For now: carries a policy's actions out on the world without the scheduler's and the agents' cores."""

from __future__ import annotations

from dataclasses import dataclass, field

from broker.core.catalogue import DeviceKey
from broker.core.policy import (
    Arrivals,
    DeviceView,
    ModelView,
    Policy,
    PoolView,
    ReplicaView,
    ResizeReplicaKv,
    SetReplicaConcurrency,
    StartReplica,
    StopReplica,
)
from ops.simulator.link import NodeLink
from ops.simulator.metrics import Meter
from ops.simulator.world import SimReplica, World
from subjects.ids import DeviceId, ModelHash, ReplicaId, WorkerId
from subjects.messages import DeviceKind, ReplicaState

DRAIN_S = 30.0


@dataclass(slots=True)
class _Coming:
    action: StartReplica
    devices: list[int]
    budget_bytes: int
    kv_bytes: int
    decided_s: float
    replica: ReplicaId
    waits_for: list[ReplicaId]
    spawned: SimReplica | None = None


@dataclass(slots=True)
class _Seen:
    requests: list[int] = field(default_factory=lambda: [0, 0, 0])
    inputs: list[int] = field(default_factory=lambda: [0, 0, 0])
    outputs: list[int] = field(default_factory=lambda: [0, 0, 0])
    finished: int = 0
    within_slo: int = 0


class Control:
    """See the module."""

    def __init__(self, world: World, policy: Policy, meter: Meter) -> None:
        self.world = world
        self.policy = policy
        self.meter = meter
        pool = world.workload.pool
        self.keys: list[DeviceKey] = [
            (WorkerId(f"node-{n // pool.devices_per_node:03d}"), DeviceId(f"gpu{n % pool.devices_per_node}"))
            for n in range(pool.devices)
        ]
        self.number_of = {key: n for n, key in enumerate(self.keys)}
        ladder = world.options.ladder or world.workload.ladder
        self.ladder = ladder
        nodes = -(-pool.devices // pool.devices_per_node)
        self.links = [NodeLink(world) for _ in range(nodes)]
        self.cold = bool(getattr(policy, "cold_loads", False)) or not ladder.all_warm
        self.coming: list[_Coming] = []
        self.leaving: set[ReplicaId] = set()
        self.budget: dict[ReplicaId, int] = {}
        self.used = [0] * pool.devices
        self.since: dict[ReplicaId, float] = {}
        self.loads_running = [0] * pool.devices
        self.seen: dict[ModelHash, _Seen] = {h: _Seen() for h in world.hashes}
        self.names = 0
        world.when_starved = lambda model: self.decide()
        world.when_drained = self.drained

    def start(self) -> None:
        self.tick()

    def tick(self) -> None:
        self.world.refuse_late()
        self.decide()
        self.meter.sample(self.world)
        self.world.at(self.world.now_s + self.world.options.tick_s, self.tick)

    def decide(self) -> None:
        world = self.world
        waiting: dict[ModelHash, list[float]] = {}
        for row in world.ledger.take(world.now_s):
            seen = self.seen[row.model_hash]
            for c in range(3):
                seen.requests[c] += row.arrived_lengths[c]
                seen.inputs[c] += row.arrived_input_tokens[c]
                seen.outputs[c] += row.arrived_output_tokens[c]
            seen.finished += row.finished
            seen.within_slo += row.within_slo
            wait = waiting.setdefault(row.model_hash, [0, 0, 0.0])
            wait[0] += row.waiting
            wait[1] += row.waiting_input_tokens
            wait[2] = max(wait[2], row.oldest_wait_s)
        decision = self.policy.decide(world.now_s, self.view(waiting))
        for replica, weight in decision.weights.items():
            if replica in world.replicas:
                world.set_weight(world.replicas[replica], weight)
        for action in decision.actions:
            match action:
                case StartReplica():
                    self.start_replica(action)
                case StopReplica():
                    if action.replica in world.replicas and action.replica not in self.leaving:
                        self.stop(action.replica, 0.0 if action.interrupt else DRAIN_S)
                case ResizeReplicaKv():
                    self.resize(action)
                case SetReplicaConcurrency():
                    if action.replica in world.replicas:
                        world.set_slots(world.replicas[action.replica], action.slots)
        self.advance()

    def view(self, waiting: dict[ModelHash, list[float]]) -> PoolView:
        world = self.world
        pool = world.workload.pool
        free = [pool.device_bytes - used for used in self.used]
        for coming in self.coming:
            if coming.spawned is None:
                for n in coming.devices:
                    free[n] -= coming.budget_bytes
        for name in sorted(self.leaving):
            for device in world.replicas[name].devices:
                free[device.number] += self.budget[name]
        models = {}
        for number, record in enumerate(world.records):
            rows = []
            for replica in sorted(world.replicas.values(), key=lambda r: r.replica):
                if replica.model != number or replica.replica in self.leaving:
                    continue
                rows.append(
                    ReplicaView(
                        replica=replica.replica,
                        model_hash=record.model_hash,
                        devices=tuple(self.keys[d.number] for d in replica.devices),
                        state=ReplicaState.READY if replica.ready else ReplicaState.LOADING,
                        since_s=self.since[replica.replica],
                        budget_bytes=self.budget[replica.replica],
                        kv_bytes=replica.kv_bytes,
                        running=replica.held,
                        slots=replica.slots,
                        kv_pages=replica.kv_pages,
                        kv_pages_free=max(0, replica.kv_pages - replica.pages_taken),
                        last_used_s=world.now_s if replica.held else replica.last_used_s,
                        stays=False,
                    )
                )
            rows += [
                ReplicaView(
                    replica=c.replica,
                    model_hash=record.model_hash,
                    devices=c.action.devices,
                    state=ReplicaState.LOADING,
                    since_s=c.decided_s,
                    budget_bytes=c.budget_bytes,
                    kv_bytes=c.kv_bytes,
                    running=0,
                    slots=0,
                    kv_pages=0,
                    kv_pages_free=0,
                    last_used_s=c.decided_s,
                    stays=False,
                )
                for c in self.coming
                if c.spawned is None and c.action.model_hash == record.model_hash
            ]
            seen = self.seen[record.model_hash]
            self.seen[record.model_hash] = _Seen()
            wait = waiting.get(record.model_hash, [0, 0, 0.0])
            models[record.model_hash] = ModelView(
                record=record,
                replicas=tuple(rows),
                leaving=sum(world.replicas[r].model == number for r in sorted(self.leaving)),
                waiting=int(wait[0]),
                waiting_input_tokens=int(wait[1]),
                running=world.running[number],
                oldest_wait_s=wait[2],
                arrivals=Arrivals(tuple(seen.requests), tuple(seen.inputs), tuple(seen.outputs)),  # type: ignore[arg-type]
                finished=seen.finished,
                within_slo=seen.within_slo,
                load_s=self.ladder.cold_s if self.cold else self.ladder.warm_s,
                may_load=True,
                may_act=True,
            )
        devices = {
            key: DeviceView(
                key=key,
                kind=DeviceKind.GPU,
                device_type=pool.device_type,
                link=key[0],
                memory_bytes=pool.device_bytes,
                free_planned_bytes=free[n],
                largest_free_bytes=free[n],
                loads_coming=sum(n in c.devices for c in self.coming),
                busy_s=world.devices[n].busy_until_s(world.now_s),
            )
            for n, key in enumerate(self.keys)
        }
        return PoolView(
            now_s=world.now_s,
            models=dict(sorted(models.items())),
            devices=devices,
            models_per_device_max=pool.models_per_device_max,
        )

    def start_replica(self, action: StartReplica) -> None:
        world = self.world
        model = world.model_of[action.model_hash]
        record = world.records[model]
        kv_bytes = record.kv_bytes if action.kv_bytes is None else action.kv_bytes
        budget = -(-(record.weights_bytes + kv_bytes) // record.gpus)
        devices = [self.number_of[key] for key in action.devices]
        leaving = self.leaving | set(action.victims)
        for n in devices:
            free = world.workload.pool.device_bytes - self.used[n]
            free -= sum(c.budget_bytes for c in self.coming if c.spawned is None and n in c.devices)
            free += sum(
                self.budget[r.replica]
                for r in world.replicas.values()
                if r.replica in leaving and world.devices[n] in r.devices
            )
            if free < budget:
                return
        self.names += 1
        name = ReplicaId(f"r{self.names:06d}")
        self.coming.append(_Coming(action, devices, budget, kv_bytes, world.now_s, name, list(action.victims)))
        for victim in action.victims:
            if victim in world.replicas and victim not in self.leaving:
                self.stop(victim, DRAIN_S)

    def stop(self, name: ReplicaId, bound_s: float) -> None:
        replica = self.world.replicas[name]
        if not replica.ready:
            return
        self.leaving.add(name)
        self.world.drain(replica, bound_s)

    def drained(self, replica: SimReplica) -> None:
        replica.draining = False
        self.world.at(self.world.now_s + self.world.options.unload_s, lambda: self.gone(replica))

    def gone(self, replica: SimReplica) -> None:
        self.world.end(replica)
        self.leaving.discard(replica.replica)
        for device in replica.devices:
            self.used[device.number] -= self.budget[replica.replica]
        self.advance()

    def resize(self, action: ResizeReplicaKv) -> None:
        replica = self.world.replicas.get(action.replica)
        if replica is None or not replica.ready:
            return
        record = self.world.records[replica.model]
        budget = -(-(record.weights_bytes + action.kv_bytes) // record.gpus)
        more = budget - self.budget[replica.replica]
        if any(self.used[d.number] + more > self.world.workload.pool.device_bytes for d in replica.devices):
            return
        for device in replica.devices:
            self.used[device.number] += more
        self.budget[replica.replica] = budget
        self.world.resize(replica, action.kv_bytes)

    def advance(self) -> None:
        world = self.world
        for coming in self.coming:
            if coming.spawned is not None or any(self.loads_running[n] for n in coming.devices):
                continue
            if any(self.used[n] + coming.budget_bytes > world.workload.pool.device_bytes for n in coming.devices):
                continue
            model = world.model_of[coming.action.model_hash]
            replica = coming.spawned = world.spawn(coming.replica, model, coming.devices, coming.kv_bytes)
            self.budget[replica.replica] = coming.budget_bytes
            self.since[replica.replica] = coming.decided_s
            for n in coming.devices:
                self.used[n] += coming.budget_bytes
                self.loads_running[n] += 1
            self.meter.load_began(world.now_s)
            node = coming.devices[0] // world.workload.pool.devices_per_node
            if self.cold:
                self.links[node].load(self.ladder.cold_s, lambda c=coming: self.loaded(c))  # type: ignore[misc]
            else:
                world.at(world.now_s + self.ladder.warm_s, lambda c=coming: self.loaded(c))  # type: ignore[misc]

    def loaded(self, coming: _Coming) -> None:
        self.coming.remove(coming)
        assert coming.spawned is not None
        for n in coming.devices:
            self.loads_running[n] -= 1
        self.since[coming.replica] = self.world.now_s
        self.meter.moved(coming.decided_s, self.world.now_s)
        self.world.make_ready(coming.spawned)
        self.advance()
