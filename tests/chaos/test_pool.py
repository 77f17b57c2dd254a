"""A whole pool on simulated engines, with room for one large model at a time: waking, evicting, failing (PAINS A, B, C)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import openai
import psutil
import pytest
import pytest_asyncio

from ops.control import control
from ops.models import records_of
from ops.prove.scripted_server import ScriptedServer
from ops.supervisor import Pool, PoolOptions
from subjects import names
from subjects.bus import BusMessage
from subjects.codec import decode
from subjects.ids import RequestId
from subjects.messages import Alert
from subjects.nats.bus import NatsBus
from workers.core.simulated import expected_answer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

BOUND_S = 40.0
LARGE_GB = 0.6
SMALL_GB = 0.02


def _service(name: str, gb: float, *, strategy: str = "max_wait_s: 60", **options: Any) -> str:
    return f"""
---
apiVersion: llm.serving/v1
kind: ModelService
metadata: {{name: {name}}}
spec:
  resources: {{baseline_memory_gb: {gb}}}
  strategy: {{{strategy}}}
  engine:
    type: simulated
    max_num_seqs: 8
    max_context_len: 1024
    kv_cache_bytes: 32MiB
    options: {json.dumps(options)}
"""


def _services(server_url: str) -> str:
    """``a`` to ``c`` and ``deaf`` fit one at a time, beside small ones."""
    return (
        "".join(_service(name, LARGE_GB, load_s=0.5) for name in "abc")
        + _service("deaf", LARGE_GB, ignores_aborts=True)
        + _service("huge", 10)
        + _service("slow", SMALL_GB, load_s=7.0)
        + _service("sleepy", LARGE_GB, load_s=30.0, strategy="max_wait_s: 2, fallback: mortal")
        + _service("broken", SMALL_GB, load_fails=True)
        + _service("mortal", SMALL_GB)
        + f"""
---
apiVersion: llm.serving/v1
kind: ModelService
metadata: {{name: elsewhere}}
spec:
  source: {server_url}
  model: scripted
  engine: {{type: openai_http, max_num_seqs: 4, max_context_len: 4096}}
"""
    )


@dataclass
class Stage:
    """The pool, clients for it, and the alerts it has published."""

    pool: Pool
    http: httpx.AsyncClient
    sdk: openai.AsyncOpenAI
    server: ScriptedServer
    pids: dict[str, int]
    alerts: list[Alert] = field(default_factory=list)

    async def get(self, what: str, **fields: Any) -> list[dict[str, Any]]:
        """Rows of ``carpool get``."""
        rows = await control(self.pool.nats_url, "get", {"what": what}) or []
        return [row for row in rows if fields.items() <= row.items()]

    async def verb(self, verb: str, model: str) -> None:
        """``carpool pin`` and the like."""
        await control(self.pool.nats_url, verb, {"model": model})

    async def clear(self) -> None:
        """Unloads everything once nobody is counted as waiting: the scheduler's figures are a moment old."""
        end_s = time.monotonic() + BOUND_S
        while [row for row in await self.get("queues") if row["waiting"] or row["running"]]:
            assert time.monotonic() < end_s
            await asyncio.sleep(0.05)
        for model in sorted({row["model"] for row in await self.get("replicas")}):
            await self.verb("unload", model)
        await self.until_rows("replicas", 0)

    async def until_rows(self, what: str, count: int, limit_s: float = BOUND_S, **fields: Any) -> None:
        """Waits until so many rows have these fields."""
        end_s = time.monotonic() + limit_s
        while len(rows := await self.get(what, **fields)) != count:
            assert time.monotonic() < end_s, rows
            await asyncio.sleep(0.05)

    async def ask(self, model: str, tokens: int = 4, **script: Any) -> httpx.Response:
        """A whole answer."""
        return await self.http.post("/chat/completions", json=_body(model, tokens, script))

    async def actions(self, *actions: str) -> list[tuple[str, str]]:
        """What the timeline has of these actions."""
        return [(row["action"], row["model"]) for row in await self.get("timeline") if row["action"] in actions]


