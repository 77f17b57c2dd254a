"""What a replica that was forked from the template does first: it takes an output of its own, then it is a replica.

A forked process inherits the template's stderr, in which nobody could tell one replica's last words from another's. Its
agent therefore sends a pipe along, as the first byte on the control connection.
"""

from __future__ import annotations

import os
import socket

from workers.replica import run_replica
from workers.spec import ReplicaSpec


def run_forked(spec: ReplicaSpec, control: socket.socket) -> int:
    """Runs the replica with stdout and stderr on the pipe that its agent sent; returns its exit code."""
    _, fds, _, _ = socket.recv_fds(control, 1, 1)
    if not fds:
        return 1  # the agent is gone
    for output in (1, 2):
        os.dup2(fds[0], output)
    os.close(fds[0])
    return run_replica(spec, control)
