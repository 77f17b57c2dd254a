"""The scheduler core, events in and commands out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from broker.core.pool.events import (
    AppendJournal,
    BeatSeen,
    BusRoundTripMade,
    CommandAnswered,
    CommandUnanswered,
    DigestRestored,
    IngressReported,
    LeadershipGained,
    LeadershipLost,
    ModelApplied,
    OperationSeen,
    PublishDigest,
    RaiseAlert,
    RegistryLoaded,
    Resign,
    SchedulerCommand,
    SchedulerEvent,
    SchedulerSettings,
    SendCommand,
    Ticked,
    WorkerReported,
)
from broker.core.pool.overrides import UNPINNED
from broker.core.pool.transactions import TRANSITIONS, Stage
from broker.core.scheduler import SchedulerCore
from subjects.ids import DeviceId, IngressId, OperationId, ReplicaId, WorkerId
from subjects.messages import (
    CommandOutcome,
    CommandReply,
    DeviceKind,
    DeviceReport,
    DrainReplica,
    EngineType,
    IngressTelemetry,
    Lane,
    LoadModel,
    ModelDemand,
    ModelRecord,
    OperationEnded,
    PoolDigest,
    ReplicaDied,
    ReplicaReport,
    ReplicaState,
    SlaClass,
    TimelineEntry,
    UnloadReplica,
    WorkerSnapshot,
)
from tests.core.scheduler_world import GIB, UNIX_S, deployment, model_hash, record
from tests.core.words import pin, said

W, V = WorkerId("w-0000000001"), WorkerId("v-0000000002")
CPU = DeviceId("cpu0")
A, B, C = record("a"), record("b"), record("c")


def listed(
    name: str,
    state: ReplicaState = ReplicaState.READY,
    *,
    replica: str = "",
    gib: float = 1.0,
    idle_s: float = 100.0,
    state_s: float = 100.0,
    running: int = 0,
    failure: str = "",
) -> ReplicaReport:
    """A replica as its agent lists it; by default ready and idle for long."""
    return ReplicaReport(
        replica=ReplicaId(replica or f"{name}-9-1-00000000aa"),
        deployment=deployment(name),
        model_hash=model_hash(name),
        device=CPU,
        state=state,
        budget_bytes=int(gib * GIB),
        idle_s=idle_s,
        state_s=state_s,
        running=running,
        failure=failure,
    )


class Bench:
    """A core, a clock, and what the two would hear."""

    def __init__(self, *records: ModelRecord, settings: SchedulerSettings | None = None, leads: bool = True) -> None:
        self.core = SchedulerCore(settings)
        self.now_s = 1000.0
        self.sequence = 0
        self.out: list[SchedulerCommand] = []
        self._waiting: dict[str, tuple[int, float]] | None = None
        self.step(BusRoundTripMade())
        self.step(RegistryLoaded(records))
        if leads:
            self.step(LeadershipGained(7))

    def step(self, event: SchedulerEvent) -> list[SchedulerCommand]:
        """One event; digests and the journal are kept apart."""
        out = self.core.step(self.now_s, event)
        self.out.extend(out)
        return [command for command in out if not isinstance(command, PublishDigest | AppendJournal)]

    def report(
        self,
        *replicas: ReplicaReport,
        worker: WorkerId = W,
        gib: float = 1.0,
        reserved_bytes: int | None = None,
        engines: tuple[EngineType, ...] = (EngineType.SIMULATED,),
        draining: bool = False,
    ) -> list[SchedulerCommand]:
        """A worker with one device says what it has."""
        self.sequence += 1
        reserved = sum(replica.budget_bytes for replica in replicas) if reserved_bytes is None else reserved_bytes
        device = DeviceReport(device=CPU, kind=DeviceKind.CPU, memory_bytes=int(gib * GIB), reserved_bytes=reserved)
        snapshot = WorkerSnapshot(
            worker=worker,
            sequence=self.sequence,
            epoch_seen=0,
            engines=engines,
            devices=(device,),
            replicas=replicas,
            draining=draining,
        )
        return self.step(WorkerReported(snapshot))

    def demand(self, **waiting: float | tuple[int, float]) -> list[SchedulerCommand]:
        """The gateway says who waits: seconds of the oldest, or (running, seconds). It says so again with every tick."""
        self._waiting = {name: value if isinstance(value, tuple) else (0, value) for name, value in waiting.items()}
        return self._tell_demand()

    def _tell_demand(self) -> list[SchedulerCommand]:
        self.sequence += 1
        rows = [
            ModelDemand(
                deployment=deployment(name),
                model_hash=model_hash(name),
                sla_class=SlaClass.SILVER,
                lane=Lane.SMALL,
                waiting=1 if wait_s else 0,
                running=running,
                oldest_wait_s=wait_s,
            )
            for name, (running, wait_s) in (self._waiting or {}).items()
        ]
        message = IngressTelemetry(ingress=IngressId("gw-1"), sequence=self.sequence, demand=tuple(rows))
        return self.step(IngressReported(message))

    def tick(self, seconds: float, *, beats: Sequence[WorkerId] = (W,), gateway: bool = True) -> list[SchedulerCommand]:
        """Time passes in ticks, with a bus that works, workers that beat and a gateway that tells its demand."""
        out: list[SchedulerCommand] = []
        end_s = self.now_s + seconds
        while self.now_s < end_s - 1e-9:
            passed_s = min(end_s - self.now_s, 0.1)
            self.now_s += passed_s
            self.step(BusRoundTripMade())
            for worker in beats:
                if worker in self.core.pool.workers:
                    out += self.step(BeatSeen(worker, 0))
            if self._waiting is not None and gateway:
                self._waiting = {n: (r, w + passed_s if w else w) for n, (r, w) in self._waiting.items()}
                out += self._tell_demand()
            out += self.step(Ticked(UNIX_S + self.now_s))
        return out

    def ended(
        self, command: SchedulerCommand, failure: str = "", replica: str = "", *, withdrawn: bool = False
    ) -> list[SchedulerCommand]:
        """The agent ends the operation of a command."""
        assert isinstance(command, SendCommand)
        event = OperationEnded(
            worker=command.worker,
            operation=command.command.operation,
            replica=ReplicaId(replica) if replica else None,
            failure=failure,
            took_s=2.0,
            withdrawn=withdrawn,
        )
        return self.step(OperationSeen(event))

    def answer(
        self, command: SchedulerCommand, outcome: CommandOutcome = CommandOutcome.ACCEPTED, detail: str = ""
    ) -> list[SchedulerCommand]:
        """The agent answers a command."""
        assert isinstance(command, SendCommand)
        operation = command.command.operation
        return self.step(CommandAnswered(CommandReply(operation=operation, outcome=outcome, epoch_seen=9, detail=detail)))

    @property
    def digest(self) -> PoolDigest:
        """The last one, as a successor would find it."""
        return [command.stored for command in self.out if isinstance(command, PublishDigest)][-1]

    def refusal(self, name: str) -> str:
        """What the last digest says of a model."""
        return next(model.refusal for model in self.digest.models if model.name == name)

    def alerts(self) -> list[str]:
        """Kinds, in order."""
        return [command.alert.kind for command in self.out if isinstance(command, RaiseAlert)]


def settled(*records: ModelRecord, settings: SchedulerSettings | None = None) -> Bench:
    """A leader that has listened long enough."""
    bench = Bench(*records, settings=settings)
    bench.tick(0.6)
    return bench


def commands(out: Sequence[SchedulerCommand]) -> list[object]:
    """What is sent to agents, without the envelope."""
    return [command.command for command in out if isinstance(command, SendCommand)]


def sent(out: Sequence[SchedulerCommand]) -> list[SendCommand]:
    """What is sent to agents."""
    return [command for command in out if isinstance(command, SendCommand)]


# --------------------------------------------------------------------------------------------------------- first decisions


def test_demand_becomes_one_load_command() -> None:
    """A waiting model is loaded where it fits, under our epoch, with a reason; more waiters change nothing."""
    bench = settled(A)
    bench.report()
    out = bench.demand(a=0.2)
    assert out == [
        SendCommand(
            W,
            LoadModel(
                operation=OperationId("op-7-1"),
                epoch=7,
                reason="1 waiting for 0.2 s",
                device=CPU,
                record=A,
                replica_name="a-7-1",
                timeout_s=300.0,
            ),
            1.0,
        )
    ]
    assert bench.demand(a=0.3) == []
    assert commands(bench.tick(0.5)) == []


def test_a_standby_decides_nothing() -> None:
    """Without leadership nothing is sent and nothing is published."""
    bench = Bench(A, leads=False)
    bench.report()
    bench.demand(a=30.0)
    bench.tick(5)
    assert bench.out == []


def test_nothing_is_decided_before_the_registry_is_known() -> None:
    """Loaded models are no orphans while the registry is unread (F10)."""
    bench = Bench(leads=False)
    bench.core = SchedulerCore()
    bench.step(LeadershipGained(7))
    bench.report(listed("a"))
    assert commands(bench.tick(10)) == []
    bench.step(RegistryLoaded((A,)))
    assert commands(bench.tick(10)) == []


def test_a_new_leader_listens_first() -> None:
    """It waits half a second, and for the first report of each worker that beats, but not for ever."""
    bench = Bench(A)
    bench.report()
    assert bench.demand(a=1.0) == []
    assert commands(bench.tick(0.4)) == []
    assert len(commands(bench.tick(0.2))) == 1
    bench = Bench(A)
    bench.report()
    bench.step(BeatSeen(V, 0))
    bench.demand(a=1.0)
    assert commands(bench.tick(5.8, beats=(W, V))) == []
    assert len(commands(bench.tick(0.4, beats=(W, V)))) == 1


def test_leadership_lost_forgets_what_is_under_way() -> None:
    """After the loss nothing is sent again; the next epoch starts over with fresh operation ids."""
    bench = settled(A)
    bench.report()
    assert len(bench.demand(a=0.2)) == 1
    bench.step(LeadershipLost())
    assert bench.tick(10) == []
    bench.step(LeadershipGained(9))
    (load,) = commands(bench.tick(0.7))
    assert isinstance(load, LoadModel)
    assert (load.operation, load.epoch, load.replica_name) == ("op-9-2", 9, "a-9-2")


# ------------------------------------------------------------------------------------------------------- the steps of a swap


def swap(bench: Bench) -> SendCommand:
    """B takes the room of idle A: returns the load command of B."""
    bench.report(listed("a"))
    (drain,) = sent(bench.demand(b=0.2))
    assert drain.command == DrainReplica(
        operation=drain.command.operation,
        epoch=7,
        reason="1 waiting for 0.2 s; a leaves",
        replica=ReplicaId("a-9-1-00000000aa"),
        timeout_s=30.0,
    )
    assert bench.answer(drain) == []
    (unload,) = sent(bench.ended(drain))
    assert isinstance(unload.command, UnloadReplica) and not unload.command.force
    assert bench.answer(unload) == []
    (load,) = sent(bench.ended(unload))
    assert isinstance(load.command, LoadModel) and load.command.record == B
    return load


def test_a_swap_is_drain_unload_load() -> None:
    """Each step follows the end of the one before it, and the timeline tells all of it with reasons."""
    bench = settled(A, B)
    load = swap(bench)
    bench.answer(load)
    bench.ended(load, replica="b-7-1-00000000bb")
    bench.report(listed("b", replica="b-7-1-00000000bb"))
    bench.tick(1.1)
    assert [(e.action, e.model, e.outcome, e.reason) for e in bench.digest.timeline] == [
        ("evict", "a", "done", "idle for 100 s; makes room for b"),
        ("load", "b", "done", "1 waiting for 0.2 s; a leaves"),
    ]
    assert bench.digest.timeline[1].replica == "b-7-1-00000000bb" and bench.digest.timeline[1].took_s == 2.0
    assert bench.digest.timeline[0].at_unix_s == pytest.approx(UNIX_S + 1000.6)
    assert not bench.digest.dead


def test_an_older_report_cannot_bring_an_unloaded_replica_back() -> None:
    """After the unload has ended, a report from before it neither charges nor lists the replica."""
    bench = settled(A, B)
    load = swap(bench)
    bench.report(listed("a"))
    assert bench.digest.replicas == ()
    assert commands(bench.tick(0.3)) == []
    bench.ended(load, replica="b-7-1-00000000bb")
    assert commands(bench.tick(0.3)) == []


def test_a_loaded_replica_keeps_its_room_until_it_is_listed() -> None:
    """Between the end of a load and the next report neither the model nor its room counts as missing (E4)."""
    bench = settled(A, B)
    bench.report()
    (load,) = sent(bench.demand(a=0.2))
    bench.ended(load, replica="a-7-1-00000000aa")
    assert bench.demand(a=0.3, b=0.1) == []
    assert commands(bench.tick(3)) == []
    bench.report(listed("a", replica="a-7-1-00000000aa", state_s=0.0))
    assert commands(bench.tick(0.3)) == []


def test_a_report_that_shows_the_result_counts_as_the_answer() -> None:
    """A load whose end got lost is over when its replica is listed as ready."""
    bench = settled(A)
    bench.report()
    (load,) = sent(bench.demand(a=0.2))
    bench.answer(load)
    bench.report(listed("a", ReplicaState.LOADING, replica="a-7-1-00000000aa"))
    assert bench.core.transactions.running
    bench.report(listed("a", replica="a-7-1-00000000aa"))
    assert not bench.core.transactions.running


def test_an_unanswered_command_is_sent_again_and_then_given_up() -> None:
    """The same operation goes out four times, a second apart; then the load is planned anew, under another operation."""
    bench = settled(A)
    bench.report()
    (load,) = sent(bench.demand(a=0.2))
    bench.step(CommandUnanswered(load.command.operation))
    again = sent(bench.tick(3.5))
    assert again == [load, load, load]
    assert commands(bench.tick(0.8)) == []
    # The agent may hold that room all the same, so the next attempt waits until its reports would tell.
    assert sent(bench.tick(5.0)) == []
    other, *_ = sent(bench.tick(2.0))
    assert isinstance(other.command, LoadModel) and other.command.operation != load.command.operation
    assert bench.core.catalogue.model(A.deployment).failures == 0


def test_an_accepted_operation_without_an_end_is_asked_for() -> None:
    """Every five seconds the same command goes out again: the agent then repeats the event."""
    bench = settled(A)
    bench.report()
    (load,) = sent(bench.demand(a=0.2))
    bench.answer(load)
    assert sent(bench.tick(4.8)) == []
    assert sent(bench.tick(0.4)) == [load]
    bench.answer(load, CommandOutcome.REPEATED)
    assert sent(bench.tick(5.1)) == [load]


def test_a_refused_load_is_no_fault_of_the_model_at_first() -> None:
    """An agent's refusal is followed by another try a second later; three in a row count as a failure."""
    bench = settled(A)
    bench.report()
    (load,) = sent(bench.demand(a=0.2))
    for _ in range(2):
        assert sent(bench.answer(load, CommandOutcome.REFUSED, "no")) == []
        assert bench.refusal("a") == ""
        assert sent(bench.tick(0.8)) == []
        (load,) = sent(bench.tick(0.3))
    bench.answer(load, CommandOutcome.REFUSED, "no")
    assert bench.refusal("a") == "loading failed once, next try in 2 s"
    assert bench.core.catalogue.model(A.deployment).failure == "refused: no"


