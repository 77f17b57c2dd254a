"""What losses and ended transactions bring: what is remembered of a model, what is made good, and whom to tell."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import assert_never

from broker.core.actions import Actions
from broker.core.digest import DigestBuilder
from broker.core.pool.catalogue import Catalogue, DeviceKey
from broker.core.pool.events import RaiseAlert, SchedulerCommand, SchedulerSettings
from broker.core.pool.state import Pool, Replica
from broker.core.pool.transaction import Fault, Stage, Transaction
from broker.core.pool.transactions import Transactions
from subjects.ids import DeploymentKey
from subjects.messages import Alert, ModelRecord, Severity

ALERT_AGAIN_S = 60.0
"""An alert of the same kind and scope is raised again at most this often."""
EARLY_DEATH_S = 30.0
EARLY_DEATHS_MAX = 3
"""So many replicas in a row that die this soon after they were ready count as a failed load: a crash loop."""
LOAD_SMOOTHING = 0.5
"""Weight of the newest load in the running mean of a model's load times."""


@dataclass(eq=False, slots=True)
class Outcomes:
    """Takes what has ended, well or badly. Only a leader tells of it and makes it good."""

    _settings: SchedulerSettings
    _pool: Pool
    _catalogue: Catalogue
    _transactions: Transactions
    _actions: Actions
    _digests: DigestBuilder
    _out: list[SchedulerCommand]
    _alerted: dict[tuple[str, str], float] = field(default_factory=dict)

    def lost(self, now_s: float, replica: Replica, detail: str) -> None:
        """A replica ended without being told to."""
        self._pool.declare_dead(replica.replica)
        if not self._transactions.orders.epoch:
            return  # The leader may have told it to end; only the leader can know.
        model = self._catalogue.model(replica.report.deployment)
        name = self._catalogue.name(replica.report.deployment)
        early = replica.ready_s is None or now_s - replica.ready_s < EARLY_DEATH_S
        model.early_deaths = model.early_deaths + 1 if early else 0
        if model.early_deaths >= EARLY_DEATHS_MAX:
            detail_of_all = f"{model.early_deaths} replicas died at once: {detail}"
            self._load_failed(now_s, replica.report.deployment, detail_of_all, None)
        self._digests.note(now_s, "lost", name, detail or "it ended without being told to", replica=replica.replica)
        text = f"replica {replica.replica} of {name} died: {detail}"
        self.alert(now_s, Severity.WARNING, "replica-died", name, text, f"carpool explain {name}")

    def settle(self, now_s: float) -> None:
        """Takes the transactions that have ended."""
        while ended := self._transactions.ended():
            for transaction in ended:
                self._settle_one(now_s, transaction)

    def _settle_one(self, now_s: float, transaction: Transaction) -> None:
        record, change, worker = transaction.record, transaction.change, transaction.worker
        aborted, failure = transaction.stage is Stage.ABORTED, transaction.failure
        outcome = f"failed: {failure}" if aborted else "done"
        since_s = now_s - transaction.begun_s
        took_s = transaction.took_s or since_s
        for victim in transaction.victims.values():
            went = ("forced" if victim.forced else "done") if victim.gone else failure or "given up"
            self._actions.ended(
                transaction, victim.replica, went, (victim.gone_s if victim.gone else now_s) - victim.begun_s
            )
            if victim.forced and victim.gone:
                self._pool.declare_dead(victim.replica)
        if transaction.overran:
            text = f"replicas did not drain in {transaction.drain_s:g} s and were ended: {transaction.reason}"
            self.alert(now_s, Severity.WARNING, "drain-overrun", worker, text, "carpool get replicas")
        if transaction.kv is not None:
            self._actions.ended(transaction, "kv", outcome if aborted else transaction.detail or "done", since_s)
        elif change is not None:
            if aborted and change.kv_bytes is not None:
                self._actions.resize_refused(now_s, change.replica)
            self._actions.ended(transaction, "change", outcome, took_s, replica=change.replica)
        elif record is None:
            if aborted and transaction.fault is Fault.PLACE:
                self.alert(now_s, Severity.CRITICAL, "unload-failed", worker, failure, "carpool get replicas")
        elif transaction.stage is Stage.DONE:
            self._actions.ended(transaction, "load", outcome, took_s, replica=transaction.replica)
            model = self._catalogue.model(record.deployment)
            model.failures = model.excuses = 0
            model.failure = ""
            model.failed_on = None
            known_s = model.load_s if model.load_s is not None else took_s
            model.load_s = known_s + LOAD_SMOOTHING * (took_s - known_s)
        else:
            self._actions.ended(transaction, "load", f"failed: {failure}", since_s, replica=transaction.replica)
            self._not_loaded(now_s, transaction, record)

    def _not_loaded(self, now_s: float, transaction: Transaction, record: ModelRecord) -> None:
        model, failure = self._catalogue.model(record.deployment), transaction.failure
        match transaction.fault:
            case Fault.UNWANTED | Fault.NONE:
                return
            case Fault.MODEL:
                failed = True
            case Fault.PLACE:
                model.excuses += 1
                model.retry_s = now_s + self._settings.excuse_pause_s
                failed = model.excuses >= self._settings.excuses_max
            case _:
                assert_never(transaction.fault)
        if failed:
            self._load_failed(now_s, record.deployment, failure, (transaction.worker, transaction.device))
        text = f"loading {record.name} on {transaction.worker}/{transaction.device} failed: {failure}"
        evidence = {"attempt": str(model.failures), "next_try_in_s": f"{max(0.0, model.retry_s - now_s):.0f}"}
        remedy = f"carpool explain {record.name}"
        self.alert(now_s, Severity.WARNING, "load-failed", record.name, text, remedy, **evidence)

    def _load_failed(self, now_s: float, deployment: DeploymentKey, failure: str, device: DeviceKey | None) -> None:
        model = self._catalogue.model(deployment)
        pause_s = min(self._settings.backoff_s_max, self._settings.backoff_s_min * 2.0 ** min(model.failures, 16))
        model.failures += 1
        model.failure = failure
        model.retry_s = now_s + pause_s
        model.failed_on = device
        model.excuses = model.early_deaths = 0

    def alert(
        self, now_s: float, severity: Severity, kind: str, scope: str, text: str, remedy: str, **evidence: str
    ) -> None:
        """Raises an alert, unless the same was raised lately."""
        if not self._transactions.orders.epoch or now_s - self._alerted.get((kind, scope), -math.inf) < ALERT_AGAIN_S:
            return
        self._alerted[(kind, scope)] = now_s
        at_unix_s = now_s + self._transactions.orders.unix_offset_s
        alert = Alert(
            at_unix_s=at_unix_s, severity=severity, kind=kind, scope=scope, text=text, evidence=evidence, remedy=remedy
        )
        self._out.append(RaiseAlert(alert))
