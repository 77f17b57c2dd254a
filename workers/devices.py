"""Devices of a worker: CPU budgets and NVIDIA GPUs (WRK-5), and the ``--device`` flag that names them."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import structlog

from profiles.hardware.devices import KINDS
from profiles.sizes import parse_size
from subjects.errors import ConfigError
from subjects.ids import DeviceId
from subjects.messages import DeviceKind
from workers.core.agent_events import Device

CPU_MEMORY_SHARE = 0.5
"""The default budget of a CPU device, of the memory that is available at start: the rest is for the host and page cache."""
CPU_MEMORY_BYTES_MIN = 64 * 1024 * 1024
CPU_TYPE = "cpu"
MEMORY_TOLERANCE = 0.15
"""Drivers tell binary and usable sizes, makers decimal ones: this much apart is still the same card."""

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
    return [
        Device(
            device=DeviceId(f"cpu{index}"),
            kind=DeviceKind.CPU,
            name=_cpu_name(),
            memory_bytes=memory_bytes,
            device_type=CPU_TYPE,
        )
    ]


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

    ``memory_bytes`` leaves out what the driver keeps for itself. GPUs of one type that one
    replica could span share a ``link``.
    """
    nvml = _nvml()
    if nvml is None:
        return []
    devices = []
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        memories = [nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2) for handle in handles]
        gpu_names = [_text(nvml.nvmlDeviceGetName(handle)) for handle in handles]
        types = [gpu_type(name, int(memory.total)) for name, memory in zip(gpu_names, memories, strict=True)]
        links = link_groups(types, lambda one, other: _reaches(nvml, handles[one], handles[other]))
        for index, (handle, memory) in enumerate(zip(handles, memories, strict=True)):
            devices.append(
                Device(
                    device=DeviceId(f"gpu{index}"),
                    kind=DeviceKind.GPU,
                    name=gpu_names[index],
                    memory_bytes=int(memory.total) - int(memory.reserved),
                    uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                    device_type=types[index],
                    link=links[index],
                )
            )
    except nvml.NVMLError as error:
        log.warning("NVML failed while devices were listed; no GPU is used", error=str(error))
        return []
    return devices


def gpu_type(name: str, memory_bytes: int) -> str:
    """A GPU's kind from what its driver calls it: ``NVIDIA H100 80GB HBM3`` is a ``h100-80gb``.

    Of the kinds that ``profiles.hardware`` knows it is the one of that model with the nearest memory; an unknown one is
    named in the same way, by its memory in GB.
    """
    words = re.split(r"[^a-z0-9]+", name.lower().removeprefix("nvidia"))
    of_model = [kind for kind in KINDS.values() if kind.name.split("-")[0] in words]
    near = [kind for kind in of_model if abs(kind.memory_bytes - memory_bytes) <= MEMORY_TOLERANCE * kind.memory_bytes]
    if near:
        return min(near, key=lambda kind: (abs(kind.memory_bytes - memory_bytes), kind.name)).name
    model = of_model[0].name.split("-")[0] if of_model else "-".join(word for word in words if word) or "gpu"
    return f"{model[:40]}-{round(memory_bytes / 10**9)}gb"


class Reach(Enum):
    """How one GPU reaches another's memory, best first."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    HOST = "host"
    """Through the host's memory: slow, and still what tensor parallelism on small cards runs on."""


def link_groups(types: Sequence[str], reach: Callable[[int, int], Reach]) -> list[str]:
    """The link of each GPU: equal for those of one type that all reach each other at least that well.

    NVLink first, so that no worse link takes a partner away; one that has no partner has no link.
    """
    links = [""] * len(types)
    order = list(Reach)
    for rank, how in enumerate(order):
        left = [index for index, link in enumerate(links) if not link]
        groups: list[list[int]] = []
        for index in left:
            for members in groups:
                near = all(order.index(reach(member, index)) <= rank for member in members)
                if types[members[0]] == types[index] and near:
                    members.append(index)
                    break
            else:
                groups.append([index])
        for members in groups:
            for member in members if len(members) > 1 else ():
                links[member] = f"{how.value}-{members[0]}"
    return links


def _reaches(nvml: Any, one: Any, other: Any) -> Reach:
    for how, index in ((Reach.NVLINK, nvml.NVML_P2P_CAPS_INDEX_NVLINK), (Reach.PCIE, nvml.NVML_P2P_CAPS_INDEX_READ)):
        with suppress(nvml.NVMLError):
            if nvml.nvmlDeviceGetP2PStatus(one, other, index) == nvml.NVML_P2P_STATUS_OK:
                return how
    return Reach.HOST


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
