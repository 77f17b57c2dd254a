"""The scheduler's policy against real agent cores on a virtual clock (PAINS themes B and C, F10, F12, K4, E4)."""

from __future__ import annotations

import pytest

from broker.core.pool.events import ModelRemoved, UnloadRequested
from broker.core.pool.overrides import UNPINNED
from subjects.messages import EngineType
from tests.core.scheduler_world import World, deployment, record
from tests.core.words import pin, said

A, B, C = record("a"), record("b"), record("c")


def test_a_request_loads_its_model() -> None:
    """A request for a cold model makes the scheduler load it once, and it is served."""
    world = World(A)
    world.agent(cpu0=1.0)
    request = world.ask("a")
    world.run(5)
    assert request.ended_s is not None and not request.refusal
    assert world.load_names() == ["a"]


def test_200_waiters_are_one_load() -> None:
    """A burst of first requests wakes a model once (B6)."""
    world = World(A)
    world.agent(cpu0=4.0)
    for _ in range(200):
        world.ask("a", service_s=0.05)
    world.run(10)
    assert world.all_ended()
    assert len(world.load_commands()) == 1


def test_grouping_serves_a_b_a_a_c_a_b_c_with_three_loads() -> None:
    """Requests that alternate between three models on one slot swap at most once per model, within the bound (C2)."""
    world = World(A, B, C)
    world.agent(cpu0=1.0)
    for number, name in enumerate("abaacabc"):
        world.ask(name, delay_s=number * 0.7)
    world.run(60)
    assert world.all_ended()
    assert world.load_names() == ["a", "b", "c"]
    assert max((request.started_s or 0) - request.arrived_s for request in world.requests) < 15


def test_a_steady_majority_does_not_starve_the_minority() -> None:
    """While A is busy without end, C waits for the bound, A is drained, and C is served (C2)."""
    world = World(A, C)
    world.agent(cpu0=1.0)
    for number in range(300):
        world.ask("a", service_s=0.4, delay_s=number * 0.1)
    request = world.ask("c", delay_s=3.0)
    world.run(60)
    assert request.started_s is not None
    assert 9.5 < request.started_s - request.arrived_s < 13.0
    assert world.all_ended()
    assert all(not r.refusal and r.lost == 0 for r in world.requests)
    assert len(world.loads) <= 4


def test_a_busy_model_is_drained_before_it_leaves() -> None:
    """A long answer of A is finished before B gets A's room (C1)."""
    world = World(A, B)
    world.agent(cpu0=1.0)
    long = world.ask("a", service_s=25.0)
    other = world.ask("b", delay_s=2.0)
    world.run(60)
    assert long.lost == 0 and long.ended_s is not None
    assert other.started_s is not None and other.started_s > long.ended_s


def test_an_endless_answer_is_given_back_at_the_drain_bound() -> None:
    """A drain ends after its bound whatever runs, and the room is used (C8)."""
    world = World(A, B)
    world.agent(cpu0=1.0)
    endless = world.ask("a", service_s=10_000.0)
    other = world.ask("b", delay_s=2.0)
    world.run(60)
    assert other.ended_s is not None
    assert endless.lost == 1


def test_a_replica_that_never_drains_is_ended() -> None:
    """A replica that ignores its drain is ended after the bound, with an alert (C8)."""
    world = World(A, B)
    world.agent(cpu0=1.0)
    world.endless_drain = True
    world.ask("a", service_s=10_000.0)
    other = world.ask("b", delay_s=2.0)
    world.run(80)
    assert other.ended_s is not None
    assert "drain-overrun" in [alert.kind for alert in world.alerts]


@pytest.mark.parametrize("seed", range(20))
def test_two_cold_models_at_one_instant_are_both_served(seed: int) -> None:
    """Two cold models that arrive together for one slot are served one after the other, each loaded once."""
    world = World(A, B, seed=seed)
    world.agent(cpu0=1.0)
    world.run(world.random.random())
    first, second = world.ask("a"), world.ask("b")
    world.run(30)
    assert first.ended_s is not None and second.ended_s is not None
    assert not first.refusal and not second.refusal
    assert sorted(world.load_names()) == ["a", "b"]


def test_two_cold_models_share_a_device_that_holds_both() -> None:
    """With room for two nobody leaves, and loads on one device are serial (E4)."""
    world = World(A, B)
    world.agent(cpu0=2.0)
    world.ask("a")
    world.ask("b")
    world.run(10)
    assert world.all_ended()
    assert world.loaded() == ["a", "b"]
    assert world.unloads() == []