def test_a_stale_epoch_makes_us_resign() -> None:
    """An agent that has obeyed somebody newer ends our leadership; strangers' operations do not."""
    bench = settled(A)
    bench.report()
    (load,) = sent(bench.demand(a=0.2))
    stranger = CommandReply(operation=OperationId("op-1-1"), outcome=CommandOutcome.STALE_EPOCH, epoch_seen=8)
    assert bench.step(CommandAnswered(stranger)) == []
    assert bench.answer(load, CommandOutcome.STALE_EPOCH) == [Resign("a worker has obeyed epoch 9, ours is 7")]
    assert bench.core.pool.epoch_seen_max == 9


def test_a_drain_that_overruns_is_forced() -> None:
    """An agent that never ends a drain is told to unload by force after bound and grace, and a person hears of it."""
    bench = settled(A, B)
    bench.report(listed("a"))
    (drain,) = sent(bench.demand(b=0.2))
    bench.answer(drain)
    assert all(command == drain for command in sent(bench.tick(39.8)))
    (unload,) = [command for command in sent(bench.tick(0.4)) if command != drain]
    assert isinstance(unload.command, UnloadReplica) and unload.command.force
    bench.ended(unload)
    assert ReplicaId("a-9-1-00000000aa") not in bench.digest.dead
    load = sent(bench.out)[-1]
    bench.ended(load, replica="b-7-1-00000000bb")
    assert "drain-overrun" in bench.alerts()
    assert ReplicaId("a-9-1-00000000aa") in bench.digest.dead


