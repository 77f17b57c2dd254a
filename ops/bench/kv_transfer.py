"""How fast a chain moves from one node to another, beside a plain copy of the same bytes over the same path.

Both sides of both are processes of their own on loopback, one sends from memory and one receives into memory that it had
before, with equal socket buffers; rounds of both alternate. What a node does besides (asks over the bus, a token, the
chain's hashes, a checksum of each 64 KiB, which the plain copy lacks) is in its time: from the command to the answer that
all is there.

Offers are those that a node really gives for chains that it really holds; their blocks are small, their number is not.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from kvcache.core.identity import PAGE_BYTES, KvIdentity, KvSignature
from kvcache.errors import KvUnavailable
from kvcache.node.data_bytes import prepare_socket
from kvcache.node.settings import NATS_VARIABLE, NodeSettings
from kvcache.wire.client import KvClient, KvNode
from kvcache.wire.messages import Attach, KvUse
from ops.bench.kv import KvBench, until
from ops.kept import Kept
from ops.servers import free_port, nats_server_argv, port_is_free
from profiles.blocks import chain_hashes
from subjects import names
from subjects.codec import decode, encode
from subjects.errors import BusError, CarpoolError
from subjects.ids import WorkerId
from subjects.messages import KvAsk, KvOffer
from subjects.nats.bus import NatsBus

BLOCK_TOKENS = 32
BLOCK_BYTES = 737_280
"""Of SmolLM2-360M in 16 bits: 32 tokens, 32 layers, 5 heads of 64."""
BLOCKS = 1024
"""Some 720 MB, a prompt of 32K tokens."""
SMALL_BLOCK_BYTES = 2048
ROUNDS = 9
CONTEXTS = {"1K": 1024, "32K": 32 * 1024, "128K": 128 * 1024}
PIECE_BYTES = 8 << 20
_WAIT_S_MAX = 60.0
_SALT = hashlib.blake2b(b"bench", digest_size=16).digest()


async def measure(bench: KvBench) -> dict[str, Any]:
    """``migrate_ratio``: bytes per second of a migration over those of the plain copy, medians of all but the first round.

    ``migrate_bytes_per_s`` and ``copy_bytes_per_s`` are those medians; ``index_message_bytes``: the offer of a chain of so
    many tokens.

    Raises:
        CarpoolError: a migration did not bring all.
    """
    with tempfile.TemporaryDirectory(prefix="carpool-bench-") as folder:
        port = free_port()
        server = Kept("nats", nats_server_argv(Path(folder), port), os.environ, log=Path(folder) / "log")
        await server.start()
        nodes: list[_Node] = []
        try:
            await until(lambda: not port_is_free("127.0.0.1", port))
            nodes += [
                await _Node.started(Path(folder), name, f"nats://127.0.0.1:{port}") for name in ("source-1", "target-1")
            ]
            bus = await NatsBus.connect(f"nats://127.0.0.1:{port}", name="bench")
            try:
                sizes = await _offers(nodes[0], bus)
                return {"index_message_bytes": sizes} | await _rounds(nodes, bench)
            finally:
                await bus.close()
        finally:
            for node in nodes:
                await asyncio.to_thread(node.stop)
            await server.stop(10.0)


async def _rounds(nodes: list[_Node], bench: KvBench) -> dict[str, Any]:
    source, target = nodes
    signature = _signature("transfer", BLOCK_BYTES)
    hashes = chain_hashes(range(BLOCKS * BLOCK_TOKENS), BLOCK_TOKENS, _SALT)
    await asyncio.to_thread(source.write, signature, hashes)
    size = BLOCKS * BLOCK_BYTES
    questions = KvNode(target.path)
    plain: list[float] = []
    moved: list[float] = []
    with _PlainCopy(size) as copy:
        for number in range(ROUNDS + 1):
            copy_s = await asyncio.to_thread(copy.round)
            began_s = time.monotonic()
            pulled = await questions.pull("transfer", WorkerId(source.worker), deadline_s=_WAIT_S_MAX)
            move_s = time.monotonic() - began_s
            if pulled.failure or pulled.bytes != size:
                raise CarpoolError(f"a migration brought {pulled.bytes} of {size} bytes: {pulled.failure}")
            await questions.evict("transfer", 1.0)
            if number:  # the first touches memory for the first time
                plain.append(size / copy_s)
                moved.append(size / move_s)
            bench.say(f"transfer: plain copy {size / copy_s / 1e6:,.0f} MB/s, migration {size / move_s / 1e6:,.0f} MB/s")
    await questions.close()
    return {
        "migrate_ratio": round(statistics.median(moved) / statistics.median(plain), 3),
        "migrate_bytes_per_s": round(statistics.median(moved)),
        "copy_bytes_per_s": round(statistics.median(plain)),
        "migrate_bytes": size,
    }


async def _offers(source: _Node, bus: NatsBus) -> dict[str, int]:
    """Sizes of offers as they come over the bus."""
    signature = _signature("offers", SMALL_BLOCK_BYTES)
    identity = KvIdentity(weights_hash=_WEIGHTS, signature=signature, salt=_SALT)
    sizes: dict[str, int] = {}
    for name, tokens in CONTEXTS.items():
        hashes = chain_hashes(range(tokens), BLOCK_TOKENS, _SALT)
        await asyncio.to_thread(source.write, signature, hashes)
        ask = KvAsk(worker=WorkerId("bench-1"), identity=identity.key, head=hashes[-1], blocks=len(hashes))
        payload = await bus.request(names.kv_ask(WorkerId(source.worker)), encode(ask), timeout_s=5.0)
        if decode(payload, KvOffer).blocks != len(hashes):
            raise CarpoolError(f"the offer of {name} tokens is not of all of it")
        sizes[name] = len(payload)
    questions = KvNode(source.path)
    await questions.evict("offers", 1.0)
    await questions.close()
    return sizes


_WEIGHTS = "b" * 64


def _signature(model: str, block_bytes: int) -> KvSignature:
    return KvSignature(
        model=model,
        layers=32,
        kv_heads=5,
        head_size=64,
        dtype="bfloat16",
        form="bench",
        block_size=BLOCK_TOKENS,
        block_bytes=block_bytes,
    )


class _Node:
    """A node process."""

    def __init__(self, folder: Path, worker: str, nats_url: str) -> None:
        self.worker = worker
        self.path = str(folder / f"{worker}.sock")
        pages = -(-BLOCK_BYTES // PAGE_BYTES)
        settings = NodeSettings(
            worker=worker, socket_path=self.path, host_bytes_max=(BLOCKS + 64) * pages * PAGE_BYTES + (1 << 29)
        )
        self.process = subprocess.Popen(  # noqa: S603 - our own module under our own interpreter
            [sys.executable, "-P", "-m", "kvcache.node.main", msgspec.json.encode(settings).decode()],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), NATS_VARIABLE: nats_url},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )

    @classmethod
    async def started(cls, folder: Path, worker: str, nats_url: str) -> _Node:
        """Once it answers on the bus."""
        node = cls(folder, worker, nats_url)
        assert node.process.stdout is not None
        await asyncio.to_thread(node.process.stdout.readline)
        bus = await NatsBus.connect(nats_url, name="bench")
        try:
            end_s = time.monotonic() + _WAIT_S_MAX
            while time.monotonic() < end_s:
                try:
                    ask = KvAsk(worker=WorkerId("bench-1"), snapshot=True)
                    await bus.request(names.kv_ask(WorkerId(worker)), encode(ask), timeout_s=1.0)
                    return node
                except BusError:
                    await asyncio.sleep(0.05)
        finally:
            await bus.close()
        raise CarpoolError("a KV node did not start")

    def write(self, signature: KvSignature, hashes: list[bytes]) -> None:
        """Gives it a chain of blocks of noise."""
        attach = Attach(model_hash="a" * 64, weights_hash=_WEIGHTS, signature=signature, replica="bench-1")
        client = KvClient(self.path, attach, timeout_s=10.0)
        row = os.urandom(signature.block_bytes)
        some = memoryview(row * min(len(hashes), max(1, PIECE_BYTES // signature.block_bytes)))
        step = len(some) // signature.block_bytes
        for at in range(0, len(hashes), step):
            part = hashes[at : at + step]
            if client.write(_SALT, hashes[at - 1] if at else b"", part, some, KvUse(), first=at) != len(part):
                raise KvUnavailable("a block was not kept")
        client.close()

    def stop(self) -> None:
        """SIGTERM."""
        self.process.terminate()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


class _PlainCopy:
    """Two processes; each round one sends ``size`` bytes of its memory to the other."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._children: list[subprocess.Popen[str]] = []

    def __enter__(self) -> _PlainCopy:
        source = self._child("send", "0")
        assert source.stdout is not None
        self._child("receive", source.stdout.readline().strip())
        return self

    def _child(self, role: str, port: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(  # noqa: S603 - our own module under our own interpreter
            [sys.executable, "-m", "ops.bench.kv_transfer", role, port, str(self._size)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._children.append(child)
        return child

    def round(self) -> float:
        """Seconds from the connection to the last byte."""
        receiver = self._children[1]
        assert receiver.stdin is not None and receiver.stdout is not None
        receiver.stdin.write("go\n")
        receiver.stdin.flush()
        return float(receiver.stdout.readline())

    def __exit__(self, *_: object) -> None:
        for child in reversed(self._children):
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    stream.close()


def _memory(size: int) -> memoryview:
    arena = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    arena.madvise(mmap.MADV_HUGEPAGE)  # as a node's arena
    return memoryview(arena)


def _send(size: int) -> None:
    memory = _memory(size)
    row = os.urandom(1 << 20)
    for at in range(0, size, len(row)):
        part = memory[at : at + len(row)]
        part[:] = row[: len(part)]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        prepare_socket(listening)
        sys.stdout.write(f"{listening.getsockname()[1]}\n")
        sys.stdout.flush()
        while True:
            sock, _ = listening.accept()
            with sock:
                sock.sendall(memory)


def _receive(port: int, size: int) -> None:
    memory = _memory(size)
    for _ in sys.stdin:
        began_s = time.monotonic()
        with socket.socket() as sock:
            prepare_socket(sock)
            sock.connect(("127.0.0.1", port))
            rest = memory
            while len(rest):
                count = sock.recv_into(rest[:PIECE_BYTES])
                if not count:
                    raise EOFError("the sender closed")
                rest = rest[count:]
        sys.stdout.write(f"{time.monotonic() - began_s}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "send":
        _send(int(sys.argv[3]))
    else:
        _receive(int(sys.argv[2]), int(sys.argv[3]))
