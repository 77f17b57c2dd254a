"""Costs that plans go by: given, measured, estimated, corrected; what is measured next, and what is kept (PRO-4)."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from broker.core.plan.costs import SERVER, Account, CostBook, Source
from broker.core.plan.tunables import CORRECTION_MAX, DEVIATION_S, MEASURED_BATCH_MAX
from broker.core.pool.events import (
    BeatSeen,
    KeepCosts,
    LeadershipGained,
    OperationSeen,
    PublishDigest,
    RaiseAlert,
    RegistryLoaded,
    SchedulerCommand,
    SchedulerEvent,
    SchedulerSettings,
    Ticked,
    WorkerReported,
)
from broker.core.pool.state import Pool
from broker.core.scheduler import SchedulerCore
from profiles.costs import fit_costs, knee, median_error, nonnegative, sequences, sums_between, sums_of, work_s
from profiles.estimate import SIMULATED, WITHOUT_DEVICE, estimate, kind_figures
from subjects.ids import DeviceId, ReplicaId, WorkerId
from subjects.messages import (
    CostPoint,
    CostsMeasured,
    DeviceKind,
    DeviceReport,
    EngineType,
    KeptCosts,
    Lane,
    LoadModel,
    ModelDemand,
    ModelRecord,
    ReplicaReport,
    ReplicaState,
    SlaClass,
    StepCosts,
    StepSums,
    WorkerSnapshot,
)
from tests.core.scheduler_world import record
from tests.core.test_placement import commands, listed, settled

H100 = "h100-80gb"
TRUE = StepCosts(
    prefill_token_s=4e-5, prefill_token2_s=2e-9, step_const_s=0.012, step_request_s=2e-4, step_context_token_s=1e-7
)
WORKER = WorkerId("w-1")
ENGINE = "vllm-0.32.0"


def model(**fields: Any) -> ModelRecord:
    """8B in bf16."""
    return record("m", engine_type=EngineType.VLLM, weights_bytes=16 * 10**9, parameters=8 * 10**9, **fields)


def work(batch: int, tokens: int, *, decodes: bool, steps: int = 10, costs: StepCosts = TRUE, off: float = 1.0) -> StepSums:
    """Steps of a batch, and the time that they take by ``costs``, times ``off``."""
    if decodes:
        sums = StepSums(steps=steps, requests=steps * batch, context_tokens=steps * batch * tokens)
    else:
        sums = StepSums(steps=1, prompt_tokens=batch * tokens, prompt_tokens2=batch * tokens * tokens)
    return msgspec.structs.replace(sums, busy_s=off * work_s(costs, sums))


def point(batch: int, tokens: int, *, decodes: bool, beside: bool = False, off: float = 1.0) -> CostPoint:
    """A measurement."""
    sums = work(batch, tokens, decodes=decodes, off=off)
    return CostPoint(batch=batch, input_tokens=tokens, decodes=decodes, beside=beside, sums=sums)


GRID = tuple(
    point(batch, tokens, decodes=decodes) for batch in (1, 4, 8) for tokens in (64, 512, 2048) for decodes in (False, True)
)


class Stage:
    """A book over a pool of one worker with one device, whose replicas are as the test says."""

    def __init__(self, *records: ModelRecord, kinds: tuple[str, ...] = (H100,), version: str = "0.32.0") -> None:
        self.pool = Pool(SchedulerSettings())
        self.book = CostBook(self.pool)
        self.records = {one.deployment: one for one in records}
        self.kinds = kinds
        self.version = version
        self.sums = StepSums()
        self.sequence = 0
        self.now_s = 0.0
        self.tell(replicas=0)

    def snapshot(self, *, replicas: int = 1, neighbour: bool = False) -> WorkerSnapshot:
        """What the worker reports now."""
        self.sequence += 1
        one = next(iter(self.records.values()))
        devices = tuple(
            DeviceReport(
                device=DeviceId(f"gpu{index}"),
                kind=DeviceKind.GPU,
                memory_bytes=80 * 10**9,
                reserved_bytes=0,
                device_type=kind,
            )
            for index, kind in enumerate(self.kinds)
        )
        reports = [
            ReplicaReport(
                replica=ReplicaId(f"m-{index}"),
                deployment=one.deployment,
                model_hash=one.model_hash,
                device=DeviceId("gpu0"),
                state=ReplicaState.READY,
                budget_bytes=1,
                sums=self.sums if index == 0 else None,
                running=0 if index == 0 else int(neighbour),
            )
            for index in range(replicas + neighbour)
        ]
        return WorkerSnapshot(
            worker=WORKER,
            sequence=self.sequence,
            epoch_seen=0,
            engines=(EngineType.VLLM,),
            engine_versions={"vllm": self.version},
            devices=devices,
            replicas=tuple(reports),
        )

    def tell(self, *, replicas: int = 1, neighbour: bool = False) -> list[tuple[ModelRecord, str, Account]]:
        """The worker's report, heard by pool and book."""
        snapshot = self.snapshot(replicas=replicas, neighbour=neighbour)
        self.pool.report(self.now_s, snapshot)
        return self.book.observe(self.now_s, snapshot, self.records)

    def run(self, steps: int, off: float, *, neighbour: bool = False) -> list[tuple[ModelRecord, str, Account]]:
        """So many steps of a batch of 4, a hundred a second, which take ``off`` times what ``TRUE`` says."""
        news = []
        for _ in range(steps // 100):
            self.now_s += 1.0
            self.sums = sums_of(self.sums, work(4, 500, decodes=True, steps=100, off=off))
            news += self.tell(neighbour=neighbour)
        return news

    def event(self, *points: CostPoint, whole: bool = False) -> CostsMeasured:
        """What a replica measured."""
        one = next(iter(self.records.values()))
        return CostsMeasured(
            worker=WORKER,
            replica=ReplicaId("m-0"),
            deployment=one.deployment,
            model_hash=one.model_hash,
            device_type=H100,
            engine=ENGINE,
            points=points,
            whole=whole,
        )

    def whole(self, record: ModelRecord) -> bool:
        """Whether all points are known."""
        kept = self.book.rows(record)[0].account.kept
        return kept is not None and kept.whole

    def measured(self, *points: CostPoint, whole: bool = False) -> KeptCosts | None:
        """The same, heard by the book."""
        one = next(iter(self.records.values()))
        return self.book.measured(self.now_s, self.event(*points, whole=whole), one)


# --------------------------------------------------------------------------------------------------------------- fitting


def test_a_fit_finds_what_made_the_points() -> None:
    """Eighteen points of true costs: the fit is off by next to nothing where it was measured, and by little elsewhere."""
    prior = estimate(model(kv_bytes_per_token=131_072), kind_figures(H100))
    found = fit_costs(GRID, prior)
    assert median_error(found, [one.sums for one in GRID]) < 0.01
    assert median_error(found, [work(16, 1000, decodes=True), work(2, 4000, decodes=False)]) < 0.06
    assert min(msgspec.structs.astuple(found)) >= 0


def test_two_points_scale_the_estimate() -> None:
    """One prompt and one batch size are enough to be right at their like; the rest follows the estimate's proportions."""
    prior = StepCosts(prefill_token_s=2e-5, step_const_s=0.006, step_request_s=1e-4, step_context_token_s=5e-8)
    found = fit_costs(GRID[:2], prior)
    assert median_error(found, [one.sums for one in GRID[:2]]) < 0.05
    assert found.step_request_s == pytest.approx(TRUE.step_request_s, rel=0.3)
    assert fit_costs((), prior) == prior


def test_disturbed_points_pull_no_more_than_others() -> None:
    """One that took ten times as long, and three that were taken beside a neighbour, leave the fit where it was."""
    prior = estimate(model(), kind_figures(H100))
    slow = point(1, 512, decodes=False, off=10.0)
    beside = tuple(point(batch, 512, decodes=True, beside=True, off=1.8) for batch in (1, 4, 8))
    found = fit_costs((*GRID, slow, *beside), prior)
    assert median_error(found, [one.sums for one in GRID]) < 0.02


def test_no_coefficient_is_negative() -> None:
    """A column that would have to be negative is left out, and an empty one gets nothing."""
    rows = [[1.0, 1.0, 0.0], [1.0, 2.0, 0.0], [1.0, 3.0, 0.0]]
    assert nonnegative(rows, [3.0, 2.0, 1.0]) == pytest.approx([1.0, 0.0, 0.0], abs=0.02)
    assert nonnegative([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]], [3.0, 5.0, 9.0]) == pytest.approx([1.0, 2.0])


