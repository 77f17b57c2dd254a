"""What the replicas of a worker take of its devices: the sums, the blocks where a device needs them, and the reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from subjects.ids import DeviceId, ReplicaId
from subjects.messages import DeviceReport
from workers.core.agent_events import Device


@dataclass(slots=True)
class _Charge:
    begin: int
    """Where its block lies; of no meaning on a device whose memory is paged."""
    size: int


@dataclass(slots=True)
class _Account:
    device: Device
    charges: dict[ReplicaId, _Charge] = field(default_factory=dict)
    used_bytes: int | None = None
    """As the driver tells, where one does."""
    busy_s: float = 0.0

    @property
    def charged(self) -> int:
        return sum(charge.size for charge in self.charges.values())

    def gaps(self) -> list[tuple[int, int]]:
        """Begin and size of the free runs, in order."""
        found, at = [], 0
        for charge in sorted(self.charges.values(), key=lambda charge: (charge.begin, charge.size)):
            if charge.begin > at:
                found.append((at, charge.begin - at))
            at = max(at, charge.begin + charge.size)
        if at < self.device.memory_bytes:
            found.append((at, self.device.memory_bytes - at))
        return found

    @property
    def block_bytes(self) -> int:
        """The largest block that one replica can get."""
        if not self.device.needs_blocks:
            return self.device.memory_bytes - self.charged
        return max((size for _, size in self.gaps()), default=0)

    def place(self, size: int) -> int:
        """Where a block of ``size`` goes: the first run that is long enough."""
        if not self.device.needs_blocks:
            return 0
        return next(begin for begin, gap in self.gaps() if gap >= size)


class DeviceLedger:
    """All devices of a worker. A charge is taken on all devices that a replica spans, or on none."""

    def __init__(self, devices: tuple[Device, ...]) -> None:
        self._accounts = {device.device: _Account(device) for device in devices}

    def charged(self, device: DeviceId) -> int:
        """The sum of the budgets that are charged to a device now."""
        return self._accounts[device].charged

    def charge_of(self, replica: ReplicaId, device: DeviceId) -> int:
        """What one replica is charged on one of its devices."""
        charge = self._accounts[device].charges.get(replica)
        return charge.size if charge is not None else 0

    def cannot_span(self, name: str, devices: Sequence[DeviceId], gpus: int) -> str:
        """Why a replica of ``gpus`` devices cannot have exactly these; empty when it can."""
        for device in devices:
            if device not in self._accounts:
                return f"there is no device {device}; this worker has {', '.join(self._accounts) or 'none'}"
        if len(set(devices)) < len(devices):
            return f"a device is named twice among {', '.join(devices)}"
        if len(devices) != gpus:
            return f"{name} spans {gpus} devices, the command names {len(devices)}"
        links = {self._accounts[device].device.link for device in devices}
        if len(devices) > 1 and (len(links) > 1 or "" in links):
            return f"the devices {', '.join(devices)} are not linked with each other"
        return ""

    def cannot_charge(self, name: str, devices: Sequence[DeviceId], budget_bytes: int) -> str:
        """Why a new replica cannot be charged so much on each of these devices; empty when it can."""
        for device in devices:
            account = self._accounts[device]
            free = account.device.memory_bytes - account.charged
            if budget_bytes > free:
                return (
                    f"{name} needs {budget_bytes} bytes on {device}; {free} of {account.device.memory_bytes} bytes are free"
                )
            if budget_bytes > account.block_bytes:
                return (
                    f"{name} needs {budget_bytes} bytes in one block on {device}; "
                    f"the largest free one has {account.block_bytes} of {free} free bytes"
                )
        return ""

    def cannot_change(self, replica: ReplicaId, name: str, devices: Sequence[DeviceId], budget_bytes: int) -> str:
        """Why a replica cannot be charged another budget from now on; empty when it can."""
        for device in devices:
            account = self._accounts[device]
            growth = budget_bytes - account.charges[replica].size
            if growth > 0 and account.device.needs_blocks:
                return f"{name} has one block on {device}, which cannot grow"
            free = account.device.memory_bytes - account.charged
            if growth > free:
                return f"{name} needs {growth} more bytes on {device}; {free} bytes are free"
        return ""

    def charge(self, replica: ReplicaId, devices: Sequence[DeviceId], budget_bytes: int) -> None:
        """Charges a replica so much on each device from now on; what it had there counts no more."""
        for device in devices:
            account = self._accounts[device]
            known = account.charges.get(replica)
            if known is not None:
                known.size = budget_bytes
            else:
                account.charges[replica] = _Charge(account.place(budget_bytes), budget_bytes)

    def release(self, replica: ReplicaId, devices: Sequence[DeviceId]) -> None:
        """Its process is gone."""
        for device in devices:
            self._accounts[device].charges.pop(replica, None)

    def was_busy(self, devices: Sequence[DeviceId], seconds: float) -> None:
        """An engine that spans these devices ran steps for so long."""
        for device in devices:
            self._accounts[device].busy_s += seconds

    def sampled(self, device: DeviceId, used_bytes: int) -> bool:
        """The driver's word on used memory; True when it is news."""
        account = self._accounts.get(device)
        if account is None or account.used_bytes == used_bytes:
            return False
        account.used_bytes = used_bytes
        return True

    def report(self, device: DeviceId, resident_bytes: int) -> DeviceReport:
        """How a device is; ``resident_bytes`` is what its replicas' processes hold, for one without a driver's word."""
        account = self._accounts[device]
        spec = account.device
        return DeviceReport(
            device=spec.device,
            kind=spec.kind,
            name=spec.name,
            memory_bytes=spec.memory_bytes,
            reserved_bytes=account.charged,
            used_bytes=resident_bytes if account.used_bytes is None else account.used_bytes,
            device_type=spec.device_type,
            link=spec.link,
            contiguous_free_bytes=account.block_bytes if spec.needs_blocks else None,
            busy_s=account.busy_s,
            threads=spec.threads,
        )
