"""Devices and the flag that names them; NVML is played by a small C library, so this runs without a GPU (WRK-5)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from subjects.errors import ConfigError
from subjects.messages import DeviceKind
from workers.devices import Reach, available_bytes, cpu_devices, gpu_type, link_groups, parse_devices

FAKE_NVML = r"""
#include <string.h>
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } memory_v2;
static int devices[2] = {0, 1};
int nvmlInitWithFlags(unsigned int flags) { return FAIL ? 9 : 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "made to fail"; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = &devices[index]; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { *device = &devices[uuid[4] - '0']; return 0; }
int nvmlDeviceGetName(void *device, char *name, unsigned int length) { strncpy(name, "Pretend GPU", length); return 0; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int length) {
    strncpy(uuid, *(int *)device ? "GPU-1" : "GPU-0", length);
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2 *memory) {
    memory->total = 80000;
    memory->reserved = 1000;
    memory->used = 500 + *(int *)device;
    return 0;
}
"""
PROBE = """
from workers.devices import gpu_devices, gpu_used_bytes, parse_devices
found = gpu_devices()
print([(d.device, d.kind.value, d.name, d.memory_bytes, d.uuid) for d in found], gpu_used_bytes(found))
print([(d.device_type, d.link) for d in found])
print([d.device for d in parse_devices(())], [d.device for d in parse_devices(("gpu:1", "cpu:1GiB"))])
"""


def probe(directory: Path, *, fail: int) -> subprocess.CompletedProcess[str]:
    """Runs ``PROBE`` with the played library in front of any real one."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    source = directory / "nvml.c"
    source.write_text(FAKE_NVML)
    library = directory / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", f"-DFAIL={fail}", "-o", str(library), str(source)], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(directory), "PYTHONPATH": os.getcwd()}
    return subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment)


def test_gpus_are_what_nvml_says(tmp_path: Path) -> None:
    """Names, ids, memory without the driver's share; all of them by default, one by its number."""
    done = probe(tmp_path, fail=0)
    assert done.stdout.splitlines() == [
        (
            "[('gpu0', 'gpu', 'Pretend GPU', 79000, 'GPU-0'), ('gpu1', 'gpu', 'Pretend GPU', 79000, 'GPU-1')] "
            "(('gpu0', 500), ('gpu1', 501))"
        ),
        "[('pretend-gpu-0gb', 'host-0'), ('pretend-gpu-0gb', 'host-0')]",
        "['gpu0', 'gpu1'] ['gpu1', 'cpu0']",
    ], done.stderr


@pytest.mark.parametrize(
    ("name", "memory_bytes", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 81559 << 20, "h100-80gb"),
        ("NVIDIA A100-SXM4-80GB", 81920 << 20, "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 40960 << 20, "a100-43gb"),
        ("NVIDIA H200", 143771 << 20, "h200-141gb"),
        ("NVIDIA L4", 23034 << 20, "l4-24gb"),
        ("NVIDIA L40S", 46068 << 20, "l40s-48gb"),
        ("NVIDIA A10G", 23028 << 20, "a10g-24gb"),
        ("NVIDIA GeForce RTX 4090", 24564 << 20, "geforce-rtx-4090-26gb"),
        ("", 16 << 30, "gpu-17gb"),
    ],
)
def test_a_gpu_has_a_kind(name: str, memory_bytes: int, expected: str) -> None:
    """The key of its costs: a known one where model and memory fit, else one made in the same way (SCH-3)."""
    assert gpu_type(name, memory_bytes) == expected


@pytest.mark.parametrize(
    ("types", "nvlinks", "links"),
    [
        ("h", "", ["-"]),
        ("hh", "01", ["nvlink-0", "nvlink-0"]),
        ("hhhh", "02 13", ["nvlink-0", "nvlink-1", "nvlink-0", "nvlink-1"]),
        ("hhaa", "", ["host-0", "host-0", "host-2", "host-2"]),
        ("hhh", "12", ["-", "nvlink-1", "nvlink-1"]),
        ("hah", "01", ["host-0", "-", "host-0"]),
    ],
)
def test_gpus_that_one_replica_can_span_share_a_link(types: str, nvlinks: str, links: list[str]) -> None:
    """The best link first, one type only, nobody twice (SCH-1)."""

    def reach(one: int, other: int) -> Reach:
        return Reach.NVLINK if f"{one}{other}" in nvlinks.split() else Reach.HOST

    assert [link or "-" for link in link_groups(types, reach)] == links


def test_a_driver_that_does_not_answer_means_no_gpu(tmp_path: Path) -> None:
    """The CPU serves, and who asked for a GPU by name is told in one line."""
    done = probe(tmp_path, fail=1)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].endswith("ConfigError: --device gpu:1: no NVIDIA GPU was found here")
    assert "[] ()" in done.stdout


def test_cpu_devices_are_budgets() -> None:
    """As given, numbered in order; by default a share of what is available."""
    found = parse_devices(("cpu:2GiB", "cpu:1GiB"))
    assert [(d.device, d.kind, d.memory_bytes, d.device_type, d.link) for d in found] == [
        ("cpu0", DeviceKind.CPU, 2 << 30, "cpu", ""),
        ("cpu1", DeviceKind.CPU, 1 << 30, "cpu", ""),
    ]
    (default,) = cpu_devices()
    assert 0 < default.memory_bytes < max(available_bytes(), default.memory_bytes + 1)
    assert default.memory_bytes < 0.9 * available_bytes() or default.memory_bytes == 64 << 20


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("tpu",), "--device tpu: use cpu, cpu:SIZE such as cpu:4GiB, gpu or gpu:N"),
        (("cpu:",), "--device cpu:: '' is not a size; write it like 4GiB or 512MiB"),
        (("cpu:big",), "--device cpu:big: 'big' is not a size; write it like 4GiB or 512MiB"),
        (("cpu:1MiB",), "--device cpu:1MiB: give a CPU device at least 64MiB"),
    ],
)
def test_wrong_flags_are_one_line(flags: tuple[str, ...], line: str) -> None:
    """What is wrong and what to write."""
    with pytest.raises(ConfigError) as caught:
        parse_devices(flags)
    assert str(caught.value) == line