def _body(model: str, tokens: int, script: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": tokens,
        "carpool_sim": script,
    } | fields


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """One pool for the whole module."""
    directory = tmp_path_factory.mktemp("pool")
    async with ScriptedServer() as server:
        path = directory / "services.yaml"
        path.write_text(_services(server.url))
        records = await asyncio.to_thread(records_of, [path])
        async with Pool(PoolOptions(state_dir=directory / "state", devices=("cpu:1GiB",))) as pool:
            await control(pool.nats_url, "apply", {"records": [msgspec.to_builtins(record) for record in records]})
            bus = await NatsBus.connect([pool.nats_url], name="alerts")
            url = f"{pool.http_url}/v1"
            async with (
                httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http,
                openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as sdk,
            ):
                pids = {part: pool.pid(part) for part in ("gateway", "scheduler", "worker")}
                stage = Stage(pool, http, sdk, server, pids)

                def hear(message: BusMessage) -> None:
                    stage.alerts.append(decode(message.payload, Alert))

                await bus.subscribe(names.ALL_ALERTS, hear)
                yield stage
            await bus.close()


@pytest_asyncio.fixture(loop_scope="module")
async def stage(running: Stage) -> AsyncIterator[Stage]:
    """The same pool with nothing loaded."""
    await running.clear()
    yield running


def _whole(response: httpx.Response, tokens: int) -> bool:
    """Whether the answer is exactly the engine's: no gap, repeat or foreign token."""
    assert response.status_code == 200, response.text
    request = RequestId(response.headers["x-carpool-request-id"])
    content: str = response.json()["choices"][0]["message"]["content"]
    return content == expected_answer(request, tokens)


# --------------------------------------------------------------------------------------------------------------- waking


async def test_the_first_of_five_leaves_while_the_model_wakes(stage: Stage) -> None:
    """The one whose request caused the load goes; the four others are answered by that one load (B1)."""
    before = len(await stage.actions("load"))
    first = asyncio.create_task(stage.ask("a"))
    await stage.until_rows("replicas", 1, model="a")
    others = [asyncio.create_task(stage.ask("a")) for _ in range(4)]
    await asyncio.sleep(0.1)
    first.cancel()
    assert all(_whole(answer, 4) for answer in await asyncio.gather(*others))
    assert (await stage.actions("load"))[before:] == [("load", "a")]


async def test_a_burst_of_first_requests_wakes_once(stage: Stage) -> None:
    """A hundred first requests at once: one load, every answer whole (B6)."""
    before = len(await stage.actions("load"))
    answers = await asyncio.gather(*(stage.ask("c") for _ in range(100)))
    assert all(_whole(answer, 4) for answer in answers)
    assert (await stage.actions("load"))[before:] == [("load", "c")]


async def test_all_leave_while_the_model_wakes(stage: Stage) -> None:
    """Nobody waits any more: nothing is stuck, and the next request is answered (B1, A2)."""
    asks = [asyncio.create_task(stage.ask("b")) for _ in range(5)]
    await stage.until_rows("replicas", 1, model="b")
    for ask in asks:
        ask.cancel()
    await asyncio.gather(*asks, return_exceptions=True)
    await stage.until_rows("replicas", 0, model="b", state="loading")
    assert _whole(await stage.ask("b"), 4)


async def test_the_sdk_reads_past_the_comments_of_a_long_wake(stage: Stage) -> None:
    """A load of 7 s: the stream opens after 5 s with a comment that a client does not see, and the answer follows (A9)."""

    async def read() -> list[str]:
        async with stage.http.stream("POST", "/chat/completions", json=_body("slow", 4, {}, stream=True)) as response:
            assert response.headers["x-accel-buffering"] == "no"
            return [line async for line in response.aiter_lines() if line]

    reading = asyncio.create_task(read())
    stream = await stage.sdk.chat.completions.create(
        model="slow", messages=[{"role": "user", "content": "hi"}], max_tokens=4, stream=True
    )
    chunks = [chunk async for chunk in stream]
    raw = await reading
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert raw[0].startswith(":") and raw[-1] == "data: [DONE]"


async def test_beyond_its_waiting_bound_a_model_degrades_to_its_fallback(stage: Stage) -> None:
    """``sleepy`` loads for 30 s and may wait for 2: its fallback answers under its own name, and says so (ING-8)."""
    assert _whole(await stage.ask("mortal"), 4)
    answer = await stage.ask("sleepy")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-carpool-model"] == "mortal"
    assert answer.headers["x-carpool-degraded-from"] == "sleepy"


# ------------------------------------------------------------------------------------------------------------- evicting


