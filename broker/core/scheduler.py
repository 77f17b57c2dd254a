"""The scheduler: what happens in the pool, the policy's decisions, and the commands that carry them out.

1. Nothing is decided before this scheduler leads, has the registry, and has heard every worker that beats.
2. One policy decides for all models (``plan.coordinator``): it sees the pool as a view and answers with actions. What is
   checked here whatever it says: room, devices, people's locks, pins, minimums, modes and pauses after failed loads.
3. What has to go in any case goes without it: replicas of models that nobody applied, dead ones that still exist, those on
   drained devices, drains that nobody finishes.
4. A load that fails backs off, doubling; its clients are told at once. Whoever left for it is wanted again like any model
   whose requests wait.
5. A model that no known device can ever hold is refused at once, with the numbers; one that could fit if pinned models or
   minimum replicas did not hold the room is refused until they do not. Where several names share a model, that holds when
   no record of it fits; else the first that fits is the one that is loaded, for all of them.
"""

from __future__ import annotations

import math
from typing import assert_never

from broker.core.actions import Actions
from broker.core.digest import DigestBuilder
from broker.core.outcomes import Outcomes
from broker.core.plan.availability import Availability, Outlook
from broker.core.plan.coordinator import Coordinator
from broker.core.plan.costs import CostBook
from broker.core.plan.fairness import Fairness
from broker.core.plan.feasibility import Feasibility
from broker.core.plan.policy import Policy
from broker.core.plan.view import ViewBuilder
from broker.core.pool import events as ev
from broker.core.pool.catalogue import Catalogue
from broker.core.pool.journal import Course, resume
from broker.core.pool.state import Changes, Pool, Presence
from broker.core.pool.transactions import Transactions
from subjects import messages as m
from subjects.errors import place_of
from subjects.ids import DeploymentKey

MEASURES_EVERY_S = 1.0
"""How often it is looked who should measure costs."""
DEVICES_AT_ONCE_MAX = 64
DECISION_GAP_S = 20e-6
"""In a pool of more than so many devices what happens is gathered this long, times devices, and then decided together; and
a look at once comes no sooner than half of the usual time after another."""


