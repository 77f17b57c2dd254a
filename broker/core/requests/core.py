"""The gateway's side of the request protocol (ops/decisions/0004), as a pure core.

The gateway is the only judge of who runs what. Three facts carry everything:

* a request has one current *attempt*, and an attempt has at most one *holder*, noted before the claim is answered;
* only the holder's deltas of the current attempt, at the next index, reach the client;
* the work-queue never holds the only copy: a ticket can be published again at any moment, and every claim is judged here.

A holder is whoever claimed a request, or whom it was handed to (:mod:`broker.core.requests.links`).
``broker.core.requests.live`` has the state table.
"""

from __future__ import annotations

from collections import OrderedDict
from math import ceil, inf
from typing import assert_never

from broker.core.requests import events as ev
from broker.core.requests.agenda import Agenda
from broker.core.requests.demand import DemandLedger, within_slo
from broker.core.requests.links import Link, Links
from broker.core.requests.live import QUEUED, TRANSITIONS, LiveRequest, State, Taken
from kvcache.core.prefix_index import PrefixIndex
from subjects import messages as m
from subjects.ids import DeploymentKey, IngressId, ModelKey, ReplicaId, RequestId, model_key

DEAD_MAX = 4096
"""So many dead incarnations are remembered; the pool's digest goes on naming the recent ones."""
RETRY_AFTER_S = 5
"""What a refused client is told when the pool has no estimate."""
STRESS_EVERY_S = 1.0
"""Cadence of TWU's sum: each time all running requests are looked at."""


