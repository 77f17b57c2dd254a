"""Keeps a worker's KV node running: starts it, watches it, asks it, and ends it with the agent.

The node is a process of its own, in a group of its own. Its death or silence costs time only: replicas compute again
meanwhile, and it is started anew after a pause that doubles. It goes with its agent however that ends: its standard input is
the lifeline, a note in the state directory is for the sweep of the next agent.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from kvcache.node.settings import NATS_VARIABLE, REDIS_VARIABLE, Exit, NodeSettings
from kvcache.wire.client import KvNode
from kvcache.wire.messages import KvStats
from subjects.errors import CarpoolError
from subjects.ids import ReplicaId, WorkerId
from subjects.messages import EvictKv, KvModelReport, KvReport, KvTier, KvTierReport, MigrateKv
from workers.kv_config import KvConfig, disk_room
from workers.processes import StateDirectory, StderrTail, our_environment, signal_group

ASK_EVERY_S = 2.0
"""How often the node is asked for its counts, which also shows that it answers."""
FROZEN_S = 15.0
"""A node that answers nothing for so long is killed and started again."""
START_S_MAX = 30.0
"""From the start of its process to its ready line; opening a large store reads little of it."""
PAUSE_S_MIN = 0.2
PAUSE_S_MAX = 15.0
STEADY_S = 30.0
"""After such a life the next pause is short again."""
LOCKED_TRIES_MAX = 5
"""A directory in use is tried so often again, some 13 s, since its last owner may still be writing what it has not on disk;
then the node does without one."""
END_GRACE_S = 3.0
"""What a node may take to end beyond the bound of its flush."""
SOCKET_BYTES_MAX = 100
"""A Unix socket's path has room for 107."""
REPORT_S_MAX = 3600.0
"""No engine takes longer from its workers' report to its being read."""
MODELS_TOLD_MAX = 64
READY_BYTES_MAX = 4096

log = structlog.get_logger(__name__)


class _Ready(msgspec.Struct, frozen=True):
    """The line that a node writes once it serves."""

    node: str
    data: str = ""


