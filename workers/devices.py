"""Devices of a worker: CPU budgets and NVIDIA GPUs (WRK-5), and the ``--device`` flag that names them."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from profiles.sizes import parse_size
from subjects.errors import ConfigError
from subjects.ids import DeviceId
from subjects.messages import DeviceKind
from workers.core.agent_events import Device

CPU_MEMORY_SHARE = 0.5
"""The default budget of a CPU device, of the memory that is available at start: the rest is for the host and page cache."""
CPU_MEMORY_BYTES_MIN = 64 * 1024 * 1024

log = structlog.get_logger(__name__)


def parse_devices(flags: Sequence[str]) -> tuple[Device, ...]:
    """The devices of ``--device`` flags: ``cpu``, ``cpu:4GiB``, ``gpu`` (all of them) or ``gpu:N``.

    Without flags: all GPUs if there are any, else one CPU device.

    Raises:
        ConfigError: a flag is none of these, or names a device that is not here.
    """
    if not flags:
        return tuple(gpu_devices()) or tuple(cpu_devices())
    found: list[Device] = []
    cpus = 0
    gpus: list[Device] | None = None
    for flag in flags:
        where = f"--device {flag}"
        kind, _, argument = flag.partition(":")
        if kind == "cpu":
            memory_bytes = _parse_size(argument, where) if ":" in flag else None
            if memory_bytes is not None and memory_bytes < CPU_MEMORY_BYTES_MIN:
                raise ConfigError(f"{where}: give a CPU device at least {CPU_MEMORY_BYTES_MIN // 2**20}MiB")
            found.extend(cpu_devices(memory_bytes, index=cpus))
            cpus += 1
        elif kind == "gpu":
            gpus = gpu_devices() if gpus is None else gpus
            wanted = gpus if ":" not in flag else [gpu for gpu in gpus if gpu.device == f"gpu{argument}"]
            if not wanted:
                here = ", ".join(gpu.device.removeprefix("gpu") for gpu in gpus)
                raise ConfigError(f"{where}: {f'this machine has gpu {here}' if gpus else 'no NVIDIA GPU was found here'}")
            found.extend(wanted)
        else:
            raise ConfigError(f"{where}: use cpu, cpu:SIZE such as cpu:4GiB, gpu or gpu:N")
    names = [device.device for device in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"--device: {twice[0]} is named twice")
    return tuple(found)


def _parse_size(text: str, where: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def cpu_devices(memory_bytes: int | None = None, *, index: int = 0) -> list[Device]:
    """One CPU device. Its memory is a budget that replicas are charged to; by default a share of what is available now."""
    if memory_bytes is None:
        memory_bytes = max(CPU_MEMORY_BYTES_MIN, int(available_bytes() * CPU_MEMORY_SHARE))
    return [Device(device=DeviceId(f"cpu{index}"), kind=DeviceKind.CPU, name=_cpu_name(), memory_bytes=memory_bytes)]


def available_bytes() -> int:
    """Memory that can be used without swapping: the kernel's estimate, or what a container's limit leaves if less."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    with suppress(OSError, ValueError):  # no cgroup v2, or "max": no limit
        root = Path("/sys/fs/cgroup")
        limit = int((root / "memory.max").read_text())
        available = min(available, max(0, limit - int((root / "memory.current").read_text())))
    return available


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def gpu_devices() -> list[Device]:
    """The NVIDIA GPUs of this machine, in the driver's order; none when there is no driver.

    ``memory_bytes`` leaves out what the driver keeps for itself.
    """
    nvml = _nvml()
    if nvml is None:
        return []
    devices = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            devices.append(
                Device(
                    device=DeviceId(f"gpu{index}"),
                    kind=DeviceKind.GPU,
                    name=_text(nvml.nvmlDeviceGetName(handle)),
                    memory_bytes=int(memory.total) - int(memory.reserved),
                    uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                )
            )
    except nvml.NVMLError as error:
        log.warning("NVML failed while devices were listed; no GPU is used", error=str(error))
        return []
    return devices


def gpu_used_bytes(devices: Sequence[Device]) -> tuple[tuple[DeviceId, int], ...]:
    """Used memory of those of ``devices`` that are GPUs, as the driver tells; may take milliseconds."""
    gpus = [device for device in devices if device.kind is DeviceKind.GPU]
    nvml = _nvml() if gpus else None
    used = []
    if nvml is not None:
        for device in gpus:
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByUUID(device.uuid)
                memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
                used.append((device.device, int(memory.used)))
    return tuple(used)


_initialised: Any = None


def _nvml() -> Any:
    """The NVML binding, initialised once per process; None when it, its library or a driver is missing."""
    global _initialised
    if _initialised is not None:
        return _initialised
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.info("no NVIDIA GPU is used", reason=str(error))
        return None
    _initialised = pynvml
    return pynvml


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
