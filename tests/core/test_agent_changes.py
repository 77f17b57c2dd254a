"""The agent core with replicas over several devices, blocks, changes of KV, sleep and wake."""

from __future__ import annotations

from typing import Any

import pytest

from subjects.ids import DeviceId, ReplicaId
from subjects.messages import (
    CostPoint,
    CostsMeasured,
    DeviceKind,
    LoadModel,
    ModelRecord,
    ReplicaState,
    ResizeKv,
    SetConcurrency,
    SleepReplica,
    StepSums,
    WakeReplica,
)
from tests.core.test_agent import (
    ACCEPTED,
    INFO,
    REFUSED,
    WORKER,
    Harness,
    died,
    ended,
    kill,
    progressed,
    record,
    replies,
    reply,
    send,
)
from workers.control_messages import (
    Changed,
    Concurrency,
    Drained,
    Load,
    Measured,
    Progress,
    Ready,
    Resize,
    Sleep,
    Stop,
    Wake,
)
from workers.core.agent import CHANGE_S_MAX, WAKE_S_MAX, AgentCore
from workers.core.agent_events import AgentCommand, AgentSettings, Device, PublishEvent, SpawnReplica, Ticked
from workers.engines.base import EngineInfo

GPUS = tuple(DeviceId(f"gpu{index}") for index in range(4))
ABLE = EngineInfo(4, 64, 16, 2048, gives_token_ids=True, continues=True, resizes_kv=True, sleeps=True)


class Linked(Harness):
    """Four linked devices of 100 bytes, and one that is linked with nothing."""

    def __init__(self, *, needs_blocks: bool = False) -> None:
        super().__init__()
        devices = [
            Device(gpu, DeviceKind.GPU, "g", 100, device_type="h100-80gb", link="nv0", needs_blocks=needs_blocks)
            for gpu in GPUS
        ]
        devices.append(Device(DeviceId("lone"), DeviceKind.GPU, "g", 100))
        engines = (record().engine_type,)
        self.core = AgentCore(AgentSettings(worker=WORKER, host="h", devices=tuple(devices), engines=engines))
        self.feed(Ticked())

    def span(self, name: str, *devices: DeviceId, budget_bytes: int = 40, gpus: int | None = None) -> list[AgentCommand]:
        """A load over these devices."""
        spanning: ModelRecord = record(budget_bytes, gpus=gpus if gpus is not None else len(devices))
        return self.command(
            LoadModel(
                operation=self.operation(),
                epoch=1,
                device=devices[0],
                peers=devices[1:],
                record=spanning,
                replica_name=name,
            )
        )

    def charged(self) -> list[int]:
        """What each linked device is charged."""
        return [self.core.reserved_bytes(gpu) for gpu in GPUS]


def able(h: Harness, name: str = "r", **fields: Any) -> ReplicaId:
    """A ready replica whose engine offers everything."""
    values: dict[str, Any] = {"weights_bytes": 10, "kv_bytes": 20, "overhead_bytes": 10, "kv_bytes_per_token": 1}
    h.load(name, **(values | fields))
    h.spawned(f"{name}-0")
    h.says(f"{name}-0", Progress(state=ReplicaState.WARMING), Ready(info=ABLE))
    return ReplicaId(f"{name}-0")


# ----------------------------------------------------------------------------------------------------- several devices


def test_a_replica_is_charged_on_each_of_its_devices() -> None:
    """From the load's acceptance to the exit of its process, and reported with its peers (SCH-3)."""
    h = Linked()
    assert [type(command) for command in h.span("r", GPUS[1], GPUS[2])][2] is SpawnReplica
    assert h.charged() == [0, 40, 40, 0]
    report = h.report("r-0")
    assert report is not None and (report.device, report.peers, report.budget_bytes) == (GPUS[1], (GPUS[2],), 40)
    h.spawned("r-0")
    h.exited("r-0", -9)
    assert h.charged() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("devices", "gpus", "detail"),
    [
        ((GPUS[0], DeviceId("gpu9")), 2, "there is no device gpu9; this worker has gpu0, gpu1, gpu2, gpu3, lone"),
        ((GPUS[0], GPUS[0]), 2, "a device is named twice among gpu0, gpu0"),
        ((GPUS[0],), 2, "m spans 2 devices, the command names 1"),
        ((GPUS[0], GPUS[1]), 1, "m spans 1 devices, the command names 2"),
        ((GPUS[0], DeviceId("lone")), 2, "the devices gpu0, lone are not linked with each other"),
        ((GPUS[0], GPUS[3]), 2, "m needs 40 bytes on gpu3; 30 of 100 bytes are free"),
    ],
)
def test_devices_that_cannot_be_had_together_are_refused(devices: tuple[DeviceId, ...], gpus: int, detail: str) -> None:
    """All or nothing: no device is charged by a load that is refused."""
    h = Linked()
    h.span("full", GPUS[3], budget_bytes=70)
    assert replies(h.span("r", *devices, gpus=gpus)) == [(REFUSED, detail)]
    assert h.charged() == [0, 0, 0, 70]