async def test_a_running_answer_is_finished_before_its_model_leaves(stage: Stage) -> None:
    """One slot: a long answer of A goes to its end although B waits for the room; then B answers (C1)."""
    assert _whole(await stage.ask("a"), 4)
    long = asyncio.create_task(stage.ask("a", 25, token_s=0.1))
    await stage.until_rows("replicas", 1, model="a", running=1)
    begun_s = time.monotonic()
    other = asyncio.create_task(stage.ask("b"))
    assert _whole(await other, 4)
    assert long.done() and time.monotonic() - begun_s > 1
    answer = await long
    assert _whole(answer, 25)
    assert answer.headers["x-carpool-attempt"] == "1"


async def test_requests_of_three_models_are_grouped(stage: Stage) -> None:
    """A, B, A, A, C, A, B, C on one slot: each model is loaded once (C2)."""
    before = len(await stage.actions("load"))

    async def ask(index: int, model: str) -> httpx.Response:
        await asyncio.sleep(0.05 * index)
        return await stage.ask(model, 6, token_s=0.05)

    answers = await asyncio.gather(*(ask(index, model) for index, model in enumerate("abaacabc")))
    assert all(_whole(answer, 6) for answer in answers)
    assert sorted((await stage.actions("load"))[before:]) == [("load", "a"), ("load", "b"), ("load", "c")]


async def test_a_requests_fields_never_reload_a_model(stage: Stage) -> None:
    """Two clients with other lengths, users and extra fields share one replica (C4)."""
    before = len(await stage.actions("load", "evict", "unload"))
    bodies = [
        _body(
            "a", 3 + number, {}, user=f"client-{number % 2}", metadata={"number": str(number)}, options={"num_ctx": number}
        )
        for number in range(6)
    ]
    replicas = {(await stage.http.post("/chat/completions", json=body)).headers["x-carpool-replica"] for body in bodies}
    assert len(replicas) == 1
    assert (await stage.actions("load", "evict", "unload"))[before:] == [("load", "a")]


async def test_a_pinned_model_stays(stage: Stage) -> None:
    """B needs the room of the pinned A: 503 with the reason, and A answers on the same replica; unpinned it leaves (C5)."""
    replica = (await stage.ask("a")).headers["x-carpool-replica"]
    await stage.verb("pin", "a")
    try:
        await stage.until_rows("models", 1, name="a", note="pinned")
        refused = await stage.ask("b")
        assert refused.status_code == 503
        assert "pinned" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert (await stage.ask("a")).headers["x-carpool-replica"] == replica
    finally:
        await stage.verb("unpin", "a")
    await stage.until_rows("models", 1, name="a", note="")
    assert _whole(await stage.ask("b"), 4)


async def test_an_endless_answer_cannot_keep_its_room(stage: Stage) -> None:
    """An engine that ignores aborts and an answer without end: the drain is bounded, its client is not left in silence (it
    gets an error, or goes on elsewhere), and the next model is served (C8)."""
    old = (await stage.ask("deaf")).headers["x-carpool-replica"]
    endless = asyncio.create_task(stage.ask("deaf", 900, token_s=0.5))
    await stage.until_rows("replicas", 1, replica=old, running=1)
    await stage.verb("unload", "deaf")
    await stage.until_rows("replicas", 0, limit_s=60, replica=old)
    end_s = time.monotonic() + BOUND_S
    while not endless.done() and not await stage.get("replicas", model="deaf", running=1):
        assert time.monotonic() < end_s
        await asyncio.sleep(0.1)
    assert not endless.done() or (await endless).status_code >= 500
    endless.cancel()
    await asyncio.gather(endless, return_exceptions=True)
    assert _whole(await stage.ask("b"), 4)


async def test_what_never_fits_is_refused_at_once_with_the_numbers(stage: Stage) -> None:
    """A model of 10 GB on a device of 1 GiB: no waiting, no eviction, both figures in the answer."""
    assert _whole(await stage.ask("a"), 4)
    refused = await stage.ask("huge")
    assert refused.status_code == 503
    message = refused.json()["error"]["message"]
    assert "9.3" in message and "GiB" in message, message
    assert await stage.get("replicas", model="a", state="ready")


# -------------------------------------------------------------------------------------------------------------- failing


