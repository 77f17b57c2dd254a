"""Evictions and migrations of KV as the scheduler's transactions: once, journalled, finished by a successor (SCH-8)."""

from __future__ import annotations

import msgspec
import pytest

from broker.core.pool.events import (
    AppendJournal,
    JournalRestored,
    KvOrdered,
    LeadershipGained,
    OperationSeen,
    RegistryLoaded,
    SendCommand,
    Ticked,
    WorkerReported,
)
from broker.core.pool.journal import Course, TransactionLog, resume
from broker.core.pool.kv_tiers import KvTiers
from broker.core.scheduler import SchedulerCore
from broker.scheduler.explain import explain_transaction
from subjects.ids import WorkerId
from subjects.messages import (
    EvictKv,
    JournalEntry,
    KvModelReport,
    KvOrder,
    KvReport,
    MigrateKv,
    OperationEnded,
    PoolKv,
    StepEnded,
    StepSent,
    TransactionBegan,
    TransactionEnded,
    WorkerSnapshot,
)
from tests.core.scheduler_world import UNIX_S, World, deployment, record
from workers.core.agent_events import KvReported

MODEL = record("m", kv_signature="sig")
EVICT = KvOrder(kv_signature="sig", ratio=0.5)


def migrate(source: WorkerId) -> KvOrder:
    return KvOrder(kv_signature="sig", source=source, timeout_s=60.0)


def told(world: World) -> list[tuple[str, str, str]]:
    """Action, device and outcome of the timeline."""
    return [(entry.action, entry.device, entry.outcome) for entry in world.core.digests.timeline(0.0)]


def ordered(world: World, worker: WorkerId, order: KvOrder) -> None:
    world.step(KvOrdered(worker, deployment("m"), order))


def test_an_eviction_and_a_migration_reach_the_node_and_end_with_what_it_did() -> None:
    """The command goes to the worker whose node acts; the timeline tells what was done."""
    world = World(MODEL)
    one, other = world.agent("one", kv=True), world.agent("other", kv=True)
    world.run(1.0)
    ordered(world, one.worker, EVICT)
    ordered(world, other.worker, migrate(one.worker))
    world.run(1.0)
    (evict,) = one.kv_asked
    assert isinstance(evict, EvictKv)
    assert (evict.ratio, evict.kv_signature, evict.timeout_s) == (0.5, "sig", 60.0)
    (pull,) = other.kv_asked
    assert isinstance(pull, MigrateKv)
    assert (pull.source_worker, pull.kv_signature, pull.timeout_s) == (one.worker, "sig", 60.0)
    assert told(world) == [("evict-kv", one.worker, "412 blocks"), ("migrate-kv", other.worker, "412 blocks")]
    assert not world.core.transactions.running and not world.alerts


@pytest.mark.parametrize("seed", range(8))
def test_lost_messages_make_no_second_eviction(seed: int) -> None:
    """A command that got no answer is sent again under its id; the node is asked once, and the end is heard."""
    world = World(MODEL, seed=seed)
    agent = world.agent(kv=True)
    world.run(1.0)
    world.loss = 0.4
    ordered(world, agent.worker, EVICT)
    world.run(20.0)
    world.loss = 0.0
    world.run(20.0)
    assert len(agent.kv_asked) <= 1
    (outcome,) = [entry[2] for entry in told(world)]
    assert outcome == ("412 blocks" if agent.kv_asked else "failed: the worker does not answer")
    assert not world.core.transactions.running


def test_a_node_that_never_answers_ends_by_the_bound_of_its_agent() -> None:
    """Nobody waits for ever, and the failure is no model's."""
    world = World(MODEL)
    agent = world.agent(kv=True)
    agent.kv_s = None
    world.run(1.0)
    ordered(world, agent.worker, EVICT)
    world.run(EVICT.timeout_s + 6.0)
    assert told(world) == [("evict-kv", agent.worker, "failed: the KV node did not answer in time")]