def test_sums_and_the_knee() -> None:
    """What was done between two moments; half of all tokens per second come at a batch of 12 ms over 0.3 ms."""
    one, other = work(1, 10, decodes=True), work(4, 100, decodes=False)
    assert sums_between(one, sums_of(one, other)).prompt_tokens == 400
    assert sums_of(one, other, 1.0).busy_s == pytest.approx(one.busy_s + other.busy_s + 1.0)
    assert knee(TRUE, 1000) == pytest.approx(0.012 / 0.0003)
    assert knee(StepCosts(prefill_token_s=1.0, step_const_s=1.0), 1000) == math.inf
    assert math.isnan(median_error(TRUE, []))


# --------------------------------------------------------------------------------------------------------------- sources


def test_every_kind_here_has_costs() -> None:
    """What the file does not give is estimated for each kind of device with the engine; the record is the same object until
    something changes, and the file's own one where it gives all."""
    one = model(costs={H100: TRUE})
    stage = Stage(one, kinds=(H100, "l4-24gb"))
    filled = stage.book.filled(one)
    assert filled.costs[H100] == TRUE and filled.costs["l4-24gb"].step_const_s > TRUE.step_const_s
    assert stage.book.filled(one) is filled
    assert Stage(one).book.filled(one) is one


def test_a_model_whose_engine_is_nowhere_has_no_costs() -> None:
    """Nothing here runs a simulated engine: no plan can be made with it."""
    stage = Stage(model())
    assert stage.book.filled(record("s")).costs == {}
    assert stage.book.costs_of(record("s"), H100) == (SIMULATED, Source.GIVEN)


