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


NOTHING = Use(0.0, 0.0)
_APART = {"workers.replica": "replica"}
"""A module of ours that counts as a part of its own wherever it runs."""


def use_by_part(pids: Mapping[str, int]) -> dict[str, Use]:
    """Of each part of a system: its root process and all that descends from it and runs now."""
    found = dict.fromkeys(pids, NOTHING)
    for part, pid in pids.items():
        try:
            root = psutil.Process(pid)
            tree = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for process in tree:
            try:
                with process.oneshot():
                    words, rss, times = process.cmdline(), process.memory_info().rss, process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            own = next((name for module, name in _APART.items() if module in words), part)
            sofar = found.get(own, NOTHING)
            found[own] = Use(sofar.rss_mb + rss / 1e6, sofar.cpu_s + times.user + times.system)
    return found


async def bus_messages(monitor_port: int) -> int:
    """Messages that the bus took in and gave out since its start, by its own counters."""
    import httpx

    async with httpx.AsyncClient(trust_env=False) as client:
        counters = (await client.get(f"http://127.0.0.1:{monitor_port}/varz")).json()
    return int(counters["in_msgs"]) + int(counters["out_msgs"])
