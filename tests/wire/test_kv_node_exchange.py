"""Nodes among each other: what the index hears, and chains pulled over the data path, by whom and for how long."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest

from kvcache.core.identity import KvIdentity, spans_of
from kvcache.errors import KvUnavailable
from kvcache.node import data_pull
from kvcache.node.data_bytes import send_all
from kvcache.node.data_pull import Pulled, _check
from kvcache.node.node import Node
from kvcache.wire.messages import GREETING, Blocks, Open, Opened, frame, joined
from profiles.blocks import chain_hashes
from subjects import names
from subjects.bus import BusMessage
from subjects.codec import decode, encode
from subjects.errors import BusError, DecodeError
from subjects.ids import WorkerId
from subjects.messages import KvAsk, KvIndexed, KvOffer, KvSnapshot, KvTier
from subjects.nats.bus import NatsBus
from tests.servers import NatsServer
from tests.waiting import until
from tests.wire.kv_nodes import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    MODEL_HASH,
    SALT,
    SIGNATURE,
    USE,
    WEIGHTS_HASH,
    NodeProcess,
    chain,
    right,
    room,
    rows,
)

Pair = tuple[NodeProcess, NodeProcess]
IDENTITY = KvIdentity(weights_hash=WEIGHTS_HASH, signature=SIGNATURE, salt=SALT)


@pytest.fixture(scope="module")
def pair(shared_nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two nodes with disks on one bus."""
    directory = tmp_path_factory.mktemp("pair")
    both = ("source-1", "target-1")
    nodes = [NodeProcess(directory / name, name, shared_nats_server.url, disk=True, beat_s=0.3) for name in both]
    yield nodes[0], nodes[1]
    assert [node.stop() for node in nodes] == [0, 0]


