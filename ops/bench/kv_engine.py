"""What KV reuse saves a client, on real vLLM with SmolLM2 on this CPU: time to the first token, and shared documents.

Three engines with equal settings take turns, request by request, so that whatever else the machine does meets all of them.
Each is a process; every request runs alone. Prompts are token ids and answers of a fixed length, so that all do the same
work; answers are compared, token by token.

- *computed*: without a connector and without vLLM's prefix cache: nothing is reused.
- *engine's own*: vLLM's prefix cache alone, with room for some three thousand tokens.
- *tiers*: with the connector and a KV node, and with the same room; what the engine evicts comes back from the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvcache.node.settings import NATS_VARIABLE, REDIS_VARIABLE, NodeSettings
from ops.bench import shared_docs
from ops.bench.kv import KvBench
from subjects.errors import CarpoolError
from subjects.ids import DeviceId, ModelHash, ReplicaId, WorkerId
from subjects.messages import Endpoint, EngineType, ModelRecord
from workers.spec import ReplicaSpec

PROMPT_TOKENS = 1500
ALTERNATIONS = 5
LENGTHS = (250, 500, 1000, 1500)
ANSWER_TOKENS = 16
KV_BYTES = 72 << 20
"""Room for some 3,100 tokens: two documents of 1,000 with their answers."""
HOST_BYTES = 1 << 30
CONTEXT_TOKENS = 2048
START_S_MAX = 180.0
ANSWER_S_MAX = 120.0
STOP_S_MAX = 20.0
SALT = "5a" * 16
COMPUTED, OWN, TIERS = "computed", "own", "tiers"
_WORDS = (
    "river lamp winter market silver window garden letter engine morning bridge paper copper island thunder violin "
    "harvest corner shadow ladder pepper mirror needle orchard pocket quarry ribbon saddle timber valley"
)


class BenchEngine:
    """An engine process and our end of its socket."""

    def __init__(self, spec: ReplicaSpec, log: Path) -> None:
        self._spec = spec
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def start(self) -> None:
        """Loads and warms it.

        Raises:
            CarpoolError: it does not start.
        """
        ours, theirs = socket.socketpair()
        with theirs, self._log.open("wb") as log:
            spec = msgspec.json.encode(self._spec).decode()
            command = [sys.executable, "-m", "ops.bench.kv_engine_child", str(theirs.fileno()), spec]
            self._process = await asyncio.create_subprocess_exec(
                *command, pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._streams = await asyncio.open_unix_connection(sock=ours)
        await self.do("start", timeout_s=START_S_MAX)

    async def do(self, command: str, timeout_s: float = ANSWER_S_MAX, **fields: Any) -> dict[str, Any]:
        """One command.

        Raises:
            CarpoolError: it failed, or the engine died.
        """
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(json.dumps({"do": command, **fields}).encode() + b"\n")
        try:
            line = await asyncio.wait_for(reader.readline(), timeout_s)
        except TimeoutError:
            line = b""
        if not line:
            raise CarpoolError(f"the engine of the benchmark is gone:\n{self._log.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("error") or answer.get("failure"):
            raise CarpoolError(f"the engine of the benchmark: {answer.get('error') or answer.get('failure')}")
        return answer

    async def ask(self, prompt: Sequence[int], *, tokens: int = ANSWER_TOKENS) -> dict[str, Any]:
        """An answer, with the seconds to its first token and its end. What it saves is at the node after it."""
        return await self.do("ask", prompt=list(prompt), salt=SALT, tokens=tokens)

    async def stop(self) -> None:
        """Ends the process."""
        if self._streams is not None:
            writer = self._streams[1]
            with contextlib.suppress(OSError):
                writer.write(b'{"do": "exit"}\n')
            writer.close()
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), STOP_S_MAX)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()


async def measure(bench: KvBench) -> dict[str, Any]:
    """``ttft_hit_ratio`` (a prompt of 1,500 tokens, found at the node, over computed), ``ttft_miss_ratio`` (what the
    connector costs where nothing is found), and ``shared_doc_latency_cut`` at 1,000 tokens with its curve.

    ``kv_engine_equal_answers`` is the share of answers equal to the computed ones, token by token. In bfloat16 a prompt in
    pieces may round otherwise than in one; in float32 (``CARPOOL_BENCH_DTYPE``) all are equal.

    Raises:
        CarpoolError: an engine or the node does not start or dies.
    """
    from profiles.smollm2 import ensure_smollm2
    from profiles.tokenizer import ModelTokenizer

    source = await asyncio.to_thread(ensure_smollm2)
    tokenizer = ModelTokenizer(source)

    def tokens_of(text: str) -> list[int]:
        return tokenizer.prompts(Endpoint.COMPLETIONS, {"prompt": text})[0]

    with tempfile.TemporaryDirectory(prefix="carpool-bench-") as directory:
        async with _engines(source, Path(directory)) as engines:
            answers = _Answers()
            figures = await _first_tokens(bench, engines, tokens_of, answers)
            figures |= await _shared_documents(bench, engines, tokens_of, answers)
    return figures | {"kv_engine_equal_answers": answers.share()}


class _Answers:
    def __init__(self) -> None:
        self._equal: list[bool] = []

    def compare(self, computed: dict[str, Any], other: dict[str, Any]) -> None:
        self._equal.append(computed["token_ids"] == other["token_ids"])

    def share(self) -> float:
        return round(statistics.fmean(self._equal), 4) if self._equal else 1.0


async def _first_tokens(
    bench: KvBench, engines: dict[str, BenchEngine], tokens_of: Any, answers: _Answers
) -> dict[str, Any]:
    random = np.random.Generator(np.random.PCG64([bench.seed, PROMPT_TOKENS]))
    words = _WORDS.split()
    computed, missed, hit = [], [], []
    for turn in range(ALTERNATIONS + 1):
        drawn = random.choice(len(words), PROMPT_TOKENS)
        prompt = tokens_of(f"List {turn}: " + " ".join(words[int(word)] for word in drawn))[:PROMPT_TOKENS]
        one = await engines[COMPUTED].ask(prompt, tokens=8)
        two = await engines[TIERS].ask(prompt, tokens=8)
        await engines[TIERS].do("reset")
        three = await engines[TIERS].ask(prompt, tokens=8)
        if three["cached"] < PROMPT_TOKENS - 64:
            raise CarpoolError(f"only {three['cached']} of {PROMPT_TOKENS} tokens came back from the node")
        if turn:  # the first one warms both up
            computed.append(one["first_s"])
            missed.append(two["first_s"])
            hit.append(three["first_s"])
            answers.compare(one, two)
            answers.compare(one, three)
    base_s = statistics.median(computed)
    bench.say(f"engine: first token of {PROMPT_TOKENS} tokens {base_s:.2f} s computed, {statistics.median(hit):.2f} s found")
    return {
        "ttft_hit_ratio": round(statistics.median(hit) / base_s, 4),
        "ttft_miss_ratio": round(statistics.median(missed) / base_s, 4),
        "ttft_computed_s": [round(value, 4) for value in computed],
        "ttft_hit_s": [round(value, 4) for value in hit],
    }


async def _shared_documents(
    bench: KvBench, engines: dict[str, BenchEngine], tokens_of: Any, answers: _Answers
) -> dict[str, Any]:
    workload = shared_docs.read()
    documents = [tokens_of(text) for text in workload.documents]
    questions = [tokens_of(f"\n\nQuestion: {text}\nAnswer:") for text in workload.questions]
    names = list(engines)
    curve: dict[str, dict[str, float]] = {}
    for length in LENGTHS:
        # A prefix of a document is one of the longer ones' too: each length has a mark of its own at its start.
        mark = tokens_of(f"[{length}] ")
        took: dict[str, list[float]] = {name: [] for name in names}
        for turn, (document, question) in enumerate(workload.order):
            prompt = [*mark, *documents[document]][:length] + questions[question]
            said = {}
            for place in range(len(names)):
                name = names[(turn + place) % len(names)]
                said[name] = await engines[name].ask(prompt)
                took[name].append(said[name]["all_s"])
            answers.compare(said[COMPUTED], said[OWN])
            answers.compare(said[COMPUTED], said[TIERS])
        mean = {name: statistics.fmean(values) for name, values in took.items()}
        curve[str(length)] = {
            "computed_s": round(mean[COMPUTED], 4),
            "engine_own_s": round(mean[OWN], 4),
            "tiers_s": round(mean[TIERS], 4),
            "engine_own_cut": round(1 - mean[OWN] / mean[COMPUTED], 4),
            "cut": round(1 - mean[TIERS] / mean[COMPUTED], 4),
        }
        bench.say(f"engine: documents of {length} tokens: {curve[str(length)]}")
    return {
        "shared_doc_latency_cut": curve["1000"]["cut"],
        "shared_doc_engine_own_cut": curve["1000"]["engine_own_cut"],
        "shared_doc_curve": curve,
        "shared_doc_workload_seed": workload.seed,
    }


@contextlib.asynccontextmanager
async def _engines(source: Path, directory: Path) -> AsyncIterator[dict[str, BenchEngine]]:
    """All three, and the node of the last."""
    settings = NodeSettings(
        worker="worker-bench",
        socket_path=str(directory / "kv.sock"),
        host_bytes_max=HOST_BYTES,
        exit_with_stdin=True,
    )
    command = [sys.executable, "-m", "kvcache.node.main", msgspec.json.encode(settings).decode()]
    environment = {name: value for name, value in os.environ.items() if name not in (NATS_VARIABLE, REDIS_VARIABLE)}
    with (directory / "node.log").open("wb") as log:
        node = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, env=environment
        )
    specs = {
        COMPUTED: _spec(source, "", enable_prefix_caching=False),
        OWN: _spec(source, ""),
        TIERS: _spec(source, settings.socket_path),
    }
    engines = {name: BenchEngine(spec, directory / f"{name}.log") for name, spec in specs.items()}
    try:
        assert node.stdout is not None
        if not await asyncio.wait_for(node.stdout.readline(), START_S_MAX):
            raise CarpoolError(f"the KV node did not start: {(directory / 'node.log').read_text()[-2000:]}")
        for engine in engines.values():  # one after the other: each takes all cores while it loads
            await engine.start()
        yield engines
    finally:
        for engine in engines.values():
            await engine.stop()
        if node.returncode is None:
            node.terminate()
        await node.wait()


def _spec(source: Path, socket_path: str, **options: bool) -> ReplicaSpec:
    dtype = os.environ.get("CARPOOL_BENCH_DTYPE", "bfloat16")
    record = ModelRecord(
        name="smollm2",
        model_hash=ModelHash("b" * 64),
        weights_hash="b" * 64,
        kv_signature=f"bench-{dtype}",
        engine_type=EngineType.VLLM,
        source=str(source),
        dtype=dtype,
        weights_bytes=1,
        kv_bytes_per_token=1,
        kv_bytes=KV_BYTES * (2 if dtype == "float32" else 1),
        budget_bytes=1,
        max_context_len=CONTEXT_TOKENS,
        max_num_seqs=4,
        engine_options=dict(options),
    )
    return ReplicaSpec(
        replica=ReplicaId("replica-bench"),
        worker=WorkerId("worker-bench"),
        device=DeviceId("cpu0"),
        record=record,
        nats_urls=(),
        threads=os.cpu_count() or 1,
        kv_socket=socket_path,
    )
