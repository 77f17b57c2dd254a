"""Real servers for tests: a nats-server with JetStream and a Valkey, each of which can be killed, frozen and restarted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil

from ops.servers import free_port, nats_server_argv, valkey_server_argv

START_TIMEOUT_S = 15.0
START_ATTEMPTS_MAX = 5


def thread_state(pid: int, thread: int) -> str:
    """The kernel's letter for what a thread does: ``T`` when it is stopped."""
    return Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]


class ServerProcess:
    """A server on a free loopback port. It keeps its port and its files over restarts."""

    def __init__(self, directory: Path, *, start: bool = True) -> None:
        self.directory = directory
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._frozen = False
        if start:
            self.start(any_port=True)

    def argv(self) -> list[str]:
        """The command line for the present port."""
        raise NotImplementedError

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self, *, any_port: bool = False) -> None:
        """Starts it and waits until it accepts connections; ``any_port`` allows another port if this one is taken."""
        for _ in range(START_ATTEMPTS_MAX):
            if self._start_once():
                return
            if any_port:
                self.port = free_port()
            else:
                time.sleep(0.2)
        raise RuntimeError(f"{type(self).__name__} did not start: {self.log()[-2000:]}")

    def _start_once(self) -> bool:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "log").open("ab") as log:
            process = subprocess.Popen(self.argv(), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._process = process
        end_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end_s and process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                    # Whoever answers must be ours: the port may have been somebody else's already.
                    time.sleep(0.02)
                    if process.poll() is None:
                        return True
            except OSError:
                time.sleep(0.01)
        self.kill()
        return False

    def kill(self) -> None:
        """kill -9, as a crash would."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(timeout=10)
        self._process = None

    def restart(self) -> None:
        """kill -9 and start again on the same port and files."""
        self.kill()
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        self._signal(signal.SIGSTOP)
        self._frozen = True
        # The signal stops one thread after the other; until the last one stands the server may still answer.
        process = psutil.Process(self.pid)
        while {thread_state(process.pid, thread.id) for thread in process.threads()} != {"T"}:
            time.sleep(0.001)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)
        self._frozen = False

    def stop(self) -> None:
        """Ends it for good."""
        if self._frozen:
            self.thaw()
        self._signal(signal.SIGTERM)
        if self._process is not None:
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.kill()
        self._process = None

    def log(self) -> str:
        """What it wrote."""
        return (self.directory / "log").read_text(errors="replace")

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            os.kill(self.pid, number)


class NatsServer(ServerProcess):
    """A nats-server with JetStream, 8 MB payloads and HTTP monitoring."""

    def __init__(self, directory: Path, *, start: bool = True) -> None:
        self.monitor_port = free_port()
        super().__init__(directory, start=start)

    @property
    def url(self) -> str:
        """For clients."""
        return f"nats://127.0.0.1:{self.port}"

    def argv(self) -> list[str]:
        """With a configuration written afresh."""
        return nats_server_argv(self.directory, self.port, monitor_port=self.monitor_port)


class ValkeyServer(ServerProcess):
    """A Valkey that keeps nothing on disk."""

    @property
    def url(self) -> str:
        """For clients."""
        return f"redis://127.0.0.1:{self.port}/0"

    def argv(self) -> list[str]:
        """The command line."""
        return valkey_server_argv(self.directory, self.port)
