"""Runs a program that dies with its parent: ``python -m ops.tether PARENT_PID -- PROGRAM ARG...``

The kernel sends SIGKILL when the thread that forked us ends, and keeps that promise across ``exec``. The supervisor forks
from its main thread, so its death, kill -9 included, takes the embedded servers with it and frees their ports.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ties this process to the parent named by pid, then becomes the program."""
    if len(sys.argv) < 4 or sys.argv[2] != "--":
        sys.exit("usage: python -m ops.tether PARENT_PID -- PROGRAM ARG...")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"tether: prctl failed with errno {ctypes.get_errno()}")
    # The parent may have died before the promise was made.
    if os.getppid() != int(sys.argv[1]):
        sys.exit("tether: the parent is gone")
    # A terminal's Ctrl-C goes to the whole foreground group; the supervisor alone decides the order of the end.
    os.setsid()
    os.execv(sys.argv[3], sys.argv[3:])  # noqa: S606 - the argument list comes from the supervisor


if __name__ == "__main__":
    main()