def test_a_refused_unload_is_forced_and_at_last_given_up() -> None:
    """An unload that is refused is repeated by force, at a pace; after four the swap is off and a person hears of it."""
    bench = settled(A, B)
    bench.report(listed("a"))
    (drain,) = sent(bench.demand(b=0.2))
    (unload,) = sent(bench.ended(drain))
    for _ in range(3):
        assert sent(bench.answer(unload, CommandOutcome.REFUSED, "no")) == []
        assert sent(bench.tick(0.8)) == []
        (unload,) = sent(bench.tick(0.3))
        assert isinstance(unload.command, UnloadReplica) and unload.command.force
    bench.answer(unload, CommandOutcome.REFUSED, "no")
    assert not [t for t in bench.core.transactions.running.values() if t.record is not None]
    entry = bench.digest.timeline[1]
    assert (entry.action, entry.outcome) == ("load", "failed: a-9-1-00000000aa could not be unloaded: refused: no")


def test_a_load_that_takes_too_long_is_a_failure() -> None:
    """A load without an end is the model's failure when its bound and the grace are over."""
    bench = settled(A)
    bench.report()
    (load,) = sent(bench.demand(a=0.2))
    bench.answer(load)
    bench.tick(309.5)
    assert bench.core.transactions.running
    bench.tick(0.7)
    assert bench.core.catalogue.model(A.deployment).failure == "no end after 310 s"


