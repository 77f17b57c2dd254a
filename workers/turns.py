"""Engines that share a device step one after the other, the most urgent first (ops/decisions/0008).

Each engine asks for a turn before a step and gives it back after it. One that prefills asks at once; one that only decodes
is in no hurry until its *pace* has passed since its last step, and lets neighbours go first as long. One that prefilled will
most likely ask again in a moment: for a short *rest* after its step nobody goes early, else those in no hurry would fit a
step between any two of its own. No process hands turns out: a turn is a file lock per device, which the kernel takes back
from a process that dies, beside a small shared table of who asks since when. Nothing here can stop a replica: whoever waits
too long steps without a turn.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from pathlib import Path

from subjects.errors import ConfigError

SLOTS_MAX = 64
"""Engines that can share one device."""
WAIT_S_MAX = 0.25
"""How long past its time an engine waits for a turn; a neighbour that hangs costs no more per step."""
REGISTER_S_MAX = 5.0
"""How long a new engine waits for others that enter themselves into the table."""
REST_S = 0.002
"""How long after a step that prefilled nobody goes early. Between two steps vLLM takes in requests and sends out tokens."""
POLL_S = 0.0003
_SLOT_BYTES = 16
"""A slot: process id (0: free), and a time by the monotonic clock of the machine. Above 0 it asks for a step due then, below
0 it rests until the negative of it, at 0 it does neither."""


class _Device:
    """The lock and the table of one device."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if os.fstat(self._file).st_size < SLOTS_MAX * _SLOT_BYTES:
            os.ftruncate(self._file, SLOTS_MAX * _SLOT_BYTES)
        self._table = mmap.mmap(self._file, SLOTS_MAX * _SLOT_BYTES)
        # Eight bytes at once, aligned: struct.pack_into would write zeros first, and others would see them.
        self._pids = memoryview(self._table).cast("q")
        self._times_s = memoryview(self._table).cast("d")
        # A lock of its own: the one for steps may be held by a process that was stopped.
        registry = os.open(path.with_suffix(".register"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock_within(registry, path, REGISTER_S_MAX)
            self._slot = self._free_slot(path)
            self._say(0.0)
            self._pids[2 * self._slot] = os.getpid()
        finally:
            os.close(registry)

    def _free_slot(self, path: Path) -> int:
        for slot in range(SLOTS_MAX):
            pid = self._pids[2 * slot]
            if pid == 0 or not _alive(pid):
                return slot
        raise ConfigError(f"{path}: more than {SLOTS_MAX} engines share this device")

    def ask(self, due_s: float) -> None:
        self._say(due_s)

    def ask_no_more(self) -> None:
        self._say(0.0)

    def rest(self, until_s: float) -> None:
        self._say(-until_s)

    def _say(self, time_s: float) -> None:
        self._times_s[2 * self._slot + 1] = time_s

    def somebody_before(self, due_s: float) -> bool:
        """Whether another engine asks for a step that is due earlier, or rests while ours is not due."""
        now_s = time.monotonic()
        for slot in range(SLOTS_MAX):
            if slot == self._slot:
                continue
            pid, theirs_s = self._pids[2 * slot], self._times_s[2 * slot + 1]
            before = theirs_s < due_s if theirs_s > 0.0 else now_s < min(-theirs_s, due_s)
            if pid and before and _alive(pid):
                return True
        return False

    def lock(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._say(0.0)
        self._pids[2 * self._slot] = 0
        self._pids.release()
        self._times_s.release()
        self._table.close()
        os.close(self._file)


class DeviceTurns:
    """One engine's side. Not for several threads at once.

    Raises:
        ConfigError: too many engines share a device, or another one hangs while it enters itself.
    """

    def __init__(
        self,
        directory: Path,
        devices: tuple[str, ...],
        pace_s: float,
        *,
        wait_s_max: float = WAIT_S_MAX,
        rest_s: float = REST_S,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # Always in the same order, so that two engines that span devices never wait for each other.
        self._devices = [_Device(directory / f"{device}.turns") for device in sorted(devices)]
        self._pace_s = pace_s
        self._wait_s_max = wait_s_max
        self._rest_s = rest_s
        self._began_s = 0.0
        self._urgent = False
        self._held = False
        self.overruns = 0
        """Steps that were made without a turn, since waiting took too long."""

    def take(self, *, urgent: bool) -> None:
        """Waits for the turn of a step; ``urgent`` when a prompt is prefilled in it."""
        self._urgent = urgent
        now_s = time.monotonic()
        due_s = now_s if urgent else self._began_s + self._pace_s
        last_s = max(now_s, due_s) + self._wait_s_max
        for device in self._devices:
            device.ask(due_s)
        # One that is not due yet may go early where nobody else wants to.
        while self._somebody_before(due_s) or not self._lock(due_s):
            now_s = time.monotonic()
            if now_s >= last_s:
                self.overruns += 1
                break
            time.sleep(POLL_S)
        for device in self._devices:
            device.ask_no_more()
        self._began_s = time.monotonic()

    def give(self) -> None:
        """The step is over, or there was none."""
        if self._held:
            self._held = False
            until_s = time.monotonic() + self._rest_s
            for device in self._devices:
                # Before the lock is free, so that nobody slips in.
                if self._urgent:
                    device.rest(until_s)
                device.unlock()

    def close(self) -> None:
        """Leaves the tables."""
        self.give()
        for device in self._devices:
            device.close()

    def _somebody_before(self, due_s: float) -> bool:
        return any(device.somebody_before(due_s) for device in self._devices)

    def _lock(self, due_s: float) -> bool:
        locked: list[_Device] = []
        for device in self._devices:
            if not device.lock():
                break
            locked.append(device)
        # Again, now that nobody else can begin: somebody may have asked between the last look and the lock.
        self._held = len(locked) == len(self._devices) and not self._somebody_before(due_s)
        if not self._held:
            for device in locked:
                device.unlock()
        return self._held


def _lock_within(file: int, path: Path, wait_s_max: float) -> None:
    last_s = time.monotonic() + wait_s_max
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= last_s:
                raise ConfigError(f"{path}: another process holds its register for {wait_s_max:g} s; end it") from None
            time.sleep(POLL_S)
        else:
            return


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
