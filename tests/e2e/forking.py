"""Processes forked from a template, and the agent's end of their control sockets, for tests that stand in for an agent."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import socket
from collections.abc import Iterator
from typing import Any

from subjects.errors import EngineError
from workers.spec import ReplicaSpec
from workers.template import Template

PR_SET_CHILD_SUBREAPER = 36
ANSWER_S_MAX = 60


@contextlib.contextmanager
def subreaping() -> Iterator[None]:
    """What an agent does: orphans of its descendants become its children, so that it can reap them."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Forked:
    """A forked process and the agent's end of its control socket."""

    def __init__(self, pid: int, ours: socket.socket) -> None:
        self.pid = pid
        self._ours = ours
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, command: str) -> dict[str, Any]:
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._ours)
        reader, writer = self._streams
        writer.write(command.encode() + b"\n")
        answer: dict[str, Any] = json.loads(await asyncio.wait_for(reader.readline(), ANSWER_S_MAX))
        return answer

    async def exit(self, command: str = "") -> int:
        """Its exit code, after ``command`` or the end of its socket."""
        if command:
            with contextlib.suppress(json.JSONDecodeError):
                await self.ask(command)
        else:
            self._ours.shutdown(socket.SHUT_WR)
        return await self.wait()

    async def wait(self) -> int:
        """Its exit code, once it ended."""
        _, status = await asyncio.to_thread(os.waitpid, self.pid, 0)
        if self._streams is not None:
            self._streams[1].close()
        self._ours.close()
        return os.waitstatus_to_exitcode(status)


async def fork(template: Template, spec: ReplicaSpec) -> Forked:
    """A process of the template's entry.

    Raises:
        EngineError: the template is gone.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            return Forked(await template.fork(spec, theirs), ours)
        except EngineError:
            ours.close()
            raise
