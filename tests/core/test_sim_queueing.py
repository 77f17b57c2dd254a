"""Queues of the simulator, and which replica takes a request."""

from __future__ import annotations

from math import inf

from ops.simulator.engine import Engine, Sequence
from ops.simulator.queueing import BATCH, CLASSES, Live, ModelQueue
from ops.simulator.replicas import SimReplica, least_loaded
from subjects.ids import ModelHash, ReplicaId, Tenant
from subjects.messages import Endpoint, RequestProfile, SlaClass, StepCosts
from workers.core.pulling import BACKLOG_TOKENS_MAX


def live(index: int, sla_class: SlaClass = SlaClass.SILVER, *, since_s: float = 0.0, input_tokens: int = 10) -> Live:
    """A request of ten pages."""
    profile = RequestProfile(
        model_hash=ModelHash("ab" * 32),
        endpoint=Endpoint.CHAT,
        tenant=Tenant("t"),
        sla_class=sla_class,
        max_tokens=9,
        input_tokens=input_tokens,
        expected_output_tokens=4,
        kv_pages_needed=10,
        deadline_unix_s=0.0,
    )
    return Live(index, 0, profile, 20, since_s)


def served(queue: ModelQueue, count: int, now_s: float = 0.0) -> list[int]:
    """The next ones, by index."""
    order = []
    for _ in range(count):
        one = queue.next(now_s)
        if one is None:
            break
        queue.take(one)
        order.append(one.index)
    return order


def test_first_come_first_served_and_who_comes_back_is_first() -> None:
    """Within one class."""
    queue = ModelQueue()
    for index in (1, 2, 3):
        queue.put(live(index))
    queue.put_back(live(0))
    assert (queue.count, served(queue, 9), queue.count) == (4, [0, 1, 2, 3], 0)


def test_classes_share_turns_by_their_weights() -> None:
    """Eight to four to two to one by default, as replicas pull; other weights change that."""
    queue = ModelQueue()
    for index in range(400):
        queue.put(live(index, CLASSES[index % 4]))
    first = [index % 4 for index in served(queue, 150)]
    assert [first.count(c) for c in range(4)] == [80, 40, 20, 10]
    queue = ModelQueue()
    queue.set_weights({"gold": 1, "silver": 1, "bronze": 1})
    for index in range(400):
        queue.put(live(index, CLASSES[index % 4]))
    first = [index % 4 for index in served(queue, 100)]
    assert [first.count(c) for c in range(4)] == [25, 25, 25, 25]


def test_who_is_too_late_goes_behind_the_others() -> None:
    """To the end of the batch class, once it is its turn."""
    queue = ModelQueue()
    late, intime = live(0), live(1)
    late.yields_s, intime.yields_s = 5.0, inf
    queue.put(late)
    queue.put(intime)
    one = queue.next(6.0)
    assert one is intime
    assert (late.queue_class, late.yields_s) == (BATCH, inf)
    assert served(queue, 2, 6.0) == [1, 0]


def test_who_has_waited_too_long_is_found_behind_those_that_ran() -> None:
    """A request that was interrupted waits anew, at the head."""
    queue = ModelQueue()
    again = live(0, since_s=50.0)
    again.made = 3
    for one in (live(1, since_s=10.0), live(2, since_s=30.0), live(3, since_s=10.0)):
        queue.put(one)
    queue.put_back(again)
    assert [one.index for one in queue.late(20.0)] == [1], "behind one in time nobody has waited longer"
    queue.remove(queue.late(20.0)[0])
    assert queue.count == 3


def replica(number: int, *, held: int = 0, weight: float = 1.0, kv_pages: int = 100, backlog: int = 0) -> SimReplica:
    """One that holds this much."""
    engine = Engine(StepCosts(prefill_token_s=1e-4, step_const_s=0.01), kv_pages=kv_pages)
    made = SimReplica(number, ReplicaId(f"r{number}"), 0, (), engine, 0)
    made.held = held
    made.weight = weight
    if backlog:
        engine.add(0.0, Sequence(0, backlog, 1))
    return made


def test_the_least_loaded_replica_with_room_takes_it() -> None:
    """By requests and tokens not computed yet, over its weight; one of weight zero takes nothing."""
    one, two = replica(1, held=3), replica(2, held=2)
    assert least_loaded([one, two], live(0)) is two
    one.weight = 2.0
    assert least_loaded([one, two], live(0)) is one
    assert least_loaded([replica(1, weight=0.0), two], live(0)) is two
    assert least_loaded([replica(1, backlog=600), two], live(0)) is two
    assert least_loaded([replica(1), replica(2)], live(0)).number == 1  # type: ignore[union-attr]  # one has room


def test_a_replica_without_room_takes_nothing() -> None:
    """No slot, no pages, too much not computed yet, or a KV cache that could never hold it."""
    full = replica(1)
    full.held = full.slots
    assert least_loaded([full], live(0)) is None
    busy = replica(1, kv_pages=1000, backlog=BACKLOG_TOKENS_MAX)
    assert least_loaded([busy], live(0)) is None
    taken = replica(1)
    taken.pages_taken = 91
    assert least_loaded([taken], live(0)) is None
    assert least_loaded([replica(1, kv_pages=2)], live(0, input_tokens=13)) is None
    assert least_loaded([replica(1, kv_pages=2)], live(0, input_tokens=12)) is not None, "it may take all pages there are"
