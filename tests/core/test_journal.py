"""Transactions from their journal, and how a new leader goes on with each: agents first, the journal second (SCH-8)."""

from __future__ import annotations

import msgspec
import pytest

from broker.core.pool.catalogue import Catalogue
from broker.core.pool.events import SchedulerSettings
from broker.core.pool.journal import STEPS_MAX, Course, TransactionLog, resume
from broker.core.pool.state import Pool
from subjects.ids import DeviceId, OperationId, ReplicaId, WorkerId
from subjects.messages import (
    DeviceKind,
    DeviceReport,
    DrainReplica,
    EngineType,
    JournalEntry,
    LoadModel,
    ModelRecord,
    Override,
    OverrideKind,
    Overrides,
    ReplicaReport,
    ReplicaState,
    StepEnded,
    StepSent,
    TransactionBegan,
    TransactionEnded,
    UnloadReplica,
    WorkerCommand,
    WorkerSnapshot,
)
from tests.core.scheduler_world import GIB, deployment, model_hash, record

WORKER = WorkerId("w-0123456789")
OLD = ReplicaId("old-1-1-aaaaaaaaaa")
NEW_NAME = "new-1-2"
NEW = ReplicaId("new-1-2-bbbbbbbbbb")
CPU = DeviceId("cpu0")


def began(kind: str = "place", name: str = "1-2", **changes: object) -> TransactionBegan:
    """``old`` leaves for ``new``; a retirement of ``old``; a change of it."""
    fields: dict[str, object] = {
        "transaction": name,
        "kind": kind,
        "at_unix_s": 10.0,
        "reason": "new waits",
        "worker": WORKER,
        "devices": (CPU,),
        "replicas": (OLD,),
        "deployments": (deployment("old"),),
    }
    if kind == "place":
        fields |= {"record": record("new"), "replica_name": NEW_NAME}
    return TransactionBegan(**(fields | changes))  # type: ignore[arg-type]


def sent(command: WorkerCommand, name: str = "1-2") -> StepSent:
    """A step goes out."""
    return StepSent(transaction=name, operation=command.operation, worker=WORKER, at_unix_s=11.0, command=command)


def done(command: WorkerCommand, failure: str = "", name: str = "1-2") -> StepEnded:
    """It ended."""
    return StepEnded(transaction=name, operation=command.operation, at_unix_s=12.0, failure=failure)


DRAIN = DrainReplica(operation=OperationId("op-1-1"), epoch=1, replica=OLD)
UNLOAD = UnloadReplica(operation=OperationId("op-1-2"), epoch=1, replica=OLD)
LOAD = LoadModel(operation=OperationId("op-1-3"), epoch=1, device=CPU, record=record("new"), replica_name=NEW_NAME)


def report(replica: ReplicaId, state: ReplicaState, **changes: object) -> ReplicaReport:
    """A replica as its agent lists it."""
    one = ReplicaReport(
        replica=replica,
        deployment=deployment("old" if replica == OLD else "new"),
        model_hash=model_hash("old" if replica == OLD else "new"),
        device=CPU,
        state=state,
        budget_bytes=GIB,
        kv_bytes=100,
        slots=8,
    )
    return msgspec.structs.replace(one, **changes)


def pool_of(*replicas: ReplicaReport, draining: bool = False) -> Pool:
    """One worker that lists these."""
    pool = Pool(SchedulerSettings())
    device = DeviceReport(device=CPU, kind=DeviceKind.CPU, memory_bytes=2 * GIB, reserved_bytes=0)
    snapshot = WorkerSnapshot(
        worker=WORKER,
        sequence=1,
        epoch_seen=1,
        engines=(EngineType.SIMULATED,),
        devices=(device,),
        replicas=replicas,
        draining=draining,
    )
    pool.report(100.0, snapshot)
    return pool


def catalogue_of(*records: ModelRecord) -> Catalogue:
    """A registry with these."""
    catalogue = Catalogue()
    catalogue.load(records or (record("old"), record("new")))
    return catalogue


def course(
    entries: list[JournalEntry], *replicas: ReplicaReport, catalogue: Catalogue | None = None
) -> tuple[Course, tuple[ReplicaId, ...]]:
    """What is done about the only unfinished one, and who still has to leave."""
    (found,) = resume(entries, pool_of(*replicas), catalogue or catalogue_of())
    return found.course, found.there


