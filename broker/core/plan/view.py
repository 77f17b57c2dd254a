"""The pool as a policy sees it, made from what the scheduler knows. Reads only, but for the flow, which it takes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from broker.core.plan.costs import CostBook
from broker.core.plan.feasibility import Feasibility
from broker.core.plan.policy import Arrivals, DeviceView, ExpectedLoad, ModelView, PoolView, ReplicaView
from broker.core.plan.problem import fixed_bytes
from broker.core.pool.catalogue import Catalogue, DeviceKey, Model
from broker.core.pool.describe import load_s_guess
from broker.core.pool.events import SchedulerSettings
from broker.core.pool.memory import Room
from broker.core.pool.state import COMING, Device, Flow, Pool, Replica, Reservation
from broker.core.pool.transactions import Transactions
from subjects.ids import DeploymentKey, ReplicaId, base_name
from subjects.messages import DeviceReport, Mode, ModelRecord, ReplicaReport, ReplicaState

_NO_ARRIVALS = Arrivals()
_Known = dict[ReplicaId, tuple[ReplicaReport, bool, ReplicaView]]
"""Views of replicas, with the reports that they show and whether they stay."""


@dataclass(eq=False, slots=True)
class ViewBuilder:
    """Makes views. What did not change since the last one is the same object again."""

    _settings: SchedulerSettings
    _pool: Pool
    _catalogue: Catalogue
    _feasibility: Feasibility
    _transactions: Transactions
    _costs: CostBook
    _replicas: _Known = field(default_factory=dict)
    _seen_devices: dict[DeviceKey, tuple[Room, DeviceReport, int, DeviceView]] = field(default_factory=dict)
    """As of these and of so much news in the catalogue."""
    _events: tuple[int, tuple[ExpectedLoad, ...]] = (-1, ())
    """As of so much news in the catalogue."""

    def build(self, now_s: float) -> PoolView:
        """The pool now, with demand as of the last look, and the flow since the last view."""
        flows = self._pool.inflow.take_flow()
        coming: dict[DeploymentKey, list[Reservation]] = {}
        for held in self._pool.unlisted_reservations():
            coming.setdefault(held.deployment, []).append(held)
        records = sorted(self._catalogue.by_deployment, key=lambda record: record.deployment)
        known, self._replicas = self._replicas, {}
        models = {
            record.deployment: self._model(
                now_s, record, coming.get(record.deployment, []), flows.get(record.deployment), known
            )
            for record in records
        }
        return PoolView(
            now_s=now_s,
            models=models,
            devices=self._devices(),
            models_per_device_max=self._settings.models_per_device_max or sys.maxsize,
            unix_offset_s=self._transactions.orders.unix_offset_s,
            events=self._expected(),
        )

    def _expected(self) -> tuple[ExpectedLoad, ...]:
        """What people have declared, for models that are there."""
        catalogue = self._catalogue
        if self._events[0] != catalogue.news:
            events = []
            for name, load in sorted(catalogue.declared.items()):
                record = catalogue.records.get(load.model)
                if record is not None or not load.model:
                    whose = record.deployment if record is not None else None
                    events.append(ExpectedLoad(name, load.begin_unix_s, load.end_unix_s, whose, load.factor, load.at_least))
            self._events = (catalogue.news, tuple(events))
        return self._events[1]

    def _devices(self) -> dict[DeviceKey, DeviceView]:
        pool, news = self._pool, self._catalogue.news
        before, self._seen_devices = self._seen_devices, {}
        views = {}
        for device in pool.devices(usable=True):
            room, report = pool.room(device), device.report
            known = before.get(device.key)
            if known is None or known[0] is not room or known[1] is not report or known[2] != news:
                snapshot = device.worker.snapshot
                view = DeviceView(
                    device.key,
                    report.kind,
                    report.device_type,
                    report.link,
                    report.memory_bytes - self._lost_bytes(device),
                    room.free_planned_bytes,
                    room.largest_free_bytes,
                    room.loads_coming,
                    report.busy_s,
                    tuple(sorted(engine.value for engine in snapshot.engines)) if snapshot is not None else (),
                )
                known = (room, report, news, view)
            self._seen_devices[device.key] = known
            views[device.key] = known[3]
        return views

    def _lost_bytes(self, device: Device) -> int:
        """Of a device what no plan can give away: what its agent holds back, what no model of the registry has, and what
        replicas are charged beyond weights, overhead and KV."""
        pool, room = self._pool, self._pool.room(device)
        lost = room.held_back_bytes
        for replica in room.replicas:
            report = replica.report
            record = self._catalogue.of_deployment(report.deployment)
            if replica.replica in pool.leaving:
                continue
            if record is None or replica.dead:
                lost += report.budget_bytes
            elif report.budget_bytes != record.budget_bytes or report.kv_bytes not in (0, record.kv_bytes):
                kv_bytes = -(-(report.kv_bytes or record.kv_bytes) // record.gpus)
                lost += max(0, report.budget_bytes - fixed_bytes(record) - kv_bytes)
        return lost

    def _model(
        self, now_s: float, record: ModelRecord, promised: list[Reservation], flow: Flow | None, known: _Known
    ) -> ModelView:
        pool, catalogue = self._pool, self._catalogue
        deployment = record.deployment
        model = catalogue.model(deployment)
        demand = self._feasibility.demand(deployment)
        mode = catalogue.mode(deployment)
        stays = self._feasibility.all_stay(record)
        replicas: list[ReplicaView] = []
        leaving = 0
        for replica in pool.replicas_for(deployment):
            if replica.dead or pool.worker_leaves(replica.worker):
                continue
            state = replica.report.state
            if replica.replica in pool.leaving or state is ReplicaState.DRAINING:
                leaving += 1
            elif state is ReplicaState.READY or state in COMING:
                replicas.append(self._replica(record, replica, stays or pool.replica_locked(replica), known))
        replicas.extend(self._promised(now_s, record, held) for held in promised)
        replicas.sort(key=lambda view: view.replica)
        return ModelView(
            record=self._costs.filled(record),
            replicas=tuple(replicas),
            leaving=leaving,
            waiting=demand.waiting,
            waiting_input_tokens=demand.waiting_input_tokens,
            running=demand.running,
            oldest_wait_s=demand.oldest_wait_s,
            arrivals=_arrivals(flow),
            finished=flow.finished if flow is not None else 0,
            within_slo=flow.within_slo if flow is not None else 0,
            load_s=model.load_s if model.load_s is not None else load_s_guess(record),
            may_load=model.retry_s <= now_s and not model.held_down and not catalogue.locked(deployment),
            may_act=mode is Mode.ACT,
            advises=mode is Mode.ADVISE,
            fails=model.failures > 0,
            resizes_kv=self._resizes(record, model),
            finished_output_tokens=flow.finished_output_tokens if flow is not None else 0,
            failed_on=model.failed_on,
        )

    def _resizes(self, record: ModelRecord, model: Model) -> bool:
        """What its replicas have said; before any has, what the workers say of its engine."""
        for replica in self._pool.open_replicas(record.deployment):
            model.resizes_kv = replica.report.resizes_kv
        if model.resizes_kv is not None:
            return model.resizes_kv
        snapshots = [worker.snapshot for worker in self._pool.workers.values() if worker.snapshot is not None]
        return any(record.engine_type in snapshot.resizing for snapshot in snapshots)

    def _replica(self, record: ModelRecord, replica: Replica, stays: bool, known: _Known) -> ReplicaView:
        report = replica.report
        if (before := known.get(replica.replica)) is not None and before[0] is report and before[1] is stays:
            self._replicas[replica.replica] = before
            return before[2]
        ready = report.state is ReplicaState.READY
        since_s = replica.ready_s
        if not ready or since_s is None:
            transaction = self._transactions.loading(base_name(replica.replica))
            since_s = transaction.begun_s if transaction is not None else replica.reported_s - report.state_s
        view = ReplicaView(
            replica.replica,
            report.deployment,
            tuple([(replica.worker, device) for device in replica.devices]),
            ReplicaState.READY if ready else ReplicaState.LOADING,
            since_s,
            report.budget_bytes,
            report.kv_bytes or record.kv_bytes,
            report.running,
            report.slots,
            report.kv_pages,
            report.kv_pages_free,
            replica.last_used_s if ready else since_s,
            stays,
            report.hit_ratio,
            report.step_s or None,
            report.slots_max,
        )
        self._replicas[replica.replica] = (report, stays, view)
        return view

    def _promised(self, now_s: float, record: ModelRecord, held: Reservation) -> ReplicaView:
        transaction = self._transactions.loading(held.replica_name)
        begun_s = transaction.begun_s if transaction is not None else now_s
        placed = transaction.record if transaction is not None and transaction.record is not None else record
        return ReplicaView(
            replica=ReplicaId(held.replica_name),
            deployment=held.deployment,
            devices=tuple((held.worker, device) for device in held.devices),
            state=ReplicaState.LOADING,
            since_s=begun_s,
            budget_bytes=held.budget_bytes,
            kv_bytes=placed.kv_bytes,
            running=0,
            slots=0,
            kv_pages=0,
            kv_pages_free=0,
            last_used_s=begun_s,
            stays=False,
        )


def _arrivals(flow: Flow | None) -> Arrivals:
    if flow is None:
        return _NO_ARRIVALS
    (a, b, c), (d, e, f), (g, h, i) = flow.requests, flow.input_tokens, flow.output_tokens
    return Arrivals((a, b, c), (d, e, f), (g, h, i))