def test_a_load_that_an_operator_took_back_is_no_failure() -> None:
    """An unload while it loads ends the load; the model neither backs off nor is refused, and waiters load it again."""
    bench = settled(A)
    bench.report()
    (load,) = sent(bench.demand(a=0.2))
    bench.answer(load)
    bench.ended(load, failure="unloaded before it was ready", replica="a-7-1-00000000aa", withdrawn=True)
    assert bench.core.catalogue.model(A.deployment).failures == 0
    assert bench.refusal("a") == ""
    bench.tick(1.5)
    assert bench.core.transactions.running


def test_loads_on_one_device_are_serial_and_parallel_on_two() -> None:
    """The second load on a device starts when the first has ended (E4)."""
    bench = settled(A, B, C)
    bench.report(gib=2.0)
    (load,) = sent(bench.demand(a=0.2, b=0.1))
    assert isinstance(load.command, LoadModel) and load.command.record == A
    bench.report(worker=V, gib=1.0)
    (other,) = sent(bench.demand(a=0.3, b=0.2, c=0.1))
    assert other.worker == V
    (second,) = sent(bench.ended(load, failure="broken", replica="a-7-1-00000000aa"))
    assert isinstance(second.command, LoadModel) and second.command.record == B


def test_room_that_is_still_taken_is_waited_for() -> None:
    """A model that nobody applied leaves, and the newcomer that is planned in its room loads when it is gone, not before."""
    bench = settled(B)
    (drain,) = sent(bench.report(listed("d")))
    assert sent(bench.demand(b=0.2)) == []
    assert sent(bench.tick(0.5)) == []
    (unload,) = sent(bench.ended(drain))
    (load,) = sent(bench.ended(unload))
    assert isinstance(load.command, LoadModel) and load.command.record == B


def test_a_wanted_victim_comes_back_when_the_newcomer_fails() -> None:
    """When B's load fails, A, which has waiters again, returns to its room (SCH-8)."""
    bench = settled(A, B)
    load = swap(bench)
    bench.report()
    bench.demand(a=0.1, b=0.2)
    (back,) = sent(bench.ended(load, failure="broken", replica="b-7-1-00000000bb"))
    assert isinstance(back.command, LoadModel) and back.command.record == A