class RequestCore:
    """Owns every request of one gateway from its first byte to its last."""

    def __init__(
        self, ingress: IngressId, *, continuation_enabled: bool = False, prefixes: PrefixIndex | None = None
    ) -> None:
        """``prefixes`` is read here and fed by others; without it no prefix decides where a request goes."""
        self._ingress = ingress
        self._continuation_enabled = continuation_enabled
        self._live: dict[RequestId, LiveRequest] = {}
        self._stored: dict[ModelKey, dict[RequestId, None]] = {}
        self._links = Links(prefixes)
        self._recent: OrderedDict[RequestId, tuple[float, m.RefusalReason]] = OrderedDict()
        self._dead: OrderedDict[ReplicaId, None] = OrderedDict()
        self._models: dict[DeploymentKey, m.PoolModel] = {}
        self._agenda: Agenda[RequestId] = Agenda()
        self._demand = DemandLedger()
        self._stressed_s = 0.0
        self._held_due_s = inf
        self._held_sent = 0
        self._round_trip_s = -inf
        self._silence_counts_from_s = -inf
        self._shutdown_s = inf
        self._out: list[ev.RequestCommand] = []
        """What the step that runs asks for."""

    # ---------------------------------------------------------------------------------------------------------- views

    @property
    def next_wake_s(self) -> float | None:
        """When a ``Ticked`` is due, or None when nothing is."""
        due_s = min(self._held_due_s, self._shutdown_s if self._live else inf)
        agenda_s = self._agenda.next_s
        due_s = due_s if agenda_s is None else min(due_s, agenda_s)
        return None if due_s == inf else due_s

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do: no request, and no replica that still has to learn that it is not wanted."""
        return not (self._live or self._links.links or self._stored or len(self._agenda))

    def state_of(self, request: RequestId) -> State | None:
        """The state of a request, or None when it has ended or was never here."""
        live = self._live.get(request)
        return None if live is None else live.state

    def waiting_models(self) -> tuple[ModelKey, ...]:
        """Models with stored tickets, whose streams are worth a ``QueueChecked`` (about every second), in order of key."""
        return tuple(sorted(self._stored))

    def take_demand(self, now_s: float) -> tuple[m.ModelDemand, ...]:
        """Waiting and running now, and what arrived and ended since the last call, for the telemetry of the gateway."""
        if now_s - self._stressed_s >= STRESS_EVERY_S:
            self._stressed_s = now_s
            for live in self._live.values():
                if live.state is State.RUNNING:
                    self._demand.stressed(live.profile, live.stress(now_s))
        return self._demand.take(now_s)

    # ----------------------------------------------------------------------------------------------------------- step

    def step(self, now_s: float, event: ev.RequestEvent) -> list[ev.RequestCommand]:
        """Takes one event; returns what to do, in order. What is due is done first, so no handler meets a late request."""
        out: list[ev.RequestCommand] = []
        self._out = out
        self._do_what_is_due(now_s)
        match event:
            case ev.RequestSubmitted():
                self._submit(now_s, event)
            case ev.FramesReceived():
                self._take_frames(now_s, event.frames)
            case ev.TicketStored():
                self._ticket_stored(now_s, event)
            case ev.TicketNotStored():
                self._ticket_not_stored(now_s, event)
            case ev.HandLost():
                live = self._live.get(event.request)
                if live is not None and live.state is State.RUNNING and live.attempt == event.attempt:
                    self._not_handed(now_s, live, "its replica is out of reach")
            case ev.ClaimReceived():
                self._judge_claim(now_s, event)
            case ev.ClientLeft():
                if (live := self._live.get(event.request)) is not None:
                    self._end(now_s, live, ev.Cancelled())
            case ev.PoolChanged():
                self._pool_changed(now_s, event.digest)
            case ev.BusReconnected():
                self._silence_counts_from_s = now_s + ev.RECONNECT_GRACE_S
                for live in list(self._live.values()):
                    if live.state is not State.RUNNING:
                        self._publish(now_s, live)
            case ev.QueueChecked():
                for request in list(self._stored.get(event.model, ())):
                    live = self._live[request]
                    if live.stored is not None and live.stored.created != event.created:
                        self._publish(now_s, live)
            case ev.BusRoundTripMade():
                self._round_trip_s = now_s
            case ev.ShutdownStarted():
                self._shutdown_s = event.deadline_s
            case ev.Ticked():
                pass
            case _:
                assert_never(event)
        return out

    def _do_what_is_due(self, now_s: float) -> None:
        while (request := self._agenda.pop_due(now_s)) is not None:
            live = self._live[request]
            if now_s >= live.deadline_s:
                gone = ev.Failed(504, "the request's deadline has passed", type="timeout_error", code="deadline_exceeded")
                self._end(now_s, live, gone)
            elif live.state is not State.RUNNING and now_s >= live.wait_until_s:
                self._end(now_s, live, self._no_capacity(live, "no replica had room in time"))
            elif live.state is State.PARKED and self._links.holds_out_for(live) is not None:
                self._holds_out_no_more(now_s, live)
            elif live.state is State.PARKED and not self._links.waits_in_vain(now_s, live):
                live.retry_s = now_s + ev.PARK_S
                self._agenda.set(request, live.due_s())
            elif live.state is State.PARKED:
                self._publish(now_s, live)
            elif live.state is State.UNSTORED:
                self._send_ticket(now_s, live)
            elif live.state is State.STORED:
                self._yield(now_s, live)
        if now_s >= self._held_due_s:
            self._send_held(now_s)
        if now_s >= self._shutdown_s:
            for live in list(self._live.values()):
                over = ev.Failed(503, "the gateway is shutting down", code="shutting_down", retry_after_s=1)
                self._end(now_s, live, over)
        while self._recent and next(iter(self._recent.values()))[0] <= now_s:
            self._recent.popitem(last=False)

    # ----------------------------------------------------------------------------------------------- before the grant

    def _submit(self, now_s: float, event: ev.RequestSubmitted) -> None:
        assert event.request not in self._live, "request ids are never reused"
        live = LiveRequest(
            request=event.request,
            profile=event.profile,
            body=event.body,
            cache_salt=event.cache_salt,
            submitted_s=now_s,
            wait_bound_s=event.wait_until_s - now_s,
            wait_until_s=event.wait_until_s,
            deadline_s=event.deadline_s,
            yields_at_s=event.yields_at_s,
            sla=event.sla,
            adapter=event.adapter,
            options=event.options,
            prefix=event.prefix,
            waits_since_s=now_s,
        )
        self._live[event.request] = live
        self._demand.arrived(live.profile)
        model = self._models.get(live.profile.deployment)
        if model is not None and model.refusal:
            self._end(now_s, live, self._refused_by_pool(model))
        elif not self._links.can_be_handed(live):
            self._publish(now_s, live)
        elif not self._links.has_parked(live.profile.deployment) and self._hand_over(now_s, live):
            pass
        elif self._links.holds_out_for(live) is not None:
            self._move(now_s, live, State.PARKED)
        elif not self._links.may_park(now_s, live):
            self._publish(now_s, live)
        else:
            live.retry_s = now_s + ev.PARK_S
            self._move(now_s, live, State.PARKED)

    def _hand_over(self, now_s: float, live: LiveRequest) -> bool:
        """Gives a request to the replica with the most room, or to the one with its prefix, if there is one. Or has it wait
        for that one, until ``live.retry_s``."""
        choice = self._links.pick(now_s, live)
        if choice.waits_for is not None:
            self._links.holds_out(live, choice.waits_for)
            live.retry_s = now_s + choice.wait_s_max
            return False
        replica = choice.replica
        grant = live.grant(0) if replica is not None else None
        if replica is None or grant is None:
            return False
        waited_s = now_s - live.waits_since_s
        number = self._links.book(replica, live)
        self._hold(now_s, live, replica)
        hand = m.Hand(number=number, ingress=self._ingress, profile=live.profile, grant=grant)
        granted = ev.RecordGrant(live.request, live.attempt, replica, waited_s, choice.tokens, choice.why)
        self._out += (ev.HandOver(replica, hand), granted)
        return True

    def _holds_out_no_more(self, now_s: float, live: LiveRequest) -> None:
        """The replica with its prefix has had no room in time: whoever has some gets it now, else it waits like others."""
        self._links.holds_out(live, None)
        live.may_hold_out = False
        if self._hand_over(now_s, live):
            return
        if self._links.may_park(now_s, live) and not self._links.waits_in_vain(now_s, live):
            live.retry_s = now_s + ev.PARK_S
            self._agenda.set(live.request, live.due_s())
        else:
            self._publish(now_s, live)

    def _not_handed(self, now_s: float, live: LiveRequest, why: str) -> None:
        """It was handed over and never begun: no loss, and what it is told to next is the queue."""
        if live.holder is not None and (link := self._links.links.get(live.holder)) is not None:
            link.room = None
        if not live.sent_in_attempt:
            self._restart(now_s, live, why, handed=True)

    def _publish(self, now_s: float, live: LiveRequest) -> None:
        """Under a new publication number, since the work-queue swallows a message id that it has seen."""
        live.publication += 1
        self._send_ticket(now_s, live)

    def _send_ticket(self, now_s: float, live: LiveRequest) -> None:
        live.publication = max(1, live.publication)
        live.retry_s = inf
        self._move(now_s, live, State.PUBLISHING)
        message_id = f"{live.request}.{live.attempt}.{live.publication}"
        ttl_s = max(1, ceil(min(live.wait_until_s, live.deadline_s) - now_s))
        ticket = m.Ticket(
            request=live.request,
            attempt=live.attempt,
            publication=live.publication,
            ingress=self._ingress,
            profile=live.queued_as,
        )
        self._out.append(ev.PublishTicket(ticket, message_id, ttl_s))

    def _yield(self, now_s: float, live: LiveRequest) -> None:
        """Those who can still meet their target go first. A replica that pulled the old ticket may claim it all the same."""
        assert live.stored is not None
        self._demand.stopped_waiting(live.queued_as, live.request)
        live.yields()
        self._demand.waits(live.queued_as, live.request, live.waits_since_s)
        if live.has_yielded:
            self._out.append(ev.DeleteTicket(live.stored))
            self._publish(now_s, live)
        else:
            self._agenda.set(live.request, live.due_s())

    def _ticket_stored(self, now_s: float, event: ev.TicketStored) -> None:
        live = self._live.get(event.request)
        if live is None or (live.attempt, live.publication) != (event.attempt, event.publication):
            # It ended, or was published again, while this copy was on its way.
            self._out.append(ev.DeleteTicket(event.stored))
        elif live.state is State.PUBLISHING:
            live.stored = event.stored
            self._move(now_s, live, State.STORED)

    def _ticket_not_stored(self, now_s: float, event: ev.TicketNotStored) -> None:
        live = self._live.get(event.request)
        if live is None or live.state is not State.PUBLISHING:
            return
        if (live.attempt, live.publication) != (event.attempt, event.publication):
            return
        match event.reason:
            case ev.NotStoredReason.QUEUE_FULL:
                self._end(now_s, live, self._no_capacity(live, "the queue of this model is full"))
                return
            case ev.NotStoredReason.QUEUE_MISSING:
                self._out.append(ev.EnsureQueue())
            case ev.NotStoredReason.BUS_UNAVAILABLE | ev.NotStoredReason.TIMEOUT:
                pass
            case _:
                assert_never(event.reason)
        # It may have been stored after all: the retry keeps the message id, so that it is not stored twice.
        live.retry_s = now_s + ev.PUBLISH_RETRY_S
        self._move(now_s, live, State.UNSTORED)

    def _judge_claim(self, now_s: float, event: ev.ClaimReceived) -> None:
        claim = event.claim
        verdict = self._verdict(now_s, claim)
        if isinstance(verdict, m.RefusalReason):
            refusal = m.Refusal(request=claim.request, attempt=claim.attempt, reason=verdict)
            self._out.append(ev.AnswerClaim(event.token, refusal))
            return
        live, reply = verdict
        if live.better_elsewhere(now_s, claim.replica, adapters=claim.adapters):
            self._leave_to_others(now_s, live, event)
            return
        self._out.append(ev.AnswerClaim(event.token, reply))
        if live.state is State.RUNNING:
            return
        waited_s = now_s - live.waits_since_s
        self._hold(now_s, live, claim.replica)
        link = self._links.links[claim.replica]
        link.adapters = claim.adapters
        link.heard()
        self._out.append(ev.RecordGrant(live.request, live.attempt, claim.replica, waited_s))

    def _leave_to_others(self, now_s: float, live: LiveRequest, event: ev.ClaimReceived) -> None:
        """The refusal takes the ticket off the queue, so another one follows; after a pause, since the same replica may ask
        again."""
        refusal = m.Refusal(request=live.request, attempt=live.attempt, reason=m.RefusalReason.UNKNOWN)
        self._out.append(ev.AnswerClaim(event.token, refusal))
        if live.stored is not None:
            self._out.append(ev.DeleteTicket(live.stored))
        if live.state in QUEUED:
            live.publication += 1  # the work-queue swallows a number that it has seen
        if live.state in (State.PUBLISHING, State.STORED):
            live.retry_s = now_s + ev.PUBLISH_RETRY_S
            self._move(now_s, live, State.UNSTORED)

    def _verdict(self, now_s: float, claim: m.Claim) -> m.RefusalReason | tuple[LiveRequest, m.ClaimReply]:
        if claim.replica in self._dead:
            return m.RefusalReason.DEAD
        live = self._live.get(claim.request)
        if live is None:
            return self._recent.get(claim.request, (now_s, m.RefusalReason.UNKNOWN))[1]
        if claim.attempt != live.attempt:
            return m.RefusalReason.STALE_ATTEMPT if claim.attempt < live.attempt else m.RefusalReason.UNKNOWN
        if live.state is State.RUNNING and live.holder != claim.replica:
            return m.RefusalReason.TAKEN
        grant = live.grant(claim.part)
        if grant is None or (claim.part > 0 and live.state is not State.RUNNING):
            return m.RefusalReason.UNKNOWN
        return live, grant

    def _hold(self, now_s: float, live: LiveRequest, replica: ReplicaId) -> None:
        live.holder = replica
        live.stored = None
        live.retry_s = inf
        self._move(now_s, live, State.RUNNING)
        self._link(now_s, replica).running[live.request] = None
        self._links.serves(replica, live.profile.deployment)
        self._links.goes_to(replica, live)

    # ------------------------------------------------------------------------------------------------ after the grant

    def _take_frames(self, now_s: float, frames: m.Frames) -> None:
        link = self._links.links.get(frames.replica)
        if link is None:
            # It holds something that we gave up while it was out of reach: ``Held`` tells it that nothing is wanted.
            link = self._link(now_s, frames.replica)
            link.linger_until_s = now_s + ev.HELD_LINGER_S
        link.heard()
        link.room_is(now_s, frames.room)
        unwanted: dict[tuple[RequestId, int], None] = {}
        for delta in frames.deltas:
            live = self._held_by(frames.replica, delta.request, delta.attempt)
            if live is None:
                unwanted[delta.request, delta.attempt] = None
            elif delta.failure is not None:
                self._engine_failed(now_s, live, delta.failure)
            elif 0 <= delta.choice < len(live.choices):
                self._take_delta(now_s, live, frames.replica, delta)
        for gone in frames.gone:
            live = self._held_by(frames.replica, gone.request, gone.attempt)
            if live is not None and gone.full:
                self._not_handed(now_s, live, "its replica had no room")
            elif live is not None:
                self._lose(now_s, live, "its replica does not have it")
        for model in self._links.models_of(frames.replica) if frames.room is not None and self._links.any_parked else ():
            self._serve_parked(now_s, model, frames.replica)
        for request, attempt in unwanted:
            self._out.append(ev.SendBack(frames.replica, m.Cancel(ingress=self._ingress, request=request, attempt=attempt)))
            link.linger_until_s = now_s + ev.HELD_LINGER_S

    def _serve_parked(self, now_s: float, model: DeploymentKey, replica: ReplicaId) -> None:
        """A replica has said what it would take. Who is first and finds no room holds up those behind, but for those who
        wait for one replica only: they are asked when it or its neighbour speaks, and hold up nobody."""
        for request in self._links.parked(model):
            live = self._live[request]
            if not self._links.concerns(replica, live):
                continue
            if self._hand_over(now_s, live):
                continue
            if self._links.holds_out_for(live) is None:
                break
            self._agenda.set(request, live.due_s())

    def _held_by(self, replica: ReplicaId, request: RequestId, attempt: int) -> LiveRequest | None:
        live = self._live.get(request)
        if live is None or live.state is not State.RUNNING or live.holder != replica or live.attempt != attempt:
            return None
        return live

    def _take_delta(self, now_s: float, live: LiveRequest, replica: ReplicaId, delta: m.Delta) -> None:
        match live.take(delta):
            case Taken.REPEATED:
                pass
            case Taken.GAP:
                for choice, from_index in live.gaps(now_s, delta):
                    resend = m.Resend(
                        ingress=self._ingress,
                        request=live.request,
                        attempt=live.attempt,
                        choice=choice,
                        from_index=from_index,
                    )
                    self._out.append(ev.SendBack(replica, resend))
            case Taken.ACCEPTED:
                live.first_sent_s = now_s if live.first_sent_s is None else live.first_sent_s
                self._out.append(ev.Deliver(live.request, delta))
                if delta.end:
                    self._end(now_s, live, ev.Finished(delta.usage))
            case _ as never:
                assert_never(never)

    def _engine_failed(self, now_s: float, live: LiveRequest, failure: m.Failure) -> None:
        match failure.kind:
            case m.FailureKind.BAD_REQUEST:
                # Never fed to a second replica: what is wrong with it is wrong everywhere.
                status = failure.status if 400 <= failure.status < 500 else 400
                bad = ev.Failed(status, failure.message, "invalid_request_error", failure.code, failure.param)
                self._end(now_s, live, bad)
            case m.FailureKind.BUSY if not live.sent_in_attempt:
                self._restart(now_s, live, "the engine was busy", pause_s=ev.PUBLISH_RETRY_S)
            case m.FailureKind.SICK | m.FailureKind.BUSY:
                live.unfit = live.holder
                self._lose(now_s, live, failure.message, code=failure.code or "engine_failed")
            case _:
                assert_never(failure.kind)

    def _lose(self, now_s: float, live: LiveRequest, why: str, *, code: str = "replica_lost") -> None:
        """Its holder will not finish it: go on elsewhere where that is right, else end it in one clear way."""
        live.losses += 1
        if live.all_closed():
            self._end(now_s, live, ev.Finished(None))  # Only the usage was missing; the answer is whole.
        elif live.sent_in_attempt and not (self._continuation_enabled and live.continuable()):
            message = f"the answer broke off and cannot be continued elsewhere: {why}"
            self._end(now_s, live, ev.Failed(502, message, code=code))
        elif live.losses >= ev.LOSSES_MAX:
            self._end(now_s, live, ev.Failed(502, f"lost {live.losses} times, last because: {why}", code=code))
        else:
            live.wait_until_s = now_s + live.wait_bound_s
            self._restart(now_s, live, why)

    def _restart(self, now_s: float, live: LiveRequest, why: str, *, pause_s: float = 0.0, handed: bool = False) -> None:
        self._let_go(now_s, live)
        waits_since_s = live.waits_since_s
        live.begin_attempt(now_s)
        if handed:
            live.waits_since_s = waits_since_s  # it has waited all the time
        self._out.append(ev.RecordRestart(live.request, live.attempt, why, handed))
        if now_s >= live.wait_until_s:
            self._end(now_s, live, self._no_capacity(live, why))
        elif pause_s:
            live.retry_s = now_s + pause_s
            self._move(now_s, live, State.UNSTORED)
        else:
            self._publish(now_s, live)

    def _let_go(self, now_s: float, live: LiveRequest) -> None:
        """The holder does not have it any more as far as we are concerned; it goes on hearing ``Held`` for a while."""
        if live.holder is not None and (link := self._links.links.get(live.holder)) is not None:
            link.running.pop(live.request, None)
            link.linger_until_s = now_s + ev.HELD_LINGER_S

    # -------------------------------------------------------------------------------------------------------- the end

    def _end(self, now_s: float, live: LiveRequest, outcome: ev.Outcome) -> None:
        if live.stored is not None:
            self._out.append(ev.DeleteTicket(live.stored))
        if live.state is State.RUNNING and live.holder is not None:
            if not isinstance(outcome, ev.Finished):
                cancel = m.Cancel(ingress=self._ingress, request=live.request, attempt=live.attempt)
                self._out.append(ev.SendBack(live.holder, cancel))
            self._let_go(now_s, live)
        self._move(now_s, live, None)
        del self._live[live.request]
        match outcome:
            case ev.Finished():
                first_s = now_s if live.first_sent_s is None else live.first_sent_s
                output_tokens = outcome.usage.completion_tokens if outcome.usage else sum(live.next_indexes())
                ttft_s, latency_s = first_s - live.submitted_s, now_s - live.submitted_s
                self._demand.stressed(live.profile, live.stress(now_s))
                self._demand.finished(
                    live.profile,
                    output_tokens=output_tokens,
                    ttft_s=ttft_s,
                    latency_s=latency_s,
                    within_slo=live.sla is not None and within_slo(live.sla, ttft_s, latency_s, output_tokens),
                )
            case ev.Failed():
                self._demand.failed(live.profile)
                if outcome.status in (503, 504):
                    self._remember(now_s, live.request, m.RefusalReason.EXPIRED)
            case ev.Cancelled():
                self._remember(now_s, live.request, m.RefusalReason.CANCELLED)
            case _:
                assert_never(outcome)
        self._out.append(ev.EndRequest(live.request, outcome))

    def _remember(self, now_s: float, request: RequestId, reason: m.RefusalReason) -> None:
        self._recent[request] = (now_s + ev.RECENT_ENDS_S, reason)
        while len(self._recent) > ev.RECENT_ENDS_MAX:
            self._recent.popitem(last=False)

    def _no_capacity(self, live: LiveRequest, why: str) -> ev.Failed:
        model = self._models.get(live.profile.deployment)
        retry_s = ceil(model.estimated_wait_s) if model is not None and model.estimated_wait_s > 0 else RETRY_AFTER_S
        return ev.Failed(503, f"no capacity: {why}", code="no_capacity", retry_after_s=retry_s)

    @staticmethod
    def _refused_by_pool(model: m.PoolModel) -> ev.Failed:
        if model.permanent:
            return ev.Failed(503, model.refusal, code="model_cannot_fit")
        return ev.Failed(503, model.refusal, code="model_unavailable", retry_after_s=model.retry_after_s or RETRY_AFTER_S)

    # ------------------------------------------------------------------------------------------------ replicas, states

    def _pool_changed(self, now_s: float, digest: m.PoolDigest) -> None:
        self._models = {model.deployment: model for model in digest.models}
        ready: dict[DeploymentKey, dict[ReplicaId, float]] = {}
        for one in digest.replicas:
            if one.state is m.ReplicaState.READY and one.weight > 0:
                ready.setdefault(one.deployment, {})[one.replica] = one.weight
        self._links.ready_are(ready)
        for replica in digest.dead:
            if replica not in self._dead:
                self._dead[replica] = None
                self._bury(now_s, replica)
        while len(self._dead) > DEAD_MAX:
            self._dead.popitem(last=False)
        refusals = {deployment for deployment, model in self._models.items() if model.refusal}
        for live in list(self._live.values()) if refusals else ():
            if live.state is not State.RUNNING and live.profile.deployment in refusals:
                self._end(now_s, live, self._refused_by_pool(self._models[live.profile.deployment]))

    def _bury(self, now_s: float, replica: ReplicaId) -> None:
        link = self._links.forget(replica)
        for request in list(link.running) if link is not None else ():
            self._lose(now_s, self._live[request], "its replica died")
        if not self._links.links:
            self._held_due_s = inf

    def _link(self, now_s: float, replica: ReplicaId) -> Link:
        if self._held_due_s == inf:
            self._held_due_s = now_s + ev.HELD_EVERY_S
        return self._links.link(replica)

    def _send_held(self, now_s: float) -> None:
        """One beat to all. Silence is counted per beat, and only while our own way to the bus is known to work."""
        bus_works = now_s - self._round_trip_s <= ev.ROUND_TRIP_FRESH_S and now_s >= self._silence_counts_from_s
        for replica, link in list(self._links.links.items()):
            if link.awaiting_frame and bus_works:
                link.unanswered += 1
            silent = link.unanswered >= ev.HELD_UNANSWERED_MAX
            for request in list(link.running) if silent else ():
                self._lose(now_s, self._live[request], "its replica fell silent")
            if not link.running and now_s >= link.linger_until_s and (silent or not link.awaiting_frame):
                self._links.forget(replica)
                continue
            self._held_sent += 1
            wanted = [self._live[request] for request in link.running]
            entries = tuple(
                m.HeldEntry(request=live.request, attempt=live.attempt, next_indexes=live.next_indexes()) for live in wanted
            )
            held = m.Held(ingress=self._ingress, sequence=self._held_sent, entries=entries, hands=link.hands)
            self._out.append(ev.SendBack(replica, held))
            link.awaiting_frame = True
        self._held_due_s = now_s + ev.HELD_EVERY_S if self._links.links else inf

    def _move(self, now_s: float, live: LiveRequest, state: State | None) -> None:
        """The only place where a state changes; keeps the views and the agenda in step with it."""
        assert state in TRANSITIONS[live.state], f"{live.state} -> {state}"
        was_waiting = live.state not in (None, State.RUNNING)
        waits = state not in (None, State.RUNNING)
        key = model_key(live.profile.deployment)
        if live.state is State.STORED:
            live.stored = None
            self._stored[key].pop(live.request)
            if not self._stored[key]:
                del self._stored[key]
        if state is State.STORED:
            self._stored.setdefault(key, {})[live.request] = None
        self._links.moved(now_s, live, state)
        if waits and not was_waiting:
            self._demand.waits(live.queued_as, live.request, now_s)
        elif was_waiting and not waits:
            self._demand.stopped_waiting(live.queued_as, live.request)
        if (state is State.RUNNING) != (live.state is State.RUNNING):
            self._demand.runs(live.profile, 1 if state is State.RUNNING else -1)
        live.state = state
        if state is None:
            self._agenda.drop(live.request)
        else:
            self._agenda.set(live.request, live.due_s())
