"""What a run reads from counters: memory and CPU of trees of processes from the kernel, messages from the bus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Use:
    """``rss_mb``: resident memory in 10^6 bytes, shared pages counted in each process; ``cpu_s``: since their start."""

    rss_mb: float
    cpu_s: float


def use_of(pid: int) -> Use:
    """Of a process and all its descendants that run now; one that is gone counts nothing."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return Use(0.0, 0.0)
    rss, cpu_s = 0, 0.0
    for process in tree:
        try:
            with process.oneshot():
                rss += process.memory_info().rss
                times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        cpu_s += times.user + times.system
    return Use(rss / 1e6, cpu_s)


def use_by_part(pids: Mapping[str, int]) -> dict[str, Use]:
    """Of each part of a system."""
    return {part: use_of(pid) for part, pid in pids.items()}


async def bus_messages(monitor_port: int) -> int:
    """Messages that the bus took in and gave out since its start, by its own counters."""
    import httpx

    async with httpx.AsyncClient(trust_env=False) as client:
        counters = (await client.get(f"http://127.0.0.1:{monitor_port}/varz")).json()
    return int(counters["in_msgs"]) + int(counters["out_msgs"])
