"""The node of one host: blocks in and out over its socket, host memory and disk behind it, what it does with nonsense."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from kvcache.errors import KvUnavailable
from kvcache.wire.client import KvClient
from kvcache.wire.messages import LENGTHS_BYTES, Attach, Attached, Found, Read, Write, checksums, frame, joined, lengths
from tests.wire.kv_nodes import (
    ATTACH,
    BLOCK_BYTES,
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


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """One node without disk and bus."""
    process = NodeProcess(tmp_path_factory.mktemp("node"), "host-1")
    yield process
    assert process.stop() == 0


def test_blocks_come_back_as_they_were_and_only_the_leading_ones(node: NodeProcess) -> None:
    """What is written is read, from the first block on, until one is missing (KVC-6)."""
    client = node.client()
    hashes = chain(1, 12)
    assert client.write(SALT, b"", hashes[:5], rows(hashes[:5]), USE) == 5
    assert client.write(SALT, hashes[5], hashes[6:8], rows(hashes[6:8]), USE, first=6) == 2
    into = room(12)
    assert client.read(SALT, hashes, into) == 5
    assert right(into, hashes, 5)
    assert client.write(SALT, hashes[4], hashes[5:6], rows(hashes[5:6]), USE, first=5) == 1
    assert client.read(SALT, hashes, into) == 8
    assert right(into, hashes, 8)
    client.close()


def test_no_other_tenant_layout_or_weights_find_a_block(node: NodeProcess) -> None:
    """The same hash under another salt, signature or weights is another block (O3, P2)."""
    hashes = chain(2, 3)
    client = node.client()
    client.write(SALT, b"", hashes, rows(hashes), USE)
    assert client.read(b"z" * 16, hashes, room(3)) == 0
    other_weights = node.client(weights_hash="c" * 64)
    assert other_weights.read(SALT, hashes, room(3)) == 0
    other_layout = node.client(signature=msgspec.structs.replace(SIGNATURE, form="other"))
    assert other_layout.read(SALT, hashes, room(3)) == 0
    assert client.read(SALT, hashes, room(3)) == 3
    for one in (client, other_weights, other_layout):
        one.close()


async def test_prepare_answers_what_is_local_and_evict_is_exact(node: NodeProcess) -> None:
    """``evict`` of half drops half of a model's blocks, the coldest; of all leaves nothing (SCH-8)."""
    client, questions = node.client(), node.questions()
    await questions.evict("tests", 1.0)
    before = await questions.stats()
    cold, warm = chain(3, 4), chain(4, 4)
    await asyncio.to_thread(client.write, SALT, b"", cold, rows(cold), USE)
    await asyncio.to_thread(client.write, SALT, b"", warm, rows(warm), USE)
    assert await questions.prepare(SALT, [*warm, b"x" * 16], deadline_s=1.0, prefill_tokens_per_s=100.0, use=USE) == 4
    await asyncio.to_thread(client.used, SALT, warm, USE)
    gone = await questions.evict("tests", 0.5)
    assert (gone.blocks, gone.host_bytes, gone.disk_bytes) == (4, 4 * 2 * 65536, 0)
    assert await questions.prepare(SALT, warm, deadline_s=1.0, prefill_tokens_per_s=100.0, use=USE) == 4
    assert await questions.prepare(SALT, cold, deadline_s=1.0, prefill_tokens_per_s=100.0, use=USE) == 0
    counts = await questions.stats()
    counted = counts.hits - before.hits, counts.misses - before.misses
    assert counted == (8, 1 + len(cold)), "blocks of the three prompts"
    assert (await questions.evict("other", 1.0)).blocks == 0
    assert (await questions.evict("tests", 1.0)).blocks == 4
    stats = await questions.stats()
    assert stats.host.bytes_used == 0 and all(one.host_bytes + one.disk_bytes == 0 for one in stats.models)
    client.close()
    await questions.close()


