"""The fixed workloads: what is fixed stays fixed, windows agree with each other, splits carry what they should (OPS-6)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ops.simulator import rates
from ops.simulator.traces import recording
from ops.simulator.traces.columns import cut, only
from ops.simulator.traces.recording import RecordedModel
from ops.simulator.types import Trace, Window, Workload
from ops.simulator.workloads import LINES, WORKLOADS, of_recording, workload
from subjects.errors import ConfigError
from tests.workloads.dedicated import attainment, within_slo
from tests.workloads.scale_rates import GOAL, PLANNED


def gpus(asked: Workload, split: dict[str, int]) -> int:
    """GPUs of a dedicated split."""
    return sum(model.gpus * split[model.name] for model in asked.models)


def same(one: Trace, other: Trace) -> bool:
    """Equal in every column."""
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("arrival_s", "model", "input_tokens", "output_tokens")
    )


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_whole(name: str) -> None:
    """Every model has its own name and a static count; the static split fits the pool; requests are sorted, within their
    window and capped; each replica's KV alone holds the longest request."""
    asked = WORKLOADS[name]()
    names = [model.name for model in asked.models]
    assert len(set(names)) == len(names)
    assert sorted(asked.static_replicas) == sorted(names)
    if name != "contention":  # Three models share two devices there: that is the point.
        assert gpus(asked, asked.static_replicas) <= asked.pool.devices
    window = asked.windows[0]
    short = Window(window.warmup_s, window.begin_s, min(window.end_s, window.begin_s + 60.0))
    trace = asked.trace(1, short)
    assert len(trace) > 0
    assert np.all(np.diff(trace.arrival_s) >= 0)
    assert trace.arrival_s[0] >= short.warmup_s and trace.arrival_s[-1] < short.end_s
    assert trace.input_tokens.min() >= 1 and trace.input_tokens.max() <= 16_384
    assert trace.output_tokens.min() >= 1
    assert set(np.unique(trace.model)) <= set(range(len(names)))
    for number, model in enumerate(asked.models):
        mine = only(trace, number)
        if len(mine):
            assert int((mine.input_tokens + mine.output_tokens).max()) * model.kv_bytes_per_token < model.kv_bytes_alone()


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "scale"])
def test_seed_and_window(name: str) -> None:
    """The same seed gives the same requests, another seed others, and a later beginning the same ones from there on."""
    asked = WORKLOADS[name]()
    window = asked.windows[-1]
    end_s = min(window.end_s, window.begin_s + 120.0)
    first = asked.trace(1, Window(window.warmup_s, window.begin_s, end_s))
    assert same(first, WORKLOADS[name]().trace(1, Window(window.warmup_s, window.begin_s, end_s)))
    assert not same(first, asked.trace(2, Window(window.warmup_s, window.begin_s, end_s)))
    later = asked.trace(1, Window(window.begin_s, window.begin_s, end_s))
    assert same(later, cut(first, window.begin_s, end_s))


def test_headline_windows() -> None:
    """Six windows of ten minutes at 0, 4, ... 20 h, each after three minutes of warm-up; the full suite takes the day."""
    for name in LINES:
        windows = workload(name).windows
        assert [window.warmup_s for window in windows] == [0, 14_400, 28_800, 43_200, 57_600, 72_000]
        assert {window.begin_s - window.warmup_s for window in windows} == {180}
        assert {window.end_s - window.begin_s for window in windows} == {600}
        (day,) = workload(name, full=True).windows
        assert (day.warmup_s, day.end_s) == (0, 86_400)


def test_static_splits_are_the_planned_ones() -> None:
    """five-lines is 1+2+2+3+4 = 12 GPUs, busy-few 64, long-tail one each of 64, burst 8 by the minute, 15 by SLO."""
    lines = workload("five-lines")
    assert [model.gpus * lines.static_replicas[model.name] for model in lines.models] == [1, 2, 2, 3, 4]
    assert gpus(workload("busy-few"), workload("busy-few").static_replicas) == 64
    assert all(rates.STATIC[name] == PLANNED[name] for name in PLANNED)
    tail = workload("long-tail")
    assert (gpus(tail, tail.static_replicas), len(tail.models)) == (64, 64)
    assert [sum(model.weights_bytes == size * 10**9 for model in tail.models) for size in (16, 29)] == [43, 21]
    burst = workload("burst")
    assert burst.static_slo_replicas is not None
    assert gpus(burst, burst.static_replicas) == 8
    assert gpus(burst, burst.static_slo_replicas) == 15