def test_a_worker_without_a_node_refuses_and_a_dead_one_ends_it() -> None:
    """The reason is the worker's own."""
    world = World(MODEL)
    plain, doomed = world.agent("plain"), world.agent("doomed", kv=True)
    doomed.kv_s = None
    world.run(1.0)
    ordered(world, plain.worker, EVICT)
    ordered(world, doomed.worker, EVICT)
    world.run(1.0)
    doomed.kill()
    world.run(4.0)
    refusal = "failed: refused: this worker keeps no KV outside its engines (it was started with --no-kv)"
    assert told(world) == [
        ("evict-kv", plain.worker, refusal),
        ("evict-kv", doomed.worker, f"failed: worker {doomed.worker} died"),
    ]


# -------------------------------------------------------------------------------------------------------------- journal


WORKER = WorkerId("w-0123456789")


class Leader:
    """A scheduler core that hears one worker with a KV node, and what it writes and sends."""

    def __init__(self, epoch: int, entries: tuple[JournalEntry, ...] = ()) -> None:
        self.core = SchedulerCore()
        self.now_s = 0.0
        self.entries: list[JournalEntry] = []
        self.sent: list[EvictKv] = []
        self.step(RegistryLoaded((MODEL,)))
        self.report()
        if entries:
            self.step(JournalRestored(entries))
        self.step(LeadershipGained(epoch))
        for _ in range(8):
            self.report()
            self.step(Ticked(UNIX_S + self.now_s))

    def report(self) -> None:
        self.sequence = getattr(self, "sequence", 0) + 1
        snapshot = WorkerSnapshot(
            worker=WORKER, sequence=self.sequence, epoch_seen=0, devices=(), replicas=(), kv=KvReport(running=True)
        )
        self.step(WorkerReported(snapshot))

    def step(self, event: object) -> None:
        self.now_s += 0.1
        for command in self.core.step(self.now_s, event):  # type: ignore[arg-type]
            if isinstance(command, AppendJournal):
                self.entries += command.entries
            elif isinstance(command, SendCommand) and isinstance(command.command, EvictKv):
                self.sent.append(command.command)

    def end(self, command: EvictKv) -> None:
        self.step(OperationSeen(OperationEnded(worker=WORKER, operation=command.operation, detail="9 blocks")))


def test_the_journal_tells_an_eviction_and_what_it_did() -> None:
    """Begin, step and end; the end has the node's words, and explain tells them."""
    leader = Leader(7)
    leader.step(KvOrdered(WORKER, deployment("m"), EVICT))
    (command,) = leader.sent
    leader.end(command)
    began, sent, ended, over = leader.entries
    assert isinstance(began, TransactionBegan)
    assert (began.kind, began.kv, began.worker, began.devices) == ("evict-kv", EVICT, WORKER, ())
    assert isinstance(sent, StepSent) and sent.command == command
    assert isinstance(ended, StepEnded) and (ended.failure, ended.detail) == ("", "9 blocks")
    assert isinstance(over, TransactionEnded) and over.failure == ""
    log = TransactionLog()
    for entry in leader.entries:
        log.add(entry)
    assert log.transactions()[0].entries() == leader.entries
    assert [one.name for one in log.of_model(deployment("m"), latest_max=5)] == ["7-1"]
    explained = explain_transaction(leader.core, log.transactions()[0], leader.now_s, UNIX_S + leader.now_s)
    assert tuple(explained[key] for key in ("kind", "model", "where", "outcome")) == ("evict-kv", "m", WORKER, "done")
    (step,) = explained["steps"]
    assert (step["what"], step["outcome"]) == ("drop 50% of its KV there", "9 blocks")


def test_a_successor_asks_again_under_the_same_operation() -> None:
    """The worker knows it again, so that half is not dropped twice; the transaction keeps its name."""
    leader = Leader(7)
    leader.step(KvOrdered(WORKER, deployment("m"), EVICT))
    (command,) = leader.sent
    heir = Leader(8, tuple(leader.entries))
    (again,) = heir.sent[:1]
    assert again == msgspec.structs.replace(command, epoch=8)
    heir.end(again)
    assert isinstance(heir.entries[-1], TransactionEnded)
    assert {entry.transaction for entry in heir.entries} == {"7-1"} and not heir.core.transactions.running


