"""Specs, requests and a collector for tests that drive an engine directly; and a real vLLM server as their oracle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ops.servers import free_port
from subjects.ids import DeviceId, ModelHash, ReplicaId, RequestId, WorkerId
from subjects.messages import Delta, Endpoint, EngineType, Failure, ModelRecord, Usage
from workers.engines.base import Engine, EngineRequest
from workers.engines.vllm_process import ENVIRONMENT
from workers.spec import ReplicaSpec

SERVER_START_TIMEOUT_S = 150.0
KV_BYTES = 16 * 1024 * 1024
CONTEXT_LEN = 1024


def replica_spec(source: str, *, engine_type: EngineType = EngineType.VLLM, **fields: Any) -> ReplicaSpec:
    """A replica of the model at ``source``, in float32 so that its answers are exact."""
    values: dict[str, Any] = {
        "name": "tiny",
        "model_hash": ModelHash("0" * 64),
        "weights_hash": "0" * 64,
        "engine_type": engine_type,
        "source": source,
        "dtype": "float32",
        "weights_bytes": 1_000_000,
        "kv_bytes_per_token": 2048,
        "kv_bytes": KV_BYTES,
        "budget_bytes": 20_000_000,
        "max_context_len": CONTEXT_LEN,
    }
    return ReplicaSpec(
        replica=ReplicaId("replica-0000000001"),
        worker=WorkerId("worker-0000000001"),
        device=DeviceId("cpu0"),
        record=ModelRecord(**values | fields),
        nats_urls=(),
    )


@dataclass
class Answer:
    """All deltas of one request, put together."""

    deltas: list[Delta] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def choice(self, index: int = 0) -> list[Delta]:
        return [delta for delta in self.deltas if delta.choice == index]

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.choice(index))

    def token_ids(self, index: int = 0) -> list[int]:
        return [token for delta in self.choice(index) for token in delta.token_ids]

    def details(self, index: int = 0) -> list[dict[str, Any]]:
        return [json.loads(delta.detail) for delta in self.choice(index) if delta.detail]

    def finish_reason(self, index: int = 0) -> str | None:
        reasons = [delta.finish_reason for delta in self.choice(index) if delta.finish_reason]
        assert len(reasons) <= 1, "a choice ends once"
        return reasons[0] if reasons else None

    @property
    def usage(self) -> Usage:
        assert self.deltas[-1].usage is not None
        return self.deltas[-1].usage

    @property
    def failure(self) -> Failure | None:
        return self.deltas[-1].failure

    def check(self, first_index: int = 0) -> None:
        """Every unit once and in order, and one end, on the last delta."""
        assert [delta.end for delta in self.deltas] == [False] * (len(self.deltas) - 1) + [True]
        for index in {delta.choice for delta in self.deltas}:
            expected = first_index
            for delta in self.choice(index):
                assert delta.first_token_index == expected
                assert not delta.token_ids or len(delta.token_ids) == delta.units
                expected += delta.units


class Driver:
    """Runs one engine and sorts what comes out of ``steps()`` by request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[RequestId, Answer] = {}
        self.unknown: list[Delta] = []
        self._count = 0
        self._pump = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        async for deltas in self.engine.steps():
            self._sort(deltas)

    def _sort(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            answer = self.answers.get(delta.request)
            if answer is None:
                self.unknown.append(delta)
                continue
            answer.deltas.append(delta)
            if delta.end:
                answer.done.set()

    def send(self, body: dict[str, Any] | bytes, endpoint: Endpoint = Endpoint.CHAT, **fields: Any) -> RequestId:
        self._count += 1
        request = RequestId(f"gateway-0000000001-{self._count}")
        self.answers[request] = Answer()
        self.engine.add(
            EngineRequest(
                request=request,
                attempt=1,
                endpoint=endpoint,
                body=body if isinstance(body, bytes) else json.dumps(body).encode(),
                kv_pages_needed=1,
                **fields,
            )
        )
        return request

    async def wait(self, request: RequestId, timeout_s: float = 60.0) -> Answer:
        answer = self.answers[request]
        await asyncio.wait_for(answer.done.wait(), timeout_s)
        return answer

    async def ask(self, body: dict[str, Any] | bytes, endpoint: Endpoint = Endpoint.CHAT, **fields: Any) -> Answer:
        return await self.wait(self.send(body, endpoint, **fields))

    async def death(self, timeout_s: float = 30.0) -> BaseException | None:
        """What ``steps()`` raised."""
        await asyncio.wait({self._pump}, timeout=timeout_s)
        return self._pump.exception()

    async def close(self) -> None:
        self._pump.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._pump
        await self.engine.stop()


class VllmServer:
    """``python -m vllm.entrypoints.openai.api_server`` on loopback."""

    def __init__(self, model: Path, log: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--model", str(model), "--served-model-name", "oracle", "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", str(CONTEXT_LEN), "--block-size", "32", "--max-num-seqs", "8"]
        command += ["--kv-cache-memory-bytes", str(KV_BYTES), "--seed", "0", "--enable-prompt-tokens-details"]
        environment = os.environ | ENVIRONMENT | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
        self._log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> None:
        """Returns when it answers."""
        deadline_s = time.monotonic() + SERVER_START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, f"the server exited:\n{self._log.read_text()[-3000:]}"
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            time.sleep(0.3)
        raise AssertionError(f"the server did not start:\n{self._log.read_text()[-3000:]}")

    def post(self, body: dict[str, Any], endpoint: Endpoint = Endpoint.CHAT) -> dict[str, Any]:
        """The server's whole answer to a body, asked without streaming."""
        path = "chat/completions" if endpoint is Endpoint.CHAT else "completions"
        reply = httpx.post(f"{self.url}/v1/{path}", json={"model": "oracle", **body}, timeout=60, trust_env=False)
        assert reply.status_code == 200, reply.text
        parsed: dict[str, Any] = reply.json()
        return parsed

    def running(self) -> float:
        """How many requests the server's engine runs or has waiting, by its own metrics."""
        text = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        wanted = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(wanted))

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
