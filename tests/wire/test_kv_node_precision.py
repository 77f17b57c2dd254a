"""A node gives what one precision of a model computed to an engine with an fp8 cache of the same weights, to no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvcache.codec.codecs import encode
from kvcache.codec.precision import convert
from kvcache.core.identity import KvSignature
from kvcache.wire.client import KvClient, KvNode
from kvcache.wire.messages import Attach
from profiles.capacity import Shape, kv_signature
from tests.wire.kv_nodes import SALT, USE, WEIGHTS_HASH, NodeProcess, chain

SHAPE = Shape(layers=3, kv_heads=2, head_dim=96, max_context_len=512)
"""In float16 a block is neither a whole number of pages nor one piece of memory once others left."""


def signature(name: str, dtype: str, width: int, config: float = 1e5) -> KvSignature:
    return KvSignature(
        model=kv_signature(SHAPE, name, WEIGHTS_HASH, {"rope_theta": config}, 32),
        layers=3,
        kv_heads=2,
        head_size=96,
        dtype=dtype,
        form="layer,head,token,kv",
        block_size=32,
        block_bytes=3 * 2 * 2 * 96 * 32 * width,
    )


WIDE = signature("float16", "float16", 2)
PLAIN_FP8 = signature("fp8", "fp8_e4m3", 1)


def taking(plain: KvSignature) -> KvSignature:
    """Of a model that takes converted blocks."""
    return msgspec.structs.replace(plain, model=f"{plain.model}-converted")


FP8 = taking(PLAIN_FP8)


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    process = NodeProcess(tmp_path_factory.mktemp("precision"), "host-1", disk=True)
    yield process
    assert process.stop() == 0


def engine(
    node: NodeProcess, kept: KvSignature, model: str, weights: str = WEIGHTS_HASH, codec: str = "none"
) -> tuple[KvClient, KvNode]:
    name = f"replica-{model}"
    attach = Attach(model_hash=model * 64, weights_hash=weights, signature=kept, replica=name, codec=codec)
    return KvClient(node.path, attach, timeout_s=5.0), KvNode(node.path, attach)


async def prepared(questions: KvNode, hashes: list[bytes], *, salt: bytes = SALT, speed: float = 100.0) -> int:
    return await questions.prepare(salt, hashes, deadline_s=10.0, prefill_tokens_per_s=speed, use=USE)


def block(seed: int) -> bytes:
    return np.random.default_rng(seed).normal(size=WIDE.block_bytes // 2).astype(np.float16).tobytes()


def narrow(wide: bytes) -> bytes:
    into = bytearray(FP8.block_bytes)
    convert(WIDE, wide, FP8, memoryview(into))
    return bytes(into)


async def test_blocks_of_a_wide_precision_serve_the_fp8_variant(node: NodeProcess) -> None:
    """KVC-5: its own blocks stay, the rest of the prompt is converted, from memory and from disk; nothing the other way."""
    hashes, raw = chain(1, 12), [block(seed) for seed in range(12)]
    client, questions = engine(node, WIDE, "a")
    assert client.write(SALT, b"", hashes, memoryview(b"".join(raw)), USE) == 12
    fp8, ask_fp8 = engine(node, FP8, "b")
    own = bytes(FP8.block_bytes)
    assert fp8.write(SALT, b"", hashes[:2], memoryview(own * 2), USE) == 2
    assert fp8.read(SALT, hashes, memoryview(bytearray(12 * FP8.block_bytes))) == 2

    assert await prepared(ask_fp8, hashes, speed=1e12) == 2  # computing is faster
    assert await prepared(ask_fp8, hashes) == 12
    into = memoryview(bytearray(12 * FP8.block_bytes))
    assert fp8.read(SALT, hashes, into) == 12
    assert into == b"".join([own, own, *map(narrow, raw[2:])])

    later = chain(2, 4)
    fp8.write(SALT, b"", later, memoryview(own * 4), USE)
    assert await prepared(questions, later) == 0
    fp8.close()
    client.close()
    await questions.close()
    await ask_fp8.close()

    assert node.stop() == 0  # all is on disk then
    node.start()
    fp8, ask_fp8 = engine(node, FP8, "b")
    assert (await ask_fp8.evict(FP8.model, 1.0)).blocks == 16
    assert await prepared(ask_fp8, hashes) == 12
    assert fp8.read(SALT, hashes, into) == 12
    assert into == b"".join(map(narrow, raw))
    fp8.close()
    await ask_fp8.close()


async def test_no_other_tenant_weights_or_computation_are_served(node: NodeProcess) -> None:
    """P2, O3: the same hashes of another tenant, other weights, another configuration or scales are not converted,
    nor for a model that asks for none, before and after one that does."""
    hashes = chain(3, 4)
    client, questions = engine(node, WIDE, "a")
    client.write(SALT, b"", hashes, memoryview(b"".join(map(block, range(4)))), USE)
    fp8, ask_fp8 = engine(node, FP8, "b")
    assert await prepared(ask_fp8, hashes, salt=b"z" * 16) == 0
    others = [
        engine(node, FP8, "c", weights="c" * 64),
        engine(node, taking(signature("fp8", "fp8_e4m3", 1, config=2e5)), "d"),
        engine(node, taking(signature("fp8_scaled", "fp8_e4m3", 1)), "e"),
        engine(node, msgspec.structs.replace(FP8, form="layer,kv,token,head,dim"), "f"),
        engine(node, PLAIN_FP8, "0"),
    ]
    for _, other in others:
        assert await prepared(other, hashes) == 0
    assert await prepared(ask_fp8, hashes) == 4
    assert await prepared(others[-1][1], hashes) == 0
    assert others[-1][0].read(SALT, hashes, memoryview(bytearray(4 * FP8.block_bytes))) == 0
    for one, ask in [(client, questions), (fp8, ask_fp8), *others]:
        one.close()
        await ask.close()


@pytest.mark.parametrize("codec", ["none", "lossless"])
async def test_a_block_that_changed_on_disk_is_not_converted(codec: str, node: NodeProcess) -> None:
    """P2: what does not verify is dropped, those before it serve, in files of any codec; the rest comes when it is back."""
    hashes, raw = chain(4, 4), [block(seed) for seed in range(4)]
    wide, questions = engine(node, WIDE, "a", codec=codec)
    wide.write(SALT, b"", hashes, memoryview(b"".join(raw)), USE)
    wide.close()
    await questions.close()
    assert node.stop() == 0
    (file,) = Path(node.settings.directory).glob("*.kvc")
    payload = raw[2] if codec == "none" else encode(WIDE, raw[2], codec)
    at = file.read_bytes().index(payload[:4096]) + 100
    with file.open("r+b") as changed:
        changed.seek(at)
        changed.write(bytes([payload[100] ^ 4]))
    node.start()
    fp8, ask_fp8 = engine(node, FP8, "b")
    assert await prepared(ask_fp8, hashes) == 2
    into = memoryview(bytearray(4 * FP8.block_bytes))
    assert fp8.read(SALT, hashes, into) == 2
    assert into[: 2 * FP8.block_bytes] == b"".join(map(narrow, raw[:2]))
    wide, questions = engine(node, WIDE, "a", codec=codec)
    wide.write(SALT, hashes[1], hashes[2:3], memoryview(raw[2]), USE, first=2)
    assert await prepared(ask_fp8, hashes) == 4
    assert fp8.read(SALT, hashes, into) == 4 and into == b"".join(map(narrow, raw))
    for one in (fp8, wide):
        one.close()
    for ask in (ask_fp8, questions):
        await ask.close()


async def test_what_was_converted_is_kept_like_any_other_block(node: NodeProcess) -> None:
    """KVC-1: it outlives the blocks that it came from, and the node."""
    hashes, raw = chain(5, 4), [block(seed) for seed in range(4)]
    wide, questions = engine(node, WIDE, "a")
    wide.write(SALT, b"", hashes, memoryview(b"".join(raw)), USE)
    fp8, ask_fp8 = engine(node, FP8, "b")
    assert await prepared(ask_fp8, hashes) == 4
    assert (await questions.evict(WIDE.model, 1.0)).blocks == 4
    for one, ask in ((wide, questions), (fp8, ask_fp8)):
        one.close()
        await ask.close()
    assert node.stop() == 0
    node.start()
    fp8, ask_fp8 = engine(node, FP8, "b")
    into = memoryview(bytearray(4 * FP8.block_bytes))
    assert fp8.read(SALT, hashes, into) == 4 and into == b"".join(map(narrow, raw))
    fp8.close()
    await ask_fp8.close()
