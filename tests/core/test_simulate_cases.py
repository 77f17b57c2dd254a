"""What ``carpool simulate`` is asked for: checked at once, built into a workload, refused in one line (OPS-6)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ops.simulator.cases import Case, build, check, fitted
from ops.simulator.workloads import workload
from subjects.errors import ConfigError

RECORDING = """{"carpool_recording": 1, "models": {"chat": {"size": "8B"}, "big": {"size": "70B"}}}
{"at_s": 0.0, "model": "chat", "input_tokens": 100, "output_tokens": 10}
{"at_s": 30.0, "model": "big", "input_tokens": 100, "output_tokens": 10}
"""


@pytest.mark.parametrize(
    ("case", "flag"),
    [
        (Case(workload="burst", suite="nightly"), "--suite nightly"),
        (Case(workload="burst", load=0.0), "--load 0"),
        (Case(workload="burst", load=math.nan), "--load nan"),
        (Case(workload="burst", gpus=-1), "--gpus -1"),
        (Case(workload="burst", warm_s=0.0), "--warm-s 0"),
        (Case(workload="burst", cold_s=math.inf), "--cold-s inf"),
        (Case(workload="burst", warm_s=60.0, cold_s=3.0), "--warm-s 60"),
        (Case(workload="burst", minutes=-1.0), "--minutes -1"),
        (Case(workload="mine", trace="/nowhere/mine.jsonl"), "--trace /nowhere/mine.jsonl"),
    ],
)
def test_wrong_value_is_one_line_that_names_its_flag(case: Case, flag: str) -> None:
    """A user who mistypes a flag is told which, and what to give, before anything runs."""
    with pytest.raises(ConfigError) as caught:
        check(case)
    assert str(caught.value).startswith(flag)
    assert "\n" not in str(caught.value)


def test_unknown_workload_lists_those_there_are() -> None:
    """A mistyped name costs one look."""
    with pytest.raises(ConfigError, match=r"--workload five-line: no such workload; use one of five-lines, .*scale"):
        build(Case(workload="five-line"))


def test_label_says_only_what_was_changed() -> None:
    """Rows of a sweep stand beside each other under keys of their own."""
    assert Case(workload="burst").label == "burst"
    changed = Case(workload="burst", gpus=8, load=1.25, warm_s=0.3, cold_s=30.0, minutes=2.0)
    assert changed.label == "burst@load=1.25,gpus=8,warm=0.3s,cold=30s,minutes=2"


def test_case_changes_ladder_windows_and_pool_and_nothing_else() -> None:
    """``--warm-s``, ``--minutes`` and ``--gpus`` reach the workload."""
    fixed = workload("five-lines")
    built = build(check(Case(workload="five-lines", gpus=8, warm_s=90.0, minutes=2.0)))
    assert (built.ladder.warm_s, built.ladder.cold_s) == (90.0, 90.0)
    assert [window.end_s - window.begin_s for window in built.windows] == [120.0] * len(fixed.windows)
    assert [window.warmup_s for window in built.windows] == [window.warmup_s for window in fixed.windows]
    assert built.pool.devices == 8
    assert built.models == fixed.models


def test_split_of_a_pool_that_is_too_small_gives_each_model_one_replica_first() -> None:
    """Static on 8 GPUs of the 12 it needs: one each in order, then who lacks most (five-lines on 8 GPUs)."""
    made = workload("five-lines")
    whole = {"m-small": 1, "m-mid": 2, "mm-image": 2, "deepseek-r1": 3, "m-large": 1}
    gpus = {model.name: model.gpus for model in made.models}
    assert fitted(made, whole, 12) == whole
    assert fitted(made, whole, 8) == {"m-small": 1, "m-mid": 1, "mm-image": 1, "deepseek-r1": 1, "m-large": 1}
    assert fitted(made, whole, 9) == {"m-small": 1, "m-mid": 1, "mm-image": 1, "deepseek-r1": 2, "m-large": 1}
    assert fitted(made, whole, 7)["m-large"] == 0
    for devices in range(13):
        got = fitted(made, whole, devices)
        assert sum(gpus[name] * count for name, count in got.items()) <= devices


def test_recording_is_a_workload(tmp_path: Path) -> None:
    """A user's own trace is simulated like a fixed one, at a load of their choice (OPS-5)."""
    path = tmp_path / "mine.jsonl"
    path.write_text(RECORDING)
    built = build(check(Case(workload="mine", trace=str(path), gpus=4)))
    assert {model.name for model in built.models} == {"chat", "big"}
    assert built.pool.devices == 4
    window = built.windows[0]
    assert len(built.trace(1, window)) == 2


def test_file_that_is_no_trace_is_told_with_its_flag(tmp_path: Path) -> None:
    """What is wrong in a file is said in one line that names the flag it came by."""
    path = tmp_path / "notes.txt"
    path.write_text("not a trace\n")
    with pytest.raises(ConfigError, match=r"^--trace .*notes\.txt") as caught:
        build(check(Case(workload="notes", trace=str(path))))
    assert "\n" not in str(caught.value)
