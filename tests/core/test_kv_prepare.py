"""What a replica asks its KV node before a request enters the engine, and what it does when the node does not answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvcache.core.identity import KvSignature
from kvcache.engine.orders import KvRequest
from kvcache.errors import KvRefused, KvUnavailable
from kvcache.wire.messages import KvUse
from profiles.blocks import chain_hashes, engine_salt
from subjects.ids import DeviceId, ModelHash, ReplicaId, RequestId, WorkerId
from subjects.messages import Endpoint, EngineType, ModelRecord, SlaClass, StepCosts, Task
from workers.engines import kv_reuse
from workers.engines.base import EngineRequest
from workers.engines.kv_reuse import PREPARE_S_MAX, PREPARE_S_MIN, KvReuse, PrefillSpeed, reuses_kv
from workers.spec import ReplicaSpec

BLOCK = 32
SALT = b"s" * 16
SIGNATURE = KvSignature(
    model="m", layers=1, kv_heads=1, head_size=1, dtype="float32", form="f", block_size=BLOCK, block_bytes=256
)


def spec(tmp_path: Path, socket: str = "/nowhere/kv.sock", config: Any = None, **fields: Any) -> ReplicaSpec:
    (tmp_path / "config.json").write_text(json.dumps(config if config is not None else {"architectures": ["A"]}))
    values: dict[str, Any] = {
        "name": "m",
        "model_hash": ModelHash("0" * 64),
        "weights_hash": "0" * 64,
        "kv_signature": "m-b32",
        "engine_type": EngineType.VLLM,
        "source": str(tmp_path),
        "weights_bytes": 1,
        "kv_bytes_per_token": 1,
        "kv_bytes": 1,
        "budget_bytes": 1,
        "max_context_len": 1024,
    }
    return ReplicaSpec(
        replica=ReplicaId("replica-1"),
        worker=WorkerId("worker-1"),
        device=DeviceId("cpu0"),
        record=ModelRecord(**values | fields),
        nats_urls=(),
        kv_socket=socket,
    )


class FakeNode:
    """Answers as it is told; ``frozen`` never does, and like the real client breaks its ``prepare`` when a ping fails."""

    def __init__(self, ready: int = 3) -> None:
        self.ready = ready
        self.asked: list[dict[str, Any]] = []
        self.pings = 0
        self.error: Exception | None = None
        self.frozen = False
        self.slow = False
        self.cancelled = 0
        self._broken = asyncio.Event()

    async def prepare(self, salt: bytes, hashes: Sequence[bytes], **fields: Any) -> int:
        self.asked.append({"salt": salt, "hashes": list(hashes), **fields})
        if self.error is not None:
            raise self.error
        try:
            if self.frozen:
                await self._broken.wait()
                raise KvUnavailable("broken")
            if self.slow:
                await asyncio.sleep(kv_reuse.QUICK_S * 2)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return min(self.ready, len(hashes))

    async def stats(self, *, timeout_s: float) -> None:
        self.pings += 1
        if self.frozen or self.error is not None:
            self._broken.set()
            raise KvUnavailable("no answer")

    async def close(self) -> None:
        pass


def opened(tmp_path: Path, *nodes: FakeNode, **fields: Any) -> KvReuse:
    reuse = KvReuse(spec(tmp_path, **fields))
    reuse._nodes = nodes  # type: ignore[assignment]
    return reuse


def request(salt: str = SALT.hex(), **fields: Any) -> EngineRequest:
    return EngineRequest(
        request=RequestId("r"), attempt=1, endpoint=Endpoint.CHAT, body=b"", kv_pages_needed=1, cache_salt=salt, **fields
    )


def prompt(tokens: int, kind: str = "token", extra: Any = None) -> Any:
    return SimpleNamespace(
        engine_input={"type": kind, "prompt_token_ids": list(range(tokens))}, params=SimpleNamespace(extra_args=extra)
    )


def told(one: Any) -> KvRequest | None:
    return KvRequest.of((one.params.extra_args or {}).get("kv_transfer_params"))


async def test_the_node_is_asked_for_whole_blocks_but_for_the_last_token(tmp_path: Path) -> None:
    """With the request's salt and what is known of it; what is ready goes into vLLM's parameters beside what was there."""
    node = FakeNode(ready=2)
    reuse = opened(tmp_path, node)
    one = prompt(4 * BLOCK, extra={"other": 1})
    await reuse.prepare(request(tenant="t", chain_id="c", sla_class=SlaClass.GOLD, test=True), [one])
    use = KvUse(tenant="t", request="r", sla_class=SlaClass.GOLD, chain_id="c", test=True)
    assert node.asked[0]["hashes"] == chain_hashes(range(3 * BLOCK), BLOCK, SALT)
    assert (node.asked[0]["salt"], node.asked[0]["use"]) == (SALT, use)
    assert one.params.extra_args["other"] == 1
    found = told(one)
    assert found is not None
    assert (found.ready, found.asked, found.use) == (2, True, use)


async def test_short_prompts_and_other_inputs(tmp_path: Path) -> None:
    """Under a block nothing is asked, but its answer is saved; prompts without tokens or salt use no tiers (O3)."""
    node = FakeNode()
    reuse = opened(tmp_path, node)
    short, image = prompt(BLOCK), prompt(4 * BLOCK, kind="multimodal")
    await reuse.prepare(request(), [short, image])
    assert (node.asked, told(short), told(image)) == ([], KvRequest(use=KvUse(request="r")), None)
    for salt in ("not hex", "", "ab", engine_salt(SALT, kept=False)):
        odd = prompt(4 * BLOCK)
        await reuse.prepare(request(salt=salt), [odd])
        assert (node.asked, told(odd)) == ([], None)


async def test_all_prompts_and_all_shards_are_asked(tmp_path: Path) -> None:
    """A replica that spans devices has what its poorest shard has."""
    nodes = FakeNode(ready=3), FakeNode(ready=1)
    reuse = opened(tmp_path, *nodes)
    prompts = [prompt(4 * BLOCK + 1), prompt(2 * BLOCK + 1)]
    await reuse.prepare(request(), prompts)
    assert [found.ready for one in prompts if (found := told(one))] == [1, 1]
    assert [len(node.asked) for node in nodes] == [2, 2]


async def test_the_deadline_is_what_computing_would_take(tmp_path: Path) -> None:
    """From measured speed; within bounds."""
    node = FakeNode()
    reuse = opened(tmp_path, node)
    deadlines = []
    for speed in (160.0, 1e9, 0.001):
        reuse.speed.tokens_per_s = speed
        await reuse.prepare(request(), [prompt(10 * BLOCK + 1)])
        deadlines.append(node.asked[-1]["deadline_s"])
    assert deadlines == [2.0, PREPARE_S_MIN, PREPARE_S_MAX]
    assert node.asked[0]["prefill_tokens_per_s"] == 160.0


async def test_a_node_that_is_gone_is_left_alone_until_it_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request learns of it; the next are not held up; pings find out when it is back (REL-3)."""
    monkeypatch.setattr(kv_reuse, "RETRY_S", 0.01)
    node = FakeNode()
    reuse = opened(tmp_path, node)
    node.error = KvUnavailable("gone")
    prompts = [prompt(2 * BLOCK + 1) for _ in range(5)]
    for one in prompts:
        await reuse.prepare(request(), [one])
    assert [found.asked for one in prompts if (found := told(one))] == [False] * 5
    assert len(node.asked) == 1
    node.error = None
    looking = reuse._looking
    assert looking is not None
    await looking
    after = prompt(2 * BLOCK + 1)
    await reuse.prepare(request(), [after])
    found = told(after)
    assert found is not None and found.asked
    await reuse.close()


