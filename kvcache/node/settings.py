"""Settings of a node process, as its agent gives them; URLs with credentials come through the environment instead."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from kvcache.core.identity import PAGE_BYTES

NATS_VARIABLE = "CARPOOL_NATS"
"""Environment variable with the bus's URLs, apart by spaces; empty: the node works for its host alone."""
REDIS_VARIABLE = "CARPOOL_REDIS"
"""Environment variable with the URL of Redis; empty: hotness stays on the node."""


class Exit(IntEnum):
    """The exit code of a node that cannot have its settings, its directory, its addresses, its memory."""

    SETTINGS = 2
    LOCKED = 3
    LISTEN = 4
    MEMORY = 5


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node. Bytes are bytes, ``_s`` are seconds; 0 of a tier: there is none."""

    worker: str
    """The agent's id, with its incarnation: the node answers on this worker's subjects."""
    socket_path: str
    """Where engines and the agent of this host reach it; replaced when it is there."""
    directory: str = ""
    """Of the store; empty: no tier on disk."""
    host_bytes_max: int = 1 << 30
    disk_bytes_max: int = 16 << 30
    write_bytes_per_day_max: int | None = None
    hot_s: float = 30.0
    idle_s_max: float = 600.0
    settle_s: float = 3.0
    """A new block is written to disk after that long, so that what is dropped or dies young wears no disk."""
    flush_s_max: float = 10.0
    """What is not on disk by then when the node stops is lost."""
    data_host: str = "127.0.0.1"
    """Address of the data path; anything but loopback lets whoever has a token in from outside."""
    data_port: int = 0
    """0: any free one."""
    data_address: str = ""
    """``host:port`` that other nodes are told; empty: where it listens."""
    data_bytes_per_s_max: int = 0
    """To all other nodes together; 0: no bound."""
    data_connections_max: int = 8
    pull_batch_bytes: int = 16 << 20
    pull_batches_in_flight: int = 3
    pull_s_max: float = 30.0
    """Longest pull on behalf of a request."""
    offer_s: float = 60.0
    """Life of a token."""
    ask_s_max: float = 0.1
    """How long another node is waited for over the bus."""
    publish_s: float = 0.2
    beat_s: float = 5.0
    exit_with_stdin: bool = False
    """Stop as after SIGTERM when standard input closes: the agent's death takes the node along."""

    def __post_init__(self) -> None:
        if self.host_bytes_max < PAGE_BYTES:
            raise ValueError(f"host_bytes_max {self.host_bytes_max}: at least one page of {PAGE_BYTES} bytes")
        if not self.worker or not self.socket_path:
            raise ValueError("worker and socket_path are needed")