@pytest.mark.parametrize(
    ("failure", "course", "why"),
    [
        ("", Course.FINISHED, "its KV node has answered"),
        ("no such node", Course.DROP, "no such node"),
        (None, Course.GO_ON, "its KV node has not answered yet"),
    ],
)
def test_what_has_ended_is_not_asked_again(failure: str | None, course: Course, why: str) -> None:
    """The journal alone knows that a node has answered: its reports do not tell of operations."""
    leader = Leader(7)
    leader.step(KvOrdered(WORKER, deployment("m"), EVICT))
    entries: list[JournalEntry] = [entry for entry in leader.entries if not isinstance(entry, StepEnded | TransactionEnded)]
    if failure is not None:
        (sent,) = [entry for entry in entries if isinstance(entry, StepSent)]
        entries.append(
            StepEnded(transaction="7-1", operation=sent.operation, at_unix_s=1.0, failure=failure, detail="9 blocks")
        )
    (resumption,) = resume(entries, leader.core.pool, leader.core.catalogue)
    assert (resumption.course, resumption.why) == (course, why)


# -------------------------------------------------------------------------------------------------------------- metrics


def node(evicted: int = 0, *, running: bool = True, **fields: int) -> KvReport:
    return KvReport(running=running, models=(KvModelReport(kv_signature="sig", evicted=evicted, **fields),))


def test_what_nodes_tell_of_a_model_is_added_up() -> None:
    """Bytes and counts are sums, the eviction rate is that between two reports (OPS-2)."""
    tiers = KvTiers()
    assert tiers.of("sig") is None
    tiers.take(0.0, WorkerId("a"), node(100, host_bytes=5, hits=7))
    tiers.take(0.0, WorkerId("b"), node(50, host_bytes=1, disk_bytes=2, misses=3))
    assert tiers.of("sig") == PoolKv(host_bytes=6, disk_bytes=2, hits=7, misses=3)
    assert tiers.of("other") is None and tiers.of("") is None
    tiers.take(2.0, WorkerId("a"), node(1100, host_bytes=5, hits=7))
    tiers.take(2.0, WorkerId("b"), node(150))
    assert tiers.of("sig") == PoolKv(host_bytes=5, hits=7, evictions_per_s=550.0)
    tiers.take(4.0, WorkerId("a"), node(1100, host_bytes=5, hits=7))
    assert tiers.of("sig") == PoolKv(host_bytes=5, hits=7, evictions_per_s=50.0)


def test_a_node_that_began_anew_or_is_gone_evicts_nothing() -> None:
    """Counts that fell are a new process's; a dead worker's share goes with it."""
    tiers = KvTiers()
    tiers.take(0.0, WorkerId("a"), node(100, host_bytes=5))
    tiers.take(1.0, WorkerId("a"), node(10, host_bytes=1))
    assert tiers.of("sig") == PoolKv(host_bytes=1)
    tiers.take(2.0, WorkerId("a"), node(running=False))
    assert tiers.of("sig") is None
    tiers.take(3.0, WorkerId("b"), node(host_bytes=1))
    tiers.forget(WorkerId("b"))
    assert tiers.of("sig") is None


def test_the_digest_carries_what_nodes_tell() -> None:
    """So that every gateway's metrics have it; a model without KV outside engines says nothing."""
    world = World(MODEL, record("n"))
    agent = world.agent(kv=True)
    world.run(1.0)
    agent.step(KvReported(node(host_bytes=7)))
    world.run(2.5)
    assert world.digest is not None
    assert {model.name: model.kv for model in world.digest.models} == {"m": PoolKv(host_bytes=7), "n": None}


def test_people_hear_of_a_node_that_is_down_or_does_without_its_disk() -> None:
    """A warning with its reason and where to look; not while it starts, and once for a while (OPS-3)."""
    world = World(MODEL)
    agent = world.agent(kv=True)
    world.run(1.0)
    assert world.alerts == []
    agent.step(KvReported(KvReport(running=False, note="it was ended by SIGKILL")))
    world.run(1.0)
    agent.step(KvReported(KvReport(running=True, note="no tier on disk: /kv is used by another process")))
    world.run(7.0)
    assert [(alert.kind, alert.scope, alert.remedy) for alert in world.alerts] == [
        ("kv-node-down", agent.worker, "carpool get kv"),
        ("kv-degraded", agent.worker, "carpool get kv"),
    ]
    assert "(it was ended by SIGKILL)" in world.alerts[0].text and "/kv is used" in world.alerts[1].text
