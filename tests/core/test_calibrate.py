"""Thresholds of TWU (OPS-7), the probe behind them, and TWU's lead (SCH-6)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ops.calibrate import LATE_MAX, Measured, calibrate_simulated, largest_kept, stage_of, thresholds, write
from ops.calibrate_cli import calibrate
from ops.calibrate_live import LiveOptions, calibrate_live, parts_per_window
from ops.simulator.engine import Engine
from ops.simulator.models import sim_model
from ops.simulator.probe import Reading, capacity_rps, lines_of, made_by, ramp, watch
from ops.simulator.queueing import Live
from ops.simulator.reality_client import Timed
from ops.simulator.twu_report import Lead, first_of_row
from subjects.errors import CarpoolError, ConfigError
from subjects.ids import ModelHash
from subjects.messages import Endpoint, RequestProfile


def breaks_at(limit: float) -> Callable[[float], Measured]:
    """A device on which requests are late above a load factor; its TWU is the factor."""
    return lambda factor: Measured(factor, 0.0 if factor <= limit else 1.0, factor, 2 * factor, 100 * factor)


@pytest.mark.parametrize("limit", [0.03, 0.2, 0.25, 0.9, 3.0])
def test_the_break_is_found(limit: float) -> None:
    """The kept load is below the limit, the other above it, and they are within three per cent (OPS-7)."""
    kept, broke = largest_kept(breaks_at(limit))
    assert kept.late <= LATE_MAX < broke.late
    assert kept.rps <= limit < broke.rps < 1.03 * kept.rps


@pytest.mark.parametrize(("limit", "word"), [(0.0, "even a hundredth"), (99.0, "four times")])
def test_no_break_is_an_error(limit: float, word: str) -> None:
    """A device that bears everything or nothing gives no threshold, and says so."""
    with pytest.raises(ConfigError, match=word):
        largest_kept(breaks_at(limit))


def test_the_threshold_is_08_of_the_break(tmp_path: Path) -> None:
    """TWU at the break of the last stage times 0.8; the lower level in the source's ratio; the file says how."""
    kept, broke = Measured(5.0, 0.01, 900.0, 1800.0, 1000.0, 0.99), Measured(6.0, 0.2, 2000.0, 4000.0, 1000.0, 1.0)
    stage = stage_of("mix", ("a", "b"), kept, broke, 1000.0)
    found = thresholds([stage], 1000.0, {"a": 1.0, "b": 2.0}, "simulated")
    assert (stage.twu, stage.twu_raw_s, stage.breaks_at_rps) == (0.9, 1.8, 6.0)
    assert (found.twu_full, found.twu_free) == (0.72, round(0.72 * 0.4 / 0.85, 4))
    write(found, tmp_path / "deep" / "file.json")
    assert json.loads((tmp_path / "deep" / "file.json").read_text())["stages"][0]["name"] == "mix"
    with pytest.raises(ConfigError, match="cannot be written"):
        write(found, tmp_path)


def test_calibration_in_the_simulator() -> None:
    """One GPU: the mix of lengths breaks at fewer requests than short ones alone (OPS-7)."""
    lines: list[str] = []
    found = calibrate_simulated(["3.8B"], 1, 1, lines.append, quick=True)
    alone, mixed = found.stages
    assert mixed.rps < 0.8 * alone.rps
    assert alone.twu == pytest.approx(0.234, rel=0.4)
    assert found.twu_full == pytest.approx(0.8 * mixed.twu, abs=1e-4)
    assert len(lines) == 2


@pytest.mark.parametrize("sizes", [[], ["2T"], ["3.8B"] * 4, ["70B"]])
def test_wrong_models_are_told(sizes: list[str]) -> None:
    """None, unknown ones, too many, and one that does not fit a device."""
    with pytest.raises(ConfigError):
        calibrate_simulated(sizes, 1, 1, lambda line: None)


def test_twu_rises_with_load_while_utilisation_is_full() -> None:
    """Under continuous batching the device is busy all the time at any load; TWU tells half of the limit from the limit."""
    lines = lines_of([sim_model("8B")])
    means = []
    for factor in (0.4, 0.8):
        trace = ramp(lines, 1, [(0.0, factor * capacity_rps(lines))], 60.0)
        readings = watch(lines, trace, 1, 60.0, 10_000.0)[20:]
        means.append((sum(r.twu for r in readings) / 40, sum(r.utilisation for r in readings) / 40))
        assert all(reading.late == 0.0 for reading in readings)
    assert means[1][0] > 2.5 * means[0][0]
    assert min(means[0][1], means[1][1]) > 0.97


def test_overload_shows_as_late_requests() -> None:
    """Twice what a device bears: nearly all requests are late in the end, and some wait."""
    lines = lines_of([sim_model("8B")])
    readings = watch(lines, ramp(lines, 1, [(0.0, 2 * capacity_rps(lines))], 90.0), 1, 90.0, 1.0)
    assert readings[0].late == 0.0
    assert readings[-1].late > 0.8
    assert readings[-1].waiting > 50


def test_progress_within_a_segment() -> None:
    """Tokens made so far equal what the engine says when it is stopped at that moment."""
    profile = RequestProfile(
        model_hash=ModelHash("a" * 64),
        endpoint=Endpoint.CHAT,
        tenant="t",  # type: ignore[arg-type]
        max_tokens=1000,
        input_tokens=700,
        expected_output_tokens=100,
        kv_pages_needed=50,
        deadline_unix_s=0.0,
    )
    for stop_s in np.linspace(0.001, 1.2, 25).tolist():
        engine = Engine(sim_model("8B").costs, kv_pages=1000)
        live = Live(0, 0, profile, 100, 0.0)
        assert made_by(None, live, 0.0) == (0, 0)
        engine.add(0.0, live)
        while engine.end_s <= stop_s:
            engine.step(engine.end_s)
        if engine.finished:
            continue
        prompt, made = made_by(engine, live, stop_s)
        assert prompt == (700 if live.first_s >= 0.0 else 0)
        engine.take_all(stop_s)
        assert made == live.made


