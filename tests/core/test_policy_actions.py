"""A policy's view of the pool, and what becomes of its decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from broker.core.plan.coordinator import Coordinator
from broker.core.plan.policy import (
    Action,
    Arrivals,
    Decision,
    ExpectedLoad,
    PoolView,
    ResizeReplicaKv,
    SetReplicaConcurrency,
    StartReplica,
    StopReplica,
)
from broker.core.pool.events import (
    AppendJournal,
    BusRoundTripMade,
    IngressReported,
    JournalRestored,
    LeadershipGained,
    ModelApplied,
    OperationSeen,
    RegistryLoaded,
    SchedulerCommand,
    SchedulerSettings,
    SendCommand,
    WorkerReported,
)
from broker.core.scheduler import SchedulerCore
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
    Mode,
    ModelDemand,
    ModelRecord,
    OperationEnded,
    ReplicaReport,
    ReplicaState,
    ResizeKv,
    SetConcurrency,
    SlaClass,
    StepSent,
    TransactionBegan,
    TransactionEnded,
    UnloadReplica,
    WorkerSnapshot,
)
from tests.core.scheduler_world import GIB, UNIX_S, deployment, model_hash, record
from tests.core.test_placement import A, B, Bench, commands
from tests.core.words import expect, lock, mode, said

W = WorkerId("w-0000000001")
GPUS = tuple(DeviceId(f"gpu{index}") for index in range(4))


@dataclass
class Scripted:
    """Decides what a test tells it, once."""

    name: str = "scripted"
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
        settings: SchedulerSettings | None = None,
        linked: bool = True,
        runs: dict[DeviceId, int] | None = None,
        memory_bytes: int = 4 * GIB,
        leads: bool = True,
    ) -> None:
        super().__init__(*records, settings=settings, leads=False)
        self.policy = Scripted()
        self.core = SchedulerCore(settings, self.policy)
        self.linked = linked
        self.runs = runs
        """Where devices need blocks: the largest free run of each that is named."""
        self.resizes = True
        """Whether engines can change their KV budget while they run."""
        self.memory_bytes = memory_bytes
        self.there: list[ReplicaReport] = []
        self.step(BusRoundTripMade())
        self.step(RegistryLoaded(records))
        if leads:
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
                memory_bytes=self.memory_bytes,
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
        continues: bool = True,
    ) -> ReplicaId:
        """Lists one more replica."""
        found = ReplicaReport(
            replica=ReplicaId(replica or f"{name}-{gpu}-00000000aa"),
            deployment=deployment(name),
            model_hash=model_hash(name),
            device=GPUS[gpu],
            state=state,
            budget_bytes=int(gib * GIB),
            slots=8,
            idle_s=100.0,
            state_s=100.0,
            peers=peers,
            kv_bytes=kv_bytes,
            resizes_kv=self.resizes,
            continues=continues,
        )
        self.there.append(found)
        return found.replica

    def decide(self, *actions: Action, **more: object) -> list[object]:
        """The policy's decision at its next look, and what agents are told."""
        self.policy.next = Decision(actions, **more)  # type: ignore[arg-type]
        return commands(self.tick(0.2))

    def end(self, command: object, *, failure: str = "", replica: str = "") -> list[object]:
        """Its agent ends a command; what agents are told then."""
        event = OperationEnded(
            worker=W,
            operation=command.operation,  # type: ignore[attr-defined]
            replica=ReplicaId(replica) if replica else None,
            failure=failure,
        )
        return commands(self.step(OperationSeen(event)))

    def gone(self, replica: ReplicaId) -> None:
        """Its agent does not list it any more."""
        self.there = [report for report in self.there if report.replica != replica]

    def dropped(self) -> list[str]:
        """Why actions of the last decision were not carried out."""
        return [why for _, why in self.core.actions.dropped]

    def advice(self) -> list[tuple[str, str]]:
        """Models and texts of what was only advised."""
        return [(entry.model, entry.reason) for entry in self.digest.timeline if entry.action == "advice"]

    @property
    def view(self) -> PoolView:
        return self.policy.views[-1]


