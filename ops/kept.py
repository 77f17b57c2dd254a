"""A child process that is kept running: started again when it ends, within a bound, and tied to our own life."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

REFUSED = 2
"""Exit code of a process that was given something wrong, such as a device that is not there."""
RESTARTS_MAX = 10
RESTARTS_WINDOW_S = 60.0
RESTART_DELAY_S_MAX = 5.0
KILLED_S_MAX = 5.0
"""After SIGKILL: only a process that hangs in the kernel lives longer, and nothing here could end that."""
LOG_BYTES_MAX = 16 * 1024 * 1024
"""A log starts afresh when it is found bigger than this at a start of its process."""


class Kept:
    """One child process. ``log`` takes what it prints; without one it prints where we do."""

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str], *, log: Path | None = None) -> None:
        self.name = name
        self.argv = list(argv)
        self.environment = dict(environment)
        self.log = log
        self.process: asyncio.subprocess.Process | None = None
        self.restarts: collections.deque[float] = collections.deque(maxlen=RESTARTS_MAX)
        self.stopping = False
        self.refused = False
        """It said that it was given something wrong: to start it again would change nothing."""
        self._changing = asyncio.Lock()
        """Held while the process is started or stopped, so that neither happens amid the other."""
        self._log_from = log.stat().st_size if log is not None and log.exists() else 0

    async def start(self) -> None:
        """Starts the process; does nothing after :meth:`stop`.

        Raises:
            OSError: it cannot be started.
        """
        async with self._changing:
            if not self.stopping:
                await self._spawn()

    async def _spawn(self) -> None:
        if self.log is not None and self.log.exists() and self.log.stat().st_size > LOG_BYTES_MAX:
            self.log.unlink()
            self._log_from = 0
        with self._open_log() as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "ops.tether",
                str(os.getpid()),
                "--",
                *self.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
            )

    async def keep_running(
        self,
        *,
        on_restart: Callable[[int], None],
        on_broken: Callable[[str], None],
        may_refuse: Callable[[], bool],
    ) -> None:
        """Starts it again whenever it ends, until :meth:`stop`.

        Args:
            on_restart: gets the exit code before each new start.
            on_broken: gets the reason when it is given up.
            may_refuse: whether the exit code ``REFUSED`` is final now.
        """
        while True:
            assert self.process is not None
            code = await self.process.wait()
            if self._is_stopping():
                return
            if code == REFUSED and may_refuse():
                self.refused = True
                return
            now_s = time.monotonic()
            if len(self.restarts) == RESTARTS_MAX and now_s - self.restarts[0] < RESTARTS_WINDOW_S:
                on_broken(f"{self.name} ended {RESTARTS_MAX} times in a minute (last code {code})")
                return
            recent = sum(1 for at_s in self.restarts if now_s - at_s < RESTARTS_WINDOW_S)
            self.restarts.append(now_s)
            on_restart(code)
            await asyncio.sleep(min(RESTART_DELAY_S_MAX, 0.05 * 2**recent))
            if self._is_stopping():
                return
            try:
                await self.start()
            except OSError as error:
                on_broken(f"{self.name} cannot be started again: {error.strerror}")
                return

    def _is_stopping(self) -> bool:
        return self.stopping

    def _open_log(self) -> contextlib.AbstractContextManager[IO[bytes] | None]:
        return contextlib.nullcontext() if self.log is None else self.log.open("ab")

    def log_tail(self, lines_max: int = 12) -> str:
        """Its last words since we keep it."""
        if self.log is None:
            return ""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(max(self._log_from, self.log.stat().st_size - 8192))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines_max:])
        return ""

    async def stop(self, limit_s: float) -> None:
        """Ends it by SIGTERM, and by SIGKILL after ``limit_s``; one that is just being started too. None comes after."""
        self.stopping = True
        try:
            async with asyncio.timeout(limit_s), self._changing:
                if self.process is not None and self.process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        self.process.terminate()
                    await self.process.wait()
        except TimeoutError:
            if self.process is None:
                return
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), KILLED_S_MAX)
