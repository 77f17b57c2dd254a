"""TWU of each device, live (SCH-6): what gateways tell of their requests' tokens and lateness, by the site's levels (OPS-7).

A model's part is divided among its replicas by how many requests they run. Weights, the baseline and the levels are those of
``twu-thresholds.json`` in the scheduler's state directory, which ``carpool calibrate`` writes; without it there is no
baseline, and so no TWU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog

from broker.core.pool.state import Device
from broker.core.scheduler import SchedulerCore
from profiles.twu import default_weight
from subjects.ids import DeploymentKey
from subjects.messages import IngressTelemetry

FILE = "twu-thresholds.json"
OVER_S = 5.0
"""Time constant of the running mean."""

log = structlog.get_logger(__name__)


class Levels(msgspec.Struct, frozen=True):
    """What the file says that is needed here."""

    twu_full: float
    twu_free: float
    baseline_tokens_per_s: float
    weights: dict[str, float] = {}
    """By a model's name."""


@dataclass(eq=False, slots=True)
class DeviceTwu:
    """Hears telemetry, and knows every device's TWU."""

    _core: SchedulerCore
    _directory: Path
    _now_s: Callable[[], float]
    _read: tuple[float, Levels | None] = (0.0, None)
    _stress: dict[DeploymentKey, tuple[float, float]] = field(default_factory=dict)
    """By model: tokens per second times lateness, and when that was."""

    def hear(self, telemetry: IngressTelemetry) -> None:
        """What a gateway counted since its last telemetry."""
        now_s = self._now_s()
        for row in telemetry.demand:
            if row.stress > 0.0:
                self._stress[row.deployment] = (self._rate(row.deployment, now_s) + row.stress / OVER_S, now_s)

    def _rate(self, deployment: DeploymentKey, now_s: float) -> float:
        rate, at_s = self._stress.get(deployment, (0.0, now_s))
        return rate * math.exp((at_s - now_s) / OVER_S)

    def of(self, device: Device) -> tuple[float | None, str]:
        """A device's TWU and a word on it; None without a calibration."""
        if (levels := self._levels()) is None or levels.baseline_tokens_per_s <= 0.0:
            return None, ""
        pool, now_s = self._core.pool, self._now_s()
        total = 0.0
        for replica in pool.replicas_of(device.worker.worker):
            record = self._core.catalogue.of_deployment(replica.report.deployment)
            if record is None or device.report.device not in replica.devices:
                continue
            running = sum(one.report.running for one in pool.replicas_for(record.deployment))
            share = replica.report.running / running if running else 0.0
            weight = levels.weights.get(record.name) or default_weight(record.weights_bytes)
            total += weight * share * self._rate(record.deployment, now_s)
        twu = total / levels.baseline_tokens_per_s
        return round(twu, 4), "full" if twu > levels.twu_full else "has room" if twu < levels.twu_free else ""

    def _levels(self) -> Levels | None:
        """The file's, read again when it is another; None where there is none that can be read."""
        file = self._directory / FILE
        try:
            changed = file.stat().st_mtime
            if changed != self._read[0]:
                self._read = (changed, None)
                self._read = (changed, msgspec.json.decode(file.read_bytes(), type=Levels))
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("the levels of TWU cannot be read", file=str(file), error=type(error).__name__)
        return self._read[1]
