"""What a node does when its disk, its memory, Redis or its agent fails it, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from redis import Redis

import kvcache.node.tiers
from kvcache.core.holdings import Held
from kvcache.core.identity import PAGE_BYTES, KvIdentity
from kvcache.node.main import _join
from kvcache.node.node import TEND_S, Node
from kvcache.node.settings import REDIS_VARIABLE
from kvcache.store.store import StoredBlock
from kvcache.wire.client import KvNode
from kvcache.wire.messages import KvUse
from subjects import names
from subjects.codec import decode
from subjects.messages import Alert
from subjects.nats.bus import NatsBus
from tests.servers import NatsServer, ValkeyServer
from tests.wire.kv_nodes import MODEL_HASH, SALT, SIGNATURE, USE, WEIGHTS_HASH, NodeProcess, chain, right, room, row, rows


async def eventually(condition: Callable[[], Awaitable[bool]], within_s: float = 20.0) -> None:
    """Asks again until the answer is yes."""
    end_s = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < end_s, "not in time"
        await asyncio.sleep(0.05)


async def on_disk(questions: KvNode, blocks: int) -> None:
    """Waits until so many blocks are on disk."""

    async def there() -> bool:
        return (await questions.stats(timeout_s=10)).disk.blocks >= blocks

    await eventually(there)


async def test_flipped_bits_on_disk_are_not_served_and_told(shared_nats_server: NatsServer, tmp_path: Path) -> None:
    """A block whose bytes changed is missing, those before it are right, and one alert says so (P2)."""
    bus = await NatsBus.connect(shared_nats_server.url, name="test")
    heard: list[Alert] = []
    subscription = await bus.subscribe(names.ALL_ALERTS, lambda message: heard.append(decode(message.payload, Alert)))
    await bus.round_trip(timeout_s=5)
    process = NodeProcess(tmp_path, "flipped-1", shared_nats_server.url, disk=True)
    hashes = chain(1, 6)
    client = process.client()
    await asyncio.to_thread(client.write, SALT, b"", hashes, rows(hashes), USE)
    client.close()
    assert process.stop() == 0
    (file,) = (tmp_path / "store").glob("*.kvc")
    data = file.read_bytes()
    wrong = rows(hashes[3:4])
    at = data.index(bytes(wrong[:4000])) + 5
    with file.open("r+b") as changed:
        changed.seek(at)
        changed.write(bytes([data[at] ^ 4]))
    process.start()
    client, questions = process.client(), process.questions()
    into = room(6)
    assert await asyncio.to_thread(client.read, SALT, hashes, into) == 3
    assert right(into, hashes, 3)

    async def told() -> bool:
        return [alert.kind for alert in heard] == ["kv-corrupt"]

    await eventually(told)
    assert heard[0].scope == "flipped" and (await questions.stats()).corrupt == 1
    assert await asyncio.to_thread(client.write, SALT, hashes[2], hashes[3:4], rows(hashes[3:4]), USE, first=3) == 1
    assert await asyncio.to_thread(client.read, SALT, hashes, into) == 6 and right(into, hashes, 6)
    client.close()
    await questions.close()
    await subscription.stop()
    await bus.close()
    assert process.stop() == 0


async def test_a_spent_write_budget_is_told_and_memory_goes_on(shared_nats_server: NatsServer, tmp_path: Path) -> None:
    """A day's budget of two blocks: two are written, the rest stays in memory, one alert (SSD life)."""
    bus = await NatsBus.connect(shared_nats_server.url, name="test")
    heard: list[Alert] = []
    subscription = await bus.subscribe(names.ALL_ALERTS, lambda message: heard.append(decode(message.payload, Alert)))
    await bus.round_trip(timeout_s=5)
    budget = 2 * 2 * 65536
    process = NodeProcess(tmp_path, "budget-1", shared_nats_server.url, disk=True, write_bytes_per_day_max=budget)
    client, questions = process.client(), process.questions()
    hashes = chain(1, 6)
    await asyncio.to_thread(client.write, SALT, b"", hashes, rows(hashes), USE)

    async def told() -> bool:
        return [alert.kind for alert in heard] == ["kv-write-budget"]

    await eventually(told)
    stats = await questions.stats()
    assert stats.disk.blocks == 2 and stats.disk_state == "budget"
    into = room(6)
    assert await asyncio.to_thread(client.read, SALT, hashes, into) == 6 and right(into, hashes, 6)
    client.close()
    await questions.close()
    await subscription.stop()
    await bus.close()
    assert process.stop() == 0


