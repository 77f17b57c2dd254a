"""The template: a process that has imported vLLM once, and forks replicas from that state in milliseconds.

An exec'd replica pays 9 to 17 s for the import; a forked one does not. Forking is safe only while nothing has started: the
template runs one thread, no event loop, no bus connection and no torch computation, and checks its threads before each fork.
It is a fresh interpreter (never a fork of its agent), talks over one plain socket, and ends when that socket does.

A replica is forked twice, so that it is nobody's child here: its agent, a subreaper, adopts and reaps it. The template's
death therefore kills no replica; another one is started for the next load. GPU replicas are never forked.

This module is imported by the agent (:class:`Template`) and run by the child (``python -m workers.template FD``).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

import msgspec
import structlog

from subjects.codec import decode, encode
from subjects.errors import DecodeError, EngineError
from workers.spec import ReplicaSpec

READY_TIMEOUT_S = 180.0
"""Importing vLLM from a cold disk on a busy machine."""
FORK_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
MESSAGE_BYTES_MAX = 128 * 1024
"""One message of the sequenced-packet socket; a spec is a few KiB."""

_PR_SET_PDEATHSIG = 1

REPLICA_ENTRY = "workers.replica:run_replica"

PRELOADED = (
    "tokenizers",
    "transformers.models.llama.configuration_llama",
    "transformers.models.qwen2.configuration_qwen2",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.structured_output.backend_xgrammar",
    "vllm.v1.structured_output.backend_guidance",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "workers.engines.vllm_openai",
    "workers.engines.vllm_cpu",
)
"""What every vLLM replica imports. Models of other families import their own module after the fork."""


class Imported(msgspec.Struct, frozen=True, kw_only=True, tag="imported"):
    """The template is ready to fork; ``failure`` says why it never will be."""

    failure: str = ""


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag="forked"):
    """The answer to a spec: the replica's process id, or why there is none."""

    pid: int = 0
    failure: str = ""


log = structlog.get_logger(__name__)

FromTemplate = Imported | Forked
Run = Callable[[ReplicaSpec, socket.socket], int]


