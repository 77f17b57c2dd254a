"""What a worker's KV node may use: host memory, disk, network (KVC-1), from the flags that say it.

Host memory for KV is beside the devices' memory, never a part of it: no device's budget is charged for it, and what CPU
devices and this tier are given together should be there. The default is small enough for that; who names a size is warned
where it is more than what is available beside the devices.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiles.sizes import parse_size
from subjects.errors import ConfigError
from subjects.messages import DeviceKind
from workers.core.agent_events import Device
from workers.devices import available_bytes

MEMORY_SHARE = 0.05
MEMORY_DEFAULT_BYTES_MAX = 1 << 30
MEMORY_BYTES_MIN = 16 << 20
"""Some blocks of a small model; less would only be moved through."""
DISK_BYTES_MIN = 64 << 20
"""A few segments."""
DISK_LEFT_SHARE = 0.05
"""Of what is free on the disk this is left to others, whatever was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvConfig:
    """One node's means. ``redis_url`` may hold credentials: never log it. 0 of disk: no such tier; of the rate and of the
    write budget: no bound."""

    directory: Path
    memory_bytes: int
    disk_bytes: int
    write_bytes_per_day: int = 0
    data_host: str = "127.0.0.1"
    rate_bytes_per_s: int = 0
    hot_s: float = 30.0
    idle_s: float = 600.0
    redis_url: str = ""


def kv_config(flags: Mapping[str, Any], *, directory: Path, redis_url: str) -> KvConfig | None:
    """What the flags ask for, by their names with underscores; None with ``--no-kv``. ``directory`` is the default.

    Raises:
        ConfigError: one line with the flag and what would be right.
    """
    if not flags.get("kv", True):
        return None
    memory = flags.get("kv_memory") or ""
    memory_bytes = _size("--kv-memory", memory) if memory else _memory_default()
    if memory_bytes < MEMORY_BYTES_MIN:
        raise ConfigError(f"--kv-memory {memory}: give at least {MEMORY_BYTES_MIN >> 20}MiB, or --no-kv for no KV tiers")
    disk_bytes = _size("--kv-disk", flags.get("kv_disk") or "0")
    if 0 < disk_bytes < DISK_BYTES_MIN:
        raise ConfigError(f"--kv-disk {flags['kv_disk']}: give at least {DISK_BYTES_MIN >> 20}MiB, or 0 for no disk")
    data_host = str(flags.get("kv_data_host") or "127.0.0.1")
    if any(character.isspace() or character == "/" for character in data_host) or len(data_host) > 253:
        raise ConfigError(f"--kv-data-host {data_host!r}: give an address of this machine, such as 10.0.0.7")
    if data_host in ("0.0.0.0", "::"):  # noqa: S104 - refused
        raise ConfigError(f"--kv-data-host {data_host}: other nodes are told it; give one address, such as 10.0.0.7")
    hot_s, idle_s = float(flags.get("kv_hot", 30.0)), float(flags.get("kv_idle", 600.0))
    if idle_s < hot_s:
        raise ConfigError(f"--kv-idle {idle_s:g}: what is deleted is not hot any more; give at least --kv-hot, {hot_s:g}")
    return KvConfig(
        directory=(flags.get("kv_dir") or directory).absolute(),
        memory_bytes=memory_bytes,
        disk_bytes=disk_bytes,
        write_bytes_per_day=_size("--kv-write-budget", flags.get("kv_write_budget") or "0"),
        data_host=data_host,
        rate_bytes_per_s=_size("--kv-rate", flags.get("kv_rate") or "0"),
        hot_s=hot_s,
        idle_s=idle_s,
        redis_url=redis_url,
    )


def _size(flag: str, text: str) -> int:
    if str(text).strip() == "0":
        return 0
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def _memory_default() -> int:
    return max(MEMORY_BYTES_MIN, min(MEMORY_DEFAULT_BYTES_MAX, int(available_bytes() * MEMORY_SHARE)))


def memory_note(config: KvConfig, devices: Sequence[Device]) -> str:
    """A warning where CPU devices and the host tier were promised more than there is; empty where they were not."""
    promised = sum(device.memory_bytes for device in devices if device.kind is DeviceKind.CPU)
    available = available_bytes()
    if promised + config.memory_bytes <= available:
        return ""
    return (
        f"--kv-memory {config.memory_bytes >> 20} MiB beside CPU devices of {promised >> 20} MiB is more than the "
        f"{available >> 20} MiB that are available: lower one of them"
    )


def disk_room(config: KvConfig) -> tuple[int, str]:
    """Bytes that the tier on disk may have, and a note where that is less than was asked for.

    What lies in its directory already counts as its own.
    """
    if not config.disk_bytes:
        return 0, ""
    try:
        config.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(config.directory).free
        own = sum(_bytes_on_disk(path) for path in config.directory.iterdir())
    except OSError as error:
        return 0, f"no tier on disk: {config.directory}: {error.strerror or type(error).__name__}"
    room = own + int(free * (1 - DISK_LEFT_SHARE))
    if room >= config.disk_bytes:
        return config.disk_bytes, ""
    where = f"{config.directory} has room for {room >> 20} MiB"
    if room < DISK_BYTES_MIN:
        return 0, f"no tier on disk: {where}"
    return room, f"the tier on disk is {room >> 20} MiB instead of {config.disk_bytes >> 20} MiB: {where}"


def _bytes_on_disk(path: Path) -> int:
    """0 for what is gone meanwhile: another node may still be ending there."""
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0
