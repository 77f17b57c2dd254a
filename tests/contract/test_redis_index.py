"""The shared index on a real Valkey: what is told is there, bounded, and vanishes with who told it (KVC-2, PAINS M5)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import Redis

from kvcache.shared import scripts
from kvcache.shared.index import Held, IndexState, RedisIndex, RedisIndexSettings, SpanAccess
from subjects.errors import ConfigError
from subjects.ids import ModelHash
from subjects.messages import KvTier, SlaClass
from subjects.tasks import end_tasks
from tests.servers import ValkeyServer
from tests.waiting import until

ONE = ModelHash("1" * 64)
TWO = ModelHash("2" * 64)
PATIENT_S = 5.0
"""Deadline of reads in tests that are not about deadlines."""


def settings(**fields: Any) -> RedisIndexSettings:
    """Quick turns; everything else as it is unless given."""
    return RedisIndexSettings(**{"flush_every_s": 0.01, "resync_every_s": 0.1, **fields})


def span(number: int) -> bytes:
    """A span's hash."""
    return number.to_bytes(16, "big")


def access(ago_s: float = 0.0, **fields: Any) -> SpanAccess:
    """An access some time ago."""
    return SpanAccess(**{"at_unix_s": time.time() - ago_s, "size_bytes": 7, **fields})


@pytest.fixture(scope="module")
def shared_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """One Valkey for all tests of this file."""
    server = ValkeyServer(tmp_path_factory.mktemp("shared-valkey"))
    yield server
    server.stop()


@pytest.fixture
def valkey_server(shared_valkey: ValkeyServer) -> Iterator[ValkeyServer]:
    """It as new for each test: empty, without scripts, with its own bounds."""
    yield shared_valkey
    with redis.Redis(port=shared_valkey.port) as client:
        client.config_set("maxmemory", "256mb")
        client.flushall()
        client.script_flush()


@pytest.fixture
async def client(valkey_server: ValkeyServer) -> AsyncIterator[Any]:
    """A plain client beside the index."""
    async with Redis(port=valkey_server.port) as found:
        yield found


class Nodes:
    """Starts nodes' indexes and ends them after the test."""

    def __init__(self, server: ValkeyServer, stack: AsyncExitStack) -> None:
        self._server = server
        self._stack = stack

    async def start(self, node: str, *, url: str = "", **fields: Any) -> RedisIndex:
        """An index that the server knows."""
        held = fields.pop("on_lost", None)
        index = RedisIndex(url or self._server.url, node, settings(**fields), on_lost=held)
        await self._stack.enter_async_context(index)
        await until(lambda: index.state is IndexState.OK)
        return index


@pytest.fixture
async def nodes(valkey_server: ValkeyServer) -> AsyncIterator[Nodes]:
    """No node yet."""
    async with AsyncExitStack() as stack:
        yield Nodes(valkey_server, stack)


async def crash(index: RedisIndex) -> None:
    """Ends a node's task as the death of its process would: nothing is said any more, the lease stays."""
    assert index._task is not None
    await end_tasks((index._task,))
    await index._link.close()
    index._task = None


def _settled(index: RedisIndex) -> bool:
    return index.settled


async def told(*indexes: RedisIndex) -> None:
    """Waits until the server has taken all that was noted."""
    for index in indexes:
        await until(partial(_settled, index))


async def names(index: RedisIndex, model: ModelHash, *numbers: int) -> dict[int, list[str]]:
    """Nodes that hold spans."""
    holders = await index.holders(model, [span(number) for number in numbers], deadline_s=PATIENT_S)
    return {int.from_bytes(name, "big"): [holder.node for holder in found] for name, found in holders.items()}