def start(name: str, *gpus: int, **more: object) -> StartReplica:
    return StartReplica(deployment(name), tuple((W, GPUS[gpu]) for gpu in gpus), "because", **more)  # type: ignore[arg-type]


def test_a_policy_sees_the_pool_and_its_flow() -> None:
    """Replicas, devices and demand are as reported; what arrived is counted once, over all gateways (SCH-4)."""
    pool = Pool(A, B)
    ready = pool.has("a", 1, kv_bytes=77)
    pool.has("b", 2, state=ReplicaState.LOADING)
    pool.tell()
    for ingress, sequence in (("gw-1", 1), ("gw-1", 1), ("gw-2", 1)):
        row = ModelDemand(
            deployment=A.deployment,
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
    model = pool.view.models[A.deployment]
    assert model.arrivals == Arrivals((2, 4, 0), (20, 4000, 0), (10, 12, 0))
    assert (model.finished, model.within_slo, model.waiting, model.waiting_input_tokens, model.running) == (4, 2, 2, 200, 8)
    assert [(view.replica, view.state, view.devices, view.kv_bytes) for view in model.replicas] == [
        (ready, ReplicaState.READY, ((W, GPUS[1]),), 77)
    ]
    assert [view.state for view in pool.view.models[B.deployment].replicas] == [ReplicaState.LOADING]
    assert list(pool.view.models) == sorted(pool.view.models) and list(pool.view.devices) == sorted(pool.view.devices)
    device = pool.view.devices[(W, GPUS[2])]
    assert (device.free_planned_bytes, device.largest_free_bytes, device.loads_coming, device.link) == (
        3 * GIB,
        3 * GIB,
        1,
        "nv0",
    )
    assert pool.view.models_per_device_max >= 1000, "as many as memory holds"
    pool.tick(0.2)
    assert pool.view.models[A.deployment].arrivals == Arrivals()


def test_a_policy_hears_what_people_expect_and_the_time_of_day() -> None:
    """Events by the model's hash of the day, those of unknown models not (SCH-5); what engines tell comes along (SCH-13)."""
    pool = Pool(A, B)
    sale, launch = expect("sale", 10.0, 20.0, factor=2.0), expect("launch", 30.0, 40.0, "a", 3.0, 0.5)
    never = expect("never", 50.0, 50.0, "a", 3.0)  # It ends as it begins: nothing that this release wrote.
    pool.step(said(sale, launch, expect("other", 30.0, 40.0, "nobody"), never))
    pool.tick(0.3)
    view = pool.policy.views[-1]
    assert view.events == (
        ExpectedLoad("launch", 30.0, 40.0, A.deployment, 3.0, 0.5),
        ExpectedLoad("sale", 10.0, 20.0, None, 2.0),
    )
    assert abs(view.unix_offset_s - UNIX_S) < 1e-3
    again = msgspec.structs.replace(A, deployment=deployment("a2"), revision=A.revision + 1)
    pool.step(ModelApplied(again))
    pool.step(said(launch))
    pool.tick(0.3)
    assert pool.policy.views[-1].events == (ExpectedLoad("launch", 30.0, 40.0, again.deployment, 3.0, 0.5),)


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


def test_a_policy_that_fails_costs_its_decision_and_not_the_scheduler() -> None:
    """Arithmetic of one model overflows: people are told once, the policy is asked again, and nobody dies (SCH-4)."""
    pool = Pool(A, B)
    decide, failures = pool.policy.decide, iter([OverflowError("1e300"), ValueError("zip"), KeyError("x")])

    def failing(now_s: float, view: PoolView) -> Decision:
        error = next(failures, None)
        if error is not None:
            raise error
        return decide(now_s, view)

    pool.policy.decide = failing  # type: ignore[method-assign]
    looks = len(pool.policy.views)
    for _ in range(12):
        pool.tick(0.1)
    assert pool.alerts() == ["policy-failed"]
    assert len(pool.policy.views) - looks == 3


def test_a_started_replica_gets_the_kv_that_was_decided() -> None:
    """The load carries the replaced budget, and its room is promised at once."""
    pool = Pool(A)
    kv_bytes = GIB
    (load,) = pool.decide(start("a", 2, kv_bytes=kv_bytes))
    assert isinstance(load, LoadModel)
    assert (load.device, load.peers, load.record) == (GPUS[2], (), with_kv(A, kv_bytes))
    assert load.record.budget_bytes == A.budget_bytes + kv_bytes - A.kv_bytes
    pool.tick(0.2)
    (view,) = pool.view.models[A.deployment].replicas
    assert (view.state, view.kv_bytes, view.budget_bytes) == (ReplicaState.LOADING, kv_bytes, load.record.budget_bytes)
    assert pool.view.devices[(W, GPUS[2])].loads_coming == 1
    assert pool.view.devices[(W, GPUS[2])].free_planned_bytes == 4 * GIB - load.record.budget_bytes


def test_an_interrupted_replica_does_not_finish_its_requests() -> None:
    """A stop drains within its bound; an interruption has none (SCH-9), where its engine lets answers go on elsewhere."""
    careful = Pool(A, B)
    c = careful.has("a", 0)
    careful.tell()
    (stop,) = careful.decide(StopReplica(c, "because", interrupt=True))
    assert isinstance(stop, DrainReplica)
    assert stop.timeout_s == 30.0
    pool = Pool(A, B, settings=SchedulerSettings(interrupts=True))
    a, b, c = pool.has("a", 0), pool.has("b", 1), pool.has("b", 2, continues=False)
    pool.tell()
    stops = pool.decide(
        StopReplica(a, "because"), StopReplica(b, "because", interrupt=True), StopReplica(c, "because", interrupt=True)
    )
    assert {stop.replica: stop.timeout_s for stop in stops if isinstance(stop, DrainReplica)} == {a: 30.0, b: 0.0, c: 30.0}
    assert pool.core.actions.dropped == ()
    pool.tick(0.2)
    assert (pool.view.models[A.deployment].leaving, pool.view.models[A.deployment].replicas) == (1, ())


# ------------------------------------------------------------------------------------------------------------- the checks


def test_what_cannot_be_carried_out_is_dropped_with_its_reason() -> None:
    """A decision is old when it is carried out: no room, no such device, a victim that stays (SCH-1, SCH-11)."""
    big, pinned, floor = record("big", 5.0), record("p", pinned=True), record("f", min_replicas=1)
    pool = Pool(A, B, big, pinned, floor)
    p, f, b = pool.has("p", 0), pool.has("f", 1), pool.has("b", 2, gib=3.5)
    pool.tell()
    told = pool.decide(
        start("big", 3),
        start("a", 0, victims=(p,)),
        start("a", 1, victims=(f,)),
        start("a", 3, victims=(b,)),
        start("a", 2),
        start("a", 0, 1),
        StopReplica(p, "because"),
        StopReplica(ReplicaId("nobody"), "because"),
        StartReplica(deployment("unknown"), ((W, GPUS[0]),), "because"),
        StartReplica(A.deployment, ((W, DeviceId("gpu9")),), "because"),
    )
    assert told == []
    assert pool.dropped() == [
        "big needs 5.0 GiB on gpu3, 4.0 GiB are to be had",
        f"{p} is pinned, locked or needed for a minimum",
        f"{f} is pinned, locked or needed for a minimum",
        f"{b} is not on those devices",
        "a needs 1.0 GiB on gpu2, 512.0 MiB are to be had",
        "a spans 1 devices, not these 2",
        f"{p} is pinned, locked or needed for a minimum",
        "nobody is not there",
        "nobody applied that model",
        "one of the devices is not known",
    ]


def test_as_many_models_share_a_device_as_a_setting_says() -> None:
    """Two, as SCH-3 has it, where that is set; who wants a device for itself gets it empty or not at all."""
    a, b, c, d = (record(name, 0.5) for name in "abcd")
    alone = record("e", 0.5, allow_co_location=False)
    pool = Pool(a, b, c, d, alone, settings=SchedulerSettings(models_per_device_max=2))
    pool.has("a", 0, gib=0.5)
    pool.has("b", 0, gib=0.5)
    pool.tell()
    loads = pool.decide(start("c", 0), start("e", 1), start("d", 1), start("c", 2))
    assert [(load.record.name, load.device) for load in loads if isinstance(load, LoadModel)] == [
        ("e", GPUS[1]),
        ("c", GPUS[2]),
    ]
    assert pool.dropped() == [
        "gpu0 has 2 other models, at most 2 may share it",
        "d or a model on gpu1 wants its device for itself",
    ]


def test_the_sum_of_free_bytes_is_no_block() -> None:
    """75 % used, the largest free run 1.8 GB, a model that needs 2.1 GB: refused, although the sum is free (SCH-1)."""
    gb = 10**9 / GIB
    needs = record("needs", 2.1 * gb)
    pool = Pool(record("a", pinned=True), needs, runs=dict.fromkeys(GPUS, int(1.8 * 10**9)), memory_bytes=10 * 10**9)
    pool.resizes = False
    first = pool.has("a", 0, gib=5.0 * gb)
    for gpu in range(4):
        pool.has("a", gpu, gib=2.5 * gb, replica=f"a-{gpu}-00000000bb")
        pool.has("a", gpu, gib=2.5 * gb if gpu == 0 else 5.0 * gb, replica=f"a-{gpu}-00000000cc")
    pool.gone(first)
    pool.tell()
    device = pool.core.pool.device(W, GPUS[1])
    assert device is not None and pool.core.pool.room(device).free_planned_bytes == int(2.5 * 10**9)
    assert pool.decide(start("needs", 1)) == []
    assert pool.dropped() == ["needs needs 2.0 GiB on gpu1, 1.7 GiB are to be had"]
    pool.tick(0.2)
    assert pool.view.devices[(W, GPUS[1])].largest_free_bytes == int(1.8 * 10**9)
    # The coordinator sees the same: nobody may leave.
    pool.core.policy = Coordinator()
    assert commands(pool.demand(needs=0.2)) == []


# ----------------------------------------------------------------------------------------------------- over several devices


def test_a_replica_spans_linked_devices_of_one_worker() -> None:
    """Its budget is promised on each device and the load names them all; what is not linked is refused (SCH-3)."""
    wide = record("wide", 3.0, gpus=2, max_replicas=4)
    pool = Pool(A, wide)
    pool.has("a", 1, gib=2.0)
    pool.tell()
    (load,) = pool.decide(start("wide", 2, 3), start("wide", 0, 0), start("wide", 0, 1), start("wide", 0, 3))
    assert isinstance(load, LoadModel)
    assert (load.device, load.peers) == (GPUS[2], (GPUS[3],))
    assert pool.dropped() == [
        "wide spans 2 devices, not these 2",
        "wide needs 3.0 GiB on gpu1, 2.0 GiB are to be had",
        "wide needs 3.0 GiB on gpu3, 1.0 GiB are to be had",
    ]
    pool.tick(0.2)
    (view,) = pool.view.models[wide.deployment].replicas
    assert view.devices == ((W, GPUS[2]), (W, GPUS[3]))
    assert [pool.view.devices[(W, gpu)].free_planned_bytes for gpu in GPUS] == [4 * GIB, 2 * GIB, GIB, GIB]
    assert [pool.view.devices[(W, gpu)].loads_coming for gpu in GPUS] == [0, 0, 1, 1]
    loose = Pool(wide, linked=False)
    assert loose.decide(start("wide", 2, 3)) == []
    assert loose.dropped() == ["the devices are not linked with each other"]


def test_victims_of_a_wide_replica_leave_all_its_devices_first() -> None:
    """Both victims are drained and unloaded before the load is sent (SCH-8)."""
    wide = record("wide", 4.0, gpus=2)
    pool = Pool(A, B, wide)
    a, b = pool.has("a", 0), pool.has("b", 1)
    pool.tell()
    drains = pool.decide(start("wide", 0, 1, victims=(a, b)))
    assert [drain.replica for drain in drains if isinstance(drain, DrainReplica)] == [a, b]
    unloads = [command for drain in drains for command in pool.end(drain)]
    assert [type(unload) for unload in unloads] == [UnloadReplica, UnloadReplica]
    pool.gone(a)
    assert pool.end(unloads[0]) == []
    pool.gone(b)
    (load,) = pool.end(unloads[1])
    assert isinstance(load, LoadModel) and (load.device, load.peers) == (GPUS[0], (GPUS[1],))


def test_a_wide_model_is_placed_or_told_why_it_never_can_be() -> None:
    """In free room on the devices that it fits best; by eviction where the least is lost; else a refusal (SCH-1)."""
    wide, wider = record("wide", 3.0, gpus=2), record("wider", 1.0, gpus=8)
    pool = Pool(A, B, wide, wider)
    pool.resizes = False
    pool.core.policy = Coordinator()
    pool.has("a", 0, gib=1.0)
    pool.tell()
    (load,) = commands(pool.demand(wide=0.2))
    assert isinstance(load, LoadModel) and (load.device, load.peers) == (GPUS[0], (GPUS[1],))
    pool.demand(wider=0.2)
    pool.tick(1.1)
    assert pool.refusal("wider") == "needs 8 linked devices of 1.0 GiB, no worker has more than 4"
    full = Pool(record("a", max_replicas=2), B, wide)
    full.resizes = False
    full.core.policy = Coordinator()
    for gpu in (0, 1, 2):
        full.has("a" if gpu else "b", gpu, gib=2.0)
    full.has("wide-not", 3, gib=4.0)
    full.step(ModelApplied(record("wide-not", 4.0, pinned=True)))
    full.tell()
    victims = [
        command.replica for command in commands(full.demand(wide=0.2, b=(1, 0.0))) if isinstance(command, DrainReplica)
    ]
    assert victims == ["a-1-00000000aa", "a-2-00000000aa"]


# ---------------------------------------------------------------------------------------------------------------- changes


def test_kv_moves_from_one_resident_to_the_other() -> None:
    """One shrinks at once, the other grows when the room is there; independent ones run side by side (SCH-8, SCH-13)."""
    a, b = record("a", 2.0), record("b", 2.0)
    pool = Pool(a, b)
    ra = pool.has("a", 0, gib=2.0, kv_bytes=a.kv_bytes)
    rb = pool.has("b", 0, gib=2.0, kv_bytes=b.kv_bytes)
    rc = pool.has("a", 1, gib=2.0, replica="a-1-00000000cc", kv_bytes=a.kv_bytes)
    pool.tell()
    less, more = a.kv_bytes // 2, b.kv_bytes + a.kv_bytes // 2
    told = pool.decide(
        ResizeReplicaKv(ra, less, "because"),
        ResizeReplicaKv(rb, more, "because"),
        SetReplicaConcurrency(rc, 3, "because"),
        ResizeReplicaKv(ra, less // 2, "because"),
    )
    assert [command.replica for command in told if isinstance(command, ResizeKv | SetConcurrency)] == [ra, rc]
    assert isinstance(told[0], ResizeKv) and isinstance(told[1], SetConcurrency)
    assert pool.dropped() == [f"{ra} is being changed already"]
    (grow,) = pool.end(told[0])
    assert isinstance(grow, ResizeKv) and (grow.replica, grow.kv_bytes) == (rb, more)
    assert pool.end(grow) == [] and pool.end(told[1]) == []
    assert not pool.core.transactions.running
    pool.tick(0.2)
    views = {view.replica: (view.kv_bytes, view.budget_bytes) for view in pool.view.models[b.deployment].replicas}
    assert views[rb] == (more, with_kv(b, more).budget_bytes)
    assert pool.view.devices[(W, GPUS[0])].free_planned_bytes == 0
    outcomes = [(entry.action, entry.outcome) for entry in pool.digest.timeline]
    assert outcomes == [("resize", "done"), ("resize", "done"), ("concurrency", "done")]


def test_a_change_that_its_engine_refuses_changes_nothing() -> None:
    """The agent's reason is in the timeline, and the room is as before."""
    pool = Pool(A)
    replica, other = pool.has("a", 0, kv_bytes=A.kv_bytes), pool.has("a", 1, kv_bytes=A.kv_bytes)
    pool.tell()
    (resize,) = pool.decide(ResizeReplicaKv(replica, 2 * A.kv_bytes, "because"))
    pool.tick(0.2)
    assert pool.view.devices[(W, GPUS[0])].free_planned_bytes == 3 * GIB - A.kv_bytes
    pool.end(resize, failure="resize-kv is not offered by this engine")
    pool.tick(0.2)
    assert pool.view.devices[(W, GPUS[0])].free_planned_bytes == 3 * GIB
    assert pool.digest.timeline[-1].outcome == "failed: resize-kv is not offered by this engine"
    # It is not asked again at every look.
    assert pool.decide(ResizeReplicaKv(replica, 2 * A.kv_bytes, "because")) == []
    assert [why for _, why in pool.core.actions.dropped] == [f"{replica} refused to change its KV a moment ago"]
    # One that never gets its room is given up.
    pool.decide(ResizeReplicaKv(other, 2 * A.kv_bytes, "because"))
    pool.gone(other)
    pool.tell()
    assert not pool.core.transactions.running
    assert f"failed: {other} is gone" in [entry.outcome for entry in pool.digest.timeline]


def test_a_load_that_is_not_wanted_any_more_is_taken_back() -> None:
    """One that loads is unloaded and no fault of its model; one that waits for its device is not begun."""
    pool = Pool(A, B)
    (load,) = pool.decide(start("a", 0), start("b", 0))
    assert isinstance(load, LoadModel)
    coming = pool.has("a", 0, state=ReplicaState.LOADING, replica=f"{load.replica_name}-00000000aa")
    pool.tell()
    waiting = pool.view.models[B.deployment]
    pool.tick(0.2)
    (promised,) = pool.view.models[B.deployment].replicas
    (unload,) = pool.decide(StopReplica(promised.replica, "because"), StopReplica(coming, "because"))
    assert isinstance(unload, UnloadReplica) and unload.force and unload.replica == coming
    pool.end(load, failure="unloaded before it was ready", replica=coming)
    pool.gone(coming)
    pool.end(unload)
    pool.tell()
    pool.tick(0.2)
    assert [pool.view.models[m].replicas for m in (A.deployment, B.deployment)] == [(), ()]
    assert pool.view.models[A.deployment].may_load and waiting.may_load
    assert pool.alerts() == []


# ---------------------------------------------------------------------------------------------------------- people's word


def test_a_model_that_may_not_be_acted_on_is_only_advised_about() -> None:
    """In the modes observe and advise nothing is done; in advise what would be is published once in a while (SCH-11)."""
    watched = record("a", mode=Mode.ADVISE)
    pool = Pool(watched, B)
    a, b = pool.has("a", 0), pool.has("b", 1)
    pool.tell()
    assert not pool.policy.views[-1].models[watched.deployment].may_act
    actions = (StopReplica(a, "cold"), start("b", 0, victims=(a,)), SetReplicaConcurrency(a, 2, "hot"))
    assert pool.decide(*actions) == []
    assert pool.dropped() == [
        "advice only: a may not be acted on",
        "b has 1 of at most 1 replicas",
        "advice only: a may not be acted on",
    ]
    for _ in range(5):
        pool.decide(*actions)
    assert pool.advice() == [("a", "would unload: cold"), ("a", f"would concurrency: hot; {a} would run 2 at once")]
    pool.step(said(mode("a", Mode.ACT)))
    (drain,) = pool.decide(StopReplica(a, "cold"))
    assert isinstance(drain, DrainReplica)
    pool.step(said(mode("a", Mode.ACT), mode("b", Mode.OBSERVE)))
    told = len(pool.advice())
    assert pool.decide(StopReplica(b, "cold")) == []
    assert pool.dropped() == ["b may only be observed"] and len(pool.advice()) == told
    pool.step(said(mode("a", Mode.ACT)))
    assert len(pool.decide(StopReplica(b, "cold"))) == 1


def test_a_locked_model_is_left_alone() -> None:
    """No policy may start, stop or change a replica of it (SCH-11)."""
    pool = Pool(A, B, record("c", 4.0))
    a = pool.has("a", 0)
    pool.has("c", 1, gib=4.0)
    pool.tell()
    pool.step(said(lock("a"), lock("b")))
    assert pool.decide(StopReplica(a, "x"), SetReplicaConcurrency(a, 2, "x"), start("b", 1)) == []
    assert pool.dropped() == [
        f"{a} is pinned, locked or needed for a minimum",
        f"{a} is locked by a person",
        "b is locked by a person",
    ]
    pool.tick(0.2)
    (view,) = pool.view.models[A.deployment].replicas
    assert view.stays and not pool.view.models[B.deployment].may_load
    pool.core.policy = Coordinator()
    assert commands(pool.demand(b=20.0)) == []
    assert [type(command) for command in commands(pool.step(said(lock("a"))))] == [LoadModel]


def test_nothing_happens_by_itself_to_a_model_that_may_only_be_watched() -> None:
    """In observe and advise its replicas stay for whoever waits, none is started, and its clients are told why."""
    for only in (Mode.OBSERVE, Mode.ADVISE):
        pool = Pool(record("a", 4.0, mode=only), record("b", 4.0, mode=only), record("c", 4.0))
        pool.core.policy = Coordinator()
        for gpu in range(4):
            pool.has("a", gpu, gib=4.0)
        pool.tell()
        assert commands(pool.demand(b=1.0, c=1.0)) + commands(pool.tick(60.0)) == []
        text = f"not loaded, and nothing is loaded by itself in its mode {only.value} (carpool mode b act)"
        assert pool.refusal("b") == text and pool.refusal("c").startswith("no capacity, pinned")
        assert pool.refusal("a") == ""
        pool.step(said(mode("a", Mode.ACT)))
        assert isinstance(commands(pool.tick(2.0))[0], DrainReplica)


def test_advice_says_what_acting_would_save() -> None:
    """A load that waits, with who would leave for it; a replica that nobody needs, with the device that it takes."""
    advised = record("a", 4.0, mode=Mode.ADVISE, keep_s=30.0)
    pool = Pool(advised, record("b", 4.0, max_replicas=4))
    pool.core.policy = Coordinator()
    for gpu in range(4):
        pool.has("b", gpu, gib=4.0)
    pool.tell()
    assert [command for command in commands(pool.demand(a=1.0)) if isinstance(command, LoadModel)] == []
    pool.tick(2.0)
    load = next(text for model, text in pool.advice() if model == "a")
    assert load.startswith("would load: 1 waiting for ") and load.endswith(" would leave")
    assert "; acting would save all but 20 s of each wait; b-" in load
    assert pool.refusal("a").startswith("not loaded, and nothing is loaded by itself in its mode advise")
    idle = Pool(advised)
    idle.core.policy = Coordinator()
    idle.has("a", 0, gib=4.0)
    idle.tell()
    assert commands(idle.tick(40.0)) == []
    assert ("a", "would unload: the rest carries it; acting would save 1 device") in idle.advice()


# ------------------------------------------------------------------------------------------------------ weights and journal


def test_routing_weights_are_told_to_everybody() -> None:
    """They stay until another is decided, and go with their replica."""
    pool = Pool(A)
    replica = pool.has("a", 0)
    pool.tell()
    pool.decide(weights={replica: 0.25, ReplicaId("nobody"): 0.5})
    assert [row.weight for row in pool.digest.replicas] == [0.25]
    pool.tick(1.5)
    assert [row.weight for row in pool.digest.replicas] == [0.25]
    pool.decide(weights={replica: 1.0}, notes={A.deployment: "has enough"})
    assert [row.weight for row in pool.digest.replicas] == [1.0]
    assert pool.core.notes == {A.deployment: "has enough"}


def test_the_journal_tells_of_a_transaction_before_its_commands() -> None:
    """Begin, each step once and its end, commit (SCH-8)."""
    pool = Pool(A, B)
    b = pool.has("b", 0, gib=4.0)
    pool.tell()
    (drain,) = pool.decide(start("a", 0, victims=(b,)))
    (unload,) = pool.end(drain)
    pool.gone(b)
    (load,) = pool.end(unload)
    pool.end(load, replica="a-7-1-00000000aa")
    entries = [entry for command in pool.out if isinstance(command, AppendJournal) for entry in command.entries]
    assert {entry.transaction for entry in entries} == {"7-1"}
    kinds = [type(entry).__name__ for entry in entries]
    assert kinds == ["TransactionBegan", *["StepSent", "StepEnded"] * 3, "TransactionEnded"]
    began, ended = entries[0], entries[-1]
    assert isinstance(began, TransactionBegan) and isinstance(ended, TransactionEnded)
    assert (began.kind, began.replicas, began.devices) == ("place", (b,), (GPUS[0],))
    assert ended.failure == ""
    told = [type(command).__name__ for command in pool.out if isinstance(command, AppendJournal | SendCommand)]
    assert told[:2] == ["AppendJournal", "SendCommand"]
    steps = [entry.command for entry in entries if isinstance(entry, StepSent)]
    assert steps == [drain, unload, load]


def test_a_successor_finishes_what_the_journal_shows() -> None:
    """The victim is drained again, the newcomer loaded under its own name, and the transaction keeps its own (SCH-8)."""
    pool = Pool(A, B)
    b = pool.has("b", 0, gib=4.0)
    pool.tell()
    pool.decide(start("a", 0, victims=(b,), kv_bytes=GIB))
    entries = [entry for command in pool.out if isinstance(command, AppendJournal) for entry in command.entries]
    pool.there[0] = msgspec.structs.replace(pool.there[0], state=ReplicaState.DRAINING)
    heir = Pool(A, B, leads=False)
    heir.there = pool.there
    heir.step(JournalRestored(tuple(entries)))
    heir.step(LeadershipGained(8))
    heir.tell()
    (drain,) = commands(heir.tick(0.6))
    assert isinstance(drain, DrainReplica) and (drain.replica, drain.epoch) == (b, 8)
    (unload,) = heir.end(drain)
    heir.gone(b)
    (load,) = heir.end(unload)
    assert isinstance(load, LoadModel)
    assert (load.replica_name, load.record, load.device) == ("a-7-1", with_kv(A, GIB), GPUS[0])
    heir.end(load, replica="a-7-1-00000000aa")
    entries = [entry for command in heir.out if isinstance(command, AppendJournal) for entry in command.entries]
    assert {entry.transaction for entry in entries} == {"7-1"} and isinstance(entries[-1], TransactionEnded)


def test_a_successor_waits_for_a_load_that_is_under_way_and_closes_what_is_done() -> None:
    """What agents show is trusted first: a newcomer that loads is waited for, one that is ready only closed (SCH-8)."""
    pool = Pool(A, B)
    (one, other) = pool.decide(start("a", 0), start("b", 1))
    assert isinstance(one, LoadModel) and isinstance(other, LoadModel)
    entries = [entry for command in pool.out if isinstance(command, AppendJournal) for entry in command.entries]
    heir = Pool(A, B, leads=False)
    coming = heir.has("a", 0, state=ReplicaState.LOADING, replica=f"{one.replica_name}-00000000aa")
    heir.has("b", 1, replica=f"{other.replica_name}-00000000aa")
    heir.step(JournalRestored(tuple(entries)))
    heir.step(LeadershipGained(8))
    heir.tell()
    assert commands(heir.tick(0.6)) == []
    assert [t.name for t in heir.core.transactions.running.values()] == ["7-1"]
    heir.gone(coming)
    heir.has("a", 0, replica=coming)
    heir.tell()
    ends = [
        (entry.transaction, entry.failure)
        for command in heir.out
        if isinstance(command, AppendJournal)
        for entry in command.entries
        if isinstance(entry, TransactionEnded)
    ]
    assert ends == [("7-2", ""), ("7-1", "")] and not heir.core.transactions.running