async def test_a_disk_that_hangs_holds_up_nothing_in_memory(tmp_path: Path) -> None:
    """While the store waits for its disk, blocks in memory come and go, and counts are told: the disk is silent (E5)."""
    settings = NodeProcess(tmp_path, "hangs-1", disk=True, start=False).settings
    node = Node(settings)
    await node.open(alone=True)
    assert node.tiers.store is not None
    hangs, goes_on = threading.Event(), threading.Event()

    def hold(lock: AbstractContextManager[Any]) -> None:
        with lock:
            hangs.set()
            goes_on.wait(60)

    holding = threading.Thread(target=hold, args=(node.tiers.store._rooms.lock,))
    holding.start()
    process = NodeProcess(tmp_path, "hangs-1", start=False)
    client, questions = process.client(timeout_s=2.0), process.questions()
    try:
        await asyncio.to_thread(hangs.wait)
        hashes = chain(1, 6)
        assert await asyncio.to_thread(client.write, SALT, b"", hashes, rows(hashes), USE) == 6
        await asyncio.to_thread(client.used, SALT, hashes, USE)
        await asyncio.sleep(2 * settings.settle_s + TEND_S)  # they are to be written by now
        assert await questions.prepare(SALT, hashes, deadline_s=1.0, prefill_tokens_per_s=0.0, use=USE) == 6
        into = room(6)
        assert await asyncio.to_thread(client.read, SALT, hashes, into) == 6 and right(into, hashes, 6)
        stats = await questions.stats(timeout_s=5.0)
        assert (stats.host.blocks, stats.disk_state) == (6, "silent")
    finally:
        goes_on.set()
        holding.join()
    await on_disk(questions, 6)
    assert (await questions.stats()).disk_state == ""
    client.close()
    await questions.close()
    await node.close()


async def test_evicting_all_leaves_nothing_that_only_the_store_knows(tmp_path: Path) -> None:
    """``evict`` of all is exact for the disk, also for blocks that the node lost sight of (SCH-8)."""
    node = Node(NodeProcess(tmp_path, "exact-1", disk=True, start=False).settings)
    await node.open(alone=True)
    store = node.tiers.store
    assert store is not None
    identity = KvIdentity(weights_hash=WEIGHTS_HASH, signature=SIGNATURE, salt=SALT)
    (hash,) = chain(1, 1)
    stored = StoredBlock(hash, b"", [memoryview(row(hash))])
    assert store.put(identity, [stored], time.time()).kept == 1 and len(node.tiers.holdings) == 0
    assert (await node.evict("tests", 0.5)).blocks == 0 and store.stats().blocks == 1
    evicted = await node.evict("tests", 1.0)
    assert (evicted.blocks, evicted.disk_bytes, store.stats().blocks) == (1, 2 * PAGE_BYTES, 0)
    await node.close()