def test_loads_are_serial_on_every_device_in_the_order_they_were_accepted() -> None:
    """A wide one waits for both devices, and what came after it on one of them waits for it; others go on."""
    h = Linked()

    def begun(commands: list[AgentCommand]) -> list[str]:
        return [command.replica for command in commands if isinstance(command, SpawnReplica)]

    assert begun(h.span("a", GPUS[0])) == ["a-0"]
    assert begun(h.span("wide", GPUS[0], GPUS[1])) == []
    assert begun(h.span("b", GPUS[1])) == [] and begun(h.span("c", GPUS[2])) == ["c-0"]
    h.spawned("a-0")
    ready = (Progress(state=ReplicaState.WARMING), Ready(info=INFO))
    assert begun(h.says("a-0", *ready)) == ["wide-0"]
    h.spawned("wide-0")
    assert begun(h.says("wide-0", *ready)) == ["b-0"]


def test_a_device_with_arenas_gives_a_replica_one_run_of_addresses() -> None:
    """What is left in pieces is free and yet not to be had; freed neighbours join (SCH-1)."""
    h = Linked(needs_blocks=True)
    for name, budget_bytes in (("a", 30), ("b", 30), ("c", 30)):
        h.span(name, GPUS[0], budget_bytes=budget_bytes)
    h.unload("a-0", force=True)
    h.spawned("a-0")
    h.exited("a-0", -9)
    h.unload("c-0", force=True)
    device = next(d for d in h.core.snapshot(h.now_s).devices if d.device == GPUS[0])
    assert (device.reserved_bytes, device.contiguous_free_bytes) == (30, 40)
    detail = "m needs 50 bytes in one block on gpu0; the largest free one has 40 of 70 free bytes"
    assert replies(h.span("d", GPUS[0], budget_bytes=50)) == [(REFUSED, detail)]
    assert replies(h.span("e", GPUS[0], budget_bytes=40)) == [(ACCEPTED, "")]
    assert replies(h.span("f", GPUS[0], budget_bytes=30)) == [(ACCEPTED, "")]
    assert h.core.snapshot(h.now_s).devices[1].contiguous_free_bytes == 100


def test_a_name_is_not_given_twice_while_its_replica_lives() -> None:
    """A successor that repeats a load it cannot know of gets no second replica (SCH-8)."""
    h = Linked()
    h.span("r", GPUS[0])
    assert replies(h.span("r", GPUS[1])) == [(REFUSED, "replica_name r: such a replica is here already")]
    h.spawned("r-0")
    h.exited("r-0", 1)
    assert h.state("r-0") is ReplicaState.FAILED
    h.after(60)
    assert replies(h.span("r", GPUS[1])) == [(ACCEPTED, "")]


# ------------------------------------------------------------------------------------------------------------- KV


def resize(h: Harness, kv_bytes: int, replica: str = "r-0") -> list[AgentCommand]:
    return h.command(ResizeKv(operation=h.operation(), epoch=1, replica=ReplicaId(replica), kv_bytes=kv_bytes))


def test_a_kv_budget_grows_and_shrinks() -> None:
    """Charged is the larger of the two until the replica has answered; the report shows what holds (SCH-8)."""
    h = Harness()
    able(h)
    assert resize(h, 50) == [reply("op2", ACCEPTED), send("r-0", Resize(number=1, kv_bytes=50))]
    assert h.core.reserved_bytes(DeviceId("cpu0")) == 70
    assert replies(resize(h, 10)) == [(REFUSED, "replica r-0 is being changed")]
    assert h.says("r-0", Changed(number=1, kv_pages=160)) == [ended("op2", "r-0")]
    report = h.report("r-0")
    assert report is not None and (report.kv_bytes, report.kv_pages, report.budget_bytes) == (50, 160, 70)
    assert resize(h, 10)[1] == send("r-0", Resize(number=2, kv_bytes=10))
    assert h.core.reserved_bytes(DeviceId("cpu0")) == 70
    assert h.says("r-0", Changed(number=1, kv_pages=1)) == [], "an answer to what was asked before"
    assert h.says("r-0", Changed(number=2, kv_pages=32)) == [ended("op4", "r-0")]
    assert h.core.reserved_bytes(DeviceId("cpu0")) == 30