async def test_a_broken_model_beside_a_healthy_one(stage: Stage) -> None:
    """``broken`` fails to load and is polled; ``a`` keeps its replica, loads are few, an alert is out (B8, B9, BUS-5)."""
    replica = (await stage.ask("a")).headers["x-carpool-replica"]
    before = len(await stage.actions("load"))
    for _ in range(6):
        refused = await stage.ask("broken")
        assert refused.status_code == 503
        message = refused.json()["error"]["message"]
        assert "loading failed" in message and "as its options ask" not in message  # the detail is for operators
        assert int(refused.headers["retry-after"]) >= 1
        assert (await stage.ask("a")).headers["x-carpool-replica"] == replica
        await asyncio.sleep(0.3)
    assert (await stage.actions("load"))[before:].count(("load", "broken")) <= 4
    assert [alert.kind for alert in stage.alerts if alert.scope == "broken"][:1] == ["load-failed"]


async def test_a_replica_that_dies_amid_a_stream_is_never_a_short_answer(stage: Stage) -> None:
    """kill -9 after the first chunks: the SDK raises, or the stream goes on to its very end (A6)."""
    assert _whole(await stage.ask("mortal"), 4)
    raw = await stage.sdk.chat.completions.with_raw_response.create(
        model="mortal",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=40,
        stream=True,
        extra_body={"carpool_sim": {"token_s": 0.1}},
    )
    request = RequestId(raw.headers["x-carpool-request-id"])
    text, finish, killed = "", None, False
    try:
        async for chunk in raw.parse():
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
            if not killed and len(text) > 20:
                killed = True
                for child in psutil.Process(stage.pool.pid("worker")).children(recursive=True):
                    if "workers.replica" in child.cmdline():
                        child.kill()
    except openai.APIError as error:
        assert error.message and finish is None
        assert expected_answer(request, 40).startswith(text)
    else:
        assert (text, finish) == (expected_answer(request, 40), "length")
    assert killed
    assert _whole(await stage.ask("mortal"), 4)


async def test_a_server_elsewhere_is_one_more_engine(stage: Stage) -> None:
    """``openai_http``: answered through the pool in both modes; a client that leaves is seen by that server (A1, A3)."""
    for stream in (False, True):
        body = _body("elsewhere", 5, {}, stream=stream, carpool_script={"tokens": 5, "tag": "whole"})
        response = await stage.http.post("/chat/completions", json=body)
        assert response.status_code == 200 and " w4" in response.text, response.text
        tag = f"left-{stream}"
        body = _body("elsewhere", 50, {}, stream=stream, carpool_script={"tokens": 500, "every_s": 0.1, "tag": tag})
        leaving = asyncio.create_task(stage.http.post("/chat/completions", json=body))
        end_s = time.monotonic() + BOUND_S
        while tag not in stage.server.begun_s:
            assert time.monotonic() < end_s
            await asyncio.sleep(0.02)
        leaving.cancel()
        left_s = time.monotonic()
        while tag not in stage.server.left_s:
            assert time.monotonic() < left_s + 10
            await asyncio.sleep(0.02)
    assert stage.server.running == 0


# ------------------------------------------------------------------------------------------------------------ the commands


async def test_every_view_has_its_rows(stage: Stage) -> None:
    """``carpool get`` of a pool at work, as a table and as JSON (SCH-8)."""
    assert _whole(await stage.ask("a"), 4)

    def carpool(*words: str) -> str:
        argv = [sys.executable, "-m", "ops.cli", "get", *words, "--nats", stage.pool.nats_url]
        return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout

    rows = {what: await stage.get(what) for what in ("models", "devices", "queues", "timeline")}
    rows |= json.loads(await asyncio.to_thread(carpool, "replicas", "--json"))
    assert {row["name"] for row in rows["models"]} == {
        *"abc",
        "deaf",
        "huge",
        "slow",
        "sleepy",
        "broken",
        "mortal",
        "elsewhere",
    }
    assert [(row["model"], row["state"]) for row in rows["replicas"]] == [("a", "ready")]
    assert [row["device"] for row in rows["devices"]] == ["cpu0"]
    assert {row["model"] for row in rows["queues"]} <= {row["name"] for row in rows["models"]}
    assert rows["timeline"][-1]["model"] == "a" and rows["timeline"][-1]["reason"]
    table = (await asyncio.to_thread(carpool, "timeline")).splitlines()
    assert {"action", "model", "reason"} <= set(table[0].split())
    assert len(table) > len(rows["timeline"])


async def test_nothing_of_it_all_ended_a_part(running: Stage) -> None:
    """Gateway, scheduler and agent are the processes that they were at the start, and none has failed inside (WRK-1)."""
    for part, pid in running.pids.items():
        assert running.pool.pid(part) == pid, part
        assert "Traceback" not in running.pool.log_path(part).read_text(), part
