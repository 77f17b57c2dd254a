"""Replica processes as the kernel sees them: who they are, that they die with their agent, what they said last.

A replica is its own session and process group, so that a signal reaches what it started too. Exits are seen through a
pidfd. A pid alone names nobody for long; with its start time it does, which is what the state directory records for the
sweep at the next agent's start.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from subjects.errors import ConfigError
from subjects.ids import ReplicaId

STDERR_TAIL_BYTES = 4096
SWEEP_WAIT_S = 5.0
"""How long the sweep waits for a killed leftover to be gone."""
_FORWARD_CHUNKS_MAX = 256
_PR_SET_CHILD_SUBREAPER = 36
_STAT_START_TIME = 19
"""Index of the start time in ``/proc/PID/stat`` behind the command's closing parenthesis."""

log = structlog.get_logger(__name__)


def become_subreaper() -> None:
    """Makes this process the parent of orphans below it, so that it can reap replicas whose middle parent left.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None when there is no such process or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[_STAT_START_TIME])


def pss_bytes(pid: int) -> int | None:
    """Proportional set size: shared pages are charged by their share. None when the process is gone. Takes milliseconds."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return None


def zombie_children() -> list[int]:
    """Children of this process that exited and were not waited for."""
    zombies = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            for pid in (task / "children").read_text().split():
                with suppress(OSError):
                    if Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z":
                        zombies.append(int(pid))
    return zombies


def signal_group(pid: int, number: int) -> None:
    """Signals a process and, if it leads a process group, the whole group. A missing one is no error."""
    with suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def exec_replica(control_fd: int, stderr_fd: int) -> subprocess.Popen[bytes]:
    """Starts ``python -m workers.replica`` in its own session with the given end of a control connection.

    Raises:
        OSError: the process could not be made.
    """
    return subprocess.Popen(  # noqa: S603 - our own module under our own interpreter
        [sys.executable, "-P", "-m", "workers.replica", "--control-fd", str(control_fd)],
        env=our_environment(),
        stdin=subprocess.DEVNULL,
        stdout=stderr_fd,
        stderr=stderr_fd,
        pass_fds=(control_fd,),
        start_new_session=True,
    )


def our_environment() -> dict[str, str]:
    """For a child that runs the code that this process runs, wherever it is started and whatever lies in that directory."""
    ours = str(Path(__file__).resolve().parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([ours, *filter(None, [os.environ.get("PYTHONPATH")])])}


class Forwarder:
    """Passes the output of replicas on to this process's stderr without ever blocking the event loop.

    A thread writes; when whoever reads our stderr is too slow, chunks are dropped and counted.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._chunks: queue.Queue[bytes] = queue.Queue(maxsize=_FORWARD_CHUNKS_MAX)
        threading.Thread(target=self._run, name="replica-output", daemon=True).start()

    def forward(self, chunk: bytes) -> None:
        """Queues a chunk."""
        try:
            self._chunks.put_nowait(chunk)
        except queue.Full:
            self.dropped += 1

    def _run(self) -> None:
        while True:
            chunk = self._chunks.get()
            with suppress(OSError):
                while chunk:
                    chunk = chunk[os.write(2, chunk) :]


class StderrTail:
    """The last bytes that came out of a pipe."""

    def __init__(self, loop: asyncio.AbstractEventLoop, forward: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._forward = forward
        self._read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_fd, False)
        self._tail = bytearray()
        self._open = True
        loop.add_reader(self._read_fd, self._readable)

    def close_write_end(self) -> None:
        """To be called once the process has it."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def finish(self) -> str:
        """Takes what is in the pipe, closes it and returns the tail."""
        if self._open:
            for _ in range(64):  # a pipe holds 64 KiB; whoever still writes may not keep us here
                if not self._readable():
                    break
            self._close()
        self.close_write_end()
        return self._tail.decode(errors="replace")

    def _readable(self) -> bool:
        try:
            chunk = os.read(self._read_fd, 65536)
        except BlockingIOError:
            return False
        if not chunk:
            self._close()
            return False
        self._tail += chunk
        del self._tail[:-STDERR_TAIL_BYTES]
        self._forward(chunk)
        return True

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._read_fd)
            os.close(self._read_fd)


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replica: str
    pid: int
    start_time: int
    agent_pid: int
    agent_start_time: int
    boot: str


class StateDirectory:
    """One file per replica process, so that the next agent can end what a dead one left behind."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ConfigError: the directory cannot be made or written.
        """
        self._path = path / "replicas"
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self._path / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"--state-dir {path}: {error.strerror}; give a directory that can be written") from None
        self._agent_start_time = start_time(os.getpid()) or 0
        self._boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def record(self, replica: ReplicaId, pid: int) -> None:
        """Notes a process that was started."""
        started = start_time(pid)
        if started is None:
            return
        record = _Record(
            replica=replica,
            pid=pid,
            start_time=started,
            agent_pid=os.getpid(),
            agent_start_time=self._agent_start_time,
            boot=self._boot,
        )
        # The lifeline ends a replica anyway; a full disk must not stop it from being served.
        try:
            temporary = self._path / f".{replica}.tmp"
            temporary.write_bytes(msgspec.json.encode(record))
            temporary.rename(self._path / f"{replica}.json")
        except OSError as error:
            log.warning("a replica could not be recorded for the next sweep", replica=replica, error=str(error))

    def forget(self, replica: ReplicaId) -> None:
        """Removes the note of a process that is gone."""
        with suppress(OSError):
            (self._path / f"{replica}.json").unlink(missing_ok=True)

    def sweep(self) -> list[str]:
        """Kills the replicas of agents that are dead and waits for them to be gone; returns their ids. Blocks."""
        swept = []
        for file in sorted(self._path.glob("*.json")):
            try:
                record = msgspec.json.decode(file.read_bytes(), type=_Record)
            except (OSError, msgspec.MsgspecError) as error:
                log.warning("a note of a replica is unreadable and was removed", file=file.name, error=str(error))
                file.unlink(missing_ok=True)
                continue
            same_boot = record.boot == self._boot
            if same_boot and start_time(record.agent_pid) == record.agent_start_time:
                continue  # another agent with the same directory is alive and looks after it
            if same_boot and _kill_leftover(record.pid, record.start_time):
                swept.append(record.replica)
            file.unlink(missing_ok=True)
        return swept


def _kill_leftover(pid: int, started: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        # The pidfd was taken first: if the start time matches now, it stands for that very process.
        if start_time(pid) != started:
            return False
        signal_group(pid, signal.SIGKILL)
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll(SWEEP_WAIT_S * 1000)
    finally:
        os.close(pidfd)
    return True


class Reaper:
    """Waits for orphans that were handed to this process as subreaper and that nobody else here waits for.

    A child is reaped when it was seen as a zombie twice: its owner, if it has one, was there first.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def reap(self, owned: Iterable[int]) -> None:
        """One round; call it every few seconds. ``owned`` are pids that are waited for elsewhere."""
        kept = set(owned)
        zombies = {pid for pid in zombie_children() if pid not in kept}
        for pid in sorted(zombies & self._seen):
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._seen = zombies


def reap(pid: int) -> int | None:
    """Exit code of a child that has exited (negative for a signal), or None when it is not, or no longer, ours to ask."""
    for _ in range(20):
        try:
            reaped, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if reaped:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)  # the pidfd is readable a moment before the last thread is gone
    return None
