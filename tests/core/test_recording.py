"""A recording replayed through a fresh core gives the same commands; anything else is shown (issue B, SCH-8)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from broker.core.plan.coordinator import Coordinator
from broker.core.plan.policy import Decision, Policy, PoolView, StartReplica, StopReplica
from broker.core.pool.events import (
    LeadershipGained,
    LeadershipLost,
    RegistryLoaded,
    Resign,
    SchedulerCommand,
    SchedulerEvent,
    SchedulerSettings,
    UnloadRequested,
)
from broker.core.scheduler import SchedulerCore
from broker.scheduler.recording import Recorder, replay
from subjects.errors import ConfigError
from tests.core.scheduler_world import World, record

SETTINGS = SchedulerSettings(drain_s=20.0)
MEGABYTE = 1 << 20


class Turns:
    """A policy with a memory of its own: each model in turn, wherever there is room."""

    name = "turns"

    def __init__(self) -> None:
        self.turn = 0

    def decide(self, now_s: float, view: PoolView) -> Decision:
        models = list(view.models.values())
        self.turn += 1
        model = models[self.turn // 5 % len(models)]
        device = next(iter(view.devices.values()), None)
        if device is None:
            return Decision()
        stops = [StopReplica(r.replica, "its turn is over") for m in models if m is not model for r in m.replicas]
        starts = [] if model.replicas else [StartReplica(model.record.deployment, (device.key,), f"turn {self.turn}")]
        return Decision(actions=(*stops[:1], *starts), notes={model.record.deployment: f"turn {self.turn}"})


def make_policy(name: str) -> Policy:
    """Those that the tests here record."""
    return Turns() if name == "turns" else Coordinator()


def history(path: Path, *, seed: int = 1, policy: str = "rules", bytes_max: int = 100 * MEGABYTE) -> Recorder:
    """Some time of a pool with too little room, a broken model, losses, a death and a person."""
    recorder = Recorder(path, policy=policy, settings=SETTINGS, bytes_max=bytes_max)
    names = "abcd"
    records = tuple(record(name, gib) for name, gib in zip(names, (1.0, 0.5, 1.0, 0.5), strict=True))
    world = World(*records, seed=seed, settings=SETTINGS)
    fresh = SchedulerCore(SETTINGS, make_policy(policy))
    whole = fresh.step

    def step(now_s: float, event: SchedulerEvent) -> list[SchedulerCommand]:
        commands = whole(now_s, event)
        recorder.step(now_s, event, commands)
        return commands

    fresh.step = step  # type: ignore[method-assign]
    world.core = fresh
    world.broken.add("d")
    world.loss = 0.05
    world.agent("w", cpu0=1.0, cpu1=1.0)
    doomed = world.agent("v", cpu0=1.0)
    world.step(RegistryLoaded(records))
    world.step(LeadershipGained(1))
    rng = random.Random(seed)
    for _ in range(50):
        world.ask(rng.choice(names), service_s=rng.choice((0.2, 2.0)), delay_s=rng.uniform(0, 20))
    world.later(10.0, doomed.kill)
    world.later(15.0, lambda: world.step(UnloadRequested("a")))
    world.run(26.0)
    return recorder


@pytest.mark.parametrize("policy", ["rules", "turns"])
def test_a_replay_orders_the_same(tmp_path: Path, policy: str) -> None:
    """Every command of every step, with and without a policy that remembers."""
    path = tmp_path / "decisions.rec"
    history(path, policy=policy).close()
    found = replay(path, make_policy)
    assert found.differences == []
    assert found.runs == 1 and found.steps > 700 and found.orders > 8 and found.commands > found.orders


def test_a_difference_is_shown_and_ends_its_run(tmp_path: Path) -> None:
    """Another policy decides otherwise: the step, the event, and the orders of both."""
    path = tmp_path / "decisions.rec"
    history(path, policy="turns").close()
    history(path, seed=2).close()
    found = replay(path, lambda _name: Coordinator())
    (difference,) = found.differences
    assert (found.runs, difference.run) == (2, 1)
    assert difference.recorded != difference.replayed
    assert any('"load-model"' in order for order in difference.recorded_orders + difference.replayed_orders)


def test_a_scheduler_that_was_killed_goes_on_in_the_same_file(tmp_path: Path) -> None:
    """What was cut off is dropped, a new run is begun, and both are replayed."""
    path = tmp_path / "decisions.rec"
    history(path).close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    history(path, seed=3).close()
    found = replay(path, make_policy)
    assert (found.runs, found.differences) == (2, [])
    path.write_bytes(whole[:-7])
    assert replay(path, make_policy).steps > 700


def test_a_recording_is_bounded(tmp_path: Path) -> None:
    """It ends at its bound with whole records, and the scheduler goes on."""
    path = tmp_path / "decisions.rec"
    recorder = history(path, bytes_max=MEGABYTE // 4)
    assert 0.9 * MEGABYTE / 4 < path.stat().st_size <= MEGABYTE / 4
    recorder.step(1.0, LeadershipLost(), [])
    recorder.flush()
    recorder.close()
    found = replay(path, make_policy)
    assert found.differences == [] and found.steps > 100


def test_a_full_disk_ends_the_recording_alone(tmp_path: Path) -> None:
    """Not the scheduler (PAINS L8)."""
    recorder = Recorder(tmp_path / "decisions.rec", policy="rules", settings=SETTINGS, bytes_max=MEGABYTE)
    assert recorder._file is not None
    recorder._file.close()
    recorder._file = Path("/dev/full").open("wb")  # noqa: SIM115 - the recorder closes it
    recorder.step(1.0, LeadershipLost(), [Resign("the file is full at the next flush")])
    recorder.step(2.0, LeadershipLost(), [])
    recorder.close()
    assert replay(tmp_path / "decisions.rec", make_policy).steps == 0


@pytest.mark.parametrize("content", [b"\x00", b"\x00\x00\x00\x03abc", b"#!/bin/sh\necho\n" * 100])
def test_what_is_no_recording_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    """One line, and not a byte of a wrong file is changed."""
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    for use in (
        lambda: Recorder(path, policy="rules", settings=SETTINGS, bytes_max=MEGABYTE),
        lambda: replay(path, make_policy),
    ):
        with pytest.raises(ConfigError, match=r"recording of a scheduler"):
            use()
    assert path.read_bytes() == content


def test_files_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    """A folder, no file, an empty one, a damaged one, one of a later version."""
    with pytest.raises(ConfigError, match="cannot be written"):
        Recorder(tmp_path, policy="rules", settings=SETTINGS, bytes_max=MEGABYTE)
    with pytest.raises(ConfigError, match="cannot be read"):
        replay(tmp_path / "nowhere", make_policy)
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(ConfigError, match="is empty"):
        replay(empty, make_policy)
    path = tmp_path / "decisions.rec"
    history(path, bytes_max=MEGABYTE // 4).close()
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"LeadershipGained", b"LeadershipBought"))
    with pytest.raises(ConfigError, match="cannot be read by this version"):
        replay(path, make_policy)
    path.write_bytes(whole.replace(b"\xa6format\x01", b"\xa6format\x02"))
    with pytest.raises(ConfigError, match="format 2"):
        replay(path, make_policy)