READY, DRAINING, LOADING, FAILED, ABSENT = (
    ReplicaState.READY,
    ReplicaState.DRAINING,
    ReplicaState.LOADING,
    ReplicaState.FAILED,
    ReplicaState.ABSENT,
)


@pytest.mark.parametrize(
    ("entries", "replicas", "expected"),
    [
        pytest.param([began(), sent(DRAIN)], [(OLD, READY)], (Course.DROP, (OLD,)), id="nobody has left"),
        pytest.param([began(), sent(DRAIN)], [(OLD, DRAINING)], (Course.GO_ON, (OLD,)), id="its victim drains"),
        pytest.param([began()], [(OLD, DRAINING)], (Course.GO_ON, (OLD,)), id="the journal lacks the drain"),
        pytest.param([began(), sent(DRAIN), done(DRAIN), sent(UNLOAD)], [], (Course.GO_ON, ()), id="its victim has left"),
        pytest.param([began(replicas=(), deployments=())], [], (Course.GO_ON, ()), id="in free room, not sent yet"),
        pytest.param([began(), sent(DRAIN), sent(UNLOAD), sent(LOAD)], [], (Course.GO_ON, ()), id="the load got lost"),
        pytest.param([began(), sent(LOAD)], [(NEW, LOADING)], (Course.GO_ON, ()), id="its newcomer loads"),
        pytest.param([began(), sent(LOAD)], [(NEW, ABSENT)], (Course.GO_ON, ()), id="its newcomer waits for its turn"),
        pytest.param([began(), sent(LOAD)], [(NEW, READY)], (Course.FINISHED, ()), id="its newcomer is ready"),
        pytest.param([began(), sent(LOAD)], [(NEW, FAILED)], (Course.MAKE_GOOD, ()), id="its newcomer failed"),
        pytest.param([began(), sent(LOAD), done(LOAD, "broken")], [], (Course.MAKE_GOOD, ()), id="the load had failed"),
        pytest.param([began(), sent(LOAD), done(LOAD)], [], (Course.FINISHED, ()), id="ready, and has left since"),
        pytest.param([began("retire")], [(OLD, READY)], (Course.GO_ON, (OLD,)), id="retire: not sent yet"),
        pytest.param([began("retire")], [(OLD, DRAINING)], (Course.GO_ON, (OLD,)), id="retire: it drains"),
        pytest.param([began("retire")], [], (Course.FINISHED, ()), id="retire: it has left"),
        pytest.param([began("retire")], [(OLD, FAILED)], (Course.FINISHED, ()), id="retire: its process failed"),
        pytest.param([began("resize-kv", kv_bytes=100)], [(OLD, READY)], (Course.FINISHED, (OLD,)), id="resized"),
        pytest.param([began("resize-kv", kv_bytes=50)], [(OLD, READY)], (Course.GO_ON, (OLD,)), id="not resized"),
        pytest.param([began("resize-kv", kv_bytes=50)], [], (Course.DROP, ()), id="nothing left to resize"),
        pytest.param([began("set-concurrency", slots=8)], [(OLD, READY)], (Course.FINISHED, (OLD,)), id="slots set"),
        pytest.param([began("set-concurrency", slots=2)], [(OLD, READY)], (Course.GO_ON, (OLD,)), id="slots not set"),
        pytest.param([began("of tomorrow")], [(OLD, READY)], (Course.DROP, (OLD,)), id="an unknown kind"),
    ],
)
def test_what_becomes_of_an_unfinished_transaction(
    entries: list[JournalEntry],
    replicas: list[tuple[ReplicaId, ReplicaState]],
    expected: tuple[Course, tuple[ReplicaId, ...]],
) -> None:
    """One case for each place where a leader can die, whatever of the journal survives (SCH-8)."""
    assert course(entries, *(report(replica, state) for replica, state in replicas)) == expected