async def test_what_a_node_notes_is_in_the_sorted_set_and_every_node_sees_it(nodes: Nodes, client: Any) -> None:
    """``cache:hotness:<model hash>`` has the span's hex and its last access; holders say tier, class, size, tenant."""
    one, two = await nodes.start("a-1"), await nodes.start("b-1")
    one.note(ONE, span(1), access(50, tier=KvTier.DISK, request="gw-1-7", tenant="t", sla_class=SlaClass.GOLD))
    await told(one)
    two.note(ONE, span(1), access(20))
    one.note(ONE, span(1), access(30, tier=KvTier.DISK, request="gw-1-7", tenant="t", sla_class=SlaClass.GOLD))
    await told(one, two)
    seen = await client.zrange(f"cache:hotness:{ONE}", 0, -1, withscores=True)
    assert [name for name, _ in seen] == [span(1).hex().encode()]
    assert abs(seen[0][1] - (time.time() - 20)) < 5, "the latest access of any node"
    found = await two.last_access(ONE, [span(1), span(2)], deadline_s=PATIENT_S)
    assert list(found) == [span(1)] and abs(found[span(1)] - (time.time() - 20)) < 5
    (first, _second) = (await two.holders(ONE, [span(1)], deadline_s=PATIENT_S))[span(1)]
    assert (first.node, first.entry.tier, first.entry.request, first.entry.tenant) == ("a-1", KvTier.DISK, "gw-1-7", "t")
    assert (first.entry.sla_class, first.entry.size_bytes) == (SlaClass.GOLD, 7)
    assert await names(two, ONE, 1, 2) == {1: ["a-1", "b-1"]}


async def test_a_span_leaves_with_its_last_holder(nodes: Nodes, client: Any) -> None:
    """Dropped by one it is still held by the other; dropped by both it is no member."""
    one, two = await nodes.start("a-1"), await nodes.start("b-1")
    for index in (one, two):
        index.note(ONE, span(1), access())
        index.note(ONE, span(2), access())
    await told(one, two)
    one.dropped(ONE, span(1))
    await told(one)
    assert await names(one, ONE, 1, 2) == {1: ["b-1"], 2: ["a-1", "b-1"]}
    two.dropped(ONE, span(1))
    await told(two)
    assert await client.zrange(f"cache:hotness:{ONE}", 0, -1) == [span(2).hex().encode()]


async def test_members_are_bounded_and_their_metadata_with_them(nodes: Nodes, client: Any) -> None:
    """The coldest go first, in the batch that brings too many; no entry is left without its member (PAINS M5)."""
    one, two = await nodes.start("a-1", members_max=100), await nodes.start("b-1", members_max=100)
    for number in range(300):
        one.note(ONE, span(number), access(1000 - number))
    await told(one)
    for number in range(250, 400):
        two.note(ONE, span(number), access(1000 - number))
    await told(two)
    members = {int(name, 16) for name in await client.zrange(f"cache:hotness:{ONE}", 0, -1)}
    assert members == set(range(300, 400))
    assert await client.hlen(f"cache:spans:{ONE}:a-1") == 1, "the writer's mark alone"
    assert await client.hlen(f"cache:spans:{ONE}:b-1") == 1 + 100


async def test_all_models_together_are_bounded_and_so_is_their_number(nodes: Nodes, client: Any) -> None:
    """The coldest spans of any model make room; the model that was not written for longest goes whole (PAINS M5)."""
    one = await nodes.start("a-1", members_max=100, members_total_max=150, models_max=3)
    hashes = [ModelHash(f"{number:x}" * 64) for number in range(5)]
    for number, model in enumerate(hashes[:2]):
        for name in range(100):
            one.note(model, span(name), access(100 - 10 * number - name / 100))
        await told(one)
    assert [await client.zcard(f"cache:hotness:{model}") for model in hashes[:2]] == [50, 100]
    for model in hashes[2:]:
        one.note(model, span(1), access())
        await told(one)
    assert {key.decode()[14:] for key in await client.keys("cache:hotness:*")} == set(hashes[2:])
    assert len(await client.keys("cache:spans:*:a-1")) == 3


