"""Node processes for tests: started, frozen, killed, stopped, started again on the same directory."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from kvcache.node.settings import NATS_VARIABLE, NodeSettings
from kvcache.wire.client import KvNode
from kvcache.wire.messages import KvStats

START_S_MAX = 30.0


class NodeProcess:
    """One node, with its socket and log below ``home``; ``fields`` are settings."""

    def __init__(self, home: Path, worker: str, *, nats: str = "", **fields: Any) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        self.settings = NodeSettings(worker=worker, socket_path=str(home / "kv.sock"), exit_with_stdin=True, **fields)
        self._nats = nats
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> str:
        return self.settings.socket_path

    def start(self) -> None:
        """Returns when it serves."""
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvcache.node.main", msgspec.json.encode(self.settings).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {NATS_VARIABLE: self._nats},
            )
        out = self._process.stdout
        assert out is not None
        assert select.select([out], [], [], START_S_MAX)[0], f"the node did not start: {self.log()}"
        line = out.readline()
        assert line, f"the node did not start: {self.log()}"
        assert json.loads(line)["node"]

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Without a goodbye."""
        if self._process is not None:
            self._process.kill()
            self._end()

    def stop(self) -> None:
        """As its agent would; what it holds goes to disk if it has one."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        process.wait(30)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def log(self) -> str:
        return (self.home / "log").read_text()[-3000:]

    async def stats(self) -> KvStats:
        node = KvNode(self.socket)
        try:
            return await node.stats()
        finally:
            await node.close()