def test_a_broken_model_never_evicts_a_used_one() -> None:
    """A model that always fails to load is tried at most five times a minute, and A beside it stays (B8)."""
    world = World(A, record("broken"))
    world.broken.add("broken")
    world.load_times["broken"] = 0.1
    world.agent(cpu0=1.0)
    world.ask("a")
    world.run(5)
    for number in range(60):
        world.ask("a", service_s=0.3, delay_s=number)
        world.ask("broken", delay_s=number + 0.5)
    world.run(70)
    names = world.load_names()
    assert names.count("broken") <= 5
    assert names.count("a") <= 2, "only the very first attempt may have taken the room"
    refused = [request.refusal for request in world.requests if request.model == record("broken").deployment]
    assert all(refusal.startswith("loading failed") for refusal in refused)
    assert all(not r.refusal for r in world.requests if r.model == A.deployment)
    assert "load-failed" in [alert.kind for alert in world.alerts]


def test_a_victim_comes_back_when_the_newcomer_fails() -> None:
    """When the load that A was evicted for fails, A is loaded again for its waiters, and served (SCH-8)."""
    world = World(A, record("broken"))
    world.broken.add("broken")
    world.agent(cpu0=1.0)
    world.ask("a")
    world.run(10)
    world.ask("broken")
    world.run(0.5)
    again = world.ask("a")
    world.run(10)
    assert world.load_names() == ["a", "broken", "a"]
    assert again.ended_s is not None and not again.refusal


def test_a_minimum_replica_comes_back_when_the_newcomer_fails() -> None:
    """An idle model above its minimum leaves, one at its minimum never does."""
    world = World(record("kept", min_replicas=1), B)
    world.agent(cpu0=1.0)
    world.run(5)
    assert world.loaded() == ["kept"]
    request = world.ask("b")
    world.run(20)
    assert "minimum" in request.refusal
    assert world.loaded() == ["kept"]


def test_back_off_ends_with_a_new_apply() -> None:
    """Applying a model anew clears its failures at once."""
    from broker.core.pool.events import ModelApplied

    world = World(record("broken"))
    world.broken.add("broken")
    world.agent(cpu0=1.0)
    world.ask("broken")
    world.run(3)
    assert world.outlook("broken")[0]
    world.broken.clear()
    world.step(ModelApplied(record("broken", revision=2)))
    request = world.ask("broken")
    world.run(3)
    assert request.ended_s is not None and not request.refusal


def test_a_recovered_model_is_served_again() -> None:
    """A failing model is tried again after its back-off and a success clears the refusal (B9)."""
    world = World(record("broken"))
    world.broken.add("broken")
    world.agent(cpu0=1.0)
    world.ask("broken")
    world.run(3)
    world.broken.clear()
    world.run(3)
    request = world.ask("broken")
    world.run(5)
    assert request.ended_s is not None and not request.refusal
    assert world.outlook("broken") == ("", False, 0)


def test_loading_counts_as_busy() -> None:
    """A load that takes three times the keep time is not interrupted, and serves (B4)."""
    world = World(record("a", keep_s=5.0))
    world.load_times["a"] = 15.0
    world.agent(cpu0=1.0)
    request = world.ask("a")
    world.run(17)
    assert request.ended_s is not None
    assert world.load_names() == ["a"]
    world.run(25)
    assert world.loaded() == []


def test_idle_models_stay_while_nobody_needs_their_room() -> None:
    """Without an idle limit a model stays for ever."""
    world = World(A)
    world.agent(cpu0=1.0)
    world.ask("a")
    world.run(600)
    assert world.loaded() == ["a"]


def test_the_least_recently_used_model_leaves() -> None:
    """Of two idle models the one that was used longer ago makes room."""
    world = World(A, B, C)
    world.agent(cpu0=2.0)
    world.ask("a")
    world.ask("b", delay_s=1.0)
    world.ask("a", delay_s=8.0)
    world.ask("c", delay_s=20.0)
    world.run(30)
    assert world.loaded() == ["a", "c"]


def test_an_idle_model_leaves_before_a_busy_one() -> None:
    """A busy model stays although it was loaded first."""
    world = World(A, B, C)
    world.agent(cpu0=2.0)
    world.ask("a", service_s=60.0)
    world.ask("b", delay_s=5.0)
    world.ask("c", delay_s=15.0)
    world.run(30)
    assert world.loaded() == ["a", "c"]


