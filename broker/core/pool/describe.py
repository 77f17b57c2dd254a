"""Numbers and states as people read them, for tables, reasons and refusals."""

from __future__ import annotations

from collections.abc import Collection

from subjects.messages import ModelRecord, ReplicaState

_BEST_FIRST = (
    ReplicaState.READY,
    ReplicaState.WARMING,
    ReplicaState.LOADING,
    ReplicaState.FETCHING,
    ReplicaState.DRAINING,
    ReplicaState.ASLEEP,
    ReplicaState.FAILED,
)

_LOAD_BYTES_PER_S_GUESS = 200 * 1024 * 1024
_LOAD_S_GUESS = 5.0
"""What a load may take as long as none was observed: starting an engine, then reading the weights."""


def describe_need(record: ModelRecord) -> str:
    """What a model takes of a device, with its parts."""
    parts = (
        f"weights {bytes_text(record.weights_bytes)} + KV {bytes_text(record.kv_bytes)}"
        f" + overhead {bytes_text(record.overhead_bytes)}"
    )
    return f"{bytes_text(record.budget_bytes)} ({parts})"


def load_s_guess(record: ModelRecord) -> float:
    """What a load may take as long as none was observed."""
    return _LOAD_S_GUESS + record.weights_bytes / _LOAD_BYTES_PER_S_GUESS


def bytes_text(count: int) -> str:
    """``3.1 GiB``, ``512.0 MiB``; small sizes in KiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1024:.0f} KiB"


def seconds_text(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def model_state(states: Collection[ReplicaState], *, refused: bool) -> str:
    """One word for a model: the best state of its replicas, ``refused``, or ``unloaded``."""
    absent = "refused" if refused else "unloaded"
    return next((state.value for state in _BEST_FIRST if state in states), absent)