def test_what_is_measured_is_gone_by_and_scales_other_kinds() -> None:
    """From estimated to measured by the first points; on another kind the estimate is scaled by how far it was off."""
    one = model()
    stage = Stage(one, kinds=(H100, "h200-141gb"))
    guess, source = stage.book.costs_of(one, H100)
    elsewhere, _ = stage.book.costs_of(one, "h200-141gb")
    assert source is Source.ESTIMATED
    kept = stage.measured(*GRID, whole=True)
    assert kept is not None and kept.whole and kept.engine == ENGINE
    costs, source = stage.book.costs_of(one, H100)
    assert source is Source.MEASURED and costs.step_const_s == pytest.approx(TRUE.step_const_s, rel=0.05)
    there, source = stage.book.costs_of(one, "h200-141gb")
    assert source is Source.ESTIMATED
    assert there.step_const_s / elsewhere.step_const_s == pytest.approx(costs.step_const_s / guess.step_const_s)


def test_the_file_wins_over_measurements() -> None:
    """``resources.costs`` overrides, and nothing is measured for it."""
    one = model(costs={H100: TRUE})
    stage = Stage(one)
    stage.measured(*(point(1, 64, decodes=decodes, off=3.0) for decodes in (False, True)))
    assert stage.book.costs_of(one, H100) == (TRUE, Source.GIVEN)
    stage.tell()
    assert stage.book.to_measure(0.0, stage.records) == {}
    assert not stage.book.to_load(one, WORKER, DeviceId("gpu0"))


def test_another_round_of_a_point_counts_with_the_first() -> None:
    """Equal points add up; one taken beside a neighbour gives way to one that was not, and never the other way round."""
    stage = Stage(model())
    stage.measured(point(1, 64, decodes=True, beside=True, off=2.0))
    stage.measured(point(1, 64, decodes=True))
    stage.measured(point(1, 64, decodes=True, beside=True, off=2.0))
    kept = stage.measured(point(1, 64, decodes=True))
    assert kept is not None
    (only,) = kept.points
    assert not only.beside and only.sums.steps == 20
    assert stage.measured() is None


def test_servers_are_known_by_their_answers() -> None:
    """An engine behind a URL costs plans next to nothing; its times follow from first tokens and further ones."""
    one = record("m", engine_type=EngineType.OPENAI_HTTP)
    stage = Stage(one)
    row = ModelDemand(
        deployment=one.deployment,
        model_hash=one.model_hash,
        sla_class=SlaClass.SILVER,
        lane=Lane.SMALL,
        finished=4,
        input_tokens=4000,
        output_tokens=404,
        ttft_s_sum=2.0,
        latency_s_sum=10.0,
    )
    (before,) = stage.book.rows(one)
    assert before.costs == WITHOUT_DEVICE and before.device_type == SERVER
    stage.book.served([row, row], stage.records)
    (after,) = stage.book.rows(one)
    assert after.source is Source.MEASURED
    assert (after.costs.prefill_token_s, after.costs.step_const_s) == pytest.approx((0.0005, 0.02))
    assert stage.book.costs_of(one, H100)[0] == WITHOUT_DEVICE


