"""What a replica's devices are charged when its KV budget is another than its record's."""

from __future__ import annotations

import msgspec

from subjects.messages import ModelRecord


def with_kv(record: ModelRecord, kv_bytes: int) -> ModelRecord:
    """The record with another KV budget over all its devices, and what each device is then charged."""
    gpus = record.gpus
    besides = record.budget_bytes - -(-(record.weights_bytes + record.kv_bytes) // gpus)
    budget_bytes = -(-(record.weights_bytes + kv_bytes) // gpus) + besides
    return msgspec.structs.replace(record, kv_bytes=kv_bytes, budget_bytes=budget_bytes)