async def test_a_million_prefixes_leave_a_bounded_set(nodes: Nodes, client: Any) -> None:
    """1M distinct prefixes: ZCARD, metadata and this process's buffer stay within their bounds (PAINS M5)."""
    one = await nodes.start("a-1", members_max=2000, buffer_max=8192)
    access_now = access()
    for first in range(0, 1_000_000, 10_000):
        for number in range(first, first + 10_000):
            one.note(ONE, span(number), access_now)
        assert one.stats.waiting == 8192, "of what comes faster than a server can take it, the newest"
        if first % 100_000 == 0:
            await told(one)
            assert await client.zcard(f"cache:hotness:{ONE}") == 2000
    await told(one)
    assert await client.zcard(f"cache:hotness:{ONE}") == 2000
    assert one.counts.told + one.stats.overflowed >= 1_000_000 and one.counts.trimmed >= one.counts.told - 2000
    assert await client.hlen(f"cache:spans:{ONE}:a-1") <= 2001


async def test_keys_of_a_dead_model_expire(nodes: Nodes, client: Any) -> None:
    """Every key has a time to live, refreshed by whoever writes."""
    one = await nodes.start("a-1", model_ttl_s=100)
    one.note(ONE, span(1), access())
    await told(one)
    limits = {key.decode(): await client.pttl(key) / 1000 for key in await client.keys("*")}
    assert {key: 0 < limit <= 200 for key, limit in limits.items()} == {
        f"cache:hotness:{ONE}": True,
        f"cache:spans:{ONE}:a-1": True,
        "cache:spans:models": True,
        "cache:spans:nodes": True,
        "cache:node:a-1": True,
    }


async def test_what_a_dead_node_said_counts_no_more_and_is_swept(nodes: Nodes, client: Any) -> None:
    """A node without a lease holds nothing; who finds it removes what it left, and what others hold too stays."""
    stays, dies = await nodes.start("a-1", lease_s=0.3), await nodes.start("b-1", lease_s=0.3)
    for number in range(1500):
        dies.note(ONE, span(number), access())
    stays.note(ONE, span(7), access())
    await told(stays, dies)
    assert await names(stays, ONE, 7, 8) == {7: ["a-1", "b-1"], 8: ["b-1"]}
    await dies.close()
    assert await names(stays, ONE, 7, 8) == {7: ["a-1"]}, "at once"
    await until(lambda: stays.counts.swept >= 1500)
    await told(stays)
    assert await client.exists(f"cache:spans:{ONE}:b-1") == 0
    assert await client.zrange(f"cache:hotness:{ONE}", 0, -1) == [span(7).hex().encode()]
    await until(lambda: stays.settled)
    assert await client.hkeys("cache:spans:nodes") == [b"a-1"]


async def test_a_restarted_node_removes_what_its_predecessor_said(nodes: Nodes, client: Any) -> None:
    """A new incarnation of the same worker ends the old one's lease, however long it would last; others keep theirs."""
    old, other = await nodes.start("gpu-box-0a", lease_s=600), await nodes.start("gpu-other-0a", lease_s=600)
    for index in (old, other):
        index.note(ONE, span(1), access())
    old.note(ONE, span(2), access())
    await told(old, other)
    await crash(old)
    new = await nodes.start("gpu-box-0b", lease_s=600)
    await until(lambda: new.counts.swept > 0 and new.settled)
    assert await names(new, ONE, 1, 2) == {1: ["gpu-other-0a"]}
    assert await client.zrange(f"cache:hotness:{ONE}", 0, -1) == [span(1).hex().encode()]
    assert sorted(await client.hkeys("cache:spans:nodes")) == [b"gpu-box-0b", b"gpu-other-0a"]


async def test_a_node_that_was_swept_while_it_slept_tells_all_again(nodes: Nodes, client: Any) -> None:
    """Who lost its place in the list writes nothing until it has one again, and then tells all that it holds."""
    one = await nodes.start("a-1", on_lost=lambda: [(ONE, span(number), access(9)) for number in (1, 2)])
    one.note(ONE, span(1), access())
    await told(one)
    await client.hdel("cache:spans:nodes", "a-1")
    await client.delete(f"cache:spans:{ONE}:a-1")
    one.note(ONE, span(3), access())
    await until(lambda: one.counts.resyncs == 1)
    await told(one)
    assert await names(one, ONE, 1, 2, 3) == {1: ["a-1"], 2: ["a-1"], 3: ["a-1"]}
    assert one.counts.lost == 1