async def test_host_memory_is_bounded_and_the_oldest_leave(tmp_path: Path) -> None:
    """A chain larger than the tier is kept in part, never beyond the bound (KVC-1)."""
    process = NodeProcess(tmp_path, "small", host_bytes_max=8 * 2 * 65536)
    client, questions = process.client(), process.questions()
    try:
        first, second = chain(1, 6), chain(2, 6)
        await asyncio.to_thread(client.write, SALT, b"", first, rows(first), USE)
        assert await asyncio.to_thread(client.write, SALT, b"", second, rows(second), USE) == 6
        into = room(6)
        assert await asyncio.to_thread(client.read, SALT, second, into) == 6
        assert right(into, second, 6)
        stats = await questions.stats()
        assert stats.host.bytes_used <= stats.host.bytes_max == 8 * 2 * 65536
    finally:
        client.close()
        await questions.close()
        process.stop()


async def test_what_is_settled_survives_kill_9_and_what_is_flushed_a_stop(tmp_path: Path) -> None:
    """Blocks are on disk after the settle time and after SIGTERM; a node that starts again serves them as another node."""
    process = NodeProcess(tmp_path, "host", disk=True)
    client, questions = process.client(), process.questions()
    settled, flushed = chain(1, 20), chain(2, 20)
    await asyncio.to_thread(client.write, SALT, b"", settled, rows(settled), USE)
    end_s = time.monotonic() + 20
    while (await questions.stats()).disk.blocks < 20:
        assert time.monotonic() < end_s
        await asyncio.sleep(0.05)
    before = process.node
    process.kill()
    with pytest.raises(KvUnavailable):
        client.read(SALT, settled, room(20))
    process.start()
    assert process.node != before
    client = process.client()
    into = room(20)
    assert client.read(SALT, settled, into) == 20 and right(into, settled, 20)
    client.write(SALT, b"", flushed, rows(flushed), USE)
    assert process.stop() == 0
    client.close()
    process.start()
    client = process.client()
    assert client.read(SALT, flushed, into) == 20 and right(into, flushed, 20)
    assert client.read(SALT, settled, into) == 20
    client.close()
    await questions.close()
    assert process.stop() == 0


async def test_blocks_move_through_memory_to_disk_and_back(tmp_path: Path) -> None:
    """With a disk a tier of 8 blocks holds chains of 60: those that leave memory are written first (KVC-3)."""
    process = NodeProcess(tmp_path, "host", disk=True, host_bytes_max=8 * 2 * 65536)
    client, questions = process.client(), process.questions()
    try:
        hashes = chain(1, 60)
        kept = await asyncio.to_thread(client.write, SALT, b"", hashes, rows(hashes), USE)
        assert kept == 60
        assert await questions.prepare(SALT, hashes, deadline_s=1.0, prefill_tokens_per_s=0.0, use=USE) == 60
        into = room(60)
        done = 0
        while done < 60:  # no more fits into memory at once; the rest is read with the next call
            some = await asyncio.to_thread(client.read, SALT, hashes[done : done + 4], into[done * BLOCK_BYTES :])
            assert some == 4
            done += some
        assert right(into, hashes, 60)
        gone = await questions.evict("tests", 1.0)
        assert gone.blocks == 60 and gone.disk_bytes == 60 * 2 * 65536
        assert await asyncio.to_thread(client.read, SALT, hashes, into) == 0
    finally:
        client.close()
        await questions.close()
        process.stop()


async def test_a_directory_that_is_used_or_refused(tmp_path: Path) -> None:
    """A second node on one directory ends with its own exit code; one on a path that is no directory does without a disk."""
    first = NodeProcess(tmp_path, "first", disk=True)
    second = NodeProcess(tmp_path, "second", disk=True)
    assert second.node == "" and second.stop() == 3
    (tmp_path / "file").write_text("")
    third = NodeProcess(tmp_path, "third", disk=False)
    third.stop()
    third.settings = type(third.settings)(
        **{
            **{name: getattr(third.settings, name) for name in third.settings.__struct_fields__},
            "directory": str(tmp_path / "file"),
        }
    )
    third.start()
    client, questions = third.client(), third.questions()
    hashes = chain(1, 3)
    assert await asyncio.to_thread(client.write, SALT, b"", hashes, rows(hashes), USE) == 3
    assert (await questions.stats()).disk_state
    client.close()
    await questions.close()
    assert third.stop() == 0
    assert first.stop() == 0