# ------------------------------------------------------------------------------------------------------------- correction


def test_steps_correct_an_estimate() -> None:
    """Steps that take 1.3 times of what was measured: plans hear of it in time, the error is told and then small again."""
    one = model()
    stage = Stage(one)
    stage.measured(*GRID, whole=True)
    before = stage.book.news
    stage.tell()
    stage.run(4000, 1.1)
    costs, source = stage.book.costs_of(one, H100)
    assert source is Source.MEASURED and costs.step_const_s == pytest.approx(1.1 * TRUE.step_const_s, rel=0.05)
    assert stage.book.news > before
    (row,) = stage.book.rows(one)
    assert (
        row.error < 0.05
        and row.account.correction == pytest.approx(1.1, abs=0.06)
        and 1000 <= row.account.window_steps <= 1100
    )


def test_a_lasting_deviation_asks_for_a_new_measurement() -> None:
    """PRO-4: more than 15 % for a minute. It is told once; new points then replace the old ones."""
    one = model()
    stage = Stage(one)
    stage.measured(*GRID, whole=True)
    stage.tell()
    assert stage.book.to_measure(stage.now_s, stage.records) == {}
    assert stage.run(3000, 1.4) == []
    news = stage.run(int(100 * DEVIATION_S), 1.4)
    assert [(record.name, kind) for record, kind, _ in news] == [("m", H100)]
    assert stage.book.to_measure(stage.now_s, stage.records) == {"m-0": MEASURED_BATCH_MAX}
    assert stage.book.costs_of(one, H100)[1] is Source.CORRECTED
    again = stage.measured(point(1, 64, decodes=True, off=1.4), point(1, 64, decodes=False, off=1.4))
    assert again is not None and len(again.points) == 2 and not again.whole
    assert stage.book.costs_of(one, H100)[1] is Source.MEASURED
    assert stage.book.rows(one)[0].account.correction == 1.0


def test_a_deviation_that_measuring_cannot_explain_is_asked_about_once() -> None:
    """Points that say what they said before leave the last word to the steps; another deviation asks again."""
    one = model()
    stage = Stage(one)
    stage.measured(*GRID, whole=True)
    stage.tell()
    assert len(stage.run(15_000, 1.4)) == 1
    stage.measured(*GRID)
    stage.measured(whole=True)
    assert stage.run(30_000, 1.4) == []
    assert stage.book.to_measure(stage.now_s, stage.records) == {}
    assert stage.book.costs_of(one, H100)[1] is Source.CORRECTED
    assert len(stage.run(15_000, 2.0)) == 1


def test_neighbours_measure_one_after_the_other_and_count_as_company() -> None:
    """Two models on one device: the second is asked when the first has all its points, or found none."""
    one = model()
    other = msgspec.structs.replace(record("n", engine_type=EngineType.VLLM), weights_bytes=10**9)
    stage = Stage(one, other)

    def tell() -> None:
        snapshot = stage.snapshot(replicas=2)
        first, second = snapshot.replicas
        second = msgspec.structs.replace(second, deployment=other.deployment, model_hash=other.model_hash)
        stage.pool.report(stage.now_s, msgspec.structs.replace(snapshot, replicas=(first, second)))
        stage.book.observe(stage.now_s, msgspec.structs.replace(snapshot, replicas=(first, second)), stage.records)

    tell()
    assert stage.book.to_measure(0.0, stage.records) == {"m-0": MEASURED_BATCH_MAX}
    stage.book.profile(0.0, other.deployment, 5.0, 32)
    assert stage.book.to_measure(0.0, stage.records) == {"m-1": 32}
    for _ in range(20):
        stage.now_s += 1.0
        stage.sums = sums_of(stage.sums, work(4, 500, decodes=True, steps=100, off=1.4))
        tell()
    assert stage.book.rows(one)[0].account.window_steps == 0
    assert stage.measured(whole=True) is None
    assert stage.book.to_measure(9.0, stage.records) == {"m-1": MEASURED_BATCH_MAX}


