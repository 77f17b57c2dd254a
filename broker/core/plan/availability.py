"""Which models should get a replica, and what to tell of the others. Reads the pool and the catalogue, changes nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from broker.core.plan.feasibility import Sites, runs
from broker.core.plan.feasibility import Want as Want
from broker.core.plan.usage import Usage
from broker.core.pool.catalogue import Catalogue
from broker.core.pool.describe import bytes_text, describe_need, load_s_guess, seconds_text
from broker.core.pool.events import SchedulerSettings
from broker.core.pool.state import Demand, Device, Pool, Presence
from broker.core.pool.transactions import Stage, Transactions
from subjects.ids import DeploymentKey
from subjects.messages import EngineType, ModelRecord


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a gateway is told of a model: how long a newcomer may wait, or why there is no point in waiting.

    Clients read ``refusal``. What a failed load said is not in it: it may name addresses and paths, which are for operators.
    """

    estimated_wait_s: float = 0.0
    refusal: str = ""
    retry_after_s: int = 0
    permanent: bool = False


class Planner:
    """The rules of ``placement`` as questions."""

    def __init__(self, settings: SchedulerSettings, pool: Pool, catalogue: Catalogue, transactions: Transactions) -> None:
        self._settings = settings
        self._pool = pool
        self._catalogue = catalogue
        self._transactions = transactions
        self.usage = Usage(settings, pool, catalogue)
        self.sites = Sites(settings, pool, catalogue, self.usage)
        self._no_worker_since_s: dict[DeploymentKey, float] = {}
        self._layout = -1
        self._running_engine: dict[EngineType, list[Device]] = {}

    def look(self, now_s: float) -> dict[DeploymentKey, Demand]:
        """Takes the demand of this moment; what follows refers to it."""
        return self.usage.look(now_s)

    def demand(self, deployment: DeploymentKey) -> Demand:
        """Demand for one model, as of the last :meth:`look`."""
        return self.usage.demand(deployment)

    # ------------------------------------------------------------------------------------------------------ who wants room

    def wants(self, restores: list[Want]) -> list[Want]:
        """All models that should get a replica now, the most urgent first: what is restored, what waits (longest first),
        minimum replicas, one more replica beside busy ones."""
        found: list[tuple[int, float, str, Want]] = []
        restored: set[DeploymentKey] = set()
        for want in restores:
            deployment = want.record.deployment
            if deployment not in restored and self.lacks(want.record):
                restored.add(deployment)
                found.append((0, 0.0, want.record.name, want))
        usage, settings = self.usage, self._settings
        for record in self._catalogue.by_deployment():
            demand = usage.demand(record.deployment)
            if not demand.waiting and not record.min_replicas:
                continue
            count = usage.replicas_count(record.deployment)
            if demand.waiting and count == 0:
                waits = _waits(demand)
                found.append((1, -demand.oldest_wait_s, record.name, Want(record, demand.oldest_wait_s, waits)))
            elif count < record.min_replicas and not self._catalogue.model(record.deployment).held_down:
                want = Want(record, 0.0, f"below its minimum of {record.min_replicas}", waits=False)
                found.append((2, 0.0, record.name, want))
            elif (
                demand.waiting
                and count < record.max_replicas
                and self._pool.coming_replicas(record.deployment) == 0
                and min(demand.oldest_wait_s, self._served_for_s(record.deployment)) >= settings.scale_out_wait_s
            ):
                why = f"{_waits(demand)} beside {count} ready"
                want = Want(record, demand.oldest_wait_s, why, evicts=False, grows=True)
                found.append((3, -demand.oldest_wait_s, record.name, want))
        found.sort(key=lambda entry: entry[:3])
        return [want for *_, want in found]

    def _served_for_s(self, deployment: DeploymentKey) -> float:
        """Since when the newest replica of a model serves: before it did, nobody can have waited beside it."""
        ready_s = [replica.ready_s for replica in self._pool.open_replicas(deployment) if replica.ready_s is not None]
        return self.usage.looked_s - max(ready_s, default=0.0)

    def lacks(self, record: ModelRecord) -> bool:
        """Whether a model has fewer replicas than somebody needs."""
        needed = max(record.min_replicas, int(self.demand(record.deployment).any))
        return self.usage.replicas_count(record.deployment) < needed

    # ------------------------------------------------------------------------------------------------------------ outlook

    def outlook(self, now_s: float, record: ModelRecord) -> Outlook:
        """What to tell about a model."""
        model = self._catalogue.model(record.deployment)
        if self._pool.open_replicas(record.deployment):
            return Outlook()
        load_s = model.load_s if model.load_s is not None else load_s_guess(record)
        if self._pool.coming_replicas(record.deployment):
            return Outlook(estimated_wait_s=self._coming_wait_s(now_s, record.deployment, load_s))
        refusal = self._infeasible(now_s, record)
        if refusal is not None:
            return refusal
        if model.failures and model.retry_s > now_s:
            pause_s = model.retry_s - now_s
            text = f"loading failed {_times(model.failures)}, next try in {max(1.0, pause_s):.0f} s"
            return Outlook(pause_s + load_s, text, math.ceil(pause_s))
        if model.failures and not self._may_try_again(record):
            text = f"loading failed {_times(model.failures)}, and no free room to try again"
            return Outlook(load_s, text, math.ceil(self._settings.minority_wait_s_max))
        return Outlook(estimated_wait_s=load_s + self._room_wait_s(record))

    def _may_try_again(self, record: ModelRecord) -> bool:
        want = Want(record, 0.0, "")
        return self.sites.in_free_room(want, set()) is not None or self.sites.by_eviction(want, set()) is not None

    def _coming_wait_s(self, now_s: float, deployment: DeploymentKey, load_s: float) -> float:
        for transaction in self._transactions.running.values():
            if transaction.record is not None and transaction.record.deployment == deployment:
                begun_s = transaction.load_begun_s if transaction.stage is Stage.LOADING else now_s
                return max(0.5, load_s - (now_s - begun_s))
        return load_s

    def _room_wait_s(self, record: ModelRecord) -> float:
        """Nothing when there is room or an idle model may leave, else the grouping bound."""
        fits = self.sites.largest_block_bytes() >= record.budget_bytes
        idle = self.usage.idle_devices()
        if record.gpus == 1:
            near = fits or any(self.sites.fits(device, record) for device in idle.values())
        else:
            near = bool(fits or idle) and any(
                sum(d.key in idle or self._pool.room(d).largest_free_bytes >= record.budget_bytes for d in group)
                >= record.gpus
                for group in self.sites.groups(record)
            )
        return 0.0 if near else self._settings.minority_wait_s_max

    def _known(self, record: ModelRecord) -> list[Device]:
        """All devices whose workers run its engine, those of silent workers too."""
        if self._layout != self._pool.layout:
            self._layout = self._pool.layout
            self._running_engine.clear()
        known = self._running_engine.get(record.engine_type)
        if known is None:
            known = [device for device in self._pool.devices(usable=False) if runs(device, record)]
            self._running_engine[record.engine_type] = known
        return known

    def _infeasible(self, now_s: float, record: ModelRecord) -> Outlook | None:
        """Why no patience helps: no worker for it, too big for every device, or the room is held by what must stay."""
        known = self._known(record)
        if not any(device.worker.presence is not Presence.DEAD for device in known):
            # By the clock of what could be heard: while we are paused or the bus is away, nobody's absence shows.
            since_s = self._no_worker_since_s.setdefault(record.deployment, self._pool.heard_s)
            if self._pool.heard_s - since_s < self._settings.worker_missing_s:
                return None
            return Outlook(refusal=f"no connected worker runs the engine {record.engine_type.value}", retry_after_s=5)
        self._no_worker_since_s.pop(record.deployment, None)
        groups = self.sites.groups(record)
        if not groups:
            return self._too_big(record, known)
        if not self._catalogue.any_stay:
            return None
        blocked: list[Device] = []
        for group in groups:
            held = [d for d in group if self.usage.held_bytes(d) + record.budget_bytes > d.report.memory_bytes]
            if len(group) - len(held) >= record.gpus:
                return None
            blocked += held
        holders = {
            self._catalogue.name(deployment)
            for device in blocked
            for deployment in self._pool.room(device).models
            if self.usage.holds(deployment)
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
        linked: dict[tuple[str, str], int] = {}
        for device in known:
            if device.report.link and device.report.memory_bytes >= record.budget_bytes:
                key = (device.worker.worker, device.report.link)
                linked[key] = linked.get(key, 0) + 1
        most = max(linked.values(), default=1)
        if most >= record.gpus:
            return None
        text = f"needs {record.gpus} linked devices of {bytes_text(record.budget_bytes)}, no worker has more than {most}"
        return Outlook(refusal=text, permanent=True)


def _waits(demand: Demand) -> str:
    return f"{demand.waiting} waiting for {seconds_text(demand.oldest_wait_s)}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