async def test_a_node_that_wakes_up_while_it_is_swept_tells_all_again(nodes: Nodes, client: Any) -> None:
    """A sweep takes many steps; whoever it stops at is not left with half of what it holds."""
    held = [(ONE, span(number), access(number)) for number in range(2000)]
    one = await nodes.start("a-1", lease_s=600, on_lost=lambda: held)
    for entry in held:
        one.note(*entry)
    await told(one)
    await client.delete("cache:node:a-1")
    keys = ("cache:spans:nodes", "cache:node:a-1", one.hotness_key(ONE), one.spans_key(ONE))
    step = await client.evalsha(scripts.sha_of(scripts.SWEEP), 4, *keys, "a-1", ONE, "0", 16, "cache:spans:")
    assert step[0] != b"0" and 0 < step[1] < 2000
    one.note(*held[0])
    await until(lambda: one.counts.resyncs == 1)
    await told(one)
    assert await client.zcard(one.hotness_key(ONE)) == 2000 and await client.hlen(one.spans_key(ONE)) == 2001
    step = await client.evalsha(scripts.sha_of(scripts.SWEEP), 4, *keys, "a-1", ONE, step[0], 16, "cache:spans:")
    assert step == [b"-", 0], "it lives"


async def test_a_flushed_server_is_filled_again_in_batches(nodes: Nodes, client: Any) -> None:
    """FLUSHALL: the next batch or beat notices, and all comes back without any request (PAINS M5)."""
    held = [(ONE if number % 2 else TWO, span(number), access(number)) for number in range(3000)]

    def all_of_it() -> Iterator[Held]:
        yield from held

    one = await nodes.start("a-1", lease_s=0.6, on_lost=all_of_it, batch_max=100)
    for entry in held:
        one.note(*entry)
    await told(one)
    await client.flushall()
    await until(lambda: one.counts.resyncs == 1)
    await told(one)
    assert [await client.zcard(f"cache:hotness:{model}") for model in (ONE, TWO)] == [1500, 1500]
    assert await client.hlen(f"cache:spans:{ONE}:a-1") == 1501
    assert one.state is IndexState.OK


async def test_one_lost_key_is_noticed_too(nodes: Nodes, client: Any) -> None:
    """A server that evicts keys may lose one model's alone; the next note of that model tells."""
    one = await nodes.start("a-1", on_lost=lambda: [(ONE, span(number), access(9)) for number in range(5)])
    one.note(ONE, span(0), access())
    await told(one)
    await client.delete(f"cache:hotness:{ONE}")
    one.note(ONE, span(0), access())
    await until(lambda: one.counts.resyncs == 1)
    assert await client.zcard(f"cache:hotness:{ONE}") == 5


async def test_an_overrun_buffer_leads_to_telling_all(nodes: Nodes, client: Any) -> None:
    """What the buffer could not keep is made good from what the node holds; what it holds no more is gone."""
    truth = [(ONE, span(number), access()) for number in range(50, 60)]
    one = await nodes.start("a-1", buffer_max=20, on_lost=lambda: truth)
    for number in range(40):
        one.note(ONE, span(number), access())
    await until(lambda: one.counts.resyncs == 1)
    for number in range(20, 40):
        one.dropped(ONE, span(number))
    await told(one)
    assert await names(one, ONE, *range(60)) == {number: ["a-1"] for number in range(50, 60)}


async def test_an_owner_that_fails_is_asked_again(nodes: Nodes, client: Any) -> None:
    """``on_lost`` may raise, even in the middle; no task ends of it."""
    calls: list[int] = []

    def fails_first() -> Iterator[Held]:
        calls.append(1)
        yield ONE, span(1), access()
        if len(calls) == 1:
            raise RuntimeError("dictionary changed size during iteration")
        yield ONE, span(2), access()

    one = await nodes.start("a-1", on_lost=fails_first, lease_s=0.3)
    await client.flushall()
    await until(lambda: one.counts.resyncs == 1)
    assert await client.zcard(f"cache:hotness:{ONE}") == 2 and one.counts.owner_errors == 1


