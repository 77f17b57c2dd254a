"""The simulator as a whole, on a pool that is done in a moment: promises that hold for every run, and cases by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from broker.core.plan.policy import Action, PoolView, ResizeReplicaKv, SetReplicaConcurrency, StopReplica
from broker.core.requests.demand import DemandLedger
from broker.core.scheduler import SchedulerCore
from ops.simulator import control, queueing, world
from ops.simulator.control import Control
from ops.simulator.metrics import Meter, quantile, summarise
from ops.simulator.options import Patience, RunOptions
from ops.simulator.replicas import SimReplica
from ops.simulator.run import Run, merge, run
from ops.simulator.types import GB, LoadLadder, Window, Workload
from ops.simulator.world import World
from profiles.features import OutputLengths
from subjects.messages import SlaClass
from tests.sim.small_pool import LARGE, MIDDLE, SMALL, WINDOW, Scripted, drawn, given, small_workload, start
from workers.core import pulling
from workers.core.agent import AgentCore

EXACT = RunOptions(error_sigma=0.0, bus_s=0.0)
"""Devices as their profile says, messages without delay."""


def moving() -> Scripted:
    """Shares a device, moves a model, spans two devices, changes budgets: something of everything."""

    def squeeze(view: PoolView) -> tuple[Action, ...]:
        replica = view.models[SMALL.deployment].replicas[0].replica
        return (
            ResizeReplicaKv(replica, 8 * GB, "told to"),
            SetReplicaConcurrency(replica, 16, "told to"),
        )

    def leave(view: PoolView) -> tuple[Action, ...]:
        return (StopReplica(view.models[MIDDLE.deployment].replicas[0].replica, "told to", interrupt=True),)

    return Scripted(
        (0.0, start(SMALL, 0, kv_bytes=20 * GB)),
        (0.0, start(MIDDLE, 0, kv_bytes=20 * GB)),
        (5.0, start(MIDDLE, 0)),  # There is no room for that.
        (8.0, squeeze),
        (12.0, leave),
        (12.0, start(MIDDLE, 1)),
        (15.0, start(SMALL, 2)),
        (20.0, start(MIDDLE, 0, kv_bytes=20 * GB, victims=(SMALL,))),
    )


def busy(seed: int = 1) -> tuple[Workload, Run]:
    """A few hundred requests while all that happens."""
    workload = small_workload(drawn((8.0, 6.0)), models=(SMALL, MIDDLE))
    return workload, run(workload, moving(), seed, WINDOW)


def test_the_same_seed_gives_the_same_digest_and_another_seed_another() -> None:
    """To the nanosecond for every request."""
    _, first = busy()
    _, second = busy()
    _, other = busy(seed=2)
    assert first.result == second.result
    assert first.result.digest != other.result.digest
    assert first.result.switches == 3, "two more loads began in the warm-up"


def test_every_request_ends_exactly_once() -> None:
    """What arrives is finished or refused, in order of its times, and nothing runs or waits at the end."""
    workload, done = busy()
    trace = workload.trace(1, WINDOW)
    inside = (trace.arrival_s >= WINDOW.begin_s) & (trace.arrival_s < WINDOW.end_s)
    result = done.result
    assert sum(m.requests for m in result.models.values()) == int(inside.sum())
    assert all(m.succeeded + m.refused == m.requests for m in result.models.values())
    assert result.extra["unfinished"] == 0
    assert result.extra["interrupted"] > 0
    assert result.success == 1.0
    assert (done.measured.ttft_s > 0).all()
    assert (done.measured.tpot_s[done.measured.output_tokens > 1] > 0).all()


class Watched(World):
    """Checks the memory of devices whenever a replica comes or changes."""

    fullest = 0

    def _check(self) -> None:
        for device in self.devices:
            used = sum(
                -(-(self.models[r.model].weights_bytes + r.kv_bytes) // self.models[r.model].gpus)
                for r in self.replicas.values()
                if device in r.devices
            )
            assert used <= self.workload.pool.device_bytes
            self.fullest = max(self.fullest, used)

    def spawn(self, *args: object) -> SimReplica:
        """Then all budgets fit."""
        replica = super().spawn(*args)  # type: ignore[arg-type]
        self._check()
        return replica

    def resize(self, replica: SimReplica, kv_bytes: int) -> None:
        """Then all budgets fit."""
        super().resize(replica, kv_bytes)
        self._check()


def test_budgets_never_exceed_a_device() -> None:
    """Whatever is decided, and although a policy here asks for more than there is."""
    workload = small_workload(drawn((8.0, 6.0)), models=(SMALL, MIDDLE))
    options = RunOptions()
    watched = Watched(workload, workload.trace(1, WINDOW), 1, 0.0, options)
    policy = moving()
    Control(watched, policy, Meter(workload, WINDOW, 10, options.tick_s)).start()
    watched.run(60.0)
    assert 52 * GB < watched.fullest <= 72 * GB
    assert watched.ended == len(watched.arrival_s)
    assert sum(watched.running) == 0
    assert all(row.waiting == row.running == 0 for row in watched.ledger.take(60.0))


def test_gpu_hours_and_utilisation_by_hand() -> None:
    """One replica held from 3 s on, and of its 20 measured seconds one request of 2 s in it works."""
    decode_s = 8.8e-3 + 98e-6
    workload = small_workload(given((12.0, 0, 1000, 200)), models=(MIDDLE,), devices=2, window=Window(0.0, 5.0, 25.0))
    done = run(workload, Scripted((3.0, start(MIDDLE, 0))), 1, workload.windows[0], options=EXACT).result
    assert done.gpu_hours == pytest.approx(20 / 3600)
    assert (done.gpus_owned, done.switches) == (1, 0)
    prefill_s = 8.8e-3 + 22.6e-6 * 1000 + 2e-10 * 1000 * 1000
    assert done.ttft_p50 == pytest.approx(prefill_s)
    mean_context = sum(range(1001, 1200)) / 199
    assert done.tpot_p99 == pytest.approx(decode_s + 65e-9 * mean_context)
    assert done.utilisation == pytest.approx((prefill_s + 199 * done.tpot_p99) / 20)
    assert 0 < done.useful_utilisation < done.utilisation


def test_a_replica_counts_from_its_load_to_the_end_of_its_process() -> None:
    """Loading from 1 s, drained from 8 s on: it holds its request until 9.8 s or so, and leaves 0.1 s later."""

    def stop(view: PoolView) -> tuple[Action, ...]:
        return (StopReplica(view.models[MIDDLE.deployment].replicas[0].replica, "told to"),)

    workload = small_workload(given((7.0, 0, 10, 300)), models=(MIDDLE,), window=Window(0.0, 0.0, 20.0))
    done = run(workload, Scripted((1.0, start(MIDDLE, 0)), (8.0, stop)), 1, workload.windows[0], options=EXACT)
    end_s = 7.0 + float(done.measured.ttft_s[0]) + 299 * float(done.measured.tpot_s[0])
    assert done.result.gpu_hours * 3600 == pytest.approx(end_s + 0.1 - 1.0)
    assert 9.0 < end_s < 10.5


def test_a_replica_over_four_devices_holds_them_all() -> None:
    """And runs at the pace of its slowest one; a device of another node would not do."""
    workload = small_workload(given((5.0, 0, 100, 2)), models=(LARGE,), devices=4, window=Window(0.0, 0.0, 10.0))
    options = RunOptions(bus_s=0.0)
    done = run(workload, Scripted((2.0, start(LARGE, 0, 1, 2, 3))), 3, workload.windows[0], options=options)
    assert done.result.gpu_hours * 3600 == pytest.approx(32.0)
    factor = max(World(workload, workload.trace(3, WINDOW), 3, 0.0, options).factors[0])
    assert done.result.ttft_p50 == pytest.approx((11.0e-3 + 44.6e-6 * 100) * factor)
    apart = replace(workload, pool=replace(workload.pool, devices_per_node=2))
    none = run(apart, Scripted((2.0, start(LARGE, 0, 1, 2, 3))), 3, apart.windows[0], options=options)
    assert none.result.gpu_hours == 0.0


def test_co_residents_share_their_device_while_both_have_work() -> None:
    """Two equal requests at once on one device: each takes 2 / 0.97 as long as alone."""
    window = Window(0.0, 0.0, 30.0)
    twin = replace(MIDDLE, name="twin")
    models = (MIDDLE, twin)
    both = small_workload(given((10.0, 0, 100, 50), (10.0, 1, 100, 50)), models=models, devices=1, window=window)
    policy = Scripted((0.0, start(MIDDLE, 0, kv_bytes=10 * GB)), (0.0, start(twin, 0, kv_bytes=10 * GB)))
    shared = run(both, policy, 1, window, options=EXACT).measured
    one = small_workload(given((10.0, 0, 100, 50)), models=models, devices=1, window=window)
    alone = run(one, Scripted((0.0, start(MIDDLE, 0))), 1, window, options=EXACT).measured
    assert shared.ttft_s == pytest.approx([float(alone.ttft_s[0]) * 2 / 0.97] * 2)
    assert shared.tpot_s == pytest.approx([float(alone.tpot_s[0]) * 2 / 0.97] * 2)


def test_moving_a_device_takes_the_drain_the_end_and_the_load() -> None:
    """The time from a decision to its first effect and to the ready replica are told apart."""
    workload = small_workload(given((9.9, 0, 10, 100)), models=(SMALL, MIDDLE), devices=1, window=Window(0.0, 5.0, 30.0))
    policy = Scripted((0.0, start(SMALL, 0)), (10.0, start(MIDDLE, 0, victims=(SMALL,))))
    options = replace(EXACT, bus_s=0.05)
    done = run(workload, policy, 1, workload.windows[0], options=options)
    drained_s = 9.9 + float(done.measured.ttft_s[0]) + 99 * float(done.measured.tpot_s[0])
    assert done.result.decision_to_effect_s == pytest.approx(0.05)
    # To the agent and back twice, and once more for the load.
    decided_s = 10.05
    assert done.result.resource_move_s == pytest.approx(drained_s - decided_s + 0.1 + 3.0 + 4 * 0.05, abs=0.06)
    assert done.result.switches == 1


def test_who_is_interrupted_goes_on_with_the_tokens_already_sent() -> None:
    """The request goes back to its queue, is prefilled again with what was made, and its first token stays the first."""

    def leave(view: PoolView) -> tuple[Action, ...]:
        return (StopReplica(view.models[MIDDLE.deployment].replicas[0].replica, "told to", interrupt=True),)

    window = Window(0.0, 0.0, 60.0)
    workload = small_workload(given((10.0, 0, 100, 400)), models=(MIDDLE,), devices=2, window=window)
    calm = run(workload, Scripted((0.0, start(MIDDLE, 0))), 1, window, options=EXACT)
    policy = Scripted((0.0, start(MIDDLE, 0)), (12.0, leave), (12.0, start(MIDDLE, 1)))
    moved = run(workload, policy, 1, window, options=EXACT)
    assert moved.result.extra["interrupted"] == 1
    assert moved.measured.ttft_s[0] == calm.measured.ttft_s[0]
    longer_s = 399 * float(moved.measured.tpot_s[0] - calm.measured.tpot_s[0])
    again_s = 22.6e-6 * 300  # About 300 tokens are computed again, in the one step that also makes a token.
    assert longer_s == pytest.approx(3.0 + again_s, abs=0.05), "the load of the new replica, and that"


def test_cold_loads_share_their_nodes_link() -> None:
    """Two loads of 60 s begun together take 120 s; one whose weights were kept in host memory takes 3 s again."""

    def again(view: PoolView) -> tuple[Action, ...]:
        return start(SMALL, 2)(view)

    window = Window(0.0, 0.0, 300.0)
    ladder = LoadLadder(all_warm=False)
    workload = small_workload(given(), models=(SMALL, MIDDLE), window=window, ladder=ladder)
    policy = Scripted((0.0, start(SMALL, 0)), (0.0, start(MIDDLE, 1)), (150.0, again))
    done = run(workload, policy, 1, window, options=EXACT)
    assert sorted(done.measured.moves_s) == pytest.approx([3.0, 120.0, 120.0])
    tight = small_workload(given(), models=(SMALL, MIDDLE), window=window, ladder=ladder, host_bytes=17 * GB)
    policy = Scripted((0.0, start(SMALL, 0)), (70.0, start(MIDDLE, 1)), (140.0, again))
    done = run(tight, policy, 1, window, options=EXACT)
    assert done.measured.moves_s == pytest.approx([60.0, 60.0, 60.0]), "the second has taken the first one's place"
    policy = Scripted((0.0, start(SMALL, 0)), (0.0, start(MIDDLE, 1)), cold_loads=True)
    warm = small_workload(given(), models=(SMALL, MIDDLE), window=window)
    done = run(warm, policy, 1, window, options=EXACT)
    assert done.measured.moves_s == pytest.approx([60.0, 60.0]), "a policy that always loads from afar"


def test_impatient_clients_come_again() -> None:
    """One gives up twice and fails, the others are served by the replica that comes meanwhile; each counts once."""
    window = Window(0.0, 0.0, 60.0)
    workload = small_workload(given((1.0, 0, 10, 5), (4.5, 0, 10, 5), (10.0, 0, 10, 5)), models=(SMALL,), window=window)
    options = replace(EXACT, patience=Patience(wait_s=2.0, tries_max=2))
    done = run(workload, Scripted((5.0, start(SMALL, 0))), 1, window, options=options)
    assert done.result.extra["retries"] == 2
    assert [bool(r) for r in done.measured.refused] == [True, False, False]
    assert done.measured.ttft_s[1] == pytest.approx(3.5, abs=0.05), "from its first arrival"
    assert done.result.models["small"].succeeded == 2


def test_nobody_waits_for_ever() -> None:
    """A request that no replica takes is refused at its bound, and says so."""
    window = Window(0.0, 0.0, 10.0)
    workload = small_workload(given((1.0, 0, 10, 5)), models=(SMALL,), window=window)
    done = run(workload, Scripted(), 1, window, options=replace(EXACT, max_wait_s=20.0))
    assert (done.result.refused, done.result.success, done.result.slo_all) == (1.0, 0.0, 0.0)
    assert np.isinf(done.measured.ttft_s[0])


def test_classes_take_turns_by_weight() -> None:
    """Of gold and bronze that wait together gold gets the greater part of the first places; without fairness nobody does."""
    asks = tuple((1.0 + number / 1000, 0, 3000, 2) for number in range(40))
    classes = tuple(int(number % 2) * 2 for number in range(40))
    assert (queueing.CLASSES[0], queueing.CLASSES[2]) == (SlaClass.GOLD, SlaClass.BRONZE)
    window = Window(0.0, 0.0, 30.0)
    workload = small_workload(given(*asks, sla_class=classes), models=(replace(SMALL, ttft_s=60.0),), window=window)

    def mean_s(fair: bool) -> tuple[float, float]:
        policy = Scripted((1.5, start(SMALL, 0)))
        done = run(workload, policy, 1, window, options=replace(EXACT, fair=fair)).measured
        gold = np.array(classes) == 0
        return float(done.ttft_s[gold].mean()), float(done.ttft_s[~gold].mean())

    gold_s, bronze_s = mean_s(fair=True)
    assert bronze_s - gold_s > 0.3
    gold_s, bronze_s = mean_s(fair=False)
    assert abs(bronze_s - gold_s) < 0.1


def test_a_request_too_late_for_its_target_lets_others_pass() -> None:
    """The production gateway's rule (0009): who waited for the load is late anyway, who comes then is not."""
    asks = [(0.5 + number / 100, 0, 4000, 2) for number in range(40)] + [(4.0, 0, 100, 2)]
    window = Window(0.0, 0.0, 30.0)
    workload = small_workload(given(*asks), models=(SMALL,), window=window)
    done = run(workload, Scripted((0.6, start(SMALL, 0))), 1, window, options=EXACT).measured
    assert done.ttft_s[-1] < 0.5
    assert float(done.ttft_s[:-1].min()) > 3.0


