"""Runs an agent as its own process, as the command line does; with ``--scripted`` its replicas follow a script."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from pathlib import Path

import workers.agent
import workers.kv_keeper
from subjects.messages import EngineType
from workers.agent import AgentConfig, run_agent
from workers.devices import cpu_devices
from workers.kv_config import KvConfig


def exec_scripted(control_fd: int, stderr_fd: int) -> subprocess.Popen[bytes]:
    """In the place of ``exec_replica``."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.scripted_replica", str(control_fd)],
        stdout=stderr_fd,
        stderr=stderr_fd,
        pass_fds=(control_fd,),
        start_new_session=True,
    )


def main() -> None:
    """Runs the agent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nats", required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--memory", type=int, default=100)
    parser.add_argument("--drain-s", type=float, default=5.0)
    parser.add_argument("--scripted", action="store_true")
    parser.add_argument("--name", default="test")
    parser.add_argument("--kv-dir", type=Path)
    parser.add_argument("--kv-disk", type=int, default=256 << 20)
    parser.add_argument("--kv-locked-tries", type=int, default=workers.kv_keeper.LOCKED_TRIES_MAX)
    parser.add_argument("--kv-frozen-s", type=float, default=workers.kv_keeper.FROZEN_S)
    options = parser.parse_args()
    if options.scripted:
        workers.agent.exec_replica = exec_scripted  # type: ignore[attr-defined]
    workers.kv_keeper.LOCKED_TRIES_MAX = options.kv_locked_tries
    workers.kv_keeper.FROZEN_S = options.kv_frozen_s
    kv = None
    if options.kv_dir is not None:
        kv = KvConfig(directory=options.kv_dir, memory_bytes=32 << 20, disk_bytes=options.kv_disk)
    config = AgentConfig(
        name=options.name,
        nats_urls=(options.nats,),
        state_dir=options.state_dir,
        devices=tuple(cpu_devices(options.memory)),
        engines=(EngineType.SIMULATED,),
        drain_s=options.drain_s,
        kv=kv,
    )
    sys.exit(asyncio.run(run_agent(config)))


if __name__ == "__main__":
    main()