@pytest.mark.parametrize("key", [f"cache:hotness:{ONE}", f"cache:spans:{ONE}:a-1"])
async def test_a_key_of_another_type_is_replaced(nodes: Nodes, client: Any, key: str) -> None:
    """A model's keys are ours by their name: what else is there goes, and is counted; nothing is raised (PAINS M5)."""
    one = await nodes.start("a-1")
    await client.set(key, "not ours")
    assert await one.last_access(ONE, [span(1)], deadline_s=PATIENT_S) == {}
    assert await one.holders(ONE, [span(1)], deadline_s=PATIENT_S) == {}
    one.note(ONE, span(1), access())
    await told(one)
    assert list(await one.last_access(ONE, [span(1)], deadline_s=PATIENT_S)) == [span(1)]
    assert await names(one, ONE, 1) == {1: ["a-1"]} and one.counts.mended == 1


async def test_somebody_elses_key_is_left_alone(nodes: Nodes, client: Any) -> None:
    """The list of nodes may be another program's key of that name: the index degrades, and works when it is gone."""
    one = await nodes.start("a-1", lease_s=0.3)
    await client.delete("cache:spans:nodes")
    await client.set("cache:spans:nodes", "theirs")
    await until(lambda: one.state is IndexState.DEGRADED)
    one.note(ONE, span(1), access())
    await asyncio.sleep(0.1)
    assert await client.get("cache:spans:nodes") == b"theirs" and one.stats.waiting == 1
    assert one.stats.refusals["wrong"] >= 1
    await client.delete("cache:spans:nodes")
    await told(one)
    assert await names(one, ONE, 1) == {1: ["a-1"]} and one.state is IndexState.OK


async def test_garbage_scores_members_and_entries_are_skipped(nodes: Nodes, client: Any) -> None:
    """Infinity, the future, 1970 and before: no answer for that span alone; the next note makes it right (PAINS M5)."""
    one = await nodes.start("a-1")
    for number in range(5):
        one.note(ONE, span(number), access())
    await told(one)
    key = f"cache:hotness:{ONE}"
    await client.zadd(key, {span(0).hex(): "inf", span(1).hex(): "-inf", span(2).hex(): 1e18, span(3).hex(): -5})
    await client.zadd(key, {"no span": 1, b"\xff\x00": "inf"})
    await client.hset(f"cache:spans:{ONE}:a-1", mapping={span(0).hex(): b"\xc1", span(1).hex(): b"", "x": b"y"})
    wanted = [span(number) for number in range(6)]
    assert list(await one.last_access(ONE, wanted, deadline_s=PATIENT_S)) == [span(4)]
    assert await names(one, ONE, *range(6)) == {2: ["a-1"], 3: ["a-1"], 4: ["a-1"]}
    assert one.counts.skipped_values == 6
    for number in range(4):
        one.note(ONE, span(number), access())
    await told(one)
    assert len(await one.last_access(ONE, wanted, deadline_s=PATIENT_S)) == 5
    assert await client.zscore(key, b"\xff\x00") is None and one.counts.mended == 3
    assert await names(one, ONE, *range(6)) == {number: ["a-1"] for number in range(5)}


async def test_a_server_without_memory_keeps_the_hottest_and_recovers(nodes: Nodes, client: Any) -> None:
    """maxmemory with noeviction: writes are refused, questions are answered, cold spans make room (PAINS M5)."""
    one = await nodes.start("a-1", members_kept_min=10)
    for number in range(20_000):
        one.note(ONE, span(number), access(20_000 - number))
    await told(one)
    used = (await client.info("memory"))["used_memory"]
    await client.config_set("maxmemory", used - 200_000)
    one.note(ONE, span(99_999), access())
    await until(lambda: one.stats.refusals.get("memory", 0) >= 1)
    assert len(await one.last_access(ONE, [span(19_999)], deadline_s=PATIENT_S)) == 1
    await told(one)
    assert one.state is IndexState.OK
    assert await names(one, ONE, 0, 19_999, 99_999) == {19_999: ["a-1"], 99_999: ["a-1"]}


