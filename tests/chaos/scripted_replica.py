"""A replica process that follows a script, the ``script`` option of its model, instead of running an engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from subjects.codec import decode
from subjects.messages import ReplicaState
from workers.control import exit_with_agent, read_start
from workers.control import frame as framed
from workers.control_messages import (
    Drain,
    Drained,
    Failed,
    Ping,
    Pong,
    Progress,
    Ready,
    Stop,
    ToAgent,
    ToReplica,
)
from workers.engines.base import EngineInfo

INFO = EngineInfo(slots=2, kv_pages=8, block_size=16, max_context_len=256, gives_token_ids=True, continues=True)


def read(sock: socket.socket) -> ToReplica:
    """The next message; ends the process at the end of the stream."""

    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = sock.recv(count - len(data))
            if not part:
                sys.exit(70)
            data += part
        return data

    return decode(exactly(int.from_bytes(exactly(4), "big")), ToReplica)  # type: ignore[arg-type]


def main() -> None:
    """Plays the script."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    spec = read_start(sock, timeout_s=10)
    sock.settimeout(None)
    script = spec.record.engine_options["script"]
    if script != "deaf":
        exit_with_agent(sock)

    def say(message: ToAgent) -> None:
        sock.sendall(framed(message))

    if script == "exit":
        print("loading weights\nRuntimeError: the weights are broken", file=sys.stderr)
        sys.exit(3)
    if script == "fail":
        say(Failed(detail="not a model"))
        sys.exit(1)
    if script == "hang":
        print("waiting for a lock", file=sys.stderr, flush=True)
        time.sleep(1000)
    if script == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if script == "parent":
        subprocess.Popen(["sleep", "1000"])
        # More than a pipe holds: an agent that does not read it stops this process.
        sys.stderr.write("noise " * 100_000)
    say(Progress(state=ReplicaState.WARMING))
    say(Ready(info=INFO))
    if script == "deaf":
        time.sleep(1000)
    while True:
        match read(sock):
            case Ping(number=number):
                say(Pong(number=number))
            case Drain() if script != "stubborn":
                say(Drained())
            case Stop() if script != "stubborn":
                os._exit(0)
            case _:
                pass


if __name__ == "__main__":
    main()