def test_a_pinned_model_is_never_evicted() -> None:
    """A request that needs a pinned model's room is refused with a Retry-After and the pin holds (C5)."""
    world = World(record("a", pinned=True), B)
    world.agent(cpu0=1.0)
    world.ask("a")
    world.run(5)
    request = world.ask("b")
    world.run(30)
    assert request.refusal.startswith("no capacity, pinned")
    assert world.outlook("b")[1:] == (False, 30)
    assert world.loaded() == ["a"]
    assert world.unloads() == []


def test_a_persons_pin_wins_over_the_record() -> None:
    """Pinning by hand protects a model that the record does not pin (SCH-11)."""
    world = World(A, B)
    world.agent(cpu0=1.0)
    world.ask("a")
    world.run(5)
    world.step(said(pin("a")))
    request = world.ask("b")
    world.run(30)
    assert "pinned" in request.refusal and world.loaded() == ["a"]


def test_a_pin_counts_under_each_name_of_a_model() -> None:
    """Two names may share one model; the pin of either keeps it, until both are unpinned (C5)."""
    second = record("z", deployment=deployment("a"))
    world = World(A, second, B)
    world.agent(cpu0=1.0)
    world.ask("a")
    world.run(5)
    world.step(said(pin("z")))
    request = world.ask("b")
    world.run(30)
    assert "pinned" in request.refusal and world.loaded() == ["a"]
    world.step(said(pin("z", UNPINNED)))
    world.ask("b")
    world.run(60)
    assert world.loaded() == ["b"]


def test_a_model_that_can_never_fit_is_refused_at_once_with_numbers() -> None:
    """Nobody is evicted for a model that no device can hold; its clients hear the numbers."""
    world = World(A, record("huge", 3.0))
    world.agent(cpu0=2.0)
    world.ask("a")
    world.run(5)
    request = world.ask("huge")
    world.run(1)
    assert request.refusal == (
        "needs 3.0 GiB (weights 2.2 GiB + KV 384.0 MiB + overhead 384.0 MiB), largest device has 2.0 GiB"
    )
    assert world.outlook("huge")[1] is True
    assert world.loaded() == ["a"]
    assert [alert.kind for alert in world.alerts] == ["cannot-fit"]


def test_nobody_leaves_when_it_would_be_in_vain() -> None:
    """A newcomer that would not fit even beside the pinned rest evicts nobody (SCH-8)."""
    world = World(record("pinned", 1.0, pinned=True), A, record("big", 2.5))
    world.agent(cpu0=3.0)
    world.ask("pinned")
    world.ask("a")
    world.run(8)
    request = world.ask("big")
    world.run(30)
    assert "pinned" in request.refusal
    assert world.loaded() == ["a", "pinned"]


def test_one_newcomer_takes_only_the_victims_it_needs() -> None:
    """A model of 2 GiB evicts two of three idle models of 1 GiB, and the third stays."""
    world = World(A, B, C, record("big", 2.0))
    world.agent(cpu0=3.0)
    for number, name in enumerate("abc"):
        world.ask(name, delay_s=number * 3.0)
    world.run(20)
    world.ask("big")
    world.run(10)
    assert world.loaded() == ["big", "c"]


def test_a_worker_that_dies_mid_load_is_replaced() -> None:
    """A load whose worker dies goes to another worker in a few seconds, and counts as no failure (F12)."""
    world = World(A)
    first = world.agent("w1", cpu0=1.0)
    world.load_times["a"] = 3.0
    request = world.ask("a")
    world.run(1)
    assert first.replicas
    first.kill()
    world.agent("w2", cpu0=1.0)
    world.run(9)
    assert request.ended_s is not None and not request.refusal
    assert len(world.loads) == 2


def test_a_worker_that_dies_before_it_answers_is_replaced() -> None:
    """A load command that nobody answers ends elsewhere by a deadline (F12)."""
    world = World(A)
    first = world.agent("w1", cpu0=1.0)
    second = world.agent("w2", cpu0=2.0)
    first.deaf = True
    world.run(1)
    request = world.ask("a")
    world.run_until(lambda: bool(world.load_commands()), bound_s=1)
    first.kill()
    world.run(8)
    assert request.ended_s is not None
    assert [worker for _, _, worker in world.loads] == [second.worker]


