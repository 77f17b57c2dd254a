"""The gateway measured beside peers: what a run says, and of whom; no figure is judged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ops.bench.against_peers import Plan, bench_against_peers
from ops.bench.fake_engine import STREAM_CHUNKS
from ops.bench.load import Result, Task, measure
from ops.bench.peers import KEYS, body, fake_engine

PEER = """#!{python}
import sys
from ops.bench.fake_engine import main
sys.argv = ["engine", sys.argv[sys.argv.index("--port") + 1]]
main()
"""
REFUSES = """#!{python}
import sys
sys.exit("no worker given")
"""


def _program(path: Path, text: str) -> None:
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)


async def test_the_load_counts_whole_answers_events_and_what_it_cut_off(tmp_path: Path) -> None:
    """A closed loop, a rate, and a stream that never ends, each against the fake engine."""
    async with fake_engine(tmp_path) as engine:

        async def load(*, stream: bool = True, prompt: str = "hello", rate_per_s: float = 0.0, requests: int = 20) -> Result:
            task = Task(
                host="127.0.0.1",
                port=engine.port,
                path="/v1/chat/completions",
                body=body(stream=stream, tokens=64, prompt=prompt),
                connections=4,
                seconds_max=20.0,
                requests_max=requests,
                rate_per_s=rate_per_s,
                keys=KEYS,
            )
            return await measure(task)

        closed = await load()
        assert (closed.requests, closed.errors, closed.cut) == (20, 0, 0)
        assert closed.events == 20 * (STREAM_CHUNKS + 1)
        paced = await load(stream=False, rate_per_s=100.0)
        assert (paced.requests, paced.errors) == (20, 0)
        assert paced.seconds > 0.15, "twenty requests at a hundred a second take about a fifth of one"
        held = Task(
            host="127.0.0.1",
            port=engine.port,
            path="/v1/chat/completions",
            body=body(stream=True, tokens=64, prompt="hold this stream open"),
            connections=3,
            seconds_max=0.1,
            drain_s_max=0.4,
        )
        cut = await measure(held)
        assert (cut.requests, cut.cut, cut.events, cut.errors) == (0, 3, 3, 0)


@pytest.mark.timeout(180)
async def test_every_peer_is_measured_or_listed_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One peer answers, one ends at its start, the others are not on PATH; ours goes the whole way with tenants' keys."""
    _program(tmp_path / "vllm-router", PEER)
    _program(tmp_path / "smg", REFUSES)
    monkeypatch.setenv("PATH", str(tmp_path))
    plan = Plan(connections=(4,), seconds=0.3, rounds=1, pairs=1, pair_seconds=0.2, idle_streams=20)
    said = await bench_against_peers(lambda _line: None, plan)
    systems = said["systems"]
    assert list(systems) == ["direct", "ours", "vllm-router", "smg", "sglang-router", "litellm"]
    assert systems["smg"]["reason"] == "ended at its start with exit code 1: no worker given"
    assert "not on PATH" in systems["litellm"]["reason"] and systems["litellm"]["rps"] is None
    for name in ("direct", "ours", "vllm-router"):
        system = systems[name]
        assert system["reason"] == "" and system["by_connections"]["4"]["errors"] == 0
        assert min(system[key] for key in ("rps", "p50_ms", "p99_ms", "stream_chunks_per_s", "rss_mb")) > 0
    ours = systems["ours"]
    assert ours["added_p50_ms"] is not None and ours["idle_mb_per_1000_streams"] is not None, ours["idle_reason"]
    assert ours["by_connections"]["4"]["bus_messages_per_request"] >= 2  # a hand in and out; frames are shared
    assert said["ratios"]["rps_vs_best_peer"] > 0 and said["ratios"]["rps_vs_litellm"] is None