# ------------------------------------------------------------------------------------------------------------- who leaves


def test_an_idle_resident_leaves_at_once() -> None:
    """Just used it stays; after an idle second it goes, however short its residency."""
    for state_s, idle_s, leaves in ((1.0, 0.5, False), (1.2, 1.1, True), (50.0, 0.5, False)):
        bench = settled(A, B)
        bench.report(listed("a", state_s=state_s, idle_s=idle_s))
        assert bool(bench.demand(b=0.1)) is leaves, (state_s, idle_s)


def test_a_busy_resident_stays_until_the_bound() -> None:
    """With demand of its own A stays until B has waited for a residency and a load of A's, eight seconds at least."""
    bench = settled(A, B)
    bench.core.catalogue.model(A.deployment).load_s = 1.0
    bench.report(listed("a", running=1, idle_s=0.0))
    assert bench.demand(a=(1, 0.0), b=7.5) == []
    assert sent(bench.tick(0.3)) == []
    (drain,) = sent(bench.tick(0.6))
    assert drain.command.reason.endswith("; a leaves")


def test_a_busy_resident_serves_at_least_as_long_as_its_load_took() -> None:
    """A model that takes 20 s to load is not drained a few seconds after it became ready."""
    bench = settled(A, B)
    bench.core.catalogue.model(A.deployment).load_s = 20.0
    bench.report(listed("a", running=1, idle_s=0.0, state_s=10.0))
    assert bench.demand(a=(1, 0.0), b=42.0) == []
    assert sent(bench.tick(9.8)) == []
    assert len(sent(bench.tick(0.4))) == 1


def test_a_stuck_counter_of_a_replica_does_not_keep_it() -> None:
    """A replica that reports running requests which no gateway knows is idle (K1)."""
    bench = settled(A, B)
    bench.report(listed("a", running=3, idle_s=0.0))
    bench.demand(b=0.1)
    assert len(sent(bench.tick(1.2))) == 1


def test_nobody_leaves_for_a_minimum_while_busy() -> None:
    """A minimum replica takes the room of idle models, never of busy ones."""
    kept = record("kept", min_replicas=1)
    bench = settled(A, kept)
    bench.demand(a=(1, 0.0))
    assert bench.report(listed("a", running=1, idle_s=0.0)) == []
    assert sent(bench.tick(30)) == []
    bench.demand()
    assert isinstance(commands(bench.tick(6))[0], DrainReplica)


def test_a_loading_resident_never_leaves() -> None:
    """What is on its way is busy by definition (B4)."""
    for state in (ReplicaState.FETCHING, ReplicaState.LOADING, ReplicaState.WARMING):
        bench = settled(A, B)
        bench.report(listed("a", state))
        bench.demand(b=60.0)
        assert sent(bench.tick(5)) == []
        assert bench.refusal("b") == ""


def test_a_queued_load_of_an_earlier_leader_counts() -> None:
    """An agent lists a load that waits for its turn as absent, with its budget: it is on its way and charged."""
    bench = settled(A, B)
    bench.report(listed("a", ReplicaState.ABSENT))
    bench.demand(a=60.0, b=60.0)
    assert sent(bench.tick(5)) == []


def test_a_failing_model_evicts_only_what_is_long_unused() -> None:
    """After a failed load A must be unused for a minute before it leaves for another try."""
    bench = settled(A, B)
    bench.core.catalogue.model(B.deployment).failures = 1
    bench.report(listed("a", idle_s=58.0))
    assert bench.demand(b=20.0) == []
    assert "no free room to try again" in bench.refusal("b")
    assert sent(bench.tick(1.5)) == []
    assert len(sent(bench.tick(1.0))) == 1


def test_an_older_waiter_claims_its_device() -> None:
    """A big model over the bound is not starved by small ones that keep filling what becomes free."""
    big = record("big", 2.0)
    bench = settled(A, B, C, big)
    bench.report(listed("a", gib=1.0, running=1, idle_s=0.0, state_s=1.0), gib=2.0)
    assert bench.demand(a=(1, 0.0), big=12.0, b=1.0) == []
    bench = settled(A, B, C, big)
    bench.report(listed("a", gib=1.0, running=1, idle_s=0.0, state_s=1.0), gib=2.0)
    (load,) = commands(bench.demand(a=(1, 0.0), big=2.0, b=1.0))
    assert isinstance(load, LoadModel) and load.record == B


def test_a_victim_that_turns_out_needless_stays() -> None:
    """The small model was used longest ago, but once the big one leaves its room is not needed."""
    small, medium, large = record("small", 0.5), record("medium", 2.0), record("large", 2.0)
    bench = settled(small, medium, large)
    bench.report(listed("small", gib=0.5, idle_s=200.0), listed("medium", gib=2.0), gib=2.5)
    assert [command.replica for command in commands(bench.demand(large=0.2)) if isinstance(command, DrainReplica)] == [
        "medium-9-1-00000000aa"
    ]