def test_a_policy_sees_what_the_pool_told() -> None:
    """Its view is made by the scheduler from telemetry and snapshots: arrivals by length, replicas with their budgets."""
    window = Window(0.0, 0.0, 10.0)
    asks = ((4.0, 0, 100, 20), (4.01, 0, 1000, 20), (4.02, 0, 4000, 20))
    workload = small_workload(given(*asks), models=(SMALL,), window=window)
    policy = Scripted((0.0, start(SMALL, 1, kv_bytes=10 * GB)))
    run(workload, policy, 1, window, options=EXACT)
    arrivals = [view.models[SMALL.deployment].arrivals for view in policy.views]
    assert [sum(counts) for counts in zip(*(a.requests for a in arrivals), strict=True)] == [1, 1, 1]
    assert sum(a.input_tokens[2] for a in arrivals) == 4000
    (replica,) = policy.views[-1].models[SMALL.deployment].replicas
    assert replica.devices == (list(policy.views[-1].devices)[1],)
    assert (replica.kv_bytes, replica.kv_pages) == (10 * GB, 10 * GB // (131_072 * 16))
    assert sum(view.models[SMALL.deployment].within_slo for view in policy.views) == 3
    busy_s = [device.busy_s for device in policy.views[-1].devices.values()]
    assert busy_s[1] > 0.1
    assert busy_s[0] == 0.0


def test_windows_merge_exactly() -> None:
    """Quantiles are of all requests together, device time adds up."""
    windows = (Window(0.0, 5.0, 20.0), Window(100.0, 105.0, 120.0))
    workload = replace(small_workload(drawn((10.0,)), models=(SMALL,)), windows=windows)
    parts = [run(workload, Scripted((0.0, start(SMALL, 0)), (100.0, start(SMALL, 0))), 1, w) for w in windows]
    both = merge(parts).result
    ttft_s = np.concatenate([part.measured.ttft_s for part in parts])
    assert both.models["small"].requests == len(ttft_s) == sum(p.result.models["small"].requests for p in parts)
    assert both.ttft_p99 == quantile(ttft_s, 0.99)
    assert both.gpu_hours == pytest.approx(sum(part.result.gpu_hours for part in parts))
    assert merge(parts[:1]).result == summarise(parts[0].measured) == parts[0].result
    with pytest.raises(ValueError, match="one workload, policy and seed"):
        merge([parts[0], run(workload, Scripted(), 2, windows[1])])


def test_the_lines_over_time_are_bounded() -> None:
    """As many points as asked for at most, and they show what happened."""
    workload = small_workload(drawn((5.0,)), models=(SMALL,))
    done = run(workload, Scripted((4.0, start(SMALL, 0))), 1, WINDOW, options=RunOptions(series_points_max=20))
    (series,) = done.series
    assert 15 <= len(series.time_s) <= 20
    assert (series.gpus[0], series.gpus[-1], series.ready[-1]) == (0, 1, [1])
    assert any(coming == [1] for coming in series.coming)
    assert 0.0 < series.utilisation[-1] <= 1.0


def test_it_runs_the_production_cores() -> None:
    """What decides, counts and pulls here is what does so in a real pool."""
    assert (vars(control)["SchedulerCore"], vars(control)["AgentCore"]) == (SchedulerCore, AgentCore)
    assert (vars(world)["DemandLedger"], vars(world)["OutputLengths"]) == (DemandLedger, OutputLengths)
    assert vars(world)["room_for"] is pulling.room_for