def test_a_dead_workers_replicas_stay_dead() -> None:
    """A worker that was silent for long lists its old replicas in vain: they are ended and never serve again."""
    world = World(A)
    agent = world.agent(cpu0=1.0)
    world.ask("a")
    world.run(5)
    (old,) = agent.replicas
    agent.frozen_until_s = world.now_s + 4.0
    world.run(3)
    assert world.digest is not None and old in world.digest.dead
    world.run(3)
    assert world.unloads()[0].replica == old and world.unloads()[0].force
    request = world.ask("a")
    world.run(5)
    assert request.ended_s is not None and old in world.digest.dead
    assert old not in agent.replicas


def test_a_pause_of_the_scheduler_unloads_nothing() -> None:
    """After ten seconds without the scheduler nothing is unloaded, nothing is declared dead (F10)."""
    world = World(A, B)
    for number in range(5):
        world.agent(f"w{number}", cpu0=1.0)
    world.ask("a")
    world.ask("b")
    world.run(10)
    world.paused_until_s = world.now_s + 10.0
    world.run(20)
    assert world.digest is not None and world.digest.dead == ()
    assert world.unloads() == [] and len(world.loads) == 2


def test_a_pause_of_the_bus_unloads_nothing() -> None:
    """After ten seconds without the bus nothing is unloaded, nothing is declared dead, nothing is loaded again (F10)."""
    world = World(A, B)
    for number in range(5):
        world.agent(f"w{number}", cpu0=1.0)
    world.ask("a")
    world.ask("b", service_s=30.0)
    world.run(10)
    world.bus_paused_until_s = world.now_s + 10.0
    world.run(20)
    assert world.digest is not None and world.digest.dead == ()
    assert world.unloads() == [] and len(world.loads) == 2


def test_many_workers_silent_together_get_a_longer_bound() -> None:
    """Half of eight workers fall silent for six seconds: nothing is declared dead; for ten: they are."""
    world = World(A)
    agents = [world.agent(f"w{number}", cpu0=1.0) for number in range(8)]
    world.ask("a")
    world.run(5)
    for agent in agents[:4]:
        agent.frozen_until_s = world.now_s + 6.0
    world.run(10)
    assert all(worker.presence.value == "live" for worker in world.core.pool.workers.values())
    assert "mass-silence" in [alert.kind for alert in world.alerts]
    for agent in agents[:4]:
        agent.frozen_until_s = world.now_s + 10.0
    world.run(9)
    assert sum(worker.presence.value == "dead" for worker in world.core.pool.workers.values()) == 4


def test_one_silent_worker_does_not_stop_decisions_for_others() -> None:
    """A worker that never reports its devices delays the first decision a little, and later ones not at all (K5)."""
    world = World(A, B)
    world.agent("w1", cpu0=1.0)
    silent = world.agent("w2", cpu0=1.0)
    world.ask("a")
    world.run(3)
    silent.frozen_until_s = world.now_s + 1000.0
    world.run(0.5)
    request = world.ask("b")
    world.run(20)
    assert request.ended_s is not None


def test_a_model_that_was_removed_is_drained_and_unloaded() -> None:
    """What nobody applied does not stay loaded."""
    world = World(A)
    agent = world.agent(cpu0=1.0)
    running = world.ask("a", service_s=5.0)
    world.run(3)
    world.step(ModelRemoved("a"))
    world.run(10)
    assert agent.replicas == {}
    assert running.lost == 0


def test_a_person_unloads_a_model() -> None:
    """An unload by hand wins over the minimum until somebody asks for the model again (SCH-11)."""
    world = World(record("a", min_replicas=1, pinned=True))
    world.agent(cpu0=1.0)
    world.run(5)
    world.step(UnloadRequested("a"))
    world.run(10)
    assert world.loaded() == []
    world.ask("a")
    world.run(5)
    assert world.all_ended() and world.loaded() == ["a"]


def test_a_model_that_a_person_unloads_stays_away_though_a_request_runs() -> None:
    """What runs ends there and is no new demand, nor is what a gateway told before: only who waits brings the model back."""
    world = World(record("a"))
    world.agent(cpu0=1.0)
    running = world.ask("a", service_s=5.0)
    world.run(3)
    assert running.started_s is not None
    world.step(UnloadRequested("a"))
    world.run(20)
    assert world.all_ended() and running.lost == 0
    assert world.loaded() == [] and world.load_names() == ["a"]
    world.ask("a")
    world.run(5)
    assert world.all_ended() and world.loaded() == ["a"]