def test_engines_of_two_versions_are_measured_once_each() -> None:
    """A rolling upgrade: plans go by what was measured last, and neither wipes the points of the other."""
    one = model()
    stage = Stage(one)
    stage.measured(*GRID, whole=True)
    new = msgspec.structs.replace(stage.event(*GRID[:4], whole=True), engine="vllm-0.33.0")
    stage.now_s = 5.0
    assert stage.book.measured(stage.now_s, new, one) is not None
    for version in ("0.32.0", "0.33.0"):
        stage.version = version
        stage.tell()
        assert stage.book.to_measure(6.0, stage.records) == {}
        assert not stage.book.to_load(one, WORKER, DeviceId("gpu0"))
    kept = stage.book.rows(one)[0].account.kept
    assert kept is not None and kept.engine == "vllm-0.33.0"
    again = stage.measured(*GRID[:2])
    assert again is not None and len(again.points) == len(GRID)


def test_a_deviation_that_passes_asks_for_nothing() -> None:
    """Half a minute of slow steps, then none."""
    stage = Stage(model())
    stage.measured(*GRID, whole=True)
    stage.tell()
    assert stage.run(3000, 1.4) + stage.run(9000, 1.0) == []
    assert stage.book.to_measure(stage.now_s, stage.records) == {}


def test_a_correction_is_bounded_and_neighbours_do_not_count() -> None:
    """Steps that take a hundred times as long correct by four at most; steps beside a working neighbour by nothing."""
    one = model()
    stage = Stage(one)
    stage.measured(*GRID, whole=True)
    stage.tell()
    stage.run(3000, 100.0, neighbour=True)
    assert stage.book.costs_of(one, H100)[1] is Source.MEASURED
    stage.run(10_000, 100.0)
    assert stage.book.rows(one)[0].account.correction == pytest.approx(CORRECTION_MAX, rel=0.05)


def test_a_replica_that_begins_anew_counts_from_there() -> None:
    """Sums that are less than before are of another life; few steps wait for more."""
    one = model()
    stage = Stage(one)
    stage.tell()
    stage.run(1000, 1.0)
    stage.sums = work(1, 10, decodes=True, steps=3)
    stage.tell()
    stage.sums = sums_of(stage.sums, work(1, 10, decodes=True, steps=3))
    stage.tell()
    assert stage.book.rows(one)[0].account.window_steps == 1000


# -------------------------------------------------------------------------------------------------- what is measured, kept


def test_one_replica_measures_until_all_points_are_taken() -> None:
    """Before it serves when nobody has, with this version of the engine; then one of them in idle moments."""
    one = model()
    stage = Stage(one)
    assert stage.book.to_load(one, WORKER, DeviceId("gpu0"))
    stage.tell(replicas=2)
    assert stage.book.to_measure(0.0, stage.records) == {"m-0": MEASURED_BATCH_MAX}
    stage.measured(*GRID[:2])
    assert not stage.book.to_load(one, WORKER, DeviceId("gpu0"))
    assert stage.book.to_measure(0.0, stage.records) == {"m-0": MEASURED_BATCH_MAX}
    stage.measured(*GRID[2:])
    stage.measured(whole=True)
    assert stage.book.to_measure(0.0, stage.records) == {}
    stage.version = "0.33.0"
    stage.tell(replicas=2)
    assert stage.book.to_load(one, WORKER, DeviceId("gpu0"))
    assert stage.book.to_measure(0.0, stage.records) == {"m-0": MEASURED_BATCH_MAX}


def test_whole_curves_are_measured_while_somebody_asks() -> None:
    """A profile goes on for as long as it is asked for, from a fresh start, and ends by itself."""
    one = model()
    stage = Stage(one)
    stage.measured(*GRID, whole=True)
    stage.tell()
    stage.book.profile(10.0, one.deployment, 5.0, 32)
    assert stage.book.to_measure(12.0, stage.records) == {"m-0": 32}
    assert not stage.whole(one)
    stage.measured(whole=True)
    assert stage.whole(one)
    stage.book.profile(13.0, one.deployment, 5.0, 32)
    assert stage.whole(one), "asked again in time it is the same profile"
    assert stage.book.to_measure(19.0, stage.records) == {}


def test_what_was_kept_is_known_again() -> None:
    """A fresh book with the kept entries answers as the old one; older entries change nothing."""
    one = model()
    stage = Stage(one)
    stage.book.unix_offset_s = 1000.0
    kept = stage.measured(*GRID, whole=True)
    assert kept is not None and kept.at_unix_s == 1000.0
    later = Stage(one)
    later.book.restore((msgspec.structs.replace(kept, at_unix_s=1.0, points=GRID[:2]), kept))
    later.book.restore((msgspec.structs.replace(kept, at_unix_s=2.0, points=GRID[:2]),))
    assert later.book.costs_of(one, H100) == stage.book.costs_of(one, H100)
    assert not later.book.to_load(one, WORKER, DeviceId("gpu0"))


