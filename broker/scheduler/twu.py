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

from broker.core.pool.state import Device, Replica
from broker.core.scheduler import SchedulerCore
from profiles.twu import TWU_FULL, current_weights, default_weight
from subjects.ids import DeploymentKey, ReplicaId
from subjects.messages import IngressTelemetry

FILE = "twu-thresholds.json"
OVER_S = 5.0
"""Time constant of the running mean."""
LOOK_EVERY_S = 1.0
"""How often it is looked at who gives way."""

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
    _looked_s: float = -math.inf
    _giving_way: tuple[ReplicaId, ...] = ()

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
        twu = sum(work for _, _, work in self._on(device, levels)) / levels.baseline_tokens_per_s
        return round(twu, 4), "full" if twu > levels.twu_full else "has room" if twu < levels.twu_free else ""

    def gives_way(self) -> tuple[ReplicaId, ...] | None:
        """Who gives way from now on: the heaviest model's replicas on devices whose TWU is above 0.8, as the site has
        calibrated it; None where nothing changed, or within a second of the last look."""
        now_s = self._now_s()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return None
        self._looked_s = now_s
        found: set[ReplicaId] = set()
        if (levels := self._levels()) is not None and levels.baseline_tokens_per_s > 0.0:
            for device in self._core.pool.devices(usable=False):
                there = self._on(device, levels)
                twu = sum(work for _, _, work in there) / levels.baseline_tokens_per_s
                base = {replica.report.deployment: weight for replica, weight, _ in there}
                lowered = current_weights(base, twu * TWU_FULL / levels.twu_full)
                found.update(r.report.replica for r, weight, _ in there if lowered[r.report.deployment] < weight)
        told, self._giving_way = self._giving_way, tuple(sorted(found))
        return self._giving_way if self._giving_way != told else None

    def _on(self, device: Device, levels: Levels) -> list[tuple[Replica, float, float]]:
        """A device's replicas, each with its model's weight and with its part of weight times tokens per second times
        lateness."""
        pool, now_s = self._core.pool, self._now_s()
        found = []
        for replica in pool.replicas_of(device.worker.worker):
            record = self._core.catalogue.of_deployment(replica.report.deployment)
            if record is None or device.report.device not in replica.devices:
                continue
            running = sum(one.report.running for one in pool.replicas_for(record.deployment))
            share = replica.report.running / running if running else 0.0
            weight = levels.weights.get(record.name) or default_weight(record.weights_bytes)
            found.append((replica, weight, weight * share * self._rate(record.deployment, now_s)))
        return found

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
