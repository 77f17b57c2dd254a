"""A policy's view of the pool, and what becomes of its decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from broker.core.placement import SchedulerCore
from broker.core.policy import (
    Action,
    Arrivals,
    Decision,
    PoolView,
    StartReplica,
    StopReplica,
)
from broker.core.scheduler_events import (
    IngressReported,
    LeadershipGained,
    RegistryLoaded,
    SchedulerCommand,
    SchedulerSettings,
    WorkerReported,
)
from profiles.budget import with_kv
from subjects.ids import DeviceId, IngressId, ReplicaId, WorkerId
from subjects.messages import (
    DeviceKind,
    DeviceReport,
    DrainReplica,
    EngineType,
    IngressTelemetry,
    Lane,
    LoadModel,
    ModelDemand,
    ModelRecord,
    ReplicaReport,
    ReplicaState,
    SlaClass,
    WorkerSnapshot,
)
from tests.core.scheduler_world import GIB, model_hash
from tests.core.test_placement import A, B, Bench, commands

W = WorkerId("w-0000000001")
GPUS = tuple(DeviceId(f"gpu{index}") for index in range(4))


@dataclass
class Scripted:
    """Decides what a test tells it, once."""

    name: str = "scripted"
    wakes_cold_models: bool = False
    next: Decision = field(default_factory=Decision)
    views: list[PoolView] = field(default_factory=list)

    def decide(self, now_s: float, view: PoolView) -> Decision:
        self.views.append(view)
        decision, self.next = self.next, Decision()
        return decision


class Pool(Bench):
    """A bench with a policy and one worker of four linked devices of 4 GiB each."""

    def __init__(
        self,
        *records: ModelRecord,
        wakes_cold_models: bool = False,
        settings: SchedulerSettings | None = None,
        linked: bool = True,
        runs: dict[str, int] | None = None,
    ) -> None:
        super().__init__(*records, settings=settings, leads=False)
        self.policy = Scripted(wakes_cold_models=wakes_cold_models)
        self.core = SchedulerCore(settings, self.policy)
        self.linked = linked
        self.runs = runs
        """Where devices need blocks: the largest free run of each that is named."""
        self.there: list[ReplicaReport] = []
        self.step(RegistryLoaded(records))
        self.step(LeadershipGained(7))
        self.tell()
        self.tick(0.6)

    def tell(self) -> list[SchedulerCommand]:
        """The worker says what it has."""
        self.sequence += 1
        devices = tuple(
            DeviceReport(
                device=gpu,
                kind=DeviceKind.GPU,
                memory_bytes=4 * GIB,
                reserved_bytes=sum(r.budget_bytes for r in self.there if gpu in (r.device, *r.peers)),
                device_type="h100-80gb",
                link="nv0" if self.linked else "",
                contiguous_free_bytes=self.runs.get(gpu) if self.runs is not None else None,
            )
            for gpu in GPUS
        )
        snapshot = WorkerSnapshot(
            worker=W,
            sequence=self.sequence,
            epoch_seen=0,
            engines=(EngineType.SIMULATED,),
            devices=devices,
            replicas=tuple(self.there),
        )
        return self.step(WorkerReported(snapshot))

    def has(
        self,
        name: str,
        gpu: int,
        *,
        state: ReplicaState = ReplicaState.READY,
        gib: float = 1.0,
        replica: str = "",
        peers: tuple[DeviceId, ...] = (),
        kv_bytes: int = 0,
    ) -> ReplicaId:
        """Lists one more replica."""
        found = ReplicaReport(
            replica=ReplicaId(replica or f"{name}-{gpu}-00000000aa"),
            model_hash=model_hash(name),
            device=GPUS[gpu],
            state=state,
            budget_bytes=int(gib * GIB),
            slots=8,
            peers=peers,
            kv_bytes=kv_bytes,
        )
        self.there.append(found)
        return found.replica

    def decide(self, *actions: Action, **more: object) -> list[SchedulerCommand]:
        """The policy's decision at its next look."""
        self.policy.next = Decision(actions, **more)  # type: ignore[arg-type]
        return commands(self.tick(0.2))  # type: ignore[return-value]

    @property
    def view(self) -> PoolView:
        return self.policy.views[-1]


def start(name: str, *gpus: int, **more: object) -> StartReplica:
    return StartReplica(model_hash(name), tuple((W, GPUS[gpu]) for gpu in gpus), "because", **more)  # type: ignore[arg-type]