def test_a_scheduler_tells_who_measures_and_keeps_what_came() -> None:
    """The digest asks one replica until it has all; a leader orders what came to be kept; a deviation is told."""
    one = model()
    stage = Stage(one)
    core = SchedulerCore(SchedulerSettings(listen_s=0.0), None)
    stage.pool, stage.book = core.pool, core.costs
    events: list[SchedulerEvent] = [RegistryLoaded((one,)), LeadershipGained(1), Ticked(1000.0)]
    told: list[int] = []

    def step(event: SchedulerEvent) -> list[SchedulerCommand]:
        commands = core.step(stage.now_s, event)
        told.extend(
            row.measure for command in commands if isinstance(command, PublishDigest) for row in command.digest.replicas
        )
        return commands

    for event in events:
        step(event)
    stage.sums = work(1, 10, decodes=True)
    step(BeatSeen(WORKER, 0))
    step(WorkerReported(stage.snapshot()))
    stage.now_s += 2.0
    step(Ticked(1002.0))
    assert told[-1] == MEASURED_BATCH_MAX
    kept = [command for command in step(OperationSeen(stage.event(*GRID, whole=True))) if isinstance(command, KeepCosts)]
    assert len(kept) == 1 and kept[0].kept.whole and kept[0].kept.at_unix_s == pytest.approx(1002.0)
    stage.now_s += 2.0
    step(Ticked(1004.0))
    assert told[-1] == 0
    alerts = []
    for _ in range(120):
        stage.now_s += 1.0
        stage.sums = sums_of(stage.sums, work(4, 500, decodes=True, steps=100, off=1.5))
        step(BeatSeen(WORKER, 0))
        commands = step(WorkerReported(stage.snapshot())) + step(Ticked(1000.0 + stage.now_s))
        alerts += [command.alert.kind for command in commands if isinstance(command, RaiseAlert)]
    assert alerts.count("costs-deviate") == 1
    assert told[-1] == MEASURED_BATCH_MAX


def test_absurd_numbers_say_nothing() -> None:
    """What no engine can mean is dropped: negative counts, and times that are no number."""
    one = model()
    stage = Stage(one)
    for sums in (StepSums(steps=1, busy_s=math.nan), StepSums(steps=1, busy_s=math.inf), StepSums(steps=-1, busy_s=1.0)):
        assert stage.measured(CostPoint(batch=1, input_tokens=1, sums=sums)) is None
    stage.tell()
    for busy_s in (math.nan, math.inf, -1.0):
        stage.sums = StepSums(steps=stage.sums.steps + 1000, requests=1, busy_s=busy_s)
        stage.tell()
    assert stage.book.costs_of(one, H100)[1] is Source.ESTIMATED and stage.book.rows(one)[0].account.window_steps == 0


def test_steps_that_take_no_time_are_planned_too() -> None:
    """Of an engine that answers at once, or a file that says 0: the plan divides by costs, and the model is loaded."""
    free = StepCosts(prefill_token_s=0.0, step_const_s=0.0, step_request_s=0.0)
    bench = settled(record("a", 0.5, costs={"": free, "cpu": free}))
    bench.report()
    (load,) = commands(bench.demand(a=0.2))
    assert isinstance(load, LoadModel) and load.record.name == "a"


@pytest.mark.parametrize(("kind", "seats"), [(DeviceKind.CPU, 8), (DeviceKind.GPU, 64)])
def test_how_many_run_at_once_follows_the_kind_of_device(kind: DeviceKind, seats: int) -> None:
    """Where the model's file says nothing; what it says holds on any."""
    silent = record("a", max_num_seqs=0)
    assert (sequences(silent, kind), sequences(record("a", max_num_seqs=3), kind)) == (seats, 3)


def test_seats_are_those_that_engines_were_started_with() -> None:
    """In a pool of CPUs and GPUs a record says what a GPU takes, and a CPU's replica takes fewer."""
    bench = settled(record("a", max_num_seqs=0, engine_type=EngineType.VLLM))
    bench.report(msgspec.structs.replace(listed("a"), slots=8, slots_max=8))
    view = next(iter(bench.core.views.build(bench.now_s).models.values()))
    assert (view.seats, view.replicas[0].slots_max) == (8, 8)