async def test_evicting_many_blocks_lets_others_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``evict`` of a million blocks must not keep the node from its engines: some at a time, and all are counted."""
    monkeypatch.setattr(kvcache.node.tiers, "DROPPED_AT_ONCE", 4)
    process = NodeProcess(tmp_path, "many-1", disk=True, start=False)
    node = Node(process.settings)
    await node.open(alone=True)
    client, hashes = process.client(), chain(1, 10)
    assert await asyncio.to_thread(client.write, SALT, b"", hashes, rows(hashes), USE) == 10
    at_once: list[int] = []
    drop = node.tiers._drop

    async def counted(leaving: Sequence[Held]) -> tuple[int, int]:
        at_once.append(len(leaving))
        return await drop(leaving)

    monkeypatch.setattr(node.tiers, "_drop", counted)
    evicted = await node.evict("tests", 1.0)
    assert at_once == [4, 4, 2] and (evicted.blocks, evicted.host_bytes) == (10, 20 * PAGE_BYTES)
    assert await asyncio.to_thread(client.read, SALT, hashes, room(10)) == 0
    client.close()
    await node.close()


async def test_a_client_that_is_not_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever keeps a node from its bus or from Redis is in its log, and its host is served."""
    monkeypatch.setenv(REDIS_VARIABLE, "redis://:secret@127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "kvcache.shared.index", None)
    node = Node(NodeProcess(tmp_path, "bare-1", start=False).settings)
    with structlog.testing.capture_logs() as logs:
        assert await _join(node) is None
    assert [line["event"] for line in logs] == ["the KV node goes without others"] and "secret" not in str(logs)


async def test_readers_of_one_prefix_on_disk_all_get_it(tmp_path: Path) -> None:
    """Whoever asks while another reads the same blocks from disk waits for them, and does not go without."""
    process = NodeProcess(tmp_path, "crowd-1", disk=True)
    hashes = chain(1, 40)
    client = process.client()
    await asyncio.to_thread(client.write, SALT, b"", hashes, rows(hashes), USE)
    client.close()
    assert process.stop() == 0
    process.start()
    clients = [process.client(f"replica-{number}") for number in range(8)]
    into = [room(40) for _ in clients]
    found = await asyncio.gather(
        *(asyncio.to_thread(one.read, SALT, hashes, some) for one, some in zip(clients, into, strict=True))
    )
    assert found == [40] * 8 and all(right(some, hashes, 40) for some in into)
    for one in clients:
        one.close()
    assert process.stop() == 0


@pytest.mark.parametrize("codec", ["none", "lossless"])
async def test_codecs_of_the_disk_give_the_same_bytes(codec: str, tmp_path: Path) -> None:
    """Without loss what comes back from disk is what went there, and takes no more room (KVC-5)."""
    process = NodeProcess(tmp_path, "coded", disk=True)
    client = process.client(codec=codec)
    hashes = chain(1, 5)
    await asyncio.to_thread(client.write, SALT, b"", hashes, rows(hashes), USE)
    client.close()
    assert process.stop() == 0
    process.start()
    client, questions = process.client(codec=codec), process.questions()
    assert (await questions.stats()).disk.blocks == 5
    into = room(5)
    assert await asyncio.to_thread(client.read, SALT, hashes, into) == 5 and right(into, hashes, 5)
    client.close()
    await questions.close()
    assert process.stop() == 0


async def test_uses_are_shared_over_redis_and_nothing_waits_for_it(valkey_server: ValkeyServer, tmp_path: Path) -> None:
    """The score of a span is its last use (KVC-2); while Redis is frozen calls are as quick as ever (M3)."""
    process = NodeProcess(tmp_path, "shared-1", redis_url=valkey_server.url)
    client, questions = process.client(), process.questions()
    hashes = chain(1, 16)
    await asyncio.to_thread(client.write, SALT, b"", hashes, rows(hashes), USE)

    async def up() -> bool:
        return (await questions.stats(timeout_s=10)).redis_state == "up"

    await eventually(up)
    redis = Redis(port=valkey_server.port)

    async def scored() -> bool:
        await asyncio.to_thread(client.used, SALT, hashes, USE)
        return {str(member) for member in redis.zrange(f"cache:hotness:{MODEL_HASH}", 0, -1)} == {
            str(hash.hex().encode()) for hash in hashes[7::8]
        }

    await eventually(scored)
    redis.close()
    valkey_server.freeze()
    begin_s = time.monotonic()
    for number in range(50):
        await asyncio.to_thread(client.used, SALT, hashes, KvUse(request=f"r-{number}"))
        assert await questions.prepare(SALT, hashes, deadline_s=1.0, prefill_tokens_per_s=0.0, use=USE) == 16
    assert time.monotonic() - begin_s < 10.0
    client.close()
    await questions.close()
    assert process.stop() == 0
    valkey_server.thaw()


async def test_test_traffic_leaves_first(tmp_path: Path) -> None:
    """Blocks of test traffic make room before others that are older (KVC-2)."""
    process = NodeProcess(tmp_path, "host", host_bytes_max=10 * 2 * 65536, hot_s=0.0)
    client, questions = process.client(), process.questions()
    test = KvUse(request="t-1", test=True)
    real, tested, new = chain(1, 4), chain(2, 4), chain(3, 4)
    for hashes, use in ((real, USE), (tested, test)):
        await questions.prepare(SALT, hashes, deadline_s=1.0, prefill_tokens_per_s=0.0, use=use)
        await asyncio.to_thread(client.write, SALT, b"", hashes, rows(hashes), use)
    await asyncio.to_thread(client.write, SALT, b"", new, rows(new), USE)
    for hashes, left in ((real, 4), (new, 4)):
        assert await asyncio.to_thread(client.read, SALT, hashes, room(4)) == left
    assert await asyncio.to_thread(client.read, SALT, tested, room(4)) < 4
    client.close()
    await questions.close()
    assert process.stop() == 0


def test_a_second_sigterm_changes_nothing(tmp_path: Path) -> None:
    """The flush goes on, and the exit code is 0."""
    process = NodeProcess(tmp_path, "host", disk=True, settle_s=60.0)
    client = process.client()
    hashes = chain(1, 200)
    client.write(SALT, b"", hashes, rows(hashes), USE)
    client.close()
    process.signal(signal.SIGTERM)
    process.signal(signal.SIGTERM)
    assert process.stop() == 0
    process.start()
    client = process.client()
    into = room(200)
    assert client.read(SALT, hashes, into) == 200 and right(into, hashes, 200)
    client.close()
    assert process.stop() == 0


def test_it_ends_with_standard_input(tmp_path: Path) -> None:
    """An agent that dies takes its node along, which flushes first (REL-3: nothing is orphaned)."""
    process = NodeProcess(tmp_path, "host", start=False, exit_with_stdin=True)
    process.start(stdin=subprocess.PIPE)
    assert process.process.stdin is not None
    process.process.stdin.close()
    process.process.stdin = None
    assert process.process.wait(timeout=20) == 0
    process.stop()


@pytest.mark.parametrize("argument", ["", "{}", "[1]", '{"worker": "w", "socket_path": "/x", "nonsense": 1}'])
def test_bad_settings_are_told_in_a_line(argument: str, tmp_path: Path) -> None:
    """Exit code 2 and what is wrong."""
    process = NodeProcess(tmp_path, "host", start=False)
    process.start(argument=argument)
    assert process.stop() == 2
    assert len(process.said.decode().strip().splitlines()) == 1


def test_it_imports_no_torch_and_serves_soon(tmp_path: Path) -> None:
    """The node's process is small: no torch ever, numpy when a codec wants it, the bus once engines are served."""
    code = (
        "import sys, kvcache.node.main; print([name for name in ('torch', 'numpy', 'nats', 'redis') if name in sys.modules])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert said.stdout.decode().strip() == "[]"


def test_the_settings_say_where_the_bus_is_only_by_environment(tmp_path: Path) -> None:
    """No URL, which may hold credentials, is on the command line (SEC-1)."""
    process = NodeProcess(tmp_path, "host")
    fields = json.loads(msgspec.json.encode(process.settings))
    assert not [name for name in fields if "nats" in name or "redis" in name or "url" in name]
    assert process.stop() == 0