def test_a_policy_sees_the_pool_and_its_flow() -> None:
    """Replicas, devices and demand are as reported; what arrived is counted once, over all gateways (SCH-4)."""
    pool = Pool(A, B)
    ready = pool.has("a", 1, kv_bytes=77)
    pool.has("b", 2, state=ReplicaState.LOADING)
    pool.tell()
    for ingress, sequence in (("gw-1", 1), ("gw-1", 1), ("gw-2", 1)):
        row = ModelDemand(
            model_hash=A.model_hash,
            sla_class=SlaClass.SILVER,
            lane=Lane.SMALL,
            arrived=3,
            finished=2,
            within_slo=1,
            waiting=1,
            running=4,
            oldest_wait_s=0.5,
            waiting_input_tokens=100,
            arrived_lengths=(1, 2, 0),
            arrived_input_tokens=(10, 2000, 0),
            arrived_output_tokens=(5, 6, 0),
        )
        pool.step(IngressReported(IngressTelemetry(ingress=IngressId(ingress), sequence=sequence, demand=(row,))))
    pool.tick(0.2)
    model = pool.view.models[A.model_hash]
    assert model.arrivals == Arrivals((2, 4, 0), (20, 4000, 0), (10, 12, 0))
    assert (model.finished, model.within_slo, model.waiting, model.waiting_input_tokens, model.running) == (4, 2, 2, 200, 8)
    assert [(view.replica, view.state, view.devices, view.kv_bytes) for view in model.replicas] == [
        (ready, ReplicaState.READY, ((W, GPUS[1]),), 77)
    ]
    assert [view.state for view in pool.view.models[B.model_hash].replicas] == [ReplicaState.LOADING]
    assert list(pool.view.models) == sorted(pool.view.models) and list(pool.view.devices) == sorted(pool.view.devices)
    device = pool.view.devices[(W, GPUS[2])]
    assert (device.free_planned_bytes, device.largest_free_bytes, device.loads_coming, device.link) == (
        3 * GIB,
        3 * GIB,
        1,
        "nv0",
    )
    assert pool.view.models_per_device_max == 2
    pool.tick(0.2)
    assert pool.view.models[A.model_hash].arrivals == Arrivals()


def test_a_policy_is_asked_each_200_ms_and_at_once_for_a_cold_model() -> None:
    """Two ticks make a look; a model without replicas that starts to wait makes one at once (SCH-4)."""
    pool = Pool(A, B)
    looks = len(pool.policy.views)
    for _ in range(10):
        pool.tick(0.1)
    assert len(pool.policy.views) - looks == 5
    pool.demand(a=0.1)
    assert len(pool.policy.views) - looks == 6
    pool.demand(a=0.2)
    assert len(pool.policy.views) - looks == 6


def test_a_started_replica_gets_the_kv_that_was_decided() -> None:
    """The load carries the replaced budget, and its room is promised at once."""
    pool = Pool(A)
    kv_bytes = GIB
    (load,) = pool.decide(start("a", 2, kv_bytes=kv_bytes))
    assert isinstance(load, LoadModel)
    assert (load.device, load.peers, load.record) == (GPUS[2], (), with_kv(A, kv_bytes))
    assert load.record.budget_bytes == A.budget_bytes + kv_bytes - A.kv_bytes
    pool.tick(0.2)
    (view,) = pool.view.models[A.model_hash].replicas
    assert (view.state, view.kv_bytes, view.budget_bytes) == (ReplicaState.LOADING, kv_bytes, load.record.budget_bytes)
    assert pool.view.devices[(W, GPUS[2])].loads_coming == 1
    assert pool.view.devices[(W, GPUS[2])].free_planned_bytes == 4 * GIB - load.record.budget_bytes


def test_an_interrupted_replica_does_not_finish_its_requests() -> None:
    """A stop drains within its bound; an interruption has a bound of nothing (SCH-9)."""
    pool = Pool(A, B)
    a, b = pool.has("a", 0), pool.has("b", 1)
    pool.tell()
    stops = pool.decide(StopReplica(a, "because"), StopReplica(b, "because", interrupt=True))
    assert [(stop.replica, stop.timeout_s) for stop in stops if isinstance(stop, DrainReplica)] == [(a, 30.0), (b, 0.0)]
    assert pool.core.actions.dropped == ()
    pool.tick(0.2)
    assert (pool.view.models[A.model_hash].leaving, pool.view.models[A.model_hash].replicas) == (1, ())