class SchedulerCore:
    """Pure: events in, commands out. One instance per scheduler process, leader or standby."""

    def __init__(self, settings: ev.SchedulerSettings | None = None, policy: Policy | None = None) -> None:
        """``policy``: another one than the coordinator, for tests and comparisons."""
        self.settings = settings or ev.SchedulerSettings()
        self._out: list[ev.SchedulerCommand] = []
        """What must be done by the step of this moment; all parts write to it."""
        self.pool = Pool(self.settings)
        self.transactions = Transactions(self.settings, self.pool, self._out)
        self.catalogue = Catalogue()
        self.feasibility = Feasibility(self.settings, self.pool, self.catalogue)
        self.availability = Availability(self.settings, self.pool, self.catalogue, self.feasibility, self.transactions)
        self.fairness = Fairness()
        self.digests = DigestBuilder(self.settings, self.pool, self.fairness)
        self.actions = Actions(
            self.settings, self.pool, self.catalogue, self.feasibility, self.transactions, self.digests, self._out
        )
        self.outcomes = Outcomes(
            self.settings, self.pool, self.catalogue, self.transactions, self.actions, self.digests, self._out
        )
        self.costs = CostBook(self.pool)
        self.transactions.orders.measures = self.costs.to_load
        self.views = ViewBuilder(self.settings, self.pool, self.catalogue, self.feasibility, self.transactions, self.costs)
        self.policy = policy or Coordinator()
        self.notes: dict[DeploymentKey, str] = {}
        """Per model the policy's last word on why it has what it has."""
        self.epoch: int | None = None
        """Ours while we lead."""
        self.next_wake_s = 0.0
        self._leads_since_s = 0.0
        self._listening = True
        self._unfinished: tuple[m.JournalEntry, ...] = ()
        self._undecided = False
        self._gathers_until_s = -math.inf
        self._measures_due_s = -math.inf
        self._scanned: tuple[int, int] | None = None
        self._told: tuple[int, int, int, int] | None = None
        self._looked_s = -math.inf
        self._look_now = False
        self._starved = False
        """Whether a model without any replica waited at the last decision: what happens then is news for the policy."""
        self._seen = (0, 0)

    @property
    def leads(self) -> bool:
        """Whether this scheduler leads."""
        return self.epoch is not None

    # ------------------------------------------------------------------------------------------------------------ events

    def step(self, now_s: float, event: ev.SchedulerEvent) -> list[ev.SchedulerCommand]:
        """Takes one event and returns what must be done, in order."""
        self._out.clear()
        decide = True
        match event:
            case ev.BeatSeen():
                decide = self.pool.beat(event.worker, event.epoch_seen)
            case ev.WorkerReported():
                changes = self.pool.report(now_s, event.snapshot)
                self._reported(now_s, changes)
                self._observe_costs(now_s, event.snapshot)
                if event.snapshot.kv is not None and event.snapshot.kv.note:
                    self._kv_is_short(now_s, event.snapshot, event.snapshot.kv)
                decide = changes.any
            case ev.IngressReported():
                decide = self._ingress(now_s, event)
            case ev.CommandAnswered():
                self._answered(now_s, event)
                decide = event.reply.outcome is m.CommandOutcome.REFUSED
            case ev.CommandUnanswered():
                decide = False  # The command is sent again, or given up, in its time.
            case ev.OperationSeen():
                decide = self._operation_seen(now_s, event)
            case ev.RegistryLoaded():
                self.catalogue.load(event.records)
            case ev.CostsKept():
                self.costs.restore(event.entries)
            case ev.ProfileAsked():
                self.costs.profile(now_s, event.deployment, event.for_s, event.batch_max)
                decide = True
            case ev.ModelApplied():
                if self.catalogue.records.get(event.record.name) != event.record:  # A watch can repeat what we know.
                    self.catalogue.apply(event.record)
            case ev.ModelRemoved():
                removed = self.catalogue.records.get(event.name)
                self.catalogue.remove(event.name)
                if removed is not None and self.catalogue.of_deployment(removed.deployment) is None:
                    self.costs.forget(removed.deployment)
            case ev.OverridesChanged():
                self.catalogue.override(event.overrides)
                self.pool.override(event.overrides)
            case ev.UnloadRequested():
                self._unload_requested(now_s, event.name)
            case ev.KvOrdered():
                if self.leads and event.worker in self.pool.workers:
                    self.actions.ask_kv(now_s, event.worker, event.deployment, event.order)
            case ev.DrainRequested():
                self._drain_requested(now_s, event)
            case ev.JournalRestored():
                self._unfinished = event.entries
                decide = False
            case ev.DigestRestored():
                self.digests.restore(event.digest)
            case ev.LeadershipGained():
                self.epoch = event.epoch
                self.transactions.lead(event.epoch)
                self._leads_since_s = now_s
                self._listening = True
                self.pool.inflow.take_flow()
            case ev.LeadershipLost():
                self.epoch = None
                self._unfinished = ()
                self.transactions.lead(0)
            case ev.HeaviestGiveWay():
                self.digests.give_way(frozenset(event.replicas))
                decide = False
            case ev.BusRoundTripMade():
                self.pool.round_trip(now_s)
                decide = False
            case ev.Ticked():
                self.transactions.orders.unix_offset_s = self.costs.unix_offset_s = event.unix_s - now_s
                self._tick(now_s)
            case _:
                assert_never(event)
        if self._seen != (self.catalogue.news, self.pool.layout):
            self._seen = (self.catalogue.news, self.pool.layout)
            self._look_now = True
        self._undecided |= decide
        if self._undecided and self.leads and (now_s >= self._gathers_until_s or isinstance(event, ev.Ticked)):
            self._undecided = False
            devices = len(self.pool.devices(usable=False))
            self._gathers_until_s = now_s + (DECISION_GAP_S * devices if devices > DEVICES_AT_ONCE_MAX else 0.0)
            self.outcomes.settle(now_s)
            if self._may_decide(now_s):
                if self._unfinished:
                    self._resume(now_s)
                self._decide(now_s)
            self._publish(now_s)
        journal = self.transactions.orders.take_journal()
        return [*([ev.AppendJournal(journal)] if journal else ()), *self._out]

    def _ingress(self, now_s: float, event: ev.IngressReported) -> bool:
        if self.pool.inflow.is_news(event.telemetry):
            records = self.catalogue.speaker
            self.fairness.take(event.telemetry.demand, records)
            self.costs.served(event.telemetry.demand, records)
            for row in event.telemetry.demand:
                # What still runs leaves with the replica that a person unloads.
                if row.waiting and row.deployment in records:
                    self.catalogue.model(row.deployment).held_down = False
        starts = self.pool.inflow.take(now_s, self.pool.heard_s, event.telemetry)
        self._look_now |= any(self.feasibility.replicas_count(deployment) == 0 for deployment in starts)
        return bool(starts)

    def _tick(self, now_s: float) -> None:
        self.next_wake_s = now_s + self.settings.tick_s
        self.fairness.look(now_s, self.catalogue.speaker)
        self.digests.notes += self.fairness.news
        for worker in self.pool.judge(now_s):
            self.transactions.worker_died(now_s, worker)
            lost = [replica.replica for replica in self.pool.replicas_of(worker.worker)]
            text = f"worker {worker.worker} is silent and counts as dead, with {len(lost)} replicas"
            evidence = {"replicas": " ".join(lost), "silence": f"{self.settings.dead_s:g} s or more"}
            remedy = "carpool get devices"
            self.outcomes.alert(now_s, m.Severity.CRITICAL, "worker-dead", worker.worker, text, remedy, **evidence)
        if self.pool.mass_silence:
            text = "many workers fell silent together; nothing is declared dead yet, this may be the network"
            self.outcomes.alert(now_s, m.Severity.CRITICAL, "mass-silence", "pool", text, "carpool get devices")
        if self.leads:
            self.transactions.tick(now_s)

    def _reported(self, now_s: float, changes: Changes) -> None:
        self._look_now |= self._starved and bool(changes.appeared or changes.ended or changes.vanished)
        for replica in changes.appeared:
            self.transactions.replica_seen(now_s, replica)
        for replica in changes.changed:
            ours = self.transactions.replica_seen(now_s, replica)
            failed = not ours and replica.report.state is m.ReplicaState.FAILED
            if failed and replica.replica in self.pool.leaving:
                self.pool.declare_dead(replica.replica)  # It did not survive its drain; its requests go on elsewhere.
            elif failed:
                self.outcomes.lost(now_s, replica, replica.report.failure)
        for replica in changes.ended:
            self.transactions.replica_seen(now_s, replica)
        for replica in changes.vanished:
            ours = self.transactions.replica_gone(now_s, replica.replica, "")
            # A failed one was counted before; one that drained for somebody else left as it should.
            if not ours and replica.report.state not in (m.ReplicaState.FAILED, m.ReplicaState.DRAINING):
                self.outcomes.lost(now_s, replica, "its worker lists it no more")

    def _kv_is_short(self, now_s: float, snapshot: m.WorkerSnapshot, kv: m.KvReport) -> None:
        """A worker's KV node does not run, or does without a tier: time is lost, no request is."""
        if snapshot.draining or kv.note == m.KV_STARTS:
            return
        worker = snapshot.worker
        if kv.running:
            kind, text = "kv-degraded", f"the KV node of {worker} does without something: {kv.note}"
        else:
            kind, text = "kv-node-down", f"the KV node of {worker} does not run ({kv.note}): its replicas compute everything"
        self.outcomes.alert(now_s, m.Severity.WARNING, kind, worker, text, "carpool get kv")

    def _answered(self, now_s: float, event: ev.CommandAnswered) -> None:
        self.pool.epoch_seen_max = max(self.pool.epoch_seen_max, event.reply.epoch_seen)
        if event.reply.outcome is m.CommandOutcome.STALE_EPOCH:
            if self.leads and self.transactions.orders.find(event.reply.operation) is not None:
                self._out.append(ev.Resign(f"a worker has obeyed epoch {event.reply.epoch_seen}, ours is {self.epoch}"))
            return
        self.transactions.answered(now_s, event.reply)

    def _operation_seen(self, now_s: float, event: ev.OperationSeen) -> bool:
        match event.event:
            case m.OperationProgressed():
                return False
            case m.CostsMeasured():
                self._costs_measured(now_s, event.event)
                return False
            case m.OperationEnded():
                self._look_now |= self._starved
                self.transactions.operation_ended(now_s, event.event)
            case m.ReplicaDied():
                self._look_now = True
                replica = self.pool.ended(event.event.replica)
                ours = self.transactions.replica_gone(now_s, event.event.replica, event.event.detail)
                if replica is not None and (not ours or replica.report.running):
                    self.pool.declare_dead(event.event.replica)
                if replica is not None and not ours and replica.report.state is not m.ReplicaState.FAILED:
                    self.outcomes.lost(now_s, replica, event.event.detail)
            case _:
                assert_never(event.event)
        return True

    def _costs_measured(self, now_s: float, event: m.CostsMeasured) -> None:
        record = self.catalogue.of_deployment(event.deployment)
        kept = self.costs.measured(now_s, event, record) if record is not None else None
        if kept is not None and self.leads:
            self._out.append(ev.KeepCosts(kept))

    def _observe_costs(self, now_s: float, snapshot: m.WorkerSnapshot) -> None:
        """Engines' steps correct costs; those that turn out to be wrong for good are told of and measured again."""
        for record, kind, account in self.costs.observe(now_s, snapshot, self.catalogue.speaker):
            text = f"steps of {record.name} on {kind or 'its devices'} take {account.ratio:.2f} times what its costs say"
            given = kind in record.costs
            remedy = f"carpool profile {record.name}" if given else "carpool get costs"
            self.digests.note(now_s, "costs", record.name, f"{text}; {'its file gives them' if given else 'measured again'}")
            evidence = {"ratio": f"{account.ratio:.3f}", "steps": str(account.steps)}
            self.outcomes.alert(now_s, m.Severity.WARNING, "costs-deviate", record.name, text, remedy, **evidence)

    def _unload_requested(self, now_s: float, name: str) -> None:
        if (record := self.catalogue.records.get(name)) is None or not self.leads:
            return
        self.catalogue.model(record.deployment).held_down = True
        for replica in sorted(self.pool.replicas_for(record.deployment), key=lambda r: r.replica):
            if not replica.dead:
                self.actions.retire(now_s, replica, "asked for by a person")

    def _drain_requested(self, now_s: float, event: ev.DrainRequested) -> None:
        if (replica := self.pool.replicas.get(event.replica)) is not None and self.leads:
            drain_s = 0.0 if event.interrupt else event.bound_s
            self.actions.retire(now_s, replica, "drained by a person", drain_s=drain_s)

    # --------------------------------------------------------------------------------------------- what earlier leaders left

    def _resume(self, now_s: float) -> None:
        """Goes on with what earlier leaders left unfinished, before anything new is decided."""
        entries, self._unfinished = self._unfinished, ()
        for resumption in resume(entries, self.pool, self.catalogue):
            refusal = ""
            if resumption.course is Course.GO_ON:
                refusal = self.actions.take_up(now_s, resumption)
                if not refusal:
                    continue
            failure = "" if resumption.course is Course.FINISHED else refusal or resumption.why
            self.transactions.orders.close(now_s, resumption.recorded.name, failure)

    # ---------------------------------------------------------------------------------------------------------- deciding

    def _may_decide(self, now_s: float) -> bool:
        if not self.catalogue.loaded:
            return False
        if self._listening:
            led_s = now_s - self._leads_since_s
            unheard = any(w.snapshot is None and w.presence is not Presence.DEAD for w in self.pool.workers.values())
            self._listening = led_s < self.settings.listen_s or (unheard and led_s < self.settings.listen_s_max)
        return not self._listening

    def _decide(self, now_s: float) -> None:
        self._starved = False
        for deployment, demand in self.feasibility.look(now_s).items():
            self._starved |= demand.waiting > 0 and self.feasibility.replicas_count(deployment) == 0
            if demand.any:
                self.catalogue.model(deployment).last_used_s = now_s
        self.catalogue.stand_back(self.feasibility.names_to_stand_back())
        self._drop_unwanted(now_s)
        self._retire_what_must_go(now_s)
        if self._policy_is_due(now_s):
            self._ask(now_s)
        self.transactions.start(now_s)
        self.outcomes.settle(now_s)

    def _policy_is_due(self, now_s: float) -> bool:
        # Half a millisecond: a tick of 100 ms may come a hair early by the clock, and must not wait for the one after.
        since_s = now_s - self._looked_s + 0.0005
        small = len(self.pool.devices(usable=False)) <= DEVICES_AT_ONCE_MAX
        at_once = self._look_now and (small or since_s >= self.settings.policy_look_s / 2)
        return at_once or since_s >= self.settings.policy_look_s

    def _ask(self, now_s: float) -> None:
        self._looked_s = now_s
        self._look_now = False
        try:
            decision = self.policy.decide(now_s, self.views.build(now_s))
        except (ArithmeticError, ValueError, LookupError, TypeError) as error:
            if not self.settings.outlives_policy:
                raise
            self._policy_failed(now_s, error)
            return
        if decision.notes:
            notes = self.notes | decision.notes
            self.notes = {name: note for name, note in notes.items() if self.catalogue.of_deployment(name) is not None}
        self.digests.weigh(decision.weights)
        self.actions.carry_out(now_s, decision.actions)

    def _policy_failed(self, now_s: float, error: Exception) -> None:
        """A policy's mistake costs its decision, not the scheduler: what serves goes on, and people are told."""
        text = f"no decision for the pool: {place_of(error)}"
        remedy = "look for a model with absurd costs among those applied last (carpool get models)"
        self.outcomes.alert(now_s, m.Severity.CRITICAL, "policy-failed", "scheduler", text, remedy, error=place_of(error))

    def _drop_unwanted(self, now_s: float) -> None:
        """A newcomer that still waits for its device is not loaded once nobody applies its model any more."""
        for transaction in list(self.transactions.running.values()):
            record = transaction.record
            if record is not None and self.catalogue.of_deployment(record.deployment) is None:
                self.transactions.cancel(now_s, transaction, "its model is not in the registry (any more)")

    def _retire_what_must_go(self, now_s: float) -> None:
        """Models nobody applied, replicas declared dead that still exist, drained devices, drains nobody finishes."""
        news = (self.pool.news, self.catalogue.news)
        if news == self._scanned:
            return  # Nothing of all this has changed.
        self._scanned = news
        for replica in list(self.pool.replicas_in_order()):
            worker = self.pool.workers[replica.worker]
            if replica.replica in self.pool.leaving or not worker.reachable or replica.report.state is m.ReplicaState.FAILED:
                continue
            record = self.catalogue.of_deployment(replica.report.deployment)
            drained, bound_s = self.pool.drained(replica)
            if replica.dead:
                self.actions.retire(now_s, replica, "declared dead while its worker was silent", forced=True)
            elif record is None:
                forced = replica.report.state is not m.ReplicaState.READY
                self.actions.retire(now_s, replica, "its model is not in the registry (any more)", forced=forced)
            elif drained and replica.report.state is m.ReplicaState.READY:
                self.actions.retire(now_s, replica, "its device is drained by a person", drain_s=bound_s)
            elif replica.report.state is m.ReplicaState.DRAINING:
                self.actions.retire(now_s, replica, "its drain was begun and nobody finishes it")

    # ----------------------------------------------------------------------------------------------------- digest, alerts

    def _publish(self, now_s: float) -> None:
        assert self.epoch is not None
        news = (self.epoch, self.pool.news, self.catalogue.news, self.digests.notes)
        if news == self._told and not self.digests.is_due(now_s):
            return
        self._told = news
        outlooks = {}
        may_decide = self._may_decide(now_s)
        for record in self.catalogue.by_name:
            # Any replica of a model serves all of its names, so that they have one outlook: that of who speaks for it.
            speaker = self.catalogue.of_deployment(record.deployment) or record
            outlook = self.availability.outlook(now_s, speaker) if may_decide else Outlook()
            if outlook.permanent:
                outlook = self.availability.outlook(now_s, record)  # None of them fits; each is told its own numbers.
            outlooks[record.name] = (record, outlook, self.costs.fastest(record))
            if outlook.permanent:
                text = f"{record.name} {outlook.refusal}"
                self.outcomes.alert(now_s, m.Severity.WARNING, "cannot-fit", record.name, text, "carpool get devices")
        if now_s >= self._measures_due_s:
            self._measures_due_s = now_s + MEASURES_EVERY_S
            self.digests.measures = self.costs.to_measure(now_s, self.catalogue.speaker)
        unix_offset_s = self.transactions.orders.unix_offset_s
        self._out.append(self.digests.build(now_s, self.epoch, unix_offset_s, outlooks))
