"""The shared index while its server is frozen, killed, emptied or insane: nobody waits, nothing is mixed up, all comes back.

KVC-2, REL-3, PAINS M2 M3 M5.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from redis.asyncio import Redis

from kvcache.shared.index import Held, IndexState, LinkSettings, RedisIndex, RedisIndexSettings, SpanAccess
from subjects.ids import ModelHash
from tests.servers import ValkeyServer
from tests.waiting import until

MODEL = ModelHash("1" * 64)
NORMAL_AGAIN_S = 5.0
"""After a thaw or a restart (PAINS M2)."""
PATIENT_S = 5.0
HELD = 600


def settings(**fields: Any) -> RedisIndexSettings:
    """Quick turns, the default bounds of connections and breaker."""
    return RedisIndexSettings(**{"flush_every_s": 0.01, "resync_every_s": 0.1, "lease_s": 1.0, **fields})


def span(number: int) -> bytes:
    """A span's hash."""
    return number.to_bytes(16, "big")


def held() -> list[Held]:
    """What the node holds: the time of each span's access says which one it is."""
    return [(MODEL, span(number), _access(number)) for number in range(HELD)]


def _access(number: int) -> SpanAccess:
    return SpanAccess(at_unix_s=time.time() - 1000 * (number + 1), size_bytes=number)


def answers_at_once(question: Coroutine[Any, Any, Any]) -> bool:
    """Whether a coroutine ends without giving way even once: it waits for nobody."""
    try:
        question.send(None)
    except StopIteration:
        return True
    question.close()
    return False


async def all_told(index: RedisIndex) -> bool:
    """Whether the server can say when each span that is held was used last."""
    found = await index.last_access(MODEL, [span(number) for number in range(HELD)], deadline_s=PATIENT_S)
    return len(found) == HELD


async def normal_again(index: RedisIndex) -> None:
    """Everything is told and asked as before, within the bound and without a restart."""
    end_s = time.monotonic() + NORMAL_AGAIN_S
    await until(lambda: index.state is IndexState.OK and index.settled, within_s=NORMAL_AGAIN_S)
    while not await all_told(index):
        assert time.monotonic() < end_s, "not normal in time"
        await asyncio.sleep(0.01)


async def started(server: ValkeyServer, **fields: Any) -> RedisIndex:
    """An index whose server knows all that the node holds."""
    index = RedisIndex(server.url, "a-1", settings(**fields), on_lost=held)
    index.start()
    for entry in held():
        index.note(*entry)
    await until(lambda: index.state is IndexState.OK and index.settled)
    return index


async def test_a_frozen_server_holds_up_nobody_and_is_used_again_after_the_thaw(valkey_server: ValkeyServer) -> None:
    """SIGSTOP under load: hotness degrades to what the node knows, calls return at once; SIGCONT: normal (PAINS M2 M3)."""
    index = await started(valkey_server)
    stop = asyncio.Event()
    answered: list[int] = []

    async def load() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            index.note(MODEL, span(number % HELD), _access(number % HELD))
            answered.append(len(await index.last_access(MODEL, [span(number % HELD)])))
            await asyncio.sleep(0.001)

    tasks = [asyncio.create_task(load()) for _ in range(4)]
    await until(lambda: sum(answered) > 20)
    await asyncio.to_thread(valkey_server.freeze)
    await until(lambda: index.state is IndexState.DEGRADED)
    frozen_until_s = time.monotonic() + 1.5
    while time.monotonic() < frozen_until_s:
        before = len(answered)
        if index.state is IndexState.DEGRADED:
            assert answers_at_once(index.last_access(MODEL, [span(1)])) and answers_at_once(index.holders(MODEL, [span(1)]))
        index.note(MODEL, span(HELD + 1), _access(1))
        await until(lambda before=before: len(answered) > before)  # type: ignore[misc]
        await asyncio.sleep(0.02)
    assert index.stats.waiting <= HELD + 1 and index.stats.refusals["skipped"] > 0
    index.dropped(MODEL, span(HELD + 1))
    await asyncio.to_thread(valkey_server.thaw)
    await normal_again(index)
    stop.set()
    await asyncio.gather(*tasks)
    assert index.counts.resyncs == 0, "a server that kept all is not told all again"
    async with Redis(port=valkey_server.port) as client:
        assert await client.zcard(f"cache:hotness:{MODEL}") == HELD
        assert len(await client.client_list()) <= 2 + index.settings.link.reads_max, "no pile of dead connections"
    await index.close()