async def test_nothing_is_written_into_a_directory_of_others(tmp_path: Path) -> None:
    """A directory that is open to others and holds what is not a node's stays as it is."""
    (tmp_path / "store").mkdir(mode=0o755)
    (tmp_path / "store" / "thesis.txt").write_text("x")
    process = NodeProcess(tmp_path, "guest", disk=True)
    client, questions = process.client(), process.questions()
    hashes = chain(1, 3)
    assert await asyncio.to_thread(client.write, SALT, b"", hashes, rows(hashes), USE) == 3
    assert "thesis.txt" in (await questions.stats()).disk_state
    client.close()
    await questions.close()
    assert process.stop() == 0
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["thesis.txt"]


def test_a_frozen_node_costs_a_bounded_wait(node: NodeProcess) -> None:
    """SIGSTOP: a call ends after its timeout, the next ones at once, and all is well after SIGCONT."""
    client = node.client(timeout_s=0.3)
    hashes = chain(5, 2)
    client.write(SALT, b"", hashes, rows(hashes), USE)
    node.signal(signal.SIGSTOP)
    try:
        with pytest.raises(KvUnavailable):
            client.read(SALT, hashes, room(2))
        begin_s = time.monotonic()
        for _ in range(100):
            with pytest.raises(KvUnavailable):
                client.read(SALT, hashes, room(2))
        assert time.monotonic() - begin_s < 5.0
    finally:
        node.signal(signal.SIGCONT)
    end_s = time.monotonic() + 10
    while True:
        try:
            assert client.read(SALT, hashes, room(2)) == 2
            break
        except KvUnavailable:
            assert time.monotonic() < end_s
            time.sleep(0.05)
    client.close()


async def test_questions_to_a_frozen_node_end_at_their_deadline(node: NodeProcess) -> None:
    """``prepare`` of a frozen node raises within its deadline, and the connection is made anew afterwards."""
    questions = node.questions()
    await questions.stats()
    node.signal(signal.SIGSTOP)
    try:
        with pytest.raises(KvUnavailable):
            await questions.prepare(SALT, chain(6, 2), deadline_s=0.1, prefill_tokens_per_s=0.0, use=USE)
    finally:
        node.signal(signal.SIGCONT)
    end_s = time.monotonic() + 10
    while True:
        try:
            await questions.stats()
            break
        except KvUnavailable:
            assert time.monotonic() < end_s
            await asyncio.sleep(0.05)
    await questions.close()


async def test_a_frozen_node_costs_no_connections(node: NodeProcess) -> None:
    """Whoever's deadline ends before a frozen node accepts him leaves no open socket behind."""
    node.signal(signal.SIGSTOP)
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(4):
            questions = node.questions()
            with pytest.raises(KvUnavailable):
                await questions.prepare(SALT, chain(6, 2), deadline_s=0.02, prefill_tokens_per_s=0.0, use=USE)
        await asyncio.sleep(0)  # an aborted transport closes its socket in the loop's next turn
        assert len(os.listdir("/proc/self/fd")) <= before
    finally:
        node.signal(signal.SIGCONT)


def _hostile() -> list[bytes]:
    attach = frame(Attach(model_hash=MODEL_HASH, weights_hash=WEIGHTS_HASH, signature=SIGNATURE, replica="x"))
    hashes = joined(chain(7, 2))
    short = frame(Write(number=1, salt=SALT, parent=b"", hashes=hashes), BLOCK_BYTES)
    return [
        b"\xff" * 4096,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 64,
        (2**31).to_bytes(4, "big") + (2**31).to_bytes(4, "big"),
        attach[:-3] + b"\xc1\xc1\xc1",
        attach + b"\xff" * 100,
        frame(Read(number=1, salt=SALT, hashes=hashes)),
        attach + frame(Read(number=1, salt=SALT, hashes=hashes[:-1])),
        attach + frame(Read(number=1, salt=SALT, hashes=hashes), 10) + b"x" * 10,
        attach + short + b"y" * BLOCK_BYTES,
        frame(Attach()) + frame(Read(number=1, salt=SALT, hashes=hashes)),
        attach + attach,
        frame(Attach(signature=msgspec.structs.replace(SIGNATURE, block_bytes=2**40))),
    ]