class KvKeeper:
    """See the module's docstring. ``report`` hears how the node is, after each change and every ``ASK_EVERY_S``."""

    def __init__(
        self,
        config: KvConfig,
        *,
        worker: WorkerId,
        nats_urls: Sequence[str],
        state: StateDirectory,
        state_dir: Path,
        forward: Callable[[bytes], None],
        report: Callable[[KvReport], None],
    ) -> None:
        self._config = config
        self._worker = worker
        self._nats_urls = tuple(nats_urls)
        self._state = state
        self._note_id = ReplicaId(f"kv-{worker}")
        self._forward = forward
        self._report = report
        self.socket_path = _socket_path(state_dir, worker)
        self._apart = Path(self.socket_path).parent != state_dir.absolute()
        self._node = KvNode(self.socket_path)
        self._popen: subprocess.Popen[bytes] | None = None
        self._stderr: StderrTail | None = None
        self._note = ""
        self._address = ""
        self._locked = 0
        self._flush_s = NodeSettings(worker=worker, socket_path=self.socket_path).flush_s_max

    @property
    def pid(self) -> int | None:
        """Of the node's process, while there is one."""
        return self._popen.pid if self._popen is not None else None

    # ---- life

    async def run(self) -> None:
        """Keeps it running until it is cancelled; :meth:`stop` ends the process then."""
        pause_s = PAUSE_S_MIN
        loop = asyncio.get_running_loop()
        while True:
            begun_s = loop.time()
            note = await self._live()
            self._tell(note)
            log.warning("the KV node is not running; replicas compute what it would have known", reason=note)
            if self._locked == 0 and loop.time() - begun_s >= STEADY_S:
                pause_s = PAUSE_S_MIN
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_S_MAX, pause_s * 2)

    async def _live(self) -> str:
        """One life of the process; returns why it ended."""
        stderr = StderrTail(asyncio.get_running_loop(), self._forward)
        try:
            settings = await asyncio.to_thread(self._settings)
            # Should this task end meanwhile, nobody holds the process's standard input any more, and so it ends too.
            popen = await asyncio.to_thread(self._spawn, settings, stderr.write_fd)
        except (OSError, ValueError) as error:
            stderr.finish()
            return f"it cannot be started: {error}"
        finally:
            stderr.close_write_end()
        self._popen, self._stderr = popen, stderr
        self._state.record(self._note_id, popen.pid)
        log.info("KV node process", pid=popen.pid, memory_bytes=settings.host_bytes_max, disk_bytes=settings.disk_bytes_max)
        exited = asyncio.create_task(_exited(popen.pid))
        try:
            await self._watch(popen, exited)
            await exited
        finally:
            exited.cancel()
        return self._buried()

    async def _watch(self, popen: subprocess.Popen[bytes], exited: asyncio.Task[None]) -> None:
        """From its start to its exit, or until it has to be killed."""
        try:
            async with asyncio.timeout(START_S_MAX):
                ready = await _ready_line(popen)
        except TimeoutError:
            log.warning("the KV node did not get ready and is killed", within_s=START_S_MAX)
            signal_group(popen.pid, signal.SIGKILL)
            return
        if ready is None:
            # It ends, or it is none of ours; its own exit code says more than a kill would.
            await asyncio.wait({exited}, timeout=END_GRACE_S)
            if not exited.done():
                log.warning("the KV node said nothing that can be read and is killed")
                signal_group(popen.pid, signal.SIGKILL)
            return
        self._address = ready.data
        self._locked = 0
        log.info("KV node", node=ready.node, address=ready.data, note=self._note)
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        while not exited.done():
            with suppress(CarpoolError, OSError):
                self._report(self._told(await self._node.stats()))
                heard_s = loop.time()
            if loop.time() - heard_s > FROZEN_S:
                log.warning("the KV node answers nothing and is killed", silent_s=FROZEN_S)
                signal_group(popen.pid, signal.SIGKILL)
                return
            await asyncio.wait({exited}, timeout=ASK_EVERY_S)

    def _settings(self) -> NodeSettings:
        config = self._config
        disk_bytes, self._note = disk_room(config)
        if self._locked > LOCKED_TRIES_MAX:
            used = f"{config.directory} is used by another process; give this worker a --kv-dir of its own"
            disk_bytes, self._note = 0, f"no tier on disk: {used}"
        if self._note:
            log.warning("KV", note=self._note)
        return NodeSettings(
            worker=self._worker,
            socket_path=self.socket_path,
            directory=str(config.directory) if disk_bytes else "",
            host_bytes_max=config.memory_bytes,
            disk_bytes_max=disk_bytes,
            write_bytes_per_day_max=config.write_bytes_per_day or None,
            hot_s=config.hot_s,
            idle_s_max=config.idle_s,
            data_host=config.data_host,
            data_bytes_per_s_max=config.rate_bytes_per_s,
            exit_with_stdin=True,
        )

    def _spawn(self, settings: NodeSettings, stderr_fd: int) -> subprocess.Popen[bytes]:
        urls = {NATS_VARIABLE: " ".join(self._nats_urls), REDIS_VARIABLE: self._config.redis_url}
        return subprocess.Popen(  # noqa: S603 - our own module under our own interpreter
            [sys.executable, "-P", "-m", "kvcache.node.main", msgspec.json.encode(settings).decode()],
            env={**our_environment(), **urls},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr_fd,
            start_new_session=True,
        )

    def _buried(self) -> str:
        """Takes leave of a process that has exited; returns why it did."""
        popen, stderr = self._popen, self._stderr
        assert popen is not None and stderr is not None
        signal_group(popen.pid, signal.SIGKILL)  # what it left in its group, while its pid is nobody else's
        code = popen.wait()
        for stream in (popen.stdin, popen.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        self._popen = self._stderr = None
        self._state.forget(self._note_id)
        words = " | ".join(line for line in stderr.finish().splitlines()[-2:] if line.strip())
        self._locked = self._locked + 1 if code == Exit.LOCKED else 0
        if code == Exit.LOCKED:
            return f"{self._config.directory} is used by another process; give this worker a --kv-dir of its own"
        if code == Exit.LISTEN:
            return f"it cannot listen; is --kv-data-host {self._config.data_host} an address of this machine?"
        if code == Exit.MEMORY:
            return f"this host cannot give it {self._config.memory_bytes >> 20} MiB; lower --kv-memory"
        if code == Exit.SETTINGS:
            return f"it refuses its settings: {words}"
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"it {ended}" + (f": {words}" if code > 0 and words else "")

    async def stop(self) -> None:
        """Lets it write what is not on disk yet, within its bound, and ends it. :meth:`run` was cancelled before."""
        await self._node.close()
        popen = self._popen
        if popen is not None:
            signal_group(popen.pid, signal.SIGTERM)
            try:
                async with asyncio.timeout(self._flush_s + END_GRACE_S):
                    await _exited(popen.pid)
            except TimeoutError:
                log.warning("the KV node did not end and is killed")
                signal_group(popen.pid, signal.SIGKILL)
                await _exited(popen.pid)
            self._buried()
        with suppress(OSError):
            os.unlink(self.socket_path)
        if self._apart:
            with suppress(OSError):
                os.rmdir(os.path.dirname(self.socket_path))

    # ---- asking

    async def carry_out(self, command: EvictKv | MigrateKv) -> tuple[str, str]:
        """Asks the node within the command's bound; returns its failure, and what was done."""
        try:
            if isinstance(command, EvictKv):
                gone = await self._node.evict(command.kv_signature, command.ratio, timeout_s=command.timeout_s)
                host, disk = _bytes_text(gone.host_bytes), _bytes_text(gone.disk_bytes)
                return "", f"{gone.blocks} blocks, {host} from host memory, {disk} from disk"
            assert command.source_worker is not None, "the core has looked"
            came = await self._node.pull(command.kv_signature, command.source_worker, deadline_s=command.timeout_s)
            done = f"{came.blocks} blocks of {came.chains} chains, {_bytes_text(came.bytes)}"
            return (f"{came.failure}; {done} came before", "") if came.failure else ("", done)
        except (CarpoolError, OSError, TimeoutError) as error:
            return f"the KV node: {error or type(error).__name__}", ""

    def _tell(self, note: str) -> None:
        self._report(KvReport(running=False, note=note))

    def _told(self, stats: KvStats) -> KvReport:
        note = "; ".join(filter(None, (self._note, stats.disk_state if stats.disk_state not in self._note else "")))
        largest = sorted(stats.models, key=lambda one: (-(one.host_bytes + one.disk_bytes), one.kv_signature))
        host, disk = stats.host, stats.disk
        tiers = [KvTierReport(tier=KvTier.HOST, used_bytes=host.bytes_used, limit_bytes=host.bytes_max, blocks=host.blocks)]
        if disk.bytes_max:
            tiers.append(
                KvTierReport(tier=KvTier.DISK, used_bytes=disk.bytes_used, limit_bytes=disk.bytes_max, blocks=disk.blocks)
            )
        return KvReport(
            running=True,
            note=note,
            tiers=tuple(tiers),
            models=tuple(msgspec.convert(one, KvModelReport, from_attributes=True) for one in largest[:MODELS_TOLD_MAX]),
            hits=stats.hits,
            misses=stats.misses,
            corrupt=stats.corrupt,
            refused=stats.refused,
            write_bytes_left=stats.write_bytes_left,
            redis="" if stats.redis_state == "off" else stats.redis_state,
            address=self._address,
        )


def _socket_path(state_dir: Path, worker: WorkerId) -> str:
    """Below the state directory, or in a directory of our own in the temporary one where that path is too long."""
    for old in state_dir.glob("*.kv"):
        # Sockets of agents that were killed; one where somebody listens is another's, even if it takes nobody.
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            if probe.connect_ex(str(old)) == errno.ECONNREFUSED:
                old.unlink(missing_ok=True)
    for report in state_dir.glob("*.kv.*"):
        # Of replicas that were killed while they loaded: beside their node's socket, younger ones may still be read.
        with suppress(OSError):
            if time.time() - report.stat().st_mtime > REPORT_S_MAX:
                report.unlink()
    path = str((state_dir / f"{worker}.kv").absolute())
    if len(os.fsencode(path)) <= SOCKET_BYTES_MAX:
        return path
    return str(Path(tempfile.mkdtemp(prefix="carpool-")) / "kv")


async def _ready_line(popen: subprocess.Popen[bytes]) -> _Ready | None:
    """What the node says once it serves; None when it ended without a word."""
    reader = asyncio.StreamReader(limit=READY_BYTES_MAX)
    loop = asyncio.get_running_loop()
    assert popen.stdout is not None
    # A copy: the transport closes what it is given, and the pipe must stay open as long as the node writes to it.
    pipe = os.fdopen(os.dup(popen.stdout.fileno()), "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        line = await reader.readline()
        return msgspec.json.decode(line, type=_Ready) if line else None
    except (ValueError, msgspec.MsgspecError) as error:
        log.warning("the KV node's first line cannot be read", error=str(error))
        return None
    finally:
        transport.close()


async def _exited(pid: int) -> None:
    """Returns when a child has exited; it is left for its owner to reap."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    pidfd = os.pidfd_open(pid)
    try:
        loop.add_reader(pidfd, _resolve, done)
        await done
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _resolve(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _bytes_text(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1024:.0f} KiB" if count else "0 B"