def test_pins_by_hand_win_over_the_record_both_ways() -> None:
    """A person can pin what is not declared pinned and unpin what is (SCH-11)."""
    bench = settled(record("a", pinned=True), B)
    bench.report(listed("a"))
    assert bench.demand(b=0.2) == []
    assert bench.refusal("b").startswith("no capacity, pinned: needs 1.0 GiB")
    assert bench.refusal("b").endswith("hold the room (a)")
    assert len(sent(bench.step(said(pin("a", UNPINNED))))) == 1
    bench = settled(A, B)
    bench.step(said(pin("a")))
    bench.report(listed("a"))
    assert bench.demand(b=0.2) == []


def test_a_model_keeps_its_minimum_on_one_device() -> None:
    """Of two replicas of a model with a minimum of one, only one leaves, even if that is not enough."""
    both = record("two", min_replicas=1, max_replicas=2)
    for size, leaves in ((1.0, 1), (2.0, 0)):
        bench = settled(both, record("big", size))
        bench.report(listed("two", replica="two-1-000000000a"), listed("two", replica="two-2-000000000b"), gib=2.0)
        assert len(sent(bench.demand(big=0.2))) == leaves


# --------------------------------------------------------------------------------------------------------- where it goes


def test_the_device_that_fits_best_is_taken() -> None:
    """Of two devices with room the one with less to spare; and the rest of it before an empty one."""
    bench = settled(A, B)
    bench.report(gib=3.0)
    bench.report(worker=V, gib=2.0)
    (first,) = sent(bench.demand(a=0.2))
    assert first.worker == V
    assert sent(bench.demand(a=0.3, b=0.1)) == []
    (second,) = sent(bench.report(listed("a", replica="a-7-1-00000000aa"), worker=V, gib=2.0))
    assert second.worker == V and isinstance(second.command, LoadModel) and second.command.record == B


def test_a_device_where_the_load_failed_comes_last() -> None:
    """The next attempt goes elsewhere if it can."""
    bench = settled(A)
    bench.report(gib=1.0)
    bench.report(worker=V, gib=3.0)
    (load,) = sent(bench.demand(a=0.2))
    assert load.worker == W
    bench.ended(load, failure="broken", replica="a-7-1-00000000aa")
    (again,) = sent(bench.tick(2.5, beats=(W, V)))
    assert again.worker == V


@pytest.mark.parametrize("how", ["suspect", "draining", "engine", "small"])
def test_no_place_is_no_place(how: str) -> None:
    """A suspect worker, one that shuts down, one without the engine, one that is too small: nothing is loaded there."""
    bench = settled(A)
    engines = (EngineType.VLLM,) if how == "engine" else (EngineType.SIMULATED,)
    bench.report(gib=0.5 if how == "small" else 1.0, engines=engines, draining=how == "draining")
    if how == "suspect":
        bench.tick(0.5, beats=())
    assert sent(bench.demand(a=0.2)) == []
    assert sent(bench.tick(0.8, beats=() if how == "suspect" else (W,))) == []