async def test_a_server_that_forgot_the_scripts_gets_them_again(nodes: Nodes, client: Any) -> None:
    """SCRIPT FLUSH, or a server that was replaced: nothing is lost."""
    one = await nodes.start("a-1")
    await client.script_flush()
    one.note(ONE, span(1), access())
    await told(one)
    assert await names(one, ONE, 1) == {1: ["a-1"]}


async def test_too_many_nodes_are_refused_and_let_in_when_others_are_gone(nodes: Nodes, client: Any) -> None:
    """The list of nodes is bounded; dead ones in it make room."""
    first = await nodes.start("a-1", nodes_max=2, lease_s=0.3)
    await client.hset("cache:spans:nodes", "ghost-1", "0 ghost")
    late = RedisIndex(first_url(first), "c-1", settings(nodes_max=2, lease_s=0.3))
    async with late:
        await until(lambda: late.state is IndexState.OK)
    assert b"ghost-1" not in await client.hkeys("cache:spans:nodes")


async def test_clocks_of_nodes_may_differ(nodes: Nodes, valkey_server: ValkeyServer) -> None:
    """Scores are of the server's clock; each node reads them in its own (an hour apart here)."""
    ahead = RedisIndex(valkey_server.url, "a-1", settings(), now_unix_s=lambda: time.time() + 3600)
    right = await nodes.start("b-1")
    async with ahead:
        await until(lambda: ahead.state is IndexState.OK)
        ahead.note(ONE, span(1), access(-3600 + 10))
        await told(ahead)
        assert abs((await right.last_access(ONE, [span(1)], deadline_s=PATIENT_S))[span(1)] - (time.time() - 10)) < 5
        assert abs((await ahead.last_access(ONE, [span(1)], deadline_s=PATIENT_S))[span(1)] - (time.time() + 3590)) < 5


async def test_pools_with_prefixes_of_their_own_share_a_server(nodes: Nodes, client: Any) -> None:
    """Each sees its own keys alone."""
    one, two = await nodes.start("a-1", prefix="{p1}:"), await nodes.start("b-1", prefix="{p2}:")
    one.note(ONE, span(1), access())
    await told(one)
    assert await names(one, ONE, 1) == {1: ["a-1"]} and await names(two, ONE, 1) == {}
    assert all(key.startswith((b"{p1}:cache:", b"{p2}:cache:")) for key in await client.keys("*"))


async def test_a_password_works_and_is_never_said(
    no_child_is_left: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Credentials of the URL reach the server and nobody else: no log, no error, no figure (SEC-1)."""
    server = ValkeyServer(tmp_path / "valkey")
    async with Redis(port=server.port) as client:
        await client.config_set("requirepass", "s3cret-word")
    right = RedisIndex(f"redis://:s3cret-word@127.0.0.1:{server.port}/0", "a-1", settings())
    wrong = RedisIndex(f"redis://:s3cret-w0rd@127.0.0.1:{server.port}/0", "b-1", settings())
    async with right, wrong:
        await until(lambda: right.state is IndexState.OK and wrong.state is IndexState.DEGRADED)
        await until(lambda: wrong.stats.refusals["away"] > 1)
        assert "s3cret" not in f"{right.stats}{wrong.stats}{right.settings}"
    server.stop()
    captured = capsys.readouterr()
    assert "s3cret" not in captured.out + captured.err
    assert "shared hotness" in captured.out + captured.err


@pytest.mark.parametrize(
    "url", ["", "http://u:s3cret@h/", "redis://u:s3cret/w@h:1", "redis://h:s3cret", "redis://h/?db=s3cret"]
)
def test_a_url_that_is_none_is_refused_without_quoting_it(url: str) -> None:
    """One line that a person can act on, without the password in it."""
    with pytest.raises(ConfigError) as refused:
        RedisIndex(url, "a-1")
    assert "s3cret" not in f"{refused.value!r} {refused.value.__cause__!r}" and "redis://" in str(refused.value)


def first_url(index: RedisIndex) -> str:
    """The URL of an index's server."""
    return f"redis://{index.stats.address}/0"
