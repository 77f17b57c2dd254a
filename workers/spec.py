"""What a replica process is told at its start, by its agent, over its control socket."""

from __future__ import annotations

import msgspec

from subjects.ids import DeviceId, ReplicaId, WorkerId
from subjects.messages import ModelRecord


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: who it is, what it serves, where it finds the bus. ``nats_urls`` may hold credentials: never log it.

    ``record`` comes without its list of adapters, which may change while the replica runs.
    """

    replica: ReplicaId
    worker: WorkerId
    device: DeviceId
    peers: tuple[DeviceId, ...] = ()
    """The other devices that it spans."""
    record: ModelRecord
    nats_urls: tuple[str, ...]
    queue_shards: int = 1
    threads: int = 1
    """CPU threads the engine may use."""
    turns_directory: str = ""
    """Where engines that share a device take turns (``workers.turns``); empty: each steps when it likes."""
    kv_socket: str = ""
    """Where the worker's KV node listens (``kvcache.wire.client``); empty: KV stays in the engine."""
    measure: bool = False
    """Measure what steps take before it serves, in a tenth of the load's time."""
