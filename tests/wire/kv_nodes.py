"""Node processes for tests, chains of blocks to give to them, and ends of their sockets."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from kvcache.core.identity import KvSignature
from kvcache.node.settings import NATS_VARIABLE, REDIS_VARIABLE, NodeSettings
from kvcache.wire.client import KvClient, KvNode
from kvcache.wire.messages import Attach, KvUse
from profiles.blocks import chain_hashes

BLOCK_BYTES = 70_000
"""Neither a whole number of pages nor of disk sectors."""
BLOCK_TOKENS = 32
SIGNATURE = KvSignature(
    model="tests",
    layers=2,
    kv_heads=2,
    head_size=64,
    dtype="float16",
    form="test",
    block_size=BLOCK_TOKENS,
    block_bytes=BLOCK_BYTES,
)
MODEL_HASH = "a" * 64
WEIGHTS_HASH = "b" * 64
ATTACH = Attach(model_hash=MODEL_HASH, weights_hash=WEIGHTS_HASH, signature=SIGNATURE, replica="replica-1")
SALT = b"s" * 16
USE = KvUse(tenant="t", request="r-1")


class NodeProcess:
    """One ``python -m kvcache.node.main``."""

    def __init__(
        self,
        directory: Path,
        worker: str,
        nats_url: str = "",
        *,
        redis_url: str = "",
        disk: bool = False,
        start: bool = True,
        **settings: Any,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.worker = worker
        self.path = str(directory / f"{worker}.sock")
        self.settings = NodeSettings(
            worker=worker,
            socket_path=self.path,
            directory=str(directory / "store") if disk else "",
            **{"host_bytes_max": 64 << 20, "settle_s": 0.2, "publish_s": 0.05, **settings},
        )
        self._urls = {NATS_VARIABLE: nats_url, REDIS_VARIABLE: redis_url}
        self.node = ""
        self.data = ""
        self.said = b""
        if start:
            self.start()

    def start(self, *, stdin: int = subprocess.DEVNULL, argument: str | None = None) -> None:
        """Starts it and waits for its ready line."""
        settings = msgspec.json.encode(self.settings).decode() if argument is None else argument
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvcache.node.main", settings],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **self._urls},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            ready = msgspec.json.decode(line)
            self.node, self.data = ready["node"], ready["data"]

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self._bury()

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        return self._bury()

    def _bury(self) -> int:
        try:
            _, self.said = self.process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode

    def client(self, replica: str = "replica-1", **changes: Any) -> KvClient:
        """An engine's end."""
        timeout_s = changes.pop("timeout_s", 5.0)
        return KvClient(self.path, msgspec.structs.replace(ATTACH, replica=replica, **changes), timeout_s=timeout_s)

    def questions(self, replica: str = "replica-1") -> KvNode:
        """A replica's other end, or an agent's."""
        return KvNode(self.path, msgspec.structs.replace(ATTACH, replica=replica))


def chain(seed: int, blocks: int, salt: bytes = SALT) -> list[bytes]:
    """Hashes of a prompt of so many blocks."""
    return chain_hashes(range(seed * 1_000_000, seed * 1_000_000 + blocks * BLOCK_TOKENS), BLOCK_TOKENS, salt)


def row(hash: bytes) -> bytes:
    """The KV of a block in tests: bytes that follow from its hash."""
    return hashlib.shake_128(hash).digest(1000) * (BLOCK_BYTES // 1000)


def rows(hashes: Sequence[bytes]) -> memoryview:
    """The KV of several blocks."""
    return memoryview(b"".join(map(row, hashes)))


def room(blocks: int) -> memoryview:
    """Somewhere to read into."""
    return memoryview(bytearray(blocks * BLOCK_BYTES))


def right(into: memoryview, hashes: Sequence[bytes], count: int) -> bool:
    """Whether the first ``count`` rows are those of the first hashes."""
    return into[: count * BLOCK_BYTES] == rows(hashes[:count])