def test_what_the_agent_holds_back_is_no_room() -> None:
    """Bytes that a device reports as reserved beyond the listed replicas are taken."""
    bench = settled(A)
    bench.report(gib=1.0, reserved_bytes=GIB // 4)
    assert bench.demand(a=0.2) == []
    bench.report(gib=1.0, reserved_bytes=0)
    assert len(sent(bench.tick(0.2))) == 1


# --------------------------------------------------------------------------------------------------- failures, adoption


def test_back_off_doubles_up_to_a_minute() -> None:
    """Failed loads are tried again after 2, 4, 8, 16, 32, 60, 60 seconds (B8)."""
    bench = settled(A)
    bench.report()
    (load,) = sent(bench.demand(a=0.2))
    pauses = []
    for number in range(7):
        bench.ended(load, failure="broken", replica=f"a-7-{number}-00000000aa")
        failed_s = bench.now_s
        while not (out := sent(bench.tick(0.1))):
            assert bench.now_s - failed_s < 100
        (load,) = out
        pauses.append(round(bench.now_s - failed_s))
    assert pauses == [2, 4, 8, 16, 32, 60, 60]


def test_a_new_apply_clears_failures_and_a_repeated_one_does_not() -> None:
    """Only a changed record is a new chance."""
    bench = settled(A)
    bench.report()
    (load,) = sent(bench.demand(a=0.2))
    bench.ended(load, failure="broken", replica="a-7-1-00000000aa")
    assert sent(bench.step(ModelApplied(A))) == []
    assert len(sent(bench.step(ModelApplied(record("a", revision=2))))) == 1


def test_replicas_that_die_at_once_are_a_crash_loop() -> None:
    """Two early deaths are made good at once; the third counts as a failed load."""
    bench = settled(A)
    bench.report()
    (load,) = sent(bench.demand(a=0.2))
    for number in range(1, 4):
        replica = f"a-7-{number}-00000000aa"
        bench.report(listed("a", replica=replica, state_s=0.0, idle_s=0.0))
        assert not bench.core.transactions.running
        out = bench.step(OperationSeen(ReplicaDied(worker=W, replica=ReplicaId(replica), detail="SIGSEGV")))
        assert ReplicaId(replica) in bench.core.pool.dead
        if number < 3:
            (load,) = sent(out)
    assert load.command.operation == "op-7-3"
    assert bench.refusal("a") == "loading failed once, next try in 2 s"
    assert bench.core.catalogue.model(A.deployment).failure == "3 replicas died at once: SIGSEGV"
    assert bench.alerts() == ["replica-died"], "the same alert is not raised again within a minute"


def test_a_new_leader_adopts_what_it_finds() -> None:
    """Ready replicas serve, half-done drains are finished, what nobody applied leaves, loads count."""
    bench = Bench(A, B, C)
    bench.report(
        listed("a"),
        listed("b", ReplicaState.DRAINING),
        listed("c", ReplicaState.LOADING),
        listed("d"),
        gib=4.0,
    )
    bench.demand(a=0.2, c=0.2)
    out = commands(bench.tick(0.7))
    assert [(type(one), one.replica) for one in out if isinstance(one, DrainReplica)] == [
        (DrainReplica, "b-9-1-00000000aa"),
        (DrainReplica, "d-9-1-00000000aa"),
    ]
    assert len(out) == 2


def test_the_dead_of_an_earlier_leader_stay_dead() -> None:
    """The last digest's dead, its timeline and its numbering go on."""
    bench = Bench(A, leads=False)
    entry = TimelineEntry(at_unix_s=5.0, action="load", model="a", outcome="done")
    before = PoolDigest(epoch=3, sequence=41, dead=(ReplicaId("a-9-1-00000000aa"),), timeline=(entry,))
    bench.step(DigestRestored(before))
    bench.step(LeadershipGained(7))
    bench.tick(0.6)
    (unload,) = commands(bench.report(listed("a")))
    assert isinstance(unload, UnloadReplica) and unload.force
    after = bench.digest
    assert (list(after.dead), after.timeline[0], list(after.replicas)) == (list(before.dead), entry, [])
    assert after.sequence > 41


def test_a_leader_that_leads_again_tells_its_own_actions_once() -> None:
    """A lease lost and regained restores our own last digest; of another leader's, what was open is closed."""
    bench = settled(A)
    bench.report()
    bench.demand(a=0.2)
    ours = bench.digest
    assert [entry.action for entry in ours.timeline] == ["load"]
    bench.step(DigestRestored(ours))
    bench.tick(1.1)
    assert [entry.action for entry in bench.digest.timeline] == ["load"]
    theirs = msgspec.structs.replace(ours, sequence=bench.digest.sequence + 1)
    bench.step(DigestRestored(theirs))
    bench.tick(1.1)
    assert [(entry.action, entry.outcome) for entry in bench.digest.timeline] == [("load", "leader changed")]


def test_two_names_of_one_model_are_one_model() -> None:
    """Two records with one hash share replicas; the first name speaks for them."""
    bench = settled(record("x", deployment=A.deployment), A)
    bench.report(gib=4.0)
    (load,) = commands(bench.demand(a=0.2))
    assert isinstance(load, LoadModel) and load.record.name == "a"
    assert [model.name for model in bench.digest.models] == ["a", "x"]


# ----------------------------------------------------------------------------------------------------- silence and demand


def test_a_worker_is_suspect_then_dead() -> None:
    """After 0.3 s of heard silence a worker is suspect, after 2 s dead with all its replicas, and they stay dead."""
    bench = settled(A)
    bench.report(listed("a"))
    bench.tick(1.1)
    assert [replica.suspect for replica in bench.digest.replicas] == [False]
    bench.tick(0.5, beats=())
    assert [replica.suspect for replica in bench.digest.replicas] == [True]
    bench.tick(1.4, beats=())
    assert not bench.digest.dead
    bench.tick(0.3, beats=())
    assert list(bench.digest.dead) == ["a-9-1-00000000aa"] and not bench.digest.replicas
    assert bench.alerts() == ["worker-dead"]
    bench.tick(0.2)
    (unload,) = commands(bench.out)
    assert isinstance(unload, UnloadReplica) and unload.force
    assert list(bench.digest.dead) == ["a-9-1-00000000aa"]


def test_silence_counts_only_while_our_own_bus_works() -> None:
    """Without round trips, or with a gap of more than a second between them, nobody falls silent (F10)."""
    bench = settled(A)
    bench.report(listed("a"))
    for _ in range(100):
        bench.now_s += 0.1
        bench.step(Ticked(UNIX_S))
    assert not bench.digest.dead
    for _ in range(10):
        bench.now_s += 1.2
        bench.step(BusRoundTripMade())
        bench.step(Ticked(UNIX_S))
    assert not bench.digest.dead and not bench.digest.replicas[0].suspect


@pytest.mark.parametrize(("workers", "silent", "waits"), [(3, 3, False), (10, 3, False), (10, 4, True), (14, 4, False)])
def test_mass_silence_waits_longer(workers: int, silent: int, waits: bool) -> None:
    """More than 30 % and at least four agents that fall silent together get five seconds more, and no more than that."""
    bench = settled(A)
    ids = [WorkerId(f"w{number}-0000000001") for number in range(workers)]
    for worker in ids:
        bench.report(worker=worker)
    alive = ids[silent:]

    def dead() -> int:
        return sum(worker.presence.value == "dead" for worker in bench.core.pool.workers.values())

    bench.tick(2.3, beats=alive)
    assert dead() == (0 if waits else silent)
    bench.tick(4.5, beats=alive)
    assert dead() == (0 if waits else silent)
    bench.tick(0.5, beats=alive)
    assert dead() == silent


def test_a_silent_gateways_demand_is_forgotten() -> None:
    """After two heard seconds a gateway's waiters count no more."""
    bench = settled(A)
    bench.demand(a=0.2)
    bench.tick(1.8, gateway=False)
    assert bench.core.pool.inflow.demand(bench.now_s)
    bench.tick(0.4, gateway=False)
    assert bench.core.pool.inflow.demand(bench.now_s) == {}


def test_demand_is_summed_over_gateways_and_ages() -> None:
    """Waiters add up, the oldest wait is the oldest of all and grows between reports, late reports are ignored."""
    bench = settled(A)
    bench.demand(a=(2, 1.0))
    row = ModelDemand(
        deployment=A.deployment,
        model_hash=A.model_hash,
        sla_class=SlaClass.GOLD,
        lane=Lane.LARGE,
        waiting=4,
        running=1,
        oldest_wait_s=3.0,
    )
    for sequence, rows in ((5, (row, row)), (4, ())):
        telemetry = IngressTelemetry(ingress=IngressId("gw-2"), sequence=sequence, demand=rows)
        bench.step(IngressReported(telemetry))
    demand = bench.core.pool.inflow.demand(bench.now_s + 2.0)[A.deployment]
    assert (demand.waiting, demand.running, demand.oldest_wait_s) == (9, 4, 5.0)
    bench.tick(1.0)
    (model,) = bench.digest.models
    assert model.waiting_queues == ((SlaClass.GOLD, Lane.LARGE), (SlaClass.SILVER, Lane.SMALL))


# ------------------------------------------------------------------------------------------------------------ the digest


def test_the_digest_is_published_every_second_and_on_change() -> None:
    """Once a second without news, at once with news."""
    bench = settled(A)
    bench.report()
    bench.tick(1.5)
    bench.out.clear()
    bench.tick(5.0)
    assert sum(isinstance(command, PublishDigest) for command in bench.out) in (4, 5)
    bench.out.clear()
    bench.report(listed("a"))
    assert sum(isinstance(command, PublishDigest) for command in bench.out) == 1
    assert bench.digest.epoch == 7


def test_a_victim_shows_as_draining_at_once() -> None:
    """Gateways offer nothing to a replica that is about to leave."""
    bench = settled(A, B)
    bench.report(listed("a"))
    bench.demand(b=0.2)
    assert [replica.state for replica in bench.digest.replicas] == [ReplicaState.DRAINING]


def test_estimates_come_from_observed_loads() -> None:
    """First a guess from the weights, then the mean of what loads took; nothing while a replica is ready."""
    bench = settled(A, B)
    bench.report(gib=2.0)
    bench.tick(1.1)

    def estimate() -> float:
        bench.tick(1.1)
        return next(model.estimated_wait_s for model in bench.digest.models if model.name == "a")

    assert estimate() == pytest.approx(5.0 + 768 / 200, abs=0.1)
    bench.core.catalogue.model(A.deployment).load_s = 12.0
    assert estimate() == 12.0
    (load,) = sent(bench.demand(a=0.2))
    assert estimate() == pytest.approx(10.9, abs=0.2)
    bench.ended(load, replica="a-7-1-00000000aa")
    bench.report(listed("a", replica="a-7-1-00000000aa"), gib=2.0)
    assert estimate() == 0.0
    assert bench.core.catalogue.model(A.deployment).load_s == 7.0


def test_the_timeline_is_bounded() -> None:
    """Old entries leave."""
    bench = settled(A, settings=SchedulerSettings(timeline_entries_max=3))
    bench.report()
    (load,) = sent(bench.demand(a=0.2))
    for number in range(5):
        bench.ended(load, failure="broken", replica=f"a-7-{number}-00000000aa")
        bench.core.catalogue.model(A.deployment).clear()
        (load,) = sent(bench.tick(0.2))
    assert len(bench.digest.timeline) == 3


def test_ended_stages_lead_nowhere() -> None:
    """The table of stages: only what runs can move, and every way ends."""
    assert {stage for stage in Stage if not TRANSITIONS[stage]} == {Stage.DONE, Stage.ABORTED}
    assert all(Stage.ABORTED in TRANSITIONS[stage] for stage in Stage if TRANSITIONS[stage])


def test_a_replica_that_two_agents_list_with_two_models_leaves_no_trace_of_before() -> None:
    """What the last report says of it counts; a leftover in an index would fail every later decision."""
    bench = settled(A, B)
    bench.report(listed("a", replica="same-1-1-00000000aa"))
    bench.report(listed("b", replica="same-1-1-00000000aa"), worker=V)
    pool = bench.core.pool
    assert pool.replicas_for(A.deployment) == [] == pool.replicas_of(W)
    assert [replica.worker for replica in pool.replicas_for(B.deployment)] == [V]
    bench.report(worker=V)
    bench.tick(1.0, beats=(W, V))
    assert pool.replicas_for(B.deployment) == [] == pool.replicas_of(V)
    assert pool.replica_named(V, "same-1-1") is None