def reading(at_s: float, twu: float) -> Reading:
    """With only a TWU."""
    return Reading(at_s, twu, 0.0, 0.0, 1.0, 0, 0.0)


def test_lead_is_time_before_congestion() -> None:
    """Three readings in a row warn; a warning after congestion, or none, leads by nothing."""
    readings = [reading(float(at), twu) for at, twu in enumerate([1, 2, 2, 1, 2, 2, 2, 2])]
    assert first_of_row(readings, lambda one: one.twu > 1.5) == 6.0
    assert first_of_row(readings, lambda one: one.twu > 3.0) is None
    assert (Lead(20.0, 6.0, None).twu_s, Lead(20.0, 6.0, None).utilisation_s) == (14.0, 0.0)
    assert (Lead(20.0, 25.0, 19.0).twu_s, Lead(20.0, 25.0, 19.0).utilisation_s) == (0.0, 1.0)
    assert Lead(None, 1.0, 1.0).twu_s == 0.0


# ---------------------------------------------------------------------------------------------------------------- live


def test_parts_of_an_answer_by_window() -> None:
    """A prompt counts evenly until the first text, tokens when they come, ages up to the window's end (SCH-6)."""
    timed = Timed("a", sent_s=10.5, ended_s=13.5, input_tokens=100, output_tokens=4, event_s=[11.5, 12.5, 13.0, 13.5])
    windows = parts_per_window([timed], {"a": 2.0}, 9.0, 5.0, 2.0, 0.5)
    parts = [part for window in windows for part in window]
    assert [len(window) for window in windows] == [1, 1, 1, 1]
    assert [part.tokens for part in parts] == [50.0, 51.0, 2.0, 1.0]
    assert [part.latency_s for part in parts] == [0.5, 1.5, 2.5, 3.0]
    assert [part.slo_s for part in parts] == [2.0, 2.0, 3.0, 3.5]
    assert parts[0].weight == 2.0
    silent = Timed("a", sent_s=10.5, ended_s=13.5)
    assert parts_per_window([silent], {}, 10.0, 2.0, 2.0, 0.5) == [[], []]


class Server:
    """An OpenAI-compatible endpoint that answers at once, and refuses requests by their number."""

    def __init__(self, refuses: Callable[[int], bool]) -> None:
        self.refuses = refuses
        self.asked: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request per connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if head.startswith("get"):
            models = json.dumps({"data": [{"id": "large"}, {"id": "small"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + models)
        else:
            length = int(head.split("content-length: ")[1].split("\r\n")[0])
            asked = json.loads(await reader.readexactly(length))
            self.asked.append(asked["model"])
            if self.refuses(len(self.asked)):
                writer.write(b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\n\r\n{}")
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
                for _ in range(asked["max_tokens"]):
                    writer.write(b'data: {"choices": [{"text": "x"}]}\n\n')
                tokens = {"prompt_tokens": len(asked["prompt"].split()), "completion_tokens": asked["max_tokens"]}
                writer.write(b"data: " + json.dumps({"choices": [], "usage": tokens}).encode() + b"\n\ndata: [DONE]\n\n")
        await writer.drain()
        writer.close()


async def calibrated(refuses: Callable[[int], bool], models: tuple[str, ...]) -> tuple[list[str], list[str], object]:
    """Runs against such a server: what it was asked for, what was told, what was found."""
    server = Server(refuses)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    told: list[str] = []
    async with listening:
        options = LiveOptions(
            endpoint=f"http://127.0.0.1:{port}", models=models, step_s=0.3, minutes=0.5, first_rps=60.0, seed=3
        )
        found = await calibrate_live(options, told.append)
    return server.asked, told, found


async def test_calibration_of_a_pool() -> None:
    """Both stages rise until requests are refused; the first asks the smallest model only; each break gives a stage."""
    asked, _, found = await calibrated(lambda number: number % 60 > 45, ("small", "large"))
    first, second = found.stages  # type: ignore[attr-defined]
    assert (first.models, second.models) == (("small",), ("small", "large"))
    assert first.rps < first.breaks_at_rps
    assert second.rps < second.breaks_at_rps
    assert asked[:4] == ["small", "small", "large", "large"]
    assert {"small", "large"} == set(asked[len(asked) // 2 :])
    assert found.twu_full > 0.0  # type: ignore[attr-defined]


async def test_a_pool_that_refuses_everything() -> None:
    """The first load breaks the SLO, or a single request is not answered: an error that says what to do."""
    with pytest.raises(CarpoolError, match="lower --rps"):
        await calibrated(lambda number: number > 2, ("small",))
    with pytest.raises(CarpoolError, match="single request"):
        await calibrated(lambda number: True, ())


@pytest.mark.parametrize("endpoint", ["http://example.org:80", "https://127.0.0.1:1", "http://"])
async def test_only_loopback_is_loaded(endpoint: str) -> None:
    """Another host is loaded only when asked for; anything but http is refused."""
    with pytest.raises(ConfigError, match="--endpoint"):
        await calibrate_live(LiveOptions(endpoint=endpoint, models=("a",)), lambda line: None)


def test_the_command(tmp_path: Path) -> None:
    """It writes the file and ends with one JSON object."""
    path = tmp_path / "t.json"
    done = CliRunner().invoke(calibrate, ["--model", "3.8B", "--rounds", "1", "--quick", "--output", str(path), "--json"])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed["file"] == str(path)
    assert json.loads(path.read_text())["twu_full"] == printed["twu_full"]