def test_what_requests_hold_is_known_through_changes_of_the_budget() -> None:
    """Down and up between two reports that say the same: a stale count of free pages would look like requests for ever."""
    h = Harness()
    able(h)
    h.says("r-0", Load(running=1, waiting=0, kv_pages_free=62))
    for number, (kv_bytes, pages) in enumerate([(10, 16), (50, 160), (40, 2), (50, 160)], start=1):
        resize(h, kv_bytes)
        h.says("r-0", Changed(number=number, kv_pages=pages))
        report = h.report("r-0")
        assert report is not None and (report.kv_pages, report.kv_pages_free) == (pages, pages - 2)


def test_a_kv_budget_that_does_not_fit_is_refused() -> None:
    """By the device's room, by the replica's state, by the number itself."""
    h = Harness()
    able(h)
    able(h, "s")
    assert replies(resize(h, 41)) == [(REFUSED, "m needs 21 more bytes on cpu0; 20 bytes are free")]
    assert replies(resize(h, 0)) == [(REFUSED, "kv_bytes 0: must be positive")]
    assert replies(resize(h, 5, "x-0")) == [(REFUSED, "replica x-0 is not here")]
    h.drain("s-0")
    assert replies(resize(h, 5, "s-0")) == [(REFUSED, "replica s-0 is draining; only a ready one takes this")]


def test_a_change_that_fails_changes_nothing() -> None:
    """The replica's reason ends the operation; one that never answers keeps the larger budget charged."""
    h = Harness()
    able(h)
    resize(h, 50)
    failure = "5 pages are in use, only 2 would be left"
    assert h.says("r-0", Changed(number=1, failure=failure)) == [ended("op2", "r-0", failure)]
    assert h.core.reserved_bytes(DeviceId("cpu0")) == 40
    resize(h, 50)
    unanswered = f"the replica did not answer within {CHANGE_S_MAX:g} s"
    assert ended("op3", "r-0", unanswered, took_s=CHANGE_S_MAX) in h.after(CHANGE_S_MAX)
    assert h.core.reserved_bytes(DeviceId("cpu0")) == 70 and h.state("r-0") is ReplicaState.READY
    resize(h, 60)
    death = "the process was ended by SIGKILL while ready"
    assert h.exited("r-0", -9) == [died("r-0", death), ended("op4", "r-0", death)]


def test_slots_are_lowered_end_to_end() -> None:
    """The replica is told and the report shows it; the engine's own number is the most."""
    h = Harness()
    able(h)
    told = h.command(SetConcurrency(operation=h.operation(), epoch=1, replica=ReplicaId("r-0"), slots=2))
    assert told == [reply("op2", ACCEPTED), send("r-0", Concurrency(slots=2)), ended("op2", "r-0")]
    report = h.report("r-0")
    assert report is not None and report.slots == 2


# --------------------------------------------------------------------------------------------------------- sleep and wake


def sleep(h: Harness, replica: str = "r-0") -> list[AgentCommand]:
    return h.command(SleepReplica(operation=h.operation(), epoch=1, replica=ReplicaId(replica)))


def wake(h: Harness, replica: str = "r-0") -> list[AgentCommand]:
    return h.command(WakeReplica(operation=h.operation(), epoch=1, replica=ReplicaId(replica)))


def asleep() -> Harness:
    """A replica that has drained and sleeps."""
    h = Harness()
    able(h)
    h.drain()
    h.says("r-0", Drained())
    assert sleep(h) == [reply("op3", ACCEPTED), send("r-0", Sleep(number=1, level=1))]
    assert h.says("r-0", Changed(number=1)) == [ended("op3", "r-0")]
    return h


def test_a_sleeping_replica_is_charged_its_overhead_alone() -> None:
    """Its room is free for others, and whoever takes it keeps it from waking (SCH-8)."""
    h = asleep()
    report = h.report("r-0")
    assert report is not None and (report.state, report.budget_bytes, report.kv_bytes) == (ReplicaState.ASLEEP, 10, 0)
    h.load("s", budget_bytes=80)
    assert replies(wake(h)) == [(REFUSED, "m needs 30 more bytes on cpu0; 10 bytes are free")]