def test_load_scales_the_rates() -> None:
    """Twice the load is twice the requests within 5 %, of every model."""
    window = workload("five-lines").windows[2]
    once, twice = (np.bincount(workload("five-lines", load=load).trace(1, window).model) for load in (1.0, 2.0))
    assert twice / once == pytest.approx(2.0, rel=0.1)


def test_long_tail_rates() -> None:
    """Each model gets between 0.02 and 0.1 requests per second (a standard error or three about it over two hours)."""
    asked = workload("long-tail")
    counts = np.bincount(asked.trace(1, asked.windows[0]).model, minlength=64) / 7_380
    assert counts.min() > 0.013 and counts.max() < 0.113
    assert counts.sum() == pytest.approx(64 * 0.06, rel=0.1)


def test_the_pulse_rises_from_100_to_800_in_20_s() -> None:
    """OPS-9: requests per second of the pulsed model before, half-way and after."""
    asked = workload("pulse")
    seconds = np.bincount(only(asked.trace(1, asked.windows[0]), 0).arrival_s.astype(int))
    assert float(seconds[60:120].mean()) == pytest.approx(100, rel=0.1)
    assert float(seconds[128:132].mean()) == pytest.approx(450, rel=0.15)
    assert float(seconds[140:200].mean()) == pytest.approx(800, rel=0.05)


def test_contention_shares() -> None:
    """OPS-9: 70, 20 and 10 % of the requests."""
    asked = workload("contention")
    counts = np.bincount(asked.trace(1, asked.windows[0]).model)
    assert counts / counts.sum() == pytest.approx([0.7, 0.2, 0.1], abs=0.02)


def test_unknown_names() -> None:
    """A name that is none says which there are."""
    with pytest.raises(ConfigError, match="five-lines"):
        workload("six-lines")


def test_one_replica_carries_a_model_of_the_tail() -> None:
    """SCH-3: a dedicated replica meets the SLO of the tail's busiest model for twenty minutes."""
    asked = workload("long-tail")
    busiest = int(np.bincount(asked.trace(1, asked.windows[0]).model).argmax())
    assert attainment(asked, busiest, 1, 1, (Window(0.0, 180.0, 1_380.0),)) >= GOAL


def test_a_burst_needs_more_replicas_than_its_minute_says() -> None:
    """Around its largest burst the code service misses the SLO with the replicas of its p99 minute, less so with more."""
    asked = workload("burst")
    trace = only(asked.trace(1, asked.windows[0]), 0)
    minute = int(np.bincount((trace.arrival_s // 60).astype(int)).argmax())
    part = cut(trace, minute * 60 - 60, minute * 60 + 120)
    few = within_slo(asked.models[0], part, asked.static_replicas["code"], 1, minute * 60 - 60.0)
    many = within_slo(asked.models[0], part, 2 * asked.static_replicas["code"], 1, minute * 60 - 60.0)
    assert few.mean() < 0.9 and few.mean() < many.mean()


def test_a_recording_is_a_workload() -> None:
    """OPS-5: models by recorded size, a window over all of it, a split by its busy minutes; unknown sizes are refused."""
    asked = workload("contention")
    trace = asked.trace(1, asked.windows[0])
    models = {"small": RecordedModel(size="3.8B"), "middle": RecordedModel(), "large": RecordedModel(size="70B", ttft_s=1.0)}
    made = of_recording("mine", recording.Recording(names=("small", "middle", "large"), models=models, trace=trace))
    assert [(model.name, model.gpus, model.ttft_s) for model in made.models] == [
        ("small", 1, 2.0),
        ("middle", 1, 2.0),
        ("large", 4, 1.0),
    ]
    assert same(made.trace(5, made.windows[0]), trace)
    assert made.static_replicas == {"small": 1, "middle": 1, "large": 1}
    more = of_recording(
        "mine", recording.Recording(names=("small", "middle", "large"), models=models, trace=trace), load=1.5
    )
    assert len(more.trace(5, dataclasses.replace(more.windows[0]))) == pytest.approx(1.5 * len(trace), rel=0.05)
    with pytest.raises(ConfigError, match="9B"):
        of_recording("mine", recording.Recording(names=("a",), models={"a": RecordedModel(size="9B")}, trace=trace))