def test_all_waiters_leave_before_the_room_is_free() -> None:
    """When nobody waits any more once the victim is gone, the newcomer is not loaded and nothing hangs (B1)."""
    world = World(A, B)
    world.agent(cpu0=1.0)
    world.ask("a", service_s=25.0)
    world.run(2)
    request = world.ask("b")
    world.run(12)
    world.cancel(request)
    later = world.ask("a", delay_s=1.0)
    world.run(40)
    assert world.load_names() == ["a", "a"]
    assert later.ended_s is not None


def test_one_waiter_leaves_and_the_others_are_served() -> None:
    """A client that leaves a cold model's queue does not cancel the load for the rest (B1)."""
    world = World(A)
    world.agent(cpu0=1.0)
    requests = [world.ask("a") for _ in range(5)]
    world.run(0.7)
    world.cancel(requests[0])
    world.run(5)
    assert all(request.started_s is not None for request in requests[1:])
    assert len(world.loads) == 1


def test_models_go_where_their_engine_is() -> None:
    """A device of a worker without the engine is no place, however empty."""
    world = World(record("a", engine_type=EngineType.VLLM))
    world.agent("w1", cpu0=8.0)
    vllm = world.agent("w2", (EngineType.VLLM,), cpu0=1.0)
    world.ask("a")
    world.run(5)
    assert [worker for _, _, worker in world.loads] == [vllm.worker]


def test_no_worker_for_an_engine_is_a_refusal_after_a_while() -> None:
    """Requests wait for a worker to come for a while, then hear why they would wait in vain (G5)."""
    world = World(record("a", engine_type=EngineType.VLLM))
    world.agent(cpu0=8.0)
    request = world.ask("a")
    world.run(5)
    assert request.ended_s is None
    world.run(8)
    assert request.refusal == "no connected worker runs the engine vllm"
    assert world.outlook("a")[1] is False


def test_a_model_that_wants_its_device_alone_gets_it() -> None:
    """A model without co-location evicts the idle rest even where its budget would fit beside it."""
    world = World(A, record("alone", 1.0, allow_co_location=False))
    world.agent(cpu0=4.0)
    world.ask("a")
    world.run(8)
    world.ask("alone")
    world.run(10)
    assert world.loaded() == ["alone"]


def test_a_tenants_devices_are_its_own() -> None:
    """A model with a tenant is beside models of that tenant and nobody else, however much room there is (SCH-3)."""
    mine, too = record("mine", 0.5, tenant="acme"), record("too", 0.5, tenant="acme")
    world = World(record("other", 0.5), mine, too)
    world.agent(cpu0=2.0, cpu1=2.0)
    for name in ("other", "mine", "too"):
        world.ask(name)
        world.run(8)
    assert world.loaded() == ["mine", "other", "too"]
    (agent,) = world.agents
    devices = {replica.record.name: set(replica.devices) for replica in agent.replicas.values()}
    assert devices["mine"] == devices["too"] != devices["other"]


def test_persistent_waiting_adds_a_replica() -> None:
    """A model that keeps waiting beside a ready replica gets another one, up to its maximum: the place of an idle model
    where none is free, never that of a busy one."""
    for busy in (False, True):
        world = World(record("a", max_replicas=2), B)
        world.agent("w1", cpu0=1.0)
        world.agent("w2", cpu0=1.0)
        world.ask("b", service_s=60.0 if busy else 0.5)
        world.run(5)
        for number in range(400):
            world.ask("a", service_s=2.0, delay_s=number * 0.1)
        world.run(20)
        assert world.loaded() == ["a", "b" if busy else "a"]
        world.agent("w3", cpu0=1.0)
        world.run(10)
        assert world.loaded() == ["a", "a", *(["b"] if busy else [])]


def test_constant_load_does_not_oscillate() -> None:
    """Ten minutes of constant load over two models that both fit change nothing after the first loads (K4)."""
    world = World(A, B)
    world.agent(cpu0=2.0)
    for number in range(1200):
        world.ask("a", service_s=0.2, delay_s=number * 0.5)
        world.ask("b", service_s=0.2, delay_s=number * 0.5 + 0.2)
    world.run(610)
    assert world.all_ended()
    assert len(world.loads) == 2 and world.unloads() == []


def test_lost_messages_are_made_good() -> None:
    """With every fifth command, answer, event and report lost the work still gets done, each load once."""
    for seed in range(10):
        world = World(A, B, seed=seed)
        world.agent(cpu0=1.0)
        world.loss = 0.2
        world.ask("a")
        world.ask("b", delay_s=2.0)
        world.run(60)
        assert world.all_ended(), seed
        assert all(not request.refusal for request in world.requests), seed
