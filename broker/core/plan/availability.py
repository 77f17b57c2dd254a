"""What to tell clients of a model that has no replica: could it ever fit, is it coming, how long will that take."""

from __future__ import annotations

import math
from collections import Counter

import msgspec

from broker.core.plan.feasibility import Feasibility, runs
from broker.core.plan.tunables import FAILING_IDLE_S, LATE_S, TURN_S
from broker.core.pool.catalogue import Catalogue
from broker.core.pool.describe import bytes_text, describe_need, load_s_guess
from broker.core.pool.events import SchedulerSettings
from broker.core.pool.state import Device, Pool, Presence
from broker.core.pool.transactions import Stage, Transactions
from subjects.ids import DeploymentKey
from subjects.messages import EngineType, Mode, ModelRecord


class Outlook(msgspec.Struct, frozen=True):
    """What a gateway is told of a model: how long a newcomer may wait, or why there is no point in waiting.

    Clients read ``refusal``. What a failed load said is not in it: it may name addresses and paths, which are for operators.
    """

    estimated_wait_s: float = 0.0
    refusal: str = ""
    retry_after_s: int = 0
    permanent: bool = False


class Availability:
    """Reads the pool and the catalogue, changes nothing."""

    def __init__(
        self,
        settings: SchedulerSettings,
        pool: Pool,
        catalogue: Catalogue,
        feasibility: Feasibility,
        transactions: Transactions,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._catalogue = catalogue
        self._feasibility = feasibility
        self._transactions = transactions
        self._no_worker_since_s: dict[DeploymentKey, float] = {}
        self._layout = -1
        self._running_engine: dict[EngineType, list[Device]] = {}

    def outlook(self, now_s: float, record: ModelRecord) -> Outlook:
        """What to tell about a model."""
        model = self._catalogue.model(record.deployment)
        if self._pool.open_replicas(record.deployment):
            return Outlook()
        load_s = model.load_s if model.load_s is not None else load_s_guess(record)
        if self._pool.coming_replicas(record.deployment):
            return Outlook(estimated_wait_s=self._coming_wait_s(now_s, record.deployment, load_s))
        mode = self._catalogue.mode(record.deployment)
        waits_s = self._feasibility.demand(record.deployment).oldest_wait_s
        if mode is Mode.OBSERVE or (mode is Mode.ADVISE and waits_s >= LATE_S):
            text = f"not loaded, and nothing is loaded by itself in its mode {mode.value} (carpool mode {record.name} act)"
            return Outlook(refusal=text, retry_after_s=30)
        refusal = self._infeasible(record)
        if refusal is not None:
            return refusal
        if model.failures and model.retry_s > now_s:
            pause_s = model.retry_s - now_s
            text = f"loading failed {_times(model.failures)}, next try in {max(1.0, pause_s):.0f} s"
            return Outlook(pause_s + load_s, text, math.ceil(pause_s))
        if self._free(record):
            return Outlook(estimated_wait_s=load_s)
        if model.failures and not self._idle(record, now_s - FAILING_IDLE_S):
            text = f"loading failed {_times(model.failures)}, and no free room to try again"
            return Outlook(load_s, text, math.ceil(TURN_S))
        idle = self._idle(record, now_s)
        return Outlook(estimated_wait_s=load_s + (0.0 if idle else TURN_S))

    def _coming_wait_s(self, now_s: float, deployment: DeploymentKey, load_s: float) -> float:
        for transaction in self._transactions.running.values():
            if transaction.record is not None and transaction.record.deployment == deployment:
                begun_s = transaction.load_begun_s if transaction.stage is Stage.LOADING else now_s
                return max(0.5, load_s - (now_s - begun_s))
        return load_s

    def _free(self, record: ModelRecord) -> bool:
        """Whether there is room for it now."""
        return any(
            sum(self._pool.room(device).largest_free_bytes >= record.budget_bytes for device in group) >= record.gpus
            for group in self._feasibility.groups(record)
        )

    def _idle(self, record: ModelRecord, since_s: float) -> bool:
        """Whether there is room once all have left that nobody has used since then."""
        feasibility, catalogue = self._feasibility, self._catalogue
        for group in self._feasibility.groups(record):
            ready = 0
            for device in group:
                idle = [
                    replica
                    for replica in self._pool.room(device).replicas
                    if not feasibility.leave_refusal(replica)
                    and not feasibility.demand(replica.report.deployment).any
                    and max(replica.last_used_s, catalogue.model(replica.report.deployment).last_used_s) <= since_s
                ]
                ready += feasibility.block_bytes(device, idle) >= record.budget_bytes
            if ready >= record.gpus:
                return True
        return False

    def _known(self, record: ModelRecord) -> list[Device]:
        """All devices whose workers run its engine, those of silent workers too."""
        if self._layout != self._pool.layout:
            self._layout = self._pool.layout
            self._running_engine.clear()
        if record.engine_type not in self._running_engine:
            known = [device for device in self._pool.devices(usable=False) if runs(device, record)]
            self._running_engine[record.engine_type] = known
        return self._running_engine[record.engine_type]

    def _infeasible(self, record: ModelRecord) -> Outlook | None:
        """Why no patience helps: no worker for it, too big for every device, or the room is held by what must stay."""
        known = self._known(record)
        if not any(device.worker.presence is not Presence.DEAD for device in known):
            # By the clock of what could be heard: while we are paused or the bus is away, nobody's absence shows.
            since_s = self._no_worker_since_s.setdefault(record.deployment, self._pool.heard_s)
            if self._pool.heard_s - since_s < self._settings.worker_missing_s:
                return None
            return Outlook(refusal=f"no connected worker runs the engine {record.engine_type.value}", retry_after_s=5)
        self._no_worker_since_s.pop(record.deployment, None)
        groups = self._feasibility.groups(record)
        if not groups:
            return self._too_big(record, known)
        if not self._catalogue.any_stay:
            return None
        blocked: list[Device] = []
        for group in groups:
            held = [device for device in group if self._feasibility.shut(device, record)]
            if len(group) - len(held) >= record.gpus:
                return None
            blocked += held
        holders = {
            self._catalogue.name(deployment)
            for device in blocked
            for deployment in self._pool.room(device).models
            if self._feasibility.holds(deployment)
        }
        text = f"no capacity, pinned: needs {describe_need(record)}; pinned models or minimum replicas hold the room"
        return Outlook(refusal=f"{text} ({', '.join(sorted(holders))})", retry_after_s=30)

    def _too_big(self, record: ModelRecord, known: list[Device]) -> Outlook | None:
        """For a model that no usable devices can hold: whether any could, if they were usable."""
        largest_bytes = max(device.report.memory_bytes for device in known)
        if largest_bytes < record.budget_bytes:
            text = f"needs {describe_need(record)}, largest device has {bytes_text(largest_bytes)}"
            return Outlook(refusal=text, permanent=True)
        if record.gpus == 1:
            return None
        fitting = [one for one in known if one.report.link and one.report.memory_bytes >= record.budget_bytes]
        most = max(Counter((one.worker.worker, one.report.link) for one in fitting).values(), default=1)
        if most >= record.gpus:
            return None
        text = f"needs {record.gpus} linked devices of {bytes_text(record.budget_bytes)}, no worker has more than {most}"
        return Outlook(refusal=text, permanent=True)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