async def test_a_frozen_node_is_found_out_by_a_ping(tmp_path: Path) -> None:
    """Not by the deadline, which may be seconds: an answer that is late is waited for only while pings come back."""
    node = FakeNode()
    node.frozen = True
    reuse = opened(tmp_path, node)
    reuse.speed.tokens_per_s = 1.0
    one = prompt(4 * BLOCK + 1)
    await reuse.prepare(request(), [one])
    found = told(one)
    assert found is not None and (found.ready, found.asked) == (0, False)
    assert node.pings == 1
    await reuse.close()


async def test_a_node_that_fetches_is_waited_for(tmp_path: Path) -> None:
    """It answers pings meanwhile."""
    node = FakeNode()
    node.slow = True
    reuse = opened(tmp_path, node)
    one = prompt(4 * BLOCK + 1)
    await reuse.prepare(request(), [one])
    found = told(one)
    assert found is not None and found.ready == 3
    assert node.pings == 1


async def test_an_aborted_request_asks_no_longer(tmp_path: Path) -> None:
    """The client is gone while the node fetches."""
    node = FakeNode()
    node.slow = True
    reuse = opened(tmp_path, node)
    task = asyncio.get_running_loop().create_task(reuse.prepare(request(), [prompt(4 * BLOCK + 1)]))
    while not node.asked:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert node.cancelled == 1