def test_a_replica_wakes_by_a_load_of_its_own() -> None:
    """Charged at once, serial with other loads, warmed, and ready as after its first load (WRK-3)."""
    h = asleep()
    h.load("s", budget_bytes=40)
    h.spawned("s-0")
    assert wake(h) == [reply("op5", ACCEPTED)]
    assert h.core.reserved_bytes(DeviceId("cpu0")) == 80
    begun = h.says("s-0", Progress(state=ReplicaState.WARMING), Ready(info=INFO))
    assert begun[-2:] == [send("r-0", Wake()), progressed("op5", "r-0", ReplicaState.LOADING, "waking")]
    h.now_s += 1
    h.says("r-0", Progress(state=ReplicaState.WARMING))
    assert h.says("r-0", Ready(info=ABLE)) == [ended("op5", "r-0", took_s=1.0)]
    assert h.state("r-0") is ReplicaState.READY
    assert replies(h.unload()) == [(REFUSED, "replica r-0 is ready and has not drained; drain it or use force")]


def test_only_a_drained_replica_sleeps_and_only_a_sleeping_one_wakes() -> None:
    """Else running requests would be lost."""
    h = Harness()
    able(h)
    assert replies(sleep(h)) == [(REFUSED, "replica r-0 is ready and has not drained; drain it first")]
    assert replies(wake(h)) == [(REFUSED, "replica r-0 is ready; only one that sleeps can wake")]


def test_a_sleeping_replica_can_be_unloaded() -> None:
    """It is asked to stop, and its budget is free when its process is gone."""
    h = asleep()
    assert h.unload() == [reply("op4", ACCEPTED), send("r-0", Stop())]
    assert h.exited("r-0") == [ended("op4", "r-0")]
    assert h.core.reserved_bytes(DeviceId("cpu0")) == 0


def test_a_sleep_or_wake_that_hangs_ends_the_replica() -> None:
    """Nobody knows what such a process holds."""
    h = Harness()
    able(h)
    h.drain()
    h.says("r-0", Drained())
    sleep(h)
    assert kill("r-0") in h.after(CHANGE_S_MAX)
    assert h.state("r-0") is ReplicaState.FAILED
    h = asleep()
    wake(h)
    assert kill("r-0") in h.after(WAKE_S_MAX)
    assert h.state("r-0") is ReplicaState.FAILED


# --------------------------------------------------------------------------------------------------------------- busy time


def test_devices_report_how_long_steps_ran_there() -> None:
    """Summed over the engines on a device, and over all devices of a wide one (SCH-6)."""
    h = Linked()
    h.span("r", GPUS[0], GPUS[1])
    h.span("s", GPUS[2])
    for replica in ("r-0", "s-0"):
        h.spawned(replica)
        h.says(replica, Progress(state=ReplicaState.WARMING), Ready(info=INFO))
    h.says("r-0", Load(running=1, waiting=0, kv_pages_free=9, busy_s=1.5, preemptions=2, step_s=0.02))
    h.says("r-0", Load(running=1, waiting=0, kv_pages_free=9, busy_s=2.0, preemptions=3, step_s=0.02))
    h.says("s-0", Load(running=1, waiting=0, kv_pages_free=9, busy_s=0.5))
    assert [device.busy_s for device in h.core.snapshot(h.now_s).devices] == [2.0, 2.0, 0.5, 0.0, 0.0]
    report = h.report("r-0")
    assert report is not None and (report.preemptions, report.step_s) == (3, 0.02)
    device = h.core.snapshot(h.now_s).devices[0]
    assert (device.device_type, device.link, device.contiguous_free_bytes) == ("h100-80gb", "nv0", None)


def test_points_are_marked_that_were_taken_beside_a_neighbour() -> None:
    """PRO-4: what a replica measured is told with its kind of device and engine; work on a device that it spans marks it,
    and so does a load there."""
    h = Linked()
    assert [command.measure for command in h.span("r", GPUS[0], GPUS[1]) if isinstance(command, SpawnReplica)] == [False]
    h.span("s", GPUS[1])
    h.spawned("r-0")
    h.says("r-0", Progress(state=ReplicaState.WARMING), Ready(info=INFO))
    points = (CostPoint(batch=1, input_tokens=8, sums=StepSums(steps=1, busy_s=0.1)),)

    def told() -> CostsMeasured:
        (event,) = [command.event for command in h.says("r-0", Measured(points=points)) if isinstance(command, PublishEvent)]
        assert isinstance(event, CostsMeasured)
        return event

    assert told().points[0].beside, "its neighbour loads"
    h.spawned("s-0")
    h.says("s-0", Progress(state=ReplicaState.WARMING), Ready(info=INFO))
    event = told()
    assert (event.replica, event.device_type, event.points) == ("r-0", "h100-80gb", points)
    h.says("s-0", Load(running=1, waiting=0, kv_pages_free=9))
    assert told().points[0].beside