@pytest.mark.parametrize("gone_s", [0.0, 1.0])
async def test_a_server_that_died_and_came_back_empty_is_filled_again(valkey_server: ValkeyServer, gone_s: float) -> None:
    """kill -9, a new one on the same port: dead pooled connections are replaced, all is told again (PAINS M2)."""
    index = await started(valkey_server)
    valkey_server.kill()
    index.note(MODEL, span(0), _access(0))
    if gone_s:
        await until(lambda: index.state is IndexState.DEGRADED)
        assert answers_at_once(index.last_access(MODEL, [span(1)]))
        await asyncio.sleep(gone_s)
    await asyncio.to_thread(valkey_server.start)
    await until(lambda: index.counts.resyncs > 0, within_s=NORMAL_AGAIN_S)
    await normal_again(index)
    await index.close()


async def test_a_server_that_comes_late_is_found(no_child_is_left: None, tmp_path: Any) -> None:
    """The node starts without its server, says that it is degraded, and tells all when the server is there."""
    server = ValkeyServer(tmp_path / "valkey", start=False)
    index = RedisIndex(server.url, "a-1", settings(), on_lost=held)
    index.start()
    for entry in held():
        index.note(*entry)
    await until(lambda: index.state is IndexState.DEGRADED)
    await asyncio.to_thread(server.start)
    await normal_again(index)
    await index.close()
    server.stop()


async def test_a_server_that_is_emptied_again_and_again_under_load_ends_complete(valkey_server: ValkeyServer) -> None:
    """FLUSHALL at any moment, between a batch and its answer too (PAINS M5)."""
    index = await started(valkey_server)
    async with Redis(port=valkey_server.port) as client:
        for number in range(40):
            index.note(MODEL, span(number), _access(number))
            await client.flushall()
            await asyncio.sleep(0.003 * (number % 7))
    await until(lambda: index.counts.resyncs > 0)
    await normal_again(index)
    assert index.counts.owner_errors == 0
    await index.close()


async def test_no_answer_goes_to_another_question(valkey_server: ValkeyServer) -> None:
    """Questions that are late or cancelled, freezes in between: whoever gets an answer gets his own (PAINS M2)."""
    index = await started(valkey_server, link=LinkSettings(read_timeout_s=0.1))
    truth = await index.last_access(MODEL, [span(number) for number in range(HELD)], deadline_s=PATIENT_S)
    draw = random.Random(7)
    answered = 0

    async def ask(numbers: list[int], deadline_s: float, cancel_s: float) -> None:
        nonlocal answered
        question = asyncio.create_task(index.last_access(MODEL, [span(n) for n in numbers], deadline_s=deadline_s))
        await asyncio.wait((question,), timeout=cancel_s)
        if question.cancel():
            await asyncio.gather(question, return_exceptions=True)
            return
        found = question.result()
        answered += len(found)
        assert all(name in {span(n) for n in numbers} and abs(at_s - truth[name]) < 400 for name, at_s in found.items())

    for turn in range(30):
        if turn % 10 == 5:
            await asyncio.to_thread(valkey_server.freeze)
        questions = [
            ask(
                draw.sample(range(HELD), draw.randint(1, 20)), draw.choice([0, 1e-4, 1e-3, 1.0]), draw.choice([0, 1e-3, 1.0])
            )
            for _ in range(12)
        ]
        await asyncio.gather(*questions)
        if turn % 10 == 5:
            await asyncio.to_thread(valkey_server.thaw)
            await until(lambda: index.state is IndexState.OK, within_s=NORMAL_AGAIN_S)
    assert answered > 100 and index.stats.refusals["late"] > 0
    await index.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$-7\r\nxx\r\n" * 9,
        b"*3\r\n:1\r\n",
        b"+OK\r\n" * 5,
        b"\x00\xff" * 50,
        b":nan\r\n" * 9,
    ],
    ids=["silence", "http", "length", "short", "ok", "bytes", "nan"],
)
async def test_a_server_that_talks_nonsense_is_left_alone(reply: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """Another program behind that address, or none that answers: degraded, no exception, one line in the log."""

    talking: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(4096):
                writer.write(reply)
        except OSError:
            pass
        finally:
            writer.close()

    def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talking.add(asyncio.create_task(talk(reader, writer)))

    server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    quick = LinkSettings(read_timeout_s=0.05, write_timeout_s=0.05)
    # A URL cannot take the bounds away (PAINS M3).
    index = RedisIndex(f"redis://127.0.0.1:{port}/0?socket_timeout=0&socket_connect_timeout=0", "a-1", settings(link=quick))
    index.start()
    await until(lambda: index.state is IndexState.DEGRADED)
    for number in range(10):
        index.note(MODEL, span(number), _access(number))
        assert await index.last_access(MODEL, [span(number)]) == {}
        assert await index.holders(MODEL, [span(number)]) == {}
        await asyncio.sleep(0.01)
    assert index.state is IndexState.DEGRADED and index.stats.waiting == 10
    await index.close()
    server.close()
    await server.wait_closed()
    await asyncio.wait_for(asyncio.gather(*talking), PATIENT_S)
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("shared hotness") == 1 and sum(index.stats.refusals.values()) > 1