@pytest.mark.parametrize("number", range(len(_hostile())))
def test_nonsense_closes_its_connection_and_nothing_else(node: NodeProcess, number: int) -> None:
    """Bytes that are no message of their place close the connection they came on; others go on (SEC-1)."""
    client = node.client()
    hashes = chain(8, 2)
    client.write(SALT, b"", hashes, rows(hashes), USE)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(node.path)
        with suppress(ConnectionError):
            sock.sendall(_hostile()[number])
            while sock.recv(65536):
                pass
    assert client.read(SALT, hashes, room(2)) == 2
    assert client.read(SALT, chain(7, 2), room(2)) == 0
    client.close()


def test_a_connection_that_says_nothing_is_closed(node: NodeProcess) -> None:
    """Who does not attach holds no connection."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(node.path)
        assert sock.recv(1) == b""


def test_the_socket_is_for_its_owner_alone(node: NodeProcess) -> None:
    """Mode 0600 (SEC-1)."""
    assert stat.S_IMODE(os.stat(node.path).st_mode) == 0o600


def test_an_engine_that_dies_in_a_write_leaves_nothing(node: NodeProcess) -> None:
    """A block of which a part came is not there, and its room is free again."""
    hashes = chain(9, 2)
    attach = frame(Attach(model_hash=MODEL_HASH, weights_hash=WEIGHTS_HASH, signature=SIGNATURE, replica="x"))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(node.path)
        sock.sendall(attach)
        _take(sock)
        head = frame(Write(number=1, salt=SALT, parent=b"", hashes=joined(hashes)), 2 * BLOCK_BYTES)
        sock.sendall(head + bytes(rows(hashes))[: BLOCK_BYTES + 100])
    client = node.client()
    end_s = time.monotonic() + 10
    while client.read(SALT, hashes, room(2)) != 1:
        assert time.monotonic() < end_s
    client.close()


def test_a_row_that_changed_on_its_way_is_not_given_to_the_engine(tmp_path: Path) -> None:
    """The engine's end checks the checksum of every page and tells the node, which drops the block (E5, P2)."""
    hashes = chain(1, 3)
    path = str(tmp_path / "liar.sock")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(1)
        told: list[bytes] = []
        thread = Thread(target=_lie, args=(listening, hashes, told))
        thread.start()
        client = KvClient(path, ATTACH, timeout_s=5.0)
        into = room(3)
        assert client.read(SALT, hashes, into) == 1
        assert client.corrupt == 1
        client.close()
        thread.join(10)
    assert hashes[1] in told[0]


def test_a_node_logs_from_the_level_that_is_wanted() -> None:
    """Info where nobody says otherwise: what it tries in vain every few seconds would fill the worker's log."""
    code = "import structlog; from subjects.logs import log_json; log_json(); "
    code += "log = structlog.get_logger(); [log.debug('a detail'), log.warning('a warning')]"
    for level, told in (("", False), ("debug", True)):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "CARPOOL_LOG_LEVEL": level},
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        assert ("a detail" in done.stderr, "a warning" in done.stderr) == (told, True)


def _lie(listening: socket.socket, hashes: list[bytes], told: list[bytes]) -> None:
    sock, _ = listening.accept()
    with sock:
        _take(sock)
        sock.sendall(frame(Attached(node="liar")))
        _take(sock)
        body = bytearray(rows(hashes))
        sums = b"".join(checksums(memoryview(body)[at : at + BLOCK_BYTES]) for at in range(0, len(body), BLOCK_BYTES))
        body[BLOCK_BYTES + 66_000] ^= 1
        sock.sendall(frame(Found(number=1, blocks=3, checksums=sums), len(body)) + body)
        told.append(_take(sock))


def _take(sock: socket.socket) -> bytes:
    head_bytes, _ = lengths(sock.recv(LENGTHS_BYTES, socket.MSG_WAITALL))
    return sock.recv(head_bytes, socket.MSG_WAITALL)