def test_a_newcomer_that_nobody_may_start_is_made_good_for() -> None:
    """Its model was deleted, or locked by a person, while nobody led (SCH-11)."""
    entries: list[JournalEntry] = [began(), sent(DRAIN), done(DRAIN)]
    gone = (OLD, deployment("old"))
    (found,) = resume(entries, pool_of(), catalogue_of(record("old")))
    assert (found.course, found.gone) == (Course.MAKE_GOOD, (gone,))
    locked = catalogue_of()
    locked.override(Overrides(entries=(Override(kind=OverrideKind.MODEL_LOCK, about="new"),)))
    (found,) = resume(entries, pool_of(), locked)
    assert (found.course, found.gone) == (Course.MAKE_GOOD, (gone,))


def test_a_worker_that_is_gone_or_goes_finishes_nothing() -> None:
    """Its successor has another incarnation, and a draining one takes no loads."""
    for pool in (Pool(SchedulerSettings()), pool_of(report(OLD, DRAINING), draining=True)):
        (found,) = resume([began(), sent(DRAIN)], pool, catalogue_of())
        assert found.course is Course.MAKE_GOOD and "is gone" in found.why


def test_a_dead_replica_counts_as_gone() -> None:
    """Declared dead while its worker was silent: it never comes back."""
    pool = pool_of(report(OLD, READY))
    pool.declare_dead(OLD)
    (found,) = resume([began("retire")], pool, catalogue_of())
    assert (found.course, found.there) == (Course.FINISHED, ())


def test_only_the_unfinished_are_gone_on_with_oldest_first() -> None:
    """A transaction with an end, and steps without a begin, are history."""
    entries: list[JournalEntry] = [
        began("retire", "1-1"),
        began("retire", "1-2"),
        sent(DRAIN, "0-9"),
        TransactionEnded(transaction="1-1", at_unix_s=13.0),
        began("retire", "1-3"),
    ]
    found = resume(entries, pool_of(report(OLD, READY)), catalogue_of())
    assert [one.recorded.name for one in found] == ["1-2", "1-3"]


def test_a_log_gives_back_what_it_was_told() -> None:
    """Each entry once, in order, with every field; repeats and ends of ends change nothing."""
    log = TransactionLog()
    entries: list[JournalEntry] = [began(), sent(DRAIN), done(DRAIN), sent(UNLOAD), done(UNLOAD, "refused")]
    for entry in [*entries, *entries, done(DRAIN, "another end")]:
        log.add(entry)
    assert list(log.unfinished()) == entries
    found = log.find("op-1-2")
    assert found is not None and found is log.find("1-2") and log.find("op-9-9") is None
    log.add(TransactionEnded(transaction="1-2", at_unix_s=13.0, failure="late"))
    log.add(TransactionEnded(transaction="1-2", at_unix_s=14.0))
    assert log.unfinished() == () and found.ended == TransactionEnded(transaction="1-2", at_unix_s=13.0, failure="late")
    assert found.entries() == [*entries, TransactionEnded(transaction="1-2", at_unix_s=13.0, failure="late")]


def test_a_log_is_bounded_and_forgets_the_finished_first() -> None:
    """Neither many transactions nor one with many steps can grow it."""
    log = TransactionLog(transactions_max=3)
    log.add(began("retire", "1-0"))
    for number in range(1, 5):
        log.add(began("retire", f"1-{number}"))
        log.add(TransactionEnded(transaction=f"1-{number}", at_unix_s=1.0))
    log.add(began("retire", "1-5"))
    assert [one.name for one in log.transactions()] == ["1-0", "1-4", "1-5"]
    for number in range(6, 20):
        log.add(began("retire", f"1-{number}"))
    assert len(log.transactions()) == 6 and log.find("1-19") is not None
    for number in range(2 * STEPS_MAX):
        log.add(sent(msgspec.structs.replace(DRAIN, operation=OperationId(f"op-{number}")), "1-19"))
    last = log.find("1-19")
    assert last is not None and len(last.steps) == STEPS_MAX


def test_the_transactions_of_a_model_are_those_it_comes_or_goes_in() -> None:
    """Newest first, for ``carpool explain``."""
    log = TransactionLog()
    for entry in (began(name="1-1"), began("retire", "1-2"), began(name="1-3", replicas=(), deployments=())):
        log.add(entry)
    assert [one.name for one in log.of_model(deployment("new"), latest_max=5)] == ["1-3", "1-1"]
    assert [one.name for one in log.of_model(deployment("old"), latest_max=1)] == ["1-2"]
