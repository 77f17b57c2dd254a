"""Kinds of GPU: published figures (``SOURCES.md`` says where from)."""

from __future__ import annotations

import msgspec

GB = 1_000_000_000


class DeviceKind(msgspec.Struct, frozen=True):
    """Published figures of one kind of GPU: bytes, bytes per second, and dense FLOPS."""

    name: str
    memory_bytes: int
    memory_bandwidth: float
    bf16_flops: float
    fp8_flops: float | None
    """None: no fp8 units, it computes such weights in bf16."""

    def flops(self, *, fp8: bool) -> float:
        """Peak in the precision that weights of this kind compute in."""
        return self.fp8_flops if fp8 and self.fp8_flops else self.bf16_flops


KINDS: dict[str, DeviceKind] = {
    kind.name: kind
    for kind in (
        DeviceKind("a100-80gb", 80 * GB, 2.039e12, 312e12, None),
        DeviceKind("h100-80gb", 80 * GB, 3.35e12, 989e12, 1978e12),
        DeviceKind("h800-80gb", 80 * GB, 3.35e12, 989e12, 1978e12),
        DeviceKind("h200-141gb", 141 * GB, 4.8e12, 989e12, 1978e12),
        DeviceKind("h20-96gb", 96 * GB, 4.0e12, 148e12, 296e12),
        DeviceKind("a10-24gb", 24 * GB, 0.6e12, 125e12, None),
        DeviceKind("l4-24gb", 24 * GB, 0.3e12, 121e12, 242e12),
        DeviceKind("l40s-48gb", 48 * GB, 0.864e12, 362e12, 733e12),
    )
}