class Template:
    """The agent's handle. One per agent; not shared between event loops. A template that died is started again for the next
    fork.

    ``entry`` is what a forked process calls: ``module:function`` taking the spec and the control socket, returning the exit
    code.
    """

    def __init__(self, entry: str = REPLICA_ENTRY, started: Callable[[int], None] = lambda pid: None) -> None:
        """``started`` hears the process id of each template that got ready."""
        self._entry = entry
        self._started = started
        self._was_ready = False
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = asyncio.Lock()

    @property
    def alive(self) -> bool:
        """Whether a fork may be asked for."""
        return self._socket is not None and self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The template's process id while it runs."""
        return self._process.pid if self._process is not None and self.alive else None

    @property
    def died(self) -> bool:
        """Whether it had got ready and does not run any more, and nobody starts it again at this moment."""
        return self._was_ready and not self.alive and not self._lock.locked()

    async def start(self) -> None:
        """Starts the process and waits until it has imported vLLM (9 to 17 s); does nothing while one is alive.

        Raises:
            EngineError: it failed or did not get ready in ``READY_TIMEOUT_S``.
        """
        async with self._lock:
            await self._start()

    async def fork(self, spec: ReplicaSpec, control: socket.socket) -> int:
        """Forks a replica that gets ``spec`` and the other end's ``control`` socket; returns its process id.

        The caller still owns ``control`` and closes its copy. The replica is the leader of a session of its own.

        Raises:
            EngineError: there is no template, or it refused.
        """
        message = encode(spec)
        if len(message) > MESSAGE_BYTES_MAX:
            raise EngineError(
                f"{spec.record.name}: its record has {len(message)} bytes; at most {MESSAGE_BYTES_MAX} can be sent"
            )
        async with self._lock:
            await self._start()
            try:
                return await self._fork(message, control)
            except EngineError as error:
                if self.alive:
                    raise
                log.warning("the template died and is started again", error=str(error))
            await self._start()
            return await self._fork(message, control)

    async def _start(self) -> None:
        if self.alive:
            return
        await self._close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # A session of its own: Ctrl-C is for the agent, which ends its children in order.
            self._process = subprocess.Popen(  # noqa: ASYNC220, S603 (our own module; returns after exec)
                [sys.executable, "-m", "workers.template", str(theirs.fileno()), self._entry],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.setblocking(False)
        self._socket = ours
        reply = await self._answer(READY_TIMEOUT_S)
        if not isinstance(reply, Imported) or reply.failure:
            await self._close()
            reason = reply.failure if isinstance(reply, Imported) else "it answered out of turn"
            raise EngineError(f"the vLLM template did not start: {reason}")
        self._was_ready = True
        self._started(self._process.pid)

    async def _fork(self, message: bytes, control: socket.socket) -> int:
        assert self._socket is not None
        try:
            socket.send_fds(self._socket, [message], [control.fileno()])
        except OSError as error:
            await self._close()
            raise EngineError(f"the vLLM template died: {error.strerror}") from None
        reply = await self._answer(FORK_TIMEOUT_S)
        if not isinstance(reply, Forked) or reply.failure:
            raise EngineError(f"the vLLM template could not fork: {getattr(reply, 'failure', 'it answered out of turn')}")
        return reply.pid

    async def _answer(self, timeout_s: float) -> FromTemplate:
        try:
            return await self._receive(timeout_s)
        except BaseException:
            # An answer that comes after its question was given up would be taken for the next one's.
            await self._close()
            raise

    async def stop(self) -> None:
        """Ends the template, not its replicas; calling again does nothing."""
        async with self._lock:
            self._was_ready = False
            await self._close()

    async def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is None:
            return
        process, self._process = self._process, None
        # It ends at the end of its socket; during the import it would only look there after it.
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def _receive(self, timeout_s: float) -> FromTemplate:
        sock = self._socket
        if sock is None:
            raise EngineError("the vLLM template is not running")
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(sock.fileno(), _wake, readable)
        try:
            await asyncio.wait_for(readable, timeout_s)
            payload = sock.recv(MESSAGE_BYTES_MAX)
        except TimeoutError:
            raise EngineError(f"the vLLM template did not answer within {timeout_s:.0f} s") from None
        except OSError as error:
            raise EngineError(f"the vLLM template died: {error.strerror}") from None
        finally:
            loop.remove_reader(sock.fileno())
        if not payload:
            raise EngineError("the vLLM template died")
        try:
            return decode(payload, FromTemplate)  # type: ignore[arg-type] # a union, which mypy does not take for a type
        except DecodeError as error:
            raise EngineError(f"the vLLM template sent something else: {error}") from None


def _wake(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


# ---------------------------------------------------------------------------------------------------- in the child process


def main(fd: int, entry: str) -> None:
    """The template process: import, then fork on request until the agent's end of the socket is gone."""
    with socket.socket(fileno=fd) as agent:
        os.set_inheritable(agent.fileno(), False)
        # During the import nobody reads the socket, so the kernel has to tell of the agent's death; a fork clears this.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if _hung_up(agent):
            return
        try:
            run = _import_everything(entry)
            check_forkable()
        except Exception as error:
            with contextlib.suppress(OSError):
                agent.send(encode(Imported(failure=f"{type(error).__name__}: {error}"[:1000])))
            return
        # What is alive now lives as long as the process; the collector of a replica need not touch, and so copy, its pages.
        gc.collect()
        gc.freeze()
        try:
            agent.send(encode(Imported()))
            while _serve(agent, run):
                pass
        except OSError:
            # The agent is gone.
            return


def _hung_up(agent: socket.socket) -> bool:
    poller = select.poll()
    poller.register(agent, select.POLLHUP)
    return any(events & select.POLLHUP for _, events in poller.poll(0))


def check_forkable() -> None:
    """Raises ``EngineError`` if this process has anything that a fork would tear."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1 or threading.active_count() != 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise EngineError(f"{threads} threads run in the template ({names}); a fork would not be safe")


def _import_everything(entry: str) -> Run:
    import importlib

    from workers.engines.vllm_process import prepare_process

    prepare_process(on_cpu=True)
    # Its monitor thread would start with the first progress bar.
    importlib.import_module("tqdm").tqdm.monitor_interval = 0
    module, _, function = entry.partition(":")
    run: Run = getattr(importlib.import_module(module), function)
    for name in PRELOADED:
        importlib.import_module(name)
    return run


def _serve(agent: socket.socket, run: Run) -> bool:
    """Answers one request; False at the end of the socket."""
    payload, fds, _, _ = socket.recv_fds(agent, MESSAGE_BYTES_MAX, 1)
    if not payload:
        return False
    try:
        spec = decode(payload, ReplicaSpec)
        if len(fds) != 1:
            raise EngineError("a spec must come with one control socket")
        check_forkable()
        pid = _fork_twice(agent, run, spec, fds[0])
        reply = Forked(pid=pid)
    except (DecodeError, EngineError, OSError) as error:
        reply = Forked(failure=str(error))
    finally:
        # The end of a control socket must mean the end of its replica.
        for fd in fds:
            os.close(fd)
    agent.send(encode(reply))
    return True


def _fork_twice(agent: socket.socket, run: Run, spec: ReplicaSpec, control: int) -> int:
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            os.close(reading)
            child = os.fork()
            if child == 0:
                os.close(writing)
                _become_replica(agent, run, spec, control)
            os.write(writing, child.to_bytes(8, "big"))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read(8)
    os.waitpid(middle, 0)
    if len(answer) != 8:
        raise EngineError("no process could be forked (out of memory or process limit)")
    return int.from_bytes(answer, "big")


def _become_replica(agent: socket.socket, run: Run, spec: ReplicaSpec, control: int) -> NoReturn:
    code = 1
    try:
        agent.close()
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ["OMP_NUM_THREADS"] = str(spec.threads)
        _reseed()
        code = run(spec, socket.socket(fileno=control))
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _reseed() -> None:
    # Replicas of one template would otherwise draw the same numbers.
    import random

    import numpy
    import torch

    seed = int.from_bytes(os.urandom(4), "big")
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
