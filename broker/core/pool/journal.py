"""What the journal tells: transactions from their entries, what is unfinished, and how a new leader goes on with it (SCH-8).

The journal is the second word; agents' reports are the first. An entry may be missing (the stream was full, lost, or the
leader died before its append arrived), so nothing here relies on a complete list: an entry without its begin is ignored, and
:func:`resume` compares what was meant with what agents show now.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from broker.core.pool.catalogue import Catalogue
from broker.core.pool.older import kept_in_journal
from broker.core.pool.state import COMING, Pool, Replica
from subjects import messages as m
from subjects.ids import DeploymentKey, OperationId, ReplicaId

TRANSACTIONS_MAX = 500
"""So many transactions are remembered, the latest ones. Finished ones go first: unfinished ones may be twice as many."""
STEPS_MAX = 64
"""Steps remembered of one transaction: a placement has two per victim and one load."""


@dataclass(slots=True)
class Step:
    """One command of a transaction."""

    sent: m.StepSent
    ended: m.StepEnded | None = None

    @property
    def failure(self) -> str | None:
        """None until its end is known, and empty when it did what it should."""
        return self.ended.failure if self.ended is not None else None


@dataclass(slots=True)
class Recorded:
    """A transaction as its entries tell it; one without an end is unfinished."""

    began: m.TransactionBegan
    steps: dict[OperationId, Step] = field(default_factory=dict)
    ended: m.TransactionEnded | None = None

    @property
    def name(self) -> str:
        """``<epoch>-<number>``"""
        return self.began.transaction

    def entries(self) -> list[m.JournalEntry]:
        """The entries that tell of it, in order."""
        steps = (entry for step in self.steps.values() for entry in (step.sent, step.ended))
        return [entry for entry in (self.began, *steps, self.ended) if entry is not None]


class TransactionLog:
    """The latest transactions by name, made from journal entries in their order; the same entry twice changes nothing."""

    def __init__(self, *, transactions_max: int = TRANSACTIONS_MAX) -> None:
        self._transactions_max = transactions_max
        self._known: dict[str, Recorded] = {}

    def add(self, entry: m.JournalEntry) -> None:
        """Takes the next entry. One whose begin is not known, or no longer, is ignored."""
        if isinstance(entry, m.TransactionBegan):
            self._known.setdefault(entry.transaction, Recorded(entry))
            self._forget()
            return
        known = self._known.get(entry.transaction)
        if known is None:
            return
        match entry:
            case m.StepSent():
                if len(known.steps) < STEPS_MAX:
                    known.steps.setdefault(entry.operation, Step(entry))
            case m.StepEnded():
                step = known.steps.get(entry.operation)
                if step is not None and step.ended is None:
                    step.ended = entry
            case m.TransactionEnded():
                known.ended = known.ended or entry

    def _forget(self) -> None:
        spare = len(self._known) - self._transactions_max
        if spare > 0:
            for name in [name for name, known in self._known.items() if known.ended is not None][:spare]:
                del self._known[name]
        while len(self._known) > 2 * self._transactions_max:
            del self._known[next(iter(self._known))]

    def find(self, name: str) -> Recorded | None:
        """A transaction by its name, or by the id of one of its operations."""
        known = self._known.get(name)
        if known is not None:
            return known
        return next((one for one in reversed(self._known.values()) if OperationId(name) in one.steps), None)

    def of_model(self, deployment: DeploymentKey, *, latest_max: int) -> list[Recorded]:
        """The latest transactions in which a model came, went or changed, newest first."""
        found = [
            one
            for one in reversed(self._known.values())
            if deployment in one.began.deployments
            or (one.began.record is not None and one.began.record.deployment == deployment)
        ]
        return found[:latest_max]

    def transactions(self) -> list[Recorded]:
        """All that are known, oldest first."""
        return list(self._known.values())

    def unfinished(self) -> tuple[m.JournalEntry, ...]:
        """The entries of all transactions without an end, oldest transaction first: what ``JournalRestored`` carries."""
        return tuple(entry for one in self._known.values() if one.ended is None for entry in one.entries())


# --------------------------------------------------------------------------------------------------------------- resuming


class Course(Enum):
    """What becomes of an unfinished transaction."""

    FINISHED = "finished"
    """Agents show that it is done: only its end is missing in the journal."""
    GO_ON = "go-on"
    """It goes on from where agents show that it stands, under its own name."""
    MAKE_GOOD = "make-good"
    """It cannot be finished: what has left for it comes back where somebody wants it."""
    DROP = "drop"
    """Nothing of it had happened: whoever still wants it decides it again."""


class Resumption(msgspec.Struct, frozen=True):
    """How to go on with one transaction of an earlier leader."""

    recorded: Recorded
    course: Course
    why: str
    """For people; the failure in the journal of one that is not finished."""
    newcomer: ReplicaId | None = None
    """The replica that it was loading, if an agent lists it: ready when FINISHED, on its way when GO_ON."""
    there: tuple[ReplicaId, ...] = ()
    """Those that still have to leave, or to be changed."""
    gone: tuple[tuple[ReplicaId, DeploymentKey], ...] = ()
    """Those that have left for it."""


def resume(entries: Iterable[m.JournalEntry], pool: Pool, catalogue: Catalogue) -> list[Resumption]:
    """How to go on with what earlier leaders left unfinished, oldest first.

    Call it once the agents have reported and the registry is read: what they show is trusted first.
    """
    log = TransactionLog()
    for entry in entries:
        log.add(kept_in_journal(entry, catalogue))
    return [_resumption(one, pool, catalogue) for one in log.transactions() if one.ended is None]


def _resumption(one: Recorded, pool: Pool, catalogue: Catalogue) -> Resumption:
    began = one.began
    there: list[Replica] = []
    gone: list[tuple[ReplicaId, DeploymentKey]] = []
    for replica, deployment in zip(began.replicas, began.deployments, strict=False):
        listed = pool.replicas.get(replica)
        if listed is None or listed.dead or listed.report.state is m.ReplicaState.FAILED:
            gone.append((replica, deployment))
        else:
            there.append(listed)
    newcomer = pool.replica_named(began.worker, began.replica_name) if began.replica_name else None
    worker = pool.workers.get(began.worker)
    if worker is None or not worker.reachable:
        course, why = Course.MAKE_GOOD, f"worker {began.worker} is gone"
    elif began.kind == "place":
        course, why = _of_placement(one, catalogue, newcomer, there, gone)
    elif began.kind == "retire":
        course = Course.GO_ON if there else Course.FINISHED
        why = "its replica is still there" if there else "its replica has left"
    elif began.kv is not None:
        course, why = _of_kv(one)
    elif began.kind not in ("resize-kv", "set-concurrency"):
        course, why = Course.DROP, f"this version knows no {began.kind!r}"
    elif not there:
        course, why = Course.DROP, "its replica has left"
    elif _is_as_meant(began, there[0]):
        course, why = Course.FINISHED, "its replica is as it was meant"
    else:
        course, why = Course.GO_ON, "its replica is not changed yet"
    return Resumption(
        recorded=one,
        course=course,
        why=why,
        newcomer=newcomer.replica if newcomer is not None and not newcomer.dead else None,
        there=tuple(replica.replica for replica in there),
        gone=tuple(gone),
    )


def _of_placement(
    one: Recorded,
    catalogue: Catalogue,
    newcomer: Replica | None,
    there: list[Replica],
    gone: list[tuple[ReplicaId, DeploymentKey]],
) -> tuple[Course, str]:
    began = one.began
    if newcomer is not None and not newcomer.dead:
        if newcomer.report.state is m.ReplicaState.READY:
            return Course.FINISHED, "its newcomer is ready"
        if newcomer.report.state in COMING or newcomer.report.state is m.ReplicaState.ABSENT:
            return Course.GO_ON, "its newcomer loads"
    if newcomer is not None:
        return Course.MAKE_GOOD, newcomer.report.failure or f"its newcomer is {newcomer.report.state.value}"
    load = next((step for step in reversed(one.steps.values()) if isinstance(step.sent.command, m.LoadModel)), None)
    if load is not None and load.failure:
        return Course.MAKE_GOOD, load.failure
    if load is not None and load.failure == "":
        return Course.FINISHED, "its newcomer was ready, and has left since"
    if began.record is None or catalogue.of_deployment(began.record.deployment) is None:
        return Course.MAKE_GOOD, "nobody applied its model (any more)"
    if catalogue.locked(began.record.deployment):
        return Course.MAKE_GOOD, "a person has locked its model"
    if began.replicas and not gone and all(replica.report.state is m.ReplicaState.READY for replica in there):
        return Course.DROP, "nobody had left for it"
    return Course.GO_ON, "its newcomer is not loaded yet"


def _of_kv(one: Recorded) -> tuple[Course, str]:
    step = next(reversed(one.steps.values()), None)
    if step is None or step.failure is None:
        return Course.GO_ON, "its KV node has not answered yet"
    return (Course.DROP, step.failure) if step.failure else (Course.FINISHED, "its KV node has answered")


def _is_as_meant(began: m.TransactionBegan, replica: Replica) -> bool:
    if began.kind == "resize-kv":
        return replica.report.kv_bytes == began.kv_bytes
    return replica.report.slots == began.slots