@pytest.fixture
async def bus(shared_nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    """A test's own end of the bus."""
    one = await NatsBus.connect(shared_nats_server.url, name="test")
    yield one
    await one.close()


def write(node: NodeProcess, hashes: list[bytes], salt: bytes = SALT) -> None:
    """Gives a whole chain to a node."""
    client = node.client(f"replica-{node.worker}")
    assert client.write(salt, b"", hashes, rows(hashes), USE) == len(hashes)
    client.close()


def read(node: NodeProcess, hashes: list[bytes]) -> int:
    """How many leading blocks a node gives back right."""
    client = node.client()
    into = room(len(hashes))
    count = client.read(SALT, hashes, into)
    assert right(into, hashes, count)
    client.close()
    return count


async def prepared(node: NodeProcess, hashes: list[bytes], deadline_s: float = 5.0, tokens_per_s: float = 0.0) -> int:
    """What ``prepare`` answers."""
    questions = node.questions()
    try:
        return await questions.prepare(SALT, hashes, deadline_s=deadline_s, prefill_tokens_per_s=tokens_per_s, use=USE)
    finally:
        await questions.close()


async def stats(node: NodeProcess) -> Any:
    """A node's counts; a machine that is busy with other tests may not let it answer at once."""
    end_s = time.monotonic() + 20
    while True:
        questions = node.questions()
        try:
            return await questions.stats(timeout_s=10)
        except KvUnavailable:
            assert time.monotonic() < end_s
        finally:
            await questions.close()


async def known(node: NodeProcess, hashes: list[bytes], blocks: int) -> None:
    """Waits until ``node`` has fetched what the index tells of another one."""
    end_s = time.monotonic() + 20
    while True:
        with suppress(KvUnavailable):  # as for ``stats``
            if await prepared(node, hashes) >= blocks:
                return
        assert time.monotonic() < end_s
        await asyncio.sleep(0.05)


async def answering(bus: NatsBus, *nodes: NodeProcess) -> None:
    """Waits until nodes answer on the bus, which they join once they serve their hosts."""
    for node in nodes:
        end_s = time.monotonic() + 20
        while True:
            try:
                ask = KvAsk(worker=WorkerId("asker-1"), snapshot=True)
                await bus.request(names.kv_ask(WorkerId(node.worker)), encode(ask), timeout_s=1)
                break
            except BusError:
                assert time.monotonic() < end_s
                await asyncio.sleep(0.05)


async def test_the_index_hears_whole_spans_and_who_computed_them(pair: Pair, bus: NatsBus) -> None:
    """20 blocks are two spans of 8 (KVC-2); a reset of the engine and a drop are told, a snapshot says the same (F8)."""
    source = pair[0]
    await answering(bus, source)
    heard: list[KvIndexed] = []

    def take(message: BusMessage) -> None:
        heard.append(decode(message.payload, KvIndexed))

    subscription = await bus.subscribe(names.kv_index(WorkerId("source-1")), take)
    await bus.round_trip(timeout_s=5)
    hashes = chain(10, 20)
    await asyncio.to_thread(write, source, hashes)
    spans = spans_of(hashes, BLOCK_TOKENS)
    assert len(spans) == 2

    def held() -> dict[bytes, Any]:
        return {
            span.span: span
            for message in heard
            for model in message.models
            if model.model_hash == MODEL_HASH
            for span in model.held
            if span.span in spans
        }

    found = await until(lambda: held() if len(held()) == 2 else None)
    assert [found[span].depth for span in spans] == [8, 16]
    assert all(found[span].replica == "replica-source-1" for span in spans)
    numbers = [message.sequence for message in heard]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    ask = KvAsk(worker=WorkerId("asker-1"), snapshot=True)
    page = decode(await bus.request(names.kv_ask(WorkerId("source-1")), encode(ask), timeout_s=5), KvSnapshot)
    told = {span.span for model in page.models for span in model.held}
    assert set(spans) <= told and page.node == source.node
    client = source.client("replica-source-1")
    client.emptied()
    client.close()
    await until(lambda: any("replica-source-1" in message.emptied for message in heard) or None)
    questions = source.questions()
    await questions.evict("tests", 1.0)
    await until(
        lambda: {gone for message in heard for model in message.models for gone in model.dropped} >= set(spans) or None
    )
    await questions.close()
    await subscription.stop()


async def test_a_prefix_of_another_node_is_pulled_and_only_what_lacks(pair: Pair, bus: NatsBus) -> None:
    """``prepare`` brings the leading blocks that another node holds, not those that are here already (KVC-4, KVC-6)."""
    source, target = pair
    hashes = chain(11, 40)
    await asyncio.to_thread(write, source, hashes)
    before = await stats(target)
    client = target.client()
    await asyncio.to_thread(client.write, SALT, b"", hashes[:10], rows(hashes[:10]), USE)
    client.close()
    await known(target, hashes, 40)
    assert await asyncio.to_thread(read, target, hashes) == 40
    after = await stats(target)
    assert after.pulled_blocks - before.pulled_blocks == 30
    assert after.pulled_bytes - before.pulled_bytes == 30 * BLOCK_BYTES


async def test_concurrent_prepares_share_one_pull(pair: Pair) -> None:
    """Ten requests with one document fetch it once."""
    source, target = pair
    hashes = chain(12, 64)
    await asyncio.to_thread(write, source, hashes)
    probe = chain(13, 8)
    await asyncio.to_thread(write, source, probe)
    await known(target, probe, 8)
    before = await stats(target)
    questions = target.questions()
    asked = [questions.prepare(SALT, hashes, deadline_s=5.0, prefill_tokens_per_s=0.0, use=USE) for _ in range(10)]
    assert await asyncio.gather(*asked) == [64] * 10
    await questions.close()
    assert (await stats(target)).pulled_blocks - before.pulled_blocks == 64


async def test_prompts_with_one_beginning_fetch_it_once(pair: Pair) -> None:
    """Two prompts that go different ways after 40 blocks are pulled at once: 40 + 16 + 16 blocks come."""
    source, target = pair
    trunk = chain(16, 40)
    tails = [chain_hashes(range(seed, seed + 16 * BLOCK_TOKENS), BLOCK_TOKENS, SALT, trunk[-1]) for seed in (1, 2)]
    client = source.client()
    await asyncio.to_thread(client.write, SALT, b"", trunk, rows(trunk), USE)
    for tail in tails:
        await asyncio.to_thread(client.write, SALT, trunk[-1], tail, rows(tail), USE, first=40)
    client.close()
    probe = chain(19, 8)
    await asyncio.to_thread(write, source, probe)
    await known(target, probe, 8)
    before = await stats(target)
    questions = target.questions()
    asked = [questions.prepare(SALT, [*trunk, *tail], deadline_s=5.0, prefill_tokens_per_s=0.0, use=USE) for tail in tails]
    assert await asyncio.gather(*asked) == [56, 56]
    await questions.close()
    assert (await stats(target)).pulled_blocks - before.pulled_blocks == 72


async def test_what_is_computed_faster_is_not_fetched(pair: Pair) -> None:
    """A prefill of 10^9 tokens a second beats any network."""
    source, target = pair
    hashes = chain(14, 16)
    await asyncio.to_thread(write, source, hashes)
    probe = chain(15, 8)
    await asyncio.to_thread(write, source, probe)
    await known(target, probe, 8)
    assert await prepared(target, hashes, tokens_per_s=1e9) == 0
    assert await prepared(target, hashes, tokens_per_s=100.0) == 16


async def test_all_chains_of_a_model_migrate_by_small_messages(pair: Pair, bus: NatsBus) -> None:
    """``pull`` brings what the source holds of a model, of all tenants, from memory and disk; offers are small (KVC-4)."""
    source, target = pair
    await answering(bus, source, target)
    for node in pair:
        questions = node.questions()
        await questions.evict("tests", 1.0)
        await questions.close()
    chains = [chain(20, 30), chain(21, 5), chain(20, 40)]
    for one in chains:
        await asyncio.to_thread(write, source, one)
    other_salt = b"o" * 16
    other = chain(22, 9, other_salt)
    await asyncio.to_thread(write, source, other, other_salt)
    ask = KvAsk(worker=WorkerId("asker-1"), identity=IDENTITY.key, head=chains[2][-1])
    payload = await bus.request(names.kv_ask(WorkerId("source-1")), encode(ask), timeout_s=5)
    assert len(payload) <= 1024
    assert decode(payload, KvOffer).blocks == 40
    questions = target.questions()
    pulled = await questions.pull("tests", WorkerId("source-1"), deadline_s=20.0)
    assert (pulled.blocks, pulled.chains, pulled.failure) == (40 + 5 + 9, 3, "")
    assert await asyncio.to_thread(read, target, chains[2]) == 40
    client = target.client()
    into = room(9)
    assert client.read(other_salt, other, into) == 9 and right(into, other, 9)
    client.close()
    again = await questions.pull("tests", WorkerId("source-1"), deadline_s=20.0)
    assert (again.blocks, again.bytes, again.failure) == (0, 0, "")
    nobody = await questions.pull("tests", WorkerId("nobody-1"), deadline_s=5.0)
    assert nobody.blocks == 0 and nobody.failure
    await questions.close()


async def _offer(bus: NatsBus, source: NodeProcess, hashes: list[bytes]) -> KvOffer:
    ask = KvAsk(worker=WorkerId("asker-1"), identity=IDENTITY.key, head=hashes[-1])
    return decode(await bus.request(names.kv_ask(WorkerId(source.worker)), encode(ask), timeout_s=5), KvOffer)


def _open(address: str, data: bytes) -> bytes:
    """What the data path answers to ``data``, until it closes or 5 s are over."""
    host, _, port = address.rpartition(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(data)
        try:
            while part := sock.recv(65536):
                answer += part
        except TimeoutError:
            answer += b"open"
        except ConnectionResetError:
            pass
    return answer


async def test_only_the_token_of_this_chain_opens_it(pair: Pair, bus: NatsBus) -> None:
    """Forged, altered, borrowed and missing tokens, and nonsense, get no byte and hurt nobody (SEC-1)."""
    source, _ = pair
    await answering(bus, source)
    mine, other = chain(30, 4), chain(31, 4)
    for one in (mine, other):
        await asyncio.to_thread(write, source, one)
    offer, offer_of_other = await _offer(bus, source, mine), await _offer(bus, source, other)
    right_one = Open(identity=offer.identity, head=offer.head, blocks=4, token=offer.token)
    flipped = bytes([offer.token[-1] ^ 1])
    later = (int.from_bytes(offer.token[:8], "big") + 10**6).to_bytes(8, "big")
    wrong = [
        msgspec.structs.replace(right_one, token=offer.token[:-1] + flipped),
        msgspec.structs.replace(right_one, token=later + offer.token[8:]),
        msgspec.structs.replace(right_one, token=offer_of_other.token),
        msgspec.structs.replace(right_one, head=other[-1]),
        msgspec.structs.replace(right_one, blocks=3),
        msgspec.structs.replace(right_one, identity=b"x" * 16),
        msgspec.structs.replace(right_one, token=b""),
    ]
    nonsense = [b"\xff" * 5000, b"GET / HTTP/1.1\r\n\r\n", frame(Blocks()), frame(wrong[0], 5), b"\x00" * 8]
    answers = await asyncio.gather(
        *(asyncio.to_thread(_open, offer.address, data) for data in [*map(frame, wrong), *nonsense])
    )
    assert set(answers) <= {b"", GREETING} and GREETING in answers  # what comes before a reset may be lost
    assert len(await asyncio.to_thread(_open_and_see, offer.address, frame(right_one))) > 0
    assert await asyncio.to_thread(read, source, mine) == 4


def _open_and_see(address: str, data: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(data)
        assert sock.recv(len(GREETING), socket.MSG_WAITALL) == GREETING
        return sock.recv(65536)


@pytest.mark.parametrize("said", [b"", b"+OK no KV node\r\n"])
async def test_whoever_else_listens_is_told_nothing(said: bytes) -> None:
    """An offer may name any address: another service that listens there gets no byte of those that others chose (SEC-1)."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()
        offer = KvOffer(identity=b"i" * 16, head=b"h" * 16, blocks=1, address=f"{host}:{port}", token=b"\r\nFLUSHALL\r\n")
        heard: list[bytes] = []

        def listen() -> None:
            sock, _ = listening.accept()
            with sock:
                sock.sendall(said)
                try:
                    heard.append(sock.recv(65536))
                except ConnectionResetError:  # closed before it had read all of ours
                    heard.append(b"")

        listener = Thread(target=listen)
        listener.start()
        sock = socket.socket()
        with sock, pytest.raises((DecodeError, TimeoutError)):
            sock.setblocking(False)
            async with asyncio.timeout(0.3):
                await data_pull._open(sock, offer)
        await asyncio.to_thread(listener.join)
        assert heard == [b""]


def test_a_target_that_takes_too_little_is_given_up() -> None:
    """Whoever reads a byte now and then holds neither a thread nor pages of the source for longer than its bound (E5)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = socket.create_connection(server.getsockname())
        source, _ = server.accept()
    with source, target:
        end_s = time.monotonic() + 0.3

        def trickle() -> None:
            while target.recv(1 << 17):
                time.sleep(0.02)

        reader = Thread(target=trickle)
        reader.start()
        with pytest.raises(TimeoutError):
            send_all(source, [memoryview(bytes(64 << 20))], end_s)
        source.shutdown(socket.SHUT_RDWR)
        reader.join()


def test_a_chain_that_names_a_block_twice_is_refused() -> None:
    """No writer of ours makes a circle, and one would never leave a tier again (P2)."""
    first, second = chain(1, 2)
    offer = KvOffer(identity=IDENTITY.key, head=first, blocks=3)
    hashes = [first, second, first]
    with pytest.raises(DecodeError, match="twice"):
        _check(Opened(identity=IDENTITY, hashes=joined(hashes)), hashes, offer, None)


async def test_a_source_that_does_not_open_a_chain_is_no_broken_path(tmp_path: Path) -> None:
    """A chain that left its source between offer and opening ends neither a migration nor the belief in the path (KVC-4)."""
    node = Node(NodeProcess(tmp_path, "alone-2", start=False).settings)

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        await reader.readexactly(8)
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    offer = KvOffer(identity=IDENTITY.key, head=chain(1, 1)[0], blocks=1, address=f"{host}:{port}", token=b"t")
    source = WorkerId("source-1")
    before = node.exchange.bandwidths.bytes_per_s(source)
    pulled = await node.exchange._pull(offer, source, time.monotonic() + 5)
    assert (pulled.failure, pulled.blocks) == ("the source did not open the chain", 0)
    assert node.exchange.bandwidths.bytes_per_s(source) == before
    server.close()
    await server.wait_closed()


def test_others_are_told_an_address_of_ipv6_in_brackets(tmp_path: Path) -> None:
    """What a node tells of its data path is what others can connect to."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    process = NodeProcess(tmp_path, "six-1", data_host="::1")
    assert process.data.startswith("[::1]:") and process.stop() == 0


async def test_only_what_a_path_is_to_blame_for_makes_it_slow(tmp_path: Path) -> None:
    """A source without some blocks, or a target without room, says nothing of the bytes per second between them (KVC-4)."""
    node = Node(NodeProcess(tmp_path, "alone-1", start=False).settings)
    source = WorkerId("source-1")
    failures = ["no room in host memory", "the source no longer has all of it", "deadline", "EOFError: gone"]

    async def pull(offer: KvOffer, end_s: float, **_: Any) -> Pulled:
        return Pulled(failure=offer.address)

    node.exchange.puller.pull = pull  # type: ignore[method-assign]
    speeds = [node.exchange.bandwidths.bytes_per_s(source)]
    for failure in failures:
        await node.exchange._pull(KvOffer(address=failure), source, time.monotonic() + 1)
        speeds.append(node.exchange.bandwidths.bytes_per_s(source))
    assert [speed / speeds[0] for speed in speeds] == [1.0, 1.0, 1.0, 0.5, 0.25]


async def test_a_token_expires(shared_nats_server: NatsServer, bus: NatsBus, tmp_path: Path) -> None:
    """A token of an offer that is too old opens nothing."""
    source = NodeProcess(tmp_path, "expiring-1", shared_nats_server.url, offer_s=0.05)
    try:
        await answering(bus, source)
        hashes = chain(1, 3)
        await asyncio.to_thread(write, source, hashes)
        offer = await _offer(bus, source, hashes)
        asked = frame(Open(identity=offer.identity, head=offer.head, blocks=3, token=offer.token))
        await asyncio.sleep(0.1)
        assert await asyncio.to_thread(_open, offer.address, asked) == GREETING
    finally:
        source.stop()


@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_a_source_that_goes_mid_transfer(
    how: str, shared_nats_server: NatsServer, bus: NatsBus, tmp_path: Path
) -> None:
    """kill -9 and SIGSTOP in the middle of a pull: it ends within its deadline, and what came whole is right (KVC-4)."""
    slow: dict[str, Any] = {"data_bytes_per_s_max": 4_000_000, "pull_batch_bytes": 4 * BLOCK_BYTES}
    source = NodeProcess(tmp_path, f"{how}-source", shared_nats_server.url, **slow)
    target = NodeProcess(tmp_path, f"{how}-target", shared_nats_server.url, **slow)
    questions = target.questions()
    try:
        await answering(bus, source, target)
        hashes = chain(1, 400)
        await asyncio.to_thread(write, source, hashes)
        pull = asyncio.create_task(questions.pull("tests", WorkerId(source.worker), deadline_s=4.0))
        end_s = time.monotonic() + 15
        while (await stats(target)).host.blocks < 12:
            assert time.monotonic() < end_s
            await asyncio.sleep(0.02)
        if how == "kill":
            source.kill()
        else:
            source.signal(signal.SIGSTOP)
        begin_s = time.monotonic()
        pulled = await pull
        assert time.monotonic() - begin_s < 10.0
        assert pulled.failure
        count = await asyncio.to_thread(read, target, hashes)
        assert 0 < count < 400
        assert (await stats(target)).host.bytes_used == count * 2 * 65536  # what was half way left no page behind
        # What the index says of the source is not trusted for long: nothing hangs.
        assert await prepared(target, hashes, deadline_s=0.5) == count
    finally:
        await questions.close()
        source.stop()
        target.stop()


async def test_a_node_that_starts_again_is_another_and_tells_of_its_disk(
    shared_nats_server: NatsServer, bus: NatsBus, tmp_path: Path
) -> None:
    """After a restart the new incarnation tells what lies on disk, before any engine came (F8)."""
    node = NodeProcess(tmp_path, "again-1", shared_nats_server.url, disk=True)
    hashes = chain(1, 24)
    await asyncio.to_thread(write, node, hashes)
    first = node.node
    assert node.stop() == 0
    heard: list[KvIndexed] = []
    subscription = await bus.subscribe(
        names.kv_index(WorkerId("again-1")), lambda message: heard.append(decode(message.payload, KvIndexed))
    )
    await bus.round_trip(timeout_s=5)
    node.start()
    try:
        assert node.node != first
        await until(
            lambda: (
                {span.span for one in heard for model in one.models for span in model.held}
                == set(spans_of(hashes, BLOCK_TOKENS))
                or None
            )
        )
        assert {one.node for one in heard} == {node.node}
        assert {span.tier for one in heard for model in one.models for span in model.held} == {KvTier.DISK}
        assert (await _offer(bus, node, hashes)).blocks == 24
    finally:
        await subscription.stop()
        assert node.stop() == 0