async def test_a_refusal_is_no_absence(tmp_path: Path) -> None:
    """A node that says no is asked again the next time."""
    node = FakeNode()
    node.error = KvRefused("not this model")
    reuse = opened(tmp_path, node)
    for _ in range(2):
        await reuse.prepare(request(), [prompt(2 * BLOCK + 1)])
    assert len(node.asked) == 2


async def test_a_report_of_the_workers_opens_it(tmp_path: Path) -> None:
    """Without one, or with blocks that nobody else would name so, the engine goes without tiers; it is gone either way."""
    for block_size in (BLOCK, 2 * BLOCK, None):
        reuse = KvReuse(spec(tmp_path, socket=str(tmp_path / "kv")))
        if block_size is not None:
            told_of = msgspec.structs.replace(SIGNATURE, block_size=block_size)
            Path(f"{reuse._report}.0").write_bytes(msgspec.json.encode(told_of))
        assert reuse.open() is (block_size == BLOCK)
        assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
        await reuse.emptied()  # nobody listens: nothing happens
        await reuse.close()


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, True),
        ({"socket": ""}, False),
        ({"kv_reuse": False}, False),
        ({"kv_signature": ""}, False),
        ({"task": Task.EMBED}, False),
        ({"config": {"vision_config": {"a": 1}}}, False),
        ({"config": {"is_encoder_decoder": True}}, False),
        ({"engine_options": {"kv_transfer_config": "theirs"}}, False),
    ],
    ids=["a node", "no node", "not wanted", "no signature", "embeddings", "images", "an encoder", "a connector of theirs"],
)
def test_who_gets_a_connector(tmp_path: Path, fields: dict[str, Any], wanted: bool) -> None:
    """An engine without a node has none at all."""
    assert reuses_kv(spec(tmp_path, **fields)) is wanted


def test_an_environment_that_vllm_refuses_with_a_connector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model starts without tiers rather than not at all."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    assert not reuses_kv(spec(tmp_path))


def test_the_speed_of_prefilling(tmp_path: Path) -> None:
    """Of the model's costs until a long enough prompt was measured; then a running mean."""
    costs = {"cpu": StepCosts(prefill_token_s=0.001, step_const_s=0.01)}
    speed = PrefillSpeed(spec(tmp_path, costs=costs).record)
    assert speed.tokens_per_s == pytest.approx(1000.0)
    speed.took(3, 1.0)
    assert speed.tokens_per_s == pytest.approx(1000.0)
    speed.took(500, 1.0)
    assert speed.tokens_per_s == 500.0
    speed.took(1000, 1.0)
    assert speed.tokens_per_s == 600.0
    assert PrefillSpeed(spec(tmp_path).record).tokens_per_s == 0.0
